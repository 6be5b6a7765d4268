//! Matrix products of a warp. Floats are multiplied and added in 64 bits and rounded once. Devices add in
//! another order and drop bits on the way, so their last bits differ.

use super::{Block, Run};
use crate::FaultKind;
use crate::lanes::{ALL, LANES, V32};
use crate::op::{Factor, LoadMatrix, MatrixProduct, ScaledBlocks, Sum};
use crate::warp::Warp;
use half::{bf16, f16};

/// Rows of a product.
pub(super) const ROWS: usize = 16;
/// Columns of a product.
const COLUMNS: usize = 8;
/// Maximum number of values of a row of the first factor.
const DEPTH: usize = 64;
/// Maximum number of blocks of a row that have a scale each.
const BLOCKS: usize = 4;

pub(super) fn all_lanes(what: &'static str, mask: u32) -> Run<()> {
    if mask == ALL {
        return Ok(());
    }
    let kind = FaultKind::MissingLanes { what, expected: ALL, present: mask };
    Err((kind, (!mask).trailing_zeros() as usize))
}

/// Returns one value of a register.
pub(super) fn value(factor: Factor, register: u32, at: usize) -> f64 {
    match factor {
        Factor::F16 => f16::from_bits((register >> (16 * at)) as u16).to_f64(),
        Factor::Bf16 => bf16::from_bits((register >> (16 * at)) as u16).to_f64(),
        Factor::Tf32 => f64::from(f32::from_bits(register & 0xffff_e000)),
        Factor::S8 => f64::from((register >> (8 * at)) as u8 as i8),
        Factor::U8 => f64::from((register >> (8 * at)) as u8),
        Factor::E4m3 => e4m3(register >> (8 * at)),
        // The two bits on either side are padding.
        Factor::E2m1 => e2m1(register >> (8 * at + 2)),
        Factor::E2m1Packed => e2m1(register >> (4 * at)),
    }
}

fn e2m1(bits: u32) -> f64 {
    let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][(bits & 7) as usize];
    if bits & 8 == 0 { size } else { -size }
}

/// The value of the low eight bits.
fn e4m3(bits: u32) -> f64 {
    let (exponent, mantissa) = (bits >> 3 & 15, f64::from(bits & 7));
    let size = match (exponent, bits & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa * 2f64.powi(-9),
        (exponent, _) => (8.0 + mantissa) * 2f64.powi(exponent as i32 - 10),
    };
    if bits & 0x80 == 0 { size } else { -size }
}

/// The value of a scale.
fn scale(powers: bool, bits: u32) -> f64 {
    match (powers, bits & 0xff) {
        (true, 0xff) => f64::NAN,
        (true, exponent) => 2f64.powi(exponent as i32 - 127),
        (false, bits) => e4m3(bits & 0x7f),
    }
}

/// Returns the scales of the rows of both factors.
fn block_scales(warp: &Warp, scales: &ScaledBlocks) -> ([[f64; BLOCKS]; ROWS], [[f64; BLOCKS]; COLUMNS]) {
    let &ScaledBlocks { a, b, blocks, powers } = scales;
    let of = |register, lane: usize, byte: u32| {
        std::array::from_fn(|block| match block < blocks {
            true => scale(powers, warp.v32(register)[lane] >> (8 * (byte as usize + block))),
            false => 0.0,
        })
    };
    (
        std::array::from_fn(|row| of(a.register, 4 * (row % 8) + 2 * a.thread as usize + row / 8, a.byte)),
        std::array::from_fn(|column| of(b.register, 4 * column + b.thread as usize, b.byte)),
    )
}

