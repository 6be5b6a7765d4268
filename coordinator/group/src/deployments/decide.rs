//! The leader's next change of the deployed models, from the table and from what workers report. Pure: no clock, no
//! memory.
//!
//! A version is *placed* on the workers of its [`ModelPlan`]; it is *wanted* there whether it is ready yet or not.
//! Memory is counted by what each placed version needs at least, or holds if that is more. If a worker must give up a
//! model for another, the one with the least recent use goes, weighed by how often it is used; never one with running
//! requests, one of higher priority, or a replica that its deployment keeps (`min`).

mod stages;

use consensus::table::{
    Change, Demand, Deployment, DeploymentSettings, MAX_REASON, ModelBlocked, ModelPlan, ModelRefused,
    Rollout, RolloutEnded, Table, Version, VersionFailed, VersionIdentified,
};
use proto::deployment::{ModelReport, ModelSource, ModelState, ModelsReport, StageSpeed};
use proto::ids::{ModelId, NodeId};
pub use stages::Layers;
use stages::groups;
pub(super) use stages::shards;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Milliseconds without a request after which a version that is no longer active sleeps. Other coordinators choose the
/// new version a little later, and requests that were planned before still arrive.
const RETIRED_AFTER: u64 = 2000;
/// Attempts of one worker to find or load a version before another one is asked.
const ATTEMPTS: u32 = 3;

/// A worker that loads models by order.
#[derive(Debug, Clone)]
pub struct Host {
    pub name: NodeId,
    /// `key=value`.
    pub labels: BTreeSet<String>,
    /// Engine that computes its models.
    pub engine: String,
    pub draining: bool,
    /// Speed of the stages that it takes of models on several workers; `None` if it takes none.
    pub stages: Option<StageSpeed>,
    /// `None` until it has answered an order.
    pub report: Option<ModelsReport>,
}

impl Host {
    /// The worker's report about a version.
    pub fn report_of(&self, version: &ModelId) -> Option<&ModelReport> {
        report_of(self.report.as_ref()?, version)
    }

    /// The worker's report about the files of a version that no worker has read yet.
    pub fn report_of_files(&self, model: &ModelId, version: &Version) -> Option<&ModelReport> {
        files_report(self.report.as_ref()?, model, version)
    }
}

fn report_of<'a>(report: &'a ModelsReport, model: &ModelId) -> Option<&'a ModelReport> {
    report.models.iter().find(|report| report.model == *model)
}

/// A worker's report about the files of a version that no worker has read yet. Until they are read it is under the
/// model's name, as that about the files of an earlier version was.
pub fn files_report<'a>(
    report: &'a ModelsReport,
    model: &ModelId,
    version: &Version,
) -> Option<&'a ModelReport> {
    report_of(report, model).filter(|_| report.version >= version.number)
}

pub struct View<'a> {
    pub table: &'a Table,
    /// The connected workers, by name.
    pub hosts: &'a [Host],
    /// Whether a worker has been away for too long to wait for it.
    pub is_gone: &'a dyn Fn(&NodeId) -> bool,
    /// Requests that wait at all coordinators, by version.
    pub queued: &'a BTreeMap<ModelId, usize>,
    /// Waiting time of the requests for a version.
    pub waited: &'a dyn Fn(&ModelId) -> Duration,
    /// Why a version failed at a worker a short while ago.
    pub failure: &'a dyn Fn(&ModelId, &NodeId) -> Option<String>,
    /// Recent requests for a version, older ones counting less.
    pub uses: &'a dyn Fn(&ModelId) -> f64,
    /// Layers of a version; `None` while its manifest is not here.
    pub layers: &'a dyn Fn(&ModelId) -> Option<Layers>,
}

/// A version with its deployment.
#[derive(Clone, Copy)]
struct Wanted<'a> {
    name: &'a ModelId,
    deployment: &'a Deployment,
    version: &'a Version,
}

/// The next step toward a further place.
enum Choice<'a> {
    /// The workers of the replica.
    Place(Vec<NodeId>),
    /// A worker, and the version that must leave it first.
    Evict(&'a Host, &'a ModelId),
}

/// Why a version has no further place.
enum NoPlace {
    /// Another model must finish its requests first, or a worker must return.
    Later,
    Never(String),
}

/// The next change, if one is due.
pub fn decide(view: &View<'_>) -> Option<Change> {
    let found = view.identify().or_else(|| view.block()).or_else(|| view.remove_lost());
    let found = found.or_else(|| view.drop_partial_group()).or_else(|| view.cut_groups());
    found.or_else(|| view.end_rollout()).or_else(|| view.remove_idle()).or_else(|| view.place())
}

