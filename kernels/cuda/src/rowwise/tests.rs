//! Row operations on the interpreter, for both architectures, compared with the CPU's operations and the
//! references.

use super::{Affine, DeviceNorm, Rows, RowwiseKernels, Up};
use crate::matmul::Quantised;
use crate::tests::hole::{self, Hole};
use crate::tests::sim::Sim;
use crate::{Arch, CudaError, DevicePtr, quantised_row_bytes, source};
use kernels::backend::{GateActivation, NO_INDEX};
use kernels::isa::Isa;
use kernels::matmul::{MatmulKernels, QuantizedRows};
use kernels::ops::{self, Activation, Columns, Gating};
use kernels::pool::{Pool, PoolConfig};
use kernels::reference::random::Random;
use kernels::reference::rows as reference;
use std::num::NonZeroUsize;

struct Case {
    sim: Sim,
    kernels: RowwiseKernels,
}

impl Case {
    fn new(arch: Arch) -> Self {
        let mut sim = Sim::new(arch);
        let compiled = sim.compiled(&source::ROWWISE);
        let kernels = RowwiseKernels::load(&mut sim.device, compiled).unwrap();
        Self { sim, kernels }
    }

    fn each(test: impl Fn(&mut Self)) {
        Arch::CHECKED.into_iter().for_each(|arch| test(&mut Self::new(arch)));
    }

    fn affine(&mut self, values: &[f32]) -> Option<Affine> {
        Some(Affine { start: self.sim.values(values), len: values.len() })
    }
}

fn pool() -> Pool {
    Pool::new(PoolConfig::new(NonZeroUsize::MIN)).unwrap()
}

/// Returns the 8-bit form with padding, as the CPU computes it.
fn quantised(cols: usize, x: &[f32]) -> Vec<u8> {
    let mut rows = QuantizedRows::new();
    rows.quantize(MatmulKernels::for_isa(Isa::Scalar).unwrap(), cols, x).unwrap();
    let mut bytes = Vec::new();
    for row in rows.blocks().chunks(cols.div_ceil(32)) {
        let start = bytes.len();
        for block in row {
            bytes.extend(block.quants.map(|quant| quant as u8));
            bytes.extend(block.scale.to_bits().to_le_bytes());
            bytes.extend(block.scaled_sum.to_bits().to_le_bytes());
            bytes.extend(block.minus_sum.to_le_bytes());
            bytes.extend(block.minus_half_sums.iter().flat_map(|sum| sum.to_le_bytes()));
        }
        bytes.resize(start + quantised_row_bytes(cols), 0);
    }
    bytes
}

fn assert_same(found: &[f32], expected: &[f32], label: &str) {
    assert_eq!(found.len(), expected.len());
    for (i, (x, e)) in found.iter().zip(expected).enumerate() {
        assert!(x == e || x.is_nan() && e.is_nan(), "{label} #{i}: {x}, not {e}");
    }
}

fn assert_close(found: &[f32], expected: &[f64], label: &str) {
    assert_eq!(found.len(), expected.len());
    for (i, (x, e)) in found.iter().zip(expected).enumerate() {
        assert!((f64::from(*x) - e).abs() <= 4e-6 * e.abs().max(1.0), "{label} #{i}: {x}, not {e}");
    }
}

#[test]
fn rows_are_quantised_to_the_same_bits_as_on_the_cpu() {
    Case::each(|case| {
        for cols in [300, 32, 512] {
            let mut x = Random(1).values(6 * cols);
            x[..32].fill(0.0);
            x[cols] = f32::INFINITY;
            x[2 * cols + 5] = f32::NAN;
            x[3 * cols] = f32::MAX;
            x[4 * cols..][..16].fill(1e-40);
            // Ties: with a scale of 1, halves are rounded to even.
            x[5 * cols..][..32].copy_from_slice(&std::array::from_fn::<f32, 32, _>(|i| i as f32 - 15.5));
            x[5 * cols] = 127.0;
            let (of, expected) = (Rows { rows: 6, cols }, quantised(cols, &x));
            let (from, to) = (case.sim.values(&x), case.sim.room(expected.len()));
            case.kernels.quantise(&mut case.sim.device, of, from, (Quantised::Int8, to)).unwrap();
            let found = case.sim.read(to, expected.len());
            let differ = found.iter().zip(&expected).position(|(found, expected)| found != expected);
            assert_eq!(differ, None, "{cols} columns");
        }
    });
}

