use std::num::NonZeroUsize;

use proptest::prelude::*;

use super::*;
use crate::aligned::AlignedBuf;
use crate::attention::OFFSET_UNIT;
use crate::backend::{HeadType, StateExport, StateKind, StateShape, StepSequence, StepState};
use crate::error::Error;
use crate::isa::Isa;
use crate::pool::{Pool, PoolConfig};
use crate::reference::recurrent as reference;

mod exactness;

fn pool(threads: usize) -> Pool {
    Pool::new(PoolConfig::new(NonZeroUsize::new(threads).unwrap())).unwrap()
}

/// Pseudo-random numbers in -1..1.
fn numbers(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(next).collect()
}

/// Sizes of a made-up layer.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    kind: StateKind,
    taps: usize,
    key_heads: usize,
    heads_per_key: usize,
    rows: usize,
    cols: usize,
    tiled: bool,
    /// Bit mask of the heads that are stored as bfloat16.
    bf16: u32,
}

fn sizes() -> impl Strategy<Value = Sizes> {
    let kind = prop_oneof![Just(StateKind::DeltaNet), Just(StateKind::Mamba2), Just(StateKind::Conv)];
    let width = || prop_oneof![1..50usize, Just(16), Just(32), Just(64)];
    let bf16 = prop_oneof![Just(0), any::<u32>()];
    (kind, 1..=4usize, 1..=3usize, 1..=3usize, width(), width(), any::<bool>(), bf16).prop_map(
        |(kind, taps, key_heads, heads_per_key, rows, cols, tiled, bf16)| Sizes {
            kind,
            taps,
            key_heads,
            heads_per_key,
            rows,
            cols,
            tiled,
            bf16,
        },
    )
}

/// A layer with weights. Its convolution is the input of its recurrence.
struct Layer {
    layout: StateLayout,
    key_heads: usize,
    tiled: bool,
    conv_weight: Vec<f32>,
    conv_bias: Vec<f32>,
    a: Vec<f32>,
    d: Vec<f32>,
    dt_bias: Vec<f32>,
}

/// The states of convolution and recurrence in a slot.
type StateBits = (Vec<u32>, Vec<u32>);

/// Offset of the layer in a slot: other layers may come before it.
const OFFSET: usize = 2 * OFFSET_UNIT;

impl Layer {
    fn new(sizes: Sizes, seed: u64) -> Self {
        let Sizes { kind, taps, key_heads, heads_per_key, rows, cols, tiled, bf16 } = sizes;
        let heads = key_heads * heads_per_key;
        let channels = match kind {
            StateKind::DeltaNet => 2 * key_heads * rows + heads * cols,
            StateKind::Mamba2 => heads * rows + 2 * key_heads * cols,
            StateKind::Conv => 7 * rows + cols,
        };
        let shape = match kind {
            StateKind::Conv => StateShape::of_conv(channels, taps),
            _ => StateShape { kind, channels, taps, heads, rows, cols },
        };
        let heads = shape.heads;
        let types: Vec<_> = (0..heads)
            .map(|head| if bf16 >> head & 1 == 1 { HeadType::Bf16 } else { HeadType::F32 })
            .collect();
        let layout = StateLayout::new(shape, &types).unwrap();
        Self {
            layout,
            key_heads,
            tiled,
            conv_weight: numbers(seed, channels * taps),
            conv_bias: numbers(seed + 1, channels),
            a: numbers(seed + 2, heads).iter().map(|x| -1.05 - x).collect(),
            d: numbers(seed + 3, heads),
            dt_bias: numbers(seed + 4, heads),
        }
    }

    fn shape(&self) -> &StateShape {
        self.layout.shape()
    }

    fn slot_bytes(&self) -> usize {
        OFFSET + self.layout.bytes()
    }

    /// Slot number (offset / 64) of slot `index`; slots are contiguous.
    fn slot(&self, index: usize) -> u32 {
        (index * self.slot_bytes() / OFFSET_UNIT) as u32
    }

    /// An arena of `slots`, filled with bytes that must not be read.
    fn arena(&self, slots: usize) -> AlignedBuf<u8> {
        let mut arena = AlignedBuf::zeroed(slots * self.slot_bytes());
        arena.fill(0xff);
        arena
    }

    fn state(&self, arena: &[u8], slot: u32) -> StateBits {
        let start = slot as usize * OFFSET_UNIT + OFFSET;
        let mut conv = vec![0.0; self.shape().conv_len()];
        let mut recurrent = vec![0.0; self.shape().recurrent_len()];
        let bytes = &arena[start..start + self.layout.bytes()];
        self.layout.read(bytes, &mut conv, &mut recurrent).unwrap();
        (bits(&conv), bits(&recurrent))
    }

