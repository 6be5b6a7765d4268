//! The leader's next change of the deployed models, from the table and from what workers report. Pure: no clock, no
//! memory.
//!
//! A version is *placed* on the workers of its [`ModelPlan`]; it is *wanted* there whether it is ready yet or not.
//! Memory is counted by what each placed version needs at least. If a worker must give up a model for another, the one
//! with the least recent use goes, weighed by how often it is used; never one with running requests, one of higher
//! priority, or a replica that its deployment keeps (`min`).

use consensus::table::{
    Change, Demand, Deployment, MAX_REASON, ModelBlocked, ModelPlan, ModelRefused, Rollout, RolloutEnded,
    Table, Version, VersionFailed, VersionIdentified,
};
use proto::deployment::{ModelReport, ModelSource, ModelState, ModelsReport};
use proto::ids::{ModelId, NodeId};
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
    pub draining: bool,
    /// `None` until it has answered an order.
    pub report: Option<ModelsReport>,
}

impl Host {
    /// The worker's report about a version, or about the files of a deployment.
    pub fn report_of(&self, model: &ModelId) -> Option<&ModelReport> {
        self.report.as_ref()?.models.iter().find(|report| report.model == *model)
    }
}

pub struct View<'a> {
    pub table: &'a Table,
    /// The connected workers, by name.
    pub hosts: &'a [Host],
    /// Whether a worker has been away for too long to wait for it.
    pub is_gone: &'a dyn Fn(&NodeId) -> bool,
    /// Requests that wait at all coordinators, by version.
    pub queued: &'a BTreeMap<ModelId, usize>,
    /// How long requests for a version have been waiting.
    pub waited: &'a dyn Fn(&ModelId) -> Duration,
    /// Whether a version failed at a worker a short while ago.
    pub has_failed: &'a dyn Fn(&ModelId, &NodeId) -> bool,
    /// Recent requests for a version, older ones counting less.
    pub uses: &'a dyn Fn(&ModelId) -> f64,
}

/// A version with its deployment.
#[derive(Clone, Copy)]
struct Wanted<'a> {
    name: &'a ModelId,
    deployment: &'a Deployment,
    version: &'a Version,
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
    let able = hosts.iter().filter(|host| fits(host, deployment) && !gave_up(host, model));
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
        && deployment.settings.nodes.iter().all(|label| host.labels.contains(label))
}

