//! What an answer must be: the grammar that goes with a generation. Workers compile it; see decision 39.

use serde::{Deserialize, Serialize};

/// Bytes of a grammar's text at most.
pub const MAX_GRAMMAR_BYTES: usize = 256 << 10;
/// Bytes of the text that a grammar may wait for.
pub const MAX_TRIGGER_BYTES: usize = 256;

/// In which language a grammar is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum GrammarSyntax {
    JsonSchema,
    /// A regular expression for all of the answer.
    Regex,
    /// A grammar as Lark writes them.
    Lark,
}

/// Which answers are allowed. What says so is checked at the API's edge as far as that is cheap; a worker checks all of
/// it before it computes anything.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrammarSpec {
    /// What the request calls it, for refusals.
    pub field: String,
    /// The language of `text`.
    pub syntax: GrammarSyntax,
    /// The grammar; at most [`MAX_GRAMMAR_BYTES`].
    pub text: String,
    /// Everything is allowed until the answer has this in it, and the grammar is of what comes behind; none: it is of
    /// the whole answer. At most [`MAX_TRIGGER_BYTES`].
    pub trigger: Option<String>,
}
