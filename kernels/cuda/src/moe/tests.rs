use super::*;
use crate::tests::sim::{Sim, assert_near, numbers};
use kernels::reference::moe::{self as reference, Expert, mixture};
use kernels::reference::rows;

/// Routes of a layer on a device.
struct Placed {
    sim: Sim,
    kernels: MoeKernels,
    shape: MoeShape,
    routes: Routes,
}

impl Placed {
    fn new(sim: Sim, shape: MoeShape, logits: &[f32], renormalise: bool) -> Self {
        let router = reference::Router { used: shape.used, renormalise, ..reference::Router::default() };
        Self::routed(sim, shape, logits, &router)
    }

    fn routed(mut sim: Sim, shape: MoeShape, logits: &[f32], router: &reference::Router) -> Self {
        shape.check().unwrap();
        let compiled = sim.compiled(&source::MOE);
        let kernels = MoeKernels::load(&mut sim.device, compiled).unwrap();
        let mut array = |len| sim.room(4 * len);
        let [chosen, weights, list] = [0; 3].map(|_| array(shape.pairs()));
        let routes = Routes { chosen, weights, groups: array(2 * shape.groups()), list };
        let bias = (!router.bias.is_empty()).then(|| sim.values(&router.bias));
        let reference::Router { sigmoid, groups, renormalise, .. } = *router;
        let logits = sim.values(logits);
        let router = Router { logits, bias, sigmoid, groups, renormalise };
        kernels.route(&mut sim.device, &shape, &router, &routes).unwrap();
        kernels.lists(&mut sim.device, &shape, &routes).unwrap();
        Self { sim, kernels, shape, routes }
    }

    fn chosen(&mut self) -> Vec<u32> {
        self.sim.read_numbers(self.routes.chosen, self.shape.pairs())
    }

    fn weights(&mut self) -> Vec<f32> {
        self.sim.read_values(self.routes.weights, self.shape.pairs())
    }
}

#[test]
fn the_most_probable_experts_are_chosen_in_order() {
    let shape = MoeShape { rows: 6, experts: 37, used: 5 };
    let mut logits: Vec<f32> = numbers(1, 0, 6 * 37).iter().map(|x| 4.0 * x).collect();
    // Ties, where the lower index comes first; zeroes of both signs; a row with NaN.
    logits[37..2 * 37].fill(0.5);
    logits[2 * 37..3 * 37].fill(-0.0);
    logits[2 * 37 + 9] = 0.0;
    logits[3 * 37 + 4] = f32::NAN;
    for sim in Sim::each() {
        let mut placed = Placed::new(sim, shape, &logits, false);
        let (chosen, weights) = (placed.chosen(), placed.weights());
        for (row, logits) in logits.chunks(37).enumerate() {
            let (chosen, weights) = (&chosen[row * 5..][..5], &weights[row * 5..][..5]);
            if row == 3 {
                assert!(chosen.iter().all(|expert| *expert == 0) && weights.iter().all(|w| w.is_nan()));
                continue;
            }
            let mut order: Vec<usize> = (0..37).collect();
            order.sort_by(|a, b| logits[*b].partial_cmp(&logits[*a]).unwrap());
            let sum: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
            let expected: Vec<f64> = order[..5].iter().map(|e| f64::from(logits[*e]).exp() / sum).collect();
            assert_eq!(chosen.iter().map(|e| *e as usize).collect::<Vec<_>>(), order[..5], "row {row}");
            assert_near(weights, &expected, 1e-6, &format!("row {row}"));
        }
    }
}

#[test]
fn biases_and_groups_change_the_choice_and_not_the_weights() {
    let shape = MoeShape { rows: 5, experts: 48, used: 4 };
    let logits: Vec<f32> = numbers(3, 0, 5 * 48).iter().map(|x| 3.0 * x).collect();
    for (sigmoid, groups, two_best, biased) in
        [(true, 0, false, true), (true, 8, true, true), (false, 6, false, false), (false, 0, false, true)]
    {
        let groups = (groups > 0).then_some(ExpertGroups { count: groups, used: 2, two_best });
        let bias = if biased { numbers(4, 0, 48) } else { Vec::new() };
        let router = reference::Router { used: 4, renormalise: sigmoid, sigmoid, bias, groups };
        for sim in Sim::each() {
            let mut placed = Placed::routed(sim, shape, &logits, &router);
            let (chosen, weights) = (placed.chosen(), placed.weights());
            for (row, logits) in logits.chunks(48).enumerate() {
                let (experts, expected): (Vec<u32>, Vec<f64>) =
                    router.choose(logits).into_iter().map(|(expert, weight)| (expert as u32, weight)).unzip();
                assert_eq!(chosen[4 * row..][..4], experts, "row {row}");
                assert_near(&weights[4 * row..][..4], &expected, 2e-6, &format!("row {row}"));
            }
        }
    }
}

