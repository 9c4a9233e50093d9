// Attention of one token a row, for compute capability 9.0 and later; compiled by NVRTC.
//
// A cluster of programs shares a head of keys: each takes every PARTS-th chunk of 128, from the newest to the oldest,
// of which it reads the first before the kernel ahead has ended, and then adds up its share of what all have found,
// out of their shared memory. Sums have the order of the Triton kernels of triton_attention, and so their bits.
//
// Defined by the caller: D (of a head: 64, 128), G (queries of a head of keys, at most 16), BF16 (1; 0: float16), WIDE
// (are angles float32?), ROPE, INTERLEAVED, NORM (of each head, ahead of the rotation), WINDOWED, LENGTHS, ROWS (bytes
// of a length, and of a number of the cache's row; 0: row b), SOON (may the next kernel begin with this one's work?),
// PARTS (programs of a cluster, at most), MANY (may a program have several chunks? The next one's keys are held, too)
#include "tensor.cuh"

#define LINE (D * 2)                                    // bytes of a head
#define CHUNKS (LINE / 16)
#define E (D / 32)                                      // of its entries, in a thread
#define HEADS (G + 2)                                   // of a program: queries, a key, a value
#define TURNS ((HEADS + 7) / 8)
#define HELD (2 + MANY)                                 // keys or values of a chunk: keys, values, the next keys, …
#define NOTHING __int_as_float(0xff800000)              // -inf

__device__ __forceinline__ float wide(u16 h) {
    float f;
    if (BF16) return __uint_as_float((u32)h << 16);
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
__device__ __forceinline__ u32 narrow(float low, float high) {
    u32 h;
    if (BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(high), "f"(low));
    return h;
}
__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#define MATRICES(kind, from, m) \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" kind ".shared.b16 {%0, %1, %2, %3}, [%4];" \
                 : "=r"((m)[0]), "=r"((m)[1]), "=r"((m)[2]), "=r"((m)[3]) : "r"(from) : "memory")
// where 16 bytes of a row lie: no two rows of a matrix meet in a bank
__device__ __forceinline__ u32 at(u32 base, int row, int chunk, int line) {
    return base + row * line + (chunk ^ row % 8) * 16;
}
__device__ __forceinline__ void read(const void* from, u32 (&v)[E / 2]) {
#if D == 128
    const uint2 both = *(const uint2*)from;
    v[0] = both.x, v[1] = both.y;
#else
    v[0] = *(const u32*)from;
#endif
}
__device__ __forceinline__ float entry(const u32 (&v)[E / 2], int e) { return wide(v[e / 2] >> (16 * (e % 2))); }
__device__ __forceinline__ long long number(const void* from, int i, int bytes) {
    return bytes == 8 ? ((const long long*)from)[i] : ((const int*)from)[i];
}

struct Shared {
    u8 held[HELD][128 * LINE], queries[16 * LINE];
    u8 weights[16 * 256];                               // of 128 keys, in 16 bits
    float most[8][16], sums[8][16];                     // by warp and query
    float stats[16][2];                                 // what the cluster reads, as what is in `held` in the end
};

extern "C" __global__ void __launch_bounds__(256) one_token(
        const u16* qkv, u16* k, u16* v, const void* lengths, const void* rows, const void* cos, const void* sin,
        const u16* q_weight, const u16* k_weight, u16* y, long long q_row, long long row_stride, long long head_stride,
        long long slot_stride, long long rope_row, float scale, float eps, float offset, int HK, int R, int T, int end,
        int window) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& my = *(Shared*)memory;
    const int part = blockIdx.x, b = blockIdx.z / HK, kv = blockIdx.z % HK, H = HK * G;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int length = (int)number(lengths, b, LENGTHS), stop = min(length + 1, end), chunks = (stop + 127) / 128;
    if (part >= chunks) return;                         // (a cluster waits for those alone that are there)
    const int used = min(chunks, PARTS), newer = MANY ? (chunks - 1 - part) / PARTS : 0;
    // none of a window's older chunks is read
    const int oldest = WINDOWED ? max(length - window + 1, 0) / 128 : 0;
    const int older = MANY && oldest > part ? min((oldest - part + PARTS - 1) / PARTS, newer) : 0;
    const int first = (part + newer * PARTS) * 128, many = MANY ? newer - older + 1 : 1;
    const long long base = (ROWS ? number(rows, b, ROWS) : b) * row_stride + kv * head_stride;

    // ---- older keys and values, angles, weights of norms ----
    const u32 queries = shared(my.queries);
    auto ask = [&](int nth, int side) {                 // for a chunk's keys, or values
        const int start = first - nth * PARTS * 128, there = min(length, T) - start;
        const u32 to = shared(my.held[(2 * nth + side) % HELD]);
        const u16* from = (side ? v : k) + base + start * slot_stride;
        if (nth < many)
#pragma unroll
            for (int i = threadIdx.x; i < 128 * CHUNKS; i += 256) {
                const int row = i / CHUNKS, chunk = i % CHUNKS;
                if (row == length - start) continue;    // the newest comes from the kernel ahead
                const u16* source = row < there ? from + row * slot_stride + chunk * 8 : from;
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                             :: "r"(at(to, row, chunk, LINE)), "l"(source), "r"(row < there ? 16 : 0) : "memory");
            }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll
    for (int i = 0; i < HELD; i++) ask(i / 2, i % 2);
    for (int i = G * LINE / 4 + threadIdx.x; i < 16 * LINE / 4; i += 256) ((u32*)my.queries)[i] = 0;
    const int d = lane * E;                             // a warp takes a head at a time
    float c[E], s[E];
