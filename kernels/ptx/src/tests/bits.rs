//! Tests of bit operations.

use super::{table_pred, table16, table32, table64};

#[test]
fn logic() {
    table32("and.b32 %d, %a0, %a1;", &[&[0b1100, 0b1010, 0b1000]]);
    table32("or.b32 %d, %a0, %a1;", &[&[0b1100, 0b1010, 0b1110]]);
    table32("xor.b32 %d, %a0, %a1;", &[&[0b1100, 0b1010, 0b0110]]);
    table32("not.b32 %d, %a0;", &[&[0xf0f0_f0f0, 0x0f0f_0f0f]]);
    table32("cnot.b32 %d, %a0;", &[&[0, 1], &[7, 0]]);
    table16("and.b16 %h, %h0, %h1;", &[&[0xff0f, 0x0ff0, 0x0f00]]);
    table16("not.b16 %h, %h0;", &[&[0x00ff, 0xff00]]);
    table64("and.b64 %y, %x0, %x1;", &[&[u64::MAX, 1 << 60, 1 << 60]]);
    table64("or.b64 %y, %x0, %x1;", &[&[1, 1 << 60, (1 << 60) + 1]]);
    table64("xor.b64 %y, %x0, %x1;", &[&[u64::MAX, 1, u64::MAX - 1]]);
    table64("not.b64 %y, %x0;", &[&[0, u64::MAX]]);
    let predicates = "setp.ne.u32 %q, %a0, 0; setp.ne.u32 %q1, %a1, 0;";
    table_pred(&format!("{predicates} and.pred %q, %q, %q1;"), &[&[1, 1, 1], &[1, 0, 0], &[0, 0, 0]]);
    table_pred(&format!("{predicates} or.pred %q, %q, %q1;"), &[&[1, 0, 1], &[0, 0, 0]]);
    table_pred(&format!("{predicates} xor.pred %q, %q, %q1;"), &[&[1, 1, 0], &[0, 1, 1]]);
    table_pred(&format!("{predicates} not.pred %q, %q1;"), &[&[0, 1, 0], &[0, 0, 1]]);
    table_pred("mov.pred %q, 1;", &[&[1]]);
}

#[test]
fn shifts_beyond_the_width_shift_everything_out() {
    table32("shl.b32 %d, %a0, %a1;", &[&[1, 31, 1 << 31], &[3, 32, 0], &[3, 256, 0], &[3, u32::MAX, 0]]);
    table32("shr.u32 %d, %a0, %a1;", &[&[1 << 31, 31, 1], &[u32::MAX, 32, 0]]);
    table32("shr.s32 %d, %a0, %a1;", &[&[1 << 31, 31, u32::MAX], &[1 << 31, 99, u32::MAX], &[8, 1, 4]]);
    table32("shr.b32 %d, %a0, 4;", &[&[0xf000_0000, 0x0f00_0000]]);
    table16("shl.b16 %h, %h0, %a1;", &[&[0x8001, 1, 2], &[1, 15, 0x8000], &[1, 16, 0]]);
    table16("shr.u16 %h, %h0, %a1;", &[&[0x8000, 15, 1], &[0x8000, 16, 0]]);
    table16("shr.s16 %h, %h0, %a1;", &[&[0x8000, 15, 0xffff], &[0x8000, 40, 0xffff]]);
    table64("shl.b64 %y, %x0, %a1;", &[&[1, 63, 1 << 63], &[1, 64, 0]]);
    table64("shr.u64 %y, %x0, %a1;", &[&[1 << 63, 63, 1], &[u64::MAX, 64, 0]]);
    table64("shr.s64 %y, %x0, %a1;", &[&[1 << 63, 63, u64::MAX], &[1 << 63, 70, u64::MAX]]);
}

#[test]
fn funnel_shifts() {
    let (low, high) = (0x89ab_cdef, 0x0123_4567);
    table32("shf.l.wrap.b32 %d, %a0, %a1, %a2;", &[&[low, high, 8, 0x2345_6789], &[low, high, 32, high]]);
    table32("shf.l.clamp.b32 %d, %a0, %a1, %a2;", &[&[low, high, 8, 0x2345_6789], &[low, high, 40, low]]);
    table32("shf.r.wrap.b32 %d, %a0, %a1, %a2;", &[&[low, high, 8, 0x6789_abcd], &[low, high, 32, low]]);
    table32("shf.r.clamp.b32 %d, %a0, %a1, %a2;", &[&[low, high, 8, 0x6789_abcd], &[low, high, 40, high]]);
}

