//! Mixers (attention, delta net, Mamba-2, short convolution) and their components.

use super::{LinearSpec, NormSpec};

/// The part of a layer that mixes information across positions.
#[derive(Debug, Clone, PartialEq)]
pub enum MixerSpec {
    /// Softmax attention, full or windowed.
    Attention(AttentionSpec),
    /// Gated delta net: a recurrent state per head, corrected towards each new value.
    DeltaNet(DeltaNetSpec),
    /// Mamba-2: a recurrent state per head, decayed and added to.
    Mamba2(Mamba2Spec),
    /// Short convolution between two gates: its state is the last inputs.
    ShortConv(ShortConvSpec),
}

/// Attention of one layer: `out = o (softmax(scale q.k) v * sigmoid(gate))`.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSpec {
    /// Whether a query attends only to keys at its own and earlier positions.
    pub causal: bool,
    /// `Some(w)`: query p sees keys j with p - j < w.
    pub window: Option<usize>,
    pub heads: usize,
    /// Key/value heads; query head h reads kv head h / (heads / kv_heads).
    pub kv_heads: usize,
    /// Width of a query/key head.
    pub head_dim: usize,
    /// Width of a value head.
    pub v_head_dim: usize,
    pub q: LinearSpec,
    /// Norm of q before rope: of each head, or of all heads together, as its width says.
    pub q_norm: Option<NormSpec>,
    pub kv: KvSpec,
    /// Rotary embedding of q and k.
    pub rope: Option<RopeSpec>,
    pub q_growth: Option<QueryGrowth>,
    pub scale: f32,
    /// `c`: scores become `c tanh(score / c)`.
    pub softcap: Option<f32>,
    /// Name of a `[heads]` tensor: one more logit per head, not scaled and without a value, takes part in the
    /// softmax.
    pub sinks: Option<String>,
    /// Sigmoid gate, applied to attention's output element by element before `o`.
    pub gate: Option<LinearSpec>,
    pub o: LinearSpec,
}

/// Factor of a query: `1 + beta ln(1 + floor(position / every))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryGrowth {
    pub beta: f32,
    /// At least 1.
    pub every: usize,
}

#[derive(Debug, Clone, PartialEq)]
#[allow(clippy::large_enum_variant, reason = "one per layer, and in most models all are the large one")]
pub enum KvSpec {
    Own(OwnKvSpec),
    /// Uses the keys and values of an earlier layer of the same shape.
    Shared {
        layer: usize,
    },
    /// One compressed vector a position for all heads.
    Latent(Box<LatentSpec>),
}

/// Multi-head latent attention (arXiv 2405.04434), absorbed: the cache has one key head, `[rotated part | latent]`, and
/// the value is the key's latent part. The query of a head is `[rope(q_rope x) | k_up (q x)]`, its result `v_up` times
/// the weighted latents; [`AttentionSpec::q`] has the rows of `q` alone.
#[derive(Debug, Clone, PartialEq)]
pub struct LatentSpec {
    /// Compresses the input of the query projections.
    pub q_down: Option<(LinearSpec, NormSpec)>,
    /// The part of each query head that rotates.
    pub q_rope: LinearSpec,
    /// The part of the key that rotates, common to all heads.
    pub k_rope: LinearSpec,
    /// The latent vector before its norm.
    pub latent: LinearSpec,
    pub latent_norm: NormSpec,
    /// A matrix for each head, from the query without rope to the latent's width.
    pub k_up: LinearSpec,
    /// A matrix for each head, from the latent's width to the value's.
    pub v_up: LinearSpec,
}

/// Key and value projections of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct OwnKvSpec {
    pub k: LinearSpec,
    /// Value projection. `None` uses the output of the key projection before its norm and rope.
    pub v: Option<LinearSpec>,
    /// Norm of k before rope: of each head, or of all heads together, as its width says.
    pub k_norm: Option<NormSpec>,
    pub v_norm: Option<NormSpec>,
}

