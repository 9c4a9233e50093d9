/* Products of many rows that are rounded to int8, as a prompt's: cpu.c reads this, and nbs/02_kernels/04_cpu.ipynb
   explains it. Sixteen rows of codes are laid out so that each lane of one register of 512 bits, or of two of 256, is
   one of them, once for all rows of x, of which up to twelve or six at a time meet them: every sum stays in its lane,
   and every number of x is one broadcast. */

#define TILE 16      /* rows of codes at a time */
#define STRETCH 2048 /* columns at a time: what is laid out of them stays in the second-level cache */
#if WIDTH == 64      /* rows of x at a time */
#define TALL 12
#else
#define TALL 6
#endif

typedef struct { /* M rows of x, rounded; int8, or int16 where the codes are int8 and no product takes bytes of both */
    int64_t M, K, width, block, G;
    int wide, eight;             /* are numbers of x, and codes, so? */
    char *d;                     /* (M, width); in registers of 512 bits (M / TALL, width / 4, TALL, 4) */
    float *units, *sums;         /* (M, G): of each block of so many columns, or of the codes' group */
} Many;

typedef struct { /* what a thread lays out */
    int32_t codes[TILE * STRETCH / 2] __attribute__((aligned(64)));  /* pairs of int16, or fours of bytes, by lane */
    float scales[STRETCH / 32][TILE] __attribute__((aligned(64)));
    float zeros[STRETCH / 32][TILE] __attribute__((aligned(64)));    /* less the middle code */
    uint8_t rows[8][STRETCH] __attribute__((aligned(64)));
} Laid;

static int64_t many_width(int64_t K) { return multiple(K, 128); }
static int64_t many_bytes(int64_t M, int64_t K) { /* of d, units and sums, whatever the codes */
    return multiple(multiple(M, TALL) * many_width(K) * 2 + 2 * M * ((K + 31) / 32) * 4, 64);
}

static Many many_for(const Matrix *w, int64_t M, void *memory) {
    Many x = {.M = M, .K = w->K, .width = many_width(w->K), .block = w->group ? w->group : 32, .eight = w->bits == 8};
    x.wide = x.eight && WIDTH < 64;
    x.G = (w->K + x.block - 1) / x.block;
    x.d = memory;
    x.units = (float *)(x.d + multiple(M, TALL) * x.width * 2);
    x.sums = x.units + M * x.G;
    return x;
}

#if WIDTH == 64
/* a row's place among TALL, four bytes behind each other; of int8 codes, which are taken from 0 to 255, what that is
   too much of each block of 32, in `sums` as whole numbers */
static void round_row(const Many *x, int64_t m, const float *f, const uint16_t *h) {
    int8_t *row = (int8_t *)x->d + (multiple(x->M, TALL) + m) * x->width;
    int32_t *to = (int32_t *)(x->d + m / TALL * TALL * x->width) + m % TALL, *sums = (int32_t *)(x->sums + m * x->G);
    one_digit(f, h, x->K, x->block, x->width, 0, row, x->units + m * x->G, x->sums + m * x->G);
    for (int64_t k = 0; k < x->width; k += 4) memcpy(to + k / 4 * TALL, row + k, 4);
    for (int64_t g = 0; g < x->G && x->eight; g++) {
        sums[g] = 0;
        for (int k = 0; k < 32; k++) sums[g] -= 128 * row[g * 32 + k];
    }
}
#else
static void round_row(const Many *x, int64_t m, const float *f, const uint16_t *h) {
    one_digit(f, h, x->K, x->block, x->width, x->wide, x->d + m * x->width * (x->wide ? 2 : 1),
              x->units + m * x->G, x->sums + m * x->G);
}
#endif

/* eight registers of eight lanes: lane i of register j to lane j of register i */
INLINE void turned(__m256i v[8]) {
    __m256i a[8], b[8];
    for (int i = 0; i < 4; i++) {
        a[2 * i] = _mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = _mm256_unpacklo_epi64(a[i + j], a[i + 2 + j]);
            b[i + 2 * j + 1] = _mm256_unpackhi_epi64(a[i + j], a[i + 2 + j]);
        }
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_permute2x128_si256(b[i], b[4 + i], 0x20);
        v[4 + i] = _mm256_permute2x128_si256(b[i], b[4 + i], 0x31);
    }
}

