//! Tests of recurrent layers: states in slots, and refused arguments.

use super::*;
use crate::backend::{HeadType, StateExport, StateKind, StepState};
use crate::recurrent::{DeltaNet, DeltaNetInput, Mamba2, Mamba2Input};
use crate::reference::recurrent as reference;

const DELTA: StateShape =
    StateShape { kind: StateKind::DeltaNet, channels: 2 * 6 + 2 * 5, taps: 3, heads: 2, rows: 6, cols: 5 };
const MAMBA: StateShape =
    StateShape { kind: StateKind::Mamba2, channels: 2 * 4 + 2 * 7, taps: 2, heads: 2, rows: 4, cols: 7 };

const F32: [HeadType; 2] = [HeadType::F32; 2];

fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 37 + 11) % 101) as f32 / 50.0 - 1.0).collect()
}

/// A backend with a delta net and a Mamba-2 layer in slots of one arena.
struct Setup {
    backend: CpuBackend,
    delta: StateLayerId,
    mamba: StateLayerId,
    /// Offset / 64 between slots.
    slot: u32,
    x: BufferId,
    beta: BufferId,
    alpha: BufferId,
    delta_out: BufferId,
    mamba_out: BufferId,
    vectors: [VectorId; 3],
}

impl Setup {
    fn new() -> Self {
        let mut backend = device(Isa::detect(), ActivationMode::F32, 1);
        let first = backend.state_bytes(DELTA, &F32).unwrap();
        let second = backend.state_bytes(MAMBA, &F32).unwrap();
        let delta = backend.create_state_layer(DELTA, &F32, 0).unwrap();
        let mamba = backend.create_state_layer(MAMBA, &F32, first).unwrap();
        backend.create_kv_arena(3 * (first + second), &[]).unwrap();
        let mut buffer = |cols| backend.create_buffer(8, cols).unwrap();
        let (x, beta, alpha) = (buffer(DELTA.channels), buffer(2), buffer(2));
        let (delta_out, mamba_out) = (buffer(2 * 5), buffer(2 * 4));
        let vectors =
            [&[-0.5f32, -1.5][..], &[0.25, -0.5], &numbers(66)].map(|v| backend.create_vector(v).unwrap());
        let slot = ((first + second) / 64) as u32;
        Self { backend, delta, mamba, slot, x, beta, alpha, delta_out, mamba_out, vectors }
    }

    /// Begins a step of one sequence and fills the buffers with its rows.
    fn begin(&mut self, rows: usize, state: StepState) -> Result<(), Error> {
        let tokens = vec![0; rows];
        let sequences = [StepSequence { rows: 0..rows, context: 0, segment_start: None }];
        let states = [state];
        let step = StepInput { tokens: &tokens, sequences: &sequences, tables: &[], states: &states };
        self.backend.begin_step(&step)?;
        for (buffer, cols) in [(self.x, DELTA.channels), (self.beta, 2), (self.alpha, 2)] {
            self.backend.write_rows(buffer, &numbers(rows * cols))?;
        }
        Ok(())
    }

    fn delta_op(&self) -> DeltaNetOp {
        let [a, dt_bias, _] = self.vectors;
        let Self { x, beta, alpha, delta_out, delta, .. } = *self;
        let (k_heads, tiled, l2_eps) = (1, true, 1e-6);
        DeltaNetOp { qkv: x, beta, alpha, a, dt_bias, k_heads, tiled, l2_eps, out: delta_out, layer: delta }
    }

    fn mamba_op(&self) -> Mamba2Op {
        let [a, dt_bias, _] = self.vectors;
        let Self { x, alpha, mamba_out, mamba, .. } = *self;
        Mamba2Op { xbc: x, dt: alpha, a, d: dt_bias, dt_bias, groups: 1, out: mamba_out, layer: mamba }
    }

    fn rows(&mut self, buffer: BufferId, rows: usize, cols: usize) -> Vec<f32> {
        let mut out = vec![0.0; rows * cols];
        for (row, out) in out.chunks_exact_mut(cols).enumerate() {
            self.backend.read_row(buffer, row, out).unwrap();
        }
        out
    }

    fn state(&mut self, layer: StateLayerId, shape: StateShape, slot: u32) -> (Vec<f32>, Vec<f32>) {
        let (mut conv, mut state) = (vec![0.0; shape.conv_len()], vec![0.0; shape.recurrent_len()]);
        self.backend.read_state(layer, slot, &mut conv, &mut state).unwrap();
        (conv, state)
    }
}

