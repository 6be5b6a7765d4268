//! The KV arena, the keys and values in it, and attention over them.

use super::super::attention::{AttentionCall, AttentionKernels};
use super::super::kv::KvBlock;
use super::super::qkv::{DeviceRope, HeadNorm, KeysValues, QkvCall, QkvKernels, RopeAngles};
use super::super::step::KvGroup;
use super::super::{Device, DevicePtr};
use super::CudaBackend;
use super::memory::{GrowingBuffer, ScratchLayout, Vectors, same, uploaded};
use kernels::Error;
use kernels::attention::{OFFSET_UNIT, Visible};
use kernels::backend::{
    AttentionOp, EmbedIndex, KvCopy, KvLayerId, KvShape, KvWrite, Norm, QkvOp, QueryGrowth, RopeId,
    RopeSource,
};
use std::num::NonZeroU32;

/// The KV arena and the layers whose keys and values it holds.
#[derive(Default)]
pub(super) struct Caches {
    pub(super) arena: DevicePtr,
    pub(super) arena_bytes: usize,
    group_block_bytes: Vec<usize>,
    layers: Vec<KvLayer>,
    /// Kernels by layer shape; layers of one shape share them.
    kernels: Vec<ShapeKernels>,
    ropes: Vec<Rope>,
    /// Factors of queries at the positions below [`GROWING_POSITIONS`].
    growths: Vec<(QueryGrowth, DevicePtr)>,
}

/// Positions at which queries may grow: 2^20, more than a sequence may have.
const GROWING_POSITIONS: usize = 1 << 20;

/// Location of one layer in its group's blocks.
#[derive(Debug, Clone, Copy)]
struct KvLayer {
    group: usize,
    /// Byte offset inside a block.
    offset: usize,
    /// Index into [`Caches::kernels`].
    kernels: usize,
}

struct ShapeKernels {
    shape: KvShape,
    qkv: QkvKernels,
    attention: AttentionKernels,
}

/// A rotary embedding, with the angles of the step's rows. They are computed when the first layer needs
/// them.
struct Rope {
    rope: DeviceRope,
    turns: DevicePtr,
    room: GrowingBuffer,
    of_step: Option<RopeAngles>,
}

impl Caches {
    pub(super) fn create_rope(
        &mut self,
        device: &mut dyn Device,
        source: &RopeSource,
    ) -> Result<RopeId, Error> {
        let rope = DeviceRope::new(source)?;
        let turns = uploaded(device, &rope.bytes())?;
        self.ropes.push(Rope { rope, turns, room: GrowingBuffer::default(), of_step: None });
        Ok(RopeId::new(self.ropes.len() as u32 - 1))
    }

    /// Returns the factors of queries that grow, uploaded once.
    fn growth(&mut self, device: &mut dyn Device, growth: QueryGrowth) -> Result<DevicePtr, Error> {
        if let Some((_, factors)) = self.growths.iter().find(|(known, _)| *known == growth) {
            return Ok(*factors);
        }
        let positions = (0..GROWING_POSITIONS).step_by(growth.every.max(1));
        let bytes: Vec<u8> = positions.flat_map(|position| growth.at(position).to_ne_bytes()).collect();
        let factors = uploaded(device, &bytes)?;
        self.growths.push((growth, factors));
        Ok(factors)
    }

    /// Returns the groups in which layers have blocks, for the checks of a step.
    pub(super) fn groups(&self) -> Vec<KvGroup> {
        let count = self.layers.iter().map(|layer| layer.group + 1).max().unwrap_or(0);
        (0..count)
            .map(|group| {
                let shapes = self.layers.iter().filter(|layer| layer.group == group);
                let shapes = shapes.map(|layer| self.kernels[layer.kernels].shape);
                let visible = shapes.clone().map(|shape| visible(&shape)).reduce(wider);
                KvGroup {
                    // A group without layers here still has tables; nothing is read through them.
                    block_tokens: shapes.map(|shape| shape.block_tokens).next().unwrap_or(1 << 20),
                    bytes: self.group_block_bytes.get(group).copied().unwrap_or(0),
                    visible: visible.unwrap_or(Visible::Window(NonZeroU32::MIN)),
                }
            })
            .collect()
    }

    /// Drops the angles of the last step.
    pub(super) fn begin_step(&mut self) {
        self.ropes.iter_mut().for_each(|rope| rope.of_step = None);
    }

    /// See [`kernels::backend::Backend::create_kv_arena`].
    pub(super) fn create_arena(
        &mut self,
        device: &mut dyn Device,
        bytes: usize,
        group_block_bytes: &[usize],
    ) -> Result<(), Error> {
        if self.arena_bytes > 0 {
            device.free(self.arena)?;
            self.arena_bytes = 0;
        }
        self.arena = device.allocate(bytes)?;
        device.fill(self.arena, 0, bytes)?;
        self.arena_bytes = bytes;
        self.group_block_bytes = group_block_bytes.to_vec();
        Ok(())
    }

