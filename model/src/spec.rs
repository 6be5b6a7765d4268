//! A model as data. Decoder, cache layout, memory plans and layer shards are derived from it.
//!
//! One file per architecture (`arch/`) translates a GGUF's metadata into a [`ModelSpec`]. Tensors are named,
//! not loaded: a tensor source provides the weights.

mod assistant;
mod cuts;
mod feed_forward;
mod mixer;
mod mtp_head;
mod tensors;
mod vision;

pub use assistant::AssistantSpec;
pub use feed_forward::{Activation, ExpertGateUp, ExpertGroups, FfnPart, FfnSpec, MoeSpec};
pub use mixer::{
    AttentionSpec, ConvSpec, DeltaNetSpec, HeadGrouping, KvSpec, LatentSpec, Mamba2Spec, MixerSpec,
    OwnKvSpec, QueryGrowth, RopeFactors, RopeSpec, RopeStyle, ShortConvSpec,
};
pub use mtp_head::MtpHeadSpec;
pub use vision::{
    COLOURS, MergeSpec, PatchSpec, PixelLayout, PositionSpec, ProjectorSpec, VisionSpec, WindowSpec,
};

#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// Value of `general.architecture`.
    pub arch: String,
    /// Rows of the embedding and output matrices.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Longest supported sequence in tokens.
    pub context_length: usize,
    /// Token embedding.
    pub embedding: EmbeddingSpec,
    /// Embedding of which every layer reads a slice.
    pub per_layer_input: Option<PerLayerInputSpec>,
    pub layers: Vec<LayerSpec>,
    pub output: OutputSpec,
    /// Whether the rows of an image see each other in both directions, in all layers.
    pub images_see_ahead: bool,
}

/// Embedding: `norm(scale * tokens[token] + positions[position] + token_types[0])`.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbeddingSpec {
    /// `[hidden, vocab]` in GGUF order.
    pub tensor: String,
    /// 1 if the architecture has none.
    pub scale: f32,
    /// Learned absolute positions.
    pub positions: Option<TableSpec>,
    pub token_types: Option<TableSpec>,
    pub norm: Option<NormSpec>,
}

/// A table of rows of `hidden` values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableSpec {
    /// `[hidden, rows]` in GGUF order.
    pub tensor: String,
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
    pub width: usize,
    /// From x0 to `width * layers` values.
    pub projection: LinearSpec,
    /// Norm of the projection, layer by layer.
    pub norm: NormSpec,
}

/// The computation from the last layer's residual to the output.
#[derive(Debug, Clone, PartialEq)]
pub enum OutputSpec {
    /// Generation: logits of the next token.
    Logits(LogitsSpec),
    /// Encoding: one vector, or a few scores, for a whole text.
    Pooled(PooledSpec),
}

/// Pools the tokens' vectors to one vector, and optionally computes scores from it.
#[derive(Debug, Clone, PartialEq)]
pub struct PooledSpec {
    pub pooling: Pooling,
    /// Computes scores instead of a vector.
    pub classifier: Option<ClassifierSpec>,
}

/// Pooling of the tokens' vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// The mean of all tokens.
    Mean,
    /// The first token.
    First,
    /// The last token.
    Last,
}

/// Activation between a classifier's layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolerActivation {
    Tanh,
    GeluErf,
}

/// `scores = out norm(activation(dense v))`, or `out v` without `dense`.
#[derive(Debug, Clone, PartialEq)]
pub struct ClassifierSpec {
    /// The first score less the second is the only score: the logits of two answers, of which one is right.
    pub difference: bool,
    pub dense: Option<LinearSpec>,
    pub activation: PoolerActivation,
    /// Norm of the activations; of BERT none.
    pub norm: Option<NormSpec>,
    /// One row per score.
    pub out: LinearSpec,
}

/// Output head: `logits = softcap(scale * W norm(x))`.
#[derive(Debug, Clone, PartialEq)]
pub struct LogitsSpec {
    pub norm: NormSpec,
    /// The output matrix; the embedding's tensor if they are tied.
    pub linear: LinearSpec,
    /// `c * tanh(logit / c)`.
    pub softcap: Option<f32>,
    /// Multiplies the logits; 1 if the architecture has none.
    pub scale: f32,
}

/// `y = factor * scale * (W x) + bias_factor * b`. `rows` outputs, `cols` inputs.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearSpec {
    /// Name of the weight tensor, `[cols, rows]` in GGUF order.
    pub weight: String,
    /// Name of the bias tensor, one value for each row of the weight tensor.
    pub bias: Option<String>,
    /// Name of a `[1]` (per expert: `[experts]`) tensor that multiplies the product.
    pub scale: Option<String>,
    /// Name of a `[cols]` tensor: the value of the input that each column multiplies. `None`: its own.
    pub order: Option<String>,
    /// Multiplies the product; 1 if the architecture has none.
    pub factor: f32,
    /// Multiplies the bias; 1 if the architecture has none.
    pub bias_factor: f32,
    pub rows: usize,
    pub cols: usize,
    /// The rows used, if the tensor holds several matrices.
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