/// Checks that groups hold every pair once, pairs of one expert in ascending order, in full groups but the last.
fn assert_groups(groups: &[[u32; 2]], list: &[u32], chosen: &[u32], experts: u32) {
    let mut groups = groups.iter();
    let mut first = 0;
    for expert in 0..experts {
        let own: Vec<u32> = (0..).zip(chosen).filter(|(_, e)| **e == expert).map(|(pair, _)| pair).collect();
        for expected in own.chunks(GROUP_TOKENS) {
            assert_eq!(groups.next(), Some(&[first, expert << 8 | expected.len() as u32]));
            assert_eq!(&list[first as usize..][..expected.len()], expected);
            first += expected.len() as u32;
        }
    }
    assert!(groups.all(|group| *group == [0, 0]));
}

#[test]
fn groups_hold_every_pair_once() {
    for (rows, experts, used) in [(9, 70, 4), (1, 3, 3), (200, 5, 2), (40, 1024, 8), (70, 300, 3)] {
        let shape = MoeShape { rows, experts, used };
        for sim in Sim::each() {
            let mut placed = Placed::new(sim, shape, &numbers(2, 0, rows * experts), true);
            let chosen = placed.chosen();
            let groups = placed.sim.read_numbers(placed.routes.groups, 2 * shape.groups());
            let list = placed.sim.read_numbers(placed.routes.list, shape.pairs());
            assert_groups(groups.as_chunks().0, &list, &chosen, experts as u32);
            let sums = placed.weights().chunks(used).map(|row| row.iter().sum::<f32>()).collect::<Vec<_>>();
            assert_near(&sums, &vec![1.0; rows], 1e-6, "weights that sum to one");
        }
    }
}

#[test]
fn groups_of_heads_hold_every_pair_once() {
    for (mut sim, (rows, heads)) in Sim::each().zip([(70, 3), (2, 40)]) {
        let compiled = sim.compiled(&source::MOE);
        let kernels = MoeKernels::load(&mut sim.device, compiled).unwrap();
        let count = head_groups(rows, heads);
        let [chosen, list] = [0; 2].map(|_| sim.room(4 * rows * heads));
        let groups = sim.room(8 * count);
        kernels.heads(&mut sim.device, rows, heads, [chosen, groups, list]).unwrap();
        let (groups, list) = (sim.read_numbers(groups, 2 * count), sim.read_numbers(list, rows * heads));
        let chosen = sim.read_numbers(chosen, rows * heads);
        assert_eq!(chosen, (0..rows * heads).map(|pair| (pair % heads) as u32).collect::<Vec<_>>());
        assert_groups(groups.as_chunks().0, &list, &chosen, heads as u32);
    }
}

const HIDDEN: usize = 5;
const FF: usize = 130;

fn expert(index: usize) -> Expert {
    let values = |seed: u64, len: usize| numbers(seed, index << 16, len);
    let scales = values(9, 3);
    Expert {
        gate: values(3, FF * HIDDEN),
        up: values(4, FF * HIDDEN),
        down: values(5, FF * HIDDEN),
        gate_bias: values(6, FF),
        up_bias: values(7, FF),
        down_bias: values(8, HIDDEN),
        scales: [1.0 + scales[0], 1.0 + scales[1], 1.0 + scales[2]],
    }
}

/// Returns `matrix x`, like the products with weights.
fn product(matrix: &[f32], x: &[f32]) -> Vec<f32> {
    let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>() as f32;
    matrix.chunks(x.len()).map(dot).collect()
}

