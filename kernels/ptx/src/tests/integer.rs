//! Tests of integers.

use super::{refused, table16, table32, table64};

const MIN: u32 = 0x8000_0000;
const MINUS: fn(u32) -> u32 = |v| v.wrapping_neg();

#[test]
fn sums_and_differences() {
    table32("add.s32 %d, %a0, %a1;", &[&[3, 4, 7], &[u32::MAX, 1, 0], &[0x7fff_ffff, 1, MIN]]);
    table32("add.u32 %d, %a0, 5;", &[&[3, 8], &[u32::MAX, 4]]);
    table32("add.s32 %d, %a0, -5;", &[&[3, MINUS(2)]]);
    table32(
        "add.sat.s32 %d, %a0, %a1;",
        &[&[0x7fff_ffff, 1, 0x7fff_ffff], &[MIN, MINUS(1), MIN], &[1, 2, 3]],
    );
    table32("sub.s32 %d, %a0, %a1;", &[&[3, 4, u32::MAX], &[0, MIN, MIN]]);
    table32("sub.sat.s32 %d, %a0, %a1;", &[&[MIN, 1, MIN], &[0x7fff_ffff, MINUS(1), 0x7fff_ffff]]);
    table16("add.s16 %h, %h0, %h1;", &[&[0xffff, 2, 1], &[0x1234, 0x1111, 0x2345]]);
    table16("sub.u16 %h, %h0, %h1;", &[&[1, 2, 0xffff]]);
    table64("add.s64 %y, %x0, %x1;", &[&[u64::MAX, 1, 0], &[0xffff_ffff, 1, 0x1_0000_0000]]);
    table64("sub.u64 %y, %x0, %x1;", &[&[0, 1, u64::MAX]]);
}

#[test]
fn products() {
    table32("mul.lo.s32 %d, %a0, %a1;", &[&[7, MINUS(3), MINUS(21)], &[0x1_0001, 0x1_0001, 0x2_0001]]);
    table32("mul.hi.u32 %d, %a0, %a1;", &[&[u32::MAX, u32::MAX, 0xffff_fffe], &[MIN, 4, 2]]);
    table32("mul.hi.s32 %d, %a0, %a1;", &[&[u32::MAX, u32::MAX, 0], &[MIN, 4, MINUS(2)]]);
    table64("mul.wide.u32 %y, %a0, %a1;", &[&[0xffff_ffff, 0xffff_ffff, 0xffff_fffe_0000_0001]]);
    table64("mul.wide.s32 %y, %a0, %a1;", &[&[0xffff_ffff, 3, 3u64.wrapping_neg()]]);
    table16("mul.lo.u16 %h, %h0, %h1;", &[&[0x1000, 0x11, 0x1000]]);
    table16("mul.hi.u16 %h, %h0, %h1;", &[&[0x8000, 6, 3]]);
    table16("mul.hi.s16 %h, %h0, %h1;", &[&[0x8000, 6, 0xfffd]]);
    table32("mul.wide.u16 %d, %h0, %h1;", &[&[0xffff, 0xffff, 0xfffe_0001]]);
    table32("mul.wide.s16 %d, %h0, %h1;", &[&[0xffff, 7, MINUS(7)]]);
    table64("mul.lo.s64 %y, %x0, %x1;", &[&[1 << 40, 1 << 30, 0], &[3, 5, 15]]);
    table64("mul.hi.u64 %y, %x0, %x1;", &[&[1 << 40, 1 << 30, 1 << 6], &[u64::MAX, u64::MAX, u64::MAX - 1]]);
    table64("mul.hi.s64 %y, %x0, %x1;", &[&[u64::MAX, u64::MAX, 0], &[u64::MAX, 1, u64::MAX]]);
    table32("mul24.lo.s32 %d, %a0, %a1;", &[&[0xff_ffff, 5, MINUS(5)], &[0x100_0002, 3, 6]]);
    table32("mul24.lo.u32 %d, %a0, %a1;", &[&[0xff_ffff, 2, 0x1ff_fffe]]);
}

