//! The connection by which a worker is a member.

use parking_lot::Mutex;
use proto::Error;
use proto::ids::Epoch;
use proto::placement::{Capacity, OfferedDrafter};
use proto::service::WorkerApiClient;
use proto::transport::{CloseCode, Connection};
use std::time::Duration;
use tokio::sync::oneshot::error::TryRecvError;
use tokio::sync::{OnceCell, oneshot};

/// How long a generation waits for those that were sent before it to be on their way. Longer would let one
/// that nobody drives hold up the others.
const TURN_LIMIT: Duration = Duration::from_millis(50);

/// Names one connection that a worker has made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionId(pub u64);

/// What a worker of the pool gives to replicas.
#[derive(Debug, Clone)]
pub(super) struct Pooled {
    pub(super) capacity: Capacity,
    /// The drafter beside its model.
    pub(super) drafter: Option<OfferedDrafter>,
    pub(super) quic: String,
}

#[derive(Debug)]
pub(super) struct Link {
    session: SessionId,
    epoch: Epoch,
    connection: Connection,
    pool: Option<Pooled>,
    api: OnceCell<WorkerApiClient>,
    last_turn: Mutex<Option<oneshot::Receiver<()>>>,
}

/// A place in the order in which generations are sent to a worker. A prediction holds only if what it was
/// made of arrives first: of requests that share a prefix, the one that was expected to compute it.
/// Dropping it lets the next one go.
#[derive(Debug)]
pub(super) struct SendTurn {
    before: Option<oneshot::Receiver<()>>,
    _done: oneshot::Sender<()>,
}

impl SendTurn {
    /// Waits until those before have been sent or given up.
    pub(super) async fn come(&mut self) {
        if let Some(mut before) = self.before.take()
            // Mostly they have, and no time needs to be kept.
            && before.try_recv() == Err(TryRecvError::Empty)
        {
            // It is never sent on: what is waited for is the drop at the other end.
            let _ = tokio::time::timeout(TURN_LIMIT, before).await;
        }
    }
}

impl Link {
    pub(super) fn new(
        session: SessionId,
        epoch: Epoch,
        connection: Connection,
        pool: Option<Pooled>,
    ) -> Self {
        Self { session, epoch, connection, pool, api: OnceCell::new(), last_turn: Mutex::new(None) }
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

    /// The next turn; to be taken in the order of the decisions.
    pub(super) fn turn(&self) -> SendTurn {
        let (done, after) = oneshot::channel();
        SendTurn { before: self.last_turn.lock().replace(after), _done: done }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.connection.is_closed()
    }

    pub(super) fn close(&self, code: CloseCode) {
        self.connection.close(code);
    }
}
