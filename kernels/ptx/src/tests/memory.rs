//! Tests of moves, loads, stores and atomics.

use super::{Rig, table32, table64};
use crate::RunError;

#[test]
fn parts_and_wholes() {
    table32("mov.b32 %d, {%h0, %h1};", &[&[0x1234, 0x5678, 0x5678_1234]]);
    table32("mov.b32 {%h0, %h1}, %a0; mov.b32 %d, {%h1, %h0};", &[&[0x1234_5678, 0x5678_1234]]);
    table64("mov.b64 %y, {%a0, %a1};", &[&[1, 2, 0x2_0000_0001]]);
    table32("mov.b64 {_, %d}, %x0;", &[&[7, 0]]);
    table32("mov.b64 {%d, _}, %x0;", &[&[7, 7]]);
    table64("mov.b64 %y, {%h0, %h1, %h2, %h3};", &[&[1, 2, 3, 4, 0x0004_0003_0002_0001]]);
    table32("mov.f32 %d, 1.5;", &[&[1.5f32.to_bits()]]);
    table32("mov.b32 %d, 0x1F;", &[&[31]]);
    table64("mov.f64 %y, 0d3FF8000000000000;", &[&[1.5f64.to_bits()]]);
}

#[test]
fn widths_and_signs_of_loads() {
    let text = ".visible .entry k(.param .u64 p) {
        .reg .b64 %rd<6>; .reg .b32 %r<6>; .reg .b16 %h<4>;
        ld.param.u64 %rd1, [p];
        ld.global.s8 %r1, [%rd1]; ld.global.u8 %r2, [%rd1]; ld.global.s16 %r3, [%rd1]; ld.global.u16 %h1, [%rd1];
        ld.global.s8 %rd2, [%rd1]; ld.global.b32 %rd3, [%rd1]; ld.global.nc.L1::no_allocate.L2::128B.b32 %r4, [%rd1];
        ld.volatile.global.s8 %h2, [%rd1+-0];
        st.global.u32 [%rd1+8], %r1; st.global.u32 [%rd1+12], %r2; st.global.u32 [%rd1+16], %r3;
        cvt.u32.u16 %r5, %h1; st.global.cg.u32 [%rd1+20], %r5; st.global.u64 [%rd1+24], %rd2;
        st.global.u64 [%rd1+32], %rd3; st.relaxed.gpu.global.u16 [%rd1+40], %h2; st.global.u8 [%rd1+42], %r4;
        st.global.u8 [%rd1+43], 9; ret; }";
    let mut rig = Rig::new(text);
    let p = rig.upload([[0x80, 0xff, 3, 4, 5, 6, 7, 8]]);
    let bytes = rig.machine.allocate(48).unwrap();
    rig.machine.copy(p, bytes, 8).unwrap();
    rig.launch(1, &[bytes]).unwrap();
    assert_eq!(
        rig.words(bytes, 11)[2..],
        [0xffff_ff80, 0x80, 0xffff_ff80, 0xff80, 0xffff_ff80, 0xffff_ffff, 0x0403_ff80, 0, 0x0980_ff80,]
    );
}

