//! The merge list of a BPE vocabulary as a table of pairs of symbols.

use std::collections::HashMap;

use super::TokenizerError;
use super::pieces::{FastBuild, Pieces};

/// No symbol; never merges, and stands for no token.
pub(super) const NO_SYMBOL: u32 = u32::MAX;

/// Numbers of texts: tokens have their ids; texts of the merge list that are not tokens have higher numbers.
pub(super) struct Symbols {
    by_text: HashMap<String, u32, FastBuild>,
    tokens: u32,
    spelled: Vec<Vec<u32>>,
}

impl Symbols {
    /// The tokens. If two have the same text, the first one counts.
    pub(super) fn new(texts: &Pieces) -> Result<Self, TokenizerError> {
        let tokens =
            u32::try_from(texts.len()).map_err(|_| TokenizerError::TooManyTokens { found: texts.len() })?;
        let mut by_text = HashMap::with_capacity_and_hasher(texts.len(), FastBuild::default());
        for id in 0..tokens {
            if let Some(text) = texts.get(id).and_then(|text| std::str::from_utf8(text).ok()) {
                by_text.entry(text.to_owned()).or_insert(id);
            }
        }
        Ok(Self { by_text, tokens, spelled: Vec::new() })
    }

    /// The symbol of `text`: its token, or a new symbol that stands for the tokens of its characters.
    pub(super) fn number(&mut self, text: &str) -> Result<u32, TokenizerError> {
        if let Some(&id) = self.by_text.get(text) {
            return Ok(id);
        }
        let found = self.tokens as usize + self.spelled.len();
        let id = u32::try_from(found).map_err(|_| TokenizerError::TooManyTokens { found })?;
        let tokens = self.tokens;
        let letters =
            text.chars().filter_map(|c| self.by_text.get(c.encode_utf8(&mut [0; 4]) as &str).copied());
        self.spelled.push(letters.filter(|&letter| letter < tokens).collect());
        self.by_text.insert(text.to_owned(), id);
        Ok(id)
    }

    pub(super) fn chars(&self) -> impl Iterator<Item = (char, u32)> {
        self.by_text.iter().filter_map(|(text, &symbol)| {
            let mut chars = text.chars();
            chars.next().filter(|_| chars.next().is_none()).map(|c| (c, symbol))
        })
    }
}

#[derive(Debug)]
pub(super) struct Merges {
    /// Rank and symbol of merging two symbols, by `left << 32 | right`.
    pairs: HashMap<u64, (u32, u32), FastBuild>,
    tokens: u32,
    /// Tokens of each symbol from `tokens` on.
    spelled: Vec<Vec<u32>>,
}

impl Merges {
    /// Reads the merge list `lines`, best first. Calls `each` with the two texts of every line. Texts already
    /// in `symbols` are symbols too.
    pub(super) fn read<'a>(
        symbols: &mut Symbols,
        lines: impl ExactSizeIterator<Item = &'a str>,
        mut each: impl FnMut(&'a str, &'a str),
    ) -> Result<Self, TokenizerError> {
        let mut pairs = HashMap::with_capacity_and_hasher(lines.len(), FastBuild::default());
        for (rank, line) in lines.enumerate() {
            let rank = u32::try_from(rank).map_err(|_| TokenizerError::TooManyTokens { found: rank })?;
            // A text may begin with a space.
            let cut = line.char_indices().skip(1).find(|&(_, c)| c == ' ').map(|(at, _)| at);
            let Some((left, right)) = cut.map(|at| (&line[..at], &line[at + 1..])) else {
                return Err(TokenizerError::BadMerge { rank, line: line.to_owned() });
            };
            let key = key(symbols.number(left)?, symbols.number(right)?);
            let merged = symbols.number(&[left, right].concat())?;
            pairs.entry(key).or_insert((rank, merged));
            each(left, right);
        }
        Ok(Self { pairs, tokens: symbols.tokens, spelled: std::mem::take(&mut symbols.spelled) })
    }

    /// Merges of tokens alone, best first, as (left, right, merged). Of two merges of a pair the last one
    /// counts, as in Transformers.
    pub(super) fn of_tokens(merges: impl ExactSizeIterator<Item = (u32, u32, u32)>) -> Self {
        let mut pairs = HashMap::with_capacity_and_hasher(merges.len(), FastBuild::default());
        for (rank, (left, right, merged)) in (0..).zip(merges) {
            pairs.insert(key(left, right), (rank, merged));
        }
        Self { pairs, tokens: NO_SYMBOL, spelled: Vec::new() }
    }

    /// Rank and symbol of merging two symbols.
    pub(super) fn pair(&self, left: u32, right: u32) -> Option<(u32, u32)> {
        self.pairs.get(&key(left, right)).copied()
    }

    /// Whether a symbol is a token.
    pub(super) fn is_token(&self, symbol: u32) -> bool {
        symbol < self.tokens
    }

    /// Appends the tokens of a symbol.
    pub(super) fn spell(&self, symbol: u32, out: &mut Vec<u32>) {
        match symbol.checked_sub(self.tokens) {
            None => out.push(symbol),
            Some(spelled) => out.extend(self.spelled.get(spelled as usize).into_iter().flatten()),
        }
    }
}

fn key(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}