fn state(read: Option<u32>, write: u32) -> StepState {
    StepState { read, write, exports: Vec::new(), deferred: false }
}

#[test]
fn layers_keep_their_states_in_slots() {
    let mut setup = Setup::new();
    let (a, dt_bias) = ([-0.5, -1.5], [0.25, -0.5]);
    let delta = DeltaNet { a: &a, dt_bias: &dt_bias, k_heads: 1, tiled: true, l2_eps: 1e-6 };
    let mamba = Mamba2 { a: &a, d: &dt_bias, dt_bias: &dt_bias, groups: 1 };
    let (x, scalars) = (numbers(4 * DELTA.channels), numbers(4 * 2));
    let input = DeltaNetInput { qkv: &x, beta: &scalars, alpha: &scalars };
    let (mut delta_state, mut mamba_state) =
        (vec![0.0; DELTA.recurrent_len()], vec![0.0; MAMBA.recurrent_len()]);
    // From no state to slot 1, then to slot 2, then in place.
    for (read, write) in [(None, 1), (Some(1), 2), (Some(2), 2)] {
        let slot = setup.slot;
        setup.begin(4, state(read.map(|n: u32| n * slot), write * slot)).unwrap();
        setup.backend.delta_net(&setup.delta_op()).unwrap();
        setup.backend.mamba2(&setup.mamba_op()).unwrap();
        let (delta_out, mamba_out) = (setup.delta_out, setup.mamba_out);
        let expected = reference::delta_net(&DELTA, &delta, &input, &mut delta_state);
        assert_close(&setup.rows(delta_out, 4, 2 * 5), &expected, 1e-5);
        let expected =
            reference::mamba2(&MAMBA, &mamba, &Mamba2Input { xbc: &x, dt: &scalars }, &mut mamba_state);
        assert_close(&setup.rows(mamba_out, 4, 2 * 4), &expected, 1e-5);
        assert_close(&setup.state(setup.delta, DELTA, write * slot).1, &delta_state, 1e-5);
        assert_close(&setup.state(setup.mamba, MAMBA, write * slot).1, &mamba_state, 1e-5);
    }
}

#[test]
fn a_step_writes_states_to_the_requested_slots() {
    let mut setup = Setup::new();
    let slot = setup.slot;
    let exports = vec![StateExport { row: 1, slot: 2 * slot }];
    setup.begin(4, StepState { read: None, write: slot, exports, deferred: false }).unwrap();
    setup.backend.delta_net(&setup.delta_op()).unwrap();
    let exported = setup.state(setup.delta, DELTA, 2 * slot);
    assert!(exported.1 != setup.state(setup.delta, DELTA, slot).1);
    setup.begin(2, state(None, 0)).unwrap();
    setup.backend.delta_net(&setup.delta_op()).unwrap();
    assert_eq!(exported.1, setup.state(setup.delta, DELTA, 0).1);
}

#[test]
fn a_convolution_keeps_its_last_inputs() {
    let mut setup = Setup::new();
    setup.begin(4, state(None, 0)).unwrap();
    let weights = setup.backend.memory().weights;
    let op = ConvOp { x: setup.x, weight: setup.vectors[2], bias: None, silu: true, layer: setup.delta };
    setup.backend.conv(&op).unwrap();
    let input = numbers(4 * DELTA.channels);
    let mut past = vec![0.0; DELTA.conv_len()];
    let expected = reference::conv(&DELTA, &numbers(66), (None, true), &input, &mut past);
    assert_close(&setup.rows(setup.x, 4, DELTA.channels), &expected, 1e-5);
    assert_eq!(setup.state(setup.delta, DELTA, 0).0, &input[(4 - DELTA.taps) * DELTA.channels..]);
    // A second copy of the weight is stored in the kernel's order.
    assert_eq!(setup.backend.memory().weights, weights + 66 * 4);
    // The same vector used as the weight of a convolution of another shape.
    let op = ConvOp { layer: setup.mamba, ..op };
    assert!(matches!(setup.backend.conv(&op), Err(Error::Length { .. })));
}

#[test]
fn a_state_can_be_copied_as_bytes() {
    let mut setup = Setup::new();
    setup.begin(3, state(None, 0)).unwrap();
    setup.backend.delta_net(&setup.delta_op()).unwrap();
    let mut bytes = vec![0; setup.slot as usize * 64];
    setup.backend.read_arena(0, &mut bytes).unwrap();
    setup.backend.write_arena(setup.slot, &bytes).unwrap();
    let moved = setup.state(setup.delta, DELTA, setup.slot);
    assert_eq!(moved, setup.state(setup.delta, DELTA, 0));
    assert!(moved.1.iter().any(|x| *x != 0.0));
}

