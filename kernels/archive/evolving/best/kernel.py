import ctypes, os, shutil, subprocess, sys, tempfile
import torch

_SRC = r'''
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <unistd.h>
#include <sys/syscall.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512F__)
#define AMX 1
#endif
#if defined(__AVX512F__)
#define VB 64
#elif defined(__AVX2__)
#define VB 32
#else
#define VB 16
#endif
#define LN (VB / 4)                         /* lanes; 16 of them only with AVX-512 */
#define NV (16 / LN)
typedef float v16f __attribute__((vector_size(VB)));
typedef uint32_t v16u __attribute__((vector_size(VB)));
typedef int32_t v16i __attribute__((vector_size(VB)));
typedef uint32_t uu __attribute__((vector_size(VB), aligned(4), may_alias));
typedef float uf __attribute__((vector_size(VB), aligned(4), may_alias));
typedef uint32_t u32;
#define LDU(p) ((v16u)*(const uu *)(p))
#define STU(p, v) (*(uu *)(p) = (uu)(v))
#define LDF(p) ((v16f)*(const uf *)(p))
#define STF(p, v) (*(uf *)(p) = (uf)(v))
#define HI 0xffff0000u
#define BAR() __asm__ volatile("" ::: "memory")

static inline v16f vmax(v16f a, v16f b) {
  v16i c = a > b;
  return (v16f)(((v16i)a & c) | ((v16i)b & ~c));
}
static inline v16f ex2(v16f x) {            /* 2^x, x <= 0 */
  v16f lo = {0};
  lo = lo - 126.f;
  x = vmax(x, lo);
  v16f z = x + 12582912.f;
  v16f f = x - (z - 12582912.f);
  v16f p = f * 1.5403530e-4f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.f;
  return (v16f)((v16u)p + ((v16u)z << 23u));
}
static inline v16u rnd(v16f x) {            /* bf16 in the top half */
  v16u u = (v16u)x;
  return u + 0x7fffu + ((u >> 16u) & 1u);
}
static inline v16u pair(v16f e, v16f o) { return (rnd(e) >> 16u) | (rnd(o) & HI); }

static void tr16(const u32 *s, long st, u32 *d) {   /* d[c*16+r] = s[r*st+c] */
#ifdef __AVX512F__
  v16i l = {0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15};
  __m512i r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(s + i * st);
#define STEP(S) { \
    v16i m = (l & S) == S; \
    v16i a = (l & ~m) | ((l - S + 16) & m), b = ((l + S) & ~m) | ((l + 16) & m); \
    _Pragma("GCC unroll 16") \
    for (int i = 0; i < 16; i++) if (!(i & S)) { \
      __m512i x = r[i], y = r[i + S]; \
      r[i] = _mm512_permutex2var_epi32(x, (__m512i)a, y); \
      r[i + S] = _mm512_permutex2var_epi32(x, (__m512i)b, y); } }
  STEP(8) STEP(4) STEP(2) STEP(1)
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) _mm512_storeu_si512(d + i * 16, r[i]);
#elif defined(__AVX2__)
#define LD(i) _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p + (i) * st)), \
                                   _mm_loadu_ps(p + ((i) + 4) * st), 1)
  for (int q = 0; q < 8; q++) {             /* 8 rows x 4 columns */
    const float *p = (const float *)(s + (q & 1) * 8 * st + (q >> 1) * 4);
    float *o = (float *)(d + (q >> 1) * 64 + (q & 1) * 8);
    __m256 a0 = LD(0), a1 = LD(1), a2 = LD(2), a3 = LD(3);
    __m256 b0 = _mm256_unpacklo_ps(a0, a1), b1 = _mm256_unpackhi_ps(a0, a1);
    __m256 b2 = _mm256_unpacklo_ps(a2, a3), b3 = _mm256_unpackhi_ps(a2, a3);
    _mm256_storeu_ps(o, _mm256_shuffle_ps(b0, b2, 0x44));
    _mm256_storeu_ps(o + 16, _mm256_shuffle_ps(b0, b2, 0xee));
    _mm256_storeu_ps(o + 32, _mm256_shuffle_ps(b1, b3, 0x44));
    _mm256_storeu_ps(o + 48, _mm256_shuffle_ps(b1, b3, 0xee));
  }
#else
  for (int i = 0; i < 16; i++) for (int c = 0; c < 16; c++) d[c * 16 + i] = s[i * st + c];
#endif
}

static void softmax(float *S, int n, float sc, float *lse, float *inv) {
 for (int x = 0; x < 16; x += LN, S += n * LN) {   /* S[head group][row][LN] */
  v16f m = LDF(S) * sc, sum = {0};
  for (int j = 0; j < n; j++) {
    v16f t = LDF(S + j * LN) * sc;
    STF(S + j * LN, t);
    m = vmax(m, t);
  }
  for (int j = 0; j < n; j++) {
    v16f p = ex2(LDF(S + j * LN) - m);
    sum += p;
    STF(S + j * LN, p);
  }
  for (int h = 0; h < LN; h++) { lse[x + h] = m[h] + log2f(sum[h]); inv[x + h] = 1.f / sum[h]; }
 }
}

static float *S;
static u32 *RM, *VN, *PT;
static int cap, amx_ok;
static u32 zeros[256] __attribute__((aligned(64)));
static u32 QV[18 * 256] __attribute__((aligned(64)));

static void *buf(void *old, size_t n) {
  void *p = NULL;
  free(old);
  if (posix_memalign(&p, 4096, n)) abort();
  memset(p, 0, n);
  return p;
}

int init(void) {
#ifdef AMX
  amx_ok = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#endif
  return amx_ok * 100 + LN;
}

#ifdef AMX
static void pack(const u32 *ckv, const u32 *kpe, const int *ix, int rows, u32 *rm, u32 *vn) {
  for (int j = 0; j < rows; j += 2) {
    int two = j + 1 < rows;
    const u32 *a = ckv + (size_t)ix[j] * 256, *b = two ? ckv + (size_t)ix[j + 1] * 256 : zeros;
    const u32 *ap = kpe + (size_t)ix[j] * 32, *bp = two ? kpe + (size_t)ix[j + 1] * 32 : zeros;
    u32 *ra = rm + j * 288, *rb = ra + 288, *v = vn + j * 8;
    for (int c = 0; c < 16; c++) {
      v16u x = LDU(a + c * 16), y = LDU(b + c * 16);
      STU(ra + c * 16, x);
      STU(rb + c * 16, y);
      STU(v + c * 512, (x & 0xffffu) | (y << 16u));
      STU(v + c * 512 + 256, (x >> 16u) | (y & HI));
    }
    for (int c = 0; c < 2; c++) {
      STU(ra + 256 + c * 16, LDU(ap + c * 16));
      STU(rb + 256 + c * 16, LDU(bp + c * 16));
    }
  }
}

static void req_amx(const u32 *ckv, const u32 *kpe, const int *ix, int n, int shared,
                    float sc, u32 *out, float *lse) {
  static float T[4][256] __attribute__((aligned(64)));
  static u32 W[512] __attribute__((aligned(64)));
  float inv[16];
  int nb = (n + 31) / 32;
  for (int g = 0; g < nb; g++) {
    int rows = n - g * 32 < 32 ? n - g * 32 : 32;
    u32 *rm = RM + (size_t)g * 9216;
    if (g >= shared) pack(ckv, kpe, ix + g * 32, rows, rm, VN + (size_t)g * 8192);
    BAR();
    _tile_zero(0); _tile_zero(2);
    if (rows > 16) {
      _tile_zero(1); _tile_zero(3);
      for (int k = 0; k < 18; k += 2) {
        _tile_loadd(6, QV + k * 256, 64);
        _tile_loadd(4, rm + k * 16, 1152);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, rm + 4608 + k * 16, 1152);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(7, QV + k * 256 + 256, 64);
        _tile_loadd(4, rm + k * 16 + 16, 1152);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, rm + 4608 + k * 16 + 16, 1152);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(1, T[1], 64);
      _tile_stored(3, T[3], 64);
    } else {
      for (int k = 0; k < 18; k += 2) {
        _tile_loadd(6, QV + k * 256, 64);
        _tile_loadd(4, rm + k * 16, 1152);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, QV + k * 256 + 256, 64);
        _tile_loadd(5, rm + k * 16 + 16, 1152);
        _tile_dpbf16ps(2, 5, 7);
      }
    }
    _tile_stored(0, T[0], 64);
    _tile_stored(2, T[2], 64);
    BAR();
    for (int j = 0; j < rows; j++) {
      int t = j >> 4, r = (j & 15) * 16;
      STF(S + (g * 32 + j) * 16, LDF(T[t] + r) + LDF(T[t + 2] + r));
    }
  }
  softmax(S, n, sc, lse, inv);
  memset(S + n * 16, 0, (size_t)(nb * 32 - n) * 64);
  for (int g = 0; g < nb; g++) {
    for (int i = 0; i < 16; i++) {
      v16f a = LDF(S + (g * 32 + 2 * i) * 16), b = LDF(S + (g * 32 + 2 * i + 1) * 16);
      v16u ha = rnd(a) & HI, hb = rnd(b) & HI;
      STU(W + i * 16, (ha >> 16u) | hb);
      STU(W + 256 + i * 16, pair(a - (v16f)ha, b - (v16f)hb));
    }
    tr16(W, 16, PT + g * 512);
    tr16(W + 256, 16, PT + g * 512 + 256);
  }
  for (int c = 0; c < 16; c += 2) {
    BAR();
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int g = 0; g < nb; g++) {
      const u32 *v = VN + (size_t)g * 8192 + c * 512, *p = PT + g * 512;
      _tile_loadd(4, p, 64);
      _tile_loadd(5, p + 256, 64);
      _tile_loadd(6, v, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, v + 256, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(0, 5, 6);
      _tile_dpbf16ps(1, 5, 7);
      _tile_loadd(6, v + 512, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, v + 768, 64);
      _tile_dpbf16ps(3, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, T[0], 64);
    _tile_stored(1, T[1], 64);
    _tile_stored(2, T[2], 64);
    _tile_stored(3, T[3], 64);
    BAR();
    for (int h = 0; h < 16; h++) {
      STU(out + h * 256 + c * 16, pair(LDF(T[0] + h * 16) * inv[h], LDF(T[1] + h * 16) * inv[h]));
      STU(out + h * 256 + c * 16 + 16, pair(LDF(T[2] + h * 16) * inv[h], LDF(T[3] + h * 16) * inv[h]));
    }
  }
}
#endif

#ifdef __AVX512F__
#define R 12
#define HT 8
#elif defined(__AVX2__) || defined(__aarch64__)
#define R 6
#define HT 4
#else
#define R 2
#define HT 4
#endif
static void req_vec(const u32 *ckv, const u32 *kpe, const int *ix, int n, int left,
                    const u32 *nq, const u32 *np,     /* Q of the next request */
                    float sc, u32 *out, float *lse) {
  const u32 *pa[R], *pb[R];
  static float Kf[R * 576] __attribute__((aligned(64)));
  float inv[16];
  for (int j = 0; j < n; j += R) {
    int rem = n - j < R ? n - j : R;
    for (int r = 0; r < R; r++) {           /* rows of the next block or request */
      int i = j + rem + r < left ? j + rem + r : j;
      pa[r] = ckv + (size_t)ix[i] * 256;
      pb[r] = kpe + (size_t)ix[i] * 32;
    }
    for (int r = 0; r < rem; r++) {
      const u32 *a = ckv + (size_t)ix[j + r] * 256, *b = kpe + (size_t)ix[j + r] * 32;
      float *kf = Kf + r * 576;
      u32 *v = VN + (j + r) * LN;           /* VN[chunk][row][LN] */
      for (int c = 0; c < 288; c += LN, kf += 2 * LN) {
        v16u u;
        if (c < 256) { u = LDU(a + c); STU(v + (size_t)c * n, u); }
        else u = LDU(b + c - 256);
        STU(kf, u << 16u);
        STU(kf + LN, u & HI);
      }
    }
    v16f acc[R * NV] = {{0}};
    for (int c = 0; c < 288; c += LN) {
      if (!(c & 15))
        for (int r = 0; r < R; r++)
          __builtin_prefetch(c < 256 ? pa[r] + c : pb[r] + (c - 256), 0, 2);
      for (int l = 0; l < LN; l++) {
        const u32 *q = QV + (c + l) * 16;
        const float *k = Kf + 2 * c + l;
#pragma GCC unroll 32
        for (int i = 0; i < R * NV; i++)
          acc[i] += (v16f)(LDU(q + i % NV * LN) << 16u) * k[i / NV * 576];
        BAR();                              /* reload q: registers are short */
#pragma GCC unroll 32
        for (int i = 0; i < R * NV; i++)
          acc[i] += (v16f)(LDU(q + i % NV * LN) & HI) * k[i / NV * 576 + LN];
      }
    }
#pragma GCC unroll 32
    for (int i = 0; i < R * NV; i++)
      if (i / NV < rem) STF(S + (i % NV * n + j + i / NV) * LN, acc[i]);
  }
  softmax(S, n, sc, lse, inv);
  for (int c = 0; c < 256; c += LN)
    for (int h = 0; h < 16; h += HT) {
      for (int i = 0; i < HT * LN; i += 16) __builtin_prefetch(nq + c * 16 + h * LN + i, 0, 2);
      if (!h)
        for (int i = 0; i < 2 * LN; i += 16) __builtin_prefetch(np + c * 2 + i, 0, 2);
      v16f e[HT] = {{0}}, o[HT] = {{0}};
      for (int j = 0; j < n; j++) {
        v16u u = LDU(VN + (size_t)c * n + j * LN);
        v16f ke = (v16f)(u << 16u), ko = (v16f)(u & HI);
        const float *p = S + (h / LN * n + j) * LN + h % LN;
#pragma GCC unroll 16
        for (int x = 0; x < HT; x++) { e[x] += ke * p[x]; o[x] += ko * p[x]; }
      }
#pragma GCC unroll 16
      for (int x = 0; x < HT; x++)
        STU(out + (h + x) * 256 + c, pair(e[x] * inv[h + x], o[x] * inv[h + x]));
    }
}

void mla(int B, const u32 *qn, const u32 *qp, const u32 *ckv, const u32 *kpe,
         const int *ptr, const int *idx, double scale, u32 *out, float *lse) {
  float sc = (float)(scale * 1.4426950408889634);
  int mx = 1;
  for (int b = 0; b < B; b++) if (ptr[b + 1] - ptr[b] > mx) mx = ptr[b + 1] - ptr[b];
  int nb = (mx + 31) / 32;
  if (nb > cap) {
    cap = nb < 16 ? 16 : nb;
    S = buf(S, (size_t)cap * 2048);
    VN = buf(VN, (size_t)cap * 32768);
    if (amx_ok) {
      RM = buf(RM, (size_t)cap * 36864);
      PT = buf(PT, (size_t)cap * 2048);
    }
  }
#ifdef AMX
  if (amx_ok) {
    struct { uint8_t pal, start, res[14]; uint16_t colsb[16]; uint8_t rows[16]; }
      cfg __attribute__((aligned(64)));
    memset(&cfg, 0, sizeof cfg);
    cfg.pal = 1;
    for (int i = 0; i < 8; i++) { cfg.colsb[i] = 64; cfg.rows[i] = 16; }
    BAR();
    _tile_loadconfig(&cfg);
  }
  const int *pix = NULL;      /* rows packed by the previous request of this call */
  int pn = 0;
#endif
  for (int b = 0; b < B; b++, out += 4096, lse += 16) {
    int n = ptr[b + 1] - ptr[b];
    const int *ix = idx + ptr[b];
    if (n <= 0) {
      memset(out, 0, 16384);
      for (int h = 0; h < 16; h++) lse[h] = -INFINITY;
      continue;
    }
    for (int k = 0; k < 16; k++) tr16(qn + (size_t)b * 4096 + k * 16, 256, QV + k * 256);
    for (int k = 0; k < 2; k++) tr16(qp + (size_t)b * 512 + k * 16, 32, QV + (16 + k) * 256);
#ifdef AMX
    if (amx_ok) {
      int sh = 0, lim = (n < pn ? n : pn) / 32;
      while (sh < lim && !memcmp(ix + sh * 32, pix + sh * 32, 128)) sh++;
      req_amx(ckv, kpe, ix, n, sh, sc, out, lse);
      pix = ix;
      pn = n;
      continue;
    }
#endif
    int nx = b + 1 < B ? b + 1 : b;
    req_vec(ckv, kpe, ix, n, ptr[B] - ptr[b], qn + (size_t)nx * 4096, qp + (size_t)nx * 512,
            sc, out, lse);
  }
#ifdef AMX
  if (amx_ok) _tile_release();
#endif
}
'''


