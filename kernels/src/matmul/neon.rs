//! NEON kernels: a panel is four vectors of four rows. A block is unpacked to memory and used for all tokens
//! of the tile from there. Codes that do not fit into seven bits are converted to signed levels while
//! unpacking, so that one instruction, the dot product of signed bytes, serves all formats.
//!
//! If the processor has products of 2 x 8 with 8 x 2 bytes, two tokens at a time use a block: twice the work
//! per instruction. Dot products and matrix products are written in assembly: their intrinsics are not
//! stable.
#![allow(unsafe_code)]

use super::PANEL_ROWS;
use super::activations::{BLOCK, QuantizedBlock};
use super::kernel::{F32Call, Int8Call, KernelSet, Tile};
use super::layout::{Block, Lanes, Layout, VECTOR, panel_bytes};
use super::scalar::{Columns, f32_by_columns, fold, interleave, quantize_row};
use crate::quant::{Bits, GgmlType, Levels, Scheme};
use crate::simd::neon::{load_bf16_8, load_f16_8};
use std::arch::aarch64::{
    float32x4_t, int8x16_t, int32x4_t, uint8x16_t, vandq_u8, vcombine_s8, vdupq_n_s8, vdupq_n_s32,
    vdupq_n_u8, veorq_u8, vfmaq_n_f32, vld1_s8, vld1q_f32, vld1q_s8, vld1q_u8, vorrq_u8, vqtbl1q_u8,
    vreinterpretq_s8_s32, vreinterpretq_s32_u8, vshlq_u8, vst1q_f32, vst1q_s32, vst1q_u8, vuzp1q_s32,
    vuzp2q_s32, vzip1q_s32, vzip2q_s32,
};
use std::arch::asm;

pub(super) static DOTPROD: KernelSet = KernelSet { int8: int8_dotprod, f32, quantize, interleave };
/// Also uses matrix products.
pub(super) static I8MM: KernelSet = KernelSet { int8: int8_i8mm, f32, quantize, interleave };

/// Rows in a register of dot products.
const QUARTER: usize = PANEL_ROWS / 4;

/// The levels of a block in the order of their groups, as signed bytes, and the offset of the sums.
struct Signed {
    levels: [[[i8; 4]; PANEL_ROWS]; 2 * QUARTER],
    /// Offset still to be subtracted from a level; it is multiplied by minus the sum of the quants.
    offset: i32,
}

/// # Safety
/// See [`KernelSet`].
#[target_feature(enable = "neon,dotprod")]
unsafe fn int8_dotprod(call: &Int8Call<'_>, tile: &mut Tile) {
    // SAFETY: the caller's contract.
    unsafe {
        for_blocks(call, tile, |block, scheme, signed, index, tile| {
            for (token, acc) in call.tokens.iter().zip(&mut tile.0) {
                let a = &*call.activations.add(token + index);
                fold(block, scheme, &[half_sums(signed, 0, a), half_sums(signed, 1, a)], a, acc);
            }
        });
    }
}

/// # Safety
/// See [`KernelSet`].
#[target_feature(enable = "neon,dotprod,i8mm")]
unsafe fn int8_i8mm(call: &Int8Call<'_>, tile: &mut Tile) {
    // SAFETY: the caller's contract.
    unsafe {
        for_blocks(call, tile, |block, scheme, signed, index, tile| {
            let (pairs, last) = call.tokens.as_chunks::<2>();
            let (accs, rest) = tile.0.split_at_mut(2 * pairs.len());
            if !pairs.is_empty() {
                let paired = pair_columns(signed);
                for (pair, accs) in pairs.iter().zip(accs.as_chunks_mut::<2>().0) {
                    let a = pair.map(|token| &*call.activations.add(token + index));
                    let sums =
                        [pair_sums(&paired, signed.offset, 0, a), pair_sums(&paired, signed.offset, 1, a)];
                    for (t, acc) in accs.iter_mut().enumerate() {
                        fold(block, scheme, &[sums[0][t], sums[1][t]], a[t], acc);
                    }
                }
            }
            for (token, acc) in last.iter().zip(rest) {
                let a = &*call.activations.add(token + index);
                fold(block, scheme, &[half_sums(signed, 0, a), half_sums(signed, 1, a)], a, acc);
            }
        });
    }
}