#[test]
fn functions_by_table() {
    // Rows 4a + 2b + c: the columns of the truth table.
    let (a, b, c) = (0xf0, 0xcc, 0xaa);
    table32("lop3.b32 %d, %a0, %a1, %a2, 0xEA;", &[&[a, b, c, (a & b) | c]]);
    table32("lop3.b32 %d, %a0, %a1, %a2, 0xC0;", &[&[a, b, c, a & b]]);
    table32("lop3.b32 %d, %a0, %a1, %a2, 0xF8;", &[&[a, b, c, a | (b & c)]]);
    table32("lop3.b32 %d, %a0, %a1, %a2, 0x96;", &[&[a, b, c, 0x96]]);
    table32("lop3.b32 %d, %a0, %a1, %a2, 0xFE;", &[&[a, b, c, 0xfe]]);
    table32("lop3.b32 %d, %a0, %a1, %a2, 0x80;", &[&[a, b, c, 0x80]]);
    table32("lop3.b32 %d, %a0, %a1, %a2, 0x6A;", &[&[a, b, c, 0x6a]]);
    // With these inputs, the result equals the table, for 8-bit tables without row 0.
    for table in [0x02, 0x1e, 0x38, 0x5a, 0xac, 0xe4, 0xca] {
        table32(&format!("lop3.b32 %d, %a0, %a1, %a2, {table};"), &[&[a, b, c, table]]);
    }
    table32("lop3.b32 %d, %a0, %a1, %a2, 0x01;", &[&[a, b, c, 0xffff_ff01]]);
}

#[test]
fn permutations_of_bytes() {
    let (a, b) = (0x8322_1100, 0x7766_5544);
    table32(
        "prmt.b32 %d, %a0, %a1, %a2;",
        &[
            &[a, b, 0x3210, a],
            &[a, b, 0x7654, b],
            &[a, b, 0x0123, 0x0011_2283],
            &[a, b, 0x5140, 0x5511_4400],
            // The sign of a byte, repeated.
            &[a, b, 0xb9a8, 0xff00_0000],
        ],
    );
}

#[test]
fn fields() {
    table32(
        "bfe.u32 %d, %a0, %a1, %a2;",
        &[&[0x1234_5678, 8, 12, 0x456], &[u32::MAX, 28, 8, 15], &[7, 40, 3, 0], &[9, 0, 0, 0]],
    );
    table32(
        "bfe.s32 %d, %a0, %a1, %a2;",
        &[&[0x0000_0f00, 8, 4, u32::MAX], &[0x0000_0700, 8, 4, 7], &[0x8000_0000, 28, 8, 0xffff_fff8]],
    );
    table64(
        "bfe.u64 %y, %x0, %a1, %a2;",
        &[&[0x1234_5678_9abc_def0, 32, 16, 0x5678], &[u64::MAX, 0, 64, u64::MAX]],
    );
    table64("bfe.s64 %y, %x0, %a1, %a2;", &[&[0xf0, 4, 4, u64::MAX]]);
    table32(
        "bfi.b32 %d, %a0, %a1, %a2, %a3;",
        &[
            &[0xff, 0, 4, 4, 0xf0],
            &[0, u32::MAX, 8, 8, 0xffff_00ff],
            &[5, 9, 32, 4, 9],
            &[1, 0, 31, 8, 1 << 31],
        ],
    );
    table64("bfi.b64 %y, %x0, %x1, %a2, %a3;", &[&[0xab, 0, 40, 8, 0xab << 40], &[1, 2, 64, 1, 2]]);
}

#[test]
fn counts() {
    table32("popc.b32 %d, %a0;", &[&[0xf0f0_0001, 9], &[0, 0]]);
    table32("popc.b64 %d, %x0;", &[&[0xf, 4]]);
    table32("clz.b32 %d, %a0;", &[&[1, 31], &[0, 32]]);
    table32("clz.b64 %d, %x0;", &[&[1, 63], &[0, 64]]);
    table32("brev.b32 %d, %a0;", &[&[1, 1 << 31], &[0x0000_00f0, 0x0f00_0000]]);
    table64("brev.b64 %y, %x0;", &[&[1, 1 << 63]]);
    table32("bfind.u32 %d, %a0;", &[&[0x10, 4], &[0, u32::MAX]]);
    table32("bfind.shiftamt.u32 %d, %a0;", &[&[0x10, 27], &[0, u32::MAX]]);
    table32("bfind.s32 %d, %a0;", &[&[0xffff_fff0, 3], &[u32::MAX, u32::MAX], &[4, 2]]);
    table32("bfind.shiftamt.s32 %d, %a0;", &[&[0xffff_fff0, 28]]);
    table32("bfind.u64 %d, %x0;", &[&[0x10, 4]]);
}
