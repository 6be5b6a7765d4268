//! Sessions of operations over QUIC, on a worker that serves only operations.

use super::{Pair, TIMEOUT, pair_of};
use proto::ids::{ModelId, RequestId};
use proto::operation::{
    BackendRequest, Operation, OperationError, OperationInput, OperationOptions, OperationOutput,
    OperationRequest, Pcm, SpeechOptions,
};
use speech::{Bundle, SessionLimits};
use std::time::Duration;
use tokio::time::timeout;
use transport::OperationSession;

async fn worker(limits: SessionLimits) -> Pair {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/operations").into();
    let bundles = vec![Bundle { id: ModelId::new("tiny").unwrap(), dir }];
    pair_of(None, |config| {
        config.model = None;
        config.bundles = bundles;
        config.sessions = limits;
    })
    .await
}

async fn open(pair: &Pair, operation: Operation) -> Result<OperationSession, OperationError> {
    let options = match operation {
        Operation::Vad => {
            OperationOptions::Speech(SpeechOptions { windows: true, ..SpeechOptions::default() })
        }
        _ => OperationOptions::Default,
    };
    let request = OperationRequest {
        request_id: RequestId::new("r").unwrap(),
        operation,
        model: None,
        sample_rate: 16_000,
        options,
        trace: None,
    };
    let opened = pair.connection.open_operation(&request);
    timeout(TIMEOUT, opened).await.unwrap().unwrap()
}

async fn answers(
    session: &mut OperationSession,
    until: fn(&OperationOutput) -> bool,
) -> Vec<OperationOutput> {
    let mut all = Vec::new();
    while !all.last().is_some_and(until) {
        all.push(timeout(TIMEOUT, session.answers.next()).await.unwrap().unwrap());
    }
    all
}

#[tokio::test]
async fn a_session_takes_segments_resets_and_finishes() {
    let pair = worker(SessionLimits::default()).await;
    let mut vad = open(&pair, Operation::Vad).await.unwrap();
    assert_eq!(
        (vad.opened.backend.as_str(), vad.opened.window, vad.opened.sample_rate),
        ("onnx", 512, 16_000)
    );
    let full = OperationInput::Samples(Pcm::I16(vec![i16::MIN; 512]));
    for input in [full.clone(), OperationInput::Segment, OperationInput::Reset, full, OperationInput::Finish]
    {
        vad.sender.send(&input).await.unwrap();
    }
    let outputs = answers(&mut vad, |answer| matches!(answer, OperationOutput::Finished { .. })).await;
    let probability = 1.0;
    let segment = [
        OperationOutput::Windows(vec![proto::operation::VoiceWindow { start: 0, probability }]),
        OperationOutput::SpeechStarted { at: 0 },
        OperationOutput::SpeechEnded { at: 512 },
        OperationOutput::Segmented { at: 512 },
    ];
    let expected: Vec<_> = segment
        .iter()
        .cloned()
        .chain([OperationOutput::Restarted])
        .chain(segment.iter().cloned())
        .chain([OperationOutput::Finished { samples: 1024 }])
        .collect();
    assert_eq!(outputs, expected);

    let mut turn = open(&pair, Operation::TurnDetection).await.unwrap();
    turn.sender.send(&OperationInput::Samples(Pcm::F32(vec![0.5; 1000]))).await.unwrap();
    turn.sender.send(&OperationInput::Finish).await.unwrap();
    let outputs = answers(&mut turn, |answer| matches!(answer, OperationOutput::Finished { .. })).await;
    assert!(matches!(outputs[0], OperationOutput::Turn(turn) if turn.at == 1000), "{outputs:?}");
    assert_eq!(
        outputs[1..],
        [OperationOutput::Segmented { at: 1000 }, OperationOutput::Finished { samples: 1000 }]
    );
    pair.worker.stop().await;
}

