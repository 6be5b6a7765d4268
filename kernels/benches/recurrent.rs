//! Recurrent layers: `cargo bench -p kvasir-kernels --bench recurrent [-- FILTER]`.
//!
//! Decode rows print the bytes of state read and written per second by one-row steps, in place and from one
//! slot to another, over more layers than any cache holds. They also print the bytes per second of a bare
//! multiplication in place.
//! Prefill rows print the time per row and layer of one step of 512 rows. Each figure is the best of its
//! repetitions, on one thread (`THREADS` sets another number) and on the best instruction set (`ISA` selects
//! another one). Time is the thread's CPU time where there is one. The first line is the read bandwidth of
//! the same threads.

#![allow(unsafe_code)]

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use kvasir_kernels::Isa;
use kvasir_kernels::aligned::AlignedBuf;
use kvasir_kernels::attention::OFFSET_UNIT;
use kvasir_kernels::backend::{HeadType, StateKind, StateShape, StepSequence, StepState};
use kvasir_kernels::bandwidth::BandwidthProbe;
use kvasir_kernels::ops;
use kvasir_kernels::pool::{Pool, PoolConfig};
use kvasir_kernels::recurrent::{
    ConvWeight, DeltaNet, DeltaNetInput, LayerState, Mamba2, Mamba2Input, ScanScratch, StateLayout,
    StatePlan, conv, delta_net, mamba2,
};

/// Bytes of states that a decode run walks through, so that they come from memory.
const WORKING_SET: usize = 256 << 20;

const PREFILL_ROWS: usize = 512;

/// A layer's sizes: heads, rows and columns of a state, heads of q and k, or groups, and the type of all heads.
struct Model {
    name: &'static str,
    shape: StateShape,
    key_heads: usize,
    heads: HeadType,
}

impl Model {
    fn layout(&self) -> StateLayout {
        StateLayout::new(self.shape, &vec![self.heads; self.shape.heads]).expect("a layout")
    }
}

fn models() -> [Model; 4] {
    let shape = |kind, channels, heads, rows, cols| StateShape { kind, channels, taps: 4, heads, rows, cols };
    let delta = shape(StateKind::DeltaNet, 3 * 16 * 128, 16, 128, 128);
    let mamba = shape(StateKind::Mamba2, 48 * 64 + 2 * 128, 48, 64, 128);
    let model = |name, shape, key_heads, heads| Model { name, shape, key_heads, heads };
    [
        model("delta-net 16x128x128", delta, 16, HeadType::F32),
        model("delta-net 16x128x128 bf16", delta, 16, HeadType::Bf16),
        model("mamba2 48x64x128", mamba, 1, HeadType::F32),
        model("mamba2 48x64x128 bf16", mamba, 1, HeadType::Bf16),
    ]
}

fn main() {
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with("--")).unwrap_or_default();
    let threads = std::env::var("THREADS").ok().and_then(|n| n.parse().ok()).unwrap_or(NonZeroUsize::MIN);
    let pool = Pool::new(PoolConfig::new(threads)).expect("threads");
    let isa = std::env::var("ISA").ok();
    let isa = Isa::available().into_iter().rfind(|level| isa.as_ref().is_none_or(|isa| level.name() == isa));
    let bench = Bench { pool, isa: isa.expect("an instruction set"), probe: BandwidthProbe::new() };
    println!("{}, {threads} thread(s), reading {:.1} GB/s", bench.isa, bench.bandwidth());
    for model in models() {
        let matches_filter = |kind: &str| format!("{kind} {}", model.name).contains(&filter);
        if matches_filter("decode") {
            bench.decode(&model);
        }
        if matches_filter("prefill") {
            bench.prefill(&model);
        }
        if matches_filter("conv") {
            bench.conv(&model);
        }
    }
}

