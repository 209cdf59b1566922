// Loads, stores, atomics and asynchronous copies, and what is checked of each: where it is, how it is aligned, and that
// warps meet in shared memory only with a barrier between them.
#pragma once
#include <algorithm>

#include "machine.h"

static u8* global_at(Machine& m, u64 address, u32 size, const char* what) {
  if (address % size) fail("%s of %u bytes at 0x%llx, which is misaligned", what, size, (unsigned long long)address);
  if (address < m.last->begin || address + size > m.last->end) {
    const Range* found = std::find_if(m.job.ranges, m.job.ranges + m.job.range_count, [&](const Range& range) {
      return address >= range.begin && address + size <= range.end;
    });
    if (found == m.job.ranges + m.job.range_count)
      fail("%s of %u bytes at 0x%llx, outside all tensors of the launch", what, size, (unsigned long long)address);
    m.last = found;
  }
  return (u8*)address;
}

static u32 now_by(const Warp& w) { return (w.program->barriers + 1) << 8 | w.index; }

enum How { READS, WRITES, REPEATS };  // the last: writes what is there already, as several warps may

// Note that a warp touches a number; fails where another one did between the same two barriers, and either changed it.
static void meet(Touch& touch, u32 own, How how, const char* where, u64 at) {
  const bool written = touch.wrote >> 8 == own >> 8 && touch.wrote != own;
  const bool read = touch.read >> 8 == own >> 8 && touch.read != own;
  if (written && how != REPEATS)
    fail("warps %u and %u meet at %s 0x%llx with no barrier between them: one writes, the other %s", touch.wrote & 255,
         own & 255, where, (unsigned long long)at, how == READS ? "reads" : "writes, too");
  if (read && how == WRITES)
    fail("warp %u writes %s 0x%llx, which another reads, with no barrier between them", own & 255, where,
         (unsigned long long)at);
  if (how == READS) touch.read = read ? own | MANY : own;
  else touch.wrote = written ? own | MANY : own;
}
static void meet_shared(Warp& w, u32 address, u32 size, How how) {
  Program& p = *w.program;
  for (u32 at = address; at < address + size; at++) {
    if (how != READS) p.unfenced[at] = p.fences;
    else if (!p.touched[at].wrote) fail("byte 0x%x of shared memory is read, which nothing has written", at);
    meet(p.touched[at], now_by(w), how, "byte of shared memory", at);
  }
}
static void meet_global(Warp& w, u64 address, How how) {
  Program& p = *w.program;
  if (p.warps.size() == 1) return;
  if (p.far.empty() || p.far_count > p.far.size() / 2) p.far.assign(1 << 14, Far{}), p.far_count = 0;  // forgets
  for (u64 at = address * 0x9E3779B97F4A7C15ull >> 50;; at = (at + 1) % p.far.size()) {
    Far& far = p.far[at];
    if (far.barriers != p.barriers + 1) far = {address, p.barriers + 1, {0, 0}}, p.far_count++;
    if (far.address != address) continue;
    return meet(far.touch, now_by(w), how, "address", address);
  }
}
// The place of bytes in shared memory that are read, or by which others are replaced.
static u8* shared_at(Warp& w, u64 address, u32 size, const u8* by) {
  const u32 at = (u32)address;
  std::vector<u8>& memory = w.program->shared;
  if (at % size) fail("an access of %u bytes to byte 0x%x of shared memory, which is misaligned", size, at);
  if (at + (u64)size > memory.size())
    fail("an access of %u bytes to byte 0x%x of shared memory, which has 0x%zx", size, at, memory.size());
  meet_shared(w, at, size, !by ? READS : memcmp(&memory[at], by, size) ? WRITES : REPEATS);
  return &memory[at];
}

