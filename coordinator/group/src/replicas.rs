//! Replicas of several workers. The leader plans them, the coordinators commit the plans, and every
//! coordinator sends them to the workers.
//!
//! A plan is a pure function of the committed table, including operators' plans, and of the observed workers
//! (`replicas/decide.rs`). Each coordinator periodically sends each pool worker its order and receives a
//! report. No earlier message is remembered, so a new leader or a restarted coordinator continues from the
//! current state. Requests for a model whose replica is being set up wait for a bounded time.

mod decide;
mod drafters;
pub(crate) mod room;

use crate::agreement::Agreement;
use crate::audit::{Audit, Record};
use consensus::table::{Change, ReplicaPlan, Table};
use decide::{Node, View, WantedModel};
use dispatch::models::Models;
use dispatch::{Dispatch, PoolWorker};
use parking_lot::Mutex;
use proto::ids::{ModelId, NodeId};
use proto::placement::{Lead, LeadReport, LeadState, OfferedDrafter, PlaceOrder, PlaceReport, PlacedStage};
use proto::stage::StageAddress;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval of the orders to pool workers.
const EVERY: Duration = Duration::from_millis(200);
/// Timeout of a worker's answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// A worker that is away for this long is replaced in its replica if another is free. A restart takes less.
const AWAY_AFTER: Duration = Duration::from_secs(2);
/// The same for a worker that this coordinator has not seen since it became leader or started.
const UNSEEN_AFTER: Duration = Duration::from_secs(10);
/// How long requests wait for a replica that is being set up again.
const SETUP_LIMIT: Duration = Duration::from_secs(10);

/// Replicas as this coordinator sees them.
#[derive(Debug)]
pub struct Replicas {
    dispatch: Arc<Dispatch>,
    agreement: Arc<Agreement>,
    models: Arc<Models>,
    audit: Arc<Audit>,
    /// Stages per replica; `None`: as few as hold the model.
    shards: Option<usize>,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    reports: BTreeMap<NodeId, PlaceReport>,
    workers: HashMap<NodeId, Instant>,
    leads_since: Option<Instant>,
    served: HashMap<ModelId, Instant>,
    /// Why no further replica of a model can be planned.
    unplanned: BTreeMap<ModelId, String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaView {
    pub plan_index: u64,
    pub plan: ReplicaPlan,
    /// Whether an operator planned this replica.
    pub by_operator: bool,
    /// The first stage's report, if it has sent one for this epoch.
    pub report: Option<LeadReport>,
}

impl Replicas {
    /// The returned value is passive until [`run`](Self::run).
    pub fn new(
        dispatch: Arc<Dispatch>,
        agreement: Arc<Agreement>,
        models: Arc<Models>,
        audit: Arc<Audit>,
        shards: Option<usize>,
    ) -> Arc<Self> {
        Arc::new(Self { dispatch, agreement, models, audit, shards, seen: Mutex::default() })
    }

    /// The committed replicas, by epoch.
    pub fn view(&self) -> Vec<ReplicaView> {
        let Some(table) = self.agreement.table() else { return Vec::new() };
        let seen = self.seen.lock();
        let view = |(&plan_index, plan): (&u64, &ReplicaPlan)| {
            let report = plan.stages.first().and_then(|first| seen.reports.get(&first.node));
            let report =
                report.and_then(|report| report.leads.clone()).filter(|leads| leads.plan_index == plan_index);
            ReplicaView { plan_index, plan: plan.clone(), by_operator: table.is_operators(plan), report }
        };
        // Those of deployments are in their reports.
        table.replicas().iter().filter(|(_, plan)| !plan.model.is_version()).map(view).collect()
    }

    /// Why no further replica of a model, or an operator's plan, can be placed. Known to the leader only.
    pub fn unplanned(&self) -> BTreeMap<ModelId, String> {
        self.seen.lock().unplanned.clone()
    }

    /// Sends orders, takes reports and plans, until dropped.
    pub async fn run(self: Arc<Self>) {
        let mut ticks = tokio::time::interval(EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let Some(table) = self.agreement.table() else { continue };
            let pool = self.dispatch.pool();
            self.expect(&table);
            self.send_plans(&table, &pool).await;
            self.plan(&table, &pool).await;
        }
    }

    /// Queues requests for planned models that were served, or planned, a short while ago.
    fn expect(&self, table: &Table) {
        let now = Instant::now();
        let mut seen = self.seen.lock();
        for model in self.models.configured().iter().map(|model| &model.id) {
            if table.replicas().values().all(|plan| plan.model != *model) {
                seen.served.remove(model);
                continue;
            }
            let since = seen.served.entry(model.clone()).or_insert(now);
            if self.dispatch.serves(model) {
                *since = now;
            }
            self.dispatch.expect(model, *since + SETUP_LIMIT);
        }
    }

    async fn send_plans(&self, table: &Table, pool: &[PoolWorker]) {
        let reports = pool.iter().map(async |worker| {
            let order = self.order(table, pool, &worker.node);
            (worker.node.clone(), worker.place(order, ANSWER_LIMIT).await)
        });
        let answers = futures::future::join_all(reports).await;
        let now = Instant::now();
        let mut seen = self.seen.lock();
        let there = |node: &NodeId| pool.iter().any(|worker| worker.node == *node);
        let planned = |node: &NodeId| {
            table.replicas().values().any(|plan| plan.stages.iter().any(|stage| stage.node == *node))
        };
        seen.reports.retain(|node, _| there(node));
        seen.workers.retain(|node, _| there(node) || planned(node));
        for (node, report) in answers {
            seen.workers.insert(node.clone(), now);
            report.into_iter().for_each(|report| drop(seen.reports.insert(node.clone(), report)));
        }
    }

