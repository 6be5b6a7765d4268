// Mixture of experts: selection of experts for each row, and the sum of their outputs.
//
// A pair is one row at one of its experts: index `row * used + rank`. Rank 0 is the most probable expert.
#include "rows.cuh"

#define WARPS 4

// The score of a group of `size` experts: its best one, or the sum of its two best ones.
__device__ __forceinline__ float group_score(const float *scores, u32 size, u32 two_best) {
    float first = -__int_as_float(0x7f800000), second = first;
    for (u32 i = 0; i < size; i++) {
        const float score = scores[i];
        if (score > first) {
            second = first;
            first = score;
        } else if (score > second) {
            second = score;
        }
    }
    return two_best && size > 1 ? __fadd_rn(first, second) : first;
}

// Selects the `used` experts of each row with the highest scores plus `bias` (may be null), and their weights. A
// score is the probability over all experts, or a sigmoid. With `groups` above 0 only experts of the
// `used_groups` best groups are selected. A weight is the score, divided by the sum of the selected ones if
// `renormalise`. Ties go to the lower index. If NaNs leave fewer than `used` experts, the rest are expert 0 with
// weight NaN. One warp per row; at most 32 groups. Dynamic shared memory: [2][4][experts] floats.
extern "C" __global__ void __launch_bounds__(128)
    route(u32 *chosen, float *weights, const float *logits, const float *bias, u32 rows, u32 experts, u32 used,
          u32 renormalise, u32 sigmoid, u32 groups, u32 used_groups, u32 two_best) {
    after_earlier_kernels();
    extern __shared__ float shared[];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.x * WARPS + warp;
    if (row >= rows) return;
    const float lowest = -__int_as_float(0x7f800000);
    float *p = shared + warp * experts, *ranked = shared + (WARPS + warp) * experts;
    logits += (u64)row * experts;
    if (sigmoid) {
        for (u32 e = lane; e < experts; e += 32) p[e] = sigmoid_f32(logits[e]);
    } else {
        float top = lowest;
        for (u32 e = lane; e < experts; e += 32) top = fmaxf(top, logits[e]);
        for (u32 apart = 16; apart > 0; apart /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, apart));
        float sum = 0;
        for (u32 e = lane; e < experts; e += 32) {
            p[e] = exp_f32(__fsub_rn(logits[e], top));
            sum = __fadd_rn(sum, p[e]);
        }
        const float factor = __fdiv_rn(1.0f, sum_lanes(sum, 32));
        for (u32 e = lane; e < experts; e += 32) p[e] = __fmul_rn(p[e], factor);
    }
    for (u32 e = lane; e < experts; e += 32) ranked[e] = bias ? __fadd_rn(p[e], bias[e]) : p[e];
    __syncwarp();
    if (groups) {
        // Lane g has group g.
        const u32 size = experts / groups;
        const float score = lane < groups ? group_score(ranked + lane * size, size, two_best) : lowest;
        u32 above = 0;
        for (u32 other = 0; other < groups; other++) {
            const float theirs = __shfl_sync(0xffffffff, score, other);
            above += theirs > score || (theirs == score && other < lane);
        }
        __syncwarp();
        if (lane < groups && above >= used_groups)
            for (u32 i = 0; i < size; i++) ranked[lane * size + i] = lowest;
        __syncwarp();
    }
    // From here on a lane reads and marks only its own elements of `ranked`, so no barrier is needed.
    float total = 0, mine = 0;
    for (u32 rank = 0; rank < used; rank++) {
        float best = lowest;
        u32 expert = experts;
        for (u32 e = lane; e < experts; e += 32) {
            if (ranked[e] > best) {
                best = ranked[e];
                expert = e;
            }
        }
        for (u32 apart = 16; apart > 0; apart /= 2) {
            const float other = __shfl_xor_sync(0xffffffff, best, apart);
            const u32 index = __shfl_xor_sync(0xffffffff, expert, apart);
            if (other > best || (other == best && index < expert)) {
                best = other;
                expert = index;
            }
        }
        const bool found = expert < experts;
        if (found && expert % 32 == lane) ranked[expert] = lowest;
        best = found ? p[expert] : __int_as_float(0x7fc00000);
        total = __fadd_rn(total, best);
        if (lane == rank % 32) {
            mine = best;
            chosen[(u64)row * used + rank] = found ? expert : 0;
            weights[(u64)row * used + rank] = mine;
        }
    }
    if (!renormalise) return;
    for (u32 rank = lane; rank < used; rank += 32)
        weights[(u64)row * used + rank] = __fdiv_rn(weights[(u64)row * used + rank], total);
}

