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
handle!(StateLayerId);

/// An `[rows][cols]` f32 activation buffer on the device. It has a capacity; how many rows of which width it
/// holds is decided by the op that fills it.
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

/// The recurrent state of one layer: where it lies in a sequence's state slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StateLayerId(pub(crate) u32);

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
    /// Whether a query sees only keys at its own position and before. Without it a sequence's whole input
    /// must be in one step, and every row sees all of it.
    pub causal: bool,
}

/// The recurrence that a state belongs to. It decides which way a backend lays the matrices out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StateKind {
    /// [`DeltaNetOp`].
    DeltaNet,
    /// [`Mamba2Op`].
    Mamba2,
}

/// What a head's matrix is stored as. Rows are computed in f32 whatever it is; what a row leaves behind is rounded
/// after each row, so that it does not matter where a chunk ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HeadType {
    /// As computed.
    F32,
    /// Rounded to the nearest bfloat16, ties to even.
    Bf16,
}

/// Shape of one layer's recurrent state: the inputs of its convolution's last `taps` positions, all f32, and `heads`
/// matrices of `rows` x `cols`, each of a [`HeadType`]. The oldest of those inputs is read by no later row; it is
/// kept because reference implementations keep it and states are compared with theirs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StateShape {
    /// Which op advances it.
    pub kind: StateKind,
    /// Channels of the convolution.
    pub channels: usize,
    /// Positions that the convolution sees, the token's own included.
    pub taps: usize,
    /// Heads.
    pub heads: usize,
    /// Delta net: width of a key; Mamba-2: width of a head.
    pub rows: usize,
    /// Delta net: width of a value; Mamba-2: width of B and C.
    pub cols: usize,
}

impl StateShape {
    /// Values of the convolution's past inputs, `[taps][channels]`, oldest position first.
    pub fn conv_len(&self) -> usize {
        self.taps * self.channels
    }

    /// Values of the matrices, `[heads][rows][cols]`.
    pub fn recurrent_len(&self) -> usize {
        self.heads * self.rows * self.cols
    }
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
    /// Multiplies cosine and sine; 1 but for YaRN.
    pub magnitude: f32,
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
    /// Elements normalised together; divides the row. The weight has as many elements, or as the row.
    pub width: usize,
}

/// Which row of a table each row of a step takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EmbedIndex {
    /// That of its token.
    Token,
    /// That of its position.
    Position,
    /// That of its sequence's segment, where there is one: [`StepSequence::segment_start`].
    Segment,
}

/// `out[row] (+)= scale * table[index of row]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmbedOp {
    /// The table.
    pub table: MatrixId,
    /// Which of its rows.
    pub index: EmbedIndex,
    /// Multiplies the table's row.
    pub scale: f32,
    /// Added to what stands in `out` instead of replacing it.
    pub accumulate: bool,
    /// Where the rows go.
    pub out: BufferId,
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
    /// Norm of each query head.
    pub q_norm: Option<Norm>,
    /// Keys and values to write; none where the layer reads another's.
    pub kv: Option<KvWrite>,
    /// Rotary embedding of q and k.
    pub rope: Option<RopeId>,
    /// Whose heads q has, and where k and v go.
    pub layer: KvLayerId,
}

/// Keys and values on their way into the cache.
#[derive(Debug, Clone, Copy)]
pub struct KvWrite {
    /// `[rows][kv_heads * head_dim]`, changed in place.
    pub k: BufferId,
    /// `[rows][kv_heads * v_head_dim]`, changed in place. It may be `k` itself: then the values are the keys as
    /// they are before norm and rope.
    pub v: BufferId,
    /// Norm of each key head.
    pub k_norm: Option<Norm>,
    /// Norm of each value head.
    pub v_norm: Option<Norm>,
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
    /// `[heads]`: per head one more logit, not scaled, with no value, joins the softmax.
    pub sinks: Option<VectorId>,
    /// Whose keys and values.
    pub layer: KvLayerId,
}

/// Depthwise causal convolution over positions and silu, in place:
/// `x_t[c] = silu(bias[c] + sum_j weight[c][j] x_{t-taps+1+j}[c])`. The first step of a recurrent layer: it
/// reads its past inputs from the state and leaves there the last `taps`, this step's included.
#[derive(Debug, Clone, Copy)]
pub struct ConvOp {
    /// `[rows][channels]`, changed in place.
    pub x: BufferId,
    /// `[channels][taps]`.
    pub weight: VectorId,
    /// `[channels]`.
    pub bias: Option<VectorId>,
    /// Whose past inputs.
    pub layer: StateLayerId,
}

