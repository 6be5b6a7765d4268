//! Exports spans to a collector with OTLP over HTTP, on a separate thread. Requests never wait for the
//! export.

mod client;

use crate::config::ConfigError;
use anyhow::Context;
use client::{Client, Failure};
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{Array, InstrumentationScope, KeyValue, StringValue, Value};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanExporter as _, SpanLinks};
use proto::ids::NodeId;
use proto::trace::{self, SpanQueue, SpanRecord};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Maximum number of queued spans. Further spans are dropped and counted.
const QUEUE: usize = 4096;
/// Maximum number of spans per batch.
const BATCH: usize = 512;
/// Time to collect spans before a batch is sent.
const GATHER: Duration = Duration::from_millis(500);
/// Timeout of a batch.
const LIMIT: Duration = Duration::from_secs(2);
/// Path appended to the endpoint, as in the standard.
const PATH: &str = "/v1/traces";

/// The exporting thread. Dropping this sends the queued spans and ends the thread.
#[derive(Debug)]
pub(crate) struct Exporting {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Exports this process's spans, with service name `service`, to the collector at `endpoint`, verified with
/// `certificates`. `ratio` is the share of requests without a parent span that are traced. Without an
/// endpoint nothing is traced.
pub(crate) fn start(
    endpoint: Option<&str>,
    certificates: Option<&Path>,
    ratio: Option<f64>,
    service: &'static str,
    node: &NodeId,
) -> anyhow::Result<Option<Exporting>> {
    let Some(endpoint) = endpoint.filter(|endpoint| !endpoint.is_empty()) else { return Ok(None) };
    let ratio = ratio.unwrap_or(1.0);
    if !(0.0..=1.0).contains(&ratio) {
        return Err(ConfigError::field("trace_ratio", ratio, "0 to 1").into());
    }
    if !["http://", "https://"].iter().any(|scheme| endpoint.starts_with(scheme)) {
        return Err(
            ConfigError::field("otlp_endpoint", endpoint, "http://HOST:PORT or https://HOST:PORT").into()
        );
    }
    let client = Client::new(client::roots(endpoint, certificates)?, LIMIT)?;
    let failure = client.failure();
    let exporter = SpanExporter::builder()
        .with_http()
        .with_http_client(client)
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(format!("{}{PATH}", endpoint.trim_end_matches('/')))
        .with_timeout(LIMIT)
        .build();
    let mut exporter =
        exporter.map_err(|error| ConfigError::field("otlp_endpoint", endpoint, error.to_string()))?;
    // OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES have priority.
    let named = std::env::var("OTEL_SERVICE_NAME").is_ok_and(|name| !name.is_empty());
    let resource = Resource::builder().with_attributes([
        KeyValue::new("service.instance.id", node.to_string()),
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
    ]);
    let resource = if named { resource } else { resource.with_service_name(service) };
    exporter.set_resource(&resource.build());
    let Some(queue) = trace::install(ratio, QUEUE) else { return Ok(None) };
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let send = move || {
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                return tracing::error!(%error, "cannot start the trace exporter; no traces are sent");
            }
        };
        let scope = InstrumentationScope::builder("kvasir").with_version(env!("CARGO_PKG_VERSION")).build();
        let mut sender = Sender { queue, exporter, failure, scope, runtime, reached: true };
        while !stopped.load(Ordering::Relaxed) {
            sender.pass_on(GATHER);
        }
        sender.pass_on(Duration::ZERO);
    };
    let thread = std::thread::Builder::new().name("traces".to_owned()).spawn(send).context("traces")?;
    Ok(Some(Exporting { stop, thread: Some(thread) }))
}

impl Drop for Exporting {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // A panic of the thread was already logged.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

struct Sender {
    queue: SpanQueue,
    exporter: SpanExporter,
    failure: Failure,
    scope: InstrumentationScope,
    runtime: tokio::runtime::Runtime,
    /// Whether the collector accepted the last batch.
    reached: bool,
}

impl Sender {
    /// Collects spans for `gather`, then sends them.
    fn pass_on(&mut self, gather: Duration) {
        let spans = self.queue.take(gather, BATCH);
        if spans.is_empty() {
            return;
        }
        let count = spans.len();
        let batch = spans.into_iter().map(|span| span_data(span, &self.scope)).collect();
        let sent = self.runtime.block_on(self.exporter.export(batch));
        self.queue.record_export(count, sent.is_ok());
        match (&sent, self.failure.take()) {
            (Ok(()), _) if !self.reached => tracing::info!("the collector accepts traces again"),
            (Err(_), Some(error)) if self.reached => {
                tracing::warn!(%error, "the collector does not accept traces; they are dropped");
            }
            (Err(error), None) if self.reached => {
                tracing::warn!(%error, "the collector does not accept traces; they are dropped")
            }
            _ => {}
        }
        self.reached = sent.is_ok();
    }
}

fn span_data(span: SpanRecord, scope: &InstrumentationScope) -> SpanData {
    let SpanRecord { context, parent, remote, kind, name, start, end, attributes, error } = span;
    let mut attributes: Vec<KeyValue> =
        attributes.into_iter().map(|(key, value)| KeyValue::new(key, value_of(value))).collect();
    let status = match error {
        None => Status::Unset,
        Some(error) => {
            attributes.push(KeyValue::new("error.type", StringValue::from(error)));
            Status::error("")
        }
    };
    SpanData {
        span_context: SpanContext::new(
            TraceId::from_bytes(context.trace.0),
            SpanId::from_bytes(context.span.0),
            TraceFlags::SAMPLED,
            false,
            TraceState::NONE,
        ),
        parent_span_id: parent.map_or(SpanId::INVALID, |parent| SpanId::from_bytes(parent.0)),
        parent_span_is_remote: remote,
        span_kind: match kind {
            trace::SpanKind::Internal => SpanKind::Internal,
            trace::SpanKind::Server => SpanKind::Server,
            trace::SpanKind::Client => SpanKind::Client,
        },
        name,
        start_time: start,
        end_time: end,
        attributes,
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links: SpanLinks::default(),
        status,
        instrumentation_scope: scope.clone(),
    }
}

fn value_of(value: trace::Value) -> Value {
    match value {
        trace::Value::Text(text) => Value::String(text.into()),
        trace::Value::Texts(texts) => {
            Value::Array(Array::String(texts.into_iter().map(Into::into).collect()))
        }
        trace::Value::Count(count) => Value::I64(count),
        trace::Value::Measure(measure) => Value::F64(measure),
        trace::Value::Measures(measures) => Value::Array(Array::F64(measures)),
    }
}
