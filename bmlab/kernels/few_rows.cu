// At most 16 rows of x times weights, for compute capability 9.0 and later; compiled by NVRTC.
//
// As one_row.cu, but a tensor core's eight columns are eight rows of x. Tiles of 16 rows of weights are shared by PARTS
// warps of as many programs as a cluster has: a program holds x of its own warps' columns alone, so that a wide x fits.
// At the end the parts are added, out of the shared memory of the cluster. Sums of packed weights have the order of the
// Triton kernels of triton_products, and so their bits.
//
// Defined by the caller, besides what rows.cuh names: CLUSTER (programs that share a tile: 1, 2, 4), TOTAL (warps of a
// program), DEPTH (of a ring), FIT (programs of a multiprocessor, at least), ROWS (8, 16: at least as many as x has),
// AFTER (may the next kernel begin only after the one ahead has ended?), HAS_BIAS, HAS_RESIDUAL, AHEAD, NORM (1: divide
// what comes out by the root mean square of `of`, of which x is a weighed copy; 2: normalize x, with weights `of`)
#include "rows.cuh"

#define OF (PARTS / CLUSTER)                            // warps of a program that share a tile
#define TEAMS (TOTAL / OF)
#define OWN ((UNITS + PARTS - 1) / PARTS * OF)          // units of a program's columns, at most
#define LINE (OWN * COLUMNS + (BITS == 16 ? 16 : 32))   // bytes of a row of x: no two rows meet in a bank
#define TALL 20                                         // numbers of a column of a part, of which 16 are used
#define SIDES (ROWS / 8)

// one of the parts of a sum
__device__ __forceinline__ float part_of(const float* from, int part, int stride) {
    from += part % OF * stride;
    return CLUSTER > 1 ? taken(from, part / OF) : *from;
}
// all of them, as Triton adds those of its warps
__device__ __forceinline__ float whole(const float* from, int stride) {
    float sum = part_of(from, 0, stride) + part_of(from, PARTS / 2, stride);
    if (PARTS == 4) sum += part_of(from, 1, stride) + part_of(from, 3, stride);
    return sum;
}
__device__ __forceinline__ void bring(u32 to, const u8* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void meet() {
    if (CLUSTER == 1) __syncthreads();
    else asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(TOTAL * 32, FIT) few_rows(
        const u16* x, const u8* __restrict__ codes, const void* __restrict__ scale, const u16* __restrict__ zero,
        const u16* bias, const u16* residual, const u16* weight, const u16* of, u16* y, u16* ahead, float eps,
        float offset, int M) {
    extern __shared__ __align__(128) u8 memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int rank = blockIdx.x % CLUSTER, cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    const int team = warp / OF, w = warp % OF, part = rank * OF + w;
    if (!AFTER) asm volatile("griddepcontrol.launch_dependents;");
    const u32 inverse_M = 65535 / M + 1;                // (exact for what is divided here)
    const int tiles = (TILES - cluster + clusters - 1) / clusters;      // of the cluster
    float* squares = (float*)(memory + TOTAL * DEPTH * UNIT);
    float* inverses = squares + (NORM == 2 ? TOTAL : OF) * ROWS;
    float* sums = inverses + ROWS;                      // of x, by group and row
    float* parts = sums + (BITS == 4 ? 2 * OWN * ROWS : 0);
    u8* norm = (u8*)(parts + (TILES + clusters - 1) / clusters * OF * M * TALL);  // weights of a norm of x
    u8* rows = norm + (NORM == 2 ? K * 2 : 0);          // x

    // ---- what a warp asks for: its program's units of its tiles, one after another ----
    const u32 ring = kept(shared(memory) + warp * DEPTH * UNIT), end = ring + DEPTH * UNIT;
    int next_tile = part < UNITS ? cluster + team * clusters : TILES, next_unit = part;
    const int jump = TEAMS * clusters;
    ASKING();
    BEGIN()
#if NORM == 2
    for (int i = threadIdx.x * 16; i < K * 2; i += TOTAL * 512)
        bring(shared(norm) + i, (const u8*)of + i);
#endif
    for (int i = 0; i < DEPTH; i++) ASK(ring + i * UNIT)

    // ---- the program's columns of x, once the kernel ahead is done ----
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (AFTER) asm volatile("griddepcontrol.launch_dependents;");
    const u32 rows_at = shared(rows);
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < OWN * COLUMNS; i += TOTAL * 512) {
            const int j = i + threadIdx.x * 16, mine = j / COLUMNS;
            const int unit = mine / OF * PARTS + rank * OF + mine % OF;
            if (j < OWN * COLUMNS && unit < UNITS)
                bring(rows_at + m * LINE + j, (const u8*)(x + m * K) + unit * COLUMNS + j % COLUMNS);
        }
    asm volatile("cp.async.commit_group;" ::: "memory");
#if NORM == 1
#define STEPS ((K + PARTS * 256 - 1) / (PARTS * 256))
    for (int i = warp; i < M * OF; i += TOTAL) {        // in the order of a warp of a Triton program
        const int m = i / OF, first = (rank * OF + i % OF) * 256 + lane * 8;
        float sum = 0.0f;
#pragma unroll
        for (int at = 0; at < STEPS; at += 8) {         // (registers for eight at a time)
            uint4 vs[8];
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const int k = first + (at + j) * PARTS * 256;
                vs[j] = at + j < STEPS && k < K ? *(const uint4*)(of + m * K + k) : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int j = 0; j < 8; j++) if (at + j < STEPS) sum = squared(vs[j], sum);
        }
        sum = of_warp(sum);
        if (lane == 0) squares[i % OF * ROWS + m] = sum;
    }
#endif
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
#if NORM == 2                                           // (CLUSTER is 1)
    for (int m = 0; m < M; m++) {
        float sum = 0.0f;
        for (int i = threadIdx.x * 16; i < K * 2; i += TOTAL * 512)
            sum = squared(*(const uint4*)(rows + m * LINE + i), sum);
        sum = of_warp(sum);
        if (lane == 0) squares[m * TOTAL + warp] = sum;
    }
    __syncthreads();
    for (int m = 0; m < M; m++) {
        float all = 0.0f;
#pragma unroll
        for (int i = 0; i < TOTAL; i++) all += squares[m * TOTAL + i];
        const float inverse = inverse_root(all / K + eps);
        for (int i = threadIdx.x * 16; i < K * 2; i += TOTAL * 512) {
            uint4* at = (uint4*)(rows + m * LINE + i);
            const uint4 v = *at, by = *(const uint4*)(norm + i);
            *at = make_uint4(normalized(v.x, by.x, inverse, offset), normalized(v.y, by.y, inverse, offset),
                             normalized(v.z, by.z, inverse, offset), normalized(v.w, by.w, inverse, offset));
        }
    }
    __syncthreads();
#endif
    // rows that are not there are the last one again
    u32 row_at[SIDES];
#pragma unroll
    for (int side = 0; side < SIDES; side++)
        row_at[side] = kept(rows_at + (BITS == 16 ? min(lane % 8 + 8 * side, M - 1) * LINE + lane / 8 * 16
                                                  : min(g + 8 * side, M - 1) * LINE + t * 8));
    // of 64 columns thread t reads 16·b + 4·t … + 3 for b = 0 … 3
#define READ(from, v) \
    uint2 v[4]; \
    _Pragma("unroll") for (int b = 0; b < 4; b++) \
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v[b].x), "=r"(v[b].y) : "r"((from) + b * 32))
#if BITS == 4
    const u32 ones[4] = {ONES, ONES, ONES, ONES};
    const int pairs = 2 * OWN * M;                      // of a group and a row: a tensor core takes eight of them
