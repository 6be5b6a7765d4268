use super::*;
use crate::step::{Step, StepLayout, StepLimits, StepPointers};
use crate::tests::sim::{Sim, assert_near, bits, numbers};
use kernels::backend::{StateExport, StepInput, StepSequence, StepState};
use kernels::recurrent::{DeltaNet, DeltaNetInput, Mamba2, Mamba2Input};
use kernels::reference::recurrent as reference;
use std::ops::Range;

/// Bytes of each slot before the layer's own part.
const LAYER_OFFSET: usize = 128;
const SLOTS: usize = 7;

/// A layer whose convolution feeds its recurrence.
struct Layer {
    layout: DeviceState,
    key_heads: usize,
    tiled: bool,
    conv_weight: Vec<f32>,
    conv_bias: Option<Vec<f32>>,
    a: Vec<f32>,
    d: Vec<f32>,
    dt_bias: Vec<f32>,
}

struct Given {
    /// Output of the convolution.
    conv: Vec<f32>,
    out: Vec<f32>,
}

impl Layer {
    fn new(kind: StateKind, taps: usize, heads: usize, key_heads: usize, rows: usize, cols: usize) -> Self {
        let channels = match kind {
            StateKind::DeltaNet => 2 * key_heads * rows + heads * cols,
            StateKind::Mamba2 => heads * rows + 2 * key_heads * cols,
            StateKind::Conv => 70,
        };
        let shape = StateShape { kind, channels, taps, heads, rows, cols };
        Self {
            layout: DeviceState::new(shape, &vec![HeadType::F32; heads]).unwrap(),
            key_heads,
            tiled: true,
            conv_weight: numbers(1, 0, channels * taps),
            conv_bias: (taps > 2).then(|| numbers(2, 0, channels)),
            a: numbers(3, 0, heads).iter().map(|x| -1.05 - x).collect(),
            d: numbers(4, 0, heads),
            dt_bias: numbers(5, 0, heads),
        }
    }

    /// Returns the same layer with states of these types.
    fn of(self, types: &[HeadType]) -> Self {
        Self { layout: DeviceState::new(self.layout.shape, types).unwrap(), ..self }
    }

    fn shape(&self) -> StateShape {
        self.layout.shape
    }

    fn slot(&self, index: usize) -> u32 {
        (index * (LAYER_OFFSET + self.layout.bytes()) / 64) as u32
    }

    /// Returns the convolution's inputs at some positions of a sequence.
    fn x(&self, sequence: usize, positions: Range<usize>) -> Vec<f32> {
        let channels = self.shape().channels;
        positions.flat_map(|at| numbers(10 + sequence as u64, at << 12, channels)).collect()
    }

    fn gates(&self, seed: u64, sequence: usize, positions: Range<usize>) -> Vec<f32> {
        let heads = self.shape().heads;
        let gates = positions.flat_map(|at| numbers(seed + sequence as u64, at << 12, heads));
        gates.map(|x| 3.0 * x).collect()
    }

    fn delta_net(&self) -> DeltaNet<'_> {
        let Self { a, dt_bias, key_heads, tiled, .. } = self;
        DeltaNet { a, dt_bias, k_heads: *key_heads, tiled: *tiled, l2_eps: 1e-6 }
    }

    fn mamba2(&self) -> Mamba2<'_> {
        let Self { a, d, dt_bias, key_heads, .. } = self;
        Mamba2 { a, d, dt_bias, groups: *key_heads }
    }
}

/// A layer on a device, with slots that hold garbage.
struct Placed<'a> {
    sim: &'a mut Sim,
    layer: &'a Layer,
    kernels: RecurrentKernels,
    arena: DevicePtr,
    head_offsets: DevicePtr,
    weight: DevicePtr,
    bias: Option<DevicePtr>,
    heads: [DevicePtr; 3],
}

/// (sequence, positions, state update).
type StepPart = (usize, Range<usize>, StepState);

fn state(read: Option<u32>, write: u32) -> StepState {
    StepState { read, write, exports: vec![], deferred: false }
}

impl<'a> Placed<'a> {
    fn new(sim: &'a mut Sim, layer: &'a Layer) -> Self {
        let compiled = sim.compiled(&source::RECURRENT);
        let kernels = RecurrentKernels::load(&mut sim.device, compiled).unwrap();
        let arena = sim.bytes(&vec![0xff; layer.slot(SLOTS) as usize * 64]);
        let head_offsets = sim.bytes(&layer.layout.head_offsets());
        let weight = sim.values(&layer.conv_weight);
        let bias = layer.conv_bias.as_ref().map(|bias| sim.values(bias));
        let heads = [&layer.a, &layer.d, &layer.dt_bias].map(|values| sim.values(values));
        Self { sim, layer, kernels, arena, head_offsets, weight, bias, heads }
    }

