//! `nemotron_h`: each block is a Mamba-2, an attention without rope, or a feed-forward of squared ReLU. A feed-forward
//! follows a mixer, and both are one layer here.

use super::decoder::{AttentionOptions, Decoder, bare_layer};
use super::granite::Ssm;
use super::shape::{Counting, limits};
use super::source::Source;
use crate::Error;
use crate::spec::{Activation, FfnPart, FfnSpec, LayerSpec, MixerSpec, ModelSpec};
use metadata::KeyError;

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    source.refuse_experts()?;
    let decoder = Decoder::counting(source, Counting { min_kv_heads: 0, ..Counting::default() })?;
    let ssm = Ssm::read(source)?;
    let key = "feed_forward_length";
    let widths = source
        .layer_counts(key, decoder.shape.blocks, 0..=limits::WIDTH)?
        .ok_or_else(|| KeyError::Missing { key: source.key(key) })?;
    let mut layers: Vec<LayerSpec> = Vec::new();
    for (block, &width) in widths.iter().enumerate() {
        let norm = decoder.layer_norm(block, "attn_norm")?;
        if width > 0 {
            let ffn = FfnSpec::Plain {
                up: decoder.linear(block, "ffn_up", decoder.shape.hidden, width)?,
                down: decoder.linear(block, "ffn_down", width, decoder.shape.hidden)?,
                activation: decoder.activation(Activation::ReluSquared)?,
            };
            let Some(layer) = layers.last_mut().filter(|layer| layer.ffn.is_empty()) else {
                let needs = format!("0 for block {block}, as no mixer without a feed-forward precedes it");
                return Err(source.refuse(key, width, needs));
            };
            (layer.ffn_norm, layer.ffn) = (norm, vec![FfnPart::plain(ffn)]);
            continue;
        }
        let mixer = match decoder.heads(block).1 {
            0 => MixerSpec::Mamba2(ssm.layer(&decoder, block)?),
            _ => MixerSpec::Attention(decoder.attention(block, AttentionOptions::default())?),
        };
        layers.push(LayerSpec { mixer_norm: norm, ..bare_layer(mixer, Vec::new()) });
    }
    Ok(decoder.model(layers, decoder.logits()?))
}
