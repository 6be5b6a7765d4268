//! Limits of tenants and keys: requests and tokens per minute, concurrent requests.
//!
//! Every coordinator has a [`Meter`] for each subject with limits. Coordinators send each other twice a
//! second what was spent at each since its start ([`Spending`]). Limits therefore hold for the whole cluster;
//! the excess is what arrives at several coordinators within half a second. A coordinator that is cut off
//! from the others limits its own requests only.
//!
//! The rate is a token bucket, not a window: it refills evenly, up to the amount of a minute. Prompts are
//! charged before they are served, generated tokens as they arrive. A meter may therefore be in debt, by two
//! minutes at most.
//!
//! This module reads no clock; callers pass the time.

use consensus::table::Quota;
use parking_lot::Mutex;
use proto::ids::NodeId;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MINUTE: f64 = 60.0;
/// A meter's spending is repeated for this long after its last use, in case a message was lost.
const REPORT_FOR: Duration = Duration::from_secs(120);
/// The in-flight requests of a coordinator without a message for this long do not count.
const SILENT_AFTER: Duration = Duration::from_secs(3);
/// `retry-after` if there are too many concurrent requests.
const CONCURRENCY_RETRY: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    Requests,
    /// Tokens per minute.
    Tokens,
    Concurrency,
    /// Concurrent sessions of operations at one coordinator.
    Sessions,
}

impl Limit {
    pub const ALL: [Self; 4] = [Self::Requests, Self::Tokens, Self::Concurrency, Self::Sessions];

    pub fn name(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Tokens => "tokens",
            Self::Concurrency => "concurrency",
            Self::Sessions => "sessions",
        }
    }
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Requests => "requests per minute",
            Self::Tokens => "tokens per minute",
            Self::Concurrency => "requests at a time",
            Self::Sessions => "sessions at a time",
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Of {
    Key,
    Tenant,
}

/// A limit that was reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exceeded {
    pub limit: Limit,
    pub of: Of,
    pub allowed: u64,
    /// Time until there is room if nothing else uses it.
    pub retry_after: Duration,
}

/// Usage of limits: (used, allowed) of each. An allowed amount of 0 means no limit, and then nothing is
/// counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Requests spent and not refilled yet.
    pub requests: (u64, u64),
    /// Tokens, likewise. Above the allowed amount while in debt.
    pub tokens: (u64, u64),
    pub inflight: (u64, u64),
}

/// The id of a meter at all coordinators: the SHA-256 of a key, or a digest of a tenant's name.
pub type Subject = [u8; 32];

/// Counts what one subject with limits spends.
#[derive(Debug)]
pub struct Meter {
    subject: Subject,
    of: Of,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    quota: Quota,
    requests: Bucket,
    tokens: Bucket,
    inflight: u32,
    /// Spent at this coordinator since the meter was created.
    spent: Amount,
    used: Instant,
    /// The last report of each other coordinator.
    others: HashMap<NodeId, Elsewhere>,
}

#[derive(Debug)]
struct Elsewhere {
    run_id: u64,
    spent: Amount,
    inflight: u32,
    at: Instant,
}

/// A token bucket. It refills with `capacity` per minute.
#[derive(Debug)]
struct Bucket {
    level: f64,
    at: Instant,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Amount {
    requests: u64,
    tokens: u64,
}

impl Bucket {
    fn fill(&mut self, now: Instant, capacity: f64) {
        let since = now.saturating_duration_since(self.at).as_secs_f64();
        self.level = (self.level + since * capacity / MINUTE).min(capacity);
        self.at = now;
    }

    fn take(&mut self, amount: f64, capacity: f64) {
        self.level = (self.level - amount).max(-2.0 * capacity);
    }

    /// The time until the level reaches `target`.
    fn until(&self, target: f64, capacity: f64) -> Duration {
        Duration::from_secs_f64((target - self.level).max(0.0) / capacity * MINUTE)
    }
}

impl State {
    fn fill(&mut self, now: Instant) {
        self.requests.fill(now, self.quota.requests_per_minute.into());
        self.tokens.fill(now, self.quota.tokens_per_minute as f64);
    }