// Sectors of 32 bytes that a warp's access to global memory touches, and as few as would hold its bytes.
static void count_sectors(Warp& w, const u64* address, u32 mask, u32 size) {
  u64 sectors[32], starts[32];
  int n = 0;
  LANES(mask) { sectors[n] = address[i] >> 5; starts[n++] = address[i]; }
  if (!n) return;
  std::sort(sectors, sectors + n);
  std::sort(starts, starts + n);
  const u64 bytes = size * (u64)(std::unique(starts, starts + n) - starts);
  Count& count = w.machine->count();
  count.requests++;
  count.units += (std::unique(sectors, sectors + n) - sectors) * std::max(1u, size / 32);
  count.least += (bytes + 31) / 32;
}
// Cycles of shared memory: 32 banks of 4 bytes; accesses of 8 and 16 bytes take the lanes in 2 and 4 parts.
static void count_banks(Warp& w, const u64* address, u32 mask, u32 size) {
  Count& count = w.machine->count();
  const int parts = std::max(1u, size / 4), lanes = 32 / parts;
  count.requests++;
  for (int part = 0; part < parts; part++) {
    u32 words[32], banks[32] = {};
    int n = 0;
    for (int i = part * lanes; i < (part + 1) * lanes; i++)
      if (mask >> i & 1)
        for (int k = 0; k < parts; k++) words[n++] = (u32)address[i] / 4 + k;
    std::sort(words, words + n);
    n = std::unique(words, words + n) - words;
    for (int k = 0; k < n; k++) banks[words[k] % 32]++;
    count.units += *std::max_element(banks, banks + 32);
    count.least += (n + 31) / 32;
  }
}

struct Access {  // the first operands of a load, a store or an atomic; space 2 is global memory that others may change
  bool shared, watched;
  u32 size, count;  // bytes of a number, and how many there are
  u64 address[32];
  Access(Warp& w, const s64* o, u32 mask, const char* what)
      : shared(o[0] == 1), watched(o[0] == 0), size(o[4]), count(o[5]) {
    LANES(mask) {
      address[i] = number(w, o[1], o[2], i) + o[3];
      if (!shared) global_at(*w.machine, address[i], size * count, what);
    }
    (shared ? count_banks : count_sectors)(w, address, mask, size * count);
  }
  u8* at(Warp& w, int lane, const u8* by) {
    if (shared) return shared_at(w, address[lane], size * count, by);
    u8* to = (u8*)address[lane];
    for (u32 k = 0; watched && k < count * size; k += size)
      meet_global(w, address[lane] + k, !by ? READS : memcmp(to + k, by + k, size) ? WRITES : REPEATS);
    return to;
  }
};

// space, address, its bytes, offset, bytes of a number, how many, whether signed; then a place and its bytes for each
extern "C" void ptx_load(Registers& r, const s64* o, u32 mask) {
  WARP;
  Access access(w, o, mask, "a load");
  LANES(mask) {
    const u8* from = access.at(w, i, nullptr);
    for (u32 k = 0; k < access.count; k++) {
      u64 value = 0;
      memcpy(&value, from + k * access.size, access.size);
      if (o[6]) value = (u64)((s64)(value << (64 - 8 * access.size)) >> (64 - 8 * access.size));
      set_number(w, o[7 + 2 * k], o[8 + 2 * k], i, value);
    }
  }
}
extern "C" void ptx_store(Registers& r, const s64* o, u32 mask) {
  WARP;
  Access access(w, o, mask, "a store");
  const u32 size = access.size * access.count;
  u8 bytes[32][32];
  LANES(mask) {
    for (u32 k = 0; k < access.count; k++) {
      const u64 value = number(w, o[7 + 2 * k], o[8 + 2 * k], i);
      memcpy(bytes[i] + k * access.size, &value, access.size);
    }
    for (int j = 0; j < i; j++)
      if ((mask >> j & 1) && access.address[i] == access.address[j] && memcmp(bytes[i], bytes[j], size))
        fail("lanes %d and %d store different values to one address", j, i);
    memcpy(access.at(w, i, bytes[i]), bytes[i], size);
  }
}

// address, its bytes, offset: nothing is read or written, but a place outside all tensors was not meant
extern "C" void ptx_prefetch(Registers& r, const s64* o, u32 mask) {
  WARP;
  LANES(mask) global_at(*w.machine, number(w, o[0], o[1], i) + o[2], 1, "a prefetch");
}

