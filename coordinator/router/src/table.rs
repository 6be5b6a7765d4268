//! The table of workers: members with their epochs, models and drain state.
//!
//! A deterministic state machine, so that a replicated log can feed it: [`WorkerTable::apply`] is the only
//! way to change it. The [`Roster`] holds the rules of membership and is the same on every coordinator. Slots
//! are this coordinator's own numbering. Values that change every second (load, progress) are in
//! [`crate::balancer`].

pub mod roster;

use crate::slot::{MAX_SLOTS, Slot, SlotSet};
use proto::adapter::OfferedAdapter;
use proto::ids::{Epoch, ModelId, NodeId};
use proto::served_model::ServedModel;
use proto::worker::WorkerInfo;
use roster::{Roster, WorkerStanding};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Maximum of known workers, members or not.
pub const MAX_WORKERS: usize = 4096;

/// A member of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    pub slot: Slot,
    pub register: Arc<WorkerInfo>,
    /// An operator has drained the worker.
    pub draining: bool,
    adapters: Vec<ServedAdapter>,
}

/// An adapter that a member serves as a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedAdapter {
    pub offered: OfferedAdapter,
    /// The parent with the adapter's name and digest.
    served: ServedModel,
}

impl Member {
    /// The model that the worker serves under this name, which may be that of an adapter.
    pub fn model(&self, id: &ModelId) -> Option<&ServedModel> {
        let model = self.register.models.iter().find(|m| m.id == *id);
        model.or_else(|| self.adapter(id).map(|adapter| &adapter.served))
    }

    /// The adapter that the worker serves under this name.
    pub fn adapter(&self, id: &ModelId) -> Option<&ServedAdapter> {
        self.adapters.iter().find(|adapter| adapter.offered.name == *id)
    }

    pub fn adapters(&self) -> impl Iterator<Item = &OfferedAdapter> {
        self.adapters.iter().map(|adapter| &adapter.offered)
    }
}

/// A change of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TableChange {
    /// A worker starts an epoch, or reconnects.
    Join(WorkerInfo),
    /// A worker's epoch has ended; a change for another epoch is refused.
    Leave {
        node: NodeId,
        /// The epoch that has ended.
        epoch: Epoch,
    },
    /// An operator drains a worker or ends its drain. Survives the worker's restart.
    Drain { node: NodeId, draining: bool },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Applied {
    /// The worker has joined in this slot. It replaces its own earlier epoch or connection there.
    Joined { slot: Slot, node: NodeId, epoch: Epoch },
    /// The worker in this slot has left.
    Left(Slot),
    /// The drain state of the worker in this slot was set.
    Drained(Slot),
}

/// Why a change was refused. The table is unchanged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// A later epoch of the worker is known.
    #[error("{node} uses epoch {}, but epoch {} is known", got.0, known.0)]
    StaleEpoch {
        node: NodeId,
        /// The epoch of the change.
        got: Epoch,
        known: Epoch,
    },
    #[error("no worker {0} is a member")]
    UnknownWorker(NodeId),
    /// The cluster has its maximum of workers.
    #[error("there are already {limit} workers, the limit")]
    Full { limit: usize },
    /// The registrations of all members are too large.
    #[error("the registrations of all workers would have {bytes} bytes, at most {limit}")]
    TooLarge {
        /// Approximate size with the refused registration, in bytes.
        bytes: usize,
        /// Maximum size in bytes.
        limit: usize,
    },
    /// Another member serves other weights or another tokenizer under the same name.
    #[error("{node} and {other} serve different models as {model}: their {digest} digests differ")]
    ModelConflict {
        /// The refused worker.
        node: NodeId,
        /// The member that it conflicts with.
        other: NodeId,
        model: ModelId,
        /// The digest that differs: `model` or `tokenizer`.
        digest: &'static str,
    },
}

#[derive(Debug, Clone, Default)]
pub struct WorkerTable {
    roster: Roster,
    members: BTreeMap<NodeId, Member>,
    used: SlotSet,
    version: u64,
}

impl WorkerTable {
    pub fn apply(&mut self, change: TableChange) -> Result<Applied, TableError> {
        let applied = match change {
            TableChange::Join(register) => self.join(register),
            TableChange::Leave { node, epoch } => self.leave(node, epoch),
            TableChange::Drain { node, draining } => self.drain(node, draining),
        }?;
        self.version += 1;
        Ok(applied)
    }

    pub fn version(&self) -> u64 {
        self.version
    }

