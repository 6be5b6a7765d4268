//! Requests, answers and reports between coordinators and workers. Every struct that is sent stands inside
//! a closed enum of versions: a shipped struct never changes, variants are only appended.

use crate::block::{BlockId, ClusterKey};
use crate::codec::bounded;
use crate::ids::{Attempt, Epoch, ModelId, NodeId, RequestId};
use crate::placement::{RegisterV4, RegisterV5};
use serde::{Deserialize, Serialize};

mod encode;
mod grammar;
mod prefix;
mod tokens;
mod transfer;

pub use encode::{
    EncodeReply, EncodeRequest, EncodeRequestV1, EncodeRequestV2, EncodeTextV1, EncodedV1, MAX_ENCODE_TEXTS,
    MAX_ENCODED_WIDTH,
};
pub use grammar::{GrammarSyntax, GrammarV1, MAX_GRAMMAR_BYTES, MAX_TRIGGER_BYTES};
pub use prefix::{NumberedPrefixV1, PrefixNote, PrefixNoteV1};
pub use tokens::{MAX_TOKEN_IDS, TokenIds, TokenPart};
pub use transfer::{
    GenerateRequestV2, GenerateRequestV3, GenerateRequestV4, LoadReportV2, PullCostV1, PullReportV1,
    RegisterV3, TenantTurnV1, WorkPart,
};

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

/// When a generation ends.
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

/// A generation, as a coordinator hands it to a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum GenerateRequest {
    /// First version.
    V1(GenerateRequestV1),
    /// From protocol version 3 on: it may pull its prefix.
    V2(GenerateRequestV2),
    /// From protocol version 4 on: its tokens are packed.
    V3(GenerateRequestV3),
    /// From protocol version 5 on: it names its tenant.
    V4(GenerateRequestV4),
}

/// See [`GenerateRequest`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerateRequestV1 {
    /// The client's request.
    pub request_id: RequestId,
    /// Which choice of the request (`n` > 1, several prompts).
    pub choice: u32,
    /// Fences late tokens.
    pub attempt: Attempt,
    /// The model.
    pub model: ModelId,
    /// Root of the prefix chain: tenant, model, tokenizer and adapter.
    pub root: BlockId,
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Tokens that an earlier attempt has already sent to the client; they are replayed, not sent again.
    pub emitted: Vec<u32>,
    /// How to draw.
    pub sampling: Sampling,
    /// When to end.
    pub stop: Stop,
    /// Tokens that the coordinator expects to be served from the prefix cache.
    pub predicted_cached: u32,
    /// Milliseconds from receipt until the request is worth nothing any more; 0 is no limit.
    pub deadline_ms: u64,
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
    /// When asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// End of sequence, stop token or stop string.
    Stop,
    /// `max_tokens` or the context's end.
    Length,
    /// The client left.
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
        /// The field.
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
    /// The deadline passed.
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
    Started(StartedV1),
    /// New tokens, at most [`MAX_TOKENS_PER_FRAME`].
    Tokens(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_TOKENS_PER_FRAME>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_TOKENS_PER_FRAME>"
        )]
        Vec<TokenOut>,
    ),
    /// The end.
    Finished(FinishedV1),
    /// The end, with an error. Tokens sent before stay valid.
    Failed(GenerateError),
}

/// See [`GenerateFrame::Started`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartedV1 {
    /// Prompt tokens served from the prefix cache (or taken over from a sequence that computed them).
    pub cached_tokens: u32,
    /// Prompt tokens computed for this request.
    pub computed_tokens: u32,
    /// Why the prefix lookup stopped where it did, for traces and metrics.
    pub hit_stop: String,
}

/// See [`GenerateFrame::Finished`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FinishedV1 {
    /// Why.
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

/// A worker's life state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkerState {
    /// Loading weights.
    Starting,
    /// Takes work.
    Ready,
    /// Finishes what it has.
    Draining,
}

/// A model that a worker serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedModelV1 {
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
    /// (model digest, device, ISA, weight path, KV type) in words: equal classes give bit-equal logits.
    pub numeric_class: String,
    /// Tokens per KV block.
    pub block_tokens: u32,
}

