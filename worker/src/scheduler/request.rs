//! What goes into the scheduler and what comes out: requests, refusals, step plans, figures.

use crate::kv_cache::{CopyBlock, HitStop};
use proto::block::BlockId;
use proto::message::TenantTurn;
use std::ops::Range;

/// Names a sequence; chosen by the engine, unique among live sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqId(pub u64);

/// Which rows of a prompt need logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogitRows {
    /// The last one, from which the first token is drawn.
    #[default]
    LastOnly,
    /// Every row that is computed; rows served by the cache have none.
    All,
}

/// A sequence to be computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceRequest {
    pub id: SeqId,
    /// Root of its prefixes: only sequences of one root share blocks.
    pub root: BlockId,
    /// The prompt, not empty.
    pub prompt: Vec<u32>,
    /// Tokens that may be drawn; 0 computes the prompt only.
    pub max_new_tokens: u32,
    /// Which rows of the prompt need logits.
    pub logit_rows: LogitRows,
    /// Positions in the prompt, in tokens, at which others are likely to part from it or to go on: ends of the
    /// system prompt and of chat turns. Only where there are recurrent layers do they matter.
    pub boundaries: Vec<u32>,
    pub tenant: TenantTurn,
    /// Higher goes first of its tenant's; first come, first served among equals.
    pub priority: i32,
    /// When it came, if it could not be submitted at once: see [`Scheduler::take_turn`](super::Scheduler::take_turn).
    pub turn: Option<QueuePosition>,
}

/// A place among those of equal priority. Worth nothing without its sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct QueuePosition(pub(super) u64);

/// Why a sequence is refused, for good.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Rejected {
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// Prompt and output do not fit into the cache, even alone.
    #[error("prompt and output need {need} tokens of KV cache, {limit} fit")]
    TooLong {
        /// Tokens whose KV the sequence needs at its longest.
        need: u64,
        /// The longest sequence that fits when it is alone.
        limit: u64,
    },
    /// The waiting queue is full; the same request may be accepted later.
    #[error("{waiting} sequences are waiting, the queue takes no more")]
    QueueFull { waiting: usize },
    /// The id is in use.
    #[error("sequence {0:?} exists already")]
    Duplicate(SeqId),
}

/// How much of what could be computed one step takes, so that something is left for a step beside it. Results do not
/// depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepLimits {
    /// Rows, all sequences together; at least 1.
    pub rows: u32,
    /// Sequences that decode; at least 1.
    pub decoding: u32,
}

impl StepLimits {
    /// As much as the scheduler's configuration allows.
    pub const NONE: Self = Self { rows: u32::MAX, decoding: u32::MAX };
}

/// What there is to compute.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Demand {
    /// Admitted sequences whose prompt is computed, those with a row in flight included.
    pub decoding: u32,
    /// Tokens of the others, queued ones included, that are in no step yet.
    pub prefill: u64,
}

/// One step of the engine: rows to compute, all sequences together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// Number of the step, from 1.
    pub step: u64,
    /// Blocks to copy first, in order.
    pub copies: Vec<CopyBlock>,
    /// Token of each row.
    pub tokens: Vec<u32>,
    /// Position of each row in its sequence.
    pub positions: Vec<u32>,
    /// Rows whose logits are needed, ascending.
    pub logit_rows: Vec<u32>,
    /// Whose rows they are, in the order of the rows.
    pub sequences: Vec<PlannedSequence>,
}

/// A sequence's part of a step. Row `i` of it reads the `context_before + i + 1` first tokens of the
/// sequence (as far as the layer's window reaches) through the sequence's block tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedSequence {
    pub id: SeqId,
    /// Its rows among the step's.
    pub rows: Range<u32>,
    /// Tokens before its first row.
    pub context_before: u32,
    /// The last so many of its rows are guesses ([`Scheduler::guess`](super::Scheduler::guess)), each of which counts
    /// only if it is what is drawn from the row before.
    pub guesses: u32,
    /// Its entries in [`StepPlan::logit_rows`].
    pub logits: Range<u32>,
    /// With this step all tokens known are computed.
    pub last_chunk: bool,
    /// What the step does with its recurrent state; `None` without recurrent layers.
    pub state: Option<SequenceState>,
    /// The next token is drawn from the logits of its last row that is no guess, and one more from each guess that
    /// counts; these rows are the last ones of `logits`. So it is with every last chunk, unless nothing at all is to be
    /// drawn.
    pub samples: bool,
    /// Names its tables in [`super::Scheduler::tables`]; valid until the step has completed.
    pub slot: SeqSlot,
}

