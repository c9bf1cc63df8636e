// Priorities learn: the masses of segments from the losses of a batch, and the sums above them.
#include "tree.cuh"

namespace gear {

enum { DROPPED_BITS = 13, CODES = 0x7F800000 >> DROPPED_BITS };  // as sampling/masses.py
enum { UPDATES = 0, PAUSED = 1 };  // words of a tree's state

struct UpdateJob {
    Tree tree;
    const i64* names;     // (count, 2): episode, start
    const float* losses;  // (count,)
    i64 count;
    const i64* offsets;  // (E + 1,)
    i64 episodes;
    const u64* masses;  // (CODES,) of each code of a loss
    u64* state;         // see the words above
};

const u64 MARK = 1ull << 63;  // of a mass that this update has changed; masses are below it

GEAR_CODE u32 bits_of(float value) {
    union {
        float number;
        u32 word;
    } bits;
    bits.number = value;
    return bits.word;
}

// The row of a segment, or -1 if it is not in the table.
GEAR_CODE i64 row_of(const UpdateJob& job, i64 number) {
    i64 episode = job.names[2 * number], start = job.names[2 * number + 1];
    if (episode < 0 || episode >= job.episodes || start < 0) return -1;
    i64 row = job.offsets[episode] + start;
    return row < job.offsets[episode + 1] ? row : -1;
}

GEAR_CODE bool usable(const UpdateJob& job, i64 number) {
    u32 bits = bits_of(job.losses[number]), size = bits & 0x7FFFFFFFu;
    return size < 0x7F800000u && (size == 0 || bits == size) && row_of(job, number) >= 0;
}

// The loss rounded to the nearest of 10 bits of its mantissa.
GEAR_CODE i64 code_of(float loss) {
    i64 code = ((i64)(bits_of(loss) & 0x7FFFFFFFu) + (1 << (DROPPED_BITS - 1))) >> DROPPED_BITS;
    return code < CODES ? code : CODES - 1;
}

// Give a segment its new mass, and the sums above what that is more than the old one.  Of a segment
// that is named several times the largest mass counts: whoever is first finds the old mass without
// a mark, and what all of them add telescopes to the largest less the old one, in any order.
GEAR_CODE void change(const UpdateJob& job, i64 number) {
    i64 at = row_of(job, number);
    u64 mass = job.masses[code_of(job.losses[number])];
    u64 before = atomicMax(job.tree.level[0] + at, MARK | mass);
    if ((MARK | mass) <= before) return;
    u64 more = mass - (before & ~MARK);  // modulo 2^64
    for (i64 level = 1; more && level < job.tree.levels; ++level) {
        at /= FAN;
        atomicAdd(job.tree.level[level] + at, more);
    }
}

}  // namespace gear

// One block, however large the batch: its threads wait for each other, and a step of training on
// many segments takes far longer.
extern "C" __global__ void __launch_bounds__(1024) tree_update(const __grid_constant__ gear::UpdateJob job) {
    using namespace gear;
    if (job.state[PAUSED]) return;
    bool good = true;
    for (i64 i = threadIdx.x; i < job.count; i += blockDim.x) good = good && usable(job, i);
    if (!__syncthreads_and(good)) return;
    for (i64 i = threadIdx.x; i < job.count; i += blockDim.x) change(job, i);
    __syncthreads();
    for (i64 i = threadIdx.x; i < job.count; i += blockDim.x) {
        volatile u64* mass = job.tree.level[0] + row_of(job, i);
        *mass = *mass & ~MARK;
    }
    if (threadIdx.x == 0) job.state[UPDATES] += 1;
}
