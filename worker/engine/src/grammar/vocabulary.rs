//! Converts a tokenizer's vocabulary for the grammar library.

use llguidance::ParserFactory;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{
    ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie,
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use text::dialect::is_mark;
use text::tokenizer::{Kind, Tokenizer};

/// Maximum steps to build a grammar's regular expressions; about 50,000 a millisecond.
const LEXER_FUEL: u64 = 1_000_000;
/// Maximum regex steps for one mask; about 14,000 a millisecond.
const STEP_LEXER_FUEL: u64 = 200_000;
/// Maximum parser items for one mask; about 20,000 a millisecond.
const STEP_ITEMS: usize = 50_000;
/// Maximum parser items at one byte.
const ROW_ITEMS: usize = 2_000;
/// Maximum states of a grammar's regular expressions, of 1 to 2 KiB each.
const LEXER_STATES: usize = 50_000;
/// Maximum tokens of a vocabulary. The largest known ones have a quarter of a million.
const MAX_TOKENS: usize = 1 << 22;
/// Maximum symbols in a grammar's productions.
const GRAMMAR_SYMBOLS: usize = 200_000;

/// The parts of a vocabulary that a grammar may name.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Names {
    /// Number of tokens.
    pub(super) tokens: u32,
    /// Control tokens with their names.
    pub(super) named: Vec<(u32, String)>,
    /// Tokens that end an answer.
    pub(super) ends: Vec<u32>,
}

/// The parts of a tokenizer's vocabulary that a grammar may name.
pub(super) fn names(tokenizer: &Tokenizer) -> Names {
    let tokens = tokenizer.vocab_size() as u32;
    let name = |id| Some((id, tokenizer.token_text(id)?.to_owned()));
    let named = (0..tokens).filter(|id| is_structural(tokenizer, *id)).filter_map(name).collect();
    Names { tokens, named, ends: tokenizer.eos_ids().collect() }
}

/// Creates a factory that compiles grammars over a vocabulary within the limits above. Takes a second for the
/// largest vocabularies.
pub(super) fn factory(tokenizer: &Tokenizer) -> Result<ParserFactory, String> {
    let words: Vec<Vec<u8>> = (0..tokenizer.vocab_size() as u32).map(|id| word(tokenizer, id)).collect();
    limited(&words, &tokenizer.eos_ids().collect::<Vec<_>>())
}

/// Like [`factory`] for the vocabulary with these names, but over single bytes.
pub(super) fn byte_factory(names: &Names) -> Result<ParserFactory, String> {
    let mut words = vec![Vec::new(); (names.tokens as usize).min(MAX_TOKENS)];
    for (id, name) in &names.named {
        if let Some(word) = words.get_mut(*id as usize) {
            *word = [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat();
        }
    }
    let free = words.iter_mut().filter(|word| word.is_empty());
    for (word, byte) in free.zip(0..TokTrie::SPECIAL_TOKEN_MARKER) {
        *word = vec![byte];
    }
    limited(&words, &names.ends)
}

fn limited(words: &[Vec<u8>], ends: &[u32]) -> Result<ParserFactory, String> {
    let info = TokRxInfo::new(words.len() as u32, ends.first().copied().unwrap_or(INVALID_TOKEN));
    let mut trie = TokTrie::from(&info, words);
    if !ends.is_empty() {
        trie = trie.with_eos_tokens(ends);
    }
    // It must never force tokens: ones that the model would not choose cost quality.
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let slices = SlicedBiasComputer::general_slices();
    let factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices);
    let mut factory = factory.map_err(|error| error.to_string())?;
    factory.quiet();
    let limits = factory.limits_mut();
    limits.initial_lexer_fuel = LEXER_FUEL;
    limits.step_lexer_fuel = STEP_LEXER_FUEL;
    limits.step_max_items = STEP_ITEMS;
    limits.max_items_in_row = ROW_ITEMS;
    limits.max_lexer_states = LEXER_STATES;
    limits.max_grammar_size = GRAMMAR_SYMBOLS;
    limits.verbose_errors = false;
    Ok(factory)
}

/// Whether a token is a control token or marks an answer's structure. Grammars name such tokens.
fn is_structural(tokenizer: &Tokenizer, id: u32) -> bool {
    tokenizer.is_eog(id)
        || matches!(tokenizer.kind(id), Some(Kind::Control | Kind::Unknown))
        || is_mark(tokenizer, id)
}

/// Bytes of a token's text. For control tokens: a marker that no text contains, and the name.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    if is_structural(tokenizer, id) {
        let text = tokenizer.token_text(id).unwrap_or_default();
        return [&[TokTrie::SPECIAL_TOKEN_MARKER], text.as_bytes()].concat();
    }
    match tokenizer.kind(id) {
        Some(Kind::Normal | Kind::UserDefined | Kind::Byte) => tokenizer.token_bytes(id).to_vec(),
        Some(Kind::Control | Kind::Unknown | Kind::Unused) | None => Vec::new(),
    }
}
