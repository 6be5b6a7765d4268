//! `gemma3`: norms before and after mixer and FFN, sliding windows between full layers, each with its own rope.

use std::borrow::Cow;

use super::decoder::{AttentionOptions, Decoder, limits};
use super::source::Source;
use crate::Error;
use crate::metadata::Value;
use crate::spec::{Activation, LayerSpec, ModelSpec, RopeSpec, RopeStyle};

/// Every so many layers one is full, where the file does not say.
const PERIOD: usize = 6;
/// Layers of the 27B model, which scales attention by hidden / heads in place of the head's width.
/// No key tells them apart.
const LAYERS_27B: usize = 62;

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    let full = decoder.rope(RopeStyle::Half)?;
    let base = source.positive("rope.freq_base_swa")?.unwrap_or(10_000.0);
    let sliding = RopeSpec { base, freq_scale: 1.0, ..full.clone() };
    let scale = attention_scale(source, &decoder)?;
    let windows = windows(source, decoder.layers)?;
    let ffns = decoder.dense(Activation::GeluTanh)?;

    let layer = |(layer, (ffn, window)): (usize, (_, Option<usize>))| {
        let rope = if window.is_some() { &sliding } else { &full }.clone();
        let norm = |name| decoder.norm(&decoder.stem(layer, name)).map(Some);
        Ok(LayerSpec {
            mixer_post_norm: norm("post_attention_norm")?,
            ffn_post_norm: norm("post_ffw_norm")?,
            ..decoder.pre_norm_layer(layer, AttentionOptions { window, rope, scale, qk_norm: true }, ffn)?
        })
    };
    let layers = ffns.into_iter().zip(windows).enumerate().map(layer).collect::<Result<_, Error>>()?;
    let mut model = decoder.model(layers)?;
    model.embedding.scale = (decoder.hidden as f32).sqrt();
    model.output.softcap = source.positive_unless_zero("final_logit_softcapping")?;
    Ok(model)
}

fn attention_scale(source: &Source<'_>, decoder: &Decoder<'_>) -> Result<Option<f32>, Error> {
    if let Some(scale) = source.positive_unless_zero("attention.scale")? {
        return Ok(Some(scale));
    }
    if decoder.layers != LAYERS_27B {
        return Ok(None);
    }
    let heads = source.require_count("attention.head_count", 1..=decoder.hidden)?;
    Ok(Some((decoder.hidden as f32 / heads as f32).sqrt().recip()))
}

/// The window of each layer; none where attention is full.
fn windows(source: &Source<'_>, layers: usize) -> Result<Vec<Option<usize>>, Error> {
    let window = source.count("attention.sliding_window", 0..=limits::CONTEXT)?.filter(|&window| window > 0);
    let key = "attention.sliding_window_pattern";
    if let Some(Value::Array(_)) = source.metadata().value(&source.key(key)) {
        let slides: Cow<'_, [bool]> = source.metadata().require(&source.key(key))?;
        if slides.len() != layers {
            let found = format_args!("an array of {}", slides.len()).to_string();
            return Err(source.refuse(key, found, format_args!("an array of {layers}")));
        }
        return Ok(slides.iter().map(|slides| window.filter(|_| *slides)).collect());
    }
    let period = source.count(key, 1..=usize::MAX)?.unwrap_or(PERIOD);
    Ok((1..=layers).map(|nth| window.filter(|_| nth % period != 0)).collect())
}
