//! Operations on a whole recording: `POST /v1/audio/vad`, `turn_detection`, `wakeword` and `diarization`. The
//! body is the recording's file. Each request is a session at a worker. The client gets no result before the end, so a
//! failed session is repeated at another worker.

use super::admitted::AdmittedRequest;
use super::error::ApiError;
use super::operations::{self, Query, refused, seconds, session_headers};
use super::{AppState, admit_within, limits, spans};
use axum::Json;
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use dispatch::{OpenedSession, OperationJob, Unopened};
use proto::ids::{ModelId, NodeId};
use proto::operation::{
    HeardWord, Language, OpenedOperation, Operation, OperationError, OperationInput, OperationOutput, Pcm,
    SpeakerSegment, SpeakerVector, SpokenText, TurnScore, WordWindow,
};
use proto::trace::Span;
use serde::Serialize;
use sound::{Recording, Taken};
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc;
use transport::{OperationSender, OperationStream};

/// Attempts for one request, each at a worker available at that time.
const ATTEMPTS: usize = 3;
/// Longest recording, in seconds.
const MAX_SECONDS: u64 = 1_800;

/// The results of an operation on a recording.
#[derive(Debug, Default)]
pub(super) struct OperationResults {
    speech: Vec<Speech>,
    /// Speech probability of each window.
    probabilities: Vec<f32>,
    turn: Option<TurnScore>,
    pub(super) texts: Vec<SpokenText>,
    /// The detected language. `None` if detection was not requested.
    pub(super) language: Option<Language>,
    words: Vec<HeardWord>,
    /// Probabilities of each wake word.
    word_probabilities: BTreeMap<String, Vec<f32>>,
    pub(super) speaker: Option<SpeakerVector>,
    speakers: Vec<SpeakerSegment>,
}

/// A segment with speech: `[start, end)` in samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Speech {
    start: u64,
    end: u64,
    start_s: f64,
    end_s: f64,
}

/// A wake word, and the position after the frame that completes it.
#[derive(Debug, PartialEq, Serialize)]
struct Word {
    word: String,
    at: u64,
    at_s: f64,
    probability: f32,
}

/// Speech of one speaker: `[start, end)` in samples.
#[derive(Debug, PartialEq, Serialize)]
struct SpokenSegment {
    start: u64,
    end: u64,
    start_s: f64,
    end_s: f64,
    speaker: String,
}

/// Why a session failed.
#[derive(Debug)]
enum Failure {
    Reported(OperationError),
    Lost,
}

