//! The tiny encoder of the oracle set, as the checkpoint that it was converted from.

use std::fs;
use std::path::PathBuf;

use serde_json::{Value as Json, json};
use tempfile::TempDir;

use crate::test_files::fixture;
use crate::{Error, ModelFile, ModelSpec};
use text::Tokenizer;

const NAMES: [(&str, &str); 12] = [
    ("token_embd_norm", "embeddings.LayerNorm"),
    ("token_embd", "embeddings.word_embeddings"),
    ("position_embd", "embeddings.position_embeddings"),
    ("token_types", "embeddings.token_type_embeddings"),
    ("attn_output_norm", "attention.output.LayerNorm"),
    ("layer_output_norm", "output.LayerNorm"),
    ("attn_q", "attention.self.query"),
    ("attn_k", "attention.self.key"),
    ("attn_v", "attention.self.value"),
    ("attn_output", "attention.output.dense"),
    ("ffn_up", "intermediate.dense"),
    ("ffn_down", "output.dense"),
];

fn original_name(name: &str) -> String {
    let (gguf, hf) =
        NAMES.iter().find(|(gguf, _)| name.split('.').any(|component| component == *gguf)).unwrap();
    name.replace(gguf, hf).replace("blk.", "encoder.layer.")
}

/// A checkpoint in its own folder.
struct Checkpoint {
    dir: TempDir,
}

impl Checkpoint {
    /// `change` receives the header of the tensors.
    fn write(change: impl FnOnce(&mut serde_json::Map<String, Json>)) -> Self {
        let gguf = ModelFile::open(fixture("tiny/bert/bert-f32.gguf")).unwrap();
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        for info in gguf.tensors() {
            let start = data.len();
            data.extend_from_slice(&gguf.tensor_data(info.name()).unwrap());
            let shape: Vec<u64> = info.dims().iter().rev().copied().collect();
            let entry = json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]});
            header.insert(original_name(info.name()), entry);
        }
        let start = data.len();
        data.extend([0; 64]);
        for name in ["embeddings.position_ids", "pooler.dense.weight"] {
            let start = if name.starts_with('p') { start + 32 } else { start };
            let entry = json!({"dtype": "I64", "shape": [1, 4], "data_offsets": [start, start + 32]});
            header.insert(name.to_owned(), entry);
        }
        change(&mut header);
        let header = Json::Object(header).to_string();
        let header = format!("{header:<0$}", header.len().next_multiple_of(8));
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = Self { dir };
        let length = (header.len() as u64).to_le_bytes();
        fs::write(checkpoint.weights(), [&length[..], header.as_bytes(), &data].concat()).unwrap();
        let reference: Json =
            serde_json::from_slice(&fs::read(fixture("tiny/bert/ref.json")).unwrap()).unwrap();
        checkpoint.put("config.json", &reference["config"].to_string());
        let pooling = json!({"word_embedding_dimension": 64, "pooling_mode_mean_tokens": true,
            "pooling_mode_cls_token": false, "pooling_mode_max_tokens": false});
        checkpoint.put("1_Pooling/config.json", &pooling.to_string());
        let tokens: &metadata::Strings = gguf.metadata().require("tokenizer.ggml.tokens").unwrap();
        let line = |token: &str| match token.strip_prefix('\u{2581}') {
            Some(word) => format!("{word}\n"),
            None if token.starts_with('[') => format!("{token}\n"),
            None => format!("##{token}\n"),
        };
        checkpoint.put("vocab.txt", &tokens.iter().map(line).collect::<String>());
        checkpoint
    }

    fn good() -> Self {
        Self::write(|_| {})
    }

    fn weights(&self) -> PathBuf {
        self.dir.path().join("model.safetensors")
    }

    fn put(&self, file: &str, text: &str) {
        let path = self.dir.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn open(&self) -> Result<ModelFile, Error> {
        ModelFile::open(self.weights())
    }

    fn error(&self) -> String {
        self.open().map(drop).unwrap_err().to_string()
    }
}

