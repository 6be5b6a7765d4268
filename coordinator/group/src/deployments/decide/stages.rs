//! Replicas of several workers. The places of a version are groups of as many workers as its deployment has shards; the
//! first worker of a group computes the first layers and takes the requests.

use super::{View, Wanted};
use crate::placement::{Placement, PlacementError, Stage, Worker, Workload};
use consensus::table::{Change, Deployment, ReplicaPlaced, ReplicaPlan, StagePlan};
use model::costs::ModelCosts;
use proto::deployment::StageSpeed;
use proto::ids::{ModelId, NodeId};
use std::collections::BTreeSet;

/// Context that a replica is planned for, at most the model's own.
const CONTEXT: u64 = 8192;
/// Sequences of that length for which each stage has room.
const SEQUENCES: u64 = 2;
/// Bytes of a stage beside its weights and caches: buffers, queues, the tokenizer.
const STAGE_BYTES: u64 = 48 << 20;
/// Speed of the workers of a cut that only tells how much memory each stage needs.
const ANY_SPEED: StageSpeed = StageSpeed { bandwidth: 1 << 34, compute: 1 << 38 };

/// Layers of a version.
#[derive(Debug, Clone)]
pub struct Layers {
    pub costs: ModelCosts,
    /// The longest sequence, in tokens.
    pub context: u64,
}

impl Layers {
    fn cut(&self, workers: &[Worker]) -> Result<Vec<Stage>, PlacementError> {
        let workload = Workload { sequences: SEQUENCES, ..Workload::of_context(self.context.min(CONTEXT)) };
        let placement = Placement { model: &self.costs, workload, workers };
        let replica = placement.place(Some(workers.len()), 1)?.into_iter().next();
        Ok(replica.ok_or(PlacementError::NoWorkers)?.stages)
    }

    /// Bytes that each of `shards` workers needs.
    pub(in super::super) fn part_bytes(&self, shards: usize) -> Result<u64, PlacementError> {
        let workers: Vec<Worker> =
            (0..shards).map(|index| worker(index.to_string(), u64::MAX, ANY_SPEED)).collect();
        let largest = self.cut(&workers)?.iter().map(|stage| stage.needs.total).max().unwrap_or(0);
        Ok(largest.saturating_add(STAGE_BYTES))
    }
}

fn worker(name: String, memory: u64, speed: StageSpeed) -> Worker {
    Worker { name, memory, bandwidth: speed.bandwidth as f64, compute: speed.compute as f64 }
}

/// Workers of a replica.
pub(in super::super) fn shards(deployment: &Deployment) -> usize {
    usize::from(deployment.settings.shards.max(1))
}

/// The complete groups of a version's places.
pub(super) fn groups<'a>(
    places: &'a [NodeId],
    deployment: &Deployment,
) -> impl Iterator<Item = &'a [NodeId]> {
    places.chunks_exact(shards(deployment))
}

impl<'a> View<'a> {
    /// Bytes that a replica of the version needs at each of its workers. `None`: its layers are not known here yet.
    pub(super) fn part_bytes(&self, wanted: Wanted<'_>) -> Option<Result<u64, String>> {
        let whole = wanted.version.facts.map_or(0, |facts| facts.needed_bytes);
        match shards(wanted.deployment) {
            1 => Some(Ok(whole)),
            shards => {
                let layers = (self.layers)(wanted.name)?;
                Some(layers.part_bytes(shards).map_err(|error| error.to_string()))
            }
        }
    }

    /// The worker that takes a version's requests for the replica in which `node` is. `None` while its layers are not
    /// cut.
    pub(super) fn lead<'b>(
        &'b self,
        version: &ModelId,
        deployment: &Deployment,
        node: &'b NodeId,
    ) -> Option<&'b NodeId> {
        if shards(deployment) == 1 {
            return Some(node);
        }
        let has = |plan: &&ReplicaPlan| {
            plan.model == *version && plan.stages.iter().any(|stage| stage.node == *node)
        };
        self.table.replicas().values().find(has)?.stages.first().map(|first| &first.node)
    }

    /// The version with several shards that has a stage at the worker.
    pub(super) fn staged_at(&self, node: &NodeId) -> Option<&'a ModelId> {
        self.table.models().iter().find_map(|(version, plan)| {
            let (deployment, _) = self.table.deployments().find(version)?;
            (shards(deployment) > 1 && plan.placement.contains(node)).then_some(version)
        })
    }

    /// Removes the workers that are left of a group after the number of shards was changed.
    pub(super) fn drop_partial_group(&self) -> Option<Change> {
        self.table.models().iter().find_map(|(version, plan)| {
            let (deployment, _) = self.table.deployments().find(version)?;
            let rest = plan.placement.chunks_exact(shards(deployment)).remainder();
            (!rest.is_empty()).then(|| super::without_nodes(plan, rest))
        })
    }

    /// Cuts the layers of each placed group, and drops replicas whose group is gone.
    pub(super) fn cut_groups(&self) -> Option<Change> {
        let of_group = |group: &[NodeId], plan: &ReplicaPlan| {
            let stages: BTreeSet<&NodeId> = plan.stages.iter().map(|stage| &stage.node).collect();
            stages == group.iter().collect()
        };
        let stray = self.table.replicas().iter().find(|(_, plan)| {
            let found = self.table.deployments().find(&plan.model);
            let places = self.places(&plan.model);
            let stands = found.is_some_and(|(deployment, _)| {
                shards(deployment) > 1 && groups(places, deployment).any(|group| of_group(group, plan))
            });
            plan.model.is_version() && !stands
        });
        if let Some((&plan_index, _)) = stray {
            return Some(Change::ReplicaDropped(plan_index));
        }
        self.table.models().iter().find_map(|(name, placed)| {
            let (deployment, version) = self.table.deployments().find(name)?;
            if shards(deployment) == 1 {
                return None;
            }
            let is_cut = |group: &[NodeId]| {
                self.table.replicas().values().any(|plan| plan.model == *name && of_group(group, plan))
            };
            let group = groups(&placed.placement, deployment).find(|group| !is_cut(group))?;
            let part = self.part_bytes(Wanted { name, deployment, version })?.ok()?;
            let speed = |node: &NodeId| self.host(node)?.stages;
            let workers: Option<Vec<Worker>> =
                group.iter().map(|node| Some(worker(node.to_string(), part, speed(node)?))).collect();
            let stages = (self.layers)(name)?.cut(&workers?).ok()?;
            let stage = |stage: Stage| {
                let layers = (stage.layers.start as u32, stage.layers.end as u32);
                Some(StagePlan { node: group.get(stage.worker)?.clone(), layers })
            };
            let stages = stages.into_iter().map(stage).collect::<Option<Vec<StagePlan>>>()?;
            let plan = ReplicaPlan { model: name.clone(), model_digest: placed.model_digest, stages };
            Some(Change::ReplicaPlaced(ReplicaPlaced { plan, replaces: None }))
        })
    }
}
