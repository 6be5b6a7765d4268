//! The CPU backend: the op vocabulary on packed weights, paged KV and a pinned thread pool.
//!
//! Every parallel region gives threads disjoint rows or panels. No reduction crosses a thread, so results do
//! not depend on the number of threads.

use crate::Error;
use crate::aligned::AlignedBuf;
use crate::attention::AttentionScratch;
use crate::backend::{
    ActivationMode, AdapterId, AttentionOp, Backend, BackendInfo, BufferId, ConvOp, DeltaNetOp, EmbedOp,
    GateOp, GatedNormOp, HeadMatmulOp, HeadPart, HeadType, KeepPiece, KvCopy, KvLayerId, KvShape,
    LowRankSource, Mamba2Op, MatmulJob, MatrixId, MatrixSource, MemoryUse, MoeOp, NO_INDEX, Norm, Packer,
    QkvOp, RopeId, RopeSource, RowPlaces, StateLayerId, StateShape, StepInput, TakePiece, VectorId,
};
use crate::matmul::{
    MatmulKernels, PACK_LAYOUT, PackedMatrix, PackedMatrixBuilder, PackedPieces, SharedBytes,
};
use crate::ops;
use crate::pool::Pool;
use crate::quant::GgmlType;
use crate::recurrent::StateLayout;
use attend::KvLayer;
use rows::Buffer;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use step::Step;

mod adapters;
mod arena;
mod attend;
mod config;
mod deferred;
mod moe;
mod orders;
mod product;
mod recurrent;
mod rows;
mod rowwise;
mod step;

#[cfg(test)]
mod tests;

pub use config::{Attention, CpuConfig, Matmul, Rows};

pub struct CpuBackend {
    info: BackendInfo,
    config: CpuConfig,
    kernels: MatmulKernels,
    pool: Arc<Pool>,
    buffers: Vec<Buffer>,
    matrices: Vec<PackedMatrix>,
    vectors: Vec<Vec<f32>>,
    ropes: Vec<ops::RopeTable>,
    kv_layers: Vec<KvLayer>,
    arena: AlignedBuf<u8>,
    group_block_bytes: Vec<usize>,
    step: Step,
    scratch: AttentionScratch,
    moe: moe::Scratch,
    states: recurrent::States,
    orders: orders::Orders,
    adapters: adapters::Adapters,
}

impl CpuBackend {
    /// A backend on the threads of `pool`, which several backends may share. They then compute one after the other.
    pub fn new(config: CpuConfig, pool: impl Into<Arc<Pool>>) -> Result<Self, Error> {
        let pool = pool.into();
        for isa in [config.matmul, config.attention, config.rows] {
            if !isa.is_available() {
                return Err(Error::IsaUnavailable { isa });
            }
        }
        let kernels = MatmulKernels::for_isa(config.matmul)?;
        let mut isas = vec![config.matmul.name()];
        if config.attention != config.matmul || config.rows != config.matmul {
            isas.extend([config.attention.name(), config.rows.name()]);
        }
        let refused = match config.activations {
            ActivationMode::Int8 | ActivationMode::F32 => None,
            ActivationMode::Mxfp8 | ActivationMode::Nvfp4 => Some(
                "activations = mxfp8 or nvfp4 on a CPU; a GPU of compute capability 12.0 or 12.1 is required",
            ),
            ActivationMode::Bf16 => {
                Some("activations = bf16 on a CPU; a GPU of compute capability 9.0 is required")
            }
        };
        if let Some(what) = refused {
            return Err(Error::Unsupported { what });
        }
        let info = BackendInfo {
            device: "cpu".to_owned(),
            isa: isas.join("+"),
            weight_path: config.activations.name().to_owned(),
            threads: pool.threads(),
        };
        Ok(Self {
            info,
            config,
            kernels,
            pool,
            buffers: Vec::new(),
            matrices: Vec::new(),
            vectors: Vec::new(),
            ropes: Vec::new(),
            kv_layers: Vec::new(),
            arena: AlignedBuf::default(),
            group_block_bytes: Vec::new(),
            step: Step::default(),
            scratch: AttentionScratch::default(),
            moe: moe::Scratch::default(),
            states: recurrent::States::default(),
            orders: orders::Orders::default(),
            adapters: adapters::Adapters::default(),
        })
    }
}

