//! The grammar that constrains a generation's output. Workers compile it; see decision 39.

use serde::{Deserialize, Serialize};

/// Most bytes of a grammar's text.
pub const MAX_GRAMMAR_BYTES: usize = 256 << 10;
/// Most bytes of a grammar's trigger.
pub const MAX_TRIGGER_BYTES: usize = 256;

/// [`GrammarSpec::field`] of tool calls that are optional and not strict. An engine that cannot constrain what
/// follows a trigger may generate them without the grammar.
pub const OPTIONAL_TOOLS: &str = "tools";

/// Language that a grammar is written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum GrammarSyntax {
    JsonSchema,
    /// A regular expression that the whole answer must match.
    Regex,
    /// A Lark grammar.
    Lark,
}

/// Constraint on an answer. The API edge makes the cheap checks of it; a worker checks it fully before it
/// computes anything.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrammarSpec {
    /// Name of the request's field, for error messages.
    pub field: String,
    pub syntax: GrammarSyntax,
    /// At most [`MAX_GRAMMAR_BYTES`].
    pub text: String,
    /// Text after which the grammar applies; everything before it is unconstrained. With `None` the grammar
    /// applies to the whole answer. At most [`MAX_TRIGGER_BYTES`].
    pub trigger: Option<String>,
}
