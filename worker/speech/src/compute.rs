//! Matrix products, norms and softmax with this engine's kernels, on a few threads. The bits of a row do not
//! depend on the number of threads or on how the work is split: sums have a fixed order
//! ([`kernels::matmul`]).

use crate::Error;
use kernels::Isa;
use kernels::matmul::{
    ActivationMode, Activations, Epilogue, MatmulKernels, PackedMatrix, matmul_single_thread,
};
use kernels::ops::{Activation, LayerNorm, activate, layer_norm};
use kernels::pool::{Pool, PoolConfig};
use kernels::quant::GgmlType;
use parking_lot::Mutex;
use std::num::NonZeroUsize;
use std::sync::OnceLock;

/// Rows that a thread takes at a time.
const ROWS: usize = 64;
/// A part of a matrix has at least this many rows.
const MIN_PART_ROWS: usize = 512;

pub(crate) struct Compute {
    pub(crate) pool: Pool,
    pub(crate) kernels: MatmulKernels,
    pub(crate) isa: Isa,
}

/// A matrix with one output for each row, in parts that can be multiplied in parallel.
pub(crate) struct Matrix {
    parts: Vec<PackedMatrix>,
    rows: usize,
    cols: usize,
}

/// `x W^T + b`
pub(crate) struct Linear {
    pub(crate) weight: Matrix,
    pub(crate) bias: Option<Vec<f32>>,
}

/// Layer norm of rows.
pub(crate) struct Norm {
    pub(crate) weight: Vec<f32>,
    pub(crate) bias: Vec<f32>,
}

/// Added to the variance, as in the published network.
const EPS: f32 = 1e-5;

impl Matrix {
    /// Packs a matrix in a file's format. `parts`: the number of parts, one for each thread, for products
    /// with few rows.
    pub(crate) fn pack(
        ty: GgmlType,
        rows: usize,
        cols: usize,
        bytes: &[u8],
        parts: usize,
    ) -> Result<Self, Error> {
        let part_rows = match parts {
            0 | 1 => rows,
            parts => rows.div_ceil(parts).max(MIN_PART_ROWS).next_multiple_of(kernels::matmul::PANEL_ROWS),
        };
        let row_bytes = ty.row_bytes(cols)?;
        let packed = bytes
            .chunks(part_rows.max(1) * row_bytes)
            .map(|bytes| PackedMatrix::pack(ty, bytes.len() / row_bytes, cols, 1, bytes));
        Ok(Self { parts: packed.collect::<Result<_, _>>()?, rows, cols })
    }

    /// A matrix from f32 values, `[rows][cols]`.
    pub(crate) fn of(values: &[f32], cols: usize) -> Result<Self, Error> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self::pack(GgmlType::F32, values.len() / cols.max(1), cols, &bytes, 1)
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    pub(crate) fn row(&self, kernels: MatmulKernels, row: usize, out: &mut [f32]) -> Result<(), Error> {
        let mut row = row;
        for part in &self.parts {
            if row < part.rows() {
                return Ok(kernels.dequantize_row(part.view(0)?, row, out)?);
            }
            row -= part.rows();
        }
        Err(kernels::Error::OutOfRange { what: "row", index: row, len: self.rows }.into())
    }

    /// `out = scale * x W^T` on the calling thread. Only for a matrix of one part.
    pub(crate) fn multiply(
        &self,
        kernels: MatmulKernels,
        x: &[f32],
        scale: f32,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let rows = x.len() / self.cols;
        let activations = Activations::new(rows, self.cols, x, None)?;
        let epilogue = Epilogue { scale, ..Epilogue::STORE };
        for part in &self.parts {
            matmul_single_thread(kernels, part.view(0)?, &activations, ActivationMode::F32, &epilogue, out)?;
        }
        Ok(())
    }
}

impl Linear {
    /// Multiplies the rows of `x` on the calling thread. With `accumulate`, adds to `out`. Only for a matrix
    /// of one part.
    pub(crate) fn apply(
        &self,
        kernels: MatmulKernels,
        x: &[f32],
        accumulate: bool,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let Matrix { parts, cols, .. } = &self.weight;
        let activations = Activations::new(x.len() / cols, *cols, x, None)?;
        let epilogue = Epilogue { scale: 1.0, bias: self.bias.as_deref(), accumulate };
        for part in parts {
            matmul_single_thread(kernels, part.view(0)?, &activations, ActivationMode::F32, &epilogue, out)?;
        }
        Ok(())
    }
}

/// Brings the weights of a convolution over `times` from `[outputs, channels, times]` to `[outputs, times, channels]`.
pub(crate) fn by_time(weight: &[f32], channels: usize, times: usize) -> Vec<f32> {
    let rows = weight.chunks(channels * times);
    let turned = |row: &[f32]| -> Vec<f32> {
        (0..times).flat_map(|time| row.iter().skip(time).step_by(times).copied()).collect()
    };
    rows.flat_map(turned).collect()
}

impl Compute {
    pub(crate) fn new(threads: NonZeroUsize) -> Result<Self, Error> {
        let isa = Isa::detect();
        Ok(Self { pool: Pool::new(PoolConfig::new(threads))?, kernels: MatmulKernels::for_isa(isa)?, isa })
    }

    /// Runs `work` for every item, on all threads.
    pub(crate) fn each(
        &self,
        items: usize,
        work: impl Fn(usize) -> Result<(), Error> + Sync,
    ) -> Result<(), Error> {
        let failure = OnceLock::new();
        self.pool.for_each(items, &|item| {
            if let Err(error) = work(item) {
                let _first_counts = failure.set(error);
            }
        });
        failure.into_inner().map_or(Ok(()), Err)
    }

