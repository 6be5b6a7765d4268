//! Samples of operations.

use super::*;

pub(crate) fn offered_operation() -> OfferedOperation {
    OfferedOperation {
        operation: Operation::Vad,
        model: ModelId::new("silero-vad").unwrap(),
        backend: "onnx".into(),
    }
}

pub(crate) fn operation_request() -> OperationRequest {
    OperationRequest {
        request_id: RequestId::new("req-1").unwrap(),
        operation: Operation::TurnDetection,
        model: Some(ModelId::new("smart-turn").unwrap()),
        sample_rate: 16_000,
        options: OperationOptions::Turn(TurnOptions { threshold: Some(0.5) }),
        trace: Some(trace()),
    }
}

pub(crate) fn backend_request() -> BackendRequest {
    BackendRequest { backend: "onnx".into(), request: operation_request() }
}

pub(crate) fn opened_operation() -> OpenedOperation {
    OpenedOperation {
        backend: "onnx".into(),
        model: ModelId::new("silero-vad").unwrap(),
        sample_rate: 16_000,
        window: 512,
        idle_timeout_ms: 30_000,
    }
}

pub(crate) fn operation_outputs() -> Vec<OperationOutput> {
    vec![
        OperationOutput::Opened(opened_operation()),
        OperationOutput::Windows(vec![VoiceWindow { start: 70_144, probability: 0.5 }]),
        OperationOutput::SpeechStarted { at: 70_144 },
        OperationOutput::SpeechEnded { at: 71_168 },
        OperationOutput::Turn(TurnScore { at: 70_144, complete: true, probability: 0.75 }),
        OperationOutput::Text(SpokenText {
            text: "so".into(),
            start: 300,
            end: 70_144,
            window: 0,
            tokens: vec![7, 70_000],
            mean_log: -0.25,
            silence: 0.125,
            temperature: 0.5,
            repetition: 1.5,
            words: vec![SpokenWord { text: " so".into(), start: 300, end: 70_144, probability: 0.75 }],
        }),
        OperationOutput::Segmented { at: 70_144 },
        OperationOutput::Restarted,
        OperationOutput::Finished { samples: 70_144 },
        OperationOutput::Failed(OperationError::Draining),
        OperationOutput::Language(Language { code: "en".into(), probability: 0.75 }),
        OperationOutput::WordWindows(vec![WordWindow {
            start: 1280,
            word: "alexa".into(),
            probability: 0.5,
        }]),
        OperationOutput::Wakeword(HeardWord { word: "alexa".into(), at: 70_400, probability: 0.75 }),
        OperationOutput::Speaker(SpeakerVector { at: 70_144, values: vec![0.5, -0.5], threshold: 0.75 }),
        OperationOutput::Speakers(SpeakerSegments {
            segments: vec![SpeakerSegment { start: 495, end: 70_144, speaker: 1 }],
            more: true,
        }),
        OperationOutput::Audio(Pcm::I16(vec![-300, 7])),
    ]
}

pub(crate) fn operation_errors() -> Vec<OperationError> {
    let (operation, model) = (Operation::Asr, ModelId::new("m").unwrap());
    vec![
        OperationError::NotServed { operation },
        OperationError::ModelNotFound { operation, model },
        OperationError::InvalidField { field: "sample_rate".into(), reason: "44100, not 16000".into() },
        OperationError::TooManySessions { limit: 300 },
        OperationError::Draining,
        OperationError::Idle { after_ms: 30_000 },
        OperationError::TooLong { limit: 70_000 },
        OperationError::Internal,
        OperationError::NotFinite,
    ]
}
