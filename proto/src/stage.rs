//! What the stages of a replica say to each other. A replica is a model's layers over several workers; its first stage
//! leads.
//!
//! The first stage opens one control stream to every other stage: [`StageOrder`]s go one way, [`StageReport`]s come
//! back. Activations flow from each stage to the next on a stream of one direction: a [`StageFeed`] first, then for
//! every step a [`StageFrame`] and behind it the residual stream, which no codec touches. What the last stage has drawn
//! it reports on its control stream; which rows of guesses count the first stage says on the stream of the steps, so that
//! every stage hears it in front of whatever builds on it. What blocks hold is read and filled on a third stream
//! ([`blocks`]).
//!
//! Cache blocks have numbers that mean the same block on every stage, whatever a block's size is there.

use crate::codec::bounded;
use crate::ids::NodeId;
use crate::message::{Sampling, TokenLogprobs};
use crate::trace::TraceContext;
use serde::{Deserialize, Serialize};

pub mod blocks;

/// Sequences of one step at most.
const MAX_SEQUENCES: usize = 4096;
/// Groups of layers whose caches live and die together, at most.
const MAX_GROUPS: usize = 8;
/// States of one sequence that one step keeps besides its last.
const MAX_EXPORTS: usize = 4096;
/// Blocks copied before one step.
const MAX_COPIES: usize = 65_536;
/// Stages of one replica at most.
const MAX_STAGES: usize = 1024;
/// Recorded requests that one step tells of at most.
pub const MAX_TRACES: usize = 64;
/// Guesses of one sequence behind one step at most.
pub const MAX_GUESSES: usize = 64;

/// Element type of activations between stages. `F32` changes no bit; `Bf16` halves the bytes and is part of the
/// numeric class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ActivationType {
    /// IEEE single precision, little endian.
    F32,
    /// Brain floats, little endian, rounded to nearest even.
    Bf16,
}

impl ActivationType {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// Names a replica among those that a worker has heard of: made up by its first stage, unlike that of any other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ReplicaId(pub [u8; 16]);

/// From the first stage to another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum StageOrder {
    /// First: load this range.
    Join(StageJoin),
    /// Second, once all have loaded: lay out the caches, and connect to the next stage.
    Begin(StageBegin),
    /// At any time after that: report [`StageReport::Progress`].
    TellProgress,
}

/// See [`StageOrder::Join`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageJoin {
    pub replica: ReplicaId,
    /// Digest of the model, for a stage that has no file of it.
    pub model_digest: [u8; 32],
    /// First layer, and the one behind the last.
    pub layers: (u32, u32),
    /// All that decides a result's bits, in words: model, instruction set, weight path, types of KV and states. A stage
    /// that would compute otherwise refuses.
    pub class: String,
    /// Rows of the largest step.
    pub max_rows: u32,
    /// Positions of a cache block.
    pub block_tokens: u32,
    /// How activations arrive and leave.
    pub activations: ActivationType,
    /// Where they go; none for the last stage.
    pub next: Option<StageAddress>,
    /// Who guesses beside the last layer; none for the other stages.
    pub drafter: Option<StageDrafter>,
}

/// Who guesses at the last stage what is drawn next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StageDrafter {
    /// A drafter that reads the caches of some layers, all of them the last stage's.
    Assistant { digest: [u8; 32] },
    /// The block behind the model's last layer, in its own file.
    Appended {
        /// Sequences that it guesses for at a time.
        sequences: u32,
    },
}

/// Where a stage is reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageAddress {
    /// The worker; its certificate must say so.
    pub node: NodeId,
    /// `ip:port`.
    pub quic: String,
}

/// See [`StageOrder::Begin`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageBegin {
    /// Slabs that every stage's arena is cut into.
    pub slabs: u32,
    /// Blocks of each group that a slab holds.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_GROUPS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_GROUPS>"
    )]
    pub blocks_per_slab: Vec<u32>,
}

/// From a stage to the first one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum StageReport {
    Joined(StageJoined),
    /// Caches are laid out, and the next stage is connected: steps may come.
    Ready,
    /// From the last stage: what a step came to. `rows` rows of logits follow the frame, then the returned rows, f32 little
    /// endian.
    Drawn(StageDrawn),
    /// The stage has given up the replica.
    Failed(StageFailure),
    /// How far the stage is, because it was asked.
    Progress(StageProgressReport),
    /// From the last stage, behind the report of a step that asks for it: of the row that went back, the logits of the
    /// tokens from [`StageHead::from`] on follow the frame, f32 little endian, or it says the largest of them.
    Rest(StageRest),
}

