//! Finds the deepest known unit of a chain and walks up from there.

use super::{Tree, unit};
use crate::prefix_index::sets::{Lane, Set};
use crate::prefix_index::strand::Before;
use crate::prefix_index::units::UnitPosition;
use proto::block::BlockId;

impl Tree {
    /// Whether `lane` holds any unit on the path `chain`.
    pub(in crate::prefix_index) fn meets_path(&self, chain: &[BlockId], lane: Lane) -> bool {
        let mut met = false;
        self.walk(chain, |_, set| {
            met |= self.sets.contains(set, lane);
            !met
        });
        met
    }

    /// Visits the lanes of the segments of `chain`, deepest first, each with the number of units up to the
    /// segment's end, until `enough` returns `true`.
    #[inline]
    pub(in crate::prefix_index) fn lookup(
        &self,
        chain: &[BlockId],
        mut visit: impl FnMut(Lane, u32),
        enough: impl Fn() -> bool,
    ) {
        let mut last = Set::EMPTY;
        self.walk(chain, |units, set| {
            if set != last {
                last = set;
                self.sets.for_each(set, |lane| visit(lane, units));
            }
            !enough()
        });
    }

    /// Visits the segments of `chain` from its deepest known unit upward, each with the number of the chain's
    /// units up to its end, while `visit` returns `true`.
    #[inline]
    fn walk(&self, chain: &[BlockId], mut visit: impl FnMut(u32, Set) -> bool) {
        let mut end = chain.len();
        while let Some((last, strand, at)) = self.deepest(&chain[..end]) {
            let (mut last, mut strand, mut at) = (last, strand, at);
            loop {
                let here = &self.strands[strand];
                // Units of the chain before the strand's first.
                let above = last.saturating_sub(at as usize);
                let segments = here.segments();
                let mut index = segments.len() - 1;
                while index > 0 && segments[index - 1].end > at {
                    index -= 1;
                }
                for segment in segments[..=index].iter().rev() {
                    let below = (at + 1).saturating_sub(segment.end);
                    let units = (last as u32 + 1).saturating_sub(below);
                    if segment.set != Set::EMPTY && !visit(units, segment.set) {
                        return;
                    }
                }
                end = above;
                let Before::Strand { parent, at: behind } = here.before else { break };
                if above == 0 {
                    return;
                }
                (last, strand, at) = (above - 1, parent, behind - 1);
            }
        }
    }

    /// The strands of the known units of `chain`, deepest first, each with its number of units, and the total
    /// number of known units. `None` if no unit is known, or the path from the deepest one does not lead to a
    /// start.
    pub(super) fn known_path(&self, chain: &[BlockId]) -> Option<(Vec<UnitPosition>, usize)> {
        let (last, mut strand, at) = self.deepest(chain)?;
        let mut path = vec![(strand, at + 1)];
        let mut above = last.checked_sub(at as usize)?;
        while let Before::Strand { parent, at } = self.strands[strand].before {
            path.push((parent, at));
            above = above.checked_sub(at as usize)?;
            strand = parent;
        }
        let whole = above == 0 && matches!(self.strands[strand].before, Before::Start(_));
        whole.then_some((path, last + 1))
    }

    /// The deepest known unit of `chain`: its index in the chain, its strand, and its index in the strand.
    #[inline]
    pub(super) fn deepest(&self, chain: &[BlockId]) -> Option<(usize, u32, u32)> {
        let probe = |at: usize| self.units.find(chain.get(at)?).map(|(strand, offset)| (at, strand, offset));
        let last = chain.len().checked_sub(1)?;
        if !self.may_contain(chain) {
            return None;
        }
        let first = probe(0);
        if first.is_none() && self.loose == 0 {
            return None;
        }
        if let Some(found) = probe(last) {
            return Some(found);
        }
        if self.loose > 0 {
            return (0..last).rev().find_map(probe);
        }
        let (_, mut strand, mut at) = first?;
        // From the start downward: follow the strand as far as the chain does, then continue in the strand
        // that forks off there.
        let mut done = 0;
        loop {
            // The unit at `done` was found here.
            let followed = self.followed(strand, at, &chain[done..]).max(1);
            done += followed;
            at += followed as u32 - 1;
            let next = if self.strands[strand].forks_at(at + 1) { probe(done) } else { None };
            match next {
                Some((_, next, offset)) => (strand, at) = (next, offset),
                None => return Some((done - 1, strand, at)),
            }
        }
    }

    /// Number of units of `chain` that match the strand from `at` on. An id commits to all before it, so the
    /// last match can be found by a search.
    fn followed(&self, strand: u32, at: u32, chain: &[BlockId]) -> usize {
        let here = &self.strands[strand];
        let max = chain.len().min((here.len - at) as usize);
        let same = |ahead: usize| *self.units.id(unit(here, at + ahead as u32)) == chain[ahead];
        if max > 0 && same(max - 1) {
            return max;
        }
        // The first difference is in `low..=high`. The seven comparisons of a round are independent, so a
        // round takes hardly longer than one comparison.
        let (mut low, mut high) = (0, max.saturating_sub(1));
        while low < high {
            let step = (high - low).div_ceil(8);
            let ahead = |index: usize| (low + (index + 1) * step).min(high) - 1;
            let matched: usize = (0..7).map(|index| usize::from(same(ahead(index)))).sum();
            let end = if matched < 7 { ahead(matched) } else { high };
            low = matched.checked_sub(1).map_or(low, |last| ahead(last) + 1);
            high = end;
        }
        low
    }
}
