// Products with activations and weights of bf16, on tensor cores. product.cuh and the text that defines `Pairs` precede
// this one.
//
// A row of activations consists of 512 bytes for each unit of 256 columns, padded with zeroes to whole units. Of every
// 16 columns the order is 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15: so the four columns of a word of codes
// are those of one lane.
//
// Each `mma` or `wgmma` adds 16 products to an f32 sum, and both in the same way on Hopper (arXiv 2511.10909). The
// columns of a segment follow each other, from the sum +0.

// Bytes of the activations of a block.
constexpr u32 BLOCK_BYTES = 64, UNIT_PIECES = UNIT_BLOCKS * BLOCK_BYTES / 16;

// c += a b. a: 16 rows; b: 8 tokens; each with 16 columns.
__device__ __forceinline__ void add_pairs(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Each warp computes its segment of all outputs. With one token, all eight columns of a product are that token.
template <int NT> __device__ __forceinline__ void multiply_pairs(const Product &p) {
    constexpr int N = NT / 8 ? NT / 8 : 1;
    u32 blocks = (p.cols + 31) / 32, units = (blocks + UNIT_BLOCKS - 1) / UNIT_BLOCKS;
    u32 first = p.warp() * p.segment, end = min(first + p.segment, units);
    u32 g = p.lane() / 4, q = p.lane() % 4;
    const u8 *tile = p.tile(NT);
    u32 rows[N];
#pragma unroll
    for (int n = 0; n < N; n++) rows[n] = p.source(NT == 1 ? 0 : 8 * n + g, NT) * (units * UNIT_PIECES);
    // The last index selects row g or g + 8 (k / 2) and token 2q or 2q + 1 (k % 2).
    float sums[2][N][4] = {};
    for (u32 u = first; u < end; u++) {
        if (u + 1 < min(end, p.cols / 256)) prefetch<UNIT_BYTES>(tile + (u64)(u + 1) * UNIT_BYTES, p.lane());
#pragma unroll 2
        for (int j = 0; j < UNIT_BLOCKS; j++) {
            if (u * UNIT_BLOCKS + j >= blocks) break;
            Pairs pairs[2];
#pragma unroll
            for (int m = 0; m < 2; m++) pairs[m].load(tile + (u64)u * UNIT_BYTES, j, p.cols - 256 * u, 16 * m + g, q);
            const u8 *x = p.x + (u64)(u * UNIT_BLOCKS + j) * BLOCK_BYTES + 4 * q;
#pragma unroll
            for (int n = 0; n < N; n++) {
                const u32 *words = (const u32 *)(x + (u64)rows[n] * 16);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 b0 = words[8 * half], b1 = words[8 * half + 4];
#pragma unroll
                    for (int m = 0; m < 2; m++) add_pairs(sums[m][n], pairs[m].words[half], b0, b1);
                }
            }
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

// For prompts: 128 rows (four tiles) and 128 tokens per block of threads. Activations are copied to shared memory two
// steps of 64 columns ahead. Each four warps compute 64 rows and all tokens, all segments one after the other, and
// prepare the weights of 32 columns while the tensor cores multiply those before.
constexpr int STAGED_TOKENS = 128, STEPS = 3, STEP_BLOCKS = 2, STEP_BYTES = STEP_BLOCKS * BLOCK_BYTES;
constexpr int BLOCK_TILES = 4, TILE_THREADS = 32 * MAX_SEGMENTS / BLOCK_TILES;
constexpr u32 UNIT_STEPS = UNIT_BLOCKS / STEP_BLOCKS;
// Rows of 128 bytes of which the eight pieces of 16 bytes are permuted by the row: the pattern repeats after 1024.
constexpr u32 PATTERN = 1024;

#define WARPGROUP_FENCE() asm volatile("wgmma.fence.sync.aligned;" ::: "memory")
#define WARPGROUP_COMMIT() asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory")
#define WARPGROUP_WAIT(groups) asm volatile("wgmma.wait_group.sync.aligned " #groups ";" ::: "memory")

#define FOUR(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SIXTEEN(c, i) FOUR(c, i), FOUR(c, i + 4), FOUR(c, i + 8), FOUR(c, i + 12)

// c += a b. a: 64 rows of four warps; b: 128 tokens in shared memory; each with 16 columns. c[4 n + k]: tokens 8n.
__device__ __forceinline__ void add_group(float (&c)[64], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
        : SIXTEEN(c, 0), SIXTEEN(c, 16), SIXTEEN(c, 32), SIXTEEN(c, 48)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void multiply_staged(const Product &p) {
    constexpr int PIECES = STAGED_TOKENS * STEP_BYTES / 16 / (32 * MAX_SEGMENTS), TOKENS_APART = STAGED_TOKENS / PIECES;
    __shared__ __align__(PATTERN) u8 staged[STEPS][STAGED_TOKENS * STEP_BYTES];
    u32 blocks = (p.cols + 31) / 32, units = (blocks + UNIT_BLOCKS - 1) / UNIT_BLOCKS;
    u32 steps = (blocks + STEP_BLOCKS - 1) / STEP_BLOCKS, segment = p.segment * UNIT_STEPS;
    u32 g = p.lane() / 4, q = p.lane() % 4;
    // Sources (offsets in pieces) and the first destination of the pieces that a thread copies in each step.
    u32 part = threadIdx.x % 8, copied = threadIdx.x / 8, from[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; i++)
        from[i] = p.source(copied + i * TOKENS_APART, STAGED_TOKENS) * (units * UNIT_PIECES) + part;
    u32 start = (u32)__cvta_generic_to_shared(&staged[0][0]);
    u32 to = start + copied * STEP_BYTES + (part ^ copied % 8) * 16;
    auto bring = [&](u32 step) {
        if (step < steps) {
#pragma unroll
            for (int i = 0; i < PIECES; i++)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                                 to + (step % STEPS * STAGED_TOKENS + i * TOKENS_APART) * STEP_BYTES),
                             "l"(p.x + (u64)(from[i] + step * (STEP_BYTES / 16)) * 16)
                             : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    // The second factor of 16 columns in buffer `step`: a descriptor with the stride of eight rows and the permutation.
    auto tokens = [&](u32 step, u32 sixteen) {
        u32 at = start + step % STEPS * (STAGED_TOKENS * STEP_BYTES) + sixteen * 32;
        return (u64)((at & 0x3ffff) >> 4) | (u64)(PATTERN >> 4) << 32 | (u64)1 << 62;
    };
    // The warp's tile, of which it has the rows 16 (warp % 2) + g and 8 further on. A warp behind the last tile computes
    // that one again and stores nothing.
    u32 of_all = BLOCK_TILES * blockIdx.y + p.warp() / 2, row = 16 * (p.warp() % 2) + g;
    bool works = of_all < p.tiles();
    const u8 *tile = p.tile(works ? of_all : p.tiles() - 1, 0, STAGED_TOKENS);
    auto load = [&](Pairs &pairs, u32 block) {
        u32 u = block / UNIT_BLOCKS;
        pairs.load(tile + (u64)u * UNIT_BYTES, block % UNIT_BLOCKS, p.cols - 256 * u, row, q);
    };
    float sums[64] = {}, total[64] = {};
    auto end_segment = [&] {
#pragma unroll
        for (int i = 0; i < 64; i++) total[i] = __fadd_rn(total[i], sums[i]), sums[i] = 0;
    };
    bring(0);
    bring(1);
    Pairs even, odd;
#pragma unroll 1
    for (u32 step = 0; step < steps; step++) {
        if (step % UNIT_STEPS == 0 && step / UNIT_STEPS + 1 < p.cols / 256)
            prefetch<UNIT_BYTES, TILE_THREADS>(tile + (u64)(step / UNIT_STEPS + 1) * UNIT_BYTES,
                                               threadIdx.x % TILE_THREADS);
        load(even, step * STEP_BLOCKS);
        // The buffer that is overwritten below has been multiplied by all warps.
        WARPGROUP_WAIT(0);
        if (step > 0 && step % segment == 0) end_segment();
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        bring(step + 2);
        WARPGROUP_FENCE();
        add_group(sums, even.words[0], tokens(step, 0));
        add_group(sums, even.words[1], tokens(step, 1));
        WARPGROUP_COMMIT();
        if (step * STEP_BLOCKS + 1 == blocks) break;
        load(odd, step * STEP_BLOCKS + 1);
        WARPGROUP_FENCE();
        add_group(sums, odd.words[0], tokens(step, 2));
        add_group(sums, odd.words[1], tokens(step, 3));
        WARPGROUP_COMMIT();
        WARPGROUP_WAIT(1);
    }
    WARPGROUP_WAIT(0);
    if (!works) return;
    end_segment();
    u32 own;
    Matrix matrix = p.matrix(of_all, own);
#pragma unroll
    for (int n = 0; n < STAGED_TOKENS / 8; n++)
#pragma unroll
        for (int k = 0; k < 4; k++)
            p.store(matrix, 32 * own + row + 8 * (k / 2), 8 * n + 2 * q + k % 2, STAGED_TOKENS, total[4 * n + k]);
}

PRODUCT_KERNEL(bf16_1, 1, 2, multiply_pairs<1>)
PRODUCT_KERNEL(bf16_8, 8, 2, multiply_pairs<8>)
PRODUCT_KERNEL(bf16_32, 32, 2, multiply_pairs<32>)
PRODUCT_KERNEL(bf16_128, STAGED_TOKENS, 1, multiply_staged)
