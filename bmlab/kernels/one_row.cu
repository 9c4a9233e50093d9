// One row of x times weights, for compute capability 9.0 and later; compiled by NVRTC.
//
// A program stays on its multiprocessor. Teams of WARPS warps take tiles of 16 rows of codes. A warp copies what it
// multiplies into a ring of its own, and begins before the kernel ahead has ended: weights do not depend on it. Warps
// meet once a tile. Sums of packed weights have the order of the Triton kernels of triton_products, and so their bits:
// each warp of a team goes over its own part of the columns, 16 at a time, and the parts are added once.
//
// Defined by the caller: N, K, BITS (8; 4 in groups of 128; 16: as x), BF16 (1; 0: float16), WARPS (of a team: 2, 4),
// TOTAL (warps of a program), DEPTH (of a ring), AFTER (may the next kernel begin only after the one ahead has ended?),
// HAS_BIAS, HAS_RESIDUAL, GATE (see rows.cuh), AHEAD, NORM (1: divide what comes out by the root mean square of `of`, of
// which x is a weighed copy; 2: normalize x, with weights `of`)
#define PARTS WARPS
#include "rows.cuh"

#define TEAMS (TOTAL / WARPS)

extern "C" __global__ void __launch_bounds__(TOTAL * 32, 2) one_row(
        const u16* x, const u8* __restrict__ codes, const void* __restrict__ scale, const u16* __restrict__ zero,
        const u16* bias, const u16* residual, const u16* weight, const u16* of, u16* y, u16* ahead, float eps,
        float offset) {
    extern __shared__ __align__(128) u8 memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp / WARPS, w = warp % WARPS;
    const int g = lane / 4, t = lane % 4;
    if (!AFTER) asm volatile("griddepcontrol.launch_dependents;");
    u16* row = (u16*)(memory + TOTAL * DEPTH * UNIT);   // x, in the order in which threads read it
    float* sums = (float*)(row + K);                    // of x, by group
    float* parts = sums + (BITS == 4 ? K / 128 : 0);    // two buffers of (TEAMS, WARPS, 16)
    float* squares = parts + 2 * TOTAL * 16;

    // ---- what a warp asks for: its units of its team's tiles, one after another ----
    const u32 ring = kept(shared(memory) + warp * DEPTH * UNIT), end = ring + DEPTH * UNIT;
    int next_tile = blockIdx.x + team * gridDim.x, next_unit = w;
    const int part = w, jump = TEAMS * gridDim.x;
    ASKING();
    if (w >= UNITS) next_tile = TILES;
    BEGIN()
    for (int i = 0; i < DEPTH; i++) ASK(ring + i * UNIT)

    // ---- the row, once the kernel ahead is done; both rows are asked for before either is used ----
    uint4 xs[(K + TOTAL * 256 - 1) / (TOTAL * 256)];
#if NORM == 2
    uint4 ws[sizeof(xs) / 16];
#pragma unroll
    for (int j = 0; j < sizeof(xs) / 16; j++) {
        const int i = (j * TOTAL * 32 + threadIdx.x) * 8;
        if (i < K) ws[j] = *(const uint4*)(of + i);
    }
#endif
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (AFTER) asm volatile("griddepcontrol.launch_dependents;");
#pragma unroll
    for (int j = 0; j < sizeof(xs) / 16; j++) {
        const int i = (j * TOTAL * 32 + threadIdx.x) * 8;
        if (i < K) xs[j] = *(const uint4*)(x + i);
    }
#if NORM == 2
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < sizeof(xs) / 16; j++) {
        if ((j * TOTAL * 32 + threadIdx.x) * 8 >= K) break;
        sum = squared(xs[j], sum);
    }
    sum = of_warp(sum);
    if (lane == 0) squares[warp] = sum;
    __syncthreads();
    float all = 0.0f;
#pragma unroll
    for (int j = 0; j < TOTAL; j++) all += squares[j];
    const float inverse = inverse_root(all / K + eps);
