//! The JSON of `kvasir status --json`. Keys are only ever added.

use super::{Ops, deployments};
use consensus::table::ModelBlocked;
use dispatch::HostWorker;
use dispatch::metrics::state_name;
use group::agreement::{Difference, Standing};
use group::replicas::ReplicaView;
use proto::deployment::HostReport;
use proto::ids::{ModelId, NodeId};
use proto::shard::ShippingReport;
use router::balancer::{OfferView, WorkerView};
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};

/// Whether any model is planned over several workers.
pub(crate) fn has_stages(ops: &Ops) -> bool {
    let planned = ops.replicas.as_ref().map(|replicas| replicas.view()).unwrap_or_default();
    planned.iter().any(|replica| replica.plan.stages.len() > 1)
}

/// The workers whose CPUs sleep while a stage waits, from their metrics.
pub(crate) fn asleep(metrics: &[(NodeId, String)]) -> HashSet<NodeId> {
    let sleeps = |text: &str| text.lines().any(|line| line == "kvasir_stage_cpus_sleep 1");
    metrics.iter().filter(|(_, text)| sleeps(text)).map(|(node, _)| node.clone()).collect()
}

/// The whole status. `asleep`: the result of [`asleep`].
pub(crate) fn view(ops: &Ops, asleep: &HashSet<NodeId>) -> Value {
    let workers = ops.dispatch.workers();
    let hosts = hosts(ops);
    let encoders: HashMap<NodeId, ModelId> =
        ops.dispatch.encoders().into_iter().map(|(node, tower)| (node, tower.model)).collect();
    let encodes = |view: &WorkerView| encoders.get(&view.member.register.node);
    let planned = ops.replicas.as_ref().map(|replicas| replicas.view()).unwrap_or_default();
    let (index, queue, inflight) = ops.dispatch.sizes();
    let models: Vec<Value> = ops
        .models
        .iter()
        .map(|model| {
            let served = ops.dispatch.model(&model.id);
            json!({
                "id": model.id.as_str(),
                "max_model_len": served.as_ref().map(|s| s.max_model_len),
                "task": served.map(|s| s.task.name()),
                "verification": model.verification.map(|verification| verification.word()),
            })
        })
        .collect();
    json!({
        "coordinators": coordinators(ops),
        "workers": workers.iter().map(|view| worker(ops, view, encodes(view), &planned, asleep, &hosts)).collect::<Vec<_>>(),
        "models": models,
        // As `/admin/v1/deployments` lists them.
        "deployments": deployments::all(ops),
        "adapters": adapters(ops),
        "replicas": replicas(&workers, &planned),
        "shipping": ops.dispatch.shipments().all().iter().map(shipment).collect::<Vec<_>>(),
        "unplanned": unplanned(ops),
        "settings": differences(ops),
        "authority_ends": ops.identity.validities().ok().map(|validities| validities.authority.ends),
        "condemned": blocked(ops),
        "index": {
            "blocks": index.blocks,
            "bytes": index.bytes,
            "max_bytes": index.max_bytes,
            "refused": index.refused,
            "reservations": index.reservations,
            "streams": workers.iter().filter_map(stream).collect::<Vec<_>>(),
        },
        "queue": {"requests": queue.requests, "tokens": queue.tokens, "inflight": inflight},
    })
}

/// The adapters, each with the workers that serve it.
fn adapters(ops: &Ops) -> Vec<Value> {
    let all = ops.dispatch.adapters().into_iter();
    let with_workers = all.map(|adapter| {
        let workers: Vec<String> = ops.dispatch.look(|balancer| {
            let members = balancer.table().members().filter(|member| member.adapter(&adapter.name).is_some());
            members.map(|member| member.register.node.to_string()).collect()
        });
        json!({
            "id": adapter.name.as_str(),
            "parent": adapter.parent.as_str(),
            "rank": adapter.rank,
            "path": adapter.path,
            "workers": workers,
        })
    });
    with_workers.collect()
}

fn coordinators(ops: &Ops) -> Vec<Value> {
    let Some(agreement) = &ops.agreement else {
        // A single coordinator is always the leader.
        let applied = ops.dispatch.table_version();
        let ends = ops.identity.validities().ok().map(|validities| validities.node.ends);
        return vec![
            json!({"id": ops.id.as_str(), "role": "leader", "term": 0, "applied": applied, "certificate_ends": ends}),
        ];
    };
    let value = |Standing { node, role, term, applied }: Standing| {
        let ends = agreement.certificate_ends(&node);
        json!({"id": node.as_str(), "role": role, "term": term, "applied": applied, "certificate_ends": ends})
    };
    agreement.standings().into_iter().map(value).collect()
}

