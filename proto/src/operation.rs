//! Operations that a worker offers besides generation, from protocol version 4 on (decision 44), and the
//! stream on which operations with audio input are served.
//!
//! A worker announces its operations when it registers ([`OfferedOperation`]). [`Operation::Embed`] and
//! [`Operation::Rerank`] have their own call ([`EncodeRequest`](crate::message::EncodeRequest)). Every
//! other operation is a *session*: one stream, opened by a coordinator:
//!
//! ```text
//! coordinator                                   worker
//! OperationRequest                          ->
//!                                           <-  Opened, or Failed and the end of the stream
//! Samples, Samples, ...                     ->
//!                                           <-  Windows, SpeechStarted, SpeechEnded, WordWindows, Wakeword:
//!                                               as the audio arrives
//! Segment: report the result so far         ->
//!                                           <-  results (Turn, Text, SpeechEnded, Speaker, Speakers), then
//!                                               Segmented
//! Reset: return to the initial state        ->
//!                                           <-  Restarted
//! Finish                                    ->
//!                                           <-  as for Segment, then Finished and the end of the stream
//! ```
//!
//! [`Operation::Tts`] takes no Samples: its text is among the options, and Audio comes before Segmented.
//! A one-shot operation is a session of Samples and Finish. Replies come in the order of the inputs, so
//! they have no numbers. The coordinator aborts with `Close`, or by dropping the stream. The worker chooses
//! the backend when it opens the session, unless the client did ([`BackendRequest`]). The worker holds the
//! session's state; the state never moves to another worker. A session that ends without `Finished` or
//! `Failed` was cut off; the client may open a new one.
//! The worker reads input only as fast as it computes and as its replies are read. A slow peer therefore
//! costs no more memory than QUIC's windows.
//!
//! Positions are samples since the session was opened or last reset, at the request's sample rate.

use crate::codec::bounded;
use crate::ids::{ModelId, RequestId};
use crate::served_model::ModelTask;
use crate::trace::TraceContext;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Most operations that one worker offers, counting each (operation, model) pair.
pub const MAX_OPERATIONS: usize = 64;
/// Most samples of one frame: about four seconds at 16 kHz.
pub const MAX_FRAME_SAMPLES: usize = 1 << 16;
/// Most windows in one frame.
pub const MAX_FRAME_WINDOWS: usize = 4096;

/// Task of a model other than generating tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Operation {
    /// Computes a vector for a text.
    Embed,
    /// Computes scores for a pair of texts.
    Rerank,
    /// Voice activity detection: the parts of the audio in which somebody speaks.
    Vad,
    /// Whether the speaker has finished the turn.
    TurnDetection,
    Asr,
    Tts,
    /// The words of a fixed set, when they are spoken.
    Wakeword,
    /// A vector for the voice of a speaker.
    Speaker,
    /// Which speaker speaks when.
    Diarization,
}

impl Operation {
    pub const ALL: [Self; 9] = [
        Self::Embed,
        Self::Rerank,
        Self::Vad,
        Self::TurnDetection,
        Self::Asr,
        Self::Tts,
        Self::Wakeword,
        Self::Speaker,
        Self::Diarization,
    ];

    /// Name in JSON, in environment variables and in a bundle's directory.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Embed => "embed",
            Self::Rerank => "rerank",
            Self::Vad => "vad",
            Self::TurnDetection => "turn_detection",
            Self::Asr => "asr",
            Self::Tts => "tts",
            Self::Wakeword => "wakeword",
            Self::Speaker => "speaker",
            Self::Diarization => "diarization",
        }
    }

    /// Returns the operation with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|operation| operation.name() == name)
    }

    /// Returns the operation of a model's task. `None` for generation, which is not an operation.
    pub fn of_task(task: ModelTask) -> Option<Self> {
        match task {
            ModelTask::Generate | ModelTask::GenerateFromImages => None,
            ModelTask::Embed { .. } => Some(Self::Embed),
            ModelTask::Rerank { .. } => Some(Self::Rerank),
        }
    }

    /// Sample rates, per second, of recordings that the models take. Recordings of another rate are resampled to the
    /// last one.
    pub const fn recording_rates(self) -> &'static [u32] {
        match self {
            Self::Vad => &[8_000, 16_000],
            _ => &[16_000],
        }
    }

    /// Whether the operation is a session ([`OperationRequest`]). The others are encode calls.
    pub fn is_session(self) -> bool {
        !matches!(self, Self::Embed | Self::Rerank)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One operation that a worker offers with one model by one backend. A worker names its default backend before
/// the others of the same operation and model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedOperation {
    pub operation: Operation,
    /// For embed and rerank, the model is also one of the models that the worker serves.
    pub model: ModelId,
    pub backend: String,
}

