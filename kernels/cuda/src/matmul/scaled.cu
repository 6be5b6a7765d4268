// Products of E2M1 weights with scaled blocks with activations of the same kind, on block-scaled tensor cores.
// format.cuh and product.cuh precede this text.
//
// | weights | block of a scale | activations | one `mma` |
// |---|---|---|---|
// | MXFP4, scales UE8M0 | 32 columns | E4M3, the same scales | 32 columns |
// | NVFP4, scales UE4M3 | 16 columns | E2M1, the same scales and a power of two for the row | 64 columns |
//
// A row of activations consists of the units' values, then their scales, then with NVFP4 16 bytes of which the first
// four are the row's factor as f32. 32 bytes have the values of one product. Their words have the order 0, 4, 1, 5, 2,
// 6, 3, 7: a lane reads the two that it multiplies at once. Rows are padded with zeroes to whole units.
//
// Each `mma` adds the products of its columns to an f32 sum. Those of a segment follow each other, from the sum +0.

constexpr bool FP4 = SCALING == UE4M3;
// Columns of a product; products of a unit; products whose scales are one word; such groups of a unit.
constexpr u32 PRODUCT_COLS = FP4 ? 64 : 32, PRODUCTS = 256 / PRODUCT_COLS;
constexpr u32 GROUP = FP4 ? 1 : 4, GROUPS = PRODUCTS / GROUP;
// Bytes of a product's values, of a unit's values and scales, and of the row's factor.
constexpr u32 PRODUCT_BYTES = 32, VALUE_BYTES = PRODUCTS * PRODUCT_BYTES, SCALE_BYTES = 4 * GROUPS;
constexpr u32 ROW_BYTES = FP4 ? 16 : 0;

// A row of activations.
struct Row {
    const u8 *values;
    u32 units;

    // Pieces of 16 bytes of a row.
    __device__ __forceinline__ static u32 pieces(u32 units) {
        return (units * (VALUE_BYTES + SCALE_BYTES) + ROW_BYTES + 15) / 16;
    }
    __device__ __forceinline__ const u8 *scales() const { return values + units * VALUE_BYTES; }
    __device__ __forceinline__ float factor() const {
        return FP4 ? *(const float *)(values + units * (VALUE_BYTES + SCALE_BYTES)) : 1.0f;
    }
};

// The eight values of a word of codes, each in the middle of a byte.
__device__ __forceinline__ void middle(u32 word, u32 &low, u32 &high) {
    constexpr u32 T0 = 0x0c080400, T1 = 0x1c181410, SIGNS = 0x20202020;
    u32 index = word & 0x77777777;
    low = add_bits(word >> 2, SIGNS, bytes_of(T0, T1, index));
    high = add_bits(word << 2, SIGNS, bytes_of(T0, T1, index >> 16));
}

// The eight values of the lower groups of two words of codes, or of the upper ones, each in a nibble.
__device__ __forceinline__ u32 nibbles(uint2 words, bool upper) {
    u32 sizes = bytes_of(words.x, words.y, upper ? 0x7632 : 0x5410);
    // The sign of value i is in byte i of its word: in the top bit for the lower group, in bit 3 for the upper one.
    u32 shift = upper ? 4 : 0, first = words.x << shift, second = words.y << shift;
    u32 even = bytes_of(first, second, 0x6420), odd = bytes_of(first, second, 0x7531);
    return choose(0x77777777, sizes, choose(0x80808080, odd, even >> 4));
}

