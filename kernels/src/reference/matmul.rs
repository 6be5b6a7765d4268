//! Matrix products computed directly from file bytes.

use crate::error::Error;
use crate::quant::{Codes, GgmlType, Scaling, Scheme, dequantize, split};
use half::f16;

/// A product in f64.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Product {
    /// Sum of weight times activation.
    pub value: f64,
    /// Sum of the magnitudes of the terms; errors are measured relative to it.
    pub magnitude: f64,
}

/// Dequantised weights times activations (`[tokens][cols]`), as `[tokens][rows]`.
///
/// # Errors
/// As [`dequantize`].
pub fn exact(ty: GgmlType, cols: usize, bytes: &[u8], activations: &[f32]) -> Result<Vec<Product>, Error> {
    let rows = bytes.len() / ty.row_bytes(cols)?.max(1);
    let mut weights = vec![0.0; rows * cols];
    dequantize(ty, bytes, &mut weights)?;
    let mut out = Vec::new();
    for token in activations.chunks_exact(cols) {
        for row in weights.chunks_exact(cols) {
            let terms = row.iter().zip(token).map(|(&w, &a)| f64::from(w) * f64::from(a));
            let start = Product { value: 0.0, magnitude: 0.0 };
            out.push(terms.fold(start, |sum, term| Product {
                value: sum.value + term,
                magnitude: sum.magnitude + term.abs(),
            }));
        }
    }
    Ok(out)
}

/// 32 activations rounded to 8 bits.
struct Quantised {
    quants: [i32; 32],
    scale: f32,
}

fn quantise(values: &[f32]) -> Quantised {
    let largest = values.iter().fold(0_f32, |largest, x| largest.max(x.abs()));
    if largest < 1e-36 {
        return Quantised { quants: [0; 32], scale: 0.0 };
    }
    let inverse = 127.0 / largest;
    let quants = std::array::from_fn(|i| (values[i] * inverse).round_ties_even() as i32);
    Quantised { quants, scale: largest / 127.0 }
}

/// The product with activations rounded to int8, with the operations that [`crate::matmul`] defines. Only for
/// finite activations (`[tokens][cols]`). The result is `[tokens][rows]`.
///
/// # Errors
/// [`Error::NoMatmul`] for formats without an int8 product, [`Error::PartialBlock`] for partial blocks.
pub fn int8(ty: GgmlType, cols: usize, bytes: &[u8], activations: &[f32]) -> Result<Vec<f32>, Error> {
    int8_in_segments(ty, cols, bytes, activations, cols)
}

/// Like [`int8`], but sums each segment of `segment` columns (a multiple of a file block) separately and then
/// adds the segments' sums in order.
///
/// # Errors
/// As [`int8`].
pub fn int8_in_segments(
    ty: GgmlType,
    cols: usize,
    bytes: &[u8],
    activations: &[f32],
    segment: usize,
) -> Result<Vec<f32>, Error> {
    let scheme = Scheme::of(ty).ok_or(Error::NoMatmul { ty: ty.name() })?;
    let row_bytes = ty.row_bytes(cols)?;
    let mut out = Vec::new();
    for token in activations.chunks_exact(cols) {
        let blocks: Vec<Quantised> = token.chunks_exact(32).map(quantise).collect();
        for row in bytes.chunks_exact(row_bytes) {
            let segments =
                row.chunks(segment / ty.block_len() * ty.block_bytes()).zip(blocks.chunks(segment / 32));
            let sums = segments.map(|(row, blocks)| int8_row(ty, &scheme, row, blocks));
            out.push(sums.reduce(|sum, segment| sum + segment).unwrap_or(0.0));
        }
    }
    Ok(out)
}

fn int8_row(ty: GgmlType, scheme: &Scheme, row: &[u8], activations: &[Quantised]) -> f32 {
    let per_file_block = ty.block_len() / 32;
    let mut codes = Codes::default();
    let mut acc = 0_f32;
    for (bytes, activations) in row.chunks_exact(ty.block_bytes()).zip(activations.chunks(per_file_block)) {
        split(ty, bytes, &mut codes);
        for (sub, a) in activations.iter().enumerate() {
            acc = int8_block(scheme, &codes, sub, a, acc);
        }
    }
    acc
}

/// Block `sub` of 32 within a file block.
fn int8_block(scheme: &Scheme, codes: &Codes, sub: usize, a: &Quantised, mut acc: f32) -> f32 {
    let (d, dmin) = (f16::from_bits(codes.d).to_f32(), f16::from_bits(codes.dmin).to_f32());
    let stored = &codes.codes[32 * sub..][..32];
    let products: Vec<i32> = stored.iter().zip(&a.quants).map(|(&c, q)| scheme.level(c) * q).collect();
    let (i0, i1): (i32, i32) = (products[..16].iter().sum(), products[16..].iter().sum());
    let (s0, s1): (i32, i32) = (a.quants[..16].iter().sum(), a.quants[16..].iter().sum());
    let (scale, added) = codes.affine(scheme.scaling, 2 * sub);
    let signed = |i: usize| i32::from(codes.scales[i].cast_signed());
    match scheme.scaling {
        Scaling::F32
        | Scaling::F16
        | Scaling::F16Min
        | Scaling::E8m0
        | Scaling::Super
        | Scaling::SuperMin => {
            acc = ((i0 + i1) as f32).mul_add(scale * a.scale, acc);
            if let Some(added) = added {
                acc = added.mul_add(a.scale * (s0 + s1) as f32, acc);
            }
        }
        Scaling::Sixteenths | Scaling::SixteenthsMin => {
            let sum = signed(2 * sub) * i0 + signed(2 * sub + 1) * i1;
            acc = (sum as f32).mul_add(d * a.scale, acc);
            if scheme.scaling == Scaling::SixteenthsMin {
                let mins = i32::from(codes.mins[2 * sub]) * s0 + i32::from(codes.mins[2 * sub + 1]) * s1;
                acc = (mins as f32).mul_add(-dmin * a.scale, acc);
            }
        }
        Scaling::Ue4m3 => {
            let (second, _) = codes.affine(scheme.scaling, 2 * sub + 1);
            acc = (i0 as f32).mul_add(scale * a.scale, acc);
            acc = (i1 as f32).mul_add(second * a.scale, acc);
        }
    }
    acc
}
