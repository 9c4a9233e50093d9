/* Products of a few rows with int8, int4, int3 or int2 codes. cpu.py compiles them for the processor at hand, and
   nbs/02_kernels/04_cpu.ipynb explains them; cpu_block.c makes a decoder block of them. The part at the end is read once for each width of registers,
   with BITS set: this file includes itself. */
#ifndef BITS

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define WIDTH 64
#define DOT(s, u, d) (lanes)_mm512_dpbusd_epi32((__m512i)(s), (__m512i)(u), (__m512i)(d))
#define HALVED(s) _mm256_add_epi32(_mm512_castsi512_si256((__m512i)(s)), _mm512_extracti64x4_epi64((__m512i)(s), 1))
#elif defined(__AVXVNNI__)
#define WIDTH 32
#define DOT(s, u, d) (lanes)_mm256_dpbusd_avx_epi32((__m256i)(s), (__m256i)(u), (__m256i)(d))
#define HALVED(s) (__m256i)(s)
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define WIDTH 32
#define DOT(s, u, d) (lanes)dot((__m256i)(s), (__m256i)(u), (__m256i)(d))
#define HALVED(s) (__m256i)(s)
#else
#error no int8 products
#endif

/* codes are asked for a turn of C rows and so many bytes before they are read, one line behind the other, whatever the
   order in which they are read: lines of several rows in turn come from memory at a third of the rate */
#define AHEAD 2048
#define ASK(codes, C, line, at, c, step) \
    __builtin_prefetch((const char *)(codes) + (C) * ((line) + (at)) + (c) * (step) + AHEAD)
#define INLINE static inline __attribute__((always_inline))
typedef uint32_t lanes __attribute__((vector_size(WIDTH)));

#if WIDTH == 32 && !defined(__AVXVNNI__)
/* s + u * d of four bytes, u of up to 7 bits: two products fit into 16 bits */
INLINE __m256i dot7(__m256i s, __m256i u, __m256i d, const int16_t unit) {
    return _mm256_add_epi32(s, _mm256_madd_epi16(_mm256_maddubs_epi16(u, d), _mm256_set1_epi16(unit)));
}
/* the same for u of 8 bits, the highest in a product of its own */
INLINE __m256i dot(__m256i s, __m256i u, __m256i d) {
    __m256i high = _mm256_and_si256(_mm256_srli_epi16(u, 7), _mm256_set1_epi8(1));
    return dot7(dot7(s, _mm256_and_si256(u, _mm256_set1_epi8(127)), d, 1), high, d, 128);
}
#endif

typedef struct { /* a matrix of codes, as a packed layer has it */
    const void *codes, *scale;   /* (N, K / 8 * bits); (N,) float32 where bits is 8, else (N, K / group) float16 */
    const uint16_t *zero;        /* (N, K / group) float16 */
    const float *bias;           /* (N,), or NULL */
    int64_t N, K, group, bits;   /* group: 32, 64 or 128, and 0 where bits is 8 */
} Matrix;

typedef struct { /* rows of x, up to 16, as digits: what every row of codes is multiplied by */
    int64_t M, width, G, padded; /* columns with zeros behind K; groups, and with zeros behind them */
    int8_t *d;                   /* (M, 3, width), aligned to 64 */
    float *groups;               /* (M, padded): the sum of each group */
    uint32_t sums[4 * 16];       /* 128 times the sums of the digits, and 0 */
    float units[16], offs[16];
} Rows;


/* ---- a row of x as digits */

static inline lanes load(const void *p) { lanes v; memcpy(&v, p, WIDTH); return v; }
static inline float as_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t as_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

