//! What the decoders of the llama family have in common; translators state what differs.

use super::source::Source;
use crate::Error;
use crate::metadata::Strings;
use crate::spec::{
    Activation, AttentionSpec, EmbeddingSpec, ExpertGateUp, FfnSpec, LayerSpec, LinearSpec, MixerSpec,
    ModelSpec, MoeSpec, NormSpec, OutputSpec, RopeSpec, RopeStyle,
};

/// Largest hyper-parameters that are taken for true. All products of two fit 64 bits.
pub(super) mod limits {
    pub(super) const LAYERS: usize = 1 << 10;
    pub(in super::super) const CONTEXT: usize = 1 << 30;
    pub(super) const WIDTH: usize = 1 << 24;
    pub(super) const VOCAB: usize = 1 << 24;
    pub(super) const HEADS: usize = 1 << 14;
    pub(super) const HEAD_DIM: usize = 1 << 14;
    pub(super) const EXPERTS: usize = 1 << 16;
}

const EMBEDDING: &str = "token_embd.weight";

/// Hyper-parameters of a decoder, checked.
pub(super) struct Decoder<'a> {
    source: &'a Source<'a>,
    pub(super) layers: usize,
    pub(super) hidden: usize,
    head_dim: usize,
    vocab: usize,
    context_length: usize,
    eps: f32,
    heads: Vec<usize>,
    kv_heads: Vec<usize>,
    v_head_dim: usize,
    n_rot: usize,
}

/// What differs between architectures in a layer's attention.
pub(super) struct AttentionOptions {
    pub(super) window: Option<usize>,
    pub(super) rope: RopeSpec,
    /// Multiplies q.k; 1/sqrt(head_dim) where none.
    pub(super) scale: Option<f32>,
    /// Per-head norms of q and k.
    pub(super) qk_norm: bool,
}

impl<'a> Decoder<'a> {
    pub(super) fn read(source: &'a Source<'a>) -> Result<Self, Error> {
        let layers = source.require_count("block_count", 1..=limits::LAYERS)?;
        let hidden = source.require_count("embedding_length", 1..=limits::WIDTH)?;
        let (heads, kv_heads) = heads(source, layers)?;
        let (head_dim, v_head_dim, n_rot) = head_dims(source, hidden, &heads)?;
        Ok(Self {
            source,
            layers,
            hidden,
            head_dim,
            vocab: vocab(source, hidden)?,
            context_length: source.require_count("context_length", 1..=limits::CONTEXT)?,
            eps: source.require_positive("attention.layer_norm_rms_epsilon")?,
            heads,
            kv_heads,
            v_head_dim,
            n_rot,
        })
    }

    /// The rotary embedding of `rope.freq_base` and `rope.scaling.*`.
    pub(super) fn rope(&self, style: RopeStyle) -> Result<RopeSpec, Error> {
        let source = self.source;
        let freq_scale = match source.metadata().get::<&str>(&source.key("rope.scaling.type"))? {
            Some("none") => 1.0,
            // A factor without a type is linear; `rope.scale_linear` is the older name of the factor.
            Some("linear") | None => {
                let factor = match source.positive_unless_zero("rope.scaling.factor")? {
                    Some(factor) => Some(factor),
                    None => source.positive_unless_zero("rope.scale_linear")?,
                };
                factor.map_or(1.0, f32::recip)
            }
            Some(other) => return Err(source.refuse("rope.scaling.type", other, "none or linear")),
        };
        let base = source.positive("rope.freq_base")?.unwrap_or(10_000.0);
        Ok(RopeSpec { style, n_rot: self.n_rot, base, freq_scale, factors: None })
    }

    /// The tensor of frequency factors of [`rope`](Self::rope), where there is one.
    pub(super) fn rope_factors(&self) -> Result<Option<String>, Error> {
        self.source.optional_floats("rope_freqs.weight", &[self.n_rot / 2])
    }

    /// `blk.LAYER.NAME`.
    pub(super) fn stem(&self, layer: usize, name: &str) -> String {
        format!("blk.{layer}.{name}")
    }

    /// A norm of the residual stream.
    pub(super) fn norm(&self, stem: &str) -> Result<NormSpec, Error> {
        self.source.rms_norm(stem, self.hidden, self.eps)
    }

