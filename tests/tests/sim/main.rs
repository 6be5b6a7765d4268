//! Coordinators' agreement in a seeded world: virtual network, disks and clocks around the real cores. A
//! failure prints its seed; `SIM_SEED=n` runs that one alone, `SIM_SEEDS=n` so many:
//! `SIM_SEEDS=20000 cargo test --release -p kvasir-cluster-tests --test sim many -- --nocapture`.

mod bugs;
mod client;
mod disk;
mod invariants;
mod linearizable;
mod network;
mod operator;
mod random;
mod world;

use bugs::Bug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use world::{Plan, Report, run};

/// Microseconds of trouble in a run.
const TROUBLE: u64 = 10_000_000;

fn plan(seed: u64) -> Plan {
    Plan { seed, trouble: TROUBLE, bug: None }
}

/// Runs a seed that must hold.
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

/// Runs seeds on all CPUs and says what they have seen.
fn sweep(seeds: std::ops::Range<u64>) {
    let next = AtomicU64::new(seeds.start);
    let some = || {
        let mut seen = [0; 6];
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return seen;
            }
            let r = holds(seed);
            let run = [r.answered, r.entries, r.crashes, r.wipes, r.snapshots, r.terms as usize];
            seen.iter_mut().zip(run).for_each(|(sum, one)| *sum += one as u64);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let total = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(some)).collect();
        running.into_iter().fold([0; 6], |mut total, thread| {
            let seen = thread.join().unwrap_or_else(|failure| std::panic::resume_unwind(failure));
            total.iter_mut().zip(seen).for_each(|(sum, one)| *sum += one);
            total
        })
    });
    let [answered, entries, crashes, wipes, snapshots, terms] = total;
    println!(
        "{} seeds: {answered} calls answered, {entries} entries agreed on, {terms} terms, {crashes} crashes, \
         {wipes} disks lost, {snapshots} snapshots",
        seeds.end - seeds.start
    );
    // A world in which nothing happens proves nothing.
    let runs = seeds.end - seeds.start;
    assert!(answered > 20 * runs && crashes > 2 * runs && snapshots > runs);
}

#[test]
fn many_seeds_hold() {
    match number("SIM_SEED") {
        Some(seed) => println!("{:?}", holds(seed)),
        None => sweep(0..number("SIM_SEEDS").unwrap_or(300)),
    }
}

/// It had sent entries before its own disk had them, crashed, and was still in the term that it had led when the others
/// told what they had taken: that was refused as what no correct member says.
#[test]
fn a_leader_that_has_lost_what_it_sent_hears_of_it() {
    holds(2765);
}

#[test]
fn a_seed_tells_everything() {
    assert_eq!(run(plan(4)), run(plan(4)));
}

/// A bug that is planted is found by some of these seeds, whatever the others see.
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
