//! The roster: workers with their epochs, drain state and registrations.
//!
//! These rules hold wherever workers are counted: in one coordinator's [`WorkerTable`], where a member also
//! has a slot, and in the replicated table (`consensus::table` of the coordinator).
//!
//! [`WorkerTable`]: crate::table::WorkerTable

use super::{MAX_WORKERS, TableChange, TableError};
use proto::ids::{Epoch, NodeId};
use proto::worker::WorkerInfo;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Approximate maximum size of all members' registrations, in bytes.
const MAX_BYTES: usize = 4 << 20;

/// A current or former member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Worker {
    /// The latest epoch; changes of earlier ones are refused.
    pub epoch: Epoch,
    pub standing: WorkerStanding,
}

/// A worker's membership state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkerStanding {
    /// A member that takes work, with its registration.
    Serving(Arc<WorkerInfo>),
    /// A member that an operator has drained.
    Draining(Arc<WorkerInfo>),
    Away {
        /// Whether the worker will drain when it returns.
        drains: bool,
        /// Number of departures before this one. The worker that left first is dropped first.
        departure: u64,
    },
}

impl WorkerStanding {
    /// The registration of a member.
    pub fn register(&self) -> Option<&Arc<WorkerInfo>> {
        match self {
            Self::Serving(register) | Self::Draining(register) => Some(register),
            Self::Away { .. } => None,
        }
    }

    /// Whether the worker drains, or will when it returns.
    pub fn drains(&self) -> bool {
        match self {
            Self::Serving(_) => false,
            Self::Draining(_) => true,
            Self::Away { drains, .. } => *drains,
        }
    }
}

/// The workers of a cluster. Holds at most [`MAX_WORKERS`] names; a new worker evicts the one that has been
/// away longest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Roster {
    workers: BTreeMap<NodeId, Worker>,
    departures: u64,
}

impl Roster {
    /// Applies a change to one worker. A refused change has no effect.
    pub fn apply(&mut self, change: TableChange) -> Result<(), TableError> {
        match change {
            TableChange::Join(register) => self.join(register),
            TableChange::Leave { node, epoch } => self.leave(node, epoch),
            TableChange::Drain { node, draining } => self.drain(node, draining),
        }
    }

    pub fn worker(&self, node: &NodeId) -> Option<&Worker> {
        self.workers.get(node)
    }

    /// All known workers, by name.
    pub fn workers(&self) -> impl Iterator<Item = (&NodeId, &Worker)> {
        self.workers.iter()
    }

    /// The registrations of all members.
    pub fn members(&self) -> impl Iterator<Item = &Arc<WorkerInfo>> {
        self.workers.values().filter_map(|worker| worker.standing.register())
    }

    fn join(&mut self, register: WorkerInfo) -> Result<(), TableError> {
        let node = register.node.clone();
        let known = self.workers.get(&node);
        if let Some(worker) = known.filter(|worker| register.epoch < worker.epoch) {
            return Err(TableError::StaleEpoch { node, got: register.epoch, known: worker.epoch });
        }
        let drains = known.is_some_and(|worker| worker.standing.drains());
        let forgotten = match known {
            None if self.workers.len() >= MAX_WORKERS => {
                Some(self.longest_away().ok_or(TableError::Full { limit: MAX_WORKERS })?)
            }
            _ => None,
        };
        self.check_models(&register)?;
        let others = self.members().filter(|other| other.node != node);
        let bytes = others.map(|other| weight(other)).sum::<usize>() + weight(&register);
        if bytes > MAX_BYTES {
            return Err(TableError::TooLarge { bytes, limit: MAX_BYTES });
        }
        if let Some(forgotten) = forgotten {
            self.workers.remove(&forgotten);
        }
        let epoch = register.epoch;
        let register = Arc::new(register);
        let standing =
            if drains { WorkerStanding::Draining(register) } else { WorkerStanding::Serving(register) };
        self.workers.insert(node, Worker { epoch, standing });
        Ok(())
    }

    fn leave(&mut self, node: NodeId, epoch: Epoch) -> Result<(), TableError> {
        let worker = self.member(&node)?;
        let known = worker.epoch;
        if known != epoch {
            return Err(TableError::StaleEpoch { node, got: epoch, known });
        }
        let drains = worker.standing.drains();
        let departure = self.departures;
        self.departures += 1;
        self.workers.insert(node, Worker { epoch, standing: WorkerStanding::Away { drains, departure } });
        Ok(())
    }

    fn drain(&mut self, node: NodeId, draining: bool) -> Result<(), TableError> {
        let worker = self.member(&node)?;
        if let Some(register) = worker.standing.register().cloned() {
            worker.standing =
                if draining { WorkerStanding::Draining(register) } else { WorkerStanding::Serving(register) };
        }
        Ok(())
    }

    fn member(&mut self, node: &NodeId) -> Result<&mut Worker, TableError> {
        let member = self.workers.get_mut(node).filter(|worker| worker.standing.register().is_some());
        member.ok_or_else(|| TableError::UnknownWorker(node.clone()))
    }

    fn longest_away(&self) -> Option<NodeId> {
        let away = self.workers.iter().filter_map(|(node, worker)| match worker.standing {
            WorkerStanding::Away { departure, .. } => Some((departure, node)),
            WorkerStanding::Serving(_) | WorkerStanding::Draining(_) => None,
        });
        away.min().map(|(_, node)| node.clone())
    }

    fn check_models(&self, register: &WorkerInfo) -> Result<(), TableError> {
        for other in self.members().filter(|other| other.node != register.node) {
            for model in &register.models {
                let Some(theirs) = other.models.iter().find(|m| m.id == model.id) else { continue };
                let digest = if theirs.model_digest != model.model_digest {
                    "model"
                } else if theirs.tokenizer_digest != model.tokenizer_digest {
                    "tokenizer"
                } else {
                    continue;
                };
                let (node, other) = (register.node.clone(), other.node.clone());
                return Err(TableError::ModelConflict { node, other, model: model.id.clone(), digest });
            }
        }
        Ok(())
    }
}

/// Approximate bytes of a registration in a snapshot.
fn weight(register: &WorkerInfo) -> usize {
    let model = |m: &proto::served_model::ServedModel| 96 + m.id.as_str().len() + m.numeric_class.len();
    let texts = register.node.as_str().len() + register.quic.len() + register.ops.len();
    32 + texts + register.models.iter().map(model).sum::<usize>()
}