/// Runs `work` on all items and returns the first error that occurred.
fn try_each(
    pool: &Pool,
    items: usize,
    work: impl Fn(usize) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    let failed = OnceLock::new();
    pool.for_each(items, &|item| {
        if let Err(error) = work(item) {
            let _ = failed.set(error);
        }
    });
    failed.into_inner().map_or(Ok(()), Err)
}

/// Like [`try_each`], but threads take single items, in order.
fn try_each_in_order(
    pool: &Pool,
    items: usize,
    work: impl Fn(usize) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    let next = AtomicUsize::new(0);
    try_each(pool, pool.threads(), |_| {
        loop {
            match next.fetch_add(1, Ordering::Relaxed) {
                item if item < items => work(item)?,
                _ => return Ok(()),
            }
        }
    })
}

/// Bytes of a matrix that are repacked at a time, few enough to stay in the cache until they are stored.
const PIECE_BYTES: usize = 512 << 10;

/// Plan for repacking a matrix in pieces.
fn pieces(source: MatrixSource<'_>) -> Result<PackedPieces, Error> {
    let ty = GgmlType::from_id(source.ggml_type)?;
    PackedPieces::new(ty, source.rows, source.cols, source.experts, PIECE_BYTES)
}

/// Pieces of a tensor whose bytes have the length of its shape.
fn filled_pieces(source: MatrixSource<'_>) -> Result<PackedPieces, Error> {
    let pieces = pieces(source)?;
    same_length(pieces.file_bytes(), source)?;
    Ok(pieces)
}

fn same_length(expected: usize, source: MatrixSource<'_>) -> Result<(), Error> {
    match source.bytes.size() {
        found if found == expected => Ok(()),
        found => Err(Error::Length { what: "tensor bytes", expected, found }),
    }
}

/// See [`Backend::packer`].
fn pack_alone(source: MatrixSource<'_>, take: &mut TakePiece<'_>) -> Result<(), Error> {
    let pieces = filled_pieces(source)?;
    let mut piece = Vec::new();
    for index in 0..pieces.count() {
        let offset = pieces.pack(index, &source.bytes.part(pieces.file_range(index)?)?, &mut piece)?;
        if take(offset, &piece).is_break() {
            break;
        }
    }
    Ok(())
}

impl Backend for CpuBackend {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn memory(&self) -> MemoryUse {
        MemoryUse {
            weights: self.matrices.iter().map(PackedMatrix::resident_bytes).sum::<usize>()
                + self.vectors.iter().map(|vector| size_of_val(vector.as_slice())).sum::<usize>()
                + self.orders.bytes()
                + self.states.weight_bytes()
                + self.adapters.bytes(),
            activations: self.buffers.iter().map(Buffer::bytes).sum::<usize>()
                + self.moe.bytes()
                + self.orders.scratch_bytes()
                + self.states.scratch_bytes(),
            kv: self.arena.len(),
        }
    }

    fn bind_thread(&self) {
        self.pool.pin_caller();
    }

    fn create_buffer(&mut self, rows: usize, cols: usize) -> Result<BufferId, Error> {
        self.buffers.push(Buffer::new(rows, cols)?);
        Ok(BufferId(self.buffers.len() as u32 - 1))
    }

    fn create_matrix(&mut self, source: MatrixSource<'_>) -> Result<MatrixId, Error> {
        let ty = GgmlType::from_id(source.ggml_type)?;
        let mut builder = PackedMatrixBuilder::new(ty, source.rows, source.cols, source.experts)?;
        same_length(builder.file_bytes(), source)?;
        // Chunks stay in a core's cache between reading and packing, and leave work for all threads to the end.
        let fit = PIECE_BYTES / ty.row_bytes(source.cols)?.max(1);
        let rows_per_chunk = fit.min(source.rows / (self.pool.threads() * 4)).max(1);
        let chunks: Vec<Mutex<Option<_>>> =
            builder.chunks(rows_per_chunk).map(|chunk| Mutex::new(Some(chunk))).collect();
        try_each_in_order(&self.pool, chunks.len(), |index| {
            let chunk = chunks[index].lock().unwrap_or_else(PoisonError::into_inner).take();
            chunk.map_or(Ok(()), |chunk| {
                let bytes = source.bytes.part(chunk.file_range())?;
                chunk.pack(&bytes)
            })
        })?;
        drop(chunks);
        self.matrices.push(builder.finish()?);
        Ok(MatrixId(self.matrices.len() as u32 - 1))
    }

