//! One thread's matmul speed: with weights from memory, in GB/s of packed weights next to the read bandwidth
//! of the same run, and with weights in cache, in G multiply-accumulates per second.
//!
//! `cargo bench -p kvasir-kernels --bench matmul -- [types] [--isa NAME] [--mode int8|f32] [--streamed] [--cached]`

#![allow(unsafe_code)]

use kvasir_kernels::aligned::AlignedBuf;
use kvasir_kernels::isa::Isa;
use kvasir_kernels::matmul::{
    ActivationMode, Activations, Epilogue, MatmulKernels, MatrixView, PackedMatrix, QuantizedRows,
    matmul_single_thread,
};
use kvasir_kernels::quant::GgmlType;
use std::hint::black_box;
use std::sync::Arc;

/// Bytes of weights far larger than any cache.
const STREAMED: usize = 256 << 20;
/// Rows x columns of the matrices.
const SHAPES: [(usize, usize); 5] = [(576, 576), (1536, 576), (576, 1536), (1024, 3072), (4096, 4096)];
const BATCHES: [usize; 9] = [1, 2, 4, 8, 9, 13, 16, 64, 512];

struct Options {
    types: Vec<GgmlType>,
    isa: Isa,
    mode: ActivationMode,
    streamed: bool,
    cached: bool,
}

impl Options {
    fn parse() -> Self {
        let mut args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
        let mut value = |name: &str| {
            let at = args.iter().position(|arg| arg == name)?;
            args.remove(at);
            (at < args.len()).then(|| args.remove(at))
        };
        let isa = value("--isa").and_then(|name| Isa::ALL.into_iter().find(|isa| isa.name() == name));
        let mode = match value("--mode").as_deref() {
            Some("f32") => ActivationMode::F32,
            _ => ActivationMode::Int8,
        };
        let streamed = args.iter().any(|arg| arg == "--streamed");
        let cached = args.iter().any(|arg| arg == "--cached");
        let named = |ty: &GgmlType| args.iter().any(|arg| arg == ty.name());
        let served = || GgmlType::ALL.into_iter().filter(|&ty| MatrixView::supports(ty));
        let mut types: Vec<GgmlType> = served().filter(named).collect();
        if types.is_empty() {
            types = served().collect();
        }
        let isa = isa.unwrap_or_else(Isa::detect);
        Self { types, isa, mode, streamed: streamed || !cached, cached: cached || !streamed }
    }
}

/// Seconds that this thread has run.
fn thread_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the result.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(failed, 0, "threads have a clock");
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Seconds on the CPU of a call: the lower quartile of `runs`, after one that is not counted. Time that other
/// processes take away does not count, what they do to caches and memory does.
fn quartile(runs: usize, mut call: impl FnMut()) -> f64 {
    call();
    let time = |_| {
        let start = thread_seconds();
        call();
        thread_seconds() - start
    };
    let mut times: Vec<f64> = (0..runs).map(time).collect();
    times.sort_by(f64::total_cmp);
    times[runs / 4]
}

/// Bytes that look like a tensor: random codes, scales of ordinary size.
fn tensor(ty: GgmlType, count: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let mut bytes: Vec<u8> = (0..count / ty.block_len() * ty.block_bytes())
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        })
        .collect();
    // Every pair of bytes is a finite float of ordinary size, wherever a format has its scales.
    for pair in bytes.chunks_exact_mut(2) {
        pair[1] = pair[1] & 0x83 | 0x28;
    }
    bytes
}

fn read_bandwidth(buffer: &AlignedBuf<u32>) -> f64 {
    let seconds = quartile(9, || {
        let mut sums = [0_u32; 64];
        for line in buffer.chunks_exact(64) {
            for (sum, x) in sums.iter_mut().zip(line) {
                *sum ^= x;
            }
        }
        black_box(sums);
    });
    (buffer.len() * 4) as f64 / seconds / 1e9
}

struct Bench {
    kernels: MatmulKernels,
    mode: ActivationMode,
}

