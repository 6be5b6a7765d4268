//! `gemma4`: gemma3 with another head width on full layers, shared keys and values in later layers, per-layer
//! embeddings, and in the larger models a mixture of experts beside the dense feed-forward.

use super::decoder::{AttentionOptions, Decoder};
use super::shape::{HeadDims, limits};
use super::source::Source;
use super::windows::windows;
use crate::Error;
use crate::spec::{
    Activation, AssistantSpec, AttentionSpec, FfnPart, FfnSpec, KvSpec, LayerSpec, LinearSpec, LogitsSpec,
    MixerSpec, ModelSpec, MoeSpec, NormKind, NormSpec, OwnKvSpec, PerLayerInputSpec, PerLayerSpec,
    RopeFactors, RopeSpec, RopeStyle,
};
use metadata::KeyError;

/// A drafter that reads its target's keys and values: all of its layers share them.
pub(super) fn translate_assistant(source: &Source<'_>) -> Result<AssistantSpec, Error> {
    let gemma = Gemma4::read(source, true)?;
    let decoder = &gemma.decoder;
    let (hidden, layers) = (decoder.shape.hidden, decoder.shape.layers);
    let backbone = source.require_count("embedding_length_out", 1..=limits::WIDTH)?;
    let mut specs: Vec<LayerSpec> = Vec::with_capacity(layers);
    for (layer, dense) in decoder.dense(Activation::GeluTanh)?.into_iter().enumerate() {
        // The target determines which layer's keys and values are used.
        let mixer = MixerSpec::Attention(gemma.attention_over(layer, KvSpec::Shared { layer })?);
        specs.push(gemma.layer(layer, mixer, vec![FfnPart::plain(dense)])?);
    }
    Ok(AssistantSpec {
        trunk: decoder.model(specs, decoder.logits()?),
        before: source.linear("nextn.pre_projection", 2 * backbone, hidden)?,
        behind: source.linear("nextn.post_projection", hidden, backbone)?,
        backbone,
    })
}

/// Tensors of an assistant that select candidates by vocabulary clusters. Unused: drafting scores the whole
/// vocabulary.
pub(super) fn names_candidates(_: &Source<'_>, tensor: &str) -> bool {
    tensor.starts_with("masked_embd_")
}

pub(super) fn translate(source: &Source<'_>) -> Result<ModelSpec, Error> {
    let gemma = Gemma4::read(source, false)?;
    let decoder = &gemma.decoder;
    let (hidden, layers) = (decoder.shape.hidden, decoder.shape.layers);
    let dense = decoder.dense(Activation::GeluTanh)?;
    let mixtures = match source.count("expert_count", 0..=limits::EXPERTS)? {
        None | Some(0) => None,
        Some(_) => Some(gemma.mixtures()?),
    };
    let mut mixtures = mixtures.into_iter().flatten();
    let mut specs: Vec<LayerSpec> = Vec::with_capacity(layers);
    for (layer, dense) in dense.into_iter().enumerate() {
        let mixer = MixerSpec::Attention(gemma.attention(layer, &specs)?);
        let parts = match mixtures.next() {
            None => vec![FfnPart::plain(dense)],
            Some(moe) => gemma.parts(layer, dense, moe)?,
        };
        specs.push(gemma.layer(layer, mixer, parts)?);
    }
    let softcap = source.positive_unless_zero("final_logit_softcapping")?;
    let mut model = decoder.model(specs, LogitsSpec { softcap, ..decoder.logits()? });
    model.embedding.scale = (hidden as f32).sqrt();
    model.per_layer_input = gemma.per_layer_input()?;
    Ok(model)
}

/// Whether `tensor` is of the keys or values of a layer that uses another layer's. Released checkpoints have them.
pub(super) fn is_replaced(source: &Source<'_>, tensor: &str) -> bool {
    let count = |key| source.count(key, 0..=limits::LAYERS).ok().flatten().unwrap_or(0);
    let blocks = count("block_count");
    let own = blocks.saturating_sub(count("attention.shared_kv_layers"));
    let Some((block, name)) = tensor.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
        return false;
    };
    let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
    block.parse().is_ok_and(|block: usize| (own..blocks).contains(&block))
        && ["attn_k", "attn_v", "attn_k_norm"].contains(&stem)
}

struct Gemma4<'a> {
    decoder: Decoder<'a>,
    windows: Vec<Option<usize>>,
    full: Heads,
    sliding: Heads,
    /// Number of layers with their own keys and values; the other layers use one of these layers' KV.
    own_kv: usize,
    /// Width of a layer's embedding; 0 if there are none.
    per_layer_width: usize,
}

