//! Tests of floats.

use super::{table_f32, table16, table32, table64};

const INF: f32 = f32::INFINITY;
/// The smallest normal float.
const LEAST: f32 = f32::MIN_POSITIVE;
/// A subnormal float.
const TINY: f32 = LEAST / 2.0;
/// The distance from 1 to the next float.
const ULP: f32 = f32::EPSILON;

fn is_nan(body: &str, rows: &[Vec<u64>]) {
    for out in super::results("%d", body, rows) {
        assert!(f32::from_bits(out as u32).is_nan(), "{body}: {out:#x}");
    }
}

fn row(values: &[f32]) -> Vec<u64> {
    values.iter().map(|v| u64::from(v.to_bits())).collect()
}

#[test]
fn sums_and_products() {
    table_f32("add.f32 %d, %a0, %a1;", &[&[1.5, 2.25, 3.75], &[INF, 1.0, INF], &[TINY, TINY, LEAST]]);
    table_f32("add.ftz.f32 %d, %a0, %a1;", &[&[TINY, TINY, 0.0], &[LEAST, -TINY, LEAST], &[1.0, 2.0, 3.0]]);
    table_f32("add.sat.f32 %d, %a0, %a1;", &[&[0.75, 0.75, 1.0], &[-1.0, 0.5, 0.0], &[0.25, 0.5, 0.75]]);
    table_f32("sub.rn.f32 %d, %a0, 0f3F800000;", &[&[3.0, 2.0]]);
    table_f32("mul.f32 %d, %a0, %a1;", &[&[3.0, -2.5, -7.5], &[LEAST, 0.5, TINY]]);
    table_f32("mul.ftz.f32 %d, %a0, %a1;", &[&[LEAST, 0.5, 0.0], &[-LEAST, 0.5, -0.0], &[TINY, 4.0, 0.0]]);
    table_f32("mul.ftz.sat.f32 %d, %a0, %a1;", &[&[3.0, 3.0, 1.0]]);
    is_nan("add.f32 %d, %a0, %a1;", &[row(&[INF, -INF])]);
    // NaN saturates to zero.
    table_f32("add.sat.f32 %d, %a0, %a1;", &[&[INF, -INF, 0.0]]);
}

#[test]
fn roundings() {
    // 1 + ULP/4 lies between 1 and the next float.
    let quarter = ULP / 4.0;
    table_f32(
        "add.rz.f32 %d, %a0, %a1;",
        &[&[1.0, quarter, 1.0], &[-1.0, -quarter, -1.0], &[1.0, -quarter, 1.0 - ULP / 2.0]],
    );
    table_f32("add.rp.f32 %d, %a0, %a1;", &[&[1.0, quarter, 1.0 + ULP], &[-1.0, -quarter, -1.0]]);
    table_f32("add.rm.f32 %d, %a0, %a1;", &[&[1.0, quarter, 1.0], &[-1.0, -quarter, -1.0 - ULP]]);
    // The exact sum does not fit even 64 bits.
    table_f32("add.rp.f32 %d, %a0, %a1;", &[&[1.0, 1e-30, 1.0 + ULP], &[1.0, -1e-30, 1.0]]);
    table_f32("add.rz.f32 %d, %a0, %a1;", &[&[1.0, -1e-30, 1.0 - ULP / 2.0]]);
    // (1 + ULP)^2 = 1 + 2 ULP + ULP^2.
    table_f32("mul.rp.f32 %d, %a0, %a0;", &[&[1.0 + ULP, 1.0 + 3.0 * ULP]]);
    table_f32("mul.rm.f32 %d, %a0, %a0;", &[&[1.0 + ULP, 1.0 + 2.0 * ULP]]);
    table_f32(
        "fma.rm.f32 %d, %a0, %a0, %a1;",
        &[&[1.0 + ULP, -1.0, 2.0 * ULP + ULP * ULP], &[1.0 + ULP, 1.0, 2.0 + 2.0 * ULP]],
    );
    table_f32("fma.rz.f32 %d, %a0, %a1, %a2;", &[&[1.0, 1.0, -1e-30, 1.0 - ULP / 2.0]]);
    table_f32("fma.rp.f32 %d, %a0, %a1, %a2;", &[&[1.0, 1.0, 1e-30, 1.0 + ULP]]);
}

