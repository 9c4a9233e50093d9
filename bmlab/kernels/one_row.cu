// One row of x times weights, for compute capability 9.0 and later; compiled by NVRTC, which has no headers.
//
// A program stays on its multiprocessor. Teams of WARPS warps take tiles of 16 rows of codes. A warp copies what it
// multiplies into a ring of its own, and begins before the kernel ahead has ended: weights do not depend on it. Warps
// meet once a tile. Sums of packed weights have the order of the Triton kernels of triton_products, and so their bits:
// each warp of a team goes over its own part of the columns, 16 at a time, and the parts are added once.
//
// Defined by the caller: N, K, BITS (8; 4 in groups of 128; 16: as x), BF16 (1; 0: float16), WARPS (of a team: 2, 4),
// TOTAL (warps of a program), DEPTH (of a ring), AFTER (may the next kernel begin only after the one ahead has ended?),
// HAS_BIAS, HAS_RESIDUAL, GATE (is the first half of the rows a SiLU gate for the second?), AHEAD, NORM (1: divide what
// comes out by the root mean square of `of`, of which x is a weighed copy; 2: normalize x, with weights `of`)
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#define TEAMS (TOTAL / WARPS)
#define BYTES (K * BITS / 8)                            // of a row of codes
#define UNITS (BYTES / 128)                             // what a warp takes of a row at a time: 128 bytes
#define UNIT (16 * (128 + (BITS == 4 ? 8 : 0)))         // bytes of a unit of a tile: codes; scales, zeros of two groups
#define TILES (N / 16)
#define ROW_OF(tile, r) (GATE ? (tile) * 8 + (r) % 8 + (r) / 8 * (N / 2) : (tile) * 16 + (r))

__device__ __forceinline__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// (the compiler would rather compute an address anew each time)
__device__ __forceinline__ u32 kept(u32 a) { asm volatile("mov.b32 %0, %0;" : "+r"(a)); return a; }
__device__ __forceinline__ float half_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
__device__ __forceinline__ float wide(u16 h) { return BF16 ? __uint_as_float((u32)h << 16) : half_to_float(h); }
__device__ __forceinline__ u16 narrow(float f) {
    u16 h;
    if (BF16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
    else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
// the squares of eight numbers more
__device__ __forceinline__ float squared(const uint4& v, float sum) {
    const u32 p[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int l = 0; l < 4; l++) {
        const float a = wide(p[l] & 0xFFFF), b = wide(p[l] >> 16);
        sum = __fmaf_rn(b, b, __fmaf_rn(a, a, sum));
    }
    return sum;
}
__device__ __forceinline__ float of_warp(float sum) {
#pragma unroll
    for (int j = 16; j; j /= 2) sum += __shfl_xor_sync(~0u, sum, j);
    return sum;
}
__device__ __forceinline__ void matrices(u32 from, u32* m) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(from));
}
// 16 rows of weights times 16 columns of x, all eight columns of the product the same
__device__ __forceinline__ void product(float (&c)[4], const u32 (&w)[4], u32 x0, u32 x1) {
#if BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(x0), "r"(x1));
}

#define COLUMNS (2048 / BITS)                           // bytes of x that a unit needs

#if BITS == 8
// four signed bytes → two registers of two numbers each, exact
__device__ __forceinline__ void widen(u32 w, u32& front, u32& back) {
#if BF16                                                // 128 + seven bits, less 128 or, where the sign is set, 256
    const u32 p = __byte_perm(w, 0x43434343, 0x4140), q = __byte_perm(w, 0x43434343, 0x4342);
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(front) : "r"(p & 0x437F437F), "r"(p & 0x43804380));
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(back) : "r"(q & 0x437F437F), "r"(q & 0x43804380));
#else                                                   // 1024 + 128 + q
    w ^= 0x80808080;
    const u32 p = __byte_perm(w, 0x64646464, 0x4140), q = __byte_perm(w, 0x64646464, 0x4342), from = 0x64806480;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(front) : "r"(p), "r"(from));
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(back) : "r"(q), "r"(from));
#endif
}
#elif BITS == 4
// the low or the high nibbles of four bytes → FROM - 8 + q, two numbers a register
#if BF16
#define FROM 136.0f
#define ONES 0x3F803F80
__device__ __forceinline__ void nibbles(u32 w, bool high, u32& front, u32& back) {
    w = (high ? w >> 4 : w) & 0x0F0F0F0F;
    front = __byte_perm(w, 0x43434343, 0x4140), back = __byte_perm(w, 0x43434343, 0x4342);
}
#else
#define FROM 72.0f
#define ONES 0x3C003C00
__device__ __forceinline__ void nibbles(u32 w, bool high, u32& front, u32& back) {
    w = (high ? w : w << 4) & 0xF0F0F0F0;
    front = __byte_perm(w, 0x54545454, 0x4140), back = __byte_perm(w, 0x54545454, 0x4342);
}
#endif
#endif

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
    // a thread copies 16 bytes of rows 4·i + lane / 8, to where no two reads of a column meet in a bank
    const u32 put = kept(lane / 8 * 128 + ((lane % 8) ^ (lane / 8)) * 16);
    int next_tile = blockIdx.x + team * gridDim.x, next_unit = w;
    const u8* from = codes;
    const u32* from_scale = 0;
