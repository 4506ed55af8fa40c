// Chunk-parallel half of KDA prefill for NVIDIA GPUs: a CTA turns 64 tokens of one head into the operands of the
// recurrence. The same values as _prologue in kda_prefill.py, the portable source; here they stay in mma fragments.
//
// With local decay l (log2, summed from the start of a 16-token block) and total T of a block, products take
//   q 2^l, k 2^l      as rows, and k 2^-l as columns of the same block: all relative to the block's start
//   k 2^(T-l)         as columns of the next block: relative to the end of its own
//   both once more, times the decay between their block and the middle of the chunk, for blocks 2-3 by 0-1
//
// Eight warps, two a block: one for its keys, one for its gates and queries. Four barriers, each named by what it
// completes.
//
// Fragment layout: lane = 4 n + c holds tokens t, t + 2 of its block, t = 4 (n / 2) + n % 2, and channels 32 s + 8 c to
// 32 s + 8 c + 7. A permutation of tokens or channels that both operands share changes nothing in a product. This one
// makes every global access 16 bytes wide, gives a lane four neighboring columns of a product, and an A fragment's rows
// are a B fragment's columns.
//
// Macro KDA_SAFE: 1 is the gate lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), 0 is
// -exp(A_log) * softplus(g + dt_bias).

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

struct Params {
    const u16 *q, *k, *v, *g, *beta;
    const float *A_log, *dt_bias;
    const i64 *cu_seqlens;  // null: every sequence has seq_len tokens
    u16 *w, *qg, *kg, *ut, *aqk;
    float *decay;
    i64 q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head;
    i64 g_batch, g_row, g_head, beta_batch, beta_row, beta_head;
    float scale, lower_bound;
    int num_seqs, seq_len, num_heads;
};

constexpr int DIM = 128;
constexpr int CHUNK = 64;
constexpr int THREADS = 256;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LARGEST_EXPONENT = 120.f;  // 2^-l of a wider block would overflow fp32

// Shared memory, in bytes. Regions change hands at barriers.
constexpr int DECAY_ROW = 132;                       // floats a row of l, so that rows start in different banks
constexpr int OWN_BYTES = 16 * DECAY_ROW * 4;        // of a block: l; then its blocks of Akk and its inverse
constexpr int VECTORS = 4 * OWN_BYTES;               // six vectors of DIM floats a block; then the inverse of the chunk
constexpr int COLUMNS = VECTORS + 6 * 4 * DIM * 4;   // eight column operands of 4 KB
constexpr int DECAYED = COLUMNS + 8 * 4096;          // k decayed to the chunk's start
constexpr int VALUES = DECAYED + CHUNK * DIM * 2;
constexpr int BETA = VALUES + CHUNK * DIM * 2;
constexpr int TOTALS = BETA + CHUNK * 4;
constexpr int SHARED_BYTES = TOTALS + 4 * DIM * 4;

constexpr int TILE_ROW = 48;                         // bytes a row of a 16 x 16 bf16 tile
constexpr int TILE_BYTES = 16 * TILE_ROW;
constexpr int SOLVE_ROW = 20;                        // floats a row of the transposed diagonal block
constexpr int BELOW = 16 * SOLVE_ROW * 4;            // blocks of Akk left of the diagonal: high, then low part, each
constexpr int INVERSE = BELOW + 3 * 2 * TILE_BYTES;  // inverse of the diagonal block: high, then low part

