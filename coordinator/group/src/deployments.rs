//! Deployed models. The leader places them; every coordinator orders the workers accordingly, offers the models to
//! clients, and asks for a model that requests wait for.
//!
//! The placement is a pure function of the committed table and of the workers' reports (`deployments/decide.rs`). Each
//! coordinator periodically sends each worker its order and receives a report. No earlier message is remembered, so a
//! new leader or a restarted coordinator continues from the current state.

pub mod decide;
mod exchanges;
mod judge;
mod offers;
pub mod uses;

use crate::agreement::Agreement;
use crate::audit::{Audit, Record};
use crate::replicas::room::of_stages;
use consensus::table::{Change, Demand, ReplicaPlan, Rollout, RolloutEnded, StagePlan, Table};
use decide::{Host, View, decide, identifiers, shards};
use dispatch::models::Models;
use dispatch::{Dispatch, HostWorker, ModelCounts};
use exchanges::Exchanges;
use judge::worse;
use offers::Offers;
use parking_lot::Mutex;
use proto::deployment::{MAX_SOURCES, ModelState, ModelsOrder, ModelsReport, OrderedModel, WantedState};
use proto::ids::{ModelId, NodeId, Role};
use proto::placement::{Lead, PlacedStage};
use proto::served_model::MAX_MODELS;
use proto::stage::StageAddress;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use uses::Uses;

/// Interval of the orders. A change of the table is ordered earlier.
const EVERY: Duration = Duration::from_millis(200);
/// Changes of the table within this time are ordered together.
const TOGETHER: Duration = Duration::from_millis(10);
/// Interval of looks at the queue for versions that have no place.
const ASK_EVERY: Duration = Duration::from_millis(50);
/// Timeout of a worker's answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// Longest wait of a round for answers. Those of a slow worker, or of one that is gone, are taken in a later round.
const ROUND_LIMIT: Duration = Duration::from_millis(100);
/// A worker that is not connected and has not answered for this long loses its models to others. A restart takes less.
const AWAY_AFTER: Duration = Duration::from_secs(2);
/// The same for a worker that this coordinator has not seen since it became leader or started.
const UNSEEN_AFTER: Duration = Duration::from_secs(10);
/// A worker at which a version failed to load is left out for so long.
const FAILED_FOR: Duration = Duration::from_secs(60);
/// Most changes of one round.
const MAX_CHANGES: usize = 32;

/// Deployed models as this coordinator sees them.
#[derive(Debug)]
pub struct Deployments {
    dispatch: Arc<Dispatch>,
    agreement: Arc<Agreement>,
    audit: Arc<Audit>,
    models: Arc<Models>,
    offers: Offers,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    reports: BTreeMap<NodeId, ModelsReport>,
    /// The time of each worker's last answer.
    workers: HashMap<NodeId, Instant>,
    leads_since: Option<Instant>,
    /// The last failure of a version at a worker: time and reason.
    failed: HashMap<(ModelId, NodeId), (Instant, String)>,
    uses: Uses,
    /// Since when requests wait, by version.
    waiting: HashMap<ModelId, Instant>,
    /// By version of a rollout: the counts of the active version and its own when the rollout was first seen.
    rollouts: HashMap<ModelId, (ModelCounts, ModelCounts)>,
}

impl Seen {
    /// The end of a canary that is worse than its bounds.
    fn roll_back(&mut self, table: &Table, totals: &BTreeMap<ModelId, ModelCounts>) -> Option<Change> {
        let counts = |version: &ModelId| totals.get(version).cloned().unwrap_or_default();
        let mut running = BTreeSet::new();
        let mut found = None;
        for (model, deployment) in table.deployments().models() {
            let Some(Rollout { version: number, canary: Some(bounds) }) = &deployment.rollout else {
                continue;
            };
            let name = |number| deployment.version(number)?.name(model);
            let (Some(active), Some(canary)) = (name(deployment.active), name(*number)) else { continue };
            let now = (counts(&active), counts(&canary));
            let before = self.rollouts.entry(canary.clone()).or_insert_with(|| now.clone());
            let worse = worse(bounds, &now.0.since(&before.0), &now.1.since(&before.1));
            running.insert(canary);
            if let Some(reason) = worse.filter(|_| found.is_none()) {
                let (model, version) = (model.clone(), *number);
                found = Some(Change::RolloutEnded(RolloutEnded { model, version, promoted: false, reason }));
            }
        }
        self.rollouts.retain(|canary, _| running.contains(canary));
        found
    }
}