/// Request of a coordinator to open a session.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OperationRequest {
    pub request_id: RequestId,
    /// Any operation but embed and rerank.
    pub operation: Operation,
    /// `None` accepts any model that the worker offers the operation with.
    pub model: Option<ModelId>,
    /// Samples per second of the audio. A backend refuses an unsupported rate as an invalid field; only
    /// [`Operation::Asr`], [`Operation::Speaker`] and [`Operation::Diarization`] resample. 0 for
    /// [`Operation::Tts`], whose voice has a rate.
    pub sample_rate: u32,
    pub options: OperationOptions,
    /// Parent span. `None` if the request is not recorded.
    pub trace: Option<TraceContext>,
}

/// Request of a coordinator to open a session by a backend that the client has chosen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BackendRequest {
    /// Name of the backend. The worker uses this one or refuses the session.
    pub backend: String,
    pub request: OperationRequest,
}

/// Options of a session. The chosen backend refuses options that it does not support.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub enum OperationOptions {
    /// The backend's defaults.
    #[default]
    Default,
    /// For [`Operation::Vad`].
    Speech(SpeechOptions),
    /// For [`Operation::TurnDetection`].
    Turn(TurnOptions),
    /// For [`Operation::Asr`].
    Transcribe(TranscribeOptions),
    /// For [`Operation::Wakeword`].
    Wakeword(WakewordOptions),
    /// For [`Operation::Diarization`].
    Diarization(DiarizationOptions),
    /// For [`Operation::Tts`], which needs them.
    Speak(SpeakOptions),
}

/// Limits of speech detection. `None` is the value that the model's authors recommend.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct SpeechOptions {
    /// Speech begins with a window of at least this probability; 0 to 1.
    pub threshold: Option<f32>,
    /// Speech may end with a window below this probability; 0 to 1, at most `threshold`.
    pub end_threshold: Option<f32>,
    /// Time for which windows must stay below `end_threshold` before speech ends, milliseconds; at most
    /// 60,000.
    pub min_silence_ms: Option<u32>,
    /// Padding: speech is reported to begin this much earlier and to end this much later, milliseconds; at
    /// most 60,000.
    pub pad_ms: Option<u32>,
    /// Whether to report each window's probability too.
    pub windows: bool,
}

/// Options of turn detection.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct TurnOptions {
    /// A turn is complete above this probability, 0 to 1. `None` is the value that the model's authors
    /// recommend.
    pub threshold: Option<f32>,
}

/// Options of speech recognition.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct TranscribeOptions {
    /// Code of the spoken language (`en`). `None` detects it.
    pub language: Option<String>,
    pub translate: bool,
    /// Preceding text, from which the model takes style and spelling; may be empty.
    pub prompt: String,
    /// Whether words get times.
    pub words: bool,
    /// 0 to 1. At 0, texts that are no good are tried again at higher temperatures.
    pub temperature: f32,
}

/// Options of wake words.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct WakewordOptions {
    /// A word is heard in a frame of at least this probability; 0 to 1. `None` is the value that the model's
    /// authors recommend.
    pub threshold: Option<f32>,
    /// Words to listen for; at most [`MAX_WAKEWORDS`]. Empty means all.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_WAKEWORDS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_WAKEWORDS>"
    )]
    pub words: Vec<String>,
    /// Milliseconds after a word was heard in which it is not reported again; at most 60,000.
    pub debounce_ms: Option<u32>,
    /// Whether to report each frame's probabilities too.
    pub windows: bool,
}

/// Most wake words of a model.
pub const MAX_WAKEWORDS: usize = 64;
/// Most values of a speaker's vector.
pub const MAX_SPEAKER_VALUES: usize = 1024;
/// Options of diarization. `None` is the backend's default.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct DiarizationOptions {
    /// Number of speakers, 1 to 100; not together with the other two.
    pub num_speakers: Option<u32>,
    pub min_speakers: Option<u32>,
    pub max_speakers: Option<u32>,
    /// Distance of two voices up to which they are one speaker; 0 to 2.
    pub threshold: Option<f32>,
}

/// Most characters of a text to be spoken.
pub const MAX_SPEECH_CHARS: usize = 4096;
/// Speeds of speech.
pub const SPEECH_SPEEDS: std::ops::RangeInclusive<f32> = 0.25..=4.0;

