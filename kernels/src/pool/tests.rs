use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::*;

fn pool(threads: usize, spin: Duration) -> Pool {
    Pool::new(PoolConfig { spin, ..PoolConfig::new(NonZeroUsize::new(threads).unwrap()) }).unwrap()
}

#[test]
fn every_thread_runs_once_per_run_spinning_or_parked() {
    for (threads, spin) in [(1, 0), (2, 0), (2, 50), (5, 0), (5, 1)] {
        let pool = pool(threads, Duration::from_micros(spin));
        let counts: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
        for _ in 0..2000 {
            pool.run(&|thread| {
                counts[thread].fetch_add(1, Ordering::Relaxed);
            });
        }
        assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 2000), "{threads} threads");
    }
}

#[test]
fn a_run_sees_the_writes_of_the_previous_run() {
    let pool = pool(3, Duration::ZERO);
    let mut values = vec![0u64; 3];
    for round in 1..=500 {
        let out = crate::disjoint::Disjoint::new(&mut values);
        // SAFETY: every thread has its own element.
        pool.run(&|thread| unsafe { out.slice(thread, 1)[0] += round });
    }
    assert_eq!(values, [125_250; 3]);
}

#[test]
fn every_item_is_visited_once() {
    for threads in [1, 4] {
        let pool = pool(threads, Duration::ZERO);
        for (items, grain) in [(0, 1), (1, 1), (7, 3), (1000, 1), (1000, 16), (5, 100)] {
            let seen: Vec<AtomicU64> = (0..items).map(|_| AtomicU64::new(0)).collect();
            pool.for_each_range(items, grain, &|range| {
                for item in range {
                    seen[item].fetch_add(1, Ordering::Relaxed);
                }
            });
            pool.for_each(items, &|item| {
                seen[item].fetch_add(1 << 32, Ordering::Relaxed);
            });
            assert!(
                seen.iter().all(|seen| seen.load(Ordering::Relaxed) == (1 << 32) + 1),
                "{items} by {grain}"
            );
        }
    }
}

#[test]
fn shares_are_consecutive_and_other_threads_finish_them() {
    for (chunks, threads) in [(0, 2), (1, 3), (16, 2), (17, 4), (3, 5)] {
        let shares = shares(chunks, threads);
        let starts: Vec<usize> = shares.iter().map(|share| share.next.load(Ordering::Relaxed)).collect();
        let ends: Vec<usize> = shares.iter().map(|share| share.end).collect();
        assert_eq!((starts[0], ends[threads - 1]), (0, chunks));
        assert_eq!(starts[1..], ends[..threads - 1], "{chunks} chunks of {threads} threads");
        assert!(starts.iter().zip(&ends).all(|(start, end)| (chunks / threads..).contains(&(end - start))));
    }
    // The caller's first chunk lasts until all others are done.
    let (pool, done) = (pool(2, Duration::ZERO), AtomicUsize::new(0));
    pool.for_each(16, &|item| {
        while item == 0 && done.load(Ordering::Relaxed) < 15 {
            std::thread::yield_now();
        }
        done.fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!(done.load(Ordering::Relaxed), 16);
}

/// The message of a panic raised by `f`.
fn panic_of(f: impl FnOnce()) -> String {
    let payload = catch_unwind(AssertUnwindSafe(f)).unwrap_err();
    payload.downcast_ref::<&str>().map_or_else(String::new, ToString::to_string)
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
    let pool = pool(3, Duration::ZERO);
    for bad in 0..3 {
        for _ in 0..20 {
            let others = AtomicUsize::new(0);
            let message = panic_of(|| {
                pool.run(&|thread| {
                    if thread == bad {
                        panic!("thread gave up");
                    }
                    others.fetch_add(1, Ordering::Relaxed);
                });
            });
            assert_eq!(message, "thread gave up");
            assert_eq!(others.load(Ordering::Relaxed), 2);
        }
    }
    let count = AtomicUsize::new(0);
    pool.run(&|_| {
        count.fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!(count.load(Ordering::Relaxed), 3);
}

#[test]
fn a_nested_run_makes_all_its_calls() {
    let pool = pool(2, Duration::ZERO);
    let count = AtomicUsize::new(0);
    pool.run(&|_| {
        pool.for_each(10, &|_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
    });
    assert_eq!(count.load(Ordering::Relaxed), 20);
}

#[test]
fn callers_on_several_threads_take_turns() {
    let pool = pool(3, Duration::ZERO);
    let total = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    pool.run(&|_| {
                        total.fetch_add(1, Ordering::Relaxed);
                    });
                }
            });
        }
    });
    assert_eq!(total.load(Ordering::Relaxed), 4 * 200 * 3);
}

#[test]
fn dropping_ends_the_threads() {
    let shared = {
        let pool = pool(4, Duration::from_secs(60));
        pool.run(&|_| {});
        Arc::downgrade(&pool.shared)
    };
    // Each worker holds a reference until it ends.
    assert_eq!(shared.strong_count(), 0);
}

#[test]
fn threads_are_pinned_to_their_cpus_and_an_impossible_cpu_is_ignored() {
    // The first CPU is one that this process may use; the second cannot exist.
    let usable = usable_cpus();
    let config =
        PoolConfig { cpus: Some(vec![100_000, usable[0]]), ..PoolConfig::new(NonZeroUsize::new(2).unwrap()) };
    let pool = Pool::new(config).unwrap();
    let seen = Mutex::new(Vec::new());
    pool.run(&|thread| {
        if thread == 1 {
            *seen.lock().unwrap() = usable_cpus();
        }
    });
    assert_eq!(*seen.lock().unwrap(), [usable[0]]);
    std::thread::scope(|scope| {
        let caller = scope.spawn(|| {
            pool.pin_caller();
            usable_cpus()
        });
        assert_eq!(caller.join().unwrap(), usable);
    });
}

/// CPUs that the calling thread may run on.
fn usable_cpus() -> Vec<usize> {
    // SAFETY: an all-zero cpu_set_t is an empty set, and the call fills at most its size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        assert_eq!(libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set), 0);
        (0..8 * size_of::<libc::cpu_set_t>()).filter(|cpu| libc::CPU_ISSET(*cpu, &set)).collect()
    }
}
