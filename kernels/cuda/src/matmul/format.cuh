// Access of a lane to its row of one quantised format. Rust's `cuda/pack.rs` describes tiles, units and
// planes.
//
// The text before this one defines the format:
//   NAME(kernel)  the kernel's name with the format's name before it
//   BITS          bits of a stored code: 2, 3, 4, 5, 6 or 8
//   LEVELS        PLAIN: level = code - OFFSET; IQ4, E2M1: a codebook of signed levels; E4M3: 8-bit floats
//   OFFSET        0 for codebooks, floats and 8-bit codes, which are stored as signed levels
//   SCALING       layout of the scales
#include "prelude.cuh"

enum Levels { PLAIN, IQ4, E2M1, E4M3 };
enum Scaling { F32, F16, F16_MIN, E8M0, SUPER, SUPER_MIN, SIXTEENTHS, SIXTEENTHS_PACKED, SIXTEENTHS_MIN, UE4M3 };

constexpr u32 UNIT_BLOCKS = 8;

// Bytes of each part of a unit per row; for the main plane, per block of a row. The _AT constants are byte
// offsets in a unit.
constexpr int RECORD = SCALING == F32 || SCALING == F16_MIN ? 32 : SCALING == E8M0 || SCALING == SUPER ? 8 : 16;
constexpr int SIDE = SCALING == SIXTEENTHS ? 2 : SCALING == SIXTEENTHS_MIN ? 4 : 0;
constexpr int MINOR = BITS == 6 ? 64 : BITS == 3 || BITS == 5 ? 32 : 0;
constexpr int MAIN = BITS == 8 ? 32 : BITS >= 4 ? 16 : 8;
constexpr int MINOR_AT = 32 * (RECORD + SIDE);
constexpr int MAIN_AT = MINOR_AT + 32 * MINOR;
constexpr int UNIT_BYTES = MAIN_AT + 32 * 8 * MAIN;

// Whether each half of a block has its own scale.
constexpr bool HALVES =
    SCALING == SIXTEENTHS || SCALING == SIXTEENTHS_PACKED || SCALING == SIXTEENTHS_MIN || SCALING == UE4M3;
// Whether the scales of halves are small integers, multiplied by one f16 scale per row of a unit.
constexpr bool FACTORS = HALVES && SCALING != UE4M3;
// Whether codes are indices of a table of levels.
constexpr bool CODEBOOK = LEVELS == IQ4 || LEVELS == E2M1;
constexpr bool HAS_MIN = SCALING == F16_MIN || SCALING == SUPER_MIN || SCALING == SIXTEENTHS_MIN;

__device__ __forceinline__ void load16(const u8 *from, u32 *to) {
    uint4 piece = *(const uint4 *)from;
    to[0] = piece.x, to[1] = piece.y, to[2] = piece.z, to[3] = piece.w;
}

// a & mask | rest
__device__ __forceinline__ u32 add_bits(u32 a, u32 mask, u32 rest) {
    u32 bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(bits) : "r"(a), "r"(mask), "r"(rest));
    return bits;
}

// mask & yes | ~mask & no
__device__ __forceinline__ u32 choose(u32 mask, u32 yes, u32 no) {
    u32 bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(bits) : "r"(mask), "r"(yes), "r"(no));
    return bits;
}

// Selects four of the eight bytes of a pair of words by the nibbles of `which`. A nibble from 8 on yields
// eight copies of the top bit of byte `nibble - 8`. (`__byte_perm` does not support such nibbles.)
__device__ __forceinline__ u32 bytes_of(u32 lower, u32 upper, u32 which) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(lower), "r"(upper), "r"(which));
    return bytes;
}

// Looks up the signed levels of a word's eight codes. `low` has those of the lower group, `high` those of the
// upper one.
__device__ __forceinline__ void look_up(u32 word, u32 &low, u32 &high) {
    // Four levels per word. The level of code 0 is in the lowest byte.
    constexpr u32 T0 = LEVELS == IQ4 ? 0xbfad9881 : 0x03020100;
    constexpr u32 T1 = LEVELS == IQ4 ? 0xf6eaddcf : 0x0c080604;
    constexpr u32 T2 = LEVELS == IQ4 ? 0x26190d01 : 0xfdfeff00;
    constexpr u32 T3 = LEVELS == IQ4 ? 0x71594535 : 0xf4f8fafc;
    // A byte with its top bit set becomes 0xff, any other byte becomes 0.
    constexpr u32 SIGNS = 0xba98;
    u32 index = word & 0x77777777;
    low = choose(bytes_of(word, 0, SIGNS), bytes_of(T2, T3, index), bytes_of(T0, T1, index));
    index >>= 16;
    high = choose(bytes_of(word << 4, 0, SIGNS), bytes_of(T2, T3, index), bytes_of(T0, T1, index));
}

