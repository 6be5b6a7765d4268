use super::{
    ActivationMode, Activations, Epilogue, MatmulKernels, PackedMatrix, PackedMatrixBuilder, QuantizedRows,
    matmul_single_thread,
};
use crate::error::Error;
use crate::isa::Isa;
use crate::quant::{GgmlType, Scheme, dequantize};
use crate::reference::matmul as reference;
use crate::reference::random::{Random, f16_fields};
use proptest::prelude::*;
use std::sync::Arc;

fn served() -> impl Iterator<Item = GgmlType> {
    GgmlType::ALL.into_iter().filter(|&ty| super::MatrixView::supports(ty))
}

fn served_by_int8() -> impl Iterator<Item = GgmlType> {
    served().filter(|&ty| MatmulKernels::reads_int8(ty, ActivationMode::Int8))
}

fn every_isa() -> impl Iterator<Item = MatmulKernels> {
    Isa::available().into_iter().map(|isa| MatmulKernels::for_isa(isa).unwrap())
}

/// The product of a whole matrix.
fn product(kernels: MatmulKernels, matrix: &PackedMatrix, a: &[f32], mode: ActivationMode) -> Vec<f32> {
    let mut quantized = QuantizedRows::new();
    quantized.quantize(kernels, matrix.cols(), a).unwrap();
    let tokens = a.len() / matrix.cols();
    let activations = Activations::new(tokens, matrix.cols(), a, Some(&quantized)).unwrap();
    let mut out = vec![f32::NAN; tokens * matrix.rows()];
    let view = matrix.view(0).unwrap();
    matmul_single_thread(kernels, view, &activations, mode, &Epilogue::STORE, &mut out).unwrap();
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Number of columns in `blocks` blocks, of a block size that all formats share.
fn columns(ty: GgmlType, blocks: usize) -> usize {
    match ty.block_len() {
        1 => 33 * blocks + 4,
        len => len * blocks,
    }
}

/// Checks that plain floats in file order give the same products and the same rows as repacked ones.
fn check_in_place(ty: GgmlType, (rows, cols, tokens): (usize, usize, usize), bytes: &[u8], a: &[f32]) {
    let packed = PackedMatrix::pack(ty, rows, cols, 1, bytes).unwrap();
    let in_place = PackedMatrix::in_place(ty, rows, cols, 1, Arc::new(bytes.to_vec()));
    if Scheme::of(ty).is_some() {
        assert!(in_place.is_err(), "{ty}");
        return;
    }
    let in_place = in_place.unwrap();
    for kernels in every_isa() {
        let [expected, found] =
            [&packed, &in_place].map(|matrix| bits(&product(kernels, matrix, a, ActivationMode::F32)));
        assert_eq!(expected, found, "{ty} {kernels:?} {rows}x{cols}x{tokens}");
        for row in 0..rows {
            let [expected, found] = [&packed, &in_place].map(|matrix| {
                let mut out = vec![f32::NAN; cols];
                kernels.dequantize_row(matrix.view(0).unwrap(), row, &mut out).unwrap();
                bits(&out)
            });
            assert_eq!(expected, found, "{ty} {kernels:?} row {row} of {rows}x{cols}");
        }
    }
}

/// Checks one format on every instruction set and in both modes against the references.
fn check_products(ty: GgmlType, rows: usize, cols: usize, tokens: usize, seed: u64) {
    let mut random = Random(seed);
    let bytes = random.tensor(ty, rows, cols);
    let a = random.values(tokens * cols);
    check_in_place(ty, (rows, cols, tokens), &bytes, &a);
    let matrix = PackedMatrix::pack(ty, rows, cols, 1, &bytes).unwrap();
    let exact = reference::exact(ty, cols, &bytes, &a).unwrap();
    let mut first: Option<Vec<f32>> = None;
    for kernels in every_isa() {
        let out = product(kernels, &matrix, &a, ActivationMode::F32);
        for (i, (x, e)) in out.iter().zip(&exact).enumerate() {
            let error = (f64::from(*x) - e.value).abs();
            assert!(error <= 1e-5 * e.magnitude, "{ty} {kernels:?} {rows}x{cols}x{tokens} #{i}: {x} {e:?}");
        }
        let first = first.get_or_insert_with(|| out.clone());
        assert_eq!(bits(first), bits(&out), "{ty} f32 differs between instruction sets");
    }
    if !MatmulKernels::reads_int8(ty, ActivationMode::Int8) {
        return;
    }
    let expected = bits(&reference::int8(ty, cols, &bytes, &a).unwrap());
    for kernels in every_isa() {
        let out = product(kernels, &matrix, &a, ActivationMode::Int8);
        assert_eq!(bits(&out), expected, "{ty} {kernels:?} {rows}x{cols}x{tokens}");
    }
}

#[test]
fn products_agree_with_the_references() {
    for ty in served() {
        for (i, tokens) in [1, 2, 3, 7, 8, 9, 17].into_iter().enumerate() {
            let rows = [1, 15, 17, 33][i % 4];
            check_products(ty, rows, columns(ty, 1 + i % 3), tokens, 7 + i as u64);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn products_agree_for_any_shape(
        ty in proptest::sample::select(served().collect::<Vec<_>>()),
        rows in 1_usize..50,
        blocks in 1_usize..5,
        tokens in 1_usize..36,
        seed: u64,
    ) {
        check_products(ty, rows, columns(ty, blocks), tokens, seed);
    }
}

#[test]
fn a_token_s_result_does_not_depend_on_the_batch() {
    let (rows, tokens) = (33, 65);
    for ty in served() {
        let cols = columns(ty, 3);
        let mut random = Random(11);
        let matrix = PackedMatrix::pack(ty, rows, cols, 1, &random.tensor(ty, rows, cols)).unwrap();
        let a = random.values(tokens * cols);
        for kernels in every_isa() {
            for mode in [ActivationMode::Int8, ActivationMode::F32] {
                let whole = product(kernels, &matrix, &a, mode);
                for batch in [1, 2, 3, 5, 7, 8, 11, 16, 31] {
                    let batched: Vec<f32> =
                        a.chunks(batch * cols).flat_map(|a| product(kernels, &matrix, a, mode)).collect();
                    assert_eq!(
                        bits(&batched),
                        bits(&whole),
                        "{ty} {kernels:?} {mode:?} in batches of {batch}"
                    );
                }
            }
        }
    }
}

#[test]
fn rows_of_a_packed_matrix_equal_the_dequantised_rows() {
    let rows = 17;
    for ty in served() {
        let cols = columns(ty, 2);
        let bytes = Random(3).tensor(ty, rows, cols);
        let matrix = PackedMatrix::pack(ty, rows, cols, 1, &bytes).unwrap();
        let mut expected = vec![0.0; rows * cols];
        dequantize(ty, &bytes, &mut expected).unwrap();
        for kernels in every_isa() {
            for (row, expected) in expected.chunks_exact(cols).enumerate() {
                let mut out = vec![0.0; cols];
                kernels.dequantize_row(matrix.view(0).unwrap(), row, &mut out).unwrap();
                assert_eq!(bits(&out), bits(expected), "{ty} row {row}");
            }
        }
    }
}

#[test]
fn every_fp8_code_has_its_value_on_every_isa() {
    let (ty, rows, cols) = (GgmlType::FP8, 16, 256);
    let mut bytes = Vec::new();
    for row in 0..rows {
        for block in 0..cols / 32 {
            bytes.extend(0.75_f32.to_le_bytes());
            bytes.extend((0..32).map(|k| (row * 17 + block * 32 + k) as u8));
        }
    }
    let matrix = PackedMatrix::pack(ty, rows, cols, 1, &bytes).unwrap();
    let mut weights = vec![0.0; rows * cols];
    dequantize(ty, &bytes, &mut weights).unwrap();
    // One token for each column, whose output is the column. A sum of zeros is 0.
    let a: Vec<f32> = (0..cols * cols).map(|i| if i / cols == i % cols { 1.0 } else { 0.0 }).collect();
    let columns: Vec<f32> = (0..cols).flat_map(|k| weights.iter().skip(k).step_by(cols)).copied().collect();
    for kernels in every_isa() {
        assert_eq!(product(kernels, &matrix, &a, ActivationMode::F32), columns, "{kernels:?}");
    }
}

#[test]
fn products_of_extreme_bytes_are_exact() {
    let (rows, cols) = (16, 512);
    for ty in served_by_int8() {
        for fill in [0x00, 0x7f, 0x80, 0xff] {
            let mut bytes = vec![fill; rows * ty.row_bytes(cols).unwrap()];
            for block in bytes.chunks_exact_mut(ty.block_bytes()) {
                for &at in f16_fields(ty) {
                    // The largest finite f16.
                    block[at..at + 2].copy_from_slice(&0x7bff_u16.to_le_bytes());
                }
                if ty == GgmlType::MXFP4 {
                    block[0] = 130;
                }
            }
            let matrix = PackedMatrix::pack(ty, rows, cols, 1, &bytes).unwrap();
            for sign in [1.0, -1.0] {
                let a: Vec<f32> = (0..2 * cols).map(|i| if i % 96 < 64 { sign } else { -sign }).collect();
                let expected = bits(&reference::int8(ty, cols, &bytes, &a).unwrap());
                for kernels in every_isa() {
                    let out = product(kernels, &matrix, &a, ActivationMode::Int8);
                    assert_eq!(bits(&out), expected, "{ty} {kernels:?} {fill:#x}");
                }
            }
        }
    }
}

#[test]
fn quantised_rows_are_the_same_on_every_isa_and_poison_spreads() {
    let cols = 100;
    let mut a = Random(5).values(6 * cols);
    a[..32].fill(0.0);
    a[32..64].fill(1e-40);
    a[cols] = f32::INFINITY;
    a[2 * cols + 40] = f32::NAN;
    a[3 * cols] = f32::MAX;
    // Ties: with a scale of 1, halves are rounded to even.
    a[4 * cols..][..32].copy_from_slice(&std::array::from_fn::<f32, 32, _>(|i| i as f32 - 15.5));
    a[4 * cols] = 127.0;
    let mut results = Vec::new();
    for kernels in every_isa() {
        let mut rows = QuantizedRows::new();
        rows.quantize(kernels, cols, &a).unwrap();
        assert_eq!((rows.rows(), rows.k()), (6, cols));
        let blocks = rows.blocks().to_vec();
        assert_eq!(blocks[0].scale, 0.0);
        assert_eq!(blocks[1].quants, [0; 32]);
        assert!(blocks[4].scale.is_nan() && blocks[4].scaled_sum.is_nan());
        assert!(blocks[9].scale.is_nan());
        assert_eq!(blocks[16].quants[1..5], [-14, -14, -12, -12]);
        assert_eq!(blocks[19].quants[4..], [0; 28]);
        results.push(blocks.iter().map(|b| format!("{b:?}")).collect::<Vec<_>>());
    }
    assert!(results.iter().all(|blocks| *blocks == results[0]));
}

#[test]
fn chosen_rows_give_the_same_results_as_among_all_rows() {
    let (rows, tokens) = (33, 40);
    for ty in served() {
        let cols = columns(ty, 3);
        let mut random = Random(9);
        let matrix = PackedMatrix::pack(ty, rows, cols, 1, &random.tensor(ty, rows, cols)).unwrap();
        let a = random.values(tokens * cols);
        for kernels in every_isa() {
            let mut quantized = QuantizedRows::new();
            quantized.quantize(kernels, cols, &a).unwrap();
            let all = Activations::new(tokens, cols, &a, Some(&quantized)).unwrap();
            for mode in [ActivationMode::Int8, ActivationMode::F32] {
                let whole = product(kernels, &matrix, &a, mode);
                let product = |activations: &Activations<'_>| {
                    let mut out = vec![f32::NAN; activations.rows() * rows];
                    let view = matrix.view(0).unwrap();
                    matmul_single_thread(kernels, view, activations, mode, &Epilogue::STORE, &mut out)
                        .unwrap();
                    bits(&out)
                };
                // Lists with repetitions, out of order, and longer than a tile.
                for count in [0, 1, 3, 7, 19, 37] {
                    let listed: Vec<u32> = (0..count).map(|i| (i * 23 + 5) % tokens as u32).collect();
                    let expected: Vec<f32> = listed
                        .iter()
                        .flat_map(|row| &whole[*row as usize * rows..][..rows])
                        .copied()
                        .collect();
                    assert_eq!(product(&all.listed(&listed).unwrap()), bits(&expected), "{ty} {kernels:?}");
                    let run = all.run(2..2 + count as usize).unwrap();
                    assert_eq!(product(&run), bits(&whole[2 * rows..][..count as usize * rows]));
                }
            }
            assert_eq!(
                all.listed(&[0, 40]).map(|_| ()),
                Err(Error::OutOfRange { what: "row", index: 40, len: 40 })
            );
            assert!(matches!(all.run(3..41), Err(Error::OutOfRange { what: "row", index: 41, len: 40 })));
        }
    }
}

#[test]
fn the_epilogue_scales_adds_bias_and_accumulates() {
    let (ty, rows, cols) = (GgmlType::Q8_0, 19, 64);
    let mut random = Random(1);
    let matrix = PackedMatrix::pack(ty, rows, cols, 1, &random.tensor(ty, rows, cols)).unwrap();
    let (a, bias) = (random.values(3 * cols), random.values(rows));
    for kernels in every_isa() {
        let bare = product(kernels, &matrix, &a, ActivationMode::F32);
        let activations = Activations::new(3, cols, &a, None).unwrap();
        let epilogue = Epilogue { scale: 0.5, bias: Some(&bias), accumulate: true };
        let mut out = vec![2.0; bare.len()];
        let view = matrix.view(0).unwrap();
        let mode = ActivationMode::F32;
        matmul_single_thread(kernels, view, &activations, mode, &epilogue, &mut out).unwrap();
        for (i, (x, bare)) in out.iter().zip(&bare).enumerate() {
            assert_eq!(*x, 2.0 + (bare * 0.5 + bias[i % rows]));
        }
    }
}

#[test]
fn experts_are_separate_matrices_and_chunks_may_come_in_any_order() {
    let (ty, rows, cols, experts) = (GgmlType::Q4_K, 40, 256, 3);
    let bytes = Random(2).tensor(ty, rows * experts, cols);
    let mut builder = PackedMatrixBuilder::new(ty, rows, cols, experts).unwrap();
    assert_eq!(builder.file_bytes(), bytes.len());
    let mut chunks: Vec<_> = builder.chunks(20).collect();
    assert_eq!(chunks.len(), 9);
    chunks.reverse();
    for chunk in chunks {
        let range = chunk.file_range();
        chunk.pack(&bytes[range]).unwrap();
    }
    let matrix = builder.finish().unwrap();
    let kernels = every_isa().next().unwrap();
    let mut row = vec![0.0; cols];
    let mut expected = vec![0.0; cols];
    for (i, bytes) in bytes.chunks_exact(ty.row_bytes(cols).unwrap()).enumerate() {
        dequantize(ty, bytes, &mut expected).unwrap();
        kernels.dequantize_row(matrix.view(i / rows).unwrap(), i % rows, &mut row).unwrap();
        assert_eq!(bits(&row), bits(&expected));
    }
    assert!(matches!(matrix.view(3), Err(Error::OutOfRange { what: "expert", .. })));
}

#[test]
fn packing_costs_at_most_a_tenth_more_than_the_file() {
    for ty in served() {
        for (rows, cols) in [(576, 1536), (1024, 3072), (49152, 256)] {
            let builder = PackedMatrixBuilder::new(ty, rows, cols, 1).unwrap();
            let file = builder.file_bytes();
            let mut builder = builder;
            let mut random = Random(4);
            for chunk in builder.chunks(4096) {
                let bytes = vec![random.byte(); chunk.file_range().len()];
                chunk.pack(&bytes).unwrap();
            }
            let resident = builder.finish().unwrap().resident_bytes();
            assert!(resident as f64 <= 1.1 * file as f64, "{ty}: {resident} of {file}");
        }
    }
}

#[test]
fn invalid_shapes_are_refused() {
    let new = |ty, rows, cols, experts| PackedMatrixBuilder::new(ty, rows, cols, experts).map(|_| ());
    assert_eq!(new(GgmlType::IQ2_XS, 4, 256, 1), Err(Error::NoMatmul { ty: "IQ2_XS" }));
    assert!(matches!(new(GgmlType::Q6_K, 4, 128, 1), Err(Error::PartialBlock { .. })));
    assert!(matches!(new(GgmlType::Q4_0, 0, 32, 1), Err(Error::Shape { .. })));
    assert!(matches!(new(GgmlType::Q4_0, usize::MAX / 2, 32, 1), Err(Error::Shape { .. })));
    assert!(matches!(new(GgmlType::F32, 1 << 30, 1 << 30, 1 << 30), Err(Error::Shape { .. })));
    assert!(matches!(PackedMatrix::pack(GgmlType::Q4_0, 2, 32, 1, &[0; 35]), Err(Error::Length { .. })));

    let mut builder = PackedMatrixBuilder::new(GgmlType::Q4_0, 20, 32, 1).unwrap();
    let first = builder.chunks(16).next().unwrap();
    assert!(matches!(first.pack(&[0; 1]), Err(Error::Length { .. })));
    builder.chunks(16).next().unwrap().pack(&[0; 16 * 18]).unwrap();
    assert_eq!(builder.finish().map(|_| ()), Err(Error::Unpacked { packed: 1, total: 2 }));

    let matrix = PackedMatrix::pack(GgmlType::Q4_0, 2, 32, 1, &[0; 36]).unwrap();
    let view = matrix.view(0).unwrap();
    let kernels = every_isa().next().unwrap();
    let run = |activations: &Activations<'_>, epilogue: &Epilogue<'_>, out: &mut [f32]| {
        matmul_single_thread(kernels, view, activations, ActivationMode::Int8, epilogue, out)
    };
    let a = [0.0; 64];
    let activations = Activations::new(2, 32, &a, None).unwrap();
    assert_eq!(run(&activations, &Epilogue::STORE, &mut [0.0; 4]), Err(Error::NotQuantized));
    assert!(matches!(run(&activations, &Epilogue::STORE, &mut [0.0; 5]), Err(Error::Length { .. })));
    let long_bias = Epilogue { bias: Some(&a), ..Epilogue::STORE };
    assert!(matches!(run(&activations, &long_bias, &mut [0.0; 4]), Err(Error::Length { .. })));
    let narrow = Activations::new(4, 16, &a, None).unwrap();
    assert!(matches!(run(&narrow, &Epilogue::STORE, &mut [0.0; 8]), Err(Error::Length { .. })));
    assert!(matches!(Activations::new(3, 32, &a, None), Err(Error::Length { .. })));
    let mut quantized = QuantizedRows::new();
    quantized.resize(1, 32);
    assert!(matches!(Activations::new(2, 32, &a, Some(&quantized)), Err(Error::Length { .. })));
    assert!(matches!(quantized.quantize_row(kernels, 1, &a[..32]), Err(Error::OutOfRange { .. })));
    assert!(matches!(quantized.quantize_row(kernels, 0, &a), Err(Error::Length { .. })));
    assert!(matches!(kernels.dequantize_row(view, 2, &mut [0.0; 32]), Err(Error::OutOfRange { .. })));
    assert!(matches!(kernels.dequantize_row(view, 1, &mut [0.0; 33]), Err(Error::Length { .. })));
}

/// A byte range of a buffer that starts on a cache line.
struct SharedRange(crate::aligned::AlignedBuf<u8>, std::ops::Range<usize>);

impl AsRef<[u8]> for SharedRange {
    fn as_ref(&self) -> &[u8] {
        &self.0[self.1.clone()]
    }
}

fn shared_bytes(bytes: &[u8], from: usize) -> super::SharedBytes {
    let mut buffer = crate::aligned::AlignedBuf::zeroed(from + bytes.len());
    buffer[from..].copy_from_slice(bytes);
    std::sync::Arc::new(SharedRange(buffer, from..from + bytes.len()))
}

#[test]
fn concatenated_pieces_equal_the_packed_tensor() {
    let mut random = Random(32);
    for (ty, rows, cols, experts) in [(GgmlType::F16, 70, 64, 1), (GgmlType::Q4_K, 40, 256, 3)] {
        let file = random.tensor(ty, rows * experts, cols);
        let whole = PackedMatrix::pack(ty, rows, cols, experts, &file).unwrap();
        let panel = whole.view(0).unwrap().panel_bytes();
        for bytes in [0, 2 * panel + 1, usize::MAX] {
            let pieces = super::PackedPieces::new(ty, rows, cols, experts, bytes).unwrap();
            let (mut found, mut piece) = (vec![0xff; pieces.packed_bytes()], vec![7; 5]);
            for index in (0..pieces.count()).rev() {
                let bytes_of_file = &file[pieces.file_range(index).unwrap()];
                let offset = pieces.pack(index, bytes_of_file, &mut piece).unwrap();
                assert!(piece.len() <= bytes.max(panel));
                found[offset..][..piece.len()].copy_from_slice(&piece);
            }
            assert!(found == whole.packed(), "{ty:?} {bytes}");
            let beyond = pieces.pack(pieces.count(), &file, &mut piece);
            assert!(matches!(beyond, Err(Error::OutOfRange { .. })));
            let short = &file[1..pieces.file_range(0).unwrap().end];
            assert!(matches!(pieces.pack(0, short, &mut piece), Err(Error::Length { .. })));
        }
    }
}

#[test]
fn packed_bytes_give_the_same_matrix_and_other_sizes_are_refused() {
    let mut random = Random(31);
    for ty in [GgmlType::F16, GgmlType::Q4_K] {
        let packed = PackedMatrix::pack(ty, 20, 256, 1, &random.tensor(ty, 20, 256)).unwrap();
        let bytes = packed.packed().to_vec();
        let again = PackedMatrix::from_packed(ty, 20, 256, 1, shared_bytes(&bytes, 0)).unwrap();
        assert_eq!((again.packed(), again.rows(), again.cols()), (&bytes[..], 20, 256));
        let view = |matrix: &PackedMatrix| matrix.view(0).unwrap().panel(1).to_vec();
        assert_eq!(view(&again), view(&packed));
        let refused =
            |rows, bytes: super::SharedBytes| PackedMatrix::from_packed(ty, rows, 256, 1, bytes).unwrap_err();
        assert!(matches!(refused(50, shared_bytes(&bytes, 0)), Error::Length { .. }));
        assert!(matches!(refused(20, shared_bytes(&bytes[1..], 0)), Error::Length { .. }));
        assert!(matches!(refused(20, shared_bytes(&bytes, 8)), Error::Length { .. }), "not on a cache line");
    }
}
