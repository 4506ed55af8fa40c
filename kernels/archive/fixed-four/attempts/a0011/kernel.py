import ctypes
import os
import shutil
import subprocess
import tempfile

import torch

_SRC = r'''
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
typedef uint32_t u32;
/* W lanes per register, NG registers for 16 heads, NR rows (or heads) a block */
#if defined __AVX512F__
#define W 16
#define NR 8
#elif defined __AVX2__
#define W 8
#define NR 5
#else
#define W 4
#define NR 4
#endif
#define NG (16 / W)
typedef u32 v16u __attribute__((vector_size(4 * W)));
typedef int v16i __attribute__((vector_size(4 * W)));
typedef float v16f __attribute__((vector_size(4 * W)));
#define INL static inline __attribute__((always_inline))
#define UNROLL8 _Pragma("GCC unroll 8")
#define HI 0xffff0000u

static v16u Q[288 * NG] __attribute__((aligned(64)));
static v16f *S;
static long cap;

INL v16u ld(const void *p) { v16u v; memcpy(&v, p, sizeof v); return v; }

INL v16f dp(v16f a, v16u q, v16u k) {
#ifdef __AVX512BF16__
  return (v16f)_mm512_dpbf16_ps((__m512)a, (__m512bh)q, (__m512bh)k);
#else
  a += (v16f)(q << 16) * (v16f)(k << 16);
  a += (v16f)(q & HI) * (v16f)(k & HI);
  return a;
#endif
}

/* dst[c] = column c of a 16 x 16 block of dwords, row stride ld32 */
static void transpose(v16u *dst, const u32 *src, long ld32) {
#ifdef __AVX512F__
  __m512i a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    __m512i x = (__m512i)ld(src + 2 * i * ld32);
    __m512i y = (__m512i)ld(src + (2 * i + 1) * ld32);
    a[2 * i] = _mm512_unpacklo_epi32(x, y);
    a[2 * i + 1] = _mm512_unpackhi_epi32(x, y);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    __m512i c0 = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88);
    __m512i c1 = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd);
    __m512i c2 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
    __m512i c3 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
    dst[j] = (v16u)_mm512_shuffle_i32x4(c0, c2, 0x88);
    dst[4 + j] = (v16u)_mm512_shuffle_i32x4(c1, c3, 0x88);
    dst[8 + j] = (v16u)_mm512_shuffle_i32x4(c0, c2, 0xdd);
    dst[12 + j] = (v16u)_mm512_shuffle_i32x4(c1, c3, 0xdd);
  }
#else
  for (int c = 0; c < 16; c++)
    for (int h = 0; h < 16; h++) ((u32 *)dst)[c * 16 + h] = src[h * ld32 + c];
#endif
}

/* scores of n rows; rem = referenced rows from ix on, for the prefetch */
INL void qk(const int n, const u32 *ck, const u32 *kp, const int *ix, long rem,
            v16f *s, float sc) {
  const u32 *a[NR], *nx[NR];
  v16f acc[NR][NG];
UNROLL8
  for (int i = 0; i < n; i++) {
    long g = ix[n + i < rem ? n + i : i];
    a[i] = ck + (long)ix[i] * 256;
    nx[i] = ck + g * 256;
    __builtin_prefetch(kp + g * 32);
    __builtin_prefetch(kp + g * 32 + 16);
UNROLL8
    for (int g2 = 0; g2 < NG; g2++) acc[i][g2] = (v16f){0};
  }
  for (int p = 0; p < 256; p += 16) {
UNROLL8
    for (int i = 0; i < n; i++) __builtin_prefetch(nx[i] + p);
#pragma GCC unroll 1
    for (int j = p; j < p + 16; j++) {
UNROLL8
      for (int i = 0; i < n; i++) {
        v16u k = (v16u){0} + a[i][j];
UNROLL8
        for (int g = 0; g < NG; g++)
          acc[i][g] = dp(acc[i][g], Q[j * NG + g], k);
      }
    }
  }
UNROLL8
  for (int i = 0; i < n; i++) a[i] = kp + (long)ix[i] * 32;
#pragma GCC unroll 1
  for (int j = 0; j < 32; j++) {
UNROLL8
    for (int i = 0; i < n; i++) {
      v16u k = (v16u){0} + a[i][j];
UNROLL8
      for (int g = 0; g < NG; g++)
        acc[i][g] = dp(acc[i][g], Q[(256 + j) * NG + g], k);
    }
  }
UNROLL8
  for (int i = 0; i < n; i++) {
UNROLL8
    for (int g = 0; g < NG; g++) s[i * NG + g] = acc[i][g] * sc;
  }
}

INL v16f vmax(v16f a, v16f b) {
  v16i m = a > b;
  return (v16f)(((v16i)a & m) | ((v16i)b & ~m));
}

INL v16f vexp2(v16f x) { /* x <= 0 */
  x = vmax(x, (v16f){0} - 100.f);
  v16f t = x + 12582912.f, f = x - (t - 12582912.f);
  v16f p = f * 1.5403530e-4f + 1.33335581e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.f;
  return (v16f)((v16u)p + ((v16u)t << 23));
}

INL v16f vlog2(v16f x) { /* x >= 1 */
  v16i e = ((v16i)x >> 23) - 127;
  v16f m = (v16f)(((v16i)x & 0x7fffff) | 0x3f800000);
  v16f t = (m - 1.f) / (m + 1.f), w = t * t;
  v16f p = w * (1.f / 9) + 1.f / 7;
  p = p * w + 1.f / 5;
  p = p * w + 1.f / 3;
  p = p * w + 1.f;
  return __builtin_convertvector(e, v16f) + p * t * 2.88539008f;
}

INL v16u rne(v16f f) {
  v16u x = (v16u)f;
  return x + 0x7fffu + ((x >> 16) & 1u);
}

INL void pvb(const int n, int h, int cl, int c, long L, const u32 *T,
             const float *inv, u32 *out) {
      v16f e[8], o[8];
UNROLL8
      for (int i = 0; i < n; i++) e[i] = o[i] = (v16f){0};
#pragma GCC unroll 1
      for (long r = 0; r < L; r++) {
        v16u k = ld(T + r * 16 + c - cl);
        v16f ke = (v16f)(k << 16), ko = (v16f)(k & HI);
        const float *p = (const float *)S + r * 16 + h;
UNROLL8
        for (int i = 0; i < n; i++) {
          e[i] += ke * p[i];
          o[i] += ko * p[i];
        }
      }
UNROLL8
      for (int i = 0; i < n; i++) {
        float w = inv[h + i];
        v16u v = (rne(e[i] * w) >> 16) | (rne(o[i] * w) & HI);
        memcpy(out + (h + i) * 256 + c, &v, sizeof v);
      }
}

#define P(n, h) pvb(n, h, cl, c, L, T, inv, out);
static void pv(const u32 *ck, const int *ix, long L, const float *inv, u32 *out) {
  u32 *T = (u32 *)(S + cap * NG); /* one cache line of each row */
  for (int cl = 0; cl < 256; cl += 16) {
    for (long r = 0; r < L; r++)
      memcpy(T + r * 16, ck + (long)ix[r] * 256 + cl, 64);
    for (int c = cl; c < cl + 16; c += W) {
#if NR == 5
      P(6, 0) P(5, 6) P(5, 11)
#else
      for (int h = 0; h < 16; h += NR) P(NR, h)
#endif
    }
  }
}

int mla(const u32 *qn, const u32 *qp, const u32 *ck, const u32 *kp,
        const int *ip, const int *idx, float sc, u32 *out, float *lse, int B) {
  for (int b = 0; b < B; b++, qn += 4096, qp += 512, out += 4096, lse += 16) {
    const int *ix = idx + ip[b];
    long L = ip[b + 1] - ip[b], rem = ip[B] - ip[b];
    if (L <= 0) {
      memset(out, 0, 16384);
      for (int h = 0; h < 16; h++) lse[h] = -__builtin_inff();
      continue;
    }
    if (L > cap) {
      free(S);
      cap = L + 512;
      S = aligned_alloc(64, cap * 128);
      if (!S) { cap = 0; return 1; }
    }
    for (int c = 0; c < 256; c += 16) transpose(Q + c * NG, qn + c, 256);
    for (int c = 0; c < 32; c += 16) transpose(Q + (256 + c) * NG, qp + c, 32);
    long r = 0;
    for (; r + NR <= L; r += NR)
      qk(NR, ck, kp, ix + r, rem - r, S + r * NG, sc);
#define C(n) case n: qk(n, ck, kp, ix + r, rem - r, S + r * NG, sc); break;
    switch (L - r) {
      C(1) C(2) C(3)
#if NR > 4
      C(4)
#endif
#if NR > 5
      C(5) C(6) C(7)
#endif
    }
    float inv[16];
    for (int g = 0; g < NG; g++) {
      v16f *s = S + g, m = s[0], sum = {0};
      for (r = 1; r < L; r++) m = vmax(m, s[r * NG]);
      for (r = 0; r < L; r++) {
        v16f p = vexp2(s[r * NG] - m);
        s[r * NG] = p;
        sum += p;
      }
      v16f l = m + vlog2(sum), w = 1.f / sum;
      memcpy(lse + g * W, &l, sizeof l);
      memcpy(inv + g * W, &w, sizeof w);
    }
    pv(ck, ix, L, inv, out);
  }
  return 0;
}
'''


