// Philox 4x32-10, as kernels/philox.py: the same counter, the same words, the same integers.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define GEAR_CODE __device__ __forceinline__
#define GEAR_MEMBER static GEAR_CODE  // of a structure
#else  // the tests compile the same text for the CPU
#define GEAR_CODE static inline
#define GEAR_MEMBER static inline
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
#endif

namespace gear {

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;

struct Draws {
    u64 first, second;  // words 0 | 1 << 32 and 2 | 3 << 32
};

// Counter (slot, stream, low and high half of the step), key (low and high half of the seed).
GEAR_CODE Draws draw(u64 seed, u32 stream, u64 step, u32 slot) {
    u32 c0 = slot, c1 = stream, c2 = (u32)step, c3 = (u32)(step >> 32);
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#pragma unroll
#endif
    for (int turn = 0; turn < 10; ++turn) {
        u64 left = (u64)0xD2511F53u * c0, right = (u64)0xCD9E8D57u * c2;
        u32 n0 = (u32)(right >> 32) ^ c1 ^ k0, n2 = (u32)(left >> 32) ^ c3 ^ k1;
        c1 = (u32)right;
        c3 = (u32)left;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    Draws found = {(u64)c0 | (u64)c1 << 32, (u64)c2 | (u64)c3 << 32};
    return found;
}

// Integer in [0, n): floor(draw * n / 2^64).
GEAR_CODE i64 bounded(u64 number, i64 n) { return (i64)__umul64hi(number, (u64)n); }

}  // namespace gear