#[test]
fn a_checkpoint_is_the_model_that_it_is_converted_to() {
    let checkpoint = Checkpoint::good();
    let (file, gguf) =
        (checkpoint.open().unwrap(), ModelFile::open(fixture("tiny/bert/bert-f32.gguf")).unwrap());
    assert_eq!(ModelSpec::from_file(&file).unwrap(), ModelSpec::from_file(&gguf).unwrap());
    assert_eq!(file.tensors().len(), gguf.tensors().len());
    for info in gguf.tensors() {
        let found = file.tensor(info.name()).unwrap();
        assert_eq!((found.ty(), found.dims()), (info.ty(), info.dims()), "{}", info.name());
        assert_eq!(file.tensor_data(info.name()).unwrap(), gguf.tensor_data(info.name()).unwrap());
    }
    let tokenizer = Tokenizer::from_metadata(file.metadata()).unwrap();
    let expected = Tokenizer::from_metadata(gguf.metadata()).unwrap();
    assert_eq!(tokenizer.digest(), expected.digest());
    let text = "Hello, naïve café! 你好 <x> [SEP]";
    let ids = tokenizer.with_ends(tokenizer.encode(text, true));
    assert_eq!(ids, expected.with_ends(expected.encode(text, true)));
    assert_eq!(ids.iter().filter(|&&id| Some(id) == tokenizer.eos()).count(), 2);
    assert_eq!(file.digest().unwrap(), checkpoint.open().unwrap().digest().unwrap());
}

