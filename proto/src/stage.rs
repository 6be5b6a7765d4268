//! What the stages of a replica say to each other. A replica is a model's layers over several workers; its first stage
//! leads.
//!
//! The first stage opens one control stream to every other stage: [`StageOrder`]s go one way, [`StageReport`]s come
//! back. Activations flow from each stage to the next on a stream of one direction: a [`StageFeed`] first, then for
//! every step a [`StageStep`] and behind it the residual stream, which no codec touches. What the last stage has drawn
//! it reports on its control stream.
//!
//! Cache blocks have numbers that mean the same block on every stage, whatever a block's size is there.

use crate::codec::bounded;
use crate::ids::NodeId;
use serde::{Deserialize, Serialize};

/// Sequences of one step at most.
const MAX_SEQUENCES: usize = 4096;
/// Groups of layers whose caches live and die together, at most.
const MAX_GROUPS: usize = 8;
/// States of one sequence that one step keeps besides its last.
const MAX_EXPORTS: usize = 4096;
/// Blocks copied before one step.
const MAX_COPIES: usize = 65_536;

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
    Join(StageJoinV1),
    /// Second, once all have loaded: lay out the caches, and connect to the next stage.
    Begin(StageBeginV1),
}

/// See [`StageOrder::Join`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageJoinV1 {
    /// The replica.
    pub replica: ReplicaId,
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
    pub next: Option<StageAddressV1>,
}

/// Where a stage is reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageAddressV1 {
    /// The worker; its certificate must say so.
    pub node: NodeId,
    /// `ip:port`.
    pub quic: String,
}

/// See [`StageOrder::Begin`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageBeginV1 {
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum StageReport {
    /// The range is loaded.
    Joined(StageJoinedV1),
    /// Caches are laid out, and the next stage is connected: steps may come.
    Ready,
    /// From the last stage: what a step came to. `rows` rows of logits follow the frame, f32 little endian.
    Drawn(StageDrawnV1),
    /// The stage has given up the replica.
    Failed(StageFailure),
}

/// See [`StageReport::Joined`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageJoinedV1 {
    /// Bytes of a block of each group, over the layers of the range: 0 where it holds none of the group.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_GROUPS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_GROUPS>"
    )]
    pub block_bytes: Vec<u64>,
}

/// See [`StageReport::Drawn`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageDrawnV1 {
    /// The step.
    pub step: u64,
    /// The most likely token of each row of [`StageStepV1::argmax`].
    pub tokens: Vec<u32>,
    /// Rows of logits that follow: those of [`StageStepV1::logits`].
    pub rows: u32,
}

/// Why a stage does not take part, or no longer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum StageFailure {
    /// It would compute other bits.
    #[error("it computes in another numeric class: {class}")]
    OtherClass {
        /// Its own.
        class: String,
    },
    /// It is part of another replica.
    #[error("it is part of another replica")]
    Busy,
    /// The range is none of its model's, or cannot be cut out there.
    #[error("it cannot hold these layers")]
    Layers,
    /// Weights or caches do not fit, or the file is not usable.
    #[error("it cannot load them: {reason}")]
    Load {
        /// Why.
        reason: String,
    },
    /// The stage before or behind it is gone.
    #[error("it has lost its neighbour: {reason}")]
    Neighbour {
        /// Why.
        reason: String,
    },
    /// A step could not be computed.
    #[error("a step failed: {reason}")]
    Step {
        /// Why.
        reason: String,
    },
    /// It stops.
    #[error("it stops")]
    Stops,
    /// The file, whose digest is the one asked for, is no model that can be loaded: nor will it be elsewhere.
    #[error("its file cannot be loaded: {reason}")]
    BadFile {
        /// Why.
        reason: String,
    },
}

/// The head of a stream of activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StageFeed {
    /// First version.
    V1(StageFeedV1),
}

/// See [`StageFeed`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageFeedV1 {
    /// The replica that they belong to.
    pub replica: ReplicaId,
}

/// What a stage must know of a step. The residual stream of all rows follows the frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum StageStep {
    /// First version.
    V1(StageStepV1),
}

/// See [`StageStep`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageStepV1 {
    /// Its number, from 1.
    pub step: u64,
    /// Token of each row.
    pub tokens: Vec<u32>,
    /// Whose rows they are, in the order of the rows.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_SEQUENCES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_SEQUENCES>"
    )]
    pub sequences: Vec<StageSequenceV1>,
    /// Blocks to copy first, in order.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_COPIES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_COPIES>"
    )]
    pub copies: Vec<StageCopyV1>,
    /// Rows of which the last stage names the most likely token.
    pub argmax: Vec<u32>,
    /// Rows of which it sends the logits.
    pub logits: Vec<u32>,
}

/// One sequence's part of a step.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageSequenceV1 {
    /// How many rows.
    pub rows: u32,
    /// Positions before the first of them.
    pub context: u32,
    /// Its blocks in each group of keys and values.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_GROUPS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_GROUPS>"
    )]
    pub tables: Vec<StageTableV1>,
    /// What becomes of its recurrent state; none without recurrent layers.
    pub state: Option<StageStateV1>,
}

/// A block table: entry i serves the positions from i times the block's length on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageTableV1 {
    /// Entries in front that no row can look at any more.
    pub skipped: u32,
    /// Numbers of the blocks behind them.
    pub blocks: Vec<u32>,
}

/// What a step does with one sequence's recurrent state. Slots are block numbers of the group of states.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageStateV1 {
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
}

/// A block copied to another of its group before a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageCopyV1 {
    /// The group.
    pub group: u32,
    /// Number of the block read.
    pub from: u32,
    /// Number of the block written.
    pub to: u32,
}
