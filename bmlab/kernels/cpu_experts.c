/* Experts of a mixture for a few tokens, multiplied where they lie on the host: gate and up, the gate, down, of every
   expert that is asked for, in one call. cpu_experts.py calls it, and nbs/02_kernels/22_cpu_experts.ipynb explains it.

   Between two barriers the threads take stretches of rows, of whichever expert, as they come free. */
#include "cpu_block.c"

enum { FLOAT32, BFLOAT16, INT8, INT4, MXFP4 };
enum { OSS = 2 }; /* beside SILU and GELU_TANH */
#define MOST 16               /* tokens of a job */
#define SOME 256              /* rows of codes that a thread takes at a time, at most, */
#define SOME_BYTES (64 << 10) /* and their bytes */

typedef struct { /* one of the two matrices of every expert */
    const char *at[4];   /* the first expert's codes (or floats, or blocks), scales, zero points and bias, or NULL */
    int64_t step[4];     /* bytes from one expert's to the next one's */
    int64_t N, K, kind, group, half_bias;
} Stack;

typedef struct { Stack up, down; int64_t act, beside; float alpha, limit; } Experts; /* up: 2F rows; down: F columns */

typedef struct { /* some tokens of one expert */
    int64_t expert, M;
    const int64_t *pairs;        /* (M, 2): which row of x, and which of y */
    char *x;                     /* (M, K), as the products read it */
    float *u, *h, *out;          /* (M, 2F), (M, F), (M, D) */
    Rows digits;
} Job;

int expert_bytes(int64_t which) { return which ? sizeof(Experts) : sizeof(Stack); }


/* ---- floats and MXFP4 */

typedef float floats16 __attribute__((vector_size(64)));
typedef float anywhere16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t words16 __attribute__((vector_size(64)));
typedef uint16_t halves16 __attribute__((vector_size(32)));
typedef int8_t bytes16 __attribute__((vector_size(16)));
typedef int32_t whole16 __attribute__((vector_size(64)));

/* sixteen bytes of E2M1 numbers, times two: those of the low nibbles, then of the high ones */
INLINE void e2m1(const char *p, floats16 *w) {
    const __m128i b = _mm_loadu_si128((const void *)p);
#if WIDTH == 64
    /* (of an index four bits count) */
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m512i i = _mm512_cvtepu8_epi32(b);
    w[0] = (floats16)_mm512_permutexvar_ps(i, numbers);
    w[1] = (floats16)_mm512_permutexvar_ps(_mm512_srli_epi32(i, 4), numbers);
#else
    const __m128i numbers = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m128i low = _mm_set1_epi8(15), half[2] = {_mm_and_si128(b, low), _mm_and_si128(_mm_srli_epi16(b, 4), low)};
    for (int j = 0; j < 2; j++) {
        const bytes16 own = (bytes16)_mm_shuffle_epi8(numbers, half[j]);
        w[j] = __builtin_convertvector(__builtin_convertvector(own, whole16), floats16);
    }
#endif
}

/* 32 weights as floats, without a block's power */
INLINE void weights32(const int kind, const char *p, floats16 *w) {
    if (kind == FLOAT32) memcpy(w, p, 128);
    else if (kind == MXFP4) e2m1(p + 1, w);
    else
        for (int j = 0; j < 2; j++) {
            halves16 h;
            memcpy(&h, p + 32 * j, 32);
            words16 bits = __builtin_convertvector(h, words16) << 16;
            memcpy(w + j, &bits, 64);
        }
}
INLINE int64_t bytes32(const int kind) { return kind == FLOAT32 ? 128 : kind == BFLOAT16 ? 64 : 17; }

/* 64 weights at p times R rows of x; sums in registers, two for each row */
INLINE void float_step(const int R, const int kind, const float *x, int64_t width, const char *p, const float *powers,
                       floats16 sum[][2]) {
    #pragma GCC unroll 2
    for (int j = 0; j < 2; j++, p += bytes32(kind), x += 32) {
        floats16 w[2];
        weights32(kind, p, w);
        #pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const floats16 a = *(const anywhere16 *)(x + r * width), b = *(const anywhere16 *)(x + r * width + 16);
            if (kind == MXFP4) sum[r][j] += (w[0] * a + w[1] * b) * powers[*(const uint8_t *)p];
            else sum[r][0] += w[0] * a, sum[r][1] += w[1] * b;
        }
    }
}

