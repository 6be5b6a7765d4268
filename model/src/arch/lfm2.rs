//! `lfm2` and `lfm2moe`: most layers are gated short convolutions, the others attention with norms on every head of q
//! and k.

use super::decoder::{AttentionOptions, Decoder};
use super::shape::{Counting, limits};
use super::source::Source;
use crate::Error;
use crate::spec::{Activation, FfnPart, MixerSpec, ModelSpec, RopeStyle, RowSlice, ShortConvSpec};

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    source.refuse_experts()?;
    let decoder = read(source)?;
    let ffns = decoder.dense(Activation::Silu)?;
    model(&decoder, ffns.into_iter().map(|ffn| vec![FfnPart::plain(ffn)]))
}

pub(super) fn translate_moe(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = read(source)?;
    let ffns = decoder.dense_then_mixtures(true, true)?;
    model(&decoder, ffns.into_iter())
}

fn read<'a>(source: &'a Source<'a>) -> Result<Decoder<'a>, Error> {
    Decoder::counting(source, Counting { min_kv_heads: 0, ..Counting::default() })
}

fn model(decoder: &Decoder<'_>, ffns: impl Iterator<Item = Vec<FfnPart>>) -> Result<ModelSpec, Error> {
    let rope = decoder.rope(RopeStyle::Half)?;
    let layer = |(layer, ffn)| {
        let mixer = match decoder.heads(layer).1 {
            0 => MixerSpec::ShortConv(short_conv(decoder, layer)?),
            _ => {
                let options =
                    AttentionOptions { rope: Some(rope.clone()), qk_norm: true, ..Default::default() };
                MixerSpec::Attention(decoder.attention(layer, options)?)
            }
        };
        decoder.pre_norm_layer(layer, mixer, "ffn_norm", ffn)
    };
    let layers = ffns.enumerate().map(layer).collect::<Result<_, Error>>()?;
    // llama.cpp's converter gives the last norm the name of a norm of the embedding.
    let of_embedding = decoder.source.has("token_embd_norm.weight");
    let norm = if of_embedding { "token_embd_norm" } else { "output_norm" };
    Ok(decoder.model(layers, decoder.logits_normed_by(norm)?))
}

fn short_conv(decoder: &Decoder<'_>, layer: usize) -> Result<ShortConvSpec, Error> {
    let (source, hidden) = (decoder.source, decoder.shape.hidden);
    let taps = source.require_count("shortconv.l_cache", 1..=limits::CONV_TAPS)?;
    let third = |start| {
        let slice = RowSlice { of: 3 * hidden, period: 3 * hidden, start, len: hidden };
        source.linear_slice(&decoder.stem(layer, "shortconv.in_proj"), hidden, slice)
    };
    Ok(ShortConvSpec {
        b: third(0)?,
        c: third(hidden)?,
        x: third(2 * hidden)?,
        conv: source.conv(&decoder.stem(layer, "shortconv.conv"), taps, hidden)?,
        out: decoder.linear(layer, "shortconv.out_proj", hidden, hidden)?,
    })
}
