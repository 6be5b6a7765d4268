//! `mistral3`: llama with sliding windows on all layers or none, and in the later models YaRN and queries that grow
//! with their position.

use super::decoder::{AttentionOptions, Decoder};
use super::shape::limits;
use super::source::Source;
use super::windows::windows;
use crate::Error;
use crate::spec::{
    Activation, AttentionSpec, FfnPart, FfnSpec, MixerSpec, ModelSpec, QueryGrowth, RopeStyle,
};

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    source.refuse_experts()?;
    let decoder = Decoder::read(source)?;
    let rope = decoder.rope(RopeStyle::Interleaved)?;
    let q_growth = match source.positive_unless_zero("attention.temperature_scale")? {
        None => None,
        Some(beta) => {
            let key = "rope.scaling.original_context_length";
            Some(QueryGrowth { beta, every: source.require_count(key, 1..=limits::CONTEXT)? })
        }
    };
    // All layers, as no layer has a multiple of this number.
    let windows = windows(source, decoder.shape.layers, usize::MAX)?;
    let layer = |(layer, (ffn, window)): (usize, (FfnSpec, Option<usize>))| {
        let options = AttentionOptions { window, rope: Some(rope.clone()), ..Default::default() };
        let attention = AttentionSpec { q_growth, ..decoder.attention(layer, options)? };
        let mixer = MixerSpec::Attention(attention);
        decoder.pre_norm_layer(layer, mixer, "ffn_norm", vec![FfnPart::plain(ffn)])
    };
    let ffns = decoder.dense(Activation::Silu)?.into_iter().zip(windows).enumerate();
    Ok(decoder.model(ffns.map(layer).collect::<Result<_, _>>()?, decoder.logits()?))
}