static inline uint16_t bfloat16(float f) { /* to nearest, ties to even */
    uint32_t u = as_bits(f);
    return (u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* a row of x (float32, or bfloat16 in h) -> its digits (3, width) with zeros behind K, 128 times their sums (and 0),
   its unit, and what is to be taken off in the end: a row of numbers whose unit would have few bits is lifted first */
static inline float digits(const float *x, const uint16_t *h, int64_t K, int64_t width,
                           int8_t *d, uint32_t *sums, float *off) {
    uint32_t top = 0, low = 0, middle = 0, high = 0;
    for (int64_t k = 0; k < K; k++) {
        uint32_t u = (h ? (uint32_t)h[k] << 16 : as_bits(x[k])) & 0x7fffffff;
        top = u > top ? u : top;
    }
    float lift = top < as_bits(1e-30f) ? 0x1p64f : 1;
    float unit = top < 0x7f800000 ? as_float(top) * lift * (float)(1.0 / 8350000) : as_float(0x7fc00000);
    *off = 1 / lift;
    for (int64_t k = 0; k < K; k++) {
        int32_t b = (int32_t)((h ? as_float((uint32_t)h[k] << 16) : x[k]) * lift / unit + 0x808080) ^ 0x808080;
        d[k] = b;
        d[width + k] = b >> 8;
        d[2 * width + k] = b >> 16;
        low += (int8_t)b;
        middle += (int8_t)(b >> 8);
        high += (int8_t)(b >> 16);
    }
    for (int j = 0; j < 3; j++) memset(d + j * width + K, 0, width - K);
    sums[0] = 128 * low;
    sums[1] = 128 * middle;
    sums[2] = 128 * high;
    sums[3] = 0;
    return unit;
}


/* ---- int8 */

static inline __m128i four(lanes s) { /* lanes of the same sum */
    __m256i h = HALVED(s);
    return _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
}

#define CHUNK(codes, at) { \
    lanes v = load(codes) ^ 0x80808080; \
    for (int r = 0; r < R; r++) \
        for (int j = 0; j < 3; j++) s[r][c][j] = DOT(s[r][c][j], v, load(d + (3 * r + j) * width + (at))); }

/* R rows of x times C rows of codes, R * C up to 4 */
INLINE void rows(const int R, const int C, const int8_t *d, const uint32_t *sums, const float *units, const float *offs,
                 int64_t width, const int8_t *codes, const float *scale, int64_t K, float *y, uint16_t *yh, int64_t N) {
    lanes s[4][4][3];
    int64_t k = 0;
    for (int r = 0; r < R; r++) for (int c = 0; c < C; c++) for (int j = 0; j < 3; j++) s[r][c][j] = (lanes){0};
    for (; k + WIDTH <= K; k += WIDTH)
        for (int c = 0; c < C; c++) {
            ASK(codes, C, K, k, c, WIDTH);
            CHUNK(codes + c * K + k, k)
        }
    if (k < K)
        for (int c = 0; c < C; c++) {
            int8_t last[WIDTH] = {0};
            ASK(codes, C, K, k, c, K - k);
            memcpy(last, codes + c * K + k, K - k);
            CHUNK(last, k)
        }
    for (int r = 0; r < R; r++) for (int c = 0; c < C; c++) {
        __m128i sum = _mm_hadd_epi32(_mm_hadd_epi32(four(s[r][c][0]), four(s[r][c][1])),
                                     _mm_hadd_epi32(four(s[r][c][2]), _mm_setzero_si128()));
        float t[4];
        _mm_storeu_ps(t, _mm_cvtepi32_ps(_mm_sub_epi32(sum, _mm_loadu_si128((const __m128i *)(sums + 4 * r)))));
        float out = (t[0] + 256 * (t[1] + 256 * t[2])) * units[r] * scale[c] * offs[r];
        if (yh) yh[r * N + c] = bfloat16(out);
        else y[r * N + c] = out;
    }
}

/* rows of x and of codes at a time: four of one, two of both, or one and four */
#define EVERY(MANY) { \
    int64_t n = begin; \
    for (; x->M == 1 && n + 4 <= end; n += 4) MANY(1, 4) \
    for (; x->M == 2 && n + 2 <= end; n += 2) MANY(2, 2) \
    for (; n < end; n++) { \
        for (m = 0; m + 4 <= x->M; m += 4) MANY(4, 1) \
        for (; m + 2 <= x->M; m += 2) MANY(2, 1) \
        for (; m < x->M; m++) MANY(1, 1) \
    } }

static void int8_part(const Rows *x, const Matrix *w, float *y, uint16_t *yh, int64_t begin, int64_t end) {
    int64_t m = 0;
#define ROWS(R, C) \
    rows(R, C, x->d + 3 * m * x->width, x->sums + 4 * m, x->units + m, x->offs + m, x->width, \
         (const int8_t *)w->codes + n * w->K, (const float *)w->scale + n, w->K, \
         y ? y + m * w->N + n : NULL, yh ? yh + m * w->N + n : NULL, w->N);
    EVERY(ROWS)
}


