//! Tests of deferred state updates: after rejection, the state is that of computing only the accepted rows.

use super::*;
use crate::backend::{HeadType, MAX_DEFERRED_ROWS, MAX_DEFERRED_STEPS, StateExport, StateKind, StepState};
use std::collections::VecDeque;
use std::ops::Range;

const DELTA: StateShape =
    StateShape { kind: StateKind::DeltaNet, channels: 2 * 6 + 3 * 21, taps: 4, heads: 3, rows: 6, cols: 21 };
const MAMBA: StateShape =
    StateShape { kind: StateKind::Mamba2, channels: 3 * 18 + 2 * 9, taps: 3, heads: 3, rows: 18, cols: 9 };

const CONV: StateShape =
    StateShape { kind: StateKind::Conv, channels: 70, taps: 3, heads: 0, rows: 0, cols: 0 };

/// A number in -1..1 for one value of one position of one sequence.
fn number(sequence: usize, position: usize, i: usize) -> f32 {
    ((sequence * 7919 + position * 613 + i * 37 + 11) % 1009) as f32 / 504.5 - 1.0
}

/// One sequence's part of a step: its number, its positions, its state.
type StepPart = (usize, Range<usize>, StepState);

/// A model of one delta net and one Mamba-2 layer, each behind a convolution, and a convolution alone.
struct Model {
    backend: CpuBackend,
    layers: [(StateShape, StateLayerId); 3],
    /// Offset / 64 between slots.
    slot: u32,
    x: [BufferId; 3],
    gates: [BufferId; 2],
    out: BufferId,
    conv_weights: [VectorId; 3],
    heads: VectorId,
}

impl Model {
    fn new(isa: Isa, threads: usize, types: [HeadType; 3]) -> Self {
        let mut backend = device(isa, ActivationMode::F32, threads);
        let mut end = 0;
        let layers = [DELTA, MAMBA, CONV].map(|shape| {
            let types = &types[..shape.heads];
            let layer = backend.create_state_layer(shape, types, end).unwrap();
            end += backend.state_bytes(shape, types).unwrap();
            (shape, layer)
        });
        backend.create_kv_arena(4 * end, &[]).unwrap();
        let mut buffer = |cols| backend.create_buffer(32, cols).unwrap();
        let x = [DELTA, MAMBA, CONV].map(|shape| buffer(shape.channels));
        let (gates, out) = ([buffer(3), buffer(3)], buffer(63));
        let mut vector = |n: usize| {
            let values: Vec<f32> = (0..n).map(|i| number(99, 0, i)).collect();
            backend.create_vector(&values).unwrap()
        };
        let conv_weights = [DELTA, MAMBA, CONV].map(|shape| vector(shape.channels * shape.taps));
        let heads = backend.create_vector(&[-0.4, -1.5, -0.1]).unwrap();
        Self { backend, layers, slot: (end / 64) as u32, x, gates, out, conv_weights, heads }
    }

