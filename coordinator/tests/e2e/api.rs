//! The API without faults.

use super::client::{Events, Reply, get, post};
use super::fake_worker::{MAX_MODEL_LEN, letters};
use super::{Rig, tokens, until};
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn with_bos(text: &str) -> Vec<u32> {
    [vec![258], tokens(text)].concat()
}

fn ok(reply: &Reply) -> Value {
    assert_eq!(reply.status.as_u16(), 200, "{}", reply.text());
    reply.json()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_has_text_usage_and_route() {
    let (rig, _workers) = Rig::with_workers::<1>(|_| {}).await;
    let body = json!({"model": "tiny", "prompt": "hello", "max_tokens": 5, "unknown_field": {"x": [1]}});
    let reply = post(rig.at.http, COMPLETIONS, &body).await;
    let answer = ok(&reply);
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["model"], "tiny");
    assert_eq!(answer["choices"][0]["text"], letters(&with_bos("hello"), 5));
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let usage = json!({
        "prompt_tokens": 6, "completion_tokens": 5, "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0, "kvasir_lookups": ["absent"]},
    });
    assert_eq!(answer["usage"], usage);
    assert_eq!(reply.header("x-kvasir-worker"), "w1");
    assert_eq!(reply.header("x-kvasir-route"), "reason=only;predicted=0");
    assert_eq!(reply.header("x-request-id").len(), 32);
    assert_eq!(answer["id"], format!("cmpl-{}", reply.header("x-request-id")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_have_four_forms_and_choices_are_in_order() {
    let (rig, workers) = Rig::with_workers::<1>(|_| {}).await;
    let prompt =
        |prompt: Value| json!({"prompt": prompt, "max_tokens": 3, "add_special_tokens": false, "seed": 5});
    let texts = async |body: &Value| -> Vec<Value> {
        let answer = ok(&post(rig.at.http, COMPLETIONS, body).await);
        let choices = answer["choices"].as_array().unwrap().clone();
        choices.iter().enumerate().for_each(|(at, choice)| assert_eq!(choice["index"], at));
        choices.into_iter().map(|choice| choice["text"].clone()).collect()
    };
    let [ab, c] = ["ab", "c"].map(|p| json!(letters(&tokens(p), 3)));
    assert_eq!(texts(&prompt(json!("ab"))).await, std::slice::from_ref(&ab));
    assert_eq!(texts(&prompt(json!(["ab", "c"]))).await, [ab.clone(), c.clone()]);
    assert_eq!(texts(&prompt(json!(tokens("ab")))).await, std::slice::from_ref(&ab));
    assert_eq!(texts(&prompt(json!([tokens("ab"), tokens("c")]))).await, [ab.clone(), c.clone()]);
    let mut twice = prompt(json!(["ab", "c"]));
    twice["n"] = json!(2);
    assert_eq!(texts(&twice).await, [ab.clone(), ab, c.clone(), c]);
    // Choices of one prompt have different seeds, and a given seed is used.
    let mut seeds: Vec<_> =
        workers[0].requests().iter().rev().take(4).map(|r| (r.choice, r.sampling.seed)).collect();
    seeds.sort_unstable();
    assert_eq!(seeds, [(0, 5), (1, 6), (2, 5), (3, 6)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_streamed_chat_has_all_chunks_and_ends_with_usage() {
    let (rig, workers) = Rig::with_workers::<1>(|_| {}).await;
    let body = json!({
        "model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 4,
        "stream": true, "stream_options": {"include_usage": true}, "return_token_ids": true,
    });
    let mut events = Events::post(rig.at.http, CHAT, &body).await;
    assert_eq!(events.status.as_u16(), 200);
    assert_eq!(events.headers["content-type"], "text/event-stream");
    assert_eq!(events.headers["x-kvasir-worker"], "w1");
    let (chunks, done) = events.rest().await;
    assert!(done);
    let sent = workers[0].requests();
    // <bos> and the template's output, with special tokens parsed.
    let expected =
        [&[258, 256][..], &tokens("user\nhi"), &[257], &tokens("\n"), &[256], &tokens("assistant\n")];
    assert_eq!(*sent[0].prompt, expected.concat());
    let text = letters(&sent[0].prompt, 4);
    assert_eq!(
        chunks[0]["choices"][0]["delta"],
        json!({"role": "assistant", "content": "", "refusal": null})
    );
    let content: String =
        chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(content, text);
    let ids: Vec<u64> = chunks
        .iter()
        .filter_map(|c| c["choices"][0]["token_ids"].as_array())
        .flatten()
        .filter_map(Value::as_u64)
        .collect();
    assert_eq!(ids, text.bytes().map(u64::from).collect::<Vec<_>>());
    let [.., last, usage] = chunks.as_slice() else { panic!("{chunks:?}") };
    assert_eq!(last["choices"][0]["finish_reason"], "length");
    assert_eq!(last["usage"], Value::Null);
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], 4);
    assert!(chunks.iter().all(|c| c["object"] == "chat.completion.chunk" && c["id"] == chunks[0]["id"]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_fields_reach_the_worker() {
    let (rig, workers) = Rig::with_workers::<1>(|_| {}).await;
    let body = json!({
        "prompt": [1, 2, 3], "max_tokens": 2, "min_tokens": 1, "temperature": 0.5, "top_k": 7, "top_p": 0.25,
        "min_p": 0.125, "repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 1,
        "logit_bias": {"65": -1}, "seed": 42, "stop": ["x", "y"], "stop_token_ids": [9], "ignore_eos": true,
        "logprobs": 2,
    });
    let answer = ok(&post(rig.at.http, COMPLETIONS, &body).await);
    let logprobs = &answer["choices"][0]["logprobs"];
    let text = letters(&[1, 2, 3], 2);
    assert_eq!(logprobs["tokens"], json!(text.chars().map(String::from).collect::<Vec<_>>()));
    assert_eq!(logprobs["token_logprobs"], json!([-0.5, -0.5]));
    assert_eq!(logprobs["text_offset"], json!([0, 1]));
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 2);
    let sent = &workers[0].requests()[0];
    assert_eq!(*sent.prompt, [1, 2, 3]);
    let s = &sent.sampling;
    assert_eq!((s.temperature, s.top_k, s.top_p, s.min_p, s.seed), (0.5, 7, 0.25, 0.125, 42));
    assert_eq!((s.repetition_penalty, s.presence_penalty, s.frequency_penalty), (1.5, -1.0, 1.0));
    assert_eq!((s.logit_bias.as_slice(), s.logprobs), (&[(65, -1.0)][..], Some(2)));
    let stop = &sent.stop;
    assert_eq!((stop.max_tokens, stop.min_tokens, stop.ignore_eos), (2, 1, true));
    assert_eq!(
        (stop.strings.as_slice(), stop.token_ids.as_slice()),
        (&["x".into(), "y".into()][..], &[9][..])
    );
    assert!(sent.deadline_ms > 0 && sent.deadline_ms <= 600_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chat_logprobs_have_bytes_and_alternatives() {
    let (rig, _workers) = Rig::with_workers::<1>(|_| {}).await;
    let body = json!({
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": true, "top_logprobs": 2,
    });
    let answer = ok(&post(rig.at.http, CHAT, &body).await);
    let choice = &answer["choices"][0];
    let content = choice["message"]["content"].as_str().unwrap();
    let first = &choice["logprobs"]["content"][0];
    assert_eq!((first["token"].as_str(), &first["bytes"]), (Some(content), &json!(content.as_bytes())));
    assert_eq!(first["top_logprobs"].as_array().unwrap().len(), 2);
    assert_eq!(answer["object"], "chat.completion");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokenize_and_detokenize_generate_nothing() {
    let (rig, _workers) = Rig::with_workers::<1>(|_| {}).await;
    let tokenized = ok(&post(rig.at.http, "/tokenize", &json!({"prompt": "a<|im_end|>"})).await);
    let expected = json!({"tokens": [258, 97, 257], "count": 3, "max_model_len": MAX_MODEL_LEN});
    assert_eq!(tokenized, expected);
    let plain =
        ok(&post(rig.at.http, "/tokenize", &json!({"prompt": "a", "add_special_tokens": false})).await);
    assert_eq!(plain["tokens"], json!([97]));
    let messages = json!({"messages": [{"role": "user", "content": "a"}]});
    let chat = ok(&post(rig.at.http, "/tokenize", &messages).await);
    assert_eq!((&chat["tokens"][0], &chat["tokens"][1]), (&json!(258), &json!(256)));
    let text = ok(&post(rig.at.http, "/detokenize", &json!({"tokens": [104, 105, 257]})).await);
    assert_eq!(text, json!({"prompt": "hi<|im_end|>"}));
    assert_eq!(get(rig.at.http, "/health").await.status.as_u16(), 200);
    let models = ok(&get(rig.at.http, "/v1/models").await);
    assert_eq!(models["data"][0]["id"], "tiny");
    assert_eq!(models["data"][0]["max_model_len"], MAX_MODEL_LEN);
    let model = ok(&get(rig.at.http, "/v1/models/tiny").await);
    assert_eq!(model, models["data"][0]);
    assert_eq!(
        ["object", "type", "display_name"].map(|field| model[field].as_str()),
        ["model", "model", "tiny"].map(Some)
    );
    let created_at = model["created_at"].as_str().unwrap();
    assert!(created_at.starts_with("20") && created_at.ends_with('Z'), "{created_at}");
    assert_eq!((&models["first_id"], &models["has_more"]), (&json!("tiny"), &json!(false)));
    assert_eq!(get(rig.at.http, "/v1/models?limit=0").await.status.as_u16(), 400);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documents_stand_in_the_prompt_by_popularity() {
    let (rig, workers) = Rig::with_workers::<1>(|_| {}).await;
    let complete = async |documents: Value| {
        let messages = json!([{"role": "user", "content": "why"}]);
        let body = json!({"messages": messages, "documents": documents, "max_tokens": 1});
        let answer = post(rig.at.http, CHAT, &body).await;
        let order = answer.headers.get("x-kvasir-documents").and_then(|v| v.to_str().ok()).map(str::to_owned);
        ok(&answer);
        let prompt = workers[0].requests().last().unwrap().prompt.clone();
        (order, prompt)
    };
    let [a, b] = ["a", "b"].map(|id| json!({"id": id, "text": format!("about {id}")}));
    let (order, _) = complete(json!([b])).await;
    assert_eq!(order.as_deref(), Some("0"));
    let (order, prompt) = complete(json!([a, b])).await;
    assert_eq!(order.as_deref(), Some("1,0"));
    let text = "user\nDocuments:\n<document id=\"b\">\nabout b\n</document>\n\
                <document id=\"a\">\nabout a\n</document>\nMost relevant first: a, b\n\nwhy";
    assert_eq!(prompt[2..2 + text.len()], tokens(text));
    let messages = json!([{"role": "user", "content": "why"}]);
    let body = json!({"messages": messages, "documents": [a, b]});
    assert_eq!(ok(&post(rig.at.http, "/tokenize", &body).await)["tokens"], json!(*prompt));
    // Without documents, the answer does not mention them.
    assert_eq!(complete(json!([])).await.0, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_with_one_uncached_prefix_is_computed_once_and_found_again() {
    let (rig, workers) = Rig::with_workers::<2>(|_| {}).await;
    let shared: Vec<u32> = (0..1_500).map(|i| (i * 7 + i / 256) % 256).collect();
    let burst = async |wave: u32| {
        let request = |i: u32| {
            let own: Vec<u32> = [wave, i].into_iter().chain(0..28).collect();
            let prompt = [&shared[..], &own].concat();
            let body = json!({"prompt": prompt, "max_tokens": 2});
            let http = rig.at.http;
            async move { post(http, COMPLETIONS, &body).await }
        };
        let mut cached = Vec::new();
        let mut predicted = Vec::new();
        // So few that their tokens in one queue cost less than the prefix anew at the other worker.
        for reply in futures::future::join_all((0..12).map(request)).await {
            let answer = ok(&reply);
            cached.push(answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap());
            predicted
                .push(reply.header("x-kvasir-route").rsplit_once('=').unwrap().1.parse::<u64>().unwrap());
        }
        cached.sort_unstable();
        predicted.sort_unstable();
        (cached, predicted)
    };
    let (cached, predicted) = burst(1).await;
    assert_eq!(cached, [vec![0], vec![1_488; 11]].concat());
    assert_eq!(predicted, cached);
    let computed: u64 = workers.iter().map(|w| w.counters().computed).sum();
    assert_eq!(computed, 1_530 + 11 * 42);
    let (cached, predicted) = burst(2).await;
    assert_eq!((cached, &predicted), (vec![1_488; 12], &vec![1_488; 12]));
    // Predicted and actual cached tokens in the metrics.
    let predicted = rig.metric("kvasir_cached_tokens_predicted_total").await;
    assert_eq!(predicted, f64::from((11 + 12) * 1_488));
    assert_eq!(predicted, rig.metric("kvasir_cached_tokens_actual_total").await);
    until("reservations end", async || rig.metric("kvasir_reservations ").await == 0.0).await;
    assert!(rig.metric("kvasir_index_blocks").await >= 93.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefixes_cached_before_the_join_are_known() {
    let rig = Rig::bare(|_| {}).await;
    let first = rig.join("w1", 1).await;
    let prompt: Vec<u32> = (0..100).collect();
    let body = json!({"prompt": prompt, "max_tokens": 1});
    ok(&post(rig.at.http, COMPLETIONS, &body).await);
    let root = first.requests()[0].root;
    first.leave().await;
    let warm = super::cluster_key().chain(root, &prompt);
    for (name, keeps_events) in [("w2", true), ("w3", false)] {
        let mut setup = rig.setup(name, 1);
        (setup.warm, setup.keeps_events) = (warm.clone(), keeps_events);
        let worker = rig.join_as(setup).await.unwrap();
        until("the index knows", async || {
            let reply = post(rig.at.http, COMPLETIONS, &body).await;
            let answer = ok(&reply);
            assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 96);
            reply.header("x-kvasir-route").ends_with("predicted=96")
        })
        .await;
        let snapshots = &rig.cluster().await["index"]["streams"][0]["snapshots"];
        assert_eq!(*snapshots, json!(u8::from(!keeps_events)), "{name}");
        worker.leave().await;
        until("it has left", async || rig.cluster().await["workers"] == json!([])).await;
    }
}
