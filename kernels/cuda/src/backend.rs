//! GPU backend: the operations of [`Backend`] on a device.
//!
//! All data of an operation is in device memory: packed weights, f32 buffers, the arena, and one area with
//! everything that changes from step to step. An operation checks the arguments that its kernels do not
//! check, then launches; the host waits only where values are copied back. No operation falls back to the
//! CPU. An unsupported type, shape or argument is refused when the model is loaded.

use super::rowwise::RowwiseKernels;
use super::tape::Taped;
use super::{Arch, CudaError, Device, source};
use adapters::Adapters;
use attention::Caches;
use graphs::Graphs;
use kernels::Error;
use kernels::backend::{
    ActivationMode, AdapterId, AttentionOp, Backend, BackendInfo, BufferId, ConvOp, DeltaNetOp, EmbedOp,
    GateOp, GatedNormOp, HeadMatmulOp, HeadPart, HeadType, KvCopy, KvLayerId, KvShape, LowRankSource,
    Mamba2Op, MatmulJob, MatrixId, MatrixSource, MemoryUse, MoeOp, Norm, QkvOp, RopeId, RopeSource,
    StateLayerId, StateShape, StepCounts, StepInput, StepOps, VectorId,
};
use memory::{Buffers, GrowingBuffer, Vectors, same};
use modules::Modules;
use product::Matrices;
use recurrent::States;
use std::ops::Range;
use step::StepMemory;

mod adapters;
mod attention;
mod graphs;
mod heads;
mod memory;
mod modules;
mod moe;
mod product;
mod recurrent;
mod rows;
mod step;

pub use modules::Compile;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaConfig {
    /// Architecture that the device's kernels are compiled for.
    pub arch: Arch,
    /// Activation type that quantised matrices are multiplied with.
    pub activations: ActivationMode,
    /// Host threads that repack matrices.
    pub threads: usize,
}

pub struct CudaBackend {
    info: BackendInfo,
    device: Box<Taped>,
    modules: Modules,
    rowwise: RowwiseKernels,
    moe: Option<super::moe::MoeKernels>,
    sampling: Option<super::sampling::SamplingKernels>,
    activations: ActivationMode,
    buffers: Buffers,
    vectors: Vectors,
    matrices: Matrices,
    adapters: Adapters,
    caches: Caches,
    states: States,
    step: StepMemory,
    /// Scratch memory of a single operation.
    scratch: GrowingBuffer,
    /// Row numbers copied to and from the device.
    indices: GrowingBuffer,
    graphs: Graphs,
}

impl CudaBackend {
    /// Creates a backend on a device. `compile` compiles its kernels.
    ///
    /// # Errors
    /// Errors of the compiler or the device.
    pub fn new(
        device: Box<dyn Device>,
        config: CudaConfig,
        compile: Box<Compile>,
    ) -> Result<Self, CudaError> {
        let mut device = Box::new(Taped::new(device));
        let mut modules = Modules::new(compile);
        let rowwise = RowwiseKernels::load(device.as_mut(), modules.of(&source::ROWWISE)?)?;
        let required = match config.activations {
            ActivationMode::Mxfp8 | ActivationMode::Nvfp4 if !config.arch.has_block_scales() => {
                Some("12.0 or 12.1")
            }
            ActivationMode::Bf16 if !config.arch.has_group_products() => Some("9.0"),
            _ => None,
        };
        if let Some(required) = required {
            let (mode, arch) = (config.activations.name(), config.arch);
            let what = format!("activations = {mode} on {arch}; compute capability {required} is required");
            return Err(CudaError::Invalid { what });
        }
        let info = BackendInfo {
            device: device.name().to_owned(),
            isa: config.arch.to_string(),
            weight_path: config.activations.name().to_owned(),
            threads: config.threads,
        };
        Ok(Self {
            info,
            device,
            modules,
            rowwise,
            moe: None,
            sampling: None,
            activations: config.activations,
            buffers: Buffers::default(),
            vectors: Vectors::default(),
            matrices: Matrices::default(),
            adapters: Adapters::default(),
            caches: Caches::default(),
            states: States::default(),
            step: StepMemory::new(Vec::new()),
            scratch: GrowingBuffer::default(),
            indices: GrowingBuffer::default(),
            graphs: Graphs::default(),
        })
    }

    /// Turns graphs off: every kernel of every step is launched separately.
    #[must_use]
    pub fn without_graphs(mut self) -> Self {
        self.graphs.turn_off();
        self
    }
}

