//! Matrices on the device: upload, products, embedding lookups.

use super::super::Device;
use super::super::matmul::{
    Activations, Embedding, Experts, MatmulKernels, Matrix, Product, Quantised, TOGETHER,
};
use super::super::pack::TiledShape;
use super::CudaBackend;
use super::memory::{Buffers, ScratchLayout, Vectors, same};
use super::modules::Modules;
use kernels::Error;
use kernels::backend::{
    ActivationMode, BufferId, EmbedIndex, EmbedOp, MatmulJob, MatrixBytes, MatrixId, MatrixSource, VectorId,
    check_order,
};
use kernels::quant::GgmlType;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;

/// Bytes that one thread packs before an upload. Loading needs little host memory besides the file.
const PIECE_BYTES: usize = 4 << 20;

/// All matrices, and the kernels of their types.
#[derive(Default)]
pub(super) struct Matrices {
    all: Vec<Matrix>,
    /// The orders of matrices' columns, each once, and as vectors on the device.
    orders: Vec<(Vec<u32>, VectorId)>,
    /// By the number of the matrix.
    order_of: HashMap<u32, usize>,
    kernels: HashMap<GgmlType, MatmulKernels>,
}

impl Matrices {
    /// # Errors
    /// [`Error::OutOfRange`].
    pub(super) fn get(&self, id: MatrixId) -> Result<(&Matrix, &MatmulKernels), Error> {
        let missing = Error::OutOfRange { what: "matrix", index: id.number() as usize, len: self.all.len() };
        let matrix = self.all.get(id.number() as usize).ok_or(missing)?;
        let ty = matrix.shape.ty();
        Ok((matrix, self.kernels.get(&ty).ok_or(Error::NoMatmul { ty: ty.name() })?))
    }

    /// Allocates a matrix, whose bytes are undefined.
    fn reserve(
        &mut self,
        device: &mut dyn Device,
        modules: &mut Modules,
        mode: ActivationMode,
        shape: TiledShape,
    ) -> Result<MatrixId, Error> {
        let ty = shape.ty();
        if let Entry::Vacant(vacant) = self.kernels.entry(ty) {
            let mut kernels = MatmulKernels::load(device, modules.of(MatmulKernels::source(ty)?)?, ty)?;
            if let Some(form) = Quantised::of(mode, ty)
                && let Some(source) = form.source(ty)
            {
                kernels.load_form(device, modules.of(source)?, form)?;
            }
            vacant.insert(kernels);
        }
        let start = device.allocate(shape.packed_bytes())?;
        self.all.push(Matrix { shape, start });
        Ok(MatrixId::new(self.all.len() as u32 - 1))
    }

    /// Repacks a matrix on `threads` threads and uploads it, piece by piece.
    pub(super) fn create(
        &mut self,
        device: &mut dyn Device,
        modules: &mut Modules,
        mode: ActivationMode,
        source: MatrixSource<'_>,
        threads: usize,
    ) -> Result<MatrixId, Error> {
        let ty = GgmlType::from_id(source.ggml_type)?;
        let shape = TiledShape::new(ty, source.rows, source.cols, source.experts)?;
        same("tensor bytes", shape.file_bytes(), source.bytes.size())?;
        let id = self.reserve(device, modules, mode, shape)?;
        let start = self.get(id)?.0.start;
        let tiles = shape.tiles() * shape.experts();
        let piece = (PIECE_BYTES / shape.tile_bytes()).max(1);
        let pieces: Vec<Range<usize>> =
            (0..tiles).step_by(piece).map(|first| first..tiles.min(first + piece)).collect();
        for wave in pieces.chunks(threads.max(1)) {
            for (tiles, packed) in wave.iter().zip(pack(&shape, source.bytes, wave)) {
                device.upload(start.offset(tiles.start * shape.tile_bytes()), &packed?)?;
            }
        }
        Ok(id)
    }

    /// See [`kernels::backend::Backend::set_order`].
    pub(super) fn set_order(
        &mut self,
        device: &mut dyn Device,
        vectors: &mut Vectors,
        id: MatrixId,
        order: &[u32],
    ) -> Result<(), Error> {
        check_order(order, self.get(id)?.0.shape.cols())?;
        let known = self.orders.iter().position(|(known, _)| known == order).unwrap_or(self.orders.len());
        if known == self.orders.len() {
            let values: Vec<f32> = order.iter().map(|&col| col as f32).collect();
            self.orders.push((order.to_vec(), vectors.create(device, &values)?));
        }
        self.order_of.insert(id.number(), known);
        Ok(())
    }

    /// Whether products with a matrix read nothing but the int8 form of a buffer, in the order of its columns.
    pub(super) fn reads_only_int8(&self, mode: ActivationMode, id: MatrixId) -> bool {
        let form = self.all.get(id.number() as usize).and_then(|m| Quantised::of(mode, m.shape.ty()));
        form == Some(Quantised::Int8) && !self.order_of.contains_key(&id.number())
    }

