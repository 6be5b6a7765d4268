//! Messages between the stages of a replica. A replica is a model's layers spread over several workers; its
//! first stage leads.
//!
//! The first stage opens one control stream to every other stage. [`StageOrder`]s go to the stage,
//! [`StageReport`]s come back. Activations flow from each stage to the next on a unidirectional stream:
//! first a [`StageFeed`], then for every step a [`StageFrame`] and the residual stream of its rows as raw
//! bytes. The last stage reports drawn tokens on its control stream. The first stage sends the number of
//! accepted draft rows on the stream of the steps, so that every stage receives it before any step that
//! depends on it. Cache blocks are read and written on a third stream ([`blocks`]).
//!
//! A block number means the same block on every stage, whatever the block's size in bytes is there.

use crate::codec::bounded;
use crate::ids::NodeId;
use crate::message::{Sampling, TokenLogprobs};
use crate::trace::TraceContext;
use serde::{Deserialize, Serialize};

pub mod blocks;

/// Most sequences of one step.
const MAX_SEQUENCES: usize = 4096;
/// Most layer groups. The caches of a group are allocated and freed together.
const MAX_GROUPS: usize = 8;
/// Most states of one sequence that one step keeps besides the last.
const MAX_EXPORTS: usize = 4096;
/// Most blocks that are copied before one step.
const MAX_COPIES: usize = 65_536;
/// Most stages of one replica.
const MAX_STAGES: usize = 1024;
/// Most recorded requests that one step lists.
pub const MAX_TRACES: usize = 64;
/// Most draft tokens of one sequence after one step.
pub const MAX_STAGE_DRAFT_TOKENS: usize = 64;

/// Element type of activations between stages. `F32` is exact; `Bf16` halves the bytes and is part of the
/// numeric class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ActivationType {
    /// IEEE single precision, little endian.
    F32,
    /// bfloat16, little endian, rounded to nearest even.
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

/// Unique id of a replica, chosen by its first stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ReplicaId(pub [u8; 16]);

/// Orders of the first stage to another stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum StageOrder {
    /// First order: load this layer range.
    Join(StageJoin),
    /// Second order, once all stages have loaded: allocate the caches and connect to the next stage.
    Begin(StageBegin),
    /// At any time after `Begin`: report [`StageReport::Progress`].
    TellProgress,
    /// Before `Begin`, once the stage has joined: load its layers' part of an adapter. Sent only for a model with
    /// adapters.
    Adapter(StageAdapter),
}

/// See [`StageOrder::Adapter`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageAdapter {
    /// Names it in [`StageAdapters`].
    pub number: u32,
    /// Folder on the stage's host.
    pub path: String,
    /// Must be that of the files in the folder.
    pub digest: [u8; 32],
}

/// See [`StageOrder::Join`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageJoin {
    pub replica: ReplicaId,
    /// Digest of the model, for a stage that has no file of the model.
    pub model_digest: [u8; 32],
    /// Layer range `[first, last)`.
    pub layers: (u32, u32),
    /// Everything that decides a result's bits, as text: model, instruction set, weight path, types of KV
    /// and states. A stage of another class refuses.
    pub class: String,
    /// Most rows of a step.
    pub max_rows: u32,
    /// Positions per cache block.
    pub block_tokens: u32,
    /// Element type of incoming and outgoing activations.
    pub activations: ActivationType,
    /// Stage that receives the activations. `None` for the last stage.
    pub next: Option<StageAddress>,
    /// Drafter that runs at the last stage. `None` for the other stages.
    pub drafter: Option<StageDrafter>,
}

/// Drafter of the last stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StageDrafter {
    /// A drafter that reads the caches of some layers. The last stage holds all of these layers.
    Assistant { digest: [u8; 32] },
    /// The MTP head behind the model's last layer, in the model's own file.
    MtpHead {
        /// Most sequences that are drafted for at once.
        sequences: u32,
    },
}

/// Address of a stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageAddress {
    /// The worker. Its certificate must carry this id.
    pub node: NodeId,
    /// `ip:port`.
    pub quic: String,
}

/// See [`StageOrder::Begin`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageBegin {
    /// Number of slabs in every stage's arena.
    pub slabs: u32,
    /// Blocks per slab, for each group.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_GROUPS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_GROUPS>"
    )]
    pub blocks_per_slab: Vec<u32>,
}

/// Reports of a stage to the first stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum StageReport {
    Joined(StageJoined),
    /// The caches are allocated and the next stage is connected. Steps may follow.
    Ready,
    /// From the last stage: results of a step. After the frame follow `rows` rows of logits and then the
    /// returned rows, f32 little endian.
    Drawn(StageDrawn),
    /// The stage has left the replica.
    Failed(StageFailure),
    /// Reply to [`StageOrder::TellProgress`].
    Progress(StageProgressReport),
    /// From the last stage, after the report of a step that has a [`StageHead`]: the last stage's part of
    /// the logits of the returned row. The logits of the tokens from [`StageHead::from`] on follow the
    /// frame, f32 little endian, or the frame holds only the largest of them.
    Rest(StageRest),
    /// Reply to [`StageOrder::Adapter`].
    AdapterLoaded,
}