def _build():
    d = tempfile.mkdtemp(prefix="mla_")
    c, so = os.path.join(d, "mla.c"), os.path.join(d, "mla.so")
    with open(c, "w") as f:
        f.write(_SRC)
    cc = next((x for x in ("gcc", "cc", "clang") if shutil.which(x)), "cc")
    r = subprocess.run(
        [cc, "-O3", "-march=native", "-std=gnu11", "-ffp-contract=fast",
         "-fno-strict-aliasing", "-shared", "-fPIC", "-w", c, "-o", so],
        capture_output=True, text=True)
    if r.returncode:
        raise RuntimeError(r.stderr[-2000:])
    fn = ctypes.PyDLL(so).mla
    p = ctypes.c_void_p
    fn.argtypes = [p, p, p, p, p, p, ctypes.c_float, p, p, ctypes.c_int]
    fn.restype = ctypes.c_int
    return fn


_fn = _build()


def mla_paged_decode(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices,
                     sm_scale, out=None, lse=None):
    B = q_nope.shape[0]
    if out is None:
        out = torch.empty((B, 16, 512), dtype=torch.bfloat16)
    if lse is None:
        lse = torch.empty((B, 16), dtype=torch.float32)
    a = (q_nope.data_ptr(), q_pe.data_ptr(), ckv_cache.data_ptr(),
           kpe_cache.data_ptr(), kv_indptr.data_ptr(), kv_indices.data_ptr(),
           sm_scale * 1.4426950408889634, out.data_ptr(), lse.data_ptr(), B)
    if _fn(*a) or _fn(*a) or _fn(*a):
        raise MemoryError
    return out, lse
