//! Every check with a kernel that violates it.

use super::{HEAD, Rig};
use crate::{FaultKind, Launch, Limits, Machine, RunError};

/// Returns the fault of a launch. Panics if there is none.
fn fault(result: Result<crate::Counts, RunError>) -> crate::Fault {
    match result {
        Err(RunError::Fault(fault)) => *fault,
        other => panic!("no fault: {other:?}"),
    }
}

/// A kernel with a pointer in `%rd1`, the thread in `%r1`, 64 words of shared memory, and source lines.
fn kernel(body: &str) -> String {
    format!(
        ".visible .entry k(.param .u64 p) {{
        .reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .pred %p<9>; .shared .align 16 .b8 s[256];
        .loc 1 10 1
        ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;
        mov.u64 %rd4, s; add.s64 %rd5, %rd4, %rd2;
        {body}
        ret; }}
        .file 1 \"/somewhere/kernel.cu\""
    )
}

fn run(body: &str, threads: u32) -> Result<crate::Counts, RunError> {
    let mut rig = Rig::new(&kernel(body));
    let p = rig.upload((0..64u32).map(u32::to_le_bytes));
    rig.launch(threads, &[p])
}

#[test]
fn a_read_past_the_end_is_reported() {
    let found = fault(run(".loc 1 42 1\n ld.global.u32 %r2, [%rd3];", 65));
    assert!(matches!(found.kind, FaultKind::OutOfBounds { bytes: 4, .. }), "{found}");
    assert_eq!((found.block, found.thread), ([0; 3], [64, 0, 0]));
    let message = found.to_string();
    for text in [
        "0 bytes past the end of an allocation of 256 bytes",
        "kernel k",
        "kernel.cu:42",
        "ld.global.u32 %r2, [%rd3];",
    ] {
        assert!(message.contains(text), "{message}");
    }
    run("ld.global.u32 %r2, [%rd3];", 64).unwrap();
}

#[test]
fn a_prefetch_outside_of_all_memory_is_reported() {
    for level in ["global.L1", "global.L2", "L2", "global.L2::evict_last"] {
        let body = format!(".loc 1 42 1\n prefetch.{level} [%rd3];");
        // Addresses need no alignment, and no bytes are read.
        let counts = run(&format!("{body} prefetch.{level} [%rd3+3];"), 64).unwrap();
        assert_eq!((counts.prefetches, counts.global_read), (128, 0));
        let found = fault(run(&body, 65));
        assert!(matches!(found.kind, FaultKind::OutOfBounds { bytes: 1, .. }), "{found}");
        assert!(found.to_string().contains("kernel.cu:42"), "{found}");
        // A lane whose guard is false prefetches nothing.
        run(&format!("setp.lt.u32 %p1, %r1, 64; @%p1 prefetch.{level} [%rd3];"), 96).unwrap();
    }
    // Bytes that nothing has written may be prefetched. Shared memory has no cache, and every address in it will do.
    let mut rig =
        Rig::new(&kernel("prefetch.global.L2 [%rd3]; cvta.shared.u64 %rd6, %rd4; prefetch.L1 [%rd6+4096];"));
    let p = rig.machine.allocate(256).unwrap();
    rig.launch(64, &[p]).unwrap();
    rig.machine.free(p).unwrap();
    assert!(matches!(fault(rig.launch(1, &[p])).kind, FaultKind::Freed { .. }));
    assert!(matches!(fault(run("prefetch.local.L1 [%rd4+4];", 1)).kind, FaultKind::OutOfBounds { .. }));
}

#[test]
fn a_missing_barrier_is_reported() {
    let body = |barrier: &str| {
        format!(
        ".loc 1 20 1\n st.shared.u32 [%rd5], %r1;\n {barrier}
         .loc 1 22 1\n xor.b32 %r3, %r1, 32; mul.wide.u32 %rd6, %r3, 4; add.s64 %rd6, %rd4, %rd6;\n ld.shared.u32 %r4, [%rd6];"
    )
    };
    run(&body("bar.sync 0;"), 64).unwrap();
    let found = fault(run(&body(""), 64));
    // The second warp detects it, either as a race or as a read of an unwritten word.
    let message = found.to_string();
    assert!(
        matches!(found.kind, FaultKind::Unwritten { space: "shared", .. } | FaultKind::Race { .. }),
        "{message}"
    );
    assert!(message.contains("kernel.cu:22"), "{message}");
    // If the words were written before, it is a race, and the message names both locations.
    let message = fault(run(&format!("st.shared.u32 [%rd5], 0; bar.sync 0; {}", body("")), 64)).to_string();
    for text in ["race at", "shared memory", "kernel.cu:20", "kernel.cu:22", "st.shared.u32"] {
        assert!(message.contains(text), "{message}");
    }
}

