//! `qwen3` and `qwen3moe`: llama with half-split rope and norms on every head of q and k. With a pooling type the
//! model is an encoder.

use super::bert::{POOLING_TYPE, pooling};
use super::decoder::{AttentionOptions, Decoder};
use super::source::Source;
use crate::Error;
use crate::spec::{
    Activation, FfnPart, FfnSpec, LayerSpec, MixerSpec, ModelSpec, OutputSpec, PooledSpec, RopeStyle,
};

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    model(&decoder, decoder.dense(Activation::Silu)?.into_iter())
}

pub(super) fn translate_moe(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    let moes = decoder.moe(&decoder.expert_widths()?, Activation::Silu)?;
    model(&decoder, moes.into_iter().map(FfnSpec::Moe))
}

fn model(decoder: &Decoder<'_>, ffns: impl Iterator<Item = FfnSpec>) -> Result<ModelSpec, Error> {
    let rope = decoder.rope(RopeStyle::Half)?;
    let layer = |(layer, ffn)| {
        let options = AttentionOptions { rope: Some(rope.clone()), qk_norm: true, ..Default::default() };
        let mixer = MixerSpec::Attention(decoder.attention(layer, options)?);
        decoder.pre_norm_layer(layer, mixer, "ffn_norm", vec![FfnPart::plain(ffn)])
    };
    let mut layers = ffns.enumerate().map(layer).collect::<Result<Vec<LayerSpec>, Error>>()?;
    let source = decoder.source;
    let Some(number) = source.count(POOLING_TYPE, 0..=usize::MAX)?.filter(|&number| number > 0) else {
        return Ok(decoder.model(layers, decoder.logits()?));
    };
    // An embedding model: the normed vectors of all tokens, pooled.
    let pooling = pooling(number)
        .ok_or_else(|| source.refuse(POOLING_TYPE, number, "0, 1 (mean), 2 (first) or 3 (last)"))?;
    if let Some(last) = layers.last_mut() {
        last.ffn_out_norm = Some(decoder.norm("output_norm")?);
    }
    let output = OutputSpec::Pooled(PooledSpec { pooling, classifier: None });
    Ok(decoder.whole(layers, output))
}
