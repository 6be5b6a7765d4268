// Code that all products share: the division of work among warps, and the sum of their partial results.
//
// A block of threads computes 32 outputs (one tile of the matrix's rows) for each of NT tokens. Its warps
// split the columns: warp w processes the units w * segment .. (w + 1) * segment, a *segment*. Lane r of each
// warp processes row r. A lane adds in ascending order of columns. At the end the segments' sums are added in
// ascending order. Segments depend on the number of the matrix's columns alone. So the other tokens of a call
// change no bit of a token's output. (In the kernel for prompts a block has two tiles, and a warp processes
// all segments one after the other. The order of each output is the same.)
//
// blockIdx.x: tokens NT * x .. NT * (x + 1); or a group of tokens, of which blockIdx.z selects NT * z .. NT * (z + 1),
// or as many groups as have NT tokens. blockIdx.y: the tile, counted over up to three matrices. blockDim.x: 32 for each
// segment.

constexpr int MAX_SEGMENTS = 8;
// Maximum number of tokens of a group.
constexpr u32 GROUP_TOKENS = 32;

// A matrix and the destination of its product: out = [out +] (scale * product + bias[row]), out [tokens][ld].
struct Matrix {
    // Address of the matrix, or of the first expert's matrix.
    const u8 *weights;
    u32 rows;
    float scale;
    const float *bias;
    u32 accumulate;
    float *out;
    u32 ld;

    __device__ __forceinline__ u32 tiles() const { return (rows + 31) / 32; }
};

struct Product {
    // Up to three matrices; an unused one has 0 rows. Several matrices have the same number of columns and experts.
    Matrix first, second, third;
    u32 tile_bytes;
    // [tokens]: the expert of each token, only if NT = 1. Null: all tokens use the first expert, or `groups`
    // is set.
    const u32 *experts;
    // Groups of tokens of one expert, only if NT > 1: {i, expert << 8 | count} is the group of list[i .. i + count]. A
    // count may be 0. Null: tokens are not listed.
    const uint2 *groups;
    const u32 *list;
    // Rows of activations in the kernel's type. Token i uses row i / share.
    const u8 *x;
    u32 share, tokens;
    u32 cols;
    // Units of a segment, which one warp processes.
    u32 segment;

    // Matrix of tile number `of_all` of all matrices. `tile` is set to the tile's index in that matrix.
    // Callers compute it again instead of keeping it in registers.
    __device__ __forceinline__ Matrix matrix(u32 of_all, u32 &tile) const {
        tile = of_all;
        Matrix m = first;
        if (tile >= first.tiles()) {
            tile -= first.tiles(), m = second;
            if (tile >= second.tiles()) tile -= second.tiles(), m = third;
        }
        // The compiler cannot infer that a pointer selected from several ones points to global memory.
        __builtin_assume(__isGlobal(m.weights));
        __builtin_assume(!m.bias || __isGlobal(m.bias));
        __builtin_assume(__isGlobal(m.out));
        return m;
    }

    __device__ __forceinline__ u32 lane() const { return threadIdx.x % 32; }
    __device__ __forceinline__ u32 warp() const { return threadIdx.x / 32; }

    __device__ __forceinline__ bool grouped(int nt) const { return nt > 1 && groups; }

    __device__ __forceinline__ u32 in_group(u32 t, int nt) const { return nt > GROUP_TOKENS ? t % GROUP_TOKENS : t; }

    // The group of the block's token number `t`. A block of more tokens than a group has several groups.
    __device__ __forceinline__ uint2 group(u32 t, int nt) const {
        return nt > GROUP_TOKENS ? groups[blockIdx.x * (nt / GROUP_TOKENS) + t / GROUP_TOKENS] : groups[blockIdx.x];
    }

    // Number of the block's token number `t` in the list, or among all tokens; the number of tokens from there on in
    // its group, or of all. Callers compute it again instead of keeping it in registers.
    __device__ __forceinline__ uint2 range(u32 t, int nt) const {
        u32 i = blockIdx.x * nt + t;
        if (!grouped(nt)) return {i, tokens - min(tokens, i)};
        uint2 group = this->group(t, nt);
        u32 skipped = blockIdx.z * nt + in_group(t, nt), count = group.y & 255;
        return {group.x + skipped, count - min(count, skipped)};
    }

    // Whether the block has a token number `t`.
    __device__ __forceinline__ bool has(u32 t, int nt) const { return range(t, nt).y > 0; }

    __device__ __forceinline__ bool has_any(int nt) const {
        bool any = false;
        for (u32 t = 0; t < nt; t += GROUP_TOKENS) any |= has(t, nt);
        return any;
    }

    // Row of x of the block's token number `t`. Behind the last token of a group it is that of the last one. `store`
    // drops the outputs of such tokens.
    __device__ __forceinline__ u32 source(u32 t, int nt) const {
        u32 i = in_group(t, nt);
        uint2 range = this->range(t - i, nt);
        if (nt > GROUP_TOKENS && range.y == 0) return 0;
        u32 found = range.x + min(i, range.y - 1);
        return (grouped(nt) ? list[found] : found) / share;
    }

    __device__ __forceinline__ u32 tiles() const { return first.tiles() + second.tiles() + third.tiles(); }

