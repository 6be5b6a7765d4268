//! Layout of a layer range's caches and activations.

use super::DecoderConfig;
use crate::Error;
use crate::kv_cache::{GroupKind, GroupSpec};
use crate::weights::Weights;
use kernels::backend::{
    Backend, BufferId, HeadType, KvLayerId, KvShape, StateKind, StateLayerId, StateShape,
};
use model::spec::{AttentionSpec, FfnSpec, KvSpec, LayerSpec, MixerSpec, ModelSpec, OutputSpec};

/// Layers whose cache blocks are allocated and freed together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheGroup {
    pub kind: CacheKind,
    /// Bytes of one block, or of one sequence's state, summed over the group's layers in this range. A
    /// multiple of 64; 0 if the range has none of its layers.
    pub block_bytes: usize,
    /// Layers of the group that have their own cache.
    pub layers: usize,
}

impl CacheGroup {
    /// The specification of the group's caches, for the scheduler.
    pub fn spec(&self) -> GroupSpec {
        GroupSpec {
            kind: match self.kind {
                CacheKind::Full => GroupKind::Full,
                CacheKind::Sliding(window) => {
                    GroupKind::Sliding { window: u32::try_from(window).unwrap_or(u32::MAX) }
                }
                CacheKind::State => GroupKind::State,
            },
            block_bytes: self.block_bytes as u64,
        }
    }
}

/// Kind of a [`CacheGroup`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheKind {
    /// Keys and values of every position.
    Full,
    /// Keys and values of the last positions only; the value is the window in tokens.
    Sliding(usize),
    /// A recurrent state of constant size.
    State,
}

/// One layer's caches on the device.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LayerCache {
    /// Keys and values of its attention.
    pub(super) kv: Option<KvLayerId>,
    /// The state of its recurrent mixer.
    pub(super) state: Option<StateLayerId>,
}

/// Layout of the caches of a layer range.
#[derive(Debug)]
pub(super) struct PlacedCaches {
    pub(super) groups: Vec<CacheGroup>,
    pub(super) caches: Vec<LayerCache>,
    /// Group of each layer's keys and values, and the byte offset of the layer in its blocks.
    pub(super) kv_locations: Vec<Option<(usize, usize)>>,
    /// Number of heads with a narrow state.
    pub(super) narrow_heads: usize,
}

