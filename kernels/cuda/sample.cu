// One launch: draw in any way, and gather.
#include "fill_run.cuh"

GEAR_KERNELS(sample, true, Job)
