//! The dashboard in a browser: it shows the cluster's activity, its buttons work, and the keyboard reaches
//! all controls. Screenshots are kept in the log directory.

use crate::deployments::{changed, command, deployment};
use crate::tiny_model;
use kvasir_cluster_tests::browser::{Browser, keys};
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::fixtures::Manifest;
use kvasir_cluster_tests::{binary, http, wait};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// A system message: one of a few documents shared by requests.
fn document(number: usize) -> String {
    format!("Document {number}. ")
        + &"The quick brown fox jumps over the lazy dog near the river bank. ".repeat(12 + 8 * number)
}

/// Rounds of chats: six about one document, two about another, the rest without a document.
fn drive(cluster: &Cluster, rounds: Range<usize>) {
    for round in rounds {
        let chats: Vec<Value> = (0..9)
            .map(|nth| {
                let system = match nth {
                    0..6 => document(2),
                    6..8 => document(1),
                    _ => "Be brief.".to_owned(),
                };
                let question = format!("Question {nth} of round {round}: what is said here?");
                let messages =
                    json!([{"role": "system", "content": system}, {"role": "user", "content": question}]);
                json!({"model": cluster.model(), "messages": messages, "max_tokens": 24, "ignore_eos": true})
            })
            .collect();
        thread::scope(|scope| {
            for chat in &chats {
                scope.spawn(|| {
                    http::post(cluster.http(), "/v1/chat/completions", chat).unwrap().ok().unwrap()
                });
            }
        });
    }
}

/// Runs `look` while chats are sent. The page's rates need two samples with activity, however fast the
/// answers are.
fn while_chats_go_on(cluster: &Cluster, look: impl FnOnce()) {
    let seen = AtomicBool::new(false);
    thread::scope(|scope| {
        let going_on = |_: &usize| !seen.load(Ordering::Relaxed);
        scope.spawn(move || (2..).take_while(going_on).for_each(|round| drive(cluster, round..round + 1)));
        let looked = catch_unwind(AssertUnwindSafe(look));
        seen.store(true, Ordering::Relaxed);
        looked.unwrap_or_else(|panic| resume_unwind(panic));
    });
}

fn picture(name: &str) -> PathBuf {
    binary::target().join(format!("test-logs/dashboard-{name}.png"))
}

/// Drains a worker with the mouse, and checks the coordinator's state.
fn drain_and_undrain(cluster: &Cluster, browser: &Browser) {
    let worker = &cluster.nodes().workers[0].id;
    let drains = |expected: bool| {
        wait::until("it is as wanted", binary::NODE_TIMEOUT, || {
            let status = cluster.status().ok()?;
            let listed = status["workers"].as_array()?.iter().find(|listed| listed["id"] == **worker)?;
            (listed["draining"] == expected).then_some(())
        })
        .unwrap();
    };
    let button = format!("tr[data-worker='{worker}'] button");
    browser.click(&button).unwrap();
    browser.wait_for("it asks first", "document.querySelector('#drain-dialog').open").unwrap();
    browser.press([keys::ESCAPE]).unwrap();
    browser.wait_for("escape closes it", "!document.querySelector('#drain-dialog').open").unwrap();
    drains(false);
    browser.click(&button).unwrap();
    browser.click("#drain-dialog button[value='drain']").unwrap();
    drains(true);
    let row = format!("document.querySelector(\"tr[data-worker='{worker}']\")");
    browser.wait_for("its row says so", &format!("{row}.dataset.level === 'out'")).unwrap();
    browser.wait_for("and why", &format!("{row}.textContent.includes('takes no new work')")).unwrap();
    browser
        .wait_for("it can be taken back", &format!("{row}.querySelector('button').textContent === 'Undrain'"))
        .unwrap();
    browser.click(&button).unwrap();
    drains(false);
    browser.wait_for("its row says so", &format!("{row}.dataset.level !== 'out'")).unwrap();
}