def _build():
    d = tempfile.mkdtemp(prefix="mla_")
    src, lib, err = os.path.join(d, "k.c"), os.path.join(d, "k.so"), ""
    with open(src, "w") as f:
        f.write(_SRC)
    try:
        with open("/proc/cpuinfo") as f:
            flags = f.read().split()
    except OSError:
        flags = []
    avx2 = [["-mavx2", "-mfma"]] if "avx2" in flags and "fma" in flags else []
    for cc in ("gcc", "cc", "clang"):
        if not shutil.which(cc):
            continue
        for arch in (["-march=native", "-mprefer-vector-width=512"], ["-march=native"], *avx2, []):
            r = subprocess.run([cc, "-O3", *arch, "-ffp-contract=fast", "-fno-strict-aliasing", "-w",
                                "-shared", "-fPIC", src, "-o", lib, "-lm"],
                               capture_output=True, text=True)
            if r.returncode == 0:
                print("mla:", cc, arch, err[:300], file=sys.stderr)
                return ctypes.PyDLL(lib)
            err = err or r.stderr
    raise RuntimeError("no C build: " + err[:3000])


_lib = _build()
_lib.init.restype = ctypes.c_int
_amx = _lib.init()
print("mla: 100 * amx + lanes =", _amx, file=sys.stderr)
_mla = _lib.mla
_mla.restype = None
_p = ctypes.c_void_p
_mla.argtypes = [ctypes.c_int, _p, _p, _p, _p, _p, _p, ctypes.c_double, _p, _p]


def mla_paged_decode(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale,
                     out=None, lse=None):
    B = q_nope.shape[0]
    if out is None:
        out = torch.empty((B, 16, 512), dtype=torch.bfloat16)
    if lse is None:
        lse = torch.empty((B, 16), dtype=torch.float32)
    _mla(B, q_nope.data_ptr(), q_pe.data_ptr(), ckv_cache.data_ptr(), kpe_cache.data_ptr(),
         kv_indptr.data_ptr(), kv_indices.data_ptr(), sm_scale, out.data_ptr(), lse.data_ptr())
    return out, lse
