//! Packed tensors are read back by code that follows the description of the layout, not the packing code.

use super::{TILE_ROWS, TiledShape, UNIT_COLS};
use half::{bf16, f16};
use kernels::Error;
use kernels::quant::{Codes, GgmlType, dequantize};
use proptest::prelude::*;

/// Returns the weights of one row of a packed tensor. Row numbers run through all matrices.
pub(crate) fn unpack_row(shape: &TiledShape, packed: &[u8], row: usize) -> Vec<f32> {
    let (expert, row) = (row / shape.rows(), row % shape.rows());
    let tile =
        &packed[expert * shape.expert_bytes() + row / TILE_ROWS * shape.tile_bytes()..][..shape.tile_bytes()];
    let unit_bytes = shape.layout.unit_bytes(UNIT_COLS);
    let mut weights = Vec::new();
    for (unit, first) in tile.chunks(unit_bytes).zip((0..shape.cols()).step_by(UNIT_COLS)) {
        let cols = UNIT_COLS.min(shape.cols() - first);
        weights.extend(unpack_unit(shape, unit, row % TILE_ROWS, cols));
    }
    weights
}

/// Returns the bytes of one row in a plane, record or side of a unit, which are stored in pieces.
fn of_row(plane: &[u8], lane: usize, piece: usize) -> Vec<u8> {
    plane
        .chunks_exact(TILE_ROWS * piece)
        .flat_map(|pieces| pieces[lane * piece..][..piece].to_vec())
        .collect()
}

fn unpack_unit(shape: &TiledShape, unit: &[u8], lane: usize, cols: usize) -> Vec<f32> {
    let ty = shape.ty();
    // Bytes of a row in record, side and minor plane, and bits per column in the main plane.
    let (record, side, minor, bits) = match ty {
        GgmlType::Q4_0 | GgmlType::IQ4_NL | GgmlType::NVFP4 | GgmlType::Q4_K => (16, 0, 0, 4),
        GgmlType::MXFP4 | GgmlType::IQ4_XS => (8, 0, 0, 4),
        GgmlType::Q4_1 | GgmlType::INT4 => (32, 0, 0, 4),
        GgmlType::Q5_0 | GgmlType::Q5_K => (16, 0, 32, 4),
        GgmlType::Q5_1 | GgmlType::INT5 => (32, 0, 32, 4),
        GgmlType::INT8 | GgmlType::FP8 => (32, 0, 0, 8),
        GgmlType::Q8_0 => (16, 0, 0, 8),
        GgmlType::Q2_K => (16, 4, 0, 2),
        GgmlType::Q3_K => (16, 0, 32, 2),
        GgmlType::Q6_K => (16, 2, 64, 4),
        _ => (0, 0, 0, 8 * ty.block_bytes()),
    };
    let (record_plane, rest) = unit.split_at(TILE_ROWS * record);
    let (side_plane, rest) = rest.split_at(TILE_ROWS * side);
    let (minor_plane, main_plane) = rest.split_at(TILE_ROWS * minor);
    let record = of_row(record_plane, lane, record.clamp(1, 16));
    let side = of_row(side_plane, lane, side.max(1));
    let (minor, main) = (of_row(minor_plane, lane, 16), of_row(main_plane, lane, 16));
    match ty {
        GgmlType::F32 => main.as_chunks::<4>().0[..cols].iter().map(|x| f32::from_le_bytes(*x)).collect(),
        GgmlType::F16 => {
            main.as_chunks::<2>().0[..cols].iter().map(|x| f16::from_le_bytes(*x).to_f32()).collect()
        }
        GgmlType::BF16 => {
            main.as_chunks::<2>().0[..cols].iter().map(|x| bf16::from_le_bytes(*x).to_f32()).collect()
        }
        _ => (0..cols / ty.block_len().min(UNIT_COLS))
            .flat_map(|index| {
                let codes = unpack_block(ty, bits, index, &record, &side, &minor, &main);
                let mut out = vec![0.0; ty.block_len()];
                codes.dequantize(&kernels::quant::Scheme::of(ty).unwrap(), &mut out);
                out
            })
            .collect(),
    }
}

/// Returns file block `index` of a unit.
fn unpack_block(
    ty: GgmlType,
    bits: usize,
    index: usize,
    record: &[u8],
    side: &[u8],
    minor: &[u8],
    main: &[u8],
) -> Codes {
    let mut codes = Codes::default();
    for k in 0..ty.block_len() {
        codes.codes[k] = code(ty, bits, index * ty.block_len() + k, minor, main);
    }
    let u16_of = |bytes: &[u8], at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    match ty {
        GgmlType::Q4_0 | GgmlType::Q5_0 | GgmlType::Q8_0 | GgmlType::IQ4_NL => {
            codes.d = u16_of(record, 2 * index)
        }
        GgmlType::Q4_1 | GgmlType::Q5_1 => {
            (codes.d, codes.dmin) = (u16_of(record, 4 * index), u16_of(record, 4 * index + 2));
        }
        GgmlType::FP8 | GgmlType::INT8 | GgmlType::INT5 | GgmlType::INT4 => {
            codes.scale = f32::from_le_bytes(record[4 * index..][..4].try_into().unwrap());
        }
        GgmlType::MXFP4 => codes.scales[0] = record[index],
        GgmlType::NVFP4 => codes.scales[..4].copy_from_slice(&record[4 * index..][..4]),
        GgmlType::Q6_K => {
            codes.scales.copy_from_slice(record);
            codes.d = u16_of(side, 0);
        }
        // Data stored as in the file is parsed as in the file.
        _ => {
            let mut file = vec![0; ty.block_bytes()];
            match ty {
                GgmlType::Q2_K => {
                    file[..16].copy_from_slice(record);
                    file[80..84].copy_from_slice(side);
                }
                GgmlType::Q3_K => file[96..110].copy_from_slice(&record[..14]),
                GgmlType::IQ4_XS => file[..8].copy_from_slice(record),
                _ => file[..16].copy_from_slice(record),
            }
            let stored = codes.codes;
            kernels::quant::split(ty, &file, &mut codes);
            codes.codes = stored;
        }
    }
    codes
}

