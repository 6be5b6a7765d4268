//! Ops on one row at a time: embedding, norms, gates, sums.

use super::rows::pair;
use super::{CpuBackend, try_each};
use crate::Error;
use crate::backend::{BufferId, EmbedIndex, EmbedOp, GateActivation, GateOp, HeadPart, Norm, VectorId};
use crate::ops::{self, Activation, Columns, Gating};

/// See [`EmbedOp`].
pub(super) fn embed(backend: &mut CpuBackend, op: &EmbedOp) -> Result<(), Error> {
    let matrix = backend.matrices[op.table.0 as usize].view(0)?;
    let (step, kernels) = (&backend.step, backend.kernels);
    let out = &mut backend.buffers[op.out.0 as usize];
    let rows = step.tokens.len();
    match op.accumulate {
        false => out.set_shape(rows, matrix.cols())?,
        true => out.check_rows(rows)?,
    }
    let cols = out.cols();
    let shared = out.share();
    try_each(&backend.pool, rows, |row| {
        let index = match op.index {
            EmbedIndex::Token => step.tokens[row] as usize,
            EmbedIndex::Position => step.rows[row].position as usize,
            EmbedIndex::Segment => step.segment(row),
        };
        // SAFETY: every row is visited once.
        #[allow(unsafe_code, reason = "disjoint rows")]
        let out = unsafe { shared.row(row) };
        if op.accumulate {
            let mut values = vec![0.0; cols];
            kernels.dequantize_row(matrix, index, &mut values)?;
            out.iter_mut().zip(values).for_each(|(out, value)| *out += op.scale * value);
            return Ok(());
        }
        kernels.dequantize_row(matrix, index, out)?;
        if op.scale != 1.0 {
            out.iter_mut().for_each(|value| *value *= op.scale);
        }
        Ok(())
    })
}

/// See [`crate::backend::Backend::norm`].
pub(super) fn norm(backend: &mut CpuBackend, x: BufferId, norm: &Norm, out: BufferId) -> Result<(), Error> {
    let cols = backend.buffers[x.0 as usize].cols();
    let (pool, isa) = (&backend.pool, backend.config.rows);
    match RowNorm::of(&backend.vectors, norm, cols)? {
        RowNorm::Rms(norm) if x == out => {
            ops::rms_norm_in_place(pool, isa, norm, backend.buffers[x.0 as usize].values_mut())
        }
        RowNorm::Layer(norm) if x == out => {
            ops::layer_norm_in_place(pool, isa, norm, backend.buffers[x.0 as usize].values_mut())
        }
        norm => {
            let (x, out) = pair(&mut backend.buffers, x, out)?;
            out.set_shape(x.rows(), x.cols())?;
            match norm {
                RowNorm::Rms(norm) => ops::rms_norm(pool, isa, norm, x.values(), out.values_mut()),
                RowNorm::Layer(norm) => ops::layer_norm(pool, isa, norm, x.values(), out.values_mut()),
            }
        }
    }
}

/// See [`crate::backend::Backend::add`].
pub(super) fn add(
    backend: &mut CpuBackend,
    x: BufferId,
    y: BufferId,
    norm: Option<&Norm>,
    scale: f32,
) -> Result<(), Error> {
    let (pool, isa, vectors) = (&backend.pool, backend.config.rows, &backend.vectors);
    let (y, x) = pair(&mut backend.buffers, y, x)?;
    match norm {
        None => ops::add_scaled(pool, isa, x.values_mut(), scale, y.values()),
        Some(norm) => {
            let norm = rms(vectors, norm, y.cols(), "a post norm that is no RMS norm")?;
            ops::rms_norm_add(pool, isa, norm, y.values(), scale, x.values_mut())
        }
    }
}

/// See [`GateOp`].
pub(super) fn gate(backend: &mut CpuBackend, op: &GateOp) -> Result<(), Error> {
    let (pool, isa) = (&backend.pool, backend.config.rows);
    let gating = gating(op.activation);
    let Some(up) = op.up else {
        let Gating::By(activation) = gating else {
            return Err(Error::Unsupported { what: "a clamped SwiGLU of nothing" });
        };
        if op.up_from > 0 {
            return Err(Error::Unsupported { what: "columns of nothing" });
        }
        ops::activate(pool, isa, activation, backend.buffers[op.gate.0 as usize].values_mut());
        return Ok(());
    };
    let (up, gate) = pair(&mut backend.buffers, up, op.gate)?;
    let columns = Columns { values: up.values(), width: up.cols(), from: op.up_from, len: gate.cols() };
    ops::gate_in_place(pool, isa, gating, gate.values_mut(), columns)
}

