// Recurrent layers: convolution, gated delta net and Mamba-2. Tokens are processed in order of position.
//
// A layer's state in a slot consists of the convolution's past inputs [taps][channels], oldest first, then
// one matrix [outer][inner] per head. The rows of a matrix are padded to whole lanes. Sums run over `inner`.
// Elements are f32, or bfloat16 for some heads.
//
// Exactness: one thread processes an element of a state for all rows, in order. A sum over `inner` has one
// order. So the result does not depend on how the rows of a sequence are divided among launches.
#include "math.cuh"

#define WARPS 4
#define NONE 0xffffffffu

// The sequences of a launch. Slots are offsets / 64 into the arena.
struct Sequences {
    const u32 *first_rows, *rows;  // [sequences]
    const u32 *reads;              // [sequences]; NONE: the state before the first row is zeroes
    const u32 *writes;             // [sequences]; NONE: the state after the last row is not stored
    const u32 *export_starts;      // [sequences + 1], indices into the next two
    const u32 *export_rows;        // row of the sequence after which its state is stored, ascending
    const u32 *export_slots;
};

// x[row][c] = bias[c] + sum over taps of weight[c][tap] * the input `taps - 1 - tap` positions before, or silu
// of that, in place. Grid: channels / 32, sequences. One lane per channel. A warp processes eight of every 64 rows.
// Each warp reads them and the three preceding rows before any warp writes.
extern "C" __global__ void __launch_bounds__(256)
    conv(float *x, const float *weight, const float *bias, u8 *arena, const u32 *first_rows, const u32 *rows,
         const u32 *reads, const u32 *writes, const u32 *export_starts, const u32 *export_rows,
         const u32 *export_slots, u64 layer_offset, u32 channels, u32 taps, u32 silu) {
    // The last three inputs of the previous 64 rows, oldest first.
    __shared__ float edge[3][32];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 c = min(blockIdx.x * 32 + lane, channels - 1), sequence = blockIdx.y;
    const bool live = blockIdx.x * 32 + lane < channels;
    const u32 count = rows[sequence], read = reads[sequence], write = writes[sequence];
    u32 next = export_starts[sequence];
    const u32 exports = export_starts[sequence + 1];
    x += (u64)first_rows[sequence] * channels + c;
    arena += layer_offset;
    // past: the last four inputs, the newest last. With fewer taps the first elements are unused. w: the
    // weights in the same order.
    float past[4] = {0, 0, 0, 0}, w[4] = {0, 0, 0, 0};
    const u32 skip = 4 - taps;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        if (i < skip) continue;
        w[i] = weight[c * taps + i - skip];
        if (warp == 0 && read != NONE) past[i] = ((const float *)(arena + (u64)read * 64))[(i - skip) * channels + c];
    }
    const float start = bias ? bias[c] : 0.0f;
    auto leave = [&](u32 slot) {
        float *to = (float *)(arena + (u64)slot * 64);
#pragma unroll
        for (u32 tap = 0; tap < 4; tap++)
            if (live && tap >= skip) to[(tap - skip) * channels + c] = past[tap];
    };
    if (count == 0 && warp == 0 && write != NONE) leave(write);
    for (u32 base = 0; base < count; base += 64) {
        const u32 first = base + 8 * warp;
        float in[8];
#pragma unroll
        for (u32 i = 0; i < 8; i++) in[i] = first + i < count ? x[(u64)(first + i) * channels] : 0.0f;
#pragma unroll
        for (u32 i = 0; i < 3; i++) {
            if (warp > 0) past[1 + i] = first - 3 + i < count ? x[(u64)(first - 3 + i) * channels] : 0.0f;
            else if (base > 0) past[1 + i] = edge[i][lane];
        }
        __syncthreads();
        if (warp == 7) {
#pragma unroll
            for (u32 i = 0; i < 3; i++) edge[i][lane] = in[5 + i];
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            const u32 row = first + i;
            if (row >= count) break;
            past[0] = past[1]; past[1] = past[2]; past[2] = past[3]; past[3] = in[i];
            float sum = start;
#pragma unroll
            for (u32 tap = 0; tap < 4; tap++)
                if (tap >= skip) sum = fmaf(w[tap], past[tap], sum);
            if (live) x[(u64)row * channels] = silu ? silu_f32(sum) : sum;
            while (next < exports && export_rows[next] < row) next++;
            for (; next < exports && export_rows[next] == row; next++) leave(export_slots[next]);
            if (row == count - 1 && write != NONE) leave(write);
        }
        __syncthreads();
    }
}

