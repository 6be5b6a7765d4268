//! Checks whether a history of one register is linearizable: whether each operation can be assigned an
//! instant between its call and its return (Wing and Gong's search with Lowe's memoisation).

use std::collections::HashSet;

/// An operation on the register and its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// The register was set to this value.
    Write(u64),
    /// The register had this value.
    Read(u64),
    /// A successful compare-and-swap.
    Swap {
        /// Old value.
        from: u64,
        /// New value.
        to: u64,
    },
    /// A failed compare-and-swap.
    NotSwapped {
        /// Expected value.
        from: u64,
        /// Actual value.
        found: u64,
    },
}

/// An operation with its times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    pub op: Op,
    /// Time of the call.
    pub called: u64,
    /// Time of the return. `None`: it is unknown whether the operation took effect or still will.
    pub returned: Option<u64>,
}

impl Op {
    /// The register after the operation; `None` if its result contradicts `state`.
    fn step(self, state: u64) -> Option<u64> {
        match self {
            Self::Write(value) => Some(value),
            Self::Read(value) => (value == state).then_some(state),
            Self::Swap { from, to } => (from == state).then_some(to),
            Self::NotSwapped { from, found } => (found == state && found != from).then_some(state),
        }
    }
}

/// Whether a valid order exists. The register begins at 0.
pub fn linearizable(calls: &[Call]) -> bool {
    let mut calls = calls.to_vec();
    calls.sort_by_key(|call| call.called);
    let mut search = Search { done: vec![false; calls.len()], first_open: 0, calls, tried: HashSet::new() };
    search.finds_an_order()
}

struct Search {
    calls: Vec<Call>,
    done: Vec<bool>,
    /// All calls before this index are done.
    first_open: usize,
    /// Visited states: the first open call, the calls done after it, and the register.
    tried: HashSet<(usize, Vec<bool>, u64)>,
}

/// A node of the search: some calls are done, and one of the others is next.
struct Point {
    state: u64,
    /// Earliest return of the open calls. A call that began later must come after it.
    until: u64,
    /// Next call to try.
    next: usize,
    /// Call being tried.
    taken: Option<usize>,
}

impl Search {
    /// Iterative, because the depth of the search equals the number of calls.
    fn finds_an_order(&mut self) -> bool {
        let mut way: Vec<Point> = Vec::new();
        let mut state = 0;
        while let Some(until) = self.first_return() {
            if self.tried.insert((self.first_open, self.done_behind(), state)) {
                way.push(Point { state, until, next: self.first_open, taken: None });
            }
            state = loop {
                let Some(point) = way.last_mut() else { return false };
                if let Some(at) = point.taken.take() {
                    self.undo(at);
                }
                if let Some((at, next)) = self.next_at(point) {
                    (point.taken, point.next) = (Some(at), at + 1);
                    self.mark(at);
                    break next;
                }
                way.pop();
            };
        }
        true
    }

    /// Earliest return of the open calls; `None` if no open call has returned.
    fn first_return(&self) -> Option<u64> {
        let mut first: Option<u64> = None;
        for at in (self.first_open..self.calls.len()).filter(|at| !self.done[*at]) {
            if first.is_some_and(|first| self.calls[at].called > first) {
                break;
            }
            first = first.into_iter().chain(self.calls[at].returned).min();
        }
        first
    }

    fn next_at(&self, point: &Point) -> Option<(usize, u64)> {
        let early = (point.next..self.calls.len()).take_while(|at| self.calls[*at].called <= point.until);
        early
            .filter(|at| !self.done[*at] && !self.is_redundant(*at))
            .find_map(|at| Some((at, self.calls[at].op.step(point.state)?)))
    }

    fn mark(&mut self, at: usize) {
        self.done[at] = true;
        let open = self.done[self.first_open..].iter().position(|done| !done);
        self.first_open = open.map_or(self.done.len(), |behind| self.first_open + behind);
    }

    fn undo(&mut self, at: usize) {
        self.done[at] = false;
        self.first_open = self.first_open.min(at);
    }

    fn done_behind(&self) -> Vec<bool> {
        let behind = &self.done[self.first_open..];
        let last = behind.iter().rposition(|done| *done);
        behind[..last.map_or(0, |last| last + 1)].to_vec()
    }

    /// Of equal operations without a return, only the earliest call is tried: it can take effect whenever
    /// another one can.
    fn is_redundant(&self, at: usize) -> bool {
        let Call { op, returned, .. } = self.calls[at];
        let same = |before: &usize| {
            !self.done[*before] && self.calls[*before] == Call { op, returned, ..self.calls[*before] }
        };
        returned.is_none() && (self.first_open..at).rev().any(|before| same(&before))
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
    fn linearizable_histories_are_accepted() {
        assert!(linearizable(&[]));
        let overlapping = [
            call(Op::Write(1), 0, 10),
            call(Op::Read(0), 1, 2),
            call(Op::Read(1), 3, 4),
            call(Op::Swap { from: 1, to: 2 }, 5, 9),
            call(Op::NotSwapped { from: 1, found: 2 }, 8, 12),
        ];
        assert!(linearizable(&overlapping));
        // A write without a return may take effect late or never.
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
            // A value that was never written.
            &[write, call(Op::Read(7), 2, 3)],
            // A read of the old value after another read returned the new one.
            &[call(Op::Write(1), 0, 10), call(Op::Read(1), 1, 2), call(Op::Read(0), 3, 4)],
            // A lost write.
            &[write, call(Op::Write(2), 2, 3), call(Op::Read(1), 4, 5)],
            // The same swap done twice.
            &[call(Op::Swap { from: 0, to: 1 }, 0, 9), call(Op::Swap { from: 0, to: 1 }, 0, 9)],
            // Refused although the expected value matched.
            &[write, call(Op::NotSwapped { from: 1, found: 1 }, 2, 3)],
            // An unreturned write is visible, then invisible.
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

    #[test]
    fn a_long_history_is_read_to_its_end() {
        let swaps = (0..10_000).map(|n| call(Op::Swap { from: n, to: n + 1 }, 2 * n, 2 * n + 3));
        let mut history: Vec<Call> = swaps.collect();
        assert!(linearizable(&history));
        history.push(call(Op::Read(7), 200_000, 200_001));
        assert!(!linearizable(&history));
    }

    /// Brute force by definition: tries every order of the calls, with any of the unreturned calls omitted.
    fn by_trying_every_order(calls: &[Call], rest: &mut Vec<usize>, state: u64) -> bool {
        if rest.iter().all(|&at| calls[at].returned.is_none()) {
            return true;
        }
        (0..rest.len()).any(|index| {
            let at = rest[index];
            let too_early = rest.iter().any(|&o| calls[o].returned.is_some_and(|r| r < calls[at].called));
            let Some(next) = calls[at].op.step(state).filter(|_| !too_early) else { return false };
            let at = rest.remove(index);
            let fits = by_trying_every_order(calls, rest, next);
            rest.insert(index, at);
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