/// Clears the tile and calls `process_block` for every unpacked block.
///
/// # Safety
/// The contract of `int8` in [`KernelSet`].
#[inline(always)]
unsafe fn for_blocks(
    call: &Int8Call<'_>,
    tile: &mut Tile,
    process_block: impl Fn(&Block, &Scheme, &Signed, usize, &mut Tile),
) {
    let Some(scheme) = Scheme::of(call.ty) else { return };
    let bytes = panel_bytes(call.ty, call.blocks * BLOCK).unwrap_or(0);
    // SAFETY: the caller's contract.
    let panel = unsafe { std::slice::from_raw_parts(call.panel, bytes) };
    tile.0[..call.tokens.len()].fill([0.0; PANEL_ROWS]);
    let mut block = Block::EMPTY;
    // 8-bit codes have an offset of 128; flipping their highest bit turns them into levels.
    let wide = scheme.offset == 128;
    let mut signed =
        Signed { levels: [[[0; 4]; PANEL_ROWS]; 2 * QUARTER], offset: if wide { 0 } else { scheme.offset } };
    for (index, packed) in Layout::of(&scheme).blocks(panel, call.blocks).enumerate() {
        // SAFETY: the callers' target features include NEON.
        unsafe {
            block
                .unpack_scales(&scheme, packed, |bytes| plain_lanes(GgmlType::F16, &bytes[..2 * PANEL_ROWS]));
            unpack_levels(&scheme, packed.codes, if wide { 0x80 } else { 0 }, &mut signed.levels);
        }
        process_block(&block, &scheme, &signed, index, tile);
    }
}

/// Unpacks the codes of four rows in one group from the planes that [`super::layout`] describes, and flips
/// the bits of `flip` in each.
#[inline]
#[target_feature(enable = "neon")]
fn unpack_levels(
    scheme: &Scheme,
    planes: &[u8],
    flip: u8,
    levels: &mut [[[i8; 4]; PANEL_ROWS]; 2 * QUARTER],
) {
    let table = match scheme.levels {
        Levels::Plain | Levels::E4m3 => None,
        // SAFETY: 16 bytes.
        Levels::Table(codes) => Some(unsafe { vld1q_u8(codes.as_ptr()) }),
    };
    let (vectors, _) = planes.as_chunks::<VECTOR>();
    for (g, group) in levels.iter_mut().enumerate() {
        // For the first plane: its vector, the right shift of its bits, and their mask. For the second plane:
        // the same and the left shift of its bits.
        let (low, high) = match scheme.bits {
            Bits::Eight => ((g, 0, 0xff), None),
            Bits::Two => ((g / 4, 2 * (g % 4), 3), None),
            Bits::Three => ((g / 4, 2 * (g % 4), 3), Some((2, g, 1, 2))),
            Bits::Four => ((g % 4, 4 * (g / 4), 15), None),
            Bits::Five => ((g % 4, 4 * (g / 4), 15), Some((4, g, 1, 4))),
            Bits::Six => ((g % 4, 4 * (g / 4), 15), Some((4 + g / 4, 2 * (g % 4), 3, 4))),
        };
        for (quarter, rows) in group.as_chunks_mut::<QUARTER>().0.iter_mut().enumerate() {
            let (vector, from, mask) = low;
            let mut codes = bits_at(load_quarter(&vectors[vector], quarter), from, mask);
            if let Some((vector, from, mask, to)) = high {
                let bits = bits_at(load_quarter(&vectors[vector], quarter), from, mask);
                codes = vorrq_u8(codes, vshlq_u8(bits, vdupq_n_s8(to)));
            }
            if let Some(table) = table {
                codes = vqtbl1q_u8(table, codes);
            }
            // SAFETY: four rows of four codes are 16 bytes.
            unsafe { vst1q_u8(rows.as_mut_ptr().cast(), veorq_u8(codes, vdupq_n_u8(flip))) };
        }
    }
}

/// A quarter of a group's codes: four rows.
#[inline]
#[target_feature(enable = "neon")]
fn load_quarter(vector: &[u8; VECTOR], quarter: usize) -> uint8x16_t {
    let (quarters, _) = vector.as_chunks::<{ VECTOR / 4 }>();
    // SAFETY: 16 bytes.
    unsafe { vld1q_u8(quarters[quarter].as_ptr()) }
}

