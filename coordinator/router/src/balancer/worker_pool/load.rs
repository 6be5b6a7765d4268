//! A worker's load: what it reported, plus what this coordinator has sent since.

use super::operations::Offers;
use super::pulls::{PullTerms, Sends};
use crate::balancer::{RouteRequest, Ticket};
use crate::routing::Candidate;
use crate::routing::pace::{DecodePaceMeter, DecodeSample};
use crate::slot::Slot;
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use proto::worker::{LoadReport, WorkerState};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time constant of the average prefill rate. A reported rate covers the last steps only, and so depends more
/// on the lengths of the prompts than on the worker.
const RATE_MEMORY: Duration = Duration::from_secs(60);
/// After this many outliers in a row the last value replaces the average.
const STRAYS: u32 = 3;
/// A value is an outlier if it is off the average by more than this factor.
const STRAY: f64 = 2.0;
/// Half-life of recently assigned prefill.
const RECENT_PREFILL_HALF_LIFE: Duration = Duration::from_secs(300);
/// Share of the estimated progress on the first prompt that is counted. Late tokens of a long prompt take
/// longer than early ones, and waiting for an unfinished worker is expensive.
const PROGRESS_SHARE: f64 = 0.25;

/// A worker that has been stuck in a step for longer than this, in ms, gets no new work while another is
/// available.
const STALLED_MS: u64 = 3_000;

/// A tenant with less than `1 / TENANT_SHARE_DIVISOR` of a worker's maximum is not kept out by the requests
/// of other tenants.
const TENANT_SHARE_DIVISOR: u32 = 16;

#[derive(Debug)]
pub(super) struct Load {
    /// Distinguishes this membership of the slot from earlier ones.
    pub(super) join: u64,
    pub(super) report: Option<LoadReport>,
    /// When the last report arrived, or else when the worker joined.
    pub(super) reported: Instant,
    /// Until when requests wait for the worker's report that it takes work again.
    pub(super) resumes: Option<Instant>,
    /// Prompts from this coordinator that are not computed yet, in the order sent.
    prompts: VecDeque<PendingPrompt>,
    /// When the worker started the first of `prompts`.
    since: Instant,
    /// Sum of the tokens of `prompts`.
    prompt_tokens: u64,
    /// Sequences from this coordinator that the worker decodes.
    running: u32,
    /// Maxima since the last report. The next report may have been made at any time since then.
    peak: OwnWork,
    /// Work from other coordinators, by the last report.
    foreign: Foreign,
    pub(super) pulls: PullTerms,
    pub(super) sends: Sends,
    pub(super) offers: Offers,
    rate: PrefillRate,
    pace: DecodePaceMeter,
    /// Maximum of concurrently decoded sequences if sequences waited at the last report; else 0.
    slots: u32,
    /// Sequences that wait here for a prefix that this worker will pull.
    pub(super) waiting_for_prefix: u32,
    /// Sequences from this coordinator by tenant.
    tenants: HashMap<Arc<str>, u32>,
    recent_prefill: RecentPrefill,
}

/// A worker's measured prefill rate.
#[derive(Debug, Clone, Copy)]
struct PrefillRate {
    /// Tokens per second, averaged; 0 if unknown.
    mean: f64,
    /// The last reported value.
    last: f32,
    /// When the reported value last changed.
    measured: Instant,
    /// Number of successive outliers.
    strays: u32,
}

