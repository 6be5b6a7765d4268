//! Fuzz targets: whatever the bytes are, a reader answers or refuses, without a panic and within its memory
//! and time. `tests/fuzz/corpus` has inputs that mutants are made of, `tests/fuzz/findings` those that
//! once failed. See "Fuzz" in CONTRIBUTING.md.
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod driver;
mod mutate;
/// A sample of every message, with the function that decodes and encodes it.
#[path = "../../proto/transport/tests/suite"]
mod suite {
    #[allow(dead_code, reason = "the samples' other users are in the suite")]
    pub(crate) mod samples;
}

extern crate proto as kvasir_proto;
extern crate transport as kvasir_transport;

use api::auth::Keys;
use api::documents::Popularity;
use api::limits::{MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH};
use api::plan::{self, Effort, Kind, Sources};
use api::{embeddings, rerank};
use consensus::message::Frame;
use dispatch::models::{ModelEntry, Models};
use model::ModelFile;
use model::checkpoint::lora::LoraAdapter;
use model::costs::ModelCosts;
use model::inspect::Summary;
use model::spec::{AssistantSpec, ModelSpec, MtpHeadSpec};
use proto::block::ClusterKey;
use proto::codec::{Cap, CodecError, decode};
use proto::event::{KvFrame, decode_kv_frame};
use proto::ids::ModelId;
use proto::served_model::{ModelTask, ServedModel};
use text::Tokenizer;
use text::chat_template::{ChatTemplate, Message};
use text::dialect;
use text::json_schema;

use driver::{fuzz, scratch};
use kvasir_cluster_tests::binary::{kvasir, workspace};
use kvasir_cluster_tests::fixtures;
use serde_json::{Map, Value, json};
use std::fmt::Display;
use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

/// `ok`, or the error's text.
fn outcome<T>(result: Result<T, impl Display>) -> String {
    result.map_or_else(|error| error.to_string(), |_| "ok".to_owned())
}

/// Reads all of an open model that loading reads, but its weights.
fn read_model(file: &ModelFile) -> String {
    let spec = ModelSpec::from_file(file).map(|spec| {
        let costs = ModelCosts::of_file(&spec, file);
        drop(costs.range(0..costs.layers()));
    });
    let tokenizer = Tokenizer::from_metadata(file.metadata()).and_then(|tokenizer| {
        let ids = tokenizer.encode("Hello wörld, 123 <|im_end|></s>\n\n ▁😀", true);
        drop((tokenizer.decode(&ids, false), tokenizer.decode(&ids, true), tokenizer.digest()));
        ChatTemplate::from_metadata(file.metadata(), &tokenizer)
    });
    let mtp_head = MtpHeadSpec::from_file(file);
    [
        outcome(spec),
        outcome(tokenizer),
        outcome(mtp_head),
        outcome(AssistantSpec::from_file(file)),
        outcome(Summary::of(file)),
    ]
    .concat()
}

/// Models of the oracle set. Mutants are made of what precedes their tensors' data.
const HEADERS: [&str; 21] = [
    "tiny/bert-rerank/bert-rerank-f32.gguf",
    "tiny/bert/bert-f32.gguf",
    "tiny/gemma3/gemma3-f32.gguf",
    "tiny/gemma4-assistant/gemma4-assistant-f32.gguf",
    "tiny/gemma4/gemma4-f32.gguf",
    "tiny/gemma4moe/gemma4moe-f32.gguf",
    "tiny/gpt-oss/gpt-oss-f32.gguf",
    "tiny/granitehybrid-dense/granitehybrid-dense-f32.gguf",
    "tiny/granitehybrid/granitehybrid-f32.gguf",
    "tiny/llama/llama-f32.gguf",
    "tiny/llama3rope/llama3rope-f32.gguf",
    "tiny/qwen2/qwen2-f32.gguf",
    "tiny/qwen2moe/qwen2moe-f32.gguf",
    "quant/qwen3-q/qwen3-q-nvfp4.gguf",
    "quant/qwen3-q/qwen3-q-q4_k_m.gguf",
    "tiny/qwen3/qwen3-f32.gguf",
    "tiny/qwen35/qwen35-f32.gguf",
    "tiny/qwen35moe/qwen35moe-f32.gguf",
    "quant/qwen3moe-q/qwen3moe-q-mxfp4_moe.gguf",
    "tiny/qwen3moe/qwen3moe-f32.gguf",
    "tiny/qwen3next/qwen3next-f32.gguf",
];

