// Draws from rows of logits: what the reference of `heavypath.kernels.sampling` does.

#include "filters.h"

namespace heavypath {

struct Draw {
    const float* logits;  // [R, V]
    int64_t stride, rows, vocab, k;
    Filters filters;
    const int64_t* seed;
    const int64_t* noise_rows;  // [R]; null for 0, 1, 2, ...
    int64_t replacement, uniform_fill;
    int64_t* tokens;  // [R, k], as the next two
    float *keys, *logprobs;
    int64_t threads;
};

void draw_row(const Draw& d, int64_t r) {
    const float* x = d.logits + r * d.stride;
    const int64_t vocab = d.vocab, noise_row = d.noise_rows ? d.noise_rows[r] : r, within = std::min(d.k, vocab);
    int64_t* tokens = d.tokens + r * d.k;
    float *keys = d.keys + r * d.k, *logprobs = d.logprobs + r * d.k;
    const bool noisy = d.filters.temperature > 0;
    const float largest = largest_of(x, vocab);
    const float none = largest == -INFINITY || std::isfinite(largest) ? -INFINITY : NAN;
    std::fill(tokens, tokens + d.k, -1), std::fill(keys, keys + d.k, none), std::fill(logprobs, logprobs + d.k, none);
    const Philox philox(*d.seed);
    std::vector<float> scores(vocab + WIDTH, -INFINITY), weights(vocab + WIDTH);
    int64_t defined = 0;
    if (std::isfinite(largest)) {
        scores_of(x, vocab, largest, noisy ? d.filters : Filters{1, 0, 1, 0}, scores.data());
        for (int64_t v = 0; v < vocab; v += WIDTH) store(&weights[v], exponential(load(&scores[v], vocab - v)));
        const double normalizer = std::log(sum_of(weights.data(), vocab));
        const bool independent = noisy && d.replacement;
        const auto key = [&](int64_t v, float gumbel) { return gumbel + scores[v]; };
        for (int64_t set = 0; set < (independent ? d.k : 1); set++) {
            Leaders leaders(independent ? 1 : within);
            if (noisy)
                leaders.offer_noisy(weights.data(), vocab, philox, noise_row, DRAFT + 256 * set, key);
            else
                leaders.offer_all(x, vocab);
            for (const auto& [ranked, token] : leaders.sorted()) {
                tokens[defined] = token;
                keys[defined] = float(noisy ? ranked - normalizer : ranked);
                logprobs[defined++] = float(scores[token] - normalizer);
            }
        }
    }
    if (d.uniform_fill && noisy && !d.replacement && defined < d.k && !std::isnan(none)) {
        // Tokens outside the support follow in the order of their words of noise, which is uniformly random.
        std::vector<uint32_t> words(vocab + QUADS);
        for (int64_t v = 0; v < vocab; v += QUADS) philox.block(&words[v], v, noise_row, FILL);
        std::vector<int32_t> outside;
        for (int64_t v = 0; v < vocab; v++)
            if (scores[v] == -INFINITY) outside.push_back(v);
        const int64_t more = std::min<int64_t>(d.k - defined, outside.size());
        std::partial_sort(outside.begin(), outside.begin() + more, outside.end(), [&](int32_t a, int32_t b) {
            return words[a] < words[b] || (words[a] == words[b] && a < b);
        });
        std::copy(outside.begin(), outside.begin() + more, tokens + defined);
    }
}

struct SequenceScores {
    const float* logits;  // [B, N, V], rows of V numbers side by side
    int64_t batch, nodes, vocab, sequence_step, row_step;
    const double* settings;  // [B, 4]: temperature, top_k, top_p, min_p
    int64_t settings_step;
    float* scores;  // [B, N, V]
    int64_t threads;
};

void score_row(const SequenceScores& s, int64_t row) {
    const int64_t sequence = row / s.nodes;
    const float* x = s.logits + sequence * s.sequence_step + row % s.nodes * s.row_step;
    const double* own = s.settings + sequence * s.settings_step;
    float* scores = s.scores + row * s.vocab;
    const float largest = largest_of(x, s.vocab);
    if (!std::isfinite(largest)) {  // no distribution, which whoever draws from it has to notice
        std::fill(scores, scores + s.vocab, largest == -INFINITY ? largest : NAN);
    } else if (own[0] == 0) {
        std::fill(scores, scores + s.vocab, -INFINITY);
        scores[best_of(x, s.vocab)] = 0;
    } else {
        scores_of(x, s.vocab, largest, Filters{own[0], int64_t(own[1]), own[2], own[3]}, scores);
    }
}

struct Mix {
    const float* logits;  // [B, N, V], rows of V numbers side by side
    int64_t batch, nodes, vocab, sequence_step, row_step;
    double log_weight;
    int64_t adds;  // whether the output already has other parts
    float* mixed;  // [B, N, V]
    int64_t threads;
};

// A part's log-probabilities and its weight, added to those of the parts before.
void mix_row(const Mix& m, int64_t row) {
    const float* x = m.logits + row / m.nodes * m.sequence_step + row % m.nodes * m.row_step;
    float* mixed = m.mixed + row * m.vocab;
    const float largest = largest_of(x, m.vocab);
    if (largest == -INFINITY) {
        if (!m.adds) std::fill(mixed, mixed + m.vocab, -INFINITY);
        return;
    }
    if (!std::isfinite(largest)) return std::fill(mixed, mixed + m.vocab, NAN);
    static thread_local std::vector<float> work;
    work.resize(m.vocab + WIDTH);
    for (int64_t v = 0; v < m.vocab; v += WIDTH) store(&work[v], exponential(load(x + v, m.vocab - v) - largest));
    const float subtracted = float(largest + std::log(sum_of(work.data(), m.vocab)) - m.log_weight);
    for (int64_t v = 0; v < m.vocab && !m.adds; v += WIDTH) {
        const int64_t count = std::min<int64_t>(WIDTH, m.vocab - v);
        store(mixed + v, load(x + v, count) - subtracted, count);
    }
    for (int64_t v = 0; v < m.vocab && m.adds; v++) {
        if (x[v] == -INFINITY) continue;
        const float own = x[v] - subtracted, larger = std::max(mixed[v], own), smaller = std::min(mixed[v], own);
        mixed[v] = larger + std::log1p(std::exp(smaller - larger));
    }
}

}  // namespace heavypath

using namespace heavypath;

// Whether all numbers are below infinity, and none is NaN.
extern "C" int64_t below_infinity(const float* x, int64_t count) { return largest_of(x, count) < INFINITY; }

extern "C" void draw(const Draw* call) {
    const bool worth_it = call->rows * call->vocab > 1 << 15;
#pragma omp parallel for num_threads(worth_it ? call->threads : 1)
    for (int64_t r = 0; r < call->rows; r++) draw_row(*call, r);
}

extern "C" void sequence_scores(const SequenceScores* call) {
    const int64_t rows = call->batch * call->nodes;
#pragma omp parallel for num_threads(rows * call->vocab > 1 << 15 ? call->threads : 1)
    for (int64_t row = 0; row < rows; row++) score_row(*call, row);
}

extern "C" void mix(const Mix* call) {
    const int64_t rows = call->batch * call->nodes;
#pragma omp parallel for num_threads(rows * call->vocab > 1 << 15 ? call->threads : 1)
    for (int64_t row = 0; row < rows; row++) mix_row(*call, row);
}
