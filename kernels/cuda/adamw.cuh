// Clip by the norm of all gradients, then AdamW, over many tensors at once.
//
// The work is cut into chunks, each within one tensor, so that a block never looks for where it is.
// AdamW is that of Loshchilov and Hutter (2019), in the order of operations of PyTorch's fused one.
#pragma once
#include "philox.cuh"

namespace gear {

struct Weights {  // one tensor; float32, equally laid out
    float* value;
    float* first;   // moments
    float* second;
    const float* gradient;
};

struct Chunk {
    i64 tensor, begin, count;
};

struct AdamwJob {
    const Weights* tensors;
    const Chunk* chunks;
    i64 chunk_count;
    double* partials;     // (partial_count,) sums of squared gradients
    i64 partial_count;    // blocks of the first kernel
    const float* rates;   // learning rate of every step
    i64* index;           // the step to do, counted from 0
    i64* row;             // of `window`
    float* window;        // (rows, 2): loss and norm before clipping
    const float* loss;    // a scalar
    float* steps;         // (tensor_count,): steps done
    i64 tensor_count;
    u64* ticket;          // blocks that have read `index` and `row`
    double beta1, beta2, epsilon, decay;
    double limit;         // of the norm; infinite for none
};

struct Rule {  // of one step
    float scale, shrink, beta1, rest1, beta2, rest2, size, root, epsilon;
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

GEAR_CODE Rule rule_of(const AdamwJob& job, i64 index, double norm) {
    double rate = (double)job.rates[index];
    float scale = (float)(job.limit / (norm + 1e-6));
    Rule found;
    found.scale = scale > 1.0f ? 1.0f : scale;  // a norm that is not a number stays one
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

struct Element {
    float value, first, second, gradient;
};

GEAR_CODE Element read(const Weights& tensor, i64 at) {
    Element found = {tensor.value[at], tensor.first[at], tensor.second[at], tensor.gradient[at]};
    return found;
}

GEAR_CODE void write(const Weights& tensor, i64 at, const Element& element) {
    tensor.value[at] = element.value;
    tensor.first[at] = element.first;
    tensor.second[at] = element.second;
}

GEAR_CODE Element update(const Rule& rule, Element element) {
    float gradient = element.gradient * rule.scale;
    element.value -= rule.shrink * element.value;
    element.first = rule.beta1 * element.first + rule.rest1 * gradient;
    element.second = rule.beta2 * element.second + rule.rest2 * gradient * gradient;
    element.value -=
        rule.size * element.first / (root_of(element.second) / rule.root + rule.epsilon);
    return element;
}

}  // namespace gear
