//! A worker of the pool. By the coordinators' plan it is free, a downstream stage of a replica, or its first
//! stage.
//!
//! Coordinators repeatedly send the replica that this worker leads ([`Pool::place`]). The worker then claims
//! the other stages, loads its layers, and starts an epoch in which it serves the model like any other
//! worker. When a stage is lost or the plan changes, that epoch ends with all its state, and the worker is
//! free again. While the plan stands it retries, each time in a new epoch.

use super::{Loaded, Node, NodeContext, NodeRun, current_epoch};
use crate::Error;
use crate::load::{self, EngineOptions, HostedLoad, Prepared};
use crate::rank_server::{Holds, RankServer, StageConfig, StageRoom};
use engine::speculation::SpeculativeMethod;
use parking_lot::Mutex;
use pipeline::weight_distribution::{Shipper, WantedLayers};
use pipeline::{Claims, Replica, ReplicaClaim};
use pki::Identity;
use proto::deployment::{ModelState, ModelsOrder, ModelsReport};
use proto::ids::Epoch;
use proto::placement::{
    Capacity, ClaimRefusal, Drafter, Lead, LeadReport, LeadState, OfferedDrafter, PlaceOrder, PlaceReport,
};
use proto::stage::ActivationType;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use transport::Endpoint;

/// Pause before the next attempt to form a replica. A stage that lost its lease is free again once the other
/// side's lease has expired.
const RETRY_AFTER: Duration = Duration::from_millis(500);
/// Interval of looking whether the requests of a replica, or its memory, have ended.
const DRAIN_TICK: Duration = Duration::from_millis(10);
/// Time for an engine that has ended to free its memory.
const FREE_LIMIT: Duration = Duration::from_secs(10);

pub(super) struct Pool {
    /// `None`: it gets its orders as a worker that loads models, and has no capacity of its own.
    capacity: Option<Capacity>,
    /// The drafter of its own model.
    drafter: Option<OfferedDrafter>,
    rank_server: Arc<RankServer>,
    shipper: Arc<Shipper>,
    /// Memory and files that are shared with other models.
    room: Option<StageRoom>,
    /// Time for running requests to finish when another plan arrives.
    drain_timeout: Duration,
    identity: Identity,
    /// `None`: models placed on this worker are fetched from other workers.
    model_path: Option<PathBuf>,
    engine: EngineOptions,
    orders: watch::Sender<PlaceOrder>,
    leads: Mutex<Option<LeadReport>>,
    led: Mutex<Led>,
}

/// The replica that it leads, on a device that it shares with other models.
#[derive(Default)]
struct Led {
    /// Longest sequence in tokens, and priority; 0 if they are not set.
    settings: (u32, u32),
    load: Option<HostedLoad>,
    /// While it serves.
    node: Option<Arc<Node>>,
}

/// A replica that was formed.
struct Formed {
    prepared: Prepared,
    lost: watch::Receiver<Option<String>>,
}

impl Pool {
    pub(super) fn new(
        (capacity, drafter): (Option<Capacity>, Option<OfferedDrafter>),
        (stage, drain_timeout): (StageConfig, Duration),
        endpoint: Arc<Endpoint>,
        holds: Holds,
        identity: Identity,
    ) -> Self {
        let (model_path, engine) = (stage.model_path.clone(), stage.engine.clone());
        let (shipper, room) = (Arc::clone(&holds.shipper), holds.room.clone());
        let rank_server = RankServer::new(stage, endpoint, holds, Some(Claims::default()));
        let no_order = PlaceOrder { version: 0, lead: None, holders: Vec::new(), drafter: None };
        let (orders, leads) = (watch::Sender::new(no_order), Mutex::new(None));
        let led = Mutex::default();
        Self {
            capacity,
            drafter,
            rank_server,
            shipper,
            room,
            drain_timeout,
            identity,
            model_path,
            engine,
            orders,
            leads,
            led,
        }
    }

    pub(super) fn capacity(&self) -> Option<&Capacity> {
        self.capacity.as_ref()
    }

    /// Applies the part of an order that concerns models on several workers.
    pub(super) fn order(&self, order: &ModelsOrder) {
        let settings = order.lead.as_ref().and_then(|lead| {
            let ordered = order.models.iter().find(|ordered| ordered.model == lead.model)?;
            Some((ordered.context, ordered.priority))
        });
        settings.into_iter().for_each(|settings| self.led.lock().settings = settings);
        let (version, lead) = (order.version, order.lead.clone());
        self.place(PlaceOrder { version, lead, holders: Vec::new(), drafter: None });
    }