impl Backend for CudaBackend {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn memory(&self) -> MemoryUse {
        let rooms = self.scratch.bytes() + self.indices.bytes() + self.step.bytes() + self.states.bytes();
        MemoryUse {
            weights: self.matrices.bytes() + self.vectors.bytes() + self.adapters.bytes(),
            activations: self.buffers.bytes() + self.caches.rope_bytes() + rooms,
            kv: self.caches.arena_bytes,
        }
    }

    fn create_buffer(&mut self, rows: usize, cols: usize) -> Result<BufferId, Error> {
        self.buffers.create(self.device.as_mut(), rows, cols)
    }

    fn create_matrix(&mut self, source: MatrixSource<'_>) -> Result<MatrixId, Error> {
        let (device, modules) = (self.device.as_mut(), &mut self.modules);
        self.matrices.create(device, modules, self.activations, source, self.info.threads)
    }

    fn create_vector(&mut self, values: &[f32]) -> Result<VectorId, Error> {
        self.vectors.create(self.device.as_mut(), values)
    }

    fn set_order(&mut self, matrix: MatrixId, order: &[u32]) -> Result<(), Error> {
        self.matrices.set_order(self.device.as_mut(), &mut self.vectors, matrix, order)
    }

    fn create_rope(&mut self, source: RopeSource) -> Result<RopeId, Error> {
        self.caches.create_rope(self.device.as_mut(), &source)
    }

    fn kv_block_bytes(&self, shape: KvShape) -> Result<usize, Error> {
        attention::block_bytes(&shape)
    }

    fn create_kv_layer(&mut self, group: usize, shape: KvShape, offset: usize) -> Result<KvLayerId, Error> {
        attention::create_layer(self, group, shape, offset)
    }

    fn create_kv_arena(&mut self, bytes: usize, group_block_bytes: &[usize]) -> Result<(), Error> {
        self.graphs.clear(&mut self.device);
        self.caches.create_arena(self.device.as_mut(), bytes, group_block_bytes)?;
        self.step = StepMemory::new(self.caches.groups());
        Ok(())
    }

    fn copy_kv(&mut self, copies: &[KvCopy]) -> Result<(), Error> {
        self.caches.copy(self.device.as_mut(), copies)
    }

