//! Sequences on their way out: so many bytes between two steps, since a sequence may be long and lie at other workers.
//! Nothing is held for it. What has been copied stays right, whatever becomes of its block; if the end is evicted
//! meanwhile, the sequence is saved as far as it is still there.

use super::{Capture, Reply, savable};
use crate::engine::Engine;
use crate::kv_cache::ResumeBlock;
use proto::block::BlockId;
use proto::sequence::SequenceError;
use std::sync::Arc;

/// A sequence whose caches are being copied.
#[derive(Debug)]
pub(in crate::engine) struct Saving {
    root: BlockId,
    tokens: Arc<[u32]>,
    position: u32,
    /// Those of the blocks of the resume point at `position` that have been copied, in its order.
    pieces: Vec<(u32, u32, Vec<u8>)>,
    reply: Reply<Capture>,
}

impl Engine {
    /// Begins to copy out the deepest resume point within these tokens.
    pub(super) fn begin_save(&mut self, root: BlockId, tokens: Arc<[u32]>, reply: Reply<Capture>) {
        self.resume.saving.push_back(Saving { root, tokens, position: 0, pieces: Vec::new(), reply });
        self.copy_saved();
    }

    /// Copies some of what is being saved; whether there was anything to copy.
    pub(in crate::engine) fn copy_saved(&mut self) -> bool {
        let (mut left, any) = (self.copy_bytes, !self.resume.saving.is_empty());
        while left > 0
            && let Some(mut saving) = self.resume.saving.pop_front()
        {
            if saving.reply.is_closed() {
                continue;
            }
            match self.copy_some(&mut saving, &mut left) {
                Ok(false) => self.resume.saving.push_front(saving),
                // Sending fails only where nobody waits any more.
                Err(error) => drop(saving.reply.send(Err(error))),
                Ok(true) => {
                    let Saving { tokens, position, pieces, reply, .. } = saving;
                    drop(reply.send(Ok(Capture { origin: self.origin(), tokens, position, pieces })));
                }
            }
        }
        any
    }

    /// Copies further blocks; whether these were all.
    fn copy_some(&mut self, saving: &mut Saving, left: &mut u64) -> Result<bool, SequenceError> {
        let prefix = &saving.tokens[..savable(saving.tokens.len())];
        let (position, blocks) = match self.scheduler.resume_point(saving.root, prefix) {
            Some(point) => (point.tokens, point.blocks),
            None if prefix.is_empty() => (0, Vec::new()),
            None => return Err(SequenceError::NoRoom { tokens: prefix.len() as u32 }),
        };
        if position != saving.position {
            saving.pieces.clear();
            saving.position = position;
        }
        let mut caches = self.caches();
        let further: Vec<&ResumeBlock> = blocks
            .iter()
            .skip(saving.pieces.len())
            .take_while(|block| {
                let begins = *left > 0;
                *left = left.saturating_sub(caches.block_bytes(block.group) as u64);
                begins
            })
            .collect();
        let places: Vec<(usize, u32)> = further.iter().map(|block| (block.group, block.offset)).collect();
        let read = caches.read(&places).map_err(|error| {
            tracing::error!(%error, "blocks cannot be read");
            SequenceError::Internal
        })?;
        let read = further.iter().zip(read);
        saving.pieces.extend(read.map(|(block, bytes)| (block.group as u32, block.tokens.start, bytes)));
        Ok(saving.pieces.len() == blocks.len())
    }
}
