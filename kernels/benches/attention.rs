//! Attention at depth: `cargo bench -p kvasir-kernels --bench attention [-- FILTER]`.
//!
//! Decode rows print the KV bytes read per second without a block table, with blocks in order and with a
//! permuted table, interleaved; prefill rows print the arithmetic rate. Each figure is the best of its
//! repetitions, on one thread (`THREADS` sets another number). The first line is the read bandwidth of the
//! same threads. Time is the thread's CPU time where there is one.

#![allow(unsafe_code)]

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use kvasir_kernels::Isa;
use kvasir_kernels::aligned::AlignedBuf;
use kvasir_kernels::attention::{
    ArenaView, AttentionCall, AttentionScratch, AttentionShape, BlockTable, KvLayout, KvType, QueryRow,
    StepPlan, Visible, attention,
};
use kvasir_kernels::pool::{Pool, PoolConfig};

/// Query heads, key/value heads, head width.
type Model = (usize, usize, usize);

const MODELS: [Model; 3] = [(9, 3, 64), (16, 8, 128), (4, 1, 256)];

const BLOCK_TOKENS: usize = 32;

/// Bytes of KV that a decode run walks through, so that it comes from memory: a model has many layers.
const WORKING_SET: usize = 256 << 20;

fn main() {
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with("--")).unwrap_or_default();
    let threads = std::env::var("THREADS").ok().and_then(|n| n.parse().ok()).unwrap_or(NonZeroUsize::MIN);
    let pool = Pool::new(PoolConfig::new(threads)).expect("threads");
    let bench = Bench { pool, isa: Isa::detect() };
    println!(
        "{}, {threads} thread(s), blocks of {BLOCK_TOKENS}, reading {:.1} GB/s",
        bench.isa,
        bench.bandwidth()
    );
    for ty in [KvType::F16, KvType::Q8_0, KvType::F32] {
        for model in MODELS {
            let name = format!("{} {}/{}/{}", ty.name(), model.0, model.1, model.2);
            for depth in [512, 4096, 16384] {
                if format!("decode {name} {depth}").contains(&filter) {
                    bench.decode(&name, model, ty, depth);
                }
            }
            for rows in [512, 2048] {
                if ty == KvType::F16 && format!("prefill {name} {rows}").contains(&filter) {
                    bench.prefill(&name, model, ty, rows);
                }
            }
            if ty == KvType::F16 && format!("shared {name}").contains(&filter) {
                bench.shared(&name, model, ty);
            }
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

fn layout((_, kv_heads, width): Model, ty: KvType) -> KvLayout {
    KvLayout::new(ty, BLOCK_TOKENS, kv_heads, width, width).expect("a layout")
}

/// What is in it does not matter to the speed, as long as it is finite.
fn arena(bytes: usize) -> AlignedBuf<u8> {
    let mut arena = AlignedBuf::zeroed(bytes);
    arena.fill(0x11);
    arena
}

/// Blocks of `unit` in a fixed arbitrary order.
fn permuted(blocks: usize, unit: u32) -> Vec<u32> {
    let mut order: Vec<u32> = (0..blocks as u32).map(|block| block * unit).collect();
    let mut state = 1u64;
    for i in (1..order.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        order.swap(i, (state >> 33) as usize % (i + 1));
    }
    order
}

struct Bench {
    pool: Pool,
    isa: Isa,
}

/// A step and its buffers.
struct Step {
    plan: StepPlan,
    q: Vec<f32>,
    out: Vec<f32>,
    scratch: AttentionScratch,
}

impl Bench {
    fn step<'a>(&self, shape: AttentionShape, rows: &[QueryRow], placements: &'a [BlockTable<'a>]) -> Step {
        let plan = StepPlan::new(shape, rows, placements, self.pool.threads()).expect("a plan");
        let len = rows.len() * shape.heads * shape.layout.head_dim();
        Step { plan, q: vec![0.01; len], out: vec![0.0; len], scratch: AttentionScratch::default() }
    }

    fn run(&self, step: &mut Step, arena: &ArenaView<'_>, layer_offset: usize) {
        let call = AttentionCall { arena, layer_offset, scale: 0.1, softcap: None, sinks: None };
        attention(&self.pool, self.isa, &step.plan, &call, &step.q, &mut step.out, &mut step.scratch)
            .expect("attention");
    }

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
        let buf = AlignedBuf::<u32>::zeroed(WORKING_SET / 4);
        let chunk = buf.len() / 64;
        let seconds = self.best(Duration::from_secs(1), || {
            self.pool.for_each(64, &|i| {
                let sum = buf[i * chunk..(i + 1) * chunk].iter().fold(0u32, |sum, x| sum.wrapping_add(*x));
                std::hint::black_box(sum);
            });
        });
        WORKING_SET as f64 / seconds / 1e9
    }

    fn decode(&self, name: &str, model: Model, ty: KvType, depth: usize) {
        let layout = layout(model, ty);
        let blocks = depth / BLOCK_TOKENS;
        let layer_bytes = blocks * layout.bytes();
        let layers = (WORKING_SET / layer_bytes).max(1);
        let mut bytes = arena(layers * layer_bytes);
        let arena = ArenaView::new(&mut bytes).expect("an arena");
        // A block of the arena holds all layers of its tokens.
        let unit = (layers * layout.bytes() / 64) as u32;
        let in_order: Vec<u32> = (0..blocks as u32).map(|block| block * unit).collect();
        let shuffled = permuted(blocks, unit);
        let placements = [
            [BlockTable::Contiguous { first: 0, stride: unit }],
            [BlockTable::Paged(&in_order)],
            [BlockTable::Paged(&shuffled)],
        ];
        let shape = AttentionShape { layout, heads: model.0, visible: Visible::Causal };
        let row = [QueryRow { sequence: 0, position: depth as u32 - 1 }];
        let mut seconds = [f64::MAX; 3];
        // Interleaved, so that a disturbance meets all three.
        for _ in 0..10 {
            for (placement, seconds) in placements.iter().zip(&mut seconds) {
                let mut step = self.step(shape, &row, placement);
                let run = self.best(Duration::from_millis(60), || {
                    (0..layers).for_each(|layer| self.run(&mut step, &arena, layer * layout.bytes()));
                });
                *seconds = seconds.min(run);
            }
        }
        let total = (layers * layer_bytes) as f64 / 1e9;
        let [contiguous, paged, permuted] = seconds;
        let tax = |seconds: f64| 100.0 * (seconds / contiguous - 1.0);
        println!(
            "decode {name} depth {depth}: contiguous {:.1} GB/s, paged {:.1} ({:+.1} %), permuted {:.1} ({:+.1} %)",
            total / contiguous,
            total / paged,
            tax(paged),
            total / permuted,
            tax(permuted),
        );
    }

    fn prefill(&self, name: &str, model: Model, ty: KvType, rows: usize) {
        let layout = layout(model, ty);
        let blocks = rows / BLOCK_TOKENS;
        let mut bytes = arena(blocks * layout.bytes());
        let arena = ArenaView::new(&mut bytes).expect("an arena");
        let table = permuted(blocks, (layout.bytes() / 64) as u32);
        let placements = [BlockTable::Paged(&table)];
        let queries: Vec<_> = (0..rows as u32).map(|position| QueryRow { sequence: 0, position }).collect();
        let mut step = self.step(
            AttentionShape { layout, heads: model.0, visible: Visible::Causal },
            &queries,
            &placements,
        );
        let seconds = self.best(Duration::from_millis(1500), || self.run(&mut step, &arena, 0));
        // Two products of two operations each for every visible pair.
        let pairs = (rows * (rows + 1) / 2 * model.0) as f64;
        println!("prefill {name} rows {rows}: {:.1} GFLOP/s", pairs * 4.0 * model.2 as f64 / seconds / 1e9);
    }

    /// 32 decoding sequences on one prefix of 1,500 tokens, and the same without sharing.
    fn shared(&self, name: &str, model: Model, ty: KvType) {
        const SEQUENCES: usize = 32;
        let layout = layout(model, ty);
        let unit = (layout.bytes() / 64) as u32;
        let blocks = 1_536 / BLOCK_TOKENS;
        let mut bytes = arena(SEQUENCES * blocks * layout.bytes());
        let arena = ArenaView::new(&mut bytes).expect("an arena");
        let block =
            |s: usize, i: usize, shared: usize| (if i < shared { i } else { s * blocks + i }) as u32 * unit;
        let rows: Vec<_> =
            (0..SEQUENCES as u32).map(|s| QueryRow { sequence: s, position: 1_510 + s % 20 }).collect();
        let time = |prefix: usize| {
            let shared = prefix / BLOCK_TOKENS;
            let tables: Vec<Vec<u32>> =
                (0..SEQUENCES).map(|s| (0..blocks).map(|i| block(s, i, shared)).collect()).collect();
            let placements: Vec<_> = tables.iter().map(|table| BlockTable::Paged(table)).collect();
            let shape = AttentionShape { layout, heads: model.0, visible: Visible::Causal };
            let mut step = self.step(shape, &rows, &placements);
            self.best(Duration::from_secs(1), || self.run(&mut step, &arena, 0))
        };
        let (apart, together) = (time(0), time(1_500));
        println!(
            "shared {name}: 32 decodes at 1,500: {:.0} us apart, {:.0} us on one prefix ({:.1}x)",
            apart * 1e6,
            together * 1e6,
            apart / together
        );
    }
}