    /// Uploads a step of some rows.
    fn step(&mut self, step_parts: &[(Range<usize>, StepState)]) -> (StepPointers, usize, usize) {
        let mut rows = 0;
        let sequences: Vec<_> = step_parts
            .iter()
            .map(|(positions, _)| {
                let first = rows;
                rows += positions.len();
                StepSequence { rows: first..rows, context: positions.start, segment_start: None }
            })
            .collect();
        let states: Vec<_> = step_parts.iter().map(|(_, state)| state.clone()).collect();
        let limits = StepLimits { rows: 150, sequences: 4, exports: 8, table_entries: 0 };
        let mut step = Step::new(StepLayout::new(limits, &[]));
        let tokens = vec![0; rows];
        let input = StepInput { tokens: &tokens, sequences: &sequences, tables: &[], states: &states };
        step.fill(&input, 0).unwrap();
        let at = self.sim.bytes(step.bytes());
        (step.layout().at(at), step_parts.len(), step.kept_rows())
    }

    /// Runs convolution and recurrence over buffers on the device.
    fn advance(
        &mut self,
        at: &StepPointers,
        sequences: usize,
        x: DevicePtr,
        gates: [DevicePtr; 2],
        out: DevicePtr,
    ) {
        let Self { layer, kernels, arena, head_offsets, weight, bias, heads: [a, d, dt_bias], .. } = *self;
        let state = StateCall {
            layout: &layer.layout,
            head_offsets,
            layer_offset: LAYER_OFFSET,
            arena,
            states: &at.states,
            sequences,
        };
        let device = &mut self.sim.device;
        let silu = layer.shape().kind != StateKind::Conv;
        kernels.conv(device, &state, &ConvCall { x, weight, bias, silu }).unwrap();
        let [beta, alpha] = gates;
        match layer.shape().kind {
            StateKind::DeltaNet => {
                let (k_heads, tiled) = (layer.key_heads, layer.tiled);
                let call =
                    DeltaNetCall { qkv: x, beta, alpha, a, dt_bias, k_heads, tiled, l2_eps: 1e-6, out };
                kernels.delta_net(device, &state, &call).unwrap();
            }
            StateKind::Mamba2 => {
                let call = Mamba2Call { xbc: x, dt: alpha, a, d, dt_bias, groups: layer.key_heads, out };
                kernels.mamba2(device, &state, &call).unwrap();
            }
            StateKind::Conv => {}
        }
    }

    /// Uploads the inputs of a step.
    fn inputs(&mut self, step_parts: &[StepPart]) -> (DevicePtr, [DevicePtr; 2]) {
        let of = |values: &dyn Fn(usize, Range<usize>) -> Vec<f32>| -> Vec<f32> {
            step_parts
                .iter()
                .flat_map(|(sequence, positions, _)| values(*sequence, positions.clone()))
                .collect()
        };
        let layer = self.layer;
        let x = of(&|sequence, positions| layer.x(sequence, positions));
        let gates = [20, 30].map(|seed| of(&|sequence, positions| layer.gates(seed, sequence, positions)));
        (self.sim.values(&x), gates.map(|gate| self.sim.values(&gate)))
    }

    fn run(&mut self, step_parts: &[StepPart]) -> Given {
        let (x, gates) = self.inputs(step_parts);
        let rows: usize = step_parts.iter().map(|(_, positions, _)| positions.len()).sum();
        let out_len = rows * self.layer.layout.out_len();
        let out = self.sim.room(4 * out_len);
        let states: Vec<_> =
            step_parts.iter().map(|(_, rows, state)| (rows.clone(), state.clone())).collect();
        let (at, sequences, _) = self.step(&states);
        self.advance(&at, sequences, x, gates, out);
        let conv = self.sim.read_values(x, rows * self.layer.shape().channels);
        let out = match self.layer.shape().kind {
            StateKind::Conv => conv.clone(),
            _ => self.sim.read_values(out, out_len),
        };
        Given { conv, out }
    }

    /// Returns the bytes of the layer's part of a slot.
    fn bytes(&mut self, slot: usize) -> Vec<u8> {
        let at = self.arena.offset(self.layer.slot(slot) as usize * 64 + LAYER_OFFSET);
        self.sim.read(at, self.layer.layout.bytes())
    }

    fn state(&mut self, slot: usize) -> (Vec<f32>, Vec<f32>) {
        let shape = self.layer.shape();
        let (mut conv, mut recurrent) = (vec![0.0; shape.conv_len()], vec![0.0; shape.recurrent_len()]);
        let bytes = self.bytes(slot);
        self.layer.layout.read(&bytes, &mut conv, &mut recurrent).unwrap();
        (conv, recurrent)
    }
}

const BF16: HeadType = HeadType::Bf16;
const F32: HeadType = HeadType::F32;

