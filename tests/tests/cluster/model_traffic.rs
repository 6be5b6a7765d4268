//! More models than fit: twelve at three workers with room for two each, under skewed traffic at three coordinators,
//! with kills. `KVASIR_TRAFFIC_REQUESTS` sets the number of requests, by default a sample, and `KVASIR_TRAFFIC_CLIENTS`
//! that of clients; `KVASIR_TRAFFIC_SEED` draws other models. `KVASIR_TRAFFIC_FILES=PATH,..` takes files in the place of
//! as many random models, and `KVASIR_TRAFFIC_MEMORY` the mebibytes of a worker that they need; models of unequal size
//! have no slots, so loads are then not compared with a cache's.
//!
//! Every model generates other tokens, so an answer of a wrong model is found.

mod loads;
mod site;

use crate::random_model::{Shape, VOCABULARY};
use kvasir_cluster_tests::random::Random;
use kvasir_cluster_tests::{binary, cluster, http, replay, wait};
use loads::{LoadEvent, LoadKind};
use model::GgmlType;
use serde_json::{Value, json};
use site::{COORDINATORS, Member, Site, WORKERS};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const MODELS: usize = 12;
/// Models that a worker has room for.
const SLOTS: usize = 2;
/// Mebibytes of a worker: two models of about 150 MiB each, about 130 MiB of the process itself, and half a model.
const MEMORY: usize = 505;
/// Clients that wait for an answer each before they send the next request.
const CLIENTS: usize = 16;
const PROMPTS: usize = 4;
const TOKENS: usize = 8;
/// Requests of the sample that every run of the tests sends.
const SAMPLE: usize = 160;
/// Most loads in a thousand of those of the offline optimum, from [`LONG`] requests on. In a shorter trace the first
/// loads of all models count too much.
const MOST_LOADS: usize = 1400;
const LONG: usize = 1000;
/// Most refused requests in a thousand.
const MOST_REFUSED: usize = 20;
/// Most attempts to kill a worker while it loads a model.
const MOST_KILLS: usize = 8;
/// A request that was not answered by so many coordinators in turn is lost.
const MOST_TRIES: usize = 100;

const REFUSALS: [(u16, &str); 6] = [
    (429, "queue_full"),
    (503, "no_worker"),
    (503, "model_loading"),
    (503, "worker_lost"),
    (503, "no_quorum"),
    (503, "deadline_exceeded"),
];

fn model(index: usize) -> String {
    format!("m{index}")
}

/// Small weights and large caches, so that room is a matter of models and files are small.
fn write_models(directory: &Path) -> Vec<PathBuf> {
    let shape = Shape {
        layers: 2,
        hidden: 64,
        feed_forward: 128,
        heads: 8,
        kv_heads: 8,
        head: 128,
        context: 10240,
        ty: GgmlType::F16,
        output: true,
    };
    let write = |index: usize| {
        let path = directory.join(format!("{}.gguf", model(index)));
        shape.write(&path, 29 + index as u64);
        path
    };
    (0..MODELS).map(write).collect()
}

/// Puts `given` in the place of as many models, popular and rare ones.
fn replace(files: &[PathBuf], given: &[PathBuf]) {
    for (at, target) in given.iter().enumerate() {
        let file = &files[at * MODELS / given.len()];
        std::fs::remove_file(file).unwrap();
        std::os::unix::fs::symlink(target, file).unwrap();
    }
}

/// The models of all requests: Zipf with exponent 1.
fn zipf(requests: usize, seed: u64) -> Vec<usize> {
    let mut random = Random::new(seed);
    // Multiples of 1/27720, which 1 to 12 divide.
    let weights =
        [(); MODELS].map(|()| 27720).iter().zip(1..).map(|(all, rank)| all / rank).collect::<Vec<u64>>();
    let total = weights.iter().sum();
    let drawn = |random: &mut Random| {
        let mut at = random.below(total);
        weights.iter().take_while(|weight| at.checked_sub(**weight).map(|left| at = left).is_some()).count()
    };
    (0..requests).map(|_| drawn(&mut random)).collect()
}

fn body(model: &str, prompt: usize, stream: bool) -> Value {
    let prompt: Vec<u64> = (0..6).map(|at| 5 + (prompt as u64 * 131 + at * 37) % (VOCABULARY - 10)).collect();
    json!({"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": true, "stream": stream})
}

/// The end of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    Answered(String),
    Refused(u16, String),
}

fn text(value: &Value) -> String {
    value["choices"][0]["text"].as_str().unwrap_or_default().to_owned()
}

