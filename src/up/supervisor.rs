//! Starts the nodes in order, waits until they form a cluster, restarts failed nodes, and drains at the end.

use super::child::{self, ChildState, Order};
use super::data_dir::DataDir;
use super::nodes::Nodes;
use crate::config::ConfigError;
use crate::node::StopSignals;
use crate::ops_client;
use anyhow::{Context, bail, ensure};
use proto::ids::Role;
use std::net::SocketAddr;
use std::process::ExitStatus;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Loading weights from a slow disk may take long.
const START_DEADLINE: Duration = Duration::from_secs(120);
/// Coordinators exit once their requests are finished; this limit is for those that hang.
const DRAIN_DEADLINE: Duration = Duration::from_secs(60);
const OPS_TIMEOUT: Duration = Duration::from_secs(5);
/// Polling interval of a coordinator's worker table while workers load.
const JOIN_POLL: Duration = Duration::from_millis(10);

enum Event {
    /// A node changed its state.
    Child(usize, ChildState),
    /// A failed node's restart delay has passed.
    Restart(usize),
    /// A stop signal was received.
    Stop,
}

/// Supervises all nodes.
pub(crate) struct Supervisor {
    dir: DataDir,
    nodes: Nodes,
    restart: bool,
    events: mpsc::UnboundedReceiver<Event>,
    sender: mpsc::UnboundedSender<Event>,
}

impl Supervisor {
    /// Must be created and driven on the main thread (see [`child::spawn`]), inside a runtime.
    pub(crate) fn new(dir: DataDir, nodes: Nodes, restart: bool) -> anyhow::Result<Self> {
        let (sender, events) = mpsc::unbounded_channel();
        tokio::spawn(forward(StopSignals::listen()?, sender.clone()));
        Ok(Self { dir, nodes, restart, events, sender })
    }

    /// Starts all nodes and returns when the cluster is ready; `false` if it was stopped first.
    pub(crate) async fn start(&mut self) -> anyhow::Result<bool> {
        let deadline = tokio::time::sleep(START_DEADLINE);
        tokio::pin!(deadline);
        for role in [Role::Coordinator, Role::Worker] {
            for index in self.nodes.of(role) {
                self.spawn(index)?;
            }
            while self.nodes.of(role).any(|index| self.nodes[index].announcement.is_none()) {
                tokio::select! {
                    event = self.events.recv() => if !self.starting(event)? { return Ok(false) },
                    () = &mut deadline => bail!("some nodes do not listen after {START_DEADLINE:?}"),
                }
            }
        }
        let joined =
            wait_until_joined(self.nodes.coordinator_ops(), self.nodes.worker_ids(), self.nodes.replicas());
        tokio::pin!(joined);
        loop {
            tokio::select! {
                found = &mut joined => { found?; break }
                event = self.events.recv() => if !self.starting(event)? { return Ok(false) },
                () = &mut deadline => bail!("some workers have not joined after {START_DEADLINE:?}"),
            }
        }
        self.dir.write_up_file(&self.nodes.up_line()?)?;
        for ops in self.nodes.coordinator_ops() {
            open_gate(ops).await?;
        }
        Ok(true)
    }

    /// Handles an event before the cluster is ready. A node that exits now is an error. `false` means stop.
    fn starting(&mut self, event: Option<Event>) -> anyhow::Result<bool> {
        match event {
            Some(Event::Child(index, ChildState::Listens(announcement))) => {
                self.nodes.listens(index, announcement);
                Ok(true)
            }
            Some(Event::Child(index, ChildState::Ended(status))) => {
                let name = self.nodes[index].name.clone();
                Err(did_not_start(&name, status, &self.dir.log_tail(&name)))
            }
            Some(Event::Restart(_)) => Ok(true),
            Some(Event::Stop) | None => Ok(false),
        }
    }

