//! When a stage that computes a step has failed: long after it should be done. Sans-IO.

use std::time::Duration;

/// No stage is given up before it has computed this long: machines hesitate.
const FLOOR: Duration = Duration::from_secs(2);
/// Before anything like a step has been measured: weights may still come from a disk.
const UNKNOWN: Duration = Duration::from_secs(60);
/// How many times longer than the longest known a step may take.
const PATIENCE: f64 = 8.0;
/// What is left of the longest time with every step that takes less.
const FADE: f64 = 0.99;
/// Powers of two of rows.
const SIZES: usize = 32;

/// How long one stage may take for a step.
#[derive(Debug, Clone)]
pub(super) struct Deadline {
    /// By the power of two that is not less than the rows: the longest of recent times, in seconds.
    longest: [Option<f64>; SIZES],
}

impl Default for Deadline {
    fn default() -> Self {
        Self { longest: [None; SIZES] }
    }
}

fn size(rows: usize) -> usize {
    (rows.max(1).next_power_of_two().trailing_zeros() as usize).min(SIZES - 1)
}

impl Deadline {
    /// A step of so many rows has taken `took`.
    pub(super) fn took(&mut self, rows: usize, took: Duration) {
        let longest = &mut self.longest[size(rows)];
        *longest = Some(took.as_secs_f64().max(longest.unwrap_or(0.0) * FADE));
    }

    /// The longest that one of so many rows may take. Smaller steps tell by their rows, larger ones as they are.
    pub(super) fn limit(&self, rows: usize) -> Duration {
        let size = size(rows);
        let smaller = self.longest[..=size].iter().enumerate().rev();
        let mut known = smaller.filter_map(|(at, time)| time.map(|time| time * f64::from(1 << (size - at))));
        let known = known.next().or_else(|| self.longest[size..].iter().flatten().next().copied());
        let limit = known.and_then(|time| Duration::try_from_secs_f64(time * PATIENCE).ok());
        limit.map_or(UNKNOWN, |limit| limit.clamp(FLOOR, UNKNOWN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_follow_what_was_measured_between_floor_and_ceiling() {
        let ms = Duration::from_millis;
        let mut deadline = Deadline::default();
        assert_eq!(deadline.limit(1), UNKNOWN);
        deadline.took(100, ms(500));
        assert_eq!(deadline.limit(128), ms(4000));
        assert_eq!(deadline.limit(1), ms(4000), "as a larger one");
        assert_eq!(deadline.limit(200), ms(8000), "by its rows");
        assert_eq!(deadline.limit(1 << 20), UNKNOWN);
        deadline.took(1, ms(5));
        assert_eq!(deadline.limit(1), FLOOR);
        deadline.took(128, ms(1));
        assert!((ms(3900)..ms(4000)).contains(&deadline.limit(128)), "{:?}", deadline.limit(128));
    }
}
