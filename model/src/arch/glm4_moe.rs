//! `glm4moe`: half-split rope on a part of each head, optional head norms, dense layers before mixtures with a
//! shared expert, and an MTP head that is not used.

use super::decoder::{AttentionOptions, Decoder};
use super::shape::{Counting, limits};
use super::source::Source;
use crate::Error;
use crate::spec::{MixerSpec, ModelSpec, RopeStyle};

/// Key for the number of MTP blocks after the last layer.
pub(super) const MTP_KEY: &str = "nextn_predict_layers";

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let mtp_blocks = source.count(MTP_KEY, 0..=limits::LAYERS - 1)?.unwrap_or(0);
    let decoder = Decoder::counting(source, Counting { mtp_blocks, ..Counting::default() })?;
    let rope = decoder.rope(RopeStyle::Half)?;
    let layer = |(layer, ffn)| {
        let qk_norm = source.has(&decoder.stem(layer, "attn_q_norm.weight"));
        let options = AttentionOptions { rope: Some(rope.clone()), qk_norm, ..Default::default() };
        let mixer = MixerSpec::Attention(decoder.attention(layer, options)?);
        decoder.pre_norm_layer(layer, mixer, "post_attention_norm", ffn)
    };
    let layers = decoder
        .dense_then_mixtures(true, false)?
        .into_iter()
        .enumerate()
        .map(layer)
        .collect::<Result<_, _>>()?;
    Ok(decoder.model(layers, decoder.logits()?))
}

/// Whether `tensor` is of a block after the last layer.
pub(super) fn is_mtp_head(source: &Source<'_>, tensor: &str) -> bool {
    let count = |key| source.count(key, 0..=limits::LAYERS).ok().flatten().unwrap_or(0);
    let block = tensor.strip_prefix("blk.").and_then(|rest| rest.split_once('.')?.0.parse::<usize>().ok());
    block.is_some_and(|block| block >= count("block_count").saturating_sub(count(MTP_KEY)))
}