impl PrefillRate {
    /// Takes a reported rate. The last report was `since` seconds ago.
    fn update(&mut self, now: Instant, mut since: f64, reported: f32) {
        let rate = f64::from(reported);
        if reported != self.last {
            // An old average gets little weight.
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

/// A prompt that the worker has to compute.
#[derive(Debug, Clone)]
pub(super) struct PendingPrompt {
    pub(super) ticket: Ticket,
    pub(super) request: Arc<RouteRequest>,
    /// Prompt tokens that the worker computes.
    pub(super) uncached: u64,
    /// When the pulled part of the prompt has arrived.
    pub(super) from: Instant,
}

impl PendingPrompt {
    fn tokens(&self) -> u64 {
        u64::from(self.request.prompt_tokens)
    }
}

#[derive(Debug, Default, Clone, Copy)]
struct Foreign {
    /// Prompt tokens to be computed.
    pending: u64,
    running: u32,
    waiting: u32,
}

/// Unfinished work from this coordinator.
#[derive(Debug, Default, Clone, Copy)]
struct OwnWork {
    /// Tokens of prompts that are not computed yet.
    prompt_tokens: u64,
    sequences: u32,
}

/// Recently assigned uncached prompt tokens, with exponential decay.
#[derive(Debug, Clone, Copy)]
struct RecentPrefill {
    tokens: f64,
    at: Instant,
}

impl Load {
    /// The load of a worker that has just joined.
    pub(super) fn new(now: Instant, join: u64) -> Self {
        Self {
            join,
            report: None,
            reported: now,
            resumes: None,
            prompts: VecDeque::new(),
            since: now,
            prompt_tokens: 0,
            running: 0,
            peak: OwnWork::default(),
            foreign: Foreign::default(),
            pulls: PullTerms::default(),
            sends: Sends::default(),
            offers: Offers::default(),
            rate: PrefillRate { mean: 0.0, last: 0.0, measured: now, strays: 0 },
            pace: DecodePaceMeter::default(),
            slots: 0,
            waiting_for_prefix: 0,
            tenants: HashMap::new(),
            recent_prefill: RecentPrefill { tokens: 0.0, at: now },
        }
    }

    pub(super) fn take(&mut self, now: Instant, report: LoadReport) {
        self.rate.update(now, seconds(now, self.reported), report.prefill_rate);
        let prefills = report.pending_prefill_tokens > 0;
        self.pace.update(DecodeSample { at: now, tokens: report.tokens, running: report.running, prefills });
        self.slots = if report.waiting > 0 { report.running } else { 0 };
        self.reported = now;
        // A report counts a waiting prompt in full: its cached part is not looked up yet.
        // Work that ended here meanwhile may be in the report, and is not that of others.
        let own = self.own_work();
        let ours = std::mem::replace(&mut self.peak, own);
        self.foreign = Foreign {
            pending: report.pending_prefill_tokens.saturating_sub(ours.prompt_tokens),
            running: report.running.saturating_sub(ours.sequences),
            waiting: report.waiting.saturating_sub(ours.sequences.saturating_sub(report.running)),
        };
        self.report = Some(report);
    }

    /// Whether the worker reports in time and is not stalled.
    pub(super) fn is_responsive(&self, now: Instant, suspect_after: Duration) -> bool {
        let stalled = self.report.as_ref().is_some_and(|report| report.stalled_ms > STALLED_MS);
        !stalled && now.saturating_duration_since(self.reported) < suspect_after
    }

    /// Whether the worker reported a drain and may soon report that it takes work.
    pub(super) fn resumes(&self, now: Instant) -> bool {
        let drains = self.report.as_ref().is_some_and(|report| report.state == WorkerState::Draining);
        drains && self.resumes.is_some_and(|until| now < until)
    }

    /// Books a prompt that was sent to the worker.
    pub(super) fn enqueue(&mut self, now: Instant, prompt: PendingPrompt) {
        if self.prompts.is_empty() {
            self.since = now;
        }
        self.recent_prefill =
            RecentPrefill { tokens: self.recent_prefill_tokens(now) + prompt.uncached as f64, at: now };
        self.prompt_tokens += prompt.tokens();
        self.prompts.push_back(prompt);
        let own = self.own_work();
        self.peak.prompt_tokens = self.peak.prompt_tokens.max(own.prompt_tokens);
        self.peak.sequences = self.peak.sequences.max(own.sequences);
    }

    fn own_work(&self) -> OwnWork {
        OwnWork { prompt_tokens: self.prompt_tokens, sequences: self.inflight() }
    }

    /// The worker has computed the prompt.
    pub(super) fn started(&mut self, now: Instant, ticket: Ticket) {
        if self.take_out(now, ticket) {
            self.running += 1;
        }
    }

    /// The worker has no more work with the sequence. `started`: the sequence had been decoding.
    pub(super) fn ended(&mut self, now: Instant, ticket: Ticket, started: bool) {
        if started {
            self.running -= 1;
        } else {
            self.take_out(now, ticket);
        }
    }

    fn take_out(&mut self, now: Instant, ticket: Ticket) -> bool {
        let Some(at) = self.prompts.iter().position(|prompt| prompt.ticket == ticket) else { return false };
        if at == 0 {
            self.since = now;
        }
        let Some(prompt) = self.prompts.remove(at) else { return false };
        self.prompt_tokens -= prompt.tokens();
        true
    }

    /// Whether no request from this coordinator is counted here.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.inflight() + self.waiting_for_prefix == 0 && self.tenants.is_empty()
    }

    /// Unfinished sequences that this coordinator has sent to the worker.
    pub(super) fn inflight(&self) -> u32 {
        self.prompts.len() as u32 + self.running
    }

    /// Adds or removes one sequence of a tenant.
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

    /// Whether the worker may be sent one more sequence of the tenant. Below `max` sequences every tenant is
    /// admitted. Between `max` and `2·max`, only tenants with fewer than `max / TENANT_SHARE_DIVISOR`
    /// sequences are admitted.
    pub(super) fn has_room(&self, tenant: &str, max: u32) -> bool {
        let own = || self.tenants.get(tenant).copied().unwrap_or(0);
        let inflight = self.inflight() + self.waiting_for_prefix;
        inflight < max || inflight < max.saturating_mul(2) && own() < max / TENANT_SHARE_DIVISOR
    }

    /// Uncached prompt tokens from this coordinator that are not computed yet, without estimated progress.
    pub(super) fn own_pending(&self) -> u64 {
        self.prompts.iter().map(|prompt| prompt.uncached).sum()
    }

    /// Uncached prompt tokens from all coordinators that are not computed yet, without estimated progress.
    pub(super) fn sent(&self) -> u64 {
        self.own_pending() + self.foreign.pending
    }

    /// Prompt tokens to be computed, less the estimated progress on the first prompt in line.
    pub(super) fn pending(&self, now: Instant) -> u64 {
        self.sent().saturating_sub(self.done(now))
    }

    /// Prompt tokens to be computed before the worker has the first `units` of `chain`, of which it holds
    /// `held`, and the seconds until the pull that brings them is complete. `None` if no unfinished prompt
    /// from this coordinator brings them.
    pub(super) fn brings(
        &self,
        now: Instant,
        chain: &[BlockId],
        (held, units): (u32, u32),
    ) -> Option<(u64, f64)> {
        let last = (units as usize).checked_sub(1)?;
        let id = chain.get(last)?;
        let at = self.prompts.iter().position(|prompt| prompt.request.chain.get(last) == Some(id))?;
        let prompt = self.prompts.get(at)?;
        let before: u64 = self.prompts.iter().take(at).map(|prompt| prompt.uncached).sum();
        let behind = prompt.tokens().saturating_sub(u64::from(units) * HASH_UNIT_TOKENS as u64);
        let lacks = u64::from(units.saturating_sub(held)) * HASH_UNIT_TOKENS as u64;
        let own = prompt.uncached.saturating_sub(behind);
        let estimate = (self.foreign.pending + before + own).saturating_sub(self.done(now));
        let tokens = estimate.min(self.foreign.pending + before + own.min(lacks));
        Some((tokens, seconds(prompt.from, now)))
    }

    /// Estimated progress on the first prompt in line, in tokens.
    fn done(&self, now: Instant) -> u64 {
        let first = self.prompts.front().map_or(0, |prompt| prompt.uncached);
        ((PROGRESS_SHARE * self.rate.mean * seconds(now, self.since)) as u64).min(first)
    }

    /// The worker as a routing candidate that holds `units` leading units of the prompt.
    pub(super) fn candidate(&self, now: Instant, slot: Slot, units: u32) -> Candidate {
        Candidate {
            slot,
            units,
            pending_tokens: self.pending(now),
            running: self.running + self.foreign.running,
            queued: self.prompts.len() as u32 + self.waiting_for_prefix + self.foreign.waiting,
            slots: self.slots,
            prefill_rate: self.rate.mean as f32,
            prefill_age_s: seconds(now, self.rate.measured) as f32,
            pace: self.pace.pace().unwrap_or_default(),
            pace_age_s: self.pace.measured().map_or(0.0, |at| seconds(now, at) as f32),
            given_tokens: self.recent_prefill_tokens(now),
            pull: None,
        }
    }

    /// Duration of the worker's steps in seconds; 0 while it is idle.
    pub(super) fn step_seconds(&self) -> f64 {
        let idle = self.inflight() == 0 && self.foreign.pending == 0 && self.foreign.running == 0;
        let step_ms = self.report.as_ref().map_or(0.0, |report| report.step_ms);
        if idle { 0.0 } else { f64::from(step_ms) / 1e3 }
    }

    fn recent_prefill_tokens(&self, now: Instant) -> f64 {
        self.recent_prefill.tokens
            * (-seconds(now, self.recent_prefill.at) / RECENT_PREFILL_HALF_LIFE.as_secs_f64()).exp2()
    }
}

fn seconds(now: Instant, then: Instant) -> f64 {
    now.saturating_duration_since(then).as_secs_f64()
}
