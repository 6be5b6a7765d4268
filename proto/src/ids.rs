//! Names and numbers that identify things across processes. All are validated on construction, so a value
//! of one of these types is always safe to log, to put in a header and to compare. All are cheap to clone.

use serde::{Deserialize, Serialize, Serializer};
use std::sync::Arc;

/// Why a text is not a valid identifier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind} {text:?} is not valid: {rule}")]
pub struct InvalidId {
    /// Which identifier was being parsed.
    pub kind: &'static str,
    /// The offending text, cut to 64 characters.
    pub text: String,
    /// The rule that it breaks.
    pub rule: &'static str,
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $max:literal, $rule:literal, $ok:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize)]
        #[serde(try_from = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            /// The longest accepted text, in bytes.
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
    /// A coordinator's or worker's name, unique in its cluster; the last part of its certificate's SAN URI.
    NodeId, "node id", 63, "1 to 63 characters of a-z, 0-9 and '-'",
    |b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'
);
text_id!(
    /// A cluster's name; the trust domain of its certificates' SAN URIs.
    ClusterName, "cluster name", 63, "1 to 63 characters of a-z, 0-9 and '-'",
    |b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'
);
text_id!(
    /// A model's name in the API: catalog name or file stem. Never joined to a path.
    ModelId, "model id", 96, "1 to 96 characters of A-Z, a-z, 0-9, '.', '_' and '-'",
    |b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-')
);
text_id!(
    /// Who a key belongs to. Two tenants never share a block.
    TenantId, "tenant", 63, "1 to 63 characters of a-z, 0-9, '-', '_' and '.'",
    |b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'_' | b'.')
);
text_id!(
    /// One client request, as told in the header `x-request-id`.
    RequestId, "request id", 128, "1 to 128 characters of A-Z, a-z, 0-9, '.', '_', ':' and '-'",
    |b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-' | b':')
);
text_id!(
    /// A client's name for requests that have a prefix in common and come together.
    GroupId, "group id", 128, "1 to 128 characters of A-Z, a-z, 0-9, '.', '_', ':' and '-'",
    |b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-' | b':')
);

/// What a node does; the second part of its certificate's SAN URI. The role decides which RPCs it may call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Serves HTTP, routes, keeps the index.
    Coordinator,
    Worker,
}

impl Role {
    /// The role's name as it stands in the SAN URI.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Coordinator => "coordinator",
            Self::Worker => "worker",
        }
    }
}

/// One life of a worker process. A restart gets a larger epoch; what an older epoch says is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Epoch(pub u64);

/// One attempt at serving a request. Late tokens of an older attempt are dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Attempt(pub u32);
