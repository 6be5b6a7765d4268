//! Builds a tokenizer from the files of a Hugging Face repository: `tokenizer.json` and those beside it.
//!
//! Ids are those of the library `tokenizers` for the same files. Content of the files that this reader does not
//! support is refused, with its place.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use metadata::Metadata;
use serde_json::Value as Json;

use crate::Error;

use super::bpe::{Bpe, char_byte};
use super::char_bpe::{Affixed, CharBpe, Rules};
use super::decode::TokenDecoder;
use super::merges::Merges;
use super::normalize::{self, Normalizer};
use super::pieces::{Index, Pieces};
use super::read::{Hash, Vocabulary};
use super::special::{Precedence, Special, Specials};
use super::splitters::Splitter;
use super::unigram::Unigram;
use super::word_piece::{Spelling, WordPiece};
use super::{Cutting, Ends, Kind, Model, Tokenizer, TokenizerError, decode};

use components::PreTokenizers;
use file::{AddedToken, BpeFields, Named, TokenizerFile, Vocab};
use node::Node;

mod components;
mod file;
mod known;
mod node;

#[cfg(test)]
pub(super) use known::scanned;

/// Longest file in bytes.
const MAX_BYTES: usize = 64 << 20;

/// The files of a Hugging Face repository that define a tokenizer, as text.
#[derive(Debug, Clone, Copy, Default)]
pub struct HfFiles<'a> {
    /// `tokenizer.json`.
    pub tokenizer: &'a str,
    /// `tokenizer_config.json`: the names of BOS, EOS and other special tokens.
    pub tokenizer_config: Option<&'a str>,
    /// `special_tokens_map.json`: the same names, for repositories whose configuration lacks them.
    pub special_tokens_map: Option<&'a str>,
    /// `generation_config.json`: further tokens that end a generation.
    pub generation_config: Option<&'a str>,
}

impl<'a> HfFiles<'a> {
    /// The files that `tokenizer.huggingface.*` have; `None` without `tokenizer.json`.
    ///
    /// # Errors
    /// A key of the wrong type.
    pub fn from_metadata(metadata: &'a Metadata) -> Result<Option<Self>, Error> {
        let Some(tokenizer) = metadata.get("tokenizer.huggingface.json")? else { return Ok(None) };
        Ok(Some(Self {
            tokenizer,
            tokenizer_config: metadata.get("tokenizer.huggingface.config")?,
            special_tokens_map: metadata.get("tokenizer.huggingface.special_tokens_map")?,
            generation_config: metadata.get("tokenizer.huggingface.generation_config")?,
        }))
    }
}

/// Implements [`Tokenizer::from_hf`].
pub(super) fn tokenizer(files: &HfFiles<'_>) -> Result<Tokenizer, Error> {
    for (name, text) in [
        ("tokenizer.json", Some(files.tokenizer)),
        ("tokenizer_config.json", files.tokenizer_config),
        ("special_tokens_map.json", files.special_tokens_map),
        ("generation_config.json", files.generation_config),
    ] {
        let bytes = text.map_or(0, str::len);
        if bytes > MAX_BYTES {
            return Err(TokenizerError::FileTooLong { file: name, bytes, limit: MAX_BYTES }.into());
        }
    }
    let file: TokenizerFile = file::parse("tokenizer.json", files.tokenizer)?;
    let named = Named::read(files)?;
    build(file, &named).map_err(Error::from)
}

/// A vocabulary while it is built.
struct Tokens {
    /// Id of each text of the model's own vocabulary.
    ids: HashMap<String, u32>,
    /// Texts by id; `None` where no token has the id.
    texts: Vec<Option<String>>,
    added: Vec<(AddedToken, u32)>,
    /// Places in `added` by text.
    places: HashMap<String, usize>,
    /// Above the ids of all added tokens.
    above_added: u32,
}

impl Tokens {
    fn read(vocab: &Vocab) -> Result<Self, TokenizerError> {
        let count = vocab.len();
        if count == 0 {
            return Err(refused("model.vocab", "is empty"));
        }
        // Ids that no token has take memory too.
        let limit = 2 * count as u64 + (1 << 16);
        let mut tokens = Self {
            ids: HashMap::with_capacity(count),
            texts: Vec::new(),
            added: Vec::new(),
            places: HashMap::new(),
            above_added: 0,
        };
        vocab.each(|text, id| {
            if u64::from(id) >= limit {
                return Err(refused(
                    "model.vocab",
                    format!("`{text}` has id {id}, expected less than {limit}"),
                ));
            }
            tokens.ids.insert(text.to_owned(), id);
            tokens.set(id, text);
            Ok(())
        })?;
        Ok(tokens)
    }

