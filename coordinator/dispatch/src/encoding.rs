//! A call to encode texts, over as many workers as it takes. Nothing is emitted before the result is
//! complete, so a failed call starts over on another worker.

use super::ticket::TicketGuard;
use super::usage::{AttemptMeter, Payer};
use super::{Failure, choice};
use proto::block::BlockId;
use proto::ids::NodeId;
use proto::message::{EncodeRequest, EncodeText};
use proto::trace::{Span, TraceContext};
use proto::usage::AttemptId;
use router::balancer::{Assignment, RouteRequest};
use router::routing::Reason;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A batch of texts to be encoded.
#[derive(Debug, Clone)]
pub struct EncodeJob {
    /// Its operation is `Embed` or `Rerank`.
    pub request: Arc<RouteRequest>,
    pub part: u32,
    /// Between 1 and [`proto::message::MAX_ENCODE_TEXTS`] texts.
    pub texts: Vec<EncodeText>,
    pub payer: Payer,
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
    ticket: TicketGuard,
    job: EncodeJob,
}

impl Encoding {
    pub(super) fn new(ticket: TicketGuard, job: EncodeJob) -> Self {
        Self { ticket, job }
    }

    pub async fn run(mut self) -> Result<Encoded, Failure> {
        let deadline = tokio::time::Instant::from_std(self.job.request.deadline);
        tokio::time::timeout_at(deadline, self.advance()).await.unwrap_or(Err(Failure::Deadline))
    }

    async fn advance(&mut self) -> Result<Encoded, Failure> {
        loop {
            let mut placed = self.ticket.worker(false).await?;
            // The send order matters to prefix caches only.
            placed.send_order = None;
            let mut span = choice::record(&self.job.request, &placed);
            let request = self.request(&placed.assignment, span.as_ref().map(Span::context));
            let connection = placed.link.connection();
            let mut meter = self.meter(&placed.assignment, &request);
            let worker_error = match connection.encode(&request).await {
                Ok(Ok(texts)) => {
                    meter.encoded();
                    let queued = placed.queued(&self.job.request);
                    let Assignment { node, reason, .. } = placed.assignment;
                    return Ok(Encoded { texts, node, reason, queued });
                }
                Ok(Err(error)) if error.retryable() => {
                    span.iter_mut().for_each(|span| span.fail("declined"));
                    Some(error)
                }
                Ok(Err(error)) => {
                    meter.failed();
                    span.iter_mut().for_each(|span| span.fail("declined"));
                    return Err(Failure::Worker(error));
                }
                Err(error) => {
                    tracing::info!(request = %self.job.request.request_id, %error, "an encode call was cut off by its worker");
                    span.iter_mut().for_each(|span| span.fail("lost"));
                    None
                }
            };
            meter.failed();
            drop(meter);
            self.ticket.retry_elsewhere(&placed, worker_error, None);
        }
    }

    fn meter(&self, assignment: &Assignment, request: &EncodeRequest) -> AttemptMeter {
        let id = AttemptId {
            request: request.request_id.clone(),
            part: request.part,
            attempt: request.attempt,
            root: BlockId([0; 16]),
        };
        let (usage, tokens) = (self.ticket.dispatch().usage(), self.job.request.prompt_tokens as usize);
        AttemptMeter::begin(usage, &assignment.node, id, &self.job.payer, tokens)
    }

    fn request(&self, assignment: &Assignment, trace: Option<TraceContext>) -> EncodeRequest {
        let request = &self.job.request;
        let left = request.deadline.saturating_duration_since(Instant::now());
        EncodeRequest {
            request_id: request.request_id.clone(),
            part: self.job.part,
            attempt: assignment.attempt,
            model: request.model.clone(),
            texts: self.job.texts.clone(),
            deadline_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1),
            trace,
        }
    }
}

impl Drop for Encoding {
    fn drop(&mut self) {
        // Parts of one request count once.
        if self.job.part == 0 {
            self.job.payer.request_ended(self.ticket.dispatch().usage());
        }
    }
}
