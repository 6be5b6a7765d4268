use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Value as Json, json};

use super::*;
use crate::tokenizer::{Detokenizer, TokenizerError};

/// Name, file, and what the reference library makes of it.
struct Reference {
    name: String,
    file: Json,
    expected: Json,
}

fn references() -> Vec<Reference> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tokenizers/tokenizers.json");
    let all: Json = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let reference = |entry: &Json| {
        let mut file = entry["tokenizer"].clone();
        file["model"] = all["models"][file["model"].as_u64().unwrap() as usize].clone();
        Reference { name: entry["name"].as_str().unwrap().to_owned(), file, expected: entry.clone() }
    };
    all["tokenizers"].as_array().unwrap().iter().map(reference).collect()
}

fn file(name: &str) -> Json {
    references().into_iter().find(|reference| reference.name == name).unwrap().file
}

fn read(file: &Json) -> Result<Tokenizer, Error> {
    Tokenizer::from_hf(&HfFiles { tokenizer: &file.to_string(), ..HfFiles::default() })
}

fn ids(json: &Json) -> Vec<u32> {
    json.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn every_component_gives_the_ids_of_the_reference() {
    for Reference { name, file, expected } in references() {
        let tokenizer = read(&file).unwrap_or_else(|error| panic!("{name}: {error}"));
        let memo = read(&file).unwrap().remembering(1 << 20);
        for case in expected["cases"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let found = tokenizer.encode(text, true);
            assert_eq!(found, ids(&case["ids"]), "{name}: {text:?}");
            for _ in 0..2 {
                assert_eq!(memo.encode(text, true), found, "{name}: {text:?}, with a memo");
            }
            assert_eq!(
                tokenizer.decode(&found, false),
                case["decoded"].as_str().unwrap(),
                "{name}: {text:?}"
            );
            assert!(tokenizer.fewest_tokens(text.len()) <= found.len(), "{name}: {text:?}");
            assert_eq!(tokenizer.with_ends(found), ids(&case["ends"]), "{name}: {text:?}");
        }
        let pair = tokenizer.pair(tokenizer.encode("the fox", true), &tokenizer.encode("dog", true)).0;
        assert_eq!(pair, ids(&expected["pair"]), "{name}");
    }
}

#[test]
fn published_families_have_a_memo_and_a_lower_bound() {
    let families =
        ["llama3", "qwen2", "qwen3.5", "o200k", "tekken", "deepseek3", "starcoder", "llama2", "gemma"];
    for name in families {
        let tokenizer = read(&file(name)).unwrap().remembering(1 << 20);
        assert!(tokenizer.memo_usage().is_some(), "{name}");
        assert!(tokenizer.fewest_tokens(1 << 20) > 0, "{name}");
    }
}

#[test]
fn text_in_a_stream_is_text_at_once() {
    for Reference { name, file, expected } in references() {
        let tokenizer = Arc::new(read(&file).unwrap());
        for case in expected["cases"].as_array().unwrap() {
            let mut stream = Detokenizer::new(tokenizer.clone(), false);
            let mut text: String = ids(&case["ids"]).into_iter().map(|id| stream.push(id)).collect();
            text.push_str(&stream.finish());
            let decoded = case["decoded"].as_str().unwrap();
            assert!(text.trim_start().ends_with(decoded.trim_start()), "{name}: {text:?}, {decoded:?}");
        }
    }
}

/// Long texts without a place to cut: time is linear, and the text comes back.
#[test]
fn long_words_take_linear_time() {
    let started = std::time::Instant::now();
    for name in [
        "llama3",
        "deepseek3",
        "deepseek2",
        "tekken",
        "llama2",
        "gemma",
        "phi3",
        "unigram-bytes",
        "prefix-suffix",
    ] {
        let tokenizer = read(&file(name)).unwrap();
        for unit in ["a", " ", "\n", "the ", "1", "é", "<|end|>", ".", " \n", "x▁", "\u{301}"] {
            let text = unit.repeat((64 << 10) / unit.len());
            let ids = tokenizer.encode(&text, true);
            assert!(ids.len() <= text.len() + 1, "{name}: {unit:?}");
            assert!(tokenizer.fewest_tokens(text.len()) <= ids.len(), "{name}: {unit:?}");
            if !["phi3", "unigram-bytes", "prefix-suffix"].contains(&name) {
                let expected = text.replace('▁', if ["llama2", "gemma"].contains(&name) { " " } else { "▁" });
                assert_eq!(tokenizer.decode(&ids, false), expected, "{name}: {unit:?}");
            }
        }
    }
    assert!(started.elapsed() < std::time::Duration::from_secs(60), "{:?}", started.elapsed());
}

#[test]
fn what_is_not_supported_is_named_with_its_place() {
    let refused = |change: &dyn Fn(&mut Json)| {
        let mut file = file("llama3");
        change(&mut file);
        read(&file).unwrap_err().to_string()
    };
    let cases: &[(&str, Json, &str)] = &[
        (
            "/pre_tokenizer/pretokenizers/1/type",
            json!("X"),
            r#"pre_tokenizer.pretokenizers[1]: type "X" is not supported"#,
        ),
        (
            "/pre_tokenizer/pretokenizers/0/behavior",
            json!("Isolate"),
            r#"pre_tokenizer.pretokenizers[0]: `behavior` is "Isolate""#,
        ),
        (
            "/pre_tokenizer/pretokenizers/0/pattern",
            json!({"Regex": "(a)\\1"}),
            "pre_tokenizer.pretokenizers[0].pattern: `\\1` is not supported at byte 5 of the expression",
        ),
        (
            "/normalizer",
            json!({"type": "Precompiled", "precompiled_charsmap": ""}),
            "normalizer: precompiled_charsmap is shorter than a number",
        ),
        (
            "/normalizer",
            json!({"type": "Strip", "strip_left": true, "strip_right": true, "middle": 1}),
            "normalizer: field `middle` is not supported",
        ),
        ("/decoder", json!({"type": "CTC"}), r#"decoder: type "CTC" is not supported"#),
        (
            "/decoder",
            json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]}),
            "decoder.decoders[1]: strips the end of a text, which is not supported",
        ),
        (
            "/post_processor/processors/1/single",
            json!([]),
            "post_processor.processors[1].single: does not have every text once",
        ),
        (
            "/post_processor/processors/1/special_tokens",
            json!({}),
            "post_processor.processors[1].single[0].SpecialToken: `<|start|>` is not in `special_tokens`",
        ),
        ("/model/type", json!("WordLevel"), r#"model: type "WordLevel" is not supported"#),
        ("/model/dropout", json!(0.1), "model.dropout: is not 0: tokens would be random"),
        ("/model/unk_token", json!("<none>"), "model.unk_token: `<none>` is not in the vocabulary"),
        ("/model/merges/3", json!(["a", "<none>"]), "model.merges[3]: `<none>` is not in the vocabulary"),
        (
            "/model/vocab/a",
            json!(4_000_000_000_u32),
            "model.vocab: `a` has id 4000000000, expected less than",
        ),
    ];
    for (place, value, expected) in cases {
        let error = refused(&|file| *file.pointer_mut(place).unwrap() = value.clone());
        assert!(error.starts_with(expected), "{error}");
    }
    let unknown = refused(&|file| file["model"]["sampling"] = json!(1));
    assert_eq!(unknown, "model: field `sampling` is not supported");
    let unknown = refused(&|file| file["extra"] = json!(1));
    assert!(unknown.starts_with("tokenizer.json: unknown field `extra`"), "{unknown}");
    let deep =
        (0..200).fold(json!({"type": "NFC"}), |inner, _| json!({"type": "Sequence", "normalizers": [inner]}));
    let deep = refused(&|file| file["normalizer"] = deep.clone());
    assert!(deep.contains("recursion limit") || deep.contains("nested more than"), "{deep}");
    let wide = json!({"type": "Sequence", "normalizers": vec![json!({"type": "NFC"}); 65]});
    assert!(refused(&|file| file["normalizer"] = wide.clone()).contains("65 elements, at most 64"));
    let long = " ".repeat(MAX_BYTES + 1);
    let error = Tokenizer::from_hf(&HfFiles { tokenizer: &long, ..HfFiles::default() }).unwrap_err();
    assert_eq!(error.to_string(), format!("tokenizer.json has {} bytes, at most {MAX_BYTES}", long.len()));
}