    /// See [`kernels::backend::Backend::copy_kv`].
    pub(super) fn copy(&self, device: &mut dyn Device, copies: &[KvCopy]) -> Result<(), Error> {
        for copy in copies {
            let len = self.group_block_bytes.len();
            let missing = Error::OutOfRange { what: "KV group", index: copy.group, len };
            let bytes = *self.group_block_bytes.get(copy.group).ok_or(missing)?;
            let (from, to) = (self.arena_ptr(copy.from, bytes)?, self.arena_ptr(copy.to, bytes)?);
            // A copy of a block to itself does nothing.
            if from != to {
                device.copy(from, to, bytes)?;
            }
        }
        Ok(())
    }

    /// Returns the address of `bytes` bytes of the arena from a block offset on.
    ///
    /// # Errors
    /// [`Error::OutsideArena`].
    pub(super) fn arena_ptr(&self, offset: u32, bytes: usize) -> Result<DevicePtr, Error> {
        let start = offset as usize * OFFSET_UNIT;
        match start.checked_add(bytes) {
            Some(end) if end <= self.arena_bytes => Ok(self.arena.offset(start)),
            end => Err(Error::OutsideArena { end: end.unwrap_or(usize::MAX) as u64, len: self.arena_bytes }),
        }
    }

    pub(super) fn rope_bytes(&self) -> usize {
        let factors =
            |growth: &QueryGrowth| GROWING_POSITIONS.div_ceil(growth.every.max(1)) * size_of::<f32>();
        let growths = self.growths.iter().map(|(growth, _)| factors(growth)).sum::<usize>();
        self.ropes.iter().map(|rope| rope.room.bytes() + rope.rope.bytes().len()).sum::<usize>() + growths
    }

    fn layer(&self, id: KvLayerId) -> Result<(KvLayer, &ShapeKernels), Error> {
        let (index, len) = (id.number() as usize, self.layers.len());
        let layer = self.layers.get(index).ok_or(Error::OutOfRange { what: "KV layer", index, len })?;
        Ok((*layer, &self.kernels[layer.kernels]))
    }
}

/// See [`kernels::backend::Backend::kv_block_bytes`].
pub(super) fn block_bytes(shape: &KvShape) -> Result<usize, Error> {
    Ok(KvBlock::new(shape)?.bytes())
}

/// See [`kernels::backend::Backend::create_kv_layer`].
pub(super) fn create_layer(
    backend: &mut CudaBackend,
    group: usize,
    shape: KvShape,
    offset: usize,
) -> Result<KvLayerId, Error> {
    let CudaBackend { device, modules, caches, .. } = backend;
    let device = device.as_mut();
    let existing = caches.kernels.iter().position(|kernels| kernels.shape == shape);
    let kernels = match existing {
        Some(existing) => existing,
        None => {
            let qkv = QkvKernels::load(device, modules.of(QkvKernels::source(&shape)?)?, shape)?;
            let compiled = modules.of(AttentionKernels::source(&shape)?)?;
            let attention = AttentionKernels::load(device, compiled, shape)?;
            caches.kernels.push(ShapeKernels { shape, qkv, attention });
            caches.kernels.len() - 1
        }
    };
    caches.layers.push(KvLayer { group, offset, kernels });
    Ok(KvLayerId::new(caches.layers.len() as u32 - 1))
}

/// See [`QkvOp`]. The buffers of keys and values are not changed.
pub(super) fn qkv(backend: &mut CudaBackend, op: &QkvOp) -> Result<(), Error> {
    let CudaBackend { device, caches, buffers, vectors, step, scratch, .. } = backend;
    let device = device.as_mut();
    let growth = match op.q_growth {
        None => None,
        Some(growth) => {
            step.read_table(EmbedIndex::Position, GROWING_POSITIONS)?;
            Some((caches.growth(device, growth)?, growth.every.max(1)))
        }
    };
    let (rows, pointers) = (step.step().rows(), step.pointers()?);
    let angles = match op.rope {
        None => None,
        Some(id) => Some(angles(caches, device, id, op.layer, pointers, rows)?),
    };
    let (layer, ShapeKernels { shape, qkv, .. }) = caches.layer(op.layer)?;
    let KvShape { heads, kv_heads, head_dim, v_head_dim, latent, .. } = *shape;
    let input = |what, id, width| -> Result<DevicePtr, Error> {
        let buffer = buffers.get(id)?;
        same(what, width, buffer.cols)?;
        same("rows of the step", rows, buffer.rows)?;
        Ok(buffer.ptr)
    };
    let kv = match op.kv {
        None => None,
        Some(KvWrite { k, v, k_norm, v_norm }) => Some(KeysValues {
            k: input("keys", k, kv_heads * head_dim)?,
            v: match latent {
                true => DevicePtr::default(),
                false => input("values", v, kv_heads * v_head_dim)?,
            },
            k_norm: k_norm.map(|norm| head_norm(vectors, &norm)).transpose()?,
            v_norm: v_norm.map(|norm| head_norm(vectors, &norm)).transpose()?,
        }),
    };
    let mut call = QkvCall {
        q: input("queries", op.q, heads * head_dim)?,
        q_norm: op.q_norm.map(|norm| head_norm(vectors, &norm)).transpose()?,
        kv,
        rope: angles,
        growth,
        arena: caches.arena,
        step: pointers,
        rows,
        group: layer.group,
        layer_offset: layer.offset,
        scratch: DevicePtr::default(),
    };
    call.scratch = scratch.of(device, qkv.scratch_bytes(&call)?)?;
    qkv.launch(device, &call)?;
    buffers.changed(op.q)
}

