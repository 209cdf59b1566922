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

// Drop what top-k, top-p and min-p drop of a row: its scores become -inf.
inline void filter(const float* x, int64_t count, const Filters& filters, float* scores) {
    if (filters.top_k > 0 && filters.top_k < count) {
        Leaders leaders(filters.top_k);
        leaders.offer_all(x, count);
        const float threshold = leaders.least();
        for (int64_t v = 0; v < count; v++) scores[v] = x[v] < threshold ? -INFINITY : scores[v];
    }
    if (filters.top_p < 1) {
        std::vector<float> weights(count);
        for (int64_t v = 0; v < count; v += WIDTH)
            store(&weights[v], exponential(load(scores + v, count - v)), count - v);
        const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
        const double limit = double(float(filters.top_p)) * total;
        // All tokens of a lower weight are together less than what top-p leaves out.
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
        const int64_t kept = order.size();
        double mass = 0;  // of the tokens before
        for (int64_t place = 0, sorted = 0; place < kept; place++) {
            if (place == sorted) {  // few tokens hold the mass of most rows
                sorted = std::min<int64_t>(kept, 4 * sorted + 64);
                std::partial_sort(order.begin() + place, order.begin() + sorted, order.end(), before);
            }
            if (mass >= limit) {
                for (; place < kept; place++) scores[order[place]] = -INFINITY;
                break;
            }
            mass += weights[order[place]];
        }
    }
    if (filters.min_p > 0) {
        const float least = float(std::log(filters.min_p));
        for (int64_t v = 0; v < count; v++) scores[v] = scores[v] < least ? -INFINITY : scores[v];
    }
}

// (x - largest) / temperature, finite where x is, and -inf outside the support that the filters leave.
inline void scores_of(const float* x, int64_t count, float largest, const Filters& filters, float* scores) {
    const float temperature = float(std::max(filters.temperature, 0x1p-126)), lowest = -3.40282347e+38f;
    for (int64_t v = 0; v < count; v += WIDTH) {
        const Floats own = load(x + v, count - v);
        Floats scaled = own - largest;
        if (temperature != 1) scaled /= temperature;
        scaled = scaled < lowest ? all_of(lowest) : scaled;
        store(scores + v, own == -INFINITY ? own : scaled, count - v);
    }
    filter(x, count, filters, scores);
}

// log2 of the filtered distribution up to a constant, 0 at its largest.
inline void log_weights(const float* x, int64_t count, float largest, const Filters& filters, float* logs) {
    const float log2e = 1.44269504088896340736f;
    if (filters.top_k > 0 || filters.top_p < 1 || filters.min_p > 0) {
        scores_of(x, count, largest, filters, logs);
        for (int64_t v = 0; v < count; v++) logs[v] *= log2e;
    } else {
        const float factor = float(1.44269504088896340736 / std::max(filters.temperature, 0x1p-126));
        for (int64_t v = 0; v < count; v += WIDTH)
            store(logs + v, (load(x + v, count - v) - largest) * factor, count - v);
    }
}

}  // namespace heavypath
