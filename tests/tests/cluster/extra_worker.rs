//! A worker that joins a running cluster.

use kvasir_cluster_tests::binary;
use kvasir_cluster_tests::cluster::Cluster;
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Stdio};

/// An additional worker of a cluster, killed when dropped.
pub(crate) struct ExtraWorker {
    process: Child,
    pub(crate) ops: SocketAddr,
}

impl ExtraWorker {
    /// Starts a worker of this name with further arguments, and waits until it listens.
    pub(crate) fn start(cluster: &Cluster, name: &str, arguments: &[&str]) -> Self {
        let data = cluster.data_dir();
        let text = |path: std::path::PathBuf| path.to_str().unwrap().to_owned();
        let (ca, identity) = (text(data.join("ca")), text(data.join(name)));
        let issue = ["ca", "issue", "--dir", &ca, "--role", "worker", "--node", name, "--out", &identity];
        binary::stdout(&issue).unwrap();
        let log = data.join("logs").join(format!("{name}.log"));
        let (quic, any) = (cluster.coordinator().quic.to_string(), "127.0.0.1:0");
        let mut command =
            binary::command(&["worker", "--identity", &identity, "--coordinators", &quic]).unwrap();
        command
            .args(["--quic", any, "--ops", any, "--threads", "1", "--drain-timeout", "3s"])
            .args(arguments);
        let mut process = command.stdout(Stdio::piped()).stderr(File::create(&log).unwrap()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let announcement: Value = serde_json::from_str(&line)
            .unwrap_or_else(|_| panic!("it did not start: {}", std::fs::read_to_string(&log).unwrap()));
        Self { process, ops: announcement["ops"].as_str().unwrap().parse().unwrap() }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Kills it, as a power cut would.
    pub(crate) fn kill(&mut self) {
        // Both fail only if the process has already exited.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for ExtraWorker {
    fn drop(&mut self) {
        self.kill();
    }
}
