// Attention of queries that share a head's keys and values, as two products:
//
//     p[q, r] = exp(scale q . k[r] - max),    out[q] = sum over r of p[q, r] v[r] / sum over r of p[q, r]
//
// over the rows that a query sees: the last of the prefix that its window leaves, and the nodes of its mask. BLOCK keys
// at a time are turned into a block of a weight, [D, BLOCK]; values are one as they lie, or once they are in fp32.
// Meanwhile the rows that come next are fetched. What a query gets does not depend on the others.

#pragma once

#include <type_traits>

#include "products.h"

namespace heavypath {

constexpr int64_t QUERIES = 2 * MOST_ROWS;  // for which keys are turned once
constexpr int64_t AHEAD = 4;                // blocks of rows

// What one query sees of a sequence: prefix rows first .. length - 1, and tree column j where sees[j], from there on.
struct Sight {
    int64_t first;
    const uint8_t* sees;
};

// turned[d, r] = keys[r, d] for up to BLOCK rows; turned: [D, BLOCK]. Keys ahead and these rows' values are fetched.
template <typename Number>
void turn_keys(const Number* keys, const Number* values, int64_t rows, int64_t width, float* turned) {
    const int64_t whole_rows = rows & ~int64_t{3}, whole_width = width & ~int64_t{3};
    for (int64_t r = 0; r < whole_rows; r += 4)
        for (int64_t d = 0; d < whole_width; d += 4) {
            const int64_t fetched = (r + d / 4 % 4) * width + d;  // in four turns, four lines
            __builtin_prefetch(keys + AHEAD * BLOCK * width + fetched, 0, 2);
            __builtin_prefetch(values + fetched, 0, 2);
            const Number* from = keys + r * width + d;
            const Four a = load_four(from), b = load_four(from + width);
            const Four c = load_four(from + 2 * width), e = load_four(from + 3 * width);
            const Four low[] = {PICK(a, b, 0, 4, 1, 5), PICK(c, e, 0, 4, 1, 5)};
            const Four high[] = {PICK(a, b, 2, 6, 3, 7), PICK(c, e, 2, 6, 3, 7)};
            const Four columns[] = {PICK(low[0], low[1], 0, 1, 4, 5), PICK(low[0], low[1], 2, 3, 6, 7),
                                    PICK(high[0], high[1], 0, 1, 4, 5), PICK(high[0], high[1], 2, 3, 6, 7)};
            for (int i = 0; i < 4; i++) memcpy(turned + (d + i) * BLOCK + r, &columns[i], sizeof(Four));
        }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = r < whole_rows ? whole_width : 0; d < width; d++)
            turned[d * BLOCK + r] = number(keys[r * width + d]);
}

// Floats of room that `attend` needs for so many rows of keys and values.
inline int64_t attention_room(int64_t rows, int64_t width) {
    const int64_t blocks = (rows + BLOCK - 1) / BLOCK + 1, wide = width + BLOCK;
    return blocks * QUERIES * BLOCK + wide * BLOCK + wide * QUERIES;
}

// queries [count, stride], at most QUERIES, already scaled, each with its sight; keys, values [rows, D]; out: where the
// result of each query goes, [D].
template <typename Number>
void attend(int64_t count, const float* queries, int64_t stride, const Sight* sights, const Number* keys,
            const Number* values, int64_t width, int64_t length, int64_t columns, float* room, float* const* out) {
    int64_t start = length;
    for (int64_t q = 0; q < count; q++) start = std::min(start, sights[q].first);
    start = start / BLOCK * BLOCK;  // so that a row's place in a vector does not depend on other queries
    const int64_t rows = length + columns - start, blocks = (rows + BLOCK - 1) / BLOCK;
    keys += start * width, values += start * width;
    float *p = room, *block = p + blocks * count * BLOCK, *mixed = block + (width + BLOCK) * BLOCK;
    auto rows_of = [&](int64_t b) { return std::min<int64_t>(BLOCK, rows - b * BLOCK); };
    auto p_of = [&](int64_t b) { return p + b * count * BLOCK; };  // [count, BLOCK]

    std::fill(p, p_of(blocks), 0.0f);
    for (int64_t b = 0; b < blocks; b++) {
        turn_keys(keys + b * BLOCK * width, values + b * BLOCK * width, rows_of(b), width, block);
        add_groups(count, queries, stride, Piece<float>{block, BLOCK, PARTS * BLOCK, width}, p_of(b));
    }

    float totals[QUERIES];
    for (int64_t q = 0; q < count; q++) {
        auto hide = [&](int64_t row) { p_of(row / BLOCK)[q * BLOCK + row % BLOCK] = -INFINITY; };
        for (int64_t row = 0; row < sights[q].first - start; row++) hide(row);
        for (int64_t j = 0; j < columns; j++)
            if (!sights[q].sees[j]) hide(length - start + j);
        for (int64_t row = rows; row < blocks * BLOCK; row++) hide(row);
        Floats largest = all_of(-INFINITY), total = {};
        for (int64_t b = 0; b < blocks; b++)
            for (int v = 0; v < BLOCK; v += WIDTH) {
                const Floats scores = load(p_of(b) + q * BLOCK + v);
                largest = scores > largest ? scores : largest;
            }
        largest = all_of(most(largest));
        for (int64_t b = 0; b < blocks; b++)
            for (int v = 0; v < BLOCK; v += WIDTH) {
                float* scores = p_of(b) + q * BLOCK + v;
                const Floats weights = exponential(load(scores) - largest);
                total += weights;
                store(scores, weights);
            }
        totals[q] = sum(total);
    }

    const int64_t chunks = (width + BLOCK - 1) / BLOCK;  // of a value's columns; mixed: [chunks, count, BLOCK]
    std::fill(mixed, mixed + chunks * count * BLOCK, 0.0f);
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t c = 0; c < chunks; c++) {
            const Number* from = values + b * BLOCK * width + c * BLOCK;
            const int64_t left = width - c * BLOCK;
            float* sums = mixed + c * count * BLOCK;
            for (int64_t r = 0; r < BLOCK; r++) __builtin_prefetch(from + (AHEAD * BLOCK + r) * width, 0, 2);
            if constexpr (std::is_same_v<Number, float>)
                if (left >= BLOCK) {
                    add_groups(count, p_of(b), BLOCK, Piece<float>{from, width, PARTS * width, rows_of(b)}, sums);
                    continue;
                }
            for (int64_t r = 0; r < rows_of(b); r++)
                for (int64_t v = 0; v < std::min<int64_t>(BLOCK, left); v += WIDTH)
                    store(block + r * BLOCK + v, load(from + r * width + v, left - v));
            add_groups(count, p_of(b), BLOCK, Piece<float>{block, BLOCK, PARTS * BLOCK, rows_of(b)}, sums);
        }
    for (int64_t q = 0; q < count; q++)
        for (int64_t d = 0; d < width; d += WIDTH) {
            const Floats sums = load(mixed + (d / BLOCK * count + q) * BLOCK + d % BLOCK);
            store(out[q] + d, rounded<Number>(sums / totals[q]), width - d);
        }
}

}  // namespace heavypath
