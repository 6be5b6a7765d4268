//! `qwen3` and `qwen3moe`: llama with half-split rope and norms on every head of q and k.

use super::decoder::{AttentionOptions, Decoder};
use super::source::Source;
use crate::Error;
use crate::spec::{Activation, FfnPart, FfnSpec, MixerSpec, ModelSpec, RopeStyle};

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
    let layers = ffns.enumerate().map(layer).collect::<Result<_, _>>()?;
    Ok(decoder.model(layers, decoder.logits()?))
}
