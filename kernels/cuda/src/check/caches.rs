//! Cases of operations over the arena: keys and values, recurrent states.

use super::{Inputs, Output};
use kernels::Error;
use kernels::backend::{
    AttentionOp, BlockTable, BufferId, ConvOp, DeltaNetOp, HeadType, KvCopy, KvLayerId, KvShape, KvType,
    KvTypes, KvWrite, Mamba2Op, Norm, QkvOp, QueryGrowth, RopeSource, StateExport, StateKind, StateLayerId,
    StateShape, StepInput, StepSequence, StepState,
};

const BLOCK: usize = 16;
const SCALE: f32 = 0.125;
/// Tolerance: keys and values are rounded equally on both sides; the softmax is summed in another order.
const ATTENTION: f64 = 1e-3;
/// Tolerance: states are carried from row to row in f32.
const STATES: f64 = 1e-4;

/// An attention layer: heads, key/value heads, their widths, and its visibility.
#[derive(Debug, Clone, Copy)]
pub(super) struct KvLayer {
    kv_type: KvTypes,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    v_head_dim: usize,
    latent: bool,
    window: Option<usize>,
    causal: bool,
}

const PLAIN: KvLayer = KvLayer {
    kv_type: KvTypes::both(KvType::F16),
    heads: 4,
    kv_heads: 2,
    head_dim: 64,
    v_head_dim: 64,
    latent: false,
    window: None,
    causal: true,
};

pub(super) const KV_LAYERS: [KvLayer; 18] = [
    PLAIN,
    KvLayer { kv_type: KvTypes::both(KvType::F32), heads: 3, kv_heads: 1, ..PLAIN },
    KvLayer { kv_type: KvTypes::both(KvType::Q8_0), heads: 2, head_dim: 128, v_head_dim: 128, ..PLAIN },
    KvLayer { window: Some(20), heads: 8, kv_heads: 1, ..PLAIN },
    KvLayer { head_dim: 96, v_head_dim: 80, ..PLAIN },
    KvLayer {
        kv_type: KvTypes::both(KvType::F32),
        head_dim: 256,
        v_head_dim: 256,
        heads: 2,
        kv_heads: 1,
        ..PLAIN
    },
    KvLayer {
        kv_type: KvTypes::both(KvType::F32),
        heads: 2,
        head_dim: 32,
        v_head_dim: 32,
        causal: false,
        ..PLAIN
    },
    KvLayer { heads: 2, head_dim: 32, v_head_dim: 32, causal: false, window: Some(9), ..PLAIN },
    KvLayer { kv_heads: 1, head_dim: 72, v_head_dim: 64, latent: true, ..PLAIN },
    KvLayer {
        kv_type: KvTypes::both(KvType::F32),
        kv_heads: 1,
        head_dim: 48,
        v_head_dim: 40,
        latent: true,
        ..PLAIN
    },
    KvLayer {
        kv_type: KvTypes::both(KvType::Q8_0),
        kv_heads: 1,
        head_dim: 80,
        v_head_dim: 56,
        latent: true,
        ..PLAIN
    },
    KvLayer {
        kv_type: KvTypes::both(KvType::Fp8),
        kv_heads: 1,
        head_dim: 72,
        v_head_dim: 64,
        latent: true,
        ..PLAIN
    },
    KvLayer { kv_type: KvTypes::both(KvType::Fp8), ..PLAIN },
    KvLayer {
        kv_type: KvTypes::both(KvType::Fp8),
        heads: 3,
        kv_heads: 1,
        head_dim: 40,
        v_head_dim: 72,
        ..PLAIN
    },
    KvLayer { kv_type: KvTypes::both(KvType::Q4_0), ..PLAIN },
    KvLayer { kv_type: KvTypes::both(KvType::Q4_0), head_dim: 96, v_head_dim: 72, ..PLAIN },
    KvLayer {
        kv_type: KvTypes { k: KvType::Q8_0, v: KvType::Q4_0 },
        head_dim: 128,
        v_head_dim: 128,
        ..PLAIN
    },
    KvLayer {
        kv_type: KvTypes::both(KvType::Q4_0),
        kv_heads: 1,
        head_dim: 80,
        v_head_dim: 56,
        latent: true,
        ..PLAIN
    },
];

