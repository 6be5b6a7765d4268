//! Tests of comparisons, jumps and calls.

use super::{Rig, table_pred, table32, table64};

#[test]
fn relations_of_integers() {
    let minus = u32::MAX;
    table_pred("setp.lt.s32 %q, %a0, %a1;", &[&[minus, 1, 1], &[1, minus, 0]]);
    table_pred("setp.lt.u32 %q, %a0, %a1;", &[&[minus, 1, 0], &[1, minus, 1]]);
    table_pred("setp.lo.u32 %q, %a0, %a1;", &[&[1, minus, 1]]);
    table_pred("setp.hs.u32 %q, %a0, %a1;", &[&[1, 1, 1]]);
    table_pred("setp.ge.s32 %q, %a0, -1;", &[&[minus, 1], &[minus - 1, 0]]);
    table_pred("setp.eq.b32 %q, %a0, %a1;", &[&[5, 5, 1], &[5, 6, 0]]);
    table_pred("setp.ne.s16 %q, %h0, %h1;", &[&[5, 5, 0]]);
    table_pred("setp.gt.s16 %q, %h0, %h1;", &[&[1, 0xffff, 1]]);
    table_pred("setp.le.u16 %q, %h0, %h1;", &[&[1, 0xffff, 1]]);
    table_pred("setp.gt.u64 %q, %x0, %x1;", &[&[2, 1, 1]]);
    table_pred("setp.lt.s64 %q, %x0, -1;", &[&[2, 0]]);
    // Combined with another condition, and with the opposite result in the second predicate.
    table_pred(
        "setp.ne.u32 %q1, %a2, 0; setp.lt.and.u32 %q, %a0, %a1, %q1;",
        &[&[1, 2, 1, 1], &[1, 2, 0, 0]],
    );
    table_pred(
        "setp.ne.u32 %q1, %a2, 0; setp.lt.or.u32 %q, %a0, %a1, !%q1;",
        &[&[3, 2, 1, 0], &[3, 2, 0, 1]],
    );
    table_pred("setp.lt.u32 %q1|%q, %a0, %a1;", &[&[1, 2, 0], &[2, 1, 1]]);
}

#[test]
fn relations_of_floats() {
    let (one, two, nan, tiny) = (1f32.to_bits(), 2f32.to_bits(), f32::NAN.to_bits(), 1);
    for (relation, ordered, unordered) in [
        ("eq", [0, 1], 0),
        ("ne", [1, 0], 0),
        ("lt", [1, 0], 0),
        ("le", [1, 1], 0),
        ("gt", [0, 0], 0),
        ("ge", [0, 1], 0),
        ("equ", [0, 1], 1),
        ("neu", [1, 0], 1),
        ("ltu", [1, 0], 1),
        ("leu", [1, 1], 1),
        ("gtu", [0, 0], 1),
        ("geu", [0, 1], 1),
        ("num", [1, 1], 0),
        ("nan", [0, 0], 1),
    ] {
        table_pred(
            &format!("setp.{relation}.f32 %q, %a0, %a1;"),
            &[
                &[one, two, ordered[0]],
                &[one, one, ordered[1]],
                &[nan, one, unordered],
                &[one, nan, unordered],
            ],
        );
    }
    table_pred("setp.gt.f32 %q, %a0, 0f00000000;", &[&[tiny, 1]]);
    table_pred("setp.gt.ftz.f32 %q, %a0, 0f00000000;", &[&[tiny, 0]]);
    table_pred("setp.lt.f16 %q, %h0, %h1;", &[&[0x3c00, 0x4000, 1]]);
    table_pred("setp.lt.bf16 %q, %h0, %h1;", &[&[0x4000, 0x3f80, 0]]);
}

#[test]
fn selections() {
    table32("setp.ne.u32 %q, %a0, 0; selp.b32 %d, %a1, %a2, %q;", &[&[1, 10, 20, 10], &[0, 10, 20, 20]]);
    table32("setp.ne.u32 %q, %a0, 0; selp.f32 %d, %a1, 0f3F800000, %q;", &[&[0, 10, 0x3f80_0000]]);
    table64("setp.ne.u32 %q, %a0, 0; selp.b64 %y, %x1, %x2, %q;", &[&[1, 10, 20, 10], &[0, 10, 20, 20]]);
    table32("set.lt.u32.u32 %d, %a0, %a1;", &[&[1, 2, u32::MAX], &[2, 1, 0]]);
    table32("set.lt.f32.f32 %d, %a0, %a1;", &[&[0, 0x3f80_0000, 0x3f80_0000]]);
    table32("slct.b32.s32 %d, %a0, %a1, %a2;", &[&[1, 2, 0, 1], &[1, 2, u32::MAX, 2]]);
    table32("slct.b32.f32 %d, %a0, %a1, %a2;", &[&[1, 2, 0x8000_0000, 1], &[1, 2, 0xbf80_0000, 2]]);
}

#[test]
fn diverged_lanes_reconverge() {
    // 3 if a0 is odd, otherwise a0 iterations of a loop. Then all lanes add a value of the reconverged
    // warp.
    let body = "
        and.b32 %d, %a0, 1; setp.eq.u32 %q, %d, 0; @%q bra EVEN;
        mov.u32 %d, 3; bra DONE;
        EVEN: mov.u32 %d, 0;
        LOOP: setp.ge.u32 %q, %d, %a0; @%q bra DONE; add.u32 %d, %d, 1; bra LOOP;
        DONE: activemask.b32 %a1; add.u32 %d, %d, %a1;";
    let rows: Vec<Vec<u32>> =
        (0..32u32).map(|i| vec![i, (if i % 2 == 1 { 3 } else { i }).wrapping_add(u32::MAX)]).collect();
    table32(body, &rows.iter().map(Vec::as_slice).collect::<Vec<_>>());
}

