//! `llama`: pre-norm layers, interleaved rope (with frequency factors in Llama 3), SwiGLU.

use super::decoder::{AttentionOptions, Decoder};
use super::source::Source;
use crate::Error;
use crate::spec::{Activation, ModelSpec, RopeSpec, RopeStyle};

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    if let Some(experts) = source.count("expert_count", 0..=usize::MAX)?.filter(|&experts| experts > 0) {
        return Err(source.refuse("expert_count", experts, "0"));
    }
    let decoder = Decoder::read(source)?;
    let rope = RopeSpec { factors: decoder.rope_factors()?, ..decoder.rope(RopeStyle::Interleaved)? };
    let scale = source.positive_unless_zero("attention.scale")?;
    let ffns = decoder.dense(Activation::Silu)?;
    let layer = |(layer, ffn)| {
        let attention = AttentionOptions { window: None, rope: rope.clone(), scale, qk_norm: false };
        decoder.pre_norm_layer(layer, attention, ffn)
    };
    decoder.model(ffns.into_iter().enumerate().map(layer).collect::<Result<_, _>>()?)
}
