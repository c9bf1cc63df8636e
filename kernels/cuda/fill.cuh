// From (seed, step) to a finished batch: select segments, copy or cast their rows, write the rest.
//
// The work is cut into tasks: a task is one piece of one column group's window of one segment, or
// the timesteps, mask and name of a segment.  The lanes of a warp do a task; every lane draws the
// segment itself, which is cheaper than handing it over, so lanes never wait for each other.
//
// B segments a step, K steps of a window, E episodes.  All sizes are 64-bit.
#pragma once
#include "sample.cuh"

namespace gear {

enum Type { COPY = 0, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64 };
enum { MAX_GROUPS = 24, LANES = 32 };

struct Group {
    const i64* addresses;   // (E,) of each episode's first row
    unsigned char* out;     // (segments, K + history, row in the batch)
    i64 row_bytes;          // of the source
    i64 unit;               // bytes moved at once by a lane: 16, 8, 4, 2 or 1; divides the row
    i64 width;              // elements of a row
    i64 source;             // Type; COPY moves bytes
    i64 to_int64;           // a cast gives int64 instead of float32
    const double* mean;     // (width,) or null
    const double* divisor;  // (width,)
    i64 pieces;             // tasks of a window
    i64 piece;              // units (copy) or elements (cast) of a task
    i64 history;            // rows in front of a window: those before it in the episode, or zeros
    const char* row_zero;   // landing rows are counted from here: rows that came from other nodes
};

struct Job {
    u64 seed;
    const u64* counter;       // step on the device, or null
    u64 first_step;           // step of the first segments where there is no counter
    const i64* offsets;       // (E + 1,)
    const i64* reach;         // (E,) steps from an episode's first to the end of its history; or null
    i64 episodes;             // E
    const i64* chosen;        // (segments, 4) of HOST_DRAWN ones: episode, start, steps of the window at most,
                              // and the landing row of the start or -1
    i64 ring;                 // steps that `chosen` has segments of: step s is entry s % ring; or 0
    i64 rank_batch;           // B
    i64 first_slot;           // of this rank in the global batch
    i64 segments;             // B times the steps of this launch
    i64 span;                 // K
    i64 left;                 // padding on the left
    i64 repeat;               // padding, on the right, is the last real row instead of zeros
    i64 behind;               // what the GPU draws are windows of so many steps, and these begin at
                              // the last real step of each; or 0
    i64 tasks;                // of a segment
    i64 groups;
    i64 per_warp;             // segments of a warp, where windows are short and many
    i64* timesteps;           // (segments, K)
    i64* mask;                // (segments, K)
    i64* names;               // (segments, 2)
    u64* ticket;              // blocks that have read the counter
    i64 global_batch;         // slots of the global batch
    double* chances;          // (segments,) or null: the probability of each segment in its slot
    Sampling sampling;
    Group group[MAX_GROUPS];
};

struct Segment {
    i64 episode, start, real;
    i64 landing = -1;  // row of the start where it came from elsewhere, or -1: the episode's own
};

// A segment that the host has drawn.
GEAR_CODE Segment choose_host_drawn(const Job& job, u64 first_step, i64 segment) {
    i64 entry = job.ring ? (i64)(first_step % (u64)job.ring) * job.rank_batch + segment : segment;
    const i64* name = job.chosen + 4 * entry;
    Segment chosen = {name[0], name[1], 0, name[3]};
    bool known = chosen.episode >= 0 && chosen.episode < job.episodes && chosen.start >= 0;
    i64 left = known ? job.offsets[chosen.episode + 1] - job.offsets[chosen.episode] - chosen.start : 0;
    if (left < 1) return chosen;  // an empty window instead of memory that is not ours
    if (job.reach) left = job.reach[chosen.episode] - chosen.start;
    i64 most = name[2] > 1 ? name[2] : 1;
    most = most < job.span ? most : job.span;
    chosen.real = left < most ? left : most;
    return chosen;
}

// EVERY: any way to draw.  Otherwise named segments and weights, which take few registers.
template <bool EVERY>
GEAR_CODE Segment choose(const Job& job, u64 first_step, i64 segment) {
    if (!EVERY && job.sampling.way == HOST_DRAWN) return choose_host_drawn(job, first_step, segment);
    i64 ahead = segment / job.rank_batch;
    u64 slot = (u64)(segment - ahead * job.rank_batch + job.first_slot);
    u64 step = first_step + (u64)ahead, count = (u64)job.global_batch;
    Drawn drawn = EVERY ? draw_segment(job.sampling, job.seed, step, count, slot)
                        : draw_weighted(job.sampling, draw(job.seed, SELECTION_STREAM, step, count, slot));
    i64 left = job.reach ? job.reach[drawn.episode] - drawn.start : drawn.left;
    if (job.behind) {
        i64 past = (left < job.behind ? left : job.behind) - 1;
        drawn.start += past;
        left -= past;
    }
    Segment chosen = {drawn.episode, drawn.start, left < job.span ? left : job.span};
    return chosen;
}

// Write the probability of what was drawn, if anybody asks for it.
template <bool EVERY>
GEAR_CODE void note_chance(const Job& job, i64 place, const Segment& segment) {
    if (EVERY && job.chances)
        job.chances[place] = chance_of(job.sampling, segment.episode, segment.start);
}

typedef ulonglong2 Unit16;  // one load of 16 bytes

// Copy units [begin, end) of a window: those in [low, high) from `source`, zeros elsewhere; with
// `row`, units of a row, behind `high` the row before it again and again.
// Batches leave the caches at once (__stcs): what they push out there are rows.  Streaming loads
// do not help.
template <typename Unit>
GEAR_CODE void copy_piece(const Unit* source, Unit* out, i64 begin, i64 end, i64 low, i64 high,
                          i64 row, int lane) {
    i64 repeated = row && high < end ? (high > begin ? high : begin) : end;
    for (i64 at = repeated + lane; at < end; at += LANES)
        __stcs(out + at, source[high - low - row + (at - high) % row]);
    end = repeated;
    high = high < end ? high : end;
    for (i64 at = begin + lane; at < end; at += 8 * LANES) {  // eight loads in flight
        Unit loads[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            i64 here = at + i * LANES;
            loads[i] = here >= low && here < high ? source[here - low] : Unit{};
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (at + i * LANES < end) __stcs(out + at + i * LANES, loads[i]);
    }
}

// Where the row of a segment's first step is.
GEAR_CODE const char* first_row(const Group& group, const Segment& segment) {
    return segment.landing < 0
               ? (const char*)group.addresses[segment.episode] + segment.start * group.row_bytes
               : group.row_zero + segment.landing * group.row_bytes;
}

// Where the episode's rows lie in a window of job.span + group.history rows, and the first of them.
struct Extent {
    i64 low, high;  // rows
    const char* from;
};

GEAR_CODE Extent extent(const Job& job, const Group& group, const Segment& segment) {
    Extent rows = {0, 0, (const char*)0};
    if (segment.real == 0) return rows;
    i64 ahead = segment.start < group.history ? segment.start : group.history;
    rows.low = group.history - ahead + (job.left ? job.span - segment.real : 0);
    rows.high = rows.low + ahead + segment.real;
    rows.from = first_row(group, segment) - ahead * group.row_bytes;
    return rows;
}

GEAR_CODE void copy_rows(const Job& job, const Group& group, const Segment& segment, i64 number,
                         i64 piece, int lane) {
    i64 row = group.row_bytes / group.unit, all = (job.span + group.history) * row;
    i64 begin = piece * group.piece;
    i64 end = begin + group.piece < all ? begin + group.piece : all;
    Extent rows = extent(job, group, segment);
    i64 low = rows.low * row, high = rows.high * row;
    const char* from = rows.from;
    unsigned char* to = group.out + number * all * group.unit;
    row = job.repeat && segment.real ? row : 0;
    switch (group.unit) {
        case 16: copy_piece((const Unit16*)from, (Unit16*)to, begin, end, low, high, row, lane); break;
        case 8: copy_piece((const u64*)from, (u64*)to, begin, end, low, high, row, lane); break;
        case 4: copy_piece((const u32*)from, (u32*)to, begin, end, low, high, row, lane); break;
        case 2: copy_piece((const u16*)from, (u16*)to, begin, end, low, high, row, lane); break;
        default: copy_piece((const unsigned char*)from, to, begin, end, low, high, row, lane);
    }
}

GEAR_CODE float half_to_float(u16 bits) {  // exact
    u32 sign = (u32)(bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, rest = bits & 1023u;
    union {
        u32 word;
        float number;
    } result;
    if (exponent == 31u) {
        result.word = sign | 0x7F800000u | rest << 13;
    } else if (exponent) {
        result.word = sign | (exponent + 112u) << 23 | rest << 13;
    } else {
        result.number = (float)rest * 5.9604644775390625e-08f;  // 2^-24
        result.word |= sign;
    }
    return result.number;
}

// One rounding, as gear_offline.kernels.columns.final_values: normalised in float64, or cast directly.
template <typename Source>
GEAR_CODE void cast_one(const Group& group, Source value, i64 column, i64 at) {
    if (group.to_int64)
        ((i64*)group.out)[at] = (i64)value;
    else if (group.mean)
        ((float*)group.out)[at] =
            (float)(((double)value - group.mean[column]) / group.divisor[column]);
    else
        ((float*)group.out)[at] = (float)value;
}

GEAR_CODE void cast_element(const Group& group, const char* from, i64 index, i64 column, i64 at) {
    switch (group.source) {
        case F16:
            cast_one(group, half_to_float(((const u16*)from)[index]), column, at);
            break;
        case F32: cast_one(group, ((const float*)from)[index], column, at); break;
        case F64: cast_one(group, ((const double*)from)[index], column, at); break;
        case I8: cast_one(group, ((const signed char*)from)[index], column, at); break;
        case I16: cast_one(group, ((const short*)from)[index], column, at); break;
        case I32: cast_one(group, ((const int*)from)[index], column, at); break;
        case I64: cast_one(group, ((const i64*)from)[index], column, at); break;
        case U8: cast_one(group, ((const unsigned char*)from)[index], column, at); break;
        case U16: cast_one(group, ((const u16*)from)[index], column, at); break;
        case U32: cast_one(group, ((const u32*)from)[index], column, at); break;
        default: cast_one(group, ((const u64*)from)[index], column, at);
    }
}

GEAR_CODE void cast_rows(const Job& job, const Group& group, const Segment& segment, i64 number,
                         i64 piece, int lane) {
    i64 all = (job.span + group.history) * group.width, base = number * all;
    i64 begin = piece * group.piece;
    i64 end = begin + group.piece < all ? begin + group.piece : all;
    Extent rows = extent(job, group, segment);
    i64 low = rows.low * group.width, high = rows.high * group.width;
    const char* from = rows.from;
    bool repeat = job.repeat && segment.real;
    for (i64 at = begin + lane; at < end; at += LANES) {
        i64 column = at % group.width;
        if (at >= low && (at < high || repeat))
            cast_element(group, from, at < high ? at - low : high - low - group.width + column,
                         column, base + at);
        else if (group.to_int64)
            ((i64*)group.out)[base + at] = 0;
        else
            ((float*)group.out)[base + at] = 0.0f;
    }
}

GEAR_CODE void name_segment(const Job& job, const Segment& segment, i64 number, int lane) {
    i64 low = job.left ? job.span - segment.real : 0, high = low + segment.real;
    for (i64 k = lane; k < job.span; k += LANES) {
        bool real = k >= low && k < high;
        job.timesteps[number * job.span + k] = real ? segment.start + k - low : 0;
        job.mask[number * job.span + k] = real ? 1 : 0;
    }
    if (lane == 0) {
        job.names[2 * number] = segment.episode;
        job.names[2 * number + 1] = segment.start;
    }
}

template <bool EVERY>
GEAR_CODE void run_task(const Job& job, u64 first_step, i64 task, int lane) {
    i64 number = task / job.tasks, part = task - number * job.tasks;
    Segment segment = choose<EVERY>(job, first_step, number);
    for (i64 s = 0; s < job.groups; ++s) {
        const Group& group = job.group[s];
        if (part < group.pieces) {
            if (group.source == COPY)
                copy_rows(job, group, segment, number, part, lane);
            else
                cast_rows(job, group, segment, number, part, lane);
            return;
        }
        part -= group.pieces;
    }
    name_segment(job, segment, number, lane);
    if (lane == 0) note_chance<EVERY>(job, number, segment);
}

}  // namespace gear
