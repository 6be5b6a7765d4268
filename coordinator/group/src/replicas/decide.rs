//! Decides the next plan change from the table and the observed workers.
//!
//! For a model with an operator's plan, `decide/operators.rs` sets the replicas; this file then only handles
//! its unusable files. Workers that such a plan names are not used for anything else.

mod operators;

use super::drafters;
use crate::placement::{Placement, PlacementError, Worker, Workload};
use consensus::table::{
    Change, MAX_REASON, ModelBlocked, OperatorPlan, ReplicaPlaced, ReplicaPlan, StagePlan, Table,
};
use model::costs::ModelCosts;
use proto::ids::{ModelId, NodeId};
use proto::placement::{Capacity, OfferedDrafter};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Context that a replica is planned for, at most the model's own.
const CONTEXT: usize = 8192;

/// A model to be served.
pub(super) struct WantedModel<'a> {
    pub(super) model: &'a ModelId,
    pub(super) costs: &'a ModelCosts,
    /// Length of its longest sequence in tokens.
    pub(super) context: usize,
}

/// An available pool worker.
pub(super) struct Node<'a> {
    pub(super) name: &'a NodeId,
    pub(super) capacity: &'a Capacity,
    /// The drafter of its model.
    pub(super) drafter: Option<&'a OfferedDrafter>,
    pub(super) draining: bool,
}

impl WantedModel<'_> {
    /// The load that a replica is planned for.
    fn workload(&self) -> Workload {
        Workload::of_context(self.context.min(CONTEXT) as u64)
    }
}

impl Node<'_> {
    /// Whether the worker has this file under the model's name.
    fn has(&self, model: &ModelId, digest: [u8; 32]) -> bool {
        self.capacity.files.iter().any(|file| file.model == *model && file.digest == digest)
    }

    fn worker(&self) -> Worker {
        let Capacity { memory, bandwidth, compute, .. } = *self.capacity;
        Worker { name: self.name.to_string(), memory, bandwidth: bandwidth as f64, compute: compute as f64 }
    }
}

pub(super) struct View<'a> {
    pub(super) table: &'a Table,
    pub(super) targets: &'a [WantedModel<'a>],
    /// Stages per replica; `None`: as few as hold the model.
    pub(super) shards: Option<usize>,
    pub(super) nodes: &'a [Node<'a>],
    /// Whether a worker has been away for too long to wait for it.
    pub(super) is_gone: &'a dyn Fn(&NodeId) -> bool,
    /// Why the first stage of this replica epoch reports its file as unusable, if it does.
    pub(super) unusable_file: &'a dyn Fn(u64, &NodeId) -> Option<String>,
    /// Whether the first stage of this replica epoch reports that the last setup failed.
    pub(super) setup_failed: &'a dyn Fn(u64, &NodeId) -> bool,
}

/// The next change, and for each model why no further replica can be planned.
pub(super) fn decide(view: &View<'_>) -> (Option<Change>, BTreeMap<ModelId, String>) {
    let mut unplanned = BTreeMap::new();
    let change = view.block().or_else(|| view.place_planned(&mut unplanned));
    let change = change.or_else(|| view.replace(&mut unplanned)).or_else(|| view.drop_mismatched_replicas());
    let change = change.or_else(|| view.add(&mut unplanned));
    (change, unplanned)
}

