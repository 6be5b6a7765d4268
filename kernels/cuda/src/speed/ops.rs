//! The operations of a model's step: attention and a feed-forward network in each layer. Benchmarks and predictions of
//! costs run them.

use crate::CudaBackend;
use kernels::Error;
use kernels::backend::{
    AttentionOp, Backend, BufferId, EmbedIndex, EmbedOp, ExpertGateUp, GateActivation, GateOp, KvLayerId,
    KvWrite, MatmulJob, MatrixId, MoeOp, Norm, QkvOp, RopeId, Selection,
};

/// Matrices and cache of a layer.
pub(crate) struct Layer {
    pub(crate) cache: KvLayerId,
    pub(crate) q: MatrixId,
    pub(crate) k: MatrixId,
    pub(crate) v: MatrixId,
    pub(crate) out: MatrixId,
    pub(crate) gate: MatrixId,
    pub(crate) up: MatrixId,
    pub(crate) down: MatrixId,
}

/// Buffers for the rows of a step.
pub(crate) struct StepBuffers {
    pub(crate) x: BufferId,
    pub(crate) normed: BufferId,
    pub(crate) q: BufferId,
    pub(crate) k: BufferId,
    pub(crate) v: BufferId,
    pub(crate) mixed: BufferId,
    pub(crate) gate: BufferId,
    pub(crate) up: BufferId,
    pub(crate) logits: BufferId,
}

/// Experts of a layer, of which a router selects some for each row.
#[derive(Clone, Copy)]
pub(crate) struct Experts {
    pub(crate) router: MatrixId,
    /// The router's results.
    pub(crate) routed: BufferId,
    pub(crate) used: usize,
    /// Width of an expert.
    pub(crate) width: usize,
    pub(crate) activation: GateActivation,
}

/// Buffers, tables and settings that the layers of a model share.
pub(crate) struct ModelOps {
    pub(crate) buffers: StepBuffers,
    pub(crate) embedding: MatrixId,
    pub(crate) head: MatrixId,
    pub(crate) norm: Norm,
    /// Norm of each head of queries and keys.
    pub(crate) head_norm: Option<Norm>,
    pub(crate) rope: RopeId,
    pub(crate) head_dim: usize,
    /// Factor of all products.
    pub(crate) scale: f32,
    /// `None` for one network in each layer.
    pub(crate) experts: Option<Experts>,
}

impl ModelOps {
    fn job(&self, matrix: MatrixId, out: BufferId) -> MatmulJob {
        MatmulJob { matrix, out, bias: None, scale: self.scale, accumulate: false }
    }

    fn added(&self, matrix: MatrixId) -> MatmulJob {
        MatmulJob { accumulate: true, ..self.job(matrix, self.buffers.x) }
    }

    pub(crate) fn embed(&self, backend: &mut CudaBackend) -> Result<(), Error> {
        let (index, out) = (EmbedIndex::Token, self.buffers.x);
        backend.embed(&EmbedOp { table: self.embedding, index, scale: self.scale, accumulate: false, out })
    }

    pub(crate) fn layer(&self, backend: &mut CudaBackend, layer: &Layer) -> Result<(), Error> {
        let b = &self.buffers;
        backend.norm_for(b.x, &self.norm, b.normed, &[layer.q, layer.k, layer.v])?;
        let products = [(layer.q, b.q), (layer.k, b.k), (layer.v, b.v)];
        backend.matmul(b.normed, &products.map(|(matrix, out)| self.job(matrix, out)))?;
        let kv = Some(KvWrite { k: b.k, v: b.v, k_norm: self.head_norm, v_norm: None });
        let (q, q_norm, rope) = (b.q, self.head_norm, Some(self.rope));
        backend.qkv(&QkvOp { q, q_norm, kv, rope, q_growth: None, layer: layer.cache })?;
        let (out, scale) = (b.mixed, 1.0 / (self.head_dim as f32).sqrt());
        backend.attention(&AttentionOp { q, out, scale, softcap: None, sinks: None, layer: layer.cache })?;
        backend.matmul(b.mixed, &[self.added(layer.out)])?;
        match &self.experts {
            None => {
                backend.norm_for(b.x, &self.norm, b.normed, &[layer.gate, layer.up])?;
                backend.matmul(b.normed, &[self.job(layer.gate, b.gate), self.job(layer.up, b.up)])?;
                let (up, activation) = (Some(b.up), GateActivation::Silu);
                backend.gate_for(&GateOp { gate: b.gate, up, up_from: 0, activation }, &[layer.down])?;
                backend.matmul(b.gate, &[self.added(layer.down)])
            }
            Some(experts) => {
                backend.norm(b.x, &self.norm, b.normed)?;
                backend.matmul(b.normed, &[self.job(experts.router, experts.routed)])?;
                let gate_up = ExpertGateUp::Separate {
                    gate: layer.gate,
                    up: layer.up,
                    gate_scale: None,
                    up_scale: None,
                    gate_bias: None,
                    up_bias: None,
                };
                backend.moe(&MoeOp {
                    x: b.normed,
                    router: experts.routed,
                    out: b.x,
                    accumulate: true,
                    scale: self.scale,
                    used: experts.used,
                    selection: Selection::default(),
                    renormalise: true,
                    gate_up,
                    down: layer.down,
                    down_scale: None,
                    down_bias: None,
                    ff: experts.width,
                    activation: experts.activation,
                })
            }
        }
    }

    /// Normalises `rows` for the head.
    pub(crate) fn last_norm(&self, backend: &mut CudaBackend, rows: BufferId) -> Result<(), Error> {
        backend.norm(rows, &self.norm, self.buffers.normed)
    }

    pub(crate) fn head(&self, backend: &mut CudaBackend) -> Result<(), Error> {
        backend.matmul(self.buffers.normed, &[self.job(self.head, self.buffers.logits)])
    }
}
