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

/* bytes of the structs above, which cpu_block.py compares with its own */
int struct_bytes(int64_t which) {
    const int bytes[] = {sizeof(Matrix), sizeof(Block), sizeof(Tokens)};
    return bytes[which];
}


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

INLINE __m256 exponential8(__m256 x) { /* the same of eight, to the bit */
#define ALL(c) _mm256_set1_ps(c)
    const __m256 in = _mm256_min_ps(ALL(88), _mm256_max_ps(ALL(-87), x));
    const __m256 n = _mm256_sub_ps(_mm256_fmadd_ps(in, ALL(1.44269504f), ALL(12582912)), ALL(12582912));
    const __m256 r = _mm256_fmadd_ps(n, ALL(2.12194440e-4f), _mm256_fnmadd_ps(n, ALL(0.693359375f), in));
    __m256 p = _mm256_fmadd_ps(ALL(1.9875691500e-4f), r, ALL(1.3981999507e-3f));
    p = _mm256_fmadd_ps(p, r, ALL(8.3334519073e-3f));
    p = _mm256_fmadd_ps(p, r, ALL(4.1665795894e-2f));
    p = _mm256_fmadd_ps(p, r, ALL(1.6666665459e-1f));
    p = _mm256_fmadd_ps(p, r, ALL(5.0000001201e-1f));
    p = _mm256_add_ps(_mm256_fmadd_ps(_mm256_mul_ps(p, r), r, r), ALL(1));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvttps_epi32(n), _mm256_set1_epi32(127)), 23);
    p = _mm256_mul_ps(p, _mm256_castsi256_ps(power));
    return _mm256_blendv_ps(p, _mm256_setzero_ps(), _mm256_cmp_ps(x, ALL(-87), _CMP_LT_OQ));
}

INLINE float opened(float g, const int64_t act) {
    if (act == SILU) return g / (1 + exponential(-g));
    return g - g / (1 + exponential(2 * 0.79788456f * (g + 0.044715f * g * g * g))); /* 1 + tanh u = 2 - 2 / (1 + exp 2u) */
}


INLINE __m256 near8(__m256 v, const int half) { return half ? rounded(v) : v; }