#pragma unroll
    for (int j = 0; j < sizeof(xs) / 16; j++) {
        xs[j] = make_uint4(normalized(xs[j].x, ws[j].x, inverse, offset), normalized(xs[j].y, ws[j].y, inverse, offset),
                           normalized(xs[j].z, ws[j].z, inverse, offset),
                           normalized(xs[j].w, ws[j].w, inverse, offset));
    }
#elif NORM
    if (warp < WARPS) {                                 // in the order of a Triton program of WARPS warps
        float sum = 0.0f;
        const int all = (K + WARPS * 256 - 1) / (WARPS * 256);
#pragma unroll
        for (int first = 0; first < all; first += 8) {  // (registers for eight at a time)
            uint4 vs[8];
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const int i = ((first + j) * WARPS * 32 + threadIdx.x) * 8;
                vs[j] = i < K ? *(const uint4*)(of + i) : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int j = 0; j < 8; j++) sum = squared(vs[j], sum);
        }
        sum = of_warp(sum);
        if (lane == 0) squares[warp] = sum;
    }
#endif
    // of 64 columns thread t reads 16·b + 4·t … + 3 for b = 0 … 3: of each pair of b first two numbers each, then two;
    // of weights as wide as x 8·b + 2·t, + 1 for b = 0 … 7
#pragma unroll
    for (int j = 0; j < sizeof(xs) / 16; j++) {
        const int i = (j * TOTAL * 32 + threadIdx.x) * 8, b = i % 64 / 16, first = i % 16 / 4;
        if (i >= K) break;
        u32* to = (u32*)(row + i / 64 * 64) + (BITS == 16 ? i % 64 / 8 : first * 8 + b / 2 * 4 + b % 2);
        if (BITS == 16) to[0] = xs[j].x, to[8] = xs[j].y, to[16] = xs[j].z, to[24] = xs[j].w;
        else to[0] = xs[j].x, to[2] = xs[j].y, to[8] = xs[j].z, to[10] = xs[j].w;
    }
    __syncthreads();
#if NORM == 1
    float sum = squares[0] + squares[WARPS / 2];
    if (WARPS == 4) sum += squares[1] + squares[3];
    const float inverse = inverse_root(quotient(sum, (float)K) + eps);
#endif
    const u32 row_at = kept(shared(row) + t * 32);
#define READ(from, p, q)                                /* 64 columns */ \
    uint4 p, q; \
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" \
                 : "=r"(p.x), "=r"(p.y), "=r"(p.z), "=r"(p.w) : "r"(from)); \
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" \
                 : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w) : "r"((from) + 16))
#if BITS == 4
    const u32 ones[4] = {ONES, ONES, ONES, ONES};
    for (int i = warp * 8; i < K / 128; i += TOTAL * 8) {       // a tensor core takes eight groups
        const u32 at = row_at + min(i + g, K / 128 - 1) * 256;
        float s[4] = {0, 0, 0, 0};
#pragma unroll
        for (int side = 0; side < 2; side++) {
            READ(at + side * 128, p, q);
            product(s, ones, p.x, p.y), product(s, ones, p.z, p.w);
            product(s, ones, q.x, q.y), product(s, ones, q.z, q.w);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) if (g == 0 && i + 2 * t + j < K / 128) sums[i + 2 * t + j] = s[j];
    }
    __syncthreads();