// Inclusive sums of one value of each of 1,024 threads.
__device__ __forceinline__ u32 sums_of_block(u32 (&sums)[1024], u32 value) {
    const u32 i = threadIdx.x;
    sums[i] = value;
    __syncthreads();
    for (u32 apart = 1; apart < 1024; apart *= 2) {
        const u32 before = i >= apart ? sums[i - apart] : 0;
        __syncthreads();
        sums[i] += before;
        __syncthreads();
    }
    return sums[i];
}

// Sorts pairs by expert, pairs of one expert in ascending order, and divides each expert's into groups of up to 32:
// {first of the list, expert << 8 | count}. Groups behind the last one get a count of 0. One block of 1,024 threads,
// one thread per expert; at most 1,024 experts. Warps sort consecutive parts of the pairs.
extern "C" __global__ void __launch_bounds__(1024)
    expert_lists(uint2 *groups, u32 *list, const u32 *chosen, u32 pairs, u32 experts, u32 max_groups) {
    after_earlier_kernels();
    constexpr u32 GROUP = 32, ROOM = 8192;
    // [warps][experts]: pairs of an expert in a warp's part, then the place in the list of the next one.
    __shared__ u32 counts[ROOM];
    __shared__ u32 sums[1024];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, e = threadIdx.x;
    const u32 warps = min(32u, ROOM / experts), part = (pairs + 32 * warps - 1) / (32 * warps) * 32;
    const u32 first = warp * part, end = warp < warps ? min(first + part, pairs) : 0;
    u32 *own = counts + warp * experts;
    for (u32 i = threadIdx.x; i < warps * experts; i += 1024) counts[i] = 0;
    __syncthreads();
    for (u32 base = first; base < end; base += 32) {
        const u32 i = base + lane, expert = i < end ? chosen[i] : experts;
        const u32 same = __match_any_sync(0xffffffff, expert);
        if (i < end && lane == __ffs(same) - 1) own[expert] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
    u32 count = 0;
    if (e < experts)
        for (u32 w = 0; w < warps; w++) count += counts[w * experts + e];
    const u32 start = sums_of_block(sums, count) - count;
    if (e < experts)
        for (u32 w = 0, at = start; w < warps; w++) {
            const u32 in_part = counts[w * experts + e];
            counts[w * experts + e] = at;
            at += in_part;
        }
    __syncthreads();
    const u32 own_groups = (count + GROUP - 1) / GROUP, last = sums_of_block(sums, own_groups);
    for (u32 g = 0; g < own_groups; g++)
        groups[last - own_groups + g] = uint2{start + GROUP * g, e << 8 | min(GROUP, count - GROUP * g)};
    for (u32 g = sums[1023] + threadIdx.x; g < max_groups; g += 1024) groups[g] = uint2{0, 0};
    for (u32 base = first; base < end; base += 32) {
        const u32 i = base + lane, expert = i < end ? chosen[i] : experts;
        const u32 same = __match_any_sync(0xffffffff, expert);
        const u32 at = i < end ? own[expert] : 0;
        __syncwarp();
        if (i < end) {
            list[at + __popc(same & ((1u << lane) - 1))] = i;
            if (lane == __ffs(same) - 1) own[expert] = at + __popc(same);
        }
        __syncwarp();
    }
}

// Values i .. i + 4 of an expert's product, of `count` ones, with their scale and bias: scale * product + bias.
__device__ __forceinline__ Four of_expert(Four v, const float *scales, const float *biases, u32 expert, u32 bias_stride,
                                          u32 i, u32 count) {
    if (scales) {
        const float scale = scales[expert];
        v = Four::of([&](u32 k) { return __fmul_rn(v.x[k], scale); });
    }
    if (!biases) return v;
    const Four bias = load_four(biases + (u64)expert * bias_stride, i, count);
    return Four::of([&](u32 k) { return __fadd_rn(v.x[k], bias.x[k]); });
}

// inner[pair][c] = gated(gate, up), c < ff. gate, up: products of each pair's expert, [pairs][stride]. Scales
// [experts] and biases [experts][bias_stride] may be null. Stores an 8-bit form unless `quantised` is null, and then
// only that. blockIdx.x: the pair. One thread per four values of the row or its padding.
extern "C" __global__ void __launch_bounds__(128)
    expert_gate(float *inner, u8 *quantised, u32 form, const float *gate, const float *up, const float *gate_scales,
                const float *up_scales, const float *gate_biases, const float *up_biases, const u32 *chosen, u32 ff,
                u32 stride, u32 bias_stride, u32 activation) {
    after_earlier_kernels();
    const u32 i = 4 * (blockIdx.y * blockDim.x + threadIdx.x), pair = blockIdx.x, blocks = row_blocks(ff);
    Four v = {};
    if (i < ff) {
        const u32 expert = chosen[pair];
        const u64 from = (u64)pair * stride;
        Four g = load_four(gate + from, i, ff), u = load_four(up + from, i, ff);
        g = of_expert(g, gate_scales, gate_biases, expert, bias_stride, i, ff);
        u = of_expert(u, up_scales, up_biases, expert, bias_stride, i, ff);
        v = Four::of([&](u32 k) { return gated(activation, g.x[k], u.x[k]); });
        if (!quantised) store_four(inner + (u64)pair * ff, i, ff, v);
    }
    if (quantised) quantise_row(v, form, quantised, pair, i / 32, blocks);
}

// out[row][c] (+)= factor * sum over the row's experts, in rank order, of weight * (scale * down + bias).
// down: [pairs][hidden]. blockIdx.x: the row. One thread per four values.
extern "C" __global__ void __launch_bounds__(128)
    expert_sum(float *out, const float *down, const float *weights, const u32 *chosen, const float *scales,
               const float *biases, u32 hidden, u32 used, float factor, u32 accumulate) {
    after_earlier_kernels();
    const u32 i = 4 * (blockIdx.y * blockDim.x + threadIdx.x), row = blockIdx.x;
    if (i >= hidden) return;
    out += (u64)row * hidden;
    const Four before = accumulate ? load_four(out, i, hidden) : Four{};
    Four sum = {};
    // Ranks whose loads are in flight together.
    constexpr u32 TOGETHER = 4;
#pragma unroll 1
    for (u32 rank = 0; rank < used; rank += TOGETHER) {
        Four x[TOGETHER];
        float weight[TOGETHER];
        u32 expert[TOGETHER];
#pragma unroll
        for (u32 r = 0; r < TOGETHER; r++) {
            const u32 pair = row * used + min(rank + r, used - 1);
            x[r] = load_four(down + (u64)pair * hidden, i, hidden);
            weight[r] = weights[pair], expert[r] = chosen[pair];
        }
#pragma unroll
        for (u32 r = 0; r < TOGETHER; r++) {
            if (rank + r >= used) break;
            const Four v = of_expert(x[r], scales, biases, expert[r], hidden, i, hidden);
            sum = Four::of([&](u32 k) { return fmaf(v.x[k], weight[r], sum.x[k]); });
        }
    }
    store_four(out, i, hidden, Four::of([&](u32 k) { return fmaf(sum.x[k], factor, before.x[k]); }));
}

// Pairs whose experts are the heads of a row: pair `row * heads + head` is at expert `head`. Lists and groups are like
// those of `expert_lists`, and the number of groups is a multiple of four. One thread per pair, in blocks of 128: enough
// for all groups.
extern "C" __global__ void head_lists(u32 *chosen, uint2 *groups, u32 *list, u32 rows, u32 heads) {
    after_earlier_kernels();
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x, of_head = (rows + 31) / 32, count = of_head * heads;
    if (i < count) {
        const u32 head = i / of_head, first = i % of_head * 32;
        groups[i] = uint2{head * rows + first, head << 8 | min(32u, rows - first)};
    } else if (i < (count + 3) / 4 * 4) {
        groups[i] = uint2{0, 0};
    }
    if (i >= rows * heads) return;
    chosen[i] = i % heads;
    list[i] = i % rows * heads + i / rows;
}
