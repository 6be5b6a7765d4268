//! Tests of conversions.

use super::{table16, table32, table64};

fn f(value: f32) -> u32 {
    value.to_bits()
}

#[test]
fn integers_are_cut_and_extended() {
    table64("cvt.u64.u32 %y, %a0;", &[&[0xffff_ffff, 0xffff_ffff]]);
    table64("cvt.s64.s32 %y, %a0;", &[&[0xffff_fffe, u64::MAX - 1]]);
    table64("cvt.u64.u16 %y, %h0;", &[&[0xffff, 0xffff]]);
    table64("cvt.s64.s16 %y, %h0;", &[&[0xffff, u64::MAX]]);
    table64("cvt.s64.s8 %y, %x0;", &[&[0x1ff, u64::MAX]]);
    table32("cvt.u32.u64 %d, %x0;", &[&[0x8000_0001, 0x8000_0001]]);
    table32("cvt.u32.u16 %d, %h0;", &[&[0xfffe, 0xfffe]]);
    table32("cvt.s32.s16 %d, %h0;", &[&[0xfffe, 0xffff_fffe]]);
    table32("cvt.s32.s8 %d, %a0;", &[&[0x1280, 0xffff_ff80], &[0x127f, 0x7f]]);
    table32("cvt.u32.u8 %d, %h0;", &[&[0x1280, 0x80]]);
    table32("cvt.u8.u32 %d, %a0;", &[&[0x1280, 0x80]]);
    table16("cvt.u16.u32 %h, %a0;", &[&[0x0123_4567, 0x4567]]);
    table16("cvt.s16.s8 %h, %h0;", &[&[0x0180, 0xff80]]);
    table16("cvt.u16.u8 %h, %h0;", &[&[0x0180, 0x80]]);
    table16("cvt.u16.u64 %h, %x0;", &[&[0x9_8765, 0x8765]]);
}

#[test]
fn floats_become_integers() {
    let minus = |v: u32| v.wrapping_neg();
    table32(
        "cvt.rzi.s32.f32 %d, %a0;",
        &[&[f(-2.7), minus(2)], &[f(1e10), 0x7fff_ffff], &[f(-1e10), 1 << 31], &[f(f32::NAN), 0]],
    );
    table32("cvt.rni.s32.f32 %d, %a0;", &[&[f(2.5), 2], &[f(3.5), 4], &[f(-2.5), minus(2)], &[f(2.6), 3]]);
    table32("cvt.rmi.s32.f32 %d, %a0;", &[&[f(-2.1), minus(3)]]);
    table32("cvt.rpi.s32.f32 %d, %a0;", &[&[f(2.1), 3], &[f(-2.9), minus(2)]]);
    table32("cvt.rzi.u32.f32 %d, %a0;", &[&[f(-2.7), 0], &[f(4e9), 4_000_000_000], &[f(1e20), u32::MAX]]);
    table32("cvt.rzi.ftz.u32.f32 %d, %a0;", &[&[f(9.9), 9]]);
    table64("cvt.rzi.s64.f32 %y, %a0;", &[&[u64::from(f(-3.9)), 3u64.wrapping_neg()]]);
    table64("cvt.rzi.u64.f32 %y, %a0;", &[&[u64::from(f(3.9)), 3]]);
    table16("cvt.rni.s16.f32 %h, %a0;", &[&[f(-40000.0), 0x8000], &[f(-3.0), 0xfffd]]);
    // 8-bit results are clamped too, and extended in their register.
    table32("cvt.rni.s8.f32 %d, %a0;", &[&[f(-300.0), minus(128)], &[f(300.0), 127], &[f(-5.5), minus(6)]]);
    table32("cvt.rni.u8.f32 %d, %a0;", &[&[f(300.0), 255], &[f(-5.0), 0]]);
    table32("cvt.rzi.s32.f64 %d, %x0;", &[&[0, 0]]);
}

#[test]
fn integers_become_floats() {
    table32(
        "cvt.rn.f32.s32 %d, %a0;",
        &[&[7u32.wrapping_neg(), f(-7.0)], &[16_777_217, f(16_777_216.0)], &[16_777_219, f(16_777_220.0)]],
    );
    table32("cvt.rn.f32.u32 %d, %a0;", &[&[u32::MAX, f(4_294_967_296.0)]]);
    table32("cvt.rn.f32.s16 %d, %h0;", &[&[0xffff, f(-1.0)]]);
    table32("cvt.rn.f32.u16 %d, %h0;", &[&[0xffff, f(65535.0)]]);
    table32("cvt.rn.f32.s8 %d, %h0;", &[&[0x12ff, f(-1.0)]]);
    table32("cvt.rn.f32.u8 %d, %a0;", &[&[0x12ff, f(255.0)]]);
    table32("cvt.rn.f32.s64 %d, %x0;", &[&[5, f(5.0)]]);
    table32("cvt.rn.f32.u64 %d, %x0;", &[&[5, f(5.0)]]);
    table64("cvt.rn.f64.s32 %y, %a0;", &[&[0xffff_ffff, (-1.0f64).to_bits()]]);
    table64("cvt.rn.f64.u32 %y, %a0;", &[&[0xffff_ffff, 4_294_967_295f64.to_bits()]]);
    table64("cvt.rn.f64.s64 %y, %x0;", &[&[u64::MAX, (-1.0f64).to_bits()]]);
    table64("cvt.rn.f64.u64 %y, %x0;", &[&[8, 8f64.to_bits()]]);
}

