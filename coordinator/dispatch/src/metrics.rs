//! The coordinator's metrics. Request metrics have vLLM's names, so that dashboards for vLLM work; metrics
//! unknown to vLLM are `kvasir_*`. Workers export their own engine metrics (`docs/metrics.md`).

mod batches;
mod by_model;
mod families;
pub mod history;
mod operations;
mod ports;
pub mod usage;

use crate::Outcomes;
use crate::models::{Images, Models};
use by_model::ByModel;
use consensus::telemetry::RaftMetrics;
use families::{CachedMetrics, Histograms, One, STAGE, Two, one, registered};
use history::History;
use operations::Operations;
use pki::Identity;
use ports::{Port, Ports};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use proto::ids::ModelId;
use proto::message::FinishReason;
use proto::trace::{self, TraceId};
use proto::worker::WorkerState;
use router::balancer::{AttemptError, QueueView, WorkerView};
use router::chain_memo::ChainMemo;
use router::prefix_index::IndexSize;
use router::routing::Reason;
use std::borrow::Cow;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use text::recent::RecentUse;

/// All metrics. Recording is cheap and never fails.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    by_model: ByModel,
    operations: Operations,
    ports: Ports,
    batches: batches::Batches,
    http: Family<Two, Counter>,
    routes: Family<One, Counter>,
    retries: Family<One, Counter>,
    stage: Histograms,
    cached_predicted: Counter,
    cached_actual: Counter,
    prediction_error: Family<One, Counter>,
    limited: Family<One, Counter>,
    joins: Family<One, Counter>,
    changes: Family<Two, Counter>,
    index_imports: Family<One, Counter>,
    index_exports: Counter,
    index_export_bytes: Counter,
    state: StateGauges,
    handles: RequestMetricHandles,
    history: History,
    pub(super) outcomes: Outcomes,
    /// When both clocks were first read.
    began: (SystemTime, Instant),
}

/// Handles of the metrics that every request updates, so that no label is looked up.
#[derive(Debug, Default)]
struct RequestMetricHandles {
    http: CachedMetrics<(&'static str, u16), Counter>,
    routes: CachedMetrics<Reason, Counter>,
    stage: CachedMetrics<&'static str, Histogram>,
    prediction_error: CachedMetrics<&'static str, Counter>,
}

/// Gauges that are updated at each scrape.
#[derive(Debug)]
struct StateGauges {
    index_blocks: Gauge,
    index_bytes: Gauge,
    index_max_bytes: Gauge,
    index_refused: Gauge,
    reservations: Gauge,
    queue_requests: Gauge,
    queue_tokens: Gauge,
    inflight: Gauge,
    api_keys: Gauge,
    clock_moved: Gauge<f64, AtomicU64>,
    time: Gauge<f64, AtomicU64>,
    checks: Family<One, Gauge>,
    workers: Family<One, Gauge>,
    stream_gaps: Family<One, Gauge>,
    stream_behind: Family<One, Gauge>,
    worker_silent_ms: Family<One, Gauge>,
    tokenise_seconds: Family<One, Counter<f64, AtomicU64>>,
    tokenised_bytes: Family<One, Counter>,
    images_decoded: Family<One, Counter>,
    images_known: Family<One, Counter>,
    images_refused: Family<One, Counter>,
    memo_hits: Family<One, Counter>,
    memo_misses: Family<One, Counter>,
    memo_bytes: Family<One, Gauge>,
    trace_spans: Family<One, Counter>,
    log_dropped: Counter,
    settings_differ: Gauge,
    certificate_days: Family<One, Gauge<f64, AtomicU64>>,
    certificate_lifetime: Family<One, Gauge<f64, AtomicU64>>,
}

/// The outcome of requesting a worker's prefixes from another coordinator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Imported {
    Whole,
    /// The other coordinator knows no more than this one.
    Nothing,
    /// No reply, or an unusable one.
    Failed,
}

/// Gauges that the dispatcher gives for a scrape.
#[derive(Debug)]
pub struct Load {
    pub index: IndexSize,
    pub queue: QueueView,
    /// Requests that workers have.
    pub inflight: usize,
    pub workers: Vec<WorkerView>,
}

/// A finished generation, for the request metrics.
#[derive(Debug, Clone, Copy)]
pub struct Served {
    /// Time from arrival to the first token.
    pub to_first: Duration,
    pub queued: Duration,
    /// Time from arrival to the last token.
    pub total: Duration,
    pub prompt: u64,
    pub generated: u64,
    pub reason: FinishReason,
    /// The request's trace. `None` if it is not recorded.
    pub trace: Option<TraceId>,
}

