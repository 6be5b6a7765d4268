//! From protocol version 4 on: whole operations that a worker offers beside generations (decision 44), and the one
//! stream on which those that hear are served.
//!
//! A worker announces what it offers when it registers ([`OfferedOperation`]). [`Operation::Embed`] and
//! [`Operation::Rerank`] keep their own call ([`EncodeRequest`](crate::message::EncodeRequest)); every other operation
//! is a *session* on a stream of its own, opened by a coordinator:
//!
//! ```text
//! coordinator                                   worker
//! OperationRequest                          ->
//!                                           <-  Opened, or Failed and the end of the stream
//! Samples, Samples, ...                     ->
//!                                           <-  Windows, SpeechStarted, SpeechEnded: as it hears
//! Segment: what is it, as far as heard?     ->
//!                                           <-  what follows (Turn, Text, SpeechEnded), then Segmented
//! Reset: as just opened                     ->
//!                                           <-  Restarted
//! Finish                                    ->
//!                                           <-  as for Segment, then Finished and the end of the stream
//! ```
//!
//! A one-shot operation is a session of Samples and Finish. Answers come in the order of what they answer, so nothing
//! is numbered. Whoever wants no more sends `Close`, or drops the stream. The worker chose the backend when it opened
//! the session and holds its state; nothing moves to another worker. A session that ends without `Finished` or `Failed`
//! was cut off, and is the client's to open anew. The worker reads what it is sent only as fast as it computes and as
//! what it answers is read: QUIC's windows are all the memory that a slow peer costs.
//!
//! Positions are samples since the session was opened or last reset, at the rate of the request.

use crate::codec::bounded;
use crate::ids::{ModelId, RequestId};
use crate::message::ModelTask;
use crate::trace::TraceContext;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Operations that one worker offers at most, each model of each counted.
pub const MAX_OPERATIONS: usize = 64;
/// Samples of one frame at most: four seconds at 16 kHz.
pub const MAX_FRAME_SAMPLES: usize = 1 << 16;
/// Windows that one frame tells of at most.
pub const MAX_FRAME_WINDOWS: usize = 4096;

/// Something that is asked of a model other than tokens that follow a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Operation {
    /// A vector for a text.
    Embed,
    /// Scores for a pair of texts.
    Rerank,
    /// Where in what is heard somebody speaks.
    Vad,
    /// Whether who has spoken is done.
    TurnDetection,
    Asr,
    Tts,
}

impl Operation {
    pub const ALL: [Self; 6] =
        [Self::Embed, Self::Rerank, Self::Vad, Self::TurnDetection, Self::Asr, Self::Tts];

    /// Its name in JSON, in variables of the environment and of a bundle's directory.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Embed => "embed",
            Self::Rerank => "rerank",
            Self::Vad => "vad",
            Self::TurnDetection => "turn_detection",
            Self::Asr => "asr",
            Self::Tts => "tts",
        }
    }

    /// The operation of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|operation| operation.name() == name)
    }

    /// What a model of this task is asked for; none of one that generates, which is no operation of its own.
    pub fn of_task(task: ModelTask) -> Option<Self> {
        match task {
            ModelTask::Generate => None,
            ModelTask::Embed { .. } => Some(Self::Embed),
            ModelTask::Rerank { .. } => Some(Self::Rerank),
        }
    }

    /// Whether it is a session on a stream of its own ([`OperationRequest`]); the others are encode calls.
    pub fn is_session(self) -> bool {
        !matches!(self, Self::Embed | Self::Rerank)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One operation that a worker offers with one model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedOperation {
    pub operation: Operation,
    /// With which model. Of embed and rerank it is also among the models that the worker serves.
    pub model: ModelId,
    /// Which backend serves it there, for people: the choice is the worker's.
    pub backend: String,
}

/// A session, as a coordinator opens it at a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OperationRequest {
    pub request_id: RequestId,
    /// What is wanted; not embed or rerank.
    pub operation: Operation,
    /// With which model; none: any that the worker offers it with.
    pub model: Option<ModelId>,
    /// Samples per second of what will be heard. One that the backend does not take is refused by its name; only
    /// [`Operation::Asr`] converts what it takes.
    pub sample_rate: u32,
    pub options: OperationOptions,
    /// The span that it is below of, if it is recorded.
    pub trace: Option<TraceContext>,
}

