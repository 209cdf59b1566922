// Vectors of fp32 in the notation of GCC and Clang, which compiles for any processor: WIDTH numbers, with AVX-512 16 of
// them. What models keep, weights, caches and logits, is of a type Number: float, or BFloat, which is rounded to wherever
// the modules of transformers round.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace heavypath {

// VECTORS * MOST_ROWS sums, and a few more, stay in registers.
#if defined(__AVX512F__)
constexpr int WIDTH = 16, VECTORS = 2, MOST_ROWS = 12;
#elif defined(__AVX__)
constexpr int WIDTH = 8, VECTORS = 2, MOST_ROWS = 6;
#elif defined(__aarch64__)
constexpr int WIDTH = 4, VECTORS = 4, MOST_ROWS = 6;
#else
constexpr int WIDTH = 4, VECTORS = 2, MOST_ROWS = 6;
#endif

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
typedef float Four __attribute__((vector_size(16)));

struct BFloat {
    uint16_t bits;
};

template <typename To, typename From>
inline To same_bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// Keeps a compiler from joining a product with a sum behind it, so that both are rounded; and from reading memory twice
// for a number that may stay in a register.
template <typename Value>
inline Value apart(Value value) {
#if defined(__x86_64__)
    asm("" : "+v"(value));
#elif defined(__aarch64__)
    asm("" : "+w"(value));
#endif
    return value;
}

inline Floats all_of(float value) { return value - Floats{}; }

inline Floats load(const float* from) {
    Floats loaded;
    memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

inline Floats load(const BFloat* from) {
    Halves loaded;
    memcpy(&loaded, from, sizeof loaded);
    return same_bits<Floats>(__builtin_convertvector(loaded, Words) << 16);
}

inline float number(float value) { return value; }
inline float number(BFloat value) { return same_bits<float>(uint32_t(value.bits) << 16); }

template <typename Number>
inline Four load_four(const Number* from) {
    return Four{number(from[0]), number(from[1]), number(from[2]), number(from[3])};
}

// The first `count` numbers, at most WIDTH, and zeros behind them.
template <typename Number>
inline Floats load(const Number* from, int64_t count) {
    if (count >= WIDTH) return load(from);
    Number numbers[WIDTH] = {};
    memcpy(numbers, from, sizeof(Number) * count);
    return load(numbers);
}

inline void store(float* to, Floats values) { memcpy(to, &values, sizeof values); }

// To the nearest, ties to even; NaN stays NaN.
inline Words rounded_bits(Floats values) {
    Words bits = same_bits<Words>(values);
    Words nearest = bits + 0x7fff + (bits >> 16 & 1);
    return values == values ? nearest : bits | 0x400000;
}

inline void store(BFloat* to, Floats values) {
    Halves narrow = __builtin_convertvector(rounded_bits(values) >> 16, Halves);
    memcpy(to, &narrow, sizeof narrow);
}

template <typename Number>
inline void store(Number* to, Floats values, int64_t count) {
    if (count >= WIDTH) return store(to, values);
    Number numbers[WIDTH];
    store(numbers, values);
    memcpy(to, numbers, sizeof(Number) * count);
}

// What a Number keeps of values.
template <typename Number>
inline Floats rounded(Floats values) {
    if constexpr (sizeof(Number) == 2)
        return same_bits<Floats>(rounded_bits(values) & 0xffff0000u);
    else
        return values;
}

inline Four folded(Four four) { return four; }

template <typename Vector>
inline Four folded(Vector whole) {
    typedef float Half __attribute__((vector_size(sizeof(Vector) / 2)));
    struct Pair {
        Half low, high;
    };
    const Pair pair = same_bits<Pair>(whole);
    return folded(pair.low + pair.high);
}

#if defined(__clang__)
#define PICK(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define PICK(a, b, i, j, k, l) __builtin_shuffle(a, b, (Picks){i, j, k, l})
typedef int32_t Picks __attribute__((vector_size(16)));
#endif

inline float sum(Floats values) {
    const Four four = folded(values);
    return (four[0] + four[1]) + (four[2] + four[3]);
}

inline float most(Floats values) {
    float largest = values[0];
    for (int lane = 1; lane < WIDTH; lane++) largest = values[lane] > largest ? values[lane] : largest;
    return largest;
}

// exp(x) to two units in the last place, 0 below -87 and exp(88) above 88. The coefficients are those of Cephes' expf.
inline Floats exponential(Floats x) {
    const Floats least = all_of(-87.0f);
    const Ints vanishes = x < least;
    x = vanishes ? least : x;
    x = x > 88.0f ? all_of(88.0f) : x;
    const Floats nearest = x * 1.44269504f + (x < 0.0f ? all_of(-0.5f) : all_of(0.5f));
    const Ints whole = __builtin_convertvector(nearest, Ints);
    const Floats turns = __builtin_convertvector(whole, Floats);
    const Floats rest = x - turns * 0.693359375f + turns * 2.12194440e-4f;
    Floats power = all_of(1.9875691500e-4f);
    for (float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        power = power * rest + coefficient;
    power = power * (rest * rest) + rest + 1.0f;
    return vanishes ? Floats{} : power * same_bits<Floats>((whole + 127) << 23);
}

}  // namespace heavypath