#pragma unroll
    for (int e = 0; e < E; e++) {
        const int of = d + e;
        c[e] = 1.0f, s[e] = 0.0f;
        if (!ROPE || of >= R) continue;
        const long long i = b * rope_row + of;
        c[e] = WIDE ? ((const float*)cos)[i] : wide(((const u16*)cos)[i]);
        s[e] = WIDE ? ((const float*)sin)[i] : wide(((const u16*)sin)[i]);
        if (INTERLEAVED ? of % 2 == 0 : of < R / 2) s[e] = -s[e];
    }
    float of_queries[E], of_keys[E];
#pragma unroll
    for (int e = 0; e < E; e++) if (NORM) of_queries[e] = wide(q_weight[d + e]), of_keys[e] = wide(k_weight[d + e]);

    // ---- the token, once the kernel ahead is done ----
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (SOON) asm volatile("griddepcontrol.launch_dependents;");
    const bool newest = length - first < 128;           // is its slot here?
    u32 heads[TURNS][E / 2];
#pragma unroll
    for (int i = 0; i < TURNS; i++) {                   // all are asked for before one is used
        const int h = warp + 8 * i;
        if (h >= HEADS) break;
        read(qkv + b * q_row + (h < G ? kv * G + h : H + (h - G) * HK + kv) * D + d, heads[i]);
    }
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        const int h = warp + 8 * i;
        if (h >= HEADS) break;
        if (h >= G && !newest) continue;
        float x[E];
#pragma unroll
        for (int e = 0; e < E; e++) x[e] = entry(heads[i], e);
        if (NORM && h <= G) {
            float sum = __fmaf_rn(x[0], x[0], __fmul_rn(x[1], x[1]));
#pragma unroll
            for (int e = 2; e < E; e++) sum = __fmaf_rn(x[e], x[e], sum);
#pragma unroll
            for (int j = 16; j; j /= 2) sum += __shfl_xor_sync(~0u, sum, j);
            float inverse;
            asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(eps + quotient(sum, (float)D)));
#pragma unroll
            for (int e = 0; e < E; e++)
                x[e] = __fmul_rn(x[e], __fmul_rn(inverse, (h < G ? of_queries[e] : of_keys[e]) + offset));
        }
        if (ROPE && h <= G) {
            float other[E];
            const int far = R / 2 / E;                  // lanes
#pragma unroll
            for (int e = 0; e < E; e++)
                other[e] = INTERLEAVED ? x[e ^ 1] : __shfl_sync(~0u, x[e], lane < far ? lane + far : lane - far);
#pragma unroll
            for (int e = 0; e < E; e++) if (d + e < R) x[e] = __fmaf_rn(x[e], c[e], __fmul_rn(s[e], other[e]));
        }
        const int row = h < G ? h : length - first;
        const u32 to = at(h < G ? queries : shared(my.held[h - G]), row, d / 8, LINE) + d % 8 * 2;
