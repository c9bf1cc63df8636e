// Every law of gear_offline/laws, as its twin there: the same segments and probabilities, bit for
// bit.  Probabilities are float64 in the twin's order of operations.
//
// E episodes, N steps, T steps of one episode, K steps of a window, B slots of a batch.
#pragma once
#include "fill.cuh"
#include "order.cuh"
#include "tree.cuh"

namespace gear {

enum { PART_STREAM = 1, ROTATION_STREAM = 2 };
#define TO_SHARE 5.42101086242752217e-20  // 2^-64, of a mass

struct Drawn {
    i64 episode, start;
    i64 most;  // steps of the window at most
};

GEAR_CODE i64 length_of(const Rule& rule, i64 episode) {
    return rule.lengths[episode + 1] - rule.lengths[episode];
}

// The segment that begins at a row; rows are those of the rule's own offsets.
GEAR_CODE Drawn at_row(const Rule& rule, i64 row, i64 span) {
    const i64* near = rule.guide + (row >> rule.shift);
    Drawn found;
    found.episode = last_not_above(rule.offsets, near[0], near[1], row);
    found.start = row - rule.offsets[found.episode];
    found.most = span;
    return found;
}

GEAR_CODE Drawn draw_stratum(const Job& job, const Rule& rule, u64 step, u32 slot, u64 first) {
    Draws rotation = draw(job.seed, ROTATION_STREAM, step, 0);
    i64 group = (bounded(rotation.first, rule.groups) + (i64)slot) % rule.groups;
    i64 begin = rule.begins[group];
    Drawn found = {rule.members[begin + first_above(rule.thresholds + begin, rule.counts[group],
                                                    first)],
                   0, job.span};
    return found;
}

// What one law that is no mixture draws in a slot of the global batch.
GEAR_CODE Drawn draw_slot(const Job& job, const Rule& rule, u64 step, u32 slot) {
    Draws draws = draw(job.seed, SELECTION_STREAM, step, slot);
    Drawn found = {0, 0, job.span};
    switch (rule.law) {
        case UNIFORM_STEPS: return at_row(rule, bounded(draws.first, rule.size), job.span);
        case UNIFORM_EPISODES: found.episode = bounded(draws.first, rule.size); break;
        case WEIGHTED_EPISODES:
            found.episode = first_above(rule.thresholds, rule.size, draws.first);
            break;
        case STRATIFIED: found = draw_stratum(job, rule, step, slot, draws.first); break;
        case FIFO:
        case LIFO:
        case SHUFFLED: {
            Turn turn = turn_of(step, (u64)job.whole, slot, (u64)rule.size);
            i64 row = (i64)turn.place;
            if (rule.law == LIFO) row = rule.size - 1 - row;
            if (rule.law == SHUFFLED)
                row = thing_at(job.seed, turn.epoch, (u64)rule.size, rule.bits, turn.place);
            return at_row(rule, row, job.span);
        }
        case MIN_DT: {  // size: episodes; an epoch has as many full batches as they make
            u64 full = (u64)(rule.size / job.whole);
            u64 place = step % full * (u64)job.whole + slot;
            found.episode = thing_at(job.seed, step / full, (u64)rule.size, rule.bits, place);
            i64 begins = length_of(rule, found.episode) - job.span;
            found.start = bounded(draws.second, (begins > 0 ? begins : 0) + 1);
            return found;
        }
        case D3RLPY: {  // rows are ends of windows
            Drawn end = at_row(rule, bounded(draws.first, rule.size), job.span);
            found.episode = rule.members[end.episode];
            found.start = end.start + 1 > job.span ? end.start + 1 - job.span : 0;
            found.most = end.start + 1 - found.start;
            return found;
        }
        default:  // PRIORITIZED
            return at_row(rule, find(rule.tree, (u64)bounded(draws.first,
                                                             (i64)total_of(rule.tree))), job.span);
    }
    found.start = bounded(draws.second, length_of(rule, found.episode));
    return found;
}

// The probability of a segment in one slot, under a law that is no mixture.
GEAR_CODE double density(const Rule& rule, i64 episode, i64 start, i64 span) {
    switch (rule.law) {
        case UNIFORM_EPISODES:
            return 1.0 / ((double)rule.size * (double)length_of(rule, episode));
        case WEIGHTED_EPISODES: {
            u64 before = episode > 0 ? rule.thresholds[episode - 1] : 0;
            double mass = (double)(rule.thresholds[episode] - before);
            mass += episode == rule.size - 1 ? 1.0 : 0.0;  // the last one reaches 2^64
            return mass * TO_SHARE / (double)length_of(rule, episode);
        }
        case STRATIFIED: return rule.chances[episode] / (double)length_of(rule, episode);
        case MIN_DT: {
            i64 begins = length_of(rule, episode) - span;
            return 1.0 / ((double)rule.size * (double)((begins > 0 ? begins : 0) + 1));
        }
        case PRIORITIZED:
            return (double)rule.tree.level[0][rule.offsets[episode] + start] /
                   (double)total_of(rule.tree);
        default: return rule.value;
    }
}

struct Wide {
    u64 high, low;  // up to 2^64
};

GEAR_CODE Wide sum_at(const Rule& rule, i64 point, i64 part) {
    const u64* words = rule.sums + 2 * (point * rule.part_count + part);
    Wide found = {words[1], words[0]};
    return found;
}

// Cumulative mass of parts 0 .. `part` of a mixture at a step: linear between points, rounded down.
GEAR_CODE Wide cumulative(const Rule& rule, u64 step, i64 part) {
    i64 after = 0;  // points up to the step
    while (after < rule.point_count && (u64)rule.points[after] <= step) ++after;
    if (after == 0) return sum_at(rule, 0, part);
    if (after == rule.point_count) return sum_at(rule, after - 1, part);
    Wide from = sum_at(rule, after - 1, part), to = sum_at(rule, after, part);
    u64 ahead = step - (u64)rule.points[after - 1];
    u64 wide = (u64)(rule.points[after] - rule.points[after - 1]);
    bool up = to.high > from.high || (to.high == from.high && to.low >= from.low);
    u64 by = up ? to.low - from.low : from.low - to.low;
    bool whole = by == 0 && to.high != from.high;  // 2^64
    Division moved = whole ? divide(ahead, 0, wide)
                           : divide(__umul64hi(by, ahead), by * ahead, wide);
    Wide found = from;
    if (up) {
        found.low += moved.quotient;
        found.high += found.low < moved.quotient;
    } else {  // downwards, so the quotient is rounded up
        u64 down = moved.quotient + (moved.rest != 0);
        found.high -= found.low < down;
        found.low -= down;
    }
    return found;
}

GEAR_CODE i64 part_of(const Rule& rule, u64 step, u64 number) {
    i64 low = 0, high = rule.part_count - 1;  // the first whose cumulative mass is above
    while (low < high) {
        i64 middle = (low + high) / 2;
        Wide sum = cumulative(rule, step, middle);
        if (sum.high || number < sum.low)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

struct AnyLaw {
    GEAR_MEMBER Drawn drawn(const Job& job, u64 step, u32 slot) {
        if (job.rule.law != MIXTURE) return draw_slot(job, job.rule, step, slot);
        u64 number = draw(job.seed, PART_STREAM, step, slot).first;
        return draw_slot(job, job.rule.parts[part_of(job.rule, step, number)], step, slot);
    }

    GEAR_MEMBER u64 step_of(const Job& job, u64 first_step, i64 segment) {
        return first_step + (u64)(segment / job.per_step);
    }

    GEAR_MEMBER Segment choose(const Job& job, u64 first_step, i64 segment) {
        Drawn mine = drawn(job, step_of(job, first_step, segment),
                           (u32)(segment % job.per_step + job.first_slot));
        i64 left = length_of(job.rule, mine.episode) - mine.start;
        Segment found = {mine.episode, mine.start, left < mine.most ? left : mine.most};
        return found;
    }

    // Write the probability of what was drawn, if anybody asks for it.
    GEAR_MEMBER void note(const Job& job, u64 first_step, i64 segment, const Segment& mine) {
        if (!job.chances) return;
        const Rule& rule = job.rule;
        if (rule.law != MIXTURE) {
            job.chances[segment] = density(rule, mine.episode, mine.start, job.span);
            return;
        }
        u64 step = step_of(job, first_step, segment);
        double found = 0.0;
        Wide before = {0, 0};
        for (i64 part = 0; part < rule.part_count; ++part) {
            Wide sum = cumulative(rule, step, part);
            u64 mass = sum.low - before.low;
            bool whole = mass == 0 && sum.high != before.high;
            double share = whole ? 1.0 : (double)mass * TO_SHARE;
            if (share > 0.0)
                found += share * density(rule.parts[part], mine.episode, mine.start, job.span);
            before = sum;
        }
        job.chances[segment] = found;
    }
};

}  // namespace gear