impl View<'_> {
    /// Adds a file to the block list that a first stage reported as unusable.
    fn block(&self) -> Option<Change> {
        self.table.replicas().iter().find_map(|(&plan_index, plan)| {
            let lead = &plan.stages.first()?.node;
            let mut reason = (self.unusable_file)(plan_index, lead)?;
            reason.truncate(reason.floor_char_boundary(MAX_REASON));
            let (model_digest, node) = (plan.model_digest, lead.clone());
            Some(Change::ModelBlocked(ModelBlocked { model_digest, node, reason }))
        })
    }

    /// Replaces a replica that has lost a worker for good, or that fails because it was cut without the
    /// current drafter, if it can be cut again over the available workers. Otherwise its plan stays, in case
    /// the worker returns. Replicas of a model with an operator's plan also stay.
    fn replace(&self, unplanned: &mut BTreeMap<ModelId, String>) -> Option<Change> {
        self.table.replicas().iter().find_map(|(&plan_index, plan)| {
            let operator_planned = self.table.operator_plans().contains_key(&plan.model);
            let lost = plan.stages.iter().any(|stage| (self.is_gone)(&stage.node));
            let setup_failed =
                plan.stages.first().is_some_and(|lead| (self.setup_failed)(plan_index, &lead.node));
            let target = self.targets.iter().find(|target| *target.model == plan.model)?;
            let crowded = !lost && setup_failed && self.has_no_room_for_drafter(target, plan);
            if operator_planned || !(lost || crowded) {
                return None;
            }
            let own: BTreeSet<&NodeId> = plan.stages.iter().map(|stage| &stage.node).collect();
            match self.plan(target, plan.model_digest, |name| own.contains(name))? {
                Ok(plan) => Some(Change::ReplicaPlaced(ReplicaPlaced { plan, replaces: Some(plan_index) })),
                Err(error) => {
                    if crowded {
                        unplanned.insert(plan.model.clone(), error.to_string());
                    }
                    None
                }
            }
        })
    }

    /// Whether the plan fits its workers without the model's drafter but not with it.
    fn has_no_room_for_drafter(&self, target: &WantedModel<'_>, plan: &ReplicaPlan) -> bool {
        let with = self.costs(target, &plan.model_digest);
        if with.drafter().is_none() {
            return false;
        }
        let ranges: Vec<(String, Range<usize>)> = plan.stages.iter().map(named_range).collect();
        let there = |stage: &StagePlan| self.nodes.iter().find(|node| *node.name == stage.node);
        let workers: Vec<Worker> = plan.stages.iter().filter_map(there).map(|node| node.worker()).collect();
        let goes = |model: &ModelCosts| {
            Placement { model, workload: target.workload(), workers: &workers }.explicit(&ranges).is_ok()
        };
        goes(target.costs) && !goes(&with)
    }

    /// The costs of the model with this digest, including its drafter.
    fn costs<'a>(&self, target: &WantedModel<'a>, digest: &[u8; 32]) -> Cow<'a, ModelCosts> {
        let offered = self.nodes.iter().map(|node| (node.capacity, node.drafter));
        drafters::with(target.costs, drafters::of(offered, digest))
    }

    /// Drops a replica of which a worker has another file, so that the replica can never be set up and no
    /// other worker can replace it. Its workers become free.
    fn drop_mismatched_replicas(&self) -> Option<Change> {
        let strays = |plan: &ReplicaPlan| {
            plan.stages.iter().any(|stage| {
                let node = self.nodes.iter().find(|node| *node.name == stage.node);
                node.is_some_and(|node| {
                    let files = &node.capacity.files;
                    !files.is_empty() && !files.iter().any(|file| file.digest == plan.model_digest)
                })
            })
        };
        let stray = self.table.replicas().iter().find(|(_, plan)| strays(plan));
        stray.map(|(&plan_index, _)| Change::ReplicaDropped(plan_index))
    }

    /// Adds a replica over free workers, for the model with the fewest replicas first.
    fn add(&self, unplanned: &mut BTreeMap<ModelId, String>) -> Option<Change> {
        let replicas = |target: &&WantedModel<'_>| {
            self.table.replicas().values().filter(|plan| plan.model == *target.model).count()
        };
        let operator_planned =
            |target: &&WantedModel<'_>| self.table.operator_plans().contains_key(target.model);
        let mut targets: Vec<&WantedModel<'_>> =
            self.targets.iter().filter(|target| !operator_planned(target)).collect();
        targets.sort_by_key(replicas);
        targets.into_iter().find_map(|target| {
            let plan = |digest| self.plan(target, digest, |_| false);
            match self.digests(target.model).into_iter().find_map(plan)? {
                Ok(plan) => Some(Change::ReplicaPlaced(ReplicaPlaced { plan, replaces: None })),
                Err(error) => {
                    unplanned.entry(target.model.clone()).or_insert_with(|| error.to_string());
                    None
                }
            }
        })
    }

    /// Digests of the files under a model's name that may be placed.
    fn digests(&self, model: &ModelId) -> BTreeSet<[u8; 32]> {
        let files = self.nodes.iter().flat_map(|node| &node.capacity.files);
        let digests = files.filter(|file| file.model == *model).map(|file| file.digest);
        digests.filter(|digest| !self.table.blocked().contains_key(digest)).collect()
    }

    /// Cuts a model over free workers: not draining, in no operator's plan, and in no replica unless
    /// `may_take` allows it. Uses the workers that have the file if possible, else also workers without
    /// files, which then receive it. `None` if no worker is free.
    fn plan(
        &self,
        target: &WantedModel<'_>,
        digest: [u8; 32],
        may_take: impl Fn(&NodeId) -> bool,
    ) -> Option<Result<ReplicaPlan, PlacementError>> {
        let taken: BTreeSet<&NodeId> =
            self.table.replicas().values().flat_map(|plan| &plan.stages).map(|stage| &stage.node).collect();
        let named: BTreeSet<&NodeId> =
            self.table.operator_plans().values().flat_map(OperatorPlan::workers).collect();
        let has = |node: &Node<'_>| node.has(target.model, digest);
        let free = |node: &&Node<'_>| {
            !node.draining
                && !named.contains(node.name)
                && (may_take(node.name) || !taken.contains(node.name))
        };
        let free: Vec<&Node<'_>> = self.nodes.iter().filter(free).collect();
        let with = |fits: &dyn Fn(&Node<'_>) -> bool| -> Vec<&Node<'_>> {
            free.iter().copied().filter(|node| fits(node)).collect()
        };
        let holders = with(&has);
        let all = match self.nodes.iter().any(has) {
            true => with(&|node| has(node) || node.capacity.files.is_empty()),
            // No worker could send the file.
            false => holders.clone(),
        };
        match self.cut(target, digest, &holders) {
            _ if all.is_empty() => None,
            Err(_) if all.len() > holders.len() => Some(self.cut(target, digest, &all)),
            planned => Some(planned),
        }
    }

    fn cut(
        &self,
        target: &WantedModel<'_>,
        model_digest: [u8; 32],
        candidates: &[&Node<'_>],
    ) -> Result<ReplicaPlan, PlacementError> {
        let workers: Vec<Worker> = candidates.iter().map(|node| node.worker()).collect();
        let costs = self.costs(target, &model_digest);
        let placement = Placement { model: &costs, workload: target.workload(), workers: &workers };
        let replica = placement.place(self.shards, 1)?.into_iter().next().ok_or(PlacementError::NoWorkers)?;
        let stages = replica.stages.into_iter().filter_map(|stage| {
            let node = candidates.get(stage.worker)?.name.clone();
            Some(StagePlan { node, layers: (stage.layers.start as u32, stage.layers.end as u32) })
        });
        Ok(ReplicaPlan { model: target.model.clone(), model_digest, stages: stages.collect() })
    }
}

/// A stage of a plan in the form that placement checks.
fn named_range(stage: &StagePlan) -> (String, Range<usize>) {
    let (first, end) = stage.layers;
    (stage.node.to_string(), first as usize..end as usize)
}

#[cfg(test)]
mod tests;
