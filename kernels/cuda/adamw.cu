// Clip by the norm of all gradients, then AdamW, over many tensors in two launches.
// Groups of a model's tensors with rules and norms of their own are two launches each.
//
// AdamW is that of Loshchilov and Hutter (2019), in the order of operations of PyTorch's fused one.
// Weights that the model computes with in bfloat16 (shadows) get their gradients in it too, and are
// written in the same pass as the float32 ones.
//
// Memory bounds both launches, so loads are under way early.  The work is cut into pieces, each
// within one tensor: a block reads a piece's addresses at once, a thread takes four elements of it,
// 16 bytes a load.  The second kernel reads what it updates before it adds up the norm, and the
// addresses of the next piece while it works on one.
//
// The norm is summed over groups of pieces: partial sums of the first kernel, which each block of
// the second adds up in the same order.  The groups depend on the tensors' sizes alone, so neither
// GPU, launch nor addresses change a bit.
#include "philox.cuh"

namespace gear {

enum { WARP = 32, THREADS = 256, QUAD = 4, PIECE = QUAD * THREADS, MOST_PARTIALS = 2 * THREADS };
enum { CONSTANT, LINEAR, COSINE };  // of the learning rate, after the warm-up
enum { MOST_JOBS = 16 };            // parameters of a kernel are limited to 4 KB

typedef unsigned short bf16;  // the upper half of a float32

struct alignas(16) Piece {  // a part of one tensor, equally laid out in all that belongs to it
    const void* gradient;   // float, or bf16 where there is a shadow
    i64 count;              // of elements, at most PIECE
    float* value;
    float* first;           // moments
    float* second;
    bf16* shadow;           // the value as the model computes with it
};

struct alignas(16) Rule {  // the factors of a step, before clipping
    float shrink, beta1, rest1, beta2, rest2, size, root, epsilon;
};

struct AdamwJob {
    const Piece* pieces;
    i64 piece_count;
    i64 group;            // pieces that a partial sum covers
    double* partials;     // (partial_count,) sums of squared gradients
    i64 partial_count;    // at most MOST_PARTIALS
    Rule* rule;           // the first kernel writes it, for the second
    i64* index;           // the step to do, counted from 0
    i64* row;             // of `window`, or one past its end or more
    float* window;        // (window_rows, 2): loss and norm before clipping
    i64 window_rows;
    const float* loss;    // a scalar
    float* counts;        // (tensor_count,): steps done
    i64 tensor_count;
    i64 kind, warmup, steps;  // of the learning rate: see `Schedule` of kernels/adamw.py
    double rate;
    double beta1, beta2, epsilon, decay;
    double limit;         // of the norm; infinite for none
    double* squares;      // of the norms of a model's groups before its last one
    i64 is_last;          // of its groups: it notes loss and norm, and counts
};

struct AdamwJobs {  // of the models that are updated together: one, or those of a stack
    i64 count;
    AdamwJob jobs[MOST_JOBS];
};

GEAR_CODE double rate_of(const AdamwJob& job, i64 index) {
    if (index < job.warmup) return job.rate * (double)(index + 1) / (double)job.warmup;
    if (job.kind == CONSTANT) return job.rate;
    i64 rest = job.steps - job.warmup;
    double left = (double)(job.steps - index) / (double)(rest > 1 ? rest : 1);
    if (left < 0.0) left = 0.0;
    return job.rate * (job.kind == LINEAR ? left : 0.5 - 0.5 * cospi(left));
}

GEAR_CODE double power(double base, i64 exponent) {
    double product = 1.0;
    for (; exponent; exponent >>= 1) {
        if (exponent & 1) product *= base;
        base *= base;
    }
    return product;
}

// Block 0 of the first kernel works out what the step needs of the step number.
GEAR_CODE void prepare(const AdamwJob& job) {
    i64 index = *job.index;
    for (i64 i = threadIdx.x; i < job.tensor_count; i += THREADS)
        job.counts[i] = (float)(index + 1);
    if (threadIdx.x) return;
    *job.squares = 0.0;
    double rate = rate_of(job, index);
    Rule rule;
    rule.shrink = (float)(rate * job.decay);
    rule.beta1 = (float)job.beta1;
    rule.rest1 = (float)(1.0 - job.beta1);
    rule.beta2 = (float)job.beta2;
    rule.rest2 = (float)(1.0 - job.beta2);
    rule.size = (float)(rate / (1.0 - power(job.beta1, index + 1)));
    rule.root = (float)sqrt(1.0 - power(job.beta2, index + 1));
    rule.epsilon = (float)job.epsilon;
    *job.rule = rule;
}

// The last block of the second kernel: metrics and counters.  A run that a captured stack goes on
// without is at rows past its window's end sooner or later: nobody asks for them.
GEAR_CODE void finish(const AdamwJob& job, double sum) {
    sum += *job.squares;
    *job.squares = sum;
    if (!job.is_last) return;
    i64 row = *job.row;
    if (row < job.window_rows) {
        job.window[2 * row] = *job.loss;
        job.window[2 * row + 1] = (float)sqrt(sum);
    }
    *job.row = row + 1;
    *job.index += 1;
}

union Bits {
    u32 bits;
    float value;
};

GEAR_CODE float widen(float value) { return value; }

GEAR_CODE float widen(bf16 value) {
    Bits number;
    number.bits = (u32)value << 16;
    return number.value;
}

// To the nearest, to even between two; NaN stays NaN.
GEAR_CODE bf16 narrow(float value) {
    Bits number;
    number.value = value;
    if ((number.bits & 0x7fffffffu) > 0x7f800000u) return (bf16)(number.bits >> 16 | 0x40u);
    return (bf16)((number.bits + 0x7fffu + (number.bits >> 16 & 1u)) >> 16);
}

struct Quad {  // what a thread has of a piece; elements that there are not are 0
    float of[QUAD];
};

struct Quads {
    Quad value, first, second, gradient;
};

// Sum over the block in the same order every time; only thread 0 has it.
GEAR_CODE double block_sum(double sum) {
    __shared__ double sums[THREADS / WARP];
    for (int half = WARP / 2; half; half /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, half);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int warp = 1; warp < THREADS / WARP; ++warp) sum += sums[warp];
    return sum;
}

