//! What tenants used, counted by all coordinators together, through kills of workers and coordinators.

use crate::tiny_model;
use kvasir_cluster_tests::cluster::{Cluster, CoordinatorNode};
use kvasir_cluster_tests::{binary, http, signal, wait};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

const TOKENS: u64 = 16;
const PROMPT: u64 = 40;

fn key(ops: SocketAddr, tenant: &str) -> String {
    let request = json!({"tenant": tenant});
    let made = || http::post(ops, "/admin/v1/keys", &request).ok().filter(|answer| answer.status == 201);
    let made = wait::until("a key is made", binary::NODE_TIMEOUT, made).unwrap().json().unwrap();
    made["key"].as_str().unwrap().to_owned()
}

/// A request that generates all of its tokens.
fn body(model: &str, seed: u64) -> Value {
    let prompt: Vec<u64> = (0..PROMPT).map(|i| 5 + (seed * 31 + i * 7) % 400).collect();
    json!({"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": true})
}

fn complete(server: SocketAddr, key: &str, body: &Value) -> Value {
    let bearer = format!("Bearer {key}");
    let send = || http::post_with(server, "/v1/completions", &[("authorization", &bearer)], body)?.ok();
    // A coordinator learns of a new key within a second.
    let answer = wait::until("an answer", binary::NODE_TIMEOUT, || send().ok()).unwrap();
    assert_eq!(answer["usage"]["completion_tokens"], TOKENS);
    answer
}

fn usage(ops: SocketAddr, by: &str) -> anyhow::Result<Value> {
    http::get(ops, &format!("/admin/v1/usage?since=3600&by={by}"))?.ok()
}

/// (requests, prompt, generated) of each tenant.
fn by_tenant(usage: &Value) -> BTreeMap<String, [u64; 3]> {
    let count = |row: &Value, field: &str| row[field].as_u64().unwrap();
    let row = |row: &Value| {
        let counts = ["requests", "prompt_tokens", "generated_tokens"].map(|field| count(row, field));
        (row["tenant"].as_str().unwrap().to_owned(), counts)
    };
    usage["rows"].as_array().unwrap().iter().map(row).collect()
}

fn coordinators(cluster: &Cluster) -> Vec<CoordinatorNode> {
    cluster.up_file().unwrap().coordinators
}

/// Waits until all coordinators have these figures.
fn all_have(cluster: &Cluster, expected: &BTreeMap<String, [u64; 3]>) {
    let has = |node: &CoordinatorNode| {
        usage(node.ops, "tenant").is_ok_and(|usage| {
            let mut counted = by_tenant(&usage);
            // Work for a coordinator that was killed.
            counted.remove("(unattributed)");
            counted == *expected
        })
    };
    let all = || coordinators(cluster).iter().all(has).then_some(());
    wait::until("all coordinators have the same usage", binary::NODE_TIMEOUT, all).unwrap_or_else(|error| {
        let counted: Vec<_> = coordinators(cluster).iter().map(|node| usage(node.ops, "tenant")).collect();
        panic!("{error:#}: {expected:?} is not in {counted:#?}")
    });
}