/// Groups layers by how long their cache entries are needed, and places each layer inside its group's block.
/// Full attention comes first, because its prefix hit bounds that of every other group. States come last.
pub(super) fn place_caches(
    spec: &ModelSpec,
    weights: &Weights,
    config: &DecoderConfig,
    backend: &mut dyn Backend,
) -> Result<PlacedCaches, Error> {
    // Based on the whole model and not on this range, so that all stages of a replica number groups alike.
    let attention = (0..spec.layers.len()).filter_map(|index| spec.attention(index));
    let mut windows: Vec<Option<usize>> = attention.map(|attention| attention.window).collect();
    windows.sort_unstable();
    windows.dedup();
    let kind = |window: &Option<usize>| window.map_or(CacheKind::Full, CacheKind::Sliding);
    let mut groups: Vec<CacheGroup> =
        windows.iter().map(|window| CacheGroup { kind: kind(window), block_bytes: 0, layers: 0 }).collect();
    let mut state = CacheGroup { kind: CacheKind::State, block_bytes: 0, layers: 0 };
    let mut caches = vec![LayerCache::default(); config.layers.len()];
    let mut narrow_heads = 0;
    let mut kv_locations = vec![None; config.layers.len()];
    let layers = spec.layers[config.layers.clone()].iter().zip(&weights.layers).enumerate();
    let mixers = layers.flat_map(|(index, (layer, own))| {
        layer.mixers().zip(own.mixers()).map(move |(mixer, own)| (index, mixer, own))
    });
    for (index, mixer, own) in mixers {
        let shape = match mixer {
            MixerSpec::Attention(attention) => {
                let kv = kv_shape(attention, config);
                let (group, offset) = match attention.kv {
                    KvSpec::Own(_) | KvSpec::Latent(_) => {
                        let own = windows.iter().position(|window| *window == attention.window).unwrap_or(0);
                        let group = &mut groups[own];
                        let offset = group.block_bytes;
                        group.block_bytes += backend.kv_block_bytes(kv)?;
                        group.layers += 1;
                        (own, offset)
                    }
                    KvSpec::Shared { layer } => {
                        let source =
                            layer.checked_sub(config.layers.start).and_then(|at| kv_locations.get(at));
                        source.copied().flatten().ok_or_else(|| {
                            let (start, end) = (config.layers.start, config.layers.end);
                            Error::Invariant(format!("layers {start} to {end} read the KV of layer {layer}"))
                        })?
                    }
                };
                kv_locations[index] = Some((group, offset));
                caches[index].kv = Some(backend.create_kv_layer(group, kv, offset)?);
                continue;
            }
            MixerSpec::DeltaNet(delta) => StateShape {
                kind: StateKind::DeltaNet,
                channels: delta.conv.channels,
                taps: delta.conv.taps,
                heads: delta.v_heads,
                rows: delta.k_dim,
                cols: delta.v_dim,
            },
            MixerSpec::Mamba2(mamba) => StateShape {
                kind: StateKind::Mamba2,
                channels: mamba.conv.channels,
                taps: mamba.conv.taps,
                heads: mamba.heads,
                rows: mamba.head_dim,
                cols: mamba.state,
            },
            MixerSpec::ShortConv(short) => StateShape::of_conv(short.conv.channels, short.conv.taps),
        };
        let heads = config.state_type.heads(own.memory());
        narrow_heads += heads.iter().filter(|head| **head != HeadType::F32).count();
        caches[index].state = Some(backend.create_state_layer(shape, &heads, state.block_bytes)?);
        state.block_bytes += backend.state_bytes(shape, &heads)?;
        state.layers += 1;
    }
    groups.extend(spec.is_recurrent().then_some(state));
    Ok(PlacedCaches { groups, caches, kv_locations, narrow_heads })
}

pub(super) fn kv_shape(attention: &AttentionSpec, config: &DecoderConfig) -> KvShape {
    KvShape {
        heads: attention.heads,
        kv_heads: attention.kv_heads,
        head_dim: attention.head_dim,
        v_head_dim: attention.v_head_dim,
        latent: attention.latent().is_some(),
        block_tokens: config.block_tokens,
        kv_type: config.kv_type,
        window: attention.window,
        causal: attention.causal,
    }
}

/// Activation buffers. All layers share them, so each is as wide as the widest layer needs.
#[derive(Debug, Clone)]
pub(super) struct Buffers {
    pub(super) x: BufferId,
    pub(super) normed: BufferId,
    pub(super) q: BufferId,
    pub(super) k: BufferId,
    /// Values, or latent vectors.
    pub(super) v: BufferId,
    /// Latent attention: compressed inputs of the queries, the parts of queries and keys before they are put together,
    /// and the weighted latents.
    pub(super) q_down: BufferId,
    pub(super) q_plain: BufferId,
    pub(super) q_rope: BufferId,
    pub(super) k_rope: BufferId,
    pub(super) mixed_latent: BufferId,
    /// Inputs of a recurrent layer's convolution.
    pub(super) conv: BufferId,
    pub(super) beta: BufferId,
    pub(super) dt: BufferId,
    /// Gate of the mixer's output.
    pub(super) mixer_gate: BufferId,
    /// The mixer's output before its output projection.
    pub(super) mixed: BufferId,
    pub(super) gate: BufferId,
    pub(super) up: BufferId,
    pub(super) row_gate: BufferId,
    pub(super) router: BufferId,
    /// Normed inputs of single FFN parts and of a router.
    pub(super) own_normed: BufferId,
    pub(super) router_normed: BufferId,
    /// Output of one FFN part that is normed before it is summed.
    pub(super) part: BufferId,
    /// Output of a mixer or FFN that is normed or scaled before it is added.
    pub(super) branch: BufferId,
    /// The per-layer embeddings of all layers, and the slice that a layer gates.
    pub(super) per_layer: BufferId,
    pub(super) slice: BufferId,
    pub(super) picked: BufferId,
    pub(super) picked_normed: BufferId,
    pub(super) logits: BufferId,
}

