//! Memo of encoded pieces of text, so that recurring text (system prompts, documents, earlier turns) is not
//! encoded again.
//!
//! The memo is exact. A text is cut only where encoding both sides separately gives the same tokens as
//! encoding them together ([`Cuts`]), and a memoised piece is compared byte by byte. If a vocabulary has no
//! such places, nothing is memoised. Cut points depend only on nearby bytes, so a document is found again
//! after a different prefix.
//!
//! Pieces that followed each other before are joined to a longer piece, a run, so that repeated text needs
//! few comparisons. The single pieces stay, for texts that diverge inside the run.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::recent::{Recent, RecentUse};

use super::special::Quoted;

/// Shortest piece in bytes, except the last one of a text.
const MIN_PIECE: usize = 64;
/// Longest piece in bytes, if there is a cut point.
const MAX_PIECE: usize = 4096;
/// One of this many cut points before a space is used.
const SPACE_INTERVAL: u32 = 32;
/// Longest run in bytes.
const RUN: usize = 8 << 10;
/// Stands for "no piece". A piece with this hash is only looked up in the normal way.
const NO_PIECE: u64 = 0;
/// Bytes before a cut point that decide whether it is used.
const WINDOW: usize = 8;
/// Maximum number of memoised parts reported for the beginning of a text.
const MAX_PARTS: usize = 16;

/// Places where any text may be cut:
///
/// - Between an ASCII letter and a space. In every expression a run of letters ends there and the next word
///   begins with the space; look-ahead gives the same result at the end of the text. For score-based and
///   character vocabularies, no token may span such a place.
/// - After a single newline between printable ASCII characters, if newlines end words. `/` may belong to a
///   newline before it.
///
/// A place inside or at the end of a special token's text is excluded: the text after it may be encoded
/// differently.
#[derive(Debug)]
pub(super) struct Cuts {
    letters: [bool; 256],
    newlines: bool,
}

impl Cuts {
    /// `joins`: whether a token may continue with a space after this letter. `newlines`: whether newlines end
    /// words.
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

    /// Whether `text` may be cut before byte `at`, which must be inside the text.
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

/// Lengths of pieces and runs; smaller in tests.
#[derive(Debug)]
struct Grain {
    min_piece: usize,
    space_interval: u32,
    run: usize,
}

/// Name of the next memoised piece or run, unique in the process.
static NEXT_NAME: AtomicU64 = AtomicU64::new(1);

/// A piece or a run.
#[derive(Debug)]
struct Piece {
    /// Unique; never reused.
    name: u64,
    context: PieceContext,
    text: Box<str>,
    tokens: Box<[u32]>,
    /// Hash of the piece that followed last. That piece is compared before it is used.
    next: AtomicU64,
}

/// Properties besides the text that determine a piece's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PieceContext {
    /// Texts of control tokens become these tokens.
    pub(super) special: bool,
    /// The piece is at the beginning of the text, or only special tokens precede it.
    pub(super) first: bool,
}

/// Memoised tokens at the beginning of a text.
///
/// A name is assigned once per process to a text and its tokens. Two texts whose parts have the same names
/// therefore have the same tokens up to the end of these parts, without a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownPart {
    pub name: u64,
    /// Number of the text's tokens up to the end of this part.
    pub end: usize,
}

impl KnownPart {
    /// A single token placed before a text, as the only part.
    pub fn lone(token: u32) -> Self {
        // Names of texts never get this high.
        Self { name: !u64::from(token), end: 1 }
    }
}

/// A range of the text whose pieces came in the expected order.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    /// Hash of the piece before it.
    before: u64,
    /// Start in the text in bytes, and in the tokens.
    start: usize,
    tokens: usize,
    /// Number of pieces and runs in it.
    pieces: usize,
}

impl Memo {
    /// A memo of about `bytes` bytes at most; `None` if nothing can be cut.
    pub(super) fn new(cuts: Cuts, bytes: usize) -> Option<Self> {
        let grain = Grain { min_piece: MIN_PIECE, space_interval: SPACE_INTERVAL, run: RUN };
        cuts.any().then(|| Self { cuts, pieces: Recent::new(bytes), grain })
    }

    /// Uses every allowed cut point.
    #[cfg(test)]
    pub(super) fn finest(mut self) -> Self {
        self.grain = Grain { min_piece: 1, space_interval: 1, run: 12 };
        self
    }

    pub(super) fn usage(&self) -> RecentUse {
        self.pieces.usage()
    }