#ifndef KDA_EMULATED
__device__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ float lg2(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ float rcp(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ float rsq(float x) { float y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

__device__ u32 pack(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

__device__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ u32 shared_address(const void *at) { return (u32)__cvta_generic_to_shared(at); }

__device__ void load_matrices(u32 (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

__device__ void load_transposed(u32 (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

__device__ void copy_async(void *to, const void *from, bool live) {  // zeros where not live
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(shared_address(to)), "l"(from), "r"(live ? 16 : 0) : "memory");
}

__device__ void copies_arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif

__device__ float low(u32 x) { return __uint_as_float(x << 16); }
__device__ float high(u32 x) { return __uint_as_float(x & 0xffff0000u); }

__device__ void unpack(float (&x)[8], uint4 p) {
    x[0] = low(p.x), x[1] = high(p.x), x[2] = low(p.y), x[3] = high(p.y);
    x[4] = low(p.z), x[5] = high(p.z), x[6] = low(p.w), x[7] = high(p.w);
}

__device__ uint4 pack(const float (&x)[8]) {
    return {pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])};
}

__device__ void read8(float (&x)[8], const float *at) {
    float4 a = *(const float4 *)at, b = *(const float4 *)(at + 4);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

// 32 channels of a 16 x 16 product: rows[h], columns[h] hold the lane's eight channels of its token in half h.
__device__ void product(float (&d)[2][4], const uint4 (&rows)[2], uint4 columns0, uint4 columns1) {
    u32 first[4] = {rows[0].x, rows[1].x, rows[0].y, rows[1].y};
    u32 second[4] = {rows[0].z, rows[1].z, rows[0].w, rows[1].w};
    mma(d[0], first, columns0.x, columns0.y);
    mma(d[1], first, columns1.x, columns1.y);
    mma(d[0], second, columns0.z, columns0.w);
    mma(d[1], second, columns1.z, columns1.w);
}

// x = high + low, both bf16: an A fragment out of two accumulator fragments.
__device__ void split(u32 (&hi)[4], u32 (&lo)[4], const float (&x)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float a = x[i >> 1][2 * (i & 1)], b = x[i >> 1][2 * (i & 1) + 1];
        hi[i] = pack(a, b);
        lo[i] = pack(a - low(hi[i]), b - high(hi[i]));
    }
}

// d += x tile^T with tile [16][16] in shared memory, to about 16 bits: high high + low high + high low.
__device__ void product_split(float (&d)[2][4], const u32 (&hi)[4], const u32 (&lo)[4], const unsigned char *tile,
                              int n, int c) {
#pragma unroll
    for (int t = 0; t < 2; t++) {
        const unsigned char *at = tile + (8 * t + n) * TILE_ROW + 4 * c;
        u32 h0 = *(const u32 *)at, h1 = *(const u32 *)(at + 16);
        u32 l0 = *(const u32 *)(at + TILE_BYTES), l1 = *(const u32 *)(at + TILE_BYTES + 16);
        mma(d[t], hi, h0, h1);
        mma(d[t], lo, h0, h1);
        mma(d[t], hi, l0, l1);
    }
}

// 16-byte pieces of a row are permuted by an exclusive or with this: both eight tokens in a row and the eight tokens of
// a fragment's half get eight different values.
__device__ int decayed_swizzle(int t) { return (t & 1) | ((t >> 1) & 2) | ((((t >> 1) ^ (t >> 3)) & 1) << 2); }
// The same for rows t ... t + 7 and for rows t, t + 1, t + 8, t + 9, t + 16, ...
__device__ int inverse_swizzle(int t) {
    return (t & 1) | ((((t >> 1) ^ (t >> 3)) & 1) << 1) | ((((t >> 2) ^ (t >> 4)) & 1) << 2);
}

__device__ u16 *inverse_at(unsigned char *inverse, int t, int s) {
    return (u16 *)(inverse + t * CHUNK * 2 + (((s >> 3) ^ inverse_swizzle(t)) << 4) + (s & 7) * 2);
}

// 1 / |x| of the lane's two tokens
__device__ void norms(float (&norm)[2], const uint4 (&x)[4][2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = 0.f, y[8];
#pragma unroll
        for (int s = 0; s < 4; s++) {
            unpack(y, x[s][h]);
#pragma unroll
            for (int i = 0; i < 8; i++) sum = fmaf(y[i], y[i], sum);
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        norm[h] = rsq(sum + 1e-6f);
    }
}

#if !KDA_SAFE
// A diagonal block of products from differences of l, channel by channel: right for any decay. x and k point to the
// block's first token and the lane's first channel, l to the lane's first channel; norm is of the lane's tokens of x.
__device__ void exact_diagonal(float (&d)[2][4], const u16 *x, i64 x_row, const u16 *k, i64 k_row, const float *l,
                               const float (&norm)[2], int token, int c, int live) {
    for (int j = 0; j < 16; j++) {
        float sum[2] = {0.f, 0.f}, kk = 0.f;
#pragma unroll
        for (int s = 0; s < 4; s++) {
            uint4 raw = {0, 0, 0, 0};
            if (j < live) raw = *(const uint4 *)(k + j * k_row + 32 * s);
            float kj[8], lj[8];
            unpack(kj, raw);
            read8(lj, l + j * DECAY_ROW + 32 * s);
#pragma unroll
            for (int i = 0; i < 8; i++) kk = fmaf(kj[i], kj[i], kk);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int t = token + 2 * h;
                raw = {0, 0, 0, 0};
                if (t < live) raw = *(const uint4 *)(x + t * x_row + 32 * s);
                float xt[8], lt[8];
                unpack(xt, raw);
                read8(lt, l + t * DECAY_ROW + 32 * s);
#pragma unroll
                for (int i = 0; i < 8; i++) sum[h] += xt[i] * kj[i] * ex2(fminf(lt[i] - lj[i], 0.f));
            }
        }
#pragma unroll
        for (int offset = 1; offset < 4; offset *= 2) {
            kk += __shfl_xor_sync(~0u, kk, offset);
            sum[0] += __shfl_xor_sync(~0u, sum[0], offset);
            sum[1] += __shfl_xor_sync(~0u, sum[1], offset);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (j == 4 * c + i) d[i >> 1][2 * h + (i & 1)] = sum[h] * norm[h] * rsq(kk + 1e-6f);
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 2) kda_prologue(const __grid_constant__ Params p) {
    extern __shared__ uint4 shared[];
    unsigned char *const smem = (unsigned char *)shared;
    const int lane = threadIdx.x & 31, n = lane >> 2, c = lane & 3;
    const int warp = threadIdx.x >> 5, block = warp & 3;
    const bool keys = warp < 4;
    const int slot = blockIdx.x / p.num_heads, head = blockIdx.x % p.num_heads;

    int seq, chunk, length;
    i64 start = 0;
    if (p.cu_seqlens) {  // sequence i owns slots cu_seqlens[i] / CHUNK + i and on
        int above = p.num_seqs;
        seq = 0;
        while (above - seq > 1) {
            const int middle = (seq + above) / 2;
            if (min((int)p.cu_seqlens[middle], p.seq_len) / CHUNK + middle <= slot) seq = middle;
            else above = middle;
        }
        start = min((int)p.cu_seqlens[seq], p.seq_len);
        length = min((int)p.cu_seqlens[seq + 1], p.seq_len) - (int)start;
        chunk = slot - ((int)start / CHUNK + seq);
    } else {
        const int chunks = (p.seq_len + CHUNK - 1) / CHUNK;
        seq = slot / chunks, chunk = slot % chunks, length = p.seq_len;
    }
    const int live = min(length - chunk * CHUNK, CHUNK);
    if (live <= 0) return;
    start += chunk * CHUNK;
    const i64 tile = ((i64)slot * p.num_heads + head) * CHUNK * DIM;
    const int token = 4 * (n >> 1) + (n & 1), first = 16 * block + token;  // the lane's first, in block and in chunk

    unsigned char *const own = smem + block * OWN_BYTES;
    float *const totals = (float *)(smem + TOTALS);
    float *const beta = (float *)(smem + BETA);
    const u16 *const x = (keys ? p.k + seq * p.k_batch + start * p.k_row + head * p.k_head
                               : p.q + seq * p.q_batch + start * p.q_row + head * p.q_head) + 8 * c;
    const i64 x_row = keys ? p.k_row : p.q_row;

    uint4 raw[4][2];  // the lane's 64 values of k or q; then the rows of the products
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u16 *const at = x + (first + 2 * h) * x_row;
#pragma unroll
        for (int s = 0; s < 4; s++) {
            raw[s][h] = {0, 0, 0, 0};
            if (first + 2 * h < live) raw[s][h] = *(const uint4 *)(at + 32 * s);
        }
    }
    if (keys) {
        const u16 *const v = p.v + seq * p.v_batch + start * p.v_row + head * p.v_head + 8 * (threadIdx.x & 15);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int t = 8 * i + (threadIdx.x >> 4);
            unsigned char *const to = smem + VALUES + t * DIM * 2 + (((threadIdx.x & 15) ^ (t & 7)) << 4);
            copy_async(to, v + (t < live ? t * p.v_row : 0), t < live);
        }
        if (threadIdx.x < CHUNK) {
            const int t = threadIdx.x;
            float y = 0.f;
            if (t < live) {
                const u16 x = p.beta[seq * p.beta_batch + (start + t) * p.beta_row + head * p.beta_head];
                y = rcp(1.f + ex2(low(x) * -LOG2E));
            }
            beta[t] = y;
        }
    } else {
        // l of the block: a lane sums four channels over the tokens
        const u16 *const g = p.g + seq * p.g_batch + (start + 16 * block) * p.g_row + head * p.g_head + 4 * lane;
        const float rate = ex2(p.A_log[head] * LOG2E);
        const float4 b = *(const float4 *)(p.dt_bias + head * DIM + 4 * lane);
        const int present = live - 16 * block;
        uint2 gates[16];
#pragma unroll
        for (int r = 0; r < 16; r++) {
            gates[r] = {0, 0};
            if (r < present) gates[r] = *(const uint2 *)(g + r * p.g_row);
        }
#if KDA_SAFE
        const float slope = -LOG2E * rate, gain = p.lower_bound * LOG2E;
#else
        const float slope = LOG2E, gain = -rate;
#endif
        const float bias[4] = {b.x * slope, b.y * slope, b.z * slope, b.w * slope};
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int r = 0; r < 16; r++) {
            const float y[4] = {low(gates[r].x), high(gates[r].x), low(gates[r].y), high(gates[r].y)};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float z = fmaf(y[i], slope, bias[i]);
#if KDA_SAFE
                sum[i] = fmaf(r < present ? gain : 0.f, rcp(1.f + ex2(z)), sum[i]);
#else
                sum[i] = fmaf(r < present ? gain : 0.f, fmaxf(z, 0.f) + lg2(1.f + ex2(-fabsf(z))), sum[i]);
#endif
            }
            *(float4 *)((float *)own + r * DECAY_ROW + 4 * lane) = {sum[0], sum[1], sum[2], sum[3]};
        }
        *(float4 *)(totals + block * DIM + 4 * lane) = {sum[0], sum[1], sum[2], sum[3]};
    }
    float norm[2];
    norms(norm, raw);
    if (!keys) norm[0] *= p.scale, norm[1] *= p.scale;
    __syncthreads();  // l, totals and beta are complete

    // of the block, by channel: decay before it, decay between it and the middle of the chunk, total, decay after it
    float *const vectors = (float *)(smem + VECTORS) + (keys ? block * 4 : 16 + block * 2) * DIM;
    {
        float t[4][4];
#pragma unroll
        for (int b = 0; b < 4; b++) {
            const float4 y = *(const float4 *)(totals + b * DIM + 4 * lane);
            t[b][0] = y.x, t[b][1] = y.y, t[b][2] = y.z, t[b][3] = y.w;
        }
        float4 out[4], last;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float t0 = t[0][i], t1 = t[1][i], t2 = t[2][i], t3 = t[3][i], half = t0 + t1;
            const float total = block == 0 ? t0 : block == 1 ? t1 : block == 2 ? t2 : t3;
            (&out[0].x)[i] = ex2(block == 0 ? 0.f : block == 1 ? t0 : block == 2 ? half : half + t2);
            (&out[1].x)[i] = ex2(block == 0 ? t1 : block == 3 ? t2 : 0.f);
            (&out[2].x)[i] = KDA_SAFE ? ex2(total) : total;
            (&out[3].x)[i] = ex2(block == 0 ? t1 + t2 + t3 : block == 1 ? t2 + t3 : block == 2 ? t3 : 0.f);
            (&last.x)[i] = ex2(half + t2 + t3);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i < 2 || keys) *(float4 *)(vectors + i * DIM + 4 * lane) = out[i];
        if (warp == 0) *(float4 *)(p.decay + tile / CHUNK + 4 * lane) = last;
    }
    __syncwarp();
    const float *const l = (const float *)own + token * DECAY_ROW + 8 * c;
    float diagonal[2][4] = {};
#if !KDA_SAFE
    bool wide = false;  // some channel decays too far for anchors at the block's start
    for (int i = 0; i < 4; i++) wide |= totals[block * DIM + 4 * lane + i] < -LARGEST_EXPONENT;
    wide = __any_sync(~0u, wide);
    if (wide) {
        const u16 *const k = p.k + seq * p.k_batch + (start + 16 * block) * p.k_row + head * p.k_head + 8 * c;
        exact_diagonal(diagonal, x + 16 * block * x_row, x_row, k, p.k_row, l - token * DECAY_ROW, norm, token, c,
                       live - 16 * block);
    }
#endif

    uint4 far_rows[4][2];  // rows relative to the middle of the chunk, of blocks 2 and 3
    uint4 *const columns = (uint4 *)(smem + COLUMNS) + lane;
    u16 *const stored = (keys ? p.kg : p.qg) + tile + first * DIM + 8 * c;
#pragma unroll
    for (int s = 0; s < 4; s++) {
        float before[8], middle[8], total[8], after[8];
        read8(before, vectors + 8 * c + 32 * s), read8(middle, vectors + DIM + 8 * c + 32 * s);
        if (keys) read8(total, vectors + 2 * DIM + 8 * c + 32 * s), read8(after, vectors + 3 * DIM + 8 * c + 32 * s);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float y[8], z[8], decayed[8];
            unpack(y, raw[s][h]);
            read8(decayed, l + 2 * h * DECAY_ROW + 32 * s);
#pragma unroll
            for (int i = 0; i < 8; i++) y[i] *= norm[h];
            if (keys) {
                float end[8];
#pragma unroll
                for (int i = 0; i < 8; i++) {
#if KDA_SAFE
                    z[i] = y[i] * ex2(-decayed[i]);
                    end[i] = z[i] * total[i];
#else
                    z[i] = y[i] * ex2(fminf(-decayed[i], LARGEST_EXPONENT));
                    end[i] = y[i] * ex2(total[i] - decayed[i]);
#endif
                }
                columns[block * 256 + (2 * s + h) * 32] = pack(z);
                if (block % 2 == 0) columns[(4 + (block >> 1)) * 256 + (2 * s + h) * 32] = pack(end);
#pragma unroll
                for (int i = 0; i < 8; i++) z[i] = end[i] * after[i];
                *(uint4 *)(stored + 2 * h * DIM + 32 * s) = pack(z);
                if (block < 2) {
#pragma unroll
                    for (int i = 0; i < 8; i++) z[i] = end[i] * middle[i];
                    columns[(6 + block) * 256 + (2 * s + h) * 32] = pack(z);
                }
            }
#pragma unroll
            for (int i = 0; i < 8; i++) y[i] *= ex2(decayed[i]);
            raw[s][h] = pack(y);
#pragma unroll
            for (int i = 0; i < 8; i++) z[i] = y[i] * before[i];
            if (keys) {
                const int t = first + 2 * h;
                unsigned char *const row = smem + DECAYED + t * DIM * 2 + 4 * c;
#pragma unroll
                for (int i = 0; i < 4; i++)
                    *(u32 *)(row + (((4 * s + i) ^ decayed_swizzle(t)) << 4)) = pack(z[2 * i], z[2 * i + 1]);
            } else {
                *(uint4 *)(stored + 2 * h * DIM + 32 * s) = pack(z);
            }
            if (block >= 2) {
#pragma unroll
                for (int i = 0; i < 8; i++) z[i] = y[i] * middle[i];
                far_rows[s][h] = pack(z);
            }
        }
    }
    __syncthreads();  // column operands are complete, l and the vectors are read

    // the block's products with its own columns, the block before it, and blocks 0 and 1
    float adjacent[2][4] = {}, far[2][2][4] = {};
#pragma unroll
    for (int s = 0; s < 4; s++) {
        const uint4 *const column = columns + 2 * s * 32;
#if !KDA_SAFE
        if (!wide)
#endif
        product(diagonal, raw[s], column[block * 256], column[block * 256 + 32]);
        const uint4 *const previous = column + (4 + (block >> 1)) * 256;
        if (block % 2 == 1) product(adjacent, raw[s], previous[0], previous[32]);
        if (block >= 2) {
            product(far[0], far_rows[s], column[6 * 256], column[6 * 256 + 32]);
            product(far[1], far_rows[s], column[7 * 256], column[7 * 256 + 32]);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = token + 2 * h;
        const float factor = keys ? beta[16 * block + r] : 1.f;
        u16 *const squares = p.aqk + tile / DIM * CHUNK + (16 * block + r) * CHUNK + 4 * c;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float y[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int a = i >> 1, b = 2 * h + (i & 1);
                y[i] = j == block ? (4 * c + i < (keys ? r : r + 1) ? diagonal[a][b] : 0.f)
                     : j > block  ? 0.f
                     : j == block - 1 && block % 2 == 1 ? adjacent[a][b]
                     : j < 2 ? far[j & 1][a][b] : 0.f;
                y[i] *= factor;
            }
            if (!keys) {
                *(uint2 *)(squares + 16 * j) = {pack(y[0], y[1]), pack(y[2], y[3])};
            } else if (j == block) {
#pragma unroll
                for (int i = 0; i < 4; i++) ((float *)own)[(4 * c + i) * SOLVE_ROW + r] = y[i];
            } else if (j < block) {
                const u32 a = pack(y[0], y[1]), b = pack(y[2], y[3]);
                unsigned char *const at = own + BELOW + 2 * j * TILE_BYTES + r * TILE_ROW + 8 * c;
                *(uint2 *)at = {a, b};
                const u32 a_low = pack(y[0] - low(a), y[1] - high(a)), b_low = pack(y[2] - low(b), y[3] - high(b));
                *(uint2 *)(at + TILE_BYTES) = {a_low, b_low};
            }
        }
    }

    // forward substitution in fp32: a lane solves for one column of the inverse of its block's diagonal block
    unsigned char *const inverse = smem + VECTORS;
    if (keys) {
        __syncwarp();
        const int column = lane & 15, rows = lane & 16 ? 8 : 0;
        float y[16];
#pragma unroll
        for (int r = 0; r < 16; r++) y[r] = r == column ? 1.f : 0.f;
#pragma unroll
        for (int j = 0; j < 15; j++) {
#pragma unroll
            for (int r = (j + 1) & ~3; r < 16; r += 4) {
                const float4 a = *(const float4 *)((const float *)own + j * SOLVE_ROW + r);  // 0 but below the diagonal
                if (r > j) y[r] -= a.x * y[j];
                if (r + 1 > j) y[r + 1] -= a.y * y[j];
                if (r + 2 > j) y[r + 2] -= a.z * y[j];
                if (r + 3 > j) y[r + 3] -= a.w * y[j];
            }
        }
        const float factor = beta[16 * block + column];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float z = rows ? y[8 + i] : y[i];
            const u32 hi = pack(z, 0.f);
            unsigned char *const at = own + INVERSE + (rows + i) * TILE_ROW + 2 * column;
            *(u16 *)at = (u16)hi;
            *(u16 *)(at + TILE_BYTES) = (u16)pack(z - low(hi), 0.f);
            *inverse_at(inverse, 16 * block + rows + i, 16 * block + column) = (u16)pack(z * factor, 0.f);
            if (block % 2 == 0) *inverse_at(inverse, 16 * block + rows + i, 16 * block + 16 + column) = 0;
        }
    }
    __syncthreads();  // all blocks of Akk and the inverses of its diagonal blocks are complete

    // block substitution: a warp solves for one block column of the inverse, transposed:
    // M_ij = -D_i (sum over k of A_ik M_kj)
    if (warp < 3) {
        u32 hi[3][4], lo[3][4];
        {
            const int row = ((lane >> 4) << 3) + (lane & 7);
            const unsigned char *const at = own + INVERSE + row * TILE_ROW + (lane & 8) * 2;
            u32 a[4], b[4];
            load_transposed(a, at);
            load_transposed(b, at + TILE_BYTES);
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 3; j++)
                    if (j == block) hi[j][i] = a[i], lo[j][i] = b[i];
            }
        }
        const float factor[2] = {beta[16 * block + n], beta[16 * block + n + 8]};
