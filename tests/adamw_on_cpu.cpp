// The optimiser kernel's text for the CPU: what its blocks do, one after the other.
#include "adamw.cuh"

template <bool SHADOWED>
static void run(const gear::AdamwJob* job) {
    double sum = 0.0;
    for (gear::i64 c = 0; c < job->chunk_count; ++c)
        for (gear::i64 i = 0; i < job->chunks[c].count; ++i) {
            gear::Chunk chunk = job->chunks[c];
            double found = gear::gradient_of<SHADOWED>(job->tensors[chunk.tensor], chunk.begin + i);
            sum += found * found;
        }
    double norm = __builtin_sqrt(sum);
    gear::Rule rule = gear::rule_of(*job, *job->index, norm);
    for (gear::i64 c = 0; c < job->chunk_count; ++c)
        for (gear::i64 i = 0; i < job->chunks[c].count; ++i) {
            const gear::Weights& tensor = job->tensors[job->chunks[c].tensor];
            gear::i64 at = job->chunks[c].begin + i;
            gear::write<SHADOWED>(tensor, at, gear::update(rule, gear::read<SHADOWED>(tensor, at)));
        }
    job->window[2 * *job->row] = *job->loss;
    job->window[2 * *job->row + 1] = (float)norm;
    *job->row += 1;
    *job->index += 1;
    for (gear::i64 i = 0; i < job->tensor_count; ++i) job->steps[i] = (float)*job->index;
}

extern "C" void adamw(const gear::AdamwJob* job) { run<false>(job); }
extern "C" void adamw_shadowed(const gear::AdamwJob* job) { run<true>(job); }
extern "C" unsigned short narrow(float value) { return gear::narrow(value); }
extern "C" long long job_bytes() { return sizeof(gear::AdamwJob); }
extern "C" long long jobs_bytes() { return sizeof(gear::AdamwJobs); }
