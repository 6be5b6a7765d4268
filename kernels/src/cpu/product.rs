//! Products of a buffer's rows with several matrices in one parallel region.

use super::rows::pair_mut;
use super::rowwise::{check_heads, check_part};
use super::{CpuBackend, try_each};
use crate::Error;
use crate::backend::{BufferId, HeadMatmulOp, HeadPart, MatmulJob};
use crate::matmul::{
    ActivationMode, Activations, Epilogue, MatmulKernels, MatrixView, PANEL_ROWS, SharedOut,
};
use crate::pool::Pool;
use std::ops::Range;

/// Chunks per thread. With 8, a slow thread delays the others by at most an eighth of its share.
const CHUNKS_PER_THREAD: usize = 8;

/// One product with its output, divisible into panels.
pub(super) struct Product<'a> {
    pub(super) view: MatrixView<'a>,
    pub(super) activations: Activations<'a>,
    pub(super) out: SharedOut<'a>,
    pub(super) epilogue: Epilogue<'a>,
}

impl Product<'_> {
    /// Cost of a panel, in bytes read. It is constant up to 4 rows and grows with the rows above that.
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
    run_panels(pool, kernels, mode, products, None)
}

/// Like [`run`], but runs only panels `only` of each product; `None` runs all.
fn run_panels(
    pool: &Pool,
    kernels: MatmulKernels,
    mode: ActivationMode,
    products: &[Product<'_>],
    only: Option<Range<usize>>,
) -> Result<(), Error> {
    let of = |product: &Product<'_>| {
        let all = product.view.panels();
        only.as_ref().map_or(0..all, |only| only.start.min(all)..only.end.min(all))
    };
    let run_chunk = |product: &Product<'_>, panels: Range<usize>| {
        let Product { view, activations, out, epilogue } = product;
        kernels.run(*view, panels, activations, mode, *out, epilogue)
    };
    if pool.threads() == 1 {
        return products.iter().try_for_each(|product| run_chunk(product, of(product)));
    }
    let cost: usize = products.iter().map(|product| of(product).len() * product.panel_cost()).sum();
    let share = cost.div_ceil(pool.threads() * CHUNKS_PER_THREAD).max(1);
    let chunks: Vec<(usize, Range<usize>)> = products
        .iter()
        .enumerate()
        .flat_map(|(index, product)| {
            let step = (share / product.panel_cost().max(1)).max(1);
            let Range { start, end } = of(product);
            (start..end).step_by(step).map(move |start| (index, start..end.min(start + step)))
        })
        .collect();
    try_each(pool, chunks.len(), |index| {
        let (product, panels) = &chunks[index];
        run_chunk(&products[*product], panels.clone())
    })
}

/// See [`crate::backend::Backend::matmul`]. With a `row_range`, see [`crate::backend::Backend::matmul_part`].
pub(super) fn matmul(
    backend: &mut CpuBackend,
    input: BufferId,
    jobs: &[MatmulJob],
    row_range: Option<Range<usize>>,
) -> Result<(), Error> {
    let x = input;
    let mode = backend.config.activations;
    let int8 =
        jobs.iter().any(|job| MatmulKernels::reads_int8(backend.matrices[job.matrix.0 as usize].ty(), mode));
    if int8 {
        backend.buffers[x.0 as usize].quantize(&backend.pool, backend.kernels)?;
    }
    if !backend.orders.is_empty() {
        super::orders::gather(backend, x, jobs, int8)?;
    }
    let rows = backend.buffers[x.0 as usize].rows();
    for job in jobs {
        let out = &mut backend.buffers[job.out.0 as usize];
        match job.accumulate {
            false => out.set_shape(rows, backend.matrices[job.matrix.0 as usize].rows())?,
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
            activations: backend.orders.activations(job.matrix)?.unwrap_or(activations),
            out,
            epilogue: Epilogue { scale: job.scale, bias, accumulate: job.accumulate },
        });
    }
    // Whole panels: these may contain more rows than `row_range`.
    let only = row_range.map(|row_range| row_range.start / PANEL_ROWS..row_range.end.div_ceil(PANEL_ROWS));
    let whole = only.is_none();
    run_panels(&backend.pool, backend.kernels, mode, &products, only)?;
    if whole { super::adapters::add(backend, input, jobs) } else { Ok(()) }
}

/// See [`HeadMatmulOp`].
pub(super) fn head_matmul(backend: &mut CpuBackend, op: &HeadMatmulOp) -> Result<(), Error> {
    let &HeadMatmulOp { x, matrix, heads, scale, out: HeadPart { buffer, width, at } } = op;
    let (mode, matrix) = (backend.config.activations, &backend.matrices[matrix.0 as usize]);
    let (outputs, cols) = (matrix.rows(), matrix.cols());
    let (x, out) = pair_mut(&mut backend.buffers, x, buffer)?;
    let rows = x.rows();
    check_heads(x.cols(), heads, cols)?;
    check_part(outputs, width, at)?;
    if matrix.experts() != heads {
        return Err(Error::Length { what: "matrices of heads", expected: heads, found: matrix.experts() });
    }
    // A row is `heads` rows of the products.
    x.set_shape(rows * heads, cols)?;
    let int8 = MatmulKernels::reads_int8(matrix.ty(), mode);
    if int8 {
        x.quantize(&backend.pool, backend.kernels)?;
    }
    out.set_shape(rows, heads * width)?;
    let shared = out.share();
    let all = Activations::new(rows * heads, cols, x.values(), int8.then_some(&x.quantized))?;
    let lists: Vec<Vec<u32>> =
        (0..heads).map(|head| (0..rows).map(|row| (row * heads + head) as u32).collect()).collect();
    let mut products = Vec::with_capacity(heads);
    for (head, list) in lists.iter().enumerate() {
        let first = head * width + at;
        // SAFETY: products of different heads have different columns.
        #[allow(unsafe_code, reason = "disjoint columns of one buffer")]
        let out = unsafe { shared.output(0..rows, first..first + outputs) };
        let epilogue = Epilogue { scale, bias: None, accumulate: false };
        products.push(Product { view: matrix.view(head)?, activations: all.listed(list)?, out, epilogue });
    }
    run(&backend.pool, backend.kernels, mode, &products)?;
    x.set_shape(rows, heads * cols)
}
