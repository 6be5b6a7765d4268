//! Deployments: the models that operators want served, with their versions, and the versions that requests ask for
//! while no worker has them.
//!
//! A version's place is a [`ModelPlan`](super::ModelPlan) under the version's name, such as `chat@1a2b3c4d5e6f`.

use super::{Change, Kind, MAX_MODELS, MAX_PLACEMENT_WORKERS, MAX_REASON, Refusal, put};
use proto::deployment::{MAX_LABEL, MAX_LABELS, MAX_SOURCE, ModelFacts, ModelSource};
use proto::ids::ModelId;
use proto::placement::MAX_STAGES;
use proto::served_model::BUILT_IN;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Maximum of replicas of a deployment.
pub const MAX_DEPLOYED_REPLICAS: u16 = MAX_PLACEMENT_WORKERS as u16;
/// Longest idle time, seconds.
const MAX_IDLE_S: u32 = 366 * 24 * 60 * 60;
/// Longest name of an engine, in bytes.
const MAX_ENGINE: usize = 32;
/// Highest priority.
const MAX_PRIORITY: u32 = 1000;

/// Deployments and what requests ask for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deployments {
    models: BTreeMap<ModelId, Deployment>,
    /// By the version's name.
    demand: BTreeMap<ModelId, Demand>,
}

/// A model that operators want served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deployment {
    pub settings: DeploymentSettings,
    /// Oldest first: the version before the active one, the active one, and that of the rollout or of one that was rolled
    /// back.
    pub versions: Vec<Version>,
    /// Number of the version that serves.
    pub active: u64,
    pub rollout: Option<Rollout>,
    /// How the last rollout ended; empty if none has.
    pub last_rollout: String,
    /// Index of the entry that last changed what operators want.
    pub revision: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeploymentSettings {
    /// Replicas that stay ready.
    pub min: u16,
    /// Most replicas; 1 to [`MAX_DEPLOYED_REPLICAS`].
    pub max: u16,
    /// A replica above `min` that is idle for so many seconds goes to sleep; 0: never.
    pub idle_s: u32,
    /// Weights stay in host memory while the model sleeps, as long as the room is not needed.
    pub pin: bool,
    /// Labels, `key=value`, that a worker must have.
    pub nodes: Vec<String>,
    /// Longest sequence, in tokens; 0: the model's own limit.
    pub context: u32,
    /// Weight of the model in a device's turns, 1 to 1000; models of lower priority also lose their room first.
    pub priority: u32,
    /// Workers of a replica, 1 to [`MAX_STAGES`]; each computes a range of the layers.
    pub shards: u16,
    /// Engine that computes the model, as workers report it. The table knows no list of engines, since the members of a
    /// group may know different ones.
    pub engine: String,
}

impl Default for DeploymentSettings {
    fn default() -> Self {
        Self {
            min: 0,
            max: 1,
            idle_s: 600,
            pin: false,
            nodes: Vec::new(),
            context: 0,
            priority: 1,
            shards: 1,
            engine: BUILT_IN.to_owned(),
        }
    }
}

/// A version of a model's files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// Index of the entry that added it.
    pub number: u64,
    pub source: ModelSource,
    /// `None` until a worker has read the files.
    pub facts: Option<ModelFacts>,
    /// Why it cannot be served; empty if it can.
    pub failed: String,
    /// It was rolled back and stays until no worker has it.
    pub rolled_back: bool,
}

/// A change from the active version to another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rollout {
    pub version: u64,
    /// `None`: the version becomes active as soon as it is ready.
    pub canary: Option<CanaryShare>,
}

/// The share of a new version, and the bounds beyond which it is rolled back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CanaryShare {
    /// Requests per thousand, 1 to 1000.
    pub permille: u16,
    /// Requests of the canary before it is judged.
    pub min_requests: u32,
    /// How many more requests per thousand may fail than at the active version.
    pub max_errors_permille: u16,
    /// Median time to first token, in per cent of the active version's.
    pub max_ttft_percent: u32,
}

