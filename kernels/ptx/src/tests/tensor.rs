//! Tests of matrix products, `ldmatrix` and asynchronous copies.

use super::Rig;
use crate::{FaultKind, RunError};
use half::{bf16, f16};

/// Loads two matrices with `cp.async` and `ldmatrix` in row order, multiplies them and stores the result
/// row by row: 16 rows of 32 bytes, and 8 columns of 32 bytes.
fn product(mma: &str, sums: &str, first: &[u8], second: &[u8], third: &[u32; 128]) -> Vec<u32> {
    let text = format!(
        ".visible .entry k(.param .u64 p0, .param .u64 p1, .param .u64 p2) {{
        .shared .align 16 .b8 first[512]; .shared .align 16 .b8 second[256];
        .reg .b64 %rd<9>; .reg .b32 %r<30>; .reg .pred %p;
        ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; ld.param.u64 %rd3, [p2]; mov.u32 %r1, %tid.x;
        mul.wide.u32 %rd4, %r1, 16; shl.b32 %r2, %r1, 4;
        mov.u32 %r3, first; add.u32 %r4, %r3, %r2; add.s64 %rd5, %rd1, %rd4;
        cp.async.cg.shared.global [%r4], [%rd5], 16;
        mov.u32 %r5, second; add.u32 %r6, %r5, %r2; add.s64 %rd6, %rd2, %rd4; setp.lt.u32 %p, %r1, 16;
        @%p cp.async.cg.shared.global [%r6], [%rd6], 16;
        cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;
        // Row r + 8 (m odd), byte 16 (m / 2) of matrix m = lane / 8.
        and.b32 %r7, %r1, 15; shl.b32 %r7, %r7, 5; and.b32 %r8, %r1, 16; add.u32 %r7, %r7, %r8; add.u32 %r7, %r7, %r3;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r7];
        and.b32 %r7, %r1, 7; shl.b32 %r7, %r7, 5; and.b32 %r8, %r1, 8; shl.b32 %r8, %r8, 1; add.u32 %r7, %r7, %r8;
        add.u32 %r7, %r7, %r5;
        ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{%r14, %r15}}, [%r7];
        // Row lane / 4, columns 2 (lane % 4) and the next; rows 8 further on.
        shr.u32 %r16, %r1, 2; shl.b32 %r16, %r16, 5; and.b32 %r17, %r1, 3; shl.b32 %r17, %r17, 3; add.u32 %r16, %r16, %r17;
        cvt.u64.u32 %rd7, %r16; add.s64 %rd7, %rd7, %rd3;
        ld.global.v2.u32 {{%r20, %r21}}, [%rd7]; ld.global.v2.u32 {{%r22, %r23}}, [%rd7+256];
        mma.sync.aligned.{mma} {{{sums}}}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{{sums}}};
        st.global.v2.u32 [%rd7], {{%r20, %r21}}; st.global.v2.u32 [%rd7+256], {{%r22, %r23}}; ret; }}"
    );
    let mut rig = Rig::new(&text);
    let p = [rig.upload(first.iter().map(|&b| [b])), rig.upload(second.iter().map(|&b| [b]))];
    let out = rig.upload(third.map(u32::to_le_bytes));
    rig.launch(32, &[p[0], p[1], out]).unwrap();
    rig.words(out, 128)
}

const SUMS: &str = "%r20, %r21, %r22, %r23";

/// Small numbers that differ between positions.
fn small(i: usize) -> i32 {
    (i * 7 % 13) as i32 - 6
}

#[test]
fn products_of_halves_equal_the_definition() {
    let expected: Vec<f32> = (0..128)
        .map(|i| {
            let (row, column) = (i / 8, i % 8);
            let dot: i32 = (0..16).map(|k| small(row * 16 + k) * small(3 + column * 16 + k)).sum();
            (dot + i as i32) as f32
        })
        .collect();
    let third: [u32; 128] = std::array::from_fn(|i| (i as f32).to_bits());
    let halves = |from: usize, count, f: fn(f32) -> u16| {
        (from..from + count).flat_map(|i| f(small(i) as f32).to_le_bytes()).collect::<Vec<u8>>()
    };
    for (name, f) in [
        ("bf16", (|v| bf16::from_f32(v).to_bits()) as fn(f32) -> u16),
        ("f16", |v| f16::from_f32(v).to_bits()),
    ] {
        let mma = format!("m16n8k16.row.col.f32.{name}.{name}.f32");
        let out = product(&mma, SUMS, &halves(0, 256, f), &halves(3, 128, f), &third);
        assert_eq!(out.iter().map(|&v| f32::from_bits(v)).collect::<Vec<_>>(), expected, "{name}");
    }
}

