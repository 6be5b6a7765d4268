// Paged attention on tensor cores, for caches of binary16. common.cuh precedes this text. The includer
// defines WIDTH (the widest head supported: 64, 128, 256).
//
// Query vectors are the rows of the products: query heads of one key/value head, of all rows that are
// processed together. Rows of a product are independent. So a vector's result is the same alone, with
// fifteen vectors of zeroes, and together with others.
//
// A tile has 64 keys. Its values are added by themselves, with the weights relative to the tile's highest
// score. The results of a split's tiles are joined in ascending order, then those of the splits. `attend_16`
// computes the tiles of one split at the same time, for single rows. `attend_prompt` goes through all splits
// of its rows, for many rows of a sequence. Both give the same bits.
//
// Query vectors and the weights of keys are each split into two binary16 numbers, which together have 22 bits
// of mantissa. Keys and values are used as the cache stores them. So the result differs from f32 in little
// but the order of the sums.
#define ROWS 16
#define TILE 64
#define TILES (SPLIT / TILE)
// Tiles of a split that belong to one warp.
#define OWN (TILES / WARPS)
// Weights are scaled by 2^LIFT, so that small ones stay in the range of binary16.
#define LIFT 14.0f
// Elements of keys or values that are processed at a time.
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

// Highest score and sum of weights of a tile, of vectors g and g + 8 in lane 4g + t, and the weights: the left
// factors of their products with 16 keys each.
struct Tile {
    float highest[2], weights[2];
    uint4 near[TILE / 16], rest[TILE / 16];
};

// Prepares vectors g and g + 8 as left factors, of 32 elements for each step in first, first + every, ...
__device__ __forceinline__ void put_queries(const Call &call, const Vector (&vectors)[2], uint4 (*queries)[2][32],
                                            u32 first, u32 every) {
    const u32 lane = threadIdx.x % 32, t = lane % 4;
    for (u32 step = first; step < WIDTH / 32; step += every) {
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
}

// Adds the products of 32 elements to the scores of COUNT times 8 keys. Lane 4g + t has elements 8t .. 8t + 8
// of key g of every 8. Any order of a key's elements gives the same product. This one lets a lane load 16
// bytes at once.
template <u32 COUNT>
__device__ __forceinline__ void add_scores(float (&s)[TILE / 8][4], u32 first, const uint4 (*queries)[2][32],
                                           u32 step, const uint4 (&k)[COUNT]) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const uint4 a = queries[2 * step][i][lane], b = queries[2 * step + 1][i][lane];
#pragma unroll
        for (u32 n = 0; n < COUNT; n++) {
            add_product(s[first + n], a, k[n].x, k[n].y);
            add_product(s[first + n], b, k[n].z, k[n].w);
        }
    }
}

// Weighs the keys of the tile at `base` by their scores.
__device__ __forceinline__ void weigh(float (&s)[TILE / 8][4], const Vector (&vectors)[2], u32 base, u32 window,
                                      Tile &tile) {
    const u32 t = threadIdx.x % 4;
    // For a key behind the vector's last position the difference wraps around and is not below the window.
    auto sees = [&](u32 i, u32 key) { return vectors[i].last - key < window; };
    const bool whole = sees(0, base) && sees(0, base + TILE - 1) && sees(1, base) && sees(1, base + TILE - 1);
    if (!__all_sync(0xffffffff, whole)) {
#pragma unroll
        for (u32 n = 0; n < TILE / 8; n++) {
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                float &x = s[n][e];
                x = sees(e / 2, base + 8 * n + 2 * t + e % 2) ? x : -__int_as_float(0x7f800000);
            }
        }
    }
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        float top = LOWEST;
#pragma unroll
        for (u32 n = 0; n < TILE / 8; n++) top = fmaxf(top, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
        top = fmaxf(LOWEST, __fsub_rn(top, LIFT));
        float sum = 0;
#pragma unroll
        for (u32 n = 0; n < TILE / 8; n++) {
#pragma unroll
            for (u32 e = 0; e < 2; e++) {
                float &x = s[n][2 * i + e];
                x = exp2_fast(__fsub_rn(x, top));
                sum = __fadd_rn(sum, x);
            }
        }
        tile.highest[i] = top;
        tile.weights[i] = sum_lanes(sum, 4);
    }
