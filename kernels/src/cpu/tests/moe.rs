//! Tests of mixtures of experts.

use super::*;
use crate::backend::{ExpertGateUp, ExpertGroups, GateActivation, Selection};
use crate::reference::moe::{Expert, Router, mixture};
use crate::reference::rows as reference;
use proptest::prelude::*;

/// A mixture and its input rows.
struct World {
    hidden: usize,
    ff: usize,
    router: Router,
    activation: GateActivation,
    fused: bool,
    /// Whether the op has factors and biases.
    affine: bool,
    experts: Vec<Expert>,
    x: Vec<f32>,
    logits: Vec<f32>,
    before: Vec<f32>,
}

impl World {
    fn new(seed: u64, experts: usize, (hidden, ff): (usize, usize), rows: usize) -> Self {
        let mut random = Random(seed);
        let mut expert = || {
            let [gate, up, down] = [0; 3].map(|_| random.values(hidden * ff));
            let [gate_bias, up_bias] = [0; 2].map(|_| random.values(ff));
            let [a, b, c] = [0; 3].map(|_| 1.0 + random.values(1)[0] / 2.0);
            let down_bias = random.values(hidden);
            Expert { gate, up, down, gate_bias, up_bias, down_bias, scales: [a, b, c] }
        };
        let experts: Vec<Expert> = (0..experts).map(|_| expert()).collect();
        // Few distinct logits, so that ties occur.
        let logits = random.values(rows * experts.len()).iter().map(|x| (x * 4.0).round()).collect();
        Self {
            hidden,
            ff,
            router: Router { used: 2.min(experts.len()), renormalise: true, ..Router::default() },
            activation: GateActivation::Silu,
            fused: false,
            affine: true,
            x: random.values(rows * hidden),
            before: random.values(rows * hidden),
            experts,
            logits,
        }
    }

    fn all(&self, field: impl Fn(&Expert) -> &[f32]) -> Vec<f32> {
        self.experts.iter().flat_map(|expert| field(expert).iter().copied()).collect()
    }

    /// Creates the op on a device, for some rows.
    fn op(&self, backend: &mut CpuBackend, rows: std::ops::Range<usize>) -> MoeOp {
        let experts = self.experts.len();
        let row_slice = |x: &[f32], width: usize| x[rows.start * width..rows.end * width].to_vec();
        let x = buffer(backend, self.hidden, &row_slice(&self.x, self.hidden));
        let router = buffer(backend, experts, &row_slice(&self.logits, experts));
        let out = buffer(backend, self.hidden, &row_slice(&self.before, self.hidden));
        let vector = |backend: &mut CpuBackend, values: &[f32]| {
            self.affine.then(|| backend.create_vector(values).unwrap())
        };
        let scale = |backend: &mut CpuBackend, i: usize| {
            vector(backend, &self.experts.iter().map(|expert| expert.scales[i]).collect::<Vec<_>>())
        };
        let gate_up = if self.fused {
            let both = |gate: fn(&Expert) -> &[f32], up: fn(&Expert) -> &[f32]| -> Vec<f32> {
                self.experts.iter().flat_map(|e| [gate(e), up(e)].concat()).collect()
            };
            let values = both(|e| &e.gate, |e| &e.up);
            let bias = both(|e| &e.gate_bias, |e| &e.up_bias);
            ExpertGateUp::Fused {
                gate_up: matrix(backend, experts, self.hidden, &values),
                scale: scale(backend, 0),
                bias: vector(backend, &bias),
            }
        } else {
            ExpertGateUp::Separate {
                gate: matrix(backend, experts, self.hidden, &self.all(|e| &e.gate)),
                up: matrix(backend, experts, self.hidden, &self.all(|e| &e.up)),
                gate_scale: scale(backend, 0),
                up_scale: scale(backend, 1),
                gate_bias: vector(backend, &self.all(|e| &e.gate_bias)),
                up_bias: vector(backend, &self.all(|e| &e.up_bias)),
            }
        };
        MoeOp {
            x,
            router,
            out,
            accumulate: false,
            scale: 1.0,
            used: self.router.used,
            selection: Selection {
                sigmoid: self.router.sigmoid,
                bias: (!self.router.bias.is_empty())
                    .then(|| backend.create_vector(&self.router.bias).unwrap()),
                groups: self.router.groups,
            },
            renormalise: self.router.renormalise,
            gate_up,
            down: matrix(backend, experts, self.ff, &self.all(|e| &e.down)),
            down_scale: scale(backend, 2),
            down_bias: vector(backend, &self.all(|e| &e.down_bias)),
            ff: self.ff,
            activation: self.activation,
        }
    }