/// Depthwise causal convolution over positions: `y_t[c] = b[c] + sum_j w[j, c] x_{t-taps+1+j}[c]`. The recurrences read
/// silu of that.
#[derive(Debug, Clone, PartialEq)]
pub struct ConvSpec {
    /// Name of the weight, `[taps, channels]` in GGUF order; the last tap is the token's own.
    pub weight: String,
    /// Name of the bias, `[channels]`.
    pub bias: Option<String>,
    /// Positions that affect a token, including its own.
    pub taps: usize,
    pub channels: usize,
    /// Numbers of channels, and a factor of their inputs. Channels behind them have none.
    pub factors: Vec<(usize, f32)>,
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
    /// Mapping of value heads to key heads.
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
    pub out: LinearSpec,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HeadGrouping {
    /// Value head h uses key head h / (v_heads / k_heads).
    Grouped,
    /// Value head h uses key head h % k_heads.
    Tiled,
}

/// Mamba-2 (arXiv 2405.21060). Per head a state S of `head_dim` x `state`, per token
/// `S = exp(dt a) S + dt x B^T`, `y = S C + d x` with `dt = softplus(dt x + dt_bias)`;
/// `out norm(y * silu(z))`, normed per group, or `out (norm(y) * silu(z))`.
#[derive(Debug, Clone, PartialEq)]
pub struct Mamba2Spec {
    pub heads: usize,
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
    /// Norm of each group's gated output; the weight runs over all groups. `None`: the output is only gated.
    pub norm: Option<NormSpec>,
    /// Whether the norm comes before the gate.
    pub norm_first: bool,
    pub out: LinearSpec,
}

/// Gated short convolution (LFM2): `out (c * conv(b * x))`, element by element.
#[derive(Debug, Clone, PartialEq)]
pub struct ShortConvSpec {
    /// Gate of the convolution's input.
    pub b: LinearSpec,
    /// Gate of the convolution's output.
    pub c: LinearSpec,
    pub x: LinearSpec,
    pub conv: ConvSpec,
    pub out: LinearSpec,
}

/// Rotary position embedding: `angle_i(pos) = pos * base^(-2i/n_rot) / factor_i * freq_scale`; cosine and sine
/// are multiplied by `magnitude`.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeSpec {
    /// Elements that form a pair.
    pub style: RopeStyle,
    /// Elements of a head that rotate; the others pass through.
    pub n_rot: usize,
    pub base: f32,
    pub freq_scale: f32,
    /// `n_rot / 2` divisors of the frequencies.
    pub factors: Option<RopeFactors>,
    /// 1 except for YaRN.
    pub magnitude: f32,
    /// Axis of each pair, 0 to 2, whose position it has in rows of images and behind them: time, height, width.
    /// `None`: all rows have one position.
    pub axes: Option<Vec<u8>>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum RopeFactors {
    /// Name of an F32 tensor of them.
    Tensor(String),
    /// Two such tensors, of which all sequences of a model have the same:
    /// [`ModelSpec::limit_context`](super::ModelSpec::limit_context) chooses.
    ByContext {
        /// For contexts of at most `original` tokens.
        short: String,
        /// For longer ones.
        long: String,
        original: usize,
        is_long: bool,
    },
    /// Computed from hyper-parameters.
    Values(Vec<f32>),
}

impl RopeFactors {
    /// Names of all tensors that a choice may need.
    pub(super) fn push_tensors<'a>(&'a self, names: &mut Vec<&'a str>) {
        match self {
            Self::Tensor(name) => names.push(name),
            Self::ByContext { short, long, .. } => names.extend([short.as_str(), long]),
            Self::Values(_) => {}
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// Pairs (2i, 2i+1).
    Interleaved,
    /// Pairs (i, i + n_rot/2), "NEOX".
    Half,
}

impl MixerSpec {
    /// Elements of convolution and recurrent state, independent of the sequence's length; 0 for attention.
    pub fn state_elements(&self) -> usize {
        match self {
            Self::Attention(_) => 0,
            Self::DeltaNet(net) => net.conv.state_elements() + net.v_heads * net.k_dim * net.v_dim,
            Self::Mamba2(mamba) => mamba.conv.state_elements() + mamba.heads * mamba.head_dim * mamba.state,
            Self::ShortConv(short) => short.conv.state_elements(),
        }
    }
}

impl AttentionSpec {
    /// The layer's own key and value projections; `None` if it shares another layer's KV or has a latent one.
    pub fn own_kv(&self) -> Option<&OwnKvSpec> {
        match &self.kv {
            KvSpec::Own(own) => Some(own),
            KvSpec::Shared { .. } | KvSpec::Latent(_) => None,
        }
    }

    /// The projections of latent attention.
    pub fn latent(&self) -> Option<&LatentSpec> {
        match &self.kv {
            KvSpec::Latent(latent) => Some(latent),
            KvSpec::Own(_) | KvSpec::Shared { .. } => None,
        }
    }

    /// Elements that the layer adds to the cache for each position.
    pub fn cache_width(&self) -> usize {
        match &self.kv {
            KvSpec::Own(_) => self.k_width() + self.v_width(),
            KvSpec::Latent(_) => self.k_width(),
            KvSpec::Shared { .. } => 0,
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

impl ConvSpec {
    /// The factor of each channel's inputs.
    pub fn factors(&self) -> impl Iterator<Item = f32> {
        let runs = self.factors.iter().flat_map(|&(len, factor)| std::iter::repeat_n(factor, len));
        runs.chain(std::iter::repeat(1.0)).take(self.channels)
    }

    /// Elements of the state per sequence: the inputs of the last `taps` positions. No later token reads the
    /// oldest one; reference implementations keep it, and states are compared with theirs.
    pub fn state_elements(&self) -> usize {
        self.taps * self.channels
    }
}