/// Only what the template wrote becomes control tokens, also where they are found in normalised text.
#[test]
fn quoted_text_has_no_control_tokens() {
    for name in ["qwen2", "phi3", "llama2", "llama2-normalized-tokens", "gemma", "single-words"] {
        let tokenizer = read(&file(name)).unwrap();
        let control = match name {
            "single-words" => "[SEP]",
            "qwen2" => "<|end|>",
            "gemma" => "<s>",
            _ => "</s>",
        };
        let id = (0..).find(|id| tokenizer.token_text(*id) == Some(control)).unwrap();
        let count = |text: &str, quoted: &[Range<usize>]| {
            let ids = tokenizer.encode_prompt(text, quoted).0;
            ids.into_iter().filter(|found| *found == id).count()
        };
        let text = format!("the {control} fox {control}");
        assert_eq!(count(&text, &[]), 2, "{name}");
        let first = 0..4 + control.len();
        assert_eq!(count(&text, std::slice::from_ref(&first)), 1, "{name}");
        assert_eq!(count(&text, std::slice::from_ref(&(5..6))), 1, "{name}");
        assert_eq!(count(&text, std::slice::from_ref(&(0..text.len()))), 0, "{name}");
        assert!(!tokenizer.encode(&text, false).contains(&id), "{name}");
    }
    // A word that is the text of a control token is no such token.
    let mut file = file("llama3");
    file["model"]["vocab"]["ab"] = json!(file["model"]["vocab"].as_object().unwrap().len());
    file["added_tokens"] = json!([{"id": 0, "content": "ab", "special": true}]);
    file["post_processor"] = Json::Null;
    let tokenizer = read(&file).unwrap();
    assert_eq!(tokenizer.encode("ab", true).len(), 1);
    assert_eq!(tokenizer.encode("ab", false).len(), 2);
}

