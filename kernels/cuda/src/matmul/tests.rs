//! Products on the interpreter, for both architectures, compared with the references.

use super::{
    Activations, Embedding, Experts, MatmulKernels, Matrix, Product, Quantised, quantised_row_bytes,
    reads_int8,
};
use crate::pack::tests::served;
use crate::rowwise::{Rows, RowwiseKernels};
use crate::tests::sim::Sim;
use crate::{Arch, CudaError, DevicePtr, TiledShape, source};
use kernels::quant::{GgmlType, dequantize};
use kernels::reference::matmul as reference;
use kernels::reference::random::Random;

mod bf16;
mod scaled;

/// One matrix, or one for each expert, on an interpreter.
struct Case {
    sim: Sim,
    kernels: MatmulKernels,
    rowwise: RowwiseKernels,
    matrix: Matrix,
    /// The matrices in file format.
    file: Vec<u8>,
}

impl Case {
    fn new(arch: Arch, ty: GgmlType, rows: usize, cols: usize, experts: usize, seed: u64) -> Self {
        let mut sim = Sim::new(arch);
        let file = Random(seed).tensor(ty, rows * experts, cols);
        let shape = TiledShape::new(ty, rows, cols, experts).unwrap();
        let mut packed = Vec::new();
        shape.pack(0..shape.tiles() * experts, &file, &mut packed).unwrap();
        let matrix = Matrix { shape, start: sim.bytes(&packed) };
        let compiled = sim.compiled(MatmulKernels::source(ty).unwrap());
        let kernels = MatmulKernels::load(&mut sim.device, compiled, ty).unwrap();
        let compiled = sim.compiled(&source::ROWWISE);
        let rowwise = RowwiseKernels::load(&mut sim.device, compiled).unwrap();
        Self { sim, kernels, rowwise, matrix, file }
    }

    fn rows(&self) -> usize {
        self.matrix.shape.rows()
    }

    fn cols(&self) -> usize {
        self.matrix.shape.cols()
    }

    /// Uploads rows of activations, quantised if `int8`.
    fn activations(&mut self, a: &[f32], int8: bool) -> Activations {
        let cols = self.cols();
        let of = Rows { rows: a.len() / cols, cols };
        let x = self.sim.values(a);
        if !int8 {
            return Activations::F32(x);
        }
        let quantised = self.sim.room(of.rows * quantised_row_bytes(cols));
        self.rowwise.quantise(&mut self.sim.device, of, x, (Quantised::Int8, quantised)).unwrap();
        Activations::Int8(quantised)
    }

    fn product(&self, x: Activations, tokens: usize, out: DevicePtr) -> Product<'_> {
        Product {
            matrix: &self.matrix,
            x,
            tokens,
            share: 1,
            experts: Experts::One,
            scale: 1.0,
            bias: None,
            accumulate: false,
            out,
            ld: self.rows(),
        }
    }

    fn run(&mut self, change: impl Fn(&mut Product<'_>), x: Activations, tokens: usize) -> Vec<f32> {
        let count = tokens * self.rows();
        let out = self.sim.room(4 * count);
        let matrix = self.matrix;
        let mut product = Product { matrix: &matrix, ..self.product(x, tokens, out) };
        change(&mut product);
        self.kernels.multiply(&mut self.sim.device, &[product]).unwrap();
        self.sim.read_values(out, count)
    }

    fn multiply(&mut self, a: &[f32], int8: bool) -> Vec<f32> {
        let x = self.activations(a, int8);
        let tokens = a.len() / self.cols();
        self.run(|_| (), x, tokens)
    }
}

/// Returns a number of columns of one unit and part of another, if the format allows it.
fn columns(ty: GgmlType) -> usize {
    match ty.block_len() {
        1 => 275,
        256 => 512,
        _ => 256 + 64,
    }
}

/// Returns the columns of a segment, which one warp sums.
fn segment(cols: usize) -> usize {
    super::segments(cols).0 * 256
}

fn assert_same(found: &[f32], expected: &[f32], label: &str) {
    assert_eq!(found.len(), expected.len());
    for (i, (x, e)) in found.iter().zip(expected).enumerate() {
        assert!(x == e, "{label} #{i}: {x}, not {e}");
    }
}

