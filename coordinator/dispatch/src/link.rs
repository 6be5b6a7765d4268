//! The connection of a member.

use parking_lot::Mutex;
use proto::deployment::HostReport;
use proto::ids::Epoch;
use proto::message::image_encoder::OfferedTower;
use proto::placement::{Capacity, OfferedDrafter};
use std::time::Duration;
use tokio::sync::oneshot::error::TryRecvError;
use tokio::sync::{OnceCell, oneshot};
use transport::service::WorkerApiClient;
use transport::{CloseCode, Connection, Error};

/// How long a generation waits until earlier ones have been sent. The limit keeps a generation that is not
/// polled from blocking the others.
const ORDER_LIMIT: Duration = Duration::from_millis(50);

/// Identifies one connection of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionId(pub u64);

/// The resources that a pool worker offers to replicas.
#[derive(Debug, Clone)]
pub(super) struct Pooled {
    pub(super) capacity: Capacity,
    /// The drafter of its model.
    pub(super) drafter: Option<OfferedDrafter>,
}

#[derive(Debug)]
pub(super) struct Link {
    session: SessionId,
    epoch: Epoch,
    connection: Connection,
    /// Address for other workers.
    quic: String,
    pool: Option<Pooled>,
    /// Set for a worker that loads models by order.
    host: Mutex<Option<HostReport>>,
    /// Set for a worker that encodes images.
    tower: Mutex<Option<OfferedTower>>,
    api: OnceCell<WorkerApiClient>,
    last_send: Mutex<Option<oneshot::Receiver<()>>>,
}

/// A position in the order in which generations are sent to a worker. A prediction holds only if the requests
/// that it relies on arrive first, such as the one that computes a shared prefix. Dropping it releases the
/// next position.
#[derive(Debug)]
pub(super) struct SendOrder {
    before: Option<oneshot::Receiver<()>>,
    _done: oneshot::Sender<()>,
}

impl SendOrder {
    /// Waits until all earlier positions have been dropped, at most [`ORDER_LIMIT`].
    pub(super) async fn wait(&mut self) {
        if let Some(mut before) = self.before.take()
            // Usually they have, and no timer is needed.
            && before.try_recv() == Err(TryRecvError::Empty)
        {
            // Nothing is ever sent: the drop of the sender completes the wait.
            let _ = tokio::time::timeout(ORDER_LIMIT, before).await;
        }
    }
}

impl Link {
    pub(super) fn new(
        session: SessionId,
        epoch: Epoch,
        (connection, quic): (Connection, String),
        pool: Option<Pooled>,
    ) -> Self {
        let (api, host, tower, last_send) = Default::default();
        Self { session, epoch, connection, quic, pool, host, tower, api, last_send }
    }

    pub(super) fn quic(&self) -> &str {
        &self.quic
    }

    pub(super) fn host(&self) -> Option<HostReport> {
        self.host.lock().clone()
    }

    pub(super) fn set_host(&self, report: HostReport) {
        *self.host.lock() = Some(report);
    }

    pub(super) fn tower(&self) -> Option<OfferedTower> {
        self.tower.lock().clone()
    }

    pub(super) fn set_tower(&self, tower: OfferedTower) {
        *self.tower.lock() = Some(tower);
    }

    pub(super) fn session(&self) -> SessionId {
        self.session
    }

    pub(super) fn epoch(&self) -> Epoch {
        self.epoch
    }

    pub(super) fn pool(&self) -> Option<&Pooled> {
        self.pool.as_ref()
    }

    pub(super) fn connection(&self) -> &Connection {
        &self.connection
    }

    /// The worker's RPC client, opened on first use.
    pub(super) async fn api(&self) -> Result<&WorkerApiClient, Error> {
        self.api.get_or_try_init(|| self.connection.worker_api()).await
    }

    /// The next position. Take positions in the order of the decisions.
    pub(super) fn next_send(&self) -> SendOrder {
        let (done, after) = oneshot::channel();
        SendOrder { before: self.last_send.lock().replace(after), _done: done }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.connection.is_closed()
    }

    pub(super) fn close(&self, code: CloseCode) {
        self.connection.close(code);
    }
}
