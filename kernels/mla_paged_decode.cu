// MLA paged decode for Hopper (sm_90a), 512 + 64 dims, V = the same compressed row:
//
//     out[b,h] = softmax(sm_scale * (q_nope[b,h] . K^T + q_pe[b,h] . R^T)) . K,    K = ckv[rows of b], R = kpe[rows of b]
//     lse[b,h] = log2 sum exp(score)
//
// One cooperative launch and no plan: the host knows only the batch size and an upper bound on the tokens. A CTA
//
//     1 plan      reads kv_indptr and finds its own work: a token range of one request (or, for large batches, of several)
//     2 gather    streams the K/R rows of that range through a ring of shared-memory stages, 32 tokens each
//     3 attend    S = Q K^T, online softmax, O += P K; every warp owns 64 of the 512 dims for both products
//     4 publish   writes the result of a whole request, or its part of a split request to scratch
//     5 merge     combines its share of the heads (or of one head) over all parts of a split request
//
// Scratch protocol. A scratch word that holds kEmpty has not been written. Writers store words that never equal kEmpty,
// readers poll the data itself (a part's lse before its values), then put kEmpty back, so the scratch is all kEmpty between
// launches. No flag, counter, epoch or fence is needed, and a CUDA graph may replay the launch. Every part is written before
// its CTA starts to wait, and all CTAs are resident (cooperative launch), so the wait ends.
//
// A stage holds 32 tokens (36 KiB), in slabs so that a warp loads, multiplies and re-loads its own slab without a CTA barrier:
//
//     ckv   8 slabs (one a warp)     [32 tokens][64 dims]  128-byte rows, 16-byte chunk c of row t at c ^ (t & 7)
//     kpe   4 slabs (warps 0..3)     [32 tokens][16 dims]   32-byte rows, 16-byte chunk c of row t at c ^ (t >> 2 & 1)
//
// Compile-time choices (kernels/mla_paged_decode_cuda.py): MLA_FP16, MLA_STAGES, MLA_CTAS_PER_SM, MLA_PAGED, MLA_FLAT, MLA_PER_LANE;
// and the host's figures to check: MLA_SHARED_BYTES, MLA_SLOT_BYTES, MLA_PARAMS_BYTES.

#define INFINITY __int_as_float(0x7f800000)

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int kStages = MLA_STAGES;     // ring depth
constexpr bool kPaged = MLA_PAGED;      // page size > 1 or kv_lens given: a token's row is looked up through its page
constexpr bool kFlat = MLA_FLAT;        // equal token counts a CTA instead of one (request, piece) a CTA
constexpr int kPerLane = MLA_PER_LANE;  // requests a lane plans, batch <= 32 * kPerLane; 0: a batch of one, or kFlat

constexpr int kHeads = 16;  // heads a CTA computes: the M of mma.m16n8k16
constexpr int kDimCkv = 512, kDimPe = 64;
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kTile = 32;                    // tokens a stage
constexpr int kSlabDims = kDimCkv / kWarps;  // ckv dims a warp owns
constexpr int kPeWarps = 4, kPeDims = kDimPe / kPeWarps;
constexpr int kCkvRow = 2 * kSlabDims, kPeRow = 2 * kPeDims;  // bytes of a slab's row
constexpr int kCkvSlab = kTile * kCkvRow, kPeSlab = kTile * kPeRow;
constexpr int kPeOffset = kWarps * kCkvSlab;
constexpr int kStageBytes = kPeOffset + kPeWarps * kPeSlab;
constexpr int kOutPitch =
    kCkvRow + 16;  // bytes; rows of a warp's results on distinct banks, without a swizzle to compute
constexpr int kScorePitch = kTile + 8;  // floats; 8 more than a row keeps the fragment stores free of bank conflicts
constexpr int kScoreSlab = kHeads * kScorePitch * 4;  // bytes of a warp's scores; before the first, its slice of q:
constexpr int kQueryPe = kHeads * kCkvRow;            // [16 heads][64 dims], then from here [16 heads][16 dims]
constexpr int kProbPitch = 2 * kTile + 16;  // bytes; ldmatrix rows on distinct banks
constexpr int kIndexRing = 1024;            // page indices held in shared memory; refilled in halves
constexpr int kMinChunk = 32;               // fewer tokens a CTA than one tile only adds parts to merge

constexpr int kUnits = kDimCkv / 8;               // 16-byte units of a head's output row
constexpr int kMaxCopies = 8;                     // copies of a part's lse, one for each CTA that may read it
constexpr int kLseOffset = kHeads * kDimCkv * 2;  // a slot: [heads][512] results, then [copies][heads] lse
constexpr int kSlotBytes = kLseOffset + kHeads * kMaxCopies * 4;
constexpr u32 kEmpty = 0xffffffffu;  // neither two bf16/fp16 results nor an fp32 result: conversions give 0x7fff as NaN

constexpr int kMergeBytes = kThreads * 10 * 4;  // a Partial a thread
constexpr int kScoreBytes = kWarps * kScoreSlab;
constexpr int kSharedScores = kStages * kStageBytes;
constexpr int kSharedProbs = kSharedScores + kScoreBytes;
constexpr int kSharedStats = kSharedProbs + kHeads * kProbPitch;  // rescale[16]
constexpr int kSharedPlan = kSharedStats + kHeads * 4;  // flat plan: sums of the warps, the split requests, the plan
constexpr int kSharedSplit = kSharedPlan + 64, kSharedFlat = kSharedSplit + 64;
constexpr int kSharedIndices = kSharedFlat + 64;
constexpr int kSharedBytes = kSharedIndices + kIndexRing * 4;

static_assert(kStages >= 2 && kQueryPe + kHeads * kPeRow <= kScoreSlab && kScoreSlab % 128 == 0,
              "a warp's slice of q waits where its scores will be");
static_assert(kMergeBytes <= kScoreBytes, "the merge reuses the score buffer");

struct Params {
  const u8 *q_nope, *q_pe, *ckv, *kpe;
  const int *kv_indptr, *kv_indices, *kv_lens;
  u16 *out;
  float *lse;
  u8 *scratch;
  u32 q_nope_stride_b, q_nope_stride_h, q_pe_stride_b, q_pe_stride_h;  // bytes; one 32 x 32 -> 64 bit multiply each
  u32 ckv_stride_page, ckv_stride_slot, kpe_stride_page, kpe_stride_slot;
  float scale;       // sm_scale * log2(e)
  float even, sure;  // chunk of an even split and chunk that always fits the grid, both per token of the batch
  int batch;
  u32 heads;
  int group_shift, num_indices, page_shift, single_chunk;
};

