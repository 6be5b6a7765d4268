//! Transposes rows of plain floats to columns of 16 in registers, in blocks of 16 rows and 1 KiB.

use super::super::PANEL_ROWS;
use super::super::rows::{PlainRows, TURNED_COLUMNS, interleaved_bytes};
use crate::aligned::CACHE_LINE;
use std::arch::x86_64::{
    __m512i, _MM_HINT_T0, _mm_prefetch, _mm512_loadu_si512, _mm512_maskz_loadu_epi8, _mm512_setzero_si512,
    _mm512_shuffle_i32x4, _mm512_storeu_si512, _mm512_unpackhi_epi16, _mm512_unpackhi_epi32,
    _mm512_unpackhi_epi64, _mm512_unpacklo_epi16, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};

/// One vector of each of 16 rows.
type Rows = [__m512i; PANEL_ROWS];

/// # Safety
/// See [`KernelSet`](super::super::kernel::KernelSet).
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn interleave(rows: &PlainRows<'_>, panel: &mut [u8]) {
    let size = rows.ty.block_bytes();
    let row_bytes = rows.cols * size;
    assert!(panel.len() >= interleaved_bytes(rows.ty, rows.cols));
    let mut starts = [std::ptr::null(); PANEL_ROWS];
    for (start, row) in starts.iter_mut().zip(rows.rows()) {
        *start = row.as_ptr();
    }
    let mut to = panel.as_mut_ptr();
    for at in (0..row_bytes).step_by(CACHE_LINE) {
        let left = row_bytes - at;
        let mut block: Rows = [_mm512_setzero_si512(); PANEL_ROWS];
        for (vector, start) in block.iter_mut().zip(starts).filter(|(_, start)| !start.is_null()) {
            // SAFETY: the row has `left` bytes from `at` on, and at most that number of bytes is read.
            *vector = unsafe {
                let from = start.add(at);
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD).cast());
                match left {
                    CACHE_LINE.. => _mm512_loadu_si512(from.cast()),
                    _ => _mm512_maskz_loadu_epi8((1 << left) - 1, from.cast()),
                }
            };
        }
        let turned = match size {
            2 => turn_pairs(block),
            _ => turn_words(block),
        };
        for vector in turned {
            // SAFETY: the panel has room for blocks of 16 rows and `CACHE_LINE` bytes, up to `left` rounded
            // up to `CACHE_LINE`: a line has at most `TURNED_COLUMNS` columns, and `interleaved_bytes` rounds
            // the number of columns up to that.
            unsafe {
                _mm512_storeu_si512(to.cast(), vector);
                to = to.add(CACHE_LINE);
            }
        }
    }
}

const _: () = assert!(CACHE_LINE <= 2 * TURNED_COLUMNS);

/// Prefetch distance within a row, in bytes.
const AHEAD: usize = 4 * CACHE_LINE;

/// Transposes 32 columns of two bytes; a result vector has two columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn turn_pairs(rows: Rows) -> Rows {
    let zero = _mm512_setzero_si512();
    // Each step doubles the number of adjacent rows; each 128-bit lane has its own eight columns.
    let mut two = [[zero; 2]; 8];
    for (i, two) in two.iter_mut().enumerate() {
        let (a, b) = (rows[2 * i], rows[2 * i + 1]);
        *two = [_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)];
    }
    let mut four = [[zero; 4]; 4];
    for (i, four) in four.iter_mut().enumerate() {
        let ([a, c], [b, d]) = (two[2 * i], two[2 * i + 1]);
        *four = [
            _mm512_unpacklo_epi32(a, b),
            _mm512_unpackhi_epi32(a, b),
            _mm512_unpacklo_epi32(c, d),
            _mm512_unpackhi_epi32(c, d),
        ];
    }
    let mut turned = rows;
    for pair in 0..4 {
        let [a, b, c, d] = [four[0][pair], four[1][pair], four[2][pair], four[3][pair]];
        let even = [_mm512_unpacklo_epi64(a, b), _mm512_unpacklo_epi64(c, d)];
        let odd = [_mm512_unpackhi_epi64(a, b), _mm512_unpackhi_epi64(c, d)];
        let lanes = turn_lanes([even[0], even[1], odd[0], odd[1]]);
        for (lane, vector) in lanes.into_iter().enumerate() {
            turned[4 * lane + pair] = vector;
        }
    }
    turned
}

/// Transposes 16 columns of four bytes; a result vector has one column.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn turn_words(rows: Rows) -> Rows {
    let mut two = [[_mm512_setzero_si512(); 2]; 8];
    for (i, two) in two.iter_mut().enumerate() {
        let (a, b) = (rows[2 * i], rows[2 * i + 1]);
        *two = [_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)];
    }
    let mut turned = rows;
    for half in 0..2 {
        let mut columns = [[_mm512_setzero_si512(); 4]; 2];
        for i in 0..4 {
            let (a, b) = (two[2 * i][half], two[2 * i + 1][half]);
            columns[0][i] = _mm512_unpacklo_epi64(a, b);
            columns[1][i] = _mm512_unpackhi_epi64(a, b);
        }
        for (odd, four) in columns.into_iter().enumerate() {
            for (lane, vector) in turn_lanes(four).into_iter().enumerate() {
                turned[4 * lane + 2 * half + odd] = vector;
            }
        }
    }
    turned
}

/// Vector `i` of the result consists of lane `i` of each of the four vectors, in order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn turn_lanes([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    let [ab_even, ab_odd] = [_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b)];
    let [cd_even, cd_odd] = [_mm512_shuffle_i32x4::<0x88>(c, d), _mm512_shuffle_i32x4::<0xdd>(c, d)];
    [
        _mm512_shuffle_i32x4::<0x88>(ab_even, cd_even),
        _mm512_shuffle_i32x4::<0x88>(ab_odd, cd_odd),
        _mm512_shuffle_i32x4::<0xdd>(ab_even, cd_even),
        _mm512_shuffle_i32x4::<0xdd>(ab_odd, cd_odd),
    ]
}
