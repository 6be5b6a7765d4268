//! The splitters that cut a text into words: a tokenizer file's `pre_tokenizer`, or the scanners of
//! [`pretokenize`].

use super::bpe::byte_char;
use super::classes::{is_punctuation, is_word};
use super::normalize::Pattern;
use super::pretokenize::{self, Style};

/// One splitter. Each is applied to the pieces of the one before.
#[derive(Debug)]
pub(super) enum Splitter {
    /// A scanner for a known expression, whose matches are words.
    Style(Style),
    Split {
        pattern: Pattern,
        /// The expression, if its matches are isolated.
        source: Option<Box<str>>,
        behaviour: Behaviour,
        /// Swaps matches and what is between them.
        invert: bool,
    },
    Chars {
        class: CharClass,
        behaviour: Behaviour,
    },
    /// Keeps runs of word characters, and runs of others that are no white space.
    Words,
    /// Puts a space before a piece that does not begin with one.
    PrefixSpace,
    /// Writes every byte as its character in byte-level vocabularies.
    ByteChars,
    /// Writes spaces as `mark` and cuts before it.
    Metaspace {
        mark: char,
        prepend: Prepend,
        split: bool,
    },
    /// Runs of newlines, and what is between them.
    NewlineRuns,
}

/// What becomes of the matches of a pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Behaviour {
    Removed,
    Isolated,
    MergedWithPrevious,
    MergedWithNext,
    Contiguous,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CharClass {
    Numeric,
    Punctuation,
    Space,
    One(char),
}

/// Where a mark is put before a text that does not begin with one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prepend {
    /// At the beginning of the whole text.
    First,
    /// Before every piece.
    Always,
    Never,
}

impl Splitter {
    /// Whether the words together have all of the text.
    pub(super) fn keeps_all(&self) -> bool {
        match self {
            Self::Split { behaviour, .. } | Self::Chars { behaviour, .. } => *behaviour != Behaviour::Removed,
            Self::Words => false,
            Self::Style(_)
            | Self::PrefixSpace
            | Self::ByteChars
            | Self::Metaspace { .. }
            | Self::NewlineRuns => true,
        }
    }
}

impl CharClass {
    fn contains(self, c: char) -> bool {
        match self {
            Self::Numeric => c.is_numeric(),
            Self::Punctuation => is_punctuation(c),
            Self::Space => c.is_whitespace(),
            Self::One(one) => c == one,
        }
    }
}

/// Calls `emit` with every word of `text`, in order. `first`: the text begins the whole text.
#[inline]
pub(super) fn each_word(splitters: &[Splitter], text: &str, first: bool, mut emit: impl FnMut(&str)) {
    match splitters {
        [] => emit(text),
        [Splitter::Style(style)] => pretokenize::split(*style, text, &mut emit),
        _ => cut(splitters, text, first, &mut emit),
    }
}

