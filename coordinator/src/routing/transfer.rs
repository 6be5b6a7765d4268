//! Pulling as the other way to get a prefix: a worker that does not hold one can fetch it from a worker of its numeric
//! class that does, if that costs less than computing it.
//!
//! A pull costs two workers' engines a copy of its bytes. Its latency (until the holder is between two layers, and until
//! the bytes are there) costs nothing while the worker has other prompts to compute before this one; what it lasts longer
//! counts as if the worker computed meanwhile.
//!
//! What a worker has announced can be fetched at once. What it is still computing or pulling can be fetched when it has
//! come: such a pull is awaited. A burst of requests finds workers idle that the burst will fill, so computing counts twice
//! against an awaited pull. Then the answer ends later than with computing by at most the time that computing takes.

use super::{Candidate, Outlook, predicted_tokens};
use crate::slot::Slot;
use proto::message::PullCost;
use proto::pull::SLICE_BYTES;

/// Bytes per second assumed of a worker that has not pulled anything yet.
const ASSUMED_RATE: f64 = 100e6;
/// Bytes per second at which an engine copies blocks out of its arena or into it.
const COPY_RATE: f64 = 1e9;
/// Seconds that a pull takes besides its bytes: a connection, round trips.
const OVERHEAD_S: f64 = 0.02;
/// How often computing counts where what would be computed is on its way elsewhere.
const COMPUTED_AGAIN: f64 = 2.0;
/// Workers pull whole resume points, and only if that saves so many tokens and this part of them.
const LEAST_GAIN: u32 = 32;
const GAIN_PART: u32 = 16;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pull {
    pub from: Slot,
    /// Leading hash units of the prompt that the worker holds afterwards.
    pub units: u32,
    /// Seconds from now until it has come.
    pub seconds: f64,
    /// Seconds that the two engines spend on it.
    pub work: f64,
    /// Seconds that it lasts longer than what the worker has to compute first.
    pub idle: f64,
    /// Seconds for which the worker could begin and the prefix is not there yet; `None` if it is held already.
    pub awaits: Option<f64>,
}

/// What pulling costs a worker.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PullPrice<'a> {
    /// Bytes of a resume point.
    pub cost: &'a PullCost,
    /// Bytes per second that it has measured; 0 if unknown.
    pub rate: f32,
}

/// A worker that holds a part of the prompt, or will.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Holder {
    pub slot: Slot,
    /// Leading units that it holds.
    pub units: u32,
    /// Seconds of a layer of its steps, between which it copies out what is pulled; 0 while it has nothing to do.
    pub layer: f64,
    /// Seconds until what it has to send to others is sent.
    pub backlog: f64,
    /// Seconds until it holds them; `None` if it has announced them.
    pub ready: Option<f64>,
}

impl PullPrice<'_> {
    /// The pull of the resume point at `tokens` to a worker that has the first `have` of them and would begin with the
    /// prompt in `begins` seconds.
    fn pull(&self, holder: &Holder, have: u32, tokens: u32, begins: f64) -> Pull {
        let rate = if self.rate > 0.0 { f64::from(self.rate) } else { ASSUMED_RATE };
        let bytes = f64::from(tokens.saturating_sub(have)) * self.cost.bytes_per_token as f64
            + self.cost.bytes_per_point as f64;
        // The first slice waits for a layer that is under way, each further one for one more.
        let slices = (bytes / SLICE_BYTES as f64).floor() + 0.5;
        let ready = holder.ready.unwrap_or(0.0);
        let takes = OVERHEAD_S + (slices * holder.layer).max(holder.backlog - ready) + bytes / rate;
        let seconds = ready + takes;
        Pull {
            from: holder.slot,
            units: holder.units,
            seconds,
            work: 2.0 * bytes / COPY_RATE,
            idle: (seconds - begins.max(ready)).max(0.0),
            awaits: holder.ready.map(|ready| (ready - begins).max(0.0)),
        }
    }
}

impl Pull {
    /// Seconds that it adds to a request's, besides those for which it is awaited.
    pub(super) fn cost(&self) -> f64 {
        self.work + self.idle
    }
}

/// Whether a worker that serves `have` tokens of a prompt itself would fetch `tokens` of it.
pub fn is_worth_asking(have: u32, tokens: u32) -> bool {
    let gain = tokens.saturating_sub(have);
    gain >= LEAST_GAIN && gain >= tokens / GAIN_PART
}

