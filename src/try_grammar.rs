//! `kvasir try-grammar`: what a worker has done with a grammar before it compiles it itself, by a process that can be
//! ended (`worker::grammar::trial`).
#![allow(unsafe_code)]

use anyhow::Context;
use std::path::PathBuf;
use std::ptr::null_mut;
use worker::grammar::COMPILE_TIME;
use worker::grammar::trial::{self, Program};

const NAME: &str = "try-grammar";
/// A third of what an engine's thread gets of a CPU that both want: with the least there is, a grammar of a few milliseconds
/// waits for seconds.
const NICENESS: libc::c_int = 5;

/// Tries to compile the grammar on stdin, as workers have it done
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  kvasir try-grammar         is for workers; it says nothing")]
pub(crate) struct TryGrammar {}

impl TryGrammar {
    /// Runs the command.
    pub(crate) fn run(self) -> anyhow::Result<()> {
        yield_to_others();
        trial::attempt(std::io::stdin().lock()).context("stdin")
    }
}

/// From now on grammars of this process are tried by this same executable.
pub(crate) fn in_use() -> anyhow::Result<()> {
    // It may have been replaced since it was started.
    let own = PathBuf::from("/proc/self/exe");
    let path = match own.exists() {
        true => own,
        false => std::env::current_exe().context("the path of this executable")?,
    };
    trial::tried_by(Program { path, arguments: vec![NAME.into()] });
    Ok(())
}

/// What else there is to compute goes first, and the system ends this process, by `SIGPROF`, when it has had its time of a
/// CPU.
fn yield_to_others() {
    let none = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let budget = libc::timeval {
        tv_sec: COMPILE_TIME.as_secs() as libc::time_t,
        tv_usec: COMPILE_TIME.subsec_micros() as libc::suseconds_t,
    };
    let timer = libc::itimerval { it_interval: none, it_value: budget };
    // SAFETY: both calls change attributes of this process alone; the one pointer that is not null is to a value that
    // outlives the call, which only reads it, and null says that the old value is not wanted.
    unsafe {
        // Neither can fail for a process that asks for less than it has, with times below a second.
        let _ = libc::nice(NICENESS);
        let _ = libc::setitimer(libc::ITIMER_PROF, &timer, null_mut());
    }
}
