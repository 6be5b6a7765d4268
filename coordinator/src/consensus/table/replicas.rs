//! Replicas of several stages: which workers hold which layers, and which files are placed nowhere.

use super::{
    Kind, MAX_CONDEMNED, MAX_REASON, MAX_REPLICAS, ModelCondemnedV1, Refusal, ReplicaPlacedV1, Table, put,
};
use proto::placement::MAX_STAGES;
use std::collections::BTreeSet;

impl Table {
    /// Plans a replica. Its life is the present entry's index, so that a later plan has a larger one.
    pub(super) fn place(&mut self, placed: ReplicaPlacedV1) -> Result<(), Refusal> {
        let ReplicaPlacedV1 { plan, replaces } = placed;
        if self.condemned.contains_key(&plan.model_digest) {
            return Err(Refusal::Condemned);
        }
        if replaces.is_some_and(|life| !self.replicas.contains_key(&life)) {
            return Err(Refusal::Unknown(Kind::Replica));
        }
        let mut nodes = BTreeSet::new();
        let in_order = plan.stages.windows(2).all(|pair| match pair {
            [before, after] => before.layers.1 == after.layers.0,
            _ => false,
        });
        let whole = plan.stages.first().is_some_and(|stage| stage.layers.0 == 0);
        let sound =
            plan.stages.iter().all(|stage| stage.layers.0 < stage.layers.1 && nodes.insert(&stage.node));
        if plan.stages.len() > MAX_STAGES || !whole || !in_order || !sound {
            return Err(Refusal::OutOfRange);
        }
        let others = self.replicas.iter().filter(|(life, _)| Some(**life) != replaces);
        let mut taken = others.flat_map(|(_, other)| &other.stages).map(|stage| &stage.node);
        if let Some(node) = taken.find(|node| nodes.contains(node)) {
            return Err(Refusal::Taken(node.clone()));
        }
        if self.replicas.len() >= MAX_REPLICAS && replaces.is_none() {
            return Err(Refusal::Full(Kind::Replica));
        }
        replaces.into_iter().for_each(|life| drop(self.replicas.remove(&life)));
        self.replicas.insert(self.applied, plan);
        Ok(())
    }

    /// Places a file nowhere any more.
    pub(super) fn condemn(&mut self, condemned: ModelCondemnedV1) -> Result<(), Refusal> {
        if condemned.reason.len() > MAX_REASON {
            return Err(Refusal::TooLarge);
        }
        let digest = condemned.model_digest;
        put(&mut self.condemned, digest, condemned, MAX_CONDEMNED, Kind::Model)?;
        self.replicas.retain(|_, plan| plan.model_digest != digest);
        Ok(())
    }
}