    /// Adds the replica that it leads to the worker's report.
    pub(super) fn add_to(&self, report: &mut ModelsReport) {
        let lead = self.orders.borrow().lead.clone();
        let leads = self.leads.lock().clone();
        let Some((lead, leads)) = lead.zip(leads).filter(|(lead, leads)| lead.plan_index == leads.plan_index)
        else {
            return;
        };
        let Some(known) = report.models.iter_mut().find(|known| known.model == lead.model) else { return };
        let led = self.led.lock();
        let serves = led.node.as_ref().is_some_and(|node| node.engine().is_some());
        known.state = match leads.state {
            LeadState::Serving if serves => ModelState::Ready,
            LeadState::Serving | LeadState::Forming => ModelState::Loading,
            LeadState::Waiting => ModelState::Failed,
            LeadState::BadFile => ModelState::BadFile,
        };
        let permille = led.load.as_ref().map_or(0, HostedLoad::permille);
        known.permille = if serves { 1000 } else { permille.min(1000) as u16 };
        known.bytes = led.load.as_ref().map_or(0, HostedLoad::bytes);
        let idle = led.node.as_ref().filter(|_| serves).map_or(Duration::ZERO, |node| node.calls.idle());
        known.idle_ms = u64::try_from(idle.as_millis()).unwrap_or(u64::MAX);
        let failed = leads.state == LeadState::Waiting || leads.state == LeadState::BadFile;
        known.failures = leads.attempts.saturating_sub(u32::from(!failed));
        known.reason = leads.reason;
    }

    pub(super) fn drafter(&self) -> Option<OfferedDrafter> {
        self.drafter
    }

    /// Serves stages for replicas that other workers lead.
    pub(super) fn rank_server(&self) -> &Arc<RankServer> {
        &self.rank_server
    }

    /// Applies an order of a coordinator and returns this worker's placement state.
    pub(super) fn place(&self, order: PlaceOrder) -> PlaceReport {
        self.orders.send_if_modified(|current| {
            // Ignore a coordinator with an older version of the plan.
            let changed = order.version >= current.version && order != *current;
            if changed {
                self.shipper.set_holders(order.holders.clone());
                *current = order;
            }
            changed
        });
        let holds = self.rank_server.claims().and_then(Claims::plan_index);
        PlaceReport { leads: self.leads.lock().clone(), holds }
    }

    /// Runs epochs as coordinators plan them. `free` is the current epoch, which serves no model.
    pub(super) async fn run_epochs(
        &self,
        context: &NodeContext,
        free: NodeRun,
        node_tx: &watch::Sender<Arc<Node>>,
    ) {
        let (mut free, mut epoch) = (free, later_epoch(&Epoch(0)));
        let mut orders = self.orders.subscribe();
        loop {
            let (lead, drafter) = next_lead(&mut orders).await;
            self.set_leads(true);
            self.set_state(&lead, LeadState::Forming, None);
            let formed = self.form((&lead, drafter), &mut epoch, &mut orders).await;
            let Formed { prepared, mut lost } = match formed {
                Ok(formed) => formed,
                Err(error) => {
                    tracing::warn!(plan_index = lead.plan_index, %error, "cannot form the replica");
                    self.release().await;
                    self.give_up(&lead, &error, &mut orders).await;
                    continue;
                }
            };
            free.end();
            let (reason_tx, mut broken) = mpsc::unbounded_channel();
            epoch = later_epoch(&epoch);
            let mut run = context.begin(epoch, Some(reason_tx));
            run.loaded(Loaded::Generator(Box::new(prepared)), Some(&lead.model));
            self.led.lock().node = Some(Arc::clone(&run.node));
            node_tx.send_replace(Arc::clone(&run.node));
            self.set_state(&lead, LeadState::Serving, None);
            tracing::info!(
                plan_index = lead.plan_index,
                epoch = epoch.0,
                stages = lead.stages.len(),
                "the replica serves"
            );
            let reason = tokio::select! {
                Some(reason) = broken.recv() => reason,
                Ok(lost) = lost.wait_for(Option::is_some) => lost.clone().unwrap_or_default(),
                () = async {
                    given_up(&mut orders, &lead).await;
                    self.drained(&run.node).await;
                } => "another plan".to_owned(),
            };
            tracing::warn!(plan_index = lead.plan_index, epoch = epoch.0, reason, "the replica has ended");
            run.end();
            self.release().await;
            epoch = later_epoch(&epoch);
            free = context.begin(epoch, None);
            free.loaded(Loaded::Nothing, None);
            node_tx.send_replace(Arc::clone(&free.node));
            self.set_leads(false);
            self.set_state(&lead, LeadState::Waiting, Some(reason));
        }
    }