/// A GGUF file up to its tensors' data.
fn header(name: &str) -> Vec<u8> {
    let path = fixtures::root().join(name);
    let (mut bytes, file) = (fs::read(&path).unwrap(), ModelFile::open(&path).unwrap());
    let data: u64 = file.tensors().map(|info| info.bytes().next_multiple_of(32)).sum();
    bytes.truncate(bytes.len() - data as usize);
    bytes
}

#[test]
fn gguf() {
    let path = scratch("gguf").join("model.gguf");
    fuzz("gguf", HEADERS.map(header).into(), mutate::gguf, |input| match mutate::open_gguf(&path, input) {
        Ok(file) => read_model(&file),
        Err(error) => error.to_string().replace(path.to_str().unwrap(), ""),
    });
}

#[test]
fn safetensors() {
    let folder = scratch("safetensors");
    let config = json!({
        "model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "max_position_embeddings": 16, "type_vocab_size": 2,
        "layer_norm_eps": 1e-12, "hidden_act": "gelu",
    });
    let pooling = json!({"word_embedding_dimension": 8, "pooling_mode_mean_tokens": true});
    fs::create_dir(folder.join("1_Pooling")).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    fs::write(folder.join("1_Pooling/config.json"), pooling.to_string()).unwrap();
    fs::write(folder.join("vocab.txt"), "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\nw\n##or\n##ld\n1\n,\n!")
        .unwrap();
    let path = folder.join("model.safetensors");
    fuzz("safetensors", Vec::new(), mutate::safetensors, |input| {
        drop(fs::remove_file(&path));
        fs::write(&path, input).unwrap();
        match ModelFile::open(&path) {
            Ok(file) => read_model(&file),
            Err(error) => error.to_string().replace(path.to_str().unwrap(), ""),
        }
    });
}

/// Largest file of a checkpoint whose tensors a mutant has, in bytes.
const MAX_CHECKPOINT: u64 = 4 << 20;

/// Writes settings and tensors: `{"config": CONFIG, "tensors": {NAME: [DTYPE, SHAPE]}}`, all values 0.
fn write_folder(folder: &std::path::Path, [settings, weights]: [&str; 2], input: &[u8]) -> Option<()> {
    let input: Value = serde_json::from_slice(input).ok()?;
    let (mut header, mut end) = (Map::new(), 0_u64);
    for (name, tensor) in input.get("tensors")?.as_object()? {
        let (dtype, shape) = (tensor.get(0)?, tensor.get(1)?);
        let size = match dtype.as_str()? {
            "F32" | "I32" => 4,
            "F16" | "BF16" => 2,
            "I64" => 8,
            _ => 1,
        };
        let dims = shape.as_array()?.iter().map(|dim| dim.as_u64().unwrap_or(0));
        let bytes = dims.fold(size, u64::saturating_mul);
        let start = end;
        end = end.checked_add(bytes).filter(|end| *end <= MAX_CHECKPOINT)?;
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]}));
    }
    let header = Value::Object(header).to_string();
    let header = format!("{header:<0$}", header.len().next_multiple_of(8));
    fs::write(folder.join(settings), input.get("config")?.to_string()).unwrap();
    let path = folder.join(weights);
    drop(fs::remove_file(&path));
    let mut file = fs::File::create(&path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + end).unwrap();
    Some(())
}

#[test]
fn checkpoint() {
    let folder = scratch("checkpoint");
    fuzz("checkpoint", Vec::new(), mutate::json, |input| {
        if write_folder(&folder, ["config.json", "model.safetensors"], input).is_none() {
            return "no folder".to_owned();
        }
        match ModelFile::open(&folder) {
            Ok(file) => {
                let data =
                    file.tensors().map(|info| outcome(file.tensor_data(info.name()))).collect::<String>();
                read_model(&file) + &data.replace("ok", "")
            }
            Err(error) => error.to_string().replace(folder.to_str().unwrap(), ""),
        }
    });
}

