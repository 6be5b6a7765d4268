//! The decoder: walks a layer range of a [`ModelSpec`] on a backend, activations in and out.
//!
//! It knows no device and no architecture. Everything that changes from step to step comes in a
//! [`StepInput`]; what leaves is the residual stream or logits rows.

use crate::Error;
use crate::weights::{FfnWeights, LayerWeights, Linear, Loader, TensorSource, Weights};
use kernels::backend::{
    AttentionOp, Backend, BufferId, KvCopy, KvLayerId, KvShape, KvType, MatmulJob, MoeOp, QkvOp, StepInput,
};
use model::spec::{FfnSpec, ModelSpec};
use std::ops::Range;

/// How a decoder is laid out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecoderConfig {
    /// Layers that it holds.
    pub layers: Range<usize>,
    /// Rows of the largest step.
    pub max_rows: usize,
    /// Logits rows computed together; more are computed in pieces.
    pub logit_rows: usize,
    /// Positions per KV block.
    pub block_tokens: usize,
    /// Element type of the KV cache.
    pub kv_type: KvType,
}

/// One KV group: the layers whose blocks live and die together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvGroup {
    /// `Some(w)`: only the last w positions are ever read.
    pub window: Option<usize>,
    /// Bytes of one block over all layers of the group; a multiple of 64.
    pub block_bytes: usize,
    /// Layers of the group.
    pub layers: usize,
}

#[derive(Debug)]
struct Buffers {
    /// Residual stream.
    x: BufferId,
    normed: BufferId,
    q: BufferId,
    k: BufferId,
    v: BufferId,
    attended: BufferId,
    gate: BufferId,
    up: BufferId,
    router: BufferId,
    /// Output of a mixer or FFN that is normed before it is added.
    branch: BufferId,
    picked: BufferId,
    picked_normed: BufferId,
    logits: BufferId,
}

/// A loaded layer range.
pub struct Decoder {
    spec: ModelSpec,
    config: DecoderConfig,
    backend: Box<dyn Backend>,
    weights: Weights,
    groups: Vec<KvGroup>,
    kv: Vec<KvLayerId>,
    buffers: Buffers,
}

