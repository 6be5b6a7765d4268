//! The cluster as coordinators' ops ports report it.

use crate::ops_client::{self, Call};
use anyhow::{Context, bail};
use doctor::{Cluster, Coordinator, Node};
use serde::Deserialize;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A scrape waits for workers for a second.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A worker to measure the path to.
pub(super) struct Peer {
    pub(super) id: String,
    /// Address of its QUIC port.
    pub(super) quic: String,
}

/// Ops addresses in a data directory's `up.json`; empty without the file.
pub(super) fn ops_of_up(data_dir: &Path) -> anyhow::Result<Vec<String>> {
    #[derive(Deserialize)]
    struct UpFile {
        coordinators: Vec<UpNode>,
    }
    #[derive(Deserialize)]
    struct UpNode {
        ops: String,
    }
    let path = data_dir.join("up.json");
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| path.display().to_string()),
    };
    let file: UpFile = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    Ok(file.coordinators.into_iter().map(|node| node.ops).collect())
}

/// Asks all coordinators for their metrics and their workers'.
pub(super) fn ask(ops: &[String]) -> Cluster {
    let mut cluster = Cluster::default();
    for address in ops {
        let quorum = match scrape(address) {
            Ok((text, now)) => {
                let scraped = Scraped::read(&text);
                scraped.add_to(&mut cluster.nodes, address, now);
                Ok(scraped.quorum)
            }
            Err(error) => Err(format!("coordinator {address}: {error:#}")),
        };
        cluster.coordinators.push(Coordinator { address: address.clone(), quorum });
    }
    cluster
}

/// A coordinator's metrics, and this machine's time in seconds since 1970 when they arrived.
fn scrape(address: &str) -> anyhow::Result<(String, f64)> {
    let text = ops_client::request(ops_client::address(address)?, "GET", "/metrics", TIMEOUT)?.success()?;
    Ok((text, SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())))
}

/// The workers of the first coordinator that answers.
pub(super) fn workers(ops: &[String], key: Option<&str>) -> anyhow::Result<Vec<Peer>> {
    #[derive(Deserialize)]
    struct View {
        #[serde(default)]
        workers: Vec<Worker>,
    }
    #[derive(Deserialize)]
    struct Worker {
        id: String,
        #[serde(default)]
        quic: String,
    }
    let ask = |address: &String| -> anyhow::Result<Vec<Peer>> {
        let call = Call { key, ..Call::new("GET", "/admin/v1/cluster", TIMEOUT) };
        let text = call.send(ops_client::address(address)?)?.text()?.success()?;
        let view: View = serde_json::from_str(&text).context("the response is not valid JSON")?;
        Ok(view.workers.into_iter().map(|Worker { id, quic }| Peer { id, quic }).collect())
    };
    let mut failed = None;
    for address in ops {
        match ask(address) {
            Ok(peers) => return Ok(peers),
            Err(error) => failed = Some(error.context(format!("coordinator {address}"))),
        }
    }
    match failed {
        Some(error) => bail!(error),
        None => Ok(Vec::new()),
    }
}

/// The values of a scrape that findings need.
#[derive(Debug, Default, PartialEq)]
struct Scraped {
    version: Option<String>,
    time: Option<f64>,
    quorum: Option<bool>,
    /// Version and time of each worker, in order of appearance.
    workers: Vec<(String, Option<String>, Option<f64>)>,
}

impl Scraped {
    fn read(text: &str) -> Self {
        let mut scraped = Self::default();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((series, value)) = line.rsplit_once(' ') else { continue };
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let worker = || label_of(labels, "worker");
            match name {
                "kvasir_build_info" => scraped.version = label_of(labels, "version"),
                "kvasir_time_seconds" => scraped.time = value.parse().ok(),
                "kvasir_raft_quorum" => scraped.quorum = Some(value == "1"),
                "kvasir_worker_build_info" => {
                    scraped.worker(worker(), |of| of.1 = label_of(labels, "version"));
                }
                "kvasir_worker_time_seconds" => scraped.worker(worker(), |of| of.2 = value.parse().ok()),
                _ => {}
            }
        }
        scraped
    }

    fn worker(&mut self, name: Option<String>, set: impl FnOnce(&mut (String, Option<String>, Option<f64>))) {
        let Some(name) = name else { return };
        match self.workers.iter_mut().find(|(known, ..)| *known == name) {
            Some(known) => set(known),
            None => {
                let mut new = (name, None, None);
                set(&mut new);
                self.workers.push(new);
            }
        }
    }

    /// Adds the coordinator, and workers that no other one has reported. `now` is this machine's time.
    fn add_to(&self, nodes: &mut Vec<Node>, address: &str, now: f64) {
        let ahead_s = self.time.map(|time| time - now);
        nodes.push(Node { name: address.to_owned(), version: self.version.clone(), ahead_s });
        for (name, version, time) in &self.workers {
            if nodes.iter().all(|node| node.name != *name) {
                let ahead_s = time.zip(self.time).map(|(worker, coordinator)| worker - coordinator);
                nodes.push(Node { name: name.clone(), version: version.clone(), ahead_s });
            }
        }
    }
}

fn label_of(labels: &str, label: &str) -> Option<String> {
    let start = labels.find(&format!("{label}=\""))? + label.len() + 2;
    labels.get(start..)?.split('"').next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_and_clocks_of_all_nodes_are_read() {
        let text = "# TYPE kvasir_build_info gauge\nkvasir_build_info{version=\"0.2.0\"} 1\nkvasir_raft_quorum 1\n\
                    kvasir_time_seconds 1000.5\nkvasir_worker_build_info{worker=\"w0\",version=\"0.1.0\"} 1\n\
                    kvasir_worker_time_seconds{worker=\"w0\"} 1004.5\n\
                    kvasir_worker_time_seconds{worker=\"w1\"} 1000.0\nnonsense\n";
        let mut nodes = Vec::new();
        let scraped = Scraped::read(text);
        assert_eq!(scraped.quorum, Some(true));
        scraped.add_to(&mut nodes, "c0:9090", 1000.0);
        scraped.add_to(&mut nodes, "c1:9090", 1000.0);
        let node = |name: &str, version: Option<&str>, ahead| Node {
            name: name.into(),
            version: version.map(str::to_owned),
            ahead_s: Some(ahead),
        };
        let expected = [
            node("c0:9090", Some("0.2.0"), 0.5),
            node("w0", Some("0.1.0"), 4.0),
            node("w1", None, -0.5),
            node("c1:9090", Some("0.2.0"), 0.5),
        ];
        assert_eq!(nodes, expected);
    }
}