    /// Takes no further requests, and resolves when none runs, or after the drain timeout.
    async fn drained(&self, node: &Node) {
        node.retiring.store(true, Ordering::SeqCst);
        let ended = async {
            let mut tick = tokio::time::interval(DRAIN_TICK);
            while node.calls.running() > 0 {
                tick.tick().await;
            }
        };
        // Requests that run longer are repeated elsewhere.
        let _ = tokio::time::timeout(self.drain_timeout, ended).await;
    }

    /// Waits until the memory of a replica that has ended is free, up to [`FREE_LIMIT`].
    async fn release(&self) {
        let load = {
            let mut led = self.led.lock();
            led.node = None;
            led.load.take()
        };
        let (Some(load), Some(room)) = (load, &self.room) else { return };
        let freed = async {
            let mut tick = tokio::time::interval(DRAIN_TICK);
            while load.bytes() > 0 {
                tick.tick().await;
            }
        };
        if tokio::time::timeout(FREE_LIMIT, freed).await.is_err() {
            tracing::warn!(bytes = load.bytes(), "the memory of a replica is not free yet");
        }
        room.returned();
    }

    fn set_leads(&self, leads: bool) {
        self.rank_server.claims().into_iter().for_each(|claims| claims.leads(leads));
    }

    fn set_state(&self, lead: &Lead, state: LeadState, reason: Option<String>) {
        let mut leads = self.leads.lock();
        let previous = leads.take().filter(|previous| previous.plan_index == lead.plan_index);
        let (attempts, before) =
            previous.map_or((0, String::new()), |previous| (previous.attempts, previous.reason));
        let attempts = attempts.saturating_add(u32::from(state == LeadState::Forming));
        let reason = reason.unwrap_or(before);
        *leads = Some(LeadReport { plan_index: lead.plan_index, state, attempts, reason });
    }

    /// Waits until the next attempt is due or the plan changes.
    async fn give_up(&self, lead: &Lead, error: &Error, orders: &mut watch::Receiver<PlaceOrder>) {
        let of_file = error.is_of_content();
        let state = if of_file { LeadState::BadFile } else { LeadState::Waiting };
        self.set_leads(false);
        self.set_state(lead, state, Some(error.to_string()));
        tokio::select! {
            () = given_up(orders, lead) => self.leads.lock().take().map_or((), drop),
            () = tokio::time::sleep(RETRY_AFTER), if !of_file => {}
        }
    }

    /// Path of the planned model's file. Fetches its manifest from other workers if this worker has no file
    /// of its own.
    async fn locate(&self, lead: &Lead) -> Result<PathBuf, Error> {
        if let Some(path) = self.room.as_ref().and_then(|room| room.file(&lead.model_digest)) {
            return Ok(path);
        }
        let Some(path) = &self.model_path else {
            return Ok(self.shipper.locate(&lead.model_digest).await?);
        };
        let (own, options) = (path.clone(), self.engine.clone());
        // The file may have been replaced since it was offered.
        let found = tokio::task::spawn_blocking(move || load::model_digest(&own, &options)).await;
        if matches!(found, Ok(Ok(digest)) if digest == lead.model_digest) {
            return Ok(path.clone());
        }
        let reason = "this worker's file differs from the plan's model".to_owned();
        Err(engine::Error::Config { option: "model", reason }.into())
    }

    /// How the replica drafts, with the path of the draft model. The order's drafter takes precedence over
    /// this worker's own setting.
    async fn speculative_method(&self, drafter: Option<Drafter>) -> Result<SpeculativeMethod, Error> {
        let locate = |digest| async move {
            let (own, options) = (self.engine.speculative_method.file(), self.engine.clone());
            let digest_of = move |path: &Path| load::drafter_digest(path, &options);
            self.shipper.locate_drafter(&digest, own, digest_of).await
        };
        Ok(match drafter {
            None => self.engine.speculative_method.clone(),
            Some(Drafter::MtpHead) => SpeculativeMethod::MtpHead,
            Some(Drafter::Assistant(digest)) => SpeculativeMethod::Assistant(locate(digest).await?),
            Some(Drafter::Model(digest)) => SpeculativeMethod::Model(locate(digest).await?),
        })
    }

