//! The nodes of a cluster on this machine: identities, settings and states.

use super::child::Order;
use crate::coordinator::CoordinatorSettings;
use crate::node::Announcement;
use crate::worker::WorkerSettings;
use anyhow::Context;
use proto::ids::Role;
use serde_json::json;
use std::net::SocketAddr;
use std::ops::{Index, IndexMut};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const LONGEST_BACKOFF: Duration = Duration::from_secs(10);
/// A node that ran this long restarts with the shortest delay.
const HEALTHY_UPTIME: Duration = Duration::from_secs(30);

/// A node, running or not.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) role: Role,
    settings: Settings,
    /// `Some` while the process lives.
    orders: Option<mpsc::UnboundedSender<Order>>,
    /// `Some` while it listens.
    pub(crate) announcement: Option<Announcement>,
    started: Option<Instant>,
    /// Consecutive early exits.
    crashes: u32,
}

#[derive(Debug)]
enum Settings {
    Coordinator(Box<CoordinatorSettings>),
    Worker(Box<WorkerSettings>),
}

impl Node {
    pub(crate) fn ops(&self) -> Option<SocketAddr> {
        self.announcement.as_ref().map(|announcement| announcement.ops)
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.orders.is_some()
    }

    pub(crate) fn started(&mut self, orders: mpsc::UnboundedSender<Order>, now: Instant) {
        self.orders = Some(orders);
        self.started = Some(now);
    }

    pub(crate) fn ended(&mut self) {
        self.orders = None;
        self.announcement = None;
    }

    /// Delay before the next start, after an exit now.
    pub(crate) fn backoff(&mut self) -> Duration {
        let uptime = self.started.map_or(Duration::ZERO, |started| started.elapsed());
        self.crashes = if uptime >= HEALTHY_UPTIME { 0 } else { self.crashes.saturating_add(1) };
        backoff_after(self.crashes)
    }
}

/// The delay doubles with every consecutive early exit.
fn backoff_after(crashes: u32) -> Duration {
    FIRST_BACKOFF.saturating_mul(1 << crashes.saturating_sub(1).min(16)).min(LONGEST_BACKOFF)
}

/// All nodes, coordinators first.
#[derive(Debug)]
pub(crate) struct Nodes {
    nodes: Vec<Node>,
    model: String,
    /// Number of replicas of several workers each; `None` if each worker serves the whole model.
    replicas: Option<usize>,
}

impl Nodes {
    /// `coordinators` and `workers` are node names, `model` is the id in the API, `replicas` the number of
    /// replicas of several workers each.
    pub(crate) fn new(
        model: String,
        coordinators: Vec<(String, CoordinatorSettings)>,
        workers: Vec<(String, WorkerSettings)>,
        replicas: Option<usize>,
    ) -> Self {
        let node = |name, role, settings| Node {
            name,
            role,
            settings,
            orders: None,
            announcement: None,
            started: None,
            crashes: 0,
        };
        let coordinators = coordinators
            .into_iter()
            .map(|(name, s)| node(name, Role::Coordinator, Settings::Coordinator(Box::new(s))));
        let workers =
            workers.into_iter().map(|(name, s)| node(name, Role::Worker, Settings::Worker(Box::new(s))));
        Self { nodes: coordinators.chain(workers).collect(), model, replicas }
    }

    /// Indices of all nodes of a role.
    pub(crate) fn of(&self, role: Role) -> impl Iterator<Item = usize> + use<> {
        let indices: Vec<usize> =
            (0..self.nodes.len()).filter(|index| self.nodes[*index].role == role).collect();
        indices.into_iter()
    }

    /// Records where a node listens. A coordinator keeps its ports over restarts, since other nodes use them.
    pub(crate) fn listens(&mut self, index: usize, announcement: Announcement) {
        let node = &mut self.nodes[index];
        if let Settings::Coordinator(settings) = &mut node.settings {
            settings.http = announcement.http.or(settings.http);
            settings.ops = Some(announcement.ops);
            settings.quic = Some(announcement.quic);
        }
        node.announcement = Some(announcement);
    }

    /// A node's settings. A worker's settings contain the coordinators' current addresses.
    pub(crate) fn settings(&self, index: usize) -> anyhow::Result<toml::Table> {
        let table = match &self.nodes[index].settings {
            Settings::Coordinator(settings) => toml::Table::try_from(settings),
            Settings::Worker(settings) => {
                let coordinators = self.nodes.iter().filter_map(|node| match &node.settings {
                    Settings::Coordinator(settings) => settings.quic,
                    Settings::Worker(_) => None,
                });
                toml::Table::try_from(WorkerSettings {
                    coordinators: Some(coordinators.map(|address| address.to_string()).collect()),
                    ..WorkerSettings::clone(settings)
                })
            }
        };
        table.context("cannot write the node's settings")
    }