impl Metrics {
    /// All metrics at zero. `group`: the Raft metrics of a coordinator in a group.
    pub fn new(group: Option<&RaftMetrics>) -> Self {
        let mut registry = Registry::default();
        if let Some(group) = group {
            group.register(&mut registry);
        }
        let build = Family::<[(&str, &str); 1], Gauge>::default();
        build.get_or_create(&[("version", env!("CARGO_PKG_VERSION"))]).set(1);
        registry.register("kvasir_build_info", "1 for the running version", build);
        let r = &mut registry;
        Self {
            by_model: ByModel::register(r),
            operations: Operations::register(r),
            ports: Ports::register(r),
            batches: batches::Batches::register(r),
            http: registered(r, "kvasir_http_requests", "HTTP requests that have ended"),
            routes: registered(r, "kvasir_route_decisions", "Workers chosen, by reason"),
            retries: registered(r, "kvasir_retries", "Failed attempts that were retried"),
            stage: STAGE.histograms(
                r,
                "kvasir_stage_seconds",
                "Time of the stages of a request in the coordinator",
            ),
            cached_predicted: registered(
                r,
                "kvasir_cached_tokens_predicted",
                "Prompt tokens that the router expected to be cached",
            ),
            cached_actual: registered(
                r,
                "kvasir_cached_tokens_actual",
                "Prompt tokens that the chosen workers had cached",
            ),
            prediction_error: registered(
                r,
                "kvasir_cached_tokens_mispredicted",
                "Tokens by which predictions of cached tokens were over or under; 0 when all is well, but for those that \
                 were to be pulled and were not",
            ),
            limited: registered(
                r,
                "kvasir_rate_limited",
                "Requests refused because a limit of their key or its tenant was reached",
            ),
            joins: registered(
                r,
                "kvasir_node_join_requests",
                "Requests of nodes for a certificate, by outcome: first ones and renewals",
            ),
            changes: registered(r, "kvasir_admin_changes", "Changes requested by operators, by outcome"),
            index_imports: registered(
                r,
                "kvasir_index_imports",
                "Requests to other coordinators for a worker's prefixes, by outcome",
            ),
            index_exports: registered(
                r,
                "kvasir_index_exports",
                "Workers whose prefixes were sent to another coordinator",
            ),
            index_export_bytes: registered(
                r,
                "kvasir_index_export_bytes",
                "Bytes of the prefixes sent to other coordinators",
            ),
            state: StateGauges::register(r),
            handles: RequestMetricHandles::default(),
            history: History::default(),
            outcomes: Outcomes::default(),
            began: (SystemTime::now(), Instant::now()),
            registry,
        }
    }

    /// Counts a served encoder request. `times`: in the queue, and from arrival to the end.
    pub fn encoded(&self, model: &ModelId, times: (Duration, Duration), tokens: u64, trace: Option<TraceId>) {
        self.outcomes.finished(model, times.1);
        self.by_model.encoded(model, times, tokens, trace);
    }

    /// Metrics of operations.
    pub fn operations(&self) -> &Operations {
        &self.operations
    }

    pub fn history(&self) -> &History {
        &self.history
    }

    pub fn served(&self, model: &ModelId, served: Served) {
        self.history.served(&served);
        self.outcomes.finished(model, served.to_first);
        self.by_model.served(model, &served);
    }

    /// Forgets the versions that are not deployed any more.
    pub(super) fn retain_versions(&self, is_deployed: impl Fn(&ModelId) -> bool) {
        self.outcomes.retain(&is_deployed);
        self.by_model.retain_versions(is_deployed);
    }

    /// Counts a request for a model that ended with an error of the server.
    pub fn failed(&self, model: &ModelId) {
        self.outcomes.failed(model);
    }

    /// Counts `tokens` tokens that arrived `gap` after the previous ones of the same generation.
    pub fn tokens_after(&self, model: &ModelId, gap: Duration, tokens: usize) {
        let each = gap.div_f64(tokens.max(1) as f64);
        self.history.tokens(each, tokens);
        self.by_model.tokens(model, each.as_secs_f64(), tokens);
    }