    /// Supervises the cluster until a stop signal.
    pub(crate) async fn run(&mut self) -> anyhow::Result<()> {
        loop {
            match self.events.recv().await {
                None | Some(Event::Stop) => return Ok(()),
                // A full disk or another lack of resources must not end the running nodes.
                Some(Event::Restart(index)) => {
                    if let Err(error) = self.spawn(index) {
                        self.ended(index, Err(error))?;
                    }
                }
                Some(Event::Child(index, ChildState::Listens(announcement))) => {
                    self.nodes.listens(index, announcement);
                    if let Err(error) = self.dir.write_up_file(&self.nodes.up_line()?) {
                        tracing::warn!(
                            "cannot write up.json, so commands do not find this cluster: {error:#}"
                        );
                    }
                    if let (Role::Coordinator, Some(ops)) = (self.nodes[index].role, self.nodes[index].ops())
                    {
                        tokio::spawn(reopen_gate(ops, self.nodes.worker_ids(), self.nodes.replicas()));
                    }
                }
                Some(Event::Child(index, ChildState::Ended(status))) => self.ended(index, status)?,
            }
        }
    }

    fn ended(&mut self, index: usize, status: anyhow::Result<ExitStatus>) -> anyhow::Result<()> {
        let node = &mut self.nodes[index];
        node.ended();
        let how = status.map_or_else(|error| format!("{error:#}"), |status| status.to_string());
        tracing::warn!(node = %node.name, %how, "a node has exited");
        if node.role == Role::Worker {
            // Immediately: waiting for the idle timeout of its connections would delay requests by seconds.
            for ops in self.nodes.coordinator_ops() {
                tokio::spawn(report_dead(ops, self.nodes[index].name.clone()));
            }
        }
        if self.restart {
            let wait = self.nodes[index].backoff();
            let sender = self.sender.clone();
            tokio::spawn(async move {
                tokio::time::sleep(wait).await;
                // The receiver is gone once the cluster is stopping.
                let _ = sender.send(Event::Restart(index));
            });
        } else {
            ensure!(self.nodes.any_alive(), "all nodes have exited");
        }
        Ok(())
    }

    /// Drains coordinators, then workers. A second signal or the deadline ends them at once.
    pub(crate) async fn drain(mut self) -> anyhow::Result<()> {
        if let Err(error) = self.dir.forget_up_file() {
            tracing::warn!("{error:#}");
        }
        let deadline = tokio::time::sleep(DRAIN_DEADLINE);
        tokio::pin!(deadline);
        let mut now = false;
        for role in [Role::Coordinator, Role::Worker] {
            self.nodes.order(role, if now { Order::Kill } else { Order::Drain });
            while self.nodes.of(role).any(|index| self.nodes[index].is_alive()) {
                tokio::select! {
                    event = self.events.recv() => match event {
                        Some(Event::Child(index, ChildState::Ended(_))) => self.nodes[index].ended(),
                        Some(Event::Child(_, ChildState::Listens(_)) | Event::Restart(_)) => {}
                        Some(Event::Stop) | None => { now = true; self.nodes.order(role, Order::Kill) }
                    },
                    () = &mut deadline, if !now => { now = true; self.nodes.order(role, Order::Kill) }
                }
            }
        }
        Ok(())
    }

    pub(crate) fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    fn spawn(&mut self, index: usize) -> anyhow::Result<()> {
        let settings = self.nodes.settings(index)?;
        let node = &mut self.nodes[index];
        let file = self.dir.write_settings(&node.name, &settings)?;
        let file = file.to_str().context("the data directory's path is not UTF-8")?;
        // The environment of this process must not override the settings file.
        let hidden: Vec<String> =
            settings.keys().map(|key| format!("KVASIR_{}", key.to_uppercase())).collect();
        let child = child::spawn(&[node.role.as_str(), "--config", file], &self.dir.log(&node.name), &hidden)
            .with_context(|| node.name.clone())?;
        let (orders, receiver) = mpsc::unbounded_channel();
        node.started(orders, Instant::now());
        let sender = self.sender.clone();
        tokio::spawn(child::watch(child, receiver, move |state| {
            // The receiver is gone once the command has finished.
            let _ = sender.send(Event::Child(index, state));
        }));
        Ok(())
    }
}

