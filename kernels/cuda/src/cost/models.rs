//! Steps of models in the shapes of published ones, on the backend that a worker uses.

use super::trace::{Launched, Trace, Tracer};
use crate::pack::TiledShape;
use crate::speed::ops::{Experts, Layer, ModelOps, StepBuffers};
use crate::tests::compiled;
use crate::{Arch, CudaBackend, CudaConfig};
use kernels::attention::OFFSET_UNIT;
use kernels::backend::{
    ActivationMode, Backend, BlockTable, GateActivation, KvShape, KvType, Norm, RopeSource, StepInput,
    StepSequence,
};
use kernels::quant::GgmlType;
use std::sync::{Arc, Mutex};

const BLOCK_TOKENS: usize = 16;

/// Feed-forward network of a layer.
#[derive(Debug, Clone, Copy)]
pub(super) enum Ffn {
    Dense { width: usize },
    Experts { width: usize, count: usize, used: usize, activation: GateActivation },
}

/// Shape of a model whose layers differ in the window and in the types of two matrices only.
#[derive(Debug, Clone, Copy)]
pub(super) struct Model {
    pub(super) name: &'static str,
    layers: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    ffn: Ffn,
    vocab: usize,
    /// Types of attention's matrices, the experts or the network, and the head.
    types: [GgmlType; 3],
    /// Whether a part of the value and down matrices is Q6_K, as in Q4_K_M.
    mixed: bool,
    /// Window of every other layer.
    window: Option<usize>,
    /// Whether queries and keys are normalised.
    head_norm: bool,
    pub(super) activations: ActivationMode,
}

pub(super) const LLAMA_8B: Model = Model {
    name: "Llama 3.1 8B, Q4_K_M",
    layers: 32,
    hidden: 4096,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    ffn: Ffn::Dense { width: 14_336 },
    vocab: 128_256,
    types: [GgmlType::Q4_K, GgmlType::Q4_K, GgmlType::Q6_K],
    mixed: true,
    window: None,
    head_norm: false,
    activations: ActivationMode::Int8,
};

/// The same with bf16 activations.
pub(super) const LLAMA_8B_BF16: Model =
    Model { name: "Llama 3.1 8B, Q4_K_M, bf16", activations: ActivationMode::Bf16, ..LLAMA_8B };

pub(super) const LLAMA_8B_NVFP4: Model = Model {
    name: "Llama 3.1 8B, NVFP4",
    types: [GgmlType::NVFP4, GgmlType::NVFP4, GgmlType::Q8_0],
    mixed: false,
    ..LLAMA_8B
};

/// The same with NVFP4 activations.
pub(super) const LLAMA_8B_W4A4: Model =
    Model { name: "Llama 3.1 8B, NVFP4, nvfp4", activations: ActivationMode::Nvfp4, ..LLAMA_8B_NVFP4 };

pub(super) const GPT_OSS_120B: Model = Model {
    name: "gpt-oss-120b, MXFP4",
    layers: 36,
    hidden: 2880,
    heads: 64,
    kv_heads: 8,
    head_dim: 64,
    ffn: Ffn::Experts { width: 2880, count: 128, used: 4, activation: GateActivation::ClampedSwiglu },
    vocab: 201_088,
    types: [GgmlType::Q8_0, GgmlType::MXFP4, GgmlType::Q8_0],
    mixed: false,
    window: Some(128),
    head_norm: false,
    activations: ActivationMode::Int8,
};

/// The same with MXFP8 activations.
pub(super) const GPT_OSS_120B_MXFP8: Model =
    Model { name: "gpt-oss-120b, MXFP4, mxfp8", activations: ActivationMode::Mxfp8, ..GPT_OSS_120B };

pub(super) const QWEN3_30B_A3B: Model = Model {
    name: "Qwen3-30B-A3B, Q4_K_M",
    layers: 48,
    hidden: 2048,
    heads: 32,
    kv_heads: 4,
    head_dim: 128,
    ffn: Ffn::Experts { width: 768, count: 128, used: 8, activation: GateActivation::Silu },
    vocab: 151_936,
    types: [GgmlType::Q4_K, GgmlType::Q4_K, GgmlType::Q6_K],
    mixed: true,
    window: None,
    head_norm: true,
    activations: ActivationMode::Int8,
};

/// Rows of a step: `batch` sequences of `rows` rows after `context` positions. The head is computed for the last row
/// of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) batch: usize,
    pub(super) rows: usize,
    pub(super) context: usize,
}

impl Step {
    pub(super) fn tokens(&self) -> usize {
        self.batch * self.rows
    }
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { batch, rows, context } = self;
        match (rows, context) {
            (1, 0) => write!(f, "batch {batch}"),
            (1, _) => write!(f, "batch {batch} at {context}"),
            (_, 0) => write!(f, "prompt of {rows}"),
            (_, _) => write!(f, "prompt of {rows} at {context}"),
        }
    }
}

