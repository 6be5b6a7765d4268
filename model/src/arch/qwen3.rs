//! `qwen3` and `qwen3moe`: as llama, with half-split rope and norms on every head of q and k.

use super::decoder::{AttentionOptions, Decoder};
use super::source::Source;
use crate::Error;
use crate::spec::{Activation, FfnSpec, ModelSpec, RopeStyle};

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    model(&decoder, decoder.dense(Activation::Silu)?)
}

pub(super) fn translate_moe(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    model(&decoder, decoder.moe(Activation::Silu)?)
}

fn model(decoder: &Decoder<'_>, ffns: Vec<FfnSpec>) -> Result<ModelSpec, Error> {
    let rope = decoder.rope(RopeStyle::Half)?;
    let layer = |(layer, ffn)| {
        let attention = AttentionOptions { window: None, rope: rope.clone(), scale: None, qk_norm: true };
        decoder.pre_norm_layer(layer, attention, ffn)
    };
    decoder.model(ffns.into_iter().enumerate().map(layer).collect::<Result<_, _>>()?)
}
