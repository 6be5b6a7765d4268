//! What other workers may pull: resume points that lie in the arena, copied out a few blocks at a time between steps and
//! between the layers of one, so that nobody waits for a long step to end. What has been evicted meanwhile is given from
//! host memory or from a file, if it is kept there too; files are read by whoever sends them. Nothing is held for them: what
//! is nowhere any more ends the pull, and who pulled computes the rest.

use super::Engine;
use super::caches::Caches;
use super::tiering::Tiering;
use crate::pieces::Namer;
use crate::scheduler::Scheduler;
use crate::tiers::{PieceFile, Tiers};
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use proto::pull::PullRefusal;
use std::collections::HashMap;
use std::sync::mpsc::Receiver;

/// A resume point that another worker may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// Tokens up to it.
    pub tokens: u32,
    /// Its pieces that end behind what the other worker has: group, end, bytes; by ends, then groups.
    pub pieces: Vec<(u32, u32, usize)>,
}

/// A piece that is lent.
#[derive(Debug)]
pub enum Lent {
    Copy(Vec<u8>),
    /// It is to be read from here.
    File(PieceFile),
}

impl Lent {
    /// Its bytes; none if its file is damaged, or gone meanwhile. May wait for a disk.
    pub fn read(self) -> Option<Vec<u8>> {
        match self {
            Self::Copy(bytes) => Some(bytes),
            Self::File(file) => file.read().map(|bytes| bytes.to_vec()),
        }
    }
}

/// What is to be done with what lies in the arena.
pub(super) type Loan = Box<dyn FnOnce(&mut KvSender<'_>) + Send>;

/// The engine's side of pulls by others.
pub(super) struct Lending {
    origin: [u8; 32],
    max_model_len: usize,
    asked: Option<Receiver<Loan>>,
}

impl Lending {
    pub(super) fn new(namer: &Namer, max_model_len: usize) -> Self {
        Self { origin: namer.origin(), max_model_len, asked: None }
    }

    /// Serves one of those who have asked, if there is one. Between two layers this is sound because a resume point is made
    /// of completed steps only: the step under way writes none of its blocks.
    pub(super) fn serve_one(&mut self, caches: Caches<'_>, scheduler: &Scheduler, tiers: Option<&Tiers>) {
        if let Some(loan) = self.asked.as_ref().and_then(|asked| asked.try_recv().ok()) {
            loan(&mut self.lender(caches, scheduler, tiers));
        }
    }

    fn lender<'a>(
        &self,
        caches: Caches<'a>,
        scheduler: &'a Scheduler,
        tiers: Option<&'a Tiers>,
    ) -> KvSender<'a> {
        KvSender { caches, scheduler, tiers, origin: self.origin, max_model_len: self.max_model_len }
    }
}

/// What others may read of an engine at any time.
pub struct KvSender<'a> {
    caches: Caches<'a>,
    scheduler: &'a Scheduler,
    tiers: Option<&'a Tiers>,
    origin: [u8; 32],
    max_model_len: usize,
}

impl KvSender<'_> {
    /// The deepest resume point within `tokens` that lies behind the first `have` of them, for a worker of this
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
        let deepest = arena.max(self.kept(root, tokens));
        if deepest <= have {
            return Err(PullRefusal::NotHeld);
        }
        let new = self.scheduler.shape(deepest).filter(|(_, end)| *end > have);
        let mut pieces: Vec<(u32, u32, usize)> =
            new.map(|(group, end)| (group as u32, end, self.caches.block_bytes(group))).collect();
        pieces.sort_unstable_by_key(|(group, end, _)| (*end, *group));
        Ok(Offer { tokens: deepest, pieces })
    }

    /// Tokens of the deepest resume point whose pieces are all in tiers.
    fn kept(&self, root: BlockId, tokens: &[u32]) -> u32 {
        let Some(tiers) = self.tiers else { return 0 };
        let names = tiers.names(root, tokens);
        let has = |group, end| names.piece(group, end).is_some_and(|key| tiers.holds(key));
        self.scheduler.deepest_whole(tokens.len() as u32, has)
    }

    /// Copies out pieces of the resume point behind `tokens`, which was offered; `NotHeld` if one of them is neither in
    /// the arena, with all of that point, nor in a tier any more.
    pub fn copy_pieces(
        &mut self,
        root: BlockId,
        tokens: &[u32],
        pieces: &[(u32, u32, usize)],
    ) -> Result<Vec<Lent>, PullRefusal> {
        let point = self.scheduler.resume_point(root, tokens);
        let blocks = point.filter(|point| point.tokens as usize == tokens.len()).map(|point| point.blocks);
        let offsets: HashMap<(u32, u32), u32> = blocks
            .iter()
            .flatten()
            .map(|block| ((block.group as u32, block.tokens.end), block.offset))
            .collect();
        let tiers = self.tiers.map(|tiers| (tiers, tiers.names(root, tokens)));
        let mut copies = Vec::with_capacity(pieces.len());
        let mut places = Vec::new();
        for (at, (group, end, _)) in pieces.iter().enumerate() {
            match offsets.get(&(*group, *end)) {
                Some(offset) => {
                    places.push((at, (*group as usize, *offset)));
                    copies.push(Lent::Copy(Vec::new()));
                }
                None => {
                    let kept = tiers.as_ref().and_then(|(tiers, names)| {
                        let key = names.piece(*group as usize, *end)?;
                        let copy = tiers.peek(key).map(|bytes| Lent::Copy(bytes.to_vec()));
                        copy.or_else(|| tiers.file(key).map(Lent::File))
                    });
                    copies.push(kept.ok_or(PullRefusal::NotHeld)?);
                }
            }
        }
        let (at, places): (Vec<usize>, Vec<(usize, u32)>) = places.into_iter().unzip();
        let read = self.caches.read(&places).map_err(|error| {
            tracing::error!(%error, "blocks cannot be read");
            PullRefusal::Internal
        })?;
        for (at, bytes) in at.into_iter().zip(read) {
            copies[at] = Lent::Copy(bytes);
        }
        Ok(copies)
    }
}

impl Engine {
    /// What others may read of it, between two steps.
    pub fn lender(&mut self) -> KvSender<'_> {
        let tiers = self.tiering.as_ref().map(Tiering::tiers);
        let caches = Caches::new(self.decoder.blocks(), self.later.as_mut());
        self.lending.lender(caches, &self.scheduler, tiers)
    }

    /// Serves what is asked for here also between the layers of a step.
    pub(super) fn lends_to(&mut self, asked: Receiver<Loan>) {
        self.lending.asked = Some(asked);
    }

    /// Serves all who have asked.
    pub(super) fn lend(&mut self) {
        while let Some(loan) = self.lending.asked.as_ref().and_then(|asked| asked.try_recv().ok()) {
            loan(&mut self.lender());
        }
    }
}