    // Address of a tile's weights for the block's token number `t`.
    __device__ __forceinline__ const u8 *tile(u32 of_all, u32 t, int nt) const {
        u64 expert = nt == 1 && experts ? experts[blockIdx.x] : 0;
        if (grouped(nt)) expert = group(t, nt).y >> 8;
        u32 tile;
        Matrix m = matrix(of_all, tile);
        return m.weights + (expert * m.tiles() + tile) * tile_bytes;
    }
    __device__ __forceinline__ const u8 *tile(int nt) const { return tile(blockIdx.y, 0, nt); }

    // Stores the output of the block's token number `t` for row `row` of a matrix.
    __device__ __forceinline__ void store(const Matrix &m, u32 row, u32 t, int nt, float sum) const {
        uint2 range = this->range(t, nt);
        if (row >= m.rows || range.y == 0) return;
        float value = __fmul_rn(sum, m.scale);
        if (m.bias) value = __fadd_rn(value, m.bias[row]);
        float *out = m.out + (u64)(grouped(nt) ? list[range.x] : range.x) * m.ld + row;
        *out = m.accumulate ? __fadd_rn(*out, value) : value;
    }
};

// Brings `BYTES` bytes into the L2 cache. `thread`: index among the `THREADS` threads that share the work.
template <int BYTES, int THREADS = 32> __device__ __forceinline__ void prefetch(const u8 *from, u32 thread) {
    constexpr u32 LINE = 128;
#pragma unroll
    for (u32 at = 0; at < BYTES; at += LINE * THREADS)
        if (at + LINE * thread < BYTES) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at + LINE * thread));
}

// Prefetches the first unit of each warp's segment, before the wait for earlier kernels; of the kernel for prompts, the
// first one of each of its two tiles. If an earlier kernel selects the experts, nothing.
template <int NT, int UNIT_BYTES> __device__ __forceinline__ void prefetch_first(const Product &p) {
    if (p.experts || p.groups) return;
    constexpr bool STAGED = NT > GROUP_TOKENS;
    constexpr int THREADS = STAGED ? 32 * MAX_SEGMENTS / 2 : 32;
    const u32 tile = STAGED ? 2 * blockIdx.y + threadIdx.x / THREADS : blockIdx.y;
    const u32 unit = STAGED ? 0 : p.warp() * p.segment;
    if (unit < p.cols / 256 && tile < p.tiles())
        prefetch<UNIT_BYTES, THREADS>(p.tile(tile, 0, NT) + (u64)unit * UNIT_BYTES, threadIdx.x % THREADS);
}

// Sums of each segment for each token and row.
template <int NT> using Segments = float[MAX_SEGMENTS][NT][32];

// Waits until all warps have written `segments`. Then adds the segments' sums and stores the outputs.
template <int NT> __device__ __forceinline__ void add_segments(const Product &p, const Segments<NT> &segments) {
    __syncthreads();
    u32 lane = p.lane(), count = blockDim.x / 32;
    u32 tile;
    Matrix m = p.matrix(blockIdx.y, tile);
    u32 row = tile * 32 + lane;
    for (u32 t = p.warp(); t < NT; t += count) {
        // Starts at +0 instead of the first sum, which may be -0.
        float sum = 0.0f;
        for (u32 s = 0; s < count; s++) sum = __fadd_rn(sum, segments[s][t][lane]);
        p.store(m, row, t, NT, sum);
    }
}

// Writes each lane's sums of its row to shared memory, then adds the segments and stores the outputs.
template <int NT> __device__ __forceinline__ void finish(const Product &p, const float (&sums)[NT]) {
    __shared__ Segments<NT> segments;
#pragma unroll
    for (int t = 0; t < NT; t++) segments[p.warp()][t][p.lane()] = sums[t];
    add_segments<NT>(p, segments);
}

// The parameters of a kernel are the fields of a `Product`, one by one.
#define MATRIX_PARAMETERS(n)                                                                                           \
    const u8 *weights_##n, u32 rows_##n, float scale_##n, const float *bias_##n, u32 accumulate_##n, float *out_##n, u32 ld_##n
#define MATRIX_ARGUMENTS(n) {weights_##n, rows_##n, scale_##n, bias_##n, accumulate_##n, out_##n, ld_##n}
#define PRODUCT_PARAMETERS                                                                                             \
    MATRIX_PARAMETERS(0), MATRIX_PARAMETERS(1), MATRIX_PARAMETERS(2), u32 tile_bytes, const u32 *experts,              \
        const uint2 *groups, const u32 *list, const u8 *x, u32 share, u32 tokens, u32 cols, u32 segment
#define PRODUCT_ARGUMENTS                                                                                              \
    {MATRIX_ARGUMENTS(0), MATRIX_ARGUMENTS(1), MATRIX_ARGUMENTS(2), tile_bytes, experts, groups, list, x, share,       \
     tokens, cols, segment}
// A group may have fewer tokens than the grid covers.
#define PRODUCT_KERNEL(name, nt, per_sm, body)                                                                         \
    extern "C" __global__ void __launch_bounds__(32 * MAX_SEGMENTS, per_sm) NAME(name)(PRODUCT_PARAMETERS) {           \
        Product p = PRODUCT_ARGUMENTS;                                                                                 \
        prefetch_first<nt, UNIT_BYTES>(p);                                                                             \
        after_earlier_kernels();                                                                                       \
        if (!p.has_any(nt)) return;                                                                                    \
        body(p);                                                                                                       \
    }