static_assert(kSharedBytes == MLA_SHARED_BYTES && kSlotBytes == MLA_SLOT_BYTES && sizeof(Params) == MLA_PARAMS_BYTES,
              "kernels/mla_paged_decode_cuda.py has other figures");

// ---- PTX, each instruction wrapped once ------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes of a page's row; zeros for a negative page, and the source is not touched. KV rows are read once: evict_first keeps
// q, indices and scratch in L2 (B=64 geomean 1.31x -> 1.40x of FlashInfer when it was introduced).
__device__ __forceinline__ void copy16_of_page(u32 dst, const void *src, int page, u64 policy) {
  asm volatile(
      "{.reg .pred p; setp.lt.s32 p, %2, 0; cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, p, %3;}" ::"r"(
          dst),
      "l"(src), "r"(page), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void copy16(u32 dst, const void *src, bool skip) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, p;}" ::"r"(dst),
               "l"(src), "r"((u32)skip)
               : "memory");
}
__device__ __forceinline__ void copy4(u32 dst, const void *src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ u64 policy_evict_first() {
  u64 p;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
  return p;
}
__device__ __forceinline__ void prefetch_l2(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

__device__ __forceinline__ void load_matrix(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrix_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

#if MLA_FP16
#define MLA_TYPE "f16"
constexpr u32 kOnePair = 0x3c003c00u;
#else
#define MLA_TYPE "bf16"
constexpr u32 kOnePair = 0x3f803f80u;
#endif

// c[16 x 8] += a[16 x 16] b[16 x 8]
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MLA_TYPE "." MLA_TYPE
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 r;
  asm("cvt.rn." MLA_TYPE "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ void unpack(u32 pair, float &low, float &high) {
#if MLA_FP16
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
      : "=f"(low), "=f"(high)
      : "r"(pair));
#else
  low = __uint_as_float(pair << 16);
  high = __uint_as_float(pair & 0xffff0000u);
#endif
}
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 128-bit accesses are single-copy atomic, so one word tells whether all four have arrived. Predicated by hand: the compiler
// turns a condition around volatile assembly into branches, four times the code, and a launch this short feels every cold
// instruction fetch (66 KB of code down to 39 KB: 1.45x -> 1.58x of FlashInfer).
__device__ __forceinline__ void load_relaxed_if(bool on, uint4 &v, const u8 *p) {
  u64 low = (u64)v.y << 32 | v.x, high = (u64)v.w << 32 | v.z;
  asm volatile(
      "{.reg .pred p; .reg .b128 q; setp.ne.u32 p, %3, 0; mov.b128 q, {%0, %1}; @p ld.relaxed.gpu.global.b128 q, [%2]; mov.b128 {%0, %1}, q;}"
      : "+l"(low), "+l"(high)
      : "l"(p), "r"((u32)on)
      : "memory");
  v = make_uint4((u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32));
}
__device__ __forceinline__ void load_relaxed_if(bool on, u32 &v, const u8 *p) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld.relaxed.gpu.global.u32 %0, [%1];}"
               : "+r"(v)
               : "l"(p), "r"((u32)on)
               : "memory");
}
__device__ __forceinline__ void store_relaxed_if(bool on, u8 *p, uint4 v) {
  const u64 low = (u64)v.y << 32 | v.x, high = (u64)v.w << 32 | v.z;
  asm volatile(
      "{.reg .pred p; .reg .b128 q; setp.ne.u32 p, %3, 0; mov.b128 q, {%1, %2}; @p st.relaxed.gpu.global.b128 [%0], q;}" ::
          "l"(p),
      "l"(low), "l"(high), "r"((u32)on)
      : "memory");
}
__device__ __forceinline__ void store_relaxed(u32 *p, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// floor(n / d) for 0 <= n < 2^30, d > 0 and a result below 2^21: the float quotient is then off by one at most.
__device__ __forceinline__ int floor_div(int n, int d) {
  const int q = (int)((float)n * reciprocal((float)d)), rest = n - q * d;
  return q + (rest >= d) - (rest < 0);
}
__device__ __forceinline__ int ceil_div(int n, int d) { return n > 0 ? floor_div(n - 1, d) + 1 : 0; }
__device__ __forceinline__ int warp_inclusive_sum(int x, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    int y = __shfl_up_sync(~0u, x, d);
    x += lane >= d ? y : 0;
  }
  return x;
}

// ---- 1 plan ----------------------------------------------------------------------------------------------------------

// Tokens [first, last) of a request that is split into `parts`; this one is number `part`. The request's entries of kv_indices
// start at `entry`; `base` is the CTA that holds part 0.
struct Segment {
  int request, first, last, part, parts, base, entry;
};

// In a flat plan a CTA may end one split request and begin another: two slots a CTA, the odd one for a part that begins a
// request.
__device__ __forceinline__ int slot_of(const Segment &s, int part) {
  return kFlat ? 2 * (s.base + part) + (part == 0) : s.base + part;
}

// Tokens of a request; never more than its pages hold and never negative, whatever the tensors say.
__device__ __forceinline__ int length_of(const Params &p, int request, int begin, int end) {
  const int room = max(end - begin, 0) << (kPaged ? p.page_shift : 0);
  return kPaged && p.kv_lens ? max(min(room, __ldg(p.kv_lens + request)), 0) : room;
}

// A batch of one needs no search; `parts` is left to the caller, whose page loads need not wait for a division.
__device__ __forceinline__ Segment plan_single(int length, int entry, int chunk, int cta) {
  const int first = cta * chunk;
  return {first < length ? 0 : -1, first, min(first + chunk, length), cta, 0, 0, entry};
}

// ceil(n / d) for 0 <= n < 2^21 by rounding: exact, since (n + d - 1/2) / d stays 1 / 2d away from whole numbers.
__device__ __forceinline__ int ceil_div_small(float n, float d, float inverse_d) {
  return __float_as_int(fmaf(n + (d - 0.5f), inverse_d, 8388608.f - 0.5f)) - 0x4b000000;
}

