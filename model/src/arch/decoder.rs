//! Common part of the decoders; translators add the differences.

use super::shape::{Counting, EMBEDDING, HeadDims, Shape};
use super::source::Source;
use crate::Error;
use crate::spec::{
    AttentionSpec, EmbeddingSpec, FfnPart, KvSpec, LayerSpec, LinearSpec, LogitsSpec, MixerSpec, ModelSpec,
    NormSpec, OutputSpec, OwnKvSpec, RopeSpec,
};

/// Checked hyper-parameters of a decoder.
pub(super) struct Decoder<'a> {
    pub(super) source: &'a Source<'a>,
    pub(super) shape: Shape,
    pub(super) eps: f32,
}

/// Differences between architectures in a layer's attention.
#[derive(Default)]
pub(super) struct AttentionOptions {
    pub(super) window: Option<usize>,
    pub(super) rope: Option<RopeSpec>,
    /// Multiplies q.k; `None` is 1/sqrt(head width).
    pub(super) scale: Option<f32>,
    /// Per-head norms of q and k.
    pub(super) qk_norm: bool,
}

impl<'a> Decoder<'a> {
    pub(super) fn read(source: &'a Source<'a>) -> Result<Self, Error> {
        Self::counting(source, Counting::default())
    }

    pub(super) fn counting(source: &'a Source<'a>, counting: Counting) -> Result<Self, Error> {
        let shape = Shape::read(source, counting)?;
        let eps = source.require_positive("attention.layer_norm_rms_epsilon")?;
        Ok(Self { source, shape, eps })
    }

    /// `blk.LAYER.NAME`.
    pub(super) fn stem(&self, layer: usize, name: &str) -> String {
        format!("blk.{layer}.{name}")
    }

    /// Fails if a tensor of a layer is missing. For tensors that are optional in most architectures.
    pub(super) fn require(&self, layer: usize, names: &[&str]) -> Result<(), Error> {
        names.iter().try_for_each(|name| self.source.dims(&self.stem(layer, name)).map(drop))
    }

    /// A norm of the residual stream.
    pub(super) fn norm(&self, stem: &str) -> Result<NormSpec, Error> {
        self.source.rms_norm(stem, self.shape.hidden, self.eps)
    }

    /// A norm of the residual stream in a layer.
    pub(super) fn layer_norm(&self, layer: usize, name: &str) -> Result<Option<NormSpec>, Error> {
        self.norm(&self.stem(layer, name)).map(Some)
    }

    /// A matrix of a layer.
    pub(super) fn linear(
        &self,
        layer: usize,
        name: &str,
        cols: usize,
        rows: usize,
    ) -> Result<LinearSpec, Error> {
        self.source.linear(&self.stem(layer, name), cols, rows)
    }

    /// Query heads and key/value heads of a layer.
    pub(super) fn heads(&self, layer: usize) -> (usize, usize) {
        // The lists have one entry per block, and `layer` is below their length.
        (self.shape.heads[layer], self.shape.kv_heads[layer])
    }

    /// Softmax attention with the layer's own keys and values.
    pub(super) fn attention(&self, layer: usize, options: AttentionOptions) -> Result<AttentionSpec, Error> {
        let (heads, dims) = (self.heads(layer).0, self.shape.dims);
        let q = self.linear(layer, "attn_q", self.shape.hidden, heads * dims.k)?;
        let kv = KvSpec::Own(self.own_kv(layer, options.qk_norm)?);
        self.attention_of(layer, dims, q, kv, options)
    }

    /// Like [`attention`](Self::attention), with the given heads, queries, keys and values.
    pub(super) fn attention_of(
        &self,
        layer: usize,
        dims: HeadDims,
        q: LinearSpec,
        kv: KvSpec,
        options: AttentionOptions,
    ) -> Result<AttentionSpec, Error> {
        let (heads, kv_heads) = self.heads(layer);
        let AttentionOptions { window, rope, scale, qk_norm } = options;
        Ok(AttentionSpec {
            causal: true,
            window,
            heads,
            kv_heads,
            head_dim: dims.k,
            v_head_dim: dims.v,
            q,
            q_norm: qk_norm.then(|| self.head_norm(layer, "attn_q_norm", dims.k)).transpose()?,
            kv,
            rope,
            scale: scale.unwrap_or_else(|| (dims.k as f32).sqrt().recip()),
            q_growth: None,
            softcap: None,
            sinks: None,
            gate: None,
            o: self.linear(layer, "attn_output", heads * dims.v, self.shape.hidden)?,
        })
    }

