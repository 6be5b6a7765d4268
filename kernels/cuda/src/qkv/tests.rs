use super::*;
use crate::step::{KvGroup, Step, StepLayout, StepLimits};
use crate::tests::sim::{Sim, assert_near, numbers};
use kernels::attention::{BlockTable, KvType, KvTypes, NO_BLOCK, Visible};
use kernels::backend::{StepInput, StepSequence};
use kernels::ops::{RopeParams, RopeStyle};
use kernels::reference::rows as reference;
use std::num::NonZeroU32;

const LAYER_OFFSET: usize = 64;
const EPS: f32 = 1e-5;
/// Positions before the step of the two sequences, of three rows and one row. The second position is very
/// large.
const CONTEXTS: [usize; 2] = [14, 100_003];
const ROWS: [usize; 4] = [14, 15, 16, 100_003];

/// Factors of queries at these positions, and the number of positions of each.
const GROWTH: ([f32; 4], usize) = ([1.5, 1.0, 1.0, 0.75], 30_000);

/// A norm over runs of a row: (width, number of weights).
type NormShape = Option<(usize, Option<usize>)>;

struct Case {
    shape: KvShape,
    norms: [NormShape; 3],
    rope: Option<RopeSource>,
    /// Whether values have their own buffer.
    own_values: bool,
    tolerance: f64,
}

fn shape(kv_type: KvType, heads: usize, kv_heads: usize, head_dim: usize, v_head_dim: usize) -> KvShape {
    let (window, latent) = (Some(16), false);
    KvShape {
        heads,
        kv_heads,
        head_dim,
        v_head_dim,
        latent,
        block_tokens: 16,
        kv_type: kv_type.into(),
        window,
        causal: true,
    }
}

impl Case {
    /// Returns width, heads and seed of q, k and v.
    fn tensors(&self) -> [(usize, usize, u64); 3] {
        let KvShape { heads, kv_heads, head_dim, v_head_dim, .. } = self.shape;
        [
            (head_dim, heads, 1),
            (head_dim, kv_heads, 2),
            (v_head_dim, kv_heads, if self.own_values { 3 } else { 2 }),
        ]
    }

    /// Returns a row of q, k or v before the operation.
    fn before(&self, tensor: usize, row: usize) -> Vec<f32> {
        let (width, heads, seed) = self.tensors()[tensor];
        numbers(seed, row << 12, heads * width).iter().map(|x| 2.0 * x).collect()
    }

    fn weight(&self, tensor: usize) -> Option<Vec<f32>> {
        self.norms[tensor].and_then(|(_, len)| len).map(|len| numbers(10 + tensor as u64, 0, len))
    }

    fn expected(&self, tensor: usize, row: usize, position: usize) -> Vec<f64> {
        let mut x: Vec<f64> = self.before(tensor, row).iter().map(|x| f64::from(*x)).collect();
        if let Some((run, _)) = self.norms[tensor] {
            let weight = self.weight(tensor);
            let runs = self.before(tensor, row);
            x = runs
                .chunks(run)
                .enumerate()
                .flat_map(|(i, values)| {
                    let weight = weight.as_ref().map(|weight| &weight[i * run % weight.len()..][..run]);
                    reference::rms_norm(values, weight, EPS)
                })
                .collect();
        }
        let rotated = match &self.rope {
            Some(rope) if tensor < 2 => {
                let style = if rope.interleaved { RopeStyle::Interleaved } else { RopeStyle::Half };
                let RopeSource { n_rot, base, freq_scale, factors, magnitude, axes, .. } = rope.clone();
                let params = RopeParams { style, n_rot, base, freq_scale, factors, magnitude, axes };
                let rounded: Vec<f32> = x.iter().map(|x| *x as f32).collect();
                let heads = rounded.chunks(self.shape.head_dim);
                heads.flat_map(|head| reference::rope(&params, position, head)).collect()
            }
            _ => x,
        };
        let factor = if tensor == 0 { GROWTH.0[position / GROWTH.1] } else { 1.0 };
        rotated.into_iter().map(|x: f64| x * f64::from(factor)).collect()
    }