/// Sizes of a step's products.
pub(super) struct Weights {
    /// Bytes of the matrices, if they do not depend on chance.
    pub(super) bytes: Option<f64>,
    /// Multiplications of the layers' 8-bit products.
    pub(super) multiplications: f64,
}

impl Model {
    /// Whether a layer's value and down matrices have more bits in Q4_K_M.
    fn wide(&self, layer: usize) -> bool {
        let eighth = self.layers / 8;
        self.mixed && (layer < eighth || layer >= 7 * self.layers / 8 || (layer - eighth) % 3 == 2)
    }

    fn windowed(&self, layer: usize) -> Option<usize> {
        self.window.filter(|_| layer.is_multiple_of(2))
    }

    /// Bytes of keys and values of one position and layer.
    fn kv_bytes(&self) -> usize {
        2 * 2 * self.kv_heads * self.head_dim
    }

    pub(super) fn kv_bytes_of_all_layers(&self) -> f64 {
        (self.layers * self.kv_bytes()) as f64
    }

    /// Returns what a step's products take by the model's shape.
    pub(super) fn weights(&self, step: Step) -> Weights {
        let Self { hidden, heads, kv_heads, head_dim, vocab, ffn, types: [small, inner, last], .. } = *self;
        let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let (ff, experts, used) = match ffn {
            Ffn::Dense { width } => (width, 1, 1),
            Ffn::Experts { width, count, used, .. } => (width, count, used),
        };
        let size = |ty, rows, cols| TiledShape::new(ty, rows, cols, 1).unwrap().packed_bytes();
        // A prompt reads all experts. With a few rows, chance decides how many.
        let read = match step.tokens() {
            1 => Some(used),
            tokens if tokens * used >= 16 * experts => Some(experts),
            _ => None,
        };
        let layer = |layer| {
            let wide = |ty| if self.wide(layer) { GgmlType::Q6_K } else { ty };
            let attention =
                size(small, q_width, hidden) + size(small, kv_width, hidden) + size(small, hidden, q_width);
            let network = 2 * size(inner, ff, hidden) + size(wide(inner), hidden, ff);
            let router = if experts > 1 { size(GgmlType::F32, experts, hidden) } else { 0 };
            Some(attention + size(wide(small), kv_width, hidden) + read? * network + router)
        };
        let bytes: Option<usize> = (0..self.layers).map(layer).sum();
        let bytes = bytes.map(|bytes| (bytes + size(last, vocab, hidden)) as f64);
        let each = 2 * hidden * (q_width + kv_width) + used * 3 * hidden * ff;
        Weights { bytes, multiplications: (self.layers * each * step.tokens()) as f64 }
    }