#if MLA_PER_LANE
// One (request, piece) a CTA, for batches below 2^21 tokens. Every warp tries 8 chunk sizes between what an even split would
// need and what always fits; the smallest whose pieces fit the grid wins, and a request's pieces are made equally long. Each
// request wastes about half a piece of the grid, so the sizes tried are densest there: the longest piece is 0.3% longer than it
// need be, 0.9% with even steps (B=64 0.6% faster). `empties`: some request is empty.
__device__ __forceinline__ Segment plan_item(const Params &p, int cta, int ctas, int lane, bool &empties) {
  constexpr int kCandidates = 8;
  int begin[kPerLane + 1], length[kPerLane], pieces[kPerLane];
  const int entries = __ldg(p.kv_indptr + p.batch) - __ldg(p.kv_indptr);
#pragma unroll
  for (int i = 0; i <= kPerLane; i++) begin[i] = __ldg(p.kv_indptr + min(lane * kPerLane + i, p.batch));
  // The chunks for the host's bound are ready before kv_indptr is; a padded table needs others.
  float chunks[kCandidates], inverses[kCandidates];
  const auto chunks_for = [&](int entries) {
    const float tokens = entries << (kPaged ? p.page_shift : 0), low = fmaxf(kMinChunk, truncf(tokens * p.even) + 1);
    const float range = fmaxf(low, truncf(tokens * p.sure) + 1) - low;
    constexpr float kAt[kCandidates] = {0.25f, 0.33f, 0.38f, 0.44f, 0.53f, 0.64f, 0.8f, 1};
#pragma unroll
    for (int k = 0; k < kCandidates; k++) chunks[k] = low + ceilf(kAt[k] * range), inverses[k] = reciprocal(chunks[k]);
  };
  chunks_for(p.num_indices);
  // Zero, but made of them: added to kv_indptr, it keeps the compiler from computing them after the wait for it.
  int zero = 0;
#pragma unroll
  for (int k = 0; k < kCandidates; k++) zero |= __float_as_int(inverses[k]) >> 31;
#pragma unroll
  for (int i = 0; i <= kPerLane; i++) begin[i] += zero;
  if (entries != p.num_indices) chunks_for(entries);
  bool none = false;
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    const int r = lane * kPerLane + i;
    length[i] = r < p.batch ? length_of(p, r, begin[i], begin[i + 1]) : 0;
    none |= length[i] == 0 && r < p.batch;
  }
  empties = __any_sync(~0u, none);
  float chunk = chunks[kCandidates - 1], inverse = inverses[kCandidates - 1];
#pragma unroll
  for (int k = kCandidates - 2; k >= 0; k--) {
    int n = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; i++) n += ceil_div_small(length[i], chunks[k], inverses[k]);
    if (__reduce_add_sync(~0u, n) <= ctas) chunk = chunks[k], inverse = inverses[k];
  }
  int sum = 0, even[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    sum += pieces[i] = ceil_div_small(length[i], chunk, inverse);
    even[i] = ceil_div_small(length[i], pieces[i], reciprocal(pieces[i]));
  }
  const int up_to = warp_inclusive_sum(sum, lane);
  int base = up_to - sum, mine_base = base, mine_pieces = pieces[0], mine_begin = begin[0], mine_length = length[0],
      mine_even = even[0], mine_i = 0;
#pragma unroll
  for (int i = 1; i < kPerLane; i++) {
    base += pieces[i - 1];
    if (cta >= base)
      mine_base = base, mine_pieces = pieces[i], mine_begin = begin[i], mine_length = length[i], mine_even = even[i],
      mine_i = i;
  }
  const u32 owner = __ballot_sync(~0u, cta >= up_to - sum && cta < up_to);
  if (owner == 0) return {-1};
  const int from = __ffs(owner) - 1;
  Segment s;
  s.request = from * kPerLane + __shfl_sync(~0u, mine_i, from);
  s.parts = __shfl_sync(~0u, mine_pieces, from);
  s.base = __shfl_sync(~0u, mine_base, from);
  s.entry = __shfl_sync(~0u, mine_begin, from);
  const int tokens = __shfl_sync(~0u, mine_length, from), piece = __shfl_sync(~0u, mine_even, from);
  s.part = cta - s.base;
  s.first = s.part * piece;
  s.last = min(s.first + piece, tokens);
  return s;
}
#endif

// Equal token counts a CTA, for batches that leave no CTAs to split with. `begin` of a request is its place in the batch's
// tokens.
struct FlatPlan {
  int chunk, first, last;  // this CTA's tokens of the batch
  int request, begin;      // the request that `first` lies in
};

__device__ __forceinline__ FlatPlan plan_flat(const Params &p, u8 *shared, int cta, int ctas, int warp, int lane) {
  int *sums = (int *)(shared + kSharedPlan), *found = sums + kWarps;
  const int each = (p.batch + kThreads - 1) / kThreads, from = min((32 * warp + lane) * each, p.batch),
            to = min(from + each, p.batch);
  int mine = 0;
  for (int r = from; r < to; r++) mine += length_of(p, r, __ldg(p.kv_indptr + r), __ldg(p.kv_indptr + r + 1));
  int up_to = warp_inclusive_sum(mine, lane);
  if (lane == 31) sums[warp] = up_to;
  __syncthreads();
  int total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; w++) {
    up_to += w < warp ? sums[w] : 0;
    total += sums[w];
  }
  FlatPlan plan;
  plan.chunk = max(kMinChunk, ceil_div(total, ctas));
  plan.first = min((i64)cta * plan.chunk, (i64)total);
  plan.last = min((i64)(cta + 1) * plan.chunk, (i64)total);
  if (plan.first >= up_to - mine && plan.first < up_to) {
    int begin = up_to - mine, r = from;
    for (int next; r < to; r++, begin = next) {
      next = begin + length_of(p, r, __ldg(p.kv_indptr + r), __ldg(p.kv_indptr + r + 1));
      if (plan.first < next) break;
    }
    found[0] = r;
    found[1] = begin;
  }
  __syncthreads();
  plan.request = found[0];
  plan.begin = found[1];
  return plan;
}