/// The worker that reads or fetches the files of a version first, or all workers that look for a file of theirs.
/// Workers that cannot are left out.
pub fn identifiers<'a>(
    hosts: &'a [Host],
    deployment: &Deployment,
    version: &Version,
    model: &ModelId,
) -> Vec<&'a Host> {
    let able =
        hosts.iter().filter(|host| fits(host, deployment) && !gave_up(host.report_of_files(model, version)));
    match version.source {
        ModelSource::File(_) => able.collect(),
        // One worker downloads, the others get the model from it.
        ModelSource::Fetch(_) => able.take(1).collect(),
    }
}

/// Whether the worker may serve the deployment.
fn fits(host: &Host, deployment: &Deployment) -> bool {
    !host.draining
        && host.report.is_some()
        && host.engine == deployment.settings.engine
        && deployment.settings.nodes.iter().all(|label| host.labels.contains(label))
}

/// Why no worker may serve the deployment. `None` if one may, or if a worker has not reported yet.
pub(super) fn unfit(hosts: &[Host], deployment: &Deployment) -> Option<String> {
    if hosts.iter().any(|host| host.report.is_none() || fits(host, deployment)) {
        return None;
    }
    let DeploymentSettings { engine, nodes, .. } = &deployment.settings;
    let mut offering = hosts.iter().filter(|host| host.engine == *engine).peekable();
    Some(if hosts.is_empty() {
        "no worker that loads models is connected".to_owned()
    } else if offering.peek().is_none() {
        format!("no worker offers the engine {engine}")
    } else if !offering.any(|host| nodes.iter().all(|label| host.labels.contains(label))) {
        format!("no worker with the engine {engine} has the labels {}", nodes.join(", "))
    } else {
        "every worker that may serve it is drained".to_owned()
    })
}

/// Whether a worker has tried often enough to read or load the model that it reports about.
fn gave_up(report: Option<&ModelReport>) -> bool {
    report.is_some_and(|report| {
        report.state == ModelState::BadFile
            || report.state == ModelState::Failed && report.failures >= ATTEMPTS
    })
}

fn cut(mut reason: String) -> String {
    reason.truncate(reason.floor_char_boundary(MAX_REASON));
    reason
}

impl<'a> View<'a> {
    fn deployments(&self) -> impl Iterator<Item = (&'a ModelId, &'a Deployment)> {
        self.table.deployments().models().iter()
    }

    /// The versions whose files are known, each with its own name.
    fn versions(&self) -> Vec<(ModelId, &'a ModelId, &'a Deployment, &'a Version)> {
        let named = self.deployments().flat_map(|(model, deployment)| {
            let named = move |version: &'a Version| Some((version.name(model)?, model, deployment, version));
            deployment.versions.iter().filter_map(named)
        });
        named.collect()
    }

