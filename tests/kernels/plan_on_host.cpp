// Runs plan_item of kernels/mla_paged_decode.cu on the CPU, 32 threads as the lanes of a warp, for every CTA of random batches, and
// checks that each token belongs to exactly one CTA. PLAN_SOURCE is the function's own text; reciprocal() is off by up to one
// unit in the last place, as rcp.approx may be.   Usage: plan_on_host SEED TRIALS; prints the number of faults.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

typedef unsigned int u32;
#define __device__
#define __forceinline__ inline
#define __ldg(p) (*(p))
#define max(a, b) ((a) > (b) ? (a) : (b))
#define min(a, b) ((a) < (b) ? (a) : (b))
constexpr int kPerLane = MLA_PER_LANE, kMinChunk = 32, kLanes = 32;
constexpr bool kPaged = false;

struct Params {
  const int *kv_indptr;
  int batch, num_indices, page_shift;
  float even, sure;
};
struct Segment {
  int request, first, last, part, parts, base, entry;
};

static int off_by = 0;
static thread_local int this_lane;
static int exchanged[kLanes];
static std::barrier<> meeting(kLanes);

static float reciprocal(float x) { return off_by ? std::nextafter(1.f / x, off_by > 0 ? INFINITY : 0.f) : 1.f / x; }
static int __float_as_int(float x) {
  int i;
  std::memcpy(&i, &x, 4);
  return i;
}
static int length_of(const Params &, int, int begin, int end) { return end - begin; }

template <typename Reduce> static int together(int value, Reduce reduce) {
  exchanged[this_lane] = value;
  meeting.arrive_and_wait();
  const int result = reduce();
  meeting.arrive_and_wait();
  return result;
}
static int sum_of(int lanes) {
  int sum = 0;
  for (int i = 0; i < lanes; i++) sum += exchanged[i];
  return sum;
}
static int __shfl_sync(u32, int value, int from) { return together(value, [&] { return exchanged[from]; }); }
static int __reduce_add_sync(u32, int value) { return together(value, [] { return sum_of(kLanes); }); }
static int warp_inclusive_sum(int value, int lane) { return together(value, [&] { return sum_of(lane + 1); }); }
static u32 __ballot_sync(u32, bool value) {
  return together(value, [] {
    u32 mask = 0;
    for (int i = 0; i < kLanes; i++) mask |= u32(exchanged[i] != 0) << i;
    return int(mask);
  });
}
static bool __any_sync(u32 mask, bool value) { return __ballot_sync(mask, value) != 0; }
static int __ffs(u32 x) { return __builtin_ffs(x); }

#include PLAN_SOURCE

static int length(std::mt19937 &random, int kind) {
  switch (kind) {
    case 0: return random() % 64;
    case 1: return random() % 3000;
    case 2: return 200000 / (1 + random() % 200);
    case 3: return random() % 7 ? 0 : random() % 9000;
    default: return 32 * (random() % 100);
  }
}

int main(int, char **argv) {
  std::mt19937 random(std::atoi(argv[1]));
  int faults = 0;
  for (int trial = 0; trial < std::atoi(argv[2]); trial++) {
    const int batch = 2 + random() % (kLanes * kPerLane - 1), kind = random() % 5, limit = (1 << 21) - 1;
    const int resident = 2 * batch > 132 || random() % 2 ? 264 : 132;
    std::vector<int> indptr(batch + 1, random() % 3 ? 0 : random() % 50);
    for (int b = 0; b < batch; b++) indptr[b + 1] = min(indptr[b] + length(random, kind), indptr[0] + limit);
    if (trial % 11 == 0) std::fill(indptr.begin() + 2, indptr.end(), indptr[0] + limit);  // nearly all in one request
    const int entries = indptr[batch] + (random() % 3 ? 0 : random() % 5000);
    const int ctas = max(1, min(resident, (entries + 31) / 32 + batch));
    const Params params = {indptr.data(), batch, entries, 0, 1.f / ctas, float((1 + std::pow(2., -20)) / max(ctas - batch, 1))};
    off_by = int(random() % 3) - 1;
    std::vector<Segment> segments(ctas);
    std::vector<std::thread> lanes;
    for (int lane = 0; lane < kLanes; lane++)
      lanes.emplace_back([&, lane] {
        this_lane = lane;
        for (int cta = 0; cta < ctas; cta++) {
          bool empties;
          const Segment s = plan_item(params, cta, ctas, lane, empties);
          if (lane == 0) segments[cta] = s;
        }
      });
    for (auto &lane : lanes) lane.join();
    std::vector<int> covered(batch);
    for (int cta = 0; cta < ctas; cta++) {
      const Segment &s = segments[cta];
      if (s.request < 0) continue;
      faults += s.first != covered[s.request] || s.last <= s.first || s.entry != indptr[s.request];
      faults += s.part != cta - s.base || s.part >= s.parts || s.base + s.parts > ctas;
      covered[s.request] = s.last;
    }
    for (int b = 0; b < batch; b++) faults += covered[b] != indptr[b + 1] - indptr[b];
  }
  std::printf("%d\n", faults);
}
