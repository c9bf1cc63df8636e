// The fill kernel's text for the CPU: every lane of every task, one after the other.
#include "fill.cuh"

template <int LANES>
static void all(const gear::Job& job, gear::u64 step) {
    for (gear::i64 task = 0; task < job.segments * job.tasks; ++task)
        for (int lane = 0; lane < LANES; ++lane) gear::run_task<gear::PlainLaw, LANES>(job, step, task, lane);
}

extern "C" void fill(const gear::Job* job, gear::u64 step, int lanes) {
    if (lanes == 8) all<8>(*job, step);
    else if (lanes == 16) all<16>(*job, step);
    else all<32>(*job, step);
}
extern "C" long long job_bytes() { return sizeof(gear::Job); }