/// [`each_word`] for any number of splitters.
fn cut(splitters: &[Splitter], text: &str, first: bool, emit: &mut dyn FnMut(&str)) {
    if text.is_empty() {
        return;
    }
    let Some((splitter, rest)) = splitters.split_first() else { return emit(text) };
    let mut next = |from: usize, to: usize| {
        cut(rest, text.get(from..to).unwrap_or_default(), first && from == 0, emit);
    };
    match splitter {
        Splitter::Style(style) => {
            let mut at = 0;
            pretokenize::split(*style, text, &mut |word: &str| {
                next(at, at + word.len());
                at += word.len();
            });
        }
        Splitter::Split { pattern, behaviour, invert, .. } => {
            let (mut pieces, mut at) = (Joiner::new(*behaviour, &mut next), 0);
            pattern.matches(text, |start, end| {
                if start > at {
                    pieces.add(at, start, *invert);
                }
                pieces.add(start, end, !*invert);
                at = end;
            });
            if at < text.len() {
                pieces.add(at, text.len(), *invert);
            }
            pieces.finish();
        }
        Splitter::Chars { class, behaviour } => {
            let (mut pieces, mut at) = (Joiner::new(*behaviour, &mut next), 0);
            for (start, c) in text.char_indices().filter(|(_, c)| class.contains(*c)) {
                if start > at {
                    pieces.add(at, start, false);
                }
                at = start + c.len_utf8();
                pieces.add(start, at, true);
            }
            if at < text.len() {
                pieces.add(at, text.len(), false);
            }
            pieces.finish();
        }
        Splitter::Words => {
            let kind = |c: char| (!c.is_whitespace() || is_word(c)).then(|| is_word(c));
            runs(text, kind, |from, to, kind| {
                if kind.is_some() {
                    next(from, to);
                }
            });
        }
        Splitter::NewlineRuns => runs(text, |c| c == '\n', |from, to, _| next(from, to)),
        Splitter::PrefixSpace => match text.starts_with(' ') {
            true => next(0, text.len()),
            false => cut(rest, &format!(" {text}"), first, emit),
        },
        Splitter::ByteChars => cut(rest, &text.bytes().map(byte_char).collect::<String>(), first, emit),
        Splitter::Metaspace { mark, prepend, split } => {
            let mut buffer = [0; 4];
            let mark_text = mark.encode_utf8(&mut buffer);
            let mut marked = text.replace(' ', mark_text);
            let prepends = match prepend {
                Prepend::First => first,
                Prepend::Always => true,
                Prepend::Never => false,
            };
            if prepends && !marked.starts_with(*mark) {
                marked.insert(0, *mark);
            }
            if !split {
                return cut(rest, &marked, first, emit);
            }
            let mut start = 0;
            for (at, _) in marked.match_indices(*mark).filter(|(at, _)| *at > 0) {
                cut(rest, &marked[start..at], first && start == 0, emit);
                start = at;
            }
            cut(rest, &marked[start..], first && start == 0, emit);
        }
    }
}

/// Calls `emit` with every maximal run of characters of one kind.
fn runs<K: PartialEq>(text: &str, kind: impl Fn(char) -> K, mut emit: impl FnMut(usize, usize, K)) {
    let mut current: Option<(usize, K)> = None;
    for (at, c) in text.char_indices() {
        let next = kind(c);
        match current.take() {
            Some((start, kind)) if kind != next => {
                emit(start, at, kind);
                current = Some((at, next));
            }
            Some(run) => current = Some(run),
            None => current = Some((at, next)),
        }
    }
    if let Some((start, kind)) = current {
        emit(start, text.len(), kind);
    }
}

/// Joins matches and the pieces between them as a [`Behaviour`] says.
struct Joiner<'a> {
    behaviour: Behaviour,
    emit: &'a mut dyn FnMut(usize, usize),
    /// The piece that may still grow.
    held: Option<(usize, usize)>,
    /// The last piece was a match.
    after_match: bool,
}

impl<'a> Joiner<'a> {
    fn new(behaviour: Behaviour, emit: &'a mut dyn FnMut(usize, usize)) -> Self {
        Self { behaviour, emit, held: None, after_match: false }
    }

    /// Adds a piece, which begins where the last one ended.
    fn add(&mut self, from: usize, to: usize, is_match: bool) {
        let joins = match self.behaviour {
            Behaviour::Removed if is_match => return,
            Behaviour::Removed | Behaviour::Isolated => false,
            Behaviour::Contiguous => is_match == self.after_match,
            Behaviour::MergedWithPrevious => is_match && !self.after_match,
            // A match goes to the piece after it, unless that is a match.
            Behaviour::MergedWithNext => self.after_match && !is_match,
        };
        self.after_match = is_match;
        match &mut self.held {
            Some((_, end)) if joins => *end = to,
            _ => {
                if let Some((from, to)) = self.held.replace((from, to)) {
                    (self.emit)(from, to);
                }
            }
        }
    }

    fn finish(mut self) {
        if let Some((from, to)) = self.held.take() {
            (self.emit)(from, to);
        }
    }
}