/// How an operation is to be done. What the chosen backend would not act upon is refused.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub enum OperationOptions {
    /// As the backend has it.
    #[default]
    Default,
    /// Of [`Operation::Vad`].
    Speech(SpeechOptions),
    /// Of [`Operation::TurnDetection`].
    Turn(TurnOptions),
    /// Of [`Operation::Asr`].
    Transcribe(TranscribeOptions),
}

/// When speech begins and ends. Each that is none is as the model's authors recommend.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct SpeechOptions {
    /// Speech begins with a window of at least this probability; 0 to 1.
    pub threshold: Option<f32>,
    /// Speech may end with a window below this probability; 0 to 1, at most `threshold`.
    pub end_threshold: Option<f32>,
    /// So long must windows stay below before it has ended; at most 60,000.
    pub min_silence_ms: Option<u32>,
    /// Told so much earlier and later; at most 60,000.
    pub pad_ms: Option<u32>,
    /// Tell each window's probability too.
    pub windows: bool,
}

/// When a turn is complete.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct TurnOptions {
    /// Complete above this probability, 0 to 1; none: as the model's authors recommend.
    pub threshold: Option<f32>,
}

/// What is to be made of speech.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TranscribeOptions {
    /// The language that is spoken, by its code (`en`); none: what it sounds like.
    pub language: Option<String>,
    pub translate: bool,
    /// What was said or written before, which tells style and spelling; empty: nothing.
    pub prompt: String,
}

/// Tokens of one piece of a transcript at most.
pub const MAX_SPOKEN_TOKENS: usize = 1 << 12;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Pcm {
    /// Full scale is 1. What is not finite is refused.
    F32(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_FRAME_SAMPLES>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_FRAME_SAMPLES>"
        )]
        Vec<f32>,
    ),
    /// Full scale is 32,768.
    I16(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_FRAME_SAMPLES>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_FRAME_SAMPLES>"
        )]
        Vec<i16>,
    ),
}

impl Pcm {
    pub fn len(&self) -> usize {
        match self {
            Self::F32(samples) => samples.len(),
            Self::I16(samples) => samples.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Full scale 1.
    pub fn into_f32(self) -> Vec<f32> {
        match self {
            Self::F32(samples) => samples,
            Self::I16(samples) => samples.into_iter().map(|sample| f32::from(sample) / 32_768.0).collect(),
        }
    }
}

/// What a coordinator sends on a session's stream, behind the request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum OperationInput {
    /// More is heard; at most [`MAX_FRAME_SAMPLES`].
    Samples(Pcm),
    /// Here something ends: say what it is, as far as heard. Speech that goes on ends here; a turn is judged by what was
    /// heard since the last reset. The session goes on: nothing that was heard is forgotten.
    Segment,
    /// Forget all that was heard; positions begin at 0 again.
    Reset,
    /// A last segment, for which what is left of a window is filled up with silence; then the session ends.
    Finish,
    /// The session ends at once.
    Close,
}

/// What a worker sends on a session's stream: `Opened`, any number of others, then exactly one of `Finished` and
/// `Failed`, which may also be the first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum OperationOutput {
    /// It may be sent to.
    Opened(OpenedOperation),
    /// The probability of speech in consecutive windows, if asked for; at most [`MAX_FRAME_WINDOWS`].
    Windows(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_FRAME_WINDOWS>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_FRAME_WINDOWS>"
        )]
        Vec<VoiceWindow>,
    ),
    /// Somebody speaks, from this position on.
    SpeechStarted {
        /// Position of the first sample.
        at: u64,
    },
    /// Nobody speaks any more from this position on.
    SpeechEnded {
        /// Position behind the last sample.
        at: u64,
    },
    /// Whether the turn is complete.
    Turn(TurnScore),
    Text(SpokenText),
    /// A `Segment` is answered.
    Segmented {
        at: u64,
    },
    /// A `Reset` is done.
    Restarted,
    /// The end, as asked for.
    Finished {
        /// Samples heard since the session was opened, also before resets.
        samples: u64,
    },
    Failed(OperationError),
    /// Which language it is heard to be, where that was not said: before the first text.
    Language(Language),
}

