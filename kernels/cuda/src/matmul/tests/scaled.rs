//! Products of MXFP4 with MXFP8 activations, compared with sums in 64 bits.

use super::{Case, assert_same, grouped};
use crate::matmul::{Activations, Experts, MatmulKernels, Matrix, Product, Quantised};
use crate::rowwise::Rows;
use crate::source::matmul::scaled;
use crate::tests::hole::{self, Hole};
use crate::{Arch, CudaBackend, CudaConfig, CudaError, TiledShape};
use kernels::backend::ActivationMode;
use kernels::quant::{GgmlType, dequantize};
use kernels::reference::random::Random;

fn case(rows: usize, cols: usize, experts: usize) -> Case {
    let mut case = Case::new(Arch::SM_121A, GgmlType::MXFP4, rows, cols, experts, 5);
    let compiled = case.sim.compiled(scaled(GgmlType::MXFP4).unwrap());
    case.kernels.load_form(&mut case.sim.device, compiled, Quantised::Mxfp8).unwrap();
    case
}

/// Uploads rows as MXFP8 and returns their rounded values too.
fn activations(case: &mut Case, a: &[f32]) -> (Activations, Vec<f64>) {
    let cols = case.cols();
    let of = Rows { rows: a.len() / cols, cols };
    let bytes = Quantised::Mxfp8.row_bytes(cols);
    let (x, to) = (case.sim.values(a), case.sim.room(of.rows * bytes));
    case.rowwise.quantise(&mut case.sim.device, of, x, (Quantised::Mxfp8, to)).unwrap();
    let quantised = case.sim.read(to, of.rows * bytes);
    let blocks = cols.next_multiple_of(256) / 32;
    let value = |row: &[u8], col: usize| {
        let word = col % 32 / 4;
        let code = row[col / 32 * 32 + [0, 2, 4, 6, 1, 3, 5, 7][word] * 4 + col % 4];
        let size = match (code >> 3 & 15, code & 7) {
            (0, mantissa) => f64::from(mantissa) / 512.0,
            (exponent, mantissa) => f64::from(8 + mantissa) * 2f64.powi(i32::from(exponent) - 10),
        };
        let scale = 2f64.powi(i32::from(row[32 * blocks + col / 32]) - 127);
        if code & 0x80 == 0 { size * scale } else { -size * scale }
    };
    let rounded = quantised.chunks(bytes).flat_map(|row| (0..cols).map(move |col| value(row, col))).collect();
    (Activations::Mxfp8(to), rounded)
}

/// Rows whose blocks differ in size.
fn rows(seed: u64, count: usize, cols: usize) -> Vec<f32> {
    let mut a = Random(seed).values(count * cols);
    for (block, values) in a.chunks_mut(32).enumerate() {
        values.iter_mut().for_each(|x| *x *= 2f32.powi(block as i32 * 7 % 13 - 6));
    }
    a
}

#[test]
fn products_equal_sums_in_64_bits_and_do_not_depend_on_the_batch() {
    // Parts of a unit, of half a unit and of a tile; one segment and several, the last of them short.
    for (outputs, cols) in [(37, 256 + 64), (33, 10 * 256 + 32), (64, 128 + 96), (40, 16 * 256 + 160)] {
        let mut case = case(outputs, cols, 1);
        let a = rows(6, 134, cols);
        let mut weights = vec![0.0; outputs * cols];
        dequantize(GgmlType::MXFP4, &case.file, &mut weights).unwrap();
        let mut alone = Vec::new();
        for token in a.chunks(cols).take(20) {
            let (x, _) = activations(&mut case, token);
            alone.extend(case.run(|_| (), x, 1));
        }
        for tokens in [1, 3, 8, 9, 35, 134] {
            let (x, rounded) = activations(&mut case, &a[..tokens * cols]);
            let found = case.run(|_| (), x, tokens);
            let known = (tokens * outputs).min(alone.len());
            assert_same(&found[..known], &alone[..known], &format!("{tokens} tokens of {cols} columns"));
            for (i, found) in found.iter().enumerate() {
                let (token, row) = (i / outputs, i % outputs);
                let products =
                    (0..cols).map(|col| rounded[token * cols + col] * f64::from(weights[row * cols + col]));
                let (sum, size) =
                    products.fold((0.0, 0.0), |(sum, size), product| (sum + product, size + product.abs()));
                let error = (f64::from(*found) - sum).abs();
                assert!(error <= 1e-6 * size, "{tokens} tokens of {cols} columns, #{i}: {found}, not {sum}");
            }
        }
    }
}

