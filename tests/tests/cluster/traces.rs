//! One trace per request over all its processes, as received by a collector; and requests while the collector
//! fails.

use crate::collector::{Collector, RecordedSpan, text, value};
use crate::tiny_model;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::fixtures::Manifest;
use kvasir_cluster_tests::{binary, http, wait};
use opentelemetry_proto::tonic::common::v1::any_value::Value as Attribute;
use serde_json::{Value, json};
use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;

/// Text that must not occur in a trace.
const SECRET: &str = "Halibut";

fn count(recorded: &RecordedSpan, key: &str) -> i64 {
    match value(&recorded.span.attributes, key) {
        Some(Attribute::IntValue(count)) => *count,
        other => panic!("{key} of {} is {other:?}", recorded.span.name),
    }
}

fn named<'a>(trace: &'a [RecordedSpan], name: &str) -> Vec<&'a RecordedSpan> {
    trace.iter().filter(|recorded| recorded.span.name == name).collect()
}

fn only<'a>(trace: &'a [RecordedSpan], name: &str) -> &'a RecordedSpan {
    let [one] = named(trace, name)[..] else { panic!("{name} in {trace:#?}") };
    one
}

/// Requests a few tokens as part of the trace `trace`.
fn complete(cluster: &Cluster, trace: [u8; 16], flags: &str) {
    let body = json!({
        "model": cluster.model(), "max_tokens": 5, "ignore_eos": true, "temperature": 0,
        "prompt": SECRET,
    });
    assert_eq!(post(cluster, "/v1/completions", trace, flags, &body), 200);
}

fn post(cluster: &Cluster, path: &str, trace: [u8; 16], flags: &str, body: &Value) -> u16 {
    let hex: String = trace.iter().map(|byte| format!("{byte:02x}")).collect();
    let parent = format!("00-{hex}-00000000000000aa-{flags}");
    let headers = [("traceparent", parent.as_str()), ("x-request-id", "traced")];
    let answer = http::post_with(cluster.http(), path, &headers, body).unwrap();
    let status = answer.status;
    answer.text().unwrap();
    status
}

/// Number of a node's spans with this outcome.
fn spans(ops: SocketAddr, metric: &str, outcome: &str) -> f64 {
    let line = format!("{metric}_total{{outcome=\"{outcome}\"}} ");
    let text = http::get(ops, "/metrics").unwrap().text().unwrap();
    text.lines().find_map(|at| at.strip_prefix(&line)?.parse().ok()).unwrap_or(0.0)
}

/// Returns the root. Asserts that every other span has its parent in the trace and lies within the parent's
/// time.
fn expect_tree(trace: &[RecordedSpan]) -> &RecordedSpan {
    let spans: HashMap<&[u8], &RecordedSpan> =
        trace.iter().map(|recorded| (recorded.span.span_id.as_slice(), recorded)).collect();
    assert_eq!(spans.len(), trace.len(), "a span came twice");
    let (roots, others): (Vec<&RecordedSpan>, Vec<&RecordedSpan>) =
        trace.iter().partition(|recorded| recorded.span.parent_span_id == [0, 0, 0, 0, 0, 0, 0, 0xaa]);
    let [root] = roots[..] else { panic!("{roots:#?}") };
    for recorded in others {
        let parent = spans.get(recorded.span.parent_span_id.as_slice());
        let parent = parent.unwrap_or_else(|| panic!("{} is below nothing", recorded.span.name));
        assert!(recorded.span.start_time_unix_nano <= recorded.span.end_time_unix_nano);
        // The clocks of two processes may differ slightly.
        let slack = 1_000_000;
        assert!(
            recorded.span.start_time_unix_nano + slack >= parent.span.start_time_unix_nano,
            "{recorded:?} {parent:?}"
        );
    }
    root
}

fn parent_of<'a>(trace: &'a [RecordedSpan], recorded: &RecordedSpan) -> &'a RecordedSpan {
    trace.iter().find(|other| other.span.span_id == recorded.span.parent_span_id).unwrap()
}

