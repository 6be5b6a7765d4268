//! Turns generations into a response: one JSON object, or server-sent events, written by the API's
//! [`Writer`].
//!
//! The body of a stream is pulled: it reads from the workers only when the client's connection has room. A
//! slow client therefore delays its own request and uses no memory. If a client reads nothing for too long,
//! the connection is closed by the server, which drops and thereby cancels the generations.

use super::CLIENT_CLOSED;
use super::admitted::AdmittedRequest;
use super::auth::Revocation;
use super::error::ApiError;
use super::images::HeldBytes;
use super::loading::{COMMENT_EVERY, Loading};
use super::plan::GenerationPlan;
use super::progress::{EVENT_EVERY, Status};
use super::prompt_scores::{self, ToldPrompt};
use super::shape::{CallPart, Delta, DeltaPart, Times, Usage, Writer};
use super::spans;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use dispatch::metrics::{Metrics, Served, finish_name};
use dispatch::models::OfferedModel;
use dispatch::random::random_u64;
use dispatch::{Event, Failure, Generation, ProgressProbe, Started};
use futures::stream::{self, AbortHandle, BoxStream, SelectAll};
use futures::{FutureExt, StreamExt};
use proto::message::{FinishReason, Finished, TokenOut};
use proto::trace::{Span, TraceId};
use std::sync::Arc;
use std::time::{Duration, Instant};
use text::dialect::{Calls, Dialect, OutputParser, ParsedDelta, StopStrings};
use text::tokenizer::{Tokenizer, Utf8Stream};

/// The worker that serves the request, by its name in the status.
pub const WORKER_HEADER: HeaderName = HeaderName::from_static("x-kvasir-worker");
/// The backend of an operation.
pub const BACKEND_HEADER: HeaderName = HeaderName::from_static("x-kvasir-backend");
/// The routing reason and the predicted tokens.
pub const ROUTE_HEADER: HeaderName = HeaderName::from_static("x-kvasir-route");
/// Indices of the request's documents, from 0, in the order of the prompt.
pub const DOCUMENTS_HEADER: HeaderName = HeaderName::from_static("x-kvasir-documents");

/// Size at which a chunk is sent before more events are read.
const CHUNK_BYTES: usize = 16 << 10;
/// Initial capacity of a chunk: the size of a short answer.
const CHUNK_ROOM: usize = 1 << 10;

/// A response in progress.
pub struct ResponseStream {
    writer: Box<dyn Writer>,
    model: Arc<OfferedModel>,
    metrics: Arc<Metrics>,
    events: Events,
    choices: Vec<Progress>,
    /// Tells how far the first choice is.
    probe: Option<ProgressProbe>,
    /// Choices of each prompt that the client gets, and those that are generated.
    best: (usize, usize),
    documents: Vec<usize>,
    /// Rows of images in the prompt.
    image_tokens: u64,
    /// Whether the response has the text offset of each token.
    offsets: bool,
    /// Stop strings that are included in the answer.
    included_stops: Vec<String>,
    admitted: AdmittedRequest,
    revocation: Revocation,
    /// `None` if the request is not recorded.
    span: Option<Span>,
    /// The path under which the end of a stream is counted. `None` before streaming and once counted.
    counts: Option<&'static str>,
    /// Set until a worker has the model.
    loading: Option<Loading>,
    /// Silence after which a stream gets a comment.
    silence: Duration,
    /// Whether the stream has events of its progress before the first token.
    include_progress: bool,
    _images: Option<HeldBytes>,
}

/// Response extension: the request is counted when its stream ends.
#[derive(Debug, Clone, Copy)]
pub struct CountsItself;

