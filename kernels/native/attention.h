// Attention of a tree's nodes, four queries that share a head's keys and values at once:
//
//     p[q, r] = exp(scale q . k[r] - max),    out[q] = sum over r of p[q, r] v[r] / sum over r of p[q, r]
//
// over the rows that a query sees: the last of the prefix that its window leaves, and the nodes of its mask.

#pragma once

#include <algorithm>

#include "vectors.h"

namespace heavypath {

constexpr int QUERIES = 4;

// What one query sees of a sequence: prefix rows first .. length - 1, and tree column j where sees[j], from there on.
struct Sight {
    int64_t first;
    const uint8_t* sees;
};

// out[q] += sum over r of p[r, q] v[r], of VS vectors of columns.
template <int VS, typename Number>
inline void add_values(const float* p, const Number* values, int64_t stride, int64_t rows, int64_t columns,
                       Floats (*out)[VS]) {
    for (int64_t r = 0; r < rows; r++) {
        for (int v = 0; v < VS; v++) {
            const Floats value = load(values + r * stride + v * WIDTH, columns - v * WIDTH);
            for (int q = 0; q < QUERIES; q++) out[q][v] += p[r * QUERIES + q] * value;
        }
    }
}

// queries [QUERIES, D], already scaled, each with its sight; keys, values [rows, D]; p: room for QUERIES numbers of
// `length + columns` rows and 16 more; out: where the result of each query goes, null for a query that is none.
template <typename Number>
void attend(const float* queries, const Sight* sights, const Number* keys, const Number* values, int64_t width,
            int64_t length, int64_t columns, float* p, float* const* out) {
    const int64_t vectors = (width + WIDTH - 1) / WIDTH, padded = vectors * WIDTH;
    int64_t start = length;
    for (int q = 0; q < QUERIES; q++) start = std::min(start, sights[q].first);
    start &= ~int64_t{15};  // so that a row's place in a vector does not depend on other queries
    const int64_t rows = length + columns - start, whole = (rows + 15) & ~int64_t{15};
    keys += start * width, values += start * width;
    for (int64_t r = 0; r < rows; r++) {
        Floats total[QUERIES] = {};
        for (int64_t v = 0; v < vectors; v++) {
            const Floats key = load(keys + r * width + v * WIDTH, width - v * WIDTH);
            for (int q = 0; q < QUERIES; q++) total[q] += key * load(queries + q * padded + v * WIDTH);
        }
        const Four scores = sums(total[0], total[1], total[2], total[3]);
        memcpy(p + r * QUERIES, &scores, sizeof scores);
    }
    for (int64_t i = rows * QUERIES; i < whole * QUERIES; i++) p[i] = -INFINITY;
    for (int q = 0; q < QUERIES; q++) {
        for (int64_t r = start; r < sights[q].first; r++) p[(r - start) * QUERIES + q] = -INFINITY;
        for (int64_t j = 0; j < columns; j++)
            if (!sights[q].sees[j]) p[(length - start + j) * QUERIES + q] = -INFINITY;
    }
    // A vector holds WIDTH / 4 rows of all queries.
    Floats largest = all_of(-INFINITY), total = {};
    for (int64_t i = 0; i < whole * QUERIES; i += WIDTH) {
        const Floats scores = load(p + i);
        largest = scores > largest ? scores : largest;
    }
    for (int q = 0; q < QUERIES; q++) {
        for (int i = q; i < WIDTH; i += QUERIES) largest[q] = std::max(largest[q], largest[i]);
        for (int i = q; i < WIDTH; i += QUERIES) largest[i] = largest[q];
    }
    for (int64_t i = 0; i < whole * QUERIES; i += WIDTH) {
        const Floats weights = exponential(load(p + i) - largest);
        total += weights;
        store(p + i, weights);
    }
    const Four totals = folded(total);
    for (int64_t c = 0; c < width; c += 4 * WIDTH) {
        const int64_t left = width - c;
        auto piece = [&](auto vectors_of_piece) {
            constexpr int VS = decltype(vectors_of_piece)::value;
            Floats mixed[QUERIES][VS] = {};
            add_values<VS>(p, values + c, width, rows, left, mixed);
            for (int q = 0; q < QUERIES; q++)
                for (int v = 0; v < VS && out[q]; v++)
                    store(out[q] + c + v * WIDTH, rounded<Number>(mixed[q][v] / totals[q]), left - v * WIDTH);
        };
        if (left > 3 * WIDTH)
            piece(std::integral_constant<int, 4>());
        else if (left > 2 * WIDTH)
            piece(std::integral_constant<int, 3>());
        else if (left > WIDTH)
            piece(std::integral_constant<int, 2>());
        else
            piece(std::integral_constant<int, 1>());
    }
}

}  // namespace heavypath
