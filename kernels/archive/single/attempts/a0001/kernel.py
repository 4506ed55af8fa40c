import ctypes, os, shutil, subprocess, tempfile
import torch

_SRC = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#define R4(X) X(0) X(1) X(2) X(3)
#define R8(X) R4(X) X(4) X(5) X(6) X(7)
#define R16(X) R8(X) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#ifdef __AVX512F__
#define W 16
#define LOGW 4
#define RB 16
#define RQ R16
#define HB 8
#define HH R8
#else
#define W 8
#define LOGW 3
#define RB 8
#define RQ R8
#define HB 4
#define HH R4
#endif
#define NG (16/W)
#define D 576
typedef float V __attribute__((vector_size(4*W),aligned(2),may_alias));
typedef uint32_t U __attribute__((vector_size(4*W),aligned(2),may_alias));
typedef int32_t I __attribute__((vector_size(4*W),aligned(2),may_alias));
typedef uint16_t h16;
#define EV(x) ((V)((x)<<16))
#define OD(x) ((V)((x)&0xffff0000u))

static float qt[NG][D*W] __attribute__((aligned(64)));
static float kb[RB*D] __attribute__((aligned(64)));
static float *P; static const h16 **row; static int cap;

static void tq(const h16 *q, int n, int off) {
  U lo, hi, a[W], b[W];
  for (int j = 0; j < W; j++) { lo[j] = (j>>1) + (j&1)*W; hi[j] = lo[j] + W/2; }
  for (int g = 0; g < NG; g++) for (int c = 0; c < n; c += 2*W) {
    for (int i = 0; i < W; i++) a[i] = *(const U*)(q + (g*W+i)*n + c);
    for (int s = 0; s < LOGW; s++) {
      for (int i = 0; i < W/2; i++) {
        b[2*i] = __builtin_shuffle(a[i], a[i+W/2], lo);
        b[2*i+1] = __builtin_shuffle(a[i], a[i+W/2], hi);
      }
      for (int i = 0; i < W; i++) a[i] = b[i];
    }
    float *t = qt[g] + (off + c)*W;
    for (int j = 0; j < W; j++) { *(V*)(t + j*W) = EV(a[j]); *(V*)(t + (W+j)*W) = OD(a[j]); }
  }
}
static inline void cv(const h16 *s, int n, float *d) {
  for (int c = 0; c < n; c += 2*W) { U x = *(const U*)(s+c); *(V*)(d+c) = EV(x); *(V*)(d+c+W) = OD(x); }
}
#define QA(i) V a##i = {0};
#define QF(i) a##i += x * k[i*D+d];
#define QS(i) *(V*)(s + i*16) = a##i;
#define DEF(name, REP) static void __attribute__((noinline)) name(const float *q, const float *k, float *s) { \
  REP(QA) for (int d = 0; d < D; d++) { V x = *(const V*)(q + d*W); REP(QF) } REP(QS) }
DEF(qk_full, RQ)
#if RB > 8
DEF(qk_half, R8)
#endif

