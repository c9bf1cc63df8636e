// Philox 4x64-10, as kernels/draws.py: the numbers of numpy.random.Philox with key (seed, stream).
#pragma once

// The tests compile this text for the CPU, with what CUDA has besides C++ (tests/cuda_on_cpu.h).
#define GEAR_CODE __device__ __forceinline__

namespace gear {

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;

enum { SELECTION_STREAM = 0, EPOCH_STREAM = 3 };

struct Draws {
    u64 first, second;
};

struct Block {
    Draws even, odd;  // of two slots
};

// Block number (high * 2^64 + low) of a stream.
GEAR_CODE Block make_block(u64 seed, u64 stream, u64 low_number, u64 high_number) {
    // NumPy counts up before it makes a block, so the first is number 1.
    u64 c0 = low_number + 1, c1 = high_number + (c0 == 0), c2 = 0, c3 = 0;
    u64 k0 = seed, k1 = stream;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        u64 left = __umul64hi(0xD2E7470EE14C6C93ull, c0), low = 0xD2E7470EE14C6C93ull * c0;
        u64 right = __umul64hi(0xCA5A826395121157ull, c2);
        c0 = right ^ c1 ^ k0;
        c1 = 0xCA5A826395121157ull * c2;
        c2 = left ^ c3 ^ k1;
        c3 = low;
        k0 += 0x9E3779B97F4A7C15ull;
        k1 += 0xBB67AE8584CAA73Bull;
    }
    Block block = {{c0, c1}, {c2, c3}};
    return block;
}

// The numbers of slot `slot` of step `step`, of `count` slots a step.
GEAR_CODE Draws draw(u64 seed, u64 stream, u64 step, u64 count, u64 slot) {
    u64 flat = step * count + slot, high = __umul64hi(step, count) + (flat < slot);
    Block block = make_block(seed, stream, flat >> 1 | high << 63, high >> 1);
    return flat & 1 ? block.odd : block.even;
}

// Integer in [0, n): floor(draw * n / 2^64).
GEAR_CODE i64 bounded(u64 number, i64 n) { return (i64)__umul64hi(number, (u64)n); }

}  // namespace gear