/// Scale and values of a block of MXFP8 as its definition rounds them. Nearest values are found by search.
fn mxfp8_block(x: &[f32]) -> (u8, Vec<u8>) {
    if x.iter().any(|x| !x.is_finite()) {
        return (255, Vec::new());
    }
    let largest = x.iter().fold(0.0, |largest: f64, x| largest.max(f64::from(x.abs())));
    let scale = (0..255).find(|scale| 448.0 * 2f64.powi(scale - 127) >= largest).unwrap();
    let value = |code: u8| match (code >> 3 & 15, code & 7) {
        (0, mantissa) => f64::from(mantissa) / 512.0,
        (exponent, mantissa) => f64::from(8 + mantissa) * 2f64.powi(i32::from(exponent) - 10),
    };
    let code = |x: &f32| {
        let size = f64::from(x.abs()) / 2f64.powi(scale - 127);
        let distance = |code: &u8| (value(*code) - size).abs();
        // Of two that are equally near, the even one.
        let nearer = |a: &u8, b: &u8| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)));
        let nearest = (0..0x7f).min_by(nearer).unwrap();
        nearest | if x.is_sign_negative() { 0x80 } else { 0 }
    };
    (scale as u8, x.iter().map(code).collect())
}

#[test]
fn rows_are_quantised_to_mxfp8_as_it_is_defined() {
    Case::each(|case| {
        for cols in [300, 32, 512] {
            let mut x = Random(3).values(8 * cols);
            x[..32].fill(0.0);
            x[cols] = f32::INFINITY;
            x[2 * cols + 5] = f32::NAN;
            x[3 * cols] = f32::MAX;
            x[4 * cols..][..16].fill(1e-40);
            // The largest value without and with a rounding of the scale. Ties and values that become subnormal.
            x[5 * cols..][..32]
                .copy_from_slice(&std::array::from_fn::<f32, 32, _>(|i| 1.0 + i as f32 / 16.0));
            x[5 * cols] = 448.0;
            x[6 * cols..][..32].copy_from_slice(&std::array::from_fn::<f32, 32, _>(|i| i as f32 / 1024.0));
            x[6 * cols] = 448.0f32.next_up();
            x[7 * cols..][..32].copy_from_slice(&std::array::from_fn::<f32, 32, _>(|i| i as f32 / 1024.0));
            x[7 * cols] = -447.0;
            let (of, bytes) = (Rows { rows: 8, cols }, Quantised::Mxfp8.row_bytes(cols));
            let (from, to) = (case.sim.values(&x), case.sim.room(8 * bytes));
            case.kernels.quantise(&mut case.sim.device, of, from, (Quantised::Mxfp8, to)).unwrap();
            let found = case.sim.read(to, 8 * bytes);
            for (row, (found, x)) in found.chunks(bytes).zip(x.chunks(cols)).enumerate() {
                let blocks = cols.next_multiple_of(256) / 32;
                for block in 0..blocks {
                    let at = (32 * block).min(cols)..(32 * (block + 1)).min(cols);
                    let mut values = x[at].to_vec();
                    values.resize(32, 0.0);
                    let (scale, codes) = mxfp8_block(&values);
                    let label = format!("{cols} columns, row {row}, block {block}");
                    assert_eq!(found[32 * blocks + block], scale, "{label}");
                    for (i, code) in codes.iter().enumerate() {
                        let place = [0, 2, 4, 6, 1, 3, 5, 7][i / 4] * 4 + i % 4;
                        assert_eq!(found[32 * block + place], *code, "{label} #{i}: {}", values[i]);
                    }
                }
            }
        }
    });
}

/// Returns the reference's norm of all runs.
fn norms(norm: &DeviceNorm, cols: usize, x: &[f32], weight: &[f32], bias: Option<&[f32]>) -> Vec<f64> {
    let run_values = |values: &[f32], run: usize| {
        let of_row = run % (cols / norm.width);
        values[of_row % (values.len() / norm.width) * norm.width..][..norm.width].to_vec()
    };
    let runs = x.chunks(norm.width).enumerate();
    runs.flat_map(|(run, x)| {
        let (weight, bias) = (run_values(weight, run), bias.map(|bias| run_values(bias, run)));
        match norm.rms {
            true => reference::rms_norm(x, Some(&weight), norm.eps),
            false => reference::layer_norm(x, Some(&weight), bias.as_deref(), norm.eps),
        }
    })
    .collect()
}

