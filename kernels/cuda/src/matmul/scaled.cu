// Products of E2M1 weights that have a UE8M0 scale for each 32 columns, with activations of the same scales and E4M3
// values, on block-scaled tensor cores. format.cuh and product.cuh precede this text.
//
// A row of activations consists of units of 256 bytes with the values of 256 columns each, then 8 bytes for each unit
// with the scales of its blocks of 32. Rows are padded with zeroes to whole units. The words of a block have the order
// 0, 4, 1, 5, 2, 6, 3, 7: a lane reads the two that it multiplies at once.
//
// Each `mma` adds the products of one block to an f32 sum. The blocks of a segment follow each other, from the sum +0.

constexpr u32 BLOCK_BYTES = 32, WORD_BLOCKS = 4, WORDS = UNIT_BLOCKS / WORD_BLOCKS;

// Pieces of 16 bytes in a row of `units` units.
__device__ __forceinline__ u32 row_pieces(u32 units) {
    return (units * (UNIT_BLOCKS * BLOCK_BYTES + UNIT_BLOCKS) + 15) / 16;
}

// The eight values of a word of codes, each in the middle of a byte.
__device__ __forceinline__ void middle(u32 word, u32 &low, u32 &high) {
    constexpr u32 T0 = 0x0c080400, T1 = 0x1c181410, SIGNS = 0x20202020;
    u32 index = word & 0x77777777;
    low = add_bits(word >> 2, SIGNS, bytes_of(T0, T1, index));
    high = add_bits(word << 2, SIGNS, bytes_of(T0, T1, index >> 16));
}

// c += a b. a: 16 rows; b: 8 tokens; each with 32 columns. BYTE: the byte of the scales. The lanes 2 PAIR (row g) and
// 2 PAIR + 1 (row g + 8) of every four have scales of `a`, the lane THREAD has those of `b`.
template <int BYTE, int PAIR, int THREAD>
__device__ __forceinline__ void add_scaled(float (&c)[4], const u32 (&low)[4], const u32 (&high)[4], uint2 b, u32 of_a,
                                           u32 of_b) {
    asm("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e2m1.e4m3.f32.ue8m0 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {%12, %13}, %11, {%12, %14};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(low[2 * PAIR]), "r"(low[2 * PAIR + 1]), "r"(high[2 * PAIR]), "r"(high[2 * PAIR + 1]), "r"(b.x), "r"(b.y),
          "r"(of_a), "r"(of_b), "n"(BYTE), "n"(PAIR), "n"(THREAD));
}

// A lane's weights of four blocks: the words q of the rows g, g + 8, g + 16 and g + 24, and the scales of row g + 8q.
struct Weights {
    u32 words[WORD_BLOCKS][4], scales;

    // `which`: half of the unit. `blocks`: blocks of the row from there on.
    __device__ __forceinline__ void load_block(const u8 *unit, u32 which, u32 blocks, u32 j, u32 g, u32 q) {
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            words[j][i] =
                j < blocks ? Direct(unit, g + 8 * i, 0).word(MAIN_AT, 4 * (WORD_BLOCKS * which + j) + q) : 0;
    }
    __device__ __forceinline__ void load(const u8 *unit, u32 which, u32 blocks, u32 g, u32 q) {
        scales = scales_of(unit, which, g, q);
#pragma unroll
        for (u32 j = 0; j < WORD_BLOCKS; j++) load_block(unit, which, blocks, j, g, q);
    }
    __device__ __forceinline__ static u32 scales_of(const u8 *unit, u32 which, u32 g, u32 q) {
        return *(const u32 *)(unit + 8 * (g + 8 * q) + 4 * which);
    }
};

// A lane's sums of 32 rows and 8 N tokens. The last index selects row g or g + 8 (k / 2) and token 2q or 2q + 1
// (k % 2).
template <int N> using ScaledSums = float[2][N][4];

// Adds the products of block J with the tokens from 8T on.
template <int N, int J, int T = 0, class At>
__device__ __forceinline__ void add_tokens(const u32 (&low)[4], const u32 (&high)[4], u32 of_a, u32 of_b,
                                           At activations, ScaledSums<N> &sums) {
    uint2 b = activations(T, J);
    add_scaled<J, 0, T>(sums[0][T], low, high, b, of_a, of_b);
    add_scaled<J, 1, T>(sums[1][T], low, high, b, of_a, of_b);
    if constexpr (T + 1 < N) add_tokens<N, J, T + 1>(low, high, of_a, of_b, activations, sums);
}

