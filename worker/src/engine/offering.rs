//! What other workers may pull: resume points that lie in the arena, copied out a few blocks at a time between steps.
//! Nothing is held for them: what has been evicted meanwhile ends the pull, and who pulled computes the rest.

use super::Engine;
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use proto::pull::PullRefusal;
use std::collections::HashMap;

/// A resume point that another worker may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// Tokens up to it.
    pub tokens: u32,
    /// Its pieces that end behind what the other worker has: group, end, bytes; by ends, then groups.
    pub pieces: Vec<(u32, u32, usize)>,
}

impl Engine {
    /// The deepest resume point within `tokens` that lies behind the first `have` of them, for a worker of this
    /// `origin`.
    pub fn offer(
        &self,
        origin: &[u8; 32],
        root: BlockId,
        tokens: &[u32],
        have: u32,
    ) -> Result<Offer, PullRefusal> {
        if *origin != self.pulling.namer().origin() {
            return Err(PullRefusal::OtherOrigin);
        }
        let whole = tokens.len().is_multiple_of(HASH_UNIT_TOKENS) && tokens.len() <= self.max_model_len;
        let point = self.scheduler.resume_point(root, tokens).filter(|_| whole);
        let point = point.filter(|point| point.tokens > have).ok_or(PullRefusal::NotHeld)?;
        let new = point.blocks.iter().filter(|block| block.tokens.end > have);
        let groups = self.decoder.groups();
        let mut pieces: Vec<(u32, u32, usize)> = new
            .filter_map(|block| {
                Some((block.group as u32, block.tokens.end, groups.get(block.group)?.block_bytes))
            })
            .collect();
        pieces.sort_unstable_by_key(|(group, end, _)| (*end, *group));
        Ok(Offer { tokens: point.tokens, pieces })
    }

    /// Copies out pieces of the resume point behind `tokens`, which was offered; `NotHeld` if it is not all there any
    /// more.
    pub fn copy_pieces(
        &mut self,
        root: BlockId,
        tokens: &[u32],
        pieces: &[(u32, u32, usize)],
    ) -> Result<Vec<Vec<u8>>, PullRefusal> {
        let point = self.scheduler.resume_point(root, tokens);
        let point =
            point.filter(|point| point.tokens as usize == tokens.len()).ok_or(PullRefusal::NotHeld)?;
        let offsets: HashMap<(u32, u32), u32> =
            point.blocks.iter().map(|block| ((block.group as u32, block.tokens.end), block.offset)).collect();
        let mut copies = Vec::with_capacity(pieces.len());
        for (group, end, _) in pieces {
            let offset = offsets.get(&(*group, *end)).ok_or(PullRefusal::NotHeld)?;
            let bytes = self.decoder.read_block(*group as usize, *offset).map_err(|error| {
                tracing::error!(%error, "a block cannot be read");
                PullRefusal::Internal
            })?;
            copies.push(bytes);
        }
        Ok(copies)
    }
}
