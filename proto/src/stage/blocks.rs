//! What the first stage of a replica says to another one about the bytes of its cache blocks, on a stream of its own: a
//! [`StageFeed`](super::StageFeed) first, then orders one way and reports back, each answered before the next is sent, if
//! it is answered.
//! Bytes follow orders and reports raw; no codec touches them.

use crate::codec::bounded;
use serde::{Deserialize, Serialize};

/// Blocks of one order at most.
pub const MAX_BLOCKS: usize = 4096;
/// Layers of one stage at most.
const MAX_LAYERS: usize = 4096;

/// From the first stage to another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum StageBlocksOrder {
    /// Send what these blocks hold.
    Read(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_BLOCKS>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_BLOCKS>"
        )]
        Vec<StageBlock>,
    ),
    /// Fill these blocks: their bytes follow, block by block.
    Write(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_BLOCKS>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_BLOCKS>"
        )]
        Vec<StageBlock>,
    ),
    /// Send the recurrent states in this slot as numbers.
    States(u32),
    /// What is ordered next is of the blocks as they are once
    /// [`StageCounted`](super::StageCounted) of this step, which is on its way, has been obeyed. Not answered.
    Behind(u64),
}

/// A block of a stage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageBlock {
    pub group: u32,
    /// Its number in the group.
    pub number: u32,
}

/// From a stage to the first one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum StageBlocksReport {
    /// So many bytes follow: what the blocks hold, one behind the other.
    Read(u64),
    Written,
    /// The states follow: of each of these layers the convolution's inputs, then the recurrent state, f32 little
    /// endian.
    States(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_LAYERS>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_LAYERS>"
        )]
        Vec<StageLayerState>,
    ),
    /// It cannot be done; nothing follows.
    Failed(String),
}

/// Shapes of one layer's state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageLayerState {
    /// The layer, counted over the whole model.
    pub layer: u32,
    /// Channels and taps of the convolution's inputs.
    pub conv: [u32; 2],
    /// Heads, rows and columns of the recurrent state.
    pub recurrent: [u32; 3],
}
