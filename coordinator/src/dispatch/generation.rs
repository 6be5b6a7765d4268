//! One generation, from the queue to its last token, over as many workers as it takes.
//!
//! Invariant: the client sees a prefix of what one undisturbed run would have emitted, and then its end or an
//! error. A request without emitted tokens starts over on another worker. A request with emitted tokens is
//! replayed: the next worker gets them as part of the prompt, recomputes them and continues with the same
//! seed, inside the same numeric class. Frames of different attempts cannot mix, because each attempt has its
//! own stream and the old stream is dropped first.

use super::choice;
use super::claim::{Placed, TicketGuard};
use crate::balancer::{Assignment, Output, Prefilling, Refusal, RouteRequest};
use crate::routing::Reason;
use crate::routing::demand::CommonKey;
use proto::block::BlockId;
use proto::ids::{ModelId, NodeId, RequestId};
use proto::message::{
    FinishReason, Finished, GenerateError, GenerateFrame, GenerateRequest, GrammarSpec, Sampling, Stop,
    TenantTurn, TokenIds, TokenOut,
};
use proto::sequence::SequenceName;
use proto::trace::{Span, TraceContext};
use proto::transport::GenerateStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A generation to be run.
#[derive(Debug, Clone)]
pub struct GenerationJob {
    pub request_id: RequestId,
    pub choice: u32,
    pub tenant: Arc<str>,
    pub model: ModelId,
    /// Root of the prompt's chain of hash units.
    pub root: BlockId,
    /// The prompt's tokens; not empty.
    pub prompt: TokenIds,
    /// Ids of the prompt's full hash units.
    pub chain: Arc<[BlockId]>,
    pub sampling: Sampling,
    pub stop: Stop,
    /// Grammar of the answer; `None` allows any answer.
    pub grammar: Option<GrammarSpec>,
    /// The request group that the client named.
    pub group: Option<CommonKey>,
    /// Priority among the tenant's requests; lower goes first.
    pub priority: i32,
    pub deadline: Instant,
    /// Parent span; `None` if the request is not traced.
    pub trace: Option<TraceContext>,
}

impl GenerationJob {
    pub(super) fn ask(&self) -> RouteRequest {
        RouteRequest {
            request: self.request_id.clone(),
            tenant: Arc::clone(&self.tenant),
            model: self.model.clone(),
            operation: None,
            prompt_tokens: self.prompt.len().try_into().unwrap_or(u32::MAX),
            output: self.output(),
            chain: Arc::clone(&self.chain),
            group: self.group,
            priority: self.priority,
            deadline: self.deadline,
            explain: self.trace.is_some(),
        }
    }

    fn output(&self) -> Output {
        let Stop { max_tokens, strings, token_ids, ignore_eos, .. } = &self.stop;
        let fixed = *ignore_eos && strings.is_empty() && token_ids.is_empty() && self.grammar.is_none();
        Output { most: *max_tokens, fixed }
    }
}

/// The worker that serves a generation, once the prompt is computed.
#[derive(Debug, Clone, PartialEq, Eq)]
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
    /// Declared before `claim`, so that it is dropped first: the cancellation must be sent before another
    /// request takes the place.
    attempt: Option<Attempting>,
    claim: TicketGuard,
    job: GenerationJob,
    /// Tokens returned to the caller.
    emitted: Vec<u32>,
    over: bool,
}

#[derive(Debug)]
struct Attempting {
    placed: Placed,
    stream: GenerateStream,
    started: bool,
    span: Option<Span>,
}

impl Generation {
    pub(super) fn new(claim: TicketGuard, job: GenerationJob) -> Self {
        Self { attempt: None, claim, job, emitted: Vec::new(), over: false }
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
        let deadline = tokio::time::Instant::from_std(self.job.deadline);
        let event = tokio::time::timeout_at(deadline, self.advance()).await.unwrap_or(Err(Failure::Deadline));
        if matches!(event, Ok(Event::Finished(_)) | Err(_)) {
            self.over = true;
            self.attempt = None;
            if event.is_ok() {
                self.claim.generated(self.emitted.len());
            }
            self.claim.end();
        }
        Some(event)
    }

    async fn advance(&mut self) -> Result<Event, Failure> {
        loop {
            let Some(attempt) = &mut self.attempt else {
                self.attempt = Some(self.begin().await?);
                continue;
            };
            let failed = match attempt.stream.next().await {
                Some(Ok(GenerateFrame::Started(started))) if !attempt.started => {
                    attempt.started = true;
                    if let Some(span) = &mut attempt.span {
                        span.set("kvasir.cached_tokens", started.cached_tokens);
                    }
                    let name = SequenceName { request: self.job.request_id.clone(), choice: self.job.choice };
                    let node = &attempt.placed.assignment.node;
                    self.claim.started(started.cached_tokens, (self.job.root, &name, node));
                    // The client already knows a worker; a change of the worker is not reported to it.
                    if !self.emitted.is_empty() {
                        continue;
                    }
                    let assignment = &attempt.placed.assignment;
                    // Only a fork computes none of its prompt. It does no lookup, so no prediction applies.
                    let forked = started.computed_tokens == 0;
                    let predicted = if forked { started.cached_tokens } else { assignment.predicted };
                    let pulls = assignment.pull.is_some();
                    self.claim.dispatch().metrics.cached(predicted, started.cached_tokens, pulls);
                    return Ok(Event::Started(Started {
                        node: assignment.node.clone(),
                        reason: assignment.reason,
                        predicted: assignment.predicted,
                        cached: started.cached_tokens,
                        hit_stop: started.hit_stop,
                        queued: attempt.placed.queued(),
                    }));
                }
                Some(Ok(GenerateFrame::Tokens(tokens))) if attempt.started => {
                    self.emitted.extend(tokens.iter().map(|t| t.id));
                    return Ok(Event::Tokens(tokens));
                }
                Some(Ok(GenerateFrame::Finished(finished)))
                    if attempt.started && finished.reason != FinishReason::Cancelled =>
                {
                    return Ok(Event::Finished(finished));
                }
                Some(Ok(GenerateFrame::Failed(error))) if error.retryable() => Some(error),
                Some(Ok(GenerateFrame::Failed(error))) => return Err(Failure::Worker(error)),
                // A frame out of order, or a cancellation that we did not request.
                Some(Ok(_)) => Some(GenerateError::Internal),
                Some(Err(error)) => {
                    tracing::info!(request = %self.job.request_id, %error, "an attempt was cut off");
                    None
                }
                None => None,
            };
            let Some(mut attempt) = self.attempt.take() else { continue };
            if let Some(span) = &mut attempt.span {
                span.fail(if failed.is_some() { "declined" } else { "lost" });
            }
            self.give_up(&attempt.placed, failed);
        }
    }

