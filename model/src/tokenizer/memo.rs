//! Remembers the tokens of pieces of text, so that what comes again and again (system prompts, documents, earlier
//! turns) is not encoded again.
//!
//! Exact by construction: a text is cut only where encoding the two sides one after the other gives what encoding
//! them together gives ([`Cuts`]), and a remembered piece is compared byte by byte. Where a vocabulary has no such
//! places nothing is remembered. The places themselves depend on the bytes around them and not on what stands far
//! before, so that a document is found again behind another one.
//!
//! Pieces that have come one after the other before become one long piece, a run: what has been seen twice is found by
//! a few long comparisons. Their pieces stay, for texts that part from it on the way.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::recent::{Recent, RecentUse};

use super::special::Quoted;

/// Bytes of a piece, but for the last: at least and, where there is a place, at most.
const LEAST: usize = 64;
const MOST: usize = 4096;
/// Of so many places before a space, one is taken.
const ONE_OF: u32 = 32;
/// Bytes of a run, at most.
const RUN: usize = 8 << 10;
/// The hash of no piece; of one that has it nothing worse comes than that it is searched for.
const NOTHING: u64 = 0;
/// Bytes before a place that decide whether it is taken.
const WINDOW: usize = 8;
/// Parts that most texts begin with at most.
const PARTS: usize = 16;

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
    fn allow(&self, text: &[u8], at: usize) -> Option<CutPoint> {
        let (before, after) = (text.get(at.checked_sub(1)?)?, text.get(at)?);
        if *after == b' ' {
            return self.letters[usize::from(*before)].then_some(CutPoint::Space);
        }
        let alone = *before == b'\n'
            && after.is_ascii_graphic()
            && *after != b'/'
            && at.checked_sub(2).and_then(|at| text.get(at)).is_some_and(u8::is_ascii_graphic);
        (self.newlines && alone).then_some(CutPoint::Newline)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CutPoint {
    Space,
    Newline,
}

#[derive(Debug)]
pub(super) struct Memo {
    cuts: Cuts,
    pieces: Recent<Piece>,
    grain: Grain,
}

/// How long pieces and runs are; tests cut finer.
#[derive(Debug)]
struct Grain {
    least: usize,
    one_of: u32,
    run: usize,
}

/// The name of the next piece or run that is remembered, by whatever memo.
static NEXT_NAME: AtomicU64 = AtomicU64::new(1);

/// A piece or a run.
#[derive(Debug)]
struct Piece {
    /// Nothing else ever has it.
    name: u64,
    how: How,
    text: Box<str>,
    tokens: Box<[u32]>,
    /// Hash of what followed it last. Whatever it names is compared before it is used.
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

/// Tokens at the beginning of a text that were remembered, and not made anew.
///
/// A name is given once in the life of the process, to a text and its tokens, and means these for ever. So two texts that
/// begin with parts of the same names begin with the same tokens, up to the end of the last of these, and nobody needs to
/// compare them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownPart {
    pub name: u64,
    /// How many of the text's tokens there are up to its end.
    pub end: usize,
}

impl KnownPart {
    /// A token that was put before a text by itself, as its only part.
    pub fn lone(token: u32) -> Self {
        // No text gets a number as high as that.
        Self { name: !u64::from(token), end: 1 }
    }
}

/// What of a text came as it was expected to.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    /// Hash of what stands before it.
    before: u64,
    /// Where it begins in the text, and its tokens among all.
    start: usize,
    tokens: usize,
    /// Of how many pieces and runs it is.
    pieces: usize,
}

impl Memo {
    /// One of at most about `bytes`; none where nothing can be cut.
    pub(super) fn new(cuts: Cuts, bytes: usize) -> Option<Self> {
        let grain = Grain { least: LEAST, one_of: ONE_OF, run: RUN };
        cuts.any().then(|| Self { cuts, pieces: Recent::new(bytes), grain })
    }

    /// Cuts wherever that is allowed.
    #[cfg(test)]
    pub(super) fn finest(mut self) -> Self {
        self.grain = Grain { least: 1, one_of: 1, run: 12 };
        self
    }

    pub(super) fn usage(&self) -> RecentUse {
        self.pieces.usage()
    }

