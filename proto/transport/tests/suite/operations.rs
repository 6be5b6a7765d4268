//! Sessions of operations: frames both ways at once, typed refusals, and bounded memory when one end is
//! slow.

use crate::cluster::{Pair, pair, with_timeout};
use crate::samples;
use kvasir_transport::Error;
use kvasir_transport::{Incoming, OperationCall, OperationSession, StreamCode};
use proto::operation::{
    MAX_FRAME_SAMPLES, OperationError, OperationInput, OperationOutput, Pcm, VoiceWindow,
};
use std::time::Duration;

async fn call(pair: &Pair) -> OperationCall {
    match with_timeout("a session's request", pair.to_coordinator.accept()).await.unwrap() {
        Incoming::Operation(call) => {
            assert_eq!(call.request, samples::operation_request());
            *call
        }
        other => panic!("{other:?}"),
    }
}

async fn opened(pair: &Pair) -> (OperationSession, OperationCall) {
    let request = samples::operation_request();
    let worker = async {
        let mut call = call(pair).await;
        call.reply.send(&OperationOutput::Opened(samples::opened_operation())).await.unwrap();
        call
    };
    let (session, call) =
        with_timeout("opening", async { tokio::join!(pair.to_worker.open_operation(&request), worker) })
            .await;
    let session = session.unwrap().unwrap();
    assert_eq!(session.opened, samples::opened_operation());
    (session, call)
}

#[tokio::test]
async fn inputs_and_results_arrive_in_order() {
    let pair = pair().await;
    let (mut session, mut call) = opened(&pair).await;
    let inputs = [
        OperationInput::Samples(Pcm::I16(vec![-32_768, 0, 32_767])),
        OperationInput::Samples(Pcm::F32(vec![0.25; MAX_FRAME_SAMPLES])),
        OperationInput::Segment,
        OperationInput::Reset,
        OperationInput::Finish,
    ];
    let client = async {
        for input in &inputs {
            session.sender.send(input).await.unwrap();
        }
        let windows = vec![VoiceWindow { start: 0, probability: 0.5 }];
        assert_eq!(session.answers.next().await.unwrap(), OperationOutput::Windows(windows));
        assert_eq!(session.answers.next().await.unwrap(), OperationOutput::Finished { samples: 3 });
        let end = session.answers.next().await.unwrap_err();
        assert!(matches!(end, Error::StreamCut { .. }), "{end:?}");
    };
    let worker = async {
        for input in &inputs {
            assert_eq!(call.inputs.next().await.unwrap().as_ref(), Some(input));
        }
        let windows = vec![VoiceWindow { start: 0, probability: 0.5 }];
        call.reply.send(&OperationOutput::Windows(windows)).await.unwrap();
        call.reply.end(&OperationOutput::Finished { samples: 3 }).await.unwrap();
    };
    with_timeout("the session", async { tokio::join!(client, worker) }).await;
}

#[tokio::test]
async fn the_chosen_backend_arrives_with_the_request() {
    let pair = pair().await;
    let request = samples::backend_request();
    let worker = async {
        let mut call = call(&pair).await;
        call.reply.send(&OperationOutput::Opened(samples::opened_operation())).await.unwrap();
        call.backend
    };
    let opening = pair.to_worker.open_operation_by_backend(&request);
    let (session, backend) = with_timeout("opening", async { tokio::join!(opening, worker) }).await;
    assert_eq!(session.unwrap().unwrap().opened, samples::opened_operation());
    assert_eq!(backend, Some(request.backend));
}

#[tokio::test]
async fn a_refused_session_has_a_typed_error() {
    let pair = pair().await;
    let request = samples::operation_request();
    let refusal = OperationError::TooManySessions { limit: 3 };
    let worker =
        async { call(&pair).await.reply.end(&OperationOutput::Failed(refusal.clone())).await.unwrap() };
    let (session, ()) =
        with_timeout("the refusal", async { tokio::join!(pair.to_worker.open_operation(&request), worker) })
            .await;
    assert_eq!(session.unwrap().unwrap_err(), refusal);
}

#[tokio::test]
async fn a_session_ends_when_either_side_leaves() {
    let pair = pair().await;
    let (session, call) = opened(&pair).await;
    let cancelled = call.reply.cancelled();
    drop(session);
    with_timeout("the cancellation", cancelled).await;

    let (session, mut call) = opened(&pair).await;
    let OperationSession { sender, mut answers, .. } = session;
    drop(sender);
    with_timeout("the end of what is heard", async { while let Ok(Some(_)) = call.inputs.next().await {} })
        .await;
    call.reply.end(&OperationOutput::Finished { samples: 0 }).await.unwrap();
    assert_eq!(
        with_timeout("the end", answers.next()).await.unwrap(),
        OperationOutput::Finished { samples: 0 }
    );
}

#[tokio::test]
async fn sending_to_an_ended_session_fails_with_the_reason() {
    let pair = pair().await;
    let (mut session, call) = opened(&pair).await;
    call.reply.end(&OperationOutput::Failed(OperationError::Idle { after_ms: 7 })).await.unwrap();
    call.inputs.stop();
    let error = with_timeout("the end of sending", async {
        loop {
            if let Err(error) = session.sender.send(&OperationInput::Segment).await {
                break error;
            }
            // `send` completes at once, so yield to the task that drives the connection.
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert!(matches!(error, Error::StreamEnded(StreamCode::Cancelled)), "{error:?}");
    let answer = with_timeout("why", session.answers.next()).await.unwrap();
    assert_eq!(answer, OperationOutput::Failed(OperationError::Idle { after_ms: 7 }));
}

#[tokio::test]
async fn a_worker_that_does_not_read_slows_the_client_down() {
    let pair = pair().await;
    let (mut session, mut call) = opened(&pair).await;
    let frame = OperationInput::Samples(Pcm::F32(vec![0.5; MAX_FRAME_SAMPLES]));
    let mut sent = 0;
    while tokio::time::timeout(Duration::from_millis(200), session.sender.send(&frame)).await.is_ok() {
        sent += 1;
        assert!(sent < 1000, "{sent} frames were taken that nobody has read");
    }
    // One frame was cut off. All frames before it arrive.
    for _ in 0..sent {
        assert_eq!(with_timeout("a frame", call.inputs.next()).await.unwrap().as_ref(), Some(&frame));
    }
}
