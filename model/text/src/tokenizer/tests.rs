use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::Value as Json;

use super::*;
use metadata::{Strings, Value};
use model::ModelFile;

fn fixtures() -> PathBuf {
    let committed = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    std::env::var_os("KVASIR_FIXTURES").map_or_else(committed, PathBuf::from)
}

pub(crate) fn tiny(name: &str) -> Tokenizer {
    let file = fixtures().join(format!("tiny/{name}/{name}-f32.gguf"));
    Tokenizer::from_metadata(ModelFile::open(file).unwrap().metadata()).unwrap()
}

fn ids(json: &Json) -> Vec<u32> {
    json.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Vocabularies that can decode every encoded text.
pub(super) const TINY: &[&str] = &[
    "llama",
    "llama3rope",
    "qwen2",
    "qwen3",
    "qwen3moe",
    "gemma3",
    "gemma4",
    "gpt-oss",
    "granitehybrid",
    "qwen35",
];
/// Other vocabularies, and duplicates of those in TINY under another name.
pub(super) const MORE: &[&str] =
    &["bert", "bert-rerank", "gemma4moe", "granitehybrid-dense", "qwen2moe", "qwen35moe", "qwen3next"];

#[test]
fn tiny_models_give_the_reference_ids() {
    for name in TINY.iter().chain(MORE) {
        let tokenizer = tiny(name);
        let reference = std::fs::read(fixtures().join(format!("tiny/{name}/ref.json"))).unwrap();
        let reference: Json = serde_json::from_slice(&reference).unwrap();
        let cases = reference["tokenize"].as_array().unwrap();
        assert_eq!(cases.len(), 20);
        for case in cases {
            let text = case["text"].as_str().unwrap();
            let expected = ids(case.get("ids_llama_cpp").unwrap_or(&case["ids"]));
            let found = tokenizer.encode(text, true);
            // References of encoders are whole sequences.
            let found = if name.starts_with("bert") { tokenizer.with_ends(found) } else { found };
            assert_eq!(found, expected, "{name}: {text:?}");
        }
    }
}

#[test]
fn generation_ends_where_the_models_end() {
    let ends = |name: &str| {
        let tokenizer = tiny(name);
        let texts = tokenizer.eos_ids().map(|id| tokenizer.token_text(id).unwrap().to_owned());
        texts.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>()
    };
    // A message ends at <|end|>, and another message follows.
    assert_eq!(ends("gpt-oss"), ["<|call|>", "<|endoftext|>", "<|return|>"]);
    assert_eq!(ends("gemma4"), ["<eos>", "<turn|>"]);
}

#[test]
fn text_survives_encoding_and_decoding() {
    let tokenizers: Vec<Arc<Tokenizer>> = TINY.iter().map(|name| Arc::new(tiny(name))).collect();
    let text = prop_oneof![".*", "[ a-c\n'1é你😀<|>\u{2581}]{0,40}"];
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(200));
    runner
        .run(&text, |text| {
            for tokenizer in &tokenizers {
                let ids = tokenizer.encode(&text, false);
                // SentencePiece writes spaces as U+2581, so decoding cannot distinguish the two.
                let expected = match tokenizer.model {
                    Model::Spm { .. } | Model::CharBpe(_) => text.replace('\u{2581}', " "),
                    _ => text.clone(),
                };
                prop_assert_eq!(&tokenizer.decode(&ids, false), &expected);
                let mut stream = Detokenizer::new(tokenizer.clone(), false);
                let mut streamed: String = ids.iter().map(|&id| stream.push(id)).collect();
                streamed.push_str(&stream.finish());
                prop_assert_eq!(&streamed, &expected);
            }
            Ok(())
        })
        .unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn a_stream_gives_what_a_lossy_conversion_gives(bytes in prop::collection::vec(
        prop_oneof![
            2 => prop::sample::select(vec![0x41u8, 0xc3, 0xa9, 0xe4, 0xbd, 0xa0, 0xf0, 0x9f, 0x98, 0x80, 0xff, 0xed, 0xc0]),
            1 => any::<u8>(),
        ], 0..40)) {
        let tokenizer = Arc::new(score_based(&[], false));
        let mut stream = Detokenizer::new(tokenizer, true);
        let mut text = String::new();
        for end in 1..=bytes.len() {
            text.push_str(&stream.push(FIRST_BYTE + u32::from(bytes[end - 1])));
            // Everything certain was emitted: only an incomplete character is held back.
            let certain = String::from_utf8_lossy(&bytes[..end]);
            prop_assert!(certain.starts_with(&text));
            let held_back = &certain[text.len()..];
            prop_assert!(["", "\u{fffd}"].contains(&held_back), "{:?}", held_back);
        }
        text.push_str(&stream.finish());
        prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
    }
}