/// The workers that load models by order: labels, and bytes for all models, in all and in use.
fn hosts(ops: &Ops) -> HashMap<NodeId, Value> {
    let reports = ops.deployments.as_ref().map(|deployments| deployments.reports()).unwrap_or_default();
    let host = |host: HostWorker| {
        let used = reports.get(&host.node).map(|report| report.used);
        let HostReport { engine, labels, budget, .. } = host.report;
        (host.node, json!({"engine": engine, "labels": labels, "budget": budget, "used": used}))
    };
    ops.dispatch.hosts().into_iter().map(host).collect()
}

fn worker(
    ops: &Ops,
    view: &WorkerView,
    encodes: Option<&ModelId>,
    planned: &[ReplicaView],
    asleep: &HashSet<NodeId>,
    hosts: &HashMap<NodeId, Value>,
) -> Value {
    let register = &view.member.register;
    let quarantined = ops.dispatch.lost_devices().quarantined(&register.node);
    let report = view.report.as_ref();
    let first = register.models.first();
    let silent = u64::try_from(view.silent.as_millis()).unwrap_or(u64::MAX);
    json!({
        "id": register.node.as_str(),
        // The worker of which this is an instance: a model that it holds beside others.
        "instance_of": register.node.is_instance().then(|| register.node.worker()),
        "host": hosts.get(&register.node),
        "epoch": register.epoch.0,
        "state": state_name(view.state()),
        // The state that the worker reported. Once this is `draining`, it refuses new work from any
        // coordinator.
        "reported": report.map(|r| state_name(r.state)),
        // The operators' setting; the worker's state follows it.
        "draining": view.member.draining,
        // Whether it drains because it lost its GPU repeatedly, as far as known here.
        "quarantined": view.member.draining && quarantined,
        // Whether its system refuses the setting that keeps CPUs awake while a stage waits for another.
        "cpus_sleep": asleep.contains(&register.node),
        "engine": first.map(|m| m.engine.as_str()),
        // Whether its KV events name exactly what its cache holds.
        "exact": report.is_none_or(|r| r.exact),
        "numeric_class": first.map(|m| m.numeric_class.as_str()),
        "models": register.models.iter().map(|m| m.id.as_str()).collect::<Vec<_>>(),
        "layers": stage_of(planned, &register.node).or(first.map(|m| m.layers)),
        "kv_used": report.map_or(0, |r| r.kv_used),
        "kv_total": report.map_or(0, |r| r.kv_total),
        "last_progress_ms": silent + report.map_or(0, |r| r.stalled_ms),
        "pid": register.pid,
        "quic": register.quic,
        "ops": register.ops,
        "running": report.map_or(0, |r| r.running),
        "role": encodes.map_or(view.part.name(), |_| "encode"),
        // The model whose images it encodes for other workers.
        "encodes": encodes.map(ModelId::as_str),
        "pulled_bytes": view.pulls.pulled_bytes,
        "sent_bytes": view.pulls.sent_bytes,
        "pull_failures": view.pulls.failures,
        "waiting": report.map_or(0, |r| r.waiting),
        "inflight": view.inflight,
        "pending_tokens": view.pending_tokens,
        // Estimated seconds until it would start another prompt; used for routing.
        "queue_s": view.queue_seconds,
        // Tokens generated since its start.
        "generated_tokens": report.map_or(0, |r| r.tokens),
        "prefill_rate": report.map_or(0.0, |r| r.prefill_rate),
        "rss": report.map_or(0, |r| r.rss),
        // As the worker reported it.
        "certificate_ends": ops.dispatch.certificates().ends(&register.node),
        // Its operations besides generation, and their sessions from this coordinator.
        "operations": view.operations.iter().map(offer).collect::<Vec<_>>(),
    })
}

fn offer(OfferView { operation, model, backend, sessions }: &OfferView) -> Value {
    let backend = Some(backend.as_str()).filter(|backend| !backend.is_empty());
    json!({"operation": operation.name(), "model": model.as_str(), "backend": backend, "sessions": sessions})
}

/// A worker that fetches its model from other workers, or has fetched it.
fn shipment((node, report): &(NodeId, ShippingReport)) -> Value {
    json!({
        "worker": node.as_str(),
        "wanted_bytes": report.wanted,
        "present_bytes": report.present,
        "struck": report.struck.iter().map(NodeId::as_str).collect::<Vec<_>>(),
    })
}

