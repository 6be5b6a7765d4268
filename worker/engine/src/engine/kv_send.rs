//! KV transfers to other workers. Resume points in the arena are copied out a few blocks at a time, between
//! steps and between the layers of a step, so that no receiver waits for a long step. Pieces that were
//! evicted meanwhile come from host memory or a file, if a tier has them; the sending thread reads the files.
//! Blocks are not pinned: a piece that is gone everywhere ends the pull, and the receiver computes the rest.

use super::Engine;
use super::tiering::Tiering;
use crate::executor::KvBlocks;
use crate::pieces::Namer;
use crate::scheduler::Scheduler;
use crate::tiers::{PieceFile, Tiers};
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use proto::pull::PullRefusal;
use std::collections::HashMap;
use std::sync::mpsc::Receiver;

/// A resume point that another worker may pull.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// Its length in tokens.
    pub tokens: u32,
    /// Its pieces that end after the part that the other worker has: (group, end, bytes), ordered by end,
    /// then group.
    pub pieces: Vec<(u32, u32, usize)>,
}

/// A piece for another worker.
#[derive(Debug)]
pub enum SentPiece {
    Copy(Vec<u8>),
    /// Must be read from this file.
    File(PieceFile),
}

impl SentPiece {
    /// Its bytes; `None` if its file is damaged or gone. May block on a disk.
    pub fn read(self) -> Option<Vec<u8>> {
        match self {
            Self::Copy(bytes) => Some(bytes),
            Self::File(file) => file.read().map(|bytes| bytes.to_vec()),
        }
    }
}

/// A function that reads the caches.
pub(super) type KvRead = Box<dyn FnOnce(&mut KvSender<'_>) + Send>;

/// The queue of reads by other threads.
pub(super) struct KvReads {
    origin: [u8; 32],
    max_model_len: usize,
    queue: Option<Receiver<KvRead>>,
}

impl KvReads {
    pub(super) fn new(namer: &Namer, max_model_len: usize) -> Self {
        Self { origin: namer.origin(), max_model_len, queue: None }
    }

    fn next(&self) -> Option<KvRead> {
        self.queue.as_ref()?.try_recv().ok()
    }

    /// Runs one queued read, if there is one. Between two layers this is sound because a resume point
    /// consists of completed steps only: the step in flight writes none of its blocks.
    pub(super) fn run_next(&self, blocks: &mut dyn KvBlocks, scheduler: &Scheduler, tiers: Option<&Tiers>) {
        if let Some(read) = self.next() {
            read(&mut self.sender(blocks, scheduler, tiers));
        }
    }

    fn sender<'a>(
        &self,
        blocks: &'a mut dyn KvBlocks,
        scheduler: &'a Scheduler,
        tiers: Option<&'a Tiers>,
    ) -> KvSender<'a> {
        KvSender { blocks, scheduler, tiers, origin: self.origin, max_model_len: self.max_model_len }
    }
}

/// Read access to an engine's caches for other workers.
pub struct KvSender<'a> {
    blocks: &'a mut dyn KvBlocks,
    scheduler: &'a Scheduler,
    tiers: Option<&'a Tiers>,
    origin: [u8; 32],
    max_model_len: usize,
}

impl KvSender<'_> {
    /// The deepest resume point within `tokens` that is longer than `have` tokens, for a worker of this
    /// `origin`.
    pub fn offer(
        &self,
        origin: &[u8; 32],
        root: BlockId,
        tokens: &[u32],
        have: u32,
    ) -> Result<Offer, PullRefusal> {
        if *origin != self.origin {
            return Err(PullRefusal::OtherOrigin);
        }
        let whole = tokens.len().is_multiple_of(HASH_UNIT_TOKENS) && tokens.len() <= self.max_model_len;
        if !whole {
            return Err(PullRefusal::NotHeld);
        }
        let arena = self.scheduler.resume_point(root, tokens).map_or(0, |point| point.tokens);
        let deepest = arena.max(self.tokens_in_tiers(root, tokens));
        if deepest <= have {
            return Err(PullRefusal::NotHeld);
        }
        let new = self.scheduler.shape(deepest).filter(|(_, end)| *end > have);
        let mut pieces: Vec<(u32, u32, usize)> =
            new.map(|(group, end)| (group as u32, end, self.blocks.block_bytes(group))).collect();
        pieces.sort_unstable_by_key(|(group, end, _)| (*end, *group));
        Ok(Offer { tokens: deepest, pieces })
    }

    /// Tokens of the deepest resume point whose pieces are all in tiers.
    fn tokens_in_tiers(&self, root: BlockId, tokens: &[u32]) -> u32 {
        let Some(tiers) = self.tiers else { return 0 };
        let names = tiers.names(root, tokens);
        let has = |group, end| names.piece(group, end).is_some_and(|key| tiers.holds(key));
        self.scheduler.deepest_whole(tokens.len() as u32, has)
    }

    /// Copies pieces of the offered resume point after `tokens`. Returns `NotHeld` if one of them is no
    /// longer in the arena (with all of that point) or in a tier.
    pub fn copy_pieces(
        &mut self,
        root: BlockId,
        tokens: &[u32],
        pieces: &[(u32, u32, usize)],
    ) -> Result<Vec<SentPiece>, PullRefusal> {
        let point = self.scheduler.resume_point(root, tokens);
        let blocks = point.filter(|point| point.tokens as usize == tokens.len()).map(|point| point.blocks);
        let offsets: HashMap<(u32, u32), u32> = blocks
            .iter()
            .flatten()
            .map(|block| ((block.group as u32, block.tokens.end), block.offset))
            .collect();
        let tiers = self.tiers.map(|tiers| (tiers, tiers.names(root, tokens)));
        let mut copies = Vec::with_capacity(pieces.len());
        let mut reads = Vec::new();
        for (index, (group, end, _)) in pieces.iter().enumerate() {
            match offsets.get(&(*group, *end)) {
                Some(offset) => {
                    reads.push((index, (*group as usize, *offset)));
                    copies.push(SentPiece::Copy(Vec::new()));
                }
                None => {
                    let from_tier = tiers.as_ref().and_then(|(tiers, names)| {
                        let key = names.piece(*group as usize, *end)?;
                        let copy = tiers.peek(key).map(|bytes| SentPiece::Copy(bytes.to_vec()));
                        copy.or_else(|| tiers.file(key).map(SentPiece::File))
                    });
                    copies.push(from_tier.ok_or(PullRefusal::NotHeld)?);
                }
            }
        }
        let (indices, reads): (Vec<usize>, Vec<(usize, u32)>) = reads.into_iter().unzip();
        let read = self.blocks.read_blocks(&reads).map_err(|error| {
            tracing::error!(%error, "cannot read blocks from the arena");
            PullRefusal::Internal
        })?;
        for (index, bytes) in indices.into_iter().zip(read) {
            copies[index] = SentPiece::Copy(bytes);
        }
        Ok(copies)
    }
}

impl Engine {
    /// Read access for other workers between two steps.
    pub fn kv_sender(&mut self) -> KvSender<'_> {
        let tiers = self.tiering.as_ref().map(Tiering::tiers);
        self.kv_reads.sender(&mut *self.executor, &self.scheduler, tiers)
    }

    /// Also runs the reads of this queue between the layers of a step.
    pub(super) fn set_kv_reads(&mut self, queue: Receiver<KvRead>) {
        self.kv_reads.queue = Some(queue);
    }

    /// Runs all queued reads.
    pub(super) fn run_kv_reads(&mut self) {
        while let Some(read) = self.kv_reads.next() {
            read(&mut self.kv_sender());
        }
    }
}