/// Widths of the buffers that only some models need; 0 if unused.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Widths {
    pub(crate) q: usize,
    pub(crate) k: usize,
    pub(crate) v: usize,
    pub(crate) q_down: usize,
    pub(crate) q_plain: usize,
    pub(crate) q_rope: usize,
    pub(crate) k_rope: usize,
    pub(crate) mixed_latent: usize,
    pub(crate) conv: usize,
    pub(crate) heads: usize,
    pub(crate) mixer_gate: usize,
    pub(crate) mixed: usize,
    pub(crate) ff: usize,
    pub(crate) router: usize,
    pub(crate) own_normed: usize,
    pub(crate) router_normed: usize,
    pub(crate) part: usize,
    pub(crate) per_layer: usize,
    pub(crate) slice: usize,
}

impl Widths {
    pub fn of(spec: &ModelSpec, layers: &[LayerSpec]) -> Self {
        let mut widths = Self::of_layers(spec.hidden, layers);
        if let Some(input) = &spec.per_layer_input {
            widths.per_layer = input.projection.rows;
            widths.slice = input.width;
        }
        widths
    }

    /// Widths that the layers need.
    pub(crate) fn of_layers(hidden: usize, layers: &[LayerSpec]) -> Self {
        let mut widths = Self::default();
        for layer in layers {
            layer.mixers().for_each(|mixer| widths.mixer(mixer));
            for part in &layer.ffn {
                let normed = |norm: bool| if norm { hidden } else { 0 };
                widths.own_normed = widths.own_normed.max(normed(part.own_norm.is_some()));
                widths.part = widths.part.max(normed(part.post_norm.is_some()));
                match &part.ffn {
                    FfnSpec::Gated { gate, .. } => widths.ff = widths.ff.max(gate.rows),
                    FfnSpec::Plain { up, .. } => widths.ff = widths.ff.max(up.rows),
                    FfnSpec::Moe(moe) => {
                        widths.router = widths.router.max(moe.experts);
                        widths.router_normed = widths.router_normed.max(normed(moe.router_norm.is_some()));
                    }
                }
            }
        }
        widths
    }

    fn mixer(&mut self, mixer: &MixerSpec) {
        let raise = |width: &mut usize, to: usize| *width = to.max(*width);
        match mixer {
            MixerSpec::Attention(attention) => {
                raise(&mut self.q, attention.heads * attention.head_dim);
                raise(&mut self.k, attention.k_width());
                raise(&mut self.v, attention.v_width());
                raise(&mut self.mixed, attention.o.cols);
                raise(&mut self.mixer_gate, attention.gate.as_ref().map_or(0, |gate| gate.rows));
                if let Some(latent) = attention.latent() {
                    raise(&mut self.q_down, latent.q_down.as_ref().map_or(0, |(down, _)| down.rows));
                    raise(&mut self.q_plain, attention.q.rows);
                    raise(&mut self.q_rope, latent.q_rope.rows);
                    raise(&mut self.k_rope, latent.k_rope.rows);
                    raise(&mut self.mixed_latent, attention.heads * attention.v_head_dim);
                }
            }
            MixerSpec::DeltaNet(delta) => {
                raise(&mut self.conv, delta.qkv.rows);
                raise(&mut self.heads, delta.v_heads);
                raise(&mut self.mixed, delta.out.cols);
                raise(&mut self.mixer_gate, delta.gate.rows);
            }
            MixerSpec::ShortConv(short) => {
                raise(&mut self.conv, short.x.rows);
                raise(&mut self.mixer_gate, short.b.rows);
                raise(&mut self.mixed, short.c.rows);
            }
            MixerSpec::Mamba2(mamba) => {
                raise(&mut self.conv, mamba.xbc.rows);
                raise(&mut self.heads, mamba.heads);
                raise(&mut self.mixed, mamba.out.cols);
                raise(&mut self.mixer_gate, mamba.z.rows);
            }
        }
    }

