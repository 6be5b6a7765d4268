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
    /// A second embedding that every layer reads a slice of.
    pub per_layer_input: Option<PerLayerInputSpec>,
    /// Layers in order.
    pub layers: Vec<LayerSpec>,
    /// What becomes of the last layer's residual.
    pub output: OutputSpec,
}

/// Embedding: `norm(scale * tokens[token] + positions[position] + token_types[0])`.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbeddingSpec {
    /// `[hidden, vocab]` in GGUF order.
    pub tensor: String,
    /// 1 where the architecture has none.
    pub scale: f32,
    /// Learned absolute positions.
    pub positions: Option<TableSpec>,
    /// Learned segment types.
    pub token_types: Option<TableSpec>,
    /// Norm of the sum.
    pub norm: Option<NormSpec>,
}

/// A table of rows of the residual's width.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableSpec {
    /// `[hidden, rows]` in GGUF order.
    pub tensor: String,
    /// Rows.
    pub rows: usize,
}

/// Per-layer embeddings (Gemma 4): with x0 the embedded tokens, the slice of layer l is
/// `(norm(projection x0)[l] + table_scale * table[token][l]) / sqrt(2)`, `width` values for each layer.
#[derive(Debug, Clone, PartialEq)]
pub struct PerLayerInputSpec {
    /// `[width * layers, vocab]` in GGUF order.
    pub table: String,
    /// Multiplies a row of the table.
    pub table_scale: f32,
    /// Values of one layer.
    pub width: usize,
    /// From x0 to `width * layers` values.
    pub projection: LinearSpec,
    /// Norm of the projection, layer by layer.
    pub norm: NormSpec,
}

/// What a model is for.
#[derive(Debug, Clone, PartialEq)]
pub enum OutputSpec {
    /// It generates: logits of the next token.
    Logits(LogitsSpec),
    /// It encodes: one vector, or a few scores, for a whole text.
    Pooled(PooledSpec),
}

/// The text's vector out of its tokens' vectors, and what is made of it.
#[derive(Debug, Clone, PartialEq)]
pub struct PooledSpec {
    /// Which tokens' vectors.
    pub pooling: Pooling,
    /// Scores instead of a vector.
    pub classifier: Option<ClassifierSpec>,
}

/// See [`PooledSpec`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// The mean of all tokens.
    Mean,
    /// The first token.
    First,
    /// The last token.
    Last,
}

/// `scores = out tanh(dense v)`, or `out v` without `dense`.
#[derive(Debug, Clone, PartialEq)]
pub struct ClassifierSpec {
    /// Before the tanh.
    pub dense: Option<LinearSpec>,
    /// One row per score.
    pub out: LinearSpec,
}

/// Output head: `logits = softcap(scale * W norm(x))`.
#[derive(Debug, Clone, PartialEq)]
pub struct LogitsSpec {
    /// Norm before the matrix.
    pub norm: NormSpec,
    /// The matrix; the embedding's own tensor where they are tied.
    pub linear: LinearSpec,
    /// `c * tanh(logit / c)`.
    pub softcap: Option<f32>,
    /// Multiplies the logits; 1 where the architecture has none.
    pub scale: f32,
}

/// `y = factor * scale * (W x) + b`. `rows` outputs, `cols` inputs.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearSpec {
    /// Name of the weight tensor, `[cols, rows]` in GGUF order.
    pub weight: String,
    /// Name of the bias tensor, `[rows]`.
    pub bias: Option<String>,
    /// Name of a `[1]` (per expert: `[experts]`) tensor that multiplies the product.
    pub scale: Option<String>,
    /// Multiplies the product; 1 where the architecture has none.
    pub factor: f32,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Which rows of the tensor these are, where it holds several matrices.
    pub slice: Option<RowSlice>,
}

/// Rows r of a tensor of `of` rows with `start <= r % period < start + len`, in order: `of / period * len` rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RowSlice {
    /// Rows of the tensor.
    pub of: usize,
    /// Divides `of`.
    pub period: usize,
    /// First row of each period.
    pub start: usize,
    /// Rows of each period.
    pub len: usize,
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

