//! The catalog's models compared with llama.cpp. Pulls models that are not in `$KVASIR_HOME` yet.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use std::path::{Path, PathBuf};

use kvasir_hub::catalog::{self, Entry, Http, Hub, Network, PlainHttp, Request, Response, Store};
use model::spec::{OutputSpec, Pooling};
use model::{ModelFile, ModelSpec};
use serde_json::{Map, Value as Json};
use text::Tokenizer;
use text::chat_template::{ChatTemplate, Message};

const MODELS: &[(&str, &str)] =
    &[("smollm2-135m", "real/smollm2-135m-instruct.json"), ("gemma3-270m", "real/gemma-3-270m.json")];

struct Offline;

impl Http for Offline {
    fn get(&self, request: &Request) -> std::io::Result<Response> {
        panic!("{request:?}")
    }
}

fn pull(entry: &'static Entry) -> PathBuf {
    let network = Network { http: Box::new(Offline), hub: Hub::default(), plain: PlainHttp::Loopback };
    Store::from_env().unwrap().pull(entry, &network, &mut ()).unwrap()
}

fn open(name: &str) -> ModelFile {
    ModelFile::open(pull(catalog::find(name).unwrap())).unwrap()
}

fn reference(file: &str) -> Json {
    let committed = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    let fixtures = std::env::var_os("KVASIR_FIXTURES").map_or_else(committed, PathBuf::from);
    serde_json::from_slice(&std::fs::read(fixtures.join(file)).unwrap()).unwrap()
}

fn ids(json: &Json) -> Vec<u32> {
    json.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn pulled_files_are_the_pinned_ones() {
    let store = Store::from_env().unwrap();
    for (name, file) in MODELS.iter().chain(&[("minilm-l6", "real/minilm.json")]) {
        let entry = catalog::find(name).unwrap();
        pull(entry);
        store.verify(entry, &mut ()).unwrap();
        assert_eq!(reference(file)["sha256"], entry.sha256()[0], "the reference is of the same file");
    }
}

#[test]
fn ids_are_those_of_the_reference() {
    for (name, file) in MODELS {
        let tokenizer = Tokenizer::from_metadata(open(name).metadata()).unwrap();
        let reference = reference(file);
        assert_eq!(Some(tokenizer.adds_bos()), reference["add_bos"].as_bool(), "{name}");
        let cases = reference["tokenize"].as_array().unwrap();
        assert_eq!(cases.len(), 20);
        for case in cases {
            let text = case["text"].as_str().unwrap();
            assert_eq!(tokenizer.encode(text, false), ids(&case["ids_plain"]), "{name}: {text:?}");
            assert_eq!(tokenizer.encode(text, true), ids(&case["ids_parse_special"]), "{name}: {text:?}");
            assert_eq!(tokenizer.decode(&ids(&case["ids_plain"]), true), text, "{name}");
        }
    }
}

#[test]
fn a_long_text_comes_back_with_the_same_ids() {
    for (name, file) in MODELS {
        let tokenizer = Tokenizer::from_metadata(open(name).metadata()).unwrap();
        let expected = ids(&reference(file)["perplexity"]["ids"]);
        assert_eq!(expected.len(), 4096);
        let body = expected.strip_prefix(tokenizer.bos().as_slice()).unwrap_or(&expected);
        let text = tokenizer.decode(body, false);
        assert!(text.contains("GNU GENERAL PUBLIC LICENSE"), "{name}");
        assert_eq!(tokenizer.encode(&text, false), body, "{name}");
    }
}

#[test]
fn chat_templates_render_as_published() {
    let gguf = open("smollm2-135m");
    let tokenizer = Tokenizer::from_metadata(gguf.metadata()).unwrap();
    let template = ChatTemplate::from_metadata(gguf.metadata(), &tokenizer).unwrap().unwrap();
    let chat = [Message::new("user", "Hi"), Message::new("assistant", "Hello."), Message::new("user", "Bye")];
    let prompt = template.render(&chat, None, true, &Map::new()).unwrap();
    let system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n";
    let turns = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n";
    assert_eq!(prompt, format!("{system}{turns}<|im_start|>assistant\n"));
    let ids = tokenizer.encode(&prompt, true);
    assert_eq!(ids.iter().filter(|&&id| tokenizer.is_eog(id)).count(), 4, "one <|im_end|> per turn");
    let own = [&[Message::new("system", "Be brief.")], &chat[..]].concat();
    let prompt = template.render(&own, None, false, &Map::new()).unwrap();
    assert_eq!(prompt, format!("<|im_start|>system\nBe brief.<|im_end|>\n{turns}"));

    // This base model has no chat template, and none is invented.
    let gguf = open("gemma3-270m");
    let tokenizer = Tokenizer::from_metadata(gguf.metadata()).unwrap();
    assert!(ChatTemplate::from_metadata(gguf.metadata(), &tokenizer).unwrap().is_none());
}

#[test]
fn an_encoder_is_read_from_its_checkpoint() {
    let file = open("minilm-l6");
    let spec = ModelSpec::from_file(&file).unwrap();
    assert_eq!((spec.layers.len(), spec.hidden, spec.context_length), (6, 384, 512));
    let OutputSpec::Pooled(pooled) = &spec.output else { panic!("{:?}", spec.output) };
    assert_eq!((pooled.pooling, &pooled.classifier), (Pooling::Mean, &None));
    let tokenizer = Tokenizer::from_metadata(file.metadata()).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.vocab_size()), (Some(101), Some(102), 30_522));
    let reference = reference("real/minilm.json");
    let items = reference["items"].as_array().unwrap();
    assert!(items.len() >= 5, "{}", items.len());
    for item in items {
        let text = item["text"].as_str().unwrap();
        let found = tokenizer.with_ends(tokenizer.encode(text, true));
        assert_eq!(found, ids(&item["ids"]), "{text:?}");
    }
    assert_eq!(tokenizer.decode(&tokenizer.encode("Hello, world!", false), true), "hello , world !");
    let pair = tokenizer.pairs("who").with("me").0;
    assert_eq!(pair, [101, 2040, 102, 2033, 102]);
}
