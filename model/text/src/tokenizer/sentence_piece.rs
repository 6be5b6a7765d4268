//! GGUF's `t5` tokenizers, those of XLM-R among them: a Unigram model with SentencePiece's normalizer. They are read as
//! the `tokenizer.json` that says the same.

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value as Json, json};

use super::read::{same_length, scores};
use super::spm::SPACE;
use super::{HfFiles, Tokenizer, hf};
use crate::Error;
use metadata::{Array, Metadata, Strings, Value};

/// Types of tokens.
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

pub(super) fn tokenizer(metadata: &Metadata) -> Result<Tokenizer, Error> {
    let tokens: &Strings = metadata.require("tokenizer.ggml.tokens")?;
    let scores = scores(metadata, tokens.len())?;
    let key = "tokenizer.ggml.token_type";
    let types = match metadata.get::<Cow<'_, [i32]>>(key)? {
        Some(types) => {
            same_length(key, types.len(), tokens.len())?;
            types
        }
        None => Cow::Owned(vec![1; tokens.len()]),
    };
    let flag = |key: &str| metadata.get::<bool>(&format!("tokenizer.ggml.{key}"));
    // Of a number without a token there is no text.
    let named = |role: &str| -> Result<Option<(usize, &str)>, Error> {
        let id: Option<usize> = metadata.get(&format!("tokenizer.ggml.{role}_token_id"))?;
        Ok(id.and_then(|id| Some((id, tokens.get(id)?))))
    };
    let (bos, eos, sep) = (named("bos")?, named("eos")?, named("seperator")?);
    let kept = |kind: i32| [UNKNOWN, CONTROL, USER_DEFINED].contains(&kind);
    let added = tokens.iter().zip(types.iter()).enumerate().filter(|(_, (_, kind))| kept(**kind));
    let added = added.map(|(id, (content, &kind))| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": kind != USER_DEFINED})
    });
    let prefix = if flag("add_space_prefix")?.unwrap_or(true) { "always" } else { "never" };
    let spaces = json!({"type": "Metaspace", "replacement": SPACE, "prepend_scheme": prefix, "split": true});
    let splits = match flag("remove_extra_whitespaces")?.unwrap_or(false) {
        true => json!({"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, &spaces]}),
        false => spaces.clone(),
    };
    let before = bos.filter(|_| matches!(flag("add_bos_token"), Ok(Some(true))));
    let after = if flag("add_eos_token")?.unwrap_or(true) { eos } else { None };
    let vocab: Vec<Json> =
        tokens.iter().zip(scores).map(|(text, score)| json!([text, f64::from(score)])).collect();
    let unknown = metadata.get::<u64>("tokenizer.ggml.unknown_token_id")?;
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": added.collect::<Vec<Json>>(),
        "normalizer": normalizer(metadata)?,
        "pre_tokenizer": splits,
        "post_processor": around(before, after, sep),
        "decoder": spaces,
        "model": {"type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": false},
    });
    let mut names = Map::new();
    for (role, token) in [("bos_token", bos), ("eos_token", eos)] {
        names.extend(token.map(|(_, text)| (role.to_owned(), text.into())));
    }
    let (file, names) = (file.to_string(), Json::Object(names).to_string());
    hf::tokenizer(&HfFiles { tokenizer: &file, tokenizer_config: Some(&names), ..HfFiles::default() })
}

fn normalizer(metadata: &Metadata) -> Result<Json, Error> {
    let key = "tokenizer.ggml.precompiled_charsmap";
    let table: Vec<u8> = match metadata.value(key) {
        None => return Ok(Json::Null),
        // Some writers store signed bytes.
        Some(Value::Array(Array::I8(bytes))) => bytes.iter().map(|&byte| byte as u8).collect(),
        Some(_) => metadata.require::<Cow<'_, [u8]>>(key)?.into_owned(),
    };
    Ok(match table.is_empty() {
        true => Json::Null,
        false => json!({"type": "Precompiled", "precompiled_charsmap": STANDARD.encode(table)}),
    })
}