// c += a b. a: 16 rows; b: 8 tokens. BYTE: the first byte of the scales. The lanes 2 PAIR (row g) and 2 PAIR + 1 (row
// g + 8) of every four have scales of `a`, the lane THREAD has those of `b`.
template <int BYTE, int PAIR, int THREAD>
__device__ __forceinline__ void add_scaled(float (&c)[4], const u32 (&a)[4], uint2 b, u32 of_a, u32 of_b) {
#define ADD_SCALED(shape)                                                                                              \
    asm("mma.sync.aligned." shape                                                                                      \
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {%12, %13}, %11, {%12, %14};"           \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(of_a), "r"(of_b), "n"(BYTE), "n"(PAIR),  \
          "n"(THREAD))
    if constexpr (FP4) ADD_SCALED("m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3");
    else ADD_SCALED("m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e2m1.e4m3.f32.ue8m0");
#undef ADD_SCALED
}

// A lane's weights of the products of one word of scales: of the rows g, g + 8, g + 16 and g + 24 the words q of each
// block, or with NVFP4 the words 2q and 2q + 1 of every four of two blocks; and the scales of row g + 8q.
struct Weights {
    static constexpr int WORDS = FP4 ? 4 : 1;
    u32 words[GROUP][4][WORDS], scales;

    // Loads product `j` of group `which` of a unit; zeroes if it is not one of the first `count` of the group.
    __device__ __forceinline__ void load_product(const u8 *unit, u32 which, u32 count, u32 j, u32 g, u32 q) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u8 *row = unit + MAIN_AT + 16 * (g + 8 * i);
            if constexpr (FP4) {
#pragma unroll
                for (u32 b = 0; b < 2; b++) {
                    uint2 two = j < count ? *(const uint2 *)(row + 512 * (2 * which + b) + q % 2 * 8) : uint2{0, 0};
                    words[j][i][2 * b] = two.x, words[j][i][2 * b + 1] = two.y;
                }
            } else {
                words[j][i][0] = j < count ? *(const u32 *)(row + 512 * (GROUP * which + j) + 4 * q) : 0;
            }
        }
    }
    __device__ __forceinline__ void load(const u8 *unit, u32 which, u32 count, u32 g, u32 q) {
        scales = scales_of(unit, which, g, q);
#pragma unroll
        for (u32 j = 0; j < GROUP; j++) load_product(unit, which, count, j, g, q);
    }
    __device__ __forceinline__ static u32 scales_of(const u8 *unit, u32 which, u32 g, u32 q) {
        u32 scales = *(const u32 *)(unit + RECORD * (g + 8 * q) + 4 * which);
        return FP4 ? scales & 0x7f7f7f7f : scales;
    }

    // The operands of product `j`: of the rows g and g + 8, and of the rows g + 16 and g + 24.
    __device__ __forceinline__ void operands(int j, u32 q, u32 (&a)[2][4]) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 &low = a[i / 2][i % 2], &high = a[i / 2][i % 2 + 2];
            if constexpr (FP4) {
                low = nibbles({words[j][i][0], words[j][i][1]}, q >= 2);
                high = nibbles({words[j][i][2], words[j][i][3]}, q >= 2);
            } else {
                middle(words[j][i][0], low, high);
            }
        }
    }
};

// A lane's sums of 32 rows and 8 N tokens. The last index selects row g or g + 8 (k / 2) and token 2q or 2q + 1
// (k % 2).
template <int N> using ScaledSums = float[2][N][4];

// Adds product J with the tokens from 8T on.
template <int N, int J, int T = 0, class At>
__device__ __forceinline__ void add_tokens(const u32 (&a)[2][4], u32 of_a, u32 of_b, At activations,
                                           ScaledSums<N> &sums) {
    uint2 b = activations(T, J);
    add_scaled<J, 0, T>(sums[0][T], a[0], b, of_a, of_b);
    add_scaled<J, 1, T>(sums[1][T], a[1], b, of_a, of_b);
    if constexpr (T + 1 < N) add_tokens<N, J, T + 1>(a, of_a, of_b, activations, sums);
}

// Adds the first `count` products of a group. `activations(n, j)`: the two words of token 8n + g in product j.
// `scales`: those of token 8q + g, or with N = 1 of token g. `used(J)` is called when the words of product J are free
// for others.
template <int N, int J = 0, class At, class Used>
__device__ __forceinline__ void add_group(const Weights &weights, u32 q, u32 count, u32 scales, At activations,
                                          Used used, ScaledSums<N> &sums) {
    if (J >= count) return;
    u32 a[2][4];
    weights.operands(J, q, a);
    u32 of_weights = weights.scales;
    used(J);
    add_tokens<N, J>(a, of_weights, scales, activations, sums);
    if constexpr (J + 1 < GROUP) add_group<N, J + 1>(weights, q, count, scales, activations, used, sums);
}

