//! The prefix index reports its memory correctly and never exceeds its budget, not even temporarily. This
//! test is alone in its binary, because it counts every allocation of the process.
#![allow(unsafe_code, reason = "a global allocator is an unsafe trait")]
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use kvasir_router::prefix_index::PrefixIndex;
use kvasir_router::slot::Slot;
use proto::block::BlockId;
use proto::event::{KvEvent, KvEventBatch, Medium};
use proto::ids::Epoch;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call is passed on unchanged to the system allocator, whose contract is the caller's. The
// counters touch no memory that is handed out. `realloc` is the default implementation, which allocates,
// copies and frees, so that both copies count.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(live, Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above, for `dealloc`; the memory came from `System`, like all of this allocator's.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static HEAP: Counting = Counting;

const WORKERS: usize = 12;
/// Memory outside the index: the streams, and the message being applied.
const OUTSIDE_INDEX: u64 = 64 << 10;

fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Unit `at` of chain `chain`. The first 40 units are those of one of four chains.
fn unit(chain: u64, at: u64) -> BlockId {
    let chain = if at < 40 { chain % 4 } else { chain };
    let (a, b) = (mix(chain << 20 ^ at), mix(chain ^ at << 40));
    BlockId([a.to_le_bytes(), b.to_le_bytes()].concat().try_into().unwrap())
}

#[test]
fn the_reported_bytes_match_the_heap_and_the_budget_holds() {
    let budget = 1 << 20;
    let base = LIVE.load(Relaxed) as u64;
    PEAK.store(base as usize, Relaxed);
    let mut index = PrefixIndex::new(budget);
    let slots: Vec<Slot> = (0..WORKERS).filter_map(Slot::new).collect();
    let mut sequences = [0u64; WORKERS];
    let batch = |sequence, events| KvEventBatch { epoch: Epoch(1), first_sequence: sequence, events };
    for &slot in &slots {
        index.join(slot, Epoch(1));
        index.replayed(slot, Epoch(1), Some(batch(1, Vec::new()))).unwrap();
    }
    let mut reservations = Vec::new();
    for step in 0..6_000u64 {
        let random = mix(step);
        let (worker, chain) = ((random % WORKERS as u64) as usize, (random >> 8) % 600);
        let slot = slots[worker];
        let from = (random >> 24) % 200;
        let until = from + 1 + (random >> 40) % 100;
        let units = |step: usize| (from..until).step_by(step).map(|at| unit(chain, at)).collect::<Vec<_>>();
        let event = match random >> 56 {
            0..120 => {
                let parent = unit(chain, from.wrapping_sub(1));
                KvEvent::Stored { parent, units: units(1), medium: Medium::Device }
            }
            120..160 => KvEvent::Removed { units: units(2), medium: Medium::Device },
            160..200 => KvEvent::Removed { units: units(1), medium: Medium::Device },
            200..202 => KvEvent::Cleared,
            202..225 => {
                let chain: Arc<[BlockId]> = (0..until).map(|at| unit(chain, at)).collect();
                reservations.push(index.reserve(slot, chain));
                continue;
            }
            _ if reservations.is_empty() => continue,
            _ => {
                index.release(reservations.swap_remove(random as usize % reservations.len()));
                continue;
            }
        };
        sequences[worker] += 1;
        index.apply(slot, batch(sequences[worker], vec![event])).unwrap();
        let (live, reported) = (LIVE.load(Relaxed) as u64 - base, index.size().bytes);
        assert!(reported <= budget, "step {step}: {reported}");
        assert!(
            live <= reported + OUTSIDE_INDEX && reported <= live + live / 8 + OUTSIDE_INDEX,
            "step {step}: {live}, says {reported}"
        );
    }
    let size = index.size();
    assert!(size.refused > 0, "the budget is reached: {size:?}");
    assert!(size.bytes > budget / 10 * 7, "and used: {size:?}");
    let peak = PEAK.load(Relaxed) as u64 - base;
    assert!(peak <= budget + OUTSIDE_INDEX, "{peak}");
}
