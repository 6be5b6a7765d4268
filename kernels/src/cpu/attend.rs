//! KV layers, the op on q, k and v before attention, and attention.

use super::CpuBackend;
use super::rows::pair;
use super::rowwise::rms;
use crate::Error;
use crate::attention::{self, ArenaView, AttentionCall, AttentionShape, KvLayout, Visible};
use crate::backend::{AttentionOp, KvLayerId, KvShape, KvWrite, Norm, QkvOp};
use crate::ops;
use std::num::NonZeroU32;

/// A layer's position in its group's blocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct KvLayer {
    pub(super) group: usize,
    /// In bytes from the start of a block.
    pub(super) offset: usize,
    pub(super) shape: AttentionShape,
}

/// Bytes of a block of one layer.
pub(super) fn block_bytes(shape: KvShape) -> Result<usize, Error> {
    Ok(layout(shape)?.bytes().next_multiple_of(attention::OFFSET_UNIT))
}

/// See [`crate::backend::Backend::create_kv_layer`].
pub(super) fn create_layer(
    backend: &mut CpuBackend,
    group: usize,
    shape: KvShape,
    offset: usize,
) -> Result<KvLayerId, Error> {
    let window =
        |window| NonZeroU32::new(u32::try_from(window).unwrap_or(u32::MAX)).ok_or(Error::EmptyWindow);
    let visible = match (shape.causal, shape.window) {
        (true, None) => Visible::Causal,
        (true, Some(size)) => Visible::Window(window(size)?),
        (false, None) => Visible::Whole,
        (false, Some(size)) => Visible::Around(window(size)?),
    };
    let shape = AttentionShape { layout: layout(shape)?, heads: shape.heads, visible };
    backend.kv_layers.push(KvLayer { group, offset, shape });
    Ok(KvLayerId(backend.kv_layers.len() as u32 - 1))
}

/// See [`QkvOp`].
pub(super) fn qkv(backend: &mut CpuBackend, op: &QkvOp) -> Result<(), Error> {
    let KvLayer { offset, shape, .. } = layer(backend, op.layer)?;
    let AttentionShape { layout, heads, .. } = shape;
    let (q_width, k_width) = (heads * layout.head_dim(), layout.kv_heads() * layout.head_dim());
    let v_width = layout.kv_heads() * layout.v_head_dim();
    let vectors = &backend.vectors;
    let head = |norm: Option<Norm>, width: usize| {
        norm.map(|norm| rms(vectors, &norm, width, "a head norm that is no RMS norm")).transpose()
    };
    let step = ops::QkvStep {
        layer_offset: offset,
        q_norm: head(op.q_norm, q_width)?,
        k_norm: head(op.kv.and_then(|kv| kv.k_norm), k_width)?,
        v_norm: head(op.kv.and_then(|kv| kv.v_norm), v_width)?,
        rope: op.rope.map(|id| &backend.ropes[id.0 as usize]),
        axes: &backend.step.axes,
        q_growth: op.q_growth,
    };
    let plan = backend.step.plan(op.layer)?;
    let q = op.q.0 as usize;
    let buffers = &mut backend.buffers;
    let qkv = match op.kv {
        None => ops::Qkv { q: buffers[q].values_mut(), kv: None },
        Some(KvWrite { k, v, .. }) if k == v => {
            let [q, k] = buffers.get_disjoint_mut([q, k.0 as usize]).map_err(|_| Error::SameBuffer)?;
            let kv = ops::KeysValues { k: k.values_mut(), v: None };
            ops::Qkv { q: q.values_mut(), kv: Some(kv) }
        }
        Some(KvWrite { k, v, .. }) => {
            let ids = [q, k.0 as usize, v.0 as usize];
            let [q, k, v] = buffers.get_disjoint_mut(ids).map_err(|_| Error::SameBuffer)?;
            let kv = ops::KeysValues { k: k.values_mut(), v: Some(v.values_mut()) };
            ops::Qkv { q: q.values_mut(), kv: Some(kv) }
        }
    };
    let mut arena = ArenaView::new(&mut backend.arena)?;
    ops::norm_rope_write(&backend.pool, backend.config.rows, plan, &step, &mut arena, qkv)
}

/// See [`AttentionOp`].
pub(super) fn attention(backend: &mut CpuBackend, op: &AttentionOp) -> Result<(), Error> {
    let layer = layer(backend, op.layer)?;
    let plan = backend.step.plan(op.layer)?;
    let (q, out) = pair(&mut backend.buffers, op.q, op.out)?;
    out.set_shape(q.rows(), layer.shape.heads * layer.shape.layout.v_head_dim())?;
    let arena = ArenaView::new(&mut backend.arena)?;
    let call = AttentionCall {
        arena: &arena,
        layer_offset: layer.offset,
        scale: op.scale,
        softcap: op.softcap,
        sinks: op.sinks.map(|id| backend.vectors[id.0 as usize].as_slice()),
    };
    let (isa, scratch) = (backend.config.attention, &mut backend.scratch);
    attention::attention(&backend.pool, isa, plan, &call, q.values(), out.values_mut(), scratch)
}

fn layer(backend: &CpuBackend, id: KvLayerId) -> Result<KvLayer, Error> {
    let (index, len) = (id.0 as usize, backend.kv_layers.len());
    let missing = Error::OutOfRange { what: "KV layer", index, len };
    backend.kv_layers.get(index).copied().ok_or(missing)
}

fn layout(shape: KvShape) -> Result<KvLayout, Error> {
    let KvShape { kv_type, block_tokens, kv_heads, head_dim, v_head_dim, latent, .. } = shape;
    let layout = KvLayout::new(kv_type, block_tokens, kv_heads, head_dim, v_head_dim)?;
    if latent { layout.latent() } else { Ok(layout) }
}