// Loads the elements lane * PER .. (lane + 1) * PER of a matrix row. `narrow`: they are bfloat16.
template <u32 PER> __device__ __forceinline__ void load_row(float (&s)[PER], const u8 *row, u32 lane, bool narrow) {
    if (narrow) {
        const u32 *from = (const u32 *)row + lane * (PER / 2);
        u32 words[PER / 2];
        if constexpr (PER == 2) {
            words[0] = from[0];
        } else if constexpr (PER == 4) {
            const uint2 a = *(const uint2 *)from;
            words[0] = a.x; words[1] = a.y;
        } else {
            const uint4 a = *(const uint4 *)from;
            words[0] = a.x; words[1] = a.y; words[2] = a.z; words[3] = a.w;
        }
#pragma unroll
        for (u32 i = 0; i < PER; i++) s[i] = bf16_value(words[i / 2] >> 16 * (i % 2) & 0xffff);
    } else {
        const float *from = (const float *)row + lane * PER;
        if constexpr (PER == 2) {
            const float2 a = *(const float2 *)from;
            s[0] = a.x; s[1] = a.y;
        } else {
#pragma unroll
            for (u32 i = 0; i < PER; i += 4) {
                const float4 a = *(const float4 *)(from + i);
                s[i] = a.x; s[i + 1] = a.y; s[i + 2] = a.z; s[i + 3] = a.w;
            }
        }
    }
}

template <u32 PER> __device__ __forceinline__ void store_row(const float (&s)[PER], u8 *row, u32 lane, bool narrow) {
    if (narrow) {
        u32 *to = (u32 *)row + lane * (PER / 2);
        u32 words[PER / 2];
#pragma unroll
        for (u32 i = 0; i < PER / 2; i++) words[i] = __float_as_uint(s[2 * i]) >> 16 | __float_as_uint(s[2 * i + 1]);
        if constexpr (PER == 2) {
            to[0] = words[0];
        } else if constexpr (PER == 4) {
            *(uint2 *)to = make_uint2(words[0], words[1]);
        } else {
            *(uint4 *)to = make_uint4(words[0], words[1], words[2], words[3]);
        }
    } else {
        float *to = (float *)row + lane * PER;
        if constexpr (PER == 2) {
            *(float2 *)to = make_float2(s[0], s[1]);
        } else {
#pragma unroll
            for (u32 i = 0; i < PER; i += 4) *(float4 *)(to + i) = make_float4(s[i], s[i + 1], s[i + 2], s[i + 3]);
        }
    }
}

struct Scan {
    const float *x;            // [rows][width]: keys, queries and values of all heads
    const float *gains;        // [rows][heads]. Delta net: beta before the sigmoid; Mamba-2: not read
    const float *steps;        // [rows][heads], before the bias and softplus
    const float *a, *bias, *skips;  // [heads]; skips: Mamba-2 only
    float *out;                // [rows][heads][outer]
    u8 *arena;
    Sequences sequences;
    // [heads]: offset of the matrix / 64 in the layer's part of a slot, times 2, plus 1 for bfloat16.
    const u32 *places;
    u64 layer_offset;
    u32 width, key_at, query_at, value_at;
    u32 heads, key_heads, tiled;
    u32 inner, outer;
    float l2_eps, query_scale;
};

// Rows of a head's matrix per warp.
#define ROWS 4