    /// Claims the other stages, has them load, and loads the first stage.
    async fn form(
        &self,
        (lead, drafter): (&Lead, Option<Drafter>),
        epoch: &mut Epoch,
        orders: &mut watch::Receiver<PlaceOrder>,
    ) -> Result<Formed, Error> {
        let path = tokio::select! {
            path = self.locate(lead) => path?,
            () = given_up(orders, lead) => return Err(another_plan()),
        };
        let speculative_method = tokio::select! {
            speculative_method = self.speculative_method(drafter) => speculative_method?,
            () = given_up(orders, lead) => return Err(another_plan()),
        };
        *epoch = later_epoch(epoch);
        let claim = ReplicaClaim { plan_index: lead.plan_index, epoch: *epoch };
        let downstream = lead.stages.iter().skip(1).map(|stage| stage.at.clone()).collect();
        let ranges: Vec<Range<usize>> =
            lead.stages.iter().map(|stage| stage.layers.0 as usize..stage.layers.1 as usize).collect();
        // A draft model runs at the first stage, all other drafters at the last one.
        let here = ranges.len() == 1 || matches!(speculative_method, SpeculativeMethod::Model(_));
        let needed = WantedLayers {
            layers: ranges.first().cloned(),
            speculative_method: if here { speculative_method.clone() } else { SpeculativeMethod::Off },
            embedding: false,
        };
        tokio::select! {
            fetched = self.shipper.fetch_missing(&path, needed) => fetched?,
            () = given_up(orders, lead) => return Err(another_plan()),
        }
        let mut options = EngineOptions { speculative_method, ..self.engine.clone() };
        if let (Some(room), Some(layers)) = (&self.room, ranges.first().cloned()) {
            let (context, priority) = self.led.lock().settings;
            if context > 0 {
                options.max_model_len = Some(context as usize);
            }
            let bytes = load::range_bytes(&path, &options, layers.clone(), None)?
                .saturating_add(load::range_cache(&path, &options, layers, lead.cache_bytes)?);
            let load = tokio::select! {
                load = room.load(bytes, priority) => load?,
                () = given_up(orders, lead) => return Err(another_plan()),
            };
            self.led.lock().load = Some(load.clone());
            options.hosted = Some(load);
        }
        let replica = Replica::new(Handle::current(), &self.identity, downstream, ActivationType::F32)?;
        let replica = replica.planned(ranges, claim);
        let (lost, endpoint) = (replica.lost(), replica.endpoint());
        let cache_bytes = lead.cache_bytes;
        let mut forming =
            tokio::task::spawn_blocking(move || load::prepare_replica(&path, &options, replica, cache_bytes));
        let formed = tokio::select! {
            formed = &mut forming => formed,
            () = given_up(orders, lead) => {
                endpoint.close().await;
                forming.await
            }
        };
        let prepared = formed.map_err(|_| engine::Error::EngineStopped)?;
        if let Err(Error::Engine(engine::Error::StageLost(stage_lost))) = &prepared
            && let transport::Error::StageClaimed(ClaimRefusal::Stale { plan_index, epoch: latest }) =
                &stage_lost.source
            && *plan_index == lead.plan_index
        {
            // The clock was set back since an earlier attempt.
            *epoch = (*epoch).max(*latest);
        }
        Ok(Formed { prepared: prepared?, lost })
    }
}

fn another_plan() -> Error {
    engine::Error::Config {
        option: "model",
        reason: "another plan arrived while the model was being fetched".to_owned(),
    }
    .into()
}

/// An epoch after `last`.
pub(super) fn later_epoch(last: &Epoch) -> Epoch {
    current_epoch().max(Epoch(last.0.saturating_add(1)))
}

/// Waits for a replica to lead, and returns it with its drafter, if the order has one.
async fn next_lead(orders: &mut watch::Receiver<PlaceOrder>) -> (Lead, Option<Drafter>) {
    loop {
        let PlaceOrder { lead, drafter, .. } = orders.borrow_and_update().clone();
        if let Some(lead) = lead {
            return (lead, drafter);
        }
        if orders.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Resolves when `lead` is no longer planned.
async fn given_up(orders: &mut watch::Receiver<PlaceOrder>, lead: &Lead) {
    let other = |order: &PlaceOrder| order.lead.as_ref().map(|lead| lead.plan_index) != Some(lead.plan_index);
    if orders.wait_for(other).await.is_err() {
        std::future::pending::<()>().await;
    }
}