    fn pack_layout(&self) -> Option<&'static str> {
        Some(PACK_LAYOUT)
    }

    fn packed_bytes(&self, source: MatrixSource<'_>) -> Result<usize, Error> {
        Ok(pieces(source)?.packed_bytes())
    }

    fn pack_matrix(&self, source: MatrixSource<'_>, keep: &KeepPiece<'_>) -> Result<(), Error> {
        let pieces = filled_pieces(source)?;
        // Buffers are reused, because the kernel must clear the pages of fresh memory.
        let buffers: Mutex<Vec<Vec<u8>>> = Mutex::default();
        let buffers = || buffers.lock().unwrap_or_else(PoisonError::into_inner);
        try_each_in_order(&self.pool, pieces.count(), |index| {
            let mut piece = buffers().pop().unwrap_or_default();
            let offset = pieces.pack(index, &source.bytes.part(pieces.file_range(index)?)?, &mut piece)?;
            keep(offset, &piece);
            buffers().push(piece);
            Ok(())
        })
    }

    fn create_packed_matrix(
        &mut self,
        source: MatrixSource<'_>,
        packed: SharedBytes,
    ) -> Result<MatrixId, Error> {
        let MatrixSource { ggml_type, rows, cols, experts, .. } = source;
        let ty = GgmlType::from_id(ggml_type)?;
        self.matrices.push(PackedMatrix::from_packed(ty, rows, cols, experts, packed)?);
        Ok(MatrixId(self.matrices.len() as u32 - 1))
    }

    fn create_matrix_in_place(
        &mut self,
        source: MatrixSource<'_>,
        bytes: &SharedBytes,
    ) -> Result<Option<MatrixId>, Error> {
        let MatrixSource { ggml_type, rows, cols, experts, .. } = source;
        let ty = GgmlType::from_id(ggml_type)?;
        if !PackedMatrix::can_be_in_place(ty) {
            return Ok(None);
        }
        self.matrices.push(PackedMatrix::in_place(ty, rows, cols, experts, Arc::clone(bytes))?);
        Ok(Some(MatrixId(self.matrices.len() as u32 - 1)))
    }

    fn packer(&self) -> Option<Packer> {
        Some(pack_alone)
    }

    fn replace_by_packed(&mut self, matrix: MatrixId, packed: SharedBytes) -> Result<(), Error> {
        let len = self.matrices.len();
        let replaced = self.matrices.get_mut(matrix.0 as usize);
        let replaced = replaced.ok_or(Error::OutOfRange { what: "matrix", index: matrix.0 as usize, len })?;
        let (ty, rows, cols) = (replaced.ty(), replaced.rows(), replaced.cols());
        *replaced = PackedMatrix::from_packed(ty, rows, cols, replaced.experts(), packed)?;
        Ok(())
    }

    fn create_vector(&mut self, values: &[f32]) -> Result<VectorId, Error> {
        self.vectors.push(values.to_vec());
        Ok(VectorId(self.vectors.len() as u32 - 1))
    }

    fn set_order(&mut self, matrix: MatrixId, order: &[u32]) -> Result<(), Error> {
        orders::set(self, matrix, order)
    }

    fn create_rope(&mut self, source: RopeSource) -> Result<RopeId, Error> {
        let style = if source.interleaved { ops::RopeStyle::Interleaved } else { ops::RopeStyle::Half };
        let RopeSource { n_rot, base, freq_scale, factors, magnitude, axes, .. } = source;
        let params = ops::RopeParams { style, n_rot, base, freq_scale, factors, magnitude, axes };
        self.ropes.push(ops::RopeTable::new(&params)?);
        Ok(RopeId(self.ropes.len() as u32 - 1))
    }

    fn kv_block_bytes(&self, shape: KvShape) -> Result<usize, Error> {
        attend::block_bytes(shape)
    }

    fn create_kv_layer(&mut self, group: usize, shape: KvShape, offset: usize) -> Result<KvLayerId, Error> {
        attend::create_layer(self, group, shape, offset)
    }

    fn create_kv_arena(&mut self, bytes: usize, group_block_bytes: &[usize]) -> Result<(), Error> {
        self.arena = AlignedBuf::reserved(bytes);
        self.group_block_bytes = group_block_bytes.to_vec();
        Ok(())
    }

    fn gives_back_kv(&self) -> bool {
        true
    }

    fn give_back_kv(&mut self, places: &[(u32, u64)]) -> Result<(), Error> {
        for (offset, bytes) in places {
            let range = arena::checked_range(&self.arena, *offset, *bytes as usize)?;
            self.arena.discard(range);
        }
        Ok(())
    }

    fn copy_kv(&mut self, copies: &[KvCopy]) -> Result<(), Error> {
        arena::copy(&mut self.arena, &self.group_block_bytes, copies)
    }

    fn read_arena(&mut self, from: u32, out: &mut [u8]) -> Result<(), Error> {
        arena::read(&self.arena, from, out)
    }

    fn write_arena(&mut self, to: u32, bytes: &[u8]) -> Result<(), Error> {
        arena::write(&mut self.arena, to, bytes)
    }

    fn load_adapter(&mut self, parts: &[LowRankSource<'_>]) -> Result<AdapterId, Error> {
        adapters::load(self, parts)
    }

    fn unload_adapter(&mut self, adapter: AdapterId) {
        self.adapters.unload(adapter);
    }

    fn use_adapters(&mut self, rows: &[(Range<usize>, AdapterId)]) -> Result<(), Error> {
        self.adapters.use_for(rows)
    }

    fn places_rows(&self) -> bool {
        true
    }

    fn place_rows(&mut self, places: &RowPlaces<'_>) -> Result<(), Error> {
        self.step.place(places);
        Ok(())
    }

    fn begin_step(&mut self, step: &StepInput<'_>) -> Result<(), Error> {
        self.adapters.begin(step.tokens.len())?;
        let positions = self.step.begin(step)?;
        let on_axes = self.step.axes_end();
        for rope in &mut self.ropes {
            rope.ensure(if rope.has_axes() { positions.max(on_axes) } else { positions });
        }
        self.step.make_plans(&self.kv_layers, step.tables, self.pool.threads())?;
        // Last, because a step that is refused must not be recorded as deferred.
        self.states.begin(step)
    }

    fn embed(&mut self, op: &EmbedOp) -> Result<(), Error> {
        rowwise::embed(self, op)
    }

    fn norm(&mut self, x: BufferId, norm: &Norm, out: BufferId) -> Result<(), Error> {
        rowwise::norm(self, x, norm, out)
    }

    fn matmul(&mut self, x: BufferId, jobs: &[MatmulJob]) -> Result<(), Error> {
        product::matmul(self, x, jobs, None)
    }

    fn serves_parts(&self) -> bool {
        true
    }

    fn matmul_part(&mut self, x: BufferId, job: &MatmulJob, rows: Range<usize>) -> Result<(), Error> {
        product::matmul(self, x, std::slice::from_ref(job), Some(rows))
    }

    fn head_matmul(&mut self, op: &HeadMatmulOp) -> Result<(), Error> {
        product::head_matmul(self, op)
    }

    fn place_heads(&mut self, x: BufferId, heads: usize, out: &HeadPart) -> Result<(), Error> {
        rowwise::place_heads(self, x, heads, out)
    }

    fn qkv(&mut self, op: &QkvOp) -> Result<(), Error> {
        attend::qkv(self, op)
    }

    fn attention(&mut self, op: &AttentionOp) -> Result<(), Error> {
        attend::attention(self, op)
    }

    fn gate(&mut self, op: &GateOp) -> Result<(), Error> {
        rowwise::gate(self, op)
    }

    fn scale_rows(&mut self, x: BufferId, gate: BufferId) -> Result<(), Error> {
        rowwise::scale_rows(self, x, gate)
    }

    fn scale(&mut self, x: BufferId, factor: f32) -> Result<(), Error> {
        let x = &mut self.buffers[x.0 as usize];
        ops::scale(&self.pool, self.config.rows, x.values_mut(), factor);
        Ok(())
    }

    fn add(&mut self, x: BufferId, y: BufferId, norm: Option<&Norm>, scale: f32) -> Result<(), Error> {
        rowwise::add(self, x, y, norm, scale)
    }

    fn moe(&mut self, op: &MoeOp) -> Result<(), Error> {
        moe::run(self, op)
    }

    fn gather_rows(&mut self, x: BufferId, rows: &[u32], out: BufferId) -> Result<(), Error> {
        let (x, out) = rows::pair(&mut self.buffers, x, out)?;
        out.set_shape(rows.len(), x.cols())?;
        let cols = out.cols();
        for (values, row) in out.values_mut().chunks_exact_mut(cols).zip(rows) {
            values.copy_from_slice(x.row(*row as usize)?);
        }
        Ok(())
    }

    fn finish_logits(&mut self, x: BufferId, scale: f32, softcap: Option<f32>) -> Result<(), Error> {
        let x = &mut self.buffers[x.0 as usize];
        if scale != 1.0 {
            ops::scale(&self.pool, self.config.rows, x.values_mut(), scale);
        }
        if let Some(cap) = softcap {
            ops::softcap(&self.pool, self.config.rows, x.values_mut(), cap);
        }
        Ok(())
    }

    fn argmax(&mut self, x: BufferId, out: &mut Vec<u32>) -> Result<(), Error> {
        let x = &self.buffers[x.0 as usize];
        let isa = self.config.rows;
        out.clear();
        let best = |row: &[f32]| match ops::is_drawable(row) {
            true => ops::argmax(isa, row) as u32,
            false => NO_INDEX,
        };
        out.extend(x.values().chunks_exact(x.cols()).map(best));
        Ok(())
    }

    fn read_row(&mut self, x: BufferId, row: usize, out: &mut [f32]) -> Result<(), Error> {
        let values = self.buffers[x.0 as usize].row(row)?;
        if values.len() != out.len() {
            return Err(Error::Length { what: "row to read into", expected: values.len(), found: out.len() });
        }
        out.copy_from_slice(values);
        Ok(())
    }

    fn best_of_part(&mut self, x: BufferId, row: usize, columns: Range<usize>) -> Result<(u32, f32), Error> {
        let x = &self.buffers[x.0 as usize];
        let (from, range) = (columns.start, x.index_range(row, columns)?);
        let values = &x.values()[range];
        let best = ops::argmax(self.config.rows, values);
        let none = || Error::OutOfRange { what: "value of a part", index: 0, len: 0 };
        let value = *values.get(best).ok_or_else(none)?;
        Ok(((from + best) as u32, if ops::are_numbers(values) { value } else { f32::NAN }))
    }

    fn read_part(&mut self, x: BufferId, row: usize, from: usize, out: &mut [f32]) -> Result<(), Error> {
        let x = &self.buffers[x.0 as usize];
        let range = x.index_range(row, from..from.saturating_add(out.len()))?;
        out.copy_from_slice(&x.values()[range]);
        Ok(())
    }

    fn write_part(&mut self, x: BufferId, row: usize, from: usize, values: &[f32]) -> Result<(), Error> {
        let x = &mut self.buffers[x.0 as usize];
        let range = x.index_range(row, from..from.saturating_add(values.len()))?;
        x.values_mut()[range].copy_from_slice(values);
        Ok(())
    }

    fn write_rows(&mut self, x: BufferId, values: &[f32]) -> Result<(), Error> {
        let x = &mut self.buffers[x.0 as usize];
        if !values.len().is_multiple_of(x.cols()) {
            return Err(Error::Length { what: "rows to write", expected: x.cols(), found: values.len() });
        }
        x.set_shape(values.len() / x.cols(), x.cols())?;
        x.values_mut().copy_from_slice(values);
        Ok(())
    }

    fn state_bytes(&self, shape: StateShape, heads: &[HeadType]) -> Result<usize, Error> {
        Ok(StateLayout::new(shape, heads)?.bytes())
    }

    fn create_state_layer(
        &mut self,
        shape: StateShape,
        heads: &[HeadType],
        offset: usize,
    ) -> Result<StateLayerId, Error> {
        self.states.create_layer(shape, heads, offset)
    }

    fn read_state(
        &mut self,
        layer: StateLayerId,
        slot: u32,
        conv: &mut [f32],
        recurrent: &mut [f32],
    ) -> Result<(), Error> {
        self.states.read(&self.arena, layer, slot, conv, recurrent)
    }

    fn conv(&mut self, op: &ConvOp) -> Result<(), Error> {
        recurrent::conv(self, op)
    }

    fn delta_net(&mut self, op: &DeltaNetOp) -> Result<(), Error> {
        recurrent::delta_net(self, op)
    }

    fn mamba2(&mut self, op: &Mamba2Op) -> Result<(), Error> {
        recurrent::mamba2(self, op)
    }

    fn accept(&mut self, rows: &[usize]) -> Result<(), Error> {
        recurrent::accept(self, rows)
    }

    fn gated_norm(&mut self, op: &GatedNormOp) -> Result<(), Error> {
        recurrent::gated_norm(self, op)
    }
}