#[test]
fn int8_products_have_the_bits_of_the_definition_for_any_batch_size() {
    for arch in Arch::CHECKED {
        for ty in served().filter(|&ty| reads_int8(ty)) {
            let mut case = Case::new(arch, ty, 37, columns(ty), 1, 5);
            let a = Random(6).values(134 * case.cols());
            let cols = case.cols();
            let expected = reference::int8_in_segments(ty, cols, &case.file, &a, segment(cols)).unwrap();
            // One, few and many tokens, more than a block of threads processes, and a prompt.
            for tokens in [1, 3, 7, 35, 134] {
                let out = case.multiply(&a[..tokens * cols], true);
                assert_same(&out, &expected[..tokens * 37], &format!("{ty} {arch}, {tokens} tokens"));
            }
        }
    }
}

/// Columns of several units in each segment, and of a short unit, so that every kernel prefetches.
#[test]
fn long_rows_are_added_up_in_segments() {
    // 18 units: six segments of three. 11 units, the last of them short: five segments of two and one of one.
    for (arch, ty) in Arch::CHECKED.into_iter().flat_map(|arch| served().map(move |ty| (arch, ty))) {
        let cols = if ty.block_len() == 32 { 10 * 256 + 32 } else { 18 * 256 };
        let mut case = Case::new(arch, ty, 3, cols, 1, 7);
        let a = Random(8).values(3 * cols);
        let found = case.multiply(&a, reads_int8(ty));
        if reads_int8(ty) {
            // The same tokens repeated, with the kernels for several tokens and for prompts.
            for times in [2, 4, 30] {
                let repeated = case.multiply(&a.repeat(times), true);
                assert_same(&repeated, &found.repeat(times), &format!("{ty} {arch}, {times} times"));
            }
            let expected = reference::int8_in_segments(ty, cols, &case.file, &a, segment(cols)).unwrap();
            assert_same(&found, &expected, &format!("{ty} {arch}"));
        }
        let single: Vec<f32> = a.chunks(cols).flat_map(|a| case.multiply(a, reads_int8(ty))).collect();
        assert_same(&found, &single, &format!("{ty} {arch} one by one"));
    }
}

/// A segment is summed in ascending order of columns, then the segments are added: the bits of the first version of the
/// kernel.
#[test]
fn products_of_plain_floats_are_summed_column_by_column() {
    for (arch, cols) in Arch::CHECKED.into_iter().flat_map(|arch| [35, 2880, 2307].map(|cols| (arch, cols))) {
        let mut case = Case::new(arch, GgmlType::F32, 33, cols, 1, 7);
        let a = Random(8).values(4 * cols);
        let weights: Vec<f32> =
            case.file.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let in_segment = |a: &[f32], w: &[f32]| a.iter().zip(w).fold(0.0, |sum, (a, w)| w.mul_add(*a, sum));
        let each = segment(cols);
        let of = |a: &[f32], w: &[f32]| -> f32 {
            a.chunks(each).zip(w.chunks(each)).fold(0.0, |sum, (a, w)| sum + in_segment(a, w))
        };
        let rows = |a: &[f32]| weights.chunks(cols).map(|w| of(a, w)).collect::<Vec<_>>();
        let expected: Vec<f32> = a.chunks(cols).flat_map(rows).collect();
        let single: Vec<f32> = a.chunks(cols).flat_map(|a| case.multiply(a, false)).collect();
        assert_same(&single, &expected, &format!("{arch} {cols}, one by one"));
        assert_same(&case.multiply(&a, false), &expected, &format!("{arch} {cols}, together"));
    }
}

/// A block of threads prefetches whole units, once each.
#[test]
fn weights_are_prefetched_once() {
    // Three units in each of six segments, of 36 lines; two tiles.
    let mut case = Case::new(Arch::SM_121A, GgmlType::Q4_K, 64, 18 * 256, 1, 7);
    let a = Random(8).values(128 * 18 * 256);
    for tokens in [1, 4, 8, 32, 128] {
        let before = case.sim.device.machine().counts().prefetches;
        case.multiply(&a[..tokens * 18 * 256], true);
        let found = case.sim.device.machine().counts().prefetches - before;
        assert_eq!(found, 2 * 18 * 36, "{tokens} tokens");
    }
}

