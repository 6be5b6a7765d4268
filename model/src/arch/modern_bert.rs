//! `modern-bert`: an encoder with norms before mixer and FFN and rope. Between full layers a token sees those around it.

use super::bert::{POOLING_TYPE, labels, pooling};
use super::decoder::{AttentionOptions, Decoder, bare_layer};
use super::phi3::attention;
use super::shape::{Counting, Shape, limits};
use super::source::Source;
use super::windows::windows;
use crate::Error;
use crate::spec::{
    Activation, ClassifierSpec, FfnPart, LayerSpec, MixerSpec, ModelSpec, NormKind, NormSpec, OutputSpec,
    PooledSpec, PoolerActivation, Pooling, RopeSpec, RopeStyle,
};
use metadata::Value;

/// Number of the pooling that gives scores.
const RANK: usize = 4;
/// The first layer and every `PERIOD`th behind it has full attention, unless the file specifies it.
const PERIOD: usize = 3;

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let eps = source.require_positive("attention.layer_norm_epsilon")?;
    if let Some(true) = source.metadata().get(&source.key("attention.causal"))? {
        return Err(source.refuse("attention.causal", true, false));
    }
    let decoder = Decoder { source, shape: Shape::read(source, Counting::default())?, eps };
    let full = decoder.rope(RopeStyle::Half)?;
    let base = source.positive("rope.freq_base_swa")?.unwrap_or(10_000.0);
    let sliding = RopeSpec { base, ..decoder.plain_rope(RopeStyle::Half)? };
    let widths = decoder.shape.feed_forward_lengths(source)?;
    let layer = |(layer, (window, width)): (usize, (Option<usize>, usize))| {
        let rope = Some(if window.is_some() { &sliding } else { &full }.clone());
        let mut mixer = attention(&decoder, layer, AttentionOptions { window, rope, ..Default::default() })?;
        mixer.causal = false;
        let ffn = decoder.gated_in_one(layer, width, Activation::GeluErf)?;
        let norm = |name: &str| norm(&decoder, &decoder.stem(layer, name)).map(Some);
        Ok(LayerSpec {
            // The first layer has the embeddings' norm before it.
            mixer_norm: if layer > 0 { norm("attn_norm")? } else { None },
            ffn_norm: norm("ffn_norm")?,
            ..bare_layer(MixerSpec::Attention(mixer), vec![FfnPart::plain(ffn)])
        })
    };
    let layers = reaches(&decoder)?.into_iter().zip(widths).enumerate().map(layer);
    let mut layers: Vec<LayerSpec> = layers.collect::<Result<_, Error>>()?;
    if let Some(last) = layers.last_mut() {
        last.ffn_out_norm = Some(norm(&decoder, "output_norm")?);
    }
    let mut model = decoder.whole(layers, OutputSpec::Pooled(pooled(&decoder)?));
    model.embedding.norm = Some(norm(&decoder, "token_embd_norm")?);
    Ok(model)
}

/// Whether `tensor` is of the head of a model that is not used with it.
pub(super) fn is_unused_head(source: &Source<'_>, tensor: &str) -> bool {
    tensor.starts_with("cls.") && !matches!(source.count(POOLING_TYPE, RANK..=RANK), Ok(Some(_)))
}

/// A layer norm, with a bias in some models.
fn norm(decoder: &Decoder<'_>, stem: &str) -> Result<NormSpec, Error> {
    let bias = decoder.source.optional_floats(&format!("{stem}.bias"), &[decoder.shape.hidden])?;
    Ok(NormSpec { kind: NormKind::Layer, bias, ..decoder.norm(stem)? })
}

/// How far each layer's tokens see, their own position included. The key counts those of both sides.
fn reaches(decoder: &Decoder<'_>) -> Result<Vec<Option<usize>>, Error> {
    let (source, layers) = (decoder.source, decoder.shape.layers);
    let key = "attention.sliding_window_pattern";
    let windows = match source.metadata().value(&source.key(key)) {
        Some(Value::Array(_)) => windows(source, layers, PERIOD)?,
        _ => {
            let window =
                source.count("attention.sliding_window", 0..=limits::CONTEXT)?.filter(|&size| size > 0);
            let period = source.count(key, 1..=usize::MAX)?.unwrap_or(PERIOD);
            (0..layers).map(|layer| window.filter(|_| !layer.is_multiple_of(period))).collect()
        }
    };
    Ok(windows.into_iter().map(|window| window.map(|window| window / 2 + 1)).collect())
}

fn pooled(decoder: &Decoder<'_>) -> Result<PooledSpec, Error> {
    let (source, hidden) = (decoder.source, decoder.shape.hidden);
    let number = source.require_count(POOLING_TYPE, 0..=usize::MAX)?;
    if number != RANK {
        let needs = "1 (mean), 2 (first), 3 (last) or 4 (rank)";
        let pooling = pooling(number).ok_or_else(|| source.refuse(POOLING_TYPE, number, needs))?;
        return Ok(PooledSpec { pooling, classifier: None });
    }
    let key = "classifier.pooling_type";
    let pooling = match source.count(key, 0..=usize::MAX)? {
        None => Pooling::Mean,
        Some(number) => {
            pooling(number).ok_or_else(|| source.refuse(key, number, "1 (mean), 2 (first) or 3 (last)"))?
        }
    };
    let classifier = ClassifierSpec {
        difference: false,
        dense: Some(source.linear("cls", hidden, hidden)?),
        activation: PoolerActivation::GeluErf,
        norm: Some(norm(decoder, "cls.norm")?),
        out: source.linear("cls.output", hidden, labels(source)?)?,
    };
    Ok(PooledSpec { pooling, classifier: Some(classifier) })
}
