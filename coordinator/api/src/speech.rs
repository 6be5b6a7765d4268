//! OpenAI's `POST /v1/audio/speech`: a text as speech. Runs the operation `tts`.
//!
//! A task holds the session at the worker and passes its audio on through a channel of one message. The body
//! of the response is pulled from there. So a client that reads slowly stops the worker's computation, and one
//! that disconnects ends it. Until there is audio the session can move to another worker.

mod flac;
mod spoken;

use super::admitted::AdmittedRequest;
use super::error::ApiError;
use super::fields::Fields;
use super::operations::{self, refused, seconds, session_headers};
use super::{AppState, admit_within, limits, spans};
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use dispatch::{OpenedSession, OperationJob, Unopened};
use futures::stream;
use proto::ids::ModelId;
use proto::operation::{
    MAX_SPEECH_CHARS, Operation, OperationError, OperationInput, OperationOptions, OperationOutput, Pcm,
    SPEECH_SPEEDS, SpeakOptions,
};
use proto::trace::Span;
use spoken::{Delivery, Format, Spoken};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// Attempts for one request, each at a worker available at that time.
const ATTEMPTS: usize = 3;
const OPERATION: Operation = Operation::Tts;
const FIELDS: [&str; 14] = [
    "model",
    "backend",
    "input",
    "voice",
    "speed",
    "response_format",
    "stream_format",
    "instructions",
    "language",
    "lang_code",
    "sample_rate",
    "ref_audio",
    "ref_text",
    "volume_multiplier",
];
/// Fields of OpenAI and of other servers that would change the speech and are not served.
const REFUSED: [&str; 7] =
    ["instructions", "language", "lang_code", "sample_rate", "ref_audio", "ref_text", "volume_multiplier"];

/// A checked request.
#[derive(Debug, PartialEq)]
struct Plan {
    model: Option<ModelId>,
    backend: Option<String>,
    options: SpeakOptions,
    format: Format,
    delivery: Delivery,
}

/// State of a session, from its task.
#[derive(Debug)]
enum Told {
    /// There is audio. Always first, unless there is an error.
    Started {
        headers: HeaderMap,
        sample_rate: u32,
    },
    Audio(Vec<i16>),
}

type Listener = Sender<Result<Told, ApiError>>;

impl Plan {
    fn read(body: &[u8]) -> Result<Self, ApiError> {
        let fields = Fields::parse(body, &FIELDS)?;
        for name in REFUSED {
            if fields.raw(name).is_some_and(|value| value != "\"\"") {
                return Err(fields.wrong(name, "is not served: a voice has no such choice"));
            }
        }
        let input: String = fields.get("input")?.ok_or_else(|| fields.wrong("input", "is missing"))?;
        let chars = input.chars().count();
        if chars == 0 || chars > MAX_SPEECH_CHARS {
            let reason = format!("has {chars} characters, it must be 1 to {MAX_SPEECH_CHARS}");
            return Err(fields.wrong("input", reason));
        }
        let speed = fields.ranged("speed", SPEECH_SPEEDS)?;
        let options = SpeakOptions { input, voice: fields.get("voice")?, speed };
        let model: Option<String> = fields.get("model")?;
        let model = model.map(|name| ModelId::new(name.as_str()).map_err(|_| ApiError::ModelNotFound(name)));
        Ok(Self {
            model: model.transpose()?,
            backend: fields.get("backend")?,
            options,
            format: Format::read(&fields)?,
            delivery: fields.get("stream_format")?.unwrap_or_default(),
        })
    }
}

