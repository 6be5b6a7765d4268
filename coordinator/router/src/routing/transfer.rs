//! KV transfer as the alternative to prefill: a worker can pull a prefix from a worker of its numeric class
//! that holds it, if that costs less than computing it.
//!
//! A pull costs both engines a copy of its bytes. Its latency (until the holder is between two layers, and
//! until the bytes have arrived) is free while the puller has other prompts to compute first. Latency beyond
//! that counts like prefill time.
//!
//! An announced prefix can be pulled at once. A prefix that is still being computed or pulled elsewhere can
//! be pulled when it is complete: such a pull is awaited. Prefill counts twice against an awaited pull,
//! because a burst finds workers idle that the burst itself will fill. The wait then delays the answer by at
//! most the prefill time.

use super::{Candidate, Outlook, predicted_tokens};
use crate::slot::Slot;
use proto::message::PullCost;
use proto::pull::SLICE_BYTES;

/// Transfer rate assumed for a worker that has not pulled yet, in bytes per second.
const ASSUMED_RATE: f64 = 100e6;
/// Rate at which an engine copies blocks into or out of its arena, in bytes per second.
const COPY_RATE: f64 = 1e9;
/// Fixed seconds of a pull for the connection and round trips.
const OVERHEAD_S: f64 = 0.02;
/// Weight of prefill if the prefix is already being computed elsewhere.
const RECOMPUTE_WEIGHT: f64 = 2.0;
/// Workers pull whole resume points. A pull must save at least this many tokens.
const MIN_GAIN: u32 = 32;
/// A pull must also save at least `1 / GAIN_DIVISOR` of its tokens.
const GAIN_DIVISOR: u32 = 16;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pull {
    pub from: Slot,
    /// Leading hash units of the prompt that the puller holds afterwards.
    pub units: u32,
    /// Seconds from now until the pull is complete.
    pub seconds: f64,
    /// Engine time of the copies on both workers, in seconds.
    pub copy_seconds: f64,
    /// Seconds for which the puller would be idle: latency beyond the prompts that it has to compute first.
    pub idle_seconds: f64,
    /// Seconds for which the puller could start but the holder does not have the prefix yet. `None`: it is
    /// announced.
    pub wait_seconds: Option<f64>,
}

/// Cost of a pull from a worker.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PullPrice<'a> {
    /// Sizes of a resume point.
    pub cost: &'a PullCost,
    /// Measured transfer rate in bytes per second; 0 if unknown.
    pub rate: f32,
}

/// A worker that holds, or will hold, a part of the prompt.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Holder {
    pub slot: Slot,
    /// Leading units that the worker holds.
    pub units: u32,
    /// Seconds per layer of its steps; pulled blocks are copied out between layers. 0 if the worker is idle.
    pub layer: f64,
    /// Seconds until the worker has sent its earlier pulls.
    pub backlog: f64,
    /// Seconds until the worker holds `units`; `None` if it has announced them.
    pub ready: Option<f64>,
}

impl PullPrice<'_> {
    /// The pull of the resume point at `tokens`, for a worker that holds the first `have` tokens and could
    /// start the prompt in `begins` seconds.
    fn pull(&self, holder: &Holder, have: u32, tokens: u32, begins: f64) -> Pull {
        let rate = if self.rate > 0.0 { f64::from(self.rate) } else { ASSUMED_RATE };
        let bytes = f64::from(tokens.saturating_sub(have)) * self.cost.bytes_per_token as f64
            + self.cost.bytes_per_point as f64;
        // The first slice waits for the rest of a layer (half on average), each further slice for one more
        // layer.
        let slices = (bytes / SLICE_BYTES as f64).floor() + 0.5;
        let ready = holder.ready.unwrap_or(0.0);
        let takes = OVERHEAD_S + (slices * holder.layer).max(holder.backlog - ready) + bytes / rate;
        let seconds = ready + takes;
        Pull {
            from: holder.slot,
            units: holder.units,
            seconds,
            copy_seconds: 2.0 * bytes / COPY_RATE,
            idle_seconds: (seconds - begins.max(ready)).max(0.0),
            wait_seconds: holder.ready.map(|ready| (ready - begins).max(0.0)),
        }
    }
}

impl Pull {
    /// Seconds that the pull adds to a request, without the time for which it is awaited.
    pub(super) fn cost(&self) -> f64 {
        self.copy_seconds + self.idle_seconds
    }
}

/// Whether a worker that serves `have` tokens of a prompt itself would pull `tokens` of it.
pub fn is_worth_pulling(have: u32, tokens: u32) -> bool {
    let gain = tokens.saturating_sub(have);
    gain >= MIN_GAIN && gain >= tokens / GAIN_DIVISOR
}

/// The pull that saves `candidate` the most time; `None` if no pull is cheaper than computing.
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
    let counts = if in_flight { RECOMPUTE_WEIGHT } else { 1.0 };
    let gain = |holder: Holder| {
        let tokens = predicted_tokens(prompt_tokens, holder.units);
        if holder.slot == candidate.slot || !is_worth_pulling(have, tokens) {
            return None;
        }
        let pull = price.pull(&holder, have, tokens, begins);
        let computing = f64::from(tokens - have) / rate;
        let gain = counts * computing - pull.wait_seconds.unwrap_or(0.0) - pull.cost();
        (gain > 0.0 && pull.cost() < computing).then_some((gain, pull))
    };
    holders.into_iter().filter_map(gain).max_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, pull)| pull)
}

impl Candidate {
    /// Leading units that the worker serves, including pulled ones.
    pub fn served_units(&self) -> u32 {
        self.pull.map_or(self.units, |pull| pull.units)
    }