/// The events of a request's generations, in order of arrival.
enum Events {
    /// Most requests have one generation, whose events need no multiplexing.
    One(BoxStream<'static, ChoiceEvent>),
    Several(SelectAll<BoxStream<'static, ChoiceEvent>>),
}

type ChoiceEvent = (u32, Result<Event, Failure>);

impl Events {
    /// The events, and if `endable` a handle that ends each generation early.
    fn of(generations: Vec<Generation>, endable: bool) -> (Self, Vec<AbortHandle>) {
        let mut ends = Vec::new();
        let mut events = |generation: Generation| {
            let events = stream::unfold(generation, |mut generation| async {
                let event = generation.next().await?;
                Some(((generation.choice(), event), generation))
            });
            if !endable {
                return events.fuse().boxed();
            }
            let (events, end) = stream::abortable(events.fuse());
            ends.push(end);
            events.boxed()
        };
        let events = match <[Generation; 1]>::try_from(generations) {
            Ok([one]) => Self::One(events(one)),
            Err(several) => Self::Several(stream::select_all(several.into_iter().map(events))),
        };
        (events, ends)
    }

    /// The next event; `None` after the last one of all generations. Cancel-safe.
    async fn next(&mut self) -> Option<ChoiceEvent> {
        match self {
            Self::One(events) => events.next().await,
            Self::Several(events) => events.next().await,
        }
    }
}

/// The state of one choice.
#[derive(Debug)]
struct Progress {
    arrived: Instant,
    prompt: u64,
    /// Whether this choice counts the prompt's tokens: true for the first choice of each prompt.
    counts: bool,
    started: Option<Started>,
    /// The time at which the worker took it.
    taken: Option<Instant>,
    first: Option<Instant>,
    last: Option<Instant>,
    /// Text offset of the next token; used only if offsets are requested.
    characters: Characters,
    completion: u64,
    /// Completion tokens that were reasoning.
    reasoning: u64,
    /// Draft tokens verified and accepted, of the last attempt.
    draft_tokens: (u64, u64),
    reason: Option<FinishReason>,
    /// Parses the answer. `None` if it can only be text.
    parser: Option<OutputParser>,
    /// Number of tool calls that have begun.
    calls: usize,
    /// Arguments of the last tool call.
    arguments: String,
    /// The prompt, if the answer tells of it.
    told: Option<ToldPrompt>,
    /// Searches a parsed answer for stop strings; then the worker has none.
    stop: Option<Stop>,
}

/// Ends a choice at a stop string.
#[derive(Debug)]
struct Stop {
    strings: StopStrings,
    /// A stop string before this many tokens does not count.
    min_tokens: u64,
    generation: AbortHandle,
    /// The stop string that was found.
    found: Option<String>,
}

impl Drop for ResponseStream {
    fn drop(&mut self) {
        if let Some(span) = &mut self.span {
            span.fail("cancelled");
        }
        // The stream was dropped before its end.
        if let Some(path) = self.counts {
            self.metrics.answered(path, CLIENT_CLOSED, false);
        }
    }
}

impl ResponseStream {
    /// `generations`: for each prompt of `plan` its choices.
    pub fn new(
        plan: &GenerationPlan,
        writer: Box<dyn Writer>,
        metrics: Arc<Metrics>,
        generations: Vec<Generation>,
        admitted: AdmittedRequest,
    ) -> Self {
        let scoring = &plan.scoring;
        let n = scoring.best_of.unwrap_or(plan.params.n) as usize;
        let arrived = admitted.arrived;
        let strings = &plan.params.stop.strings;
        let probe = generations.first().map(Generation::probe);
        let (events, ends) = Events::of(generations, plan.parser_options.is_some() && !strings.is_empty());
        let mut ends = ends.into_iter();
        let min_tokens = plan.params.stop.min_tokens.into();
        let progress = |(index, prompt): (usize, u64)| {
            let parser =
                plan.parser_options.as_ref().map(|parser_options| parser_options.parser(&plan.model));
            let stop = ends.next().map(|end| Stop::new(strings, min_tokens, end));
            let told = scoring.allows_no_tokens().then(|| ToldPrompt {
                tokens: plan.prompts.get(index / n).map(|(tokens, _)| tokens.clone()).unwrap_or_default(),
                echo: plan.echoes.get(index / n).cloned(),
            });
            let characters = told.as_ref().map_or(0, ToldPrompt::characters);
            Progress {
                counts: index % n == 0,
                characters: Characters { complete: characters, ..Characters::default() },
                told,
                ..Progress::new(arrived, prompt, parser, stop)
            }
        };
        let prompts = plan.prompts.iter().flat_map(|(tokens, _)| std::iter::repeat_n(tokens.len() as u64, n));
        let choices = prompts.enumerate().map(progress).collect();
        Self {
            writer,
            model: Arc::clone(&plan.model),
            metrics,
            events,
            choices,
            probe,
            best: (plan.params.n as usize, n),
            documents: plan.documents.clone(),
            image_tokens: plan.images.iter().flat_map(|image| &image.runs).map(|run| run.len() as u64).sum(),
            offsets: plan.params.sampling.logprobs.is_some(),
            revocation: admitted.caller.revocation(),
            included_stops: if plan.params.include_stop {
                plan.params.stop.strings.clone()
            } else {
                Vec::new()
            },
            admitted,
            span: None,
            counts: None,
            loading: None,
            silence: Duration::MAX,
            include_progress: plan.params.include_progress,
            _images: None,
        }
    }

    /// Sets the wait for a model that no worker has ready.
    pub fn loading(mut self, loading: Option<Loading>) -> Self {
        self.loading = loading;
        self
    }

    /// Holds the images of the request until the answer ends.
    pub(super) fn holding(mut self, images: HeldBytes) -> Self {
        self._images = Some(images);
        self
    }

    /// Sets the span; `None` if the request is not recorded.
    pub fn traced(mut self, span: Option<Span>) -> Self {
        self.span = span;
        self
    }

    /// Waits for all events and returns one JSON object.
    pub async fn whole(mut self) -> Result<Response, ApiError> {
        let mut whole: Vec<Delta> = self.choices.iter().map(|_| Delta::default()).collect();
        let mut next = match self.loading.take() {
            None => self.next().await?,
            Some(loading) => match tokio::time::timeout_at(loading.until.into(), self.next()).await {
                Ok(Ok(Some((_, Err(failure))))) => return Err(loading.explain(self.failed(failure))),
                Ok(next) => next?,
                Err(_) => return Err(self.record_error(loading.too_long())),
            },
        };
        while let Some((choice, event)) = next {
            let event = event.map_err(|failure| self.failed(failure))?;
            let deltas = [self.advance(choice, event), self.stopped(choice)];
            next = self.next().await.map_err(|error| self.record_error(error))?;
            if let Some(all) = whole.get_mut(choice as usize) {
                deltas.into_iter().flatten().for_each(|delta| all.add(delta));
            }
        }
        self.answered();
        let usage = self.usage();
        let (n, candidates) = self.best;
        let whole = if candidates > n { prompt_scores::best(whole, n, candidates) } else { whole };
        let body = self.writer.whole(whole, usage, &self.model.tokenizer);
        let mut headers = self.headers();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Ok((headers, body).into_response())
    }

    /// The next event. Revocation or expiry of the key ends the answer.
    async fn next(&mut self) -> Result<Option<ChoiceEvent>, ApiError> {
        if self.revocation.is_revoked() {
            return Err(ApiError::InvalidApiKey);
        }
        tokio::select! {
            biased;
            next = self.events.next() => Ok(next),
            () = self.revocation.revoked() => Err(ApiError::InvalidApiKey),
        }
    }

    /// Streams the events. Waits for the first event, so that an error before it gets its own status, unless the model
    /// has to be loaded first, and no longer than `silence`. Between events a comment follows each `silence`. The end of
    /// the stream is counted under `path`.
    pub async fn streamed(mut self, path: &'static str, silence: Duration) -> Result<Response, ApiError> {
        let mut first = Vec::with_capacity(CHUNK_ROOM);
        self.silence = silence;
        if let Some(loading) = &self.loading {
            let status = loading.status();
            self.write_status(&mut first, &status);
        } else {
            match self.next_or_silence().await {
                Ok(next) => {
                    if let Some((choice, event)) = next? {
                        let event = event.map_err(|failure| self.failed(failure))?;
                        self.take(choice, event, &mut first);
                    }
                }
                Err(silent) => self.write_status(&mut first, &silent),
            }
        }
        let mut headers = self.headers();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(self.writer.content_type()));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        // Proxies must not buffer this response.
        headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
        self.counts = Some(path);
        let body = stream::unfold(Some((self, first)), |state| async {
            let (mut answer, out) = state?;
            let (chunk, more) = answer.chunk(out).await;
            Some((Ok::<_, std::convert::Infallible>(chunk), more.then_some((answer, Vec::new()))))
        });
        let mut response = (headers, Body::from_stream(body)).into_response();
        response.extensions_mut().insert(CountsItself);
        Ok(response)
    }

    /// The next chunk, after what `out` already has, and whether more may follow. Puts all available events
    /// into one chunk and never delays an available event.
    async fn chunk(&mut self, mut out: Vec<u8>) -> (Bytes, bool) {
        loop {
            let next = match self.events.next().now_or_never() {
                Some(next) if !self.revocation.is_revoked() => Ok(next),
                None if !out.is_empty() => return (out.into(), true),
                _ => {
                    let next = match self.next_or_silence().await {
                        Ok(next) => next,
                        Err(silent) => {
                            self.write_status(&mut out, &silent);
                            return (out.into(), true);
                        }
                    };
                    match (self.loading.take(), next) {
                        (Some(loading), Ok(Some((_, Err(failure))))) => {
                            let error = loading.explain(self.failed(failure));
                            self.writer.write_error(&mut out, &error);
                            return (out.into(), false);
                        }
                        (_, next) => next,
                    }
                }
            };
            match next {
                Ok(Some((choice, Ok(event)))) => self.take(choice, event, &mut out),
                Ok(Some((_, Err(failure)))) => {
                    let error = self.failed(failure);
                    self.writer.write_error(&mut out, &error);
                    return (out.into(), false);
                }
                Err(error) => {
                    let error = self.record_error(error);
                    self.writer.write_error(&mut out, &error);
                    return (out.into(), false);
                }
                Ok(None) => {
                    self.answered();
                    let usage = self.usage();
                    self.writer.write_end(&mut out, usage);
                    return (out.into(), false);
                }
            }
            if out.len() >= CHUNK_BYTES {
                return (out.into(), true);
            }
        }
    }

    fn has_started(&self) -> bool {
        self.choices.iter().any(|choice| choice.started.is_some())
    }

    /// The next event, or the state of the answer after a silence. The state never delays an event.
    async fn next_or_silence(&mut self) -> Result<Result<Option<ChoiceEvent>, ApiError>, Status> {
        let (started, loading) = (self.has_started(), self.loading.clone());
        let silence = match started {
            false if self.include_progress => EVENT_EVERY.min(self.silence),
            _ if loading.is_some() => COMMENT_EVERY,
            _ => self.silence,
        };
        let probe = self.probe.clone().filter(|_| !started);
        let silent = async move {
            tokio::time::sleep(silence).await;
            match (loading, probe) {
                (Some(loading), _) => loading.status(),
                (None, Some(probe)) => Status::Waiting(probe.now().await),
                (None, None) => Status::Generating,
            }
        };
        tokio::select! {
            biased;
            next = self.next() => Ok(next),
            status = silent => Err(status),
        }
    }

    /// Writes that there is nothing to send yet. Clients of Anthropic's API expect no event before the first of its
    /// own, unless they ask for it.
    fn write_status(&mut self, out: &mut Vec<u8>, status: &Status) {
        match self.has_started() {
            true => self.writer.write_silence(out),
            false if self.include_progress => self.writer.write_progress(out, status.json()),
            false => self.writer.write_waiting(out, &status.comment()),
        }
    }

    /// Writes an event to `out`.
    fn take(&mut self, choice: u32, event: Event, out: &mut Vec<u8>) {
        let opening = matches!(event, Event::Started(_))
            && self.choices.get(choice as usize).is_some_and(|c| c.started.is_none());
        let deltas = [self.advance(choice, event), self.stopped(choice)];
        if opening {
            let usage = self.usage();
            self.writer.write_start(out, choice, usage);
        }
        for delta in deltas.into_iter().flatten() {
            self.writer.write_delta(out, choice, delta, &self.model.tokenizer);
        }
    }

    /// If a stop string was just found in `choice`, aborts the generation and finishes the choice. Later
    /// events of the worker are ignored.
    fn stopped(&mut self, choice: u32) -> Option<Delta> {
        let progress = self.choices.get_mut(choice as usize)?;
        if progress.reason.is_some() {
            return None;
        }
        let stop = progress.stop.as_ref()?;
        let matched = Some(stop.found.clone()?);
        stop.generation.abort();
        let finished = Finished {
            reason: FinishReason::Stop,
            matched,
            tail: String::new(),
            completion_tokens: u32::try_from(progress.completion).unwrap_or(u32::MAX),
            cached_tokens: None,
            preemptions: 0,
            drafted_tokens: 0,
            accepted_tokens: 0,
        };
        self.advance(choice, Event::Finished(finished))
    }

    /// Updates the choice's state and returns what the client gets.
    fn advance(&mut self, choice: u32, event: Event) -> Option<Delta> {
        let progress = self.choices.get_mut(choice as usize)?;
        match event {
            Event::Started(mut started) => {
                let logprobs = std::mem::take(&mut started.prompt_logprobs);
                let first = progress.started.replace(started).is_none();
                progress.taken = Some(Instant::now());
                let told = progress.told.as_ref().filter(|_| first)?;
                Some(told.delta(logprobs, &self.model.tokenizer))
            }
            Event::Tokens(mut tokens) => {
                let now = Instant::now();
                if let Some(last) = progress.last.replace(now) {
                    self.metrics.tokens_after(&self.model.id, now - last, tokens.len());
                } else {
                    progress.first = Some(now);
                    self.metrics.history().first_tokens(tokens.len());
                }
                let delta = progress.parse_tokens(&self.model.dialect, &mut tokens);
                self.admitted.permit.generated(tokens.len() as u64);
                let offset = |t: &TokenOut| progress.characters.pass(&self.model.tokenizer, t.id);
                let offsets = if self.offsets { tokens.iter().map(offset).collect() } else { Vec::new() };
                Some(Delta { tokens, offsets, ..delta })
            }
            Event::Finished(mut finished) => {
                if let (Some(cached), Some(started)) = (finished.cached_tokens, &mut progress.started) {
                    started.cached = cached;
                }
                let mut delta = progress.parse_last(&self.model.dialect, &mut finished);
                progress.completion = progress.completion.max(finished.completion_tokens.into());
                progress.draft_tokens = (finished.drafted_tokens.into(), finished.accepted_tokens.into());
                progress.reason = Some(finished.reason);
                let trace = self.span.as_ref().map(|span| span.context().trace);
                self.metrics.served(&self.model.id, progress.served(&finished, trace));
                if let Some(stop) =
                    finished.matched.as_ref().filter(|text| self.included_stops.contains(text))
                {
                    delta.push(DeltaPart::Text(stop.clone()));
                }
                Some(Delta { finished: Some(finished), ..delta })
            }
        }
    }

    fn answered(&mut self) {
        if let Some(path) = self.counts.take() {
            self.metrics.answered(path, StatusCode::OK.as_u16(), false);
        }
        let Some(mut span) = self.span.take() else { return };
        let reasons = self.choices.iter().filter_map(|choice| choice.reason);
        let reasons = reasons.map(|reason| finish_name(reason).to_owned()).collect();
        spans::answered(&mut span, self.writer.id(), self.model.id.as_str(), &self.usage(), reasons);
    }

    /// The error of a failed generation.
    fn failed(&mut self, failure: Failure) -> ApiError {
        self.record_error(failure.into())
    }

    fn record_error(&mut self, error: ApiError) -> ApiError {
        if let Some(path) = self.counts.take() {
            // The stream had begun: it is counted as failed.
            self.metrics.answered(path, error.status().as_u16(), false);
        }
        if error.status().is_server_error() {
            self.metrics.failed(&self.model.id);
        }
        if let Some(mut span) = self.span.take() {
            spans::failed(&mut span, &error);
        }
        error
    }

    fn usage(&self) -> Usage {
        let times = self.choices.first().map(Progress::times).unwrap_or_default();
        let mut usage = Usage { image: self.image_tokens, times, ..Usage::default() };
        for choice in &self.choices {
            usage.completion += choice.completion;
            usage.reasoning += choice.reasoning;
            usage.drafted += choice.draft_tokens.0;
            usage.accepted += choice.draft_tokens.1;
            usage.lookups.extend(choice.started.as_ref().map(|started| started.hit_stop.clone()));
            if choice.counts {
                usage.prompt += choice.prompt;
                usage.cached += choice.started.as_ref().map_or(0, |s| s.cached.into());
            }
        }
        usage
    }

    fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        let Some(started) = self.choices.iter().find_map(|c| c.started.as_ref()) else { return headers };
        let route = format!("reason={};predicted={}", started.reason.as_str(), started.predicted);
        // By their types, names have only characters that headers allow.
        if let (Ok(worker), Ok(route)) =
            (HeaderValue::from_str(started.node.as_str()), HeaderValue::from_str(&route))
        {
            headers.insert(WORKER_HEADER, worker);
            headers.insert(ROUTE_HEADER, route);
        }
        let indices: Vec<String> = self.documents.iter().map(usize::to_string).collect();
        if !indices.is_empty()
            && let Ok(indices) = HeaderValue::from_str(&indices.join(","))
        {
            headers.insert(DOCUMENTS_HEADER, indices);
        }
        headers
    }
}

