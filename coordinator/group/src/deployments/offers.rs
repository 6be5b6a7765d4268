//! The deployed models that this coordinator offers to clients. It needs a version's tokenizer and chat template, which
//! are in the manifest that any worker with the files sends.

use super::decide::{Host, Layers, unfit};
use consensus::table::{Demand, Deployment, Table, Version};
use dispatch::models::{Deployed, DeployedModel, LoadProgress, Models, OfferedModel};
use dispatch::{Dispatch, HostWorker};
use model::shard::{MANIFEST_BYTES, Manifest};
use parking_lot::Mutex;
use proto::deployment::{ModelReport, ModelState};
use proto::ids::{ModelId, NodeId};
use proto::served_model::ServedModel;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Time for which requests for a deployed model may wait for a worker. Each round extends it.
const EXPECT_FOR: Duration = Duration::from_secs(10);
/// Time for which a refused model is refused at once. Then the next request asks for it again.
const REFUSED_FOR: Duration = Duration::from_secs(5);
/// Time limit of a manifest.
const FETCH_LIMIT: Duration = Duration::from_secs(60);
/// Pause after a manifest that could not be fetched.
const RETRY_AFTER: Duration = Duration::from_secs(2);
const BLOCK_TOKENS: u32 = 16;

#[derive(Debug)]
pub(super) struct Offers {
    dispatch: Arc<Dispatch>,
    models: Arc<Models>,
    state: Mutex<State>,
    /// Versions whose manifests are being fetched.
    fetches: tokio::sync::Mutex<JoinSet<(ModelId, Option<OfferedModel>)>>,
}

#[derive(Debug, Default)]
struct State {
    /// By the version's name.
    offered: HashMap<ModelId, Arc<OfferedModel>>,
    fetching: HashSet<ModelId>,
    /// Versions whose manifest could not be fetched, with the time of the next attempt.
    later: HashMap<ModelId, Instant>,
    /// Versions that are refused, since when.
    refused: HashMap<ModelId, Instant>,
}

impl Offers {
    pub(super) fn new(dispatch: Arc<Dispatch>, models: Arc<Models>) -> Self {
        let fetches = tokio::sync::Mutex::new(JoinSet::new());
        Self { dispatch, models, state: Mutex::default(), fetches }
    }

    /// Layers of a version that generates text; `None` while its manifest is not here.
    pub(super) fn layers(&self, version: &ModelId) -> Option<Layers> {
        let offered = self.state.lock().offered.get(version).cloned()?;
        Some(Layers { costs: offered.costs.clone()?, context: offered.context as u64 })
    }