/// RMS norm or layer norm. The weight is used as stored (GGUF never needs `1 + w`).
#[derive(Debug, Clone, PartialEq)]
pub struct NormSpec {
    pub kind: NormKind,
    /// Name of the weight; `None` multiplies by 1.
    pub weight: Option<String>,
    /// Name of the bias (layer norm).
    pub bias: Option<String>,
    /// Added to the mean square or variance.
    pub eps: f32,
    pub width: usize,
}

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
    /// Attention, delta net, Mamba-2 or short convolution.
    pub mixer: MixerSpec,
    /// A second mixer of the same normed input, of another kind; the sum of both outputs is added.
    pub parallel_mixer: Option<MixerSpec>,
    /// Norm of the mixer's output before it is added.
    pub mixer_post_norm: Option<NormSpec>,
    /// Norm of the residual itself after the addition (post-norm encoders).
    pub mixer_out_norm: Option<NormSpec>,
    /// Whether the FFN reads the mixer's normed input instead of the residual after the mixer.
    pub parallel: bool,
    /// Norm of the residual before the FFN.
    pub ffn_norm: Option<NormSpec>,
    /// The FFN's parts; their sum is added.
    pub ffn: Vec<FfnPart>,
    /// Norm of the sum of all parts before it is added.
    pub ffn_post_norm: Option<NormSpec>,
    /// Norm of the residual itself after the addition.
    pub ffn_out_norm: Option<NormSpec>,
    /// The computation on the layer's slice of the per-layer input.
    pub per_layer: Option<PerLayerSpec>,
    /// Name of a `[1]` tensor that multiplies the residual at the end.
    pub output_scale: Option<String>,
    /// Multiplies the outputs of mixer and FFN before they are added; 1 if the architecture has none.
    pub residual_scale: f32,
}

/// `x += norm(projection (gelu_tanh(gate x) * slice))`.
#[derive(Debug, Clone, PartialEq)]
pub struct PerLayerSpec {
    /// From the residual to the slice's width.
    pub gate: LinearSpec,
    pub projection: LinearSpec,
    /// Norm of the value added to the residual.
    pub norm: NormSpec,
}

impl ClassifierSpec {
    /// Number of scores.
    pub fn scores(&self) -> usize {
        if self.difference { 1 } else { self.out.rows }
    }
}

impl ModelSpec {
    /// The attention of layer `index`, if it has one.
    pub fn attention(&self, index: usize) -> Option<&AttentionSpec> {
        self.layers.get(index)?.attention()
    }

    /// The output head, if the model generates.
    pub fn logits(&self) -> Option<&LogitsSpec> {
        match &self.output {
            OutputSpec::Logits(logits) => Some(logits),
            OutputSpec::Pooled(_) => None,
        }
    }

    /// Lowers the longest sequence to `tokens`. Frequency factors that depend on it are chosen anew.
    pub fn limit_context(&mut self, tokens: usize) {
        self.context_length = self.context_length.min(tokens);
        for layer in &mut self.layers {
            let MixerSpec::Attention(attention) = &mut layer.mixer else { continue };
            let factors = attention.rope.as_mut().and_then(|rope| rope.factors.as_mut());
            if let Some(RopeFactors::ByContext { original, is_long, .. }) = factors {
                *is_long = self.context_length > *original;
            }
        }
    }

    /// What results depend on beside the file: frequency factors for short or for long contexts.
    pub fn context_class(&self) -> Option<&'static str> {
        let ropes = (0..self.layers.len()).filter_map(|layer| self.attention(layer)?.rope.as_ref());
        ropes.filter_map(|rope| rope.factors.as_ref()).find_map(|factors| match factors {
            RopeFactors::ByContext { is_long: true, .. } => Some("rope-long"),
            RopeFactors::ByContext { is_long: false, .. } => Some("rope-short"),
            RopeFactors::Tensor(_) | RopeFactors::Values(_) => None,
        })
    }

    /// Whether any layer has a recurrent state.
    pub fn is_recurrent(&self) -> bool {
        self.layers.iter().flat_map(LayerSpec::mixers).any(|mixer| !matches!(mixer, MixerSpec::Attention(_)))
    }
}

impl LayerSpec {
    /// The mixer and the parallel one.
    pub fn mixers(&self) -> impl Iterator<Item = &MixerSpec> {
        std::iter::once(&self.mixer).chain(&self.parallel_mixer)
    }

    /// The attention among the mixers.
    pub fn attention(&self) -> Option<&AttentionSpec> {
        self.mixers().find_map(|mixer| match mixer {
            MixerSpec::Attention(attention) => Some(attention),
            MixerSpec::DeltaNet(_) | MixerSpec::Mamba2(_) | MixerSpec::ShortConv(_) => None,
        })
    }

    /// Elements of the mixers' states.
    pub fn state_elements(&self) -> usize {
        self.mixers().map(MixerSpec::state_elements).sum()
    }
}

impl LinearSpec {
    /// All rows of the tensor `weight`, with neither bias nor scale.
    pub fn new(weight: impl Into<String>, cols: usize, rows: usize) -> Self {
        Self {
            weight: weight.into(),
            bias: None,
            scale: None,
            order: None,
            factor: 1.0,
            bias_factor: 1.0,
            rows,
            cols,
            slice: None,
        }
    }

    /// Number of rows of the whole tensor.
    pub fn tensor_rows(&self) -> usize {
        self.slice.map_or(self.rows, |slice| slice.of)
    }
}

impl RowSlice {
    /// Number of selected rows.
    pub fn rows(&self) -> usize {
        self.of / self.period.max(1) * self.len
    }
}