#[derive(Debug, Serialize)]
struct AudioResponse {
    object: &'static str,
    model: ModelId,
    backend: String,
    sample_rate: u32,
    samples: u64,
    duration_s: f64,
    #[serde(flatten)]
    result: AudioResult,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum AudioResult {
    Speech {
        window: u32,
        speech: Vec<Speech>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        probabilities: Vec<f32>,
    },
    Turn {
        complete: bool,
        probability: f32,
    },
    Words {
        window: u32,
        words: Vec<Word>,
        #[serde(skip_serializing_if = "BTreeMap::is_empty")]
        probabilities: BTreeMap<String, Vec<f32>>,
    },
    Speakers {
        /// Number of speakers.
        speakers: usize,
        segments: Vec<SpokenSegment>,
    },
}

pub(super) async fn call(
    state: Arc<AppState>,
    operation: Operation,
    request: Request,
) -> Result<Response, ApiError> {
    let mut trace = spans::receive(operation.name(), request.headers());
    let answered = answer(&state, operation, request, &mut trace).await;
    if let (Err(error), Some(span)) = (&answered, &mut trace) {
        spans::failed(span, error);
    }
    answered
}

async fn answer(
    state: &Arc<AppState>,
    operation: Operation,
    request: Request,
    trace: &mut Option<Span>,
) -> Result<Response, ApiError> {
    let query = Query::read(request.uri())?;
    refuse_forms(request.headers())?;
    let (model, options) = (query.model()?, query.options(operation)?);
    let diarizes = operation == Operation::Diarization;
    let max_bytes = if diarizes { limits::MAX_UPLOAD } else { limits::MAX_BODY };
    let as_rttm = diarizes && query.rttm()?;
    let (admitted, body) = admit_within(state, request, max_bytes).await?;
    if let Some(span) = &trace {
        span.part("receive", admitted.arrived);
    }
    let recording = recorded(state, &admitted, operation, ("body", body)).await?;
    let samples = recording.samples();
    let Recording { sample_rate, pieces } = recording;
    let trace_context = trace.as_ref().map(Span::context);
    let job = OperationJob {
        request_id: admitted.id.clone(),
        operation,
        model,
        backend: query.backend(),
        sample_rate,
        options,
        trace: trace_context,
        tenant: Arc::clone(admitted.caller.tenant()),
        key: admitted.caller.key_id().map(str::to_owned),
    };
    let (worker, opened, results) = run_in_time(state, &job, &admitted, &pieces, None).await?;
    if let Some(span) = trace {
        spans::session_opened(span, operation, (&admitted.id, &opened.model), &worker, &opened.backend);
        spans::session_ended(span, samples, "finished", None);
    }
    let headers = session_headers(&worker, &opened);
    if as_rttm {
        let line = |segment: &SpeakerSegment| segment.rttm("audio", sample_rate) + "\n";
        let lines: String = results.speakers.iter().map(line).collect();
        return Ok((headers, lines).into_response());
    }
    let result = match operation {
        Operation::TurnDetection => {
            let turn = results.turn.ok_or(ApiError::Internal)?;
            AudioResult::Turn { complete: turn.complete, probability: turn.probability }
        }
        Operation::Wakeword => AudioResult::Words {
            window: opened.window,
            words: results.words.into_iter().map(|word| Word::of(word, sample_rate)).collect(),
            probabilities: results.word_probabilities,
        },
        Operation::Diarization => {
            let numbers: BTreeSet<u32> = results.speakers.iter().map(|segment| segment.speaker).collect();
            let segment = |segment: &SpeakerSegment| SpokenSegment::of(segment, sample_rate);
            let segments = results.speakers.iter().map(segment).collect();
            AudioResult::Speakers { speakers: numbers.len(), segments }
        }
        _ => AudioResult::Speech {
            window: opened.window,
            speech: results.speech,
            probabilities: results.probabilities,
        },
    };
    let duration_s = seconds(samples, sample_rate);
    let answer = AudioResponse {
        object: operation.name(),
        model: opened.model,
        backend: opened.backend,
        sample_rate,
        samples,
        duration_s,
        result,
    };
    Ok((headers, Json(answer)).into_response())
}

/// Reads the file of a field on a planning thread. Its samples have a rate that the operation takes.
pub(super) async fn recorded(
    state: &Arc<AppState>,
    admitted: &AdmittedRequest,
    operation: Operation,
    (field, file): (&'static str, Bytes),
) -> Result<Recording, ApiError> {
    let taken = Taken { rates: operation.recording_rates(), seconds: MAX_SECONDS };
    let fault = move |error: sound::Error| ApiError::field(field, error.to_string());
    state.planning.run(admitted.caller.tenant(), move || sound::read(&file, taken).map_err(fault)).await
}

impl SpokenSegment {
    fn of(segment: &SpeakerSegment, sample_rate: u32) -> Self {
        let SpeakerSegment { start, end, .. } = *segment;
        let (start_s, end_s) = (seconds(start, sample_rate), seconds(end, sample_rate));
        Self { start, end, start_s, end_s, speaker: segment.label() }
    }
}

impl Word {
    fn of(HeardWord { word, at, probability }: HeardWord, sample_rate: u32) -> Self {
        Self { word, at, at_s: seconds(at, sample_rate), probability }
    }
}

/// The body is the file itself. A form around it is refused by its content type.
fn refuse_forms(headers: &HeaderMap) -> Result<(), ApiError> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let form = ["multipart/", "application/x-www-form-urlencoded", "application/json"];
    match form.into_iter().find(|form| kind.to_ascii_lowercase().starts_with(form)) {
        // curl's default content type for `--data-binary`.
        Some("application/x-www-form-urlencoded") | None => Ok(()),
        Some(_) => {
            Err(ApiError::field("content-type", "the body is the recording's file itself, of type audio/wav"))
        }
    }
}

/// Receives texts as they arrive, with the headers of their session.
pub(super) type TextSink = mpsc::Sender<(HeaderMap, SpokenText)>;

/// [`run`], until the key is revoked or the time of a request is over.
pub(super) async fn run_in_time(
    state: &Arc<AppState>,
    job: &OperationJob,
    admitted: &AdmittedRequest,
    pieces: &[Pcm],
    sink: Option<&TextSink>,
) -> Result<(NodeId, OpenedOperation, OperationResults), ApiError> {
    tokio::select! {
        biased;
        done = run(state, job, admitted, pieces, sink) => done,
        () = admitted.caller.revoked() => Err(ApiError::InvalidApiKey),
        () = tokio::time::sleep_until((admitted.arrived + state.request_timeout).into()) => {
            Err(ApiError::DeadlineExceeded)
        }
    }
}

/// Runs the operation, with up to [`ATTEMPTS`] sessions one after the other, as long as none has passed a text
/// to the sink.
async fn run(
    state: &Arc<AppState>,
    job: &OperationJob,
    admitted: &AdmittedRequest,
    pieces: &[Pcm],
    sink: Option<&TextSink>,
) -> Result<(NodeId, OpenedOperation, OperationResults), ApiError> {
    let refused = |why| refused(job.operation, job.model.as_ref(), why);
    let mut failure = Unopened::Lost;
    for _ in 0..ATTEMPTS {
        let started = Instant::now();
        let opens = |model: &ModelId| admitted.caller.may_use(model);
        let opening = state.dispatch.open_operation(job, &opens).await;
        let OpenedSession { node, opened, sender, answers, mut seat } = opening.map_err(refused)?;
        state.metrics.operations().opened(job.operation, started.elapsed());
        let counting = state.metrics.operations().session(job.operation);
        let duration = || seconds(pieces.iter().map(|piece| piece.len() as u64).sum(), job.sample_rate);
        let mut results = OperationResults::default();
        let passed = sink.map(|sink| (sink, session_headers(&node, &opened)));
        match exchange(sender, answers, pieces, job.sample_rate, (&mut results, passed)).await {
            Ok(()) => {
                counting.ended("finished", duration());
                seat.audio(duration());
                return Ok((node, opened, results));
            }
            Err(Failure::Reported(error)) if error.retryable() => {
                counting.ended("declined", 0.0);
                seat.failed();
                failure = Unopened::Said(error);
                if sink.is_some() && !results.texts.is_empty() {
                    break;
                }
            }
            Err(Failure::Reported(error)) => {
                counting.ended("invalid", 0.0);
                return Err(operations::failed(job.operation, error));
            }
            Err(Failure::Lost) => {
                tracing::info!(request = %job.request_id, %node, "a call was cut off by its worker");
                counting.ended("worker_lost", 0.0);
                seat.failed();
                let _in_order = seat.cut();
                failure = Unopened::Lost;
                if sink.is_some() && !results.texts.is_empty() {
                    break;
                }
            }
        }
    }
    Err(refused(failure))
}

/// Sends a whole recording while it receives the results, also if it fails later. Passes texts to the sink, if
/// there is one.
async fn exchange(
    mut sender: OperationSender,
    mut answers: OperationStream,
    pieces: &[Pcm],
    sample_rate: u32,
    (results, sink): (&mut OperationResults, Option<(&TextSink, HeaderMap)>),
) -> Result<(), Failure> {
    let feed = async {
        for piece in pieces {
            sender.send(&OperationInput::Samples(piece.clone())).await?;
        }
        sender.send(&OperationInput::Finish).await
    };
    let feed = async {
        // The results contain the reason of a failure.
        let _ = feed.await;
        std::future::pending::<Infallible>().await
    };
    let gather = async {
        let mut speech_start = None;
        loop {
            match answers.next().await.map_err(|_| Failure::Lost)? {
                OperationOutput::Windows(windows) => {
                    results.probabilities.extend(windows.iter().map(|window| window.probability));
                }
                OperationOutput::SpeechStarted { at } => speech_start = Some(at),
                OperationOutput::SpeechEnded { at: end } => {
                    let start = speech_start.take().ok_or(Failure::Reported(OperationError::Internal))?;
                    let (start_s, end_s) = (seconds(start, sample_rate), seconds(end, sample_rate));
                    results.speech.push(Speech { start, end, start_s, end_s });
                }
                OperationOutput::Turn(turn) => results.turn = Some(turn),
                // Only reports the last segment.
                OperationOutput::Segmented { .. } => {}
                OperationOutput::Finished { .. } => return Ok(()),
                OperationOutput::Failed(error) => return Err(Failure::Reported(error)),
                OperationOutput::Text(text) => {
                    if let Some((sink, headers)) = &sink {
                        // If nobody receives it, the call is dropped.
                        let _ = sink.send((headers.clone(), text.clone())).await;
                    }
                    results.texts.push(text);
                }
                OperationOutput::Language(language) => results.language = Some(language),
                OperationOutput::Wakeword(word) => results.words.push(word),
                OperationOutput::WordWindows(windows) => {
                    for WordWindow { word, probability, .. } in windows {
                        results.word_probabilities.entry(word).or_default().push(probability);
                    }
                }
                OperationOutput::Speaker(vector) => results.speaker = Some(vector),
                OperationOutput::Speakers(speakers) => results.speakers.extend(speakers.segments),
                OperationOutput::Restarted | OperationOutput::Opened(_) | OperationOutput::Audio(_) => {
                    return Err(Failure::Reported(OperationError::Internal));
                }
            }
        }
    };
    tokio::select! {
        results = gather => results,
        never = feed => match never {},
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_is_refused_by_its_content_type() {
        let check =
            |kind: &str| refuse_forms(&HeaderMap::from_iter([(header::CONTENT_TYPE, kind.parse().unwrap())]));
        for kind in
            ["audio/wav", "audio/x-wav", "application/octet-stream", "application/x-www-form-urlencoded"]
        {
            assert_eq!(check(kind), Ok(()), "{kind}");
        }
        for kind in ["multipart/form-data; boundary=x", "Application/JSON"] {
            assert!(check(kind).is_err(), "{kind}");
        }
        assert_eq!(refuse_forms(&HeaderMap::new()), Ok(()));
    }
}