    /// Fetches what is missing, offers the rest, and has requests for it wait.
    pub(super) async fn update(&self, table: &Table, workers: &[HostWorker], hosts: &[Host]) {
        let mut fetches = self.fetches.lock().await;
        while let Some(fetched) = fetches.try_join_next() {
            let Ok((name, offered)) = fetched else { continue };
            let mut state = self.state.lock();
            state.fetching.remove(&name);
            match offered {
                Some(offered) => drop(state.offered.insert(name, Arc::new(offered))),
                None => drop(state.later.insert(name, Instant::now() + RETRY_AFTER)),
            }
        }
        let now = Instant::now();
        let mut state = self.state.lock();
        let state = &mut *state;
        let known = |name: &ModelId| table.deployments().find(name).is_some();
        self.dispatch.retain_versions(known);
        state.offered.retain(|name, _| known(name));
        state.later.retain(|name, at| known(name) && *at > now);
        state.refused.retain(|name, _| known(name));
        let mut deployed = Vec::new();
        for (model, deployment) in table.deployments().models() {
            for version in &deployment.versions {
                let Some(name) = version.name(model) else { continue };
                if state.offered.contains_key(&name) || state.later.contains_key(&name) {
                    continue;
                }
                let has = |worker: &&HostWorker| holds(hosts, &worker.node, &name);
                let Some(holder) = workers.iter().find(has).filter(|_| !state.fetching.contains(&name))
                else {
                    continue;
                };
                state.fetching.insert(name.clone());
                fetches.spawn(fetch(holder.clone(), Arc::clone(&self.models), name, version.clone()));
            }
            let offered = |number| {
                let name = deployment.version(number)?.name(model)?;
                state.offered.get(&name).cloned()
            };
            let share =
                deployment.rollout.as_ref().and_then(|rollout| Some((rollout.version, rollout.canary?)));
            // Requests go to a canary only while a worker has it ready.
            let canary = share.and_then(|(number, canary)| Some((canary.permille, offered(number)?)));
            let canary = canary.filter(|(_, canary)| self.dispatch.serves(&canary.id));
            // Until the tokenizer of a new version is here, the one before serves.
            let rolled_out = deployment.rollout.as_ref().map(|rollout| rollout.version);
            let earlier = deployment
                .versions
                .iter()
                .rev()
                .filter(|version| Some(version.number) != rolled_out && !version.rolled_back);
            let active = offered(deployment.active)
                .or_else(|| earlier.map(|version| version.number).find_map(offered));
            let mut progress = progress(model, deployment, table, hosts);
            let mut refused = self.expect(model, deployment, table, &mut state.refused);
            if let Some(reason) = unfit(hosts, deployment).filter(|_| progress.reason.is_empty()) {
                // Files that no worker can read: the leader refuses other versions by itself.
                let unread =
                    deployment.version(deployment.active).is_some_and(|active| active.facts.is_none());
                refused = refused.or_else(|| (unread && !hosts.is_empty()).then(|| reason.clone()));
                progress.reason = reason;
            }
            deployed.push((model.clone(), DeployedModel { active, canary, progress, refused }));
        }
        self.models.set_deployed(deployed.into_iter().collect::<Deployed>());
    }

    /// Has requests for the versions of a deployment wait, and returns why the one that serves is refused.
    fn expect(
        &self,
        model: &ModelId,
        deployment: &Deployment,
        table: &Table,
        refused: &mut HashMap<ModelId, Instant>,
    ) -> Option<String> {
        let now = Instant::now();
        let mut of_active = None;
        for version in &deployment.versions {
            let (Some(name), Some(facts)) = (version.name(model), version.facts) else { continue };
            let blocked = table.blocked().get(&facts.digest).map(|_| "its files cannot be used".to_owned());
            let failed = (!version.failed.is_empty()).then(|| "its files cannot be used".to_owned());
            let demand = match table.deployments().demand().get(&name) {
                Some(Demand::Refused(reason)) => {
                    let since = *refused.entry(name.clone()).or_insert(now);
                    (now.saturating_duration_since(since) < REFUSED_FOR).then(|| reason.clone())
                }
                _ => {
                    refused.remove(&name);
                    None
                }
            };
            let why = blocked.or(failed).or(demand);
            match &why {
                Some(_) => self.dispatch.expect_no_more(&name),
                None => self.dispatch.expect_first(served(name, version, deployment), now + EXPECT_FOR),
            }
            if version.number == deployment.active {
                of_active = why;
            }
        }
        of_active
    }
}

fn holds(hosts: &[Host], node: &NodeId, version: &ModelId) -> bool {
    let host = hosts.iter().find(|host| host.name == *node);
    host.and_then(|host| host.report_of(version)).is_some_and(|report| report.has_files)
}

/// A version as workers will serve it, as far as that is known before one does.
fn served(id: ModelId, version: &Version, deployment: &Deployment) -> ServedModel {
    let facts = version.facts.as_ref();
    let own = facts.map_or(0, |facts| facts.context);
    let max_model_len =
        if deployment.settings.context == 0 { own } else { deployment.settings.context.min(own) };
    ServedModel {
        id,
        model_digest: facts.map_or([0; 32], |facts| facts.digest),
        tokenizer_digest: facts.map_or([0; 32], |facts| facts.tokenizer_digest),
        max_model_len,
        layers: (0, 0),
        numeric_class: String::new(),
        block_tokens: BLOCK_TOKENS,
        engine: deployment.settings.engine.clone(),
        hit_tokens: BLOCK_TOKENS,
        task: facts.map_or(proto::served_model::ModelTask::Generate, |facts| facts.task),
    }
}

