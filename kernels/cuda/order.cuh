// A keyed order of N things, as gear_offline/sampling/bijection.py, and places of an endless row of
// epochs, as gear_offline/sampling/ordered.py.
#pragma once
#include "philox.cuh"

namespace gear {

enum { EPOCH_STREAM = 3, ROUNDS = 8 };

struct Division {
    u64 quotient, rest;  // the quotient modulo 2^64
};

// (high * 2^64 + low) / by, for by up to 2^63.
GEAR_CODE Division divide(u64 high, u64 low, u64 by) {
    Division found;
    if (high == 0) {
        found.quotient = low / by;
        found.rest = low % by;
        return found;
    }
    found.quotient = 0;
    found.rest = high % by;
    for (int bit = 63; bit >= 0; --bit) {
        u64 carry = found.rest >> 63;
        found.rest = found.rest << 1 | (low >> bit & 1);
        if (carry || found.rest >= by) {
            found.rest -= by;
            found.quotient |= 1ull << bit;
        }
    }
    return found;
}

struct Turn {
    u64 epoch, place;
};

// Where slot `slot` of step `step` lies, of `count` slots a step and epochs of `size` places.
GEAR_CODE Turn turn_of(u64 step, u64 count, u64 slot, u64 size) {
    Division begin = divide(__umul64hi(step, count), step * count, size);
    u64 ahead = begin.rest + slot;
    Turn found = {(begin.quotient & ~(1ull << 63)) + ahead / size, ahead % size};
    return found;
}

GEAR_CODE u64 mixed(u64 value) {
    value ^= value >> 33;
    value *= 0xFF51AFD7ED558CCDull;
    value ^= value >> 33;
    value *= 0xC4CEB9FE1A85EC53ull;
    return value ^ value >> 33;
}

// What lies in a place of an epoch, of `size` things whose numbers take `bits` bits (at least 2).
GEAR_CODE i64 thing_at(u64 seed, u64 epoch, u64 size, i64 bits, u64 place) {
    u64 keys[ROUNDS], turned = 0;
    for (u32 i = 0; i < ROUNDS; ++i) {
        Draws draws = draw(seed, EPOCH_STREAM, epoch, i);
        keys[i] = draws.first;
        if (i == 0) turned = (u64)bounded(draws.second, (i64)size);
    }
    i64 below = bits / 2;
    u64 upper = (1ull << (bits - below)) - 1, lower = (1ull << below) - 1;
    do {
        u64 left = place >> below, right = place & lower;
        for (int i = 0; i < ROUNDS; i += 2) {
            left ^= mixed(right ^ keys[i]) & upper;
            right ^= mixed(left ^ keys[i + 1]) & lower;
        }
        place = left << below | right;
    } while (place >= size);
    place += turned;
    return (i64)(place >= size ? place - size : place);
}

}  // namespace gear