/// The pull that saves `candidate` the most. `None`: computing costs as little.
pub fn best(
    prompt_tokens: u32,
    candidate: &Candidate,
    outlook: &Outlook,
    price: &PullPrice<'_>,
    holders: impl Iterator<Item = Holder>,
) -> Option<Pull> {
    let have = predicted_tokens(prompt_tokens, candidate.units);
    let (rate, begins) = (outlook.rate(candidate), outlook.queue(candidate));
    let holders: Vec<Holder> = holders.collect();
    let in_flight = holders.iter().any(|holder| holder.ready.is_some());
    let counts = if in_flight { COMPUTED_AGAIN } else { 1.0 };
    let gain = |holder: Holder| {
        let tokens = predicted_tokens(prompt_tokens, holder.units);
        if holder.slot == candidate.slot || !is_worth_asking(have, tokens) {
            return None;
        }
        let pull = price.pull(&holder, have, tokens, begins);
        let computing = f64::from(tokens - have) / rate;
        let gain = counts * computing - pull.awaits.unwrap_or(0.0) - pull.cost();
        (gain > 0.0 && pull.cost() < computing).then_some((gain, pull))
    };
    holders.into_iter().filter_map(gain).max_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, pull)| pull)
}

impl Candidate {
    /// Leading units that it serves the request, by a pull if that is how it gets them.
    pub fn served_units(&self) -> u32 {
        self.pull.map_or(self.units, |pull| pull.units)
    }

    /// Seconds that its pull costs, if there is one.
    pub(super) fn pull_seconds(&self) -> f64 {
        self.pull.map_or(0.0, |pull| pull.cost())
    }

