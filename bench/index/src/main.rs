//! Compares Kvasir's prefix index with the published index crates under one load: see `bench/README.md`.
//!
//! Without arguments it runs itself once for every index, width and size, in turns, and prints the table.
//! Each child process measures one index and prints one line.
#![allow(clippy::expect_used, reason = "a bench that cannot go on says why and stops")]

mod heap;
mod indexes;
mod load;
mod report;

use indexes::{DynamoCompressed, DynamoRadix, Index, Kvasir, Smg};
use load::{CHAIN, Kind, Load};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Queries per kind.
const QUERIES: u64 = 4_000;
/// Chains whose events are prepared at a time.
const CHAINS: usize = 64;
/// (blocks, kind) of the measured lookups.
const LOOKUPS: [(usize, Kind); 4] =
    [(32, Kind::Hit), (CHAIN, Kind::Hit), (CHAIN, Kind::Half), (CHAIN, Kind::Miss)];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["one", index, workers, blocks] => {
            let number = |text: &str| text.parse().expect("a number");
            let load = Load { workers: number(workers), blocks: number(blocks) };
            let row = match *index {
                "kvasir" => measure::<Kvasir>(load),
                "smg" => measure::<Smg>(load),
                "dynamo-crtc" => measure::<DynamoCompressed>(load),
                "dynamo-radix" => measure::<DynamoRadix>(load),
                other => panic!("no index is called {other}"),
            };
            println!("{}", row.iter().map(f64::to_string).collect::<Vec<_>>().join(" "));
        }
        options => report::run(options.contains(&"--quick")),
    }
}

/// p50 and p99 in ns of each lookup, M blocks/s applied, and bytes per membership: live heap, and the index's
/// own account.
fn measure<I: Index>(load: Load) -> Vec<f64> {
    let before = heap::live();
    let mut index = I::new(load.workers);
    let mut applying = index.apply(load.system_prompts().collect());
    let chains: Vec<usize> = (0..load.chains()).collect();
    for chains in chains.chunks(CHAINS) {
        applying += index.apply(chains.iter().flat_map(|&chain| load.chain_events(chain)).collect());
    }
    drop(chains);
    let bytes = heap::live() - before;
    let mut row = Vec::new();
    for (len, kind) in LOOKUPS {
        row.extend(lookups(&index, load, len, kind));
    }
    row.push(load.memberships() as f64 / applying.as_secs_f64() / 1e6);
    row.push(bytes as f64 / load.memberships() as f64);
    row.push(index.reported_bytes().map_or(0.0, |bytes| bytes as f64 / load.memberships() as f64));
    row
}

fn lookups<I: Index>(index: &I, load: Load, len: usize, kind: Kind) -> [f64; 2] {
    let clock = clock();
    let mut times: Vec<f64> = Vec::new();
    for number in 0..QUERIES {
        let (chain, blocks, depth) = load.query(number, kind, len);
        // Just hashed, as in a router.
        let mut query = black_box(I::query(&blocks));
        let start = Instant::now();
        let answer = black_box(index.find(&mut query));
        times.push((start.elapsed().as_nanos() as f64 - clock).max(0.0));
        if number % 16 == 0 {
            for (worker, depth) in load.depths(chain, depth).into_iter().enumerate() {
                assert_eq!(I::depth(&answer, worker), depth, "worker {worker}, {kind:?} of {len}");
            }
        }
    }
    times.sort_by(f64::total_cmp);
    [times[times.len() / 2], times[times.len() * 99 / 100]]
}

/// Overhead of reading the clock twice.
fn clock() -> f64 {
    let mut times: Vec<Duration> = (0..1000).map(|_| Instant::now().elapsed()).collect();
    times.sort();
    times[times.len() / 2].as_nanos() as f64
}