#[test]
fn other_files_name_special_tokens_and_ends() {
    let tokenizer_file = file("qwen2").to_string();
    let config = json!({
        "bos_token": null, "eos_token": {"content": "<|end|>"}, "add_eos_token": true,
        "additional_special_tokens": ["<|new|>"],
        "added_tokens_decoder": {"5": {"content": "<think>", "rstrip": true, "special": false}},
    });
    let files = HfFiles {
        tokenizer: &tokenizer_file,
        tokenizer_config: Some(&config.to_string()),
        special_tokens_map: Some(r#"{"bos_token": "<|start|>", "eos_token": "none"}"#),
        generation_config: Some(r#"{"eos_token_id": [1, 4000000000, -1]}"#),
    };
    let tokenizer = Tokenizer::from_hf(&files).unwrap();
    let text = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id).map(str::to_owned));
    assert_eq!(text(tokenizer.bos()).as_deref(), Some("<|start|>"));
    assert_eq!(text(tokenizer.eos()).as_deref(), Some("<|end|>"));
    assert!(tokenizer.is_eog(1) && tokenizer.is_eog(tokenizer.eos().unwrap()));
    assert_eq!(tokenizer.eos_ids().len(), 2);
    assert!(tokenizer.adds_eos(), "no post-processor says otherwise");
    let new = tokenizer.encode("a<|new|>", true);
    assert_eq!(tokenizer.kind(new[1]), Some(Kind::Control));
    assert_eq!(tokenizer.encode("<think>  a", true).len(), 2, "the configuration's properties count");
    let map = HfFiles { generation_config: Some("{\"eos_token_id\": \"x\"}"), ..files };
    assert!(Tokenizer::from_hf(&map).unwrap_err().to_string().starts_with("generation_config.json: "));
}

