//! How often models are used, older requests counting less.

use proto::ids::ModelId;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Time after which a request counts half.
const HALF_LIFE: Duration = Duration::from_secs(600);

/// Decaying counts of requests.
#[derive(Debug, Default)]
pub struct Uses {
    /// Per model: the total at the last count, the decayed count, and its time.
    models: HashMap<ModelId, (u64, f64, Instant)>,
}

fn decay(since: Duration) -> f64 {
    (-since.as_secs_f64() / HALF_LIFE.as_secs_f64()).exp2()
}

impl Uses {
    /// Takes the totals of requests so far. A smaller total than before begins anew.
    pub fn count(&mut self, now: Instant, totals: impl IntoIterator<Item = (ModelId, u64)>) {
        for (model, total) in totals {
            let (last, count, at) = self.models.entry(model).or_insert((0, 0.0, now));
            let new = total.checked_sub(*last).unwrap_or(total);
            *count = *count * decay(now.saturating_duration_since(*at)) + new as f64;
            (*last, *at) = (total, now);
        }
    }

    /// Forgets models whose totals begin anew if they come back.
    pub fn retain(&mut self, is_known: impl Fn(&ModelId) -> bool) {
        self.models.retain(|model, _| is_known(model));
    }

    pub fn of(&self, now: Instant, model: &ModelId) -> f64 {
        let count = |(_, count, at): &(u64, f64, Instant)| count * decay(now.saturating_duration_since(*at));
        self.models.get(model).map_or(0.0, count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_counts_half_after_the_half_life_and_a_restarted_count_begins_anew() {
        let (mut uses, start) = (Uses::default(), Instant::now());
        let model = ModelId::new("m").unwrap();
        uses.count(start, [(model.clone(), 8)]);
        assert_eq!(uses.of(start, &model), 8.0);
        let later = start + HALF_LIFE;
        uses.count(later, [(model.clone(), 9)]);
        assert!((uses.of(later, &model) - 5.0).abs() < 1e-9);
        uses.count(later, [(model.clone(), 2)]);
        assert!((uses.of(later, &model) - 7.0).abs() < 1e-9, "the coordinator's counters began at 0");
        let much_later = later + HALF_LIFE * 20;
        uses.count(much_later, [(model.clone(), 2)]);
        assert!(uses.of(much_later, &model) < 1e-3, "old requests do not count again");
        uses.retain(|_| false);
        assert_eq!(uses.of(later, &model), 0.0);
    }
}
