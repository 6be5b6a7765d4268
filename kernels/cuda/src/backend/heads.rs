//! Products and parts of the heads of rows.

use super::super::matmul::{Activations, Experts, GROUP_TOKENS, Product, Quantised};
use super::super::moe::{MoeKernels, head_groups};
use super::super::rowwise::Rows;
use super::super::source;
use super::CudaBackend;
use super::memory::{ScratchLayout, same};
use super::moe::MAX_PAIRWISE_ROWS;
use kernels::Error;
use kernels::backend::{BufferId, HeadMatmulOp, HeadPart};

/// See [`HeadMatmulOp`]. Each head is an expert of every row.
pub(super) fn head_matmul(backend: &mut CudaBackend, op: &HeadMatmulOp) -> Result<(), Error> {
    let CudaBackend { device, modules, rowwise, buffers, matrices, moe, scratch, activations: mode, .. } =
        backend;
    let device = device.as_mut();
    let moe = match moe {
        Some(kernels) => &*kernels,
        None => &*moe.insert(MoeKernels::load(device, modules.of(&source::MOE)?)?),
    };
    let &HeadMatmulOp { x, matrix, heads, scale, out: HeadPart { buffer, width, at } } = op;
    let (matrix, kernels) = matrices.get(matrix)?;
    let (outputs, cols) = (matrix.shape.rows(), matrix.shape.cols());
    same("matrices of heads", heads, matrix.shape.experts())?;
    check_part(outputs, width, at)?;
    if x == buffer {
        return Err(Error::SameBuffer);
    }
    let x = buffers.get(x)?;
    same("columns of all heads", heads * cols, x.cols)?;
    let (rows, pairs) = (x.rows, x.rows * heads);
    let out = buffers.shape(buffer, rows, heads * width)?;

    let form = Quantised::of(*mode, matrix.shape.ty());
    let mut layout = ScratchLayout::default();
    let [chosen, list] = [4 * pairs; 2].map(|bytes| layout.next(bytes));
    let count = head_groups(rows, heads);
    let groups = layout.next(8 * count);
    let quantised = layout.next(form.map_or(0, |form| pairs * form.row_bytes(cols)));
    let base = scratch.of(device, layout.bytes())?;
    let [chosen, groups, list, quantised] =
        [chosen, groups, list, quantised].map(|offset| base.offset(offset));
    moe.heads(device, rows, heads, [chosen, groups, list])?;
    let activations = match form {
        None => Activations::F32(x.ptr),
        Some(form) => {
            rowwise.quantise(device, Rows { rows: pairs, cols }, x.ptr, (form, quantised))?;
            form.at(quantised)
        }
    };
    let experts = match form.is_some() && rows <= MAX_PAIRWISE_ROWS {
        true => Experts::Each(chosen),
        false => Experts::Listed { groups, count, list, most: rows.min(GROUP_TOKENS) },
    };
    let out = out.ptr.offset(at * size_of::<f32>());
    let (bias, accumulate, share) = (None, false, 1);
    let x = activations;
    let product =
        Product { matrix, x, tokens: pairs, share, experts, scale, bias, accumulate, out, ld: width };
    Ok(kernels.multiply(device, &[product])?)
}

/// See [`kernels::backend::Backend::place_heads`].
pub(super) fn place_heads(
    backend: &mut CudaBackend,
    x: BufferId,
    heads: usize,
    out: &HeadPart,
) -> Result<(), Error> {
    let CudaBackend { device, rowwise, buffers, .. } = backend;
    let &HeadPart { buffer, width, at } = out;
    if x == buffer {
        return Err(Error::SameBuffer);
    }
    let x = buffers.get(x)?;
    let cols = x.cols / heads.max(1);
    same("columns of all heads", heads * cols, x.cols)?;
    check_part(cols, width, at)?;
    let out = buffers.shape(buffer, x.rows, heads * width)?;
    Ok(rowwise.place_heads(
        device.as_mut(),
        Rows { rows: x.rows * heads, cols },
        x.ptr,
        out.ptr,
        width,
        at,
    )?)
}

/// Checks that `cols` columns from `at` on are inside a head of `width`.
fn check_part(cols: usize, width: usize, at: usize) -> Result<(), Error> {
    let end = at.saturating_add(cols);
    match end <= width {
        true => Ok(()),
        false => Err(Error::OutOfRange { what: "column of a head", index: end, len: width }),
    }
}