/* columns k to end of a row in groups as bytes */
INLINE void unpack(const uint8_t *codes, int64_t k, int64_t end, const int group, const int bits, uint8_t *to) {
    for (; k < end; k += group, to += group) {
        const uint8_t *b = codes + k / 8 * bits, *top = b + group / 4;
        if (bits == 4)
            for (int i = 0; i < group / 2; i++) to[i] = b[i] & 15, to[group / 2 + i] = b[i] >> 4;
        else {
            for (int p = 0; p < 4; p++)
                for (int i = 0; i < group / 4; i++) to[p * group / 4 + i] = b[i] >> 2 * p & 3;
            for (int p = 0; bits == 3 && p < 8; p++)
                for (int i = 0; i < group / 8; i++) to[p * group / 8 + i] |= (top[i] >> p & 1) << 2;
        }
    }
}

#define OF_GROUP(BITS_, GROUP) if (w->bits == BITS_ && w->group == GROUP) unpack(row, k, end, GROUP, BITS_, to);
ALONE void unpack_row(const Matrix *w, int64_t n, int64_t k, int64_t end, uint8_t *to) {
    if (w->bits == 8) { /* from 0 to 255; behind the last column x has zeros */
        const uint8_t *row = (const uint8_t *)w->codes + n * w->K;
        const int64_t there = end < w->K ? end : w->K;
        for (int64_t i = k; i < there; i++) to[i - k] = row[i] ^ 0x80;
        memset(to + (there - k), 0, end - there);
        return;
    }
    const uint8_t *row = (const uint8_t *)w->codes + n * (w->K / 8 * w->bits);
    KINDS(OF_GROUP)
}

/* rows n to n + 16 of codes, columns k to end, with zeros behind the last row and column */
ALONE void lay_out(const Matrix *w, int64_t n, int64_t k, int64_t end, Laid *l) {
    const int64_t left = w->N - n;
    const int eight = w->bits == 8, wide = eight && WIDTH < 64, step = wide ? 16 : 32;
    for (int half = 0; half < 2; half++) {
        for (int i = 0; i < 8 && !wide; i++) {
            if (8 * half + i < left) unpack_row(w, n + 8 * half + i, k, end, l->rows[i]);
            else memset(l->rows[i], 0, end - k);
        }
        for (int64_t at = k; at < end; at += step) {
            __m256i v[8];
            for (int i = 0; i < 8; i++) {
                const int8_t *row = (const int8_t *)w->codes + (n + 8 * half + i) * w->K;
                int8_t last[16] = {0};
                if (!wide) v[i] = _mm256_load_si256((const void *)(l->rows[i] + at - k));
                else if (8 * half + i < left && at + 16 <= w->K)
                    v[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(row + at)));
                else {
                    if (8 * half + i < left && at < w->K) memcpy(last, row + at, w->K - at);
                    v[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)last));
                }
            }
            turned(v);
            int32_t *to = l->codes + (at - k) / step * 8 * TILE + 8 * half;
            for (int i = 0; i < 8; i++) _mm256_store_si256((void *)(to + i * TILE), v[i]);
        }
    }
    if (eight) return;
    const int64_t G = w->K / w->group, first = k / w->group;
    const float middle = (float)(1 << (w->bits - 1));
    for (int64_t g = first; g < end / w->group; g++)
        for (int i = 0; i < TILE; i++) {
            const int there = i < left;
            float scale = there ? _cvtsh_ss(((const uint16_t *)w->scale)[(n + i) * G + g]) : 0;
            l->scales[g - first][i] = scale;
            l->zeros[g - first][i] = there ? _cvtsh_ss(w->zero[(n + i) * G + g]) - middle * scale : 0;
        }
}

#define EACH for (int r = 0; r < R; r++) for (int j = 0; j < 2; j++)

#if WIDTH == 64

/* s + four bytes of x, times what is laid out of four columns, for R rows of x */
#define MEET(s, from, codes) { \
    const __m512i c = _mm512_load_si512(codes); \
    for (int r = 0; r < R; r++) s[r] = _mm512_dpbusd_epi32(s[r], c, _mm512_set1_epi32((from)[r])); }

