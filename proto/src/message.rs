//! Requests, replies and reports between coordinators and workers. The wire form belongs to a protocol
//! version ([`VersionRange`](crate::transport::VersionRange)).

use crate::block::ClusterKey;
use crate::codec::bounded;
use crate::ids::{Epoch, ModelId, NodeId};
use crate::operation::{MAX_OPERATIONS, OfferedOperation};
use crate::placement::{Capacity, OfferedDrafter};
use serde::{Deserialize, Serialize};

mod encode;
mod grammar;
mod prefix;
mod tokens;
mod transfer;

pub use encode::{EncodeReply, EncodeRequest, EncodeText, EncodedHead, MAX_ENCODE_TEXTS, MAX_ENCODED_WIDTH};
pub use grammar::{GrammarSpec, GrammarSyntax, MAX_GRAMMAR_BYTES, MAX_TRIGGER_BYTES};
pub use prefix::{NumberedPrefix, PrefixNote};
pub use tokens::{MAX_TOKEN_IDS, TokenIds, TokenPart};
pub use transfer::{GenerateRequest, PullCost, PullReport, TenantTurn, WorkPart};

/// Most tokens in one frame.
pub const MAX_TOKENS_PER_FRAME: usize = 4096;
/// Most stop strings of a request.
pub const MAX_STOP_STRINGS: usize = 16;
/// Most entries of a request's logit bias.
pub const MAX_LOGIT_BIAS: usize = 1024;
/// Most alternatives reported with a token.
pub const MAX_LOGPROBS: usize = 20;
/// Most models that one worker serves.
pub const MAX_MODELS: usize = 256;

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

/// All errors of a generation or an encoding on a worker. [`GenerateError::retryable`] says which ones the
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
}

impl GenerateError {
    /// Whether another worker may be able to serve the same request.
    pub fn retryable(&self) -> bool {
        match self {
            Self::ModelNotFound(_) | Self::QueueFull | Self::Draining | Self::Internal | Self::NotFinite => {
                true
            }
            Self::ContextLength { .. } | Self::InvalidField { .. } | Self::DeadlineExceeded { .. } => false,
        }
    }
}

/// Frame of a worker on the request's stream. The order is `Started`, any number of `Tokens`, then exactly
/// one of `Finished` and `Failed`. A stream that ends otherwise was cut off.
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
}

/// See [`GenerateFrame::Started`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    /// Prompt tokens served from the prefix cache, including tokens that another running sequence computed.
    pub cached_tokens: u32,
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
    /// Number of preemptions of the sequence.
    pub preemptions: u32,
    /// Draft tokens that this attempt verified.
    pub drafted_tokens: u32,
    /// Draft tokens of this attempt that were accepted.
    pub accepted_tokens: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkerState {
    Starting,
    Ready,
    Draining,
}

/// Task that a model serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ModelTask {
    /// Generates tokens that follow a prompt.
    Generate,
    /// Returns a vector of `width` values for a text.
    Embed { width: u32 },
    /// Returns `scores` scores for a pair of texts.
    Rerank { scores: u32 },
}

impl ModelTask {
    pub fn name(self) -> &'static str {
        match self {
            Self::Generate => "generate",
            Self::Embed { .. } => "embed",
            Self::Rerank { .. } => "rerank",
        }
    }
}

/// A model that a worker serves, with its task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedModel {
    /// Name of the model in the API.
    pub id: ModelId,
    /// Digest of the model's files; part of every block root.
    pub model_digest: [u8; 32],
    /// Digest of the tokenizer; part of every block root.
    pub tokenizer_digest: [u8; 32],
    /// Longest sequence that is served, in tokens.
    pub max_model_len: u32,
    /// Layers that this worker serves: `[first, last)`.
    pub layers: (u32, u32),
    /// (model digest, device, ISA, weight path, KV type) as text. Equal classes give bit-equal results.
    pub numeric_class: String,
    /// Tokens per KV block.
    pub block_tokens: u32,
    pub task: ModelTask,
}

/// A worker and the models that it serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerInfo {
    /// Must equal the certificate's node id.
    pub node: NodeId,
    /// Epoch of this run of the process.
    pub epoch: Epoch,
    /// Process id of the operating system, for operators.
    pub pid: u32,
    /// Address of the QUIC endpoint, `ip:port`.
    pub quic: String,
    /// Address of the ops port, `ip:port`.
    pub ops: String,
    /// At most [`MAX_MODELS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_MODELS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_MODELS>"
    )]
    pub models: Vec<ServedModel>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Register {
    pub worker: WorkerInfo,
    /// Phases of a request that the worker serves.
    pub part: WorkPart,
    /// Cost of pulling a prefix of each model. Prefixes of models that are not listed cannot be pulled. At
    /// most [`MAX_MODELS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_MODELS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_MODELS>"
    )]
    pub pulls: Vec<PullCost>,
    /// Resources that the worker contributes to replicas. `None` for a worker that serves only its own
    /// model.
    pub capacity: Option<Capacity>,
    /// Operations that the worker offers; at most [`MAX_OPERATIONS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_OPERATIONS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_OPERATIONS>"
    )]
    pub operations: Vec<OfferedOperation>,
    /// Drafter that the worker has beside the model file that it contributes to replicas, if any.
    pub drafter: Option<OfferedDrafter>,
}

impl From<WorkerInfo> for Register {
    /// Registers a worker for both phases, without pulls, replicas or operations.
    fn from(worker: WorkerInfo) -> Self {
        let (pulls, operations) = (Vec::new(), Vec::new());
        Self { worker, part: WorkPart::Both, pulls, capacity: None, operations, drafter: None }
    }
}

/// Coordinator's reply to a worker that it accepts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registered {
    /// A worker without a report of progress for this long counts as dead.
    pub lease_ms: u64,
    /// Longest interval between two reports.
    pub report_every_ms: u64,
    /// Key of every block id of the cluster.
    pub cluster_key: ClusterKey,
}

/// Reply of a worker to a status request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerStatus {
    pub node: NodeId,
    /// At most [`MAX_MODELS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_MODELS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_MODELS>"
    )]
    pub models: Vec<ServedModel>,
    pub load: LoadReport,
    /// Sequence number of the last KV event of this epoch; 0 before the first.
    pub kv_sequence: u64,
    /// Milliseconds since the process started.
    pub uptime_ms: u64,
}

/// Load and progress of a worker, reported at least twice a second and after bursts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// Epoch of this run of the process.
    pub epoch: Epoch,
    pub state: WorkerState,
    pub running: u32,
    pub waiting: u32,
    /// Prompt tokens that are admitted or queued and not yet computed.
    pub pending_prefill_tokens: u64,
    /// KV bytes that live sequences use.
    pub kv_used: u64,
    /// Total KV bytes.
    pub kv_total: u64,
    /// Steps executed since the process started. Progress renews the lease; an open connection does not.
    pub steps: u64,
    /// Tokens generated since the process started.
    pub tokens: u64,
    /// Milliseconds since the last step ended while work was queued; 0 when idle.
    pub stalled_ms: u64,
    /// Prefill rate of recent steps, tokens per second; 0 if unknown.
    pub prefill_rate: f32,
    /// Time of a decode step at the present batch size, milliseconds; 0 if unknown.
    pub step_ms: f32,
    /// Resident set size of the process, bytes.
    pub rss: u64,
    pub pulls: PullReport,
}