// The plan's next segment; advances the plan. Empty requests are stepped over.
__device__ __forceinline__ Segment next_segment(const Params &p, FlatPlan &plan, int cta) {
  int entry = __ldg(p.kv_indptr + plan.request), length;
  for (;; plan.request++) {
    const int next = __ldg(p.kv_indptr + plan.request + 1);
    length = length_of(p, plan.request, entry, next);
    if (length > 0) break;
    entry = next;
  }
  const int base = floor_div(plan.begin, plan.chunk), parts = floor_div(plan.begin + length - 1, plan.chunk) - base + 1;
  const Segment s = {
      plan.request, plan.first - plan.begin, min(plan.last - plan.begin, length), cta - base, parts, base, entry};
  plan.begin += length;
  plan.first = plan.begin;
  plan.request++;
  return s;
}

// ---- 2 gather --------------------------------------------------------------------------------------------------------

// Page of the segment's token number `i` (from its first), -1 past its end.
__device__ __forceinline__ int page_of(const Params &p, const Segment &s, int i) {
  const int token = s.first + i;
  return token < s.last ? __ldg(p.kv_indices + (u32)(s.entry + (kPaged ? token >> p.page_shift : token))) : -1;
}

// Where a lane reads its 16 bytes of a row of page 0 and where they go in stage 0.
struct GatherLane {
  const u8 *ckv, *kpe;
  u32 ckv_to, kpe_to;
};

__device__ __forceinline__ GatherLane gather_lane(const Params &p, u32 stages, int warp, int lane) {
  const u32 r = lane >> 3, t = lane >> 1;
  GatherLane g = {p.ckv + warp * kCkvRow + (lane & 7) * 16, p.kpe + warp * kPeRow + (lane & 1) * 16,
                  stages + warp * kCkvSlab + r * kCkvRow + ((lane & 7 ^ r) << 4),
                  stages + kPeOffset + warp * kPeSlab + t * kPeRow + ((lane & 1 ^ t >> 2 & 1) << 4)};
  // Kept in registers as they are, they make an address one instruction; taken apart by the compiler, three. `stages` belongs
  // in the sum: where it stood apart, in a uniform register, NVRTC 13.0 assembled an illegal instruction.
  asm volatile("" : "+l"(g.ckv), "+l"(g.kpe), "+r"(g.ckv_to), "+r"(g.kpe_to));
  return g;
}

// Starts the copy of this warp's slabs of 32 tokens; lane t holds the page of token t, or -1 for zeros (0 x NaN must not reach
// a sum).
__device__ __forceinline__ void gather_tile(const Params &p, const GatherLane &g, u32 stage_offset, int page,
                                            int first_token, int warp, int lane, u64 policy) {
  const u32 mask = kPaged ? (1u << p.page_shift) - 1 : 0;
  const u32 even = g.ckv_to + stage_offset, odd = even ^ 64;  // rows 8i + r and 8i + 4 + r
#pragma unroll
  for (int i = 0; i < kTile / 4; i++) {
    const int t = 4 * i + (lane >> 3), row = __shfl_sync(~0u, page, t);
    const u8 *src = g.ckv + (u64)(u32)row * p.ckv_stride_page;
    if constexpr (kPaged) src += (u64)(first_token + t & mask) * p.ckv_stride_slot;
    copy16_of_page((i & 1 ? odd : even) + 4 * i * kCkvRow, src, row, policy);
  }
  if (warp < kPeWarps) {
#pragma unroll
    for (int i = 0; i < kTile / 16; i++) {
      const int t = 16 * i + (lane >> 1), row = __shfl_sync(~0u, page, t);
      const u8 *src = g.kpe + (u64)(u32)row * p.kpe_stride_page;
      if constexpr (kPaged) src += (u64)(first_token + t & mask) * p.kpe_stride_slot;
      copy16_of_page(g.kpe_to + stage_offset + 16 * i * kPeRow, src, row, policy);
    }
  }
}

// Starts the copy of this warp's slice of q to `query`, swizzled as a stage's slabs are, rows past the last head as zeros.
__device__ __forceinline__ void gather_query(const Params &p, u32 query, int request, int head, int warp, int lane) {
  const u32 r = lane >> 3, t = lane >> 1;
  const u8 *q = p.q_nope + (u64)request * p.q_nope_stride_b + warp * kCkvRow + (lane & 7) * 16;
  asm volatile("" : "+l"(q));  // as in gather_lane
  const u32 even = query + r * kCkvRow + ((lane & 7 ^ r) << 4), odd = even ^ 64;
#pragma unroll
  for (int i = 0; i < kHeads / 4; i++) {
    const u32 h = head + 4 * i + r;
    copy16((i & 1 ? odd : even) + 4 * i * kCkvRow, q + (u64)h * p.q_nope_stride_h, h >= p.heads);
  }
  if (warp < kPeWarps) {
    const u32 h = head + t;
    const u8 *pe = p.q_pe + (u64)request * p.q_pe_stride_b + warp * kPeRow + (lane & 1) * 16;
    copy16(query + kQueryPe + t * kPeRow + ((lane & 1 ^ t >> 2 & 1) << 4), pe + (u64)h * p.q_pe_stride_h, h >= p.heads);
  }
}

// ---- 3 attend, 4 publish ---------------------------------------------------------------------------------------------

// How many CTAs share a head in the merge of a request of `parts` parts: a power of two, so that slices are whole units.
__device__ __forceinline__ int readers_of_head(int parts) {
  return min(1 << (31 - __clz((u32)parts / kHeads | 1)), kMaxCopies);
}

// Bytes from the start of the scratch, which is far below 4 GiB: two slots a resident CTA.
__device__ __forceinline__ u32 slot_offset(const Params &p, int slot, int group) {
  return ((slot << p.group_shift) + group) * kSlotBytes;
}

