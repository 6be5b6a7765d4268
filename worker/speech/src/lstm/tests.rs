use super::*;
use proptest::prelude::*;
use serde::Deserialize;
use std::num::NonZeroUsize;

fn compute(threads: usize) -> Compute {
    Compute::new(NonZeroUsize::new(threads).unwrap()).unwrap()
}

fn noise(len: usize, size: f32, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) as f32 / (1u32 << 23) as f32 - 1.0) * size
    };
    (0..len).map(|_| next()).collect()
}

/// Weights of one direction in a file's order.
#[derive(Debug, Clone, Deserialize)]
struct Stored(Vec<f32>, Vec<f32>, Vec<f32>, Vec<f32>);

impl Stored {
    fn random(inputs: usize, hidden: usize, seed: u32) -> Self {
        let rows = GATES * hidden;
        let values = |len, part| noise(len, 1.0, seed * 4 + part);
        Self(values(rows * inputs, 0), values(rows * hidden, 1), values(rows, 2), values(rows, 3))
    }

    fn read(&self, order: GateOrder) -> LstmWeights<'_> {
        let Self(input, recurrent, own, other) = self;
        LstmWeights { order, input, recurrent, biases: [own, other] }
    }

    /// A layer in f64 by its definition, for one sequence.
    fn by_definition(&self, order: GateOrder, x: &[Vec<f64>], reverse: bool) -> Vec<Vec<f64>> {
        let hidden = self.2.len() / GATES;
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let [input, forget, cell, output] = match order {
            GateOrder::InputForgetCellOutput => [0, 1, 2, 3],
            GateOrder::InputOutputForgetCell => [0, 2, 3, 1],
        };
        let (mut h, mut c) = (vec![0.0; hidden], vec![0.0; hidden]);
        let mut out = vec![Vec::new(); x.len()];
        for step in 0..x.len() {
            let time = if reverse { x.len() - 1 - step } else { step };
            let product = |weights: &[f32], row: usize, x: &[f64]| -> f64 {
                x.iter().zip(&weights[row * x.len()..]).map(|(x, w)| x * f64::from(*w)).sum()
            };
            let gate = |gate: usize, unit: usize| {
                let row = gate * hidden + unit;
                let biases = f64::from(self.2[row]) + f64::from(self.3[row]);
                product(&self.0, row, &x[time]) + product(&self.1, row, &h) + biases
            };
            let next: Vec<(f64, f64)> = (0..hidden)
                .map(|unit| {
                    let kept = sigmoid(gate(forget, unit)) * c[unit];
                    let c = kept + sigmoid(gate(input, unit)) * gate(cell, unit).tanh();
                    (c, sigmoid(gate(output, unit)) * c.tanh())
                })
                .collect();
            (c, h) = next.into_iter().unzip();
            out[time] = h.clone();
        }
        out
    }
}

#[derive(Deserialize)]
struct Reference {
    hidden: usize,
    inputs: usize,
    directions: [DirectionReference; 2],
}

#[derive(Deserialize)]
struct DirectionReference {
    readout: Vec<f32>,
    pytorch: Stored,
    onnx: Stored,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    x: Vec<f32>,
    outputs: Vec<f64>,
    decision: f32,
    wrong: f32,
}

/// Values of onnxruntime near a decision boundary (`reference.py`), for both directions: files in both orders
/// give its outputs and decisions, and a file that is read in the other order gives other decisions.
#[test]
fn gates_are_not_confused_near_a_decision_boundary() {
    let reference: Reference = serde_json::from_str(include_str!("reference.json")).unwrap();
    let (hidden, compute) = (reference.hidden, compute(1));
    let [pytorch, onnx] = [GateOrder::InputForgetCellOutput, GateOrder::InputOutputForgetCell];
    let readings = [(false, pytorch, true), (true, onnx, true), (false, onnx, false)];
    for (from_onnx, order, is_right) in readings {
        let stored = |direction: &'_ DirectionReference| match from_onnx {
            true => direction.onnx.clone(),
            false => direction.pytorch.clone(),
        };
        let layer = reference.directions.each_ref().map(stored);
        let network = BidirectionalLstm::new(&[layer.each_ref().map(|stored| stored.read(order))]).unwrap();
        for (number, direction) in reference.directions.iter().enumerate() {
            let mut others = 0;
            for case in &direction.cases {
                let found = network.run(&compute, case.x.clone(), 1).unwrap();
                let times = case.x.len() / reference.inputs;
                let rows: Vec<&[f32]> =
                    found.chunks(2 * hidden).map(|row| &row[number * hidden..][..hidden]).collect();
                let last = rows[if number == 0 { times - 1 } else { 0 }];
                let decision: f32 = last.iter().zip(&direction.readout).map(|(x, w)| x * w).sum();
                let expected = if is_right { case.decision } else { case.wrong };
                assert!((decision - expected).abs() < 1e-5, "{decision} instead of {expected}");
                others += usize::from((decision > 0.0) != (case.decision > 0.0));
                if is_right {
                    let pairs = rows.concat().into_iter().zip(&case.outputs);
                    assert!(pairs.into_iter().all(|(x, y)| (f64::from(x) - y).abs() < 1e-6));
                }
            }
            match is_right {
                true => assert_eq!(others, 0),
                false => assert!(2 * others >= direction.cases.len(), "{others}"),
            }
        }
        // A network of one direction is read with the same order.
        let forward = Lstm::new(&[layer[0].read(order)]).unwrap();
        let case = &reference.directions[0].cases[0];
        let outputs = forward.run(&compute, &case.x, &mut forward.initial_state()).unwrap();
        let same = outputs.iter().zip(&case.outputs).all(|(x, y)| (f64::from(*x) - y).abs() < 1e-6);
        assert_eq!(same, is_right);
    }
}

