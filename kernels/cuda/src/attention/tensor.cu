// Paged attention on tensor cores, for caches of binary16. common.cuh precedes this text. The includer
// defines WIDTH (the widest head supported: 64, 128, 256).
//
// A block of threads has 16 query vectors, which are the rows of the products: query heads of one key/value
// head, of all rows that are processed together. Rows of a product are independent. So a vector's result is
// the same alone, with fifteen vectors of zeroes, and together with others. Warp w processes the keys 128 w
// .. 128 (w + 1) of a split, one chunk after the other. The warps' sums are added in ascending order.
//
// Query vectors and the weights of keys are each split into two binary16 numbers, which together have 22 bits
// of mantissa. Keys and values are used as the cache stores them. So the result differs from f32 in little
// but the order of the sums.
#define ROWS 16
// CHUNK: keys that a warp processes at the same time. OWN: keys of a split that belong to one warp.
#define CHUNK (WIDTH > 128 ? 16 : 64)
#define OWN (SPLIT / WARPS)
// Weights are scaled by 2^LIFT, so that small ones stay in the range of binary16.
#define LIFT 14.0f
// Elements of the result whose warps' sums are added at a time.
#define PART 64

// c += a b. a: 16 vectors of 16 elements; b: 8 keys (or elements) of 16.
__device__ __forceinline__ void add_product(float (&c)[4], const uint4 &a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// Rounds x (lower half of the result) and y (upper half) to binary16. `rest` has the two rounding errors as
// binary16.
__device__ __forceinline__ u32 halves(float x, float y, u32 &rest) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
    x = __fsub_rn(x, f16_value((u16)both));
    y = __fsub_rn(y, f16_value((u16)(both >> 16)));
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(rest) : "f"(y), "f"(x));
    return both;
}

// Clamps to the range of binary16; NaN stays NaN.
__device__ __forceinline__ float in_range(float x) { return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; }

// Processes a `Part` with at most 16 vectors. Lane 4g + t holds:
// - of the products: vectors g and g + 8;
// - of the keys: key g of every 8, elements 8t .. 8t + 8 of every 32;
// - of the values: keys 2t, 2t + 1, 2t + 8 and 2t + 9 of every 16, elements 8g .. 8g + 8 of every 64.
// Any order of a key's elements gives the same product, and any column may stand for any element of a value.
// This order lets a lane load 16 bytes at once.
__device__ __forceinline__ void go_through(const Call &call, const Part &part) {
    __shared__ uint4 queries[WIDTH / 16][2][32];
    __shared__ float shared_parts[WARPS][ROWS][PART];
    __shared__ float shared_sums[WARPS][ROWS][2];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 split = part.split, from = part.from, to = part.to, shift = call.block_shift;
    const Vector vectors[2] = {vector_of(call, part, g), vector_of(call, part, g + 8)};
    for (u32 step = warp; step < WIDTH / 32; step += WARPS) {
        u32 near[2][4], rest[2][4];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                const u32 d = 32 * step + 8 * t + 2 * e;
                const float *of = vectors[i].q;
                const float x = of && d < call.head_dim ? __fmul_rn(of[d], call.scale) : 0.0f;
                const float y = of && d + 1 < call.head_dim ? __fmul_rn(of[d + 1], call.scale) : 0.0f;
                near[i][e] = halves(in_range(x), in_range(y), rest[i][e]);
            }
        }
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            queries[2 * step + e][0][lane] = {near[0][2 * e], near[1][2 * e], near[0][2 * e + 1], near[1][2 * e + 1]};
            queries[2 * step + e][1][lane] = {rest[0][2 * e], rest[1][2 * e], rest[0][2 * e + 1], rest[1][2 * e + 1]};
        }
    }
    __syncthreads();

    const u8 *layer = call.arena + call.layer_offset;
    const u8 *keys = layer + (u64)part.kv_head * call.k_stripe;
    const u8 *values = layer + (u64)call.kv_heads * call.k_stripe + (u64)part.kv_head * call.v_stripe;
    const u32 k_width = (call.head_dim + 7) / 8 * 8, v_width = (call.v_head_dim + 7) / 8 * 8;
    const u32 mask = (1u << shift) - 1;
    // Address of a key's elements. For a key outside from..to this is the nearest key inside. Its weight is
    // zero.
    auto place = [&](const u8 *of, u32 key, u32 width) {
        key = min(max(key, from), to - 1);
        return of + (u64)part.table[(key >> shift) - part.first_block] * 64 + (key & mask) * width * 2;
    };
    float o[WIDTH / 8][4] = {}, highest[2] = {LOWEST, LOWEST}, weights[2] = {0, 0};
