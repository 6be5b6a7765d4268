// Four values of a row per thread, and the forms of a row with fewer bits: int8, blocks of 48 bytes for 32 values each;
// MXFP8, described in matmul/scaled.cu; bf16, described in matmul/bf16_products.cu. All are padded with zeroes to units
// of 8 blocks.
#pragma once
#include "math.cuh"

constexpr u32 QUANTISED_BYTES = 48;

// The numbers are those of `Quantised` in Rust.
enum Form { INT8, MXFP8, BF16 };

// Blocks of such a form of a row.
__device__ __forceinline__ u32 row_blocks(u32 cols) { return (cols + 255) / 256 * 8; }

struct Four {
    float x[4];

    // Result of `f(value, number)` for each of four values.
    template <class F> __device__ __forceinline__ static Four of(F f) { return {f(0), f(1), f(2), f(3)}; }
};

// Values i .. i + 4 of `count` ones, zeroes behind the last. `i` is a multiple of four.
__device__ __forceinline__ Four load_four(const float *x, u32 i, u32 count) {
    x += i;
    if ((u64)x % 16 == 0 && i + 4 <= count) {
        const float4 v = *(const float4 *)x;
        return {v.x, v.y, v.z, v.w};
    }
    return Four::of([&](u32 k) { return i + k < count ? x[k] : 0.0f; });
}

// Stores those of the values i .. i + 4 that `count` ones have.
__device__ __forceinline__ void store_four(float *x, u32 i, u32 count, const Four &v) {
    x += i;
    if ((u64)x % 16 == 0 && i + 4 <= count) {
        *(float4 *)x = {v.x[0], v.x[1], v.x[2], v.x[3]};
        return;
    }
#pragma unroll
    for (u32 k = 0; k < 4; k++)
        if (i + k < count) x[k] = v.x[k];
}

// Stores the 8-bit form of four blocks: lanes 8 b .. 8 b + 8 have the 32 values of one block, in order, and its
// address. All lanes of the warp take part; those without `stores` store nothing. A block has the 32 quants, the scale,
// scale * sum, -sum, and -sum of each half in 16 bits each.
__device__ __forceinline__ void quantise_blocks(const Four &v, u8 *block, bool stores) {
    const u32 part = threadIdx.x % 8;
    // The bits of magnitudes compare as integers. NaN and infinity compare above all finite values.
    u32 largest_bits = 0;
#pragma unroll
    for (u32 k = 0; k < 4; k++) largest_bits = max(largest_bits, __float_as_uint(v.x[k]) & 0x7fffffff);
#pragma unroll
    for (int step = 4; step > 0; step /= 2)
        largest_bits = max(largest_bits, __shfl_xor_sync(0xffffffff, largest_bits, step));
    const float largest = __uint_as_float(largest_bits);
    const bool finite = largest_bits < 0x7f800000, any = finite && largest >= 1e-36f;
    const float inverse = any ? __fdiv_rn(127.0f, largest) : 0.0f;
    const float scale = any ? __fdiv_rn(largest, 127.0f) : finite ? 0.0f : __uint_as_float(0x7fc00000);
    u32 quants = 0;
    // A product with NaN becomes 0.
#pragma unroll
    for (u32 k = 0; k < 4; k++) quants |= ((u32)__float2int_rn(__fmul_rn(v.x[k], inverse)) & 255) << 8 * k;
    int half = __dp4a((int)quants, 0x01010101, 0);
    half += __shfl_xor_sync(0xffffffff, half, 1);
    half += __shfl_xor_sync(0xffffffff, half, 2);
    const int other = __shfl_xor_sync(0xffffffff, half, 4);
    if (!stores) return;
    *(u32 *)(block + 4 * part) = quants;
    if (part == 0) {
        const int sum = half + other;
        const float scaled = finite ? __fmul_rn(scale, (float)sum) : scale;
        *(uint4 *)(block + 32) = {__float_as_uint(scale), __float_as_uint(scaled), (u32)-sum,
                                  ((u32)-half & 0xffff) | (u32)-other << 16};
    }
}

// Two E4M3 values, the nearest to `low` and `high`.
__device__ __forceinline__ u32 e4m3_pair(float low, float high) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// Like `quantise_blocks`, to MXFP8: lanes 8 b .. 8 b + 8 have block number `block` of the row at `row`, which has
// `blocks`. The scale of a block is the least power of two with which no value is above 448, the largest E4M3, and NaN
// if a value is not finite.
__device__ __forceinline__ void quantise_mxfp8(const Four &v, u8 *row, u32 block, u32 blocks) {
    const u32 part = threadIdx.x % 8;
    u32 largest = 0;
#pragma unroll
    for (u32 k = 0; k < 4; k++) largest = max(largest, __float_as_uint(v.x[k]) & 0x7fffffff);
#pragma unroll
    for (int step = 4; step > 0; step /= 2) largest = max(largest, __shfl_xor_sync(0xffffffff, largest, step));
    // 448 is 1.75 * 2^8. A mantissa above 0.75 carries to the exponent.
    const u32 rounded = (largest + 0x1fffff) >> 23, scale = rounded > 8 ? rounded - 8 : 0;
    const float inverse = __uint_as_float((254 - scale) << 23);
    const Four s = Four::of([&](u32 k) { return __fmul_rn(v.x[k], inverse); });
    if (block >= blocks) return;
    const u32 word = e4m3_pair(s.x[0], s.x[1]) | e4m3_pair(s.x[2], s.x[3]) << 16;
    *(u32 *)(row + 32 * block + 8 * (part % 4) + 4 * (part / 4)) = word;
    if (part == 0) row[32 * blocks + block] = largest < 0x7f800000 ? scale : 255;
}

// Like `quantise_blocks`, to bf16 in the order of matmul/bf16_products.cu: lanes 8 b .. 8 b + 8 have the block at `block`.
__device__ __forceinline__ void quantise_bf16(const Four &v, u8 *block, bool store) {
    const u32 part = threadIdx.x % 8;
    if (!store) return;
    u32 *to = (u32 *)(block + part / 4 * 32 + part % 4 * 4);
    to[0] = bf16_pair(v.x[0], v.x[1]), to[4] = bf16_pair(v.x[2], v.x[3]);
}

// Stores four blocks, the first lane's being number `block` of `blocks` of row number `row`, in one of the forms.
__device__ __forceinline__ void quantise_row(const Four &v, u32 form, u8 *rows, u64 row, u32 block, u32 blocks) {
    if (form == INT8) quantise_blocks(v, rows + (row * blocks + block) * QUANTISED_BYTES, block < blocks);
    else if (form == BF16) quantise_bf16(v, rows + (row * blocks + block) * 64, block < blocks);
    else quantise_mxfp8(v, rows + row * ((33 * blocks + 15) / 16 * 16), block, blocks);
}
