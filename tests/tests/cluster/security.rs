//! API keys of a coordinators' group, certificate rotation under load, and data that must never be written.

use crate::collector::Collector;
use crate::tiny_model;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::fixtures::Manifest;
use kvasir_cluster_tests::{binary, http, signal, wait};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

fn create(ops: SocketAddr, request: Value) -> (String, String) {
    let made = || http::post(ops, "/admin/v1/keys", &request).ok().filter(|answer| answer.status == 201);
    let made = wait::until("a key is made", binary::NODE_TIMEOUT, made).unwrap().json().unwrap();
    let text = |name: &str| made[name].as_str().unwrap().to_owned();
    (text("id"), text("key"))
}

fn complete(server: SocketAddr, key: &str, body: &Value) -> http::HttpAnswer {
    http::post_with(server, "/v1/completions", &[("authorization", &format!("Bearer {key}"))], body).unwrap()
}

/// Number of served requests of each thread.
struct Served(Vec<AtomicU32>);

impl Served {
    fn counts(&self) -> Vec<u32> {
        self.0.iter().map(|count| count.load(Ordering::Relaxed)).collect()
    }

    fn total(&self) -> u32 {
        self.counts().iter().sum()
    }

    /// Waits until every thread has begun and ended a request since the call.
    fn wait_for_each(&self) {
        let before = self.counts();
        wait::until("requests go on", binary::NODE_TIMEOUT, || {
            // The first one may have begun before.
            self.counts().iter().zip(&before).all(|(now, before)| *now > before + 1).then_some(())
        })
        .unwrap();
    }
}

