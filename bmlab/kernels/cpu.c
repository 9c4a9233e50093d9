/* Products of a few rows with int8, int4, int3 or int2 codes. cpu.py compiles them for the processor at hand, and
   nbs/02_kernels/04_cpu.ipynb explains them; cpu_block.c makes a decoder block of them. The part at the end is read
   once for each width of registers, with BITS set: this file includes itself. */
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
#else
#error no int8 products
#endif

/* where a processor has no product of bytes that sums into 32 bits, a number of x meets int8 codes as two pieces of 12
   bits, both widened to 16: two products instead of the six that three digits would take */
#if WIDTH == 32 && !defined(__AVXVNNI__)
#define PIECES 1
#else
#define PIECES 0
#endif

/* codes are asked for a turn of C rows and so many bytes before they are read, one line behind the other, whatever the
   order in which they are read: lines of several rows in turn come from memory at a third of the rate */
#define AHEAD 2048
#define ASK(codes, C, line, at, c, step) \
    __builtin_prefetch((const char *)(codes) + (C) * ((line) + (at)) + (c) * (step) + AHEAD)
/* a sum is added to now: gcc would keep many products in memory, to add them in another order */
#define HERE(sum) __asm__("" : "+x"(sum))
#define INLINE static inline __attribute__((always_inline))
#define ALONE static __attribute__((noinline))
typedef uint32_t lanes __attribute__((vector_size(WIDTH)));

#if PIECES
/* s + u * d of four bytes, u of up to 7 bits: two products fit into 16 bits */
INLINE __m256i dot7(__m256i s, __m256i u, __m256i d, const int16_t unit) {
    return _mm256_add_epi32(s, _mm256_madd_epi16(_mm256_maddubs_epi16(u, d), _mm256_set1_epi16(unit)));
}
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define DOT256 _mm256_dpbusd_epi32
#elif defined(__AVXVNNI__)
#define DOT256 _mm256_dpbusd_avx_epi32
#else
#define DOT256(s, u, d) dot7(s, u, d, 1)
#endif

typedef struct { /* a matrix of codes, as a packed layer has it */
    const void *codes, *scale;   /* (N, K / 8 * bits); (N,) float32 where bits is 8, else (N, K / group) float16 */
    const uint16_t *zero;        /* (N, K / group) float16 */
    const float *bias;           /* (N,), or NULL */
    int64_t N, K, group, bits;   /* group: 32, 64 or 128, and 0 where bits is 8 */
    int64_t inputs;              /* 8: x is rounded to int8, in blocks of 32 or of the codes' group; else 0 */
} Matrix;

typedef struct { /* rows of x, up to 16, as digits: what every row of codes is multiplied by */
    int64_t M, width, G, padded; /* columns with zeros behind K; groups, and with zeros behind them */
    int64_t D;                   /* digits of a number: 3 of a unit for the row, or 2 or 1 of one for each group */
    int8_t *d;                   /* (M, D, width), aligned to 64; or pieces, (M, 2, width) of 16 bits */
    float *groups;               /* (2, M, padded): the sum of each group; where D is below 3, its unit */
    uint32_t sums[4 * 16];       /* 128 times the sums of the digits, and 0 */
    float units[16], offs[16];
} Rows;


/* ---- a row of x as digits */

