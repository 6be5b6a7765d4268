// What LoRA adapters add to products of rows: scale * B (A x).
//
// Rows are [rows][cols] f32. The order of a sum depends on the matrix and the rank alone.
#include "prelude.cuh"

// An adapter's part for one matrix. a: [rank][cols], b: [rank][outputs]. Rank 0 if there is none.
struct Part {
    const float *a, *b;
    u32 rank;
    float scale;
};

constexpr u32 THREADS = 128;

// inner[row][j] = scale * (A x)[j]. adapters: the index into `parts` of each row; `count` or more for none. Rows of
// inner have `stride` values. One block of threads for each row and j. Grid: rows, the largest rank.
extern "C" __global__ void __launch_bounds__(THREADS)
    lora_inner(float *inner, const float *x, const u32 *adapters, const Part *parts, u32 count, u32 cols, u32 stride) {
    after_earlier_kernels();
    __shared__ float warps[THREADS / 32];
    const u32 row = blockIdx.x, j = blockIdx.y, adapter = adapters[row];
    if (adapter >= count || j >= parts[adapter].rank) return;
    const float *a = parts[adapter].a + (u64)j * cols;
    x += (u64)row * cols;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < cols; i += THREADS) sum = fmaf(a[i], x[i], sum);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    sum = warps[0];
#pragma unroll
    for (u32 warp = 1; warp < THREADS / 32; warp++) sum = __fadd_rn(sum, warps[warp]);
    inner[(u64)row * stride + j] = __fmul_rn(parts[adapter].scale, sum);
}

// out[row][i] += (B inner)[i], i < outputs. Grid: rows, outputs / THREADS.
extern "C" __global__ void __launch_bounds__(THREADS)
    lora_add(float *out, const float *inner, const u32 *adapters, const Part *parts, u32 count, u32 outputs, u32 stride) {
    after_earlier_kernels();
    const u32 row = blockIdx.x, i = blockIdx.y * THREADS + threadIdx.x, adapter = adapters[row];
    if (i >= outputs || adapter >= count) return;
    const u32 rank = parts[adapter].rank;
    if (rank == 0) return;
    const float *b = parts[adapter].b + i;
    inner += (u64)row * stride;
    float sum = 0.0f;
    for (u32 j = 0; j < rank; j++) sum = fmaf(inner[j], b[(u64)j * outputs], sum);
    out += (u64)row * outputs + i;
    *out = __fadd_rn(*out, sum);
}
