//! The contents of the files, parsed and not yet interpreted.

use std::fmt;

use serde::de::{DeserializeOwned, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, de};
use serde_json::{Map, Value as Json};

use super::node::{Fields, Node};
use super::{HfFiles, Tokens, refused};
use crate::tokenizer::TokenizerError;

/// Maximum number of added tokens.
const MAX_ADDED: usize = 1 << 17;

pub(super) fn parse<T: DeserializeOwned>(file: &'static str, text: &str) -> Result<T, TokenizerError> {
    serde_json::from_str(text).map_err(|source| TokenizerError::NotReadable { file, source })
}

/// `tokenizer.json`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TokenizerFile {
    #[serde(rename = "version")]
    _version: Option<IgnoredAny>,
    /// Only training and batches use these two.
    #[serde(rename = "truncation")]
    _truncation: Option<IgnoredAny>,
    #[serde(rename = "padding")]
    _padding: Option<IgnoredAny>,
    #[serde(default)]
    pub(super) added_tokens: Vec<AddedToken>,
    #[serde(default)]
    pub(super) normalizer: Json,
    #[serde(default)]
    pub(super) pre_tokenizer: Json,
    #[serde(default)]
    pub(super) post_processor: Json,
    #[serde(default)]
    pub(super) decoder: Json,
    pub(super) model: RawModel,
}

/// A token that is found in a text before the model sees it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AddedToken {
    pub(super) id: Option<u32>,
    pub(super) content: String,
    #[serde(default)]
    pub(super) single_word: bool,
    #[serde(default)]
    pub(super) lstrip: bool,
    #[serde(default)]
    pub(super) rstrip: bool,
    #[serde(default)]
    pub(super) normalized: bool,
    #[serde(default)]
    pub(super) special: bool,
}

impl AddedToken {
    /// The properties as a number.
    pub(super) fn bits(&self) -> u64 {
        let flags = [self.single_word, self.lstrip, self.rstrip, self.normalized, self.special];
        flags.into_iter().fold(0, |bits, flag| bits << 1 | u64::from(flag))
    }
}

/// `model` of `tokenizer.json`. The long lists are not kept as JSON.
#[derive(Debug)]
pub(super) struct RawModel {
    pub(super) vocab: Vocab,
    pub(super) merges: Vec<(Box<str>, Box<str>)>,
    /// The other fields.
    others: Json,
}

#[derive(Debug)]
pub(super) enum Vocab {
    Ids(Vec<(String, u32)>),
    /// Ids are the places in the list.
    Scores(Vec<(String, f64)>),
}

impl Vocab {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Ids(list) => list.len(),
            Self::Scores(list) => list.len(),
        }
    }

    pub(super) fn each(
        &self,
        mut each: impl FnMut(&str, u32) -> Result<(), TokenizerError>,
    ) -> Result<(), TokenizerError> {
        match self {
            Self::Ids(list) => list.iter().try_for_each(|(text, id)| each(text, *id)),
            Self::Scores(list) => (0..).zip(list).try_for_each(|(id, (text, _))| each(text, id)),
        }
    }
}

impl RawModel {
    pub(super) fn kind(&self) -> Result<String, TokenizerError> {
        if let Some(kind) = self.raw_fields()?.text("type")? {
            return Ok(kind);
        }
        // Older files do not have it.
        Ok(match (&self.vocab, self.others.get("max_input_chars_per_word")) {
            (Vocab::Scores(_), _) => "Unigram",
            (_, Some(_)) => "WordPiece",
            _ => "BPE",
        }
        .to_owned())
    }

    fn raw_fields(&self) -> Result<Fields<'_>, TokenizerError> {
        Node::root("model", &self.others).fields()
    }

    /// The fields but `type`, of a model without merges.
    pub(super) fn fields(&self, kind: &str) -> Result<Fields<'_>, TokenizerError> {
        if !self.merges.is_empty() {
            return Err(refused("model.merges", format!("type \"{kind}\" has no merges")));
        }
        let mut fields = self.raw_fields()?;
        fields.ignore(&["type"]);
        Ok(fields)
    }
}

