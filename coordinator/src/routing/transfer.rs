//! Pulling as the other way to get a prefix: a worker that does not hold one can fetch it from a worker of its numeric
//! class that does, if that takes less than computing it.
//!
//! Only what a holder has announced counts: what is merely expected of it cannot be fetched yet.

use super::{ASSUMED_PREFILL_RATE, Candidate, WORK_WEIGHT, predicted_tokens};
use crate::slot::Slot;
use proto::message::PullCostV1;

/// Bytes per second assumed of a worker that has not pulled anything yet.
const ASSUMED_RATE: f64 = 100e6;
/// Seconds that a pull takes besides its bytes: a connection, round trips, waiting between steps.
const OVERHEAD_S: f64 = 0.02;
/// Workers pull whole resume points, and only if that saves so many tokens and this part of them.
const LEAST_GAIN: u32 = 32;
const GAIN_PART: u32 = 16;

/// A pull that pays.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pull {
    /// Who holds the prefix.
    pub from: Slot,
    /// Leading hash units of the prompt that the worker holds afterwards.
    pub units: u32,
    /// Seconds that it takes.
    pub seconds: f64,
}

/// What pulling costs a worker.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PullPrice<'a> {
    /// Bytes of a resume point.
    pub cost: &'a PullCostV1,
    /// Bytes per second that it has measured; 0 if unknown.
    pub rate: f32,
}

impl PullPrice<'_> {
    /// Seconds to fetch a resume point of so many tokens where the first `have` of them are there.
    pub fn seconds(&self, have: u32, tokens: u32) -> f64 {
        let rate = if self.rate > 0.0 { f64::from(self.rate) } else { ASSUMED_RATE };
        let bytes = f64::from(tokens.saturating_sub(have)) * self.cost.bytes_per_token as f64
            + self.cost.bytes_per_point as f64;
        OVERHEAD_S + bytes / rate
    }
}

/// Whether a worker that serves `have` tokens of a prompt itself would fetch `tokens` of it.
pub fn is_worth_asking(have: u32, tokens: u32) -> bool {
    let gain = tokens.saturating_sub(have);
    gain >= LEAST_GAIN && gain >= tokens / GAIN_PART
}

/// The pull that saves `candidate` the most: from the one of `holders` (slots, and leading units that they hold) that
/// holds most of the prompt. `None`: computing is as quick.
///
/// A second of a pull counts as a second of computing does, since it takes time and memory of two workers.
pub fn best(
    prompt_tokens: u32,
    candidate: &Candidate,
    price: &PullPrice<'_>,
    holders: impl Iterator<Item = (Slot, u32)>,
) -> Option<Pull> {
    let others = holders.filter(|(slot, units)| *slot != candidate.slot && *units > candidate.units);
    let (from, units) = others.max_by_key(|(_, units)| *units)?;
    let have = predicted_tokens(prompt_tokens, candidate.units);
    let tokens = predicted_tokens(prompt_tokens, units);
    let seconds = price.seconds(have, tokens);
    let rate =
        if candidate.prefill_rate > 0.0 { f64::from(candidate.prefill_rate) } else { ASSUMED_PREFILL_RATE };
    let saved = f64::from(tokens.saturating_sub(have)) / rate;
    (is_worth_asking(have, tokens) && seconds < saved).then_some(Pull { from, units, seconds })
}

impl Candidate {
    /// Leading units that it serves the request, by a pull if that is how it gets them.
    pub fn served_units(&self) -> u32 {
        self.pull.map_or(self.units, |pull| pull.units)
    }

    /// What a pull adds to its cost, in seconds.
    pub(super) fn pull_cost(&self) -> f64 {
        self.pull.map_or(0.0, |pull| WORK_WEIGHT * pull.seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::{Reason, Routing, choose};
    use proto::ids::ModelId;

    fn cost() -> PullCostV1 {
        PullCostV1 { model: ModelId::new("m").unwrap(), bytes_per_token: 20_000, bytes_per_point: 1_000_000 }
    }

    fn candidate(index: usize, units: u32) -> Candidate {
        Candidate {
            slot: Slot::new(index).unwrap(),
            units,
            pending_tokens: 0,
            running: 0,
            prefill_rate: 1_000.0,
            step_ms: 10.0,
            pull: None,
        }
    }

    fn slot(index: usize) -> Slot {
        Slot::new(index).unwrap()
    }

    #[test]
    fn a_pull_is_chosen_where_it_beats_computing() {
        let cost = cost();
        let here = candidate(0, 0);
        let holders = || [(slot(0), 90), (slot(1), 50), (slot(2), 60)].into_iter();
        let fast = PullPrice { cost: &cost, rate: 1e9 };
        let pull = best(1_000, &here, &fast, holders()).unwrap();
        assert_eq!((pull.from, pull.units), (slot(2), 60), "the one that holds most, and not itself");
        let bytes = 960.0 * 20_000.0 + 1e6;
        assert!((pull.seconds - (OVERHEAD_S + bytes / 1e9)).abs() < 1e-9, "{}", pull.seconds);
        // 960 tokens take a second to compute: at 10 MB/s a pull takes two.
        assert_eq!(best(1_000, &here, &PullPrice { cost: &cost, rate: 1e7 }, holders()), None);
        // What is there already is not fetched again, and little more is not worth it.
        let most = candidate(0, 55);
        assert!(best(1_000, &most, &fast, holders()).is_some());
        assert_eq!(best(1_000, &candidate(0, 59), &fast, holders()), None);
        assert_eq!(best(1_000, &candidate(0, 60), &fast, holders()), None);
        assert_eq!(best(1_000, &here, &fast, std::iter::empty()), None);
    }

    #[test]
    fn the_last_token_is_computed_also_of_what_is_pulled() {
        let cost = cost();
        let price = PullPrice { cost: &cost, rate: 1e9 };
        let pull = best(960, &candidate(0, 0), &price, [(slot(1), 60)].into_iter()).unwrap();
        let chosen = Candidate { pull: Some(pull), ..candidate(0, 0) };
        let choice = choose(Routing::Prefix, 960, &[chosen], 0, 0).unwrap();
        assert_eq!((choice.predicted, choice.reason), (944, Reason::Only));
    }

    #[test]
    fn a_busy_holder_is_relieved_by_who_pulls_sooner_than_by_who_computes() {
        let cost = cost();
        let price = PullPrice { cost: &cost, rate: 1e9 };
        let idle = |pull| Candidate { pull, ..candidate(1, 0) };
        let pull = best(1_000, &idle(None), &price, [(slot(0), 60)].into_iter());
        let choose = |pending_tokens, pull| {
            let holder = Candidate { pending_tokens, ..candidate(0, 60) };
            choose(Routing::Prefix, 1_000, &[holder, idle(pull)], 0, 0).unwrap().slot
        };
        assert_eq!(choose(1_000, None), slot(0));
        assert_eq!(choose(1_000, pull), slot(1));
        assert_eq!(choose(50, pull), slot(0), "a pull is not for nothing");
    }
}