/// A request's demand for a version that no worker has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Demand {
    /// Since the entry at this index.
    Wanted(u64),
    /// It cannot be loaded now, for this reason.
    Refused(String),
}

/// Creates a deployment or changes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeploymentSet {
    pub model: ModelId,
    pub settings: DeploymentSettings,
    /// Origin of the files; `None` leaves the versions as they are. A new deployment needs it.
    pub source: Option<ModelSource>,
    /// Whether files of an unchanged source are read again, as a new version if they differ.
    pub reread: bool,
    /// The share of a version that this change starts, or of the one that is rolled out.
    pub canary: Option<CanaryShare>,
    /// Revision that the change is based on; 0: the deployment must be new. `None`: any.
    pub from: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeploymentDropped {
    pub model: ModelId,
    /// Revision that the change is based on. `None`: any.
    pub from: Option<u64>,
}

/// A worker has read the files of a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionIdentified {
    pub model: ModelId,
    pub version: u64,
    pub facts: ModelFacts,
}

/// A version cannot be served: its files are missing or unusable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionFailed {
    pub model: ModelId,
    pub version: u64,
    /// At most [`MAX_REASON`] bytes.
    pub reason: String,
}

/// A rollout of a known version starts, such as the one before the active one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolloutStarted {
    pub model: ModelId,
    pub version: u64,
    pub canary: Option<CanaryShare>,
}

/// A rollout ends: its version becomes active, or is dropped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolloutEnded {
    pub model: ModelId,
    pub version: u64,
    pub promoted: bool,
    /// At most [`MAX_REASON`] bytes.
    pub reason: String,
}

/// A version that requests ask for cannot be loaded now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelRefused {
    /// The version's name.
    pub model: ModelId,
    /// At most [`MAX_REASON`] bytes.
    pub reason: String,
}

impl Deployment {
    pub fn version(&self, number: u64) -> Option<&Version> {
        self.versions.iter().find(|version| version.number == number)
    }

    /// The version that becomes active at the end of a rollout, else the active one.
    pub fn target(&self) -> Option<&Version> {
        self.version(self.rollout.as_ref().map_or(self.active, |rollout| rollout.version))
    }

    /// Removes versions that are neither active, nor rolled out, nor the last active one. One that was rolled back stays
    /// until another rollout.
    fn forget(&mut self) {
        let rolled_out = self.rollout.as_ref().map(|rollout| rollout.version);
        let (active, kept) = (self.active, |number| Some(number) == rolled_out);
        let others = self.versions.iter().filter(|version| version.number != active && !kept(version.number));
        // The last one before the active one that could be served.
        let before = others
            .filter(|version| version.facts.is_some() && version.failed.is_empty() && !version.rolled_back);
        let before = before.map(|version| version.number).next_back();
        self.versions.retain(|version| {
            let back = version.rolled_back && rolled_out.is_none();
            version.number == active || kept(version.number) || Some(version.number) == before || back
        });
    }

    fn end_rollout(&mut self, reason: String) {
        self.rollout = None;
        self.last_rollout = reason;
        self.forget();
    }
}

