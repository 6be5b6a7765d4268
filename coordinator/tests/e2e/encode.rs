//! Embeddings and reranking through the API.

use super::client::{Reply, get, post};
use super::fake_worker::{FakeWorker, MAX_MODEL_LEN, values};
use super::{Rig, tokens, until};
use proto::message::{EncodeText, GenerateError};
use proto::served_model::ModelTask;
use serde_json::{Value, json};

const EMBEDDINGS: &str = "/v1/embeddings";
const RERANK: &str = "/v1/rerank";
const EMBED: ModelTask = ModelTask::Embed { width: 8 };
const COMPARE: ModelTask = ModelTask::Rerank { scores: 1 };
const BOS: u32 = 258;
const EOS: u32 = 257;

fn ok(reply: &Reply) -> Value {
    assert_eq!(reply.status.as_u16(), 200, "{}", reply.text());
    reply.json()
}

fn framed(text: &str) -> Vec<u32> {
    [vec![BOS], tokens(text), vec![EOS]].concat()
}

/// The expected embedding of these tokens.
fn vector(tokens: Vec<u32>, dimensions: usize) -> Vec<f32> {
    let mut values = values(&EncodeText { tokens, segment_start: None }, EMBED);
    values.truncate(dimensions);
    let length = values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    values.iter().map(|x| (f64::from(*x) / length) as f32).collect()
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

fn vectors(answer: &Value) -> Vec<Vec<f32>> {
    let data = answer["data"].as_array().unwrap();
    let item = |(at, item): (usize, &Value)| {
        assert_eq!((&item["object"], &item["index"]), (&json!("embedding"), &json!(at)));
        floats(&item["embedding"])
    };
    data.iter().enumerate().map(item).collect()
}

/// Score of a pair, before the sigmoid.
fn score(query: &str, document: &str) -> f32 {
    let first = framed(query);
    let segment_start = Some(first.len() as u32);
    let tokens = [first, tokens(document), vec![EOS]].concat();
    values(&EncodeText { tokens, segment_start }, COMPARE)[0]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inputs_have_four_forms_and_vectors_come_in_order() {
    let (rig, workers) = Rig::with_task::<1>(EMBED, |_| {}).await;
    let embed = async |input: Value| ok(&post(rig.at.http, EMBEDDINGS, &json!({"input": input})).await);
    let (ab, c) = (vector(framed("ab"), 8), vector(framed("c"), 8));
    let raw = (vector(vec![7, 9], 8), vector(vec![5], 8));
    let single = embed(json!("ab")).await;
    assert_eq!(vectors(&single), std::slice::from_ref(&ab));
    assert_eq!((&single["object"], &single["model"]), (&json!("list"), &json!("tiny")));
    assert_eq!(single["usage"], json!({"prompt_tokens": 4, "total_tokens": 4}));
    assert_eq!(vectors(&embed(json!(["ab", "c"])).await), [ab, c]);
    assert_eq!(vectors(&embed(json!([7, 9])).await), std::slice::from_ref(&raw.0));
    assert_eq!(vectors(&embed(json!([[7, 9], [5]])).await), [raw.0, raw.1]);
    assert!(workers[0].encodes().iter().flat_map(|e| &e.texts).all(|text| text.segment_start.is_none()));
    let bare = json!({"input": "ab", "add_special_tokens": false, "unknown": 1});
    let answer = ok(&post(rig.at.http, EMBEDDINGS, &bare).await);
    assert_eq!(vectors(&answer), [vector(tokens("ab"), 8)]);
    let models = get(rig.at.http, "/v1/models").await.json();
    assert_eq!(models["data"][0]["task"], "embed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn vectors_can_be_shorter_and_in_base64() {
    let (rig, _workers) = Rig::with_task::<1>(EMBED, |_| {}).await;
    let body = json!({"model": "tiny", "input": "ab", "dimensions": 3});
    assert_eq!(vectors(&ok(&post(rig.at.http, EMBEDDINGS, &body).await)), [vector(framed("ab"), 3)]);
    let body = json!({"input": [7, 9], "dimensions": 1, "encoding_format": "base64"});
    let reply = post(rig.at.http, EMBEDDINGS, &body).await;
    // -1.0f32 or 1.0f32, by the sign of the first value.
    let expected = if vector(vec![7, 9], 1)[0] < 0.0 { "AACAvw==" } else { "AACAPw==" };
    assert_eq!(ok(&reply)["data"][0]["embedding"], expected);
    assert_eq!(reply.header("x-kvasir-worker"), "w1");
    assert_eq!(reply.header("x-kvasir-route"), "reason=only;predicted=0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_request_is_spread_over_the_workers() {
    let (rig, workers) = Rig::with_task::<2>(EMBED, |_| {}).await;
    let inputs: Vec<String> = (0..300).map(|i| format!("text {i}")).collect();
    let answer = ok(&post(rig.at.http, EMBEDDINGS, &json!({"input": inputs})).await);
    let expected: Vec<Vec<f32>> = inputs.iter().map(|text| vector(framed(text), 8)).collect();
    assert_eq!(vectors(&answer), expected);
    let calls: Vec<usize> = workers.iter().map(|worker| worker.encodes().len()).collect();
    assert!(calls.iter().all(|calls| *calls >= 3), "{calls:?}");
    let mut indices: Vec<u32> = workers.iter().flat_map(FakeWorker::encodes).map(|e| e.part).collect();
    indices.sort_unstable();
    assert!(indices.iter().copied().eq(0..indices.len() as u32));
    let total: usize = expected.len();
    assert_eq!(workers.iter().flat_map(FakeWorker::encodes).map(|e| e.texts.len()).sum::<usize>(), total);
    until("the books are empty", async || rig.metric("kvasir_inflight_requests ").await == 0.0).await;
    assert_eq!(
        rig.metric("vllm:request_success_total{model_name=\"tiny\",finished_reason=\"stop\"}").await,
        1.0
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documents_are_ranked_by_the_scores_of_their_pairs() {
    let (rig, workers) = Rig::with_task::<1>(COMPARE, |_| {}).await;
    let documents = ["one", "two", "three", "four"];
    let body = json!({"model": "tiny", "query": "q?", "documents": [
        "one", {"text": "two", "title": "x"}, "three", {"text": "four"},
    ]});
    let answer = ok(&post(rig.at.http, RERANK, &body).await);
    let mut expected: Vec<(usize, f32)> =
        documents.iter().map(|document| score("q?", document)).enumerate().collect();
    expected.sort_by(|a, b| b.1.total_cmp(&a.1));
    let results = answer["results"].as_array().unwrap();
    assert_eq!(results.len(), 4);
    for (result, (index, score)) in results.iter().zip(&expected) {
        assert_eq!(result["index"], *index);
        let sigmoid = 1.0 / (1.0 + (-f64::from(*score)).exp());
        assert!((result["relevance_score"].as_f64().unwrap() - sigmoid).abs() < 1e-6, "{result}");
        assert_eq!(result["document"], json!({"text": documents[*index]}));
    }
    let pairs: usize = documents.iter().map(|d| framed("q?").len() + d.len() + 1).sum();
    assert_eq!(answer["usage"], json!({"prompt_tokens": pairs, "total_tokens": pairs}));
    // <bos> q ? <eos>: the document follows.
    assert_eq!(workers[0].encodes()[0].texts[1].segment_start, Some(4));
    let body = json!({
        "query": "q?", "documents": documents, "top_n": 2, "return_documents": false, "use_activation": false,
    });
    let answer = ok(&post(rig.at.http, RERANK, &body).await);
    let two: Vec<Value> =
        expected[..2].iter().map(|(i, score)| json!({"index": i, "relevance_score": score})).collect();
    assert_eq!(answer["results"], json!(two));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_is_asked_only_for_what_it_does() {
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    let requests = [
        ("/v1/completions", json!({"prompt": "hi"}), ModelTask::Generate),
        ("/v1/chat/completions", chat, ModelTask::Generate),
        (EMBEDDINGS, json!({"input": "hi"}), EMBED),
        (RERANK, json!({"query": "q", "documents": ["d"]}), COMPARE),
    ];
    for task in [ModelTask::Generate, EMBED, COMPARE] {
        let (rig, _workers) = Rig::with_task::<1>(task, |_| {}).await;
        for (path, body, required) in &requests {
            let reply = post(rig.at.http, path, body).await;
            if *required == task {
                ok(&reply);
                continue;
            }
            assert_eq!(reply.error(), (400, "invalid_field".into(), "model".into()), "{path} of {task:?}");
            let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
            let right = requests.iter().find(|(_, _, required)| *required == task).unwrap().0;
            assert!(message.contains("tiny") && message.contains(right), "{message}");
        }
        // Tokens are returned as the model would read them.
        let tokenized = post(rig.at.http, "/tokenize", &json!({"prompt": "hi"})).await.json();
        let expected =
            if task == ModelTask::Generate { [vec![BOS], tokens("hi")].concat() } else { framed("hi") };
        assert_eq!(tokenized["tokens"], json!(expected));
    }
    let (rig, _workers) = Rig::with_task::<1>(ModelTask::Rerank { scores: 3 }, |_| {}).await;
    let reply = post(rig.at.http, RERANK, &json!({"query": "q", "documents": ["d"]})).await;
    assert_eq!(reply.error(), (400, "invalid_field".into(), "model".into()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_error_names_the_field() {
    let long = MAX_MODEL_LEN as usize;
    let context = || (400, "context_length_exceeded".to_owned(), String::new());
    let invalid = |param: &str| (400, "invalid_field".to_owned(), param.to_owned());
    let (rig, workers) = Rig::with_task::<1>(EMBED, |_| {}).await;
    for (body, expected) in [
        (json!({}), invalid("input")),
        (json!({"input": []}), invalid("input")),
        (json!({"input": 7}), invalid("input")),
        (json!({"input": ["a", 7]}), invalid("input")),
        (json!({"input": [[1], []]}), invalid("input[1]")),
        (json!({"input": [[1], [2, 9999]]}), invalid("input[1][1]")),
        (json!({"input": vec!["x"; 2049]}), invalid("input")),
        (json!({"input": ["x", "y".repeat(long - 1)]}), context()),
        (json!({"input": "x", "dimensions": 0}), invalid("dimensions")),
        (json!({"input": "x", "dimensions": 9}), invalid("dimensions")),
        (json!({"input": "x", "encoding_format": "hex"}), invalid("encoding_format")),
        (json!({"input": "x", "model": "other"}), (404, "model_not_found".into(), "model".into())),
    ] {
        let head: String = body.to_string().chars().take(80).collect();
        assert_eq!(post(rig.at.http, EMBEDDINGS, &body).await.error(), expected, "{head}");
    }
    assert!(workers[0].encodes().is_empty(), "nothing of that is a worker's business");
    let at_limit = json!({"input": vec!["x"; 2048]});
    assert_eq!(vectors(&ok(&post(rig.at.http, EMBEDDINGS, &at_limit).await)).len(), 2048);
    ok(&post(rig.at.http, EMBEDDINGS, &json!({"input": "y".repeat(long - 2)})).await);

    let (rig, _workers) = Rig::with_task::<1>(COMPARE, |_| {}).await;
    for (body, expected) in [
        (json!({"documents": ["d"]}), invalid("query")),
        (json!({"query": ["q"], "documents": ["d"]}), invalid("query")),
        (json!({"query": "q"}), invalid("documents")),
        (json!({"query": "q", "documents": []}), invalid("documents")),
        (json!({"query": "q", "documents": "d"}), invalid("documents")),
        (json!({"query": "q", "documents": ["d", {"title": "t"}]}), invalid("documents")),
        (json!({"query": "q", "documents": vec!["d"; 2049]}), invalid("documents")),
        (json!({"query": "q", "documents": ["d"], "top_n": -1}), invalid("top_n")),
        (json!({"query": "q", "documents": ["d"], "return_documents": 1}), invalid("return_documents")),
        (json!({"query": "q", "documents": ["d", "y".repeat(long)]}), context()),
    ] {
        let head: String = body.to_string().chars().take(80).collect();
        assert_eq!(post(rig.at.http, RERANK, &body).await.error(), expected, "{head}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_part_whose_worker_dies_moves_to_another() {
    let (rig, workers) = Rig::with_task::<2>(EMBED, |_| {}).await;
    workers.iter().for_each(|worker| worker.hold(true));
    let inputs: Vec<String> = (0..100).map(|i| format!("text {i}")).collect();
    let (http, body) = (rig.at.http, json!({"input": inputs}));
    let reply = tokio::spawn(async move { post(http, EMBEDDINGS, &body).await });
    until("both have parts", async || workers.iter().all(|w| w.counters().received > 0)).await;
    workers[0].freeze();
    assert!(rig.coordinator().notice_dead(&workers[0].name));
    workers[1].hold(false);
    let expected: Vec<Vec<f32>> = inputs.iter().map(|text| vector(framed(text), 8)).collect();
    assert_eq!(vectors(&ok(&reply.await.unwrap())), expected);
    assert!(workers[1].encodes().iter().any(|encode| encode.attempt.0 == 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_permanent_refusal_is_returned_and_cancels_the_other_parts() {
    let (rig, [a, b]) = Rig::with_task::<2>(EMBED, |_| {}).await;
    let single = json!({"input": "x"});
    a.fail(Some(GenerateError::QueueFull));
    for _ in 0..4 {
        ok(&post(rig.at.http, EMBEDDINGS, &single).await);
    }
    b.fail(Some(GenerateError::QueueFull));
    assert_eq!(
        post(rig.at.http, EMBEDDINGS, &single).await.error(),
        (429, "queue_full".into(), String::new())
    );
    // One worker refuses permanently while the other still holds its parts.
    let refused = GenerateError::InvalidField { field: "input".into(), reason: "too odd".into() };
    a.fail(Some(refused));
    b.hold(true);
    let before = b.counters().cancelled;
    let many = json!({"input": vec!["x"; 320]});
    let reply = post(rig.at.http, EMBEDDINGS, &many).await;
    assert_eq!(reply.error(), (400, "invalid_field".into(), "input".into()));
    b.until("its parts are cancelled", |c| c.cancelled > before && c.cancelled + c.finished == c.received)
        .await;
    until("the books are empty", async || rig.metric("kvasir_inflight_requests ").await == 0.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_request_is_cancelled_and_a_slow_one_times_out() {
    let (rig, [worker]) = Rig::with_task::<1>(EMBED, |c| c.request_timeout_s = 1).await;
    worker.hold(true);
    let http = rig.at.http;
    let pending = tokio::spawn(async move { post(http, EMBEDDINGS, &json!({"input": "x"})).await });
    worker.until("it is there", |c| c.received == 1).await;
    pending.abort();
    worker.until("it is cancelled", |c| c.cancelled == 1).await;
    let timed_out = post(rig.at.http, EMBEDDINGS, &json!({"input": "y"})).await;
    assert_eq!(timed_out.error(), (503, "deadline_exceeded".into(), String::new()));
    assert!(worker.encodes()[1].deadline_ms <= 1_000);
    worker.leave().await;
    until("it has left", async || rig.cluster().await["workers"] == json!([])).await;
    let no_worker = post(rig.at.http, EMBEDDINGS, &json!({"input": "y"})).await;
    assert_eq!(no_worker.error(), (503, "no_worker".into(), String::new()));
}