pub(super) async fn call(state: Arc<AppState>, request: Request) -> Result<Response, ApiError> {
    let mut trace = spans::receive(OPERATION.name(), request.headers());
    let planned = async {
        let (admitted, body) = admit_within(&state, request, limits::MAX_BODY).await?;
        Ok((admitted, Plan::read(&body)?))
    };
    let (admitted, Plan { model, backend, options, format, delivery }) =
        planned.await.inspect_err(|error| {
            trace.iter_mut().for_each(|span| spans::failed(span, error));
        })?;
    if let Some(span) = &trace {
        span.part("receive", admitted.arrived);
    }
    let job = OperationJob {
        request_id: admitted.id.clone(),
        operation: OPERATION,
        model,
        backend,
        sample_rate: 0,
        options: OperationOptions::Speak(options),
        trace: trace.as_ref().map(Span::context),
        tenant: Arc::clone(admitted.caller.tenant()),
        key: admitted.caller.key_id().map(str::to_owned),
    };
    let (listener, mut told) = channel(1);
    tokio::spawn(run(state, job, admitted, trace, listener));
    // A task that panics tells nothing.
    let first = told.recv().await.ok_or(ApiError::Internal)??;
    let Told::Started { headers: names, sample_rate } = first else { return Err(ApiError::Internal) };
    let spoken = Spoken::new(format, delivery, sample_rate)?;
    let kind = HeaderValue::from_static(spoken.content_type());
    let body = stream::unfold((spoken, told), |(mut spoken, mut told)| async {
        let chunk = next(&mut spoken, &mut told).await?;
        Some((chunk, (spoken, told)))
    });
    let mut response = Body::from_stream(body).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, kind);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies must not buffer this response.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    headers.extend(names);
    Ok(response)
}

/// The next chunk of the body. An error breaks off the body, unless events can tell it.
async fn next(
    spoken: &mut Spoken,
    told: &mut Receiver<Result<Told, ApiError>>,
) -> Option<Result<Vec<u8>, ApiError>> {
    while !spoken.is_over() {
        let chunk = match told.recv().await {
            Some(Ok(Told::Audio(samples))) => spoken.audio(&samples),
            Some(Ok(Told::Started { .. })) => Err(ApiError::Internal),
            Some(Err(error)) => spoken.failed(error),
            None => spoken.end(),
        };
        if chunk.as_ref().map_or(true, |bytes| !bytes.is_empty()) {
            return Some(chunk);
        }
    }
    None
}

/// Runs the session until it ends, the client leaves, the key is revoked, or the time of a request is over.
async fn run(
    state: Arc<AppState>,
    job: OperationJob,
    admitted: AdmittedRequest,
    mut trace: Option<Span>,
    listener: Listener,
) {
    let done = tokio::select! {
        biased;
        () = listener.closed() => return,
        () = admitted.caller.revoked() => Err(ApiError::InvalidApiKey),
        () = tokio::time::sleep_until((admitted.arrived + state.request_timeout).into()) => {
            Err(ApiError::DeadlineExceeded)
        }
        done = speak(&state, &job, &admitted, &mut trace, &listener) => done,
    };
    if let Err(error) = done {
        trace.iter_mut().for_each(|span| spans::failed(span, &error));
        // The client may have left meanwhile.
        let _ = listener.send(Err(error)).await;
    }
}