/* ---- registers of two widths */

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define DOT256 _mm256_dpbusd_epi32
#elif defined(__AVXVNNI__)
#define DOT256 _mm256_dpbusd_avx_epi32
#else
#define DOT256(s, u, d) dot7(s, u, d, 1)
#endif
/* s + u * d + v * e, u and v of four bits */
#if WIDTH == 64 || defined(__AVXVNNI__)
#define BOTH256(s, u, d, v, e) DOT256(DOT256(s, u, d), v, e)
#define BOTH512(s, u, d, v, e) DOT512(DOT512(s, u, d), v, e)
#else
INLINE __m256i BOTH256(__m256i s, __m256i u, __m256i d, __m256i v, __m256i e) {
    __m256i two = _mm256_add_epi16(_mm256_maddubs_epi16(u, d), _mm256_maddubs_epi16(v, e));
    return _mm256_add_epi32(s, _mm256_madd_epi16(two, _mm256_set1_epi16(1)));
}
#endif
#define DOT512 _mm512_dpbusd_epi32
INLINE __m256i spread256(const uint8_t *c, const int bytes) { /* the same bytes, as often as they fit */
    int64_t many = 0;
    int32_t four = 0;
    if (bytes == 32) return _mm256_loadu_si256((const void *)c);
    if (bytes == 16) return _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)c));
    if (bytes == 8) {
        memcpy(&many, c, 8);
        return _mm256_set1_epi64x(many);
    }
    memcpy(&four, c, 4);
    return _mm256_set1_epi32(four);
}
INLINE __m256 spread_floats256(const float *s, const int groups) { /* so many, each over its share of the lanes */
    if (groups < 2) return _mm256_set1_ps(s[0]);
    return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(s)), _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
}
#if WIDTH == 64
INLINE __m512 spread_floats512(const float *s, const int groups) {
    if (groups < 2) return _mm512_set1_ps(s[0]);
    __m512i two = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    __m512i four = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutexvar_ps(groups == 2 ? two : four, _mm512_castps128_ps512(_mm_loadu_ps(s)));
}
INLINE __m512i spread512(const uint8_t *c, const int bytes) {
    if (bytes == 32) return _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)c));
    return _mm512_broadcast_i32x4(_mm256_castsi256_si128(spread256(c, bytes)));
}
#endif
/* the first n bytes, and zeros */
INLINE __m256i up_to256(const uint8_t *c, int64_t n) {
    uint8_t last[32] = {0};
    memcpy(last, c, n);
    return _mm256_loadu_si256((const void *)last);
}
#if WIDTH == 64
INLINE __m512i up_to512(const uint8_t *c, int64_t n) { return _mm512_maskz_loadu_epi8(((uint64_t)1 << n) - 1, c); }
#endif
#define ADDED512 _mm512_reduce_add_ps
static inline float ADDED256(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

#define GLUE(a, b, c, d) a##b##c##d
#define GLUED(a, b, c, d) GLUE(a, b, c, d) /* BITS is a number by then */
#define OF(name) GLUED(name, BITS, , )     /* DOT256 */
#define MM(name) GLUED(_mm, BITS, name, )  /* _mm256_setzero_ps */
#define MMI(name) GLUED(_mm, BITS, name, BITS) /* _mm256_and_si256 */
#define FLOATS GLUED(__m, BITS, , )        /* __m256 */
#define INTS GLUED(__m, BITS, i, )         /* __m256i */

#define BITS 256
#include "cpu.c"
#undef BITS
#if WIDTH == 64
#define BITS 512
#include "cpu.c"
#undef BITS
#define WIDEST rows512
#define WIDEST_LOW low512
#else
#define WIDEST rows256
#define WIDEST_LOW low256
#endif


/* ---- int4, int3 and int2 */

/* scales of a row of codes, and its zero points less the middle code, as float32; zeros behind them */
static inline void widen(const Matrix *w, int64_t G, int64_t n, float *scales, float *zeros) {
    const uint16_t *s = (const uint16_t *)w->scale + n * G, *z = w->zero + n * G;
    const float middle = (float)(1 << (w->bits - 1));
#if WIDTH == 64
    for (int64_t g = 0; g < G; g += 16) {
        __mmask16 some = G - g < 16 ? (1 << (G - g)) - 1 : 0xffff; /* what is behind them must not be read */
        __m512 wide = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(some, s + g));
        _mm512_storeu_ps(scales + g, wide);
        _mm512_storeu_ps(zeros + g, _mm512_fnmadd_ps(_mm512_set1_ps(middle), wide,
                                                     _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(some, z + g))));
    }