/* R rows of x (…, width), zeros behind K, times N rows of codes -> y (…, N) */
INLINE void float_rows(const int R, const int kind, const float *x, int64_t K, int64_t width, const char *codes,
                       int64_t line, int64_t N, float *y) {
    const int64_t step = 2 * bytes32(kind);
    float powers[256]; /* of blocks, halved */
    for (uint32_t e = 0; kind == MXFP4 && e < 256; e++)
        powers[e] = as_float(e < 2 ? 0x200000u << e : (e - 1) << 23);
    for (int64_t n = 0; n < N; n++) {
        const char *p = codes + n * line;
        floats16 sum[4][2] = {{{0}}};
        int64_t k = 0;
        for (; k + 64 <= K; k += 64, p += step) {
            for (int64_t i = 0; i < step; i += 64) __builtin_prefetch(p + i + AHEAD);
            float_step(R, kind, x + k, width, p, powers, sum);
        }
        if (k < K) {
            char last[256] = {0};
            memcpy(last, p, line - (p - codes - n * line));
            float_step(R, kind, x + k, width, last, powers, sum);
        }
        for (int r = 0; r < R; r++) {
            float part[16], total = 0;
            sum[r][0] += sum[r][1];
            memcpy(part, sum[r], 64);
            for (int i = 0; i < 8; i++) total += part[i] + part[i + 8];
            y[r * N + n] = total;
        }
    }
}
#define FLOAT_WAY(R, KIND) \
ALONE void floats_##R##_##KIND(const float *x, int64_t K, int64_t width, const char *codes, int64_t line, int64_t N, \
                               float *y) { float_rows(R, KIND, x, K, width, codes, line, N, y); }
#define FLOAT_WAYS(KIND) FLOAT_WAY(4, KIND) FLOAT_WAY(2, KIND) FLOAT_WAY(1, KIND)
FLOAT_WAYS(FLOAT32) FLOAT_WAYS(BFLOAT16) FLOAT_WAYS(MXFP4)


/* ---- a stretch of one expert's rows */

static int64_t line_bytes(const Stack *s) {
    switch (s->kind) {
        case FLOAT32: return 4 * s->K;
        case BFLOAT16: return 2 * s->K;
        case INT8: return s->K;
        case INT4: return s->K / 2;
    }
    return s->K / 32 * 17;
}
static int64_t stretch(const Stack *s) {
    const int64_t n = SOME_BYTES / line_bytes(s) / 4 * 4;
    return n < 16 ? 16 : n > SOME ? SOME : n;
}
static int in_digits(const Stack *s) { return s->kind == INT8 || s->kind == INT4; }
static Matrix matrix_of(const Stack *s, int64_t e, int64_t n, int64_t N) {
    const int64_t G = s->kind == INT4 ? s->K / s->group : 0;
    const char *codes = s->at[0] + e * s->step[0] + n * line_bytes(s), *scale = s->at[1] + e * s->step[1];
    if (s->kind == INT8) return (Matrix){codes, scale + 4 * n, NULL, NULL, N, s->K, 0, 8};
    return (Matrix){codes, scale + 2 * n * G, (const uint16_t *)(s->at[2] + e * s->step[2]) + n * G, NULL, N, s->K,
                    s->group, 4};
}

/* rows n to n + N of codes times a job's tokens -> y (M, s->N) */
static void some_rows(const Stack *s, const Job *j, float *y, int64_t n, int64_t N) {
    float here[MOST * SOME];
    if (in_digits(s)) {
        const Matrix w = matrix_of(s, j->expert, n, N);
        product(&j->digits, &w, here, NULL, 0, N);
    } else {
        const int64_t line = line_bytes(s), width = multiple(s->K, 64);
        const char *codes = s->at[0] + j->expert * s->step[0] + n * line;
        const float *x = (const float *)j->x;
        int64_t m = 0;
#define BY_KIND(R, KIND) \
    if (s->kind == KIND) floats_##R##_##KIND(x + m * width, s->K, width, codes, line, N, here + m * N);
#define TOGETHER(R) for (; m + R <= j->M; m += R) { BY_KIND(R, FLOAT32) BY_KIND(R, BFLOAT16) BY_KIND(R, MXFP4) }
        TOGETHER(4) TOGETHER(2) TOGETHER(1)
    }
    for (int64_t m = 0; m < j->M; m++) memcpy(y + m * s->N + n, here + m * N, N * sizeof(float));
}

/* M rows of floats, a multiple of 8 long, as a matrix reads them; half: they are bfloat16 numbers */
static void hand_over(Job *j, const Stack *s, const float *from, int half) {
    const int64_t width = multiple(s->K, 64);
    if (in_digits(s)) {
        const Matrix w = matrix_of(s, j->expert, 0, s->N);
        read_rows(&j->digits, from, NULL, j->M, &w, half);
    } else
        for (int64_t m = 0; m < j->M; m++) {
            float *to = (float *)j->x + m * width;
            memcpy(to, from + m * s->K, s->K * sizeof(float));
            memset(to + s->K, 0, (width - s->K) * sizeof(float));
        }
}

INLINE float bias_of(const Stack *s, int64_t e, int64_t n) {
    return s->at[3] ? get(s->at[3] + e * s->step[3], n, s->half_bias) : 0;
}

