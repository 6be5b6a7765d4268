//! A cluster whose nodes are on separate simulated hosts: coordinators and workers with certificates, started
//! as by an operator, on a [`Net`] with injectable faults. Everything ends when it is dropped.

use crate::testnet::Net;
use crate::{binary, http, signal, wait};
use anyhow::{Context, bail, ensure};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tempfile::TempDir;

/// Two busy fleets at once on two cores would disturb each other's timing.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Waits until no fleet runs, and excludes fleets while the value exists.
pub fn exclude_fleets() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Every node has its own host, so all use the same ports.
const HTTP: u16 = 8080;
const OPS: u16 = 9090;
const QUIC: u16 = 7000;

/// A node, by role and index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Node {
    Coordinator(usize),
    Worker(usize),
}

/// Options of a fleet.
#[derive(Debug)]
pub struct Builder {
    name: String,
    model: String,
    coordinators: usize,
    workers: usize,
    coordinator_flags: Vec<String>,
    worker_flags: Vec<String>,
    holder_flags: Vec<String>,
    /// Flags of single workers.
    own_flags: Vec<(usize, [String; 2])>,
    environment: Vec<(String, String)>,
    binary: Option<PathBuf>,
    spares: usize,
    fileless: Option<Fileless>,
    takes_lock: bool,
}

/// How all workers but the first get the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fileless {
    /// By placement; they have no setting for it.
    Placed,
    /// From the first worker, by name.
    From,
}

/// A running cluster.
#[derive(Debug)]
pub struct Fleet {
    shape: Builder,
    net: Net,
    dir: TempDir,
    /// Running process of each host.
    processes: Vec<Mutex<Option<Child>>>,
    /// Binary of each host; `None` for the binary under test.
    binaries: Mutex<Vec<Option<PathBuf>>>,
    /// `--peers` of each coordinator, if it differs from the real group.
    peers: Mutex<Vec<Option<String>>>,
    /// API key of the clients.
    key: Mutex<Option<String>>,
    _lock: Option<MutexGuard<'static, ()>>,
}

impl Builder {
    /// Adds a flag with its value for every coordinator.
    pub fn coordinator_flag(mut self, flag: &str, value: &str) -> Self {
        self.coordinator_flags.extend([flag.to_owned(), value.to_owned()]);
        self
    }

    /// Adds a flag with its value for every worker.
    pub fn worker_flag(mut self, flag: &str, value: &str) -> Self {
        self.worker_flags.extend([flag.to_owned(), value.to_owned()]);
        self
    }

    /// Adds a flag with its value for one worker.
    pub fn flag_of(mut self, worker: usize, flag: &str, value: &str) -> Self {
        self.own_flags.push((worker, [flag.to_owned(), value.to_owned()]));
        self
    }

    /// Adds a flag with its value for every worker that has the model's file.
    pub fn holder_flag(mut self, flag: &str, value: &str) -> Self {
        self.holder_flags.extend([flag.to_owned(), value.to_owned()]);
        self
    }

    /// Only the first worker has the model's file.
    pub fn fileless(mut self, how: Fileless) -> Self {
        self.fileless = Some(how);
        self
    }

    /// Adds an environment variable for every node.
    pub fn environment(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Uses this binary for all nodes until [`Fleet::use_binary`] changes it.
    pub fn binary(mut self, binary: &Path) -> Self {
        self.binary = Some(binary.to_owned());
        self
    }

    /// Adds a host without a node: see [`Fleet::start_twin`].
    pub fn spare_host(mut self) -> Self {
        self.spares += 1;
        self
    }

    /// Allows other fleets at the same time, because this test mostly waits.
    pub fn in_parallel(mut self) -> Self {
        self.takes_lock = false;
        self
    }

    /// Starts all nodes and waits until every coordinator can use every worker. `seed` is for the network.
    pub fn start(self, seed: u64) -> anyhow::Result<Fleet> {
        let lock = self.takes_lock.then(exclude_fleets);
        let hosts = self.coordinators + self.workers + self.spares;
        let dir = tempfile::tempdir()?;
        authority(dir.path())?;
        let net = Net::new(hosts, seed)?;
        let processes = (0..hosts).map(|_| Mutex::new(None)).collect();
        let binaries = Mutex::new(vec![self.binary.clone(); hosts]);
        let peers = Mutex::new(vec![None; self.coordinators]);
        let key = Mutex::new(None);
        let fleet = Fleet { shape: self, net, dir, processes, binaries, peers, key, _lock: lock };
        // Tests count lines, so logs of earlier runs must not be there.
        std::fs::remove_dir_all(fleet.logs()?)?;
        for node in fleet.nodes() {
            fleet.make_identity(node)?;
            fleet.start(node)?;
        }
        for coordinator in 0..fleet.shape.coordinators {
            fleet.wait_for_workers(coordinator, fleet.shape.workers)?;
        }
        Ok(fleet)
    }
}

impl Fleet {
    /// Builds a cluster that serves `model`; its nodes' logs are kept under `name`.
    pub fn builder(name: &str, model: &str, coordinators: usize, workers: usize) -> Builder {
        let [name, model] = [name, model].map(str::to_owned);
        Builder {
            name,
            model,
            coordinators,
            workers,
            coordinator_flags: Vec::new(),
            worker_flags: Vec::new(),
            holder_flags: Vec::new(),
            own_flags: Vec::new(),
            environment: Vec::new(),
            binary: None,
            spares: 0,
            fileless: None,
            takes_lock: true,
        }
    }