#[test]
fn vectors_constants_parameters_and_generic_addresses() {
    let text = "
        .const .align 4 .b8 table[8] = {1, 0, 0, 0, 2, 0, 0, 0};
        .const .align 4 .u32 third = 3;
        .global .align 4 .u32 counter = 40;
        .global .align 4 .u32 zeros[2];
        .shared .align 4 .u32 outside[4];
        .extern .shared .align 16 .b8 dynamic[];
        .visible .entry k(.param .u64 p, .param .align 8 .b8 s[8], .param .u32 n) {
        .local .align 8 .b8 depot[16];
        .shared .align 8 .b8 inner[16];
        .reg .b64 %rd<20>; .reg .b32 %r<20>;
        ld.param.u64 %rd1, [p]; ld.param.v2.u32 {%r1, %r2}, [s]; ld.param.u32 %r3, [n];
        st.global.v4.u32 [%rd1], {%r1, %r2, %r3, 7};
        ld.const.u32 %r4, [table+4]; ld.const.u32 %r5, [third]; mov.u64 %rd2, table; ld.const.u32 %r6, [%rd2];
        st.global.v4.u32 [%rd1+16], {%r4, %r5, %r6, 0};
        ld.global.u32 %r7, [counter]; add.u32 %r7, %r7, 2; st.global.u32 [counter], %r7;
        mov.u64 %rd3, zeros; ld.global.u32 %r8, [%rd3+4]; ld.u32 %r9, [counter];
        st.global.v2.u32 [%rd1+32], {%r8, %r9};
        // The same bytes by a shared, a generic and a 32-bit address.
        st.shared.u32 [inner+4], 11; mov.u64 %rd4, inner; cvta.shared.u64 %rd5, %rd4; ld.u32 %r10, [%rd5+4];
        cvta.to.shared.u64 %rd6, %rd5; cvt.u32.u64 %r11, %rd6; ld.shared.u32 %r12, [%r11+4];
        st.shared.u32 [outside], 12; ld.shared.u32 %r13, [outside];
        mov.u32 %r14, dynamic; st.shared.u32 [%r14], 13; ld.shared.u32 %r15, [dynamic];
        mov.u64 %rd7, depot; st.local.v2.u32 [%rd7+8], {14, 15}; cvta.local.u64 %rd8, %rd7; ld.u32 %r16, [%rd8+12];
        st.global.v2.u32 [%rd1+40], {%r10, %r12}; st.global.v4.u32 [%rd1+48], {%r13, %r15, %r16, 0};
        ret; }";
    let mut rig = Rig::new(text);
    let p = rig.machine.allocate(64).unwrap();
    rig.launch_grid(1, 1, 64, &[p, 0x2_0000_0001, 5]).unwrap();
    assert_eq!(rig.words(p, 15)[..7], [1, 2, 5, 7, 2, 3, 1]);
    assert_eq!(rig.words(p, 15)[8..], [0, 42, 11, 11, 12, 13, 15]);
    // The variable keeps its value between launches.
    rig.launch_grid(1, 1, 64, &[p, 0, 0]).unwrap();
    assert_eq!(rig.words(p + 36, 1), [44]);
}

#[test]
fn address_spaces_are_distinguished() {
    table64(
        "isspacep.shared %q, %x0; selp.b64 %y, 1, 0, %q;",
        &[&[0x0100_0000_0010, 1], &[0x7000_0000_0000, 0]],
    );
    table64(
        "isspacep.global %q, %x0; selp.b64 %y, 1, 0, %q;",
        &[&[0x0100_0000_0010, 0], &[0x7000_0000_0000, 1]],
    );
}

/// Returns the value that one atomic of all lanes leaves, and the old values that the lanes received.
fn atomic(op: &str, start: u32, operand: &str) -> (u32, Vec<u32>) {
    let text = format!(
        ".visible .entry k(.param .u64 p) {{
        .reg .b64 %rd<4>; .reg .b32 %r<4>; .reg .f32 %f;
        ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x; cvt.rn.f32.u32 %f, %r1;
        atom.global.{op} %r2, [%rd1], {operand};
        mul.wide.u32 %rd2, %r1, 4; add.s64 %rd2, %rd2, %rd1; st.global.u32 [%rd2+4], %r2; ret; }}"
    );
    let mut rig = Rig::new(&text);
    let p = rig.machine.allocate(4 * 5).unwrap();
    rig.machine.write(p, &start.to_le_bytes()).unwrap();
    rig.launch(4, &[p]).unwrap();
    let all = rig.words(p, 5);
    (all[0], all[1..].to_vec())
}