// Scales of one block of one row.
struct Scales {
    // Scale of the levels of each half. Without HALVES both are equal.
    float scale[2];
    // Offset that is added to the weights of each half.
    float added[2];
    // With FACTORS: scale = d * factor, added = -dmin * min factor.
    int factor[2];
    // Min factors of the block's two halves, in the two low bytes.
    u32 min_factors;
    float d, dmin;
};

// Reads a row's words of a unit from global memory on each use. For kernels that need their registers for
// other data.
struct Direct {
    const u8 *unit;
    u32 lane;

    __device__ __forceinline__ Direct(const u8 *unit, u32 lane, u32) : unit(unit), lane(lane) {}

    // Word `i` of the row in the part at offset `from`, which consists of pieces of 16 bytes.
    __device__ __forceinline__ u32 word(int from, int i) const {
        return *(const u32 *)(unit + from + 512 * (i / 4) + 16 * lane + 4 * (i % 4));
    }
    __device__ __forceinline__ u32 record(int i) const {
        return RECORD == 8 ? *(const u32 *)(unit + 8 * lane + 4 * i) : word(0, i);
    }
    __device__ __forceinline__ u32 side() const {
        if constexpr (SIDE == 2) return *(const u16 *)(unit + 32 * RECORD + 2 * lane);
        return *(const u32 *)(unit + 32 * RECORD + 4 * lane);
    }
    __device__ __forceinline__ u32 minor(int i) const { return word(MINOR_AT, i); }
    // Words of block `j` in the main plane.
    __device__ __forceinline__ void main(int j, u32 (&words)[MAIN / 4]) const {
        const u8 *from = unit + MAIN_AT + 512 * (j * MAIN / 16) + 16 * lane;
        if constexpr (MAIN == 8) {
            uint2 half = *(const uint2 *)(from + j % 2 * 8);
            words[0] = half.x, words[1] = half.y;
        } else {
#pragma unroll
            for (int i = 0; i < MAIN / 16; i++) load16(from + 512 * i, words + 4 * i);
        }
    }
};

// Reads all words of a row in a unit at once and holds them in registers. This keeps as many bytes as
// possible in flight.
struct Held {
    u32 records[RECORD / 4], sides, minors[MINOR ? MINOR / 4 : 1], mains[2 * MAIN];

    // `blocks`: number of blocks of the row from this unit on.
    __device__ __forceinline__ Held(const u8 *unit, u32 lane, u32 blocks) {
        if constexpr (RECORD == 8) {
            uint2 piece = *(const uint2 *)(unit + 8 * lane);
            records[0] = piece.x, records[1] = piece.y;
        } else {
#pragma unroll
            for (int i = 0; i < RECORD / 16; i++) load16(unit + 512 * i + 16 * lane, records + 4 * i);
        }
        if constexpr (SIDE != 0) sides = Direct(unit, lane, blocks).side();
#pragma unroll
        for (int i = 0; i < MINOR / 16; i++) load16(unit + MINOR_AT + 512 * i + 16 * lane, minors + 4 * i);
        const u8 *plane = unit + MAIN_AT + 16 * lane;
        if (blocks >= UNIT_BLOCKS) {
#pragma unroll
            for (int i = 0; i < MAIN / 2; i++) load16(plane + 512 * i, mains + 4 * i);
        } else {
#pragma unroll
            for (int i = 0; i < MAIN / 2; i++) {
                mains[4 * i] = mains[4 * i + 1] = mains[4 * i + 2] = mains[4 * i + 3] = 0;
                if (16 * i / MAIN < blocks) load16(plane + 512 * i, mains + 4 * i);
            }
        }
    }

    __device__ __forceinline__ u32 record(int i) const { return records[i]; }
    __device__ __forceinline__ u32 side() const { return sides; }
    __device__ __forceinline__ u32 minor(int i) const { return minors[i]; }
    __device__ __forceinline__ void main(int j, u32 (&words)[MAIN / 4]) const {
#pragma unroll
        for (int i = 0; i < MAIN / 4; i++) words[i] = mains[MAIN / 4 * j + i];
    }
};

