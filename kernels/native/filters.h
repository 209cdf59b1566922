// What temperature and filters make of a row of logits (`heavypath.kernels.filtering`).

#pragma once

#include <numeric>

#include "leaders.h"

namespace heavypath {

struct Filters {
    double temperature;
    int64_t top_k;        // 0 for none
    double top_p, min_p;  // 1 and 0 for none
};

// The nearest temperature by which fp32 can divide.
inline double within_fp32(double temperature) { return std::min(std::max(temperature, 0x1p-126), 0x1p127); }

// Each of these drops tokens of a row x: their scores become -inf.
inline void keep_top_k(const float* x, int64_t count, int64_t k, float* scores) {
    Leaders leaders(k);
    leaders.offer_all(x, count);
    const float threshold = leaders.least();
    for (int64_t v = 0; v < count; v++) scores[v] = x[v] < threshold ? -INFINITY : scores[v];
}

// The likeliest tokens, until those before a token hold the share top_p of the mass.
inline void keep_top_p(const float* x, int64_t count, double top_p, float* scores) {
    std::vector<float> weights(count);
    for (int64_t v = 0; v < count; v += WIDTH)
        store(&weights[v], exponential(load(scores + v, count - v)), count - v);
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    const double limit = std::max(double(float(top_p)), 0x1p-126) * total;  // of a token at least
    // All tokens of a lower weight are together less than what top-p leaves out. Only the others are sorted.
    const float least = 0.999 * (total - limit) / count;
    std::vector<int32_t> order;
    for (int64_t v = 0; v < count; v += WIDTH) {
        const int64_t end = std::min<int64_t>(count, v + WIDTH);
        if (most(load(&weights[v], end - v)) < least) continue;
        for (int64_t i = v; i < end; i++)
            if (weights[i] >= least) order.push_back(i);
    }
    for (int64_t v = 0; v < count; v++) scores[v] = weights[v] < least ? -INFINITY : scores[v];
    const auto before = [&](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
    const int64_t candidates = order.size();
    double mass = 0;  // of the tokens before
    int64_t place = 0;
    for (int64_t sorted = 0; place < candidates && mass < limit; place++) {
        if (place == sorted) {  // few tokens hold the mass of most rows
            sorted = std::min<int64_t>(candidates, 4 * sorted + 64);
            std::partial_sort(order.begin() + place, order.begin() + sorted, order.end(), before);
        }
        mass += weights[order[place]];
    }
    for (; place < candidates; place++) scores[order[place]] = -INFINITY;
}

inline void keep_min_p(int64_t count, double min_p, float* scores) {
    const float least = float(std::log(min_p));
    for (int64_t v = 0; v < count; v++) scores[v] = scores[v] < least ? -INFINITY : scores[v];
}

// (x - largest) / temperature, finite where x is, and -inf outside the support that the filters leave.
inline void scores_of(const float* x, int64_t count, float largest, const Filters& filters, float* scores) {
    const float temperature = float(within_fp32(filters.temperature)), lowest = -3.40282347e+38f;
    for (int64_t v = 0; v < count; v += WIDTH) {
        const Floats own = load(x + v, count - v);
        Floats scaled = own - largest;
        if (temperature != 1) scaled /= temperature;
        scaled = scaled < lowest ? all_of(lowest) : scaled;
        store(scores + v, own == -INFINITY ? own : scaled, count - v);
    }
    if (filters.top_k > 0 && filters.top_k < count) keep_top_k(x, count, filters.top_k, scores);
    if (filters.top_p < 1) keep_top_p(x, count, filters.top_p, scores);
    if (filters.min_p > 0) keep_min_p(count, filters.min_p, scores);
}

// log2 of the filtered distribution up to a constant, 0 at its largest.
inline void log_weights(const float* x, int64_t count, float largest, const Filters& filters, float* logs) {
    const float log2e = 1.44269504088896340736f;
    if (filters.top_k > 0 || filters.top_p < 1 || filters.min_p > 0) {
        scores_of(x, count, largest, filters, logs);
        for (int64_t v = 0; v < count; v++) logs[v] *= log2e;
    } else {
        const float factor = float(1.44269504088896340736 / within_fp32(filters.temperature));
        for (int64_t v = 0; v < count; v += WIDTH)
            store(logs + v, (load(x + v, count - v) - largest) * factor, count - v);
    }
}

}  // namespace heavypath
