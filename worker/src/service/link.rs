//! One connection to a coordinator: registers, reports load, sends KV events and serves the streams that it
//! opens.

use super::runner::Runner;
use super::{Node, Offer, UnderWay, adapters, encode, end_epoch, generate, operation, sequences};
use engine::engine::resume::SequenceKey;
use engine::engine::thread::EXIT_BROKEN;
use proto::adapter::{AdapterOrder, AdapterRefusal, AdapterReport};
use proto::block::BlockId;
use proto::deployment::{ModelsOrder, ModelsReport};
use proto::event::KvReplay;
use proto::ids::{Epoch, ModelId};
use proto::log::Repeats;
use proto::message::image_encoder::EncoderReport;
use proto::placement::{PlaceOrder, PlaceReport};
use proto::sequence::{PromptProgress, SequenceName};
use proto::shard::ShippingReport;
use proto::worker::{CertificateReport, Refusal, Registered, WorkerStatus};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tarpc::context::Context;
use transport::service::{CoordinatorApiClient, WorkerApi, deadline};
use transport::{CloseCode, Connection, Incoming, KvEventSender};

/// Maximum events of a frame.
const EVENTS_PER_BATCH: usize = 512;
/// Longer replays cost more than a snapshot.
const MAX_REPLAY_EVENTS: usize = 4096;
const CALL_LIMIT: Duration = Duration::from_secs(5);
/// Interval between two checks for a changed weight download.
const SHIPPING_INTERVAL: Duration = Duration::from_millis(500);
/// Interval between two checks for a changed certificate.
const CERTIFICATE_INTERVAL: Duration = Duration::from_secs(5);

/// Coordinators that refused this worker, with the reason; limits the rate of log lines.
static REFUSED: Repeats = Repeats::new();

/// Serves the connection until it is closed.
pub(super) async fn run(node: &Arc<Node>, connection: Connection) {
    let offer = match loaded(node, &connection).await {
        Ok(offer) => offer,
        Err(reason) => {
            if let Some(left_out) = REFUSED.due((&node.node, connection.peer(), &reason)) {
                tracing::warn!(coordinator = %connection.peer().node, %reason, left_out, "a coordinator disconnected while the model was loading");
            }
            return;
        }
    };
    if node.twin.hold_back(&connection).await.is_err() {
        return;
    }
    let (api, registered, epoch) = match register(node, &offer, &connection).await {
        Ok(answer) => answer,
        Err(reason) => {
            if let Some(left_out) = REFUSED.due((&node.node, connection.peer(), &reason)) {
                tracing::warn!(coordinator = %connection.peer().node, %reason, left_out, "a coordinator refused the registration");
            }
            connection.close(CloseCode::Shutdown);
            return;
        }
    };
    let engine = match node.start_engine(registered.cluster_key.clone(), epoch) {
        Ok(engine) => engine,
        Err(error) => {
            if let Some(left_out) = REFUSED.due((&node.node, connection.peer(), error.to_string())) {
                tracing::error!(coordinator = %connection.peer().node, %error, left_out, "cannot start the engine for a coordinator; the connection is closed");
            }
            connection.close(CloseCode::Shutdown);
            // No coordinator with the earlier key is connected any more: end this epoch, so that the next one
            // starts with the key in use.
            if matches!(error, crate::Error::OtherKey) && *node.joined.borrow() == 0 {
                end_epoch(&Arc::downgrade(node), node.broken.as_ref(), &error, EXIT_BROKEN);
            }
            return;
        }
    };
    tracing::info!(coordinator = %connection.peer().node, "registered with a coordinator");
    node.link(&connection);
    node.joined.send_modify(|count| *count += 1);
    let reason = tokio::select! {
        reason = report(node, &api, &engine, &registered) => reason,
        reason = send_events(&connection, &engine) => reason,
        reason = serve(node, &connection, &engine) => reason,
        reason = report_shipping(node, &connection) => reason,
        reason = report_certificate(node, &connection) => reason,
        reason = report_adapters(node, &connection, epoch) => reason,
        reason = report_usage(node, &connection) => reason,
        reason = report_host(node, &connection, epoch) => reason,
        reason = report_encoder(&offer, &connection, epoch) => reason,
    };
    node.joined.send_modify(|count| *count -= 1);
    tracing::warn!(coordinator = %connection.peer().node, %reason, "the session with a coordinator has ended");
    connection.close(CloseCode::Shutdown);
}

/// Waits until the model is loaded, and reports the progress meanwhile.
async fn loaded(node: &Node, connection: &Connection) -> Result<Arc<Offer>, String> {
    let mut offers = node.offer.subscribe();
    let offered = async {
        let offer = offers.wait_for(Option::is_some).await.map_err(|error| error.to_string())?;
        offer.clone().ok_or_else(|| "there is no model".to_owned())
    };
    tokio::select! {
        offer = offered => offer,
        reason = report_shipping(node, connection) => Err(reason),
    }
}