// One row of a unit: 256 weights.
template <class Words> struct Unit : Words {
    using Words::Words;

    // Codes of block `j`, or its levels if they are stored as such or come from a codebook. The bytes of
    // words[g] are the columns 4g .. 4g + 4.
    __device__ __forceinline__ void words(int j, u32 (&words)[8]) const {
        u32 main[MAIN / 4];
        this->main(j, main);
#pragma unroll
        for (int g = 0; g < 8; g++) {
            if constexpr (BITS == 8) words[g] = main[g];
            if constexpr (BITS == 2 || BITS == 3) words[g] = main[g / 4] >> 2 * (g % 4) & 0x03030303;
            if constexpr (BITS >= 4 && BITS <= 6 && LEVELS == PLAIN)
                words[g] = main[g % 4] >> 4 * (g / 4) & 0x0f0f0f0f;
            if constexpr (CODEBOOK)
                if (g < 4) look_up(main[g], words[g], words[g + 4]);
            if constexpr (BITS == 3) words[g] = add_bits(shifted(this->minor(j), 2 - g), 0x04040404, words[g]);
            if constexpr (BITS == 5) words[g] = add_bits(shifted(this->minor(j), 4 - g), 0x10101010, words[g]);
            if constexpr (BITS == 6)
                words[g] = add_bits(shifted(this->minor(2 * j + g / 4), 4 - 2 * (g % 4)), 0x30303030, words[g]);
        }
    }

    // The words `quarter` and `quarter + 4` of `words`: a lane's operands of a product of matrix fragments.
    __device__ __forceinline__ void fragment(int j, u32 quarter, u32 &low, u32 &high) const {
        if constexpr (BITS == 8) {
            low = this->word(MAIN_AT, 8 * j + quarter), high = this->word(MAIN_AT, 8 * j + 4 + quarter);
        } else if constexpr (BITS < 4) {
            u32 main[MAIN / 4];
            this->main(j, main);
            low = main[0] >> 2 * quarter & 0x03030303, high = main[1] >> 2 * quarter & 0x03030303;
        } else {
            u32 main = this->word(MAIN_AT, 4 * j + quarter);
            if constexpr (LEVELS == PLAIN) low = main & 0x0f0f0f0f, high = main >> 4 & 0x0f0f0f0f;
            else look_up(main, low, high);
        }
        if constexpr (BITS == 3 || BITS == 5) {
            u32 bits = this->minor(j) >> quarter;
            low |= (bits & 0x01010101) << (BITS - 1), high |= (bits >> 4 & 0x01010101) << (BITS - 1);
        }
        if constexpr (BITS == 6) {
            low |= (this->minor(2 * j) >> 2 * quarter & 0x03030303) << 4;
            high |= (this->minor(2 * j + 1) >> 2 * quarter & 0x03030303) << 4;
        }
    }

    __device__ __forceinline__ Scales scales(int j) const {
        Scales s = {};
        if constexpr (SCALING == F32) s.scale[0] = __uint_as_float(this->record(j));
        if constexpr (LEVELS == E4M3) s.scale[0] = __fmul_rn(s.scale[0], 256.0f);
        if constexpr (SCALING == F16) s.scale[0] = f16_value(this->record(j / 2) >> 16 * (j % 2));
        if constexpr (SCALING == F16_MIN) {
            s.scale[0] = f16_value(this->record(j));
            s.added[0] = f16_value(this->record(j) >> 16);
        }
        if constexpr (SCALING == E8M0) {
            // Half of 2^(e - 127), because levels are doubled.
            u32 e = this->record(j / 4) >> 8 * (j % 4) & 255;
            s.scale[0] = __uint_as_float(e < 2 ? 0x00200000 << e : (e - 1) << 23);
        }
        if constexpr (SCALING == SUPER) {
            int c = (this->record(1) >> 4 * j & 15) | (this->record(0) >> (16 + 2 * j) & 3) << 4;
            s.scale[0] = __fmul_rn(f16_value(this->record(0)), (float)(c - 32));
        }
        if constexpr (SCALING == SUPER_MIN) {
            // The low six bits of bytes 4..8 and 8..12 are scales and mins of blocks 0..4. Their upper two
            // bits belong to blocks 4..8. Bytes 12..16 have the low four bits of these blocks.
            u32 scales = j < 4 ? this->record(1) & 0x3f3f3f3f : (this->record(3) & 0x0f0f0f0f) | (this->record(1) >> 2 & 0x30303030);
            u32 mins = j < 4 ? this->record(2) & 0x3f3f3f3f : (this->record(3) >> 4 & 0x0f0f0f0f) | (this->record(2) >> 2 & 0x30303030);
            s.scale[0] = __fmul_rn(f16_value(this->record(0)), (float)(scales >> 8 * (j % 4) & 255));
            s.added[0] = __fmul_rn(-f16_value(this->record(0) >> 16), (float)(mins >> 8 * (j % 4) & 255));
        }
        s.scale[1] = s.scale[0], s.added[1] = s.added[0];
        if constexpr (FACTORS) {
            s.d = f16_value(SCALING == SIXTEENTHS_PACKED ? this->record(3) : this->side());
            if constexpr (SCALING == SIXTEENTHS_MIN) s.dmin = f16_value(this->side() >> 16);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = 2 * j + half;
            u32 byte = this->record(i / 4) >> 8 * (i % 4) & 255;
            if constexpr (SCALING == SIXTEENTHS) s.factor[half] = (i8)byte;
            if constexpr (SCALING == SIXTEENTHS_PACKED) {
                // Bytes 0..8 have the low four bits of factors 0..8 in their low nibbles and of factors 8..16
                // in their high ones. Bytes 8..12 have the upper two bits of all factors. Reads four factors
                // at a time.
                u32 low = this->record(i % 8 / 4) >> 4 * (i / 8) & 0x0f0f0f0f;
                u32 four = add_bits(shifted(this->record(2), 4 - 2 * (i / 4)), 0x30303030, low);
                s.factor[half] = (int)(four >> 8 * (i % 4) & 255) - 32;
            }
            if constexpr (SCALING == SIXTEENTHS_MIN) {
                s.factor[half] = byte & 15;
                s.min_factors = this->record(i / 4) >> 4 & 0x0f0f0f0f;
                s.min_factors >>= 16 * (j % 2);
                s.added[half] = __fmul_rn(-s.dmin, (float)(byte >> 4));
            }
            if constexpr (FACTORS) s.scale[half] = __fmul_rn(s.d, (float)s.factor[half]);
            // Half of the scale, because levels are doubled. Exponent and mantissa are moved to their places
            // in an f32. The value is then too small by 2^120, the difference of the biases.
            if constexpr (SCALING == UE4M3)
                s.scale[half] = __fmul_rn(__uint_as_float((byte & 0x7f) << 20), 0x1p119f);
        }
        return s;
    }

    // Shifts left by `by`, or right by `-by` if it is negative.
    __device__ __forceinline__ static u32 shifted(u32 word, int by) { return by < 0 ? word >> -by : word << by; }
};

