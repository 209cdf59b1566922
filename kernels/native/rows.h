// Rows of logits: their largest number, and what temperature and filters make of them (`heavypath.kernels.filtering`).

#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "noise.h"

namespace heavypath {

struct Filters {
    double temperature;
    int64_t top_k;        // 0 for none
    double top_p, min_p;  // 1 and 0 for none
};

// The largest number of a row; NaN if one is in it.
inline float largest_of(const float* x, int64_t count) {
    Floats most = all_of(-INFINITY);
    Ints unordered = {};
    for (int64_t i = 0; i < count; i += WIDTH) {
        Floats some = load(x + i, count - i);
        if (count - i < WIDTH)
            for (int lane = count - i; lane < WIDTH; lane++) some[lane] = -INFINITY;
        unordered |= some != some;
        most = some > most ? some : most;
    }
    float largest = -INFINITY;
    for (int lane = 0; lane < WIDTH; lane++) {
        if (unordered[lane]) return NAN;
        largest = std::max(largest, most[lane]);
    }
    return largest;
}

// The sum of fp32 numbers, of which no more than 64 vectors are summed in fp32.
inline double sum_of(const float* x, int64_t count) {
    double total = 0;
    for (int64_t begin = 0; begin < count; begin += 64 * WIDTH) {
        Floats part = {};
        for (int64_t i = begin, end = std::min<int64_t>(count, begin + 64 * WIDTH); i < end; i += WIDTH)
            part += load(x + i, end - i);
        total += sum(part);
    }
    return total;
}

// The first place of the largest of `count` numbers; -1 where none is above -inf.
inline int64_t best_of(const float* x, int64_t count) {
    constexpr int lanes = 16;
    float most[lanes];
    std::fill(most, most + lanes, -INFINITY);
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes)
        for (int lane = 0; lane < lanes; lane++) most[lane] = x[i + lane] > most[lane] ? x[i + lane] : most[lane];
    for (; i < count; i++) most[0] = x[i] > most[0] ? x[i] : most[0];
    const float largest = *std::max_element(most, most + lanes);
    return largest == -INFINITY ? -1 : std::find(x, x + count, largest) - x;
}

// Drop what top-k, top-p and min-p drop of a row: its scores become -inf.
inline void filter(const float* x, int64_t count, const Filters& filters, float* scores) {
    if (filters.top_k > 0 && filters.top_k < count) {
        std::vector<float> sorted(x, x + count);
        std::nth_element(sorted.begin(), sorted.begin() + filters.top_k - 1, sorted.end(), std::greater<float>());
        const float threshold = sorted[filters.top_k - 1];
        for (int64_t v = 0; v < count; v++)
            if (x[v] < threshold) scores[v] = -INFINITY;
    }
    if (filters.top_p < 1) {
        std::vector<int32_t> order(count);
        std::iota(order.begin(), order.end(), 0);
        std::vector<float> weights(count);
        for (int64_t v = 0; v < count; v += WIDTH) store(&weights[v], exponential(load(scores + v, count - v)), count - v);
        const double limit = double(float(filters.top_p)) * std::accumulate(weights.begin(), weights.end(), 0.0);
        const auto before = [&](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
        double mass = 0;  // of the tokens before
        for (int64_t place = 0, sorted = 0; place < count; place++) {
            if (place == sorted) {  // few tokens hold the mass of most rows
                sorted = std::min<int64_t>(count, 4 * sorted + 64);
                std::partial_sort(order.begin() + place, order.begin() + sorted, order.end(), before);
            }
            if (mass >= limit) {
                for (; place < count; place++) scores[order[place]] = -INFINITY;
                break;
            }
            mass += weights[order[place]];
        }
    }
    if (filters.min_p > 0) {
        const float least = float(std::log(filters.min_p));
        for (int64_t v = 0; v < count; v++)
            if (scores[v] < least) scores[v] = -INFINITY;
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

// 2^x for x <= 0, 0 below -126.
inline Floats power_of_two(Floats x) {
    const Ints vanishes = x < -126.0f;
    const Floats usual = vanishes ? Floats{} : x;
    const Ints whole = __builtin_convertvector(usual - 0.5f, Ints);
    const Floats rest = usual - __builtin_convertvector(whole, Floats);
    const Floats scaled = exponential(rest * 0.693147180559945f) * same_bits<Floats>((whole + 127) << 23);
    return vanishes ? Floats{} : scaled;
}

inline void powers_of_two(const float* x, int64_t count, float* out) {
    for (int64_t v = 0; v < count; v += WIDTH) store(out + v, power_of_two(load(x + v, count - v)), count - v);
}

}  // namespace heavypath
