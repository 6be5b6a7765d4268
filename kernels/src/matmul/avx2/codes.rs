//! Unpacks code planes to vectors of the codes of eight rows, one vector for each group of four columns.

use super::super::layout::VECTOR;
use crate::quant::{GgmlType, Levels, Scheme};
use std::arch::x86_64::{
    __m256i, _mm_loadu_si128, _mm256_and_si256, _mm256_broadcastsi128_si256, _mm256_loadu_si256,
    _mm256_or_si256, _mm256_set1_epi8, _mm256_shuffle_epi8, _mm256_slli_epi16, _mm256_srli_epi16,
    _mm256_xor_si256,
};

/// Unpacking of one format of code planes.
pub(super) trait Codes {
    /// Bytes of the planes of one block, of all sixteen rows.
    const BYTES: usize;
    /// Whether `load` returns signed levels instead of unsigned codes.
    const SIGNED: bool;
    /// The largest code, or the largest magnitude of a level.
    const LARGEST: usize;

    /// Codes or levels of the eight groups.
    ///
    /// # Safety
    /// Needs AVX2. 32 bytes must be readable at `planes` and at each multiple of 64 above it that is less
    /// than `BYTES`. `planes` is the block's planes for its first eight rows, and 32 bytes above that for its
    /// last eight rows.
    unsafe fn load(planes: *const u8) -> [__m256i; 8];
}

/// # Safety
/// Needs AVX2; 32 bytes from `planes + 64 * vector` must be readable.
#[inline(always)]
unsafe fn vector(planes: *const u8, vector: usize) -> __m256i {
    // SAFETY: the caller's contract.
    unsafe { _mm256_loadu_si256(planes.add(VECTOR * vector).cast()) }
}

/// Some bits of each byte after words were shifted right, then left. One of the two shifts is 0 and costs
/// nothing. Bits that cross into a neighbouring byte must be outside `MASK`.
///
/// # Safety
/// Needs AVX2.
#[inline(always)]
unsafe fn bits<const RIGHT: i32, const LEFT: i32, const MASK: u8>(v: __m256i) -> __m256i {
    // SAFETY: the caller's contract.
    unsafe {
        let moved = _mm256_slli_epi16::<LEFT>(_mm256_srli_epi16::<RIGHT>(v));
        _mm256_and_si256(moved, _mm256_set1_epi8(MASK.cast_signed()))
    }
}

/// Four bits per code, as stored.
///
/// # Safety
/// As [`Codes::load`] of [`Bits4`].
#[inline(always)]
unsafe fn nibbles(planes: *const u8) -> [__m256i; 8] {
    // SAFETY: the caller's contract.
    unsafe {
        let v = [vector(planes, 0), vector(planes, 1), vector(planes, 2), vector(planes, 3)];
        [
            bits::<0, 0, 15>(v[0]),
            bits::<0, 0, 15>(v[1]),
            bits::<0, 0, 15>(v[2]),
            bits::<0, 0, 15>(v[3]),
            bits::<4, 0, 15>(v[0]),
            bits::<4, 0, 15>(v[1]),
            bits::<4, 0, 15>(v[2]),
            bits::<4, 0, 15>(v[3]),
        ]
    }
}

/// Combines the eight vectors of `low` and `high` by OR.
///
/// # Safety
/// Needs AVX2.
#[inline(always)]
unsafe fn or(low: [__m256i; 8], high: [__m256i; 8]) -> [__m256i; 8] {
    // SAFETY: the caller's contract.
    unsafe {
        [
            _mm256_or_si256(low[0], high[0]),
            _mm256_or_si256(low[1], high[1]),
            _mm256_or_si256(low[2], high[2]),
            _mm256_or_si256(low[3], high[3]),
            _mm256_or_si256(low[4], high[4]),
            _mm256_or_si256(low[5], high[5]),
            _mm256_or_si256(low[6], high[6]),
            _mm256_or_si256(low[7], high[7]),
        ]
    }
}

/// Eight bits per code. Flipping the highest bit turns a code into a level.
pub(super) struct Bits8;

impl Codes for Bits8 {
    const BYTES: usize = 8 * VECTOR;
    const SIGNED: bool = true;
    const LARGEST: usize = 128;

    #[inline(always)]
    unsafe fn load(planes: *const u8) -> [__m256i; 8] {
        // SAFETY: the caller's contract.
        unsafe {
            let turned = _mm256_set1_epi8(i8::MIN);
            [
                _mm256_xor_si256(vector(planes, 0), turned),
                _mm256_xor_si256(vector(planes, 1), turned),
                _mm256_xor_si256(vector(planes, 2), turned),
                _mm256_xor_si256(vector(planes, 3), turned),
                _mm256_xor_si256(vector(planes, 4), turned),
                _mm256_xor_si256(vector(planes, 5), turned),
                _mm256_xor_si256(vector(planes, 6), turned),
                _mm256_xor_si256(vector(planes, 7), turned),
            ]
        }
    }
}

/// Four bits per code.
pub(super) struct Bits4;

impl Codes for Bits4 {
    const BYTES: usize = 4 * VECTOR;
    const SIGNED: bool = false;
    const LARGEST: usize = 15;

    #[inline(always)]
    unsafe fn load(planes: *const u8) -> [__m256i; 8] {
        // SAFETY: the caller's contract.
        unsafe { nibbles(planes) }
    }
}

/// A 4-bit plane and a plane with the fifth bits.
pub(super) struct Bits5;

impl Codes for Bits5 {
    const BYTES: usize = 5 * VECTOR;
    const SIGNED: bool = false;
    const LARGEST: usize = 31;

