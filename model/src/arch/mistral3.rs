//! `mistral3`: llama with sliding windows on all layers or none, and YaRN in the later models.

use super::decoder::{AttentionOptions, Decoder};
use super::source::Source;
use super::windows::windows;
use crate::Error;
use crate::spec::{Activation, FfnPart, FfnSpec, MixerSpec, ModelSpec, RopeStyle};

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    source.refuse_experts()?;
    let decoder = Decoder::read(source)?;
    let rope = decoder.rope_or_yarn(RopeStyle::Interleaved)?;
    // All layers, as no layer has a multiple of this number.
    let windows = windows(source, decoder.shape.layers, usize::MAX)?;
    let layer = |(layer, (ffn, window)): (usize, (FfnSpec, Option<usize>))| {
        let options = AttentionOptions { window, rope: Some(rope.clone()), ..Default::default() };
        let mixer = MixerSpec::Attention(decoder.attention(layer, options)?);
        decoder.pre_norm_layer(layer, mixer, "ffn_norm", vec![FfnPart::plain(ffn)])
    };
    let ffns = decoder.dense(Activation::Silu)?.into_iter().zip(windows).enumerate();
    Ok(decoder.model(ffns.map(layer).collect::<Result<_, _>>()?, decoder.logits()?))
}
