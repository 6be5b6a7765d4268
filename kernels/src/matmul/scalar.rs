//! The kernels in portable Rust. They define the results that the vector kernels must reproduce.
#![allow(unsafe_code)]

use super::PANEL_ROWS;
use super::activations::{BLOCK, QuantizedBlock};
use super::kernel::{F32Call, Int8Call, KernelSet, TILE_TOKENS, Tile, plain_value};
use super::layout::{Block, Lanes, Layout, PackedBlock, lanes, panel_bytes};
use super::rows::PlainRows;
use crate::quant::{GgmlType, Scaling, Scheme};

pub(super) static KERNELS: KernelSet = KernelSet { int8, f32, quantize, interleave };

/// # Safety
/// See [`KernelSet`].
unsafe fn int8(call: &Int8Call<'_>, tile: &mut Tile) {
    let Some(scheme) = Scheme::of(call.ty) else { return };
    let bytes = panel_bytes(call.ty, call.blocks * BLOCK).unwrap_or(0);
    // SAFETY: the caller's contract.
    let panel = unsafe { std::slice::from_raw_parts(call.panel, bytes) };
    tile.0[..call.tokens.len()].fill([0.0; PANEL_ROWS]);
    let mut block = Block::EMPTY;
    for (index, packed) in Layout::of(&scheme).blocks(panel, call.blocks).enumerate() {
        block.unpack(&scheme, packed);
        for (token, acc) in call.tokens.iter().zip(&mut tile.0) {
            // SAFETY: the caller's contract.
            let a = unsafe { &*call.activations.add(token + index) };
            let sums = [0, 1].map(|half| integer_sums(&block, scheme.offset, half, a));
            fold(&block, &scheme, &sums, a, acc);
        }
    }
}

/// `sum of level * quant` over one half of a block, per row.
fn integer_sums(block: &Block, offset: i32, half: usize, a: &QuantizedBlock) -> Lanes<i32> {
    let mut sums = [offset * i32::from(a.minus_half_sums[half]); PANEL_ROWS];
    let groups = block.codes[4 * half..][..4].iter().zip(a.quants[16 * half..].chunks_exact(4));
    for (rows, quants) in groups {
        for (sum, codes) in sums.iter_mut().zip(rows) {
            for (&code, &quant) in codes.iter().zip(quants) {
                *sum += i32::from(code) * i32::from(quant);
            }
        }
    }
    sums
}

/// Adds a block's integer sums to the accumulators, as the table in [`crate::matmul`] defines.
#[inline(always)]
pub(super) fn fold(
    block: &Block,
    scheme: &Scheme,
    sums: &[Lanes<i32>; 2],
    a: &QuantizedBlock,
    acc: &mut Lanes<f32>,
) {
    let [first, second] = sums;
    match scheme.scaling {
        Scaling::F32 | Scaling::F16 | Scaling::E8m0 | Scaling::Super => {
            add_scaled(acc, |r| first[r] + second[r], &block.scale[0], a.scale);
        }
        Scaling::F16Min | Scaling::SuperMin => {
            add_scaled(acc, |r| first[r] + second[r], &block.scale[0], a.scale);
            for (acc, min) in acc.iter_mut().zip(&block.added[0]) {
                *acc = min.mul_add(a.scaled_sum, *acc);
            }
        }
        Scaling::Sixteenths => add_scaled(acc, by_factors(&block.factor, sums), &block.d, a.scale),
        Scaling::SixteenthsMin => {
            add_scaled(acc, by_factors(&block.factor, sums), &block.d, a.scale);
            let quants = a.minus_half_sums.map(|sum| [-i32::from(sum); PANEL_ROWS]);
            add_scaled(acc, by_factors(&block.min_factor, &quants), &block.minus_dmin, a.scale);
        }
        Scaling::Ue4m3 => {
            add_scaled(acc, |r| first[r], &block.scale[0], a.scale);
            add_scaled(acc, |r| second[r], &block.scale[1], a.scale);
        }
    }
}

/// `acc = fma(sum, scale * da, acc)` in every lane.
#[inline(always)]
fn add_scaled(acc: &mut Lanes<f32>, sum: impl Fn(usize) -> i32, scale: &Lanes<f32>, da: f32) {
    for (r, acc) in acc.iter_mut().enumerate() {
        *acc = (sum(r) as f32).mul_add(scale[r] * da, *acc);
    }
}

/// Each half's sum times its factor.
#[inline(always)]
fn by_factors(factors: &[Lanes<i32>; 2], sums: &[Lanes<i32>; 2]) -> impl Fn(usize) -> i32 {
    |r| factors[0][r] * sums[0][r] + factors[1][r] * sums[1][r]
}