#[test]
fn floats_become_others() {
    table64("cvt.f64.f32 %y, %a0;", &[&[u64::from(f(1.5)), 1.5f64.to_bits()]]);
    table32("cvt.rn.f32.f64 %d, %x0;", &[&[0, 0]]);
    table64("cvt.rn.f32.f64 %a0, %x0; cvt.u64.u32 %y, %a0;", &[&[0.1f64.to_bits(), u64::from(f(0.1))]]);
    table16(
        "cvt.rn.f16.f32 %h, %a0;",
        &[&[f(1.5), 0x3e00], &[f(1e6), 0x7c00], &[f(2048.0 + 1.0), 0x6800], &[f(6e-8), 1]],
    );
    table32(
        "cvt.f32.f16 %d, %h0;",
        &[&[0x3e00, f(1.5)], &[1, f(5.960_464_5e-8)], &[0xfc00, f(f32::NEG_INFINITY)]],
    );
    table16(
        "cvt.rn.bf16.f32 %h, %a0;",
        &[&[0x3f80_8000, 0x3f80], &[0x3f81_8000, 0x3f82], &[0x3f80_8001, 0x3f81], &[0x7fc0_0001, 0x7fff]],
    );
    table32("cvt.f32.bf16 %d, %h0;", &[&[0x3f81, 0x3f81_0000]]);
    // The first source is the upper half.
    table32("cvt.rn.f16x2.f32 %d, %a0, %a1;", &[&[f(1.0), f(2.0), 0x3c00_4000]]);
    table32("cvt.rn.bf16x2.f32 %d, %a0, %a1;", &[&[f(1.0), f(2.0), 0x3f80_4000]]);
    table32("cvt.rni.f32.f32 %d, %a0;", &[&[f(2.5), f(2.0)], &[f(-1.5), f(-2.0)]]);
    table32("cvt.rzi.f32.f32 %d, %a0;", &[&[f(-2.5), f(-2.0)]]);
    table32("cvt.rmi.f32.f32 %d, %a0;", &[&[f(-2.5), f(-3.0)]]);
    table32("cvt.rpi.f32.f32 %d, %a0;", &[&[f(2.1), f(3.0)]]);
    table32("cvt.sat.f32.f32 %d, %a0;", &[&[f(2.5), f(1.0)], &[f(-1.0), 0], &[f(f32::NAN), 0]]);
    table32("cvt.ftz.f32.f32 %d, %a0;", &[&[1, 0]]);
}

/// Every E4M3, every midpoint of two and the floats beside them, by a search for the nearest value.
#[test]
fn floats_become_e4m3() {
    // Positive values by code, up to the largest.
    let values: Vec<f32> = (0..0x7f_u32)
        .map(|code| match (code >> 3, code & 7) {
            (0, mantissa) => mantissa as f32 / 512.0,
            (exponent, mantissa) => (8 + mantissa) as f32 * 2f32.powi(exponent as i32 - 10),
        })
        .collect();
    let mut inputs = vec![(500.0, 0x7e), (f32::INFINITY, 0x7e), (f32::from_bits(1), 0)];
    for code in 0..0x7e_u32 {
        let (low, high) = (values[code as usize], values[code as usize + 1]);
        let middle = (low + high) / 2.0;
        let even = code + (code & 1);
        inputs.extend([
            (low, code),
            (middle, even),
            (middle.next_down(), code),
            (middle.next_up(), code + 1),
        ]);
    }
    for inputs in inputs.chunks(32) {
        let rows: Vec<[u32; 3]> =
            inputs.iter().map(|&(x, code)| [f(-x), f(x), (code | 0x80) << 8 | code]).collect();
        let rows: Vec<&[u32]> = rows.iter().map(|row| row.as_slice()).collect();
        table16("cvt.rn.satfinite.e4m3x2.f32 %h, %a0, %a1;", &rows);
    }
    table16("cvt.rn.satfinite.e4m3x2.f32 %h, %a0, %a1;", &[&[f(f32::NAN), f(1.0), 0x7f38]]);
}