#[test]
fn a_mixture_of_experts_equals_the_definition() {
    let shape = MoeShape { rows: 3, experts: 4, used: 2 };
    let x = numbers(20, 0, shape.rows * HIDDEN);
    let logits = numbers(21, 0, shape.rows * shape.experts);
    for (sim, fused) in Sim::each().zip([false, true]) {
        let mut experts: Vec<Expert> = (0..shape.experts).map(expert).collect();
        if fused {
            experts.iter_mut().for_each(|expert| expert.scales[1] = expert.scales[0]);
        }
        let router =
            reference::Router { used: shape.used, renormalise: fused, ..reference::Router::default() };
        let mut placed = Placed::routed(sim, shape, &logits, &router);
        let chosen = placed.chosen();
        let Placed { sim, kernels, routes, .. } = &mut placed;
        let of_pairs = |product_of: &dyn Fn(usize, &Expert) -> Vec<f32>| -> Vec<f32> {
            let pairs = chosen.iter().enumerate();
            pairs.flat_map(|(pair, e)| product_of(pair, &experts[*e as usize])).collect()
        };
        let row = |pair: usize| &x[pair / shape.used * HIDDEN..][..HIDDEN];
        let gates = of_pairs(&|pair, expert| product(&expert.gate, row(pair)));
        let ups = of_pairs(&|pair, expert| product(&expert.up, row(pair)));
        let all = |values: &dyn Fn(&Expert) -> Vec<f32>| experts.iter().flat_map(values).collect::<Vec<_>>();
        let mut scale = |index: usize, biases: Vec<f32>| ExpertScale {
            scale: Some(sim.values(&all(&|expert| vec![expert.scales[index]]))),
            bias: Some(sim.values(&biases)),
        };
        let down_scale = scale(2, all(&|expert| expert.down_bias.clone()));
        let gate_up = if fused {
            let biases = all(&|expert| [&expert.gate_bias[..], &expert.up_bias].concat());
            let scale = scale(0, biases);
            let both: Vec<f32> =
                gates.chunks(FF).zip(ups.chunks(FF)).flat_map(|(gate, up)| [gate, up].concat()).collect();
            GateUp::Fused { gate_up: sim.values(&both), scale }
        } else {
            let gate_scale = scale(0, all(&|expert| expert.gate_bias.clone()));
            let up_scale = scale(1, all(&|expert| expert.up_bias.clone()));
            let (gate, up) = (sim.values(&gates), sim.values(&ups));
            GateUp::Separate { gate, up, gate_scale, up_scale }
        };
        let inner = sim.room(4 * shape.pairs() * FF);
        let (device, pairs) = (&mut sim.device, shape.pairs());
        let call =
            ExpertGate { gate_up, ff: FF, activation: GateActivation::Silu, inner: Activations::F32(inner) };
        kernels.gate(device, pairs, &call, routes).unwrap();
        let inner = sim.read_values(inner, pairs * FF);
        let down = of_pairs(&|pair, expert| product(&expert.down, &inner[pair * FF..][..FF]));
        let before = numbers(22, 0, shape.rows * HIDDEN);
        let out = sim.values(&before);
        let down = sim.values(&down);
        let call = ExpertSum { down, down_scale, hidden: HIDDEN, scale: 0.5, accumulate: true, out };
        kernels.sum(&mut sim.device, &shape, &call, routes).unwrap();
        let got = sim.read_values(out, before.len());
        let gate = |gate: f64, up: f64| gate / (1.0 + (-gate).exp()) * up;
        let expected: Vec<f64> = x
            .chunks(HIDDEN)
            .zip(logits.chunks(shape.experts))
            .flat_map(|(x, logits)| mixture(&experts, logits, &router, gate, x))
            .zip(&before)
            .map(|(sum, before)| f64::from(*before) + 0.5 * sum)
            .collect();
        assert_near(&got, &expected, 1e-6, "with what stood there");
        kernels.sum(&mut sim.device, &shape, &ExpertSum { accumulate: false, ..call }, routes).unwrap();
        let got = sim.read_values(out, before.len());
        let expected: Vec<f64> =
            expected.iter().zip(&before).map(|(expected, before)| expected - f64::from(*before)).collect();
        assert_near(&got, &expected, 1e-6, "alone");
    }
}

/// One inner value from a gate and an up value.
type Gate = fn(f32, f32) -> f64;

#[test]
fn gates_equal_their_definitions() {
    let shape = MoeShape { rows: 1, experts: 1, used: 1 };
    let gates: Vec<f32> = numbers(30, 0, 64).iter().map(|x| 12.0 * x).collect();
    let ups: Vec<f32> = numbers(31, 0, 64).iter().map(|x| 12.0 * x).collect();
    let functions: [(GateActivation, Gate); 5] = [
        (GateActivation::Silu, |gate, up| rows::silu(gate) * f64::from(up)),
        (GateActivation::GeluTanh, |gate, up| rows::gelu_tanh(gate) * f64::from(up)),
        (GateActivation::GeluErf, |gate, up| rows::gelu_erf(gate) * f64::from(up)),
        (GateActivation::Sigmoid, |gate, up| rows::sigmoid(gate) * f64::from(up)),
        (GateActivation::ClampedSwiglu, rows::clamped_swiglu),
    ];
    let mut placed = Placed::new(Sim::each().next().unwrap(), shape, &[1.0], false);
    let Placed { sim, kernels, routes, .. } = &mut placed;
    let (gate_scale, up_scale) = (ExpertScale::default(), ExpertScale::default());
    let (gate, up) = (sim.values(&gates), sim.values(&ups));
    let gate_up = GateUp::Separate { gate, up, gate_scale, up_scale };
    for (activation, function) in functions {
        let inner = sim.room(4 * 64);
        let call = ExpertGate { gate_up, ff: 64, activation, inner: Activations::F32(inner) };
        kernels.gate(&mut sim.device, 1, &call, routes).unwrap();
        let expected: Vec<f64> = gates.iter().zip(&ups).map(|(gate, up)| function(*gate, *up)).collect();
        assert_near(&sim.read_values(inner, 64), &expected, 1e-6, &format!("{activation:?}"));
    }
}

#[test]
fn invalid_numbers_of_experts_are_refused() {
    let shape = MoeShape { rows: 1, experts: 8, used: 2 };
    assert_eq!(shape.check(), Ok(()));
    for shape in
        [MoeShape { used: 0, ..shape }, MoeShape { used: 9, ..shape }, MoeShape { experts: 1025, ..shape }]
    {
        assert!(matches!(shape.check(), Err(Error::OutOfRange { .. })));
    }
}
