// Recurrent layers: convolution, gated delta net and Mamba-2. Tokens are processed in order of position.
//
// A layer's state in a slot consists of the convolution's past inputs [taps][channels], oldest first, then
// one matrix [outer][inner] per head. The rows of a matrix are padded to whole lanes. Sums run over `inner`.
// Elements are f32, or bfloat16 for some heads.
//
// Exactness: one thread processes an element of a state for all rows, in order. A sum over `inner` has one
// order. So the result does not depend on how the rows of a sequence are divided among launches.
#include "math.cuh"

#define WARPS 8
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
    after_earlier_kernels();
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

// Rows of a head's matrix per warp, and per block.
#define ROWS 4
#define BLOCK_ROWS (WARPS * ROWS)

// A sum over lanes has the order of `sum_lanes`: in every step a lane adds the value of the lane that is 16, 8, 4, 2,
// 1 apart. Here a lane keeps half of its values in the first steps and passes on the others.
// The lanes with bit 4 clear get the sum of dots[lane / 4 % 4], the others that of outs[lane / 4 % 4].
__device__ __forceinline__ float sum_eight(const float (&dots)[ROWS], const float (&outs)[ROWS], u32 lane) {
    float x[ROWS];
    const bool high = lane & 16;
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
        const float kept = high ? outs[r] : dots[r], passed = high ? dots[r] : outs[r];
        x[r] = __fadd_rn(kept, __shfl_xor_sync(0xffffffff, passed, 16));
    }
#pragma unroll
    for (u32 half = 2; half > 0; half /= 2) {
        const bool upper = lane & 4 * half;
#pragma unroll
        for (u32 r = 0; r < half; r++) {
            const float kept = upper ? x[r + half] : x[r], passed = upper ? x[r] : x[r + half];
            x[r] = __fadd_rn(kept, __shfl_xor_sync(0xffffffff, passed, 4 * half));
        }
    }
    x[0] = __fadd_rn(x[0], __shfl_xor_sync(0xffffffff, x[0], 2));
    return __fadd_rn(x[0], __shfl_xor_sync(0xffffffff, x[0], 1));
}