    pub(super) fn bytes(&self) -> usize {
        self.all.iter().map(|matrix| matrix.shape.packed_bytes()).sum()
    }
}

#[cfg(test)]
impl CudaBackend {
    /// Creates a matrix without its bytes, for costs that do not depend on them.
    pub(crate) fn reserve_matrix(&mut self, shape: TiledShape) -> Result<MatrixId, Error> {
        self.matrices.reserve(self.device.as_mut(), &mut self.modules, self.activations, shape)
    }
}

/// Packs pieces, each on its own thread.
fn pack(shape: &TiledShape, bytes: &dyn MatrixBytes, pieces: &[Range<usize>]) -> Vec<Result<Vec<u8>, Error>> {
    let pack_piece = |tiles: &Range<usize>| -> Result<Vec<u8>, Error> {
        let mut packed = Vec::new();
        shape.pack(tiles.clone(), &bytes.part(shape.file_range(tiles.clone()))?, &mut packed)?;
        Ok(packed)
    };
    if let [only] = pieces {
        return vec![pack_piece(only)];
    }
    std::thread::scope(|scope| {
        let running: Vec<_> = pieces.iter().map(|piece| scope.spawn(move || pack_piece(piece))).collect();
        let lost = || Err(Error::Unsupported { what: "a matrix whose packing ends its thread" });
        running.into_iter().map(|running| running.join().unwrap_or_else(|_| lost())).collect()
    })
}

/// Returns the rows of a buffer in the form in which a product with the matrix reads them.
pub(super) fn activations(
    device: &mut dyn Device,
    buffers: &mut Buffers,
    rowwise: &super::super::rowwise::RowwiseKernels,
    mode: ActivationMode,
    (x, matrix): (BufferId, &Matrix),
) -> Result<Activations, Error> {
    let view = buffers.either(x)?;
    same("columns of a matrix", matrix.shape.cols(), view.cols)?;
    let Some(form) = Quantised::of(mode, matrix.shape.ty()) else {
        return Ok(Activations::F32(buffers.get(x)?.ptr));
    };
    let (quantised, needs_quantising) = buffers.quantised(device, x, form)?;
    if needs_quantising {
        buffers.get(x)?;
        rowwise.quantise(device, view.of(), view.ptr, (form, quantised))?;
    }
    Ok(form.at(quantised))
}

/// Returns the rows of a buffer in the orders of the jobs' matrices, by the orders' numbers, in scratch memory.
fn ordered(backend: &mut CudaBackend, x: BufferId, jobs: &[MatmulJob]) -> Result<Vec<Ordered>, Error> {
    let CudaBackend { device, rowwise, buffers, vectors, matrices, scratch, activations: mode, .. } = backend;
    let mut found: Vec<(usize, Option<Quantised>)> = Vec::new();
    for job in jobs {
        let Some(&number) = matrices.order_of.get(&job.matrix.number()) else { continue };
        let wanted = (number, Quantised::of(*mode, matrices.get(job.matrix)?.0.shape.ty()));
        if !found.contains(&wanted) {
            found.push(wanted);
        }
    }
    if found.is_empty() {
        return Ok(Vec::new());
    }
    let (device, x) = (device.as_mut(), buffers.get(x)?);
    let mut layout = ScratchLayout::default();
    let places: Vec<[usize; 2]> = found
        .iter()
        .map(|(_, form)| {
            [x.bytes(), form.map_or(0, |form| x.rows * form.row_bytes(x.cols))]
                .map(|bytes| layout.next(bytes))
        })
        .collect();
    let base = scratch.of(device, layout.bytes())?;
    let mut all = Vec::with_capacity(found.len());
    for ((number, form), places) in found.into_iter().zip(places) {
        let [floats, quantised] = places.map(|place| base.offset(place));
        let order = vectors.sized("order of columns", matrices.orders[number].1, x.cols)?;
        rowwise.gather_cols(device, x.of(), x.ptr, order, floats)?;
        if let Some(form) = form {
            rowwise.quantise(device, x.of(), floats, (form, quantised))?;
        }
        let rows = form.map_or(Activations::F32(floats), |form| form.at(quantised));
        all.push(Ordered { number, form, rows });
    }
    Ok(all)
}

/// Rows with their values in the order of a matrix's columns.
struct Ordered {
    number: usize,
    form: Option<Quantised>,
    rows: Activations,
}

