//! Products of MXFP4 with MXFP8 activations and of NVFP4 with NVFP4 ones, compared with sums in 64 bits.

use super::{Case, assert_same, assert_sums, grouped};
use crate::matmul::{Activations, Experts, MatmulKernels, Matrix, Product, Quantised};
use crate::rowwise::Rows;
use crate::source::matmul::scaled;
use crate::tests::hole::{self, Hole};
use crate::{Arch, CudaBackend, CudaConfig, CudaError, TiledShape};
use kernels::backend::ActivationMode;
use kernels::quant::{GgmlType, dequantize};
use kernels::reference::random::Random;

const TYPES: [GgmlType; 2] = [GgmlType::MXFP4, GgmlType::NVFP4];

fn case(ty: GgmlType, rows: usize, cols: usize, experts: usize) -> Case {
    let mut case = Case::new(Arch::SM_121A, ty, rows, cols, experts, 5);
    if ty == GgmlType::NVFP4 {
        // Without the scale that is no number, which other products read as 480.
        case.file
            .chunks_mut(ty.block_bytes())
            .flat_map(|block| &mut block[..4])
            .for_each(|scale| *scale &= 0xbf);
        let (shape, mut packed) = (case.matrix.shape, Vec::new());
        shape.pack(0..shape.tiles() * experts, &case.file, &mut packed).unwrap();
        case.matrix.start = case.sim.bytes(&packed);
    }
    let compiled = case.sim.compiled(scaled(ty).unwrap());
    let form = Quantised::of(ActivationMode::Nvfp4, ty).unwrap();
    case.kernels.load_form(&mut case.sim.device, compiled, form).unwrap();
    case
}

/// The value of an E4M3.
fn e4m3(code: u8) -> f64 {
    let size = match (code >> 3 & 15, code & 7) {
        (0, mantissa) => f64::from(mantissa) / 512.0,
        (exponent, mantissa) => f64::from(8 + mantissa) * 2f64.powi(i32::from(exponent) - 10),
    };
    if code & 0x80 == 0 { size } else { -size }
}

/// The value of an E2M1.
fn e2m1(code: u8) -> f64 {
    let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 == 0 { size } else { -size }
}

/// Place of each word of a product.
const PLACES: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// The value of a column of a row of MXFP8.
fn mxfp8_value(row: &[u8], cols: usize, col: usize) -> f64 {
    let blocks = cols.next_multiple_of(256) / 32;
    let scale = 2f64.powi(i32::from(row[32 * blocks + col / 32]) - 127);
    e4m3(row[col / 32 * 32 + PLACES[col % 32 / 4] * 4 + col % 4]) * scale
}

/// The same of NVFP4.
fn nvfp4_value(row: &[u8], cols: usize, col: usize) -> f64 {
    let units = cols.div_ceil(256);
    let byte = row[col / 64 * 32 + PLACES[col % 64 / 8] * 4 + col % 8 / 2];
    let factor = f32::from_le_bytes(row[144 * units..][..4].try_into().unwrap());
    e2m1(byte >> (4 * (col % 2))) * e4m3(row[128 * units + col / 16]) * f64::from(factor)
}

/// Uploads rows in the form of the type's products and returns their rounded values too.
fn activations(case: &mut Case, a: &[f32]) -> (Activations, Vec<f64>) {
    let (cols, nvfp4) = (case.cols(), case.matrix.shape.ty() == GgmlType::NVFP4);
    let form = if nvfp4 { Quantised::Nvfp4 } else { Quantised::Mxfp8 };
    let of = Rows { rows: a.len() / cols, cols };
    let bytes = form.row_bytes(cols);
    let (x, to) = (case.sim.values(a), case.sim.room(of.rows * bytes));
    case.rowwise.quantise(&mut case.sim.device, of, x, (form, to)).unwrap();
    let quantised = case.sim.read(to, of.rows * bytes);
    let value = if nvfp4 { nvfp4_value } else { mxfp8_value };
    let rounded =
        quantised.chunks(bytes).flat_map(|row| (0..cols).map(move |col| value(row, cols, col))).collect();
    (form.at(to), rounded)
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
    let shapes: [(usize, usize); 4] =
        [(37, 256 + 64), (33, 10 * 256 + 32), (64, 128 + 96), (40, 16 * 256 + 160)];
    for (ty, (outputs, cols)) in TYPES.into_iter().flat_map(|ty| shapes.map(|shape| (ty, shape))) {
        let cols = cols.next_multiple_of(ty.block_len());
        let mut case = case(ty, outputs, cols, 1);
        let a = rows(6, 134, cols);
        let mut weights = vec![0.0; outputs * cols];
        dequantize(ty, &case.file, &mut weights).unwrap();
        let weights: Vec<f64> = weights.into_iter().map(f64::from).collect();
        let mut alone = Vec::new();
        for token in a.chunks(cols).take(20) {
            let (x, _) = activations(&mut case, token);
            alone.extend(case.run(|_| (), x, 1));
        }
        for tokens in [1, 3, 8, 9, 35, 134] {
            let (x, rounded) = activations(&mut case, &a[..tokens * cols]);
            let found = case.run(|_| (), x, tokens);
            let known = (tokens * outputs).min(alone.len());
            assert_same(
                &found[..known],
                &alone[..known],
                &format!("{ty}, {tokens} tokens of {cols} columns"),
            );
            let what = format!("{ty}, {tokens} tokens of {cols} columns");
            assert_sums(&found, &rounded, &weights, cols, &what);
        }
    }
}

