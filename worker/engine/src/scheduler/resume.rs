//! Operations on prefixes: fork, pin, save and restore.

use super::sequence::{Sequence, State};
use super::{LogitRows, QueuePosition, Rejected, Scheduler, SeqId, SequenceRequest};
use crate::kv_cache::{HitStop, PinId, PinRefused, RestoreId, ResumePoint};
use proto::block::{BlockId, HASH_UNIT_TOKENS};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ForkRefused {
    /// The sequence does not end with a token that was just drawn, or the cache shares nothing.
    #[error("sequence {0:?} cannot be forked at its position")]
    NotHere(SeqId),
    /// Both sequences would not fit next to the room reserved for others.
    #[error("there is no room for a fork now")]
    NoRoom,
    /// The fork is refused for a reason that would refuse any sequence.
    #[error(transparent)]
    Rejected(#[from] Rejected),
}

impl Scheduler {
    /// Whether sequences share common prefixes.
    pub fn shares(&self) -> bool {
        self.config.prefix_cache
    }

    /// Prompt and drawn tokens of a live sequence.
    pub fn tokens(&self, id: SeqId) -> Option<&[u32]> {
        self.get(*self.by_id.get(&id)?).map(|sequence| &sequence.tokens[..])
    }

    /// Starts a sequence that continues from the position of `of`, which has just drawn a token. The fork has
    /// the same earlier tokens and `drawn` in place of the last one. It computes none of them: it shares full
    /// blocks to the end, a copy of the last block, and the recurrent state until either sequence writes. At
    /// most `max_new_tokens` are drawn, including `drawn`. After an error nothing has changed, and the tokens
    /// can be submitted as a prompt.
    pub fn fork(&mut self, of: SeqId, id: SeqId, drawn: u32, max_new_tokens: u32) -> Result<(), ForkRefused> {
        if self.by_id.contains_key(&id) {
            return Err(Rejected::Duplicate(id).into());
        }
        let slot = self.by_id.get(&of).copied().ok_or(ForkRefused::NotHere(of))?;
        let here = |parent: &&Sequence| {
            parent.state == State::Running
                && parent.in_flight.is_none()
                && parent.cache.len() + 1 == parent.len()
                && parent.len() > parent.prompt_len
                // A fork's last block is copied with its first step. If it ended before, there would be no copy.
                && !parent.cache.awaits_copy()
        };
        let parent = self.get(slot).filter(here).filter(|_| self.config.prefix_cache);
        let parent = parent.ok_or(ForkRefused::NotHere(of))?;
        let (len, priority) = (parent.cache.len(), parent.rank.0.0);
        let tenant = self.tenants.share_of(parent.tenant);
        self.check_length(len as usize, max_new_tokens, 0)?;
        if self.alone.is_some() || self.running.len() >= self.config.max_seqs {
            return Err(ForkRefused::NoRoom);
        }
        let request = SequenceRequest {
            id,
            root: parent.root,
            prompt: parent.tokens[..len as usize].to_vec(),
            max_new_tokens,
            logit_rows: LogitRows::LastOnly,
            boundaries: Vec::new(),
            images: parent.images.clone(),
            tenant,
            priority,
            position: None,
        };
        let mut fork = Sequence::new(request, QueuePosition(self.arrivals + 1), Some(&self.key));
        fork.push(drawn, Some(&self.key));
        let parent = self.sequences.get(slot as usize).and_then(Option::as_ref);
        let cache = parent.and_then(|parent| self.cache.fork(&parent.cache));
        fork.cache = cache.ok_or(ForkRefused::NoRoom)?;
        let mut needs = vec![0; self.cache.spec().groups.len()];
        let running = self.running.iter().filter_map(|&slot| self.get(slot));
        for live in running.chain(std::iter::once(&fork)) {
            self.cache.add_outstanding(&live.cache, self.ahead(live), self.step_tokens_of(live), &mut needs);
        }
        if !self.cache.fits(&needs) {
            self.cache.close(&mut fork.cache);
            return Err(ForkRefused::NoRoom);
        }
        self.arrivals += 1;
        fork.state = State::Running;
        fork.seen = true;
        fork.progressed_in = self.step;
        fork.info.hit_stop = HitStop::Forked;
        let cached = u64::from(fork.count_cached(0, len));
        self.counters.prefix_query_tokens += cached;
        self.counters.prefix_hit_tokens += cached;
        self.counters.generated_tokens += 1;
        self.counters.forks += 1;
        let rank = fork.rank;
        let slot = self.insert(fork, tenant);
        let at = self.running.partition_point(|&other| self.get(other).is_some_and(|s| s.rank < rank));
        self.running.insert(at, slot);
        Ok(())
    }

    /// Adds a token drawn from the last row of a sequence after that row's step completed without a draw.
    /// Returns `false` if it is too late: the row is computed again, or the sequence is gone.
    pub fn draw_late(&mut self, id: SeqId, token: u32) -> bool {
        let key = self.config.prefix_cache.then_some(&self.key);
        let slot = self.by_id.get(&id).copied();
        let sequence = slot.and_then(|slot| self.sequences.get_mut(slot as usize)?.as_mut());
        let Some(sequence) = sequence.filter(|sequence| sequence.in_flight.is_none()) else { return false };
        sequence.push(token, key);
        self.counters.generated_tokens += 1;
        true
    }

    /// The deepest position within `tokens` at which a sequence could continue without computing anything
    /// before it, and the blocks of this resume point. Only completed steps count. The blocks are valid until
    /// the next step is planned. `None` if there is no resume point.
    pub fn resume_point(&self, root: BlockId, tokens: &[u32]) -> Option<ResumePoint> {
        self.cache.resume_point(root, &self.key.chain(root, tokens), tokens)
    }

    /// Protects the deepest resume point within `tokens` against eviction, within the configured budget. Also
    /// returns the number of tokens that it covers.
    ///
    /// A pin yields only to a sequence that could not run at all otherwise
    /// ([`Counters::pins_lost`](super::Counters::pins_lost)) and to [`Scheduler::clear_prefixes`].
    pub fn pin(&mut self, root: BlockId, tokens: &[u32]) -> Result<(PinId, u32), PinRefused> {
        let budget = self.pin_budget();
        self.cache.pin(root, &self.key.chain(root, tokens), tokens, budget)
    }

    /// Whether the pin still exists.
    pub fn is_pinned(&self, id: PinId) -> bool {
        self.cache.is_pinned(id)
    }

    /// Bytes that pins may hold.
    pub fn pin_budget(&self) -> u64 {
        self.config.pin_bytes.unwrap_or(self.cache.spec().arena_bytes / 4)
    }

    /// Forgets the cached units of `tokens` after the first `keep` tokens that nothing else uses or shares,
    /// so that a sequence that is taken back leaves no bytes behind. A unit that `keep` cuts through is
    /// forgotten too.
    pub fn cut(&mut self, root: BlockId, tokens: &[u32], keep: u32) {
        let ids = self.key.chain(root, tokens);
        self.cache.cut(root, &ids, tokens, keep as usize / HASH_UNIT_TOKENS);
    }

    /// Removes a pin. The prefix stays cached until its bytes are needed. Returns `false` if the pin does not
    /// exist.
    pub fn unpin(&mut self, id: PinId) -> bool {
        self.cache.unpin(id)
    }

    /// The pieces of a resume point of `tokens` tokens: (group, position after the last token of the block).
    /// Number and order are those of [`ResumePoint::blocks`].
    pub fn shape(&self, tokens: u32) -> impl Iterator<Item = (usize, u32)> {
        let unit = HASH_UNIT_TOKENS as u32;
        self.cache.shape(tokens / unit).map(move |(group, end)| (group, end * unit))
    }

    /// Every piece that any resume point within `tokens` tokens may have: (group, position after its last
    /// token).
    pub fn possible_pieces(&self, tokens: u32) -> impl Iterator<Item = (usize, u32)> {
        let unit = HASH_UNIT_TOKENS as u32;
        let ends = move |group| (1..=tokens / unit).map(move |end| (group, end * unit));
        (0..self.cache.spec().groups.len()).flat_map(ends)
    }

    /// Tokens of the deepest resume point of at most `tokens` tokens whose pieces all exist, or 0 if there is
    /// none. `has` receives a group and the end of a block as in [`Scheduler::shape`].
    pub fn deepest_whole(&self, tokens: u32, mut has: impl FnMut(usize, u32) -> bool) -> u32 {
        let unit = HASH_UNIT_TOKENS as u32;
        match self.config.prefix_cache {
            true => self.cache.deepest_whole(tokens / unit, |group, end| has(group, end * unit)) * unit,
            false => 0,
        }
    }

    /// Allocates blocks for a saved resume point of `tokens` tokens, a multiple of 16. The caller fills them,
    /// then calls [`Scheduler::end_restore`]. `None` if live sequences hold too many blocks, if the length is
    /// not that of a resume point, or if nothing is shared.
    pub fn begin_restore(&mut self, tokens: u32) -> Option<(RestoreId, ResumePoint)> {
        let unit = HASH_UNIT_TOKENS as u32;
        let possible = self.config.prefix_cache && tokens > 0 && tokens.is_multiple_of(unit);
        possible.then(|| self.cache.begin_restore(tokens / unit)).flatten()
    }

    /// Ends a restore. With a `prefix` (root, tokens), whose length must be that of
    /// [`Scheduler::begin_restore`], the blocks hold its KV and state and are served and announced like any
    /// other prefix. `None` frees the blocks. Returns `false` if nothing was restored.
    pub fn end_restore(&mut self, id: RestoreId, prefix: Option<(BlockId, &[u32])>) -> bool {
        let chain = prefix.map(|(root, tokens)| (root, self.key.chain(root, tokens), tokens));
        self.cache.end_restore(id, chain.as_ref().map(|(root, ids, tokens)| (*root, &ids[..], *tokens)))
    }
}