#[test]
fn f32_products_equal_products_with_dequantised_weights() {
    for arch in Arch::CHECKED {
        for ty in served() {
            let mut case = Case::new(arch, ty, 33, columns(ty), 1, 9);
            let cols = case.cols();
            let a = Random(10).values(5 * cols);
            let expected = reference::exact(ty, cols, &case.file, &a).unwrap();
            let found = case.multiply(&a, false);
            for (i, (x, e)) in found.iter().zip(&expected).enumerate() {
                let error = (f64::from(*x) - e.value).abs();
                assert!(error <= 1e-5 * e.magnitude, "{ty} {arch} #{i}: {x} {e:?}");
            }
            let single: Vec<f32> = a.chunks(cols).flat_map(|a| case.multiply(a, false)).collect();
            assert_same(&found, &single, &format!("{ty} {arch} one by one"));
        }
    }
}

#[test]
fn a_nan_stays_in_its_row() {
    for (ty, int8) in [(GgmlType::Q4_0, true), (GgmlType::F16, false)] {
        let mut case = Case::new(Arch::SM_121A, ty, 5, 288, 1, 11);
        let mut a = Random(12).values(3 * 288);
        let clean = case.multiply(&a, int8);
        a[288 + 7] = f32::NAN;
        let found = case.multiply(&a, int8);
        assert_same(&found[..5], &clean[..5], "the row before");
        assert!(found[5..10].iter().all(|x| x.is_nan()));
        assert_same(&found[10..], &clean[10..], "the row behind");
    }
}

#[test]
fn matrices_multiplied_together_have_the_bits_of_each_alone() {
    for (arch, ty, tokens) in [
        (Arch::SM_90, GgmlType::Q4_K, 1),
        (Arch::SM_121A, GgmlType::F16, 3),
        (Arch::SM_121A, GgmlType::Q6_K, 66),
    ] {
        let mut case = Case::new(arch, ty, 70, 256, 1, 17);
        let a = Random(18).values(tokens * 256);
        let x = case.activations(&a, reads_int8(ty));
        // All matrices start at the same tile, so they share rows: whole tiles and part of a tile.
        let start = case.matrix.start;
        let matrices =
            [70, 32, 40].map(|rows| Matrix { shape: TiledShape::new(ty, rows, 256, 1).unwrap(), start });
        let all = case.run(|_| (), x, tokens);
        let outs = matrices.map(|matrix| case.sim.room(4 * tokens * matrix.shape.rows()));
        let base = Product { matrix: &matrices[0], ..case.product(x, tokens, outs[0]) };
        let products: [Product<'_>; 3] = std::array::from_fn(|i| {
            let (matrix, ld) = (&matrices[i], matrices[i].shape.rows());
            Product { matrix, out: outs[i], ld, scale: [1.0, 2.0, 1.0][i], ..base }
        });
        case.kernels.multiply(&mut case.sim.device, &products).unwrap();
        for product in &products {
            let rows = product.ld;
            let found = case.sim.read_values(product.out, tokens * rows);
            let of = |token: usize| all[70 * token..][..rows].iter().map(|x| x * product.scale);
            let expected: Vec<f32> = (0..tokens).flat_map(of).collect();
            assert_same(&found, &expected, &format!("{ty}, {rows} rows"));
        }
        let other = Product { tokens: tokens + 1, ..products[1] };
        let mut refused = |products: &[Product<'_>]| {
            case.kernels.multiply(&mut case.sim.device, products).unwrap_err().to_string()
        };
        assert!(refused(&[products[0], other]).contains("no launch"));
        assert!(refused(&[products[0]; 4]).contains("no launch"));
    }
}