static inline int64_t multiple(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
static inline lanes load(const void *p) { lanes v; memcpy(&v, p, WIDTH); return v; }
static inline float as_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t as_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

static inline uint16_t bfloat16(float f) { /* to nearest, ties to even */
    uint32_t u = as_bits(f);
    return (u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* the unit of a row of x (float32, or bfloat16 in h): its numbers are whole ones of up to 24 bits then; and a power of
   two by which a row whose unit would have few bits is lifted first */
static inline float unit_of(const float *x, const uint16_t *h, int64_t K, float *lift) {
    uint32_t top = 0;
    for (int64_t k = 0; k < K; k++) {
        uint32_t u = (h ? (uint32_t)h[k] << 16 : as_bits(x[k])) & 0x7fffffff;
        top = u > top ? u : top;
    }
    *lift = top < as_bits(1e-30f) ? 0x1p64f : 1;
    return top < 0x7f800000 ? as_float(top) * *lift * (float)(1.0 / 8350000) : as_float(0x7fc00000);
}
#define WHOLE(k) (int32_t)((h ? as_float((uint32_t)h[k] << 16) : x[k]) * lift / unit + 0x808080) /* and 0x808080 */

/* a row of x -> its digits (3, width) with zeros behind K, 128 times their sums (and 0), its unit, and what is to be
   taken off in the end */
static inline float digits(const float *x, const uint16_t *h, int64_t K, int64_t width,
                           int8_t *d, uint32_t *sums, float *off) {
    uint32_t low = 0, middle = 0, high = 0;
    float lift, unit = unit_of(x, h, K, &lift);
    *off = 1 / lift;
    for (int64_t k = 0; k < K; k++) {
        int32_t b = WHOLE(k) ^ 0x808080;
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

/* the same of numbers with the 8 bits of bfloat16, which need no third digit: a unit for each group, a power of two,
   and digits (2, width). Numbers down to a 128th of the largest of their group are kept as they are, others to 2^-15 */
static inline float group_digits(const float *x, const uint16_t *h, int64_t K, int64_t group, int64_t width,
                                 int8_t *d, float *units, float *off) {
    float lift, all = unit_of(x, h, K, &lift);
    *off = 1 / lift;
    for (int64_t begin = 0; begin < K; begin += group) {
        uint32_t top = 0;
        for (int64_t k = begin; k < begin + group; k++) {
            uint32_t u = (h ? (uint32_t)h[k] << 16 : as_bits(x[k])) & 0x7fffffff;
            top = u > top ? u : top;
        }
        /* (the largest mantissa's upper digit would be 128) */
        const float below = (top >> 16 & 0x7f) == 0x7f ? 0x1p-13f : 0x1p-14f;
        const float two = as_float(as_bits(as_float(top) * lift) & 0x7f800000) * below;
        const float unit = two > 0x1p-120f ? two : 0x1p-120f, many = 1 / unit;
        units[begin / group] = top < 0x7f800000 ? unit : as_float(0x7fc00000);
        for (int64_t k = begin; k < begin + group; k++) {
            float f = (h ? as_float((uint32_t)h[k] << 16) : x[k]) * lift * many;
            int32_t b = (int32_t)(f + 0x808080) ^ 0x808080;
            d[k] = b;
            d[width + k] = b >> 8;
        }
    }
    for (int j = 0; j < 2; j++) memset(d + j * width + K, 0, width - K);
    return all == all ? 1 : all;
}

/* eight numbers of a row, float32, or bfloat16 in h */
INLINE __m256 eight(const float *x, const uint16_t *h, int64_t k) {
    if (!h) return _mm256_loadu_ps(x + k);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(h + k))), 16));
}

/* the largest of eight numbers */
INLINE float largest(__m256 v) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}

/* a row of x rounded to int8 (llama.cpp's Q8_0): each block of `many` numbers to whole ones of a unit, a 127th of its
   largest; d: int8, or int16 where wide is set, (width,) with zeros behind K; units, and sums of the blocks */
static void one_digit(const float *x, const uint16_t *h, int64_t K, int64_t many, int64_t width, const int wide,
                      void *d, float *units, float *sums) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    for (int64_t begin = 0; begin < K; begin += many) {
        float last[128] = {0};
        const float *from = x ? x + begin : NULL;
        const uint16_t *half = h ? h + begin : NULL;
        if (begin + many > K) { /* (a matrix without groups may end inside a block) */
            for (int64_t k = begin; k < K; k++) last[k - begin] = h ? as_float((uint32_t)h[k] << 16) : x[k];
            from = last, half = NULL;
        }
        __m256 most = _mm256_setzero_ps(), odd = most;
        for (int64_t k = 0; k < many; k += 8) {
            __m256 v = eight(from, half, k);
            most = _mm256_max_ps(_mm256_andnot_ps(sign, v), most);
            odd = _mm256_or_ps(odd, _mm256_sub_ps(v, v)); /* (undefined where a number is not finite) */
        }
        const float top = largest(most), lift = top < 1e-30f ? 0x1p64f : 1, own = top * lift;
        const int bad = _mm256_movemask_ps(_mm256_cmp_ps(odd, odd, _CMP_UNORD_Q));
        const __m256 inverse = _mm256_set1_ps(own > 0 && !bad ? 127 / own : 0), up = _mm256_set1_ps(lift);
        __m256i sum = _mm256_setzero_si256();
        for (int64_t k = 0; k < many; k += 8) {
            __m256 v = _mm256_mul_ps(_mm256_mul_ps(eight(from, half, k), up), inverse);
            __m256i whole = bad ? _mm256_setzero_si256() : _mm256_cvtps_epi32(v);
            sum = _mm256_add_epi32(sum, whole);
            __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
            if (wide) _mm_storeu_si128((void *)((int16_t *)d + begin + k), words);
            else _mm_storel_epi64((void *)((int8_t *)d + begin + k), _mm_packs_epi16(words, words));
        }
        const float unit = bad ? as_float(0x7fc00000) : top / 127;
        int32_t part[8], all = 0;
        _mm256_storeu_si256((void *)part, sum);
        for (int i = 0; i < 8; i++) all += part[i];
        units[begin / many] = unit;
        sums[begin / many] = (float)all * unit;
    }
    const int64_t ready = (K + many - 1) / many * many;
    if (ready < width) memset((char *)d + ready * (wide ? 2 : 1), 0, (width - ready) * (wide ? 2 : 1));
}