    fn delta_net(&self) -> DeltaNet<'_> {
        let Self { a, dt_bias, key_heads, tiled, .. } = self;
        DeltaNet { a, dt_bias, k_heads: *key_heads, tiled: *tiled, l2_eps: 1e-6 }
    }

    fn mamba2(&self) -> Mamba2<'_> {
        let Self { a, d, dt_bias, key_heads, .. } = self;
        Mamba2 { a, d, dt_bias, groups: *key_heads }
    }

    fn out_width(&self) -> usize {
        let StateShape { kind, channels, heads, rows, cols, .. } = *self.shape();
        match kind {
            StateKind::DeltaNet => heads * cols,
            StateKind::Mamba2 => heads * rows,
            StateKind::Conv => channels,
        }
    }

    /// Runs the recurrence alone, on the output of the convolution.
    fn recurrence(&self, isa: Isa, pool: &Pool, state: &mut LayerState<'_>, x: &Rows) -> Vec<f32> {
        let mut out = vec![f32::NAN; x.len() * self.out_width()];
        let mut scratch = ScanScratch::default();
        match self.shape().kind {
            StateKind::DeltaNet => {
                let input = DeltaNetInput { qkv: &x.x, beta: &x.beta, alpha: &x.alpha };
                delta_net(pool, isa, state, &self.delta_net(), &input, &mut out, &mut scratch).unwrap();
            }
            StateKind::Mamba2 => {
                let input = Mamba2Input { xbc: &x.x, dt: &x.alpha };
                mamba2(pool, isa, state, &self.mamba2(), &input, &mut out, &mut scratch).unwrap();
            }
            StateKind::Conv => out.copy_from_slice(&x.x),
        }
        out
    }

    fn reference(&self, x: &Rows, state: &mut [f64]) -> Vec<f64> {
        match self.shape().kind {
            StateKind::DeltaNet => {
                let input = DeltaNetInput { qkv: &x.x, beta: &x.beta, alpha: &x.alpha };
                reference::delta_net(self.shape(), &self.delta_net(), &input, state)
            }
            StateKind::Mamba2 => {
                let input = Mamba2Input { xbc: &x.x, dt: &x.alpha };
                reference::mamba2(self.shape(), &self.mamba2(), &input, state)
            }
            StateKind::Conv => x.x.iter().copied().map(f64::from).collect(),
        }
    }
}

/// Inputs of some rows.
#[derive(Debug, Clone, Default)]
struct Rows {
    heads: usize,
    channels: usize,
    x: Vec<f32>,
    beta: Vec<f32>,
    alpha: Vec<f32>,
}

impl Rows {
    fn new(layer: &Layer, rows: usize, seed: u64) -> Self {
        let StateShape { heads, channels, .. } = *layer.shape();
        let scaled = |seed: u64, n: usize| numbers(seed, n).iter().map(|x| 3.0 * x).collect();
        let (x, beta) = (numbers(seed, rows * channels), scaled(seed + 1, rows * heads));
        Self { heads, channels, x, beta, alpha: scaled(seed + 2, rows * heads) }
    }

    fn len(&self) -> usize {
        self.x.len().checked_div(self.channels).unwrap_or(0)
    }

    fn slice(&self, rows: std::ops::Range<usize>) -> Self {
        let cut = |x: &[f32], width: usize| x[rows.start * width..rows.end * width].to_vec();
        let (x, beta) = (cut(&self.x, self.channels), cut(&self.beta, self.heads));
        Self { x, beta, alpha: cut(&self.alpha, self.heads), ..*self }
    }

    fn extend(&mut self, other: &Self) {
        (self.heads, self.channels) = (other.heads, other.channels);
        self.x.extend_from_slice(&other.x);
        self.beta.extend_from_slice(&other.beta);
        self.alpha.extend_from_slice(&other.alpha);
    }
}

