//! Tests of matrix products, `ldmatrix` and asynchronous copies.

use super::{HEAD, Rig};
use crate::{FaultKind, Limits, Machine, PtxError, RunError};
use half::{bf16, f16};

/// Loads two matrices with `cp.async` and `ldmatrix` in row order, multiplies them and stores the result
/// row by row: 16 rows of 32 bytes, and 8 columns of 32 bytes.
fn product(mma: &str, sums: &str, first: &[u8], second: &[u8], third: &[u32; 128]) -> Vec<u32> {
    scaled_product(mma, sums, "", (first, &[0; 32]), (second, &[0; 32]), third).unwrap()
}

/// Like [`product`]. Lane `l` has word `l` of the first factor's scales in `%r24` and of the second one's in `%r25`.
/// `scales`: the last operands.
fn scaled_product(
    mma: &str,
    sums: &str,
    scales: &str,
    (first, first_scales): (&[u8], &[u32; 32]),
    (second, second_scales): (&[u8], &[u32; 32]),
    third: &[u32; 128],
) -> Result<Vec<u32>, PtxError> {
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
        mul.wide.u32 %rd8, %r1, 4; add.s64 %rd8, %rd8, %rd3; ld.global.u32 %r24, [%rd8+512]; ld.global.u32 %r25, [%rd8+640];
        mma.sync.aligned.{mma} {{{sums}}}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{{sums}}}{scales};
        st.global.v2.u32 [%rd7], {{%r20, %r21}}; st.global.v2.u32 [%rd7+256], {{%r22, %r23}}; ret; }}"
    );
    let mut machine = Machine::new(Limits::HOPPER, 1);
    let module = machine.load(&format!("{HEAD}{text}"))?;
    let kernel = machine.kernel(module, "k").unwrap();
    let mut rig = Rig { machine, kernel };
    let p = [rig.upload(first.iter().map(|&b| [b])), rig.upload(second.iter().map(|&b| [b]))];
    let third = third.iter().chain(first_scales).chain(second_scales);
    let out = rig.upload(third.map(|word| word.to_le_bytes()));
    rig.launch(32, &[p[0], p[1], out]).unwrap();
    Ok(rig.words(out, 128))
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

/// Values of all 16 codes of E2M1.
const E2M1: [f64; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Values of E4M3 by their place in the order of the positive codes.
fn e4m3(code: u8) -> f64 {
    let mut value = 0.0;
    let mut step = 2f64.powi(-9);
    for position in 0..code & 0x7f {
        // The step doubles with each exponent from the second one on.
        if position >= 16 && position % 8 == 0 {
            step *= 2.0;
        }
        value += step;
    }
    if code & 0x80 == 0 { value } else { -value }
}

/// Codes that differ between positions, without E4M3's NaN.
fn code(i: usize) -> u8 {
    let code = (i * 37 % 251) as u8;
    if code & 0x7f == 0x7f { 0x55 } else { code }
}

/// The scales of `rows` rows of `blocks` blocks, and the lanes' words with them, with other bytes everywhere else.
fn lane_scales(
    rows: usize,
    blocks: usize,
    lane: impl Fn(usize) -> usize,
    byte: usize,
) -> (Vec<u8>, [u32; 32]) {
    let mut words = [0xa5a5_a5a5; 32];
    let mut scales = Vec::new();
    for row in 0..rows {
        for block in 0..blocks {
            let scale = 100 + (row * 5 + block * 3) as u8 % 21;
            scales.push(scale);
            let shift = 8 * (byte + block);
            words[lane(row)] = words[lane(row)] & !(0xff << shift) | u32::from(scale) << shift;
        }
    }
    (scales, words)
}

fn close(found: &[u32], expected: &[f64], what: &str) {
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(f32::from_bits(*found), *expected as f32, "{what} #{i}");
    }
}

