//! Sessions of operations at the workers that offer them. Workers are tried one after the other until one
//! accepts the session. An open session never moves, because that worker's model holds its state.

use super::usage::{AttemptMeter, Payer};
use super::{Dispatch, Link};
use crate::random::random_u64;
use proto::block::BlockId;
use proto::ids::{Attempt, Epoch, ModelId, NodeId, RequestId};
use proto::operation::{
    BackendRequest, OpenedOperation, Operation, OperationError, OperationOptions, OperationRequest,
};
use proto::trace::TraceContext;
use proto::usage::AttemptId;
use proto::worker::WorkerState;
use router::balancer::{SessionPlacement, SessionRefusal, SessionRequest, SessionSlot, WorkerView};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use transport::{CloseCode, OperationSender, OperationSession, OperationStream};

/// How long a worker may take to open a session; it may have to load a model.
const OPEN_LIMIT: Duration = Duration::from_secs(10);
/// Maximum of workers that are tried for one session.
const ATTEMPTS: usize = 4;

/// A session to be opened.
#[derive(Debug, Clone)]
pub struct OperationJob {
    pub request_id: RequestId,
    pub operation: Operation,
    /// The requested model; `None`: any.
    pub model: Option<ModelId>,
    /// The requested backend; `None`: the worker's default.
    pub backend: Option<String>,
    pub sample_rate: u32,
    pub options: OperationOptions,
    /// Parent span; `None` if the request is not traced.
    pub trace: Option<TraceContext>,
    pub tenant: Arc<str>,
    /// Key id. `None` for a caller without a key.
    pub key: Option<String>,
}

/// Why no session was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unopened {
    /// No worker could be chosen.
    Nobody(SessionRefusal),
    /// The last worker's error.
    Said(OperationError),
    /// All workers that were tried were lost or did not answer in time.
    Lost,
}

/// An open session. Dropping it ends it at the worker.
#[derive(Debug)]
pub struct OpenedSession {
    pub node: NodeId,
    /// The worker's answer to the opening.
    pub opened: OpenedOperation,
    /// Sends audio to the worker.
    pub sender: OperationSender,
    /// Receives results from the worker.
    pub answers: OperationStream,
    /// The booking at the worker.
    pub seat: Seating,
}

/// A session's booking at a worker, released on drop.
#[derive(Debug)]
pub struct Seating {
    dispatch: Arc<Dispatch>,
    seat: SessionSlot,
    node: NodeId,
    link: Arc<Link>,
    /// `None` until the session is open.
    meter: Option<AttemptMeter>,
}

impl Seating {
    /// Counts audio that was processed for the client.
    pub fn audio(&self, seconds: f64) {
        self.meter.iter().for_each(|meter| meter.audio(seconds));
    }

    /// The session's work is lost: the client gets nothing of it.
    pub fn failed(&mut self) {
        self.meter.iter_mut().for_each(AttemptMeter::failed);
    }

    /// Handles a session that was cut off. If the connection is closed, the worker is removed. Returns `true`
    /// if the worker ends in order, after giving its sessions their time: it drains, or it closed the
    /// connection for shutdown.
    pub fn cut(&self) -> bool {
        let (node, epoch) = (&self.node, self.link.epoch());
        let drains = |view: &WorkerView| {
            let register = &view.member.register;
            register.node == *node && register.epoch == epoch && view.state() == WorkerState::Draining
        };
        let in_order = self.link.connection().was_closed_for(CloseCode::Shutdown)
            || self.dispatch.workers().iter().any(drains);
        if self.link.is_closed() {
            self.dispatch.session_lost(self.link.session(), &self.node);
        }
        in_order
    }
}

impl Drop for Seating {
    fn drop(&mut self) {
        self.meter.iter().for_each(AttemptMeter::request_ended);
        self.dispatch.state.lock().balancer.unseat(self.seat);
    }
}