    /// The nodes' network.
    pub fn net(&self) -> &Net {
        &self.net
    }

    /// The host of a node.
    pub fn host(&self, node: Node) -> usize {
        match node {
            Node::Coordinator(index) => index,
            Node::Worker(index) => self.shape.coordinators + index,
        }
    }

    /// Runs `work` on a node's host, where its HTTP ports are reachable: [`api`] and [`ops`].
    pub fn on_host<T: Send>(&self, node: Node, work: impl FnOnce() -> T + Send) -> anyhow::Result<T> {
        self.net.on(self.host(node), work)
    }

    /// Sends a JSON body to a coordinator's API. The response can be read on any host.
    pub fn post(
        &self,
        coordinator: usize,
        path: &str,
        body: &serde_json::Value,
    ) -> anyhow::Result<http::HttpAnswer> {
        let key = self.key.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let bearer = format!("Bearer {}", key.as_deref().unwrap_or("any"));
        self.post_with(coordinator, path, &[("authorization", &bearer)], body)
    }

    /// Sends a JSON body and further headers to a coordinator's API.
    pub fn post_with(
        &self,
        coordinator: usize,
        path: &str,
        headers: &[(&str, &str)],
        body: &serde_json::Value,
    ) -> anyhow::Result<http::HttpAnswer> {
        self.on_host(Node::Coordinator(coordinator), || http::post_with(api(), path, headers, body))?
    }

    /// Sets the API key of all later [`Fleet::post`].
    pub fn use_key(&self, key: &str) {
        *self.key.lock().unwrap_or_else(PoisonError::into_inner) = Some(key.to_owned());
    }

    /// `/admin/v1/cluster` of a coordinator.
    pub fn status(&self, coordinator: usize) -> anyhow::Result<serde_json::Value> {
        self.on_host(Node::Coordinator(coordinator), || http::get(ops(), "/admin/v1/cluster")?.ok())?
    }

    /// Sum over all series of a metric at a coordinator; 0 if there are none.
    pub fn metric(&self, coordinator: usize, name: &str) -> anyhow::Result<f64> {
        let sum = self.on_host(Node::Coordinator(coordinator), || http::metric(ops(), name))?;
        Ok(sum.unwrap_or(0.0))
    }

    /// Waits until a coordinator has `count` workers that accept work.
    pub fn wait_for_workers(&self, coordinator: usize, count: usize) -> anyhow::Result<()> {
        wait::until(&format!("coordinator {coordinator} has {count} workers"), binary::NODE_TIMEOUT, || {
            let status = self.status(coordinator).ok()?;
            let workers = status["workers"].as_array()?;
            (workers.iter().filter(|worker| worker["state"] == "ready").count() == count).then_some(())
        })
    }

    /// The model's id in the API.
    pub fn model(&self) -> anyhow::Result<String> {
        let status = self.status(0)?;
        Ok(status["models"][0]["id"].as_str().context("no model is served")?.to_owned())
    }

    /// Process id of a node; `None` if it does not run.
    pub fn pid(&self, node: Node) -> Option<u32> {
        self.process(node).as_ref().map(Child::id)
    }

    /// Kills a node, as a power cut would.
    pub fn kill(&self, node: Node) -> anyhow::Result<()> {
        let mut process = self.process(node).take().context("it does not run")?;
        process.kill()?;
        process.wait()?;
        Ok(())
    }

