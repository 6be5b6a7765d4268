//! Time limit of a step at a stage. A stage that exceeds it by far counts as failed. Sans-IO.

use std::time::Duration;

/// Minimum limit, since machines stall briefly.
const MIN_LIMIT: Duration = Duration::from_secs(2);
/// Limit before any step was measured, when weights may still be read from disk; also the maximum.
const UNKNOWN: Duration = Duration::from_secs(60);
/// Ratio of the limit to the longest measured time.
const LIMIT_RATIO: f64 = 8.0;
/// Factor on the longest time at each step that took less.
const FADE: f64 = 0.99;
/// Number of size classes; class `i` has up to `2^i` rows.
const SIZES: usize = 32;

/// Time limits of one stage.
#[derive(Debug, Clone)]
pub(super) struct Deadline {
    /// For each size class the longest recent time in seconds. `None` if not measured.
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
    /// Records that a step of `rows` rows took `took`.
    pub(super) fn took(&mut self, rows: usize, took: Duration) {
        let longest = &mut self.longest[size(rows)];
        *longest = Some(took.as_secs_f64().max(longest.unwrap_or(0.0) * FADE));
    }

    /// Time limit of a step of `rows` rows. Without a time of its size, the largest smaller one is scaled by
    /// its rows; without one, the smallest larger one is used unscaled.
    pub(super) fn limit(&self, rows: usize) -> Duration {
        let size = size(rows);
        let smaller = self.longest[..=size].iter().enumerate().rev();
        let mut scaled = smaller.filter_map(|(at, time)| time.map(|time| time * f64::from(1 << (size - at))));
        let longest = scaled.next().or_else(|| self.longest[size..].iter().flatten().next().copied());
        let limit = longest.and_then(|time| Duration::try_from_secs_f64(time * LIMIT_RATIO).ok());
        limit.map_or(UNKNOWN, |limit| limit.clamp(MIN_LIMIT, UNKNOWN))
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
        assert_eq!(deadline.limit(1), MIN_LIMIT);
        deadline.took(128, ms(1));
        assert!((ms(3900)..ms(4000)).contains(&deadline.limit(128)), "{:?}", deadline.limit(128));
    }
}