impl Dispatch {
    /// Opens a session at a worker that offers the operation. `opens` selects the models that the caller may
    /// use.
    pub async fn open_operation(
        self: &Arc<Self>,
        job: &OperationJob,
        opens: &(dyn Fn(&ModelId) -> bool + Sync),
    ) -> Result<OpenedSession, Unopened> {
        let mut declined_by = Vec::new();
        let mut failure = None;
        for _ in 0..ATTEMPTS {
            let (seated, mut seat) = match self.seat(job, opens, &declined_by) {
                Ok(seated) => seated,
                Err(unseated) => return Err(failure.unwrap_or(Unopened::Nobody(unseated))),
            };
            let request = OperationRequest {
                request_id: job.request_id.clone(),
                operation: job.operation,
                model: Some(seated.model.clone()),
                sample_rate: job.sample_rate,
                options: job.options.clone(),
                trace: job.trace,
            };
            let connection = seat.link.connection();
            let opening = async {
                match job.backend.clone().filter(|_| seated.several_backends) {
                    Some(backend) => {
                        connection.open_operation_by_backend(&BackendRequest { backend, request }).await
                    }
                    // The worker's only backend. Workers of earlier versions have no more.
                    None => connection.open_operation(&request).await,
                }
            };
            let node = seated.node;
            let requested = |opened: &OpenedOperation| {
                job.backend.as_ref().is_none_or(|backend| *backend == opened.backend)
            };
            failure = Some(match tokio::time::timeout(OPEN_LIMIT, opening).await {
                Ok(Ok(Ok(OperationSession { opened, .. }))) if !requested(&opened) => {
                    tracing::error!(request = %job.request_id, %node, backend = opened.backend,
                        "a worker opened a session by another backend than the requested one");
                    Unopened::Said(OperationError::Internal)
                }
                Ok(Ok(Ok(OperationSession { opened, sender, answers }))) => {
                    seat.meter = Some(self.session_meter(job, &node, &seated.model));
                    return Ok(OpenedSession { node, opened, sender, answers, seat });
                }
                Ok(Ok(Err(error))) if error.retryable() => {
                    tracing::info!(request = %job.request_id, %node, %error, "a worker refused a session");
                    Unopened::Said(error)
                }
                Ok(Ok(Err(error))) => return Err(Unopened::Said(error)),
                Ok(Err(error)) => {
                    tracing::info!(request = %job.request_id, %node, %error, "a worker could not open a session");
                    let _in_order = seat.cut();
                    Unopened::Lost
                }
                Err(_) => {
                    tracing::warn!(request = %job.request_id, %node, "a worker did not open a session in time");
                    Unopened::Lost
                }
            });
            declined_by.push((node, seated.epoch));
        }
        Err(failure.unwrap_or(Unopened::Lost))
    }

    fn session_meter(&self, job: &OperationJob, node: &NodeId, model: &ModelId) -> AttemptMeter {
        let id = AttemptId {
            request: job.request_id.clone(),
            part: 0,
            attempt: Attempt(0),
            root: BlockId([0; 16]),
        };
        let payer = Payer::new(&job.tenant, job.key.as_deref(), model);
        AttemptMeter::begin(&self.usage, node, id, &payer, 0)
    }

    /// The offered operations, with their models.
    pub fn offered(&self) -> BTreeSet<(Operation, ModelId)> {
        self.state.lock().balancer.offered()
    }

    fn seat(
        self: &Arc<Self>,
        job: &OperationJob,
        opens: &dyn Fn(&ModelId) -> bool,
        declined_by: &[(NodeId, Epoch)],
    ) -> Result<(SessionPlacement, Seating), SessionRefusal> {
        let (model, backend) = (job.model.as_ref(), job.backend.as_deref());
        let request = SessionRequest { operation: job.operation, model, backend, opens, declined_by };
        let mut state = self.state.lock();
        let seated = state.balancer.seat(Instant::now(), &request, random_u64())?;
        let link = state.links.get(&seated.node).filter(|link| link.epoch() == seated.epoch).cloned();
        let Some(link) = link else {
            // A member always has a link; without one there is no worker to send to.
            state.balancer.unseat(seated.seat);
            return Err(SessionRefusal::Away);
        };
        drop(state);
        let node = seated.node.clone();
        let seat = Seating { dispatch: Arc::clone(self), seat: seated.seat, node, link, meter: None };
        Ok((seated, seat))
    }
}
