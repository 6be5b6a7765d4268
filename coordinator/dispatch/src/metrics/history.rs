//! Request statistics of the last minutes, for the dashboard. Metrics cover longer times.

use super::Served;
use parking_lot::Mutex;
use router::timeline::{Sketch, Timeline};
use std::time::{Duration, Instant};

/// The statistics of one time slot.
#[derive(Debug, Clone, Default)]
pub struct Moment {
    /// Times from arrival to the first token.
    pub ttft: Sketch,
    /// Times between two tokens.
    pub itl: Sketch,
    /// Times from arrival to the end.
    pub e2e: Sketch,
    pub done: u64,
    /// Prompt tokens of finished requests.
    pub prompt: u64,
    /// Tokens generated, including those of running requests.
    pub generated: u64,
    /// Prompt tokens that workers had cached.
    pub cached: u64,
    /// Absolute difference between predicted and cached prompt tokens.
    pub mispredicted: u64,
    /// Requests that were shed: overload, or no worker available.
    pub shed: u64,
    /// Failed requests, including streams that ended early.
    pub failed: u64,
}

impl Moment {
    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.ttft.merge(&other.ttft);
        self.itl.merge(&other.itl);
        self.e2e.merge(&other.e2e);
        self.done += other.done;
        self.prompt += other.prompt;
        self.generated += other.generated;
        self.cached += other.cached;
        self.mispredicted += other.mispredicted;
        self.shed += other.shed;
        self.failed += other.failed;
    }
}

#[derive(Debug, Default)]
pub struct History(Mutex<Timeline<Moment>>);

impl History {
    pub(super) fn served(&self, served: &Served) {
        let mut line = self.0.lock();
        let at = line.at(Instant::now());
        at.ttft.add(served.to_first, 1);
        at.e2e.add(served.total, 1);
        at.done += 1;
        at.prompt += served.prompt;
    }

    /// Counts the first tokens of a generation.
    pub fn first_tokens(&self, tokens: usize) {
        self.0.lock().at(Instant::now()).generated += tokens as u64;
    }

    /// Counts tokens, each `each` after the one before.
    pub(super) fn tokens(&self, each: Duration, tokens: usize) {
        let mut line = self.0.lock();
        let at = line.at(Instant::now());
        at.itl.add(each, u32::try_from(tokens).unwrap_or(u32::MAX));
        at.generated += tokens as u64;
    }

    /// Counts the predicted and the actually cached tokens of a request.
    pub(super) fn cached(&self, predicted: u32, actual: u32) {
        let mut line = self.0.lock();
        let at = line.at(Instant::now());
        at.cached += u64::from(actual);
        at.mispredicted += u64::from(predicted.abs_diff(actual));
    }

    /// Counts a response. `shed`: overload, or no worker available.
    pub(super) fn answered(&self, status: u16, shed: bool) {
        if status < 500 && !shed {
            return;
        }
        let mut line = self.0.lock();
        let at = line.at(Instant::now());
        if shed { at.shed += 1 } else { at.failed += 1 }
    }

    /// The last `count` slots, oldest first, each with the time since it began.
    pub fn last(&self, now: Instant, count: usize) -> Vec<(Duration, Moment)> {
        self.0.lock().last(now, count).map(|(ago, moment)| (ago, moment.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::message::FinishReason;

    #[test]
    fn current_events_are_in_the_last_slot() {
        let history = History::default();
        let ms = Duration::from_millis;
        history.served(&Served {
            to_first: ms(40),
            queued: ms(1),
            total: ms(400),
            prompt: 12,
            generated: 9,
            reason: FinishReason::Stop,
            trace: None,
        });
        history.first_tokens(1);
        history.tokens(ms(10), 8);
        history.cached(16, 0);
        for (status, shed) in
            [(200, false), (404, false), (499, false), (429, true), (503, true), (503, false)]
        {
            history.answered(status, shed);
        }
        let mut all = Moment::default();
        history.last(Instant::now(), 2).iter().for_each(|(_, moment)| all.merge(moment));
        assert_eq!((all.done, all.prompt, all.generated, all.itl.count()), (1, 12, 9, 8));
        assert_eq!((all.shed, all.failed, all.mispredicted, all.cached), (2, 1, 16, 0));
        assert!(all.ttft.quantile(0.5) < all.e2e.quantile(0.5));
    }
}