    /// Softmax attention over the keys and values of one layer.
    pub(super) fn attention(&self, layer: usize, options: AttentionOptions) -> Result<AttentionSpec, Error> {
        // The lists have one entry per layer, and `layer` is below their number.
        let (heads, kv_heads) = (self.heads[layer], self.kv_heads[layer]);
        let (hidden, head_dim, v_head_dim) = (self.hidden, self.head_dim, self.v_head_dim);
        let linear = |name, cols, rows| self.source.linear(&self.stem(layer, name), cols, rows);
        let head_norm = |name| {
            let stem = self.stem(layer, name);
            options.qk_norm.then(|| self.source.rms_norm(&stem, head_dim, self.eps)).transpose()
        };
        Ok(AttentionSpec {
            window: options.window,
            heads,
            kv_heads,
            head_dim,
            v_head_dim,
            q: linear("attn_q", hidden, heads * head_dim)?,
            k: linear("attn_k", hidden, kv_heads * head_dim)?,
            v: linear("attn_v", hidden, kv_heads * v_head_dim)?,
            o: linear("attn_output", heads * v_head_dim, hidden)?,
            q_norm: head_norm("attn_q_norm")?,
            k_norm: head_norm("attn_k_norm")?,
            scale: options.scale.unwrap_or_else(|| (head_dim as f32).sqrt().recip()),
            rope: Some(options.rope),
        })
    }

    /// The gated feed-forward parts of all layers.
    pub(super) fn dense(&self, activation: Activation) -> Result<Vec<FfnSpec>, Error> {
        let widths = self.feed_forward_lengths()?;
        let ffn = |(layer, &width): (usize, &usize)| {
            let linear = |name, cols, rows| self.source.linear(&self.stem(layer, name), cols, rows);
            Ok(FfnSpec::Dense {
                gate: linear("ffn_gate", self.hidden, width)?,
                up: linear("ffn_up", self.hidden, width)?,
                down: linear("ffn_down", width, self.hidden)?,
                activation,
            })
        };
        widths.iter().enumerate().map(ffn).collect()
    }

    /// The mixtures of experts of all layers, weights renormalised.
    pub(super) fn moe(&self, activation: Activation) -> Result<Vec<FfnSpec>, Error> {
        let source = self.source;
        let experts = source.require_count("expert_count", 1..=limits::EXPERTS)?;
        let used = source.require_count("expert_used_count", 1..=experts)?;
        let widths = match source.count("expert_feed_forward_length", 1..=limits::WIDTH)? {
            Some(width) => vec![width; self.layers],
            None => self.feed_forward_lengths()?.iter().map(|width| width / used).collect(),
        };
        let ffn = |(layer, &width): (usize, &usize)| {
            let stem = |name| self.stem(layer, name);
            let rows = |name, rows| source.experts(&stem(name), self.hidden, rows, experts);
            let gate_up = if source.has(&stem("ffn_gate_up_exps.weight")) {
                ExpertGateUp::Fused(rows("ffn_gate_up_exps", 2 * width)?)
            } else {
                ExpertGateUp::Separate {
                    gate: rows("ffn_gate_exps", width)?,
                    up: rows("ffn_up_exps", width)?,
                }
            };
            Ok(FfnSpec::Moe(MoeSpec {
                router: source.linear(&stem("ffn_gate_inp"), self.hidden, experts)?,
                experts,
                used,
                renormalise: true,
                gate_up,
                down: source.experts(&stem("ffn_down_exps"), width, self.hidden, experts)?,
                expert_ff: width,
                activation,
            }))
        };
        widths.iter().enumerate().map(ffn).collect()
    }

    /// A layer whose norms are before mixer and FFN only.
    pub(super) fn pre_norm_layer(
        &self,
        layer: usize,
        attention: AttentionOptions,
        ffn: FfnSpec,
    ) -> Result<LayerSpec, Error> {
        Ok(LayerSpec {
            mixer_norm: Some(self.norm(&self.stem(layer, "attn_norm"))?),
            mixer: MixerSpec::Attention(self.attention(layer, attention)?),
            mixer_post_norm: None,
            ffn_norm: Some(self.norm(&self.stem(layer, "ffn_norm"))?),
            ffn,
            ffn_post_norm: None,
            residual_scale: 1.0,
        })
    }

