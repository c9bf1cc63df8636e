// Integer masses of many items with exact sums: choose by cumulative mass, change some masses.
//
// The GPU's `SumTree` of gear_offline/sampling/prioritized.py: the chosen item is the one whose cumulative
// masses enclose a number, in the order of the items, so that the shape of the tree changes nothing
// but the speed.  Sixteen masses are one line of 128 bytes.  Sums are integers modulo 2^64, so that
// atomic additions give the same bits in any order.  8.53 bytes an item.
#pragma once
#include "philox.cuh"

namespace gear {

enum { FAN = 16, MAX_LEVELS = 12, DROPPED_BITS = 13, CODES = 0x7F800000 >> DROPPED_BITS };
enum { UPDATES = 0, REFUSED = 1, WRONG = 2, PAUSED = 3 };  // words of a tree's state

struct Tree {
    u64* level[MAX_LEVELS];  // masses; then the sums over sixteen of the level before
    i64 levels;              // each a multiple of 16 long, filled up with zeros; the last has 16
};

struct alignas(16) Pair {
    u64 one, other;
};

GEAR_CODE u64 total_of(const Tree& tree) {
    const u64* top = tree.level[tree.levels - 1];
    u64 total = 0;
    for (int i = 0; i < FAN; ++i) total += top[i];
    return total;
}

// The item in whose range of masses `number`, below the total, lies.
GEAR_CODE i64 find(const Tree& tree, u64 number) {
    i64 at = 0;
    for (i64 level = tree.levels - 1; level >= 0; --level) {
        const Pair* sums = (const Pair*)(tree.level[level] + at * FAN);
        Pair found[FAN / 2];
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#pragma unroll
#endif
        for (int i = 0; i < FAN / 2; ++i) found[i] = sums[i];  // all in flight at once
        u64 end = 0, before = 0;
        int child = 0;
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#pragma unroll
#endif
        for (int i = 0; i < FAN - 1; ++i) {
            end += i % 2 ? found[i / 2].other : found[i / 2].one;
            bool beyond = number >= end;
            child += beyond;
            before = beyond ? end : before;
        }
        number -= before;
        at = at * FAN + child;
    }
    return at;
}

// A level of sums from the level below.
struct SumsJob {
    const u64* below;
    u64* sums;
    i64 count;  // of sums
};

GEAR_CODE u64 sum_of(const SumsJob& job, i64 at) {
    const Pair* pairs = (const Pair*)(job.below + at * FAN);
    u64 sum = 0;
    for (int i = 0; i < FAN / 2; ++i) sum += pairs[i].one + pairs[i].other;
    return sum;
}

// Masses of segments from their losses.
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
    } found;
    found.number = value;
    return found.word;
}

GEAR_CODE u64 exchange_max(u64* at, u64 value) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
    return atomicMax(at, value);
#else
    u64 before = *at;
    if (value > before) *at = value;
    return before;
#endif
}

GEAR_CODE void add(u64* at, u64 value) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
    atomicAdd(at, value);
#else
    *at += value;
#endif
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

// What a segment adds to the sums: the new mass less the old one.  Of a segment that is named
// several times the largest mass counts: whoever is first finds the old mass without a mark, and
// what all of them add telescopes to the largest less the old one, in any order.
struct Change {
    i64 row;
    u64 by;  // modulo 2^64
};

GEAR_CODE Change change(const UpdateJob& job, i64 number) {
    Change found = {row_of(job, number), 0};
    u64 mass = job.masses[code_of(job.losses[number])];
    u64 before = exchange_max(job.tree.level[0] + found.row, MARK | mass);
    if ((MARK | mass) > before) found.by = mass - (before & ~MARK);
    return found;
}

// Add to the sums of levels [first, last).
GEAR_CODE void spread(const Tree& tree, const Change& change, i64 first, i64 last) {
    i64 at = change.row;
    for (i64 level = 1; level < last && change.by; ++level) {
        at /= FAN;
        if (level >= first) add(tree.level[level] + at, change.by);
    }
}

GEAR_CODE void release(const UpdateJob& job, i64 number) {
    i64 row = row_of(job, number);
    if (row < 0) return;
    volatile u64* mass = job.tree.level[0] + row;
    *mass = *mass & ~MARK;
}

// Weights of losses that undo the preference of what drew: (1 / (N p)) ** beta over the largest.
struct ImportanceJob {
    const double* probability;  // (count,)
    float* weights;             // (count,)
    i64 count;
    i64 size;            // N
    const u64* counter;  // one more than the step that was drawn
    double beta;
    i64 beta_steps;  // 0: beta stays
};

GEAR_CODE double beta_of(const ImportanceJob& job) {
    if (job.beta_steps == 0) return job.beta;
    double share = (double)(i64)(*job.counter - 1) / (double)job.beta_steps;
    return job.beta + (1.0 - job.beta) * (share < 1.0 ? share : 1.0);
}

GEAR_CODE double weight_of(const ImportanceJob& job, double beta, i64 number) {
    double ratio = 1.0 / ((double)job.size * job.probability[number]);
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
    return pow(ratio, beta);
#else
    return __builtin_pow(ratio, beta);
#endif
}

}  // namespace gear
