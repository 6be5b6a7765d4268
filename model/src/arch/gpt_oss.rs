//! `gpt-oss`: attention sinks, windows on every other layer, YaRN on all, biases everywhere, clamped experts.

use super::decoder::{AttentionOptions, Decoder};
use super::shape::limits;
use super::source::Source;
use super::windows::windows;
use crate::Error;
use crate::spec::{
    Activation, AttentionSpec, FfnPart, FfnSpec, LayerSpec, MixerSpec, ModelSpec, MoeSpec, RopeStyle,
};

/// Every `PERIOD`th layer has full attention, unless the file specifies it.
const PERIOD: usize = 2;
/// Biases that are optional in other architectures.
const ATTENTION_BIASES: [&str; 4] = ["attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias"];
const BIASES: [&str; 4] =
    ["ffn_gate_inp.bias", "ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias"];

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    source.require_count("attention.sliding_window", 1..=limits::CONTEXT)?;
    let windows = windows(source, decoder.shape.layers, PERIOD)?;
    // Released files have YaRN: without the key something is missing.
    source.metadata().require::<&str>(&source.key("rope.scaling.type"))?;
    let rope = decoder.rope(RopeStyle::Half)?;
    // A key of Kvasir's, for models that have none.
    let biased: bool = source.metadata().get(&source.key("attention.qkv_bias"))?.unwrap_or(true);
    let moes = decoder.moe(&decoder.expert_widths()?, Activation::ClampedSwiglu)?;
    let layer = |(layer, (moe, window)): (usize, (MoeSpec, Option<usize>))| -> Result<LayerSpec, Error> {
        decoder.require(layer, &BIASES)?;
        if biased {
            decoder.require(layer, &ATTENTION_BIASES)?;
        }
        let options = AttentionOptions { window, rope: Some(rope.clone()), ..Default::default() };
        let attention = decoder.attention(layer, options)?;
        let sinks = source.floats(&decoder.stem(layer, "attn_sinks.weight"), &[attention.heads])?;
        let mixer = MixerSpec::Attention(AttentionSpec { sinks: Some(sinks), ..attention });
        let ffn = vec![FfnPart::plain(FfnSpec::Moe(moe))];
        decoder.pre_norm_layer(layer, mixer, "post_attention_norm", ffn)
    };
    let layers = moes.into_iter().zip(windows).enumerate().map(layer).collect::<Result<_, _>>()?;
    Ok(decoder.model(layers, decoder.logits()?))
}
