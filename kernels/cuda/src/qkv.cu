// Work between the projections and attention: norms of heads, rotary embedding, storing keys and values in
// the cache.
//
// The includer defines K_TYPE and V_TYPE (types of keys and values: 0 f32, 1 binary16, 2 bytes with a binary16 scale per
// 32 elements, 3 E4M3 with a binary16 scale per head, 4 four bits with a binary16 scale per 32 elements of a head that a
// Hadamard matrix has turned), LATENT (1: values are part of the keys, and there are no heads of v) and MAX_DIM (the
// widest head).
#include "math.cuh"

#define WARPS 4

// Cosine and sine of each pair of each row, times `magnitude`. out: [rows][pairs]. One thread per pair.
//
// A pair turns by `turns` / 2^64 of a full turn per position. The u64 wraps around as the angle does, so the
// angle of every position is exact.
extern "C" __global__ void rope_angles(float2 *out, const u64 *turns, const u32 *positions, float magnitude, u32 pairs,
                                       u32 rows) {
    after_earlier_kernels();
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * pairs) return;
    const u64 turn = positions[i / pairs] * turns[i % pairs];
    // The nearest quarter turn, and the remaining angle in radians, at most pi / 4 in either direction.
    const u32 quarter = (u32)(turn + (1ull << 61) >> 62);
    const i64 rest = (i64)(turn - ((u64)quarter << 62));
    const float r = __fmul_rn(__ll2float_rn(rest), 3.4061215800e-19f);
    const float z = __fmul_rn(r, r);
    float s = fmaf(-1.9515295891e-4f, z, 8.3321608736e-3f);
    s = fmaf(s, z, -1.6666654611e-1f);
    s = fmaf(__fmul_rn(s, z), r, r);
    float c = fmaf(2.443315711809948e-5f, z, -1.388731625493765e-3f);
    c = fmaf(c, z, 4.166664568298827e-2f);
    c = fmaf(__fmul_rn(c, z), z, fmaf(-0.5f, z, 1.0f));
    const float cosine = quarter & 1 ? -s : c, sine = quarter & 1 ? c : s;
    const float sign = quarter & 2 ? -magnitude : magnitude;
    out[i] = make_float2(__fmul_rn(cosine, sign), __fmul_rn(sine, sign));
}

// factors[run] = 1 / sqrt(mean of x^2 + eps) over runs of `width` elements. One warp per run.
extern "C" __global__ void run_factors(float *factors, const float *x, u32 width, float eps, u32 runs) {
    after_earlier_kernels();
    const u32 run = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (run >= runs) return;
    float sum = 0;
    for (u32 i = lane; i < width; i += 32) sum = fmaf(x[(u64)run * width + i], x[(u64)run * width + i], sum);
    sum = sum_lanes(sum, 32);
    if (lane == 0) factors[run] = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)width), eps)));
}

// Norm of the heads of q, k or v.
struct Norm {
    const float *weight;   // [weight_len], or null for ones
    const float *factors;  // if runs are not heads: [rows][row width / run], else null
    u32 run;               // elements per run, which are normalised together; 0 for no norm
    u32 weight_len;
    float eps;
};

// Rounds a value of at most 448 to E4M3, ties to even.
__device__ __forceinline__ u32 e4m3(float x) {
    const u32 bits = __float_as_uint(x), size = bits & 0x7fffffff;
    // Below the normal range, multiples of 2^-9.
    const u32 code = size < 0x3c800000 ? (u32)rintf(__fmul_rn(fabsf(x), 512.0f))
                                       : (size + 0x7ffff + (size >> 20 & 1) >> 20) - 960;
    return code | bits >> 24 & 0x80;
}

// The scale with which `largest` becomes `most`, and its inverse.
__device__ __forceinline__ u16 scale_of(float largest, float most, float &inverse) {
    const u16 scale = f16_bits(fminf(__fdiv_rn(largest, most), 65504.0f));
    const float value = f16_value(scale);
    inverse = value > 0 ? __fdiv_rn(1.0f, value) : 0.0f;
    return scale;
}