    /// Counts an HTTP response. `path` is a route, not the client's text. A stream is counted at its end,
    /// with the status of the end; 499 if the client disconnected before. `shed`: a valid request was refused
    /// for now: no room, no worker, a rate limit, no majority.
    pub fn answered(&self, path: &'static str, status: u16, shed: bool) {
        self.history.answered(status, shed);
        let look_up = || {
            let labels = [("path", Cow::Borrowed(path)), ("status", Cow::Owned(status.to_string()))];
            self.http.get_or_create_owned(&labels)
        };
        self.handles.http.of((path, status), look_up).inc();
    }

    /// Metrics of the HTTP connections of a port. `limit`: most connections.
    pub fn port(&self, name: &'static str, limit: usize) -> Port {
        self.ports.port(name, limit)
    }

    pub fn routed(&self, reason: Reason) {
        let look_up = || self.routes.get_or_create_owned(&one("reason", reason.as_str()));
        self.handles.routes.of(reason, look_up).inc();
    }

    /// Counts a failed attempt that will be retried.
    pub fn retried(&self, setback: AttemptError) {
        let cause = match setback {
            AttemptError::Lost => "lost",
            AttemptError::Declined | AttemptError::Unsupported | AttemptError::Draining => "declined",
        };
        self.retries.get_or_create(&one("cause", cause)).inc();
    }

    /// Records the time of a request's stage at this coordinator.
    pub fn stage(&self, stage: &'static str, took: Duration) {
        let look_up = || self.stage.get_or_create_owned(&one("stage", stage));
        self.handles.stage.of(stage, look_up).observe(took.as_secs_f64());
    }

    /// Counts predicted and actually cached tokens. `pulls`: the worker was to pull part of them from
    /// another, and may have received less.
    pub fn cached(&self, predicted: u32, actual: u32, pulls: bool) {
        self.history.cached(predicted, actual);
        self.cached_predicted.inc_by(predicted.into());
        self.cached_actual.inc_by(actual.into());
        let (direction, error) = match predicted > actual {
            true if pulls => ("unpulled", predicted - actual),
            true => ("over", predicted - actual),
            false => ("under", actual - predicted),
        };
        let look_up = || self.prediction_error.get_or_create_owned(&one("direction", direction));
        self.handles.prediction_error.of(direction, look_up).inc_by(error.into());
    }

    /// Counts a refusal by this limit of the key or the tenant.
    pub fn join_requested(&self, outcome: &'static str) {
        self.joins.get_or_create(&one("outcome", outcome)).inc();
    }

    /// Counts a line of a batch.
    pub fn batch_line(&self, completed: bool) {
        self.batches.line(completed);
    }

    /// Sets the number and the bytes of all files, the batches that have not ended, and their lines at workers.
    pub fn batches(&self, files: u64, bytes: u64, unfinished: u64, at_workers: usize) {
        self.batches.set(files, bytes, unfinished, at_workers);
    }

    pub fn limited(&self, limit: &'static str) {
        self.limited.get_or_create(&one("limit", limit)).inc();
    }

    /// Counts an operator's change.
    pub fn changed(&self, change: &'static str, outcome: &'static str) {
        let labels = [("change", Cow::Borrowed(change)), ("outcome", Cow::Borrowed(outcome))];
        self.changes.get_or_create(&labels).inc();
    }

    /// Counts a request for a worker's prefixes to another coordinator.
    pub fn index_imported(&self, imported: Imported) {
        let outcome = match imported {
            Imported::Whole => "whole",
            Imported::Nothing => "nothing",
            Imported::Failed => "failed",
        };
        self.index_imports.get_or_create(&one("outcome", outcome)).inc();
    }

    /// Counts prefixes of a worker sent to another coordinator. `bytes`: their size.
    pub fn index_exported(&self, bytes: u64) {
        self.index_exports.inc();
        self.index_export_bytes.inc_by(bytes);
    }

    /// All metrics in the OpenMetrics text format, without the end mark.
    pub fn text(&self, load: &Load, models: &Models, chains: &ChainMemo, keys: usize) -> String {
        self.state.update(load);
        self.operations.update(&load.workers);
        self.state.api_keys.set(i64::try_from(keys).unwrap_or(i64::MAX));
        self.state.update_texts(models, chains.usage());
        self.state.update_traces(trace::counts());
        self.state.clock_moved.set(self.clock_moved());
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH);
        self.state.time.set(since_1970.map_or(0.0, |since| since.as_secs_f64()));
        self.state.checks.clear();
        for (check, severity) in doctor::latest() {
            self.state.checks.get_or_create(&one("check", check)).set(severity.number());
        }
        let mut text = String::new();
        // Writing to a `String` cannot fail.
        if encode(&mut text, &self.registry).is_err() {
            tracing::error!("cannot encode the metrics");
        }
        text.truncate(text.trim_end().trim_end_matches("# EOF").len());
        text
    }
}