// Each warp computes its segment of all outputs. With one token, all eight columns of a product are that token.
template <int NT> __device__ __forceinline__ void multiply_scaled(const Product &p) {
    constexpr int N = NT / 8 ? NT / 8 : 1;
    u32 products = p.cols / PRODUCT_COLS, units = (products + PRODUCTS - 1) / PRODUCTS;
    u32 first = p.warp() * p.segment, end = min(first + p.segment, units);
    u32 g = p.lane() / 4, q = p.lane() % 4, pieces = Row::pieces(units);
    u32 scaled = p.source(NT == 1 ? 0 : NT == 8 ? g : 8 * q + g, NT) * pieces;
    const u8 *tile = p.tile(NT), *scales = Row{p.x + (u64)scaled * 16, units}.scales();
    u32 rows[N];
#pragma unroll
    for (int n = 0; n < N; n++) rows[n] = p.source(NT == 1 ? 0 : 8 * n + g, NT) * pieces;
    ScaledSums<N> sums = {};
    for (u32 u = first; u < end; u++) {
        if (u + 1 < min(end, p.cols / 256)) prefetch<UNIT_BYTES>(tile + (u64)(u + 1) * UNIT_BYTES, p.lane());
        u32 left = products - u * PRODUCTS;
        // As many weights in flight as registers hold.
        constexpr u32 TOGETHER = 2;
#pragma unroll
        for (u32 from = 0; from < GROUPS; from += TOGETHER) {
            Weights weights[TOGETHER];
#pragma unroll
            for (u32 h = 0; h < TOGETHER; h++) {
                u32 before = (from + h) * GROUP;
                weights[h].load(tile + (u64)u * UNIT_BYTES, from + h, left - min(left, before), g, q);
            }
#pragma unroll
            for (u32 h = 0; h < TOGETHER; h++) {
                u32 before = (from + h) * GROUP;
                if (before >= left) break;
                const u8 *x = p.x + u * VALUE_BYTES + before * PRODUCT_BYTES + 8 * q;
                auto at = [&](int n, int j) { return *(const uint2 *)(x + (u64)rows[n] * 16 + j * PRODUCT_BYTES); };
                u32 of_tokens = *(const u32 *)(scales + u * SCALE_BYTES + 4 * (from + h));
                add_group<N>(weights[h], q, left - before, of_tokens, at, [](int) {}, sums);
            }
        }
    }
    __shared__ Segments<NT> segments;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int t = 0; t < 2; t++) {
            u32 token = 8 * n + 2 * q + t;
            if (token >= NT) continue;
            float factor = Row{p.x + (u64)(p.source(token, NT) * pieces) * 16, units}.factor();
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int k = 0; k < 2; k++)
                    segments[p.warp()][token][16 * m + 8 * k + g] = __fmul_rn(sums[m][n][2 * k + t], factor);
        }
    add_segments<NT>(p, segments);
}

// For prompts: 64 rows (two tiles) and 128 tokens per block of threads. Activations are copied to shared memory one
// step of four products ahead, and both tiles use them. Each warp computes 32 x 32 outputs, all segments one after the
// other.
constexpr u32 STEP = 4, STEP_BYTES = STEP * PRODUCT_BYTES, STEP_WORDS = STEP / GROUP, UNIT_STEPS = PRODUCTS / STEP;
constexpr int STAGED_TOKENS = 128, STEPS = 2, TILE_THREADS = 32 * MAX_SEGMENTS / 2;

