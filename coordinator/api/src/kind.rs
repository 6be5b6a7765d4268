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
}

impl Kind {
    pub fn endpoint(self) -> crate::Endpoint {
        match self {
            Self::Completion => crate::Endpoint::Completions,
            Self::Chat => crate::Endpoint::Chat,
            Self::Responses => crate::Endpoint::Responses,
            Self::Messages => crate::Endpoint::Messages,
        }
    }
}