/// What a model is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ModelTask {
    /// Tokens that follow a prompt.
    Generate,
    /// A vector for a text.
    Embed {
        /// Values of a vector.
        width: u32,
    },
    /// Scores for a pair of texts.
    Rerank {
        /// Scores of a pair.
        scores: u32,
    },
}

impl ModelTask {
    /// Its name in JSON.
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
pub struct ServedModelV2 {
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

impl From<ServedModelV1> for ServedModelV2 {
    /// The first version knew only models that generate.
    fn from(model: ServedModelV1) -> Self {
        let ServedModelV1 {
            id,
            model_digest,
            tokenizer_digest,
            max_model_len,
            layers,
            numeric_class,
            block_tokens,
        } = model;
        let task = ModelTask::Generate;
        Self { id, model_digest, tokenizer_digest, max_model_len, layers, numeric_class, block_tokens, task }
    }
}

impl ServedModelV2 {
    /// As the first version says it; none of a model that does not generate.
    pub fn to_v1(&self) -> Option<ServedModelV1> {
        let Self {
            id,
            model_digest,
            tokenizer_digest,
            max_model_len,
            layers,
            numeric_class,
            block_tokens,
            task,
        } = self.clone();
        (task == ModelTask::Generate).then_some(ServedModelV1 {
            id,
            model_digest,
            tokenizer_digest,
            max_model_len,
            layers,
            numeric_class,
            block_tokens,
        })
    }
}

/// A worker introduces itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Register {
    /// First version: its models generate.
    V1(RegisterV1),
    /// From protocol version 2 on: its models say what they are asked for.
    V2(RegisterV2),
    /// From protocol version 3 on: it says what part of a request it is for, and what a pull costs.
    V3(RegisterV3),
    /// From protocol version 4 on: it says what it gives to replicas of several stages.
    V4(RegisterV4),
    /// From protocol version 6 on: it names the drafter beside its model.
    V5(RegisterV5),
}

/// See [`Register`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisterV1 {
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
    pub models: Vec<ServedModelV1>,
}

/// See [`Register`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisterV2 {
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
    pub models: Vec<ServedModelV2>,
}

impl RegisterV2 {
    /// As a peer understands it with whom protocol version `version` was agreed on; none if that cannot tell
    /// what is to be told.
    pub fn at_version(self, version: u16) -> Option<Register> {
        if version >= 2 {
            return Some(Register::V2(self));
        }
        let Self { node, epoch, pid, quic, ops, models } = self;
        let models = models.iter().map(ServedModelV2::to_v1).collect::<Option<_>>()?;
        Some(Register::V1(RegisterV1 { node, epoch, pid, quic, ops, models }))
    }
}

/// A coordinator's answer to a worker that it accepts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Registered {
    /// First version.
    V1(RegisteredV1),
}

/// See [`Registered`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisteredV1 {
    /// Without a report that shows progress for this long, the worker counts as dead.
    pub lease_ms: u64,
    /// How often to report at least.
    pub report_every_ms: u64,
    /// Keys every block id of the cluster.
    pub cluster_key: ClusterKey,
}

/// What a worker says about itself when asked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum WorkerStatus {
    /// First version.
    V1(WorkerStatusV1),
}

/// See [`WorkerStatus`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerStatusV1 {
    /// Its name.
    pub node: NodeId,
    /// What it serves; at most [`MAX_MODELS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_MODELS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_MODELS>"
    )]
    pub models: Vec<ServedModelV1>,
    /// State, load and progress.
    pub load: LoadReportV1,
    /// Number of the last KV event of this epoch; 0 before the first.
    pub kv_sequence: u64,
    /// Milliseconds since the process started.
    pub uptime_ms: u64,
}

/// A worker's load and progress, reported at least twice a second and after bursts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum LoadReport {
    /// First version.
    V1(LoadReportV1),
    /// From protocol version 3 on: with what was pulled and sent.
    V2(LoadReportV2),
}

/// See [`LoadReport`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoadReportV1 {
    /// This life of the process.
    pub epoch: Epoch,
    /// Whether it takes work.
    pub state: WorkerState,
    /// Sequences in the batch.
    pub running: u32,
    /// Sequences queued.
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
}
