// How threads share the tasks of fill.cuh.
#pragma once
#include "fill.cuh"

namespace gear {

enum { IN_FLIGHT = 8 };  // loads of a lane; fewer leave memory idle, more cost registers

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

// A warp for each task.
template <bool EVERY>
GEAR_CODE void run_each(const Job& job) {
    u64 step = read_step(job);
    i64 stride = (i64)gridDim.x * (blockDim.x / LANES), tasks = job.segments * job.tasks;
    i64 first = (i64)blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
    for (i64 task = first; task < tasks; task += stride)
        run_task<EVERY>(job, step, task, threadIdx.x % LANES);
}

// Copy the windows of `count` consecutive segments as one run of units: the outputs lie side by
// side, so lanes are never idle however short a window is.  Lane i holds the address and the real
// steps of segment i.
template <typename Unit>
GEAR_CODE void copy_run(const Job& job, const Group& group, i64 base, int count, u64 address,
                        int real, int lane) {
    int row = (int)(group.row_bytes / group.unit), wide = (int)job.span * row;
    int all = count * wide, number = lane / wide, at = lane - number * wide;
    Unit* out = (Unit*)group.out + base * wide;
    for (int first = 0; first < all; first += 32 * IN_FLIGHT) {
        Unit loads[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            int from = number < count ? number : 0;
            const Unit* source = (const Unit*)__shfl_sync(0xFFFFFFFFu, address, from);
            int units = __shfl_sync(0xFFFFFFFFu, real, from) * row;
            int low = job.left ? wide - units : 0;
            bool inside = number < count && at >= low && at < low + units;
            loads[i] = inside ? source[at - low] : Unit{};
            at += 32;
            while (at >= wide) {
                at -= wide;
                ++number;
            }
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            int here = first + i * 32 + lane;
            if (here < all) __stcs(out + here, loads[i]);
        }
    }
}

GEAR_CODE void name_run(const Job& job, i64 base, int count, const Segment& segment, int lane) {
    int span = (int)job.span, all = count * span, number = lane / span, k = lane - number * span;
    if (lane < count) {
        job.names[2 * (base + lane)] = segment.episode;
        job.names[2 * (base + lane) + 1] = segment.start;
    }
    for (int first = 0; first < all; first += 32) {
        int from = number < count ? number : 0;
        i64 start = __shfl_sync(0xFFFFFFFFu, segment.start, from);
        int real = (int)__shfl_sync(0xFFFFFFFFu, segment.real, from);
        int low = job.left ? span - real : 0;
        bool inside = k >= low && k < low + real;
        if (first + lane < all) {
            job.timesteps[base * span + first + lane] = inside ? start + k - low : 0;
            job.mask[base * span + first + lane] = inside ? 1 : 0;
        }
        k += 32;
        while (k >= span) {
            k -= span;
            ++number;
        }
    }
}

// For many short windows without a history or repeated rows: a warp takes `per_warp` segments (up
// to 32), each drawn by a lane of its own, so that the chain of loads behind a draw is waited for
// once for all of them.
template <bool EVERY>
GEAR_CODE void run_many(const Job& job) {
    u64 step = read_step(job);
    int lane = threadIdx.x % 32, per_warp = (int)job.per_warp;
    i64 warps = (i64)gridDim.x * (blockDim.x / 32);
    i64 warp = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    for (i64 base = warp * per_warp; base < job.segments; base += warps * per_warp) {
        int count = job.segments - base < per_warp ? (int)(job.segments - base) : per_warp;
        Segment segment = {0, 0, 0};
        if (lane < count) segment = choose<EVERY>(job, step, base + lane);
        for (i64 s = 0; s < job.groups; ++s) {
            const Group& group = job.group[s];
            u64 address = segment.real ? (u64)first_row(group, segment) : 0;
            int real = (int)segment.real;
            if (group.unit == 16)
                copy_run<Unit16>(job, group, base, count, address, real, lane);
            else if (group.unit == 8)
                copy_run<u64>(job, group, base, count, address, real, lane);
            else
                copy_run<u32>(job, group, base, count, address, real, lane);
        }
        name_run(job, base, count, segment, lane);
        if (lane < count) note_chance<EVERY>(job, base + lane, segment);
    }
}

struct Live {  // a job in GPU memory: it may change between replays of a graph
    const Job* job;
};

GEAR_CODE const Job& job_of(const Job& job) { return job; }
GEAR_CODE const Job& job_of(const Live& live) { return *live.job; }

}  // namespace gear

// Two kernels of a source; `every` as `choose` has it, `Source` a `Job` or `Live`.
#define GEAR_KERNEL(name, run, every, Source)                                             \
    extern "C" __global__ void __launch_bounds__(256)                                     \
        name(const __grid_constant__ gear::Source source) {                               \
        gear::run<every>(gear::job_of(source));                                           \
    }
#define GEAR_KERNELS(source, every, Source)                                                \
    GEAR_KERNEL(source##_each, run_each, every, Source)                                    \
    GEAR_KERNEL(source##_many, run_many, every, Source)
