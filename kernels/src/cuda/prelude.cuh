// What every kernel may use. NVRTC brings no headers: integer types and constants are defined here.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;

// binary16 and bfloat16 as bits. Rounding is to nearest, ties to even.
__device__ __forceinline__ float f16_value(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
__device__ __forceinline__ u16 f16_bits(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
__device__ __forceinline__ float bf16_value(u32 bits) { return __uint_as_float(bits << 16); }
// Not for NaN.
__device__ __forceinline__ u32 bf16_bits(float x) {
    u32 bits = __float_as_uint(x);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// 2^x to 2 ulp; 0 for minus infinity and where the result would be subnormal.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// e^x to 1.5 ulp, 0 below -87, e^88 above 88: the same operations in the same order as the CPU's, so that both round
// the same way.
__device__ __forceinline__ float exp_exact(float x) {
    const float round = 12582912.0f + 127.0f;
    float clamped = fminf(88.0f, fmaxf(-87.0f, x));
    float rounded = fmaf(clamped, 1.44269504f, round);
    float n = __fsub_rn(rounded, round);
    float r = fmaf(n, -0.69314575f, clamped);
    r = fmaf(n, -1.4286068e-6f, r);
    float p = 1.38144669495e-3f;
    p = fmaf(p, r, 8.3687804096e-3f);
    p = fmaf(p, r, 4.16683942131e-2f);
    p = fmaf(p, r, 1.66665201078e-1f);
    p = fmaf(p, r, 4.99999934125e-1f);
    p = fmaf(p, __fmul_rn(r, r), r);
    p = __fadd_rn(p, 1.0f);
    float y = __fmul_rn(p, __uint_as_float(__float_as_uint(rounded) << 23));
    return x < -87.0f ? 0.0f : y;
}
__device__ __forceinline__ float sigmoid_exact(float x) { return __fdiv_rn(1.0f, __fadd_rn(1.0f, exp_exact(-x))); }
__device__ __forceinline__ float silu_exact(float x) { return __fdiv_rn(x, __fadd_rn(1.0f, exp_exact(-x))); }
// ln(1 + e^x) to 3 ulp.
__device__ __forceinline__ float softplus_exact(float x) {
    float z = exp_exact(-fabsf(x));
    float r = __fdiv_rn(z, __fadd_rn(z, 2.0f));
    float square = __fmul_rn(r, r);
    float p = 1.40059933643e-1f;
    p = fmaf(p, square, 1.40009026491e-1f);
    p = fmaf(p, square, 2.00107636185e-1f);
    p = fmaf(p, square, 3.33332081429e-1f);
    float twice = __fadd_rn(r, r);
    return __fadd_rn(fmaxf(0.0f, x), fmaf(__fmul_rn(twice, square), p, twice));
}

// Sums over groups of lanes that a power of two `lanes` long; every lane gets the sum of its group, in one order.
__device__ __forceinline__ float sum_lanes(float x, u32 lanes) {
    for (u32 apart = lanes / 2; apart > 0; apart /= 2) x = __fadd_rn(x, __shfl_xor_sync(0xffffffff, x, apart));
    return x;
}