/// # Safety
/// See [`KernelSet`].
unsafe fn f32(call: &F32Call<'_>, tile: &mut Tile) {
    let bytes = panel_bytes(call.ty, call.cols).unwrap_or(0);
    // SAFETY: the caller's contract.
    let panel = unsafe { std::slice::from_raw_parts(call.panel, bytes) };
    tile.0[..call.tokens.len()].fill([0.0; PANEL_ROWS]);
    let mut odd = [[0.0; PANEL_ROWS]; TILE_TOKENS];
    let mut column = |k: usize, weights: &Lanes<f32>| {
        let sums = if k.is_multiple_of(2) { &mut tile.0 } else { &mut odd };
        for (token, acc) in call.tokens.iter().zip(sums) {
            // SAFETY: the caller's contract; `k < cols`.
            let a = unsafe { *call.activations.add(token + k) };
            for (acc, weight) in acc.iter_mut().zip(weights) {
                *acc = weight.mul_add(a, *acc);
            }
        }
    };
    if let Some(scheme) = Scheme::of(call.ty) {
        let mut block = Block::EMPTY;
        let blocks = Layout::of(&scheme).blocks(panel, call.cols / BLOCK);
        for (index, packed) in blocks.enumerate() {
            block.unpack(&scheme, packed);
            for k in 0..BLOCK {
                column(index * BLOCK + k, &lanes(|r| block.weight(&scheme, k, r)));
            }
        }
    } else {
        let size = call.ty.block_bytes();
        for (k, slots) in panel.chunks_exact(PANEL_ROWS * size).take(call.cols).enumerate() {
            column(k, &lanes(|r| plain_value(call.ty, &slots[r * size..][..size])));
        }
    }
    for (even, odd) in tile.0[..call.tokens.len()].iter_mut().zip(&odd) {
        even.iter_mut().zip(odd).for_each(|(even, odd)| *even += odd);
    }
}

/// The f32 weights of up to 32 columns.
pub(super) type Columns = [Lanes<f32>; BLOCK];

/// Products with f32 activations for instruction sets that unpack a block's weights to memory before using
/// them. `unpack` unpacks a block, `plain` converts one column of a plain float format, and `add` adds
/// columns, the first of which is even, to a token's sums.
///
/// # Safety
/// See [`KernelSet`].
#[inline(always)]
pub(super) unsafe fn f32_by_columns(
    call: &F32Call<'_>,
    tile: &mut Tile,
    unpack: impl Fn(&Scheme, PackedBlock<'_>, &mut Block),
    plain: impl Fn(GgmlType, &[u8]) -> Lanes<f32>,
    add: impl Fn(&mut Lanes<f32>, &mut Lanes<f32>, &Columns, &[f32]),
) {
    let bytes = panel_bytes(call.ty, call.cols).unwrap_or(0);
    // SAFETY: the caller's contract.
    let panel = unsafe { std::slice::from_raw_parts(call.panel, bytes) };
    let mut sums = [[[0.0; PANEL_ROWS]; TILE_TOKENS]; 2];
    let mut columns: Columns = [[0.0; PANEL_ROWS]; BLOCK];
    let mut accumulate = |first: usize, columns: &Columns| {
        let [even, odd] = &mut sums;
        for ((token, even), odd) in call.tokens.iter().zip(even).zip(odd) {
            // SAFETY: the caller's contract.
            let a = unsafe { std::slice::from_raw_parts(call.activations.add(*token), call.cols) };
            add(even, odd, columns, &a[first..call.cols.min(first + BLOCK)]);
        }
    };
    if let Some(scheme) = Scheme::of(call.ty) {
        let mut block = Block::EMPTY;
        for (index, packed) in Layout::of(&scheme).blocks(panel, call.cols / BLOCK).enumerate() {
            unpack(&scheme, packed, &mut block);
            for (k, column) in columns.iter_mut().enumerate() {
                *column = lanes(|r| block.weight(&scheme, k, r));
            }
            accumulate(index * BLOCK, &columns);
        }
    } else {
        let lanes_bytes = PANEL_ROWS * call.ty.block_bytes();
        for (index, values) in panel[..call.cols * lanes_bytes].chunks(BLOCK * lanes_bytes).enumerate() {
            for (column, values) in columns.iter_mut().zip(values.chunks_exact(lanes_bytes)) {
                *column = plain(call.ty, values);
            }
            accumulate(index * BLOCK, &columns);
        }
    }
    let [even, odd] = &sums;
    for (out, (even, odd)) in tile.0[..call.tokens.len()].iter_mut().zip(even.iter().zip(odd)) {
        *out = lanes(|r| even[r] + odd[r]);
    }
}

/// # Safety
/// None beyond [`KernelSet`]'s.
unsafe fn quantize(src: &[f32], out: &mut [QuantizedBlock]) {
    quantize_row(src, out);
}

#[inline(always)]
pub(super) fn quantize_row(src: &[f32], out: &mut [QuantizedBlock]) {
    for (values, out) in src.chunks(BLOCK).zip(out) {
        let mut padded = [0.0; BLOCK];
        padded[..values.len()].copy_from_slice(values);
        *out = quantize_block(&padded);
    }
}

/// Blocks whose largest magnitude is below this become zero, because the reciprocal of their scale would
/// overflow.
pub(super) const SMALLEST: f32 = 1e-36;

#[inline(always)]
fn quantize_block(values: &[f32; BLOCK]) -> QuantizedBlock {
    // Magnitudes compare as integers, and non-finite values compare above all finite ones.
    let largest = values.iter().map(|x| x.to_bits() & 0x7fff_ffff).max().unwrap_or(0);
    let largest = f32::from_bits(largest);
    if !largest.is_finite() {
        return QuantizedBlock::POISON;
    }
    if largest < SMALLEST {
        return QuantizedBlock::ZERO;
    }
    let inverse = 127.0 / largest;
    let mut quants = [0; BLOCK];
    for (quant, x) in quants.iter_mut().zip(values) {
        *quant = (x * inverse).round_ties_even() as i8;
    }
    let sum = |half: &[i8]| half.iter().map(|&q| i32::from(q)).sum();
    let sums = [sum(&quants[..16]), sum(&quants[16..])];
    QuantizedBlock { quants, ..QuantizedBlock::with_sums(largest / 127.0, sums) }
}

/// # Safety
/// None beyond [`KernelSet`]'s.
pub(super) unsafe fn interleave(rows: &PlainRows<'_>, panel: &mut [u8]) {
    super::rows::interleave(rows, panel);
}
