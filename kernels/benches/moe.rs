//! A mixture of experts as a decoder runs it: `cargo bench -p kvasir-kernels --bench moe [-- FILTER]`, where a
//! filter is part of a line's beginning, such as `Q4_K rows 64`.
//!
//! Each row of a step goes to 4 of 32 experts of width 512 in a model of width 1024, on one thread (`THREADS`
//! sets another number). Layers follow each other and every step routes anew, so that weights come from
//! memory as they do in a model. Figures are medians: microseconds a layer, and multiply-accumulates per
//! nanosecond.

#![allow(unsafe_code)]

use kvasir_kernels::Isa;
use kvasir_kernels::backend::{
    ActivationMode, Backend, ExpertGateUp, GateActivation, MatrixId, MatrixSource, MoeOp, Selection,
};
use kvasir_kernels::cpu::{CpuBackend, CpuConfig};
use kvasir_kernels::pool::{Pool, PoolConfig};
use kvasir_kernels::quant::GgmlType;
use std::num::NonZeroUsize;

const EXPERTS: usize = 32;
const USED: usize = 4;
const HIDDEN: usize = 1024;
const FF: usize = 512;
const LAYERS: usize = 6;
const ROWS: [usize; 4] = [1, 8, 64, 512];

/// A small generator of numbers.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        self.0 >> 32
    }

    fn values(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next() as f32 / (1_u64 << 31) as f32 - 1.0).collect()
    }

    /// Bytes that look like a tensor: random codes, scales of ordinary size.
    fn tensor(&mut self, ty: GgmlType, count: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> =
            (0..count / ty.block_len() * ty.block_bytes()).map(|_| self.next() as u8).collect();
        for block in bytes.chunks_exact_mut(ty.block_bytes()) {
            match ty {
                GgmlType::MXFP4 => block[0] = 118,
                // Two scales of about 2^-9.
                _ => (block[1], block[3]) = (0x18, 0x18),
            }
        }
        bytes
    }
}

/// Seconds: of this thread's own CPU time where it works alone, so that a busy machine disturbs less.
fn now(threads: usize) -> f64 {
    let clock = if threads == 1 { libc::CLOCK_THREAD_CPUTIME_ID } else { libc::CLOCK_MONOTONIC };
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` outlives the call.
    let result = unsafe { libc::clock_gettime(clock, &mut time) };
    assert_eq!(result, 0, "both clocks exist");
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

fn run(ty: GgmlType, threads: NonZeroUsize, filter: &str) -> Result<(), kvasir_kernels::Error> {
    let isa = Isa::detect();
    let config = CpuConfig { matmul: isa, attention: isa, rows: isa, activations: ActivationMode::Int8 };
    let mut backend = CpuBackend::new(config, Pool::new(PoolConfig::new(threads))?)?;
    let mut random = Random(1);
    let [x, router, out] = [HIDDEN, EXPERTS, HIDDEN].map(|cols| backend.create_buffer(ROWS[3], cols));
    let (x, router, out) = (x?, router?, out?);
    let mut matrix = |rows: usize, cols: usize| -> Result<MatrixId, kvasir_kernels::Error> {
        let bytes = random.tensor(ty, EXPERTS * rows * cols);
        let ggml_type = ty.id();
        backend.create_matrix(MatrixSource { ggml_type, rows, cols, experts: EXPERTS, bytes: &bytes })
    };
    let layers = (0..LAYERS)
        .map(|_| {
            Ok::<_, kvasir_kernels::Error>([matrix(FF, HIDDEN)?, matrix(FF, HIDDEN)?, matrix(HIDDEN, FF)?])
        })
        .collect::<Result<Vec<_>, _>>()?;
    for rows in ROWS {
        let name = format!("{} rows {rows}", ty.name());
        if !name.contains(filter) {
            continue;
        }
        let mut times = Vec::new();
        for round in 0..(8192 / (rows + 32)).max(12) {
            for [gate, up, down] in &layers {
                backend.write_rows(x, &random.values(rows * HIDDEN))?;
                backend.write_rows(router, &random.values(rows * EXPERTS))?;
                let gate_up = ExpertGateUp::Separate {
                    gate: *gate,
                    up: *up,
                    gate_scale: None,
                    up_scale: None,
                    gate_bias: None,
                    up_bias: None,
                };
                let op = MoeOp {
                    x,
                    router,
                    out,
                    used: USED,
                    selection: Selection::default(),
                    renormalise: true,
                    scale: 1.0,
                    accumulate: false,
                    gate_up,
                    down: *down,
                    down_scale: None,
                    down_bias: None,
                    ff: FF,
                    activation: GateActivation::Silu,
                };
                let start = now(threads.get());
                backend.moe(&op)?;
                if round > 0 {
                    times.push(now(threads.get()) - start);
                }
            }
        }
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        let macs = (rows * USED * 3 * HIDDEN * FF) as f64;
        println!(
            "{:<6} rows {rows:>3}  {:9.1} us  {:6.1} GMAC/s",
            ty.name(),
            median * 1e6,
            macs / median / 1e9
        );
    }
    Ok(())
}

fn main() {
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with("--")).unwrap_or_default();
    let threads = std::env::var("THREADS").ok().and_then(|n| n.parse().ok()).unwrap_or(NonZeroUsize::MIN);
    println!("{}, {threads} thread(s), {USED} of {EXPERTS} experts, {HIDDEN} x {FF}", Isa::detect());
    for ty in [GgmlType::Q4_K, GgmlType::MXFP4] {
        if ROWS.iter().any(|rows| format!("{} rows {rows}", ty.name()).contains(&filter)) {
            run(ty, threads, &filter).expect("a mixture that the backend serves");
        }
    }
}