/// Two sequences with a prompt each and then, for causal layers, one row each: norms, rotation, writing and
/// reading, over blocks in no particular order.
pub(super) fn attention(inputs: &mut Inputs<'_>, layer: KvLayer) -> Result<(), Error> {
    let KvLayer { kv_type, heads, kv_heads, head_dim, v_head_dim, latent, window, causal } = layer;
    let shape = KvShape {
        heads,
        kv_heads,
        head_dim,
        v_head_dim,
        latent,
        block_tokens: BLOCK,
        kv_type,
        window,
        causal,
    };
    let block = inputs.backend.kv_block_bytes(shape)?;
    let id = inputs.backend.create_kv_layer(0, shape, 0)?;
    let rope = inputs.backend.create_rope(RopeSource {
        interleaved: heads == 4,
        n_rot: head_dim / 2,
        base: 10_000.0,
        freq_scale: 1.0,
        factors: None,
        magnitude: 1.0,
        axes: None,
    })?;
    let norm_weight = inputs.vector(head_dim)?;
    let norm = Norm { rms: true, weight: Some(norm_weight), bias: None, eps: 1e-6, width: head_dim };
    let sinks = inputs.vector(heads)?;
    inputs.backend.create_kv_arena(8 * block, &[block])?;
    let units = |number: usize| (number * block / 64) as u32;
    let (first, second) = ([5, 1, 6].map(units), [2, 7].map(units));
    let tables = vec![vec![BlockTable::Paged(&first), BlockTable::Paged(&second)]];
    let steps: &[[(usize, usize); 2]] =
        if causal { &[[(0, 37), (0, 5)], [(37, 1), (5, 1)]] } else { &[[(0, 30), (0, 5)]] };
    for (number, [(context, rows), (other_context, other_rows)]) in steps.iter().enumerate() {
        let all = rows + other_rows;
        let sequences = [
            StepSequence { rows: 0..*rows, context: *context, segment_start: None },
            StepSequence { rows: *rows..all, context: *other_context, segment_start: None },
        ];
        let tokens = vec![0; all];
        let step = StepInput { tokens: &tokens, sequences: &sequences, tables: &tables, states: &[] };
        inputs.backend.begin_step(&step)?;
        let q = inputs.rows(all, heads * head_dim)?;
        let k = inputs.rows(all, kv_heads * head_dim)?;
        let v = if latent { k } else { inputs.rows(all, kv_heads * v_head_dim)? };
        let kv = Some(KvWrite { k, v, k_norm: Some(norm), v_norm: None });
        inputs.backend.qkv(&QkvOp {
            q,
            q_norm: Some(norm),
            kv,
            rope: Some(rope),
            q_growth: causal.then_some(QueryGrowth { beta: 0.3, every: 16 }),
            layer: id,
        })?;
        let what = format!("{layer:?}, {rows} and {other_rows} rows");
        inputs.keep("qkv", what.clone(), 1e-5, (q, all, heads * head_dim))?;
        let out = inputs.backend.create_buffer(all, heads * v_head_dim)?;
        let (scale, sinks) = (SCALE, (kv_type == KvType::F16.into()).then_some(sinks));
        inputs.backend.attention(&AttentionOp { q, out, scale, softcap: None, sinks, layer: id })?;
        inputs.keep("attention", what, ATTENTION, (out, all, heads * v_head_dim))?;
        if number + 1 < steps.len() {
            continue;
        }
        // Repeats the attention with a copy of a block, after the original was overwritten.
        let (from, to) = (units(5), units(3));
        inputs.backend.copy_kv(&[KvCopy { group: 0, from, to }])?;
        inputs.backend.write_arena(from, &vec![0x3c; block])?;
        let copied = [3, 1, 6].map(units);
        let tables = vec![vec![BlockTable::Paged(&copied), BlockTable::Paged(&second)]];
        inputs.backend.begin_step(&StepInput { tables: &tables, ..step })?;
        inputs.backend.attention(&AttentionOp { q, out, scale, softcap: None, sinks, layer: id })?;
        inputs.keep("copy_kv", format!("{layer:?}"), ATTENTION, (out, all, heads * v_head_dim))?;
    }
    Ok(())
}