    /// Runs `make` for every item and returns the results in order.
    pub(crate) fn all<T: Send + Sync>(
        &self,
        items: usize,
        make: impl Fn(usize) -> Result<T, Error> + Sync,
    ) -> Result<Vec<T>, Error> {
        let made: Vec<OnceLock<T>> = (0..items).map(|_| OnceLock::new()).collect();
        self.each(items, |item| {
            let _set_once = made[item].set(make(item)?);
            Ok(())
        })?;
        Ok(made.into_iter().filter_map(OnceLock::into_inner).collect())
    }

    /// Multiplies the rows of `x` by a matrix. With `accumulate`, adds to `out`, which must have the result's
    /// size.
    pub(crate) fn linear(
        &self,
        x: &[f32],
        linear: &Linear,
        accumulate: bool,
        out: &mut Vec<f32>,
    ) -> Result<(), Error> {
        let Matrix { parts, rows: width, cols } = &linear.weight;
        let rows = x.len() / cols;
        if !accumulate {
            out.clear();
            out.resize(rows * width, 0.0);
        }
        let product = |x: &[f32], part: &PackedMatrix, bias: Option<&[f32]>, accumulate, out: &mut [f32]| {
            let activations = Activations::new(x.len() / cols, *cols, x, None)?;
            let epilogue = Epilogue { scale: 1.0, bias, accumulate };
            matmul_single_thread(
                self.kernels,
                part.view(0)?,
                &activations,
                ActivationMode::F32,
                &epilogue,
                out,
            )
        };
        if let [whole] = parts.as_slice() {
            let chunks: Vec<_> =
                x.chunks(ROWS * cols).zip(out.chunks_mut(ROWS * width).map(Mutex::new)).collect();
            return self.each(chunks.len(), |item| {
                let (x, out) = &chunks[item];
                Ok(product(x, whole, linear.bias.as_deref(), accumulate, &mut out.lock())?)
            });
        }
        let starts: Vec<usize> =
            parts.iter().scan(0, |at, part| Some(std::mem::replace(at, *at + part.rows()))).collect();
        let products = self.all(parts.len(), |item| {
            let (part, start) = (&parts[item], starts[item]);
            let mut out = vec![0.0; rows * part.rows()];
            let bias = linear.bias.as_ref().map(|bias| &bias[start..start + part.rows()]);
            product(x, part, bias, false, &mut out)?;
            Ok(out)
        })?;
        for ((product, part), start) in products.iter().zip(parts).zip(starts) {
            for (product, out) in product.chunks(part.rows()).zip(out.chunks_mut(*width)) {
                let out = &mut out[start..start + part.rows()];
                match accumulate {
                    true => out.iter_mut().zip(product).for_each(|(out, value)| *out += value),
                    false => out.copy_from_slice(product),
                }
            }
        }
        Ok(())
    }

    /// Norms the rows of `x`.
    pub(crate) fn norm(&self, x: &[f32], norm: &Norm, out: &mut Vec<f32>) -> Result<(), Error> {
        out.clear();
        out.resize(x.len(), 0.0);
        let Norm { weight, bias } = norm;
        let norm = LayerNorm { width: weight.len(), weight: Some(weight), bias: Some(bias), eps: EPS };
        Ok(layer_norm(&self.pool, self.isa, norm, x, out)?)
    }

    /// GELU with the error function, in place.
    pub(crate) fn gelu(&self, x: &mut [f32]) {
        activate(&self.pool, self.isa, Activation::GeluErf, x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1u32 << 23) as f32 - 1.0
        };
        (0..len).map(|_| next()).collect()
    }

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn products_are_right_and_independent_of_their_split() {
        let (width, cols, rows) = (1100, 48, 70);
        let (weights, bias, x) = (noise(width * cols, 1), noise(width, 2), noise(rows * cols, 3));
        let mut outs = Vec::new();
        for (threads, parts) in [(1, 1), (3, 1), (3, 2), (2, 3)] {
            let compute = Compute::new(NonZeroUsize::new(threads).unwrap()).unwrap();
            let weight = Matrix::pack(GgmlType::F32, width, cols, &bytes(&weights), parts).unwrap();
            let linear = Linear { weight, bias: Some(bias.clone()) };
            let mut out = Vec::new();
            compute.linear(&x, &linear, false, &mut out).unwrap();
            // A single row gives the same bits as among others.
            let mut alone = Vec::new();
            compute.linear(&x[cols..2 * cols], &linear, false, &mut alone).unwrap();
            assert_eq!(alone, out[width..2 * width]);
            let mut row = vec![0.0; cols];
            linear.weight.row(compute.kernels, 1050, &mut row).unwrap();
            assert_eq!(row, weights[1050 * cols..1051 * cols]);
            let mut twice = out.clone();
            compute.linear(&x, &linear, true, &mut twice).unwrap();
            assert!(
                twice.iter().zip(&out).all(|(twice, once)| *twice == once + once),
                "added to what is there"
            );
            outs.push(out);
        }
        assert!(outs.iter().all(|out| *out == outs[0]));
        for (at, found) in outs[0].iter().enumerate() {
            let (row, output) = (at / width, at % width);
            let terms =
                (0..cols).map(|k| f64::from(weights[output * cols + k]) * f64::from(x[row * cols + k]));
            let (sum, size) =
                terms.fold((0.0, 0.0), |(sum, size): (f64, f64), term| (sum + term, size + term.abs()));
            let expected = sum + f64::from(bias[output]);
            assert!(
                (f64::from(*found) - expected).abs() <= 1e-5 * (size + 1.0),
                "{found} instead of {expected}"
            );
        }
    }
}