    fn all(&self) -> [usize; 19] {
        let Self { q, k, v, q_down, q_plain, q_rope, k_rope, mixed_latent, conv, heads, .. } = *self;
        let Self { mixer_gate, mixed, ff, router, own_normed, router_normed, part, per_layer, slice, .. } =
            *self;
        [
            q,
            k,
            v,
            q_down,
            q_plain,
            q_rope,
            k_rope,
            mixed_latent,
            conv,
            heads,
            mixer_gate,
            mixed,
            ff,
            router,
            own_normed,
            router_normed,
            part,
            per_layer,
            slice,
        ]
    }

    /// Whether buffers of these widths are wide enough for layers that need `others`.
    pub(crate) fn covers(&self, others: &Self) -> bool {
        self.all().iter().zip(others.all()).all(|(own, other)| *own >= other)
    }

    /// Values per row, summed over all buffers except residual, norm and branch.
    pub fn total(&self) -> usize {
        // Two buffers have this width each.
        self.all().iter().sum::<usize>() + self.heads + self.ff
    }
}

/// Creates the buffers that these layers of a model need.
pub(super) fn create_buffers(
    spec: &ModelSpec,
    layers: &[LayerSpec],
    config: &DecoderConfig,
    backend: &mut dyn Backend,
) -> Result<Buffers, Error> {
    let logits = (config.logit_rows, output_width(spec));
    buffers(&Widths::of(spec, layers), spec.hidden, config.max_rows, logits, backend)
}

/// Creates buffers for `rows` rows. `logits`: rows and values of logits or scores.
pub(super) fn buffers(
    widths: &Widths,
    hidden: usize,
    rows: usize,
    logits: (usize, usize),
    backend: &mut dyn Backend,
) -> Result<Buffers, Error> {
    let mut make = |rows: usize, cols: usize| backend.create_buffer(rows, cols.max(1));
    // Layers of one model may differ in width. A buffer takes the width of what is written into it.
    Ok(Buffers {
        x: make(rows, hidden)?,
        normed: make(rows, hidden)?,
        q: make(rows, widths.q)?,
        k: make(rows, widths.k)?,
        v: make(rows, widths.v)?,
        q_down: make(rows, widths.q_down)?,
        q_plain: make(rows, widths.q_plain)?,
        q_rope: make(rows, widths.q_rope)?,
        k_rope: make(rows, widths.k_rope)?,
        mixed_latent: make(rows, widths.mixed_latent)?,
        conv: make(rows, widths.conv)?,
        beta: make(rows, widths.heads)?,
        dt: make(rows, widths.heads)?,
        mixer_gate: make(rows, widths.mixer_gate)?,
        mixed: make(rows, widths.mixed)?,
        gate: make(rows, widths.ff)?,
        up: make(rows, widths.ff)?,
        row_gate: make(rows, 1)?,
        router: make(rows, widths.router)?,
        own_normed: make(rows, widths.own_normed)?,
        router_normed: make(rows, widths.router_normed)?,
        part: make(rows, widths.part)?,
        branch: make(rows, hidden)?,
        per_layer: make(rows, widths.per_layer)?,
        slice: make(rows, widths.slice)?,
        picked: make(logits.0, hidden)?,
        picked_normed: make(logits.0, hidden)?,
        logits: make(logits.0, logits.1)?,
    })
}

/// Values of one row of logits or scores.
fn output_width(spec: &ModelSpec) -> usize {
    match &spec.output {
        OutputSpec::Logits(logits) => logits.linear.rows,
        OutputSpec::Pooled(pooled) => pooled.classifier.as_ref().map_or(1, |classifier| classifier.out.rows),
    }
}
