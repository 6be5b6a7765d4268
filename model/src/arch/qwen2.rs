//! `qwen2` and `qwen2moe`: llama with half-split rope and biases on q, k and v. The mixture adds a shared
//! expert and does not renormalise the router's probabilities.

use super::decoder::{AttentionOptions, Decoder};
use super::source::Source;
use super::windows::windows;
use crate::Error;
use crate::spec::{Activation, FfnPart, FfnSpec, MixerSpec, ModelSpec, MoeSpec, RopeStyle};

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    let ffns = decoder.dense(Activation::Silu)?;
    model(&decoder, ffns.into_iter().map(|ffn| vec![FfnPart::plain(ffn)]))
}

pub(super) fn translate_moe(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    let (widths, shared) = (decoder.expert_widths()?, decoder.shared_expert_widths()?);
    let parts = decoder.mixtures_or_dense(|layer| {
        let moe = decoder.moe_layer(layer, widths[layer])?;
        let moe = FfnSpec::Moe(MoeSpec { renormalise: decoder.renormalises(false)?, ..moe });
        Ok(vec![FfnPart::plain(moe), FfnPart::plain(decoder.shared_expert(layer, shared[layer])?)])
    })?;
    model(&decoder, parts.into_iter())
}

fn model(decoder: &Decoder<'_>, ffns: impl Iterator<Item = Vec<FfnPart>>) -> Result<ModelSpec, Error> {
    let (source, rope) = (decoder.source, decoder.rope(RopeStyle::Half)?);
    // A key of Kvasir's, for mixtures that have none.
    let biased: bool = source.metadata().get(&source.key("attention.qkv_bias"))?.unwrap_or(true);
    let layer = |(layer, (ffn, window))| {
        if biased {
            decoder.require(layer, &["attn_q.bias", "attn_k.bias", "attn_v.bias"])?;
        }
        let options = AttentionOptions { window, rope: Some(rope.clone()), ..Default::default() };
        let mixer = MixerSpec::Attention(decoder.attention(layer, options)?);
        decoder.pre_norm_layer(layer, mixer, "ffn_norm", ffn)
    };
    let windows = windows(source, decoder.shape.layers, 1)?;
    let layers = ffns.zip(windows).enumerate().map(layer).collect::<Result<_, _>>()?;
    Ok(decoder.model(layers, decoder.logits()?))
}