/// Runs one step of several sequences through convolution and recurrence. Returns the output of each
/// sequence, as bits.
fn step(
    layer: &Layer,
    isa: Isa,
    pool: &Pool,
    arena: &mut [u8],
    sequences: &[(&Rows, StepState)],
) -> Vec<Vec<u32>> {
    let mut all = Rows::new(layer, 0, 0);
    let mut ranges = Vec::new();
    for (rows, _) in sequences {
        let start = all.len();
        all.extend(rows);
        ranges.push(StepSequence { rows: start..all.len(), context: 0, segment_start: None });
    }
    let states: Vec<StepState> = sequences.iter().map(|(_, state)| state.clone()).collect();
    let plan = StatePlan::new(&ranges, &states, layer.slot_bytes()).unwrap();
    let mut state = LayerState::new(arena, &plan, &layer.layout, OFFSET).unwrap();
    let StateShape { channels, taps, .. } = *layer.shape();
    let weight = ConvWeight::new(channels, taps, &layer.conv_weight).unwrap();
    let silu = layer.shape().kind != StateKind::Conv;
    conv(pool, isa, &mut state, &weight, (Some(&layer.conv_bias), silu), &mut all.x).unwrap();
    let out = layer.recurrence(isa, pool, &mut state, &all);
    ranges
        .iter()
        .map(|range| bits(&out[range.rows.start * layer.out_width()..range.rows.end * layer.out_width()]))
        .collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn write(read: Option<u32>, write: u32) -> StepState {
    StepState { read, write, exports: Vec::new(), deferred: false }
}

/// Compares relative to the largest value, because each value is a sum of numbers of that size.
fn close(got: &[f32], expected: &[f64], tolerance: f64) -> Result<(), TestCaseError> {
    prop_assert_eq!(got.len(), expected.len());
    let scale = expected.iter().fold(1.0f64, |scale, expected| scale.max(expected.abs()));
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(*got) - expected).abs();
        prop_assert!(error <= tolerance * scale, "element {}: {} is not {}", i, got, expected);
    }
    Ok(())
}

fn one_sequence(layer: &Layer, rows: usize, state: StepState) -> StatePlan {
    let sequence = StepSequence { rows: 0..rows, context: 0, segment_start: None };
    StatePlan::new(&[sequence], &[state], layer.slot_bytes()).unwrap()
}