    fn reference(&self) -> Vec<f64> {
        self.mixed(&self.experts_in_use(), |gate, up| match self.activation {
            GateActivation::ClampedSwiglu => reference::clamped_swiglu(gate as f32, up as f32),
            _ => reference::silu(gate as f32) * up,
        })
    }

    /// Reference magnitude for the rounding error of each element: its sum without cancellation. Each inner
    /// value is as large as the errors of gate and up can become when multiplied by each other.
    fn magnitude(&self) -> Vec<f64> {
        let mut experts = self.experts_in_use();
        for expert in &mut experts {
            expert.down.iter_mut().chain(&mut expert.down_bias).for_each(|x| *x = x.abs());
        }
        let limit = if self.activation == GateActivation::ClampedSwiglu { 7.0 } else { f64::INFINITY };
        self.mixed(&experts, |gate, up| (1.0 + gate.abs().min(limit)) * (1.0 + up.abs().min(limit)))
    }

    /// The experts, without the factors and biases that the op does not have.
    fn experts_in_use(&self) -> Vec<Expert> {
        let mut experts = self.experts.clone();
        for expert in &mut experts {
            if !self.affine {
                expert.scales = [1.0; 3];
                for bias in [&mut expert.gate_bias, &mut expert.up_bias, &mut expert.down_bias] {
                    bias.fill(0.0);
                }
            } else if self.fused {
                expert.scales[1] = expert.scales[0];
            }
        }
        experts
    }

