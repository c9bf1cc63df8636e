// Clip by the norm of all gradients, then AdamW, over many tensors at once.
//
// The work is cut into pieces, each within one tensor, whose addresses a block reads at once: what
// it waits for is one read of the table and then the data, four elements a thread.  Weights that
// the model computes with in bfloat16 (shadows) get their gradients in it too, and are written in
// the same pass as the float32 ones.
//
// The norm is summed over groups of pieces: partial sums of the first kernel, which each block of
// the second adds up in the same order.  The groups depend on the tensors' sizes alone, so
// neither GPU, launch nor addresses change a bit.
//
// AdamW is that of Loshchilov and Hutter (2019), in the order of operations of PyTorch's fused one.
#pragma once
#include "philox.cuh"

namespace gear {

enum { THREADS = 256, PIECE = 4 * THREADS, MOST_PARTIALS = 2 * THREADS };

typedef unsigned short bf16;  // the upper half of a float32

struct alignas(16) Piece {  // a part of one tensor, equally laid out in all that belongs to it
    const void* gradient;   // float, or bf16 where there is a shadow
    i64 count;              // of elements, at most PIECE
    float* value;
    float* first;           // moments
    float* second;
    bf16* shadow;           // the value as the model computes with it
};

struct alignas(16) Rule {  // of one step, but for the clipping
    float shrink, beta1, rest1, beta2, rest2, size, root, epsilon;
};

struct AdamwJob {
    const Piece* pieces;
    i64 piece_count;
    i64 group;            // pieces a partial sum is over
    double* partials;     // (partial_count,) sums of squared gradients
    i64 partial_count;    // at most MOST_PARTIALS
    Rule* rule;           // the first kernel writes it, for the second
    const float* rates;   // learning rate of every step
    i64* index;           // the step to do, counted from 0
    i64* row;             // of `window`, or one past its end or more
    float* window;        // (window_rows, 2): loss and norm before clipping
    i64 window_rows;
    const float* loss;    // a scalar
    float* steps;         // (tensor_count,): steps done
    i64 tensor_count;
    double beta1, beta2, epsilon, decay;
    double limit;         // of the norm; infinite for none
};

enum { MOST_JOBS = 16 };  // parameters of a kernel are limited to 4 KB

struct AdamwJobs {  // of models that are updated together
    i64 count;
    AdamwJob jobs[MOST_JOBS];
};

GEAR_CODE double power(double base, i64 exponent) {
    double found = 1.0;
    for (; exponent; exponent >>= 1) {
        if (exponent & 1) found *= base;
        base *= base;
    }
    return found;
}

GEAR_CODE double root_of(double value) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
    return sqrt(value);
#else
    return __builtin_sqrt(value);
#endif
}

GEAR_CODE float root_of(float value) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
    return __fsqrt_rn(value);
#else
    return __builtin_sqrtf(value);
#endif
}

GEAR_CODE Rule rule_of(const AdamwJob& job, i64 index) {
    double rate = (double)job.rates[index];
    Rule found;
    found.shrink = (float)(rate * job.decay);
    found.beta1 = (float)job.beta1;
    found.rest1 = (float)(1.0 - job.beta1);
    found.beta2 = (float)job.beta2;
    found.rest2 = (float)(1.0 - job.beta2);
    found.size = (float)(rate / (1.0 - power(job.beta1, index + 1)));
    found.root = (float)root_of(1.0 - power(job.beta2, index + 1));
    found.epsilon = (float)job.epsilon;
    return found;
}

// What gradients are multiplied by.
GEAR_CODE float scale_of(const AdamwJob& job, double norm) {
    float scale = (float)(job.limit / (norm + 1e-6));
    return scale > 1.0f ? 1.0f : scale;  // a norm that is not a number stays one
}

struct Element {
    float value, first, second, gradient;
};

union Bits {
    u32 bits;
    float value;
};

GEAR_CODE float widen(bf16 value) {
    Bits found;
    found.bits = (u32)value << 16;
    return found.value;
}

// To the nearest, to even between two; what is not a number stays so.
GEAR_CODE bf16 narrow(float value) {
    Bits found;
    found.value = value;
    if ((found.bits & 0x7fffffffu) > 0x7f800000u) return (bf16)(found.bits >> 16 | 0x40u);
    return (bf16)((found.bits + 0x7fffu + (found.bits >> 16 & 1u)) >> 16);
}

GEAR_CODE Element update(const Rule& rule, float scale, Element element) {
    float gradient = element.gradient * scale;
    element.value -= rule.shrink * element.value;
    element.first = rule.beta1 * element.first + rule.rest1 * gradient;
    element.second = rule.beta2 * element.second + rule.rest2 * gradient * gradient;
    element.value -=
        rule.size * element.first / (root_of(element.second) / rule.root + rule.epsilon);
    return element;
}

// Metrics and counters.  A run that a captured stack goes on without is at rows past its window's
// end sooner or later: nobody asks for them.
GEAR_CODE void finish(const AdamwJob& job, double norm) {
    i64 row = *job.row;
    if (row < job.window_rows) {
        job.window[2 * row] = *job.loss;
        job.window[2 * row + 1] = (float)norm;
    }
    *job.row = row + 1;
    *job.index += 1;
}

}  // namespace gear
