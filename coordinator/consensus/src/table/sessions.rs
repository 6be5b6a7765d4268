//! Exactly-once changes: each client's last change and its outcome.

use super::entry::ClientId;
use super::outcome::{Outcome, Refusal};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Maximum of sessions. A new session evicts the one unused for longest, counted in log entries, which is the
/// same on every member (a clock would not be).
pub const MAX_SESSIONS: usize = 1024;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Sessions(BTreeMap<ClientId, Session>);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Session {
    /// Number and outcome of the last change.
    last: Option<(u64, Outcome)>,
    /// Index of the last entry that used the session.
    used: u64,
}

impl Sessions {
    /// Opens a session by the entry at `index`.
    pub(super) fn open(&mut self, index: u64) -> ClientId {
        if self.0.len() >= MAX_SESSIONS
            && let Some((&idle, _)) = self.0.iter().min_by_key(|(_, session)| session.used)
        {
            self.0.remove(&idle);
        }
        let client = ClientId(index);
        self.0.insert(client, Session { last: None, used: index });
        client
    }

    /// Whether the change is new. If not, `Err` holds the outcome to return.
    pub(super) fn check(&mut self, client: ClientId, seq: u64, index: u64) -> Result<(), Outcome> {
        let expired = Outcome::Refused(Refusal::SessionExpired);
        let session = self.0.get_mut(&client).ok_or(expired)?;
        session.used = index;
        match &session.last {
            Some((last, outcome)) if *last == seq => Err(outcome.clone()),
            Some((last, _)) if *last > seq => Err(Outcome::Refused(Refusal::Superseded { last: *last })),
            Some(_) | None => Ok(()),
        }
    }

    pub(super) fn record(&mut self, client: ClientId, seq: u64, outcome: &Outcome) {
        if let Some(session) = self.0.get_mut(&client) {
            session.last = Some((seq, outcome.clone()));
        }
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}
