// Products with matrices of one quantised format. format.cuh, product.cuh and exact.cuh precede this text.

// Scale and sums of a block of 32 activations.
struct Common {
    // The scale; scale * sum; -sum; and -sum of each half, in 16 bits each.
    u32 words[4];

    __device__ __forceinline__ float scale() const { return __uint_as_float(words[0]); }
    __device__ __forceinline__ float scaled_sum() const { return __uint_as_float(words[1]); }
    __device__ __forceinline__ int minus_half_sum(int half) const { return (i16)(words[3] >> 16 * half); }
    // Initial accumulator of a block, or with HALVES of a half. It turns a sum over codes into a sum over
    // levels.
    __device__ __forceinline__ int correction(int half) const {
        return OFFSET == 0 ? 0 : OFFSET * (HALVES ? minus_half_sum(half) : (int)words[2]);
    }
};

// A block of 32 activations: eight words of four quants, then the scale and sums. Rows are padded with zeroes
// to whole units of 8 blocks.
struct Activations {
    u32 words[8];
    Common common;

    __device__ __forceinline__ void load(const u8 *from) {
        load16(from, words);
        load16(from + 16, words + 4);
        load16(from + 32, common.words);
    }
};

constexpr u32 ACTIVATION_BYTES = 48;

// Adds a block to a sum. `first` and `second`: exact sums of level * quant over the block (`second` is 0), or
// with HALVES over its halves. The table in Rust's `matmul` defines the operations.
__device__ __forceinline__ float fold(const Scales &s, int first, int second, const Common &a, float sum) {
    if constexpr (FACTORS) {
        int both = s.factor[0] * first + s.factor[1] * second;
        sum = __fmaf_rn((float)both, __fmul_rn(s.d, a.scale()), sum);
        if constexpr (HAS_MIN) {
            // The sums are negated instead of `dmin`, which gives the same product.
            int mins = __dp2a_lo((int)a.words[3], (int)s.min_factors, 0);
            sum = __fmaf_rn((float)mins, __fmul_rn(s.dmin, a.scale()), sum);
        }
        return sum;
    }
    sum = __fmaf_rn((float)first, __fmul_rn(s.scale[0], a.scale()), sum);
    if constexpr (HALVES) sum = __fmaf_rn((float)second, __fmul_rn(s.scale[1], a.scale()), sum);
    if constexpr (HAS_MIN) sum = __fmaf_rn(s.added[0], a.scaled_sum(), sum);
    return sum;
}

// Computes the exact sums of a block, then adds the block as above.
__device__ __forceinline__ float fold(const Scales &s, const u32 (&words)[8], const Activations &a, float sum) {
    int first = a.common.correction(0), second = HALVES ? a.common.correction(1) : 0;
#pragma unroll
    for (int g = 0; g < 8; g++) {
        int &half = HALVES && g >= 4 ? second : first;
        half = __dp4a((int)words[g], (int)a.words[g], half);
    }
    return fold(s, first, second, a.common, sum);
}

// Activations of 8 bits.
template <int NT, class Words> __device__ __forceinline__ void multiply(const Product &p) {
    u32 blocks = p.cols / 32, units = (blocks + UNIT_BLOCKS - 1) / UNIT_BLOCKS;
    u32 first = p.warp() * p.segment, end = min(first + p.segment, units);
    const u8 *tile = p.tile(NT);
    // Offsets of the tokens' rows in pieces of 16 bytes. A u32 of these reaches 64 GiB, more than activations
    // ever need.
    u32 rows[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) rows[t] = p.source(t, NT) * (units * UNIT_BLOCKS * (ACTIVATION_BYTES / 16));
    float sums[NT] = {};
    prefetch_unit(p, tile, first + 1, end);
    for (u32 u = first; u < end; u++) {
        Unit<Words> unit(tile + (u64)u * UNIT_BYTES, p.lane(), blocks - u * UNIT_BLOCKS);
        prefetch_unit(p, tile, u + 2, end);
        const u8 *x = p.x + u * (UNIT_BLOCKS * ACTIVATION_BYTES);
        // Registers need constant indices, so the loop over `Held` words is unrolled.
        constexpr int UNROLL = sizeof(Words) == sizeof(Held) ? UNIT_BLOCKS : 1;
#pragma unroll UNROLL
        for (int j = 0; j < UNIT_BLOCKS; j++) {
            // Held words of blocks behind the last are zeroes, and so are their activations. These blocks add
            // nothing.
            if (UNROLL == 1 && u * UNIT_BLOCKS + j >= blocks) break;
            u32 words[8];
            unit.words(j, words);
            Scales s = unit.scales(j);
#pragma unroll
            for (int t = 0; t < NT; t++) {
                Activations a;
                a.load(x + j * ACTIVATION_BYTES + (u64)rows[t] * 16);
                sums[t] = fold(s, words, a, sums[t]);
            }
        }
    }
    finish<NT>(p, sums);
}

