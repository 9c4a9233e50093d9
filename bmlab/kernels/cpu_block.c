/* A decoder block of a few tokens on packed weights: norm, queries, keys and values, rotation, cache, attention, output,
   norm, gated MLP, in one call. cpu_block.py calls it, and nbs/02_kernels/17_cpu_block.ipynb explains it.

   Every thread keeps the hidden states for itself and norms them itself; the threads share the rows of each matrix and
   the heads, and wait for each other where one reads what another has written. With half set, numbers are rounded to
   bfloat16 wherever torch, operation by operation, would. */
#include "cpu.c"

#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_thread_num() 0
#define omp_get_num_threads() 1
#endif

typedef struct { /* a block; D wide, H heads of queries, Hk of keys and values */
    Matrix qkv, o, up, down;     /* up: the gate's F rows, then those that it opens */
    const float *norms[4];       /* (D,) in the order of their use; two, or four where sandwich is set */
    const float *q_norm, *k_norm;/* (head,), or NULL */
    float eps[4], head_eps, scale;
    int64_t D, F, H, Hk, head, sandwich, act;
} Block;

typedef struct { /* R tokens; what they read and write */
    const void *x, *cos, *sin;   /* (R, D); (R, head) */
    void *y, *keys, *values;     /* (R, D); (rows, Hk, slots, head) */
    const uint8_t *seen;         /* (R, T): which slots each token sees */
    const int64_t *row, *slot;   /* (R,): where its keys and values go */
    void *work;                  /* block_bytes */
    int64_t R, T, slots;
} Tokens;

enum { SILU, GELU_TANH };


/* ---- numbers of two widths */

INLINE float get(const void *p, int64_t i, const int half) {
    return half ? as_float((uint32_t)((const uint16_t *)p)[i] << 16) : ((const float *)p)[i];
}
INLINE float near(float f, const int half) { return half ? as_float((uint32_t)bfloat16(f) << 16) : f; }
INLINE void put(void *p, int64_t i, float f, const int half) {
    if (half) ((uint16_t *)p)[i] = bfloat16(f);
    else ((float *)p)[i] = f;
}


/* ---- norm and activation */

INLINE void rms_norm(const float *x, const float *weight, int64_t D, float eps, float *y, const int half) {
    float sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < D; i++) sum += x[i] * x[i];
    float r = 1 / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(sum / D + eps)));
    for (int64_t i = 0; i < D; i++) y[i] = near(x[i] * r * weight[i], half);
}

INLINE float exponential(float x) { /* within 2e-7 of it (Cephes) */
    float in = x < -87 ? -87 : x > 88 ? 88 : x;
    float n = in * 1.44269504f + 12582912 - 12582912; /* to a whole number */
    float r = in - n * 0.693359375f + n * 2.12194440e-4f, p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r * r + r + 1) * as_float((uint32_t)((int32_t)n + 127) << 23);
    return x < -87 ? 0 : p;
}

INLINE float opened(float g, const int64_t act) {
    if (act == SILU) return g / (1 + exponential(-g));
    return g - g / (1 + exponential(2 * 0.79788456f * (g + 0.044715f * g * g * g))); /* 1 + tanh u = 2 - 2 / (1 + exp 2u) */
}


/* ---- attention */

/* a head turned by its position (Su et al. 2021) */
INLINE void turn(float *h, const void *cos, const void *sin, int64_t D, const int half) {
    for (int64_t i = 0, j = D / 2; j < D; i++, j++) {
        float a = h[i], b = h[j];
        h[i] = near(near(a * get(cos, i, half), half) - b * get(sin, i, half), half);
        h[j] = near(near(b * get(cos, j, half), half) + a * get(sin, j, half), half);
    }
}

