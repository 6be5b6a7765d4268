//! Tests of communication between lanes.

use super::{results, table32};

/// Returns one result per lane. Each lane's `%a0` is its number plus 100.
fn lanes(body: &str) -> Vec<u64> {
    results("%d", body, &(0..32).map(|lane| vec![100 + lane]).collect::<Vec<_>>())
}

#[test]
fn shuffles() {
    let expect = |body: &str, f: fn(u64) -> u64| {
        assert_eq!(lanes(body), (0..32).map(|lane| 100 + f(lane)).collect::<Vec<_>>(), "{body}");
    };
    expect("shfl.sync.bfly.b32 %d, %a0, 5, 31, -1;", |lane| lane ^ 5);
    expect("shfl.sync.idx.b32 %d, %a0, 3, 31, 0xffffffff;", |_| 3);
    // Segments of eight lanes.
    expect("shfl.sync.idx.b32 %d, %a0, 11, 0x181f, -1;", |lane| lane / 8 * 8 + 3);
    expect("shfl.sync.down.b32 %d, %a0, 4, 31, -1;", |lane| if lane < 28 { lane + 4 } else { lane });
    expect("shfl.sync.down.b32 %d, %a0, 1, 0x181f, -1;", |lane| if lane % 8 < 7 { lane + 1 } else { lane });
    expect("shfl.sync.up.b32 %d, %a0, 4, 0, -1;", |lane| if lane >= 4 { lane - 4 } else { lane });
    // The predicate is true if the source lane was in the segment.
    let valid: Vec<_> = (0..32).map(|lane| u64::from(lane < 28)).collect();
    assert_eq!(lanes("shfl.sync.down.b32 %d|%q, %a0, 4, 31, -1; selp.u32 %d, 1, 0, %q;"), valid);
    // Each half of the warp separately, in one instruction.
    let halves: Vec<_> = (0..32).map(|lane| 100 + lane / 16 * 16).collect();
    assert_eq!(
        lanes(
            "setp.lt.u32 %q, %t, 16; selp.b32 %a1, 0xffff, 0xffff0000, %q; and.b32 %a2, %t, 16;
               shfl.sync.idx.b32 %d, %a0, %a2, 31, %a1;"
        ),
        halves
    );
}

#[test]
fn votes() {
    let all = |value: u64| vec![value; 32];
    let odd = "and.b32 %a1, %a0, 1; setp.eq.u32 %q, %a1, 1;";
    assert_eq!(lanes(&format!("{odd} vote.sync.ballot.b32 %d, %q, -1;")), all(0xaaaa_aaaa));
    assert_eq!(lanes(&format!("{odd} vote.sync.ballot.b32 %d, !%q, -1;")), all(0x5555_5555));
    for (mode, result) in [("any", 1), ("all", 0), ("uni", 0)] {
        let body = format!("{odd} vote.sync.{mode}.pred %q, %q, -1; selp.u32 %d, 1, 0, %q;");
        assert_eq!(lanes(&body), all(result), "{mode}");
    }
    let big = "setp.gt.u32 %q, %a0, 50;";
    for mode in ["any", "all", "uni"] {
        let body = format!("{big} vote.sync.{mode}.pred %q, %q, -1; selp.u32 %d, 1, 0, %q;");
        assert_eq!(lanes(&body), all(1), "{mode}");
    }
}

#[test]
fn matches() {
    let expected: Vec<_> = (0..32usize)
        .map(|lane| (0..32).filter(|other| other % 3 == lane % 3).fold(0u64, |m, other| m | 1 << other))
        .collect();
    assert_eq!(lanes("rem.u32 %a1, %t, 3; match.any.sync.b32 %d, %a1, -1;"), expected);
    assert_eq!(lanes("match.all.sync.b32 %d|%q, 5, -1; selp.b32 %d, %d, 7, %q;"), vec![0xffff_ffff; 32]);
    assert_eq!(lanes("match.all.sync.b32 %d|%q, %t, -1; selp.b32 %d, 1, %d, %q;"), vec![0; 32]);
}

#[test]
fn lane_masks() {
    assert_eq!(lanes("mov.u32 %d, %lanemask_lt;")[5], 0b11111);
    assert_eq!(lanes("mov.u32 %d, %lanemask_le;")[5], 0b11_1111);
    assert_eq!(lanes("mov.u32 %d, %lanemask_eq;")[5], 1 << 5);
    assert_eq!(lanes("mov.u32 %d, %lanemask_gt;")[31], 0);
    assert_eq!(lanes("mov.u32 %d, %lanemask_ge;")[31], 1 << 31);
    table32("bar.warp.sync 1; mov.u32 %d, %nwarpid;", &[&[1]]);
}

#[test]
fn reductions() {
    let sum = (100..132).sum::<u64>();
    assert_eq!(lanes("redux.sync.add.u32 %d, %a0, -1;"), vec![sum; 32]);
    assert_eq!(lanes("redux.sync.max.u32 %d, %a0, -1;"), vec![131; 32]);
    assert_eq!(lanes("sub.s32 %a1, %t, 5; redux.sync.min.s32 %d, %a1, -1;"), vec![0xffff_fffb; 32]);
    assert_eq!(lanes("sub.s32 %a1, %t, 5; redux.sync.max.s32 %d, %a1, -1;"), vec![26; 32]);
    assert_eq!(lanes("redux.sync.or.b32 %d, %t, -1;"), vec![31; 32]);
    assert_eq!(lanes("redux.sync.and.b32 %d, %t, -1;"), vec![0; 32]);
    assert_eq!(lanes("redux.sync.xor.b32 %d, %t, -1;"), vec![0; 32]);
}
