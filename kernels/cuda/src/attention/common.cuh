// Paged attention: code that its kernels share, and the kernel that joins splits.
//
// Exactness: keys are processed in tiles, and partial results cover one split each. Both begin at absolute
// positions. Splits are joined one after the other in ascending order. So the result of a row depends on its
// position and its keys alone. The batch, the chunks of the prompt and the rows that are computed together do
// not matter: a key that a row does not see has a weight of exactly zero, and to join a split without a
// visible key changes nothing.
//
// Rows that see the same blocks of a split may be processed together. Keys and values are then read once for
// all of them. Such rows are rows of one sequence, or rows of several sequences whose caches begin with the
// same blocks. The host makes these rows adjacent in the order.
#include "math.cuh"

#define SPLIT 512
#define WARPS 4
#define LOWEST -1e30f
// Window of rows that see every key.
#define ALL 0x7fffffffu
// Value in `common` for a row of the same sequence as the row before it.
#define SAME 0xffffffffu

// Arguments of one launch. Shapes are in elements unless a field says otherwise.
struct Call {
    const float *q;            // [rows][heads][head_dim]
    float *out;                // [rows][heads][v_head_dim]
    float *parts;              // [rows of the launch][heads][row_splits][v_head_dim]: partial results
    float *sums;               // [rows of the launch][heads][row_splits][2]: highest score, sum of weights
    const u8 *arena;
    const u32 *tables;         // block offsets / 64
    const u32 *table_starts;   // [sequences], into tables
    const u32 *positions;      // [rows]
    const u32 *row_sequences;  // [rows]
    const u32 *sequence_ends;  // [sequences], positions after the step
    const u32 *order;          // [rows]: rows that may be processed together are adjacent
    // [rows] in that order: number of leading splits whose blocks are those of the row before, or SAME.
    const u32 *common;
    const float *sinks;        // [heads] or null
    u64 layer_offset;          // bytes
    u32 first_row, rows;       // of the launch, as indices into `order`
    u32 tile;                  // rows that a block of threads is responsible for
    u32 join;                  // maximum number of rows that a block of threads processes together
    u32 heads, kv_heads;
    u32 together;              // query heads that a block of threads processes together
    u32 head_dim, v_head_dim;
    u32 block_shift;           // a KV block has 1 << block_shift tokens
    u32 k_stripe, v_stripe;        // bytes of one head's keys and values in a KV block
    u32 window;                // number of most recent keys that a row sees, or of those around it; ALL for every key
    u32 causal;
    u32 row_splits;            // maximum number of splits of a row
    float scale;               // of scores, times log2 e
};

// First visible position of a row whose visible positions end before `end`.
__device__ __forceinline__ u32 start_of(u32 end, u32 window) { return end > window ? end - window : 0; }

// Row at index `place` of the launch.
__device__ __forceinline__ u32 row_at(const Call &call, u32 place) { return call.order[call.first_row + place]; }

// End (exclusive) of the positions that a row would see in a sequence without an end.
__device__ __forceinline__ u32 reach_of(const Call &call, u32 row) {
#if AROUND
    return call.positions[row] + 1 + call.window / 2;
#else
    return call.causal ? call.positions[row] + 1 : call.sequence_ends[call.row_sequences[row]];
#endif
}

// End (exclusive) of a row's visible positions.
__device__ __forceinline__ u32 end_of(const Call &call, u32 row) {
#if AROUND
    return min(reach_of(call, row), call.sequence_ends[call.row_sequences[row]]);
#else
    return reach_of(call, row);
#endif
}

// Factors of two results that are joined.
struct Factors { float first, second; };

// Joins the highest score and the sum of weights of some keys with those of the keys behind them.
__device__ __forceinline__ Factors join_sums(float &highest, float &weights, float next_highest, float next_weights) {
    const float top = fmaxf(highest, next_highest);
    const Factors factors = {exp2_fast(__fsub_rn(highest, top)), exp2_fast(__fsub_rn(next_highest, top))};
    highest = top;
    weights = fmaf(next_weights, factors.second, __fmul_rn(weights, factors.first));
    return factors;
}

// Joins an element of the weighted values.
__device__ __forceinline__ float join_values(Factors factors, float x, float next) {
    return fmaf(next, factors.second, __fmul_rn(x, factors.first));
}