static inline V exp2v(V x) {
  I k = (I)(x < -126.0f);
  V c = {0}; c = c - 126.0f;
  x = (V)(((I)x & ~k) | ((I)c & k));
  I i = __builtin_convertvector(x - 0.5f, I);
  V f = x - __builtin_convertvector(i, V);
  V p = f*1.5403530e-4f + 1.3333558e-3f;
  p = p*f + 9.6181291e-3f; p = p*f + 5.5504109e-2f; p = p*f + 0.24022651f;
  p = p*f + 0.69314718f; p = p*f + 1.0f;
  return p * (V)((i + 127) << 23);
}
static inline void st(h16 *o, V e, V d) {
  U a = (U)e, b = (U)d;
  a += ((a>>16)&1u) + 0x7fffu; b += ((b>>16)&1u) + 0x7fffu;
  *(U*)o = (a>>16) | (b&0xffff0000u);
}
#define PA(i) V e##i = {0}, o##i = {0};
#define PF(i) e##i += e*p[i]; o##i += o*p[i];
#define PS(i) st(out + (h+i)*512 + c, e##i*inv[h+i], o##i*inv[h+i]);
static void __attribute__((noinline)) pv(int L, const float *inv, h16 *out) {
  for (int c = 0; c < 512; c += 2*W) for (int h = 0; h < 16; h += HB) {
    HH(PA)
    const float *p = P + h;
    for (int l = 0; l < L; l++, p += 16) {
      U x = *(const U*)(row[l] + c);
      V e = EV(x), o = OD(x);
      HH(PF)
    }
    HH(PS)
  }
}
int mla(const h16 *qn, const h16 *qp, const h16 *ck, const h16 *kp, const int32_t *ptr,
        const int32_t *idx, int B, double scale, h16 *out, float *lse) {
  const float sc = (float)(scale * 1.4426950408889634);
  const int end = ptr[B];
  for (int b = 0; b < B; b++, qn += 16*512, qp += 16*64, out += 16*512, lse += 16) {
    int lo = ptr[b], L = ptr[b+1] - lo;
    if (L <= 0) { memset(out, 0, 16*512*2); for (int h = 0; h < 16; h++) lse[h] = -INFINITY; continue; }
    if (L > cap) {
      cap = 2*L + 512; free(P); free(row);
      P = aligned_alloc(64, (size_t)(cap + 16)*64); row = malloc(cap*sizeof(*row));
      if (!P || !row) { cap = 0; return 1; }
    }
    tq(qn, 512, 0); tq(qp, 64, 512);
    for (int l = 0; l < L; l += RB) {
      int n = L - l < RB ? L - l : RB;
      for (int i = 0; i < n; i++) {
        int at = lo + l + i; size_t pg = (size_t)idx[at];
        if (at + RB < end) {
          size_t nx = (size_t)idx[at + RB];
          for (int c = 0; c < 512; c += 32) __builtin_prefetch(ck + nx*512 + c);
          __builtin_prefetch(kp + nx*64); __builtin_prefetch(kp + nx*64 + 32);
        }
        row[l+i] = ck + pg*512;
        cv(row[l+i], 512, kb + i*D); cv(kp + pg*64, 64, kb + i*D + 512);
      }
      for (int g = 0; g < NG; g++) {
#if RB > 8
        if (n <= 8) { qk_half(qt[g], kb, P + l*16 + g*W); continue; }
#endif
        qk_full(qt[g], kb, P + l*16 + g*W);
      }
    }
    float inv[16];
    for (int g = 0; g < NG; g++) {
      float *p = P + g*W;
      V m = *(V*)p * sc, sum = {0};
      for (int l = 0; l < L; l++) {
        V t = *(V*)(p + l*16) * sc; *(V*)(p + l*16) = t;
        I k = (I)(t > m); m = (V)(((I)t & k) | ((I)m & ~k));
      }
      for (int l = 0; l < L; l++) { V t = exp2v(*(V*)(p + l*16) - m); *(V*)(p + l*16) = t; sum += t; }
      for (int j = 0; j < W; j++) { inv[g*W+j] = 1.0f/sum[j]; lse[g*W+j] = m[j] + log2f(sum[j]); }
    }
    pv(L, inv, out);
  }
  return 0;
}
"""


def _build():
    d = tempfile.mkdtemp(prefix="mla_")
    c, so = os.path.join(d, "m.c"), os.path.join(d, "m.so")
    with open(c, "w") as f:
        f.write(_SRC)
    cc = shutil.which("gcc") or shutil.which("cc")
    subprocess.run([cc, "-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-shared", "-fPIC",
                    "-o", so, c, "-lm"], check=True)
    f = ctypes.CDLL(so).mla
    p = ctypes.c_void_p
    f.argtypes = [p, p, p, p, p, p, ctypes.c_int, ctypes.c_double, p, p]
    f.restype = ctypes.c_int
    return f


_mla = _build()


def mla_paged_decode(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale, out=None, lse=None):
    B = q_nope.shape[0]
    if out is None:
        out = torch.empty((B, 16, 512), dtype=torch.bfloat16)
    if lse is None:
        lse = torch.empty((B, 16), dtype=torch.float32)
    if _mla(q_nope.data_ptr(), q_pe.data_ptr(), ckv_cache.data_ptr(), kpe_cache.data_ptr(),
            kv_indptr.data_ptr(), kv_indices.data_ptr(), B, sm_scale, out.data_ptr(), lse.data_ptr()):
        raise MemoryError("scratch")
    return out, lse