/// Sends the coordinator the progress of the weight download whenever it changes.
async fn report_shipping(node: &Node, connection: &Connection) -> String {
    let api = match connection.coordinator_api().await {
        Ok(api) => api,
        Err(error) => return error.to_string(),
    };
    let mut last_sent = ShippingReport::default();
    let mut tick = tokio::time::interval(SHIPPING_INTERVAL);
    loop {
        tick.tick().await;
        let report = node.shipping_report();
        if report == last_sent {
            continue;
        }
        if let Err(error) = api.shipping(deadline(CALL_LIMIT), report.clone()).await {
            return error.to_string();
        }
        last_sent = report;
    }
}

/// Sends the coordinator the end of this worker's certificate whenever it changes.
async fn report_certificate(node: &Node, connection: &Connection) -> String {
    let api = match connection.coordinator_api().await {
        Ok(api) => api,
        Err(error) => return error.to_string(),
    };
    let mut last_sent = None;
    let mut tick = tokio::time::interval(CERTIFICATE_INTERVAL);
    loop {
        tick.tick().await;
        let ends = node.identity.validities().ok().map(|validities| validities.node.ends);
        if let Some(ends) = ends.filter(|ends| last_sent != Some(*ends)) {
            let report = CertificateReport { ends };
            if let Err(error) = api.certificate(deadline(CALL_LIMIT), report).await {
                tracing::debug!(%error, "cannot report the expiry of this worker's certificate to a coordinator");
            }
            last_sent = Some(ends);
        }
    }
}

/// Sends the coordinator the adapters, and again whenever they change. Sends nothing before there are any.
async fn report_adapters(node: &Node, connection: &Connection, epoch: Epoch) -> String {
    let api = match connection.coordinator_api().await {
        Ok(api) => api,
        Err(error) => return error.to_string(),
    };
    let mut adapters = node.adapters.subscribe();
    let mut sent = false;
    loop {
        let current = adapters.borrow_and_update().clone();
        if sent || !current.is_empty() {
            sent = true;
            let adapters = current.iter().map(|adapter| adapter.offered.clone()).collect();
            let report = AdapterReport { epoch, adapters };
            match api.adapters(deadline(CALL_LIMIT), report).await {
                Ok(Ok(())) => {}
                Ok(Err(refusal)) => return refusal.to_string(),
                Err(error) => tracing::warn!(%error, "a coordinator does not serve this worker's adapters"),
            }
        }
        if adapters.changed().await.is_err() {
            return "the node has ended".to_owned();
        }
    }
}

/// Reports usage, of all models on the connection of the worker itself.
async fn report_usage(node: &Node, connection: &Connection) -> String {
    match node.node.is_instance() {
        false => node.usage.report(connection).await,
        true => std::future::pending().await,
    }
}

/// Tells the coordinator that this worker loads models by order.
async fn report_host(node: &Node, connection: &Connection, epoch: Epoch) -> String {
    if let Some(host) = &node.host {
        let api = match connection.coordinator_api().await {
            Ok(api) => api,
            Err(error) => return error.to_string(),
        };
        match api.host(deadline(CALL_LIMIT), host.announcement(epoch)).await {
            Ok(Ok(())) => {}
            Ok(Err(refusal)) => return refusal.to_string(),
            Err(error) => tracing::warn!(%error, "a coordinator deploys no models to this worker"),
        }
    }
    std::future::pending().await
}

/// Tells the coordinator that this worker encodes images.
async fn report_encoder(offer: &Offer, connection: &Connection, epoch: Epoch) -> String {
    if let Some(tower) = offer.tower.clone() {
        let api = match connection.coordinator_api().await {
            Ok(api) => api,
            Err(error) => return error.to_string(),
        };
        if let Err(error) = api.encoder(deadline(CALL_LIMIT), EncoderReport { epoch, tower }).await {
            tracing::warn!(%error, "a coordinator has no images encoded by this worker");
        }
    }
    std::future::pending().await
}

async fn register(
    node: &Node,
    offer: &Offer,
    connection: &Connection,
) -> Result<(CoordinatorApiClient, Registered, Epoch), String> {
    let api = connection.coordinator_api().await.map_err(|error| error.to_string())?;
    let register = node.register(offer);
    let epoch = register.worker.epoch;
    let answer = api.register(deadline(CALL_LIMIT), register).await.map_err(|error| error.to_string())?;
    let registered = answer.map_err(|refusal| {
        match &refusal {
            Refusal::StaleEpoch { known } => node.raise_epoch(*known),
            Refusal::AlreadyHere { .. } => node.twin.record(connection),
            _ => {}
        }
        refusal.to_string()
    })?;
    node.twin.clear(connection);
    Ok((api, registered, epoch))
}

/// Reports load at regular intervals, and at once when it changes much.
async fn report(node: &Node, api: &CoordinatorApiClient, engine: &Runner, registered: &Registered) -> String {
    let every = Duration::from_millis(registered.report_every_ms.clamp(20, 60_000));
    let mut tick = tokio::time::interval(every);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // Every step that changes the cache emits events, so also report on events.
    let mut newest = engine.updates();
    let mut first = true;
    loop {
        if !first {
            tokio::select! {
                _ = tick.tick() => {}
                changed = newest.changed() => if changed.is_err() { return "the engine has stopped".to_owned() },
            }
        }
        first = false;
        match api.report(deadline(CALL_LIMIT), node.report()).await {
            Ok(Ok(())) => {}
            Ok(Err(refusal)) => return refusal.to_string(),
            Err(error) => return error.to_string(),
        }
    }
}

