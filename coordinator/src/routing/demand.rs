//! How much prefixes are in demand: how long their requests wait at their holders, beyond what they would elsewhere,
//! and for how long that has been so. A burst that drains by itself is no demand that lasts.

use super::{Reason, RoutingDecision, Standing};
use crate::slot::Slot;
use proto::ids::GroupId;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// A wait counts half after this long.
const HALVES: Duration = Duration::from_secs(30);
/// A prefix that nobody has asked for this long is forgotten.
const FORGOTTEN: Duration = Duration::from_secs(300);
/// Prefixes that are known, at about 64 bytes each.
const MAX_KNOWN: usize = 1 << 14;

/// Names what requests have in common: a prefix, or the group that they say to be of.
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

/// What is known of prefixes. Bounded; what is forgotten costs a second holder some waits more.
#[derive(Debug, Default)]
pub struct Demand {
    known: HashMap<CommonKey, PrefixDemand>,
}

#[derive(Debug, Clone, Copy)]
struct PrefixDemand {
    standing: Standing,
    /// Of the last request, beyond what it would have waited elsewhere, in seconds; less by a second each second.
    excess: f64,
    at: Instant,
}

impl Demand {
    /// Of one prefix, if it was asked for lately.
    pub fn standing(&self, now: Instant, key: CommonKey) -> Option<Standing> {
        self.known.get(&key).and_then(|known| known.decayed(now))
    }

    /// A request with the prefix has been placed. `home`: where it is held first, if the one that was known holds
    /// it no more.
    pub fn note(&mut self, now: Instant, key: CommonKey, home: Slot, choice: &RoutingDecision) {
        if self.known.len() >= MAX_KNOWN && !self.known.contains_key(&key) {
            self.forget(now);
        }
        let before = self.standing(now, key).filter(|standing| standing.home == home);
        let regret = match choice.reason {
            Reason::Replica => 0.0,
            _ => before.map_or(0.0, |standing| standing.regret),
        };
        self.known.insert(
            key,
            PrefixDemand { standing: Standing { home, regret }, excess: choice.excess, at: now },
        );
    }

    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// Whether none is known.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    fn forget(&mut self, now: Instant) {
        let mut ages: Vec<Duration> =
            self.known.values().map(|known| now.saturating_duration_since(known.at)).collect();
        let middle = ages.len() / 2;
        let (_, median, _) = ages.select_nth_unstable(middle);
        let median = *median;
        self.known.retain(|_, known| now.saturating_duration_since(known.at) < median);
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
    fn waits_add_up_fade_and_are_settled_by_a_replica() {
        let (mut demand, start) = (Demand::default(), Instant::now());
        let key = CommonKey([1; 16]);
        assert_eq!(demand.standing(start, key), None);
        let regret = |demand: &Demand, at| demand.standing(at, key).map(|s| s.regret);
        let about = |found: Option<f64>, expected: f64| (found.unwrap() - expected).abs() < 0.05;
        // Many at one moment are a burst.
        (0..30).for_each(|_| demand.note(start, key, slot(0), &choice(Reason::Prefix, 2.0)));
        assert_eq!(regret(&demand, start), Some(0.0));
        // Two seconds that become less.
        let later = start + Duration::from_secs(1);
        assert!(about(regret(&demand, later), 1.5));
        // And that do not, because more come.
        demand.note(later, key, slot(0), &choice(Reason::Prefix, 2.0));
        assert!(about(regret(&demand, later + Duration::from_secs(1)), 3.0));
        demand.note(later, key, slot(0), &choice(Reason::Prefix, 0.0));
        assert!(about(regret(&demand, later + HALVES), 0.75));
        assert_eq!(regret(&demand, later + FORGOTTEN), None);
        demand.note(later, key, slot(0), &choice(Reason::Replica, 0.0));
        assert_eq!(regret(&demand, later), Some(0.0));
        // Where it is held first has changed: it begins anew.
        demand.note(start, key, slot(0), &choice(Reason::Prefix, 2.0));
        demand.note(later, key, slot(1), &choice(Reason::Prefix, 1.0));
        assert_eq!(demand.standing(later, key), Some(Standing { home: slot(1), regret: 0.0 }));
    }

    #[test]
    fn no_more_are_known_than_there_is_room_for() {
        let (mut demand, mut now) = (Demand::default(), Instant::now());
        for number in 0..2 * MAX_KNOWN as u128 {
            now += Duration::from_millis(1);
            demand.note(now, CommonKey(number.to_le_bytes()), slot(0), &choice(Reason::Prefix, 1.0));
            assert!(demand.len() <= MAX_KNOWN);
        }
        let last = 2 * MAX_KNOWN as u128 - 1;
        assert!(demand.standing(now, CommonKey(last.to_le_bytes())).is_some());
    }
}