impl Progress {
    fn new(arrived: Instant, prompt: u64, parser: Option<OutputParser>, stop: Option<Stop>) -> Self {
        Self {
            arrived,
            prompt,
            counts: true,
            started: None,
            taken: None,
            first: None,
            last: None,
            characters: Characters::default(),
            completion: 0,
            reasoning: 0,
            draft_tokens: (0, 0),
            reason: None,
            parser,
            calls: 0,
            arguments: String::new(),
            told: None,
            stop,
        }
    }

    /// Parses `tokens` into a delta. Removes the tokens after the end of the choice.
    fn parse_tokens(&mut self, dialect: &Dialect, tokens: &mut Vec<TokenOut>) -> Delta {
        let Some(parser) = &mut self.parser else {
            self.completion += tokens.len() as u64;
            let mut delta = Delta::default();
            delta.push(DeltaPart::Text(tokens.iter().map(|t| t.text.as_str()).collect()));
            return delta;
        };
        let (mut used, mut deltas) = (0, Vec::new());
        for token in tokens.iter() {
            let thinking = parser.is_thinking();
            let new = match dialect.mark(token.id) {
                Some(mark) => {
                    let mut new = parser.push(token.text.strip_suffix(mark).unwrap_or(&token.text));
                    new.extend(parser.push_mark(mark));
                    new
                }
                None => parser.push(&token.text),
            };
            used += 1;
            self.completion += 1;
            self.reasoning += u64::from(thinking || parser.is_thinking());
            match &mut self.stop {
                Some(stop) => deltas.extend(stop.search(new, self.completion)),
                None => deltas.extend(new),
            }
            if self.stop.as_ref().is_some_and(|stop| stop.found.is_some()) {
                break;
            }
        }
        tokens.truncate(used);
        self.delta(dialect.calls(), deltas)
    }

