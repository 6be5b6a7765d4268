//! Requests and replies of generation and encoding. The wire form belongs to a protocol version.

use crate::codec::bounded;
use crate::ids::ModelId;
use serde::{Deserialize, Serialize};

mod encode;
mod grammar;
pub mod image_encoder;
mod images;
mod prefix;
mod prompt_logprobs;
mod tokens;
mod transfer;

pub use encode::{EncodeReply, EncodeRequest, EncodeText, EncodedHead, MAX_ENCODE_TEXTS, MAX_ENCODED_WIDTH};
pub use grammar::{GrammarSpec, GrammarSyntax, MAX_GRAMMAR_BYTES, MAX_TRIGGER_BYTES, OPTIONAL_TOOLS};
pub use images::{FileBytes, MAX_IMAGE_RUNS, MAX_PROMPT_IMAGES, PromptImage, PromptImages};
pub use prefix::{NumberedPrefix, PrefixNote};
pub use prompt_logprobs::{MAX_PROMPT_LOGPROBS, PromptLogprob, PromptLogprobs};
pub use tokens::{MAX_TOKEN_IDS, TokenIds, TokenPart};
pub use transfer::{GenerateRequest, PullCost, PullReport, TenantShare, WorkPart};

/// Most tokens in one frame.
pub const MAX_TOKENS_PER_FRAME: usize = 4096;
/// Most stop strings of a request.
pub const MAX_STOP_STRINGS: usize = 16;
/// Most entries of a request's logit bias.
pub const MAX_LOGIT_BIAS: usize = 1024;
/// Most alternatives reported with a token.
pub const MAX_LOGPROBS: usize = 20;

/// Sampling parameters. The API edge checks the ranges; a worker checks them again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub min_p: f32,
    /// 1 is off. Applies to tokens of the prompt and the output.
    pub repetition_penalty: f32,
    /// 0 is off. Applies to tokens of the output.
    pub presence_penalty: f32,
    /// 0 is off. Applies to tokens of the output.
    pub frequency_penalty: f32,
    /// (token, bias), added to the logits before anything else; at most [`MAX_LOGIT_BIAS`] entries.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_LOGIT_BIAS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_LOGIT_BIAS>"
    )]
    pub logit_bias: Vec<(u32, f32)>,
    /// Draw i of a request depends on (seed, i) and the logits alone.
    pub seed: u64,
    /// The client chose the seed and relies on it: equal requests must have equal answers.
    pub seeded: bool,
    /// Number of best alternatives whose log-probability is reported with that of the drawn token; at most
    /// [`MAX_LOGPROBS`]. `None` reports no log-probabilities.
    pub logprobs: Option<u8>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            seeded: false,
            logprobs: None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Stop {
    /// Most tokens to generate.
    pub max_tokens: u32,
    /// Number of tokens before which neither end-of-sequence nor stop tokens are drawn.
    pub min_tokens: u32,
    /// Texts that end the generation and are not part of the output; at most [`MAX_STOP_STRINGS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_STOP_STRINGS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_STOP_STRINGS>"
    )]
    pub strings: Vec<String>,
    /// Tokens that end the generation.
    pub token_ids: Vec<u32>,
    /// If set, the model's end-of-sequence tokens do not end the generation.
    pub ignore_eos: bool,
}

/// Log-probability of a token and of the best alternatives, best first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// Natural log-probability of the drawn token, from the logits before temperature and filters.
    pub chosen: f32,
    /// (token, log-probability); at most [`MAX_LOGPROBS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_LOGPROBS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_LOGPROBS>"
    )]
    pub top: Vec<(u32, f32)>,
}

/// One generated token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenOut {
    pub id: u32,
    /// Text that this token completes. Empty while a character or a possible stop string is incomplete.
    pub text: String,
    pub logprobs: Option<TokenLogprobs>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// End of sequence, stop token or stop string.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
    Cancelled,
}

