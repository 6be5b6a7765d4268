//! The CPU backend: the op vocabulary on packed weights, paged KV and a pinned thread pool.
//!
//! Every parallel region hands disjoint rows or panels to threads; no reduction crosses a thread, so results
//! do not depend on how many there are.

use crate::Error;
use crate::aligned::AlignedBuf;
use crate::attention::{
    self, ArenaView, AttentionCall, AttentionScratch, AttentionShape, KvLayout, Placement, QueryRow, StepPlan,
};
use crate::backend::{
    ActivationMode, AttentionOp, Backend, BackendInfo, BufferId, GateActivation, KvCopy, KvLayerId, KvShape,
    MatmulJob, MatrixId, MatrixSource, MemoryUse, MoeOp, Norm, QkvOp, RopeId, RopeSource, StepInput,
    VectorId,
};
use crate::matmul::{MatmulKernels, PackedMatrix, PackedMatrixBuilder};
use crate::ops;
use crate::pool::Pool;
use crate::quant::GgmlType;
use rows::Buffer;
use std::num::NonZeroU32;
use std::sync::{Mutex, PoisonError};

mod config;
mod moe;
mod product;
mod rows;

pub use config::{Attention, CpuConfig, Matmul, Rows};

/// One layer's place in its group's blocks.
#[derive(Debug, Clone, Copy)]
struct KvLayer {
    group: usize,
    offset: usize,
    layout: KvLayout,
    /// Query heads.
    heads: usize,
    window: Option<NonZeroU32>,
}

/// The step in flight.
#[derive(Debug, Default)]
struct Step {
    tokens: Vec<u32>,
    rows: Vec<QueryRow>,
    /// Per KV layer, which of `plans` serves it; layers of one group and shape share a plan.
    plan_of: Vec<usize>,
    plans: Vec<StepPlan>,
}

/// See the module.
pub struct CpuBackend {
    info: BackendInfo,
    config: CpuConfig,
    kernels: MatmulKernels,
    pool: Pool,
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
}

impl CpuBackend {
    /// A backend on the threads of `pool`.
    pub fn new(config: CpuConfig, pool: Pool) -> Result<Self, Error> {
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
        let weight_path = match config.activations {
            ActivationMode::Int8 => "int8",
            ActivationMode::F32 => "f32",
        };
        let info = BackendInfo {
            device: "cpu".to_owned(),
            isa: isas.join("+"),
            weight_path: weight_path.to_owned(),
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
        })
    }

    /// Two buffers of which one is changed.
    fn pair(&mut self, read: BufferId, write: BufferId) -> Result<(&Buffer, &mut Buffer), Error> {
        pair(&mut self.buffers, read, write)
    }
}

/// Two different buffers, one to read and one to change.
fn pair(buffers: &mut [Buffer], read: BufferId, write: BufferId) -> Result<(&Buffer, &mut Buffer), Error> {
    let (read, write) = (read.0 as usize, write.0 as usize);
    match buffers.get_disjoint_mut([read, write]) {
        Ok([read, write]) => Ok((read, write)),
        Err(_) => Err(Error::SameBuffer),
    }
}

