//! Exactly once: what each client did last, and what came of it.

use super::entry::ClientId;
use super::outcome::{Outcome, Refusal};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Sessions at a time. The one unused for longest, counted in entries of the log, makes room for a new one:
/// the same on every member, which no clock could be.
pub const MAX_SESSIONS: usize = 1024;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Sessions(BTreeMap<ClientId, Session>);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Session {
    /// Its last change, and what came of it.
    last: Option<(u64, Outcome)>,
    /// Index of the last entry that used it.
    used: u64,
}

impl Sessions {
    /// The session opened by the entry at `index`.
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

    /// Whether the change is new: `Err` with what is to be answered if not.
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