const FIRST_BYTE: u32 = 4;

/// `<unk>`, `<s>`, `</s>`, `<t>` (user-defined), 256 bytes, then `pieces` with descending scores.
pub(super) fn score_based(pieces: &[&str], add_space_prefix: bool) -> Tokenizer {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>", "<t>"].map(String::from).to_vec();
    let mut types = vec![2, 3, 3, 4];
    for byte in 0..256 {
        tokens.push(format!("<0x{byte:02X}>"));
        types.push(6);
    }
    tokens.extend(pieces.iter().map(|p| p.to_string()));
    types.resize(tokens.len(), 1);
    let scores: Vec<f32> = (0..tokens.len()).map(|at| -(at as f32)).collect();
    Tokenizer::from_metadata(&Metadata::from_iter([
        ("tokenizer.ggml.model", Value::from("llama")),
        ("tokenizer.ggml.tokens", Value::from(Strings::from_iter(tokens))),
        ("tokenizer.ggml.token_type", Value::from(types)),
        ("tokenizer.ggml.scores", Value::from(scores)),
        ("tokenizer.ggml.add_space_prefix", Value::Bool(add_space_prefix)),
    ]))
    .unwrap()
}

fn shown(tokenizer: &Tokenizer, text: &str, special: bool) -> Vec<String> {
    tokenizer.encode(text, special).iter().map(|&id| tokenizer.token_text(id).unwrap().to_owned()).collect()
}

#[test]
fn scores_decide_and_bytes_stand_in() {
    let tokenizer = score_based(&["▁a", "ab", "a", "b", "c", "▁", "abc", "x▁y", "x", "y", "▁y"], false);
    assert_eq!(shown(&tokenizer, " abc", false), ["▁a", "b", "c"]);
    assert_eq!(shown(&tokenizer, "abc", false), ["abc"]);
    assert_eq!(shown(&tokenizer, "aé", false), ["a", "<0xC3>", "<0xA9>"]);
    // `▁y` forms first and then `x▁y` around it.
    assert_eq!(shown(&tokenizer, "x y", false), ["x▁y"]);
    assert_eq!(shown(&tokenizer, "a y", false), ["a", "▁y"]);
}

#[test]
fn a_space_leads_every_text_if_the_file_sets_it() {
    let tokenizer = score_based(&["▁a", "a", "▁", "▁▁"], true);
    assert_eq!(shown(&tokenizer, "a", false), ["▁a"]);
    assert_eq!(shown(&tokenizer, "a<t>a", false), ["▁a", "<t>", "▁a"]);
    assert_eq!(shown(&tokenizer, " a", false), ["▁", "▁a"]);
    assert!(tokenizer.encode("", false).is_empty());
    for text in ["a", " a", "aa  a", ""] {
        assert_eq!(tokenizer.decode(&tokenizer.encode(text, false), true), text);
    }
    let mut stream = Detokenizer::new(Arc::new(tokenizer), true);
    assert_eq!(stream.push(260), " a", "a completion keeps its first space");
}

#[test]
fn control_tokens_are_text_unless_asked_for() {
    let tokenizer = score_based(&["<", "s", ">"], false);
    assert_eq!(shown(&tokenizer, "<s><t>", false), ["<", "s", ">", "<t>"]);
    assert_eq!(shown(&tokenizer, "<s><t>", true), ["<s>", "<t>"]);
    assert_eq!(tokenizer.decode(&[1, 3, 261], true), "<t>s");
    assert_eq!(tokenizer.decode(&[1, 3, 261], false), "<s><t>s");
    assert_eq!((tokenizer.bos(), tokenizer.adds_bos()), (Some(1), true));
    assert!(tokenizer.is_eog(2));
    assert_eq!(tokenizer.eos_ids().collect::<Vec<_>>(), [2]);
    assert_eq!(
        (tokenizer.token_text(9999), tokenizer.token_bytes(9999), tokenizer.kind(9999)),
        (None, &[][..], None)
    );
}

