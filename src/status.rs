//! `kvasir status`: shows a coordinator's view of its cluster.

use crate::access::Access;
use crate::columns::columns;
use crate::deploy;
use anyhow::Context;
use proto::served_model::BUILT_IN;
use serde::Deserialize;
use std::io::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const PATH: &str = "/admin/v1/cluster";
/// A coordinator answers this request from memory.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Shows the nodes of a cluster, their models and their load.
///
/// The models that a worker holds beside its own are below it, as its instances; its own line has the load of all.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir status\n  kvasir status --ops 10.0.0.7:9090 --json")]
pub(crate) struct Status {
    #[command(flatten)]
    access: Access,
    /// Print the coordinator's response (`/admin/v1/cluster`) as one line of JSON.
    #[arg(long)]
    json: bool,
}

/// The displayed part of `/admin/v1/cluster`. Unknown keys come from a newer coordinator, missing ones from
/// an older one.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Cluster {
    #[serde(default)]
    pub(crate) coordinators: Vec<Coordinator>,
    #[serde(default)]
    pub(crate) workers: Vec<Worker>,
    /// Deployed models, as `/admin/v1/deployments` lists them.
    #[serde(default)]
    deployments: Vec<serde_json::Value>,
    #[serde(default)]
    shipping: Vec<Shipment>,
    #[serde(default)]
    models: Vec<Model>,
    #[serde(default)]
    replicas: Vec<Replica>,
    #[serde(default)]
    unplanned: Vec<Unplanned>,
    #[serde(default)]
    #[serde(rename = "condemned")]
    pub(crate) blocked: Vec<BlockedFile>,
    /// Settings that differ between coordinators.
    #[serde(default)]
    settings: Vec<Differing>,
    /// Expiry of the authority's certificate, in seconds since 1970.
    #[serde(default)]
    authority_ends: Option<i64>,
    #[serde(default)]
    index: Option<Index>,
    #[serde(default)]
    pub(crate) queue: Queue,
}

/// A coordinator as seen by the one that was queried.
#[derive(Debug, Deserialize)]
pub(crate) struct Coordinator {
    pub(crate) id: String,
    pub(crate) role: String,
    #[serde(default)]
    pub(crate) term: u64,
    #[serde(default)]
    pub(crate) applied: u64,
    /// Expiry of its certificate, in seconds since 1970.
    #[serde(default)]
    certificate_ends: Option<i64>,
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Worker {
    pub(crate) id: String,
    /// The worker of which this is an instance: a model that it holds beside others.
    #[serde(default)]
    instance_of: Option<String>,
    pub(crate) epoch: u64,
    pub(crate) state: String,
    /// State reported by the worker itself.
    #[serde(default)]
    pub(crate) reported: Option<String>,
    /// Whether operators drain it.
    #[serde(default)]
    pub(crate) draining: bool,
    /// It drains because it lost its GPU repeatedly.
    #[serde(default)]
    quarantined: bool,
    /// The system refused the setting that keeps CPUs awake while a stage waits for another.
    #[serde(default)]
    cpus_sleep: bool,
    #[serde(default)]
    pub(crate) models: Vec<String>,
    /// Model whose images it encodes for other workers.
    #[serde(default)]
    encodes: Option<String>,
    /// Engine of its models.
    #[serde(default)]
    engine: Option<String>,
    /// Whether the coordinator knows exactly what its cache holds.
    #[serde(default)]
    exact: Option<bool>,
    /// Operations that it serves besides generation.
    #[serde(default)]
    pub(crate) operations: Vec<Offer>,
    pub(crate) kv_used: u64,
    pub(crate) kv_total: u64,
    #[serde(default)]
    pub(crate) last_progress_ms: u64,
    /// Sequences running and waiting there, from all coordinators.
    #[serde(default)]
    pub(crate) running: u64,
    #[serde(default)]
    pub(crate) waiting: u64,
    /// Seconds of queued work before a new prompt.
    #[serde(default)]
    pub(crate) queue_s: f64,
    /// Tokens generated since the worker started.
    #[serde(default)]
    pub(crate) generated_tokens: u64,
    /// Unfinished sequences that this coordinator sent there.
    #[serde(default)]
    pub(crate) inflight: u64,
    /// Expiry of its certificate, in seconds since 1970.
    #[serde(default)]
    certificate_ends: Option<i64>,
}

/// An operation that a worker offers with one model.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Offer {
    pub(crate) operation: String,
    pub(crate) model: String,
    #[serde(default)]
    backend: Option<String>,
    /// Open sessions from the queried coordinator.
    #[serde(default)]
    pub(crate) sessions: u64,
}