    /// Waits for a worker and sends it the request.
    async fn begin(&mut self) -> Result<Attempting, Failure> {
        loop {
            let (placed, turn) = match self.claim.worker().await {
                Err(_) if !self.emitted.is_empty() => return Err(Failure::Lost),
                placed => placed?,
            };
            let mut span = self.job.trace.and_then(|trace| choice::record(trace, &placed));
            let context = span.as_ref().map(Span::context);
            let (turn, computed) = match &placed.assignment.prefill {
                Some(stage) => {
                    // The requests behind this one need not wait for the prefill worker.
                    drop(turn);
                    (None, self.prefilled(stage, self.request(&placed.assignment, context)).await)
                }
                None => (Some(turn), true),
            };
            let mut request = self.request(&placed.assignment, context);
            if !computed {
                request.pull = None;
            }
            let connection = placed.link.connection();
            let opened = connection.open_generate(&request).await;
            drop(turn);
            match opened {
                Ok(stream) => return Ok(Attempting { placed, stream, started: false, span }),
                Err(error) => {
                    tracing::info!(request = %self.job.request_id, %error, "cannot reach the chosen worker");
                    span.iter_mut().for_each(|span| span.fail("unreachable"));
                    self.give_up(&placed, None);
                }
            }
        }
    }

    /// Has a prefill worker compute the prompt and the emitted tokens. Returns `false` if it fails.
    async fn prefilled(&self, stage: &Prefilling, request: GenerateRequest) -> bool {
        let Some(link) = self.claim.dispatch().link(&stage.node, stage.epoch) else { return false };
        let request = GenerateRequest {
            prompt: [&*request.prompt, &*request.emitted].concat().into(),
            emitted: TokenIds::default(),
            sampling: Sampling::default(),
            stop: Stop { max_tokens: 1, ignore_eos: true, ..Stop::default() },
            pull: None,
            together: 1,
            grammar: None,
            ..request
        };
        let computed = async {
            let mut stream = link.connection().open_generate(&request).await.map_err(|e| e.to_string())?;
            while let Some(frame) = stream.next().await {
                match frame.map_err(|error| error.to_string())? {
                    GenerateFrame::Finished(_) => return Ok(()),
                    GenerateFrame::Failed(error) => return Err(error.to_string()),
                    GenerateFrame::Started(_) | GenerateFrame::Tokens(_) => {}
                }
            }
            Err("the stream ended without an end frame".to_owned())
        };
        let computed: Result<(), String> = computed.await;
        if let Err(error) = &computed {
            tracing::info!(request = %self.job.request_id, node = %stage.node, error, "a prefill worker did not compute a prompt ahead");
        }
        computed.is_ok()
    }

    fn request(&self, assignment: &Assignment, trace: Option<TraceContext>) -> GenerateRequest {
        let left = self.job.deadline.saturating_duration_since(Instant::now());
        let tenant = &self.job.tenant;
        GenerateRequest {
            request_id: self.job.request_id.clone(),
            choice: self.job.choice,
            attempt: assignment.attempt,
            model: self.job.model.clone(),
            root: self.job.root,
            prompt: self.job.prompt.clone(),
            emitted: self.emitted.as_slice().into(),
            sampling: self.job.sampling.clone(),
            stop: self.job.stop.clone(),
            predicted_cached: assignment.predicted,
            deadline_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1),
            pull: assignment.pull.clone(),
            together: assignment.together,
            trace,
            grammar: self.job.grammar.clone(),
            turn: turn_of(tenant, self.claim.weight(tenant)),
        }
    }

    fn give_up(&mut self, placed: &Placed, setback: Option<GenerateError>) {
        let class = (!self.emitted.is_empty()).then(|| placed.assignment.numeric_class.clone());
        self.claim.give_up(placed, setback, class);
    }
}

/// The tenant's number for fair turns at workers, equal at all coordinators.
fn turn_of(tenant: &str, weight: u32) -> TenantTurn {
    let hash = blake3::derive_key("kvasir 2026-11 tenant's turn", tenant.as_bytes());
    let [a, b, c, d, e, f, g, h, ..] = hash;
    TenantTurn { tenant: u64::from_le_bytes([a, b, c, d, e, f, g, h]), weight }
}