    /// Appends the tokens of `text` and returns the memoised parts at its beginning. `encode` appends the
    /// tokens of unknown pieces; if it gives up, returns `None`.
    pub(super) fn encode(
        &self,
        text: &str,
        (special, quoted): (bool, Quoted<'_>),
        out: &mut Vec<u32>,
        encode: impl Fn(&str, PieceContext, Quoted<'_>, &mut Vec<u32>) -> bool,
    ) -> Option<Vec<KnownPart>> {
        let (mut start, mut before, mut next) = (0, NO_PIECE, NO_PIECE);
        let (mut parts, mut all_memoised) = (Vec::with_capacity(MAX_PARTS), true);
        let mut stretch = Stretch { before, start, tokens: out.len(), pieces: 0 };
        while start < text.len() {
            let context = PieceContext { special, first: start == 0 };
            let tokens = out.len();
            // A memoised piece is mostly followed by the same piece as before. If so, its end need not be
            // searched.
            if let Some((end, after, name)) = self.expected((text, quoted), start, context, next, out) {
                if all_memoised {
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
            // Cut points are next to ASCII characters.
            let Some(piece) = text.get(start..end) else { return Some(parts) };
            let within = quoted.within(start, end);
            if !within.is_empty() {
                // Quoted ranges change the tokens of the piece, so it is not memoised.
                if !encode(piece, context, within, out) {
                    return None;
                }
                (start, before, next, all_memoised) = (end, NO_PIECE, NO_PIECE, false);
                stretch = Stretch { before, start, tokens: out.len(), pieces: 0 };
                continue;
            }
            let encode = |text: &str, context: PieceContext, out: &mut Vec<u32>| {
                encode(text, context, Quoted::NONE, out)
            };
            let (hash, after, name) = self.piece(piece, context, out, &encode)?;
            all_memoised &= name.is_some();
            parts.extend(name.filter(|_| all_memoised).map(|name| KnownPart { name, end: out.len() }));
            self.link(before, hash);
            (start, before, next) = (end, hash, after);
            stretch = Stretch { before, start, tokens: out.len(), pieces: 0 };
        }
        self.join(text, special, (stretch, start, out.len()), out);
        Some(parts)
    }

    /// If the piece `expected` is at `start`: appends its tokens and returns its end, the hash of what
    /// followed it, and its name.
    fn expected(
        &self,
        (text, quoted): (&str, Quoted<'_>),
        start: usize,
        context: PieceContext,
        expected: u64,
        out: &mut Vec<u32>,
    ) -> Option<(usize, u64, u64)> {
        if expected == NO_PIECE {
            return None;
        }
        let found = self.pieces.get(expected, |piece| {
            let bytes = text.as_bytes();
            let end = start + piece.text.len();
            let stands = piece.context == context && bytes.get(start..end)? == piece.text.as_bytes();
            let ends = end == bytes.len() || self.cuts.allow(bytes, end).is_some();
            (stands && ends && quoted.within(start, end).is_empty()).then(|| {
                out.extend_from_slice(&piece.tokens);
                (end, piece.next.load(Ordering::Relaxed), piece.name)
            })
        })?;
        self.pieces.count(true);
        Some(found)
    }

    /// Appends the tokens of a piece. Returns its hash, the hash of what followed it last, and its name if it
    /// was known. `None` if `encode` gives up.
    fn piece(
        &self,
        text: &str,
        context: PieceContext,
        out: &mut Vec<u32>,
        encode: &impl Fn(&str, PieceContext, &mut Vec<u32>) -> bool,
    ) -> Option<(u64, u64, Option<u64>)> {
        let hash = self.hash(text, context);
        let found = self.pieces.get(hash, |piece| {
            (piece.context == context && *piece.text == *text).then(|| {
                out.extend_from_slice(&piece.tokens);
                (piece.next.load(Ordering::Relaxed), piece.name)
            })
        });
        self.pieces.count(found.is_some());
        if let Some((next, name)) = found {
            return Some((hash, next, Some(name)));
        }
        let begin = out.len();
        if !encode(text, context, out) {
            return None;
        }
        self.put(hash, context, text, out.get(begin..).unwrap_or_default());
        Some((hash, NO_PIECE, None))
    }

    /// Joins a stretch of several pieces to a run that ends at `end` in the text and at `tokens` in its
    /// tokens. Returns the run's hash.
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
        // A text's first piece is never an expected one.
        let context = PieceContext { special, first: false };
        let hash = self.hash(text, context);
        self.put(hash, context, text, tokens);
        self.link(stretch.before, hash);
        Some(hash)
    }

    /// Records that `next` follows `before`.
    fn link(&self, before: u64, next: u64) {
        if before != NO_PIECE {
            self.pieces.get(before, |piece| {
                piece.next.store(next, Ordering::Relaxed);
                Some(())
            });
        }
    }

    fn hash(&self, text: &str, context: PieceContext) -> u64 {
        let mut hasher = self.pieces.hasher();
        hasher.pair(context.special.into(), context.first.into());
        hasher.bytes(text.as_bytes());
        hasher.finish()
    }

    fn put(&self, hash: u64, context: PieceContext, text: &str, tokens: &[u32]) {
        let bytes = size_of::<Piece>() + text.len() + size_of_val(tokens);
        let (name, next) = (NEXT_NAME.fetch_add(1, Ordering::Relaxed), AtomicU64::new(NO_PIECE));
        self.pieces.put(hash, Piece { name, context, text: text.into(), tokens: tokens.into(), next }, bytes);
    }

    /// End of the piece that begins at `start`, which is before the end of the text.
    #[inline]
    fn piece_end(&self, text: &[u8], start: usize) -> usize {
        // A newline may be just before the first possible cut point.
        let from = (start + self.grain.min_piece).saturating_sub(1).max(start);
        let near = memchr::memchr2_iter(b' ', b'\n', text.get(from..).unwrap_or_default());
        let candidates = near.map(|at| from + at + usize::from(text.get(from + at) == Some(&b'\n')));
        let mut candidates = candidates.filter(|at| *at >= start + self.grain.min_piece && *at < text.len());
        let taken = candidates.find(|&at| match self.cuts.allow(text, at) {
            Some(CutPoint::Newline) => true,
            Some(CutPoint::Space) => at - start >= MAX_PIECE || chosen(text, at, self.grain.space_interval),
            None => false,
        });
        taken.unwrap_or(text.len())
    }
}

/// Whether the bytes before `at` select it as a cut point.
fn chosen(text: &[u8], at: usize, space_interval: u32) -> bool {
    let window = text.get(..at).and_then(|before| before.last_chunk::<WINDOW>());
    let mixed = window.map_or(0, |window| u64::from_le_bytes(*window).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    ((mixed >> 32) * u64::from(space_interval)) >> 32 == 0
}

#[cfg(test)]
mod tests;
