// Paged attention on tensor cores, for caches of binary16. common.cuh comes before, and WIDTH (the widest head served: 64,
// 128, 256) is defined by whoever compiles this.
//
// A block of threads has 16 query vectors, the rows of the products: query heads of one key/value head, of as many rows as
// go together. Rows of a product do not meet, so a vector's result is the same alone, where the other fifteen are zeroes,
// and among others. Warp w takes the keys 128 w.. of a split, a chunk after the other, and what the warps have is added in their
// order. A query vector and the weights of its keys are each split into two numbers of binary16, which together have 22
// bits: keys and values are as the cache has them, so that little but the order of the sums differs from f32.
#define ROWS 16
// Keys that a warp looks at side by side, and keys of a split that are its own.
#define CHUNK (WIDTH > 128 ? 16 : 64)
#define OWN (SPLIT / WARPS)
// Weights are this many doublings too large, so that small ones do not leave the range of binary16.
#define LIFT 14.0f
// Elements of values that are added up at a time.
#define PART 64

// c += a b: a 16 vectors, b 8 keys or elements, of 16.
__device__ __forceinline__ void add_product(float (&c)[4], const uint4 &a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// Two numbers of binary16, and what they lack of the given ones.
__device__ __forceinline__ u32 halves(float x, float y, u32 &rest) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
    x = __fsub_rn(x, f16_value((u16)both));
    y = __fsub_rn(y, f16_value((u16)(both >> 16)));
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(rest) : "f"(y), "f"(x));
    return both;
}

// As near as binary16 comes; NaN stays NaN.
__device__ __forceinline__ float in_range(float x) { return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; }

// Some rows for some query heads of one key/value head, over one split. Lane 4g + t holds of the products the vectors g and
// g + 8; of keys those g of eight, of which it has the elements 8t.. of every 32; of values the keys 2t, 2t + 1, 2t + 8 and
// 2t + 9 of every 16, and of them the elements 8g.. of every 64. Which element a column of a product stands for is free,
// hence loads of 16 bytes.
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
    // Where a key's elements begin. Beyond the keys from..to the nearest of these is taken: it weighs nothing.
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
            // Lanes beyond a row take its last elements, which meet zeroes.
            const u32 d = min(32 * step + 8 * t, k_width - 8) * 2;
            uint4 k[CHUNK / 8];
#pragma unroll
            for (u32 n = 0; n < CHUNK / 8; n++) k[n] = __ldg((const uint4 *)(at[n] + d));
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
                    // A key beyond the last wraps around.
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
                for (u32 i = 0; i < 4; i++) v[i] = __ldg((const uint4 *)(at[i] + d));
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

    // Every warp leaves what it has, and they are added in their order, some elements at a time.
    if (t == 0) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            shared_sums[warp][g + 8 * i][0] = highest[i];
            shared_sums[warp][g + 8 * i][1] = weights[i];
        }
    }
#pragma unroll
    for (u32 half = 0; half < WIDTH / PART; half++) {
        // What the elements before these left has been read.
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
    const Call call = CALL;
    attend(call, [&](const Part &part) { go_through(call, part); });
}