/// One layer: `x = out(x + post(mixer(pre(x))))`, then the same with the FFN, then the per-layer input, then
/// `output_scale`. Every norm is optional.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// Norm of the residual before the mixer.
    pub mixer_norm: Option<NormSpec>,
    /// Attention, delta net or Mamba-2.
    pub mixer: MixerSpec,
    /// Norm of the mixer's output before it is added.
    pub mixer_post_norm: Option<NormSpec>,
    /// Norm of the residual itself after the addition (post-norm encoders).
    pub mixer_out_norm: Option<NormSpec>,
    /// Norm of the residual before the FFN.
    pub ffn_norm: Option<NormSpec>,
    /// The FFN's parts; their sum is added.
    pub ffn: Vec<FfnPart>,
    /// Norm of the sum of all parts before it is added.
    pub ffn_post_norm: Option<NormSpec>,
    /// Norm of the residual itself after the addition.
    pub ffn_out_norm: Option<NormSpec>,
    /// What the layer makes of its slice of the model's per-layer input.
    pub per_layer: Option<PerLayerSpec>,
    /// Name of a `[1]` tensor that multiplies the residual at the end.
    pub output_scale: Option<String>,
    /// Multiplies what mixer and FFN add to the residual; 1 where the architecture has none.
    pub residual_scale: f32,
}

/// `x += norm(projection (gelu_tanh(gate x) * slice))`.
#[derive(Debug, Clone, PartialEq)]
pub struct PerLayerSpec {
    /// From the residual to the slice's width.
    pub gate: LinearSpec,
    /// Back.
    pub projection: LinearSpec,
    /// Norm of what is added.
    pub norm: NormSpec,
}

/// What mixes information over positions.
#[derive(Debug, Clone, PartialEq)]
pub enum MixerSpec {
    /// Softmax attention, full or windowed.
    Attention(AttentionSpec),
    /// Gated delta net: a recurrent state per head, corrected towards each new value.
    DeltaNet(DeltaNetSpec),
    /// Mamba-2: a recurrent state per head, decayed and added to.
    Mamba2(Mamba2Spec),
}

/// Attention of one layer: `out = o (softmax(scale q.k) v * sigmoid(gate))`.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSpec {
    /// Whether a query sees only keys at its own position and before.
    pub causal: bool,
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
    /// Per-head norm of q before rope.
    pub q_norm: Option<NormSpec>,
    /// Keys and values.
    pub kv: KvSpec,
    /// Rotary embedding of q and k.
    pub rope: Option<RopeSpec>,
    /// Multiplies q.k.
    pub scale: f32,
    /// Name of a `[heads]` tensor: per head one more logit, not scaled, with no value, joins the softmax.
    pub sinks: Option<String>,
    /// Sigmoid gate of what attention gives, element by element, before `o`.
    pub gate: Option<LinearSpec>,
    /// Output projection.
    pub o: LinearSpec,
}

/// Where a layer's keys and values come from.
#[derive(Debug, Clone, PartialEq)]
#[allow(clippy::large_enum_variant, reason = "one per layer, and in most models all are the large one")]
pub enum KvSpec {
    /// Its own.
    Own(OwnKvSpec),
    /// Those of an earlier layer of the same shape.
    Shared {
        /// The layer.
        layer: usize,
    },
}

/// Key and value projections of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct OwnKvSpec {
    /// Key projection.
    pub k: LinearSpec,
    /// Value projection; none takes the key projection's product, before its norm and rope.
    pub v: Option<LinearSpec>,
    /// Per-head norm of k before rope.
    pub k_norm: Option<NormSpec>,
    /// Per-head norm of v.
    pub v_norm: Option<NormSpec>,
}

/// Depthwise causal convolution over positions, then silu: `y_t[c] = silu(b[c] + sum_j w[j, c] x_{t-taps+1+j}[c])`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvSpec {
    /// Name of the weight, `[taps, channels]` in GGUF order; the last tap is the token's own.
    pub weight: String,
    /// Name of the bias, `[channels]`.
    pub bias: Option<String>,
    /// Positions that a token sees, its own included.
    pub taps: usize,
    /// Channels.
    pub channels: usize,
}

