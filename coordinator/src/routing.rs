//! Which worker a request goes to: a pure function of the prompt, what each worker holds and how busy it is.
//!
//! Cost is in seconds, from measured rates: the wait behind what the worker has to do, the prompt, and the answer's
//! tokens at the pace that the worker has with one generation more, for as many as are expected. The prompt's work counts
//! for more than once: the busier the workers, the more it is weighed, because a token that is computed
//! again delays not only this request but everyone who comes to that worker after it. So requests that share an
//! uncached prefix gather where it is being computed, and a holder must be busier by more than that to make
//! recomputing elsewhere the better choice. Where the rest is about the same, who was given less lately is chosen.
//!
//! That holds for one request. A prefix that many ask for gets a second holder earlier: what its requests wait at
//! its holders longer than they would have elsewhere is summed up over time ([`demand`]), and once that was as long as
//! computing the prefix again takes, for as long, the next goes elsewhere. When the demand is gone the first holder is
//! chosen again, and what the others hold ages out of their caches.

pub mod demand;
pub mod groups;
pub mod pace;
#[cfg(test)]
mod tests;
pub mod transfer;

use crate::slot::Slot;
use pace::Pace;
use proto::block::HASH_UNIT_TOKENS;
use serde::{Deserialize, Serialize};
use transfer::is_worth_asking;

/// The request's own work counts once as its own latency, and so often as delay of others where all workers are busy;
/// where none is, it delays nobody.
const DELAY_WEIGHT: f64 = 2.0;
/// Leading units from which on requests have more in common than a usual system message: 256 tokens.
pub const COMMON_UNITS: u32 = 16;

/// Tokens per second assumed while no worker has measured its rate.
const ASSUMED_PREFILL_RATE: f64 = 1_000.0;
/// Costs this close (as a share of the best, and in seconds) are a tie.
const TIE_SHARE: f64 = 0.02;
const TIE_S: f64 = 0.001;
/// Measured rates within this factor of their mean count as equal to it: so much they differ by what the workers
/// were given to measure them with. From its square on they count as measured.
const SAME_RATE: f64 = 1.35;
/// Likewise of paces, which depend less on what they were measured with.
const SAME_PACE: f64 = 1.12;
/// What was measured counts half as far from the mean after a worker has measured nothing new for this long: one that
/// was slow and got no work is tried again.
const TRUST_HALVES_S: f32 = 30.0;
/// How much of a second it counts that a worker was given a second's work more than another: little, so that it
/// decides only where the rest is about the same; more where all serve as much of the prompt, as pulls let them. Never
/// more than the request's own work: a crowd of small requests does not make up for one large one.
const GIVEN_WEIGHT: f64 = 0.03;
const EVEN_GIVEN_WEIGHT: f64 = 0.4;
/// How often what another than the first holder of a prefix has of it counts as work, while the first holder has no
/// requests: a replica is used while the first holder is busier than that, and ages out when it is not. The more requests
/// the first holder has, the less it counts.
const REPLICA_WEIGHT: f64 = 0.5;

/// A worker that could take the request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    pub slot: Slot,
    /// Leading hash units of the prompt that it holds or is about to hold.
    pub units: u32,
    /// Prompt tokens that it has to compute before this request's.
    pub pending_tokens: u64,
    pub running: u32,
    /// Sequences that it has and does not decode yet.
    pub queued: u32,
    /// Sequences that it decodes at once, if it has shown that it takes no more; else 0.
    pub slots: u32,
    /// Measured prefill rate in tokens per second; 0 if unknown.
    pub prefill_rate: f32,
    /// Seconds since that was measured.
    pub prefill_age_s: f32,
    /// Measured pace of its decoding.
    pub pace: Pace,
    /// Seconds since that was measured.
    pub pace_age_s: f32,
    /// Prompt tokens that it was given to compute lately, old ones counting less.
    pub given_tokens: f64,
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
    /// It is computing, for another request just now, what this one has in common with that.
    Group,
    /// It does not hold the prefix, but will from now on: those that do are asked for it too often.
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

/// What is to be placed.
#[derive(Debug, Clone, Copy)]
pub struct Query {
    pub routing: Routing,
    pub prompt_tokens: u32,
    /// Expected length of the answer.
    pub output_tokens: f64,
    /// What is known of the prefix that it shares with earlier requests.
    pub standing: Option<Standing>,
    pub random: u64,
    pub turn: u64,
}

/// How much a prefix is in demand.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Standing {
    pub home: Slot,
    /// By how many seconds its requests have lately waited longer at its holders than they would have elsewhere, times
    /// for how many seconds that has been so.
    pub regret: f64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoutingDecision {
    pub slot: Slot,
    pub reason: Reason,
    /// Prompt tokens that its cache will serve.
    pub predicted: u32,
    /// The estimate that decided, in seconds.
    pub cost: f64,
    /// Seconds by which the first token is expected later here, where the prefix is held, than where it is not.
    pub excess: f64,
}

