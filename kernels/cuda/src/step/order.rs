//! Order of a step's rows by common keys and values, so that attention can read these once for several
//! rows.

use super::super::attention::{SAME, SPLIT};
use super::KvGroup;
use kernels::attention::Visible;
use kernels::backend::StepSequence;
use std::ops::Range;

/// Whether a sequence has more than one row. Attention launches such sequences apart from single rows.
pub(in super::super) fn has_several(sequence: &StepSequence) -> bool {
    sequence.rows.len() > 1
}

impl KvGroup {
    /// Appends the rows of a step to `order`, in attention's order. Appends to `common` the number of
    /// leading splits that each row shares with the one before it, or [`SAME`] for rows of one sequence.
    /// Consecutive single rows are sorted so that rows with the same first blocks are adjacent.
    ///
    /// `blocks` returns a range of the blocks of a sequence; its rows see all of them.
    pub(super) fn put_order<'a>(
        &self,
        sequences: &[StepSequence],
        blocks: impl Fn(usize, Range<usize>) -> &'a [u32],
        order: &mut Vec<u32>,
        common: &mut Vec<u32>,
    ) {
        let of_split = match self.visible {
            Visible::Causal => SPLIT / self.block_tokens,
            // Here, rows of several sequences see no whole split in common, or are whole texts.
            Visible::Window(_) | Visible::Whole | Visible::Around(_) => 0,
        };
        // Returns the blocks of a split, if the row sees all of it.
        let whole = |sequence: usize, split: usize| {
            let there = of_split > 0 && (split + 1) * SPLIT <= sequences[sequence].context + 1;
            there.then(|| blocks(sequence, split * of_split..(split + 1) * of_split))
        };
        let mut first = 0;
        for run in sequences.chunk_by(|a, b| has_several(a) == has_several(b)) {
            if has_several(&run[0]) {
                for sequence in run {
                    order.extend(sequence.rows.clone().map(|row| row as u32));
                    common.push(0);
                    common.extend(sequence.rows.clone().skip(1).map(|_| SAME));
                }
            } else {
                let rows =
                    (first..first + run.len()).filter(|sequence| !sequences[*sequence].rows.is_empty());
                let mut members: Vec<usize> = rows.collect();
                let start = common.len();
                common.resize(start + members.len(), 0);
                side_by_side(&mut members, &mut common[start..], whole);
                order.extend(members.iter().map(|sequence| sequences[*sequence].rows.start as u32));
            }
            first += run.len();
        }
    }
}

/// Sorts `members` by their splits, from the first split on. Writes to `common` the number of splits that
/// each member shares with the one before it.
fn side_by_side<'a>(
    members: &mut [usize],
    common: &mut [u32],
    whole: impl Fn(usize, usize) -> Option<&'a [u32]>,
) {
    // Ranges of members that share all splits before the given one.
    let mut ranges = vec![(0..members.len(), 0)];
    while let Some((range, split)) = ranges.pop() {
        let members = &mut members[range.clone()];
        members.sort_by_key(|member| whole(*member, split));
        let mut at = range.start;
        let same = |a: &usize, b: &usize| {
            let (a, b) = (whole(*a, split), whole(*b, split));
            a.is_some() && a == b
        };
        for run in members.chunk_by(same) {
            if at > range.start {
                common[at] = split as u32;
            }
            if run.len() > 1 {
                ranges.push((at..at + run.len(), split + 1));
            }
            at += run.len();
        }
    }
}
