//! One generation, from the queue to its last token, over as many workers as it takes.
//!
//! Invariant: the client sees a prefix of what one undisturbed run would have emitted, and then its end or an
//! error. A request without emitted tokens starts over on another worker. A request with emitted tokens is
//! replayed: the next worker gets them as part of the prompt, recomputes them and continues with the same
//! seed, inside the same numeric class. Frames of different attempts cannot mix, because each attempt has its
//! own stream and the old stream is dropped first.

use super::choice;
use super::progress::ProgressProbe;
use super::ticket::{PlacedAttempt, TicketGuard};
use super::usage::{AttemptMeter, Payer, PrefillMeter};
use proto::block::BlockId;
use proto::ids::{Epoch, ModelId, NodeId};
use proto::message::{
    FinishReason, Finished, GenerateError, GenerateFrame, GenerateRequest, GrammarSpec, PromptImage,
    PromptLogprob, PromptLogprobs, Sampling, Stop, TenantShare, TokenIds, TokenOut,
};
use proto::sequence::SequenceName;
use proto::trace::{Span, TraceContext};
use proto::usage::AttemptId;
use router::admission::BACKGROUND;
use router::balancer::{Assignment, Refusal, RouteRequest};
use router::routing::Reason;
use std::sync::Arc;
use std::time::{Duration, Instant};
use transport::{Error, GenerateStream, StreamCode};

/// A generation to be run: what is routed, and what only the worker reads.
#[derive(Debug, Clone)]
pub struct GenerationJob {
    pub request: Arc<RouteRequest>,
    /// Digest of the model with the adapter, if the request names one.
    pub adapter: Option<[u8; 32]>,
    pub choice: u32,
    /// Root of the prompt's chain of hash units.
    pub root: BlockId,
    /// The prompt's tokens; not empty.
    pub prompt: TokenIds,
    /// The prompt's images.
    pub images: Vec<PromptImage>,
    /// The log-probabilities of the prompt's tokens are requested; then it has no images.
    pub prompt_logprobs: Option<PromptLogprobs>,
    pub sampling: Sampling,
    pub stop: Stop,
    /// Grammar of the answer; `None` allows any answer.
    pub grammar: Option<GrammarSpec>,
    pub payer: Payer,
}

/// The worker that serves a generation, once the prompt is computed.
#[derive(Debug, Clone, PartialEq)]
pub struct Started {
    pub node: NodeId,
    pub reason: Reason,
    /// Prompt tokens that were expected in the worker's cache.
    pub predicted: u32,
    /// Prompt tokens that were cached.
    pub cached: u32,
    /// Why the prefix lookup stopped there.
    pub hit_stop: String,
    /// Time from submission until a worker was chosen.
    pub queued: Duration,
    /// Log-probabilities of the prompt's tokens from the second one on, if they were requested.
    pub prompt_logprobs: Vec<PromptLogprob>,
}

/// Events of a generation, in order: `Started` (repeated after a retry before the first token), any number of
/// `Tokens`, then `Finished`.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A worker has computed the prompt.
    Started(Started),
    Tokens(Vec<TokenOut>),
    Finished(Finished),
}

/// A generation's final error. No event follows it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// No worker was found in time.
    #[error(transparent)]
    Refused(Refusal),
    /// A worker refused the request for good, or the last possible worker failed.
    #[error(transparent)]
    Worker(GenerateError),
    /// The worker was lost and no other could continue.
    #[error("the worker was lost")]
    Lost,
    #[error("the deadline passed")]
    Deadline,
}

/// A running generation. Dropping it cancels it on every worker.
#[derive(Debug)]
pub struct Generation {
    /// Declared before `ticket`, so that it is dropped first: the cancellation must be sent before another
    /// request takes the place.
    attempt: Option<RunningAttempt>,
    ticket: TicketGuard,
    probe: ProgressProbe,
    job: GenerationJob,
    /// Tokens returned to the caller.
    emitted: Vec<u32>,
    over: bool,
}

#[derive(Debug)]
struct RunningAttempt {
    placed: PlacedAttempt,
    stream: GenerateStream,
    meter: AttemptMeter,
    started: bool,
    /// Log-probabilities of the prompt's tokens that have arrived, from the second one on.
    prompt_logprobs: Vec<PromptLogprob>,
    /// Prompt tokens that were expected in the cache, while only the engine's end frame will tell how many were.
    estimated: Option<u32>,
    span: Option<Span>,
}