#[test]
fn usage_is_the_sum_of_what_was_served_and_outlives_its_nodes() {
    let cluster = Cluster::builder("usage", &tiny_model())
        .flag("--coordinators", "3")
        .flag("--workers", "2")
        .start()
        .unwrap();
    let (nodes, model) = (coordinators(&cluster), cluster.model());
    let tenants = ["team-a", "team-b"].map(|tenant| (tenant, key(nodes[0].ops, tenant)));
    let mut expected: BTreeMap<String, [u64; 3]> = BTreeMap::new();
    let mut count = |tenant: &str, answer: &Value| {
        let counts = expected.entry(tenant.to_owned()).or_default();
        let used = |field: &str| answer["usage"][field].as_u64().unwrap();
        for (count, more) in counts.iter_mut().zip([1, used("prompt_tokens"), used("completion_tokens")]) {
            *count += more;
        }
        expected.clone()
    };
    let mut counted = BTreeMap::new();
    for (seed, node) in (0u64..).zip(nodes.iter().chain(&nodes)) {
        for (tenant, key) in &tenants {
            counted = count(tenant, &complete(node.http, key, &body(model, seed)));
        }
    }
    all_have(&cluster, &counted);

    // The sum over tenants is the sum over workers: in time, and in computed tokens.
    let total = || usage(nodes[0].ops, "tenant").ok().map(|usage| usage["total"].clone());
    let timed = || total().filter(|total| total["attempts"] == total["timed_attempts"]);
    let total = wait::until("all attempts are timed", binary::NODE_TIMEOUT, timed).unwrap();
    let number = |field: &str| total[field].as_f64().unwrap();
    let device = number("device_s") + number("recomputed_device_s");
    let workers = || {
        let sum = cluster.worker_metric("kvasir_device_seconds_total").ok()?;
        ((sum - device).abs() < 1e-6).then_some(())
    };
    wait::until("the workers' device time is the tenants'", binary::NODE_TIMEOUT, workers).unwrap();
    assert!(device > 0.0);
    let computed = cluster.worker_metric("kvasir_prefill_tokens_computed_total").unwrap()
        + cluster.worker_metric("vllm:generation_tokens_total").unwrap();
    let tenants_tokens = number("prompt_tokens") - number("cached_tokens")
        + number("generated_tokens")
        + number("recomputed_tokens");
    assert_eq!(tenants_tokens, computed);

    // By key and model, as a table and as CSV.
    let ops = nodes[1].ops.to_string();
    let csv = binary::stdout(&["usage", "--by", "tenant,key,model", "--csv", "--ops", &ops]).unwrap();
    let lines: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(lines.len(), 3, "{csv}");
    assert_eq!(lines[0][..4], ["tenant", "key", "model", "requests"]);
    assert_eq!((lines[1][0], lines[1][2], lines[1][3]), ("team-a", model, "6"));
    assert_eq!(lines[1][1].len(), 16, "{csv}");
    let table = binary::stdout(&["usage", "--ops", &ops]).unwrap();
    assert!(table.starts_with("TENANT") && table.contains("total"), "{table}");
    let metrics = http::get(nodes[1].ops, "/admin/v1/usage/metrics").unwrap().text().unwrap();
    assert!(metrics.contains("kvasir_usage_generated_tokens_total{tenant=\"team-a\",key=\""), "{metrics}");
    let open = http::get(nodes[1].ops, "/metrics").unwrap().text().unwrap();
    assert!(!open.contains("team-a"), "tenants are not public");

    // A worker is killed in the middle of a stream: its tokens count once.
    let mut long = body(model, 77);
    long["max_tokens"] = json!(400);
    long["stream"] = json!(true);
    long["stream_options"] = json!({"include_usage": true});
    let bearer = format!("Bearer {}", tenants[0].1);
    let answer =
        http::post_with(nodes[2].http, "/v1/completions", &[("authorization", &bearer)], &long).unwrap();
    let mut events = answer.events().unwrap();
    let first = events.next_event().unwrap().unwrap();
    let serving = cluster.up_file().unwrap().workers;
    let victim = serving
        .iter()
        .max_by_key(|worker| http::metric(worker.ops, "vllm:num_requests_running").unwrap_or(0.0) as u64);
    signal::kill_now(victim.unwrap().pid);
    let rest = events.all().unwrap();
    let ended = std::iter::once(&first).chain(&rest).rfind(|event| event["usage"].is_object()).unwrap();
    assert_eq!(ended["usage"]["completion_tokens"], 400);
    counted = count("team-a", ended);
    all_have(&cluster, &counted);

    // A coordinator is killed, and a second one with its disk's record of usage.
    signal::kill_now(nodes[2].pid);
    let again = |id: &str, pid: u32| {
        let restarted = || {
            let node = cluster.up_file().ok()?.coordinators.into_iter().find(|node| node.id == id)?;
            (node.pid != pid && usage(node.ops, "tenant").is_ok()).then_some(node)
        };
        wait::until("a coordinator comes back", binary::NODE_TIMEOUT, restarted).unwrap()
    };
    let restarted = again(&nodes[2].id, nodes[2].pid);
    all_have(&cluster, &counted);
    let file = cluster.data_dir().join("nodes").join(&nodes[1].id).join("data/usage.redb");
    assert!(file.is_file(), "{}", file.display());
    std::fs::remove_file(&file).unwrap();
    signal::kill_now(nodes[1].pid);
    again(&nodes[1].id, nodes[1].pid);
    all_have(&cluster, &counted);
    counted = count("team-b", &complete(restarted.http, &tenants[1].1, &body(model, 99)));
    all_have(&cluster, &counted);
}

/// The processors' energy counter, planted in a folder.
struct FakePackage(tempfile::TempDir);

impl FakePackage {
    fn new() -> Self {
        let fake = Self(tempfile::tempdir().unwrap());
        let zone = fake.0.path().join("intel-rapl:0");
        std::fs::create_dir(&zone).unwrap();
        std::fs::write(zone.join("name"), "package-0\n").unwrap();
        std::fs::write(zone.join("max_energy_range_uj"), "1000000\n").unwrap();
        fake.plant(0);
        fake
    }

    /// Replaces the counter at once.
    fn plant(&self, energy: u64) {
        let zone = self.0.path().join("intel-rapl:0");
        std::fs::write(zone.join("next"), format!("{energy}\n")).unwrap();
        std::fs::rename(zone.join("next"), zone.join("energy_uj")).unwrap();
    }
}