GEAR_CODE Quad quad_of(float4 all) {
    Quad quad = {{all.x, all.y, all.z, all.w}};
    return quad;
}

GEAR_CODE Quad quad_of(uint2 all) {
    Quad quad = {{widen((bf16)all.x), widen((bf16)(all.x >> 16)), widen((bf16)all.y),
                   widen((bf16)(all.y >> 16))}};
    return quad;
}

// The first `left` of four elements, one at a time.
template <typename T>
GEAR_CODE Quad first_of(const T* from, int left) {
    Quad quad = {{0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
    for (int i = 0; i < QUAD; ++i)
        if (i < left) quad.of[i] = widen(from[i]);
    return quad;
}

// Of gradients: a thread loads four as a `Whole`, of AHEAD pieces at once.
template <bool SHADOWED>
struct Gradients {
    typedef float Type;
    typedef float4 Whole;
    enum { AHEAD = 4 };
};

template <>
struct Gradients<true> {
    typedef bf16 Type;
    typedef uint2 Whole;
    enum { AHEAD = 8 };
};

// True if `bytes` bytes can be loaded from an address at once.
GEAR_CODE bool aligned(u64 address, u64 bytes) { return (address & (bytes - 1)) == 0; }

// Gradients of AHEAD pieces, or of those that there are.
template <bool SHADOWED, int AHEAD>
GEAR_CODE void gather(const Piece* pieces, i64 there, Quad (&quads)[AHEAD]) {
    typedef typename Gradients<SHADOWED>::Type Type;
    typedef typename Gradients<SHADOWED>::Whole Whole;
    int at = threadIdx.x * QUAD, left[AHEAD];
    const Type* from[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        const Piece& piece = pieces[i < there ? i : 0];
        from[i] = (const Type*)piece.gradient + at;
        left[i] = (int)piece.count - at;
    }
    bool whole = true;  // all that there are
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        if (i >= there) left[i] = 0;
        whole = whole && (left[i] <= 0 || (left[i] >= QUAD && aligned((u64)from[i], sizeof(Whole))));
    }
    Whole zeros = {};
    if (whole) {
        Whole all[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            all[i] = zeros;
            if (left[i] > 0) all[i] = __ldg((const Whole*)from[i]);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) quads[i] = quad_of(all[i]);
    } else {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) quads[i] = first_of(from[i], left[i]);
    }
}

template <bool SHADOWED>
GEAR_CODE void norm(const AdamwJob& job, u32 block, u32) {
    enum { AHEAD = Gradients<SHADOWED>::AHEAD };
    if (block == 0) return prepare(job);
    i64 begin = (block - 1) * job.group, end = begin + job.group;
    if (end > job.piece_count) end = job.piece_count;
    double sum = 0.0;
    for (i64 number = begin; number < end; number += AHEAD) {
        Quad quads[AHEAD];
        gather<SHADOWED>(job.pieces + number, end - number, quads);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
#pragma unroll
            for (int k = 0; k < QUAD; ++k)
                sum += (double)quads[i].of[k] * (double)quads[i].of[k];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) job.partials[block - 1] = sum;
}

// True if a thread's four elements are stored, and but for gradients loaded, at once.
template <bool SHADOWED>
GEAR_CODE bool is_whole(const Piece& piece, int left) {
    u64 places = (u64)piece.value | (u64)piece.first | (u64)piece.second;
    return left >= QUAD && aligned(places, 16) && (!SHADOWED || aligned((u64)piece.shadow, 8));
}