#[test]
fn fused_products_are_rounded_once() {
    table_f32(
        "fma.rn.f32 %d, %a0, %a1, %a2;",
        &[
            &[2.0, 3.0, 4.0, 10.0],
            // The product's last bits are kept.
            &[1.0 + ULP, 1.0 + ULP, -(1.0 + 2.0 * ULP), ULP * ULP],
            // Midway between two floats, and slightly more or less. 64 bits alone would round to the even
            // one.
            &[1.0 + ULP, 1.0 + ULP / 2.0 * 2.0, 1e-30, 1.0 + 2.0 * ULP],
            &[ULP / 2.0, 1.0, 1.0, 1.0],
            &[ULP / 2.0, 1.0 + ULP, 1.0, 1.0 + ULP],
            // Subnormal results.
            &[LEAST, 0.5, TINY, LEAST],
            &[INF, 1.0, 1.0, INF],
        ],
    );
    // A midpoint that only a tiny third operand decides: x * y = 1 + ULP/2 exactly, z tiny.
    let (x, y) = (1.0 + ULP * 4096.0, 1.0 - ULP * 4096.0);
    let product = f64::from(x) * f64::from(y);
    let z = (1.0 - product) as f32;
    for (x, y, z) in [(x, y, z), (1.5, 1.0 + ULP, 1e-38), (1.5, 1.0 + ULP, -1e-38), (-1.5, 1.0 + ULP, 1e-38)]
    {
        table_f32("fma.rn.f32 %d, %a0, %a1, %a2;", &[&[x, y, z, x.mul_add(y, z)]]);
    }
    // 1.5 * (1 + ULP) = 1.5 + 1.5 ULP lies midway: the sign of the addend decides.
    table_f32(
        "fma.rn.f32 %d, %a0, %a1, %a2;",
        &[
            &[1.5, 1.0 + ULP, 1e-38, 1.5 + 2.0 * ULP],
            &[1.5, 1.0 + ULP, -1e-38, 1.5 + ULP],
            &[1.5, 1.0 + ULP, 0.0, 1.5 + 2.0 * ULP],
        ],
    );
    table_f32("fma.rn.ftz.f32 %d, %a0, %a1, %a2;", &[&[LEAST, 0.5, 0.0, 0.0], &[TINY, 8.0, 1.0, 1.0]]);
    table_f32("fma.rn.sat.f32 %d, %a0, %a1, %a2;", &[&[2.0, 3.0, 4.0, 1.0]]);
    table_f32("mad.rn.f32 %d, %a0, %a1, %a2;", &[&[2.0, 3.0, 4.0, 10.0]]);
}

#[test]
fn fused_products_of_many_values_equal_the_hosts() {
    // Pseudo-random bits that cover all exponents, compared with the host's `fma`.
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        f32::from_bits((state >> 32) as u32)
    };
    for _ in 0..40 {
        let rows: Vec<[f32; 3]> = (0..32).map(|_| [next(), next(), next()]).collect();
        let out = super::results(
            "%d",
            "fma.rn.f32 %d, %a0, %a1, %a2;",
            &rows.iter().map(|r| row(r)).collect::<Vec<_>>(),
        );
        for ([a, b, c], out) in rows.into_iter().zip(out) {
            let (out, expected) = (f32::from_bits(out as u32), a.mul_add(b, c));
            assert!(
                out.to_bits() == expected.to_bits() || out.is_nan() && expected.is_nan(),
                "{a} {b} {c}: {out}"
            );
        }
    }
}

#[test]
fn extremes() {
    let nan = f32::NAN;
    table_f32(
        "min.f32 %d, %a0, %a1;",
        &[&[1.0, 2.0, 1.0], &[nan, 2.0, 2.0], &[2.0, nan, 2.0], &[0.0, -0.0, -0.0], &[-0.0, 0.0, -0.0]],
    );
    table_f32(
        "max.f32 %d, %a0, %a1;",
        &[&[1.0, 2.0, 2.0], &[nan, 2.0, 2.0], &[0.0, -0.0, 0.0], &[-0.0, 0.0, 0.0]],
    );
    table_f32("max.ftz.f32 %d, %a0, %a1;", &[&[TINY, -1.0, 0.0]]);
    is_nan("min.NaN.f32 %d, %a0, %a1;", &[row(&[nan, 1.0]), row(&[1.0, nan])]);
    table_f32("max.NaN.f32 %d, %a0, %a1;", &[&[1.0, 2.0, 2.0]]);
    table_f32("abs.f32 %d, %a0;", &[&[-2.0, 2.0], &[-TINY, TINY]]);
    table_f32("abs.ftz.f32 %d, %a0;", &[&[-TINY, 0.0]]);
    table_f32("neg.f32 %d, %a0;", &[&[2.0, -2.0], &[0.0, -0.0]]);
    table_f32("neg.ftz.f32 %d, %a0;", &[&[TINY, -0.0]]);
    table_f32("copysign.f32 %d, %a0, %a1;", &[&[-1.0, 3.0, -3.0], &[1.0, -3.0, 3.0]]);
}

