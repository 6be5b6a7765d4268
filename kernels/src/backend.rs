//! The op vocabulary: what the decoder may ask of a device.
//!
//! Buffers, matrices and vectors are opaque handles: the host never addresses a device's memory. Everything
//! that changes from step to step comes in one [`StepInput`]; the host reads back sampled tokens and the
//! logits rows it asked for. A backend refuses what it cannot do exactly; it never ignores an argument.
//!
//! Batch invariance (DESIGN section 4) is part of every op's contract: a row's result depends on nothing but
//! that row, its position and its own context.

use crate::Error;
use std::ops::Range;

pub use crate::attention::{KvType, Placement as BlockTable};
pub use crate::matmul::ActivationMode;

/// Handles are numbers that only the backend that made them understands.
macro_rules! handle {
    ($name:ident) => {
        impl $name {
            /// A handle of a backend's own making.
            pub const fn new(number: u32) -> Self {
                Self(number)
            }

            /// The number that it was made with.
            pub const fn number(self) -> u32 {
                self.0
            }
        }
    };
}

handle!(BufferId);
handle!(MatrixId);
handle!(VectorId);
handle!(RopeId);
handle!(KvLayerId);

/// An `[rows][cols]` f32 activation buffer on the device. It has a capacity and a current number of rows,
/// set by the op that fills it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BufferId(pub(crate) u32);

/// A weight matrix on the device, repacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MatrixId(pub(crate) u32);

/// An f32 vector on the device: norm weight, bias, rope factors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct VectorId(pub(crate) u32);

/// A rotary embedding prepared on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RopeId(pub(crate) u32);

/// The KV of one layer: where it lies in its group's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvLayerId(pub(crate) u32);

/// What a backend says about itself; part of a worker's numeric class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendInfo {
    /// `cpu`, `cuda`, ...
    pub device: String,
    /// Instruction set or compute capability.
    pub isa: String,
    /// Matmul path, such as `int8` or `f32`.
    pub weight_path: String,
    /// Compute threads.
    pub threads: usize,
}

/// Bytes of device memory in use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Packed weights and vectors.
    pub weights: usize,
    /// Activations and scratch.
    pub activations: usize,
    /// KV arena.
    pub kv: usize,
}

/// Shape of one layer's KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Query heads that read it.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a key head.
    pub head_dim: usize,
    /// Width of a value head.
    pub v_head_dim: usize,
    /// Positions per block: 16, 32 or 64.
    pub block_tokens: usize,
    /// Element type.
    pub kv_type: KvType,
    /// `Some(w)`: query p sees keys j with p - j < w, and only these have blocks.
    pub window: Option<usize>,
}

/// A matrix to upload: `experts` matrices of `rows` x `cols`, row-major blocks of `ggml_type`, back to back.
#[derive(Debug, Clone, Copy)]
pub struct MatrixSource<'a> {
    /// ggml type id.
    pub ggml_type: u32,
    /// Outputs of one matrix.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// 1 for an ordinary matrix.
    pub experts: usize,
    /// The bytes as in the file.
    pub bytes: &'a [u8],
}

/// Rotary embedding: see `model::spec::RopeSpec`.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeSource {
    /// Pairs (2i, 2i+1) if true, (i, i + n_rot/2) otherwise.
    pub interleaved: bool,
    /// Elements that rotate.
    pub n_rot: usize,
    /// Base of the frequencies.
    pub base: f32,
    /// Multiplies every angle.
    pub freq_scale: f32,
    /// Divides frequency i; `n_rot / 2` values.
    pub factors: Option<Vec<f32>>,
}

/// Normalisation of each row, or of each head of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// Root mean square if true, mean and variance otherwise.
    pub rms: bool,
    /// Weight; none multiplies by one.
    pub weight: Option<VectorId>,
    /// Bias.
    pub bias: Option<VectorId>,
    /// Added to the mean square or variance.
    pub eps: f32,
}

