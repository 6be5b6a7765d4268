//! The generation APIs.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `/v1/completions`.
    Completion,
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/responses`.
    Responses,
    /// `/v1/messages`, Anthropic's.
    Messages,
    /// Ollama's `/api/chat`.
    OllamaChat,
    /// Ollama's `/api/generate`.
    OllamaGenerate,
}

impl Kind {
    pub const ALL: [Self; 6] = [
        Self::Completion,
        Self::Chat,
        Self::Responses,
        Self::Messages,
        Self::OllamaChat,
        Self::OllamaGenerate,
    ];

    pub fn is_ollama(self) -> bool {
        matches!(self, Self::OllamaChat | Self::OllamaGenerate)
    }

    pub fn endpoint(self) -> crate::Endpoint {
        match self {
            Self::Completion => crate::Endpoint::Completions,
            Self::Chat => crate::Endpoint::Chat,
            Self::Responses => crate::Endpoint::Responses,
            Self::Messages => crate::Endpoint::Messages,
            Self::OllamaChat => crate::Endpoint::Ollama(crate::Route::Chat),
            Self::OllamaGenerate => crate::Endpoint::Ollama(crate::Route::Generate),
        }
    }
}