/// Whether the worker has tried often enough to read or load the model.
fn gave_up(host: &Host, model: &ModelId) -> bool {
    host.report_of(model).is_some_and(|report| {
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
            let facts = self.hosts.iter().find_map(|host| host.report_of(model)?.facts);
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
                .filter_map(|host| Some(format!("{}: {}", host.name, host.report_of(&model)?.reason)))
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
                        || gave_up(host, version)
                        || (self.has_failed)(version, node)
                }
            };
            let node = plan.placement.iter().find(lost)?;
            Some(without(plan, node))
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
            let serving = active.as_ref().map_or(0, |active| self.places(active).len());
            let places = self.places(&name);
            let ready = places.iter().filter(|node| self.is_ready(node, &name)).count();
            let wanted = Wanted { name: &name, deployment, version };
            let enough = ready
                >= serving
                    .max(usize::from(deployment.settings.min))
                    .min(usize::from(deployment.settings.max));
            let blocked = ready == places.len() && self.choose(wanted).is_err();
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
            let above = retired || plan.placement.len() > usize::from(settings.min);
            let never = settings.idle_s == 0 && !retired;
            if !above || never || self.queued.get(version).is_some_and(|queued| *queued > 0) {
                return None;
            }
            let after = if retired { RETIRED_AFTER } else { u64::from(settings.idle_s) * 1000 };
            let idle = |node: &&NodeId| self.idle(node, version).is_some_and(|idle| idle >= after);
            let node = plan
                .placement
                .iter()
                .filter(|node| idle(node))
                .max_by_key(|node| self.idle(node, version))?;
            Some(without(plan, node))
        })
    }

    /// Milliseconds since the version's last request at the worker. `None` while it runs one or is not ready.
    fn idle(&self, node: &NodeId, version: &ModelId) -> Option<u64> {
        let report = self.host(node)?.report_of(version)?;
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
            let (places, demand) = (self.places(name).len(), self.table.deployments().demand().get(name));
            if places < self.desired(wanted, model) {
                let since = if let Some(Demand::Wanted(since)) = demand { *since } else { u64::MAX };
                let requests = self.queued.get(name).copied().unwrap_or(0) as u128;
                let waited = Reverse(requests * (self.waited)(name).as_millis());
                // The first replica of a model comes before a further one of another.
                let order = (places > 0, Reverse(deployment.settings.priority), waited, since);
                missing.push((order, wanted));
            }
        }
        missing.sort_by_key(|(order, _)| *order);
        missing.into_iter().find_map(|((further, ..), wanted)| match self.choose(wanted) {
            Ok((host, None)) => Some(self.with(wanted, &host.name)),
            // A further replica takes no room from another model.
            Ok((_, Some(_)))
                if further
                    && self.places(wanted.name).len() >= usize::from(wanted.deployment.settings.min) =>
            {
                None
            }
            Ok((host, Some(victim))) => {
                let plan = self.table.models().get(victim)?;
                Some(without(plan, &host.name))
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
        let places = self.places(name);
        let demanded = matches!(self.table.deployments().demand().get(name), Some(Demand::Wanted(_)));
        if version.number != deployment.active {
            let Some(rollout) =
                deployment.rollout.as_ref().filter(|rollout| rollout.version == version.number)
            else {
                // Requests that were planned while it was active.
                return places.len().max(usize::from(demanded));
            };
            let active = deployment.version(deployment.active).and_then(|active| active.name(model));
            let serving = active.map_or(0, |active| self.places(&active).len());
            return match rollout.canary {
                Some(_) => 1.max(places.len()),
                None => serving.max(min).min(max),
            };
        }
        let queued = self.queued.get(name).copied().unwrap_or(0);
        let first = usize::from(demanded || queued > 0 && !places.is_empty());
        let all_busy = !places.is_empty()
            && queued > 0
            && places.iter().all(|node| self.is_ready(node, name) && self.idle(node, name).is_none());
        let further = if all_busy { places.len() + 1 } else { 0 };
        first.max(min).max(further).min(max)
    }

    /// The worker for a further replica, and the version that must leave it first, if any.
    fn choose(&self, wanted: Wanted<'_>) -> Result<(&'a Host, Option<&'a ModelId>), NoPlace> {
        let Wanted { name, deployment, version } = wanted;
        let needed = version.facts.map_or(0, |facts| facts.needed_bytes);
        let fitting: Vec<&Host> = self.hosts.iter().filter(|host| fits(host, deployment)).collect();
        if fitting.is_empty() {
            return match (
                self.hosts.iter().any(|host| host.report.is_none()),
                deployment.settings.nodes.as_slice(),
            ) {
                (true, _) => Err(NoPlace::Later),
                (_, []) => Err(NoPlace::Never("no worker that loads models is connected".to_owned())),
                (_, labels) => Err(NoPlace::Never(format!("no worker has the labels {}", labels.join(", ")))),
            };
        }
        let budget =
            |host: &Host| host.report.as_ref().map_or(0, |report| report.budget.saturating_sub(report.own));
        let largest = fitting.iter().map(|host| budget(host)).max().unwrap_or(0);
        if needed > largest {
            let reason = format!("it needs {needed} bytes of memory, and the worker with most has {largest}");
            return Err(NoPlace::Never(reason));
        }
        let places = self.places(name);
        let free = |host: &&Host| !places.contains(&host.name) && !(self.has_failed)(name, &host.name);
        let candidates: Vec<&Host> = fitting.into_iter().filter(free).collect();
        if candidates.is_empty() && places.is_empty() {
            return Err(NoPlace::Never("it failed to load at every worker that may serve it".to_owned()));
        }
        // A worker where it sleeps wakes it, one with the files reads them, any other fetches them.
        let nearness = |host: &Host| match host.report_of(name) {
            Some(report) if report.state == ModelState::Asleep => 0,
            Some(report) if report.has_files => 1,
            _ => 2,
        };
        let room = |host: &Host| budget(host).saturating_sub(self.placed_bytes(host));
        let with_room = candidates.iter().filter(|host| room(host) >= needed);
        if let Some(host) = with_room.min_by_key(|host| (nearness(host), u64::MAX - room(host))) {
            return Ok((host, None));
        }
        let victims = candidates.iter().filter(|host| budget(host) >= needed).filter_map(|host| {
            let (victim, value) = self.victim(host, wanted, needed.saturating_sub(room(host)))?;
            Some((*host, victim, value))
        });
        let cheapest =
            victims.min_by(|(a, _, x), (b, _, y)| x.total_cmp(y).then_with(|| nearness(a).cmp(&nearness(b))));
        cheapest.map(|(host, victim, _)| (host, Some(victim))).ok_or(NoPlace::Later)
    }

    /// Bytes that all versions that are placed on the worker need at least.
    fn placed_bytes(&self, host: &Host) -> u64 {
        let placed = self.table.models().iter().filter(|(_, plan)| plan.placement.contains(&host.name));
        placed.map(|(version, _)| self.needed(version)).sum()
    }

    fn needed(&self, version: &ModelId) -> u64 {
        let found = self.table.deployments().find(version);
        found.and_then(|(_, version)| version.facts).map_or(0, |facts| facts.needed_bytes)
    }

    /// The first of the versions that leave the worker so that `bytes` become free, and the value of the most valuable
    /// of them. `None` if that much cannot be freed now.
    fn victim(&self, host: &Host, wanted: Wanted<'_>, bytes: u64) -> Option<(&'a ModelId, f64)> {
        let placed = self.table.models().iter().filter(|(_, plan)| plan.placement.contains(&host.name));
        let mut leaving: Vec<(f64, &'a ModelId)> = placed
            .filter_map(|(version, plan)| {
                let (deployment, _) = self.table.deployments().find(version)?;
                let settings = &deployment.settings;
                let retired = self.is_retired(version);
                let spare = retired || plan.placement.len() > usize::from(settings.min);
                let idle = self.idle(&host.name, version)?;
                let queued = self.queued.get(version).is_some_and(|queued| *queued > 0);
                let lower = retired || settings.priority <= wanted.deployment.settings.priority;
                let may = spare && !queued && lower;
                // How often it is used, and by how long ago the last use was where that is equal.
                let value = (self.uses)(version) + 1.0 / (1.0 + idle as f64);
                may.then_some((value, version))
            })
            .collect();
        leaving.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        let mut freed = 0;
        for (value, version) in &leaving {
            freed += self.needed(version);
            if freed >= bytes {
                return Some((leaving.first()?.1, *value));
            }
        }
        None
    }

    /// The plan of a version with a further worker.
    fn with(&self, wanted: Wanted<'_>, node: &NodeId) -> Change {
        let facts = wanted.version.facts;
        let mut placement = self.places(wanted.name).to_vec();
        placement.push(node.clone());
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

/// The plan without a worker.
fn without(plan: &ModelPlan, node: &NodeId) -> Change {
    let placement: Vec<NodeId> = plan.placement.iter().filter(|other| *other != node).cloned().collect();
    match placement.is_empty() {
        true => Change::ModelDropped(plan.model.clone()),
        false => Change::ModelPlanned(ModelPlan { placement, ..plan.clone() }),
    }
}

#[cfg(test)]
mod tests;