#endif

    // ---- the products ----
    // a thread's row of four matrices of 16 bytes: rows 0-7 and 8-15, then the next 16 bytes of both
    const u32 matrix = kept((lane / 8 % 2 * 8 + lane % 8) * 128 + (lane / 16 ^ lane % 8) * 16);
    u32 here = ring;
    int round = 0;
    for (int tile = blockIdx.x + team * gridDim.x; tile < TILES; tile += TEAMS * gridDim.x, round++) {
        const int r = lane % 16, n = ROW_OF(tile, r), to = GATE ? tile * 8 + r % 8 : n;
        float unit = 1.0f, b = 0.0f, rest = 0.0f, next = 0.0f;
        if (w == 0) {                                   // asked for before the sums
            if (BITS == 8) unit = ((const float*)scale)[n];
            if (HAS_BIAS) b = wide(bias[n]);
            if (HAS_RESIDUAL) rest = wide(residual[to]);
            if (AHEAD) next = wide(weight[to]);
        }
        float acc[4] = {0, 0, 0, 0};
        u32 columns = row_at + w * COLUMNS;
        const float2* sum = (const float2*)sums + w;
        for (int u = w; u < UNITS; u += WARPS) {
            asm volatile("cp.async.wait_group %0;" :: "n"(DEPTH - 1) : "memory");
            __syncwarp();
            u32 m[16], s[2], z[2];
            TAKE(here, m, s, z)
            __syncwarp();
            ASK(here)
            here = here + UNIT == end ? ring : here + UNIT;
#if BITS == 16
            READ(columns, p, q);
            product(acc, {m[0], m[1], m[2], m[3]}, p.x, p.y), product(acc, {m[4], m[5], m[6], m[7]}, p.z, p.w);
            product(acc, {m[8], m[9], m[10], m[11]}, q.x, q.y), product(acc, {m[12], m[13], m[14], m[15]}, q.z, q.w);
#else
            u32 a[4], c[4];                             // of each four bytes the first two, the other two
#endif
#if BITS == 8
#pragma unroll
            for (int half = 0; half < 2; half++) {      // 64 columns
                READ(columns + half * 128, p, q);
#pragma unroll
                for (int i = 0; i < 4; i++) widen(m[8 * half + i], a[i], c[i]);
                product(acc, a, p.x, p.y), product(acc, c, p.z, p.w);
#pragma unroll
                for (int i = 0; i < 4; i++) widen(m[8 * half + 4 + i], a[i], c[i]);
                product(acc, a, q.x, q.y), product(acc, c, q.z, q.w);
            }
#elif BITS == 4
            float o[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};       // two groups side by side
#pragma unroll
            for (int step = 0; step < 4; step++) {      // the low nibbles of both, then the high ones
                const int half = step % 2, high = step / 2;
                READ(columns + half * 256 + high * 128, p, q);
#pragma unroll
                for (int i = 0; i < 4; i++) nibbles(m[8 * half + i], high, a[i], c[i]);
                product(o[half], a, p.x, p.y), product(o[half], c, p.z, p.w);
#pragma unroll
                for (int i = 0; i < 4; i++) nibbles(m[8 * half + 4 + i], high, a[i], c[i]);
                product(o[half], a, q.x, q.y), product(o[half], c, q.z, q.w);
            }
            const float2 both = *sum;
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float sg = half_to_float(s[i] >> (16 * half)), zg = half_to_float(z[i] >> (16 * half));
                    acc[2 * i] = __fmaf_rn(o[half][2 * i], sg, acc[2 * i]);
                    acc[2 * i] = __fmaf_rn(half ? both.y : both.x, __fmaf_rn(-FROM, sg, zg), acc[2 * i]);
                }
            }
            sum += WARPS;
#endif
            columns += WARPS * COLUMNS;
        }
        float* part = parts + (round % 2 * TEAMS + team) * WARPS * 16;
        if (t == 0) part[w * 16 + g] = acc[0], part[w * 16 + g + 8] = acc[2];
        asm volatile("bar.sync %0, %1;" :: "r"(1 + team), "r"(WARPS * 32) : "memory");
        if (w > 0) continue;
        float out = part[r] + part[WARPS / 2 * 16 + r];
        if (WARPS == 4) out += part[16 + r] + part[48 + r];
#if NORM == 1
        out = __fmaf_rn(BITS == 8 ? __fmul_rn(out, unit) : out, inverse, b);
#else
        out = BITS == 8 ? __fmaf_rn(out, unit, b) : out + b;
#endif
        u16 done = narrow(out);                         // what follows sees the rounded product
        if (HAS_RESIDUAL) done = narrow(wide(done) + rest);
        if (GATE) done = gated(done, __shfl_down_sync(~0u, done, 8));
        if (lane < (GATE ? 8 : 16)) {
            y[to] = done;
            if (AHEAD) ahead[to] = narrow(__fmul_rn(wide(done), next + offset));
        }
    }
}