#[test]
fn digests_differ_exactly_where_files_do() {
    let base = file("llama2");
    let digest = |file: &Json| read(file).unwrap().digest();
    assert_eq!(digest(&base), digest(&serde_json::from_str(&base.to_string()).unwrap()));
    let changes = [
        ("/normalizer/normalizers/0/prepend", json!("_")),
        ("/decoder/decoders/3/start", json!(2)),
        ("/post_processor/single", json!([{"Sequence": {"id": "A", "type_id": 0}}])),
        ("/pre_tokenizer", json!({"type": "Digits", "individual_digits": true})),
        ("/added_tokens/1/rstrip", json!(true)),
        ("/added_tokens/1/special", json!(false)),
        ("/added_tokens/1/normalized", json!(true)),
        ("/model/fuse_unk", json!(false)),
        ("/model/byte_fallback", json!(false)),
        ("/model/ignore_merges", json!(true)),
        ("/model/merges/0", base["model"]["merges"][1].clone()),
    ];
    let mut seen = HashSet::from([digest(&base)]);
    for (place, value) in changes {
        let mut changed = base.clone();
        *changed.pointer_mut(place).unwrap() = value;
        assert!(seen.insert(digest(&changed)), "{place}");
    }
    let all = references();
    assert_eq!(all.iter().map(|reference| digest(&reference.file)).collect::<HashSet<_>>().len(), all.len());
}

/// A place in a JSON value.
fn mutate(value: &mut Json, at: &mut usize, with: &Json) -> bool {
    if *at == 0 {
        *value = with.clone();
        return true;
    }
    *at -= 1;
    match value {
        Json::Array(list) => list.iter_mut().take(6).any(|value| mutate(value, at, with)),
        Json::Object(object) => object.values_mut().take(12).any(|value| mutate(value, at, with)),
        _ => false,
    }
}

#[test]
fn changed_files_are_read_or_refused() {
    let bases: Vec<Json> = references().into_iter().map(|reference| reference.file).collect();
    let value = prop_oneof![
        Just(Json::Null),
        Just(json!(true)),
        Just(json!("")),
        Just(json!("a")),
        Just(json!("▁é")),
        Just(json!([])),
        Just(json!({})),
        Just(json!(-1)),
        Just(json!(0)),
        Just(json!(1)),
        Just(json!(4_294_967_295_u32)),
        Just(json!(1e300)),
        Just(json!({"type": "Sequence"})),
        Just(json!({"type": "NFKC"})),
        Just(json!({"Regex": "(?:a|b)*"})),
        Just(json!({"String": "a"})),
        Just(json!([["a", "b"], ["a", "b"]])),
        Just(json!([["a", 1.5], ["b", -1]])),
        Just(json!({"a": 0, "b": 0, "ab": 7})),
    ];
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(1500));
    let changes = prop::collection::vec((0..90_usize, value), 1..3);
    runner
        .run(&(0..bases.len(), changes, ".{0,12}"), |(base, changes, text)| {
            let mut file = bases[base].clone();
            for (mut at, with) in changes {
                mutate(&mut file, &mut at, &with);
            }
            if let Ok(tokenizer) = read(&file) {
                let ids = tokenizer.encode(&format!("the <|end|> é1{text}▁ </s>\n\n"), true);
                drop((tokenizer.decode(&ids, true), tokenizer.digest(), tokenizer.pair(ids.clone(), &ids)));
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn metadata_may_have_the_files() {
    let file = file("qwen2").to_string();
    let metadata = Metadata::from_iter([
        ("tokenizer.huggingface.json", metadata::Value::from(file.as_str())),
        ("tokenizer.huggingface.config", metadata::Value::from(r#"{"eos_token": "<|end|>"}"#)),
    ]);
    let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
    assert_eq!(tokenizer.token_text(tokenizer.eos().unwrap()), Some("<|end|>"));
    let missing = Tokenizer::from_metadata(&Metadata::default()).unwrap_err();
    assert_eq!(missing.to_string(), "the file has no key tokenizer.ggml.model");
    let error = HfFiles { tokenizer: "{}", ..HfFiles::default() };
    assert!(matches!(
        Tokenizer::from_hf(&error).unwrap_err(),
        Error::Tokenizer(TokenizerError::NotReadable { file: "tokenizer.json", .. })
    ));
}
