// Operations on rows: norms, gates, sums, and the 8-bit form.
//
// Rows are [rows][cols] f32. The width of a row alone decides the order of additions in it.
#include "rows.cuh"

// All kernels below have rows in blockIdx.x, because the other grid dimensions end at 65,535.

// One thread per four values of the row or its padding. blockIdx.x: the row.
extern "C" __global__ void quantise(const float *x, u32 cols, u32 form, u8 *out) {
    after_earlier_kernels();
    const u32 i = 4 * (blockIdx.y * blockDim.x + threadIdx.x);
    const Four v = load_four(x + (u64)blockIdx.x * cols, i, cols);
    quantise_row(v, form, out, blockIdx.x, i / 32, row_blocks(cols));
}

// The code of the E2M1 that is nearest to a value, ties to even. Values beyond the largest, 6, become it.
__device__ __forceinline__ u32 e2m1_bits(float x) {
    const float a = fabsf(x);
    const u32 size = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    return size | (__float_as_uint(x) >> 31) << 3;
}

// Rounds rows to NVFP4, described in matmul/scaled.cu. The row's factor is the least power of two with which no value
// is above 2688, the largest E4M3 times the largest E2M1. The scale of 16 values is a sixth of the largest one, the
// nearest E4M3. A row with a value that is not finite has the factor NaN. One block of threads per row.
extern "C" __global__ void __launch_bounds__(1024) quantise_nvfp4(const float *x, u32 cols, u8 *out) {
    after_earlier_kernels();
    __shared__ u32 warps[32];
    const u32 units = (cols + 255) / 256;
    x += (u64)blockIdx.x * cols, out += (u64)blockIdx.x * (144 * units + 16);
    u32 largest = 0;
    for (u32 i = 4 * threadIdx.x; i < cols; i += 4 * blockDim.x) {
        const Four v = load_four(x, i, cols);
#pragma unroll
        for (u32 k = 0; k < 4; k++) largest = max(largest, __float_as_uint(v.x[k]) & 0x7fffffff);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = max(largest, __shfl_xor_sync(0xffffffff, largest, step));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = largest;
    __syncthreads();
    for (u32 w = 0; w < blockDim.x / 32; w++) largest = max(largest, warps[w]);
    // 2688 is 1.3125 * 2^11. A mantissa above 0.3125 carries to the exponent.
    const u32 rounded = (largest + 0x57ffff) >> 23, exponent = rounded > 12 ? rounded - 11 : 1;
    const float inverse = __uint_as_float((254 - exponent) << 23);
    // Warps are whole in each turn.
    for (u32 i = 4 * threadIdx.x; i / 128 * 128 < 256 * units; i += 4 * blockDim.x) {
        const Four v = load_four(x, i, cols), s = Four::of([&](u32 k) { return __fmul_rn(v.x[k], inverse); });
        float most = fmaxf(fmaxf(fabsf(s.x[0]), fabsf(s.x[1])), fmaxf(fabsf(s.x[2]), fabsf(s.x[3])));
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
        const u32 scale = e4m3_pair(__fdiv_rn(most, 6.0f), 0.0f);
        // Exponent and mantissa at their places in an f32, whose bias is larger by 120.
        const float by = __fmul_rn(__uint_as_float(scale << 20), 0x1p120f);
        u32 codes = 0;
#pragma unroll
        for (u32 k = 0; k < 4; k++) codes |= e2m1_bits(scale ? __fdiv_rn(s.x[k], by) : 0.0f) << 4 * k;
        const u32 unit = i / 256, word = i % 64 / 8;
        *(u16 *)(out + 128 * unit + i % 256 / 64 * 32 + 8 * (word % 4) + 4 * (word / 4) + i % 8 / 2) = codes;
        if (i % 16 == 0) out[128 * units + i / 16] = scale;
    }
    if (threadIdx.x == 0)
        *(float *)(out + 144 * units) = __uint_as_float(largest < 0x7f800000 ? exponent << 23 : 0x7fc00000);
}

// ---- Norms. One block of threads per run of `width` values. blockIdx.x: the row; blockIdx.y: the run of the
// row. Dynamic shared memory: the run's values, at most HELD.

// Values of a run in shared memory at once: four per thread.
constexpr u32 HELD = 4096;
extern __shared__ __align__(16) float held[];

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
    u32 width;

    __device__ __forceinline__ Four at(const Four &x, u32 i) const {
        const Four by = weight ? load_four(weight, i, width) : Four{1, 1, 1, 1};
        const Four v = Four::of([&](u32 k) { return __fmul_rn(__fmul_rn(__fsub_rn(x.x[k], mean), factor), by.x[k]); });
        if (!bias) return v;
        const Four plus = load_four(bias, i, width);
        return Four::of([&](u32 k) { return __fadd_rn(v.x[k], plus.x[k]); });
    }
};

// The block's part of a weight or bias of `len` values, a multiple of `width`.
__device__ __forceinline__ const float *part_of(const float *values, u32 len, u32 width) {
    return values ? values + blockIdx.y % (len / width) * width : 0;
}