#[test]
fn a_gated_norm_matches_the_reference_and_refuses_other_norms() {
    let mut setup = Setup::new();
    let (x, weight) = (setup.beta, setup.vectors[0]);
    setup.begin(2, state(None, 0)).unwrap();
    let norm = Norm { rms: true, weight: Some(weight), bias: None, eps: 1e-5, width: 2 };
    let op = GatedNormOp { x, gate: setup.alpha, norm, gate_first: true };
    setup.backend.gated_norm(&op).unwrap();
    let silu = |x: f32| f64::from(x) / (1.0 + f64::from(-x).exp());
    let gated: Vec<f32> = numbers(4).iter().map(|x| (f64::from(*x) * silu(*x)) as f32).collect();
    let expected: Vec<f64> = gated
        .chunks(2)
        .flat_map(|x| crate::reference::rows::rms_norm(x, Some(&[-0.5, -1.5]), 1e-5))
        .collect();
    assert_close(&setup.rows(x, 2, 2), &expected, 1e-5);
    let mut refused = |op: &GatedNormOp| setup.backend.gated_norm(op).unwrap_err();
    assert_eq!(refused(&GatedNormOp { gate: x, ..op }), Error::SameBuffer);
    let layer = Norm { rms: false, ..norm };
    assert!(matches!(refused(&GatedNormOp { norm: layer, ..op }), Error::Unsupported { .. }));
    assert!(matches!(refused(&GatedNormOp { gate: BufferId::new(0), ..op }), Error::Length { .. }));
}

#[test]
fn invalid_shapes_are_refused() {
    let mut setup = Setup::new();
    let slot = setup.slot;
    let refused = setup.begin(1, state(Some(slot / 2), 0)).unwrap_err();
    assert!(matches!(refused, Error::OverlappingStates { .. }), "{refused}");
    let mut backend_step = |states: &[StepState]| {
        let sequences = [StepSequence { rows: 0..1, context: 0, segment_start: None }];
        let step = StepInput { tokens: &[0], sequences: &sequences, tables: &[], states };
        setup.backend.begin_step(&step).unwrap_err()
    };
    assert!(matches!(backend_step(&[]), Error::Length { .. }));
    setup.begin(1, state(None, 3 * slot)).unwrap();
    let refused = setup.backend.delta_net(&setup.delta_op()).unwrap_err();
    assert!(matches!(refused, Error::OutsideArena { .. }), "{refused}");

    setup.begin(1, state(None, 0)).unwrap();
    let op = setup.delta_op();
    for (op, length) in [
        (DeltaNetOp { out: op.qkv, ..op }, false),
        (DeltaNetOp { beta: setup.mamba_out, ..op }, true),
        (DeltaNetOp { k_heads: 2, ..op }, true),
    ] {
        let refused = setup.backend.delta_net(&op).unwrap_err();
        assert_eq!(matches!(refused, Error::Length { .. }), length, "{refused}");
        assert_eq!(matches!(refused, Error::SameBuffer), !length, "{refused}");
    }
    let refused = setup.backend.mamba2(&Mamba2Op { layer: setup.delta, ..setup.mamba_op() }).unwrap_err();
    assert!(matches!(refused, Error::Length { .. } | Error::StateKind { .. }), "{refused}");
    let nowhere = StateLayerId::new(2);
    let refused = setup.backend.delta_net(&DeltaNetOp { layer: nowhere, ..op }).unwrap_err();
    assert_eq!(refused, Error::OutOfRange { what: "state layer", index: 2, len: 2 });

    let (mut conv, mut values) = (vec![0.0; DELTA.conv_len()], vec![0.0; DELTA.recurrent_len()]);
    let refused = setup.backend.read_state(setup.delta, 3 * slot, &mut conv, &mut values).unwrap_err();
    assert!(matches!(refused, Error::OutsideArena { .. }), "{refused}");
    let refused = setup.backend.read_state(setup.delta, 0, &mut conv, &mut values[1..]).unwrap_err();
    assert!(matches!(refused, Error::Length { .. }), "{refused}");
    assert_eq!(setup.backend.create_state_layer(DELTA, &F32, 4), Err(Error::UnalignedArena));
    assert!(matches!(
        setup.backend.create_state_layer(StateShape { taps: 0, ..DELTA }, &F32, 0),
        Err(Error::StateShape { .. })
    ));
}
