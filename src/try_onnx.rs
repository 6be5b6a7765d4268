//! `kvasir try-onnx`: loads an ONNX file under resource limits, before another process of this executable
//! loads it (`speech::onnx::trial`).
#![allow(unsafe_code)]

use anyhow::Context;
use speech::onnx::trial::{self, Program, TrialLimits};
use std::io;
use std::path::{Path, PathBuf};

const NAME: &str = "try-onnx";

/// Loads an ONNX file; workers run this command before they load it themselves
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  kvasir try-onnx model.onnx         is for workers; it prints nothing")]
pub(crate) struct TryOnnx {
    /// ONNX file
    file: PathBuf,
}

impl TryOnnx {
    /// Runs the command.
    pub(crate) fn run(self) -> anyhow::Result<()> {
        limit(trial::limits(&self.file)).context("limits")?;
        trial::attempt(&self.file).with_context(|| self.file.display().to_string())
    }
}

/// Makes this process try ONNX files with its own executable.
pub(crate) fn in_use() {
    // The executable's file may have been replaced since the start.
    let own = Path::new("/proc/self/exe");
    let path = if own.exists() { Some(own.to_owned()) } else { std::env::current_exe().ok() };
    if let Some(path) = path {
        trial::tried_by(Program { path, arguments: vec![NAME.into()] });
    }
}

/// Sets resource limits. If the process exceeds them, the system ends it without a core dump.
fn limit(limits: TrialLimits) -> io::Result<()> {
    for (resource, max) in
        [(libc::RLIMIT_AS, limits.memory), (libc::RLIMIT_CPU, limits.seconds), (libc::RLIMIT_CORE, 0)]
    {
        let max = max as libc::rlim_t;
        let limit = libc::rlimit { rlim_cur: max, rlim_max: max };
        // SAFETY: it reads a value that outlives the call, and changes a limit of this process alone.
        if unsafe { libc::setrlimit(resource, &raw const limit) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