#[derive(Debug, Deserialize)]
struct Model {
    id: String,
    /// Verification of the file, if it was downloaded.
    #[serde(default)]
    verification: Option<String>,
}

/// Progress of a worker that receives its model from others.
#[derive(Debug, Deserialize)]
struct Shipment {
    worker: String,
    wanted_bytes: u64,
    present_bytes: u64,
    #[serde(default)]
    struck: Vec<String>,
}

/// A replica on one or several workers.
#[derive(Debug, Deserialize)]
struct Replica {
    model: String,
    #[serde(default)]
    state: String,
    #[serde(default)]
    reason: String,
    /// `operator` for a replica of an operator's plan.
    #[serde(default)]
    planned_by: Option<String>,
    #[serde(default)]
    stages: Vec<Stage>,
}

#[derive(Debug, Deserialize)]
struct Stage {
    worker: String,
    layers: (u64, u64),
}

/// A setting that differs between coordinators.
#[derive(Debug, Deserialize)]
struct Differing {
    setting: String,
    /// Coordinators with another value than the majority.
    coordinators: Vec<String>,
    /// Whether these coordinators do not support the setting yet.
    #[serde(default)]
    unready: bool,
}

/// A model without a further planned replica, and the reason.
#[derive(Debug, Deserialize)]
struct Unplanned {
    model: String,
    reason: String,
    /// `operator` if an operator's plan is waiting.
    #[serde(default)]
    planned_by: Option<String>,
}

/// A blocked model file, and the reason.
#[derive(Debug, Deserialize)]
pub(crate) struct BlockedFile {
    pub(crate) digest: String,
    reason: String,
}

#[derive(Debug, Deserialize)]
struct Index {
    blocks: u64,
    bytes: u64,
}

/// Requests that wait for a worker.
#[derive(Debug, Default, Clone, Copy, Deserialize)]
pub(crate) struct Queue {
    #[serde(default)]
    pub(crate) requests: u64,
    #[serde(default)]
    pub(crate) tokens: u64,
    #[serde(default)]
    pub(crate) inflight: u64,
}

/// A worker with its instances, by number.
pub(crate) struct WholeWorker<'a> {
    pub(crate) worker: &'a Worker,
    pub(crate) instances: Vec<&'a Worker>,
}

impl WholeWorker<'_> {
    /// The worker with the load of its instances added. It drains once all of them do.
    pub(crate) fn total(&self) -> Worker {
        let mut total = self.worker.clone();
        for instance in &self.instances {
            for (sum, more) in [
                (&mut total.running, instance.running),
                (&mut total.waiting, instance.waiting),
                (&mut total.inflight, instance.inflight),
                (&mut total.kv_used, instance.kv_used),
                (&mut total.kv_total, instance.kv_total),
            ] {
                *sum = sum.saturating_add(more);
            }
            total.queue_s = total.queue_s.max(instance.queue_s);
            if instance.reported.as_deref().is_some_and(|reported| reported != "draining") {
                total.reported.clone_from(&instance.reported);
            }
        }
        total
    }
}