pub(super) fn bytes_merged(pre: &str, extra: &[&str], merges: &[&str]) -> Metadata {
    let mut tokens: Vec<String> = (0..=255u8).map(|b| bpe::byte_char(b).to_string()).collect();
    tokens.extend(extra.iter().map(|t| t.to_string()));
    Metadata::from_iter([
        ("tokenizer.ggml.model", Value::from("gpt2")),
        ("tokenizer.ggml.pre", Value::from(pre)),
        ("tokenizer.ggml.tokens", Value::from(Strings::from_iter(tokens))),
        ("tokenizer.ggml.merges", Value::from(Strings::from_iter(merges))),
        ("tokenizer.ggml.bos_token_id", Value::U32(0)),
    ])
}

#[test]
fn merges_that_are_no_token_are_spelled() {
    // `ab` merges first although it is no token, so `abc` is reached and a lone `ab` is two tokens.
    let tokenizer = Tokenizer::from_metadata(&bytes_merged("gpt-2", &["abc"], &["a b", "ab c"])).unwrap();
    assert_eq!(shown(&tokenizer, "abc ab", false), ["abc", "Ġ", "a", "b"]);
}

#[test]
fn a_token_out_of_reach_of_the_merges_is_used_only_where_the_file_wants_it() {
    let metadata = |pre| bytes_merged(pre, &["abc"], &[]);
    let tokenizer = Tokenizer::from_metadata(&metadata("qwen2")).unwrap();
    for _ in 0..2 {
        assert_eq!(shown(&tokenizer, "abc", false), ["a", "b", "c"]);
    }
    let tokenizer = Tokenizer::from_metadata(&metadata("llama-bpe")).unwrap();
    assert_eq!(shown(&tokenizer, "abc", false), ["abc"]);
}

#[test]
fn wrong_metadata_is_refused_with_its_name() {
    let refused = |change: &[(&str, Value)]| {
        let mut metadata = bytes_merged("gpt-2", &[], &[]);
        for (key, value) in change {
            metadata.insert(*key, value.clone());
        }
        Tokenizer::from_metadata(&metadata).unwrap_err().to_string()
    };
    let error = refused(&[("tokenizer.ggml.pre", Value::from("klingon"))]);
    assert!(error.contains("`klingon`") && error.contains("smollm") && error.contains("qwen2"), "{error}");
    let error = refused(&[("tokenizer.ggml.model", Value::from("rwkv"))]);
    assert!(error.contains("`rwkv`") && error.contains("gpt2"), "{error}");
    let error = refused(&[("tokenizer.ggml.token_type", Value::from(vec![1_i32]))]);
    assert_eq!(error, "tokenizer.ggml.token_type has 1 entries for 256 tokens");
    let error = refused(&[("tokenizer.ggml.merges", Value::from(Strings::from_iter(["ab"])))]);
    assert_eq!(error, "tokenizer.ggml.merges has `ab` at 0, which is not two texts");
    let error = refused(&[("tokenizer.ggml.tokens", Value::from(Strings::default()))]);
    assert_eq!(error, "tokenizer.ggml.tokens is empty");
    let bos = [
        ("tokenizer.ggml.add_bos_token", Value::Bool(true)),
        ("tokenizer.ggml.bos_token_id", Value::U32(256)),
    ];
    assert!(refused(&bos).contains("bos_token_id"));
    let eos = [("tokenizer.ggml.add_eos_token", Value::Bool(true))];
    assert!(refused(&eos).contains("eos_token_id"));
    let no_unknown = [
        ("tokenizer.ggml.model", Value::from("bert")),
        ("tokenizer.ggml.tokens", Value::from(Strings::from_iter(["a"]))),
    ];
    let error = refused(&no_unknown);
    assert!(error.starts_with("tokenizer.ggml.unknown_token_id names no token"), "{error}");
    let nan = [
        ("tokenizer.ggml.model", Value::from("llama")),
        ("tokenizer.ggml.scores", Value::from(vec![f32::NAN; 256])),
    ];
    assert_eq!(refused(&nan), "the score of token 0 is not a number");
    let error = Tokenizer::from_metadata(&Metadata::default()).unwrap_err();
    assert_eq!(error.to_string(), "the file has no key tokenizer.ggml.model");
}