#[test]
fn the_energy_of_tenants_is_that_of_the_workers_steps() {
    let package = FakePackage::new();
    let folder = package.0.path().to_str().unwrap();
    let cluster = Cluster::builder("usage-energy", &tiny_model())
        .flag("--workers", "1")
        .env("KVASIR_POWERCAP", folder)
        .start()
        .unwrap();
    let (http, ops) = (cluster.http(), cluster.coordinator().ops);
    let metered = |name: &str| cluster.worker_metric(name).unwrap_or(0.0);
    // The counter goes on, past its end, while requests are served.
    let mut energy = 0;
    let served = wait::until("steps have energy", binary::NODE_TIMEOUT, || {
        energy = (energy + 300_000) % 1_000_000;
        package.plant(energy);
        http::post(http, "/v1/completions", &body(cluster.model(), energy)).unwrap().ok().unwrap();
        (metered("kvasir_device_joules_total") > 1.0).then_some(())
    });
    served.unwrap();
    let total = || usage(ops, "tenant").ok().map(|usage| usage["total"].clone());
    let equal = || {
        let total = total()?;
        let joules = total["energy_j"].as_f64()? + total["recomputed_energy_j"].as_f64()?;
        let all = total["attempts"] == total["timed_attempts"];
        // Steps before the first reading have no energy.
        let covered = total["energy_device_s"].as_f64()? <= total["device_s"].as_f64()?;
        (all && covered && (joules - metered("kvasir_device_joules_total")).abs() < 1e-3).then_some(())
    };
    wait::until("the tenants' energy is the worker's", binary::NODE_TIMEOUT, equal).unwrap();
    assert!(metered("kvasir_device_joules_total") <= metered("kvasir_device_joules_measured_total"));
}

#[test]
fn an_energy_that_cannot_be_read_is_absent() {
    let cluster = Cluster::builder("usage-no-energy", &tiny_model())
        .flag("--workers", "1")
        .env("KVASIR_POWERCAP", "/nowhere")
        .start()
        .unwrap();
    http::post(cluster.http(), "/v1/completions", &body(cluster.model(), 1)).unwrap().ok().unwrap();
    let ops = cluster.coordinator().ops;
    let timed = || {
        let total = usage(ops, "tenant").ok()?["total"].clone();
        (total["attempts"] == 1 && total["timed_attempts"] == 1).then_some(total)
    };
    let total = wait::until("the attempt is timed", binary::NODE_TIMEOUT, timed).unwrap();
    assert!(total["device_s"].as_f64().unwrap() > 0.0);
    assert!(total["energy_j"].is_null() && total["energy_device_s"].is_null(), "{total}");
    let csv = binary::stdout(&["usage", "--csv", "--by", "model", "--ops", &ops.to_string()]).unwrap();
    assert!(csv.lines().nth(1).unwrap().ends_with(",,,,1,1"), "{csv}");
}

/// A second of silence as a WAV file: 16 kHz, one channel, 16 bits.
fn silence() -> Vec<u8> {
    let samples = 16_000u32;
    let size = 2 * samples;
    let mut wav = b"RIFF".to_vec();
    wav.extend((36 + size).to_le_bytes());
    wav.extend(b"WAVEfmt ");
    wav.extend(16u32.to_le_bytes());
    wav.extend([1u16, 1].map(u16::to_le_bytes).concat());
    wav.extend([samples, 2 * samples].map(u32::to_le_bytes).concat());
    wav.extend([2u16, 16].map(u16::to_le_bytes).concat());
    wav.extend(b"data");
    wav.extend(size.to_le_bytes());
    wav.resize(wav.len() + size as usize, 0);
    wav
}

/// Sends a recording, which is not JSON as everything else here.
fn post_wav(server: SocketAddr, path: &str, wav: &[u8]) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(server)?;
    stream.set_read_timeout(Some(binary::NODE_TIMEOUT))?;
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\nContent-Type: audio/wav\r\n\
         Content-Length: {}\r\n\r\n",
        wav.len()
    );
    stream.write_all(&[head.as_bytes(), wav].concat())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

#[test]
fn audio_counts_by_its_seconds_and_the_time_of_its_model() {
    let cluster = Cluster::builder("usage-audio", &tiny_model())
        .flag("--workers", "1")
        .flag("--operation", "silero-vad")
        .start()
        .unwrap();
    let answer = post_wav(cluster.http(), "/v1/audio/vad", &silence()).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") || answer.starts_with("HTTP/1.0 200"), "{answer}");
    let heard = || {
        let usage = usage(cluster.coordinator().ops, "model").ok()?;
        let rows = usage["rows"].as_array()?;
        let row = rows.iter().find(|row| row["model"] == "silero-vad")?;
        (row["timed_attempts"] == 1).then(|| row.clone())
    };
    let row = wait::until("its time is reported", binary::NODE_TIMEOUT, heard).unwrap();
    assert_eq!((&row["audio_s"], &row["requests"], &row["attempts"]), (&json!(1.0), &json!(1), &json!(1)));
    let computed = cluster.worker_metric("kvasir_operation_compute_seconds_sum").unwrap();
    assert!((row["device_s"].as_f64().unwrap() - computed).abs() < 1e-6, "{row}: {computed}");
}
