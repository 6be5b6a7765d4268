//! `phi3`: llama with one matrix for q, k and v, one for gate and up, and frequency factors by context.

use super::decoder::{AttentionOptions, Decoder};
use super::shape::limits;
use super::source::Source;
use super::windows::windows;
use crate::Error;
use crate::spec::{
    Activation, AttentionSpec, FfnPart, KvSpec, MixerSpec, ModelSpec, OwnKvSpec, RopeFactors, RopeSpec,
    RopeStyle, RowSlice,
};

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    let rope = rope(&decoder)?;
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

/// Long factors if the context is longer than the original one. They are chosen once: a sequence's numbers must not
/// change while it grows.
fn rope(decoder: &Decoder<'_>) -> Result<RopeSpec, Error> {
    let (source, plain) = (decoder.source, decoder.plain_rope(RopeStyle::Half)?);
    let factors = |name| source.optional_floats(name, &[plain.n_rot / 2]);
    let (short, long) = (factors("rope_factors_short.weight")?, factors("rope_factors_long.weight")?);
    let factors = match short.zip(long) {
        Some((short, long)) => {
            let key = "rope.scaling.original_context_length";
            let original = source.require_count(key, 1..=limits::CONTEXT)?;
            let is_long = decoder.shape.context_length > original;
            Some(RopeFactors::ByContext { short, long, original, is_long })
        }
        None => None,
    };
    let magnitude = source.positive("rope.scaling.attn_factor")?.unwrap_or(1.0);
    Ok(RopeSpec { factors, magnitude, ..plain })
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
