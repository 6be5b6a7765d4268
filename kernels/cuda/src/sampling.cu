// Sampling: selects the largest values of each row, so that the host reads these instead of the whole row.
#include "prelude.cuh"

#define THREADS 1024
// Loads of a thread in flight.
#define LOADS 4
// Maximum number of values that are selected from a row.
#define MOST 1024
// Keys in shared memory: the best so far, and those of one step.
#define CAPACITY (MOST + LOADS * THREADS)

// A key orders the values of a row: larger values first, then lower indices. NaN is the largest value, and 0 is
// above -0.
__device__ __forceinline__ u64 key_of(float x, u32 index) {
    const u32 bits = __float_as_uint(x);
    const u32 rank = x != x ? 0xffffffff : bits >> 31 ? ~bits : bits | 0x80000000;
    return (u64)rank << 32 | ~index;
}

// Keys of a block in shared memory, in no particular order.
struct Kept {
    u64 (&keys)[CAPACITY];
    u32 &count;

    // Adds the keys of those lanes of a warp that have `add`.
    __device__ __forceinline__ void append(u64 key, bool add) {
        const u32 lane = threadIdx.x % 32, adding = __ballot_sync(0xffffffff, add);
        if (adding == 0) return;
        u32 first = lane == 0 ? atomicAdd(&count, __popc(adding)) : 0;
        first = __shfl_sync(0xffffffff, first, 0);
        if (add) keys[first + __popc(adding & ((1u << lane) - 1))] = key;
    }

    // Drops all of the block's `n` keys but the `best` largest, best < n. Returns a bound that these reach and no other
    // key does. Radix select: finds the bound digit by digit, 8 bits at a time.
    __device__ __forceinline__ u64 select(u32 n, u32 best) {
        __shared__ u32 histogram[256];
        __shared__ u32 found_digit, found_left;
        u64 bound = 0;
        u32 left = best;
        for (int shift = 56;; shift -= 8) {
            if (threadIdx.x < 256) histogram[threadIdx.x] = 0;
            __syncthreads();
            for (u32 i = threadIdx.x; i < n; i += THREADS)
                if (shift == 56 || keys[i] >> (shift + 8) == bound) atomicAdd(&histogram[keys[i] >> shift & 255], 1);
            __syncthreads();
            if (threadIdx.x < 32) {
                // Lane r has the digits from 255 - 8 r downwards.
                const u32 top = 255 - 8 * threadIdx.x;
                u32 own = 0;
                for (u32 i = 0; i < 8; i++) own += histogram[top - i];
                u32 above = own;
                for (u32 apart = 1; apart < 32; apart *= 2) {
                    const u32 other = __shfl_up_sync(0xffffffff, above, apart);
                    if (threadIdx.x >= apart) above += other;
                }
                above -= own;
                if (above < left && left <= above + own) {
                    u32 digit = top, rest = left - above;
                    while (histogram[digit] < rest) rest -= histogram[digit--];
                    found_digit = digit;
                    // Nothing is left to decide if all keys with this digit are among the best.
                    found_left = histogram[digit] == rest ? 0 : rest;
                }
            }
            __syncthreads();
            bound = bound << 8 | found_digit;
            left = found_left;
            if (left == 0) {
                bound <<= shift;
                break;
            }
        }
        u64 own[CAPACITY / THREADS];
#pragma unroll
        for (u32 k = 0; k < CAPACITY / THREADS; k++) {
            const u32 i = k * THREADS + threadIdx.x;
            own[k] = i < n ? keys[i] : 0;
        }
        if (threadIdx.x == 0) count = 0;
        __syncthreads();
#pragma unroll
        for (u32 k = 0; k < CAPACITY / THREADS; k++) append(own[k], k * THREADS + threadIdx.x < n && own[k] >= bound);
        __syncthreads();
        return bound;
    }
};

// out[row]: the `best` largest values of the row as {index, bits of the value}, in no particular order. Ties go to the
// lowest indices. 1 <= best <= cols, MOST. One block of threads per row, which reads the row once.
extern "C" __global__ void __launch_bounds__(THREADS) best(const float *x, u32 cols, u32 best, uint2 *out) {
    after_earlier_kernels();
    __shared__ u64 keys[CAPACITY];
    __shared__ u32 count;
    Kept kept{keys, count};
    x += (u64)blockIdx.x * cols;
    out += (u64)blockIdx.x * best;
    if (threadIdx.x == 0) count = 0;
    float values[LOADS];
    auto load = [&](u32 base) {
#pragma unroll
        for (u32 k = 0; k < LOADS; k++) {
            const u32 i = base + k * THREADS + threadIdx.x;
            values[k] = i < cols ? x[i] : 0.0f;
        }
    };
    load(0);
    __syncthreads();
    // A lower bound of the row's best keys.
    u64 bound = 0;
    for (u32 base = 0; base < cols; base += LOADS * THREADS) {
#pragma unroll
        for (u32 k = 0; k < LOADS; k++) {
            const u32 i = base + k * THREADS + threadIdx.x;
            const u64 key = key_of(values[k], i);
            kept.append(key, i < cols && key >= bound);
        }
        const u32 next = base + LOADS * THREADS;
        if (next < cols) load(next);
        __syncthreads();
        const u32 n = count;
        __syncthreads();
        if (n > best && (n > MOST || next >= cols)) bound = kept.select(n, best);
    }
    for (u32 i = threadIdx.x; i < best; i += THREADS) {
        const u32 index = ~(u32)keys[i];
        out[i] = uint2{index, __float_as_uint(x[index])};
    }
}
