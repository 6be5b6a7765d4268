//! Matrix products of a warp. Floats are multiplied and added in 64 bits and rounded once. Devices add in
//! another order and drop bits on the way, so their last bits differ.

use super::{Block, Run};
use crate::FaultKind;
use crate::lanes::{ALL, LANES, V32};
use crate::op::{Factor, LoadMatrix, MatrixProduct, Sum};
use crate::warp::Warp;
use half::{bf16, f16};

/// Rows of a product.
const ROWS: usize = 16;
/// Columns of a product.
const COLUMNS: usize = 8;
/// Maximum number of values of a row of the first factor.
const DEPTH: usize = 32;

fn all_lanes(what: &'static str, mask: u32) -> Run<()> {
    if mask == ALL {
        return Ok(());
    }
    let kind = FaultKind::MissingLanes { what, expected: ALL, present: mask };
    Err((kind, (!mask).trailing_zeros() as usize))
}

/// Returns one value of a register.
fn value(factor: Factor, register: u32, at: usize) -> f64 {
    match factor {
        Factor::F16 => f16::from_bits((register >> (16 * at)) as u16).to_f64(),
        Factor::Bf16 => bf16::from_bits((register >> (16 * at)) as u16).to_f64(),
        Factor::Tf32 => f64::from(f32::from_bits(register & 0xffff_e000)),
        Factor::S8 => f64::from((register >> (8 * at)) as u8 as i8),
        Factor::U8 => f64::from((register >> (8 * at)) as u8),
    }
}

pub(super) fn product(warp: &mut Warp, product: &MatrixProduct, mask: u32) -> Run<()> {
    all_lanes("mma.sync", mask)?;
    let MatrixProduct { d, a, b, c, factors, sum } = product;
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
    let mut out: [V32; 4] = [[0; LANES]; 4];
    for lane in 0..LANES {
        for (i, out) in out.iter_mut().enumerate() {
            let (row, column) = (lane / 4 + 8 * (i / 2), lane % 4 * 2 + i % 2);
            // Sums of 32 products of bytes and of exact products of halves fit 64 bits.
            let dot: f64 = (0..depth).map(|k| first[row][k] * second[column][k]).sum();
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