/* R rows of x times what is laid out of int8 codes: added to f (R, 16), in blocks of 32 */
INLINE void many_wide(const int R, const Many *x, int64_t m, int64_t k, int64_t end, const Laid *l, float *f) {
    const int32_t *from = (const int32_t *)(x->d + m * x->width) + k / 4 * TALL, *codes = l->codes;
    const float *units = x->units + m * x->G;
    const int32_t *off = (const int32_t *)x->sums + m * x->G;
    __m512 total[TALL];
    for (int r = 0; r < R; r++) total[r] = _mm512_load_ps(f + r * TILE);
    for (int64_t g = k / 32; k < end; k += 32, g++, codes += 8 * TILE, from += 8 * TALL) {
        __m512i s[TALL];
        for (int r = 0; r < R; r++) s[r] = _mm512_set1_epi32(off[r * x->G + g]);
        for (int i = 0; i < 8; i++) MEET(s, from + i * TALL, codes + i * TILE)
        for (int r = 0; r < R; r++)
            total[r] = _mm512_fmadd_ps(_mm512_set1_ps(units[r * x->G + g]), _mm512_cvtepi32_ps(s[r]), total[r]);
    }
    for (int r = 0; r < R; r++) _mm512_store_ps(f + r * TILE, total[r]);
}

/* the same of codes of up to four bits, in groups */
INLINE void many_narrow(const int R, const Many *x, int64_t m, int64_t k, int64_t end, const Laid *l, float *f) {
    const int32_t *from = (const int32_t *)(x->d + m * x->width) + k / 4 * TALL, *codes = l->codes;
    const float *units = x->units + m * x->G, *sums = x->sums + m * x->G;
    __m512 total[TALL];
    for (int r = 0; r < R; r++) total[r] = _mm512_load_ps(f + r * TILE);
    for (int64_t n = 0, g = k / x->block; k < end; k += x->block, n++, g++) {
        const __m512 scale = _mm512_load_ps(l->scales[n]), zero = _mm512_load_ps(l->zeros[n]);
        __m512i s[TALL];
        for (int r = 0; r < R; r++) s[r] = _mm512_setzero_si512();
        for (int64_t part = 0; part < x->block; part += 32, codes += 8 * TILE, from += 8 * TALL)
            for (int i = 0; i < 8; i++) MEET(s, from + i * TALL, codes + i * TILE)
        for (int r = 0; r < R; r++) {
            const __m512 unit = _mm512_mul_ps(_mm512_set1_ps(units[r * x->G + g]), scale);
            total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(s[r]), unit, total[r]);
            total[r] = _mm512_fmadd_ps(_mm512_set1_ps(sums[r * x->G + g]), zero, total[r]);
        }
    }
    for (int r = 0; r < R; r++) _mm512_store_ps(f + r * TILE, total[r]);
}

#else

/* R rows of x, int16, times what is laid out of int8 codes: added to f (R, 16), in blocks of 32 */
INLINE void many_wide(const int R, const Many *x, int64_t m, int64_t k, int64_t end, const Laid *l, float *f) {
    const int32_t *from[TALL], *codes = l->codes;
    __m256 total[TALL][2];
    EACH total[r][j] = _mm256_load_ps(f + r * TILE + 8 * j);
    for (int r = 0; r < R; r++) from[r] = (const int32_t *)(x->d + ((m + r) * x->width + k) * 2);
    for (; k < end; k += 32, codes += 16 * TILE) {
        __m256i s[TALL][2];
        EACH s[r][j] = _mm256_setzero_si256();
        for (int i = 0; i < 16; i++) {
            const __m256i *c = (const __m256i *)(codes + i * TILE);
            const __m256i low = c[0], high = c[1];
            for (int r = 0; r < R; r++) {
                const __m256i v = _mm256_set1_epi32(from[r][i]);
                s[r][0] = _mm256_add_epi32(s[r][0], _mm256_madd_epi16(low, v));
                HERE(s[r][0]);
                s[r][1] = _mm256_add_epi32(s[r][1], _mm256_madd_epi16(high, v));
                HERE(s[r][1]);
            }
        }
        EACH total[r][j] = _mm256_fmadd_ps(_mm256_broadcast_ss(x->units + (m + r) * x->G + k / 32),
                                           _mm256_cvtepi32_ps(s[r][j]), total[r][j]);
        for (int r = 0; r < R; r++) from[r] += 16;
    }
    EACH _mm256_store_ps(f + r * TILE + 8 * j, total[r][j]);
}

