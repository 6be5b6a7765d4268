//! Decides where recurrent states are kept as checkpoints and which checkpoint is evicted first. Pure
//! functions: positions in, decisions out.
//!
//! Every checkpoint occupies a slot. A prefix without one is recomputed from the checkpoint before it. So
//! only a few are kept, where prompts are likely to diverge: at prompt ends, between turns, at observed
//! junctions, and at distances that double, which bounds the loss to half of the shared tokens.

use proto::block::HASH_UNIT_TOKENS;

/// Why a recurrent state is kept. Variants are ordered by increasing value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CheckpointKind {
    /// The last boundary that a sequence passed while it decoded. The next one replaces it.
    Tail,
    /// A distance from the start: 16, 32, 48, 64, 96, 128, 192, ... tokens.
    Spacing,
    /// A boundary that the request named, such as the end of a chat turn.
    Turn,
    /// The last boundary before the end of a prompt. The same prompt can resume there.
    PromptEnd,
    Junction,
}

/// A checkpoint on the way from a root to a sequence's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Checkpoint {
    pub(crate) unit: u32,
    pub(crate) kind: CheckpointKind,
    /// In use: it cannot be evicted now.
    pub(crate) fixed: bool,
}

/// How many states are kept, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckpointPolicy {
    /// Maximum number of checkpoints between a root and a sequence's end. 0 keeps none.
    pub max_per_path: usize,
}

impl Default for CheckpointPolicy {
    fn default() -> Self {
        Self { max_per_path: 8 }
    }
}

impl CheckpointPolicy {
    /// Checkpoints of a prompt in ascending order: (units before it, kind). `boundaries` are positions in
    /// tokens; each is rounded down to a unit boundary.
    pub(crate) fn of_prompt(self, prompt_len: u32, boundaries: &[u32]) -> Vec<(u32, CheckpointKind)> {
        let unit = HASH_UNIT_TOKENS as u32;
        let (end, last) = (prompt_len / unit, prompt_len.saturating_sub(1) / unit);
        let mut path: Vec<Checkpoint> = Vec::new();
        let mut add = |unit, kind| match path.binary_search_by_key(&unit, |point| point.unit) {
            Ok(at) => path[at].kind = path[at].kind.max(kind),
            Err(at) => path.insert(at, Checkpoint { unit, kind, fixed: false }),
        };
        let mut spaced = 1;
        while spaced < last {
            add(spaced, CheckpointKind::Spacing);
            spaced = next_spaced(spaced);
        }
        // The last turns only: `excess` would remove earlier ones.
        for &boundary in boundaries.iter().rev().filter(|&&b| b <= prompt_len).take(2 * self.max_per_path) {
            add((boundary / unit).min(end), CheckpointKind::Turn);
        }
        add(last, CheckpointKind::PromptEnd);
        path.retain(|point| point.unit > 0);
        while let Some(at) = self.excess(&path) {
            path.remove(at);
        }
        path.iter().map(|point| (point.unit, point.kind)).collect()
    }

    /// Kind of the checkpoint after `unit` units, for a unit beyond the prompt.
    pub(crate) fn of_output(self, unit: u32) -> CheckpointKind {
        if is_spaced(unit) { CheckpointKind::Spacing } else { CheckpointKind::Tail }
    }

    /// Index of the checkpoint to evict if the ascending `path` has too many: the one whose loss costs the
    /// least recomputation. Junctions, the newest prompt end and the deepest checkpoint go last. Returns
    /// `None` if the path is short enough or all checkpoints are in use.
    pub(crate) fn excess(self, path: &[Checkpoint]) -> Option<usize> {
        if path.len() <= self.max_per_path {
            return None;
        }
        let newest_end = path.iter().rposition(|point| point.kind == CheckpointKind::PromptEnd);
        (0..path.len()).filter(|&at| !path[at].fixed).min_by_key(|&at| {
            let newest = Some(at) == newest_end || at + 1 == path.len();
            let protected = newest || path[at].kind == CheckpointKind::Junction;
            (protected, loss(path, at))
        })
    }
}

/// How much likelier prompts diverge at the end of a turn than elsewhere. Estimate.
const TURN_WEIGHT: u64 = 8;

/// Cost of losing a checkpoint: the units back to the previous one, times the likelihood that a prompt
/// diverges between it and the next one. A prompt is assumed to diverge with equal probability in [n, 2n) for
/// every n, except at turns, which have a higher weight.
fn loss(path: &[Checkpoint], at: usize) -> u64 {
    let unit = u64::from(path[at].unit);
    let before = at.checked_sub(1).map_or(0, |at| u64::from(path[at].unit));
    let after = path.get(at + 1).map_or(2 * unit, |next| u64::from(next.unit));
    let weight = if path[at].kind == CheckpointKind::Turn { TURN_WEIGHT } else { 1 };
    weight * (unit - before) * (after - unit) * 1024 / unit.max(1)
}

/// Whether the distance is 2^k or 3 * 2^k units.
fn is_spaced(unit: u32) -> bool {
    unit > 0 && matches!(unit >> unit.trailing_zeros(), 1 | 3)
}

