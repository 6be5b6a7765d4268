//! Runs a target on past findings, on its corpus, and then on mutants of both until the time is over. The
//! inputs are determined by the seed, except for how many there are.
//!
//! Fails on a panic, on more memory than [`memory_limit`], on more CPU time than [`CPU_TIME`], and on a hang.
//! The failing input is kept and named.
#![allow(unsafe_code, reason = "a global allocator is an unsafe trait")]

use crate::mutate::Mutate;
use kvasir_cluster_tests::binary::workspace;
use kvasir_cluster_tests::random::Random;
use rustix::time::{ClockId, clock_gettime};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::HashSet;
use std::env;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// CPU time that one input may take. About three times what the slowest good input takes in a debug build.
const CPU_TIME: Duration = Duration::from_secs(2);
/// Wall-clock time after which an input counts as hanging.
const HANG: Duration = Duration::from_secs(60);
/// Bytes beyond which an allocation fails, which ends the process: a finding must not exhaust the machine.
const EXHAUSTED: isize = 2 << 30;
/// Longest input that is mutated further, in bytes.
const LONGEST: usize = 256 << 10;
/// Maximum number of inputs that mutants are made of.
const POOL: usize = 2048;

/// Bytes that one input may allocate at the same time.
fn memory_limit(input: &[u8]) -> isize {
    (64 << 20) + 64 * input.len() as isize
}

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

/// Counts the bytes that a thread has allocated.
struct Counting;

// SAFETY: every call is passed on unchanged to the system's allocator, whose contract the caller keeps, or
// returns null, which says that there is no memory. The counters touch no allocated memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.get().saturating_add_unsigned(layout.size());
        if live > EXHAUSTED {
            return std::ptr::null_mut();
        }
        LIVE.set(live);
        PEAK.set(PEAK.get().max(live));
        // SAFETY: the caller keeps `alloc`'s contract, which is the same one.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.set(LIVE.get().saturating_sub_unsigned(layout.size()));
        // SAFETY: the caller keeps `dealloc`'s contract; `pointer` came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// An empty folder for files of target `name`.
pub(crate) fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzz").join(name);
    drop(fs::remove_dir_all(&folder));
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn setting(name: &str, default: u64) -> u64 {
    env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}: {text}")))
}

fn inputs(folder: &str, target: &str) -> Vec<Vec<u8>> {
    let folder = workspace().join("tests/fuzz").join(folder).join(target);
    let mut paths: Vec<_> =
        fs::read_dir(folder).into_iter().flatten().map(|file| file.unwrap().path()).collect();
    paths.sort();
    paths.into_iter().map(|path| fs::read(path).unwrap()).collect()
}

/// The text of an outcome without numbers and quoted text, which differ from input to input.
fn kind(outcome: &str) -> String {
    let unquoted = outcome.split(['"', '`', '\'']).step_by(2);
    unquoted.flat_map(|text| text.chars().filter(|c| !c.is_ascii_digit())).take(160).collect()
}

/// Ends the process if an input hangs. Returns where to put the start of each input, in ms after now.
fn watch(current: PathBuf) -> (Instant, Arc<AtomicU64>) {
    let (origin, started) = (Instant::now(), Arc::new(AtomicU64::new(u64::MAX)));
    let watched = Arc::downgrade(&started);
    thread::spawn(move || {
        while let Some(started) = watched.upgrade() {
            let age = (origin.elapsed().as_millis() as u64).saturating_sub(started.load(Relaxed));
            if age > HANG.as_millis() as u64 {
                eprintln!("an input hangs: {}", current.display());
                std::process::abort();
            }
            drop(started);
            thread::sleep(Duration::from_secs(1));
        }
    });
    (origin, started)
}

/// Fuzzes one target. `run` panics on a fault, and returns what became of the input: a mutant whose outcome is
/// new is mutated further. `seeds` are inputs besides the corpus.
pub(crate) fn fuzz(target: &str, seeds: Vec<Vec<u8>>, mutate: Mutate, mut run: impl FnMut(&[u8]) -> String) {
    let (seed, seconds) = (setting("KVASIR_SEED", 1), setting("KVASIR_FUZZ_SECONDS", 10));
    let current = scratch(&format!("{target}-input")).join("current");
    let written = File::create(&current).unwrap();
    let (origin, started) = watch(current.clone());
    let mut seen = HashSet::new();
    let mut check = |input: &[u8]| -> bool {
        // A process that dies leaves its input.
        written.set_len(input.len() as u64).and_then(|()| written.write_all_at(input, 0)).unwrap();
        started.store(origin.elapsed().as_millis() as u64, Relaxed);
        let (live, cpu) = (LIVE.get(), clock_gettime(ClockId::ThreadCPUTime));
        PEAK.set(live);
        let outcome = catch_unwind(AssertUnwindSafe(|| run(input)));
        let used = clock_gettime(ClockId::ThreadCPUTime) - cpu;
        let (used, peak) = (Duration::new(used.tv_sec as u64, used.tv_nsec as u32), PEAK.get() - live);
        started.store(u64::MAX, Relaxed);
        let fault = match &outcome {
            Err(_) => "panic".to_owned(),
            Ok(_) if peak > memory_limit(input) => {
                format!("{peak} bytes of memory, at most {}", memory_limit(input))
            }
            Ok(_) if used > CPU_TIME => format!("{used:?} of CPU time, at most {CPU_TIME:?}"),
            Ok(outcome) => return seen.insert(kind(outcome)),
        };
        let finding = current.with_file_name("finding");
        fs::copy(&current, &finding).unwrap();
        panic!("{target}: {fault}, seed {seed}; the input is {}", finding.display());
    };
    let mut pool = inputs("findings", target);
    pool.extend(inputs("corpus", target));
    pool.extend(seeds);
    for input in &pool {
        let _ = check(input);
    }
    let mut random = Random::new(seed);
    let (mut tried, end) = (0, Instant::now() + Duration::from_secs(seconds));
    while Instant::now() < end {
        let mut input = random.pick(&pool).unwrap().clone();
        for _ in 0..1 << random.below(4) {
            input = mutate(&mut random, &input, &pool[tried % pool.len()]);
            input.truncate(LONGEST);
        }
        tried += 1;
        if check(&input) && pool.len() < POOL {
            pool.push(input);
        }
    }
    println!("{target}: seed {seed}, {tried} mutants, {} outcomes", seen.len());
}