impl Deployments {
    /// The returned value is passive until [`run`](Self::run).
    pub fn new(
        dispatch: Arc<Dispatch>,
        agreement: Arc<Agreement>,
        models: Arc<Models>,
        audit: Arc<Audit>,
    ) -> Arc<Self> {
        // Until the table was read, models that are not found may be deployed.
        models.set_incomplete(true);
        let offers = Offers::new(Arc::clone(&dispatch), Arc::clone(&models));
        Arc::new(Self { dispatch, agreement, audit, models, offers, seen: Mutex::default() })
    }

    /// The latest reports of the connected workers.
    pub fn reports(&self) -> BTreeMap<NodeId, ModelsReport> {
        self.seen.lock().reports.clone()
    }

    /// Sends orders, takes reports, offers models and places them, until dropped.
    pub async fn run(self: Arc<Self>) {
        let table_read = AtomicBool::new(false);
        futures::future::join3(self.read_table(&table_read), self.serve(&table_read), self.ask()).await;
    }

    /// Sets the flag after the first read that a majority confirms.
    async fn read_table(&self, table_read: &AtomicBool) {
        while self.agreement.read_table().await.is_err() {
            tokio::time::sleep(EVERY).await;
        }
        table_read.store(true, Ordering::Release);
    }

    async fn serve(&self, table_read: &AtomicBool) {
        let mut ticks = tokio::time::interval(EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut exchanges, mut seen) = (Exchanges::default(), None);
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = self.agreement.table_changed(&mut seen) => tokio::time::sleep(TOGETHER).await,
            }
            let complete = table_read.load(Ordering::Acquire);
            let Some(table) = self.agreement.table() else { continue };
            let workers = self.dispatch.hosts();
            let hosts = self.order(&table, &workers, &mut exchanges).await;
            self.offers.update(&table, &workers, &hosts).await;
            self.models.set_incomplete(!complete);
            self.place(&hosts).await;
        }
    }

    async fn ask(&self) {
        let mut ticks = tokio::time::interval(ASK_EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            if let Some(table) = self.agreement.table() {
                self.want(&table).await;
            }
        }
    }

    /// Sends every worker its order, and returns the workers with their latest reports.
    async fn order(&self, table: &Table, workers: &[HostWorker], exchanges: &mut Exchanges) -> Vec<Host> {
        let before = self.hosts(table, workers);
        for worker in workers {
            exchanges.begin(worker, || order((table, &self.offers), &before, workers, &worker.node));
        }
        let answers = exchanges.ended().await;
        let now = Instant::now();
        {
            let mut seen = self.seen.lock();
            let there = |node: &NodeId| workers.iter().any(|worker| worker.node == *node);
            let placed = |node: &NodeId| table.models().values().any(|plan| plan.placement.contains(node));
            for (node, answered, report) in answers {
                seen.workers.insert(node.clone(), answered);
                seen.reports.insert(node, report);
            }
            seen.reports.retain(|node, _| there(node));
            seen.workers
                .retain(|node, last| placed(node) || now.saturating_duration_since(*last) < AWAY_AFTER);
        }
        self.hosts(table, workers)
    }

    fn hosts(&self, table: &Table, workers: &[HostWorker]) -> Vec<Host> {
        let seen = self.seen.lock();
        let host = |worker: &HostWorker| {
            let joined = table.nodes().nodes().get(&(Role::Worker, worker.node.clone()));
            let joined = joined.into_iter().flat_map(|record| &record.labels);
            let labels: BTreeSet<String> = joined
                .map(|(key, value)| format!("{key}={value}"))
                .chain(worker.report.labels.iter().cloned())
                .collect();
            let report = seen.reports.get(&worker.node).cloned();
            let (stages, draining) = (worker.report.stages, worker.draining);
            let engine = worker.report.engine.clone();
            Host { name: worker.node.clone(), labels, engine, draining, stages, report }
        };
        // A worker that was here a moment ago may return at once, as with another epoch.
        let now = Instant::now();
        let away = seen.workers.iter().filter(|(node, last)| {
            now.saturating_duration_since(**last) < AWAY_AFTER
                && !workers.iter().any(|worker| worker.node == **node)
        });
        let away = away.map(|(node, _)| Host {
            name: node.clone(),
            labels: BTreeSet::new(),
            engine: String::new(),
            draining: false,
            stages: None,
            report: None,
        });
        workers.iter().map(host).chain(away).collect()
    }

    /// Asks for the versions that requests wait for and that have no place.
    async fn want(&self, table: &Table) {
        for version in self.dispatch.look(|balancer| balancer.queued_by_model()).into_keys() {
            let asked = matches!(table.deployments().demand().get(&version), Some(Demand::Wanted(_)));
            let placed = table.models().get(&version).is_some_and(|plan| !plan.placement.is_empty());
            if asked || placed || table.deployments().find(&version).is_none() {
                continue;
            }
            if let Err(error) = self.agreement.plan(Change::ModelWanted(version.clone())).await {
                tracing::debug!(%version, %error, "a model that requests wait for could not be asked for");
                return;
            }
        }
    }

    /// Leader only: makes the changes that are due, one at a time, since each depends on the resulting table.
    async fn place(&self, hosts: &[Host]) {
        if !self.agreement.leads() {
            self.seen.lock().leads_since = None;
            return;
        }
        let queued = self.dispatch.waiting_everywhere();
        for _ in 0..MAX_CHANGES {
            let Some(table) = self.agreement.table() else { return };
            let Some(change) = self.decide(&table, hosts, &queued) else { return };
            tracing::info!(?change, "proposing a change of the deployed models");
            let (what, on, why) = named(&change);
            let made = self.agreement.plan(change).await;
            let result = match &made {
                Ok(()) if why.is_empty() => "made".to_owned(),
                Ok(()) => format!("made: {why}"),
                Err(error) => error.to_string(),
            };
            self.audit.note(&Record { who: "leader", from: None, what, on: &on, result: &result });
            if let Err(error) = made {
                tracing::warn!(%error, "the group did not agree on a change of the deployed models");
                return;
            }
        }
    }

    fn decide(&self, table: &Table, hosts: &[Host], queued: &BTreeMap<ModelId, usize>) -> Option<Change> {
        let now = Instant::now();
        let mut seen = self.seen.lock();
        let leads_since = *seen.leads_since.get_or_insert(now);
        seen.failed.retain(|_, (at, _)| now.saturating_duration_since(*at) < FAILED_FOR);
        for (version, plan) in table.models() {
            for host in hosts.iter().filter(|host| plan.placement.contains(&host.name)) {
                let report = host.report_of(version);
                let failed =
                    report.filter(|report| report.state == ModelState::Failed && report.failures > 1);
                if let Some(report) = failed {
                    seen.failed.insert((version.clone(), host.name.clone()), (now, report.reason.clone()));
                }
            }
        }
        let totals = self.dispatch.outcomes().totals();
        seen.uses.count(now, totals.iter().map(|(version, counts)| (version.clone(), counts.requests())));
        seen.uses.retain(|version| totals.contains_key(version));
        let is_queued = |version: &ModelId| queued.get(version).is_some_and(|requests| *requests > 0);
        seen.waiting.retain(|version, _| is_queued(version));
        for version in queued.keys().filter(|version| is_queued(version)) {
            seen.waiting.entry(version.clone()).or_insert(now);
        }
        if let Some(change) = seen.roll_back(table, &totals) {
            return Some(change);
        }
        let seen = &*seen;
        let is_gone = |node: &NodeId| match seen.workers.get(node) {
            Some(last) => now.saturating_duration_since(*last) > AWAY_AFTER,
            None => now.saturating_duration_since(leads_since) > UNSEEN_AFTER,
        };
        let failure = |version: &ModelId, node: &NodeId| {
            seen.failed.get(&(version.clone(), node.clone())).map(|(_, reason)| reason.clone())
        };
        let uses = |version: &ModelId| seen.uses.of(now, version);
        let waited = |version: &ModelId| {
            seen.waiting.get(version).map_or(Duration::ZERO, |since| now.saturating_duration_since(*since))
        };
        let layers = |version: &ModelId| self.offers.layers(version);
        let (is_gone, failure, uses, waited) = (&is_gone, &failure, &uses, &waited);
        decide(&View { table, hosts, is_gone, queued, waited, failure, uses, layers: &layers })
    }
}

