// The three ways to draw a segment, as gear_offline/batches/sampling draws it on the CPU: the same segments
// and probabilities, bit for bit.
//
// E episodes, N steps, B slots of a step.
#pragma once
#include "tree.cuh"

namespace gear {

enum Way { HOST_DRAWN = 0, WEIGHTS, PERMUTATION, PRIORITIES };
enum { ROUNDS = 8 };

// The way to draw, and what it looks at.
struct Sampling {
    i64 way;
    const u64* table;    // (E,) cumulative masses of the episodes (WEIGHTS), or their ends
    const i64* guide;    // of that table, as kernels/draws.py
    u64 shift;
    const i64* offsets;  // (E + 1,) of the episodes that are drawn from
    i64 size;            // N
    i64 bits;            // of the numbers below N, at least 2
    Tree tree;           // PRIORITIES
};

struct Drawn {
    i64 episode, start, left;  // steps from the start to the episode's end
};

// Place of the first number above `value`: it lies where the guide says.
GEAR_CODE i64 first_above(const Sampling& sampling, u64 value) {
    const i64* near = sampling.guide + (value >> sampling.shift);
    i64 low = near[0], high = near[1];
    while (low < high) {
        i64 middle = low + (high - low) / 2;
        if (value < sampling.table[middle])
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

// By a weight, which few registers do.
GEAR_CODE Drawn draw_weighted(const Sampling& sampling, const Draws& numbers) {
    Drawn drawn;
    drawn.episode = first_above(sampling, numbers.first);
    i64 length = sampling.offsets[drawn.episode + 1] - sampling.offsets[drawn.episode];
    drawn.start = bounded(numbers.second, length);
    drawn.left = length - drawn.start;
    return drawn;
}

struct Division {
    u64 quotient, rest;  // the quotient modulo 2^64
};

// (high * 2^64 + low) / by, for by up to 2^63.
GEAR_CODE Division divide(u64 high, u64 low, u64 by) {
    Division division = {0, high % by};
    if (high == 0) {
        division.quotient = low / by;
        division.rest = low % by;
        return division;
    }
    for (int bit = 63; bit >= 0; --bit) {
        u64 carry = division.rest >> 63;
        division.rest = division.rest << 1 | (low >> bit & 1);
        if (carry || division.rest >= by) {
            division.rest -= by;
            division.quotient |= 1ull << bit;
        }
    }
    return division;
}

GEAR_CODE u64 mixed(u64 value) {
    value ^= value >> 33;
    value *= 0xFF51AFD7ED558CCDull;
    value ^= value >> 33;
    value *= 0xC4CEB9FE1A85EC53ull;
    return value ^ value >> 33;
}

// What lies in a place of an epoch: `KeyedOrder` of kernels/draws.py.
GEAR_CODE i64 thing_at(u64 seed, u64 epoch, u64 size, i64 bits, u64 place) {
    Block block = make_block(seed, EPOCH_STREAM, epoch, 0);
    u64 turned = (u64)bounded(block.odd.first, (i64)size), further = block.even.second | 1;
    i64 below = bits / 2;
    u64 upper = (1ull << (bits - below)) - 1, lower = (1ull << below) - 1;
    do {
        u64 left = place >> below, right = place & lower, key = block.even.first;
        for (int i = 0; i < ROUNDS; i += 2) {
            left ^= mixed(right ^ key) & upper;
            key += further;
            right ^= mixed(left ^ key) & lower;
            key += further;
        }
        place = left << below | right;
    } while (place >= size);
    place += turned;
    return (i64)(place >= size ? place - size : place);
}

// The segment of slot `slot` of a step of `count` slots.
GEAR_CODE Drawn draw_segment(const Sampling& sampling, u64 seed, u64 step, u64 count, u64 slot) {
    i64 row;
    if (sampling.way == PERMUTATION) {  // place `step * count + slot` of an endless row of epochs
        u64 size = (u64)sampling.size;
        Division begin = divide(__umul64hi(step, count), step * count, size);
        u64 ahead = begin.rest + slot, epoch = (begin.quotient & ~(1ull << 63)) + ahead / size;
        row = thing_at(seed, epoch, size, sampling.bits, ahead % size);
    } else {
        Draws numbers = draw(seed, SELECTION_STREAM, step, count, slot);
        if (sampling.way == WEIGHTS) return draw_weighted(sampling, numbers);
        row = find(sampling.tree, (u64)bounded(numbers.first, (i64)total_of(sampling.tree)));
    }
    i64 episode = first_above(sampling, (u64)row);
    Drawn drawn = {episode, row - sampling.offsets[episode], sampling.offsets[episode + 1] - row};
    return drawn;
}

// The probability of a segment in one slot of a tree.
GEAR_CODE double chance_of(const Sampling& sampling, i64 episode, i64 start) {
    return (double)sampling.tree.level[0][sampling.offsets[episode] + start] /
           (double)total_of(sampling.tree);
}

}  // namespace gear
