//! Remembers the tokens of pieces of text, so that what comes again and again (system prompts, documents, earlier
//! turns) is not encoded again.
//!
//! Exact by construction: a text is cut only where encoding the two sides one after the other gives what encoding
//! them together gives ([`Cuts`]), and a remembered piece is compared byte by byte. Where a vocabulary has no such
//! places nothing is remembered. The places themselves depend on the bytes around them and not on what stands far
//! before, so that a document is found again behind another one.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::recent::{Recent, RecentUse};

/// Bytes of a piece, but for the last: at least and, where there is a place, at most.
const LEAST: usize = 64;
const MOST: usize = 4096;
/// Of so many places before a space, one is taken.
const ONE_OF: u32 = 32;
/// The hash of no piece; of one that has it nothing worse comes than that it is searched for.
const NOTHING: u64 = 0;
/// Bytes before a place that decide whether it is taken.
const WINDOW: usize = 8;

/// Places where any text may be cut:
///
/// - between an ASCII letter and a space. In every expression a run of letters ends there and the next word begins
///   with the space; what is decided by looking ahead is decided the same at the end of the text. Score-based and
///   character vocabularies are asked whether a token goes on over such a place.
/// - behind a newline that stands alone between printable ASCII characters, where newlines end words. `/` may
///   belong to a newline before it.
///
/// Not where the text of a special token lies over the place, or ends at it: text behind one may be encoded
/// otherwise.
#[derive(Debug)]
pub(super) struct Cuts {
    /// Letters before a space.
    letters: [bool; 256],
    newlines: bool,
}

impl Cuts {
    /// `joins`: whether a word may go on with a space behind this letter. `newlines`: whether these end words.
    pub(super) fn new<'a>(
        joins: impl Fn(char) -> bool,
        newlines: bool,
        specials: impl Iterator<Item = &'a [u8]>,
    ) -> Self {
        let mut cuts = Self { letters: [false; 256], newlines };
        for letter in (b'A'..=b'Z').chain(b'a'..=b'z') {
            cuts.letters[usize::from(letter)] = !joins(char::from(letter));
        }
        for text in specials {
            if let Some(&last) = text.last() {
                cuts.letters[usize::from(last)] = false;
            }
            for pair in text.windows(2) {
                match pair {
                    [letter, b' '] => cuts.letters[usize::from(*letter)] = false,
                    [b'\n', _] => cuts.newlines = false,
                    _ => {}
                }
            }
        }
        cuts
    }

    fn any(&self) -> bool {
        self.newlines || self.letters.contains(&true)
    }

    /// Whether `text` may be cut before the byte at `at`, which is neither its first nor behind its last.
    fn allow(&self, text: &[u8], at: usize) -> Option<Place> {
        let (before, after) = (text.get(at.checked_sub(1)?)?, text.get(at)?);
        if *after == b' ' {
            return self.letters[usize::from(*before)].then_some(Place::Space);
        }
        let alone = *before == b'\n'
            && after.is_ascii_graphic()
            && *after != b'/'
            && at.checked_sub(2).and_then(|at| text.get(at)).is_some_and(u8::is_ascii_graphic);
        (self.newlines && alone).then_some(Place::Newline)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Space,
    Newline,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Memo {
    cuts: Cuts,
    pieces: Recent<Piece>,
    /// [`LEAST`] and [`ONE_OF`]; tests cut finer.
    grain: (usize, u32),
}

#[derive(Debug)]
struct Piece {
    how: How,
    text: Box<str>,
    tokens: Box<[u32]>,
    /// Hash of the piece that followed it last. Whatever it names is compared before it is used.
    next: AtomicU64,
}

/// What besides its text decides about a piece's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct How {
    /// Texts of control tokens become these tokens.
    pub(super) special: bool,
    /// Nothing but perhaps special tokens stands before it.
    pub(super) first: bool,
}

impl Memo {
    /// One of at most about `bytes`; none where nothing can be cut.
    pub(super) fn new(cuts: Cuts, bytes: usize) -> Option<Self> {
        cuts.any().then(|| Self { cuts, pieces: Recent::new(bytes), grain: (LEAST, ONE_OF) })
    }

    /// Cuts wherever that is allowed.
    #[cfg(test)]
    pub(super) fn finest(mut self) -> Self {
        self.grain = (1, 1);
        self
    }

