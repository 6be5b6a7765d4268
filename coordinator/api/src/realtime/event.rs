//! The messages of a session's WebSocket: JSON in text messages, audio in binary ones. Types and fields are
//! only ever added.

use super::references::Score;
use crate::error::ApiError;
use proto::operation::{OperationOutput, SpeakerSegment, SpokenWord, VoiceWindow, WordWindow};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A control message of the client.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Control {
    /// Requests the result of the audio so far.
    Segment,
    Reset,
    /// Requests a last segment, then ends the session.
    Finish,
    /// A voice to compare with, in sessions of the operation `speaker`.
    Reference {
        name: String,
        embedding: Vec<f32>,
    },
}

impl Control {
    pub(super) fn read(text: &str) -> Result<Self, ApiError> {
        let rule = "is none of {\"type\": \"segment\"}, {\"type\": \"reset\"}, {\"type\": \"finish\"} and \
                    {\"type\": \"reference\", \"name\": .., \"embedding\": [..]}; audio is sent in binary messages";
        serde_json::from_str(text).map_err(|_| ApiError::field("message", rule))
    }
}

/// A message to the client.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Event<'a> {
    /// The session is open. Always the first message.
    Opened {
        session: &'a str,
        operation: &'static str,
        model: &'a str,
        worker: &'a str,
        backend: &'a str,
        encoding: &'static str,
        sample_rate: u32,
        /// Samples in one window; 0 if that depends on the audio.
        window: u32,
        idle_timeout_ms: u64,
        max_duration_ms: u64,
    },
    /// Speech probabilities of consecutive windows.
    Probabilities {
        windows: Vec<Window<'a>>,
    },
    /// Speech starts at this sample.
    SpeechStart {
        at: u64,
    },
    /// Speech ends at this sample.
    SpeechEnd {
        at: u64,
    },
    /// Whether the speaker's turn is complete.
    Turn {
        at: u64,
        complete: bool,
        probability: f32,
    },
    /// A segment of the transcript.
    Text {
        text: &'a str,
        start: u64,
        end: u64,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        words: Vec<Word<'a>>,
    },
    /// The detected language.
    Language {
        code: &'a str,
        probability: f32,
    },
    /// A wake word was spoken; it is complete at this sample.
    Wakeword {
        word: &'a str,
        at: u64,
        probability: f32,
    },
    /// The voice of the audio so far, and its likeness to the references.
    Embedding {
        at: u64,
        embedding: &'a [f32],
        scores: Vec<Score>,
    },
    /// The speakers' segments in all audio so far. Replaces earlier messages of this type.
    Speakers {
        segments: Vec<Segment>,
        /// The next message continues the list.
        more: bool,
    },
    Segmented {
        at: u64,
    },
    /// The session's state was reset.
    Reset,
    /// Why the session fails, in the form of HTTP errors. Absent if the session ends regularly.
    Error {
        error: Value,
    },
    /// The session has ended. Always the last message.
    Closed {
        reason: &'static str,
        samples: u64,
    },
}

/// A word of a transcript.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Word<'a> {
    word: &'a str,
    start: u64,
    end: u64,
    probability: f32,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Window<'a> {
    start: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    word: Option<&'a str>,
    probability: f32,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Segment {
    start: u64,
    end: u64,
    speaker: String,
}