impl DeploymentSettings {
    /// The rule that the settings break: field, value and rule.
    pub fn check(&self) -> Result<(), (&'static str, String, String)> {
        let wrong = |field, value: String, rule: String| Err((field, value, rule));
        if self.max == 0 || self.max > MAX_DEPLOYED_REPLICAS || self.min > self.max {
            let rule = format!("must be MIN:MAX with MIN <= MAX and MAX 1 to {MAX_DEPLOYED_REPLICAS}");
            return wrong("replicas", format!("{}:{}", self.min, self.max), rule);
        }
        if self.idle_s > MAX_IDLE_S {
            return wrong("idle", format!("{}s", self.idle_s), format!("must be at most {MAX_IDLE_S} s"));
        }
        if self.priority == 0 || self.priority > MAX_PRIORITY {
            return wrong("priority", self.priority.to_string(), format!("must be 1 to {MAX_PRIORITY}"));
        }
        if self.shards == 0 || usize::from(self.shards) > MAX_STAGES {
            return wrong("shards", self.shards.to_string(), format!("must be 1 to {MAX_STAGES}"));
        }
        if u32::from(self.shards) * u32::from(self.max) > u32::from(MAX_DEPLOYED_REPLICAS) {
            let rule =
                format!("times the most replicas ({}) must be at most {MAX_DEPLOYED_REPLICAS}", self.max);
            return wrong("shards", self.shards.to_string(), rule);
        }
        let sound = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        if !(1..=MAX_ENGINE).contains(&self.engine.len()) || !self.engine.bytes().all(sound) {
            let rule = format!("must be 1 to {MAX_ENGINE} characters a-z, 0-9 and -");
            return wrong("engine", self.engine.clone(), rule);
        }
        if self.shards > 1 && self.engine != BUILT_IN {
            return wrong(
                "shards",
                self.shards.to_string(),
                format!("must be 1 with engine {}", self.engine),
            );
        }
        let label = |label: &String| {
            let key = label.split_once('=').is_some_and(|(key, _)| !key.is_empty());
            key && label.len() <= MAX_LABEL && label.chars().all(|c| !c.is_control())
        };
        if self.nodes.len() > MAX_LABELS || !self.nodes.iter().all(label) {
            let rule = format!("must be at most {MAX_LABELS} labels key=value of at most {MAX_LABEL} bytes");
            return wrong("nodes", self.nodes.join(","), rule);
        }
        Ok(())
    }
}

impl CanaryShare {
    fn is_valid(&self) -> bool {
        (1..=1000).contains(&self.permille)
            && self.max_errors_permille <= 1000
            && (100..=10_000).contains(&self.max_ttft_percent)
            && self.min_requests > 0
    }
}

impl Deployments {
    pub fn models(&self) -> &BTreeMap<ModelId, Deployment> {
        &self.models
    }

    pub fn get(&self, model: &str) -> Option<&Deployment> {
        self.models.iter().find_map(|(id, deployment)| (id.as_str() == model).then_some(deployment))
    }

    /// The demand of requests, by the version's name.
    pub fn demand(&self) -> &BTreeMap<ModelId, Demand> {
        &self.demand
    }

    /// The deployment and the version of a version's name, if its files are known.
    pub fn find(&self, version: &ModelId) -> Option<(&Deployment, &Version)> {
        let (name, deployment) = self.models.iter().find(|(name, _)| name.as_str() == version.name())?;
        let of_name = |candidate: &&Version| candidate.name(name).as_ref() == Some(version);
        deployment.versions.iter().find(of_name).map(|found| (deployment, found))
    }

    /// Removes a version that was rolled back, since no worker has it any more.
    pub(super) fn unplaced(&mut self, version: &ModelId) {
        let of_name = |model: &ModelId, known: &Version| known.name(model).as_ref() == Some(version);
        for (model, deployment) in &mut self.models {
            deployment.versions.retain(|known| !(known.rolled_back && of_name(model, known)));
        }
        if self.find(version).is_none() {
            self.demand.remove(version);
        }
    }

    /// Removes the demand for a version, which has got a place.
    pub(super) fn placed(&mut self, version: &ModelId) {
        self.demand.remove(version);
    }