/// See [`kernels::backend::Backend::matmul`].
pub(super) fn matmul(backend: &mut CudaBackend, x: BufferId, jobs: &[MatmulJob]) -> Result<(), Error> {
    let ordered = if backend.matrices.orders.is_empty() { Vec::new() } else { ordered(backend, x, jobs)? };
    let CudaBackend { device, rowwise, buffers, vectors, matrices, activations: mode, .. } = backend;
    let device = device.as_mut();
    let rows = buffers.either(x)?.rows;
    let shared = |(index, job): (usize, &MatmulJob)| {
        job.out == x || jobs[..index].iter().any(|earlier| earlier.out == job.out)
    };
    if jobs.iter().enumerate().any(shared) {
        return Err(Error::SameBuffer);
    }
    // Matrices of one type share a launch, because the start and end of a launch weigh less the more it
    // reads.
    let mut launches: Vec<(&MatmulKernels, Vec<Product<'_>>)> = Vec::new();
    for job in jobs {
        let (matrix, kernels) = matrices.get(job.matrix)?;
        let outputs = matrix.shape.rows();
        let order = matrices.order_of.get(&job.matrix.number());
        let form = Quantised::of(*mode, matrix.shape.ty());
        let in_order = |order: &usize| ordered.iter().find(|x| x.number == *order && x.form == form);
        let x = match order.and_then(in_order) {
            None => activations(device, buffers, rowwise, *mode, (x, matrix))?,
            Some(x) => x.rows,
        };
        let out = buffers.target(job.out, (rows, outputs), job.accumulate)?;
        let product = Product {
            matrix,
            x,
            tokens: rows,
            share: 1,
            experts: Experts::One,
            scale: job.scale,
            bias: vectors.optional("bias of a product", job.bias, outputs)?,
            accumulate: job.accumulate,
            out: out.ptr,
            ld: outputs,
        };
        let open = |products: &[Product<'_>]| products.len() < TOGETHER && products[0].goes_with(&product);
        match launches.iter_mut().find(|(_, products)| open(products)) {
            Some((_, products)) => products.push(product),
            None => launches.push((kernels, vec![product])),
        }
    }
    for (kernels, products) in &launches {
        kernels.multiply(device, products)?;
    }
    super::adapters::add(backend, x, jobs)
}

/// See [`EmbedOp`].
pub(super) fn embed(backend: &mut CudaBackend, op: &EmbedOp) -> Result<(), Error> {
    let CudaBackend { device, buffers, matrices, step, .. } = backend;
    let (table, kernels) = matrices.get(op.table)?;
    step.read_table(op.index, table.shape.rows())?;
    let (rows, pointers) = (step.step().rows(), step.pointers()?);
    let index = match op.index {
        EmbedIndex::Token => pointers.tokens,
        EmbedIndex::Position => pointers.positions,
        EmbedIndex::Segment => pointers.segments,
    };
    let out = buffers.target(op.out, (rows, table.shape.cols()), op.accumulate)?;
    let EmbedOp { scale, accumulate, .. } = *op;
    let embedding = Embedding { table, index, rows, scale, accumulate, out: out.ptr };
    Ok(kernels.embed(device.as_mut(), &embedding)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Source;
    use crate::tests::hole::{self, Hole};
    use crate::{Arch, CudaBackend, CudaConfig};
    use kernels::backend::Backend;
    use std::process::Command;

    /// Returns the peak memory of this process in bytes.
    fn peak() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
    }

    /// Environment variable that is set in the process that repacks.
    const REPACKS: &str = "KVASIR_TEST_REPACKS";
    const THREADS: usize = 2;

    /// Runs this test again in a child process, where nothing else allocates memory.
    #[test]
    fn repacking_needs_a_few_pieces_of_the_host_however_large_the_matrix_is() {
        if std::env::var_os(REPACKS).is_none() {
            let name = "repacking_needs_a_few_pieces_of_the_host_however_large_the_matrix_is";
            let mut again = Command::new(std::env::current_exe().unwrap());
            let again = again.args(["--exact", &format!("backend::product::tests::{name}")]);
            let output = again.env(REPACKS, "1").output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
            assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
            return;
        }
        let config = CudaConfig { arch: Arch::SM_90, activations: ActivationMode::Int8, threads: THREADS };
        let compile = |source: &Source| Ok(hole::empty_source(source.name));
        let mut backend = CudaBackend::new(Box::new(Hole::default()), config, Box::new(compile)).unwrap();
        let mut took = [1usize, 16].map(|times| {
            // The file's own pages do not count: they are zeros that were never written.
            let (rows, cols) = (times * 2048, 4096);
            let file = vec![0u8; rows * cols * 2];
            let before = peak();
            let ggml_type = GgmlType::F16.id();
            backend.create_matrix(MatrixSource { ggml_type, rows, cols, experts: 1, bytes: &file }).unwrap();
            peak() - before
        });
        took.sort_unstable();
        assert!(took[1] < 3 * THREADS * PIECE_BYTES, "{took:?} bytes");
    }
}
