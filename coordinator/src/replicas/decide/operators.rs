//! Replicas as operators have planned them: put together when their workers are there, never over others.

use super::{Node, View, WantedModel, named_range};
use crate::consensus::table::{Change, OperatorPlan, ReplicaPlaced, ReplicaPlan, StagePlan};
use crate::placement::{Placement, PlacementError, Worker};
use proto::ids::{ModelId, NodeId};
use std::collections::BTreeMap;
use std::ops::Range;

/// Why a replica of an operator's plan is not placed yet.
#[derive(Debug, thiserror::Error)]
enum Waits {
    /// This coordinator knows nothing of the model's layers.
    #[error("this coordinator does not offer the model, or it generates nothing")]
    Model,
    /// A worker is not to be seen.
    #[error("worker {0} is away, or not one of the pool")]
    Away(NodeId),
    /// A worker takes no new work.
    #[error("worker {0} drains")]
    Drains(NodeId),
    /// Nobody has the model's file.
    #[error("no worker of the pool has a file of the model that may be placed")]
    NoFile,
    /// No file that all workers have or can get.
    #[error("worker {0} has another file than the one that is to be placed")]
    OtherFile(NodeId),
    /// The layers do not go where they are to.
    #[error(transparent)]
    Refused(#[from] PlacementError),
}

impl View<'_> {
    /// The next step to what operators have planned. What a model has of other replicas serves on until one of the
    /// plan's can take their workers, or all of the plan's stand: a plan whose workers have yet to come ends no service.
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

    /// A replica as it is planned, if all of its workers are there and can hold it. Whether they are free is for
    /// [`make_room`](Self::make_room): in a replica of an operator's plan they are not, since plans share no worker.
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

    /// The file that all of these workers have, or can get since they have none; of several, the one that most have.
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

    /// A replica of the plan takes the place of one that has its workers. Where several have, all but one go before; one
    /// of the same model is the last, so that its requests wait for the new one.
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