impl Bench {
    /// Seconds of one product with each of the matrices of a tensor.
    fn seconds(&self, tensor: &PackedMatrix, tokens: usize, runs: usize) -> f64 {
        let cols = tensor.cols();
        let a: Vec<f32> = (0..tokens * cols).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
        let mut quantized = QuantizedRows::new();
        quantized.quantize(self.kernels, cols, &a).expect("whole rows");
        let activations = Activations::new(tokens, cols, &a, Some(&quantized)).expect("same shape");
        let mut out = vec![0.0; tokens * tensor.rows()];
        quartile(runs, || {
            for matrix in 0..tensor.experts() {
                let view = tensor.view(matrix).expect("counted");
                matmul_single_thread(self.kernels, view, &activations, self.mode, &Epilogue::STORE, &mut out)
                    .expect("same shape");
            }
            black_box(&mut out);
        })
    }

    /// Matrices of one shape that together are far larger than any cache.
    fn streamed(&self, ty: GgmlType, probe: &AlignedBuf<u32>) {
        for (rows, cols) in SHAPES {
            if !cols.is_multiple_of(ty.block_len()) {
                continue;
            }
            let per_matrix = rows * ty.row_bytes(cols).expect("whole blocks");
            let count = STREAMED / per_matrix;
            let bytes = tensor(ty, count * rows * cols);
            let start = thread_seconds();
            let tensor = PackedMatrix::pack(ty, rows, cols, count, &bytes).expect("a served format");
            let packing = bytes.len() as f64 / (thread_seconds() - start) / 1e9;
            let mut tensors = vec![(format!("pack {packing:5.2}"), tensor)];
            if PackedMatrix::can_be_in_place(ty) {
                let in_place = PackedMatrix::in_place(ty, rows, cols, count, Arc::new(bytes));
                tensors.push(("in place  ".to_owned(), in_place.expect("a plain format")));
            }
            for (label, tensor) in tensors {
                print!("{:<7} {rows:>5} x {cols:<5} {label}  streamed GB/s (GMAC/s):", ty.name());
                for tokens in [1, 2, 4, 8, 16, 64] {
                    let seconds = self.seconds(&tensor, tokens, 9);
                    let gb = tensor.resident_bytes() as f64 / seconds / 1e9;
                    let macs = (count * rows * cols * tokens) as f64 / seconds / 1e9;
                    print!("  M={tokens} {gb:4.1} ({macs:5.1})");
                }
                println!("  (read {:.1})", read_bandwidth(probe));
            }
        }
    }

    fn cached(&self, ty: GgmlType) {
        for (rows, cols) in SHAPES {
            if !cols.is_multiple_of(ty.block_len()) {
                continue;
            }
            let matrix = PackedMatrix::pack(ty, rows, cols, 1, &tensor(ty, rows * cols)).expect("served");
            print!("{:<7} {rows:>5} x {cols:<5} GMAC/s:", ty.name());
            for tokens in BATCHES {
                let macs = (rows * cols * tokens) as f64;
                let runs = ((4e9 / macs) as usize).clamp(9, 401);
                print!("  M={tokens} {:6.1}", macs / self.seconds(&matrix, tokens, runs) / 1e9);
            }
            println!();
        }
    }
}

fn main() {
    let options = Options::parse();
    let kernels = MatmulKernels::for_isa(options.isa).expect("an instruction set of this processor");
    let bench = Bench { kernels, mode: options.mode };
    let mut probe = AlignedBuf::<u32>::zeroed(STREAMED / 4);
    probe.iter_mut().enumerate().for_each(|(i, x)| *x = i as u32);
    println!("{} {:?}, 1 thread, read {:.1} GB/s", options.isa, options.mode, read_bandwidth(&probe));
    for &ty in &options.types {
        if options.streamed {
            bench.streamed(ty, &probe);
        }
        if options.cached {
            bench.cached(ty);
        }
    }
}