/// Sends requests to all coordinators until `until` returns. Returns the number served. A failed request
/// fails the test.
fn under_load<T>(
    fronts: &[SocketAddr],
    key: impl Fn() -> String + Sync,
    until: impl FnOnce(&Served) -> T,
) -> (T, u32) {
    let ended = AtomicBool::new(false);
    let served = Served(fronts.iter().map(|_| AtomicU32::new(0)).collect());
    let result = std::thread::scope(|scope| {
        for (at, front) in fronts.iter().enumerate() {
            let (ended, served, key) = (&ended, &served, &key);
            scope.spawn(move || {
                for n in 0.. {
                    if ended.load(Ordering::Relaxed) {
                        return;
                    }
                    let body = json!({"prompt": [at, n % 90, 5, 6], "max_tokens": 12, "stream": n % 2 == 0});
                    let answer = complete(*front, &key(), &body);
                    let (status, text) = (answer.status, answer.text().unwrap());
                    assert_eq!(status, 200, "{text}");
                    assert!(n % 2 == 1 || text.ends_with("data: [DONE]\n\n"), "{text}");
                    served.0[at].fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        // The threads must end in any case.
        let result = catch_unwind(AssertUnwindSafe(|| until(&served)));
        ended.store(true, Ordering::Relaxed);
        result.unwrap_or_else(|panic| resume_unwind(panic))
    });
    (result, served.total())
}

#[test]
fn sec_keys_of_a_group() {
    let cluster =
        Cluster::builder("security-group", &tiny_model()).flag("--coordinators", "3").start().unwrap();
    let nodes = &cluster.nodes().coordinators;
    let ops: Vec<_> = nodes.iter().map(|node| node.ops).collect();
    let fronts: Vec<_> = nodes.iter().map(|node| node.http).collect();
    let (_, first) = create(ops[0], json!({"tenant": "a"}));
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 2});
    let opens = |key: &str, at: usize| complete(fronts[at], key, &body).status == 200;
    let everywhere = |key: &str, status: u16| {
        fronts.iter().all(|front| complete(*front, key, &body).status == status).then_some(())
    };
    wait::until("all know the key", binary::NODE_TIMEOUT, || everywhere(&first, 200)).unwrap();
    // 503 until a majority has confirmed that the key does not exist.
    wait::until("there is no other", binary::NODE_TIMEOUT, || everywhere("another", 401)).unwrap();

    // Key rotation under load: no request is refused.
    let current = std::sync::Mutex::new(first.clone());
    let key = || current.lock().unwrap().clone();
    let (last, served) = under_load(&fronts, key, |served| {
        let mut old = None::<String>;
        for round in 0..3 {
            let (id, new) = create(ops[round], json!({"tenant": "a"}));
            wait::until("all know the new key", binary::NODE_TIMEOUT, || {
                (0..3).all(|at| opens(&new, at)).then_some(())
            })
            .unwrap();
            *current.lock().unwrap() = new;
            // Then no request with the old key is in flight.
            served.wait_for_each();
            if let Some(old) = old.replace(id) {
                let path = format!("/admin/v1/keys/{old}");
                assert_eq!(http::send(ops[2 - round], "DELETE", &path, &[], b"").unwrap().status, 204);
            }
        }
        old.unwrap()
    });
    assert!(served > 30, "{served}");
    // A key revoked at one coordinator is refused by all within five seconds.
    let key = key();
    let sent = Instant::now();
    let revoked = http::send(ops[1], "DELETE", &format!("/admin/v1/keys/{last}"), &[], b"").unwrap();
    assert_eq!(revoked.status, 204);
    wait::until("nobody takes it", binary::NODE_TIMEOUT, || everywhere(&key, 401)).unwrap();
    assert!(sent.elapsed() < 3 * Duration::from_secs(5), "{:?}", sent.elapsed());

    // A limit holds for the whole cluster: requests served by one coordinator count at the others.
    let (_, few) = create(ops[2], json!({"tenant": "b", "rpm": 4}));
    wait::until("all know the key", binary::NODE_TIMEOUT, || {
        let has_key = |ops: &SocketAddr| http::metric(*ops, "kvasir_api_keys").ok() == Some(2.0);
        ops.iter().all(has_key).then_some(())
    })
    .unwrap();
    (0..4).for_each(|_| assert!(opens(&few, 0)));
    let limited = || {
        let answer = complete(fronts[1], &few, &body);
        (answer.status == 429).then_some(answer)
    };
    // Requests accepted there before the count arrives count too.
    let refused = wait::until("the others count it", binary::NODE_TIMEOUT, limited).unwrap();
    assert!(refused.header("retry-after").is_some_and(|after| after.parse::<u32>().unwrap() > 0));
    assert_eq!(refused.json().unwrap()["error"]["code"], "rate_limited");
}

#[test]
fn certificates_are_replaced_under_load() {
    let cluster =
        Cluster::builder("security-rotate", &tiny_model()).flag("--coordinators", "3").start().unwrap();
    let data = cluster.data_dir().to_owned();
    let fronts: Vec<_> = cluster.nodes().coordinators.iter().map(|node| node.http).collect();
    let named =
        |role: &'static str, ids: Vec<String>| ids.into_iter().map(move |id| (role, id)).collect::<Vec<_>>();
    let mut nodes =
        named("coordinator", cluster.nodes().coordinators.iter().map(|node| node.id.clone()).collect());
    nodes.extend(named("worker", cluster.nodes().workers.iter().map(|node| node.id.clone()).collect()));
    let ca = data.join("ca");
    let ca_dir = ca.to_str().unwrap();
    let directory = |id: &str| data.join("nodes").join(id).join("identity");
    // All nodes have loaded their new files.
    let renewed = |times: usize| {
        let count = |id: &str| {
            let log = std::fs::read_to_string(data.join("logs").join(format!("{id}.log"))).unwrap();
            log.matches("certificates were reloaded").count()
        };
        wait::until("all nodes have read it", binary::NODE_TIMEOUT, || {
            nodes.iter().all(|(_, id)| count(id) >= times).then_some(())
        })
        .unwrap();
    };
    let trust = || {
        for (_, id) in &nodes {
            std::fs::copy(ca.join("ca.crt"), directory(id).join("ca.crt")).unwrap();
        }
    };
    let ((), served) = under_load(
        &fronts,
        || "any".into(),
        |served| {
            binary::stdout(&["ca", "rotate", "--dir", ca_dir]).unwrap();
            trust();
            renewed(1);
            for (role, id) in &nodes {
                let out = directory(id);
                let to = out.to_str().unwrap();
                let issue =
                    ["ca", "issue", "--dir", ca_dir, "--role", role, "--node", id, "--out", to, "--replace"];
                binary::stdout(&issue).unwrap();
            }
            renewed(2);
            binary::stdout(&["ca", "rotate", "--dir", ca_dir, "--finish"]).unwrap();
            trust();
            renewed(3);
            // New connections are verified with the new root alone.
            let killed = cluster.nodes().workers[1].pid;
            let id = &cluster.nodes().workers[1].id;
            signal::kill_now(killed);
            let back = || {
                let status = http::get(cluster.coordinator().ops, "/admin/v1/cluster").ok()?.ok().ok()?;
                let workers = status["workers"].as_array()?.clone();
                let up = cluster.up_file().ok()?;
                let new = up.workers.iter().any(|worker| worker.id == *id && worker.pid != killed);
                let ready = workers.iter().filter(|worker| worker["state"] == "ready").count();
                (new && ready == 2).then_some(())
            };
            wait::until("the worker joins by its new certificate", binary::NODE_TIMEOUT, back).unwrap();
            let at = served.total();
            wait::until("requests go on", binary::NODE_TIMEOUT, || (served.total() > at + 6).then_some(()))
                .unwrap();
        },
    );
    assert!(served > 20, "{served}");
    let refused = binary::run(&["ca", "rotate", "--dir", ca_dir, "--finish"]).unwrap();
    assert_eq!(refused.status.code(), Some(1));
}

/// A worker with a revoked certificate is excluded by all coordinators within seconds, although only one
/// received the list. No request is lost. With a new certificate the worker returns.
#[test]
fn sec_revoked_node() {
    let cluster =
        Cluster::builder("security-revoke", &tiny_model()).flag("--coordinators", "3").start().unwrap();
    let (data, nodes) = (cluster.data_dir().to_owned(), cluster.nodes());
    let fronts: Vec<_> = nodes.coordinators.iter().map(|node| node.http).collect();
    let revoked = &nodes.workers[1];
    let ca = data.join("ca");
    let ca_dir = ca.to_str().unwrap();
    // Number of workers that each coordinator may use.
    let ready = |count: usize| {
        let at = |ops: SocketAddr| {
            let status = http::get(ops, "/admin/v1/cluster").ok()?.ok().ok()?;
            let workers = status["workers"].as_array()?.clone();
            Some(workers.iter().filter(|worker| worker["state"] == "ready").count() == count)
        };
        nodes.coordinators.iter().all(|node| at(node.ops) == Some(true)).then_some(())
    };
    wait::until("all know both", binary::NODE_TIMEOUT, || ready(2)).unwrap();
    let ((), served) = under_load(
        &fronts,
        || "any".into(),
        |served| {
            let on = |worker: &str| {
                let status = http::get(cluster.coordinator().ops, "/metrics").ok()?.text().ok()?;
                status.lines().any(|line| line.contains(worker)).then_some(())
            };
            wait::until("it has something to do", binary::NODE_TIMEOUT, || on(&revoked.id)).unwrap();
            let output =
                binary::stdout(&["ca", "revoke", "--dir", ca_dir, "--role", "worker", "--node", &revoked.id]);
            assert!(output.unwrap().starts_with("revoked "));
            let sent = Instant::now();
            let given = data.join("nodes").join(&nodes.coordinators[2].id).join("identity/ca.crl");
            std::fs::copy(ca.join("ca.crl"), given).unwrap();
            wait::until("nobody has it", binary::NODE_TIMEOUT, || ready(1)).unwrap();
            // Two seconds to poll the file, one to notify the others.
            assert!(sent.elapsed() < Duration::from_secs(3 * 3), "{:?}", sent.elapsed());
            // It keeps reconnecting.
            let log = data.join("logs").join(format!("{}.log", revoked.id));
            wait::until("it is refused", binary::NODE_TIMEOUT, || {
                let log = std::fs::read_to_string(&log).unwrap();
                log.contains("refuses our certificate").then_some(())
            })
            .unwrap();
            ready(1).unwrap();
            let out = data.join("nodes").join(&revoked.id).join("identity");
            let issue = ["ca", "issue", "--dir", ca_dir, "--role", "worker", "--node", &revoked.id];
            binary::stdout(&[&issue[..], &["--out", out.to_str().unwrap(), "--replace"]].concat()).unwrap();
            wait::until("it is back with another one", binary::NODE_TIMEOUT, || ready(2)).unwrap();
            let at = served.total();
            wait::until("requests go on", binary::NODE_TIMEOUT, || (served.total() > at + 6).then_some(()))
                .unwrap();
        },
    );
    assert!(served > 12, "{served}");
    // Each coordinator wrote the list to disk when it received it.
    let records_revocation = |(path, text): &(PathBuf, Vec<u8>)| {
        path.ends_with("audit.jsonl") && String::from_utf8_lossy(text).contains(r#""what":"revoke""#)
    };
    assert_eq!(written(&data).iter().filter(|file| records_revocation(file)).count(), 3);
    let unknown = ["ca", "revoke", "--dir", ca_dir, "--role", "worker", "--node", "worker-9"];
    assert_eq!(binary::run(&unknown).unwrap().status.code(), Some(1));
    assert_eq!(binary::run(&["ca", "revoke", "--dir", ca_dir]).unwrap().status.code(), Some(2));
}

/// A coordinator with a revoked certificate is refused by all nodes, and does not serve its clients. It
/// counts for the majority until it is removed, which the others can do without it.
#[test]
fn sec_revoked_coordinator() {
    let cluster =
        Cluster::builder("security-seat", &tiny_model()).flag("--coordinators", "3").start().unwrap();
    let (data, nodes) = (cluster.data_dir().to_owned(), cluster.nodes());
    let ca = data.join("ca");
    let (ca_dir, revoked) = (ca.to_str().unwrap(), &nodes.coordinators[2]);
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 2});
    let status = |front: SocketAddr| complete(front, "any", &body).status;
    wait::until("it serves", binary::NODE_TIMEOUT, || (status(revoked.http) == 200).then_some(())).unwrap();
    binary::stdout(&["ca", "revoke", "--dir", ca_dir, "--role", "coordinator", "--node", &revoked.id])
        .unwrap();
    let given = data.join("nodes").join(&nodes.coordinators[0].id).join("identity/ca.crl");
    std::fs::copy(ca.join("ca.crl"), given).unwrap();
    let votes = |expected: usize| {
        let group = binary::stdout(&[
            "coordinators",
            "list",
            "--ops",
            &nodes.coordinators[0].ops.to_string(),
            "--json",
        ])
        .ok()?;
        let group: Value = serde_json::from_str(&group).ok()?;
        let votes = group["coordinators"].as_array()?.iter().filter(|member| member["votes"] == true).count();
        (votes == expected && group["needed"] == expected / 2 + 1).then_some(())
    };
    // No worker accepts it either.
    wait::until("it has no worker left", binary::NODE_TIMEOUT, || {
        (status(revoked.http) == 503).then_some(())
    })
    .unwrap();
    votes(3).unwrap();
    // The other two agree and serve.
    let (_, key) = create(nodes.coordinators[1].ops, json!({"tenant": "a"}));
    wait::until("both know the key", binary::NODE_TIMEOUT, || {
        let opens = |at: usize| complete(nodes.coordinators[at].http, &key, &body).status == 200;
        (opens(0) && opens(1)).then_some(())
    })
    .unwrap();
    let removed = || {
        let ops = nodes.coordinators[0].ops.to_string();
        binary::stdout(&["coordinators", "remove", &revoked.id, "--ops", &ops]).ok()
    };
    wait::until("it is removed", binary::NODE_TIMEOUT, removed).unwrap();
    wait::until("its seat is gone", binary::NODE_TIMEOUT, || votes(2)).unwrap();
}

/// The time from the request to the first token.
fn first_token(server: SocketAddr, key: &str, prompt: &[u32]) -> Duration {
    let body = json!({"prompt": prompt, "max_tokens": 1, "stream": true});
    let sent = Instant::now();
    let answer = complete(server, key, &body);
    assert_eq!(answer.status, 200);
    let mut events = answer.events().unwrap();
    events.next_event().unwrap();
    let took = sent.elapsed();
    events.all().unwrap();
    took
}

/// Another tenant's cached prompt takes as long as an uncached one: a draft token from the time is right half of
/// the time.
#[test]
fn sec_ttft_side_channel() {
    const PROBES: u32 = 200;
    let cluster = Cluster::builder("security-timing", &tiny_model()).flag("--workers", "1").start().unwrap();
    let (front, ops) = (cluster.http(), cluster.coordinator().ops);
    let [a, b] = ["a", "b"].map(|tenant| create(ops, json!({"tenant": tenant})).1);
    let prompt =
        |seed: u32| (0..400).map(|at| (seed * 7 + at * 13 + at * at * seed) % 400).collect::<Vec<u32>>();
    let (mut foreign, mut cold, mut own) = (Vec::new(), Vec::new(), Vec::new());
    for probe in 0..PROBES {
        let [theirs, nobodys] = [2 * probe, 2 * probe + 1].map(prompt);
        first_token(front, &a, &theirs);
        // Alternate the order.
        match probe % 2 {
            0 => {
                foreign.push(first_token(front, &b, &theirs));
                cold.push(first_token(front, &b, &nobodys));
            }
            _ => {
                cold.push(first_token(front, &b, &nobodys));
                foreign.push(first_token(front, &b, &theirs));
            }
        }
        own.push(first_token(front, &a, &theirs));
    }
    // How often one is faster than the other: one half, if the times are indistinguishable.
    let faster = |these: &[Duration], those: &[Duration]| {
        let pairs = these.iter().flat_map(|this| those.iter().map(move |that| this < that));
        pairs.filter(|faster| *faster).count() as f64 / (these.len() * those.len()) as f64
    };
    let (leak, hit) = (faster(&foreign, &cold), faster(&own, &cold));
    eprintln!(
        "another tenant's prompt is faster than a new one in {leak:.2}, one's own in {hit:.2} of all pairs"
    );
    // Chance gives this distance from one half in one of 3,000 runs.
    assert!(leak < 0.6, "{leak}");
    assert!(hit > 0.6, "{hit}: a hit of one's own would be seen, so that the other would be, too");
}

/// All bytes written into a directory, by file.
fn written(directory: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries
        .flat_map(|path| match path.is_dir() {
            true => written(&path),
            false => vec![(path.clone(), std::fs::read(&path).unwrap_or_default())],
        })
        .collect()
}

/// The first updates of a dashboard page, at most `count`.
fn looks(ops: SocketAddr, count: usize) -> Vec<u8> {
    let mut stream = TcpStream::connect(ops).unwrap();
    stream.set_read_timeout(Some(binary::NODE_TIMEOUT)).unwrap();
    let request = format!("GET /admin/v1/dashboard/events HTTP/1.1\r\nHost: {ops}\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let (mut received, mut buffer) = (Vec::new(), [0; 1 << 16]);
    while String::from_utf8_lossy(&received).matches("event: look").count() < count {
        let read = stream.read(&mut buffer).unwrap();
        assert!(read > 0, "the stream has ended");
        received.extend_from_slice(&buffer[..read]);
    }
    received
}

/// Text of a client must not be in any data that operators store: not in a log at its finest level, any file
/// of the data directory (including the audit log), any node's metrics, traces, or the dashboard's updates.
#[test]
fn sec_log_canary() {
    let bert = Manifest::read().unwrap().tiny("bert").unwrap().path();
    assert_nothing_is_written("generates", &tiny_model());
    assert_nothing_is_written("encodes", bert.to_str().unwrap());
}

fn assert_nothing_is_written(name: &str, model: &str) {
    const CANARIES: [&str; 8] = [
        "canary-prompt",
        "canary-key",
        "canary-header",
        "canary-file",
        "canary-salt",
        "canary-stop",
        "canary-schema",
        "canary-tool",
    ];
    let dir = tempfile::tempdir().unwrap();
    let collector = Collector::start();
    let cluster = Cluster::builder(&format!("security-canary-{name}"), model)
        .env("KVASIR_LOG", "trace")
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url())
        .data_dir(dir.path())
        .start()
        .unwrap();
    let (front, ops) = (cluster.http(), cluster.coordinator().ops);
    let (id, key) = create(ops, json!({"tenant": "a"}));
    let bearer = format!("Bearer {key}");
    let headers = [
        ("authorization", bearer.as_str()),
        ("x-canary", "canary-header"),
        ("cookie", "canary-header"),
        ("x-kvasir-group", "group"),
    ];
    let document = json!({"id": "canary-file.pdf", "text": "canary-prompt in a document"});
    let messages = |content: &str| json!([{"role": "user", "content": content}]);
    let schema = json!({"type": "object", "properties": {"canary-schema": {"const": "canary-schema"}}, "required": ["canary-schema"]});
    let tool = json!({"type": "function", "function": {"name": "canary-tool", "parameters": schema}});
    let bodies = [
        (
            "/v1/completions",
            json!({"prompt": "canary-prompt", "max_tokens": 3, "cache_salt": "canary-salt", "stop": "canary-stop"}),
        ),
        ("/v1/completions", json!({"prompt": "canary-prompt", "max_tokens": 3, "stream": true})),
        ("/v1/completions", json!({"prompt": "canary-prompt", "model": "../canary-file.gguf"})),
        ("/v1/completions", json!({"prompt": "canary-prompt", "suffix": "canary-prompt"})),
        ("/v1/completions", json!({"prompt": "canary-prompt", "temperature": "canary-prompt"})),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "canary-prompt"}], "documents": [document]}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "canary-prompt", "max_tokens": 8, "grammar": {"syntax": "regex", "definition": "canary-schema"}}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "canary-prompt", "grammar": {"syntax": "lark", "definition": "canary-schema"}}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": messages("canary-prompt"), "max_tokens": 8, "response_format":
                {"type": "json_schema", "json_schema": {"name": "canary-schema", "schema": schema}}}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": messages("canary-prompt"), "max_tokens": 8, "tools": [tool], "tool_choice": "required"}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "canary-prompt"},
                {"type": "image_url", "image_url": {"url": "https://example/canary-file.png"}}]}]}),
        ),
        (
            "/v1/responses",
            json!({"input": "canary-prompt", "max_output_tokens": 3, "user": "canary-prompt", "store": false}),
        ),
        (
            "/v1/responses",
            json!({"input": "x", "metadata": {"a": "canary-prompt"}, "tools": [{"type": "canary-prompt"}]}),
        ),
        (
            "/v1/messages",
            json!({"messages": [{"role": "user", "content": "canary-prompt"}], "max_tokens": 3, "system": "canary-prompt", "stop_sequences": ["canary-stop"]}),
        ),
        (
            "/v1/messages",
            json!({"messages": [{"role": "user", "content": [{"type": "canary-prompt"}]}], "max_tokens": 3}),
        ),
        ("/v1/messages/count_tokens", json!({"messages": [{"role": "user", "content": "canary-prompt"}]})),
        ("/v1/embeddings", json!({"input": ["canary-prompt", "and more of canary-prompt"]})),
        ("/v1/rerank", json!({"query": "canary-prompt", "documents": ["canary-prompt", "canary-file.pdf"]})),
        ("/tokenize", json!({"prompt": "canary-prompt"})),
        ("/canary-file", json!({"prompt": "canary-prompt"})),
    ];
    let mut served = 0;
    for (path, body) in &bodies {
        let answer = http::post_with(front, path, &headers, body).unwrap();
        served += u32::from(answer.status == 200);
        answer.text().unwrap();
    }
    assert!(served >= 2, "{served} requests were served: nothing could be written down of them");
    http::send(front, "POST", "/v1/completions", &headers, b"{\"prompt\": \"canary-prompt")
        .unwrap()
        .text()
        .unwrap();
    let wrong = [("authorization", "Bearer canary-key"), ("x-request-id", "canary header")];
    assert_eq!(http::post_with(front, "/v1/completions", &wrong, &json!({})).unwrap().status, 401);
    let wrong = [("x-api-key", "canary-key"), ("anthropic-version", "canary-header")];
    assert_eq!(http::post_with(front, "/v1/messages", &wrong, &json!({})).unwrap().status, 401);
    http::send(ops, "DELETE", "/admin/v1/keys/canary-key", &[], b"").unwrap().text().unwrap();
    let pinned = json!({"prompt": "canary-prompt and more of it"});
    http::post_with(ops, "/admin/v1/prefixes", &headers, &pinned).unwrap().text().unwrap();
    let listed = http::get(ops, "/admin/v1/keys").unwrap().text().unwrap();
    assert!(listed.contains(&id) && !listed.contains(&key));

    let text = |ops: SocketAddr, path: &str| http::get(ops, path).unwrap().text().unwrap().into_bytes();
    let mut outputs = vec![
        ("metrics".into(), text(ops, "/metrics")),
        ("status".into(), text(ops, "/admin/v1/cluster")),
        ("prefixes".into(), text(ops, "/admin/v1/prefixes")),
    ];
    for worker in &cluster.nodes().workers {
        outputs.push((PathBuf::from(&worker.id), text(worker.ops, "/metrics")));
    }
    // The recent decisions, then updates.
    outputs.push(("dashboard".into(), looks(ops, 2)));
    wait::until("spans of both kinds of node are exported", binary::NODE_TIMEOUT, || {
        let nodes: BTreeSet<String> = collector.spans().into_iter().map(|recorded| recorded.node).collect();
        let of = |kind: &str| nodes.iter().any(|node| node.starts_with(kind));
        (of("coordinator") && of("worker")).then_some(())
    })
    .unwrap();
    let log = cluster.log().to_owned();
    drop(cluster);
    outputs.push(("traces".into(), collector.raw()));
    outputs.push((log.clone(), std::fs::read(&log).unwrap()));
    outputs.extend(written(dir.path()));
    let has = |text: &[u8], pattern: &[u8]| text.windows(pattern.len()).any(|window| window == pattern);
    let traced = |kind: &str| {
        let of = |path: &Path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(kind));
        outputs.iter().any(|(path, text)| of(path) && has(text, b" TRACE "))
    };
    assert!(
        traced("coordinator-0") && traced("worker-0"),
        "nothing was logged at the level that this is about"
    );
    assert!(outputs.iter().any(|(path, text)| path.ends_with("audit.jsonl") && has(text, id.as_bytes())));
    let secrets = CANARIES.iter().copied().chain([key.as_str(), &key["kvasir-".len()..]]);
    for secret in secrets {
        for (path, text) in &outputs {
            let at = text.windows(secret.len()).position(|window| window == secret.as_bytes());
            let around = at
                .map(|at| String::from_utf8_lossy(&text[at.saturating_sub(200)..(at + 100).min(text.len())]));
            assert_eq!(around, None, "{secret} in {}", path.display());
        }
    }
}
