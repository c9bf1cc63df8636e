// Draw global batches, and name the segments of one rank, as `Assigner` of
// gear_offline/distributed/sharding.py assigns them: to a rank of the node that holds them, and what
// exceeds a node's share to the nodes that lack some.
//
// N slots of a step, D nodes, E episodes, B segments of a rank.  A block for each step.  Its warps
// have runs of slots side by side, and draw them to count, then again to name, unless a lane has one
// slot only.  Lane d counts what node d holds.
#include "sample.cuh"

namespace gear {

enum { MOST_NODES = 32, MOST_WARPS = 32, ALL_LANES = 0xFFFFFFFFu };

struct AssignJob {
    u64 seed;
    const u64* counter;  // step on the device, or null; it is added to
    u64 first_step;      // of the first block
    i64 global_batch;    // N
    const i64* homes;    // (E,) the node that holds each episode
    const i64* shares;   // (D,) segments that a node's ranks take of a step
    i64 nodes;           // D
    i64 node;            // of this rank
    i64 turn;            // of this rank among those of its node
    i64 ranks;           // of its node
    i64 rank_batch;      // B
    i64* names;          // (steps, B, 4) as `chosen` of fill.cuh
    Sampling sampling;
};

// A slot's segment, and its home; -1 behind the last slot.
struct Held {
    Drawn drawn;
    int home;
};

GEAR_CODE Held draw_held(const AssignJob& job, u64 step, i64 slot) {
    Held held = {{0, 0, 0}, -1};
    if (slot >= job.global_batch) return held;
    held.drawn = draw_segment(job.sampling, job.seed, step, (u64)job.global_batch, (u64)slot);
    held.home = (int)job.homes[held.drawn.episode];
    return held;
}

// Sum of the values of the lanes before this one.
GEAR_CODE int sum_before(int value, int nodes, int lane) {
    int sum = 0;
    for (int d = 0; d < nodes; ++d) {
        int other = __shfl_sync(ALL_LANES, value, d);
        if (d < lane) sum += other;
    }
    return sum;
}

}  // namespace gear

extern "C" __global__ void __launch_bounds__(1024)
    assign(const __grid_constant__ gear::AssignJob job) {
    using namespace gear;
    __shared__ int counts[MOST_WARPS][MOST_NODES];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    int nodes = (int)job.nodes;
    // Two loads of their own: of `counter ? *counter : first_step` NVRTC made one, from an address
    // that it chose, and read the parameter as if it lay in global memory.
    u64 step = job.first_step + blockIdx.x;
    if (job.counter) step += *(const volatile u64*)job.counter;
    i64 run = (job.global_batch + 32 * warps - 1) / (32 * warps) * 32;
    i64 begin = warp * run, end = begin + run;
    int held_here = 0;  // by node `lane`, in this warp's run
    Held segment = {{0, 0, 0}, -1};
    for (i64 base = begin; base < end; base += 32) {
        segment = draw_held(job, step, base + lane);
        for (int d = 0; d < nodes; ++d) {
            u32 those = __ballot_sync(ALL_LANES, segment.home == d);
            if (lane == d) held_here += __popc(those);
        }
    }
    counts[warp][lane] = held_here;
    __syncthreads();
    int before = 0, held = 0;  // in the runs of earlier warps, in all
    for (int w = 0; w < warps; ++w) {
        if (w < warp) before += counts[w][lane];
        held += counts[w][lane];
    }
    int share = lane < nodes ? (int)job.shares[lane] : 0;
    int over_before = sum_before(held > share ? held - share : 0, nodes, lane);
    int lack_before = sum_before(held < share ? share - held : 0, nodes, lane);
    int mine = (int)job.node, my_held = __shfl_sync(ALL_LANES, held, mine);
    int my_share = __shfl_sync(ALL_LANES, share, mine);
    int my_lack_before = __shfl_sync(ALL_LANES, lack_before, mine);
    for (i64 base = begin; base < end; base += 32) {
        if (run > 32) segment = draw_held(job, step, base + lane);
        int at = 0;  // among those of its home
        for (int d = 0; d < nodes; ++d) {
            u32 those = __ballot_sync(ALL_LANES, segment.home == d);
            int first = __shfl_sync(ALL_LANES, before, d);
            if (segment.home == d) at = first + __popc(those & ((1u << lane) - 1));
            if (lane == d) before += __popc(those);
        }
        int home = segment.home < 0 ? 0 : segment.home;
        int home_share = __shfl_sync(ALL_LANES, share, home);
        int home_over = __shfl_sync(ALL_LANES, over_before, home);
        if (segment.home < 0) continue;
        int place = at;  // among those of this rank's node
        if (at >= home_share)
            place = my_held + home_over + at - home_share - my_lack_before;
        else if (home != mine)
            continue;
        bool moves = at >= home_share;
        if (moves && (place < my_held || place >= my_share)) continue;
        if (place % job.ranks != job.turn) continue;
        i64* name = job.names + 4 * (blockIdx.x * job.rank_batch + place / job.ranks);
        name[0] = segment.drawn.episode;
        name[1] = segment.drawn.start;
        name[2] = segment.drawn.left;
        name[3] = -1;
    }
}
