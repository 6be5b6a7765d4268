//! Answers that must be of a schema or a grammar, and calls of tools, through whole clusters and official clients.

use crate::openai_client::{clients, endpoint, run};
use crate::tiny_model;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::http::{self, Answer};
use kvasir_cluster_tests::signal;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// What the workers' histogram of this name says: the bound that this share of its values is below.
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
    run(&clients(), "schemas.py", &arguments);
    let of = |share| quantile(&cluster, "kvasir_grammar_mask_seconds", share);
    println!("masks: p50 below {} s, p99 below {} s, {} rows waited", of(0.5), of(0.99), {
        cluster.worker_metric("kvasir_grammar_rows_waited_total").unwrap()
    });
    assert!(cluster.worker_metric("kvasir_grammars_compiled_total").unwrap() >= 200.0);
}

#[test]
fn clients_call_tools_and_get_structured_answers() {
    let cluster = Cluster::builder("tools", "smollm2-135m").start().unwrap();
    run(&clients(), "tools.py", &endpoint(&cluster));
    run(&clients(), "structured.py", &endpoint(&cluster));
}

/// The whole text of a stream, and how many events it came in.
fn text(answer: Answer) -> anyhow::Result<String> {
    let events = answer.events()?.all()?;
    Ok(events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect())
}

fn completion(model: &str, seed: usize, tokens: u64) -> Value {
    let prompt: Vec<usize> = (0..30).map(|at| 5 + (seed * 137 + at * 11 + at * at) % 400).collect();
    json!({"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 1, "seed": seed, "stream": true})
}

#[test]
fn an_evil_schema_holds_nobody_up() {
    let cluster = Cluster::builder("evil-schema", &tiny_model()).start().unwrap();
    let others = |count: usize| {
        let since = Instant::now();
        let texts: Vec<String> = std::thread::scope(|scope| {
            let ask = |seed| {
                let mut body = completion(cluster.model(), seed, 400);
                body["ignore_eos"] = json!(true);
                text(http::post(cluster.http(), "/v1/completions", &body).unwrap()).unwrap()
            };
            let streams: Vec<_> = (0..count).map(|seed| scope.spawn(move || ask(seed))).collect();
            streams.into_iter().map(|stream| stream.join().unwrap()).collect()
        });
        (texts, since.elapsed())
    };
    others(4);
    let (expected, alone) = others(4);
    let evil: Vec<Value> = (0..1000)
        .map(|n| match n % 4 {
            // Each another one: none is known to be refused already.
            0 => json!({"type": "string", "pattern": format!("((.*a{n}){{300}}){{300}}")}),
            1 => json!({"type": "string", "pattern": format!("(a{{1000}}){{{}}}", 1000 + n)}),
            // What allows nothing is found out by compiling it.
            2 => json!({"type": "string", "minLength": n + 1, "maxLength": n}),
            _ => json!({"type": "array", "items": {"$ref": "#"}, "minItems": n, "maxItems": 5000 + n}),
        })
        .collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let attacker = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            let mut refused = 0;
            for schema in evil {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let mut body = completion(cluster.model(), 1, 4);
                body["response_format"] =
                    json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}});
                let since = Instant::now();
                let answer = http::post(cluster.http(), "/v1/completions", &body).unwrap();
                let status = answer.status;
                let told = answer.text().unwrap();
                longest = longest.max(since.elapsed());
                assert!(matches!(status, 200 | 400), "{told}");
                if status == 400 {
                    refused += 1;
                    assert!(told.contains("response_format.json_schema.schema"), "{told}");
                }
            }
            (refused, longest)
        });
        for _ in 0..3 {
            let (texts, took) = others(4);
            assert_eq!(texts, expected);
            println!("four streams: {alone:?} alone, {took:?} beside schemas that are hard to compile");
            assert!(took < 3 * alone + Duration::from_secs(2), "{took:?}, and alone {alone:?}");
        }
        stop.store(true, Ordering::Relaxed);
        let (refused, longest) = attacker.join().unwrap();
        println!("{refused} schemas were refused, after {longest:?} at most");
        assert!(refused > 0);
        assert!(longest < Duration::from_secs(20), "{longest:?}");
    });
}

/// A worker that dies in the middle of an answer that must be of a grammar: another goes on where it was.
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
    let ask = || http::post(cluster.http(), "/v1/completions", &body).unwrap();
    let expected = text(ask()).unwrap();
    let values: Value = serde_json::from_str(&expected).unwrap();
    assert_eq!(values.as_array().map(Vec::len), Some(40), "{expected}");
    let answer = ask();
    let worker = answer.header("x-kvasir-worker").unwrap().to_owned();
    let mut events = answer.events().unwrap();
    let mut said = String::new();
    let add = |event: &Value, said: &mut String| {
        said.push_str(event["choices"][0]["text"].as_str().unwrap_or_default());
    };
    while said.len() < 40 {
        add(&events.next_event().unwrap().unwrap(), &mut said);
    }
    let victim = cluster.nodes().workers.iter().find(|node| node.id == worker).unwrap().pid;
    signal::kill_now(victim);
    for event in events.all().unwrap() {
        add(&event, &mut said);
    }
    assert_eq!(said, expected);
}
