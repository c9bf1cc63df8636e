// The kernels of fills, draws and trees with their blocks and threads.
#include "cuda_on_cpu.h"

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
