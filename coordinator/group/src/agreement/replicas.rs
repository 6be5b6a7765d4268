//! The table that replicas are planned from, and the proposal of plans.

use super::changes::Session;
use super::{Agreement, CHANGE_LIMIT, ChangeError, Member};
use consensus::core::RaftRole;
use consensus::table::{Change, Outcome, Table};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::watch;

impl Agreement {
    /// The local state of the table; `None` while there is no group.
    pub fn table(&self) -> Option<Arc<Table>> {
        self.shared.table()
    }

    /// Waits until the table has changed since the last call with the same `seen`, or for the first table of a group. Ends
    /// never while there is no group.
    pub(crate) async fn table_changed(&self, seen: &mut Option<watch::Receiver<Arc<Table>>>) {
        let Some(Member { handle, .. }) = self.shared.member.get() else {
            return std::future::pending().await;
        };
        let changes = seen.get_or_insert_with(|| handle.table());
        if changes.changed().await.is_err() {
            // The agreement has stopped.
            std::future::pending().await
        }
    }

    /// The table after everything that was committed before this call.
    pub async fn read_table(&self) -> Result<Arc<Table>, ChangeError> {
        let Some(Member { handle, .. }) = self.shared.member.get() else { return Err(ChangeError::NoQuorum) };
        Ok(handle.read(Instant::now() + CHANGE_LIMIT).await?)
    }

    /// Whether this coordinator is the leader, which plans replicas.
    pub(crate) fn leads(&self) -> bool {
        let role = self.shared.member.get().map(|member| member.handle.status().role);
        role == Some(RaftRole::Leader)
    }

    /// Proposes a plan and waits until it is applied here.
    pub async fn plan(&self, change: Change) -> Result<(), ChangeError> {
        let Some(Member { handle, .. }) = self.shared.member.get() else { return Err(ChangeError::NoQuorum) };
        let mut session = self.shared.replicas.lock().await;
        let session = session.get_or_insert_with(|| Session::new(handle.clone()));
        match session.make(change, Instant::now() + CHANGE_LIMIT).await? {
            Outcome::Done | Outcome::Opened(_) => Ok(()),
            Outcome::Refused(refusal) => Err(refusal.into()),
        }
    }
}
