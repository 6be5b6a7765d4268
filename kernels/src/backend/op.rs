//! The ops as data: the handles that they read and write, and what they compute.

use crate::Error;

use super::handle::{BufferId, KvLayerId, MatrixId, RopeId, StateLayerId, VectorId};

/// Normalisation of each row, or of each head of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// RMS norm if true, layer norm (mean and variance) otherwise.
    pub rms: bool,
    /// `None`: no weight is multiplied.
    pub weight: Option<VectorId>,
    pub bias: Option<VectorId>,
    /// Added to the mean square or variance.
    pub eps: f32,
    /// Number of elements that are normalised together; divides the row. The weight has `width` elements or
    /// the row's width.
    pub width: usize,
}

/// Selects the table row for each row of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EmbedIndex {
    /// The row's token.
    Token,
    Position,
    /// The segment of the row's position, 0 or 1:
    /// [`StepSequence::segment_start`](super::StepSequence::segment_start).
    Segment,
}

/// `out[row] (+)= scale * table[index of row]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmbedOp {
    pub table: MatrixId,
    pub index: EmbedIndex,
    /// Multiplies the table's row.
    pub scale: f32,
    /// If true, the result is added to `out` instead of replacing it.
    pub accumulate: bool,
    pub out: BufferId,
}

/// One product `out (+)= scale * (matrix x) + bias`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MatmulJob {
    pub matrix: MatrixId,
    pub out: BufferId,
    pub bias: Option<VectorId>,
    pub scale: f32,
    /// If true, the product is added to `out` instead of replacing it.
    pub accumulate: bool,
}

/// Per-head norm and rope of q and k, then a write of k and v to the cache: one op over the step's rows.
#[derive(Debug, Clone, Copy)]
pub struct QkvOp {
    /// `[rows][heads * head_dim]`, changed in place.
    pub q: BufferId,
    /// Norm of each query head, or of other runs of the row.
    pub q_norm: Option<Norm>,
    /// Keys and values to write. `None`: the layer reads the cache of another layer.
    pub kv: Option<KvWrite>,
    /// Rotary embedding of q and k.
    pub rope: Option<RopeId>,
    /// Factor of q by position, after the rotation.
    pub q_growth: Option<QueryGrowth>,
    /// The layer whose heads `q` has and whose cache receives k and v.
    pub layer: KvLayerId,
}

/// `1 + beta ln(1 + floor(position / every))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryGrowth {
    pub beta: f32,
    /// At least 1.
    pub every: usize,
}

impl QueryGrowth {
    pub fn at(&self, position: usize) -> f32 {
        let steps = (position / self.every.max(1)) as f64;
        (1.0 + f64::from(self.beta) * steps.ln_1p()) as f32
    }
}

/// Keys and values to write to the cache.
#[derive(Debug, Clone, Copy)]
pub struct KvWrite {
    /// `[rows][kv_heads * head_dim]`, changed in place.
    pub k: BufferId,
    /// `[rows][kv_heads * v_head_dim]`, changed in place. It may be the buffer `k`: then the values are the
    /// keys before norm and rope.
    pub v: BufferId,
    /// Norm of each key head.
    pub k_norm: Option<Norm>,
    /// Norm of each value head.
    pub v_norm: Option<Norm>,
}

/// Product of each head of a row with that head's matrix: `out[row][head][at + i] = scale (W[head] x[row][head])[i]`.
#[derive(Debug, Clone, Copy)]
pub struct HeadMatmulOp {
    /// `[rows][heads * columns of a matrix]`.
    pub x: BufferId,
    /// A matrix for each head.
    pub matrix: MatrixId,
    pub heads: usize,
    pub scale: f32,
    pub out: HeadPart,
}

/// Consecutive columns of each head of a row. The other columns keep their values.
#[derive(Debug, Clone, Copy)]
pub struct HeadPart {
    /// `[rows][heads * width]`.
    pub buffer: BufferId,
    /// Columns of a head.
    pub width: usize,
    /// First column in the head.
    pub at: usize,
}

/// Paged attention of the step's rows over their own sequences.
#[derive(Debug, Clone, Copy)]
pub struct AttentionOp {
    /// `[rows][heads * head_dim]`.
    pub q: BufferId,
    /// `[rows][heads * v_head_dim]`.
    pub out: BufferId,
    pub scale: f32,
    /// `c`: scores become `c tanh(score / c)`.
    pub softcap: Option<f32>,
    /// `[heads]`: one extra logit per head in the softmax, unscaled and without a value.
    pub sinks: Option<VectorId>,
    pub layer: KvLayerId,
}

