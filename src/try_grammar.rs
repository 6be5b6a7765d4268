//! `kvasir try-grammar`: compiles a grammar in a process that can be killed, before the worker compiles it
//! itself (`engine::grammar::trial`).
#![allow(unsafe_code)]

use anyhow::Context;
use engine::grammar::COMPILE_TIME;
use engine::grammar::trial::{self, Program};
use std::path::PathBuf;
use std::ptr::null_mut;

const NAME: &str = "try-grammar";
/// On a shared CPU, a third of an engine thread's share. At the lowest priority a grammar of a few
/// milliseconds would wait for seconds.
const NICENESS: libc::c_int = 5;

/// Compiles the grammar on stdin; workers run this command before they accept a grammar
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  kvasir try-grammar         is for workers; it prints nothing")]
pub(crate) struct TryGrammar {}

impl TryGrammar {
    /// Runs the command.
    pub(crate) fn run(self) -> anyhow::Result<()> {
        yield_to_others();
        trial::attempt(std::io::stdin().lock()).context("stdin")
    }
}

/// Makes this process try grammars with its own executable.
pub(crate) fn in_use() -> anyhow::Result<()> {
    // The executable's file may have been replaced since the start.
    let own = PathBuf::from("/proc/self/exe");
    let path = match own.exists() {
        true => own,
        false => std::env::current_exe().context("cannot find the path of this executable")?,
    };
    trial::tried_by(Program { path, arguments: vec![NAME.into()] });
    Ok(())
}

/// Lowers this process's priority, and sets a CPU time limit after which the system ends it with `SIGPROF`.
fn yield_to_others() {
    let none = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let budget = libc::timeval {
        tv_sec: COMPILE_TIME.as_secs() as libc::time_t,
        tv_usec: COMPILE_TIME.subsec_micros() as libc::suseconds_t,
    };
    let timer = libc::itimerval { it_interval: none, it_value: budget };
    // SAFETY: both calls change attributes of this process alone. The one non-null pointer is to a value that
    // outlives the call, which only reads it; null means that the old value is not returned.
    unsafe {
        // Neither call can fail for a lower priority and a time below one second.
        let _ = libc::nice(NICENESS);
        let _ = libc::setitimer(libc::ITIMER_PROF, &timer, null_mut());
    }
}