    /// `index`: that of the entry.
    pub(super) fn make(&mut self, change: Change, index: u64) -> Result<(), Refusal> {
        match change {
            Change::DeploymentSet(set) => self.set(*set, index)?,
            Change::DeploymentDropped(DeploymentDropped { model, from }) => {
                let deployment = self.models.get(&model).ok_or(Refusal::Unknown(Kind::Deployment))?;
                if from.is_some_and(|from| from != deployment.revision) {
                    return Err(Refusal::DeploymentMoved(deployment.revision));
                }
                self.models.remove(&model);
            }
            Change::VersionIdentified(identified) => self.identified(identified)?,
            Change::VersionFailed(VersionFailed { model, version, reason }) => {
                bounded(&reason)?;
                let deployment = self.deployment(&model)?;
                let failed = deployment.versions.iter_mut().find(|known| known.number == version);
                failed.ok_or(Refusal::Unknown(Kind::Version))?.failed.clone_from(&reason);
                if deployment.rollout.as_ref().is_some_and(|rollout| rollout.version == version) {
                    deployment.versions.retain(|known| known.number != version);
                    deployment.end_rollout(reason);
                }
            }
            Change::RolloutEnded(RolloutEnded { model, version, promoted, reason }) => {
                bounded(&reason)?;
                let deployment = self.deployment(&model)?;
                if deployment.rollout.as_ref().is_none_or(|rollout| rollout.version != version) {
                    return Err(Refusal::Unknown(Kind::Version));
                }
                let usable =
                    deployment.version(version).is_some_and(|v| v.facts.is_some() && v.failed.is_empty());
                if promoted && !usable {
                    return Err(Refusal::OutOfRange);
                }
                if promoted {
                    deployment.active = version;
                } else {
                    // Without files no worker can have it.
                    deployment.versions.retain(|known| known.number != version || known.facts.is_some());
                    let known = deployment.versions.iter_mut().find(|known| known.number == version);
                    known.into_iter().for_each(|known| known.rolled_back = true);
                }
                deployment.end_rollout(reason);
            }
            Change::RolloutStarted(RolloutStarted { model, version, canary }) => {
                if canary.is_some_and(|canary| !canary.is_valid()) {
                    return Err(Refusal::OutOfRange);
                }
                let deployment = self.deployment(&model)?;
                let known = deployment.version(version).filter(|known| known.number != deployment.active);
                let known = known.ok_or(Refusal::Unknown(Kind::Version))?;
                if known.facts.is_none() || !known.failed.is_empty() {
                    return Err(Refusal::OutOfRange);
                }
                let known = deployment.versions.iter_mut().find(|known| known.number == version);
                known.into_iter().for_each(|known| known.rolled_back = false);
                deployment.rollout = Some(Rollout { version, canary });
                deployment.revision = index;
                deployment.forget();
            }
            Change::ModelWanted(version) => {
                self.find(&version).ok_or(Refusal::Unknown(Kind::Version))?;
                if !matches!(self.demand.get(&version), Some(Demand::Wanted(_))) {
                    put(&mut self.demand, version, Demand::Wanted(index), MAX_MODELS, Kind::Model)?;
                }
            }
            Change::ModelRefused(ModelRefused { model, reason }) => {
                bounded(&reason)?;
                let demand = self.demand.get_mut(&model).ok_or(Refusal::Unknown(Kind::Model))?;
                *demand = Demand::Refused(reason);
            }
            _ => return Err(Refusal::WrongPath),
        }
        let gone: Vec<ModelId> = self.demand.keys().filter(|id| self.find(id).is_none()).cloned().collect();
        gone.iter().for_each(|id| drop(self.demand.remove(id)));
        Ok(())
    }

    fn deployment(&mut self, model: &ModelId) -> Result<&mut Deployment, Refusal> {
        self.models.get_mut(model).ok_or(Refusal::Unknown(Kind::Deployment))
    }

