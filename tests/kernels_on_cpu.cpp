// All kernels with their blocks and threads, and some of their functions alone.
#include "cuda_on_cpu.h"

#include "adamw.cu"
#include "fill.cu"
#include "sample.cu"
#include "tree.cu"

LAUNCHED(fill_each, gear::Job)
LAUNCHED(fill_many, gear::Job)
LAUNCHED(sample_each, gear::Job)
LAUNCHED(sample_many, gear::Job)
LAUNCHED(tree_update, gear::UpdateJob)
LAUNCHED(adamw_norm, gear::AdamwJobs)
LAUNCHED(adamw_step, gear::AdamwJobs)
LAUNCHED(adamw_norm_shadowed, gear::AdamwJobs)
LAUNCHED(adamw_step_shadowed, gear::AdamwJobs)

using namespace gear;

extern "C" void draw_all(u64 seed, u64 stream, u64 step, u64 steps, u64 count, u64* out) {
    for (u64 i = 0; i < steps * count; ++i) {
        Draws numbers = draw(seed, stream, step + i / count, count, i % count);
        *out++ = numbers.first;
        *out++ = numbers.second;
    }
}

extern "C" i64 size_of(int which) {
    switch (which) {
        case 0: return sizeof(Job);
        case 1: return sizeof(UpdateJob);
        case 2: return sizeof(AdamwJobs);
        case 3: return sizeof(Piece);
        case 4: return sizeof(Rule);
        default: return sizeof(Tree);
    }
}
