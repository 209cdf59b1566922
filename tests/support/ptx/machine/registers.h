// A warp's registers. A place is an offset in bytes; the 32 lanes of a register follow each other there. A predicate is
// one word, which has a bit for each lane.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

typedef uint8_t u8; typedef uint16_t u16; typedef uint32_t u32; typedef uint64_t u64;
typedef int8_t s8; typedef int16_t s16; typedef int32_t s32; typedef int64_t s64;
typedef float f32; typedef double f64;
struct f16 { u16 bits; };
struct bf16 { u16 bits; };

struct Registers {
  u8* at;
  u32 salt;  // of the errors of approximate instructions
  template <class T> T* reg(s64 place) { return (T*)(at + place); }
};

#define EACH(mask, ...)                                          \
  if ((mask) == ~0u) {                                           \
    _Pragma("GCC ivdep") for (int i = 0; i < 32; i++) {          \
      __VA_ARGS__                                                \
    }                                                            \
  } else {                                                       \
    for (int i = 0; i < 32; i++)                                 \
      if ((mask) >> i & 1) { __VA_ARGS__ }                       \
  }

// A value of a type in a register that may be wider.
template <class T, class W> static inline T as(W raw) {
  if constexpr (sizeof(T) == sizeof(W)) return __builtin_bit_cast(T, raw);
  else return (T)raw;
}
template <class W, class T> static inline W raw(T value) {
  if constexpr (sizeof(T) == sizeof(W)) return __builtin_bit_cast(W, value);
  else return (W)value;  // signed numbers keep their value
}

static inline f32 wide(bf16 x) { return __builtin_bit_cast(f32, (u32)x.bits << 16); }
static inline f32 wide(f16 x) { return (f32)__builtin_bit_cast(_Float16, x.bits); }

// Rounded to fp32 so that rounding once more, to fewer bits, gives what rounding at once would give.
static inline f32 odd(f64 x) {
  f32 near = (f32)x;
  if ((f64)near == x || !std::isfinite(near)) return near;
  u32 bits = __builtin_bit_cast(u32, near);
  if (std::fabs((f64)near) > std::fabs(x)) bits--;
  return __builtin_bit_cast(f32, bits | 1);
}
static inline bf16 to_bf16(f64 x) {
  if (x != x) return {0x7FFF};
  f32 y = odd(x);
  u32 bits = __builtin_bit_cast(u32, y);
  if (std::isinf(y)) return {(u16)(bits >> 16)};
  return {(u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
static inline u32 to_tf32(f32 x) {  // halves away from zero
  const u32 bits = __builtin_bit_cast(u32, x);
  return x != x ? 0x7FFFFFFF : std::isinf(x) ? bits : (bits + 0x1000) & ~0x1FFFu;
}
static inline f16 to_f16(f64 x) {
  if (x != x) return {0x7FFF};
  return {__builtin_bit_cast(u16, (_Float16)odd(x))};
}
static inline f64 from_e4m3(u32 x) {  // the lowest 8 bits; there is no infinity
  const int exponent = x >> 3 & 15, fraction = x & 7;
  if ((x & 127) == 127) return NAN;
  const f64 size = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
  return x & 128 ? -size : size;
}

// A GPU has one NaN.
static inline f32 canonical(f32 x) { return x != x ? __builtin_bit_cast(f32, 0x7FFFFFFFu) : x; }
static inline f64 canonical(f64 x) { return x != x ? __builtin_bit_cast(f64, 0x7FF8000000000000ull) : x; }

static inline f32 ftz(f32 x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }
template <class T> static inline T low(T a, T b) {
  return a != a ? b : b != b ? a : a < b ? a : b < a ? b : std::signbit(a) ? a : b;
}
template <class T> static inline T high(T a, T b) {
  return a != a ? b : b != b ? a : a > b ? a : b > a ? b : std::signbit(a) ? b : a;
}

// An approximate result: off by at most so many units in the last place, by chance, but the same for the same operand.
// PTX has exact results of zeros, such as ex2(0) = 1.
static inline f32 near(f64 exact, int ulps, u32 operand, u32 salt) {
  f32 x = (f32)exact;
  if (!std::isfinite(x) || x == 0.0f || operand << 1 == 0) return x;
  u32 hash = (operand ^ salt) * 0x9E3779B1u;
  hash = (hash ^ hash >> 15) * 0x85EBCA77u;
  s32 off = (s32)((hash >> 8) % (2 * ulps + 1)) - ulps;
  f32 moved = __builtin_bit_cast(f32, __builtin_bit_cast(u32, x) + off);
  return std::isfinite(moved) ? moved : x;
}
// lg2.approx: 2^-22 off between 1/2 and 2, where the result may be near 0, and units in the last place elsewhere.
static inline f32 near_lg2(f32 a, u32 salt) {
  f64 exact = std::log2((f64)a);
  if (!(a > 0.5f && a < 2.0f) || a == 1.0f) return near(exact, 2, __builtin_bit_cast(u32, a), salt);
  f32 off = near(1.0, 2, __builtin_bit_cast(u32, a), salt) - 1.0f;
  return (f32)(exact + (off > 0 ? 1 : off < 0 ? -1 : 0) * 0x1p-23);
}

template <class T> static inline T whole(f64 x, f64 least, f64 most) {
  if (x != x) return 0;
  if (x <= least) return (T)least;
  return x >= most ? std::numeric_limits<T>::max() : (T)x;
}
static inline u32 permuted(u32 a, u32 b, u32 selector) {
  u64 both = (u64)b << 32 | a;
  u32 out = 0;
  for (int k = 0; k < 4; k++) {
    u32 pick = selector >> 4 * k & 15;
    u8 byte = both >> 8 * (pick & 7);
    out |= (u32)(pick & 8 ? (byte & 0x80 ? 0xFF : 0) : byte) << 8 * k;
  }
  return out;
}
static inline u32 looked_up(u32 a, u32 b, u32 c, u32 table) {
  u32 out = 0;
  for (int k = 0; k < 8; k++)
    if (table >> k & 1) out |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
  return out;
}
template <class T> static inline T field(T x, u32 from, u32 length, bool is_signed) {
  const u32 bits = 8 * sizeof(T);
  from &= 255; length &= 255;
  u64 value = from >= bits ? 0 : (u64)x >> from;
  u64 top = from + length > bits ? (u64)x >> (bits - 1) & 1 : length ? value >> (length - 1) & 1 : 0;
  if (length < 64) value &= (1ull << length) - 1;
  if (is_signed && length && top && length < 64) value |= ~0ull << (from + length > bits ? (from > bits ? 0 : bits - from) : length);
  return (T)value;
}
template <class T> static inline T inserted(T part, T x, u32 from, u32 length) {
  from &= 255; length &= 255;
  u64 mask = from >= 64 ? 0 : (length >= 64 ? ~0ull : (1ull << length) - 1) << from;
  return (T)(((u64)x & ~mask) | (from >= 64 ? 0 : (u64)part << from & mask));
}
template <class T> static inline T reversed(T x) {
  T out = 0;
  for (u32 k = 0; k < 8 * sizeof(T); k++) out |= (x >> k & 1) << (8 * sizeof(T) - 1 - k);
  return out;
}