    /// The whole model, without scale or cap on embedding and logits.
    pub(super) fn model(&self, layers: Vec<LayerSpec>) -> Result<ModelSpec, Error> {
        Ok(ModelSpec {
            arch: self.source.arch().to_owned(),
            vocab: self.vocab,
            hidden: self.hidden,
            context_length: self.context_length,
            embedding: EmbeddingSpec { tensor: EMBEDDING.to_owned(), scale: 1.0 },
            layers,
            output_norm: self.norm("output_norm")?,
            output: OutputSpec { linear: self.output()?, softcap: None, scale: 1.0 },
        })
    }

    /// The output matrix; the embedding's where the file has none of its own.
    fn output(&self) -> Result<LinearSpec, Error> {
        if self.source.has("output.weight") {
            return self.source.linear("output", self.hidden, self.vocab);
        }
        let bias = self.source.optional_floats("output.bias", &[self.vocab])?;
        Ok(LinearSpec {
            weight: EMBEDDING.to_owned(),
            bias,
            scale: None,
            rows: self.vocab,
            cols: self.hidden,
        })
    }

    fn feed_forward_lengths(&self) -> Result<Vec<usize>, Error> {
        let key = "feed_forward_length";
        self.source
            .layer_counts(key, self.layers, 1..=limits::WIDTH)?
            .ok_or_else(|| Error::MissingKey { key: self.source.key(key) })
    }
}

/// Query heads and key/value heads of every layer.
fn heads(source: &Source<'_>, layers: usize) -> Result<(Vec<usize>, Vec<usize>), Error> {
    let (key, kv_key) = ("attention.head_count", "attention.head_count_kv");
    let heads = source
        .layer_counts(key, layers, 1..=limits::HEADS)?
        .ok_or_else(|| Error::MissingKey { key: source.key(key) })?;
    let kv_heads = source.layer_counts(kv_key, layers, 1..=limits::HEADS)?.unwrap_or_else(|| heads.clone());
    match heads.iter().zip(&kv_heads).find(|(heads, kv_heads)| !heads.is_multiple_of(**kv_heads)) {
        Some((heads, kv_heads)) => {
            Err(source.refuse(kv_key, kv_heads, format_args!("a divisor of the {heads} heads")))
        }
        None => Ok((heads, kv_heads)),
    }
}

/// Widths of a query/key head, of a value head, and of the part that rotates.
fn head_dims(source: &Source<'_>, hidden: usize, heads: &[usize]) -> Result<(usize, usize, usize), Error> {
    let default = || match heads.first() {
        Some(&heads) if hidden.is_multiple_of(heads) => Ok(hidden / heads),
        _ => Err(source.refuse(
            "embedding_length",
            hidden,
            "a multiple of attention.head_count, as there is no attention.key_length",
        )),
    };
    let dim = |key| match source.count(key, 1..=limits::HEAD_DIM)? {
        Some(dim) => Ok(dim),
        None => default(),
    };
    let head_dim = dim("attention.key_length")?;
    let v_head_dim = dim("attention.value_length")?;
    let key = "rope.dimension_count";
    let n_rot = source.count(key, 1..=limits::HEAD_DIM)?.unwrap_or(head_dim);
    if !n_rot.is_multiple_of(2) || n_rot > head_dim {
        return Err(source.refuse(key, n_rot, format_args!("an even number up to {head_dim}")));
    }
    Ok((head_dim, v_head_dim, n_rot))
}

/// Rows of the embedding, at least as many as the vocabulary has tokens.
fn vocab(source: &Source<'_>, hidden: usize) -> Result<usize, Error> {
    let vocab = match source.dims(EMBEDDING)? {
        [_, rows] => usize::try_from(*rows).ok().filter(|&rows| rows <= limits::VOCAB),
        _ => None,
    };
    // A shape that gives no vocabulary is reported by the check against the largest.
    let vocab = vocab.unwrap_or(limits::VOCAB);
    source.tensor(EMBEDDING, &[hidden, vocab])?;
    let tokens: Option<&Strings> = source.metadata().get("tokenizer.ggml.tokens")?;
    match tokens.map(Strings::len).filter(|&tokens| tokens > vocab) {
        Some(tokens) => Err(Error::HyperParameter {
            key: "tokenizer.ggml.tokens".to_owned(),
            found: format!("a list of {tokens}"),
            needs: format!("at most the {vocab} rows of {EMBEDDING}"),
        }),
        None => Ok(vocab),
    }
}
