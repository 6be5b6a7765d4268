// Paged attention without tensor cores: for caches of f32 and of bytes, and for the widest heads. common.cuh
// precedes this text.
//
// The includer defines K_TYPE and V_TYPE (types of keys and values: 0 f32, 1 binary16, 2 bytes with a binary16 scale per
// 32, 3 E4M3 with a binary16 scale per row, 4 four bits with a binary16 scale per 32), WIDTH (the widest head supported:
// 64, 128, 256, 512, 768), LATENT (1: the cache has keys only, and a value is the last elements of its key; both types
// are the same) and AROUND (1: a row sees keys on both sides). The place of a key in its tile decides which group of
// lanes processes it. A group of lanes processes its keys in order. Both hold for every kernel below.

// Lanes that share a key. Each lane has eight elements of every chunk.
#define LANES (WIDTH >= 256 ? 32 : WIDTH / 8)
#define CHUNKS (WIDTH / (8 * LANES))
// Keys that a warp processes at the same time.
#define SUBS (32 / LANES)
// Keys that each group of lanes loads at once.
#define KEYS (CHUNKS > 2 ? 1 : K_TYPE == 0 || V_TYPE == 0 ? 2 / CHUNKS : 4 / CHUNKS)
#define TILE (KEYS * WARPS * SUBS)

// Eight elements of a key or value, in the cache's type.
template <u32 TYPE> struct Eight { uint2 a; float scale; };
template <> struct Eight<0> { float4 a, b; };
template <> struct Eight<1> { uint4 a; };
template <> struct Eight<4> { u32 a; float scale; };

// Bytes of eight elements.
template <u32 TYPE> constexpr u32 EIGHT = TYPE == 0 ? 32 : TYPE == 1 ? 16 : TYPE == 4 ? 4 : 8;

// Addresses of a lane's elements of one head's keys or values, for a block at offset zero.
struct Lane {
    const u8 *start[CHUNKS];   // address of the first token's elements, for each chunk
    u32 row;                   // bytes from one token to the next
    const u8 *scales[CHUNKS];  // unused by types without scales
    u32 scale_row;
};

// `stripe`: the head's tokens, [tokens][row rounded up to 8 elements]. Scales follow. The lanes load `width` elements
// from `skip` on, a multiple of 8. Lanes beyond the row's end load its last elements. Their results are not used.
template <u32 TYPE>
__device__ __forceinline__ Lane lane_of(const u8 *stripe, u32 tokens, u32 row, u32 skip, u32 width) {
    const u32 place = threadIdx.x % LANES, eights = (row + 7) / 8;
    Lane lane;
    lane.row = eights * EIGHT<TYPE>;
    lane.scale_row = TYPE == 3 ? 2 : (row + 31) / 32 * 2;
#pragma unroll
    for (u32 c = 0; c < CHUNKS; c++) {
        const u32 d = skip + min((c * LANES + place) * 8, (width + 7) / 8 * 8 - 8);
        lane.start[c] = stripe + d / 8 * EIGHT<TYPE>;
        lane.scales[c] = stripe + (tokens * lane.row + 15) / 16 * 16 + (TYPE == 3 ? 0 : d / 32 * 2);
    }
    return lane;
}

// Converts eight elements to f32, without their scale.
template <u32 TYPE> __device__ __forceinline__ void values(const Eight<TYPE> &x, float (&out)[8]) {
    if constexpr (TYPE == 0) {
        out[0] = x.a.x; out[1] = x.a.y; out[2] = x.a.z; out[3] = x.a.w;
        out[4] = x.b.x; out[5] = x.b.y; out[6] = x.b.z; out[7] = x.b.w;
    } else if constexpr (TYPE == 1) {
        const u32 words[4] = {x.a.x, x.a.y, x.a.z, x.a.w};
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            out[2 * i] = f16_value((u16)words[i]);
            out[2 * i + 1] = f16_value((u16)(words[i] >> 16));
        }
    } else if constexpr (TYPE == 2) {
        // Puts the byte into the low mantissa bits of 2^23, then subtracts 2^23 + 128. The XOR with 0x80 makes it
        // unsigned.
        const u32 words[2] = {x.a.x ^ 0x80808080, x.a.y ^ 0x80808080};
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            const u32 bits = __byte_perm(words[i / 4], 0x4b000000, 0x7540 + i % 4);
            out[i] = __fsub_rn(__uint_as_float(bits), 8388736.0f);
        }
    } else if constexpr (TYPE == 3) {
        // The exponents of E4M3 / 256 and binary16 are the same; the scale has the factor.
        const u32 words[2] = {x.a.x, x.a.y};
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            const u32 code = words[i / 4] >> i % 4 * 8;
            out[i] = f16_value((u16)((code & 0x80) << 8 | (code & 0x7f) << 7));
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < 8; i++)
            out[i] = __fsub_rn(__uint_as_float(0x4b000000 | (x.a >> 4 * i & 15)), 8388616.0f);
    }
}

