// One launch: select by any law, and gather; or select alone.
#include "fill_run.cuh"
#include "laws.cuh"

namespace gear {

// Names and probabilities; `mask`, if given, takes the steps of each window.
GEAR_CODE void select(const Job& job) {
    u64 step = read_step(job);
    i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < job.segments; i += stride) {
        Segment mine = AnyLaw::choose(job, step, i);
        job.names[2 * i] = mine.episode;
        job.names[2 * i + 1] = mine.start;
        if (job.mask) job.mask[i] = mine.real;
        AnyLaw::note(job, step, i, mine);
    }
}

}  // namespace gear

extern "C" __global__ void __launch_bounds__(256) laws_many(const __grid_constant__ gear::Job job) {
    gear::run_many<gear::AnyLaw>(job);
}
extern "C" __global__ void __launch_bounds__(256) laws_8(const __grid_constant__ gear::Job job) {
    gear::run<gear::AnyLaw, 8>(job);
}
extern "C" __global__ void __launch_bounds__(256) laws_16(const __grid_constant__ gear::Job job) {
    gear::run<gear::AnyLaw, 16>(job);
}
extern "C" __global__ void __launch_bounds__(256) laws_32(const __grid_constant__ gear::Job job) {
    gear::run<gear::AnyLaw, 32>(job);
}
extern "C" __global__ void __launch_bounds__(256) laws_select(const __grid_constant__ gear::Job job) {
    gear::select(job);
}
