//! One thread's matmul speed: matrix-vector products in GB/s of packed weights beside the read bandwidth of
//! the same run, and batched products in G multiply-accumulates per second.
//!
//! `cargo bench -p kvasir-kernels --bench matmul -- [types] [--isa NAME] [--mode int8|f32] [--gemv] [--gemm]`

#![allow(unsafe_code)]

use kvasir_kernels::aligned::AlignedBuf;
use kvasir_kernels::isa::Isa;
use kvasir_kernels::matmul::{
    ActivationMode, Activations, Epilogue, MatmulKernels, MatrixView, PackedMatrix, QuantizedRows,
    matmul_single_thread,
};
use kvasir_kernels::quant::GgmlType;
use std::hint::black_box;

/// Packed bytes of a matrix far larger than any cache.
const STREAMED: usize = 256 << 20;
/// Rows x columns of the batched products.
const SHAPES: [(usize, usize); 4] = [(576, 576), (1536, 576), (576, 1536), (1024, 3072)];
const BATCHES: [usize; 7] = [1, 2, 4, 8, 16, 64, 512];

struct Options {
    types: Vec<GgmlType>,
    isa: Isa,
    mode: ActivationMode,
    gemv: bool,
    gemm: bool,
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
        let gemv = args.iter().any(|arg| arg == "--gemv");
        let gemm = args.iter().any(|arg| arg == "--gemm");
        let named = |ty: &GgmlType| args.iter().any(|arg| arg == ty.name());
        let served = || GgmlType::ALL.into_iter().filter(|&ty| MatrixView::supports(ty));
        let mut types: Vec<GgmlType> = served().filter(named).collect();
        if types.is_empty() {
            types = served().collect();
        }
        let isa = isa.unwrap_or_else(Isa::detect);
        Self { types, isa, mode, gemv: gemv || !gemm, gemm: gemm || !gemv }
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

/// Seconds on the CPU of the fastest of `runs` calls, after one that is not counted: what the machine can do
/// when nobody interrupts it.
fn fastest(runs: usize, mut call: impl FnMut()) -> f64 {
    call();
    let time = |_| {
        let start = thread_seconds();
        call();
        thread_seconds() - start
    };
    (0..runs).map(time).fold(f64::INFINITY, f64::min)
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
    let seconds = fastest(9, || {
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
    /// Seconds of one product.
    fn seconds(&self, matrix: &PackedMatrix, tokens: usize, runs: usize) -> f64 {
        let cols = matrix.cols();
        let a: Vec<f32> = (0..tokens * cols).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
        let mut quantized = QuantizedRows::new();
        quantized.quantize(self.kernels, cols, &a).expect("whole rows");
        let activations = Activations::new(tokens, cols, &a, Some(&quantized)).expect("same shape");
        let mut out = vec![0.0; tokens * matrix.rows()];
        let view = matrix.view(0).expect("one matrix");
        fastest(runs, || {
            matmul_single_thread(self.kernels, view, &activations, self.mode, &Epilogue::STORE, &mut out)
                .expect("same shape");
            black_box(&mut out);
        })
    }

    fn gemv(&self, ty: GgmlType, probe: &AlignedBuf<u32>) {
        let cols = 1024;
        let per_row = ty.row_bytes(cols).expect("whole blocks");
        let rows = STREAMED / per_row / 16 * 16;
        let bytes = tensor(ty, rows * cols);
        let start = thread_seconds();
        let matrix = PackedMatrix::pack(ty, rows, cols, 1, &bytes).expect("a served format");
        let packing = bytes.len() as f64 / (thread_seconds() - start) / 1e9;
        drop(bytes);
        print!("{:<7} pack {packing:5.2} GB/s  stream GB/s:", ty.name());
        for tokens in [1, 2, 4, 8] {
            let gb = matrix.resident_bytes() as f64 / self.seconds(&matrix, tokens, 11) / 1e9;
            print!("  M={tokens} {gb:5.1}");
        }
        println!("  (read {:.1})", read_bandwidth(probe));
    }

    fn gemm(&self, ty: GgmlType) {
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
        if options.gemv {
            bench.gemv(ty, &probe);
        }
        if options.gemm {
            bench.gemm(ty);
        }
    }
}
