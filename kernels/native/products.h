// Products of rows by a weight: y[r, n] = sum over k of x[r, k] w[n, k].
//
// The weight lies in blocks of BLOCK outputs, and each number of x is spread over a vector. A sum runs over k in order,
// whatever other rows there are and whichever thread does it: a row's outputs are the same numbers in any batch.
//
// A block lies in PARTS, of which part p has the columns p, PARTS + p, 2 PARTS + p, ..: [blocks, PARTS, steps, BLOCK].
// So a sum reads from PARTS places of memory at once, which is faster than one place after the other where a core waits
// for memory (`bench/native.py`).
//
// Of weights in bf16 two vectors of a block are stored as one of words, the first in the lower halves: a shift and a mask
// make fp32 of them.
//
// A block is taken in pieces that stay in the caches of a core, from which all groups of rows read them. Meanwhile they
// fetch the next piece from memory, each an equal share, so that memory and multipliers work at once.

#pragma once

#include <algorithm>

#include "tiles.h"
#include "vectors.h"

namespace heavypath {

constexpr int BLOCK = VECTORS * WIDTH;    // outputs
constexpr int64_t PARTS = 4;              // places of memory that are read at once
constexpr int64_t PANEL = 64;             // rows that share the reading of a piece
constexpr int64_t LARGEST = WIDTH << 11;  // bytes of a piece: 16 KB with AVX2, 32 KB with AVX-512
constexpr int64_t LINE = 64;              // bytes that come from memory together

template <typename Number>
struct Weight {
    const Number *blocks, *bias;  // [ceil(outputs / BLOCK), PARTS, steps(), BLOCK] or, if has_tiles() and in bf16, as in
                                  // tiles.h; [outputs in whole blocks] or null
    int64_t outputs, columns;
    int64_t count() const { return (outputs + BLOCK - 1) / BLOCK; }
    int64_t steps() const { return (columns + PARTS - 1) / PARTS; }
};

// Some columns of a block: number k begins `k % PARTS` parts and `k / PARTS` steps behind the first.
template <typename Number>
struct Piece {
    const Number* block;
    int64_t part, step, columns;  // part, step: numbers from one to the next
    const char* next = nullptr;   // a piece that lies the same way, fetched meanwhile; behind a weight it is harmless
    int64_t bytes = 0;            // fetched of each of its parts in each step
};

inline void load_block(const float* from, Floats* weight) {
    for (int v = 0; v < VECTORS; v++) weight[v] = apart(load(from + v * WIDTH));
}

inline void load_block(const BFloat* from, Floats* weight) {
    for (int v = 0; v < VECTORS; v += 2) {
        Words pair;
        memcpy(&pair, from + v * WIDTH, sizeof pair);
        pair = apart(pair);  // so that it is read once
        weight[v] = same_bits<Floats>(pair << 16);
        weight[v + 1] = same_bits<Floats>(pair & 0xffff0000u);
    }
}

// Add the products of `rows` rows, from 1 to ROWS, by a piece to their sums [rows, BLOCK]. Not inlined: inlined, GCC 12's
// code for two rows took up to 1.6 times as long, depending on the code for one.
template <int ROWS = MOST_ROWS, typename Number>
__attribute__((noinline)) void add_group(int64_t rows, const float* x, int64_t stride, const Piece<Number>& piece,
                                         float* sums) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return add_group<ROWS - 1>(rows, x, stride, piece, sums);
    Floats total[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) total[r][v] = load(sums + r * BLOCK + v * WIDTH);
    const Number* block = piece.block;
    auto add_column = [&](int64_t p) {
        Floats weight[VECTORS];
        load_block(block + p * piece.part, weight);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) total[r][v] += x[r * stride + p] * weight[v];
    };
    const char *next = piece.next, *until = next;
    for (int64_t step = piece.columns / PARTS; step > 0; step--) {
        for (until += piece.bytes; next < until; next += LINE)
            for (int p = 0; p < PARTS; p++) __builtin_prefetch(next + p * piece.part * sizeof(Number), 0, 2);
        if constexpr (ROWS < 4) {
#pragma GCC unroll 4
            for (int p = 0; p < PARTS; p++) add_column(p);
        } else {
#pragma GCC unroll 1  // else sums are spilled
            for (int p = 0; p < PARTS; p++) add_column(p);
        }
        x += PARTS, block += piece.step;
    }
    for (int64_t p = 0; p < piece.columns % PARTS; p++) add_column(p);
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(sums + r * BLOCK + v * WIDTH, total[r][v]);
}

// The same for any number of rows, in the fewest groups. They are equally large, as a small one waits for its sums.
template <typename Number>
inline void add_groups(int64_t rows, const float* x, int64_t stride, Piece<Number> piece, float* sums) {
    int64_t groups = (rows + MOST_ROWS - 1) / MOST_ROWS;
    if (piece.next) piece.bytes = piece.step * sizeof(Number) / groups;
    for (; groups > 0; groups--) {
        const int64_t group = (rows + groups - 1) / groups;
        add_group(group, x, stride, piece, sums);
        rows -= group, x += group * stride, sums += group * BLOCK, piece.next += piece.columns / PARTS * piece.bytes;
    }
}

// Block number `number` of the product of rows x [rows, stride]: finish(row, first output, its BLOCK sums).
template <typename Number, typename Finish>
inline void multiply_block(const Weight<Number>& w, int64_t number, const float* x, int64_t stride, int64_t rows,
                           Finish finish) {
    alignas(64) float sums[PANEL * BLOCK];
    // Pieces are equally large, since each one fetches as much as it has.
    constexpr int64_t MOST = LARGEST / (BLOCK * sizeof(Number));
    const int64_t pieces = (w.columns + MOST - 1) / MOST, depth = (w.steps() + pieces - 1) / pieces * PARTS;
    const int64_t part = w.steps() * BLOCK;
    const Number *block = w.blocks + number * PARTS * part, *next_block = block + PARTS * part;
    for (int64_t first = 0; first < rows; first += PANEL) {
        const int64_t height = std::min(PANEL, rows - first);
        for (int64_t r = 0; r < height; r++)
            for (int v = 0; v < BLOCK; v += WIDTH)
                store(sums + r * BLOCK + v, w.bias ? load(w.bias + number * BLOCK + v) : Floats{});
        for (int64_t k = 0; k < w.columns; k += depth) {
            const int64_t end = k + depth;
            const Number* next = end < w.columns ? block + end / PARTS * BLOCK : next_block;
            const Piece<Number> piece{block + k / PARTS * BLOCK, part, BLOCK, std::min(depth, w.columns - k),
                                      reinterpret_cast<const char*>(next)};
            add_groups(height, x + first * stride + k, stride, piece, sums);
        }
        for (int64_t r = 0; r < height; r++) finish(first + r, number * BLOCK, sums + r * BLOCK);
    }
}

// Blocks `begin` to `end`, the end not included.
template <typename Number, typename Finish>
inline void multiply(const Weight<Number>& w, int64_t begin, int64_t end, const float* x, int64_t stride, int64_t rows,
                     Finish finish) {
#if defined(HAS_TILES)
    if constexpr (sizeof(Number) == sizeof(BFloat))
        if (begin < end && has_tiles()) return multiply_tiles(w, begin, end, x, stride, rows, finish);
#endif
    for (; begin < end; begin++) multiply_block(w, begin, x, stride, rows, finish);
}

}  // namespace heavypath