    /// Runs a step through both layers. Returns the output of each sequence, as bits.
    fn step(&mut self, step_parts: &[StepPart]) -> Result<Vec<Vec<u32>>, Error> {
        let mut sequences = Vec::new();
        let mut rows = 0;
        for (_, positions, _) in step_parts {
            let next = rows + positions.len();
            sequences.push(StepSequence { rows: rows..next, context: positions.start, segment_start: None });
            rows = next;
        }
        let tokens = vec![0; rows];
        let states: Vec<StepState> = step_parts.iter().map(|(_, _, state)| state.clone()).collect();
        let step = StepInput { tokens: &tokens, sequences: &sequences, tables: &[], states: &states };
        self.backend.begin_step(&step)?;
        let mut outs = vec![Vec::new(); step_parts.len()];
        for (index, (shape, layer)) in self.layers.into_iter().enumerate() {
            for (buffer, cols) in [(self.x[index], shape.channels), (self.gates[0], 3), (self.gates[1], 3)] {
                let values: Vec<f32> = step_parts
                    .iter()
                    .flat_map(|(sequence, positions, _)| {
                        positions.clone().flat_map(move |at| (0..cols).map(move |i| number(*sequence, at, i)))
                    })
                    .collect();
                self.backend.write_rows(buffer, &values)?;
            }
            let (x, weight) = (self.x[index], self.conv_weights[index]);
            let silu = shape.kind != StateKind::Conv;
            self.backend.conv(&ConvOp { x, weight, bias: None, silu, layer })?;
            let Self { gates: [beta, alpha], heads, out, .. } = *self;
            let (out, width) = match shape.kind {
                StateKind::DeltaNet => {
                    let (k_heads, tiled, l2_eps) = (1, true, 1e-6);
                    let (a, dt_bias) = (heads, heads);
                    self.backend.delta_net(&DeltaNetOp {
                        qkv: x,
                        beta,
                        alpha,
                        a,
                        dt_bias,
                        k_heads,
                        tiled,
                        l2_eps,
                        out,
                        layer,
                    })?;
                    (out, shape.heads * shape.cols)
                }
                StateKind::Mamba2 => {
                    let (a, d, dt_bias) = (heads, heads, heads);
                    self.backend.mamba2(&Mamba2Op {
                        xbc: x,
                        dt: alpha,
                        a,
                        d,
                        dt_bias,
                        groups: 1,
                        out,
                        layer,
                    })?;
                    (out, shape.heads * shape.rows)
                }
                StateKind::Conv => (x, shape.channels),
            };
            for (sequence, outs) in sequences.iter().zip(&mut outs) {
                for row in sequence.rows.clone() {
                    let mut values = vec![0.0; width];
                    self.backend.read_row(out, row, &mut values)?;
                    outs.extend(bits(&values));
                }
            }
        }
        Ok(outs)
    }

    /// All values in a slot, as bits.
    fn state(&mut self, slot: u32) -> Vec<u32> {
        let mut all = Vec::new();
        for (shape, layer) in self.layers {
            let (mut conv, mut state) = (vec![0.0; shape.conv_len()], vec![0.0; shape.recurrent_len()]);
            self.backend.read_state(layer, slot * self.slot, &mut conv, &mut state).unwrap();
            all.extend(bits(&conv).into_iter().chain(bits(&state)));
        }
        all
    }

    fn step_part(&self, positions: Range<usize>, read: Option<u32>, write: u32, deferred: bool) -> StepPart {
        let (read, write) = (read.map(|slot| slot * self.slot), write * self.slot);
        (1, positions, StepState { read, write, exports: Vec::new(), deferred })
    }
}

/// The state after each number of positions, and the outputs of each position by layer, computed one row at a
/// time.
fn stepped(isa: Isa, types: [HeadType; 3], positions: usize) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let mut model = Model::new(isa, 1, types);
    // A sequence without rows and without a state gets zeros.
    let empty = model.step_part(0..0, None, 0, false);
    model.step(&[empty]).unwrap();
    let (mut states, mut outs) = (vec![model.state(0)], Vec::new());
    for position in 0..positions {
        let step_part = model.step_part(position..position + 1, (position > 0).then_some(0), 0, false);
        outs.push(model.step(&[step_part]).unwrap().remove(0));
        states.push(model.state(0));
    }
    (states, outs)
}

/// Outputs of single rows, in the order of a step's output: layer by layer.
fn by_layer(outs: &[Vec<u32>]) -> Vec<u32> {
    let (delta, mamba) = (DELTA.heads * DELTA.cols, MAMBA.heads * MAMBA.rows);
    let parts = [0..delta, delta..delta + mamba, delta + mamba..delta + mamba + CONV.channels];
    parts.into_iter().flat_map(|part| outs.iter().flat_map(move |out| out[part.clone()].to_vec())).collect()
}

const MIXED: [HeadType; 3] = [HeadType::F32, HeadType::Bf16, HeadType::F32];