    pub(crate) fn any_alive(&self) -> bool {
        self.nodes.iter().any(Node::is_alive)
    }

    /// Sends an order to all running nodes of a role.
    pub(crate) fn order(&self, role: Role, order: Order) {
        for node in self.nodes.iter().filter(|node| node.role == role) {
            // A node that just exited receives nothing; its exit is reported anyway.
            let _ = node.orders.as_ref().map(|orders| orders.send(order));
        }
    }

    /// Ops addresses of the listening coordinators.
    pub(crate) fn coordinator_ops(&self) -> Vec<SocketAddr> {
        self.nodes.iter().filter(|node| node.role == Role::Coordinator).filter_map(Node::ops).collect()
    }

    pub(crate) fn worker_ids(&self) -> Vec<String> {
        self.of(Role::Worker).map(|index| self.nodes[index].name.clone()).collect()
    }

    pub(crate) fn replicas(&self) -> usize {
        self.replicas.unwrap_or(0)
    }

    /// Announcements of the listening nodes of a role.
    pub(crate) fn listening(&self, role: Role) -> impl Iterator<Item = &Announcement> {
        self.nodes.iter().filter(move |node| node.role == role).filter_map(|node| node.announcement.as_ref())
    }

    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    /// The content of `up.json`, one line.
    pub(crate) fn up_line(&self) -> anyhow::Result<String> {
        let coordinators: Vec<_> = self.listening(Role::Coordinator).collect();
        let workers: Vec<_> = self.listening(Role::Worker).collect();
        let up = json!({"coordinators": coordinators, "workers": workers, "model": self.model});
        serde_json::to_string(&up).context("cannot write up.json")
    }
}

impl Index<usize> for Nodes {
    type Output = Node;
    fn index(&self, index: usize) -> &Node {
        &self.nodes[index]
    }
}

impl IndexMut<usize> for Nodes {
    fn index_mut(&mut self, index: usize) -> &mut Node {
        &mut self.nodes[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn announcement(id: &str, port: u16, http: Option<u16>) -> Announcement {
        let at = |port| SocketAddr::from(([127, 0, 0, 1], port));
        Announcement { id: id.into(), pid: 7, http: http.map(at), ops: at(port), quic: at(port + 1) }
    }

    fn nodes() -> Nodes {
        let coordinator = CoordinatorSettings { http: "127.0.0.1:0".parse().ok(), ..Default::default() };
        Nodes::new(
            "m".into(),
            vec![("coordinator-0".into(), coordinator)],
            vec![("worker-0".into(), WorkerSettings::default())],
            None,
        )
    }

    #[test]
    fn up_json_has_the_keys_of_the_contract_in_order() {
        let mut nodes = nodes();
        nodes.listens(0, announcement("coordinator-0", 9090, Some(8080)));
        nodes.listens(1, announcement("worker-0", 9100, None));
        assert_eq!(
            nodes.up_line().unwrap(),
            r#"{"coordinators":[{"id":"coordinator-0","pid":7,"http":"127.0.0.1:8080","ops":"127.0.0.1:9090","quic":"127.0.0.1:9091"}],"workers":[{"id":"worker-0","pid":7,"ops":"127.0.0.1:9100","quic":"127.0.0.1:9101"}],"model":"m"}"#
        );
    }

    #[test]
    fn a_coordinator_keeps_its_ports_and_workers_learn_them() {
        let mut nodes = nodes();
        nodes.listens(0, announcement("coordinator-0", 9090, Some(8080)));
        nodes[0].ended();
        assert_eq!(nodes.settings(0).unwrap()["http"].as_str(), Some("127.0.0.1:8080"));
        let coordinators = nodes.settings(1).unwrap()["coordinators"].clone();
        assert_eq!(coordinators, toml::Value::Array(vec!["127.0.0.1:9091".into()]));
    }

    #[test]
    fn waits_double_up_to_a_limit() {
        let waits: Vec<u128> =
            [1, 2, 3, 7, 8, 1000].map(backoff_after).iter().map(Duration::as_millis).collect();
        assert_eq!(waits, [100, 200, 400, 6400, 10_000, 10_000]);
    }
}