/// See [`OperationOutput::Opened`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenedOperation {
    pub backend: String,
    pub model: ModelId,
    /// Samples per second, as asked for.
    pub sample_rate: u32,
    /// Samples that it looks at together; 0 where that depends on what is heard.
    pub window: u32,
    /// It ends if it hears nothing for so long.
    pub idle_timeout_ms: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct VoiceWindow {
    /// Position of its first sample.
    pub start: u64,
    pub probability: f32,
}

/// See [`OperationOutput::Turn`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TurnScore {
    /// Samples heard when this was judged.
    pub at: u64,
    /// Whether who has spoken is done.
    pub complete: bool,
    pub probability: f32,
}

/// See [`OperationOutput::Text`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SpokenText {
    pub text: String,
    pub start: u64,
    pub end: u64,
    /// Where the window begins in which they were heard.
    pub window: u64,
    /// The model's tokens, those of times among them; at most [`MAX_SPOKEN_TOKENS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_SPOKEN_TOKENS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_SPOKEN_TOKENS>"
    )]
    pub tokens: Vec<u32>,
    /// The mean logarithm of the probabilities of the window's tokens.
    pub mean_log: f32,
    /// The probability that nobody speaks in the window.
    pub silence: f32,
}

/// See [`OperationOutput::Language`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Language {
    /// Its code, `en`.
    pub code: String,
    /// Among all that the model knows.
    pub probability: f32,
}

/// Why a session is not opened, or ends. The texts are for clients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum OperationError {
    /// Nothing here serves the operation.
    #[error("operation {operation} is not served by this worker")]
    NotServed { operation: Operation },
    /// The operation is served, not with this model.
    #[error("operation {operation} is not served with model {model} by this worker")]
    ModelNotFound { operation: Operation, model: ModelId },
    /// A field has a value that the backend refuses, or would not act upon.
    #[error("{field}: {reason}")]
    InvalidField {
        field: String,
        /// Value and limit, in words.
        reason: String,
    },
    /// As many sessions are open as may be; another worker may take it.
    #[error("{limit} sessions are open, and there may be no more")]
    TooManySessions {
        /// As many as there may be.
        limit: u32,
    },
    /// The worker takes no new work; another worker may take it.
    #[error("the worker is draining")]
    Draining,
    /// Nothing was heard for too long.
    #[error("nothing was heard for {after_ms} ms")]
    Idle {
        /// Milliseconds.
        after_ms: u64,
    },
    /// More was sent than a session may hear.
    #[error("a session hears at most {limit} samples")]
    TooLong { limit: u64 },
    /// The worker failed; another worker may take it.
    #[error("internal error")]
    Internal,
    /// What the model has computed holds NaN or infinity. Another worker may take it.
    #[error(
        "the model's numbers are not finite: its weights, or what was computed of them, hold NaN or infinity"
    )]
    NotFinite,
}

impl OperationError {
    /// Whether another worker could open the same session.
    pub fn retryable(&self) -> bool {
        matches!(
            self,
            Self::NotServed { .. }
                | Self::ModelNotFound { .. }
                | Self::TooManySessions { .. }
                | Self::Draining
                | Self::Internal
                | Self::NotFinite
        )
    }
}
