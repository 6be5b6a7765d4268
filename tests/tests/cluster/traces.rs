//! One trace for a request, over all processes that had a part in it, as a collector gets it.

use crate::tiny_model;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::{binary, http, wait};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value as Attribute};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use serde_json::json;
use std::collections::{BTreeSet, HashMap};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Never to be seen in a trace.
const SECRET: &str = "Halibut";

/// A span and the node that has recorded it.
#[derive(Debug, Clone)]
struct Told {
    node: String,
    span: Span,
}

/// Takes what is exported, for as long as the test runs.
struct Collector {
    address: SocketAddr,
    told: Arc<Mutex<Vec<Told>>>,
    /// Whether a prompt was in what came.
    leaked: Arc<AtomicBool>,
}

impl Collector {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, told) = (listener.local_addr().unwrap(), Arc::<Mutex<Vec<Told>>>::default());
        let into = Arc::clone(&told);
        let leaked = Arc::<AtomicBool>::default();
        let leaks = Arc::clone(&leaked);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (into, leaks) = (Arc::clone(&into), Arc::clone(&leaks));
                std::thread::spawn(move || serve(stream, &into, &leaks));
            }
        });
        Self { address, told, leaked }
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The spans of a trace, once the one that has no other above it has come and `enough` says so.
    fn trace(&self, trace: &[u8], enough: impl Fn(&[Told]) -> bool) -> Vec<Told> {
        wait::until("the trace has been exported", binary::PATIENCE, || {
            let all = self.told.lock().unwrap();
            let of_trace: Vec<Told> =
                all.iter().filter(|told| told.span.trace_id == trace).cloned().collect();
            enough(&of_trace).then_some(of_trace)
        })
        .unwrap()
    }
}

/// Reads exports until the connection ends.
fn serve(stream: TcpStream, into: &Mutex<Vec<Told>>, leaks: &AtomicBool) {
    let mut reader = BufReader::new(stream);
    loop {
        let (mut length, mut line) = (0, String::new());
        loop {
            line.clear();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            let header = line.trim_end().to_ascii_lowercase();
            if let Some(value) = header.strip_prefix("content-length: ") {
                length = value.parse().unwrap();
            }
            if header.is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        leaks.fetch_or(String::from_utf8_lossy(&body).contains(SECRET), Ordering::Relaxed);
        let export = ExportTraceServiceRequest::decode(body.as_slice()).unwrap();
        for of_node in export.resource_spans {
            let node = text(&of_node.resource.unwrap().attributes, "service.instance.id").unwrap();
            let spans = of_node.scope_spans.into_iter().flat_map(|scope| scope.spans);
            into.lock().unwrap().extend(spans.map(|span| Told { node: node.clone(), span }));
        }
        let answer = "HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n";
        if reader.get_mut().write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

fn value<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a Attribute> {
    attributes.iter().find(|attribute| attribute.key == key)?.value.as_ref()?.value.as_ref()
}

fn text(attributes: &[KeyValue], key: &str) -> Option<String> {
    match value(attributes, key)? {
        Attribute::StringValue(text) => Some(text.clone()),
        other => panic!("{key} is {other:?}"),
    }
}

fn count(told: &Told, key: &str) -> i64 {
    match value(&told.span.attributes, key) {
        Some(Attribute::IntValue(count)) => *count,
        other => panic!("{key} of {} is {other:?}", told.span.name),
    }
}

fn named<'a>(trace: &'a [Told], name: &str) -> Vec<&'a Told> {
    trace.iter().filter(|told| told.span.name == name).collect()
}

fn only<'a>(trace: &'a [Told], name: &str) -> &'a Told {
    let [one] = named(trace, name)[..] else { panic!("{name} in {trace:#?}") };
    one
}

/// Asks for a few tokens as part of the trace `trace`.
fn ask(cluster: &Cluster, trace: [u8; 16], flags: &str) {
    let hex: String = trace.iter().map(|byte| format!("{byte:02x}")).collect();
    let parent = format!("00-{hex}-00000000000000aa-{flags}");
    let body = json!({
        "model": cluster.model(), "max_tokens": 5, "ignore_eos": true, "temperature": 0,
        "prompt": SECRET,
    });
    let headers = [("traceparent", parent.as_str()), ("x-request-id", "traced")];
    http::post_with(cluster.http(), "/v1/completions", &headers, &body).unwrap().ok().unwrap();
}

/// The root, and that every other span is below another of the trace and not outside of it in time.
fn expect_tree(trace: &[Told]) -> &Told {
    let spans: HashMap<&[u8], &Told> =
        trace.iter().map(|told| (told.span.span_id.as_slice(), told)).collect();
    assert_eq!(spans.len(), trace.len(), "a span came twice");
    let (roots, others): (Vec<&Told>, Vec<&Told>) =
        trace.iter().partition(|told| told.span.parent_span_id == [0, 0, 0, 0, 0, 0, 0, 0xaa]);
    let [root] = roots[..] else { panic!("{roots:#?}") };
    for told in others {
        let parent = spans.get(told.span.parent_span_id.as_slice());
        let parent = parent.unwrap_or_else(|| panic!("{} is below nothing", told.span.name));
        assert!(told.span.start_time_unix_nano <= told.span.end_time_unix_nano);
        // What two processes read off their clocks may differ by the moment between two readings.
        let slack = 1_000_000;
        assert!(
            told.span.start_time_unix_nano + slack >= parent.span.start_time_unix_nano,
            "{told:?} {parent:?}"
        );
    }
    root
}