fn next_spaced(unit: u32) -> u32 {
    let next = if unit.is_power_of_two() { unit / 2 * 3 } else { unit / 3 * 4 };
    next.max(unit + 1)
}

#[cfg(test)]
mod tests {
    use super::CheckpointKind::*;
    use super::*;

    fn checkpoints(max_per_path: usize, prompt_len: u32, boundaries: &[u32]) -> Vec<(u32, CheckpointKind)> {
        CheckpointPolicy { max_per_path }.of_prompt(prompt_len, boundaries)
    }

    #[test]
    fn prompts_keep_their_ends_turns_and_distances_that_double() {
        let spaced = |units: &[u32]| units.iter().map(|&unit| (unit, Spacing)).collect::<Vec<_>>();
        for (prompt_len, boundaries, expected) in [
            (1, &[][..], vec![]),
            (16, &[], vec![]),
            (17, &[], vec![(1, PromptEnd)]),
            // The last token is always computed, so the same prompt cannot use the unit that ends with it.
            (32, &[], vec![(1, PromptEnd)]),
            (33, &[], vec![(1, Spacing), (2, PromptEnd)]),
            (130, &[], [spaced(&[1, 2, 3, 4, 6]), vec![(8, PromptEnd)]].concat()),
            (130, &[100], [spaced(&[1, 2, 3, 4]), vec![(6, Turn), (8, PromptEnd)]].concat()),
            // A boundary at the very end is where a longer prompt continues.
            (96, &[96], [spaced(&[1, 2, 3, 4]), vec![(5, PromptEnd), (6, Turn)]].concat()),
            (40, &[15, 41, 4000], vec![(1, Spacing), (2, PromptEnd)]),
        ] {
            assert_eq!(checkpoints(100, prompt_len, boundaries), expected, "{prompt_len} {boundaries:?}");
        }
    }

    #[test]
    fn distances_are_powers_of_two_and_halves_between() {
        let mut units = vec![1];
        while units.len() < 12 {
            units.push(next_spaced(units[units.len() - 1]));
        }
        assert_eq!(units, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]);
        assert_eq!((1..=64).filter(|&unit| is_spaced(unit)).collect::<Vec<_>>(), units);
        assert!(!is_spaced(0));
        let policy = CheckpointPolicy::default();
        assert_eq!([policy.of_output(95), policy.of_output(96)], [Tail, Spacing]);
    }

    #[test]
    fn long_prompts_keep_no_more_than_the_cap() {
        assert_eq!(checkpoints(0, 1000, &[500]), []);
        assert_eq!(checkpoints(1, 1000, &[500]), [(62, PromptEnd)]);
        assert_eq!(checkpoints(2, 1000, &[500]), [(31, Turn), (62, PromptEnd)]);
        let units: Vec<u32> = checkpoints(8, 32 << 10, &[]).into_iter().map(|(unit, _)| unit).collect();
        assert_eq!(units.len(), 8);
        // The remaining checkpoints still cover all orders of magnitude below the longest half.
        assert!(units.windows(2).all(|pair| pair[1] <= 4 * pair[0]), "{units:?}");
        let turns: Vec<u32> = (0..1000).map(|turn| turn * 30).collect();
        assert_eq!(checkpoints(8, 30_000, &turns).len(), 8);
    }

    #[test]
    fn the_cheapest_loss_is_evicted_first_and_junctions_last() {
        let policy = CheckpointPolicy { max_per_path: 3 };
        let path = |points: &[(u32, CheckpointKind, bool)]| {
            let points: Vec<Checkpoint> =
                points.iter().map(|&(unit, kind, fixed)| Checkpoint { unit, kind, fixed }).collect();
            policy.excess(&points)
        };
        let free = |unit, kind| (unit, kind, false);
        assert_eq!(path(&[free(4, Spacing), free(8, Spacing), free(9, Tail)]), None);
        for (points, expected) in [
            ([free(4, Spacing), free(30, Spacing), free(32, Turn), free(60, PromptEnd)], Some(1)),
            ([free(4, Spacing), free(30, Junction), free(32, Turn), free(60, PromptEnd)], Some(2)),
            ([free(30, PromptEnd), free(31, PromptEnd), free(60, Tail), free(90, Tail)], Some(0)),
            ([free(30, Junction), free(60, Junction), free(63, PromptEnd), free(70, Tail)], Some(2)),
            ([free(30, Junction), free(60, PromptEnd), free(63, Tail), free(66, Spacing)], Some(2)),
            ([free(1, Junction), free(2, Junction), free(40, Junction), free(90, PromptEnd)], Some(0)),
            ([free(4, Spacing), (30, Spacing, true), free(32, Turn), free(60, PromptEnd)], Some(2)),
            ([(4, Tail, true), (30, Tail, true), (32, Tail, true), (60, Tail, true)], None),
        ] {
            assert_eq!(path(&points), expected, "{points:?}");
        }
    }
}
