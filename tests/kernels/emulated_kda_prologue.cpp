// kda_prologue.cu on the CPU: a thread for every thread of a CTA, barriers for barriers, warp instructions by exchange.
// Shows the arithmetic, the layouts and, built with -fsanitize=thread, races between barriers. Says nothing of speed.
// Build with -DKDA_SAFE=1 or 0 and -DSOURCE='"path of kda_prologue.cu"'.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <pthread.h>
#include <random>
#include <thread>
#include <vector>

#define KDA_EMULATED
#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)

typedef unsigned int u32;
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct Index { u32 x; };

constexpr int CTA = 256;
thread_local Index threadIdx, blockIdx;
uint4 shared[1 << 13];

struct Barrier {  // of pthread, as the sanitizer knows whom it orders and whom not
    pthread_barrier_t of;
    explicit Barrier(int count) { pthread_barrier_init(&of, nullptr, count); }
    void wait() { pthread_barrier_wait(&of); }
} cta_barrier(CTA);

struct Warp {
    Barrier barrier{32};
    uint64_t values[32][6];
} warps[CTA / 32];

Warp &warp() { return warps[threadIdx.x / 32]; }
int lane_id() { return threadIdx.x % 32; }
void __syncthreads() { cta_barrier.wait(); }
void __syncwarp() { warp().barrier.wait(); }
int min(int a, int b) { return a < b ? a : b; }

float __uint_as_float(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }
u32 bits_of(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }

// Every lane gives some values; what follows reads those of all lanes until the next call of leave().
template <typename... Values> void enter(Values... given) {
    uint64_t list[] = {(uint64_t)given...};
    for (unsigned i = 0; i < sizeof...(given); i++) warp().values[lane_id()][i] = list[i];
    __syncwarp();
}
void leave() { __syncwarp(); }

float __shfl_xor_sync(u32, float x, int mask) {
    enter(bits_of(x));
    float y = __uint_as_float((u32)warp().values[lane_id() ^ mask][0]);
    leave();
    return y;
}

bool __any_sync(u32, bool x) {
    enter(x);
    bool any = false;
    for (int i = 0; i < 32; i++) any |= warp().values[i][0] != 0;
    leave();
    return any;
}

float ex2(float x) { return exp2f(x); }
float lg2(float x) { return log2f(x); }
float rcp(float x) { return 1 / x; }
float rsq(float x) { return 1 / sqrtf(x); }
u32 bf16(float x) { u32 b = bits_of(x); return (b + 0x7fff + ((b >> 16) & 1)) >> 16; }  // to the nearest, ties to even
u32 pack(float low, float high) { return bf16(low) | bf16(high) << 16; }
float half_of(uint64_t pair, int high) { return __uint_as_float(high ? (u32)pair & 0xffff0000u : (u32)pair << 16); }

// mma.m16n8k16: A[row][k] is in lane 4 (row % 8) + k % 8 / 2, register row / 8 + 2 (k / 8);
// B[k][col] in lane 4 col + k % 8 / 2, register k / 8
void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    enter(a[0], a[1], a[2], a[3], b0, b1);
    auto &values = warp().values;
    for (int i = 0; i < 4; i++) {
        int row = lane_id() / 4 + 8 * (i / 2), col = 2 * (lane_id() % 4) + i % 2;
        for (int k = 0; k < 16; k++) {
            float x = half_of(values[4 * (row % 8) + k % 8 / 2][row / 8 + 2 * (k / 8)], k % 2);
            d[i] += x * half_of(values[4 * col + k % 8 / 2][4 + k / 8], k % 2);
        }
    }
    leave();
}

// ldmatrix.x4: lane 8 m + r gives the address of row r of matrix m
void load(u32 (&r)[4], const void *row, bool transposed) {
    enter((uint64_t)row);
    int line = lane_id() / 4, pair = 2 * (lane_id() % 4);
    for (int m = 0; m < 4; m++) {
        auto at = [&](int i, int j) { return (u32)((const uint16_t *)warp().values[8 * m + i][0])[j]; };
        r[m] = transposed ? at(pair, line) | at(pair + 1, line) << 16 : at(line, pair) | at(line, pair + 1) << 16;
    }
    leave();
}
void load_matrices(u32 (&r)[4], const void *row) { load(r, row, false); }
void load_transposed(u32 (&r)[4], const void *row) { load(r, row, true); }

void copy_async(void *to, const void *from, bool live) { live ? (void)memcpy(to, from, 16) : (void)memset(to, 0, 16); }
void copies_arrived() {}

#include SOURCE
static_assert(THREADS == CTA && SHARED_BYTES <= sizeof shared);

extern "C" int facts(int which) {
    int all[] = {(int)sizeof(Params), THREADS, SHARED_BYTES};
    return all[which];
}

extern "C" void run(const Params *params, int ctas) {
    std::vector<std::thread> threads;
    for (u32 t = 0; t < CTA; t++)
        threads.emplace_back([=] {
            threadIdx.x = t;
            for (int i = 0; i < ctas; i++) {
                if (t == 0) memset((void *)shared, 0xff, sizeof shared);  // NaN, so that a read before a write shows
                __syncthreads();
                blockIdx.x = i;
                kda_prologue(*params);
                __syncthreads();
            }
        });
    for (auto &thread : threads) thread.join();
}

int main() {  // one sequence of 100 tokens, one head: a full chunk and a partial one
    const int tokens = 100;
    std::mt19937 random(0);
    std::normal_distribution<float> normal;
    auto make = [&](int n) {
        std::vector<uint16_t> x(n);
        for (auto &v : x) v = bf16(normal(random));
        return x;
    };
    auto q = make(tokens * DIM), k = make(tokens * DIM), v = make(tokens * DIM), g = make(tokens * DIM);
    auto beta = make(tokens);
    std::vector<float> A_log(1, 2.8f), dt_bias(DIM, 0.5f), decay(2 * DIM);
    std::vector<std::vector<uint16_t>> out(5, std::vector<uint16_t>(2 * CHUNK * DIM));
    Params p = {};
    p.q = q.data(), p.k = k.data(), p.v = v.data(), p.g = g.data(), p.beta = beta.data();
    p.A_log = A_log.data(), p.dt_bias = dt_bias.data(), p.decay = decay.data();
    p.w = out[0].data(), p.qg = out[1].data(), p.kg = out[2].data(), p.ut = out[3].data(), p.aqk = out[4].data();
    p.q_row = p.k_row = p.v_row = p.g_row = DIM, p.beta_row = 1;
    p.scale = 0.1f, p.lower_bound = -5, p.num_seqs = 1, p.seq_len = tokens, p.num_heads = 1;
    run(&p, 2);
    puts("done");
}
