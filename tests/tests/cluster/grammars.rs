//! Answers that must match a schema or a grammar, and tool calls, through whole clusters and official
//! clients.

use crate::openai_client::{clients, endpoint, run};
use crate::{resident, tiny_model};
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::http::{self, HttpAnswer};
use kvasir_cluster_tests::signal;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use text::json_schema;

/// Upper bucket bound of a quantile of the workers' histogram.
fn quantile(cluster: &Cluster, name: &str, share: f64) -> f64 {
    let text = http::get(cluster.coordinator().ops, "/metrics").unwrap().text().unwrap();
    let mut buckets: Vec<(f64, f64)> = Vec::new();
    for line in text.lines().filter(|line| line.starts_with(&format!("{name}_bucket"))) {
        let bound = line.split("le=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
        let bound = if bound == "+Inf" { f64::INFINITY } else { bound.parse().unwrap() };
        let count: f64 = line.rsplit(' ').next().unwrap().parse().unwrap();
        match buckets.iter_mut().find(|(other, _)| *other == bound) {
            Some((_, all)) => *all += count,
            None => buckets.push((bound, count)),
        }
    }
    buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
    let all = buckets.last().map_or(0.0, |(_, count)| *count);
    assert!(all > 0.0, "{name} is empty");
    buckets.iter().find(|(_, count)| *count >= share * all).unwrap().0
}

#[test]
fn two_hundred_schemas_are_answered_validly() {
    let cluster = Cluster::builder("schemas", &tiny_model()).start().unwrap();
    let arguments = [&endpoint(&cluster)[..], &["200".into(), "8".into()]].concat();
    let output = run(&clients(), "schemas.py", &arguments);
    let of = |share| quantile(&cluster, "kvasir_grammar_mask_seconds", share);
    println!("masks: p50 below {} s, p99 below {} s, {} rows waited", of(0.5), of(0.99), {
        cluster.worker_metric("kvasir_grammar_rows_waited_total").unwrap()
    });
    let schemas: Vec<Value> = serde_json::from_str(output.lines().last().unwrap()).unwrap();
    let different: HashSet<String> =
        schemas.iter().map(|schema| json_schema::prepare(schema, true).unwrap().to_string()).collect();
    // Schemas 2 and 29 have the same grammar. A worker that receives both at the same time compiles it once;
    // otherwise there is one compilation per request, never more.
    let compiled = cluster.worker_metric("kvasir_grammars_compiled_total").unwrap();
    let range = different.len() as f64..=schemas.len() as f64;
    assert!(schemas.len() == 200 && range.contains(&compiled), "{compiled} compiled, {range:?} expected");
}

#[test]
fn clients_call_tools_and_get_structured_answers() {
    let cluster = Cluster::builder("tools", "smollm2-135m").start().unwrap();
    run(&clients(), "tools.py", &endpoint(&cluster));
    run(&clients(), "structured.py", &endpoint(&cluster));
}

/// The whole text of a stream, and its number of events.
fn text(answer: HttpAnswer) -> anyhow::Result<String> {
    let events = answer.events()?.all()?;
    Ok(events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect())
}

fn completion(model: &str, seed: usize, tokens: u64) -> Value {
    let prompt: Vec<usize> = (0..30).map(|at| 5 + (seed * 137 + at * 11 + at * at) % 400).collect();
    json!({"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 1, "seed": seed, "stream": true})
}

/// Grammars that are expensive or impossible to compile, or allow nothing: the request field, its value, and
/// the part named by the error. Each one is different, so that none is cached.
fn evil(n: usize) -> (&'static str, Value, &'static str) {
    let schema = match n % 6 {
        0 => json!({"type": "string", "pattern": format!("((.*a{n}){{300}}){{300}}")}),
        1 => json!({"type": "string", "pattern": format!("(a{{1000}}){{{}}}", 1000 + n)}),
        2 => json!({"type": "string", "minLength": n + 1, "maxLength": n}),
        3 => json!({"type": "array", "items": {"$ref": "#"}, "minItems": n, "maxItems": 5000 + n}),
        // All patterns at once: compiling needs unbounded time and memory.
        4 => {
            let pattern = |at: usize| json!({"type": "string", "pattern": format!("(a|b)*{at}x{n}")});
            json!({"allOf": (0..50).map(pattern).collect::<Vec<_>>()})
        }
        _ => {
            let all: Vec<String> = (1..40).map(|at| format!("/(.*[a-z]{{{at}}}{n}.*)/")).collect();
            let definition = format!("start: A\nA: {}", all.join(" & "));
            return ("grammar", json!({"syntax": "lark", "definition": definition}), "grammar.definition");
        }
    };
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}});
    ("response_format", format, "response_format.json_schema.schema")
}