    /// Parses the end of the answer. Drops an incomplete tool call if the model did not end the answer
    /// itself. A stop string in the held-back text becomes the finish reason.
    fn parse_last(&mut self, dialect: &Dialect, finished: &mut Finished) -> Delta {
        let Some(parser) = &mut self.parser else {
            let mut delta = Delta::default();
            delta.push(DeltaPart::Text(finished.tail.clone()));
            return delta;
        };
        let mut deltas = Vec::new();
        if self.stop.as_ref().is_none_or(|stop| stop.found.is_none()) {
            let cut = finished.reason != FinishReason::Stop || finished.matched.is_some();
            deltas = parser.push(&finished.tail);
            deltas.extend(parser.finish(cut));
            if let Some(stop) = &mut self.stop {
                deltas = stop.search(deltas, self.completion);
                deltas.push(ParsedDelta::Text(stop.strings.finish()));
                if stop.found.is_some() {
                    (finished.reason, finished.matched) = (FinishReason::Stop, stop.found.clone());
                }
            }
        }
        let mut delta = self.delta(dialect.calls(), deltas);
        let complete = serde_json::from_str::<serde::de::IgnoredAny>(&self.arguments).is_ok();
        (delta.called, delta.cut) = (self.calls > 0 && complete, self.calls > 0 && !complete);
        delta
    }

