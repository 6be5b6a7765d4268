//! `kvasir try-grammar`: what a worker has done with a grammar before it compiles it itself, by a process that can be
//! ended (`worker::grammar::trial`).
#![allow(unsafe_code)]

use anyhow::Context;
use std::path::PathBuf;
use worker::grammar::trial::{self, Program};

/// CPU time after which the system ends it, should whoever started it be gone.
const CPU_SECONDS: libc::rlim_t = 2;
const NAME: &str = "try-grammar";

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

/// Whatever else there is to compute goes first, and there is an end to it.
fn yield_to_others() {
    let limit = libc::rlimit { rlim_cur: CPU_SECONDS, rlim_max: CPU_SECONDS };
    // SAFETY: both calls change attributes of this process alone; the one pointer is to a value that outlives the call,
    // which only reads it.
    unsafe {
        // Neither can fail for a process that asks for less than it has.
        let _ = libc::nice(19);
        let _ = libc::setrlimit(libc::RLIMIT_CPU, &limit);
    }
}
