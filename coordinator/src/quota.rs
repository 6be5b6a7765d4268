//! How much a tenant or a key may ask for: requests and tokens in a minute, requests at a time.
//!
//! Every coordinator keeps a [`Meter`] for each that has limits, and they tell each other twice a second what was
//! spent at each since its start ([`Spending`]). So the limits are the cluster's, whichever coordinator is asked, and what
//! is let in too much is what comes within half a second at several of them at once. One that is cut off from the
//! others limits what comes to it alone.
//!
//! Minutes are no windows: what may be asked for comes back evenly, up to what a minute allows. Prompts are paid for
//! before they are served; what is generated is paid for as it comes, so that a meter may be in debt, by two minutes at
//! most.
//!
//! No clock inside: whoever asks says when.

use crate::consensus::table::Quota;
use parking_lot::Mutex;
use proto::ids::NodeId;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MINUTE: f64 = 60.0;
/// What is told of a meter that is not used any more is told again for so long, in case it was lost.
const TOLD_FOR: Duration = Duration::from_secs(120);
/// What runs at a coordinator that was not heard of for this long does not count.
const SILENT_AFTER: Duration = Duration::from_secs(3);
/// When a request is to come again that there were too many others beside.
const RETRY_BESIDE: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    Requests,
    /// Tokens in a minute.
    Tokens,
    Concurrency,
    /// Sessions of operations at a time, at one coordinator.
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

/// A limit that is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exceeded {
    pub limit: Limit,
    pub of: Of,
    pub allowed: u64,
    /// When there will be room, if nobody else takes it.
    pub retry_after: Duration,
}

/// How far limits are used: what of each, and what it allows; 0 allows all, of which nothing is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Requests that have not come back yet of what a minute allows.
    pub requests: (u64, u64),
    /// Tokens, likewise; in debt more than is allowed.
    pub tokens: (u64, u64),
    pub inflight: (u64, u64),
}

/// What is counted by the same name at all coordinators: the SHA-256 of a key, or a digest of a tenant's name.
pub type Subject = [u8; 32];

/// Counts what one of those spends who have limits.
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
    /// What was spent here since the meter was made.
    spent: Amount,
    used: Instant,
    /// What each other coordinator has told last.
    others: HashMap<NodeId, Elsewhere>,
}

#[derive(Debug)]
struct Elsewhere {
    life: u64,
    spent: Amount,
    inflight: u32,
    at: Instant,
}

/// What may be spent at once; comes back at `capacity` in a minute.
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

    /// How long until there is so much.
    fn until(&self, wanted: f64, capacity: f64) -> Duration {
        Duration::from_secs_f64((wanted - self.level).max(0.0) / capacity * MINUTE)
    }
}

impl State {
    fn fill(&mut self, now: Instant) {
        self.requests.fill(now, self.quota.requests_per_minute.into());
        self.tokens.fill(now, self.quota.tokens_per_minute as f64);
    }

    /// Requests at other coordinators just now.
    fn beside(&self, now: Instant) -> u32 {
        let here = |other: &&Elsewhere| now.saturating_duration_since(other.at) < SILENT_AFTER;
        self.others.values().filter(here).fold(0, |sum, other| sum.saturating_add(other.inflight))
    }

    fn spend(&mut self, requests: u64, tokens: u64) {
        self.requests.take(requests as f64, self.quota.requests_per_minute.into());
        self.tokens.take(tokens as f64, self.quota.tokens_per_minute as f64);
    }
}

impl Meter {
    /// A meter at which nothing was spent yet.
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

    /// Other limits from now on. What was spent stays spent.
    pub fn limit(&self, quota: Quota, now: Instant) {
        let mut state = self.state.lock();
        state.fill(now);
        // Who had no limit has spent nothing of it.
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
        if concurrency > 0 && state.inflight.saturating_add(state.beside(now)) >= concurrency {
            return exceeded(Limit::Concurrency, concurrency.into(), RETRY_BESIDE);
        }
        state.inflight += 1;
        state.used = now;
        state.spent.requests += 1;
        state.spend(1, 0);
        Ok(())
    }