/// See [`crate::backend::Backend::scale_rows`].
pub(super) fn scale_rows(backend: &mut CpuBackend, x: BufferId, gate: BufferId) -> Result<(), Error> {
    let (gate, x) = pair(&mut backend.buffers, gate, x)?;
    let gates = Columns { values: gate.values(), width: gate.cols(), from: 0, len: 1 };
    ops::scale_rows(&backend.pool, backend.config.rows, x.cols(), x.values_mut(), gates)
}

/// See [`crate::backend::Backend::place_heads`].
pub(super) fn place_heads(
    backend: &mut CpuBackend,
    x: BufferId,
    heads: usize,
    out: &HeadPart,
) -> Result<(), Error> {
    let &HeadPart { buffer, width, at } = out;
    let (x, out) = pair(&mut backend.buffers, x, buffer)?;
    let cols = x.cols() / heads.max(1);
    check_heads(x.cols(), heads, cols)?;
    check_part(cols, width, at)?;
    out.set_shape(x.rows(), heads * width)?;
    out.change(&backend.pool, |row, out| {
        let parts = x.row(row)?.chunks_exact(cols).zip(out.chunks_exact_mut(width));
        parts.for_each(|(from, to)| to[at..at + cols].copy_from_slice(from));
        Ok(())
    })
}

/// Checks that rows of `found` values are `heads` heads of `cols` values.
pub(super) fn check_heads(found: usize, heads: usize, cols: usize) -> Result<(), Error> {
    let expected = heads.saturating_mul(cols);
    match expected == found && expected > 0 {
        true => Ok(()),
        false => Err(Error::Length { what: "columns of all heads", expected, found }),
    }
}

/// Checks that `cols` columns from `at` on are inside a head of `width`.
pub(super) fn check_part(cols: usize, width: usize, at: usize) -> Result<(), Error> {
    let end = at.saturating_add(cols);
    match end <= width {
        true => Ok(()),
        false => Err(Error::OutOfRange { what: "column of a head", index: end, len: width }),
    }
}

/// Maps a gate activation to its kernel.
pub(super) fn gating(activation: GateActivation) -> Gating {
    match activation {
        GateActivation::Silu => Gating::By(Activation::Silu),
        GateActivation::GeluTanh => Gating::By(Activation::GeluTanh),
        GateActivation::GeluErf => Gating::By(Activation::GeluErf),
        GateActivation::Sigmoid => Gating::By(Activation::Sigmoid),
        GateActivation::ReluSquared => Gating::By(Activation::ReluSquared),
        GateActivation::Identity => Gating::By(Activation::Identity),
        GateActivation::ClampedSwiglu => Gating::ClampedSwiglu,
    }
}

/// A norm whose vectors have been looked up.
enum RowNorm<'a> {
    Rms(ops::RmsNorm<'a>),
    Layer(ops::LayerNorm<'a>),
}

impl<'a> RowNorm<'a> {
    /// The norm of rows of `cols` values.
    fn of(vectors: &'a [Vec<f32>], norm: &Norm, cols: usize) -> Result<Self, Error> {
        let Norm { rms, weight, bias, eps, width } = *norm;
        if width == 0 || !cols.is_multiple_of(width) {
            return Err(Error::Length { what: "row to norm", expected: width, found: cols });
        }
        let vector = |what, id: Option<VectorId>| match id {
            None => Ok(None),
            Some(id) => {
                let vector = vectors[id.0 as usize].as_slice();
                let fits = vector.len() == width || vector.len() == cols;
                let misfit = Error::Length { what, expected: width, found: vector.len() };
                if fits { Ok(Some(vector)) } else { Err(misfit) }
            }
        };
        let (weight, bias) = (vector("norm weight", weight)?, vector("norm bias", bias)?);
        match (rms, bias) {
            (true, None) => Ok(Self::Rms(ops::RmsNorm { width, weight, eps })),
            (true, Some(_)) => Err(Error::Unsupported { what: "an RMS norm with a bias" }),
            (false, bias) => Ok(Self::Layer(ops::LayerNorm { width, weight, bias, eps })),
        }
    }
}

/// The RMS norm of rows of `cols` values. `unsupported` is the error text for another kind of norm.
pub(super) fn rms<'a>(
    vectors: &'a [Vec<f32>],
    norm: &Norm,
    cols: usize,
    unsupported: &'static str,
) -> Result<ops::RmsNorm<'a>, Error> {
    match RowNorm::of(vectors, norm, cols)? {
        RowNorm::Rms(norm) => Ok(norm),
        RowNorm::Layer(_) => Err(Error::Unsupported { what: unsupported }),
    }
}
