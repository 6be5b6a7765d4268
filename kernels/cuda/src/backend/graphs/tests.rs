//! Replayed graphs compared bit for bit with the same steps launched kernel by kernel, over everything that
//! changes between steps.

use super::*;
use crate::source::Source;
use crate::tests::compiled;
use crate::tests::sim::{bits, numbers};
use crate::{Arch, Compiled, CudaBackend, CudaConfig, DevicePtr, KernelId, Launch, SimDevice};
use kernels::backend::{
    ActivationMode, AttentionOp, Backend, BlockTable, BufferId, ConvOp, DeltaNetOp, EmbedIndex, EmbedOp,
    GateActivation, GateOp, HeadType, KvLayerId, KvShape, KvType, KvWrite, MatmulJob, MatrixId, MatrixSource,
    Norm, QkvOp, RopeId, RopeSource, StateExport, StateKind, StateLayerId, StateShape, StepInput,
    StepSequence, StepState, VectorId,
};
use kernels::quant::GgmlType;

const HIDDEN: usize = 64;
const VOCAB: usize = 50;
const HEAD: usize = 32;
const BLOCK: usize = 16;
/// Blocks of a sequence.
const BLOCKS: usize = 80;
const SEQUENCES: usize = 3;
const STATE: StateShape =
    StateShape { kind: StateKind::DeltaNet, channels: 3 * HEAD, taps: 4, heads: 1, rows: HEAD, cols: HEAD };

/// A decoder with two attention layers (one without and one with a window) and a delta net.
struct Model {
    backend: CudaBackend,
    /// Embedding; matrices from `HIDDEN` to `HIDDEN`, to a head, to three heads and to one value; from a
    /// head.
    matrices: [MatrixId; 6],
    weight: VectorId,
    rope: RopeId,
    layers: [KvLayerId; 2],
    /// The delta net's.
    state: Option<StateLayerId>,
    /// Blocks of the first sequence that the others begin with, in the group without a window.
    common: usize,
    conv: VectorId,
    constant: VectorId,
    block_units: u32,
    slot_units: u32,
    x: BufferId,
    normed: BufferId,
    /// q, k, v, mixed; inputs, gains, steps and outputs of the delta net.
    buffers: [BufferId; 8],
}

/// One (sequence, positions before the step, rows) for each sequence of a step.
type Steps = [(usize, usize, usize)];

impl Model {
    fn new(device: Box<dyn Device>, graphs: bool) -> Self {
        Self::with(device, graphs, KvType::F32, true)
    }

