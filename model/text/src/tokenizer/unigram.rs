//! Unigram: the most likely way to write a word as tokens, by the tokens' scores.

use super::pieces::Pieces;

/// How much less likely than the least likely token an unknown character is.
const UNKNOWN_PENALTY: f64 = 10.0;

#[derive(Debug)]
pub(super) struct Unigram {
    /// Tokens that may be part of a text, ordered by their text.
    sorted: Vec<u32>,
    scores: Vec<f64>,
    unknown: Option<u32>,
    unknown_score: f64,
    /// Token of each byte, for characters without a token.
    bytes: Option<[u32; 256]>,
}

/// The best way to write a text up to a position.
#[derive(Debug, Clone, Copy)]
struct Best {
    score: f64,
    /// Where the last token begins; `None` if nothing ends here.
    start: Option<usize>,
    token: u32,
}

impl Unigram {
    /// `tokens` are those that may be part of a text, `scores` one for each id.
    pub(super) fn new(
        texts: &Pieces,
        mut tokens: Vec<u32>,
        scores: Vec<f64>,
        unknown: Option<u32>,
        bytes: Option<[u32; 256]>,
    ) -> Self {
        tokens.sort_by_key(|id| texts.get(*id));
        tokens.dedup_by_key(|id| texts.get(*id));
        let least = scores.iter().copied().fold(f64::INFINITY, f64::min);
        Self { sorted: tokens, scores, unknown, unknown_score: least - UNKNOWN_PENALTY, bytes }
    }

    /// Whether every text becomes tokens.
    pub(super) fn keeps_all(&self) -> bool {
        self.bytes.is_some()
    }

    /// Appends the tokens of `word`.
    pub(super) fn encode(&self, texts: &Pieces, word: &str, out: &mut Vec<u32>) {
        let unknown = self.unknown.unwrap_or(u32::MAX);
        let mut best = vec![Best { score: 0.0, start: None, token: unknown }; word.len() + 1];
        for (start, c) in word.char_indices() {
            let score = best[start].score;
            let mut single = false;
            let mut offer = |end: usize, token: u32, score: f64| {
                if let Some(known) = best.get_mut(end)
                    && (known.start.is_none() || score > known.score)
                {
                    *known = Best { score, start: Some(start), token };
                }
            };
            self.prefixes(texts, &word.as_bytes()[start..], |length, token| {
                single |= length == c.len_utf8();
                offer(start + length, token, score + self.scores.get(token as usize).copied().unwrap_or(0.0));
            });
            if !single {
                offer(start + c.len_utf8(), unknown, score + self.unknown_score);
            }
        }
        let (mut tokens, mut end) = (Vec::new(), word.len());
        while end > 0 {
            let Some(Best { start: Some(start), token, .. }) = best.get(end).copied() else { return };
            tokens.push((start, end, token));
            end = start;
        }
        tokens.reverse();
        // Unknown characters in a row are one piece.
        let mut at = 0;
        while let Some(&(start, mut end, token)) = tokens.get(at) {
            at += 1;
            if token != unknown {
                out.push(token);
                continue;
            }
            while let Some(&(_, next, _)) = tokens.get(at).filter(|(_, _, token)| *token == unknown) {
                end = next;
                at += 1;
            }
            let piece = word.get(start..end).unwrap_or_default();
            match (self.find(texts, piece), &self.bytes) {
                (Some(token), _) => out.push(token),
                (None, Some(bytes)) => out.extend(piece.bytes().map(|byte| bytes[usize::from(byte)])),
                (None, None) => out.extend(self.unknown),
            }
        }
    }

    fn find(&self, texts: &Pieces, piece: &str) -> Option<u32> {
        let at = self.sorted.partition_point(|id| texts.get(*id) < Some(piece.as_bytes()));
        self.sorted.get(at).copied().filter(|id| texts.get(*id) == Some(piece.as_bytes()))
    }

    /// Calls `found` with the length of every token that `text` begins with, shortest first.
    fn prefixes(&self, texts: &Pieces, text: &[u8], mut found: impl FnMut(usize, u32)) {
        let byte = |id: u32, at: usize| texts.get(id).and_then(|text| text.get(at)).copied();
        let mut range = self.sorted.as_slice();
        for (at, next) in text.iter().enumerate() {
            let low = range.partition_point(|id| byte(*id, at) < Some(*next));
            range = range.get(low..).unwrap_or_default();
            let high = range.partition_point(|id| byte(*id, at) == Some(*next));
            range = range.get(..high).unwrap_or_default();
            let Some(first) = range.first() else { return };
            if texts.get(*first).is_some_and(|text| text.len() == at + 1) {
                found(at + 1, *first);
            }
        }
    }
}