    /// Appends the tokens of `text`; those of pieces that are not known are appended by `encode`, until it gives up: then
    /// there are none. Otherwise the parts that `text` begins with.
    pub(super) fn encode(
        &self,
        text: &str,
        (special, quoted): (bool, Quoted<'_>),
        out: &mut Vec<u32>,
        encode: impl Fn(&str, How, Quoted<'_>, &mut Vec<u32>) -> bool,
    ) -> Option<Vec<KnownPart>> {
        let (mut start, mut before, mut next) = (0, NOTHING, NOTHING);
        let (mut parts, mut known) = (Vec::with_capacity(PARTS), true);
        let mut stretch = Stretch { before, start, tokens: out.len(), pieces: 0 };
        while start < text.len() {
            let how = How { special, first: start == 0 };
            let tokens = out.len();
            // A piece that comes again is mostly followed by what has followed it before: then the end of that one need
            // not be searched for.
            if let Some((end, after, name)) = self.expected((text, quoted), start, how, next, out) {
                if known {
                    parts.push(KnownPart { name, end: out.len() });
                }
                if end - stretch.start > self.grain.run {
                    let run = self.join(text, special, (stretch, start, tokens), out);
                    before = run.inspect(|run| self.link(*run, next)).unwrap_or(before);
                    stretch = Stretch { before, start, tokens, pieces: 0 };
                }
                stretch.pieces += 1;
                (start, before, next) = (end, next, after);
                continue;
            }
            before = self.join(text, special, (stretch, start, tokens), out).unwrap_or(before);
            let end = self.piece_end(text.as_bytes(), start);
            // Places are between ASCII characters.
            let Some(piece) = text.get(start..end) else { return Some(parts) };
            let within = quoted.part(start, end);
            if !within.is_empty() {
                // Its tokens are not those that its text alone would have.
                if !encode(piece, how, within, out) {
                    return None;
                }
                (start, before, next, known) = (end, NOTHING, NOTHING, false);
                stretch = Stretch { before, start, tokens: out.len(), pieces: 0 };
                continue;
            }
            let encode = |text: &str, how: How, out: &mut Vec<u32>| encode(text, how, Quoted::NONE, out);
            let (hash, after, name) = self.piece(piece, how, out, &encode)?;
            known &= name.is_some();
            parts.extend(name.filter(|_| known).map(|name| KnownPart { name, end: out.len() }));
            self.link(before, hash);
            (start, before, next) = (end, hash, after);
            stretch = Stretch { before, start, tokens: out.len(), pieces: 0 };
        }
        self.join(text, special, (stretch, start, out.len()), out);
        Some(parts)
    }

    /// If what is `expected` stands at `start`: appends its tokens and tells where it ends, what has followed it and its
    /// name.
    fn expected(
        &self,
        (text, quoted): (&str, Quoted<'_>),
        start: usize,
        how: How,
        expected: u64,
        out: &mut Vec<u32>,
    ) -> Option<(usize, u64, u64)> {
        if expected == NOTHING {
            return None;
        }
        let found = self.pieces.get(expected, |piece| {
            let bytes = text.as_bytes();
            let end = start + piece.text.len();
            let stands = piece.how == how && bytes.get(start..end)? == piece.text.as_bytes();
            let ends = end == bytes.len() || self.cuts.allow(bytes, end).is_some();
            (stands && ends && quoted.part(start, end).is_empty()).then(|| {
                out.extend_from_slice(&piece.tokens);
                (end, piece.next.load(Ordering::Relaxed), piece.name)
            })
        })?;
        self.pieces.count(true);
        Some(found)
    }

    /// Appends the tokens of a piece; its hash, that of what has followed it last, and its name if it was known. None if
    /// `encode` gives up.
    fn piece(
        &self,
        text: &str,
        how: How,
        out: &mut Vec<u32>,
        encode: &impl Fn(&str, How, &mut Vec<u32>) -> bool,
    ) -> Option<(u64, u64, Option<u64>)> {
        let hash = self.hash(text, how);
        let known = self.pieces.get(hash, |piece| {
            (piece.how == how && *piece.text == *text).then(|| {
                out.extend_from_slice(&piece.tokens);
                (piece.next.load(Ordering::Relaxed), piece.name)
            })
        });
        self.pieces.count(known.is_some());
        if let Some((next, name)) = known {
            return Some((hash, next, Some(name)));
        }
        let begin = out.len();
        if !encode(text, how, out) {
            return None;
        }
        self.put(hash, how, text, out.get(begin..).unwrap_or_default());
        Some((hash, NOTHING, None))
    }

    /// Makes a run of a stretch that ends at `end` in the text and at `tokens` among its tokens, if it is of more than
    /// one piece; the run's hash.
    fn join(
        &self,
        text: &str,
        special: bool,
        (stretch, end, tokens): (Stretch, usize, usize),
        out: &[u32],
    ) -> Option<u64> {
        if stretch.pieces < 2 {
            return None;
        }
        let (text, tokens) = (text.get(stretch.start..end)?, out.get(stretch.tokens..tokens)?);
        // A text's first piece is never expected.
        let how = How { special, first: false };
        let hash = self.hash(text, how);
        self.put(hash, how, text, tokens);
        self.link(stretch.before, hash);
        Some(hash)
    }

    /// Notes that `next` follows `before`.
    fn link(&self, before: u64, next: u64) {
        if before != NOTHING {
            self.pieces.get(before, |piece| {
                piece.next.store(next, Ordering::Relaxed);
                Some(())
            });
        }
    }

    fn hash(&self, text: &str, how: How) -> u64 {
        let mut hasher = self.pieces.hasher();
        hasher.pair(how.special.into(), how.first.into());
        hasher.bytes(text.as_bytes());
        hasher.finish()
    }

    fn put(&self, hash: u64, how: How, text: &str, tokens: &[u32]) {
        let bytes = size_of::<Piece>() + text.len() + size_of_val(tokens);
        let (name, next) = (NEXT_NAME.fetch_add(1, Ordering::Relaxed), AtomicU64::new(NOTHING));
        self.pieces.put(hash, Piece { name, how, text: text.into(), tokens: tokens.into(), next }, bytes);
    }

    /// Where the piece ends that begins at `start`, which is not the end of the text.
    fn piece_end(&self, text: &[u8], start: usize) -> usize {
        // A newline may stand right before the first place.
        let from = (start + self.grain.least).saturating_sub(1).max(start);
        let near = memchr::memchr2_iter(b' ', b'\n', text.get(from..).unwrap_or_default());
        let places = near.map(|at| from + at + usize::from(text.get(from + at) == Some(&b'\n')));
        let mut places = places.filter(|at| *at >= start + self.grain.least && *at < text.len());
        let taken = places.find(|&at| match self.cuts.allow(text, at) {
            Some(CutPoint::Newline) => true,
            Some(CutPoint::Space) => at - start >= MOST || chosen(text, at, self.grain.one_of),
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