    /// Pauses or resumes a node.
    pub fn freeze(&self, node: Node, frozen: bool) -> anyhow::Result<()> {
        signal::freeze(self.pid(node).context("it does not run")?, frozen);
        Ok(())
    }

    /// Stops a node with SIGTERM and returns its exit code.
    pub fn stop(&self, node: Node) -> anyhow::Result<Option<i32>> {
        signal::terminate(self.pid(node).context("it does not run")?);
        self.ended(node)
    }

    /// Waits until a node has exited. Returns its exit code; `None` if a signal ended it.
    pub fn ended(&self, node: Node) -> anyhow::Result<Option<i32>> {
        let mut process = self.process(node).take().context("it does not run")?;
        let ended = wait::until("it ends", binary::NODE_TIMEOUT, || process.try_wait().transpose());
        if ended.is_err() {
            process.kill()?;
            process.wait()?;
        }
        Ok(ended??.code())
    }

    /// Starts a stopped node and waits until it listens.
    pub fn start(&self, node: Node) -> anyhow::Result<()> {
        self.start_on(self.host(node), node)
    }

    /// Sets the binary for the next start of a node; `None` is the binary under test.
    pub fn use_binary(&self, node: Node, binary: Option<&Path>) {
        let mut binaries = self.binaries.lock().unwrap_or_else(PoisonError::into_inner);
        binaries[self.host(node)] = binary.map(Path::to_owned);
    }

    /// Sets `--peers` for the next start of a coordinator.
    pub fn use_peers(&self, coordinator: usize, peers: &str) {
        let mut configured = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        configured[coordinator] = Some(peers.to_owned());
    }

    /// Starts a second instance of a node, which may still run, on a spare host. It ends with the fleet.
    pub fn start_twin(&self, node: Node, spare: usize) -> anyhow::Result<()> {
        ensure!(spare < self.shape.spares, "there are {} spare hosts", self.shape.spares);
        self.start_on(self.spare(spare), node)
    }

    /// A spare host.
    pub fn spare(&self, spare: usize) -> usize {
        self.shape.coordinators + self.shape.workers + spare
    }

    fn start_on(&self, host: usize, node: Node) -> anyhow::Result<()> {
        let mut running = self.process_on(host);
        ensure!(running.is_none(), "{node:?} runs already");
        let arguments = self.arguments(host, node)?;
        let log = File::options().create(true).append(true).open(self.log(node)?)?;
        let binary = self.binaries.lock().unwrap_or_else(PoisonError::into_inner)[host].clone();
        let mut process = self.net.on(host, || {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            let mut command = match binary {
                Some(binary) => binary::command_of(&binary, &arguments),
                None => binary::command(&arguments)?,
            };
            command.envs(self.shape.environment.iter().map(|(name, value)| (name, value)));
            Ok::<_, anyhow::Error>(command.stdout(Stdio::piped()).stderr(log).spawn()?)
        })??;
        let mut stdout = BufReader::new(process.stdout.take().context("no stdout")?);
        *running = Some(process);
        let mut line = String::new();
        stdout.read_line(&mut line)?;
        if line.is_empty() {
            // The process has exited or is about to.
            let code = running.take().map(|mut process| process.wait()).transpose()?;
            bail!("{node:?} ended before it listened: {code:?}; see {}", self.log(node)?.display());
        }
        Ok(())
    }

    /// All nodes, coordinators first.
    pub fn nodes(&self) -> Vec<Node> {
        let coordinators = (0..self.shape.coordinators).map(Node::Coordinator);
        coordinators.chain((0..self.shape.workers).map(Node::Worker)).collect()
    }

    /// A node's persistent directory.
    pub fn data_dir(&self, node: Node) -> PathBuf {
        self.dir.path().join(name(node))
    }

    /// Arguments of the next start of a node.
    pub fn command_line(&self, node: Node) -> anyhow::Result<Vec<String>> {
        self.arguments(self.host(node), node)
    }

    fn process(&self, node: Node) -> MutexGuard<'_, Option<Child>> {
        self.process_on(self.host(node))
    }

    fn process_on(&self, host: usize) -> MutexGuard<'_, Option<Child>> {
        self.processes[host].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn make_identity(&self, node: Node) -> anyhow::Result<()> {
        let (role, name) = match node {
            Node::Coordinator(_) => ("coordinator", name(node)),
            Node::Worker(_) => ("worker", name(node)),
        };
        let [ca, out] = [self.dir.path().join("ca"), self.data_dir(node).join("identity")].map(text);
        binary::stdout(&["ca", "issue", "--dir", &ca?, "--role", role, "--node", &name, "--out", &out?])?;
        Ok(())
    }

