// Sampling: selects the largest values of each row, so that the host reads these instead of the whole row.
#include "prelude.cuh"

#define THREADS 1024
#define WARPS (THREADS / 32)

// Maps a value to an integer of the same order. NaN has the largest integer, and 0 is above -0.
__device__ __forceinline__ u32 rank_of(float x) {
    const u32 bits = __float_as_uint(x);
    if (x != x) return 0xffffffff;
    return bits >> 31 ? ~bits : bits | 0x80000000;
}

// out[row]: the `count` largest values of the row as {index, bits of the value}, in no particular order. Ties
// go to the lowest indices. 1 <= count <= cols. One block of threads per row.
extern "C" __global__ void __launch_bounds__(THREADS) best(const float *x, u32 cols, u32 count, uint2 *out) {
    __shared__ u32 histogram[256];
    __shared__ u32 before[WARPS];
    __shared__ u32 known, wanted, placed;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    x += (u64)blockIdx.x * cols;
    out += (u64)blockIdx.x * count;

    // Radix select: finds the `count`-th largest rank, one digit of 8 bits at a time. The histogram counts
    // the digits of the values whose higher digits equal those of the rank.
    u32 rank = 0, left = count;
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256) histogram[threadIdx.x] = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < cols; i += THREADS) {
            const u32 own = rank_of(x[i]);
            if (shift == 24 || own >> (shift + 8) == rank) atomicAdd(&histogram[own >> shift & 255], 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            u32 digit = 255, rest = left;
            while (histogram[digit] < rest) rest -= histogram[digit--];
            known = rank << 8 | digit;
            wanted = rest;
        }
        __syncthreads();
        rank = known;
        left = wanted;
    }

    // Writes all values above the rank, and the first `left` values with exactly this rank.
    if (threadIdx.x == 0) placed = 0;
    __syncthreads();
    u32 taken = 0;
    for (u32 base = 0; base < cols; base += THREADS) {
        const u32 i = base + threadIdx.x;
        const u32 own = i < cols ? rank_of(x[i]) : 0;
        const bool equal = i < cols && own == rank;
        const u32 equals = __ballot_sync(0xffffffff, equal);
        if (lane == 0) before[warp] = __popc(equals);
        __syncthreads();
        u32 place = taken + __popc(equals & ((1u << lane) - 1));
        for (u32 w = 0; w < WARPS; w++) {
            if (w < warp) place += before[w];
            taken += before[w];
        }
        if ((i < cols && own > rank) || (equal && place < left))
            out[atomicAdd(&placed, 1)] = uint2{i, __float_as_uint(x[i])};
        __syncthreads();
    }
}
