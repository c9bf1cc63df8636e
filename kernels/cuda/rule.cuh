// What a law is told.
#pragma once
#include "tree.cuh"

namespace gear {

enum Law {
    UNIFORM_STEPS = 0,
    UNIFORM_EPISODES,
    CHOSEN,
    WEIGHTED_EPISODES,
    STRATIFIED,
    FIFO,
    LIFO,
    SHUFFLED,
    MIN_DT,
    D3RLPY,
    PRIORITIZED,
    MIXTURE
};

struct Rule {
    i64 law;
    i64 size;   // what is drawn from: rows, episodes, or thresholds that are searched
    i64 bits;   // of the numbers below size, at least 2: for keyed orders
    double value;           // the probability where every segment has the same
    const i64* lengths;     // (E + 1,) offsets of the table's episodes
    const i64* offsets;     // of what rows are located in: episodes, or windows' ends (D3RLPY)
    const i64* guide;       // for these offsets, as in Job
    i64 shift;
    const u64* thresholds;  // of episodes, or of the members of all strata one after the other
    const i64* members;     // episodes of the strata; or those that have ends of windows
    const double* chances;  // (E,) probability of each episode (STRATIFIED)
    i64 groups;             // strata
    const i64* begins;      // (groups,) of each stratum in members and thresholds
    const i64* counts;      // (groups,) thresholds of each that are searched
    Tree tree;              // PRIORITIZED
    const Rule* parts;      // of a MIXTURE
    i64 part_count;
    const i64* points;      // (point_count,) steps of the schedule
    i64 point_count;
    const u64* sums;        // (point_count, parts, 2): cumulative masses, low and high word
};

}  // namespace gear