/// Moving through the workers by keyboard reaches each of them: rows keep their places meanwhile, although
/// the load changes. Afterwards they are sorted hottest first again.
fn absent_workers_do_not_move_present_ones(cluster: &Cluster, browser: &Browser) {
    let [first, second] = [0, 1].map(|at| cluster.nodes().workers[at].id.as_str());
    let ops = cluster.coordinator().ops.to_string();
    let row = |worker: &str| format!("document.querySelector(\"tr[data-worker='{worker}']\")");
    let order = |ids: [&str; 2]| {
        let ids = json!(ids);
        format!(
            "'{ids}' === JSON.stringify([...document.querySelectorAll('#workers tr')].map((row) => row.dataset.worker))"
        )
    };
    let button = |worker: &str| format!("{}.querySelector('button')", row(worker));
    let at = |worker: &str| format!("document.activeElement === {}", button(worker));
    browser.click("#prompt").unwrap();
    browser.wait_for("as told, both being idle", &order([first, second])).unwrap();
    browser.script(&format!("{}.focus()", button(first))).unwrap();
    browser.press([keys::TAB]).unwrap();
    browser.wait_for("at the second one", &at(second)).unwrap();
    // A drained worker is sorted before an idle one.
    binary::stdout(&["drain", second, "--ops", &ops]).unwrap();
    browser.wait_for("its row says so", &format!("{}.dataset.level === 'out'", row(second))).unwrap();
    for (label, holds) in [("the order", order([first, second])), ("the focus", at(second))] {
        assert_eq!(browser.script(&format!("return {holds}")).unwrap(), true, "{label} has changed");
    }
    browser.click("#prompt").unwrap();
    browser.wait_for("out before idle", &order([second, first])).unwrap();
    binary::stdout(&["undrain", second, "--ops", &ops]).unwrap();
    browser.wait_for("as before", &order([first, second])).unwrap();
}

/// With the other one drained, a worker is overloaded. Opened as by an operator on call, the page names it
/// within a minute, with the reason.
fn names_the_hot_worker(cluster: &Cluster, browser: &Browser) {
    let [hot, other] = [0, 1].map(|at| cluster.nodes().workers[at].id.as_str());
    let ops = cluster.coordinator().ops.to_string();
    binary::stdout(&["drain", other, "--ops", &ops]).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for client in 0..8 {
            let stop = &stop;
            scope.spawn(move || {
                for round in (0..).take_while(|_| !stop.load(Ordering::Relaxed)) {
                    let prompt = format!("Client {client}, round {round}. {}", document(5));
                    let body = json!({"model": cluster.model(), "prompt": prompt, "max_tokens": 8});
                    http::post(cluster.http(), "/v1/completions", &body).unwrap().ok().unwrap();
                }
            });
        }
        let seen = catch_unwind(AssertUnwindSafe(|| {
            browser.open(&format!("http://{ops}/")).unwrap();
            let verdict = "document.querySelector('#verdict')";
            // Keep the text, because the next refresh may change it.
            let named = format!(
                "{verdict}?.dataset.level === 'hot' && {verdict}.textContent.includes('{hot} is hot.') \
                 && document.querySelector(\"tr[data-worker='{hot}']\").dataset.level === 'hot' \
                 && (window.verdictOfTheTest = {verdict}.textContent).length > 0"
            );
            browser.wait_for("it is named", &named).unwrap();
            let text = browser.script("return window.verdictOfTheTest").unwrap();
            browser.screenshot(&picture("hot")).unwrap();
            text
        }));
        stop.store(true, Ordering::Relaxed);
        let text = seen.unwrap_or_else(|panic| resume_unwind(panic));
        // The current queue and its cause; the history is checked too.
        let text = text.as_str().unwrap();
        assert!(text.contains("of work ahead: ") && text.contains("to compute"), "{text}");
        let why = ["no other worker takes work", "of its requests share prefix"];
        assert!(why.iter().any(|why| text.contains(why)), "{text}");
    });
    binary::stdout(&["undrain", other, "--ops", &ops]).unwrap();
}