pub(super) fn product(warp: &mut Warp, product: &MatrixProduct, mask: u32) -> Run<()> {
    all_lanes("mma.sync", mask)?;
    let MatrixProduct { d, a, b, c, factors, sum, scales } = product;
    let each = factors.0.in_register();
    let depth = 4 * each * b.len();
    let mut first = [[0.0; DEPTH]; ROWS];
    let mut second = [[0.0; DEPTH]; COLUMNS];
    for lane in 0..LANES {
        let (group, quarter) = (lane / 4, lane % 4);
        for (r, &register) in a.iter().enumerate() {
            for i in 0..each {
                first[group + 8 * (r % 2)][quarter * each + i + r / 2 * 4 * each] =
                    value(factors.0, warp.v32(register)[lane], i);
            }
        }
        for (r, &register) in b.iter().enumerate() {
            for i in 0..each {
                second[group][quarter * each + i + r * 4 * each] =
                    value(factors.1, warp.v32(register)[lane], i);
            }
        }
    }
    let scaled = scales.map(|scales| (block_scales(warp, &scales), depth / scales.blocks));
    let mut out: [V32; 4] = [[0; LANES]; 4];
    for lane in 0..LANES {
        for (i, out) in out.iter_mut().enumerate() {
            let (row, column) = (lane / 4 + 8 * (i / 2), lane % 4 * 2 + i % 2);
            // Sums of 32 products of bytes, of exact products of halves, and of the small floats of a block fit 64
            // bits.
            let sum_of = |range: std::ops::Range<usize>| -> f64 {
                range.map(|k| first[row][k] * second[column][k]).sum()
            };
            let dot = match &scaled {
                None => sum_of(0..depth),
                Some(((of_a, of_b), each)) => (0..depth / each)
                    .map(|block| {
                        sum_of(block * each..(block + 1) * each) * of_a[row][block] * of_b[column][block]
                    })
                    .sum(),
            };
            out[lane] = match sum {
                Sum::F32 => ((dot + f64::from(f32::from_bits(warp.v32(c[i])[lane]))) as f32).to_bits(),
                Sum::F16 => {
                    let old = f16::from_bits((warp.v32(c[i / 2])[lane] >> (16 * (i % 2))) as u16);
                    f16::from_f64(dot + old.to_f64()).to_bits().into()
                }
                Sum::S32 => warp.v32(c[i])[lane].wrapping_add(dot as i32 as u32),
            };
        }
    }
    if *sum == Sum::F16 {
        let halves = |low: &V32, high: &V32| std::array::from_fn(|lane| low[lane] | high[lane] << 16);
        out = [halves(&out[0], &out[1]), halves(&out[2], &out[3]), out[2], out[3]];
    }
    for (&register, value) in d.iter().zip(&out) {
        warp.set32(register, value, ALL);
    }
    Ok(())
}

impl Block<'_> {
    /// Lane `8 m + r` provides the address of row `r` of matrix `m`. Each lane receives two adjacent values
    /// of each matrix.
    pub(super) fn load_matrix(&mut self, warp: &mut Warp, load: &LoadMatrix, mask: u32) -> Run<()> {
        all_lanes("ldmatrix.sync", mask)?;
        let accessor = self.accessor(warp);
        for (m, &register) in load.d.iter().enumerate() {
            let mut matrix = [[0u16; 8]; 8];
            for (r, row) in matrix.iter_mut().enumerate() {
                let lane = 8 * m + r;
                let address = warp.address(load.address, lane);
                let bytes = self.shared.read(address, 16, accessor).map_err(|wrong| (wrong, lane));
                let bytes = match bytes {
                    Ok(bytes) => bytes,
                    Err((wrong, lane)) => return Err(self.wrong(wrong, lane)),
                };
                for (value, bytes) in row.iter_mut().zip(bytes.chunks_exact(2)) {
                    *value = u16::from_le_bytes([bytes[0], bytes[1]]);
                }
            }
            let value = std::array::from_fn(|lane| {
                let (row, column) = (lane / 4, lane % 4 * 2);
                let at = |i: usize| {
                    u32::from(if load.transposed { matrix[column + i][row] } else { matrix[row][column + i] })
                };
                at(0) | at(1) << 16
            });
            warp.set32(register, &value, ALL);
        }
        Ok(())
    }
}
