//! Decides how many rows a step takes, so that all stages of a replica are busy. Never changes results.
//! Sans-IO.
//!
//! Decoding sequences are either divided into one micro-batch for each stage, or all taken into one step,
//! which reads all weights only once while the other stages wait. Which is faster depends on the model, the
//! number of sequences, the links and other users of the memory, so both ways are timed. The slower way is
//! tried again from time to time, sooner the closer the two are.

use engine::scheduler::{Demand, StepLimits};
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

/// A long prompt is cut into this many steps for each stage after the first. Filling and draining the
/// pipeline then costs about a sixteenth of the time.
const STEPS_PER_FILL: u64 = 16;
/// Minimum prompt rows of a step. Below it the cost of a row rises noticeably, because each step reads all
/// weights.
const MIN_PROMPT_ROWS: u64 = 128;
/// Divisor of the prompt rows of a step: a multiple of the block size and of the hash unit.
const PROMPT_ROWS_MULTIPLE: u64 = 64;
/// Number of rounds whose median is the time of a round. A round computes one row of each sequence.
const ROUNDS: usize = 5;
/// Number of decisions after which a trial ends without result. It cannot be timed while sequences come and
/// go.
const MAX_TRIAL_DECISIONS: u32 = 64;
/// Minimum number of rounds between two trials.
const MIN_ROUNDS_BETWEEN_TRIALS: f64 = 128.0;
/// The work between two trials takes at least this many times the cost of a trial.
const WORK_PER_TRIAL: f64 = 100.0;

#[derive(Debug)]
pub(super) struct MicrobatchScheduler {
    stages: u32,
    ways: HashMap<u32, Ways>,
    /// The last decision; `None` next to prompts, where rounds are not timed.
    choice: Option<MicrobatchChoice>,
    /// The choice of the last finished step, the steps counted in the current round, and their time.
    timed: Option<(MicrobatchChoice, u32, Duration)>,
}

/// A decision: the number of decoding sequences, and the number of steps that they are divided into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MicrobatchChoice {
    all: u32,
    microbatches: u32,
}

/// Timings of both ways for one number of sequences.
#[derive(Debug, Default)]
struct Ways {
    divided: Rounds,
    whole: Rounds,
    takes_whole: bool,
    /// Decisions left for the trial of the other way; 0 while no trial runs.
    trial: u32,
    /// Seconds of work until the next trial.
    rests: f64,
}

/// Seconds of each of the last rounds, at most [`ROUNDS`].
#[derive(Debug, Default)]
struct Rounds(VecDeque<f64>);

impl Rounds {
    fn took(&mut self, seconds: f64) {
        if self.0.len() == ROUNDS {
            self.0.pop_front();
        }
        self.0.push_back(seconds);
    }

    /// Median seconds of a round, or `None` while fewer than [`ROUNDS`] were timed.
    fn median(&self) -> Option<f64> {
        let mut sorted: Vec<f64> = self.0.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        sorted.get(ROUNDS / 2).copied().filter(|_| sorted.len() == ROUNDS)
    }
}

impl Ways {
    fn of(&mut self, whole: bool) -> &mut Rounds {
        if whole { &mut self.whole } else { &mut self.divided }
    }

    /// Whether the next step takes all sequences. No trial runs next to prompts, since rounds are not timed
    /// then.
    fn next_is_whole(&self, demand: Demand) -> bool {
        self.takes_whole ^ (self.trial > 0 && demand.prefill == 0)
    }

    /// Counts a planned step.
    fn decided(&mut self) {
        if self.trial > 0 {
            self.trial -= 1;
            if self.trial == 0 {
                // The trial could not be timed.
                self.rest(0.0);
            }
        }
    }

    /// Records the time of a round.
    fn took(&mut self, whole: bool, seconds: f64) {
        self.of(whole).took(seconds);
        if whole == self.takes_whole {
            self.rests -= seconds;
            if self.trial == 0 && self.rests <= 0.0 && self.of(whole).median().is_some() {
                self.trial = MAX_TRIAL_DECISIONS;
                self.of(!whole).0.clear();
            }
            return;
        }
        let (Some(tried), Some(taken)) = (self.of(whole).median(), self.of(!whole).median()) else { return };
        self.takes_whole ^= tried < taken;
        self.trial = 0;
        self.rest((tried - taken).abs() * ROUNDS as f64);
    }

