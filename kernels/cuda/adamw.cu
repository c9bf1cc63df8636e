// Two launches: the norm of all gradients, and the update.  See adamw.cuh for the law.
//
// Memory bounds both, so loads are under way early: a thread takes four elements of a piece, 16
// bytes a load; the second kernel reads what it updates before it adds up the norm, and addresses
// of the next piece while it works on one.
#include "adamw.cuh"

namespace gear {

enum { WARP = 32, QUAD = PIECE / THREADS };

struct Quad {  // what a thread has of a piece; elements that there are not are 0
    float of[QUAD];
};

// Sum over the block in the same order every time; only thread 0 has it.
GEAR_CODE double block_sum(double mine) {
    __shared__ double sums[THREADS / WARP];
    for (int half = WARP / 2; half; half /= 2) mine += __shfl_xor_sync(0xFFFFFFFFu, mine, half);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = mine;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int warp = 1; warp < THREADS / WARP; ++warp) mine += sums[warp];
    return mine;
}

GEAR_CODE Quad quad_of(float4 all) {
    Quad found = {{all.x, all.y, all.z, all.w}};
    return found;
}

GEAR_CODE Quad quad_of(uint2 all) {
    Quad found = {{widen((bf16)all.x), widen((bf16)(all.x >> 16)), widen((bf16)all.y),
                   widen((bf16)(all.y >> 16))}};
    return found;
}

GEAR_CODE float single(float value) { return value; }
GEAR_CODE float single(bf16 value) { return widen(value); }

// The first `left` of four elements, one at a time.
template <typename T>
GEAR_CODE Quad some(const T* from, int left) {
    Quad found = {{0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
    for (int i = 0; i < QUAD; ++i)
        if (i < left) found.of[i] = single(from[i]);
    return found;
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

// Whether an address is one to load `bytes` bytes from.
GEAR_CODE bool fits(u64 address, u64 bytes) { return (address & (bytes - 1)) == 0; }

// Block 0 has no gradients: it works out what the step needs of the step number.
GEAR_CODE void prepare(const AdamwJob& job) {
    i64 index = *job.index;
    for (i64 i = threadIdx.x; i < job.tensor_count; i += THREADS) job.steps[i] = (float)(index + 1);
    if (threadIdx.x == 0) *job.rule = rule_of(job, index);
}

// Gradients of AHEAD pieces, or of those that there are.
template <bool SHADOWED, int AHEAD>
GEAR_CODE void gather(const Piece* pieces, i64 there, Quad (&found)[AHEAD]) {
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
        whole = whole && (left[i] <= 0 || (left[i] >= QUAD && fits((u64)from[i], sizeof(Whole))));
    }
    Whole none = {};
    if (whole) {
        Whole all[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            all[i] = none;
            if (left[i] > 0) all[i] = __ldg((const Whole*)from[i]);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) found[i] = quad_of(all[i]);
    } else {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) found[i] = some(from[i], left[i]);
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
        Quad found[AHEAD];
        gather<SHADOWED>(job.pieces + number, end - number, found);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
#pragma unroll
            for (int k = 0; k < QUAD; ++k)
                sum += (double)found[i].of[k] * (double)found[i].of[k];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) job.partials[block - 1] = sum;
}

struct Quads {
    Quad value, first, second, gradient;
};

// Whether a thread's four elements are stored, and but for gradients loaded, at once.
template <bool SHADOWED>
GEAR_CODE bool is_whole(const Piece& piece, int left) {
    u64 places = (u64)piece.value | (u64)piece.first | (u64)piece.second;
    return left >= QUAD && fits(places, 16) && (!SHADOWED || fits((u64)piece.shadow, 8));
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
    bool whole_gradient = left >= QUAD && fits((u64)gradient, sizeof(Whole));
    Quads found;
    if (whole) {
        found.value = quad_of(__ldcs((const float4*)(piece.value + at)));
        found.first = quad_of(__ldcs((const float4*)(piece.first + at)));
        found.second = quad_of(__ldcs((const float4*)(piece.second + at)));
    } else {
        found.value = some(piece.value + at, left);
        found.first = some(piece.first + at, left);
        found.second = some(piece.second + at, left);
    }
    if (whole_gradient)
        found.gradient = quad_of(__ldcs((const Whole*)gradient));
    else
        found.gradient = some(gradient, left);
    return found;
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
        Element element = {quads.value.of[i], quads.first.of[i], quads.second.of[i],
                           quads.gradient.of[i]};
        element = update(rule, scale, element);
        quads.value.of[i] = element.value;
        quads.first.of[i] = element.first;
        quads.second.of[i] = element.second;
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
        shared_scale = scale_of(job, norm);
        if (block == blocks - 1) finish(job, norm);  // nobody else reads that in this launch
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

// `resident`: blocks that a multiprocessor has room for, by the registers of a thread.
#define GEAR_ADAMW(name, body, shadowed, resident)                                        \
    extern "C" __global__ void __launch_bounds__(256, resident)                           \
        name(const __grid_constant__ gear::AdamwJob job) {                                \
        gear::body<shadowed>(job, blockIdx.x, gridDim.x);                                 \
    }
GEAR_ADAMW(adamw_norm, norm, false, 6)
GEAR_ADAMW(adamw_step, step, false, 6)
GEAR_ADAMW(adamw_norm_shadowed, norm, true, 4)
GEAR_ADAMW(adamw_step_shadowed, step, true, 6)

// As many blocks for each of several models.
#define GEAR_ADAMW_TOGETHER(name, body, resident)                                         \
    extern "C" __global__ void __launch_bounds__(256, resident)                           \
        name(const __grid_constant__ gear::AdamwJobs together) {                          \
        unsigned each = gridDim.x / (unsigned)together.count;                             \
        gear::body<false>(together.jobs[blockIdx.x / each], blockIdx.x % each, each);     \
    }
GEAR_ADAMW_TOGETHER(adamw_norm_together, norm, 6)
GEAR_ADAMW_TOGETHER(adamw_step_together, step, 6)
