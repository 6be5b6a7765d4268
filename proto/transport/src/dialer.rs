//! Dialing with retries.

use super::{Connection, Endpoint};
use crate::Error;
use pki::Expected;
use proto::log::Repeats;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Delays between attempts. The upper bound doubles from `first` to `longest`; each delay is drawn
/// uniformly from the upper half, so that nodes that lost the same peer do not return in step.
/// Deterministic for a seed.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    attempts: u32,
    state: u64,
}

impl Backoff {
    /// Creates a backoff between two bounds. `seed` should differ between nodes.
    pub fn new(first: Duration, longest: Duration, seed: u64) -> Self {
        Self { first, longest, attempts: 0, state: seed }
    }

    /// Returns the delay after one more failure.
    pub fn after_failure(&mut self) -> Duration {
        let factor = 1u32.checked_shl(self.attempts).unwrap_or(u32::MAX);
        let ceiling = self.first.saturating_mul(factor).min(self.longest);
        self.attempts = self.attempts.saturating_add(1);
        // SplitMix64 is enough to keep nodes apart.
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let fraction = ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64;
        ceiling.mul_f64(0.5 + 0.5 * fraction)
    }

    /// Starts over after a success.
    pub fn reset(&mut self) {
        self.attempts = 0;
    }
}

/// Keeps a node connected to one peer. Call [`connect`](Self::connect), use the connection until it is
/// lost, and call it again.
#[derive(Debug)]
pub struct Dialer {
    endpoint: Arc<Endpoint>,
    target: String,
    expected: Expected,
    backoff: Backoff,
    connected_at: Option<Instant>,
    /// Limits the log lines about failures since the last success.
    failures: Repeats,
}

/// A connection that lived this long counts as a success, a shorter one as a failed attempt.
const SETTLED: Duration = Duration::from_secs(5);

impl Dialer {
    /// Creates a dialer to `target` (`host:port`, resolved for every attempt) that accepts only `expected`,
    /// with delays of 50 ms to 2 s.
    pub fn new(endpoint: Arc<Endpoint>, target: impl Into<String>, expected: Expected) -> Self {
        let target = target.into();
        let name = format!("{} {target}", endpoint.name());
        let seed = blake3::hash(name.as_bytes());
        let seed = seed.as_bytes().first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2), seed);
        Self { endpoint, target, expected, backoff, connected_at: None, failures: Repeats::new() }
    }

    /// Dials until a connection succeeds, with growing, jittered delays. Logs each failure, repeated ones
    /// once a minute. Never gives up, because an operator may fix the cause meanwhile. Cancel-safe.
    pub async fn connect(&mut self) -> Connection {
        match self.connected_at.take() {
            Some(since) if since.elapsed() >= SETTLED => self.backoff.reset(),
            Some(_) => tokio::time::sleep(self.backoff.after_failure()).await,
            None => {}
        }
        loop {
            match self.attempt().await {
                Ok(connection) => {
                    self.connected_at = Some(Instant::now());
                    self.failures = Repeats::new();
                    return connection;
                }
                Err(error) => {
                    let wait = self.backoff.after_failure();
                    if let Some(left_out) = self.failures.due(error.to_string()) {
                        tracing::warn!(target = %self.target, %error, ?wait, left_out, "cannot connect");
                    }
                    tokio::time::sleep(wait).await;
                }
            }
        }
    }

    async fn attempt(&self) -> Result<Connection, Error> {
        let mut last = None;
        for address in self.resolve().await? {
            match self.endpoint.connect(address, &self.expected).await {
                Ok(connection) => return Ok(connection),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| self.unresolved(std::io::ErrorKind::NotFound.into())))
    }

    async fn resolve(&self) -> Result<Vec<SocketAddr>, Error> {
        let addresses = tokio::net::lookup_host(&self.target).await;
        Ok(addresses.map_err(|source| self.unresolved(source))?.collect())
    }

    fn unresolved(&self, source: std::io::Error) -> Error {
        Error::Resolve { target: self.target.clone(), source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_longest_and_stay_in_their_upper_half() {
        let (first, longest) = (Duration::from_millis(50), Duration::from_secs(2));
        let mut backoff = Backoff::new(first, longest, 7);
        for attempt in 0..200 {
            let ceiling = longest.min(first * (1 << attempt.min(10)));
            let wait = backoff.after_failure();
            assert!(wait <= ceiling && wait >= ceiling / 2, "attempt {attempt}: {wait:?} of {ceiling:?}");
        }
        backoff.reset();
        assert!(backoff.after_failure() <= first);
    }

    #[test]
    fn different_seeds_wait_differently() {
        let waits = |seed| {
            let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(1), seed);
            [backoff.after_failure(), backoff.after_failure()]
        };
        assert_ne!(waits(1), waits(2));
        assert_eq!(waits(1), waits(1));
    }
}