impl Generation {
    pub(super) fn new(ticket: TicketGuard, job: GenerationJob) -> Self {
        let name = SequenceName { request: job.request.request_id.clone(), choice: job.choice };
        let probe = ticket.probe(job.root, name);
        Self { attempt: None, ticket, probe, job, emitted: Vec::new(), over: false }
    }

    /// Tells how far this generation is.
    pub fn probe(&self) -> ProgressProbe {
        self.probe.clone()
    }

    /// The choice's index in its request.
    pub fn choice(&self) -> u32 {
        self.job.choice
    }

    /// The next event; `None` after `Finished` or a failure.
    pub async fn next(&mut self) -> Option<Result<Event, Failure>> {
        if self.over {
            return None;
        }
        let deadline = tokio::time::Instant::from_std(self.job.request.deadline);
        let event = tokio::time::timeout_at(deadline, self.advance()).await.unwrap_or(Err(Failure::Deadline));
        if matches!(event, Ok(Event::Finished(_)) | Err(_)) {
            self.over = true;
            let at_its_deadline =
                matches!(event, Err(Failure::Worker(GenerateError::DeadlineExceeded { .. })));
            if let (Some(attempt), Err(Failure::Worker(_)), false) =
                (&mut self.attempt, &event, at_its_deadline)
            {
                attempt.meter.failed();
            }
            self.attempt = None;
            if event.is_ok() {
                self.ticket.generated(self.emitted.len());
            }
            self.ticket.end();
        }
        Some(event)
    }

    async fn advance(&mut self) -> Result<Event, Failure> {
        loop {
            let Some(attempt) = &mut self.attempt else {
                self.attempt = Some(self.begin().await?);
                continue;
            };
            let scored = self.job.prompt_logprobs.filter(|_| self.emitted.is_empty());
            // The first token has no log-probability.
            let scored_tokens = scored.map_or(0, |_| self.job.prompt.len().saturating_sub(1));
            let worker_error = match attempt.stream.next().await {
                Some(Ok(GenerateFrame::Prompt(logprobs)))
                    if !attempt.started
                        && attempt.prompt_logprobs.len() + logprobs.len() <= scored_tokens =>
                {
                    attempt.prompt_logprobs.extend(logprobs);
                    continue;
                }
                Some(Ok(GenerateFrame::Started(started)))
                    if !attempt.started && attempt.prompt_logprobs.len() == scored_tokens =>
                {
                    attempt.started = true;
                    attempt.meter.started(started.cached_tokens, started.computed_tokens, started.estimated);
                    if let Some(span) = &mut attempt.span {
                        span.set("kvasir.cached_tokens", started.cached_tokens);
                    }
                    let node = &attempt.placed.assignment.node;
                    self.ticket.started(started.cached_tokens, (self.job.root, self.probe.name(), node));
                    // The client already knows a worker; a change of the worker is not reported to it.
                    if !self.emitted.is_empty() {
                        continue;
                    }
                    let assignment = &attempt.placed.assignment;
                    // A fork computes none of its prompt, and a prompt with log-probabilities is computed whole. Both
                    // do no lookup, so no prediction applies.
                    let no_lookup = started.computed_tokens == 0 || scored.is_some();
                    let predicted = if no_lookup { started.cached_tokens } else { assignment.predicted };
                    let pulls = assignment.pull.is_some();
                    match started.estimated {
                        true => attempt.estimated = Some(predicted),
                        false => {
                            self.ticket.dispatch().metrics.cached(predicted, started.cached_tokens, pulls)
                        }
                    }
                    return Ok(Event::Started(Started {
                        node: assignment.node.clone(),
                        reason: assignment.reason,
                        predicted: assignment.predicted,
                        cached: started.cached_tokens,
                        hit_stop: started.hit_stop,
                        queued: attempt.placed.queued(&self.job.request),
                        prompt_logprobs: std::mem::take(&mut attempt.prompt_logprobs),
                    }));
                }
                Some(Ok(GenerateFrame::Tokens(tokens))) if attempt.started => {
                    attempt.meter.delivered(tokens.len());
                    self.emitted.extend(tokens.iter().map(|t| t.id));
                    return Ok(Event::Tokens(tokens));
                }
                Some(Ok(GenerateFrame::Finished(finished)))
                    if attempt.started && finished.reason != FinishReason::Cancelled =>
                {
                    if let (Some(predicted), Some(cached)) = (attempt.estimated, finished.cached_tokens) {
                        self.ticket.dispatch().metrics.cached(predicted, cached, false);
                    }
                    attempt.meter.finished(finished.cached_tokens);
                    return Ok(Event::Finished(finished));
                }
                Some(Ok(GenerateFrame::Failed(error))) if error.retryable() => Some(error),
                Some(Ok(GenerateFrame::Failed(error))) => return Err(Failure::Worker(error)),
                // A frame out of order, or a cancellation that we did not request.
                Some(Ok(_)) => Some(GenerateError::Internal),
                Some(Err(Error::StreamEnded(StreamCode::UnknownKind))) if scored.is_some() => {
                    Some(earlier_version(&attempt.placed.assignment.node))
                }
                Some(Err(error)) => {
                    tracing::info!(request = %self.job.request.request_id, %error, "an attempt was cut off");
                    None
                }
                None => None,
            };
            let Some(mut attempt) = self.attempt.take() else { continue };
            if let Some(span) = &mut attempt.span {
                span.fail(if worker_error.is_some() { "declined" } else { "lost" });
            }
            attempt.meter.failed();
            self.probe.sent_to(None);
            self.retry_elsewhere(&attempt.placed, worker_error);
        }
    }

