//! Checks of a step's block tables, so that kernels need not check them.

use kernels::Error;
use kernels::attention::{BlockTable, OFFSET_UNIT, Visible};
use kernels::backend::StepSequence;
use std::ops::Range;

/// Layers whose keys and values are in the same blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvGroup {
    pub block_tokens: usize,
    /// Bytes of a block, all layers together.
    pub bytes: usize,
    /// The widest visibility of the group's layers.
    pub visible: Visible,
}

impl KvGroup {
    /// Checks that every block that a row sees exists and lies inside the arena, and that no two rows write
    /// to one position.
    pub(super) fn check(
        &self,
        sequences: &[StepSequence],
        placements: &[BlockTable<'_>],
        arena_bytes: usize,
    ) -> Result<(), Error> {
        if placements.len() < sequences.len() {
            let (expected, found) = (sequences.len(), placements.len());
            return Err(Error::Length { what: "block tables of a group", expected, found });
        }
        let mut written: Vec<(u64, Range<usize>)> = Vec::new();
        for (index, (sequence, placement)) in sequences.iter().zip(placements).enumerate() {
            let (context, end) = (sequence.context, sequence.context + sequence.rows.len());
            if end == context {
                continue;
            }
            let first = match self.visible {
                Visible::Causal => 0,
                Visible::Window(window) => (context + 1).saturating_sub(window.get() as usize),
                Visible::Whole | Visible::Around(_) if context == 0 => 0,
                Visible::Whole | Visible::Around(_) => {
                    return Err(Error::PartialSequence { sequence: index, position: 0 });
                }
            };
            for block in first / self.block_tokens..end.div_ceil(self.block_tokens) {
                let missing = Error::MissingBlock { sequence: index, block };
                let offset = placement.byte(block).ok_or(missing)?;
                let block_end = offset.saturating_add(self.bytes as u64);
                // Kernels store block offsets in 32 bits.
                if block_end > arena_bytes as u64 || offset / OFFSET_UNIT as u64 > u64::from(u32::MAX) {
                    return Err(Error::OutsideArena { end: block_end, len: arena_bytes });
                }
                let start = block * self.block_tokens;
                let positions = context.max(start) - start..end.min(start + self.block_tokens) - start;
                if !positions.is_empty() {
                    written.push((offset, positions));
                }
            }
        }
        self.check_written(&mut written)
    }

    /// `written`: offsets of blocks, and the positions in them that get keys and values.
    fn check_written(&self, written: &mut [(u64, Range<usize>)]) -> Result<(), Error> {
        written.sort_unstable_by_key(|(offset, positions)| (*offset, positions.start));
        let clash = written.windows(2).find(|pair| {
            let apart = pair[1].0 - pair[0].0;
            if apart == 0 { pair[1].1.start < pair[0].1.end } else { apart < self.bytes as u64 }
        });
        match clash {
            Some(pair) => Err(Error::OverlappingWrites { offset: pair[1].0 }),
            None => Ok(()),
        }
    }
}