/// The order for a worker. Until the worker has answered once, the order only asks for a report.
fn order(
    (table, offers): (&Table, &Offers),
    hosts: &[Host],
    workers: &[HostWorker],
    node: &NodeId,
) -> ModelsOrder {
    let host = hosts.iter().find(|host| host.name == *node);
    let known = host.is_some_and(|host| host.report.is_some());
    let mut models = Vec::new();
    for (model, deployment) in table.deployments().models() {
        let settings = &deployment.settings;
        if host.is_some_and(|host| host.engine != settings.engine) {
            continue;
        }
        for version in deployment.versions.iter().filter(|version| version.failed.is_empty()) {
            let (name, digest, wanted) =
                match version.facts.and_then(|facts| Some((version.name(model)?, facts))) {
                    Some((_, facts)) if table.blocked().contains_key(&facts.digest) => continue,
                    Some((name, facts)) => {
                        let placed =
                            table.models().get(&name).is_some_and(|plan| plan.placement.contains(node));
                        // The first of several workers loads its part as their lead, the others by its orders.
                        let ready = placed && shards(deployment) == 1;
                        let wanted = if ready { WantedState::Ready } else { WantedState::Asleep };
                        (name, Some(facts.digest), wanted)
                    }
                    None if identifiers(hosts, deployment, version, model)
                        .iter()
                        .any(|host| host.name == *node) =>
                    {
                        (model.clone(), None, WantedState::Identified)
                    }
                    None => continue,
                };
            let holds = |worker: &&HostWorker| {
                let host = hosts.iter().find(|host| host.name == worker.node);
                worker.node != *node
                    && host.and_then(|host| host.report_of(&name)).is_some_and(|report| report.has_files)
            };
            let mut holders: Vec<String> =
                workers.iter().filter(holds).map(|worker| worker.quic.clone()).collect();
            holders.truncate(MAX_SOURCES);
            models.push(OrderedModel {
                model: name,
                source: version.source.clone(),
                digest,
                wanted,
                context: settings.context,
                pin: settings.pin,
                priority: settings.priority,
                holders,
            });
        }
    }
    // Versions that are to be ready come first: further ones than a worker may have are left out.
    models.sort_by_key(|ordered| std::cmp::Reverse(ordered.wanted));
    models.truncate(MAX_MODELS);
    let leads = |plan: &&ReplicaPlan| {
        plan.model.is_version() && plan.stages.first().is_some_and(|first| first.node == *node)
    };
    let led = table.replicas().iter().find(|(_, plan)| leads(plan));
    let lead = led.map(|(plan_index, plan)| lead((*plan_index, plan), (table, offers), workers));
    // A worker of the replica is not connected here: the order only asks for a report.
    let known = known && !matches!(lead, Some(None));
    ModelsOrder { version: if known { table.applied() } else { 0 }, models, lead: lead.flatten() }
}