// Adds a head's sink to the sum of weights. Returns the factor of the weighted values.
__device__ __forceinline__ float add_sink(const float *sinks, u32 head, float highest, float &weights) {
    if (!sinks) return 1.0f;
    const float sink = __fmul_rn(sinks[head], 1.44269504f);
    const float top = fmaxf(highest, sink);
    const float factor = exp2_fast(__fsub_rn(highest, top));
    weights = fmaf(weights, factor, exp2_fast(__fsub_rn(sink, top)));
    return factor;
}

// One element of a row. The sum of a zero has no sign, whichever keys with a weight of zero were added.
__device__ __forceinline__ float finish(float factor, float weights, float x) {
    return __fadd_rn(__fdiv_rn(__fmul_rn(x, factor), weights), 0.0f);
}

#define PARAMETERS                                                                                                     \
    const float *q, float *out, float *parts, float *sums, const u8 *arena, const u32 *tables,                         \
        const u32 *table_starts, const u32 *positions, const u32 *row_sequences, const u32 *sequence_ends,             \
        const u32 *order, const u32 *common, const float *sinks, u64 layer_offset, u32 first_row, u32 rows, u32 tile,  \
        u32 join, u32 heads, u32 kv_heads, u32 together, u32 head_dim, u32 v_head_dim, u32 block_shift, u32 k_stripe,  \
        u32 v_stripe, u32 window, u32 causal, u32 row_splits, float scale
#define CALL                                                                                                           \
    Call {                                                                                                             \
        q, out, parts, sums, arena, tables, table_starts, positions, row_sequences, sequence_ends, order, common,      \
            sinks, layer_offset, first_row, rows, tile, join, heads, kv_heads, together, head_dim, v_head_dim,         \
            block_shift, k_stripe, v_stripe, window, causal, row_splits, scale                                         \
    }

// Work of a block of threads: some rows, some query heads of one key/value head, and the keys `from..to`.
// Vector v is query head `head + v % together` of the row at index `place + v / together`.
struct Part {
    u32 place, count;          // rows, as indices into those of the launch
    u32 kv_head, head, heads;
    u32 from, to;
    const u32 *table;          // of the sequence's blocks
    // Of work on one split: `table` is then in shared memory and begins with this block of the sequence.
    // Only the blocks of from..to are set.
    u32 split, first_block;
};

// A query vector of a `Part`.
struct Vector {
    const float *q;            // null if the vector does not exist
    u32 last;                  // last position that it reaches; SAME (-1) if the vector does not exist
};

__device__ __forceinline__ Vector vector_of(const Call &call, const Part &part, u32 v) {
    const u32 r = v / call.together, h = v % call.together;
    if (r >= part.count || h >= part.heads) return {nullptr, SAME};
    const u32 row = row_at(call, part.place + r);
    return {call.q + ((u64)row * call.heads + part.head + h) * call.head_dim, reach_of(call, row) - 1};
}

// Destination of a vector's result: `out` if no other split has keys for it, else its slot in `parts`.
struct Goal {
    bool wanted, alone;
    u32 head;
    float *out, *sums;
};

__device__ __forceinline__ Goal goal_of(const Call &call, const Part &part, u32 v) {
    const u32 r = v / call.together, h = v % call.together;
    Goal goal = {};
    if (r >= part.count || h >= part.heads) return goal;
    const u32 row = row_at(call, part.place + r), end = end_of(call, row);
    const u32 first = start_of(reach_of(call, row), call.window) / SPLIT, last = (end - 1) / SPLIT;
    goal.wanted = part.split >= first && part.split <= last;
    goal.alone = first == last;
    goal.head = part.head + h;
    const u64 own = ((u64)(part.place + r) * call.heads + goal.head) * call.row_splits + part.split - first;
    goal.out = goal.alone ? call.out + ((u64)row * call.heads + goal.head) * call.v_head_dim
                          : call.parts + own * call.v_head_dim;
    goal.sums = call.sums + 2 * own;
    return goal;
}

// Stores element `d` of a vector. `weights` is the vector's sum of weights.
__device__ __forceinline__ void leave(const Call &call, const Goal &goal, u32 d, float highest, float weights, float x) {
    if (goal.alone) {
        const float factor = add_sink(call.sinks, goal.head, highest, weights);
        x = finish(factor, weights, x);
    }
    goal.out[d] = x;
}