/// A chat in the playground, and the explanation of its routing.
fn chat(browser: &Browser) {
    browser.click("#prompt").unwrap();
    browser.press("What is a fox?".chars().chain([keys::ENTER])).unwrap();
    let answer = "document.querySelector('.turn.assistant')";
    browser.wait_for("it answers", &format!("{answer}?.querySelector('p').textContent.length > 0")).unwrap();
    browser
        .wait_for("with figures", &format!("{answer}.textContent.includes('prompt tokens cached')"))
        .unwrap();
    browser.wait_for("it is done", "document.querySelector('#send').textContent === 'Send'").unwrap();
    browser
        .wait_for(
            "its decision is told",
            "document.querySelectorAll('tr.request td[data-state=done]').length > 0",
        )
        .unwrap();
    browser.click(".turn.assistant button").unwrap();
    let shown = "document.querySelectorAll('tr.detail:not([hidden])').length === 1 && document.querySelectorAll('tr.request').length === 1";
    browser.wait_for("its decision is shown alone", shown).unwrap();
}

/// Asserts that the Tab key reaches every visible control.
fn assert_the_keyboard_reaches_everything(browser: &Browser) {
    // The controls of many requests are alike; one is kept.
    let name = "const name = (e) => e.id || e.getAttribute('aria-label') || e.textContent.trim(); ";
    let all = browser
        .script(&format!(
            "{name} scrollTo(0, 0); document.activeElement.blur(); \
             return [...document.querySelectorAll('a[href], button, input, select, textarea')]\
             .filter((e) => e.checkVisibility()).map(name)"
        ))
        .unwrap();
    let all: BTreeSet<String> = serde_json::from_value(all).unwrap();
    assert!(all.len() > 15, "{all:?}");
    let mut reached = BTreeSet::new();
    for _ in 0..all.len() + 4 {
        browser.press([keys::TAB]).unwrap();
        let at = browser.script(&format!("{name} return name(document.activeElement)")).unwrap();
        reached.insert(at.as_str().unwrap().to_owned());
    }
    let missed: Vec<_> = all.difference(&reached).collect();
    assert!(missed.is_empty(), "Tab does not come to {missed:?}");
}

/// A tenant above its limit is shown with its limits.
fn limits(cluster: &Cluster, browser: &Browser) {
    let ops = cluster.coordinator().ops;
    let made = http::post(ops, "/admin/v1/keys", &json!({"tenant": "team-a"})).unwrap().json().unwrap();
    let bearer = format!("Bearer {}", made["key"].as_str().unwrap());
    let limits = json!({"rpm": 6, "tpm": 60_000, "concurrency": 4}).to_string();
    let set = http::send(ops, "PUT", "/admin/v1/tenants/team-a", &[], limits.as_bytes()).unwrap();
    assert_eq!(set.status, 204);
    let body = json!({"model": cluster.model(), "prompt": "A fox", "max_tokens": 8});
    let headers = [("authorization", bearer.as_str())];
    wait::until("it is refused", binary::NODE_TIMEOUT, || {
        let answer = http::post_with(cluster.http(), "/v1/completions", &headers, &body).unwrap();
        (answer.status == 429).then_some(())
    })
    .unwrap();
    let row = "document.querySelector(\"#tenants tr[data-tenant='team-a'] + .limits\")";
    let limits = format!(
        "/of 6 requests.min/.test({row}?.textContent) && /of 60.000 tokens.min/.test({row}.textContent)"
    );
    browser.wait_for("its limits are told", &limits).unwrap();
    browser.script("document.querySelector('#latency').scrollIntoView({behavior: 'instant'})").unwrap();
    browser.screenshot(&picture("tenants")).unwrap();
}

