//! R4, `sec_alloc_guard`: for any input, decoding allocates at most twice the cap of the frame. This test
//! is alone in its binary, because it counts every allocation of the process.
#![allow(unsafe_code, reason = "a global allocator is an unsafe trait")]
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]
#![allow(dead_code, reason = "the samples' other users are in the suite")]

mod suite {
    pub(crate) mod samples;
}

use suite::samples;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counting;

fn grown(size: usize) {
    let live = LIVE.fetch_add(size, Relaxed) + size;
    PEAK.fetch_max(live, Relaxed);
}

// SAFETY: every call is passed on unchanged to the system's allocator, whose contract the caller keeps. The
// counters touch no allocated memory. `realloc` is the default one, which allocates, copies and frees, so
// that both copies count.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: the caller keeps `alloc`'s contract, which is the same one.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps `dealloc`'s contract; `pointer` came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the largest number of bytes allocated at the same time by `run`.
fn peak(run: impl FnOnce()) -> usize {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    run();
    PEAK.load(Relaxed) - before
}

/// Encodes a number in bincode's longest form.
fn number(value: u64) -> Vec<u8> {
    [&[0xfd][..], &value.to_le_bytes()].concat()
}

/// A simple generator: the inputs need variety, not quality.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
}

/// Lists with the most elements that fit a frame; each element is as small on the wire and as large in
/// memory as possible: (message, description, first bytes, one element).
fn full_lists() -> Vec<(&'static str, &'static str, Vec<u8>, Vec<u8>)> {
    let list = |head: &[u8], count: u64| [head, &number(count)].concat();
    let id = [0; 16];
    let removed_one = [&[1, 1][..], &id, &[0]].concat();
    let run_of_one = [&id[..], &[1], &id, &[0]].concat();
    let token = [&[0, 0, 1, 0, 0, 0, 0, 20][..], &[0; 100]].concat();
    let sequence = [&[0, 0, 8][..], &[0; 16], &[0]].concat();
    let stored = [&[0, 0, 0, 1, 0][..], &id].concat();
    vec![
        ("KvFrame", "empty events", list(&[0, 0, 0], 32_768), vec![2]),
        ("KvFrame", "events of one unit", list(&[0, 0, 0], 32_768), removed_one.clone()),
        ("KvFrame", "one event of many units", list(&stored, 262_000), id.to_vec()),
        ("KvReplay", "empty events", list(&[0, 0, 0], 32_768), vec![2]),
        ("KvReplay", "events of one unit", list(&[0, 0, 0], 32_768), removed_one),
        ("KvSnapshotFrame", "empty runs", list(&[1], 65_536), [&id[..], &[0, 0]].concat()),
        ("KvSnapshotFrame", "runs of one unit", list(&[1], 65_536), run_of_one),
        ("KvSnapshotFrame", "resume points", list(&[3], 65_536), [&id[..], &[0, 0]].concat()),
        ("StageStep", "empty sequences", list(&[0, 0, 0], 4096), sequence),
        ("StageStep", "one long table", list(&[0, 0, 0, 1, 0, 0, 1, 0], 4_000_000), vec![1]),
        ("GenerateFrame", "empty tokens", list(&[1], 4096), vec![0, 0, 0]),
        ("GenerateFrame", "tokens with alternatives", list(&[1], 4096), token),
    ]
}

#[test]
fn sec_alloc_guard() {
    let mut worst = (0.0, String::new());
    let mut tried = 0;
    for samples in samples::all() {
        let (name, cap) = (samples.name, samples.cap);
        let mut check = |what: String, bytes: &[u8]| {
            let used = peak(|| drop((samples.recode)(bytes, cap)));
            let ratio = used as f64 / cap.bytes() as f64;
            assert!(ratio <= 2.0, "{name}, {what}: {used} bytes allocated, the cap is {}", cap.bytes());
            if ratio > worst.0 {
                worst = (ratio, format!("{name}, {what}"));
            }
            tried += 1;
        };
        let lengths = [cap.bytes() / 2, cap.bytes() - 64, cap.bytes(), 1 << 32, usize::MAX];
        for bytes in &samples.bytes {
            // A wrong length at every position, with nothing behind it.
            for at in 0..bytes.len() {
                for length in lengths {
                    let head = [&bytes[..at], &number(length as u64)].concat();
                    check(format!("length {length} at {at}"), &head);
                }
            }
        }
        for (_, what, head, element) in full_lists().into_iter().filter(|list| list.0 == name) {
            let room = cap.bytes() - head.len();
            let mut bytes = head;
            bytes.extend(element.iter().cycle().take(room));
            check(format!("full of {what}"), &bytes);
        }
        if matches!(name, "GenerateRequest" | "EncodeRequest") {
            // At every position that may be a token list's length: two million tokens.
            for at in 0..samples.bytes[0].len() {
                let mut bytes = [&samples.bytes[0][..at], &number(2_090_000)].concat();
                bytes.resize(cap.bytes(), 0);
                check(format!("a long list at {at}"), &bytes);
            }
        }
        let mut noise = Noise(7);
        for round in 0..200 {
            let len = noise.next() as usize % 300;
            let variant = noise.next() % samples.bytes.len() as u64;
            let mut bytes = vec![variant as u8];
            bytes.extend((0..len).map(|_| noise.next() as u8));
            check(format!("noise {round}"), &bytes);
        }
    }
    println!("{tried} inputs; the worst allocates {:.2} x its cap: {}", worst.0, worst.1);
    assert!(worst.0 > 0.3, "the inputs provoke nothing: {worst:?}");
}