__device__ __forceinline__ void multiply_staged(const Product &p) {
    constexpr int PIECES = STAGED_TOKENS * STEP_BYTES / 16 / (32 * MAX_SEGMENTS);
    constexpr int TOKENS_APART = STAGED_TOKENS / PIECES;
    // The products of a token are at their number xor the token's last two bits: four tokens are in different banks.
    __shared__ __align__(16) u8 staged[STEPS][STAGED_TOKENS * STEP_BYTES];
    __shared__ __align__(16) u32 staged_scales[STEPS][STAGED_TOKENS * STEP_WORDS];
    u32 products = p.cols / PRODUCT_COLS, units = (products + PRODUCTS - 1) / PRODUCTS, pieces = Row::pieces(units);
    u32 steps = (products + STEP - 1) / STEP, segment = p.segment * UNIT_STEPS;
    u32 g = p.lane() / 4, q = p.lane() % 4;
    // Sources (offsets in pieces) and the first destination of the pieces of 16 bytes that a thread copies in each
    // step, and of the scales of a token, which half of the threads copy.
    u32 part = threadIdx.x % 8, copied = threadIdx.x / 8, from[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; i++) from[i] = p.source(copied + i * TOKENS_APART, STAGED_TOKENS) * pieces + part;
    u32 to = (u32)__cvta_generic_to_shared(&staged[0][copied * STEP_BYTES + (part ^ copied % 4 * 2) * 16]);
    u32 token = threadIdx.x % STAGED_TOKENS;
    const u8 *scales_from = Row{p.x + (u64)(p.source(token, STAGED_TOKENS) * pieces) * 16, units}.scales();
    u32 scales_to = (u32)__cvta_generic_to_shared(&staged_scales[0][token * STEP_WORDS]);
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
                asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(
                                 scales_to + buffer * STAGED_TOKENS * STEP_WORDS * 4),
                             "l"(scales_from + step * STEP_WORDS * 4), "n"(STEP_WORDS * 4)
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
    weights.load(tile, 0, products, g, q);
#pragma unroll 1
    for (u32 step = 0; step < steps; step++) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
        // All warps have finished the step whose buffer is overwritten here.
        bring(step + 1);
        u32 u = step / UNIT_STEPS;
        if (step % UNIT_STEPS == 0 && u + 1 < p.cols / 256)
            prefetch<UNIT_BYTES, TILE_THREADS>(tile + (u64)(u + 1) * UNIT_BYTES, threadIdx.x % TILE_THREADS);
        if (!works) continue;
        u32 buffer = step % STEPS;
        const u8 *x = &staged[buffer][(first + g) * STEP_BYTES + 8 * q];
        const u32 *scales = &staged_scales[buffer][(first + 8 * q + g) * STEP_WORDS];
#pragma unroll
        for (u32 h = 0; h < STEP_WORDS; h++) {
            u32 left = products - min(products, step * STEP + h * GROUP), then = left - min(left, GROUP);
            // The weights of the next group are loaded as soon as those of this one are used.
            u32 following = step * STEP_WORDS + h + 1, which = following % GROUPS;
            const u8 *next = tile + (u64)(following / GROUPS) * UNIT_BYTES;
            u32 next_scales = then ? Weights::scales_of(next, which, g, q) : 0;
            auto used = [&](int j) { weights.load_product(next, which, then, j, g, q); };
            auto at = [&](int n, int j) {
                return *(const uint2 *)(x + 8 * n * STEP_BYTES + ((h * GROUP + j) ^ g % 4) * PRODUCT_BYTES);
            };
            add_group<4>(weights, q, left, scales[h], at, used, sums);
            weights.scales = next_scales;
        }
        if ((step + 1) % segment == 0) end_segment();
    }
    if (!works) return;
    if (steps % segment != 0) end_segment();
    u32 own;
    Matrix matrix = p.matrix(of_all, own);
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int t = 0; t < 2; t++) {
            u32 token = first + 8 * n + 2 * q + t;
            float factor = Row{p.x + (u64)(p.source(token, STAGED_TOKENS) * pieces) * 16, units}.factor();
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int k = 0; k < 2; k++)
                    p.store(matrix, 32 * own + 16 * m + 8 * k + g, token, STAGED_TOKENS,
                            __fmul_rn(total[m][n][2 * k + t], factor));
        }
}

PRODUCT_KERNEL(scaled_1, 1, 2, multiply_scaled<1>)
PRODUCT_KERNEL(scaled_8, 8, 2, multiply_scaled<8>)
PRODUCT_KERNEL(scaled_32, 32, 2, multiply_scaled<32>)
PRODUCT_KERNEL(scaled_128, STAGED_TOKENS, 2, multiply_staged)
