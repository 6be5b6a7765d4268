//! The later stages of a replica, as child processes of the command that runs the first stage.

use crate::local::EngineArgs;
use crate::node;
use crate::stage::StageAnnouncement;
use crate::up::child;
use anyhow::Context;
use clap::ValueEnum;
use engine::speculation::SpeculativeMethod;
use pipeline::Replica;
use pki::ca::Authority;
use proto::ids::{ClusterName, NodeId, Role};
use proto::stage::{ActivationType, StageAddress};
use std::path::Path;
use std::time::SystemTime;
use tempfile::TempDir;
use tokio::process::Child;
use tokio::runtime::Runtime;

/// Child processes of the later stages; killed when this is dropped.
pub(crate) struct LaterProcesses {
    children: Vec<Child>,
    /// Dropped after the children, which need it to be killed.
    runtime: Runtime,
    /// Identities and logs.
    _dir: TempDir,
}

/// Starts the other `shards - 1` stages of the model at `path`, each with the same arithmetic, `threads`
/// threads and, for the last one, the same drafter. Must be called on the main thread: children end with the
/// thread that started them.
pub(crate) fn start(
    path: &Path,
    shards: usize,
    (engine, speculative_method): (&EngineArgs, &SpeculativeMethod),
    threads: usize,
    activations: ActivationType,
) -> anyhow::Result<(LaterProcesses, Replica)> {
    let dir = tempfile::tempdir().context("cannot create a directory for the identities of stages")?;
    let runtime = node::io_runtime(1)?;
    let ca = Authority::new(ClusterName::new("shards")?, SystemTime::now())?;
    let model = path.to_str().context("the model's path is not UTF-8")?;
    let (mut children, mut stages) = (Vec::new(), Vec::new());
    for index in 1..shards {
        let name = format!("stage-{index}");
        let (identity, log) = (dir.path().join(&name), dir.path().join(format!("{name}.log")));
        let node = NodeId::new(name.clone())?;
        ca.issue(Role::Worker, node.clone(), SystemTime::now())?.save(&identity)?;
        let mut arguments = vec!["stage".to_owned(), model.to_owned()];
        let mut flag = |name: &str, value: String| arguments.extend([format!("--{name}"), value]);
        flag("identity", identity.display().to_string());
        flag("quic", "127.0.0.1:0".to_owned());
        flag("threads", threads.to_string());
        flag("device", value_name(engine.device));
        flag("kv-type", value_name(engine.kv_type));
        flag("activations", value_name(engine.activations));
        flag("state-type", value_name(engine.state_type));
        if let SpeculativeMethod::Assistant(drafter) = speculative_method {
            flag(
                "spec",
                format!("draft-mtp:{}", drafter.to_str().context("the drafter's path is not UTF-8")?),
            );
        }
        if let Some(kv_type) = engine.kv_type_v {
            flag("kv-type-v", value_name(kv_type));
        }
        if let Some(tau) = engine.state_tau {
            flag("state-tau", tau.to_string());
        }
        if let Some(tokens) = engine.max_model_len {
            flag("max-model-len", tokens.to_string());
        }
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let started = runtime.block_on(async {
            let mut child = child::spawn(&arguments, &log, &[])?;
            let announcement: StageAnnouncement = child::read_announcement(child.stdout.take()).await?;
            anyhow::Ok((child, announcement))
        });
        let (child, announcement) = started.with_context(|| {
            let log = std::fs::read_to_string(&log).unwrap_or_default();
            format!("{name} did not start: {}", log.trim_end())
        })?;
        children.push(child);
        stages.push(StageAddress { node, quic: announcement.quic.to_string() });
    }
    let own = ca.issue(Role::Worker, NodeId::new("stage-0")?, SystemTime::now())?.identity()?;
    let replica = Replica::new(runtime.handle().clone(), &own, stages, activations)?;
    Ok((LaterProcesses { children, runtime, _dir: dir }, replica))
}

impl Drop for LaterProcesses {
    fn drop(&mut self) {
        // Killing and waiting for children needs their runtime.
        let _runtime = self.runtime.enter();
        self.children.clear();
    }
}

fn value_name(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}
