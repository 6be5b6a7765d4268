//! `qwen3next`, `qwen35` and `qwen35moe`: gated delta nets, gated attention at every few layers, and a dense
//! feed-forward or a mixture with a shared expert.

use super::decoder::{AttentionOptions, Decoder};
use super::shape::{Counting, limits};
use super::source::Source;
use crate::Error;
use crate::spec::{
    Activation, AttentionSpec, DeltaNetSpec, FfnPart, FfnSpec, HeadGrouping, KvSpec, LinearSpec, MixerSpec,
    ModelSpec, MtpHeadSpec, NormSpec, RopeSpec, RopeStyle, RowSlice,
};

/// Every `INTERVAL`th layer has attention, unless the file specifies it.
const INTERVAL: usize = 4;
/// Added to the squared length of q and k. The same for all of these models; not a key of the file.
const L2_EPS: f32 = 1e-6;
/// Key for the number of MTP blocks after the last layer.
const APPENDED_KEY: &str = "nextn_predict_layers";
/// Tensors of an MTP head in addition to an attention layer's.
const APPENDED: [&str; 6] = [
    "nextn.eh_proj.weight",
    "nextn.enorm.weight",
    "nextn.hnorm.weight",
    "nextn.shared_head_norm.weight",
    "nextn.embed_tokens.weight",
    "nextn.shared_head_head.weight",
];
/// Matrices and norms of an attention layer.
const ATTENTION_LAYER: [&str; 20] = [
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "attn_q_norm",
    "attn_k_norm",
    "post_attention_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
    "ffn_gate_inp",
    "ffn_gate_exps",
    "ffn_up_exps",
    "ffn_down_exps",
    "ffn_gate_up_exps",
    "ffn_gate_inp_shexp",
    "ffn_gate_shexp",
    "ffn_up_shexp",
    "ffn_down_shexp",
];

pub(super) fn translate_qwen3next(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = read(source)?;
    let ffns = mixtures(&decoder)?;
    model(&decoder, ffns, beta_and_alpha_in_one, HeadGrouping::Grouped)
}

pub(super) fn translate_qwen35(source: &Source<'_>) -> Result<ModelSpec, Error> {
    source.refuse_experts()?;
    let decoder = read(source)?;
    check_sections(source)?;
    let ffns = decoder.dense(Activation::Silu)?.into_iter();
    model(&decoder, ffns.map(|ffn| vec![FfnPart::plain(ffn)]).collect(), beta_and_alpha, HeadGrouping::Tiled)
}

pub(super) fn translate_qwen35moe(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let decoder = read(source)?;
    check_sections(source)?;
    let ffns = mixtures(&decoder)?;
    model(&decoder, ffns, beta_and_alpha, HeadGrouping::Tiled)
}

/// Whether `tensor` belongs to the MTP blocks after the last layer, which are not part of the model proper.
pub(super) fn is_mtp_head(source: &Source<'_>, tensor: &str) -> bool {
    let counts = || -> Result<(usize, usize), Error> {
        Ok((source.require_count("block_count", 1..=limits::LAYERS)?, mtp_blocks(source)?))
    };
    let Some((block, name)) = tensor.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
        return false;
    };
    let Ok(block) = block.parse::<usize>() else { return false };
    let after_the_last = counts()
        .is_ok_and(|(blocks, mtp_blocks)| block < blocks && block >= blocks.saturating_sub(mtp_blocks));
    let of_a_layer = || {
        let parts = ["weight", "bias", "scale", "order"];
        name.rsplit_once('.')
            .is_some_and(|(stem, part)| ATTENTION_LAYER.contains(&stem) && parts.contains(&part))
    };
    after_the_last && (APPENDED.contains(&name) || of_a_layer())
}

/// The MTP head of a model with dense feed-forwards.
pub(super) fn translate_mtp_head_dense(source: &Source<'_>) -> Result<Option<MtpHeadSpec>, Error> {
    translate_mtp_head(source, |decoder| {
        let ffns = decoder.dense(Activation::Silu)?.into_iter();
        Ok(ffns.map(|ffn| vec![FfnPart::plain(ffn)]).collect())
    })
}

/// The MTP head of a model with mixtures of experts.
pub(super) fn translate_mtp_head_mixture(source: &Source<'_>) -> Result<Option<MtpHeadSpec>, Error> {
    translate_mtp_head(source, mixtures)
}