/// Returns the stored code of column `k` of a unit.
fn code(ty: GgmlType, bits: usize, k: usize, minor: &[u8], main: &[u8]) -> u8 {
    let (block, group, i) = (k / 32, k % 32 / 4, k % 4);
    let lower = match bits {
        8 if ty == GgmlType::FP8 => main[32 * block + 4 * group + i],
        8 => main[32 * block + 4 * group + i] ^ 0x80,
        4 if matches!(ty, GgmlType::IQ4_NL | GgmlType::IQ4_XS | GgmlType::MXFP4 | GgmlType::NVFP4) => {
            let word = &main[16 * block + 4 * (group % 4)..][..4];
            let index = word[2 * (group / 4) + i / 2] >> (4 * (i % 2)) & 7;
            index | (word[i] >> if group < 4 { 7 } else { 3 } & 1) << 3
        }
        4 => main[16 * block + 4 * (group % 4) + i] >> (4 * (group / 4)) & 15,
        _ => main[8 * block + 4 * (group / 4) + i] >> (2 * (group % 4)) & 3,
    };
    let upper = match ty {
        GgmlType::Q3_K => (minor[4 * block + i] >> group & 1) << 2,
        GgmlType::Q5_0 | GgmlType::Q5_1 | GgmlType::Q5_K | GgmlType::INT5 => {
            (minor[4 * block + i] >> group & 1) << 4
        }
        GgmlType::Q6_K => (minor[8 * block + 4 * (group / 4) + i] >> (2 * (group % 4)) & 3) << 4,
        _ => 0,
    };
    lower | upper
}

pub(crate) fn served() -> impl Iterator<Item = GgmlType> {
    GgmlType::ALL.into_iter().filter(|&ty| kernels::matmul::MatrixView::supports(ty))
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn packed_tensors_read_back_bit_for_bit(
        ty in proptest::sample::select(served().collect::<Vec<_>>()),
        rows in 1_usize..70,
        blocks in 1_usize..11,
        experts in 1_usize..3,
        tiles_at_once in 1_usize..4,
        mut seed: u64,
    ) {
        let cols = match ty.block_len() {
            1 => 67 * blocks,
            256 => 256 * blocks.div_ceil(4),
            len => len * blocks,
        };
        let shape = TiledShape::new(ty, rows, cols, experts).unwrap();
        let file: Vec<u8> = (0..shape.file_bytes())
            .map(|_| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (seed >> 56) as u8
            })
            .collect();
        let tiles = experts * shape.tiles();
        let (mut packed, mut piece) = (vec![0xaa; shape.packed_bytes()], vec![7; 3]);
        for first in (0..tiles).step_by(tiles_at_once) {
            let range = first..tiles.min(first + tiles_at_once);
            shape.pack(range.clone(), &file[shape.file_range(range.clone())], &mut piece).unwrap();
            packed[first * shape.tile_bytes()..][..piece.len()].copy_from_slice(&piece);
        }
        let mut expected = vec![0.0; cols];
        for (row, bytes) in file.chunks_exact(ty.row_bytes(cols).unwrap()).enumerate() {
            dequantize(ty, bytes, &mut expected).unwrap();
            prop_assert_eq!(bits(&unpack_row(&shape, &packed, row)), bits(&expected), "{} row {}", ty, row);
        }
    }
}

#[test]
fn packed_tensors_have_the_size_of_their_files() {
    for ty in served() {
        let shape = TiledShape::new(ty, 64, 768, 2).unwrap();
        let expected = match ty {
            GgmlType::Q3_K => shape.file_bytes() / 110 * 112,
            _ => shape.file_bytes(),
        };
        assert_eq!(shape.packed_bytes(), expected, "{ty}");
        assert_eq!(shape.tile_bytes() % 32, 0);
    }
}

#[test]
fn invalid_shapes_are_refused() {
    let new = |ty, rows, cols, experts| TiledShape::new(ty, rows, cols, experts).map(|_| ());
    assert_eq!(new(GgmlType::IQ2_XS, 4, 256, 1), Err(Error::NoMatmul { ty: "IQ2_XS" }));
    assert!(matches!(new(GgmlType::Q6_K, 4, 128, 1), Err(Error::PartialBlock { .. })));
    assert!(matches!(new(GgmlType::Q4_0, 0, 32, 1), Err(Error::Shape { .. })));
    assert!(matches!(new(GgmlType::Q4_0, 1 << 33, 32, 1), Err(Error::Shape { .. })));
    assert!(matches!(new(GgmlType::F32, 1 << 30, 1 << 30, 1 << 30), Err(Error::Shape { .. })));
    let shape = TiledShape::new(GgmlType::Q4_0, 33, 32, 2).unwrap();
    let mut out = Vec::new();
    assert!(matches!(shape.pack(3..5, &[0; 18], &mut out), Err(Error::OutOfRange { .. })));
    assert!(matches!(shape.pack(3..4, &[0; 17], &mut out), Err(Error::Length { .. })));
    assert_eq!(shape.pack(3..4, &[0; 18], &mut out), Ok(()));
}