    fn check(&self, sim: &mut Sim) {
        let block = KvBlock::new(&self.shape).unwrap();
        let stride = LAYER_OFFSET + block.bytes();
        let arena_len = 4 * stride;
        let near = [2 * stride / 64, 0].map(|offset| offset as u32);
        let mut far = vec![NO_BLOCK; 100_003 / 16 - 1];
        far.extend([3 * stride / 64, stride / 64].map(|offset| offset as u32));
        let tables = [vec![BlockTable::Paged(&near), BlockTable::Paged(&far)]];
        let visible = Visible::Window(NonZeroU32::new(16).unwrap());
        let group = KvGroup { block_tokens: 16, bytes: stride, visible };
        let limits = StepLimits { rows: 4, sequences: 2, exports: 0, table_entries: 7000 };
        let mut step = Step::new(StepLayout::new(limits, &[group]));
        let sequence = |rows, context| StepSequence { rows, context, segment_start: None };
        let sequences = [sequence(0..3, CONTEXTS[0]), sequence(3..4, CONTEXTS[1])];
        let input = StepInput { tokens: &[0; 4], sequences: &sequences, tables: &tables, states: &[] };
        step.fill(&input, arena_len).unwrap();
        let at = sim.bytes(step.bytes());
        let at = step.layout().at(at);

        let compiled = sim.compiled(QkvKernels::source(&self.shape).unwrap());
        let kernels = QkvKernels::load(&mut sim.device, compiled, self.shape).unwrap();
        let rows = |tensor: usize| (0..4).flat_map(|row| self.before(tensor, row)).collect::<Vec<f32>>();
        let q = sim.values(&rows(0));
        let k = sim.values(&rows(1));
        let v = if self.own_values { sim.values(&rows(2)) } else { k };
        let [q_norm, k_norm, v_norm] = [0, 1, 2].map(|tensor| {
            let (width, _) = self.norms[tensor]?;
            let weight = self.weight(tensor).map(|weight| (sim.values(&weight), weight.len()));
            Some(HeadNorm { weight, eps: EPS, width })
        });
        let rope = self.rope.as_ref().map(|source| {
            let rope = DeviceRope::new(source).unwrap();
            let (turns, angles) = (sim.bytes(&rope.bytes()), sim.room(rope.angle_bytes(4)));
            kernels.angles(&mut sim.device, &rope, turns, &at, 4, angles).unwrap()
        });
        let arena = sim.bytes(&vec![0xff; arena_len]);
        let kv = Some(KeysValues { k, v, k_norm, v_norm });
        let mut call = QkvCall {
            q,
            q_norm,
            kv,
            rope,
            growth: Some((sim.values(&GROWTH.0), GROWTH.1)),
            arena,
            step: &at,
            rows: 4,
            group: 0,
            layer_offset: LAYER_OFFSET,
            scratch: DevicePtr::default(),
        };
        call.scratch = sim.room(kernels.scratch_bytes(&call).unwrap().max(1));
        kernels.launch(&mut sim.device, &call).unwrap();

        let label = format!("{:?} for {}", self.shape, sim.arch);
        let expected =
            |tensor| -> Vec<f64> { (0..4).flat_map(|row| self.expected(tensor, row, ROWS[row])).collect() };
        let got = sim.read_values(q, rows(0).len());
        assert_near(&got, &expected(0), 3e-6, &label);
        let bytes = sim.read(arena, arena_len);
        let blocks = [near[0], near[0], near[1], far[100_003 / 16]];
        let (mut keys, mut values, mut touched) = (Vec::new(), Vec::new(), vec![0xff; arena_len]);
        for (block_at, position) in blocks.into_iter().zip(ROWS) {
            let layer = block_at as usize * 64 + LAYER_OFFSET;
            let (k, v) = block.get(&bytes[layer..][..block.bytes()], position % 16);
            block.put(&mut touched[layer..][..block.bytes()], position % 16, &k, &v);
            keys.extend(k);
            values.extend(v);
        }
        assert_near(&keys, &expected(1), self.tolerance, &label);
        assert_near(&values, &expected(2), self.tolerance, &label);
        // Nothing else was written, and row padding is zero.
        if [KvType::F32, KvType::F16].map(KvTypes::both).contains(&self.shape.kv_type) {
            assert_eq!(bytes, touched, "{label}");
        }

        // Without keys and values only the queries change.
        let q = sim.values(&rows(0));
        kernels.launch(&mut sim.device, &QkvCall { q, kv: None, ..call }).unwrap();
        assert_eq!(sim.read_values(q, got.len()), got);
        assert_eq!(sim.read(arena, arena_len), bytes);
    }
}