    pub fn members(&self) -> impl Iterator<Item = &Member> {
        self.members.values()
    }

    pub fn member(&self, node: &NodeId) -> Option<&Member> {
        self.members.get(node)
    }

    pub fn in_slot(&self, slot: Slot) -> Option<&Member> {
        self.members.values().find(|m| m.slot == slot)
    }

    /// The model of this name, if any member serves it. All members agree on its digests.
    pub fn model(&self, id: &ModelId) -> Option<&ServedModel> {
        self.members.values().find_map(|m| m.model(id))
    }

    /// The adapter of this name, if any member serves it. All members agree on its digest.
    pub fn adapter(&self, id: &ModelId) -> Option<&OfferedAdapter> {
        self.members.values().find_map(|m| m.adapter(id)).map(|adapter| &adapter.offered)
    }

    /// Replaces the adapters of a member. Leaves out those whose parent it does not serve, and those whose name means
    /// something else at another member or is a model's; returns these.
    pub fn set_adapters(
        &mut self,
        node: &NodeId,
        epoch: Epoch,
        offered: Vec<OfferedAdapter>,
    ) -> Result<Vec<OfferedAdapter>, TableError> {
        let member = self.members.get(node).filter(|member| member.register.epoch == epoch);
        let Some(member) = member else { return Err(TableError::UnknownWorker(node.clone())) };
        let others = || self.members.values().filter(|other| other.register.node != *node);
        let (mut adapters, mut left_out) = (Vec::<ServedAdapter>::new(), Vec::new());
        for offered in offered {
            let is_model =
                self.members.values().any(|m| m.register.models.iter().any(|m| m.id == offered.name));
            let differs = others().filter_map(|other| other.adapter(&offered.name)).any(|other| {
                other.offered.digest != offered.digest || other.offered.parent != offered.parent
            });
            let twice = adapters.iter().any(|adapter| adapter.offered.name == offered.name);
            let parent = member.register.models.iter().find(|model| model.id == offered.parent);
            match parent.filter(|_| !is_model && !differs && !twice) {
                Some(parent) => {
                    let (id, model_digest) = (offered.name.clone(), offered.digest);
                    let served = ServedModel { id, model_digest, ..parent.clone() };
                    adapters.push(ServedAdapter { offered, served });
                }
                None => left_out.push(offered),
            }
        }
        if let Some(member) = self.members.get_mut(node) {
            member.adapters = adapters;
        }
        self.version += 1;
        Ok(left_out)
    }

    fn join(&mut self, register: WorkerInfo) -> Result<Applied, TableError> {
        let node = register.node.clone();
        let before = self.members.get(&node).map(|m| m.slot);
        let free = || (0..MAX_SLOTS).filter_map(Slot::new).find(|&s| !self.used.contains(s));
        let slot = before.or_else(free).ok_or(TableError::Full { limit: MAX_SLOTS })?;
        self.roster.apply(TableChange::Join(register))?;
        let worker = self.roster.worker(&node).ok_or_else(|| TableError::UnknownWorker(node.clone()))?;
        let register = worker.standing.register().ok_or_else(|| TableError::UnknownWorker(node.clone()))?;
        let (epoch, draining) = (worker.epoch, matches!(worker.standing, WorkerStanding::Draining(_)));
        let member = Member { slot, register: Arc::clone(register), draining, adapters: Vec::new() };
        self.used.insert(slot);
        self.members.insert(node.clone(), member);
        Ok(Applied::Joined { slot, node, epoch })
    }

    fn leave(&mut self, node: NodeId, epoch: Epoch) -> Result<Applied, TableError> {
        self.roster.apply(TableChange::Leave { node: node.clone(), epoch })?;
        let member = self.members.remove(&node).ok_or(TableError::UnknownWorker(node))?;
        self.used.remove(member.slot);
        Ok(Applied::Left(member.slot))
    }