// Writes one head of one token to its stripe: [tokens][width rounded up to 8 elements], padded with zeroes.
// Scales of all tokens follow. x[i]: element 32 i + lane.
template <u32 TYPE>
__device__ __forceinline__ void store(u8 *stripe, u32 token, u32 tokens, u32 width, u32 lane,
                                      const float (&x)[MAX_DIM / 32]) {
    const u32 stride = (width + 7) / 8 * 8;
    u16 *scales = (u16 *)(stripe + (tokens * stride / (TYPE == 4 ? 2 : 1) + 15) / 16 * 16);
    float row_inverse = 0;
    if constexpr (TYPE == 3) {
        float largest = 0;
#pragma unroll
        for (u32 i = 0; i < MAX_DIM / 32; i++) largest = fmaxf(largest, fabsf(x[i]));
        for (u32 apart = 16; apart > 0; apart /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, apart));
        const u16 scale = scale_of(largest, 448.0f, row_inverse);
        if (lane == 0) scales[token] = scale;
    }
#pragma unroll
    for (u32 i = 0; i < MAX_DIM / 32; i++) {
        const u32 d = 32 * i + lane;
        if (32 * i >= stride) break;
        if constexpr (TYPE == 0) {
            if (d < stride) ((float *)stripe)[token * stride + d] = x[i];
        } else if constexpr (TYPE == 1) {
            if (d < stride) ((u16 *)stripe)[token * stride + d] = f16_bits(fminf(65504.0f, fmaxf(-65504.0f, x[i])));
        } else if constexpr (TYPE == 2) {
            float largest = fabsf(x[i]), inverse;
            for (u32 apart = 16; apart > 0; apart /= 2)
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, apart));
            const u16 scale = scale_of(largest, 127.0f, inverse);
            const float scaled = fminf(127.0f, fmaxf(-127.0f, rintf(__fmul_rn(x[i], inverse))));
            if (d < stride) ((i8 *)stripe)[token * stride + d] = (i8)(i32)scaled;
            if (lane == 0) scales[token * ((width + 31) / 32) + i] = scale;
        } else if constexpr (TYPE == 3) {
            const float scaled = fminf(448.0f, fmaxf(-448.0f, __fmul_rn(x[i], row_inverse)));
            if (d < stride) stripe[token * stride + d] = (u8)e4m3(scaled);
        } else {
            // The value that is farthest from zero becomes -8; of two, the one with the lower number.
            float farthest = x[i];
            for (u32 apart = 1; apart < 32; apart *= 2) {
                const float other = __shfl_xor_sync(0xffffffff, farthest, apart);
                const bool lower = lane & apart;  // the partner's numbers are lower
                const float a = lower ? other : farthest, b = lower ? farthest : other;
                farthest = fabsf(b) > fabsf(a) ? b : a;
            }
            const u16 scale = f16_bits(fminf(65504.0f, fmaxf(-65504.0f, __fdiv_rn(farthest, -8.0f))));
            const float value = f16_value(scale);
            const float inverse = value == 0 ? 0.0f : __fdiv_rn(1.0f, value);
            const u32 code = (u32)(i32)(fminf(7.0f, fmaxf(-8.0f, rintf(__fmul_rn(x[i], inverse)))) + 8.0f);
            const u32 next = __shfl_down_sync(0xffffffff, code, 1);
            if (d < stride && lane % 2 == 0) stripe[(token * stride + d) / 2] = (u8)(code | next << 4);
            if (lane == 0) scales[token * ((width + 31) / 32) + i] = scale;
        }
    }
}

