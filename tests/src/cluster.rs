//! A cluster of real processes, started by `kvasir up` and ended when dropped.

use crate::{binary, http, signal, wait};
use anyhow::{Context, bail};
use serde::Deserialize;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Two clusters at once on two cores would disturb each other's timing.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Waits until no cluster runs, and excludes clusters while the value exists.
pub fn exclude_clusters() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `up.json`, as `kvasir up` writes it.
#[derive(Debug, Clone, Deserialize)]
pub struct UpFile {
    pub coordinators: Vec<CoordinatorNode>,
    pub workers: Vec<WorkerNode>,
    pub model: String,
}

#[derive(Debug, Clone, Deserialize)]
pub struct CoordinatorNode {
    pub id: String,
    pub pid: u32,
    /// Address of the OpenAI API.
    pub http: SocketAddr,
    /// Address of `/metrics` and `/admin/v1`.
    pub ops: SocketAddr,
    /// Address that workers connect to.
    pub quic: SocketAddr,
}

#[derive(Debug, Clone, Deserialize)]
pub struct WorkerNode {
    pub id: String,
    pub pid: u32,
    /// Address of `/metrics`.
    pub ops: SocketAddr,
    /// QUIC address for coordinators.
    pub quic: SocketAddr,
}

/// Options of a cluster.
#[derive(Debug)]
pub struct Builder {
    model: String,
    name: String,
    flags: Vec<String>,
    variables: Vec<(String, String)>,
    data_dir: Option<PathBuf>,
}

/// A running cluster.
pub struct Cluster {
    up: Child,
    stdout: BufReader<ChildStdout>,
    first: UpFile,
    dir: PathBuf,
    _own_dir: Option<TempDir>,
    log: PathBuf,
    ready_after: Duration,
    /// `None` for a second cluster, beside one that holds the lock.
    _lock: Option<MutexGuard<'static, ()>>,
}

impl Cluster {
    /// Builds a cluster that serves `model`; its log is kept under `name`.
    pub fn builder(name: &str, model: &str) -> Builder {
        let (model, name) = (model.to_owned(), name.to_owned());
        Builder { model, name, flags: Vec::new(), variables: Vec::new(), data_dir: None }
    }
}

impl Builder {
    /// Adds a flag of `kvasir up` with its value.
    pub fn flag(mut self, flag: &str, value: &str) -> Self {
        self.flags.extend([flag.to_owned(), value.to_owned()]);
        self
    }

    /// Adds an environment variable.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Uses this data directory, which is kept, instead of a temporary one.
    pub fn data_dir(mut self, dir: &Path) -> Self {
        self.data_dir = Some(dir.to_owned());
        self
    }

    /// Adds a flag without a value.
    pub fn switch(mut self, flag: &str) -> Self {
        self.flags.push(flag.to_owned());
        self
    }

    /// Waits until no other test has a cluster, starts this one, and waits until it is ready.
    pub fn start(self) -> anyhow::Result<Cluster> {
        self.start_in(Some(exclude_clusters()))
    }

    /// Starts a second cluster in a test that has already started `other`.
    pub fn start_second(self, _other: &Cluster) -> anyhow::Result<Cluster> {
        self.start_in(None)
    }

    fn start_in(self, lock: Option<MutexGuard<'static, ()>>) -> anyhow::Result<Cluster> {
        let own = if self.data_dir.is_none() { Some(tempfile::tempdir()?) } else { None };
        let own_path = own.as_ref().map(|dir| dir.path().to_owned());
        let dir = self.data_dir.or(own_path).context("no data directory")?;
        let logs = binary::target().join("test-logs");
        std::fs::create_dir_all(&logs)?;
        let log = logs.join(format!("{}.log", self.name));
        let data_dir = dir.to_str().context("a temporary directory that is not UTF-8")?;
        let mut arguments = vec!["up", &self.model, "--json", "--data-dir", data_dir];
        arguments.extend(["--http", "127.0.0.1:0", "--ops", "127.0.0.1:0"]);
        arguments.extend(self.flags.iter().map(String::as_str));
        let started = Instant::now();
        let mut up = binary::command(&arguments)?
            .envs(self.variables)
            .stdout(Stdio::piped())
            .stderr(File::create(&log)?)
            .spawn()
            .context("starting kvasir up")?;
        let stdout = up.stdout.take().context("no stdout")?;
        match first_line(stdout) {
            Ok((line, stdout)) => {
                let first = serde_json::from_str(&line).with_context(|| format!("not an up.json: {line:?}"));
                let ready_after = started.elapsed();
                let mut cluster = Cluster {
                    up,
                    stdout,
                    first: UpFile::empty(),
                    dir,
                    log,
                    ready_after,
                    _own_dir: own,
                    _lock: lock,
                };
                cluster.first = first?;
                Ok(cluster)
            }
            Err(error) => {
                stop(&mut up);
                keep_logs(&dir, &log);
                let tail = std::fs::read_to_string(&log).unwrap_or_default();
                bail!("{error:#}\n{tail}")
            }
        }
    }
}