/// Gated delta net of the step's rows, token by token in position order: see `model::spec::DeltaNetSpec`.
#[derive(Debug, Clone, Copy)]
pub struct DeltaNetOp {
    /// `[rows][2 k_heads k_dim + v_heads v_dim]`: q, k, v of all heads, after the convolution.
    pub qkv: BufferId,
    /// `[rows][v_heads]`, before the sigmoid.
    pub beta: BufferId,
    /// `[rows][v_heads]`, before `dt_bias` and softplus.
    pub alpha: BufferId,
    /// `[v_heads]`, below zero.
    pub a: VectorId,
    /// `[v_heads]`.
    pub dt_bias: VectorId,
    /// Heads of q and k.
    pub k_heads: usize,
    /// Value head h uses key head `h % k_heads` if true, `h / (v_heads / k_heads)` otherwise.
    pub tiled: bool,
    /// Added to the squared length of q and k.
    pub l2_eps: f32,
    /// `[rows][v_heads v_dim]`.
    pub out: BufferId,
    /// Whose state: `heads` = v_heads, `rows` = k_dim, `cols` = v_dim.
    pub layer: StateLayerId,
}

/// Mamba-2 of the step's rows, token by token in position order: see `model::spec::Mamba2Spec`.
#[derive(Debug, Clone, Copy)]
pub struct Mamba2Op {
    /// `[rows][heads head_dim + 2 groups state]`: x, B of all groups, C of all groups, after the convolution.
    pub xbc: BufferId,
    /// `[rows][heads]`, before `dt_bias` and softplus.
    pub dt: BufferId,
    /// `[heads]`, below zero.
    pub a: VectorId,
    /// `[heads]`.
    pub d: VectorId,
    /// `[heads]`.
    pub dt_bias: VectorId,
    /// Groups that share B and C.
    pub groups: usize,
    /// `[rows][heads head_dim]`.
    pub out: BufferId,
    /// Whose state: `rows` = head_dim, `cols` = state.
    pub layer: StateLayerId,
}

/// A norm and a silu gate, in place on `x`.
#[derive(Debug, Clone, Copy)]
pub struct GatedNormOp {
    /// Changed in place.
    pub x: BufferId,
    /// As wide as `x`.
    pub gate: BufferId,
    /// RMS norm of each run of `norm.width` elements.
    pub norm: Norm,
    /// `norm(x * silu(gate))` if true (Mamba-2), `norm(x) * silu(gate)` otherwise (delta net).
    pub gate_first: bool,
}

/// What multiplies, or replaces, an FFN's inner values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GateActivation {
    /// x * sigmoid(x)
    Silu,
    /// GELU, tanh form.
    GeluTanh,
    /// GELU by the error function.
    GeluErf,
    /// sigmoid(x)
    Sigmoid,
    /// `g = min(gate, 7)`, `u = clamp(up, -7, 7)`, `g sigmoid(1.702 g) (u + 1)`; needs an `up`.
    ClampedSwiglu,
}

/// `gate[row] = activation(gate[row]) * up[row][from..from + cols of gate]`, in place, also quantised where
/// needed next.
#[derive(Debug, Clone, Copy)]
pub struct GateOp {
    /// Changed in place.
    pub gate: BufferId,
    /// What the activation multiplies; none leaves the activation alone.
    pub up: Option<BufferId>,
    /// First column of `up` that takes part.
    pub up_from: usize,
    /// The activation.
    pub activation: GateActivation,
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
        /// `[experts][ff]`.
        gate_bias: Option<VectorId>,
        /// `[experts][ff]`.
        up_bias: Option<VectorId>,
    },
    /// One matrix of `2 ff` rows, gate first.
    Fused {
        /// The matrix.
        gate_up: MatrixId,
        /// Per-expert factor of the product.
        scale: Option<VectorId>,
        /// `[experts][2 ff]`.
        bias: Option<VectorId>,
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
    /// `[experts][hidden]`, added before the weighting.
    pub down_bias: Option<VectorId>,
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
    /// First position of the second segment, for encoders that tell two texts apart.
    pub segment_start: Option<usize>,
}

/// Most rows of a sequence whose state is [`StepState::deferred`].
pub const MAX_DEFERRED_ROWS: usize = 8;

/// What a step does with the recurrent state of one sequence. Slots are byte offsets / 64 into the arena.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepState {
    /// The slot with the state before the sequence's first row; none stands for a state of zeros.
    pub read: Option<u32>,
    /// The slot that gets the state after its last row; it may be the one that is read.
    pub write: u32,
    /// Further slots, ascending by row, each for the state after one row.
    pub exports: Vec<StateExport>,
    /// Nothing is written by the step, but by [`Backend::accept`], once it is known how many of the rows count: for
    /// rows that are guesses, [`MAX_DEFERRED_ROWS`] at most, without exports.
    pub deferred: bool,
}