#[test]
fn norms_equal_the_reference_and_write_the_8_bit_form() {
    Case::each(|case| {
        // Whole rows, short and long; runs that are whole blocks and runs that are not; weights as long as
        // a row.
        let shapes = [(100, 100, 100), (1100, 1100, 1100), (320, 64, 64), (96, 24, 96), (5000, 5000, 5000)];
        for (i, (cols, width, weights)) in shapes.into_iter().enumerate() {
            for rms in [true, false] {
                let mut random = Random(2 + i as u64);
                let (x, weight, bias) =
                    (random.values(2 * cols), random.values(weights), random.values(width));
                let bias = (!rms).then_some(&bias[..]);
                let mut norm = DeviceNorm { rms, weight: None, bias: None, eps: 1e-5, width };
                norm.weight = case.affine(&weight);
                norm.bias = bias.and_then(|bias| case.affine(bias));
                let of = Rows { rows: 2, cols };
                let from = case.sim.values(&x);
                let to = case.sim.room(2 * quantised_row_bytes(cols));
                // In place.
                let device = &mut case.sim.device;
                case.kernels.norm(device, of, from, &norm, from, Some(to)).unwrap();
                let found = case.sim.read_values(from, x.len());
                assert_close(&found, &norms(&norm, cols, &x, &weight, bias), &format!("{cols} {rms}"));
                let expected = quantised(cols, &found);
                assert!(case.sim.read(to, expected.len()) == expected, "8 bits of {cols} by {width}");
                if width == cols {
                    // The 8-bit form alone.
                    let (from, to) = (case.sim.values(&x), case.sim.room(expected.len()));
                    case.kernels.norm_to_int8(&mut case.sim.device, of, from, &norm, to).unwrap();
                    assert!(case.sim.read(to, expected.len()) == expected, "only 8 bits of {cols}");
                    assert_same(&case.sim.read_values(from, x.len()), &x, "the input");
                }
                // Into another buffer, and for one row alone: the same bits.
                let (from, out) = (case.sim.values(&x[cols..]), case.sim.room(4 * cols));
                let of = Rows { rows: 1, cols };
                case.kernels.norm(&mut case.sim.device, of, from, &norm, out, None).unwrap();
                assert_same(&case.sim.read_values(out, cols), &found[cols..], "one row");
            }
        }
    });
}

/// The order of the sums of a norm's kernel: thread t adds the values t, t + threads, and so on; then come the lanes of
/// a warp and the warps, each with the one 16, 8, 4, 2 and 1 places on.
fn sum_of_threads(values: &[f32], add: impl Fn(f32, f32) -> f32) -> f32 {
    let threads = values.len().div_ceil(4).next_multiple_of(32).min(1024);
    let of_lanes = |sums: &[f32]| {
        let mut sums: [f32; 32] = std::array::from_fn(|i| sums.get(i).copied().unwrap_or(0.0));
        for apart in [16, 8, 4, 2, 1] {
            let before = sums;
            sums = std::array::from_fn(|i| before[i] + before[i ^ apart]);
        }
        sums[0]
    };
    let sums: Vec<f32> = (0..threads)
        .map(|thread| values.iter().skip(thread).step_by(threads).fold(0.0, |sum, x| add(sum, *x)))
        .collect();
    let warps: Vec<f32> = sums.chunks(32).map(of_lanes).collect();
    if warps.len() == 1 { warps[0] } else { of_lanes(&warps) }
}

/// The bits of a norm depend on the width of a run alone. They are those of the first version of the kernel.
#[test]
fn norms_are_added_up_in_the_order_of_their_threads() {
    Case::each(|case| {
        for width in [4, 100, 1100, 2880, 4096, 5000] {
            let x = Random(20 + width as u64).values(width);
            for rms in [true, false] {
                let count = width as f32;
                let mean = if rms { 0.0 } else { sum_of_threads(&x, |sum, x| sum + x) / count };
                let squares = sum_of_threads(&x, |sum, x| (x - mean).mul_add(x - mean, sum));
                let factor = 1.0 / (squares / count + 1e-5).sqrt();
                let expected: Vec<f32> = x.iter().map(|x| (x - mean) * factor).collect();
                let norm = DeviceNorm { rms, weight: None, bias: None, eps: 1e-5, width };
                let (from, out) = (case.sim.values(&x), case.sim.room(4 * width));
                let of = Rows { rows: 1, cols: width };
                case.kernels.norm(&mut case.sim.device, of, from, &norm, out, None).unwrap();
                let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&case.sim.read_values(out, width)), bits(&expected), "{width} {rms}");
            }
        }
    });
}

