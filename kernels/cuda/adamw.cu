// Two launches: the norm of all gradients, and the update.  See adamw.cuh for the law.
#include "adamw.cuh"

namespace gear {

enum { THREADS = 256, FOUR = 4 };  // loads of a thread that are in flight at once

// Sum over the block, in the same order every time.
GEAR_CODE double block_sum(double mine) {
    __shared__ double sums[THREADS];
    sums[threadIdx.x] = mine;
    for (int half = THREADS / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();
    return sums[0];
}

template <bool SHADOWED>
GEAR_CODE void norm(const AdamwJob& job, u32 block, u32 blocks) {
    double sum = 0.0;
    for (i64 number = block; number < job.chunk_count; number += blocks) {
        Chunk chunk = job.chunks[number];
        Weights tensor = job.tensors[chunk.tensor];
        for (i64 first = threadIdx.x; first < chunk.count; first += FOUR * THREADS) {
            float found[FOUR];
#pragma unroll
            for (int i = 0; i < FOUR; ++i) {
                i64 at = first + i * THREADS;
                found[i] = 0.0f;
                if (at < chunk.count) found[i] = gradient_of<SHADOWED>(tensor, chunk.begin + at);
            }
#pragma unroll
            for (int i = 0; i < FOUR; ++i) sum += (double)found[i] * (double)found[i];
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) job.partials[block] = sum;
}

// Every block reads `index` and `row` before it takes a ticket, so whoever takes the last one may
// advance them.
GEAR_CODE void finish(const AdamwJob& job, u32 blocks, double norm, bool& last, Rule& rule) {
    i64 index = *(const volatile i64*)job.index, row = *(const volatile i64*)job.row;
    rule = rule_of(job, index, norm);
    __threadfence();
    last = atomicAdd(job.ticket, 1ull) == blocks - 1;
    if (last) {
        *(volatile u64*)job.ticket = 0;
        job.window[2 * row] = *job.loss;
        job.window[2 * row + 1] = (float)norm;
        *(volatile i64*)job.row = row + 1;
        *(volatile i64*)job.index = index + 1;
        job.steps[0] = (float)(index + 1);
    }
}

template <bool SHADOWED>
GEAR_CODE void step(const AdamwJob& job, u32 block, u32 blocks) {
    __shared__ Rule shared_rule;
    __shared__ bool last;
    double sum = 0.0;
    for (i64 i = threadIdx.x; i < job.partial_count; i += THREADS) sum += job.partials[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) finish(job, blocks, sqrt(sum), last, shared_rule);
    __syncthreads();
    Rule rule = shared_rule;
    if (last)
        for (i64 i = threadIdx.x + 1; i < job.tensor_count; i += THREADS)
            job.steps[i] = job.steps[0];
    for (i64 number = block; number < job.chunk_count; number += blocks) {
        Chunk chunk = job.chunks[number];
        Weights tensor = job.tensors[chunk.tensor];
        for (i64 first = threadIdx.x; first < chunk.count; first += FOUR * THREADS) {
            Element found[FOUR];
#pragma unroll
            for (int i = 0; i < FOUR; ++i) {
                i64 at = first + i * THREADS;
                if (at < chunk.count) found[i] = read<SHADOWED>(tensor, chunk.begin + at);
            }
#pragma unroll
            for (int i = 0; i < FOUR; ++i) {
                i64 at = first + i * THREADS;
                if (at < chunk.count)
                    write<SHADOWED>(tensor, chunk.begin + at, update(rule, found[i]));
            }
        }
    }
}

}  // namespace gear

#define GEAR_ADAMW(name, body, shadowed)                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                     \
        name(const __grid_constant__ gear::AdamwJob job) {                                \
        gear::body<shadowed>(job, blockIdx.x, gridDim.x);                                 \
    }
GEAR_ADAMW(adamw_norm, norm, false)
GEAR_ADAMW(adamw_step, step, false)
GEAR_ADAMW(adamw_norm_shadowed, norm, true)
GEAR_ADAMW(adamw_step_shadowed, step, true)

// As many blocks for each of several models.
#define GEAR_ADAMW_TOGETHER(name, body)                                                   \
    extern "C" __global__ void __launch_bounds__(256)                                     \
        name(const __grid_constant__ gear::AdamwJobs together) {                          \
        unsigned each = gridDim.x / (unsigned)together.count;                             \
        gear::body<false>(together.jobs[blockIdx.x / each], blockIdx.x % each, each);     \
    }
GEAR_ADAMW_TOGETHER(adamw_norm_together, norm)
GEAR_ADAMW_TOGETHER(adamw_step_together, step)
