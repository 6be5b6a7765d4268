//! Requests, answers and reports between coordinators and workers. Their form on the wire belongs to a protocol version
//! ([`VersionRange`](crate::transport::VersionRange)).

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

/// Tokens in one frame at most.
pub const MAX_TOKENS_PER_FRAME: usize = 4096;
/// Stop strings of a request at most.
pub const MAX_STOP_STRINGS: usize = 16;
/// Entries of a request's logit bias at most.
pub const MAX_LOGIT_BIAS: usize = 1024;
/// Alternatives reported with a token at most.
pub const MAX_LOGPROBS: usize = 20;
/// Models that one worker serves at most.
pub const MAX_MODELS: usize = 256;

/// How tokens are drawn. Ranges are checked at the API edge; a worker checks them again.
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
    /// 1 is off; applies to tokens of prompt and output.
    pub repetition_penalty: f32,
    /// 0 is off; applies to tokens of the output.
    pub presence_penalty: f32,
    /// 0 is off; applies to tokens of the output.
    pub frequency_penalty: f32,
    /// Added to logits before anything else; at most [`MAX_LOGIT_BIAS`] entries.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_LOGIT_BIAS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_LOGIT_BIAS>"
    )]
    pub logit_bias: Vec<(u32, f32)>,
    /// Draw i of a request depends on (seed, i) and the logits only.
    pub seed: u64,
    /// Report the log-probability of each token and of this many best alternatives; at most
    /// [`MAX_LOGPROBS`].
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
    /// Tokens to generate at most.
    pub max_tokens: u32,
    /// Neither end-of-sequence nor stop tokens are drawn before this many.
    pub min_tokens: u32,
    /// Texts that end the generation and are not part of it; at most [`MAX_STOP_STRINGS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_STOP_STRINGS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_STOP_STRINGS>"
    )]
    pub strings: Vec<String>,
    /// Tokens that end the generation.
    pub token_ids: Vec<u32>,
    /// The model's end-of-sequence tokens do not end it.
    pub ignore_eos: bool,
}

/// A token's log-probability and that of the best alternatives, best first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// Natural log-probability of the token drawn, from the logits before temperature and filters.
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
    /// The token.
    pub id: u32,
    /// The text that became certain with it: empty while a character or a possible stop string is incomplete.
    pub text: String,
    pub logprobs: Option<TokenLogprobs>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// End of sequence, stop token or stop string.
    Stop,
    /// `max_tokens` or the context's end.
    Length,
    Cancelled,
}

/// Closed list of what can go wrong on a worker with a generation or an encoding, and what the coordinator may
/// do about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum GenerateError {
    /// The model is not loaded here.
    #[error("model {0} is not served by this worker")]
    ModelNotFound(ModelId),
    /// Prompt and output cannot fit, ever.
    #[error("the request needs {need} tokens of context, the worker has room for {limit}")]
    ContextLength {
        /// Tokens that the request needs.
        need: u64,
        /// Tokens that can be had.
        limit: u64,
    },
    /// A field has a value that the worker refuses.
    #[error("{field}: {reason}")]
    InvalidField {
        field: String,
        /// Value and limit, in words.
        reason: String,
    },
    /// The worker's queue is full; another worker may take it.
    #[error("the worker's queue is full")]
    QueueFull,
    /// The worker takes no new work; another worker may take it.
    #[error("the worker is draining")]
    Draining,
    #[error("the deadline passed after {after_ms} ms")]
    DeadlineExceeded {
        /// Milliseconds since receipt.
        after_ms: u64,
    },
    /// The worker failed; another worker may take it.
    #[error("internal error")]
    Internal,
    /// What the model has computed holds NaN or infinity. Another worker may take it: its device may compute numbers.
    #[error(
        "the model's numbers are not finite: its weights, or what was computed of them, hold NaN or infinity"
    )]
    NotFinite,
}

impl GenerateError {
    /// Whether another worker could answer the same request.
    pub fn retryable(&self) -> bool {
        match self {
            Self::ModelNotFound(_) | Self::QueueFull | Self::Draining | Self::Internal | Self::NotFinite => {
                true
            }
            Self::ContextLength { .. } | Self::InvalidField { .. } | Self::DeadlineExceeded { .. } => false,
        }
    }
}

/// What a worker sends back on the request's stream: `Started`, any number of `Tokens`, then exactly one of
/// `Finished` and `Failed`. A stream that ends otherwise was cut off.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum GenerateFrame {
    /// The prompt is in; comes with or before the first token.
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
    /// The end, with an error. Tokens sent before stay valid.
    Failed(GenerateError),
}

/// See [`GenerateFrame::Started`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    /// Prompt tokens served from the prefix cache (or taken over from a sequence that computed them).
    pub cached_tokens: u32,
    /// Prompt tokens computed for this request.
    pub computed_tokens: u32,
    /// Why the prefix lookup stopped where it did, for traces and metrics.
    pub hit_stop: String,
}