impl Metrics {
    /// Updates the metrics of the process: log and certificates.
    pub fn note_node(&self, identity: &Identity) {
        let dropped = &self.state.log_dropped;
        dropped.inc_by(proto::log::dropped().saturating_sub(dropped.get()));
        let now = SystemTime::now();
        // Unreadable certificates were refused when they were loaded.
        let Ok(validities) = identity.validities() else { return };
        for (certificate, validity) in validities.named() {
            let label = one("certificate", certificate);
            self.state.certificate_days.get_or_create(&label).set(validity.days_left(now));
            self.state.certificate_lifetime.get_or_create(&label).set(validity.lifetime_left(now));
        }
    }

    /// Sets the number of settings that differ between coordinators.
    pub fn note_differences(&self, settings: usize) {
        self.state.settings_differ.set(i64::try_from(settings).unwrap_or(i64::MAX));
    }

    /// Seconds by which the wall clock advanced more than the monotonic clock.
    fn clock_moved(&self) -> f64 {
        let (wall, since) = self.began;
        let passed = match SystemTime::now().duration_since(wall) {
            Ok(forward) => forward.as_secs_f64(),
            Err(back) => -back.duration().as_secs_f64(),
        };
        passed - since.elapsed().as_secs_f64()
    }
}

impl StateGauges {
    fn register(r: &mut Registry) -> Self {
        Self {
            index_blocks: registered(r, "kvasir_index_blocks", "Distinct hash units in the prefix index"),
            index_bytes: registered(r, "kvasir_index_bytes", "Memory of the prefix index"),
            index_max_bytes: registered(r, "kvasir_index_max_bytes", "Memory limit of the prefix index"),
            index_refused: registered(
                r,
                "kvasir_index_refused_blocks",
                "Hash units that were not recorded because the index was full",
            ),
            reservations: registered(
                r,
                "kvasir_reservations",
                "Requests whose prefixes are reserved until KV events arrive",
            ),
            queue_requests: registered(r, "kvasir_queue_requests", "Generations that wait for a worker"),
            queue_tokens: registered(r, "kvasir_queue_tokens", "Prompt tokens that wait for a worker"),
            inflight: registered(r, "kvasir_inflight_requests", "Generations that were sent to workers"),
            api_keys: registered(r, "kvasir_api_keys", "Known API keys"),
            clock_moved: registered(
                r,
                "kvasir_clock_moved_seconds",
                "Seconds by which the wall clock was set forward since the start; negative if it was set back",
            ),
            time: registered(r, "kvasir_time_seconds", "The wall clock in seconds since 1970"),
            checks: registered(
                r,
                "kvasir_check",
                "Findings about the coordinator's machine: 0 ok, 1 warning, 2 problem",
            ),
            workers: registered(r, "kvasir_workers", "Workers, by state"),
            stream_gaps: registered(r, "kvasir_event_stream_gaps", "Gaps seen in a worker's event stream"),
            stream_behind: registered(
                r,
                "kvasir_event_stream_behind",
                "1 while events of a worker are missing",
            ),
            worker_silent_ms: registered(
                r,
                "kvasir_worker_silent_milliseconds",
                "Time since a worker's last report",
            ),
            memo_bytes: registered(r, "kvasir_memo_bytes", "Memory of the memos of texts and prompts"),
            trace_spans: registered(r, "kvasir_trace_spans", "Spans of traced requests, by outcome"),
            tokenised_bytes: registered(r, "kvasir_tokenised_bytes", "Bytes of tokenized texts"),
            images_decoded: registered(r, "kvasir_images_decoded", "Images of requests that were decoded"),
            images_known: registered(r, "kvasir_images_known", "Images of requests whose file was known"),
            images_refused: registered(r, "kvasir_images_refused", "Images of requests that were refused"),
            log_dropped: registered(
                r,
                "kvasir_log_lines_dropped",
                "Log lines that were dropped because the reader was too slow or had closed the pipe",
            ),
            settings_differ: registered(
                r,
                "kvasir_settings_differ",
                "Settings that differ between coordinators",
            ),
            certificate_days: registered(
                r,
                "kvasir_certificate_days_left",
                "Days until the certificate of the node or of its authority expires; negative if it has expired",
            ),
            certificate_lifetime: registered(
                r,
                "kvasir_certificate_life_left",
                "Remaining share of the certificate's lifetime, 1 to 0",
            ),
            memo_hits: registered(r, "kvasir_memo_hits", "Hits of the memos of texts and prompts"),
            memo_misses: registered(r, "kvasir_memo_misses", "Misses of the memos of texts and prompts"),
            tokenise_seconds: registered(r, "kvasir_tokenise_seconds", "Time spent tokenizing texts"),
        }
    }

