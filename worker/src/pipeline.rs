//! Runs a model on several workers. A replica is an ordered list of stages, each with a layer range.
//!
//! The first stage runs the engine and schedules as if all layers were local. A step travels with its
//! activations from stage to stage (`step.rs`); the last stage returns tokens and logits. Each stage keeps
//! the caches of its own layers. Block tables name blocks by number, and each stage maps a number to an
//! offset in its arena (docs/decisions/0014-share-block-tables-by-number.md).
//!
//! Several steps are in the pipeline at once so that all stages are busy (`microbatch.rs`, `downstream_ranks.rs`).
//! The last stage samples. It keeps no state of a request: a step carries all that sampling needs besides the
//! logits. Drafters that read the model's caches also run there (`draft.rs`), when a step requests draft
//! tokens. The later stages' side is the [`rank_server`](crate::rank_server).

pub(crate) mod activations;
mod deadline;
mod downstream_ranks;
pub(crate) mod draft;
mod executor;
pub(crate) mod handshake;
mod keep_awake;
mod lease;
mod lm_head_share;
mod lm_head_split;
mod microbatch;
mod ranges;
mod remote_blocks;
pub(crate) mod send_queue;
pub(crate) mod step;
pub(crate) mod wait_policy;

pub(crate) use downstream_ranks::DownstreamRanks;
pub(crate) use executor::PipelineExecutor;
pub use handshake::{LostStage, Replica};
pub(crate) use lease::{Claims, ReplicaClaim};
pub(crate) use ranges::{LastStageDrafter, stage_ranges};

use std::time::Duration;
use transport::EndpointConfig;

/// Configures an endpoint between stages. A lost peer is noticed within 3 s, because every stage of a replica
/// waits for all others.
pub(crate) fn attentive(config: EndpointConfig) -> EndpointConfig {
    EndpointConfig {
        idle_timeout: Duration::from_millis(2500),
        keep_alive: Duration::from_millis(500),
        ..config
    }
}
