//! `kvasir drain` and `kvasir undrain`: stops or resumes a worker's admission of new work.

use crate::access::Access;
use crate::admin::escape;
use crate::config::Period;
use crate::status::{Cluster, Worker};
use anyhow::{Context, bail};
use serde_json::{Value, json};
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Coordinators accept or refuse a change within two seconds.
const CHANGE_LIMIT: Duration = Duration::from_secs(10);
/// Polling interval. Workers report several times a second.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Drains a worker: it accepts no new work and finishes running work.
///
/// All coordinators agree on the drain. It holds over their restarts, until `kvasir undrain`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  kvasir drain worker-1\n  kvasir drain w7 --ops 10.0.0.7:9090 --wait --timeout 30m\n\n\
    Exit codes: 0 if the worker drains (with --wait: and has no work left), 1 if it does not, or if it still has\n\
    work at the timeout."
)]
pub(crate) struct Drain {
    #[command(flatten)]
    target: Target,
    /// Wait until the worker has no work.
    #[arg(long)]
    wait: bool,
    /// Longest time to wait.
    #[arg(long, value_name = "TIME", default_value = "10m", requires = "wait")]
    timeout: Period,
}

/// Ends a drain: the worker accepts work again.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir undrain worker-1")]
pub(crate) struct Undrain {
    #[command(flatten)]
    target: Target,
}

#[derive(clap::Args)]
struct Target {
    /// Id of the worker, as listed by `kvasir status`.
    #[arg(value_name = "NODE")]
    node: String,
    #[command(flatten)]
    access: Access,
    /// Print the result as one line of JSON.
    #[arg(long)]
    json: bool,
}

impl Drain {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let Self { target, wait, timeout } = self;
        target.change("drain")?;
        let seen = if wait { target.wait(timeout.0)? } else { target.look()? };
        target.show(seen.as_ref(), if wait { "has no work" } else { "drains" })
    }
}

impl Undrain {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        self.target.change("undrain")?;
        let seen = self.target.look()?;
        self.target.show(seen.as_ref(), "accepts work")
    }
}

impl Target {
    fn change(&self, action: &str) -> anyhow::Result<()> {
        let path = format!("/admin/v1/workers/{}/{action}", escape(&self.node));
        let answer = self.access.send("POST", &path, None, CHANGE_LIMIT)?.text()?;
        if answer.status == 404 {
            bail!("{}", unknown_worker(&self.node, &Cluster::fetch(&self.access)?));
        }
        answer.success().map(drop)
    }

    /// Current state of the worker with all its models; `None` if it has left.
    fn look(&self) -> anyhow::Result<Option<Worker>> {
        let cluster = Cluster::fetch(&self.access)?;
        let found = cluster.whole_workers().into_iter().find(|whole| whole.worker.id == self.node);
        Ok(found.map(|whole| whole.total()))
    }

    /// Waits until the worker has no work or has left.
    fn wait(&self, limit: Duration) -> anyhow::Result<Option<Worker>> {
        let deadline = Instant::now() + limit;
        let terminal = std::io::stderr().is_terminal();
        loop {
            // Errors are retried: the coordinator may be restarting.
            let last = match self.look() {
                Ok(Some(worker)) if !worker.draining => {
                    bail!("the drain of {} was undone while waiting", self.node)
                }
                Ok(seen) if seen.as_ref().is_none_or(is_idle) => {
                    if terminal {
                        eprintln!();
                    }
                    return Ok(seen);
                }
                other => other,
            };
            if Instant::now() >= deadline {
                let left = last.context("the worker's state is unknown")?;
                bail!(
                    "{} still has work after {limit:?}: {}",
                    self.node,
                    left.as_ref().map_or_else(String::new, work)
                );
            }
            if let (true, Ok(Some(worker))) = (terminal, &last) {
                eprint!("\r\x1b[K{}: {}", self.node, work(worker));
            }
            std::thread::sleep(LOOK_EVERY.min(deadline.saturating_duration_since(Instant::now())));
        }
    }