#[tokio::test]
async fn a_session_has_the_backend_that_its_client_has_chosen() {
    let pair = worker(SessionLimits::default()).await;
    let open = async |backend: &str| {
        let request = OperationRequest {
            request_id: RequestId::new("r").unwrap(),
            operation: Operation::Vad,
            model: None,
            sample_rate: 16_000,
            options: OperationOptions::Default,
            trace: None,
        };
        let request = BackendRequest { backend: backend.into(), request };
        let opened = pair.connection.open_operation_by_backend(&request);
        timeout(TIMEOUT, opened).await.unwrap().unwrap().map(|session| session.opened.backend)
    };
    assert_eq!(open("onnx").await.as_deref(), Ok("onnx"));
    // The file of this bundle is not Silero's network.
    let reason = "\"kernels\" is not loaded for vad, only onnx".to_owned();
    assert_eq!(open("kernels").await, Err(OperationError::InvalidField { field: "backend".into(), reason }));
    pair.worker.stop().await;
}

#[tokio::test]
async fn unserved_operations_are_refused_and_limits_hold() {
    let idle = Duration::from_millis(300);
    let impatient = worker(SessionLimits { sessions: 1, idle, ..SessionLimits::default() }).await;
    let mut silent = open(&impatient, Operation::Vad).await.unwrap();
    // Without input, the worker ends the session and frees its slot.
    let end = answers(&mut silent, |_| true).await;
    assert_eq!(end, [OperationOutput::Failed(OperationError::Idle { after_ms: 300 })]);
    drop(open(&impatient, Operation::Vad).await.unwrap());
    impatient.worker.stop().await;

    let pair = worker(SessionLimits { sessions: 1, samples: 1000, ..SessionLimits::default() }).await;
    let unserved = open(&pair, Operation::Asr).await.err();
    assert_eq!(unserved, Some(OperationError::NotServed { operation: Operation::Asr }));
    let mut first = open(&pair, Operation::Vad).await.unwrap();
    assert_eq!(open(&pair, Operation::Vad).await.err(), Some(OperationError::TooManySessions { limit: 1 }));
    first.sender.send(&OperationInput::Close).await.unwrap();
    assert_eq!(answers(&mut first, |_| true).await, [OperationOutput::Finished { samples: 0 }]);
    let mut second = open(&pair, Operation::Vad).await.unwrap();
    second.sender.send(&OperationInput::Samples(Pcm::F32(vec![0.0; 1001]))).await.unwrap();
    let end = answers(&mut second, |answer| matches!(answer, OperationOutput::Failed(_))).await;
    assert_eq!(end, [OperationOutput::Failed(OperationError::TooLong { limit: 1000 })]);
    let mut third = open(&pair, Operation::Vad).await.unwrap();
    third.sender.send(&OperationInput::Samples(Pcm::F32(vec![f32::NAN]))).await.unwrap();
    let end = answers(&mut third, |_| true).await;
    assert!(
        matches!(&end[..], [OperationOutput::Failed(OperationError::InvalidField { field, .. })] if field == "samples"),
        "{end:?}"
    );
    // A client that disconnects frees its slot.
    let fourth = open(&pair, Operation::Vad).await.unwrap();
    drop(fourth);
    let again = async {
        loop {
            match open(&pair, Operation::Vad).await {
                Ok(session) => break session,
                Err(error) => assert_eq!(error, OperationError::TooManySessions { limit: 1 }),
            }
        }
    };
    drop(timeout(TIMEOUT, again).await.unwrap());
    pair.worker.stop().await;
}

/// Open sessions are served to their end; new ones are refused.
#[tokio::test]
async fn a_worker_that_drains_finishes_its_sessions() {
    let pair = worker(SessionLimits::default()).await;
    let mut session = open(&pair, Operation::Vad).await.unwrap();
    let api = pair.connection.worker_api().await.unwrap();
    api.drain(transport::service::deadline(TIMEOUT)).await.unwrap();
    assert_eq!(open(&pair, Operation::Vad).await.err(), Some(OperationError::Draining));
    let drained = tokio::spawn(async move {
        pair.worker.drain().await;
        pair
    });
    session.sender.send(&OperationInput::Samples(Pcm::F32(vec![1.0; 512]))).await.unwrap();
    let outputs =
        answers(&mut session, |answer| matches!(answer, OperationOutput::SpeechStarted { .. })).await;
    assert_eq!(outputs.len(), 2);
    assert!(!drained.is_finished());
    session.sender.send(&OperationInput::Close).await.unwrap();
    let end = answers(&mut session, |_| true).await;
    assert_eq!(end, [OperationOutput::Finished { samples: 512 }], "closed, not judged");
    let pair = timeout(TIMEOUT, drained).await.unwrap().unwrap();
    pair.worker.stop().await;
}
