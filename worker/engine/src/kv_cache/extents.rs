//! Contiguous layout: allocates byte runs of the arena first-fit.

use super::table::OFFSET_UNIT;
use std::collections::BTreeMap;

/// Free runs of the arena: start to length, both in units of [`OFFSET_UNIT`].
#[derive(Debug)]
pub(super) struct Extents {
    free: BTreeMap<u32, u32>,
    total: u32,
}

impl Extents {
    pub(super) fn new(arena_bytes: u64) -> Self {
        // The size was checked: 32-bit offsets address the whole arena.
        let total = (arena_bytes / OFFSET_UNIT) as u32;
        Self { free: BTreeMap::from([(0, total)]), total }
    }

    pub(super) fn total_bytes(&self) -> u64 {
        u64::from(self.total) * OFFSET_UNIT
    }

    pub(super) fn used_bytes(&self) -> u64 {
        let free: u64 = self.free.values().map(|&len| u64::from(len)).sum();
        self.total_bytes() - free * OFFSET_UNIT
    }

    /// Takes `len` units from the first free run that is long enough.
    pub(super) fn take(&mut self, len: u64) -> Option<u32> {
        let len = u32::try_from(len).ok()?;
        let (&start, &room) = self.free.iter().find(|&(_, &room)| room >= len)?;
        self.free.remove(&start);
        if room > len {
            self.free.insert(start + len, room - len);
        }
        Some(start)
    }

    /// Frees a run and joins it to its free neighbours.
    pub(super) fn give(&mut self, start: u32, len: u32) {
        let (mut start, mut len) = (start, len);
        if let Some((&before, &before_len)) = self.free.range(..start).next_back()
            && before + before_len == start
        {
            self.free.remove(&before);
            (start, len) = (before, before_len + len);
        }
        if let Some(after_len) = self.free.remove(&(start + len)) {
            len += after_len;
        }
        self.free.insert(start, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_join_again_whatever_the_order_of_return() {
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut extents = Extents::new(64 * 30);
            let runs: Vec<u32> = (0..3).map(|_| extents.take(10).unwrap()).collect();
            assert_eq!(extents.take(1), None);
            assert_eq!(extents.used_bytes(), 64 * 30);
            for i in order {
                extents.give(runs[i], 10);
            }
            assert_eq!(extents.free, BTreeMap::from([(0, 30)]));
        }
    }
}
