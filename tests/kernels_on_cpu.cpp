// All kernels with their blocks and threads, and some of their functions alone.
#include "cuda_on_cpu.h"

#include "adamw.cu"
#include "fill.cu"
#include "sample.cu"
#include "tree.cu"

#define FILLS(source)                        \
    LAUNCHED(source##_many, gear::Job)       \
    LAUNCHED(source##_8, gear::Job)          \
    LAUNCHED(source##_16, gear::Job)         \
    LAUNCHED(source##_32, gear::Job)
FILLS(fill)
FILLS(sample)
LAUNCHED(sample_alone, gear::Job)
LAUNCHED(tree_sums, gear::SumsJob)
LAUNCHED(tree_update, gear::UpdateJob)
LAUNCHED(tree_check, gear::UpdateJob)
LAUNCHED(tree_apply, gear::UpdateJob)
LAUNCHED(tree_release, gear::UpdateJob)
LAUNCHED(tree_weigh, gear::ImportanceJob)
LAUNCHED(adamw_norm, gear::AdamwJob)
LAUNCHED(adamw_step, gear::AdamwJob)
LAUNCHED(adamw_norm_shadowed, gear::AdamwJob)
LAUNCHED(adamw_step_shadowed, gear::AdamwJob)
LAUNCHED(adamw_norm_together, gear::AdamwJobs)
LAUNCHED(adamw_step_together, gear::AdamwJobs)

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
        case 1: return sizeof(Sampling);
        case 2: return sizeof(UpdateJob);
        case 3: return sizeof(ImportanceJob);
        default: return sizeof(Tree);
    }
}