    fn set(&mut self, id: u32, text: &str) {
        let id = id as usize;
        if self.texts.len() <= id {
            self.texts.resize(id + 1, None);
        }
        self.texts[id] = Some(text.to_owned());
    }

    /// Adds a token as Transformers does: its id is that of the vocabulary, else the next free one. A token
    /// that exists gets the new properties.
    fn add(&mut self, token: AddedToken) -> u32 {
        if let Some((known, id)) = self.places.get(&token.content).and_then(|at| self.added.get_mut(*at)) {
            *known = AddedToken { special: known.special || token.special, ..token };
            return *id;
        }
        let next = self.above_added.max(self.ids.len() as u32);
        let id = self.ids.get(&token.content).copied().unwrap_or(next);
        self.above_added = self.above_added.max(id + 1);
        self.set(id, &token.content);
        self.places.insert(token.content.clone(), self.added.len());
        self.added.push((token, id));
        id
    }

    fn has_added(&self, text: &str) -> bool {
        self.places.contains_key(text)
    }

    fn find(&self, text: &str) -> Option<u32> {
        let added = self.places.get(text).and_then(|at| self.added.get(*at)).map(|(_, id)| *id);
        added.or_else(|| self.ids.get(text).copied())
    }
}

fn build(file: TokenizerFile, named: &Named) -> Result<Tokenizer, TokenizerError> {
    let TokenizerFile { added_tokens, normalizer, pre_tokenizer, post_processor, decoder, model, .. } = file;
    let mut hash = Hash::begin("kvasir tokenizer hf 1");
    for component in [&normalizer, &pre_tokenizer, &post_processor, &decoder] {
        hash.text(&component.to_string());
    }
    let mut tokens = Tokens::read(&model.vocab)?;
    let mut seen = HashMap::new();
    for (at, token) in added_tokens.into_iter().enumerate() {
        if token.content.is_empty() || seen.insert(token.content.clone(), ()).is_some() {
            continue;
        }
        let (expected, content) = (token.id, token.content.clone());
        let id = tokens.add(token);
        if expected.is_some_and(|expected| expected != id) {
            tracing::warn!(
                at,
                content,
                expected,
                id,
                "added_tokens: the id is not the next one; it is not used"
            );
        }
    }
    named.add_to(&mut tokens);
    for (token, id) in &tokens.added {
        hash.text(&token.content);
        hash.number(u64::from(*id));
        hash.number(token.bits());
        hash.number(u64::from(tokens.ids.contains_key(&token.content)));
    }
    hash.number(tokens.ids.len() as u64);

    let normalizers = components::normalizers(Node::root("normalizer", &normalizer))?;
    let PreTokenizers { splitters, bytes } =
        components::splitters(Node::root("pre_tokenizer", &pre_tokenizer))?;
    let decoding = components::decoder(Node::root("decoder", &decoder))?;
    let mut vocabulary = Vocabulary::of_texts(tokens.texts.iter().map(|text| text.as_deref().unwrap_or("")));
    let byte_tokens = decoding.decoders.iter().any(|splitter| matches!(splitter, TokenDecoder::ByteFallback));
    for (id, text) in (0..).zip(&tokens.texts) {
        vocabulary.set_kind(
            id,
            match text {
                None => Kind::Unused,
                Some(text) if byte_tokens && text.len() == 6 && decode::byte(text).is_some() => Kind::Byte,
                Some(_) => Kind::Normal,
            },
        );
    }
    for (token, id) in &tokens.added {
        vocabulary.set_kind(*id, if token.special { Kind::Control } else { Kind::UserDefined });
    }
    // Transformers writes a token that is found in normalised text as that text.
    let written: BTreeMap<u32, Box<str>> = found_in(&tokens, true)
        .map(|(token, id)| (*id, normalize::apply(&normalizers, &token.content, true).into()))
        .collect();
    vocabulary.spell_by(|id, text| {
        decode::spell(&decoding.decoders, written.get(&id).map_or(text, |text| text), false)
    });

    // Without spaces nothing is cut at them.
    let mut splitters = without_idle(splitters, &normalizers);
    let cutting = cutting(&normalizers, &splitters, &tokens);
    let (model, keeps_all) = match &*model.kind()? {
        "BPE" => bpe(&model, &tokens, &vocabulary.texts, bytes, &mut hash)?,
        "WordPiece" => word_piece(&model, &tokens, &vocabulary.texts, &mut hash)?,
        "Unigram" => unigram(&model, &tokens, &vocabulary.texts, &mut hash)?,
        found => return Err(refused("model", format!("type \"{found}\" is not supported"))),
    };

    if matches!(model, Model::Bpe { .. }) {
        // It reads bytes.
        splitters.pop();
    }

    let eos = named.eos.as_deref().and_then(|text| tokens.find(text));
    let mut eog = BTreeSet::from_iter(eos);
    let within = |id: &u32| (*id as usize) < tokens.texts.len();
    eog.extend(named.generation_ends.iter().copied().filter(within));
    vocabulary.ends_by_text(&mut eog, |vocabulary, id| {
        matches!(vocabulary.kind(id), Some(Kind::Control | Kind::UserDefined))
    });
    let special = |token: &AddedToken, id: u32| Special {
        id,
        always: !token.special && vocabulary.kind(id) != Some(Kind::Control),
        takes_space: (token.lstrip, token.rstrip),
        whole_word: token.single_word,
    };
    let specials =
        found_in(&tokens, false).map(|(token, id)| (token.content.as_bytes(), special(token, *id)));
    let specials = Specials::new(Precedence::Leftmost, specials);
    let contents: Vec<_> = found_in(&tokens, true)
        .map(|(token, id)| (normalize::apply(&normalizers, &token.content, true), special(token, *id)))
        .collect();
    let contents = contents.iter().map(|(text, special)| (text.as_bytes(), *special));
    let normal_specials = Specials::new(Precedence::Leftmost, contents);

    let ends = ends(&post_processor, &tokens, named, eos)?;
    ends.hash(&mut hash);
    hash.list(vocabulary.all_texts());
    vocabulary.kinds.iter().for_each(|kind| hash.number(*kind as u64));
    hash.number(eos.map_or(u64::MAX, u64::from));
    hash.number(eog.len() as u64);
    eog.iter().for_each(|id| hash.number(u64::from(*id)));

    let shorter = normalizers.iter().map(Normalizer::shortens).try_fold(1, |all, by| Some(all * by?));
    let drops = splitters.iter().any(|splitter| !splitter.keeps_all());
    let takes_space = tokens.added.iter().any(|(token, _)| token.lstrip || token.rstrip);
    let longest = shorter.filter(|_| keeps_all && !drops && !takes_space);
    let longest = longest.and_then(|by| vocabulary.longest()?.checked_mul(by.try_into().ok()?));
    Ok(Tokenizer {
        longest,
        specials,
        normal_specials,
        normalizers,
        splitters,
        decode_first: decoding.first,
        written,
        decoder: decoding.decoders,
        strips: decoding.strips,
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

/// The added tokens that are found in a text as it is, or as it is normalised.
fn found_in(tokens: &Tokens, normalized: bool) -> impl Iterator<Item = &(AddedToken, u32)> {
    tokens.added.iter().filter(move |(token, _)| token.normalized == normalized)
}

fn refused(place: impl Into<String>, reason: impl Into<String>) -> TokenizerError {
    TokenizerError::Component { place: place.into(), reason: reason.into() }
}

/// Where a memo may cut texts.
fn cutting(normalizers: &[Normalizer], splitters: &[Splitter], tokens: &Tokens) -> Option<Cutting> {
    let added = || tokens.added.iter().map(|(token, _)| token);
    if !normalizers.iter().all(Normalizer::may_be_cut)
        || added().any(|token| token.single_word || (token.normalized && !normalizers.is_empty()))
    {
        return None;
    }
    let (splitters, bytes) = match splitters {
        [splitters @ .., Splitter::ByteChars] => (splitters, true),
        splitters => (splitters, false),
    };
    let mut cutting = match splitters {
        [] if bytes => return None,
        [] => Cutting { newlines: false, words: false },
        [Splitter::Metaspace { split, .. }] => Cutting { newlines: false, words: *split },
        _ => known::cutting(splitters)?,
    };
    cutting.newlines &= !added().any(|token| token.lstrip || token.rstrip);
    Some(cutting)
}

/// Drops splitters that look for spaces where the normalizers leave none.
fn without_idle(mut splitters: Vec<Splitter>, normalizers: &[Normalizer]) -> Vec<Splitter> {
    use super::normalize::Pattern;
    let replaces_spaces = matches!(
        normalizers.last(),
        Some(Normalizer::Replace { pattern: Pattern::Text(text), content }) if &**text == " " && !content.contains(' ')
    );
    if let [Splitter::Split { pattern: Pattern::Text(text), invert: false, .. }] = &*splitters
        && replaces_spaces
        && &**text == " "
    {
        splitters.clear();
    }
    splitters
}

/// Tokens of the model's vocabulary that ordinary text may become.
fn of_text<'a>(tokens: &'a Tokens) -> impl Iterator<Item = u32> + 'a {
    let control: BTreeSet<u32> =
        tokens.added.iter().filter(|(token, _)| token.special).map(|(_, id)| *id).collect();
    let mut ids: Vec<u32> = tokens.ids.values().copied().filter(|id| !control.contains(id)).collect();
    ids.sort_unstable();
    ids.into_iter()
}

/// The tokens `<0x00>` to `<0xFF>`.
fn byte_tokens(tokens: &Tokens) -> [Option<u32>; 256] {
    std::array::from_fn(|byte| tokens.ids.get(&format!("<0x{byte:02X}>")).copied())
}

type Built = (Model, bool);

fn bpe(
    model: &file::RawModel,
    tokens: &Tokens,
    texts: &Pieces,
    bytes: bool,
    hash: &mut Hash,
) -> Result<Built, TokenizerError> {
    let fields = BpeFields::read(model)?;
    hash.text(&format!("{fields:?}"));
    let id = |text: &str| tokens.ids.get(text).copied();
    let missing = |place: String, text: &str| refused(place, format!("`{text}` is not in the vocabulary"));
    let of_unknown = |text: &String| id(text).ok_or_else(|| missing("model.unk_token".to_owned(), text));
    let unknown = fields.unk_token.as_ref().map(of_unknown).transpose()?;
    let fallback = if fields.byte_fallback { byte_tokens(tokens) } else { [None; 256] };
    let odd: BTreeSet<u32> = fallback.iter().copied().flatten().chain(unknown).collect();
    let prefix = fields.continuing_subword_prefix.as_deref().unwrap_or_default();
    let mut merges = Vec::with_capacity(model.merges.len());
    let mut merged = String::new();
    for (at, (left, right)) in model.merges.iter().enumerate() {
        merged.clear();
        merged.push_str(left);
        merged.push_str(right.get(prefix.len()..).unwrap_or_default());
        let known = |text: &str| id(text).ok_or_else(|| missing(format!("model.merges[{at}]"), text));
        let merge = (known(left)?, known(right)?, known(&merged)?);
        if odd.contains(&merge.0) || odd.contains(&merge.1) {
            let reason = "merges a byte token or the unknown token, which is not supported";
            return Err(refused(format!("model.merges[{at}]"), reason));
        }
        hash.number(u64::from(merge.0) << 32 | u64::from(merge.1));
        merges.push(merge);
    }
    let merges = Merges::of_tokens(merges.into_iter());
    let affixes = !prefix.is_empty() || fields.end_of_word_suffix.is_some();
    if bytes && unknown.is_none() && !fields.byte_fallback && !affixes {
        let mut words = Index::with_capacity(texts.len());
        let mut pieces = Pieces::default();
        let words_of_text: BTreeSet<u32> = of_text(tokens).collect();
        for (at, text) in (0..).zip(&tokens.texts) {
            let spelled: Option<Vec<u8>> =
                text.as_ref().and_then(|text| text.chars().map(char_byte).collect());
            let spelled = spelled.filter(|bytes| !bytes.is_empty() && words_of_text.contains(&at));
            pieces.push(spelled.as_deref().unwrap_or_default());
            if spelled.is_some() {
                words.insert(&pieces, at);
            }
        }
        let bpe = Bpe::of_tokens(fields.ignore_merges, id, merges, words, tokens.texts.len());
        let keeps_all = bpe.keeps_all();
        return Ok((Model::Bpe { bpe: Box::new(bpe), words: Some(pieces) }, keeps_all));
    }
    let suffix = fields.end_of_word_suffix.as_deref().unwrap_or_default();
    let letters = |prefix: &str, suffix: &str| -> HashMap<char, u32> {
        let letter = |(text, id): (&String, &u32)| {
            let mut chars = text.strip_prefix(prefix)?.strip_suffix(suffix)?.chars();
            Some((chars.next().filter(|_| chars.next().is_none())?, *id))
        };
        tokens.ids.iter().filter_map(letter).collect()
    };
    let affixed = affixes.then(|| Affixed {
        middle: letters(prefix, ""),
        last: letters(prefix, suffix),
        only: letters("", suffix),
    });
    let mut index = Index::with_capacity(texts.len());
    // With affixes a word's own text is not what its characters merge to.
    if affixed.is_none() || fields.ignore_merges {
        of_text(tokens).for_each(|id| index.insert(texts, id));
    }
    let rules = Rules {
        bytes: fallback,
        unknown,
        fuses_unknown: fields.fuse_unk,
        whole_words_first: fields.ignore_merges,
        affixed,
    };
    let parts = model.merges.iter().map(|(left, right)| (&**left, &**right));
    let bpe = CharBpe::of_tokens(merges, letters("", ""), index, rules, parts, tokens.texts.len());
    // As text, bytes as characters are longer than what they stand for.
    let keeps_all = bpe.keeps_all() && !bytes;
    Ok((Model::CharBpe(Box::new(bpe)), keeps_all))
}

fn word_piece(
    model: &file::RawModel,
    tokens: &Tokens,
    texts: &Pieces,
    hash: &mut Hash,
) -> Result<Built, TokenizerError> {
    let mut fields = model.fields("WordPiece")?;
    let unknown = fields.text("unk_token")?.unwrap_or_else(|| "[UNK]".to_owned());
    let next = fields.text("continuing_subword_prefix")?.unwrap_or_else(|| "##".to_owned());
    let longest_word = fields.count("max_input_chars_per_word")?.unwrap_or(100);
    fields.finish()?;
    let id = tokens.ids.get(&unknown).copied();
    let id = id.ok_or_else(|| refused("model.unk_token", format!("`{unknown}` is not in the vocabulary")))?;
    hash.text("WordPiece");
    hash.text(&next);
    hash.number(u64::from(id));
    hash.number(longest_word as u64);
    let spelling = Spelling { first: "".into(), next: next.into(), longest_word };
    Ok((Model::Words(WordPiece::of_words(texts, of_text(tokens), id, spelling)), false))
}

fn unigram(
    model: &file::RawModel,
    tokens: &Tokens,
    texts: &Pieces,
    hash: &mut Hash,
) -> Result<Built, TokenizerError> {
    let mut fields = model.fields("Unigram")?;
    let unknown = fields.count("unk_id")?.map(|id| id as u32);
    let byte_fallback = fields.flag("byte_fallback")?.unwrap_or(false);
    fields.finish()?;
    let Vocab::Scores(scores) = &model.vocab else {
        return Err(refused("model.vocab", "is no list of texts and scores"));
    };
    if unknown.is_some_and(|id| id as usize >= scores.len()) {
        return Err(refused("model.unk_id", "is not in the vocabulary"));
    }
    hash.text("Unigram");
    hash.number(unknown.map_or(u64::MAX, u64::from));
    hash.number(u64::from(byte_fallback));
    let scores: Vec<f64> = scores.iter().map(|(_, score)| *score).collect();
    scores.iter().for_each(|score| hash.number(score.to_bits()));
    let bytes: Option<Vec<u32>> = byte_tokens(tokens).into_iter().collect();
    let bytes = bytes.filter(|_| byte_fallback).and_then(|bytes| bytes.try_into().ok());
    let unigram = Unigram::new(texts, of_text(tokens).collect(), scores, unknown, bytes);
    let keeps_all = unigram.keeps_all();
    Ok((Model::Unigram(Box::new(unigram)), keeps_all))
}

/// The special tokens around texts, by the post-processor, or by the configuration if there is none.
fn ends(
    post_processor: &Json,
    tokens: &Tokens,
    named: &Named,
    eos: Option<u32>,
) -> Result<Ends, TokenizerError> {
    let bos = named.bos.as_deref().and_then(|text| tokens.find(text));
    let around = match post_processor {
        Json::Null => {
            let before: Vec<u32> = bos.filter(|_| named.adds_bos).into_iter().collect();
            let after: Vec<u32> = eos.filter(|_| named.adds_eos).into_iter().collect();
            let between = [after.clone(), before.clone()].concat();
            components::Around {
                before: before.clone(),
                after: after.clone(),
                pair: [before, between, after],
            }
        }
        _ => components::around(Node::root("post_processor", post_processor), &|id| {
            (id as usize) < tokens.texts.len()
        })?,
    };
    let only = |ids: &[u32]| ids.first().copied().filter(|_| ids.len() == 1);
    let (bos, eos) = (bos.or(only(&around.before)), eos.or(only(&around.after)));
    Ok(Ends { bos, eos, before: around.before, after: around.after, pair: around.pair })
}

#[cfg(test)]
mod tests;