#[test]
fn heads_are_normed_rotated_and_written() {
    let half = RopeSource {
        interleaved: false,
        n_rot: 16,
        base: 1e4,
        freq_scale: 0.5,
        factors: None,
        magnitude: 1.3,
        axes: None,
    };
    let factors = Some(numbers(9, 0, 8).iter().map(|x| 2.0 + x).collect());
    let interleaved = RopeSource { interleaved: true, factors, base: 5e5, ..half.clone() };
    let cases = [
        Case {
            shape: shape(KvType::F32, 3, 1, 40, 24),
            norms: [Some((40, Some(120))), Some((40, Some(40))), None],
            rope: Some(half),
            own_values: true,
            tolerance: 3e-6,
        },
        Case {
            shape: shape(KvType::F16, 4, 2, 20, 20),
            norms: [Some((80, Some(80))), Some((10, Some(10))), Some((20, None))],
            rope: Some(interleaved),
            own_values: false,
            tolerance: 5e-4,
        },
        Case {
            shape: shape(KvType::Q8_0, 2, 2, 96, 33),
            norms: [None; 3],
            rope: None,
            own_values: true,
            tolerance: 6e-3,
        },
        // A third of a step of four bits is a tolerance for values below 1; E4M3 has steps of 1 / 16.
        Case {
            shape: KvShape {
                kv_type: KvTypes { k: KvType::Q4_0, v: KvType::Fp8 },
                ..shape(KvType::F32, 2, 2, 96, 33)
            },
            norms: [None; 3],
            rope: None,
            own_values: true,
            tolerance: 0.15,
        },
    ];
    for mut sim in Sim::each() {
        for case in &cases {
            case.check(&mut sim);
        }
    }
}

#[test]
fn rotations_wrap_around_at_whole_turns() {
    let source = RopeSource {
        interleaved: false,
        n_rot: 4,
        base: 100.0,
        freq_scale: 1.0,
        factors: Some(vec![1.0 / std::f32::consts::TAU, 1.0]),
        magnitude: 1.0,
        axes: None,
    };
    let rope = DeviceRope::new(&source).unwrap();
    // Nearly a whole turn per position, and a tenth of a radian.
    let radians = |turn: u64| turn as f64 / 2f64.powi(64) * std::f64::consts::TAU;
    let first = 1.0 / f64::from(1.0 / std::f32::consts::TAU);
    assert!((radians(rope.turns[0]) - first.rem_euclid(std::f64::consts::TAU)).abs() < 1e-12);
    assert!((radians(rope.turns[1]) - 0.1).abs() < 1e-12);
    let refused = |source: RopeSource| DeviceRope::new(&source).unwrap_err();
    assert!(matches!(refused(RopeSource { n_rot: 3, ..source.clone() }), Error::Length { .. }));
    assert!(matches!(refused(RopeSource { n_rot: 8, ..source }), Error::Length { .. }));
}

#[test]
fn norms_that_do_not_fit_are_refused() {
    let mut sim = Sim::each().next().unwrap();
    let shape = shape(KvType::F32, 2, 1, 16, 16);
    let compiled = sim.compiled(QkvKernels::source(&shape).unwrap());
    let kernels = QkvKernels::load(&mut sim.device, compiled, shape).unwrap();
    let step = StepLayout::new(StepLimits { rows: 1, sequences: 1, exports: 0, table_entries: 1 }, &[]);
    let norm = HeadNorm { weight: None, eps: EPS, width: 16 };
    let call = QkvCall {
        q: DevicePtr::default(),
        q_norm: Some(norm),
        kv: None,
        rope: None,
        growth: None,
        arena: DevicePtr::default(),
        step: &step.at(DevicePtr::default()),
        rows: 3,
        group: 0,
        layer_offset: 0,
        scratch: DevicePtr::default(),
    };
    assert_eq!(kernels.scratch_bytes(&call), Ok(0));
    let with = |norm: HeadNorm| kernels.scratch_bytes(&QkvCall { q_norm: Some(norm), ..call });
    assert_eq!(with(HeadNorm { width: 8, ..norm }), Ok(3 * 4 * 4));
    for wrong in [
        HeadNorm { width: 0, ..norm },
        HeadNorm { width: 15, ..norm },
        HeadNorm { weight: Some((DevicePtr::default(), 8)), ..norm },
    ] {
        assert!(matches!(with(wrong), Err(Error::Length { .. })));
    }
    let wide = RopeAngles { angles: DevicePtr::default(), pairs: 9, interleaved: false };
    let refused = kernels.scratch_bytes(&QkvCall { rope: Some(wide), ..call });
    assert!(matches!(refused, Err(Error::Length { .. })));
}
