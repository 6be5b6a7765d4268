//! OpenAI's `POST /v1/audio/transcriptions` and `/v1/audio/translations`: a form with a recording, answered
//! with its text. Runs the operation `asr` ([`audio`](super::audio)).

mod form;
mod languages;
mod written;

use super::answer::WORKER_HEADER;
use super::audio::run;
use super::audio::wav::{Recording, read_any};
use super::error::ApiError;
use super::operations::seconds;
use super::{AppState, admit_within, limits, spans};
use axum::extract::Request;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use dispatch::OperationJob;
use form::{Form, read};
use proto::operation::{Operation, OperationOptions};
use proto::trace::Span;
use std::sync::Arc;
use written::Transcript;

/// Task: transcription or translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Task {
    /// Write the words in their own language.
    Transcribe,
    Translate,
}

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
    let Form { file, model, options, format } = read(body, boundary, task).await?;
    let language = options.language.clone();
    let recording =
        state.planning.run(admitted.caller.tenant(), move || read_any(&file).map_err(form::of_file)).await?;
    let samples = recording.samples();
    let Recording { sample_rate, pieces } = recording;
    let duration = seconds(samples, sample_rate);
    if duration < SHORTEST {
        return Err(ApiError::field(
            "file",
            format!("is {duration} s long; it must be {SHORTEST} s at least"),
        ));
    }
    let operation = Operation::Asr;
    let job = OperationJob {
        request_id: admitted.id.clone(),
        operation,
        model,
        sample_rate,
        options: OperationOptions::Transcribe(options),
        trace: trace.as_ref().map(Span::context),
        tenant: Arc::clone(admitted.caller.tenant()),
        key: admitted.caller.key_id().map(str::to_owned),
    };
    let (worker, opened, results) = tokio::select! {
        biased;
        done = run(state, &job, &admitted, &pieces) => done?,
        () = admitted.caller.revoked() => return Err(ApiError::InvalidApiKey),
        () = tokio::time::sleep_until((admitted.arrived + state.request_timeout).into()) => {
            return Err(ApiError::DeadlineExceeded);
        }
    };
    if let Some(span) = trace {
        spans::session_opened(span, operation, (&admitted.id, &opened.model), &worker, &opened.backend);
        spans::session_ended(span, samples, "finished", None);
    }
    let language = language.or_else(|| results.language.map(|language| language.code)).unwrap_or_default();
    let transcript = Transcript { task, language, sample_rate, duration, texts: results.texts };
    let (kind, body) = transcript.render(format);
    let mut response = Response::new(body.into());
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    // By their types, names have only characters that headers allow.
    if let Ok(worker) = HeaderValue::from_str(worker.as_str()) {
        response.headers_mut().insert(WORKER_HEADER, worker);
    }
    Ok(response)
}