#[test]
fn ends_of_generation_are_known_by_key_and_by_text() {
    let extra = ["<|im_end|>", "<|endoftext|>", "<|end|>", "<|file_sep|>"];
    let mut metadata = bytes_merged("qwen2", &extra, &[]);
    metadata.insert("tokenizer.ggml.eos_token_id", Value::U32(7));
    let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
    assert_eq!(tokenizer.eos_ids().collect::<Vec<_>>(), [7, 256, 257, 258, 259]);
    assert_eq!(tokenizer.kind(256), Some(Kind::Control), "whatever the file says");
    // In the harmony format a message ends at <|end|> and another message follows.
    let harmony = bytes_merged("qwen2", &["<|end|>", "<|return|>", "<|call|>", "<|channel|>"], &[]);
    let tokenizer = Tokenizer::from_metadata(&harmony).unwrap();
    assert_eq!(tokenizer.eos_ids().collect::<Vec<_>>(), [257, 258]);
    assert_eq!(
        (tokenizer.kind(256), tokenizer.kind(259)),
        (Some(Kind::UserDefined), Some(Kind::UserDefined))
    );
}

#[test]
fn digests_differ_exactly_where_tokenizers_do() {
    let base = || bytes_merged("gpt-2", &["ab", "<x>"], &["a b"]);
    let digest = |metadata: &Metadata| Tokenizer::from_metadata(metadata).unwrap().digest();
    let mut unrelated = base();
    unrelated.insert("tokenizer.chat_template", Value::from("{{ messages }}"));
    assert_eq!(digest(&base()), digest(&unrelated));
    let changes = [
        ("tokenizer.ggml.pre", Value::from("qwen2")),
        ("tokenizer.ggml.merges", Value::from(Strings::from_iter(["b a"]))),
        ("tokenizer.ggml.bos_token_id", Value::U32(1)),
        ("tokenizer.ggml.eos_token_id", Value::U32(1)),
        ("tokenizer.ggml.add_bos_token", Value::Bool(true)),
        ("tokenizer.ggml.token_type", Value::from([vec![1_i32; 257], vec![4]].concat())),
    ];
    let mut seen = BTreeSet::from([digest(&base())]);
    for (key, value) in changes {
        let mut changed = base();
        changed.insert(key, value);
        assert!(seen.insert(digest(&changed)), "{key}");
    }
    assert_eq!(
        TINY.iter().map(|name| tiny(name).digest()).collect::<BTreeSet<_>>().len(),
        TINY.len() - 2,
        "llama = llama3rope, qwen3 = qwen3moe"
    );
}

/// Long words of every vocabulary: windows give the tokens and the text of merging at once, and no text has
/// fewer tokens than the lower bound.
#[test]
fn words_longer_than_a_window_are_tokens_too() {
    let bytes = 40 << 10;
    let words = ["a", "-", " ", "\n", "ab", "é", "你", "😀x", "=-", "thequick", "0", "A", "AB"];
    for name in TINY {
        let tokenizer = tiny(name);
        for word in words {
            let text = word.repeat(bytes / word.len());
            let ids = tokenizer.encode(&text, true);
            assert_eq!(tokenizer.decode(&ids, false), text, "{name}: {word:?}");
            assert!(tokenizer.fewest_tokens(text.len()) <= ids.len(), "{name}: {word:?}");
            assert!(tokenizer.fewest_tokens(text.len()) > 0, "{name}");
        }
    }
    // Spaces give no tokens here, and a long word gives one.
    assert_eq!(tiny("bert").fewest_tokens(1 << 20), 0);
}