#[test]
fn an_operator_sees_which_worker_is_hot_and_why_and_drains_it() {
    let cluster = Cluster::builder("dashboard", "smollm2-135m").start().unwrap();
    let browser = Browser::start().unwrap();
    browser.resize(1440, 1000, 1.0).unwrap();
    browser.prefer_dark(false).unwrap();
    drive(&cluster, 0..2);
    browser.open(&format!("http://{}/", cluster.coordinator().ops)).unwrap();
    browser.wait_for("it is live", "document.querySelector('#live').dataset.state === 'live'").unwrap();
    browser
        .wait_for("both workers are there", "document.querySelectorAll('#workers tr').length === 2")
        .unwrap();

    // During activity, the first screen names the hot worker, and keeps doing so.
    while_chats_go_on(&cluster, || {
        let hot = "['hot', 'busy', 'normal'].includes(document.querySelector('#verdict').dataset.level)";
        browser.wait_for("it says who works", hot).unwrap();
        let seen = browser
            .script("return document.querySelector('#verdict').getBoundingClientRect().bottom")
            .unwrap();
        assert!(seen.as_f64().unwrap() < 400.0, "the verdict is in the first screen");
        browser
            .wait_for("tokens are counted", "document.querySelectorAll('tr.request').length >= 18")
            .unwrap();
        browser.screenshot(&picture("light")).unwrap();
        for chart in ["ttft", "itl", "e2e", "tokens", "requests", "locality"] {
            let drawn =
                format!("document.querySelector('#chart-{chart} path').getAttribute('d').length > 20");
            browser.wait_for(chart, &drawn).unwrap();
        }
    });
    for panel in ["topology", "pools", "tenants", "lost", "raft", "index"] {
        browser
            .wait_for(panel, &format!("document.querySelector('#{panel}').textContent.length > 10"))
            .unwrap();
    }
    let pools = "document.querySelector('#pools').textContent.includes('Full KV')";
    browser.wait_for("caches are told by kind", pools).unwrap();
    let prefixes = "document.querySelectorAll('#prefixes code').length >= 2 && document.querySelectorAll('#prefixes .chip').length >= 2";
    browser.wait_for("prefixes with holders", prefixes).unwrap();

    drain_and_undrain(&cluster, &browser);

    // The switch goes from the system's theme to light, then dark.
    let ground =
        |browser: &Browser| browser.script("return getComputedStyle(document.body).backgroundColor").unwrap();
    let light = ground(&browser);
    browser.click("#theme").unwrap();
    assert_eq!(ground(&browser), light);
    browser.click("#theme").unwrap();
    assert_ne!(ground(&browser), light, "dark");

    chat(&browser);
    let explained =
        browser.script("return document.querySelector('tr.detail:not([hidden])').textContent").unwrap();
    for text in ["Candidate", "Queue", "Prefill", "Transfer", "chosen", "First token expected after"] {
        assert!(explained.as_str().unwrap().contains(text), "{text} not in {explained}");
    }
    browser.script("document.querySelector('#requests').scrollIntoView({behavior: 'instant'})").unwrap();
    browser.screenshot(&picture("dark")).unwrap();
    absent_workers_do_not_move_present_ones(&cluster, &browser);
    assert_the_keyboard_reaches_everything(&browser);

    // From dark to the system's theme, then to dark again.
    browser.click("#theme").unwrap();
    assert_eq!(ground(&browser), light, "as the system has it");
    names_the_hot_worker(&cluster, &browser);
    browser.click("#theme").unwrap();
    browser.click("#theme").unwrap();
    assert_ne!(ground(&browser), light, "dark");

    // With a key there is no unauthenticated access any more.
    limits(&cluster, &browser);

    browser.resize(390, 844, 2.0).unwrap();
    browser.script("scrollTo({top: 0, behavior: 'instant'})").unwrap();
    let wide = "return document.scrollingElement.scrollWidth - document.documentElement.clientWidth";
    assert_eq!(browser.script(wide).unwrap(), 0, "a phone has to scroll sideways");
    browser.screenshot(&picture("phone")).unwrap();

    let others = "return performance.getEntriesByType('resource').map(({ name }) => name)\
                  .filter((name) => !name.startsWith(location.origin))";
    assert_eq!(browser.script(others).unwrap(), json!([]), "asked of others");
    assert_eq!(browser.complaints().unwrap(), Vec::<String>::new());
}