#[test]
fn sums_with_and_without_a_norm_equal_the_reference() {
    Case::each(|case| {
        let (cols, width) = (192, 96);
        let mut random = Random(9);
        let (x, y, weight) = (random.values(3 * cols), random.values(3 * cols), random.values(width));
        let of = Rows { rows: 3, cols };
        let mut norm = DeviceNorm { rms: true, weight: None, bias: None, eps: 1e-6, width };
        norm.weight = case.affine(&weight);
        let normed = norms(&norm, cols, &y, &weight, None);
        for (norm, y_or_norm) in [(None, y.iter().map(|y| f64::from(*y)).collect()), (Some(&norm), normed)] {
            let (to, from) = (case.sim.values(&x), case.sim.values(&y));
            case.kernels.add(&mut case.sim.device, of, to, from, norm, 0.25).unwrap();
            let expected: Vec<f64> =
                x.iter().zip(&y_or_norm).map(|(x, y): (_, &f64)| f64::from(*x) + 0.25 * y).collect();
            assert_close(&case.sim.read_values(to, x.len()), &expected, "sum");
        }
    });
}

#[test]
fn gated_norms_equal_the_reference() {
    Case::each(|case| {
        for (cols, width) in [(128, 32), (72, 24), (512, 512)] {
            let mut random = Random(10);
            let (x, gate, weight) = (random.values(2 * cols), random.values(2 * cols), random.values(width));
            let mut norm = DeviceNorm { rms: true, weight: None, bias: None, eps: 1e-6, width };
            norm.weight = case.affine(&weight);
            for gate_first in [false, true] {
                let gates: Vec<f64> = gate.iter().map(|gate| reference::silu(*gate)).collect();
                let gated = |x: &f32, gate: &f64| (f64::from(*x) * gate) as f32;
                let expected: Vec<f64> = match gate_first {
                    true => {
                        let x: Vec<f32> = x.iter().zip(&gates).map(|(x, gate)| gated(x, gate)).collect();
                        norms(&norm, cols, &x, &weight, None)
                    }
                    false => {
                        let normed = norms(&norm, cols, &x, &weight, None);
                        normed.iter().zip(&gates).map(|(x, gate)| x * gate).collect()
                    }
                };
                let (of, on_device) = (Rows { rows: 2, cols }, case.sim.values(&x));
                let (gate, to) = (case.sim.values(&gate), case.sim.room(2 * quantised_row_bytes(cols)));
                let device = &mut case.sim.device;
                case.kernels.gated_norm(device, of, on_device, gate, &norm, gate_first, Some(to)).unwrap();
                let found = case.sim.read_values(on_device, x.len());
                assert_close(&found, &expected, &format!("{cols} {gate_first}"));
                let expected = quantised(cols, &found);
                assert!(case.sim.read(to, expected.len()) == expected, "8 bits of {cols} by {width}");
            }
        }
    });
}

/// Returns values where functions change their form, and infinities and NaN.
fn special(count: usize, seed: u64) -> Vec<f32> {
    let mut values = Random(seed).values(count);
    let edges = [0.0, -0.0, 1e-30, -1e-30, 7.0, -7.5, 20.0, -90.0, 95.0, f32::INFINITY, f32::NEG_INFINITY];
    values[..edges.len()].copy_from_slice(&edges);
    values[edges.len()] = f32::NAN;
    values.iter_mut().skip(20).step_by(3).for_each(|x| *x *= 9.0);
    values
}