#define BEGIN() { \
        from = codes + (long long)ROW_OF(next_tile, lane / 8) * BYTES + w * 128 + lane % 8 * 16; \
        if (BITS == 4) from_scale = (lane < 16 ? (const u32*)scale : (const u32*)zero) \
            + (long long)ROW_OF(next_tile, lane % 16) * (K / 256) + w; }
#define ROWS(to, i, source, first) \
        asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %3], 16;" \
                     :: "r"(to), "l"(source), "n"((i) * 512), "n"((first) * BYTES) : "memory")
#define ASK(unit) { \
        if (next_tile < TILES) { \
            const u32 even = (unit) + put, odd = even ^ 64; \
            const u8* half = from + (long long)(GATE ? N / 2 : 8) * BYTES; \
            ROWS(even, 0, from, 0); \
            ROWS(odd, 1, from, 4); \
            ROWS(even, 2, half, 0); \
            ROWS(odd, 3, half, 4); \
            if (BITS == 4) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" \
                                        :: "r"((unit) + 2048 + lane * 4), "l"(from_scale) : "memory"); \
            from += WARPS * 128, from_scale += WARPS, next_unit += WARPS; \
            if (next_unit >= UNITS) { next_unit = w, next_tile += TEAMS * gridDim.x; BEGIN() } \
        } \
        asm volatile("cp.async.commit_group;" ::: "memory"); }
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
    float all = 0.0f, inverse;
#pragma unroll
    for (int j = 0; j < TOTAL; j++) all += squares[j];
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(all / K + eps));
#pragma unroll
    for (int j = 0; j < sizeof(xs) / 16; j++) {
        u32 p[4] = {xs[j].x, xs[j].y, xs[j].z, xs[j].w};
        const u32 q[4] = {ws[j].x, ws[j].y, ws[j].z, ws[j].w};
#pragma unroll
        for (int l = 0; l < 4; l++) {
            const float a = __fmul_rn(__fmul_rn(wide(p[l] & 0xFFFF), inverse), wide(q[l] & 0xFFFF) + offset);
            const float b = __fmul_rn(__fmul_rn(wide(p[l] >> 16), inverse), wide(q[l] >> 16) + offset);
            p[l] = narrow(a) | (u32)narrow(b) << 16;
        }
        xs[j] = make_uint4(p[0], p[1], p[2], p[3]);
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
    float inverse, mean = squares[0] + squares[WARPS / 2];
    if (WARPS == 4) mean += squares[1] + squares[3];
    asm("div.full.f32 %0, %1, %2;" : "=f"(mean) : "f"(mean), "f"((float)K));
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(mean + eps));
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
#pragma unroll 2
    for (int i = warp; i < K / 128; i += TOTAL) {
        float s[4] = {0, 0, 0, 0};
#pragma unroll
        for (int side = 0; side < 2; side++) {
            READ(row_at + i * 256 + side * 128, p, q);
            product(s, ones, p.x, p.y), product(s, ones, p.z, p.w);
            product(s, ones, q.x, q.y), product(s, ones, q.z, q.w);
        }
        if (lane == 0) sums[i] = s[0];
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
            u32 m[16];
#pragma unroll
            for (int i = 0; i < 4; i++) matrices((here + matrix) ^ (i * 32), m + 4 * i);
#if BITS == 4
            u32 s[2], z[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 at = here + g * 4 + 32 * i;
                asm volatile("ld.shared.b32 %0, [%1 + 2048];" : "=r"(s[i]) : "r"(at));
                asm volatile("ld.shared.b32 %0, [%1 + 2112];" : "=r"(z[i]) : "r"(at));
            }
#endif
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
        if (GATE) {
            const float gate = wide(done), up = __shfl_down_sync(~0u, gate, 8);
            float power, open;
            asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(0.0f - gate, 1.44269502162933349609375f)));
            asm("div.full.f32 %0, %1, %2;" : "=f"(open) : "f"(gate), "f"(power + 1.0f));
            done = narrow(__fmul_rn(open, up));
        }
        if (lane < (GATE ? 8 : 16)) {
            y[to] = done;
            if (AHEAD) ahead[to] = narrow(__fmul_rn(wide(done), next + offset));
        }
    }
}
