//! Text to token ids and back, from a model file's metadata alone.
//!
//! A tokenizer consists of parts: special tokens that are cut out of a text, normalizers, splitters that cut words,
//! and a model that makes tokens of a word. Two kinds of files describe them. In a GGUF four kinds of vocabulary
//! are read, by the value of `tokenizer.ggml.model`: byte-level BPE (`gpt2`), BPE of characters (`gemma4`),
//! SentencePiece by score (`llama`) and WordPiece (`bert`). Ids are those that llama.cpp gives for the same file.
//! The files of a Hugging Face repository name every part ([`HfFiles`]). Ids are those of Transformers.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::ops::Range;

use crate::Error;
use crate::cpu_time::CpuDeadline;
use crate::recent::RecentUse;
use metadata::Metadata;

use bpe::Bpe;
use char_bpe::CharBpe;
use decode::TokenDecoder;
use memo::{Cuts, Memo, PieceContext};
use normalize::Normalizer;
use pieces::Pieces;
use special::{Quoted, SpecialPart as Cut, Specials};
use splitters::Splitter;
use spm::Spm;
use unigram::Unigram;
use word_piece::WordPiece;

/// Bytes of a piece that is encoded where time is short.
const SHORT_PIECE: usize = 8 << 10;
/// Bytes of pieces that are encoded before a deadline is checked again. A longer piece is checked alone.
const UNCHECKED_BYTES: usize = 4 << 10;

pub use detokenizer::{Detokenizer, Utf8Stream};
pub use hf::HfFiles;
pub use memo::KnownPart;
pub use pairs::{PairTemplate, Pairs};

mod bpe;
mod char_bpe;
mod charsmap;
mod classes;
mod decode;
mod detokenizer;
mod hf;
mod memo;
mod merge;
mod merges;
mod normalize;
mod pairs;
mod pieces;
mod pretokenize;
mod read;
mod regex;
mod sentence_piece;
mod special;
mod splitters;
mod spm;
mod unigram;
mod word_memo;
mod word_piece;

/// A vocabulary and the way to cut text into it. Immutable; share it in an `Arc`.
#[derive(Debug)]
pub struct Tokenizer {
    /// Tokens as the file has them.
    texts: Pieces,
    /// The text of each token.
    bytes: Pieces,
    kinds: Vec<Kind>,
    /// Longest token in bytes. `None` if parts of a text may produce no token.
    longest: Option<NonZeroUsize>,
    /// Found in a text as it is.
    specials: Specials,
    normalizers: Vec<Normalizer>,
    /// Found in a text that was normalised.
    normal_specials: Specials,
    splitters: Vec<Splitter>,
    model: Model,
    decoder: Vec<TokenDecoder>,
    /// The first token of a text is spelled by `decoder`, otherwise than `bytes` has it.
    decode_first: bool,
    /// Added tokens that are written otherwise than their text.
    written: BTreeMap<u32, Box<str>>,
    /// A character, and how many of it at the beginning of a decoded text are removed.
    strips: Option<(char, usize)>,
    ends: Ends,
    eog: BTreeSet<u32>,
    /// `None` if it is not known where texts may be cut.
    cutting: Option<Cutting>,
    digest: [u8; 32],
    memo: Option<Memo>,
    /// Prompt for two texts that a model compares. `None`: special tokens are around them.
    pair_template: Option<PairTemplate>,
}

/// Where texts may be cut for the memo.
#[derive(Debug, Clone, Copy)]
struct Cutting {
    /// After a newline between printable characters.
    newlines: bool,
    /// Between a letter and a space, whatever the model is: words end there.
    words: bool,
}

#[derive(Debug)]
enum Model {
    Bpe {
        bpe: Box<Bpe>,
        /// Tokens by their bytes, if `Tokenizer::bytes` has others.
        words: Option<Pieces>,
    },
    CharBpe(Box<CharBpe>),
    Spm {
        spm: Box<Spm>,
        add_space_prefix: bool,
    },
    /// Of a GGUF: normalises and cuts words itself.
    WordPiece(WordPiece),
    /// WordPiece over the words of the splitters.
    Words(WordPiece),
    Unigram(Box<Unigram>),
}

/// Special tokens before, between and after the texts of a sequence.
#[derive(Debug, Clone)]
struct Ends {
    bos: Option<u32>,
    eos: Option<u32>,
    /// Before and after a text.
    before: Vec<u32>,
    after: Vec<u32>,
    /// Before, between and after two texts.
    pair: [Vec<u32>; 3],
}