#[test]
fn gates_have_the_same_bits_as_on_the_cpu() {
    let pool = pool();
    let gatings = [
        (GateActivation::Silu, Gating::By(Activation::Silu)),
        (GateActivation::GeluTanh, Gating::By(Activation::GeluTanh)),
        (GateActivation::GeluErf, Gating::By(Activation::GeluErf)),
        (GateActivation::Sigmoid, Gating::By(Activation::Sigmoid)),
        (GateActivation::ReluSquared, Gating::By(Activation::ReluSquared)),
        (GateActivation::ClampedSwiglu, Gating::ClampedSwiglu),
        (GateActivation::Identity, Gating::By(Activation::Identity)),
    ];
    Case::each(|case| {
        let (cols, up_cols, from) = (300, 700, 350);
        let (gate, up) = (special(2 * cols, 11), Random(12).values(2 * up_cols));
        for (activation, gating) in gatings {
            let of = Rows { rows: 2, cols };
            let mut expected = gate.clone();
            let columns = Columns { values: &up, width: up_cols, from, len: cols };
            ops::gate_in_place(&pool, Isa::Scalar, gating, &mut expected, columns).unwrap();
            let (x, start) = (case.sim.values(&gate), case.sim.values(&up));
            let to = case.sim.room(2 * quantised_row_bytes(cols));
            let up = Some(Up { start, cols: up_cols, from });
            case.kernels.gate(&mut case.sim.device, of, x, up, activation, (true, Some(to))).unwrap();
            assert_same(&case.sim.read_values(x, gate.len()), &expected, &format!("{activation:?}"));
            let bytes = quantised(cols, &expected);
            assert!(case.sim.read(to, bytes.len()) == bytes, "8 bits of {activation:?}");
            let (x, to) = (case.sim.values(&gate), case.sim.room(bytes.len()));
            case.kernels.gate(&mut case.sim.device, of, x, up, activation, (false, Some(to))).unwrap();
            assert!(case.sim.read(to, bytes.len()) == bytes, "only 8 bits of {activation:?}");
            assert_same(&case.sim.read_values(x, gate.len()), &gate, "the input");
            let Gating::By(alone) = gating else { continue };
            let mut expected = gate.clone();
            ops::activate(&pool, Isa::Scalar, alone, &mut expected);
            let x = case.sim.values(&gate);
            case.kernels.gate(&mut case.sim.device, of, x, None, activation, (true, None)).unwrap();
            assert_same(&case.sim.read_values(x, gate.len()), &expected, &format!("{activation:?} alone"));
        }
    });
}

#[test]
fn scalings_have_the_same_bits_as_on_the_cpu() {
    let pool = pool();
    Case::each(|case| {
        let (of, cols) = (Rows { rows: 3, cols: 101 }, 101);
        let (x, gates) = (special(3 * cols, 13), Random(14).values(3 * 2));
        let mut expected = x.clone();
        let columns = Columns { values: &gates, width: 2, from: 0, len: 1 };
        ops::scale_rows(&pool, Isa::Scalar, cols, &mut expected, columns).unwrap();
        let (on_device, gate) = (case.sim.values(&x), case.sim.values(&gates));
        case.kernels.scale_rows(&mut case.sim.device, of, on_device, gate, 2).unwrap();
        assert_same(&case.sim.read_values(on_device, x.len()), &expected, "rows");
        for (factor, cap) in [(0.3, None), (1.0, Some(30.0)), (0.3, Some(50.0))] {
            let mut expected = x.clone();
            ops::scale(&pool, Isa::Scalar, &mut expected, factor);
            if let Some(cap) = cap {
                ops::softcap(&pool, Isa::Scalar, &mut expected, cap);
            }
            let on_device = case.sim.values(&x);
            case.kernels.scale(&mut case.sim.device, of, on_device, factor, cap).unwrap();
            assert_same(&case.sim.read_values(on_device, x.len()), &expected, "logits");
        }
    });
}

#[test]
fn gather_and_argmax_equal_the_definition() {
    Case::each(|case| {
        let cols = 2500;
        let mut x = Random(15).values(6 * cols);
        // Ties, where the first counts; only minus infinity; only NaN; one number among NaN; one infinity.
        (x[100], x[2400]) = (1e6, 1e6);
        x[cols..2 * cols].fill(f32::NEG_INFINITY);
        x[2 * cols..3 * cols].fill(f32::NAN);
        x[3 * cols..4 * cols].fill(f32::NAN);
        x[3 * cols + 77] = -5.0;
        x[5 * cols + 2499] = f32::INFINITY;
        let from = case.sim.values(&x);
        let out = case.sim.room(4 * 6);
        let of = Rows { rows: 6, cols };
        case.kernels.argmax(&mut case.sim.device, of, from, out).unwrap();
        let fourth = ops::argmax(Isa::Scalar, &x[4 * cols..5 * cols]) as u32;
        let expected = [100, NO_INDEX, NO_INDEX, NO_INDEX, fourth, NO_INDEX];
        assert_eq!(case.sim.read_numbers(out, 6), expected);
        let (index, out) = (case.sim.numbers(&[4, 0, 4]), case.sim.room(4 * 3 * cols));
        let of = Rows { rows: 3, cols };
        case.kernels.gather_rows(&mut case.sim.device, of, from, index, out).unwrap();
        let fourth = &x[4 * cols..5 * cols];
        let expected = [fourth, &x[..cols], fourth].concat();
        assert_same(&case.sim.read_values(out, 3 * cols), &expected, "rows");
    });
}