#pragma unroll
        for (int i = 1; i < 4; i++) {
            if (i <= block) continue;
            const unsigned char *const theirs = smem + i * OWN_BYTES;
            float y[2][4] = {}, z[2][4] = {};
#pragma unroll
            for (int j = 0; j < i; j++)
                if (j >= block) product_split(y, hi[j], lo[j], theirs + BELOW + 2 * j * TILE_BYTES, n, c);
            u32 y_hi[4], y_lo[4];
            split(y_hi, y_lo, y);
            product_split(z, y_hi, y_lo, theirs + INVERSE, n, c);
#pragma unroll
            for (int a = 0; a < 2; a++) {
#pragma unroll
                for (int b = 0; b < 4; b++) {
                    z[a][b] = -z[a][b];
                    const int t = 16 * i + 8 * a + 2 * c + (b & 1), column = 16 * block + n + 8 * (b >> 1);
                    *inverse_at(inverse, t, column) = (u16)pack(z[a][b] * factor[b >> 1], 0.f);
                }
            }
            if (i < 3) split(hi[i], lo[i], z);
        }
    }
    if (keys) copies_arrived();
    __syncthreads();  // the inverse and v are complete

    const int eighth = lane & 7, group = lane >> 3;
    if (keys) {  // w = M diag(beta) (k 2^(P+l)): a warp computes 32 channels of all 64 tokens
        u32 b[4][2][4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int t = 16 * j + 8 * (group & 1) + eighth;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int piece = (4 * block + 2 * i + (group >> 1)) ^ decayed_swizzle(t);
                load_transposed(b[j][i], smem + DECAYED + t * DIM * 2 + (piece << 4));
            }
        }
        u16 *const to = p.w + tile + n * DIM + 32 * block + 8 * c;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float d[4][4] = {};