/// Prompt tokens that a worker serves from its cache if it holds `units` leading units: the last token is
/// always computed, since its logits are needed, and hits end at unit boundaries.
pub fn predicted_tokens(prompt_tokens: u32, units: u32) -> u32 {
    let unit = HASH_UNIT_TOKENS as u32;
    let most = prompt_tokens.saturating_sub(1) / unit * unit;
    units.saturating_mul(unit).min(most)
}

/// Chooses among `candidates`; `None` only if there are none. Of two candidates drawn by `random` from those that
/// cost the same, the one with less in hand is taken, so that several coordinators with the same view do not all
/// run to the same worker.
pub fn choose(query: &Query, candidates: &[Candidate]) -> Option<RoutingDecision> {
    let estimates = Estimates::new(query, candidates);
    let mut tied: Vec<(&Candidate, f64)> = candidates.iter().map(|c| (c, estimates.cost(c))).collect();
    let (chosen, cost) = match query.routing {
        Routing::Prefix | Routing::LeastLoad => {
            let best = tied.iter().map(|&(_, cost)| cost).fold(f64::INFINITY, f64::min);
            tied.retain(|&(_, cost)| cost <= best + (best * TIE_SHARE).max(TIE_S));
            two_choices(&tied, query.random)?
        }
        Routing::RoundRobin => *tied.get(query.turn.checked_rem(tied.len() as u64)? as usize)?,
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

/// What a candidate was expected to take, part by part, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Parts {
    /// Until it would begin with the prompt, and what it pulls is there to be pulled.
    pub queue: f64,
    /// To compute what it would not serve from its cache.
    pub prefill: f64,
    pub transfer: f64,
    /// To generate the answer, as many tokens as are expected.
    pub decode: f64,
    /// What it was compared by: these, with its own work weighed by how busy the candidates are.
    pub cost: f64,
    /// Prompt tokens that its cache would serve, pulled ones included.
    pub cached: u32,
}

/// Why [`choose`] chooses as it does: for each candidate, in their order, what it is compared by.
pub fn explain(query: &Query, candidates: &[Candidate]) -> Vec<Parts> {
    let estimates = Estimates::new(query, candidates);
    candidates.iter().map(|candidate| estimates.parts(candidate)).collect()
}

impl Candidate {
    pub fn sequences(&self) -> u32 {
        self.running.saturating_add(self.queued)
    }
}

/// How busy candidates are, whatever the prompt.
#[derive(Debug, Clone, Copy)]
pub struct Outlook {
    /// The mean of the measured rates.
    rate: f64,
    /// The mean of the measured paces.
    pace: Pace,
    /// How often work that a request brings counts.
    work_weight: f64,
}

impl Outlook {
    pub fn new(candidates: &[Candidate]) -> Self {
        let rates = candidates.iter().map(|c| (f64::from(c.prefill_rate), trust(c.prefill_age_s)));
        let rate = geometric_mean(rates);
        let paces = || candidates.iter().filter(|c| c.pace.seconds > 0.0);
        let seconds = geometric_mean(paces().map(|c| (c.pace.seconds, trust(c.pace_age_s))));
        let share = paces().map(|c| c.pace.share).sum::<f64>() / paces().count().max(1) as f64;
        let pace = seconds.map_or_else(Pace::default, |seconds| Pace { seconds, share });
        let busy = candidates.iter().filter(|c| c.pending_tokens > 0).count();
        let work_weight = 1.0 + DELAY_WEIGHT * busy as f64 / candidates.len().max(1) as f64;
        Self { rate: rate.unwrap_or(ASSUMED_PREFILL_RATE), pace, work_weight }
    }

    /// Prompt tokens per second.
    fn rate(&self, candidate: &Candidate) -> f64 {
        self.rate
            * deviation(f64::from(candidate.prefill_rate) / self.rate, candidate.prefill_age_s, SAME_RATE)
    }

    fn pace(&self, candidate: &Candidate) -> Pace {
        if self.pace.seconds <= 0.0 {
            return self.pace;
        }
        let ratio = candidate.pace.seconds / self.pace.seconds;
        Pace { seconds: self.pace.seconds * deviation(ratio, candidate.pace_age_s, SAME_PACE), ..self.pace }
    }

    /// Seconds until it would begin with the prompt.
    pub fn queue(&self, candidate: &Candidate) -> f64 {
        let step =
            if candidate.running > 0 { self.pace(candidate).token_s(candidate.running.into()) } else { 0.0 };
        candidate.pending_tokens as f64 / self.rate(candidate) + step
    }

    /// Seconds that it takes to generate so many tokens beside what it has to generate.
    fn decode(&self, candidate: &Candidate, tokens: f64) -> f64 {
        let n = f64::from(candidate.sequences()) + 1.0;
        let slots = if candidate.slots > 0 { f64::from(candidate.slots) } else { f64::INFINITY };
        let token = self.pace(candidate).token_s(n.min(slots));
        // Beyond its slots it waits for as many others to end, which are taken to be as long.
        tokens * token * (1.0 + ((n - slots) / slots).max(0.0))
    }

    /// Seconds by which it delays, by generating so many tokens, what it has to generate already.
    fn delays(&self, candidate: &Candidate, tokens: f64) -> f64 {
        tokens * self.pace(candidate).slope_s() * f64::from(candidate.sequences())
    }
}

/// How far something is believed that was measured so long ago.
fn trust(age_s: f32) -> f64 {
    // Never nothing: of values that are all old the mean is one, too.
    f64::from((-age_s / TRUST_HALVES_S).exp2().max(1e-6))
}

/// Of (value, weight), of those that are known, if any is.
fn geometric_mean(values: impl Iterator<Item = (f64, f64)>) -> Option<f64> {
    let known = values.filter(|(value, _)| *value > 0.0);
    let (sum, all) = known.fold((0.0, 0.0), |(sum, all), (value, w)| (sum + w * value.ln(), all + w));
    (all > 0.0).then(|| f64::exp(sum / all))
}

/// What a measured value counts as, relative to the mean, if it is `ratio` of it and was measured `age_s` ago; an unknown
/// one (0) and one within a factor `same` as the mean.
fn deviation(ratio: f64, age_s: f32, same: f64) -> f64 {
    if ratio <= 0.0 || (1.0 / same..=same).contains(&ratio) {
        return 1.0;
    }
    let off = ratio.ln() * trust(age_s);
    // Nothing up to `same`, all from twice that on, and in between without a jump.
    let counts = (2.0 * (off.abs() - same.ln())).clamp(0.0, off.abs());
    counts.copysign(off).exp()
}

/// What candidates are expected to take for a prompt.
struct Estimates<'a> {
    query: &'a Query,
    outlook: Outlook,
    /// What the candidate was given that was given least.
    least_given: f64,
    given_weight: f64,
    /// What the first holder of the prefix has of it, and how many sequences.
    home: (u32, u32),
}