/// Gated delta net (arXiv 2412.06464). Per value head a state S of `k_dim` x `v_dim`, per token
/// `S = exp(g) S`, `d = beta (v - S^T k)`, `S += k d^T`, `o = S^T q` with q and k of unit length (q also times
/// `k_dim^-0.5`), `beta = sigmoid(beta x)`, `g = a softplus(alpha x + dt_bias)`;
/// `out (norm(o) * silu(gate x))`.
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaNetSpec {
    /// Heads of q and k.
    pub k_heads: usize,
    /// Heads of v; a multiple of `k_heads`.
    pub v_heads: usize,
    /// Width of a head of q and k.
    pub k_dim: usize,
    /// Width of a head of v.
    pub v_dim: usize,
    /// Which key head a value head uses.
    pub grouping: HeadGrouping,
    /// All heads of q, then of k, then of v; they go through `conv`.
    pub qkv: LinearSpec,
    /// Convolution of q, k and v.
    pub conv: ConvSpec,
    /// Output gate, `v_heads * v_dim`.
    pub gate: LinearSpec,
    /// Strength of the correction, one value per value head.
    pub beta: LinearSpec,
    /// Decay, one value per value head.
    pub alpha: LinearSpec,
    /// Name of `[v_heads]`, below zero: `-exp(A_log)`.
    pub a: String,
    /// Name of `[v_heads]`.
    pub dt_bias: String,
    /// Added to the squared length of q and k.
    pub l2_eps: f32,
    /// Norm of each head's output, before the gate.
    pub norm: NormSpec,
    /// Output projection.
    pub out: LinearSpec,
}

/// See [`DeltaNetSpec`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HeadGrouping {
    /// Value head h uses key head h / (v_heads / k_heads).
    Grouped,
    /// Value head h uses key head h % k_heads.
    Tiled,
}

/// Mamba-2 (arXiv 2405.21060). Per head a state S of `head_dim` x `state`, per token
/// `S = exp(dt a) S + dt x B^T`, `y = S C + d x` with `dt = softplus(dt x + dt_bias)`;
/// `out norm(y * silu(z))`, normed per group.
#[derive(Debug, Clone, PartialEq)]
pub struct Mamba2Spec {
    /// Heads.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Groups that share B and C: head h uses group h / (heads / groups).
    pub groups: usize,
    /// Width of B and C.
    pub state: usize,
    /// Output gate, `heads * head_dim`.
    pub z: LinearSpec,
    /// x, then B and C of all groups; they go through `conv`.
    pub xbc: LinearSpec,
    /// Step size, one value per head.
    pub dt: LinearSpec,
    /// Convolution of x, B and C.
    pub conv: ConvSpec,
    /// Name of `[heads]`, below zero: `-exp(A_log)`.
    pub a: String,
    /// Name of `[heads]`.
    pub d: String,
    /// Name of `[heads]`.
    pub dt_bias: String,
    /// Norm of each group's gated output; the weight runs over all groups.
    pub norm: NormSpec,
    /// Output projection.
    pub out: LinearSpec,
}

/// Rotary position embedding: `angle_i(pos) = pos * base^(-2i/n_rot) / factor_i * freq_scale`; cosine and sine
/// are multiplied by `magnitude`.
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
    /// `n_rot / 2` divisors of the frequencies.
    pub factors: Option<RopeFactors>,
    /// 1 but for YaRN.
    pub magnitude: f32,
}

/// See [`RopeSpec`].
#[derive(Debug, Clone, PartialEq)]
pub enum RopeFactors {
    /// Name of an F32 tensor of them.
    Tensor(String),
    /// The factors, computed from hyper-parameters.
    Values(Vec<f32>),
}

/// See [`RopeSpec`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// Pairs (2i, 2i+1).
    Interleaved,
    /// Pairs (i, i + n_rot/2), "NEOX".
    Half,
}

/// Activation of an FFN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// x * sigmoid(x)
    Silu,
    /// GELU, tanh form, exact in f32.
    GeluTanh,
    /// GELU by the error function.
    GeluErf,
    /// `g = min(gate, 7)`, `u = clamp(up, -7, 7)`, `g sigmoid(1.702 g) (u + 1)`: gpt-oss, gated only.
    ClampedSwiglu,
}

/// One of the parts whose sum is a layer's feed-forward.
#[derive(Debug, Clone, PartialEq)]
pub struct FfnPart {
    /// Norm of the residual for this part alone; none takes what the layer's `ffn_norm` gives.
    pub own_norm: Option<NormSpec>,
    /// What it computes.
    pub ffn: FfnSpec,
    /// Norm of its output before the parts are summed.
    pub post_norm: Option<NormSpec>,
}

