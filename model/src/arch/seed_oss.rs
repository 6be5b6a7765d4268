//! `seed_oss`: llama with half-split rope and biases on q, k and v.

use super::decoder::{AttentionOptions, Decoder};
use super::source::Source;
use crate::Error;
use crate::spec::{Activation, FfnPart, FfnSpec, MixerSpec, ModelSpec, RopeStyle};

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    let rope = decoder.rope(RopeStyle::Half)?;
    let layer = |(layer, ffn): (usize, FfnSpec)| {
        let options = AttentionOptions { rope: Some(rope.clone()), ..Default::default() };
        let mixer = MixerSpec::Attention(decoder.attention(layer, options)?);
        decoder.pre_norm_layer(layer, mixer, "post_attention_norm", vec![FfnPart::plain(ffn)])
    };
    let layers =
        decoder.dense(Activation::Silu)?.into_iter().enumerate().map(layer).collect::<Result<_, _>>()?;
    Ok(decoder.model(layers, decoder.logits()?))
}
