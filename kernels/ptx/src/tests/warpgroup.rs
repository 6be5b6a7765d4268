//! Tests of products of warp groups.

use super::{HEAD, Rig};
use crate::{FaultKind, Limits, Machine, RunError};
use half::bf16;

/// Faults in the order of a product and other instructions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Wrong {
    no_fence: bool,
    no_wait: bool,
    second_changes: bool,
    first_changes: bool,
}

/// A kernel of four warps: `out += first * second` with 64 rows and 16 columns. Each thread has its registers of the
/// first factor in `first` and of the sums in `out`. The second factor is 2 KiB that go to shared memory as they are;
/// `descriptor` has the fields besides the address.
fn text(types: &str, descriptor: u64, transposed: &str, wrong: Wrong) -> String {
    let fence = if wrong.no_fence { "" } else { "fence.proxy.async.shared::cta;" };
    let wait = if wrong.no_wait { "" } else { "wgmma.wait_group.sync.aligned 0;" };
    let between = match wrong {
        Wrong { second_changes: true, .. } => "bar.sync 0; st.shared.u32 [%r3], %r1;",
        Wrong { first_changes: true, .. } => "add.u32 %r10, %r10, 1;",
        _ => "",
    };
    format!(
        ".visible .entry k(.param .u64 p0, .param .u64 p1, .param .u64 p2) {{
        .shared .align 1024 .b8 second[2048];
        .reg .b64 %rd<9>; .reg .b32 %r<24>; .reg .f32 %f<8>;
        ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; ld.param.u64 %rd3, [p2]; mov.u32 %r1, %tid.x;
        shl.b32 %r2, %r1, 4; mov.u32 %r3, second; add.u32 %r3, %r3, %r2;
        mul.wide.u32 %rd4, %r1, 16; add.s64 %rd5, %rd2, %rd4; cp.async.cg.shared.global [%r3], [%rd5], 16;
        cp.async.commit_group; cp.async.wait_group 0; {fence} bar.sync 0;
        add.s64 %rd6, %rd1, %rd4; ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%rd6];
        mul.wide.u32 %rd7, %r1, 32; add.s64 %rd7, %rd7, %rd3;
        ld.global.v4.f32 {{%f0, %f1, %f2, %f3}}, [%rd7]; ld.global.v4.f32 {{%f4, %f5, %f6, %f7}}, [%rd7+16];
        mov.u32 %r4, second; shr.u32 %r4, %r4, 4; cvt.u64.u32 %rd8, %r4; or.b64 %rd8, %rd8, {descriptor};
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n16{types} {{%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7}},
            {{%r10, %r11, %r12, %r13}}, %rd8, 1, 1, 1{transposed};
        wgmma.commit_group.sync.aligned; {between} {wait}
        st.global.v4.f32 [%rd7], {{%f0, %f1, %f2, %f3}}; st.global.v4.f32 [%rd7+16], {{%f4, %f5, %f6, %f7}}; ret; }}"
    )
}

/// Runs [`text`] with the sums 0, 1, 2, .. and returns them.
fn run(text: &str, first: &[u8], second: &[u8]) -> Result<Vec<f32>, RunError> {
    let mut machine = Machine::new(Limits::HOPPER, 1);
    let module = machine.load(&format!("{HEAD}{text}")).unwrap();
    let kernel = machine.kernel(module, "k").unwrap();
    let mut rig = Rig { machine, kernel };
    let p = [first, second].map(|bytes| rig.upload(bytes.iter().map(|&b| [b])));
    let out = rig.upload((0..128 * 8).map(|i| (i as f32).to_le_bytes()));
    rig.launch(128, &[p[0], p[1], out])?;
    Ok(rig.words(out, 128 * 8).into_iter().map(f32::from_bits).collect())
}

/// Small numbers that differ between positions.
fn small(i: usize) -> f32 {
    (i * 7 % 13) as f32 - 6.0
}

/// Element types with the bytes of an element.
#[derive(Debug, Clone, Copy)]
enum Element {
    Bf16,
    E4m3,
}

impl Element {
    fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::E4m3 => 1,
        }
    }

    /// Bytes of a whole number from -6 to 6.
    fn encode(self, value: f32) -> Vec<u8> {
        let exact = [0x00, 0x38, 0x40, 0x44, 0x48, 0x4a, 0x4c];
        match self {
            Self::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
            Self::E4m3 => vec![exact[value.abs() as usize] | if value < 0.0 { 0x80 } else { 0 }],
        }
    }
}

/// Registers of the first factor of each thread: rows `16 w + l / 4` and 8 further, four bytes of a row each.
fn first_of(element: Element) -> Vec<u8> {
    let mut bytes = Vec::new();
    let (depth, each) = (32 / element.bytes(), 4 / element.bytes());
    for thread in 0..128 {
        for register in 0..4 {
            let row = thread / 32 * 16 + thread % 32 / 4 + 8 * (register % 2);
            let from = thread % 4 * each + register / 2 * 4 * each;
            bytes.extend((from..from + each).flat_map(|k| element.encode(small(row * depth + k))));
        }
    }
    bytes
}