/// All errors of a generation or an encoding on a worker. [`GenerateError::retryable`] lists which ones the
/// coordinator may retry elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum GenerateError {
    /// The model is not loaded here.
    #[error("model {0} is not served by this worker")]
    ModelNotFound(ModelId),
    /// Prompt and output exceed the worker's context, whatever else runs.
    #[error("the request needs {need} tokens of context, the worker has room for {limit}")]
    ContextLength {
        need: u64,
        /// Most tokens that the worker has room for.
        limit: u64,
    },
    /// A field has a value that the worker refuses.
    #[error("{field}: {reason}")]
    InvalidField {
        field: String,
        /// Value and limit, in words.
        reason: String,
    },
    /// The worker's engine would ignore an argument, or serve it with another meaning. Retryable on a worker
    /// with another engine.
    #[error("{field}: {reason}")]
    Unsupported {
        field: String,
        /// The engine and why it does not honour the argument.
        reason: String,
    },
    /// The worker's queue is full. Retryable on another worker.
    #[error("the worker's queue is full")]
    QueueFull,
    /// The worker accepts no new work. Retryable on another worker.
    #[error("the worker is draining")]
    Draining,
    #[error("the deadline passed after {after_ms} ms")]
    DeadlineExceeded {
        /// Milliseconds since receipt.
        after_ms: u64,
    },
    /// The worker failed. Retryable on another worker.
    #[error("internal error")]
    Internal,
    /// A computed value is NaN or infinite. Retryable on another worker, because its device may compute
    /// finite values.
    #[error("the model's results are not finite: its weights or intermediate values contain NaN or infinity")]
    NotFinite,
    /// The worker has no vision tower, and no encoder is reached. Retryable on another worker.
    #[error("no worker that is reached encodes the images: {reason}")]
    NoEncoder { reason: String },
}

impl GenerateError {
    /// Whether another worker may be able to serve the same request.
    pub fn retryable(&self) -> bool {
        match self {
            Self::ModelNotFound(_)
            | Self::Unsupported { .. }
            | Self::QueueFull
            | Self::Draining
            | Self::Internal
            | Self::NotFinite
            | Self::NoEncoder { .. } => true,
            Self::ContextLength { .. } | Self::InvalidField { .. } | Self::DeadlineExceeded { .. } => false,
        }
    }
}

/// Frame of a worker on the request's stream. The order is any number of `Prompt`, `Started`, any number of
/// `Tokens`, then exactly one of `Finished` and `Failed`. A stream that ends otherwise was cut off.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum GenerateFrame {
    /// The prompt is computed. Sent before or with the first token.
    Started(Started),
    /// New tokens, at most [`MAX_TOKENS_PER_FRAME`].
    Tokens(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_TOKENS_PER_FRAME>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_TOKENS_PER_FRAME>"
        )]
        Vec<TokenOut>,
    ),
    Finished(Finished),
    /// The generation ended with an error. Tokens that were sent before stay valid.
    Failed(GenerateError),
    /// Log-probabilities of the prompt's next tokens, from its second one on, if they were requested; at most
    /// [`MAX_TOKENS_PER_FRAME`].
    Prompt(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_TOKENS_PER_FRAME>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_TOKENS_PER_FRAME>"
        )]
        Vec<PromptLogprob>,
    ),
}

/// See [`GenerateFrame::Started`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    /// Prompt tokens served from the prefix cache, including tokens that another running sequence computed.
    pub cached_tokens: u32,
    /// `cached_tokens` is an estimate: the engine reports the count with the end, see
    /// [`Finished::cached_tokens`].
    pub estimated: bool,
    /// Prompt tokens computed for this request.
    pub computed_tokens: u32,
    /// Reason why the prefix lookup stopped where it did, for traces and metrics.
    pub hit_stop: String,
}

/// See [`GenerateFrame::Finished`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finished {
    pub reason: FinishReason,
    /// The stop token or stop string that matched, if one did.
    pub matched: Option<String>,
    /// Text that was held back for a possible stop string that did not follow.
    pub tail: String,
    /// Generated tokens, including those of earlier attempts.
    pub completion_tokens: u32,
    /// Prompt tokens served from the prefix cache, if the start had only an estimate.
    pub cached_tokens: Option<u32>,
    /// Number of preemptions of the sequence.
    pub preemptions: u32,
    /// Draft tokens that this attempt verified.
    pub drafted_tokens: u32,
    /// Draft tokens of this attempt that were accepted.
    pub accepted_tokens: u32,
}
