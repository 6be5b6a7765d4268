// Elementary functions and the Hadamard product. All but `exp2_fast` are fixed sequences of correctly rounded
// operations. They are the sequences of Rust's `simd/math.rs` and return the same bits. `exp2_fast` is an approximation
// of the device.
#pragma once
#include "prelude.cuh"

// e^x to 1.5 ulp on -87..=88; 0 below, e^88 above. NaN stays NaN.
__device__ __forceinline__ float exp_f32(float x) {
    // 1.5 * 2^23 puts integers into the low mantissa bits; 127 is the exponent's bias.
    const float ROUND = 12582912.0f + 127.0f;
    float clamped = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float rounded = __fmaf_rn(clamped, 1.44269504f, ROUND);
    float n = __fsub_rn(rounded, ROUND);
    float r = __fmaf_rn(n, -0.693145752f, clamped);
    r = __fmaf_rn(n, -1.4286068e-6f, r);
    float p = 1.38144669495e-3f;
    p = __fmaf_rn(p, r, 8.3687804096e-3f);
    p = __fmaf_rn(p, r, 4.16683942131e-2f);
    p = __fmaf_rn(p, r, 1.66665201078e-1f);
    p = __fmaf_rn(p, r, 4.99999934125e-1f);
    p = __fmaf_rn(p, __fmul_rn(r, r), r);
    p = __fadd_rn(p, 1.0f);
    float y = __fmul_rn(p, __uint_as_float(__float_as_uint(rounded) << 23));
    return x < -87.0f ? 0.0f : y;
}

// x / (1 + e^-x)
__device__ __forceinline__ float silu_f32(float x) { return __fdiv_rn(x, __fadd_rn(1.0f, exp_f32(__fsub_rn(0.0f, x)))); }

// 1 / (1 + e^-x)
__device__ __forceinline__ float sigmoid_f32(float x) {
    return __fdiv_rn(1.0f, __fadd_rn(1.0f, exp_f32(__fsub_rn(0.0f, x))));
}

// x / (1 + e^-2u) with u = sqrt(2/pi) (x + 0.044715 x^3)
__device__ __forceinline__ float gelu_tanh_f32(float x) {
    float u = __fmul_rn(x, __fmaf_rn(__fmul_rn(x, x), 0.044715f, 1.0f));
    return __fdiv_rn(x, __fadd_rn(1.0f, exp_f32(__fmul_rn(u, -1.59576912160573f))));
}

// max(x, 0) - a q(a) with a = |x|. q is the upper tail of the normal distribution.
__device__ __forceinline__ float gelu_erf_f32(float x) {
    float a = __uint_as_float(__float_as_uint(x) & 0x7fffffff);
    float t = __fdiv_rn(1.0f, __fmaf_rn(a, 0.3f, 1.0f));
    float m = 3.83784400757e-2f;
    m = __fmaf_rn(m, t, -0.169166801334f);
    m = __fmaf_rn(m, t, 0.228661410435f);
    m = __fmaf_rn(m, t, -7.6507883941e-2f);
    m = __fmaf_rn(m, t, 0.142536417481f);
    m = __fmaf_rn(m, t, 9.46831745788e-2f);
    m = __fmaf_rn(m, t, 0.121920423634f);
    m = __fmaf_rn(m, t, 0.119487678547f);
    m = __fmaf_rn(m, t, 7.16943105459e-6f);
    float tail = __fmul_rn(exp_f32(__fmul_rn(__fmul_rn(a, a), -0.5f)), m);
    return __fmaf_rn(__fsub_rn(0.0f, a), tail, x > 0.0f ? x : 0.0f);
}

// g sigmoid(1.702 g) (u + 1) with g = min(gate, 7) and u = clamp(up, -7, 7). NaN stays NaN.
__device__ __forceinline__ float clamped_swiglu_f32(float gate, float up) {
    gate = 7.0f < gate ? 7.0f : gate;
    up = 7.0f < up ? 7.0f : up;
    up = -7.0f > up ? -7.0f : up;
    float e = exp_f32(__fmul_rn(gate, -1.702f));
    return __fmul_rn(__fdiv_rn(gate, __fadd_rn(1.0f, e)), __fadd_rn(up, 1.0f));
}