#[test]
fn products_of_blocks_with_scales_equal_the_definition() {
    let third: [u32; 128] = std::array::from_fn(|i| (i as f32 / 8.0 - 7.0).to_bits());
    let (first, second): (Vec<u8>, Vec<u8>) = ((0..512).map(code).collect(), (512..768).map(code).collect());
    // Four bits in the middle of each byte.
    let narrow = |codes: &[u8]| codes.iter().map(|code| code & 0x3c).collect::<Vec<u8>>();
    type Values = fn(&[u8], usize) -> f64;
    /// Instruction, values of both factors, scales of a row, values of scales.
    type Case = (String, Values, Values, usize, fn(u8) -> f64);
    let wide: Values = |codes, at| e4m3(codes[at]);
    let middle: Values = |codes, at| E2M1[usize::from(codes[at] >> 2)];
    let packed: Values = |codes, at| E2M1[usize::from(codes[at / 2] >> (4 * (at % 2)) & 15)];
    let power: fn(u8) -> f64 = |scale| 2f64.powi(i32::from(scale) - 127);
    let mx = "m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32";
    let nv = "m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec";
    let cases: [Case; 5] = [
        (format!("{mx}.e4m3.e4m3.f32.ue8m0"), wide, wide, 1, power),
        (format!("{mx}.e2m1.e4m3.f32.ue8m0"), middle, wide, 1, power),
        (format!("{mx}.e4m3.e2m1.f32.ue8m0"), wide, middle, 1, power),
        (format!("{nv}::2X.f32.e2m1.e2m1.f32.ue8m0"), packed, packed, 2, power),
        (format!("{nv}::4X.f32.e2m1.e2m1.f32.ue4m3"), packed, packed, 4, e4m3),
    ];
    for (mma, of_first, of_second, blocks, scale) in cases {
        let depth = if blocks == 1 { 32 } else { 64 };
        let a = if mma.contains("f32.e2m1.e4m3") { narrow(&first) } else { first.clone() };
        let b = if mma.contains("e4m3.e2m1") { narrow(&second) } else { second.clone() };
        for select in 0..4 {
            let byte = select / blocks * blocks;
            let (pair, thread) = (select % 2, select);
            let (a_scales, a_words) = lane_scales(16, blocks, |row| row % 8 * 4 + 2 * pair + row / 8, byte);
            let (b_scales, b_words) = lane_scales(8, blocks, |column| 4 * column + thread, byte);
            let expected: Vec<f64> = (0..128)
                .map(|i| {
                    let (row, column) = (i / 8, i % 8);
                    let products = (0..depth).map(|k| {
                        let block = k * blocks / depth;
                        of_first(&a, row * depth + k)
                            * scale(a_scales[row * blocks + block])
                            * of_second(&b, column * depth + k)
                            * scale(b_scales[column * blocks + block])
                    });
                    products.sum::<f64>() + f64::from(f32::from_bits(third[i]))
                })
                .collect();
            let scales = format!(", %r24, {{{byte}, {pair}}}, %r25, {{{byte}, {thread}}}");
            let found = scaled_product(&mma, SUMS, &scales, (&a, &a_words), (&b, &b_words), &third).unwrap();
            close(&found, &expected, &format!("{mma}, byte {byte}, thread {thread}"));
        }
    }
}

#[test]
fn scales_that_are_no_numbers_make_their_rows_nan() {
    let (first, second) = ([0x38; 512], [0x38; 256]);
    let mut a_words = [0x7f7f_7f7f; 32];
    // Row 9.
    a_words[4 + 1] = 0x7fff_7f7f;
    let mma = "m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0";
    let (words, third) = ([0x7f7f_7f7f; 32], [0; 128]);
    let scales = ", %r24, {2, 0}, %r25, {2, 0}";
    let found = scaled_product(mma, SUMS, scales, (&first, &a_words), (&second, &words), &third).unwrap();
    for (i, found) in found.iter().map(|bits| f32::from_bits(*bits)).enumerate() {
        assert_eq!(found.is_nan(), i / 8 == 9, "{i}");
        assert!(found.is_nan() || found == 32.0, "{i}: {found}");
    }
}

#[test]
fn other_blocks_with_scales_are_refused() {
    let mx = "m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0";
    let two = "m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0";
    for (mma, scales) in [
        (mx.into(), ", %r24, {0, 2}, %r25, {0, 0}"),
        (mx.into(), ", %r24, {4, 0}, %r25, {0, 0}"),
        (mx.into(), ", %r24, {0, 0}, %r25, {0, 4}"),
        (two.into(), ", %r24, {1, 0}, %r25, {0, 0}"),
        (mx.replace("1X", "2X"), ", %r24, {0, 0}, %r25, {0, 0}"),
        (mx.replace(".block_scale", ""), ", %r24, {0, 0}, %r25, {0, 0}"),
        (mx.replace("ue8m0", "ue4m3"), ", %r24, {0, 0}, %r25, {0, 0}"),
        (two.replace("ue8m0", "ue4m3"), ", %r24, {0, 0}, %r25, {0, 0}"),
    ] {
        let found =
            scaled_product(&mma, SUMS, scales, (&[0; 512], &[0; 32]), (&[0; 256], &[0; 32]), &[0; 128]);
        assert!(found.is_err(), "{mma} {scales}");
    }
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
