//! `ernie4_5-moe`: interleaved rope, dense layers before mixtures with shared experts.

use super::decoder::{AttentionOptions, Decoder};
use super::source::Source;
use crate::Error;
use crate::spec::{MixerSpec, ModelSpec, RopeStyle};

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    let rope = decoder.rope(RopeStyle::Interleaved)?;
    let layer = |(layer, ffn): (usize, Vec<_>)| {
        let options = AttentionOptions { rope: Some(rope.clone()), ..Default::default() };
        let mixer = MixerSpec::Attention(decoder.attention(layer, options)?);
        decoder.pre_norm_layer(layer, mixer, "ffn_norm", ffn)
    };
    let layers = decoder
        .dense_then_mixtures(false, true)?
        .into_iter()
        .enumerate()
        .map(layer)
        .collect::<Result<_, _>>()?;
    Ok(decoder.model(layers, decoder.logits()?))
}
