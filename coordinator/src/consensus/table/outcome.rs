//! What came of an entry. Outcomes are kept in sessions and so in snapshots: variants are only appended.

use super::entry::{ClientId, Level};
use crate::consensus::member::Incarnation;
use crate::table::TableError;
use proto::ids::{Epoch, NodeId};
use serde::{Deserialize, Serialize};

/// What came of an entry: the same on every member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    Done,
    Opened(ClientId),
    Refused(Refusal),
}

/// Why an entry changed nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// A kind of entry or change that this build does not know.
    #[error("kind {0} is not known here")]
    UnknownKind(u64),
    /// The bytes are no entry.
    #[error("the entry cannot be read")]
    Malformed,
    /// The client's session is not there any more: whether its earlier changes were made cannot be told.
    #[error("the session has expired")]
    SessionExpired,
    /// The client has made later changes since.
    #[error("the client has made change {last} since")]
    Superseded { last: u64 },
    /// A change of the group came as one of the table, or the other way round.
    #[error("changes of the group are made by its leader alone")]
    WrongPath,
    /// A later life of the worker is known.
    #[error("epoch {} is known", .0.0)]
    StaleEpoch(Epoch),
    /// Nothing of this name is there.
    #[error("there is no such {0}")]
    Unknown(Kind),
    /// There are as many as are kept.
    #[error("there are as many {0}s as are kept")]
    Full(Kind),
    /// Too long to be kept.
    #[error("too long to be kept")]
    TooLarge,
    /// A member serves other weights or another tokenizer under the same name.
    #[error("{0} serves something else under this name")]
    ModelConflict(NodeId),
    /// The coordinator is a member in another life of its disk and must be removed first.
    #[error("the coordinator is a member in another life ({:016x})", .0.0)]
    AnotherLife(Incarnation),
    /// This life of the coordinator was removed; it comes back only with an empty disk.
    #[error("this life of the coordinator was removed")]
    LifeEnded,
    /// Only a learner becomes a voter.
    #[error("the coordinator is no learner")]
    NoLearner,
    /// The group would be without a voter.
    #[error("it is the last voter")]
    LastVoter,
    /// Not every member understands the change.
    #[error("a member understands only level {}", .0.0)]
    LevelTooLow(Level),
    /// The policy is at another version.
    #[error("the policy is at version {0}")]
    PolicyMoved(u64),
    /// A number is out of its range.
    #[error("a value is out of its range")]
    OutOfRange,
    /// The worker is part of another replica.
    #[error("{0} is part of another replica")]
    Taken(NodeId),
    /// The file was found to be no model that can be served.
    #[error("the model's file was found to be unusable")]
    Condemned,
}

/// What the table has many of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    Worker,
    Coordinator,
    Model,
    Tenant,
    Key,
    /// A place of a model.
    Place,
    Replica,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Worker => "worker",
            Self::Coordinator => "coordinator",
            Self::Model => "model",
            Self::Tenant => "tenant",
            Self::Key => "key",
            Self::Place => "place",
            Self::Replica => "replica",
        })
    }
}

impl From<TableError> for Refusal {
    fn from(error: TableError) -> Self {
        match error {
            TableError::StaleEpoch { known, .. } => Self::StaleEpoch(known),
            TableError::UnknownWorker(_) => Self::Unknown(Kind::Worker),
            TableError::Full { .. } => Self::Full(Kind::Worker),
            TableError::TooLarge { .. } => Self::TooLarge,
            TableError::ModelConflict { other, .. } => Self::ModelConflict(other),
        }
    }
}