    /// Seconds for which it could begin and what it pulls is not there yet.
    pub(super) fn awaits(&self) -> f64 {
        self.pull.and_then(|pull| pull.awaits).unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::pace::Pace;
    use crate::routing::{Query, Reason, Routing, RoutingDecision};
    use proto::ids::ModelId;

    fn cost() -> PullCost {
        PullCost { model: ModelId::new("m").unwrap(), bytes_per_token: 20_000, bytes_per_point: 1_000_000 }
    }

    fn candidate(index: usize, units: u32) -> Candidate {
        Candidate {
            slot: Slot::new(index).unwrap(),
            units,
            pending_tokens: 0,
            running: 0,
            queued: 0,
            slots: 0,
            prefill_rate: 1_000.0,
            prefill_age_s: 0.0,
            pace: Pace::default(),
            pace_age_s: 0.0,
            given_tokens: 0.0,
            pull: None,
        }
    }

    fn idle(index: usize, units: u32) -> Holder {
        Holder { slot: slot(index), units, layer: 0.0, backlog: 0.0, ready: None }
    }

    fn choose(prompt_tokens: u32, candidates: &[Candidate]) -> RoutingDecision {
        let query = Query {
            routing: Routing::Prefix,
            prompt_tokens,
            output_tokens: 0.0,
            standing: None,
            random: 0,
            turn: 0,
        };
        crate::routing::choose(&query, candidates).unwrap()
    }

    fn slot(index: usize) -> Slot {
        Slot::new(index).unwrap()
    }

    /// The best pull of a prompt to `here`, which is alone.
    fn best<const N: usize>(
        prompt: u32,
        here: &Candidate,
        price: &PullPrice<'_>,
        holders: [Holder; N],
    ) -> Option<Pull> {
        super::best(prompt, here, &Outlook::new(&[*here]), price, holders.into_iter())
    }

    #[test]
    fn a_pull_is_chosen_where_it_beats_computing() {
        let cost = cost();
        let here = candidate(0, 0);
        let holders = [idle(0, 90), idle(1, 50), idle(2, 60)];
        let fast = PullPrice { cost: &cost, rate: 1e9 };
        let pull = best(1_000, &here, &fast, holders).unwrap();
        assert_eq!((pull.from, pull.units), (slot(2), 60), "the one that holds most, and not itself");
        let bytes = 960.0 * 20_000.0 + 1e6;
        assert!((pull.seconds - (OVERHEAD_S + bytes / 1e9)).abs() < 1e-9, "{}", pull.seconds);
        assert!((pull.work - 2.0 * bytes / COPY_RATE).abs() < 1e-9 && pull.idle == pull.seconds, "{pull:?}");
        // 960 tokens take a second to compute: at 10 MB/s a pull takes two.
        assert_eq!(best(1_000, &here, &PullPrice { cost: &cost, rate: 1e7 }, holders), None);
        // What is there already is not fetched again, and little more is not worth it.
        assert!(best(1_000, &candidate(0, 55), &fast, holders).is_some());
        assert_eq!(best(1_000, &candidate(0, 59), &fast, holders), None);
        assert_eq!(best(1_000, &candidate(0, 60), &fast, holders), None);
        assert_eq!(best(1_000, &here, &fast, []), None);
    }

    #[test]
    fn what_a_holder_has_to_do_first_counts() {
        let cost = cost();
        let here = candidate(0, 0);
        let fast = PullPrice { cost: &cost, rate: 1e9 };
        // It copies out between layers: half of one for the first slice, one more for the second.
        let slow = |layer| Holder { layer, ..idle(2, 60) };
        assert!(best(1_000, &here, &fast, [slow(0.5)]).is_some());
        assert_eq!(best(1_000, &here, &fast, [slow(0.6)]), None);
        let sends = |backlog| Holder { backlog, ..idle(2, 60) };
        assert!(best(1_000, &here, &fast, [sends(0.8)]).is_some());
        assert_eq!(best(1_000, &here, &fast, [sends(0.9)]), None);
        let other = best(1_000, &here, &fast, [sends(0.5), idle(1, 55)]).unwrap();
        assert_eq!(other.from, slot(1), "who has a little less and nothing to do is quicker");
    }

    #[test]
    fn a_pull_that_ends_before_the_worker_would_begin_costs_its_copies() {
        let cost = cost();
        let slow = PullPrice { cost: &cost, rate: 1e7 };
        let busy = |pending_tokens| Candidate { pending_tokens, ..candidate(0, 0) };
        let pull = best(1_000, &busy(3_000), &slow, [idle(1, 60)]).unwrap();
        assert!(pull.seconds > 2.0 && pull.idle == 0.0, "{pull:?}");
        let pull = best(1_000, &busy(1_500), &slow, [idle(1, 60)]).unwrap();
        assert!((pull.idle - (pull.seconds - 1.5)).abs() < 1e-9, "{pull:?}");
        assert_eq!(best(1_000, &busy(500), &slow, [idle(1, 60)]), None);
    }

    /// 960 tokens take 0.96 s to compute. The pull takes 0.02 s, 19.2 MB at 1 GB/s and two copies of these at 1 GB/s.
    #[test]
    fn what_is_computed_elsewhere_is_awaited_for_as_long_as_computing_takes() {
        let cost = PullCost { bytes_per_point: 0, ..cost() };
        let price = PullPrice { cost: &cost, rate: 1e9 };
        let takes = OVERHEAD_S + 3.0 * 960.0 * 20_000.0 / 1e9;
        let in_flight = |ready| Holder { ready: Some(ready), ..idle(1, 60) };
        let most = COMPUTED_AGAIN * 0.96 - takes;
        let pull = best(1_000, &candidate(0, 0), &price, [in_flight(most - 0.001)]).unwrap();
        assert!(pull.awaits == Some(most - 0.001) && (pull.cost() - takes).abs() < 1e-9, "{pull:?}");
        assert_eq!(best(1_000, &candidate(0, 0), &price, [in_flight(most + 0.001)]), None);
        // It is awaited while the worker has something else to do.
        let busy = Candidate { pending_tokens: 1_500, ..candidate(0, 0) };
        let pull = best(1_000, &busy, &price, [in_flight(most + 0.001)]).unwrap();
        assert!((pull.awaits.unwrap() - (most + 0.001 - 1.5)).abs() < 1e-9, "{pull:?}");
        // What is held already is pulled if what is not yet brings little more.
        let half = |units| Holder { slot: slot(2), ..idle(2, units) };
        let from = |units| best(1_000, &candidate(0, 0), &price, [in_flight(0.9), half(units)]).unwrap().from;
        assert_eq!((from(30), from(59)), (slot(1), slot(2)));
        // A pull that costs as much as computing is not awaited either.
        let slow = PullPrice { cost: &cost, rate: 2e7 };
        assert_eq!(best(1_000, &candidate(0, 0), &slow, [in_flight(0.0)]), None);
    }

    #[test]
    fn the_last_token_is_computed_also_of_what_is_pulled() {
        let cost = cost();
        let price = PullPrice { cost: &cost, rate: 1e9 };
        let pull = best(960, &candidate(0, 0), &price, [idle(1, 60)]).unwrap();
        let chosen = Candidate { pull: Some(pull), ..candidate(0, 0) };
        let choice = choose(960, &[chosen]);
        assert_eq!((choice.predicted, choice.reason), (944, Reason::Only));
    }

    #[test]
    fn a_busy_holder_is_relieved_by_who_pulls_sooner_than_by_who_computes() {
        let cost = cost();
        let price = PullPrice { cost: &cost, rate: 1e9 };
        let other = |pull| Candidate { pull, ..candidate(1, 0) };
        let pull = best(1_000, &other(None), &price, [idle(0, 60)]);
        let chosen = |pending_tokens, pull| {
            let holder = Candidate { pending_tokens, ..candidate(0, 60) };
            choose(1_000, &[holder, other(pull)]).slot
        };
        assert_eq!(chosen(1_000, None), slot(0));
        assert_eq!(chosen(1_000, pull), slot(1));
        assert_eq!(chosen(50, pull), slot(0), "a pull is not for nothing");
    }
}