impl<'a> Event<'a> {
    /// The message for a worker's output. `None` for outputs that open or end a session, and for
    /// audio. `scores` are those
    /// of a voice.
    pub(super) fn of(output: &'a OperationOutput, scores: Vec<Score>) -> Option<Self> {
        let window = |window: &VoiceWindow| {
            let VoiceWindow { start, probability } = *window;
            Window { start, word: None, probability }
        };
        let word = |WordWindow { start, word, probability }: &'a WordWindow| Window {
            start: *start,
            word: Some(word),
            probability: *probability,
        };
        Some(match output {
            OperationOutput::WordWindows(windows) => {
                Self::Probabilities { windows: windows.iter().map(word).collect() }
            }
            OperationOutput::Wakeword(heard) => {
                Self::Wakeword { word: &heard.word, at: heard.at, probability: heard.probability }
            }
            OperationOutput::Speakers(speakers) => {
                let segment = |segment: &SpeakerSegment| Segment {
                    start: segment.start,
                    end: segment.end,
                    speaker: segment.label(),
                };
                Self::Speakers {
                    segments: speakers.segments.iter().map(segment).collect(),
                    more: speakers.more,
                }
            }
            OperationOutput::Speaker(vector) => {
                Self::Embedding { at: vector.at, embedding: &vector.values, scores }
            }
            OperationOutput::Windows(windows) => {
                Self::Probabilities { windows: windows.iter().map(window).collect() }
            }
            OperationOutput::SpeechStarted { at } => Self::SpeechStart { at: *at },
            OperationOutput::SpeechEnded { at } => Self::SpeechEnd { at: *at },
            OperationOutput::Turn(turn) => {
                Self::Turn { at: turn.at, complete: turn.complete, probability: turn.probability }
            }
            OperationOutput::Text(segment) => {
                let word = |word: &'a SpokenWord| {
                    let SpokenWord { text, start, end, probability } = word;
                    Word { word: text.trim(), start: *start, end: *end, probability: *probability }
                };
                let words = segment.words.iter().map(word).collect();
                Self::Text { text: &segment.text, start: segment.start, end: segment.end, words }
            }
            OperationOutput::Language(language) => {
                Self::Language { code: &language.code, probability: language.probability }
            }
            OperationOutput::Segmented { at } => Self::Segmented { at: *at },
            OperationOutput::Restarted => Self::Reset,
            OperationOutput::Opened(_)
            | OperationOutput::Finished { .. }
            | OperationOutput::Failed(_)
            | OperationOutput::Audio(_) => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::operation::{HeardWord, SpeakerSegments, SpeakerVector, TurnScore};
    use serde_json::json;

    #[test]
    fn a_workers_outputs_become_json_events() {
        let score = Score { reference: "ann".into(), score: 0.5, same: false };
        let to_json = |output: &OperationOutput| {
            serde_json::to_string(&Event::of(output, vec![score.clone()]).unwrap()).unwrap()
        };
        let speakers = SpeakerSegments {
            segments: vec![SpeakerSegment { start: 495, end: 1305, speaker: 1 }],
            more: false,
        };
        let text = r#"{"type":"speakers","segments":[{"start":495,"end":1305,"speaker":"SPEAKER_01"}],"more":false}"#;
        assert_eq!(to_json(&OperationOutput::Speakers(speakers)), text);
        let window = WordWindow { start: 1280, word: "alexa".into(), probability: 0.25 };
        let text = r#"{"type":"probabilities","windows":[{"start":1280,"word":"alexa","probability":0.25}]}"#;
        assert_eq!(to_json(&OperationOutput::WordWindows(vec![window])), text);
        let word = HeardWord { word: "alexa".into(), at: 2560, probability: 0.75 };
        let text = r#"{"type":"wakeword","word":"alexa","at":2560,"probability":0.75}"#;
        assert_eq!(to_json(&OperationOutput::Wakeword(word)), text);
        let vector = SpeakerVector { at: 7, values: vec![0.6, 0.8], threshold: 0.75 };
        let text = r#"{"type":"embedding","at":7,"embedding":[0.6,0.8],"scores":[{"reference":"ann","score":0.5,"same":false}]}"#;
        assert_eq!(to_json(&OperationOutput::Speaker(vector)), text);
        let windows = [(0, 0.1f32), (512, 0.933)];
        let windows = windows.map(|(start, probability)| VoiceWindow { start, probability });
        // f32 in the fewest digits that identify it.
        let text = r#"{"type":"probabilities","windows":[{"start":0,"probability":0.1},{"start":512,"probability":0.933}]}"#;
        assert_eq!(to_json(&OperationOutput::Windows(windows.to_vec())), text);
        assert_eq!(to_json(&OperationOutput::SpeechStarted { at: 3 }), r#"{"type":"speech_start","at":3}"#);
        assert_eq!(to_json(&OperationOutput::SpeechEnded { at: 9 }), r#"{"type":"speech_end","at":9}"#);
        let turn = TurnScore { at: 7, complete: true, probability: 0.75 };
        let text = r#"{"type":"turn","at":7,"complete":true,"probability":0.75}"#;
        assert_eq!(to_json(&OperationOutput::Turn(turn)), text);
        assert_eq!(to_json(&OperationOutput::Segmented { at: 9 }), r#"{"type":"segmented","at":9}"#);
        assert_eq!(to_json(&OperationOutput::Restarted), r#"{"type":"reset"}"#);
        assert_eq!(Event::of(&OperationOutput::Finished { samples: 1 }, Vec::new()), None);
    }

    #[test]
    fn a_client_has_exactly_four_control_messages() {
        let reference = Control::read(r#"{"type":"reference","name":"ann","embedding":[0.5,1]}"#);
        assert_eq!(reference, Ok(Control::Reference { name: "ann".into(), embedding: vec![0.5, 1.0] }));
        for (kind, control) in
            [("segment", Control::Segment), ("reset", Control::Reset), ("finish", Control::Finish)]
        {
            let text = json!({"type": kind, "unknown": 1}).to_string();
            assert_eq!(Control::read(&text), Ok(control));
        }
        for wrong in [
            "",
            "segment",
            "{}",
            "[]",
            r#"{"type":"audio","data":"AAAA"}"#,
            r#"{"type":7}"#,
            r#"{"type":"reference"}"#,
            "\u{0}",
        ] {
            assert_eq!(Control::read(wrong).unwrap_err().code(), "invalid_field", "{wrong}");
        }
    }
}
