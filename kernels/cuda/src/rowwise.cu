// Operations on rows: norms, gates, sums, and the 8-bit form.
//
// Rows are [rows][cols] f32. The width of a row alone decides the order of additions in it.
#include "math.cuh"

// ---- The 8-bit form of a row: blocks of 48 bytes for 32 values each, padded with zeroes to units of 8
// blocks.

constexpr u32 QUANTISED_BYTES = 48;

// Blocks of the 8-bit form of a row.
__device__ __forceinline__ u32 row_blocks(u32 cols) { return (cols + 255) / 256 * 8; }

// Quantises 32 values, one per lane. `out` has the 32 quants, the scale, scale * sum, -sum, and -sum of each
// half in 16 bits each.
__device__ __forceinline__ void quantise_block(float value, u8 *out) {
    u32 lane = threadIdx.x % 32;
    // The bits of magnitudes compare as integers. NaN and infinity compare above all finite values.
    u32 largest_bits = __float_as_uint(value) & 0x7fffffff;
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        largest_bits = max(largest_bits, __shfl_xor_sync(0xffffffff, largest_bits, step));
    float largest = __uint_as_float(largest_bits), scale = 0.0f;
    int quant = 0;
    if (largest_bits >= 0x7f800000) scale = __uint_as_float(0x7fc00000);
    else if (largest >= 1e-36f) {
        quant = __float2int_rn(__fmul_rn(value, __fdiv_rn(127.0f, largest)));
        scale = __fdiv_rn(largest, 127.0f);
    }
    int half = quant;
#pragma unroll
    for (int step = 8; step > 0; step /= 2) half += __shfl_xor_sync(0xffffffff, half, step);
    int other = __shfl_xor_sync(0xffffffff, half, 16);
    out[lane] = (u8)quant;
    if (lane == 0) {
        int sum = half + other;
        float scaled = largest_bits >= 0x7f800000 ? scale : __fmul_rn(scale, (float)sum);
        uint4 rest = {__float_as_uint(scale), __float_as_uint(scaled), (u32)-sum,
                      ((u32)-half & 0xffff) | (u32)-other << 16};
        *(uint4 *)(out + 32) = rest;
    }
}

// All kernels below have rows in blockIdx.x, because the other grid dimensions end at 65,535.

// One warp per block of 32 values. blockIdx.x: the row; blockIdx.y and the warp: the block of the row.
extern "C" __global__ void quantise(const float *x, u32 cols, u8 *out) {
    u32 blocks = row_blocks(cols), block = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    if (block >= blocks) return;
    u32 column = 32 * block + threadIdx.x % 32;
    float value = column < cols ? x[(u64)blockIdx.x * cols + column] : 0.0f;
    quantise_block(value, out + ((u64)blockIdx.x * blocks + block) * QUANTISED_BYTES);
}

// ---- Norms. One block of threads per run of `width` values. blockIdx.x: the row; blockIdx.y: the run of the
// row.

// Sum over the block's threads. Every thread returns it.
__device__ __forceinline__ float sum_of_block(float value) {
    __shared__ float warps[32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffff, value, step);
    if (blockDim.x == 32) return value;
    // Other warps may still read the previous sum's `warps`.
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    u32 lane = threadIdx.x % 32;
    value = lane < blockDim.x / 32 ? warps[lane] : 0.0f;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffff, value, step);
    return value;
}

// Normalisation of a run's values: (x - mean) * factor * weight + bias.
struct Run {
    float mean, factor;
    const float *weight, *bias;

    __device__ __forceinline__ float at(float x, u32 i) const {
        float value = __fmul_rn(__fmul_rn(__fsub_rn(x, mean), factor), weight ? weight[i] : 1.0f);
        return bias ? __fadd_rn(value, bias[i]) : value;
    }
};

// The block's part of a weight or bias of `len` values, a multiple of `width`.
__device__ __forceinline__ const float *part_of(const float *values, u32 len, u32 width) {
    return values ? values + blockIdx.y % (len / width) * width : 0;
}

// Statistics of the run whose values `value(i)` returns.
template <class Value>
__device__ __forceinline__ Run normalise(Value value, u32 width, bool rms, float eps, const float *weight,
                                         u32 weight_len, const float *bias, u32 bias_len) {
    float mean = 0.0f, squares = 0.0f;
    if (!rms) {
        for (u32 i = threadIdx.x; i < width; i += blockDim.x) mean = __fadd_rn(mean, value(i));
        mean = __fdiv_rn(sum_of_block(mean), (float)width);
    }
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
        float d = __fsub_rn(value(i), mean);
        squares = __fmaf_rn(d, d, squares);
    }
    float variance = __fdiv_rn(sum_of_block(squares), (float)width);
    return {mean, __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(variance, eps))), part_of(weight, weight_len, width),
            part_of(bias, bias_len, width)};
}