// Nothing of it is read again in this launch: it goes from the caches first, and leaves them to
// the gradients that were written last.
template <bool SHADOWED>
GEAR_CODE Quads read(const Piece& piece) {
    typedef typename Gradients<SHADOWED>::Type Type;
    typedef typename Gradients<SHADOWED>::Whole Whole;
    int at = threadIdx.x * QUAD, left = (int)piece.count - at;
    bool whole = is_whole<SHADOWED>(piece, left);
    const Type* gradient = (const Type*)piece.gradient + at;
    bool whole_gradient = left >= QUAD && aligned((u64)gradient, sizeof(Whole));
    Quads quads;
    if (whole) {
        quads.value = quad_of(__ldcs((const float4*)(piece.value + at)));
        quads.first = quad_of(__ldcs((const float4*)(piece.first + at)));
        quads.second = quad_of(__ldcs((const float4*)(piece.second + at)));
    } else {
        quads.value = first_of(piece.value + at, left);
        quads.first = first_of(piece.first + at, left);
        quads.second = first_of(piece.second + at, left);
    }
    if (whole_gradient)
        quads.gradient = quad_of(__ldcs((const Whole*)gradient));
    else
        quads.gradient = first_of(gradient, left);
    return quads;
}

GEAR_CODE float4 all_of(const Quad& quad) {
    float4 all = {quad.of[0], quad.of[1], quad.of[2], quad.of[3]};
    return all;
}

template <bool SHADOWED>
GEAR_CODE void write(const Piece& piece, const Quads& quads) {
    int at = threadIdx.x * QUAD, left = (int)piece.count - at;
    bf16 narrowed[QUAD];
#pragma unroll
    for (int i = 0; i < QUAD; ++i) narrowed[i] = narrow(quads.value.of[i]);
    if (is_whole<SHADOWED>(piece, left)) {
        *(float4*)(piece.value + at) = all_of(quads.value);
        __stcs((float4*)(piece.first + at), all_of(quads.first));
        __stcs((float4*)(piece.second + at), all_of(quads.second));
        uint2 shadow = {narrowed[0] | (u32)narrowed[1] << 16, narrowed[2] | (u32)narrowed[3] << 16};
        if (SHADOWED) *(uint2*)(piece.shadow + at) = shadow;
        return;
    }
#pragma unroll
    for (int i = 0; i < QUAD; ++i) {
        if (i >= left) return;
        piece.value[at + i] = quads.value.of[i];
        piece.first[at + i] = quads.first.of[i];
        piece.second[at + i] = quads.second.of[i];
        if (SHADOWED) piece.shadow[at + i] = narrowed[i];
    }
}

GEAR_CODE Quads update(const Rule& rule, float scale, Quads quads) {
#pragma unroll
    for (int i = 0; i < QUAD; ++i) {
        float gradient = quads.gradient.of[i] * scale;
        float value = quads.value.of[i], first = quads.first.of[i], second = quads.second.of[i];
        value -= rule.shrink * value;
        first = rule.beta1 * first + rule.rest1 * gradient;
        second = rule.beta2 * second + rule.rest2 * gradient * gradient;
        value -= rule.size * first / (__fsqrt_rn(second) / rule.root + rule.epsilon);
        quads.value.of[i] = value;
        quads.first.of[i] = first;
        quads.second.of[i] = second;
    }
    return quads;
}

template <bool SHADOWED>
GEAR_CODE void step(const AdamwJob& job, u32 block, u32 blocks) {
    __shared__ float shared_scale;
    Piece piece = job.pieces[block];
    double sum = 0.0;
#pragma unroll
    for (int i = 0; i < MOST_PARTIALS; i += THREADS)
        if (threadIdx.x + i < job.partial_count) sum += job.partials[threadIdx.x + i];
    Rule rule = *job.rule;
    Quads quads = read<SHADOWED>(piece);
    i64 number = block + blocks;
    Piece next = job.pieces[number < job.piece_count ? number : block];
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        double norm = sqrt(sum);
        float scale = (float)(job.limit / (norm + 1e-6));
        shared_scale = scale > 1.0f ? 1.0f : scale;  // a norm that is not a number stays one
        if (block == blocks - 1) finish(job, sum);  // nobody else reads that in this launch
    }
    __syncthreads();
    float scale = shared_scale;
    for (;;) {
        if (threadIdx.x * QUAD < piece.count)
            write<SHADOWED>(piece, update(rule, scale, quads));
        if (number >= job.piece_count) break;
        piece = next;
        quads = read<SHADOWED>(piece);
        number += blocks;
        next = job.pieces[number < job.piece_count ? number : block];
    }
}

}  // namespace gear

// As many blocks for each model.  `resident`: blocks that a multiprocessor has room for, by the
// registers of a thread.
#define GEAR_ADAMW(name, body, shadowed, resident)                                        \
    extern "C" __global__ void __launch_bounds__(256, resident)                           \
        name(const __grid_constant__ gear::AdamwJobs together) {                          \
        unsigned each = gridDim.x / (unsigned)together.count;                             \
        gear::body<shadowed>(together.jobs[blockIdx.x / each], blockIdx.x % each, each);  \
    }
GEAR_ADAMW(adamw_norm, norm, false, 6)
GEAR_ADAMW(adamw_step, step, false, 6)
GEAR_ADAMW(adamw_norm_shadowed, norm, true, 4)
GEAR_ADAMW(adamw_step_shadowed, step, true, 6)
