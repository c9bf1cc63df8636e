// One launch: select by one of the plain laws, and gather.
#include "fill_run.cuh"

extern "C" __global__ void __launch_bounds__(256) fill_many(const __grid_constant__ gear::Job job) {
    gear::run_many<gear::PlainLaw>(job);
}
extern "C" __global__ void __launch_bounds__(256) fill_8(const __grid_constant__ gear::Job job) {
    gear::run<gear::PlainLaw, 8>(job);
}
extern "C" __global__ void __launch_bounds__(256) fill_16(const __grid_constant__ gear::Job job) {
    gear::run<gear::PlainLaw, 16>(job);
}
extern "C" __global__ void __launch_bounds__(256) fill_32(const __grid_constant__ gear::Job job) {
    gear::run<gear::PlainLaw, 32>(job);
}