/// Sends every KV event from now on. The coordinator requests earlier ones.
async fn send_events(connection: &Connection, engine: &Runner) -> String {
    let sender = match connection.open_kv_events().await {
        Ok(sender) => sender,
        Err(error) => return error.to_string(),
    };
    stream_events(sender, engine).await
}

async fn stream_events(mut sender: KvEventSender, engine: &Runner) -> String {
    let mut newest = engine.updates();
    let mut next = engine.events().lock().last_sequence() + 1;
    loop {
        loop {
            let batch = engine.events().lock().since(next, EVENTS_PER_BATCH);
            match batch {
                Ok(batch) if batch.events.is_empty() => break,
                Ok(batch) => {
                    next = batch.first_sequence + batch.events.len() as u64;
                    if let Err(error) = sender.send(batch).await {
                        return error.to_string();
                    }
                }
                // The log no longer has the next event. Skip to the newest; the coordinator sees the gap and
                // takes a snapshot.
                Err(gap) => next = gap.last + 1,
            }
        }
        if newest.changed().await.is_err() {
            return "the engine has stopped".to_owned();
        }
    }
}

async fn serve(node: &Arc<Node>, connection: &Connection, engine: &Runner) -> String {
    loop {
        match connection.accept().await {
            Ok(Incoming::Generate(call)) => {
                tokio::spawn(run_call(node.call_begins(), generate::serve(node, connection, *call)));
            }
            Ok(Incoming::Encode(call)) => {
                tokio::spawn(run_call(node.call_begins(), encode::serve(node, connection, call)));
            }
            Ok(Incoming::Operation(call)) => {
                tokio::spawn(run_call(node.call_begins(), operation::serve(node, connection, *call)));
            }
            Ok(Incoming::Shard(call)) => {
                tokio::spawn(Arc::clone(&node.holdings).answer(call));
            }
            Ok(Incoming::Sequence(call)) => {
                tokio::spawn(sequences::serve(Arc::clone(node), call));
            }
            Ok(Incoming::WorkerRpc(rpc)) => {
                tokio::spawn(rpc.serve(Api { node: Arc::clone(node), engine: engine.clone() }));
            }
            Ok(Incoming::KvSnapshot(reply)) => {
                let snapshot = engine.events().lock().snapshot();
                tokio::spawn(async move {
                    if let Err(error) = reply.send(&snapshot).await {
                        tracing::debug!(%error, "a coordinator did not read a KV snapshot to the end");
                    }
                });
            }
            Ok(other) => tracing::warn!(?other, "refused a stream of a kind that workers do not serve"),
            Err(error) => return error.to_string(),
        }
    }
}

pub(super) async fn run_call(under_way: UnderWay, call: impl Future<Output = ()>) {
    call.await;
    drop(under_way);
}

#[derive(Clone)]
struct Api {
    node: Arc<Node>,
    engine: Runner,
}

impl WorkerApi for Api {
    async fn kv_replay(self, _: Context, from: u64) -> KvReplay {
        match self.engine.events().lock().since(from, MAX_REPLAY_EVENTS) {
            Ok(batch) if batch.events.len() < MAX_REPLAY_EVENTS => KvReplay::Events(batch),
            Ok(_) | Err(_) => KvReplay::TakeSnapshot,
        }
    }

    async fn drain(self, _: Context) {
        self.node.draining.store(true, Ordering::SeqCst);
    }

    async fn undrain(self, _: Context) {
        self.node.draining.store(false, Ordering::SeqCst);
    }

    async fn status(self, _: Context) -> WorkerStatus {
        self.node.status()
    }

    async fn metrics_text(self, _: Context) -> String {
        self.node.metrics_text()
    }

    async fn load_adapter(self, _: Context, order: AdapterOrder) -> Result<(), AdapterRefusal> {
        adapters::load(&self.node, &self.engine, order).await
    }

    async fn unload_adapter(self, _: Context, name: ModelId) -> Result<(), AdapterRefusal> {
        adapters::unload(&self.node, &self.engine, name).await
    }

    async fn models(self, _: Context, order: ModelsOrder) -> ModelsReport {
        let Some(host) = &self.node.host else { return ModelsReport::default() };
        self.node.pool.iter().for_each(|pool| pool.order(&order));
        let mut report = host.order(order);
        self.node.pool.iter().for_each(|pool| pool.add_to(&mut report));
        report
    }

    async fn prompt_progress(self, _: Context, root: BlockId, name: SequenceName) -> Option<PromptProgress> {
        let engine = self.engine.built_in()?;
        let key = SequenceKey { root, name };
        engine.call(move |engine| engine.prompt_progress(&key)).await.ok()?
    }

    async fn place(self, _: Context, order: PlaceOrder) -> PlaceReport {
        self.node.pool.as_ref().map(|pool| pool.place(order)).unwrap_or_default()
    }
}
