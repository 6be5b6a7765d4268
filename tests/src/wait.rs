//! Waiting for a condition with a deadline.

use anyhow::bail;
use std::time::{Duration, Instant};

/// Calls `probe` until it returns `Some`, and returns that value. Fails after `deadline`.
pub fn until<T>(
    description: &str,
    deadline: Duration,
    mut probe: impl FnMut() -> Option<T>,
) -> anyhow::Result<T> {
    let started = Instant::now();
    loop {
        if let Some(found) = probe() {
            return Ok(found);
        }
        if started.elapsed() > deadline {
            bail!("{description}: not within {deadline:?}");
        }
        std::thread::park_timeout(Duration::from_millis(5));
    }
}
