//! A model as data: what one decoder walks, what cache layout, memory plans and layer shards are read off.
//!
//! A GGUF's metadata is translated into a [`ModelSpec`] by one file per architecture (`arch/`). Tensors are
//! named, not loaded: weights come through a tensor source.

mod tensors;

/// A whole model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// Value of `general.architecture`.
    pub arch: String,
    /// Rows of the embedding and output matrices.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Longest sequence the model was made for, in tokens.
    pub context_length: usize,
    /// Token embedding.
    pub embedding: EmbeddingSpec,
    /// Decoder layers in order.
    pub layers: Vec<LayerSpec>,
    /// Norm before the output matrix.
    pub output_norm: NormSpec,
    /// Output head.
    pub output: OutputSpec,
}

/// Token embedding: row of `tensor`, times `scale`.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbeddingSpec {
    /// `[hidden, vocab]` in GGUF order.
    pub tensor: String,
    /// 1 where the architecture has none.
    pub scale: f32,
}

/// Output head: `logits = softcap(scale * W x)`.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputSpec {
    /// The matrix; the embedding's own tensor where they are tied.
    pub linear: LinearSpec,
    /// `c * tanh(logit / c)`.
    pub softcap: Option<f32>,
    /// Multiplies the logits; 1 where the architecture has none.
    pub scale: f32,
}

/// `y = scale * (W x) + b`. `rows` outputs, `cols` inputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinearSpec {
    /// Name of the weight tensor, `[cols, rows]` in GGUF order.
    pub weight: String,
    /// Name of the bias tensor, `[rows]`.
    pub bias: Option<String>,
    /// Name of a `[1]` (per expert: `[experts]`) tensor that multiplies the product.
    pub scale: Option<String>,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
}

/// Normalisation by root mean square or mean and variance; the weight is as stored (GGUF never needs `1 + w`).
#[derive(Debug, Clone, PartialEq)]
pub struct NormSpec {
    /// Which.
    pub kind: NormKind,
    /// Name of the weight; none multiplies by one.
    pub weight: Option<String>,
    /// Name of the bias (layer norm).
    pub bias: Option<String>,
    /// Added to the mean square or variance.
    pub eps: f32,
    /// Elements normalised together.
    pub width: usize,
}

/// See [`NormSpec`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// x / sqrt(mean(x^2) + eps) * w
    Rms,
    /// (x - mean) / sqrt(var + eps) * w + b
    Layer,
}

/// One decoder layer: `x += post(mixer(pre(x)))`, then `x += post(ffn(pre(x)))`.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// Norm of the residual before the mixer.
    pub mixer_norm: Option<NormSpec>,
    /// Attention, later delta net and Mamba-2.
    pub mixer: MixerSpec,
    /// Norm of the mixer's output before it is added.
    pub mixer_post_norm: Option<NormSpec>,
    /// Norm of the residual before the FFN.
    pub ffn_norm: Option<NormSpec>,
    /// Dense or mixture of experts.
    pub ffn: FfnSpec,
    /// Norm of the FFN's output before it is added.
    pub ffn_post_norm: Option<NormSpec>,
    /// Multiplies what mixer and FFN add to the residual; 1 where the architecture has none.
    pub residual_scale: f32,
}

/// What mixes information over positions.
#[derive(Debug, Clone, PartialEq)]
pub enum MixerSpec {
    /// Softmax attention, full or windowed.
    Attention(AttentionSpec),
}

/// Attention of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSpec {
    /// `Some(w)`: query p sees keys j with p - j < w.
    pub window: Option<usize>,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; query head h reads kv head h / (heads / kv_heads).
    pub kv_heads: usize,
    /// Width of a query/key head.
    pub head_dim: usize,
    /// Width of a value head.
    pub v_head_dim: usize,
    /// Query projection.
    pub q: LinearSpec,
    /// Key projection.
    pub k: LinearSpec,
    /// Value projection.
    pub v: LinearSpec,
    /// Output projection.
    pub o: LinearSpec,
    /// Per-head norm of q before rope.
    pub q_norm: Option<NormSpec>,
    /// Per-head norm of k before rope.
    pub k_norm: Option<NormSpec>,
    /// Rotary embedding of q and k.
    pub rope: Option<RopeSpec>,
    /// Multiplies q.k.
    pub scale: f32,
}

/// Rotary position embedding: `angle_i(pos) = pos * base^(-2i/n_rot) / factor_i * freq_scale`.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeSpec {
    /// Which elements make a pair.
    pub style: RopeStyle,
    /// Elements of a head that rotate; the others pass through.
    pub n_rot: usize,
    /// Base of the frequencies.
    pub base: f32,
    /// Multiplies every angle.
    pub freq_scale: f32,
    /// Name of an F32 `[n_rot/2]` tensor of frequency factors.
    pub factors: Option<String>,
}

/// See [`RopeSpec`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// Pairs (2i, 2i+1).
    Interleaved,
    /// Pairs (i, i + n_rot/2), "NEOX".
    Half,
}

/// Gate activation of an FFN: `down(act(gate x) * up x)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// x * sigmoid(x)
    Silu,
    /// GELU, tanh form, exact in f32.
    GeluTanh,
}

/// Feed-forward part of a layer.
#[derive(Debug, Clone, PartialEq)]
pub enum FfnSpec {
    /// One gated FFN.
    Dense {
        /// Gate projection.
        gate: LinearSpec,
        /// Up projection.
        up: LinearSpec,
        /// Down projection.
        down: LinearSpec,
        /// Gate activation.
        activation: Activation,
    },
    /// Mixture of experts.
    Moe(MoeSpec),
}

/// Mixture of experts: softmax over all experts, the best `used` by probability (ties: lower index),
/// weights renormalised if `renormalise`, `y = sum w_e down_e(act(gate_e x) * up_e x)` in rank order.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeSpec {
    /// Router, `experts` rows.
    pub router: LinearSpec,
    /// Experts in all.
    pub experts: usize,
    /// Experts per token.
    pub used: usize,
    /// Weights of the chosen experts sum to one.
    pub renormalise: bool,
    /// Gate and up of every expert.
    pub gate_up: ExpertGateUp,
    /// Down of every expert, `[n_ff, hidden, experts]`; `rows`/`cols` of one expert.
    pub down: LinearSpec,
    /// Inner width of one expert.
    pub expert_ff: usize,
    /// Gate activation.
    pub activation: Activation,
}

/// How gate and up matrices of the experts are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExpertGateUp {
    /// Two tensors `[hidden, n_ff, experts]`.
    Separate {
        /// Gate.
        gate: LinearSpec,
        /// Up.
        up: LinearSpec,
    },
    /// One tensor `[hidden, 2 n_ff, experts]`, gate rows first.
    Fused(LinearSpec),
}

impl ModelSpec {
    /// The attention of layer `index`, if its mixer is attention.
    pub fn attention(&self, index: usize) -> Option<&AttentionSpec> {
        self.layers.get(index).map(|layer| match &layer.mixer {
            MixerSpec::Attention(attention) => attention,
        })
    }
}

impl AttentionSpec {
    /// Elements of one position's keys.
    pub fn k_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Elements of one position's values.
    pub fn v_width(&self) -> usize {
        self.kv_heads * self.v_head_dim
    }
}
