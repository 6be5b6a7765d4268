//! How busy a worker is: what it reports, and what this coordinator has sent there since.

use super::operations::Offers;
use super::pulls::{PullTerms, Sends};
use crate::balancer::Ticket;
use crate::routing::Candidate;
use crate::routing::pace::{Done, PaceMeter};
use crate::slot::Slot;
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use proto::message::{LoadReport, WorkerState};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A worker's rate is averaged over about this long. What it reports follows its last steps, and these say more
/// about how long the prompts were than about the worker.
const RATE_MEMORY: Duration = Duration::from_secs(60);
/// A rate that was measured so many times in a row to be off the average by so much has changed, and counts at once.
const STRAYS: u32 = 3;
const STRAY: f64 = 2.0;
/// What a worker was given counts half after this long.
const GIVEN_HALVES: Duration = Duration::from_secs(300);
/// Of what it should have computed of a prompt by now, so much is believed: late tokens of a long prompt take longer
/// than early ones, and who waits for a worker that is not done waits long.
const PROGRESS_SHARE: f64 = 0.25;

/// A worker that has been stuck in a step for this long gets no new work while another is there.
const STALLED_MS: u64 = 3_000;

/// A tenant with less than this part of what a worker may be sent is not kept out by others.
const KEPT_PART: u32 = 16;

#[derive(Debug)]
pub(super) struct Load {
    /// Tells this membership of the slot from earlier ones.
    pub(super) join: u64,
    pub(super) report: Option<LoadReport>,
    pub(super) heard: Instant,
    /// It should take work again, and is given until then to say so.
    pub(super) resumes: Option<Instant>,
    /// Prompts from here that it has to compute, in the order in which they were sent.
    line: VecDeque<Queued>,
    /// When it has begun with the first of them.
    since: Instant,
    /// Sequences from here that it decodes.
    running: u32,
    /// What others have sent there, by the last report.
    foreign: Foreign,
    pub(super) pulls: PullTerms,
    pub(super) sends: Sends,
    pub(super) offers: Offers,
    rate: PrefillRate,
    pace: PaceMeter,
    /// Sequences that it decodes at once, if others had to wait at its last report; else 0.
    slots: u32,
    /// Sequences that wait here for what it will pull.
    pub(super) awaiting: u32,
    /// How many sequences each tenant has there, from here.
    tenants: HashMap<Arc<str>, u32>,
    given: RecentPrefill,
}

/// A worker's measured prefill rate.
#[derive(Debug, Clone, Copy)]
struct PrefillRate {
    /// Tokens per second, averaged; 0 if unknown.
    mean: f64,
    /// As it was reported last, and when that was another value than before.
    last: f32,
    measured: Instant,
    /// How many of the last reported values in a row were far off the mean.
    strays: u32,
}

impl PrefillRate {
    /// It is reported, `since` seconds after the report before.
    fn heard(&mut self, now: Instant, mut since: f64, reported: f32) {
        let rate = f64::from(reported);
        if reported != self.last {
            // What was measured long ago counts for little.
            since = since.max(seconds(now, self.measured));
            (self.last, self.measured) = (reported, now);
            let off = rate > self.mean * STRAY || rate * STRAY < self.mean;
            self.strays = if off { self.strays + 1 } else { 0 };
        }
        if self.mean <= 0.0 || self.strays >= STRAYS {
            (self.mean, self.strays) = (rate, 0);
        } else {
            self.mean += (1.0 - (-since / RATE_MEMORY.as_secs_f64()).exp()) * (rate - self.mean);
        }
    }
}

/// A prompt that it has to compute.
#[derive(Debug, Clone)]
pub(super) struct Queued {
    pub(super) ticket: Ticket,
    pub(super) chain: Arc<[BlockId]>,
    /// Its tokens, and those of them that it computes.
    pub(super) prompt: u64,
    pub(super) uncached: u64,
    /// When what it pulls of the prompt has come.
    pub(super) from: Instant,
}

#[derive(Debug, Default, Clone, Copy)]
struct Foreign {
    /// Prompt tokens to be computed.
    pending: u64,
    running: u32,
    waiting: u32,
}

