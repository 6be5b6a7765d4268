// What all products share: which part of the work a warp does, and how its sums become outputs.
//
// A block of threads makes 32 outputs (a tile of the matrix's rows) of each of NT tokens. Its warps split the columns:
// warp w takes the units w * segment .. (w + 1) * segment, a *segment*, and lane r of each warp takes row r. A lane adds
// in ascending order of columns; in the end the segments' sums are added in their order. Segments depend on the
// matrix's columns alone, so a token's output has the same bits whatever tokens come with it.
//
// blockIdx.x: the tokens NT * x .. NT * (x + 1); blockIdx.y: the tile. blockDim.x: 32 for each segment.

constexpr int MAX_SEGMENTS = 8;

struct Product {
    // Where the matrix, or the first of the experts, begins.
    const u8 *weights;
    u32 tile_bytes;
    // Expert of each group of NT tokens; null: all have the first.
    const u32 *experts;
    // [.. rows of activations], in the form that the kernel reads.
    const u8 *x;
    // Row of x of each token; null: its own.
    const u32 *sources;
    u32 tokens;
    // Rows and columns of a matrix.
    u32 rows, cols;
    // Units of a warp.
    u32 segment;
    // out = [out +] (scale * product + bias[row]), out [tokens][ld].
    float scale;
    const float *bias;
    u32 accumulate;
    float *out;
    u32 ld;

    __device__ __forceinline__ u32 lane() const { return threadIdx.x % 32; }
    __device__ __forceinline__ u32 warp() const { return threadIdx.x / 32; }

    // Where the block's tile begins.
    __device__ __forceinline__ const u8 *tile() const {
        u64 expert = experts ? experts[blockIdx.x] : 0;
        return weights + (expert * gridDim.y + blockIdx.y) * tile_bytes;
    }

    // Row of x of the block's token `t`; beyond the last token, that of the last, whose output is made again and dropped.
    __device__ __forceinline__ u32 source(u32 t, int nt) const {
        u32 token = min(blockIdx.x * nt + t, tokens - 1);
        return sources ? sources[token] : token;
    }
};

// Adds the segments' sums and stores the outputs.
template <int NT> __device__ __forceinline__ void finish(const Product &p, const float (&sums)[NT]) {
    __shared__ float segments[MAX_SEGMENTS][NT][32];
    u32 lane = p.lane(), count = blockDim.x / 32;
#pragma unroll
    for (int t = 0; t < NT; t++) segments[p.warp()][t][lane] = sums[t];
    __syncthreads();
    u32 row = blockIdx.y * 32 + lane;
    for (u32 t = p.warp(); t < NT; t += count) {
        u32 token = blockIdx.x * NT + t;
        float sum = segments[0][t][lane];
        for (u32 s = 1; s < count; s++) sum = __fadd_rn(sum, segments[s][t][lane]);
        if (row >= p.rows || token >= p.tokens) continue;
        float value = __fmul_rn(sum, p.scale);
        if (p.bias) value = __fadd_rn(value, p.bias[row]);
        float *out = p.out + (u64)token * p.ld + row;
        *out = p.accumulate ? __fadd_rn(*out, value) : value;
    }
}

// Kernels take the fields of a product one by one.
#define PRODUCT_PARAMETERS                                                                                             \
    const u8 *weights, u32 tile_bytes, const u32 *experts, const u8 *x, const u32 *sources, u32 tokens, u32 rows,      \
        u32 cols, u32 segment, float scale, const float *bias, u32 accumulate, float *out, u32 ld
#define PRODUCT_ARGUMENTS                                                                                              \
    {weights, tile_bytes, experts, x, sources, tokens, rows, cols, segment, scale, bias, accumulate, out, ld}
