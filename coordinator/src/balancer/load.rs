//! How busy a worker is: what it reports, and what this coordinator has sent there since.

use crate::routing::Candidate;
use crate::slot::Slot;
use proto::message::LoadReportV1;
use std::time::{Duration, Instant};

/// A worker's rate is averaged over about this long. What it reports follows its last steps, and these say more
/// about how long the prompts were than about the worker.
const RATE_MEMORY: Duration = Duration::from_secs(60);
/// What a worker was given counts half after this long.
const GIVEN_HALVES: Duration = Duration::from_secs(300);

#[derive(Debug)]
pub(super) struct Load {
    /// Tells this membership of the slot from earlier ones.
    pub(super) join: u64,
    pub(super) report: Option<LoadReportV1>,
    pub(super) heard: Instant,
    pub(super) own: Own,
    /// What others have sent there, by the last report.
    pub(super) foreign: Own,
    /// Tokens per second, averaged; 0 if unknown.
    prefill_rate: f64,
    given: Given,
}

#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Own {
    /// Prompt tokens to be computed.
    pub(super) pending: u64,
    /// Sequences whose prompt is still to be computed.
    pub(super) unstarted: u32,
    /// Sequences that are decoded.
    pub(super) running: u32,
}

/// Prompt tokens that it was given to compute, old ones counting less.
#[derive(Debug, Clone, Copy)]
struct Given {
    tokens: f64,
    at: Instant,
}

impl Load {
    /// Nothing is known but that it has joined.
    pub(super) fn new(now: Instant, join: u64) -> Self {
        let given = Given { tokens: 0.0, at: now };
        let (own, foreign) = (Own::default(), Own::default());
        Self { join, report: None, heard: now, own, foreign, prefill_rate: 0.0, given }
    }

    /// It reports.
    pub(super) fn take(&mut self, now: Instant, report: LoadReportV1) {
        let rate = f64::from(report.prefill_rate);
        let share = 1.0 - (-seconds(now, self.heard) / RATE_MEMORY.as_secs_f64()).exp();
        self.prefill_rate =
            if self.prefill_rate > 0.0 { self.prefill_rate + share * (rate - self.prefill_rate) } else { rate };
        self.heard = now;
        self.foreign = Own {
            pending: report.pending_prefill_tokens.saturating_sub(self.own.pending),
            unstarted: report.waiting.saturating_sub(self.own.unstarted),
            running: report.running.saturating_sub(self.own.running + self.own.unstarted),
        };
        self.report = Some(report);
    }

    /// It is sent a prompt, of which it has to compute `tokens`.
    pub(super) fn give(&mut self, now: Instant, tokens: u64) {
        self.own.pending += tokens;
        self.own.unstarted += 1;
        self.given = Given { tokens: self.given(now) + tokens as f64, at: now };
    }

    /// How it looks to who has to choose, with `units` leading units of the prompt.
    pub(super) fn candidate(&self, now: Instant, slot: Slot, units: u32) -> Candidate {
        Candidate {
            slot,
            units,
            pending_tokens: self.own.pending + self.foreign.pending,
            running: self.own.running + self.foreign.running,
            prefill_rate: self.prefill_rate as f32,
            step_ms: self.report.as_ref().map_or(0.0, |r| r.step_ms),
            given_tokens: self.given(now),
        }
    }

    fn given(&self, now: Instant) -> f64 {
        self.given.tokens * (-seconds(now, self.given.at) / GIVEN_HALVES.as_secs_f64()).exp2()
    }
}

fn seconds(now: Instant, then: Instant) -> f64 {
    now.saturating_duration_since(then).as_secs_f64()
}
