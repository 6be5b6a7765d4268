//! Names and numbers that identify things across processes. Names are validated on construction, so they
//! are safe to log, to put in a header and to compare. All ids are cheap to clone.

use serde::{Deserialize, Serialize, Serializer};
use std::sync::Arc;

/// Reason why a text is not a valid identifier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind} {text:?} is not valid: {rule}")]
pub struct InvalidId {
    /// Kind of the identifier.
    pub kind: &'static str,
    /// The rejected text, cut to 64 characters.
    pub text: String,
    /// The rule that the text breaks.
    pub rule: &'static str,
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $max:literal, $rule:literal, $ok:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize)]
        #[serde(try_from = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            /// Length limit in bytes.
            pub const MAX_LEN: usize = $max;

            /// Checks `text` against the rule of this identifier.
            pub fn new(text: impl Into<String>) -> Result<Self, InvalidId> {
                let text = text.into();
                let ok: fn(u8) -> bool = $ok;
                if text.is_empty() || text.len() > $max || !text.bytes().all(ok) {
                    let text = text.chars().take(64).collect();
                    return Err(InvalidId { kind: $kind, text, rule: $rule });
                }
                Ok(Self(text.into()))
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;
            fn try_from(text: String) -> Result<Self, InvalidId> {
                Self::new(text)
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.0.as_ref().to_owned()
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.0)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

text_id!(
    /// Name of a coordinator or worker, unique in its cluster; the last part of its certificate's SAN URI.
    NodeId, "node id", 63, "1 to 63 characters of a-z, 0-9 and '-'",
    |b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'
);
text_id!(
    /// Name of a cluster; the trust domain of its certificates' SAN URIs.
    ClusterName, "cluster name", 63, "1 to 63 characters of a-z, 0-9 and '-'",
    |b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'
);
text_id!(
    /// Name of a model in the API: catalog name or file stem. Never joined to a path.
    ModelId, "model id", 96, "1 to 96 characters of A-Z, a-z, 0-9, '.', '_' and '-'",
    |b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-')
);
text_id!(
    /// Owner of API keys. Two tenants never share a block.
    TenantId, "tenant", 63, "1 to 63 characters of a-z, 0-9, '-', '_' and '.'",
    |b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'_' | b'.')
);
text_id!(
    /// Id of one client request, from the header `x-request-id`.
    RequestId, "request id", 128, "1 to 128 characters of A-Z, a-z, 0-9, '.', '_', ':' and '-'",
    |b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-' | b':')
);
text_id!(
    /// Client's name for requests that have a common prefix and arrive together.
    GroupId, "group id", 128, "1 to 128 characters of A-Z, a-z, 0-9, '.', '_', ':' and '-'",
    |b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-' | b':')
);

impl ModelId {
    /// The model of a generate request for an adapter: the digest of its parent with it, in hexadecimal. By the time
    /// that the request arrives, the adapter's name may be that of another one, whose blocks have another root.
    pub fn of_adapter(digest: &[u8; 32]) -> Self {
        Self(blake3::Hash::from_bytes(*digest).to_hex().as_str().into())
    }
}

/// Role of a node; the second part of its certificate's SAN URI. It decides which RPCs the node may call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Serves HTTP, routes requests, keeps the prefix index.
    Coordinator,
    Worker,
}

impl Role {
    /// Name of the role in the SAN URI.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Coordinator => "coordinator",
            Self::Worker => "worker",
        }
    }
}

/// One run of a worker process. A restart increases the epoch; messages of an older epoch are refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Epoch(pub u64);

/// One attempt at serving a request. Late tokens of an older attempt are dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Attempt(pub u32);