// Attends to one segment for heads [head, head + 16) and writes it out: to `out` when the request is whole, else to scratch.
// `page` holds the lane's page of the first kStages tiles.
__device__ __forceinline__ void attend(const Params &p, u8 *shared, const Segment &s, int (&page)[kStages],
                                       const GatherLane &gather, int group, int warp, int lane) {
  float *scores = (float *)(shared + kSharedScores), *rescale = (float *)(shared + kSharedStats);
  int *indices = (int *)(shared + kSharedIndices);
  const u32 stages = shared_address(shared), probs = shared_address(shared + kSharedProbs);
  const u64 policy = policy_evict_first();
  const int head = group * kHeads, count = s.last - s.first, tiles = (count + kTile - 1) / kTile;

  // Page indices past the first stages go to shared memory at once: an index load one tile ahead would put a DRAM round
  // trip into every tile.
  const auto fetch_indices = [&](int from, int to) {
#pragma unroll 1
    for (u32 i = from + 32 * warp + lane; i < min(to, count); i += kThreads)
      copy4(shared_address(indices + i % kIndexRing),
            p.kv_indices + (u32)(s.entry + (kPaged ? (s.first + i) >> p.page_shift : s.first + i)));
  };
  const u32 query_at = stages + kSharedScores + warp * kScoreSlab;

  u32 query[kSlabDims / 16 + 1][4];
  float out[kSlabDims / 8][4] = {}, row_sum[4] = {};
  float running_max = -INFINITY, running_sum = 0.f;  // of this thread's tokens of softmax_head
  const int softmax_head = 2 * warp + (lane >> 4);
  const int r8 = lane & 7, quad = lane >> 3, row = lane >> 2;
  // Where this lane's rows of stage 0 are for ldmatrix; units 2d and 2d + 1 of a row lie at the first ones' address ^ 32 d.
  u32 keys_at = stages + warp * kCkvSlab + ((quad >> 1) * 8 + r8) * kCkvRow + ((quad & 1 ^ r8) << 4),
      values_at = stages + warp * kCkvSlab + ((quad & 1) * 8 + r8) * kCkvRow + ((quad >> 1 ^ r8) << 4),
      pe_at = stages + kPeOffset + warp * kPeSlab + ((quad >> 1) * 8 + r8) * kPeRow + ((quad & 1 ^ r8 >> 2) << 4);
  asm volatile("" : "+r"(keys_at), "+r"(values_at), "+r"(pe_at));
  int stage = 0, fill = 0, next_page = page[0];
#pragma unroll 1
  for (int k = 1 - kStages; k < tiles; k++) {  // rounds before 0 only fill the ring
    const u32 stage_offset = stage * kStageBytes;
    if (k >= 0) {
      copy_wait<kStages - 2>();
      __syncwarp();
      if (k == 0) {  // 16-byte copies and ldmatrix: loading fragments from global memory took 1,000 cycles more
        const u32 r = lane & 15, c = lane >> 4;
        const u32 q = query_at + r * kCkvRow + ((c ^ r & 7) << 4);
#pragma unroll
        for (int d = 0; d < kSlabDims / 16; d++) load_matrix(query[d], q ^ d << 5);
        if (warp < kPeWarps)
          load_matrix(query[kSlabDims / 16], query_at + kQueryPe + r * kPeRow + ((c ^ (r >> 2 & 1)) << 4));
        __syncwarp();
      }

      // S, this warp's 64 (+16) of the 576 dims: [16 heads][32 tokens] as four 16 x 8 fragments.
      float part[kTile / 8][4] = {};
#pragma unroll
      for (int d = 0; d < kSlabDims / 16; d++) {
#pragma unroll
        for (int n = 0; n < kTile / 16; n++) {
          u32 b[4];
          load_matrix(b, (keys_at + stage_offset ^ d << 5) + 16 * n * kCkvRow);
          mma(part[2 * n], query[d], b[0], b[1]);
          mma(part[2 * n + 1], query[d], b[2], b[3]);
        }
      }
      if (warp < kPeWarps) {
#pragma unroll
        for (int n = 0; n < kTile / 16; n++) {
          u32 b[4];
          load_matrix(b, pe_at + stage_offset + 16 * n * kPeRow);
          mma(part[2 * n], query[kSlabDims / 16], b[0], b[1]);
          mma(part[2 * n + 1], query[kSlabDims / 16], b[2], b[3]);
        }
      }
      float *mine = scores + (warp * kHeads + row) * kScorePitch + (lane & 3) * 2;
#pragma unroll
      for (int n = 0; n < kTile / 8; n++) {
        *(float2 *)(mine + 8 * n) = make_float2(part[n][0], part[n][1]);
        *(float2 *)(mine + 8 * kScorePitch + 8 * n) = make_float2(part[n][2], part[n][3]);
      }
      __syncthreads();
    }

    // Here and not at once when a stage falls free: copies that wait for room in the memory system would hold up the ldmatrix
    // of S behind them (with the addresses above, B=64 2.3% and B=16 1.3% faster). After the softmax is 1.4% slower.
    const int ahead = k + kStages - 1;
    if (ahead < tiles)
      gather_tile(p, gather, fill * kStageBytes, next_page, s.first + ahead * kTile, warp, lane, policy);
    if (ahead == 0) gather_query(p, query_at, s.request, head, warp, lane);
    if (ahead == 0 || (k > 0 && k % (kIndexRing / kTile / 2) == 0))
      fetch_indices(k < 0 ? kStages * kTile : k * kTile + kIndexRing / 2, max(k, 0) * kTile + kIndexRing);
    copy_commit();
    fill = fill + 1 == kStages ? 0 : fill + 1;
    if (k < 0) {
      next_page = page[1];
#pragma unroll
      for (int i = 1; i + 1 < kStages; i++) page[i] = page[i + 1];
      continue;
    }

    // Softmax: a thread owns two tokens of one head, sums the eight partial scores and scales in fp32 (a scaled bf16 q fails
    // the gate).
    {
      const int h = softmax_head, t = 2 * (lane & 15), i = k * kTile + t;
      float2 v[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; w++) v[w] = *(const float2 *)(scores + (w * kHeads + h) * kScorePitch + t);
      float x = ((v[0].x + v[1].x) + (v[2].x + v[3].x)) + ((v[4].x + v[5].x) + (v[6].x + v[7].x));
      float y = ((v[0].y + v[1].y) + (v[2].y + v[3].y)) + ((v[4].y + v[5].y) + (v[6].y + v[7].y));
      x = i < count ? x * p.scale : -INFINITY;
      y = i + 1 < count ? y * p.scale : -INFINITY;
      float tile_max = fmaxf(x, y);
#pragma unroll
      for (int d = 8; d; d >>= 1) tile_max = fmaxf(tile_max, __shfl_xor_sync(~0u, tile_max, d));
      const float new_max = fmaxf(running_max, tile_max), origin = new_max == -INFINITY ? 0.f : new_max;
      const float p_x = exp2_approx(x - origin), p_y = exp2_approx(y - origin), old = exp2_approx(running_max - origin);
      *(u32 *)(shared + kSharedProbs + h * kProbPitch + 2 * t) = pack(p_x, p_y);
      if ((lane & 15) == 0) rescale[h] = old;
      running_sum = running_sum * old + (p_x + p_y);
      running_max = new_max;
      const int next = (k + kStages) * kTile + lane;
      next_page = next < count ? indices[(u32)next % kIndexRing] : -1;
    }
    __syncthreads();

    // O, this warp's 64 dims: the same slab again, transposed. A product with ones sums the probabilities as rounded.
    u32 prob[kTile / 16][4];
#pragma unroll
    for (int n = 0; n < kTile / 16; n++)
      load_matrix(prob[n], probs + (lane & 15) * kProbPitch + (lane >> 4) * 16 + 32 * n);
    const float low = rescale[row], high = rescale[row + 8];
#pragma unroll
    for (int d = 0; d < kSlabDims / 8; d++) {
      out[d][0] *= low, out[d][1] *= low;
      out[d][2] *= high, out[d][3] *= high;
    }
    row_sum[0] *= low, row_sum[2] *= high;
#pragma unroll
    for (int n = 0; n < kTile / 16; n++) {
      mma(row_sum, prob[n], kOnePair, kOnePair);
#pragma unroll
      for (int d = 0; d < kSlabDims / 16; d++) {
        u32 b[4];
        load_matrix_transposed(b, (values_at + stage_offset ^ d << 5) + 16 * n * kCkvRow);
        mma(out[2 * d], prob[n], b[0], b[1]);
        mma(out[2 * d + 1], prob[n], b[2], b[3]);
      }
    }
    __syncwarp();
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  // Publish: fragments to rows through this warp's own slab of stage 0, then 16-byte stores.
  copy_wait<0>();
  u8 *slab = shared + warp * kCkvSlab;
  const bool whole = s.parts == 1;
  // A part whose scores are all -inf has weight 0, and 0 x NaN would reach the merge; a whole request of such scores is NaN.
  const float inverse_low = !whole && row_sum[0] == 0.f ? 0.f : reciprocal(row_sum[0]);
  const float inverse_high = !whole && row_sum[2] == 0.f ? 0.f : reciprocal(row_sum[2]);
#pragma unroll
  for (int d = 0; d < kSlabDims / 8; d++) {
    u8 *at = slab + row * kOutPitch + (lane & 3) * 4 + 16 * d;
    *(u32 *)at = pack(out[d][0] * inverse_low, out[d][1] * inverse_low);
    *(u32 *)(at + 8 * kOutPitch) = pack(out[d][2] * inverse_high, out[d][3] * inverse_high);
  }
  __syncwarp();
  const i64 first_head = (i64)s.request * p.heads + head;
  u8 *slot = p.scratch + slot_offset(p, slot_of(s, s.part), group);
  u8 *target = (whole ? (u8 *)(p.out + first_head * kDimCkv) : slot) +
               (u32)((lane >> 3) * kDimCkv * 2 + warp * kCkvRow + (lane & 7) * 16);
#pragma unroll
  for (int i = 0; i < kHeads / 4; i++) {
    const int r = 4 * i + (lane >> 3);
    const uint4 v = *(const uint4 *)(slab + r * kOutPitch + (lane & 7) * 16);
    store_relaxed_if(!whole || head + r < p.heads, target + 4 * i * kDimCkv * 2, v);
  }
  // lse from the probabilities as they were before rounding; `out` is divided by the sum of those that it was made of.
#pragma unroll
  for (int d = 8; d; d >>= 1) running_sum += __shfl_xor_sync(~0u, running_sum, d);
  const float lse = (running_max == -INFINITY ? 0.f : running_max) + log2_approx(running_sum);
  const int copy = lane & 15;
  u32 *lse_to = whole ? (u32 *)(p.lse + first_head) : (u32 *)(slot + kLseOffset) + copy * kHeads;
  if (whole ? copy == 0 && head + softmax_head < p.heads : copy < readers_of_head(s.parts))
    store_relaxed(lse_to + softmax_head, __float_as_uint(lse));
}

// ---- 5 merge ---------------------------------------------------------------------------------------------------------

constexpr bool kLseFirst = kFlat || kPerLane > 0;
constexpr int kBatch = kFlat ? 4 : 8;  // parts a thread loads at once; the flat plan's state leaves registers for four

struct Partial {
  float max, sum, value[8];
};

// Where a slice lives in the slots: `unit` and the lse word of its head, parts member, member + groups, ... of `parts`.
struct Slice {
  int parts, member, groups;
  u32 unit, lse_at;
};

// Adds up to kParts parts from `part` on to `total`, when they have arrived, and empties their units. A value that is looked at
// before it is written comes from DRAM, 16 KiB a part, while others still stream their rows: values are asked for when the lse
// words are there (B=64 7%, B=16 4% faster). A batch of one has DRAM to spare and asks for both at once (the round trip saved is
// 2% there), repeating the arithmetic so that its instructions are at hand.
template <int kParts>
__device__ __forceinline__ void merge_parts(const Params &p, const Segment &s, const Slice &a, int part, int group,
                                            Partial &total) {
  const Partial before = total;
  const u32 first = slot_offset(p, slot_of(s, part), group), second = slot_offset(p, slot_of(s, part + a.groups), group);
  const u32 step = (a.groups * (kFlat ? 2 : 1) << p.group_shift) * kSlotBytes;
  const auto slot = [&](int i) { return p.scratch + (i == 0 ? first : second + (i - 1) * step); };
  const auto present = [&](int i) { return i == 0 || part + i * a.groups < a.parts; };
  bool waiting;
  do {
    uint4 v[kParts];
    u32 lse[kParts];
    const auto load_lse = [&] {
#pragma unroll
      for (int i = 0; i < kParts; i++) {
        lse[i] = 0xff800000u;  // -inf: no weight
        load_relaxed_if(present(i), lse[i], slot(i) + a.lse_at);
      }
    };
    if constexpr (kLseFirst) {
      load_lse();
      waiting = false;
#pragma unroll
      for (int i = 0; i < kParts; i++) waiting |= lse[i] == kEmpty;
      if (waiting) continue;
    }
#pragma unroll
    for (int i = 0; i < kParts; i++) {
      v[i] = make_uint4(0, 0, 0, 0);
      load_relaxed_if(present(i), v[i], slot(i) + a.unit * 16);
    }
    if constexpr (!kLseFirst) load_lse();  // last: what is used first would have the compiler wait for it between the loads
    waiting = false;
    total = before;
#pragma unroll
    for (int i = 0; i < kParts; i++) {
      waiting |= v[i].x == kEmpty || (!kLseFirst && lse[i] == kEmpty);
      total.max = fmaxf(total.max, __uint_as_float(lse[i]));
    }
    const float origin = total.max == -INFINITY ? 0.f : total.max, old = exp2_approx(before.max - origin);
    total.sum *= old;
#pragma unroll
    for (int e = 0; e < 8; e++) total.value[e] *= old;
#pragma unroll
    for (int i = 0; i < kParts; i++) {
      const float weight = exp2_approx(__uint_as_float(lse[i]) - origin);
      float x[8];
      unpack(v[i].x, x[0], x[1]), unpack(v[i].y, x[2], x[3]), unpack(v[i].z, x[4], x[5]), unpack(v[i].w, x[6], x[7]);
      total.sum += weight;
#pragma unroll
      for (int e = 0; e < 8; e++) total.value[e] += weight * x[e];
    }
  } while (waiting);
#pragma unroll
  for (int i = 0; i < kParts; i++)
    store_relaxed_if(present(i), slot(i) + a.unit * 16, make_uint4(kEmpty, kEmpty, kEmpty, kEmpty));
}

// The lse words of a slice back to kEmpty, once all of the CTA's threads have read them.
__device__ __forceinline__ void empty_lse(const Params &p, const Segment &s, int group, u32 lse_at, u32 heads,
                                          int thread, int threads) {
#pragma unroll 1
  for (int part = thread; part < s.parts; part += threads) {
    u32 *lse = (u32 *)(p.scratch + slot_offset(p, slot_of(s, part), group) + lse_at);
#pragma unroll 1
    for (u32 h = 0; h < heads; h++) store_relaxed(lse + h, kEmpty);
  }
}

// This CTA's slice of a split request: whole heads while parts <= 16, else one of `readers` slices of a head. A thread takes one
// 16-byte unit of every `groups`-th part, two to eight loads in flight; the groups' sums then meet in shared memory, where a
// thread combines two values of a unit over (at most) four groups, and shuffles add up such fours. The order is always the same.
__device__ __forceinline__ void merge(const Params &p, u8 *shared, const Segment &s, int group, int warp, int lane) {
  const u32 readers = readers_of_head(s.parts);
  u32 first_unit, last_unit;
  if (s.parts <= kHeads) {
    const float parts = s.parts, inverse = reciprocal(parts);
    first_unit = ceil_div_small(s.part * kHeads, parts, inverse) * kUnits;
    last_unit = ceil_div_small((s.part + 1) * kHeads, parts, inverse) * kUnits;
  } else {
    if (s.part >= kHeads * readers) return;
    first_unit = s.part * (kUnits / readers);
    last_unit = first_unit + kUnits / readers;
  }
  const u32 copy = s.part & (readers - 1), units = min(last_unit - first_unit, kThreads);
  const int width_log = 32 - __clz(units - 1);  // width: a power of two >= units
  const u32 width = 1 << width_log, groups = kThreads >> width_log;
  const int splits_log = max(6 - width_log, 0);  // of groups / 4
  const u32 thread = 32 * warp + lane, first_head = first_unit / kUnits,
            heads = (last_unit - 1) / kUnits - first_head + 1;
  const u32 lse_at = kLseOffset + (copy * kHeads + first_head) * 4;
  const u32 out_head = s.request * p.heads + group * kHeads;  // of the group's head 0
  Slice a;
  a.parts = s.parts, a.member = thread >> width_log, a.groups = groups;

#pragma unroll 1
  for (u32 from = first_unit; from < last_unit; from += kThreads) {
    a.unit = from + (thread & width - 1);
    a.lse_at = lse_at + (min(a.unit, last_unit - 1) / kUnits - first_head) * 4;
    Partial total = {-INFINITY, 0.f, {}};
    if (a.unit < last_unit && a.member < s.parts) {
      if (s.parts <= 2 * groups)
        merge_parts<2>(p, s, a, a.member, group, total);
      else if (s.parts <= 4 * groups)
        merge_parts<4>(p, s, a, a.member, group, total);
      else
#pragma unroll 1
        for (int part = a.member; part < s.parts; part += kBatch * groups)
          merge_parts<kBatch>(p, s, a, part, group, total);
    }
    if (groups == 1) {
      const u32 h = a.unit / kUnits;
      if (a.unit < last_unit && group * kHeads + h < p.heads) {
        const float inverse = reciprocal(total.sum);
        uint4 v;
        v.x = pack(total.value[0] * inverse, total.value[1] * inverse),
        v.y = pack(total.value[2] * inverse, total.value[3] * inverse);
        v.z = pack(total.value[4] * inverse, total.value[5] * inverse),
        v.w = pack(total.value[6] * inverse, total.value[7] * inverse);
        *((uint4 *)p.out + (u64)(out_head + h) * kUnits + a.unit % kUnits) = v;
        if (a.unit % kUnits == 0) p.lse[out_head + h] = total.max + log2_approx(total.sum);
      }
      continue;
    }
    // [groups][width] sums: maxima, weights, then four pairs of values, each an array over threads
    float2 *values = (float2 *)(shared + kSharedScores);
    float *maxima = (float *)(values + 4 * kThreads), *weights = maxima + kThreads;
    maxima[thread] = total.max, weights[thread] = total.sum;
#pragma unroll
    for (int e = 0; e < 4; e++) values[e * kThreads + thread] = make_float2(total.value[2 * e], total.value[2 * e + 1]);
    __syncthreads();
#pragma unroll 1
    for (u32 i = thread >> splits_log; i < 4 * width; i += kThreads >> splits_log) {
      const u32 split = thread & (1 << splits_log) - 1, lane_unit = i & width - 1, pair = i >> width_log;
      const u32 unit = from + lane_unit, h = unit / kUnits;
      const u32 first = (split << width_log) + lane_unit, stride = width << splits_log;
      float top = -INFINITY, sum = 0.f, x = 0.f, y = 0.f;
#pragma unroll 1
      for (u32 at = first; at < kThreads; at += 2 * stride) top = fmaxf(top, fmaxf(maxima[at], maxima[at + stride]));
#pragma unroll 1
      for (int d = 1; d < 1 << splits_log; d <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
      top = top == -INFINITY ? 0.f : top;
#pragma unroll 1
      for (u32 two = first; two < kThreads; two += 2 * stride) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
          const u32 at = two + half * stride;
          const float scale = exp2_approx(maxima[at] - top);
          const float2 v = values[pair * kThreads + at];
          sum += scale * weights[at], x += scale * v.x, y += scale * v.y;
        }
      }
#pragma unroll 1
      for (int d = 1; d < 1 << splits_log; d <<= 1) {
        sum += __shfl_xor_sync(~0u, sum, d);
        x += __shfl_xor_sync(~0u, x, d), y += __shfl_xor_sync(~0u, y, d);
      }
      if (split == 0 && unit < last_unit && group * kHeads + h < p.heads) {
        const float inverse = reciprocal(sum);
        *((u32 *)p.out + ((u64)(out_head + h) * kUnits + unit % kUnits) * 4 + pair) = pack(x * inverse, y * inverse);
        if (unit % kUnits == 0 && pair == 0) p.lse[out_head + h] = top + log2_approx(sum);
      }
    }
  }
  if (groups == 1) __syncthreads();
  empty_lse(p, s, group, lse_at, heads, kThreads - 1 - thread, kThreads);
}