/// What a step does with the recurrent state of one sequence. Slots are offsets into the arena in units of
/// [`OFFSET_UNIT`](crate::kv_cache::OFFSET_UNIT). Within a step no slot is written twice, and none is written
/// that another sequence reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceState {
    /// The slot with the state before its first row; `None` for a state of zeros.
    pub read: Option<u32>,
    /// The slot that gets the state after its last row; often the one that is read.
    pub write: u32,
    /// Further (row, slot) that get the state after a row, ascending; rows counted from the sequence's first.
    pub exports: Vec<(u32, u32)>,
    /// There are guesses among its rows: the state is written when it is known how many count.
    pub deferred: bool,
}

/// Where the scheduler keeps a sequence. Reused after the sequence has gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SeqSlot(pub(crate) u32);

/// How a sequence's prompt was served so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceInfo {
    /// Prompt tokens taken from the cache or from sequences that computed them.
    pub cached_tokens: u32,
    /// Prompt tokens computed for this sequence, each counted once.
    pub computed_tokens: u32,
    /// Tokens computed again because of preemption.
    pub recomputed_tokens: u32,
    pub preemptions: u32,
    /// Guesses that were in steps.
    pub drafted_tokens: u32,
    pub accepted_tokens: u32,
    /// Why the last lookup before its first computed row stopped.
    pub hit_stop: HitStop,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    pub steps: u64,
    /// Prompt tokens computed, each once per sequence; the sum of all `computed_tokens`.
    pub prefill_tokens_computed: u64,
    /// Tokens computed again because of preemption.
    pub recomputed_tokens: u64,
    /// Tokens drawn.
    pub generated_tokens: u64,
    /// Times guesses of a sequence were in a step.
    pub drafts: u64,
    pub drafted_tokens: u64,
    pub accepted_tokens: u64,
    /// Prompt tokens of admitted sequences, with prefix caching on.
    pub prefix_query_tokens: u64,
    /// Prompt tokens that were not computed; the sum of all `cached_tokens`.
    pub prefix_hit_tokens: u64,
    /// Sequences preempted for want of blocks.
    pub preemptions: u64,
    /// Sequences that made way for another tenant's.
    pub yields: u64,
    /// Blocks whose cached content was given up for new.
    pub evictions: u64,
    /// Times the oldest sequence had to start again alone because free blocks were scattered.
    pub lone_restarts: u64,
    /// Times a sequence waited a step for another to compute a prefix unit.
    pub follower_waits: u64,
    /// Times a sequence computed units itself because their producer had stalled.
    pub takeovers: u64,
    /// Recurrent states kept as checkpoints.
    pub checkpoints: u64,
    /// Recurrent states that were to be kept and were not, for want of a slot that nobody needs.
    pub checkpoints_skipped: u64,
    /// Sequences that went on from where another stood.
    pub forks: u64,
    /// Pins given up because a sequence could not have run otherwise, or because rows computed from them were no numbers.
    pub pins_lost: u64,
}

/// A sequence that takes part in the next step with the token that it has drawn last, if there is room.
#[derive(Debug, Clone, Copy)]
pub struct Decoding<'a> {
    pub id: SeqId,
    /// Names its tables in [`super::Scheduler::tables`]: all tokens but the last are in them.
    pub slot: SeqSlot,
    /// Prompt and drawn tokens.
    pub tokens: &'a [u32],
    /// Guesses that could be looked at in that step.
    pub most_guesses: u32,
}

/// The present state, for reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    pub counters: Counters,
    pub running: usize,
    /// Sequences queued, preempted ones included.
    pub waiting: usize,
    /// Running sequences that waited for another's prefix units in the last plan.
    pub following: usize,
    /// Prompt tokens of running and queued sequences that are not yet computed or cached.
    pub pending_prefill_tokens: u64,
    /// Bytes of blocks that live sequences hold.
    pub kv_used_bytes: u64,
    /// Bytes of the arena that can carry blocks.
    pub kv_total_bytes: u64,
    /// Hash units at which a lookup could end, as announced by events; with recurrent layers the number of
    /// resume points.
    pub held_units: usize,
    /// Bytes of pinned blocks.
    pub pinned_bytes: u64,
}