#pragma unroll
        for (int e = 0; e < E; e += 2) {
            const u32 two = narrow(x[e], x[e + 1]);
            asm volatile("st.shared.b32 [%0], %1;" :: "r"(to + e * 2), "r"(two) : "memory");
            if (h >= G && length < T) *(u32*)((h == G ? k : v) + base + length * slot_stride + d + e) = two;
        }
    }

    float acc[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}}, top[2] = {NOTHING, NOTHING}, total[2] = {0, 0};
    const float unit = __fmul_rn(scale, 1.4426950408889634f);
    for (int nth = 0; nth < many; nth++) {
        const int start = first - nth * PARTS * 128, last = stop - start;
        const u32 keys = shared(my.held[2 * nth % HELD]), values = shared(my.held[(2 * nth + 1) % HELD]);
        // (of what was asked for later, its values and the next keys may be on their way)
        if (MANY && nth == 0) asm volatile("cp.async.wait_group 2;" ::: "memory");
        else asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        if (MANY && nth) ask(nth + 1, 0);               // where values were that nobody reads any more

        // ---- scores: a warp has keys 8·warp … + 7, and those 64 later ----
        float score[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        if (warp * 8 < last) {
#pragma unroll
            for (int step = 0; step < D / 16; step++) {
                u32 x[4], m[4];
                MATRICES("", at(queries, lane % 16, 2 * step + lane / 16, LINE), x);
                MATRICES("", at(keys, lane / 16 * 64 + warp * 8 + lane % 8, 2 * step + lane / 8 % 2, LINE), m);
                product(score[0], x, m[0], m[1]);
                product(score[1], x, m[2], m[3]);
            }
        }
        float most[2] = {NOTHING, NOTHING};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int slot = start + i / 4 * 64 + warp * 8 + t * 2 + i % 2;
            float& one = score[i / 4][i % 4];
            one = slot < stop && (!WINDOWED || slot > length - window) ? __fmul_rn(one, unit) : NOTHING;
            most[i % 4 / 2] = fmaxf(most[i % 4 / 2], one);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 2));
            most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 1));
            if (t == 0) my.most[warp][g + 8 * i] = most[i];
        }
        __syncthreads();
        if (MANY) ask(nth + 1, 1);                      // where its keys were
        float keep[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            most[i] = top[i];
#pragma unroll
            for (int w = 0; w < 8; w++) most[i] = fmaxf(most[i], my.most[w][g + 8 * i]);
            const float from = most[i] == NOTHING ? 0.0f : most[i];
            keep[i] = power(top[i] - from), top[i] = most[i];
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float one = power(score[j][2 * i] - from), two = power(score[j][2 * i + 1] - from);
                sum = j ? sum + one + two : one + two;
                const u32 to = at(shared(my.weights), g + 8 * i, j * 8 + warp, 256) + t * 4;
                asm volatile("st.shared.b32 [%0], %1;" :: "r"(to), "r"(narrow(one, two)) : "memory");
            }
            sum += __shfl_xor_sync(~0u, sum, 2);
            sum += __shfl_xor_sync(~0u, sum, 1);
            if (t == 0) my.sums[warp][g + 8 * i] = sum;
        }
        if (MANY) asm volatile("cp.async.wait_group 2;" ::: "memory");
        else asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();

        // ---- values: a warp has entries 8·warp … + 7, and those 64 later ----
#pragma unroll
        for (int i = 0; i < 8; i++) acc[i / 4][i % 4] = __fmul_rn(acc[i / 4][i % 4], keep[i % 4 / 2]);
#pragma unroll
        for (int step = 0; step < 8; step++) {
            if (step * 16 >= last) break;
            u32 p[4], m[4];
            MATRICES("", at(shared(my.weights), lane % 16, 2 * step + lane / 16, 256), p);
            MATRICES(".trans", at(values, step * 16 + lane % 16, (D == 128 ? lane / 16 * 8 : 0) + warp, LINE), m);
            product(acc[0], p, m[0], m[1]);
            if (D == 128) product(acc[1], p, m[2], m[3]);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float w[8];
#pragma unroll
            for (int j = 0; j < 8; j++) w[j] = my.sums[j][g + 8 * i];
            const float sum = ((w[0] + w[4]) + (w[2] + w[6])) + ((w[1] + w[5]) + (w[3] + w[7]));
            total[i] = __fmaf_rn(total[i], keep[i], sum);
        }
    }
    float* sums = (float*)my.held[0];                   // G × D, where keys were; or values, for which some may wait
    if (MANY) __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int query = g + 8 * i;
        if (query >= G) break;
        const float by = total[i] > 0.0f ? total[i] : 1.0f;
#pragma unroll
        for (int j = 0; j < D / 64; j++) {
            const int of = j * 64 + warp * 8 + t * 2;
            const float one = acc[j][2 * i], two = acc[j][2 * i + 1];
            u16* to = y + ((long long)b * H + kv * G + query) * D + of;
            if (used == 1) *(u32*)to = narrow(quotient(one, by), quotient(two, by));
            else *(float2*)(sums + query * D + of) = make_float2(one, two);
        }
        if (warp == 0 && t == 0) my.stats[query][0] = top[i], my.stats[query][1] = total[i];
    }
    if (used == 1) return;

    // ---- the cluster's sums ----
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
    for (int i = part * 256 + threadIdx.x; i < G * D; i += used * 256) {
        const int query = i / D;
        float tops[PARTS], totals[PARTS], parts[PARTS], most = NOTHING, total = 0.0f, sum = 0.0f;
#pragma unroll
        for (int j = 0; j < PARTS; j++) {
            if (j >= used) break;
            tops[j] = taken(&my.stats[query][0], j);
            totals[j] = taken(&my.stats[query][1], j);
            parts[j] = taken(sums + i, j);
        }
#pragma unroll
        for (int j = 0; j < PARTS; j++) if (j < used) most = fmaxf(most, tops[j]);
        if (most == NOTHING) most = 0.0f;
#pragma unroll
        for (int j = 0; j < PARTS; j++) {
            if (j >= used) break;
            const float weight = power(tops[j] - most);
            total = __fadd_rn(total, __fmul_rn(weight, totals[j]));
            sum = __fadd_rn(sum, __fmul_rn(weight, parts[j]));
        }
        y[((long long)b * H + kv * G) * D + i] = (u16)narrow(quotient(sum, total > 0.0f ? total : 1.0f), 0.0f);
    }
    // (none leaves while others read)
    asm volatile("barrier.cluster.arrive.aligned;\n"
                 "barrier.cluster.wait.aligned;" ::: "memory");
}