    /// Of a request that has begun and is not served: another's limit is reached.
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
        // What is more than a minute's can never be there at once; it waits for all that can.
        let wanted = tokens.min(allowed) as f64;
        if allowed > 0 && state.tokens.level < wanted {
            let retry_after = state.tokens.until(wanted, allowed as f64);
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

    /// How far its limits are used, at all coordinators that were heard of.
    pub fn usage(&self, now: Instant) -> Usage {
        let mut state = self.state.lock();
        state.fill(now);
        // Up: all are used as soon as there is no room for a whole one.
        let used = |bucket: &Bucket, allowed: f64| (allowed - bucket.level).max(0.0).ceil() as u64;
        let Quota { requests_per_minute, tokens_per_minute, concurrency } = state.quota;
        Usage {
            requests: (used(&state.requests, requests_per_minute.into()), requests_per_minute.into()),
            tokens: (used(&state.tokens, tokens_per_minute as f64), tokens_per_minute),
            inflight: (state.inflight.saturating_add(state.beside(now)).into(), concurrency.into()),
        }
    }

    /// What was spent here, for the others; none if they know for long.
    pub fn tell(&self, now: Instant) -> Option<QuotaSpent> {
        let state = self.state.lock();
        let fresh = state.inflight > 0 || now.saturating_duration_since(state.used) < TOLD_FOR;
        fresh.then(|| QuotaSpent {
            subject: self.subject,
            requests: state.spent.requests,
            tokens: state.spent.tokens,
            inflight: state.inflight,
        })
    }

    /// What was spent at another coordinator in the life that it has drawn `life` for.
    pub fn hear(&self, peer: &NodeId, life: u64, spent: &QuotaSpent, now: Instant) {
        let mut state = self.state.lock();
        state.fill(now);
        let told = Amount { requests: spent.requests, tokens: spent.tokens };
        match state.others.get(peer).filter(|known| known.life == life).map(|known| known.spent) {
            Some(before) => state.spend(
                told.requests.saturating_sub(before.requests),
                told.tokens.saturating_sub(before.tokens),
            ),
            // What it had spent before we heard of it was spent at some time: it takes what is there, and makes no debt.
            None => {
                state.requests.level = (state.requests.level - told.requests as f64).max(0.0);
                state.tokens.level = (state.tokens.level - told.tokens as f64).max(0.0);
            }
        }
        state.others.insert(peer.clone(), Elsewhere { life, spent: told, inflight: spent.inflight, at: now });
    }
}

/// What one coordinator has spent of one subject since its start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaSpent {
    pub subject: Subject,
    pub requests: u64,
    /// Tokens.
    pub tokens: u64,
    /// Requests under way just now.
    pub inflight: u32,
}

/// What one coordinator tells another of what was spent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spending {
    /// Drawn at its start: counts begin anew with it.
    pub life: u64,
    /// At most [`MAX_TOLD`] of those that have spent lately.
    pub spent: Vec<QuotaSpent>,
}

pub const MAX_TOLD: usize = 1024;

/// A request that was let in. While it is there, it counts as one that runs.
#[derive(Debug, Default)]
pub struct Permit([Option<Arc<Meter>>; 2]);

impl Permit {
    /// Lets a request in that all these meters have room for.
    pub fn new(meters: [Option<&Arc<Meter>>; 2], now: Instant) -> Result<Self, Exceeded> {
        let mut permit = Self::default();
        for (held, meter) in permit.0.iter_mut().zip(meters) {
            let Some(meter) = meter else { continue };
            if let Err(exceeded) = meter.begin(now) {
                for begun in std::mem::take(&mut permit.0).into_iter().flatten() {
                    begun.undo();
                }
                return Err(exceeded);
            }
            *held = Some(Arc::clone(meter));
        }
        Ok(permit)
    }

    /// Pays for a prompt of so many tokens, if there is room for it.
    pub fn prompt(&self, tokens: u64, now: Instant) -> Result<(), Exceeded> {
        self.0.iter().flatten().try_for_each(|meter| meter.check_tokens(tokens, now))?;
        self.generated(tokens);
        Ok(())
    }

    /// Pays for tokens that are there.
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