#[test]
fn products_of_bytes_equal_the_definition() {
    let expected: Vec<u32> = (0..128)
        .map(|i| {
            let (row, column) = (i / 8, i % 8);
            let dot: i32 = (0..32).map(|k| small(row * 32 + k) * small(3 + column * 32 + k)).sum();
            (dot + i as i32) as u32
        })
        .collect();
    let bytes = |from: usize, count: usize| (from..from + count).map(|i| small(i) as u8).collect::<Vec<_>>();
    let third = std::array::from_fn(|i| i as u32);
    let out = product("m16n8k32.row.col.s32.s8.s8.s32", SUMS, &bytes(0, 512), &bytes(3, 256), &third);
    assert_eq!(out, expected);
}

#[test]
fn transposed_matrices() {
    // One matrix of 8 rows of 8 halves, 0..64, read transposed.
    let text = ".visible .entry k(.param .u64 p) {
        .shared .align 16 .b8 s[128]; .reg .b64 %rd<4>; .reg .b32 %r<6>; .reg .pred %q;
        ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 1; add.u32 %r3, %r2, 1; shl.b32 %r3, %r3, 16;
        or.b32 %r3, %r3, %r2; shl.b32 %r2, %r1, 2; mov.u32 %r4, s; add.u32 %r4, %r4, %r2; st.shared.u32 [%r4], %r3;
        bar.warp.sync -1; and.b32 %r2, %r1, 7; shl.b32 %r2, %r2, 4; mov.u32 %r4, s; add.u32 %r4, %r4, %r2;
        ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r5}, [%r4];
        mul.wide.u32 %rd2, %r1, 4; add.s64 %rd2, %rd2, %rd1; st.global.u32 [%rd2], %r5; ret; }";
    let mut rig = Rig::new(text);
    let out = rig.machine.allocate(128).unwrap();
    rig.launch(32, &[out]).unwrap();
    let expected: Vec<u32> = (0..32)
        .map(|lane| {
            let (column, row) = (lane / 4, lane % 4 * 2);
            (row * 8 + column) | ((row + 1) * 8 + column) << 16
        })
        .collect();
    assert_eq!(rig.words(out, 32), expected);
}

/// Each thread copies 16 bytes in two steps, waits with `wait`, and reads the first.
fn copies(wait: &str) -> Result<Vec<u32>, RunError> {
    let text = format!(
        ".visible .entry k(.param .u64 p, .param .u64 q) {{
        .shared .align 16 .b8 s[1024]; .reg .b64 %rd<9>; .reg .b32 %r<9>;
        ld.param.u64 %rd1, [p]; ld.param.u64 %rd2, [q]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 16;
        add.s64 %rd4, %rd1, %rd3; mov.u64 %rd5, s; add.s64 %rd5, %rd5, %rd3;
        .loc 1 60 1
        cp.async.ca.shared.global [%rd5], [%rd4], 16, 8; cp.async.commit_group;
        cp.async.ca.shared.global.L2::128B [%rd5+512], [%rd4], 4; cp.async.commit_group;
        {wait}
        .loc 1 66 1
        ld.shared.v4.u32 {{%r2, %r3, %r4, %r5}}, [%rd5];
        mul.wide.u32 %rd6, %r1, 16; add.s64 %rd6, %rd6, %rd2; st.global.v4.u32 [%rd6], {{%r2, %r3, %r4, %r5}};
        ret; }}
        .file 1 \"copies.cu\""
    );
    let mut rig = Rig::new(&text);
    let p = rig.upload((0..128u32).map(u32::to_le_bytes));
    let q = rig.machine.allocate(512).unwrap();
    rig.launch(32, &[p, q])?;
    Ok(rig.words(q, 128))
}

#[test]
fn copies_are_visible_only_after_a_wait() {
    let expected: Vec<u32> = (0..128).map(|i| if i % 4 < 2 { i } else { 0 }).collect();
    for wait in ["cp.async.wait_group 1;", "cp.async.wait_group 0;", "cp.async.wait_all;"] {
        assert_eq!(copies(wait).unwrap(), expected, "{wait}");
    }
    for wait in ["", "cp.async.wait_group 2;"] {
        let Err(RunError::Fault(fault)) = copies(wait) else { panic!("nothing was found with {wait:?}") };
        let message = fault.to_string();
        assert!(matches!(fault.kind, FaultKind::InFlight { .. }), "{message}");
        for text in ["copies.cu:60", "copies.cu:66", "cp.async.ca.shared.global [%rd5], [%rd4], 16, 8;"] {
            assert!(message.contains(text), "{message}");
        }
    }
}
