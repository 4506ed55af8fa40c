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
#if defined(__AVX__)
#define W 8
#define LOGW 3
#define LO (U){0,8,1,9,2,10,3,11}
#define HI (U){4,12,5,13,6,14,7,15}
#else
#define W 4
#define LOGW 2
#define LO (U){0,4,1,5}
#define HI (U){2,6,3,7}
#endif
#define RB 6
#define RQ(X) R4(X) X(4) X(5)
#define HB 4
#define HH R4
#if defined(__aarch64__)
#pragma message "isa: aarch64"
#elif defined(__AVX2__) && defined(__FMA__)
#pragma message "isa: avx2 fma"
#elif defined(__AVX__)
#pragma message "isa: avx, not both of avx2 and fma"
#elif defined(__SSE4_1__)
#pragma message "isa: sse4.1"
#else
#pragma message "isa: sse2 or other"
#endif
#define NG (16/W)
#define DB 128
typedef float V __attribute__((vector_size(4*W),aligned(2),may_alias));
typedef uint32_t U __attribute__((vector_size(4*W),aligned(2),may_alias));
typedef int32_t I __attribute__((vector_size(4*W),aligned(2),may_alias));
typedef uint16_t h16;
#define EV(x) ((V)((x)<<16))
#define OD(x) ((V)((x)&0xffff0000u))

static float qt[NG][DB*W] __attribute__((aligned(64)));
static float kb[RB*DB] __attribute__((aligned(64)));
static float *P; static h16 *buf; static const h16 **row; static int cap;

static void tq(const h16 *q, int ld, int n) {
  U a[W], b[W];
  for (int g = 0; g < NG; g++) for (int c = 0; c < n; c += 2*W) {
    for (int i = 0; i < W; i++) a[i] = *(const U*)(q + (g*W+i)*ld + c);
    for (int s = 0; s < LOGW; s++) {
      for (int i = 0; i < W/2; i++) {
        b[2*i] = __builtin_shuffle(a[i], a[i+W/2], LO);
        b[2*i+1] = __builtin_shuffle(a[i], a[i+W/2], HI);
      }
      for (int i = 0; i < W; i++) a[i] = b[i];
    }
    float *t = qt[g] + c*W;
    for (int j = 0; j < W; j++) { *(V*)(t + j*W) = EV(a[j]); *(V*)(t + (W+j)*W) = OD(a[j]); }
  }
}
static inline void cv(const h16 *s, int n, float *d) {
  for (int c = 0; c < n; c += 2*W) { U x = *(const U*)(s+c); *(V*)(d+c) = EV(x); *(V*)(d+c+W) = OD(x); }
}
#define QA(i) V a##i = {0}, b##i = {0};
#define QF(i) { float w = k[i*DB+d]; a##i += x*w; b##i += y*w; }
#define QL(i) a##i += *(V*)(s + i*16); b##i += *(V*)(s + i*16 + W);
#define QS(i) *(V*)(s + i*16) = a##i; *(V*)(s + i*16 + W) = b##i;
static void __attribute__((noinline)) qk(const float *q, const float *r, const float *k, float *s, int n, int add) {
  RQ(QA)
  for (int d = 0; d < n; d++) { V x = *(const V*)(q + d*W), y = *(const V*)(r + d*W); RQ(QF) }
  if (add) { RQ(QL) }
  RQ(QS)
}

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
#define PF(i) { float w = p[i]; e##i += e*w; o##i += o*w; }
#define PS(i) st(out + i*512, e##i*inv[i], o##i*inv[i]);
#define DEFP(name, REP) static void __attribute__((noinline)) name(int L, const V *x, const float *p, const float *inv, h16 *out) { \
  REP(PA) for (int l = 0; l < L; l++, p += 16, x += 2) { V e = x[0], o = x[1]; REP(PF) } REP(PS) }
DEFP(pv6, RQ)
DEFP(pv4, R4)
static void __attribute__((noinline)) pv(int L, const float *inv, h16 *out, const h16 *q, const h16 *r, h16 *nx) {
  V *bp = (V*)buf; const h16 **rw = row;
  for (int c = 0; c < 512; c += 2*W) {
  if (!(c & 31)) for (int l = 0; l < L; l++) {
    const h16 *s = rw[l] + c;
    for (int j = 0; j < 16/W; j++) {
      U x = *(const U*)(s + 2*W*j);
      V *t = bp + 2*(j*L + l);
      t[0] = EV(x); t[1] = OD(x);
    }
  }
  const V *xb = bp + (c & 31)/W*L;
  if (nx) {
    for (int i = 0; i < W; i++) { __builtin_prefetch(q + c*16 + i*32); __builtin_prefetch(nx + c*16 + i*32, 1); }
    __builtin_prefetch(r + c*2);
  }
  pv6(L, xb, P, inv, out + c);
  pv6(L, xb, P + 6, inv + 6, out + c + 6*512);
  pv4(L, xb, P + 12, inv + 12, out + c + 12*512);
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
      cap = 2*L + 512; free(P); free(row); free(buf);
      P = aligned_alloc(64, (size_t)(cap + 16)*64); row = malloc(cap*sizeof(*row));
      buf = aligned_alloc(64, (size_t)cap*128);
      if (!P || !row || !buf) { cap = 0; return 1; }
    }
    for (int l = 0; l < L; l++) row[l] = ck + (size_t)idx[lo+l]*512;
    for (int d0 = 0; d0 < 576; d0 += DB) {
      const int pe = d0 >= 512, nd = pe ? 64 : DB, ld = pe ? 64 : 512;
      const h16 *base = pe ? kp : ck + d0;
      tq(pe ? qp : qn + d0, ld, nd);
      for (int l = 0; l < L; l += RB) {
        int n = L - l < RB ? L - l : RB;
        for (int i = 0; i < n; i++) {
          int at = lo + l + i;
          if (at + RB < end) {
            const h16 *nx = base + (size_t)idx[at + RB]*ld;
            for (int c = 0; c < nd; c += 32) __builtin_prefetch(nx + c);
          }
          cv(base + (size_t)idx[at]*ld, nd, kb + i*DB);
        }
        for (int g = 0; g < NG; g += 2) qk(qt[g], qt[g+1], kb, P + l*16 + g*W, nd, d0 > 0);
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
    pv(L, inv, out, qn + 8192, qp + 1024, b + 1 < B ? out + 8192 : 0);
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