fn parent_of<'a>(trace: &'a [Told], told: &Told) -> &'a Told {
    trace.iter().find(|other| other.span.span_id == told.span.parent_span_id).unwrap()
}

#[test]
fn a_request_is_one_trace_over_coordinator_worker_and_stages() {
    let collector = Collector::start();
    let whole = |trace: &[Told]| trace.iter().any(|told| told.span.name.starts_with("text_completion"));
    let cluster = Cluster::builder("traces", &tiny_model())
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url())
        .env("OTEL_TRACES_SAMPLER_ARG", "0")
        .flag("--shards", "2")
        .start()
        .unwrap();
    ask(&cluster, [1; 16], "00");
    ask(&cluster, [2; 16], "01");
    let enough = |trace: &[Told]| {
        let has = |name: &str| named(trace, name).len();
        whole(trace) && has("generate") == 1 && has("stages") >= 5 && has("stage") == has("stages")
    };
    let trace = collector.trace(&[2; 16], enough);

    let root = expect_tree(&trace);
    assert_eq!(root.span.name, format!("text_completion {}", cluster.model()));
    let of_root = |key| text(&root.span.attributes, key);
    assert_eq!(of_root("gen_ai.operation.name").as_deref(), Some("text_completion"));
    assert_eq!(of_root("gen_ai.request.model").as_deref(), Some(cluster.model()));
    assert_eq!(of_root("kvasir.request_id").as_deref(), Some("traced"));
    assert_eq!(count(root, "gen_ai.usage.output_tokens"), 5);
    for part in ["receive", "tokenise", "queue", "route", "dispatch"] {
        let told = trace.iter().find(|told| told.span.name == part && told.node == root.node);
        assert_eq!(parent_of(&trace, told.unwrap()).span.span_id, root.span.span_id, "{part}");
    }
    let route = only(&trace, "route");
    let worker = text(&route.span.attributes, "kvasir.route.chosen").unwrap();
    assert!(text(&route.span.attributes, "kvasir.route.reason").is_some());
    for key in ["kvasir.route.candidates", "kvasir.route.cost_seconds", "kvasir.route.prefill_seconds"] {
        assert!(
            matches!(value(&route.span.attributes, key), Some(Attribute::ArrayValue(all)) if all.values.len() == 1)
        );
    }

    let generate = only(&trace, "generate");
    assert_eq!(
        (generate.node.as_str(), parent_of(&trace, generate).span.name.as_str()),
        (worker.as_str(), "dispatch")
    );
    assert_eq!(count(generate, "gen_ai.usage.output_tokens"), 5);
    let (prefill, decode) = (only(&trace, "prefill"), only(&trace, "decode"));
    for phase in [prefill, decode] {
        assert_eq!(parent_of(&trace, phase).span.span_id, generate.span.span_id);
    }
    // The prompt, and each token but the last.
    let steps = named(&trace, "stages");
    let below =
        |phase: &Told| steps.iter().filter(|told| told.span.parent_span_id == phase.span.span_id).count();
    assert_eq!((below(prefill) + below(decode), below(decode)), (steps.len(), 4));
    for stage in named(&trace, "stage") {
        assert_eq!(parent_of(&trace, stage).span.name, "stages");
        assert!(value(&stage.span.attributes, "kvasir.stalled_seconds").is_some());
    }
    let nodes: BTreeSet<&str> = trace.iter().map(|told| told.node.as_str()).collect();
    assert_eq!(nodes.len(), 3, "{nodes:?}");

    // What the client does not record is not recorded here either, nor what no client has begun.
    assert!(!collector.told.lock().unwrap().iter().any(|told| told.span.trace_id != [2; 16]));
    let ops = cluster.coordinator().ops;
    let (hex, sent) = ("02".repeat(16), "kvasir_trace_spans_total{outcome=\"exported\"} ");
    let metrics =
        wait::until("the coordinator has heard that six spans were taken", binary::PATIENCE, || {
            let text = http::get(ops, "/metrics").ok()?.text().ok()?;
            let sent: f64 = text.lines().find_map(|line| line.strip_prefix(sent))?.parse().ok()?;
            (sent >= 6.0).then_some(text)
        })
        .unwrap();
    let exemplar = |line: &str| {
        line.starts_with("vllm:time_to_first_token_seconds_bucket")
            && line.contains(&format!("# {{trace_id=\"{hex}\"}}"))
    };
    assert!(metrics.lines().any(exemplar), "{metrics}");
    assert!(!collector.leaked.load(Ordering::Relaxed), "a prompt is in a trace");
}
