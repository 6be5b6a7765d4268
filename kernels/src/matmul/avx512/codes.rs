//! Unpacks code planes to vectors of unsigned codes, one vector for each group of four columns.

use crate::quant::{GgmlType, Levels, Scheme};
use std::arch::x86_64::{
    __m512i, _mm_loadu_si128, _mm512_and_si512, _mm512_broadcast_i32x4, _mm512_loadu_si512,
    _mm512_permutexvar_epi8, _mm512_set1_epi8, _mm512_slli_epi16, _mm512_srai_epi32, _mm512_srli_epi16,
    _mm512_ternarylogic_epi32,
};

/// Unpacking of one format of code planes.
pub(super) trait Codes {
    /// Bytes of the planes of one block.
    const BYTES: usize;

    /// Unsigned codes of the eight groups.
    ///
    /// # Safety
    /// Needs AVX-512 F, BW and VBMI; `planes` must be valid for reads of `BYTES` bytes.
    unsafe fn load(planes: *const u8) -> [__m512i; 8];

    /// Whether [`Codes::load_raised`] returns the last four groups as multiples that [`Codes::settle`]
    /// divides by. It saves instructions per block and adds two per token, which pays off for one token.
    const RAISED: bool = false;

    /// Like [`Codes::load`]; see [`Codes::RAISED`].
    ///
    /// # Safety
    /// As [`Codes::load`].
    #[inline(always)]
    unsafe fn load_raised(planes: *const u8) -> [__m512i; 8] {
        // SAFETY: the caller's contract.
        unsafe { Self::load(planes) }
    }

    /// Turns sums of products with raised codes into sums of products with the codes; exact.
    ///
    /// # Safety
    /// Needs AVX-512 F.
    #[inline(always)]
    unsafe fn settle(sums: __m512i) -> __m512i {
        sums
    }
}

/// # Safety
/// Needs AVX-512 F; 64 bytes from `planes + 64 * vector` must be readable.
#[inline(always)]
unsafe fn vector(planes: *const u8, vector: usize) -> __m512i {
    // SAFETY: the caller's contract.
    unsafe { _mm512_loadu_si512(planes.add(64 * vector).cast()) }
}

/// Words shifted right, then left. One of the two shifts is 0 and costs nothing. The caller must mask bits
/// that cross into a neighbouring byte.
///
/// # Safety
/// Needs AVX-512 F and BW.
#[inline(always)]
unsafe fn shift<const RIGHT: u32, const LEFT: u32>(v: __m512i) -> __m512i {
    // SAFETY: the caller's contract.
    unsafe { _mm512_slli_epi16::<LEFT>(_mm512_srli_epi16::<RIGHT>(v)) }
}

/// `low | (high & mask)`.
///
/// # Safety
/// Needs AVX-512 F.
#[inline(always)]
unsafe fn or_masked(low: __m512i, high: __m512i, mask: __m512i) -> __m512i {
    // SAFETY: the caller's contract. 0xf8 is the truth table of a | (b & c).
    unsafe { _mm512_ternarylogic_epi32::<0xf8>(low, high, mask) }
}

/// The low four bits of each byte of `low`, the high ones of `high`.
///
/// # Safety
/// Needs AVX-512 F and BW.
#[inline(always)]
unsafe fn nibbles(low: __m512i, high: __m512i) -> __m512i {
    // SAFETY: the caller's contract. 0xca is the truth table of a ? b : c.
    unsafe { _mm512_ternarylogic_epi32::<0xca>(_mm512_set1_epi8(15), low, high) }
}

/// Some bits of each byte.
///
/// # Safety
/// Needs AVX-512 F and BW.
#[inline(always)]
unsafe fn bits<const MASK: u8>(v: __m512i) -> __m512i {
    // SAFETY: the caller's contract.
    unsafe { _mm512_and_si512(v, _mm512_set1_epi8(MASK as i8)) }
}

/// Eight bits per code.
pub(super) struct Bits8;

impl Codes for Bits8 {
    const BYTES: usize = 512;

    #[inline(always)]
    unsafe fn load(planes: *const u8) -> [__m512i; 8] {
        // SAFETY: the caller's contract.
        unsafe {
            [
                vector(planes, 0),
                vector(planes, 1),
                vector(planes, 2),
                vector(planes, 3),
                vector(planes, 4),
                vector(planes, 5),
                vector(planes, 6),
                vector(planes, 7),
            ]
        }
    }
}