    /// Waits for a worker and sends it the request.
    async fn begin(&mut self) -> Result<RunningAttempt, Failure> {
        loop {
            let mut placed = self.ticket.worker(!self.emitted.is_empty()).await?;
            if self.job.prompt_logprobs.is_some() && self.emitted.is_empty() {
                // The worker computes the whole prompt.
                (placed.assignment.prefill, placed.assignment.pull) = (None, None);
            }
            let mut span = choice::record(&self.job.request, &placed);
            let context = span.as_ref().map(Span::context);
            let mut prefill = None;
            if let Some((node, epoch)) = &placed.assignment.prefill {
                // The requests behind this one need not wait for the prefill worker.
                placed.send_order = None;
                prefill = self.prefill_at(node, *epoch, self.request(&placed.assignment, context)).await;
            }
            let mut request = self.request(&placed.assignment, context);
            if placed.assignment.prefill.is_some() && prefill.is_none() {
                request.pull = None;
            }
            let opened = placed.link.connection().open_generate(&request).await;
            placed.send_order = None;
            match opened {
                Ok(stream) => {
                    self.probe.sent_to(Some(Arc::clone(&placed.link)));
                    let (node, payer) = (&placed.assignment.node, &self.job.payer);
                    let usage = self.ticket.dispatch().usage();
                    let prompt = self.job.prompt.len();
                    let meter = AttemptMeter::begin(usage, node, attempt_id(&request), payer, prompt);
                    let meter = meter.with_prefill(prefill);
                    return Ok(RunningAttempt {
                        placed,
                        stream,
                        meter,
                        started: false,
                        prompt_logprobs: Vec::new(),
                        estimated: None,
                        span,
                    });
                }
                Err(error) => {
                    tracing::info!(request = %self.job.request.request_id, %error, "cannot reach the chosen worker");
                    span.iter_mut().for_each(|span| span.fail("unreachable"));
                    let unknown = request.prompt_logprobs.is_some()
                        && matches!(error, Error::StreamEnded(StreamCode::UnknownKind));
                    let error = unknown.then(|| earlier_version(&placed.assignment.node));
                    self.retry_elsewhere(&placed, error);
                }
            }
        }
    }