#[test]
fn experts_have_the_bits_of_products_alone() {
    let (tokens, outputs, cols) = (131, 70, 4 * 256 + 64);
    let mut case = case(outputs, cols, 3);
    let a = rows(18, tokens, cols);
    let chosen: Vec<u32> = (0..2 * tokens).map(|i| [1, 0, 1, 2, 1][i % 5]).collect();
    let (x, _) = activations(&mut case, &a);
    let shape = TiledShape::new(GgmlType::MXFP4, outputs, cols, 1).unwrap();
    let expected: Vec<f32> = (0..2 * tokens)
        .flat_map(|pair| {
            let start = case.matrix.start.offset(chosen[pair] as usize * shape.packed_bytes());
            let (row, _) = activations(&mut case, &a[pair / 2 * cols..][..cols]);
            let matrix = Matrix { shape, start };
            let out = case.sim.room(4 * outputs);
            let product = Product { matrix: &matrix, ..case.product(row, 1, out) };
            case.kernels.multiply(&mut case.sim.device, &[product]).unwrap();
            case.sim.read_values(out, outputs)
        })
        .collect();
    let mut all = vec![(Experts::Each(case.sim.numbers(&chosen)), usize::MAX)];
    // The last one also with the kernel for prompts.
    for (most, multiprocessors) in
        [(1, usize::MAX), (8, usize::MAX), (9, usize::MAX), (32, usize::MAX), (32, 1)]
    {
        let (mut groups, list) = grouped(&chosen, most);
        groups.resize(groups.len().next_multiple_of(4), [0, 0]);
        let count = groups.len();
        let (groups, list) = (case.sim.numbers(groups.as_flattened()), case.sim.numbers(&list));
        all.push((Experts::Listed { groups, count, list, most }, multiprocessors));
    }
    for (experts, multiprocessors) in all {
        case.kernels.multiprocessors = multiprocessors;
        let routed = |product: &mut Product<'_>| (product.share, product.experts) = (2, experts);
        assert_same(&case.run(routed, x, 2 * tokens), &expected, &format!("{experts:?} {multiprocessors}"));
    }
}

#[test]
fn a_value_that_is_not_finite_stays_in_its_row() {
    let mut case = case(5, 288, 1);
    let mut a = rows(12, 3, 288);
    let (x, _) = activations(&mut case, &a);
    let clean = case.run(|_| (), x, 3);
    for wrong in [f32::NAN, f32::INFINITY] {
        a[288 + 7] = wrong;
        let (x, _) = activations(&mut case, &a);
        let found = case.run(|_| (), x, 3);
        assert_same(&found[..5], &clean[..5], "the row before");
        assert!(found[5..10].iter().all(|x| x.is_nan()));
        assert_same(&found[10..], &clean[10..], "the row behind");
    }
}

#[test]
fn other_types_and_devices_are_refused_or_read_int8() {
    let mode = ActivationMode::Mxfp8;
    assert_eq!(Quantised::of(mode, GgmlType::MXFP4), Some(Quantised::Mxfp8));
    assert_eq!(Quantised::of(mode, GgmlType::Q8_0), Some(Quantised::Int8));
    assert_eq!(Quantised::of(mode, GgmlType::BF16), None);
    assert_eq!(Quantised::of(ActivationMode::Int8, GgmlType::MXFP4), Some(Quantised::Int8));
    let config = CudaConfig { arch: Arch::SM_90, activations: mode, threads: 1 };
    let compile = |source: &crate::source::Source| Ok(hole::empty_source(source.name));
    let Err(error) = CudaBackend::new(Box::new(Hole::default()), config, Box::new(compile)) else {
        panic!("sm_90a has no such products")
    };
    let text = error.to_string();
    assert!(text.contains("mxfp8") && text.contains("sm_90a") && text.contains("12.1"), "{text}");
    // A type whose kernels of the class were not loaded.
    let mut case = Case::new(Arch::SM_121A, GgmlType::Q8_0, 4, 32, 1, 23);
    let x = case.sim.room(4096);
    let matrix = case.matrix;
    let product = Product { matrix: &matrix, ..case.product(Activations::Mxfp8(x), 1, x) };
    let found = case.kernels.multiply(&mut case.sim.device, &[product]);
    assert!(matches!(found, Err(CudaError::Invalid { .. })));
    let compiled = case.sim.compiled(MatmulKernels::source(GgmlType::Q8_0).unwrap());
    assert!(case.kernels.load_form(&mut case.sim.device, compiled, Quantised::Mxfp8).is_err());
}