// tanh to 2 ulp. Near zero an odd series, because 1 - 2 / (e^2x + 1) would cancel there.
__device__ __forceinline__ float tanh_f32(float x) {
    float far = __fsub_rn(1.0f, __fdiv_rn(2.0f, __fadd_rn(exp_f32(__fadd_rn(x, x)), 1.0f)));
    float square = __fmul_rn(x, x);
    float p = -1382.0f / 155925.0f;
    p = __fmaf_rn(p, square, 62.0f / 2835.0f);
    p = __fmaf_rn(p, square, -17.0f / 315.0f);
    p = __fmaf_rn(p, square, 2.0f / 15.0f);
    p = __fmaf_rn(p, square, -1.0f / 3.0f);
    float near = __fmaf_rn(__fmul_rn(p, square), x, x);
    return __uint_as_float(__float_as_uint(x) & 0x7fffffff) < 0.3f ? near : far;
}

// ln(1 + e^x) to 3 ulp; x itself if x is large.
__device__ __forceinline__ float softplus_f32(float x) {
    float z = exp_f32(__uint_as_float(__float_as_uint(x) | 0x80000000));
    float r = __fdiv_rn(z, __fadd_rn(z, 2.0f));
    float square = __fmul_rn(r, r);
    float p = 1.40059933643e-1f;
    p = __fmaf_rn(p, square, 1.40009026491e-1f);
    p = __fmaf_rn(p, square, 2.00107636185e-1f);
    p = __fmaf_rn(p, square, 3.33332081429e-1f);
    float twice = __fadd_rn(r, r);
    return __fadd_rn(x > 0.0f ? x : 0.0f, __fmaf_rn(__fmul_rn(twice, square), p, twice));
}

// The numbers are those of `gate_code` in Rust.
enum Gating { SILU, GELU_TANH, GELU_ERF, SIGMOID, RELU_SQUARED, CLAMPED_SWIGLU, IDENTITY };

__device__ __forceinline__ float gated(u32 gating, float gate, float up) {
    switch (gating) {
    case SILU: return __fmul_rn(silu_f32(gate), up);
    case GELU_TANH: return __fmul_rn(gelu_tanh_f32(gate), up);
    case GELU_ERF: return __fmul_rn(gelu_erf_f32(gate), up);
    case SIGMOID: return __fmul_rn(sigmoid_f32(gate), up);
    case RELU_SQUARED: {
        // NaN stays NaN.
        const float positive = gate < 0.0f ? 0.0f : gate;
        return __fmul_rn(__fmul_rn(positive, positive), up);
    }
    case IDENTITY: return __fmul_rn(gate, up);
    default: return clamped_swiglu_f32(gate, up);
    }
}

// 2^x to 2 ulp; 0 for minus infinity and for results that would be subnormal.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Multiplies each run of `len` elements, a power of two, by the normalised Hadamard matrix. x[i]: element 32 i + lane.
// An element with `bit` set in its number takes the difference from its partner, the other the sum.
template <u32 N> __device__ __forceinline__ void times_hadamard(float (&x)[N], u32 lane, u32 len) {
    for (u32 bit = 1; bit < min(len, 32u); bit *= 2) {
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            const float other = __shfl_xor_sync(0xffffffff, x[i], bit);
            x[i] = lane & bit ? __fsub_rn(other, x[i]) : __fadd_rn(x[i], other);
        }
    }
#pragma unroll
    for (u32 apart = 1; apart < N; apart *= 2) {
        if (32 * apart >= len) break;
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            if (i & apart || i + apart >= N) continue;
            const float low = x[i], high = x[i + apart];
            x[i] = __fadd_rn(low, high);
            x[i + apart] = __fsub_rn(low, high);
        }
    }
    const float factor = __fdiv_rn(1.0f, __fsqrt_rn((float)len));
#pragma unroll
    for (u32 i = 0; i < N; i++) x[i] = __fmul_rn(x[i], factor);
}