    /// Starts the pause after a trial that cost `cost` seconds.
    fn rest(&mut self, cost: f64) {
        let taken = self.takes_whole;
        let round = self.of(taken).median().unwrap_or_default();
        self.rests = (cost * WORK_PER_TRIAL).max(round * MIN_ROUNDS_BETWEEN_TRIALS);
    }
}

impl MicrobatchScheduler {
    /// `stages` is the number of stages of the replica, the first one included.
    pub(super) fn new(stages: usize) -> Self {
        let stages = u32::try_from(stages).unwrap_or(u32::MAX).max(1);
        Self { stages, ways: HashMap::new(), choice: None, timed: None }
    }

    /// Maximum number of steps in flight.
    pub(super) fn max_steps(&self) -> u32 {
        self.stages.saturating_add(1)
    }

    /// Returns the limits of the next step, or `None` if it must wait until a step in flight has finished.
    ///
    /// With prompts, one step for each stage and one waiting step may be in flight. Without prompts there are
    /// only as many as the sequences are divided into. One more step would take whichever sequences are free
    /// at that time, and so would all later steps, since the sequences of a step become free together. Each
    /// would read all weights for a few rows.
    pub(super) fn limits(&mut self, demand: Demand, under_way: usize) -> Option<StepLimits> {
        let whole = self.ways.get(&demand.decoding).is_some_and(|ways| ways.next_is_whole(demand));
        let max_microbatches = self.stages.min(demand.decoding).max(1);
        let decoding =
            if whole { demand.decoding } else { demand.decoding.div_ceil(max_microbatches).max(1) };
        let microbatches = demand.decoding.div_ceil(decoding);
        let room = if demand.prefill > 0 || microbatches == 0 { self.max_steps() } else { microbatches };
        if under_way >= room as usize {
            return None;
        }
        self.choice = None;
        if max_microbatches > 1 && demand.prefill == 0 {
            self.ways.entry(demand.decoding).or_default().decided();
            self.choice = Some(MicrobatchChoice { all: demand.decoding, microbatches });
        }
        let rows = if demand.prefill == 0 {
            u32::MAX
        } else {
            let fills = STEPS_PER_FILL * u64::from(self.stages - 1).max(1);
            let rows = (demand.prefill / fills).next_multiple_of(PROMPT_ROWS_MULTIPLE);
            u32::try_from(rows.max(MIN_PROMPT_ROWS)).unwrap_or(u32::MAX).saturating_add(decoding)
        };
        Some(StepLimits { rows, decoding })
    }

    /// The decision of the last call of [`Self::limits`], to be passed to [`Self::answered`].
    pub(super) fn choice(&self) -> Option<MicrobatchChoice> {
        self.choice
    }

