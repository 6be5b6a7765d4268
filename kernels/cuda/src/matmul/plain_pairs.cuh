// Weights of plain floats as operands of bf16 products. product.cuh precedes this text. The text before that defines
// ELEMENT: AN_F16 or A_BF16.

enum Element { AN_F16, A_BF16 };

// A piece has 8 columns of a row in 16 bytes. PIECE_BYTES: bytes of the pieces of a tile's 32 rows at the same columns.
constexpr u32 UNIT_BLOCKS = 8, BLOCK_PIECES = 4, PIECE_BYTES = 512;
constexpr int UNIT_BYTES = UNIT_BLOCKS * BLOCK_PIECES * PIECE_BYTES;

// A lane's weights of the rows `row` and `row` + 8 and the columns 4q .. 4q + 4 of both halves of block `j`.
// `cols`: columns of the matrix from this unit on.
struct Pairs {
    u32 words[2][4];

    __device__ __forceinline__ void load(const u8 *unit, u32 j, u32 cols, u32 row, u32 q) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 piece = BLOCK_PIECES * j + 2 * half + q / 2;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint2 w = {0, 0};
                if (8 * piece < cols) w = *(const uint2 *)(unit + piece * PIECE_BYTES + 16 * (row + 8 * i) + q % 2 * 8);
                if constexpr (ELEMENT == AN_F16) {
                    w.x = bf16_pair(f16_value((u16)w.x), f16_value((u16)(w.x >> 16)));
                    w.y = bf16_pair(f16_value((u16)w.y), f16_value((u16)(w.y >> 16)));
                }
                words[half][i] = w.x, words[half][2 + i] = w.y;
            }
        }
    }
};