/// Options of speech for a text.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct SpeakOptions {
    /// The text; at most [`MAX_SPEECH_CHARS`] characters.
    pub input: String,
    /// Name of a voice. `None` is the model's first one.
    pub voice: Option<String>,
    /// Times as fast as the voice speaks by itself; one of [`SPEECH_SPEEDS`]. `None` is 1.
    pub speed: Option<f32>,
}

/// Most segments in one frame.
pub const MAX_FRAME_SEGMENTS: usize = 4096;

/// Most tokens of one piece of a transcript.
pub const MAX_SPOKEN_TOKENS: usize = 1 << 12;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Pcm {
    /// Full scale is 1. Values that are not finite are refused.
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

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Converts to f32 with full scale 1.
    pub fn into_f32(self) -> Vec<f32> {
        match self {
            Self::F32(samples) => samples,
            Self::I16(samples) => samples.into_iter().map(|sample| f32::from(sample) / 32_768.0).collect(),
        }
    }
}

/// Frame of a coordinator on a session's stream, after the request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum OperationInput {
    /// More audio; at most [`MAX_FRAME_SAMPLES`].
    Samples(Pcm),
    /// End of a segment: report the result for the audio so far. Ongoing speech ends here. A turn is judged
    /// by the audio since the last reset, a transcript is that of the audio since the last segment. The
    /// session continues and keeps its state.
    Segment,
    /// Clears the session's state. Positions begin at 0 again.
    Reset,
    /// Last segment. A partial window is filled up with silence. Then the session ends.
    Finish,
    /// Ends the session at once.
    Close,
}

/// Frame of a worker on a session's stream: `Opened`, any number of others, then exactly one of `Finished`
/// and `Failed`. `Failed` may also come first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum OperationOutput {
    /// The session is open and accepts input.
    Opened(OpenedOperation),
    /// Probability of speech in consecutive windows, if requested; at most [`MAX_FRAME_WINDOWS`].
    Windows(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_FRAME_WINDOWS>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_FRAME_WINDOWS>"
        )]
        Vec<VoiceWindow>,
    ),
    /// Speech begins.
    SpeechStarted {
        /// Position of the first sample.
        at: u64,
    },
    /// Speech has ended.
    SpeechEnded {
        /// Position after the last sample.
        at: u64,
    },
    /// Result of turn detection.
    Turn(TurnScore),
    Text(SpokenText),
    /// Reply to a `Segment`; follows its results.
    Segmented {
        at: u64,
    },
    /// Reply to a `Reset`.
    Restarted,
    /// Reply to a `Finish`; the last frame.
    Finished {
        /// Samples received since the session was opened, including those before resets.
        samples: u64,
    },
    Failed(OperationError),
    /// Detected language, if the request did not name one. Sent before the first text.
    Language(Language),
    /// Probabilities of words in consecutive frames, if requested; at most [`MAX_FRAME_WINDOWS`].
    WordWindows(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_FRAME_WINDOWS>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_FRAME_WINDOWS>"
        )]
        Vec<WordWindow>,
    ),
    /// A word was heard.
    Wakeword(HeardWord),
    /// The voice of the audio so far.
    Speaker(SpeakerVector),
    Speakers(SpeakerSegments),
    /// More of the spoken text, at the rate of `Opened`.
    Audio(Pcm),
}

/// See [`OperationOutput::Opened`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenedOperation {
    pub backend: String,
    pub model: ModelId,
    /// Samples per second: as requested, or those of the voice.
    pub sample_rate: u32,
    /// Samples per window; 0 if that depends on the audio.
    pub window: u32,
    /// The session ends if no input arrives for this long.
    pub idle_timeout_ms: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct VoiceWindow {
    /// Position of the first sample.
    pub start: u64,
    pub probability: f32,
}

/// See [`OperationOutput::WordWindows`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WordWindow {
    /// Position of the first sample of the frame.
    pub start: u64,
    pub word: String,
    pub probability: f32,
}

/// See [`OperationOutput::Wakeword`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HeardWord {
    pub word: String,
    /// Position after the last sample of the frame.
    pub at: u64,
    pub probability: f32,
}

/// Speech of one speaker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpeakerSegment {
    pub start: u64,
    pub end: u64,
    /// Number of the speaker from 0. It stays the same in later results of a session.
    pub speaker: u32,
}

impl SpeakerSegment {
    /// Name of the speaker, such as `SPEAKER_00`.
    pub fn label(&self) -> String {
        format!("SPEAKER_{:02}", self.speaker)
    }

    /// A line of a Rich Transcription Time Marked file, for a file of this name and sample rate.
    pub fn rttm(&self, file: &str, sample_rate: u32) -> String {
        let seconds = |samples: u64| samples as f64 / f64::from(sample_rate.max(1));
        let (start, duration) = (seconds(self.start), seconds(self.end.saturating_sub(self.start)));
        format!("SPEAKER {file} 1 {start:.3} {duration:.3} <NA> <NA> {} <NA> <NA>", self.label())
    }
}