#[test]
fn weights_of_other_sizes_are_refused() {
    let order = GateOrder::InputForgetCellOutput;
    let good = Stored::random(3, 2, 1);
    let Stored(input, recurrent, own, other) = good.clone();
    let refused = |stored: Stored| assert!(Lstm::new(&[stored.read(order)]).is_err());
    refused(Stored(input[1..].to_vec(), recurrent.clone(), own.clone(), other.clone()));
    refused(Stored(Vec::new(), recurrent.clone(), own.clone(), other.clone()));
    refused(Stored(input.clone(), recurrent[1..].to_vec(), own.clone(), other.clone()));
    refused(Stored(input.clone(), recurrent.clone(), own[1..].to_vec(), other.clone()));
    refused(Stored(input, recurrent, own, other[1..].to_vec()));
    refused(Stored(Vec::new(), Vec::new(), Vec::new(), Vec::new()));
    assert!(Lstm::new(&[good.read(order), good.read(order)]).is_err(), "3 inputs after 2 outputs");
    let wide = Stored::random(4, 2, 1);
    let both = |second: &Stored| {
        let layers = [[&good, &good], [second, second]].map(|layer| layer.map(|one| one.read(order)));
        BidirectionalLstm::new(&layers)
    };
    assert!(both(&good).is_err() && both(&wide).is_ok());
    assert!(BidirectionalLstm::new(&[[good.read(order), wide.read(order)]]).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn outputs_match_the_definition_and_do_not_depend_on_batch_threads_or_pieces(
        (inputs, hidden, times) in (1..20usize, 1..20usize, 1..12usize),
        (count, layers, seed) in (1..20usize, 1..3usize, 0..1000u32),
        (piece, threads) in (1..12usize, 1..3usize),
        onnx: bool,
    ) {
        let order = match onnx {
            true => GateOrder::InputOutputForgetCell,
            false => GateOrder::InputForgetCellOutput,
        };
        let compute = compute(threads);
        let x = noise(times * count * inputs, 2.0, seed);
        let one = |x: &[f32], width: usize, number| sequences(x, count, number..number + 1, width);
        let rows = |x: &[f32], width: usize| -> Vec<Vec<f64>> {
            x.chunks(width).map(|row| row.iter().map(|x| f64::from(*x)).collect()).collect()
        };
        let close = |found: &[f32], expected: &[Vec<f64>]| {
            found.iter().zip(expected.concat()).all(|(x, y)| (f64::from(*x) - y).abs() < 1e-5)
        };
        let sizes = |factor: usize| (0..layers).map(move |layer| if layer == 0 { inputs } else { factor * hidden });

        let stored: Vec<_> =
            sizes(1).zip(1..).map(|(inputs, layer)| Stored::random(inputs, hidden, seed + layer)).collect();
        let network = Lstm::new(&stored.iter().map(|one| one.read(order)).collect::<Vec<_>>()).unwrap();
        let last = network.last_outputs(&compute, &x, count).unwrap();
        for number in 0..count {
            let x = one(&x, inputs, number);
            let mut state = network.initial_state();
            let whole = network.run(&compute, &x, &mut state).unwrap();
            prop_assert_eq!(state.last_output(), &last[number * hidden..(number + 1) * hidden]);
            let mut resumed = network.initial_state();
            let pieces: Vec<f32> = x
                .chunks(piece * inputs)
                .flat_map(|x| network.run(&compute, x, &mut resumed).unwrap())
                .collect();
            prop_assert_eq!(&pieces, &whole);
            prop_assert_eq!(&resumed, &state);
            let expected = stored
                .iter()
                .fold(rows(&x, inputs), |x, layer| layer.by_definition(order, &x, false));
            prop_assert!(close(&whole, &expected));
        }

        let stored: Vec<[Stored; 2]> = sizes(2)
            .zip(1..)
            .map(|(inputs, layer)| [1, 2].map(|side| Stored::random(inputs, hidden, seed + 10 * layer + side)))
            .collect();
        let weights: Vec<_> =
            stored.iter().map(|layer| layer.each_ref().map(|one| one.read(order))).collect();
        let network = BidirectionalLstm::new(&weights).unwrap();
        let batch = network.run(&compute, x.clone(), count).unwrap();
        for number in 0..count {
            let x = one(&x, inputs, number);
            let alone = network.run(&compute, x.clone(), 1).unwrap();
            prop_assert_eq!(&alone, &one(&batch, 2 * hidden, number));
            let expected = stored.iter().fold(rows(&x, inputs), |x, [forward, backward]| {
                let backward = backward.by_definition(order, &x, true);
                let forward = forward.by_definition(order, &x, false);
                forward.into_iter().zip(backward).map(|(forward, backward)| [forward, backward].concat()).collect()
            });
            prop_assert!(close(&alone, &expected));
        }
    }
}
