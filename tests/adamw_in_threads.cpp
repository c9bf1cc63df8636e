// The optimiser's kernels with their blocks and threads.
#include "cuda_on_cpu.h"

#include "adamw.cu"

LAUNCHED(adamw_norm, gear::AdamwJob)
LAUNCHED(adamw_step, gear::AdamwJob)
LAUNCHED(adamw_norm_shadowed, gear::AdamwJob)
LAUNCHED(adamw_step_shadowed, gear::AdamwJob)
LAUNCHED(adamw_norm_together, gear::AdamwJobs)
LAUNCHED(adamw_step_together, gear::AdamwJobs)
