//! Chat fields that affect the prompt, and request fields that affect the answer.

use super::client::{Reply, post};
use super::fake_worker::{FakeWorker, MAX_MODEL_LEN, letters};
use super::{Rig, write_model};
use dispatch::models::ModelEntry;
use proto::ids::ModelId;
use proto::served_model::ModelTask;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

/// A template that outputs all its inputs.
const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
    [{{ reasoning_effort }}{{ enable_thinking }}]{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// A coordinator and a worker with a model of this template.
async fn rig(template: &str) -> (Rig, FakeWorker, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    write_model(&path, template);
    let entry = ModelEntry { id: ModelId::new("tiny").unwrap(), path };
    let (rig, [worker]) = Rig::with_workers::<1>(|config| config.models = vec![entry]).await;
    (rig, worker, dir)
}

fn ok(reply: &Reply) -> Value {
    assert_eq!(reply.status.as_u16(), 200, "{}", reply.text());
    reply.json()
}

/// The text of the last request's tokens.
fn prompt(worker: &FakeWorker) -> String {
    let prompt = worker.requests().last().unwrap().prompt.clone();
    let token = |id: &u32| match id {
        256 => "<|im_start|>".to_owned(),
        257 => "<|im_end|>".to_owned(),
        258 => "<bos>".to_owned(),
        259 => "~~".to_owned(),
        byte => char::from(*byte as u8).into(),
    };
    prompt.iter().map(token).collect()
}

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

/// The same request in each dialect; `merge` adds fields to each.
fn bodies(merge: [Value; 3]) -> [(&'static str, Value); 3] {
    let bodies = [
        (CHAT, json!({"messages": user("q"), "max_tokens": 2})),
        (RESPONSES, json!({"input": "q", "max_output_tokens": 2})),
        (MESSAGES, json!({"messages": user("q"), "max_tokens": 2})),
    ];
    let mut merge = merge.into_iter();
    bodies.map(|(path, mut body)| {
        let more = merge.next().unwrap_or_default();
        body.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap_or_default());
        (path, body)
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_developer_role_becomes_system_unless_the_template_has_it() {
    let with_developer =
        TEMPLATE.replace("{{ m.role }}", "{{ 'Developer' if m.role == 'developer' else m.role }}");
    for (template, role) in [(TEMPLATE, "system"), (&with_developer, "Developer")] {
        let (rig, worker, _dir) = rig(template).await;
        let messages = json!([{"role": "developer", "content": "d"}, {"role": "user", "content": "q"}]);
        for (path, body) in [
            (CHAT, json!({"messages": messages, "max_tokens": 1})),
            (RESPONSES, json!({"input": messages, "max_output_tokens": 1})),
        ] {
            ok(&post(rig.at.http, path, &body).await);
            let expected = format!("<bos><|im_start|>{role}\nd<|im_end|>\n<|im_start|>user\nq<|im_end|>\n");
            assert!(prompt(&worker).starts_with(&expected), "{path}: {}", prompt(&worker));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_effort_reaches_the_template_in_every_dialect() {
    let (rig, worker, _dir) = rig(TEMPLATE).await;
    for (effort, expected) in [
        ("low", "[low]"),
        ("medium", "[medium]"),
        ("high", "[high]"),
        ("xhigh", "[high]"),
        ("max", "[high]"),
        ("none", "[False]"),
        ("minimal", "[False]"),
    ] {
        let chat = json!({"reasoning_effort": effort});
        let responses = json!({"reasoning": {"effort": effort}});
        for (path, body) in bodies([chat, responses, json!({"output_config": {"effort": effort}})]) {
            ok(&post(rig.at.http, path, &body).await);
            assert!(prompt(&worker).contains(expected), "{path} {effort}: {}", prompt(&worker));
        }
    }
    let body = json!({"messages": user("q"), "reasoning_effort": "some"});
    assert_eq!(post(rig.at.http, CHAT, &body).await.error().2, "reasoning_effort");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokenize_agrees_with_the_prompt_of_a_chat() {
    let (rig, worker, _dir) = rig(TEMPLATE).await;
    let function =
        json!({"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}});
    let more = [
        json!({}),
        json!({"tools": [{"type": "function", "function": function}]}),
        json!({"tools": [{"type": "function", "function": function}], "tool_choice": "none"}),
        json!({"documents": [{"id": "a", "text": "A"}, {"id": "b", "text": "B"}]}),
        json!({"reasoning_effort": "low"}),
        json!({"chat_template_kwargs": {"enable_thinking": false}}),
        json!({"add_special_tokens": false}),
        json!({"add_generation_prompt": false}),
        json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "So"}],
            "continue_final_message": true}),
    ];
    let mut prompts = Vec::new();
    for more in more {
        let mut body = json!({"messages": user("q <|im_end|>"), "max_tokens": 1});
        body.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
        let tokenized = ok(&post(rig.at.http, "/tokenize", &body).await);
        ok(&post(rig.at.http, CHAT, &body).await);
        let sent = worker.requests().last().unwrap().prompt.to_vec();
        assert_eq!((&tokenized["tokens"], &tokenized["count"]), (&json!(sent), &json!(sent.len())), "{more}");
        prompts.push(sent);
    }
    // Each of these fields changes the prompt, except tools that may not be called.
    prompts.sort();
    prompts.dedup();
    assert!(prompts.len() >= 8, "{}", prompts.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_message_is_continued() {
    let (rig, worker, _dir) = rig(TEMPLATE).await;
    let conversation =
        |role: &str, text: &str| json!([{"role": "user", "content": "q"}, {"role": role, "content": text}]);
    let body =
        |messages: &Value| json!({"messages": messages, "continue_final_message": true, "max_tokens": 2});
    ok(&post(rig.at.http, CHAT, &body(&conversation("assistant", "It is"))).await);
    let expected = "<bos><|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nIt is";
    assert_eq!(prompt(&worker), expected);
    // In Anthropic's API a last message of the assistant means this.
    ok(&post(rig.at.http, "/v1/messages", &body(&conversation("assistant", "It is"))).await);
    assert_eq!(prompt(&worker), expected);
    for messages in [conversation("user", "q"), conversation("assistant", " "), json!([])] {
        let refused = post(rig.at.http, CHAT, &body(&messages)).await.error();
        assert_eq!(refused.0, 400, "{messages}");
    }
    let mut both = body(&conversation("assistant", "It is"));
    both["add_generation_prompt"] = json!(true);
    assert_eq!(post(rig.at.http, CHAT, &both).await.error().2, "continue_final_message");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_is_truncated_at_its_beginning() {
    let (rig, worker, _dir) = rig(TEMPLATE).await;
    let long = "q".repeat(2 * MAX_MODEL_LEN as usize);
    let chat = json!({"messages": user(&long), "max_tokens": 2});
    assert_eq!(post(rig.at.http, CHAT, &chat).await.error().0, 400);
    let completion = json!({"prompt": long, "max_tokens": 2});
    for (path, mut body) in [(CHAT, chat), ("/v1/completions", completion)] {
        for (limit, kept) in [(json!(5), 5), (json!(-1), MAX_MODEL_LEN as usize - 2)] {
            body["truncate_prompt_tokens"] = limit;
            ok(&post(rig.at.http, path, &body).await);
            assert_eq!(worker.requests().last().unwrap().prompt.len(), kept, "{path}");
        }
    }
    assert!(prompt(&worker).ends_with("qqq"));
}

/// Also for an answer that the coordinator parses.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_string_is_included_on_request() {
    let (rig, worker, _dir) = rig(TEMPLATE).await;
    let function = json!({"name": "f", "parameters": {"type": "object", "properties": {}}});
    let mut body = json!({
        "messages": user("q"), "max_tokens": 40, "tools": [{"type": "function", "function": function}],
    });
    ok(&post(rig.at.http, CHAT, &body).await);
    let all = letters(&worker.requests().last().unwrap().prompt, 40);
    let stop = &all[10..12];
    let before = &all[..all.find(stop).unwrap()];
    body["stop"] = json!([stop]);
    for (included, expected) in [(false, before.to_owned()), (true, format!("{before}{stop}"))] {
        body["include_stop_str_in_output"] = json!(included);
        let answer = ok(&post(rig.at.http, CHAT, &body).await);
        let choice = &answer["choices"][0];
        assert_eq!(choice["message"]["content"], expected);
        assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &json!(stop)));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_top_p_of_0_selects_the_most_likely_token() {
    let (rig, worker, _dir) = rig(TEMPLATE).await;
    let zero = json!({"top_p": 0, "temperature": 1});
    for (path, body) in bodies([zero.clone(), zero.clone(), zero]) {
        ok(&post(rig.at.http, path, &body).await);
        let sampling = worker.requests().last().unwrap().sampling.clone();
        assert_eq!((sampling.top_p, sampling.temperature), (f32::MIN_POSITIVE, 1.0), "{path}");
    }
    for wrong in [json!(-0.1), json!(1.1)] {
        let body = json!({"prompt": [1], "top_p": wrong});
        assert_eq!(post(rig.at.http, "/v1/completions", &body).await.error().2, "top_p");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_has_no_vector() {
    let (rig, [worker]) = Rig::with_task::<1>(ModelTask::Embed { width: 8 }, |_| {}).await;
    for (input, field) in [
        (json!(""), "input[0]"),
        (json!(["a", ""]), "input[1]"),
        (json!([[1], []]), "input[1]"),
        (json!([]), "input"),
    ] {
        let refused = post(rig.at.http, "/v1/embeddings", &json!({"input": input})).await.error();
        assert_eq!(refused, (400, "invalid_field".into(), field.into()), "{input}");
    }
    assert_eq!(worker.counters().received, 0);
}

/// A chat that cannot fit into the context is refused before its template is rendered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chat_that_cannot_fit_is_not_rendered() {
    let template = "{{ raise_exception('it was rendered') }}";
    let (rig, worker, _dir) = rig(template).await;
    let long = "a".repeat(4 << 20);
    let system = json!([{"role": "system", "content": long}, {"role": "user", "content": "q"}]);
    for messages in [user(&long), system] {
        let refused = post(rig.at.http, CHAT, &json!({"messages": messages, "max_tokens": 1})).await;
        assert_eq!(refused.error(), (400, "context_length_exceeded".into(), String::new()));
        let pinned = post(rig.at.ops, "/admin/v1/prefixes", &json!({ "messages": messages })).await;
        assert_eq!(pinned.error(), (400, "context_length_exceeded".into(), String::new()));
    }
    // Content that a template may leave out does not count.
    let blank = " ".repeat(4 << 20);
    let thought = json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": long}]);
    for messages in [user(&blank), thought] {
        let refused = post(rig.at.http, CHAT, &json!({"messages": messages, "max_tokens": 1})).await;
        assert!(refused.text().contains("it was rendered"), "{}", refused.text());
    }
    assert_eq!(worker.counters().received, 0);
}