#define PAIR(i, group, m) \
    const int group = (i) * inverse_M >> 16, m = (i) - group * M
    for (int i = warp * 8; i < pairs; i += TOTAL * 8) {
        PAIR(min(i + g, pairs - 1), group, m);
        float sum[4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            READ(rows_at + m * LINE + group * 256 + half * 128 + t * 8, v);
            product(sum, ones, v[0].x, v[1].x), product(sum, ones, v[0].y, v[1].y);
            product(sum, ones, v[2].x, v[3].x), product(sum, ones, v[2].y, v[3].y);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            PAIR(i + 2 * t + j, of_group, of_row);
            if (g == 0 && i + 2 * t + j < pairs) sums[of_group * ROWS + of_row] = sum[j];
        }
    }
    __syncthreads();
#endif

    // ---- the products ----
    // a thread's row of four matrices of 16 bytes: rows 0-7 and 8-15, then the next 16 bytes of both
    const u32 matrix = kept((lane / 8 % 2 * 8 + lane % 8) * 128 + (lane / 16 ^ lane % 8) * 16);
    u32 here = ring;
    for (int local = team; local < tiles; local += TEAMS) {
        float acc[SIDES][4] = {};
        u32 columns = w * COLUMNS;
        const float2* sum = (const float2*)sums + w * ROWS + t;
        for (int u = part; u < UNITS; u += PARTS) {
            asm volatile("cp.async.wait_group %0;" :: "n"(DEPTH - 1) : "memory");
            __syncwarp();
            u32 m[16], s[2], z[2];
            TAKE(here, m, s, z)
            __syncwarp();
            ASK(here)
            here = here + UNIT == end ? ring : here + UNIT;
#if BITS == 16
#pragma unroll
            for (int side = 0; side < SIDES; side++) {
                u32 v[8];
                matrices(row_at[side] + columns, v), matrices(row_at[side] + columns + 64, v + 4);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    product(acc[side], {m[4 * i], m[4 * i + 1], m[4 * i + 2], m[4 * i + 3]}, v[2 * i], v[2 * i + 1]);
            }
#else
            u32 a[4], c[4];                             // of each four bytes the first two, the other two
#endif
#if BITS == 8
#pragma unroll
            for (int half = 0; half < 2; half++) {      // 64 columns
#pragma unroll
                for (int i = 0; i < 4; i++) widen(m[8 * half + i], a[i], c[i]);
                u32 d[4], e[4];
#pragma unroll
                for (int i = 0; i < 4; i++) widen(m[8 * half + 4 + i], d[i], e[i]);
#pragma unroll
                for (int side = 0; side < SIDES; side++) {
                    READ(row_at[side] + columns + half * 128, v);
                    product(acc[side], a, v[0].x, v[1].x), product(acc[side], c, v[0].y, v[1].y);
                    product(acc[side], d, v[2].x, v[3].x), product(acc[side], e, v[2].y, v[3].y);
                }
            }
#elif BITS == 4
            float o[SIDES][2][4] = {};                  // of two groups side by side
#pragma unroll
            for (int step = 0; step < 4; step++) {      // the low nibbles of both, then the high ones
                const int half = step % 2, high = step / 2;
                u32 d[4], e[4];
#pragma unroll
                for (int i = 0; i < 4; i++) nibbles(m[8 * half + i], high, a[i], c[i]);
#pragma unroll
                for (int i = 0; i < 4; i++) nibbles(m[8 * half + 4 + i], high, d[i], e[i]);
#pragma unroll
                for (int side = 0; side < SIDES; side++) {
                    READ(row_at[side] + columns + half * 256 + high * 128, v);
                    product(o[side][half], a, v[0].x, v[1].x), product(o[side][half], c, v[0].y, v[1].y);
                    product(o[side][half], d, v[2].x, v[3].x), product(o[side][half], e, v[2].y, v[3].y);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float sg = half_to_float(s[i] >> (16 * half)), zg = half_to_float(z[i] >> (16 * half));
                    const float both = __fmaf_rn(-FROM, sg, zg);
#pragma unroll
                    for (int side = 0; side < SIDES; side++) {
                        const float2 two = sum[(half * ROWS + 8 * side) / 2];
#pragma unroll
                        for (int j = 0; j < 2; j++) {
                            float& at = acc[side][2 * i + j];
                            at = __fmaf_rn(o[side][half][2 * i + j], sg, at);
                            at = __fmaf_rn(j ? two.y : two.x, both, at);
                        }
                    }
                }
            }
#endif
            columns += OF * COLUMNS, sum += OF * ROWS;
        }
        float* to = parts + (local * OF + w) * M * TALL + g;
#pragma unroll
        for (int side = 0; side < SIDES; side++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = 8 * side + 2 * t + i % 2;
                if (row < M) to[row * TALL + i / 2 * 8] = acc[side][i];
            }
    }

    // ---- the ends ----
    const int high = GATE ? 8 : 16, all = tiles * high * M, first = rank * TOTAL * 32 + threadIdx.x;
