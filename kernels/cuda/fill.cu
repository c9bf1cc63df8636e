// One launch: gather segments that the host names, or draw by weight and gather.
#include "fill_run.cuh"

extern "C" __global__ void __launch_bounds__(256) fill_many(const __grid_constant__ gear::Job job) {
    gear::run_many<gear::Plain>(job);
}
extern "C" __global__ void __launch_bounds__(256) fill_8(const __grid_constant__ gear::Job job) {
    gear::run<gear::Plain, 8>(job);
}
extern "C" __global__ void __launch_bounds__(256) fill_16(const __grid_constant__ gear::Job job) {
    gear::run<gear::Plain, 16>(job);
}
extern "C" __global__ void __launch_bounds__(256) fill_32(const __grid_constant__ gear::Job job) {
    gear::run<gear::Plain, 32>(job);
}
