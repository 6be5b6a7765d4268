//! Ollama's API: the same answers in its form, models, load requests, errors, and the requests of its clients.

use super::Rig;
use super::client::{Events, Reply, get, post, send};
use super::fake_worker::{FakeWorker, MAX_MODEL_LEN, letters};
use hyper::Method;
use proto::message::GenerateError;
use proto::served_model::ModelTask;
use serde_json::{Value, json};

const CHAT: &str = "/api/chat";
const GENERATE: &str = "/api/generate";

fn ok(reply: &Reply) -> Value {
    assert_eq!(reply.status.as_u16(), 200, "{}", reply.text());
    reply.json()
}

fn lines(reply: &Reply) -> Vec<Value> {
    assert_eq!(reply.header("content-type"), "application/x-ndjson", "{}", reply.text());
    reply.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Status and message of an error.
fn error(reply: &Reply) -> (u16, String) {
    let body = reply.json();
    assert_eq!(body.as_object().unwrap().len(), 1, "{body}");
    (reply.status.as_u16(), body["error"].as_str().unwrap().to_owned())
}

fn text(lines: &[Value], pointer: &str) -> String {
    lines.iter().map(|line| line.pointer(pointer).unwrap().as_str().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chat_has_the_same_answer_in_ollamas_form() {
    let (rig, [worker]): (_, [FakeWorker; 1]) = Rig::with_workers(|_| {}).await;
    let messages = json!([{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]);
    let options = json!({"num_predict": 6, "seed": 5, "temperature": 0.5, "top_k": 3, "repeat_penalty": 1.1,
        "stop": ["#"], "num_ctx": MAX_MODEL_LEN});
    let mut there = json!({"model": "tiny", "messages": messages, "max_tokens": 6, "seed": 5, "temperature": 0.5,
        "top_k": 3, "repetition_penalty": 1.1, "stop": ["#"]});
    let expected = ok(&post(rig.at.http, "/v1/chat/completions", &there).await);
    let expected = expected["choices"][0]["message"]["content"].as_str().unwrap();
    let mut here =
        json!({"model": "tiny:latest", "messages": messages, "options": options, "keep_alive": "5m"});
    let streamed = post(rig.at.http, CHAT, &here).await;
    assert_eq!(streamed.header("x-kvasir-worker"), "w1");
    let streamed = lines(&streamed);
    assert_eq!(text(&streamed, "/message/content"), expected);
    here["stream"] = json!(false);
    here.as_object_mut().unwrap().remove("model");
    here["name"] = json!("tiny");
    let whole = ok(&post(rig.at.http, CHAT, &here).await);
    assert_eq!(whole["message"], json!({"role": "assistant", "content": expected}));
    let requests = worker.requests();
    assert_eq!(requests.len(), 3);
    assert!(requests.iter().all(|r| r.prompt == requests[0].prompt && r.sampling == requests[0].sampling));
    assert!(requests.iter().all(|r| r.stop == requests[0].stop));
    for end in [streamed.last().unwrap(), &whole] {
        assert_eq!(
            (&end["done"], &end["done_reason"], &end["model"]),
            (&json!(true), &json!("length"), &json!("tiny"))
        );
        assert_eq!(
            (&end["prompt_eval_count"], &end["eval_count"]),
            (&json!(requests[0].prompt.len()), &json!(6))
        );
        let time = |name: &str| end[name].as_u64().unwrap();
        let parts = time("load_duration") + time("prompt_eval_duration") + time("eval_duration");
        assert!(0 < time("total_duration") && parts <= time("total_duration"), "{end}");
    }
    // A prompt is a chat of one message, and `raw` none.
    there["messages"] = json!([{"role": "user", "content": "q"}]);
    let expected = ok(&post(rig.at.http, "/v1/chat/completions", &there).await);
    let body = json!({"model": "tiny", "prompt": "q", "options": options, "stream": false});
    let answer = ok(&post(rig.at.http, GENERATE, &body).await);
    assert_eq!(answer["response"], expected["choices"][0]["message"]["content"]);
    let raw = json!({"model": "tiny", "prompt": "q", "options": options, "raw": true});
    let answer = lines(&post(rig.at.http, GENERATE, &raw).await);
    let prompt = worker.requests().last().unwrap().prompt.clone();
    assert_eq!(&*prompt, [258, u32::from(b'q')]);
    assert_eq!(text(&answer, "/response"), letters(&prompt, 6));
    assert_eq!(rig.metric("kvasir_http_requests_total{path=\"/api/generate\",status=\"200\"}").await, 2.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logprobs_are_beside_the_message() {
    let (rig, _workers) = Rig::with_workers::<1>(|_| {}).await;
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "q"}], "logprobs": true,
        "top_logprobs": 2, "options": {"num_predict": 3, "seed": 5}});
    let streamed = lines(&post(rig.at.http, CHAT, &body).await);
    let tokens: Vec<&Value> =
        streamed.iter().filter_map(|line| line["logprobs"].as_array()).flatten().collect();
    assert_eq!(tokens.len(), 3);
    for token in &tokens {
        assert!(token["logprob"].as_f64().unwrap() <= 0.0 && token["token"].is_string(), "{token}");
        assert!(token["top_logprobs"].is_array(), "{token}");
    }
    let names: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(names, text(&streamed, "/message/content"));
    body["logprobs"] = json!(false);
    assert_eq!(post(rig.at.http, CHAT, &body).await.status.as_u16(), 400);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_stream_has_lines_that_clients_parse() {
    let (rig, [worker]): (_, [FakeWorker; 1]) =
        Rig::with_workers(|config| config.stream_silence_ms = 50).await;
    let body = json!({"model": "tiny", "messages": [{"role": "user", "content": "q"}], "options": {"num_predict": 4}});
    worker.hold(true);
    let mut events = Events::post(rig.at.http, CHAT, &body).await;
    assert_eq!(events.headers["content-type"], "application/x-ndjson");
    let first: Value = serde_json::from_str(&events.line().await.unwrap()).unwrap();
    assert_eq!((&first["message"]["content"], &first["done"]), (&json!(""), &json!(false)));
    worker.hold(false);
    let mut all = String::new();
    let mut last = Value::Null;
    while let Some(line) = events.line().await {
        last = serde_json::from_str(&line).unwrap();
        all += last["message"]["content"].as_str().unwrap();
    }
    assert_eq!((all.len(), &last["done"]), (4, &json!(true)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_have_ollamas_form() {
    let (rig, [worker]): (_, [FakeWorker; 1]) = Rig::with_workers(|_| {}).await;
    let user = json!([{"role": "user", "content": "q"}]);
    let refused = async |path: &str, body: Value| error(&post(rig.at.http, path, &body).await);
    let unknown = refused(CHAT, json!({"model": "other", "messages": user})).await;
    assert_eq!(unknown, (404, "the model \"other\" does not exist".into()));
    for (path, body, field) in [
        (CHAT, json!({"messages": user, "options": {"num_ctx": MAX_MODEL_LEN + 1}}), "options.num_ctx: "),
        (CHAT, json!({"messages": user, "options": {"temperature": -1}}), "options.temperature: "),
        (CHAT, json!({"messages": user, "options": {"top_p": 2}}), "options.top_p: "),
        (CHAT, json!({"messages": user, "think": true}), "think: "),
        (GENERATE, json!({"prompt": "q", "suffix": "}"}), "suffix: "),
        (GENERATE, json!({"prompt": "q", "raw": true, "system": "s"}), "system: "),
        ("/api/show", json!({}), "model: "),
        ("/api/pull", json!({"model": "other"}), "model: "),
    ] {
        let (status, message) = refused(path, body.clone()).await;
        assert!(status == 400 && message.starts_with(field), "{body}: {message}");
    }
    for (method, path) in [
        (Method::DELETE, "/api/delete"),
        (Method::POST, "/api/copy"),
        (Method::POST, "/api/create"),
        (Method::POST, "/api/push"),
        (Method::POST, "/api/blobs/sha256:00"),
    ] {
        let (status, message) = error(&send(rig.at.http, method, path, &[], "{}").await);
        assert!(status == 409 && message.contains("is not served"), "{path}: {message}");
    }
    // An error after the first token is a line.
    worker.allow_tokens(2);
    let body = json!({"model": "tiny", "messages": user, "options": {"num_predict": 9}});
    let mut events = Events::post(rig.at.http, CHAT, &body).await;
    events.line().await.unwrap();
    worker.fail(Some(GenerateError::Internal));
    worker.allow_tokens(u32::MAX);
    worker.leave().await;
    let mut last = Value::Null;
    while let Some(line) = events.line().await {
        last = serde_json::from_str(&line).unwrap();
    }
    assert!(last["error"].is_string(), "{last}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_are_listed_with_what_is_known_of_them() {
    let (rig, [worker]): (_, [FakeWorker; 1]) = Rig::with_workers(|_| {}).await;
    assert_eq!(get(rig.at.http, "/").await.text(), "Ollama is running");
    assert_eq!(send(rig.at.http, Method::HEAD, "/", &[], "").await.status.as_u16(), 200);
    let version = ok(&get(rig.at.http, "/api/version").await);
    let numbers: Vec<u32> =
        version["version"].as_str().unwrap().split('.').map(|n| n.parse().unwrap()).collect();
    assert!(numbers >= vec![0, 6, 4], "the least that editors accept");
    let tags = ok(&get(rig.at.http, "/api/tags").await);
    let [model] = &tags["models"].as_array().unwrap()[..] else { panic!("{tags}") };
    assert_eq!((&model["name"], &model["model"]), (&json!("tiny:latest"), &json!("tiny:latest")));
    assert!(model["digest"].as_str().unwrap().len() == 64 && model["size"].is_u64(), "{model}");
    assert_eq!(model["details"]["family"], "llama");
    let ps = ok(&get(rig.at.http, "/api/ps").await);
    let running = &ps["models"][0];
    assert_eq!(
        (&running["model"], &running["context_length"]),
        (&json!("tiny:latest"), &json!(MAX_MODEL_LEN))
    );
    assert!(running["expires_at"].is_string(), "{running}");
    for body in [json!({"model": "tiny:latest"}), json!({"name": "tiny"})] {
        let shown = ok(&post(rig.at.http, "/api/show", &body).await);
        assert_eq!(shown["capabilities"], json!(["completion", "tools"]));
        assert_eq!(shown["model_info"]["general.architecture"], "llama");
        assert_eq!(shown["model_info"]["llama.context_length"], MAX_MODEL_LEN);
        assert!(shown["template"].as_str().unwrap().contains("<|im_start|>"));
        let context = format!("{:<30} {MAX_MODEL_LEN}", "num_ctx");
        assert!(shown["parameters"].as_str().unwrap().lines().any(|line| line == context), "{shown}");
    }
    let pulled = lines(&post(rig.at.http, "/api/pull", &json!({"model": "tiny"})).await);
    assert_eq!(pulled, [json!({"status": "pulling manifest"}), json!({"status": "success"})]);
    let pulled = post(rig.at.http, "/api/pull", &json!({"name": "tiny:latest", "stream": false})).await;
    assert_eq!(ok(&pulled), json!({"status": "success"}));
    for (path, field) in [(CHAT, "message"), (GENERATE, "response")] {
        let loaded = ok(&post(rig.at.http, path, &json!({"model": "tiny"})).await);
        assert_eq!((&loaded["done_reason"], &loaded["done"]), (&json!("load"), &json!(true)));
        assert!(loaded.get(field).is_some(), "{loaded}");
        let unloaded = ok(&post(rig.at.http, path, &json!({"model": "tiny", "keep_alive": 0})).await);
        assert_eq!(unloaded["done_reason"], "unload");
        assert_eq!(error(&post(rig.at.http, path, &json!({"model": "other"})).await).0, 404);
    }
    assert_eq!(worker.counters().received, 0, "nothing was generated");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn texts_are_embedded_and_cut_to_the_models_length() {
    let (rig, [worker]): (_, [FakeWorker; 1]) = Rig::with_task(ModelTask::Embed { width: 8 }, |_| {}).await;
    let expected = ok(&post(rig.at.http, "/v1/embeddings", &json!({"input": ["ab", "c"]})).await);
    let body =
        json!({"model": "tiny:latest", "input": ["ab", "c"], "keep_alive": "5m", "options": {"num_ctx": 8}});
    let answer = ok(&post(rig.at.http, "/api/embed", &body).await);
    let [ab, c] = [0, 1].map(|at| expected["data"][at]["embedding"].clone());
    assert_eq!(answer["embeddings"], json!([ab, c]));
    assert_eq!(answer["prompt_eval_count"], expected["usage"]["prompt_tokens"]);
    assert!(answer["total_duration"].as_u64().unwrap() > 0);
    let older = ok(&post(rig.at.http, "/api/embeddings", &json!({"model": "tiny", "prompt": "ab"})).await);
    assert_eq!(older, json!({ "embedding": ab }));
    let long = "x".repeat(2 * MAX_MODEL_LEN as usize);
    ok(&post(rig.at.http, "/api/embed", &json!({"model": "tiny", "input": long})).await);
    let tokens = worker.encodes().last().unwrap().texts[0].tokens.clone();
    assert_eq!((tokens.len(), tokens.last()), (MAX_MODEL_LEN as usize, Some(&257)));
    let whole = json!({"model": "tiny", "input": long, "truncate": false});
    assert_eq!(error(&post(rig.at.http, "/api/embed", &whole).await).0, 400);
    let shown = ok(&post(rig.at.http, "/api/show", &json!({"model": "tiny"})).await);
    assert_eq!(
        (&shown["capabilities"], &shown["model_info"]["llama.embedding_length"]),
        (&json!(["embedding"]), &json!(8))
    );
    let (status, message) =
        error(&post(rig.at.http, CHAT, &json!({"messages": [{"role": "user", "content": "q"}]})).await);
    assert!(status == 400 && message.starts_with("model: "), "{message}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_setting_the_paths_do_not_exist() {
    let (rig, _workers) = Rig::with_workers::<1>(|config| config.ollama = Some(false)).await;
    for path in ["/", "/api/tags", "/api/version"] {
        assert_eq!(get(rig.at.http, path).await.error().0, 404, "{path}");
    }
    assert_eq!(post(rig.at.http, CHAT, &json!({"model": "tiny"})).await.error().0, 404);
}

/// Bodies as Open WebUI and Continue send them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_desktop_tools_are_served() {
    let (rig, [worker]): (_, [FakeWorker; 1]) = Rig::with_workers(|_| {}).await;
    let tool = json!({"type": "function", "function": {"name": "f", "description": "d",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}});
    let options = json!({"temperature": 0.8, "top_p": 0.9, "top_k": 40, "num_predict": 4, "num_ctx": MAX_MODEL_LEN,
        "num_thread": 2, "num_gpu": 1, "repeat_last_n": 64, "stop": ["</s>"], "use_mmap": true, "use_mlock": false});
    let conversation = json!([
        {"role": "system", "content": "You help."}, {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"index": 0, "id": "c1", "function": {"name": "f", "arguments": {"city": "Paris"}}}]},
        {"role": "tool", "content": "mild", "tool_call_id": "c1"}, {"role": "user", "content": "Thanks."},
    ]);
    #[rustfmt::skip]
    let bodies = [
        (CHAT, json!({"model": "tiny:latest", "messages": conversation, "stream": true, "options": options,
            "keep_alive": "5m", "tools": [tool], "think": false, "format": null, "template": null})),
        (CHAT, json!({"model": "tiny", "messages": [{"role": "user", "content": "Hi", "images": null}],
            "options": {"num_predict": 4, "num_ctx": 64, "stop": [], "mirostat": null}, "keep_alive": 1800,
            "stream": false, "tools": [tool]})),
        (GENERATE, json!({"model": "tiny", "prompt": "<|im_start|>user\nHi<|im_end|>\n", "suffix": null, "raw": true,
            "options": {"num_predict": 4, "temperature": 0.01, "stop": ["\n\n"]}, "keep_alive": 1800, "stream": true})),
        (GENERATE, json!({"model": "tiny:latest", "prompt": "Title?", "stream": false, "system": "Be brief.",
            "context": [], "options": {"num_predict": 4}})),
    ];
    for (path, body) in &bodies {
        let reply = post(rig.at.http, path, body).await;
        assert_eq!(reply.status.as_u16(), 200, "{body}: {}", reply.text());
        let end: Value = serde_json::from_str(reply.text().lines().last().unwrap()).unwrap();
        assert_eq!((&end["done"], &end["eval_count"]), (&json!(true), &json!(4)), "{body}");
    }
    assert_eq!(worker.counters().received as usize, bodies.len());
}
