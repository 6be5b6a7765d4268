//! Demand for prefixes: how much longer their requests wait at the holders than elsewhere, and for how long.
//! A burst that drains by itself does not count as lasting demand.

use super::{Reason, RoutingDecision, Standing};
use crate::slot::Slot;
use proto::ids::GroupId;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Half-life of accumulated regret.
const HALVES: Duration = Duration::from_secs(30);
/// A prefix without a request for this long is dropped.
const FORGOTTEN: Duration = Duration::from_secs(300);
/// Maximum of tracked prefixes, at about 64 bytes each.
const MAX_TRACKED: usize = 1 << 14;

/// Names what requests have in common: a prefix, or a request group that the client named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CommonKey(pub [u8; 16]);

impl CommonKey {
    pub fn of_group(tenant: &str, group: &GroupId) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("kvasir 2026-11 request group");
        hasher.update(&(tenant.len() as u64).to_le_bytes()).update(tenant.as_bytes());
        let hash = hasher.update(group.as_str().as_bytes()).finalize();
        let mut key = [0; 16];
        key.copy_from_slice(&hash.as_bytes()[..16]);
        Self(key)
    }
}

/// Demand by prefix, of bounded size. If a prefix is dropped, its next replica is only made somewhat later.
#[derive(Debug, Default)]
pub struct Demand {
    prefixes: HashMap<CommonKey, PrefixDemand>,
}

#[derive(Debug, Clone, Copy)]
struct PrefixDemand {
    standing: Standing,
    /// Extra wait of the last request in seconds. It shrinks by one second each second.
    excess: f64,
    at: Instant,
}

impl Demand {
    /// The demand for a prefix; `None` without a recent request.
    pub fn standing(&self, now: Instant, key: CommonKey) -> Option<Standing> {
        self.prefixes.get(&key).and_then(|demand| demand.decayed(now))
    }

    /// Records a placed request. `home` is the prefix's first holder; a changed `home` resets the regret.
    pub fn note(&mut self, now: Instant, key: CommonKey, home: Slot, choice: &RoutingDecision) {
        if self.prefixes.len() >= MAX_TRACKED && !self.prefixes.contains_key(&key) {
            self.forget(now);
        }
        let before = self.standing(now, key).filter(|standing| standing.home == home);
        let regret = match choice.reason {
            Reason::Replica => 0.0,
            _ => before.map_or(0.0, |standing| standing.regret),
        };
        self.prefixes.insert(
            key,
            PrefixDemand { standing: Standing { home, regret }, excess: choice.excess, at: now },
        );
    }

    pub fn len(&self) -> usize {
        self.prefixes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.prefixes.is_empty()
    }

    fn forget(&mut self, now: Instant) {
        let mut ages: Vec<Duration> =
            self.prefixes.values().map(|demand| now.saturating_duration_since(demand.at)).collect();
        let middle = ages.len() / 2;
        let (_, median, _) = ages.select_nth_unstable(middle);
        let median = *median;
        self.prefixes.retain(|_, demand| now.saturating_duration_since(demand.at) < median);
    }
}

impl PrefixDemand {
    fn decayed(&self, now: Instant) -> Option<Standing> {
        let age = now.saturating_duration_since(self.at);
        let lasted = age.as_secs_f64().min(self.excess);
        let since = lasted * (self.excess - lasted / 2.0);
        let regret = self.standing.regret * (-age.as_secs_f64() / HALVES.as_secs_f64()).exp2() + since;
        (age < FORGOTTEN).then_some(Standing { regret, ..self.standing })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(reason: Reason, excess: f64) -> RoutingDecision {
        RoutingDecision { slot: slot(0), reason, predicted: 1_024, cost: 1.0, excess }
    }

    fn slot(index: usize) -> Slot {
        Slot::new(index).unwrap()
    }

    #[test]
    fn regret_adds_up_decays_and_is_reset_by_a_replica() {
        let (mut demand, start) = (Demand::default(), Instant::now());
        let key = CommonKey([1; 16]);
        assert_eq!(demand.standing(start, key), None);
        let regret = |demand: &Demand, at| demand.standing(at, key).map(|s| s.regret);
        let about = |found: Option<f64>, expected: f64| (found.unwrap() - expected).abs() < 0.05;
        // Requests at the same instant are a burst and add no regret.
        (0..30).for_each(|_| demand.note(start, key, slot(0), &choice(Reason::Prefix, 2.0)));
        assert_eq!(regret(&demand, start), Some(0.0));
        // Two seconds of extra wait that shrink.
        let later = start + Duration::from_secs(1);
        assert!(about(regret(&demand, later), 1.5));
        // More requests keep the extra wait up.
        demand.note(later, key, slot(0), &choice(Reason::Prefix, 2.0));
        assert!(about(regret(&demand, later + Duration::from_secs(1)), 3.0));
        demand.note(later, key, slot(0), &choice(Reason::Prefix, 0.0));
        assert!(about(regret(&demand, later + HALVES), 0.75));
        assert_eq!(regret(&demand, later + FORGOTTEN), None);
        demand.note(later, key, slot(0), &choice(Reason::Replica, 0.0));
        assert_eq!(regret(&demand, later), Some(0.0));
        // A changed first holder resets the regret.
        demand.note(start, key, slot(0), &choice(Reason::Prefix, 2.0));
        demand.note(later, key, slot(1), &choice(Reason::Prefix, 1.0));
        assert_eq!(demand.standing(later, key), Some(Standing { home: slot(1), regret: 0.0 }));
    }

    #[test]
    fn tracked_prefixes_are_bounded() {
        let (mut demand, mut now) = (Demand::default(), Instant::now());
        for number in 0..2 * MAX_TRACKED as u128 {
            now += Duration::from_millis(1);
            demand.note(now, CommonKey(number.to_le_bytes()), slot(0), &choice(Reason::Prefix, 1.0));
            assert!(demand.len() <= MAX_TRACKED);
        }
        let last = 2 * MAX_TRACKED as u128 - 1;
        assert!(demand.standing(now, CommonKey(last.to_le_bytes())).is_some());
    }
}
