// Products of rows by a weight: y[r, n] = sum over k of x[r, k] w[n, k].
//
// The weight lies in blocks of BLOCK outputs, [blocks, columns, BLOCK], so that a block is one stream from memory, and
// each number of x is spread over a vector. A sum runs over k in order, whatever other rows there are and whichever
// thread does it: a row's outputs are the same numbers in any batch.
//
// Few rows wait for memory, many for the multipliers. To do both at once, a block is taken in pieces of DEPTH columns:
// all groups of rows take a piece while it is in the first cache, and the last group fetches the next piece meanwhile.

#pragma once

#include <algorithm>

#include "vectors.h"

namespace heavypath {

constexpr int BLOCK = VECTORS * WIDTH;  // outputs
constexpr int64_t PANEL = 48;           // rows whose sums of one block stay in the first cache
constexpr int64_t DEPTH = 2048 / BLOCK; // columns of a piece, which is 8 KB of fp32
constexpr int64_t LINE = 64;            // bytes that come from memory together

template <typename Number>
struct Weight {
    const Number *blocks, *bias;  // [ceil(outputs / BLOCK), columns, BLOCK]; [outputs in whole blocks] or null
    int64_t outputs, columns;
    int64_t count() const { return (outputs + BLOCK - 1) / BLOCK; }
};

// Add the products of ROWS rows by `columns` columns of a block to their sums [ROWS, BLOCK]. LAST: no other rows take
// these columns, so as many behind them are fetched meanwhile. Behind the weight's end that does nothing.
template <int ROWS, bool LAST, typename Number>
inline void add_products(const float* x, int64_t stride, const Number* block, int64_t columns, float* sums) {
    Floats total[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) total[r][v] = load(sums + r * BLOCK + v * WIDTH);
    for (int64_t k = 0; k < columns; k++) {
        Floats weight[VECTORS];
        for (int v = 0; v < VECTORS; v++) weight[v] = load(block + k * BLOCK + v * WIDTH);
        if constexpr (LAST)
            for (int64_t n = 0; n < BLOCK; n += LINE / int64_t(sizeof(Number)))
                __builtin_prefetch(block + (columns + k) * BLOCK + n);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) total[r][v] += x[r * stride + k] * weight[v];
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(sums + r * BLOCK + v * WIDTH, total[r][v]);
}

// The same for a number of rows from 1 to ROWS.
template <bool LAST, int ROWS = MOST_ROWS, typename Number>
inline void add_group(int64_t rows, const float* x, int64_t stride, const Number* block, int64_t columns, float* sums) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return add_group<LAST, ROWS - 1>(rows, x, stride, block, columns, sums);
    add_products<ROWS, LAST>(x, stride, block, columns, sums);
}

// The same for any number of rows, in the fewest groups. They are equally large, as a small one waits for its loads.
template <typename Number>
inline void add_groups(int64_t rows, const float* x, int64_t stride, const Number* block, int64_t columns, float* sums) {
    for (int64_t groups = (rows + MOST_ROWS - 1) / MOST_ROWS; groups > 1; groups--) {
        const int64_t group = (rows + groups - 1) / groups;
        add_group<false>(group, x, stride, block, columns, sums);
        rows -= group, x += group * stride, sums += group * BLOCK;
    }
    add_group<true>(rows, x, stride, block, columns, sums);
}

// Block number `number` of the product of rows x [rows, stride]: finish(row, its BLOCK sums).
template <typename Number, typename Finish>
inline void multiply(const Weight<Number>& weight, int64_t number, const float* x, int64_t stride, int64_t rows,
                     Finish finish) {
    alignas(64) float sums[PANEL * BLOCK];
    const Number* block = weight.blocks + number * weight.columns * BLOCK;
    for (int64_t first = 0; first < rows; first += PANEL) {
        const int64_t height = std::min(PANEL, rows - first);
        for (int64_t r = 0; r < height; r++)
            for (int v = 0; v < BLOCK; v += WIDTH)
                store(sums + r * BLOCK + v, weight.bias ? load(weight.bias + number * BLOCK + v) : Floats{});
        for (int64_t k = 0; k < weight.columns; k += DEPTH)
            add_groups(height, x + first * stride + k, stride, block + k * BLOCK, std::min(DEPTH, weight.columns - k),
                       sums);
        for (int64_t r = 0; r < height; r++) finish(first + r, sums + r * BLOCK);
    }
}

}  // namespace heavypath
