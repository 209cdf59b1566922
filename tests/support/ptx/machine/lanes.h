// What the lanes of a warp tell each other. Lanes must come together: the mask that an instruction names is looked at.
#pragma once
#include "machine.h"

// mode (up, down, bfly, idx), result, place of a predicate or -1, source, lane, clamp, members
extern "C" void ptx_shuffle(Registers& r, const s64* o, u32 mask) {
  WARP;
  u32 given[32], out[32];
  memcpy(given, w.reg<u32>(o[3]), sizeof given);
  u32 there = 0;
  LANES(mask) {
    const u32 by = w.reg<u32>(o[4])[i] & 31, control = w.reg<u32>(o[5])[i], members = w.reg<u32>(o[6])[i];
    const int segment = control >> 8 & 31, most = (i & segment) | (control & 31 & ~segment);
    int from = o[0] == 0 ? i - (int)by : o[0] == 1 ? i + (int)by : o[0] == 2 ? i ^ (int)by : (i & segment) | (by & ~segment);
    const bool inside = o[0] == 0 ? from >= most : from <= most;
    if (inside) there |= 1u << i;
    else from = i;
    if (!(members >> i & 1)) fail("shfl by lane %d, which is none of its members", i);
    if (!(mask >> from & 1)) fail("shfl by lane %d from lane %d, which takes no part", i, from);
    out[i] = given[from];
  }
  LANES(mask) w.reg<u32>(o[1])[i] = out[i];
  if (o[2] >= 0) *w.reg<u32>(o[2]) = (*w.reg<u32>(o[2]) & ~mask) | (there & mask);
}

// mode (ballot, any, all, uni), result, a predicate, its sense
extern "C" void ptx_vote(Registers& r, const s64* o, u32 mask) {
  WARP;
  const u32 said = (o[3] ? 0 : ~0u) ^ *w.reg<u32>(o[2]), yes = said & mask;
  const bool answer = o[0] == 1 ? yes != 0 : o[0] == 2 ? yes == mask : yes == mask || !yes;
  if (o[0] == 0) { LANES(mask) w.reg<u32>(o[1])[i] = yes; }
  else *w.reg<u32>(o[1]) = (*w.reg<u32>(o[1]) & ~mask) | (answer ? mask : 0);
}

// operation (add, min, max, and, or, xor), whether signed, result, source
extern "C" void ptx_reduce(Registers& r, const s64* o, u32 mask) {
  WARP;
  bool begun = false;
  s64 all = 0;
  LANES(mask) {
    const u32 bits = w.reg<u32>(o[3])[i];
    const s64 x = o[1] ? (s64)(s32)bits : (s64)bits;
    all = !begun ? x : o[0] == 0 ? all + x : o[0] == 1 ? std::min(all, x) : o[0] == 2 ? std::max(all, x)
        : o[0] == 3 ? all & x : o[0] == 4 ? all | x : all ^ x;
    begun = true;
  }
  LANES(mask) w.reg<u32>(o[2])[i] = (u32)all;
}

// result, a predicate or -1: the lowest lane
extern "C" void ptx_elect(Registers& r, const s64* o, u32 mask) {
  WARP;
  const int lowest = __builtin_ctz(mask);
  if (o[0] >= 0) LANES(mask) w.reg<u32>(o[0])[i] = lowest;
  if (o[1] >= 0) *w.reg<u32>(o[1]) = (*w.reg<u32>(o[1]) & ~mask) | 1u << lowest;
}

// result
extern "C" void ptx_active(Registers& r, const s64* o, u32 mask) {
  WARP;
  LANES(mask) w.reg<u32>(o[0])[i] = mask;
}