/// See [`StageReport::Rest`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct StageRest {
    pub step: u64,
    pub logits: u32,
    /// (token, logit) of the largest logit, if only that was requested.
    pub best: Option<(u32, f32)>,
    /// Microseconds spent on computing the logits.
    pub computed_us: u32,
}

/// See [`StageReport::Joined`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageJoined {
    /// Bytes of a block of each group, over the layers of this stage; 0 if the stage holds no layer of the
    /// group.
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
    /// Most likely token of each row of [`StageStep::argmax`]; [`u32::MAX`] if the row holds NaN or
    /// infinity.
    pub tokens: Vec<u32>,
    /// Rows of logits after this frame: those of [`StageStep::logits`].
    pub rows: u32,
    /// Token drawn for each of [`StageStep::samples`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_SEQUENCES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_SEQUENCES>"
    )]
    pub samples: Vec<StageSampled>,
    /// Rows of the residual stream after the logits: those of [`StageStep::returned`].
    pub returned: u32,
    /// Time and bytes of each stage but the first for this step, in stage order.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_STAGES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_STAGES>"
    )]
    pub spent: Vec<StageSpent>,
    /// Draft tokens for each of [`StageStep::draft_requests`]. A sequence may get fewer tokens than requested, or
    /// none.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_SEQUENCES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_SEQUENCES>"
    )]
    pub drafted: Vec<StageDraftTokens>,
    /// Microseconds spent on drafting; included in the last stage's computing time.
    pub drafting_us: u32,
}

/// Draft tokens of one sequence.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageDraftTokens {
    /// In order; each token follows the ones before it.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_STAGE_DRAFT_TOKENS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_STAGE_DRAFT_TOKENS>"
    )]
    pub tokens: Vec<u32>,
}

/// A token drawn by a stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageSampled {
    /// [`u32::MAX`] if the row holds NaN or infinity.
    pub token: u32,
    /// Log-probability of the token and of the best alternatives, if requested.
    pub logprobs: Option<TokenLogprobs>,
}

/// Time and bytes that a stage spent on a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageSpent {
    /// Microseconds without work before the step had arrived.
    pub stalled_us: u32,
    /// Microseconds from the step's arrival until it was computed.
    pub computed_us: u32,
    /// Bytes received for the step.
    pub received: u64,
}

/// See [`StageReport::Progress`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageProgressReport {
    /// Last step that the stage has computed; 0 if none.
    pub done: u64,
    /// Step that the stage is computing; 0 if none.
    pub computes: u64,
    /// Microseconds since that computation began.
    pub for_us: u64,
}

/// Reason why a stage does not join a replica, or leaves it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum StageFailure {
    /// The stage would compute results with other bits.
    #[error("the stage has another numeric class: {class}")]
    OtherClass { class: String },
    /// The stage belongs to another replica.
    #[error("the stage is part of another replica")]
    Busy,
    /// The layer range does not exist in the model, or the model cannot be cut there.
    #[error("the stage has no room for these layers")]
    Layers,
    /// Weights or caches do not fit, or the file is unusable.
    #[error("the stage cannot load its layers: {reason}")]
    Load { reason: String },
    /// The previous or the next stage is lost.
    #[error("the stage has lost the connection to its neighbour: {reason}")]
    Neighbour { reason: String },
    /// A step could not be computed.
    #[error("a step failed: {reason}")]
    Step { reason: String },
    #[error("the stage is stopping")]
    Stops,
    /// The file has the requested digest and cannot be loaded as a model. It will not load on another
    /// worker either.
    #[error("the stage cannot load its model file: {reason}")]
    BadFile { reason: String },
}

/// First frame of an activation stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageFeed {
    /// Replica that the activations belong to.
    pub replica: ReplicaId,
}

/// Frames from one stage to the next.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[expect(clippy::large_enum_variant, reason = "nearly all frames are steps")]
pub enum StageFrame {
    /// A step. The residual stream of all its rows follows the frame.
    Step(StageStep),
    /// Accepted rows of an earlier step. Nothing follows the frame.
    Counted(StageCounted),
    /// Adapters of rows of the next step. Nothing follows the frame.
    Adapters(StageAdapters),
    /// No later step uses the adapter with this number. Nothing follows the frame.
    AdapterUnloaded(u32),
}

impl StageFrame {
    /// Number of residual-stream rows that follow the frame.
    pub fn rows(&self) -> usize {
        match self {
            Self::Step(step) => step.tokens.len(),
            Self::Counted(_) | Self::Adapters(_) | Self::AdapterUnloaded(_) => 0,
        }
    }
}

