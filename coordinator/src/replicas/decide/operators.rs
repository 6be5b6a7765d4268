//! Operators' plans: a replica is set up when its own workers are available, never on others.

use super::{Node, View, WantedModel, named_range};
use crate::consensus::table::{Change, OperatorPlan, ReplicaPlaced, ReplicaPlan, StagePlan};
use crate::placement::{Placement, PlacementError, Worker};
use proto::ids::{ModelId, NodeId};
use std::collections::BTreeMap;
use std::ops::Range;

/// Reason why a replica of an operator's plan is not placed yet.
#[derive(Debug, thiserror::Error)]
enum Waits {
    /// This coordinator does not know the model's layers.
    #[error("the leader does not offer the model, or the model does not generate text")]
    Model,
    /// A worker is not visible here.
    #[error("worker {0} is not connected, or not in the pool")]
    Away(NodeId),
    /// A worker is draining.
    #[error("worker {0} is draining")]
    Drains(NodeId),
    /// No worker has the model's file.
    #[error("no worker of the pool has an unblocked file of the model")]
    NoFile,
    /// No file is present or obtainable on all workers.
    #[error("worker {0} has another file of the model than the planned one")]
    OtherFile(NodeId),
    /// The layers do not fit the workers.
    #[error(transparent)]
    Refused(#[from] PlacementError),
}

impl View<'_> {
    /// The next step toward the operators' plans. A model's other replicas keep serving until a planned
    /// replica can take their workers, or all planned replicas are placed. So a plan whose workers are not
    /// there yet interrupts no service.
    pub(super) fn as_told(&self, unplanned: &mut BTreeMap<ModelId, String>) -> Option<Change> {
        self.table.operator_plans().values().find_map(|told| self.next_of(told, unplanned))
    }

    fn next_of(&self, told: &OperatorPlan, unplanned: &mut BTreeMap<ModelId, String>) -> Option<Change> {
        let of_model = || self.table.replicas().iter().filter(|(_, plan)| plan.model == told.model);
        let stands = |stages: &[StagePlan]| of_model().any(|(_, plan)| plan.stages == stages);
        let mut waits: Option<Waits> = None;
        for stages in told.replicas.iter().filter(|stages| !stands(stages)) {
            match self.lay(&told.model, stages) {
                Ok(plan) => return Some(self.make_room(plan)),
                Err(reason) => waits = waits.or(Some(reason)),
            }
        }
        if let Some(reason) = waits {
            unplanned.insert(told.model.clone(), format!("the operator's plan: {reason}"));
            return None;
        }
        let other = of_model().find(|(_, plan)| !self.table.is_operators(plan));
        other.map(|(&life, _)| Change::ReplicaDropped(life))
    }

    /// The planned replica, if all its workers are available and can hold it. [`make_room`](Self::make_room)
    /// handles workers in other replicas. They are never in another planned replica, since plans share no
    /// worker.
    fn lay(&self, model: &ModelId, stages: &[StagePlan]) -> Result<ReplicaPlan, Waits> {
        let want = self.wants.iter().find(|want| want.model == model).ok_or(Waits::Model)?;
        let there = |stage: &StagePlan| {
            let node = self.nodes.iter().find(|node| *node.name == stage.node);
            node.ok_or_else(|| Waits::Away(stage.node.clone()))
        };
        let nodes: Vec<&Node<'_>> = stages.iter().map(there).collect::<Result<_, _>>()?;
        if let Some(node) = nodes.iter().find(|node| node.draining) {
            return Err(Waits::Drains(node.name.clone()));
        }
        let model_digest = self.file_for(want, &nodes)?;
        let ranges: Vec<(String, Range<usize>)> = stages.iter().map(named_range).collect();
        let workers: Vec<Worker> = nodes.iter().map(|node| node.worker()).collect();
        let costs = self.costs(want, &model_digest);
        let placement = Placement { model: &costs, workload: want.workload(), workers: &workers };
        placement.explicit(&ranges)?;
        Ok(ReplicaPlan { model: model.clone(), model_digest, stages: stages.to_vec() })
    }

    /// The file that all these workers have or, having none, can receive. Of several, the one that most
    /// workers have.
    fn file_for(&self, want: &WantedModel<'_>, nodes: &[&Node<'_>]) -> Result<[u8; 32], Waits> {
        let mut other = None;
        let digests = self.digests(want.model).into_iter().filter(|digest| {
            let has_not =
                |node: &&&Node<'_>| !node.has(want.model, *digest) && !node.capacity.files.is_empty();
            let stray = nodes.iter().find(has_not);
            other = other.or(stray.map(|node| node.name));
            stray.is_none()
        });
        let lack = |digest: &[u8; 32]| nodes.iter().filter(|node| !node.has(want.model, *digest)).count();
        let best = digests.min_by_key(lack);
        best.ok_or_else(|| other.map_or(Waits::NoFile, |node| Waits::OtherFile(node.clone())))
    }

    /// Places the planned replica in place of one that uses its workers. If several do, drops one of these
    /// instead, and leaves one of the same model for last, so that its requests wait for the new replica.
    fn make_room(&self, plan: ReplicaPlan) -> Change {
        let wanted = |node: &NodeId| plan.stages.iter().any(|stage| stage.node == *node);
        let held = self.table.replicas().iter();
        let held = held.filter(|(_, other)| other.stages.iter().any(|stage| wanted(&stage.node)));
        let mut lives: Vec<(bool, u64)> =
            held.map(|(&life, other)| (other.model == plan.model, life)).collect();
        lives.sort_unstable();
        match lives.as_slice() {
            [(_, first), _, ..] => Change::ReplicaDropped(*first),
            alone => {
                let replaces = alone.first().map(|(_, life)| *life);
                Change::ReplicaPlaced(ReplicaPlaced { plan, replaces })
            }
        }
    }
}
