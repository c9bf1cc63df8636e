// One launch: select and gather.  See fill.cuh; here is only how threads share the tasks.
#include "fill.cuh"

namespace gear {

// Every block reads the step before it takes a ticket, so whoever takes the last one knows that
// nobody will read the old step any more.  The next launch finds the counter one further.
GEAR_CODE u64 read_step(const Job& job) {
    __shared__ u64 shared_step;
    if (threadIdx.x == 0) {
        if (job.counter) {
            u64 step = *(const volatile u64*)job.counter;
            __threadfence();
            if (atomicAdd(job.ticket, 1ull) == gridDim.x - 1) {
                *(volatile u64*)job.ticket = 0;
                *(volatile u64*)const_cast<u64*>(job.counter) = step + 1;
            }
            shared_step = step;
        } else {
            shared_step = job.first_step;
        }
    }
    __syncthreads();
    return shared_step;
}

template <int LANES>
GEAR_CODE void run(const Job& job) {
    u64 step = read_step(job);
    i64 groups = (i64)gridDim.x * (blockDim.x / LANES), tasks = job.segments * job.tasks;
    i64 first = (i64)blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
    for (i64 task = first; task < tasks; task += groups)
        run_task<LANES>(job, step, task, threadIdx.x % LANES);
}

}  // namespace gear

extern "C" __global__ void __launch_bounds__(256) fill_8(const __grid_constant__ gear::Job job) {
    gear::run<8>(job);
}
extern "C" __global__ void __launch_bounds__(256) fill_16(const __grid_constant__ gear::Job job) {
    gear::run<16>(job);
}
extern "C" __global__ void __launch_bounds__(256) fill_32(const __grid_constant__ gear::Job job) {
    gear::run<32>(job);
}
