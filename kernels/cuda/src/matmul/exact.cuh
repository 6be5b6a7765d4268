// Prefetches of units, products of weights as the format rounds them, with f32 activations, and embedding lookups.
// format.cuh and product.cuh precede this text.

// Prefetches unit `u` of a tile if it is before `end`, the end of the warp's segment, and whole.
__device__ __forceinline__ void prefetch_unit(const Product &p, const u8 *tile, u32 u, u32 end) {
    if (u < min(end, p.cols / 256)) prefetch<UNIT_BYTES>(tile + (u64)u * UNIT_BYTES, p.lane());
}

// Product with f32 activations [rows][cols], with weights rounded as the format defines them.
template <int NT> __device__ __forceinline__ void multiply_exactly(const Product &p) {
    u32 blocks = p.cols / 32, units = (blocks + UNIT_BLOCKS - 1) / UNIT_BLOCKS;
    u32 first = p.warp() * p.segment, end = min(first + p.segment, units);
    const u8 *tile = p.tile(NT);
    // Offsets of the tokens' rows, in pieces of 16 bytes.
    u32 rows[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) rows[t] = p.source(t, NT) * (p.cols / 4);
    float sums[NT] = {};
    prefetch_unit(p, tile, first + 1, end);
    for (u32 u = first; u < end; u++) {
        prefetch_unit(p, tile, u + 2, end);
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
                float w[4];
                weights(s, g / 4, words[g], w);
#pragma unroll
                for (int t = 0; t < NT; t++) {
                    float4 a = x[rows[t] + g];
                    sums[t] = __fmaf_rn(w[0], a.x, sums[t]);
                    sums[t] = __fmaf_rn(w[1], a.y, sums[t]);
                    sums[t] = __fmaf_rn(w[2], a.z, sums[t]);
                    sums[t] = __fmaf_rn(w[3], a.w, sums[t]);
                }
            }
        }
    }
    finish<NT>(p, sums);
}

// out[row] = [out[row] +] scale * table[index[row]], out [rows][cols]. Each index is below the number of the
// table's rows. blockIdx.x: row; one thread per unit of 256 columns.
extern "C" __global__ void NAME(embed)(const u8 *table, u32 tile_bytes, u32 cols, const u32 *index, float scale,
                                       u32 accumulate, float *out) {
    after_earlier_kernels();
    u32 u = blockIdx.y * blockDim.x + threadIdx.x, blocks = cols / 32;
    if (u * UNIT_BLOCKS >= blocks) return;
    u32 row = index[blockIdx.x];
    Unit<Direct> unit(table + (u64)(row / 32) * tile_bytes + (u64)u * UNIT_BYTES, row % 32, blocks - u * UNIT_BLOCKS);
    float *to = out + (u64)blockIdx.x * cols + u * 256;
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
