//! `qwen2` and `qwen2moe`: llama with half-split rope and biases on q, k and v. The mixture adds a shared
//! expert and does not renormalise the router's probabilities.

use super::decoder::{AttentionOptions, Decoder};
use super::source::Source;
use crate::Error;
use crate::spec::{Activation, FfnPart, FfnSpec, MixerSpec, ModelSpec, MoeSpec, RopeStyle};

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    let ffns = decoder.dense(Activation::Silu)?;
    model(&decoder, ffns.into_iter().map(|ffn| vec![FfnPart::plain(ffn)]))
}

pub(super) fn translate_moe(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    // The output matrix is never tied.
    source.dims("output.weight")?;
    let moes = decoder.moe(&decoder.expert_widths()?, Activation::Silu)?;
    let shared = decoder.shared_expert_widths()?;
    let parts = |(layer, (moe, width)): (usize, (MoeSpec, usize))| {
        let moe = FfnSpec::Moe(MoeSpec { renormalise: false, ..moe });
        Ok(vec![FfnPart::plain(moe), FfnPart::plain(decoder.shared_expert(layer, width)?)])
    };
    let parts: Vec<_> = moes.into_iter().zip(shared).enumerate().map(parts).collect::<Result<_, Error>>()?;
    model(&decoder, parts.into_iter())
}

fn model(decoder: &Decoder<'_>, ffns: impl Iterator<Item = Vec<FfnPart>>) -> Result<ModelSpec, Error> {
    let rope = decoder.rope(RopeStyle::Half)?;
    let layer = |(layer, ffn)| {
        decoder.require(layer, &["attn_q.bias", "attn_k.bias", "attn_v.bias"])?;
        let options = AttentionOptions { rope: Some(rope.clone()), ..Default::default() };
        let mixer = MixerSpec::Attention(decoder.attention(layer, options)?);
        decoder.pre_norm_layer(layer, mixer, "ffn_norm", ffn)
    };
    let layers = ffns.enumerate().map(layer).collect::<Result<_, _>>()?;
    Ok(decoder.model(layers, decoder.logits()?))
}
