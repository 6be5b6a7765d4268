//! What other workers may pull: resume points that lie in the arena, copied out a few blocks at a time between steps and
//! between the layers of one, so that nobody waits for a long step to end. Nothing is held for them: what has been evicted
//! meanwhile ends the pull, and who pulled computes the rest.

use super::Engine;
use super::caches::Caches;
use crate::pieces::Namer;
use crate::scheduler::Scheduler;
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

/// What is to be done with what lies in the arena.
pub(super) type Loan = Box<dyn FnOnce(&mut Lender<'_>) + Send>;

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
    pub(super) fn serve_one(&mut self, caches: Caches<'_>, scheduler: &Scheduler) {
        if let Some(loan) = self.asked.as_ref().and_then(|asked| asked.try_recv().ok()) {
            loan(&mut self.lender(caches, scheduler));
        }
    }

    fn lender<'a>(&self, caches: Caches<'a>, scheduler: &'a Scheduler) -> Lender<'a> {
        Lender { caches, scheduler, origin: self.origin, max_model_len: self.max_model_len }
    }
}

/// What others may read of an engine at any time.
pub struct Lender<'a> {
    caches: Caches<'a>,
    scheduler: &'a Scheduler,
    origin: [u8; 32],
    max_model_len: usize,
}

impl Lender<'_> {
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
        let point = self.scheduler.resume_point(root, tokens).filter(|_| whole);
        let point = point.filter(|point| point.tokens > have).ok_or(PullRefusal::NotHeld)?;
        let new = point.blocks.iter().filter(|block| block.tokens.end > have);
        let mut pieces: Vec<(u32, u32, usize)> = new
            .map(|block| (block.group as u32, block.tokens.end, self.caches.block_bytes(block.group)))
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
        let place =
            |(group, end, _): &(u32, u32, usize)| Some((*group as usize, *offsets.get(&(*group, *end))?));
        let places: Option<Vec<(usize, u32)>> = pieces.iter().map(place).collect();
        self.caches.read(&places.ok_or(PullRefusal::NotHeld)?).map_err(|error| {
            tracing::error!(%error, "blocks cannot be read");
            PullRefusal::Internal
        })
    }
}

impl Engine {
    /// What others may read of it, between two steps.
    pub fn lender(&mut self) -> Lender<'_> {
        let caches = Caches::new(self.decoder.blocks(), self.later.as_mut());
        self.lending.lender(caches, &self.scheduler)
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