    /// Records that a step planned with `choice` finished, `since_last` after the previous one.
    pub(super) fn answered(&mut self, choice: Option<MicrobatchChoice>, since_last: Duration) {
        let Some(choice) = choice else {
            self.timed = None;
            return;
        };
        let (steps, time) = match self.timed {
            Some((last, steps, time)) if last == choice => (steps + 1, time + since_last),
            // The previous step had another choice, so the time since then does not belong to this round.
            _ => (0, Duration::ZERO),
        };
        if steps < choice.microbatches {
            self.timed = Some((choice, steps, time));
            return;
        }
        self.timed = Some((choice, 0, Duration::ZERO));
        if let Some(ways) = self.ways.get_mut(&choice.all) {
            ways.took(choice.microbatches == 1, time.as_secs_f64());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoding(decoding: u32) -> Demand {
        Demand { decoding, prefill: 0 }
    }

    fn ms(ms: f64) -> Duration {
        Duration::from_secs_f64(ms / 1e3)
    }

    /// Simulated sequences that decode without end.
    struct Decoding {
        scheduler: MicrobatchScheduler,
        all: u32,
        /// Rows of each step in flight, and the choice that it was planned with.
        under_way: VecDeque<(u32, Option<MicrobatchChoice>)>,
        seconds: f64,
    }

    impl Decoding {
        fn new(stages: usize, all: u32) -> Self {
            Self {
                scheduler: MicrobatchScheduler::new(stages),
                all,
                under_way: VecDeque::new(),
                seconds: 0.0,
            }
        }

        /// Plans all possible steps, then finishes the oldest one. `took` returns its milliseconds from its
        /// rows.
        fn step(&mut self, took: impl Fn(u32) -> f64) -> u32 {
            loop {
                let free = self.all - self.under_way.iter().map(|(rows, _)| rows).sum::<u32>();
                let limits = self.scheduler.limits(decoding(self.all), self.under_way.len());
                let Some(limits) = limits.filter(|_| free > 0) else { break };
                self.under_way.push_back((free.min(limits.decoding), self.scheduler.choice()));
            }
            let (rows, choice) = self.under_way.pop_front().unwrap();
            self.seconds += took(rows) / 1e3;
            self.scheduler.answered(choice, ms(took(rows)));
            rows
        }

        /// Simulates `seconds` of decoding and returns the share of rows that were computed in undivided
        /// steps.
        fn whole(&mut self, seconds: f64, took: impl Fn(u32) -> f64) -> f64 {
            let (until, mut all, mut whole) = (self.seconds + seconds, 0, 0);
            while self.seconds < until {
                let rows = self.step(&took);
                all += rows;
                whole += if rows == self.all { rows } else { 0 };
            }
            f64::from(whole) / f64::from(all)
        }
    }

    #[test]
    fn a_single_stream_is_never_divided_and_prompts_alone_are_cut_to_fill_all_stages() {
        let mut scheduler = MicrobatchScheduler::new(2);
        let alone = StepLimits { rows: u32::MAX, decoding: 1 };
        assert_eq!(scheduler.limits(decoding(1), 0), Some(alone));
        assert_eq!(scheduler.choice(), None, "there is nothing to choose");
        let rows = |scheduler: &mut MicrobatchScheduler, prefill| {
            scheduler.limits(Demand { decoding: 0, prefill }, 2).unwrap().rows
        };
        assert_eq!([100, 2048, 8192].map(|prefill| rows(&mut scheduler, prefill)), [129, 129, 513]);
        assert_eq!(rows(&mut MicrobatchScheduler::new(3), 8192), 257);
        assert_eq!(rows(&mut scheduler, u64::MAX / 2), u32::MAX);
        let full = Demand { decoding: 0, prefill: 99 };
        assert_eq!(scheduler.limits(full, 3), None, "one for each stage and one that waits");
    }

    #[test]
    fn both_ways_are_timed_and_the_faster_is_kept() {
        for (stages, all) in [(2, 8), (2, 7), (3, 8), (4, 3)] {
            let mut streams = Decoding::new(stages, all);
            let microbatches = all.div_ceil(all.div_ceil(all.min(stages as u32)));
            let faster_whole = |rows| if rows == all { 30.0 } else { 40.0 / f64::from(microbatches) };
            let faster_divided = |rows| if rows == all { 40.0 } else { 30.0 / f64::from(microbatches) };
            let start = streams.whole(1.0, faster_divided);
            assert!((0.01..0.5).contains(&start), "{stages}, {all}: both were tried, {start}");
            let share = streams.whole(60.0, faster_divided);
            assert!((0.001..0.05).contains(&share), "{stages}, {all}: tried again now and then, {share}");
            // The undivided way becomes faster.
            streams.whole(20.0, faster_whole);
            let share = streams.whole(60.0, faster_whole);
            assert!((0.95..0.999).contains(&share), "{stages}, {all}: {share}");
        }
    }

    /// Sequences come and go one by one, and a step takes those that are free. An uneven division must not
    /// persist.
    #[test]
    fn an_uneven_division_becomes_even_again() {
        let mut streams = Decoding::new(2, 8);
        streams.under_way.extend([(5, None), (1, None), (2, None)]);
        let rows: Vec<u32> = (0..12).map(|_| streams.step(|_| 10.0)).collect();
        assert_eq!(rows[7..10], [4, 4, 4], "{rows:?}");
    }

    #[test]
    fn a_trial_that_cannot_be_timed_ends() {
        let mut scheduler = MicrobatchScheduler::new(2);
        let divided = MicrobatchChoice { all: 8, microbatches: 2 };
        (0..20).for_each(|_| scheduler.answered(Some(divided), ms(10.0)));
        assert!(scheduler.ways.is_empty(), "no limits were requested yet");
        assert_eq!(scheduler.limits(decoding(8), 0).unwrap().decoding, 4);
        (0..20).for_each(|_| scheduler.answered(Some(divided), ms(10.0)));
        let tried = (0..200).filter(|_| scheduler.limits(decoding(8), 0).unwrap().decoding == 8).count();
        assert_eq!(tried, MAX_TRIAL_DECISIONS as usize);
        let with_prompts = Demand { decoding: 8, prefill: 100 };
        assert_eq!(scheduler.limits(with_prompts, 0).unwrap().decoding, 4);
        assert_eq!(scheduler.choice(), None, "nothing is learnt beside prompts");
    }
}