// c += a b. a: 16 rows; b: 8 tokens; each with 32 columns, or 16 columns in the version without upper
// registers.
__device__ __forceinline__ void add_product(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void add_product(int (&c)[4], u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
}

// A lane's part of a block of 32 rows: the groups q and q + 4 of the rows g, g + 8, g + 16 and g + 24, and
// the scales of these rows.
struct Fragments {
    u32 low[4], high[4];
    Scales scales[4];

    __device__ __forceinline__ void load(const u8 *unit, int j, u32 g, u32 q) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            Unit<Direct> row(unit, g + 8 * i, UNIT_BLOCKS);
            row.fragment(j, q, low[i], high[i]);
            scales[i] = row.scales(j);
        }
    }
};

// A lane's sums of 32 rows and NT tokens: [16 rows][8 tokens][4]. The last index selects row g or g + 8 (k /
// 2) and token 2q or 2q + 1 (k % 2).
template <int NT> using Sums = float[2][NT / 8][4];

// Adds a block of 32 columns. `activations(n, which)`: address of the 32 activations of token 8n + g (which =
// 0), 8n + 2q (1) or 8n + 2q + 1 (2).
template <int NT, class At>
__device__ __forceinline__ void add_block(const Fragments &f, u32 g, u32 q, At activations, Sums<NT> &sums) {
#pragma unroll
    for (int n = 0; n < NT / 8; n++) {
        const u32 *words = (const u32 *)activations(n, 0);
        u32 b0 = words[q], b1 = words[4 + q];
        Common a[2];
        load16(activations(n, 1) + 32, a[0].words);
        load16(activations(n, 2) + 32, a[1].words);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            int c[4], upper[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                c[k] = a[k % 2].correction(0);
                upper[k] = HALVES ? a[k % 2].correction(1) : 0;
            }
            if constexpr (HALVES) {
                add_product(c, f.low[2 * m], f.low[2 * m + 1], b0);
                add_product(upper, f.high[2 * m], f.high[2 * m + 1], b1);
            } else {
                add_product(c, f.low[2 * m], f.low[2 * m + 1], f.high[2 * m], f.high[2 * m + 1], b0, b1);
            }
#pragma unroll
            for (int k = 0; k < 4; k++)
                sums[m][n][k] = fold(f.scales[2 * m + k / 2], c[k], upper[k], a[k % 2], sums[m][n][k]);
        }
    }
}

// Product with 8-bit activations, on tensor cores. Each warp computes its segment of all outputs. Lane 4g + q
// holds:
// - of the weights: groups q and q + 4 of the rows g, g + 8, g + 16 and g + 24;
// - of the activations: the same groups of token g of every 8;
// - of the outputs: these rows, tokens 2q and 2q + 1 of every 8.
template <int NT> __device__ __forceinline__ void multiply_fragments(const Product &p) {
    u32 blocks = p.cols / 32, units = (blocks + UNIT_BLOCKS - 1) / UNIT_BLOCKS;
    u32 first = p.warp() * p.segment, end = min(first + p.segment, units);
    u32 g = p.lane() / 4, q = p.lane() % 4, pieces = units * UNIT_BLOCKS * (ACTIVATION_BYTES / 16);
    const u8 *tile = p.tile(NT);
    // Offsets of the activations of tokens g, 2q and 2q + 1 of every 8, in pieces of 16 bytes.
    u32 rows[NT / 8][3];
#pragma unroll
    for (int n = 0; n < NT / 8; n++) {
        rows[n][0] = p.source(8 * n + g, NT) * pieces;
        rows[n][1] = p.source(8 * n + 2 * q, NT) * pieces;
        rows[n][2] = p.source(8 * n + 2 * q + 1, NT) * pieces;
    }
    Sums<NT> sums = {};
    for (u32 u = first; u < end; u++) {
        prefetch_unit(p, tile, u + 1, end);
#pragma unroll 1
        for (int j = 0; j < UNIT_BLOCKS && u * UNIT_BLOCKS + j < blocks; j++) {
            Fragments f;
            f.load(tile + (u64)u * UNIT_BYTES, j, g, q);
            const u8 *x = p.x + (u * UNIT_BLOCKS + j) * ACTIVATION_BYTES;
            auto at = [&](int n, int which) { return x + (u64)rows[n][which] * 16; };
            add_block<NT>(f, g, q, at, sums);
        }
    }
    __shared__ Segments<NT> segments;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < NT / 8; n++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                segments[p.warp()][8 * n + 2 * q + k % 2][16 * m + 8 * (k / 2) + g] = sums[m][n][k];
    add_segments<NT>(p, segments);
}