/* the same of bytes, times codes of up to four bits: eight products of pairs fit into 16 bits */
INLINE void many_narrow(const int R, const Many *x, int64_t m, int64_t k, int64_t end, const Laid *l, float *f) {
    const int32_t *from[TALL], *codes = l->codes;
    const __m256i ones = _mm256_set1_epi16(1);
    const int64_t block = x->block;
    int64_t g = k / block;
    __m256 total[TALL][2];
    EACH total[r][j] = _mm256_load_ps(f + r * TILE + 8 * j);
    for (int r = 0; r < R; r++) from[r] = (const int32_t *)(x->d + (m + r) * x->width + k);
    for (int n = 0; k < end; k += block, n++, g++) {
        for (int64_t part = 0; part < block; part += 32, codes += 8 * TILE) {
            __m256i s[TALL][2];
            EACH s[r][j] = _mm256_setzero_si256();
            for (int i = 0; i < 8; i++) {
                const __m256i *c = (const __m256i *)(codes + i * TILE);
                const __m256i low = c[0], high = c[1];
                for (int r = 0; r < R; r++) {
                    const __m256i v = _mm256_set1_epi32(from[r][i]);
                    s[r][0] = _mm256_add_epi16(s[r][0], _mm256_maddubs_epi16(low, v));
                    HERE(s[r][0]);
                    s[r][1] = _mm256_add_epi16(s[r][1], _mm256_maddubs_epi16(high, v));
                    HERE(s[r][1]);
                }
            }
            for (int r = 0; r < R; r++) {
                const __m256 unit = _mm256_broadcast_ss(x->units + (m + r) * x->G + g);
                for (int j = 0; j < 2; j++)
                    total[r][j] = _mm256_fmadd_ps(
                        _mm256_cvtepi32_ps(_mm256_madd_epi16(s[r][j], ones)),
                        _mm256_mul_ps(unit, _mm256_load_ps(l->scales[n] + 8 * j)), total[r][j]);
                from[r] += 8;
            }
        }
        EACH total[r][j] = _mm256_fmadd_ps(_mm256_broadcast_ss(x->sums + (m + r) * x->G + g),
                                           _mm256_load_ps(l->zeros[n] + 8 * j), total[r][j]);
    }
    EACH _mm256_store_ps(f + r * TILE + 8 * j, total[r][j]);
}

#endif

#define MAKE_MANY(R) \
ALONE void many_wide_##R(const Many *x, int64_t m, int64_t k, int64_t end, const Laid *l, float *f) { \
    many_wide(R, x, m, k, end, l, f); } \
ALONE void many_narrow_##R(const Many *x, int64_t m, int64_t k, int64_t end, const Laid *l, float *f) { \
    many_narrow(R, x, m, k, end, l, f); }
MAKE_MANY(1) MAKE_MANY(2) MAKE_MANY(3) MAKE_MANY(4) MAKE_MANY(5) MAKE_MANY(6)
#if TALL > 6
MAKE_MANY(7) MAKE_MANY(8) MAKE_MANY(9) MAKE_MANY(10) MAKE_MANY(11) MAKE_MANY(12)
#define TALLER(name) name##_1, name##_2, name##_3, name##_4, name##_5, name##_6, \
                     name##_7, name##_8, name##_9, name##_10, name##_11, name##_12
#else
#define TALLER(name) name##_1, name##_2, name##_3, name##_4, name##_5, name##_6
#endif