/// Deployments: one with a canary, one on demand, one that nobody asks for, one whose file cannot be used.
fn deploy_models(cluster: &Cluster) {
    let ops = cluster.coordinator().ops;
    let folder = cluster.data_dir().join("models");
    std::fs::create_dir_all(&folder).unwrap();
    let [first, second] = [("chat-1.gguf", 0.01), ("chat-2.gguf", 0.02)]
        .map(|(name, value)| changed(&folder, name, value).to_str().unwrap().to_owned());
    let code = folder.join("code.gguf");
    std::fs::copy(Manifest::read().unwrap().tiny("qwen2").unwrap().path(), &code).unwrap();
    let code = code.to_str().unwrap().to_owned();
    let broken = folder.join("draft.gguf");
    std::fs::write(&broken, "not a model").unwrap();
    let deploy = |model: &str, file: &str, more: &[&str]| {
        let arguments = [&["models", "deploy", model, "--file", file], more].concat();
        command(ops, &arguments);
    };
    deploy("chat", &first, &["--replicas", "1:2", "--priority", "10"]);
    deploy("code", &code, &["--idle", "30m", "--pin"]);
    deploy("notes", &code, &["--nodes", "zone=b"]);
    deploy("draft", broken.to_str().unwrap(), &[]);
    let state = |model: &str, wanted: &str| {
        let found = || deployment(ops, model).filter(|now| now["state"] == wanted);
        wait::until(wanted, binary::NODE_TIMEOUT, found).unwrap();
    };
    state("chat", "ready");
    state("draft", "bad_file");
    deploy("chat", &second, &["--canary", "50%"]);
    let canary = || {
        let now = deployment(ops, "chat")?;
        let versions = now["versions"].as_array()?;
        let canary = versions.iter().find(|version| version["version"] == now["rollout"]["version"])?;
        canary["workers"].as_array()?.iter().any(|worker| worker["state"] == "ready").then_some(())
    };
    wait::until("the canary is ready", binary::NODE_TIMEOUT, canary).unwrap();
}

/// A look of one model that is being loaded, drawn by the page's own module.
const LOADING: &str = r##"
    const version = { version: 7, id: "big@0", source: { fetch: "big" }, digest: null, active: true, failed: "", requests: 0, errors: 0,
        ttft_p50_s: null, rolled_back: false, stages: [[{ worker: "spark-1", layers: [0, 9] }, { worker: "spark-2", layers: [9, 20] }]],
        workers: [{ worker: "spark-1", wanted: true, state: "loading", progress: 43, bytes: 0, failures: 1, reason: "" }] };
    const big = { model: "big", min: 0, max: 1, idle_s: 600, pin: false, nodes: [], context: 0, priority: 1, engine: "vllm", state: "loading",
        progress: 43, eta_s: 12, reason: "", waiting: 3, versions: [version], rollout: null, last_rollout: "" };
    return import("/dashboard/models.js").then(({ drawModels }) => {
        drawModels({ models: [], cluster: { models: [], replicas: [], deployments: [big] } });
        return document.querySelector("tr[data-model='big']").textContent;
    });
"##;

/// A stream that waits for its model, read by the page's own modules.
const WAITING: &str = r##"
    const body = new Response(": model=big state=loading percent=43 eta_s=12\n\ndata: \"hello\"\n\n").body;
    return Promise.all([import("/dashboard/feed.js"), import("/dashboard/playground.js")]).then(async ([{ events }, { progress }]) => {
        const seen = [];
        for await (const { data } of events(body, (comment) => seen.push(progress(comment)))) seen.push(data);
        return seen;
    });
"##;