/// Heads of one kind of layer.
struct Heads {
    dims: HeadDims,
    rope: RopeSpec,
}

impl<'a> Gemma4<'a> {
    fn read(source: &'a Source<'a>, assists: bool) -> Result<Self, Error> {
        let decoder = Decoder::read(source)?;
        let layers = decoder.shape.layers;
        source.require_count("attention.sliding_window", 1..=limits::CONTEXT)?;
        let pattern = "attention.sliding_window_pattern";
        if source.metadata().value(&source.key(pattern)).is_none() {
            return Err(KeyError::Missing { key: source.key(pattern) }.into());
        }
        // The period comes from the file.
        let windows = windows(source, layers, layers)?;
        let plain = decoder.plain_rope(RopeStyle::Half)?;
        let base = source.positive("rope.freq_base_swa")?.unwrap_or(10_000.0);
        let sliding = HeadDims::read(source, "_swa", || Ok(decoder.shape.dims.k))?;
        let full = decoder.shape.dims;
        // Most frequencies of a full layer do not rotate; the tensor specifies them.
        let factors = match windows.contains(&None) {
            true => Some(source.floats("rope_freqs.weight", &[full.n_rot / 2])?),
            false => None,
        };
        let rope = RopeSpec { factors: factors.map(RopeFactors::Tensor), ..plain.clone() };
        let shared = match assists {
            true => source.require_count("attention.shared_kv_layers", layers..=layers)?,
            false => source.count("attention.shared_kv_layers", 0..=layers - 1)?.unwrap_or(0),
        };
        let per_layer = source.count("embedding_length_per_layer_input", 0..=limits::HEAD_DIM)?;
        Ok(Self {
            windows,
            full: Heads { dims: full, rope },
            sliding: Heads { dims: sliding, rope: RopeSpec { base, n_rot: sliding.n_rot, ..plain } },
            own_kv: layers - shared,
            per_layer_width: per_layer.unwrap_or(0),
            decoder,
        })
    }

    fn layer(&self, layer: usize, mixer: MixerSpec, ffn: Vec<FfnPart>) -> Result<LayerSpec, Error> {
        let decoder = &self.decoder;
        let output_scale = decoder.source.floats(&decoder.stem(layer, "layer_output_scale.weight"), &[1])?;
        Ok(LayerSpec {
            mixer_post_norm: decoder.layer_norm(layer, "post_attention_norm")?,
            ffn_post_norm: decoder.layer_norm(layer, "post_ffw_norm")?,
            per_layer: self.per_layer(layer)?,
            output_scale: Some(output_scale),
            ..decoder.pre_norm_layer(layer, mixer, "ffn_norm", ffn)?
        })
    }

    fn heads(&self, layer: usize) -> &Heads {
        if self.windows[layer].is_some() { &self.sliding } else { &self.full }
    }

    fn attention(&self, layer: usize, before: &[LayerSpec]) -> Result<AttentionSpec, Error> {
        let dims = self.heads(layer).dims;
        let kv = if layer < self.own_kv {
            KvSpec::Own(self.own_kv(layer, dims, self.windows[layer].is_none())?)
        } else {
            KvSpec::Shared { layer: self.producer(layer, dims, before)? }
        };
        self.attention_over(layer, kv)
    }

    /// Attention with the given keys and values.
    fn attention_over(&self, layer: usize, kv: KvSpec) -> Result<AttentionSpec, Error> {
        let (decoder, window) = (&self.decoder, self.windows[layer]);
        let Heads { dims, rope } = self.heads(layer);
        let q = decoder.linear(layer, "attn_q", decoder.shape.hidden, decoder.heads(layer).0 * dims.k)?;
        // The norms give q and k unit size.
        let options = AttentionOptions { window, rope: Some(rope.clone()), scale: Some(1.0), qk_norm: true };
        decoder.attention_of(layer, *dims, q, kv, options)
    }

    /// A layer's own keys and values. Full layers of the larger models use one projection for both.
    fn own_kv(&self, layer: usize, dims: HeadDims, full: bool) -> Result<OwnKvSpec, Error> {
        let decoder = &self.decoder;
        let (hidden, kv_heads) = (decoder.shape.hidden, decoder.heads(layer).1);
        let has_v = decoder.source.has(&decoder.stem(layer, "attn_v.weight"));
        let v = match full && !has_v && dims.k == dims.v {
            true => None,
            false => Some(decoder.linear(layer, "attn_v", hidden, kv_heads * dims.v)?),
        };
        Ok(OwnKvSpec {
            k: decoder.linear(layer, "attn_k", hidden, kv_heads * dims.k)?,
            v,
            k_norm: Some(decoder.head_norm(layer, "attn_k_norm", dims.k)?),
            v_norm: Some(NormSpec {
                kind: NormKind::Rms,
                weight: None,
                bias: None,
                eps: decoder.eps,
                width: dims.v,
            }),
        })
    }

