// As fill.cu and sample.cu, of a job in GPU memory.
#include "fill_run.cuh"

GEAR_KERNELS(fill, false, Live)
GEAR_KERNELS(sample, true, Live)