    fn with(device: Box<dyn Device>, graphs: bool, kv_type: KvType, recurrent: bool) -> Self {
        let config = CudaConfig { arch: Arch::SM_121A, activations: ActivationMode::Int8, threads: 1 };
        let compile = Box::new(|source: &Source| Ok(compiled(source, Arch::SM_121A).clone()));
        let backend = CudaBackend::new(device, config, compile).unwrap();
        let mut backend = if graphs { backend } else { backend.without_graphs() };
        let shape = |window| KvShape {
            heads: 2,
            kv_heads: 1,
            head_dim: HEAD,
            v_head_dim: HEAD,
            latent: false,
            block_tokens: BLOCK,
            kv_type: kv_type.into(),
            window,
            causal: true,
        };
        let mut matrix = |seed: u64, rows: usize, cols: usize| {
            let values: Vec<u8> =
                numbers(seed, 0, rows * cols).iter().flat_map(|x| (x * 0.2).to_le_bytes()).collect();
            let ggml_type = GgmlType::F32.id();
            backend.create_matrix(MatrixSource { ggml_type, rows, cols, experts: 1, bytes: &values }).unwrap()
        };
        let matrices = [
            matrix(1, VOCAB, HIDDEN),
            matrix(2, HIDDEN, HIDDEN),
            matrix(3, HEAD, HIDDEN),
            matrix(7, 3 * HEAD, HIDDEN),
            matrix(8, 1, HIDDEN),
            matrix(9, HIDDEN, HEAD),
        ];
        let layers = [None, Some(40)].map(|window| {
            let group = usize::from(window.is_some());
            backend.create_kv_layer(group, shape(window), 0).unwrap()
        });
        let block_bytes = backend.kv_block_bytes(shape(None)).unwrap();
        let state_bytes = backend.state_bytes(STATE, &[HeadType::F32]).unwrap();
        let state = recurrent.then(|| backend.create_state_layer(STATE, &[HeadType::F32], 0).unwrap());
        let (block_units, slot_units) = ((block_bytes / 64) as u32, (state_bytes / 64) as u32);
        let arena = 2 * SEQUENCES * BLOCKS * block_bytes + 2 * SEQUENCES * state_bytes;
        backend.create_kv_arena(arena, &[block_bytes, block_bytes, state_bytes]).unwrap();
        let bytes = 2 * SEQUENCES * BLOCKS * block_bytes;
        let past: Vec<u8> = match kv_type {
            KvType::F16 => {
                let halves = numbers(4, 0, bytes / 2).into_iter().map(half::f16::from_f32);
                halves.flat_map(half::f16::to_le_bytes).collect()
            }
            _ => numbers(4, 0, bytes / 4).iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        backend.write_arena(0, &past).unwrap();
        let mut buffer = |cols| backend.create_buffer(64, cols).unwrap();
        let (x, normed) = (buffer(HIDDEN), buffer(HIDDEN));
        let buffers = [HIDDEN, HEAD, HEAD, HIDDEN, 3 * HEAD, 1, 1, HEAD].map(buffer);
        let rope = RopeSource {
            interleaved: false,
            n_rot: HEAD,
            base: 10_000.0,
            freq_scale: 1.0,
            factors: None,
            magnitude: 1.0,
            axes: None,
        };
        Self {
            rope: backend.create_rope(rope).unwrap(),
            weight: backend.create_vector(&numbers(5, 0, HIDDEN)).unwrap(),
            conv: backend.create_vector(&numbers(6, 0, 3 * HEAD * 4)).unwrap(),
            constant: backend.create_vector(&[-0.5]).unwrap(),
            backend,
            matrices,
            layers,
            state,
            common: 0,
            block_units,
            slot_units,
            x,
            normed,
            buffers,
        }
    }

    fn slot(&self, number: usize) -> u32 {
        (2 * SEQUENCES * BLOCKS) as u32 * self.block_units + number as u32 * self.slot_units
    }

    /// Runs a step and returns the bits of its rows and of its sequences' states.
    fn step(&mut self, step_sequences: &Steps, token: u32) -> Result<(Vec<u32>, StepOps), Error> {
        let (mut rows, mut sequences) = (0, Vec::new());
        for &(_, context, count) in step_sequences {
            sequences.push(StepSequence { rows: rows..rows + count, context, segment_start: None });
            rows += count;
        }
        let tokens: Vec<u32> = (0..rows as u32).map(|row| (token + row) % 50.max(token + 1)).collect();
        let owned: Vec<Vec<Vec<u32>>> = (0..2)
            .map(|group| {
                let of = |&(sequence, ..): &(usize, usize, usize)| {
                    let block_index = |block| {
                        let own = group > 0 || block >= self.common;
                        (group * SEQUENCES + if own { sequence } else { 0 }) * BLOCKS + block
                    };
                    (0..BLOCKS).map(|block| block_index(block) as u32 * self.block_units).collect()
                };
                step_sequences.iter().map(of).collect()
            })
            .collect();
        let tables: Vec<Vec<BlockTable<'_>>> =
            owned.iter().map(|group| group.iter().map(|table| BlockTable::Paged(table)).collect()).collect();
        // The state is exported at every seventh position.
        let state = |&(sequence, context, count): &(usize, usize, usize)| StepState {
            read: (context > 0).then(|| self.slot(sequence)),
            write: self.slot(sequence),
            exports: match context % 7 {
                0 => vec![StateExport { row: count - 1, slot: self.slot(SEQUENCES + sequence) }],
                _ => Vec::new(),
            },
            deferred: false,
        };
        let with_states = if self.state.is_some() { step_sequences } else { &[] };
        let states: Vec<StepState> = with_states.iter().map(state).collect();
        let input = StepInput { tokens: &tokens, sequences: &sequences, tables: &tables, states: &states };
        self.backend.begin_step(&input)?;
        let ops = self.backend.begin_ops()?;
        if ops != StepOps::Replayed {
            self.ops()?;
        }
        if ops == StepOps::Recorded {
            self.backend.end_ops()?;
        }
        let mut found = Vec::new();
        for row in 0..rows {
            let mut values = vec![0.0; HIDDEN];
            self.backend.read_row(self.x, row, &mut values)?;
            assert!(values.iter().all(|value| value.is_finite()));
            found.extend(bits(&values));
        }
        for (&(sequence, ..), state) in step_sequences.iter().zip(self.state.iter().cycle()) {
            let (mut conv, mut matrix) = (vec![0.0; STATE.conv_len()], vec![0.0; STATE.recurrent_len()]);
            self.backend.read_state(*state, self.slot(sequence), &mut conv, &mut matrix)?;
            found.extend(bits(&conv).into_iter().chain(bits(&matrix)));
        }
        Ok((found, ops))
    }

    fn ops(&mut self) -> Result<(), Error> {
        let Self { x, normed, buffers: [q, k, v, mixed, inputs, beta, alpha, out], weight, state, .. } =
            *self;
        let [table, square, narrow, triple, single, wide] = self.matrices;
        let backend = &mut self.backend;
        let job = |matrix, out, accumulate| MatmulJob { matrix, out, bias: None, scale: 1.0, accumulate };
        let norm = Norm { rms: true, weight: Some(weight), bias: None, eps: 1e-6, width: HIDDEN };
        let index = EmbedIndex::Token;
        backend.embed(&EmbedOp { table, index, scale: 1.0, accumulate: false, out: x })?;
        for layer in self.layers {
            backend.norm(x, &norm, normed)?;
            let jobs = [job(square, q, false), job(narrow, k, false), job(narrow, v, false)];
            backend.matmul(normed, &jobs)?;
            let kv = Some(KvWrite { k, v, k_norm: None, v_norm: None });
            backend.qkv(&QkvOp { q, q_norm: None, kv, rope: Some(self.rope), q_growth: None, layer })?;
            backend.attention(&AttentionOp {
                q,
                out: mixed,
                scale: 0.2,
                softcap: None,
                sinks: None,
                layer,
            })?;
            backend.gate(&GateOp { gate: mixed, up: None, up_from: 0, activation: GateActivation::Silu })?;
            backend.matmul(mixed, &[job(square, x, true)])?;
        }
        let Some(layer) = state else { return Ok(()) };
        backend.norm(x, &norm, normed)?;
        backend.matmul(
            normed,
            &[job(triple, inputs, false), job(single, beta, false), job(single, alpha, false)],
        )?;
        backend.conv(&ConvOp { x: inputs, weight: self.conv, bias: None, silu: true, layer })?;
        let (a, dt_bias) = (self.constant, self.constant);
        let (k_heads, tiled, l2_eps) = (1, false, 1e-6);
        let op = DeltaNetOp { qkv: inputs, beta, alpha, a, dt_bias, k_heads, tiled, l2_eps, out, layer };
        backend.delta_net(&op)?;
        backend.matmul(out, &[job(wide, x, true)])
    }
}

fn sim() -> Box<SimDevice> {
    Box::new(SimDevice::new(ptx::Limits::GB10, 1))
}

/// Checks that every step has the same bits with and without graphs. Returns how each step ran with graphs.
fn run(recorded: &mut Model, launched: &mut Model, steps: &[&Steps]) -> Vec<StepOps> {
    let step = |(number, step): (usize, &&Steps)| {
        let token = 3 * number as u32 % 40;
        let (found, ops) = recorded.step(step, token).unwrap();
        let (expected, called) = launched.step(step, token).unwrap();
        assert_eq!(called, StepOps::Called);
        assert!(found == expected, "step {number}: {step:?}, {ops:?}");
        ops
    };
    steps.iter().enumerate().map(step).collect()
}

#[test]
fn steps_give_the_same_bits_recorded_and_launched_one_by_one() {
    use StepOps::{Called, Recorded, Replayed};
    let (mut recorded, mut launched) = (Model::new(sim(), true), Model::new(sim(), false));
    let ops = run(
        &mut recorded,
        &mut launched,
        &[
            // One sequence, past the end of a block. States are first zero, then read from their slots.
            &[(0, 0, 1)],
            &[(0, 14, 1)],
            &[(0, 15, 1)],
            &[(0, 16, 1)],
            // Another sequence joins, whose past ends at a split and then passes it.
            &[(0, 17, 1), (1, 510, 1)],
            &[(0, 18, 1), (1, 511, 1)],
            &[(0, 19, 1), (1, 512, 1)],
            &[(1, 513, 1), (0, 20, 1)],
            &[(0, 21, 1), (1, 514, 1)],
            // The first alone again, in memory that has grown since; then the second: equally many rows,
            // but longer.
            &[(0, 22, 1)],
            &[(1, 515, 1)],
            &[(1, 1022, 1)],
            &[(1, 1023, 1)],
            // A prompt, which needs more memory than before: no graph refers to it.
            &[(2, 0, 40)],
            &[(2, 40, 1), (0, 23, 1)],
            &[(2, 41, 1), (0, 24, 1)],
            // A prompt for which there is room, together with a decoding sequence.
            &[(2, 42, 1), (1, 0, 9)],
            &[(2, 43, 1), (0, 25, 1)],
            &[(2, 1030, 1), (0, 26, 1)],
            &[(2, 1031, 1), (0, 27, 1)],
            // Tables that need more room.
            &[(2, 1032, 1), (0, 1100, 1)],
        ],
    );
    let expected = [
        vec![Called, Recorded, Replayed, Replayed],
        vec![Called, Recorded, Called, Recorded, Replayed],
        vec![Recorded, Called, Recorded, Replayed],
        vec![Called, Recorded, Replayed, Called, Replayed],
        vec![Called, Recorded, Recorded],
    ];
    assert_eq!(ops, expected.concat());
    let StepCounts { called, recorded, replayed, kept } = recorded.backend.step_counts();
    assert_eq!((called, recorded, replayed, kept), (7, 8, 6, 1));
}

/// A token and three draft tokens of each sequence, across the end of a block and of a split.
#[test]
fn steps_with_draft_tokens_are_recorded_if_no_layer_has_a_state() {
    use StepOps::{Called, Recorded, Replayed};
    for kv_type in [KvType::F16, KvType::F32] {
        let [mut recorded, mut launched] =
            [true, false].map(|graphs| Model::with(sim(), graphs, kv_type, false));
        let ops = run(
            &mut recorded,
            &mut launched,
            &[
                // Makes room for all rows and tables.
                &[(0, 1100, 10), (1, 1100, 10)],
                &[(0, 3, 4), (1, 500, 4)],
                &[(0, 5, 4), (1, 504, 4)],
                &[(0, 9, 4), (1, 508, 4)],
                &[(1, 2, 4), (0, 13, 4)],
                // Past the split; then up to the reach of two splits.
                &[(0, 14, 4), (1, 509, 4)],
                &[(0, 15, 4), (1, 511, 4)],
                &[(0, 1020, 4), (1, 513, 4)],
                // Sequences with different numbers of rows.
                &[(0, 16, 4), (1, 517, 3)],
                &[(0, 16, 4), (1, 517, 3)],
                // Too many rows for a graph.
                &[(0, 20, 17)],
                &[(0, 20, 17)],
            ],
        );
        let reached = [Recorded, Replayed, Replayed, Called, Recorded, Replayed];
        assert_eq!(ops, [&[Called; 2][..], &reached, &[Called; 4]].concat(), "{kv_type:?}");
    }
    let mut model = Model::new(sim(), true);
    for context in [3, 7] {
        assert_eq!(model.step(&[(0, context, 4)], 0).unwrap().1, Called);
    }
}

/// The sequences that share blocks change between replays. This changes only how often blocks are read.
#[test]
fn shared_blocks_may_change_under_a_graph() {
    let sim = |seed| Box::new(SimDevice::new(ptx::Limits::GB10, seed));
    let mut recorded = Model::with(sim(1), true, KvType::F16, true);
    let mut launched = Model::with(sim(2), false, KvType::F16, true);
    let steps: [(usize, &Steps); 6] = [
        (0, &[(2, 1029, 1), (0, 1036, 1), (1, 1029, 1)]),
        (0, &[(2, 1030, 1), (0, 1037, 1), (1, 1030, 1)]),
        (64, &[(2, 1031, 1), (0, 1038, 1), (1, 1031, 1)]),
        (32, &[(2, 1032, 1), (0, 1039, 1), (1, 600, 1)]),
        (64, &[(0, 1040, 1), (1, 1032, 1), (2, 1033, 1)]),
        (0, &[(0, 1041, 1), (1, 1033, 1), (2, 1034, 1)]),
    ];
    let mut ran = Vec::new();
    for (common, step) in steps {
        (recorded.common, launched.common) = (common, common);
        ran.extend(run(&mut recorded, &mut launched, &[step]));
    }
    use StepOps::{Called, Recorded, Replayed};
    assert_eq!(ran, [Called, Recorded, Replayed, Replayed, Replayed, Replayed]);
}

/// Two sequences where there was room for one. The step takes no more bytes, since arrays are rounded up,
/// but the second group's arrays move.
#[test]
fn a_graph_of_another_layout_is_dropped() {
    let (mut recorded, mut launched) = (Model::new(sim(), true), Model::new(sim(), false));
    let ops = run(
        &mut recorded,
        &mut launched,
        &[
            // Makes room in the tables for the two sequences below.
            &[(0, 1101, 1)],
            &[(0, 1102, 1)],
            &[(0, 1103, 1)],
            &[(0, 5, 1), (1, 5, 1)],
            &[(0, 1104, 1)],
            &[(0, 1105, 1)],
        ],
    );
    use StepOps::{Called, Recorded, Replayed};
    assert_eq!(ops, [Called, Recorded, Replayed, Called, Recorded, Replayed]);
}

#[test]
fn a_replay_refuses_what_its_operations_would_refuse() {
    let mut model = Model::new(sim(), true);
    for context in 1..4 {
        model.step(&[(0, context, 1)], 0).unwrap();
    }
    let refused = model.step(&[(0, 4, 1)], VOCAB as u32).unwrap_err();
    let outside = Error::OutOfRange { what: "matrix row", index: VOCAB, len: VOCAB };
    assert_eq!(refused.to_string(), outside.to_string());
    assert_eq!(model.step(&[(0, 4, 1)], 0).unwrap().1, StepOps::Replayed);
}

/// A device without graphs.
struct Plain(Box<SimDevice>);

impl Device for Plain {
    fn load(&mut self, compiled: &Compiled, kernels: &[&str]) -> Result<Vec<KernelId>, CudaError> {
        self.0.load(compiled, kernels)
    }