INLINE __m256 rounded(__m256 v) { /* to bfloat16 */
    const __m256i u = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i near = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256 cut = _mm256_castsi256_ps(_mm256_and_si256(near, _mm256_set1_epi32(0xffff0000)));
    return _mm256_blendv_ps(cut, v, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}

/* x times rows begin to end of w, begin a multiple of 16, to y (M, N) of float32: rounded to bfloat16 where half is
   set, with the bias, if there is one, rounded again; f: (M, 16), aligned to 64 */
static void many_part(const Many *x, const Matrix *w, float *y, int64_t begin, int64_t end, const int half, Laid *l,
                      float *f) {
    static void (*const wide[])(const Many *, int64_t, int64_t, int64_t, const Laid *, float *) = {TALLER(many_wide)};
    static void (*const narrow[])(const Many *, int64_t, int64_t, int64_t, const Laid *, float *) = {
        TALLER(many_narrow)};
    const int64_t ready = multiple(w->K, x->block);
    for (int64_t n = begin; n < end; n += TILE) {
        const int64_t here = end - n < TILE ? end - n : TILE;
        float scale[TILE] = {0}, bias[TILE] = {0};
        for (int64_t i = 0; i < here; i++) {
            scale[i] = x->eight ? ((const float *)w->scale)[n + i] : 1;
            bias[i] = w->bias ? w->bias[n + i] : 0;
        }
        memset(f, 0, x->M * TILE * sizeof(float));
        for (int64_t k = 0; k < ready; k += STRETCH) {
            const int64_t stop = ready - k < STRETCH ? ready : k + STRETCH;
            lay_out(w, n, k, stop, l);
            for (int64_t m = 0; m < x->M; m += TALL) {
                const int64_t rows = x->M - m < TALL ? x->M - m : TALL;
                (x->eight ? wide : narrow)[rows - 1](x, m, k, stop, l, f + m * TILE);
            }
        }
        for (int64_t m = 0; m < x->M; m++)
            for (int j = 0; j < 2; j++) {
                __m256 v = _mm256_mul_ps(_mm256_load_ps(f + m * TILE + 8 * j), _mm256_loadu_ps(scale + 8 * j));
                if (half) v = rounded(v);
                if (w->bias) v = _mm256_add_ps(v, _mm256_loadu_ps(bias + 8 * j));
                if (w->bias && half) v = rounded(v);
                if (here == TILE) _mm256_storeu_ps(y + m * w->N + n + 8 * j, v);
                else {
                    float part[8];
                    _mm256_storeu_ps(part, v);
                    for (int i = 0; i < 8 && 8 * j + i < here; i++) y[m * w->N + n + 8 * j + i] = part[i];
                }
            }
    }
}

#define AT_ONCE 512 /* rows of x whose numbers are rounded at once */

/* x (M, K) times w, as `multiply` */
static int multiply_many(const void *x, const Matrix *w, void *y, int64_t M, int half, int threads) {
    const int64_t K = w->K, N = w->N, most = M < AT_ONCE ? M : AT_ONCE, tiles = (N + TILE - 1) / TILE;
    const int64_t own = sizeof(Laid) + most * TILE * sizeof(float);
    char *memory = aligned_alloc(64, many_bytes(most, K) + threads * multiple(own, 64));
    float *wide = half ? malloc(most * N * sizeof(float)) : NULL;
    const int lacks = !memory || (half && !wide);
    for (int64_t first = 0; first < M && !lacks; first += most) {
        const int64_t rows = M - first < most ? M - first : most;
        const Many d = many_for(w, rows, memory);
        float *to = half ? wide : (float *)y + first * N;
        uint16_t *end = half ? (uint16_t *)y + first * N : NULL;
        #pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t m = 0; m < rows; m++)
            round_row(&d, m, half ? NULL : (const float *)x + (first + m) * K,
                      half ? (const uint16_t *)x + (first + m) * K : NULL);
        #pragma omp parallel for schedule(static) num_threads(threads)
        for (int i = 0; i < threads; i++) {
            Laid *l = (Laid *)(memory + many_bytes(most, K) + i * multiple(own, 64));
            const int64_t from = tiles * i / threads * TILE, until = tiles * (i + 1) / threads * TILE;
            if (from < until) many_part(&d, w, to, from, until < N ? until : N, half, l, (float *)(l + 1));
        }
        #pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t m = 0; m < (half ? rows : 0); m++)
            for (int64_t n = 0; n < N; n++) end[m * N + n] = as_bits(to[m * N + n]) >> 16;
    }
    free(memory);
    free(wide);
    return lacks;
}
