// One launch: gather segments that the host names, or draw by weight and gather.
#include "fill_run.cuh"

GEAR_KERNELS(fill, false, Job)
