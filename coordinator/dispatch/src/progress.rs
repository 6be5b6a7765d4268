//! Progress of a generation without tokens: its place in the queue, or the part of its prompt that is computed.

use super::Dispatch;
use super::link::Link;
use parking_lot::Mutex;
use proto::block::BlockId;
use proto::sequence::{PromptProgress, SequenceName};
use router::balancer::Ticket;
use std::sync::Arc;
use std::time::Duration;
use transport::service::deadline;

/// A worker answers between two steps.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Progress of a generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// It waits for a worker, at this place, from 1, among the `of` requests of its tenant.
    Queued { place: usize, of: usize },
    /// A worker has it.
    Prompt(PromptProgress),
}

/// Tells how far a generation is, beside it.
#[derive(Debug, Clone)]
pub struct ProgressProbe(Arc<Probed>);

#[derive(Debug)]
struct Probed {
    dispatch: Arc<Dispatch>,
    ticket: Ticket,
    root: BlockId,
    name: SequenceName,
    /// The worker that has the request.
    worker: Mutex<Option<Arc<Link>>>,
}

impl ProgressProbe {
    pub(super) fn new(dispatch: Arc<Dispatch>, ticket: Ticket, root: BlockId, name: SequenceName) -> Self {
        Self(Arc::new(Probed { dispatch, ticket, root, name, worker: Mutex::default() }))
    }

    pub(super) fn name(&self) -> &SequenceName {
        &self.0.name
    }

    pub(super) fn sent_to(&self, worker: Option<Arc<Link>>) {
        *self.0.worker.lock() = worker;
    }

    /// Returns `None` if neither the queue nor the worker has the request, or if the worker does not tell.
    pub async fn now(&self) -> Option<Progress> {
        let Probed { dispatch, ticket, root, name, worker } = &*self.0;
        let worker = worker.lock().clone();
        let Some(worker) = worker else {
            let (place, of) = dispatch.look(|balancer| balancer.queue_place(*ticket))?;
            return Some(Progress::Queued { place, of });
        };
        let api = worker.api().await.ok()?;
        // An older worker refuses the call.
        let progress = api.prompt_progress(deadline(ANSWER_LIMIT), *root, name.clone()).await.ok()??;
        Some(Progress::Prompt(progress))
    }
}