#pragma unroll
            for (int j = 0; j <= i; j++) {
                const int t = 16 * i + 8 * (group & 1) + eighth;
                u32 a[4];
                load_matrices(a, inverse + t * CHUNK * 2 + (((2 * j + (group >> 1)) ^ inverse_swizzle(t)) << 4));
#pragma unroll
                for (int m = 0; m < 4; m++) mma(d[m], a, b[j][m >> 1][2 * (m & 1)], b[j][m >> 1][2 * (m & 1) + 1]);
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint4 out = {pack(d[0][2 * h], d[0][2 * h + 1]), pack(d[1][2 * h], d[1][2 * h + 1]),
                             pack(d[2][2 * h], d[2][2 * h + 1]), pack(d[3][2 * h], d[3][2 * h + 1])};
                *(uint4 *)(to + (16 * i + 8 * h) * DIM) = out;
            }
        }
    } else {  // u^T = v^T (M diag(beta))^T: a warp computes 32 channels of v for all 64 tokens
        u32 a[2][4][4];
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int t = 16 * j + 8 * (group >> 1) + eighth;
                const int piece = (4 * block + 2 * m + (group & 1)) ^ (t & 7);
                load_transposed(a[m][j], smem + VALUES + t * DIM * 2 + (piece << 4));
            }
        }
        u16 *const to = p.ut + tile + (32 * block + n) * CHUNK + 8 * c;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float d[2][4][4] = {};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int t = 32 * half + 8 * (eighth >> 1) + 2 * i + (eighth & 1);
#pragma unroll
                for (int j = 0; j < 2 * half + 2; j += 2) {
                    u32 b[4];
                    load_matrices(b, inverse + t * CHUNK * 2 + (((2 * j + group) ^ inverse_swizzle(t)) << 4));
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        mma(d[m][i], a[m][j], b[0], b[1]);
                        mma(d[m][i], a[m][j + 1], b[2], b[3]);
                    }
                }
            }
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    uint4 out = {pack(d[m][0][2 * h], d[m][0][2 * h + 1]), pack(d[m][1][2 * h], d[m][1][2 * h + 1]),
                                 pack(d[m][2][2 * h], d[m][2][2 * h + 1]), pack(d[m][3][2 * h], d[m][3][2 * h + 1])};
                    *(uint4 *)(to + (16 * m + 8 * h) * CHUNK + 32 * half) = out;
                }
            }
        }
    }
}
