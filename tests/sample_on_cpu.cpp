// The kernels of draws, trees and fills for the CPU: what their threads do, one after the other.
#include "fill.cuh"

using namespace gear;

// The step of a launch; a counter on the device goes on by one.
static u64 step_of_launch(const Job& job) {
    if (!job.counter) return job.first_step;
    u64 step = *job.counter;
    *const_cast<u64*>(job.counter) = step + 1;
    return step;
}

template <typename Sampler, int LANES>
static void fill(const Job& job) {
    u64 step = step_of_launch(job);
    for (i64 task = 0; task < job.segments * job.tasks; ++task)
        for (int lane = 0; lane < LANES; ++lane) run_task<Sampler, LANES>(job, step, task, lane);
}

#define FILLS(name, Sampler)                                                  \
    extern "C" void run_##name##_8(const Job* job) { fill<Sampler, 8>(*job); }   \
    extern "C" void run_##name##_16(const Job* job) { fill<Sampler, 16>(*job); } \
    extern "C" void run_##name##_32(const Job* job) { fill<Sampler, 32>(*job); } \
    extern "C" void run_##name##_many(const Job* job) { fill<Sampler, 8>(*job); }
FILLS(fill, Plain)
FILLS(sample, Every)

extern "C" void run_sample_alone(const Job* job) {
    u64 step = step_of_launch(*job);
    for (i64 i = 0; i < job->segments; ++i) {
        Segment mine = Every::choose(*job, step, i);
        job->names[2 * i] = mine.episode;
        job->names[2 * i + 1] = mine.start;
        Every::note(*job, i, mine);
    }
}

extern "C" void run_tree_sums(const SumsJob* job) {
    for (i64 at = 0; at < job->count; ++at) job->sums[at] = sum_of(*job, at);
}

extern "C" void run_tree_update(const UpdateJob* job) {
    if (job->state[PAUSED]) return;
    bool good = true;
    for (i64 i = 0; i < job->count; ++i) good = good && usable(*job, i);
    if (good) {
        for (i64 i = 0; i < job->count; ++i)
            spread(job->tree, change(*job, i), 1, job->tree.levels);
        for (i64 i = 0; i < job->count; ++i) release(*job, i);
    }
    job->state[good ? UPDATES : REFUSED] += 1;
}

// A large batch: the last of three launches does all.
extern "C" void run_tree_check(const UpdateJob*) {}
extern "C" void run_tree_apply(const UpdateJob*) {}
extern "C" void run_tree_release(const UpdateJob* job) { run_tree_update(job); }

extern "C" void run_tree_weigh(const ImportanceJob* job) {
    double beta = beta_of(*job), largest = 0.0;
    for (i64 i = 0; i < job->count; ++i) {
        double weight = weight_of(*job, beta, i);
        largest = weight > largest ? weight : largest;
    }
    for (i64 i = 0; i < job->count; ++i)
        job->weights[i] = (float)(weight_of(*job, beta, i) / largest);
}

extern "C" void tree_find(const Tree* tree, const u64* numbers, i64 count, i64* items) {
    for (i64 i = 0; i < count; ++i) items[i] = find(*tree, numbers[i]);
}

extern "C" void draw_all(u64 seed, u64 stream, u64 step, u64 steps, u64 count, u64* out) {
    for (u64 i = 0; i < steps * count; ++i) {
        Draws numbers = draw(seed, stream, step + i / count, count, i % count);
        *out++ = numbers.first;
        *out++ = numbers.second;
    }
}

extern "C" i64 size_of(int which) {
    switch (which) {
        case 0: return sizeof(Job);
        case 1: return sizeof(Sampling);
        case 2: return sizeof(UpdateJob);
        case 3: return sizeof(ImportanceJob);
        default: return sizeof(Tree);
    }
}