/// Four bits per code.
pub(super) struct Bits4;

impl Codes for Bits4 {
    const BYTES: usize = 256;

    #[inline(always)]
    unsafe fn load(planes: *const u8) -> [__m512i; 8] {
        // SAFETY: the caller's contract.
        unsafe {
            let mask = _mm512_set1_epi8(15);
            let v = [vector(planes, 0), vector(planes, 1), vector(planes, 2), vector(planes, 3)];
            [
                _mm512_and_si512(v[0], mask),
                _mm512_and_si512(v[1], mask),
                _mm512_and_si512(v[2], mask),
                _mm512_and_si512(v[3], mask),
                _mm512_and_si512(shift::<4, 0>(v[0]), mask),
                _mm512_and_si512(shift::<4, 0>(v[1]), mask),
                _mm512_and_si512(shift::<4, 0>(v[2]), mask),
                _mm512_and_si512(shift::<4, 0>(v[3]), mask),
            ]
        }
    }

    /// High nibbles are not shifted: they are sixteen times their codes, which fits a byte.
    const RAISED: bool = true;

    #[inline(always)]
    unsafe fn load_raised(planes: *const u8) -> [__m512i; 8] {
        // SAFETY: the caller's contract.
        unsafe {
            let v = [vector(planes, 0), vector(planes, 1), vector(planes, 2), vector(planes, 3)];
            [
                bits::<0x0f>(v[0]),
                bits::<0x0f>(v[1]),
                bits::<0x0f>(v[2]),
                bits::<0x0f>(v[3]),
                bits::<0xf0>(v[0]),
                bits::<0xf0>(v[1]),
                bits::<0xf0>(v[2]),
                bits::<0xf0>(v[3]),
            ]
        }
    }

    #[inline(always)]
    unsafe fn settle(sums: __m512i) -> __m512i {
        // SAFETY: the caller's contract. The sum of 16 products of at most 240 and 128 fits easily.
        unsafe { _mm512_srai_epi32::<4>(sums) }
    }
}

/// A 4-bit plane and a plane with the fifth bits. The fifth bits are extracted two at a time, four bits
/// apart. No shift then brings another bit above the wanted one, and the nibble replaces the bits below it.
pub(super) struct Bits5;

impl Codes for Bits5 {
    const BYTES: usize = 320;

    #[inline(always)]
    unsafe fn load(planes: *const u8) -> [__m512i; 8] {
        // SAFETY: the caller's contract.
        unsafe {
            let v = [vector(planes, 0), vector(planes, 1), vector(planes, 2), vector(planes, 3)];
            let plane = vector(planes, 4);
            let high = [bits::<0x11>(plane), bits::<0x22>(plane), bits::<0x44>(plane), bits::<0x88>(plane)];
            [
                nibbles(v[0], shift::<0, 4>(high[0])),
                nibbles(v[1], shift::<0, 3>(high[1])),
                nibbles(v[2], shift::<0, 2>(high[2])),
                nibbles(v[3], shift::<0, 1>(high[3])),
                nibbles(shift::<4, 0>(v[0]), high[0]),
                nibbles(shift::<4, 0>(v[1]), shift::<1, 0>(high[1])),
                nibbles(shift::<4, 0>(v[2]), shift::<2, 0>(high[2])),
                nibbles(shift::<4, 0>(v[3]), shift::<3, 0>(high[3])),
            ]
        }
    }
}

/// A 4-bit plane and a plane with the top two bits, extracted as in [`Bits5`].
pub(super) struct Bits6;

impl Codes for Bits6 {
    const BYTES: usize = 384;

    #[inline(always)]
    unsafe fn load(planes: *const u8) -> [__m512i; 8] {
        // SAFETY: the caller's contract.
        unsafe {
            let v = [vector(planes, 0), vector(planes, 1), vector(planes, 2), vector(planes, 3)];
            let (first, second) = (vector(planes, 4), vector(planes, 5));
            let even = [bits::<0x33>(first), bits::<0x33>(second)];
            let odd = [bits::<0xcc>(first), bits::<0xcc>(second)];
            [
                nibbles(v[0], shift::<0, 4>(even[0])),
                nibbles(v[1], shift::<0, 2>(odd[0])),
                nibbles(v[2], even[0]),
                nibbles(v[3], shift::<2, 0>(odd[0])),
                nibbles(shift::<4, 0>(v[0]), shift::<0, 4>(even[1])),
                nibbles(shift::<4, 0>(v[1]), shift::<0, 2>(odd[1])),
                nibbles(shift::<4, 0>(v[2]), even[1]),
                nibbles(shift::<4, 0>(v[3]), shift::<2, 0>(odd[1])),
            ]
        }
    }
}

