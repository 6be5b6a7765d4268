//! `minimax-m2`: half-split rope on a part of each head, norms over all heads of q and k, mixtures in every layer.

use super::decoder::{AttentionOptions, Decoder};
use super::olmo2::with_whole_norms;
use super::source::Source;
use crate::Error;
use crate::spec::{MixerSpec, ModelSpec, RopeStyle};

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    let rope = decoder.rope(RopeStyle::Half)?;
    let layer = |(layer, ffn): (usize, Vec<_>)| {
        let options = AttentionOptions { rope: Some(rope.clone()), ..Default::default() };
        let attention = with_whole_norms(&decoder, layer, decoder.attention(layer, options)?)?;
        decoder.pre_norm_layer(layer, MixerSpec::Attention(attention), "ffn_norm", ffn)
    };
    let layers = decoder
        .dense_then_mixtures(true, true)?
        .into_iter()
        .enumerate()
        .map(layer)
        .collect::<Result<_, _>>()?;
    Ok(decoder.model(layers, decoder.logits()?))
}
