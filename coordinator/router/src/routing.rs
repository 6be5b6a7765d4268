//! Chooses the worker for a request: a pure function of the prompt, of what each worker has cached and of its
//! load.
//!
//! The cost of a candidate is in seconds, from measured rates: the wait behind its pending work, the prefill
//! of the uncached tokens, and the decode time of the expected answer at the candidate's pace with one more
//! sequence. The prefill is weighted by the share of busy candidates, because tokens that are computed twice
//! also delay the requests behind them. So requests that share an uncached prefix gather where it is being
//! computed, and another worker recomputes a prefix only if its holder is busier by more than the weighted
//! prefill. If costs are about equal, the candidate that was given less work lately wins. A candidate with
//! fewer cached tokens than the cheapest one never ties with it: estimates of load are less certain than
//! cached tokens.
//!
//! A prefix with lasting demand gets a second holder earlier. [`demand`] accumulates how much longer its
//! requests wait at the holders than they would elsewhere. Once that exceeds the cost of computing the prefix
//! again, the next request goes to another worker. When the demand ends, the first holder is chosen again,
//! and the other copies age out of their caches.

pub mod demand;
pub mod groups;
pub mod pace;
#[cfg(test)]
mod tests;
pub mod transfer;

use crate::slot::Slot;
use pace::DecodePace;
use proto::block::HASH_UNIT_TOKENS;
use serde::{Deserialize, Serialize};
use transfer::is_worth_pulling;

/// Additional weight of a request's own prefill if all candidates are busy, for the delay of other requests.
/// It scales with the share of busy candidates.
const DELAY_WEIGHT: f64 = 2.0;
/// Minimum of leading units that requests share beyond a usual system message: 256 tokens.
pub const COMMON_UNITS: u32 = 16;

/// Prefill rate assumed while no worker has measured one, in tokens per second.
const ASSUMED_PREFILL_RATE: f64 = 1_000.0;
/// Costs within this share of the best are a tie.
const TIE_SHARE: f64 = 0.02;
/// Costs within this many seconds of the best are a tie.
const TIE_S: f64 = 0.001;
/// Measured rates within this factor of the mean count as the mean, since prompts alone make rates differ
/// this much. From the square of the factor on, the measured value counts in full.
const SAME_RATE: f64 = 1.35;
/// The same factor for paces, which vary less with the work that they were measured on.
const SAME_PACE: f64 = 1.12;
/// Half-life of a measurement's deviation from the mean, in seconds. So a worker that was slow and got no
/// work is tried again.
const TRUST_HALVES_S: f32 = 30.0;
/// Weight of recently assigned prefill: cost in seconds for each second of work that a worker was given more
/// than the worker that was given least. It is small, so it decides only between about equal costs. The term
/// is at most the request's own prefill, so that many small requests do not outweigh one large one.
const GIVEN_WEIGHT: f64 = 0.03;
/// The same weight if all candidates serve about as much of the prompt, or the policy ignores prefixes.
const EVEN_GIVEN_WEIGHT: f64 = 0.4;
/// Weight of the cached tokens of a replica (a further holder of a prefix), as a share of computing them,
/// while the first holder has no sequences. It is divided by 1 + the first holder's sequences. So a replica
/// is used while the first holder is busy, and ages out otherwise.
const REPLICA_WEIGHT: f64 = 0.5;

/// A worker that can take the request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    pub slot: Slot,
    /// Leading hash units of the prompt that the worker holds or is expected to hold soon.
    pub units: u32,
    /// Prompt tokens that the worker has to compute before this request's.
    pub pending_tokens: u64,
    pub running: u32,
    /// Sequences that the worker has and does not decode yet.
    pub queued: u32,
    /// Maximum of concurrently decoded sequences if sequences waited at the last report; 0 if unknown.
    pub slots: u32,
    /// Measured prefill rate in tokens per second; 0 if unknown.
    pub prefill_rate: f32,
    /// Seconds since the prefill rate was measured.
    pub prefill_age_s: f32,
    /// Measured decode pace.
    pub pace: DecodePace,
    /// Seconds since the pace was measured.
    pub pace_age_s: f32,
    /// Recently assigned uncached prompt tokens, with exponential decay.
    pub given_tokens: f64,
    /// A pull that gets the worker more of the prompt than it holds, if that is cheaper than computing.
    pub pull: Option<transfer::Pull>,
}