#[test]
fn quotients_and_roots() {
    table_f32("div.rn.f32 %d, %a0, %a1;", &[&[1.0, 3.0, 0.333_333_34], &[1.0, 0.0, INF]]);
    table_f32("div.full.f32 %d, %a0, %a1;", &[&[6.0, 3.0, 2.0]]);
    table_f32("div.approx.ftz.f32 %d, %a0, %a1;", &[&[6.0, 3.0, 2.0], &[TINY, 1.0, 0.0]]);
    table_f32("rcp.rn.f32 %d, %a0;", &[&[4.0, 0.25], &[3.0, 0.333_333_34]]);
    table_f32("rcp.approx.ftz.f32 %d, %a0;", &[&[4.0, 0.25], &[TINY, INF]]);
    table_f32("sqrt.rn.f32 %d, %a0;", &[&[2.0, std::f32::consts::SQRT_2], &[9.0, 3.0]]);
    table_f32("sqrt.approx.f32 %d, %a0;", &[&[16.0, 4.0]]);
    table_f32("rsqrt.approx.f32 %d, %a0;", &[&[4.0, 0.5], &[0.0, INF]]);
    is_nan("sqrt.rn.f32 %d, %a0;", &[row(&[-1.0])]);
}

#[test]
fn approximate_functions() {
    table_f32(
        "ex2.approx.f32 %d, %a0;",
        &[&[3.0, 8.0], &[-1.0, 0.5], &[0.5, std::f32::consts::SQRT_2], &[-200.0, 0.0]],
    );
    table_f32("ex2.approx.ftz.f32 %d, %a0;", &[&[-127.0, 0.0], &[10.0, 1024.0]]);
    table_f32("ex2.approx.f32 %d, %a0;", &[&[-127.0, TINY]]);
    table_f32("lg2.approx.f32 %d, %a0;", &[&[8.0, 3.0], &[0.0, -INF], &[TINY, -127.0]]);
    table_f32("lg2.approx.ftz.f32 %d, %a0;", &[&[TINY, -INF]]);
    table_f32("sin.approx.f32 %d, %a0;", &[&[0.0, 0.0], &[1.0, 0.841_470_96]]);
    table_f32("cos.approx.ftz.f32 %d, %a0;", &[&[0.0, 1.0], &[1.0, 0.540_302_3]]);
    table_f32("tanh.approx.f32 %d, %a0;", &[&[0.0, 0.0], &[30.0, 1.0], &[0.5, 0.462_117_16]]);
}

#[test]
fn doubles() {
    let bits = f64::to_bits;
    table64("add.f64 %y, %x0, %x1;", &[&[bits(1.5), bits(2.25), bits(3.75)]]);
    table64("sub.f64 %y, %x0, 0d3FF0000000000000;", &[&[bits(1.5), bits(0.5)]]);
    table64("mul.f64 %y, %x0, %x1;", &[&[bits(1.5), bits(2.0), bits(3.0)]]);
    table64("div.rn.f64 %y, %x0, %x1;", &[&[bits(1.0), bits(3.0), bits(1.0 / 3.0)]]);
    table64("fma.rn.f64 %y, %x0, %x1, %x2;", &[&[bits(2.0), bits(3.0), bits(4.0), bits(10.0)]]);
    table64("min.f64 %y, %x0, %x1;", &[&[bits(2.0), bits(3.0), bits(2.0)]]);
    table64("max.f64 %y, %x0, %x1;", &[&[bits(2.0), bits(3.0), bits(3.0)]]);
    table64("abs.f64 %y, %x0;", &[&[bits(-2.0), bits(2.0)]]);
    table64("neg.f64 %y, %x0;", &[&[bits(-2.0), bits(2.0)]]);
    table64("sqrt.rn.f64 %y, %x0;", &[&[bits(9.0), bits(3.0)]]);
    table64("rcp.rn.f64 %y, %x0;", &[&[bits(4.0), bits(0.25)]]);
}