#[test]
fn adapter() {
    let folder = scratch("adapter");
    let base = ModelFile::open(workspace().join("tests/fixtures/tiny/llama/llama-f32.gguf")).unwrap();
    let spec = ModelSpec::from_file(&base).unwrap();
    fuzz("adapter", Vec::new(), mutate::json, |input| {
        if write_folder(&folder, ["adapter_config.json", "adapter_model.safetensors"], input).is_none() {
            return "no folder".to_owned();
        }
        match LoraAdapter::open(&folder, &base, &spec) {
            Ok(adapter) => format!("{} matrices, rank {}", adapter.matrices.len(), adapter.rank()),
            Err(error) => error.to_string().replace(folder.to_str().unwrap(), ""),
        }
    });
}

#[test]
fn codec() {
    let messages = suite::samples::all();
    let seeds = messages.iter().flat_map(|message| message.bytes.iter().cloned()).collect();
    let index = |error: &CodecError| match error {
        CodecError::TooLong { .. } => 0,
        CodecError::CutShort { .. } => 1,
        CodecError::Trailing { .. } => 2,
        CodecError::UnknownVariant { .. } => 3,
        CodecError::Invalid { .. } => 4,
    };
    fuzz("codec", seeds, mutate::bytes, |input| {
        let mut outcome = String::new();
        for message in &messages {
            let recoded = (message.recode)(input, message.cap);
            if let Ok(bytes) = &recoded {
                let again = (message.recode)(bytes, message.cap);
                assert_eq!(again.as_ref(), Ok(bytes), "{}: not a fixed point", message.name);
            }
            outcome.push(char::from(b'a' + recoded.as_ref().map_or_else(index, |_| 5)));
        }
        if let Ok(frame) = Frame::from_bytes(input) {
            let bytes = frame.to_bytes().unwrap();
            assert_eq!(Frame::from_bytes(&bytes), Ok(frame), "a coordinator's frame");
            outcome.push('!');
        }
        // Their errors differ in words.
        let by_hand = decode_kv_frame(input).ok();
        assert_eq!(by_hand, decode::<KvFrame>(input, Cap::Events).ok(), "KvFrame by hand");
        outcome
    });
}

#[test]
fn http() {
    let folder = scratch("http");
    let chat = fs::read(workspace().join("tests/fuzz/corpus/gguf/llama-chat.gguf")).unwrap();
    let tasks = [
        ("m", chat, ModelTask::Generate),
        ("e", header("tiny/bert/bert-f32.gguf"), ModelTask::Embed { width: 64 }),
        ("r", header("tiny/bert-rerank/bert-rerank-f32.gguf"), ModelTask::Rerank { scores: 1 }),
    ];
    let entries = tasks.each_ref().map(|(id, file, _)| {
        let path = folder.join(format!("{id}.gguf"));
        mutate::open_gguf(&path, file).unwrap();
        ModelEntry { id: ModelId::new(*id).unwrap(), path }
    });
    let models = Models::open(&entries, false).unwrap();
    let served = |id: &ModelId| {
        let &(_, _, task) = tasks.iter().find(|(name, _, _)| *name == id.as_str())?;
        let tokenizer_digest = models.get(id.as_str())?.tokenizer.digest();
        Some(ServedModel {
            id: id.clone(),
            model_digest: [1; 32],
            tokenizer_digest,
            max_model_len: 512,
            layers: (0, 2),
            engine: "kvasir".into(),
            hit_tokens: 16,
            numeric_class: "cpu".to_owned(),
            block_tokens: 16,
            task,
        })
    };
    // Without keys every caller is accepted.
    let keys = Keys::new(&[], ClusterKey([3; 32]), None).unwrap();
    let caller = keys.authenticate(&Default::default()).unwrap();
    let popularity = Popularity::default();
    let sources = Sources {
        caller: &caller,
        models: &models,
        served: &served,
        parent: &|_| None,
        seed: 1,
        popularity: &popularity,
        fetched: None,
    };
    let offered = models.get("m").unwrap();
    fuzz("http", Vec::new(), mutate::json, |body| {
        let kinds = Kind::ALL;
        let efforts = [Effort::Short, Effort::Full { counted: false }];
        let generations = kinds.into_iter().flat_map(|kind| efforts.map(|effort| (kind, effort)));
        let mut outcomes: Vec<String> = generations
            .map(|(kind, effort)| outcome(plan::generation(kind, body, &sources, effort)))
            .collect();
        outcomes.push(outcome(plan::count_tokens(body, &sources)));
        outcomes.push(outcome(plan::tokenize(body, &sources)));
        outcomes.push(outcome(plan::detokenize(body, &sources)));
        outcomes.push(outcome(plan::prefix(body, &offered, 512)));
        outcomes.push(outcome(embeddings::plan(body, &sources)));
        outcomes.push(outcome(rerank::plan(body, &sources)));
        // The API that reads furthest has the outcome that matters.
        outcomes
            .iter()
            .find(|text| *text == "ok")
            .or(outcomes.iter().max_by_key(|text| text.len()))
            .cloned()
            .unwrap()
    });
}