/* the same as pieces of 12 bits (2, width), from -2048 to 2047 */
static inline float pieces(const float *x, const uint16_t *h, int64_t K, int64_t width, int16_t *d, float *off) {
    float lift, unit = unit_of(x, h, K, &lift);
    *off = 1 / lift;
    for (int64_t k = 0; k < K; k++) {
        int32_t b = WHOLE(k) - 0x808080 + 0x800;
        d[k] = (b & 0xfff) - 0x800;
        d[width + k] = b >> 12;
    }
    for (int j = 0; j < 2; j++) memset(d + j * width + K, 0, (width - K) * sizeof(*d));
    return unit;
}


/* ---- int8 */

/* the sums of four registers, in an order that is the same beside any others */
INLINE __m128i sums_of(__m256i a, __m256i b, __m256i c, __m256i d) {
    __m256i s = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
    return _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
}
INLINE __m128 floats_of(__m256 a, __m256 b, __m256 c, __m256 d) {
#define FOUR(v) _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1))
    __m128 e = FOUR(a), f = FOUR(b), g = FOUR(c), h = FOUR(d);
    _MM_TRANSPOSE4_PS(e, f, g, h);
    return _mm_add_ps(_mm_add_ps(e, g), _mm_add_ps(f, h));
}

#if PIECES

#define SPAN 8064 /* columns of which sums fit into 32 bits */
#define MADD(at, k) { \
    __m256i v = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(at))); \
    for (int r = 0; r < R; r++) \
        for (int j = 0; j < 2; j++) { \
            __m256i x = _mm256_loadu_si256((const void *)(d + (2 * r + j) * width + (k))); \
            s[j][r * C + c] = _mm256_add_epi32(s[j][r * C + c], _mm256_madd_epi16(v, x)); \
            HERE(s[j][r * C + c]); \
        } }

/* R rows of x, as pieces, times C rows of codes, R * C up to 4 */
INLINE void rows(const int R, const int C, const int8_t *digits, const uint32_t *sums, const float *units,
                 const float *offs, int64_t width, const int8_t *codes, const float *scale, int64_t K,
                 float *y, uint16_t *yh, int64_t N) {
    const int16_t *d = (const int16_t *)digits;
    __m256d total = _mm256_setzero_pd(); /* whole numbers: rounded once, as with digits */
    for (int64_t k = 0; k < K;) {
        const int64_t end = k + SPAN < K ? k + SPAN : K;
        __m256i s[2][4];
        for (int j = 0; j < 2; j++) for (int i = 0; i < 4; i++) s[j][i] = _mm256_setzero_si256();
        for (; k + 64 <= end; k += 64) {
            for (int c = 0; c < C; c++) ASK(codes, C, K, k, c, 64);
            for (int i = 0; i < 64; i += 16)
                for (int c = 0; c < C; c++) MADD(codes + c * K + k + i, k + i)
        }
        for (; k < end; k += 16)
            for (int c = 0; c < C; c++) {
                int8_t last[16] = {0};
                memcpy(last, codes + c * K + k, end - k < 16 ? end - k : 16);
                MADD(last, k)
            }
        k = end;
        __m128i low = sums_of(s[0][0], s[0][1], s[0][2], s[0][3]), high = sums_of(s[1][0], s[1][1], s[1][2], s[1][3]);
        __m256d own = _mm256_fmadd_pd(_mm256_cvtepi32_pd(high), _mm256_set1_pd(4096), _mm256_cvtepi32_pd(low));
        total = _mm256_add_pd(total, own);
    }
    float t[4];
    _mm_storeu_ps(t, _mm256_cvtpd_ps(total));
    for (int r = 0; r < R; r++) for (int c = 0; c < C; c++) {
        float out = t[r * C + c] * units[r] * scale[c] * offs[r];
        if (yh) yh[r * N + c] = bfloat16(out);
        else y[r * N + c] = out;
    }
}

#else

static inline __m256i half_of(lanes s) { return HALVED(s); } /* lanes of the same sum */

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
        __m128i sum = sums_of(half_of(s[r][c][0]), half_of(s[r][c][1]), half_of(s[r][c][2]), _mm256_setzero_si256());
        int32_t t[4];
        _mm_storeu_si128((void *)t, _mm_sub_epi32(sum, _mm_loadu_si128((const __m128i *)(sums + 4 * r))));
        float out = (float)(t[0] + 256 * (t[1] + 256 * (int64_t)t[2])) * units[r] * scale[c] * offs[r];
        if (yh) yh[r * N + c] = bfloat16(out);
        else y[r * N + c] = out;
    }
}