#[test]
fn any_number_of_deferred_rows_can_be_rejected() {
    for isa in Isa::available() {
        for types in [[HeadType::F32; 3], MIXED] {
            let (states, outs) = stepped(isa, types, 5 + MAX_DEFERRED_ROWS);
            for context in [0, 5] {
                for rows in 1..=MAX_DEFERRED_ROWS {
                    let mut model = Model::new(isa, 2, types);
                    let read = (context > 0).then_some(0);
                    if context > 0 {
                        let step_part = model.step_part(0..context, None, 0, false);
                        model.step(&[step_part]).unwrap();
                    }
                    for (accepted, write) in (0..=rows).flat_map(|rows| [(rows, 0), (rows, 1)]) {
                        let label = format!(
                            "{isa}, {types:?}: {accepted} of {rows} rows behind {context}, slot {write}"
                        );
                        let before = [model.state(0), model.state(1)];
                        let step_part = model.step_part(context..context + rows, read, write, true);
                        let out = model.step(&[step_part]).unwrap().remove(0);
                        assert!(out == by_layer(&outs[context..context + rows]), "{label}: other outputs");
                        assert!([model.state(0), model.state(1)] == before, "{label}: a slot was written");
                        model.backend.accept(&[accepted]).unwrap();
                        assert!(model.state(write) == states[context + accepted], "{label}: another state");
                        // The sequence continues as if no row had been rejected.
                        let end = context + accepted;
                        let step_part = model.step_part(end..end + 1, Some(write), 2, false);
                        let next = model.step(&[step_part]).unwrap().remove(0);
                        if end < outs.len() {
                            assert_eq!(next, outs[end], "{label}");
                            assert!(model.state(2) == states[end + 1], "{label}: another state");
                        }
                        if write == 0 && context > 0 {
                            let step_part = model.step_part(0..context, None, 0, false);
                            model.step(&[step_part]).unwrap();
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn deferred_and_other_sequences_share_a_step() {
    let isa = Isa::detect();
    let (states, outs) = stepped(isa, MIXED, 12);
    for threads in [1, 3] {
        let mut model = Model::new(isa, threads, MIXED);
        // All are the same sequence: four positions in slot 0, of which two sequences defer and one does not.
        let step_part = model.step_part(0..4, None, 0, false);
        model.step(&[step_part]).unwrap();
        let step_parts = [
            model.step_part(4..9, Some(0), 1, true),
            model.step_part(4..12, Some(0), 2, false),
            model.step_part(4..6, Some(0), 3, true),
        ];
        let out = model.step(&step_parts).unwrap();
        for (out, (_, positions, _)) in out.iter().zip(&step_parts) {
            assert_eq!(*out, by_layer(&outs[positions.clone()]), "{positions:?}");
        }
        assert!(model.state(2) == states[12], "another state");
        for wrong in [&[1][..], &[1, 2, 1], &[6, 1], &[1, 3]] {
            let refused = model.backend.accept(wrong).unwrap_err();
            assert!(matches!(refused, Error::Length { .. } | Error::OutOfRange { .. }), "{refused}");
        }
        model.backend.accept(&[3, 0]).unwrap();
        let found = [0, 1, 2, 3].map(|slot| model.state(slot));
        assert!(found == [4, 7, 12, 4].map(|at| states[at].clone()));
        // A step is accepted only once.
        assert!(matches!(model.backend.accept(&[3, 0]), Err(Error::Length { .. })));
        // A step that defers nothing cannot be accepted.
        let step_part = model.step_part(7..8, Some(1), 1, false);
        model.step(&[step_part]).unwrap();
        assert!(matches!(model.backend.accept(&[1]), Err(Error::Length { .. })));
        model.backend.accept(&[]).unwrap();
        assert!(model.state(1) == states[8], "another state");
    }
}

/// Steps of other sequences, which may also defer rows, run before the accepted rows of a step are known.
#[test]
fn several_deferred_steps_wait_for_accept() {
    const POSITIONS: usize = 60;
    let isa = Isa::detect();
    let (states, outs) = stepped(isa, MIXED, POSITIONS);
    for seed in 0..20u64 {
        let mut random = seed;
        let mut below = |limit: usize| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) as usize % limit
        };
        let mut model = Model::new(isa, 2, MIXED);
        // `ends`: number of positions of each sequence, whose state is in the slot of its index. `waiting`:
        // steps that have not been accepted, oldest first; for each deferred sequence its index and its
        // number of rows.
        let mut ends = [0usize; 4];
        let mut waiting: VecDeque<Vec<(usize, usize)>> = VecDeque::new();
        while ends.iter().any(|end| *end + MAX_DEFERRED_ROWS < POSITIONS) {
            let busy = |slot: usize| waiting.iter().flatten().any(|(other, _)| *other == slot);
            let room = |slot: usize| ends[slot] + MAX_DEFERRED_ROWS <= POSITIONS;
            let free: Vec<usize> = (0..4).filter(|slot| !busy(*slot) && room(*slot)).collect();
            if free.is_empty() || below(3) == 0 {
                let Some(step) = waiting.pop_front() else { continue };
                let rows: Vec<usize> = step.iter().map(|(_, rows)| below(rows + 1)).collect();
                model.backend.accept(&rows).unwrap();
                for ((slot, _), rows) in step.into_iter().zip(rows) {
                    ends[slot] += rows;
                    let found = model.state(slot as u32);
                    assert!(found == states[ends[slot]], "seed {seed}: slot {slot} at {}", ends[slot]);
                }
                continue;
            }
            let mut step_parts = Vec::new();
            let mut deferred = Vec::new();
            for slot in free {
                if below(2) == 0 {
                    continue;
                }
                let (rows, defers) = (1 + below(MAX_DEFERRED_ROWS), below(3) > 0);
                let read = (ends[slot] > 0).then_some(slot as u32);
                step_parts.push(model.step_part(ends[slot]..ends[slot] + rows, read, slot as u32, defers));
                match defers {
                    true => deferred.push((slot, rows)),
                    false => ends[slot] += rows,
                }
            }
            if step_parts.is_empty() {
                continue;
            }
            let out = model.step(&step_parts).unwrap();
            for (out, (_, positions, _)) in out.iter().zip(&step_parts) {
                assert!(*out == by_layer(&outs[positions.clone()]), "seed {seed}: {positions:?}");
            }
            if !deferred.is_empty() {
                waiting.push_back(deferred);
            }
        }
    }
    let mut model = Model::new(isa, 1, MIXED);
    let step_part = || (1, 0..1, StepState { deferred: true, ..StepState::default() });
    let scratch_bytes = |model: &Model| model.backend.states.scratch_bytes();
    let before = scratch_bytes(&model);
    for _ in 0..MAX_DEFERRED_STEPS {
        model.step(&[step_part()]).unwrap();
    }
    let max = MAX_DEFERRED_STEPS;
    assert!(scratch_bytes(&model) > before);
    assert_eq!(model.step(&[step_part()]), Err(Error::DeferredSteps { max }));
    for _ in 0..max {
        model.backend.accept(&[1]).unwrap();
    }
    assert!(matches!(model.backend.accept(&[1]), Err(Error::Length { .. })));
    assert!(model.state(0) == states[1]);
}

#[test]
fn too_many_deferred_rows_and_exports_of_deferred_rows_are_refused() {
    let mut model = Model::new(Isa::detect(), 1, MIXED);
    let step_part = model.step_part(0..MAX_DEFERRED_ROWS + 1, None, 0, true);
    let (rows, max) = (MAX_DEFERRED_ROWS + 1, MAX_DEFERRED_ROWS);
    assert_eq!(model.step(&[step_part]), Err(Error::DeferredRows { rows, max }));
    let (sequence, positions, mut state) = model.step_part(0..2, None, 0, true);
    state.exports.push(StateExport { row: 0, slot: model.slot });
    assert_eq!(model.step(&[(sequence, positions, state)]), Err(Error::DeferredExport));
}
