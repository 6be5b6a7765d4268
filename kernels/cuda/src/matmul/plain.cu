// Products of matrices of plain floats with f32 activations, and embedding lookups in such matrices.
// product.cuh precedes this text. The text before that defines the format:
//   NAME(kernel)  the kernel's name with the format's name before it
//   ELEMENT       AN_F32, AN_F16 or A_BF16

enum Element { AN_F32, AN_F16, A_BF16 };

// PIECE_COLS: columns of a piece of 16 bytes. PIECE_BYTES: bytes of the pieces of a tile's 32 rows at the same
// columns. UNIT_PIECES: pieces of a row in a unit of 256 columns.
constexpr u32 PIECE_COLS = ELEMENT == AN_F32 ? 4 : 8, PIECE_BYTES = 512;
constexpr u32 UNIT_PIECES = 256 / PIECE_COLS;
constexpr int UNIT_BYTES = UNIT_PIECES * PIECE_BYTES;

// Element `k` of packed words, as f32.
__device__ __forceinline__ float element(const u32 *piece, int k) {
    if constexpr (ELEMENT == AN_F32) return __uint_as_float(piece[k]);
    u32 half = piece[k / 2] >> 16 * (k % 2);
    if constexpr (ELEMENT == A_BF16) return bf16_value(half);
    return f16_value(half);
}

__device__ __forceinline__ void load_piece(const u8 *tile, u32 index, u32 lane, u32 (&piece)[4]) {
    uint4 words = *(const uint4 *)(tile + (u64)index * PIECE_BYTES + 16 * lane);
    piece[0] = words.x, piece[1] = words.y, piece[2] = words.z, piece[3] = words.w;
}

// Adds a piece to `sums`. x[t] + at: the activations of its columns of token t.
template <int NT, u32 COLS>
__device__ __forceinline__ void add_piece(const u32 (&piece)[4], const float (*x)[COLS], u32 at, float (&sums)[NT]) {
#pragma unroll
    for (int k = 0; k < PIECE_COLS; k += 4) {
#pragma unroll
        for (int t = 0; t < NT; t++) {
            const float4 a = *(const float4 *)(x[t] + at + k);
            sums[t] = __fmaf_rn(element(piece, k), a.x, sums[t]);
            sums[t] = __fmaf_rn(element(piece, k + 1), a.y, sums[t]);
            sums[t] = __fmaf_rn(element(piece, k + 2), a.z, sums[t]);
            sums[t] = __fmaf_rn(element(piece, k + 3), a.w, sums[t]);
        }
    }
}

// Adds up a warp's segment of columns. x: [rows][cols] f32. A warp's activations are in shared memory, because every
// lane reads all of them.
template <int NT> __device__ __forceinline__ void multiply(const Product &p) {
    // Pieces that a lane has in flight; the next ones are prefetched.
    constexpr u32 ROUND = NT == 1 ? 16 : 8, ROUND_COLS = ROUND * PIECE_COLS;
    __shared__ __align__(16) float staged[MAX_SEGMENTS][NT][ROUND_COLS];
    float(*own)[ROUND_COLS] = staged[p.warp()];
    u32 pieces = (p.cols + PIECE_COLS - 1) / PIECE_COLS;
    u32 first = p.warp() * p.segment * UNIT_PIECES, end = min(first + p.segment * UNIT_PIECES, pieces);
    const u8 *tile = p.tile(NT);
    const float *x[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) x[t] = (const float *)p.x + (u64)p.source(t, NT) * p.cols;
    float next[NT][ROUND_COLS / 32], sums[NT] = {};
    auto bring = [&](u32 from) {
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
            for (u32 k = 0; k < ROUND_COLS / 32; k++) {
                const u32 column = from * PIECE_COLS + 32 * k + p.lane();
                next[t][k] = column < p.cols ? x[t][column] : 0.0f;
            }
    };
    if (first < end) bring(first);
#pragma unroll 1
    for (u32 i = first; i < end; i += ROUND) {
        // Other lanes may still read the activations before these.
        __syncwarp();
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
            for (u32 k = 0; k < ROUND_COLS / 32; k++) own[t][32 * k + p.lane()] = next[t][k];
        __syncwarp();
        if (i + ROUND <= end) {
            u32 piece[ROUND][4];
#pragma unroll
            for (u32 k = 0; k < ROUND; k++) load_piece(tile, i + k, p.lane(), piece[k]);
            if (i + ROUND < end) bring(i + ROUND);
            if (i + 2 * ROUND <= end)
                prefetch<ROUND * PIECE_BYTES>(tile + (u64)(i + ROUND) * PIECE_BYTES, p.lane());
#pragma unroll
            for (u32 k = 0; k < ROUND; k++) add_piece(piece[k], own, k * PIECE_COLS, sums);
        } else {
#pragma unroll 1
            for (u32 k = i; k < end; k++) {
                u32 piece[4];
                load_piece(tile, k, p.lane(), piece);
                add_piece(piece, own, (k - i) * PIECE_COLS, sums);
            }
        }
    }
    finish<NT>(p, sums);
}

PRODUCT_KERNEL(mul_1, 1, 2, multiply<1>)
PRODUCT_KERNEL(mul_4, 4, 2, multiply<4>)

// out[row] = [out[row] +] scale * table[index[row]], out [rows][cols]. Each index is below the number of the
// table's rows. blockIdx.x: row; one thread per column.
extern "C" __global__ void NAME(embed)(const u8 *table, u32 tile_bytes, u32 cols, const u32 *index, float scale,
                                       u32 accumulate, float *out) {
    after_earlier_kernels();
    u32 column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= cols) return;
    u32 row = index[blockIdx.x];
    const u8 *from = table + (u64)(row / 32) * tile_bytes + (u64)(column / PIECE_COLS) * PIECE_BYTES + row % 32 * 16;
    u32 word[1], i = column % PIECE_COLS;
    if constexpr (ELEMENT == AN_F32) word[0] = ((const u32 *)from)[i];
    else word[0] = ((const u16 *)from)[i];
    float value = __fmul_rn(scale, element(word, 0));
    float *to = out + (u64)blockIdx.x * cols + column;
    *to = accumulate ? __fadd_rn(*to, value) : value;
}
