// As fill.cu and sample.cu, of a job in GPU memory: it may change between replays of a graph.
#include "fill_run.cuh"

namespace gear {
struct Live {
    const Job* job;
};
}  // namespace gear

extern "C" __global__ void __launch_bounds__(256) fill_many(const __grid_constant__ gear::Live live) {
    gear::run_many<gear::Plain>(*live.job);
}
extern "C" __global__ void __launch_bounds__(256) fill_8(const __grid_constant__ gear::Live live) {
    gear::run<gear::Plain, 8>(*live.job);
}
extern "C" __global__ void __launch_bounds__(256) fill_16(const __grid_constant__ gear::Live live) {
    gear::run<gear::Plain, 16>(*live.job);
}
extern "C" __global__ void __launch_bounds__(256) fill_32(const __grid_constant__ gear::Live live) {
    gear::run<gear::Plain, 32>(*live.job);
}
extern "C" __global__ void __launch_bounds__(256) sample_many(const __grid_constant__ gear::Live live) {
    gear::run_many<gear::Every>(*live.job);
}
extern "C" __global__ void __launch_bounds__(256) sample_8(const __grid_constant__ gear::Live live) {
    gear::run<gear::Every, 8>(*live.job);
}
extern "C" __global__ void __launch_bounds__(256) sample_16(const __grid_constant__ gear::Live live) {
    gear::run<gear::Every, 16>(*live.job);
}
extern "C" __global__ void __launch_bounds__(256) sample_32(const __grid_constant__ gear::Live live) {
    gear::run<gear::Every, 32>(*live.job);
}
