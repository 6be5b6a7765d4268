//! The dashboard's data as JSON. Keys are only ever added; docs/dashboard.md explains them.

use super::engines::{Engine, Engines, GpuSummary};
use super::paths::{Path, Paths};
use super::requests::{Clock, request, rounded};
use super::traffic::{Totals, Traffic};
use super::why::{Common, Facts, verdict};
use crate::{Ops, cluster};
use dispatch::metrics::history::Moment;
use dispatch::quota::Usage;
use proto::block::HASH_UNIT_TOKENS;
use proto::ids::{NodeId, TenantId};
use proto::shard::ShippingReport;
use router::admission::TenantView;
use router::balancer::recent::{Locality, Lost, RequestedPrompt};
use router::balancer::{Balancer, WorkerView};
use router::timeline::{SLOT, SLOTS, Sketch};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// How long a snapshot waits for workers. Later replies appear in the next snapshot.
const WORKERS_LIMIT: Duration = Duration::from_millis(700);
/// Percentiles cover the last minute.
const WINDOW_SLOTS: usize = 30;
/// Slots that every snapshot repeats: the current one, and the one that may have just ended.
const REPEATED_SLOTS: usize = 2;
/// Shorter common prefixes do not explain a worker's load.
const COMMON_TOKENS: usize = 64;

type Holders = Vec<(NodeId, u32, u32)>;

/// Takes snapshots repeatedly, and remembers what it has already reported.
#[derive(Debug, Default)]
pub(super) struct Observer {
    engines: Engines,
    traffic: Traffic,
    seen: u64,
}

/// The initial data of a page: all requests and the last minutes.
pub(super) fn initial_data(ops: &Ops) -> Value {
    let clock = Clock::read();
    let (_, requests) = ops.dispatch.look(|balancer| decisions(balancer, 0));
    let requests: Vec<Value> = requests.iter().map(|(d, outcome)| request(clock, d, outcome)).collect();
    json!({"requests": requests, "history": history(ops, clock, SLOTS), "slot_s": SLOT.as_secs()})
}

type Decisions = Vec<(std::sync::Arc<router::balancer::recent::Decided>, router::balancer::recent::Outcome)>;

fn decisions(balancer: &Balancer, after: u64) -> (u64, Decisions) {
    (balancer.recent().changes(), balancer.recent().since(after).collect())
}

impl Observer {
    /// Starts with all current requests as already reported.
    pub(super) fn new(ops: &Ops) -> Self {
        let seen = ops.dispatch.look(|balancer| balancer.recent().changes());
        Self { engines: Engines::default(), traffic: Traffic::default(), seen }
    }

    /// The complete current state; of requests and history only what is new.
    pub(super) async fn take_snapshot(&mut self, ops: &Ops) -> Value {
        let metrics = ops.dispatch.worker_metrics(WORKERS_LIMIT).await;
        let clock = Clock::read();
        let workers = ops.dispatch.workers();
        let engines = metrics.iter().filter_map(|(node, text)| {
            let member = workers.iter().find(|view| view.member.register.node == *node)?;
            Some((node.clone(), member.member.register.epoch, Engine::read(text)))
        });
        self.engines.take(clock.now, engines.collect());
        self.traffic.take(clock.now, Totals::read(&workers, ops.dispatch.outcomes().totals()));
        let (prompts, tenants, (seen, requests)) = ops.dispatch.look(|balancer| {
            let prompts: Vec<RequestedPrompt> = balancer.recent().prompts().cloned().collect();
            (prompts, balancer.tenants(), decisions(balancer, self.seen))
        });
        self.seen = seen;
        let paths = Paths::find(clock.now, &prompts);
        let holders: Vec<Holders> = ops
            .dispatch
            .look(|balancer| paths.all.iter().map(|path| balancer.holders(path.chain())).collect());
        let shipments = ops.dispatch.shipments().all();
        let facts: Vec<Facts> =
            workers.iter().map(|view| self.facts(view, &paths, &holders, &shipments)).collect();
        let (_, queue, _) = ops.dispatch.sizes();
        let (worker, level, text) = verdict(&facts, queue.requests);
        let requests: Vec<Value> = requests.iter().map(|(d, outcome)| request(clock, d, outcome)).collect();
        json!({
            "at": clock.unix_ms,
            "coordinator": ops.id.as_str(),
            "verdict": {"worker": worker, "level": level.name(), "text": text},
            "cluster": cluster::view(ops, &cluster::asleep(&metrics)),
            "workers": workers.iter().zip(&facts).map(|(view, of)| self.worker(view, of, &facts)).collect::<Vec<_>>(),
            "models": self.traffic.view(),
            "raft": raft(ops),
            "tenants": tenant_views(&tenants, &paths, &ops.keys.tenant_usage()),
            "prefixes": paths.all.iter().zip(&holders).map(|(path, held)| prefix(path, held, &prompts)).collect::<Vec<_>>(),
            "latency": latency(ops, clock),
            "locality": recent_locality(ops, clock),
            "history": history(ops, clock, REPEATED_SLOTS),
            "requests": requests,
        })
    }