#[test]
fn the_epilogue_scales_adds_bias_and_accumulates() {
    for ty in [GgmlType::Q8_0, GgmlType::F32] {
        let mut case = Case::new(Arch::SM_90, ty, 40, 64, 1, 13);
        let (a, bias) = (Random(14).values(3 * 64), Random(15).values(40));
        let bare = case.multiply(&a, false);
        let (x, on_device) = (case.activations(&a, false), case.sim.values(&bias));
        // Output rows wider than the matrix, with previous contents.
        let before = Random(16).values(3 * 50);
        let out = case.sim.values(&before);
        let matrix = case.matrix;
        let base = Product { matrix: &matrix, ..case.product(x, 3, out) };
        let product = Product { scale: 0.5, bias: Some(on_device), accumulate: true, ld: 50, ..base };
        case.kernels.multiply(&mut case.sim.device, &[product]).unwrap();
        let found = case.sim.read_values(out, 3 * 50);
        for (i, (x, before)) in found.iter().zip(&before).enumerate() {
            let (token, row) = (i / 50, i % 50);
            let expected = match row < 40 {
                true => before + (bare[token * 40 + row] * 0.5 + bias[row]),
                false => *before,
            };
            assert_eq!(*x, expected, "{ty} {token} {row}");
        }
    }
}

/// Compares products `[tokens][rows]` with their sums in 64 bits.
fn assert_sums(found: &[f32], x: &[f64], weights: &[f64], cols: usize, what: &str) {
    let expected = x.chunks(cols).flat_map(|x| weights.chunks(cols).map(move |row| (x, row)));
    for (i, (found, (x, row))) in found.iter().zip(expected).enumerate() {
        let products = x.iter().zip(row).map(|(x, weight)| x * weight);
        let (sum, size) = products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
        let error = (f64::from(*found) - sum).abs();
        assert!(error <= 1e-6 * size, "{what}, #{i}: {found}, not {sum}");
    }
    assert_eq!(found.len() * cols * cols, x.len() * weights.len(), "{what}");
}

/// Groups of up to `most` tokens of one expert, each followed by an empty one, and their tokens.
fn grouped(chosen: &[u32], most: usize) -> (Vec<[u32; 2]>, Vec<u32>) {
    let (mut groups, mut list) = (Vec::new(), Vec::new());
    for expert in 0..3 {
        let tokens: Vec<u32> = (0..).zip(chosen).filter(|(_, e)| **e == expert).map(|(t, _)| t).collect();
        for group in tokens.chunks(most) {
            groups.extend([[list.len() as u32, expert << 8 | group.len() as u32], [0, 0]]);
            list.extend(group);
        }
    }
    (groups, list)
}

#[test]
fn tokens_are_routed_one_by_one_or_by_groups() {
    for (arch, ty, rows) in Arch::CHECKED.into_iter().flat_map(|arch| {
        [(GgmlType::Q4_K, 5), (GgmlType::MXFP4, 60), (GgmlType::BF16, 5), (GgmlType::FP8, 5)]
            .map(|(ty, rows)| (arch, ty, rows))
    }) {
        let (outputs, cols, int8) = (34, 256, reads_int8(ty));
        let mut case = Case::new(arch, ty, outputs, cols, 3, 17);
        // Rows at two experts each. Most use expert 1, two expert 2.
        let pairs = 2 * rows;
        let chosen: Vec<u32> =
            (0..pairs).map(|i| if i % 8 == 3 && i < 16 { 2 } else { [1, 0, 1][i % 3] }).collect();
        let a = Random(18).values(rows * cols);
        let x = case.activations(&a, int8);
        // The same products, without experts.
        let expected: Vec<f32> = (0..pairs)
            .flat_map(|pair| {
                let shape = TiledShape::new(ty, outputs, cols, 1).unwrap();
                let start = case.matrix.start.offset(chosen[pair] as usize * shape.packed_bytes());
                let row = case.activations(&a[pair / 2 * cols..][..cols], int8);
                let matrix = Matrix { shape, start };
                let out = case.sim.room(4 * outputs);
                let product = Product { matrix: &matrix, ..case.product(row, 1, out) };
                case.kernels.multiply(&mut case.sim.device, &[product]).unwrap();
                case.sim.read_values(out, outputs)
            })
            .collect();
        let mut all = vec![Experts::Each(case.sim.numbers(&chosen))];
        for most in [1, 3, 8, 9, 32] {
            let (groups, list) = grouped(&chosen, most);
            let count = groups.len();
            let (groups, list) = (case.sim.numbers(groups.as_flattened()), case.sim.numbers(&list));
            all.push(Experts::Listed { groups, count, list, most });
        }
        for experts in all {
            let label = format!("{ty} {arch} {experts:?}");
            let routed = |product: &mut Product<'_>| (product.share, product.experts) = (2, experts);
            assert_same(&case.run(routed, x, pairs), &expected, &label);
            // Together with another product, as gate and up are.
            let (matrix, outs) = (case.matrix, [0; 2].map(|_| case.sim.room(4 * pairs * outputs)));
            let products =
                outs.map(|out| Product { matrix: &matrix, share: 2, experts, ..case.product(x, pairs, out) });
            case.kernels.multiply(&mut case.sim.device, &products).unwrap();
            for out in outs {
                assert_same(&case.sim.read_values(out, pairs * outputs), &expected, &label);
            }
        }
        // A launch has one choice of experts.
        let matrix = case.matrix;
        let out = case.sim.room(4 * rows * outputs);
        let one = Product { matrix: &matrix, ..case.product(x, rows, out) };
        let each = Product { experts: Experts::Each(out), ..one };
        assert!(case.kernels.multiply(&mut case.sim.device, &[one, each]).is_err());
    }
}

