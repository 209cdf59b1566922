// The scheduler: some programs at a time, whose warps take turns, each lane at its own instruction.
//
// The lanes of a warp that are at the same row run together; of several groups the one that is furthest behind goes on,
// so that they come together again behind a branch.
#include <cstdio>

#include "lanes.h"
#include "memory.h"
#include "products.h"

static const u32 SPECIAL = 10;  // tid, laneid, ntid, ctaid.x .. z, nctaid.x .. z, warpid

static void begin(Machine& m, Program& p, u64 id) {
  Job& job = m.job;
  const u32 warps = job.threads / 32, gx = job.grid[0], gy = job.grid[1];
  p.id[0] = id % gx, p.id[1] = id / gx % gy, p.id[2] = id / gx / gy;
  if (p.warps.empty()) {
    p.registers.resize(warps * job.register_bytes);
    p.warps.resize(warps);
    p.shared.resize(job.shared);
    p.touched.resize(job.shared);
    p.unfenced.resize(job.shared);
  }
  // Garbage, which differs from launch to launch: NaN in all types that have one, or any bits.
  const u8 garbage = job.seed % 3 == 0 ? 0xFF : (u8)m.random();
  std::fill(p.registers.begin(), p.registers.end(), garbage);
  std::fill(p.shared.begin(), p.shared.end(), garbage);
  std::fill(p.touched.begin(), p.touched.end(), Touch{0, 0});
  p.barriers++, p.fences = p.far_count = 0;
  memset(p.arrived, 0, sizeof p.arrived);
  for (u32 k = 0; k < warps; k++) {
    Warp& w = p.warps[k];
    w.at = p.registers.data() + k * job.register_bytes;
    w.salt = (u32)(job.errors * 0x9E3779B97F4A7C15ull >> 32);
    w.machine = &m, w.program = &p, w.index = k, w.place = 0, w.waits = -1, w.fenced = false;
    w.live = w.active = ~0u, w.parked = 0, w.alone = false;
    u8* constants = w.at + job.register_bytes - job.constant_bytes;
    memcpy(constants, job.constants, job.constant_bytes);
    u32* special = (u32*)constants;
    for (u32 i = 0; i < 32; i++) {
      const u32 values[SPECIAL] = {32 * k + i, i, job.threads, p.id[0], p.id[1], p.id[2],
                                   job.grid[0], job.grid[1], job.grid[2], k};
      for (u32 n = 0; n < SPECIAL; n++) special[32 * n + i] = values[n];
    }
  }
}

// Let the lanes that are furthest behind go on, together with those at the same row.
static void regroup(Warp& w) {
  u32 least = ~0u, others = w.live & ~w.active & ~w.parked;
  if (!w.active && !others) others = w.parked, w.parked = 0, w.alone = true;  // nobody comes any more
  LANES(others) least = std::min(least, w.places[i]);
  if (w.active && w.place < least) return;
  if (!w.active || w.place > least) {
    LANES(w.active) w.places[i] = w.place;
    w.active = 0;
    w.place = least;
  }
  LANES(others) if (w.places[i] == least) w.active |= 1u << i;
  if (w.alone) w.parked = others & ~w.active;
}

// Whether the lanes at a row where they must be together go on; if others may still come, they wait for these.
static bool gather(Warp& w) {
  LANES(w.parked) if (w.places[i] == w.place) w.active |= 1u << i, w.parked &= ~(1u << i);
  if (w.active == w.live || w.alone) return w.alone = false, true;
  LANES(w.active) w.places[i] = w.place;
  w.parked |= w.active;
  w.active = 0;
  regroup(w);
  return false;
}

static void finish(Warp& w, u32 ending) {
  LANES(ending) for (Copy& copy : w.copies[i]) if (copy.size) fail("a program ends with asynchronous copies on their way");
  if (ending == w.live && std::any_of(w.products.begin(), w.products.end(), [](Product& one) { return !one.done; }))
    fail("a program ends with products on their way");
  w.live &= ~ending, w.active &= ~ending;
  if (w.live == 0) w.products.clear();
}