    fn allocate(&mut self, bytes: usize) -> Result<DevicePtr, CudaError> {
        self.0.allocate(bytes)
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<(), CudaError> {
        self.0.free(ptr)
    }

    fn upload(&mut self, to: DevicePtr, bytes: &[u8]) -> Result<(), CudaError> {
        self.0.upload(to, bytes)
    }

    fn download(&mut self, from: DevicePtr, out: &mut [u8]) -> Result<(), CudaError> {
        self.0.download(from, out)
    }

    fn copy(&mut self, from: DevicePtr, to: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        self.0.copy(from, to, bytes)
    }

    fn fill(&mut self, to: DevicePtr, value: u8, bytes: usize) -> Result<(), CudaError> {
        self.0.fill(to, value, bytes)
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), CudaError> {
        self.0.launch(launch)
    }

    fn synchronize(&mut self) -> Result<(), CudaError> {
        self.0.synchronize()
    }
}

#[test]
fn a_device_without_graphs_runs_every_step() {
    let (mut plain, mut launched) = (Model::new(Box::new(Plain(sim())), true), Model::new(sim(), false));
    let ops = run(&mut plain, &mut launched, &[&[(0, 1, 1)], &[(0, 2, 1)], &[(0, 3, 1)]]);
    // The second step was to be recorded and was run instead.
    assert_eq!(ops, [StepOps::Called, StepOps::Recorded, StepOps::Called]);
    assert_eq!(plain.backend.step_counts(), StepCounts { called: 3, ..StepCounts::default() });
}
