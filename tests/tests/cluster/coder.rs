//! Real instruct models call tools, answer by a schema, write code and fill gaps. The larger one: `./test coder`.

use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::http;
use serde_json::{Value, json};
use std::process::Command;

fn chat(cluster: &Cluster, fields: Value) -> Value {
    let mut body = json!({"model": cluster.model(), "temperature": 0, "max_tokens": 256});
    for (key, value) in fields.as_object().unwrap() {
        body[key] = value.clone();
    }
    let answer = http::post(cluster.http(), "/v1/chat/completions", &body).unwrap().ok().unwrap();
    answer["choices"][0].clone()
}

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

/// The weather tool is called for the right city, and its result is told.
fn calls_a_tool(cluster: &Cluster) {
    let parameters = json!({
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": false,
    });
    let tools = json!([{"type": "function", "function": {
        "name": "get_weather", "description": "Tells the current weather of a city.", "parameters": parameters}}]);
    let mut messages = user("What is the weather in Paris, in celsius?");
    // By themselves these models write calls as code blocks, and not in the form of their own template.
    let forced = json!({"tool_choice": "required", "parallel_tool_calls": false, "messages": messages, "tools": tools});
    let answer = chat(cluster, forced);
    assert_eq!(answer["finish_reason"], "tool_calls", "{answer}");
    let call = &answer["message"]["tool_calls"][0];
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(call["function"]["name"], "get_weather", "{answer}");
    assert!(arguments["city"].as_str().unwrap().contains("Paris"), "{arguments}");
    assert_eq!(arguments["unit"], "celsius", "{arguments}");
    let result = json!({"role": "tool", "tool_call_id": call["id"], "content": "{\"degrees\": 17, \"sky\": \"clear\"}"});
    messages.as_array_mut().unwrap().extend([answer["message"].clone(), result]);
    let answer = chat(cluster, json!({"messages": messages, "tools": tools}));
    assert!(answer["message"]["content"].as_str().is_some_and(|text| text.contains("17")), "{answer}");
}

/// The same over Ollama's API, whose calls have objects as arguments and whose results name their tool.
fn calls_a_tool_over_ollamas_api(cluster: &Cluster) {
    let parameters =
        json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    let tools = json!([{"type": "function", "function": {
        "name": "get_weather", "description": "Tells the current weather of a city.", "parameters": parameters}}]);
    let mut messages = user("What is the weather in Paris, in celsius?");
    let ask = |messages: &Value, choice: &str| {
        let body = json!({"model": cluster.model(), "messages": messages, "tools": tools, "tool_choice": choice,
            "stream": false, "options": {"temperature": 0, "num_predict": 128}});
        http::post(cluster.http(), "/api/chat", &body).unwrap().ok().unwrap()
    };
    let answer = ask(&messages, "required");
    let call = &answer["message"]["tool_calls"][0]["function"];
    assert!(call["arguments"]["city"].as_str().is_some_and(|city| city.contains("Paris")), "{answer}");
    let result = json!({"role": "tool", "tool_name": call["name"], "content": "{\"degrees\": 17, \"sky\": \"clear\"}"});
    messages.as_array_mut().unwrap().extend([answer["message"].clone(), result]);
    let answer = ask(&messages, "auto");
    assert!(answer["message"]["content"].as_str().is_some_and(|text| text.contains("17")), "{answer}");
}

/// The facts of a text are put into the fields of a schema.
fn answers_by_a_schema(cluster: &Cluster) {
    let schema = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "languages": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "age", "languages"],
        "additionalProperties": false,
    });
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "person", "strict": true, "schema": schema}});
    let text = "Extract the person as JSON: Anna is 31 years old. She writes Rust and Python.";
    let answer = chat(cluster, json!({"messages": user(text), "response_format": format}));
    let person: Value = serde_json::from_str(answer["message"]["content"].as_str().unwrap()).unwrap();
    assert_eq!(person, json!({"name": "Anna", "age": 31, "languages": ["Rust", "Python"]}));
}

/// A function that the model writes passes checks.
fn writes_code(cluster: &Cluster) {
    let text = "Write a Python function `is_prime(n)` that returns whether the integer n is prime. Answer with one code block.";
    let answer = chat(cluster, json!({"messages": user(text)}));
    let content = answer["message"]["content"].as_str().unwrap();
    let code = content.split("```python\n").nth(1).and_then(|rest| rest.split("```").next());
    let code = code.unwrap_or_else(|| panic!("no code block: {content}"));
    let checks = "assert [n for n in range(-3, 60) if is_prime(n)] == [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59]";
    let mut python = Command::new("timeout");
    let output = python.args(["20", "python3", "-I", "-c", &format!("{code}\n{checks}")]).output().unwrap();
    assert!(output.status.success(), "{content}\n{}", String::from_utf8_lossy(&output.stderr));
}

/// A gap in a file is filled from both sides.
fn fills_a_gap(cluster: &Cluster) {
    let prompt = "<|fim_prefix|>def area(width, height):\n    return <|fim_suffix|>\n\nprint(area(2, 3))\n<|fim_middle|>";
    let body = json!({"model": cluster.model(), "temperature": 0, "stop": "\n", "prompt": prompt});
    let answer = http::post(cluster.http(), "/v1/completions", &body).unwrap().ok().unwrap();
    assert_eq!(answer["choices"][0]["text"].as_str().map(str::trim), Some("width * height"), "{answer}");
}

fn model_works(model: &str) {
    let cluster = Cluster::builder(model, model).start().unwrap();
    calls_a_tool(&cluster);
    calls_a_tool_over_ollamas_api(&cluster);
    answers_by_a_schema(&cluster);
    writes_code(&cluster);
    fills_a_gap(&cluster);
}

#[test]
fn qwen_coder_of_half_a_billion() {
    model_works("qwen2.5-coder-0.5b");
}

#[test]
#[ignore = "pulls and computes a model of 1.1 GB: `./test coder`"]
fn qwen_coder_of_one_and_a_half_billion() {
    model_works("qwen2.5-coder-1.5b");
}
