// One launch: draw in any way, and gather; or draw alone.
#include "fill_run.cuh"

GEAR_KERNELS(sample, Every, Job)

extern "C" __global__ void __launch_bounds__(256) sample_alone(const __grid_constant__ gear::Job job) {
    gear::u64 step = gear::read_step(job);
    gear::i64 stride = (gear::i64)gridDim.x * blockDim.x;
    for (gear::i64 i = (gear::i64)blockIdx.x * blockDim.x + threadIdx.x; i < job.segments; i += stride) {
        gear::Segment mine = gear::Every::choose(job, step, i);
        job.names[2 * i] = mine.episode;
        job.names[2 * i + 1] = mine.start;
        gear::Every::note(job, i, mine);
    }
}
