//! `deepseek2`: latent attention (DeepSeek V2 and V3, GLM-4.7-Flash), dense layers before mixtures with a shared
//! expert, and an MTP head that is not used.

use super::decoder::{AttentionOptions, Decoder};
use super::glm4_moe::MTP_KEY;
use super::shape::{Counting, HeadDims, limits};
use super::source::Source;
use crate::Error;
use crate::spec::{
    AttentionSpec, KvSpec, LatentSpec, LinearSpec, MixerSpec, ModelSpec, RopeSpec, RopeStyle, RowSlice,
};

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let mtp_blocks = source.count(MTP_KEY, 0..=limits::LAYERS - 1)?.unwrap_or(0);
    let decoder = Decoder::counting(source, Counting { mtp_blocks, ..Counting::default() })?;
    let dims = LatentDims::read(&decoder)?;
    let (rope, scale) = rope_and_scale(&decoder, dims.plain)?;
    let layer = |(layer, ffn)| {
        let options = AttentionOptions { rope: Some(rope.clone()), scale: Some(scale), ..Default::default() };
        let mixer = MixerSpec::Attention(dims.attention(&decoder, layer, options)?);
        decoder.pre_norm_layer(layer, mixer, "ffn_norm", ffn)
    };
    let ffns = decoder.dense_then_mixtures(false, false)?;
    let layers = ffns.into_iter().enumerate().map(layer).collect::<Result<_, _>>()?;
    Ok(decoder.model(layers, decoder.logits()?))
}

/// Widths of latent attention.
struct LatentDims {
    /// Width of the compressed input of the queries; `None` if they are not compressed.
    q_latent: Option<usize>,
    latent: usize,
    rotating: usize,
    /// The part of a query head without rope.
    plain: usize,
    /// A head's value after its up projection.
    value: usize,
    /// Epsilon of the compressions' norms.
    eps: f32,
}

impl LatentDims {
    fn read(decoder: &Decoder<'_>) -> Result<Self, Error> {
        let (source, HeadDims { k, v, n_rot }) = (decoder.source, decoder.shape.dims);
        let latent = source.require_count("attention.kv_lora_rank", 1..=limits::HEAD_DIM)?;
        for (key, found, expected) in
            [("attention.key_length", k, latent + n_rot), ("attention.value_length", v, latent)]
        {
            if found != expected {
                return Err(source.refuse(key, found, format_args!("{expected}, for latent attention")));
            }
        }
        if let Some(&kv_heads) = decoder.shape.kv_heads.iter().find(|&&heads| heads != 1) {
            return Err(source.refuse("attention.head_count_kv", kv_heads, "1, for latent attention"));
        }
        let whole = source.require_count("attention.key_length_mla", n_rot + 1..=limits::HEAD_DIM)?;
        Ok(Self {
            q_latent: source.count("attention.q_lora_rank", 0..=limits::WIDTH)?.filter(|&rank| rank > 0),
            latent,
            rotating: n_rot,
            plain: whole - n_rot,
            value: source.require_count("attention.value_length_mla", 1..=limits::HEAD_DIM)?,
            // A key of Kvasir's.
            eps: source.positive("attention.latent_norm_epsilon")?.unwrap_or(decoder.eps),
        })
    }

    fn attention(
        &self,
        decoder: &Decoder<'_>,
        layer: usize,
        options: AttentionOptions,
    ) -> Result<AttentionSpec, Error> {
        let Self { q_latent, latent, rotating, plain, value, .. } = *self;
        let (source, hidden, heads) = (decoder.source, decoder.shape.hidden, decoder.heads(layer).0);
        let stem = |name| decoder.stem(layer, name);
        let (q_name, q_cols) = q_latent.map_or(("attn_q", hidden), |rank| ("attn_q_b", rank));
        let q_rows = |start, len| {
            let period = plain + rotating;
            let slice = RowSlice { of: heads * period, period, start, len };
            source.linear_slice(&stem(q_name), q_cols, slice)
        };
        let kv_rows = |start, len| {
            let of = latent + rotating;
            let slice = RowSlice { of, period: of, start, len };
            source.linear_slice(&stem("attn_kv_a_mqa"), hidden, slice)
        };
        let heads_linear = |name, cols, rows| -> Result<LinearSpec, Error> {
            let tensor = source.tensor(&format!("{}.weight", stem(name)), &[cols, rows, heads])?;
            let scale = source.optional_floats(&format!("{}.scale", stem(name)), &[1])?;
            Ok(LinearSpec { scale, ..LinearSpec::new(tensor, cols, rows) })
        };
        let q_down = match q_latent {
            None => None,
            Some(rank) => Some((
                decoder.linear(layer, "attn_q_a", hidden, rank)?,
                source.rms_norm(&stem("attn_q_a_norm"), rank, self.eps)?,
            )),
        };
        let kv = KvSpec::Latent(Box::new(LatentSpec {
            q_down,
            q_rope: q_rows(plain, rotating)?,
            k_rope: kv_rows(latent, rotating)?,
            latent: kv_rows(0, latent)?,
            latent_norm: source.rms_norm(&stem("attn_kv_a_norm"), latent, self.eps)?,
            k_up: heads_linear("attn_k_b", plain, latent)?,
            v_up: heads_linear("attn_v_b", latent, value)?,
        }));
        let dims = decoder.shape.dims;
        // The output projection reads the values after their up projection.
        let of_values = HeadDims { v: value, ..dims };
        let attention = decoder.attention_of(layer, of_values, q_rows(0, plain)?, kv, options)?;
        Ok(AttentionSpec { v_head_dim: dims.v, ..attention })
    }
}

/// The rotary embedding, and the factor of scores of heads with `plain` elements that do not rotate.
fn rope_and_scale(decoder: &Decoder<'_>, plain: usize) -> Result<(RopeSpec, f32), Error> {
    let source = decoder.source;
    let rope = decoder.rope(RopeStyle::Interleaved)?;
    let scale = ((plain + rope.n_rot) as f32).sqrt().recip();
    let Some("yarn") = source.metadata().get::<&str>(&source.key("rope.scaling.type"))? else {
        return Ok((rope, scale));
    };
    // What YaRN does to cosines and sines, files without the key have in the scale of scores.
    let magnitude = match source.positive("rope.scaling.attn_factor")? {
        Some(_) => rope.magnitude,
        None => 1.0,
    };
    let stretch = source.require_positive("rope.scaling.factor")?.max(1.0).ln();
    let log = source.positive_unless_zero("rope.scaling.yarn_log_multiplier")?.unwrap_or(0.0);
    Ok((RopeSpec { magnitude, ..rope }, scale * (1.0 + log * stretch).powi(2)))
}