/// One product `out (+)= scale * (matrix x) + bias`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MatmulJob {
    /// Weights.
    pub matrix: MatrixId,
    /// Where the product goes.
    pub out: BufferId,
    /// Added per output.
    pub bias: Option<VectorId>,
    /// Multiplies the product.
    pub scale: f32,
    /// Added to what stands in `out` instead of replacing it.
    pub accumulate: bool,
}

/// Per-head norm and rope of q and k, then k and v into the cache: one op over the step's rows.
#[derive(Debug, Clone, Copy)]
pub struct QkvOp {
    /// `[rows][heads * head_dim]`, changed in place.
    pub q: BufferId,
    /// `[rows][kv_heads * head_dim]`, changed in place.
    pub k: BufferId,
    /// `[rows][kv_heads * v_head_dim]`.
    pub v: BufferId,
    /// Norm of each query head.
    pub q_norm: Option<Norm>,
    /// Norm of each key head.
    pub k_norm: Option<Norm>,
    /// Rotary embedding of both.
    pub rope: Option<RopeId>,
    /// Where k and v go.
    pub layer: KvLayerId,
}

/// Paged attention of the step's rows over their own sequences.
#[derive(Debug, Clone, Copy)]
pub struct AttentionOp {
    /// `[rows][heads * head_dim]`.
    pub q: BufferId,
    /// `[rows][heads * v_head_dim]`.
    pub out: BufferId,
    /// Multiplies q.k.
    pub scale: f32,
    /// Whose keys and values.
    pub layer: KvLayerId,
}

/// Gate activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GateActivation {
    /// x * sigmoid(x)
    Silu,
    /// GELU, tanh form.
    GeluTanh,
}

/// Gate and up of a mixture's experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ExpertGateUp {
    /// Two matrices of `ff` rows.
    Separate {
        /// Gate, scaled per expert by `gate_scale`.
        gate: MatrixId,
        /// Up.
        up: MatrixId,
        /// Per-expert factor of the gate product.
        gate_scale: Option<VectorId>,
        /// Per-expert factor of the up product.
        up_scale: Option<VectorId>,
    },
    /// One matrix of `2 ff` rows, gate first.
    Fused {
        /// The matrix.
        gate_up: MatrixId,
        /// Per-expert factor of the product.
        scale: Option<VectorId>,
    },
}

/// Mixture of experts over the step's rows: route, gather, gated FFN per expert, weighted sum in rank order.
#[derive(Debug, Clone, Copy)]
pub struct MoeOp {
    /// Normed input `[rows][hidden]`.
    pub x: BufferId,
    /// Router logits `[rows][experts]`.
    pub router: BufferId,
    /// `out += scale * sum`, or `out = ...` when not accumulating.
    pub out: BufferId,
    /// See above.
    pub accumulate: bool,
    /// See above.
    pub scale: f32,
    /// Experts per row.
    pub used: usize,
    /// Weights of the chosen experts sum to one.
    pub renormalise: bool,
    /// Gate and up.
    pub gate_up: ExpertGateUp,
    /// Down.
    pub down: MatrixId,
    /// Per-expert factor of the down product.
    pub down_scale: Option<VectorId>,
    /// Inner width of an expert.
    pub ff: usize,
    /// Gate activation.
    pub activation: GateActivation,
}

/// One sequence's part of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepSequence {
    /// Its rows; positions are `context..context + rows.len()`.
    pub rows: Range<usize>,
    /// Positions already in the cache.
    pub context: usize,
}

/// All that changes from step to step.
#[derive(Debug, Clone, Copy)]
pub struct StepInput<'a> {
    /// One token per row.
    pub tokens: &'a [u32],
    /// The sequences, in row order, covering all rows.
    pub sequences: &'a [StepSequence],
    /// `tables[group][sequence]`.
    pub tables: &'a [Vec<BlockTable<'a>>],
}

/// A copy of a block to another block of the same group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvCopy {
    /// The group.
    pub group: usize,
    /// Byte offset / 64 of the block read.
    pub from: u32,
    /// Byte offset / 64 of the block written.
    pub to: u32,
}

