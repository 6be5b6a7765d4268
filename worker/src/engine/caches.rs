//! Where the bytes of blocks lie: in the arena of the only worker, or in parts at the stages of a replica. Whoever saves
//! them, brings them back or lends them need not know.

use crate::Error;
use crate::decoder::{Blocks, LayerState};
use crate::pipeline::PipelineExecutor;

/// See the module. Blocks are given by group and offset as the scheduler counts them.
pub(super) struct Caches<'a> {
    own: Blocks<'a>,
    later: Option<&'a mut PipelineExecutor>,
}

impl<'a> Caches<'a> {
    /// Blocks of this worker, and of the stages behind it where it has not all layers.
    pub(super) fn new(own: Blocks<'a>, later: Option<&'a mut PipelineExecutor>) -> Self {
        Self { own, later }
    }

    /// Bytes of a block, or of a state.
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

    /// Fills blocks with what [`Caches::read`] gave, here or at another worker of the same origin.
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
