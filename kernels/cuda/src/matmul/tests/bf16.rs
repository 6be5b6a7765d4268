//! Products with bf16 activations, compared with sums in 64 bits.

use super::{Case, assert_same, assert_sums, grouped};
use crate::matmul::{Activations, Experts, Matrix, Product, Quantised};
use crate::rowwise::Rows;
use crate::source::matmul::bf16 as source;
use crate::tests::hole::{self, Hole};
use crate::{Arch, CudaBackend, CudaConfig, TiledShape};
use half::bf16;
use kernels::backend::ActivationMode;
use kernels::quant::{GgmlType, dequantize};
use kernels::reference::random::Random;

fn case(ty: GgmlType, rows: usize, cols: usize, experts: usize) -> Case {
    let mut case = Case::new(Arch::SM_90, ty, rows, cols, experts, 5);
    let compiled = case.sim.compiled(source(ty).unwrap());
    case.kernels.load_form(&mut case.sim.device, compiled, Quantised::Bf16).unwrap();
    case
}

/// Uploads rows as bf16.
fn activations(case: &mut Case, a: &[f32]) -> Activations {
    let cols = case.cols();
    let of = Rows { rows: a.len() / cols, cols };
    let (x, to) = (case.sim.values(a), case.sim.room(of.rows * Quantised::Bf16.row_bytes(cols)));
    case.rowwise.quantise(&mut case.sim.device, of, x, (Quantised::Bf16, to)).unwrap();
    Activations::Bf16(to)
}

fn rounded(x: f32) -> f64 {
    bf16::from_f32(x).to_f64()
}

#[test]
fn products_equal_sums_in_64_bits_and_do_not_depend_on_the_batch() {
    // Parts of a unit, of a step and of a tile; one segment and several, the last of them short.
    for (ty, outputs, cols) in [
        (GgmlType::Q4_0, 37, 256 + 64),
        (GgmlType::MXFP4, 33, 10 * 256 + 32),
        (GgmlType::FP8, 161, 128 + 96),
        (GgmlType::Q6_K, 40, 9 * 256),
        (GgmlType::BF16, 40, 256 + 40),
        (GgmlType::F16, 70, 24),
    ] {
        let mut case = case(ty, outputs, cols, 1);
        case.kernels.multiprocessors = 1;
        let a = Random(6).values(134 * cols);
        let mut weights = vec![0.0; outputs * cols];
        dequantize(ty, &case.file, &mut weights).unwrap();
        let weights: Vec<f64> = weights.into_iter().map(rounded).collect();
        let mut alone = Vec::new();
        for token in a.chunks(cols).take(10) {
            let x = activations(&mut case, token);
            alone.extend(case.run(|_| (), x, 1));
        }
        for tokens in [1, 8, 9, 134] {
            let x = activations(&mut case, &a[..tokens * cols]);
            let found = case.run(|_| (), x, tokens);
            let known = (tokens * outputs).min(alone.len());
            assert_same(
                &found[..known],
                &alone[..known],
                &format!("{ty}: {tokens} tokens of {cols} columns"),
            );
            let what = format!("{ty}, {tokens} tokens of {cols} columns");
            let x: Vec<f64> = a[..tokens * cols].iter().map(|x| rounded(*x)).collect();
            assert_sums(&found, &x, &weights, cols, &what);
        }
    }
}

#[test]
fn experts_have_the_bits_of_products_alone() {
    let (ty, tokens, outputs, cols) = (GgmlType::Q4_K, 131, 70, 4 * 256);
    let mut case = case(ty, outputs, cols, 3);
    let a = Random(18).values(tokens * cols);
    let chosen: Vec<u32> = (0..2 * tokens).map(|i| [1, 0, 1, 2, 1][i % 5]).collect();
    let x = activations(&mut case, &a);
    let shape = TiledShape::new(ty, outputs, cols, 1).unwrap();
    let expected: Vec<f32> = (0..2 * tokens)
        .flat_map(|pair| {
            let start = case.matrix.start.offset(chosen[pair] as usize * shape.packed_bytes());
            let row = activations(&mut case, &a[pair / 2 * cols..][..cols]);
            let matrix = Matrix { shape, start };
            let out = case.sim.room(4 * outputs);
            let product = Product { matrix: &matrix, ..case.product(row, 1, out) };
            case.kernels.multiply(&mut case.sim.device, &[product]).unwrap();
            case.sim.read_values(out, outputs)
        })
        .collect();
    let mut all = vec![Experts::Each(case.sim.numbers(&chosen))];
    for most in [1, 9, 32] {
        let (mut groups, list) = grouped(&chosen, most);
        groups.resize(groups.len().next_multiple_of(4), [0, 0]);
        let count = groups.len();
        let (groups, list) = (case.sim.numbers(groups.as_flattened()), case.sim.numbers(&list));
        all.push(Experts::Listed { groups, count, list, most });
    }
    // Where products of one matrix take the kernel for prompts.
    case.kernels.multiprocessors = 1;
    for experts in all {
        let routed = |product: &mut Product<'_>| (product.share, product.experts) = (2, experts);
        assert_same(&case.run(routed, x, 2 * tokens), &expected, &format!("{experts:?}"));
    }
}

#[test]
fn a_value_that_is_not_finite_stays_in_its_row() {
    let mut case = case(GgmlType::Q8_0, 5, 288, 1);
    let mut a = Random(12).values(3 * 288);
    let x = activations(&mut case, &a);
    let clean = case.run(|_| (), x, 3);
    for wrong in [f32::NAN, f32::INFINITY] {
        a[288 + 7] = wrong;
        let x = activations(&mut case, &a);
        let found = case.run(|_| (), x, 3);
        assert_same(&found[..5], &clean[..5], "the row before");
        assert!(found[5..10].iter().all(|x| !x.is_finite()));
        assert_same(&found[10..], &clean[10..], "the row behind");
    }
}

#[test]
fn other_devices_refuse_the_class_and_f32_weights_stay_exact() {
    let mode = ActivationMode::Bf16;
    assert_eq!(Quantised::of(mode, GgmlType::FP8), Some(Quantised::Bf16));
    assert_eq!(Quantised::of(mode, GgmlType::BF16), Some(Quantised::Bf16));
    assert_eq!(Quantised::of(mode, GgmlType::F32), None);
    let config = CudaConfig { arch: Arch::SM_121A, activations: mode, threads: 1 };
    let compile = |source: &crate::source::Source| Ok(hole::empty_source(source.name));
    let Err(error) = CudaBackend::new(Box::new(Hole::default()), config, Box::new(compile)) else {
        panic!("sm_121a has no such products")
    };
    let text = error.to_string();
    assert!(text.contains("bf16") && text.contains("sm_121a") && text.contains("9.0"), "{text}");
}