impl Ends {
    fn hash(&self, hash: &mut read::Hash) {
        hash.number(self.bos.map_or(u64::MAX, u64::from));
        for ids in [&self.before, &self.after].into_iter().chain(&self.pair) {
            hash.number(ids.len() as u64);
            ids.iter().for_each(|id| hash.number(u64::from(*id)));
        }
    }
}

/// Purpose of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Normal,
    /// Stands for what is not in the vocabulary.
    Unknown,
    /// Steers the model; never part of a text by itself.
    Control,
    /// A piece of text that is cut out before anything is merged.
    UserDefined,
    /// A slot that nothing uses.
    Unused,
    /// A single byte.
    Byte,
}

/// Error of metadata that does not define a tokenizer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A kind of vocabulary that this version does not read.
    #[error("tokenizer.ggml.model is `{found}`; supported are {}", supported.join(", "))]
    UnknownModel { found: String, supported: &'static [&'static str] },
    /// A way of cutting words that this version does not support. Guessing would give wrong ids silently.
    #[error("tokenizer.ggml.pre is `{found}`; supported are {}", supported.join(", "))]
    UnknownPre { found: String, supported: Vec<&'static str> },
    /// There are no tokens.
    #[error("tokenizer.ggml.tokens is empty")]
    Empty,
    /// More tokens or merges than ids can number.
    #[error("the vocabulary needs {found} ids, more than 32 bits can represent")]
    TooManyTokens { found: usize },
    /// A per-token list has the wrong length.
    #[error("{key} has {found} entries for {tokens} tokens")]
    Length { key: &'static str, found: usize, tokens: usize },
    /// A line of the merge list is not two texts separated by a space.
    #[error("tokenizer.ggml.merges has `{line}` at {rank}, which is not two texts")]
    BadMerge {
        /// Its index, from 0.
        rank: u32,
        line: String,
    },
    /// A score is not a number.
    #[error("the score of token {token} is not a number")]
    ScoreNotANumber { token: usize },
    /// The file requires a BOS token and does not define one.
    #[error("tokenizer.ggml.add_bos_token is set, but tokenizer.ggml.bos_token_id names no token")]
    NoBos,
    /// The file requires an EOS token and does not define one.
    #[error("tokenizer.ggml.add_eos_token is set, but tokenizer.ggml.eos_token_id names no token")]
    NoEos,
    /// The vocabulary has neither an unknown token nor a fallback for unknown words.
    #[error("tokenizer.ggml.unknown_token_id names no token, but this kind of vocabulary requires one")]
    NoUnknown,
    /// A file of a Hugging Face repository is not JSON, or lacks a field.
    #[error("{file}: {source}")]
    NotReadable { file: &'static str, source: serde_json::Error },
    #[error("{file} has {bytes} bytes, at most {limit}")]
    FileTooLong { file: &'static str, bytes: usize, limit: usize },
    /// A component of `tokenizer.json` that is not valid or not supported.
    #[error("{place}: {reason}")]
    Component {
        /// Its place in the file, such as `pre_tokenizer.pretokenizers[1]`.
        place: String,
        reason: String,
    },
}

/// Whether the deadline is checked before a piece of this size. `unchecked`: bytes since the last check.
fn is_checked(unchecked: &Cell<usize>, bytes: usize) -> bool {
    let since = unchecked.get() + bytes;
    let check = since > UNCHECKED_BYTES;
    unchecked.set(if check { bytes } else { since });
    check
}

impl Tokenizer {
    /// Reads `tokenizer.ggml.*`, or if these are absent the files in `tokenizer.huggingface.*`
    /// ([`HfFiles::from_metadata`]).
    ///
    /// # Errors
    /// A missing key or one of the wrong type, and [`TokenizerError`].
    pub fn from_metadata(metadata: &Metadata) -> Result<Self, Error> {
        read::tokenizer(metadata)
    }

    /// Reads the files of a Hugging Face repository.
    ///
    /// # Errors
    /// [`TokenizerError`]; what is not supported is named with its place.
    pub fn from_hf(files: &HfFiles<'_>) -> Result<Self, Error> {
        hf::tokenizer(files)
    }

    /// Encodes `text`. If `special`, texts of control tokens become these tokens; otherwise they are ordinary
    /// text, and only user-defined tokens are matched. Never adds BOS or EOS.
    pub fn encode(&self, text: &str, special: bool) -> Vec<u32> {
        self.encode_in_parts(text, special).0
    }

    /// Like [`encode`](Self::encode); also returns the memoised parts at the beginning of the text.
    pub fn encode_in_parts(&self, text: &str, special: bool) -> (Vec<u32>, Vec<KnownPart>) {
        self.encode_outside(text, special, Quoted::NONE)
    }

    /// Encodes a prompt like [`encode_in_parts`](Self::encode_in_parts) with special tokens, but a control
    /// token's text that overlaps a range of `quoted` is ordinary text. The ranges are ascending and do not
    /// overlap.
    pub fn encode_prompt(&self, text: &str, quoted: &[Range<usize>]) -> (Vec<u32>, Vec<KnownPart>) {
        // Most texts contain no quoted control tokens, and then everything can be memoised.
        let quoted = self.relevant_ranges(text, quoted);
        self.encode_outside(text, true, Quoted::new(&quoted))
    }

    /// Like [`encode_prompt`](Self::encode_prompt), but returns `None` at a piece outside the memo that
    /// is longer than 8 KiB or begins after the deadline. The deadline is checked before the first such
    /// piece, and before each one that makes more than 4 KiB since the last check.
    pub fn encode_prompt_shortly(
        &self,
        text: &str,
        quoted: &[Range<usize>],
        deadline: &CpuDeadline,
    ) -> Option<(Vec<u32>, Vec<KnownPart>)> {
        let quoted = self.relevant_ranges(text, quoted);
        let unchecked = Cell::new(UNCHECKED_BYTES);
        let affordable = |piece: &str| {
            piece.len() <= SHORT_PIECE && !(is_checked(&unchecked, piece.len()) && deadline.is_over())
        };
        self.encode_if(text, (true, Quoted::new(&quoted)), affordable)
    }

    fn encode_outside(&self, text: &str, special: bool, quoted: Quoted<'_>) -> (Vec<u32>, Vec<KnownPart>) {
        // Every piece is affordable.
        self.encode_if(text, (special, quoted), |_| true).unwrap_or_default()
    }

    /// Returns `None` at the first piece that is not memoised and not `affordable`.
    fn encode_if(
        &self,
        text: &str,
        (special, quoted): (bool, Quoted<'_>),
        affordable: impl Fn(&str) -> bool,
    ) -> Option<(Vec<u32>, Vec<KnownPart>)> {
        let encode = |text: &str, context: PieceContext, quoted: Quoted<'_>, ids: &mut Vec<u32>| {
            let affordable = affordable(text);
            if affordable {
                self.encode_part(text, context, quoted, ids);
            }
            affordable
        };
        let mut ids = Vec::with_capacity(text.len() / 3);
        let parts = match &self.memo {
            Some(memo) => memo.encode(text, (special, quoted), &mut ids, encode)?,
            None if encode(text, PieceContext { special, first: true }, quoted, &mut ids) => Vec::new(),
            None => return None,
        };
        Some((ids, parts))
    }

    /// The quoted ranges that may change the tokens of `text`.
    fn relevant_ranges(&self, text: &str, quoted: &[Range<usize>]) -> Vec<Range<usize>> {
        match self.normal_specials.has_controls() {
            // Only the normalised text shows these.
            true => quoted.to_vec(),
            false => self.specials.relevant_ranges(text, quoted),
        }
    }

    /// Appends the tokens of a part of a text.
    fn encode_part(&self, text: &str, context: PieceContext, quoted: Quoted<'_>, ids: &mut Vec<u32>) {
        let (mut begins, mut first) = (context.first, context.first);
        self.specials.split(text, context.special, quoted, |part| match part {
            Cut::Token(id) => {
                ids.push(id);
                (begins, first) = (true, false);
            }
            Cut::Text(piece) => {
                self.encode_piece((text, piece), (context.special, begins, first), quoted, ids);
                (begins, first) = (false, false);
            }
        });
    }

    /// Appends the tokens of a piece of `text` between special tokens. `begins`: it begins a text or follows
    /// a token; `first`: it begins the whole text.
    fn encode_piece(
        &self,
        (text, piece): (&str, &str),
        (special, begins, first): (bool, bool, bool),
        quoted: Quoted<'_>,
        ids: &mut Vec<u32>,
    ) {
        let normal = normalize::apply(&self.normalizers, piece, begins);
        let first = first && normalize::keep_start(&self.normalizers, piece);
        if self.normal_specials.is_empty() {
            return self.encode_text(&normal, begins, first, ids);
        }
        let start = piece.as_ptr() as usize - text.as_ptr() as usize;
        let inside = quoted.within(start, start + piece.len());
        let ranges = match inside.is_empty() {
            true => Vec::new(),
            false => self.normalised_ranges(piece, &normal, begins, inside),
        };
        let mut first = first;
        self.normal_specials.split(&normal, special, Quoted::new(&ranges), |part| {
            match part {
                Cut::Token(id) => ids.push(id),
                Cut::Text(words) => self.encode_text(words, false, first, ids),
            }
            first = false;
        });
    }

    /// The quoted ranges of `piece` in its normalised text; the whole text if they cannot be located.
    fn normalised_ranges(
        &self,
        piece: &str,
        normal: &str,
        begins: bool,
        quoted: Quoted<'_>,
    ) -> Vec<Range<usize>> {
        let (mut ranges, mut joined, mut at) = (Vec::new(), String::with_capacity(normal.len()), 0);
        let mut add = |from: usize, to: usize| {
            let start = joined.len();
            let part = piece.get(from..to).unwrap_or_default();
            joined.push_str(&normalize::apply(&self.normalizers, part, begins && from == 0));
            start..joined.len()
        };
        while let Some(range) = quoted.next(at).filter(|range| range.start < piece.len()) {
            let end = range.end.min(piece.len());
            add(at, range.start);
            ranges.push(add(range.start, end));
            at = end;
        }
        add(at, piece.len());
        // Normalising part by part shows where each one ends, unless characters joined across.
        if joined == normal { ranges } else { std::iter::once(0..normal.len()).collect() }
    }

    /// Appends the tokens of a text without special tokens.
    fn encode_text(&self, text: &str, begins: bool, first: bool, ids: &mut Vec<u32>) {
        let splitters = &*self.splitters;
        match &self.model {
            Model::Bpe { bpe, words } => {
                bpe.encode(words.as_ref().unwrap_or(&self.bytes), (splitters, text, first), ids);
            }
            Model::CharBpe(bpe) => {
                splitters::each_word(splitters, text, first, |word| bpe.encode(&self.texts, word, ids));
            }
            Model::WordPiece(pieces) => pieces.encode(&self.texts, text, ids),
            Model::Words(pieces) => {
                splitters::each_word(splitters, text, first, |word| pieces.word(&self.texts, word, ids));
            }
            Model::Unigram(unigram) => {
                splitters::each_word(splitters, text, first, |word| unigram.encode(&self.texts, word, ids));
            }
            Model::Spm { spm, add_space_prefix } => {
                spm.encode(&self.texts, text, *add_space_prefix && begins, ids);
            }
        }
    }

    /// Lower bound of the number of tokens of a text of `bytes` bytes.
    pub fn fewest_tokens(&self, bytes: usize) -> usize {
        self.longest.map_or(0, |longest| bytes.div_ceil(longest.get()))
    }

    /// Adds a memo of about `bytes` bytes at most. The ids do not change. No effect if texts of this
    /// vocabulary cannot be cut.
    pub fn remembering(mut self, bytes: usize) -> Self {
        self.memo = self.cuts().and_then(|cuts| Memo::new(cuts, bytes));
        self
    }

    /// Makes control tokens of these tokens: text of a request never becomes one of them
    /// ([`encode_prompt`](Self::encode_prompt)). The tokens of other texts do not change.
    pub fn make_control(&mut self, ids: &[u32]) {
        for id in ids {
            let Some(text) = self.texts.get(*id) else { continue };
            self.specials.control(text);
            if let Ok(text) = std::str::from_utf8(text) {
                let normal = normalize::apply(&self.normalizers, text, true);
                self.normal_specials.control(normal.as_bytes());
            }
        }
    }

    /// Hits and misses of the memo, by piece; `None` without a memo.
    pub fn memo_usage(&self) -> Option<RecentUse> {
        self.memo.as_ref().map(Memo::usage)
    }

    fn cuts(&self) -> Option<Cuts> {
        let is_special = |kind: &Kind| matches!(kind, Kind::Control | Kind::Unknown | Kind::UserDefined);
        let specials = (0..).zip(&self.kinds).filter(|(_, kind)| is_special(kind));
        let texts = specials.filter_map(|(id, _)| self.texts.get(id));
        let Cutting { newlines, words } = self.cutting?;
        match &self.model {
            _ if words => Some(Cuts::new(|_| false, newlines, texts)),
            Model::CharBpe(bpe) => Some(Cuts::new(|letter| bpe.joins_space(letter), newlines, texts)),
            Model::Spm { spm, .. } => Some(Cuts::new(|letter| spm.joins_space(letter), newlines, texts)),
            Model::Bpe { .. } | Model::WordPiece(_) | Model::Words(_) | Model::Unigram(_) => None,
        }
    }

    /// Adds the special tokens before and after a text to `ids`, such as BOS and EOS, if the vocabulary
    /// requires them.
    pub fn with_ends(&self, mut ids: Vec<u32>) -> Vec<u32> {
        ids.splice(0..0, self.ends.before.iter().copied());
        ids.extend(&self.ends.after);
        ids
    }

    /// The special tokens before every text; mostly none or BOS.
    pub fn before(&self) -> &[u32] {
        &self.ends.before
    }

    /// Sets the prompt of [`pairs`](Self::pairs).
    pub fn comparing(self, template: Option<PairTemplate>) -> Self {
        Self { pair_template: template, ..self }
    }

    /// Encodes texts to be compared with `first`, for a model that compares two.
    pub fn pairs<'a>(&'a self, first: &'a str) -> Pairs<'a> {
        Pairs::new(self, first)
    }

    /// Two texts as one sequence for a cross-encoder: `[CLS] first [SEP] second [SEP]`. Also returns the
    /// index where the second begins.
    fn pair(&self, mut first: Vec<u32>, second: &[u32]) -> (Vec<u32>, usize) {
        let [before, between, after] = &self.ends.pair;
        first.splice(0..0, before.iter().copied());
        first.extend(between);
        let begin = first.len();
        first.extend_from_slice(second);
        first.extend(after);
        (first, begin)
    }

    /// The text of `ids`; invalid UTF-8 becomes U+FFFD. `skip_special` omits control tokens. If the
    /// vocabulary adds a space before every text, that space is removed.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        let mut ids = ids.iter().copied().filter(|&id| !(skip_special && self.is_special(id)));
        let known = |id: &u32| self.kind(*id).is_some_and(|kind| kind != Kind::Unused);
        if self.decode_first
            && let Some(first) = ids.find(known)
        {
            let text = self.written.get(&first).map_or_else(|| self.token_text(first), |text| Some(text));
            bytes.extend(decode::spell(&self.decoder, text.unwrap_or_default(), true));
        }
        ids.for_each(|id| bytes.extend_from_slice(self.token_bytes(id)));
        if let Some((content, count)) = self.strips {
            let mut buffer = [0; 4];
            let content = content.encode_utf8(&mut buffer).as_bytes();
            let starts =
                bytes.chunks(content.len()).take(count).take_while(|chunk| *chunk == content).count();
            bytes.drain(..starts * content.len());
        }
        String::from_utf8(bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned())
    }

    pub fn bos(&self) -> Option<u32> {
        self.ends.bos
    }

    /// The token that ends a sequence. [`eos_ids`](Self::eos_ids) lists all tokens that end a generation.
    pub fn eos(&self) -> Option<u32> {
        self.ends.eos
    }

    /// True if every prompt begins with BOS; then [`bos`](Self::bos) is `Some`.
    pub fn adds_bos(&self) -> bool {
        self.ends.bos.is_some_and(|bos| self.ends.before == [bos])
    }

    /// True if every text ends with EOS; then [`eos`](Self::eos) is `Some`.
    pub fn adds_eos(&self) -> bool {
        self.ends.eos.is_some_and(|eos| self.ends.after == [eos])
    }

    /// True if `id` ends a generation: end of sequence, turn or message.
    pub fn is_eog(&self, id: u32) -> bool {
        self.eog.contains(&id)
    }

    /// All tokens that end a generation, ascending.
    pub fn eos_ids(&self) -> impl ExactSizeIterator<Item = u32> {
        self.eog.iter().copied()
    }

    pub fn vocab_size(&self) -> usize {
        self.texts.len()
    }

    /// The token's text as in the file, such as `Ġthe` or `▁the`; `None` beyond the vocabulary.
    pub fn token_text(&self, id: u32) -> Option<&str> {
        self.texts.get(id).and_then(|text| std::str::from_utf8(text).ok())
    }

    /// The token's bytes, not always whole characters; empty beyond the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.bytes.get(id).unwrap_or_default()
    }

    /// The token's kind; `None` beyond the vocabulary.
    pub fn kind(&self, id: u32) -> Option<Kind> {
        self.kinds.get(usize::try_from(id).ok()?).copied()
    }

    /// BLAKE3 of everything that this tokenizer was built from. Equal digests mean the same mapping of text
    /// to ids.
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }

    /// True if the token is omitted from visible text.
    pub fn is_special(&self, id: u32) -> bool {
        matches!(self.kind(id), Some(Kind::Control | Kind::Unknown))
    }
}

#[cfg(test)]
pub(crate) mod tests;
