//! Decode steps of a model with random weights: all operations of its layers, on the backend that a worker
//! uses.

use super::ops::{Layer, ModelOps, StepBuffers};
use super::{Speed, random_bytes};
use crate::pack::TiledShape;
use crate::{Arch, CudaBackend, CudaConfig, Device, record};
use kernels::Error;
use kernels::attention::OFFSET_UNIT;
use kernels::backend::{
    ActivationMode, Backend, BlockTable, KvShape, KvType, MatrixId, MatrixSource, Norm, RopeSource,
    StepInput, StepSequence,
};
use kernels::quant::GgmlType;

const BLOCK_TOKENS: usize = 16;
/// Random weights are far larger than a model's. This scale keeps small what layers add to a row.
const SCALE: f32 = 1e-4;

/// A model with layers of one kind: attention, then a gated feed-forward network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeShape {
    pub layers: usize,
    /// Width of a row.
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Width of the feed-forward network.
    pub ff: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
}

impl DecodeShape {
    /// Llama 3.1 8B.
    pub const LLAMA_8B: Self =
        Self { layers: 32, hidden: 4096, heads: 32, kv_heads: 8, head_dim: 128, ff: 14_336, vocab: 128_256 };

    /// Returns the type of a layer's value and down matrices. Q4_K_M uses more bits for some layers: the
    /// first and the last eighth, and every third one between.
    fn wide(&self, layer: usize) -> GgmlType {
        let eighth = self.layers / 8;
        let chosen = layer < eighth || layer >= 7 * self.layers / 8 || (layer - eighth) % 3 == 2;
        if chosen { GgmlType::Q6_K } else { GgmlType::Q4_K }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeSpeed {
    /// Bytes of weights, each read once.
    pub weight_bytes: usize,
    /// Bytes of keys and values, each read once.
    pub kv_bytes: usize,
    /// Seconds with each launch issued by the host.
    pub eager: f64,
    pub graph: f64,
}

/// Creates matrices and counts their bytes.
struct Weights {
    random: Vec<u8>,
    bytes: usize,
}

impl Weights {
    fn matrix(
        &mut self,
        backend: &mut CudaBackend,
        ty: GgmlType,
        rows: usize,
        cols: usize,
    ) -> Result<MatrixId, Error> {
        let len = ty.row_bytes(cols)? * rows;
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            bytes.extend_from_slice(&self.random[..self.random.len().min(len - bytes.len())]);
        }
        self.bytes += TiledShape::new(ty, rows, cols, 1)?.packed_bytes();
        backend.create_matrix(MatrixSource { ggml_type: ty.id(), rows, cols, experts: 1, bytes: &bytes })
    }
}

/// A Q4_K_M model on the device, with an f16 cache.
pub struct DecodeModel<'a> {
    speed: &'a Speed,
    pub(super) backend: CudaBackend,
    shape: DecodeShape,
    layers: Vec<Layer>,
    pub(super) ops: ModelOps,
    /// Bytes of a block of all layers.
    stride: usize,
    blocks: usize,
    weight_bytes: usize,
}

