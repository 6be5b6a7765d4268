//! The connection by which a worker is a member.

use proto::Error;
use proto::ids::Epoch;
use proto::service::WorkerApiClient;
use proto::transport::{CloseCode, Connection};
use tokio::sync::OnceCell;

/// Names one connection that a worker has made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionId(pub u64);

#[derive(Debug)]
pub(super) struct Link {
    session: SessionId,
    epoch: Epoch,
    connection: Connection,
    api: OnceCell<WorkerApiClient>,
}

impl Link {
    pub(super) fn new(session: SessionId, epoch: Epoch, connection: Connection) -> Self {
        Self { session, epoch, connection, api: OnceCell::new() }
    }

    pub(super) fn session(&self) -> SessionId {
        self.session
    }

    pub(super) fn epoch(&self) -> Epoch {
        self.epoch
    }

    pub(super) fn connection(&self) -> &Connection {
        &self.connection
    }

    /// The worker's RPC client, opened on first use.
    pub(super) async fn api(&self) -> Result<&WorkerApiClient, Error> {
        self.api.get_or_try_init(|| self.connection.worker_api()).await
    }

    pub(super) fn is_closed(&self) -> bool {
        self.connection.is_closed()
    }

    pub(super) fn close(&self, code: CloseCode) {
        self.connection.close(code);
    }
}