    fn set(&mut self, set: DeploymentSet, index: u64) -> Result<(), Refusal> {
        let DeploymentSet { model, settings, source, reread, canary, from } = set;
        if model.is_version() || model.as_str().len() > ModelId::MAX_VERSIONED {
            return Err(Refusal::TooLarge);
        }
        if source
            .as_ref()
            .is_some_and(|source| source.as_str().is_empty() || source.as_str().len() > MAX_SOURCE)
        {
            return Err(Refusal::TooLarge);
        }
        if settings.check().is_err() || canary.is_some_and(|canary| !canary.is_valid()) {
            return Err(Refusal::OutOfRange);
        }
        let version = |source| Version {
            number: index,
            source,
            facts: None,
            failed: String::new(),
            rolled_back: false,
        };
        let Some(deployment) = self.models.get_mut(&model) else {
            if from.is_some_and(|from| from != 0) {
                return Err(Refusal::DeploymentMoved(0));
            }
            let source = source.ok_or(Refusal::Unknown(Kind::Deployment))?;
            let new = Deployment {
                settings,
                versions: vec![version(source)],
                active: index,
                rollout: None,
                last_rollout: String::new(),
                revision: index,
            };
            return put(&mut self.models, model, new, MAX_MODELS, Kind::Deployment);
        };
        if from.is_some_and(|from| from != deployment.revision) {
            return Err(Refusal::DeploymentMoved(deployment.revision));
        }
        if canary.is_some() && source.is_none() && deployment.rollout.is_none() {
            return Err(Refusal::Unknown(Kind::Version));
        }
        if deployment.settings.engine != settings.engine {
            // Another engine may read the files.
            deployment.versions.iter_mut().for_each(|known| known.failed.clear());
        }
        deployment.settings = settings;
        deployment.revision = index;
        if let (Some(canary), Some(rollout)) = (canary, &mut deployment.rollout) {
            rollout.canary = Some(canary);
        }
        let Some(source) = source else { return Ok(()) };
        let target = deployment.target();
        let same = target.is_some_and(|target| target.source == source && target.failed.is_empty());
        let unread = target.is_some_and(|target| target.facts.is_none());
        if same && (unread || !reread) {
            return Ok(());
        }
        let active = deployment.version(deployment.active);
        if active.is_some_and(|active| active.facts.is_some() && active.failed.is_empty()) {
            deployment.versions.push(version(source));
            deployment.rollout = Some(Rollout { version: index, canary });
        } else {
            // Nothing is served that the new version could replace step by step.
            deployment.versions.push(version(source));
            deployment.active = index;
            deployment.rollout = None;
        }
        deployment.forget();
        Ok(())
    }

    fn identified(&mut self, identified: VersionIdentified) -> Result<(), Refusal> {
        let VersionIdentified { model, version, facts } = identified;
        let deployment = self.deployment(&model)?;
        let known = deployment.version(version).ok_or(Refusal::Unknown(Kind::Version))?;
        // Its files never change: others are another version.
        if known.facts.is_some_and(|known| known.digest != facts.digest) {
            return Err(Refusal::OutOfRange);
        }
        let digest = |known: &Version| known.facts.map(|facts| facts.digest) == Some(facts.digest);
        let twin = deployment.versions.iter().find(|known| known.number != version && digest(known));
        match twin.map(|twin| twin.number) {
            // The files are those of a known version.
            Some(twin) => {
                deployment.versions.retain(|known| known.number != version);
                let known = deployment.versions.iter_mut().find(|known| known.number == twin);
                known.into_iter().for_each(|known| {
                    known.failed.clear();
                    known.rolled_back = false;
                });
                match &mut deployment.rollout {
                    Some(rollout) if rollout.version == version && twin == deployment.active => {
                        deployment.end_rollout("the files are those of the active version".to_owned());
                    }
                    Some(rollout) if rollout.version == version => rollout.version = twin,
                    _ => deployment.active = twin,
                }
            }
            None => {
                let known = deployment.versions.iter_mut().find(|known| known.number == version);
                if let Some(known) = known {
                    known.facts = Some(facts);
                    known.failed.clear();
                }
            }
        }
        Ok(())
    }
}

impl Version {
    /// The version's name. `None` until its files are known.
    pub fn name(&self, model: &ModelId) -> Option<ModelId> {
        model.version(&self.facts?.digest).ok()
    }
}

fn bounded(reason: &str) -> Result<(), Refusal> {
    if reason.len() > MAX_REASON { Err(Refusal::TooLarge) } else { Ok(()) }
}