    pub(super) fn usage(&self) -> RecentUse {
        self.pieces.usage()
    }

    /// Appends the tokens of `text`; those of pieces that are not known are got by `encode`.
    pub(super) fn encode(
        &self,
        text: &str,
        special: bool,
        out: &mut Vec<u32>,
        encode: impl Fn(&str, How, &mut Vec<u32>),
    ) {
        let (mut start, mut before, mut next) = (0, NOTHING, NOTHING);
        while start < text.len() {
            let how = How { special, first: start == 0 };
            // A piece that comes again is mostly followed by what has followed it before: then the end of that one need
            // not be searched for.
            if let Some((end, after)) = self.expected(text, start, how, next, out) {
                (start, before, next) = (end, next, after);
                continue;
            }
            let end = self.piece_end(text.as_bytes(), start);
            // Places are between ASCII characters.
            let Some(piece) = text.get(start..end) else { return };
            let (hash, after) = self.piece(piece, how, out, &encode);
            if before != NOTHING {
                self.pieces.get(before, |piece| {
                    piece.next.store(hash, Ordering::Relaxed);
                    Some(())
                });
            }
            (start, before, next) = (end, hash, after);
        }
    }

    /// If the piece at `expected` stands at `start`: appends its tokens and tells where it ends and what has followed
    /// it.
    fn expected(
        &self,
        text: &str,
        start: usize,
        how: How,
        expected: u64,
        out: &mut Vec<u32>,
    ) -> Option<(usize, u64)> {
        if expected == NOTHING {
            return None;
        }
        let found = self.pieces.get(expected, |piece| {
            let bytes = text.as_bytes();
            let end = start + piece.text.len();
            let stands = piece.how == how && bytes.get(start..end)? == piece.text.as_bytes();
            let ends = end == bytes.len() || self.cuts.allow(bytes, end).is_some();
            (stands && ends).then(|| {
                out.extend_from_slice(&piece.tokens);
                (end, piece.next.load(Ordering::Relaxed))
            })
        })?;
        self.pieces.count(true);
        Some(found)
    }

    /// Appends the tokens of a piece; its hash, and that of what has followed it last.
    fn piece(
        &self,
        text: &str,
        how: How,
        out: &mut Vec<u32>,
        encode: &impl Fn(&str, How, &mut Vec<u32>),
    ) -> (u64, u64) {
        let mut hasher = self.pieces.hasher();
        hasher.pair(how.special.into(), how.first.into());
        hasher.bytes(text.as_bytes());
        let hash = hasher.finish();
        let known = self.pieces.get(hash, |piece| {
            (piece.how == how && *piece.text == *text).then(|| {
                out.extend_from_slice(&piece.tokens);
                piece.next.load(Ordering::Relaxed)
            })
        });
        self.pieces.count(known.is_some());
        if let Some(next) = known {
            return (hash, next);
        }
        let begin = out.len();
        encode(text, how, out);
        let tokens: Box<[u32]> = out.get(begin..).unwrap_or_default().into();
        let bytes = size_of::<Piece>() + text.len() + size_of_val(&*tokens);
        self.pieces.put(hash, Piece { how, text: text.into(), tokens, next: AtomicU64::new(NOTHING) }, bytes);
        (hash, NOTHING)
    }

    /// Where the piece ends that begins at `start`, which is not the end of the text.
    fn piece_end(&self, text: &[u8], start: usize) -> usize {
        let (least, one_of) = self.grain;
        let mut places = Range { start: start + least, end: text.len() };
        let taken = places.find(|&at| match self.cuts.allow(text, at) {
            Some(Place::Newline) => true,
            Some(Place::Space) => at - start >= MOST || chosen(text, at, one_of),
            None => false,
        });
        taken.unwrap_or(text.len())
    }
}

/// Whether the bytes before `at` say that it is one of those to be taken.
fn chosen(text: &[u8], at: usize, one_of: u32) -> bool {
    let window = text.get(..at).and_then(|before| before.last_chunk::<WINDOW>());
    let mixed = window.map_or(0, |window| u64::from_le_bytes(*window).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    ((mixed >> 32) * u64::from(one_of)) >> 32 == 0
}

#[cfg(test)]
mod tests;
