//! A call to encode texts, over as many workers as it takes. Nothing is emitted before the result is
//! complete, so a failed call starts over on another worker.

use super::claim::TicketGuard;
use super::{Failure, choice};
use crate::balancer::{Assignment, Output, RouteRequest};
use crate::routing::Reason;
use proto::ids::{ModelId, NodeId, RequestId};
use proto::message::{EncodeRequest, EncodeText};
use proto::operation::Operation;
use proto::trace::{Span, TraceContext};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A batch of texts to be encoded.
#[derive(Debug, Clone)]
pub struct EncodeJob {
    pub request_id: RequestId,
    pub part: u32,
    pub tenant: Arc<str>,
    /// `Embed` or `Rerank`.
    pub operation: Operation,
    pub model: ModelId,
    /// Between 1 and [`proto::message::MAX_ENCODE_TEXTS`] texts.
    pub texts: Vec<EncodeText>,
    pub deadline: Instant,
    /// Parent span; `None` if the request is not traced.
    pub trace: Option<TraceContext>,
}

impl EncodeJob {
    pub fn tokens(&self) -> u64 {
        self.texts.iter().map(|text| text.tokens.len() as u64).sum()
    }

    pub(super) fn ask(&self) -> RouteRequest {
        RouteRequest {
            request: self.request_id.clone(),
            tenant: Arc::clone(&self.tenant),
            model: self.model.clone(),
            operation: Some(self.operation),
            prompt_tokens: self.tokens().try_into().unwrap_or(u32::MAX),
            output: Output::default(),
            // Encoders cache no prefixes.
            chain: [].into(),
            group: None,
            priority: 0,
            deadline: self.deadline,
            explain: self.trace.is_some(),
        }
    }
}

/// The result of an [`EncodeJob`].
#[derive(Debug, Clone, PartialEq)]
pub struct Encoded {
    /// The values of each text, in order; all of one length.
    pub texts: Vec<Vec<f32>>,
    pub node: NodeId,
    pub reason: Reason,
    /// Time from submission until a worker was chosen.
    pub queued: Duration,
}

/// A running call. Dropping it, or its future, cancels it on the worker.
#[derive(Debug)]
pub struct Encoding {
    claim: TicketGuard,
    job: EncodeJob,
}

impl Encoding {
    pub(super) fn new(claim: TicketGuard, job: EncodeJob) -> Self {
        Self { claim, job }
    }

    pub async fn run(mut self) -> Result<Encoded, Failure> {
        let deadline = tokio::time::Instant::from_std(self.job.deadline);
        tokio::time::timeout_at(deadline, self.advance()).await.unwrap_or(Err(Failure::Deadline))
    }

    async fn advance(&mut self) -> Result<Encoded, Failure> {
        loop {
            let (placed, turn) = self.claim.worker().await?;
            // The send order matters to prefix caches only.
            drop(turn);
            let mut span = self.job.trace.and_then(|trace| choice::record(trace, &placed));
            let request = self.request(&placed.assignment, span.as_ref().map(Span::context));
            let connection = placed.link.connection();
            let setback = match connection.encode(&request).await {
                Ok(Ok(texts)) => {
                    let queued = placed.queued();
                    let Assignment { node, reason, .. } = placed.assignment;
                    return Ok(Encoded { texts, node, reason, queued });
                }
                Ok(Err(error)) if error.retryable() => {
                    span.iter_mut().for_each(|span| span.fail("declined"));
                    Some(error)
                }
                Ok(Err(error)) => {
                    span.iter_mut().for_each(|span| span.fail("declined"));
                    return Err(Failure::Worker(error));
                }
                Err(error) => {
                    tracing::info!(request = %self.job.request_id, %error, "an encode call was cut off by its worker");
                    span.iter_mut().for_each(|span| span.fail("lost"));
                    None
                }
            };
            self.claim.give_up(&placed, setback, None);
        }
    }

    fn request(&self, assignment: &Assignment, trace: Option<TraceContext>) -> EncodeRequest {
        let left = self.job.deadline.saturating_duration_since(Instant::now());
        EncodeRequest {
            request_id: self.job.request_id.clone(),
            part: self.job.part,
            attempt: assignment.attempt,
            model: self.job.model.clone(),
            texts: self.job.texts.clone(),
            deadline_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1),
            trace,
        }
    }
}