/// The routing policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Routing {
    /// Lowest estimated cost, including cached prefixes.
    #[default]
    Prefix,
    /// Lowest estimated cost, ignoring cached prefixes. For comparison.
    LeastLoad,
    /// One worker after the other. For comparison.
    RoundRobin,
}

/// Why a worker was chosen; sent in `x-kvasir-route`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The worker holds or is computing part of the prompt.
    Prefix,
    /// The worker has the lowest load.
    Load,
    /// The worker is computing the common prefix for another request of the group.
    Group,
    /// The worker becomes a further holder of the prefix, because the existing holders are in too much
    /// demand.
    Replica,
    Only,
}

impl Reason {
    /// The name in headers and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefix => "prefix",
            Self::Load => "load",
            Self::Group => "group",
            Self::Replica => "replica",
            Self::Only => "only",
        }
    }
}

/// A request to be placed.
#[derive(Debug, Clone, Copy)]
pub struct Query {
    pub routing: Routing,
    pub prompt_tokens: u32,
    /// Expected length of the answer, in tokens.
    pub output_tokens: f64,
    /// Demand for the prefix that the request shares with earlier ones, if known.
    pub standing: Option<Standing>,
    pub random: u64,
    pub round: u64,
}

/// Demand for a prefix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Standing {
    pub home: Slot,
    /// Seconds by which recent requests waited longer at the holders than elsewhere, times the seconds for
    /// which that lasted.
    pub regret: f64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoutingDecision {
    pub slot: Slot,
    pub reason: Reason,
    /// Prompt tokens that the worker's cache is expected to serve.
    pub predicted: u32,
    /// Estimated cost in seconds, by which the worker was chosen.
    pub cost: f64,
    /// Seconds by which the first token is expected later at this holder than at the fastest other worker.
    pub excess: f64,
}

/// Prompt tokens that a worker with `units` leading units serves from its cache. The last token is always
/// computed, since its logits are needed, and hits end at unit boundaries.
pub fn predicted_tokens(prompt_tokens: u32, units: u32) -> u32 {
    let unit = HASH_UNIT_TOKENS as u32;
    let max = prompt_tokens.saturating_sub(1) / unit * unit;
    units.saturating_mul(unit).min(max)
}

/// The leading units, of `units` held ones, that a worker serves whose hits end at multiples of `hit_tokens`.
pub fn hit_units(prompt_tokens: u32, units: u32, hit_tokens: u32) -> u32 {
    let unit = HASH_UNIT_TOKENS as u32;
    if hit_tokens <= unit {
        return units;
    }
    let held = units.saturating_mul(unit).min(prompt_tokens.saturating_sub(1));
    held / hit_tokens * hit_tokens / unit
}