    fn facts(
        &self,
        view: &WorkerView,
        paths: &Paths,
        holders: &[Holders],
        shipments: &[(NodeId, ShippingReport)],
    ) -> Facts {
        let node = &view.member.register.node;
        let report = view.report.as_ref();
        let requests = paths.requests.get(node).copied().unwrap_or(0);
        let all: usize = paths.requests.values().sum();
        let share = (all > 0).then(|| requests as f64 / all as f64);
        let shipping = shipments
            .iter()
            .find(|(of, _)| of == node)
            .map(|(_, shipment)| (shipment.present, shipment.wanted));
        Facts {
            id: node.to_string(),
            models: view.member.register.models.iter().map(|model| model.id.clone()).collect(),
            instance_of: node.is_instance().then(|| node.worker().to_owned()),
            state: view.state(),
            draining: view.member.draining,
            queue_s: view.queue_seconds,
            running: report.map_or(0, |r| r.running.saturating_add(r.waiting)).max(view.inflight),
            waiting: report.map_or(0, |r| r.waiting),
            pending_tokens: view.pending_tokens.max(report.map_or(0, |r| r.pending_prefill_tokens)),
            prefill_rate: report.map_or(0.0, |r| r.prefill_rate.into()),
            kv: report.map_or(0.0, |r| r.kv_used as f64 / (r.kv_total as f64).max(1.0)),
            preempted: self.engines.growth(node, "vllm:num_preemptions_total"),
            silent: view.silent,
            stalled: Duration::from_millis(report.map_or(0, |r| r.stalled_ms)),
            share,
            common: common(node, requests, paths, holders),
            shipping,
        }
    }

    fn worker(&self, view: &WorkerView, facts: &Facts, fleet: &[Facts]) -> Value {
        let node = &view.member.register.node;
        let rate = |name: &str| self.engines.rate(node, name).map(rounded);
        let growth = |name: &str| self.engines.growth(node, name);
        let queried = growth("vllm:prefix_cache_queries_total");
        let hits = (queried > 0.0).then(|| rounded(growth("vllm:prefix_cache_hits_total") / queried));
        let report = view.report.as_ref();
        json!({
            "id": node.as_str(),
            "level": facts.level().name(),
            "heat": rounded(facts.heat()),
            "why": facts.why(fleet),
            "queue_s": rounded(facts.queue_s),
            "sequences": facts.running,
            "pending_tokens": facts.pending_tokens,
            "share": facts.share.map(rounded),
            "step_ms": report.map_or(0.0, |r| r.step_ms),
            "generated_per_s": rate("vllm:generation_tokens_total"),
            "prefilled_per_s": rate("kvasir_prefill_tokens_computed_total"),
            "steps_per_s": rate("kvasir_steps_total"),
            "evictions_per_s": rate("kvasir_kv_evictions_total"),
            "preempted": facts.preempted,
            "hit_ratio": hits,
            "silent_ms": u64::try_from(view.silent.as_millis()).unwrap_or(u64::MAX),
            "stalled_ms": report.map_or(0, |r| r.stalled_ms),
            "hottest": facts.common.as_ref().map(|common| json!({
                "prefix": common.name,
                "tokens": common.tokens,
                "share": rounded(common.share),
                "holders": common.holders,
            })),
            "kv": self.kv(node, report.map_or((0, 0), |r| (r.kv_used, r.kv_total))),
            "stages": self.stages(node),
            "steps_under_way": self.engines.last(node).map_or(0.0, |e| e.get("kvasir_shard_steps_under_way")),
            "weight_bytes": self.engines.last(node).map_or(0.0, |e| e.get("kvasir_weight_bytes")),
            "gpu": self.engines.last(node).and_then(Engine::gpu_health).map(gpu),
            "fetched_per_s": rate("kvasir_shard_fetched_bytes_total"),
            "served_per_s": rate("kvasir_shard_served_bytes_total"),
            "pulled_per_s": self.engines.label_rate(node, "kvasir_block_transfer_bytes_total", "pulled").map(rounded),
            "sent_per_s": self.engines.label_rate(node, "kvasir_block_transfer_bytes_total", "sent").map(rounded),
        })
    }

