//! `gemma3`: norms before and after mixer and FFN, sliding windows between full layers, each with its own rope.

use super::decoder::{AttentionOptions, Decoder};
use super::source::Source;
use super::windows::windows;
use crate::Error;
use crate::spec::{
    Activation, FfnPart, FfnSpec, LayerSpec, LogitsSpec, MixerSpec, ModelSpec, RopeSpec, RopeStyle,
};

/// Every `PERIOD`th layer has full attention, unless the file specifies it.
const PERIOD: usize = 6;
/// Number of layers of the 27B model, which scales attention by hidden / heads instead of the head's width.
/// No key distinguishes it.
const LAYERS_27B: usize = 62;

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    let full = decoder.rope(RopeStyle::Half)?;
    let base = source.positive("rope.freq_base_swa")?.unwrap_or(10_000.0);
    let sliding = RopeSpec { base, ..decoder.plain_rope(RopeStyle::Half)? };
    let scale = attention_scale(source, &decoder)?;
    let windows = windows(source, decoder.shape.layers, PERIOD)?;
    let ffns = decoder.dense(Activation::GeluTanh)?;

    let layer = |(layer, (ffn, window)): (usize, (FfnSpec, Option<usize>))| {
        let rope = Some(if window.is_some() { &sliding } else { &full }.clone());
        let options = AttentionOptions { window, rope, scale, qk_norm: true };
        let mixer = MixerSpec::Attention(decoder.attention(layer, options)?);
        Ok(LayerSpec {
            mixer_post_norm: decoder.layer_norm(layer, "post_attention_norm")?,
            ffn_post_norm: decoder.layer_norm(layer, "post_ffw_norm")?,
            ..decoder.pre_norm_layer(layer, mixer, "ffn_norm", vec![FfnPart::plain(ffn)])?
        })
    };
    let layers = ffns.into_iter().zip(windows).enumerate().map(layer).collect::<Result<_, Error>>()?;
    let softcap = source.positive_unless_zero("final_logit_softcapping")?;
    let mut model = decoder.model(layers, LogitsSpec { softcap, ..decoder.logits()? });
    model.images_see_ahead = true;
    model.embedding.scale = (decoder.shape.hidden as f32).sqrt();
    Ok(model)
}

fn attention_scale(source: &Source<'_>, decoder: &Decoder<'_>) -> Result<Option<f32>, Error> {
    if let Some(scale) = source.positive_unless_zero("attention.scale")? {
        return Ok(Some(scale));
    }
    if decoder.shape.layers != LAYERS_27B {
        return Ok(None);
    }
    let heads = source.require_count("attention.head_count", 1..=decoder.shape.hidden)?;
    Ok(Some((decoder.shape.hidden as f32 / heads as f32).sqrt().recip()))
}
