//! A worker's small number: the bit that stands for it in sets and the index that stands for it in arrays.

/// Workers that one coordinator can know at a time.
pub const MAX_SLOTS: usize = 64;

/// A worker's number, smaller than [`MAX_SLOTS`]; free to be given to another worker once its own has left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(u8);

impl Slot {
    /// The slot with this number, if there is one.
    pub fn new(index: usize) -> Option<Self> {
        u8::try_from(index).ok().filter(|&i| usize::from(i) < MAX_SLOTS).map(Self)
    }

    /// Its number; always smaller than [`MAX_SLOTS`].
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// A set of slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SlotSet(u64);

impl SlotSet {
    /// No slot.
    pub const EMPTY: Self = Self(0);
    /// Every slot.
    pub const ALL: Self = Self(u64::MAX);

    /// Whether no slot is in it.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether `slot` is in it.
    pub fn contains(self, slot: Slot) -> bool {
        self.0 & bit(slot) != 0
    }

    /// Puts `slot` in.
    pub fn insert(&mut self, slot: Slot) {
        self.0 |= bit(slot);
    }

    /// Takes `slot` out.
    pub fn remove(&mut self, slot: Slot) {
        self.0 &= !bit(slot);
    }

    /// Its slots, lowest first.
    pub fn iter(self) -> impl Iterator<Item = Slot> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let index = rest.trailing_zeros();
            rest &= rest.wrapping_sub(1);
            Slot::new(index as usize)
        })
    }
}

fn bit(slot: Slot) -> u64 {
    1 << slot.0
}

impl std::ops::BitAnd for SlotSet {
    type Output = Self;
    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl std::ops::BitOr for SlotSet {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl std::ops::Sub for SlotSet {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_yields_its_slots_in_order() {
        let mut set = SlotSet::EMPTY;
        for index in [63, 0, 5] {
            set.insert(Slot::new(index).unwrap());
        }
        set.remove(Slot::new(5).unwrap());
        assert_eq!(set.iter().map(Slot::index).collect::<Vec<_>>(), [0, 63]);
        assert_eq!(SlotSet::ALL.iter().count(), MAX_SLOTS);
        assert_eq!(Slot::new(MAX_SLOTS), None);
    }
}