/// Prompt tokens that it was given to compute, old ones counting less.
#[derive(Debug, Clone, Copy)]
struct RecentPrefill {
    tokens: f64,
    at: Instant,
}

impl Load {
    /// Nothing is known but that it has joined.
    pub(super) fn new(now: Instant, join: u64) -> Self {
        Self {
            join,
            report: None,
            heard: now,
            resumes: None,
            line: VecDeque::new(),
            since: now,
            running: 0,
            foreign: Foreign::default(),
            pulls: PullTerms::default(),
            sends: Sends::default(),
            offers: Offers::default(),
            rate: PrefillRate { mean: 0.0, last: 0.0, measured: now, strays: 0 },
            pace: PaceMeter::default(),
            slots: 0,
            awaiting: 0,
            tenants: HashMap::new(),
            given: RecentPrefill { tokens: 0.0, at: now },
        }
    }

    pub(super) fn take(&mut self, now: Instant, report: LoadReport) {
        self.rate.heard(now, seconds(now, self.heard), report.prefill_rate);
        let prefills = report.pending_prefill_tokens > 0;
        self.pace.heard(Done { at: now, tokens: report.tokens, running: report.running, prefills });
        self.slots = if report.waiting > 0 { report.running } else { 0 };
        self.heard = now;
        // It does not know yet what it will find in its cache of prompts that wait.
        let prompts: u64 = self.line.iter().map(|queued| queued.prompt).sum();
        let ours = self.running + self.line.len() as u32;
        self.foreign = Foreign {
            pending: report.pending_prefill_tokens.saturating_sub(prompts),
            running: report.running.saturating_sub(ours),
            waiting: report.waiting.saturating_sub(ours.saturating_sub(report.running)),
        };
        self.report = Some(report);
    }

    /// Whether it is heard of and gets on.
    pub(super) fn is_lively(&self, now: Instant, suspect_after: Duration) -> bool {
        let stalled = self.report.as_ref().is_some_and(|report| report.stalled_ms > STALLED_MS);
        !stalled && now.saturating_duration_since(self.heard) < suspect_after
    }

    /// Whether it drains by its own word, and may yet be heard to take work.
    pub(super) fn resumes(&self, now: Instant) -> bool {
        let drains = self.report.as_ref().is_some_and(|report| report.state == WorkerState::Draining);
        drains && self.resumes.is_some_and(|until| now < until)
    }

    /// It is sent a prompt.
    pub(super) fn give(&mut self, now: Instant, queued: Queued) {
        if self.line.is_empty() {
            self.since = now;
        }
        self.given = RecentPrefill { tokens: self.given(now) + queued.uncached as f64, at: now };
        self.line.push_back(queued);
    }

    /// It has computed the prompt.
    pub(super) fn started(&mut self, now: Instant, ticket: Ticket) {
        if self.take_out(now, ticket) {
            self.running += 1;
        }
    }

    /// It has nothing to do with it any more; `started`: it decoded it.
    pub(super) fn ended(&mut self, now: Instant, ticket: Ticket, started: bool) {
        if started {
            self.running -= 1;
        } else {
            self.take_out(now, ticket);
        }
    }

    fn take_out(&mut self, now: Instant, ticket: Ticket) -> bool {
        let Some(at) = self.line.iter().position(|queued| queued.ticket == ticket) else { return false };
        if at == 0 {
            self.since = now;
        }
        self.line.remove(at).is_some()
    }

    /// Sequences sent there from here and not yet ended.
    pub(super) fn inflight(&self) -> u32 {
        self.line.len() as u32 + self.running
    }

    /// A tenant has one sequence more there, or one less.
    pub(super) fn count(&mut self, tenant: &Arc<str>, more: bool) {
        if more {
            *self.tenants.entry(Arc::clone(tenant)).or_default() += 1;
        } else if let Some(count) = self.tenants.get_mut(tenant) {
            *count -= 1;
            if *count == 0 {
                self.tenants.remove(tenant);
            }
        }
    }

