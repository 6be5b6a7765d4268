//! `cohere2`: one layer norm without bias for mixer and FFN, which run side by side; windows with rope, and full layers
//! without.

use super::decoder::{AttentionOptions, Decoder, bare_layer};
use super::shape::{Counting, Shape};
use super::source::Source;
use super::windows::windows;
use crate::Error;
use crate::spec::{
    Activation, FfnPart, FfnSpec, LayerSpec, LogitsSpec, MixerSpec, ModelSpec, NormKind, NormSpec, RopeStyle,
};

/// Every `PERIOD`th layer has full attention, unless the file specifies it.
const PERIOD: usize = 4;

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let eps = source.require_positive("attention.layer_norm_epsilon")?;
    let decoder = Decoder { source, shape: Shape::read(source, Counting::default())?, eps };
    let rope = decoder.rope(RopeStyle::Interleaved)?;
    let windows = windows(source, decoder.shape.layers, PERIOD)?;
    let norm = |stem: &str| Ok::<_, Error>(NormSpec { kind: NormKind::Layer, ..decoder.norm(stem)? });
    let layer = |(layer, (ffn, window)): (usize, (FfnSpec, Option<usize>))| {
        let rope = window.map(|_| rope.clone());
        let mixer = decoder.attention(layer, AttentionOptions { window, rope, ..Default::default() })?;
        Ok(LayerSpec {
            mixer_norm: Some(norm(&decoder.stem(layer, "attn_norm"))?),
            parallel: true,
            ..bare_layer(MixerSpec::Attention(mixer), vec![FfnPart::plain(ffn)])
        })
    };
    let ffns = decoder.dense(Activation::Silu)?.into_iter().zip(windows).enumerate();
    let layers = ffns.map(layer).collect::<Result<_, Error>>()?;
    let scale = source.positive("logit_scale")?.unwrap_or(1.0);
    Ok(decoder.model(layers, LogitsSpec { scale, norm: norm("output_norm")?, ..decoder.logits()? }))
}
