//! Whether a history of one register could have happened one operation after the other, each at an instant
//! between its call and its return (Wing and Gong's search, with Lowe's memory of what was tried).

use std::collections::HashSet;

/// An operation on the register, and what it was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// It is now this.
    Write(u64),
    /// It was this.
    Read(u64),
    /// It was `from` and is now `to`.
    Swap {
        /// What it was.
        from: u64,
        /// What it is.
        to: u64,
    },
    /// It was to be swapped from `from`, and was `found`.
    NotSwapped {
        /// What it would have had to be.
        from: u64,
        /// What it was.
        found: u64,
    },
}

/// An operation with its times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// What was done.
    pub op: Op,
    /// When it was asked for.
    pub called: u64,
    /// When it was answered. None: nobody knows whether it was done, or will yet be.
    pub returned: Option<u64>,
}

impl Op {
    /// The register after it, if it could have been told this.
    fn step(self, state: u64) -> Option<u64> {
        match self {
            Self::Write(value) => Some(value),
            Self::Read(value) => (value == state).then_some(state),
            Self::Swap { from, to } => (from == state).then_some(to),
            Self::NotSwapped { from, found } => (found == state && found != from).then_some(state),
        }
    }
}

/// Whether there is an order. The register begins at 0.
pub fn linearizable(calls: &[Call]) -> bool {
    let mut calls = calls.to_vec();
    calls.sort_by_key(|call| call.called);
    let mut search = Search { done: vec![false; calls.len()], calls, tried: HashSet::new() };
    search.from(0)
}

struct Search {
    calls: Vec<Call>,
    done: Vec<bool>,
    tried: HashSet<(Vec<bool>, u64)>,
}

impl Search {
    fn from(&mut self, state: u64) -> bool {
        let open = |at: &usize| !self.done[*at];
        // Whoever returns first must come before everybody called later.
        let Some(first) = (0..self.calls.len()).filter(open).filter_map(|at| self.calls[at].returned).min()
        else {
            return true;
        };
        if !self.tried.insert((self.done.clone(), state)) {
            return false;
        }
        for at in 0..self.calls.len() {
            let call = self.calls[at];
            if call.called > first {
                break;
            }
            if self.done[at] || self.is_one_of_many(at) {
                continue;
            }
            if let Some(next) = call.op.step(state) {
                self.done[at] = true;
                if self.from(next) {
                    return true;
                }
                self.done[at] = false;
            }
        }
        false
    }

    /// Of equal operations that were given up, the one that was called first stands for all: it could be done whenever
    /// another could.
    fn is_one_of_many(&self, at: usize) -> bool {
        let Call { op, returned, .. } = self.calls[at];
        let same = |before: &usize| {
            !self.done[*before] && self.calls[*before] == Call { op, returned, ..self.calls[*before] }
        };
        returned.is_none() && (0..at).rev().any(|before| same(&before))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn call(op: Op, called: u64, returned: u64) -> Call {
        Call { op, called, returned: Some(returned) }
    }

    #[test]
    fn what_happened_is_accepted() {
        assert!(linearizable(&[]));
        let overlapping = [
            call(Op::Write(1), 0, 10),
            call(Op::Read(0), 1, 2),
            call(Op::Read(1), 3, 4),
            call(Op::Swap { from: 1, to: 2 }, 5, 9),
            call(Op::NotSwapped { from: 1, found: 2 }, 8, 12),
        ];
        assert!(linearizable(&overlapping));
        // Nobody knows of a write that was given up: it may have come late, or never.
        let lost = Call { op: Op::Write(5), called: 0, returned: None };
        assert!(linearizable(&[lost, call(Op::Read(0), 1, 2), call(Op::Read(5), 20, 21)]));
        assert!(linearizable(&[lost, call(Op::Read(0), 20, 21)]));
    }

    #[test]
    fn planted_violations_are_rejected() {
        let write = call(Op::Write(1), 0, 1);
        let planted: [&[Call]; 7] = [
            // A stale read.
            &[write, call(Op::Read(0), 2, 3)],
            // A value from nowhere.
            &[write, call(Op::Read(7), 2, 3)],
            // A read that goes back in time after another has seen the write.
            &[call(Op::Write(1), 0, 10), call(Op::Read(1), 1, 2), call(Op::Read(0), 3, 4)],
            // A lost write.
            &[write, call(Op::Write(2), 2, 3), call(Op::Read(1), 4, 5)],
            // The same swap done twice.
            &[call(Op::Swap { from: 0, to: 1 }, 0, 9), call(Op::Swap { from: 0, to: 1 }, 0, 9)],
            // Refused though it was right.
            &[write, call(Op::NotSwapped { from: 1, found: 1 }, 2, 3)],
            // A write that was given up is seen, then unseen.
            &[
                Call { op: Op::Write(5), called: 0, returned: None },
                call(Op::Read(5), 1, 2),
                call(Op::Read(0), 3, 4),
            ],
        ];
        for history in planted {
            assert!(!linearizable(history), "{history:?}");
        }
    }

    /// The definition, literally: some order of the calls, some of the unknown ones left out.
    fn by_trying_every_order(calls: &[Call], rest: &mut Vec<usize>, state: u64) -> bool {
        if rest.iter().all(|&at| calls[at].returned.is_none()) {
            return true;
        }
        (0..rest.len()).any(|place| {
            let at = rest[place];
            let too_early = rest.iter().any(|&o| calls[o].returned.is_some_and(|r| r < calls[at].called));
            let Some(next) = calls[at].op.step(state).filter(|_| !too_early) else { return false };
            let at = rest.remove(place);
            let fits = by_trying_every_order(calls, rest, next);
            rest.insert(place, at);
            fits
        })
    }

    #[test]
    fn it_agrees_with_trying_every_order() {
        let mut random = Random::new(11);
        let mut accepted = 0;
        for _ in 0..3000 {
            let mut calls = Vec::new();
            for _ in 0..random.within(1, 7) {
                let (a, b) = (random.below(3), random.below(3));
                let op = match random.below(4) {
                    0 => Op::Write(a),
                    1 => Op::Read(a),
                    2 => Op::Swap { from: a, to: b },
                    _ => Op::NotSwapped { from: a, found: b },
                };
                let called = random.below(12);
                let returned = (!random.chance(200)).then(|| called + 1 + random.below(8));
                calls.push(Call { op, called, returned });
            }
            let expected = by_trying_every_order(&calls, &mut (0..calls.len()).collect(), 0);
            assert_eq!(linearizable(&calls), expected, "{calls:?}");
            accepted += usize::from(expected);
        }
        assert!((300..2700).contains(&accepted), "{accepted} of 3000 accepted: one-sided");
    }
}