/* what gate and up gave -> h; rounded where the device's kernels round it */
static void open_experts(const Experts *e, Job *j, int half) {
    const int64_t F = e->down.K;
    for (int64_t m = 0; m < j->M; m++) {
        float *u = j->u + m * 2 * F, *h = j->h + m * F, *pair = j->out; /* (out is free until then: see `room`) */
        for (int64_t i = 0; i < 2 * F; i++) u[i] = near(u[i] + bias_of(&e->up, j->expert, i), half);
        const float *gate = u, *up = u + F;
        if (e->beside) {
            for (int64_t i = 0; i < F; i++) pair[i] = u[2 * i], pair[F + i] = u[2 * i + 1];
            gate = pair, up = pair + F;
        }
        if (e->act != OSS) open_gate(gate, up, h, F, e->act, 0);
        else
            for (int64_t i = 0; i < F; i++) {
                const float g = gate[i] > e->limit ? e->limit : gate[i]; /* (what is undefined stays so) */
                const float v = up[i] < -e->limit ? -e->limit : up[i] > e->limit ? e->limit : up[i];
                h[i] = (v + 1) * (g / (1 + exponential(-e->alpha * g)));
            }
        for (int64_t i = 0; i < F; i++) h[i] = near(h[i], half);
    }
}


/* ---- all of it */

/* bytes of a job of M tokens, or where they are */
static int64_t room(const Experts *e, int64_t M, Job *j, char *at) {
    const int64_t D = e->up.K, F = e->down.K, K = multiple(D > F ? D : F, 64), out = D > 2 * F ? D : 2 * F;
    const int64_t floats[] = {M * K, M * 2 * F, M * F, M * out, digit_bytes(M, K) / 4, group_floats(M, K)};
    int64_t all = 0, begin[6];
    for (int i = 0; i < 6; i++) begin[i] = all, all += multiple(floats[i] * 4, 64);
    if (at) {
        j->x = at;
        j->u = (float *)(at + begin[1]), j->h = (float *)(at + begin[2]), j->out = (float *)(at + begin[3]);
        j->digits.d = (int8_t *)(at + begin[4]), j->digits.groups = (float *)(at + begin[5]);
    }
    return all;
}

/* x (…, D) float32, or bfloat16 where half is set; jobs (J, 3): an expert and its pairs, from and until, at most MOST;
   pairs (…, 2): which row of x, which of y; y (…, D) float32; 1: no memory */
int experts(const Experts *e, const void *x, const int64_t *jobs, const int64_t *pairs, float *y, int64_t J,
            int half, int threads) {
    const int64_t D = e->up.K, sizes[2] = {stretch(&e->up), stretch(&e->down)};
    const int64_t parts[2] = {(e->up.N + sizes[0] - 1) / sizes[0], (e->down.N + sizes[1] - 1) / sizes[1]};
    int64_t all = multiple(J * sizeof(Job), 64);
    for (int64_t i = 0; i < J; i++) all += room(e, jobs[3 * i + 2] - jobs[3 * i + 1], NULL, NULL);
    char *memory = aligned_alloc(64, all), *at = memory + multiple(J * sizeof(Job), 64);
    if (!memory) return 1;
    Job *own = (Job *)memory;
    for (int64_t i = 0; i < J; i++) {
        const int64_t *job = jobs + 3 * i;
        own[i].expert = job[0], own[i].M = job[2] - job[1], own[i].pairs = pairs + 2 * job[1];
        at += room(e, own[i].M, own + i, at);
    }
    #pragma omp parallel num_threads(threads)
    {
        #pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < J; i++) {
            float *rows = own[i].out;
            for (int64_t m = 0; m < own[i].M; m++)
                for (int64_t k = 0; k < D; k++) rows[m * D + k] = get(x, own[i].pairs[2 * m] * D + k, half);
            hand_over(own + i, &e->up, rows, half);
        }
        #pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < J * parts[0]; i++) {
            const int64_t n = i % parts[0] * sizes[0], left = e->up.N - n;
            some_rows(&e->up, own + i / parts[0], own[i / parts[0]].u, n, left < sizes[0] ? left : sizes[0]);
        }
        #pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < J; i++) {
            open_experts(e, own + i, half);
            hand_over(own + i, &e->down, own[i].h, half);
        }
        #pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < J * parts[1]; i++) {
            const int64_t n = i % parts[1] * sizes[1], left = e->down.N - n;
            some_rows(&e->down, own + i / parts[1], own[i / parts[1]].out, n, left < sizes[1] ? left : sizes[1]);
        }
        #pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < J; i++)
            for (int64_t m = 0; m < own[i].M; m++) {
                float *to = y + own[i].pairs[2 * m + 1] * D;
                for (int64_t n = 0; n < D; n++) to[n] = own[i].out[m * D + n] + bias_of(&e->down, own[i].expert, n);
            }
    }
    free(memory);
    return 0;
}
