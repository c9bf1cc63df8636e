// The gather kernels' text for the CPU: every lane of every task, one after the other.
#include "fill.cuh"

template <int LANES>
static void run(const gear::Job& job) {
    gear::u64 step = job.first_step;
    if (job.counter) {
        step = *job.counter;
        *const_cast<gear::u64*>(job.counter) = step + 1;
    }
    for (gear::i64 task = 0; task < job.segments * job.tasks; ++task)
        for (int lane = 0; lane < LANES; ++lane)
            gear::run_task<gear::Plain, LANES>(job, step, task, lane);
}

extern "C" void run_fill_8(const gear::Job* job) { run<8>(*job); }
extern "C" void run_fill_16(const gear::Job* job) { run<16>(*job); }
extern "C" void run_fill_32(const gear::Job* job) { run<32>(*job); }
extern "C" void run_fill_many(const gear::Job* job) { run<8>(*job); }
extern "C" long long job_bytes() { return sizeof(gear::Job); }