/* F numbers of the gate, each times what it opens */
INLINE void open_gate(const float *gate, const float *up, float *h, int64_t F, const int64_t act, const int half) {
    int64_t k = 0;
    for (; k + 8 <= F; k += 8) {
        const __m256 g = _mm256_loadu_ps(gate + k);
        __m256 y;
        if (act == SILU) {
            const __m256 e = exponential8(_mm256_xor_ps(g, ALL(-0.0f)));
            y = _mm256_div_ps(g, _mm256_add_ps(ALL(1), e));
        } else {
            const __m256 cube = _mm256_mul_ps(_mm256_mul_ps(_mm256_mul_ps(ALL(0.044715f), g), g), g);
            const __m256 e = exponential8(_mm256_mul_ps(ALL(2 * 0.79788456f), _mm256_add_ps(g, cube)));
            y = _mm256_sub_ps(g, _mm256_div_ps(g, _mm256_add_ps(ALL(1), e)));
        }
        _mm256_storeu_ps(h + k, near8(_mm256_mul_ps(near8(y, half), _mm256_loadu_ps(up + k)), half));
    }
    for (; k < F; k++) h[k] = near(near(opened(gate[k], act), half) * up[k], half);
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
static int64_t many_room(const Block *b, int64_t R, int64_t T, int64_t threads);
int64_t block_bytes(const Block *b, int64_t R, int64_t T, int64_t threads) {
    if (R > 16) return many_room(b, R, T, threads);
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
            float *gate = h + r * 2 * F + begin, *up = gate + F;
            if (b->act == SILU) open_gate(gate, up, gate, end - begin, SILU, half);
            else open_gate(gate, up, gate, end - begin, GELU_TANH, half);
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


/* ---- many tokens, on matrices whose inputs are rounded to int8 */

#define CHUNK_ROWS 256 /* tokens that go through products together */
#if WIDTH == 64
#define WIDE(name) _mm512_##name
typedef __m512 Floats;
#else
#define WIDE(name) _mm256_##name
typedef __m256 Floats;
#endif
#define LANES (WIDTH / 4)
#define KEYS (2 * LANES) /* keys that a product of floats takes at once: two registers */
#define SIX 6          /* rows that meet them */

static int fits_many(const Block *b) {
    return b->qkv.inputs == 8 && b->o.inputs == 8 && b->up.inputs == 8 && b->down.inputs == 8;
}

/* n rows of a (step numbers apart) times k rows of KEYS numbers of c, to f (n, lines apart); n up to 6 */
INLINE void six(const int R, const float *a, int64_t step, const float *c, int64_t K, float *f, int64_t line) {
    Floats s[SIX][2];
    EACH s[r][j] = WIDE(setzero_ps)();
    for (int64_t k = 0; k < K; k++, c += KEYS) {
        const Floats low = WIDE(load_ps)(c), high = WIDE(load_ps)(c + LANES);
        for (int r = 0; r < R; r++) {
            const Floats v = WIDE(set1_ps)(a[r * step + k]);
            s[r][0] = WIDE(fmadd_ps)(low, v, s[r][0]);
            HERE(s[r][0]);
            s[r][1] = WIDE(fmadd_ps)(high, v, s[r][1]);
            HERE(s[r][1]);
        }
    }
    EACH WIDE(store_ps)(f + r * line + LANES * j, s[r][j]);
}
ALONE void six_rows(const float *a, int64_t step, const float *c, int64_t K, float *f, int64_t line) {
    six(6, a, step, c, K, f, line);
}

typedef struct { /* what a thread has for itself: numbers of floats, and where they are */
    int64_t T, wide, rows;       /* slots and entries of a head, both to the next KEYS; tokens at most */
    float *x, *qkv, *keys, *values, *scores, *q, *out, *z, *h, *f;
    Laid *laid;
    char *digits;
} Room;

static int64_t room_for(const Block *b, int64_t rows, int64_t T, char *at, Room *o) { /* its bytes */
    const int64_t D = b->D, few = rows < CHUNK_ROWS ? rows : CHUNK_ROWS, W = widest(b);
    char *begin = at;
    o->T = multiple(T, KEYS);
    o->wide = multiple(b->head, KEYS);
    o->rows = rows;
#define FLOATS_OF(name, n) o->name = (float *)at, at += multiple((n) * 4, 64);
    FLOATS_OF(x, rows * D)
    FLOATS_OF(qkv, rows * b->qkv.N)
    FLOATS_OF(keys, o->T * b->head)
    FLOATS_OF(values, o->T * o->wide)
    FLOATS_OF(scores, SIX * o->T)
    FLOATS_OF(q, SIX * b->head)
    FLOATS_OF(out, SIX * o->wide)
    FLOATS_OF(z, few * W)
    FLOATS_OF(h, few * (2 * b->F > D ? 2 * b->F : D))
    FLOATS_OF(f, few * TILE)
    o->laid = (Laid *)at, at += multiple(sizeof(Laid), 64);
    o->digits = at, at += many_bytes(few, W);
    return at - begin;
}

static int64_t many_room(const Block *b, int64_t R, int64_t T, int64_t threads) {
    Room o;
    return threads * room_for(b, (R + threads - 1) / threads, T, NULL, &o) + 64;
}

/* a stretch of rows rounded, and times a matrix */
static void many_product(const float *x, int64_t n, const Matrix *w, float *y, const int half, const Room *o) {
    const Many d = many_for(w, n, o->digits);
    for (int64_t m = 0; m < n; m++) round_row(&d, m, x + m * w->K, NULL);
    many_part(&d, w, y, 0, w->N, half, o->laid, o->f);
}

/* keys and values of one head of a row of the cache, up to slot T, as `six` reads them */
INLINE void lay_keys(const void *keys, const void *values, int64_t T, int64_t head, const Room *o, const int half) {
#define EIGHT(p, i) (half ? eight(NULL, p, i) : eight(p, NULL, i))
    for (int64_t t = 0; t < o->T; t++) { /* (behind the last one: zeros) */
        float *k = o->keys + t / KEYS * KEYS * head + t % KEYS, *v = o->values + t * KEYS;
        if (head % 8 == 0 && t % 8 == 0 && t + 8 <= T)
            for (int64_t i = 0; i < head; i += 8) {
                __m256i both[8];
                for (int j = 0; j < 8; j++) both[j] = _mm256_castps_si256(EIGHT(keys, (t + j) * head + i));
                turned(both);
                for (int j = 0; j < 8; j++) _mm256_store_si256((void *)(k + (i + j) * KEYS), both[j]);
            }
        else if (head % 8 || t / 8 * 8 + 8 > T)
            for (int64_t i = 0; i < head; i++) k[i * KEYS] = t < T ? get(keys, t * head + i, half) : 0;
        for (int64_t i = 0; i < o->wide; i += 8) {
            float *to = v + i / KEYS * o->T * KEYS + i % KEYS;
            if (t < T && i + 8 <= head) _mm256_store_ps(to, EIGHT(values, t * head + i));
            else for (int j = 0; j < 8; j++) to[j] = t < T && i + j < head ? get(values, t * head + i + j, half) : 0;
        }
    }
}

/* probabilities of a token's scores; how many slots it looks at */
INLINE void soften(float *p, const uint8_t *seen, int64_t T, int64_t all, float scale) {
    const __m256 never = ALL(-__builtin_inff());
    __m256 top = ALL(-3e38f), total = _mm256_setzero_ps();
    for (int64_t t = 0; t < all; t += 8) {
        uint64_t eight_seen = 0; /* (what lies behind T is not read) */
        memcpy(&eight_seen, seen + t, T - t > 8 ? 8 : T - t > 0 ? T - t : 0);
        const __m256i hidden = _mm256_cmpeq_epi32(
            _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(eight_seen)), _mm256_setzero_si256());
        const __m256 s = _mm256_mul_ps(_mm256_load_ps(p + t), ALL(scale));
        const __m256 v = _mm256_blendv_ps(s, never, _mm256_castsi256_ps(hidden));
        _mm256_store_ps(p + t, v);
        top = _mm256_max_ps(v, top);
    }
    const __m256 most = ALL(largest(top));
    for (int64_t t = 0; t < all; t += 8) {
        const __m256 v = exponential8(_mm256_sub_ps(_mm256_load_ps(p + t), most));
        _mm256_store_ps(p + t, v);
        total = _mm256_add_ps(total, v);
    }
    const float sum = _mm_cvtss_f32(floats_of(total, total, total, total)), share = sum != 0 ? 1 / sum : 0;
    for (int64_t t = 0; t < all; t += 8) _mm256_store_ps(p + t, _mm256_mul_ps(_mm256_load_ps(p + t), ALL(share)));
}

static int64_t last_seen(const uint8_t *seen, int64_t T) {
    for (uint64_t last; T >= 8; T -= 8) {
        memcpy(&last, seen + T - 8, 8);
        if (last) break;
    }
    while (T && !seen[T - 1]) T--;
    return T;
}

/* attention of tokens begin to end, of one row of the cache, over one head of its keys; q comes from `qkv`, and what is
   found goes in its place */
INLINE void attend_many(const Block *b, const Tokens *s, int64_t first, int64_t begin, int64_t end, int64_t kv,
                        const Room *o, const int half) {
    const int64_t head = b->head, group = b->H / b->Hk, T = s->T, bytes = half ? 2 : 4;
    int64_t most = 0;
    for (int64_t r = begin; r < end; r++) {
        const int64_t n = last_seen(s->seen + r * T, T);
        most = n > most ? n : most;
    }
    const int64_t at = (s->row[begin] * b->Hk + kv) * s->slots * head * bytes;
    Room near_ = *o;
    near_.T = multiple(most, KEYS);
    lay_keys((const char *)s->keys + at, (const char *)s->values + at, most, head, &near_, half);
    const int64_t all = (end - begin) * group; /* a token's heads behind each other */
    for (int64_t i = 0; i < all; i += SIX) {
        const int64_t n = all - i < SIX ? all - i : SIX;
        float *of[SIX];
        int64_t reach[SIX], far = 0;
        for (int64_t j = 0; j < n; j++) {
            const int64_t r = begin + (i + j) / group;
            of[j] = o->qkv + (r - first) * b->qkv.N + (kv * group + (i + j) % group) * head;
            reach[j] = last_seen(s->seen + r * T, most);
            far = reach[j] > far ? reach[j] : far;
            memcpy(o->q + j * head, of[j], head * sizeof(float));
        }
        const int64_t line = multiple(far, KEYS);
        for (int64_t t = 0; t < line; t += KEYS)
            six_rows(o->q, head, o->keys + t * head, head, o->scores + t, line);
        for (int64_t j = 0; j < n; j++)
            soften(o->scores + j * line, s->seen + (begin + (i + j) / group) * T, reach[j], line, b->scale);
        for (int64_t d = 0; d < near_.wide; d += KEYS)
            six_rows(o->scores, line, o->values + d * near_.T, line, o->out + d, near_.wide);
        for (int64_t j = 0; j < n; j++)
            for (int64_t k = 0; k < head; k++) of[j][k] = near(o->out[j * near_.wide + k], half);
    }
}

/* each thread has its own tokens, and waits for the others only once: until all keys and values are there */
INLINE void run_many(const Block *b, const Tokens *s, int threads, const int half) {
    const int64_t R = s->R, D = b->D, F = b->F, H = b->H, Hk = b->Hk, head = b->head, all = b->qkv.N;
    const int64_t line = s->slots * head, bytes = half ? 2 : 4, most = (R + threads - 1) / threads;
    char *work = (char *)(((uintptr_t)s->work + 63) / 64 * 64);
    #pragma omp parallel num_threads(threads)
    {
        const int64_t i = omp_get_thread_num(), begin = R * i / threads, end = R * (i + 1) / threads;
        Room room, *o = &room;
        const int64_t own = room_for(b, most, s->T, work, o);
        room_for(b, most, s->T, work + i * own, o);

        for (int64_t c = begin; c < end; c += CHUNK_ROWS) {
            const int64_t n = end - c < CHUNK_ROWS ? end - c : CHUNK_ROWS;
            float *x = o->x + (c - begin) * D, *qkv = o->qkv + (c - begin) * all;
            for (int64_t k = 0; k < n * D; k++) x[k] = get(s->x, c * D + k, half);
            for (int64_t r = 0; r < n; r++) rms_norm(x + r * D, b->norms[0], D, b->eps[0], o->z + r * D, half);
            many_product(o->z, n, &b->qkv, qkv, half, o);
            for (int64_t r = c; r < c + n; r++)
                for (int64_t at = 0; at < H + 2 * Hk; at++) {
                    const float *norm = at < H ? b->q_norm : b->k_norm;
                    float *one = o->qkv + (r - begin) * all + at * head;
                    if (at < H + Hk) {
                        const char *cos = (const char *)s->cos + r * head * bytes;
                        if (norm) rms_norm(one, norm, head, b->head_eps, one, half);
                        turn(one, cos, (const char *)s->sin + r * head * bytes, head, half);
                    }
                    if (at < H) continue;
                    void *to = at < H + Hk ? s->keys : s->values;
                    const int64_t where = (s->row[r] * Hk + (at - H) % Hk) * line + s->slot[r] * head;
                    for (int64_t k = 0; k < head; k++) put(to, where + k, one[k], half);
                }
        }
        #pragma omp barrier

        for (int64_t from = begin, to; from < end; from = to) { /* tokens of one row of the cache */
            for (to = from + 1; to < end && s->row[to] == s->row[from];) to++;
            for (int64_t kv = 0; kv < Hk; kv++) attend_many(b, s, begin, from, to, kv, o, half);
        }

        for (int64_t c = begin; c < end; c += CHUNK_ROWS) {
            const int64_t n = end - c < CHUNK_ROWS ? end - c : CHUNK_ROWS;
            float *x = o->x + (c - begin) * D, *att = o->z, *y = o->h;
            for (int64_t r = 0; r < n; r++)
                memcpy(att + r * H * head, o->qkv + (c - begin + r) * all, H * head * sizeof(float));
            many_product(att, n, &b->o, y, half, o);
            add(b, n, x, y, 1, o->z, half);
            const int second = b->sandwich ? 2 : 1;
            for (int64_t r = 0; r < n; r++) rms_norm(x + r * D, b->norms[second], D, b->eps[second], o->z + r * D, half);
            many_product(o->z, n, &b->up, o->h, half, o);
            for (int64_t r = 0; r < n; r++) {
                const float *gate = o->h + r * 2 * F;
                if (b->act == SILU) open_gate(gate, gate + F, o->z + r * F, F, SILU, half);
                else open_gate(gate, gate + F, o->z + r * F, F, GELU_TANH, half);
            }
            many_product(o->z, n, &b->down, y, half, o);
            add(b, n, x, y, 3, o->z, half);
            for (int64_t k = 0; k < n * D; k++) put(s->y, c * D + k, x[k], half);
        }
    }
}

int block(const Block *b, const Tokens *s, int half, int threads) {
    if (s->R > 16) {
        if (!fits_many(b)) return 1;
        if (half) run_many(b, s, threads, 1);
        else run_many(b, s, threads, 0);
    } else if (half) run(b, s, threads, 1);
    else run(b, s, threads, 0);
    return 0;
}

/* n blocks, each of what the one before it gives: out (n, R, D), and their own keys, values and slots */
int blocks(const Block *const *b, const Tokens *s, void *const *keys, void *const *values, const int64_t *slots, void *out,
           int64_t n, int half, int threads) {
    const int64_t step = s->R * b[0]->D * (half ? 2 : 4);
    Tokens t = *s;
    if (s->R > 16)
        for (int64_t i = 0; i < n; i++)
            if (!fits_many(b[i])) return 1;
    for (int64_t i = 0; i < n; i++, t.x = t.y) {
        t.y = (char *)out + i * step;
        t.keys = keys[i];
        t.values = values[i];
        t.slots = slots[i];
        block(b[i], &t, half, threads);
    }
    return 0;
}
