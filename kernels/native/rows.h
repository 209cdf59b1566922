// Rows of numbers: their largest, their sum, and powers of two of them.

#pragma once

#include <algorithm>
#include <vector>

#include "noise.h"

namespace heavypath {

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