/// Returns a layer for each element type and head width that kernels are compiled for, and one of two types, each with
/// the rows of its steps. The last layers have prompts that are long enough for the kernels for prompts on any GPU.
pub(super) fn long_layers() -> impl Iterator<Item = (KvLayer, &'static [usize])> {
    let around = KvLayer { heads: 1, kv_heads: 1, window: Some(9), causal: false, ..PLAIN };
    let arounds = [KvType::F32, KvType::F16, KvType::Q8_0]
        .map(|kv_type| KvLayer { kv_type: KvTypes::both(kv_type), ..around });
    let apart = KvTypes { k: KvType::Q8_0, v: KvType::Q4_0 };
    let apart = KvLayer { kv_type: apart, heads: 1, kv_heads: 1, head_dim: 128, v_head_dim: 128, ..PLAIN };
    let same = KvType::ALL.map(KvTypes::both).into_iter().flat_map(|kv_type| {
        [(64, 64), (128, 128), (256, 256), (512, 512), (576, 512)].map(|(head_dim, v_head_dim)| KvLayer {
            kv_type,
            heads: 1,
            kv_heads: 1,
            head_dim,
            v_head_dim,
            latent: head_dim > v_head_dim,
            ..PLAIN
        })
    });
    let prompts: [(usize, &[usize]); 3] = [(64, &[70, 200]), (128, &[70, 200]), (256, &[70, 100])];
    let prompts = prompts.map(|(width, rows)| {
        (KvLayer { heads: 32, kv_heads: 16, head_dim: width, v_head_dim: width, ..PLAIN }, rows)
    });
    let rows = |layer: KvLayer| -> (_, &[usize]) {
        (layer, if layer.causal { &[515, 1, 2, 4, 8] } else { &[520, 1, 2] })
    };
    same.chain([apart]).chain(arounds).map(rows).chain(prompts)
}

/// Single and multiple rows, most of which see more keys than one split has. Without causality whole sequences, one of
/// which is longer than a split.
pub(super) fn long_attention(inputs: &mut Inputs<'_>, layer: KvLayer, steps: &[usize]) -> Result<(), Error> {
    let KvLayer { kv_type, heads, kv_heads, head_dim, v_head_dim, latent, window, causal } = layer;
    let block_tokens = 64;
    let shape =
        KvShape { heads, kv_heads, head_dim, v_head_dim, latent, block_tokens, kv_type, window, causal };
    let block = inputs.backend.kv_block_bytes(shape)?;
    let id = inputs.backend.create_kv_layer(0, shape, 0)?;
    let end: usize = steps.iter().sum();
    let blocks = end.div_ceil(block_tokens);
    inputs.backend.create_kv_arena(blocks * block, &[block])?;
    let table: Vec<u32> = (0..blocks).rev().map(|block_index| (block_index * block / 64) as u32).collect();
    let tables = vec![vec![BlockTable::Paged(&table)]];
    // Runs that are not whole heads.
    let weight = Some(inputs.vector(head_dim / 2)?);
    let norm = Norm { rms: true, weight, bias: None, eps: 1e-6, width: head_dim / 2 };
    let mut context = 0;
    for &rows in steps {
        let sequences = [StepSequence { rows: 0..rows, context, segment_start: None }];
        let tokens = vec![0; rows];
        let step = StepInput { tokens: &tokens, sequences: &sequences, tables: &tables, states: &[] };
        inputs.backend.begin_step(&step)?;
        let q = inputs.rows(rows, heads * head_dim)?;
        let k = inputs.rows(rows, kv_heads * head_dim)?;
        let v = if latent { k } else { inputs.rows(rows, kv_heads * v_head_dim)? };
        let kv = Some(KvWrite { k, v, k_norm: Some(norm), v_norm: None });
        inputs.backend.qkv(&QkvOp { q, q_norm: Some(norm), kv, rope: None, q_growth: None, layer: id })?;
        // The first step only fills the cache; its keys are what the later steps see.
        if context > 0 || !causal {
            let out = inputs.backend.create_buffer(rows, heads * v_head_dim)?;
            inputs.backend.attention(&AttentionOp {
                q,
                out,
                scale: SCALE,
                softcap: None,
                sinks: None,
                layer: id,
            })?;
            let what = format!("{layer:?}, {rows} rows after {context}");
            inputs.keep("attention", what, ATTENTION, (out, rows, heads * v_head_dim))?;
            if causal && Some(&rows) == steps.last() {
                alone(
                    inputs,
                    (q, out),
                    id,
                    (&tables, context, rows.min(8)),
                    (heads * head_dim, heads * v_head_dim),
                )?;
            }
        }
        context += if causal { rows } else { 0 };
    }
    Ok(())
}