    fn mixed(&self, experts: &[Expert], gate: impl Fn(f64, f64) -> f64 + Copy) -> Vec<f64> {
        let rows = self.x.chunks(self.hidden).zip(self.logits.chunks(experts.len()));
        rows.flat_map(|(x, logits)| mixture(experts, logits, &self.router, gate, x)).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn mixtures_match_the_reference(
        seed in any::<u64>(),
        experts in 1..7usize,
        shape in (1..40usize, 1..40usize),
        rows in 1..9usize,
        (used, renormalise, fused, affine, clamped) in
            (1..4usize, any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>()),
        (sigmoid, biased, groups, two_best) in (any::<bool>(), any::<bool>(), 0..3usize, any::<bool>()),
        scale in -2.0f32..2.0,
        accumulate in any::<bool>(),
    ) {
        let mut world = World::new(seed, experts, shape, rows);
        (world.fused, world.affine) = (fused, affine);
        // Biases that leave no ties, which rounding would decide.
        let bias = if biased { (0..experts).map(|e| (e as f32).sin()).collect() } else { Vec::new() };
        let count = if groups > 0 && experts.is_multiple_of(groups) { groups } else { 1 };
        let groups = (groups > 0).then_some(ExpertGroups { count, used: 1, two_best });
        if groups.is_some() {
            // No ties between sums of scores either.
            world.logits.iter_mut().enumerate().for_each(|(i, logit)| *logit += (i as f32).cos() / 8.0);
        }
        let used = used.min(experts / groups.map_or(1, |groups| groups.count));
        world.router = Router { used, renormalise, sigmoid, bias, groups };
        if clamped {
            // Large enough that the limits of the clamp are reached.
            world.activation = GateActivation::ClampedSwiglu;
            world.x.iter_mut().for_each(|x| *x *= 6.0);
        }
        let run = |backend: &mut CpuBackend, rows| {
            let op = world.op(backend, rows);
            backend.moe(&MoeOp { scale, accumulate, ..op }).unwrap();
            values(backend, op.out)
        };
        let out = on_every_isa(ActivationMode::F32, |backend| run(backend, 0..rows));
        let before = |i: usize| if accumulate { f64::from(world.before[i]) } else { 0.0 };
        let expected: Vec<f64> = world
            .reference()
            .iter()
            .enumerate()
            .map(|(i, y)| before(i) + f64::from(scale) * y)
            .collect();
        let magnitude = world.magnitude();
        for (i, (got, expected)) in out.iter().zip(&expected).enumerate() {
            let error = (f64::from(*got) - expected).abs();
            // The largest error of 350,000 elements was 0.7e-6.
            let limit = 4e-6 * (f64::from(scale).abs() * magnitude[i] + before(i).abs() + 1.0);
            assert!(error <= limit, "element {i}: {got} is not {expected} within {limit}");
        }
        // A row computed alone.
        let alone = run(&mut device(Isa::detect(), ActivationMode::F32, 1), rows - 1..rows);
        assert_eq!(bits(&alone), bits(&out[(rows - 1) * world.hidden..]));
    }
}

/// Bytes of a tensor of `count` values with scales of ordinary size.
fn tensor(random: &mut Random, ty: GgmlType, count: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        (0..count / ty.block_len() * ty.block_bytes()).map(|_| random.next() as u8).collect();
    for block in bytes.chunks_exact_mut(ty.block_bytes()) {
        match ty {
            GgmlType::MXFP4 => block[0] = 118 + block[0] % 4,
            GgmlType::Q4_K => (block[1], block[3]) = (0x18 + block[1] % 4, 0x18),
            GgmlType::Q8_0 => block[1] = 0x18 + block[1] % 4,
            _ => block.copy_from_slice(&(f32::from(block[0].cast_signed()) / 128.0).to_le_bytes()),
        }
    }
    bytes
}

/// On the int8 path too, the mixture equals the single ops on each expert, bit for bit.
#[test]
fn a_quantised_mixture_equals_its_single_ops() {
    let (experts, used, hidden, ff, rows) = (5, 3, 256, 512, 23);
    // If one product reads 8-bit rows and another does not, each gets its own form.
    for types in [
        [GgmlType::Q4_K, GgmlType::Q4_K, GgmlType::Q4_K],
        [GgmlType::MXFP4, GgmlType::MXFP4, GgmlType::MXFP4],
        [GgmlType::Q8_0, GgmlType::F32, GgmlType::F32],
        [GgmlType::F32, GgmlType::F32, GgmlType::Q8_0],
    ] {
        let mut random = Random(5);
        let bytes = types.map(|ty| tensor(&mut random, ty, experts * hidden * ff));
        let (x, logits) = (random.values(rows * hidden), random.values(rows * experts));
        let shapes = [(ff, hidden), (ff, hidden), (hidden, ff)];
        let matrix = |backend: &mut CpuBackend, i: usize, bytes: &[u8], experts: usize| {
            let ((rows, cols), ggml_type) = (shapes[i], types[i].id());
            backend.create_matrix(MatrixSource { ggml_type, rows, cols, experts, bytes: &bytes }).unwrap()
        };
        let together = on_every_isa(ActivationMode::Int8, |backend| {
            let [gate, up, down] = [0, 1, 2].map(|i| matrix(backend, i, &bytes[i], experts));
            let (x, router) = (buffer(backend, hidden, &x), buffer(backend, experts, &logits));
            let out = backend.create_buffer(rows, hidden).unwrap();
            let gate_up = ExpertGateUp::Separate {
                gate,
                up,
                gate_scale: None,
                up_scale: None,
                gate_bias: None,
                up_bias: None,
            };
            let op = MoeOp {
                x,
                router,
                out,
                accumulate: false,
                scale: 1.0,
                used,
                selection: Selection::default(),
                renormalise: true,
                gate_up,
                down,
                down_scale: None,
                down_bias: None,
                ff,
                activation: GateActivation::Silu,
            };
            backend.moe(&op).unwrap();
            values(backend, out)
        });
        // Computes every expert on all rows.
        let mut backend = device(Isa::detect(), ActivationMode::Int8, 1);
        let input = buffer(&mut backend, hidden, &x);
        let results: Vec<Vec<f32>> = (0..experts)
            .map(|expert| {
                let [gate, up, down] = [0, 1, 2].map(|i| {
                    let len = bytes[i].len() / experts;
                    matrix(&mut backend, i, &bytes[i][expert * len..][..len], 1)
                });
                let [g, u] = [0; 2].map(|_| backend.create_buffer(rows, ff).unwrap());
                let out = backend.create_buffer(rows, hidden).unwrap();
                let job = |matrix, out| MatmulJob { matrix, bias: None, scale: 1.0, accumulate: false, out };
                backend.matmul(input, &[job(gate, g), job(up, u)]).unwrap();
                let activation = GateActivation::Silu;
                backend.gate(&GateOp { gate: g, up: Some(u), up_from: 0, activation }).unwrap();
                backend.matmul(g, &[job(down, out)]).unwrap();
                values(&backend, out)
            })
            .collect();
        let expected: Vec<f32> = (0..rows)
            .flat_map(|row| {
                let mut weights = logits[row * experts..][..experts].to_vec();
                ops::softmax(Isa::detect(), &mut weights);
                let best = ops::top_k(Isa::detect(), &weights, used);
                let total: f32 = best.iter().map(|(_, p)| p).sum();
                let mut sum = vec![0f32; hidden];
                for (expert, p) in best {
                    let row_result = &results[expert][row * hidden..][..hidden];
                    for (sum, x) in sum.iter_mut().zip(row_result) {
                        *sum = x.mul_add(p / total, *sum);
                    }
                }
                sum
            })
            .collect();
        assert_eq!(bits(&together), bits(&expected), "{types:?}");
    }
}

#[test]
fn a_row_with_a_nan_logit_becomes_nan_and_changes_no_other_row() {
    let mut world = World::new(3, 4, (8, 16), 3);
    let run = |world: &World| {
        let mut backend = device(Isa::detect(), ActivationMode::F32, 1);
        let op = world.op(&mut backend, 0..3);
        backend.moe(&op).unwrap();
        values(&backend, op.out)
    };
    let whole = run(&world);
    world.logits[5] = f32::NAN;
    let out = run(&world);
    assert!(out[8..16].iter().all(|x| x.is_nan()));
    assert_eq!((&out[..8], &out[16..]), (&whole[..8], &whole[16..]));
}

#[test]
fn mixtures_of_wrong_shapes_are_refused() {
    let world = World::new(3, 4, (8, 16), 3);
    let mut backend = device(Isa::detect(), ActivationMode::F32, 1);
    let op = world.op(&mut backend, 0..3);
    let other = World::new(3, 4, (8, 16), 2).op(&mut backend, 0..2);
    assert_eq!(backend.moe(&op), Ok(()));
    for used in [0, 5] {
        let result = backend.moe(&MoeOp { used, ..op });
        assert!(matches!(result, Err(Error::OutOfRange { .. })), "{used}: {result:?}");
    }
    let short = backend.create_vector(&[1.0; 3]).unwrap();
    for wrong in [
        MoeOp { ff: 15, ..op },
        MoeOp { router: other.router, ..op },
        MoeOp { accumulate: true, out: other.out, ..op },
        MoeOp { down_scale: Some(short), ..op },
        MoeOp { down_bias: Some(short), ..op },
    ] {
        let result = backend.moe(&wrong);
        assert!(matches!(result, Err(Error::Length { .. })), "{wrong:?}: {result:?}");
    }
    assert_eq!(backend.moe(&op), Ok(()));
}