// For each head and row of the step, with S [outer][inner]:
//   delta net: k, q normalised to length 1; u = gain (v - decay S k)
//   Mamba-2: u = gain v
//   both: S = decay S + u k^T;  out = S q (+ skip v)
// Grid: outer / 32, heads, sequences. A warp processes four rows of S, a lane PER elements of each. The block prepares
// TILE rows of the step at a time in shared memory, and loads the next ones meanwhile. The sum of a row's output is
// made together with the products S k of the next row.
template <bool DELTA, u32 PER> __device__ __forceinline__ void scan(const Scan &call) {
    constexpr u32 TILE = PER == 8 ? 8 : 16, WIDTH = 32 * PER;
    constexpr u32 VECTORS = 2 * TILE / WARPS, SCALARS = TILE * BLOCK_ROWS / (32 * WARPS);
    // Keys, then queries.
    __shared__ __align__(16) float vectors[2 * TILE][WIDTH];
    __shared__ float values[TILE][BLOCK_ROWS], outs[TILE][BLOCK_ROWS];
    // Decay and gain.
    __shared__ float2 gates[TILE];
    const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const u32 head = blockIdx.y, sequence = blockIdx.z;
    const u32 block_top = blockIdx.x * BLOCK_ROWS, top = block_top + warp * ROWS;
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
    auto leave = [&](u32 slot) {
        u8 *to = matrix + (u64)slot * 64;
#pragma unroll
        for (u32 r = 0; r < ROWS; r++)
            if (mine && top + r < call.outer) store_row<PER>(s[r], to + r * row_bytes, lane, narrow);
    };
    const u32 key_head = call.tiled ? head % call.key_heads : head / (call.heads / call.key_heads);
    const float a = call.a[head], bias = call.bias[head], skip = DELTA ? 0.0f : call.skips[head];

    // Loads of a tile: a warp loads vectors, a thread values, and one thread for each row its gates.
    const u32 place_row = thread / BLOCK_ROWS, place_column = thread % BLOCK_ROWS;
    float raw[VECTORS][PER], raw_values[SCALARS], raw_step = 0, raw_gain = 0;
    auto load_tile = [&](u32 base) {
#pragma unroll
        for (u32 j = 0; j < VECTORS; j++) {
            const u32 index = warp + WARPS * j, row = base + index % TILE;
            const float *from = call.x + (u64)(first + row) * call.width + key_head * call.inner +
                                (index < TILE ? call.key_at : call.query_at);
#pragma unroll
            for (u32 i = 0; i < PER; i++) {
                const u32 at = lane * PER + i;
                raw[j][i] = row < count && at < call.inner ? from[at] : 0.0f;
            }
        }
#pragma unroll
        for (u32 j = 0; j < SCALARS; j++) {
            const u32 row = base + place_row + 32 * WARPS / BLOCK_ROWS * j, at = block_top + place_column;
            raw_values[j] = row < count && at < call.outer
                                ? call.x[(u64)(first + row) * call.width + call.value_at + head * call.outer + at]
                                : 0.0f;
        }
        if (thread < TILE && base + thread < count) {
            const u64 at = (u64)(first + base + thread) * call.heads + head;
            raw_step = call.steps[at];
            if (DELTA) raw_gain = call.gains[at];
        }
    };
    load_tile(0);
    for (u32 base = 0; base < count; base += TILE) {
#pragma unroll
        for (u32 j = 0; j < VECTORS; j++) {
            const u32 index = warp + WARPS * j;
            if (DELTA) {
                float length = 0;
#pragma unroll
                for (u32 i = 0; i < PER; i++) length = fmaf(raw[j][i], raw[j][i], length);
                length = __fsqrt_rn(__fadd_rn(sum_lanes(length, 32), call.l2_eps));
                length = __fdiv_rn(index < TILE ? 1.0f : call.query_scale, length);
#pragma unroll
                for (u32 i = 0; i < PER; i++) raw[j][i] = __fmul_rn(raw[j][i], length);
            }
            store_row<PER>(raw[j], (u8 *)vectors[index], lane, false);
        }
#pragma unroll
        for (u32 j = 0; j < SCALARS; j++) values[place_row + 32 * WARPS / BLOCK_ROWS * j][place_column] = raw_values[j];
        if (thread < TILE) {
            const float step = softplus_f32(__fadd_rn(raw_step, bias));
            gates[thread] = make_float2(exp_f32(__fmul_rn(a, step)), DELTA ? sigmoid_f32(raw_gain) : step);
        }
        __syncthreads();
        if (base + TILE < count) load_tile(base + TILE);
        const u32 rows = min(TILE, count - base);
        // The column of `outs` whose sums this lane gets, and its parts of the last row's output.
        const u32 column = warp * ROWS + lane / 4 % ROWS;
        float parts[ROWS] = {0, 0, 0, 0};
        for (u32 t = 0; t < rows; t++) {
            float k[PER], q[PER], u[ROWS], out[ROWS];
            const float2 gate = gates[t];
            load_row<PER>(k, (const u8 *)vectors[t], lane, false);
            load_row<PER>(q, (const u8 *)vectors[TILE + t], lane, false);
            if (DELTA) {
                float dots[ROWS];
#pragma unroll
                for (u32 r = 0; r < ROWS; r++) {
                    dots[r] = 0;
#pragma unroll
                    for (u32 i = 0; i < PER; i++) dots[r] = fmaf(s[r][i], k[i], dots[r]);
                }
                const float sum = sum_eight(dots, parts, lane);
                if (lane >= 16 && lane % 4 == 0 && t > 0) outs[t - 1][column] = sum;
                const float own = __fmul_rn(gate.y, fmaf(-gate.x, sum, values[t][column]));
#pragma unroll
                for (u32 r = 0; r < ROWS; r++) u[r] = __shfl_sync(0xffffffff, own, 4 * r);
            } else {
#pragma unroll
                for (u32 r = 0; r < ROWS; r++) u[r] = __fmul_rn(gate.y, values[t][warp * ROWS + r]);
            }
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) {
                out[r] = 0;
#pragma unroll
                for (u32 i = 0; i < PER; i++) {
                    s[r][i] = fmaf(k[i], u[r], __fmul_rn(gate.x, s[r][i]));
                    out[r] = fmaf(s[r][i], q[i], out[r]);
                    if (narrow) s[r][i] = __uint_as_float(bf16_bits(s[r][i]) << 16);
                }
            }
            if (!DELTA && t % 2 == 1) {
                const float sum = sum_eight(parts, out, lane);
                if (lane % 4 == 0) outs[t - 1 + lane / 16][column] = sum;
            }
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) parts[r] = out[r];
            for (; next < exports && all.export_rows[next] == base + t; next++) leave(all.export_slots[next]);
        }
        if (DELTA || rows % 2 == 1) {
            const float sum = sum_eight(parts, parts, lane);
            if (lane < 16 && lane % 4 == 0) outs[rows - 1][column] = sum;
        }
        __syncthreads();
#pragma unroll
        for (u32 j = 0; j < SCALARS; j++) {
            const u32 row = place_row + 32 * WARPS / BLOCK_ROWS * j, at = block_top + place_column;
            if (row >= rows || at >= call.outer) continue;
            float out = outs[row][place_column];
            if (!DELTA) out = fmaf(skip, values[row][place_column], out);
            call.out[((u64)(first + base + row) * call.heads + head) * call.outer + at] = out;
        }
        __syncthreads();
    }
    if (write != NONE) leave(write);
}

#define SCAN(name, delta, per)                                                                                         \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, per == 8 ? 2 : 3) name(                                   \
        const float *x, const float *gains, const float *steps, const float *a, const float *bias, const float *skips, \
        float *out, u8 *arena, const u32 *first_rows, const u32 *rows, const u32 *reads, const u32 *writes,            \
        const u32 *export_starts, const u32 *export_rows, const u32 *export_slots, const u32 *places,                  \
        u64 layer_offset, u32 width, u32 key_at, u32 query_at, u32 value_at, u32 heads, u32 key_heads, u32 tiled,      \
        u32 inner, u32 outer, float l2_eps, float query_scale) {                                                       \
        after_earlier_kernels();                                                                                       \
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
    after_earlier_kernels();
    const u32 c = blockIdx.y * 128 + threadIdx.x;
    if (c < cols) kept[(u64)blockIdx.x * cols + c] = x[(u64)rows[blockIdx.x] * cols + c];
}