// Sum of `add(sum, value)` over the values of a run; `load(i)` returns four. Thread t adds the values t,
// t + blockDim.x, and so on. A run of at most HELD values stays in `held`, and is read from there if `is_held`.
template <class Load, class Add>
__device__ __forceinline__ float sum_of_run(Load load, Add add, u32 width, bool is_held) {
    float sum = 0.0f;
    for (u32 from = 0; from < width; from += HELD) {
        const u32 end = min(width - from, HELD);
        if (!is_held || width > HELD) {
            // Threads may still read other values.
            if (from > 0 || is_held) __syncthreads();
            const u32 i = 4 * threadIdx.x;
            if (i < end) {
                const Four v = load(from + i);
                *(float4 *)(held + i) = {v.x[0], v.x[1], v.x[2], v.x[3]};
            }
            __syncthreads();
        }
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            const u32 i = threadIdx.x + k * blockDim.x;
            if (i < end) sum = add(sum, held[i]);
        }
    }
    return sum_of_block(sum);
}

// Statistics of a run, of which `load(i)` returns four values.
template <class Load>
__device__ __forceinline__ Run normalise(Load load, u32 width, bool rms, float eps, const float *weight, u32 weight_len,
                                         const float *bias, u32 bias_len) {
    float mean = 0.0f;
    if (!rms) {
        mean = sum_of_run(load, [](float sum, float x) { return __fadd_rn(sum, x); }, width, false);
        mean = __fdiv_rn(mean, (float)width);
    }
    auto square = [=](float sum, float x) {
        const float d = __fsub_rn(x, mean);
        return __fmaf_rn(d, d, sum);
    };
    const float variance = __fdiv_rn(sum_of_run(load, square, width, !rms), (float)width);
    return {mean, __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(variance, eps))), part_of(weight, weight_len, width),
            part_of(bias, bias_len, width), width};
}

// Values i .. i + 4 of a run after `sum_of_run`.
template <class Load> __device__ __forceinline__ Four again(Load load, u32 i, u32 width) {
    if (width > HELD) return load(i);
    const float4 v = *(const float4 *)(held + i);
    return {v.x, v.y, v.z, v.w};
}

// Stores the run's values, of which `values(i)` returns four, unless `out` is null, and their 8-bit form unless
// `quantised` is null; each run is then whole blocks of 32 values, or the whole row.
template <class Values>
__device__ __forceinline__ void store_run(Values values, u32 width, float *out, u8 *quantised) {
    const u32 cols = gridDim.y * width, from = blockIdx.y * width, blocks = row_blocks(cols);
    // The last run also writes the row's padding. Warps are whole in each turn.
    const u32 end = quantised && blockIdx.y + 1 == gridDim.y ? 32 * blocks - from : width;
    for (u32 i = 4 * threadIdx.x; i / 128 * 128 < end; i += 4 * blockDim.x) {
        Four v = {};
        if (i < width) {
            v = values(i);
            if (out) store_four(out + (u64)blockIdx.x * cols + from, i, width, v);
        }
        if (!quantised) continue;
        quantise_blocks(v, quantised + ((u64)blockIdx.x * blocks + (from + i) / 32) * QUANTISED_BYTES, i < end);
    }
}

// out = norm(x); out may be x.
extern "C" __global__ void __launch_bounds__(1024) norm_rows(const float *x, u32 width, u32 rms, float eps,
                                                             const float *weight, u32 weight_len, const float *bias,
                                                             u32 bias_len, float *out, u8 *quantised) {
    after_earlier_kernels();
    const float *run = x + ((u64)blockIdx.x * gridDim.y + blockIdx.y) * width;
    auto load = [=](u32 i) { return load_four(run, i, width); };
    const Run norm = normalise(load, width, rms, eps, weight, weight_len, bias, bias_len);
    store_run([=](u32 i) { return norm.at(again(load, i, width), i); }, width, out, quantised);
}

// x += scale * norm(y), an RMS norm.
extern "C" __global__ void __launch_bounds__(1024) add_norm(float *x, const float *y, u32 width, float eps,
                                                            const float *weight, u32 weight_len, float scale) {
    after_earlier_kernels();
    const u64 from = ((u64)blockIdx.x * gridDim.y + blockIdx.y) * width;
    x += from, y += from;
    auto load = [=](u32 i) { return load_four(y, i, width); };
    const Run norm = normalise(load, width, true, eps, weight, weight_len, 0, 0);
    for (u32 i = 4 * threadIdx.x; i < width; i += 4 * blockDim.x) {
        const Four v = norm.at(again(load, i, width), i), to = load_four(x, i, width);
        store_four(x, i, width, Four::of([&](u32 k) { return __fmaf_rn(v.x[k], scale, to.x[k]); }));
    }
}