#[test]
fn embeddings_equal_the_dequantised_rows() {
    for arch in Arch::CHECKED {
        for ty in served() {
            let mut case = Case::new(arch, ty, 35, columns(ty), 1, 19);
            let cols = case.cols();
            let mut weights = vec![0.0; 35 * cols];
            dequantize(ty, &case.file, &mut weights).unwrap();
            let rows = [34_u32, 0, 31, 32, 0];
            let index = case.sim.numbers(&rows);
            let before = Random(20).values(5 * cols);
            for (scale, accumulate) in [(1.0, false), (0.5, true)] {
                let out = case.sim.values(&before);
                let matrix = case.matrix;
                let embedding = Embedding { table: &matrix, index, rows: 5, scale, accumulate, out };
                case.kernels.embed(&mut case.sim.device, &embedding).unwrap();
                let expected: Vec<f32> = (0..5 * cols)
                    .map(|i| {
                        let weight = scale * weights[rows[i / cols] as usize * cols + i % cols];
                        if accumulate { before[i] + weight } else { weight }
                    })
                    .collect();
                assert_same(&case.sim.read_values(out, 5 * cols), &expected, &format!("{ty} {arch}"));
            }
        }
    }
}

/// Groups of several experts in one block of the kernel for prompts, some of them not full, some empty.
#[test]
fn the_kernel_for_prompts_multiplies_groups() {
    let (rows, outputs) = (131, 70);
    let chosen: Vec<u32> = (0..2 * rows).map(|i| [1, 0, 1, 2, 1][i % 5]).collect();
    for (arch, ty) in Arch::CHECKED.into_iter().flat_map(|arch| served().map(move |ty| (arch, ty))) {
        if !reads_int8(ty) {
            continue;
        }
        // Two segments of two units, or of one unit and a short one.
        let cols = if ty.block_len() == 32 { 256 + 64 } else { 4 * 256 };
        let mut case = Case::new(arch, ty, outputs, cols, 3, 17);
        let a = Random(18).values(rows * cols);
        let x = case.activations(&a, true);
        let (mut groups, list) = grouped(&chosen, 32);
        groups.resize(groups.len().next_multiple_of(4), [0, 0]);
        let count = groups.len();
        let (groups, list) = (case.sim.numbers(groups.as_flattened()), case.sim.numbers(&list));
        let experts = Experts::Listed { groups, count, list, most: 32 };
        let mut run = |multiprocessors| {
            case.kernels.multiprocessors = multiprocessors;
            let before = case.sim.device.machine().counts().global_read;
            let routed = |product: &mut Product<'_>| (product.share, product.experts) = (2, experts);
            let found = case.run(routed, x, 2 * rows);
            (found, case.sim.device.machine().counts().global_read - before)
        };
        let (staged, of_staged) = run(1);
        let (plain, of_plain) = run(usize::MAX);
        assert_same(&staged, &plain, &format!("{ty} {arch}"));
        assert_ne!(of_staged, of_plain, "{ty} {arch}: both ran the same kernel");
    }
}