#endif

/* the same where x is rounded to int8, in blocks of 32: the sign of a code goes to the number that it meets */
#define BLOCK(at, k) { \
    __m256i v = _mm256_loadu_si256((const void *)(at)), u = _mm256_abs_epi8(v); \
    for (int r = 0; r < R; r++) { \
        __m256i x = _mm256_sign_epi8(_mm256_load_si256((const void *)(d + r * width + (k))), v); \
        __m256 s = _mm256_cvtepi32_ps(DOT256(_mm256_setzero_si256(), u, x)); \
        total[r * C + c] = _mm256_fmadd_ps(_mm256_broadcast_ss(units + r * padded + (k) / 32), s, total[r * C + c]); \
        HERE(total[r * C + c]); \
    } }
INLINE void short_rows(const int R, const int C, const int8_t *d, const float *units, int64_t padded, int64_t width,
                       const int8_t *codes, const float *scale, int64_t K, float *y, uint16_t *yh, int64_t N) {
    __m256 total[4];
    int64_t k = 0;
    for (int i = 0; i < 4; i++) total[i] = _mm256_setzero_ps();
    for (; k + 64 <= K; k += 64) {
        for (int c = 0; c < C; c++) ASK(codes, C, K, k, c, 64);
        for (int i = 0; i < 64; i += 32)
            for (int c = 0; c < C; c++) BLOCK(codes + c * K + k + i, k + i)
    }
    for (; k < K; k += 32)
        for (int c = 0; c < C; c++) {
            int8_t last[32] = {0};
            memcpy(last, codes + c * K + k, K - k < 32 ? K - k : 32);
            BLOCK(last, k)
        }
    float t[4];
    _mm_storeu_ps(t, floats_of(total[0], total[1], total[2], total[3]));
    for (int r = 0; r < R; r++) for (int c = 0; c < C; c++) {
        float out = t[r * C + c] * scale[c];
        if (yh) yh[r * N + c] = bfloat16(out);
        else y[r * N + c] = out;
    }
}

/* rows of x and of codes at a time: four of one, two of both, or one and four */
#define EVERY(MANY, ...) { \
    int64_t n = begin, m = 0; \
    for (; x->M == 1 && n + 4 <= end; n += 4) MANY(1, 4, __VA_ARGS__) \
    for (; x->M == 2 && n + 2 <= end; n += 2) MANY(2, 2, __VA_ARGS__) \
    for (; n < end; n++) { \
        for (m = 0; m + 4 <= x->M; m += 4) MANY(4, 1, __VA_ARGS__) \
        for (; m + 2 <= x->M; m += 2) MANY(2, 1, __VA_ARGS__) \
        for (; m < x->M; m++) MANY(1, 1, __VA_ARGS__) \
    } }
#define SHAPES(MAKE, ...) \
    MAKE(1, 4, __VA_ARGS__) MAKE(2, 2, __VA_ARGS__) MAKE(4, 1, __VA_ARGS__) MAKE(2, 1, __VA_ARGS__) \
    MAKE(1, 1, __VA_ARGS__)

/* each in a function of its own: where all are in one, gcc keeps their sums in memory */
#define MAKE(R, C, ...) \
ALONE void rows_##R##_##C(const Rows *x, const Matrix *w, float *y, uint16_t *yh, int64_t m, int64_t n) { \
    rows(R, C, x->d + (PIECES ? 4 : 3) * m * x->width, x->sums + 4 * m, x->units + m, x->offs + m, x->width, \
         (const int8_t *)w->codes + n * w->K, (const float *)w->scale + n, w->K, \
         y ? y + m * w->N + n : NULL, yh ? yh + m * w->N + n : NULL, w->N); }
SHAPES(MAKE)
#undef MAKE
#define MAKE(R, C, ...) \
ALONE void short_rows_##R##_##C(const Rows *x, const Matrix *w, float *y, uint16_t *yh, int64_t m, int64_t n) { \
    short_rows(R, C, x->d + m * x->width, x->groups + (x->M + m) * x->padded, x->padded, x->width, \
         (const int8_t *)w->codes + n * w->K, (const float *)w->scale + n, w->K, \
         y ? y + m * w->N + n : NULL, yh ? yh + m * w->N + n : NULL, w->N); }
SHAPES(MAKE)
#undef MAKE

static void int8_part(const Rows *x, const Matrix *w, float *y, uint16_t *yh, int64_t begin, int64_t end) {
#define ROWS(R, C, ...) rows_##R##_##C(x, w, y, yh, m, n);
#define SHORT_ROWS(R, C, ...) short_rows_##R##_##C(x, w, y, yh, m, n);
    if (x->D == 1) EVERY(SHORT_ROWS)
    else EVERY(ROWS)
}