#else
    for (int64_t g = 0; g < G; g += 8) {
        uint16_t part[16] = {0};
        memcpy(part, s + g, (G - g < 8 ? G - g : 8) * 2);
        memcpy(part + 8, z + g, (G - g < 8 ? G - g : 8) * 2);
        __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128((const void *)part));
        _mm256_storeu_ps(scales + g, wide);
        _mm256_storeu_ps(zeros + g, _mm256_fnmadd_ps(_mm256_set1_ps(middle), wide,
                                                     _mm256_cvtph_ps(_mm_loadu_si128((const void *)(part + 8)))));
    }
#endif
}

/* codes of one kind, known where this is compiled */
INLINE void groups_of(const int bits, const int group, const Rows *x, const Matrix *w, float *y, uint16_t *yh,
                      int64_t begin, int64_t end) {
    const int64_t G = x->G, padded = x->padded, line = w->K / 8 * bits;
    float scales[4 * 2048 + 16], zeros[4 * 2048 + 16];
    int64_t m = 0;
#define KERNEL(F, R, C, ...) \
    F(R, C, __VA_ARGS__, x->d + 3 * m * x->width, x->groups + m * padded, x->units + m, x->offs + m, x->width, \
      (const uint8_t *)w->codes + n * line, line, scales, zeros, padded, \
      y ? y + m * w->N + n : NULL, yh ? yh + m * w->N + n : NULL, w->N)
#define GROUPS(R, C) { \
    if (m == 0) for (int c = 0; c < C; c++) widen(w, G, n + c, scales + c * padded, zeros + c * padded); \
    if (bits == 4) KERNEL(WIDEST, R, C, group); \
    else if (group == 32) KERNEL(low256, R, C, 32, bits, G); \
    else KERNEL(WIDEST_LOW, R, C, group, bits, G); }
    EVERY(GROUPS)
}

static void group_part(const Rows *x, const Matrix *w, float *y, uint16_t *yh, int64_t begin, int64_t end) {
#define KIND(BITS_, GROUP) \
    if (w->bits == BITS_ && w->group == GROUP) groups_of(BITS_, GROUP, x, w, y, yh, begin, end);
    KIND(4, 128) KIND(4, 64) KIND(4, 32)
    KIND(3, 128) KIND(3, 64) KIND(3, 32)
    KIND(2, 128) KIND(2, 64) KIND(2, 32)
}


/* ---- all of it */

