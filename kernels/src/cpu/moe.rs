//! Mixture of experts: route, gather rows per expert, gated FFN, weighted sum in rank order.
//!
//! A row's result depends on that row only: each (row, expert) product is a row of a batch-invariant product,
//! and the sum runs over the row's experts from the most to the least probable.

use super::product::{self, Product};
use super::rows::Buffer;
use super::rowwise::gating;
use super::{CpuBackend, try_each};
use crate::Error;
use crate::backend::{ExpertGateUp, MatrixId, MoeOp, VectorId};
use crate::matmul::{Activations, Epilogue, MatmulKernels};
use crate::ops;

/// Buffers that grow to the largest call and stay.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    shape: Option<(usize, usize, usize)>,
    buffers: Vec<Buffer>,
}

/// Row `row`'s expert of rank `rank`, with its weight.
#[derive(Debug, Clone, Copy)]
struct Route {
    row: usize,
    rank: usize,
    expert: usize,
    weight: f32,
}

const INPUT: usize = 0;
const GATE: usize = 1;
const UP: usize = 2;
const DOWN: usize = 3;
const SLOTS: usize = 4;

pub(super) fn run(backend: &mut CpuBackend, op: &MoeOp) -> Result<(), Error> {
    let routes = route(backend, op)?;
    let rows = backend.buffers[op.x.0 as usize].rows();
    let (x_width, out_width) =
        (backend.buffers[op.x.0 as usize].cols(), backend.buffers[op.out.0 as usize].cols());
    let mut scratch = std::mem::take(&mut backend.moe);
    scratch.fit(rows, op.used, x_width, op.ff, out_width)?;
    scratch.buffers[SLOTS].set_rows(rows * op.used)?;
    let mut by_expert = routes.clone();
    by_expert.sort_by_key(|route| (route.expert, route.row));
    let mut result = Ok(());
    for group in by_expert.chunk_by(|a, b| a.expert == b.expert) {
        result = expert(backend, op, group, &mut scratch.buffers);
        if result.is_err() {
            break;
        }
    }
    if result.is_ok() {
        result = combine(backend, op, &routes, &scratch.buffers[SLOTS]);
    }
    backend.moe = scratch;
    result
}

impl Scratch {
    fn fit(&mut self, rows: usize, used: usize, x: usize, ff: usize, out: usize) -> Result<(), Error> {
        let slots = rows * used;
        let fits = self.shape.is_some_and(|(held, a, b)| held >= slots && (a, b) == (x.max(out), ff));
        if !fits {
            let sizes = [(rows, x), (rows, 2 * ff), (rows, ff), (rows, out), (slots, out)];
            self.buffers =
                sizes.iter().map(|&(rows, cols)| Buffer::new(rows, cols)).collect::<Result<_, _>>()?;
            self.shape = Some((slots, x.max(out), ff));
        }
        Ok(())
    }
}

/// Every row's experts, best first, with their weights.
fn route(backend: &CpuBackend, op: &MoeOp) -> Result<Vec<Route>, Error> {
    let router = &backend.buffers[op.router.0 as usize];
    if op.used == 0 || op.used > router.cols() {
        return Err(Error::OutOfRange { what: "experts per row", index: op.used, len: router.cols() });
    }
    let isa = backend.config.rows;
    let mut routes = Vec::with_capacity(router.rows() * op.used);
    let mut probabilities = Vec::new();
    for row in 0..router.rows() {
        probabilities.clear();
        probabilities.extend_from_slice(router.row(row)?);
        ops::softmax(isa, &mut probabilities);
        let best = ops::top_k(isa, &probabilities, op.used);
        let total: f32 = if op.renormalise { best.iter().map(|(_, p)| p).sum() } else { 1.0 };
        routes.extend(best.iter().enumerate().map(|(rank, &(expert, p))| Route {
            row,
            rank,
            expert,
            weight: p / total,
        }));
    }
    Ok(routes)
}