/// Places the second factor's 16 columns of 32 bytes in 2 KiB by their address.
fn second_of(element: Element, address: impl Fn(usize, usize) -> usize) -> Vec<u8> {
    let depth = 32 / element.bytes();
    let mut bytes = vec![0x55; 2048];
    for column in 0..16 {
        for k in 0..depth {
            let at = address(column, k * element.bytes());
            let value = element.encode(small(3 + column * depth + k));
            bytes[at..at + value.len()].copy_from_slice(&value);
        }
    }
    bytes
}

/// Atoms of eight rows of 128 bytes, of which 16 bytes each are permuted by the row.
fn swizzled(column: usize, byte: usize) -> usize {
    column / 8 * 1024 + column % 8 * 128 + ((byte / 16) ^ (column % 8)) * 16 + byte % 16
}

/// Eight columns of 16 bytes next to each other; the other half of their rows 512 bytes further.
fn plain(column: usize, byte: usize) -> usize {
    byte / 16 * 512 + column / 8 * 128 + column % 8 * 16 + byte % 16
}

const SWIZZLED: u64 = 1 << 62 | (1024 >> 4) << 32;
const PLAIN: u64 = (128 >> 4) << 32 | (512 >> 4) << 16;
const BF16: (&str, &str) = ("k16.f32.bf16.bf16", ", 0");

#[test]
fn sums_equal_the_definition() {
    for (element, (types, transposed)) in [(Element::Bf16, BF16), (Element::E4m3, ("k32.f32.e4m3.e4m3", ""))]
    {
        let depth = 32 / element.bytes();
        let expected: Vec<f32> = (0..128 * 8)
            .map(|i| {
                let (thread, i_sum) = (i / 8, i % 8);
                let row = thread / 32 * 16 + thread % 32 / 4 + 8 * (i_sum / 2 % 2);
                let column = i_sum / 4 * 8 + thread % 4 * 2 + i_sum % 2;
                let dot: f32 =
                    (0..depth).map(|k| small(row * depth + k) * small(3 + column * depth + k)).sum();
                dot + i as f32
            })
            .collect();
        for (descriptor, address) in
            [(SWIZZLED, swizzled as fn(usize, usize) -> usize), (PLAIN, plain as fn(usize, usize) -> usize)]
        {
            let text = text(types, descriptor, transposed, Wrong::default());
            let sums = run(&text, &first_of(element), &second_of(element, address)).unwrap();
            assert_eq!(sums, expected, "{element:?} {descriptor:#x}");
        }
    }
}

#[test]
fn a_product_needs_a_fence_and_factors_that_stay_until_it_was_waited_for() {
    let element = Element::Bf16;
    let run = |descriptor, wrong| {
        run(&text(BF16.0, descriptor, BF16.1, wrong), &first_of(element), &second_of(element, swizzled))
    };
    let fault = |descriptor, wrong| match run(descriptor, wrong) {
        Err(RunError::Fault(fault)) => match fault.kind {
            FaultKind::Invalid { what } => what,
            other => panic!("{other}"),
        },
        other => panic!("{wrong:?}: {other:?}"),
    };
    assert!(fault(SWIZZLED, Wrong { no_fence: true, ..Wrong::default() }).contains("fence.proxy.async"));
    for wrong in [
        Wrong { first_changes: true, ..Wrong::default() },
        Wrong { second_changes: true, ..Wrong::default() },
    ] {
        let what = fault(SWIZZLED, wrong);
        assert!(what.contains("before it was waited for") || what.contains("fence.proxy.async"), "{what}");
    }
    assert!(fault(SWIZZLED | 2 << 62, Wrong::default()).contains("mode 3"));
    assert!(fault(SWIZZLED | 1 << 49, Wrong::default()).contains("other fields"));
    // Without a wait the sums are as before.
    let sums = run(SWIZZLED, Wrong { no_wait: true, ..Wrong::default() }).unwrap();
    assert_eq!(sums, (0..128 * 8).map(|i| i as f32).collect::<Vec<_>>());
}

#[test]
fn other_forms_are_refused() {
    for (types, transposed) in [
        ("k16.f32.bf16.f16", ", 0"),
        ("k32.f32.bf16.bf16", ", 0"),
        ("k16.f32.bf16.bf16", ", 1"),
        ("k16.f16.f16.f16", ", 0"),
    ] {
        let text = text(types, SWIZZLED, transposed, Wrong::default());
        assert!(
            Machine::new(Limits::HOPPER, 1).load(&format!("{HEAD}{text}")).is_err(),
            "{types}{transposed}"
        );
    }
}