#pragma unroll
    for (u32 n = 0; n < TILE / 16; n++) {
        const float(&low)[4] = s[2 * n], (&high)[4] = s[2 * n + 1];
        tile.near[n].x = halves(low[0], low[1], tile.rest[n].x);
        tile.near[n].y = halves(low[2], low[3], tile.rest[n].y);
        tile.near[n].z = halves(high[0], high[1], tile.rest[n].z);
        tile.near[n].w = halves(high[2], high[3], tile.rest[n].w);
    }
}

// Layer's keys and values of one key/value head.
struct Cache {
    const u8 *keys, *values;
    u32 k_width, v_width;      // elements of a token, rounded up to 8
};

__device__ __forceinline__ Cache cache_of(const Call &call, u32 kv_head) {
    const u8 *layer = call.arena + call.layer_offset;
    return {layer + (u64)kv_head * call.k_stripe,
            layer + (u64)call.kv_heads * call.k_stripe + (u64)kv_head * call.v_stripe,
            (call.head_dim + 7) / 8 * 8, (call.v_head_dim + 7) / 8 * 8};
}

// Processes a `Part` of one split with at most 16 vectors. Warp w has the tiles w, w + WARPS, ... of
// the split. Lane 4g + t holds:
// - of the products: vectors g and g + 8;
// - of the values: keys 2t, 2t + 1, 2t + 8 and 2t + 9 of every 16, elements 8g .. 8g + 8 of every 64. Any
//   column may stand for any element of a value.
__device__ __forceinline__ void go_through(const Call &call, const Part &part) {
    // Queries until all scores are there, then values.
    __shared__ uint4 shared[TILES * ROWS * PART / 4];
    __shared__ float shared_sums[TILES][ROWS][2];
    __shared__ Factors factors[TILES][ROWS];
    __shared__ Goal goals[ROWS];
    uint4(*queries)[2][32] = (uint4(*)[2][32])shared;
    float(*values)[ROWS][PART] = (float(*)[ROWS][PART])shared;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 from = part.from, to = part.to, shift = call.block_shift;
    const Vector vectors[2] = {vector_of(call, part, g), vector_of(call, part, g + 8)};
    if (warp == 0 && t == 0) {
        goals[g] = goal_of(call, part, g);
        goals[g + 8] = goal_of(call, part, g + 8);
    }
    put_queries(call, vectors, queries, warp, WARPS);
    __syncthreads();

    const Cache cache = cache_of(call, part.kv_head);
    const u32 mask = (1u << shift) - 1;
    // Address of a key's elements. For a key outside from..to this is the nearest key inside. Its weight is
    // zero.
    auto place = [&](const u8 *of, u32 key, u32 width) {
        key = min(max(key, from), to - 1);
        return of + (u64)part.table[(key >> shift) - part.first_block] * 64 + (key & mask) * width * 2;
    };
    // First key of one of the warp's tiles, and whether the tile has any of from..to.
    auto base = [&](u32 i) { return part.split * SPLIT + (i * WARPS + warp) * TILE; };
    auto there = [&](u32 i) { return base(i) < to && base(i) + TILE > from; };
    // Tiles of the split that have any. To join the others would change nothing.
    const u32 low = (from - part.split * SPLIT) / TILE, high = (to - 1 - part.split * SPLIT) / TILE;
    Tile tiles[OWN] = {};
#pragma unroll
    for (u32 i = 0; i < OWN; i++) {
        tiles[i].highest[0] = tiles[i].highest[1] = LOWEST;
        if (there(i)) {
            const u8 *at[TILE / 8];
            float s[TILE / 8][4] = {};
#pragma unroll
            for (u32 n = 0; n < TILE / 8; n++) at[n] = place(cache.keys, base(i) + 8 * n + g, cache.k_width);
#pragma unroll 1
            for (u32 step = 0; step < WIDTH / 32; step++) {
                // Lanes beyond the row's end load its last elements. The query's elements there are zeroes.
                const u32 d = min(32 * step + 8 * t, cache.k_width - 8) * 2;
                uint4 k[TILE / 8];
#pragma unroll
                for (u32 n = 0; n < TILE / 8; n++) k[n] = *(const uint4 *)(at[n] + d);
                add_scores(s, 0, queries, step, k);
            }
            weigh(s, vectors, base(i), call.window, tiles[i]);
        }
        if (t == 0) {
#pragma unroll
            for (u32 e = 0; e < 2; e++) {
                shared_sums[i * WARPS + warp][g + 8 * e][0] = tiles[i].highest[e];
                shared_sums[i * WARPS + warp][g + 8 * e][1] = tiles[i].weights[e];
            }
        }
    }
    // All warps are done with the queries.
    __syncthreads();
    // The factors are read after the next barrier, and then the sums of the split stand in the first tile's.
    if (threadIdx.x < ROWS) {
        float highest = LOWEST, weights = 0;
        for (u32 i = low; i <= high; i++)
            factors[i][threadIdx.x] =
                join_sums(highest, weights, shared_sums[i][threadIdx.x][0], shared_sums[i][threadIdx.x][1]);
        shared_sums[low][threadIdx.x][0] = highest;
        shared_sums[low][threadIdx.x][1] = weights;
    }
#pragma unroll 1
    for (u32 first = 0; first < WIDTH; first += PART) {
        const u32 d = min(first + 8 * g, cache.v_width - 8) * 2;
#pragma unroll
        for (u32 tile = 0; tile < OWN; tile++) {
            float o[PART / 8][4] = {};
#pragma unroll
            for (u32 n = 0; n < TILE / 16; n++) {
                if (!there(tile)) break;
                uint4 v[4];
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const u32 key = base(tile) + 16 * n + 2 * t + i % 2 + i / 2 * 8;
                    v[i] = *(const uint4 *)(place(cache.values, key, cache.v_width) + d);
                }
#pragma unroll
                for (u32 w = 0; w < 4; w++) {
                    auto word = [w](const uint4 &x) { return w == 0 ? x.x : w == 1 ? x.y : w == 2 ? x.z : x.w; };
#pragma unroll
                    for (u32 e = 0; e < 2; e++) {
                        const u32 pick = e == 0 ? 0x5410 : 0x7632;
                        const u32 b0 = __byte_perm(word(v[0]), word(v[1]), pick);
                        const u32 b1 = __byte_perm(word(v[2]), word(v[3]), pick);
                        add_product(o[2 * w + e], tiles[tile].near[n], b0, b1);
                        add_product(o[2 * w + e], tiles[tile].rest[n], b0, b1);
                    }
                }
            }
            // All threads have read the elements before.
            if (first > 0 && tile == 0) __syncthreads();
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                float4 *to = (float4 *)&values[tile * WARPS + warp][g + k / 2 * 8][8 * (2 * t + k % 2)];
                to[0] = {o[0][k], o[1][k], o[2][k], o[3][k]};
                to[1] = {o[4][k], o[5][k], o[6][k], o[7][k]};
            }
        }
        __syncthreads();
        for (u32 v = warp; v < ROWS; v += WARPS) {
            const Goal goal = goals[v];
            if (!goal.wanted) continue;
            const float highest = shared_sums[low][v][0], weights = shared_sums[low][v][1];
            for (u32 d = lane; d < min(PART, call.v_head_dim - min(first, call.v_head_dim)); d += 32) {
                float x = 0;
#pragma unroll
                for (u32 i = 0; i < TILES; i++)
                    if (i >= low && i <= high) x = join_values(factors[i][v], x, values[i][v][d]);
                leave(call, goal, first + d, highest, weights, x);
            }
            if (!goal.alone && first == 0 && lane == 0) {
                goal.sums[0] = highest;
                goal.sums[1] = weights;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(128, 2) attend_16(PARAMETERS) {
    after_earlier_kernels();
    const Call call = CALL;
    attend(call, [&](const Part &part) { go_through(call, part); });
}

// Warps that have the same 16 vectors. Each has a share of a value's elements.
#define SHARERS (WIDTH > 128 ? 2 : 1)
#define SETS (WARPS / SHARERS)
// Pieces of a tile's keys, and of its values. A piece has PART elements of each key.
#define PIECES (WIDTH / PART)
// Columns of a warp's products, in eights: of a piece, and of the result.
#define EIGHTS (PART / 8 / SHARERS)
#define ALL_EIGHTS (PIECES * EIGHTS)

// Where 16 bytes of a key stand in a piece, in units of 16 bytes. Neither eight keys in a row nor two keys with
// four units each have two units in the same banks.
__device__ __forceinline__ u32 unit_of(u32 key, u32 unit) { return key * 8 + (unit ^ (key % 2 * 4 + key / 2 % 4)); }

// Goes through all keys of a `Part` with at most 16 SETS vectors. Lane 4g + t holds vectors g and g + 8 of the
// warp's sixteen, and of every eight elements 2t and 2t + 1.
__device__ __forceinline__ void go_through_all(const Call &call, const Part &part) {
    __shared__ uint4 shared_queries[SETS][WIDTH / 16][2][32];
    // The next piece comes while the warps process one.
    __shared__ uint4 pieces[2][TILE * PART / 8];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 set = warp / SHARERS, share = warp % SHARERS, shift = call.block_shift, mask = (1u << shift) - 1;
    uint4(*queries)[2][32] = shared_queries[set];
    const Vector vectors[2] = {vector_of(call, part, 16 * set + g), vector_of(call, part, 16 * set + g + 8)};
    const Cache cache = cache_of(call, part.kv_head);
    const u32 key = threadIdx.x / 8, unit = threadIdx.x % 8;
    const u32 to_piece = (u32)__cvta_generic_to_shared(&pieces[0][unit_of(key, unit)]);

    // Blocks of the keys key, key + 16, ... of a tile, which the thread copies. For a key outside from..to these
    // are of the nearest key inside. Its weight is zero.
    u32 blocks[TILE / 16];
    auto place = [&](u32 base, u32 i) { return min(max(base + key + 16 * i, part.from), part.to - 1); };
    auto find = [&](u32 base) {
#pragma unroll
        for (u32 i = 0; i < TILE / 16; i++) blocks[i] = part.table[place(base, i) >> shift];
    };
    auto bring = [&](u32 base, bool of_keys, u32 piece, u32 number) {
        const u32 width = of_keys ? cache.k_width : cache.v_width;
        // Of values, a piece has eights of each share. Threads beyond the row's end copy its last elements. The
        // query's elements there are zeroes, and the results are not used.
        const u32 eight = of_keys ? PART / 8 * piece + unit
                                  : unit / EIGHTS * ALL_EIGHTS + piece * EIGHTS + unit % EIGHTS;
        const u8 *from = (of_keys ? cache.keys : cache.values) + min(8 * eight, width - 8) * 2;
#pragma unroll
        for (u32 i = 0; i < TILE / 16; i++)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                             to_piece + number % 2 * (TILE * PART * 2) + i * (16 * PART * 2)),
                         "l"(from + (u64)blocks[i] * 64 + (place(base, i) & mask) * width * 2)
                         : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    // Waits for a piece. All warps have then finished the piece before it.
    auto wait = [&] {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
    };

    // Of all splits before this one, and of this one's tiles so far.
    float all[ALL_EIGHTS][4] = {}, all_highest[2] = {LOWEST, LOWEST}, all_weights[2] = {0, 0};
    float o[ALL_EIGHTS][4] = {}, highest[2] = {LOWEST, LOWEST}, weights[2] = {0, 0};
    find(part.from / TILE * TILE);
    bring(part.from / TILE * TILE, true, 0, 0);
    put_queries(call, vectors, queries, share, SHARERS);
#pragma unroll 1
    for (u32 base = part.from / TILE * TILE; base < part.to; base += TILE) {
        float s[TILE / 8][4] = {};
#pragma unroll
        for (u32 piece = 0; piece < PIECES; piece++) {
            wait();
            if (piece + 1 < PIECES) bring(base, true, piece + 1, piece + 1);
            else bring(base, false, 0, PIECES);
#pragma unroll
            for (u32 step = 0; step < PART / 32; step++) {
#pragma unroll
                for (u32 first = 0; first < TILE / 8; first += 4) {
                    uint4 k[4];
#pragma unroll
                    for (u32 n = 0; n < 4; n++)
                        k[n] = pieces[piece % 2][64 * (first + n) + unit_of(g, 4 * step + t)];
                    add_scores(s, first, queries, PART / 32 * piece + step, k);
                }
            }
        }
        if (PIECES == 1) find(base + TILE);
        Tile tile;
        weigh(s, vectors, base, call.window, tile);
        Factors factors[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) factors[i] = join_sums(highest[i], weights[i], tile.highest[i], tile.weights[i]);
#pragma unroll
        for (u32 piece = 0; piece < PIECES; piece++) {
            wait();
            if (piece + 1 < PIECES) bring(base, false, piece + 1, PIECES + piece + 1);
            else if (base + TILE < part.to) bring(base + TILE, true, 0, 0);
            if (piece + 2 == PIECES) find(base + TILE);
            // Addresses of the rows of four matrices of eight keys: keys 0 .. 16, elements 0 .. 16.
            const u32 of_lane = unit_of(lane % 16, lane / 16 ^ share * EIGHTS);
            const u32 from = (u32)__cvta_generic_to_shared(&pieces[(PIECES + piece) % 2][0]);
#pragma unroll
            for (u32 j = 0; j < EIGHTS; j += 4) {
                float x[4][4] = {};
#pragma unroll
                for (u32 n = 0; n < TILE / 16; n++) {
                    u32 v[4][2];
#pragma unroll
                    for (u32 i = 0; i < 4; i += 2)
                        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                                     : "=r"(v[i][0]), "=r"(v[i][1]), "=r"(v[i + 1][0]), "=r"(v[i + 1][1])
                                     : "r"(from + ((of_lane ^ j + i) + 16 * 8 * n) * 16)
                                     : "memory");
#pragma unroll
                    for (u32 i = 0; i < 4; i++) add_product(x[i], tile.near[n], v[i][0], v[i][1]);
#pragma unroll
                    for (u32 i = 0; i < 4; i++) add_product(x[i], tile.rest[n], v[i][0], v[i][1]);
                }
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
#pragma unroll
                    for (u32 e = 0; e < 4; e++) {
                        float &of = o[piece * EIGHTS + j + i][e];
                        of = join_values(factors[e / 2], of, x[i][e]);
                    }
                }
            }
        }
        if ((base + TILE) % SPLIT > 0 && base + TILE < part.to) continue;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            factors[i] = join_sums(all_highest[i], all_weights[i], highest[i], weights[i]);
            highest[i] = LOWEST;
            weights[i] = 0;
        }
#pragma unroll
        for (u32 j = 0; j < ALL_EIGHTS; j++) {
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                all[j][e] = join_values(factors[e / 2], all[j][e], o[j][e]);
                o[j][e] = 0;
            }
        }
    }

#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const u32 v = 16 * set + g + 8 * i, r = v / call.together, head = part.head + v % call.together;
        if (r >= part.count || v % call.together >= part.heads) continue;
        float *out = call.out + ((u64)row_at(call, part.place + r) * call.heads + head) * call.v_head_dim;
        const float factor = add_sink(call.sinks, head, all_highest[i], all_weights[i]);
#pragma unroll
        for (u32 j = 0; j < ALL_EIGHTS; j++) {
#pragma unroll
            for (u32 e = 0; e < 2; e++) {
                const u32 d = 8 * (share * ALL_EIGHTS + j) + 2 * t + e;
                if (d < call.v_head_dim) out[d] = finish(factor, all_weights[i], all[j][2 * i + e]);
            }
        }
    }
}

// Grid: tiles of rows; key/value heads times groups of `together` query heads. Tiles with the most keys start
// first. 128 threads.
extern "C" __global__ void __launch_bounds__(128, 2) attend_prompt(PARAMETERS) {
    after_earlier_kernels();
    const Call call = CALL;
    each_group<2>(call, gridDim.x - 1 - blockIdx.x, SAME - 1, [&](const Part &part) { go_through_all(call, part); });
}