#[test]
fn invalid_shapes_are_refused() {
    let mut case = Case::new(Arch::SM_90);
    let (of, x) = (Rows { rows: 1, cols: 64 }, DevicePtr::default());
    let rms = DeviceNorm { rms: true, weight: None, bias: None, eps: 0.0, width: 64 };
    let affine = |len| Some(Affine { start: x, len });
    let device = &mut case.sim.device;
    for norm in [
        DeviceNorm { width: 0, ..rms },
        DeviceNorm { width: 48, ..rms },
        DeviceNorm { weight: affine(32), ..rms },
        DeviceNorm { width: 16, bias: affine(48), ..rms },
        DeviceNorm { weight: affine(0), ..rms },
    ] {
        let found = case.kernels.norm(device, of, x, &norm, x, None);
        assert!(matches!(found, Err(CudaError::Invalid { .. })), "{norm:?}");
    }
    for norm in [DeviceNorm { rms: false, ..rms }, DeviceNorm { bias: affine(64), ..rms }] {
        let added = case.kernels.add(device, of, x, x, Some(&norm), 1.0);
        let gated = case.kernels.gated_norm(device, of, x, x, &norm, true, None);
        assert!(matches!((added, gated), (Err(CudaError::Invalid { .. }), Err(CudaError::Invalid { .. }))));
    }
    let clamped = GateActivation::ClampedSwiglu;
    assert!(case.kernels.gate(device, of, x, None, clamped, (true, None)).is_err());
    let narrow = Some(Up { start: x, cols: 100, from: 37 });
    assert!(case.kernels.gate(device, of, x, narrow, GateActivation::Silu, (true, None)).is_err());
}

/// The second and third axis of a grid are limited to 65,535 blocks. The (row, expert) pairs of a step are
/// not.
#[test]
fn more_rows_than_a_grids_second_axis_are_possible() {
    const ROWS: usize = 16_384 * 8;
    let (mut device, of, ptr) = (Hole::default(), Rows { rows: ROWS, cols: 2880 }, DevicePtr(256));
    let kernels = RowwiseKernels::load(&mut device, &hole::empty_source("rowwise.cu")).unwrap();
    let norm = DeviceNorm { rms: true, weight: None, bias: None, eps: 1e-5, width: 2880 };
    let heads = DeviceNorm { width: 96, ..norm };
    kernels.quantise(&mut device, of, ptr, (Quantised::Int8, ptr)).unwrap();
    kernels.norm(&mut device, of, ptr, &norm, ptr, Some(ptr)).unwrap();
    kernels.norm(&mut device, of, ptr, &heads, ptr, None).unwrap();
    kernels.add(&mut device, of, ptr, ptr, Some(&norm), 1.0).unwrap();
    kernels.add(&mut device, of, ptr, ptr, None, 1.0).unwrap();
    kernels.gated_norm(&mut device, of, ptr, ptr, &heads, true, Some(ptr)).unwrap();
    kernels.gate(&mut device, of, ptr, None, GateActivation::Silu, (true, Some(ptr))).unwrap();
    kernels.scale_rows(&mut device, of, ptr, ptr, 1).unwrap();
    kernels.scale(&mut device, of, ptr, 2.0, None).unwrap();
    kernels.gather_rows(&mut device, of, ptr, ptr, ptr).unwrap();
    kernels.argmax(&mut device, of, ptr, ptr).unwrap();
    assert!(device.grids.len() >= 11);
    for grid in device.grids {
        assert!(grid[0] >= ROWS as u32 && grid[1..].iter().all(|blocks| *blocks <= 65_535), "{grid:?}");
    }
}