    fn update_traces(&self, counts: trace::SpanCounts) {
        for (outcome, total) in counts.by_outcome() {
            let counter = self.trace_spans.get_or_create(&one("outcome", outcome));
            counter.inc_by(total.saturating_sub(counter.get()));
        }
    }

    /// Updates the cost of tokenizing, the savings of the memos, and counts of images.
    fn update_texts(&self, models: &Models, chains: RecentUse) {
        // Totals counted elsewhere: adds what came since the last scrape.
        let follow = |counter: &Counter, total: u64| {
            counter.inc_by(total.saturating_sub(counter.get()));
        };
        let mut tokens = RecentUse::default();
        // Totals of models that are not offered any more are not reported.
        self.tokenised_bytes.clear();
        self.tokenise_seconds.clear();
        let images = [&self.images_decoded, &self.images_known, &self.images_refused];
        images.iter().for_each(|family| family.clear());
        for model in models.iter() {
            let label = one("model_name", model.id.as_str().to_owned());
            let (took, bytes) = model.tokenised();
            self.tokenised_bytes.get_or_create(&label).inc_by(bytes);
            self.tokenise_seconds.get_or_create(&label).inc_by(took.as_secs_f64());
            for (family, count) in images.iter().zip(model.images().into_iter().flat_map(Images::counts)) {
                family.get_or_create(&label).inc_by(count);
            }
            let used = model.tokenizer.memo_usage().unwrap_or_default();
            tokens.hits += used.hits;
            tokens.misses += used.misses;
            tokens.bytes += used.bytes;
        }
        for (memo, used) in [("tokens", tokens), ("blocks", chains)] {
            let label = one("memo", memo);
            follow(&self.memo_hits.get_or_create(&label), used.hits);
            follow(&self.memo_misses.get_or_create(&label), used.misses);
            self.memo_bytes.get_or_create(&label).set(i64::try_from(used.bytes).unwrap_or(i64::MAX));
        }
    }

    fn update(&self, Load { index, queue, inflight, workers }: &Load) {
        let int = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        self.index_blocks.set(int(index.blocks));
        self.index_bytes.set(int(index.bytes));
        self.index_max_bytes.set(int(index.max_bytes));
        self.index_refused.set(int(index.refused));
        self.reservations.set(int(index.reservations));
        self.queue_requests.set(int(queue.requests as u64));
        self.queue_tokens.set(int(queue.tokens));
        self.inflight.set(int(*inflight as u64));
        for state in [WorkerState::Starting, WorkerState::Ready, WorkerState::Draining] {
            let is_worker = |w: &&WorkerView| !w.member.register.node.is_instance();
            let count = workers.iter().filter(is_worker).filter(|w| w.state() == state).count();
            self.workers.get_or_create(&one("state", state_name(state))).set(int(count as u64));
        }
        // Workers that left are not reported.
        for family in [&self.stream_gaps, &self.stream_behind, &self.worker_silent_ms] {
            family.clear();
        }
        for WorkerView { member, stream, silent, .. } in workers {
            let label = one("worker", member.register.node.as_str().to_owned());
            if let Some(stream) = stream {
                self.stream_gaps.get_or_create(&label).set(int(stream.gaps));
                self.stream_behind.get_or_create(&label).set(i64::from(stream.behind));
            }
            let silent = u64::try_from(silent.as_millis()).unwrap_or(u64::MAX);
            self.worker_silent_ms.get_or_create(&label).set(int(silent));
        }
    }
}

/// The state's name in JSON and labels.
pub fn state_name(state: WorkerState) -> &'static str {
    match state {
        WorkerState::Starting => "starting",
        WorkerState::Ready => "ready",
        WorkerState::Draining => "draining",
    }
}

/// The reason's name in the API and in labels.
pub fn finish_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "abort",
    }
}