#[test]
fn products_with_sums() {
    table32("mad.lo.s32 %d, %a0, %a1, %a2;", &[&[7, 3, 1, 22], &[MIN, 2, 9, 9]]);
    table32("mad.hi.u32 %d, %a0, %a1, %a2;", &[&[MIN, 4, 10, 12]]);
    table32("mad.hi.s32 %d, %a0, %a1, %a2;", &[&[MIN, 4, 10, 8]]);
    table16("mad.lo.u16 %h, %h0, %h1, %h2;", &[&[0x100, 0x101, 5, 0x105]]);
    table32("mad.wide.u16 %d, %h0, %h1, %a2;", &[&[0xffff, 2, 3, 0x2_0001]]);
    table32("mad.wide.s16 %d, %h0, %h1, %a2;", &[&[0xffff, 2, 3, 1]]);
    table64("mad.wide.u32 %y, %a0, %a1, %x2;", &[&[0xffff_ffff, 2, 1 << 40, (1 << 40) + 0x1_ffff_fffe]]);
    table64("mad.wide.s32 %y, %a0, %a1, %x2;", &[&[0xffff_ffff, 2, 1, u64::MAX]]);
    table64("mad.lo.s64 %y, %x0, %x1, %x2;", &[&[1 << 33, 4, 5, (1 << 35) + 5]]);
    table32("mad24.lo.u32 %d, %a0, %a1, %a2;", &[&[0x100_0002, 3, 4, 10]]);
    table32("mad24.lo.s32 %d, %a0, %a1, %a2;", &[&[0xff_ffff, 3, 4, 1]]);
    table32("sad.u32 %d, %a0, %a1, %a2;", &[&[3, 10, 100, 107], &[u32::MAX, 0, 1, 0]]);
    table32("sad.s32 %d, %a0, %a1, %a2;", &[&[MINUS(3), 10, 100, 113]]);
}

#[test]
fn quotients() {
    table32("div.u32 %d, %a0, %a1;", &[&[17, 5, 3], &[u32::MAX, 2, 0x7fff_ffff], &[1, 0, u32::MAX]]);
    table32(
        "div.s32 %d, %a0, %a1;",
        &[&[MINUS(17), 5, MINUS(3)], &[17, MINUS(5), MINUS(3)], &[MIN, u32::MAX, MIN]],
    );
    table32("rem.u32 %d, %a0, %a1;", &[&[17, 5, 2], &[17, 0, 17]]);
    table32("rem.s32 %d, %a0, %a1;", &[&[MINUS(17), 5, MINUS(2)], &[17, MINUS(5), 2], &[MIN, u32::MAX, 0]]);
    table16("div.u16 %h, %h0, %h1;", &[&[0xffff, 16, 0xfff]]);
    table16("div.s16 %h, %h0, %h1;", &[&[0xfff9, 2, 0xfffd]]);
    table16("rem.u16 %h, %h0, %h1;", &[&[0xffff, 16, 15]]);
    table16("rem.s16 %h, %h0, %h1;", &[&[0xfff9, 2, 0xffff]]);
    table64("div.u64 %y, %x0, %x1;", &[&[1 << 40, 3, 366_503_875_925]]);
    table64("div.s64 %y, %x0, %x1;", &[&[7u64.wrapping_neg(), 2, 3u64.wrapping_neg()]]);
    table64("rem.u64 %y, %x0, %x1;", &[&[1 << 40, 3, 1]]);
    table64("rem.s64 %y, %x0, %x1;", &[&[7u64.wrapping_neg(), 2, u64::MAX]]);
}

#[test]
fn signs_and_extremes() {
    table32("neg.s32 %d, %a0;", &[&[5, MINUS(5)], &[MIN, MIN]]);
    table32("abs.s32 %d, %a0;", &[&[MINUS(5), 5], &[5, 5]]);
    table16("neg.s16 %h, %h0;", &[&[1, 0xffff]]);
    table16("abs.s16 %h, %h0;", &[&[0xfffe, 2]]);
    table64("neg.s64 %y, %x0;", &[&[1, u64::MAX]]);
    table64("abs.s64 %y, %x0;", &[&[u64::MAX, 1]]);
    table32("min.s32 %d, %a0, %a1;", &[&[MINUS(1), 1, MINUS(1)]]);
    table32("max.s32 %d, %a0, %a1;", &[&[MINUS(1), 1, 1]]);
    table32("min.u32 %d, %a0, %a1;", &[&[MINUS(1), 1, 1]]);
    table32("max.u32 %d, %a0, %a1;", &[&[MINUS(1), 1, MINUS(1)]]);
    table16("min.s16 %h, %h0, %h1;", &[&[0xffff, 1, 0xffff]]);
    table16("max.u16 %h, %h0, %h1;", &[&[0xffff, 1, 0xffff]]);
    table64("min.s64 %y, %x0, %x1;", &[&[u64::MAX, 1, u64::MAX]]);
    table64("max.s64 %y, %x0, %x1;", &[&[u64::MAX, 1, 1]]);
    table64("min.u64 %y, %x0, %x1;", &[&[u64::MAX, 1, 1]]);
    table64("max.u64 %y, %x0, %x1;", &[&[u64::MAX, 1, u64::MAX]]);
}

