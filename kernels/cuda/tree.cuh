// Integer masses of many items with exact sums: choose by cumulative mass, change some masses.
//
// `HostPriorities` of gear_offline/batches/sampling/masses.py: the chosen item is the one whose cumulative
// masses enclose a number, in the order of the items, so that the shape of the tree changes nothing
// but the speed.  Sixteen masses are one line of 128 bytes.  Sums are integers modulo 2^64, so that
// atomic additions give the same bits in any order.  8.53 bytes an item.
#pragma once
#include "philox.cuh"

namespace gear {

enum { FAN = 16, MAX_LEVELS = 12 };

struct Tree {
    u64* level[MAX_LEVELS];  // masses; then the sums over sixteen of the level before
    i64 levels;              // each a multiple of 16 long, filled up with zeros; the last has 16
};

struct alignas(16) Pair {
    u64 first, second;
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
        Pair pairs[FAN / 2];
#pragma unroll
        for (int i = 0; i < FAN / 2; ++i) pairs[i] = sums[i];  // all in flight at once
        u64 end = 0, before = 0;
        int child = 0;
#pragma unroll
        for (int i = 0; i < FAN - 1; ++i) {
            end += i % 2 ? pairs[i / 2].second : pairs[i / 2].first;
            bool beyond = number >= end;
            child += beyond;
            before = beyond ? end : before;
        }
        number -= before;
        at = at * FAN + child;
    }
    return at;
}

}  // namespace gear