fn depth(value: &Value) -> usize {
    match value {
        Value::Object(members) => 1 + members.values().map(depth).max().unwrap_or(0),
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// Compiles a grammar as workers do before they compile it themselves: in a process that ends by a signal when
/// it takes too much.
fn compile(syntax: &str, text: &str) -> String {
    let names = json!({"tokens": 300, "named": [[258, "<tool>"], [299, "</s>"]], "ends": [299]});
    let task = json!({"syntax": syntax, "text": text, "names": names}).to_string();
    let mut child = Command::new(kvasir().unwrap())
        .arg("try-grammar")
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(task.as_bytes()).unwrap();
    let ended = child.wait_with_output().unwrap();
    let code = ended.status.code();
    assert!(matches!(code, None | Some(0)), "{syntax}: {}", String::from_utf8_lossy(&ended.stderr));
    format!("{syntax} {}", code.is_some())
}

#[test]
fn schema() {
    fuzz("schema", Vec::new(), mutate::json, |input| {
        let Ok(text) = str::from_utf8(input) else { return "not UTF-8".to_owned() };
        if text.len() > MAX_SCHEMA_BYTES {
            return "too long".to_owned();
        }
        let Ok(schema) = serde_json::from_str::<Value>(text) else {
            return compile("Regex", text) + &compile("Lark", text);
        };
        if depth(&schema) > MAX_SCHEMA_DEPTH {
            return "too deep".to_owned();
        }
        let strict = json_schema::prepare(&schema, true);
        let lenient = json_schema::prepare(&schema, false).unwrap();
        let _ = json_schema::declares_none(&schema);
        let compiled = compile("JsonSchema", &dialect::schema(&lenient, true).to_string());
        compiled + &strict.map_or_else(|refused| refused.reason, |_| "ok".to_owned())
    });
}

#[test]
fn chat_template() {
    let fixture = fs::read(workspace().join("tests/fixtures/templates/snippets.json")).unwrap();
    let fixture: Value = serde_json::from_slice(&fixture).unwrap();
    let all: Vec<Message<'_>> = serde_json::from_value(fixture["messages"].clone()).unwrap();
    let tools = fixture["tools"].as_array().unwrap();
    let extra = fixture["extra"].as_object().unwrap();
    let plain =
        [Message::new("user", "Hi <|im_end|>"), Message::new("assistant", "<think>\nhm"), all[1].clone()];
    fuzz("chat_template", Vec::new(), mutate::text, |input| {
        let source = String::from_utf8_lossy(input);
        let template = match ChatTemplate::new(&source, "<s>", "</s>") {
            Ok(template) => template,
            Err(error) => return error.to_string(),
        };
        let first = template.render(&plain, None, true, &Map::new());
        // The second time by the memo of the template's constant parts.
        let second = template.render(&plain, None, true, &Map::new());
        if let (Ok(first), Ok(second), false) = (&first, &second, source.contains("strftime")) {
            assert_eq!(first, second, "rendered again");
        }
        drop(template.render_shortly(&plain, true));
        outcome(template.render(&all, Some(tools), false, extra)) + &outcome(first)
    });
}