async fn forward(mut signals: StopSignals, sender: mpsc::UnboundedSender<Event>) {
    loop {
        signals.next().await;
        if sender.send(Event::Stop).is_err() {
            return;
        }
    }
}

/// The error for a node that exited before the cluster was ready; a configuration error stays one.
fn did_not_start(name: &str, status: anyhow::Result<ExitStatus>, log: &str) -> anyhow::Error {
    const BAD_CONFIG: i32 = crate::BAD_CONFIG as i32;
    match status {
        Err(error) => error.context(format!("{name} did not start")),
        Ok(status) if status.code() == Some(BAD_CONFIG) => {
            ConfigError::Node { name: name.to_owned(), log: log.to_owned() }.into()
        }
        Ok(status) => anyhow::anyhow!("{name} did not start ({status}):\n{log}"),
    }
}

async fn call_ops(ops: SocketAddr, method: &'static str, path: String) -> anyhow::Result<String> {
    let answer =
        tokio::task::spawn_blocking(move || ops_client::request(ops, method, &path, OPS_TIMEOUT)).await;
    answer.context("the query of a coordinator failed")?.and_then(ops_client::OpsResponse::success)
}

/// Returns when every coordinator lists every worker as ready, and `replicas` replicas of several workers as
/// serving.
async fn wait_until_joined(
    coordinators: Vec<SocketAddr>,
    workers: Vec<String>,
    replicas: usize,
) -> anyhow::Result<()> {
    for ops in coordinators {
        loop {
            let body = call_ops(ops, "GET", "/admin/v1/cluster".into()).await?;
            let table: serde_json::Value =
                serde_json::from_str(&body).context("the coordinator's response is not valid JSON")?;
            let listed = table["workers"].as_array().map(Vec::as_slice).unwrap_or_default();
            let ready = |id: &String| listed.iter().any(|w| w["id"] == id.as_str() && w["state"] == "ready");
            let stages = |replica: &serde_json::Value| replica["stages"].as_array().map_or(0, Vec::len);
            let serves = |replica: &&serde_json::Value| replica["state"] == "serving" && stages(replica) > 1;
            let planned = table["replicas"].as_array().map(Vec::as_slice).unwrap_or_default();
            let lists = |replica: &&serde_json::Value| {
                let lead = &replica["stages"][0]["worker"];
                listed
                    .iter()
                    .any(|w| w["id"] == *lead && w["models"].as_array().is_some_and(|m| !m.is_empty()))
            };
            let serving = planned.iter().filter(serves).filter(lists).count();
            if workers.iter().all(ready) && serving >= replicas {
                break;
            }
            tokio::time::sleep(JOIN_POLL).await;
        }
    }
    Ok(())
}

/// Makes a coordinator's `/readyz` succeed.
async fn open_gate(ops: SocketAddr) -> anyhow::Result<()> {
    call_ops(ops, "POST", "/admin/v1/ready".into())
        .await
        .with_context(|| format!("coordinator {ops}"))
        .map(drop)
}

/// The same after a coordinator's restart, once its workers have reconnected.
async fn reopen_gate(ops: SocketAddr, workers: Vec<String>, replicas: usize) {
    let opened = tokio::time::timeout(START_DEADLINE, async {
        wait_until_joined(vec![ops], workers, replicas).await?;
        open_gate(ops).await
    });
    match opened.await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%ops, "cannot make a restarted coordinator ready: {error:#}"),
        Err(_) => tracing::warn!(%ops, "a restarted coordinator is not ready: workers are still missing"),
    }
}

async fn report_dead(ops: SocketAddr, worker: String) {
    if let Err(error) = call_ops(ops, "POST", format!("/admin/v1/workers/{worker}/dead")).await {
        tracing::warn!(%ops, worker, "cannot report a dead worker to a coordinator, which waits for its lease to end: {error:#}");
    }
}