impl<'a> Estimates<'a> {
    fn new(query: &'a Query, candidates: &[Candidate]) -> Self {
        let least_given = candidates.iter().map(|c| c.given_tokens).fold(f64::INFINITY, f64::min);
        let home = query.standing.and_then(|s| candidates.iter().find(|c| c.slot == s.home));
        let home = home.map_or((0, 0), |c| (c.units, c.sequences()));
        let served = |c: &Candidate| predicted_tokens(query.prompt_tokens, c.served_units());
        let most = candidates.iter().map(served).max().unwrap_or(0);
        let even = query.routing == Routing::LeastLoad
            || candidates.iter().all(|c| !is_worth_asking(served(c), most));
        let given_weight = if even { EVEN_GIVEN_WEIGHT } else { GIVEN_WEIGHT };
        Self { query, outlook: Outlook::new(candidates), least_given, given_weight, home }
    }

    fn cached(&self, candidate: &Candidate) -> u32 {
        predicted_tokens(self.query.prompt_tokens, candidate.served_units())
    }

    fn cost(&self, candidate: &Candidate) -> f64 {
        let cached = match self.query.routing {
            Routing::Prefix | Routing::RoundRobin => self.cached(candidate),
            Routing::LeastLoad => 0,
        };
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
        let begins = self.outlook.queue(candidate) + candidate.awaits();
        begins + self.outlook.work_weight * work + decode + (replica + given) / rate
    }

    fn parts(&self, candidate: &Candidate) -> Parts {
        let cached = self.cached(candidate);
        Parts {
            queue: self.outlook.queue(candidate) + candidate.awaits(),
            prefill: f64::from(self.query.prompt_tokens - cached) / self.outlook.rate(candidate),
            transfer: candidate.pull_seconds(),
            decode: self.outlook.decode(candidate, self.query.output_tokens),
            cost: self.cost(candidate),
            cached,
        }
    }

    /// Seconds until the first token.
    fn ttft(&self, candidate: &Candidate) -> f64 {
        let own = f64::from(self.query.prompt_tokens - self.cached(candidate));
        let begins = self.outlook.queue(candidate) + candidate.awaits();
        begins + candidate.pull_seconds() + own / self.outlook.rate(candidate)
    }

    /// `choice`, which is the holder `chosen`, or a worker that becomes one: the one that would answer first.
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

/// Of two different ones of `tied`, drawn by `random`, the one with less in hand.
fn two_choices<'a>(tied: &[(&'a Candidate, f64)], random: u64) -> Option<(&'a Candidate, f64)> {
    let len = tied.len() as u64;
    let first = random.checked_rem(len)?;
    let step = if len > 1 { 1 + (random >> 32) % (len - 1) } else { 0 };
    let (a, b) = (tied.get(first as usize)?, tied.get(((first + step) % len) as usize)?);
    let in_hand = |c: &Candidate| (c.pending_tokens, c.sequences());
    Some(if in_hand(b.0) < in_hand(a.0) { *b } else { *a })
}