    #[inline(always)]
    unsafe fn load(planes: *const u8) -> [__m256i; 8] {
        // SAFETY: the caller's contract.
        unsafe {
            let v = vector(planes, 4);
            let high = [
                bits::<0, 4, 16>(v),
                bits::<0, 3, 16>(v),
                bits::<0, 2, 16>(v),
                bits::<0, 1, 16>(v),
                bits::<0, 0, 16>(v),
                bits::<1, 0, 16>(v),
                bits::<2, 0, 16>(v),
                bits::<3, 0, 16>(v),
            ];
            or(nibbles(planes), high)
        }
    }
}

/// A 4-bit plane and a plane with the top two bits.
pub(super) struct Bits6;

impl Codes for Bits6 {
    const BYTES: usize = 6 * VECTOR;
    const SIGNED: bool = false;
    const LARGEST: usize = 63;

    #[inline(always)]
    unsafe fn load(planes: *const u8) -> [__m256i; 8] {
        // SAFETY: the caller's contract.
        unsafe {
            let v = [vector(planes, 4), vector(planes, 5)];
            let high = [
                bits::<0, 4, 0x30>(v[0]),
                bits::<0, 2, 0x30>(v[0]),
                bits::<0, 0, 0x30>(v[0]),
                bits::<2, 0, 0x30>(v[0]),
                bits::<0, 4, 0x30>(v[1]),
                bits::<0, 2, 0x30>(v[1]),
                bits::<0, 0, 0x30>(v[1]),
                bits::<2, 0, 0x30>(v[1]),
            ];
            or(nibbles(planes), high)
        }
    }
}

/// Two bits per code.
pub(super) struct Bits2;

impl Codes for Bits2 {
    const BYTES: usize = 2 * VECTOR;
    const SIGNED: bool = false;
    const LARGEST: usize = 3;

    #[inline(always)]
    unsafe fn load(planes: *const u8) -> [__m256i; 8] {
        // SAFETY: the caller's contract.
        unsafe {
            let v = [vector(planes, 0), vector(planes, 1)];
            [
                bits::<0, 0, 3>(v[0]),
                bits::<2, 0, 3>(v[0]),
                bits::<4, 0, 3>(v[0]),
                bits::<6, 0, 3>(v[0]),
                bits::<0, 0, 3>(v[1]),
                bits::<2, 0, 3>(v[1]),
                bits::<4, 0, 3>(v[1]),
                bits::<6, 0, 3>(v[1]),
            ]
        }
    }
}

/// A 2-bit plane and a plane with the third bits.
pub(super) struct Bits3;

impl Codes for Bits3 {
    const BYTES: usize = 3 * VECTOR;
    const SIGNED: bool = false;
    const LARGEST: usize = 7;

    #[inline(always)]
    unsafe fn load(planes: *const u8) -> [__m256i; 8] {
        // SAFETY: the caller's contract.
        unsafe {
            let v = vector(planes, 2);
            let high = [
                bits::<0, 2, 4>(v),
                bits::<0, 1, 4>(v),
                bits::<0, 0, 4>(v),
                bits::<1, 0, 4>(v),
                bits::<2, 0, 4>(v),
                bits::<3, 0, 4>(v),
                bits::<4, 0, 4>(v),
                bits::<5, 0, 4>(v),
            ];
            or(Bits2::load(planes), high)
        }
    }
}

/// A format's codebook, each entry minus `taken_off`.
const fn codebook(ty: GgmlType, taken_off: u8) -> [u8; 16] {
    let Some(Scheme { levels: Levels::Table(codes), .. }) = Scheme::of(ty) else { panic!("no codebook") };
    let mut table = [0; 16];
    let mut i = 0;
    while i < 16 {
        table[i] = codes[i].wrapping_sub(taken_off);
        i += 1;
    }
    table
}

/// Four bits per code, mapped by a codebook.
///
/// # Safety
/// As [`Codes::load`] of [`Bits4`].
#[inline(always)]
unsafe fn looked_up(planes: *const u8, table: &'static [u8; 16]) -> [__m256i; 8] {
    // SAFETY: the caller's contract; the table is 16 bytes.
    unsafe {
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
        let codes = nibbles(planes);
        [
            _mm256_shuffle_epi8(table, codes[0]),
            _mm256_shuffle_epi8(table, codes[1]),
            _mm256_shuffle_epi8(table, codes[2]),
            _mm256_shuffle_epi8(table, codes[3]),
            _mm256_shuffle_epi8(table, codes[4]),
            _mm256_shuffle_epi8(table, codes[5]),
            _mm256_shuffle_epi8(table, codes[6]),
            _mm256_shuffle_epi8(table, codes[7]),
        ]
    }
}

/// IQ4's codebook, as levels.
pub(super) struct Iq4;

impl Codes for Iq4 {
    const BYTES: usize = Bits4::BYTES;
    const SIGNED: bool = true;
    const LARGEST: usize = 127;

    #[inline(always)]
    unsafe fn load(planes: *const u8) -> [__m256i; 8] {
        // SAFETY: the caller's contract.
        unsafe { looked_up(planes, const { &codebook(GgmlType::IQ4_NL, 128) }) }
    }
}

/// The 4-bit floats.
pub(super) struct E2m1;

impl Codes for E2m1 {
    const BYTES: usize = Bits4::BYTES;
    const SIGNED: bool = false;
    const LARGEST: usize = 28;

    #[inline(always)]
    unsafe fn load(planes: *const u8) -> [__m256i; 8] {
        // SAFETY: the caller's contract.
        unsafe { looked_up(planes, const { &codebook(GgmlType::MXFP4, 0) }) }
    }
}