fn layers() -> [Layer; 7] {
    let (delta, mamba) = (StateKind::DeltaNet, StateKind::Mamba2);
    [
        Layer::new(delta, 4, 4, 2, 6, 37),
        Layer { tiled: false, ..Layer::new(delta, 2, 2, 1, 128, 17) },
        Layer::new(delta, 4, 2, 1, 200, 4).of(&[BF16, F32]),
        Layer::new(mamba, 3, 3, 1, 34, 9),
        Layer::new(mamba, 1, 2, 2, 5, 128).of(&[BF16; 2]),
        Layer::new(mamba, 4, 2, 1, 3, 256),
        Layer::new(StateKind::Conv, 3, 0, 0, 0, 0),
    ]
}

#[test]
fn rows_and_states_equal_the_definition() {
    for mut sim in Sim::each() {
        for layer in layers() {
            let arch = sim.arch;
            let mut placed = Placed::new(&mut sim, &layer);
            let slots = [0, 1].map(|slot| layer.slot(slot));
            let first = placed.run(&[(0, 0..3, state(None, slots[0])), (1, 0..1, state(None, slots[1]))]);
            let second = placed.run(&[(0, 3..5, state(Some(slots[0]), slots[0]))]);
            let shape = layer.shape();
            let label = format!("{shape:?} for {arch}");
            let tolerance = if layer.layout.heads.iter().any(|head| head.ty == BF16) { 1e-2 } else { 2e-6 };

            let mut past = vec![0.0; shape.conv_len()];
            let x = layer.x(0, 0..5);
            let of_conv = (layer.conv_bias.as_deref(), shape.kind != StateKind::Conv);
            let expected = reference::conv(&shape, &layer.conv_weight, of_conv, &x, &mut past);
            let conv = [&first.conv[..3 * shape.channels], &second.conv].concat();
            assert_near(&conv, &expected, 2e-6, &label);
            let mut recurrent = vec![0.0; shape.recurrent_len()];
            let [beta, alpha] = [20, 30].map(|seed| layer.gates(seed, 0, 0..5));
            let expected = match shape.kind {
                StateKind::DeltaNet => {
                    let input = DeltaNetInput { qkv: &conv, beta: &beta, alpha: &alpha };
                    reference::delta_net(&shape, &layer.delta_net(), &input, &mut recurrent)
                }
                StateKind::Mamba2 => {
                    let input = Mamba2Input { xbc: &conv, dt: &alpha };
                    reference::mamba2(&shape, &layer.mamba2(), &input, &mut recurrent)
                }
                StateKind::Conv => expected,
            };
            let width = first.out.len() / 4;
            let out = [&first.out[..3 * width], &second.out].concat();
            assert_near(&out, &expected, tolerance, &label);
            let (conv_state, recurrent_state) = placed.state(0);
            assert_near(&conv_state, &past, 0.0, &label);
            assert_near(&recurrent_state, &recurrent, tolerance, &label);
        }
    }
}

#[test]
fn chunk_boundaries_change_no_bit() {
    for (mut sim, layers) in Sim::each().zip([[0, 4], [2, 6]]) {
        for layer in layers.map(layers_of) {
            let mut placed = Placed::new(&mut sim, &layer);
            let slot = |index| layer.slot(index);
            // The convolution processes 64 rows at a time.
            let exports = [(0, 1), (4, 2), (4, 3), (76, 6)];
            let exports = exports.map(|(row, index)| StateExport { row, slot: slot(index) }).to_vec();
            let whole = StepState { exports, ..state(None, slot(0)) };
            let whole = placed.run(&[(0, 0..150, whole)]);
            let left = [0, 1, 2, 3, 6].map(|index| placed.bytes(index));
            assert_eq!(left[2], left[3]);
            // Other preceding sequences, other slots, other chunks.
            let mut out = Vec::new();
            for (rows, read, write, exported) in [
                (0..1, None, 4, 1),
                (1..5, Some(4), 5, 2),
                (5..6, Some(5), 5, 9),
                (6..77, Some(5), 4, 4),
                (77..150, Some(4), 5, 0),
            ] {
                let own = state(read.map(slot), slot(write));
                let given = placed.run(&[(1, 7..9, state(None, slot(0))), (0, rows, own)]);
                out.extend_from_slice(&given.out[2 * whole.out.len() / 150..]);
                if let Some(exported) = left.get(exported) {
                    assert!(placed.bytes(write) == *exported, "{:?}", layer.shape());
                }
            }
            assert_eq!(bits(&out), bits(&whole.out));
        }
    }
}

/// Returns the layer of [`layers`] with this index.
fn layers_of(index: usize) -> Layer {
    layers().into_iter().nth(index).unwrap()
}

