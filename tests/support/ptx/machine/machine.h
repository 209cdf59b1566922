// A launch on the machine: programs, their warps, and what they share.
#pragma once
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "registers.h"

typedef void (*Run)(Registers&, const s64*, u32);
enum Kind { COMPUTE, BRANCH, END, TURN, BARRIER, TOGETHER };  // the last: what lanes of a warp do with each other

struct Row {  // an instruction
  Run run;
  u32 first;  // the place of its operands
  s32 guard, sense;  // a predicate's place, or -1; and whether lanes take part for which it holds
  s32 kind, target;
  u32 unused;
};
struct Range { u64 begin, end; };  // of memory that the launch may touch
struct Count { u64 requests, units, least; };  // of sectors, or of cycles of shared memory, and how few would do

struct Job {
  const Row* rows;
  const s64* operands;
  const u8* constants;  // the last registers of each warp: %tid and its like, parameters, immediates
  s64 constant_bytes, register_bytes;
  const Range* ranges;
  s64 range_count;
  Count* counts;  // of each row
  u64 seed, errors;  // of schedules and garbage; and of the errors of approximate instructions
  s64 limit;  // instructions of all warps; more are taken for a hang
  s64 most;  // programs that run
  u32 grid[3], threads, shared, at_once;
  s32 late;  // when asynchronous work is done: 0 at once, 1 at the wait for it, 2 either, by chance
  s32 error_row;
  char error[400];
};

struct Fault : std::runtime_error { using std::runtime_error::runtime_error; };
template <class... Parts> [[noreturn]] static void fail(const char* format, Parts... parts) {
  char text[300];
  snprintf(text, sizeof text, format, parts...);
  throw Fault(text);
}

struct Copy {  // of one lane, from global to shared memory, done or not; size 0 ends a group
  u64 from;
  u32 to, given, size;
  bool done;
};
struct Product {  // of a warp, by wgmma; no operands end a group
  const s64* operands;
  u64 a, b;
  u32 in_registers[4][32], adds;
  bool done;
};

// Who touched a number last, between which two barriers: their count, and a warp in the last 8 bits.
struct Touch { u32 wrote, read; };
enum { MANY = 255 };  // warps, instead of one
struct Far { u64 address; u32 barriers; Touch touch; };  // a number of global memory

struct Program;
struct Machine;

struct Warp : Registers {
  Machine* machine;
  Program* program;
  u32 index, live, active, place;  // lanes that have not ended; those at `place`; the row that comes next
  u32 places[32];  // of the lanes that are elsewhere
  u32 parked;  // lanes that wait for the others of their warp where they must be together
  bool alone;  // these go on without the others, which never come
  s32 waits;  // for a barrier of this number, or -1
  std::vector<Copy> copies[32];
  std::vector<Product> products;
  bool fenced;  // before products
};

struct Program {
  u32 id[3], barriers = 0, fences;  // how many barriers all warps have passed, and fences between proxies
  std::vector<Warp> warps;
  std::vector<u8> registers, shared;
  std::vector<Touch> touched;
  std::vector<u32> unfenced;  // of each byte of shared memory: the fences before it was written
  std::vector<Far> far;  // by address, of this interval between barriers
  u32 far_count;
  u32 arrived[16];
};

struct Machine {
  Job& job;
  std::mt19937_64 random;
  const Range* last;  // that an access was within
  u32 row;
  explicit Machine(Job& job) : job(job), random(job.seed), last(job.ranges), row(0) {}
  Count& count() { return job.counts[row]; }
  bool now() { return job.late == 0 || (job.late == 2 && random() % 2); }
};

#define WARP Warp& w = static_cast<Warp&>(r)
#define LANES(mask) for (int i = 0; i < 32; i++) if ((mask) >> i & 1)

static inline u64 number(Warp& w, s64 place, s64 bytes, int lane) {
  return bytes == 8 ? w.reg<u64>(place)[lane] : bytes == 4 ? w.reg<u32>(place)[lane] : w.reg<u16>(place)[lane];
}
static inline void set_number(Warp& w, s64 place, s64 bytes, int lane, u64 value) {
  if (bytes == 8) w.reg<u64>(place)[lane] = value;
  else if (bytes == 4) w.reg<u32>(place)[lane] = (u32)value;
  else w.reg<u16>(place)[lane] = (u16)value;
}