#pragma unroll 1
    for (u32 base = split * SPLIT + warp * OWN, end = base + OWN; base < end; base += CHUNK) {
        if (base >= to || base + CHUNK <= from) continue;
        const u8 *at[CHUNK / 8];
        float s[CHUNK / 8][4] = {};
#pragma unroll
        for (u32 n = 0; n < CHUNK / 8; n++) at[n] = place(keys, base + 8 * n + g, k_width);
#pragma unroll 1
        for (u32 step = 0; step < WIDTH / 32; step++) {
            // Lanes beyond the row's end load its last elements. The query's elements there are zeroes.
            const u32 d = min(32 * step + 8 * t, k_width - 8) * 2;
            uint4 k[CHUNK / 8];
#pragma unroll
            for (u32 n = 0; n < CHUNK / 8; n++) k[n] = *(const uint4 *)(at[n] + d);
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const uint4 a = queries[2 * step][i][lane], b = queries[2 * step + 1][i][lane];
#pragma unroll
                for (u32 n = 0; n < CHUNK / 8; n++) {
                    add_product(s[n], a, k[n].x, k[n].y);
                    add_product(s[n], b, k[n].z, k[n].w);
                }
            }
        }
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            float top = LOWEST;
#pragma unroll
            for (u32 n = 0; n < CHUNK / 8; n++) {
#pragma unroll
                for (u32 e = 0; e < 2; e++) {
                    // For a key behind the vector's last position the difference wraps around and is not
                    // below the window.
                    float &x = s[n][2 * i + e];
                    x = vectors[i].last - (base + 8 * n + 2 * t + e) < call.window ? x : -__int_as_float(0x7f800000);
                    top = fmaxf(top, x);
                }
            }
            top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
            top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
            top = fmaxf(highest[i], __fsub_rn(top, LIFT));
            const float factor = exp2_fast(__fsub_rn(highest[i], top));
            highest[i] = top;
            float sum = 0;
#pragma unroll
            for (u32 n = 0; n < CHUNK / 8; n++) {
#pragma unroll
                for (u32 e = 0; e < 2; e++) {
                    float &x = s[n][2 * i + e];
                    x = exp2_fast(__fsub_rn(x, top));
                    sum = __fadd_rn(sum, x);
                }
            }
            weights[i] = fmaf(weights[i], factor, sum_lanes(sum, 4));
#pragma unroll
            for (u32 j = 0; j < WIDTH / 8; j++) {
                o[j][2 * i] = __fmul_rn(o[j][2 * i], factor);
                o[j][2 * i + 1] = __fmul_rn(o[j][2 * i + 1], factor);
            }
        }
#pragma unroll
        for (u32 n = 0; n < CHUNK / 16; n++) {
            uint4 near, rest;
            near.x = halves(s[2 * n][0], s[2 * n][1], rest.x);
            near.y = halves(s[2 * n][2], s[2 * n][3], rest.y);
            near.z = halves(s[2 * n + 1][0], s[2 * n + 1][1], rest.z);
            near.w = halves(s[2 * n + 1][2], s[2 * n + 1][3], rest.w);
            const u8 *at[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) at[i] = place(values, base + 16 * n + 2 * t + i % 2 + i / 2 * 8, v_width);
#pragma unroll
            for (u32 half = 0; half < WIDTH / 64; half++) {
                const u32 d = min(64 * half + 8 * g, v_width - 8) * 2;
                uint4 v[4];
#pragma unroll
                for (u32 i = 0; i < 4; i++) v[i] = *(const uint4 *)(at[i] + d);
#pragma unroll
                for (u32 w = 0; w < 4; w++) {
                    auto word = [w](const uint4 &x) { return w == 0 ? x.x : w == 1 ? x.y : w == 2 ? x.z : x.w; };
#pragma unroll
                    for (u32 e = 0; e < 2; e++) {
                        const u32 pick = e == 0 ? 0x5410 : 0x7632;
                        const u32 b0 = __byte_perm(word(v[0]), word(v[1]), pick);
                        const u32 b1 = __byte_perm(word(v[2]), word(v[3]), pick);
                        add_product(o[8 * half + 2 * w + e], near, b0, b1);
                        add_product(o[8 * half + 2 * w + e], rest, b0, b1);
                    }
                }
            }
        }
    }

    // Writes the sums of every warp to shared memory, PART elements at a time. Then adds them in ascending
    // order of the warps.
    if (t == 0) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            shared_sums[warp][g + 8 * i][0] = highest[i];
            shared_sums[warp][g + 8 * i][1] = weights[i];
        }
    }
#pragma unroll
    for (u32 half = 0; half < WIDTH / PART; half++) {
        // All threads have read the previous PART elements.
        if (half > 0) __syncthreads();
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            float4 *to_part = (float4 *)&shared_parts[warp][g + k / 2 * 8][8 * (2 * t + k % 2)];
            to_part[0] = {o[8 * half][k], o[8 * half + 1][k], o[8 * half + 2][k], o[8 * half + 3][k]};
            to_part[1] = {o[8 * half + 4][k], o[8 * half + 5][k], o[8 * half + 6][k], o[8 * half + 7][k]};
        }
        __syncthreads();
        for (u32 v = warp; v < ROWS; v += WARPS) {
            const Goal goal = goal_of(call, part, v);
            if (!goal.wanted) continue;
            float top = shared_sums[0][v][0];
            for (u32 w = 1; w < WARPS; w++) top = fmaxf(top, shared_sums[w][v][0]);
            float factors[WARPS], sum = 0;
#pragma unroll
            for (u32 w = 0; w < WARPS; w++) {
                factors[w] = exp2_fast(__fsub_rn(shared_sums[w][v][0], top));
                sum = fmaf(shared_sums[w][v][1], factors[w], sum);
            }
            for (u32 d = PART * half + lane; d < min(PART * (half + 1), call.v_head_dim); d += 32) {
                float x = 0;
#pragma unroll
                for (u32 w = 0; w < WARPS; w++) x = fmaf(shared_parts[w][v][d - PART * half], factors[w], x);
                leave(call, goal, d, top, sum, x);
            }
            if (!goal.alone && half == 0 && lane == 0) {
                goal.sums[0] = top;
                goal.sums[1] = sum;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(128, 2) attend_16(PARAMETERS) {
    after_earlier_kernels();
    const Call call = CALL;
    attend(call, [&](const Part &part) { go_through(call, part); });
}
