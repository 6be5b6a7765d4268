//! The scheduler's state of a live sequence.

use super::request::{LogitRows, QueuePosition, SeqId, SequenceInfo, SequenceRequest};
use crate::images::SequenceImages;
use crate::kv_cache::{CheckpointKind, HitStop, SequenceCache};
use proto::block::{BlockId, ClusterKey, HASH_UNIT_TOKENS};
use std::sync::Arc;

/// Queue order: higher priority first, then earlier arrival. The smaller rank goes first.
pub(super) type Rank = (std::cmp::Reverse<i32>, QueuePosition);

/// The priority of sequences in the background: they are behind all others in every order.
const BACKGROUND: i32 = i32::MIN;

#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) id: SeqId,
    pub(super) tenant: u64,
    pub(super) rank: Rank,
    pub(super) root: BlockId,
    /// Prompt and drawn tokens.
    pub(super) tokens: Vec<u32>,
    /// Ids of the full units of `tokens`; empty without prefix caching.
    pub(super) units: Vec<BlockId>,
    pub(super) prompt_len: u32,
    pub(super) max_new_tokens: u32,
    pub(super) logit_rows: LogitRows,
    pub(super) images: Option<Arc<SequenceImages>>,
    /// Where its state is to be kept, in ascending order: (units before it, kind).
    pub(super) requested_checkpoints: Vec<(u32, CheckpointKind)>,
    pub(super) cache: SequenceCache,
    pub(super) state: State,
    /// Its last token is held back: see [`Scheduler::hold`](super::Scheduler::hold).
    pub(super) held: bool,
    /// Takes over units until it must compute one itself.
    pub(super) following: bool,
    /// The last unit before the awaited state. While another sequence plans this unit, no lookup is needed.
    pub(super) awaited: Option<BlockId>,
    /// Was admitted before: a later admission does not count as another prefix query.
    pub(super) seen: bool,
    /// The last step that computes rows of it and has not completed. A prompt may have rows in several steps.
    pub(super) in_flight: Option<u64>,
    /// Draft tokens for the next step, or those that the step in flight verifies.
    pub(super) draft_tokens: Vec<u32>,
    /// The last step in which it committed units that others may have taken over at once.
    pub(super) committed_in: u64,
    /// The last step in which it progressed.
    pub(super) progressed_in: u64,
    /// Tokens that were ever computed or taken over: tokens below are not counted twice.
    pub(super) reached: u32,
    /// The value of `reached` at the last admission.
    pub(super) reached_before: u32,
    /// Was put back into the queue for another tenant's sequence.
    pub(super) has_yielded: bool,
    pub(super) info: SequenceInfo,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Waiting,
    Running,
    /// Removed while a step was computing its rows. It is dropped when that step completes.
    Leaving,
}

impl Sequence {
    /// `key` keys its prefix ids; `None` without prefix caching.
    pub(super) fn new(request: SequenceRequest, position: QueuePosition, key: Option<&ClusterKey>) -> Self {
        let units = key.map_or_else(Vec::new, |key| key.chain(request.root, &request.prompt));
        let priority = match request.tenant.is_background() {
            true => BACKGROUND,
            false => request.priority.max(BACKGROUND + 1),
        };
        Self {
            id: request.id,
            tenant: request.tenant.tenant,
            rank: (std::cmp::Reverse(priority), position),
            root: request.root,
            prompt_len: request.prompt.len() as u32,
            tokens: request.prompt,
            units,
            max_new_tokens: request.max_new_tokens,
            logit_rows: request.logit_rows,
            images: request.images,
            requested_checkpoints: Vec::new(),
            cache: SequenceCache::default(),
            state: State::Waiting,
            held: false,
            following: false,
            awaited: None,
            seen: false,
            in_flight: None,
            draft_tokens: Vec::new(),
            committed_in: 0,
            progressed_in: 0,
            reached: 0,
            reached_before: 0,
            has_yielded: false,
            info: SequenceInfo {
                cached_tokens: 0,
                computed_tokens: 0,
                recomputed_tokens: 0,
                preemptions: 0,
                drafted_tokens: 0,
                accepted_tokens: 0,
                hit_stop: HitStop::Disabled,
            },
        }
    }

    /// Whether it gives way to every sequence that is not.
    pub(super) fn is_background(&self) -> bool {
        self.rank.0.0 == BACKGROUND
    }

    /// Number of prompt and drawn tokens.
    pub(super) fn len(&self) -> u32 {
        self.tokens.len() as u32
    }