impl Cluster {
    /// The workers, each with its instances.
    pub(crate) fn whole_workers(&self) -> Vec<WholeWorker<'_>> {
        let known = |id: &str| self.workers.iter().any(|worker| worker.id == id);
        let is_instance = |worker: &Worker| worker.instance_of.as_deref().is_some_and(known);
        let instances = |of: &Worker| {
            let is_of = |worker: &&Worker| worker.instance_of.as_deref() == Some(of.id.as_str());
            let mut instances: Vec<&Worker> = self.workers.iter().filter(is_of).collect();
            let number =
                |worker: &Worker| worker.id.rsplit_once('.').and_then(|(_, n)| n.parse::<u16>().ok());
            instances.sort_by_key(|worker| number(worker));
            instances
        };
        let workers = self.workers.iter().filter(|worker| !is_instance(worker));
        workers.map(|worker| WholeWorker { worker, instances: instances(worker) }).collect()
    }

    /// Queries the coordinator's current view.
    pub(crate) fn fetch(access: &Access) -> anyhow::Result<Self> {
        let body = access.text("GET", PATH, TIMEOUT)?;
        serde_json::from_str(&body).context("the coordinator's response is not valid JSON")
    }
}

impl Status {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let body = self.access.text("GET", PATH, TIMEOUT)?;
        let mut out = std::io::stdout().lock();
        if self.json {
            let value: serde_json::Value =
                serde_json::from_str(&body).context("the coordinator's response is not valid JSON")?;
            writeln!(out, "{value}")?;
        } else {
            write!(
                out,
                "{}",
                table(&serde_json::from_str(&body).context("the coordinator's response is not valid JSON")?)
            )?;
        }
        Ok(())
    }
}

/// Text about the next expiry, and about all certificates that expire within a month.
fn certificates(cluster: &Cluster, now: SystemTime) -> String {
    const DAY: i64 = 24 * 60 * 60;
    const MONTH: i64 = 30 * DAY;
    let now = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs().cast_signed());
    let coordinators = cluster.coordinators.iter().map(|node| (node.id.as_str(), node.certificate_ends));
    let workers = cluster.workers.iter().map(|node| (node.id.as_str(), node.certificate_ends));
    let authority = std::iter::once(("the authority", cluster.authority_ends));
    let mut ends: Vec<(i64, &str)> =
        coordinators.chain(workers).chain(authority).filter_map(|(id, ends)| Some((ends?, id))).collect();
    ends.sort_unstable();
    let expiring = ends.iter().filter(|(ends, _)| ends.saturating_sub(now) < MONTH).count();
    let line = |(ends, id): &(i64, &str)| match ends.saturating_sub(now) {
        left if left <= 0 => format!("certificate of {id}: expired {} ago\n", span(left.saturating_neg())),
        left => format!("certificate of {id}: expires in {}\n", span(left)),
    };
    ends.iter().take(expiring.max(1)).map(line).collect()
}