// For each head and row of the step, with S [outer][inner]:
//   delta net: k, q normalised to length 1; u = gain (v - decay S k)
//   Mamba-2: u = gain v
//   both: S = decay S + u k^T;  out = S q (+ skip v)
// Grid: outer / 16, heads, sequences. A warp processes four rows of S, a lane PER elements of each.
template <bool DELTA, u32 PER> __device__ __forceinline__ void scan(const Scan &call) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 head = blockIdx.y, sequence = blockIdx.z;
    const u32 top = (blockIdx.x * WARPS + warp) * ROWS;
    if (top >= call.outer) return;
    const Sequences &all = call.sequences;
    const u32 first = all.first_rows[sequence], count = all.rows[sequence];
    const u32 read = all.reads[sequence], write = all.writes[sequence];
    u32 next = all.export_starts[sequence];
    const u32 exports = all.export_starts[sequence + 1];
    const u32 place = call.places[head];
    const bool narrow = place & 1;
    const u32 row_bytes = (call.inner + PER - 1) / PER * PER * (narrow ? 2 : 4);
    u8 *matrix = call.arena + call.layer_offset + (u64)(place >> 1) * 64 + (u64)top * row_bytes;
    const bool mine = lane * PER < call.inner;

    float s[ROWS][PER];
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
#pragma unroll
        for (u32 i = 0; i < PER; i++) s[r][i] = 0;
        if (read != NONE && mine && top + r < call.outer)
            load_row<PER>(s[r], matrix + (u64)read * 64 + r * row_bytes, lane, narrow);
    }
    const u32 key_head = call.tiled ? head % call.key_heads : head / (call.heads / call.key_heads);
    const float a = call.a[head], bias = call.bias[head], skip = DELTA ? 0.0f : call.skips[head];

    for (u32 base = 0; base < count; base += 32) {
        // Decay and gain of 32 rows, one row per lane.
        float decays = 0, gains = 0;
        if (base + lane < count) {
            const u64 at = (u64)(first + base + lane) * call.heads + head;
            const float step = softplus_f32(__fadd_rn(call.steps[at], bias));
            decays = exp_f32(__fmul_rn(a, step));
            gains = DELTA ? sigmoid_f32(call.gains[at]) : step;
        }
        const u32 rows = min(32u, count - base);
        for (u32 t = 0; t < rows; t++) {
            const float *x = call.x + (u64)(first + base + t) * call.width;
            const float *keys = x + call.key_at + key_head * call.inner;
            const float *queries = x + call.query_at + key_head * call.inner;
            float k[PER], q[PER], v[ROWS];
#pragma unroll
            for (u32 i = 0; i < PER; i++) {
                const u32 at = lane * PER + i;
                k[i] = 0;
                q[i] = 0;
                if (at < call.inner) {
                    k[i] = keys[at];
                    q[i] = queries[at];
                }
            }
#pragma unroll
            for (u32 r = 0; r < ROWS; r++)
                v[r] = top + r < call.outer ? x[call.value_at + head * call.outer + top + r] : 0.0f;
            const float decay = __shfl_sync(0xffffffff, decays, t), gain = __shfl_sync(0xffffffff, gains, t);
            if (DELTA) {
                float k2 = 0, q2 = 0;
#pragma unroll
                for (u32 i = 0; i < PER; i++) {
                    k2 = fmaf(k[i], k[i], k2);
                    q2 = fmaf(q[i], q[i], q2);
                }
                k2 = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(sum_lanes(k2, 32), call.l2_eps)));
                q2 = __fdiv_rn(call.query_scale, __fsqrt_rn(__fadd_rn(sum_lanes(q2, 32), call.l2_eps)));
#pragma unroll
                for (u32 i = 0; i < PER; i++) {
                    k[i] = __fmul_rn(k[i], k2);
                    q[i] = __fmul_rn(q[i], q2);
                }
            }
            float mine_out = 0;
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) {
                float u;
                if (DELTA) {
                    float dot = 0;
#pragma unroll
                    for (u32 i = 0; i < PER; i++) dot = fmaf(s[r][i], k[i], dot);
                    u = __fmul_rn(gain, fmaf(-decay, sum_lanes(dot, 32), v[r]));
                } else {
                    u = __fmul_rn(gain, v[r]);
                }
                float out = 0;
#pragma unroll
                for (u32 i = 0; i < PER; i++) {
                    s[r][i] = fmaf(k[i], u, __fmul_rn(decay, s[r][i]));
                    out = fmaf(s[r][i], q[i], out);
                    if (narrow) s[r][i] = __uint_as_float(bf16_bits(s[r][i]) << 16);
                }
                out = sum_lanes(out, 32);
                if (!DELTA) out = fmaf(skip, v[r], out);
                if (lane == r) mine_out = out;
            }
            if (lane < ROWS && top + lane < call.outer)
                call.out[((u64)(first + base + t) * call.heads + head) * call.outer + top + lane] = mine_out;
            while (next < exports && all.export_rows[next] == base + t) {
                u8 *to = matrix + (u64)all.export_slots[next] * 64;
#pragma unroll
                for (u32 r = 0; r < ROWS; r++)
                    if (mine && top + r < call.outer) store_row<PER>(s[r], to + r * row_bytes, lane, narrow);
                next++;
            }
        }
    }
    if (write == NONE || !mine) return;
#pragma unroll
    for (u32 r = 0; r < ROWS; r++)
        if (top + r < call.outer) store_row<PER>(s[r], matrix + (u64)write * 64 + r * row_bytes, lane, narrow);
}

// Five blocks per multiprocessor leave 102 registers for a thread. Without this limit the compiler spills
// registers to fit more blocks.
#define SCAN(name, delta, per)                                                                                         \
    extern "C" __global__ void __launch_bounds__(128, 5) name(                                                            \
        const float *x, const float *gains, const float *steps, const float *a, const float *bias, const float *skips, \
        float *out, u8 *arena, const u32 *first_rows, const u32 *rows, const u32 *reads, const u32 *writes,            \
        const u32 *export_starts, const u32 *export_rows, const u32 *export_slots, const u32 *places,                  \
        u64 layer_offset, u32 width, u32 key_at, u32 query_at, u32 value_at, u32 heads, u32 key_heads, u32 tiled,      \
        u32 inner, u32 outer, float l2_eps, float query_scale) {                                                       \
        const Sequences sequences = {first_rows, rows, reads, writes, export_starts, export_rows, export_slots};       \
        scan<delta, per>(Scan{x, gains, steps, a, bias, skips, out, arena, sequences, places, layer_offset, width,     \
                              key_at, query_at, value_at, heads, key_heads, tiled, inner, outer, l2_eps,               \
                              query_scale});                                                                           \
    }

SCAN(delta_net_64, true, 2)
SCAN(delta_net_128, true, 4)
SCAN(delta_net_256, true, 8)
SCAN(mamba2_64, false, 2)
SCAN(mamba2_128, false, 4)
SCAN(mamba2_256, false, 8)

// kept[i] = x[rows[i]], `cols` wide: the inputs of rows that may be rejected later. Grid: rows kept, cols /
// 128.
extern "C" __global__ void __launch_bounds__(128) keep_rows(float *kept, const float *x, const u32 *rows, u32 cols) {
    const u32 c = blockIdx.y * 128 + threadIdx.x;
    if (c < cols) kept[(u64)blockIdx.x * cols + c] = x[(u64)rows[blockIdx.x] * cols + c];
}