/* what a head q of one token makes of the keys and values that it sees; p: room for T numbers */
INLINE void attend(const float *q, const void *keys, const void *values, const uint8_t *seen, int64_t T,
                   const int64_t D, float scale, float *p, float *y, const int half) {
    float top = -3e38f, total = 0;
    for (int64_t t = 0; t < T; t++) {
        float s = 0;
        #pragma omp simd reduction(+ : s)
        for (int64_t i = 0; i < D; i++) s += q[i] * get(keys, t * D + i, half);
        p[t] = seen[t] ? s * scale : -__builtin_inff();
        top = p[t] > top ? p[t] : top;
    }
    #pragma omp simd reduction(+ : total)
    for (int64_t t = 0; t < T; t++) total += p[t] = exponential(p[t] - top);
    memset(y, 0, D * sizeof(float));
    for (int64_t t = 0; t < T; t++)
        if (seen[t])
            for (int64_t i = 0; i < D; i++) y[i] += p[t] * get(values, t * D + i, half);
    for (int64_t i = 0; i < D; i++) y[i] = near(total != 0 ? y[i] / total : 0, half);
}


/* ---- the block */

/* this thread's rows of x times w, with its bias */
INLINE void part(const Rows *x, const Matrix *w, float *y, int64_t begin, int64_t end, const int half) {
    product(x, w, y, NULL, begin, end);
    for (int64_t m = 0; m < x->M; m++)
        for (int64_t n = begin; n < end; n++) {
            float v = near(y[m * w->N + n], half);
            y[m * w->N + n] = w->bias ? near(v + w->bias[n], half) : v;
        }
}

/* x + y, with a norm of y before where there are four */
INLINE void add(const Block *b, int64_t R, float *x, const float *y, int which, float *z, const int half) {
    for (int64_t r = 0; r < R; r++) {
        const float *more = y + r * b->D;
        if (b->sandwich) {
            rms_norm(more, b->norms[which], b->D, b->eps[which], z, half);
            more = z;
        }
        for (int64_t i = 0; i < b->D; i++) x[r * b->D + i] = near(x[r * b->D + i] + more[i], half);
    }
}

static int64_t widest(const Block *b) {
    int64_t W = b->D > b->F ? b->D : b->F;
    return W > b->H * b->head ? W : b->H * b->head;
}

/* bytes that each thread has for itself, and that all share */
static int64_t own_bytes(const Block *b, int64_t R, int64_t T) {
    int64_t W = widest(b);
    return multiple(digit_bytes(R, W) + (group_floats(R, W) + R * b->D + R * W + T) * 4, 64);
}
static int64_t shared_bytes(const Block *b, int64_t R) {
    return multiple(R * (b->qkv.N + b->H * b->head + 2 * b->F + b->D) * 4, 64);
}
int64_t block_bytes(const Block *b, int64_t R, int64_t T, int64_t threads) {
    return shared_bytes(b, R) + threads * own_bytes(b, R, T) + 64;
}

#define MINE(n) (n) * i / n_threads, (n) * (i + 1) / n_threads