    /// Whether it may be sent one more of the tenant's. What others have sent does not keep a tenant out that has little
    /// there: there are places besides the `most` for those.
    pub(super) fn has_room(&self, tenant: &str, most: u32) -> bool {
        let own = || self.tenants.get(tenant).copied().unwrap_or(0);
        let inflight = self.inflight() + self.awaiting;
        inflight < most || inflight < most.saturating_mul(2) && own() < most / KEPT_PART
    }

    /// Prompt tokens sent there from here and not yet computed, by what is known for certain.
    pub(super) fn own_pending(&self) -> u64 {
        self.line.iter().map(|queued| queued.uncached).sum()
    }

    /// Prompt tokens sent there by anybody and not yet computed, by what is known for certain.
    pub(super) fn sent(&self) -> u64 {
        self.own_pending() + self.foreign.pending
    }

    /// Prompt tokens that it has to compute: of the first in line less as time goes by.
    pub(super) fn pending(&self, now: Instant) -> u64 {
        self.sent().saturating_sub(self.done(now))
    }

    /// Prompt tokens that it computes before it has the first `units` of `chain`, of which it has the first `held`, and the
    /// seconds before which a pull does not bring them; `None` if no prompt that it was sent from here and has not computed
    /// yet brings them.
    pub(super) fn brings(
        &self,
        now: Instant,
        chain: &[BlockId],
        (held, units): (u32, u32),
    ) -> Option<(u64, f64)> {
        let last = (units as usize).checked_sub(1)?;
        let id = chain.get(last)?;
        let at = self.line.iter().position(|queued| queued.chain.get(last) == Some(id))?;
        let queued = self.line.get(at)?;
        let before: u64 = self.line.iter().take(at).map(|queued| queued.uncached).sum();
        let behind = queued.prompt.saturating_sub(u64::from(units) * HASH_UNIT_TOKENS as u64);
        let lacks = u64::from(units.saturating_sub(held)) * HASH_UNIT_TOKENS as u64;
        let own = queued.uncached.saturating_sub(behind);
        let believed = (self.foreign.pending + before + own).saturating_sub(self.done(now));
        let tokens = believed.min(self.foreign.pending + before + own.min(lacks));
        Some((tokens, seconds(queued.from, now)))
    }

    /// What it is believed to have computed of the first prompt in line.
    fn done(&self, now: Instant) -> u64 {
        let first = self.line.front().map_or(0, |queued| queued.uncached);
        ((PROGRESS_SHARE * self.rate.mean * seconds(now, self.since)) as u64).min(first)
    }

    /// How it looks to who has to choose, with `units` leading units of the prompt.
    pub(super) fn candidate(&self, now: Instant, slot: Slot, units: u32) -> Candidate {
        Candidate {
            slot,
            units,
            pending_tokens: self.pending(now),
            running: self.running + self.foreign.running,
            queued: self.line.len() as u32 + self.awaiting + self.foreign.waiting,
            slots: self.slots,
            prefill_rate: self.rate.mean as f32,
            prefill_age_s: seconds(now, self.rate.measured) as f32,
            pace: self.pace.pace().unwrap_or_default(),
            pace_age_s: self.pace.measured().map_or(0.0, |at| seconds(now, at) as f32),
            given_tokens: self.given(now),
            pull: None,
        }
    }

    /// How long its steps take; 0 while it has nothing to do.
    pub(super) fn step_seconds(&self) -> f64 {
        let idle = self.inflight() == 0 && self.foreign.pending == 0 && self.foreign.running == 0;
        let step_ms = self.report.as_ref().map_or(0.0, |report| report.step_ms);
        if idle { 0.0 } else { f64::from(step_ms) / 1e3 }
    }

    fn given(&self, now: Instant) -> f64 {
        self.given.tokens * (-seconds(now, self.given.at) / GIVEN_HALVES.as_secs_f64()).exp2()
    }
}

fn seconds(now: Instant, then: Instant) -> f64 {
    now.saturating_duration_since(then).as_secs_f64()
}