// Stores the run's values. Stores their 8-bit form too unless `quantised` is null; each run is then whole
// blocks of 32 values, or the whole row.
template <class Value>
__device__ __forceinline__ void store_run(Value value, u32 width, float *out, u8 *quantised) {
    u32 cols = gridDim.y * width, from = blockIdx.y * width;
    out += (u64)blockIdx.x * cols + from;
    if (!quantised) {
        for (u32 i = threadIdx.x; i < width; i += blockDim.x) out[i] = value(i);
        return;
    }
    // The last run also writes the row's padding.
    u32 blocks = row_blocks(cols), end = blockIdx.y + 1 == gridDim.y ? 32 * blocks - from : width;
    quantised += ((u64)blockIdx.x * blocks + from / 32) * QUANTISED_BYTES;
    for (u32 i = threadIdx.x; i < end; i += blockDim.x) {
        float v = 0.0f;
        if (i < width) out[i] = v = value(i);
        quantise_block(v, quantised + i / 32 * QUANTISED_BYTES);
    }
}

// out = norm(x); out may be x.
extern "C" __global__ void __launch_bounds__(1024) norm_rows(const float *x, u32 width, u32 rms, float eps,
                                                             const float *weight, u32 weight_len, const float *bias,
                                                             u32 bias_len, float *out, u8 *quantised) {
    const float *run = x + ((u64)blockIdx.x * gridDim.y + blockIdx.y) * width;
    auto plain = [=](u32 i) { return run[i]; };
    Run norm = normalise(plain, width, rms, eps, weight, weight_len, bias, bias_len);
    store_run([=](u32 i) { return norm.at(run[i], i); }, width, out, quantised);
}

// x += scale * norm(y), an RMS norm.
extern "C" __global__ void __launch_bounds__(1024) add_norm(float *x, const float *y, u32 width, float eps,
                                                            const float *weight, u32 weight_len, float scale) {
    u64 from = ((u64)blockIdx.x * gridDim.y + blockIdx.y) * width;
    x += from, y += from;
    auto plain = [=](u32 i) { return y[i]; };
    Run norm = normalise(plain, width, true, eps, weight, weight_len, 0, 0);
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) x[i] = __fmaf_rn(norm.at(y[i], i), scale, x[i]);
}

// x = norm(x silu(gate)) if gate_first, else norm(x) silu(gate); an RMS norm.
extern "C" __global__ void __launch_bounds__(1024) gated_norm(float *x, const float *gate, u32 width, float eps,
                                                              const float *weight, u32 weight_len, u32 gate_first,
                                                              u8 *quantised) {
    u64 from = ((u64)blockIdx.x * gridDim.y + blockIdx.y) * width;
    const float *run = x + from;
    gate += from;
    auto value = [=](u32 i) { return gate_first ? __fmul_rn(run[i], silu_f32(gate[i])) : run[i]; };
    Run norm = normalise(value, width, true, eps, weight, weight_len, 0, 0);
    auto gated = [=](u32 i) {
        float v = norm.at(value(i), i);
        return gate_first ? v : __fmul_rn(v, silu_f32(gate[i]));
    };
    store_run(gated, width, x, quantised);
}

// ---- Operations on single values.

// gate[row][i] = gating(gate[row][i], up[row][up_from + i]), up [rows][up_cols]. If `up` is null, the second
// factor is 1. blockIdx.x: row. One thread per value of the row or its padding. Stores the 8-bit form too
// unless `quantised` is null.
extern "C" __global__ void gate(float *gate, const float *up, u32 cols, u32 up_cols, u32 up_from, u32 gating,
                                u8 *quantised) {
    u32 i = blockIdx.y * blockDim.x + threadIdx.x, blocks = row_blocks(cols);
    gate += (u64)blockIdx.x * cols;
    float value = 0.0f;
    if (i < cols) {
        float by = up ? up[(u64)blockIdx.x * up_cols + up_from + i] : 1.0f;
        gate[i] = value = gated(gating, gate[i], by);
    }
    if (quantised && i / 32 < blocks)
        quantise_block(value, quantised + ((u64)blockIdx.x * blocks + i / 32) * QUANTISED_BYTES);
}

