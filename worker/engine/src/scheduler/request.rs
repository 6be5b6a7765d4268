//! The scheduler's input and output: requests, refusals, step plans, statistics.

use crate::images::SequenceImages;
use crate::kv_cache::{CopyBlock, HitStop};
use proto::block::BlockId;
use proto::message::TenantShare;
use std::ops::Range;
use std::sync::Arc;

/// Id of a sequence, chosen by the engine. Unique among live sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqId(pub u64);

/// Which rows of a prompt need logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogitRows {
    /// The last one, from which the first token is drawn.
    #[default]
    LastOnly,
    /// Every computed row. Rows served by the cache have no logits.
    All,
    /// Every row of the prompt, so the cache serves none that the sequence has not computed before.
    Prompt,
}

/// A sequence to be computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceRequest {
    pub id: SeqId,
    /// Root of its prefixes: only sequences of one root share blocks.
    pub root: BlockId,
    /// Not empty.
    pub prompt: Vec<u32>,
    /// Maximum number of tokens to draw; 0 only computes the prompt.
    pub max_new_tokens: u32,
    pub logit_rows: LogitRows,
    /// Positions in the prompt, in tokens, at which other prompts are likely to diverge or to continue: the
    /// ends of the system prompt and of chat turns. Used only with recurrent layers.
    pub boundaries: Vec<u32>,
    /// The images whose rows are in the prompt.
    pub images: Option<Arc<SequenceImages>>,
    pub tenant: TenantShare,
    /// Higher goes first within a tenant. Ties go to the earlier arrival.
    pub priority: i32,
    /// Its queue position if it could not be submitted on arrival: see
    /// [`Scheduler::next_position`](super::Scheduler::next_position).
    pub position: Option<QueuePosition>,
}

/// A position among sequences of equal priority. Has no effect before its sequence is submitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct QueuePosition(pub(super) u64);

/// Why a sequence is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Rejected {
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// Prompt and output do not fit into the cache, even alone.
    #[error("prompt and output need {need} tokens of KV cache, at most {limit} fit")]
    TooLong {
        /// Tokens of KV that the sequence needs at its maximum length.
        need: u64,
        /// The longest sequence that fits when it is alone, in tokens.
        limit: u64,
    },
    /// The waiting queue is full. The same request may be accepted later.
    #[error("the queue is full: {waiting} sequences are waiting")]
    QueueFull { waiting: usize },
    /// Rows of an image that see each other must be in one step.
    #[error("an image has {rows} rows in a row, at most {limit} fit into a step")]
    Span { rows: u32, limit: u32 },
    #[error("sequence {0:?} exists already")]
    Duplicate(SeqId),
}

/// Limits of one step, so that capacity is left for another step in flight. Results do not depend on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepLimits {
    /// Rows over all sequences; at least 1.
    pub rows: u32,
    /// Decoding sequences; at least 1.
    pub decoding: u32,
}

impl StepLimits {
    /// No limits beyond the scheduler's configuration.
    pub const NONE: Self = Self { rows: u32::MAX, decoding: u32::MAX };
}

/// The work that is left to compute.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Demand {
    /// Admitted sequences whose prompt is computed, including those with a row in flight.
    pub decoding: u32,
    /// Tokens of all other sequences, including queued ones, that are not in a step yet.
    pub prefill: u64,
}

/// One step of the engine: the rows to compute for all sequences.
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
    /// The sequences, in the order of their rows.
    pub sequences: Vec<PlannedSequence>,
}

/// A sequence's part of a step. Its row `i` reads the first `context_before + i + 1` tokens of the sequence
/// (within the layer's window) through the sequence's block tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedSequence {
    pub id: SeqId,
    /// Its rows among the step's.
    pub rows: Range<u32>,
    /// Tokens before its first row.
    pub context_before: u32,
    /// Number of draft tokens, which are its last rows
    /// ([`Scheduler::set_draft_tokens`](super::Scheduler::set_draft_tokens)). Each is accepted only if it
    /// equals the token drawn from the row before.
    pub draft_tokens: u32,
    /// Its entries in [`StepPlan::logit_rows`].
    pub logits: Range<u32>,
    /// After this step all known tokens are computed.
    pub last_chunk: bool,
    /// Its recurrent state in this step; `None` without recurrent layers.
    pub state: Option<SequenceState>,
    /// Whether tokens are drawn: the next token from the logits of its last row before the draft tokens, and
    /// one more from each accepted draft token. These rows are the last ones of `logits`. True for every last
    /// chunk, unless no token may be drawn.
    pub samples: bool,
    /// Key of its tables in [`super::Scheduler::tables`]. Valid until the step has completed.
    pub slot: SeqSlot,
}

