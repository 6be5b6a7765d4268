//! Serves one session of an operation over QUIC: audio in, results out. A frame is computed and answered
//! before the next one is read, so a fast sender or slow reader fills only QUIC's windows.

use super::Node;
use proto::block::BlockId;
use proto::ids::Attempt;
use proto::operation::{OperationError, OperationInput, OperationOutput, Pcm};
use proto::usage::AttemptId;
use proto::worker::WorkerState;
use speech::{OpenSession, Outputs, SessionEnd, SessionHandle};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use transport::{Connection, OperationCall, OperationInputs, OperationReplier};

/// How a session ended.
enum End {
    With(OperationOutput, SessionEnd),
    /// The client left or stopped reading.
    Cut,
}

/// Serves the call to its end.
pub(super) fn serve(
    node: &Node,
    connection: &Connection,
    call: OperationCall,
) -> impl Future<Output = ()> + Send + use<> {
    let OperationCall { request, backend, mut inputs, mut reply } = call;
    let opened = match node.state() {
        WorkerState::Draining => {
            node.operations.metrics().refused(request.operation, &OperationError::Draining);
            Err(OperationError::Draining)
        }
        WorkerState::Ready | WorkerState::Starting => node.operations.open(&request, backend.as_deref()),
    };
    let opened = opened.map(|mut session| {
        let id = AttemptId {
            request: request.request_id.clone(),
            part: 0,
            attempt: Attempt(0),
            root: BlockId([0; 16]),
        };
        let usage = node.usage.attempt(connection, id, session.opened.model.clone());
        session.handle.count_time(Arc::new(move |took| usage.took(took)));
        session
    });
    async move {
        let end = match opened {
            Ok(mut session) => {
                let (end, counted) = match run(&mut session, &mut inputs, &mut reply).await {
                    End::With(frame, counted) => (Some(frame), counted),
                    End::Cut => (None, SessionEnd::cut),
                };
                session.ends(counted);
                end.map(|frame| (frame, session.limits.unread))
            }
            Err(error) => Some((OperationOutput::Failed(error), UNREAD)),
        };
        let Some((frame, limit)) = end else { return };
        inputs.stop();
        // If the last frame is not read, the client has left.
        if let Ok(Err(error)) = timeout(limit, reply.end(&frame)).await {
            tracing::debug!(%error, "a coordinator did not read the end of a session");
        }
    }
}

/// Time for the client to read the last frame of a session that was never opened.
const UNREAD: Duration = Duration::from_secs(10);

async fn run(session: &mut OpenSession, inputs: &mut OperationInputs, reply: &mut OperationReplier) -> End {
    let limits = session.limits;
    let failed = |error, end| End::With(OperationOutput::Failed(error), end);
    let cancelled = reply.cancelled();
    tokio::pin!(cancelled);
    if let Err(end) =
        send_outputs(reply, limits.unread, &[OperationOutput::Opened(session.opened.clone())]).await
    {
        return end;
    }
    // Samples since the session was opened, and since it was opened or last reset.
    let (mut samples, mut at) = (0, 0);
    loop {
        let input = tokio::select! {
            input = timeout(limits.idle, inputs.next()) => input,
            () = &mut cancelled => return End::Cut,
        };
        let input = match input {
            Ok(Ok(Some(input))) => input,
            // The client closed its stream without a close message; treat it as one.
            Ok(Ok(None)) => OperationInput::Close,
            Ok(Err(transport::Error::Codec(error))) => {
                let (field, reason) = ("frame".to_owned(), error.to_string());
                return failed(OperationError::InvalidField { field, reason }, SessionEnd::refused);
            }
            Ok(Err(_)) => return End::Cut,
            Err(_) => {
                let after_ms = u64::try_from(limits.idle.as_millis()).unwrap_or(u64::MAX);
                return failed(OperationError::Idle { after_ms }, SessionEnd::idle);
            }
        };
        let finishes = input == OperationInput::Finish;
        let model_request = match input {
            OperationInput::Samples(pcm) => {
                let more = pcm.len() as u64;
                if samples + more > limits.samples {
                    return failed(OperationError::TooLong { limit: limits.samples }, SessionEnd::refused);
                }
                (samples, at) = (samples + more, at + more);
                match finite(pcm) {
                    Ok(sound) => ModelRequest::Samples(sound),
                    Err(error) => return failed(error, SessionEnd::refused),
                }
            }
            OperationInput::Segment => ModelRequest::Segment { last: false, at },
            OperationInput::Finish => ModelRequest::Segment { last: true, at },
            OperationInput::Reset => {
                at = 0;
                ModelRequest::Reset
            }
            OperationInput::Close => {
                return End::With(OperationOutput::Finished { samples }, SessionEnd::finished);
            }
        };
        let mut next = Some(model_request);
        while let Some(model_request) = next.take() {
            // Stop a computation of seconds when the client has left.
            let outputs = tokio::select! {
                outputs = model_request.apply(&mut session.handle) => outputs,
                () = &mut cancelled => return End::Cut,
            };
            match outputs {
                Ok((outputs, more)) => {
                    next = more;
                    if let Err(end) = send_outputs(reply, limits.unread, &outputs).await {
                        return end;
                    }
                }
                Err(error) => {
                    tracing::error!(%error, model = %session.opened.model, "a session has failed");
                    let reported = match error {
                        speech::Error::NotFinite { .. } => OperationError::NotFinite,
                        _ => OperationError::Internal,
                    };
                    return failed(reported, SessionEnd::error);
                }
            }
        }
        if finishes {
            return End::With(OperationOutput::Finished { samples }, SessionEnd::finished);
        }
    }
}

/// Sends results. Returns the end of the session if the client does not read them in time.
async fn send_outputs(
    reply: &mut OperationReplier,
    limit: Duration,
    outputs: &[OperationOutput],
) -> Result<(), End> {
    for output in outputs {
        match timeout(limit, reply.send(output)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) | Err(_) => return Err(End::Cut),
        }
    }
    Ok(())
}

/// A request to the model.
enum ModelRequest {
    Samples(Vec<f32>),
    Segment {
        last: bool,
        at: u64,
    },
    /// The next part of a segment's outputs.
    Continue {
        at: u64,
    },
    Reset,
}

impl ModelRequest {
    /// Returns the outputs, and the next request if there are more.
    async fn apply(
        self,
        session: &mut SessionHandle,
    ) -> Result<(Vec<OperationOutput>, Option<Self>), speech::Error> {
        let (part, at) = match self {
            Self::Samples(sound) => return Ok((session.push(sound).await?, None)),
            Self::Segment { last, at } => (session.segment(last).await?, at),
            Self::Continue { at } => (session.continue_segment().await?, at),
            Self::Reset => {
                session.reset().await?;
                return Ok((vec![OperationOutput::Restarted], None));
            }
        };
        let Outputs { mut outputs, more } = part;
        if more {
            return Ok((outputs, Some(Self::Continue { at })));
        }
        outputs.push(OperationOutput::Segmented { at });
        Ok((outputs, None))
    }
}

/// Converts samples to f32 with full scale 1. Refuses values that are not finite.
fn finite(pcm: Pcm) -> Result<Vec<f32>, OperationError> {
    let sound = pcm.into_f32();
    match sound.iter().position(|sample| !sample.is_finite()) {
        None => Ok(sound),
        Some(at) => Err(OperationError::InvalidField {
            field: "samples".to_owned(),
            reason: format!("sample {at} of a frame is not a number"),
        }),
    }
}