#[test]
fn experts_have_the_bits_of_products_alone() {
    TYPES.into_iter().for_each(experts_of);
}

fn experts_of(ty: GgmlType) {
    let (tokens, outputs, cols) = (131, 70, 4 * 256 + 64);
    let mut case = case(ty, outputs, cols, 3);
    let a = rows(18, tokens, cols);
    let chosen: Vec<u32> = (0..2 * tokens).map(|i| [1, 0, 1, 2, 1][i % 5]).collect();
    let (x, _) = activations(&mut case, &a);
    let shape = TiledShape::new(ty, outputs, cols, 1).unwrap();
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
        assert_same(
            &case.run(routed, x, 2 * tokens),
            &expected,
            &format!("{ty} {experts:?} {multiprocessors}"),
        );
    }
}

#[test]
fn a_value_that_is_not_finite_stays_in_its_row() {
    for ty in TYPES {
        let mut case = case(ty, 5, 320, 1);
        let mut a = rows(12, 3, 320);
        let (x, _) = activations(&mut case, &a);
        let clean = case.run(|_| (), x, 3);
        for wrong in [f32::NAN, f32::INFINITY] {
            a[320 + 7] = wrong;
            let (x, _) = activations(&mut case, &a);
            let found = case.run(|_| (), x, 3);
            assert_same(&found[..5], &clean[..5], "the row before");
            assert!(found[5..10].iter().all(|x| x.is_nan()), "{ty}");
            assert_same(&found[10..], &clean[10..], "the row behind");
        }
    }
}

/// Rows are rounded as NVFP4 is defined: nearest values are found by search.
#[test]
fn rows_are_rounded_to_nvfp4_as_it_is_defined() {
    for cols in [320, 64, 5120] {
        let mut case = case(GgmlType::NVFP4, 5, cols, 1);
        let mut a = rows(31, 6, cols);
        a[..cols].fill(0.0);
        a[cols..2 * cols].iter_mut().for_each(|x| *x *= 1e-30);
        // The largest value with a factor of one, and above it.
        a[2 * cols] = 2688.0;
        a[3 * cols] = 2688.0f32.next_up();
        a[4 * cols..][..16].copy_from_slice(&std::array::from_fn::<f32, 16, _>(|i| i as f32 / 4.0 - 1.0));
        a[4 * cols] = 6.0;
        let (_, found) = activations(&mut case, &a);
        for (row, (a, found)) in a.chunks(cols).zip(found.chunks(cols)).enumerate() {
            let largest = |a: &[f32]| a.iter().fold(0.0, |most: f64, x| most.max(f64::from(x.abs())));
            let factor = 2f64.powi((-126..128).find(|k| 2688.0 * 2f64.powi(*k) >= largest(a)).unwrap());
            for (block, (a, found)) in a.chunks(16).zip(found.chunks(16)).enumerate() {
                // Of two that are equally near, the even one.
                let wanted = f64::from((largest(a) / factor) as f32 / 6.0);
                let near = |code: &u8, value: fn(u8) -> f64, to: f64| (value(*code) - to).abs();
                let scale = (0..0x7f)
                    .min_by(|x, y| {
                        near(x, e4m3, wanted).total_cmp(&near(y, e4m3, wanted)).then((x & 1).cmp(&(y & 1)))
                    })
                    .unwrap();
                for (i, (x, found)) in a.iter().zip(found).enumerate() {
                    let scaled = f64::from((f64::from(x.abs()) / factor) as f32 / e4m3(scale) as f32);
                    let order = |x: &u8, y: &u8| {
                        near(x, e2m1, scaled).total_cmp(&near(y, e2m1, scaled)).then((x & 1).cmp(&(y & 1)))
                    };
                    let size = if scale == 0 { 0.0 } else { e2m1((0..8).min_by(order).unwrap()) };
                    let expected = size * e4m3(scale) * factor * f64::from(x.signum());
                    assert_eq!(*found, expected, "{cols} columns, row {row}, block {block}, #{i}: {x}");
                }
            }
        }
    }
}

#[test]
fn other_types_and_devices_are_refused_or_read_int8() {
    let mode = ActivationMode::Mxfp8;
    assert_eq!(Quantised::of(mode, GgmlType::MXFP4), Some(Quantised::Mxfp8));
    assert_eq!(Quantised::of(mode, GgmlType::Q8_0), Some(Quantised::Int8));
    assert_eq!(Quantised::of(mode, GgmlType::BF16), None);
    assert_eq!(Quantised::of(ActivationMode::Int8, GgmlType::MXFP4), Some(Quantised::Int8));
    assert_eq!(Quantised::of(mode, GgmlType::NVFP4), Some(Quantised::Int8));
    assert_eq!(Quantised::of(ActivationMode::Nvfp4, GgmlType::NVFP4), Some(Quantised::Nvfp4));
    assert_eq!(Quantised::of(ActivationMode::Nvfp4, GgmlType::MXFP4), Some(Quantised::Mxfp8));
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
