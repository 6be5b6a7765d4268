//! Limits on the requests of joining nodes, by address and in total.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Most requests at once, and requests per second after them: of one address, and of all.
const ONE: (f64, f64) = (20.0, 1.0);
const ALL: (f64, f64) = (400.0, 50.0);
/// Most addresses that are counted separately.
const MAX_ADDRESSES: usize = 4096;

/// Requests that are allowed now.
#[derive(Debug, Clone, Copy)]
struct Bucket {
    level: f64,
    at: Instant,
}

impl Bucket {
    /// Takes one request. Returns the wait until the next one if there is none.
    fn take(&mut self, (burst, rate): (f64, f64), now: Instant) -> Result<(), Duration> {
        let since = now.saturating_duration_since(self.at).as_secs_f64();
        *self = Self { level: (self.level + since * rate).min(burst), at: now };
        if self.level < 1.0 {
            return Err(Duration::from_secs_f64((1.0 - self.level) / rate));
        }
        self.level -= 1.0;
        Ok(())
    }
}

#[derive(Debug)]
pub(super) struct JoinRates {
    all: Bucket,
    by_address: HashMap<IpAddr, Bucket>,
}

impl JoinRates {
    pub(super) fn new(now: Instant) -> Self {
        Self { all: Bucket { level: ALL.0, at: now }, by_address: HashMap::new() }
    }

    /// Counts a request. Returns the wait if it is one too many.
    pub(super) fn take(&mut self, from: IpAddr, now: Instant) -> Result<(), Duration> {
        if self.by_address.len() >= MAX_ADDRESSES && !self.by_address.contains_key(&from) {
            // A full bucket need not be remembered.
            let full = Duration::from_secs_f64(ONE.0 / ONE.1);
            self.by_address.retain(|_, bucket| now.saturating_duration_since(bucket.at) < full);
        }
        if self.by_address.len() < MAX_ADDRESSES || self.by_address.contains_key(&from) {
            let new = Bucket { level: ONE.0, at: now };
            self.by_address.entry(from).or_insert(new).take(ONE, now)?;
        }
        self.all.take(ALL, now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn address(n: u32) -> IpAddr {
        Ipv4Addr::from(n).into()
    }

    #[test]
    fn an_address_has_a_burst_and_then_one_request_a_second() {
        let start = Instant::now();
        let mut rates = JoinRates::new(start);
        let taken = |rates: &mut JoinRates, n: usize, at| {
            (0..n).filter(|_| rates.take(address(1), at).is_ok()).count()
        };
        assert_eq!(taken(&mut rates, 100, start), 20);
        rates.take(address(2), start).unwrap();
        assert_eq!(rates.take(address(1), start), Err(Duration::from_secs(1)));
        assert_eq!(taken(&mut rates, 100, start + Duration::from_secs(5)), 5);
        assert_eq!(taken(&mut rates, 100, start + Duration::from_secs(5000)), 20);
    }

    #[test]
    fn all_addresses_together_are_limited_in_rate_and_memory() {
        let start = Instant::now();
        let mut rates = JoinRates::new(start);
        let taken = (0..100_000).filter(|n| rates.take(address(*n), start).is_ok()).count();
        assert_eq!(taken, 400);
        assert_eq!(rates.by_address.len(), MAX_ADDRESSES);
        let later = start + Duration::from_secs(60);
        rates.take(address(1 << 20), later).unwrap();
        assert_eq!(rates.by_address.len(), 1);
    }
}