/// A kernel that waits for the ones before it may only prefetch before that.
#[test]
fn global_memory_is_used_after_the_wait_for_earlier_kernels() {
    let wait = "griddepcontrol.wait; griddepcontrol.launch_dependents;";
    run(
        &format!("prefetch.global.L2 [%rd3]; st.shared.u32 [%rd5], 0; {wait} ld.global.u32 %r2, [%rd3];"),
        64,
    )
    .unwrap();
    for (early, what) in [
        ("ld.global.u32 %r2, [%rd3];", "this read"),
        ("ld.u32 %r2, [%rd3];", "this read"),
        ("st.global.u32 [%rd3], 0;", "this write"),
        ("red.global.add.u32 [%rd1], 1;", "this write"),
        ("cp.async.ca.shared.global [%rd5], [%rd3], 4; cp.async.wait_all;", "this read"),
        ("setp.eq.u32 %p1, %r1, 40; @%p1 ret;", "this exit"),
    ] {
        let message = fault(run(&format!(".loc 1 42 1\n {early} {wait}"), 64)).to_string();
        assert!(message.contains(what) && message.contains("kernel.cu:42"), "{message}");
        // Without the wait the kernel is launched after the others have ended.
        run(early, 64).unwrap();
    }
    // Generic addresses of shared memory.
    run(&format!("cvta.shared.u64 %rd6, %rd5; st.u32 [%rd6], 0; ld.u32 %r2, [%rd6]; {wait}"), 64).unwrap();
    // A lane that jumps over the wait.
    let jumps = "setp.eq.u32 %p1, %r1, 40; @%p1 bra END; griddepcontrol.wait; END: st.global.u32 [%rd3], 0;";
    assert!(matches!(fault(run(jumps, 64)).kind, FaultKind::BeforeWait { access: "write" }));
}

#[test]
fn memory_that_kernels_write_is_not_loaded_as_constant() {
    let mut rig = Rig::new(&kernel("ld.global.nc.u32 %r2, [%rd3]; st.global.u8 [%rd1+256], 1;"));
    let (p, other) = (rig.machine.allocate_zeroed(512).unwrap(), rig.machine.allocate_zeroed(512).unwrap());
    rig.launch(32, &[p]).unwrap();
    let found = fault(rig.launch(32, &[p]));
    assert!(matches!(found.kind, FaultKind::NotConstant { bytes: 4, .. }), "{found}");
    rig.launch(32, &[other]).unwrap();
}

#[test]
fn two_warps_that_write_one_word_race() {
    let found = fault(run("st.shared.u32 [s], %r1;", 64));
    assert!(matches!(found.kind, FaultKind::Race { access: "write", .. }), "{found}");
    run("st.shared.u32 [s], 5;", 32).unwrap();
    // Different bytes of one word do not race.
    run(
        "add.s64 %rd6, %rd4, %rd2; cvt.u64.u32 %rd7, %r1; add.s64 %rd7, %rd4, %rd7; st.shared.u8 [%rd7], 1;",
        64,
    )
    .unwrap();
    // Reads, then writes, without a barrier between.
    let body = "st.shared.u32 [%rd5], 0; bar.sync 0; ld.shared.u32 %r2, [s+8]; st.shared.u32 [%rd5], 1;";
    assert!(fault(run(body, 64)).to_string().contains("race"));
}

#[test]
fn a_divergent_barrier_is_reported() {
    let found = fault(run(".loc 1 30 1\n setp.gt.u32 %p1, %r1, 7; @%p1 bra SKIP; bar.sync 0; SKIP:", 32));
    let message = found.to_string();
    assert!(matches!(found.kind, FaultKind::DivergentBarrier { .. }), "{message}");
    assert!(message.contains("kernel.cu:30") && message.contains("0xffffff00"), "{message}");
    // Two barriers in two branches of whole warps.
    let body = "setp.gt.u32 %p1, %r1, 31; @%p1 bra ELSE;\n .loc 1 33 1\n bar.sync 0;\n bra DONE; ELSE:\n .loc 1 35 1\n bar.sync 0; DONE:";
    let message = fault(run(body, 64)).to_string();
    assert!(message.contains("kernel.cu:33") && message.contains("kernel.cu:35"), "{message}");
    // Whole warps that have exited do not count.
    run("setp.gt.u32 %p1, %r1, 31; @%p1 exit; bar.sync 0;", 64).unwrap();
}

