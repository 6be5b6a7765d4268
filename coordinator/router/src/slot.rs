//! Slots: small worker numbers, used as indices of arrays and as bits of sets.

/// Maximum of workers of one coordinator. A sanity limit: tables grow with the slots in use.
pub const MAX_SLOTS: usize = 4096;

/// A worker's number, less than [`MAX_SLOTS`]. It is reused after its worker has left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(u16);

impl Slot {
    /// The slot with this number; `None` if it is too large.
    pub fn new(index: usize) -> Option<Self> {
        u16::try_from(index).ok().filter(|&i| usize::from(i) < MAX_SLOTS).map(Self)
    }

    /// The number; always less than [`MAX_SLOTS`].
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// A set of slots as a bit set that grows to the highest slot.
#[derive(Debug, Clone, Default)]
pub struct SlotSet(Vec<u64>);

impl SlotSet {
    pub fn contains(&self, slot: Slot) -> bool {
        self.0.get(slot.index() / 64).is_some_and(|word| word & bit(slot) != 0)
    }

    pub fn insert(&mut self, slot: Slot) {
        let word = slot.index() / 64;
        if word >= self.0.len() {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= bit(slot);
    }

    pub fn remove(&mut self, slot: Slot) {
        if let Some(word) = self.0.get_mut(slot.index() / 64) {
            *word &= !bit(slot);
        }
    }
}

fn bit(slot: Slot) -> u64 {
    1 << (slot.index() % 64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_holds_inserted_and_not_removed_slots() {
        let mut set = SlotSet::default();
        for index in [4095, 0, 64, 5] {
            set.insert(Slot::new(index).unwrap());
        }
        set.remove(Slot::new(5).unwrap());
        let held: Vec<_> =
            (0..MAX_SLOTS).filter_map(Slot::new).filter(|&s| set.contains(s)).map(Slot::index).collect();
        assert_eq!(held, [0, 64, 4095]);
        assert_eq!(Slot::new(MAX_SLOTS), None);
    }
}