static void arrive(Warp& w, const s64* o) {
  Program& p = *w.program;
  if (w.active != w.live) fail("a barrier that only some lanes of warp %u come to", w.index);
  w.waits = o[0];
  const u32 count = o[1] ? o[1] / 32 : p.warps.size();
  u32 ended = 0;
  for (Warp& one : p.warps) ended += one.live == 0;
  if (++p.arrived[o[0]] + (o[1] ? 0 : ended) < count) return;
  if (ended && !o[1]) fail("a barrier that some warps have ended before");
  p.arrived[o[0]] = 0;
  for (Warp& one : p.warps) if (one.waits == o[0]) one.waits = -1;
  if (o[0] == 0 && !o[1]) p.barriers++, p.far_count = 0;
}

// Run a warp for some instructions, or until it waits or ends; returns how many.
static s64 run(Machine& m, Warp& w, s64 most) {
  const Row* rows = m.job.rows;
  s64 done = 0;
  while (done < most && w.live && w.waits < 0) {
    const u32 at = m.row = w.place;
    const Row& row = rows[at];
    if (row.kind >= BARRIER && w.active != w.live && !gather(w)) continue;
    u32 mask = w.active;
    if (row.guard >= 0) mask &= *w.reg<u32>(row.guard) ^ (row.sense ? 0 : ~0u);
    done++, w.place++;
    const s64* o = m.job.operands + row.first;
    switch (row.kind) {
      case COMPUTE:
      case TOGETHER:
        if (mask) row.run(w, o, mask);
        break;
      case BRANCH:
        if (mask == w.active) w.place = row.target;
        else if (mask) {
          LANES(mask) w.places[i] = row.target;
          w.active &= ~mask;
        }
        break;
      case END:
        finish(w, mask);
        break;
      case BARRIER:
        if (mask) arrive(w, o);
        break;
      case TURN:
        most = done;
    }
    if (w.active != w.live) regroup(w);
  }
  return done;
}

extern "C" int ptx_launch(Job* given) {
  Job& job = *given;
  Machine m(job);
  std::vector<Program*> going, spare;
  auto clear = [&] { for (auto* list : {&going, &spare}) for (Program* one : *list) delete one; };
  try {
    const u64 all = (u64)job.grid[0] * job.grid[1] * job.grid[2], total = std::min(all, (u64)job.most);
    std::vector<u64> order(all);
    for (u64 k = 0; k < all; k++) order[k] = k;
    if (job.seed) std::shuffle(order.begin(), order.end(), m.random);
    const u64 bursts[] = {3, 40, 1000};
    const u64 burst = job.seed ? bursts[m.random() % 3] : 5000;
    u64 next = 0;
    s64 done = 0;
    while (next < total || !going.empty()) {
      while (going.size() < job.at_once && next < total) {
        if (spare.empty()) spare.push_back(new Program());
        going.push_back(spare.back());
        spare.pop_back();
        begin(m, *going.back(), order[next++]);
      }
      const u64 picked = m.random() % going.size();
      Program& p = *going[picked];
      const u32 warps = p.warps.size(), first = job.seed ? m.random() % warps : 0;
      s64 now = 0, alive = 0;
      for (u32 k = 0; k < warps; k++) {
        Warp& w = p.warps[(first + k) % warps];
        now += run(m, w, job.seed ? 1 + m.random() % (2 * burst) : burst);
        alive += w.live != 0;
      }
      if (!alive) {
        spare.push_back(&p);
        going.erase(going.begin() + picked);
      } else if (!now) fail("the warps of a program wait for each other");
      if ((done += now) > job.limit) fail("more than %lld instructions: is it a hang?", (long long)job.limit);
    }
    clear();
    return 0;
  } catch (const Fault& fault) {
    snprintf(job.error, sizeof job.error, "%s", fault.what());
    job.error_row = (s32)m.row;
    clear();
    return 1;
  }
}