    fn drain(&mut self, node: NodeId, draining: bool) -> Result<Applied, TableError> {
        self.roster.apply(TableChange::Drain { node: node.clone(), draining })?;
        let member = self.members.get_mut(&node).ok_or(TableError::UnknownWorker(node))?;
        member.draining = draining;
        Ok(Applied::Drained(member.slot))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proto::served_model::ModelTask;

    pub(crate) fn register(name: &str, epoch: u64, models: &[(&str, u8)]) -> WorkerInfo {
        let model = |&(id, digest): &(&str, u8)| ServedModel {
            id: ModelId::new(id).unwrap(),
            model_digest: [digest; 32],
            tokenizer_digest: [1; 32],
            max_model_len: 4096,
            layers: (0, 4),
            engine: "kvasir".into(),
            hit_tokens: 16,
            numeric_class: "test".into(),
            block_tokens: 16,
            task: ModelTask::Generate,
        };
        WorkerInfo {
            node: NodeId::new(name).unwrap(),
            epoch: Epoch(epoch),
            pid: 1,
            quic: "127.0.0.1:1".into(),
            ops: "127.0.0.1:2".into(),
            models: models.iter().map(model).collect(),
        }
    }

    fn joined(table: &mut WorkerTable, name: &str, epoch: u64) -> Slot {
        match table.apply(TableChange::Join(register(name, epoch, &[("m", 7)]))) {
            Ok(Applied::Joined { slot, .. }) => slot,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn slots_are_kept_over_a_restart_and_reused_after_a_leave() {
        let mut table = WorkerTable::default();
        let (a, b) = (joined(&mut table, "a", 1), joined(&mut table, "b", 1));
        assert_ne!(a, b);
        assert_eq!(joined(&mut table, "a", 2), a);
        let node = NodeId::new("a").unwrap();
        assert_eq!(table.apply(TableChange::Leave { node, epoch: Epoch(2) }), Ok(Applied::Left(a)));
        assert_eq!(joined(&mut table, "c", 1), a);
        assert_eq!(table.in_slot(b).unwrap().register.node.as_str(), "b");
    }

    #[test]
    fn changes_of_an_older_epoch_are_refused() {
        let mut table = WorkerTable::default();
        joined(&mut table, "a", 5);
        let node = NodeId::new("a").unwrap();
        let stale = TableError::StaleEpoch { node: node.clone(), got: Epoch(4), known: Epoch(5) };
        assert_eq!(table.apply(TableChange::Join(register("a", 4, &[]))), Err(stale.clone()));
        assert_eq!(
            table.apply(TableChange::Leave { node: node.clone(), epoch: Epoch(4) }),
            Err(stale.clone())
        );
        table.apply(TableChange::Leave { node: node.clone(), epoch: Epoch(5) }).unwrap();
        // The same holds after the worker has left.
        assert_eq!(table.apply(TableChange::Join(register("a", 4, &[]))), Err(stale));
        let left = table.apply(TableChange::Leave { node: node.clone(), epoch: Epoch(5) });
        assert_eq!(left, Err(TableError::UnknownWorker(node)));
    }

    #[test]
    fn one_name_means_one_model() {
        let mut table = WorkerTable::default();
        joined(&mut table, "a", 1);
        let refused = table.apply(TableChange::Join(register("b", 1, &[("m", 8)])));
        assert!(matches!(refused, Err(TableError::ModelConflict { digest: "model", .. })), "{refused:?}");
        // The only worker of a model may change it, and other names are free.
        table.apply(TableChange::Join(register("a", 2, &[("m", 8)]))).unwrap();
        table.apply(TableChange::Join(register("b", 1, &[("m", 8), ("n", 1)]))).unwrap();
        let mut other = register("c", 1, &[("n", 1)]);
        other.models[0].tokenizer_digest = [2; 32];
        let refused = table.apply(TableChange::Join(other));
        assert!(matches!(refused, Err(TableError::ModelConflict { digest: "tokenizer", .. })), "{refused:?}");
    }

    #[test]
    fn a_drain_survives_a_restart_of_the_worker() {
        let mut table = WorkerTable::default();
        let slot = joined(&mut table, "a", 1);
        let node = NodeId::new("a").unwrap();
        let drain = |draining| TableChange::Drain { node: node.clone(), draining };
        assert_eq!(table.apply(drain(true)), Ok(Applied::Drained(slot)));
        joined(&mut table, "a", 2);
        assert!(table.member(&node).unwrap().draining);
        table.apply(drain(false)).unwrap();
        joined(&mut table, "a", 3);
        assert!(!table.member(&node).unwrap().draining);
    }

    #[test]
    fn a_worker_without_a_free_slot_is_refused() {
        let mut table = WorkerTable::default();
        (0..MAX_SLOTS).for_each(|i| {
            joined(&mut table, &format!("w{i}"), 1);
        });
        assert_eq!(
            table.apply(TableChange::Join(register("late", 1, &[]))),
            Err(TableError::Full { limit: MAX_SLOTS })
        );
    }
}