/// The fields of a BPE model.
#[derive(Debug)]
pub(super) struct BpeFields {
    pub(super) unk_token: Option<String>,
    pub(super) continuing_subword_prefix: Option<String>,
    pub(super) end_of_word_suffix: Option<String>,
    pub(super) fuse_unk: bool,
    pub(super) byte_fallback: bool,
    pub(super) ignore_merges: bool,
}

impl BpeFields {
    pub(super) fn read(model: &RawModel) -> Result<Self, TokenizerError> {
        let mut fields = model.raw_fields()?;
        fields.ignore(&["type"]);
        if let Some(dropout) = fields.get("dropout").filter(|dropout| dropout.value().as_f64() != Some(0.0)) {
            return Err(dropout.refused("is not 0: tokens would be random"));
        }
        let not_empty = |text: Option<String>| text.filter(|text| !text.is_empty());
        let read = Self {
            unk_token: fields.text("unk_token")?,
            continuing_subword_prefix: not_empty(fields.text("continuing_subword_prefix")?),
            end_of_word_suffix: not_empty(fields.text("end_of_word_suffix")?),
            fuse_unk: fields.flag("fuse_unk")?.unwrap_or(false),
            byte_fallback: fields.flag("byte_fallback")?.unwrap_or(false),
            ignore_merges: fields.flag("ignore_merges")?.unwrap_or(false),
        };
        fields.finish()?;
        if matches!(model.vocab, Vocab::Scores(_)) {
            return Err(refused("model.vocab", "is no table of texts and ids"));
        }
        Ok(read)
    }
}

impl<'de> Deserialize<'de> for RawModel {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Model;
        impl<'de> Visitor<'de> for Model {
            type Value = RawModel;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a model")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawModel, A::Error> {
                let (mut vocab, mut merges, mut others) = (None, Vec::new(), Map::new());
                while let Some(key) = map.next_key::<String>()? {
                    match &*key {
                        "vocab" => vocab = Some(map.next_value::<Vocab>()?),
                        "merges" => {
                            let pairs: Vec<Merge> = map.next_value()?;
                            merges = pairs.into_iter().map(|Merge(left, right)| (left, right)).collect();
                        }
                        _ => drop(others.insert(key, map.next_value()?)),
                    }
                }
                let vocab = vocab.ok_or_else(|| de::Error::missing_field("vocab"))?;
                Ok(RawModel { vocab, merges, others: Json::Object(others) })
            }
        }
        deserializer.deserialize_map(Model)
    }
}

impl<'de> Deserialize<'de> for Vocab {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Vocab;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table of texts and ids, or a list of texts and scores")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocab, A::Error> {
                let mut list = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    list.push(entry);
                }
                Ok(Vocab::Ids(list))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vocab, A::Error> {
                let mut list = Vec::new();
                while let Some(entry) = seq.next_element()? {
                    list.push(entry);
                }
                Ok(Vocab::Scores(list))
            }
        }
        deserializer.deserialize_any(Entries)
    }
}

/// A merge: `"a b"` or `["a", "b"]`.
struct Merge(Box<str>, Box<str>);

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pair;
        impl<'de> Visitor<'de> for Pair {
            type Value = Merge;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("two texts")
            }

            fn visit_str<E: de::Error>(self, line: &str) -> Result<Merge, E> {
                let pair = line.split_once(' ').filter(|(_, right)| !right.contains(' '));
                let (left, right) =
                    pair.ok_or_else(|| E::custom(format!("merge `{line}` is not two texts")))?;
                Ok(Merge(left.into(), right.into()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Merge, A::Error> {
                let pair = (seq.next_element()?, seq.next_element()?);
                match (pair, seq.next_element::<IgnoredAny>()?) {
                    ((Some(left), Some(right)), None) => Ok(Merge(left, right)),
                    _ => Err(de::Error::custom("a merge is not two texts")),
                }
            }
        }
        deserializer.deserialize_any(Pair)
    }
}

/// Tokens that the files beside `tokenizer.json` name.
#[derive(Debug, Default)]
pub(super) struct Named {
    pub(super) bos: Option<String>,
    pub(super) eos: Option<String>,
    pub(super) adds_bos: bool,
    pub(super) adds_eos: bool,
    /// Ids that end a generation.
    pub(super) generation_ends: Vec<u32>,
    /// `added_tokens_decoder`, by id.
    decoder: Vec<AddedToken>,
    /// Special tokens with a name.
    special: Vec<AddedToken>,
}