    fn load_adapter(&mut self, parts: &[LowRankSource<'_>]) -> Result<AdapterId, Error> {
        adapters::load(self, parts)
    }

    fn unload_adapter(&mut self, adapter: AdapterId) {
        if let Err(error) = adapters::unload(self, adapter) {
            tracing::error!(%error, "the memory of an adapter is not freed");
        }
    }

    fn use_adapters(&mut self, rows: &[(Range<usize>, AdapterId)]) -> Result<(), Error> {
        self.adapters.use_for(rows)
    }

    fn read_arena(&mut self, from: u32, out: &mut [u8]) -> Result<(), Error> {
        let from = self.caches.arena_ptr(from, out.len())?;
        Ok(self.device.download(from, out)?)
    }

    fn write_arena(&mut self, to: u32, bytes: &[u8]) -> Result<(), Error> {
        let to = self.caches.arena_ptr(to, bytes.len())?;
        Ok(self.device.upload(to, bytes)?)
    }

    fn begin_step(&mut self, step: &StepInput<'_>) -> Result<(), Error> {
        self.graphs.abort_recording(&mut self.device);
        self.caches.begin_step();
        self.states.check(step, self.caches.arena_bytes)?;
        let adapters = self.adapters.begin(self.device.as_mut(), step.tokens.len())?;
        self.step.begin(self.device.as_mut(), step, self.caches.arena_bytes, adapters)?;
        // Last, because a refused step must not change the states.
        self.states.begin(step);
        Ok(())
    }

    fn begin_ops(&mut self) -> Result<StepOps, Error> {
        let Self { graphs, device, step, buffers, .. } = self;
        graphs.begin(device, step, buffers)
    }

    fn end_ops(&mut self) -> Result<(), Error> {
        let Self { graphs, device, step, buffers, .. } = self;
        Ok(graphs.end(device, step, buffers)?)
    }

    fn step_counts(&self) -> StepCounts {
        self.graphs.counts()
    }

    fn embed(&mut self, op: &EmbedOp) -> Result<(), Error> {
        product::embed(self, op)
    }

    fn norm(&mut self, x: BufferId, norm: &Norm, out: BufferId) -> Result<(), Error> {
        rows::norm(self, x, norm, out, &[])
    }

    fn norm_for(
        &mut self,
        x: BufferId,
        norm: &Norm,
        out: BufferId,
        readers: &[MatrixId],
    ) -> Result<(), Error> {
        rows::norm(self, x, norm, out, readers)
    }

    fn matmul(&mut self, x: BufferId, jobs: &[MatmulJob]) -> Result<(), Error> {
        product::matmul(self, x, jobs)
    }

    fn head_matmul(&mut self, op: &HeadMatmulOp) -> Result<(), Error> {
        heads::head_matmul(self, op)
    }

    fn place_heads(&mut self, x: BufferId, heads: usize, out: &HeadPart) -> Result<(), Error> {
        heads::place_heads(self, x, heads, out)
    }

    fn qkv(&mut self, op: &QkvOp) -> Result<(), Error> {
        attention::qkv(self, op)
    }

    fn attention(&mut self, op: &AttentionOp) -> Result<(), Error> {
        attention::attention(self, op)
    }

    fn gate(&mut self, op: &GateOp) -> Result<(), Error> {
        rows::gate(self, op, &[])
    }

    fn gate_for(&mut self, op: &GateOp, readers: &[MatrixId]) -> Result<(), Error> {
        rows::gate(self, op, readers)
    }

    fn scale_rows(&mut self, x: BufferId, gate: BufferId) -> Result<(), Error> {
        rows::scale_rows(self, x, gate)
    }

    fn scale(&mut self, x: BufferId, factor: f32) -> Result<(), Error> {
        rows::scale(self, x, factor, None)
    }

    fn add(&mut self, x: BufferId, y: BufferId, norm: Option<&Norm>, scale: f32) -> Result<(), Error> {
        rows::add(self, x, y, norm, scale)
    }

    fn moe(&mut self, op: &MoeOp) -> Result<(), Error> {
        moe::run(self, op)
    }

    fn gather_rows(&mut self, x: BufferId, rows: &[u32], out: BufferId) -> Result<(), Error> {
        rows::gather(self, x, rows, out)
    }

    fn finish_logits(&mut self, x: BufferId, scale: f32, softcap: Option<f32>) -> Result<(), Error> {
        rows::scale(self, x, scale, softcap)
    }

    fn argmax(&mut self, x: BufferId, out: &mut Vec<u32>) -> Result<(), Error> {
        rows::argmax(self, x, out)
    }

    fn best_values(&self) -> usize {
        rows::BEST
    }

    fn best(&mut self, x: BufferId, out: &mut Vec<(u32, f32)>) -> Result<(), Error> {
        rows::best(self, x, out)
    }

    fn read_row(&mut self, x: BufferId, row: usize, out: &mut [f32]) -> Result<(), Error> {
        let view = self.buffers.get(x)?;
        same("row to read into", view.cols, out.len())?;
        let mut bytes = vec![0; size_of_val(out)];
        self.device.download(view.row(row)?, &mut bytes)?;
        for (value, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
            *value = f32::from_ne_bytes(*bytes);
        }
        Ok(())
    }

    fn write_rows(&mut self, x: BufferId, values: &[f32]) -> Result<(), Error> {
        let cols = self.buffers.either(x)?.cols.max(1);
        if !values.len().is_multiple_of(cols) {
            return Err(Error::Length { what: "rows to write", expected: cols, found: values.len() });
        }
        let view = self.buffers.shape(x, values.len() / cols, cols)?;
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        same("bytes of rows", view.bytes(), bytes.len())?;
        Ok(self.device.upload(view.ptr, &bytes)?)
    }

    fn state_bytes(&self, shape: StateShape, heads: &[HeadType]) -> Result<usize, Error> {
        Ok(super::recurrent::DeviceState::new(shape, heads)?.bytes())
    }

    fn create_state_layer(
        &mut self,
        shape: StateShape,
        heads: &[HeadType],
        offset: usize,
    ) -> Result<StateLayerId, Error> {
        recurrent::create_layer(self, shape, heads, offset)
    }

    fn read_state(
        &mut self,
        layer: StateLayerId,
        slot: u32,
        conv: &mut [f32],
        recurrent: &mut [f32],
    ) -> Result<(), Error> {
        self.states.read(self.device.as_mut(), &self.caches, layer, slot, (conv, recurrent))
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
        rows::gated_norm(self, op)
    }
}