// ---- the kernel ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_pages(const Params &p, const Segment &s, int (&page)[kStages], int lane) {
#pragma unroll
  for (int i = 0; i < kStages; i++) page[i] = page_of(p, s, i * kTile + lane);
}

// Empty requests belong to no CTA's work: out = 0, lse = -inf.
__device__ __forceinline__ void fill_empty_requests(const Params &p, int cta, int ctas, int group, int thread) {
#pragma unroll 1
  for (int r = cta; r < p.batch; r += ctas) {
    if (length_of(p, r, __ldg(p.kv_indptr + r), __ldg(p.kv_indptr + r + 1)) > 0) continue;
    const i64 first = (i64)r * p.heads + group * kHeads;
    const int heads = min(kHeads, p.heads - group * kHeads);
#pragma unroll 1
    for (int i = thread; i < heads * kUnits; i += kThreads)
      *((uint4 *)(p.out + first * kDimCkv) + i) = make_uint4(0, 0, 0, 0);
    if (thread < heads) p.lse[first + thread] = -INFINITY;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MLA_CTAS_PER_SM)
    mla_paged_decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 shared[];
  int thread = threadIdx.x;
  asm volatile(
      ""
      : "+r"(thread));  // stay in a register: read anew for every use, it costs 30 instructions before the first copy
  const int warp = thread / 32, lane = thread % 32;
  const int group = blockIdx.x & (1 << p.group_shift) - 1, cta = blockIdx.x >> p.group_shift,
            ctas = gridDim.x >> p.group_shift;
  int page[kStages];

#if MLA_FLAT
  // What must outlast a segment waits in shared memory: in registers it would spill.
  FlatPlan *plan = (FlatPlan *)(shared + kSharedFlat);
  const FlatPlan whole = plan_flat(p, shared, cta, ctas, warp, lane);
  Segment *split =
      (Segment *)(shared + kSharedSplit);  // the split requests this CTA ends (or only passes through) and begins
  if (thread < 2) split[thread].request = -1;
  if (thread == 0) *plan = whole;
  __syncthreads();
  while (plan->first < plan->last) {
    FlatPlan rest = *plan;
    const Segment s = next_segment(p, rest, cta);
    __syncthreads();
    if (thread == 0) *plan = rest;
    int fresh_lane = lane;
    asm volatile("" : "+r"(fresh_lane));  // offsets from the lane are cheaper to compute for each segment than to spill
    load_pages(p, s, page, fresh_lane);
    attend(p, shared, s, page, gather_lane(p, shared_address(shared), warp, fresh_lane), group, warp, fresh_lane);
    if (s.parts > 1 && thread == 0) split[s.part == 0] = s;
  }
  fill_empty_requests(p, cta, ctas, group, thread);
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < 2; i++) {
    if (split[i].request < 0) continue;
    merge(p, shared, split[i], group, warp, lane);
    __syncthreads();  // both merges use the same shared memory
  }