/* ---- registers of two widths */

/* s and u * d + v * e of the digits j, from the highest: u and v of four bits; s is in units of the digits behind */
#if PIECES
INLINE __m256i BOTH256(__m256i s, __m256i u, __m256i d, __m256i v, __m256i e, const int j) {
    __m256i two = _mm256_add_epi16(_mm256_maddubs_epi16(u, d), _mm256_maddubs_epi16(v, e));
    s = _mm256_add_epi32(s, _mm256_madd_epi16(two, _mm256_set1_epi16(j ? 256 : 1))); /* the lower two need no shift */
    return j == 2 ? _mm256_slli_epi32(s, 8) : s;
}
#else
#define SHIFTED(s, bits, j) ((j) ? _mm##bits##_slli_epi32(s, 8) : (s))
#define BOTH256(s, u, d, v, e, j) SHIFTED(DOT256(DOT256(s, u, d), v, e), 256, j)
#define BOTH512(s, u, d, v, e, j) SHIFTED(DOT512(DOT512(s, u, d), v, e), 512, j)
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
/* the first n of four floats, and zeros: 0 * NaN would not be 0 */
INLINE __m128 up_to_four(const float *s, int64_t n) {
    return _mm_maskload_ps(s, _mm_cmpgt_epi32(_mm_set1_epi32((int)n), _mm_setr_epi32(0, 1, 2, 3)));
}
INLINE __m256 spread_floats256(__m128 s, const int groups) { /* so many, each over its share of the lanes */
    if (groups < 2) return _mm256_broadcastss_ps(s);
    return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(s), _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
}
#if WIDTH == 64
INLINE __m512 spread_floats512(__m128 s, const int groups) {
    if (groups < 2) return _mm512_broadcastss_ps(s);
    __m512i two = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    __m512i four = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutexvar_ps(groups == 2 ? two : four, _mm512_castps128_ps512(s));
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
/* which of eight floats are among the first n; what is behind them is the next row's, or nobody's */
INLINE __m256 own_groups(int64_t n) {
    const __m256i columns = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), columns));
}
/* eight numbers of the same sum */
#define HALVED256(v) (v)
#define HALVED512(v) \
    _mm256_add_ps(_mm512_castps512_ps256(v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)))

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

#define WIDENED (4 * 2048) /* scales that are widened at once, of four rows or more */
#define BEHIND 16          /* zeros behind them: whole registers are read, seven further at most */

typedef struct { /* what the kernels of one matrix share */
    const Rows *x;
    const Matrix *w;
    float *y;
    uint16_t *yh;
    int64_t first, ready;        /* rows of codes whose scales are here */
    float scales[WIDENED + BEHIND], zeros[WIDENED + BEHIND];
    float scaled[4 * 2048 + BEHIND]; /* of up to four products */
} Groups;

/* scales of many rows of codes from n on, and their zero points less the middle code, as float32, without gaps */
ALONE void widen(Groups *a, int64_t n) {
    const Matrix *w = a->w;
    const int64_t G = a->x->G, left = w->N - n, most = WIDENED / G;
    a->first = n;
    a->ready = n + (left < most ? left : most);
    const int64_t all = (a->ready - n) * G;
    const uint16_t *s = (const uint16_t *)w->scale + n * G, *z = w->zero + n * G;
    const float middle = (float)(1 << (w->bits - 1));
    for (int64_t i = 0; i < all; i += 8) {
        const void *from = s + i, *zero = z + i;
        uint16_t part[16] = {0};
        if (i + 8 > left * G) { /* what is behind the last row must not be read */
            memcpy(part, from, (all - i) * 2);
            memcpy(part + 8, zero, (all - i) * 2);
            from = part;
            zero = part + 8;
        }
        __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(from)), off = _mm256_cvtph_ps(_mm_loadu_si128(zero));
        _mm256_storeu_ps(a->scales + i, wide);
        _mm256_storeu_ps(a->zeros + i, _mm256_fnmadd_ps(_mm256_set1_ps(middle), wide, off));
    }
    memset(a->scales + all, 0, BEHIND * sizeof(float)); /* what is read there counts for nothing, if it is finite */
    memset(a->zeros + all, 0, BEHIND * sizeof(float));
}