/// Depthwise causal convolution over positions, in place:
/// `x_t[c] = bias[c] + sum_j weight[c][j] x_{t-taps+1+j}[c]`, or silu of that. This is the first op of a
/// recurrent layer. It reads its past inputs from the state and stores there the last `taps` inputs,
/// including this step's.
#[derive(Debug, Clone, Copy)]
pub struct ConvOp {
    /// `[rows][channels]`, changed in place.
    pub x: BufferId,
    /// `[channels][taps]`.
    pub weight: VectorId,
    /// `[channels]`.
    pub bias: Option<VectorId>,
    pub silu: bool,
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
    /// The layer of the state: `heads` = v_heads, `rows` = k_dim, `cols` = v_dim.
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
    /// The layer of the state: `rows` = head_dim, `cols` = state.
    pub layer: StateLayerId,
}

/// A norm and a silu gate, in place on `x`.
#[derive(Debug, Clone, Copy)]
pub struct GatedNormOp {
    pub x: BufferId,
    /// As wide as `x`.
    pub gate: BufferId,
    /// RMS norm of each group of `norm.width` elements.
    pub norm: Norm,
    /// `norm(x * silu(gate))` if true (Mamba-2), `norm(x) * silu(gate)` otherwise (delta net).
    pub gate_first: bool,
}

/// Activation of an FFN's gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GateActivation {
    Silu,
    GeluTanh,
    /// GELU by the error function.
    GeluErf,
    Sigmoid,
    /// `max(x, 0)^2`
    ReluSquared,
    /// `x`: the result is the product alone.
    Identity,
    /// `g = min(gate, 7)`, `u = clamp(up, -7, 7)`, `g sigmoid(1.702 g) (u + 1)`; requires an `up`.
    ClampedSwiglu,
}

/// `gate[row] = activation(gate[row]) * up[row][from..from + cols of gate]`, in place. Also quantises the
/// result if the next op needs 8-bit activations.
#[derive(Debug, Clone, Copy)]
pub struct GateOp {
    pub gate: BufferId,
    /// Factor of the activation. `None`: the activation alone is the result.
    pub up: Option<BufferId>,
    /// First column of `up` that is used.
    pub up_from: usize,
    pub activation: GateActivation,
}

/// Gate and up of a mixture's experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ExpertGateUp {
    /// Two matrices of `ff` rows.
    Separate {
        /// `[ff]` rows per expert.
        gate: MatrixId,
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
        gate_up: MatrixId,
        /// Per-expert factor of the product.
        scale: Option<VectorId>,
        /// `[experts][2 ff]`.
        bias: Option<VectorId>,
    },
}

/// How a router's logits choose experts. The default: softmax, the highest scores, no groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Selection {
    /// Scores are sigmoids instead of the softmax over all experts.
    pub sigmoid: bool,
    /// `[experts]`, added to the scores for the choice alone. Weights are scores without it.
    pub bias: Option<VectorId>,
    pub groups: Option<ExpertGroups>,
}

/// Equal groups of consecutive experts. Only experts of the best groups are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Divides the number of experts; at most 32.
    pub count: usize,
    /// Groups of a row.
    pub used: usize,
    /// A group's score is the sum of its two best scores if true, else its best one.
    pub two_best: bool,
}

impl ExpertGroups {
    /// # Errors
    /// [`Error::OutOfRange`] if the groups do not divide the experts, or are too few for `used` experts.
    pub fn check(&self, experts: usize, used: usize) -> Result<(), Error> {
        let Self { count, used: groups, .. } = *self;
        let divides = (1..=32).contains(&count) && experts.is_multiple_of(count);
        if !divides || !(1..=count).contains(&groups) {
            return Err(Error::OutOfRange { what: "groups of experts", index: groups, len: count });
        }
        match used <= experts / count * groups {
            true => Ok(()),
            false => {
                Err(Error::OutOfRange { what: "experts per row", index: used, len: experts / count * groups })
            }
        }
    }
}

/// Mixture of experts over the step's rows: route, gather, gated FFN per expert, weighted sum in rank order.
#[derive(Debug, Clone, Copy)]
pub struct MoeOp {
    /// Normed input `[rows][hidden]`.
    pub x: BufferId,
    /// Router logits `[rows][experts]`.
    pub router: BufferId,
    /// `out += scale * sum` if `accumulate`, else `out = scale * sum`.
    pub out: BufferId,
    pub accumulate: bool,
    pub scale: f32,
    /// Experts per row.
    pub used: usize,
    pub selection: Selection,
    /// If true, the weights of the chosen experts are scaled to sum to one.
    pub renormalise: bool,
    pub gate_up: ExpertGateUp,
    pub down: MatrixId,
    /// Per-expert factor of the down product.
    pub down_scale: Option<VectorId>,
    /// `[experts][hidden]`, added before the weighting.
    pub down_bias: Option<VectorId>,
    /// Inner width of an expert.
    pub ff: usize,
    pub activation: GateActivation,
}
