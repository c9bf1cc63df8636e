// Priorities: build sums, take the losses of a batch, weigh its losses.  See tree.cuh.
#include "tree.cuh"

namespace gear {

GEAR_CODE void sum_level(const SumsJob& job) {
    i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x; at < job.count; at += step)
        job.sums[at] = sum_of(job, at);
}

// One block does a small batch in one launch.
GEAR_CODE void update_small(const UpdateJob& job) {
    if (job.state[PAUSED]) return;
    bool good = true;
    for (i64 i = threadIdx.x; i < job.count; i += blockDim.x) good = good && usable(job, i);
    if (!__syncthreads_and(good)) {
        if (threadIdx.x == 0) job.state[REFUSED] += 1;
        return;
    }
    for (i64 i = threadIdx.x; i < job.count; i += blockDim.x)
        spread(job.tree, change(job, i), 1, job.tree.levels);
    __syncthreads();
    for (i64 i = threadIdx.x; i < job.count; i += blockDim.x) release(job, i);
    if (threadIdx.x == 0) job.state[UPDATES] += 1;
}

// A large batch takes three launches; `WRONG` names the call that was refused, so that nobody has
// to clear it.
GEAR_CODE u64 number_of_call(const UpdateJob& job) {
    return job.state[UPDATES] + job.state[REFUSED] + 1;
}

GEAR_CODE void check_large(const UpdateJob& job) {
    if (job.state[PAUSED]) return;  // the next call has the same number
    i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < job.count; i += step)
        if (!usable(job, i)) *(volatile u64*)(job.state + WRONG) = number_of_call(job);
}

// The upper levels have few sums, which all threads change: a block adds up its own part of them.
enum { SHARED_SUMS = 2048 };

GEAR_CODE void apply_large(const UpdateJob& job) {
    __shared__ u64 shared_sums[SHARED_SUMS];
    if (job.state[PAUSED] || job.state[WRONG] == number_of_call(job)) return;
    const Tree& tree = job.tree;
    i64 first = tree.levels, size = FAN, used = 0;  // levels from `first` on are added up here
    while (first > 1 && used + size <= SHARED_SUMS) {
        used += size;
        size *= FAN;
        --first;
    }
    for (int i = threadIdx.x; i < used; i += blockDim.x) shared_sums[i] = 0;
    __syncthreads();
    i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < job.count; i += step) {
        Change mine = change(job, i);
        spread(tree, mine, 1, first);
        i64 at = mine.row;
        for (i64 level = 1; level < first; ++level) at /= FAN;
        i64 base = used, room = size / FAN;
        for (i64 level = first; level < tree.levels && mine.by; ++level) {
            at /= FAN;
            base -= room;
            room /= FAN;
            atomicAdd(shared_sums + base + at, mine.by);
        }
    }
    __syncthreads();
    i64 base = used, room = size / FAN;
    for (i64 level = first; level < tree.levels; ++level) {
        base -= room;
        for (int i = threadIdx.x; i < room; i += blockDim.x)
            if (shared_sums[base + i]) atomicAdd(tree.level[level] + i, shared_sums[base + i]);
        room /= FAN;
    }
}

// Whether the call was refused needs no look here: without marks nothing changes.
GEAR_CODE void release_large(const UpdateJob& job) {
    if (job.state[PAUSED]) return;
    i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < job.count; i += step)
        release(job, i);
    if (blockIdx.x == 0 && threadIdx.x == 0)
        job.state[job.state[WRONG] == number_of_call(job) ? REFUSED : UPDATES] += 1;
}

GEAR_CODE void weigh(const ImportanceJob& job) {
    __shared__ double largest[32];
    double beta = beta_of(job), mine = 0.0;
    for (i64 i = threadIdx.x; i < job.count; i += blockDim.x) {
        double weight = weight_of(job, beta, i);
        mine = weight > mine ? weight : mine;
    }
    for (int half = 16; half; half /= 2) {
        double other = __shfl_xor_sync(0xFFFFFFFFu, mine, half);
        mine = other > mine ? other : mine;
    }
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = mine;
    __syncthreads();
    for (int warp = 0; warp < blockDim.x / 32; ++warp)
        mine = largest[warp] > mine ? largest[warp] : mine;
    for (i64 i = threadIdx.x; i < job.count; i += blockDim.x)
        job.weights[i] = (float)(weight_of(job, beta, i) / mine);
}

}  // namespace gear

extern "C" __global__ void __launch_bounds__(256) tree_sums(const __grid_constant__ gear::SumsJob job) {
    gear::sum_level(job);
}
extern "C" __global__ void __launch_bounds__(1024) tree_update(const __grid_constant__ gear::UpdateJob job) {
    gear::update_small(job);
}
extern "C" __global__ void __launch_bounds__(256) tree_check(const __grid_constant__ gear::UpdateJob job) {
    gear::check_large(job);
}
extern "C" __global__ void __launch_bounds__(256) tree_apply(const __grid_constant__ gear::UpdateJob job) {
    gear::apply_large(job);
}
extern "C" __global__ void __launch_bounds__(256) tree_release(const __grid_constant__ gear::UpdateJob job) {
    gear::release_large(job);
}
extern "C" __global__ void __launch_bounds__(1024) tree_weigh(const __grid_constant__ gear::ImportanceJob job) {
    gear::weigh(job);
}