/// The post-processor that puts tokens around texts.
fn around(before: Option<(usize, &str)>, after: Option<(usize, &str)>, sep: Option<(usize, &str)>) -> Json {
    let token = |token: &Option<(usize, &str)>| {
        token.map(|(_, text)| json!({"SpecialToken": {"id": text, "type_id": 0}}))
    };
    let text = |id: &str| Some(json!({"Sequence": {"id": id, "type_id": 0}}));
    let list = |pieces: &[Option<Json>]| pieces.iter().flatten().cloned().collect::<Vec<Json>>();
    let (first, last, between) = (token(&before), token(&after), token(&sep));
    let mut special = Map::new();
    for (id, text) in [before, after, sep].into_iter().flatten() {
        special.insert(text.to_owned(), json!({"id": text, "ids": [id], "tokens": [text]}));
    }
    json!({
        "type": "TemplateProcessing",
        "single": list(&[first.clone(), text("A"), last.clone()]),
        "pair": list(&[first, text("A"), last.clone(), between, text("B"), last]),
        "special_tokens": special,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/hf/xlm-roberta");

    /// The keys that a converter writes of this `tokenizer.json`.
    fn converted(file: &Json) -> Metadata {
        let vocab = file["model"]["vocab"].as_array().unwrap();
        let control = |text: &str| text.starts_with('<') && text.ends_with('>') && text.len() > 2;
        let texts = vocab.iter().map(|entry| entry[0].as_str().unwrap());
        let mut metadata = Metadata::default();
        metadata.insert("tokenizer.ggml.model", "t5");
        metadata.insert("tokenizer.ggml.tokens", texts.clone().collect::<Strings>());
        let scores = vocab.iter().map(|entry| entry[1].as_f64().unwrap() as f32);
        metadata.insert("tokenizer.ggml.scores", scores.collect::<Vec<f32>>());
        let types = texts.map(|text| if control(text) { CONTROL } else { 1 });
        metadata.insert("tokenizer.ggml.token_type", types.collect::<Vec<i32>>());
        let table = file["normalizer"]["normalizers"][0]["precompiled_charsmap"].as_str().unwrap();
        metadata.insert("tokenizer.ggml.precompiled_charsmap", STANDARD.decode(table).unwrap());
        for (role, id) in [("bos", 0_u32), ("eos", 2), ("seperator", 2), ("unknown", 3)] {
            metadata.insert(format!("tokenizer.ggml.{role}_token_id"), id);
        }
        for key in ["add_bos_token", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces"] {
            metadata.insert(format!("tokenizer.ggml.{key}"), true);
        }
        metadata
    }

    #[test]
    fn a_converted_tokenizer_is_the_folders() {
        let file = std::fs::read_to_string(format!("{FOLDER}/tokenizer.json")).unwrap();
        let encoded = std::fs::read_to_string(format!("{FOLDER}/encoded.json")).unwrap();
        let metadata = converted(&serde_json::from_str(&file).unwrap());
        let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
        let encoded: Json = serde_json::from_str(&encoded).unwrap();
        for case in encoded["texts"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let expected: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
            assert_eq!(tokenizer.with_ends(tokenizer.encode(text, false)), expected, "{text:?}");
        }
        let (tokens, second) = tokenizer.pairs("the rain").with("in spain");
        let parts: Vec<Vec<u32>> = ["the rain", "in spain"].map(|text| tokenizer.encode(text, false)).into();
        assert_eq!(tokens, [&[0], &parts[0][..], &[2, 2], &parts[1], &[2]].concat());
        assert_eq!(second, Some(parts[0].len() + 3));
        assert_eq!(tokenizer.decode(&tokens, true), "the rain in spain");
    }

    #[test]
    fn bad_keys_are_refused() {
        let file = std::fs::read_to_string(format!("{FOLDER}/tokenizer.json")).unwrap();
        let good = converted(&serde_json::from_str(&file).unwrap());
        let refused = |key: &str, value: Value| {
            let mut metadata = good.clone();
            metadata.insert(format!("tokenizer.ggml.{key}"), value);
            Tokenizer::from_metadata(&metadata).unwrap_err().to_string()
        };
        assert!(refused("precompiled_charsmap", vec![1_u8].into()).contains("is shorter than a number"));
        assert!(refused("token_type", vec![1_i32].into()).contains("tokenizer.ggml.token_type"));
        assert!(refused("unknown_token_id", 100_000_u32.into()).contains("unk_id"));
    }
}