/* scales of each product where a row of x has units for its groups: (R * C, padded) */
INLINE void scale_units(const int R, const int C, Groups *a, int64_t m, const float *scales) {
    const int64_t padded = a->x->padded;
    const float *units = a->x->groups + (a->x->M + m) * padded;
    for (int64_t g = 0; g < padded; g += 8) {
        const __m256 own = own_groups(a->x->G - g);
        for (int i = 0; i < R * C; i++)
            _mm256_storeu_ps(a->scaled + i * padded + g, _mm256_mul_ps(
                _mm256_and_ps(_mm256_loadu_ps(scales + i % C * a->x->G + g), own),
                _mm256_loadu_ps(units + i / C * padded + g)));
    }
}

/* R rows of x times C of codes of one kind, D digits; each in a function of its own, as for int8 */
#define MAKE(R, C, BITS_, GROUP, D) \
ALONE void groups_##BITS_##_##GROUP##_##D##_##R##_##C(Groups *a, int64_t m, int64_t n) { \
    const Rows *x = a->x; \
    const Matrix *w = a->w; \
    const int64_t padded = x->padded, line = w->K / 8 * BITS_; \
    if (n + C > a->ready) widen(a, n); \
    const float *scales = a->scales + (n - a->first) * x->G, *zeros = a->zeros + (n - a->first) * x->G; \
    if (D < 3) scale_units(R, C, a, m, scales); \
    KERNEL_##BITS_##_##GROUP(R, C, D, x->d + D * m * x->width, x->groups + m * padded, x->units + m, x->offs + m, \
        x->width, (const uint8_t *)w->codes + n * line, line, D < 3 ? a->scaled : scales, zeros, padded, x->G, \
        a->y ? a->y + m * w->N + n : NULL, a->yh ? a->yh + m * w->N + n : NULL, w->N); }
#define KERNEL_4_128(R, C, D, ...) WIDEST(R, C, D, 128, __VA_ARGS__)
#define KERNEL_4_64(R, C, D, ...) WIDEST(R, C, D, 64, __VA_ARGS__)
#define KERNEL_4_32(R, C, D, ...) WIDEST(R, C, D, 32, __VA_ARGS__)
#define KERNEL_3_128(R, C, D, ...) WIDEST_LOW(R, C, D, 128, 3, __VA_ARGS__)
#define KERNEL_3_64(R, C, D, ...) WIDEST_LOW(R, C, D, 64, 3, __VA_ARGS__)
#define KERNEL_3_32(R, C, D, ...) low256(R, C, D, 32, 3, __VA_ARGS__)
#define KERNEL_2_128(R, C, D, ...) WIDEST_LOW(R, C, D, 128, 2, __VA_ARGS__)
#define KERNEL_2_64(R, C, D, ...) WIDEST_LOW(R, C, D, 64, 2, __VA_ARGS__)
#define KERNEL_2_32(R, C, D, ...) low256(R, C, D, 32, 2, __VA_ARGS__)
#define KINDS(F) F(4, 128) F(4, 64) F(4, 32) F(3, 128) F(3, 64) F(3, 32) F(2, 128) F(2, 64) F(2, 32)
#define BOTH(BITS_, GROUP) \
    SHAPES(MAKE, BITS_, GROUP, 1) SHAPES(MAKE, BITS_, GROUP, 2) SHAPES(MAKE, BITS_, GROUP, 3)
KINDS(BOTH)

static void group_part(const Rows *x, const Matrix *w, float *y, uint16_t *yh, int64_t begin, int64_t end) {
    Groups a;
    a.x = x, a.w = w, a.y = y, a.yh = yh, a.first = a.ready = 0;
#define RUN(R, C, BITS_, GROUP, D) groups_##BITS_##_##GROUP##_##D##_##R##_##C(&a, m, n);
#define KIND(BITS_, GROUP) \
    if (w->bits == BITS_ && w->group == GROUP) { \
        if (x->D == 1) EVERY(RUN, BITS_, GROUP, 1) \
        else if (x->D == 2) EVERY(RUN, BITS_, GROUP, 2) \
        else EVERY(RUN, BITS_, GROUP, 3) \
    }
    KINDS(KIND)
}


/* ---- all of it */

/* how large x->d and x->groups are to be */
static int64_t digit_bytes(int64_t M, int64_t K) { return M * (PIECES ? 4 : 3) * multiple(K, 128); }
static int64_t group_floats(int64_t M, int64_t K) { return 2 * M * multiple((K + 31) / 32, 8); }

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

