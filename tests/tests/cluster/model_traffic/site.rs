//! Coordinators and workers without models of their own, as processes that are killed and started again.

use kvasir_cluster_tests::{binary, cluster, http, wait};
use pki::ca::Authority;
use proto::ids::{ClusterName, NodeId, Role};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Mutex;
use std::time::SystemTime;

pub(super) const COORDINATORS: usize = 3;
pub(super) const WORKERS: usize = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Member {
    Coordinator(usize),
    Worker(usize),
}

struct Process {
    child: Child,
    /// Address of the API; only coordinators have one.
    http: Option<SocketAddr>,
    ops: SocketAddr,
}

impl Process {
    /// Starts a node and waits for its announcement. Its log is appended to `log`.
    fn start(arguments: &[&str], home: &Path, log: &Path) -> anyhow::Result<Self> {
        let log = File::options().create(true).append(true).open(log)?;
        let mut command = binary::command(arguments)?;
        command.env("KVASIR_HOME", home).env("KVASIR_LOG_FORMAT", "json");
        let mut child = command.stdout(Stdio::piped()).stderr(log).spawn()?;
        let stdout = child.stdout.take();
        let mut process = Self { child, http: None, ops: SocketAddr::from(([0, 0, 0, 0], 0)) };
        let mut line = String::new();
        stdout.map(|stdout| BufReader::new(stdout).read_line(&mut line)).transpose()?;
        let announced: Value = serde_json::from_str(&line)?;
        let address = |name: &str| announced[name].as_str().and_then(|address| address.parse().ok());
        process.http = address("http");
        process.ops = address("ops").unwrap_or(process.ops);
        Ok(process)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only if the process has already exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Addresses of a coordinator. They stay while it is down, as clients do not know that.
#[derive(Clone, Copy)]
pub(super) struct Addresses {
    pub(super) http: SocketAddr,
    pub(super) ops: SocketAddr,
}

/// The nodes of a cluster. All end when it is dropped.
pub(super) struct Site {
    directory: PathBuf,
    /// `--memory` of each worker.
    memory: String,
    quic: [SocketAddr; COORDINATORS],
    processes: Mutex<BTreeMap<String, Process>>,
    addresses: Mutex<BTreeMap<usize, Addresses>>,
}

fn name(member: Member) -> String {
    match member {
        Member::Coordinator(index) => format!("c{index}"),
        Member::Worker(index) => format!("w{index}"),
    }
}

impl Site {
    /// Starts all nodes. Their files and logs are in `directory`.
    pub(super) fn start(directory: &Path, memory: u64) -> Self {
        let now = SystemTime::now();
        let authority = Authority::new(ClusterName::new("traffic").unwrap(), now).unwrap();
        let roles = [(COORDINATORS, Role::Coordinator), (WORKERS, Role::Worker)];
        for (index, role) in roles.into_iter().flat_map(|(count, role)| (0..count).map(move |n| (n, role))) {
            let member = match role {
                Role::Coordinator => Member::Coordinator(index),
                _ => Member::Worker(index),
            };
            let issued = authority.issue(role, NodeId::new(name(member)).unwrap(), now).unwrap();
            issued.save(&directory.join(name(member)).join("identity")).unwrap();
        }
        // Bound together, so that they differ.
        let reserved = [(); COORDINATORS].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        let site = Self {
            directory: directory.to_owned(),
            memory: memory.to_string(),
            quic: reserved.each_ref().map(|socket| socket.local_addr().unwrap()),
            processes: Mutex::default(),
            addresses: Mutex::default(),
        };
        drop(reserved);
        (0..COORDINATORS).for_each(|index| site.start_again(Member::Coordinator(index)));
        (0..WORKERS).for_each(|index| site.start_again(Member::Worker(index)));
        site
    }

    /// Starts a node that does not run.
    pub(super) fn start_again(&self, member: Member) {
        let own = self.directory.join(name(member));
        let path = |file: &str| own.join(file).to_str().unwrap().to_owned();
        let (identity, data) = (path("identity"), path("data"));
        let key = self.directory.join("cluster.key").to_str().unwrap().to_owned();
        let listed = |named: &dyn Fn(usize, SocketAddr) -> String| {
            let all: Vec<String> = self.quic.iter().enumerate().map(|(at, quic)| named(at, *quic)).collect();
            all.join(",")
        };
        let peers = listed(&|at, quic| format!("{}={quic}", name(Member::Coordinator(at))));
        let coordinators = listed(&|_, quic| quic.to_string());
        let any = "127.0.0.1:0";
        let common = ["--identity", &identity, "--ops", any];
        let quic;
        let own_arguments: Vec<&str> = match member {
            Member::Coordinator(index) => {
                quic = self.quic[index].to_string();
                let own = ["coordinator", "--http", any, "--quic", &quic, "--data-dir", &data];
                [&own[..], &["--peers", &peers, "--cluster-key", &key]].concat()
            }
            Member::Worker(_) => {
                let own = ["worker", "--quic", any, "--coordinators", &coordinators, "--threads", "1"];
                [&own[..], &["--memory", &self.memory, "--device", "cpu"]].concat()
            }
        };
        let arguments = [&own_arguments[..], &common].concat();
        let process = Process::start(&arguments, &own.join("home"), &self.log(member)).unwrap();
        if let (Member::Coordinator(index), Some(http)) = (member, process.http) {
            self.addresses.lock().unwrap().insert(index, Addresses { http, ops: process.ops });
        }
        self.processes.lock().unwrap().insert(name(member), process);
    }

    /// Kills a node, as a power cut would.
    pub(super) fn kill(&self, member: Member) {
        drop(self.processes.lock().unwrap().remove(&name(member)));
    }

    pub(super) fn coordinator(&self, index: usize) -> Addresses {
        self.addresses.lock().unwrap()[&index]
    }

    /// The coordinator that leads, as one of them knows it.
    pub(super) fn leader(&self) -> usize {
        let leads = || cluster::leader(self.coordinator(0).ops)?.strip_prefix('c')?.parse().ok();
        wait::until("a coordinator leads", binary::NODE_TIMEOUT, leads).unwrap()
    }

    /// A metric of a worker that runs.
    pub(super) fn metric(&self, worker: usize, metric: &str) -> f64 {
        let ops = self.processes.lock().unwrap()[&name(Member::Worker(worker))].ops;
        http::metric(ops, metric).unwrap()
    }

    pub(super) fn log(&self, member: Member) -> PathBuf {
        self.directory.join(format!("{}.log", name(member)))
    }
}

/// Starts a worker without a cluster that serves one file, and returns what `ask` returns for its API's address.
pub(super) fn alone<T>(directory: &Path, file: &Path, ask: impl FnOnce(SocketAddr) -> T) -> T {
    let arguments = ["worker", "--model", file.to_str().unwrap(), "--http", "127.0.0.1:0", "--threads", "1"];
    let more = ["--ops", "127.0.0.1:0", "--kv-bytes", "16MiB", "--device", "cpu"];
    let arguments = [&arguments[..], &more].concat();
    let worker =
        Process::start(&arguments, &directory.join("alone/home"), &directory.join("alone.log")).unwrap();
    ask(worker.http.unwrap())
}