#[test]
fn tables_of_labels() {
    let body = "
        { TABLE: .branchtargets A, B, C; brx.idx %a0, TABLE; }
        A: mov.u32 %d, 10; bra.uni DONE;
        B: mov.u32 %d, 20; bra.uni DONE;
        C: mov.u32 %d, 30;
        DONE:";
    table32(body, &[&[0, 10], &[2, 30], &[1, 20], &[2, 30]]);
}

#[test]
fn names_are_local_to_their_braces() {
    let body = "
        mov.u32 %d, 1;
        { .reg .b32 %d; mov.u32 %d, 7; setp.ne.u32 %q, %a0, 0; @%q bra SKIP; add.u32 %a1, %a1, %d; SKIP: }
        { .reg .b32 t<2>; mov.u32 t1, 5; @%q bra SKIP; add.u32 %a1, %a1, t1; SKIP: }
        add.u32 %d, %d, %a1;";
    table32(body, &[&[0, 100, 113], &[1, 100, 101]]);
}

#[test]
fn functions_are_called() {
    let text = "
        .func (.param .b32 result) outer(.param .b32 a, .param .b32 b);
        .func (.param .b32 result) square(.param .b32 x) {
            .reg .b32 %r<3>; .reg .pred %p;
            ld.param.u32 %r1, [x]; setp.eq.u32 %p, %r1, 0; @%p bra ZERO;
            mul.lo.u32 %r2, %r1, %r1; st.param.b32 [result+0], %r2; ret;
            ZERO: st.param.b32 [result+0], 77; ret; }
        .visible .entry k(.param .u64 to) {
            .reg .b64 %rd<4>; .reg .b32 %r<6>;
            ld.param.u64 %rd1, [to]; mov.u32 %r1, %tid.x;
            { .param .b32 p0; st.param.b32 [p0], %r1; .param .b32 p1; st.param.b32 [p1], 3;
              .param .b32 back; call.uni (back), outer, (p0, p1); ld.param.b32 %r2, [back]; }
            mul.wide.u32 %rd2, %r1, 4; add.s64 %rd2, %rd2, %rd1; st.global.u32 [%rd2], %r2; ret; }
        .func (.param .b32 result) outer(.param .b32 a, .param .b32 b) {
            .reg .b32 %r<6>;
            ld.param.u32 %r1, [a]; ld.param.u32 %r2, [b];
            { .param .b32 p; st.param.b32 [p], %r1; .param .b32 back; call.uni (back), square, (p);
              ld.param.b32 %r3, [back]; }
            { .param .b32 p; st.param.b32 [p], %r2; .param .b32 back; call (back), square, (p);
              ld.param.b32 %r4, [back]; }
            add.u32 %r5, %r3, %r4; st.param.b32 [result], %r5; ret; }";
    let mut rig = Rig::new(text);
    let to = rig.machine.allocate(4 * 8).unwrap();
    rig.launch(8, &[to]).unwrap();
    assert_eq!(rig.words(to, 8), [86, 10, 13, 18, 25, 34, 45, 58]);
}

#[test]
fn grid_and_block_indices() {
    let text = ".visible .entry k(.param .u64 to) {
        .reg .b64 %rd<4>; .reg .b32 %r<20>;
        ld.param.u64 %rd1, [to];
        mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z;
        mov.u32 %r4, %ctaid.x; mov.u32 %r5, %ctaid.y; mov.u32 %r6, %ctaid.z;
        mov.u32 %r7, %ntid.x; mov.u32 %r8, %ntid.y; mov.u32 %r9, %ntid.z;
        mov.u32 %r10, %nctaid.x; mov.u32 %r11, %nctaid.y;
        // linear = ((block) * threads) + thread, each from its three parts
        mad.lo.u32 %r12, %r6, %r11, %r5; mad.lo.u32 %r12, %r12, %r10, %r4;
        mul.lo.u32 %r13, %r7, %r8; mul.lo.u32 %r13, %r13, %r9;
        mad.lo.u32 %r14, %r3, %r8, %r2; mad.lo.u32 %r14, %r14, %r7, %r1;
        mad.lo.u32 %r15, %r12, %r13, %r14;
        mul.wide.u32 %rd2, %r15, 4; add.s64 %rd2, %rd2, %rd1;
        mov.u32 %r16, %laneid; mov.u32 %r17, %warpid; mad.lo.u32 %r16, %r17, 32, %r16;
        st.global.u32 [%rd2], %r16; ret; }";
    let mut rig = Rig::new(text);
    let to = rig.machine.allocate(4 * 24 * 60).unwrap();
    let launch = crate::Launch {
        kernel: rig.kernel,
        grid: [2, 3, 4],
        block: [5, 4, 3],
        shared_bytes: 0,
        arguments: &[to],
    };
    rig.machine.launch(&launch).unwrap();
    let expected: Vec<u32> = (0..24).flat_map(|_| 0..60).collect();
    assert_eq!(rig.words(to, 24 * 60), expected);
}