    /// Returns the launches of a step, and the trace that knows their instructions. Layers of one kind share their
    /// matrices and their cache: only addresses differ.
    pub(super) fn trace(
        &self,
        step: Step,
        arch: Arch,
        multiprocessors: usize,
    ) -> (Vec<Launched>, Arc<Mutex<Trace>>) {
        let trace = Trace::new(multiprocessors);
        let config = CudaConfig { arch, activations: self.activations, threads: 1 };
        let compile = Box::new(move |source: &crate::source::Source| Ok(compiled(source, arch).clone()));
        let mut backend =
            CudaBackend::new(Box::new(Tracer(trace.clone())), config, compile).unwrap().without_graphs();
        let Self { hidden, heads, kv_heads, head_dim, vocab, ffn, types, .. } = *self;
        let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let (ff, experts) = match ffn {
            Ffn::Dense { width } => (width, 1),
            Ffn::Experts { width, count, .. } => (width, count),
        };
        let kinds: Vec<(bool, Option<usize>)> = {
            let mut kinds: Vec<_> =
                (0..self.layers).map(|layer| (self.wide(layer), self.windowed(layer))).collect();
            kinds.sort_unstable();
            kinds.dedup();
            kinds
        };
        trace.lock().unwrap().allocates_cold = true;
        let mut matrix = |ty: GgmlType, rows: usize, cols: usize, experts: usize| {
            backend.reserve_matrix(TiledShape::new(ty, rows, cols, experts).unwrap()).unwrap()
        };
        let [small, inner, last] = types;
        let shared = [
            matrix(small, q_width, hidden, 1),
            matrix(small, kv_width, hidden, 1),
            matrix(small, hidden, q_width, 1),
            matrix(inner, ff, hidden, experts),
            matrix(inner, ff, hidden, experts),
        ];
        let own = [false, true].map(|wide| {
            let pick = |ty| if wide && self.mixed { GgmlType::Q6_K } else { ty };
            [matrix(pick(small), kv_width, hidden, 1), matrix(pick(inner), hidden, ff, experts)]
        });
        let (head, embedding) = (matrix(last, vocab, hidden, 1), matrix(small, vocab, hidden, 1));
        let router = matrix(GgmlType::F32, experts, hidden, 1);
        let shape = |window| KvShape {
            heads,
            kv_heads,
            head_dim,
            v_head_dim: head_dim,
            latent: false,
            block_tokens: BLOCK_TOKENS,
            kv_type: KvType::F16.into(),
            window,
            causal: true,
        };
        let layer_bytes = backend.kv_block_bytes(shape(None)).unwrap();
        let layers: Vec<Layer> = kinds
            .iter()
            .enumerate()
            .map(|(index, &(wide, window))| {
                let [v, down] = own[usize::from(wide)];
                let cache = backend.create_kv_layer(0, shape(window), index * layer_bytes).unwrap();
                let [q, k, out, gate, up] = shared;
                Layer { cache, q, k, v, out, gate, up, down }
            })
            .collect();
        let stride = kinds.len() * layer_bytes;
        let each = (step.context + step.rows).div_ceil(BLOCK_TOKENS);
        backend.create_kv_arena(step.batch * each * stride, &[stride]).unwrap();
        trace.lock().unwrap().allocates_cold = false;
        let rope = RopeSource {
            interleaved: true,
            n_rot: head_dim,
            base: 500_000.0,
            freq_scale: 1.0,
            factors: None,
            magnitude: 1.0,
            axes: None,
        };
        let rope = backend.create_rope(rope).unwrap();
        let weight = backend.create_vector(&vec![1.0; hidden]).unwrap();
        let head_weight = backend.create_vector(&vec![1.0; head_dim]).unwrap();
        let norm = |weight, width| Norm { rms: true, weight: Some(weight), bias: None, eps: 1e-5, width };
        let head_norm = self.head_norm.then_some(norm(head_weight, head_dim));
        let norm = norm(weight, hidden);
        let rows = step.tokens();
        let mut buffer = |cols: usize| backend.create_buffer(rows, cols).unwrap();
        let [x, normed, last_rows] = [hidden, hidden, hidden].map(&mut buffer);
        let [q, k, v, mixed] = [q_width, kv_width, kv_width, q_width].map(&mut buffer);
        let [gate, up, routed] = [ff, ff, experts].map(&mut buffer);
        let logits = backend.create_buffer(step.batch, vocab).unwrap();

        let unit = |block: usize| (block * stride / OFFSET_UNIT) as u32;
        let tables: Vec<Vec<u32>> =
            (0..step.batch).map(|s| (0..each).map(|block| unit(block * step.batch + s)).collect()).collect();
        let tables = [tables.iter().map(|table| BlockTable::Paged(table)).collect()];
        let sequences: Vec<StepSequence> = (0..step.batch)
            .map(|s| StepSequence {
                rows: s * step.rows..(s + 1) * step.rows,
                context: step.context,
                segment_start: None,
            })
            .collect();
        let tokens: Vec<u32> = (0..rows).map(|i| ((i * 7919 + 11) % vocab) as u32).collect();
        backend
            .begin_step(&StepInput { tokens: &tokens, sequences: &sequences, tables: &tables, states: &[] })
            .unwrap();
        let experts = match ffn {
            Ffn::Dense { .. } => None,
            Ffn::Experts { width, used, activation, .. } => {
                Some(Experts { router, routed, used, width, activation })
            }
        };
        let buffers = StepBuffers { x, normed, q, k, v, mixed, gate, up, logits };
        let ops = ModelOps { buffers, embedding, head, norm, head_norm, rope, head_dim, scale: 1.0, experts };
        ops.embed(&mut backend).unwrap();
        for number in 0..self.layers {
            let kind @ (_, window) = (self.wide(number), self.windowed(number));
            let seen = (step.context + step.rows).min(window.map_or(usize::MAX, |window| window + step.rows));
            trace.lock().unwrap().kv_bytes = (step.batch * seen * self.kv_bytes()) as f64;
            ops.layer(&mut backend, &layers[kinds.binary_search(&kind).unwrap()]).unwrap();
        }
        let ends: Vec<u32> = (1..=step.batch).map(|s| (s * step.rows - 1) as u32).collect();
        backend.gather_rows(x, &ends, last_rows).unwrap();
        ops.last_norm(&mut backend, last_rows).unwrap();
        ops.head(&mut backend).unwrap();
        backend.best(logits, &mut Vec::new()).unwrap();
        let launched = trace.lock().unwrap().take();
        (launched, trace)
    }
}