/// Seconds since some start: of this thread's own CPU time where it works alone, so that a busy machine disturbs
/// less.
fn now(threads: usize) -> f64 {
    let clock = if threads == 1 { libc::CLOCK_THREAD_CPUTIME_ID } else { libc::CLOCK_MONOTONIC };
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` outlives the call.
    let result = unsafe { libc::clock_gettime(clock, &mut time) };
    assert_eq!(result, 0, "both clocks exist");
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

struct Bench {
    pool: Pool,
    isa: Isa,
    probe: BandwidthProbe,
}

/// Weights and inputs of some rows.
struct Layer {
    layout: StateLayout,
    key_heads: usize,
    a: Vec<f32>,
    ones: Vec<f32>,
    x: Vec<f32>,
    scalars: Vec<f32>,
    out: Vec<f32>,
    scratch: ScanScratch,
}

impl Layer {
    fn new(model: &Model, rows: usize) -> Self {
        let StateShape { kind, channels, heads, .. } = model.shape;
        let outer = if kind == StateKind::DeltaNet { model.shape.cols } else { model.shape.rows };
        let numbers = |n: usize| (0..n).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect::<Vec<f32>>();
        Self {
            layout: model.layout(),
            key_heads: model.key_heads,
            a: vec![-0.1; heads],
            ones: vec![1.0; heads],
            x: numbers(rows * channels),
            scalars: numbers(rows * heads),
            out: vec![0.0; rows * heads * outer],
            scratch: ScanScratch::default(),
        }
    }

    fn run(&mut self, bench: &Bench, arena: &mut [u8], plan: &StatePlan) {
        let Self { layout, a, ones, x, scalars, out, scratch, .. } = self;
        let mut state = LayerState::new(arena, plan, layout, 0).expect("a state");
        let (pool, isa) = (&bench.pool, bench.isa);
        match layout.shape().kind {
            StateKind::DeltaNet => {
                let net = DeltaNet { a, dt_bias: ones, k_heads: self.key_heads, tiled: false, l2_eps: 1e-6 };
                let input = DeltaNetInput { qkv: x, beta: scalars, alpha: scalars };
                delta_net(pool, isa, &mut state, &net, &input, out, scratch).expect("a step");
            }
            StateKind::Mamba2 => {
                let net = Mamba2 { a, d: ones, dt_bias: ones, groups: self.key_heads };
                let input = Mamba2Input { xbc: x, dt: scalars };
                mamba2(pool, isa, &mut state, &net, &input, out, scratch).expect("a step");
            }
            StateKind::Conv => {}
        }
    }
}

/// One sequence of `rows` that goes from one slot to another; slots back to back.
fn plan(layout: &StateLayout, rows: usize, read: Option<usize>, write: usize) -> StatePlan {
    let slot = |index: usize| (index * layout.bytes() / OFFSET_UNIT) as u32;
    let sequence = StepSequence { rows: 0..rows, context: 0, segment_start: None };
    let state = StepState { read: read.map(slot), write: slot(write), exports: Vec::new(), deferred: false };
    StatePlan::new(&[sequence], &[state], layout.bytes()).expect("a plan")
}

impl Bench {
    /// Seconds of the best repetition within about `budget`.
    fn best(&self, budget: Duration, mut f: impl FnMut()) -> f64 {
        let (start, threads) = (Instant::now(), self.pool.threads());
        let mut best = f64::MAX;
        while start.elapsed() < budget {
            let run = now(threads);
            f();
            best = best.min(now(threads) - run);
        }
        best
    }

    fn bandwidth(&self) -> f64 {
        self.probe.median(&self.pool, 5) / 1e9
    }

    /// Returns the GB/s, read and written, of a bare multiplication in place.
    fn scaling(&self) -> f64 {
        let mut values = vec![1.0; WORKING_SET / size_of::<f32>()];
        let seconds =
            self.best(Duration::from_secs(1), || ops::scale(&self.pool, self.isa, &mut values, 0.999));
        2.0 * WORKING_SET as f64 / seconds / 1e9
    }

    fn decode(&self, model: &Model) {
        let mut layer = Layer::new(model, 1);
        let layout = layer.layout.clone();
        let slots = WORKING_SET / layout.bytes();
        let mut arena = AlignedBuf::<u8>::zeroed(slots * layout.bytes());
        // Real pages, not the one that is all zeroes.
        for slot in 0..slots {
            layer.run(self, &mut arena, &plan(&layout, 1, None, slot));
        }
        let in_place: Vec<_> = (0..slots).map(|slot| plan(&layout, 1, Some(slot), slot)).collect();
        let moved: Vec<_> =
            (0..slots / 2).map(|slot| plan(&layout, 1, Some(slot), slots / 2 + slot)).collect();
        let mut rate = |plans: &[StatePlan]| {
            let seconds = self.best(Duration::from_secs(2), || {
                plans.iter().for_each(|plan| layer.run(self, &mut arena, plan));
            });
            2.0 * (plans.len() * layout.bytes()) as f64 / seconds / 1e9
        };
        let (in_place, moved) = (rate(&in_place), rate(&moved));
        let micros = 2.0 * layout.bytes() as f64 / in_place / 1e3;
        println!(
            "decode {}: in place {micros:.1} us, {in_place:.1} GB/s, to another slot {moved:.1} GB/s, reading {:.1} GB/s, scaling in \
             place {:.1} GB/s",
            model.name,
            self.bandwidth(),
            self.scaling()
        );
    }

    fn prefill(&self, model: &Model) {
        let mut layer = Layer::new(model, PREFILL_ROWS);
        let layout = layer.layout.clone();
        let mut arena = AlignedBuf::<u8>::zeroed(layout.bytes());
        let plan = plan(&layout, PREFILL_ROWS, None, 0);
        let seconds = self.best(Duration::from_secs(2), || layer.run(self, &mut arena, &plan));
        // Vectors of sixteen values that one core processes in a second. Each counts once.
        let vectors = (PREFILL_ROWS * layout.shape().recurrent_len() / 16) as f64;
        println!(
            "prefill {}: {PREFILL_ROWS} rows in {:.2} ms, {:.2} us a row, {:.2} ns a vector",
            model.name,
            seconds * 1e3,
            seconds / PREFILL_ROWS as f64 * 1e6,
            seconds / vectors * 1e9,
        );
    }

    fn conv(&self, model: &Model) {
        let layout = model.layout();
        let StateShape { channels, taps, .. } = model.shape;
        let weight = ConvWeight::new(channels, taps, &vec![0.25; channels * taps]).expect("a weight");
        let mut arena = AlignedBuf::<u8>::zeroed(layout.bytes());
        for rows in [1, PREFILL_ROWS] {
            let mut x = vec![0.5; rows * channels];
            let plan = plan(&layout, rows, Some(0), 0);
            // One row takes no longer than the clock's own tick.
            let calls = PREFILL_ROWS / rows;
            let seconds = self.best(Duration::from_secs(1), || {
                for _ in 0..calls {
                    let mut state = LayerState::new(&mut arena, &plan, &layout, 0).expect("a state");
                    conv(&self.pool, self.isa, &mut state, &weight, (None, true), &mut x).expect("a step");
                }
            });
            println!("conv {} rows {rows}: {:.1} us", model.name, seconds / calls as f64 * 1e6);
        }
    }
}