/// The refusal in the body of an error. `status`: that of the answer; `None` in a stream, whose errors have none.
fn refusal(status: Option<u16>, body: &Value) -> Outcome {
    let code = body["error"]["code"].as_str().unwrap_or_default();
    let documented = REFUSALS.iter().find(|(_, known)| *known == code).map_or(500, |(status, _)| *status);
    Outcome::Refused(status.unwrap_or(documented), code.to_owned())
}

/// Sends a request and reads its whole answer.
///
/// # Errors
/// If the connection ends before that.
fn ask(server: SocketAddr, body: &Value) -> anyhow::Result<Outcome> {
    let answer = http::post(server, "/v1/completions", body)?;
    let (status, whole) = (answer.status, answer.text()?);
    if status != 200 {
        return Ok(refusal(Some(status), &serde_json::from_str(&whole)?));
    }
    if body["stream"] == false {
        return Ok(Outcome::Answered(text(&serde_json::from_str(&whole)?)));
    }
    let mut answered = String::new();
    for data in whole.lines().filter_map(|line| line.strip_prefix("data: ")) {
        if data == "[DONE]" {
            return Ok(Outcome::Answered(answered));
        }
        let event: Value = serde_json::from_str(data)?;
        if event.get("error").is_some() {
            return Ok(refusal(None, &event));
        }
        answered += &text(&event);
    }
    anyhow::bail!("the stream was cut off")
}

/// By model and prompt: what a worker answers that has this model alone.
fn expected(directory: &Path, files: &[PathBuf]) -> Vec<Vec<String>> {
    let of_file = |file: &PathBuf| {
        site::alone(directory, file, |server| {
            let name = file.file_stem().unwrap().to_str().unwrap();
            let of_prompt = |prompt| match ask(server, &body(name, prompt, false)).unwrap() {
                Outcome::Answered(text) => text,
                refused => panic!("{refused:?}"),
            };
            (0..PROMPTS).map(of_prompt).collect::<Vec<String>>()
        })
    };
    let answers: Vec<Vec<String>> = files.iter().map(of_file).collect();
    for prompt in 0..PROMPTS {
        let different: BTreeSet<&String> = answers.iter().map(|of_model| &of_model[prompt]).collect();
        assert_eq!(different.len(), MODELS, "models answer alike: {answers:#?}");
    }
    answers
}

fn deploy(site: &Site, directory: &Path, files: &[PathBuf]) {
    let mut fleet = String::new();
    for (index, file) in files.iter().enumerate() {
        fleet += &format!("[models.{}]\nfile = {:?}\n", model(index), file.to_str().unwrap());
    }
    let path = directory.join("fleet.toml");
    std::fs::write(&path, fleet).unwrap();
    let ops = site.coordinator(0).ops.to_string();
    let apply = || binary::stdout(&["apply", "-f", path.to_str().unwrap(), "--ops", &ops]).ok();
    wait::until("the models are deployed", binary::NODE_TIMEOUT, apply).unwrap();
    for index in 0..COORDINATORS {
        let listed = || {
            let models = http::get(site.coordinator(index).http, "/v1/models").ok()?.ok().ok()?;
            let known = models["data"].as_array()?.iter().filter(|model| model["max_model_len"].is_u64());
            (known.count() == MODELS).then_some(())
        };
        wait::until("all models are listed", binary::NODE_TIMEOUT, listed).unwrap();
    }
}

/// Checks that every worker has room for [`SLOTS`] models and for no further one.
fn check_room(site: &Site) {
    let ops = site.coordinator(0).ops.to_string();
    let listed = binary::stdout(&["models", "list", "--deployed", "--json", "--ops", &ops]).unwrap();
    let listed: Value = serde_json::from_str(&listed).unwrap();
    let versions = listed["deployments"].as_array().unwrap().iter().map(|model| &model["versions"][0]);
    let needed: Vec<u64> = versions.map(|version| version["needed_bytes"].as_u64().unwrap()).collect();
    let (least, most) = (*needed.iter().min().unwrap(), *needed.iter().max().unwrap());
    for worker in 0..WORKERS {
        let [budget, process] = ["kvasir_models_budget_bytes", "kvasir_models_reserved_bytes"]
            .map(|name| site.metric(worker, name) as u64);
        let room = budget - process;
        println!("w{worker}: models need {} to {} MiB, room {} MiB", least >> 20, most >> 20, room >> 20);
        let (slots, more) = (SLOTS as u64, SLOTS as u64 + 1);
        assert!(most * slots <= room && room < least * more, "{needed:?} bytes, room {room}");
    }
}

/// A worker that was killed: its models, and how many events each worker had then.
struct Killed {
    worker: usize,
    held: BTreeSet<String>,
    events: [usize; WORKERS],
}