/// Computes the same rows one by one. On any device the bits are the same.
fn alone(
    inputs: &mut Inputs<'_>,
    (q, out): (BufferId, BufferId),
    layer: KvLayerId,
    (tables, context, rows): (&[Vec<BlockTable<'_>>], usize, usize),
    (q_width, out_width): (usize, usize),
) -> Result<(), Error> {
    let (one_q, one_out) = (inputs.rows(1, q_width)?, inputs.backend.create_buffer(1, out_width)?);
    let (mut query, mut together, mut alone) =
        (vec![0.0; q_width], vec![0.0; out_width], vec![0.0; out_width]);
    let mut differing = 0;
    for row in 0..rows {
        inputs.backend.read_row(q, row, &mut query)?;
        inputs.backend.read_row(out, row, &mut together)?;
        inputs.backend.write_rows(one_q, &query)?;
        let sequences = [StepSequence { rows: 0..1, context: context + row, segment_start: None }];
        inputs.backend.begin_step(&StepInput { tokens: &[0], sequences: &sequences, tables, states: &[] })?;
        let (scale, sinks) = (SCALE, None);
        inputs.backend.attention(&AttentionOp {
            q: one_q,
            out: one_out,
            scale,
            softcap: None,
            sinks,
            layer,
        })?;
        inputs.backend.read_row(one_out, 0, &mut alone)?;
        differing += together.iter().zip(&alone).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    }
    let what = "values of rows alone that differ from those of rows together".to_owned();
    inputs.outputs.push(Output { op: "attention", what, tolerance: 0.0, values: vec![differing as f32] });
    Ok(())
}

/// Single rows of sequences with a common beginning: over shared blocks, and over copies of them.
pub(super) fn shared_beginning(inputs: &mut Inputs<'_>) -> Result<(), Error> {
    const CONTEXTS: [usize; 6] = [1099, 1040, 600, 1030, 1099, 1060];
    let layer = KvLayer { heads: 4, kv_heads: 1, ..PLAIN };
    let KvLayer { kv_type, heads, kv_heads, head_dim, v_head_dim, latent, window, causal } = layer;
    let block_tokens = 64;
    let shape =
        KvShape { heads, kv_heads, head_dim, v_head_dim, latent, block_tokens, kv_type, window, causal };
    let block = inputs.backend.kv_block_bytes(shape)?;
    let id = inputs.backend.create_kv_layer(0, shape, 0)?;
    let blocks = (CONTEXTS[0] + 1).div_ceil(block_tokens);
    inputs.backend.create_kv_arena(CONTEXTS.len() * blocks * block, &[block])?;
    let of = |sequence: usize, at: usize| ((sequence * blocks + at) * block / 64) as u32;
    let table = |sequence: usize, from: usize| -> Vec<u32> {
        (0..blocks).map(|at| of(if at < from { 0 } else { sequence }, at)).collect()
    };

    let first = table(0, 0);
    let tables = vec![vec![BlockTable::Paged(&first)]];
    let rows = CONTEXTS[0] + 1;
    let sequences = [StepSequence { rows: 0..rows, context: 0, segment_start: None }];
    let tokens = vec![0; rows];
    inputs.backend.begin_step(&StepInput {
        tokens: &tokens,
        sequences: &sequences,
        tables: &tables,
        states: &[],
    })?;
    let q = inputs.rows(rows, heads * head_dim)?;
    let (k, v) = (inputs.rows(rows, kv_heads * head_dim)?, inputs.rows(rows, kv_heads * v_head_dim)?);
    let kv = Some(KvWrite { k, v, k_norm: None, v_norm: None });
    inputs.backend.qkv(&QkvOp { q, q_norm: None, kv, rope: None, q_growth: None, layer: id })?;
    let copy = |sequence, at| KvCopy { group: 0, from: of(0, at), to: of(sequence, at) };
    let copies: Vec<_> =
        (1..CONTEXTS.len()).flat_map(|sequence| (0..blocks).map(move |at| copy(sequence, at))).collect();
    inputs.backend.copy_kv(&copies)?;

    let rows = CONTEXTS.len();
    let sequences: Vec<_> = CONTEXTS
        .iter()
        .enumerate()
        .map(|(row, context)| StepSequence { rows: row..row + 1, context: *context, segment_start: None })
        .collect();
    let q = inputs.rows(rows, heads * head_dim)?;
    let width = heads * v_head_dim;
    let mut found = Vec::new();
    for shared in [true, false] {
        let blocks = |context: usize| if shared { context / block_tokens } else { 0 };
        let owned: Vec<_> =
            CONTEXTS.iter().enumerate().map(|(row, context)| table(row, blocks(*context))).collect();
        let tables: Vec<Vec<BlockTable<'_>>> =
            vec![owned.iter().map(|table| BlockTable::Paged(table)).collect()];
        let tokens = vec![0; rows];
        let step = StepInput { tokens: &tokens, sequences: &sequences, tables: &tables, states: &[] };
        inputs.backend.begin_step(&step)?;
        let out = inputs.backend.create_buffer(rows, width)?;
        inputs.backend.attention(&AttentionOp {
            q,
            out,
            scale: SCALE,
            softcap: None,
            sinks: None,
            layer: id,
        })?;
        let what = format!("{layer:?}, sequences that begin alike, blocks in common: {shared}");
        inputs.keep("attention", what, ATTENTION, (out, rows, width))?;
        let mut values = vec![0.0; rows * width];
        for (row, values) in values.chunks_exact_mut(width).enumerate() {
            inputs.backend.read_row(out, row, values)?;
        }
        found.push(values);
    }
    let differing = found[0].iter().zip(&found[1]).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    let what = "values over blocks in common that differ from those over copies".to_owned();
    inputs.outputs.push(Output { op: "attention", what, tolerance: 0.0, values: vec![differing as f32] });
    Ok(())
}

/// State updates of two sequences.
struct States {
    layer: StateLayerId,
    shape: StateShape,
    slot_units: u32,
}

impl States {
    fn new(inputs: &mut Inputs<'_>, shape: StateShape) -> Result<Self, Error> {
        let heads: Vec<_> =
            (0..shape.heads).map(|head| if head == 0 { HeadType::Bf16 } else { HeadType::F32 }).collect();
        let bytes = inputs.backend.state_bytes(shape, &heads)?;
        let layer = inputs.backend.create_state_layer(shape, &heads, 0)?;
        inputs.backend.create_kv_arena(8 * bytes, &[bytes])?;
        Ok(Self { layer, shape, slot_units: (bytes / 64) as u32 })
    }

    fn slot(&self, number: u32) -> u32 {
        number * self.slot_units
    }

    /// Begins step `number`: a prompt with an exported state, one row each, deferred rows, rows of others
    /// meanwhile, more deferred rows.
    fn begin(&self, inputs: &mut Inputs<'_>, number: usize) -> Result<usize, Error> {
        let at = |read: Option<u32>, write: u32| StepState {
            read: read.map(|slot| self.slot(slot)),
            write: self.slot(write),
            ..StepState::default()
        };
        let export = StateExport { row: 4, slot: self.slot(6) };
        let deferred = |state| StepState { deferred: true, ..state };
        let (lengths, states) = match number {
            0 => ([7, 2], [StepState { exports: vec![export], ..at(None, 1) }, at(None, 2)]),
            1 => ([1, 1], [at(Some(1), 1), at(Some(2), 3)]),
            2 => ([4, 3], [deferred(at(Some(1), 1)), deferred(at(Some(3), 4))]),
            3 => ([3, 1], [at(Some(2), 5), at(Some(6), 6)]),
            _ => ([3, 2], [deferred(at(Some(2), 2)), deferred(at(Some(6), 7))]),
        };
        let all = lengths[0] + lengths[1];
        let sequences = [
            StepSequence { rows: 0..lengths[0], context: 0, segment_start: None },
            StepSequence { rows: lengths[0]..all, context: 0, segment_start: None },
        ];
        let tokens = vec![0; all];
        inputs.backend.begin_step(&StepInput {
            tokens: &tokens,
            sequences: &sequences,
            tables: &[],
            states: &states,
        })?;
        Ok(all)
    }

    /// After a step: keeps the states as results. The rows' outputs are kept already.
    fn end(&self, inputs: &mut Inputs<'_>, op: &'static str, number: usize) -> Result<(), Error> {
        let slots: &[u32] = match number {
            0 => &[1, 2, 6],
            1 => &[1, 3],
            2 => &[],
            3 => &[5, 6],
            _ => {
                inputs.backend.accept(&[2, 0])?;
                inputs.backend.accept(&[1, 2])?;
                &[1, 4, 2, 7]
            }
        };
        for slot in slots {
            let mut conv = vec![0.0; self.shape.conv_len()];
            let mut matrices = vec![0.0; self.shape.recurrent_len()];
            inputs.backend.read_state(self.layer, self.slot(*slot), &mut conv, &mut matrices)?;
            // `accept` has written the deferred states.
            let (of_conv, of_op) = if number < 4 { ("conv", op) } else { ("accept", "accept") };
            let results = [(of_conv, conv, 1e-6), (of_op, matrices, STATES)];
            inputs.outputs.extend(results.map(|(by, values, tolerance)| {
                let what = format!("{op}, state {slot} after step {number}");
                Output { op: by, what, tolerance, values }
            }));
        }
        Ok(())
    }
}

/// Delta net with keys of width `k_dim`, over which it sums.
pub(super) fn delta_net(inputs: &mut Inputs<'_>, k_dim: usize) -> Result<(), Error> {
    let (k_heads, heads, v_dim, taps) = (2, 4, 32, 4);
    let channels = 2 * k_heads * k_dim + heads * v_dim;
    let shape = StateShape { kind: StateKind::DeltaNet, channels, taps, heads, rows: k_dim, cols: v_dim };
    let (weight, dt_bias) = (inputs.vector(channels * taps)?, inputs.vector(heads)?);
    let a = below_zero(inputs, heads)?;
    let states = States::new(inputs, shape)?;
    for number in 0..5 {
        let rows = states.begin(inputs, number)?;
        let (qkv, beta) = (inputs.rows(rows, channels)?, inputs.rows(rows, heads)?);
        let (alpha, out) = (inputs.rows(rows, heads)?, inputs.backend.create_buffer(rows, heads * v_dim)?);
        inputs.backend.conv(&ConvOp { x: qkv, weight, bias: None, silu: true, layer: states.layer })?;
        inputs.keep("conv", format!("delta net of {k_dim}, step {number}"), STATES, (qkv, rows, channels))?;
        let tiled = number == 0;
        let op = DeltaNetOp {
            qkv,
            beta,
            alpha,
            a,
            dt_bias,
            k_heads,
            tiled,
            l2_eps: 1e-6,
            out,
            layer: states.layer,
        };
        inputs.backend.delta_net(&op)?;
        inputs.keep("delta_net", format!("{k_dim}, step {number}"), STATES, (out, rows, heads * v_dim))?;
        states.end(inputs, "delta_net", number)?;
    }
    Ok(())
}

/// Mamba-2 with states of width `state`, over which it sums.
pub(super) fn mamba2(inputs: &mut Inputs<'_>, state: usize) -> Result<(), Error> {
    let (groups, heads, head_dim, taps) = (2, 4, 32, 4);
    let channels = heads * head_dim + 2 * groups * state;
    let shape = StateShape { kind: StateKind::Mamba2, channels, taps, heads, rows: head_dim, cols: state };
    let (weight, bias) = (inputs.vector(channels * taps)?, inputs.vector(channels)?);
    let (d, dt_bias) = (inputs.vector(heads)?, inputs.vector(heads)?);
    let a = below_zero(inputs, heads)?;
    let states = States::new(inputs, shape)?;
    for number in 0..5 {
        let rows = states.begin(inputs, number)?;
        let (xbc, dt) = (inputs.rows(rows, channels)?, inputs.rows(rows, heads)?);
        let out = inputs.backend.create_buffer(rows, heads * head_dim)?;
        inputs.backend.conv(&ConvOp { x: xbc, weight, bias: Some(bias), silu: true, layer: states.layer })?;
        let op = Mamba2Op { xbc, dt, a, d, dt_bias, groups, out, layer: states.layer };
        inputs.backend.mamba2(&op)?;
        inputs.keep("mamba2", format!("{state}, step {number}"), STATES, (out, rows, heads * head_dim))?;
        states.end(inputs, "mamba2", number)?;
    }
    Ok(())
}

/// A convolution without a recurrence.
pub(super) fn short_conv(inputs: &mut Inputs<'_>) -> Result<(), Error> {
    let (channels, taps) = (160, 3);
    let (weight, bias) = (inputs.vector(channels * taps)?, inputs.vector(channels)?);
    let states = States::new(inputs, StateShape::of_conv(channels, taps))?;
    for number in 0..5 {
        let rows = states.begin(inputs, number)?;
        let x = inputs.rows(rows, channels)?;
        let op = ConvOp { x, weight, bias: Some(bias), silu: false, layer: states.layer };
        inputs.backend.conv(&op)?;
        inputs.keep("conv", format!("alone, step {number}"), STATES, (x, rows, channels))?;
        states.end(inputs, "conv", number)?;
    }
    Ok(())
}

fn below_zero(inputs: &mut Inputs<'_>, len: usize) -> Result<kernels::backend::VectorId, Error> {
    let values: Vec<f32> = inputs.random.values(len).into_iter().map(|value| -value.abs() - 0.1).collect();
    inputs.backend.create_vector(&values)
}