#[test]
fn atomics() {
    assert_eq!(atomic("add.u32", 10, "%r1"), (16, vec![10, 10, 11, 13]));
    assert_eq!(atomic("min.s32", 2, "-1"), (u32::MAX, vec![2, u32::MAX, u32::MAX, u32::MAX]));
    assert_eq!(atomic("min.u32", 2, "%r1"), (0, vec![2, 0, 0, 0]));
    assert_eq!(atomic("max.s32", u32::MAX, "%r1"), (3, vec![u32::MAX, 0, 1, 2]));
    assert_eq!(atomic("max.u32", u32::MAX, "%r1").0, u32::MAX);
    assert_eq!(atomic("and.b32", 7, "%r1").0, 0);
    assert_eq!(atomic("or.b32", 8, "%r1").0, 11);
    assert_eq!(atomic("xor.b32", 0, "%r1").0, 0);
    assert_eq!(atomic("exch.b32", 9, "%r1"), (3, vec![9, 0, 1, 2]));
    assert_eq!(atomic("inc.u32", 0, "2"), (1, vec![0, 1, 2, 0]));
    assert_eq!(atomic("dec.u32", 1, "5"), (3, vec![1, 0, 5, 4]));
    assert_eq!(atomic("cas.b32", 2, "%r1, 50"), (50, vec![2, 2, 2, 50]));
    assert_eq!(atomic("add.f32", 1f32.to_bits(), "%f").0, 7f32.to_bits());
    assert_eq!(atomic("acq_rel.gpu.add.u32", 1, "1").0, 5);
    let text = ".visible .entry k(.param .u64 p) {
        .reg .b64 %rd<4>; .reg .b32 %r<4>; .reg .b16 %h; .shared .u64 total;
        ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x;
        red.relaxed.gpu.global.add.u64 [%rd1], 3; red.global.add.noftz.f16x2 [%rd1+8], 0x3C003C00;
        mov.b16 %h, 0x3F80; red.global.add.noftz.bf16 [%rd1+12], %h;
        st.shared.u64 [total], 0; bar.sync 0; atom.shared.add.u64 %rd2, [total], 2; bar.sync 0;
        ld.shared.u64 %rd3, [total]; st.global.u64 [%rd1+16], %rd3; ret; }";
    let mut rig = Rig::new(text);
    let p = rig.upload([[0u8; 24]]);
    rig.launch(2, &[p]).unwrap();
    assert_eq!(rig.doubles(p, 3), [6, 0x0000_4000_4000_4000, 4]);
}

#[test]
fn host_accesses_outside_of_allocations_are_refused() {
    let mut rig = Rig::new(".visible .entry k() { ret; }");
    let a = rig.machine.allocate(100).unwrap();
    assert!(a.is_multiple_of(256));
    rig.machine.fill(a, 5, 50).unwrap();
    assert!(rig.machine.is_written(a, 50).unwrap() && !rig.machine.is_written(a + 1, 50).unwrap());
    let mut out = [0; 2];
    rig.machine.read(a + 49, &mut out).unwrap();
    assert_eq!(out, [5, 0xff]);
    let b = rig.machine.allocate(100).unwrap();
    rig.machine.fill(b, 1, 100).unwrap();
    rig.machine.copy(a + 40, b + 10, 20).unwrap();
    assert!(rig.machine.is_written(b, 20).unwrap() && !rig.machine.is_written(b + 20, 1).unwrap());
    assert!(rig.machine.is_written(b + 30, 70).unwrap());
    for wrong in
        [rig.machine.write(a + 99, &[1, 2]), rig.machine.read(a - 1, &mut out), rig.machine.fill(b, 0, 101)]
    {
        assert!(matches!(wrong, Err(RunError::Host { .. })), "{wrong:?}");
    }
    rig.machine.free(a).unwrap();
    assert!(rig.machine.free(a).is_err() && rig.machine.free(b + 1).is_err());
    assert!(rig.machine.read(a, &mut out).unwrap_err().to_string().contains("freed"));
    let full = rig.machine.allocate(5 << 30).unwrap_err();
    assert_eq!(full, RunError::OutOfMemory { requested: 5 << 30, free: (4 << 30) - 100 });
}
