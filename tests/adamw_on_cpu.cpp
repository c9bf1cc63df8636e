// The optimiser kernel's law for the CPU: what its blocks do, one element after the other.
#include "adamw.cuh"

template <bool SHADOWED>
static float gradient_of(const gear::Piece& piece, gear::i64 at) {
    if (SHADOWED) return gear::widen(((const gear::bf16*)piece.gradient)[at]);
    return ((const float*)piece.gradient)[at];
}

template <bool SHADOWED>
static void run(const gear::AdamwJob* job) {
    double sum = 0.0;
    for (gear::i64 p = 0; p < job->piece_count; ++p)
        for (gear::i64 i = 0; i < job->pieces[p].count; ++i) {
            double found = gradient_of<SHADOWED>(job->pieces[p], i);
            sum += found * found;
        }
    double norm = __builtin_sqrt(sum);
    gear::Rule rule = gear::rule_of(*job, *job->index);
    float scale = gear::scale_of(*job, norm);
    for (gear::i64 p = 0; p < job->piece_count; ++p)
        for (gear::i64 i = 0; i < job->pieces[p].count; ++i) {
            const gear::Piece& piece = job->pieces[p];
            gear::Element element = {piece.value[i], piece.first[i], piece.second[i],
                                     gradient_of<SHADOWED>(piece, i)};
            element = gear::update(rule, scale, element);
            piece.value[i] = element.value;
            piece.first[i] = element.first;
            piece.second[i] = element.second;
            if (SHADOWED) piece.shadow[i] = gear::narrow(element.value);
        }
    gear::finish(*job, norm);
    for (gear::i64 i = 0; i < job->tensor_count; ++i) job->steps[i] = (float)*job->index;
}

extern "C" void adamw(const gear::AdamwJob* job) { run<false>(job); }
extern "C" void adamw_shadowed(const gear::AdamwJob* job) { run<true>(job); }
extern "C" unsigned short narrow(float value) { return gear::narrow(value); }
extern "C" void sizes(long long* found) {
    const long long all[] = {sizeof(gear::AdamwJob), sizeof(gear::AdamwJobs), sizeof(gear::Piece),
                             sizeof(gear::Rule), gear::THREADS, gear::PIECE, gear::MOST_PARTIALS};
    for (int i = 0; i < 7; ++i) found[i] = all[i];
}