INLINE void run(const Block *b, const Tokens *s, int threads, const int half) {
    const int64_t R = s->R, T = s->T, D = b->D, F = b->F, H = b->H, Hk = b->Hk, head = b->head, W = widest(b);
    const int64_t all = b->qkv.N, line = s->slots * head; /* line: a head's keys in the cache */
    char *work = (char *)(((uintptr_t)s->work + 63) / 64 * 64);
    float *qkv = (float *)work, *att = qkv + R * all, *h = att + R * H * head, *y = h + R * 2 * F;
    #pragma omp parallel num_threads(threads)
    {
        const int64_t i = omp_get_thread_num(), n_threads = omp_get_num_threads();
        char *own = work + shared_bytes(b, R) + i * own_bytes(b, R, T);
        Rows rows = {.d = (int8_t *)own, .groups = (float *)(own + digit_bytes(R, W))};
        float *x = rows.groups + group_floats(R, W), *z = x + R * D, *p = z + R * W;
        const int bytes = half ? 2 : 4;

        for (int64_t k = 0; k < R * D; k++) x[k] = get(s->x, k, half);
        for (int64_t r = 0; r < R; r++) rms_norm(x + r * D, b->norms[0], D, b->eps[0], z + r * D, half);
        read_rows(&rows, z, NULL, R, &b->qkv, half);
        part(&rows, &b->qkv, qkv, MINE(all), half);
        #pragma omp barrier

        for (int64_t a = R * (H + 2 * Hk) * i / n_threads; a < R * (H + 2 * Hk) * (i + 1) / n_threads; a++) {
            const int64_t r = a / (H + 2 * Hk), at = a % (H + 2 * Hk), nth = (at - H) % Hk;
            const float *norm = at < H ? b->q_norm : b->k_norm;
            float *one = qkv + a * head;
            if (at < H + Hk) {
                if (norm) rms_norm(one, norm, head, b->head_eps, one, half);
                turn(one, (const char *)s->cos + r * head * bytes, (const char *)s->sin + r * head * bytes, head, half);
            }
            if (at >= H) {
                void *to = at < H + Hk ? s->keys : s->values;
                int64_t where = (s->row[r] * Hk + nth) * line + s->slot[r] * head;
                for (int64_t k = 0; k < head; k++) put(to, where + k, one[k], half);
            }
        }
        #pragma omp barrier

        for (int64_t a = R * H * i / n_threads; a < R * H * (i + 1) / n_threads; a++) {
            const int64_t r = a / H, at = (s->row[r] * Hk + a % H / (H / Hk)) * line * bytes;
            const void *k = (const char *)s->keys + at, *v = (const char *)s->values + at;
            const float *q = qkv + r * all + a % H * head;
            if (head == 64) attend(q, k, v, s->seen + r * T, T, 64, b->scale, p, att + a * head, half);
            else if (head == 128) attend(q, k, v, s->seen + r * T, T, 128, b->scale, p, att + a * head, half);
            else attend(q, k, v, s->seen + r * T, T, head, b->scale, p, att + a * head, half);
        }
        #pragma omp barrier

        read_rows(&rows, att, NULL, R, &b->o, half);
        part(&rows, &b->o, y, MINE(D), half);
        #pragma omp barrier

        add(b, R, x, y, 1, z, half);
        const int second = b->sandwich ? 2 : 1;
        for (int64_t r = 0; r < R; r++) rms_norm(x + r * D, b->norms[second], D, b->eps[second], z + r * D, half);
        read_rows(&rows, z, NULL, R, &b->up, half);
        const int64_t begin = F * i / n_threads, end = F * (i + 1) / n_threads;
        part(&rows, &b->up, h, begin, end, half);
        part(&rows, &b->up, h, F + begin, F + end, half);
        for (int64_t r = 0; r < R; r++) {
            float *gate = h + r * 2 * F, *up = gate + F;
            if (b->act == SILU)
                for (int64_t k = begin; k < end; k++) gate[k] = near(near(opened(gate[k], SILU), half) * up[k], half);
            else
                for (int64_t k = begin; k < end; k++) gate[k] = near(near(opened(gate[k], GELU_TANH), half) * up[k], half);
        }
        #pragma omp barrier

        for (int64_t r = 0; r < R; r++) memcpy(z + r * F, h + r * 2 * F, F * sizeof(float));
        read_rows(&rows, z, NULL, R, &b->down, half);
        part(&rows, &b->down, y, MINE(D), half);
        #pragma omp barrier

        if (i == 0) {
            add(b, R, x, y, 3, z, half);
            for (int64_t k = 0; k < R * D; k++) put(s->y, k, x[k], half);
        }
    }
}

int block(const Block *b, const Tokens *s, int half, int threads) {
    if (half) run(b, s, threads, 1);
    else run(b, s, threads, 0);
    return 0;
}

/* n blocks, each of what the one before it gives: out (n, R, D), and their own keys, values and slots */
int blocks(const Block *const *b, const Tokens *s, void *const *keys, void *const *values, const int64_t *slots, void *out,
           int64_t n, int half, int threads) {
    const int64_t step = s->R * b[0]->D * (half ? 2 : 4);
    Tokens t = *s;
    for (int64_t i = 0; i < n; i++, t.x = t.y) {
        t.y = (char *)out + i * step;
        t.keys = keys[i];
        t.values = values[i];
        t.slots = slots[i];
        block(b[i], &t, half, threads);
    }
    return 0;
}
