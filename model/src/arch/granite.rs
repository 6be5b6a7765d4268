//! `granite`, `granitemoe` and `granitehybrid`: llama with scales on embedding, residual, attention and
//! logits. In the hybrids most layers are Mamba-2.

use super::decoder::{AttentionOptions, Decoder};
use super::shape::{Counting, limits};
use super::source::Source;
use crate::Error;
use crate::spec::{
    Activation, FfnPart, FfnSpec, LayerSpec, LogitsSpec, Mamba2Spec, MixerSpec, ModelSpec, NormKind,
    NormSpec, RopeSpec, RopeStyle, RowSlice,
};

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    source.refuse_experts()?;
    let decoder = Decoder::read(source)?;
    let ffns = dense(&decoder)?;
    model(&decoder, ffns, None)
}

pub(super) fn translate_moe(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    let ffns = mixtures(&decoder)?;
    model(&decoder, ffns, None)
}

pub(super) fn translate_hybrid(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::counting(source, Counting { min_kv_heads: 0, ..Counting::default() })?;
    let ffns = match source.count("expert_count", 0..=limits::EXPERTS)? {
        None | Some(0) => dense(&decoder)?,
        Some(_) => mixtures(&decoder)?,
    };
    model(&decoder, ffns, Some(&Ssm::read(source)?))
}

fn dense(decoder: &Decoder<'_>) -> Result<Vec<Vec<FfnPart>>, Error> {
    let ffns = decoder.dense(Activation::Silu)?;
    Ok(ffns.into_iter().map(|ffn| vec![FfnPart::plain(ffn)]).collect())
}

/// The experts, each as wide as a dense feed-forward, and the shared expert if there is one.
fn mixtures(decoder: &Decoder<'_>) -> Result<Vec<Vec<FfnPart>>, Error> {
    let source = decoder.source;
    let moes = decoder.moe(&decoder.shape.feed_forward_lengths(source)?, Activation::Silu)?;
    let shared = source.count("expert_shared_feed_forward_length", 0..=limits::WIDTH)?.unwrap_or(0);
    let parts = |(layer, moe)| {
        let mut parts = vec![FfnPart::plain(FfnSpec::Moe(moe))];
        if shared > 0 {
            parts.push(FfnPart::plain(decoder.gated(layer, "_shexp", shared, Activation::Silu)?));
        }
        Ok(parts)
    };
    moes.into_iter().enumerate().map(parts).collect()
}

fn model(decoder: &Decoder<'_>, ffns: Vec<Vec<FfnPart>>, ssm: Option<&Ssm>) -> Result<ModelSpec, Error> {
    let source = decoder.source;
    let rope = rope(decoder)?;
    let scale = source.positive_unless_zero("attention.scale")?;
    let residual_scale = source.positive_unless_zero("residual_scale")?.unwrap_or(1.0);
    let layer = |(layer, ffn)| {
        let mixer = match ssm {
            Some(ssm) if decoder.heads(layer).1 == 0 => MixerSpec::Mamba2(ssm.layer(decoder, layer)?),
            _ => {
                let options = AttentionOptions { rope: rope.clone(), scale, ..Default::default() };
                MixerSpec::Attention(decoder.attention(layer, options)?)
            }
        };
        Ok(LayerSpec { residual_scale, ..decoder.pre_norm_layer(layer, mixer, "ffn_norm", ffn)? })
    };
    let layers = ffns.into_iter().enumerate().map(layer).collect::<Result<_, Error>>()?;
    let divisor = source.require_positive("logit_scale")?;
    let mut model = decoder.model(layers, LogitsSpec { scale: divisor.recip(), ..decoder.logits()? });
    model.embedding.scale = source.positive_unless_zero("embedding_scale")?.unwrap_or(1.0);
    Ok(model)
}

/// `None` if the model uses no positions.
fn rope(decoder: &Decoder<'_>) -> Result<Option<RopeSpec>, Error> {
    let source = decoder.source;
    match source.metadata().get(&source.key("rope.scaling.finetuned"))? {
        Some(false) => Ok(None),
        Some(true) | None => decoder.rope(RopeStyle::Interleaved).map(Some),
    }
}

/// Sizes of the Mamba-2 layers.
pub(super) struct Ssm {
    taps: usize,
    heads: usize,
    head_dim: usize,
    groups: usize,
    state: usize,
}

impl Ssm {
    pub(super) fn read(source: &Source<'_>) -> Result<Self, Error> {
        let (group_key, inner_key) = ("ssm.group_count", "ssm.inner_size");
        let taps = source.require_count("ssm.conv_kernel", 1..=limits::CONV_TAPS)?;
        let heads = source.require_count("ssm.time_step_rank", 1..=limits::HEADS)?;
        let groups = source.require_count(group_key, 1..=limits::HEADS)?;
        if !heads.is_multiple_of(groups) {
            return Err(source.refuse(group_key, groups, format_args!("a divisor of the {heads} heads")));
        }
        let inner = source.require_count(inner_key, 1..=limits::WIDTH)?;
        if !inner.is_multiple_of(heads) {
            return Err(source.refuse(inner_key, inner, format_args!("a multiple of {heads}")));
        }
        let state = source.require_count("ssm.state_size", 1..=limits::HEAD_DIM)?;
        Ok(Self { taps, heads, head_dim: inner / heads, groups, state })
    }

    pub(super) fn layer(&self, decoder: &Decoder<'_>, layer: usize) -> Result<Mamba2Spec, Error> {
        // Optional in other architectures.
        decoder.require(layer, &["ssm_norm.weight"])?;
        self.bare_layer(decoder, layer)
    }

    /// Like [`layer`](Self::layer); the convolution's bias and the norm are optional.
    pub(super) fn bare_layer(&self, decoder: &Decoder<'_>, layer: usize) -> Result<Mamba2Spec, Error> {
        let (source, hidden) = (decoder.source, decoder.shape.hidden);
        let inner = self.heads * self.head_dim;
        let channels = inner + 2 * self.groups * self.state;
        let rows = inner + channels + self.heads;
        // One matrix for all inputs: the gate, then x, B and C, then the step sizes.
        let input = |start, len| {
            let slice = RowSlice { of: rows, period: rows, start, len };
            source.linear_slice(&decoder.stem(layer, "ssm_in"), hidden, slice)
        };
        let per_head = |name, dims: &[usize]| source.floats(&decoder.stem(layer, name), dims);
        let width = inner / self.groups;
        let weight =
            source.optional_floats(&decoder.stem(layer, "ssm_norm.weight"), &[width, self.groups])?;
        let norm = |weight| NormSpec {
            kind: NormKind::Rms,
            weight: Some(weight),
            bias: None,
            eps: decoder.eps,
            width,
        };
        Ok(Mamba2Spec {
            heads: self.heads,
            head_dim: self.head_dim,
            groups: self.groups,
            state: self.state,
            z: input(0, inner)?,
            xbc: input(inner, channels)?,
            dt: input(inner + channels, self.heads)?,
            conv: source.conv(&decoder.stem(layer, "ssm_conv1d"), self.taps, channels)?,
            a: per_head("ssm_a", &[1, self.heads])?,
            d: per_head("ssm_d", &[1, self.heads])?,
            dt_bias: per_head("ssm_dt.bias", &[self.heads])?,
            norm: weight.map(norm),
            norm_first: false,
            out: decoder.linear(layer, "ssm_out", inner, hidden)?,
        })
    }
}