#define PLACE(i) \
    const int r = (i) % high, j = (i) / high, local = j * inverse_M >> 16, m = j - local * M; \
    const int to = (cluster + local * clusters) * high + r; \
    const long long at = (long long)m * (GATE ? N / 2 : N) + to
    float rest = 0.0f, next = 0.0f;
    if (first < all) {                                  // asked for before all have met
        PLACE(first);
        if (HAS_RESIDUAL) rest = wide(residual[at]);
        if (AHEAD) next = wide(weight[to]);
    }
    meet();
#if NORM == 1
    if (threadIdx.x < M)
        inverses[threadIdx.x] = inverse_root(quotient(whole(squares + threadIdx.x, ROWS), (float)K) + eps);
    __syncthreads();
#endif
    for (int i = first; i < all; i += CLUSTER * TOTAL * 32) {
        PLACE(i);
        const float* at_part = parts + (local * OF * M + m) * TALL + r;
        if (HAS_RESIDUAL && i > first) rest = wide(residual[at]);
        if (AHEAD && i > first) next = wide(weight[to]);
        float outs[2];
#pragma unroll
        for (int half = 0; half < (GATE ? 2 : 1); half++) {
            const int n = to + half * (N / 2);
            float out = whole(at_part + 8 * half, M * TALL), b = HAS_BIAS ? wide(bias[n]) : 0.0f;
            const float unit = BITS == 8 ? ((const float*)scale)[n] : 1.0f;
#if NORM == 1
            outs[half] = __fmaf_rn(BITS == 8 ? __fmul_rn(out, unit) : out, inverses[m], b);
#else
            outs[half] = BITS == 8 ? __fmaf_rn(out, unit, b) : out + b;
#endif
        }
        u16 done = narrow(outs[0]);                     // what follows sees the rounded product
        if (HAS_RESIDUAL) done = narrow(wide(done) + rest);
        if (GATE) done = gated(done, narrow(outs[1]));
        y[at] = done;
        if (AHEAD) ahead[at] = narrow(__fmul_rn(wide(done), next + offset));
    }
    if (CLUSTER > 1) meet();                            // others read what lies here
}