    /// Tokens of KV that the sequence needs at its maximum length. The last drawn token needs none.
    pub(super) fn longest(&self) -> u32 {
        self.prompt_len.saturating_add(self.max_new_tokens).saturating_sub(1).max(self.prompt_len)
    }

    /// Number of tokens that could be computed now.
    pub(super) fn remaining(&self) -> u32 {
        let drawn = self.len() - self.prompt_len;
        if drawn > 0 && drawn >= self.max_new_tokens { 0 } else { self.len() - self.cache.len() }
    }

    /// Whether all tokens but the last drawn one are computed or in a step in flight.
    pub(super) fn decodes(&self) -> bool {
        self.state == State::Running && self.cache.len() >= self.prompt_len && self.remaining() <= 1
    }

    /// Index of the next unit if the sequence is at a unit boundary.
    pub(super) fn unit_at(&self) -> Option<usize> {
        let len = self.cache.len() as usize;
        len.is_multiple_of(HASH_UNIT_TOKENS).then_some(len / HASH_UNIT_TOKENS)
    }

    /// Maximum number of units that the cache may serve: the last token is always computed, and every row whose
    /// logits are needed once.
    pub(super) fn unit_cap(&self) -> usize {
        let served = match self.logit_rows {
            LogitRows::Prompt if self.reached < self.prompt_len => self.reached as usize,
            _ => self.tokens.len() - 1,
        };
        served / HASH_UNIT_TOKENS
    }

    /// Number of the next `rows` rows that may be computed together: they end in no span.
    pub(super) fn uncut(&self, rows: u32) -> u32 {
        self.images.as_ref().map_or(rows, |images| images.uncut(self.cache.len(), rows))
    }

    /// Rows up to the end of the span that begins next; 0 if none does.
    pub(super) fn next_span(&self) -> u32 {
        self.images.as_ref().map_or(0, |images| images.at_least(self.cache.len(), 0))
    }

    /// Units that are not yet computed or taken over.
    pub(super) fn units_ahead(&self) -> &[BlockId] {
        self.units.get(self.cache.len() as usize / HASH_UNIT_TOKENS..).unwrap_or_default()
    }

    /// Requests that its state after `unit` units is kept.
    pub(super) fn request_checkpoint(&mut self, unit: u32, kind: CheckpointKind) {
        match self.requested_checkpoints.binary_search_by_key(&unit, |&(unit, _)| unit) {
            Ok(at) => self.requested_checkpoints[at].1 = kind.max(self.requested_checkpoints[at].1),
            Err(at) => self.requested_checkpoints.insert(at, (unit, kind)),
        }
    }

    /// Appends a drawn token.
    pub(super) fn push(&mut self, token: u32, key: Option<&ClusterKey>) {
        self.tokens.push(token);
        let (units, rest) = self.tokens.as_chunks::<HASH_UNIT_TOKENS>();
        if let (Some(key), Some(last), true) = (key, units.last(), rest.is_empty()) {
            let parent = self.units.last().copied().unwrap_or(self.root);
            self.units.push(key.unit(parent, last));
        }
    }

    /// Counts tokens `from..to` as taken over. Returns the number of those that count as cached.
    pub(super) fn count_cached(&mut self, from: u32, to: u32) -> u32 {
        let new = to.min(self.prompt_len).saturating_sub(from.max(self.reached));
        self.reached = self.reached.max(to);
        self.info.cached_tokens += new;
        new
    }

    /// Counts tokens `from..to` as computed. Returns (prompt tokens computed the first time, tokens computed
    /// again).
    pub(super) fn count_computed(&mut self, from: u32, to: u32) -> (u32, u32) {
        let again = to.min(self.reached).saturating_sub(from);
        let new = to.min(self.prompt_len).saturating_sub(from.max(self.reached));
        self.reached = self.reached.max(to);
        self.info.computed_tokens += new;
        self.info.recomputed_tokens += again;
        (new, again)
    }
}

/// The last position up to `end`, in tokens, at which a prefix hit may end. Before rows of spans that is the end of a
/// block, so that no copy of a part of a block requires a row.
pub(super) fn hit_end(images: Option<&SequenceImages>, end: u32, block_tokens: u32) -> u32 {
    let Some(images) = images else { return end };
    let mut end = end;
    loop {
        let before = end;
        end = images.hit_end(end);
        if images.longest_span() > 0 {
            end -= end % block_tokens;
        }
        if end == before {
            return end;
        }
    }
}
