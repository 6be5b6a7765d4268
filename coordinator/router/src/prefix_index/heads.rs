//! A filter of ids that may be the first unit of a strand. It is checked before anything else, because most
//! prompts without a holder differ from all others in their first unit.

use proto::block::BlockId;

/// One counter of one byte for this many bytes of the index budget.
const SHARE: u64 = 256;
/// Minimum of counters.
const MIN_COUNTERS: u64 = 1 << 8;
/// Maximum of counters: more would not fit the processor's caches.
const MAX_COUNTERS: u64 = 1 << 22;

/// A counting filter with one hash. A saturated counter stays saturated, so that no id is ever missed.
#[derive(Debug)]
pub(super) struct Heads(Box<[u8]>);

impl Heads {
    /// For an index with a budget of `max_bytes`.
    pub(super) fn new(max_bytes: u64) -> Self {
        let counters = (max_bytes / SHARE).clamp(MIN_COUNTERS, MAX_COUNTERS).next_power_of_two();
        Self(vec![0; usize::try_from(counters).unwrap_or(usize::MAX)].into_boxed_slice())
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.len()
    }

    /// If `false`, no strand begins with this id.
    #[inline]
    pub(super) fn may_begin(&self, id: &BlockId) -> bool {
        self.0[self.index(id)] > 0
    }

    pub(super) fn add(&mut self, id: &BlockId) {
        let index = self.index(id);
        self.0[index] = self.0[index].saturating_add(1);
    }

    pub(super) fn remove(&mut self, id: &BlockId) {
        let index = self.index(id);
        let counter = &mut self.0[index];
        if *counter < u8::MAX {
            *counter = counter.saturating_sub(1);
        }
    }

    #[inline]
    fn index(&self, id: &BlockId) -> usize {
        let bits = u128::from_le_bytes(id.0);
        // Ids are outputs of a keyed hash; the multiplication also spreads the ids of tests.
        let folded = (bits as u64 ^ (bits >> 64) as u64).wrapping_mul(0xd6e8_feb8_6659_fd93);
        (folded >> 40) as usize & (self.0.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u32) -> BlockId {
        BlockId(*blake3::hash(&number.to_le_bytes()).as_bytes().first_chunk().unwrap())
    }

    #[test]
    fn added_ids_are_never_missed_and_removed_ones_mostly_forgotten() {
        let mut heads = Heads::new(0);
        assert_eq!(heads.bytes(), 256);
        // Enough ids to saturate counters.
        (0..200_000).for_each(|n| heads.add(&id(n)));
        (100..200_000).for_each(|n| heads.remove(&id(n)));
        assert!((0..100).all(|n| heads.may_begin(&id(n))));
        let mut heads = Heads::new(64 << 20);
        (0..10_000).for_each(|n| heads.add(&id(n)));
        let wrong = (10_000..20_000).filter(|n| heads.may_begin(&id(*n))).count();
        assert!(wrong < 1_000, "{wrong} of 10,000");
        (0..10_000).for_each(|n| heads.remove(&id(n)));
        assert!(!(0..20_000).any(|n| heads.may_begin(&id(n))));
    }
}
