//! Mixture of experts. Routes are never copied to the host.

use super::super::matmul::{Activations, Experts, GROUP_TOKENS, MatmulKernels, Matrix, Product, Quantised};
use super::super::moe::{ExpertGate, ExpertScale, ExpertSum, GateUp, MoeKernels, MoeShape, Router, Routes};
use super::super::rowwise::Rows;
use super::super::{DevicePtr, source};
use super::CudaBackend;
use super::memory::{ScratchLayout, Vectors, same};
use super::product::activations;
use kernels::Error;
use kernels::backend::{ActivationMode, ExpertGateUp, MatrixId, MoeOp, Selection, VectorId};

/// Up to this number of rows, each (row, expert) pair is a product of its own. With more rows, the products
/// of one expert share the weights that they read.
pub(super) const MAX_PAIRWISE_ROWS: usize = 4;

/// See [`MoeOp`].
pub(super) fn run(backend: &mut CudaBackend, op: &MoeOp) -> Result<(), Error> {
    let CudaBackend {
        device,
        modules,
        rowwise,
        buffers,
        vectors,
        matrices,
        moe,
        scratch,
        activations: mode,
        ..
    } = backend;
    let device = device.as_mut();
    let kernels = match moe {
        Some(kernels) => &*kernels,
        None => &*moe.insert(MoeKernels::load(device, modules.of(&source::MOE)?)?),
    };
    let (router, x) = (buffers.get(op.router)?, buffers.get(op.x)?);
    same("rows of a router", x.rows, router.rows)?;
    if op.x == op.out || op.router == op.out {
        return Err(Error::SameBuffer);
    }
    let shape = MoeShape { rows: x.rows, experts: router.cols, used: op.used };
    shape.check()?;
    let (pairs, ff) = (shape.pairs(), op.ff);
    let expert =
        |id: MatrixId, rows: usize, cols: Option<usize>| -> Result<(&Matrix, &MatmulKernels), Error> {
            let found = matrices.get(id)?;
            same("experts of a matrix", shape.experts, found.0.shape.experts())?;
            same("rows of an expert", rows, found.0.shape.rows())?;
            same("columns of an expert", cols.unwrap_or(found.0.shape.cols()), found.0.shape.cols())?;
            Ok(found)
        };
    let hidden = matrices.get(op.down)?.0.shape.rows();
    let down = expert(op.down, hidden, Some(ff))?;
    let out = buffers.target(op.out, (x.rows, hidden), op.accumulate)?;

    let mut layout = ScratchLayout::default();
    let [chosen, weights, list] = [4 * pairs; 3].map(|bytes| layout.next(bytes));
    let groups = layout.next(8 * shape.groups());
    // Gate and up: side by side in one product, or one after the other.
    let [gate_at, up_at] = [4 * pairs * ff; 2].map(|bytes| layout.next(bytes));
    let form = Quantised::of(*mode, down.0.shape.ty());
    // A row is rounded to NVFP4 when it is complete.
    let (of_gate, after) = if form == Some(Quantised::Nvfp4) { (None, form) } else { (form, None) };
    let inner_at = layout.next(pairs * of_gate.map_or(4 * ff, |form| form.row_bytes(ff)));
    let rounded_at = layout.next(after.map_or(0, |form| pairs * form.row_bytes(ff)));
    let down_at = layout.next(4 * pairs * hidden);
    let base = scratch.of(device, layout.bytes())?;
    let at = |offset: usize| base.offset(offset);
    let routes = Routes { chosen: at(chosen), weights: at(weights), groups: at(groups), list: at(list) };

    let Selection { sigmoid, bias, groups } = op.selection;
    groups.map_or(Ok(()), |groups| groups.check(shape.experts, op.used))?;
    let bias = vectors.optional("biases of the experts", bias, shape.experts)?;
    let router = Router { logits: router.ptr, bias, sigmoid, groups, renormalise: op.renormalise };
    kernels.route(device, &shape, &router, &routes)?;
    let listed = x.rows > MAX_PAIRWISE_ROWS || *mode == ActivationMode::F32;
    if listed {
        kernels.lists(device, &shape, &routes)?;
    }
    let experts = match listed {
        true => Experts::Listed {
            groups: routes.groups,
            count: shape.groups(),
            list: routes.list,
            most: x.rows.min(GROUP_TOKENS),
        },
        false => Experts::Each(routes.chosen),
    };
    let affine = |scale, bias, width| expert_scale(vectors, shape.experts, scale, bias, width);

    let gate_up = match op.gate_up {
        ExpertGateUp::Separate { gate, up, gate_scale, up_scale, gate_bias, up_bias } => {
            let addresses = [gate_at, up_at].map(at);
            let mut product_of = |id, out| -> Result<(Product<'_>, &MatmulKernels), Error> {
                let (matrix, kernels) = expert(id, ff, None)?;
                let rows = activations(device, buffers, rowwise, *mode, (op.x, matrix))?;
                Ok((product(matrix, rows, (pairs, op.used), experts, out), kernels))
            };
            let (gate, kernels) = product_of(gate, addresses[0])?;
            let (up, of_up) = product_of(up, addresses[1])?;
            if gate.goes_with(&up) {
                kernels.multiply(device, &[gate, up])?;
            } else {
                kernels.multiply(device, &[gate])?;
                of_up.multiply(device, &[up])?;
            }
            let (gate_scale, up_scale) = (affine(gate_scale, gate_bias, ff)?, affine(up_scale, up_bias, ff)?);
            GateUp::Separate { gate: addresses[0], up: addresses[1], gate_scale, up_scale }
        }
        ExpertGateUp::Fused { gate_up, scale, bias } => {
            let (matrix, kernels) = expert(gate_up, 2 * ff, None)?;
            let rows = activations(device, buffers, rowwise, *mode, (op.x, matrix))?;
            kernels.multiply(device, &[product(matrix, rows, (pairs, op.used), experts, at(gate_at))])?;
            GateUp::Fused { gate_up: at(gate_at), scale: affine(scale, bias, 2 * ff)? }
        }
    };
    let inner = of_gate.map_or(Activations::F32(at(inner_at)), |form| form.at(at(inner_at)));
    let gate = ExpertGate { gate_up, ff, activation: op.activation, inner };
    kernels.gate(device, pairs, &gate, &routes)?;
    let inner = match after {
        None => inner,
        Some(form) => {
            let to = at(rounded_at);
            rowwise.quantise(device, Rows { rows: pairs, cols: ff }, at(inner_at), (form, to))?;
            form.at(to)
        }
    };
    down.1.multiply(device, &[product(down.0, inner, (pairs, 1), experts, at(down_at))])?;
    let sum = ExpertSum {
        down: at(down_at),
        down_scale: affine(op.down_scale, op.down_bias, hidden)?,
        hidden,
        scale: op.scale,
        accumulate: op.accumulate,
        out: out.ptr,
    };
    Ok(kernels.sum(device, &shape, &sum, &routes)?)
}

/// A product of `tokens` pairs, of which `share` read one row.
fn product(
    matrix: &Matrix,
    x: Activations,
    (tokens, share): (usize, usize),
    experts: Experts,
    out: DevicePtr,
) -> Product<'_> {
    let (ld, scale, bias, accumulate) = (matrix.shape.rows(), 1.0, None, false);
    Product { matrix, x, tokens, share, experts, scale, bias, accumulate, out, ld }
}

fn expert_scale(
    vectors: &Vectors,
    experts: usize,
    scale: Option<VectorId>,
    bias: Option<VectorId>,
    width: usize,
) -> Result<ExpertScale, Error> {
    Ok(ExpertScale {
        scale: vectors.optional("factors of experts", scale, experts)?,
        bias: vectors.optional("biases of experts", bias, experts * width)?,
    })
}