    /// Bytes of the KV arena by cache group, and of the tiers.
    fn kv(&self, node: &NodeId, (used, total): (u64, u64)) -> Value {
        let by_label = |name: &str| {
            let values = self.engines.last(node).map_or(&[][..], |engine| engine.by_label(name));
            values.iter().map(|(label, bytes)| (label.clone(), json!(bytes))).collect::<Map<_, _>>()
        };
        json!({
            "used": used,
            "total": total,
            "groups": by_label("kvasir_kv_group_bytes"),
            "groups_used": by_label("kvasir_kv_group_used_bytes"),
            "tiers": by_label("kvasir_tier_bytes"),
        })
    }

    /// Activity of a replica's stages, as reported by its first stage.
    fn stages(&self, node: &NodeId) -> Vec<Value> {
        let named = self
            .engines
            .last(node)
            .map_or(&[][..], |engine| engine.by_label("kvasir_shard_busy_seconds_total"));
        let stage = |(stage, _): &(String, f64)| {
            let rate = |name: &str| self.engines.label_rate(node, name, stage).map(rounded);
            json!({
                "stage": stage,
                "busy": rate("kvasir_shard_busy_seconds_total"),
                "stalled": rate("kvasir_shard_stalled_seconds_total"),
                "received_per_s": rate("kvasir_shard_received_bytes_total"),
            })
        };
        named.iter().map(stage).collect()
    }
}

fn gpu(health: GpuSummary) -> Value {
    json!({
        "power_w": health.power_watts.map(rounded),
        "temperature_c": health.temperature_celsius,
        "slowed_by": health.slowed_by,
        "unreadable": health.unreadable,
    })
}

/// The common prefix of a worker's requests that saves the most tokens.
fn common(node: &NodeId, requests: usize, paths: &Paths, holders: &[Holders]) -> Option<Common> {
    let taken = |path: &Path| path.workers.get(node).copied().unwrap_or(0);
    let long = paths.all.iter().zip(holders).filter(|(path, _)| path.tokens() >= COMMON_TOKENS);
    let (path, held) = long.max_by_key(|(path, _)| taken(path) * path.tokens())?;
    let share = taken(path) as f64 / requests.max(1) as f64;
    let whole = |(_, _, expected): &&(NodeId, u32, u32)| *expected as usize >= path.units;
    let holders = held.iter().filter(whole).count();
    (share > 0.0).then(|| Common { name: path.name(), tokens: path.tokens(), share, holders })
}

fn prefix(path: &Path, holders: &Holders, prompts: &[RequestedPrompt]) -> Value {
    let tokens = |units: u32| units as usize * HASH_UNIT_TOKENS;
    let holder = |(node, held, expected): &(NodeId, u32, u32)| json!({"worker": node.as_str(), "tokens": tokens(*expected), "held": tokens(*held)});
    json!({
        "name": path.name(),
        "parent": path.parent,
        "tokens": path.tokens(),
        "requests": path.requests,
        "share": rounded(path.requests as f64 / prompts.len().max(1) as f64),
        "model": path.model.as_str(),
        "tenants": path.tenants.iter().map(|tenant| &**tenant).collect::<Vec<_>>(),
        "holders": holders.iter().map(holder).collect::<Vec<_>>(),
        "workers": path.workers.iter().map(|(node, n)| (node.to_string(), json!(n))).collect::<Map<_, _>>(),
    })
}

/// Tenants with recent requests, and tenants that use their limits: a tenant at its limit has no requests
/// placed.
fn tenant_views(waiting: &[TenantView], paths: &Paths, limited: &BTreeMap<TenantId, Usage>) -> Vec<Value> {
    let mut all: Vec<&str> = paths.tenants.keys().map(|tenant| &**tenant).collect();
    all.extend(waiting.iter().map(|view| view.tenant.as_str()));
    let used = |usage: &Usage| usage.requests.0 > 0 || usage.tokens.0 > 0 || usage.inflight.0 > 0;
    all.extend(limited.iter().filter(|(_, usage)| used(usage)).map(|(tenant, _)| tenant.as_str()));
    all.sort_unstable();
    all.dedup();
    let view = |tenant: &&str| {
        let queued = waiting.iter().find(|view| view.tenant == **tenant);
        let (requests, tokens) = paths.tenants.get(*tenant).copied().unwrap_or_default();
        json!({
            "tenant": tenant,
            "waiting": queued.map_or(0, |view| view.requests),
            "waiting_tokens": queued.map_or(0, |view| view.tokens),
            "placed": requests,
            "placed_tokens": tokens,
            "limits": TenantId::new(*tenant).ok().and_then(|tenant| limited.get(&tenant)).map(limits),
        })
    };
    all.iter().map(view).collect()
}

