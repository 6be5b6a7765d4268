// Paged attention: what its kernels have in common, and what joins their splits.
//
// Exactness: keys are taken in tiles and partial results in splits, both at absolute positions. So what a row gives
// depends on its position and its keys alone, not on the batch, on how the prompt was cut or on what it was computed with:
// a key that a row does not see weighs exactly nothing in it.
#include "math.cuh"

#define SPLIT 512
#define WARPS 4
#define LOWEST -1e30f

// What one launch is given; shapes in elements unless said.
struct Call {
    const float *q;            // [rows][heads][head_dim]
    float *out;                // [rows][heads][v_head_dim]
    float *parts;              // [rows of the launch][heads][row_splits][v_head_dim]
    float *sums;               // [rows of the launch][heads][row_splits][2]: highest score, sum of weights
    const u8 *arena;
    const u32 *tables;         // block offsets / 64
    const u32 *table_starts;   // [sequences], into tables
    const u32 *positions;      // [rows]
    const u32 *row_sequences;  // [rows]
    const u32 *sequence_ends;  // [sequences], positions after the step
    const float *sinks;        // [heads] or null
    u64 layer_offset;          // bytes
    u32 first_row, rows;       // of the launch
    u32 tile;                  // rows of a block
    u32 heads, kv_heads;
    u32 together;              // query heads of a block
    u32 head_dim, v_head_dim;
    u32 block_shift;           // a KV block has 1 << block_shift tokens
    u32 k_stripe, v_stripe;        // bytes of one head's keys and values in a block
    u32 window;                // a row sees the last so many keys; 2^31 - 1 for all
    u32 causal;
    u32 row_splits;            // most splits of a row
    float scale;               // of scores, times log2 e
};

// First of a row's visible positions that ends before `end`.
__device__ __forceinline__ u32 start_of(u32 end, u32 window) { return end > window ? end - window : 0; }

// One element of a row: the sum of weighted values over that of the weights, the sink among them.
__device__ __forceinline__ float finish(const float *sinks, u32 head, float highest, float weights, float x) {
    if (sinks) {
        const float sink = __fmul_rn(sinks[head], 1.44269504f);
        const float top = fmaxf(highest, sink);
        const float factor = exp2_fast(__fsub_rn(highest, top));
        weights = fmaf(weights, factor, exp2_fast(__fsub_rn(sink, top)));
        x = __fmul_rn(x, factor);
    }
    return __fdiv_rn(x, weights);
}

#define PARAMETERS                                                                                                     \
    const float *q, float *out, float *parts, float *sums, const u8 *arena, const u32 *tables,                         \
        const u32 *table_starts, const u32 *positions, const u32 *row_sequences, const u32 *sequence_ends,             \
        const float *sinks, u64 layer_offset, u32 first_row, u32 rows, u32 tile, u32 heads, u32 kv_heads,              \
        u32 together, u32 head_dim, u32 v_head_dim, u32 block_shift, u32 k_stripe, u32 v_stripe, u32 window, u32 causal,   \
        u32 row_splits, float scale
#define CALL                                                                                                           \
    Call {                                                                                                             \
        q, out, parts, sums, arena, tables, table_starts, positions, row_sequences, sequence_ends, sinks,              \
            layer_offset, first_row, rows, tile, heads, kv_heads, together, head_dim, v_head_dim, block_shift, k_stripe, \
            v_stripe, window, causal, row_splits, scale                                                                  \
    }

// attend_rows: rows `row..row + count` of one sequence, for `heads` query heads from `head` on.
// Grid: splits, key/value heads times parts of their query heads, tiles of rows. 128 threads.
template <class Rows> __device__ __forceinline__ void attend(const Call &call, Rows attend_rows) {
    const u32 group = call.heads / call.kv_heads;
    const u32 group_parts = (group + call.together - 1) / call.together;
    const u32 kv_head = blockIdx.y / group_parts, within = blockIdx.y % group_parts * call.together;
    const u32 heads = min(call.together, group - within);
    u32 row = call.first_row + blockIdx.z * call.tile;
    const u32 last = min(row + call.tile, call.first_row + call.rows);
    while (row < last) {
        u32 count = 1;
        while (row + count < last && call.row_sequences[row + count] == call.row_sequences[row]) count++;
        attend_rows(row, count, kv_head, kv_head * group + within, heads);
        row += count;
    }
}

// Joins the splits of rows that have several, in their order. Grid: heads, rows of the launch. 128 threads.
extern "C" __global__ void __launch_bounds__(128) combine(PARAMETERS) {
    const u32 head = blockIdx.x, row = first_row + blockIdx.y;
    const u32 end = causal ? positions[row] + 1 : sequence_ends[row_sequences[row]];
    const u32 splits = (end - 1) / SPLIT - start_of(end, window) / SPLIT + 1;
    if (splits == 1) return;
    const u64 slot = ((u64)blockIdx.y * heads + head) * row_splits;
    float top = LOWEST;
    for (u32 i = 0; i < splits; i++) top = fmaxf(top, sums[2 * (slot + i)]);
    for (u32 d = threadIdx.x; d < v_head_dim; d += 32 * WARPS) {
        float weights = 0, x = 0;
        for (u32 i = 0; i < splits; i++) {
            const float factor = exp2_fast(__fsub_rn(sums[2 * (slot + i)], top));
            weights = fmaf(sums[2 * (slot + i) + 1], factor, weights);
            x = fmaf(parts[(slot + i) * v_head_dim + d], factor, x);
        }
        out[((u64)row * heads + head) * v_head_dim + d] = finish(sinks, head, top, weights, x);
    }
}