/// Formats a time in its largest unit.
fn span(seconds: i64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} minutes", seconds / 60),
        7200..172_800 => format!("{} hours", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

fn table(cluster: &Cluster) -> String {
    let mut rows = vec![
        ["NODE", "STATE", "EPOCH", "RUN", "WAIT", "KV USED", "PROGRESS", "MODELS"]
            .map(str::to_owned)
            .to_vec(),
    ];
    for node in &cluster.coordinators {
        let role = format!("coordinator ({})", node.role);
        let mut row = vec![node.id.clone(), role];
        row.resize(7, "-".into());
        rows.push(row);
    }
    let row = |name: String, node: &Worker| {
        let mib = |bytes: u64| bytes >> 20;
        vec![
            name,
            node.state.clone(),
            node.epoch.to_string(),
            node.running.to_string(),
            node.waiting.to_string(),
            format!("{} of {} MiB", mib(node.kv_used), mib(node.kv_total)),
            format!("{} ms ago", node.last_progress_ms),
            node.models.join(","),
        ]
    };
    for whole in cluster.whole_workers() {
        rows.push(row(whole.worker.id.clone(), &whole.total()));
        rows.extend(whole.instances.iter().map(|node| row(format!("  {}", node.id), node)));
    }
    let mut text = columns(&rows);
    if !cluster.deployments.is_empty() {
        text += &format!("\n{}\n", deploy::table(&cluster.deployments));
    }
    text += &certificates(cluster, SystemTime::now());
    for Differing { setting, coordinators, unready } in &cluster.settings {
        let so = if *unready { ", and is not ready until they are equal" } else { "" };
        text += &format!("{}: {setting} differs from the other coordinators{so}\n", coordinators.join(", "));
    }
    for Worker { id, operations, .. } in cluster.workers.iter().filter(|worker| !worker.operations.is_empty())
    {
        let offer = |Offer { operation, model, backend, sessions }: &Offer| {
            let by = backend.as_ref().map(|backend| format!(" by {backend}")).unwrap_or_default();
            let open = if *sessions > 0 { format!(", {sessions} open") } else { String::new() };
            format!("{operation} ({model}{by}{open})")
        };
        text += &format!("{id} offers {}\n", operations.iter().map(offer).collect::<Vec<_>>().join(", "));
    }
    for Worker { id, encodes, .. } in &cluster.workers {
        let Some(model) = encodes else { continue };
        text += &format!("{id} encodes images of {model}\n");
    }
    for Worker { id, engine, exact, .. } in &cluster.workers {
        let Some(engine) = engine.as_deref().filter(|engine| *engine != BUILT_IN) else { continue };
        let index =
            if *exact == Some(false) { "; exact: false, its cached prefixes are estimated" } else { "" };
        text += &format!("{id} serves through {engine}{index}\n");
    }
    for Worker { id, .. } in cluster.workers.iter().filter(|worker| worker.quarantined) {
        text += &format!("{id} has lost its GPU repeatedly and is drained until `kvasir undrain {id}`\n");
    }
    for Worker { id, .. } in cluster.workers.iter().filter(|worker| worker.cpus_sleep) {
        text += &format!(
            "{id}: its CPUs sleep while a stage waits, because its system refuses sched_setscheduler with SCHED_IDLE\n"
        );
    }
    for Shipment { worker, wanted_bytes, present_bytes, struck } in &cluster.shipping {
        if present_bytes < wanted_bytes {
            let (present, total) = (present_bytes >> 20, wanted_bytes >> 20);
            text += &format!("{worker} fetches its model from other workers: {present} of {total} MiB\n");
        }
        if !struck.is_empty() {
            text += &format!("{worker} received wrong bytes from {}\n", struck.join(", "));
        }
    }
    for model in &cluster.models {
        if model.verification.as_deref() == Some("unverified") {
            text += &format!("{} is unverified: its file was downloaded without a known sha256\n", model.id);
        }
    }
    let operators = |by: &Option<String>| by.as_deref() == Some("operator");
    let shown = |replica: &&Replica| replica.stages.len() > 1 || operators(&replica.planned_by);
    for replica in cluster.replicas.iter().filter(shown) {
        let stage = |stage: &Stage| format!("{} {}..{}", stage.worker, stage.layers.0, stage.layers.1);
        let stages: Vec<String> = replica.stages.iter().map(stage).collect();
        text += &format!("replica of {}: {}; {}", replica.model, stages.join(", "), replica.state);
        if replica.state != "serving" && !replica.reason.is_empty() {
            text += &format!(" ({})", replica.reason);
        }
        text += if operators(&replica.planned_by) { "; planned by an operator\n" } else { "\n" };
    }
    for Unplanned { model, reason, planned_by } in &cluster.unplanned {
        let scope = if operators(planned_by) { "not every replica" } else { "no further replica" };
        text += &format!("{scope} of {model}: {reason}\n");
    }
    for BlockedFile { digest, reason } in &cluster.blocked {
        text += &format!("file {}.. is blocked: {reason}\n", digest.get(..16).unwrap_or(digest));
    }
    if let Some(index) = &cluster.index {
        text += &format!("prefix index: {} blocks, {} KiB\n", index.blocks, index.bytes >> 10);
    }
    let Queue { requests, tokens, inflight } = cluster.queue;
    text += &format!("requests: {requests} waiting ({tokens} tokens), {inflight} with workers\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_are_below_their_worker_and_deployed_models_have_a_state() {
        let cluster: Cluster = serde_json::from_str(
            r#"{"workers":[{"id":"w0.10","instance_of":"w0","epoch":1,"state":"ready","models":["code@1"],"kv_used":1048576,"kv_total":4194304,"running":2},
                {"id":"w0.2","instance_of":"w0","epoch":1,"state":"ready","models":["chat@2"],"kv_used":0,"kv_total":2097152,"running":1},
                {"id":"w0","epoch":1,"state":"ready","kv_used":0,"kv_total":0},
                {"id":"w1.1","instance_of":"w1","epoch":1,"state":"ready","kv_used":0,"kv_total":0}],
                "deployments":[{"model":"chat","state":"loading","progress":43.0,"eta_s":12.0,"min":0,"max":1,"idle_s":600,
                "reason":"","versions":[],"rollout":null}]}"#,
        )
        .unwrap();
        let text = table(&cluster);
        let first = |line: &str| line.split("  ").find(|cell| !cell.is_empty()).map(str::to_owned);
        let nodes: Vec<_> = text.lines().skip(1).take(4).filter_map(first).collect();
        assert_eq!(nodes, ["w0", "w0.2", "w0.10", "w1.1"], "{text}");
        let whole = text.lines().find(|line| line.starts_with("w0 ")).unwrap();
        assert!(whole.contains(" 3 ") && whole.contains("1 of 6 MiB"), "{text}");
        assert!(text.contains("\n  w0.2 ") && text.contains("chat@2"), "{text}");
        assert!(text.contains("loading 43 %, 12 s left"), "{text}");
    }

    #[test]
    fn the_table_shows_every_node_and_ignores_keys_of_later_versions() {
        let cluster: Cluster = serde_json::from_str(
            r#"{"coordinators":[{"id":"c0","role":"single","term":0,"applied":0}],
                "workers":[{"id":"w0","epoch":3,"state":"ready","models":["m"],"layers":[0,30],
                            "kv_used":1048576,"kv_total":2097152,"last_progress_ms":12,"quarantined":true,"cpus_sleep":true,"new":1,
                            "operations":[{"operation":"embed","model":"m","backend":null},
                            {"operation":"vad","model":"v","backend":"onnx","sessions":2}]}],
                "models":[{"id":"m","verification":"unverified"},{"id":"n"}],"replicas":[{"model":"m","state":"waiting","reason":"stage 1 is lost",
                "stages":[{"worker":"w0","layers":[0,2]},{"worker":"w1","layers":[2,3]}]},
                {"model":"m","state":"serving","planned_by":"operator","stages":[{"worker":"w2","layers":[0,3]}]}],
                "unplanned":[{"model":"m","reason":"the operator's plan: worker z is away","planned_by":"operator"}],
                "shipping":[{"worker":"w1","wanted_bytes":9437184,"present_bytes":2097152,"struck":["w2"]}],
                "queue":{"requests":2,"tokens":80,"inflight":5},
                "index":{"blocks":7,"bytes":2048,"streams":[]}}"#,
        )
        .unwrap();
        let text = table(&cluster);
        for expected in [
            "c0",
            "w0",
            "ready",
            "1 of 2 MiB",
            "12 ms ago",
            "7 blocks",
            "requests: 2 waiting (80 tokens), 5 with workers",
            "w1 fetches its model from other workers: 2 of 9 MiB",
            "w1 received wrong bytes from w2",
            "m is unverified",
            "w0 offers embed (m), vad (v by onnx, 2 open)",
            "w0: its CPUs sleep while a stage waits",
            "w0 has lost its GPU repeatedly and is drained until `kvasir undrain w0`",
        ] {
            assert!(text.contains(expected), "{expected} not in\n{text}");
        }
        assert!(text.contains("w0 0..2, w1 2..3; waiting (stage 1 is lost)\n"), "{text}");
        assert!(text.contains("replica of m: w2 0..3; serving; planned by an operator\n"), "{text}");
        assert!(text.contains("not every replica of m: the operator's plan: worker z is away\n"), "{text}");
    }
}
