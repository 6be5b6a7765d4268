//! `glm4`: norms before and behind mixer and FFN, interleaved rope on a part of each head, one matrix for gate and up.

use super::decoder::{AttentionOptions, Decoder};
use super::source::Source;
use crate::Error;
use crate::spec::{Activation, FfnPart, LayerSpec, MixerSpec, ModelSpec, RopeStyle};

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    let rope = decoder.rope(RopeStyle::Interleaved)?;
    let widths = decoder.shape.feed_forward_lengths(source)?;
    let layer = |(layer, width)| {
        let options = AttentionOptions { rope: Some(rope.clone()), ..Default::default() };
        let mixer = MixerSpec::Attention(decoder.attention(layer, options)?);
        let ffn = decoder.gated_in_one(layer, width, Activation::Silu)?;
        Ok(LayerSpec {
            mixer_post_norm: decoder.layer_norm(layer, "post_attention_norm")?,
            ffn_post_norm: decoder.layer_norm(layer, "post_ffw_norm")?,
            ..decoder.pre_norm_layer(layer, mixer, "ffn_norm", vec![FfnPart::plain(ffn)])?
        })
    };
    let layers = widths.into_iter().enumerate().map(layer).collect::<Result<_, Error>>()?;
    Ok(decoder.model(layers, decoder.logits()?))
}
