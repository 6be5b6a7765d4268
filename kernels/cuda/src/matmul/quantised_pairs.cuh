// Weights of a quantised format as operands of bf16 products. format.cuh and product.cuh precede this text.

// A lane's weights of the rows `row` and `row` + 8 and the columns 4q .. 4q + 4 of both halves of block `j`, rounded to
// bf16.
struct Pairs {
    u32 words[2][4];

    __device__ __forceinline__ void load(const u8 *unit, u32 j, u32, u32 row, u32 q) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            Unit<Direct> of(unit, row + 8 * i, UNIT_BLOCKS);
            u32 codes[2];
            of.fragment(j, q, codes[0], codes[1]);
            Scales s = of.scales(j);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float w[4];
                weights(s, half, codes[half], w);
                words[half][i] = bf16_pair(w[0], w[1]), words[half][2 + i] = bf16_pair(w[2], w[3]);
            }
        }
    }
};