    /// Leader only: makes one change at a time, since the next depends on the resulting table.
    async fn plan(&self, table: &Table, pool: &[PoolWorker]) {
        if !self.agreement.leads() {
            self.seen.lock().leads_since = None;
            return;
        }
        let targets: Vec<WantedModel<'_>> = self
            .models
            .configured()
            .iter()
            .filter_map(|model| {
                Some(WantedModel { model: &model.id, costs: model.costs.as_ref()?, context: model.context })
            })
            .collect();
        let nodes: Vec<Node<'_>> = pool
            .iter()
            .map(|worker| Node {
                name: &worker.node,
                capacity: &worker.capacity,
                drafter: worker.drafter.as_ref(),
                draining: worker.draining,
            })
            .collect();
        let (change, unplanned) = {
            let now = Instant::now();
            let mut seen = self.seen.lock();
            let leads_since = *seen.leads_since.get_or_insert(now);
            let is_gone = |node: &NodeId| match seen.workers.get(node) {
                Some(last) => now.saturating_duration_since(*last) > AWAY_AFTER,
                None => now.saturating_duration_since(leads_since) > UNSEEN_AFTER,
            };
            let report_of = |plan_index: u64, lead: &NodeId| {
                let leads = seen.reports.get(lead)?.leads.as_ref()?;
                (leads.plan_index == plan_index).then_some(leads)
            };
            let unusable_file = |plan_index: u64, lead: &NodeId| {
                let leads = report_of(plan_index, lead)?;
                (leads.state == LeadState::BadFile).then(|| leads.reason.clone())
            };
            let setup_failed = |plan_index: u64, lead: &NodeId| {
                report_of(plan_index, lead).is_some_and(|leads| leads.state == LeadState::Waiting)
            };
            let view = View {
                table,
                targets: &targets,
                shards: self.shards,
                nodes: &nodes,
                is_gone: &is_gone,
                unusable_file: &unusable_file,
                setup_failed: &setup_failed,
            };
            decide::decide(&view)
        };
        self.seen.lock().unplanned = unplanned;
        let Some(change) = change else { return };
        tracing::info!(?change, "proposing a change of the replicas");
        let (what, on) = named(&change);
        let made = self.agreement.plan(change).await;
        let result = made.as_ref().map_or_else(ToString::to_string, |()| "made".to_owned());
        self.audit.note(&Record { who: "leader", from: None, what, on: &on, result: &result });
        if let Err(error) = made {
            tracing::warn!(%error, "the group did not agree on a change of the replicas");
        }
    }

    /// The order for a worker. While a stage of the replica that it leads is unknown here, the order only
    /// requests a report.
    fn order(&self, table: &Table, pool: &[PoolWorker], node: &NodeId) -> PlaceOrder {
        let is_stage = |plan: &&ReplicaPlan| plan.stages.iter().any(|stage| stage.node == *node);
        let digest = table.replicas().values().find(is_stage).map(|plan| plan.model_digest);
        let holders = digest.map(|digest| self.dispatch.holders(&digest, node)).unwrap_or_default();
        let leads = |plan: &ReplicaPlan| plan.stages.first().is_some_and(|first| first.node == *node);
        let Some((&plan_index, plan)) = table.replicas().iter().find(|(_, plan)| leads(plan)) else {
            return PlaceOrder { version: table.applied(), lead: None, holders, drafter: None };
        };
        let stages: Option<Vec<PlacedStage>> = plan
            .stages
            .iter()
            .map(|stage| {
                let worker = pool.iter().find(|worker| worker.node == stage.node)?;
                let at = StageAddress { node: stage.node.clone(), quic: worker.quic.clone() };
                Some(PlacedStage { at, layers: stage.layers })
            })
            .collect();
        match stages {
            Some(stages) => {
                let (model, model_digest) = (plan.model.clone(), plan.model_digest);
                let drafter = drafter_of(&model_digest, pool);
                let cache_bytes = room::cache_bytes(plan, &self.models, (pool, drafter));
                let lead = Lead { plan_index, model, model_digest, cache_bytes, stages };
                let drafter = drafter.map(|drafter| drafter.drafter);
                PlaceOrder { version: table.applied(), lead: Some(lead), holders, drafter }
            }
            None => PlaceOrder { version: 0, lead: None, holders, drafter: None },
        }
    }
}

/// The drafter of a model that is available in the pool.
fn drafter_of<'a>(digest: &[u8; 32], pool: &'a [PoolWorker]) -> Option<&'a OfferedDrafter> {
    drafters::of(pool.iter().map(|worker| (&worker.capacity, worker.drafter.as_ref())), digest)
}

/// The action and target of a plan change, for the audit log.
fn named(change: &Change) -> (&'static str, String) {
    match change {
        Change::ReplicaPlaced(placed) => {
            let stages: Vec<&str> = placed.plan.stages.iter().map(|stage| stage.node.as_str()).collect();
            ("place_replica", format!("{} at {}", placed.plan.model, stages.join(", ")))
        }
        Change::ReplicaDropped(plan_index) => ("drop_replica", format!("plan {plan_index}")),
        Change::ModelBlocked(blocked) => ("condemn_model", format!("by {}", blocked.node)),
        _ => ("plan", String::new()),
    }
}