/// A device that serves the op vocabulary.
pub trait Backend: Send {
    /// Who it is.
    fn info(&self) -> &BackendInfo;

    /// Memory in use.
    fn memory(&self) -> MemoryUse;

    /// Binds the calling thread to its CPU, where CPUs are assigned. For the one thread that runs steps.
    fn bind_thread(&self) {}

    /// Creates an f32 buffer of at most `rows` x `cols`.
    fn create_buffer(&mut self, rows: usize, cols: usize) -> Result<BufferId, Error>;

    /// Uploads and repacks a matrix.
    fn create_matrix(&mut self, source: MatrixSource<'_>) -> Result<MatrixId, Error>;

    /// Uploads a vector.
    fn create_vector(&mut self, values: &[f32]) -> Result<VectorId, Error>;

    /// Prepares a rotary embedding.
    fn create_rope(&mut self, source: RopeSource) -> Result<RopeId, Error>;

    /// Bytes that one block of one layer takes; a multiple of 64.
    fn kv_block_bytes(&self, shape: KvShape) -> Result<usize, Error>;

    /// Declares a layer's KV: its group and its byte offset inside the group's blocks (a multiple of 64).
    fn create_kv_layer(&mut self, group: usize, shape: KvShape, offset: usize) -> Result<KvLayerId, Error>;

    /// Allocates the KV arena. `group_block_bytes[g]` is the size of a block of group g over all its layers.
    fn create_kv_arena(&mut self, bytes: usize, group_block_bytes: &[usize]) -> Result<(), Error>;

    /// Copies blocks inside the arena, before the next step.
    fn copy_kv(&mut self, copies: &[KvCopy]) -> Result<(), Error>;

    /// Takes in what is new in this step.
    fn begin_step(&mut self, step: &StepInput<'_>) -> Result<(), Error>;

    /// `out[row] = scale * table[token of row]`.
    fn embed(&mut self, table: MatrixId, scale: f32, out: BufferId) -> Result<(), Error>;

    /// `out[row] = norm(x[row])`; also quantised if the next op multiplies with 8-bit activations.
    fn norm(&mut self, x: BufferId, norm: &Norm, out: BufferId) -> Result<(), Error>;

    /// Products of the rows of `x`, all in one go.
    fn matmul(&mut self, x: BufferId, jobs: &[MatmulJob]) -> Result<(), Error>;

    /// See [`QkvOp`].
    fn qkv(&mut self, op: &QkvOp) -> Result<(), Error>;

    /// See [`AttentionOp`].
    fn attention(&mut self, op: &AttentionOp) -> Result<(), Error>;

    /// `gate[row] = activation(gate[row]) * up[row]`, in place, also quantised where needed next.
    fn gate(&mut self, gate: BufferId, up: BufferId, activation: GateActivation) -> Result<(), Error>;

    /// `x[row] += scale * norm(y[row])`.
    fn add(&mut self, x: BufferId, y: BufferId, norm: Option<&Norm>, scale: f32) -> Result<(), Error>;

    /// See [`MoeOp`].
    fn moe(&mut self, op: &MoeOp) -> Result<(), Error>;

    /// `out` gets the named rows of `x`, in that order.
    fn gather_rows(&mut self, x: BufferId, rows: &[u32], out: BufferId) -> Result<(), Error>;

    /// `x = softcap(scale * x)`, `softcap(v) = c tanh(v / c)`.
    fn finish_logits(&mut self, x: BufferId, scale: f32, softcap: Option<f32>) -> Result<(), Error>;

    /// Index of the largest element of each row; ties go to the lowest index.
    fn argmax(&mut self, x: BufferId, out: &mut Vec<u32>) -> Result<(), Error>;

    /// Copies one row to the host.
    fn read_row(&mut self, x: BufferId, row: usize, out: &mut [f32]) -> Result<(), Error>;

    /// Copies all current rows from the host (layer shards, tests).
    fn write_rows(&mut self, x: BufferId, values: &[f32]) -> Result<(), Error>;
}