// x += scale * y. One thread per value.
extern "C" __global__ void add(float *x, const float *y, float scale, u64 count) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] = __fmaf_rn(y[i], scale, x[i]);
}

// x[row] *= sigmoid(gate[row][0]), gate [rows][gate_cols]. blockIdx.x: row; one thread per value.
extern "C" __global__ void scale_rows(float *x, const float *gate, u32 cols, u32 gate_cols) {
    u32 i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= cols) return;
    x += (u64)blockIdx.x * cols + i;
    *x = __fmul_rn(*x, sigmoid_f32(gate[(u64)blockIdx.x * gate_cols]));
}

// x = softcap(factor * x), softcap(v) = cap tanh(v / cap). A cap of 0 means no softcap. One thread per value.
extern "C" __global__ void scale(float *x, float factor, float cap, u64 count) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float value = __fmul_rn(x[i], factor);
    if (cap != 0.0f) value = __fmul_rn(cap, tanh_f32(__fmul_rn(value, __fdiv_rn(1.0f, cap))));
    x[i] = value;
}

// out[row] = x[index[row]]; each index is a row of x. blockIdx.x: row of out; one thread per value.
extern "C" __global__ void gather_rows(const float *x, u32 cols, const u32 *index, float *out) {
    u32 i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i < cols) out[(u64)blockIdx.x * cols + i] = x[(u64)index[blockIdx.x] * cols + i];
}

// out = x, each run of `len` elements, a power of two of at most 512, multiplied by the normalised Hadamard matrix. A
// warp has max(len, 32) elements: x[i] is element 32 i + lane. `out` may be `x`. 128 threads.
extern "C" __global__ void __launch_bounds__(128) hadamard(float *out, const float *x, u32 len, u64 count) {
    const u32 lane = threadIdx.x % 32, held = max(len, 32u) / 32;
    const u64 first = ((u64)blockIdx.x * 4 + threadIdx.x / 32) * 32 * held + lane;
    float v[16];
#pragma unroll
    for (u32 i = 0; i < 16; i++) v[i] = i < held && first + 32 * i < count ? x[first + 32 * i] : 0.0f;
    times_hadamard(v, lane, len);
#pragma unroll
    for (u32 i = 0; i < 16; i++)
        if (i < held && first + 32 * i < count) out[first + 32 * i] = v[i];
}

// out[row][i] = x[row][order[i]]; `order` has whole numbers below `cols`. One thread per value.
extern "C" __global__ void gather_cols(float *out, const float *x, const float *order, u32 cols, u64 count) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = x[i / cols * cols + (u32)order[i % cols]];
}

// out[head][at + i] = x[head][i], i < cols; heads of `out` have `width` values. One thread per value of x.
extern "C" __global__ void place_heads(float *out, const float *x, u32 cols, u32 width, u32 at, u64 count) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i / cols * width + at + i % cols] = x[i];
}

// Index of the largest value of each row. Ties go to the lowest index. The result is 0xffffffff if a value is
// NaN or +infinity, or if no value is above -infinity. One block of threads per row.
extern "C" __global__ void __launch_bounds__(1024) argmax(const float *x, u32 cols, u32 *out) {
    __shared__ float values[32];
    __shared__ u32 places[32];
    x += (u64)blockIdx.x * cols;
    float best = __uint_as_float(0xff800000);
    u32 place = 0xffffffff;
    for (u32 i = threadIdx.x; i < cols; i += blockDim.x) {
        const float value = x[i];
        // +infinity at index 0xffffffff marks the row. Another thread has a smaller value or the same mark.
        if (!(value < __uint_as_float(0x7f800000))) {
            best = __uint_as_float(0x7f800000), place = 0xffffffff;
            break;
        }
        if (value > best) best = value, place = i;
    }
    u32 lane = threadIdx.x % 32, warps = blockDim.x / 32;
#pragma unroll
    for (int round = 0; round < 2; round++) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            float other = __shfl_xor_sync(0xffffffff, best, step);
            u32 there = __shfl_xor_sync(0xffffffff, place, step);
            if (other > best || (other == best && there < place)) best = other, place = there;
        }
        if (round == 1) break;
        if (lane == 0) values[threadIdx.x / 32] = best, places[threadIdx.x / 32] = place;
        __syncthreads();
        best = lane < warps ? values[lane] : __uint_as_float(0xff800000);
        place = lane < warps ? places[lane] : 0xffffffff;
    }
    if (threadIdx.x == 0) out[blockIdx.x] = place;
}
