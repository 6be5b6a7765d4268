use super::*;

fn made(conversion: &Conversion) -> Vec<u8> {
    let bytes = conversion.whole(&[]).unwrap();
    assert_eq!(bytes.len() as u64, conversion.len());
    let len = bytes.len();
    let cuts = [0, 1, 5.min(len), len / 3, len / 2, len - 2, len];
    for (from, to) in cuts.into_iter().flat_map(|from| cuts.map(|to| (from, to))) {
        if from <= to {
            assert_eq!(conversion.read(&[], from as u64..to as u64).unwrap(), bytes[from..to], "{from} {to}");
        }
    }
    bytes
}

fn literal(bytes: impl IntoIterator<Item = u8>) -> Box<Conversion> {
    Box::new(Conversion::Literal(bytes.into_iter().collect()))
}

#[test]
fn rows_are_picked_in_order() {
    let rows = Conversion::Rows { of: literal(0..12), row_bytes: 3, runs: vec![(2, 4), (0, 1)] };
    let both = Conversion::Concat(vec![rows, *literal([100, 101])]);
    assert_eq!(made(&both), [6, 7, 8, 9, 10, 11, 0, 1, 2, 100, 101]);
}

#[test]
fn a_large_result_is_made_in_pieces_and_an_error_in_one_is_reported() {
    let rows = (3 * PIECE / 64) as usize;
    let codes: Vec<u8> = (0..rows * 64).map(|at| (at % 127) as u8).collect();
    let large = |codes: Vec<u8>| {
        let scales = (0..2 * rows).flat_map(|at| (at as f32).to_le_bytes()).collect();
        Conversion::Scaled(Box::new(Scaled {
            rows: rows as u64,
            scales: Conversion::Literal(scales),
            ..scaled(GgmlType::FP8, codes, None)
        }))
    };
    let conversion = large(codes.clone());
    let bytes = conversion.bytes(&[]).unwrap();
    for (at, (block, codes)) in bytes.chunks_exact(36).zip(codes.chunks_exact(32)).enumerate() {
        assert!(block[..4] == (at as f32).to_le_bytes() && block[4..] == *codes, "{at}");
    }
    assert_eq!(bytes.len() as u64, conversion.len());
    let mut not_a_number = codes;
    not_a_number[rows * 64 - 1] = 0x7f;
    let error = large(not_a_number).bytes(&[]).unwrap_err().to_string();
    assert!(error.contains("not a number"), "{error}");
}

#[test]
fn a_matrix_is_transposed_element_by_element() {
    let matrix = Conversion::Transposed { of: literal(0..12), rows: 2, cols: 3, size: 2 };
    assert_eq!(made(&matrix), [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]);
}

#[test]
fn floats_are_widened_and_mapped() {
    let floats = |from, map, bytes: &[u8]| {
        let bytes = made(&Conversion::Floats { of: literal(bytes.iter().copied()), from, map });
        bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<f32>>()
    };
    let two = half::bf16::from_f32(2.0).to_le_bytes();
    assert_eq!(floats(FloatType::BF16, FloatMap::PlusOne, &two), [3.0]);
    let half = half::f16::from_f32(0.5).to_le_bytes();
    assert_eq!(floats(FloatType::F16, FloatMap::Same, &[half, half].concat()), [0.5, 0.5]);
    assert_eq!(floats(FloatType::F32, FloatMap::NegativeExp, &1f32.to_le_bytes()), [-std::f32::consts::E]);
    assert_eq!(floats(FloatType::F32, FloatMap::Reciprocal, &8f32.to_le_bytes()), [0.125]);
}

/// A matrix of 2 rows and 64 columns whose scales are 1, 2, 3 and 4, in blocks of one row and 32 columns.
fn scaled(ty: GgmlType, codes: Vec<u8>, zeros: Option<Vec<u8>>) -> Scaled {
    let scales = [1f32, 2.0, 3.0, 4.0].iter().flat_map(|scale| scale.to_le_bytes()).collect();
    Scaled {
        tensor: "w".to_owned(),
        ty,
        codes: Conversion::Literal(codes),
        rows: 2,
        cols: 64,
        scales: Conversion::Literal(scales),
        block: [1, 32],
        zeros: zeros.map(Conversion::Literal),
        more: 0,
        turned: None,
    }
}