/// Result of diarization for all audio so far, in order of the starts. It replaces earlier results.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpeakerSegments {
    /// At most [`MAX_FRAME_SEGMENTS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_FRAME_SEGMENTS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_FRAME_SEGMENTS>"
    )]
    pub segments: Vec<SpeakerSegment>,
    /// The next frame continues the result.
    pub more: bool,
}

/// See [`OperationOutput::Speaker`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SpeakerVector {
    /// Samples received when it was computed.
    pub at: u64,
    /// Length 1; at most [`MAX_SPEAKER_VALUES`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_SPEAKER_VALUES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_SPEAKER_VALUES>"
    )]
    pub values: Vec<f32>,
    /// Least cosine of two vectors of one speaker, as the model's authors recommend.
    pub threshold: f32,
}

impl SpeakerVector {
    /// The cosine of the angle to another vector. `None` if the other one has another number of values, or
    /// no direction.
    pub fn cosine(&self, other: &[f32]) -> Option<f32> {
        let dot = |a: &[f32], b: &[f32]| -> f64 {
            a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
        };
        let values = &self.values[..];
        let lengths = (dot(values, values) * dot(other, other)).sqrt();
        let cosine = dot(values, other) / lengths;
        (values.len() == other.len() && cosine.is_finite()).then_some(cosine.clamp(-1.0, 1.0) as f32)
    }
}

/// See [`OperationOutput::Turn`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TurnScore {
    /// Samples received when the turn was judged.
    pub at: u64,
    /// Whether the speaker has finished the turn.
    pub complete: bool,
    pub probability: f32,
}

/// See [`OperationOutput::Text`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SpokenText {
    pub text: String,
    pub start: u64,
    pub end: u64,
    /// Position at which the window of this text begins.
    pub window: u64,
    /// Tokens of the model, including timestamp tokens; at most [`MAX_SPOKEN_TOKENS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_SPOKEN_TOKENS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_SPOKEN_TOKENS>"
    )]
    pub tokens: Vec<u32>,
    /// Mean log-probability of the window's tokens.
    pub mean_log: f32,
    /// Probability that nobody speaks in the window.
    pub silence: f32,
    /// Temperature at which the window was decoded.
    pub temperature: f32,
    /// zlib's compression ratio of the window's text.
    pub repetition: f32,
    /// Words with their times, if requested; at most [`MAX_SPOKEN_TOKENS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_SPOKEN_TOKENS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_SPOKEN_TOKENS>"
    )]
    pub words: Vec<SpokenWord>,
}

/// A word of a transcript, with the space before it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SpokenWord {
    pub text: String,
    pub start: u64,
    pub end: u64,
    /// Mean probability of its tokens.
    pub probability: f32,
}

/// See [`OperationOutput::Language`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Language {
    /// Language code, such as `en`.
    pub code: String,
    /// Probability among all languages of the model.
    pub probability: f32,
}

/// Reason why a session is not opened, or ends. The texts are shown to clients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum OperationError {
    /// The worker serves no model for the operation.
    #[error("operation {operation} is not served by this worker")]
    NotServed { operation: Operation },
    /// The worker serves the operation, but not with this model.
    #[error("operation {operation} is not served with model {model} by this worker")]
    ModelNotFound { operation: Operation, model: ModelId },
    /// A field has a value that the backend refuses or does not support.
    #[error("{field}: {reason}")]
    InvalidField {
        field: String,
        /// Value and limit, in words.
        reason: String,
    },
    /// The worker has its maximum number of open sessions. Retryable on another worker.
    #[error("{limit} sessions are open, the limit of this worker")]
    TooManySessions {
        /// Maximum number of open sessions.
        limit: u32,
    },
    /// The worker accepts no new work. Retryable on another worker.
    #[error("the worker is draining")]
    Draining,
    /// No input arrived for too long.
    #[error("no audio was received for {after_ms} ms")]
    Idle {
        /// Milliseconds without input.
        after_ms: u64,
    },
    /// The input exceeds a session's limit.
    #[error("a session may have at most {limit} samples")]
    TooLong { limit: u64 },
    /// The worker failed. Retryable on another worker.
    #[error("internal error")]
    Internal,
    /// A computed value is NaN or infinite. Retryable on another worker.
    #[error("the model's results are not finite: its weights or intermediate values contain NaN or infinity")]
    NotFinite,
}

impl OperationError {
    /// Whether another worker may be able to open the same session.
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