static inline int64_t multiple(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* how large x->d and x->groups are to be */
static int64_t digit_bytes(int64_t M, int64_t K) { return M * 3 * multiple(K, 128); }
static int64_t group_floats(int64_t M, int64_t K) { return M * multiple(K / 32, 8); }

/* a row of digits for codes of four bits: of every 128, those of the lower halves of WIDTH bytes, then of the upper ones */
static inline void arrange(int8_t *d, int64_t width, int64_t group) {
    const int64_t bytes = group / 2, step = bytes < WIDTH ? bytes : WIDTH;
    for (int8_t *own = d; own < d + width; own += 128) {
        int8_t before[128];
        memcpy(before, own, 128);
        for (int64_t p = 0; p < 64; p += step) {
            const int8_t *from = before + p / bytes * group + p % bytes;
            int8_t *to = own + p / WIDTH * 2 * WIDTH + p % WIDTH;
            memcpy(to, from, step);
            memcpy(to + WIDTH, from + bytes, step);
        }
    }
}

/* M rows of x, float32, or bfloat16 in h, as a matrix wants them */
static void read_rows(Rows *x, const float *f, const uint16_t *h, int64_t M, const Matrix *w) {
    const int64_t K = w->K, group = w->group;
    x->M = M;
    x->width = multiple(K, 128);
    x->G = group ? K / group : 0;
    x->padded = multiple(x->G, 8);
    for (int64_t m = 0; m < M; m++) {
        int8_t *own = x->d + 3 * m * x->width;
        float *groups = x->groups + m * x->padded;
        x->units[m] = digits(h ? NULL : f + m * K, h ? h + m * K : NULL, K, x->width, own, x->sums + 4 * m, x->offs + m);
        for (int64_t g = 0; g < x->padded; g++) {
            int32_t sum = 0;
            for (int64_t k = g * group; k < (g + 1) * group && g < x->G; k++)
                sum += own[k] + own[x->width + k] * 256 + own[2 * x->width + k] * 65536;
            groups[g] = (float)sum;
        }
        if (w->bits == 4)
            for (int j = 0; j < 3; j++) arrange(own + j * x->width, x->width, group);
    }
}

/* what rows of codes from begin to end give, for y (M, N) float32, or bfloat16 in yh; without the bias */
static void product(const Rows *x, const Matrix *w, float *y, uint16_t *yh, int64_t begin, int64_t end) {
    if (w->bits == 8) int8_part(x, w, y, yh, begin, end);
    else group_part(x, w, y, yh, begin, end);
}

/* x (M, K) times w to y (M, N), float32, or bfloat16 where half is set; 1: no memory */
static int multiply(const void *x, const Matrix *w, void *y, int64_t M, int half, int threads) {
    Rows r = {.d = aligned_alloc(64, digit_bytes(M, w->K)), .groups = malloc(group_floats(M, w->K) * sizeof(float) + 1)};
    if (r.d && r.groups) {
        read_rows(&r, x, half ? x : NULL, M, w);
        #pragma omp parallel for schedule(static) num_threads(threads)
        for (int i = 0; i < threads; i++)
            product(&r, w, half ? NULL : y, half ? y : NULL, w->N * i / threads, w->N * (i + 1) / threads);
    }
    int lacks = !r.d || !r.groups;
    free(r.d);
    free(r.groups);
    return lacks;
}

int int8_rows(const void *x, const void *codes, const float *scale, void *y,
              int64_t M, int64_t N, int64_t K, int half, int threads) {
    Matrix w = {codes, scale, NULL, NULL, N, K, 0, 8};
    return multiply(x, &w, y, M, half, threads);
}

int group_rows(const void *x, const void *codes, const uint16_t *scale, const uint16_t *zero, void *y,
               int64_t M, int64_t N, int64_t K, int64_t group, int64_t bits, int half, int threads) {
    Matrix w = {codes, scale, zero, NULL, N, K, group, bits};
    return multiply(x, &w, y, M, half, threads);
}

#else


/* ---- int4, in registers of BITS bits */

/* what the groups gave, and their zero points, to R rows of y */
INLINE void OF(finish)(const int R, const int C, FLOATS total[4][4], const float *sums, const float *units, const float *offs,
                       const float *zero, int64_t padded, float *y, uint16_t *yh, int64_t N) {
    for (int r = 0; r < R; r++) for (int c = 0; c < C; c++) {
        __m256 rest = _mm256_setzero_ps();
        for (int64_t g = 0; g < padded; g += 8)
            rest = _mm256_fmadd_ps(_mm256_loadu_ps(zero + c * padded + g), _mm256_loadu_ps(sums + r * padded + g), rest);
        float out = (OF(ADDED)(total[r][c]) + ADDED256(rest)) * units[r] * offs[r];
        if (yh) yh[r * N + c] = bfloat16(out);
        else y[r * N + c] = out;
    }
}

#define SOME(from, at) { \
    INTS v = from; \
    INTS lower = MMI(_and_si)(v, MM(_set1_epi8)(15)), upper = MMI(_and_si)(MM(_srli_epi16)(v, 4), MM(_set1_epi8)(15)); \
    FLOATS scales = OF(spread_floats)(scale + c * padded + (at) * 2 / group, BITS * 2 / 8 / group); \
    for (int r = 0; r < R; r++) { \
        INTS s = MMI(_setzero_si)(); \
        for (int j = 2; j >= 0; j--) { \
            const int8_t *own = d + (3 * r + j) * width + 2 * (at); \
            s = OF(BOTH)(s, lower, MMI(_loadu_si)((const void *)own), \
                         upper, MMI(_loadu_si)((const void *)(own + BITS / 8))); \
            if (j) s = MM(_slli_epi32)(s, 8); \
        } \
        total[r][c] = MM(_fmadd_ps)(scales, MM(_cvtepi32_ps)(s), total[r][c]); \
    } }