/// A prompt's activations are read once for two tiles, each by one lane.
#[test]
fn the_kernel_for_prompts_reads_less() {
    const TOKENS: usize = 128;
    let mut case = Case::new(Arch::SM_90, GgmlType::Q4_K, 64, 1024, 1, 24);
    let a = Random(25).values(TOKENS * 1024);
    let x = case.activations(&a, true);
    let read = |case: &mut Case| {
        let before = case.sim.device.machine().counts().global_read;
        let found = case.run(|_| (), x, TOKENS);
        (found, (case.sim.device.machine().counts().global_read - before) as usize)
    };
    let (staged, of_staged) = read(&mut case);
    case.kernels.multiprocessors = 2;
    let (plain, of_plain) = read(&mut case);
    assert_same(&staged, &plain, "with few blocks of threads, and with many");
    // In the other kernel, each lane reads the tokens' common data itself, by eight tokens.
    let activations = TOKENS * quantised_row_bytes(1024);
    assert!(of_plain > 2 * of_staged, "{of_staged} and {of_plain}");
    assert!(of_staged >= activations + 4 * case.matrix.shape.packed_bytes(), "{of_staged}");
    assert!(of_staged <= activations + 20 * case.matrix.shape.packed_bytes(), "{of_staged}");
}

/// At batch size 1, a GPU with the memory bandwidth of an H200 has at most 7.8 lane instructions for each
/// byte of weights. FP8 takes most of them: each value becomes a float of its own.
#[test]
fn products_with_one_token_are_within_the_instruction_budget() {
    let (mut counted, mut within) = (String::new(), true);
    for ty in served() {
        let int8 = reads_int8(ty);
        let mut case = Case::new(Arch::SM_90, ty, 32, 8192, 1, 21);
        let a = Random(22).values(8192);
        let x = case.activations(&a, int8);
        let before = case.sim.device.machine().counts();
        case.run(|_| (), x, 1);
        let count = case.sim.device.machine().counts().lane_instructions - before.lane_instructions;
        let per_byte = count as f64 / case.matrix.shape.packed_bytes() as f64;
        counted.push_str(&format!("{ty} {per_byte:.2}, "));
        within &= per_byte <= if ty == GgmlType::FP8 { 7.5 } else { 5.0 };
    }
    assert!(within, "lane-instructions for each byte: {counted}");
}

#[test]
fn invalid_shapes_are_refused() {
    let mut case = Case::new(Arch::SM_90, GgmlType::F16, 4, 32, 1, 23);
    let x = case.sim.room(4096);
    let mut refused = |change: &dyn Fn(&mut Product<'_>)| {
        let matrix = case.matrix;
        let mut product = Product { matrix: &matrix, ..case.product(Activations::F32(x), 1, x) };
        change(&mut product);
        case.kernels.multiply(&mut case.sim.device, &[product]).unwrap_err()
    };
    assert!(matches!(refused(&|product| product.x = Activations::Int8(x)), CudaError::Invalid { .. }));
    assert!(matches!(refused(&|product| product.ld = 1 << 33), CudaError::Invalid { .. }));
    let other = Matrix { shape: TiledShape::new(GgmlType::F32, 4, 32, 1).unwrap(), start: x };
    let product = Product { matrix: &other, ..case.product(Activations::F32(x), 1, x) };
    let found = case.kernels.multiply(&mut case.sim.device, &[product]).unwrap_err();
    assert!(found.to_string().contains("kernels of F16 on a matrix of F32"), "{found}");
    let compiled = case.sim.compiled(&source::ROWWISE);
    let found = MatmulKernels::load(&mut case.sim.device, compiled, GgmlType::F32).unwrap_err();
    assert!(matches!(found, CudaError::NoKernel { .. }), "{found}");
    assert!(MatmulKernels::source(GgmlType::IQ2_S).is_err());
}
