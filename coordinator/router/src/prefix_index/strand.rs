//! A strand: consecutive units of one path, divided into segments of equal holders.

use super::sets::{Set, Sets};
use proto::block::BlockId;

pub(super) const NONE: u32 = u32::MAX;

/// The unit or root before a strand's first unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Before {
    /// Only a root, if it is known: the strand's first unit is the first of a prompt.
    Start(Option<BlockId>),
    /// The first `at` units of another strand.
    Strand {
        parent: u32,
        /// Number of the parent's units.
        at: u32,
    },
    /// A unit that is not in the index, or an undeclared root.
    After(BlockId),
    Unknown,
}

impl Before {
    /// Whether the path above the strand is unknown.
    pub(super) fn is_loose(self) -> bool {
        matches!(self, Self::After(_) | Self::Unknown)
    }
}

/// A run of units with equal holders: from the end of the previous segment up to `end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) end: u32,
    pub(super) set: Set,
}

/// Most strands have one segment; it is stored inline to save a memory access.
#[derive(Debug, Clone)]
enum Segments {
    One(Segment),
    Many(Vec<Segment>),
}

/// Lookups read only the first cache line.
#[derive(Debug, Clone)]
#[repr(C, align(64))]
pub(super) struct Strand {
    pub(super) before: Before,
    /// Number of units; 0 in a free strand.
    pub(super) len: u32,
    segments: Segments,
    pub(super) chunks: Vec<u32>,
    /// Forks as (units before the fork, number of strands there), ascending.
    forks: Vec<(u32, u32)>,
}

impl Strand {
    pub(super) fn new(before: Before) -> Self {
        let segments = Segments::One(Segment { end: 0, set: Set::EMPTY });
        Self { before, len: 0, segments, chunks: Vec::new(), forks: Vec::new() }
    }

    /// Ascending; the last segment ends with the strand.
    #[inline]
    pub(super) fn segments(&self) -> &[Segment] {
        match &self.segments {
            Segments::One(one) => std::slice::from_ref(one),
            Segments::Many(many) => many,
        }
    }

    /// Heap bytes of the strand.
    pub(super) fn heap(&self) -> usize {
        let segments = match &self.segments {
            Segments::One(_) => 0,
            Segments::Many(many) => many.capacity() * size_of::<Segment>(),
        };
        segments + self.chunks.capacity() * size_of::<u32>() + self.forks.capacity() * size_of::<(u32, u32)>()
    }

    /// Upper bound of the bytes allocated by a change of segments, one more chunk and one more fork.
    pub(super) fn growth(&self) -> usize {
        let twice = |len: usize| (len * 2 + 8) * size_of::<Segment>();
        2 * twice(self.segments().len()) + twice(self.chunks.len()) + twice(self.forks.len())
    }

    /// Extends the strand to `len` units. The new units have the holders `set`, whose reference is consumed.
    pub(super) fn extend(&mut self, len: u32, set: Set, sets: &mut Sets) {
        self.len = len;
        let added = Segment { end: len, set };
        match &mut self.segments {
            Segments::One(one) if one.end == 0 => *one = added,
            Segments::One(one) if one.set == set => {
                one.end = len;
                sets.release(set);
            }
            Segments::One(one) => self.segments = Segments::Many(vec![*one, added]),
            Segments::Many(many) => match many.last_mut() {
                Some(last) if last.set == set => {
                    last.end = len;
                    sets.release(set);
                }
                _ => many.push(added),
            },
        }
    }

    /// Replaces the holders of the units `from..until` by what `change` returns for them (acquired).
    pub(super) fn change(
        &mut self,
        from: u32,
        until: u32,
        sets: &mut Sets,
        mut change: impl FnMut(Set, &mut Sets) -> Set,
    ) {
        if let Segments::One(one) = &mut self.segments
            && from == 0
            && until >= one.end
        {
            let new = change(one.set, sets);
            sets.release(std::mem::replace(&mut one.set, new));
            return;
        }
        let mut changed: Vec<Segment> = Vec::with_capacity(self.segments().len() + 2);
        let mut push = |end: u32, set: Set, sets: &mut Sets| match changed.last_mut() {
            Some(last) if last.set == set => {
                last.end = end;
                sets.release(set);
            }
            _ => changed.push(Segment { end, set }),
        };
        let mut start = 0;
        for &Segment { end, set } in self.segments() {
            if start < from {
                push(end.min(from), sets.acquire(set), sets);
            }
            let (low, high) = (start.max(from), end.min(until));
            if low < high {
                let new = change(set, sets);
                push(high, new, sets);
            }
            if start.max(until) < end {
                push(end, sets.acquire(set), sets);
            }
            start = end;
        }
        self.segments().iter().for_each(|segment| sets.release(segment.set));
        self.segments = match changed[..] {
            [one] => Segments::One(one),
            _ => {
                changed.shrink_to_fit();
                Segments::Many(changed)
            }
        };
    }

    /// Number of units to keep: up to the last one that is held or has a fork behind it.
    pub(super) fn needed(&self) -> u32 {
        let forked = self.forks.last().map_or(0, |&(at, _)| at);
        let held = match self.segments() {
            [.., before, last] if last.set == Set::EMPTY => before.end,
            [.., last] if last.set != Set::EMPTY => last.end,
            _ => 0,
        };
        forked.max(held)
    }

    /// Keeps the first `len` units; the others must have no holders.
    pub(super) fn truncate(&mut self, len: u32) {
        self.len = len;
        match &mut self.segments {
            Segments::One(one) => one.end = len,
            Segments::Many(many) => {
                many.retain(|segment| segment.set != Set::EMPTY || segment.end < len);
                if many.last().is_none_or(|last| last.end < len) {
                    many.push(Segment { end: len, set: Set::EMPTY });
                }
                if let [one] = many[..] {
                    self.segments = Segments::One(one);
                }
            }
        }
        if self.forks.is_empty() {
            self.forks = Vec::new();
        }
    }

    /// Whether another strand forks off after the first `at` units.
    pub(super) fn forks_at(&self, at: u32) -> bool {
        self.forks.binary_search_by_key(&at, |&(at, _)| at).is_ok()
    }

    pub(super) fn add_fork(&mut self, at: u32) {
        match self.forks.binary_search_by_key(&at, |&(at, _)| at) {
            Ok(found) => self.forks[found].1 += 1,
            Err(index) => self.forks.insert(index, (at, 1)),
        }
    }

    pub(super) fn drop_fork(&mut self, at: u32) {
        if let Ok(found) = self.forks.binary_search_by_key(&at, |&(at, _)| at) {
            self.forks[found].1 -= 1;
            if self.forks[found].1 == 0 {
                self.forks.remove(found);
            }
        }
    }
}