impl Killed {
    /// Kills a worker. `since`: its events when it was started.
    fn kill(site: &Site, worker: usize, since: usize) -> Self {
        site.kill(Member::Worker(worker));
        let held = loads::held(&loads::of_worker(site, worker)[since..]);
        Self { worker, held, events: std::array::from_fn(|worker| loads::of_worker(site, worker).len()) }
    }

    /// The first load of each of its models since then: without the kill they would not have left then.
    fn forced(&self, events: &[Vec<LoadEvent>; WORKERS]) -> usize {
        let later = events.iter().zip(self.events).flat_map(|(events, at)| &events[at..]);
        let again = later.filter(|event| event.kind == LoadKind::Begun && self.held.contains(&event.model));
        again.map(|event| &event.model).collect::<BTreeSet<_>>().len()
    }
}

/// Kills a worker while it loads a model, and starts it again. A load may end before the kill: then once more. Returns
/// whether it was in time before `finished`.
fn kill_while_loading(site: &Site, killed: &mut Vec<Killed>, finished: impl Fn() -> bool) -> bool {
    for _ in 0..MOST_KILLS {
        let before: [u64; WORKERS] = std::array::from_fn(|worker| loads::log_bytes(site, worker));
        let is_loading = |worker: &usize| {
            let events = loads::of_worker_since(site, *worker, before[*worker]);
            events.last().is_some_and(|last| last.kind == LoadKind::Begun)
        };
        let loading = || match (0..WORKERS).find(is_loading) {
            None if finished() => Some(None),
            None => None,
            worker => Some(worker),
        };
        let loading = wait::until("a worker loads a model", binary::NODE_TIMEOUT, loading).unwrap();
        let Some(worker) = loading else { return false };
        let last = killed.iter().rev().find(|before| before.worker == worker);
        killed.push(Killed::kill(site, worker, last.map_or(0, |last| last.events[worker])));
        let in_time = is_loading(&worker);
        site.start_again(Member::Worker(worker));
        if in_time {
            return true;
        }
    }
    false
}

struct Run {
    ended: Vec<(Outcome, Duration)>,
    /// The coordinators of tries that ended without an answer.
    failed_tries: Vec<usize>,
    killed: Vec<Killed>,
    killed_coordinator: usize,
    /// Whether a worker was killed while it loaded a model.
    killed_while_loading: bool,
}

/// Sends the requests of the trace in its order, and kills nodes on the way.
fn run(site: &Site, trace: &[usize], clients: usize) -> Run {
    let (next, failed_tries) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let ended = Mutex::new(BTreeMap::new());
    let client = || {
        loop {
            let at = next.fetch_add(1, Ordering::SeqCst);
            let Some(wanted) = trace.get(at) else { return };
            let body = body(&model(*wanted), at % PROMPTS, at % 3 == 0);
            let began = Instant::now();
            let outcome = (at..at + MOST_TRIES).find_map(|front| {
                let front = front % COORDINATORS;
                let outcome = ask(site.coordinator(front).http, &body);
                if outcome.is_err() {
                    failed_tries.lock().unwrap().push(front);
                }
                outcome.ok()
            });
            let outcome = outcome.unwrap_or_else(|| panic!("request {at} is lost"));
            ended.lock().unwrap().insert(at, (outcome, began.elapsed()));
        }
    };
    let progress = |percent: usize| {
        let reached = || (ended.lock().unwrap().len() * 100 >= trace.len() * percent).then_some(());
        wait::until("requests are answered", Duration::from_secs(600), reached).unwrap();
    };
    let finished = || ended.lock().unwrap().len() == trace.len();
    let (killed, killed_coordinator, killed_while_loading) = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..clients).map(|_| scope.spawn(client)).collect();
        progress(20);
        let mut killed = vec![Killed::kill(site, 0, 0)];
        progress(35);
        site.start_again(Member::Worker(0));
        progress(45);
        let leader = site.leader();
        site.kill(Member::Coordinator(leader));
        progress(60);
        site.start_again(Member::Coordinator(leader));
        progress(70);
        let killed_while_loading = kill_while_loading(site, &mut killed, finished);
        clients.into_iter().for_each(|client| client.join().unwrap());
        (killed, leader, killed_while_loading)
    });
    let ended = ended.into_inner().unwrap().into_values().collect();
    let failed_tries = failed_tries.into_inner().unwrap();
    Run { ended, failed_tries, killed, killed_coordinator, killed_while_loading }
}

fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    sorted[(sorted.len() * percent / 100).min(sorted.len() - 1)]
}

