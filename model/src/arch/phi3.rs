//! `phi3`: llama with one matrix for q, k and v, one for gate and up, and frequency factors by context.

use super::decoder::{AttentionOptions, Decoder};
use super::source::Source;
use super::windows::windows;
use crate::Error;
use crate::spec::{
    Activation, AttentionSpec, FfnPart, KvSpec, MixerSpec, ModelSpec, OwnKvSpec, RopeStyle, RowSlice,
};

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    let rope = decoder.long_rope(RopeStyle::Half)?;
    let windows = windows(source, decoder.shape.layers, usize::MAX)?;
    let widths = decoder.shape.feed_forward_lengths(source)?;
    let layer = |(layer, (window, width)): (usize, (Option<usize>, usize))| {
        let options = AttentionOptions { window, rope: Some(rope.clone()), ..Default::default() };
        let mixer = MixerSpec::Attention(attention(&decoder, layer, options)?);
        let ffn = decoder.gated_in_one(layer, width, Activation::Silu)?;
        decoder.pre_norm_layer(layer, mixer, "ffn_norm", vec![FfnPart::plain(ffn)])
    };
    let layers = windows.into_iter().zip(widths).enumerate().map(layer).collect::<Result<_, Error>>()?;
    Ok(decoder.model(layers, decoder.logits()?))
}

/// Rows of all query heads, of all key heads, of all value heads.
pub(super) fn attention(
    decoder: &Decoder<'_>,
    layer: usize,
    options: AttentionOptions,
) -> Result<AttentionSpec, Error> {
    let ((heads, kv_heads), dims) = (decoder.heads(layer), decoder.shape.dims);
    let (q, k, v) = (heads * dims.k, kv_heads * dims.k, kv_heads * dims.v);
    let of = q + k + v;
    let rows = |start, len| {
        let slice = RowSlice { of, period: of, start, len };
        decoder.source.linear_slice(&decoder.stem(layer, "attn_qkv"), decoder.shape.hidden, slice)
    };
    let own = OwnKvSpec { k: rows(q, k)?, v: Some(rows(q + k, v)?), k_norm: None, v_norm: None };
    decoder.attention_of(layer, dims, rows(0, q)?, KvSpec::Own(own), options)
}