/// The MTP head: an attention layer and the tensors that build its input. `ffns` are those of all layers.
fn translate_mtp_head(
    source: &Source<'_>,
    ffns: fn(&Decoder<'_>) -> Result<Vec<Vec<FfnPart>>, Error>,
) -> Result<Option<MtpHeadSpec>, Error> {
    match mtp_blocks(source)? {
        0 => return Ok(None),
        1 => {}
        several => return Err(source.refuse(APPENDED_KEY, several, "one MTP block")),
    }
    // The head is counted as a layer, so its tensors are read like a layer's.
    let decoder = Decoder::read(source)?;
    let (block, hidden, vocab) = (decoder.shape.layers - 1, decoder.shape.hidden, decoder.shape.vocab);
    let stem = |name: &str| decoder.stem(block, name);
    let has = |name: &str| source.has(&format!("{}.weight", stem(name)));
    let ffn = ffns(&decoder)?.pop().unwrap_or_default();
    let mixer = MixerSpec::Attention(attention(&decoder, block, decoder.rope(RopeStyle::Half)?)?);
    let norm =
        if has("nextn.shared_head_norm") { stem("nextn.shared_head_norm") } else { "output_norm".to_owned() };
    let embedding = match has("nextn.embed_tokens") {
        true => Some(source.linear(&stem("nextn.embed_tokens"), hidden, vocab)?.weight),
        false => None,
    };
    let head = match has("nextn.shared_head_head") {
        true => Some(source.linear(&stem("nextn.shared_head_head"), hidden, vocab)?),
        false => None,
    };
    Ok(Some(MtpHeadSpec {
        join: source.linear(&stem("nextn.eh_proj"), 2 * hidden, hidden)?,
        embedding_norm: decoder.norm(&stem("nextn.enorm"))?,
        hidden_norm: decoder.norm(&stem("nextn.hnorm"))?,
        layer: decoder.pre_norm_layer(block, mixer, "post_attention_norm", ffn)?,
        norm: decoder.norm(&norm)?,
        embedding,
        head,
    }))
}

fn mtp_blocks(source: &Source<'_>) -> Result<usize, Error> {
    Ok(source.count(APPENDED_KEY, 0..=limits::LAYERS - 1)?.unwrap_or(0))
}

fn read<'a>(source: &'a Source<'a>) -> Result<Decoder<'a>, Error> {
    Decoder::counting(source, Counting { mtp_blocks: mtp_blocks(source)?, ..Counting::default() })
}

/// Pairs of a head rotate by a token's time, height or width, in turns. In text all three positions are
/// equal, so the sections do not matter if every pair belongs to one.
fn check_sections(source: &Source<'_>) -> Result<(), Error> {
    let key = "rope.dimension_sections";
    let sections = source.counts(key, 0..=limits::HEAD_DIM)?;
    let covered = match sections[..] {
        [time, height, width, ..] => {
            (0..sections.iter().sum::<usize>()).all(|pair| pair < 3 * [time, height, width][pair % 3])
        }
        _ => false,
    };
    match covered {
        true => Ok(()),
        false => {
            Err(source.refuse(key, format_args!("{sections:?}"), "three interleaved parts of all pairs"))
        }
    }
}

/// The mixture of experts and the shared expert of every layer.
fn mixtures(decoder: &Decoder<'_>) -> Result<Vec<Vec<FfnPart>>, Error> {
    let (widths, shared) = (decoder.expert_widths()?, decoder.shared_expert_widths()?);
    decoder.mixtures_or_dense(|layer| {
        let moe = FfnSpec::Moe(decoder.moe_layer(layer, widths[layer])?);
        Ok(vec![FfnPart::plain(moe), FfnPart::plain(decoder.shared_expert(layer, shared[layer])?)])
    })
}

type BetaAndAlpha = fn(&Decoder<'_>, usize, &Heads) -> Result<(LinearSpec, LinearSpec), Error>;

fn model(
    decoder: &Decoder<'_>,
    ffns: Vec<Vec<FfnPart>>,
    beta_and_alpha: BetaAndAlpha,
    grouping: HeadGrouping,
) -> Result<ModelSpec, Error> {
    let heads = Heads::read(decoder.source)?;
    // A key of Kvasir's, for checkpoints whose value heads are not reordered.
    let grouping = match decoder.source.metadata().get(&decoder.source.key("ssm.tiled_heads"))? {
        Some(true) => HeadGrouping::Tiled,
        Some(false) => HeadGrouping::Grouped,
        None => grouping,
    };
    let rope = decoder.rope(RopeStyle::Half)?;
    let layer = |(layer, (recurrent, ffn))| {
        let mixer = if recurrent {
            let (beta, alpha) = beta_and_alpha(decoder, layer, &heads)?;
            MixerSpec::DeltaNet(delta_net(decoder, layer, &heads, grouping, beta, alpha)?)
        } else {
            MixerSpec::Attention(attention(decoder, layer, rope.clone())?)
        };
        decoder.pre_norm_layer(layer, mixer, "post_attention_norm", ffn)
    };
    let layers = recurrent(decoder)?.into_iter().zip(ffns).enumerate().map(layer);
    let layers = layers.collect::<Result<_, Error>>()?;
    Ok(decoder.model(layers, decoder.logits()?))
}

/// For each layer, whether it is a delta net.
fn recurrent(decoder: &Decoder<'_>) -> Result<Vec<bool>, Error> {
    let (source, shape) = (decoder.source, &decoder.shape);
    if let Some(mut flags) =
        source.layer_flags("attention.recurrent_layers", &[shape.blocks, shape.layers])?
    {
        flags.truncate(shape.layers);
        return Ok(flags);
    }
    let interval = source.count("full_attention_interval", 1..=usize::MAX)?.unwrap_or(INTERVAL);
    Ok((1..=shape.layers).map(|nth| !nth.is_multiple_of(interval)).collect())
}

/// Attention whose query projection returns, for each head, a query and a gate of the head's output.
fn attention(decoder: &Decoder<'_>, layer: usize, rope: RopeSpec) -> Result<AttentionSpec, Error> {
    let (source, dims, heads) = (decoder.source, decoder.shape.dims, decoder.heads(layer).0);
    if dims.v != dims.k {
        return Err(source.refuse("attention.value_length", dims.v, dims.k));
    }
    let half = |start| {
        let slice = RowSlice { of: heads * 2 * dims.k, period: 2 * dims.k, start, len: dims.k };
        source.linear_slice(&decoder.stem(layer, "attn_q"), decoder.shape.hidden, slice)
    };
    let kv = KvSpec::Own(decoder.own_kv(layer, true)?);
    let options = AttentionOptions { rope: Some(rope), qk_norm: true, ..Default::default() };
    Ok(AttentionSpec {
        gate: Some(half(dims.k)?),
        ..decoder.attention_of(layer, dims, half(0)?, kv, options)?
    })
}

/// Heads of the delta nets.
struct Heads {
    taps: usize,
    k_heads: usize,
    v_heads: usize,
    k_dim: usize,
    v_dim: usize,
}

impl Heads {
    fn read(source: &Source<'_>) -> Result<Self, Error> {
        let (k_key, v_key, inner_key) = ("ssm.group_count", "ssm.time_step_rank", "ssm.inner_size");
        let taps = source.require_count("ssm.conv_kernel", 1..=limits::CONV_TAPS)?;
        let k_heads = source.require_count(k_key, 1..=limits::HEADS)?;
        let v_heads = source.require_count(v_key, 1..=limits::HEADS)?;
        if !v_heads.is_multiple_of(k_heads) {
            return Err(source.refuse(v_key, v_heads, format_args!("a multiple of {k_heads}")));
        }
        let k_dim = source.require_count("ssm.state_size", 1..=limits::HEAD_DIM)?;
        let inner = source.require_count(inner_key, 1..=limits::WIDTH)?;
        if !inner.is_multiple_of(v_heads) {
            return Err(source.refuse(inner_key, inner, format_args!("a multiple of {v_heads}")));
        }
        Ok(Self { taps, k_heads, v_heads, k_dim, v_dim: inner / v_heads })
    }

    /// Total width of all heads of v.
    fn inner(&self) -> usize {
        self.v_heads * self.v_dim
    }
}

fn beta_and_alpha(
    decoder: &Decoder<'_>,
    layer: usize,
    heads: &Heads,
) -> Result<(LinearSpec, LinearSpec), Error> {
    let linear = |name| decoder.linear(layer, name, decoder.shape.hidden, heads.v_heads);
    Ok((linear("ssm_beta")?, linear("ssm_alpha")?))
}

/// One matrix for both: for each key head the betas of its value heads, then their alphas.
fn beta_and_alpha_in_one(
    decoder: &Decoder<'_>,
    layer: usize,
    heads: &Heads,
) -> Result<(LinearSpec, LinearSpec), Error> {
    let each = heads.v_heads / heads.k_heads;
    let rows = |start| {
        let slice = RowSlice { of: 2 * heads.v_heads, period: 2 * each, start, len: each };
        decoder.source.linear_slice(&decoder.stem(layer, "ssm_ba"), decoder.shape.hidden, slice)
    };
    Ok((rows(0)?, rows(each)?))
}

fn delta_net(
    decoder: &Decoder<'_>,
    layer: usize,
    heads: &Heads,
    grouping: HeadGrouping,
    beta: LinearSpec,
    alpha: LinearSpec,
) -> Result<DeltaNetSpec, Error> {
    let (source, hidden) = (decoder.source, decoder.shape.hidden);
    let channels = 2 * heads.k_heads * heads.k_dim + heads.inner();
    let per_head = |name| source.floats(&decoder.stem(layer, name), &[heads.v_heads]);
    let norm: NormSpec = decoder.head_norm(layer, "ssm_norm", heads.v_dim)?;
    Ok(DeltaNetSpec {
        k_heads: heads.k_heads,
        v_heads: heads.v_heads,
        k_dim: heads.k_dim,
        v_dim: heads.v_dim,
        grouping,
        qkv: decoder.linear(layer, "attn_qkv", hidden, channels)?,
        conv: source.conv(&decoder.stem(layer, "ssm_conv1d"), heads.taps, channels)?,
        gate: decoder.linear(layer, "attn_gate", hidden, heads.inner())?,
        beta,
        alpha,
        a: per_head("ssm_a")?,
        dt_bias: per_head("ssm_dt.bias")?,
        l2_eps: L2_EPS,
        norm,
        out: decoder.linear(layer, "ssm_out", heads.inner(), hidden)?,
    })
}