/// The slots that a step reads and writes for one sequence, as offsets into the arena in units of
/// [`OFFSET_UNIT`](crate::kv_cache::OFFSET_UNIT). Within a step no slot is written twice, and none is written
/// that another sequence reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceState {
    /// The slot with the state before the first row; `None` for a state of zeros.
    pub read: Option<u32>,
    /// The slot that receives the state after the last row; often the one that is read.
    pub write: u32,
    /// Further (row, slot) pairs, ascending: the slot receives the state after the row. Rows count from the
    /// sequence's first.
    pub exports: Vec<(u32, u32)>,
    /// Some rows are draft tokens: the state is written after the number of accepted rows is known.
    pub deferred: bool,
}

/// Index of a sequence in the scheduler. Reused after the sequence is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SeqSlot(pub(crate) u32);

/// How a sequence's prompt has been served so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceInfo {
    /// Prompt tokens taken from the cache or from sequences that computed them.
    pub cached_tokens: u32,
    /// Prompt tokens computed for this sequence, each counted once.
    pub computed_tokens: u32,
    /// Tokens computed again because of preemption.
    pub recomputed_tokens: u32,
    pub preemptions: u32,
    /// Draft tokens that were verified in steps.
    pub drafted_tokens: u32,
    pub accepted_tokens: u32,
    /// Why the last lookup before its first computed row stopped.
    pub hit_stop: HitStop,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    pub steps: u64,
    /// Prompt tokens computed, each counted once per sequence. Equals the sum of all `computed_tokens`.
    pub prefill_tokens_computed: u64,
    /// Tokens computed again because of preemption.
    pub recomputed_tokens: u64,
    /// Tokens drawn.
    pub generated_tokens: u64,
    /// Number of times that a step verified draft tokens of a sequence.
    pub drafts: u64,
    pub drafted_tokens: u64,
    pub accepted_tokens: u64,
    /// Prompt tokens of admitted sequences, with prefix caching on.
    pub prefix_query_tokens: u64,
    /// Prompt tokens that were not computed. Equals the sum of all `cached_tokens`.
    pub prefix_hit_tokens: u64,
    /// Sequences preempted because blocks ran out.
    pub preemptions: u64,
    /// Sequences that returned to the queue for another tenant's sequence.
    pub yields: u64,
    /// Blocks whose cached content was evicted for new content.
    pub evictions: u64,
    /// Times that the oldest sequence had to restart alone because free blocks were scattered.
    pub lone_restarts: u64,
    /// Times that a sequence waited one step for another to compute a prefix unit.
    pub follower_waits: u64,
    /// Times that a sequence computed units itself because their producer had stalled.
    pub takeovers: u64,
    /// Recurrent states kept as checkpoints.
    pub checkpoints: u64,
    /// Recurrent states that were not kept because no slot was free beyond those reserved for sequences.
    pub checkpoints_skipped: u64,
    /// Sequences that were forked from another one.
    pub forks: u64,
    /// Pins removed because a sequence could not have run otherwise, or because rows computed from them had
    /// NaN or infinite values.
    pub pins_lost: u64,
}

/// A sequence that takes part in the next step with its last drawn token, if there is room.
#[derive(Debug, Clone, Copy)]
pub struct Decoding<'a> {
    pub id: SeqId,
    /// Key of its tables in [`super::Scheduler::tables`], which cover all tokens but the last.
    pub slot: SeqSlot,
    /// Prompt and drawn tokens.
    pub tokens: &'a [u32],
    /// Maximum number of draft tokens that this step could verify.
    pub max_draft_tokens: u32,
}

/// Current counts, for reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    pub counters: Counters,
    pub running: usize,
    /// Queued sequences, including preempted ones.
    pub waiting: usize,
    /// Running sequences that waited for prefix units of another one in the last plan.
    pub following: usize,
    /// Prompt tokens of running and queued sequences that are not yet computed or cached.
    pub pending_prefill_tokens: u64,
    /// Bytes of blocks held by live sequences.
    pub kv_used_bytes: u64,
    /// Bytes of the arena that can hold blocks.
    pub kv_total_bytes: u64,
    /// Hash units at which a lookup can end, as announced by events. With recurrent layers, the number of
    /// resume points.
    pub held_units: usize,
    /// Bytes of pinned blocks.
    pub pinned_bytes: u64,
}