/// The text of a stream, and the longest time between two of its events.
fn paced(answer: HttpAnswer) -> anyhow::Result<(String, Duration)> {
    let (mut events, mut text) = (answer.events()?, String::new());
    let (mut last, mut longest) = (None, Duration::ZERO);
    while let Some(event) = events.next_event()? {
        let now = Instant::now();
        longest = longest.max(last.map_or(Duration::ZERO, |last| now - last));
        last = Some(now);
        text += event["choices"][0]["text"].as_str().unwrap_or_default();
    }
    Ok((text, longest))
}

/// Stops the other threads, also if a test fails.
struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_costly_schema_delays_no_other_request() {
    const ATTACKERS: usize = 3;
    const KINDS: usize = 6;
    /// A worker's limit for a grammar.
    const BUDGET: Duration = Duration::from_millis(500);
    /// More than one process may use within that limit, and less than all of them together.
    const GROWTH: u64 = 512 << 20;
    let cluster = Cluster::builder("evil-schema", &tiny_model()).start().unwrap();
    let workers: Vec<u32> = cluster.nodes().workers.iter().map(|node| node.pid).collect();
    let in_memory = || workers.iter().map(|pid| resident(*pid)).sum::<u64>();
    // Four free streams, and two constrained by a grammar.
    let others = || {
        let since = Instant::now();
        let (texts, pauses): (Vec<String>, Vec<Duration>) = std::thread::scope(|scope| {
            let complete = |seed: usize| {
                let mut body = completion(cluster.model(), seed, 400);
                match seed {
                    0..4 => body["ignore_eos"] = json!(true),
                    _ => body["grammar"] = json!({"syntax": "regex", "definition": "[a-z ]{500,600}"}),
                }
                paced(http::post(cluster.http(), "/v1/completions", &body).unwrap()).unwrap()
            };
            let streams: Vec<_> = (0..6).map(|seed| scope.spawn(move || complete(seed))).collect();
            streams.into_iter().map(|stream| stream.join().unwrap()).unzip()
        });
        (texts, since.elapsed(), pauses.into_iter().max().unwrap())
    };
    others();
    let (expected, alone, pause_alone) = others();
    let before = in_memory();
    let (stop, next, over) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    let attack = || {
        let (mut longest, mut refused, mut timed_out) = (Duration::ZERO, 0, 0);
        while !stop.load(Ordering::Relaxed) {
            let (name, value, field) = evil(next.fetch_add(1, Ordering::Relaxed));
            let mut body = completion(cluster.model(), 1, 4);
            body[name] = value;
            let since = Instant::now();
            let answer = http::post(cluster.http(), "/v1/completions", &body).unwrap();
            let status = answer.status;
            let message = answer.text().unwrap();
            longest = longest.max(since.elapsed());
            // A request that finds two of these being compiled waits, and may be refused.
            assert!(matches!(status, 200 | 400 | 429), "{message}");
            over.fetch_add(1, Ordering::Relaxed);
            if status == 400 {
                refused += 1;
                timed_out += usize::from(message.contains("takes more than 500 ms"));
                assert!(message.contains(field), "{message}");
            }
        }
        (longest, refused, timed_out)
    };
    std::thread::scope(|scope| {
        let attackers: Vec<_> = (0..ATTACKERS).map(|_| scope.spawn(attack)).collect();
        let stops = Stops(&stop);
        let (since, mut rounds) = (Instant::now(), Vec::new());
        // Until each kind has been sent several times.
        while over.load(Ordering::Relaxed) < KINDS * 4 && since.elapsed() < Duration::from_secs(60) {
            let (texts, took, pause) = others();
            assert_eq!(texts, expected);
            rounds.push((took, pause));
            assert!(took < 3 * alone + Duration::from_secs(2), "{took:?}, and alone {alone:?}");
            assert!(pause < 3 * (BUDGET + pause_alone), "{pause:?}, and alone {pause_alone:?}");
        }
        drop(stops);
        rounds.sort_unstable();
        let (median, slowest) = (rounds[rounds.len() / 2].0, rounds[rounds.len() - 1].0);
        let pause = rounds.iter().map(|round| round.1).max().unwrap();
        println!(
            "six streams: {alone:?} alone, at most {pause_alone:?} between two events; {} times beside",
            rounds.len()
        );
        println!(
            "grammars that are hard to compile: {median:?}, at most {slowest:?}, and {pause:?} between two events"
        );
        let ends: Vec<_> = attackers.into_iter().map(|attacker| attacker.join().unwrap()).collect();
        let longest = ends.iter().map(|end| end.0).max().unwrap();
        let of = |count: fn(&(Duration, usize, usize)) -> usize| ends.iter().map(count).sum::<usize>();
        let (refused, timed_out) = (of(|end| end.1), of(|end| end.2));
        println!("{refused} grammars were refused, {timed_out} for their time, after {longest:?} at most");
        assert!(refused > timed_out && timed_out > 0);
        assert!(longest < Duration::from_secs(20), "{longest:?}");
    });
    // No compilation is left running: other requests, with grammars, are served.
    let mut body = completion(cluster.model(), 7, 40);
    body["grammar"] = json!({"syntax": "regex", "definition": "[0-9]{4}"});
    let answer = text(http::post(cluster.http(), "/v1/completions", &body).unwrap()).unwrap();
    assert!(answer.len() == 4 && answer.bytes().all(|byte| byte.is_ascii_digit()), "{answer:?}");
    let grown = in_memory().saturating_sub(before);
    assert!(grown < GROWTH, "the workers have grown by {} MiB", grown >> 20);
}

