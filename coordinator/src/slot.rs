//! A worker's small number: the index that stands for it in arrays and the bit that stands for it in sets.

/// Workers that one coordinator can know at a time: a bound against nonsense, nothing is as large as it before
/// that many workers are there.
pub const MAX_SLOTS: usize = 4096;

/// A worker's number, smaller than [`MAX_SLOTS`]; free to be given to another worker once its own has left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(u16);

impl Slot {
    /// The slot with this number, if there is one.
    pub fn new(index: usize) -> Option<Self> {
        u16::try_from(index).ok().filter(|&i| usize::from(i) < MAX_SLOTS).map(Self)
    }

    /// Its number; always smaller than [`MAX_SLOTS`].
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// A set of slots, as long as its highest slot asks for.
#[derive(Debug, Clone, Default)]
pub struct SlotSet(Vec<u64>);

impl SlotSet {
    /// Whether `slot` is in it.
    pub fn contains(&self, slot: Slot) -> bool {
        self.0.get(slot.index() / 64).is_some_and(|word| word & bit(slot) != 0)
    }

    /// Puts `slot` in.
    pub fn insert(&mut self, slot: Slot) {
        let word = slot.index() / 64;
        if word >= self.0.len() {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= bit(slot);
    }

    /// Takes `slot` out.
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
    fn a_set_holds_what_was_put_in_and_not_taken_out() {
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