#[test]
fn pairs_of_floats() {
    let pair = |a: f32, b: f32| u64::from(b.to_bits()) << 32 | u64::from(a.to_bits());
    table64("add.rn.f32x2 %y, %x0, %x1;", &[&[pair(1.0, 2.0), pair(0.5, -2.0), pair(1.5, 0.0)]]);
    table64("mul.rn.f32x2 %y, %x0, %x1;", &[&[pair(1.5, 2.0), pair(2.0, -2.0), pair(3.0, -4.0)]]);
    table64(
        "fma.rn.f32x2 %y, %x0, %x1, %x2;",
        &[&[pair(1.5, 2.0), pair(2.0, -2.0), pair(1.0, 1.0), pair(4.0, -3.0)]],
    );
}

#[test]
fn halves() {
    // f16: 1 is 0x3c00, 2 is 0x4000, 3 is 0x4200, 1.5 is 0x3e00; bf16: 1 is 0x3f80, 2 is 0x4000, 3 is 0x4040.
    table16("add.f16 %h, %h0, %h1;", &[&[0x3c00, 0x4000, 0x4200], &[0x7bff, 0x7bff, 0x7c00]]);
    table16("sub.f16 %h, %h0, %h1;", &[&[0x4200, 0x4000, 0x3c00]]);
    table16("mul.f16 %h, %h0, %h1;", &[&[0x3e00, 0x4000, 0x4200], &[0x0001, 0x3800, 0x0000]]);
    table16("fma.rn.f16 %h, %h0, %h1, %h2;", &[&[0x3c00, 0x4000, 0x3c00, 0x4200]]);
    table16("neg.f16 %h, %h0;", &[&[0x3c00, 0xbc00]]);
    table16("abs.bf16 %h, %h0;", &[&[0xbf80, 0x3f80]]);
    table16("min.f16 %h, %h0, %h1;", &[&[0x3c00, 0x7e00, 0x3c00], &[0x8000, 0x0000, 0x8000]]);
    table16("max.bf16 %h, %h0, %h1;", &[&[0x3f80, 0x4000, 0x4000]]);
    table16("max.NaN.bf16 %h, %h0, %h1;", &[&[0x3f80, 0x7fc0, 0x7fff]]);
    // bf16 has 8 bits: 1 + 2^-8 lies midway and rounds to the even 1; slightly more rounds up.
    table16(
        "fma.rn.bf16 %h, %h0, %h1, %h2;",
        &[
            &[0x3f80, 0x3f80, 0x3b80, 0x3f80],
            &[0x3f80, 0x3f80, 0x3b81, 0x3f81],
            &[0x4000, 0x4000, 0x3f80, 0x40a0],
        ],
    );
    table32("add.f16x2 %d, %a0, %a1;", &[&[0x4000_3c00, 0x3c00_4000, 0x4200_4200]]);
    table32("sub.bf16x2 %d, %a0, %a1;", &[&[0x4040_4000, 0x3f80_3f80, 0x4000_3f80]]);
    table32("mul.bf16x2 %d, %a0, %a1;", &[&[0x4000_3f80, 0x4000_4040, 0x4080_4040]]);
    table32("fma.rn.f16x2 %d, %a0, %a1, %a2;", &[&[0x4000_3c00, 0x3c00_4000, 0x3c00_3c00, 0x4200_4200]]);
    table32("fma.rn.relu.f16x2 %d, %a0, %a1, %a2;", &[&[0xc000_3c00, 0x3c00_4000, 0x3c00_3c00, 0x0000_4200]]);
    table32("neg.bf16x2 %d, %a0;", &[&[0x4000_bf80, 0xc000_3f80]]);
    table32("max.f16x2 %d, %a0, %a1;", &[&[0x4000_3c00, 0x3c00_4000, 0x4000_4000]]);
    table16("ex2.approx.f16 %h, %h0;", &[&[0x4000, 0x4400]]);
    table32("tanh.approx.f16x2 %d, %a0;", &[&[0x0000_7c00, 0x0000_3c00]]);
}
