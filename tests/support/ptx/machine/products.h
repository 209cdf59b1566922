// Matrices in the lanes of warps: ldmatrix, stmatrix, and products by mma and wgmma, of 16-bit numbers summed in fp32;
// and products by mma of numbers in tf32, which are those of fp32 without their last 13 bits.
//
// Sums are in fp64 and rounded once. In m16n8k16 lane 4 g + q has, of A, rows g and g + 8 and columns 2 q, 2 q + 1,
// 2 q + 8, 2 q + 9; of B these rows of column g; of C columns 2 q and 2 q + 1 of rows g and g + 8. In m16n8k8 it has, of
// A, columns q and q + 4 of the same rows, and of B these rows of column g.
#pragma once
#include "memory.h"

static f64 half_of(u32 bits, bool is_f16) { return is_f16 ? wide(f16{(u16)bits}) : wide(bf16{(u16)bits}); }

// matrices, whether transposed, address, offset, then a place for each
extern "C" void ptx_load_matrix(Registers& r, const s64* o, u32 mask) {
  WARP;
  if (mask != ~0u) fail("ldmatrix by some lanes of a warp");
  for (int matrix = 0; matrix < o[0]; matrix++) {
    u16 x[8][8];
    u64 rows[32] = {};
    for (int row = 0; row < 8; row++) {
      rows[row] = w.reg<u32>(o[2])[8 * matrix + row] + o[3];
      memcpy(x[row], shared_at(w, rows[row], 16, nullptr), 16);
    }
    count_banks(w, rows, 0xFF, 16);
    for (int i = 0; i < 32; i++) {
      const int g = i / 4, q = 2 * (i % 4);
      const u32 low = o[1] ? x[q][g] : x[g][q], high = o[1] ? x[q + 1][g] : x[g][q + 1];
      w.reg<u32>(o[4 + matrix])[i] = low | high << 16;
    }
  }
}
extern "C" void ptx_store_matrix(Registers& r, const s64* o, u32 mask) {
  WARP;
  if (mask != ~0u) fail("stmatrix by some lanes of a warp");
  for (int matrix = 0; matrix < o[0]; matrix++) {
    u16 x[8][8];
    u64 rows[32] = {};
    for (int i = 0; i < 32; i++) {
      const int g = i / 4, q = 2 * (i % 4);
      const u32 both = w.reg<u32>(o[4 + matrix])[i];
      (o[1] ? x[q][g] : x[g][q]) = (u16)both;
      (o[1] ? x[q + 1][g] : x[g][q + 1]) = (u16)(both >> 16);
    }
    for (int row = 0; row < 8; row++) {
      rows[row] = w.reg<u32>(o[2])[8 * matrix + row] + o[3];
      memcpy(shared_at(w, rows[row], 16, (u8*)x[row]), x[row], 16);
    }
    count_banks(w, rows, 0xFF, 16);
  }
}

// A warp's rows of A, 16 x 16, as four registers of each lane have them.
template <class Get> static void unpack_rows(f32 (*a)[16], bool is_f16, Get get) {
  for (int i = 0; i < 32; i++)
    for (int k = 0; k < 4; k++)
      for (int half = 0; half < 2; half++)
        a[i / 4 + 8 * (k & 1)][2 * (i % 4) + 8 * (k >> 1) + half] = half_of(get(k, i) >> 16 * half, is_f16);
}
// c[16][columns] += a[16][depth] b[depth][columns]
static void multiply(f64* c, const f32 (*a)[16], const f32* b, int columns, int depth = 16) {
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < depth; k++)
      for (int n = 0; n < columns; n++) c[row * columns + n] += (f64)a[row][k] * b[k * columns + n];
}

enum { OF_BF16, OF_F16, OF_TF32 };
// kind of numbers, then 4 places of D, 4 of A, 2 of B, 4 of C
extern "C" void ptx_mma(Registers& r, const s64* o, u32 mask) {
  WARP;
  if (mask != ~0u) fail("mma by some lanes of a warp");
  const bool is_tf32 = o[0] == OF_TF32, is_f16 = o[0] == OF_F16;
  f32 a[16][16], b[16 * 8];
  f64 c[16 * 8];
  auto short_of = [&](s64 place, int i) { return __builtin_bit_cast(f32, w.reg<u32>(place)[i] & ~0x1FFFu); };
  if (!is_tf32) unpack_rows(a, is_f16, [&](int k, int i) { return w.reg<u32>(o[5 + k])[i]; });
  for (int i = 0; i < 32; i++) {
    const int g = i / 4, q = i % 4;
    for (int k = 0; k < 4 && is_tf32; k++) a[g + 8 * (k & 1)][q + 4 * (k >> 1)] = short_of(o[5 + k], i);
    for (int k = 0; k < 2; k++)
      if (is_tf32) b[(q + 4 * k) * 8 + g] = short_of(o[9 + k], i);
      else
        for (int half = 0; half < 2; half++)
          b[(2 * q + 8 * k + half) * 8 + g] = half_of(w.reg<u32>(o[9 + k])[i] >> 16 * half, is_f16);
    for (int k = 0; k < 4; k++) c[(g + 8 * (k >> 1)) * 8 + 2 * q + (k & 1)] = w.reg<f32>(o[11 + k])[i];
  }
  multiply(c, a, b, 8, is_tf32 ? 8 : 16);
  for (int i = 0; i < 32; i++)
    for (int k = 0; k < 4; k++)
      w.reg<f32>(o[1 + k])[i] = canonical((f32)c[(i / 4 + 8 * (k >> 1)) * 8 + 2 * (i % 4) + (k & 1)]);
}