#[test]
fn models_are_shown_with_state_place_versions_traffic_and_use() {
    let cluster = Cluster::builder("dashboard-models", &tiny_model()).start().unwrap();
    let browser = Browser::start().unwrap();
    browser.resize(1440, 1000, 1.0).unwrap();
    browser.prefer_dark(false).unwrap();
    deploy_models(&cluster);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for client in 0..4u64 {
            let (cluster, stop) = (&cluster, &stop);
            scope.spawn(move || {
                for round in (0..).take_while(|_| !stop.load(Ordering::Relaxed)) {
                    let prompt: Vec<u64> =
                        (0..40).map(|at| 5 + (client * 31 + round * 17 + at * 3) % 200).collect();
                    let model = ["code", cluster.model(), "chat", "chat"][client as usize];
                    let body =
                        json!({"model": model, "prompt": prompt, "max_tokens": 64, "ignore_eos": true});
                    http::post(cluster.http(), "/v1/completions", &body).unwrap().ok().unwrap();
                }
            });
        }
        let seen = catch_unwind(AssertUnwindSafe(|| {
            browser.open(&format!("http://{}/", cluster.coordinator().ops)).unwrap();
            let row = |model: &str| format!("document.querySelector(\"tr[data-model='{model}']\")");
            for (model, state) in
                [("chat", "ready"), ("code", "ready"), ("notes", "absent"), ("draft", "bad_file")]
            {
                browser.wait_for(state, &format!("{}?.dataset.state === '{state}'", row(model))).unwrap();
            }
            browser.wait_for("the reason", &format!("/GGUF/.test({}.textContent)", row("draft"))).unwrap();
            let versions =
                "[...document.querySelectorAll('#models-rows .version')].map((row) => row.textContent)";
            browser
                .wait_for(
                    "both versions with their requests",
                    &format!("{versions}.length === 2 && /active/.test({versions}[0]) && /canary 50 %/.test({versions}[1]) && {versions}.every((text) => /first token \\d/.test(text))"),
                )
                .unwrap();
            let rate = |model: &str, column: u32| {
                format!("/[1-9]/.test({}.children[{column}].querySelector('b').textContent)", row(model))
            };
            for model in ["chat", cluster.model()] {
                let rates = format!("{} && {}", rate(model, 3), rate(model, 4));
                browser.wait_for("rates of requests and tokens", &rates).unwrap();
            }
            // The two workers, and under each the models that it holds.
            let under = "[...document.querySelectorAll('#workers tr')].every((row, at, all) => row.dataset.worker ? true : row.dataset.instance.startsWith(all.slice(0, at).findLast((other) => other.dataset.worker).dataset.worker + '.'))";
            browser
                .wait_for(
                    "instances under their workers",
                    &format!("document.querySelectorAll('#workers tr[data-worker]').length === 2 && document.querySelectorAll('#workers tr.instance').length === 3 && {under}"),
                )
                .unwrap();
            let boxes =
                "[...document.querySelectorAll('#topology .worker title')].map((title) => title.textContent)";
            browser
                .wait_for(
                    "one box for each worker",
                    &format!("{boxes}.length === 2 && {boxes}.some((text) => /; .*code/.test(text))"),
                )
                .unwrap();
            // Usage is written when requests end, and read every ten seconds.
            browser
                .wait_for("usage of both models", "['chat@', 'code@'].every((name) => [...document.querySelectorAll('#usage-rows tr')].some((row) => row.textContent.includes(name))) && /total/.test(document.querySelector('#usage-rows').textContent)")
                .unwrap();
            let device = format!("/\\d/.test({}.children[6].querySelector('b').textContent)", row("chat"));
            browser.wait_for("its device time", &device).unwrap();
            browser
                .script("document.querySelector('#models').scrollIntoView({behavior: 'instant'})")
                .unwrap();
            browser.screenshot(&picture("models")).unwrap();
        }));
        stop.store(true, Ordering::Relaxed);
        seen.unwrap_or_else(|panic| resume_unwind(panic));
    });
    let text = browser.script(LOADING).unwrap();
    for expected in
        ["loading", "43 %, ready in 12 s", "spark-1 → spark-2 loading 43 %", "3 waiting", "engine vllm"]
    {
        assert!(text.as_str().unwrap().contains(expected), "{expected} not in {text}");
    }
    assert_eq!(browser.script(WAITING).unwrap(), json!(["loading, 43 %, ready in 12 s", "hello"]));
    browser.resize(390, 844, 2.0).unwrap();
    let wide = "return document.scrollingElement.scrollWidth - document.documentElement.clientWidth";
    assert_eq!(browser.script(wide).unwrap(), 0, "a phone has to scroll sideways");
    let cut = "const nav = document.querySelector('.bar nav'); return nav.scrollWidth - nav.clientWidth";
    assert_eq!(browser.script(cut).unwrap(), 0, "the sections' links fit one line");
    browser.script("document.querySelector('#models').scrollIntoView({behavior: 'instant'})").unwrap();
    browser.screenshot(&picture("models-phone")).unwrap();
    assert_eq!(browser.complaints().unwrap(), Vec::<String>::new());
}