#[test]
fn a_shuffle_after_a_partial_exit_is_reported() {
    let body =
        "setp.gt.u32 %p1, %r1, 19; @%p1 exit;\n .loc 1 50 1\n shfl.sync.bfly.b32 %r2, %r1, 16, 31, -1;";
    let found = fault(run(body, 32));
    let message = found.to_string();
    assert!(
        matches!(found.kind, FaultKind::MissingLanes { expected: u32::MAX, present: 0x000f_ffff, .. }),
        "{message}"
    );
    assert!(message.contains("kernel.cu:50") && message.contains("shfl.sync.bfly.b32"), "{message}");
    let reads = "setp.gt.u32 %p1, %r1, 15; @%p1 exit; shfl.sync.bfly.b32 %r2, %r1, 16, 31, 0xffff;";
    assert!(matches!(fault(run(reads, 32)).kind, FaultKind::MissingLanes { .. }));
    run("setp.gt.u32 %p1, %r1, 15; @%p1 exit; shfl.sync.bfly.b32 %r2, %r1, 8, 31, 0xffff;", 32).unwrap();
}

#[test]
fn addresses_are_checked() {
    let misaligned = fault(run("ld.global.v2.u32 {%r2, %r3}, [%rd1+4];", 1));
    assert!(matches!(misaligned.kind, FaultKind::Misaligned { space: "global", bytes: 8, .. }));
    assert!(matches!(
        fault(run("st.shared.u32 [s+256], 0;", 1)).kind,
        FaultKind::OutOfBounds { space: "shared", .. }
    ));
    assert!(matches!(
        fault(run("st.shared.u32 [s+2], 0;", 1)).kind,
        FaultKind::Misaligned { space: "shared", .. }
    ));
    assert!(matches!(
        fault(run("ld.shared.u32 %r2, [s];", 1)).kind,
        FaultKind::Unwritten { space: "shared", .. }
    ));
    assert!(matches!(
        fault(run("ld.param.u32 %r2, [p+8];", 1)).kind,
        FaultKind::OutOfBounds { space: "param", .. }
    ));
    assert!(
        fault(run("ld.global.u32 %r2, [%rd1+-4];", 1)).to_string().contains("4 bytes before an allocation")
    );
    assert!(fault(run("ld.global.u32 %r2, [%rd2];", 1)).to_string().contains("nothing is near"));
    assert!(matches!(fault(run("trap;", 1)).kind, FaultKind::Trap));
}

#[test]
fn reads_of_unwritten_or_freed_memory_are_reported() {
    let mut rig = Rig::new(&kernel("ld.global.u32 %r2, [%rd3];"));
    let p = rig.machine.allocate(128).unwrap();
    rig.machine.fill(p, 0, 124).unwrap();
    let found = fault(rig.launch(32, &[p]));
    assert!(matches!(found.kind, FaultKind::Unwritten { space: "global", .. }), "{found}");
    assert_eq!(found.thread, [31, 0, 0]);
    rig.machine.fill(p + 124, 0, 4).unwrap();
    rig.launch(32, &[p]).unwrap();
    rig.machine.free(p).unwrap();
    assert!(matches!(fault(rig.launch(32, &[p])).kind, FaultKind::Freed { .. }));
}

#[test]
fn launches_are_checked() {
    let text =
        format!("{HEAD}.visible .entry k(.param .u64 p) .maxntid 64, 1, 1 {{ .shared .b8 s[1024]; ret; }}");
    let mut machine = Machine::new(Limits::GB10, 1);
    let module = machine.load(&text).unwrap();
    assert!(machine.kernel(module, "other").is_none());
    let kernel = machine.kernel(module, "k").unwrap();
    let good = Launch { kernel, grid: [1; 3], block: [64, 1, 1], shared_bytes: 98 << 10, arguments: &[0] };
    machine.launch(&good).unwrap();
    for (launch, text) in [
        (Launch { block: [65, 1, 1], ..good }, "compiled for"),
        (Launch { block: [2048, 1, 1], ..good }, "1024 is the most"),
        (Launch { block: [0, 1, 1], ..good }, "a block of"),
        (Launch { grid: [0, 1, 1], ..good }, "a grid of"),
        (Launch { shared_bytes: 99 << 10, ..good }, "bytes of shared memory"),
        (Launch { arguments: &[], ..good }, "0 arguments for 1 parameters"),
    ] {
        let message = machine.launch(&launch).unwrap_err().to_string();
        assert!(message.contains(text), "{message}");
    }
}

