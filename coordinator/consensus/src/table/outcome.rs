//! Outcomes of entries. They are stored in sessions and so in snapshots: variants are only appended.

use super::entry::{ClientId, Level};
use crate::member::Incarnation;
use proto::ids::{Epoch, NodeId, Role};
use router::table::TableError;
use serde::{Deserialize, Serialize};

/// The outcome of an entry, equal on every member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    Done,
    Opened(ClientId),
    Refused(Refusal),
}

/// Why an entry changed nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// This build does not know this kind of entry or change.
    #[error("changes of kind {0} are not supported by this version")]
    UnknownKind(u64),
    /// The bytes do not decode to an entry.
    #[error("the entry cannot be read")]
    Malformed,
    /// The client's session was evicted. Whether its earlier changes were applied is unknown.
    #[error("the session has expired")]
    SessionExpired,
    /// The client has already made a later change.
    #[error("the client has already made change {last}, a later one")]
    Superseded { last: u64 },
    /// A membership change came as a table change, or vice versa.
    #[error("only the leader can change the group")]
    WrongPath,
    /// A later epoch of the worker is known.
    #[error("epoch {} is known", .0.0)]
    StaleEpoch(Epoch),
    /// No item of this kind has this name.
    #[error("there is no such {0}")]
    Unknown(Kind),
    /// The table holds its maximum of this kind.
    #[error("the table is full of {0}s")]
    Full(Kind),
    #[error("the value is too long for the table")]
    TooLarge,
    /// A member serves other weights or another tokenizer under the same name.
    #[error("{0} serves another model under this name")]
    ModelConflict(NodeId),
    /// The coordinator is a member with another incarnation, which must be removed first.
    #[error("the coordinator is a member with another disk (incarnation {:016x})", .0.0)]
    AnotherLife(Incarnation),
    /// This incarnation was removed. The coordinator can only return with an empty disk.
    #[error("this incarnation of the coordinator was removed")]
    LifeEnded,
    /// Only a learner can be promoted.
    #[error("the coordinator is not a learner")]
    NoLearner,
    /// The group would have no voter left.
    #[error("the coordinator is the last voter")]
    LastVoter,
    /// A member does not understand the change.
    #[error("a member supports only level {}", .0.0)]
    LevelTooLow(Level),
    /// The policy has another version than the change expects.
    #[error("the policy has version {0}, another change came first")]
    PolicyMoved(u64),
    /// A number is out of its range.
    #[error("a value is out of its range")]
    OutOfRange,
    /// The worker belongs to another replica.
    #[error("{0} is part of another replica")]
    Taken(NodeId),
    /// The model file is on the block list.
    #[error("the model's file was found to be unusable")]
    Blocked,
    /// There is no such join token, or its secret is another one.
    #[error("the token is not known")]
    UnknownToken,
    #[error("the token has expired")]
    TokenExpired,
    #[error("the token is used up")]
    TokenUsedUp,
    #[error("the token is for the role {}", .0.as_str())]
    TokenRole(Role),
    #[error("the token is for the node {0}")]
    TokenNode(NodeId),
    /// A node of this role and name has joined with another key.
    #[error("a node of this name has joined with another key")]
    NameTaken,
    #[error("another key waits for approval under this name")]
    AnotherKeyWaits,
    #[error("the node waits for approval")]
    NotApproved,
    #[error("the certificate is revoked")]
    Revoked,
    /// The deployment has another revision than the change expects; 0: there is no such deployment.
    #[error("the deployment has revision {0}: another change came first")]
    DeploymentMoved(u64),
}

/// Kinds of items in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    Worker,
    Coordinator,
    Model,
    Tenant,
    Key,
    /// A model's placement on a worker.
    Place,
    Replica,
    Token,
    Node,
    /// A node that waits for approval, with the key that was named.
    WaitingNode,
    Certificate,
    Deployment,
    Version,
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
            Self::Token => "join token",
            Self::Node => "node",
            Self::WaitingNode => "node that waits with this key",
            Self::Certificate => "certificate",
            Self::Deployment => "deployment",
            Self::Version => "version of a deployed model",
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
