//! The last minutes in slots of equal length. A count goes into the slot of its time; old slots are reused.
//! Nothing runs in the background.

use std::time::{Duration, Instant};

/// Length of a slot.
pub const SLOT: Duration = Duration::from_secs(2);
/// Number of slots: five minutes.
pub const SLOTS: usize = 150;

#[derive(Debug)]
pub struct Timeline<T> {
    /// Start of the first slot. `None` before the first count.
    origin: Option<Instant>,
    /// Indexed by slot number modulo [`SLOTS`]; each has its number.
    slots: Vec<(u64, T)>,
}

impl<T> Default for Timeline<T> {
    fn default() -> Self {
        Self { origin: None, slots: Vec::new() }
    }
}

impl<T: Default> Timeline<T> {
    /// The slot of `now`, emptied if it has just started.
    pub fn at(&mut self, now: Instant) -> &mut T {
        let origin = *self.origin.get_or_insert(now);
        let number = number(origin, now);
        let index = (number % SLOTS as u64) as usize;
        if self.slots.len() <= index {
            // A number that never occurs, so that skipped slots match no time.
            self.slots.resize_with(index + 1, || (u64::MAX, T::default()));
        }
        let slot = &mut self.slots[index];
        if slot.0 != number {
            *slot = (number, T::default());
        }
        &mut slot.1
    }

    /// The last `count` slots at `now`, oldest first, each with the time since it began. Slots without counts
    /// are omitted.
    pub fn last(&self, now: Instant, count: usize) -> impl Iterator<Item = (Duration, &T)> {
        let present = self.origin.map(|origin| (origin, number(origin, now)));
        let count = count.min(SLOTS) as u64;
        present.into_iter().flat_map(move |(origin, present)| {
            let first = (present + 1).saturating_sub(count);
            (first..=present).filter_map(move |number| {
                let (found, value) = self.slots.get((number % SLOTS as u64) as usize)?;
                let began = origin + SLOT * u32::try_from(number).ok()?;
                (*found == number).then(|| (now.saturating_duration_since(began), value))
            })
        })
    }
}

fn number(origin: Instant, now: Instant) -> u64 {
    let slots = now.saturating_duration_since(origin).as_millis() / SLOT.as_millis();
    // 2^32 slots are 270 years.
    u64::try_from(slots).unwrap_or(u64::MAX).min(u32::MAX.into())
}

/// Buckets of a [`Sketch`].
const BUCKETS: usize = 64;
/// Lower bound of the first bucket, in seconds.
const MIN_SECONDS: f64 = 1e-4;
/// Buckets for each doubling of the duration.
const OCTAVE: f64 = 3.0;

/// A histogram of durations from 0.1 ms to 4 minutes. Each bucket is a quarter wider than the one before.
#[derive(Debug, Clone)]
pub struct Sketch {
    counts: [u32; BUCKETS],
}

impl Default for Sketch {
    fn default() -> Self {
        Self { counts: [0; BUCKETS] }
    }
}

impl Sketch {
    /// Adds `times` durations of this length.
    pub fn add(&mut self, took: Duration, times: u32) {
        let octaves = (took.as_secs_f64() / MIN_SECONDS).max(1.0).log2();
        let at = ((octaves * OCTAVE) as usize).min(BUCKETS - 1);
        self.counts[at] = self.counts[at].saturating_add(times);
    }

    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count = count.saturating_add(*more);
        }
    }

    pub fn count(&self) -> u64 {
        self.counts.iter().map(|count| u64::from(*count)).sum()
    }

    /// The quantile `share`, in seconds, with an error of at most an eighth. `None` without counts.
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let count = self.count();
        let rank = (share * count as f64).ceil().max(1.0);
        let mut below = 0.0;
        for (at, &count) in self.counts.iter().enumerate() {
            let here = f64::from(count);
            if here > 0.0 && below + here >= rank {
                let within = (rank - below) / here;
                return Some(MIN_SECONDS * ((at as f64 + within) / OCTAVE).exp2());
            }
            below += here;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_slots_are_reused() {
        let start = Instant::now();
        let after = |slots: u32| start + SLOT * slots + Duration::from_millis(1);
        let mut line = Timeline::<u32>::default();
        assert_eq!(line.last(start, SLOTS).count(), 0);
        *line.at(start) += 1;
        *line.at(after(0)) += 1;
        *line.at(after(3)) += 5;
        let seen: Vec<(u64, u32)> = line.last(after(4), SLOTS).map(|(ago, n)| (ago.as_secs(), *n)).collect();
        assert_eq!(seen, [(8, 2), (2, 5)], "what was not counted in is left out");
        assert_eq!(line.last(after(4), 2).count(), 1);
        *line.at(after(SLOTS as u32)) += 7;
        let seen: Vec<u32> = line.last(after(SLOTS as u32), SLOTS).map(|(_, n)| *n).collect();
        assert_eq!(seen, [5, 7], "the first slot's time has passed");
    }

    #[test]
    fn quantiles_are_within_an_eighth_of_the_exact_ones() {
        let mut sketch = Sketch::default();
        assert_eq!(sketch.quantile(0.5), None);
        (1..=1000).for_each(|ms| sketch.add(Duration::from_millis(ms), 1));
        for (share, expected) in [(0.5, 0.5), (0.95, 0.95), (0.99, 0.99), (1.0, 1.0)] {
            let found = sketch.quantile(share).unwrap();
            assert!((found / expected - 1.0_f64).abs() < 0.13, "{share}: {found}");
        }
        let mut both = Sketch::default();
        both.add(Duration::from_secs(3600), 3);
        both.add(Duration::ZERO, 1);
        both.merge(&sketch);
        assert_eq!(both.count(), 1004);
        assert!(both.quantile(0.0).unwrap() < 2e-4 && both.quantile(1.0).unwrap() > 200.0);
    }
}