/// The bits under `mask` of every byte after a shift right by `from`.
#[inline]
#[target_feature(enable = "neon")]
fn bits_at(bytes: uint8x16_t, from: usize, mask: u8) -> uint8x16_t {
    vandq_u8(vshlq_u8(bytes, vdupq_n_s8(-(from as i8))), vdupq_n_u8(mask))
}

/// Adds to each of the four sums the products of its four bytes with the four bytes of `b` at `LANE`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dot<const LANE: usize>(sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: arithmetic between registers.
    unsafe {
        asm!("sdot {sum:v}.4s, {a:v}.16b, {b:v}.4b[{lane}]", sum = inout(vreg) sum, a = in(vreg) a, b = in(vreg) b,
             lane = const LANE, options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// Adds to the 2 x 2 sums the product of the 2 x 8 bytes of `a` with the transposed 2 x 8 bytes of `b`.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn product(sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: arithmetic between registers.
    unsafe {
        asm!("smmla {sum:v}.4s, {a:v}.16b, {b:v}.16b", sum = inout(vreg) sum, a = in(vreg) a, b = in(vreg) b,
             options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// `sum of level * quant` over one half of a block, per row.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn half_sums(block: &Signed, half: usize, a: &QuantizedBlock) -> Lanes<i32> {
    // SAFETY: a half of the quants is 16 bytes.
    let quants = unsafe { vld1q_s8(a.quants[16 * half..][..16].as_ptr()) };
    let mut sums = [vdupq_n_s32(block.offset * i32::from(a.minus_half_sums[half])); 4];
    let groups = &block.levels[4 * half..][..4];
    for (quarter, sum) in sums.iter_mut().enumerate() {
        *sum = dot::<0>(*sum, four_rows(&groups[0], quarter), quants);
        *sum = dot::<1>(*sum, four_rows(&groups[1], quarter), quants);
        *sum = dot::<2>(*sum, four_rows(&groups[2], quarter), quants);
        *sum = dot::<3>(*sum, four_rows(&groups[3], quarter), quants);
    }
    let mut lanes = [0; PANEL_ROWS];
    for (lanes, sum) in lanes.as_chunks_mut::<QUARTER>().0.iter_mut().zip(sums) {
        // SAFETY: four i32.
        unsafe { vst1q_s32(lanes.as_mut_ptr(), sum) };
    }
    lanes
}

/// A quarter of a group's levels.
#[inline]
#[target_feature(enable = "neon")]
fn four_rows(group: &[[i8; 4]; PANEL_ROWS], quarter: usize) -> int8x16_t {
    // SAFETY: four rows of four levels are 16 bytes.
    unsafe { vld1q_s8(group[QUARTER * quarter..][..QUARTER].as_ptr().cast()) }
}

/// The levels of a block as operands of matrix products: for each eight columns, eight pairs of rows.
type Paired = [[int8x16_t; PANEL_ROWS / 2]; BLOCK / 8];

/// Interleaves the columns of two groups.
#[inline]
#[target_feature(enable = "neon")]
fn pair_columns(block: &Signed) -> Paired {
    let mut paired = [[vdupq_n_s8(0); PANEL_ROWS / 2]; BLOCK / 8];
    for (pairs, groups) in paired.iter_mut().zip(block.levels.as_chunks::<2>().0) {
        for (quarter, pairs) in pairs.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let [even, odd] = [0, 1].map(|g| {
                // SAFETY: four rows of four levels are 16 bytes.
                let bytes = unsafe { vld1q_u8(groups[g][QUARTER * quarter..][..QUARTER].as_ptr().cast()) };
                vreinterpretq_s32_u8(bytes)
            });
            *pairs =
                [vreinterpretq_s8_s32(vzip1q_s32(even, odd)), vreinterpretq_s8_s32(vzip2q_s32(even, odd))];
        }
    }
    paired
}

/// `sum of level * quant` over one half of a block, per row, for each of two tokens.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn pair_sums(paired: &Paired, offset: i32, half: usize, a: [&QuantizedBlock; 2]) -> [Lanes<i32>; 2] {
    let start = a.map(|a| offset * i32::from(a.minus_half_sums[half]));
    // SAFETY: four i32.
    let start = unsafe { std::arch::aarch64::vld1q_s32([start[0], start[1], start[0], start[1]].as_ptr()) };
    let mut sums = [start; PANEL_ROWS / 2];
    for (step, pairs) in paired[2 * half..][..2].iter().enumerate() {
        // SAFETY: eight quants each.
        let quants = unsafe {
            let [first, second] = a.map(|a| vld1_s8(a.quants[16 * half + 8 * step..][..8].as_ptr()));
            vcombine_s8(first, second)
        };
        for (sum, rows) in sums.iter_mut().zip(pairs) {
            *sum = product(*sum, *rows, quants);
        }
    }
    let mut out = [[0; PANEL_ROWS]; 2];
    for (quarter, sums) in sums.as_chunks::<2>().0.iter().enumerate() {
        // SAFETY: four i32 at index `4 * quarter`, of sixteen.
        unsafe {
            vst1q_s32(out[0][QUARTER * quarter..][..QUARTER].as_mut_ptr(), vuzp1q_s32(sums[0], sums[1]));
            vst1q_s32(out[1][QUARTER * quarter..][..QUARTER].as_mut_ptr(), vuzp2q_s32(sums[0], sums[1]));
        }
    }
    out
}

/// # Safety
/// See [`KernelSet`].
#[target_feature(enable = "neon")]
unsafe fn f32(call: &F32Call<'_>, tile: &mut Tile) {
    // SAFETY: the caller's contract.
    unsafe {
        f32_by_columns(
            call,
            tile,
            |scheme, packed, block| block.unpack(scheme, packed),
            |ty, bytes| plain_lanes(ty, bytes),
            |even, odd, columns, a| add_columns(even, odd, columns, a),
        );
    }
}

/// Adds `a.len()` columns, the first one even, to one token's sums.
#[inline]
#[target_feature(enable = "neon")]
fn add_columns(even: &mut Lanes<f32>, odd: &mut Lanes<f32>, columns: &Columns, a: &[f32]) {
    let mut sums = [load(even), load(odd)];
    for (k, (column, &a)) in columns.iter().zip(a).enumerate() {
        let (column, sum) = (load(column), &mut sums[k % 2]);
        for (sum, weights) in sum.iter_mut().zip(column) {
            *sum = vfmaq_n_f32(*sum, weights, a);
        }
    }
    store(sums[0], even);
    store(sums[1], odd);
}

#[inline]
#[target_feature(enable = "neon")]
fn load(lanes: &Lanes<f32>) -> [float32x4_t; 4] {
    let p = lanes.as_ptr();
    // SAFETY: four vectors of four are the sixteen lanes.
    unsafe { [vld1q_f32(p), vld1q_f32(p.add(4)), vld1q_f32(p.add(8)), vld1q_f32(p.add(12))] }
}

#[inline]
#[target_feature(enable = "neon")]
fn store(vectors: [float32x4_t; 4], lanes: &mut Lanes<f32>) {
    for (lanes, vector) in lanes.as_chunks_mut::<QUARTER>().0.iter_mut().zip(vectors) {
        // SAFETY: four lanes.
        unsafe { vst1q_f32(lanes.as_mut_ptr(), vector) };
    }
}

/// One column of a plain float format.
#[inline]
#[target_feature(enable = "neon")]
fn plain_lanes(ty: GgmlType, bytes: &[u8]) -> Lanes<f32> {
    let mut lanes = [0.0; PANEL_ROWS];
    let values = bytes.chunks_exact(2 * QUARTER * ty.block_bytes());
    for (lanes, values) in lanes.as_chunks_mut::<{ 2 * QUARTER }>().0.iter_mut().zip(values) {
        // SAFETY: `values` is eight values of the format: 16 bytes, or 32 of f32, at any address; `lanes` is
        // eight f32.
        unsafe {
            let [low, high] = match ty {
                GgmlType::F16 => load_f16_8(values.as_ptr().cast()),
                GgmlType::BF16 => load_bf16_8(values.as_ptr().cast()),
                _ => [vld1q_f32(values.as_ptr().cast()), vld1q_f32(values.as_ptr().add(16).cast())],
            };
            vst1q_f32(lanes.as_mut_ptr(), low);
            vst1q_f32(lanes.as_mut_ptr().add(QUARTER), high);
        }
    }
    lanes
}

/// # Safety
/// See [`KernelSet`].
#[target_feature(enable = "neon")]
unsafe fn quantize(src: &[f32], out: &mut [QuantizedBlock]) {
    quantize_row(src, out);
}