    fn delta(&mut self, style: Calls, deltas: Vec<ParsedDelta>) -> Delta {
        let mut delta = Delta::default();
        for parsed in deltas {
            let call = match parsed {
                ParsedDelta::Text(text) => {
                    delta.push(DeltaPart::Text(text));
                    continue;
                }
                ParsedDelta::Thought(text) => {
                    delta.push(DeltaPart::Thought(text));
                    continue;
                }
                ParsedDelta::Call(name) => {
                    self.calls += 1;
                    self.arguments.clear();
                    CallPart { begins: Some((call_id(style), name)), ..CallPart::default() }
                }
                ParsedDelta::Arguments(arguments) => {
                    self.arguments.push_str(&arguments);
                    CallPart { arguments, ..CallPart::default() }
                }
            };
            delta.push(DeltaPart::Call(CallPart { index: self.calls.saturating_sub(1), ..call }));
        }
        delta
    }

    fn times(&self) -> Times {
        let now = Instant::now();
        let since = |at: Option<Instant>| at.unwrap_or(now).saturating_duration_since(self.arrived);
        let (started, first, last) = (since(self.taken), since(self.first), since(self.last));
        Times { started, first, last, ended: since(None) }
    }

    fn served(&self, finished: &Finished, trace: Option<TraceId>) -> Served {
        let now = Instant::now();
        let since = |at: Instant| at.saturating_duration_since(self.arrived);
        Served {
            to_first: since(self.first.unwrap_or(now)),
            queued: self.started.as_ref().map(|s| s.queued).unwrap_or_default(),
            total: since(now),
            prompt: self.prompt,
            generated: self.completion,
            reason: finished.reason,
            trace,
        }
    }
}