/// How far the version that serves is, at the worker where it is furthest.
fn progress(model: &ModelId, deployment: &Deployment, table: &Table, hosts: &[Host]) -> LoadProgress {
    let Some(version) = deployment.version(deployment.active) else { return LoadProgress::absent() };
    let name = version.name(model);
    let failed = || LoadProgress {
        state: ModelState::BadFile,
        reason: version.failed.clone(),
        ..LoadProgress::absent()
    };
    if !version.failed.is_empty() {
        return failed();
    }
    if let Some(blocked) = version.facts.and_then(|facts| table.blocked().get(&facts.digest)) {
        return LoadProgress { reason: blocked.reason.clone(), ..failed() };
    }
    let rank = |report: &ModelReport| match report.state {
        ModelState::Ready => 0,
        ModelState::Waking => 1,
        ModelState::Loading => 2,
        ModelState::Fetching => 3,
        ModelState::Failed | ModelState::BadFile => 4,
        ModelState::Asleep => 5,
        ModelState::Absent => 6,
    };
    let report = |host: &'_ Host| match &name {
        Some(name) => host.report_of(name).cloned(),
        None => host.report_of_files(model, version).cloned(),
    };
    let reports: Vec<(&Host, ModelReport)> =
        hosts.iter().filter_map(|host| Some((host, report(host)?))).collect();
    let placed = name.as_ref().and_then(|name| table.models().get(name));
    let wanted = |host: &Host| {
        version.facts.is_none() || placed.is_some_and(|plan| plan.placement.contains(&host.name))
    };
    let best = reports.iter().filter(|(host, _)| wanted(host)).min_by_key(|(_, report)| rank(report));
    let sleeping = || reports.iter().find(|(_, report)| report.state == ModelState::Asleep);
    let Some((_, report)) = best.or_else(sleeping) else { return LoadProgress::absent() };
    let same = reports.iter().filter(|(_, other)| other.state == report.state);
    // With the later stages of a model on several workers, whose first one reports.
    let stages = |host: &&Host| {
        let led = table.replicas().values().find(|plan| {
            Some(&plan.model) == name.as_ref()
                && plan.stages.first().is_some_and(|first| first.node == host.name)
        });
        led.map_or_else(
            || vec![host.name.clone()],
            |plan| plan.stages.iter().map(|stage| stage.node.clone()).collect(),
        )
    };
    LoadProgress {
        state: report.state,
        permille: report.permille,
        eta: (report.eta_ms > 0).then(|| Duration::from_millis(report.eta_ms.into())),
        reason: report.reason.clone(),
        workers: same.flat_map(|(host, _)| stages(host)).collect(),
    }
}

/// Fetches and reads a version's manifest. `None` if that failed.
async fn fetch(
    holder: HostWorker,
    models: Arc<Models>,
    name: ModelId,
    version: Version,
) -> (ModelId, Option<OfferedModel>) {
    let Some(facts) = version.facts else { return (name, None) };
    let fetched = tokio::time::timeout(FETCH_LIMIT, holder.manifest(&facts.digest, MANIFEST_BYTES)).await;
    let read = async {
        let bytes = fetched.map_err(|_| "no answer in time".to_owned())?;
        let bytes = bytes.map_err(|error| error.to_string())?.ok_or("the worker does not have it")?;
        let (id, context) = (name.clone(), facts.context as usize);
        let read = move || {
            let manifest = Manifest::decode(&bytes, &facts.digest).map_err(|error| error.to_string())?;
            models.version(id, manifest.header(), context).map_err(|error| error.to_string())
        };
        tokio::task::spawn_blocking(read).await.map_err(|error| error.to_string())?
    };
    match read.await {
        Ok(offered) => (name, Some(offered)),
        Err(error) => {
            let error: String = error;
            tracing::warn!(version = %name, worker = %holder.node, error, "cannot read the tokenizer of a deployed model");
            (name, None)
        }
    }
}