    fn show(&self, seen: Option<&Worker>, words: &str) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        if self.json {
            writeln!(out, "{}", outcome(&self.node, seen))?;
        } else if seen.is_some() {
            writeln!(out, "{} {words}", self.node)?;
        } else {
            writeln!(out, "{} has left", self.node)?;
        }
        Ok(())
    }
}

/// Result to print.
fn outcome(node: &str, seen: Option<&Worker>) -> Value {
    let Some(worker) = seen else {
        return json!({"id": node, "state": "left", "draining": null, "idle": true, "running": 0, "waiting": 0});
    };
    json!({
        "id": node,
        "state": worker.state,
        "draining": worker.draining,
        "idle": is_idle(worker),
        "running": worker.running,
        "waiting": worker.waiting,
    })
}

/// True if the worker has no work and receives none. Only the worker's own draining state counts: other
/// coordinators may still have sent work before they received the change.
fn is_idle(worker: &Worker) -> bool {
    let drains = worker.reported.as_deref().unwrap_or(&worker.state) == "draining";
    drains && worker.running + worker.waiting + worker.inflight == 0
}

fn work(worker: &Worker) -> String {
    format!("{} running, {} waiting", worker.running, worker.waiting)
}

/// Error text for an unknown worker.
fn unknown_worker(node: &str, cluster: &Cluster) -> String {
    if cluster.coordinators.iter().any(|coordinator| coordinator.id == node) {
        return format!(
            "{node} is a coordinator; only workers can be drained. A coordinator drains when it is stopped"
        );
    }
    let ids: Vec<&str> = cluster.whole_workers().iter().map(|whole| whole.worker.id.as_str()).collect();
    let ids = if ids.is_empty() { "none".to_owned() } else { ids.join(", ") };
    format!("no worker has the id {node:?}; known workers: {ids}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(reported: &str, running: u64, inflight: u64) -> Worker {
        let value = json!({"id": "w0", "epoch": 1, "state": "draining", "reported": reported, "draining": true,
            "kv_used": 0, "kv_total": 1, "running": running, "inflight": inflight});
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_worker_is_idle_only_by_its_own_word() {
        assert!(is_idle(&worker("draining", 0, 0)));
        assert!(!is_idle(&worker("ready", 0, 0)), "it may still be sent something");
        assert!(!is_idle(&worker("draining", 1, 0)) && !is_idle(&worker("draining", 0, 1)));
    }

    #[test]
    fn a_worker_is_idle_once_its_instances_are() {
        let total = |reported: &str, running: u64| {
            let cluster: Cluster = serde_json::from_value(json!({"workers": [
                {"id": "w0", "epoch": 1, "state": "draining", "reported": "draining", "kv_used": 0, "kv_total": 1},
                {"id": "w0.1", "instance_of": "w0", "epoch": 1, "state": "draining", "reported": reported, "kv_used": 0,
                 "kv_total": 1, "running": running}]}))
            .unwrap();
            cluster.whole_workers()[0].total()
        };
        assert!(is_idle(&total("draining", 0)));
        assert!(!is_idle(&total("draining", 1)) && !is_idle(&total("ready", 0)));
    }

    #[test]
    fn the_error_for_an_unknown_worker_names_the_known_ones() {
        let cluster: Cluster = serde_json::from_value(json!({
            "coordinators": [{"id": "c0", "role": "leader"}],
            "workers": [{"id": "w0", "epoch": 1, "state": "ready", "kv_used": 0, "kv_total": 1}],
        }))
        .unwrap();
        assert!(unknown_worker("w9", &cluster).contains("w0"));
        assert!(unknown_worker("c0", &cluster).contains("coordinator"));
        assert!(unknown_worker("w9", &Cluster::default()).contains("none"));
    }
}