    /// Keys and values of a layer.
    pub(super) fn own_kv(&self, layer: usize, k_norm: bool) -> Result<OwnKvSpec, Error> {
        let (kv_heads, dims) = (self.heads(layer).1, self.shape.dims);
        Ok(OwnKvSpec {
            k: self.linear(layer, "attn_k", self.shape.hidden, kv_heads * dims.k)?,
            v: Some(self.linear(layer, "attn_v", self.shape.hidden, kv_heads * dims.v)?),
            k_norm: k_norm.then(|| self.head_norm(layer, "attn_k_norm", dims.k)).transpose()?,
            v_norm: None,
        })
    }

    /// A norm of each head.
    pub(super) fn head_norm(&self, layer: usize, name: &str, width: usize) -> Result<NormSpec, Error> {
        self.source.rms_norm(&self.stem(layer, name), width, self.eps)
    }

    /// A layer with norms only before mixer and FFN.
    pub(super) fn pre_norm_layer(
        &self,
        layer: usize,
        mixer: MixerSpec,
        ffn_norm: &str,
        ffn: Vec<FfnPart>,
    ) -> Result<LayerSpec, Error> {
        Ok(LayerSpec {
            mixer_norm: self.layer_norm(layer, "attn_norm")?,
            ffn_norm: self.layer_norm(layer, ffn_norm)?,
            ..bare_layer(mixer, ffn)
        })
    }

    /// A model that generates, without a scale on the embedding.
    pub(super) fn model(&self, layers: Vec<LayerSpec>, logits: LogitsSpec) -> ModelSpec {
        self.whole(layers, OutputSpec::Logits(logits))
    }

    /// The whole model, without a scale on the embedding.
    pub(super) fn whole(&self, layers: Vec<LayerSpec>, output: OutputSpec) -> ModelSpec {
        ModelSpec {
            arch: self.source.arch().to_owned(),
            vocab: self.shape.vocab,
            hidden: self.shape.hidden,
            context_length: self.shape.context_length,
            embedding: bare_embedding(),
            per_layer_input: None,
            layers,
            output,
            images_see_ahead: false,
        }
    }

    /// The output head without scale or cap. Uses the embedding's matrix if the file has no output matrix.
    pub(super) fn logits(&self) -> Result<LogitsSpec, Error> {
        self.logits_normed_by("output_norm")
    }

    /// Like [`logits`](Self::logits), with the norm `NORM.weight`.
    pub(super) fn logits_normed_by(&self, norm: &str) -> Result<LogitsSpec, Error> {
        let (hidden, vocab) = (self.shape.hidden, self.shape.vocab);
        let linear = if self.source.has("output.weight") {
            self.source.linear("output", hidden, vocab)?
        } else {
            LinearSpec {
                bias: self.source.optional_floats("output.bias", &[vocab])?,
                ..LinearSpec::new(EMBEDDING, hidden, vocab)
            }
        };
        Ok(LogitsSpec { norm: self.norm(norm)?, linear, softcap: None, scale: 1.0 })
    }
}

/// The embedding matrix without scale or norm.
pub(super) fn bare_embedding() -> EmbeddingSpec {
    EmbeddingSpec { tensor: EMBEDDING.to_owned(), scale: 1.0, positions: None, token_types: None, norm: None }
}

/// A layer without norms or scales.
pub(super) fn bare_layer(mixer: MixerSpec, ffn: Vec<FfnPart>) -> LayerSpec {
    LayerSpec {
        mixer_norm: None,
        mixer,
        parallel_mixer: None,
        mixer_post_norm: None,
        mixer_out_norm: None,
        parallel: false,
        ffn_norm: None,
        ffn,
        ffn_post_norm: None,
        ffn_out_norm: None,
        per_layer: None,
        output_scale: None,
        residual_scale: 1.0,
    }
}