// Loads the lane's elements of the keys or values that its group of lanes has in the tile at `base`. For a
// key outside from..to it loads the nearest key inside, or nothing if GUARDED. Such a key has a weight of
// zero. The branch of GUARDED costs instructions, but stops the compiler from interleaving the loads of
// several keys. Some kernels lack the registers for interleaved loads.
template <bool GUARDED, u32 TYPE>
__device__ __forceinline__ void fetch(Eight<TYPE> (&out)[KEYS][CHUNKS], const Lane &lane, const u32 *table, u32 base,
                                      u32 from, u32 to, u32 first_block, u32 shift) {
    const u32 warp = threadIdx.x / 32, sub = threadIdx.x % 32 / LANES;
#pragma unroll
    for (u32 u = 0; u < KEYS; u++) {
        const u32 place = base + (u * WARPS + warp) * SUBS + sub;
        const u32 key = min(max(place, from), to - 1);
        if (GUARDED && place != key) {
#pragma unroll
            for (u32 c = 0; c < CHUNKS; c++) out[u][c] = Eight<TYPE>{};
            continue;
        }
        const u64 block = (u64)table[(key >> shift) - first_block] * 64;
        const u32 token = key & ((1u << shift) - 1);
#pragma unroll
        for (u32 c = 0; c < CHUNKS; c++) {
            const u8 *at = lane.start[c] + block + token * lane.row;
            if constexpr (TYPE == 0) {
                out[u][c].a = *(const float4 *)at;
                out[u][c].b = ((const float4 *)at)[1];
            } else if constexpr (TYPE == 1) {
                out[u][c].a = *(const uint4 *)at;
            } else {
                if constexpr (TYPE == 4) out[u][c].a = *(const u32 *)at;
                else out[u][c].a = *(const uint2 *)at;
                const float scale = f16_value(*(const u16 *)(lane.scales[c] + block + token * lane.scale_row));
                out[u][c].scale = TYPE == 3 ? __fmul_rn(scale, 256.0f) : scale;
            }
        }
    }
}

template <u32 TYPE> __device__ __forceinline__ float scaled(const Eight<TYPE> &x, float sum) {
    if constexpr (TYPE >= 2) return __fmul_rn(sum, x.scale);
    else return sum;
}