#[test]
fn more_models_than_fit_are_served_through_kills() {
    let set = |name: &str, default| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let (requests, clients) =
        (set("KVASIR_TRAFFIC_REQUESTS", SAMPLE), set("KVASIR_TRAFFIC_CLIENTS", CLIENTS));
    let seed = set("KVASIR_TRAFFIC_SEED", 29) as u64;
    let _alone = cluster::exclude_clusters();
    let directory = binary::target().join("test-logs/model-traffic");
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir_all(&directory).unwrap();
    let files = write_models(&directory);
    let given = std::env::var("KVASIR_TRAFFIC_FILES").unwrap_or_default();
    let given: Vec<PathBuf> = given.split(',').filter(|path| !path.is_empty()).map(PathBuf::from).collect();
    replace(&files, &given);
    let memory = set("KVASIR_TRAFFIC_MEMORY", MEMORY) as u64;
    let expected = expected(&directory, &files);
    let site = Site::start(&directory, memory << 20);
    deploy(&site, &directory, &files);
    if given.is_empty() {
        check_room(&site);
    }
    let trace = zipf(requests, seed);
    let began = Instant::now();
    let run = run(&site, &trace, clients);
    let took = began.elapsed();

    let mut refusals: BTreeMap<(u16, &str), usize> = BTreeMap::new();
    for (at, (outcome, _)) in run.ended.iter().enumerate() {
        match outcome {
            Outcome::Answered(text) => assert_eq!(*text, expected[trace[at]][at % PROMPTS], "request {at}"),
            Outcome::Refused(status, code) => {
                assert!(REFUSALS.contains(&(*status, code.as_str())), "request {at}: {outcome:?}");
                *refusals.entry((*status, code.as_str())).or_default() += 1;
            }
        }
    }
    assert_eq!(run.ended.len(), requests);
    let elsewhere = run.failed_tries.iter().find(|front| **front != run.killed_coordinator);
    assert_eq!(elsewhere, None, "coordinators that were not killed have ended connections");
    let events: [Vec<LoadEvent>; WORKERS] = std::array::from_fn(|worker| loads::of_worker(&site, worker));
    let forced: usize = run.killed.iter().map(|killed| killed.forced(&events)).sum();
    let loads = loads::begun(&site) - forced;
    let slots = WORKERS * SLOTS;
    let (optimum, lru) = (replay::belady(&trace, slots), replay::lru(&trace, slots));
    let mut times: Vec<Duration> = run.ended.iter().map(|(_, time)| *time).collect();
    times.sort_unstable();
    println!(
        "{requests} requests in {took:.1?}: {loads} loads and {forced} forced by kills; optimum {optimum}, LRU {lru}; \
         p50 {:.3?}, p95 {:.3?}, most {:.3?}; refused {refusals:?}; {} tries elsewhere",
        percentile(&times, 50),
        percentile(&times, 95),
        percentile(&times, 100),
        run.failed_tries.len(),
    );
    println!("{} kills of workers, while one loads: {}", run.killed.len(), run.killed_while_loading);
    let refused: usize = refusals.values().sum();
    assert!(refused * 1000 <= requests * MOST_REFUSED, "{refused} of {requests} requests were refused");
    assert!(requests < LONG || run.killed_while_loading, "no worker was killed while it loaded a model");
    if given.is_empty() {
        assert!(
            requests < LONG || loads * 1000 <= optimum * MOST_LOADS,
            "{loads} loads, and the optimum is {optimum}"
        );
        assert!(loads <= lru, "{loads} loads, and LRU has {lru}");
    }
    for index in 0..COORDINATORS {
        let quiet = || {
            let ops = site.coordinator(index).ops;
            let held = ["kvasir_inflight_requests", "kvasir_queue_requests"];
            held.iter().all(|name| http::metric(ops, name).is_ok_and(|held| held == 0.0)).then_some(())
        };
        wait::until("nothing is left", binary::NODE_TIMEOUT, quiet).unwrap();
    }
    // Counters begin anew with a process. A model may still be loading whose requests another worker has answered.
    for worker in (0..WORKERS).filter(|worker| run.killed.iter().all(|killed| killed.worker != *worker)) {
        let counted = || {
            let events = loads::of_worker(&site, worker);
            let ready = events.iter().filter(|event| event.kind == LoadKind::Ready).count();
            let names = ["kvasir_model_loads_total", "kvasir_model_wakes_total"];
            let counted: f64 = names.iter().map(|name| site.metric(worker, name)).sum();
            (counted == ready as f64).then_some(())
        };
        wait::until("the worker has counted the loads in its log", binary::NODE_TIMEOUT, counted).unwrap();
    }
}