/// Chooses among `candidates`; `None` only if there are none. `random` draws two of the candidates with about
/// equal costs, none of which has fewer cached tokens than the cheapest, and the one with less pending work
/// wins. So several coordinators with the same view do not all choose the same worker.
pub fn choose(query: &Query, candidates: &[Candidate]) -> Option<RoutingDecision> {
    let estimates = Estimates::new(query, candidates);
    let mut tied: Vec<(&Candidate, f64)> = candidates.iter().map(|c| (c, estimates.cost(c))).collect();
    let (chosen, cost) = match query.routing {
        Routing::Prefix | Routing::LeastLoad => {
            let &(best, cost) = tied.iter().min_by(|a, b| a.1.total_cmp(&b.1))?;
            let limit = cost + (cost * TIE_SHARE).max(TIE_S);
            let cached = estimates.counted(best);
            tied.retain(|&(candidate, cost)| cost <= limit && estimates.counted(candidate) >= cached);
            two_choices(&tied, query.random)?
        }
        Routing::RoundRobin => *tied.get(query.round.checked_rem(tied.len() as u64)? as usize)?,
    };
    let predicted = estimates.cached(chosen);
    let choice = RoutingDecision { slot: chosen.slot, reason: Reason::Load, predicted, cost, excess: 0.0 };
    if candidates.len() == 1 {
        return Some(RoutingDecision { reason: Reason::Only, ..choice });
    }
    if predicted == 0 || query.routing != Routing::Prefix {
        return Some(choice);
    }
    let choice = RoutingDecision { reason: Reason::Prefix, ..choice };
    let Some(standing) = query.standing else { return Some(choice) };
    Some(estimates.replicated(chosen, choice, standing, candidates))
}

/// The estimates for a candidate, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostEstimate {
    /// Until the worker can start the prompt and the prefix that it pulls is available to be pulled.
    pub queue: f64,
    /// To compute the uncached tokens.
    pub prefill: f64,
    pub transfer: f64,
    /// To generate the expected number of tokens.
    pub decode: f64,
    /// The total by which candidates are compared: the parts above with the prefill weighted by load, and the
    /// smaller corrections.
    pub cost: f64,
    /// Prompt tokens that the cache would serve, including pulled ones.
    pub cached: u32,
}

/// The estimates by which [`choose`] compares the candidates, in their order.
pub fn explain(query: &Query, candidates: &[Candidate]) -> Vec<CostEstimate> {
    let estimates = Estimates::new(query, candidates);
    candidates.iter().map(|candidate| estimates.parts(candidate)).collect()
}

impl Candidate {
    pub fn sequences(&self) -> u32 {
        self.running.saturating_add(self.queued)
    }
}

/// Rates and load of all candidates, independent of the prompt.
#[derive(Debug, Clone, Copy)]
pub struct Outlook {
    /// Weighted geometric mean of the measured prefill rates, in tokens per second.
    rate: f64,
    /// Weighted mean of the measured paces.
    pace: DecodePace,
    /// Weight of the prefill that a request brings, at least 1.
    work_weight: f64,
}

impl Outlook {
    pub fn new(candidates: &[Candidate]) -> Self {
        let rates = candidates.iter().map(|c| (f64::from(c.prefill_rate), trust(c.prefill_age_s)));
        let rate = geometric_mean(rates);
        let paces = || candidates.iter().filter(|c| c.pace.seconds > 0.0);
        let seconds = geometric_mean(paces().map(|c| (c.pace.seconds, trust(c.pace_age_s))));
        let share = paces().map(|c| c.pace.share).sum::<f64>() / paces().count().max(1) as f64;
        let pace = seconds.map_or_else(DecodePace::default, |seconds| DecodePace { seconds, share });
        let busy = candidates.iter().filter(|c| c.pending_tokens > 0).count();
        let work_weight = 1.0 + DELAY_WEIGHT * busy as f64 / candidates.len().max(1) as f64;
        Self { rate: rate.unwrap_or(ASSUMED_PREFILL_RATE), pace, work_weight }
    }

    /// Prefill rate of a candidate, in tokens per second.
    fn rate(&self, candidate: &Candidate) -> f64 {
        self.rate
            * deviation(f64::from(candidate.prefill_rate) / self.rate, candidate.prefill_age_s, SAME_RATE)
    }

    fn pace(&self, candidate: &Candidate) -> DecodePace {
        if self.pace.seconds <= 0.0 {
            return self.pace;
        }
        let ratio = candidate.pace.seconds / self.pace.seconds;
        DecodePace {
            seconds: self.pace.seconds * deviation(ratio, candidate.pace_age_s, SAME_PACE),
            ..self.pace
        }
    }