impl Decoder {
    /// Loads the layers of `config` from `source`. `progress` hears (layers done, layers in all).
    pub fn load(
        spec: ModelSpec,
        config: DecoderConfig,
        source: &dyn TensorSource,
        mut backend: Box<dyn Backend>,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, Error> {
        let weights = Loader::new(source, backend.as_mut()).load(&spec, config.layers.clone(), progress)?;
        let (groups, kv) = kv_layout(&spec, &config, backend.as_mut())?;
        let buffers = create_buffers(&spec, &config, backend.as_mut())?;
        Ok(Self { spec, config, backend, weights, groups, kv, buffers })
    }

    /// The model.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// KV groups, in the order in which [`StepInput::tables`] names them.
    pub fn groups(&self) -> &[KvGroup] {
        &self.groups
    }

    /// The device.
    pub fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    /// Bytes of the loaded tensors in the source.
    pub fn source_bytes(&self) -> usize {
        self.weights.source_bytes
    }

    /// Bytes of weights, as they stand in the source, that one token reads.
    pub fn weight_bytes_per_token(&self) -> usize {
        self.weights.bytes_per_token
    }

    /// Bytes of KV that one token reads at `context` positions before it.
    pub fn kv_bytes_read(&self, context: usize) -> usize {
        let read = |group: &KvGroup| {
            let positions = group.window.map_or(context, |window| context.min(window));
            group.block_bytes * positions / self.config.block_tokens
        };
        self.groups.iter().map(read).sum()
    }

    /// Allocates the KV arena.
    pub fn allocate_kv(&mut self, bytes: usize) -> Result<(), Error> {
        let block_bytes: Vec<usize> = self.groups.iter().map(|group| group.block_bytes).collect();
        Ok(self.backend.create_kv_arena(bytes, &block_bytes)?)
    }

    /// Runs the layers over a step; the residual stream stays on the device.
    pub fn forward(&mut self, copies: &[KvCopy], step: &StepInput<'_>) -> Result<(), Error> {
        if !copies.is_empty() {
            self.backend.copy_kv(copies)?;
        }
        self.backend.begin_step(step)?;
        if let Some(table) = self.weights.embedding {
            self.backend.embed(table, self.spec.embedding.scale, self.buffers.x)?;
        }
        for index in 0..self.weights.layers.len() {
            self.layer(index)?;
        }
        Ok(())
    }

    /// Logits of the named rows of the last step: `sink(i, row)` hears row `rows[i]`, vocabulary values.
    pub fn logits(&mut self, rows: &[u32], sink: &mut dyn FnMut(usize, &[f32])) -> Result<(), Error> {
        let mut values = vec![0f32; self.spec.vocab];
        for (piece, picked) in rows.chunks(self.config.logit_rows).enumerate() {
            self.compute_logits(picked)?;
            for row in 0..picked.len() {
                self.backend.read_row(self.buffers.logits, row, &mut values)?;
                sink(piece * self.config.logit_rows + row, &values);
            }
        }
        Ok(())
    }

    /// Index of the largest logit of each named row of the last step; ties go to the lowest token.
    pub fn argmax(&mut self, rows: &[u32], out: &mut Vec<u32>) -> Result<(), Error> {
        out.clear();
        let mut best = Vec::new();
        for picked in rows.chunks(self.config.logit_rows) {
            self.compute_logits(picked)?;
            self.backend.argmax(self.buffers.logits, &mut best)?;
            out.extend_from_slice(&best);
        }
        Ok(())
    }

    fn compute_logits(&mut self, rows: &[u32]) -> Result<(), Error> {
        let Some((norm, head)) = &self.weights.head else { return Err(Error::NoOutputHead) };
        let b = &self.buffers;
        self.backend.gather_rows(b.x, rows, b.picked)?;
        self.backend.norm(b.picked, norm, b.picked_normed)?;
        self.backend.matmul(b.picked_normed, &[job(head, b.logits, false)])?;
        let output = &self.spec.output;
        if output.scale != 1.0 || output.softcap.is_some() {
            self.backend.finish_logits(b.logits, output.scale, output.softcap)?;
        }
        Ok(())
    }

    fn layer(&mut self, index: usize) -> Result<(), Error> {
        let layer = &self.weights.layers[index];
        let layer_spec = &self.spec.layers[self.config.layers.start + index];
        let (backend, b) = (self.backend.as_mut(), &self.buffers);
        attention(backend, b, layer, layer_spec, self.kv[index])?;
        feed_forward(backend, b, layer, layer_spec)
    }
}

fn attention(
    backend: &mut dyn Backend,
    b: &Buffers,
    layer: &LayerWeights,
    spec: &model::spec::LayerSpec,
    kv: KvLayerId,
) -> Result<(), Error> {
    let model::spec::MixerSpec::Attention(shape) = &spec.mixer;
    let weights = &layer.attention;
    let input = normed(backend, b, layer.mixer_norm.as_ref())?;
    backend.matmul(
        input,
        &[job(&weights.q, b.q, false), job(&weights.k, b.k, false), job(&weights.v, b.v, false)],
    )?;
    backend.qkv(&QkvOp {
        q: b.q,
        k: b.k,
        v: b.v,
        q_norm: weights.q_norm,
        k_norm: weights.k_norm,
        rope: weights.rope,
        layer: kv,
    })?;
    backend.attention(&AttentionOp { q: b.q, out: b.attended, scale: shape.scale, layer: kv })?;
    match &layer.mixer_post_norm {
        None if spec.residual_scale == 1.0 => backend.matmul(b.attended, &[job(&weights.o, b.x, true)])?,
        norm => {
            backend.matmul(b.attended, &[job(&weights.o, b.branch, false)])?;
            backend.add(b.x, b.branch, norm.as_ref(), spec.residual_scale)?;
        }
    }
    Ok(())
}

fn feed_forward(
    backend: &mut dyn Backend,
    b: &Buffers,
    layer: &LayerWeights,
    spec: &model::spec::LayerSpec,
) -> Result<(), Error> {
    let input = normed(backend, b, layer.ffn_norm.as_ref())?;
    let direct = layer.ffn_post_norm.is_none() && spec.residual_scale == 1.0;
    let out = if direct { b.x } else { b.branch };
    match &layer.ffn {
        FfnWeights::Dense { gate, up, down, activation } => {
            backend.matmul(input, &[job(gate, b.gate, false), job(up, b.up, false)])?;
            backend.gate(b.gate, b.up, *activation)?;
            backend.matmul(b.gate, &[job(down, out, direct)])?;
        }
        FfnWeights::Moe(moe) => {
            backend.matmul(input, &[job(&moe.router, b.router, false)])?;
            backend.moe(&MoeOp {
                x: input,
                router: b.router,
                out,
                accumulate: direct,
                scale: 1.0,
                used: moe.spec.used,
                renormalise: moe.spec.renormalise,
                gate_up: moe.gate_up,
                down: moe.down,
                down_scale: moe.down_scale,
                ff: moe.spec.expert_ff,
                activation: moe.activation,
            })?;
        }
    }
    if !direct {
        backend.add(b.x, b.branch, layer.ffn_post_norm.as_ref(), spec.residual_scale)?;
    }
    Ok(())
}

fn normed(
    backend: &mut dyn Backend,
    b: &Buffers,
    norm: Option<&kernels::backend::Norm>,
) -> Result<BufferId, Error> {
    let Some(norm) = norm else { return Ok(b.x) };
    backend.norm(b.x, norm, b.normed)?;
    Ok(b.normed)
}

fn job(linear: &Linear, out: BufferId, accumulate: bool) -> MatmulJob {
    MatmulJob { matrix: linear.matrix, out, bias: linear.bias, scale: linear.scale, accumulate }
}

/// Groups layers by what they can forget, and places each layer inside its group's block.
fn kv_layout(
    spec: &ModelSpec,
    config: &DecoderConfig,
    backend: &mut dyn Backend,
) -> Result<(Vec<KvGroup>, Vec<KvLayerId>), Error> {
    let mut groups: Vec<KvGroup> = Vec::new();
    let mut layers = Vec::with_capacity(config.layers.len());
    // Full attention first: its hit bounds every other group's.
    let windows = config.layers.clone().filter_map(|index| spec.attention(index)).map(|a| a.window);
    let mut kinds: Vec<Option<usize>> = Vec::new();
    for window in windows {
        if !kinds.contains(&window) {
            kinds.push(window);
        }
    }
    kinds.sort_unstable();
    groups.extend(kinds.into_iter().map(|window| KvGroup { window, block_bytes: 0, layers: 0 }));
    for index in config.layers.clone() {
        let Some(attention) = spec.attention(index) else { continue };
        let Some(at) = groups.iter().position(|group| group.window == attention.window) else { continue };
        let shape = KvShape {
            heads: attention.heads,
            kv_heads: attention.kv_heads,
            head_dim: attention.head_dim,
            v_head_dim: attention.v_head_dim,
            block_tokens: config.block_tokens,
            kv_type: config.kv_type,
            window: attention.window,
        };
        let group = &mut groups[at];
        layers.push(backend.create_kv_layer(at, shape, group.block_bytes)?);
        group.block_bytes += backend.kv_block_bytes(shape)?;
        group.layers += 1;
    }
    Ok((groups, layers))
}

fn create_buffers(
    spec: &ModelSpec,
    config: &DecoderConfig,
    backend: &mut dyn Backend,
) -> Result<Buffers, Error> {
    let mut widths = Widths::default();
    for index in config.layers.clone() {
        if let Some(attention) = spec.attention(index) {
            widths.q = widths.q.max(attention.q.rows);
            widths.k = widths.k.max(attention.k.rows);
            widths.v = widths.v.max(attention.v.rows);
            widths.attended = widths.attended.max(attention.o.cols);
        }
        match &spec.layers[index].ffn {
            FfnSpec::Dense { gate, .. } => widths.ff = widths.ff.max(gate.rows),
            FfnSpec::Moe(moe) => widths.router = widths.router.max(moe.experts),
        }
    }
    let rows = config.max_rows;
    let mut make = |rows: usize, cols: usize| backend.create_buffer(rows, cols.max(1));
    Ok(Buffers {
        x: make(rows, spec.hidden)?,
        normed: make(rows, spec.hidden)?,
        q: make(rows, widths.q)?,
        k: make(rows, widths.k)?,
        v: make(rows, widths.v)?,
        attended: make(rows, widths.attended)?,
        gate: make(rows, widths.ff)?,
        up: make(rows, widths.ff)?,
        router: make(rows, widths.router)?,
        branch: make(rows, spec.hidden)?,
        picked: make(config.logit_rows, spec.hidden)?,
        picked_normed: make(config.logit_rows, spec.hidden)?,
        logits: make(config.logit_rows, spec.vocab)?,
    })
}

#[derive(Default)]
struct Widths {
    q: usize,
    k: usize,
    v: usize,
    attended: usize,
    ff: usize,
    router: usize,
}