    /// In-flight requests at other coordinators.
    fn inflight_elsewhere(&self, now: Instant) -> u32 {
        let here = |other: &&Elsewhere| now.saturating_duration_since(other.at) < SILENT_AFTER;
        self.others.values().filter(here).fold(0, |sum, other| sum.saturating_add(other.inflight))
    }

    fn spend(&mut self, requests: u64, tokens: u64) {
        self.requests.take(requests as f64, self.quota.requests_per_minute.into());
        self.tokens.take(tokens as f64, self.quota.tokens_per_minute as f64);
    }
}

impl Meter {
    /// A meter with full buckets.
    pub fn new(subject: Subject, of: Of, quota: Quota, now: Instant) -> Self {
        let full = |capacity| Bucket { level: capacity, at: now };
        let (requests, tokens) =
            (full(quota.requests_per_minute.into()), full(quota.tokens_per_minute as f64));
        let state = State {
            quota,
            requests,
            tokens,
            inflight: 0,
            spent: Amount::default(),
            used: now,
            others: HashMap::new(),
        };
        Self { subject, of, state: Mutex::new(state) }
    }

    pub fn subject(&self) -> Subject {
        self.subject
    }

    /// Changes the limits. Spending is kept.
    pub fn limit(&self, quota: Quota, now: Instant) {
        let mut state = self.state.lock();
        state.fill(now);
        // Nothing was counted while there was no limit, so the bucket is full.
        if state.quota.requests_per_minute == 0 {
            state.requests.level = quota.requests_per_minute.into();
        }
        if state.quota.tokens_per_minute == 0 {
            state.tokens.level = quota.tokens_per_minute as f64;
        }
        state.quota = quota;
    }

    fn begin(&self, now: Instant) -> Result<(), Exceeded> {
        let mut state = self.state.lock();
        state.fill(now);
        let Quota { requests_per_minute, concurrency, .. } = state.quota;
        let exceeded =
            |limit, allowed, retry_after| Err(Exceeded { limit, of: self.of, allowed, retry_after });
        if requests_per_minute > 0 && state.requests.level < 1.0 {
            let wait = state.requests.until(1.0, requests_per_minute.into());
            return exceeded(Limit::Requests, requests_per_minute.into(), wait);
        }
        if concurrency > 0 && state.inflight.saturating_add(state.inflight_elsewhere(now)) >= concurrency {
            return exceeded(Limit::Concurrency, concurrency.into(), CONCURRENCY_RETRY);
        }
        state.inflight += 1;
        state.used = now;
        state.spent.requests += 1;
        state.spend(1, 0);
        Ok(())
    }

    /// Reverts [`Self::begin`] for a request that another meter refused.
    fn undo(&self) {
        let mut state = self.state.lock();
        state.inflight = state.inflight.saturating_sub(1);
        state.spent.requests = state.spent.requests.saturating_sub(1);
        state.requests.level += 1.0;
    }

    fn check_tokens(&self, tokens: u64, now: Instant) -> Result<(), Exceeded> {
        let mut state = self.state.lock();
        state.fill(now);
        let allowed = state.quota.tokens_per_minute;
        // A prompt longer than a minute's tokens waits for a full bucket.
        let needed = tokens.min(allowed) as f64;
        if allowed > 0 && state.tokens.level < needed {
            let retry_after = state.tokens.until(needed, allowed as f64);
            return Err(Exceeded { limit: Limit::Tokens, of: self.of, allowed, retry_after });
        }
        Ok(())
    }

    fn spend_tokens(&self, tokens: u64) {
        let mut state = self.state.lock();
        state.spent.tokens = state.spent.tokens.saturating_add(tokens);
        state.spend(0, tokens);
    }

    fn end(&self) {
        let mut state = self.state.lock();
        state.inflight = state.inflight.saturating_sub(1);
    }