    /// Seconds until the worker could start the prompt.
    pub fn queue(&self, candidate: &Candidate) -> f64 {
        let step =
            if candidate.running > 0 { self.pace(candidate).token_s(candidate.running.into()) } else { 0.0 };
        candidate.pending_tokens as f64 / self.rate(candidate) + step
    }

    /// Seconds to generate `tokens` tokens along with the candidate's other sequences.
    fn decode(&self, candidate: &Candidate, tokens: f64) -> f64 {
        let n = f64::from(candidate.sequences()) + 1.0;
        let slots = if candidate.slots > 0 { f64::from(candidate.slots) } else { f64::INFINITY };
        let token = self.pace(candidate).token_s(n.min(slots));
        // Beyond the slots, the request waits for running sequences to end. They are assumed to be equally
        // long.
        tokens * token * (1.0 + ((n - slots) / slots).max(0.0))
    }

    /// Seconds by which generating `tokens` tokens delays the candidate's other sequences.
    fn delays(&self, candidate: &Candidate, tokens: f64) -> f64 {
        tokens * self.pace(candidate).slope_s() * f64::from(candidate.sequences())
    }
}

/// Weight of a value that was measured `age_s` seconds ago.
fn trust(age_s: f32) -> f64 {
    // Never 0: if all values are old, their mean must still be defined.
    f64::from((-age_s / TRUST_HALVES_S).exp2().max(1e-6))
}

/// Geometric mean of (value, weight), without values of 0 (unknown). `None` if all are unknown.
fn geometric_mean(values: impl Iterator<Item = (f64, f64)>) -> Option<f64> {
    let measured = values.filter(|(value, _)| *value > 0.0);
    let (sum, all) = measured.fold((0.0, 0.0), |(sum, all), (value, w)| (sum + w * value.ln(), all + w));
    (all > 0.0).then(|| f64::exp(sum / all))
}

/// Factor on the mean for a value of `ratio` times the mean, measured `age_s` seconds ago. 1 if the value is
/// unknown (`ratio` 0) or within a factor `same` of the mean.
fn deviation(ratio: f64, age_s: f32, same: f64) -> f64 {
    if ratio <= 0.0 || (1.0 / same..=same).contains(&ratio) {
        return 1.0;
    }
    let off = ratio.ln() * trust(age_s);
    // No deviation counts up to `same`, all of it from `same` squared on, linear (in logarithms) in between.
    let counts = (2.0 * (off.abs() - same.ln())).clamp(0.0, off.abs());
    counts.copysign(off).exp()
}

/// Cost estimates of the candidates for one prompt.
struct Estimates<'a> {
    query: &'a Query,
    outlook: Outlook,
    /// The lowest [`Candidate::given_tokens`].
    least_given: f64,
    given_weight: f64,
    /// Leading units and sequences of the prefix's first holder.
    home: (u32, u32),
}

impl<'a> Estimates<'a> {
    fn new(query: &'a Query, candidates: &[Candidate]) -> Self {
        let least_given = candidates.iter().map(|c| c.given_tokens).fold(f64::INFINITY, f64::min);
        let home = query.standing.and_then(|s| candidates.iter().find(|c| c.slot == s.home));
        let home = home.map_or((0, 0), |c| (c.units, c.sequences()));
        let served = |c: &Candidate| predicted_tokens(query.prompt_tokens, c.served_units());
        let max_served = candidates.iter().map(served).max().unwrap_or(0);
        let even = query.routing == Routing::LeastLoad
            || candidates.iter().all(|c| !is_worth_pulling(served(c), max_served));
        let given_weight = if even { EVEN_GIVEN_WEIGHT } else { GIVEN_WEIGHT };
        Self { query, outlook: Outlook::new(candidates), least_given, given_weight, home }
    }

    fn cached(&self, candidate: &Candidate) -> u32 {
        predicted_tokens(self.query.prompt_tokens, candidate.served_units())
    }