// Four E4M3 values as binary16, each times 2^-8: exponents keep their bits, and subnormals need no case of their own.
// `even` has the codes 0 and 2 of the word, `odd` 1 and 3.
__device__ __forceinline__ void e4m3_halves(u32 word, u32 &even, u32 &odd) {
    even = add_bits(word << 7, 0x3f803f80, word << 8 & 0x80008000);
    odd = add_bits(word >> 1, 0x3f803f80, word & 0x80008000);
}

// Level of a code that is no float. The byte becomes the low bits of 2^23, which a sum of floats takes away: that is
// faster than a conversion of integers.
__device__ __forceinline__ float level(u32 word, int byte) {
    constexpr bool SIGNED = CODEBOOK || BITS == 8;
    float moved = __uint_as_float(bytes_of(SIGNED ? word ^ 0x80808080 : word, 0x4b000000, 0x7650 + byte));
    return __fsub_rn(moved, 0x1p23f + (SIGNED ? 128 : 0) + OFFSET);
}

// Weight of a code, rounded as the format's definition rounds it. The scale of E4M3 has the factor 2^8.
__device__ __forceinline__ float weight(const Scales &s, int half, u32 word, int byte) {
    u32 code = word >> 8 * byte;
    float of = LEVELS == E4M3 ? f16_value((u16)((code & 0x80) << 8 | (code & 0x7f) << 7)) : level(word, byte);
    float scaled = __fmul_rn(s.scale[half], of);
    return HAS_MIN ? __fadd_rn(scaled, s.added[half]) : scaled;
}

// Weights of a word of four codes.
__device__ __forceinline__ void weights(const Scales &s, int half, u32 word, float (&w)[4]) {
    if constexpr (LEVELS == E4M3) {
        u32 even, odd;
        e4m3_halves(word, even, odd);
        w[0] = __fmul_rn(s.scale[half], f16_value((u16)even)), w[2] = __fmul_rn(s.scale[half], f16_value((u16)(even >> 16)));
        w[1] = __fmul_rn(s.scale[half], f16_value((u16)odd)), w[3] = __fmul_rn(s.scale[half], f16_value((u16)(odd >> 16)));
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = weight(s, half, word, i);
}
