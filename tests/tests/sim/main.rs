//! Seeded simulation of the coordinators' agreement, with virtual network, disks and clocks around the real
//! cores, and of token streams around the real balancer. A failure prints its seed. `SIM_SEED=n` runs one
//! seed, `SIM_SEEDS=n` runs n seeds: `SIM_SEEDS=20000 cargo test --release -p kvasir-cluster-tests --test sim
//! many -- --nocapture`.

mod bugs;
mod client;
mod disk;
mod invariants;
mod network;
mod operator;
mod streams;
mod world;

use bugs::Bug;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use streams::Numbering;
use world::{Plan, Report, run};

/// Seeds of a run without `SIM_SEEDS`.
const DEFAULT_SEEDS: u64 = 2_000;
/// Microseconds with faults in a run.
const TROUBLE: u64 = 10_000_000;

fn plan(seed: u64) -> Plan {
    Plan { seed, trouble: TROUBLE, bug: None }
}

/// Runs a seed and asserts that all invariants hold.
fn holds(seed: u64) -> Report {
    let outcome = catch_unwind(AssertUnwindSafe(|| run(plan(seed))));
    match outcome {
        Ok(Ok(report)) => report,
        Ok(Err(violation)) => panic!("SIM_SEED={seed}: {}", violation.0),
        Err(_) => panic!("SIM_SEED={seed}: a core has panicked"),
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{variable}={text}")))
}

/// Runs seeds on all CPUs and sums their reports.
fn sweep<const N: usize>(seeds: Range<u64>, run: impl Fn(u64) -> [usize; N] + Sync) -> [usize; N] {
    let next = AtomicU64::new(seeds.start);
    let some = || {
        let mut seen = [0; N];
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return seen;
            }
            seen.iter_mut().zip(run(seed)).for_each(|(sum, one)| *sum += one);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(some)).collect();
        running.into_iter().fold([0; N], |mut total, thread| {
            let seen = thread.join().unwrap_or_else(|failure| std::panic::resume_unwind(failure));
            total.iter_mut().zip(seen).for_each(|(sum, one)| *sum += one);
            total
        })
    })
}

fn seeds(default: u64) -> u64 {
    number("SIM_SEEDS").unwrap_or(default)
}

#[test]
fn many_seeds_hold() {
    if let Some(seed) = number("SIM_SEED") {
        println!("{:?}", holds(seed));
        return;
    }
    let runs = seeds(DEFAULT_SEEDS);
    let [answered, entries, crashes, wipes, snapshots, terms] = sweep(0..runs, |seed| {
        let r = holds(seed);
        [r.answered, r.entries, r.crashes, r.wipes, r.snapshots, r.terms as usize]
    });
    println!(
        "{runs} seeds: {answered} calls answered, {entries} entries agreed on, {terms} terms, {crashes} crashes, \
         {wipes} disks lost, {snapshots} snapshots"
    );
    // A run in which nothing happens proves nothing.
    let runs = runs as usize;
    assert!(answered > 20 * runs && crashes > 2 * runs && snapshots > runs);
}

/// Runs a seed of the stream simulation and asserts that all invariants hold.
fn streams_hold(seed: u64) -> streams::Report {
    streams::run(seed, TROUBLE, Numbering::Fresh)
        .unwrap_or_else(|violation| panic!("SIM_SEED={seed}: {}", violation.0))
}

#[test]
fn many_seeds_of_streams_hold() {
    if let Some(seed) = number("SIM_SEED") {
        println!("{:?}", streams_hold(seed));
        return;
    }
    let runs = seeds(300);
    let [finished, refused, moved, late, deaths, gaps] = sweep(0..runs, |seed| {
        let r = streams_hold(seed);
        [r.finished, r.refused, r.moved, r.late, r.deaths, r.gaps as usize]
    });
    println!(
        "{runs} seeds: {finished} streams finished, {refused} refused, {moved} moved, {deaths} workers died, \
         {late} late tokens, {gaps} gaps in events"
    );
    let runs = runs as usize;
    assert!(
        finished > 50 * runs && moved > 10 * runs && late > 10 * runs && deaths > runs && gaps > runs / 2
    );
}

/// The leader sent entries before its own disk had them, crashed, and was still in the same term when
/// acknowledgements arrived. These were refused as messages that no correct member sends.
#[test]
fn a_leader_that_lost_sent_entries_accepts_their_acknowledgements() {
    holds(2765);
}

/// A leader took an acknowledgement after its own removal, of which the library makes a panic. Late votes elected a leader
/// of an earlier term.
#[test]
fn a_removed_leader_and_a_late_one_do_no_harm() {
    [13582, 3765].into_iter().for_each(|seed| {
        holds(seed);
    });
}

#[test]
fn a_seed_determines_the_whole_run() {
    assert_eq!(run(plan(4)), run(plan(4)));
    assert_eq!(streams_hold(4), streams_hold(4));
}

/// A planted bug is found by at least one of these seeds.
#[test]
fn planted_bugs_are_found() {
    for bug in Bug::ALL {
        let found = (0..60).find_map(|seed| {
            let plan = Plan { bug: Some(bug), ..plan(seed) };
            match catch_unwind(AssertUnwindSafe(|| run(plan))) {
                Ok(Ok(_)) => None,
                Ok(Err(violation)) => Some((seed, violation.0)),
                Err(_) => Some((seed, "a core has panicked".to_owned())),
            }
        });
        let (seed, how) = found.unwrap_or_else(|| panic!("{bug:?} is not found"));
        println!("{bug:?} is found by seed {seed}: {}", how.chars().take(120).collect::<String>());
    }
}

/// If attempts share a number, late tokens of an abandoned attempt reach the reader.
#[test]
fn a_reused_attempt_is_found() {
    let found = (0..60).find_map(|seed| Some((seed, streams::run(seed, TROUBLE, Numbering::Reused).err()?)));
    let (seed, violation) = found.expect("it is not found");
    println!("ReuseAttempt is found by seed {seed}: {}", violation.0);
}