    fn arguments(&self, host: usize, node: Node) -> anyhow::Result<Vec<String>> {
        let quic = SocketAddr::from((self.net.address(host), QUIC)).to_string();
        let [ops, api] = [ops(), api()].map(|address| address.to_string());
        let identity = text(self.data_dir(node).join("identity"))?;
        let cluster_key = text(self.dir.path().join("cluster.key"))?;
        let coordinators: Vec<String> = (0..self.shape.coordinators)
            .map(|index| SocketAddr::from((self.net.address(index), QUIC)).to_string())
            .collect();
        let peers = (0..).map(|index| name(Node::Coordinator(index))).zip(&coordinators);
        let peers = peers.map(|(name, quic)| format!("{name}={quic}")).collect::<Vec<_>>().join(",");
        let coordinators = coordinators.join(",");
        let data = text(self.data_dir(node).join("data"))?;
        let model = self.shape.model.clone();
        let common = [("--identity", identity), ("--quic", quic), ("--ops", ops)];
        let (command, own, more) = match node {
            Node::Coordinator(index) => {
                let configured = self.peers.lock().unwrap_or_else(PoisonError::into_inner)[index].clone();
                let peers = configured.unwrap_or(peers);
                let own = vec![("--models", model), ("--http", api), ("--cluster-key", cluster_key)];
                let own = own.into_iter().chain([("--peers", peers), ("--data-dir", data)]).collect();
                ("coordinator", own, self.shape.coordinator_flags.clone())
            }
            Node::Worker(index) => {
                let mut own = vec![("--coordinators", coordinators), ("--threads", "1".into())];
                let mut more = self.shape.worker_flags.clone();
                match self.shape.fileless.filter(|_| index > 0) {
                    None => {
                        own.push(("--model", model));
                        more.extend(self.shape.holder_flags.iter().cloned());
                    }
                    Some(Fileless::Placed) => {}
                    Some(Fileless::From) => {
                        let name = Path::new(&model).file_stem().context("a file")?.to_string_lossy();
                        let first = self.net.address(self.host(Node::Worker(0)));
                        own.push(("--from", SocketAddr::from((first, QUIC)).to_string()));
                        own.push(("--model", name.into_owned()));
                    }
                }
                let of_this = self.shape.own_flags.iter().filter(|(worker, _)| *worker == index);
                more.extend(of_this.flat_map(|(_, flag)| flag.clone()));
                ("worker", own, more)
            }
        };
        let pairs = common.into_iter().chain(own).flat_map(|(flag, value)| [flag.to_owned(), value]);
        Ok([command.to_owned()].into_iter().chain(pairs).chain(more).collect())
    }

    /// A node's log, with all of its runs in this fleet.
    pub fn log(&self, node: Node) -> anyhow::Result<PathBuf> {
        Ok(self.logs()?.join(format!("{}.log", name(node))))
    }

    fn logs(&self) -> anyhow::Result<PathBuf> {
        let logs = binary::target().join("test-logs").join(&self.shape.name);
        std::fs::create_dir_all(&logs)?;
        Ok(logs)
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for mut process in (0..self.processes.len()).filter_map(|host| self.process_on(host).take()) {
            // Both fail only if the process has already ended.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// A coordinator's API address on its own host. Other hosts would need keys.
pub fn api() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, HTTP))
}

/// A node's ops address on its own host.
pub fn ops() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, OPS))
}

/// The worker with this name; `None` if it is not a worker's name.
pub fn worker_named(name: &str) -> Option<Node> {
    name.strip_prefix('w')?.parse().ok().map(Node::Worker)
}

/// Node name as in status and in the `x-kvasir-worker` header.
pub fn name(node: Node) -> String {
    match node {
        Node::Coordinator(index) => format!("c{index}"),
        Node::Worker(index) => format!("w{index}"),
    }
}

/// Creates the cluster's authority.
fn authority(dir: &Path) -> anyhow::Result<()> {
    let ca = text(dir.join("ca"))?;
    binary::stdout(&["ca", "init", "--dir", &ca, "--cluster", "fleet"]).map(drop)
}

fn text(path: PathBuf) -> anyhow::Result<String> {
    path.to_str().map(str::to_owned).with_context(|| format!("{} is not UTF-8", path.display()))
}
