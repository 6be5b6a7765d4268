//! A model over several workers: a replica is an ordered list of stages, each with a layer range.
//!
//! The first stage has the engine: it schedules, and runs its layers as if they were all. What other stages must know
//! of a step goes with the activations from stage to stage (`step.rs`); the last one answers with tokens and logits.
//! Every stage keeps the caches of its own layers under the block tables of the first one: tables name blocks by
//! number, and each stage knows where a number lies in its arena (docs/decisions/0014-share-block-tables-by-number.md).
//!
//! Several steps are under way at once, so that all stages have something to do (`pace.rs`, `later.rs`). The last one
//! draws tokens; all that a draw depends on but the logits comes with the step, so it remembers nothing of a request. What
//! guesses by the model's caches is there too (`guess.rs`): a step asks for guesses behind what is drawn from it.

mod activations;
mod block_server;
mod deadline;
mod draft;
mod executor;
mod handshake;
mod keep_awake;
mod lease;
mod lm_head_share;
mod lm_head_split;
mod microbatch;
mod rank_server;
mod remote_blocks;
mod send_queue;
pub(crate) mod step;
mod wait_policy;

pub(crate) use executor::{PipelineExecutor, Rest, Spent, StepRequest, StepResult};
pub use handshake::{LostStage, Replica};
pub(crate) use lease::{Claims, ReplicaClaim};
pub(crate) use rank_server::{Holds, RankServer};
pub use rank_server::{StageConfig, StageService};

use proto::transport::EndpointConfig;
use std::time::Duration;

/// An endpoint between stages: whoever is gone is noticed within 3 s, because all of a replica waits for each of its
/// stages.
pub(crate) fn attentive(config: EndpointConfig) -> EndpointConfig {
    EndpointConfig {
        idle_timeout: Duration::from_millis(2500),
        keep_alive: Duration::from_millis(500),
        ..config
    }
}