/// Two bits per code.
pub(super) struct Bits2;

impl Codes for Bits2 {
    const BYTES: usize = 128;

    #[inline(always)]
    unsafe fn load(planes: *const u8) -> [__m512i; 8] {
        // SAFETY: the caller's contract.
        unsafe {
            let (first, second) = (vector(planes, 0), vector(planes, 1));
            let mask = _mm512_set1_epi8(3);
            [
                _mm512_and_si512(first, mask),
                _mm512_and_si512(shift::<2, 0>(first), mask),
                _mm512_and_si512(shift::<4, 0>(first), mask),
                _mm512_and_si512(shift::<6, 0>(first), mask),
                _mm512_and_si512(second, mask),
                _mm512_and_si512(shift::<2, 0>(second), mask),
                _mm512_and_si512(shift::<4, 0>(second), mask),
                _mm512_and_si512(shift::<6, 0>(second), mask),
            ]
        }
    }
}

/// A 2-bit plane and a plane with the third bits.
pub(super) struct Bits3;

impl Codes for Bits3 {
    const BYTES: usize = 192;

    #[inline(always)]
    unsafe fn load(planes: *const u8) -> [__m512i; 8] {
        // SAFETY: the caller's contract.
        unsafe {
            let low = Bits2::load(planes);
            let high = vector(planes, 2);
            let mask = _mm512_set1_epi8(4);
            [
                or_masked(low[0], shift::<0, 2>(high), mask),
                or_masked(low[1], shift::<0, 1>(high), mask),
                or_masked(low[2], high, mask),
                or_masked(low[3], shift::<1, 0>(high), mask),
                or_masked(low[4], shift::<2, 0>(high), mask),
                or_masked(low[5], shift::<3, 0>(high), mask),
                or_masked(low[6], shift::<4, 0>(high), mask),
                or_masked(low[7], shift::<5, 0>(high), mask),
            ]
        }
    }
}

const fn codebook(ty: GgmlType) -> &'static [u8; 16] {
    match Scheme::of(ty) {
        Some(Scheme { levels: Levels::Table(codes), .. }) => codes,
        _ => panic!("no codebook"),
    }
}

/// Four bits per code, mapped by a codebook. The vector has four copies of the table, so that the bits next
/// to a code's four bits do not matter and need no mask.
///
/// # Safety
/// Needs AVX-512 F, BW and VBMI; 256 bytes from `planes` must be readable.
#[inline(always)]
unsafe fn looked_up(planes: *const u8, table: &'static [u8; 16]) -> [__m512i; 8] {
    // SAFETY: the caller's contract; the table is 16 bytes.
    unsafe {
        let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
        let v = [vector(planes, 0), vector(planes, 1), vector(planes, 2), vector(planes, 3)];
        [
            _mm512_permutexvar_epi8(v[0], table),
            _mm512_permutexvar_epi8(v[1], table),
            _mm512_permutexvar_epi8(v[2], table),
            _mm512_permutexvar_epi8(v[3], table),
            _mm512_permutexvar_epi8(shift::<4, 0>(v[0]), table),
            _mm512_permutexvar_epi8(shift::<4, 0>(v[1]), table),
            _mm512_permutexvar_epi8(shift::<4, 0>(v[2]), table),
            _mm512_permutexvar_epi8(shift::<4, 0>(v[3]), table),
        ]
    }
}

/// IQ4's codebook.
pub(super) struct Iq4;

impl Codes for Iq4 {
    const BYTES: usize = Bits4::BYTES;

    #[inline(always)]
    unsafe fn load(planes: *const u8) -> [__m512i; 8] {
        // SAFETY: the caller's contract.
        unsafe { looked_up(planes, const { codebook(GgmlType::IQ4_NL) }) }
    }
}

/// The 4-bit floats.
pub(super) struct E2m1;

impl Codes for E2m1 {
    const BYTES: usize = Bits4::BYTES;

    #[inline(always)]
    unsafe fn load(planes: *const u8) -> [__m512i; 8] {
        // SAFETY: the caller's contract.
        unsafe { looked_up(planes, const { codebook(GgmlType::MXFP4) }) }
    }
}
