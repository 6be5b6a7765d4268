//! Replicas of several stages, operators' plans, and the block list of model files.

use super::{
    Kind, MAX_CONDEMNED, MAX_MODELS, MAX_PLANNED_WORKERS, MAX_REASON, MAX_REPLICAS, ModelBlocked,
    OperatorPlan, Refusal, ReplicaPlaced, ReplicaPlan, StagePlan, Table, put,
};
use proto::ids::NodeId;
use proto::placement::MAX_STAGES;
use std::collections::BTreeSet;

impl Table {
    /// Plans a replica. Its epoch is the current entry's index, so later plans have larger epochs.
    pub(super) fn place(&mut self, placed: ReplicaPlaced) -> Result<(), Refusal> {
        let ReplicaPlaced { plan, replaces } = placed;
        if self.blocked.contains_key(&plan.model_digest) {
            return Err(Refusal::Blocked);
        }
        if replaces.is_some_and(|plan_index| !self.replicas.contains_key(&plan_index)) {
            return Err(Refusal::Unknown(Kind::Replica));
        }
        let mut nodes = BTreeSet::new();
        if !are_valid(&plan.stages, &mut nodes) {
            return Err(Refusal::OutOfRange);
        }
        let others = self.replicas.iter().filter(|(plan_index, _)| Some(**plan_index) != replaces);
        let mut taken = others.flat_map(|(_, other)| &other.stages).map(|stage| &stage.node);
        if let Some(node) = taken.find(|node| nodes.contains(node)) {
            return Err(Refusal::Taken(node.clone()));
        }
        if self.replicas.len() >= MAX_REPLICAS && replaces.is_none() {
            return Err(Refusal::Full(Kind::Replica));
        }
        replaces.into_iter().for_each(|plan_index| drop(self.replicas.remove(&plan_index)));
        self.replicas.insert(self.applied, plan);
        Ok(())
    }

    /// Sets an operator's plan of a model, replacing an earlier one.
    pub(super) fn set_operator_plan(&mut self, plan: OperatorPlan) -> Result<(), Refusal> {
        let mut nodes = BTreeSet::new();
        if plan.replicas.is_empty() || !plan.replicas.iter().all(|stages| are_valid(stages, &mut nodes)) {
            return Err(Refusal::OutOfRange);
        }
        let others = self.operators.values().filter(|other| other.model != plan.model);
        let others: Vec<&NodeId> = others.flat_map(OperatorPlan::workers).collect();
        if let Some(node) = others.iter().find(|node| nodes.contains(*node)) {
            return Err(Refusal::Taken((*node).clone()));
        }
        if others.len() + nodes.len() > MAX_PLANNED_WORKERS {
            return Err(Refusal::Full(Kind::Place));
        }
        put(&mut self.operators, plan.model.clone(), plan, MAX_MODELS, Kind::Model)
    }

    /// Whether an operator planned this replica.
    pub fn is_operators(&self, replica: &ReplicaPlan) -> bool {
        self.operators.get(&replica.model).is_some_and(|plan| plan.replicas.contains(&replica.stages))
    }

    /// Adds a file to the block list and removes its replicas and places.
    pub(super) fn block(&mut self, blocked: ModelBlocked) -> Result<(), Refusal> {
        if blocked.reason.len() > MAX_REASON {
            return Err(Refusal::TooLarge);
        }
        let digest = blocked.model_digest;
        put(&mut self.blocked, digest, blocked, MAX_CONDEMNED, Kind::Model)?;
        self.replicas.retain(|_, plan| plan.model_digest != digest);
        self.models.retain(|_, plan| plan.model_digest != digest);
        Ok(())
    }
}

impl OperatorPlan {
    /// All workers in the plan.
    pub fn workers(&self) -> impl Iterator<Item = &NodeId> {
        self.replicas.iter().flatten().map(|stage| &stage.node)
    }
}

/// Whether the stages cover a contiguous layer range from layer 0, with no empty stage, no worker twice and
/// none in `nodes`. Adds the stages' workers to `nodes`.
fn are_valid<'a>(stages: &'a [StagePlan], nodes: &mut BTreeSet<&'a NodeId>) -> bool {
    let in_order = stages.windows(2).all(|pair| match pair {
        [before, after] => before.layers.1 == after.layers.0,
        _ => false,
    });
    let whole = stages.first().is_some_and(|stage| stage.layers.0 == 0);
    stages.len() <= MAX_STAGES
        && whole
        && in_order
        && stages.iter().all(|stage| stage.layers.0 < stage.layers.1 && nodes.insert(&stage.node))
}
