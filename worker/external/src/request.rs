//! A generation as an engine of another project receives it, and the events of its answer.

use proto::block::BlockId;
use proto::message::{FinishReason, GrammarSpec, Sampling, Stop, TokenIds, TokenLogprobs};

/// One generation.
#[derive(Debug, Clone, Default)]
pub struct EngineRequest {
    /// Sent as token ids. Not empty.
    pub prompt: TokenIds,
    pub sampling: Sampling,
    /// Stop strings are applied by the engine to its own text. Token ids of a matched stop string are part of
    /// the answer.
    pub stop: Stop,
    pub grammar: Option<GrammarSpec>,
    /// The client relies on the seed: equal requests must have equal answers.
    pub reproducible: bool,
    /// The tenant's root. Prompts of two roots never share cached blocks; see [`salt_of`](crate::salt_of).
    pub root: Option<BlockId>,
    /// Lower values first; 0 is the default.
    pub priority: i32,
    /// The slot of a llama-server. `None` lets the server choose.
    pub slot: Option<SlotChoice>,
}

/// The slot of a llama-server that a request uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotChoice {
    pub id: u32,
    /// Whether tokens that the slot holds may be used.
    pub reuse: bool,
}

/// An event of an answer. The order is `Started`, any number of `Tokens`, `Finished`.
#[derive(Debug, Clone, PartialEq)]
pub enum EngineEvent {
    /// The prompt is computed, or is being computed by an engine that reports progress.
    Started {
        /// Prompt tokens from the prefix cache. `None` if the engine reports them at the end, or never.
        cached_tokens: Option<u32>,
    },
    Tokens {
        tokens: Vec<EngineToken>,
        /// The engine's own text of these tokens; it may lag behind them.
        text: String,
    },
    Finished(EngineFinish),
}

#[derive(Debug, Clone, PartialEq)]
pub struct EngineToken {
    pub id: u32,
    pub logprobs: Option<TokenLogprobs>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineFinish {
    pub reason: FinishReason,
    /// The stop token or stop string that matched, if the engine reports it.
    pub matched: Option<String>,
    pub usage: EngineUsage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineUsage {
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    /// Prompt tokens from the prefix cache. `None` if the engine does not report them.
    pub cached_tokens: Option<u32>,
    /// The llama-server's slot that served the request.
    pub slot: Option<u32>,
}