    /// The layer whose keys and values `layer` uses: the last one of its kind with its own KV.
    fn producer(&self, layer: usize, dims: HeadDims, before: &[LayerSpec]) -> Result<usize, Error> {
        let decoder = &self.decoder;
        let (window, kv_heads) = (self.windows[layer], decoder.heads(layer).1);
        let same_kind = |&at: &usize| self.windows.get(at) == Some(&window);
        let producer = (0..self.own_kv).rev().find(same_kind);
        let fits = |at: usize| match before.get(at).map(|layer| &layer.mixer) {
            Some(MixerSpec::Attention(own)) => {
                (own.kv_heads, own.head_dim, own.v_head_dim) == (kv_heads, dims.k, dims.v)
            }
            _ => false,
        };
        producer.filter(|&at| fits(at)).ok_or_else(|| {
            let needs = format!("fewer, as layer {layer} finds no layer of its kind and shape before them");
            decoder.source.refuse("attention.shared_kv_layers", decoder.shape.layers - self.own_kv, needs)
        })
    }

    /// The experts of every layer. The router reads the residual; the weight of its norm replaces a scale.
    fn mixtures(&self) -> Result<Vec<MoeSpec>, Error> {
        let decoder = &self.decoder;
        let hidden = decoder.shape.hidden;
        let router = |layer, experts| {
            let matrix = decoder.source.matrix(&decoder.stem(layer, "ffn_gate_inp"), hidden, experts)?;
            Ok(LinearSpec { factor: (hidden as f32).sqrt().recip(), ..matrix })
        };
        let moes = decoder.moe_routed(&decoder.expert_widths()?, Activation::GeluTanh, router)?;
        let with_norm = |(layer, moe): (usize, MoeSpec)| {
            let weight = decoder.source.floats(&decoder.stem(layer, "ffn_gate_inp.scale"), &[hidden])?;
            let norm = NormSpec {
                kind: NormKind::Rms,
                weight: Some(weight),
                bias: None,
                eps: decoder.eps,
                width: hidden,
            };
            Ok(MoeSpec { router_norm: Some(norm), ..moe })
        };
        moes.into_iter().enumerate().map(with_norm).collect()
    }

    /// The dense feed-forward and the experts in parallel.
    fn parts(&self, layer: usize, dense: FfnSpec, moe: MoeSpec) -> Result<Vec<FfnPart>, Error> {
        let norm = |name| self.decoder.layer_norm(layer, name);
        let dense = FfnPart { post_norm: norm("post_ffw_norm_1")?, ..FfnPart::plain(dense) };
        let moe = FfnPart {
            own_norm: norm("pre_ffw_norm_2")?,
            ffn: FfnSpec::Moe(moe),
            post_norm: norm("post_ffw_norm_2")?,
        };
        Ok(vec![dense, moe])
    }

    fn per_layer(&self, layer: usize) -> Result<Option<PerLayerSpec>, Error> {
        let (decoder, width) = (&self.decoder, self.per_layer_width);
        if width == 0 {
            return Ok(None);
        }
        Ok(Some(PerLayerSpec {
            gate: decoder.linear(layer, "inp_gate", decoder.shape.hidden, width)?,
            projection: decoder.linear(layer, "proj", width, decoder.shape.hidden)?,
            norm: decoder.norm(&decoder.stem(layer, "post_norm"))?,
        }))
    }

    fn per_layer_input(&self) -> Result<Option<PerLayerInputSpec>, Error> {
        let (decoder, width) = (&self.decoder, self.per_layer_width);
        if width == 0 {
            return Ok(None);
        }
        let (source, hidden) = (decoder.source, decoder.shape.hidden);
        let all = width * decoder.shape.layers;
        let projection = source.linear("per_layer_model_proj", hidden, all)?;
        Ok(Some(PerLayerInputSpec {
            table: source.tensor("per_layer_token_embd.weight", &[all, decoder.shape.vocab])?,
            table_scale: (width as f32).sqrt(),
            width,
            projection: LinearSpec { factor: (hidden as f32).sqrt().recip(), ..projection },
            norm: source.rms_norm("per_layer_proj_norm", width, decoder.eps)?,
        }))
    }
}