/// See [`GenerateFrame::Finished`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finished {
    pub reason: FinishReason,
    /// The stop token or stop string that matched, if one did.
    pub matched: Option<String>,
    /// Text held back for a possible stop string that did not come.
    pub tail: String,
    /// Tokens generated, those of earlier attempts included.
    pub completion_tokens: u32,
    /// Times the sequence was preempted.
    pub preemptions: u32,
    /// Tokens guessed and looked at, by this attempt.
    pub drafted_tokens: u32,
    /// Those of them that were right, and so are part of the output.
    pub accepted_tokens: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkerState {
    Starting,
    Ready,
    Draining,
}

/// What a model is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ModelTask {
    /// Tokens that follow a prompt.
    Generate,
    /// A vector for a text.
    Embed { width: u32 },
    /// Scores for a pair of texts.
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

/// A model that a worker serves, and what for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedModel {
    /// Its name in the API.
    pub id: ModelId,
    /// Digest of the model file(s); part of every block root.
    pub model_digest: [u8; 32],
    /// Digest of the tokenizer; part of every block root.
    pub tokenizer_digest: [u8; 32],
    /// Longest sequence served, in tokens.
    pub max_model_len: u32,
    /// Layers served here: `[first, last)`.
    pub layers: (u32, u32),
    /// (model digest, device, ISA, weight path, KV type) in words: equal classes give bit-equal results.
    pub numeric_class: String,
    /// Tokens per KV block.
    pub block_tokens: u32,
    /// What it is asked for.
    pub task: ModelTask,
}

/// A worker and the models that it serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerInfo {
    /// Must equal the certificate's node id.
    pub node: NodeId,
    /// This life of the process.
    pub epoch: Epoch,
    /// Operating-system process id, for people.
    pub pid: u32,
    /// Where other nodes reach it, `ip:port`.
    pub quic: String,
    /// Its ops port, `ip:port`.
    pub ops: String,
    /// What it serves; at most [`MAX_MODELS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_MODELS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_MODELS>"
    )]
    pub models: Vec<ServedModel>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Register {
    /// Who it is and what it serves.
    pub worker: WorkerInfo,
    /// What part of a request it is for.
    pub part: WorkPart,
    /// What a pull of each model's prefixes costs; of a model that is not here nothing can be pulled. At most
    /// [`MAX_MODELS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_MODELS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_MODELS>"
    )]
    pub pulls: Vec<PullCost>,
    /// What it gives to replicas; none of a worker that serves its own model only.
    pub capacity: Option<Capacity>,
    /// The operations that it offers; at most [`MAX_OPERATIONS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_OPERATIONS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_OPERATIONS>"
    )]
    pub operations: Vec<OfferedOperation>,
    /// The drafter beside the model whose file it gives to replicas, if it has one.
    pub drafter: Option<OfferedDrafter>,
}

impl From<WorkerInfo> for Register {
    /// A worker for all of a request that nothing is pulled from and that takes part in no replica.
    fn from(worker: WorkerInfo) -> Self {
        let (pulls, operations) = (Vec::new(), Vec::new());
        Self { worker, part: WorkPart::Both, pulls, capacity: None, operations, drafter: None }
    }
}

/// A coordinator's answer to a worker that it accepts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registered {
    /// Without a report that shows progress for this long, the worker counts as dead.
    pub lease_ms: u64,
    /// How often to report at least.
    pub report_every_ms: u64,
    /// Keys every block id of the cluster.
    pub cluster_key: ClusterKey,
}

/// What a worker says about itself when asked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerStatus {
    pub node: NodeId,
    /// What it serves; at most [`MAX_MODELS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_MODELS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_MODELS>"
    )]
    pub models: Vec<ServedModel>,
    pub load: LoadReport,
    /// Number of the last KV event of this epoch; 0 before the first.
    pub kv_sequence: u64,
    /// Milliseconds since the process started.
    pub uptime_ms: u64,
}

/// A worker's load and progress, reported at least twice a second and after bursts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// This life of the process.
    pub epoch: Epoch,
    pub state: WorkerState,
    pub running: u32,
    pub waiting: u32,
    /// Prompt tokens admitted or queued and not yet computed.
    pub pending_prefill_tokens: u64,
    /// KV bytes in use by live sequences.
    pub kv_used: u64,
    /// KV bytes in all.
    pub kv_total: u64,
    /// Steps executed since start: the lease is renewed by progress, not by TCP.
    pub steps: u64,
    /// Tokens generated since start.
    pub tokens: u64,
    /// Milliseconds since the last step ended while work was queued; 0 when idle.
    pub stalled_ms: u64,
    /// Prefill rate measured over recent steps, tokens per second; 0 if unknown.
    pub prefill_rate: f32,
    /// Decode step time at the present batch, milliseconds; 0 if unknown.
    pub step_ms: f32,
    /// Resident set size of the process in bytes.
    pub rss: u64,
    pub pulls: PullReport,
}