#[test]
fn settings_that_are_not_served_are_named() {
    let config = |key: &str, value: Json| {
        let checkpoint = Checkpoint::good();
        let path = checkpoint.dir.path().join("config.json");
        let mut config: Json = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config[key] = value;
        checkpoint.put("config.json", &config.to_string());
        checkpoint.error()
    };
    assert!(config("model_type", "electra".into()).contains(r#"model_type is "electra", expected bert, "#));
    assert!(config("hidden_act", "relu".into()).contains("hidden_act is"));
    assert!(config("position_embedding_type", "relative_key".into()).contains("position_embedding_type is"));
    assert!(config("hidden_size", "many".into()).contains("invalid type"));

    let pooling = |text: &str| {
        let checkpoint = Checkpoint::good();
        checkpoint.put("1_Pooling/config.json", text);
        checkpoint.error()
    };
    assert!(
        pooling(r#"{"word_embedding_dimension": 32, "pooling_mode_mean_tokens": true}"#)
            .contains("word_embedding_dimension is 32, expected 64")
    );
    for modes in [r#""pooling_mode_max_tokens": true"#, r#""pooling_mode_mean_tokens": false"#] {
        assert!(
            pooling(&format!(r#"{{"word_embedding_dimension": 64, {modes}}}"#)).contains("pooling_mode_")
        );
    }
    let modules = |last: &str| {
        let checkpoint = Checkpoint::good();
        let module = |name: &str| json!({"idx": 0, "path": "", "type": format!("sentence_transformers.models.{name}")});
        let list = ["Transformer", "Pooling", last].map(module);
        checkpoint.put("modules.json", &json!(list).to_string());
        checkpoint
    };
    modules("Normalize").open().unwrap();
    assert!(modules("Dense").error().contains(r#"type is "sentence_transformers.models.Dense", expected"#));
    let checkpoint = Checkpoint::good();
    checkpoint.put("tokenizer_config.json", r#"{"do_lower_case": true, "strip_accents": false}"#);
    assert!(checkpoint.error().contains("strip_accents is false, expected true"));
    checkpoint.put("tokenizer_config.json", r#"{"do_lower_case": false, "strip_accents": null}"#);
    let cased = Tokenizer::from_metadata(checkpoint.open().unwrap().metadata()).unwrap();
    let uncased = Tokenizer::from_metadata(Checkpoint::good().open().unwrap().metadata()).unwrap();
    assert_ne!(cased.encode("Hello", false), uncased.encode("Hello", false));
}

#[test]
fn files_that_are_missing_or_damaged_are_named() {
    for file in ["config.json", "vocab.txt", "1_Pooling/config.json"] {
        let checkpoint = Checkpoint::good();
        fs::remove_file(checkpoint.dir.path().join(file)).unwrap();
        let error = checkpoint.error();
        let named = if file == "vocab.txt" { "tokenizer.json" } else { file };
        assert!(error.starts_with("cannot open ") && error.contains(named), "{error}");
        fs::write(checkpoint.dir.path().join(file), b"\xff\xfe{").unwrap();
        assert!(checkpoint.error().contains("is not UTF-8"), "{file}");
    }
    let checkpoint = Checkpoint::good();
    checkpoint.put("config.json", "{\"model_type\": \"bert\"}");
    assert!(checkpoint.error().contains("missing field"), "{}", checkpoint.error());
    fs::write(checkpoint.weights(), [0; 4]).unwrap();
    assert!(Checkpoint::good().open().is_ok());
}

#[test]
fn tensors_that_no_model_has_are_refused() {
    let of_body = "embeddings.word_embeddings.weight";
    let error = |dtype: &str, shape: Json, bytes: u64| {
        // In the place of the position numbers, which are left out.
        Checkpoint::write(|header| {
            let free = header.remove("embeddings.position_ids").unwrap()["data_offsets"][0].as_u64().unwrap();
            let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [free, free + bytes]});
            header.insert(of_body.to_owned(), entry);
        })
        .error()
    };
    let found = error("I32", json!([2]), 8);
    assert_eq!(
        found,
        format!("tensor {of_body} has type I32; supported are F32, F16, BF16 and quantised matrices")
    );
    for shape in [json!([0, 4]), json!([1, 1, 1, 1, 1])] {
        let bytes = if shape == json!([0, 4]) { 0 } else { 4 };
        let found = error("F32", shape, bytes);
        assert!(found.contains("expected at most four dimensions"), "{found}");
    }
    let twice = Checkpoint::write(|header| {
        let entry = header.remove("embeddings.position_ids").unwrap();
        let empty = json!({"dtype": "F32", "shape": [8], "data_offsets": entry["data_offsets"]});
        header.insert(format!("bert.{of_body}"), empty);
    });
    assert!(twice.error().contains("are the same part of the model"), "{}", twice.error());
    let unknown = Checkpoint::write(|header| {
        let entry = header.remove("pooler.dense.weight").unwrap();
        let other = json!({"dtype": "F32", "shape": [8], "data_offsets": entry["data_offsets"]});
        header.insert("encoder.layer.0.adapter.weight".to_owned(), other);
    });
    let error = ModelSpec::from_file(&unknown.open().unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "architecture bert has no tensor encoder.layer.0.adapter.weight");
}

/// The texts of a repository's files become one tokenizer and one template.
#[test]
fn text_files_of_a_repository_are_metadata() {
    let dir = tempfile::tempdir().unwrap();
    let put = |file: &str, text: &str| fs::write(dir.path().join(file), text).unwrap();
    let template = |key: &str| {
        let metadata = super::tokenizer_metadata(dir.path()).unwrap();
        metadata.get::<&str>(key).unwrap().map(str::to_owned)
    };
    let error = || super::tokenizer_metadata(dir.path()).unwrap_err().to_string();
    assert!(error().contains("tokenizer.json"), "{}", error());
    let vocab = json!({"a": 0, "b": 1, "ab": 2, "<s>": 3});
    let tokens = json!([{"id": 3, "content": "<s>", "special": true}]);
    let tokenizer =
        json!({"added_tokens": tokens, "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]}});
    put("tokenizer.json", &tokenizer.to_string());
    assert_eq!(template("tokenizer.chat_template"), None);
    let named = json!([{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]);
    put("tokenizer_config.json", &json!({"bos_token": "<s>", "chat_template": named}).to_string());
    assert_eq!(template("tokenizer.chat_template").as_deref(), Some("one"));
    assert_eq!(template("tokenizer.chat_template.tool_use").as_deref(), Some("two"));
    put("chat_template.json", r#"{"chat_template": "three"}"#);
    assert_eq!(template("tokenizer.chat_template").as_deref(), Some("three"));
    put("chat_template.jinja", "{{ bos_token }}{{ messages[0]['content'] }}");
    put("generation_config.json", r#"{"eos_token_id": [2]}"#);
    let metadata = super::tokenizer_metadata(dir.path()).unwrap();
    assert!(!metadata.get::<&str>("tokenizer.huggingface.config").unwrap().unwrap().contains("one"));
    let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
    let template = text::ChatTemplate::from_metadata(&metadata, &tokenizer).unwrap().unwrap();
    let messages = [text::chat_template::Message::new("user", "ab<s>")];
    let prompt = template.render_marked(&messages, None, true, &serde_json::Map::new()).unwrap();
    assert_eq!(prompt.text, "<s>ab<s>");
    assert_eq!(tokenizer.encode_prompt(&prompt.text, &prompt.quoted).0, [3, 2]);
    assert!(tokenizer.is_eog(2));
    for wrong in ["7", r#"[{"name": "a"}]"#, r#"[{"name": "a b", "template": ""}]"#] {
        fs::remove_file(dir.path().join("chat_template.jinja")).ok();
        fs::remove_file(dir.path().join("chat_template.json")).ok();
        put("tokenizer_config.json", &format!("{{\"chat_template\": {wrong}}}"));
        assert!(error().contains("chat_template is"), "{}", error());
    }
}
