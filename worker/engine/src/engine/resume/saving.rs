//! Copies sequences out for snapshots, a bounded number of bytes between two steps, because a sequence may be
//! long and its caches may be at other workers. Blocks are not pinned meanwhile. Copied bytes stay valid when
//! their block is reused. If the end of the sequence is evicted meanwhile, the snapshot covers the part that
//! is still cached.

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
    /// The copied blocks of the resume point at `position`, in its order.
    pieces: Vec<(u32, u32, Vec<u8>)>,
    reply: Reply<Capture>,
}

impl Engine {
    /// Starts to copy out the deepest resume point within these tokens.
    pub(super) fn begin_save(&mut self, root: BlockId, tokens: Arc<[u32]>, reply: Reply<Capture>) {
        self.resume.saving.push_back(Saving { root, tokens, position: 0, pieces: Vec::new(), reply });
        self.copy_saved();
    }

    /// Copies further blocks of the sequences that are being saved. Returns whether a sequence was being saved when it was called.
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
                // Sending fails only if the receiver is gone.
                Err(error) => drop(saving.reply.send(Err(error))),
                Ok(true) => {
                    let Saving { tokens, position, pieces, reply, .. } = saving;
                    drop(reply.send(Ok(Capture { origin: self.origin(), tokens, position, pieces })));
                }
            }
        }
        any
    }

    /// Copies further blocks. Returns whether all are copied.
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
        let executor = &mut self.executor;
        let further: Vec<&ResumeBlock> = blocks
            .iter()
            .skip(saving.pieces.len())
            .take_while(|block| {
                let begins = *left > 0;
                *left = left.saturating_sub(executor.block_bytes(block.group) as u64);
                begins
            })
            .collect();
        let addresses: Vec<(usize, u32)> = further.iter().map(|block| (block.group, block.offset)).collect();
        let read = executor.read_blocks(&addresses).map_err(|error| {
            tracing::error!(%error, "cannot read blocks from the arena");
            SequenceError::Internal
        })?;
        let read = further.iter().zip(read);
        saving.pieces.extend(read.map(|(block, bytes)| (block.group as u32, block.tokens.start, bytes)));
        Ok(saving.pieces.len() == blocks.len())
    }
}