// For each row: normalises and rotates the heads of q in place; normalises and rotates the heads of k;
// normalises the heads of v; stores k and v in the row's KV block. The inputs k and v are not modified, so v
// may be the same as k: the values are then the keys before norm and rotation. One warp per head: first the
// heads of q, then of k, then of v. Grid: heads / 4, rows. 128 threads.
extern "C" __global__ void __launch_bounds__(128)
    qkv(float *q, const float *k, const float *v,  // [rows][heads or kv_heads][width]
        const float *q_weight, const float *q_factors, const float *k_weight, const float *k_factors,
        const float *v_weight, const float *v_factors,  // see Norm
        const float2 *angles,  // [rows][pairs]; pairs 0: no rotation
        u8 *arena, const u32 *tables, const u32 *table_starts, const u32 *positions, const u32 *row_sequences,
        u64 layer_offset, u32 q_run, u32 q_len, float q_eps, u32 k_run, u32 k_len, float k_eps, u32 v_run, u32 v_len,
        float v_eps, u32 pairs, u32 interleaved, u32 heads, u32 kv_heads, u32 head_dim, u32 v_head_dim,
        u32 block_shift, u32 k_stripe, u32 v_stripe, u32 k_rotation, u32 v_rotation,
        const float *growth, u32 growth_every) {  // factors of q by position / growth_every; may be null
    after_earlier_kernels();
    __shared__ float shared[WARPS][MAX_DIM];
    // Angles of the row, which all heads share.
    __shared__ float2 turned[MAX_DIM / 2];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.x;
    u32 head = blockIdx.y * WARPS + warp;
    // 0 q, 1 k, 2 v. If k is null, neither keys nor values are written.
    u32 part = 0;
    bool works = true;
    if (head >= heads) {
        head -= heads;
        part = head < kv_heads ? 1 : 2;
        if (part == 2) head -= kv_heads;
        works = k && head < kv_heads && !(LATENT && part == 2);
    }
    const u32 of = part == 0 ? heads : kv_heads, width = part == 2 ? v_head_dim : head_dim;
    const Norm norm = part == 0   ? Norm{q_weight, q_factors, q_run, q_len, q_eps}
                      : part == 1 ? Norm{k_weight, k_factors, k_run, k_len, k_eps}
                                  : Norm{v_weight, v_factors, v_run, v_len, v_eps};
    const float *from = (part == 0 ? q : part == 1 ? k : v) + ((u64)row * of + head) * width;

    float2 own_angles[(MAX_DIM / 2 + 127) / 128];
#pragma unroll
    for (u32 i = 0; i < (MAX_DIM / 2 + 127) / 128; i++)
        if (128 * i + threadIdx.x < pairs) own_angles[i] = angles[row * pairs + 128 * i + threadIdx.x];
    float x[MAX_DIM / 32];
    float sum = 0;
#pragma unroll
    for (u32 i = 0; i < MAX_DIM / 32; i++) {
        const u32 d = 32 * i + lane;
        x[i] = 0;
        if (works && d < width) x[i] = from[d];
        sum = fmaf(x[i], x[i], sum);
    }
#pragma unroll
    for (u32 i = 0; i < (MAX_DIM / 2 + 127) / 128; i++)
        if (128 * i + threadIdx.x < pairs) turned[128 * i + threadIdx.x] = own_angles[i];
    __syncthreads();
    if (!works) return;
    if (norm.run) {
        float factor = 1;
        if (!norm.factors) {
            sum = sum_lanes(sum, 32);
            factor = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)width), norm.eps)));
        }
#pragma unroll
        for (u32 i = 0; i < MAX_DIM / 32; i++) {
            const u32 d = head * width + 32 * i + lane;
            if (32 * i + lane >= width) break;
            if (norm.factors) factor = norm.factors[row * (of * width / norm.run) + d / norm.run];
            const u32 of_run = norm.weight_len == width ? 32 * i + lane : d % norm.weight_len;
            const float weight = norm.weight ? norm.weight[of_run] : 1.0f;
            x[i] = __fmul_rn(__fmul_rn(x[i], factor), weight);
        }
    }
    if (part < 2 && pairs) {
#pragma unroll
        for (u32 i = 0; i < MAX_DIM / 32; i++) shared[warp][32 * i + lane] = x[i];
        __syncwarp();
#pragma unroll
        for (u32 i = 0; i < MAX_DIM / 32; i++) {
            const u32 d = 32 * i + lane;
            if (d >= 2 * pairs) break;
            const bool second = interleaved ? d & 1 : d >= pairs;
            const u32 partner = interleaved ? d ^ 1 : second ? d - pairs : d + pairs;
            const float2 angle = turned[interleaved ? d / 2 : second ? d - pairs : d];
            const float sine = second ? angle.y : -angle.y;
            x[i] = fmaf(x[i], angle.x, __fmul_rn(shared[warp][partner], sine));
        }
    }
    if (part == 0) {
        float *to = q + ((u64)row * heads + head) * width;
        const float factor = growth ? growth[positions[row] / growth_every] : 1.0f;
#pragma unroll
        for (u32 i = 0; i < MAX_DIM / 32; i++)
            if (32 * i + lane < width) to[32 * i + lane] = __fmul_rn(x[i], factor);
        return;
    }
    const u32 position = positions[row], tokens = 1u << block_shift;
    const u32 entry = tables[table_starts[row_sequences[row]] + (position >> block_shift)];
    u8 *stripe = arena + (u64)entry * 64 + layer_offset;
    stripe += part == 1 ? (u64)head * k_stripe : (u64)kv_heads * k_stripe + (u64)head * v_stripe;
    if (K_TYPE == 4 && part == 1) times_hadamard(x, lane, k_rotation);
    if (V_TYPE == 4 && part == 2) times_hadamard(x, lane, v_rotation);
    if (part == 1) store<K_TYPE>(stripe, position & tokens - 1, tokens, width, lane, x);
    else store<V_TYPE>(stripe, position & tokens - 1, tokens, width, lane, x);
}
