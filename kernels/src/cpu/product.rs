//! Products of a buffer's rows with several matrices in one parallel region.

use super::{CpuBackend, try_each};
use crate::Error;
use crate::backend::{BufferId, MatmulJob};
use crate::matmul::{ActivationMode, Activations, Epilogue, MatmulKernels, MatrixView, SharedOut};
use crate::pool::Pool;
use std::ops::Range;

/// Parts per thread: a slow thread costs an eighth of its share at most.
const PARTS_PER_THREAD: usize = 8;

/// One product with its output, ready to be cut into panels.
pub(super) struct Product<'a> {
    pub(super) view: MatrixView<'a>,
    pub(super) activations: Activations<'a>,
    pub(super) out: SharedOut<'a>,
    pub(super) epilogue: Epilogue<'a>,
}

impl Product<'_> {
    /// What a panel costs, in bytes read: up to a few rows that is all it costs, beyond it grows with them.
    fn panel_cost(&self) -> usize {
        self.view.panel_bytes() * self.activations.rows().max(4)
    }
}

/// Runs products, cut by cost over the pool's threads.
pub(super) fn run(
    pool: &Pool,
    kernels: MatmulKernels,
    mode: ActivationMode,
    products: &[Product<'_>],
) -> Result<(), Error> {
    let part = |product: &Product<'_>, panels: Range<usize>| {
        let Product { view, activations, out, epilogue } = product;
        kernels.run(*view, panels, activations, mode, *out, epilogue)
    };
    if pool.threads() == 1 {
        return products.iter().try_for_each(|product| part(product, 0..product.view.panels()));
    }
    let cost: usize = products.iter().map(|product| product.view.panels() * product.panel_cost()).sum();
    let share = cost.div_ceil(pool.threads() * PARTS_PER_THREAD).max(1);
    let parts: Vec<(usize, Range<usize>)> = products
        .iter()
        .enumerate()
        .flat_map(|(index, product)| {
            let step = (share / product.panel_cost().max(1)).max(1);
            let panels = product.view.panels();
            (0..panels).step_by(step).map(move |start| (index, start..panels.min(start + step)))
        })
        .collect();
    try_each(pool, parts.len(), |index| {
        let (product, panels) = &parts[index];
        part(&products[*product], panels.clone())
    })
}

/// See [`crate::backend::Backend::matmul`].
pub(super) fn matmul(backend: &mut CpuBackend, x: BufferId, jobs: &[MatmulJob]) -> Result<(), Error> {
    let mode = backend.config.activations;
    let int8 =
        jobs.iter().any(|job| MatmulKernels::reads_int8(backend.matrices[job.matrix.0 as usize].ty(), mode));
    if int8 {
        backend.buffers[x.0 as usize].quantize(&backend.pool, backend.kernels)?;
    }
    let rows = backend.buffers[x.0 as usize].rows();
    for job in jobs {
        let out = &mut backend.buffers[job.out.0 as usize];
        match job.accumulate {
            false => out.set_rows(rows)?,
            true => out.check_rows(rows)?,
        }
    }
    let ids: Vec<usize> = jobs.iter().map(|job| job.out.0 as usize).collect();
    let (x, outs) = super::rows::outputs(&mut backend.buffers, x.0 as usize, &ids)?;
    let activations = Activations::new(rows, x.cols(), x.values(), int8.then_some(&x.quantized))?;
    let mut products = Vec::with_capacity(jobs.len());
    for (job, out) in jobs.iter().zip(outs) {
        let bias = job.bias.map(|id| backend.vectors[id.0 as usize].as_slice());
        products.push(Product {
            view: backend.matrices[job.matrix.0 as usize].view(0)?,
            activations,
            out,
            epilogue: Epilogue { scale: job.scale, bias, accumulate: job.accumulate },
        });
    }
    run(&backend.pool, backend.kernels, mode, &products)
}
