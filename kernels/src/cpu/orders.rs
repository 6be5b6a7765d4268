//! Rows with their values in the orders of matrices' columns.

use super::rows::Buffer;
use super::{CpuBackend, try_each};
use crate::Error;
use crate::backend::{BufferId, MatmulJob, MatrixId, check_order};
use crate::matmul::Activations;
use std::collections::HashMap;

/// The orders of matrices' columns, each once. Matrices that read the same rows often share one.
#[derive(Debug, Default)]
pub(super) struct Orders {
    all: Vec<Vec<u32>>,
    /// By the number of the matrix.
    of: HashMap<u32, usize>,
    /// A product's rows in each order that its matrices have.
    gathered: Vec<Buffer>,
}

impl Orders {
    pub(super) fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    pub(super) fn bytes(&self) -> usize {
        self.all.iter().map(|order| size_of_val(order.as_slice())).sum()
    }

    pub(super) fn scratch_bytes(&self) -> usize {
        self.gathered.iter().map(Buffer::bytes).sum()
    }

    /// The rows of `gathered` that a product with the matrix reads.
    pub(super) fn activations(&self, matrix: MatrixId) -> Result<Option<Activations<'_>>, Error> {
        let Some(order) = self.of.get(&matrix.0) else { return Ok(None) };
        let rows = &self.gathered[*order];
        Activations::new(rows.rows(), rows.cols(), rows.values(), rows.current_quantized()).map(Some)
    }
}

/// See [`crate::backend::Backend::set_order`].
pub(super) fn set(backend: &mut CpuBackend, matrix: MatrixId, order: &[u32]) -> Result<(), Error> {
    let (index, len) = (matrix.0 as usize, backend.matrices.len());
    let found = backend.matrices.get(index).ok_or(Error::OutOfRange { what: "matrix", index, len })?;
    check_order(order, found.cols())?;
    let Orders { all, of, gathered } = &mut backend.orders;
    let known = all.iter().position(|known| known == order).unwrap_or(all.len());
    if known == all.len() {
        all.push(order.to_vec());
        gathered.push(Buffer::default());
    }
    of.insert(matrix.0, known);
    Ok(())
}

/// Writes the rows of `x` in the orders of the jobs' matrices, with `int8` also in their 8-bit form.
pub(super) fn gather(
    backend: &mut CpuBackend,
    x: BufferId,
    jobs: &[MatmulJob],
    int8: bool,
) -> Result<(), Error> {
    let (x, pool) = (&backend.buffers[x.0 as usize], &backend.pool);
    let Orders { all, of, gathered } = &mut backend.orders;
    let mut done: Vec<usize> = Vec::new();
    for number in jobs.iter().filter_map(|job| of.get(&job.matrix.0)) {
        if done.contains(number) {
            continue;
        }
        done.push(*number);
        let (order, out) = (&all[*number], &mut gathered[*number]);
        if order.len() != x.cols() {
            return Err(Error::Length { what: "columns", expected: order.len(), found: x.cols() });
        }
        out.fit(x.rows(), x.cols())?;
        let shared = out.share();
        try_each(pool, x.rows(), |row| {
            let values = x.row(row)?;
            // SAFETY: every row is visited once.
            #[allow(unsafe_code, reason = "disjoint rows of one buffer")]
            let out = unsafe { shared.row(row) };
            out.iter_mut().zip(order).for_each(|(out, &col)| *out = values[col as usize]);
            Ok(())
        })?;
        if int8 {
            out.quantize(pool, backend.kernels)?;
        }
    }
    Ok(())
}