/// One expert's FFN over the rows routed to it, into their slots.
fn expert(backend: &CpuBackend, op: &MoeOp, group: &[Route], buffers: &mut [Buffer]) -> Result<(), Error> {
    let Some(first) = group.first() else { return Ok(()) };
    let expert = first.expert;
    let experts = backend.buffers[op.router.0 as usize].cols();
    let part = |id: Option<VectorId>, len: usize| match id.map(|id| &backend.vectors[id.0 as usize]) {
        None => Ok(None),
        Some(vector) if vector.len() == experts * len => Ok(Some(&vector[expert * len..][..len])),
        Some(vector) => {
            Err(Error::Length { what: "values of experts", expected: experts * len, found: vector.len() })
        }
    };
    let of = |matrix, scale, bias, width| -> Result<ExpertMatrix<'_>, Error> {
        let factor = part(scale, 1)?.map_or(1.0, |factor| factor[0]);
        Ok(ExpertMatrix { matrix, expert, factor, bias: part(bias, width)?, width })
    };
    let x = &backend.buffers[op.x.0 as usize];
    let input = &mut buffers[INPUT];
    input.set_rows(group.len())?;
    let width = input.cols();
    for (values, route) in input.values_mut().chunks_exact_mut(width).zip(group) {
        values.copy_from_slice(x.row(route.row)?);
    }
    let ff = op.ff;
    match op.gate_up {
        ExpertGateUp::Separate { gate, up, gate_scale, up_scale, gate_bias, up_bias } => {
            multiply(backend, buffers, INPUT, GATE, of(gate, gate_scale, gate_bias, ff)?)?;
            multiply(backend, buffers, INPUT, UP, of(up, up_scale, up_bias, ff)?)?;
        }
        ExpertGateUp::Fused { gate_up, scale, bias } => {
            multiply(backend, buffers, INPUT, GATE, of(gate_up, scale, bias, 2 * ff)?)?;
            split(buffers, ff)?;
        }
    }
    let [gate, up] = buffers.get_disjoint_mut([GATE, UP]).map_err(|_| Error::SameBuffer)?;
    let (isa, gating) = (backend.config.rows, gating(op.activation));
    ops::gate_in_place(&backend.pool, isa, gating, gate.values_mut(), ops::Columns::all(up.values(), ff))?;
    let out_width = buffers[DOWN].cols();
    multiply(backend, buffers, GATE, DOWN, of(op.down, op.down_scale, op.down_bias, out_width)?)?;
    let [down, slots] = buffers.get_disjoint_mut([DOWN, SLOTS]).map_err(|_| Error::SameBuffer)?;
    let slot_values = slots.values_mut();
    for (index, route) in group.iter().enumerate() {
        let slot = (route.row * op.used + route.rank) * out_width;
        slot_values[slot..slot + out_width].copy_from_slice(down.row(index)?);
    }
    Ok(())
}

/// One expert's matrix and the factor of its product.
struct ExpertMatrix<'a> {
    matrix: MatrixId,
    expert: usize,
    factor: f32,
    bias: Option<&'a [f32]>,
    /// Values per row of the product.
    width: usize,
}

/// `buffers[to] = factor * (matrix of the expert) buffers[from]`.
fn multiply(
    backend: &CpuBackend,
    buffers: &mut [Buffer],
    from: usize,
    to: usize,
    ExpertMatrix { matrix, expert, factor, bias, width }: ExpertMatrix<'_>,
) -> Result<(), Error> {
    let mode = backend.config.activations;
    let matrix = &backend.matrices[matrix.0 as usize];
    let int8 = MatmulKernels::reads_int8(matrix.ty(), mode);
    if int8 {
        buffers[from].quantize(&backend.pool, backend.kernels)?;
    }
    let [from, to] = buffers.get_disjoint_mut([from, to]).map_err(|_| Error::SameBuffer)?;
    to.reshape(from.rows(), width)?;
    let activations =
        Activations::new(from.rows(), from.cols(), from.values(), int8.then_some(&from.quantized))?;
    let epilogue = Epilogue { scale: factor, bias, accumulate: false };
    let product = Product { view: matrix.view(expert)?, out: to.output(), epilogue };
    product::run(&backend.pool, backend.kernels, mode, &activations, &[product])
}

/// Rows of gate and up side by side become two buffers.
fn split(buffers: &mut [Buffer], ff: usize) -> Result<(), Error> {
    let [both, up] = buffers.get_disjoint_mut([GATE, UP]).map_err(|_| Error::SameBuffer)?;
    let rows = both.rows();
    up.reshape(rows, ff)?;
    for (up, both) in up.values_mut().chunks_exact_mut(ff).zip(both.values().chunks_exact(2 * ff)) {
        up.copy_from_slice(&both[ff..]);
    }
    let values = both.values_mut();
    for row in 0..rows {
        values.copy_within(row * 2 * ff..row * 2 * ff + ff, row * ff);
    }
    both.reshape(rows, ff)
}

/// The weighted sums, in rank order.
fn combine(backend: &mut CpuBackend, op: &MoeOp, routes: &[Route], slots: &Buffer) -> Result<(), Error> {
    let out = &mut backend.buffers[op.out.0 as usize];
    let rows = slots.rows() / op.used;
    match op.accumulate {
        false => out.set_rows(rows)?,
        true => out.check_rows(rows)?,
    }
    let shared = out.share();
    try_each(&backend.pool, rows, |row| {
        // SAFETY: every row is visited once.
        #[allow(unsafe_code, reason = "disjoint rows")]
        let out = unsafe { shared.row(row) };
        let mut sum = vec![0f32; out.len()];
        for (rank, route) in routes[row * op.used..(row + 1) * op.used].iter().enumerate() {
            let values = slots.row(row * op.used + rank)?;
            for (sum, value) in sum.iter_mut().zip(values) {
                *sum = value.mul_add(route.weight, *sum);
            }
        }
        for (out, sum) in out.iter_mut().zip(sum) {
            let before = if op.accumulate { *out } else { 0.0 };
            *out = sum.mul_add(op.scale, before);
        }
        Ok(())
    })
}
