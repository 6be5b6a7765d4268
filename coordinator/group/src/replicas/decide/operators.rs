//! Operators' plans: a replica is set up when its own workers are available, never on others.

use super::{Node, View, WantedModel, named_range};
use crate::placement::{Placement, PlacementError, Worker};
use consensus::table::{Change, OperatorPlan, ReplicaPlaced, ReplicaPlan, StagePlan};
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
    pub(super) fn place_planned(&self, unplanned: &mut BTreeMap<ModelId, String>) -> Option<Change> {
        self.table.operator_plans().values().find_map(|operator_plan| self.next_of(operator_plan, unplanned))
    }

    fn next_of(
        &self,
        operator_plan: &OperatorPlan,
        unplanned: &mut BTreeMap<ModelId, String>,
    ) -> Option<Change> {
        let of_model = || self.table.replicas().iter().filter(|(_, plan)| plan.model == operator_plan.model);
        let is_placed = |stages: &[StagePlan]| of_model().any(|(_, plan)| plan.stages == stages);
        let mut waits: Option<Waits> = None;
        for stages in operator_plan.replicas.iter().filter(|stages| !is_placed(stages)) {
            match self.planned_replica(&operator_plan.model, stages) {
                Ok(plan) => return Some(self.make_room(plan)),
                Err(reason) => waits = waits.or(Some(reason)),
            }
        }
        if let Some(reason) = waits {
            unplanned.insert(operator_plan.model.clone(), format!("the operator's plan: {reason}"));
            return None;
        }
        let other = of_model().find(|(_, plan)| !self.table.is_operators(plan));
        other.map(|(&plan_index, _)| Change::ReplicaDropped(plan_index))
    }

    /// The planned replica, if all its workers are available and can hold it. [`make_room`](Self::make_room)
    /// handles workers in other replicas. They are never in another planned replica, since plans share no
    /// worker.
    fn planned_replica(&self, model: &ModelId, stages: &[StagePlan]) -> Result<ReplicaPlan, Waits> {
        let target = self.targets.iter().find(|target| target.model == model).ok_or(Waits::Model)?;
        let there = |stage: &StagePlan| {
            let node = self.nodes.iter().find(|node| *node.name == stage.node);
            node.ok_or_else(|| Waits::Away(stage.node.clone()))
        };
        let nodes: Vec<&Node<'_>> = stages.iter().map(there).collect::<Result<_, _>>()?;
        if let Some(node) = nodes.iter().find(|node| node.draining) {
            return Err(Waits::Drains(node.name.clone()));
        }
        let model_digest = self.file_for(target, &nodes)?;
        let ranges: Vec<(String, Range<usize>)> = stages.iter().map(named_range).collect();
        let workers: Vec<Worker> = nodes.iter().map(|node| node.worker()).collect();
        let costs = self.costs(target, &model_digest);
        let placement = Placement { model: &costs, workload: target.workload(), workers: &workers };
        placement.explicit(&ranges)?;
        Ok(ReplicaPlan { model: model.clone(), model_digest, stages: stages.to_vec() })
    }

    /// The file that all these workers have or, having none, can receive. Of several, the one that most
    /// workers have.
    fn file_for(&self, target: &WantedModel<'_>, nodes: &[&Node<'_>]) -> Result<[u8; 32], Waits> {
        let mut other = None;
        let digests = self.digests(target.model).into_iter().filter(|digest| {
            let has_not =
                |node: &&&Node<'_>| !node.has(target.model, *digest) && !node.capacity.files.is_empty();
            let stray = nodes.iter().find(has_not);
            other = other.or(stray.map(|node| node.name));
            stray.is_none()
        });
        let lack = |digest: &[u8; 32]| nodes.iter().filter(|node| !node.has(target.model, *digest)).count();
        let best = digests.min_by_key(lack);
        best.ok_or_else(|| other.map_or(Waits::NoFile, |node| Waits::OtherFile(node.clone())))
    }

    /// Places the planned replica in place of one that uses its workers. If several do, drops one of these
    /// instead, and leaves one of the same model for last, so that its requests wait for the new replica.
    fn make_room(&self, plan: ReplicaPlan) -> Change {
        let needed = |node: &NodeId| plan.stages.iter().any(|stage| stage.node == *node);
        let held = self.table.replicas().iter();
        let held = held.filter(|(_, other)| other.stages.iter().any(|stage| needed(&stage.node)));
        let mut plan_indices: Vec<(bool, u64)> =
            held.map(|(&plan_index, other)| (other.model == plan.model, plan_index)).collect();
        plan_indices.sort_unstable();
        match plan_indices.as_slice() {
            [(_, first), _, ..] => Change::ReplicaDropped(*first),
            alone => {
                let replaces = alone.first().map(|(_, plan_index)| *plan_index);
                Change::ReplicaPlaced(ReplicaPlaced { plan, replaces })
            }
        }
    }
}