#[test]
fn scales_of_a_grid_precede_the_codes_of_their_blocks() {
    let codes: Vec<u8> = (0..128).collect();
    let blocks = |scaled: Scaled| made(&Conversion::Scaled(Box::new(scaled)));
    let bytes = blocks(scaled(GgmlType::INT8, codes, Some(vec![1, 2, 3, 4])));
    for (number, block) in bytes.chunks_exact(36).enumerate() {
        assert_eq!(block[..4], (number as f32 + 1.0).to_le_bytes());
        assert_eq!(block[4], (32 * number as u8).wrapping_sub(number as u8 + 1), "{number}");
    }
    // One scale of both rows and all columns.
    let whole = Scaled { block: [2, 64], ..scaled(GgmlType::FP8, vec![0x38; 128], None) };
    for block in blocks(whole).chunks_exact(36) {
        assert_eq!(block[..4], 1f32.to_le_bytes());
    }
    let values = |scaled: Scaled| -> Vec<f32> {
        let bytes = made(&Conversion::Dequantised(Box::new(scaled)));
        bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    let codes: Vec<u8> = (0..128).map(|code| code % 16).collect();
    for (ty, zeros, first) in [
        (GgmlType::INT4, vec![8; 4], [-8.0, -6.0, -4.0]),
        (GgmlType::INT5, vec![3, 3, 3, 3], [-3.0, -1.0, 1.0]),
        (GgmlType::INT8, vec![0, 1, 2, 3], [0.0, 2.0, 4.0]),
    ] {
        // The scales of the blocks are 1, 2, 3 and 4.
        let values = values(scaled(ty, codes.clone(), Some(zeros)));
        for (place, found) in [values[0], values[2], values[4]].into_iter().enumerate() {
            assert_eq!(found, first[place], "{ty:?}");
        }
    }
    for (code, value) in [(0x38, 1.0), (0xc0, -2.0), (0x01, 1.0 / 512.0), (0x7e, 448.0), (0x3c, 1.5)] {
        assert_eq!(values(scaled(GgmlType::FP8, vec![code; 128], None))[32], 2.0 * value);
    }
    // Groups of 20 columns, of which the last has 4.
    let ragged = Scaled {
        cols: 24,
        rows: 1,
        block: [1, 20],
        ..scaled(GgmlType::INT8, (0..24).map(|col| 200 + col).collect(), Some(vec![100, 250]))
    };
    assert!(!ragged.has_blocks());
    let found = values(ragged);
    assert_eq!((found[0], found[19], found[20], found[23]), (100.0, 119.0, -60.0, -54.0));
    let outside = Conversion::Scaled(Box::new(scaled(GgmlType::INT8, vec![255; 128], Some(vec![100; 4]))));
    assert!(outside.whole(&[]).unwrap_err().to_string().contains("zero point 100"));
    // Differences from the zeros, plus 16, the fifth bits first.
    let codes = vec![3; 128];
    let bytes = blocks(scaled(GgmlType::INT5, codes.clone(), Some(vec![0, 3, 4, 15])));
    let expected = [(0xffff_ffffu32, 0x33), (0xffff_ffff, 0), (0, 0xff), (0, 0x44)];
    for (block, (fifths, nibbles)) in bytes.chunks_exact(24).zip(expected) {
        assert_eq!((&block[4..8], block[8]), (&fifths.to_le_bytes()[..], nibbles));
    }
    let symmetric = |zeros| Conversion::Scaled(Box::new(scaled(GgmlType::INT4, codes.clone(), zeros)));
    assert_eq!(made(&symmetric(Some(vec![8; 4])))[4], 0x33);
    let error = symmetric(Some(vec![8, 8, 7, 8])).whole(&[]).unwrap_err().to_string();
    assert!(error.contains("zero point 7"), "{error}");
    let not_a_number = Conversion::Scaled(Box::new(scaled(GgmlType::FP8, vec![0xff; 128], None)));
    assert!(not_a_number.whole(&[]).unwrap_err().to_string().contains("not a number"));
}

#[test]
fn transposed_runs_of_rows_keep_the_scales_of_their_matrix() {
    // Two runs of 32 rows of a matrix of 80 rows and 2 columns, 40 rows from run to run; one scale for 40 rows
    // and a column.
    let scales = [1f32, 2.0, 3.0, 4.0].iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let turned = Scaled {
        codes: Conversion::Literal(vec![0x38; 128]),
        rows: 4,
        cols: 32,
        scales: Conversion::Literal(scales),
        block: [40, 1],
        turned: Some(Turned { stride: 40, cols: 2 }),
        ..scaled(GgmlType::FP8, Vec::new(), None)
    };
    let bytes = made(&Conversion::Scaled(Box::new(turned)));
    let scales = bytes.chunks_exact(36).map(|block| FloatType::F32.value(&block[..4]));
    assert_eq!(scales.collect::<Vec<f32>>(), [1.0, 2.0, 3.0, 4.0]);
}

#[test]
fn packed_codes_are_unpacked_row_by_row() {
    // Code of row r and column c.
    let code = |row: usize, col: usize| ((3 * row + 5 * col) % 16) as u8;
    let (rows, cols) = (16, 24);
    let expected: Vec<u8> = (0..rows * cols).map(|at| code(at / cols, at % cols)).collect();
    let words = |count: usize, word: &dyn Fn(usize, usize) -> u8| -> Vec<u8> {
        (0..count)
            .flat_map(|at| {
                (0..8).fold(0u32, |bits, i| bits | u32::from(word(at, i)) << (4 * i)).to_le_bytes()
            })
            .collect()
    };
    let order = [0, 2, 4, 6, 1, 3, 5, 7];
    let cases: [(Packing, Vec<u8>); 4] = [
        (Packing::Columns { bits: 4 }, words(rows * 3, &|at, i| code(at / 3, at % 3 * 8 + i))),
        (Packing::Rows { bits: 4 }, words(2 * cols, &|at, i| code(at / cols * 8 + i, at % cols))),
        (Packing::Inputs { bits: 4 }, words(3 * rows, &|at, i| code(at % rows, at / rows * 8 + i))),
        (Packing::Outputs, words(cols * 2, &|at, i| code(at % 2 * 8 + order[i], at / 2))),
    ];
    for (packing, of) in cases {
        let of = Box::new(Conversion::Literal(of));
        let unpacked = Conversion::Unpacked { of, packing, rows: rows as u64, cols: cols as u64 };
        assert_eq!(made(&unpacked), expected, "{packing:?}");
    }
    let bytes =
        Conversion::Unpacked { of: literal(0..24), packing: Packing::Columns { bits: 8 }, rows: 2, cols: 12 };
    assert_eq!(made(&bytes), (0..24).collect::<Vec<u8>>());
}

#[test]
fn fp4_codes_are_regrouped_in_halves() {
    // Value v of the 64 has the code v % 16; two are in a byte, the even one in the lower bits.
    let codes = (0..32u8).map(|byte| (2 * byte % 16) | ((2 * byte + 1) % 16) << 4);
    let nvfp4 = Conversion::Nvfp4 { codes: literal(codes.clone()), scales: literal([1, 2, 3, 4]) };
    let half: Vec<u8> = (0..8).map(|low| low | (low + 8) << 4).collect();
    assert_eq!(made(&nvfp4), [&[1, 2, 3, 4][..], &half, &half, &half, &half].concat());
    let mxfp4 = Conversion::Mxfp4 { codes: literal(codes.take(16)), scales: literal([9]) };
    let all: Vec<u8> = (0..16).map(|low| low | low << 4).collect();
    assert_eq!(made(&mxfp4), [&[9][..], &all].concat());
    // 2 and -1.5 times 0.5 and times 448, 6 times the least and the largest.
    let codes = [[0xb4; 8], [0xb4; 8], [0x77; 8], [0x77; 8]].concat();
    let values = |codes: Vec<u8>, scales: Vec<u8>, group: u64| -> Vec<f32> {
        let bytes = made(&Conversion::Fp4Values { codes: literal(codes), scales: literal(scales), group });
        bytes.as_chunks::<2>().0.iter().map(|bytes| f32::from(half::bf16::from_le_bytes(*bytes))).collect()
    };
    let found = values(codes.clone(), vec![0x30, 0x7e, 0x01, 0x7e], 16);
    assert_eq!((found[0], found[1], found[16], found[17]), (1.0, -0.75, 896.0, -672.0));
    assert_eq!((found[32], found[48]), (6.0 / 512.0, 2688.0));
    let found = values(codes, vec![128, 120], 32);
    assert_eq!((found[0], found[1], found[32]), (4.0, -3.0, 6.0 / 128.0));
}