/// A worker dies during an answer with a grammar; another worker continues the answer.
#[test]
fn an_answer_of_a_grammar_survives_its_worker() {
    let cluster = Cluster::builder("grammar-failover", "smollm2-135m").start().unwrap();
    let schema = json!({
        "type": "array", "minItems": 40, "maxItems": 40,
        "items": {"type": "object", "properties": {"n": {"type": "integer", "minimum": 100, "maximum": 999}},
            "required": ["n"], "additionalProperties": false},
    });
    let mut body = completion(cluster.model(), 3, 900);
    body["response_format"] = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let complete = || http::post(cluster.http(), "/v1/completions", &body).unwrap();
    let expected = text(complete()).unwrap();
    let values: Value = serde_json::from_str(&expected).unwrap();
    assert_eq!(values.as_array().map(Vec::len), Some(40), "{expected}");
    let answer = complete();
    let worker = answer.header("x-kvasir-worker").unwrap().to_owned();
    let mut events = answer.events().unwrap();
    let mut output = String::new();
    let add = |event: &Value, output: &mut String| {
        output.push_str(event["choices"][0]["text"].as_str().unwrap_or_default());
    };
    while output.len() < 40 {
        add(&events.next_event().unwrap().unwrap(), &mut output);
    }
    let victim = cluster.nodes().workers.iter().find(|node| node.id == worker).unwrap().pid;
    signal::kill_now(victim);
    for event in events.all().unwrap() {
        add(&event, &mut output);
    }
    assert_eq!(output, expected);
}