/* M rows of x, float32, or bfloat16 in h, as a matrix wants them; with half set, numbers in f have its bits too */
static void read_rows(Rows *x, const float *f, const uint16_t *h, int64_t M, const Matrix *w, const int half) {
    const int64_t K = w->K, group = w->group;
    x->M = M;
    x->width = multiple(K, 128);
    x->G = group ? K / group : 0;
    x->padded = multiple(x->G, 8);
    x->D = w->inputs == 8 ? 1 : half && group ? 2 : 3;
    if (x->D == 1) {
        const int64_t block = group ? group : 32, many = (K + block - 1) / block;
        x->padded = multiple(many, 8);
        for (int64_t m = 0; m < M; m++) {
            int8_t *own = x->d + m * x->width;
            float *sums = x->groups + m * x->padded, *units = sums + M * x->padded;
            one_digit(h ? NULL : f + m * K, h ? h + m * K : NULL, K, block, x->width, 0, own, units, sums);
            for (int64_t g = many; g < x->padded; g++) sums[g] = units[g] = 0;
            x->units[m] = x->offs[m] = 1;
            if (w->bits == 4) arrange(own, x->width, group);
        }
        return;
    }
    for (int64_t m = 0; m < M; m++) {
        const float *row = h ? NULL : f + m * K;
        const uint16_t *half_row = h ? h + m * K : NULL;
        if (PIECES && !group) {
            int16_t *own = (int16_t *)x->d + 2 * m * x->width;
            x->units[m] = pieces(row, half_row, K, x->width, own, x->offs + m);
            continue;
        }
        int8_t *own = x->d + x->D * m * x->width;
        float *groups = x->groups + m * x->padded, *units = groups + M * x->padded;
        if (x->D == 2) x->units[m] = group_digits(row, half_row, K, group, x->width, own, units, x->offs + m);
        else x->units[m] = digits(row, half_row, K, x->width, own, x->sums + 4 * m, x->offs + m);
        for (int64_t g = 0; g < x->G; g++) {
            int32_t low = 0, middle = 0, high = 0;
            for (int64_t k = g * group; k < (g + 1) * group; k++) {
                low += own[k];
                middle += own[x->width + k];
                if (x->D == 3) high += own[2 * x->width + k];
            }
            groups[g] = (float)(low + middle * 256 + high * 65536) * (x->D == 2 ? units[g] : 1);
        }
        for (int64_t g = x->G; g < x->padded; g++) groups[g] = units[g] = 0;
        if (w->bits == 4)
            for (int j = 0; j < x->D; j++) arrange(own + j * x->width, x->width, group);
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
        read_rows(&r, x, half ? x : NULL, M, w, half);
        #pragma omp parallel for schedule(static) num_threads(threads)
        for (int i = 0; i < threads; i++)
            product(&r, w, half ? NULL : y, half ? y : NULL, w->N * i / threads, w->N * (i + 1) / threads);
    }
    int lacks = !r.d || !r.groups;
    free(r.d);
    free(r.groups);
    return lacks;
}

#include "cpu_many.c"

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

/* the same with x rounded to int8, of any number of rows; bits 8: zero is NULL and group 0 */
int rounded_rows(const void *x, const void *codes, const void *scale, const uint16_t *zero, void *y,
                 int64_t M, int64_t N, int64_t K, int64_t group, int64_t bits, int half, int threads) {
    Matrix w = {codes, scale, zero, NULL, N, K, group, bits, 8};
    return M > 16 ? multiply_many(x, &w, y, M, half, threads) : multiply(x, &w, y, M, half, threads);
}

#else


/* ---- int4, in registers of BITS bits */

/* what the groups gave, and their zero points (C, G), to R rows of y */
INLINE void OF(finish)(const int R, const int C, const int D, const FLOATS *total, const float *sums,
                       const float *units, const float *offs, const float *zero, int64_t padded, int64_t G,
                       float *y, uint16_t *yh, int64_t N) {
    __m256 all[4], rest[4];
    for (int i = 0; i < 4; i++) {
        all[i] = i < R * C ? OF(HALVED)(total[i]) : _mm256_setzero_ps();
        rest[i] = D < 3 ? all[i] : _mm256_setzero_ps(); /* (with three digits a rounding more would be seen) */
    }
    for (int64_t g = 0; g < padded; g += 8) {
        const __m256 own = own_groups(G - g);
        for (int i = 0; i < R * C; i++)
            rest[i] = _mm256_fmadd_ps(_mm256_and_ps(_mm256_loadu_ps(zero + i % C * G + g), own),
                                      _mm256_loadu_ps(sums + i / C * padded + g), rest[i]);
    }
    __m128 whole = floats_of(rest[0], rest[1], rest[2], rest[3]);
    if (D == 3) whole = _mm_add_ps(floats_of(all[0], all[1], all[2], all[3]), whole);
    float t[4];
    _mm_storeu_ps(t, whole);
    for (int r = 0; r < R; r++) for (int c = 0; c < C; c++) {
        float out = t[r * C + c] * units[r] * offs[r];
        if (yh) yh[r * N + c] = bfloat16(out);
        else y[r * N + c] = out;
    }
}