// Product with 8-bit activations for prompts: 64 rows (two tiles) and 128 tokens per block of threads.
// Activations are copied to shared memory two steps ahead, and both tiles use them. Each warp computes 32 x
// 32 outputs, all segments one after the other.
// Two blocks fit a multiprocessor: weights are not held in registers ahead, and the other warps of both blocks
// compute while one waits for its weights.
constexpr int STAGED_TOKENS = 128, TILE_THREADS = 32 * MAX_SEGMENTS / 2;
// STEP_BLOCKS: blocks of 32 columns per step. STEPS: steps in shared memory, copied or in flight. STEP_BYTES:
// bytes of a token per step. STAGED_BYTES: stride of tokens in shared memory; it puts eight tokens into
// different banks.
constexpr int STEP_BLOCKS = 2, STEPS = 3, STEP_BYTES = STEP_BLOCKS * ACTIVATION_BYTES, STAGED_BYTES = STEP_BYTES + 16;
constexpr u32 UNIT_STEPS = UNIT_BLOCKS / STEP_BLOCKS;

__device__ __forceinline__ void multiply_staged(const Product &p) {
    constexpr int PIECES = STAGED_TOKENS * STEP_BYTES / 16 / (32 * MAX_SEGMENTS);
    __shared__ __align__(16) u8 staged[STEPS][STAGED_TOKENS * STAGED_BYTES];
    u32 blocks = p.cols / 32, units = (blocks + UNIT_BLOCKS - 1) / UNIT_BLOCKS;
    u32 steps = (blocks + STEP_BLOCKS - 1) / STEP_BLOCKS;
    u32 g = p.lane() / 4, q = p.lane() % 4;
    // Sources (offsets in pieces) and destinations of the pieces of 16 bytes that a thread copies in each step.
    // Rows of activations are whole units, so no piece is partial.
    u32 from[PIECES], to[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        u32 piece = threadIdx.x + i * 32 * MAX_SEGMENTS, t = piece / (STEP_BYTES / 16), part = piece % (STEP_BYTES / 16);
        from[i] = p.source(t, STAGED_TOKENS) * (units * UNIT_BLOCKS * (ACTIVATION_BYTES / 16)) + part;
        to[i] = (u32)__cvta_generic_to_shared(&staged[0][t * STAGED_BYTES + part * 16]);
    }
    auto bring = [&](u32 step) {
        if (step < steps) {
#pragma unroll
            for (int i = 0; i < PIECES; i++)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                                 to[i] + step % STEPS * (STAGED_TOKENS * STAGED_BYTES)),
                             "l"(p.x + (u64)(from[i] + step * (STEP_BYTES / 16)) * 16)
                             : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    // The warp's tile (one of two) and its first token (a multiple of 32). A warp without outputs still
    // copies pieces for the other warps.
    u32 of_all = 2 * blockIdx.y + p.warp() / 4, first = p.warp() % 4 * 32;
    bool works = of_all < p.tiles() && p.has(first, STAGED_TOKENS);
    const u8 *tile = p.tile(works ? of_all : 2 * blockIdx.y, first, STAGED_TOKENS);
    Sums<32> sums = {}, total = {};
    auto end_segment = [&] {
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int k = 0; k < 4; k++) total[m][n][k] = __fadd_rn(total[m][n][k], sums[m][n][k]), sums[m][n][k] = 0;
    };
    bring(0);
    bring(1);
#pragma unroll 1
    for (u32 step = 0; step < steps; step++) {
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        // All warps have finished the step whose buffer is overwritten here.
        bring(step + 2);
        if (step % UNIT_STEPS == 0 && step / UNIT_STEPS + 1 < p.cols / 256)
            prefetch<UNIT_BYTES, TILE_THREADS>(tile + (u64)(step / UNIT_STEPS + 1) * UNIT_BYTES,
                                               threadIdx.x % TILE_THREADS);
        if (!works) continue;
        const u8 *x = &staged[step % STEPS][first * STAGED_BYTES];
#pragma unroll
        for (u32 i = 0; i < STEP_BLOCKS; i++) {
            u32 block = step * STEP_BLOCKS + i;
            if (block >= blocks) break;
            Fragments f;
            f.load(tile + (u64)(block / UNIT_BLOCKS) * UNIT_BYTES, block % UNIT_BLOCKS, g, q);
            auto at = [&](int n, int which) {
                u32 t = 8 * n + (which == 0 ? g : 2 * q + which - 1);
                return x + t * STAGED_BYTES + i * ACTIVATION_BYTES;
            };
            add_block<32>(f, g, q, at, sums);
            if ((block + 1) % (p.segment * UNIT_BLOCKS) == 0) end_segment();
        }
    }
    if (!works) return;
    if (blocks % (p.segment * UNIT_BLOCKS) != 0) end_segment();
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

PRODUCT_KERNEL(mul_1, 1, 2, (multiply<1, Held>))
PRODUCT_KERNEL(mul_4, 4, 1, (multiply<4, Direct>))
PRODUCT_KERNEL(mul_8, 8, 2, (multiply<8, Direct>))
PRODUCT_KERNEL(mul_32, 32, 2, multiply_fragments<32>)
PRODUCT_KERNEL(mul_128, STAGED_TOKENS, 2, multiply_staged)
PRODUCT_KERNEL(exact_2, 2, 1, multiply_exactly<2>)
