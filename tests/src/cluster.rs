//! A cluster of real processes, started by `kvasir up` as a user would, gone when dropped.

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

/// Two clusters at once on two cores would only measure each other.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// `up.json`, as `kvasir up` writes it.
#[derive(Debug, Clone, Deserialize)]
pub struct UpFile {
    /// The fronts.
    pub coordinators: Vec<CoordinatorNode>,
    /// The engines.
    pub workers: Vec<WorkerNode>,
    /// The model's id.
    pub model: String,
}

/// A coordinator process.
#[derive(Debug, Clone, Deserialize)]
pub struct CoordinatorNode {
    /// Node id.
    pub id: String,
    /// Process id.
    pub pid: u32,
    /// Where the OpenAI API answers.
    pub http: SocketAddr,
    /// Where `/metrics` and `/admin/v1` answer.
    pub ops: SocketAddr,
    /// Where workers dial in.
    pub quic: SocketAddr,
}

/// A worker process.
#[derive(Debug, Clone, Deserialize)]
pub struct WorkerNode {
    /// Node id.
    pub id: String,
    /// Process id.
    pub pid: u32,
    /// Where `/metrics` answers.
    pub ops: SocketAddr,
    /// Where coordinators reach it.
    pub quic: SocketAddr,
}

/// What to start.
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
    /// None beside another cluster, which has it.
    _turn: Option<MutexGuard<'static, ()>>,
}

impl Cluster {
    /// A cluster that serves `model`; its log is kept under `name`.
    pub fn builder(name: &str, model: &str) -> Builder {
        let (model, name) = (model.to_owned(), name.to_owned());
        Builder { model, name, flags: Vec::new(), variables: Vec::new(), data_dir: None }
    }
}

impl Builder {
    /// A further flag of `kvasir up` and its value.
    pub fn flag(mut self, flag: &str, value: &str) -> Self {
        self.flags.extend([flag.to_owned(), value.to_owned()]);
        self
    }

    /// A variable of the environment.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    /// In this data directory, which stays, instead of one of its own.
    pub fn data_dir(mut self, dir: &Path) -> Self {
        self.data_dir = Some(dir.to_owned());
        self
    }

    /// A further flag without a value.
    pub fn switch(mut self, flag: &str) -> Self {
        self.flags.push(flag.to_owned());
        self
    }

    /// Starts the cluster and waits until it is ready, which it does when no other test has one.
    pub fn start(self) -> anyhow::Result<Cluster> {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        self.start_in(Some(turn))
    }

    /// The same for a second cluster of a test that has started `other`.
    pub fn start_beside(self, _other: &Cluster) -> anyhow::Result<Cluster> {
        self.start_in(None)
    }

    fn start_in(self, turn: Option<MutexGuard<'static, ()>>) -> anyhow::Result<Cluster> {
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
                    _turn: turn,
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

/// Reads the line that says that the cluster is ready, on a thread of its own so that the wait has an end.
fn first_line(stdout: ChildStdout) -> anyhow::Result<(String, BufReader<ChildStdout>)> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut reader = BufReader::new(stdout);
        let mut line = String::new();
        let read = reader.read_line(&mut line);
        // Nobody receives after the deadline; then the line is of no use either.
        let _ = sender.send(read.map(|_| (line, reader)));
    });
    let (line, reader) = receiver.recv_timeout(binary::PATIENCE).context("kvasir up is not ready")??;
    if line.is_empty() {
        bail!("kvasir up ended before it was ready");
    }
    Ok((line, reader))
}

impl Cluster {
    /// The API address of the first coordinator.
    pub fn http(&self) -> SocketAddr {
        self.coordinator().http
    }

    /// The first coordinator, as it was when the cluster became ready.
    pub fn coordinator(&self) -> &CoordinatorNode {
        &self.first.coordinators[0]
    }

    /// All nodes, as they were when the cluster became ready.
    pub fn nodes(&self) -> &UpFile {
        &self.first
    }

    /// The model's id.
    pub fn model(&self) -> &str {
        &self.first.model
    }

    /// What `kvasir up` has logged, and its nodes', once the cluster has ended.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Time from the start of `kvasir up` to its line on stdout.
    pub fn ready_after(&self) -> Duration {
        self.ready_after
    }

    /// The cluster's data directory.
    pub fn data_dir(&self) -> &Path {
        &self.dir
    }

    /// The process id of `kvasir up`.
    pub fn pid(&self) -> u32 {
        self.up.id()
    }

    /// `up.json` as it is now.
    pub fn up_file(&self) -> anyhow::Result<UpFile> {
        crate::fixtures::json(&self.dir.join("up.json"))
    }

    /// `/admin/v1/cluster` of the first coordinator.
    pub fn status(&self) -> anyhow::Result<serde_json::Value> {
        http::get(self.coordinator().ops, "/admin/v1/cluster")?.ok()
    }

    /// The sum over all series of a metric at the first coordinator, re-exported worker metrics included.
    pub fn metric(&self, name: &str) -> anyhow::Result<f64> {
        http::metric(self.coordinator().ops, name)
    }

    /// The sum over all workers of a metric, asked of each worker itself.
    pub fn worker_metric(&self, name: &str) -> anyhow::Result<f64> {
        let workers = self.up_file()?.workers;
        workers.iter().map(|worker| http::metric(worker.ops, name)).sum()
    }

    /// Waits until `kvasir up` has ended and returns its exit code.
    pub fn wait_for_end(&mut self) -> anyhow::Result<Option<i32>> {
        let up = &mut self.up;
        let status = wait::until("kvasir up ends", binary::PATIENCE, || up.try_wait().transpose())??;
        Ok(status.code())
    }

    /// What `kvasir up` wrote to stdout after its first line; call it when `up` has ended.
    pub fn rest_of_stdout(&mut self) -> anyhow::Result<String> {
        let mut rest = String::new();
        while self.stdout.read_line(&mut rest)? > 0 {}
        Ok(rest)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let nodes = self.up_file().unwrap_or_else(|_| self.first.clone());
        stop(&mut self.up);
        // Children die with `up`; a test must leave nothing behind even where that is what is broken.
        let pids = nodes.coordinators.iter().map(|n| n.pid).chain(nodes.workers.iter().map(|n| n.pid));
        pids.filter(|pid| is_kvasir(*pid)).for_each(signal::kill_now);
        keep_logs(&self.dir, &self.log);
    }
}

fn stop(up: &mut Child) {
    // Both fail only if it has ended, which is what is wanted.
    let _ = up.kill();
    let _ = up.wait();
}

/// A process id may have been given to someone else since.
fn is_kvasir(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "kvasir")
}

/// Appends the nodes' logs to the test's, best effort.
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
