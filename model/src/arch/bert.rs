//! `bert`: an encoder. Every token attends to all tokens, norms follow mixer and FFN, and the output is a
//! pooled vector or a score.

use super::decoder::{bare_embedding, bare_layer};
use super::ffn::activation;
use super::shape::{Counting, Shape, limits};
use super::source::Source;
use crate::Error;
use crate::spec::{
    Activation, AttentionSpec, ClassifierSpec, EmbeddingSpec, FfnPart, FfnSpec, KvSpec, LayerSpec,
    LinearSpec, MixerSpec, ModelSpec, NormSpec, OutputSpec, OwnKvSpec, PooledSpec, PoolerActivation, Pooling,
    TableSpec,
};
use metadata::Strings;

/// Number of token types; a key of the tokenizer.
const TYPE_COUNT: &str = "tokenizer.ggml.token_type_count";

/// Key of the pooling of vectors.
pub(super) const POOLING_TYPE: &str = "pooling_type";

/// The pooling with this number.
pub(super) const fn pooling(number: usize) -> Option<Pooling> {
    match number {
        1 => Some(Pooling::Mean),
        2 => Some(Pooling::First),
        3 => Some(Pooling::Last),
        _ => None,
    }
}

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let shape = Shape::read(source, Counting::default())?;
    let eps = source.require_positive("attention.layer_norm_epsilon")?;
    let causal: bool = source.metadata().require(&source.key("attention.causal"))?;
    if causal {
        return Err(source.refuse("attention.causal", causal, false));
    }
    let encoder = Encoder { source, eps, hidden: shape.hidden };
    let widths = shape.feed_forward_lengths(source)?;
    let layer = |(layer, width)| encoder.layer(layer, &shape, width);
    Ok(ModelSpec {
        arch: source.arch().to_owned(),
        vocab: shape.vocab,
        hidden: shape.hidden,
        context_length: shape.context_length,
        embedding: EmbeddingSpec {
            positions: Some(encoder.table("position_embd.weight", shape.context_length)?),
            token_types: encoder.token_types()?,
            norm: Some(encoder.norm("token_embd_norm")?),
            ..bare_embedding()
        },
        per_layer_input: None,
        layers: widths.into_iter().enumerate().map(layer).collect::<Result<_, _>>()?,
        output: OutputSpec::Pooled(encoder.pooled()?),
        images_see_ahead: false,
    })
}

/// Number of a classifier's outputs.
pub(super) fn labels(source: &Source<'_>) -> Result<usize, Error> {
    let key = "classifier.output_labels";
    let labels = source.metadata().get::<&Strings>(&source.key(key))?.map_or(1, Strings::len);
    if !(1..=limits::LABELS).contains(&labels) {
        let needs = format_args!("a list of 1 to {}", limits::LABELS).to_string();
        return Err(source.refuse(key, format_args!("a list of {labels}"), needs));
    }
    Ok(labels)
}

struct Encoder<'a> {
    source: &'a Source<'a>,
    eps: f32,
    hidden: usize,
}

impl Encoder<'_> {
    fn norm(&self, stem: &str) -> Result<NormSpec, Error> {
        self.source.layer_norm(stem, self.hidden, self.eps)
    }

    fn table(&self, name: &str, rows: usize) -> Result<TableSpec, Error> {
        Ok(TableSpec { tensor: self.source.tensor(name, &[self.hidden, rows])?, rows })
    }

    /// A layer's matrix; all have biases.
    fn linear(&self, layer: usize, name: &str, cols: usize, rows: usize) -> Result<LinearSpec, Error> {
        let stem = format!("blk.{layer}.{name}");
        self.source.dims(&format!("{stem}.bias"))?;
        self.source.linear(&stem, cols, rows)
    }

    /// Token type embeddings; `None` in some models.
    fn token_types(&self) -> Result<Option<TableSpec>, Error> {
        match self.source.metadata().get::<usize>(TYPE_COUNT)? {
            None | Some(0) => Ok(None),
            Some(rows) if rows <= limits::VOCAB => self.table("token_types.weight", rows).map(Some),
            Some(rows) => Err(Error::HyperParameter {
                key: TYPE_COUNT.to_owned(),
                found: rows.to_string(),
                needs: format!("0 to {}", limits::VOCAB),
            }),
        }
    }

    fn layer(&self, layer: usize, shape: &Shape, width: usize) -> Result<LayerSpec, Error> {
        let ffn = FfnSpec::Plain {
            up: self.linear(layer, "ffn_up", self.hidden, width)?,
            down: self.linear(layer, "ffn_down", width, self.hidden)?,
            activation: activation(self.source, Activation::GeluErf)?,
        };
        let attention = self.attention(layer, shape)?;
        let norm = |name| self.norm(&format!("blk.{layer}.{name}")).map(Some);
        Ok(LayerSpec {
            mixer_out_norm: norm("attn_output_norm")?,
            ffn_out_norm: norm("layer_output_norm")?,
            ..bare_layer(MixerSpec::Attention(attention), vec![FfnPart::plain(ffn)])
        })
    }

    fn attention(&self, layer: usize, shape: &Shape) -> Result<AttentionSpec, Error> {
        // The lists have one entry per layer, and `layer` is below their length.
        let (heads, kv_heads, dims) = (shape.heads[layer], shape.kv_heads[layer], shape.dims);
        let linear = |name, cols, rows| self.linear(layer, name, cols, rows);
        Ok(AttentionSpec {
            causal: false,
            window: None,
            heads,
            kv_heads,
            head_dim: dims.k,
            v_head_dim: dims.v,
            q: linear("attn_q", self.hidden, heads * dims.k)?,
            q_norm: None,
            kv: KvSpec::Own(OwnKvSpec {
                k: linear("attn_k", self.hidden, kv_heads * dims.k)?,
                v: Some(linear("attn_v", self.hidden, kv_heads * dims.v)?),
                k_norm: None,
                v_norm: None,
            }),
            rope: None,
            scale: (dims.k as f32).sqrt().recip(),
            q_growth: None,
            softcap: None,
            sinks: None,
            gate: None,
            o: linear("attn_output", heads * dims.v, self.hidden)?,
        })
    }

    fn pooled(&self) -> Result<PooledSpec, Error> {
        let found = self.source.require_count(POOLING_TYPE, 0..=usize::MAX)?;
        match (found, pooling(found)) {
            (_, Some(pooling)) => Ok(PooledSpec { pooling, classifier: None }),
            (4, None) => Ok(PooledSpec { pooling: Pooling::First, classifier: Some(self.classifier()?) }),
            (found, None) => {
                Err(self.source.refuse(POOLING_TYPE, found, "1 (mean), 2 (first), 3 (last) or 4 (rank)"))
            }
        }
    }

    fn classifier(&self) -> Result<ClassifierSpec, Error> {
        let (source, labels) = (self.source, labels(self.source)?);
        let dense = source.has("cls.weight").then(|| source.linear("cls", self.hidden, self.hidden));
        Ok(ClassifierSpec {
            difference: false,
            dense: dense.transpose()?,
            activation: PoolerActivation::Tanh,
            norm: None,
            out: source.linear("cls.output", self.hidden, labels)?,
        })
    }
}
