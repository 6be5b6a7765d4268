//! Which worker a request goes to: a pure function of the prompt, what each worker holds and how busy it is.
//!
//! Cost is in seconds, from measured rates: the wait behind what the worker has to do, and the work that the
//! request itself brings. That work is weighed [`WORK_WEIGHT`] times, because a token that is computed again
//! delays not only this request but everyone who comes to that worker after it. So requests that share an
//! uncached prefix gather where it is being computed, and a holder must be busier by more than that to make
//! recomputing elsewhere the better choice.

#[cfg(test)]
mod tests;
pub mod transfer;

use crate::slot::Slot;
use proto::block::HASH_UNIT_TOKENS;
use serde::{Deserialize, Serialize};

/// How often the request's own work counts: once as its own latency, twice as delay of others.
pub const WORK_WEIGHT: f64 = 3.0;

/// Tokens per second assumed while no worker has measured its rate.
const ASSUMED_PREFILL_RATE: f64 = 1_000.0;
/// Seconds of a decode step assumed while none has been measured.
const ASSUMED_STEP_S: f64 = 0.01;
/// Costs this close (as a share of the best, and in seconds) are a tie.
const TIE_SHARE: f64 = 0.02;
const TIE_S: f64 = 0.001;

/// A worker that could take the request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Its slot.
    pub slot: Slot,
    /// Leading hash units of the prompt that it holds or is about to hold.
    pub units: u32,
    /// Prompt tokens that it has to compute before this request's.
    pub pending_tokens: u64,
    /// Sequences that it decodes.
    pub running: u32,
    /// Measured prefill rate in tokens per second; 0 if unknown.
    pub prefill_rate: f32,
    /// Measured time of a decode step in milliseconds; 0 if unknown.
    pub step_ms: f32,
    /// The pull by which it would get more of the prompt than it holds, if that beats computing.
    pub pull: Option<transfer::Pull>,
}

/// By what a worker is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Routing {
    /// The least time until it answers, with what it holds of the prompt counted in.
    #[default]
    Prefix,
    /// The same as if nobody held anything; to compare with.
    LeastLoad,
    /// One after the other; to compare with.
    RoundRobin,
}

/// Why a worker was chosen, as told in `x-kvasir-route`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// It holds, or is computing, part of the prompt.
    Prefix,
    /// It has the least to do.
    Load,
    /// There was no other.
    Only,
}

impl Reason {
    /// The name in headers and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefix => "prefix",
            Self::Load => "load",
            Self::Only => "only",
        }
    }
}

/// The outcome of routing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// The worker.
    pub slot: Slot,
    /// Why.
    pub reason: Reason,
    /// Prompt tokens that its cache will serve.
    pub predicted: u32,
    /// The estimate that decided, in seconds.
    pub cost: f64,
}

/// Prompt tokens that a worker serves from its cache if it holds `units` leading units: the last token is
/// always computed, since its logits are needed, and hits end at unit boundaries.
pub fn predicted_tokens(prompt_tokens: u32, units: u32) -> u32 {
    let unit = HASH_UNIT_TOKENS as u32;
    let most = prompt_tokens.saturating_sub(1) / unit * unit;
    units.saturating_mul(unit).min(most)
}

/// Chooses among `candidates`; `None` only if there are none. `random` breaks ties: of two candidates drawn
/// from those that cost the same, the one with less in hand is taken, so that several coordinators with the
/// same view do not all run to the same worker. `turn` counts the choices so far.
pub fn choose(
    routing: Routing,
    prompt_tokens: u32,
    candidates: &[Candidate],
    random: u64,
    turn: u64,
) -> Option<Choice> {
    let rate = candidates.iter().map(|c| f64::from(c.prefill_rate)).fold(0.0, f64::max);
    let assumed_rate = if rate > 0.0 { rate } else { ASSUMED_PREFILL_RATE };
    let cached = |c: &Candidate| predicted_tokens(prompt_tokens, c.served_units());
    let seconds = |c: &Candidate| match routing {
        Routing::Prefix | Routing::RoundRobin => cost(prompt_tokens - cached(c), c, assumed_rate),
        Routing::LeastLoad => cost(prompt_tokens, c, assumed_rate),
    };
    let mut tied: Vec<(&Candidate, f64)> = candidates.iter().map(|c| (c, seconds(c))).collect();
    let (chosen, cost) = match routing {
        Routing::Prefix | Routing::LeastLoad => {
            let best = tied.iter().map(|&(_, cost)| cost).fold(f64::INFINITY, f64::min);
            tied.retain(|&(_, cost)| cost <= best + (best * TIE_SHARE).max(TIE_S));
            two_choices(&tied, random)?
        }
        Routing::RoundRobin => *tied.get(turn.checked_rem(tied.len() as u64)? as usize)?,
    };
    let predicted = cached(chosen);
    let reason = match candidates.len() {
        1 => Reason::Only,
        _ if predicted > 0 && routing == Routing::Prefix => Reason::Prefix,
        _ => Reason::Load,
    };
    Some(Choice { slot: chosen.slot, reason, predicted, cost })
}

/// Of computing `own` tokens behind all that the candidate has to do.
fn cost(own: u32, candidate: &Candidate, assumed_rate: f64) -> f64 {
    let rate = if candidate.prefill_rate > 0.0 { f64::from(candidate.prefill_rate) } else { assumed_rate };
    let step = if candidate.step_ms > 0.0 { f64::from(candidate.step_ms) / 1e3 } else { ASSUMED_STEP_S };
    let queue = candidate.pending_tokens as f64 / rate + f64::from(candidate.running) * step;
    queue + WORK_WEIGHT * f64::from(own) / rate + candidate.pull_cost()
}

/// Of two different ones of `tied`, drawn by `random`, the one with less in hand.
fn two_choices<'a>(tied: &[(&'a Candidate, f64)], random: u64) -> Option<(&'a Candidate, f64)> {
    let len = tied.len() as u64;
    let first = random.checked_rem(len)?;
    let step = if len > 1 { 1 + (random >> 32) % (len - 1) } else { 0 };
    let (a, b) = (tied.get(first as usize)?, tied.get(((first + step) % len) as usize)?);
    let in_hand = |c: &Candidate| (c.pending_tokens, c.running);
    Some(if in_hand(b.0) < in_hand(a.0) { *b } else { *a })
}