// Adds the first `blocks` of four blocks. `activations(n, j)`: the two words of token 8n + g in block j. `scales`:
// those of token 8q + g, or with N = 1 of token g. `used(J)` is called when the words of block J are free for others.
template <int N, int J = 0, class At, class Used>
__device__ __forceinline__ void add_blocks(const Weights &weights, u32 blocks, u32 scales, At activations, Used used,
                                           ScaledSums<N> &sums) {
    if (J >= blocks) return;
    u32 low[4], high[4];
#pragma unroll
    for (int i = 0; i < 4; i++) middle(weights.words[J][i], low[i], high[i]);
    used(J);
    add_tokens<N, J>(low, high, weights.scales, scales, activations, sums);
    if constexpr (J + 1 < WORD_BLOCKS) add_blocks<N, J + 1>(weights, blocks, scales, activations, used, sums);
}

// Each warp computes its segment of all outputs. With one token, all eight columns of a product are that token.
template <int NT> __device__ __forceinline__ void multiply_scaled(const Product &p) {
    constexpr int N = NT / 8 ? NT / 8 : 1;
    u32 blocks = p.cols / 32, units = (blocks + UNIT_BLOCKS - 1) / UNIT_BLOCKS;
    u32 first = p.warp() * p.segment, end = min(first + p.segment, units);
    u32 g = p.lane() / 4, q = p.lane() % 4, pieces = row_pieces(units);
    u32 scaled = p.source(NT == 1 ? 0 : NT == 8 ? g : 8 * q + g, NT) * pieces;
    const u8 *tile = p.tile(NT), *scales = p.x + (u64)scaled * 16 + units * 256;
    u32 rows[N];
#pragma unroll
    for (int n = 0; n < N; n++) rows[n] = p.source(NT == 1 ? 0 : 8 * n + g, NT) * pieces;
    ScaledSums<N> sums = {};
    for (u32 u = first; u < end; u++) {
        if (u + 1 < min(end, p.cols / 256)) prefetch<UNIT_BYTES>(tile + (u64)(u + 1) * UNIT_BYTES, p.lane());
        u32 left = blocks - u * UNIT_BLOCKS;
        Weights weights[WORDS];
#pragma unroll
        for (u32 h = 0; h < WORDS; h++)
            weights[h].load(tile + (u64)u * UNIT_BYTES, h, left - min(left, h * WORD_BLOCKS), g, q);
#pragma unroll
        for (u32 h = 0; h < WORDS; h++) {
            if (h * WORD_BLOCKS >= left) break;
            const u8 *x = p.x + u * 256 + h * (WORD_BLOCKS * BLOCK_BYTES) + 8 * q;
            auto at = [&](int n, int j) { return *(const uint2 *)(x + (u64)rows[n] * 16 + j * BLOCK_BYTES); };
            u32 of_tokens = *(const u32 *)(scales + u * UNIT_BLOCKS + h * WORD_BLOCKS);
            add_blocks<N>(weights[h], left - h * WORD_BLOCKS, of_tokens, at, [](int) {}, sums);
        }
    }
    __shared__ Segments<NT> segments;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u32 token = 8 * n + 2 * q + k % 2;
                if (token < NT) segments[p.warp()][token][16 * m + 8 * (k / 2) + g] = sums[m][n][k];
            }
    add_segments<NT>(p, segments);
}

// For prompts: 64 rows (two tiles) and 128 tokens per block of threads. Activations are copied to shared memory one
// step of 128 columns ahead, and both tiles use them. Each warp computes 32 x 32 outputs, all segments one after the
// other.
constexpr int STAGED_TOKENS = 128, STEPS = 2, STEP_BYTES = WORD_BLOCKS * BLOCK_BYTES;
constexpr int TILE_THREADS = 32 * MAX_SEGMENTS / 2;

