//! How much of what there is to compute one step takes, so that all stages of a replica have something to do.
//!
//! Results do not depend on it. Sans-IO: it is told what there is, and how long steps have taken.

use crate::scheduler::{Demand, StepLimits};
use std::collections::HashMap;
use std::time::Duration;

/// Prompts are cut so that their rest makes this many steps for each stage behind the first: a pipeline is filled and
/// emptied once, and loses a sixteenth of the time by it.
const STEPS_PER_FILL: u64 = 16;
/// Rows of a prompt below which a step costs noticeably more for each of them, since it reads all weights.
const FEWEST_PROMPT_ROWS: u64 = 128;
/// A whole number of cache blocks and hash units.
const PROMPT_ROWS_MULTIPLE: u64 = 64;
/// Weight of a new time in the average.
const BLEND: f64 = 0.2;
/// Decisions after which the way that was not chosen is tried once more: contexts grow, and neighbours come and go.
const TRUSTED: u32 = 1024;

/// See the module.
#[derive(Debug)]
pub(super) struct Pace {
    stages: u32,
    /// By rows: seconds that each stage takes for a step that only decodes.
    decode: HashMap<u32, Vec<f64>>,
    /// Decisions since the other way was tried.
    decided: u32,
}

impl Pace {
    /// Of a replica of so many stages.
    pub(super) fn new(stages: usize) -> Self {
        Self { stages: u32::try_from(stages).unwrap_or(u32::MAX).max(1), decode: HashMap::new(), decided: 0 }
    }

    /// What a step takes when there is so much to do.
    pub(super) fn limits(&mut self, demand: Demand) -> StepLimits {
        let decoding = demand.decoding.div_ceil(self.parts(demand)).max(1);
        let rows = if demand.prefill == 0 {
            u32::MAX
        } else {
            let fills = STEPS_PER_FILL * u64::from(self.stages - 1).max(1);
            let rows = (demand.prefill / fills).next_multiple_of(PROMPT_ROWS_MULTIPLE);
            u32::try_from(rows.max(FEWEST_PROMPT_ROWS)).unwrap_or(u32::MAX).saturating_add(decoding)
        };
        StepLimits { rows, decoding }
    }

    /// A step that only decodes has taken so long at each stage.
    pub(super) fn decoded(&mut self, rows: u32, took: impl Iterator<Item = Duration>) {
        let took: Vec<f64> = took.map(|took| took.as_secs_f64()).collect();
        let known = self.decode.entry(rows).or_insert_with(|| took.clone());
        known.iter_mut().zip(took).for_each(|(known, new)| *known += BLEND * (new - *known));
    }

    /// Steps among which the sequences that decode are divided: as many as there are stages, or one, whichever takes
    /// less time for all. What has not been measured is tried.
    fn parts(&mut self, demand: Demand) -> u32 {
        let all = demand.decoding;
        let most = self.stages.min(all).max(1);
        let part = all.div_ceil(most);
        let (Some(divided), whole) = (self.decode.get(&part), self.decode.get(&all)) else { return most };
        let slowest = divided.iter().copied().fold(0.0, f64::max);
        let divided = (slowest * f64::from(most)).max(divided.iter().sum());
        let pays = match whole {
            // Beside prompts nothing could be learnt.
            None => demand.prefill > 0,
            Some(whole) => divided < whole.iter().sum(),
        };
        self.decided += 1;
        if self.decided >= TRUSTED {
            self.decided = 0;
            self.decode.remove(if pays { &all } else { &part });
        }
        if pays { most } else { 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoding(decoding: u32) -> Demand {
        Demand { decoding, prefill: 0 }
    }

    fn ms(times: &[u64]) -> impl Iterator<Item = Duration> {
        times.iter().map(|ms| Duration::from_millis(*ms))
    }

    #[test]
    fn a_single_stream_is_never_divided_and_prompts_alone_are_cut_to_fill_all_stages() {
        let mut pace = Pace::new(2);
        assert_eq!(pace.limits(decoding(1)), StepLimits { rows: u32::MAX, decoding: 1 });
        let rows = |pace: &mut Pace, prefill| pace.limits(Demand { decoding: 0, prefill }).rows;
        assert_eq!([100, 2048, 8192].map(|prefill| rows(&mut pace, prefill)), [129, 129, 513]);
        assert_eq!(rows(&mut Pace::new(3), 8192), 257);
        assert_eq!(rows(&mut pace, u64::MAX / 2), u32::MAX);
    }

    #[test]
    fn both_ways_are_tried_and_the_faster_is_kept() {
        let mut pace = Pace::new(2);
        assert_eq!(pace.limits(decoding(8)).decoding, 4, "unknown");
        pace.decoded(4, ms(&[10, 10]));
        assert_eq!(pace.limits(Demand { decoding: 8, prefill: 99 }).decoding, 4, "not beside prompts");
        assert_eq!(pace.limits(decoding(8)).decoding, 8, "to compare");
        pace.decoded(8, ms(&[13, 13]));
        assert_eq!(pace.limits(decoding(8)).decoding, 4, "20 ms against 26");
        // One stage does nearly all, and is no faster for fewer rows.
        let mut pace = Pace::new(2);
        pace.decoded(4, ms(&[18, 2]));
        pace.decoded(8, ms(&[19, 2]));
        assert_eq!(pace.limits(decoding(8)).decoding, 8);
        assert_eq!(pace.limits(decoding(7)).decoding, 7, "7 at once are not known");
    }

    #[test]
    fn times_are_not_trusted_for_ever() {
        let mut pace = Pace::new(2);
        pace.decoded(4, ms(&[10, 10]));
        pace.decoded(8, ms(&[13, 13]));
        let mut chosen = (0..TRUSTED + 1).map(|_| pace.limits(decoding(8)).decoding);
        assert!(chosen.by_ref().take(TRUSTED as usize).all(|decoding| decoding == 4));
        assert_eq!(chosen.next(), Some(8));
    }
}