/// The replica that a worker leads. `None` if one of its workers, or the version's layers, are not known here.
fn lead(
    (plan_index, plan): (u64, &ReplicaPlan),
    (table, offers): (&Table, &Offers),
    workers: &[HostWorker],
) -> Option<Lead> {
    let (deployment, _) = table.deployments().find(&plan.model)?;
    let layers = offers.layers(&plan.model)?;
    let part = layers.part_bytes(shards(deployment)).ok()?;
    let cache_bytes = of_stages(plan, (&layers.costs, layers.context), |_| Some(part));
    let stage = |stage: &StagePlan| {
        let worker = workers.iter().find(|worker| worker.node == stage.node)?;
        let at = StageAddress { node: stage.node.clone(), quic: worker.quic.clone() };
        Some(PlacedStage { at, layers: stage.layers })
    };
    let stages = plan.stages.iter().map(stage).collect::<Option<Vec<_>>>()?;
    Some(Lead { plan_index, model: plan.model.clone(), model_digest: plan.model_digest, cache_bytes, stages })
}

/// The action, its target and its reason, for the audit log.
fn named(change: &Change) -> (&'static str, String, String) {
    match change {
        Change::ModelPlanned(plan) => {
            let nodes: Vec<&str> = plan.placement.iter().map(NodeId::as_str).collect();
            ("place_model", format!("{} at {}", plan.model, nodes.join(", ")), String::new())
        }
        Change::ModelDropped(model) => ("unload_model", model.to_string(), String::new()),
        Change::ReplicaPlaced(placed) => {
            let stage =
                |StagePlan { node, layers: (first, end) }: &StagePlan| format!("{node} {first}..{end}");
            let stages: Vec<String> = placed.plan.stages.iter().map(stage).collect();
            ("place_replica", format!("{} at {}", placed.plan.model, stages.join(", ")), String::new())
        }
        Change::ReplicaDropped(plan_index) => ("drop_replica", format!("plan {plan_index}"), String::new()),
        Change::VersionIdentified(identified) => {
            ("identify_model", identified.model.to_string(), String::new())
        }
        Change::VersionFailed(failed) => ("fail_version", failed.model.to_string(), failed.reason.clone()),
        Change::RolloutEnded(ended) if ended.promoted => {
            ("promote", ended.model.to_string(), ended.reason.clone())
        }
        Change::RolloutEnded(ended) => ("roll_back", ended.model.to_string(), ended.reason.clone()),
        Change::ModelRefused(refused) => ("refuse_model", refused.model.to_string(), refused.reason.clone()),
        Change::ModelBlocked(blocked) => {
            ("condemn_model", format!("by {}", blocked.node), blocked.reason.clone())
        }
        _ => ("deploy", String::new(), String::new()),
    }
}
