//! `gemma2`: norms before and after mixer and FFN, windows on every other layer, caps of scores and logits.

use super::decoder::{AttentionOptions, Decoder};
use super::source::Source;
use super::windows::windows;
use crate::Error;
use crate::spec::{
    Activation, AttentionSpec, FfnPart, FfnSpec, LayerSpec, LogitsSpec, MixerSpec, ModelSpec, RopeStyle,
};

/// Every `PERIOD`th layer has full attention, unless the file specifies it.
const PERIOD: usize = 2;
/// Number of layers of the 27B model, which scales attention by hidden / heads instead of the head's width.
/// No key distinguishes it.
const LAYERS_27B: usize = 46;

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    let rope = decoder.rope(RopeStyle::Half)?;
    let windows = windows(source, decoder.shape.layers, PERIOD)?;
    let softcap = source.positive_unless_zero("attn_logit_softcapping")?;
    let scale = match source.positive_unless_zero("attention.scale")? {
        None if decoder.shape.layers == LAYERS_27B => {
            let heads = source.require_count("attention.head_count", 1..=decoder.shape.hidden)?;
            Some((decoder.shape.hidden as f32 / heads as f32).sqrt().recip())
        }
        scale => scale,
    };
    let layer = |(layer, (ffn, window)): (usize, (FfnSpec, Option<usize>))| {
        let options = AttentionOptions { window, rope: Some(rope.clone()), scale, ..Default::default() };
        let attention = AttentionSpec { softcap, ..decoder.attention(layer, options)? };
        let mixer = MixerSpec::Attention(attention);
        Ok(LayerSpec {
            mixer_post_norm: decoder.layer_norm(layer, "post_attention_norm")?,
            ffn_post_norm: decoder.layer_norm(layer, "post_ffw_norm")?,
            ..decoder.pre_norm_layer(layer, mixer, "ffn_norm", vec![FfnPart::plain(ffn)])?
        })
    };
    let ffns = decoder.dense(Activation::GeluTanh)?.into_iter().zip(windows).enumerate();
    let layers = ffns.map(layer).collect::<Result<_, Error>>()?;
    let softcap = source.positive_unless_zero("final_logit_softcapping")?;
    let mut model = decoder.model(layers, LogitsSpec { softcap, ..decoder.logits()? });
    model.embedding.scale = (decoder.shape.hidden as f32).sqrt();
    Ok(model)
}
