//! The crate's error type.

/// Why metadata cannot be used, or a prompt cannot be rendered.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Key(#[from] metadata::KeyError),
    /// The metadata does not describe a valid tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] crate::tokenizer::TokenizerError),
    /// The chat template is invalid, or it rejects the messages.
    #[error(transparent)]
    ChatTemplate(#[from] crate::chat_template::TemplateError),
    /// The prompt for two texts has other places for them.
    #[error("{key} must have the places {{query}} and {{document}} once each")]
    PairTemplate { key: &'static str },
}