enum Atomic { ADD, MIN, MAX, AND, OR, XOR, EXCH, CAS, INC, DEC };
template <class T> static T after(s64 operation, T old, T b, T c) {
  switch (operation) {
    case ADD: return old + b;
    case MIN: return old < b ? old : b;
    case MAX: return old > b ? old : b;
    case EXCH: return b;
    case CAS: return old == b ? c : old;
    default: break;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (operation) {
      case AND: return old & b;
      case OR: return old | b;
      case XOR: return old ^ b;
      case INC: return old >= b ? 0 : old + 1;
      case DEC: return old == 0 || old > b ? b : old - 1;
    }
  }
  fail("an atomic that there is not for its type");
}
template <class T> static u64 change(u8* at, s64 operation, u64 b, u64 c) {
  T old, one, two;
  memcpy(&old, at, sizeof old), memcpy(&one, &b, sizeof one), memcpy(&two, &c, sizeof two);
  const T changed = after<T>(operation, old, one, two);
  memcpy(at, &changed, sizeof changed);
  u64 out = 0;
  memcpy(&out, &old, sizeof old);
  return out;
}
// as of a load up to the count; the type (0 unsigned, 1 signed, 2 floating), the operation, result or -1, operands b, c
extern "C" void ptx_atomic(Registers& r, const s64* o, u32 mask) {
  WARP;
  Access access(w, o, mask, "an atomic");
  const int first = w.machine->job.seed ? w.machine->random() % 32 : 0;
  for (int k = 0; k < 32; k++) {
    const int i = (k + first) % 32;
    if (!(mask >> i & 1)) continue;
    u8* at = access.shared ? w.program->shared.data() + (u32)access.address[i] : (u8*)access.address[i];
    if (access.shared && (u32)access.address[i] + access.size > w.program->shared.size()) fail("an atomic outside shared memory");
    const u64 b = number(w, o[9], access.size, i), c = number(w, o[10], access.size, i);
    const bool is_8 = access.size == 8;
    u64 (*const by_type[3])(u8*, s64, u64, u64) = {
        is_8 ? change<u64> : change<u32>, is_8 ? change<s64> : change<s32>, is_8 ? change<f64> : change<f32>};
    const u64 old = by_type[o[6]](at, o[7], b, c);
    if (o[8] >= 0) set_number(w, o[8], access.size, i, old);
  }
}

static void copy_now(Warp& w, Copy& copy) {
  u8 bytes[16] = {};
  if (copy.given) memcpy(bytes, (u8*)copy.from, copy.given);
  memcpy(shared_at(w, copy.to, copy.size, bytes), bytes, copy.size);
  copy.done = true;
}
// shared address, its offset, global address, its offset, bytes, the place of how many of these are read, or -1
extern "C" void ptx_copy(Registers& r, const s64* o, u32 mask) {
  WARP;
  u64 from[32], to[32];
  u32 reading = 0;
  LANES(mask) {
    Copy copy{w.reg<u64>(o[2])[i] + o[3], (u32)(w.reg<u32>(o[0])[i] + o[1]), (u32)o[4], (u32)o[4], false};
    if (o[5] >= 0) copy.given = std::min(copy.size, w.reg<u32>(o[5])[i]);
    from[i] = copy.from, to[i] = copy.to;
    if (copy.given) {
      reading |= 1u << i;
      global_at(*w.machine, copy.from, copy.size, "an asynchronous copy");
    }
    if (w.machine->now()) copy_now(w, copy);
    w.copies[i].push_back(copy);
  }
  count_sectors(w, from, reading, o[4]);
  count_banks(w, to, mask, o[4]);
}
extern "C" void ptx_copy_commit(Registers& r, const s64*, u32 mask) {
  WARP;
  LANES(mask) w.copies[i].push_back({0, 0, 0, 0, true});
}
// how many groups may be left
extern "C" void ptx_copy_wait(Registers& r, const s64* o, u32 mask) {
  WARP;
  LANES(mask) {
    auto& copies = w.copies[i];
    s64 groups = std::count_if(copies.begin(), copies.end(), [](const Copy& one) { return !one.size; });
    size_t at = 0;
    for (; at < copies.size() && (groups > o[0] || o[0] < 0); at++) {
      if (!copies[at].size) groups--;
      else if (!copies[at].done) copy_now(w, copies[at]);
      else meet_shared(w, copies[at].to, copies[at].size, REPEATS);  // others may read it only behind a barrier from here
    }
    copies.erase(copies.begin(), copies.begin() + at);
  }
}