impl Speed {
    /// Creates a model for steps of up to `rows` rows and sequences with `positions` positions in total.
    ///
    /// # Errors
    /// Errors of the compiler or the device, for example for too little memory.
    pub fn model(
        &self,
        arch: Arch,
        shape: DecodeShape,
        (rows, positions): (usize, usize),
        threads: usize,
    ) -> Result<DecodeModel<'_>, Error> {
        let compile = self.compile.clone();
        let config = CudaConfig { arch, activations: ActivationMode::Int8, threads };
        let mut backend =
            CudaBackend::new(Box::new(self.device.clone()), config, Box::new(move |source| compile(source)))?;
        let DecodeShape { hidden, heads, kv_heads, head_dim, ff, vocab, .. } = shape;
        let mut weights = Weights { random: random_bytes(1 << 20), bytes: 0 };
        let kv = KvShape {
            heads,
            kv_heads,
            head_dim,
            v_head_dim: head_dim,
            latent: false,
            block_tokens: BLOCK_TOKENS,
            kv_type: KvType::F16.into(),
            window: None,
            causal: true,
        };
        let kv_layer_bytes = backend.kv_block_bytes(kv)?;
        let (small, q_width, kv_width) = (GgmlType::Q4_K, heads * head_dim, kv_heads * head_dim);
        let mut layers = Vec::new();
        for layer in 0..shape.layers {
            let wide = shape.wide(layer);
            layers.push(Layer {
                cache: backend.create_kv_layer(0, kv, layer * kv_layer_bytes)?,
                q: weights.matrix(&mut backend, small, q_width, hidden)?,
                k: weights.matrix(&mut backend, small, kv_width, hidden)?,
                v: weights.matrix(&mut backend, wide, kv_width, hidden)?,
                out: weights.matrix(&mut backend, small, hidden, q_width)?,
                gate: weights.matrix(&mut backend, small, ff, hidden)?,
                up: weights.matrix(&mut backend, small, ff, hidden)?,
                down: weights.matrix(&mut backend, wide, hidden, ff)?,
            });
        }
        let head = weights.matrix(&mut backend, GgmlType::Q6_K, vocab, hidden)?;
        // Not counted: of the embedding table, a step reads only one row for each of its own.
        let weight_bytes = weights.bytes;
        let embedding = weights.matrix(&mut backend, small, vocab, hidden)?;
        let norm = backend.create_vector(&vec![1.0; hidden])?;
        let rope = backend.create_rope(RopeSource {
            interleaved: true,
            n_rot: head_dim,
            base: 500_000.0,
            freq_scale: 1.0,
            factors: None,
            magnitude: 1.0,
            axes: None,
        })?;
        let mut buffer = |cols: usize| backend.create_buffer(rows, cols);
        let buffers = StepBuffers {
            x: buffer(hidden)?,
            normed: buffer(hidden)?,
            q: buffer(q_width)?,
            k: buffer(kv_width)?,
            v: buffer(kv_width)?,
            mixed: buffer(q_width)?,
            gate: buffer(ff)?,
            up: buffer(ff)?,
            logits: buffer(vocab)?,
        };
        let (stride, blocks) = (shape.layers * kv_layer_bytes, positions.div_ceil(BLOCK_TOKENS));
        backend.create_kv_arena(blocks * stride, &[stride])?;
        Ok(DecodeModel {
            speed: self,
            backend,
            shape,
            layers,
            ops: ModelOps {
                buffers,
                embedding,
                head,
                norm: Norm { rms: true, weight: Some(norm), bias: None, eps: 1e-5, width: hidden },
                head_norm: None,
                rope,
                head_dim,
                scale: SCALE,
                experts: None,
            },
            stride,
            blocks,
            weight_bytes,
        })
    }
}

impl DecodeModel<'_> {
    /// Times steps of `batch` sequences with `rows` rows each, after `context` positions. The output head
    /// is computed only if sequences have one row.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] beyond the model's capacity; errors of the device.
    pub fn step(&mut self, batch: usize, context: usize, rows: usize) -> Result<DecodeSpeed, Error> {
        let each = (context + rows).div_ceil(BLOCK_TOKENS);
        if batch * each > self.blocks {
            return Err(Error::OutOfRange { what: "block", index: batch * each, len: self.blocks });
        }
        // Blocks of sequences that grow together are interleaved.
        let unit = |block: usize| (block * self.stride / OFFSET_UNIT) as u32;
        let tables: Vec<Vec<u32>> =
            (0..batch).map(|s| (0..each).map(|block| unit(block * batch + s)).collect()).collect();
        let tables = [tables.iter().map(|table| BlockTable::Paged(table)).collect()];
        let sequence =
            |s: usize| StepSequence { rows: s * rows..(s + 1) * rows, context, segment_start: None };
        let sequences: Vec<StepSequence> = (0..batch).map(sequence).collect();
        let tokens: Vec<u32> =
            (0..batch * rows).map(|i| ((i * 7919 + 11) % self.shape.vocab) as u32).collect();
        let input = StepInput { tokens: &tokens, sequences: &sequences, tables: &tables, states: &[] };
        // Work that is done once per step is part of the recording, so an untimed step begins before each
        // run.
        let head = rows == 1;
        let mut device = self.speed.device.clone();
        self.backend.begin_step(&input)?;
        self.ops(head)?;
        self.backend.begin_step(&input)?;
        device.synchronize()?;
        let graph = record(&mut device, |_| self.ops(head))?;
        let speed = self.speed;
        let eager = speed.seconds(|| {
            self.backend.begin_step(&input)?;
            self.ops(head)
        })?;
        let replayed = match graph {
            Some(graph) => {
                let seconds = speed.seconds(|| Ok(device.replay(graph)?))?;
                device.forget(graph);
                seconds
            }
            None => eager,
        };
        let kv_bytes = batch * each * self.stride;
        let head_bytes =
            TiledShape::new(GgmlType::Q6_K, self.shape.vocab, self.shape.hidden, 1)?.packed_bytes();
        let weight_bytes = self.weight_bytes - if head { 0 } else { head_bytes };
        Ok(DecodeSpeed { weight_bytes, kv_bytes, eager, graph: replayed })
    }

    fn ops(&mut self, head: bool) -> Result<(), Error> {
        let Self { backend, layers, ops, .. } = self;
        ops.embed(backend)?;
        layers.iter().try_for_each(|layer| ops.layer(backend, layer))?;
        ops.last_norm(backend, ops.buffers.x)?;
        if head { ops.head(backend) } else { Ok(()) }
    }
}