impl UpFile {
    fn empty() -> Self {
        Self { coordinators: Vec::new(), workers: Vec::new(), model: String::new() }
    }
}

/// Reads the ready line on a separate thread, so that the wait has a deadline.
fn first_line(stdout: ChildStdout) -> anyhow::Result<(String, BufReader<ChildStdout>)> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut reader = BufReader::new(stdout);
        let mut line = String::new();
        let read = reader.read_line(&mut line);
        // After the deadline nothing receives the line, and it is not needed.
        let _ = sender.send(read.map(|_| (line, reader)));
    });
    let (line, reader) = receiver.recv_timeout(binary::NODE_TIMEOUT).context("kvasir up is not ready")??;
    if line.is_empty() {
        bail!("kvasir up ended before it was ready");
    }
    Ok((line, reader))
}

impl Cluster {
    pub fn http(&self) -> SocketAddr {
        self.coordinator().http
    }

    /// The first coordinator when the cluster became ready.
    pub fn coordinator(&self) -> &CoordinatorNode {
        &self.first.coordinators[0]
    }

    /// All nodes when the cluster became ready.
    pub fn nodes(&self) -> &UpFile {
        &self.first
    }

    pub fn model(&self) -> &str {
        &self.first.model
    }

    /// Log of `kvasir up` and its nodes, complete once the cluster has ended.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Time from the start of `kvasir up` to its ready line.
    pub fn ready_after(&self) -> Duration {
        self.ready_after
    }

    pub fn data_dir(&self) -> &Path {
        &self.dir
    }

    pub fn pid(&self) -> u32 {
        self.up.id()
    }

    /// The current `up.json`.
    pub fn up_file(&self) -> anyhow::Result<UpFile> {
        crate::fixtures::json(&self.dir.join("up.json"))
    }

    /// `/admin/v1/cluster` of the first coordinator.
    pub fn status(&self) -> anyhow::Result<serde_json::Value> {
        http::get(self.coordinator().ops, "/admin/v1/cluster")?.ok()
    }

    /// The index in `nodes` of the coordinator that leads, once one does: an election can be running at any
    /// time on a machine that is busy.
    pub fn leader(&self) -> anyhow::Result<usize> {
        let leads = || {
            let leader = leader(self.coordinator().ops)?;
            self.nodes().coordinators.iter().position(|node| node.id == leader)
        };
        wait::until("a coordinator leads", binary::NODE_TIMEOUT, leads)
    }

    /// Sum over all series of a metric at the first coordinator, including re-exported worker metrics.
    pub fn metric(&self, name: &str) -> anyhow::Result<f64> {
        http::metric(self.coordinator().ops, name)
    }

    /// Sum of a metric over all workers, read from each worker.
    pub fn worker_metric(&self, name: &str) -> anyhow::Result<f64> {
        let workers = self.up_file()?.workers;
        workers.iter().map(|worker| http::metric(worker.ops, name)).sum()
    }

    /// Waits until `kvasir up` has ended and returns its exit code.
    pub fn wait_for_end(&mut self) -> anyhow::Result<Option<i32>> {
        let up = &mut self.up;
        let status = wait::until("kvasir up ends", binary::NODE_TIMEOUT, || up.try_wait().transpose())??;
        Ok(status.code())
    }

    /// Stdout of `kvasir up` after its first line. Call this after it has ended.
    pub fn rest_of_stdout(&mut self) -> anyhow::Result<String> {
        let mut rest = String::new();
        while self.stdout.read_line(&mut rest)? > 0 {}
        Ok(rest)
    }
}

/// The id of the coordinator that leads, as the one at `ops` knows it, or `None` while it knows of no leader.
pub fn leader(ops: SocketAddr) -> Option<String> {
    let status: serde_json::Value = http::get(ops, "/admin/v1/cluster").ok()?.ok().ok()?;
    let leader = status["coordinators"].as_array()?.iter().find(|listed| listed["role"] == "leader")?;
    Some(leader["id"].as_str()?.to_owned())
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let nodes = self.up_file().unwrap_or_else(|_| self.first.clone());
        stop(&mut self.up);
        // Children end with `up`. A test must leave no process behind, even if that mechanism is broken.
        let pids = nodes.coordinators.iter().map(|n| n.pid).chain(nodes.workers.iter().map(|n| n.pid));
        pids.filter(|pid| is_kvasir(*pid)).for_each(signal::kill_now);
        keep_logs(&self.dir, &self.log);
    }
}

fn stop(up: &mut Child) {
    // Both fail only if the process has already ended.
    let _ = up.kill();
    let _ = up.wait();
}

/// The process id may have been reused since.
fn is_kvasir(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "kvasir")
}

/// Appends the nodes' logs to the test's log, best effort.
fn keep_logs(data_dir: &Path, log: &Path) {
    let Ok(entries) = std::fs::read_dir(data_dir.join("logs")) else { return };
    let mut text = std::fs::read_to_string(log).unwrap_or_default();
    let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    for file in files {
        text += &format!("\n=== {}\n", file.display());
        text += &std::fs::read_to_string(&file).unwrap_or_default();
    }
    let _ = std::fs::write(log, text);
}