fn limits(usage: &Usage) -> Value {
    let limit =
        |(used, allowed): (u64, u64)| (allowed > 0).then(|| json!({"used": used, "allowed": allowed}));
    json!({
        "requests_per_minute": limit(usage.requests),
        "tokens_per_minute": limit(usage.tokens),
        "concurrency": limit(usage.inflight),
    })
}

fn raft(ops: &Ops) -> Value {
    let Some(raft) = &ops.raft else { return Value::Null };
    let standing = raft.standing();
    json!({
        "quorum": standing.quorum,
        "term": standing.term,
        "committed": standing.committed,
        "applied": standing.applied,
        "voters": standing.voters,
        "learners": standing.learners,
        "leader_changes": standing.leader_changes,
        "log_entries": standing.log_entries,
        "log_bytes": standing.log_bytes,
        "disk_full": standing.disk_full,
    })
}

fn percentiles(sketch: &Sketch) -> Value {
    let at = |share: f64| sketch.quantile(share).map(rounded);
    json!({"p50": at(0.5), "p95": at(0.95), "p99": at(0.99), "count": sketch.count()})
}

/// Latencies and counts of the last minute.
fn latency(ops: &Ops, clock: Clock) -> Value {
    let mut all = Moment::default();
    ops.metrics.history().last(clock.now, WINDOW_SLOTS).iter().for_each(|(_, moment)| all.merge(moment));
    let seconds = (SLOT * WINDOW_SLOTS as u32).as_secs();
    json!({
        "window_s": seconds,
        "ttft": percentiles(&all.ttft),
        "itl": percentiles(&all.itl),
        "e2e": percentiles(&all.e2e),
        "done": all.done,
        "generated": all.generated,
        "cached": all.cached,
        "mispredicted": all.mispredicted,
        "shed": all.shed,
        "failed": all.failed,
    })
}

fn locality(at: &Locality) -> Map<String, Value> {
    let lost: Map<String, Value> =
        Lost::ALL.iter().zip(at.lost).map(|(lost, tokens)| (lost.name().to_owned(), json!(tokens))).collect();
    let mut fields = Map::new();
    fields.insert("requests".into(), json!(at.requests));
    fields.insert("prompt".into(), json!(at.prompt));
    fields.insert("best".into(), json!(at.best));
    fields.insert("predicted".into(), json!(at.predicted));
    fields.insert("lost".into(), Value::Object(lost));
    fields
}

/// Locality of the last minute's prompts.
fn recent_locality(ops: &Ops, clock: Clock) -> Value {
    let mut all = Locality::default();
    ops.dispatch.look(|balancer| {
        balancer.recent().locality().last(clock.now, WINDOW_SLOTS).for_each(|(_, at)| all.merge(at));
    });
    Value::Object(locality(&all))
}

fn history(ops: &Ops, clock: Clock, slots: usize) -> Value {
    let moment = |(ago, moment): &(Duration, Moment)| {
        let curve = |sketch: &Sketch| [0.5, 0.95, 0.99].map(|share| sketch.quantile(share).map(rounded));
        json!({
            "at": clock.ms_ago(*ago),
            "ttft": curve(&moment.ttft),
            "itl": curve(&moment.itl),
            "e2e": curve(&moment.e2e),
            "done": moment.done,
            "prompt": moment.prompt,
            "generated": moment.generated,
            "shed": moment.shed,
            "failed": moment.failed,
        })
    };
    let moments: Vec<Value> = ops.metrics.history().last(clock.now, slots).iter().map(moment).collect();
    let localities: Vec<(Duration, Locality)> = ops.dispatch.look(|balancer| {
        balancer.recent().locality().last(clock.now, slots).map(|(ago, at)| (ago, *at)).collect()
    });
    let localities = localities.iter().map(|(ago, at)| {
        let mut fields = locality(at);
        fields.insert("at".into(), json!(clock.ms_ago(*ago)));
        Value::Object(fields)
    });
    json!({"requests": moments, "locality": localities.collect::<Vec<_>>()})
}