__device__ __forceinline__ void multiply_staged(const Product &p) {
    constexpr int PIECES = STAGED_TOKENS * STEP_BYTES / 16 / (32 * MAX_SEGMENTS), TOKENS_APART = STAGED_TOKENS / PIECES;
    // The blocks of a token are at their number xor the token's last two bits: four tokens are in different banks.
    __shared__ __align__(16) u8 staged[STEPS][STAGED_TOKENS * STEP_BYTES];
    __shared__ u32 staged_scales[STEPS][STAGED_TOKENS];
    u32 blocks = p.cols / 32, units = (blocks + UNIT_BLOCKS - 1) / UNIT_BLOCKS, pieces = row_pieces(units);
    u32 steps = (blocks + WORD_BLOCKS - 1) / WORD_BLOCKS, segment = p.segment * WORDS;
    u32 g = p.lane() / 4, q = p.lane() % 4;
    // Sources (offsets in pieces) and the first destination of the pieces of 16 bytes that a thread copies in each
    // step, and of the scales of a token, which half of the threads copy.
    u32 part = threadIdx.x % 8, copied = threadIdx.x / 8, from[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; i++) from[i] = p.source(copied + i * TOKENS_APART, STAGED_TOKENS) * pieces + part;
    u32 to = (u32)__cvta_generic_to_shared(&staged[0][copied * STEP_BYTES + (part ^ copied % 4 * 2) * 16]);
    u32 token = threadIdx.x % STAGED_TOKENS;
    const u8 *scales_from = p.x + (u64)(p.source(token, STAGED_TOKENS) * pieces) * 16 + units * 256;
    u32 scales_to = (u32)__cvta_generic_to_shared(&staged_scales[0][token]);
    auto bring = [&](u32 step) {
        if (step < steps) {
            u32 buffer = step % STEPS;
#pragma unroll
            for (int i = 0; i < PIECES; i++)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                                 to + (buffer * STAGED_TOKENS + i * TOKENS_APART) * STEP_BYTES),
                             "l"(p.x + (u64)(from[i] + step * (STEP_BYTES / 16)) * 16)
                             : "memory");
            if (threadIdx.x < STAGED_TOKENS)
                asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(scales_to + buffer * STAGED_TOKENS * 4),
                             "l"(scales_from + step * 4)
                             : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    // The warp's tile (one of two) and its first token (a multiple of 32). A warp without outputs still copies pieces
    // for the other warps.
    u32 of_all = 2 * blockIdx.y + p.warp() / 4, first = p.warp() % 4 * 32;
    bool works = of_all < p.tiles() && p.has(first, STAGED_TOKENS);
    const u8 *tile = p.tile(works ? of_all : 2 * blockIdx.y, first, STAGED_TOKENS);
    ScaledSums<4> sums = {}, total = {};
    auto end_segment = [&] {
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int k = 0; k < 4; k++)
                    total[m][n][k] = __fadd_rn(total[m][n][k], sums[m][n][k]), sums[m][n][k] = 0;
    };
    bring(0);
    Weights weights;
    weights.load(tile, 0, blocks, g, q);
#pragma unroll 1
    for (u32 step = 0; step < steps; step++) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
        // All warps have finished the step whose buffer is overwritten here.
        bring(step + 1);
        u32 u = step / WORDS;
        if (step % WORDS == 0 && u + 1 < p.cols / 256)
            prefetch<UNIT_BYTES, TILE_THREADS>(tile + (u64)(u + 1) * UNIT_BYTES, threadIdx.x % TILE_THREADS);
        if (!works) continue;
        u32 left = blocks - step * WORD_BLOCKS, buffer = step % STEPS;
        // The weights of the next step are loaded as soon as those of this one are used.
        const u8 *next = tile + (u64)((step + 1) / WORDS) * UNIT_BYTES;
        u32 then = left - min(left, WORD_BLOCKS), which = (step + 1) % WORDS;
        u32 next_scales = then ? Weights::scales_of(next, which, g, q) : 0;
        auto used = [&](int j) { weights.load_block(next, which, then, j, g, q); };
        const u8 *x = &staged[buffer][(first + g) * STEP_BYTES + 8 * q];
        auto at = [&](int n, int j) {
            return *(const uint2 *)(x + 8 * n * STEP_BYTES + (j ^ g % 4) * BLOCK_BYTES);
        };
        add_blocks<4>(weights, left, staged_scales[buffer][first + 8 * q + g], at, used, sums);
        weights.scales = next_scales;
        if ((step + 1) % segment == 0) end_segment();
    }
    if (!works) return;
    if (steps % segment != 0) end_segment();
    u32 own;
    Matrix matrix = p.matrix(of_all, own);
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                p.store(matrix, 32 * own + 16 * m + 8 * (k / 2) + g, first + 8 * n + 2 * q + k % 2, STAGED_TOKENS,
                        total[m][n][k]);
}

PRODUCT_KERNEL(scaled_1, 1, 2, multiply_scaled<1>)
PRODUCT_KERNEL(scaled_8, 8, 2, multiply_scaled<8>)
PRODUCT_KERNEL(scaled_32, 32, 2, multiply_scaled<32>)
PRODUCT_KERNEL(scaled_128, STAGED_TOKENS, 2, multiply_staged)
