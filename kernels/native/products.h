// Products of rows by a weight: y[r, n] = sum over k of x[r, k] w[n, k].
//
// The weight lies in blocks of BLOCK outputs, [blocks, columns, BLOCK], so that a block is one stream from memory, and
// each number of x is spread over a vector. A sum runs over k in order, whatever other rows there are and whichever
// thread does it: a row's outputs are the same numbers in any batch.
//
// A block is taken in pieces that stay in the second cache, from which all groups of rows read them. Meanwhile they
// fetch the next piece from memory, each an equal part, so that memory and multipliers work at once. A single group
// fetches what is a little ahead; for the fewest rows the processor does so unasked, at the memory's speed.

#pragma once

#include <algorithm>

#include "vectors.h"

namespace heavypath {

constexpr int BLOCK = VECTORS * WIDTH;  // outputs
constexpr int64_t PANEL = 64;           // rows that share the reading of a piece
constexpr int64_t AHEAD = 1 << 14;      // bytes from where a single group reads to what it fetches
constexpr int64_t LINE = 64, CHUNK = 4; // bytes that come from memory together; columns between fetches
constexpr int64_t UNASKED = 10;         // bytes of a vector for each row, from which on nothing is fetched

template <typename Number>
struct Weight {
    const Number *blocks, *bias;  // [ceil(outputs / BLOCK), columns, BLOCK]; [outputs in whole blocks] or null
    int64_t outputs, columns;
    int64_t count() const { return (outputs + BLOCK - 1) / BLOCK; }
};

// Add the products of `rows` rows, from 1 to ROWS, by `columns` columns of a block to their sums [rows, BLOCK]. Each
// CHUNK of columns fetches `bytes` more, from `next` on; behind the weight's end that does nothing.
template <int ROWS = MOST_ROWS, typename Number>
inline void add_group(int64_t rows, const float* x, int64_t stride, const Number* block, int64_t columns, float* sums,
                      const char* next, int64_t bytes) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return add_group<ROWS - 1>(rows, x, stride, block, columns, sums, next, bytes);
    Floats total[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) total[r][v] = load(sums + r * BLOCK + v * WIDTH);
    const char* until = next;
    for (int64_t k = 0; k < columns;) {
        for (until += bytes; next < until; next += LINE) __builtin_prefetch(next, 0, 2);
        for (const int64_t end = std::min(columns, k + CHUNK); k < end; k++) {
            Floats weight[VECTORS];
            for (int v = 0; v < VECTORS; v++) weight[v] = apart(load(block + k * BLOCK + v * WIDTH));
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECTORS; v++) total[r][v] += x[r * stride + k] * weight[v];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(sums + r * BLOCK + v * WIDTH, total[r][v]);
}

// The same for any number of rows, in the fewest groups. They are equally large, as a small one waits for its sums.
template <typename Number>
inline void add_groups(int64_t rows, const float* x, int64_t stride, const Number* block, int64_t columns, float* sums) {
    int64_t groups = (rows + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t size = sizeof(Number), bytes = rows * UNASKED > WIDTH * size ? CHUNK * BLOCK * size / groups : 0;
    const char* next = reinterpret_cast<const char*>(block) + (groups > 1 ? columns * BLOCK * size : AHEAD);
    for (; groups > 0; groups--) {
        const int64_t group = (rows + groups - 1) / groups;
        add_group(group, x, stride, block, columns, sums, next, bytes);
        rows -= group, x += group * stride, sums += group * BLOCK, next += (columns + CHUNK - 1) / CHUNK * bytes;
    }
}

// Block number `number` of the product of rows x [rows, stride]: finish(row, its BLOCK sums).
template <typename Number, typename Finish>
inline void multiply(const Weight<Number>& w, int64_t number, const float* x, int64_t stride, int64_t rows,
                     Finish finish) {
    constexpr int64_t DEPTH = (1 << 16) / (BLOCK * sizeof(Number));  // columns of a piece, which is 64 KB
    alignas(64) float sums[PANEL * BLOCK];
    const Number* block = w.blocks + number * w.columns * BLOCK;
    for (int64_t first = 0; first < rows; first += PANEL) {
        const int64_t height = std::min(PANEL, rows - first);
        for (int64_t r = 0; r < height; r++)
            for (int v = 0; v < BLOCK; v += WIDTH)
                store(sums + r * BLOCK + v, w.bias ? load(w.bias + number * BLOCK + v) : Floats{});
        for (int64_t k = 0; k < w.columns; k += DEPTH)
            add_groups(height, x + first * stride + k, stride, block + k * BLOCK, std::min(DEPTH, w.columns - k), sums);
        for (int64_t r = 0; r < height; r++) finish(first + r, sums + r * BLOCK);
    }
}

}  // namespace heavypath
