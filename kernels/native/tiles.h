// Products of bf16 rows by a bf16 weight with AMX, which multiplies tiles: up to 16 rows by 16 outputs, over 32 columns.
//
//     y[r, n] += sum over k of x[r, 2k] w[n, 2k] + sum over k of x[r, 2k + 1] w[n, 2k + 1]     k = 0 .. 15, in fp32
//
// The weight lies as tiles are read: [blocks, columns / 32, tiles of 16 outputs, 16 pairs of columns, 16 outputs, 2]. Columns
// that are missing are zeros. As elsewhere, a row's outputs are the same numbers in any batch.

#pragma once

#include "norms.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAS_TILES

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

namespace heavypath {

constexpr int64_t TILE = 16;       // rows, outputs, and pairs of columns
constexpr int64_t MANY = 256;      // rows that share the reading of a weight
constexpr int64_t FETCHED = 4096;  // bytes of a weight that are fetched before they are read
static_assert(WIDTH == TILE && VECTORS == 2, "a block is two tiles of outputs");

// Linux lets a process use tiles once it has asked; a container may forbid it.
inline bool ask_for_tiles() {
    constexpr long REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
}

// Tiles 0 and 1 are of rows, 2 and 3 of the weight, 4 to 7 of sums.
inline void shape_tiles(int64_t rows) {
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } shape;
    for (int tile = 0; tile < 8; tile++) {
        shape.bytes[tile] = 64;
        shape.rows[tile] = tile == 2 || tile == 3 ? TILE : rows;
    }
    _tile_loadconfig(&shape);
}

// The sums of one tile of rows, or of two, by a block: [height or 2 height, 2 TILE] after the bias.
// x: [1 or 2, chunks, height, 2 TILE]
template <bool TWO>
inline void add_tiles(const uint16_t* block, int64_t chunks, const uint16_t* x, int64_t height, const float* bias,
                      float* sums) {
    constexpr int64_t LINE = 2 * TILE * sizeof(float);  // bytes of a row of sums
    const int64_t step = height * 2 * TILE;
    const uint16_t* second = x + chunks * step;
    _tile_loadd(4, bias, 0);
    _tile_loadd(5, bias + TILE, 0);
    if (TWO) {
        _tile_loadd(6, bias, 0);
        _tile_loadd(7, bias + TILE, 0);
    }
    for (int64_t k = 0; k < chunks; k++, block += 4 * TILE * TILE) {
        const char* next = reinterpret_cast<const char*>(block) + FETCHED;
        for (int64_t line = 0; line < 4 * TILE; line += 2) __builtin_prefetch(next + 32 * line, 0, 2);
        _tile_loadd(0, x + k * step, 64);
        _tile_loadd(2, block, 64);
        _tile_dpbf16ps(4, 0, 2);
        _tile_loadd(3, block + 2 * TILE * TILE, 64);
        _tile_dpbf16ps(5, 0, 3);
        if (TWO) {
            _tile_loadd(1, second + k * step, 64);
            _tile_dpbf16ps(6, 1, 2);
            _tile_dpbf16ps(7, 1, 3);
        }
    }
    _tile_stored(4, sums, LINE);
    _tile_stored(5, sums + TILE, LINE);
    if (TWO) {
        _tile_stored(6, sums + 2 * TILE * height, LINE);
        _tile_stored(7, sums + 2 * TILE * height + TILE, LINE);
    }
}

// Rows x [rows, stride] in bf16 and as tiles: [tiles, chunks, height, 2 TILE], zeros for what is missing.
inline void into_tiles(const float* x, int64_t stride, int64_t rows, int64_t columns, int64_t height, BFloat* to) {
    const int64_t chunks = (columns + 2 * TILE - 1) / (2 * TILE), step = height * 2 * TILE;
    for (int64_t row = 0; row < rows; row++) {
        BFloat* place = to + row / height * chunks * step + row % height * 2 * TILE;
        for (int64_t k = 0; k < columns; k += 2 * TILE, place += step) {
            const float* from = x + row * stride + k;
            const Floats low = load(from, columns - k);
            const Floats high = load(from + TILE, std::max<int64_t>(0, columns - k - TILE));
            const auto both = _mm512_cvtne2ps_pbh(same_bits<__m512>(high), same_bits<__m512>(low));
            memcpy(place, &both, sizeof both);
        }
    }
}

// Blocks `begin` to `end` of the product of rows x [rows, stride]: finish(row, first output, sums of the block).
template <typename Weight, typename Finish>
inline void multiply_tiles(const Weight& w, int64_t begin, int64_t end, const float* x, int64_t stride, int64_t rows,
                           Finish finish) {
    thread_local std::vector<BFloat> narrow;
    alignas(64) float sums[4 * TILE * TILE], bias[2 * TILE] = {};
    const int64_t chunks = (w.columns + 2 * TILE - 1) / (2 * TILE), width = chunks * 2 * TILE;
    for (int64_t before = 0; before < rows; before += MANY) {
        const int64_t count = std::min(MANY, rows - before);
        const int64_t tiles = (count + TILE - 1) / TILE, height = (count + tiles - 1) / tiles;  // tiles are equally high
        narrow.assign(tiles * height * width, BFloat{});
        into_tiles(x + before * stride, stride, count, w.columns, height, narrow.data());
        shape_tiles(height);
        for (int64_t number = begin; number < end; number++) {
            const int64_t output = number * 2 * TILE;
            const auto* block = reinterpret_cast<const uint16_t*>(w.blocks + output * width);
            if (w.bias) convert(w.bias + output, 2 * TILE, bias);
            for (int64_t tile = 0; tile < tiles; tile += 2) {
                const int64_t first = tile * height;
                const auto* given = reinterpret_cast<const uint16_t*>(narrow.data() + first * width);
                const auto add = tile + 1 < tiles ? add_tiles<true> : add_tiles<false>;
                add(block, chunks, given, height, bias, sums);
                for (int64_t row = 0; row < std::min(2 * height, count - first); row++)
                    finish(before + first + row, output, sums + row * 2 * TILE);
            }
        }
    }
    _tile_release();
}

}  // namespace heavypath
#endif

namespace heavypath {

// Whether bf16 weights lie in tiles.
inline bool has_tiles() {
#if defined(HAS_TILES)
    static const bool allowed = ask_for_tiles();
    return allowed;
#else
    return false;
#endif
}

}  // namespace heavypath
