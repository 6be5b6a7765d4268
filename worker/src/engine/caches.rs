//! Uniform access to block bytes, which are in the arena of a single worker or in parts at the stages of a
//! replica. Code that saves, restores or sends blocks need not distinguish the two.

use crate::Error;
use crate::decoder::{Blocks, LayerState};
use crate::pipeline::PipelineExecutor;

/// Read and write access to blocks, which are addressed by the scheduler's group and offset.
pub(super) struct Caches<'a> {
    own: Blocks<'a>,
    later: Option<&'a mut PipelineExecutor>,
}

impl<'a> Caches<'a> {
    /// Access to the blocks of this worker, and of the later stages if it does not have all layers.
    pub(super) fn new(own: Blocks<'a>, later: Option<&'a mut PipelineExecutor>) -> Self {
        Self { own, later }
    }

    /// Bytes of a block or of a recurrent state.
    pub(super) fn block_bytes(&self, group: usize) -> usize {
        match &self.later {
            None => self.own.groups().get(group).map_or(0, |group| group.block_bytes),
            Some(later) => later.block_bytes(group),
        }
    }

    pub(super) fn read(&mut self, blocks: &[(usize, u32)]) -> Result<Vec<Vec<u8>>, Error> {
        match &mut self.later {
            None => blocks.iter().map(|(group, offset)| self.own.read(*group, *offset)).collect(),
            Some(later) => later.read_blocks(self.own.again(), blocks),
        }
    }

    /// Fills blocks with bytes from [`Caches::read`], of this worker or of another one of the same origin.
    pub(super) fn write(&mut self, pieces: &[(usize, u32, &[u8])]) -> Result<(), Error> {
        match &mut self.later {
            None => {
                pieces.iter().try_for_each(|(group, offset, bytes)| self.own.write(*group, *offset, bytes))
            }
            Some(later) => later.write_blocks(self.own.again(), pieces),
        }
    }

    /// The recurrent states of all layers in a slot.
    pub(super) fn states(&mut self, slot: u32) -> Result<Vec<LayerState>, Error> {
        match &mut self.later {
            None => self.own.states(slot),
            Some(later) => later.read_states(self.own.again(), slot),
        }
    }
}
