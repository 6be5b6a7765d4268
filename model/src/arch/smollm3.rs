//! `smollm3`: llama without rope on every few layers.

use super::decoder::{AttentionOptions, Decoder};
use super::source::Source;
use super::windows::windows;
use crate::Error;
use crate::spec::{Activation, FfnPart, FfnSpec, MixerSpec, ModelSpec, RopeStyle};

/// Every `INTERVAL`th layer has no rope, unless the file specifies the layers.
const INTERVAL: usize = 4;

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    let (rope, layers) = (decoder.rope(RopeStyle::Interleaved)?, decoder.shape.layers);
    // A key of Kvasir's: GGUF has none.
    let rotates = match source.layer_flags("rope.layers", &[layers])? {
        Some(rotates) => rotates,
        None => (1..=layers).map(|nth| !nth.is_multiple_of(INTERVAL)).collect(),
    };
    let windows = windows(source, layers, 1)?;
    let layer = |(layer, ((ffn, rotates), window)): (usize, ((FfnSpec, bool), Option<usize>))| {
        let options = AttentionOptions { window, rope: rotates.then(|| rope.clone()), ..Default::default() };
        let mixer = MixerSpec::Attention(decoder.attention(layer, options)?);
        decoder.pre_norm_layer(layer, mixer, "ffn_norm", vec![FfnPart::plain(ffn)])
    };
    let ffns = decoder.dense(Activation::Silu)?.into_iter().zip(rotates).zip(windows).enumerate();
    Ok(decoder.model(ffns.map(layer).collect::<Result<_, _>>()?, decoder.logits()?))
}