/// Speaks the text, with up to [`ATTEMPTS`] sessions until one has audio.
async fn speak(
    state: &Arc<AppState>,
    job: &OperationJob,
    admitted: &AdmittedRequest,
    trace: &mut Option<Span>,
    listener: &Listener,
) -> Result<(), ApiError> {
    let refused = |why| refused(OPERATION, job.model.as_ref(), why);
    let mut failure = Unopened::Lost;
    for _ in 0..ATTEMPTS {
        let started = Instant::now();
        let opens = |model: &ModelId| admitted.caller.may_use(model);
        let opening = state.dispatch.open_operation(job, &opens).await;
        let OpenedSession { node, opened, mut sender, mut answers, mut seat } = opening.map_err(refused)?;
        state.metrics.operations().opened(OPERATION, started.elapsed());
        let counting = state.metrics.operations().session(OPERATION);
        let rate = opened.sample_rate;
        // The answers contain the reason of a failure.
        let _ = sender.send(&OperationInput::Finish).await;
        let mut samples = 0u64;
        let failed = loop {
            match answers.next().await {
                Ok(OperationOutput::Audio(Pcm::I16(audio))) => {
                    if samples == 0 {
                        if let Some(span) = trace {
                            let names = (&admitted.id, &opened.model);
                            spans::session_opened(span, OPERATION, names, &node, &opened.backend);
                            span.part("first_audio", started);
                        }
                        let headers = session_headers(&node, &opened);
                        let told = Told::Started { headers, sample_rate: rate };
                        listener.send(Ok(told)).await.map_err(|_| ApiError::Internal)?;
                    }
                    samples += audio.len() as u64;
                    seat.audio(seconds(audio.len() as u64, rate));
                    listener.send(Ok(Told::Audio(audio))).await.map_err(|_| ApiError::Internal)?;
                }
                // Only reports the end of the text.
                Ok(OperationOutput::Segmented { .. }) => {}
                Ok(OperationOutput::Finished { .. }) => {
                    counting.ended("finished", seconds(samples, rate));
                    if samples == 0 {
                        return Err(ApiError::field("input", "has nothing that the voice can speak"));
                    }
                    if let Some(span) = trace {
                        spans::session_ended(span, samples, "finished", None);
                    }
                    return Ok(());
                }
                Ok(OperationOutput::Failed(error)) => break Some(error),
                Ok(_) => break Some(OperationError::Internal),
                Err(_) => break None,
            }
        };
        match failed {
            Some(error) if error.retryable() && samples == 0 => {
                counting.ended("declined", 0.0);
                seat.failed();
                failure = Unopened::Said(error);
            }
            Some(error) => {
                let reason = if error.retryable() { "failed" } else { "invalid" };
                counting.ended(reason, seconds(samples, rate));
                return Err(operations::failed(OPERATION, error));
            }
            None => {
                tracing::info!(request = %job.request_id, %node, "speech was cut off by its worker");
                counting.ended("worker_lost", seconds(samples, rate));
                seat.failed();
                let _in_order = seat.cut();
                failure = Unopened::Lost;
                if samples > 0 {
                    return Err(ApiError::WorkerLost);
                }
            }
        }
    }
    Err(refused(failure))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> Result<Plan, ApiError> {
        Plan::read(body.as_bytes())
    }

    #[test]
    fn a_request_is_read_as_openai_defines_it() {
        let plan = read(r#"{"model":"piper-joe","backend":"onnx","input":"Hi.","voice":"joe"}"#).unwrap();
        let options = SpeakOptions { input: "Hi.".into(), voice: Some("joe".into()), speed: None };
        let model = Some(ModelId::new("piper-joe").unwrap());
        let (backend, delivery) = (Some("onnx".into()), Delivery::Audio);
        assert_eq!(plan, Plan { model, backend, options, format: Format::Wav, delivery });
        let plan = read(
            r#"{"input":"Hi.","speed":0.5,"response_format":"pcm","stream_format":"sse","instructions":""}"#,
        );
        let plan = plan.unwrap();
        assert_eq!((plan.model, plan.options.speed, plan.options.voice), (None, Some(0.5), None));
        assert_eq!((plan.format, plan.delivery), (Format::Pcm, Delivery::Sse));
        let longest = format!(r#"{{"input":"{}"}}"#, "é".repeat(MAX_SPEECH_CHARS));
        assert!(read(&longest).is_ok());
    }

    #[test]
    fn other_values_are_refused_by_their_field() {
        let long = format!(r#"{{"input":"{}"}}"#, "a".repeat(MAX_SPEECH_CHARS + 1));
        let bodies = [
            ("{}", "input", "is missing"),
            (r#"{"input":""}"#, "input", "has 0 characters, it must be 1 to 4096"),
            (&long, "input", "has 4097 characters, it must be 1 to 4096"),
            (r#"{"input":["a"]}"#, "input", "invalid type"),
            (r#"{"input":"a","speed":5}"#, "speed", "5 is not from 0.25 to 4"),
            (r#"{"input":"a","speed":0.2}"#, "speed", "0.2 is not from 0.25 to 4"),
            (r#"{"input":"a","voice":{"id":"x"}}"#, "voice", "invalid type"),
            (
                r#"{"input":"a","response_format":"mp3"}"#,
                "response_format",
                "\"mp3\" is not served, only wav, flac and pcm",
            ),
            (r#"{"input":"a","response_format":7}"#, "response_format", "invalid type"),
            (r#"{"input":"a","stream_format":"x"}"#, "stream_format", "unknown variant"),
            (r#"{"input":"a","instructions":"sing"}"#, "instructions", "is not served"),
            (r#"{"input":"a","lang_code":"j"}"#, "lang_code", "is not served"),
            ("[]", "body", "not a JSON object"),
        ];
        for (body, field, reason) in bodies {
            match read(body) {
                Err(ApiError::InvalidField { field: named, reason: said }) => {
                    assert!(named == field && said.contains(reason), "{body}: {named} {said}");
                }
                other => panic!("{body}: {other:?}"),
            }
        }
    }
}
