//! `llama`: pre-norm layers, interleaved rope (with frequency factors in Llama 3), SwiGLU.

use super::decoder::{AttentionOptions, Decoder};
use super::source::Source;
use crate::Error;
use crate::spec::{Activation, FfnPart, FfnSpec, MixerSpec, ModelSpec, RopeStyle};

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    source.refuse_experts()?;
    let decoder = Decoder::read(source)?;
    let rope = decoder.rope(RopeStyle::Interleaved)?;
    let scale = source.positive_unless_zero("attention.scale")?;
    let layer = |(layer, ffn): (usize, FfnSpec)| {
        let options = AttentionOptions { rope: Some(rope.clone()), scale, ..Default::default() };
        let mixer = MixerSpec::Attention(decoder.attention(layer, options)?);
        decoder.pre_norm_layer(layer, mixer, "ffn_norm", vec![FfnPart::plain(ffn)])
    };
    let layers =
        decoder.dense(Activation::Silu)?.into_iter().enumerate().map(layer).collect::<Result<_, _>>()?;
    Ok(decoder.model(layers, decoder.logits()?))
}
