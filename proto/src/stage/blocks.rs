//! Messages about the contents of a stage's cache blocks, between the first stage of a replica and another
//! stage, on their own stream. A [`StageFeed`](super::StageFeed) comes first, then orders to the stage and
//! reports back. The first stage waits for the report of an order, if it has one, before it sends the next.
//! Block contents follow orders and reports as raw bytes.

use crate::codec::bounded;
use serde::{Deserialize, Serialize};

/// Most blocks of one order.
pub const MAX_BLOCKS: usize = 4096;
/// Most layers of one stage.
const MAX_LAYERS: usize = 4096;

/// Orders of the first stage to another stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum StageBlocksOrder {
    /// Send the contents of these blocks.
    Read(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_BLOCKS>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_BLOCKS>"
        )]
        Vec<StageBlock>,
    ),
    /// Overwrite these blocks. Their contents follow, block by block.
    Write(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_BLOCKS>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_BLOCKS>"
        )]
        Vec<StageBlock>,
    ),
    /// Send the recurrent states in this slot as numbers.
    States(u32),
    /// The following orders refer to the blocks after [`StageCounted`](super::StageCounted) of this step,
    /// which is on its way, has been applied. Has no report.
    Behind(u64),
}

/// A block of a stage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageBlock {
    pub group: u32,
    /// Block number in the group.
    pub number: u32,
}

/// Reports of a stage to the first stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum StageBlocksReport {
    /// The contents of the blocks follow, one after the other: this number of bytes in total.
    Read(u64),
    Written,
    /// The states follow. For each of these layers: first the inputs of the convolution, then the recurrent
    /// state, f32 little endian.
    States(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_LAYERS>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_LAYERS>"
        )]
        Vec<StageLayerState>,
    ),
    /// The order failed; no bytes follow.
    Failed(String),
}

/// Shapes of one layer's state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageLayerState {
    /// Index of the layer in the whole model.
    pub layer: u32,
    /// `[channels, taps]` of the convolution's inputs.
    pub conv: [u32; 2],
    /// `[heads, rows, columns]` of the recurrent state.
    pub recurrent: [u32; 3],
}