    /// The usage at all known coordinators.
    pub fn usage(&self, now: Instant) -> Usage {
        let mut state = self.state.lock();
        state.fill(now);
        // Rounded up, so that a bucket without room for a whole request shows as used up.
        let used = |bucket: &Bucket, allowed: f64| (allowed - bucket.level).max(0.0).ceil() as u64;
        let Quota { requests_per_minute, tokens_per_minute, concurrency } = state.quota;
        Usage {
            requests: (used(&state.requests, requests_per_minute.into()), requests_per_minute.into()),
            tokens: (used(&state.tokens, tokens_per_minute as f64), tokens_per_minute),
            inflight: (
                state.inflight.saturating_add(state.inflight_elsewhere(now)).into(),
                concurrency.into(),
            ),
        }
    }

    /// Quota spent here, as sent to the other coordinators. `None` if unused for `REPORT_FOR`.
    pub fn report(&self, now: Instant) -> Option<QuotaSpent> {
        let state = self.state.lock();
        let recent = state.inflight > 0 || now.saturating_duration_since(state.used) < REPORT_FOR;
        recent.then(|| QuotaSpent {
            subject: self.subject,
            requests: state.spent.requests,
            tokens: state.spent.tokens,
            inflight: state.inflight,
        })
    }

    /// Counts what another coordinator spent. `run_id` identifies the run of that coordinator.
    pub fn add_report(&self, peer: &NodeId, run_id: u64, spent: &QuotaSpent, now: Instant) {
        let mut state = self.state.lock();
        state.fill(now);
        let reported = Amount { requests: spent.requests, tokens: spent.tokens };
        match state.others.get(peer).filter(|report| report.run_id == run_id).map(|report| report.spent) {
            Some(before) => state.spend(
                reported.requests.saturating_sub(before.requests),
                reported.tokens.saturating_sub(before.tokens),
            ),
            // The time of earlier spending is unknown: it empties the bucket at most and makes no debt.
            None => {
                state.requests.level = (state.requests.level - reported.requests as f64).max(0.0);
                state.tokens.level = (state.tokens.level - reported.tokens as f64).max(0.0);
            }
        }
        state
            .others
            .insert(peer.clone(), Elsewhere { run_id, spent: reported, inflight: spent.inflight, at: now });
    }
}

/// Quota of one subject that one coordinator spent since its start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaSpent {
    pub subject: Subject,
    pub requests: u64,
    pub tokens: u64,
    /// Current in-flight requests.
    pub inflight: u32,
}

/// A coordinator's report of what it spent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spending {
    /// A random number of this run: counts restart with it.
    pub run_id: u64,
    /// At most [`MAX_REPORTED`] recently used meters.
    pub spent: Vec<QuotaSpent>,
}

pub const MAX_REPORTED: usize = 1024;

/// An admitted request. It counts as in flight until this is dropped.
#[derive(Debug, Default)]
pub struct Permit([Option<Arc<Meter>>; 2]);

impl Permit {
    /// Admits a request if all meters have room.
    pub fn new(meters: [Option<&Arc<Meter>>; 2], now: Instant) -> Result<Self, Exceeded> {
        let mut permit = Self::default();
        for (held, meter) in permit.0.iter_mut().zip(meters) {
            let Some(meter) = meter else { continue };
            if let Err(exceeded) = meter.begin(now) {
                for admitted in std::mem::take(&mut permit.0).into_iter().flatten() {
                    admitted.undo();
                }
                return Err(exceeded);
            }
            *held = Some(Arc::clone(meter));
        }
        Ok(permit)
    }

    /// Charges a prompt, if there is room for it.
    pub fn prompt(&self, tokens: u64, now: Instant) -> Result<(), Exceeded> {
        self.0.iter().flatten().try_for_each(|meter| meter.check_tokens(tokens, now))?;
        self.generated(tokens);
        Ok(())
    }

    /// Charges tokens that were already computed.
    pub fn generated(&self, tokens: u64) {
        self.0.iter().flatten().for_each(|meter| meter.spend_tokens(tokens));
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.iter().flatten().for_each(|meter| meter.end());
    }
}

#[cfg(test)]
mod tests;