/// Returns the angles of the step's rows.
fn angles(
    caches: &mut Caches,
    device: &mut dyn Device,
    id: RopeId,
    layer: KvLayerId,
    step: &super::super::step::StepPointers,
    rows: usize,
) -> Result<RopeAngles, Error> {
    let (index, len) = (id.number() as usize, caches.ropes.len());
    let kernels = caches.layer(layer)?.0.kernels;
    let rope = caches.ropes.get_mut(index).ok_or(Error::OutOfRange { what: "rope", index, len })?;
    if let Some(angles) = rope.of_step {
        return Ok(angles);
    }
    let room = rope.room.of(device, rope.rope.angle_bytes(rows))?;
    let made = caches.kernels[kernels].qkv.angles(device, &rope.rope, rope.turns, step, rows, room)?;
    rope.of_step = Some(made);
    Ok(made)
}

/// See [`AttentionOp`].
pub(super) fn attention(backend: &mut CudaBackend, op: &AttentionOp) -> Result<(), Error> {
    if op.softcap.is_some() {
        return Err(Error::Unsupported { what: "capped attention scores on a GPU" });
    }
    let CudaBackend { device, caches, buffers, vectors, step, scratch, rowwise, .. } = backend;
    let device = device.as_mut();
    let (layer, ShapeKernels { shape, attention, .. }) = caches.layer(op.layer)?;
    let [k_rotation, v_rotation] = [true, false].map(|keys| attention.block().rotation(keys));
    let q = buffers.get(op.q)?;
    same("queries", shape.heads * shape.head_dim, q.cols)?;
    same("rows of the step", step.step().rows(), q.rows)?;
    if op.q == op.out {
        return Err(Error::SameBuffer);
    }
    let out = buffers.shape(op.out, q.rows, shape.heads * shape.v_head_dim)?;
    let sequences = step.planned();
    let positions = sequences.iter().map(|sequence| sequence.context + sequence.rows.len()).max();
    let scratch_bytes = attention.scratch_bytes(positions.unwrap_or(0));
    let mut layout = ScratchLayout::default();
    let parts = layout.next(scratch_bytes);
    let rotated = layout.next(if k_rotation > 1 { q.bytes() } else { 0 });
    let base = scratch.of(device, layout.bytes())?;
    let mut queries = q.ptr;
    if k_rotation > 1 {
        queries = base.offset(rotated);
        rowwise.hadamard(device, (q.ptr, queries), k_rotation, q.rows * q.cols)?;
    }
    let call = AttentionCall {
        q: queries,
        out: out.ptr,
        scratch: base.offset(parts),
        arena: caches.arena,
        step: step.pointers()?,
        sequences,
        group: layer.group,
        layer_offset: layer.offset,
        sinks: vectors.optional("attention sinks", op.sinks, shape.heads)?,
        scale: op.scale,
    };
    attention.launch(device, &call, scratch_bytes)?;
    if v_rotation > 1 {
        rowwise.hadamard(device, (out.ptr, out.ptr), v_rotation, out.rows * out.cols)?;
    }
    Ok(())
}

fn head_norm(vectors: &Vectors, norm: &Norm) -> Result<HeadNorm, Error> {
    if !norm.rms || norm.bias.is_some() {
        return Err(Error::Unsupported { what: "a head norm that is no RMS norm" });
    }
    let weight = norm.weight.map(|id| vectors.get(id).map(|vector| (vector.ptr, vector.len)));
    Ok(HeadNorm { weight: weight.transpose()?, eps: norm.eps, width: norm.width })
}

fn visible(shape: &KvShape) -> Visible {
    match (shape.causal, shape.window) {
        (false, _) => Visible::Whole,
        (true, None) => Visible::Causal,
        (true, Some(window)) => {
            let window = u32::try_from(window).unwrap_or(u32::MAX);
            Visible::Window(NonZeroU32::new(window).unwrap_or(NonZeroU32::MIN))
        }
    }
}

fn wider(a: Visible, b: Visible) -> Visible {
    match (a, b) {
        // A window on both sides needs the blocks of all keys.
        (Visible::Whole | Visible::Around(_), _) | (_, Visible::Whole | Visible::Around(_)) => Visible::Whole,
        (Visible::Causal, _) | (_, Visible::Causal) => Visible::Causal,
        (Visible::Window(a), Visible::Window(b)) => Visible::Window(a.max(b)),
    }
}