#else
  const GatherLane gather = gather_lane(p, shared_address(shared), warp, lane);  // here while kv_indptr travels
#if MLA_PER_LANE == 0
  // The load of the page indices for the host's bound overlaps the load of kv_indptr, and is right unless the table is padded.
  int chunk = p.single_chunk;
  Segment s = plan_single(p.num_indices << (kPaged ? p.page_shift : 0), 0, chunk, cta);
  load_pages(p, s, page, lane);
  const int entry = __ldg(p.kv_indptr), length = length_of(p, 0, entry, __ldg(p.kv_indptr + 1));
  if (entry != 0 || length != p.num_indices << (kPaged ? p.page_shift : 0)) {
    chunk = max(kMinChunk, (int)(length * p.even) + 1);
    s = plan_single(length, entry, chunk, cta);
    load_pages(p, s, page, lane);
  }
  s.parts = ceil_div(length, chunk);
  const bool empties = length == 0;
#else
  // Bring the page indices near this CTA's share to L2 while kv_indptr travels: together the CTAs cover them all.
  if (warp == 0) {
    const int each = (int)(p.num_indices * p.even) + 1, at = cta * each + lane * 32;
    if (lane * 32 < each && at < p.num_indices) prefetch_l2(p.kv_indices + at);
  }
  bool empties;
  const Segment s = plan_item(p, cta, ctas, lane, empties);
  if (s.request >= 0) load_pages(p, s, page, lane);
#endif
  if (s.request >= 0) attend(p, shared, s, page, gather, group, warp, lane);
  if (empties) fill_empty_requests(p, cta, ctas, group, thread);
  if (s.request >= 0 && s.parts > 1) merge(p, shared, s, group, warp, lane);
#endif
}
