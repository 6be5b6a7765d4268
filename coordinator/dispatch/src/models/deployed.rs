//! Deployed models, as one coordinator can offer them.

use super::OfferedModel;
use proto::deployment::ModelState;
use proto::ids::{ModelId, NodeId};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The deployed models by name.
#[derive(Debug, Clone, Default)]
pub struct Deployed(BTreeMap<ModelId, DeployedModel>);

#[derive(Debug, Clone)]
pub struct DeployedModel {
    /// The version that serves. `None` until its files and its tokenizer are known here.
    pub active: Option<Arc<OfferedModel>>,
    /// The version of a canary, with its requests per thousand.
    pub canary: Option<(u16, Arc<OfferedModel>)>,
    /// How far the version that serves is.
    pub progress: LoadProgress,
    /// Why the version that serves cannot be loaded now.
    pub refused: Option<String>,
}

/// How far a model is at the worker where it is furthest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadProgress {
    pub state: ModelState,
    /// Thousandths of the present stage that are done.
    pub permille: u16,
    /// Estimated time until it is ready, if known.
    pub eta: Option<Duration>,
    /// Why it is not ready, or why the last attempt failed; empty if nothing failed.
    pub reason: String,
    /// The workers that have it in this state.
    pub workers: Vec<NodeId>,
}

impl LoadProgress {
    /// A model that no worker has.
    pub fn absent() -> Self {
        Self { state: ModelState::Absent, permille: 0, eta: None, reason: String::new(), workers: Vec::new() }
    }

    /// Time after which a client may ask again.
    pub fn retry_after(&self) -> Duration {
        self.eta.unwrap_or(Duration::from_secs(5)).clamp(Duration::from_secs(1), Duration::from_secs(600))
    }
}

impl std::fmt::Display for LoadProgress {
    /// `loading, 43 %, ready in about 12 s`. The reason may name files and is for operators only.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.state.name())?;
        if self.permille > 0 {
            write!(f, ", {} %", self.permille / 10)?;
        }
        if let Some(eta) = self.eta {
            write!(f, ", ready in about {} s", eta.as_secs_f64().ceil())?;
        }
        Ok(())
    }
}

impl FromIterator<(ModelId, DeployedModel)> for Deployed {
    fn from_iter<I: IntoIterator<Item = (ModelId, DeployedModel)>>(models: I) -> Self {
        Self(models.into_iter().collect())
    }
}

impl DeployedModel {
    /// The known versions, the one that serves first.
    pub fn versions(&self) -> impl Iterator<Item = &Arc<OfferedModel>> {
        self.active.iter().chain(self.canary.iter().map(|(_, canary)| canary))
    }
}

impl Deployed {
    pub fn models(&self) -> &BTreeMap<ModelId, DeployedModel> {
        &self.0
    }

    /// The deployed model of this name, or that of a version's name.
    pub fn model(&self, id: &str) -> Option<&DeployedModel> {
        let name = id.split_once('@').map_or(id, |(name, _)| name);
        self.0.iter().find_map(|(known, model)| (known.as_str() == name).then_some(model))
    }

    pub(super) fn names(&self) -> Vec<&str> {
        self.0.keys().map(ModelId::as_str).collect()
    }

    pub(super) fn get(&self, id: &str) -> Option<Arc<OfferedModel>> {
        let model = self.model(id)?;
        if id.contains('@') {
            return model.versions().find(|version| version.id.as_str() == id).cloned();
        }
        model.active.clone()
    }

    pub(super) fn choose(&self, id: &str, share: impl FnOnce() -> u64) -> Option<Arc<OfferedModel>> {
        match self.model(id).filter(|_| !id.contains('@')) {
            Some(DeployedModel { canary: Some((permille, canary)), .. })
                if share() % 1000 < u64::from(*permille) =>
            {
                Some(Arc::clone(canary))
            }
            _ => self.get(id),
        }
    }

    pub(super) fn versions(&self) -> Vec<Arc<OfferedModel>> {
        self.0.values().flat_map(DeployedModel::versions).cloned().collect()
    }
}