const ROLES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

impl Named {
    pub(super) fn read(files: &HfFiles<'_>) -> Result<Self, TokenizerError> {
        let object = |file, text: Option<&str>| match text {
            Some(text) => parse::<Map<String, Json>>(file, text),
            None => Ok(Map::new()),
        };
        let config = object("tokenizer_config.json", files.tokenizer_config)?;
        let map = object("special_tokens_map.json", files.special_tokens_map)?;
        let generation: Generation = match files.generation_config {
            Some(text) => parse("generation_config.json", text)?,
            None => Generation::default(),
        };
        let role = |role: &str| match config.get(role) {
            None | Some(Json::Null) => map.get(role).and_then(special_token),
            Some(token) => special_token(token),
        };
        let flag = |name: &str| config.get(name).and_then(Json::as_bool).unwrap_or(false);
        let mut special: Vec<AddedToken> = ROLES.into_iter().filter_map(role).collect();
        for key in ["additional_special_tokens", "extra_special_tokens"] {
            match config.get(key) {
                Some(Json::Array(list)) => special.extend(list.iter().filter_map(special_token)),
                Some(Json::Object(named)) => special.extend(named.values().filter_map(special_token)),
                _ => {}
            }
        }
        Ok(Self {
            bos: role("bos_token").map(|token| token.content),
            eos: role("eos_token").map(|token| token.content),
            adds_bos: flag("add_bos_token"),
            adds_eos: flag("add_eos_token"),
            generation_ends: generation.eos_token_id.map_or_else(Vec::new, EndIds::list),
            decoder: added_tokens_decoder(&config)?,
            special,
        })
    }

    /// Adds the tokens that only these files have, and the properties that differ here.
    pub(super) fn add_to(&self, tokens: &mut Tokens) {
        for token in &self.decoder {
            tokens.add(token.clone());
        }
        for token in self.special.iter().filter(|token| !token.content.is_empty()) {
            if !tokens.has_added(&token.content) {
                tokens.add(token.clone());
            }
        }
    }
}

/// `added_tokens_decoder`: tokens by id.
fn added_tokens_decoder(config: &Map<String, Json>) -> Result<Vec<AddedToken>, TokenizerError> {
    let place = "added_tokens_decoder";
    let Some(Json::Object(table)) = config.get(place) else { return Ok(Vec::new()) };
    if table.len() > MAX_ADDED {
        return Err(refused(place, format!("has {} tokens, at most {MAX_ADDED}", table.len())));
    }
    let mut list = Vec::with_capacity(table.len());
    for (id, token) in table {
        let token = AddedToken::deserialize(token)
            .map_err(|error| refused(format!("{place}.{id}"), error.to_string()))?;
        let id: u32 = id.parse().map_err(|_| refused(format!("{place}.{id}"), "is not an id"))?;
        if !token.content.is_empty() {
            list.push((id, token));
        }
    }
    list.sort_by_key(|(id, _)| *id);
    Ok(list.into_iter().map(|(_, token)| token).collect())
}

/// A text, or an object with its properties.
fn special_token(value: &Json) -> Option<AddedToken> {
    let flag = |name: &str| value.get(name).and_then(Json::as_bool).unwrap_or(false);
    let content = value.as_str().or_else(|| value.get("content")?.as_str())?;
    Some(AddedToken {
        id: None,
        content: content.to_owned(),
        single_word: flag("single_word"),
        lstrip: flag("lstrip"),
        rstrip: flag("rstrip"),
        normalized: flag("normalized"),
        special: true,
    })
}

#[derive(Deserialize, Default)]
struct Generation {
    eos_token_id: Option<EndIds>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum EndIds {
    One(i64),
    Many(Vec<i64>),
}

impl EndIds {
    fn list(self) -> Vec<u32> {
        let ids = match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        };
        ids.into_iter().filter_map(|id| u32::try_from(id).ok()).collect()
    }
}
