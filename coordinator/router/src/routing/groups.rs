//! Groups of requests whose common prefix is being computed. The first request leads; the others are routed
//! to its worker.

use super::demand::CommonKey;
use crate::slot::Slot;
use std::collections::HashMap;

/// Slots of the leaders by group. The size is bounded by the number of requests that are being computed.
#[derive(Debug, Default)]
pub struct Groups {
    leaders: HashMap<CommonKey, Vec<Slot>>,
}

impl Groups {
    /// Whether a request of the group is being computed on `slot`.
    pub fn leads(&self, key: CommonKey, slot: Slot) -> bool {
        self.leaders.get(&key).is_some_and(|slots| slots.contains(&slot))
    }

    /// A request of the group was sent to `slot`.
    pub fn begin(&mut self, key: CommonKey, slot: Slot) {
        self.leaders.entry(key).or_default().push(slot);
    }

    /// The prompt of a request of the group has been computed, or was given up.
    pub fn end(&mut self, key: CommonKey, slot: Slot) {
        let Some(slots) = self.leaders.get_mut(&key) else { return };
        if let Some(at) = slots.iter().position(|other| *other == slot) {
            slots.swap_remove(at);
        }
        if slots.is_empty() {
            self.leaders.remove(&key);
        }
    }

    pub fn is_empty(&self) -> bool {
        self.leaders.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leader_leads_until_it_has_ended() {
        let (mut groups, key) = (Groups::default(), CommonKey([1; 16]));
        let (a, b) = (Slot::new(1).unwrap(), Slot::new(2).unwrap());
        [a, a, b].into_iter().for_each(|slot| groups.begin(key, slot));
        groups.end(key, a);
        assert!(groups.leads(key, a) && groups.leads(key, b));
        groups.end(key, a);
        assert!(!groups.leads(key, a) && groups.leads(key, b));
        groups.end(key, b);
        groups.end(key, b);
        assert!(groups.is_empty());
    }
}
