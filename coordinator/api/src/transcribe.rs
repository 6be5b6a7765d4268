//! OpenAI's `POST /v1/audio/transcriptions` and `/v1/audio/translations`: a form with a recording, answered
//! with its text, whole or as events. Runs the operation `asr` ([`audio`](super::audio)).

mod form;
mod parts;
mod streamed;
mod written;

use super::admitted::AdmittedRequest;
use super::audio::{recorded, run_in_time};
use super::error::ApiError;
use super::operations::{seconds, session_headers};
use super::{AppState, admit_within, limits, spans};
use axum::extract::Request;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use dispatch::OperationJob;
use form::{Form, read};
use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use parts::{Part, divide, placed};
use proto::ids::{NodeId, RequestId};
use proto::operation::{OpenedOperation, Operation, OperationOptions, SpokenText};
use proto::trace::Span;
use std::sync::Arc;
use streamed::Segments;
use tokio::sync::mpsc;
use written::Transcript;

/// Task: transcription or translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Task {
    /// Write the words in their own language.
    Transcribe,
    Translate,
}

/// Most parts of a recording that are transcribed at once.
const PARTS_AT_ONCE: usize = 4;
/// Shorter recordings contain no word; in seconds.
const SHORTEST: f64 = 0.1;

pub(super) async fn call(state: Arc<AppState>, task: Task, request: Request) -> Result<Response, ApiError> {
    let mut trace = spans::receive(Operation::Asr.name(), request.headers());
    let answered = answer(&state, task, request, &mut trace).await;
    if let (Err(error), Some(span)) = (&answered, &mut trace) {
        spans::failed(span, error);
    }
    answered
}

async fn answer(
    state: &Arc<AppState>,
    task: Task,
    request: Request,
    trace: &mut Option<Span>,
) -> Result<Response, ApiError> {
    let boundary = form::boundary(request.headers())?;
    let (admitted, body) = admit_within(state, request, limits::MAX_FORM).await?;
    if let Some(span) = &trace {
        span.part("receive", admitted.arrived);
    }
    let Form { file, model, backend, options, format, stream: streams, parts } =
        read(body, boundary, task).await?;
    let language = options.language.clone();
    let recording = recorded(state, &admitted, Operation::Asr, ("file", file)).await?;
    let samples = recording.samples();
    let sample_rate = recording.sample_rate;
    let duration = seconds(samples, sample_rate);
    if duration < SHORTEST {
        return Err(ApiError::field(
            "file",
            format!("is {duration} s long; it must be {SHORTEST} s at least"),
        ));
    }
    let job = OperationJob {
        request_id: admitted.id.clone(),
        operation: Operation::Asr,
        model,
        backend,
        sample_rate,
        options: OperationOptions::Transcribe(options),
        trace: trace.as_ref().map(Span::context),
        tenant: Arc::clone(admitted.caller.tenant()),
        key: admitted.caller.key_id().map(str::to_owned),
    };
    if streams {
        let pieces = recording.pieces;
        let (state, mut span, silence) = (Arc::clone(state), trace.take(), state.stream_silence);
        let (sink, texts) = mpsc::channel(1);
        let call = async move {
            let done = run_in_time(&state, &job, &admitted, &pieces, Some(&sink)).await;
            if let Some(span) = &mut span {
                match &done {
                    Ok((worker, opened, _)) => record(span, &admitted, (worker, opened), samples),
                    Err(error) => spans::failed(span, error),
                }
            }
            done.map(|(.., results)| results)
        };
        return Segments { call: call.boxed(), texts, duration, silence }.respond().await;
    }
    let parts = match parts {
        true => state.planning.run(admitted.caller.tenant(), move || Ok(divide(&recording))).await?,
        false => vec![Part { start: 0, pieces: recording.pieces }],
    };
    let calls = parts.into_iter().zip(0..).map(|part| transcribe_part(state, &job, &admitted, part));
    let done: Vec<Transcribed> = stream::iter(calls).buffered(PARTS_AT_ONCE).try_collect().await?;
    let texts = done.iter().flat_map(|done| done.texts.iter().cloned()).collect();
    let Some(Transcribed { worker, opened, language: detected, .. }) = done.into_iter().next() else {
        return Err(ApiError::Internal);
    };
    if let Some(span) = trace {
        record(span, &admitted, (&worker, &opened), samples);
    }
    let language = language.or(detected).unwrap_or_default();
    let transcript = Transcript { task, language, sample_rate, duration, texts };
    let (kind, body) = transcript.render(format);
    let mut response = Response::new(body.into());
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().extend(session_headers(&worker, &opened));
    Ok(response)
}

/// The transcript of a part.
struct Transcribed {
    worker: NodeId,
    opened: OpenedOperation,
    texts: Vec<SpokenText>,
    /// Code of the detected language.
    language: Option<String>,
}

async fn transcribe_part(
    state: &Arc<AppState>,
    whole: &OperationJob,
    admitted: &AdmittedRequest,
    (Part { start, pieces }, number): (Part, u32),
) -> Result<Transcribed, ApiError> {
    // Each session has its own name at the workers. A name that has no room for a number is shared.
    let own = RequestId::new(format!("{}.{number}", whole.request_id.as_str())).ok().filter(|_| number > 0);
    let mut job = whole.clone();
    job.request_id = own.unwrap_or(job.request_id);
    let (worker, opened, results) = run_in_time(state, &job, admitted, &pieces, None).await?;
    let language = results.language.map(|language| language.code);
    Ok(Transcribed { worker, opened, texts: placed(results.texts, start), language })
}

/// Records the session of a finished call.
fn record(
    span: &mut Span,
    admitted: &AdmittedRequest,
    (worker, opened): (&NodeId, &OpenedOperation),
    samples: u64,
) {
    spans::session_opened(span, Operation::Asr, (&admitted.id, &opened.model), worker, &opened.backend);
    spans::session_ended(span, samples, "finished", None);
}
