//! Prompts in the answers of completions and chats, and `best_of`.

use super::client::{Events, Reply, post};
use super::fake_worker::{FakeWorker, letters};
use super::{Rig, tokens};
use proto::message::{GenerateError, PromptLogprobs};
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn ok(reply: &Reply) -> Value {
    assert_eq!(reply.status.as_u16(), 200, "{}", reply.text());
    reply.json()
}

fn completion(more: &Value) -> Value {
    let mut body = json!({"prompt": "abcde", "max_tokens": 2, "add_special_tokens": false, "temperature": 0});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// The log-probability that the fake worker gives a byte of a prompt.
fn logprob(at: usize, byte: u8) -> Value {
    if at == 0 { Value::Null } else { json!(-(at as f64) - f64::from(byte % 8) / 8.0) }
}

fn requested(worker: &FakeWorker) -> Option<PromptLogprobs> {
    worker.requests().last().unwrap().prompt_logprobs
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_echo_begins_with_the_prompt_and_its_logprobs() {
    let (rig, workers) = Rig::with_workers::<1>(|_| {}).await;
    let text = format!("abcde{}", letters(&tokens("abcde"), 2));
    let names = |text: &str| json!(text.chars().map(String::from).collect::<Vec<_>>());
    let ids = json!([tokens("abcde")]);
    for prompt in [json!("abcde"), json!(["abcde"]), ids[0].clone(), ids] {
        let more = json!({"prompt": prompt, "echo": true, "logprobs": 1});
        let answer = ok(&post(rig.at.http, COMPLETIONS, &completion(&more)).await);
        let choice = &answer["choices"][0];
        assert_eq!(choice["text"], text);
        assert_eq!(requested(&workers[0]), Some(PromptLogprobs { top: 1 }));
        let logprobs = &choice["logprobs"];
        assert_eq!(logprobs["tokens"], names(&text));
        assert_eq!(logprobs["text_offset"], json!([0, 1, 2, 3, 4, 5, 6]));
        let expected: Vec<Value> = b"abcde".iter().enumerate().map(|(at, byte)| logprob(at, *byte)).collect();
        assert_eq!(logprobs["token_logprobs"], json!([&expected[..], &[json!(-0.5), json!(-0.5)]].concat()));
        assert_eq!(logprobs["top_logprobs"][0], Value::Null);
        assert_eq!(logprobs["top_logprobs"][2], json!({"c": expected[2], "a": -0.25}));
        assert!(choice.get("prompt_logprobs").is_none());
    }
    // Without log-probabilities, and with choices: the worker is asked for nothing of the prompt.
    let more = json!({"prompt": ["abcde", "b"], "echo": true, "n": 2});
    let answer = ok(&post(rig.at.http, COMPLETIONS, &completion(&more)).await);
    let other = format!("b{}", letters(&tokens("b"), 2));
    let texts: Vec<&Value> = answer["choices"].as_array().unwrap().iter().map(|c| &c["text"]).collect();
    assert_eq!(texts, [&text, &text, &other, &other]);
    assert_eq!((requested(&workers[0]), &answer["choices"][0]["logprobs"]), (None, &Value::Null));
    assert_eq!(
        (&answer["usage"]["prompt_tokens"], &answer["usage"]["completion_tokens"]),
        (&json!(6), &json!(8))
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_streamed_echo_is_sent_first() {
    let (rig, _workers) = Rig::with_workers::<1>(|_| {}).await;
    for logprobs in [Value::Null, json!(2)] {
        let body = completion(&json!({"echo": true, "stream": true, "logprobs": logprobs}));
        let (chunks, done) = Events::post(rig.at.http, COMPLETIONS, &body).await.rest().await;
        assert!(done);
        let choices: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]).collect();
        assert_eq!(choices[0]["text"], "abcde");
        let texts: String = choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
        assert_eq!(texts, format!("abcde{}", letters(&tokens("abcde"), 2)));
        let offsets =
            choices.iter().filter_map(|choice| choice["logprobs"]["text_offset"].as_array()).flatten();
        let expected = if logprobs.is_null() { vec![] } else { (0..7).map(|at| json!(at)).collect() };
        assert_eq!(offsets.cloned().collect::<Vec<_>>(), expected);
        if !logprobs.is_null() {
            let first = &choices[0]["logprobs"];
            assert_eq!(first["tokens"].as_array().unwrap().len(), 5);
            assert_eq!(first["top_logprobs"][1].as_object().unwrap().len(), 3 - 1);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_without_tokens_is_the_prompt() {
    let (rig, workers) = Rig::with_workers::<1>(|_| {}).await;
    for (more, text) in [
        (json!({"echo": true}), "abcde"),
        (json!({"echo": true, "logprobs": 0}), "abcde"),
        (json!({"prompt_logprobs": 0}), ""),
    ] {
        let mut body = completion(&more);
        body["max_tokens"] = json!(0);
        let answer = ok(&post(rig.at.http, COMPLETIONS, &body).await);
        let choice = &answer["choices"][0];
        assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(text), &json!("length")), "{more}");
        assert_eq!(answer["usage"]["completion_tokens"], 0);
        let tokens = choice["logprobs"]["tokens"].as_array().map_or(0, Vec::len);
        assert_eq!(tokens, if more.get("logprobs").is_some() { 5 } else { 0 });
        assert_eq!(
            choice["prompt_logprobs"].as_array().map_or(0, Vec::len),
            if text.is_empty() { 5 } else { 0 }
        );
        let request = workers[0].requests().pop().unwrap();
        assert_eq!((request.stop.max_tokens, request.prompt_logprobs), (0, Some(PromptLogprobs { top: 0 })));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompt_logprobs_have_the_form_of_vllm() {
    let (rig, workers) = Rig::with_workers::<1>(|_| {}).await;
    let body = completion(&json!({"prompt_logprobs": 2, "logprobs": 1, "echo": true, "n": 2}));
    let answer = ok(&post(rig.at.http, COMPLETIONS, &body).await);
    assert_eq!(requested(&workers[0]), Some(PromptLogprobs { top: 2 }));
    for choice in answer["choices"].as_array().unwrap() {
        let prompt = &choice["prompt_logprobs"];
        assert_eq!((prompt.as_array().unwrap().len(), &prompt[0]), (5, &Value::Null));
        let expected = json!({
            "97": {"logprob": -0.25, "rank": 1, "decoded_token": "a"},
            "98": {"logprob": -1.25, "rank": 2, "decoded_token": "b"},
            "99": {"logprob": logprob(2, b'c'), "rank": 2, "decoded_token": "c"},
        });
        assert_eq!(prompt[2], expected);
        // An alternative that is the token itself has one entry.
        assert_eq!(prompt[1]["98"], json!({"logprob": logprob(1, b'b'), "rank": 1, "decoded_token": "b"}));
        assert_eq!(choice["logprobs"]["top_logprobs"][2].as_object().unwrap().len(), 2);
    }
    let chat = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "prompt_logprobs": 1});
    let answer = ok(&post(rig.at.http, CHAT, &chat).await);
    let prompt = workers[0].requests().pop().unwrap().prompt;
    assert_eq!(answer["prompt_logprobs"].as_array().unwrap().len(), prompt.len());
    assert!(answer["choices"][0].get("prompt_logprobs").is_none());
    // 0 changes nothing of a stream.
    let body = completion(&json!({"prompt_logprobs": 0, "stream": true}));
    assert!(Events::post(rig.at.http, COMPLETIONS, &body).await.rest().await.1);
    assert_eq!(requested(&workers[0]), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_answers_than_returned_are_generated_for_best_of() {
    let (rig, workers) = Rig::with_workers::<1>(|_| {}).await;
    let body = completion(&json!({"best_of": 3, "n": 2, "seed": 7}));
    let answer = ok(&post(rig.at.http, COMPLETIONS, &body).await);
    let choices = answer["choices"].as_array().unwrap();
    let indices: Vec<&Value> = choices.iter().map(|choice| &choice["index"]).collect();
    assert_eq!((indices, &choices[0]["logprobs"]), (vec![&json!(0), &json!(1)], &Value::Null));
    assert_eq!(
        (&answer["usage"]["prompt_tokens"], &answer["usage"]["completion_tokens"]),
        (&json!(5), &json!(6))
    );
    let sent = workers[0].requests();
    let mut seeds: Vec<u64> = sent.iter().map(|request| request.sampling.seed).collect();
    seeds.sort_unstable();
    assert_eq!(seeds, [7, 8, 9]);
    assert!(sent.iter().all(|request| request.sampling.logprobs == Some(0)));
    let equal = completion(&json!({"best_of": 1}));
    ok(&post(rig.at.http, COMPLETIONS, &equal).await);
    assert_eq!(workers[0].requests().len(), 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_no_worker_serves_is_refused_with_the_reason() {
    let (rig, workers) = Rig::with_workers::<1>(|_| {}).await;
    let reason = "the model's layers are on several workers".to_owned();
    let error = GenerateError::Unsupported { field: "prompt_logprobs".into(), reason };
    workers[0].fail(Some(error));
    let refused = post(rig.at.http, COMPLETIONS, &completion(&json!({"echo": true, "logprobs": 1}))).await;
    let error = refused.json()["error"].clone();
    assert_eq!((refused.status.as_u16(), &error["param"]), (400, &json!("prompt_logprobs")), "{error}");
    assert!(error["message"].as_str().unwrap().contains("on several workers"), "{error}");
    // More log-probabilities than a request may have, over all prompts and choices.
    let prompt: Vec<u32> = vec![97; 400];
    let many = json!({"prompt": vec![prompt; 63], "prompt_logprobs": 20, "n": 1, "max_tokens": 1});
    let refused = post(rig.at.http, COMPLETIONS, &many).await;
    let error = refused.json()["error"].clone();
    assert_eq!((refused.status.as_u16(), &error["param"]), (400, &json!("prompt_logprobs")), "{error}");
    assert!(error["message"].as_str().unwrap().contains("529200, at most 524288"), "{error}");
}