#[test]
fn a_request_is_one_trace_over_coordinator_worker_and_stages() {
    let collector = Collector::start();
    let whole = |trace: &[RecordedSpan]| {
        trace.iter().any(|recorded| recorded.span.name.starts_with("text_completion"))
    };
    let cluster = Cluster::builder("traces", &tiny_model())
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url())
        .env("OTEL_TRACES_SAMPLER_ARG", "0")
        .flag("--shards", "2")
        .start()
        .unwrap();
    complete(&cluster, [1; 16], "00");
    complete(&cluster, [2; 16], "01");
    let enough = |trace: &[RecordedSpan]| {
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
        let recorded = trace.iter().find(|recorded| recorded.span.name == part && recorded.node == root.node);
        assert_eq!(parent_of(&trace, recorded.unwrap()).span.span_id, root.span.span_id, "{part}");
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
    let below = |phase: &RecordedSpan| {
        steps.iter().filter(|recorded| recorded.span.parent_span_id == phase.span.span_id).count()
    };
    assert_eq!((below(prefill) + below(decode), below(decode)), (steps.len(), 4));
    for stage in named(&trace, "stage") {
        assert_eq!(parent_of(&trace, stage).span.name, "stages");
        assert!(value(&stage.span.attributes, "kvasir.stalled_seconds").is_some());
    }
    let nodes: BTreeSet<&str> = trace.iter().map(|recorded| recorded.node.as_str()).collect();
    assert_eq!(nodes.len(), 3, "{nodes:?}");

    // Traces that the client does not sample, and requests without a trace, are not recorded.
    assert!(!collector.spans().iter().any(|recorded| recorded.span.trace_id != [2; 16]));
    let ops = cluster.coordinator().ops;
    let (hex, sent) = ("02".repeat(16), "kvasir_trace_spans_total{outcome=\"exported\"} ");
    let metrics =
        wait::until("the coordinator has heard that six spans were taken", binary::NODE_TIMEOUT, || {
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
    assert!(!String::from_utf8_lossy(&collector.raw()).contains(SECRET), "a prompt is in a trace");
}

/// Embeddings and reranking are one trace too, from the client's request to the encoder's step.
#[test]
fn texts_that_are_encoded_are_traced_as_well() {
    let collector = Collector::start();
    let bert = Manifest::read().unwrap().tiny("bert").unwrap().path();
    let cluster = Cluster::builder("traces-encode", bert.to_str().unwrap())
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url())
        .env("OTEL_TRACES_SAMPLER_ARG", "0")
        .start()
        .unwrap();
    let inputs: Vec<Vec<u32>> = (0..40).map(|n| vec![5 + n, 9, 11]).collect();
    let embeddings = json!({"model": cluster.model(), "input": inputs});
    assert_eq!(post(&cluster, "/v1/embeddings", [3; 16], "01", &embeddings), 200);
    // A model of another task: refused, and recorded.
    let documents = json!({"model": cluster.model(), "query": SECRET, "documents": [SECRET, "b"]});
    assert_eq!(post(&cluster, "/v1/rerank", [4; 16], "01", &documents), 400);

    // 32 texts per call.
    let enough = |trace: &[RecordedSpan]| {
        let has = |name: &str| named(trace, name).len();
        has("encode") == 2
            && has("compute") == 2
            && trace.iter().any(|t| t.span.name.starts_with("embeddings"))
    };
    let trace = collector.trace(&[3; 16], enough);
    let root = expect_tree(&trace);
    assert_eq!(root.span.name, format!("embeddings {}", cluster.model()));
    let of_root = |key| text(&root.span.attributes, key);
    assert_eq!(of_root("gen_ai.operation.name").as_deref(), Some("embeddings"));
    assert_eq!(of_root("gen_ai.request.model").as_deref(), Some(cluster.model()));
    assert_eq!(of_root("kvasir.request_id").as_deref(), Some("traced"));
    assert_eq!((count(root, "kvasir.texts"), count(root, "gen_ai.usage.input_tokens")), (40, 120));
    for part in ["receive", "tokenise", "queue", "route", "dispatch"] {
        let recorded: Vec<_> = trace
            .iter()
            .filter(|recorded| recorded.span.name == part && recorded.node == root.node)
            .collect();
        let times = if matches!(part, "receive" | "tokenise") { 1 } else { 2 };
        assert_eq!(recorded.len(), times, "{part}");
        assert!(
            recorded.iter().all(|recorded| parent_of(&trace, recorded).span.span_id == root.span.span_id),
            "{part}"
        );
    }
    let encodes = named(&trace, "encode");
    assert_eq!(encodes.iter().map(|recorded| count(recorded, "kvasir.texts")).sum::<i64>(), 40);
    for encode in encodes {
        let dispatch = parent_of(&trace, encode);
        assert_eq!(dispatch.span.name, "dispatch");
        assert_eq!(text(&dispatch.span.attributes, "kvasir.worker").as_ref(), Some(&encode.node));
        for part in ["queue", "compute"] {
            let below = |recorded: &&&RecordedSpan| recorded.span.parent_span_id == encode.span.span_id;
            assert_eq!(named(&trace, part).iter().filter(below).count(), 1, "{part}");
        }
    }
    let refused =
        collector.trace(&[4; 16], |trace| trace.iter().any(|recorded| recorded.span.name == "rerank"));
    let root = expect_tree(&refused);
    assert_eq!(text(&root.span.attributes, "error.type").as_deref(), Some("invalid_field"));
    let hex = "03".repeat(16);
    let metrics = http::get(cluster.coordinator().ops, "/metrics").unwrap().text().unwrap();
    let exemplar = |line: &str| {
        line.starts_with("vllm:e2e_request_latency_seconds_bucket")
            && line.contains(&format!("# {{trace_id=\"{hex}\"}}"))
    };
    assert!(metrics.lines().any(exemplar), "{metrics}");
    assert!(!String::from_utf8_lossy(&collector.raw()).contains(SECRET), "a text is in a trace");
}

/// A collector that accepts connections but does not respond delays no request. Spans that exceed the queue
/// are dropped and counted; once it responds, spans arrive again.
#[test]
fn a_collector_that_hangs_harms_no_request() {
    let collector = Collector::that_hangs();
    let cluster = Cluster::builder("traces-hang", &tiny_model())
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url())
        .env("OTEL_TRACES_SAMPLER_ARG", "1")
        .start()
        .unwrap();
    let (ops, worker) = (cluster.coordinator().ops, cluster.nodes().workers[0].ops);
    let plain =
        json!({"model": cluster.model(), "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "seed": 1});
    let text_of = |answer: http::HttpAnswer| answer.ok().unwrap()["choices"][0]["text"].clone();
    let expected = text_of(http::post(cluster.http(), "/v1/completions", &plain).unwrap());
    // 384 spans per request at the coordinator; 256 per second are dropped.
    let many: Vec<[u32; 3]> = (0..128).map(|n| [5 + n, 6, 7]).collect();
    let many = json!({"model": cluster.model(), "prompt": many, "max_tokens": 1});
    wait::until("the queue is full", binary::NODE_TIMEOUT, || {
        let answer = http::post(cluster.http(), "/v1/completions", &many).unwrap();
        let status = answer.status;
        assert_eq!(status, 200, "{}", answer.text().unwrap());
        (spans(ops, "kvasir_trace_spans", "queue_full") > 0.0).then_some(())
    })
    .unwrap();
    wait::until("what was sent is given up", binary::NODE_TIMEOUT, || {
        let failed = spans(ops, "kvasir_trace_spans", "failed") >= 512.0;
        (failed && spans(worker, "kvasir_worker_trace_spans", "failed") > 0.0).then_some(())
    })
    .unwrap();
    assert_eq!(spans(ops, "kvasir_trace_spans", "exported"), 0.0);
    assert_eq!(text_of(http::post(cluster.http(), "/v1/completions", &plain).unwrap()), expected);
    collector.answer();
    wait::until("spans are taken again", binary::NODE_TIMEOUT, || {
        http::post(cluster.http(), "/v1/completions", &plain).unwrap().ok().unwrap();
        let taken = |ops, metric| spans(ops, metric, "exported") > 0.0;
        (taken(ops, "kvasir_trace_spans") && taken(worker, "kvasir_worker_trace_spans")).then_some(())
    })
    .unwrap();
    assert!(!collector.spans().is_empty());
}

/// A missing collector does not affect requests either.
#[test]
fn a_collector_that_is_gone_harms_no_request() {
    let unused = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap()
    };
    let cluster = Cluster::builder("traces-gone", &tiny_model())
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", &format!("http://{unused}"))
        .start()
        .unwrap();
    let body = json!({"model": cluster.model(), "prompt": [5, 6, 7], "max_tokens": 4});
    wait::until("spans are given up", binary::NODE_TIMEOUT, || {
        http::post(cluster.http(), "/v1/completions", &body).unwrap().ok().unwrap();
        (spans(cluster.coordinator().ops, "kvasir_trace_spans", "failed") > 0.0).then_some(())
    })
    .unwrap();
}

/// A collector at https:// receives spans if its certificate is trusted. Otherwise nothing is sent, the log
/// reports it once, and requests continue.
#[test]
fn a_collector_is_verified_by_its_certificate() {
    let (collector, certificate) = Collector::with_certificate();
    let dir = tempfile::tempdir().unwrap();
    let pem = dir.path().join("collector.pem");
    std::fs::write(&pem, certificate).unwrap();
    let start = |name: &str, variables: &[(&str, &str)]| {
        let builder =
            Cluster::builder(name, &tiny_model()).env("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url());
        let builder = variables.iter().fold(builder, |builder, (name, value)| builder.env(name, value));
        builder.start().unwrap()
    };
    // Spans with this outcome at both kinds of nodes, while requests continue.
    let both = |cluster: &Cluster, outcome: &str, count: f64| {
        let body = json!({"model": cluster.model(), "prompt": [5, 6, 7], "max_tokens": 4});
        wait::until("spans of both kinds of node", binary::NODE_TIMEOUT, || {
            http::post(cluster.http(), "/v1/completions", &body).unwrap().ok().unwrap();
            let (ops, worker) = (cluster.coordinator().ops, cluster.nodes().workers[0].ops);
            let coordinators = spans(ops, "kvasir_trace_spans", outcome);
            let workers = spans(worker, "kvasir_worker_trace_spans", outcome);
            (coordinators >= count && workers >= count).then_some(())
        })
        .unwrap();
    };
    let log = |cluster: &Cluster, id: &str| {
        std::fs::read_to_string(cluster.data_dir().join("logs").join(format!("{id}.log"))).unwrap()
    };
    {
        let cluster = start("traces-stranger", &[]);
        both(&cluster, "failed", 1.0);
        let failed = spans(cluster.coordinator().ops, "kvasir_trace_spans", "failed");
        both(&cluster, "failed", failed + 1.0);
        for id in [&cluster.coordinator().id, &cluster.nodes().workers[0].id] {
            let log = log(&cluster, id);
            let lines: Vec<&str> =
                log.lines().filter(|line| line.contains("the collector does not accept traces")).collect();
            let [line] = lines[..] else { panic!("{id}: {lines:?}") };
            assert!(line.contains("TLS: invalid peer certificate: UnknownIssuer"), "{line}");
        }
        assert!(collector.spans().is_empty(), "it was told all the same");
    }
    let cluster = start("traces-trusted", &[("OTEL_EXPORTER_OTLP_CERTIFICATE", pem.to_str().unwrap())]);
    both(&cluster, "exported", 1.0);
    let nodes: BTreeSet<String> = collector.spans().into_iter().map(|recorded| recorded.node).collect();
    assert!(nodes.contains(&cluster.coordinator().id) && nodes.len() >= 2, "{nodes:?}");
    assert!(!log(&cluster, &cluster.coordinator().id).contains("does not accept traces"));
}
