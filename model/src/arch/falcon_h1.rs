//! `falcon-h1`: attention and Mamba-2 side by side in every layer. Factors on all paths: a converter multiplies the
//! weights by them, and a folder has them as keys.

use std::borrow::Cow;

use super::decoder::{AttentionOptions, Decoder};
use super::granite::Ssm;
use super::source::Source;
use crate::Error;
use crate::spec::{
    Activation, AttentionSpec, FfnPart, FfnSpec, KvSpec, LayerSpec, LinearSpec, LogitsSpec, Mamba2Spec,
    MixerSpec, ModelSpec, RopeStyle,
};

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    source.refuse_experts()?;
    let decoder = Decoder::read(source)?;
    let (ssm, ffns) = (Ssm::read(source)?, decoder.dense(Activation::Silu)?);
    let rope = decoder.rope(RopeStyle::Half)?;
    let factor = |key: &str| -> Result<f32, Error> { Ok(source.positive(key)?.unwrap_or(1.0)) };
    let [gate, down] = factors(source, "feed_forward.factors")?;
    let layer = |(layer, mut ffn)| {
        let options = AttentionOptions { rope: Some(rope.clone()), ..Default::default() };
        let mut attention = decoder.attention(layer, options)?;
        scale_attention(&mut attention, factor)?;
        let mut mamba = ssm.bare_layer(&decoder, layer)?;
        scale_mamba(&mut mamba, source, factor)?;
        if let FfnSpec::Gated { gate: gate_linear, down: down_linear, .. } = &mut ffn {
            scale(gate_linear, gate, gate);
            scale(down_linear, down, down);
        }
        let mixer = MixerSpec::Attention(attention);
        let plain = decoder.pre_norm_layer(layer, mixer, "ffn_norm", vec![FfnPart::plain(ffn)])?;
        Ok(LayerSpec { parallel_mixer: Some(MixerSpec::Mamba2(mamba)), ..plain })
    };
    let layers = ffns.into_iter().enumerate().map(layer).collect::<Result<_, Error>>()?;
    let logits = LogitsSpec { scale: factor("logit_scale")?, ..decoder.logits()? };
    let mut model = decoder.model(layers, logits);
    model.embedding.scale = factor("embedding_scale")?;
    Ok(model)
}

fn scale_attention(
    attention: &mut AttentionSpec,
    factor: impl Fn(&str) -> Result<f32, Error>,
) -> Result<(), Error> {
    let input = factor("attention.input_factor")?;
    scale(&mut attention.q, input, 1.0);
    if let KvSpec::Own(own) = &mut attention.kv {
        let key = factor("attention.key_factor")?;
        scale(&mut own.k, input * key, key);
        own.v.iter_mut().for_each(|v| scale(v, input, 1.0));
    }
    let output = factor("attention.output_factor")?;
    scale(&mut attention.o, output, output);
    Ok(())
}

fn scale_mamba(
    mamba: &mut Mamba2Spec,
    source: &Source<'_>,
    factor: impl Fn(&str) -> Result<f32, Error>,
) -> Result<(), Error> {
    let (input, output) = (factor("ssm.input_factor")?, factor("ssm.output_factor")?);
    let [z, x, b, c, dt] = factors(source, "ssm.factors")?;
    scale(&mut mamba.z, input * z, z);
    scale(&mut mamba.xbc, input, 1.0);
    scale(&mut mamba.dt, input * dt, dt);
    scale(&mut mamba.out, output, output);
    let width = mamba.groups * mamba.state;
    mamba.conv.factors = vec![(mamba.heads * mamba.head_dim, x), (width, b), (width, c)];
    mamba.norm_first = source.metadata().get(&source.key("ssm.norm_first"))?.unwrap_or(false);
    Ok(())
}

fn scale(linear: &mut LinearSpec, factor: f32, bias_factor: f32) {
    (linear.factor, linear.bias_factor) = (factor, bias_factor);
}

/// A list of factors; all 1 without the key.
fn factors<const N: usize>(source: &Source<'_>, key: &str) -> Result<[f32; N], Error> {
    let Some(list) = source.metadata().get::<Cow<'_, [f32]>>(&source.key(key))? else { return Ok([1.0; N]) };
    let finite = list.iter().all(|factor| factor.is_finite());
    let list = <[f32; N]>::try_from(&*list).ok().filter(|_| finite);
    list.ok_or_else(|| source.refuse(key, "another list", format_args!("{N} finite numbers")))
}
