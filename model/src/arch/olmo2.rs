//! `olmo2`, which is also OLMo 3: norms behind mixer and FFN only, and norms over all heads of q and k. OLMo 3 has
//! sliding windows, and scales the rope of the full layers alone.

use super::decoder::{AttentionOptions, Decoder, bare_layer};
use super::source::Source;
use super::windows::windows;
use crate::Error;
use crate::spec::{
    Activation, AttentionSpec, FfnPart, FfnSpec, KvSpec, LayerSpec, MixerSpec, ModelSpec, OwnKvSpec,
    RopeSpec, RopeStyle,
};

/// Every `PERIOD`th layer has full attention, unless the file specifies it.
const PERIOD: usize = 4;

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = Decoder::read(source)?;
    let (full, plain) = (decoder.rope(RopeStyle::Half)?, decoder.plain_rope(RopeStyle::Half)?);
    let sliding = RopeSpec { base: source.positive("rope.freq_base_swa")?.unwrap_or(plain.base), ..plain };
    let windows = windows(source, decoder.shape.layers, PERIOD)?;
    let layer = |(layer, (ffn, window)): (usize, (FfnSpec, Option<usize>))| {
        let rope = Some(if window.is_some() { &sliding } else { &full }.clone());
        let attention = decoder.attention(layer, AttentionOptions { window, rope, ..Default::default() })?;
        Ok(LayerSpec {
            mixer_post_norm: decoder.layer_norm(layer, "post_attention_norm")?,
            ffn_post_norm: decoder.layer_norm(layer, "post_ffw_norm")?,
            ..bare_layer(
                MixerSpec::Attention(with_whole_norms(&decoder, layer, attention)?),
                vec![FfnPart::plain(ffn)],
            )
        })
    };
    let ffns = decoder.dense(Activation::Silu)?.into_iter().zip(windows).enumerate();
    Ok(decoder.model(ffns.map(layer).collect::<Result<_, Error>>()?, decoder.logits()?))
}

/// Norms over all heads of q, and over all heads of k.
pub(super) fn with_whole_norms(
    decoder: &Decoder<'_>,
    layer: usize,
    attention: AttentionSpec,
) -> Result<AttentionSpec, Error> {
    let norm = |name, width| decoder.head_norm(layer, name, width).map(Some);
    let q_norm = norm("attn_q_norm", attention.heads * attention.head_dim)?;
    let kv = match attention.kv {
        KvSpec::Own(own) => {
            let k_norm = norm("attn_k_norm", attention.kv_heads * attention.head_dim)?;
            KvSpec::Own(OwnKvSpec { k_norm, ..own })
        }
        other @ (KvSpec::Shared { .. } | KvSpec::Latent(_)) => other,
    };
    Ok(AttentionSpec { q_norm, kv, ..attention })
}