/// Counts the characters of a choice's text.
#[derive(Debug, Default)]
struct Characters {
    complete: usize,
    text: Utf8Stream,
}

impl Characters {
    /// Adds a token and returns its text offset. A token that continues a character has that character's
    /// offset.
    fn pass(&mut self, tokenizer: &Tokenizer, token: u32) -> usize {
        let offset = self.complete;
        if !tokenizer.is_special(token) {
            self.complete += self.text.push(tokenizer.token_bytes(token)).chars().count();
        }
        offset
    }
}

impl Stop {
    fn new(strings: &[String], min_tokens: u64, generation: AbortHandle) -> Self {
        Self { strings: StopStrings::new(strings.to_vec()), min_tokens, generation, found: None }
    }

    /// Searches the texts of `deltas` and returns what is left of it; `tokens`: completion tokens so far.
    fn search(&mut self, deltas: Vec<ParsedDelta>, tokens: u64) -> Vec<ParsedDelta> {
        let mut left = Vec::with_capacity(deltas.len());
        for parsed in deltas {
            match parsed {
                ParsedDelta::Text(text) => {
                    let (text, found) = self.strings.push(&text, tokens > self.min_tokens);
                    left.push(ParsedDelta::Text(text));
                    if found.is_some() {
                        self.found = found;
                        break;
                    }
                }
                // No stop string spans reasoning or a tool call.
                other => left.extend([ParsedDelta::Text(self.strings.finish()), other]),
            }
        }
        left
    }
}

/// A new id of a tool call. Mistral's templates accept only nine letters or digits.
fn call_id(style: Calls) -> String {
    match style {
        Calls::Mistral => format!("{:09x}", random_u64() >> 28),
        _ => format!("call_{:016x}", random_u64()),
    }
}

#[cfg(test)]
mod tests;
