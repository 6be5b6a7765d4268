// Products of one quantised format, and its rows as an embedding. See format.cuh and product.cuh, which come before.

// 32 activations of a row. Rows have a whole number of units of them; those beyond the last column are zeroes.
struct Activations {
    // Eight words of four; scale, scale * sum, -sum, and -sum of both halves in 16 bits.
    u32 words[12];

    __device__ __forceinline__ void load(const u8 *from) {
#pragma unroll
        for (int i = 0; i < 3; i++) load16(from + 16 * i, words + 4 * i);
    }
    __device__ __forceinline__ float scale() const { return __uint_as_float(words[8]); }
    __device__ __forceinline__ float scaled_sum() const { return __uint_as_float(words[9]); }
    __device__ __forceinline__ int minus_sum() const { return (int)words[10]; }
    __device__ __forceinline__ int minus_half_sum(int half) const { return (i16)(words[11] >> 16 * half); }
};

constexpr u32 ACTIVATION_BYTES = 48;

// Adds a block to a sum: integer sums are exact, then the table in Rust's `matmul` says which operations.
__device__ __forceinline__ float fold(const Scales &s, const u32 (&words)[8], const Activations &a, float sum) {
    if constexpr (!HALVES) {
        int i = OFFSET ? OFFSET * a.minus_sum() : 0;
#pragma unroll
        for (int g = 0; g < 8; g++) i = __dp4a((int)words[g], (int)a.words[g], i);
        sum = __fmaf_rn((float)i, __fmul_rn(s.scale[0], a.scale()), sum);
        if constexpr (HAS_MIN) sum = __fmaf_rn(s.added[0], a.scaled_sum(), sum);
        return sum;
    }
    int i[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        i[half] = OFFSET ? OFFSET * a.minus_half_sum(half) : 0;
#pragma unroll
        for (int g = 4 * half; g < 4 * half + 4; g++) i[half] = __dp4a((int)words[g], (int)a.words[g], i[half]);
    }
    if constexpr (FACTORS) {
        int both = s.factor[0] * i[0] + s.factor[1] * i[1];
        sum = __fmaf_rn((float)both, __fmul_rn(s.d, a.scale()), sum);
        if constexpr (HAS_MIN) {
            // Both factors have the other sign, which changes nothing.
            int mins = __dp2a_lo((int)a.words[11], (int)s.min_factors, 0);
            sum = __fmaf_rn((float)mins, __fmul_rn(s.dmin, a.scale()), sum);
        }
    } else {
        sum = __fmaf_rn((float)i[0], __fmul_rn(s.scale[0], a.scale()), sum);
        sum = __fmaf_rn((float)i[1], __fmul_rn(s.scale[1], a.scale()), sum);
    }
    return sum;
}

// Activations of 8 bits.
template <int NT, class Words> __device__ __forceinline__ void multiply(const Product &p) {
    u32 blocks = p.cols / 32, units = (blocks + UNIT_BLOCKS - 1) / UNIT_BLOCKS;
    u32 first = p.warp() * p.segment, end = min(first + p.segment, units);
    const u8 *tile = p.tile();
    // Where the tokens' rows begin, in pieces of 16 bytes: 64 GiB of activations are more than there ever are.
    u32 rows[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) rows[t] = p.source(t, NT) * (units * UNIT_BLOCKS * (ACTIVATION_BYTES / 16));
    float sums[NT] = {};
    for (u32 u = first; u < end; u++) {
        Unit<Words> unit(tile + (u64)u * UNIT_BYTES, p.lane(), blocks - u * UNIT_BLOCKS);
        const u8 *x = p.x + u * (UNIT_BLOCKS * ACTIVATION_BYTES);
        // Held words have to be named by constants.
        constexpr int UNROLL = sizeof(Words) == sizeof(Held) ? UNIT_BLOCKS : 1;
#pragma unroll UNROLL
        for (int j = 0; j < UNIT_BLOCKS; j++) {
            // Held words of blocks that are not there are zeroes, and so are activations: they add nothing.
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

// Activations of f32, weights as the format defines them; x is [..][cols].
template <int NT> __device__ __forceinline__ void multiply_exactly(const Product &p) {
    u32 blocks = p.cols / 32, units = (blocks + UNIT_BLOCKS - 1) / UNIT_BLOCKS;
    u32 first = p.warp() * p.segment, end = min(first + p.segment, units);
    const u8 *tile = p.tile();
    // In pieces of 16 bytes.
    u32 rows[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) rows[t] = p.source(t, NT) * (p.cols / 4);
    float sums[NT] = {};
    for (u32 u = first; u < end; u++) {
        Unit<Direct> unit(tile + (u64)u * UNIT_BYTES, p.lane(), blocks - u * UNIT_BLOCKS);
#pragma unroll 1
        for (int j = 0; j < UNIT_BLOCKS; j++) {
            if (u * UNIT_BLOCKS + j >= blocks) break;
            u32 words[8];
            unit.words(j, words);
            Scales s = unit.scales(j);
            const float4 *x = (const float4 *)p.x + (u * UNIT_BLOCKS + j) * 8;
#pragma unroll
            for (int g = 0; g < 8; g++) {
#pragma unroll
                for (int t = 0; t < NT; t++) {
                    float4 a = __ldg(x + rows[t] + g);
                    sums[t] = __fmaf_rn(weight(s, g / 4, words[g], 0), a.x, sums[t]);
                    sums[t] = __fmaf_rn(weight(s, g / 4, words[g], 1), a.y, sums[t]);
                    sums[t] = __fmaf_rn(weight(s, g / 4, words[g], 2), a.z, sums[t]);
                    sums[t] = __fmaf_rn(weight(s, g / 4, words[g], 3), a.w, sums[t]);
                }
            }
        }
    }
    finish<NT>(p, sums);
}

PRODUCT_KERNEL(mul_1, 1, 2, (multiply<1, Held>))
PRODUCT_KERNEL(mul_4, 4, 1, (multiply<4, Direct>))
PRODUCT_KERNEL(mul_8, 8, 1, (multiply<8, Direct>))
PRODUCT_KERNEL(exact_2, 2, 1, multiply_exactly<2>)

// out[row] = [out[row] +] scale * table[index[row]], out [rows][cols]; each index is below the table's rows.
// blockIdx.y: row; a thread makes the 256 columns of one unit.
extern "C" __global__ void NAME(embed)(const u8 *table, u32 tile_bytes, u32 cols, const u32 *index, float scale,
                                       u32 accumulate, float *out) {
    u32 u = blockIdx.x * blockDim.x + threadIdx.x, blocks = cols / 32;
    if (u * UNIT_BLOCKS >= blocks) return;
    u32 row = index[blockIdx.y];
    Unit<Direct> unit(table + (u64)(row / 32) * tile_bytes + (u64)u * UNIT_BYTES, row % 32, blocks - u * UNIT_BLOCKS);
    float *to = out + (u64)blockIdx.y * cols + u * 256;
#pragma unroll 1
    for (int j = 0; j < UNIT_BLOCKS; j++) {
        if (u * UNIT_BLOCKS + j >= blocks) break;
        u32 words[8];
        unit.words(j, words);
        Scales s = unit.scales(j);
#pragma unroll
        for (int k = 0; k < 32; k++) {
            float value = __fmul_rn(scale, weight(s, k / 16, words[k / 4], k % 4));
            to[32 * j + k] = accumulate ? __fadd_rn(to[32 * j + k], value) : value;
        }
    }
}