/// Runs `work` over items and gives back the first error of any.
fn try_each(
    pool: &Pool,
    items: usize,
    work: impl Fn(usize) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    let failed = Mutex::new(None);
    pool.for_each(items, &|item| {
        if let Err(error) = work(item) {
            failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

impl CpuBackend {
    /// One plan per group and shape that any layer has.
    fn make_plans(&mut self, tables: &[Vec<Placement<'_>>]) -> Result<(), Error> {
        let step = &mut self.step;
        step.plans.clear();
        step.plan_of.clear();
        let mut made: Vec<(usize, AttentionShape)> = Vec::new();
        for layer in &self.kv_layers {
            let shape = AttentionShape { layout: layer.layout, heads: layer.heads, window: layer.window };
            let known = made.iter().position(|known| *known == (layer.group, shape));
            let index = match known {
                Some(index) => index,
                None => {
                    let len = tables.len();
                    let missing = Error::OutOfRange { what: "KV group", index: layer.group, len };
                    let placements = tables.get(layer.group).ok_or(missing)?;
                    step.plans.push(StepPlan::new(shape, &step.rows, placements, self.pool.threads())?);
                    made.push((layer.group, shape));
                    made.len() - 1
                }
            };
            step.plan_of.push(index);
        }
        Ok(())
    }
}

impl Backend for CpuBackend {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn memory(&self) -> MemoryUse {
        MemoryUse {
            weights: self.matrices.iter().map(PackedMatrix::resident_bytes).sum::<usize>()
                + self.vectors.iter().map(|vector| size_of_val(vector.as_slice())).sum::<usize>(),
            activations: self.buffers.iter().map(Buffer::bytes).sum(),
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
        if source.bytes.len() != builder.file_bytes() {
            let (expected, found) = (builder.file_bytes(), source.bytes.len());
            return Err(Error::Length { what: "tensor bytes", expected, found });
        }
        let rows_per_chunk = (source.rows / (self.pool.threads() * 4)).max(1);
        let chunks: Vec<Mutex<Option<_>>> =
            builder.chunks(rows_per_chunk).map(|chunk| Mutex::new(Some(chunk))).collect();
        try_each(&self.pool, chunks.len(), |index| {
            let chunk = chunks[index].lock().unwrap_or_else(PoisonError::into_inner).take();
            chunk.map_or(Ok(()), |chunk| {
                let range = chunk.file_range();
                chunk.pack(&source.bytes[range])
            })
        })?;
        drop(chunks);
        self.matrices.push(builder.finish()?);
        Ok(MatrixId(self.matrices.len() as u32 - 1))
    }

    fn create_vector(&mut self, values: &[f32]) -> Result<VectorId, Error> {
        self.vectors.push(values.to_vec());
        Ok(VectorId(self.vectors.len() as u32 - 1))
    }

    fn create_rope(&mut self, source: RopeSource) -> Result<RopeId, Error> {
        let style = if source.interleaved { ops::RopeStyle::Interleaved } else { ops::RopeStyle::Half };
        let RopeSource { n_rot, base, freq_scale, factors, .. } = source;
        let params = ops::RopeParams { style, n_rot, base, freq_scale, factors, magnitude: 1.0 };
        self.ropes.push(ops::RopeTable::new(&params)?);
        Ok(RopeId(self.ropes.len() as u32 - 1))
    }

    fn kv_block_bytes(&self, shape: KvShape) -> Result<usize, Error> {
        Ok(layout(shape)?.bytes().next_multiple_of(attention::OFFSET_UNIT))
    }

    fn create_kv_layer(&mut self, group: usize, shape: KvShape, offset: usize) -> Result<KvLayerId, Error> {
        let window = match shape.window {
            None => None,
            Some(window) => {
                Some(NonZeroU32::new(u32::try_from(window).unwrap_or(u32::MAX)).ok_or(Error::EmptyWindow)?)
            }
        };
        self.kv_layers.push(KvLayer { group, offset, layout: layout(shape)?, heads: shape.heads, window });
        Ok(KvLayerId(self.kv_layers.len() as u32 - 1))
    }

    fn create_kv_arena(&mut self, bytes: usize, group_block_bytes: &[usize]) -> Result<(), Error> {
        self.arena = AlignedBuf::zeroed(bytes);
        self.group_block_bytes = group_block_bytes.to_vec();
        Ok(())
    }

    fn copy_kv(&mut self, copies: &[KvCopy]) -> Result<(), Error> {
        for copy in copies {
            let bytes = *self.group_block_bytes.get(copy.group).ok_or(Error::OutOfRange {
                what: "KV group",
                index: copy.group,
                len: self.group_block_bytes.len(),
            })?;
            let at = |unit: u32| unit as usize * attention::OFFSET_UNIT;
            let (from, to) = (at(copy.from), at(copy.to));
            let end = from.max(to) + bytes;
            if end > self.arena.len() {
                return Err(Error::OutsideArena { end: end as u64, len: self.arena.len() });
            }
            self.arena.copy_within(from..from + bytes, to);
        }
        Ok(())
    }

    fn begin_step(&mut self, step: &StepInput<'_>) -> Result<(), Error> {
        let own = &mut self.step;
        own.tokens.clear();
        own.tokens.extend_from_slice(step.tokens);
        own.rows.clear();
        let mut positions = 0;
        for (sequence, part) in step.sequences.iter().enumerate() {
            let rows = part.rows.len();
            positions = positions.max(part.context + rows);
            own.rows.extend(
                (part.context..part.context + rows)
                    .map(|position| QueryRow { sequence: sequence as u32, position: position as u32 }),
            );
        }
        if own.rows.len() != own.tokens.len() {
            let (expected, found) = (own.tokens.len(), own.rows.len());
            return Err(Error::Length { what: "rows of the step's sequences", expected, found });
        }
        self.ropes.iter_mut().for_each(|rope| rope.ensure(positions));
        self.make_plans(step.tables)
    }

    fn embed(&mut self, table: MatrixId, scale: f32, out: BufferId) -> Result<(), Error> {
        let matrix = self.matrices[table.0 as usize].view(0)?;
        let out = &mut self.buffers[out.0 as usize];
        out.set_rows(self.step.tokens.len())?;
        let (kernels, tokens) = (self.kernels, &self.step.tokens);
        let rows = out.share();
        try_each(&self.pool, tokens.len(), |row| {
            // SAFETY: every row is visited once.
            #[allow(unsafe_code, reason = "disjoint rows")]
            let values = unsafe { rows.row(row) };
            kernels.dequantize_row(matrix, tokens[row] as usize, values)?;
            if scale != 1.0 {
                values.iter_mut().for_each(|value| *value *= scale);
            }
            Ok(())
        })
    }

    fn norm(&mut self, x: BufferId, norm: &Norm, out: BufferId) -> Result<(), Error> {
        let (weight, bias) = (norm.weight.map(|id| id.0 as usize), norm.bias.map(|id| id.0 as usize));
        let weight = weight.map(|id| self.vectors[id].as_slice());
        let bias = bias.map(|id| self.vectors[id].as_slice());
        let (x, out) = pair(&mut self.buffers, x, out)?;
        out.set_rows(x.rows())?;
        let width = x.cols();
        match norm.rms {
            true => {
                let norm = ops::RmsNorm { weight, eps: norm.eps };
                ops::rms_norm(&self.pool, self.config.rows, norm, width, x.values(), out.values_mut())
            }
            false => {
                let norm = ops::LayerNorm { weight, bias, eps: norm.eps };
                ops::layer_norm(&self.pool, self.config.rows, norm, width, x.values(), out.values_mut())
            }
        }
    }

    fn matmul(&mut self, x: BufferId, jobs: &[MatmulJob]) -> Result<(), Error> {
        product::matmul(self, x, jobs)
    }

    fn qkv(&mut self, op: &QkvOp) -> Result<(), Error> {
        let layer = self.kv_layer(op.layer)?;
        let head = |norm: Option<Norm>| -> Result<Option<(Option<usize>, f32)>, Error> {
            match norm {
                Some(norm) if !norm.rms || norm.bias.is_some() => {
                    Err(Error::Unsupported { what: "a head norm that is no RMS norm" })
                }
                norm => Ok(norm.map(|norm| (norm.weight.map(|id| id.0 as usize), norm.eps))),
            }
        };
        let vectors = &self.vectors;
        let rms = |(weight, eps): (Option<usize>, f32)| ops::RmsNorm {
            weight: weight.map(|id| vectors[id].as_slice()),
            eps,
        };
        let step = ops::QkvStep {
            layer_offset: layer.offset,
            q_norm: head(op.q_norm)?.map(rms),
            k_norm: head(op.k_norm)?.map(rms),
            rope: op.rope.map(|id| &self.ropes[id.0 as usize]),
        };
        let plan = plan(&self.step, op.layer)?;
        let [q, k, v] = [op.q, op.k, op.v].map(|id| id.0 as usize);
        let [q, k, v] = self.buffers.get_disjoint_mut([q, k, v]).map_err(|_| Error::SameBuffer)?;
        let mut arena = ArenaView::new(&mut self.arena)?;
        let isa = self.config.rows;
        let qkv = ops::Qkv { q: q.values_mut(), k: k.values_mut(), v: v.values() };
        ops::norm_rope_write(&self.pool, isa, plan, &step, &mut arena, qkv)
    }

    fn attention(&mut self, op: &AttentionOp) -> Result<(), Error> {
        let layer = self.kv_layer(op.layer)?;
        let plan = plan(&self.step, op.layer)?;
        let (q, out) = pair(&mut self.buffers, op.q, op.out)?;
        out.set_rows(q.rows())?;
        let arena = ArenaView::new(&mut self.arena)?;
        let call = AttentionCall {
            arena: &arena,
            layer_offset: layer.offset,
            scale: op.scale,
            softcap: None,
            sinks: None,
        };
        let (isa, scratch) = (self.config.attention, &mut self.scratch);
        attention::attention(&self.pool, isa, plan, &call, q.values(), out.values_mut(), scratch)
    }

    fn gate(&mut self, gate: BufferId, up: BufferId, activation: GateActivation) -> Result<(), Error> {
        let (up, gate) = pair(&mut self.buffers, up, gate)?;
        ops::gate_in_place(
            &self.pool,
            self.config.rows,
            gate_activation(activation),
            gate.values_mut(),
            up.values(),
        )
    }

    fn add(&mut self, x: BufferId, y: BufferId, norm: Option<&Norm>, scale: f32) -> Result<(), Error> {
        let norm = match norm {
            Some(norm) if !norm.rms || norm.bias.is_some() => {
                return Err(Error::Unsupported { what: "a post norm that is no RMS norm" });
            }
            norm => norm.map(|norm| (norm.weight.map(|id| id.0 as usize), norm.eps)),
        };
        let vectors = &self.vectors;
        let (y, x) = pair(&mut self.buffers, y, x)?;
        let width = y.cols();
        match norm {
            None => ops::add_scaled(&self.pool, self.config.rows, x.values_mut(), scale, y.values()),
            Some((weight, eps)) => {
                let norm = ops::RmsNorm { weight: weight.map(|id| vectors[id].as_slice()), eps };
                ops::rms_norm_add(
                    &self.pool,
                    self.config.rows,
                    norm,
                    width,
                    y.values(),
                    scale,
                    x.values_mut(),
                )
            }
        }
    }

    fn moe(&mut self, op: &MoeOp) -> Result<(), Error> {
        moe::run(self, op)
    }

    fn gather_rows(&mut self, x: BufferId, rows: &[u32], out: BufferId) -> Result<(), Error> {
        let (x, out) = self.pair(x, out)?;
        out.set_rows(rows.len())?;
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
        out.extend(x.values().chunks_exact(x.cols()).map(|row| ops::argmax(isa, row) as u32));
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

    fn write_rows(&mut self, x: BufferId, values: &[f32]) -> Result<(), Error> {
        let x = &mut self.buffers[x.0 as usize];
        if !values.len().is_multiple_of(x.cols()) {
            return Err(Error::Length { what: "rows to write", expected: x.cols(), found: values.len() });
        }
        x.set_rows(values.len() / x.cols())?;
        x.values_mut().copy_from_slice(values);
        Ok(())
    }
}

impl CpuBackend {
    fn kv_layer(&self, id: KvLayerId) -> Result<KvLayer, Error> {
        let len = self.kv_layers.len();
        self.kv_layers.get(id.0 as usize).copied().ok_or(Error::OutOfRange {
            what: "KV layer",
            index: id.0 as usize,
            len,
        })
    }
}

/// The plan of a layer's shape for the step in flight.
fn plan(step: &Step, layer: KvLayerId) -> Result<&StepPlan, Error> {
    let index = layer.0 as usize;
    let plan = step.plan_of.get(index).and_then(|plan| step.plans.get(*plan));
    plan.ok_or(Error::OutOfRange { what: "KV layer of the step", index, len: step.plan_of.len() })
}

fn layout(shape: KvShape) -> Result<KvLayout, Error> {
    KvLayout::new(shape.kv_type, shape.block_tokens, shape.kv_heads, shape.head_dim, shape.v_head_dim)
}

fn gate_activation(activation: GateActivation) -> ops::Activation {
    match activation {
        GateActivation::Silu => ops::Activation::Silu,
        GateActivation::GeluTanh => ops::Activation::GeluTanh,
    }
}
