//! Sleep of an idle engine of another project. No I/O: the caller makes the calls that [`IdleSleep::next`]
//! names, one at a time, and reports their results.
//!
//! Invariants: an engine with a request is never ordered to sleep. A request goes to the engine only while it
//! [`serves`](IdleSleep::serves).

use std::time::{Duration, Instant};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// `since`: end of the last request, or of the last wake.
    Awake {
        since: Instant,
    },
    FallingAsleep,
    Asleep,
    Waking,
    /// It has refused to sleep.
    AlwaysAwake,
    Lost,
}

/// Next step of the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Order the engine to sleep, then report [`IdleSleep::slept`].
    Sleep,
    /// Order the engine to wake, then report [`IdleSleep::woke`].
    Wake,
    /// Ask again at this time, or after a change.
    Until(Instant),
    /// Ask again after a change.
    Wait,
}

/// Result of an order to sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Slept {
    Asleep,
    /// It has requests that are not this worker's.
    Busy,
    /// It refused and still serves.
    Refused,
    Lost,
}

/// Sleep of one run of an engine.
#[derive(Debug)]
pub(super) struct IdleSleep {
    /// Time without requests after which it sleeps.
    idle: Duration,
    state: State,
    /// Requests that wait or run.
    requests: usize,
}

impl IdleSleep {
    pub(super) fn new(idle: Duration, now: Instant) -> Self {
        Self { idle, state: State::Awake { since: now }, requests: 0 }
    }

    /// A request has arrived. It waits until the engine [`serves`](Self::serves).
    pub(super) fn arrived(&mut self) {
        self.requests += 1;
    }

    /// A request has ended, or does not wait any more.
    pub(super) fn left(&mut self, now: Instant) {
        self.requests = self.requests.saturating_sub(1);
        if let State::Awake { since } = &mut self.state {
            *since = now;
        }
    }

    pub(super) fn serves(&self) -> bool {
        matches!(self.state, State::Awake { .. } | State::AlwaysAwake)
    }

    pub(super) fn lost(&self) -> bool {
        self.state == State::Lost
    }

    pub(super) fn asleep(&self) -> bool {
        self.state == State::Asleep
    }

    /// An order was given and its result was not reported.
    pub(super) fn changing(&self) -> bool {
        matches!(self.state, State::FallingAsleep | State::Waking)
    }

    pub(super) fn next(&mut self, now: Instant) -> Step {
        match self.state {
            State::Awake { since } if self.requests == 0 => match since.checked_add(self.idle) {
                Some(at) if at > now => Step::Until(at),
                Some(_) => {
                    self.state = State::FallingAsleep;
                    Step::Sleep
                }
                None => Step::Wait,
            },
            State::Asleep if self.requests > 0 => {
                self.state = State::Waking;
                Step::Wake
            }
            _ => Step::Wait,
        }
    }

    pub(super) fn slept(&mut self, slept: Slept, now: Instant) {
        self.state = match slept {
            Slept::Asleep => State::Asleep,
            Slept::Busy => State::Awake { since: now },
            Slept::Refused => State::AlwaysAwake,
            Slept::Lost => State::Lost,
        };
    }

    /// `woken`: it serves again. Else its state is not known, and it counts as lost.
    pub(super) fn woke(&mut self, woken: bool, now: Instant) {
        self.state = if woken { State::Awake { since: now } } else { State::Lost };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: Duration = Duration::from_secs(60);

    fn asleep(start: Instant) -> IdleSleep {
        let mut sleep = IdleSleep::new(IDLE, start);
        assert_eq!(sleep.next(start + IDLE), Step::Sleep);
        sleep.slept(Slept::Asleep, start + IDLE);
        sleep
    }

    #[test]
    fn it_sleeps_once_the_last_request_is_over_for_long_enough() {
        let start = Instant::now();
        let mut sleep = IdleSleep::new(IDLE, start);
        assert_eq!(sleep.next(start), Step::Until(start + IDLE));
        sleep.arrived();
        sleep.arrived();
        sleep.left(start + IDLE);
        assert_eq!(sleep.next(start + 10 * IDLE), Step::Wait, "a request runs");
        sleep.left(start + 10 * IDLE);
        assert_eq!(sleep.next(start + 10 * IDLE), Step::Until(start + 11 * IDLE));
        assert!(sleep.serves());
        assert_eq!(sleep.next(start + 11 * IDLE), Step::Sleep);
        assert!(!sleep.serves() && sleep.changing());
        assert_eq!(sleep.next(start + 20 * IDLE), Step::Wait, "one order at a time");
        sleep.slept(Slept::Asleep, start + 20 * IDLE);
        assert!(!sleep.serves() && sleep.asleep());
        assert_eq!(sleep.next(start + 90 * IDLE), Step::Wait);
    }

    #[test]
    fn any_number_of_requests_wakes_it_once_and_they_wait_for_that() {
        let start = Instant::now();
        let mut sleep = asleep(start);
        sleep.arrived();
        sleep.arrived();
        assert_eq!(sleep.next(start), Step::Wake);
        sleep.arrived();
        assert_eq!(sleep.next(start), Step::Wait);
        assert!(!sleep.serves());
        sleep.woke(true, start + 2 * IDLE);
        assert!(sleep.serves());
        assert_eq!(sleep.next(start + 9 * IDLE), Step::Wait);
    }

    #[test]
    fn a_request_during_the_order_to_sleep_waits_for_its_end_and_wakes_it() {
        let start = Instant::now();
        let mut sleep = IdleSleep::new(IDLE, start);
        assert_eq!(sleep.next(start + IDLE), Step::Sleep);
        sleep.arrived();
        assert_eq!((sleep.next(start + IDLE), sleep.serves()), (Step::Wait, false));
        sleep.slept(Slept::Asleep, start + IDLE);
        assert_eq!(sleep.next(start + IDLE), Step::Wake);
    }

    #[test]
    fn a_request_that_leaves_while_it_wakes_lets_it_sleep_again() {
        let start = Instant::now();
        let mut sleep = asleep(start);
        sleep.arrived();
        assert_eq!(sleep.next(start), Step::Wake);
        sleep.left(start + IDLE);
        sleep.woke(true, start + 2 * IDLE);
        assert_eq!(sleep.next(start + 2 * IDLE), Step::Until(start + 3 * IDLE));
    }

    #[test]
    fn a_busy_engine_is_asked_again_one_that_refuses_is_not_and_one_that_fails_is_lost() {
        let start = Instant::now();
        let fallen = |slept| {
            let mut sleep = IdleSleep::new(IDLE, start);
            assert_eq!(sleep.next(start + IDLE), Step::Sleep);
            sleep.slept(slept, start + IDLE);
            (sleep.serves(), sleep.lost(), sleep.next(start + IDLE))
        };
        assert_eq!(fallen(Slept::Busy), (true, false, Step::Until(start + 2 * IDLE)));
        assert_eq!(fallen(Slept::Refused), (true, false, Step::Wait));
        assert_eq!(fallen(Slept::Lost), (false, true, Step::Wait));
        let mut sleep = asleep(start);
        sleep.arrived();
        assert_eq!(sleep.next(start), Step::Wake);
        sleep.woke(false, start);
        assert!(sleep.lost() && !sleep.serves());
        assert_eq!(sleep.next(start + 9 * IDLE), Step::Wait);
    }
}
