//! A tokenizer's vocabulary as the grammar library wants it.

use llguidance::ParserFactory;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{
    ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie,
};
use model::tokenizer::{Kind, Tokenizer};
use std::sync::Arc;

/// Steps of building a grammar's regular expressions; about 50,000 a millisecond.
const LEXER_FUEL: u64 = 1_000_000;
/// Steps in them for one mask; about 14,000 a millisecond.
const STEP_LEXER_FUEL: u64 = 200_000;
/// Items of the parser for one mask; about 20,000 a millisecond.
const STEP_ITEMS: usize = 50_000;
/// Items of the parser at one byte.
const ROW_ITEMS: usize = 2_000;
/// States of a grammar's regular expressions, at 1 to 2 KiB.
const LEXER_STATES: usize = 50_000;
/// Symbols in a grammar's productions.
const GRAMMAR_SYMBOLS: usize = 200_000;

/// Compiles grammars over a vocabulary, within the limits above. Takes a second for the largest vocabularies.
pub(super) fn factory(tokenizer: &Tokenizer) -> Result<ParserFactory, String> {
    let words: Vec<Vec<u8>> = (0..tokenizer.vocab_size() as u32).map(|id| word(tokenizer, id)).collect();
    let ends: Vec<u32> = tokenizer.eos_ids().collect();
    let info = TokRxInfo::new(words.len() as u32, ends.first().copied().unwrap_or(INVALID_TOKEN));
    let mut trie = TokTrie::from(&info, &words);
    if !ends.is_empty() {
        trie = trie.with_eos_tokens(&ends);
    }
    // It never forces tokens upon us: those that the model would not write cost quality.
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

/// What a token writes; of one that steers the model its name behind a mark that no text has.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let named = || {
        let text = tokenizer.token_text(id).unwrap_or_default();
        [&[TokTrie::SPECIAL_TOKEN_MARKER], text.as_bytes()].concat()
    };
    match tokenizer.kind(id) {
        _ if tokenizer.is_eog(id) => named(),
        Some(Kind::Control | Kind::Unknown) => named(),
        Some(Kind::Normal | Kind::UserDefined | Kind::Byte) => tokenizer.token_bytes(id).to_vec(),
        Some(Kind::Unused) | None => Vec::new(),
    }
}
