// Kernels for the tests of the PTX interpreter. After a change of code or of lines, compile for sm_90 and
// sm_121a (NVRTC 13.0, --std=c++17 -default-device --generate-line-info) and store the PTX here.
typedef unsigned int u32;
typedef unsigned long long u64;

// y = x / sqrt(mean(x^2) + eps), one row per block.
extern "C" __global__ void rms_norm(const float *__restrict__ x, float *y, u32 width, float eps) {
    __shared__ float sums[32];
    extern __shared__ float row[];
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
        float v = x[(u64)blockIdx.x * width + i];
        row[i] = v;
        sum = __fmaf_rn(v, v, sum);
    }
    for (int lanes = 16; lanes > 0; lanes >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0.0f;
    for (u32 w = 0; w < blockDim.x / 32; w++) total += sums[w];
    float scale = __frsqrt_rn(total / width + eps);
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) y[(u64)blockIdx.x * width + i] = row[i] * scale;
}

// out[r] = sum of weights[r][k] x[k], four bytes at a time; one warp per row.
extern "C" __global__ void gemv_s8(const int4 *__restrict__ weights, const int4 *__restrict__ x, int *out, u32 quads) {
    u32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    int sum = 0;
    for (u32 i = threadIdx.x % 32; i < quads; i += 32) {
        int4 w = weights[(u64)row * quads + i], v = x[i];
        sum = __dp4a(w.x, v.x, sum);
        sum = __dp4a(w.y, v.y, sum);
        sum = __dp4a(w.z, v.z, sum);
        sum = __dp4a(w.w, v.w, sum);
    }
    for (int lanes = 16; lanes > 0; lanes >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
    if (threadIdx.x % 32 == 0) out[row] = sum;
}

__constant__ int steps[4] = {1, 10, 100, 1000};
__device__ u32 arrived;

__device__ __noinline__ int collatz(int n) {
    int count = 0;
    while (n != 1) {
        n = n % 2 == 0 ? n / 2 : 3 * n + 1;
        count++;
    }
    return count;
}

// Calls, loops that lanes leave one by one, jump tables, local arrays, atomics. The last block adds `out`.
extern "C" __global__ void branches(const int *x, int *out, int *total) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    int n = x[i], found[8];
    for (int k = 0; k < 8; k++) found[k] = collatz(n + k);
    int value = found[n & 7];
    switch (n % 5) {
    case 0: value += steps[n & 3]; break;
    case 1: value *= 3; break;
    case 2: value -= 7; break;
    case 3: value ^= n; break;
    default: value = -value;
    }
    out[i] = value;
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&arrived, 1u) == gridDim.x - 1;
    __syncthreads();
    if (last && threadIdx.x == 0) {
        int sum = 0;
        for (u32 j = 0; j < gridDim.x * blockDim.x; j++) sum += out[j];
        *total = sum;
    }
}