#[test]
fn rejected_rows_do_not_change_the_state() {
    for (mut sim, layer) in Sim::each().zip([0, 4]) {
        let layer = layers_of(layer);
        let mut placed = Placed::new(&mut sim, &layer);
        let slot = |index| layer.slot(index);
        placed.run(&[(0, 0..2, state(None, slot(0))), (1, 0..1, state(None, slot(1)))]);
        let before = [0, 1].map(|index| placed.bytes(index));
        let stepped = placed.run(&[(0, 2..6, state(Some(slot(0)), slot(2)))]);
        let two = placed.run(&[(0, 2..4, state(Some(slot(0)), slot(3)))]);
        assert_eq!(bits(&two.out), bits(&stepped.out[..two.out.len()]));

        // Four rows of one sequence and one row of another; two and none of them are accepted.
        let deferred = |read, write| StepState { deferred: true, ..state(Some(slot(read)), slot(write)) };
        let step_parts = [(0, 2..6, deferred(0, 4)), (1, 1..2, deferred(1, 5))];
        let (x, gates) = placed.inputs(&step_parts);
        let states: Vec<_> =
            step_parts.iter().map(|(_, rows, state)| (rows.clone(), state.clone())).collect();
        let (at, sequences, deferred_rows) = placed.step(&states);
        assert_eq!(deferred_rows, 5);
        let StateShape { channels, heads, .. } = layer.shape();
        let keep = |placed: &mut Placed<'_>, from: DevicePtr, cols: usize| {
            let to = placed.sim.room(4 * deferred_rows * cols);
            let (kernels, rows) = (&placed.kernels, at.kept_rows);
            kernels.keep_rows(&mut placed.sim.device, from, cols, rows, deferred_rows, to).unwrap();
            to
        };
        let saved_x = keep(&mut placed, x, channels);
        let saved_gates = gates.map(|gate| keep(&mut placed, gate, heads));
        let out = placed.sim.room(4 * deferred_rows * layer.layout.out_len());
        placed.advance(&at, sequences, x, gates, out);
        assert_eq!(bits(&placed.sim.read_values(out, stepped.out.len())), bits(&stepped.out));
        assert_eq!([0, 1].map(|index| placed.bytes(index)), before);
        // The resulting state equals that after running only the accepted rows, from their saved inputs. The
        // other rows belong to no sequence.
        let accepted = [(2..4, state(Some(slot(0)), slot(4))), (0..2, state(None, slot(2)))];
        let (at, _, _) = placed.step(&accepted);
        placed.advance(&at, 1, saved_x, saved_gates, out);
        assert_eq!(placed.bytes(4), placed.bytes(3));
        let none = [(1..1, state(Some(slot(1)), slot(5)))];
        let (at, sequences, _) = placed.step(&none);
        placed.advance(&at, sequences, saved_x, saved_gates, out);
        assert_eq!(placed.bytes(5), before[1]);
    }
}

#[test]
fn unsupported_shapes_are_refused() {
    let shape = layers_of(0).shape();
    let refused = |shape: StateShape| DeviceState::new(shape, &[F32; 4]).unwrap_err();
    assert!(matches!(refused(StateShape { taps: 5, ..shape }), Error::StateShape { .. }));
    assert!(matches!(refused(StateShape { cols: 0, ..shape }), Error::StateShape { .. }));
    assert!(matches!(refused(StateShape { kind: StateKind::Conv, ..shape }), Error::StateShape { .. }));
    assert!(matches!(refused(StateShape { rows: 257, ..shape }), Error::Unsupported { .. }));
    assert!(matches!(refused(StateShape { heads: 3, ..shape }), Error::Length { .. }));
    assert!(matches!(refused(StateShape { cols: 1 << 60, ..shape }), Error::StateShape { .. }));
    let mut sim = Sim::each().next().unwrap();
    let layer = layers_of(0);
    let mut placed = Placed::new(&mut sim, &layer);
    let (at, sequences, _) = placed.step(&[(0..1, state(None, 0))]);
    let state = StateCall {
        layout: &layer.layout,
        head_offsets: placed.head_offsets,
        layer_offset: LAYER_OFFSET,
        arena: placed.arena,
        states: &at.states,
        sequences,
    };
    let [a, d, dt_bias] = placed.heads;
    let out = DevicePtr::default();
    let call = Mamba2Call { xbc: out, dt: out, a, d, dt_bias, groups: 2, out };
    let device = &mut placed.sim.device;
    let other = placed.kernels.mamba2(device, &state, &call);
    assert!(matches!(other, Err(CudaError::Invalid { .. })));
    let call = DeltaNetCall {
        qkv: out,
        beta: out,
        alpha: out,
        a,
        dt_bias,
        k_heads: 3,
        tiled: true,
        l2_eps: 1e-6,
        out,
    };
    let uneven = placed.kernels.delta_net(device, &state, &call);
    assert!(matches!(uneven, Err(CudaError::Invalid { .. })));
}
