//! `qwen3` and `qwen3moe`: llama with half-split rope and norms on every head of q and k. With a pooling type the
//! model is an encoder, or a reranker that answers by a token.

use super::bert::{POOLING_TYPE, labels, pooling};
use super::decoder::{AttentionOptions, Decoder};
use super::source::Source;
use super::windows::windows;
use crate::Error;
use crate::spec::{
    Activation, ClassifierSpec, FfnPart, FfnSpec, LayerSpec, MixerSpec, ModelSpec, OutputSpec, PooledSpec,
    PoolerActivation, Pooling, RopeStyle,
};
use metadata::Strings;

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    let ffns = decoder.dense(Activation::Silu)?;
    model(&decoder, ffns.into_iter().map(|ffn| vec![FfnPart::plain(ffn)]))
}

pub(super) fn translate_moe(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    let widths = decoder.expert_widths()?;
    let mixture =
        |layer: usize| Ok(vec![FfnPart::plain(FfnSpec::Moe(decoder.moe_layer(layer, widths[layer])?))]);
    model(&decoder, decoder.mixtures_or_dense(mixture)?.into_iter())
}

fn model(decoder: &Decoder<'_>, ffns: impl Iterator<Item = Vec<FfnPart>>) -> Result<ModelSpec, Error> {
    let rope = decoder.rope(RopeStyle::Half)?;
    let layer = |(layer, (ffn, window))| {
        let options =
            AttentionOptions { window, rope: Some(rope.clone()), qk_norm: true, ..Default::default() };
        let mixer = MixerSpec::Attention(decoder.attention(layer, options)?);
        decoder.pre_norm_layer(layer, mixer, "ffn_norm", ffn)
    };
    let windows = windows(decoder.source, decoder.shape.layers, 1)?;
    let mut layers = ffns.zip(windows).enumerate().map(layer).collect::<Result<Vec<LayerSpec>, Error>>()?;
    let source = decoder.source;
    let Some(number) = source.count(POOLING_TYPE, 0..=usize::MAX)?.filter(|&number| number > 0) else {
        return Ok(decoder.model(layers, decoder.logits()?));
    };
    let classifier = if number == RANK { Some(classifier(decoder)?) } else { None };
    // Of the normed vectors of all tokens.
    let pooling = if number == RANK { Some(Pooling::Last) } else { pooling(number) };
    let needs = "0, 1 (mean), 2 (first), 3 (last) or 4 (rank)";
    let pooling = pooling.ok_or_else(|| source.refuse(POOLING_TYPE, number, needs))?;
    if let Some(last) = layers.last_mut() {
        last.ffn_out_norm = Some(decoder.norm("output_norm")?);
    }
    let output = OutputSpec::Pooled(PooledSpec { pooling, classifier });
    Ok(decoder.whole(layers, output))
}

/// Number of the pooling that gives scores.
const RANK: usize = 4;

/// The last token's logits of "yes" and "no", or the rows of a classifier.
fn classifier(decoder: &Decoder<'_>) -> Result<ClassifierSpec, Error> {
    let (source, key) = (decoder.source, "classifier.output_labels");
    let names = source.metadata().get::<&Strings>(&source.key(key))?;
    let difference = names.is_some_and(|names| names.iter().eq(["yes", "no"]));
    let out = source.linear("cls.output", decoder.shape.hidden, labels(source)?)?;
    Ok(ClassifierSpec { difference, dense: None, activation: PoolerActivation::Tanh, norm: None, out })
}