/// See [`StageReport::Rest`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct StageRest {
    pub step: u64,
    pub logits: u32,
    /// The token of the largest logit, and that, where nothing else is wanted.
    pub best: Option<(u32, f32)>,
    /// Microseconds that they took.
    pub computed_us: u32,
}

/// See [`StageReport::Joined`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageJoined {
    /// Bytes of a block of each group, over the layers of the range: 0 where it holds none of the group.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_GROUPS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_GROUPS>"
    )]
    pub block_bytes: Vec<u64>,
}

/// See [`StageReport::Drawn`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StageDrawn {
    pub step: u64,
    /// The most likely token of each row of [`StageStep::argmax`]; [`u32::MAX`] where the row holds NaN or infinity.
    pub tokens: Vec<u32>,
    /// Rows of logits that follow: those of [`StageStep::logits`].
    pub rows: u32,
    /// What was drawn for each of [`StageStep::samples`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_SEQUENCES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_SEQUENCES>"
    )]
    pub samples: Vec<StageSampled>,
    /// Rows of the residual stream that follow the logits: those of [`StageStep::returned`].
    pub returned: u32,
    /// What each stage but the first has spent on the step, in their order.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_STAGES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_STAGES>"
    )]
    pub spent: Vec<StageSpent>,
    /// For each of [`StageStep::guesses`] what will probably be drawn next; fewer tokens than asked for, or none, where
    /// no more could be made.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_SEQUENCES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_SEQUENCES>"
    )]
    pub guessed: Vec<StageGuessed>,
    /// Microseconds that guessing took, part of what the last stage has spent.
    pub guessing_us: u32,
}

/// What a sequence will probably draw.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageGuessed {
    /// The tokens, each behind those before it.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_GUESSES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_GUESSES>"
    )]
    pub tokens: Vec<u32>,
}

/// A token that a stage has drawn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageSampled {
    /// The token; [`u32::MAX`] where the row holds NaN or infinity.
    pub token: u32,
    /// Its log-probability and those of the best others, if they were asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// What a stage has spent on a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageSpent {
    /// Microseconds without work, before the step had arrived.
    pub stalled_us: u32,
    /// Microseconds from then until it was computed.
    pub computed_us: u32,
    /// Bytes received for it.
    pub received: u64,
}

/// See [`StageReport::Progress`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageProgressReport {
    /// The last step that it has computed; 0 is none.
    pub done: u64,
    /// The step that it computes; 0 is none.
    pub computes: u64,
    /// For how many microseconds already.
    pub for_us: u64,
}

/// Why a stage does not take part, or no longer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum StageFailure {
    /// It would compute other bits.
    #[error("it computes in another numeric class: {class}")]
    OtherClass { class: String },
    /// It is part of another replica.
    #[error("it is part of another replica")]
    Busy,
    /// The range is none of its model's, or cannot be cut out there.
    #[error("it cannot hold these layers")]
    Layers,
    /// Weights or caches do not fit, or the file is not usable.
    #[error("it cannot load them: {reason}")]
    Load { reason: String },
    /// The stage before or behind it is gone.
    #[error("it has lost its neighbour: {reason}")]
    Neighbour { reason: String },
    /// A step could not be computed.
    #[error("a step failed: {reason}")]
    Step { reason: String },
    #[error("it stops")]
    Stops,
    /// The file, whose digest is the one asked for, is no model that can be loaded: nor will it be elsewhere.
    #[error("its file cannot be loaded: {reason}")]
    BadFile { reason: String },
}

/// The head of a stream of activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageFeed {
    /// The replica that they belong to.
    pub replica: ReplicaId,
}

/// What travels from a stage to the next.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum StageFrame {
    /// A step. The residual stream of all rows follows the frame.
    Step(StageStep),
    /// Which rows of a step before it count. Nothing follows.
    Counted(StageCounted),
}

impl StageFrame {
    /// Rows of the residual stream that follow.
    pub fn rows(&self) -> usize {
        match self {
            Self::Step(step) => step.tokens.len(),
            Self::Counted(_) => 0,
        }
    }
}