#[test]
fn counts_and_coverage() {
    let mut rig = Rig::new(&kernel(
        "ld.global.u32 %r2, [%rd3]; setp.lt.u32 %p1, %r2, 1000; @%p1 bra DONE;\n .loc 1 77 1\n st.global.u32 [%rd3], 0;\n DONE:",
    ));
    let p = rig.upload((0..64u32).map(u32::to_le_bytes));
    let counts = rig.launch(48, &[p]).unwrap();
    // Six instructions before the body, three in it, and the end.
    assert_eq!((counts.warp_instructions, counts.lane_instructions), (20, 480));
    assert_eq!((counts.global_read, counts.global_written), (192, 0));
    let uncovered = rig.machine.uncovered(rig.kernel);
    assert_eq!(uncovered.len(), 1);
    assert_eq!(
        (uncovered[0].instruction.as_str(), uncovered[0].source_line.as_str()),
        ("st.global.u32 [%rd3], 0;", "kernel.cu:77")
    );
    rig.machine.write(p, &2000u32.to_le_bytes()).unwrap();
    rig.launch(48, &[p]).unwrap();
    assert_eq!(rig.machine.uncovered(rig.kernel), []);
}

#[test]
fn races_between_blocks_are_reported() {
    let rig = |body: &str| {
        let mut rig = Rig::new(&kernel(&format!("mov.u32 %r5, %ctaid.x; {body}")));
        let p = rig.upload((0..64u32).map(u32::to_le_bytes));
        rig.launch_grid(4, 32, 0, &[p])
    };
    let found = fault(rig(".loc 1 80 1\n st.global.u32 [%rd3], %r5;"));
    let message = found.to_string();
    assert!(matches!(found.kind, FaultKind::Race { space: "global", access: "write", .. }), "{message}");
    assert!(message.contains("kernel.cu:80") && message.contains("of block"), "{message}");
    rig("st.global.u32 [%rd3], 7;").unwrap();
    // Each block writes its own word, and then reads its neighbour's.
    let own = "mul.wide.u32 %rd6, %r5, 4; add.s64 %rd6, %rd6, %rd1; st.global.u32 [%rd6], %r5;";
    rig(own).unwrap();
    let next = "xor.b32 %r6, %r5, 1; mul.wide.u32 %rd7, %r6, 4; add.s64 %rd7, %rd7, %rd1; ld.global.u32 %r7, [%rd7];";
    assert!(matches!(fault(rig(&format!("{own} {next}"))).kind, FaultKind::Race { access: "read", .. }));
    // An atomic may order the block after the other one.
    rig(&format!("{own} membar.gl; atom.global.add.u32 %r8, [%rd1+128], 1; {next}")).unwrap();
}

#[test]
fn a_kernel_without_progress_is_stopped() {
    let found =
        fault(run("setp.gt.u32 %p1, %r1, 31; @%p1 bra WAIT; bar.sync 1, 64;\n WAIT: bar.sync 0;", 64));
    assert!(matches!(found.kind, FaultKind::Stuck { .. }), "{found}");
}

#[test]
fn the_order_depends_on_the_seed_and_changes_no_result() {
    let text = kernel(
        "mov.u32 %r5, %ctaid.x; mad.lo.u32 %r6, %r5, 64, %r1; st.shared.u32 [%rd5], %r6; bar.sync 0;
         xor.b32 %r7, %r1, 33; mul.wide.u32 %rd6, %r7, 4; add.s64 %rd6, %rd6, %rd4; ld.shared.u32 %r8, [%rd6];
         mul.wide.u32 %rd7, %r6, 4; add.s64 %rd7, %rd7, %rd1; st.global.u32 [%rd7], %r8;",
    );
    let expected: Vec<u32> = (0..5 * 64).map(|i| i ^ 33).collect();
    for seed in 0..8 {
        let mut rig = Rig::with(&text, Limits::GB10, seed);
        let p = rig.machine.allocate(4 * 5 * 64).unwrap();
        rig.launch_grid(5, 64, 0, &[p]).unwrap();
        assert_eq!(rig.words(p, 5 * 64), expected, "{seed}");
    }
}
