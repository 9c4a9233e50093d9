/* Weights in ggml's blocks: widened to float32, multiplied by a few rows, and taken apart into scales and codes.
   blocks.py compiles this for the processor at hand; nbs/02_kernels/09_ggml.ipynb explains it. No sum is fused with a
   product (-ffp-contract=off), so that a weight has the bits that the gguf package gives it. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef float lanes __attribute__((vector_size(64)));
enum { Q4_0 = 2, Q4_1 = 3, Q8_0 = 8, Q4_K = 12, Q6_K = 14, MXFP4 = 39 }; /* the file's numbers of types */

static inline float as_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }

static inline float half(const uint8_t *p) { /* float16 -> float32, every bit pattern */
    uint32_t h = p[0] | (uint32_t)p[1] << 8, sign = (h & 0x8000) << 16, e = h >> 10 & 31, m = h & 0x3ff;
    if (e == 31) return as_float(sign | 0x7f800000 | m << 13);
    if (e) return as_float(sign | (e + 112) << 23 | m << 13);
    float small = (float)m * 0x1p-24f;
    return sign ? -small : small;
}


/* ---- one block to float32 */

static inline void q4_0(const uint8_t *restrict b, float *restrict y) {
    float d = half(b);
    for (int i = 0; i < 16; i++) {
        y[i] = (float)((b[2 + i] & 15) - 8) * d;
        y[16 + i] = (float)((b[2 + i] >> 4) - 8) * d;
    }
}

static inline void q4_1(const uint8_t *restrict b, float *restrict y) {
    float d = half(b), m = half(b + 2);
    for (int i = 0; i < 16; i++) {
        y[i] = (float)(b[4 + i] & 15) * d + m;
        y[16 + i] = (float)(b[4 + i] >> 4) * d + m;
    }
}

static inline void q8_0(const uint8_t *restrict b, float *restrict y) {
    float d = half(b);
    for (int i = 0; i < 32; i++) y[i] = (float)(int8_t)b[2 + i] * d;
}

/* 256 weights: d, dmin (float16), eight scales and eight mins of six bits in twelve bytes, 128 bytes of codes */
static inline void q4_k(const uint8_t *restrict b, float *restrict y) {
    float d = half(b), dmin = half(b + 2);
    const uint8_t *s = b + 4;
    for (int g = 0; g < 8; g++) {
        int scale = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
        int least = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | s[g] >> 6 << 4;
        float ds = d * (float)scale, m = dmin * (float)least;
        const uint8_t *q = b + 16 + g / 2 * 32;
        if (g % 2) for (int i = 0; i < 32; i++) y[32 * g + i] = (float)(q[i] >> 4) * ds - m;
        else for (int i = 0; i < 32; i++) y[32 * g + i] = (float)(q[i] & 15) * ds - m;
    }
}

/* 256 weights: 128 bytes with four bits of each code, 64 with two, sixteen int8 scales, d (float16) */
static inline void q6_k(const uint8_t *restrict b, float *restrict y) {
    float d = half(b + 208);
    for (int g = 0; g < 16; g++) {
        float ds = d * (float)(int8_t)b[192 + g];
        const uint8_t *low = b + g / 8 * 64 + g / 2 % 2 * 32 + g % 2 * 16;
        const uint8_t *high = b + 128 + g / 8 * 32 + g % 2 * 16;
        int part = g / 2 % 4, shift = part / 2 * 4;
        for (int i = 0; i < 16; i++)
            y[16 * g + i] = (float)((low[i] >> shift & 15 | (high[i] >> 2 * part & 3) << 4) - 32) * ds;
    }
}

/* 32 weights: a power of two, sixteen bytes of places in the table of E2M1 (times two) */
static inline void mxfp4(const uint8_t *restrict b, float *restrict y) {
    static const float table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    float d = b[0] < 2 ? as_float(0x200000u << b[0]) : as_float((uint32_t)(b[0] - 1) << 23);
    for (int i = 0; i < 16; i++) {
        y[i] = table[b[1 + i] & 15] * d;
        y[16 + i] = table[b[1 + i] >> 4] * d;
    }
}

#define EACH(F, WEIGHTS, BYTES) for (int64_t i = 0; i < blocks; i++) F(raw + i * (BYTES), y + i * (WEIGHTS)); return 0
static inline int widen(int kind, const uint8_t *raw, float *y, int64_t blocks) {
    switch (kind) {
        case Q4_0: EACH(q4_0, 32, 18);
        case Q4_1: EACH(q4_1, 32, 20);
        case Q8_0: EACH(q8_0, 32, 34);
        case Q4_K: EACH(q4_k, 256, 144);
        case Q6_K: EACH(q6_k, 256, 210);
        case MXFP4: EACH(mxfp4, 32, 17);
    }
    return 1;
}


/* ---- whole matrices */

/* raw (rows, bytes) -> y (rows, columns) float32, `blocks` of them a row; 1: an unknown kind */
int ggml_widen(const uint8_t *raw, float *y, int64_t rows, int64_t bytes, int64_t columns, int64_t blocks,
               int kind, int threads) {
    int wrong = 0;
    #pragma omp parallel for schedule(static) num_threads(threads) reduction(|:wrong)
    for (int64_t n = 0; n < rows; n++) wrong |= widen(kind, raw + n * bytes, y + n * columns, blocks);
    return wrong;
}

/* x (M, K) times raw (N, bytes) -> y (M, N), K = blocks of a row; a row of raw is widened once, in the cache, and a
   sum's order is the same for any M; 1: an unknown kind, or no memory */
int ggml_rows(const float *x, const uint8_t *raw, float *y, int64_t M, int64_t N, int64_t K, int64_t bytes,
              int64_t blocks, int kind, int threads) {
    int wrong = 0;
    #pragma omp parallel num_threads(threads) reduction(|:wrong)
    {
        float *w = aligned_alloc(64, (K * 4 + 63) / 64 * 64);
        wrong |= !w;
        #pragma omp for schedule(static)
        for (int64_t n = 0; n < N; n++) {
            if (!w) continue;
            wrong |= widen(kind, raw + n * bytes, w, blocks);
            for (int64_t m = 0; m < M; m++) {
                lanes sum[2] = {{0}, {0}}, a, b;
                for (int64_t k = 0; k < K; k += 32) /* K is a multiple of 32 */
                    for (int j = 0; j < 2; j++) {
                        memcpy(&a, x + m * K + k + 16 * j, 64);
                        memcpy(&b, w + k + 16 * j, 64);
                        sum[j] += a * b;
                    }
                sum[0] += sum[1];
                float total = 0;
                for (int i = 0; i < 8; i++) total += sum[0][i] + sum[0][i + 8];
                y[m * N + n] = total;
            }
        }
        free(w);
    }
    return wrong;
}

/* blocks of `head` + `tail` bytes -> heads (blocks, head) and tails (blocks, tail), each without gaps */
int ggml_split(const uint8_t *raw, uint8_t *heads, uint8_t *tails, int64_t blocks, int64_t head, int64_t tail,
               int threads) {
#define SPLIT(H, T) \
    if (head == H && tail == T) { \
        _Pragma("omp parallel for schedule(static) num_threads(threads)") \
        for (int64_t i = 0; i < blocks; i++) { \
            memcpy(heads + i * H, raw + i * (H + T), H); \
            memcpy(tails + i * T, raw + i * (H + T) + H, T); \
        } \
        return 0; \
    }
    SPLIT(2, 16) SPLIT(4, 16) SPLIT(2, 32)
    return 1;
}
