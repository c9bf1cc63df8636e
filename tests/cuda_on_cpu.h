// Blocks and threads of a GPU on the CPU, for the kernels' own text.
//
// The threads of a block are fibers of one thread of the system: each runs until it waits for the
// others of its block or warp.  Who runs first is drawn anew each time, so that a missing barrier
// shows as a wrong result.  Blocks run on several threads of the system at once, with real atomics.
// Threads that wait for others which never come end the process.
#pragma once
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#define __CUDACC_RTC__
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static thread_local
#define __grid_constant__
#define __launch_bounds__(...)

struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};

struct alignas(16) float4 {
    float x, y, z, w;
};

struct alignas(8) uint2 {
    unsigned x, y;
};

namespace on_cpu {

enum { WARP = 32, STACK = 64 << 10, WORKERS = 3 };
enum State { READY, AT_WARP, AT_BLOCK, DONE };

struct Place {
    unsigned x;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK]};
    State state;
    int turn;                     // which of two slots its next exchange uses
    unsigned long long slot[2];
};

struct Block {
    std::vector<std::unique_ptr<Fiber>> fibers;
    ucontext_t scheduler;
    std::function<void()> body;
    int now;
    bool good, all_good;  // of __syncthreads_and: so far, and of the last one
};

inline thread_local Block block;

inline void wait(State state) {
    Fiber& mine = *block.fibers[block.now];
    mine.state = state;
    swapcontext(&mine.context, &block.scheduler);
}

inline void begin() {
    block.body();
    block.fibers[block.now]->state = DONE;
}

// Let go of threads [first, last) if all that are left of them wait in `state`.
inline bool release(size_t first, size_t last, State state) {
    bool waiting = false;
    for (size_t i = first; i < last; ++i) {
        State found = block.fibers[i]->state;
        if (found != state && found != DONE) return false;
        waiting = waiting || found == state;
    }
    for (size_t i = first; i < last; ++i)
        if (block.fibers[i]->state == state) block.fibers[i]->state = READY;
    return waiting;
}

template <typename T>
T exchange(T value, unsigned lane) {
    Fiber& mine = *block.fibers[block.now];
    int turn = mine.turn;
    mine.turn = 1 - turn;
    memcpy(&mine.slot[turn], &value, sizeof value);
    int first = block.now / WARP * WARP;
    wait(AT_WARP);
    memcpy(&value, &block.fibers[first + lane % WARP]->slot[turn], sizeof value);
    return value;
}

}  // namespace on_cpu

inline thread_local on_cpu::Place threadIdx, blockIdx, blockDim, gridDim;

namespace on_cpu {

inline void run_block(size_t threads, std::mt19937& random) {
    while (block.fibers.size() < threads) block.fibers.emplace_back(new Fiber);
    std::vector<int> order(threads);
    for (size_t i = 0; i < threads; ++i) {
        Fiber& fiber = *block.fibers[i];
        order[i] = (int)i;
        fiber.state = READY;
        fiber.turn = 0;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = &block.scheduler;
        makecontext(&fiber.context, begin, 0);
    }
    block.good = true;
    for (;;) {
        std::shuffle(order.begin(), order.end(), random);
        for (int number : order) {
            if (block.fibers[number]->state != READY) continue;
            block.now = number;
            threadIdx.x = (unsigned)number;
            swapcontext(&block.scheduler, &block.fibers[number]->context);
        }
        bool going = false;
        for (size_t warp = 0; warp < threads; warp += WARP)
            going = release(warp, std::min(warp + WARP, threads), AT_WARP) || going;
        if (going) continue;
        if (release(0, threads, AT_BLOCK)) {
            block.all_good = block.good;
            block.good = true;
            continue;
        }
        for (size_t i = 0; i < threads; ++i)
            if (block.fibers[i]->state != DONE) {
                fputs("threads of a block wait for others that never come\n", stderr);
                abort();
            }
        return;
    }
}

// As a launch of `blocks` blocks of `threads` threads; `seed` draws who is first.
template <typename Job>
void launch(void (*kernel)(Job), const Job* job, unsigned blocks, unsigned threads, unsigned seed) {
    std::vector<unsigned> order(blocks);
    for (unsigned i = 0; i < blocks; ++i) order[i] = i;
    std::mt19937 random(seed);
    std::shuffle(order.begin(), order.end(), random);
    std::atomic<unsigned> next{0};
    auto work = [&](unsigned number) {
        std::mt19937 mine(seed + 1 + number);
        blockDim.x = threads;
        gridDim.x = blocks;
        block.body = [&] { kernel(*job); };
        for (unsigned i = next++; i < blocks; i = next++) {
            blockIdx.x = order[i];
            run_block(threads, mine);
        }
    };
    std::vector<std::thread> workers;
    for (unsigned i = 0; i < std::min<unsigned>(WORKERS, blocks); ++i) workers.emplace_back(work, i);
    for (std::thread& worker : workers) worker.join();
}

}  // namespace on_cpu

#define LAUNCHED(name, Job)                                                                     \
    extern "C" void launch_##name(const Job* job, unsigned blocks, unsigned threads,            \
                                  unsigned seed) {                                              \
        on_cpu::launch<Job>(name, job, blocks, threads, seed);                                  \
    }

static inline void __syncthreads() { on_cpu::wait(on_cpu::AT_BLOCK); }

static inline int __syncthreads_and(int good) {
    on_cpu::block.good = on_cpu::block.good && good;
    on_cpu::wait(on_cpu::AT_BLOCK);
    return on_cpu::block.all_good;
}

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
    return on_cpu::exchange(value, (unsigned)lane);
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int by) {
    return on_cpu::exchange(value, threadIdx.x % on_cpu::WARP ^ (unsigned)by);
}

static inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

static inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long by) {
    return __atomic_fetch_add(at, by, __ATOMIC_RELAXED);
}

static inline unsigned long long atomicMax(unsigned long long* at, unsigned long long value) {
    unsigned long long before = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (before < value && !__atomic_compare_exchange_n(at, &before, value, false,
                                                          __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return before;
}

static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}

#define cospi(value) cos(3.14159265358979323846 * (value))

static inline float __fsqrt_rn(float value) { return sqrtf(value); }

template <typename T>
void __stcs(T* to, T value) {
    *to = value;
}

template <typename T>
T __ldcs(const T* from) {
    return *from;
}

template <typename T>
T __ldg(const T* from) {
    return *from;
}