    /// Has a prefill worker compute the prompt and the emitted tokens. Returns `None` if it fails.
    async fn prefill_at(
        &self,
        node: &NodeId,
        epoch: Epoch,
        request: GenerateRequest,
    ) -> Option<PrefillMeter> {
        let link = self.ticket.dispatch().link(node, epoch)?;
        let request = GenerateRequest {
            prompt: [&*request.prompt, &*request.emitted].concat().into(),
            emitted: TokenIds::default(),
            sampling: Sampling::default(),
            stop: Stop { max_tokens: 1, ignore_eos: true, ..Stop::default() },
            pull: None,
            together: 1,
            grammar: None,
            prompt_logprobs: None,
            ..request
        };
        let computed = async {
            let mut stream = link.connection().open_generate(&request).await.map_err(|e| e.to_string())?;
            let usage = self.ticket.dispatch().usage();
            let mut meter = PrefillMeter::begin(usage, node, attempt_id(&request), &self.job.payer);
            while let Some(frame) = stream.next().await {
                match frame.map_err(|error| error.to_string())? {
                    GenerateFrame::Finished(_) => return Ok(meter),
                    GenerateFrame::Failed(error) => return Err(error.to_string()),
                    GenerateFrame::Started(started) => meter.computed(started.computed_tokens),
                    GenerateFrame::Tokens(_) | GenerateFrame::Prompt(_) => {}
                }
            }
            Err("the stream ended without an end frame".to_owned())
        };
        let computed: Result<PrefillMeter, String> = computed.await;
        if let Err(error) = &computed {
            tracing::info!(request = %self.job.request.request_id, %node, error, "a prefill worker did not compute a prompt ahead");
        }
        computed.ok()
    }

    fn request(&self, assignment: &Assignment, trace: Option<TraceContext>) -> GenerateRequest {
        let request = &self.job.request;
        let left = request.deadline.saturating_duration_since(Instant::now());
        let encoders = match self.job.images.is_empty() {
            true => Vec::new(),
            false => self.ticket.dispatch().encoders_for(&assignment.node),
        };
        GenerateRequest {
            request_id: request.request_id.clone(),
            choice: self.job.choice,
            attempt: assignment.attempt,
            model: self.job.adapter.as_ref().map_or_else(|| request.model.clone(), ModelId::of_adapter),
            root: self.job.root,
            prompt: self.job.prompt.clone(),
            emitted: self.emitted.as_slice().into(),
            sampling: self.job.sampling.clone(),
            stop: self.job.stop.clone(),
            images: self.job.images.clone(),
            encoders,
            // They are known once there is a token.
            prompt_logprobs: self.job.prompt_logprobs.filter(|_| self.emitted.is_empty()),
            predicted_cached: assignment.predicted,
            deadline_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1),
            pull: assignment.pull.clone(),
            together: assignment.together,
            trace,
            grammar: self.job.grammar.clone(),
            tenant: share_of(request, self.ticket.weight(&request.tenant)),
        }
    }

    fn retry_elsewhere(&mut self, placed: &PlacedAttempt, error: Option<GenerateError>) {
        let class = (!self.emitted.is_empty()).then(|| placed.assignment.numeric_class.clone());
        self.ticket.retry_elsewhere(placed, error, class);
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        // Choices of one request count once.
        if self.job.choice == 0 {
            self.job.payer.request_ended(self.ticket.dispatch().usage());
        }
    }
}

/// The error of a worker whose version does not know requests for the log-probabilities of prompts.
fn earlier_version(node: &NodeId) -> GenerateError {
    GenerateError::Unsupported {
        field: "prompt_logprobs".to_owned(),
        reason: format!("the version of worker {node} gives no log-probabilities of prompts"),
    }
}

fn attempt_id(request: &GenerateRequest) -> AttemptId {
    AttemptId {
        request: request.request_id.clone(),
        part: request.choice,
        attempt: request.attempt,
        root: request.root,
    }
}

/// The tenant's number and weight for fair shares of workers, equal at all coordinators. In the background the tenant
/// has another number, and no weight.
fn share_of(request: &RouteRequest, weight: u32) -> TenantShare {
    let background = request.priority == BACKGROUND;
    let context = match background {
        true => "kvasir 2026-12 tenant's turn in the background",
        false => "kvasir 2026-11 tenant's turn",
    };
    let [a, b, c, d, e, f, g, h, ..] = blake3::derive_key(context, request.tenant.as_bytes());
    let weight = if background { 0 } else { weight };
    TenantShare { tenant: u64::from_le_bytes([a, b, c, d, e, f, g, h]), weight }
}