/* codes in v times the digits of a row of x, in the order of `arrange` */
INLINE INTS OF(sum)(const int D, INTS v, const int8_t *d, int64_t width) {
    INTS s = MMI(_setzero_si)();
    INTS lower = MMI(_and_si)(v, MM(_set1_epi8)(15)), upper = MMI(_and_si)(MM(_srli_epi16)(v, 4), MM(_set1_epi8)(15));
    for (int j = D - 1; j >= 0; j--) {
        const int8_t *own = d + j * width, *more = own + BITS / 8;
        s = OF(BOTH)(s, lower, MMI(_loadu_si)((const void *)own), upper, MMI(_loadu_si)((const void *)more), j);
    }
    return s;
}

#define STEP(i, FROM, SCALE) \
    if (i < R * C) { \
        const int r = i / C, c = i % C; \
        const uint8_t *from = codes + c * line + at, *then = from + BITS / 8; \
        const int8_t *own = d + D * r * width + 2 * at; \
        INTS s = OF(sum)(D, FROM, own, width); \
        if (two) s = MM(_add_epi32)(s, OF(sum)(D, MMI(_loadu_si)((const void *)then), own + BITS / 4, width)); \
        const float *own_scale = scale + (D < 3 ? i * padded : c * G) + at * 2 / group; \
        total##i = MM(_fmadd_ps)(OF(spread_floats)(SCALE, BITS * 2 / 8 / group), MM(_cvtepi32_ps)(s), total##i); \
        HERE(total##i); \
    }
#define STEPS(FROM, SCALE) STEP(0, FROM, SCALE) STEP(1, FROM, SCALE) STEP(2, FROM, SCALE) STEP(3, FROM, SCALE)

/* R rows of x, in the order of `arrange`, times C rows of codes, R * C up to 4; a register of bytes at a time, or two
   of one group; sums: of x's groups, (R, padded); scale: of each row of codes, where D is below 3 of each product */
INLINE void OF(rows)(const int R, const int C, const int D, const int group, const int8_t *d, const float *sums,
                     const float *units, const float *offs, int64_t width, const uint8_t *codes, int64_t line,
                     const float *scale, const float *zero, int64_t padded, int64_t G,
                     float *y, uint16_t *yh, int64_t N) {
    const int two = D < 3 && group * 4 / BITS > 1, bytes = BITS / 8 * (1 + two);
    FLOATS total0 = MM(_setzero_ps)(), total1 = total0, total2 = total0, total3 = total0;
    int64_t at = 0;
    for (; at + bytes <= line; at += bytes) {
        for (int c = 0; c < C; c++) ASK(codes, C, line, at, c, bytes);
        STEPS(MMI(_loadu_si)((const void *)from), _mm_loadu_ps(own_scale))
    }
    if (at < line) {
        const int64_t there = G - at * 2 / group; /* groups in the last register */
        STEPS(OF(up_to)(from, line - at), up_to_four(own_scale, there))
    }
    const FLOATS total[4] = {total0, total1, total2, total3};
    OF(finish)(R, C, D, total, sums, units, offs, zero, padded, G, y, yh, N);
}

#undef STEP
#undef STEPS


/* ---- int3 and int2, in registers of BITS bits */

/* R rows of x times C rows of codes; a register holds several planes of a group, each shifted by what is its own */
INLINE void OF(low)(const int R, const int C, const int D, const int group, const int bits, const int8_t *d,
                    const float *sums, const float *units, const float *offs, int64_t width, const uint8_t *codes,
                    int64_t line, const float *scale, const float *zero, int64_t padded, int64_t G,
                    float *y, uint16_t *yh, int64_t N) {
    const int parts = group * 8 / BITS;          /* registers of a group */
    FLOATS total[4];
    INTS two[4], one[4];                         /* how far each plane lies from the right: of two bits, of one */
    for (int i = 0; i < 4; i++) total[i] = MM(_setzero_ps)();
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
        for (int j = D - 1; j >= 0; j--) {
            for (int p = 0; p < parts; p++)
                for (int r = 0; r < R; r++) {
                    const int8_t *at = d + (D * r + j) * width + group * g + p * BITS / 8;
                    s[r] = OF(DOT)(s[r], u[p], MMI(_loadu_si)((const void *)at));
                }
            if (j)
                for (int r = 0; r < R; r++) s[r] = MM(_slli_epi32)(s[r], 8);
        }
        for (int r = 0; r < R; r++) {
            const FLOATS own = MM(_set1_ps)(scale[(D < 3 ? (r * C + c) * padded : c * G) + g]);
            total[r * C + c] = MM(_fmadd_ps)(own, MM(_cvtepi32_ps)(s[r]), total[r * C + c]);
        }
    }
    OF(finish)(R, C, D, total, sums, units, offs, zero, padded, G, y, yh, N);
}

#endif
