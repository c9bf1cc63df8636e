// The optimiser kernel's text for the CPU: what its blocks do, one after the other.
#include "adamw.cuh"

extern "C" void adamw(const gear::AdamwJob* job) {
    double sum = 0.0;
    for (gear::i64 c = 0; c < job->chunk_count; ++c)
        for (gear::i64 i = 0; i < job->chunks[c].count; ++i) {
            double found = job->tensors[job->chunks[c].tensor].gradient[job->chunks[c].begin + i];
            sum += found * found;
        }
    double norm = __builtin_sqrt(sum);
    gear::Rule rule = gear::rule_of(*job, *job->index, norm);
    for (gear::i64 c = 0; c < job->chunk_count; ++c)
        for (gear::i64 i = 0; i < job->chunks[c].count; ++i) {
            const gear::Weights& tensor = job->tensors[job->chunks[c].tensor];
            gear::i64 at = job->chunks[c].begin + i;
            gear::write(tensor, at, gear::update(rule, gear::read(tensor, at)));
        }
    job->window[2 * *job->row] = *job->loss;
    job->window[2 * *job->row + 1] = (float)norm;
    *job->row += 1;
    *job->index += 1;
    for (gear::i64 i = 0; i < job->tensor_count; ++i) job->steps[i] = (float)*job->index;
}
extern "C" long long job_bytes() { return sizeof(gear::AdamwJob); }