// The place in shared memory of a 16-bit number of a matrix that a descriptor names: row of M or N, and k of the
// product's 16. A pattern of 128, 64 or 32 bytes exchanges chunks of 16 bytes by the bits above them.
static u32 place_of(u64 descriptor, int row, int k, bool transposed) {
  const u32 start = (descriptor & 0x3FFF) << 4, leading = (descriptor >> 16 & 0x3FFF) << 4;
  const u32 stride = (descriptor >> 32 & 0x3FFF) << 4, pattern = descriptor >> 62;
  const u32 width = pattern == 0 ? 16 : 256 >> pattern;  // bytes of a row of the pattern
  u32 at;
  if (!transposed) {
    const u32 byte = 2 * k;
    at = start + row / 8 * stride + row % 8 * width + (pattern ? byte : byte / 16 * leading + byte % 16);
  } else {
    const u32 block = row / (width / 2), within = row % (width / 2) * 2;
    at = start + k % 8 * width + within + (pattern ? block * leading + k / 8 * stride : block * stride + k / 8 * leading);
  }
  const u32 above = at >> 7 & 7;
  return pattern == 0 ? at : at ^ (above & ((8 >> (pattern - 1)) - 1)) << 4;
}
static f32 shared_half(Warp& w, u32 at, bool is_f16) {
  u16 bits;
  memcpy(&bits, shared_at(w, at, 2, nullptr), 2);
  if (w.program->unfenced[at] == w.program->fences) fail("wgmma reads byte %u of shared memory with no fence.proxy.async", at);
  return half_of(bits, is_f16);
}

enum { IN_REGISTERS = 1, A_TRANSPOSED = 2, B_TRANSPOSED = 4, IS_F16 = 8 };
// columns, flags, place of a predicate: whether D counts; descriptors of A and B, 4 places of A, then those of D
static void multiply_now(Warp& w, Product& product) {
  const s64* o = product.operands;
  const int columns = o[0], flags = o[1];
  const bool is_f16 = flags & IS_F16;
  f32 a[16][16];
  std::vector<f32> b(16 * columns);
  std::vector<f64> c(16 * columns);
  if (flags & IN_REGISTERS) unpack_rows(a, is_f16, [&](int k, int i) { return product.in_registers[k][i]; });
  else
    for (int row = 0; row < 16; row++)
      for (int k = 0; k < 16; k++)
        a[row][k] = shared_half(w, place_of(product.a, 16 * (w.index % 4) + row, k, flags & A_TRANSPOSED), is_f16);
  for (int k = 0; k < 16; k++)
    for (int n = 0; n < columns; n++) b[k * columns + n] = shared_half(w, place_of(product.b, n, k, flags & B_TRANSPOSED), is_f16);
  auto place = [&](int i, int k) { return (i / 4 + 8 * (k >> 1 & 1)) * columns + 8 * (k / 4) + 2 * (i % 4) + (k & 1); };
  for (int k = 0; k < columns / 2; k++)
    for (int i = 0; i < 32; i++) c[place(i, k)] = product.adds >> i & 1 ? w.reg<f32>(o[9 + k])[i] : 0.0;
  multiply(c.data(), a, b.data(), columns);
  for (int k = 0; k < columns / 2; k++)
    for (int i = 0; i < 32; i++) w.reg<f32>(o[9 + k])[i] = canonical((f32)c[place(i, k)]);
  product.done = true;
}
extern "C" void ptx_wgmma(Registers& r, const s64* o, u32 mask) {
  WARP;
  if (mask != ~0u) fail("wgmma by some lanes of a warp");
  if (!w.fenced) fail("wgmma with no wgmma.fence before it");
  Product product{o, w.reg<u64>(o[3])[0], w.reg<u64>(o[4])[0], {}, *w.reg<u32>(o[2]), false};
  if (o[1] & IN_REGISTERS)
    for (int k = 0; k < 4; k++) memcpy(product.in_registers[k], w.reg<u32>(o[5 + k]), sizeof product.in_registers[k]);
  const bool in_order = std::all_of(w.products.begin(), w.products.end(), [](const Product& one) { return one.done; });
  if (in_order && w.machine->now()) multiply_now(w, product);
  w.products.push_back(product);
}
extern "C" void ptx_wgmma_fence(Registers& r, const s64*, u32) { WARP; w.fenced = true; }
extern "C" void ptx_wgmma_commit(Registers& r, const s64*, u32) {
  WARP;
  w.products.push_back({nullptr, 0, 0, {}, 0, true});
  w.fenced = false;
}
// how many groups may be left
extern "C" void ptx_wgmma_wait(Registers& r, const s64* o, u32) {
  WARP;
  auto& products = w.products;
  s64 groups = std::count_if(products.begin(), products.end(), [](const Product& one) { return !one.operands; });
  size_t at = 0;
  for (; at < products.size() && groups > o[0]; at++) {
    if (!products[at].operands) groups--;
    else if (!products[at].done) multiply_now(w, products[at]);
  }
  products.erase(products.begin(), products.begin() + at);
}
extern "C" void ptx_proxy_fence(Registers& r, const s64*, u32) { WARP; w.program->fences++; }
