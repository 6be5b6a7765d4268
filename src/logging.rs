//! Logging of a process, written to stderr through a non-blocking queue (`proto::log`).

use proto::log::{self, Log};
use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{IsTerminal, Write};
use std::panic::PanicHookInfo;
use tracing_subscriber::{EnvFilter, fmt};

/// Starts logging. `KVASIR_LOG` filters it (default `info`); `KVASIR_LOG_FORMAT=json` selects JSON. Panics
/// are logged too.
pub(crate) fn start() -> Log {
    let log = log::start(std::io::stderr());
    let filter = EnvFilter::try_from_env("KVASIR_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let lines = log.clone();
    let writer = move || lines.clone();
    // Without `log_internal_errors`, which prints to stderr and panics if that fails.
    let subscriber =
        fmt().with_env_filter(filter).with_writer(writer).with_target(true).log_internal_errors(false);
    if std::env::var("KVASIR_LOG_FORMAT").is_ok_and(|format| format == "json") {
        subscriber.json().init();
    } else {
        subscriber.with_ansi(std::io::stderr().is_terminal()).init();
    }
    std::panic::set_hook(Box::new(log_panic));
    log
}

/// Writes plain text to the log's destination.
pub(crate) fn write_text(log: &mut Log, text: &str) {
    // Queueing never fails.
    let _queued = log.write_all(text.as_bytes());
}

/// Waits a moment at process exit, also after a panic, until the last lines are written.
pub(crate) struct FlushAtEnd;

impl Drop for FlushAtEnd {
    fn drop(&mut self) {
        log::flush();
    }
}

fn log_panic(panic: &PanicHookInfo<'_>) {
    let text = panic.payload_as_str().unwrap_or("no text");
    let thread = std::thread::current();
    let thread = thread.name().unwrap_or("unnamed");
    let at = panic.location().map(ToString::to_string);
    // Captured only if RUST_BACKTRACE is set.
    let backtrace = Backtrace::capture();
    let backtrace = (backtrace.status() == BacktraceStatus::Captured).then(|| backtrace.to_string());
    tracing::error!(thread, at, what = text, backtrace, "a thread panicked");
}

/// An error and its causes in one line. A cause whose text is already included is not repeated.
pub(crate) fn in_one_line(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |text, cause| {
        let cause = cause.to_string();
        match text.contains(&cause) {
            true => text,
            false if text.is_empty() => cause,
            false => text + ": " + &cause,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn a_cause_is_reported_once() {
        let full = || std::io::Error::from(std::io::ErrorKind::StorageFull);
        let path = std::path::PathBuf::from("/data/x");
        let source = full();
        let error = anyhow::Error::from(proto::directory::ClaimError::Io { path, source }).context("a node");
        let text = in_one_line(&error);
        assert_eq!(text.matches(&full().to_string()).count(), 1, "{text}");
        assert!(text.starts_with("a node: /data/x: ") && text.contains("make room"), "{text}");
        let error = Err::<(), _>(full()).context("writing").unwrap_err();
        assert_eq!(in_one_line(&error), format!("writing: {}", full()));
    }
}
