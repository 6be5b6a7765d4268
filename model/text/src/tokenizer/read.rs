//! Builds a tokenizer from metadata.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;

use crate::Error;
use metadata::{Metadata, Strings, Value};

use super::bpe::{self, Bpe};
use super::char_bpe::CharBpe;
use super::decode::byte;
use super::hf::{self, HfFiles};
use super::normalize::{Normalizer, Pattern};
use super::pieces::Pieces;
use super::pretokenize::{self, PreTokenizer};
use super::sentence_piece;
use super::special::{Precedence, Special, Specials};
use super::splitters::Splitter;
use super::spm::{SPACE, Spm};
use super::word_piece::WordPiece;
use super::{Cutting, Ends, Kind, Model, Tokenizer, TokenizerError};

const MODELS: &[&str] = &["bert", "gemma4", "gpt2", "llama", "t5"];

/// Tokens that end a generation in every model, whatever the file says.
const END_TEXTS: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

/// Keys of further end-of-generation ids, with the token texts to look for if the key is absent. The last
/// three end a file, after which a code model would continue with another file.
const END_KEYS: &[(&str, &[&str])] = &[
    ("tokenizer.ggml.eot_token_id", &[]),
    ("tokenizer.ggml.eom_token_id", &[]),
    ("tokenizer.ggml.fim_pad_token_id", &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"]),
    (
        "tokenizer.ggml.fim_rep_token_id",
        &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"],
    ),
    ("tokenizer.ggml.fim_sep_token_id", &["<|file_sep|>"]),
];

/// Parts of the harmony format that clients read, although files mark them as control tokens.
const SHOWN_TEXTS: &[&str] = &["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

/// Implements [`Tokenizer::from_metadata`].
pub(super) fn tokenizer(metadata: &Metadata) -> Result<Tokenizer, Error> {
    if let (None, Some(files)) = (metadata.value("tokenizer.ggml.model"), HfFiles::from_metadata(metadata)?) {
        return hf::tokenizer(&files);
    }
    let model: &str = metadata.require("tokenizer.ggml.model")?;
    if model == "t5" {
        return sentence_piece::tokenizer(metadata);
    }
    let tokens: &Strings = metadata.require("tokenizer.ggml.tokens")?;
    let mut vocabulary = Vocabulary::read(metadata, tokens)?;
    let defaults = Defaults::of(model);
    let eos = vocabulary.id(metadata, "tokenizer.ggml.eos_token_id", defaults.eos)?;
    let eog = vocabulary.ends(metadata, eos)?;
    let unknown = vocabulary.id(metadata, "tokenizer.ggml.unknown_token_id", defaults.unknown)?;

    let mut hash = Hash::new(model, &vocabulary);
    let (mut normalizers, mut splitters) = (Vec::new(), Vec::new());
    let (model, adds_bos) = match model {
        "bert" => {
            let lowercase = metadata.get("tokenizer.ggml.normalizer.lowercase")?.unwrap_or(true);
            let unknown = unknown.ok_or(TokenizerError::NoUnknown)?;
            hash.number(u64::from(lowercase));
            hash.number(unknown.into());
            vocabulary.spell(spell_spaces);
            (Model::WordPiece(WordPiece::new(&vocabulary.texts, unknown, lowercase)), true)
        }
        "gemma4" => {
            let merges: &Strings = metadata.require("tokenizer.ggml.merges")?;
            hash.list(merges.iter());
            hash.number(unknown.map_or(u64::MAX, u64::from));
            vocabulary.spell(spell_spaces);
            let (pattern, content) = (Pattern::Text(" ".into()), SPACE.to_string().into());
            normalizers.push(Normalizer::Replace { pattern, content });
            // Newlines never merge with other text.
            splitters.push(Splitter::NewlineRuns);
            (Model::CharBpe(Box::new(CharBpe::new(&vocabulary.texts, merges.iter(), unknown)?)), true)
        }
        "gpt2" => {
            let pre = pre_tokenizer(metadata)?;
            let merges: &Strings = metadata.require("tokenizer.ggml.merges")?;
            hash.text(pre.name);
            hash.list(merges.iter());
            vocabulary.spell(spell_bytes);
            splitters.push(Splitter::Style(pre.style));
            let bpe = Bpe::new(pre.whole_words_first, &vocabulary.texts, &vocabulary.bytes, merges.iter())?;
            (Model::Bpe { bpe: Box::new(bpe), words: None }, pre.adds_bos)
        }
        "llama" => {
            let scores = scores(metadata, tokens.len())?;
            let add_space_prefix = metadata.get("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
            hash.number(u64::from(add_space_prefix));
            hash.number(unknown.map_or(u64::MAX, u64::from));
            scores.iter().for_each(|s| hash.number(s.to_bits().into()));
            vocabulary.spell(spell_spaces);
            (
                Model::Spm {
                    spm: Box::new(Spm::new(&vocabulary.texts, &scores, unknown)?),
                    add_space_prefix,
                },
                true,
            )
        }
        found => {
            return Err(TokenizerError::UnknownModel { found: found.to_owned(), supported: MODELS }.into());
        }
    };
    let Around { bos, adds_bos, adds_eos, sep } = vocabulary.around(metadata, &defaults, eos, adds_bos)?;
    hash.number(bos.map_or(u64::MAX, u64::from));
    hash.number(eos.map_or(u64::MAX, u64::from));
    hash.number(u64::from(adds_bos));
    hash.number(eog.len() as u64);
    eog.iter().for_each(|&id| hash.number(id.into()));
    if adds_eos || sep.is_some() {
        hash.number(u64::from(adds_eos));
        hash.number(sep.map_or(u64::MAX, u64::from));
    }
    let before: Vec<u32> = bos.filter(|_| adds_bos).into_iter().collect();
    let after: Vec<u32> = eos.filter(|_| adds_eos).into_iter().collect();
    let between = after.iter().copied().chain(sep).collect();
    let ends = Ends { bos, eos, pair: [before.clone(), between, after.clone()], before, after };

    let keeps_all = match &model {
        Model::Bpe { bpe, .. } => bpe.keeps_all(),
        Model::CharBpe(bpe) => bpe.keeps_all(),
        Model::Spm { spm, .. } => spm.keeps_all(),
        // White space and accents may be dropped, and a long word becomes one token.
        Model::WordPiece(_) | Model::Words(_) | Model::Unigram(_) => false,
    };
    // Texts of BERT are normalised before they are cut, and encoders read each text once.
    let cutting = match &model {
        Model::Bpe { .. } => Some(Cutting { newlines: true, words: true }),
        Model::CharBpe(_) => Some(Cutting { newlines: true, words: false }),
        Model::Spm { .. } => Some(Cutting { newlines: false, words: false }),
        Model::WordPiece(_) | Model::Words(_) | Model::Unigram(_) => None,
    };
    let leads = matches!(model, Model::Spm { add_space_prefix: true, .. } | Model::WordPiece(_));
    Ok(Tokenizer {
        longest: vocabulary.longest().filter(|_| keeps_all),
        specials: vocabulary.specials(),
        normal_specials: Specials::new(Precedence::Leftmost, []),
        normalizers,
        splitters,
        decoder: Vec::new(),
        decode_first: false,
        written: BTreeMap::new(),
        strips: leads.then_some((' ', 1)),
        texts: vocabulary.texts,
        bytes: vocabulary.bytes,
        kinds: vocabulary.kinds,
        model,
        ends,
        eog,
        cutting,
        digest: hash.finish(),
        memo: None,
        pair_template: None,
    })
}

fn pre_tokenizer(metadata: &Metadata) -> Result<PreTokenizer, Error> {
    let name: &str = metadata.get("tokenizer.ggml.pre")?.unwrap_or("default");
    pretokenize::find(name).ok_or_else(|| {
        let supported = pretokenize::TABLE.iter().map(|row| row.name).collect();
        TokenizerError::UnknownPre { found: name.to_owned(), supported }.into()
    })
}

/// One score per token. Some writers store integers.
pub(super) fn scores(metadata: &Metadata, tokens: usize) -> Result<Vec<f32>, Error> {
    let key = "tokenizer.ggml.scores";
    let scores: Vec<f32> = match metadata.value(key) {
        None => vec![0.0; tokens],
        Some(Value::Array(metadata::Array::I32(scores))) => scores.iter().map(|&s| s as f32).collect(),
        Some(_) => metadata.require::<Cow<'_, [f32]>>(key)?.into_owned(),
    };
    same_length(key, scores.len(), tokens)?;
    Ok(scores)
}

pub(super) fn same_length(key: &'static str, found: usize, tokens: usize) -> Result<(), TokenizerError> {
    if found == tokens { Ok(()) } else { Err(TokenizerError::Length { key, found, tokens }) }
}

/// Converts a byte-level token's characters to the bytes that they stand for.
fn spell_bytes(text: &str, out: &mut Vec<u8>) {
    for c in text.chars() {
        match bpe::char_byte(c) {
            Some(byte) => out.push(byte),
            None => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
}

/// Converts U+2581 to spaces.
fn spell_spaces(text: &str, out: &mut Vec<u8>) {
    out.extend_from_slice(text.replace(SPACE, " ").as_bytes());
}

/// Defaults of a kind of vocabulary, for absent keys.
#[derive(Default)]
struct Defaults {
    bos: Option<u32>,
    eos: Option<u32>,
    unknown: Option<u32>,
    adds_eos: bool,
}

impl Defaults {
    fn of(model: &str) -> Self {
        match model {
            "bert" => Self { bos: Some(101), eos: Some(102), unknown: Some(100), adds_eos: true },
            "llama" => Self { bos: Some(1), eos: Some(2), unknown: Some(0), adds_eos: false },
            _ => Self::default(),
        }
    }
}

/// A GGUF's settings of the special tokens around texts.
struct Around {
    bos: Option<u32>,
    adds_bos: bool,
    adds_eos: bool,
    sep: Option<u32>,
}

/// Tokens while a tokenizer is built.
pub(super) struct Vocabulary {
    pub(super) texts: Pieces,
    pub(super) bytes: Pieces,
    pub(super) kinds: Vec<Kind>,
}

impl Vocabulary {
    /// Normal tokens without bytes.
    pub(super) fn of_texts<'a>(tokens: impl Iterator<Item = &'a str>) -> Self {
        let mut texts = Pieces::default();
        tokens.for_each(|text| texts.push(text.as_bytes()));
        let kinds = vec![Kind::Normal; texts.len()];
        Self { texts, bytes: Pieces::default(), kinds }
    }

    pub(super) fn all_texts(&self) -> impl ExactSizeIterator<Item = &str> {
        (0..self.texts.len()).map(|id| u32::try_from(id).map_or("", |id| self.text(id)))
    }

    pub(super) fn kind(&self, id: u32) -> Option<Kind> {
        self.kinds.get(id as usize).copied()
    }

    /// Computes the bytes of each token.
    pub(super) fn spell_by(&mut self, bytes: impl Fn(u32, &str) -> Vec<u8>) {
        let mut spelled = Pieces::default();
        for (id, kind) in (0..).zip(&self.kinds) {
            match kind {
                Kind::Unused => spelled.push(&[]),
                _ => spelled.push(&bytes(id, self.text(id))),
            }
        }
        self.bytes = spelled;
    }

    fn read(metadata: &Metadata, tokens: &Strings) -> Result<Self, Error> {
        if tokens.is_empty() {
            return Err(TokenizerError::Empty.into());
        }
        if u32::try_from(tokens.len()).is_err() {
            return Err(TokenizerError::TooManyTokens { found: tokens.len() }.into());
        }
        let key = "tokenizer.ggml.token_type";
        let kinds = match metadata.get::<Cow<'_, [i32]>>(key)? {
            None => vec![Kind::Normal; tokens.len()],
            Some(types) => {
                same_length(key, types.len(), tokens.len())?;
                types.iter().map(|&n| kind(n)).collect()
            }
        };
        let mut texts = Pieces::default();
        tokens.iter().for_each(|text| texts.push(text.as_bytes()));
        Ok(Self { texts, bytes: Pieces::default(), kinds })
    }

    fn text(&self, id: u32) -> &str {
        self.texts.get(id).and_then(|t| std::str::from_utf8(t).ok()).unwrap_or_default()
    }

    fn ids(&self) -> impl Iterator<Item = u32> + use<> {
        (0..).take(self.texts.len())
    }

    /// The token of `key`, or `default`. An id beyond the vocabulary counts as absent, as in llama.cpp,
    /// because some files carry another model's ids.
    fn id(&self, metadata: &Metadata, key: &str, default: Option<u32>) -> Result<Option<u32>, Error> {
        let within = |id: &u32| (*id as usize) < self.texts.len();
        let default = default.filter(within);
        let Some(id) = metadata.get::<i64>(key)? else { return Ok(default) };
        let id = u32::try_from(id).ok().filter(within);
        if id.is_none() {
            tracing::warn!(
                key,
                tokens = self.texts.len(),
                "the key names no token of the vocabulary; it is ignored"
            );
        }
        Ok(id.or(default))
    }

    /// Finds the end-of-generation tokens, and corrects wrong token kinds in files.
    fn ends(&mut self, metadata: &Metadata, eos: Option<u32>) -> Result<BTreeSet<u32>, Error> {
        let mut ends = BTreeSet::from_iter(eos);
        for &(key, texts) in END_KEYS {
            let found = match self.id(metadata, key, None)? {
                Some(id) => Some(id),
                None => self.ids().find(|&id| texts.contains(&self.text(id))),
            };
            ends.extend(found);
        }
        self.ends_by_text(&mut ends, |_, _| true);
        Ok(ends)
    }

    /// Adds the tokens that end a generation in every model to `ends`, of those that `may`, and corrects their
    /// kinds.
    pub(super) fn ends_by_text(&mut self, ends: &mut BTreeSet<u32>, may: impl Fn(&Self, u32) -> bool) {
        let found = |vocabulary: &Self, texts: &[&str]| -> Vec<u32> {
            let ids = vocabulary.ids().filter(|&id| texts.contains(&vocabulary.text(id)));
            ids.filter(|id| may(vocabulary, *id)).collect()
        };
        let by_text = found(self, END_TEXTS);
        for &id in &by_text {
            self.set_kind(id, Kind::Control);
        }
        ends.extend(by_text);
        for id in found(self, SHOWN_TEXTS) {
            self.set_kind(id, Kind::UserDefined);
        }
        let find = |text: &str| ends.iter().copied().find(|&id| self.text(id) == text);
        let calls = find("<|call|>").or(find("<|calls|>")).is_some();
        // In these formats this token ends a message, and another message follows.
        let message_end =
            find("<|end|>").filter(|_| calls && (find("<|return|>").or(find("<|flush|>"))).is_some());
        let html_end = find("</s>").filter(|_| find("<|tool_response>").is_some());
        if let Some(id) = message_end {
            ends.remove(&id);
            self.set_kind(id, Kind::UserDefined);
        }
        if let Some(id) = html_end {
            ends.remove(&id);
            self.set_kind(id, Kind::Normal);
        }
    }

    /// The special tokens before, between and after the texts of a sequence.
    fn around(
        &self,
        metadata: &Metadata,
        defaults: &Defaults,
        eos: Option<u32>,
        adds_bos: bool,
    ) -> Result<Around, Error> {
        let bos = self.id(metadata, "tokenizer.ggml.bos_token_id", defaults.bos)?;
        let adds_bos = metadata.get("tokenizer.ggml.add_bos_token")?.unwrap_or(adds_bos);
        if adds_bos && bos.is_none() {
            return Err(TokenizerError::NoBos.into());
        }
        let adds_eos = metadata.get("tokenizer.ggml.add_eos_token")?.unwrap_or(defaults.adds_eos);
        if adds_eos && eos.is_none() {
            return Err(TokenizerError::NoEos.into());
        }
        let adds_sep = metadata.get("tokenizer.ggml.add_sep_token")?.unwrap_or(false);
        // This spelling is the key's.
        let sep = match adds_sep {
            true => self.id(metadata, "tokenizer.ggml.seperator_token_id", None)?,
            false => None,
        };
        Ok(Around { bos, adds_bos, adds_eos, sep })
    }

    pub(super) fn set_kind(&mut self, id: u32, kind: Kind) {
        if let Some(slot) = self.kinds.get_mut(id as usize) {
            *slot = kind;
        }
    }

    /// Computes the bytes of each token; `normal` converts pieces of text.
    fn spell(&mut self, normal: impl Fn(&str, &mut Vec<u8>)) {
        let mut bytes = Pieces::default();
        let mut spelled = Vec::new();
        for (id, kind) in (0..).zip(&self.kinds) {
            let text = self.text(id);
            spelled.clear();
            match kind {
                Kind::Normal => normal(text, &mut spelled),
                Kind::Control | Kind::Unknown | Kind::UserDefined => {
                    spelled.extend_from_slice(text.as_bytes())
                }
                Kind::Byte => spelled.extend(byte(text)),
                Kind::Unused => {}
            }
            bytes.push(&spelled);
        }
        self.bytes = bytes;
    }

    /// Longest token in bytes.
    pub(super) fn longest(&self) -> Option<NonZeroUsize> {
        let bytes = |(id, kind): (u32, &Kind)| {
            let text = match kind {
                // Matched in a text by the token's own text.
                Kind::Control | Kind::Unknown | Kind::UserDefined => self.texts.get(id),
                Kind::Normal | Kind::Unused | Kind::Byte => None,
            };
            text.map_or(0, <[u8]>::len).max(self.bytes.get(id).map_or(0, <[u8]>::len))
        };
        NonZeroUsize::new((0..).zip(&self.kinds).map(bytes).max()?)
    }

    fn specials(&self) -> Specials {
        let token = |(id, kind): (u32, &Kind)| match kind {
            Kind::Control | Kind::Unknown => Some((self.texts.get(id)?, Special::new(id, false))),
            Kind::UserDefined => Some((self.texts.get(id)?, Special::new(id, true))),
            Kind::Normal | Kind::Unused | Kind::Byte => None,
        };
        Specials::new(Precedence::Longest, (0..).zip(&self.kinds).filter_map(token))
    }
}

fn kind(number: i32) -> Kind {
    match number {
        1 => Kind::Normal,
        2 => Kind::Unknown,
        3 => Kind::Control,
        4 => Kind::UserDefined,
        6 => Kind::Byte,
        _ => Kind::Unused,
    }
}

/// BLAKE3 over everything that defines a tokenizer; variable-length data has a length prefix.
pub(super) struct Hash(blake3::Hasher);

impl Hash {
    /// `format` names what is hashed.
    pub(super) fn begin(format: &str) -> Self {
        let mut hash = Self(blake3::Hasher::new());
        hash.text(format);
        hash
    }

    fn new(model: &str, vocabulary: &Vocabulary) -> Self {
        let mut hash = Self::begin("kvasir tokenizer 1");
        hash.text(model);
        hash.number(vocabulary.texts.len() as u64);
        vocabulary.ids().for_each(|id| hash.text(vocabulary.text(id)));
        vocabulary.kinds.iter().for_each(|kind| hash.number(*kind as u64));
        hash
    }

    pub(super) fn number(&mut self, number: u64) {
        self.0.update(&number.to_le_bytes());
    }

    pub(super) fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.update(text.as_bytes());
    }

    pub(super) fn list<'a>(&mut self, texts: impl ExactSizeIterator<Item = &'a str>) {
        self.number(texts.len() as u64);
        texts.for_each(|text| self.text(text));
    }

    pub(super) fn finish(self) -> [u8; 32] {
        self.0.finalize().into()
    }
}