#[test]
fn dot_products() {
    // 1*5 + 2*6 + 3*7 + (-1)*(-2) + 100.
    table32("dp4a.s32.s32 %d, %a0, %a1, %a2;", &[&[0xff03_0201, 0xfe07_0605, 100, 140]]);
    // 255 * 254 instead of (-1) * (-2).
    table32("dp4a.u32.u32 %d, %a0, %a1, %a2;", &[&[0xff03_0201, 0xfe07_0605, 100, 138 + 255 * 254]]);
    table32("dp4a.u32.s32 %d, %a0, %a1, %a2;", &[&[0xff00_0000, 0xfe00_0000, 600, 90]]);
    table32("dp4a.s32.u32 %d, %a0, %a1, %a2;", &[&[0xff00_0000, 0xfe00_0000, 300, 46]]);
    // Halves 2 and -3 with the lower bytes 5 and -1 and the upper bytes 7 and 1.
    table32("dp2a.lo.s32.s32 %d, %a0, %a1, %a2;", &[&[0xfffd_0002, 0x0107_ff05, 1, 14]]);
    table32("dp2a.hi.s32.s32 %d, %a0, %a1, %a2;", &[&[0xfffd_0002, 0x0107_ff05, 1, 12]]);
    table32("dp2a.lo.u32.u32 %d, %a0, %a1, %a2;", &[&[0x0003_0002, 0x0107_ff05, 1, 776]]);
    table32("dp2a.hi.u32.s32 %d, %a0, %a1, %a2;", &[&[0x0003_0002, 0xff07_0000, 1, 12]]);
    table32("dp2a.hi.s32.u32 %d, %a0, %a1, %a2;", &[&[0xffff_0002, 0xff07_0000, 300, 59]]);
}

#[test]
fn unknown_instructions_are_refused_by_name() {
    for (body, text) in [
        ("frobnicate.s32 %a0, %a1;", "the opcode frobnicate is not known"),
        ("add.s32.wobble %a0, %a1, %a2;", "the modifier .wobble is not known here"),
        ("add.s32 %a0, %a1;", "an operand is missing"),
        ("add.s32 %a0, %a1, %a2, %a3;", "it has 4 operands, 3 are known"),
        ("add.s32 %a0, %x1, %a2;", "cannot be read as 32 bits"),
        ("add.s32 %a0, %h1, %a2;", "cannot be read as 32 bits"),
        ("add.s32 %a0, %a9, %a2;", "unknown register %a9"),
        ("add.s32 %a0, nothing, %a2;", "cannot be read as 32 bits"),
        ("mul.s32 %a0, %a1, %a2;", "mul of integers needs .lo, .hi or .wide"),
        ("mul.lo.b32 %a0, %a1, %a2;", "mul.lo of B(32)"),
        ("add.s32 5, %a1, %a2;", "cannot be written as 32 bits"),
        ("bra nowhere;", "the name nowhere is not known"),
        ("mov.u32 %a0, %clock;", "unknown register %clock"),
        (".frob x;", "unknown directive .frob in a function"),
        ("call other;", "call of other, which has no body here"),
        ("lop3.b32 %a0, %a1, %a2, %a3, 256;", "a table of 256"),
        ("@%a0 add.s32 %a0, %a1, %a2;", "%a0 is no predicate"),
        ("add.s32 %a0, %a1, 1", "where `;` was expected"),
    ] {
        let message = refused(body);
        assert!(message.contains(text), "{body}: {message}");
        assert!(message.contains("line 6") || message.contains("line 7"), "{body}: {message}");
    }
}
