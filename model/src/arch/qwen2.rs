//! `qwen2`: as llama, with half-split rope and biases on q, k and v.

use super::decoder::{AttentionOptions, Decoder};
use super::source::Source;
use crate::Error;
use crate::spec::{Activation, ModelSpec, RopeStyle};

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    for layer in 0..decoder.layers {
        for name in ["attn_q.bias", "attn_k.bias", "attn_v.bias"] {
            // A bias is optional to the decoder; a qwen2 without one is not whole.
            source.dims(&decoder.stem(layer, name))?;
        }
    }
    let rope = decoder.rope(RopeStyle::Half)?;
    let ffns = decoder.dense(Activation::Silu)?;
    let layer = |(layer, ffn)| {
        let attention = AttentionOptions { window: None, rope: rope.clone(), scale: None, qk_norm: false };
        decoder.pre_norm_layer(layer, attention, ffn)
    };
    decoder.model(ffns.into_iter().enumerate().map(layer).collect::<Result<_, _>>()?)
}