fn check_recurrence(sizes: Sizes, rows: usize, seed: u64) -> Result<(), TestCaseError> {
    let layer = Layer::new(sizes, seed);
    // Two steps, so that the second one starts from the state that the first one stored.
    let inputs = [Rows::new(&layer, rows, seed + 10), Rows::new(&layer, 3, seed + 20)];
    for isa in Isa::available() {
        let mut arena = layer.arena(2);
        let mut expected_state = vec![0.0; layer.shape().recurrent_len()];
        for (input, state) in inputs.iter().zip([write(None, layer.slot(1)), write(Some(layer.slot(1)), 0)]) {
            let slot = state.write;
            let plan = one_sequence(&layer, input.len(), state);
            let mut state = LayerState::new(&mut arena, &plan, &layer.layout, OFFSET).unwrap();
            let out = layer.recurrence(isa, &pool(1), &mut state, input);
            close(&out, &layer.reference(input, &mut expected_state), 4e-6)?;
            let (_, state) = layer.state(&arena, slot);
            let state: Vec<f32> = state.into_iter().map(f32::from_bits).collect();
            close(&state, &expected_state, 4e-6)?;
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_recurrence_matches_the_reference(sizes in sizes(), rows in 1..20usize, seed in 0..1_000_000u64) {
        check_recurrence(Sizes { bf16: 0, ..sizes }, rows, seed)?;
    }

    #[test]
    fn conv_matches_the_reference(
        channels in 1..600usize,
        taps in 1..=4usize,
        rows in 0..20usize,
        (biased, silu) in any::<(bool, bool)>(),
        seed in 0..1_000_000u64,
    ) {
        let shape = StateShape { kind: StateKind::Mamba2, channels, taps, heads: 1, rows: 1, cols: 1 };
        let layer = Layer { layout: StateLayout::new(shape, &[HeadType::F32]).unwrap(), ..Layer::new(ODD[0], seed) };
        let weight = numbers(seed, channels * taps);
        let packed = ConvWeight::new(channels, taps, &weight).unwrap();
        let bias = numbers(seed + 1, channels);
        let bias = biased.then_some(&bias[..]);
        for isa in Isa::available() {
            let mut arena = layer.arena(1);
            let mut past = vec![0.0; shape.conv_len()];
            for (state, rows) in [(write(None, 0), rows), (write(Some(0), 0), 3)] {
                let input = numbers(seed + 2, rows * channels);
                let plan = one_sequence(&layer, rows, state);
                let mut state = LayerState::new(&mut arena, &plan, &layer.layout, OFFSET).unwrap();
                let mut x = input.clone();
                conv(&pool(1), isa, &mut state, &packed, (bias, silu), &mut x).unwrap();
                close(&x, &reference::conv(&shape, &weight, (bias, silu), &input, &mut past), 1e-6)?;
                // The state stores inputs, not results of arithmetic.
                let expected: Vec<f32> = past.iter().map(|x| *x as f32).collect();
                prop_assert_eq!(layer.state(&arena, 0).0, bits(&expected));
            }
        }
    }
}

/// Sizes that are no multiple of any vector, and sizes of real models.
const ODD: [Sizes; 4] = {
    let delta = Sizes {
        kind: StateKind::DeltaNet,
        taps: 4,
        key_heads: 1,
        heads_per_key: 3,
        rows: 24,
        cols: 40,
        tiled: true,
        bf16: 0,
    };
    let mamba = Sizes { kind: StateKind::Mamba2, taps: 3, rows: 12, cols: 20, ..delta };
    [
        delta,
        mamba,
        Sizes { key_heads: 2, heads_per_key: 2, rows: 128, cols: 128, ..delta },
        Sizes { taps: 4, rows: 64, cols: 128, ..mamba },
    ]
};

#[test]
fn known_sizes_match_the_reference() {
    for sizes in ODD {
        check_recurrence(sizes, 150, 7).unwrap();
    }
}

#[test]
fn a_layout_refuses_what_it_cannot_hold() {
    let shape = StateShape { kind: StateKind::DeltaNet, channels: 8, taps: 4, heads: 1, rows: 4, cols: 4 };
    let f32s = &[HeadType::F32][..];
    assert_eq!(StateLayout::new(shape, f32s).unwrap().bytes(), (32 + 4 * 16) * 4);
    assert_eq!(StateLayout::new(shape, &[HeadType::Bf16]).unwrap().bytes(), 32 * 4 + 4 * 16 * 2);
    // The second head starts on a cache line.
    let two = StateShape { heads: 2, rows: 3, ..shape };
    let mixed = StateLayout::new(two, &[HeadType::Bf16, HeadType::F32]).unwrap();
    assert_eq!(mixed.bytes(), 32 * 4 + 4 * 16 * 2 + 3 * 16 * 4);
    for (shape, heads) in [
        (StateShape { channels: 0, ..shape }, f32s),
        (StateShape { taps: 0, ..shape }, f32s),
        (StateShape { taps: 5, ..shape }, f32s),
        (StateShape { heads: 0, ..shape }, f32s),
        (StateShape { rows: 0, ..shape }, f32s),
        (StateShape { cols: 0, ..shape }, f32s),
        (StateShape { channels: usize::MAX, ..shape }, f32s),
        (StateShape { cols: usize::MAX, ..shape }, f32s),
        (StateShape { kind: StateKind::Conv, ..shape }, f32s),
        (StateShape { channels: 0, ..StateShape::of_conv(8, 4) }, &[]),
    ] {
        assert!(matches!(StateLayout::new(shape, heads), Err(Error::StateShape { .. })), "{shape:?}");
    }
    assert_eq!(StateLayout::new(StateShape::of_conv(9, 3), &[]).unwrap().bytes(), 128);
    let vast = StateShape { rows: usize::MAX / 64, heads: 2, ..shape };
    assert!(matches!(StateLayout::new(vast, &[HeadType::F32; 2]), Err(Error::StateShape { .. })));
    assert!(matches!(StateLayout::new(shape, &[HeadType::F32; 2]), Err(Error::Length { .. })));
}

#[test]
fn states_outside_the_arena_or_the_slot_are_refused() {
    let layer = Layer::new(ODD[0], 1);
    let mut arena = layer.arena(2);
    let plan = |state| one_sequence(&layer, 1, state);
    let mut result = |plan: &StatePlan, offset| {
        LayerState::new(&mut arena, plan, &layer.layout, offset)
            .map(|_| ())
            .map_err(|error| error.to_string())
    };
    assert_eq!(result(&plan(write(None, layer.slot(1))), OFFSET), Ok(()));
    for state in [write(None, layer.slot(1) + 1), write(Some(layer.slot(2)), 0), write(None, u32::MAX)] {
        let error = result(&plan(state), OFFSET).unwrap_err();
        assert!(error.contains("of an arena of"), "{error}");
    }
    let error = result(&plan(write(None, 0)), OFFSET + 64).unwrap_err();
    assert!(error.contains("of a slot of"), "{error}");
    let error = result(&plan(write(None, 0)), 4).unwrap_err();
    assert!(error.contains("cache line"), "{error}");
}

#[test]
fn buffers_of_other_shapes_are_refused() {
    for sizes in [ODD[0], ODD[1]] {
        let layer = Layer::new(sizes, 1);
        let mut arena = layer.arena(1);
        let plan = one_sequence(&layer, 2, write(None, 0));
        let mut state = LayerState::new(&mut arena, &plan, &layer.layout, OFFSET).unwrap();
        let (pool, isa) = (pool(1), Isa::Scalar);
        let good = Rows::new(&layer, 2, 3);
        let (long, width) = (Rows::new(&layer, 3, 3), layer.out_width());
        let mut scratch = ScanScratch::default();
        let mut delta = |net: &DeltaNet<'_>, x: &[f32], beta: &[f32], alpha: &[f32], out: usize| {
            let input = DeltaNetInput { qkv: x, beta, alpha };
            delta_net(&pool, isa, &mut state, net, &input, &mut vec![0.0; out], &mut scratch)
        };
        let net = layer.delta_net();
        let (x, beta, alpha) = (&good.x[..], &good.beta[..], &good.alpha[..]);
        if sizes.kind == StateKind::Mamba2 {
            assert_eq!(delta(&net, x, beta, alpha, 2 * width), Err(Error::StateKind { op: "delta net" }));
        } else {
            assert_eq!(delta(&net, x, beta, alpha, 2 * width), Ok(()));
            for result in [
                delta(&net, &long.x, beta, alpha, 2 * width),
                delta(&net, x, &long.beta, alpha, 2 * width),
                delta(&net, x, beta, &long.alpha, 2 * width),
                delta(&net, x, beta, alpha, 2 * width + 1),
                delta(&DeltaNet { a: &[0.0], ..net }, x, beta, alpha, 2 * width),
                delta(&DeltaNet { dt_bias: &[0.0], ..net }, x, beta, alpha, 2 * width),
            ] {
                assert!(matches!(result, Err(Error::Length { .. })), "{result:?}");
            }
            for k_heads in [0, 2] {
                let result = delta(&DeltaNet { k_heads, ..net }, x, beta, alpha, 2 * width);
                assert_eq!(result, Err(Error::HeadGroups { heads: 3, kv_heads: k_heads }));
            }
        }
        let mut mamba = |net: &Mamba2<'_>, x: &[f32], dt: &[f32], out: usize| {
            let input = Mamba2Input { xbc: x, dt };
            mamba2(&pool, isa, &mut state, net, &input, &mut vec![0.0; out], &mut scratch)
        };
        let net = layer.mamba2();
        if sizes.kind == StateKind::DeltaNet {
            assert_eq!(mamba(&net, x, alpha, 2 * width), Err(Error::StateKind { op: "Mamba-2" }));
        } else {
            assert_eq!(mamba(&net, x, alpha, 2 * width), Ok(()));
            for result in [
                mamba(&net, &long.x, alpha, 2 * width),
                mamba(&net, x, &long.alpha, 2 * width),
                mamba(&net, x, alpha, 2 * width - 1),
                mamba(&Mamba2 { a: &[], ..net }, x, alpha, 2 * width),
                mamba(&Mamba2 { d: &[], ..net }, x, alpha, 2 * width),
                mamba(&Mamba2 { dt_bias: &[], ..net }, x, alpha, 2 * width),
            ] {
                assert!(matches!(result, Err(Error::Length { .. })), "{result:?}");
            }
            let result = mamba(&Mamba2 { groups: 2, ..net }, x, alpha, 2 * width);
            assert_eq!(result, Err(Error::HeadGroups { heads: 3, kv_heads: 2 }));
        }
        let StateShape { channels, taps, .. } = *layer.shape();
        let weight = ConvWeight::new(channels, taps, &layer.conv_weight).unwrap();
        let mut convolve = |weight: &ConvWeight, bias: Option<&[f32]>, x: &[f32]| {
            conv(&pool, isa, &mut state, weight, (bias, true), &mut x.to_vec())
        };
        assert_eq!(convolve(&weight, None, x), Ok(()));
        let other = ConvWeight::new(channels, 2, &layer.conv_weight[..2 * channels]).unwrap();
        for result in [
            convolve(&weight, None, &long.x),
            convolve(&weight, Some(&[1.0]), x),
            convolve(&other, None, x),
            ConvWeight::new(channels, taps, &[1.0]).map(|_| ()),
        ] {
            assert!(matches!(result, Err(Error::Length { .. })), "{result:?}");
        }
    }
}