/* R rows of x, in the order of `arrange`, times C rows of codes, R * C up to 4; a register of bytes at a time, whatever
   groups they belong to; sums: of x's groups, (R, padded) */
INLINE void OF(rows)(const int R, const int C, const int group, const int8_t *d, const float *sums, const float *units,
                     const float *offs, int64_t width, const uint8_t *codes, int64_t line, const float *scale,
                     const float *zero, int64_t padded, float *y, uint16_t *yh, int64_t N) {
    FLOATS total[4][4];
    int64_t at = 0;
    for (int r = 0; r < R; r++) for (int c = 0; c < C; c++) total[r][c] = MM(_setzero_ps)();
    for (; at + BITS / 8 <= line; at += BITS / 8)
        for (int c = 0; c < C; c++) {
            ASK(codes, C, line, at, c, BITS / 8);
            SOME(MMI(_loadu_si)((const void *)(codes + c * line + at)), at)
        }
    if (at < line)
        for (int c = 0; c < C; c++) {
            ASK(codes, C, line, at, c, line - at);
            SOME(OF(up_to)(codes + c * line + at, line - at), at)
        }
    OF(finish)(R, C, total, sums, units, offs, zero, padded, y, yh, N);
}

#undef SOME


/* ---- int3 and int2, in registers of BITS bits */

/* R rows of x times C rows of codes; a register holds several planes of a group, each shifted by what is its own */
INLINE void OF(low)(const int R, const int C, const int group, const int bits, int64_t G, const int8_t *d, const float *sums,
                    const float *units, const float *offs, int64_t width, const uint8_t *codes, int64_t line,
                    const float *scale, const float *zero, int64_t padded, float *y, uint16_t *yh, int64_t N) {
    const int parts = group * 8 / BITS;          /* registers of a group */
    FLOATS total[4][4];
    INTS two[4], one[4];                         /* how far each plane lies from the right: of two bits, of one */
    for (int r = 0; r < R; r++) for (int c = 0; c < C; c++) total[r][c] = MM(_setzero_ps)();
    for (int p = 0; p < parts; p++) {
        int32_t low[BITS / 32], top[BITS / 32];
        for (int i = 0; i < BITS / 32; i++) {
            int column = p * BITS / 8 + 4 * i;
            low[i] = column / (group / 4) * 2;
            top[i] = column / (group / 8);
        }
        two[p] = MMI(_loadu_si)((const void *)low);
        one[p] = MMI(_loadu_si)((const void *)top);
    }
    for (int64_t g = 0; g < G; g++) for (int c = 0; c < C; c++) {
        const uint8_t *b = codes + c * line + g * (group / 8 * bits);
        INTS s[4], u[4];
        ASK(codes, C, line, b - codes - c * line, c, group / 8 * bits);
        for (int r = 0; r < R; r++) s[r] = MMI(_setzero_si)();
        for (int p = 0; p < parts; p++) {
            u[p] = MMI(_and_si)(MM(_srlv_epi32)(OF(spread)(b, group / 4), two[p]), MM(_set1_epi8)(3));
            if (bits == 3) {
                INTS high = MM(_srlv_epi32)(OF(spread)(b + group / 4, group / 8), one[p]);
                u[p] = MMI(_or_si)(u[p], MM(_slli_epi32)(MMI(_and_si)(high, MM(_set1_epi8)(1)), 2));
            }
        }
        for (int j = 2; j >= 0; j--) {
            for (int p = 0; p < parts; p++)
                for (int r = 0; r < R; r++) {
                    const int8_t *at = d + (3 * r + j) * width + group * g + p * BITS / 8;
                    s[r] = OF(DOT)(s[r], u[p], MMI(_loadu_si)((const void *)at));
                }
            if (j)
                for (int r = 0; r < R; r++) s[r] = MM(_slli_epi32)(s[r], 8);
        }
        for (int r = 0; r < R; r++)
            total[r][c] = MM(_fmadd_ps)(MM(_set1_ps)(scale[c * padded + g]), MM(_cvtepi32_ps)(s[r]), total[r][c]);
    }
    OF(finish)(R, C, total, sums, units, offs, zero, padded, y, yh, N);
}

#endif