// Calls `go_through` for each group of the tile's rows that are processed together, with all keys that these
// see. Rows join the row before them if more than `needed` of their leading splits are common: with one of
// WORDS at most 31 rows, with two at most 64.
template <u32 WORDS, class GoThrough>
__device__ __forceinline__ void each_group(const Call &call, u32 tile, u32 needed, GoThrough go_through) {
    const u32 group = call.heads / call.kv_heads;
    const u32 group_parts = (group + call.together - 1) / call.together;
    const u32 within = blockIdx.y % group_parts * call.together;
    Part part = {};
    part.kv_head = blockIdx.y / group_parts;
    part.head = part.kv_head * group + within;
    part.heads = min(call.together, group - within);
    u32 place = tile * call.tile;
    const u32 last = min(place + call.tile, call.rows);
    while (place < last) {
        u64 begins = 0;
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) {
            const u32 other = place + 32 * i + threadIdx.x % 32;
            const bool joins =
                other < call.rows && other % call.join != 0 && call.common[call.first_row + other] > needed;
            begins |= (u64)__ballot_sync(0xffffffff, !joins) << 32 * i;
        }
        part.place = place;
        part.count = WORDS == 1 ? __ffs((u32)begins >> 1) : __ffsll(begins >> 1 | 1ull << 63);
        place += part.count;
        // Another block of threads processes this row together with the rows before it.
        if (!(begins & 1)) continue;

        const u32 row = row_at(call, part.place);
        part.from = start_of(reach_of(call, row), call.window);
        part.to = end_of(call, row_at(call, part.place + part.count - 1));
        part.table = call.tables + call.table_starts[call.row_sequences[row]];
        go_through(part);
        // The next `Part` uses the same shared memory.
        __syncthreads();
    }
}

// Calls `go_through` for each `Part` of one split. `go_through` must have a barrier before it reads
// `part.table`. Grid: tiles of rows; key/value heads times groups of `together` query heads; splits. 128
// threads.
template <class GoThrough> __device__ __forceinline__ void attend(const Call &call, GoThrough go_through) {
    __shared__ u32 table[SPLIT / 16];
    // Rows of several sequences join in whole common splits only, and never with a window.
    const u32 needed = call.window == ALL ? blockIdx.z : SAME - 1;
    each_group<1>(call, blockIdx.x, needed, [&](Part part) {
        const u32 *blocks = part.table;
        part.split = part.from / SPLIT + blockIdx.z;
        part.from = max(part.from, part.split * SPLIT);
        part.to = min(part.to, (part.split + 1) * SPLIT);
        if (part.from >= part.to) return;
        part.first_block = part.split * SPLIT >> call.block_shift;
        part.table = table;
        for (u32 i = threadIdx.x; i < SPLIT >> call.block_shift; i += 32 * WARPS) {
            const u32 block = part.first_block + i;
            if (block >= part.from >> call.block_shift && block <= (part.to - 1) >> call.block_shift)
                table[i] = blocks[block];
        }
        go_through(part);
    });
}

// Joins the splits of rows that have several, in ascending order. Grid: rows of the launch, heads. 128
// threads.
extern "C" __global__ void __launch_bounds__(128) combine(PARAMETERS) {
    after_earlier_kernels();
    const Call call = CALL;
    const u32 head = blockIdx.y, row = row_at(call, blockIdx.x), end = end_of(call, row);
    const u32 splits = (end - 1) / SPLIT - start_of(reach_of(call, row), window) / SPLIT + 1;
    if (splits == 1) return;
    const u64 slot = ((u64)blockIdx.x * heads + head) * row_splits;
    for (u32 d = threadIdx.x; d < v_head_dim; d += 32 * WARPS) {
        float highest = LOWEST, weights = 0, x = 0;
        for (u32 i = 0; i < splits; i += 8) {
            // Loads of several splits at once.
            float2 next[8];
            float values[8];
#pragma unroll
            for (u32 k = 0; k < 8; k++) {
                const u64 at = slot + min(i + k, splits - 1);
                next[k] = ((const float2 *)sums)[at];
                values[k] = parts[at * v_head_dim + d];
            }
#pragma unroll
            for (u32 k = 0; k < 8; k++)
                if (i + k < splits) x = join_values(join_sums(highest, weights, next[k].x, next[k].y), x, values[k]);
        }
        const float factor = add_sink(sinks, head, highest, weights);
        out[((u64)row * heads + head) * v_head_dim + d] = finish(factor, weights, x);
    }
}