// Processes a `Part` with at most GROUP vectors.
template <u32 GROUP> __device__ __forceinline__ void go_through(const Call &call, const Part &part) {
    __shared__ float shared_parts[WARPS * SUBS][GROUP][WIDTH];
    __shared__ float shared_sums[WARPS * SUBS][GROUP][2];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 sub = lane / LANES, place = lane % LANES;
    const u32 split = part.split, from = part.from, to = part.to, shift = call.block_shift;

    u32 lasts[GROUP];
    float q[GROUP][8 * CHUNKS], acc[GROUP][8 * CHUNKS], highest[GROUP], weights[GROUP];
#pragma unroll
    for (u32 s = 0; s < GROUP; s++) {
        const Vector vector = vector_of(call, part, s);
        lasts[s] = vector.last;
        highest[s] = LOWEST;
        weights[s] = 0;
#pragma unroll
        for (u32 i = 0; i < 8 * CHUNKS; i++) {
            const u32 d = (i / 8 * LANES + place) * 8 + i % 8;
            q[s][i] = vector.q && d < call.head_dim ? __fmul_rn(vector.q[d], call.scale) : 0.0f;
            acc[s][i] = 0;
        }
    }
    __syncthreads();

    const u8 *layer = call.arena + call.layer_offset;
    const u32 tokens = 1u << shift;
    const Lane keys =
        lane_of<K_TYPE>(layer + (u64)part.kv_head * call.k_stripe, tokens, call.head_dim, 0, call.head_dim);
#if LATENT
    const u32 skip = call.head_dim - call.v_head_dim;
    const Lane vals =
        lane_of<V_TYPE>(layer + (u64)part.kv_head * call.k_stripe, tokens, call.head_dim, skip, call.v_head_dim);
#else
    layer += (u64)call.kv_heads * call.k_stripe;
    const Lane vals =
        lane_of<V_TYPE>(layer + (u64)part.kv_head * call.v_stripe, tokens, call.v_head_dim, 0, call.v_head_dim);
#endif
    for (u32 base = split * SPLIT + (from - split * SPLIT) / TILE * TILE; base < to; base += TILE) {
        // Values are asked for together with the keys where there are registers for both.
        constexpr bool TIGHT = GROUP >= 8 || CHUNKS > 1;
        Eight<K_TYPE> k[KEYS][CHUNKS];
        Eight<V_TYPE> v[KEYS][CHUNKS];
        fetch<TIGHT>(k, keys, part.table, base, from, to, part.first_block, shift);
        if (GROUP < 8) fetch<TIGHT>(v, vals, part.table, base, from, to, part.first_block, shift);
        float score[GROUP][KEYS];
#pragma unroll
        for (u32 u = 0; u < KEYS; u++) {
#pragma unroll
            for (u32 c = 0; c < CHUNKS; c++) {
                float x[8];
                values(k[u][c], x);
#pragma unroll
                for (u32 s = 0; s < GROUP; s++) {
                    float sum = __fmul_rn(q[s][8 * c], x[0]);
#pragma unroll
                    for (u32 i = 1; i < 8; i++) sum = fmaf(q[s][8 * c + i], x[i], sum);
                    sum = scaled(k[u][c], sum);
                    score[s][u] = c == 0 ? sum : __fadd_rn(score[s][u], sum);
                }
            }
        }
#pragma unroll
        for (u32 s = 0; s < GROUP; s++) {
            float top = highest[s];
#pragma unroll
            for (u32 u = 0; u < KEYS; u++) {
                const u32 key = base + (u * WARPS + warp) * SUBS + sub;
                const float sum = sum_lanes(score[s][u], LANES);
                // For a key behind `lasts[s]` the difference wraps around and is not below the window. A tile
                // never crosses its split's end.
                // But around its end a vector reaches further than there are keys.
                const bool seen = lasts[s] - key < call.window && (!AROUND || key < to);
                score[s][u] = seen ? sum : -__int_as_float(0x7f800000);
                top = fmaxf(top, score[s][u]);
            }
            const float factor = exp2_fast(__fsub_rn(highest[s], top));
            highest[s] = top;
            weights[s] = __fmul_rn(weights[s], factor);
#pragma unroll
            for (u32 i = 0; i < 8 * CHUNKS; i++) acc[s][i] = __fmul_rn(acc[s][i], factor);
#pragma unroll
            for (u32 u = 0; u < KEYS; u++) {
                score[s][u] = exp2_fast(__fsub_rn(score[s][u], top));
                weights[s] = __fadd_rn(weights[s], score[s][u]);
            }
        }
        if (GROUP >= 8) fetch<TIGHT>(v, vals, part.table, base, from, to, part.first_block, shift);
#pragma unroll
        for (u32 u = 0; u < KEYS; u++) {
#pragma unroll
            for (u32 c = 0; c < CHUNKS; c++) {
                float x[8];
                values(v[u][c], x);
#pragma unroll
                for (u32 s = 0; s < GROUP; s++) {
                    const float p = scaled(v[u][c], score[s][u]);
#pragma unroll
                    for (u32 i = 0; i < 8; i++) acc[s][8 * c + i] = fmaf(p, x[i], acc[s][8 * c + i]);
                }
            }
        }
    }

    // Writes the sums of every group of lanes to shared memory. Then adds them in ascending order of the
    // groups.
#pragma unroll
    for (u32 s = 0; s < GROUP; s++) {
#pragma unroll
        for (u32 i = 0; i < 8 * CHUNKS; i++)
            shared_parts[warp * SUBS + sub][s][(i / 8 * LANES + place) * 8 + i % 8] = acc[s][i];
        if (place == 0) {
            shared_sums[warp * SUBS + sub][s][0] = highest[s];
            shared_sums[warp * SUBS + sub][s][1] = weights[s];
        }
    }
    __syncthreads();
    for (u32 s = 0; s < GROUP; s++) {
        const Goal goal = goal_of(call, part, s);
        if (!goal.wanted) continue;
        float top = shared_sums[0][s][0];
        for (u32 w = 1; w < WARPS * SUBS; w++) top = fmaxf(top, shared_sums[w][s][0]);
        float factors[WARPS * SUBS], sum = 0;
#pragma unroll
        for (u32 w = 0; w < WARPS * SUBS; w++) {
            factors[w] = exp2_fast(__fsub_rn(shared_sums[w][s][0], top));
            sum = fmaf(shared_sums[w][s][1], factors[w], sum);
        }
        for (u32 d = threadIdx.x; d < call.v_head_dim; d += 32 * WARPS) {
            float x = 0;
#pragma unroll
            for (u32 w = 0; w < WARPS * SUBS; w++) x = fmaf(shared_parts[w][s][d], factors[w], x);
            leave(call, goal, d, top, sum, x);
        }
        if (!goal.alone && threadIdx.x == 0) {
            goal.sums[0] = top;
            goal.sums[1] = sum;
        }
    }
}

#define ATTEND(group)                                                                                                  \
    after_earlier_kernels(), attend(call, [&](const Part &part) { go_through<group>(call, part); })
extern "C" __global__ void __launch_bounds__(128, LATENT ? 3 : 4) attend_1(PARAMETERS) { const Call call = CALL; ATTEND(1); }
// By itself the compiler aims at fewer registers than fit, and spills.
#if K_TYPE == 3 || V_TYPE == 3 || (AROUND && K_TYPE == 0)
#define TWO __launch_bounds__(128, 3)
#else
#define TWO __launch_bounds__(128)
#endif
extern "C" __global__ void TWO attend_2(PARAMETERS) { const Call call = CALL; ATTEND(2); }
#if WIDTH < 768
extern "C" __global__ void __launch_bounds__(128) attend_4(PARAMETERS) { const Call call = CALL; ATTEND(4); }
#endif
#if WIDTH < 512 && !AROUND
extern "C" __global__ void __launch_bounds__(128) attend_8(PARAMETERS) { const Call call = CALL; ATTEND(8); }
#endif
