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
        text_id!($(#[$doc])* $name, $kind, $max, $rule, $ok, Self::new);
    };
    ($(#[$doc:meta])* $name:ident, $kind:literal, $max:literal, $rule:literal, $ok:expr, $received:expr) => {
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
            /// Parses a received identifier, which may have a part that users cannot choose.
            fn try_from(text: String) -> Result<Self, InvalidId> {
                let received: fn(String) -> Result<Self, InvalidId> = $received;
                received(text)
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
    |b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-', Self::parse
);
text_id!(
    /// Name of a cluster; the trust domain of its certificates' SAN URIs.
    ClusterName, "cluster name", 63, "1 to 63 characters of a-z, 0-9 and '-'",
    |b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'
);
text_id!(
    /// Name of a model in the API: catalog name or file stem. Never joined to a path.
    ModelId, "model id", 96, "1 to 96 characters of A-Z, a-z, 0-9, '.', '_' and '-'",
    |b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'), Self::parse
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

impl NodeId {
    /// Separates a worker's name from the number of an instance. Certificates have no such names.
    const INSTANCE: char = '.';

    /// Name of the worker's instance with this number: a model that it serves beside others, with its own epochs,
    /// load reports and KV events.
    pub fn instance(&self, number: u16) -> Self {
        Self(format!("{}{}{number}", self.worker(), Self::INSTANCE).into())
    }

    /// Name of the worker itself, without the number of an instance.
    pub fn worker(&self) -> &str {
        self.0.split_once(Self::INSTANCE).map_or(&self.0, |(worker, _)| worker)
    }

    /// The worker itself.
    pub fn to_worker(&self) -> Self {
        if self.is_instance() { Self(self.worker().into()) } else { self.clone() }
    }

    pub fn is_instance(&self) -> bool {
        self.0.contains(Self::INSTANCE)
    }

    /// Parses a worker's name, or that of an instance.
    fn parse(text: String) -> Result<Self, InvalidId> {
        match text.split_once(Self::INSTANCE) {
            None => Self::new(text),
            Some((worker, number)) => match number.parse::<u16>() {
                Ok(parsed) if parsed.to_string() == number => Ok(Self::new(worker)?.instance(parsed)),
                _ => {
                    let text = text.chars().take(64).collect();
                    Err(InvalidId {
                        kind: "node id",
                        text,
                        rule: "an instance is a node id, '.' and a number up to 65535",
                    })
                }
            },
        }
    }
}

impl ModelId {
    /// Separates a model's name from a version. Names that users choose have no such character.
    const VERSION: char = '@';
    /// Longest name of a model that may have versions, in bytes.
    pub const MAX_VERSIONED: usize = Self::MAX_LEN - 13;

    /// The version of this model with a digest: `name@` and 12 hexadecimal digits.
    ///
    /// # Errors
    ///
    /// For a name longer than [`MAX_VERSIONED`](Self::MAX_VERSIONED), or one that is a version itself.
    pub fn version(&self, digest: &[u8; 32]) -> Result<Self, InvalidId> {
        if self.0.len() > Self::MAX_VERSIONED || self.0.contains(Self::VERSION) {
            let text = self.0.chars().take(64).collect();
            return Err(InvalidId {
                kind: "model id",
                text,
                rule: "a model with versions has at most 83 characters",
            });
        }
        let digits: String = blake3::Hash::from_bytes(*digest).to_hex().as_str().chars().take(12).collect();
        Ok(Self(format!("{}{}{digits}", self.0, Self::VERSION).into()))
    }

    /// The model's name without a version.
    pub fn name(&self) -> &str {
        self.0.split_once(Self::VERSION).map_or(&self.0, |(name, _)| name)
    }

    /// The model without a version.
    pub fn to_name(&self) -> Self {
        if self.is_version() { Self(self.name().into()) } else { self.clone() }
    }

    pub fn is_version(&self) -> bool {
        self.0.contains(Self::VERSION)
    }

    /// Parses a name, or a version of one.
    pub fn parse(text: impl Into<String>) -> Result<Self, InvalidId> {
        let text = text.into();
        match text.split_once(Self::VERSION) {
            None => Self::new(text),
            Some((name, digits)) => {
                let hexadecimal = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
                let sound = digits.len() == 12 && digits.bytes().all(hexadecimal);
                match Self::new(name) {
                    Ok(_) if sound && name.len() <= Self::MAX_VERSIONED => Ok(Self(text.into())),
                    _ => {
                        let text = text.chars().take(64).collect();
                        Err(InvalidId {
                            kind: "model id",
                            text,
                            rule: "a version is a name, '@' and 12 hexadecimal digits",
                        })
                    }
                }
            }
        }
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_is_named_after_its_worker() {
        let worker = NodeId::new("spark-1").unwrap();
        let instance = worker.instance(12);
        assert_eq!(instance.as_str(), "spark-1.12");
        assert_eq!((instance.worker(), instance.to_worker()), ("spark-1", worker.clone()));
        assert!(instance.is_instance() && !worker.is_instance());
        assert_eq!(instance.instance(3), worker.instance(3), "of the worker, not of the instance");
        assert_eq!(NodeId::try_from("spark-1.12".to_owned()), Ok(instance));
        assert!(NodeId::new("spark-1.12").is_err(), "users and certificates name workers");
        for wrong in ["spark-1.", "spark-1.012", "spark-1.65536", "spark-1.-1", ".1", "a.1.2", "a.+1"] {
            assert!(NodeId::try_from(wrong.to_owned()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_version_is_named_by_its_digest() {
        let chat = ModelId::new("chat").unwrap();
        let version = chat.version(&[0xab; 32]).unwrap();
        assert_eq!((version.as_str(), version.name()), ("chat@abababababab", "chat"));
        assert!(version.is_version() && !chat.is_version() && version.version(&[1; 32]).is_err());
        assert_eq!(ModelId::try_from("chat@abababababab".to_owned()), Ok(version));
        assert!(ModelId::new("chat@abababababab").is_err(), "users cannot choose it");
        for wrong in ["chat@", "chat@ab", "chat@ABABABABABAB", "@abababababab", "a@b@abababababab"] {
            assert!(ModelId::parse(wrong).is_err(), "{wrong}");
        }
        let long = ModelId::new("m".repeat(ModelId::MAX_VERSIONED)).unwrap();
        assert_eq!(long.version(&[1; 32]).unwrap().as_str().len(), ModelId::MAX_LEN);
        assert!(ModelId::new("m".repeat(ModelId::MAX_VERSIONED + 1)).unwrap().version(&[1; 32]).is_err());
    }
}
