/* One pass over memory for AdamW on a processor's cores: weights and gradients of 16 or 32 bits, masters and moments of
   32. cpu_adamw.py compiles it for the processor at hand, and nbs/02_kernels/18_cpu_adamw.ipynb explains it. Compiled
   with -ffp-contract=off: a product and a sum are one operation only where it is written so. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define PIECE 4096 /* elements that a thread takes at once */
#define INLINE static inline __attribute__((always_inline))

enum { FLOAT, BFLOAT, HALF, NONE }; /* kinds of weights and gradients; NONE: of float32, the master is the weight */

typedef struct { /* each rounded to float32 once */
    float divisor;       /* of gradients */
    float decay;         /* 1 - lr * weight_decay */
    float first;         /* 1 - beta1 */
    float beta2, second; /* and 1 - beta2 */
    float root, eps;     /* sqrt(1 - beta2^t) */
    float step;          /* lr / (1 - beta1^t) */
} Numbers;

INLINE float widened(const void *x, int64_t i, const int kind) {
    if (kind == FLOAT || kind == NONE) return ((const float *)x)[i];
#ifdef __FLT16_MAX__
    if (kind == HALF) return (float)((const _Float16 *)x)[i];
#endif
    uint32_t bits = (uint32_t)((const uint16_t *)x)[i] << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

INLINE void narrow(void *x, int64_t i, float y, const int kind) {
    if (kind == FLOAT) ((float *)x)[i] = y;
#ifdef __FLT16_MAX__
    if (kind == HALF) ((_Float16 *)x)[i] = (_Float16)y;
#endif
    if (kind == BFLOAT) { /* to nearest, ties to even; what is no number stays none */
        uint32_t bits;
        memcpy(&bits, &y, 4);
        uint32_t near = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        ((uint16_t *)x)[i] = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : near;
    }
}

/* v * beta2 + second * x * x: whether a compiler makes one operation of a product and the sum, and of which product */
INLINE float squared(float v, float x, const Numbers c, const int sum) {
    float scaled = c.second * x;
    if (sum == 1) return __builtin_fmaf(scaled, x, v * c.beta2);
    if (sum == 2) return __builtin_fmaf(v, c.beta2, scaled * x);
    return v * c.beta2 + scaled * x;
}

INLINE void run(void *restrict w, const void *restrict g, float *restrict p, float *restrict m, float *restrict v,
                const Numbers c, int64_t a, int64_t b, const int kind, const int sum, const int near, const int divided) {
    for (int64_t i = a; i < b; i++) {
        float x = widened(g, i, kind), mean = m[i];
        if (divided) x = x / c.divisor;
        mean = near ? __builtin_fmaf(c.first, x - mean, mean) : __builtin_fmaf(c.first - 1, x - mean, x);
        float square = squared(v[i], x, c, sum), y = p[i] * c.decay - c.step * mean / (sqrtf(square) / c.root + c.eps);
        m[i] = mean, v[i] = square, p[i] = y;
        narrow(w, i, y, kind);
    }
}

#define CASE(kind, sum) \
    case kind * 3 + sum: \
        if (c.first < 0.5f && c.divisor == 1) run(w, g, p, m, v, c, a, b, kind, sum, 1, 0); \
        else if (c.first < 0.5f) run(w, g, p, m, v, c, a, b, kind, sum, 1, 1); \
        else run(w, g, p, m, v, c, a, b, kind, sum, 0, 1); \
        break;

static void piece(void *w, const void *g, float *p, float *m, float *v, const Numbers c, int64_t a, int64_t b, int kind,
                  int sum) {
    switch (kind * 3 + sum) {
        CASE(FLOAT, 0) CASE(FLOAT, 1) CASE(FLOAT, 2)
        CASE(BFLOAT, 0) CASE(BFLOAT, 1) CASE(BFLOAT, 2)
        CASE(HALF, 0) CASE(HALF, 1) CASE(HALF, 2)
        CASE(NONE, 0) CASE(NONE, 1) CASE(NONE, 2)
    }
}

/* w (n,) is written and g (n,) read, both of `kind`; p, m, v (n,) are changed. sum and rest: how `squared` adds, in
   whole registers of `width` numbers and in what is left at the end. 1 where a kind is not known here */
int adamw(void *w, const void *g, float *p, float *m, float *v, const Numbers *numbers, int64_t n, int64_t width,
          int kind, int sum, int rest, int threads) {
#ifndef __FLT16_MAX__
    if (kind == HALF) return 1;
#endif
    const int64_t whole = n - n % width;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t a = 0; a < whole; a += PIECE)
        piece(w, g, p, m, v, *numbers, a, a + PIECE < whole ? a + PIECE : whole, kind, sum);
    piece(w, g, p, m, v, *numbers, whole, n, kind, rest);
    return 0;
}