    /// Cached tokens that the policy counts.
    fn counted(&self, candidate: &Candidate) -> u32 {
        match self.query.routing {
            Routing::Prefix | Routing::RoundRobin => self.cached(candidate),
            Routing::LeastLoad => 0,
        }
    }

    fn cost(&self, candidate: &Candidate) -> f64 {
        let cached = self.counted(candidate);
        let rate = self.outlook.rate(candidate);
        let own = f64::from(self.query.prompt_tokens - cached);
        let (home_units, home_has) = self.home;
        let replica = self.query.standing.is_some_and(|s| s.home != candidate.slot)
            && (COMMON_UNITS..=home_units).contains(&candidate.units);
        let replica =
            if replica { REPLICA_WEIGHT * f64::from(cached) / (1.0 + f64::from(home_has)) } else { 0.0 };
        let given = (self.given_weight * (candidate.given_tokens - self.least_given)).min(own);
        let tokens = self.query.output_tokens;
        let decode = self.outlook.decode(candidate, tokens) + self.outlook.delays(candidate, tokens);
        let work = own / rate + candidate.pull_seconds();
        let begins = self.outlook.queue(candidate) + candidate.wait_seconds();
        begins + self.outlook.work_weight * work + decode + (replica + given) / rate
    }

    fn parts(&self, candidate: &Candidate) -> CostEstimate {
        let cached = self.cached(candidate);
        CostEstimate {
            queue: self.outlook.queue(candidate) + candidate.wait_seconds(),
            prefill: f64::from(self.query.prompt_tokens - cached) / self.outlook.rate(candidate),
            transfer: candidate.pull_seconds(),
            decode: self.outlook.decode(candidate, self.query.output_tokens),
            cost: self.cost(candidate),
            cached,
        }
    }

    /// Estimated seconds until the first token.
    fn ttft(&self, candidate: &Candidate) -> f64 {
        let own = f64::from(self.query.prompt_tokens - self.cached(candidate));
        let begins = self.outlook.queue(candidate) + candidate.wait_seconds();
        begins + candidate.pull_seconds() + own / self.outlook.rate(candidate)
    }

    /// Returns `choice` (the holder `chosen`), or the fastest worker without the prefix if the demand
    /// justifies another holder.
    fn replicated(
        &self,
        chosen: &Candidate,
        choice: RoutingDecision,
        standing: Standing,
        candidates: &[Candidate],
    ) -> RoutingDecision {
        let (holders, others): (Vec<&Candidate>, Vec<&Candidate>) =
            candidates.iter().partition(|c| c.units.saturating_add(COMMON_UNITS) > chosen.units);
        let quickest = others.into_iter().min_by(|a, b| self.ttft(a).total_cmp(&self.ttft(b)));
        let Some(other) = quickest else { return choice };
        let excess = (self.ttft(chosen) - self.ttft(other)).max(0.0);
        let missing = choice.predicted.saturating_sub(self.cached(other));
        let again = f64::from(missing) / self.outlook.rate(other) + other.pull_seconds();
        if excess > 0.0 && standing.regret > holders.len() as f64 * again * again {
            let (slot, predicted, cost) = (other.slot, self.cached(other), self.cost(other));
            return RoutingDecision { slot, reason: Reason::Replica, predicted, cost, excess: 0.0 };
        }
        RoutingDecision { excess, ..choice }
    }
}

/// Draws two different candidates of `tied` by `random` and returns the one with less pending work.
fn two_choices<'a>(tied: &[(&'a Candidate, f64)], random: u64) -> Option<(&'a Candidate, f64)> {
    let len = tied.len() as u64;
    let first = random.checked_rem(len)?;
    let step = if len > 1 { 1 + (random >> 32) % (len - 1) } else { 0 };
    let (a, b) = (tied.get(first as usize)?, tied.get(((first + step) % len) as usize)?);
    let in_hand = |c: &Candidate| (c.pending_tokens, c.sequences());
    Some(if in_hand(b.0) < in_hand(a.0) { *b } else { *a })
}
