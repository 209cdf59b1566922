// The random numbers of `heavypath.kernels.noise`: Philox-4x32-10, and what its words become. Logarithms are in fp64 to
// one unit in the last place, so that a Gumbel variable, which is rounded to fp32, is that of the other implementations.

#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "vectors.h"

namespace heavypath {

constexpr int LANES = WIDTH / 2;  // fp64 numbers of a vector
constexpr int QUADS = 4 * LANES;  // tokens that go through the rounds together

typedef double Doubles __attribute__((vector_size(8 * LANES)));
typedef uint64_t Longs __attribute__((vector_size(8 * LANES)));
typedef float Singles __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));

// Products of numbers below 2^32. Compilers take three instructions for one, as they do not know that bound.
inline Longs product(Longs a, uint32_t b) {
#if defined(__AVX512F__)
    return Longs(_mm512_mul_epu32(__m512i(a), _mm512_set1_epi64(b)));
#elif defined(__AVX2__)
    return Longs(_mm256_mul_epu32(__m256i(a), _mm256_set1_epi64x(b)));
#else
    return a * b;
#endif
}

enum Stream { DRAFT = 0, ACCEPT = 1, TARGET = 2, FILL = 3 };

// log x for normal x > 0: x = 2^e m with m in [sqrt(1/2), sqrt(2)), log m = 2 artanh((m - 1) / (m + 1)).
inline Doubles logarithm(Doubles x) {
    const Longs bits = same_bits<Longs>(x);
    const Longs shifted = bits - same_bits<uint64_t>(0.70710678118654752);
    const Doubles exponent = __builtin_convertvector(same_bits<Longs>(shifted) >> 52, Doubles);
    // The exponent as a signed number: what is 1 below is 2^12 - 1 without its sign.
    const Doubles e = exponent > 1024.0 ? exponent - 4096.0 : exponent;
    const Doubles m = same_bits<Doubles>(bits - (shifted & 0xfff0000000000000u));
    const Doubles s = (m - 1.0) / (m + 1.0), square = s * s;
    Doubles series = Doubles{} + 2.0 / 23;
    for (int odd = 21; odd >= 3; odd -= 2) series = series * square + 2.0 / odd;
    return e * 6.93147180369123816490e-01 + (2.0 * s + (s * square * series + e * 1.90821492927058770002e-10));
}

// Standard Gumbel variables -log(-log(1 - u)) of words of noise, with u = (word + 1/2) / 2^32.
inline Singles gumbels(Bits words) {
    const Longs wide = __builtin_convertvector(words, Longs);
    const Doubles left = (4294967295.5 - __builtin_convertvector(wide, Doubles)) * 0x1p-32;  // 1 - u, exactly
    const Doubles exponential = -logarithm(left < 0x1p-24 ? Doubles{} + 0x1p-24 : left);
    return __builtin_convertvector(-logarithm(exponential), Singles);
}

struct Philox {
    uint32_t seed_low, seed_high;

    explicit Philox(int64_t seed) : seed_low(seed), seed_high(uint64_t(seed) >> 32) {}

    // Four words of each of LANES counters (first + lane, row, stream).
    void words(uint32_t first, int64_t row, uint32_t stream, Longs (&c)[4]) const {
        Longs counter = {};
        for (int lane = 0; lane < LANES; lane++) counter[lane] = first + lane;
        c[0] = counter;
        c[1] = Longs{} + uint32_t(row), c[2] = Longs{} + uint32_t(uint64_t(row) >> 32), c[3] = Longs{} + stream;
        uint32_t low = seed_low, high = seed_high;
        for (int round = 0; round < 10; round++, low += 0x9E3779B9u, high += 0xBB67AE85u) {
            const Longs even = product(c[0], 0xD2511F53u), odd = product(c[2], 0xCD9E8D57u);
            c[0] = (odd >> 32) ^ c[1] ^ (Longs{} + low), c[1] = odd & 0xffffffffu;
            c[2] = (even >> 32) ^ c[3] ^ (Longs{} + high), c[3] = even & 0xffffffffu;
        }
    }

    // One word for each of QUADS tokens from `first` on, a multiple of QUADS.
    void block(uint32_t* out, int64_t first, int64_t row, uint32_t stream) const {
        Longs c[4];
        words(first / 4, row, stream, c);
        for (int word = 0; word < 4; word++)
            for (int lane = 0; lane < LANES; lane++) out[4 * lane + word] = c[word][lane];
    }

    // A uniform number in [0, 1), on a grid of 2^-24, for the child of a rank below the node with this row.
    double coin(int64_t row, int64_t rank) const {
        Longs c[4];
        words(rank / 4, row, ACCEPT, c);
        return (c[rank % 4][0] >> 8) * 0x1p-24;
    }
};

}  // namespace heavypath