// x = norm(x silu(gate)) if gate_first, else norm(x) silu(gate); an RMS norm.
extern "C" __global__ void __launch_bounds__(1024) gated_norm(float *x, const float *gate, u32 width, float eps,
                                                              const float *weight, u32 weight_len, u32 gate_first,
                                                              u8 *quantised) {
    after_earlier_kernels();
    const u64 from = ((u64)blockIdx.x * gridDim.y + blockIdx.y) * width;
    const float *run = x + from;
    gate += from;
    auto gated = [=](const Four &v, u32 i) {
        const Four by = load_four(gate, i, width);
        return Four::of([&](u32 k) { return __fmul_rn(v.x[k], silu_f32(by.x[k])); });
    };
    auto load = [=](u32 i) {
        const Four v = load_four(run, i, width);
        return gate_first ? gated(v, i) : v;
    };
    const Run norm = normalise(load, width, true, eps, weight, weight_len, 0, 0);
    auto values = [=](u32 i) {
        const Four v = norm.at(again(load, i, width), i);
        return gate_first ? v : gated(v, i);
    };
    store_run(values, width, x, quantised);
}

// ---- Operations on single values.

// gate[row][i] = gating(gate[row][i], up[row][up_from + i]), up [rows][up_cols]. If `up` is null, the second
// factor is 1. blockIdx.x: row. One thread per four values of the row or its padding. Stores the 8-bit form too
// unless `quantised` is null, and without `keeps` only that.
extern "C" __global__ void gate(float *gate, const float *up, u32 cols, u32 up_cols, u32 up_from, u32 gating, u32 keeps,
                                u8 *quantised) {
    after_earlier_kernels();
    const u32 i = 4 * (blockIdx.y * blockDim.x + threadIdx.x), blocks = row_blocks(cols);
    gate += (u64)blockIdx.x * cols;
    Four v = {};
    if (i < cols) {
        v = load_four(gate, i, cols);
        const Four by = up ? load_four(up + (u64)blockIdx.x * up_cols + up_from, i, cols) : Four{1, 1, 1, 1};
        v = Four::of([&](u32 k) { return gated(gating, v.x[k], by.x[k]); });
        if (keeps) store_four(gate, i, cols, v);
    }
    if (quantised)
        quantise_blocks(v, quantised + ((u64)blockIdx.x * blocks + i / 32) * QUANTISED_BYTES, i / 32 < blocks);
}

// x += scale * y. One thread per value.
extern "C" __global__ void add(float *x, const float *y, float scale, u64 count) {
    after_earlier_kernels();
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] = __fmaf_rn(y[i], scale, x[i]);
}

// x[row] *= sigmoid(gate[row][0]), gate [rows][gate_cols]. blockIdx.x: row; one thread per value.
extern "C" __global__ void scale_rows(float *x, const float *gate, u32 cols, u32 gate_cols) {
    after_earlier_kernels();
    u32 i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= cols) return;
    x += (u64)blockIdx.x * cols + i;
    *x = __fmul_rn(*x, sigmoid_f32(gate[(u64)blockIdx.x * gate_cols]));
}

// x = softcap(factor * x), softcap(v) = cap tanh(v / cap). A cap of 0 means no softcap. One thread per value.
extern "C" __global__ void scale(float *x, float factor, float cap, u64 count) {
    after_earlier_kernels();
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float value = __fmul_rn(x[i], factor);
    if (cap != 0.0f) value = __fmul_rn(cap, tanh_f32(__fmul_rn(value, __fdiv_rn(1.0f, cap))));
    x[i] = value;
}

// out[row] = x[index[row]]; each index is a row of x. blockIdx.x: row of out; one thread per value.
extern "C" __global__ void gather_rows(const float *x, u32 cols, const u32 *index, float *out) {
    after_earlier_kernels();
    u32 i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i < cols) out[(u64)blockIdx.x * cols + i] = x[(u64)index[blockIdx.x] * cols + i];
}

// out = x, each run of `len` elements, a power of two of at most 512, multiplied by the normalised Hadamard matrix. A
// warp has max(len, 32) elements: x[i] is element 32 i + lane. `out` may be `x`. 128 threads.
extern "C" __global__ void __launch_bounds__(128) hadamard(float *out, const float *x, u32 len, u64 count) {
    after_earlier_kernels();
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
    after_earlier_kernels();
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = x[i / cols * cols + (u32)order[i % cols]];
}

// out[head][at + i] = x[head][i], i < cols; heads of `out` have `width` values. One thread per value of x.
extern "C" __global__ void place_heads(float *out, const float *x, u32 cols, u32 width, u32 at, u64 count) {
    after_earlier_kernels();
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i / cols * width + at + i % cols] = x[i];
}

// Index of the largest value of each row. Ties go to the lowest index. The result is 0xffffffff if a value is
// NaN or +infinity, or if no value is above -infinity. One block of threads per row.
extern "C" __global__ void __launch_bounds__(1024) argmax(const float *x, u32 cols, u32 *out) {
    after_earlier_kernels();
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