/// A copy of the state in the middle of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateExport {
    /// The row, among those of the sequence in this step.
    pub row: usize,
    /// The slot that gets the state after it.
    pub slot: u32,
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
    /// One for each sequence where the model has recurrent layers, else empty.
    pub states: &'a [StepState],
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

    /// Creates an f32 buffer with room for `rows` x `cols`.
    fn create_buffer(&mut self, rows: usize, cols: usize) -> Result<BufferId, Error>;

    /// Uploads and repacks a matrix.
    fn create_matrix(&mut self, source: MatrixSource<'_>) -> Result<MatrixId, Error>;

    /// Uploads a vector.
    fn create_vector(&mut self, values: &[f32]) -> Result<VectorId, Error>;

    /// Prepares a rotary embedding.
    fn create_rope(&mut self, source: RopeSource) -> Result<RopeId, Error>;

    /// Bytes that one block of one layer takes; a multiple of 64.
    fn kv_block_bytes(&self, shape: KvShape) -> Result<usize, Error>;

    /// Declares a layer's KV: its group and its byte offset inside the group's blocks (a multiple of 64). Layers
    /// that share keys and values lie at one place; they may differ in their query heads.
    fn create_kv_layer(&mut self, group: usize, shape: KvShape, offset: usize) -> Result<KvLayerId, Error>;

    /// Bytes that one layer's state takes in a slot; a multiple of 64. `heads` names the type of each head.
    fn state_bytes(&self, shape: StateShape, heads: &[HeadType]) -> Result<usize, Error>;

    /// Declares a layer's state: its shape, the type of each head, its byte offset inside a slot (a multiple of 64).
    fn create_state_layer(
        &mut self,
        shape: StateShape,
        heads: &[HeadType],
        offset: usize,
    ) -> Result<StateLayerId, Error>;

    /// Reads a layer's state out of a slot: the convolution's past inputs `[taps][channels]`, oldest first,
    /// and the matrices `[heads][rows][cols]`.
    fn read_state(
        &mut self,
        layer: StateLayerId,
        slot: u32,
        conv: &mut [f32],
        recurrent: &mut [f32],
    ) -> Result<(), Error>;

    /// Copies bytes of the arena to the host, from byte offset / 64 `from` on.
    fn read_arena(&mut self, from: u32, out: &mut [u8]) -> Result<(), Error>;

    /// Copies bytes from the host into the arena, to byte offset / 64 `to`.
    fn write_arena(&mut self, to: u32, bytes: &[u8]) -> Result<(), Error>;

    /// Allocates the KV arena. `group_block_bytes[g]` is the size of a block of group g over all its layers.
    fn create_kv_arena(&mut self, bytes: usize, group_block_bytes: &[usize]) -> Result<(), Error>;

    /// Copies blocks inside the arena, before the next step.
    fn copy_kv(&mut self, copies: &[KvCopy]) -> Result<(), Error>;

    /// Takes in what is new in this step.
    fn begin_step(&mut self, step: &StepInput<'_>) -> Result<(), Error>;

    /// See [`EmbedOp`].
    fn embed(&mut self, op: &EmbedOp) -> Result<(), Error>;

    /// `out[row] = norm(x[row])`; also quantised if the next op multiplies with 8-bit activations. `out` may be
    /// `x`.
    fn norm(&mut self, x: BufferId, norm: &Norm, out: BufferId) -> Result<(), Error>;

    /// Products of the rows of `x`, all in one go.
    fn matmul(&mut self, x: BufferId, jobs: &[MatmulJob]) -> Result<(), Error>;

    /// See [`QkvOp`].
    fn qkv(&mut self, op: &QkvOp) -> Result<(), Error>;

    /// See [`AttentionOp`].
    fn attention(&mut self, op: &AttentionOp) -> Result<(), Error>;

    /// See [`ConvOp`].
    fn conv(&mut self, op: &ConvOp) -> Result<(), Error>;

    /// See [`DeltaNetOp`].
    fn delta_net(&mut self, op: &DeltaNetOp) -> Result<(), Error>;

    /// See [`Mamba2Op`].
    fn mamba2(&mut self, op: &Mamba2Op) -> Result<(), Error>;

    /// Ends the deferred part of the step: of each sequence whose state is deferred, in their order, `rows` of its
    /// rows count (none to all). Its slot [`StepState::write`] gets, of every layer that the step ran, the state of
    /// having been stepped by these rows, bit for bit. A sequence that none is accepted of keeps the state that it
    /// had. Once for each step that defers; the next step forgets what was deferred.
    ///
    /// The device keeps the inputs of the deferred rows' recurrences, not their states: per layer a few rows of
    /// `channels` values and of one or two per head, where a state has `rows * cols` per head.
    fn accept(&mut self, rows: &[usize]) -> Result<(), Error>;

    /// See [`GatedNormOp`].
    fn gated_norm(&mut self, op: &GatedNormOp) -> Result<(), Error>;

    /// See [`GateOp`].
    fn gate(&mut self, op: &GateOp) -> Result<(), Error>;

    /// `x[row] *= sigmoid(gate[row][0])`.
    fn scale_rows(&mut self, x: BufferId, gate: BufferId) -> Result<(), Error>;

    /// `x *= factor`.
    fn scale(&mut self, x: BufferId, factor: f32) -> Result<(), Error>;

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