/// What a feed-forward part computes.
#[derive(Debug, Clone, PartialEq)]
pub enum FfnSpec {
    /// `down(act(gate x) * up x)`, times `sigmoid(row_gate x)` where there is one.
    Gated {
        /// Gate projection.
        gate: LinearSpec,
        /// Up projection.
        up: LinearSpec,
        /// Down projection.
        down: LinearSpec,
        /// Gate activation.
        activation: Activation,
        /// One row: how much of a shared expert a token takes.
        row_gate: Option<LinearSpec>,
    },
    /// `down(act(up x))`.
    Plain {
        /// Up projection.
        up: LinearSpec,
        /// Down projection.
        down: LinearSpec,
        /// Activation.
        activation: Activation,
    },
    /// Mixture of experts.
    Moe(MoeSpec),
}

/// Mixture of experts: softmax over all experts, the best `used` by probability (ties: lower index),
/// weights renormalised if `renormalise`, `y = sum w_e down_e(act(gate_e x) * up_e x)` in rank order.
/// Biases of `gate_up` and `down` are `[rows, experts]`; the down bias is inside the weighting.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeSpec {
    /// Norm of the residual for the router alone; none routes on the experts' input.
    pub router_norm: Option<NormSpec>,
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
#[derive(Debug, Clone, PartialEq)]
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
        match &self.layers.get(index)?.mixer {
            MixerSpec::Attention(attention) => Some(attention),
            MixerSpec::DeltaNet(_) | MixerSpec::Mamba2(_) => None,
        }
    }

    /// The output head, if the model generates.
    pub fn logits(&self) -> Option<&LogitsSpec> {
        match &self.output {
            OutputSpec::Logits(logits) => Some(logits),
            OutputSpec::Pooled(_) => None,
        }
    }

    /// Whether any layer carries a recurrent state from token to token.
    pub fn is_recurrent(&self) -> bool {
        self.layers.iter().any(|layer| !matches!(layer.mixer, MixerSpec::Attention(_)))
    }
}

impl LinearSpec {
    /// All `rows` of the tensor `weight`, with nothing added or multiplied.
    pub fn new(weight: impl Into<String>, cols: usize, rows: usize) -> Self {
        Self { weight: weight.into(), bias: None, scale: None, factor: 1.0, rows, cols, slice: None }
    }

    /// Rows of the tensor, of which these are all or some.
    pub fn tensor_rows(&self) -> usize {
        self.slice.map_or(self.rows, |slice| slice.of)
    }
}

impl RowSlice {
    /// How many rows these are.
    pub fn rows(&self) -> usize {
        self.of / self.period.max(1) * self.len
    }
}

impl ConvSpec {
    /// Elements that a sequence keeps: the inputs of as many positions as a token sees. The oldest is read by no
    /// later token; reference implementations keep it, and states are compared with theirs.
    pub fn state_elements(&self) -> usize {
        self.taps * self.channels
    }
}

impl MixerSpec {
    /// Elements that a sequence keeps whatever its length: convolution and recurrent state; 0 for attention.
    pub fn state_elements(&self) -> usize {
        match self {
            Self::Attention(_) => 0,
            Self::DeltaNet(net) => net.conv.state_elements() + net.v_heads * net.k_dim * net.v_dim,
            Self::Mamba2(mamba) => mamba.conv.state_elements() + mamba.heads * mamba.head_dim * mamba.state,
        }
    }
}

impl FfnPart {
    /// A part on the layer's own norm, its output added as it is.
    pub fn plain(ffn: FfnSpec) -> Self {
        Self { own_norm: None, ffn, post_norm: None }
    }
}

impl AttentionSpec {
    /// The projections of its own keys and values, if it has them.
    pub fn own_kv(&self) -> Option<&OwnKvSpec> {
        match &self.kv {
            KvSpec::Own(own) => Some(own),
            KvSpec::Shared { .. } => None,
        }
    }

    /// Elements of one position's keys.
    pub fn k_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Elements of one position's values.
    pub fn v_width(&self) -> usize {
        self.kv_heads * self.v_head_dim
    }
}