/// Number of accepted rows for each sequence of a step whose state update was [`StageState::deferred`], in
/// the order of the sequences. The state after these rows is written to the slot that the step named. Sent
/// once for each step with a deferred update, in the order of the steps.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageCounted {
    pub step: u64,
    /// Accepted rows of each sequence.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_SEQUENCES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_SEQUENCES>"
    )]
    pub rows: Vec<u32>,
}

/// See [`StageFrame::Adapters`]. Rows that are not listed have none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageAdapters {
    /// (first row, row behind the last one, number of the adapter).
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_SEQUENCES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_SEQUENCES>"
    )]
    pub rows: Vec<(u32, u32, u32)>,
}

/// Vocabulary-parallel head: the first and the last stage together compute the logits of one row, which is
/// [`StageStep::returned`]. The first stage computes the logits of the tokens before `from`, the last stage
/// those of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageHead {
    /// First token of the last stage's part; less than the vocabulary's size.
    pub from: u32,
    /// Whether the last stage returns only its largest logit.
    pub best: bool,
}

/// Request for draft tokens of one sequence. A row is accepted if the token after it equals the token drawn
/// from it. The draft follows the last accepted row. The last stage draws from each row from `first` on,
/// once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageDraftRequest {
    /// Index into [`StageStep::sequences`].
    pub sequence: u32,
    /// First row that a token is drawn from, counted from the step's first row.
    pub first: u32,
    pub most: u32,
}

/// A token to draw, with everything that the draw depends on, so that the drawing stage keeps no sampling
/// state.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StageSample {
    pub row: u32,
    pub sampling: Sampling,
    /// Number of tokens drawn before.
    pub drawn: u32,
    /// Tokens that must not be drawn.
    pub barred: Vec<u32>,
    /// Distinct tokens of the prompt. Sent only if a penalty needs them.
    pub prompt: Vec<u32>,
    /// (token, count) of the output's tokens. Sent only if a penalty needs them.
    pub counts: Vec<(u32, u32)>,
}

/// Step of a replica, as every stage receives it. Each row of logits has one use: `argmax`, `logits`, a
/// sample, or a return to the first stage.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StageStep {
    /// Number of the step, from 1.
    pub step: u64,
    /// Token of each row.
    pub tokens: Vec<u32>,
    /// Sequences that the rows belong to, in the order of the rows.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_SEQUENCES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_SEQUENCES>"
    )]
    pub sequences: Vec<StageSequence>,
    /// Blocks to copy before the step, in order.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_COPIES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_COPIES>"
    )]
    pub copies: Vec<StageCopy>,
    /// Rows whose most likely token the last stage reports.
    pub argmax: Vec<u32>,
    /// Rows whose logits the last stage sends.
    pub logits: Vec<u32>,
    /// Tokens that the last stage draws.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_SEQUENCES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_SEQUENCES>"
    )]
    pub samples: Vec<StageSample>,
    /// Rows whose residual stream after the last layer goes back to the first stage, which computes their
    /// logits itself.
    pub returned: Vec<u32>,
    /// Time and bytes of the stages so far, without the first.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_STAGES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_STAGES>"
    )]
    pub spent: Vec<StageSpent>,
    /// Spans of recorded requests that the step's spans are children of.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_TRACES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_TRACES>"
    )]
    pub traces: Vec<TraceContext>,
    /// Sequences, ascending, for which the last stage drafts tokens after the ones that it has drawn.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_SEQUENCES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_SEQUENCES>"
    )]
    pub draft_requests: Vec<StageDraftRequest>,
    /// Vocabulary-parallel head of two stages. `None` if one stage computes all logits of each row.
    pub head: Option<StageHead>,
}

/// Part of a step that belongs to one sequence.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageSequence {
    /// Number of rows.
    pub rows: u32,
    /// Positions before the first row.
    pub context: u32,
    /// Block table of the sequence in each cache group.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_GROUPS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_GROUPS>"
    )]
    pub tables: Vec<StageTable>,
    /// Update of the recurrent state. `None` without recurrent layers.
    pub state: Option<StageState>,
}

/// Block table. Entry `i` holds the positions from `i` times the block's length on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageTable {
    /// Leading entries that no row can attend to any more.
    pub skipped: u32,
    /// Block numbers of the entries after the skipped ones.
    pub blocks: Vec<u32>,
}

/// Update of one sequence's recurrent state in a step. Slots are block numbers of the state group.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageState {
    /// Slot of the state before the first row. `None` starts from zeros.
    pub read: Option<u32>,
    /// Slot for the state after the last row.
    pub write: u32,
    /// (row, slot): further states to keep. Rows count from the sequence's first.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_EXPORTS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_EXPORTS>"
    )]
    pub exports: Vec<(u32, u32)>,
    /// If set, nothing is written until [`StageFrame::Counted`] gives the number of accepted rows. All rows
    /// but the first are draft tokens.
    pub deferred: bool,
}

/// A block that is copied to another block of its group before a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageCopy {
    pub group: u32,
    /// Source block number.
    pub from: u32,
    /// Destination block number.
    pub to: u32,
}
