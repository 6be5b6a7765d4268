// Types and conversions for all kernels. NVRTC has no standard headers, so the integer types are defined
// here.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;

// Conversions of binary16 and bfloat16 bits. They round to nearest, ties to even.
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
// `x` must not be NaN.
__device__ __forceinline__ u32 bf16_bits(float x) {
    u32 bits = __float_as_uint(x);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
// The bf16 nearest to `low` and to `high`.
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Sum over a group of `lanes` consecutive lanes, a power of two. Every lane returns the sum of its group. The
// order of the additions is fixed.
__device__ __forceinline__ float sum_lanes(float x, u32 lanes) {
    for (u32 apart = lanes / 2; apart > 0; apart /= 2) x = __fadd_rn(x, __shfl_xor_sync(0xffffffff, x, apart));
    return x;
}

// The first call of every thread of every kernel: waits for the kernels before it, then lets the next one start. A
// kernel may start while they still run (programmatic dependent launch), to prefetch weights, which no kernel writes.
// Without that attribute of the launch, the call does nothing.
__device__ __forceinline__ void after_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