/// How many rows count of each sequence of a step whose state was [`StageState::deferred`], in their order: its state
/// after these goes where the step has said. Said once for each step that defers any, in the order of the steps.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageCounted {
    pub step: u64,
    /// The rows of each.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_SEQUENCES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_SEQUENCES>"
    )]
    pub rows: Vec<u32>,
}

/// Logits that the first and the last stage compute together: [`StageStep::returned`] is one row, of which the first stage
/// computes the logits of the tokens before `from`, and the last one those of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageHead {
    /// The last stage's first token; below the vocabulary's size.
    pub from: u32,
    /// Whether nothing but the largest logit is wanted of its part.
    pub best: bool,
}

/// Guesses that are asked for of a sequence. A row counts if the token behind it is the one drawn from it, and the last that
/// counts is the one that the guesses follow; each row from `first` on is drawn from at the last stage, once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageGuess {
    /// Which of [`StageStep::sequences`].
    pub sequence: u32,
    /// Its first row that is drawn from, counted from the step's first.
    pub first: u32,
    pub most: u32,
}

/// A token to be drawn: everything that the draw depends on, so that whoever draws need remember nothing.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StageSample {
    /// The row.
    pub row: u32,
    pub sampling: Sampling,
    /// Tokens drawn before.
    pub drawn: u32,
    /// Tokens that must not be drawn.
    pub barred: Vec<u32>,
    /// Tokens of the prompt, each once; only where penalties ask for them.
    pub prompt: Vec<u32>,
    /// Tokens of the output and how often each; only where penalties ask for them.
    pub counts: Vec<(u32, u32)>,
}

/// What a stage must know of a step. Each row of logits is used at one place only: in `argmax` or `logits`, by a sample,
/// or by the stage that gets it back.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StageStep {
    /// Its number, from 1.
    pub step: u64,
    /// Token of each row.
    pub tokens: Vec<u32>,
    /// Whose rows they are, in the order of the rows.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_SEQUENCES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_SEQUENCES>"
    )]
    pub sequences: Vec<StageSequence>,
    /// Blocks to copy first, in order.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_COPIES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_COPIES>"
    )]
    pub copies: Vec<StageCopy>,
    /// Rows of which the last stage names the most likely token.
    pub argmax: Vec<u32>,
    /// Rows of which it sends the logits.
    pub logits: Vec<u32>,
    /// Tokens that the last stage draws.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_SEQUENCES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_SEQUENCES>"
    )]
    pub samples: Vec<StageSample>,
    /// Rows of the residual stream behind the last layer that the first stage gets back, to compute their logits
    /// itself.
    pub returned: Vec<u32>,
    /// What the stages so far have spent on it, the first one left out.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_STAGES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_STAGES>"
    )]
    pub spent: Vec<StageSpent>,
    /// The spans, of requests that are recorded, that it is below of.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_TRACES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_TRACES>"
    )]
    pub traces: Vec<TraceContext>,
    /// Sequences, ascending, for which the last stage guesses what comes behind what it has drawn.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_SEQUENCES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_SEQUENCES>"
    )]
    pub guesses: Vec<StageGuess>,
    /// A head that two stages share; none where each row's logits are computed at one.
    pub head: Option<StageHead>,
}

/// One sequence's part of a step.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageSequence {
    /// How many rows.
    pub rows: u32,
    /// Positions before the first of them.
    pub context: u32,
    /// Its blocks in each group of keys and values.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_GROUPS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_GROUPS>"
    )]
    pub tables: Vec<StageTable>,
    /// What becomes of its recurrent state; none without recurrent layers.
    pub state: Option<StageState>,
}

/// A block table: entry i serves the positions from i times the block's length on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageTable {
    /// Entries in front that no row can look at any more.
    pub skipped: u32,
    /// Numbers of the blocks behind them.
    pub blocks: Vec<u32>,
}

/// What a step does with one sequence's recurrent state. Slots are block numbers of the group of states.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageState {
    /// The state before the first row; none for zeros.
    pub read: Option<u32>,
    /// Where the state after the last row goes.
    pub write: u32,
    /// (row, slot): further states kept, rows counted from the sequence's first.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_EXPORTS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_EXPORTS>"
    )]
    pub exports: Vec<(u32, u32)>,
    /// Nothing is written before [`StageFrame::Counted`] says how many of the rows count: all but the first are guesses.
    pub deferred: bool,
}

/// A block copied to another of its group before a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageCopy {
    pub group: u32,
    /// Number of the block read.
    pub from: u32,
    /// Number of the block written.
    pub to: u32,
}