    /// Cost of the pull in seconds; 0 without a pull.
    pub(super) fn pull_seconds(&self) -> f64 {
        self.pull.map_or(0.0, |pull| pull.cost())
    }

    /// Seconds for which the worker could start but the prefix to pull is not available yet.
    pub(super) fn wait_seconds(&self) -> f64 {
        self.pull.and_then(|pull| pull.wait_seconds).unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::pace::DecodePace;
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
            pace: DecodePace::default(),
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
            round: 0,
        };
        crate::routing::choose(&query, candidates).unwrap()
    }

    fn slot(index: usize) -> Slot {
        Slot::new(index).unwrap()
    }

    /// The best pull to `here`, the only candidate.
    fn best<const N: usize>(
        prompt: u32,
        here: &Candidate,
        price: &PullPrice<'_>,
        holders: [Holder; N],
    ) -> Option<Pull> {
        super::best(prompt, here, &Outlook::new(&[*here]), price, holders.into_iter())
    }

    #[test]
    fn a_pull_is_chosen_if_it_is_cheaper_than_computing() {
        let cost = cost();
        let here = candidate(0, 0);
        let holders = [idle(0, 90), idle(1, 50), idle(2, 60)];
        let fast = PullPrice { cost: &cost, rate: 1e9 };
        let pull = best(1_000, &here, &fast, holders).unwrap();
        assert_eq!((pull.from, pull.units), (slot(2), 60), "the one that holds most, and not itself");
        let bytes = 960.0 * 20_000.0 + 1e6;
        assert!((pull.seconds - (OVERHEAD_S + bytes / 1e9)).abs() < 1e-9, "{}", pull.seconds);
        assert!(
            (pull.copy_seconds - 2.0 * bytes / COPY_RATE).abs() < 1e-9 && pull.idle_seconds == pull.seconds,
            "{pull:?}"
        );
        // Computing 960 tokens takes 1 s; a pull at 10 MB/s takes 2 s.
        assert_eq!(best(1_000, &here, &PullPrice { cost: &cost, rate: 1e7 }, holders), None);
        // A held prefix is not pulled again, and a small gain does not justify a pull.
        assert!(best(1_000, &candidate(0, 55), &fast, holders).is_some());
        assert_eq!(best(1_000, &candidate(0, 59), &fast, holders), None);
        assert_eq!(best(1_000, &candidate(0, 60), &fast, holders), None);
        assert_eq!(best(1_000, &here, &fast, []), None);
    }

    #[test]
    fn a_busy_holder_makes_a_pull_more_expensive() {
        let cost = cost();
        let here = candidate(0, 0);
        let fast = PullPrice { cost: &cost, rate: 1e9 };
        // The holder copies out between layers: the first slice waits half a layer, the second one more.
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
        assert!(pull.seconds > 2.0 && pull.idle_seconds == 0.0, "{pull:?}");
        let pull = best(1_000, &busy(1_500), &slow, [idle(1, 60)]).unwrap();
        assert!((pull.idle_seconds - (pull.seconds - 1.5)).abs() < 1e-9, "{pull:?}");
        assert_eq!(best(1_000, &busy(500), &slow, [idle(1, 60)]), None);
    }

    /// 960 tokens take 0.96 s to compute. The pull takes 0.02 s, 19.2 MB at 1 GB/s and two copies of these at
    /// 1 GB/s.
    #[test]
    fn a_pull_is_awaited_for_at_most_the_weighted_prefill_time() {
        let cost = PullCost { bytes_per_point: 0, ..cost() };
        let price = PullPrice { cost: &cost, rate: 1e9 };
        let takes = OVERHEAD_S + 3.0 * 960.0 * 20_000.0 / 1e9;
        let in_flight = |ready| Holder { ready: Some(ready), ..idle(1, 60) };
        let max_wait = RECOMPUTE_WEIGHT * 0.96 - takes;
        let pull = best(1_000, &candidate(0, 0), &price, [in_flight(max_wait - 0.001)]).unwrap();
        assert!(
            pull.wait_seconds == Some(max_wait - 0.001) && (pull.cost() - takes).abs() < 1e-9,
            "{pull:?}"
        );
        assert_eq!(best(1_000, &candidate(0, 0), &price, [in_flight(max_wait + 0.001)]), None);
        // While the worker has other prompts to compute, waiting is free.
        let busy = Candidate { pending_tokens: 1_500, ..candidate(0, 0) };
        let pull = best(1_000, &busy, &price, [in_flight(max_wait + 0.001)]).unwrap();
        assert!((pull.wait_seconds.unwrap() - (max_wait + 0.001 - 1.5)).abs() < 1e-9, "{pull:?}");
        // A held prefix is preferred if the awaited one brings little more.
        let half = |units| Holder { slot: slot(2), ..idle(2, units) };
        let from = |units| best(1_000, &candidate(0, 0), &price, [in_flight(0.9), half(units)]).unwrap().from;
        assert_eq!((from(30), from(59)), (slot(1), slot(2)));
        // A pull that costs as much as computing is not awaited.
        let slow = PullPrice { cost: &cost, rate: 2e7 };
        assert_eq!(best(1_000, &candidate(0, 0), &slow, [in_flight(0.0)]), None);
    }

    #[test]
    fn the_last_token_of_a_pulled_prompt_is_computed() {
        let cost = cost();
        let price = PullPrice { cost: &cost, rate: 1e9 };
        let pull = best(960, &candidate(0, 0), &price, [idle(1, 60)]).unwrap();
        let chosen = Candidate { pull: Some(pull), ..candidate(0, 0) };
        let choice = choose(960, &[chosen]);
        assert_eq!((choice.predicted, choice.reason), (944, Reason::Only));
    }

    #[test]
    fn a_request_leaves_a_busy_holder_earlier_if_the_other_worker_can_pull() {
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