    fn places(&self, version: &ModelId) -> &'a [NodeId] {
        self.table.models().get(version).map_or(&[], |plan| &plan.placement)
    }

    fn host(&self, name: &NodeId) -> Option<&'a Host> {
        self.hosts.iter().find(|host| host.name == *name)
    }

    /// Records a version's files as soon as a worker has read them, or that no worker can.
    fn identify(&self) -> Option<Change> {
        self.deployments().find_map(|(model, deployment)| {
            let unread = |version: &&Version| version.facts.is_none() && version.failed.is_empty();
            let version = deployment.versions.iter().find(unread)?;
            let facts = self.hosts.iter().find_map(|host| host.report_of_files(model, version)?.facts);
            let (model, number) = (model.clone(), version.number);
            if let Some(facts) = facts {
                return Some(Change::VersionIdentified(VersionIdentified { model, version: number, facts }));
            }
            let mut fitting = self.hosts.iter().filter(|host| fits(host, deployment)).peekable();
            fitting.peek()?;
            if !identifiers(self.hosts, deployment, version, &model).is_empty() {
                return None;
            }
            let reasons: Vec<String> = fitting
                .filter_map(|host| {
                    Some(format!("{}: {}", host.name, host.report_of_files(&model, version)?.reason))
                })
                .collect();
            let reason = cut(reasons.join("; "));
            Some(Change::VersionFailed(VersionFailed { model, version: number, reason }))
        })
    }

    /// Adds files to the block list that a worker cannot load although their digest is right.
    fn block(&self) -> Option<Change> {
        self.table.models().values().find_map(|plan| {
            let bad = |node: &&NodeId| {
                let report = self.host(node).and_then(|host| host.report_of(&plan.model));
                report.is_some_and(|report| report.state == ModelState::BadFile)
            };
            let node = plan.placement.iter().find(bad)?;
            let reason = cut(self.host(node)?.report_of(&plan.model)?.reason.clone());
            let (model_digest, node) = (plan.model_digest, node.clone());
            Some(Change::ModelBlocked(ModelBlocked { model_digest, node, reason }))
        })
    }

    /// Takes a version from a worker that is gone, drains, may not serve it any more, or failed to load it.
    fn remove_lost(&self) -> Option<Change> {
        self.table.models().iter().find_map(|(version, plan)| {
            let (deployment, _) = self.table.deployments().find(version)?;
            let lost = |node: &&NodeId| match self.host(node) {
                None => (self.is_gone)(node),
                Some(host) => {
                    host.report.is_some() && !fits(host, deployment)
                        || gave_up(host.report_of(version))
                        || (self.failure)(version, node).is_some()
                }
            };
            let node = plan.placement.iter().find(lost)?;
            Some(without(plan, deployment, node))
        })
    }

    /// Ends a rollout whose files cannot be loaded, and one without a canary once the new version is ready where the old
    /// one is, or as far as there is room.
    fn end_rollout(&self) -> Option<Change> {
        self.deployments().find_map(|(model, deployment)| {
            let digest =
                deployment.rollout.as_ref().and_then(|rollout| deployment.version(rollout.version)?.facts);
            let blocked = digest.and_then(|facts| self.table.blocked().get(&facts.digest));
            if let (Some(blocked), Some(Rollout { version, .. })) = (blocked, &deployment.rollout) {
                let reason = cut(format!("its files cannot be loaded: {}", blocked.reason));
                let (model, version) = (model.clone(), *version);
                return Some(Change::RolloutEnded(RolloutEnded { model, version, promoted: false, reason }));
            }
            let Rollout { version: number, canary: None } = deployment.rollout.as_ref()? else { return None };
            let version = deployment.version(*number)?;
            let name = version.name(model)?;
            let active = deployment.version(deployment.active)?.name(model);
            let serving = active.as_ref().map_or(0, |active| self.replicas(active, deployment));
            let replicas = self.replicas(&name, deployment);
            let ready = self.ready_replicas(&name, deployment);
            let wanted = Wanted { name: &name, deployment, version };
            let enough = ready
                >= serving
                    .max(usize::from(deployment.settings.min))
                    .min(usize::from(deployment.settings.max));
            let blocked = ready == replicas && self.choose(wanted).is_err();
            let reason = match (serving, enough, blocked && ready > 0, blocked) {
                (0, ..) | (_, true, ..) => "the new version is ready",
                (_, _, true, _) => {
                    "the new version is ready on some workers, and no other has room beside the old one"
                }
                (_, _, _, true) => {
                    "no worker has room for both versions: requests wait until the new one is ready"
                }
                _ => return None,
            };
            let (model, version, reason) = (model.clone(), *number, reason.to_owned());
            Some(Change::RolloutEnded(RolloutEnded { model, version, promoted: true, reason }))
        })
    }

    /// Whether the version is neither active nor rolled out.
    fn is_retired(&self, version: &ModelId) -> bool {
        self.table.deployments().find(version).is_none_or(|(deployment, found)| {
            let rolled_out = deployment.rollout.as_ref().map(|rollout| rollout.version);
            found.number != deployment.active && Some(found.number) != rolled_out
        })
    }

    /// Replicas that have places.
    fn replicas(&self, version: &ModelId, deployment: &Deployment) -> usize {
        groups(self.places(version), deployment).count()
    }

    fn ready_replicas(&self, version: &ModelId, deployment: &Deployment) -> usize {
        let ready = |group: &&[NodeId]| {
            let lead = group.first().and_then(|node| self.lead(version, deployment, node));
            lead.is_some_and(|node| self.is_ready(node, version))
        };
        groups(self.places(version), deployment).filter(ready).count()
    }

    fn is_ready(&self, node: &NodeId, version: &ModelId) -> bool {
        let report = self.host(node).and_then(|host| host.report_of(version));
        report.is_some_and(|report| report.state == ModelState::Ready)
    }

    /// Puts an idle replica to sleep. Of a version that is neither active nor rolled out, all replicas.
    fn remove_idle(&self) -> Option<Change> {
        self.table.models().iter().find_map(|(version, plan)| {
            let (deployment, _) = self.table.deployments().find(version)?;
            let settings = &deployment.settings;
            let retired = self.is_retired(version);
            let above = retired || self.replicas(version, deployment) > usize::from(settings.min);
            let never = settings.idle_s == 0 && !retired;
            if !above || never || self.queued.get(version).is_some_and(|queued| *queued > 0) {
                return None;
            }
            let after = if retired { RETIRED_AFTER } else { u64::from(settings.idle_s) * 1000 };
            let idle = |node: &NodeId| self.idle(node, (version, deployment)).filter(|idle| *idle >= after);
            let node =
                plan.placement.iter().filter(|node| idle(node).is_some()).max_by_key(|node| idle(node))?;
            Some(without(plan, deployment, node))
        })
    }

    /// Milliseconds since the last request of the version's replica at the worker. `None` while it runs one or is not
    /// ready.
    fn idle(&self, node: &NodeId, (version, deployment): (&ModelId, &Deployment)) -> Option<u64> {
        let report = self.host(self.lead(version, deployment, node)?)?.report_of(version)?;
        (report.state == ModelState::Ready && report.idle_ms > 0).then_some(report.idle_ms)
    }

    /// Places the version that is missing most urgently, makes room for it, or refuses it. Of equal priority, the one
    /// whose requests have waited longest together is the most urgent: many requests come first, and one that waits
    /// alone gains on them, so none waits for ever.
    fn place(&self) -> Option<Change> {
        let versions = self.versions();
        let mut missing = Vec::new();
        for (name, model, deployment, version) in &versions {
            if !version.failed.is_empty() || self.table.blocked().contains_key(&version.facts?.digest) {
                continue;
            }
            let wanted = Wanted { name, deployment, version };
            let (replicas, demand) =
                (self.replicas(name, deployment), self.table.deployments().demand().get(name));
            if replicas < self.desired(wanted, model) {
                let since = if let Some(Demand::Wanted(since)) = demand { *since } else { u64::MAX };
                let requests = self.queued.get(name).copied().unwrap_or(0) as u128;
                let waited = Reverse(requests * (self.waited)(name).as_millis());
                // The first replica of a model comes before a further one of another.
                let order = (replicas > 0, Reverse(deployment.settings.priority), waited, since);
                missing.push((order, wanted));
            }
        }
        missing.sort_by_key(|(order, _)| *order);
        missing.into_iter().find_map(|((further, ..), wanted)| match self.choose(wanted) {
            Ok(Choice::Place(nodes)) => Some(self.with(wanted, nodes)),
            // A further replica takes no room from another model.
            Ok(Choice::Evict(..))
                if further
                    && self.replicas(wanted.name, wanted.deployment)
                        >= usize::from(wanted.deployment.settings.min) =>
            {
                None
            }
            Ok(Choice::Evict(host, victim)) => {
                let (deployment, _) = self.table.deployments().find(victim)?;
                Some(without(self.table.models().get(victim)?, deployment, &host.name))
            }
            Err(NoPlace::Never(reason))
                if matches!(self.table.deployments().demand().get(wanted.name), Some(Demand::Wanted(_))) =>
            {
                let (model, reason) = (wanted.name.clone(), cut(reason));
                Some(Change::ModelRefused(ModelRefused { model, reason }))
            }
            Err(_) => None,
        })
    }

    /// The number of places that a version should have.
    fn desired(&self, wanted: Wanted<'_>, model: &ModelId) -> usize {
        let Wanted { name, deployment, version } = wanted;
        let (min, max) = (usize::from(deployment.settings.min), usize::from(deployment.settings.max));
        let replicas = self.replicas(name, deployment);
        let demanded = matches!(self.table.deployments().demand().get(name), Some(Demand::Wanted(_)));
        if version.number != deployment.active {
            let Some(rollout) =
                deployment.rollout.as_ref().filter(|rollout| rollout.version == version.number)
            else {
                // Requests that were planned while it was active.
                return replicas.max(usize::from(demanded));
            };
            let active = deployment.version(deployment.active).and_then(|active| active.name(model));
            let serving = active.map_or(0, |active| self.replicas(&active, deployment));
            return match rollout.canary {
                Some(_) => 1.max(replicas),
                None => serving.max(min).min(max),
            };
        }
        let queued = self.queued.get(name).copied().unwrap_or(0);
        let first = usize::from(demanded || queued > 0 && replicas > 0);
        let idles = |node: &NodeId| self.idle(node, (name, deployment)).is_some();
        let all_busy = replicas > 0
            && queued > 0
            && self.ready_replicas(name, deployment) == replicas
            && !self.places(name).iter().any(idles);
        let further = if all_busy { replicas + 1 } else { 0 };
        first.max(min).max(further).min(max)
    }

    /// The workers for a further replica, or the version that must leave one first.
    fn choose(&self, wanted: Wanted<'_>) -> Result<Choice<'a>, NoPlace> {
        let Wanted { name, deployment, .. } = wanted;
        let count = shards(deployment);
        // A worker that has not reported yet may have what the others lack.
        let never = |reason: String| match self.hosts.iter().any(|host| host.report.is_none()) {
            true => NoPlace::Later,
            false => NoPlace::Never(reason),
        };
        let fitting: Vec<&Host> = self.hosts.iter().filter(|host| fits(host, deployment)).collect();
        if fitting.is_empty() {
            return Err(unfit(self.hosts, deployment).map_or(NoPlace::Later, NoPlace::Never));
        }
        let needed = self.part_bytes(wanted).ok_or(NoPlace::Later)?.map_err(NoPlace::Never)?;
        // A worker's own model takes the only stage that it can have.
        let takes = |host: &&Host| {
            count == 1 || host.stages.is_some() && host.report.as_ref().is_some_and(|report| report.own == 0)
        };
        let able: Vec<&Host> = fitting.into_iter().filter(takes).collect();
        if able.len() < count {
            let reason = format!(
                "it needs {count} workers without a model of their own, and there are {}",
                able.len()
            );
            return Err(never(reason));
        }
        let budget =
            |host: &Host| host.report.as_ref().map_or(0, |report| report.budget.saturating_sub(report.own));
        let mut budgets: Vec<u64> = able.iter().map(|host| budget(host)).collect();
        budgets.sort_unstable_by_key(|bytes| std::cmp::Reverse(*bytes));
        if let Some(largest) = budgets.get(count - 1).filter(|bytes| needed > **bytes) {
            let reason = match count {
                1 => format!("it needs {needed} bytes of memory, and the worker with most has {largest}"),
                _ => format!(
                    "it needs {needed} bytes of memory at each of {count} workers, and only {} have that",
                    budgets.iter().filter(|bytes| needed <= **bytes).count()
                ),
            };
            return Err(never(reason));
        }
        let places = self.places(name);
        let failure = |host: &&Host| Some(format!("{}: {}", host.name, (self.failure)(name, &host.name)?));
        let failures: Vec<String> = able.iter().filter_map(failure).collect();
        let free = |host: &&Host| !places.contains(&host.name) && failure(host).is_none();
        let candidates: Vec<&Host> = able.into_iter().filter(free).collect();
        if candidates.len() < count && places.is_empty() {
            let reasons = failures.join("; ");
            return Err(never(format!("it failed to load at every worker that may serve it: {reasons}")));
        }
        // A worker where it sleeps wakes it, one with the files reads them, any other fetches them.
        let nearness = |host: &Host| match host.report_of(name) {
            Some(report) if report.state == ModelState::Asleep => 0,
            Some(report) if report.has_files => 1,
            _ => 2,
        };
        // All stages are loaded at once, so their files are fetched before.
        let here = |host: &&Host| count == 1 || nearness(host) < 2;
        let candidates: Vec<&Host> = candidates.into_iter().filter(here).collect();
        let room = |host: &Host| budget(host).saturating_sub(self.placed_bytes(host));
        let staged = |host: &Host| if count > 1 { self.staged_at(&host.name) } else { None };
        let mut with_room: Vec<&Host> = candidates.clone();
        with_room.retain(|host| room(host) >= needed && staged(host).is_none());
        with_room.sort_by_key(|host| (nearness(host), u64::MAX - room(host)));
        if let Some(chosen) = with_room.get(..count) {
            return Ok(Choice::Place(chosen.iter().map(|host| host.name.clone()).collect()));
        }
        let lacking = candidates
            .iter()
            .filter(|host| budget(host) >= needed && !with_room.iter().any(|roomy| roomy.name == host.name));
        let mut victims: Vec<(&Host, &ModelId, f64)> = lacking
            .filter_map(|host| {
                let bytes = needed.saturating_sub(room(host));
                let (victim, value) = self.victim(host, wanted, (bytes, staged(host)))?;
                Some((*host, victim, value))
            })
            .collect();
        victims.sort_by(|(a, _, x), (b, _, y)| x.total_cmp(y).then_with(|| nearness(a).cmp(&nearness(b))));
        match victims.first() {
            Some((host, victim, _)) if with_room.len() + victims.len() >= count => {
                Ok(Choice::Evict(host, victim))
            }
            _ => Err(NoPlace::Later),
        }
    }

    /// Bytes that all versions that are placed on the worker need or hold.
    fn placed_bytes(&self, host: &Host) -> u64 {
        let placed = self.table.models().iter().filter(|(_, plan)| plan.placement.contains(&host.name));
        placed.map(|(version, _)| self.held(host, version)).sum()
    }

    /// Bytes that a version takes from others on a worker: what it needs at least, or what it holds and cannot give back,
    /// such as the cache of long sequences.
    fn held(&self, host: &Host, version: &ModelId) -> u64 {
        self.needed(version).max(host.report_of(version).map_or(0, |report| report.bytes))
    }

    /// Bytes at each of its workers.
    fn needed(&self, name: &ModelId) -> u64 {
        let found = self.table.deployments().find(name);
        let part =
            found.and_then(|(deployment, version)| self.part_bytes(Wanted { name, deployment, version }));
        part.and_then(Result::ok).unwrap_or(0)
    }

    /// The first of the versions that leave the worker so that `bytes` become free, and the value of the most valuable
    /// of them. `staged`: a version that must leave in any case. `None` if that much cannot be freed now.
    fn victim(
        &self,
        host: &Host,
        wanted: Wanted<'_>,
        (bytes, staged): (u64, Option<&ModelId>),
    ) -> Option<(&'a ModelId, f64)> {
        let placed = self.table.models().iter().filter(|(_, plan)| plan.placement.contains(&host.name));
        let mut leaving: Vec<(f64, &'a ModelId)> = placed
            .filter_map(|(version, _)| {
                let (deployment, _) = self.table.deployments().find(version)?;
                let settings = &deployment.settings;
                let retired = self.is_retired(version);
                let spare = retired || self.replicas(version, deployment) > usize::from(settings.min);
                let idle = self.idle(&host.name, (version, deployment))?;
                let queued = self.queued.get(version).is_some_and(|queued| *queued > 0);
                let lower = retired || settings.priority <= wanted.deployment.settings.priority;
                let may = spare && !queued && lower;
                // How often it is used, and by how long ago the last use was where that is equal.
                let value = (self.uses)(version) + 1.0 / (1.0 + idle as f64);
                may.then_some((value, version))
            })
            .collect();
        leaving
            .sort_by(|(a, x), (b, y)| (staged == Some(*y)).cmp(&(staged == Some(*x))).then(a.total_cmp(b)));
        if staged.is_some() && leaving.first().map(|(_, version)| *version) != staged {
            return None;
        }
        let mut freed = 0;
        for (value, version) in &leaving {
            freed += self.held(host, version);
            if freed >= bytes {
                return Some((leaving.first()?.1, *value));
            }
        }
        None
    }

    /// The plan of a version with a further replica.
    fn with(&self, wanted: Wanted<'_>, nodes: Vec<NodeId>) -> Change {
        let facts = wanted.version.facts;
        let placement = self.places(wanted.name).iter().cloned().chain(nodes).collect();
        Change::ModelPlanned(ModelPlan {
            model: wanted.name.clone(),
            model_digest: facts.map_or([0; 32], |facts| facts.digest),
            tokenizer_digest: facts.map_or([0; 32], |facts| facts.tokenizer_digest),
            placement,
            draining: false,
            canary: None,
        })
    }
}

/// The plan without the replica that a worker is in.
fn without(plan: &ModelPlan, deployment: &Deployment, node: &NodeId) -> Change {
    let mut chunks = plan.placement.chunks(shards(deployment));
    without_nodes(plan, chunks.find(|group| group.contains(node)).unwrap_or_default())
}

fn without_nodes(plan: &ModelPlan, nodes: &[NodeId]) -> Change {
    let placement: Vec<NodeId> =
        plan.placement.iter().filter(|other| !nodes.contains(other)).cloned().collect();
    match placement.is_empty() {
        true => Change::ModelDropped(plan.model.clone()),
        false => Change::ModelPlanned(ModelPlan { placement, ..plan.clone() }),
    }
}

#[cfg(test)]
mod tests;