/// Models for which no further replica can be planned although workers are free, and models whose operator's
/// plan is not fully placed. Empty at coordinators that do not lead.
fn unplanned(ops: &Ops) -> Vec<Value> {
    let unplanned = ops.replicas.as_ref().map(|replicas| replicas.unplanned()).unwrap_or_default();
    let table = ops.agreement.as_ref().and_then(|agreement| agreement.table());
    let by_operator =
        |model: &ModelId| table.as_ref().is_some_and(|table| table.operator_plans().contains_key(model));
    let value = |(model, reason): (&ModelId, &String)| {
        let by = if by_operator(model) { "operator" } else { "leader" };
        json!({"model": model.as_str(), "reason": reason, "planned_by": by})
    };
    unplanned.iter().map(value).collect()
}

/// Settings that differ between coordinators.
fn differences(ops: &Ops) -> Vec<Value> {
    let differences = ops.agreement.as_ref().map(|agreement| agreement.differences()).unwrap_or_default();
    let value = |Difference { setting, odd, binding, .. }: &Difference| {
        let odd: Vec<&str> = odd.iter().map(NodeId::as_str).collect();
        json!({"setting": setting, "coordinators": odd, "unready": binding})
    };
    differences.iter().map(value).collect()
}

/// The block list of models.
fn blocked(ops: &Ops) -> Vec<Value> {
    let table = ops.agreement.as_ref().and_then(|agreement| agreement.table());
    let value = |blocked: &ModelBlocked| {
        let digest: String = blocked.model_digest.iter().map(|byte| format!("{byte:02x}")).collect();
        json!({"digest": digest, "worker": blocked.node.as_str(), "reason": blocked.reason})
    };
    table.iter().flat_map(|table| table.blocked().values()).map(value).collect()
}

/// The layer range of a worker in a replica.
fn stage_of(planned: &[ReplicaView], node: &NodeId) -> Option<(u32, u32)> {
    let mut stages = planned.iter().flat_map(|replica| &replica.plan.stages);
    stages.find(|stage| stage.node == *node).map(|stage| stage.layers)
}

/// Replicas: workers that serve a model alone, and replicas of several workers.
fn replicas(workers: &[WorkerView], planned: &[ReplicaView]) -> Vec<Value> {
    let single = |view: &WorkerView| stage_of(planned, &view.member.register.node).is_none();
    let single = workers.iter().filter(|view| single(view)).flat_map(|view| {
        let register = &view.member.register;
        register.models.iter().map(|model| {
            let stage = json!({"worker": register.node.as_str(), "layers": [model.layers.0, model.layers.1]});
            json!({"model": model.id.as_str(), "state": "serving", "stages": [stage]})
        })
    });
    let planned = planned.iter().map(|ReplicaView { plan_index, plan, by_operator, report }| {
        let stages = plan
            .stages
            .iter()
            .map(|stage| json!({"worker": stage.node.as_str(), "layers": [stage.layers.0, stage.layers.1]}));
        json!({
            "model": plan.model.as_str(),
            "life": plan_index,
            "planned_by": if *by_operator { "operator" } else { "leader" },
            // As its first stage reported.
            "state": report.as_ref().map_or("planned", |report| report.state.name()),
            "attempts": report.as_ref().map_or(0, |report| report.attempts),
            "reason": report.as_ref().map_or("", |report| report.reason.as_str()),
            "stages": stages.collect::<Vec<_>>(),
        })
    });
    single.chain(planned).collect()
}

fn stream(view: &WorkerView) -> Option<Value> {
    let stream = view.stream?;
    Some(json!({
        "worker": view.member.register.node.as_str(),
        "epoch": stream.epoch.0,
        "applied": stream.applied,
        "gaps": stream.gaps,
        "snapshots": stream.snapshots,
        "behind": stream.behind,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_whose_metrics_report_sleeping_cpus_are_found() {
        let entry = |name: &str, text: &str| (NodeId::new(name).unwrap(), text.to_owned());
        let metrics = [
            entry(
                "w0",
                "# HELP kvasir_stage_cpus_sleep x.\nkvasir_stage_cpus_sleep 1\nkvasir_steps_total 3\n# EOF\n",
            ),
            entry("w1", "kvasir_stage_cpus_sleep 0\n# EOF\n"),
            entry("w2", "# EOF\n"),
        ];
        assert_eq!(asleep(&metrics), HashSet::from([NodeId::new("w0").unwrap()]));
    }
}
