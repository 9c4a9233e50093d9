#pragma once
// What one_row.cu and few_rows.cu share.
//
// Defined by the caller: N, K, BITS (8; 4 in groups of 128; 16: as x), BF16 (1; 0: float16), PARTS (warps that share a
// tile of 16 rows of weights), GATE (1, 2: the first half of the rows is a gate for the second, by SiLU or by GELU with
// tanh; 0: there is none)
#include "tensor.cuh"

#define BYTES (K * BITS / 8)                            // of a row of codes
#define UNITS (BYTES / 128)                             // what a warp takes of a row at a time: 128 bytes
#define UNIT (16 * (128 + (BITS == 4 ? 8 : 0)))         // bytes of a unit of a tile: codes; scales, zeros of two groups
#define TILES (N / 16)
#define ROW_OF(tile, r) (GATE ? (tile) * 8 + (r) % 8 + (r) / 8 * (N / 2) : (tile) * 16 + (r))

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
// activation(gate) · up, as Triton computes it: x / (1 + exp(-x)), or with GELU's polynomial in the exponent
__device__ __forceinline__ u16 gated(u16 gate, u16 up) {
    const float x = wide(gate);
    float power, exponent = 0.0f - x;
    if (GATE == 2)
        exponent = __fmul_rn(__fmaf_rn(__fmul_rn(__fmul_rn(x, 0.044715f), x), x, x), -1.5957691216057308f);
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(exponent, 1.44269502162933349609375f)));
    return narrow(__fmul_rn(quotient(x, power + 1.0f), wide(up)));
}
// two numbers of x of 16 bits each, times the inverse of their root mean square and the weights of a norm
__device__ __forceinline__ u32 normalized(u32 x, u32 weight, float inverse, float offset) {
    const float a = __fmul_rn(__fmul_rn(wide(x & 0xFFFF), inverse), wide(weight & 0xFFFF) + offset);
    const float b = __fmul_rn(__fmul_rn(wide(x >> 16), inverse), wide(weight >> 16) + offset);
    return narrow(a) | (u32)narrow(b) << 16;
}
__device__ __forceinline__ float inverse_root(float mean) {
    float inverse;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(mean));
    return inverse;
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

// ---- what a warp asks for: its units of its team's tiles, one after another ----
// A thread copies 16 bytes of rows 4·i + lane / 8, to where no two reads of a column meet in a bank: put(lane). The
// kernel has lane, codes, scale, zero, part (of the columns: its first unit) and jump (tiles from one to the next)
#define ASKING() \
    const u32 put = kept(lane / 8 * 128 + ((lane % 8) ^ (lane / 8)) * 16); \
    const u8* from = codes; \
    const u32* from_scale = 0
#define BEGIN() { \
        from = codes + (long long)ROW_OF(next_tile, lane / 8) * BYTES + part * 128 + lane % 8 * 16; \
        if (BITS == 4) from_scale = (lane < 16 ? (const u32*)scale : (const u32*)zero) \
            + (long long)ROW_OF(next_tile, lane % 16) * (K / 256) + part; }
#define COPY(to, i, source, first) \
        asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %3], 16;" \
                     :: "r"(to), "l"(source), "n"((i) * 512), "n"((first) * BYTES) : "memory")
#define ASK(unit) { \
        if (next_tile < TILES) { \
            const u32 even = (unit) + put, odd = even ^ 64; \
            const u8* half = from + (long long)(GATE ? N / 2 : 8) * BYTES; \
            COPY(even, 0, from, 0); \
            COPY(odd, 1, from, 4); \
            COPY(even, 2, half, 0); \
            COPY(odd, 3, half, 4); \
            if (BITS == 4) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" \
                                        :: "r"((unit) + 2048 + lane * 4), "l"(from_scale) : "memory"); \
            from += PARTS * 128, from_scale += PARTS, next_unit += PARTS; \
            if (next_unit >= UNITS) { next_unit = part, next_tile += jump; BEGIN() } \
        } \
        asm volatile("cp.async.commit_group;" ::: "memory"); }
// the codes of a unit, and in 4 bits the scales and zeros of its two groups, for a thread's rows g and g + 8
#define TAKE(unit, m, s, z) \
    _Pragma("unroll") for (int i = 0; i < 4; i++) matrices(((unit) + matrix) ^ (i * 32), m + 4 * i); \
    if (BITS == 4) _Pragma("unroll") for (int i = 0; i < 2; i++) { \
        const u32 at = (unit) + g * 4 + 32 * i; \
        asm volatile("ld.shared.b32 %0, [%1 + 2048];" : "=r"(s[i]) : "r"(at)); \
        asm volatile("ld.shared.b32 %0, [%1 + 2112];" : "=r"(z[i]) : "r"(at)); \
    }
