//! Joining: a node without a certificate asks a coordinator for one, or renews its own, on a connection of its
//! own application protocol. One exchange is one connection with one stream: a [`JoinRequest`], and back a
//! [`JoinReply`].
//!
//! A [`JoinToken`] has the fingerprint of the cluster's root, by which the node checks the coordinator, and a
//! secret, by which the coordinator checks the node. The private key is made on the node and never sent.

use crate::ids::{NodeId, Role};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};

/// Most labels of a node.
pub const MAX_LABELS: usize = 8;
/// Most bytes of a label's key, and of its value.
pub const MAX_LABEL: usize = 63;
/// Most bytes of a token of a Kubernetes service account.
pub const MAX_SERVICE_ACCOUNT_TOKEN: usize = 16 << 10;
/// First characters of every join token. Scanners find leaked tokens by them.
pub const TOKEN_PREFIX: &str = "kvasir-join-";

/// Number of a join token; not secret.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TokenId(pub [u8; 8]);

impl std::fmt::Display for TokenId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for TokenId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TokenId({self})")
    }
}

/// A token's secret part.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenSecret(pub [u8; 32]);

impl std::fmt::Debug for TokenSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TokenSecret(..)")
    }
}

/// A token for a joining node, as one text: [`TOKEN_PREFIX`] and base64url of id, secret and root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoinToken {
    pub id: TokenId,
    pub secret: TokenSecret,
    /// SHA-256 of the public key (SubjectPublicKeyInfo) of the cluster's root.
    pub root: [u8; 32],
}

/// The text is not a join token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a join token: it begins with {TOKEN_PREFIX} and has 96 more characters")]
pub struct InvalidToken;

impl JoinToken {
    /// The token as text. It contains the secret.
    pub fn to_text(&self) -> String {
        let bytes = [&self.id.0[..], &self.secret.0, &self.root].concat();
        format!("{TOKEN_PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes))
    }
}

impl std::str::FromStr for JoinToken {
    type Err = InvalidToken;

    fn from_str(text: &str) -> Result<Self, InvalidToken> {
        let text = text.trim().strip_prefix(TOKEN_PREFIX).ok_or(InvalidToken)?;
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| InvalidToken)?;
        let (id, rest) = bytes.split_first_chunk().ok_or(InvalidToken)?;
        let (secret, root) = rest.split_first_chunk().ok_or(InvalidToken)?;
        let root = root.try_into().map_err(|_| InvalidToken)?;
        Ok(Self { id: TokenId(*id), secret: TokenSecret(*secret), root })
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum JoinRequest {
    Join(NodeJoin),
    /// The connection's certificate names the node, whose key stays. The certificate request, in DER.
    Renew(Vec<u8>),
}

/// A new node asks for a certificate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeJoin {
    pub credential: JoinCredential,
    pub role: Role,
    pub node: NodeId,
    /// Certificate request (PKCS#10, DER) of the key that the node has made.
    pub request: Vec<u8>,
    /// For operators; at most [`MAX_LABELS`], of at most [`MAX_LABEL`] bytes each.
    pub labels: Vec<(String, String)>,
}

/// Why a node may join.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum JoinCredential {
    Token(TokenId, TokenSecret),
    /// A token that Kubernetes has made for a service account of the node's pod (JSON Web Token).
    ServiceAccount(String),
}

impl std::fmt::Debug for JoinCredential {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Token(id, _) => write!(f, "Token({id}, ..)"),
            Self::ServiceAccount(_) => f.write_str("ServiceAccount(..)"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum JoinReply {
    Joined(Box<Joined>),
    /// An operator must approve the node. It asks again.
    Pending,
    Refused(JoinRefusal),
}

/// The certificate of a joined node, and the coordinators.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Joined {
    pub certificate_pem: String,
    /// The roots of the cluster, to check other nodes with.
    pub roots_pem: String,
    /// For a coordinator: the key of all block ids.
    pub cluster_key: Option<SharedKey>,
    /// The coordinators with their QUIC addresses.
    pub coordinators: Vec<(NodeId, String)>,
}

/// The cluster key on its way to a coordinator.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedKey(pub [u8; 32]);

impl std::fmt::Debug for SharedKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SharedKey(..)")
    }
}

/// Why a node may not join, or not now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum JoinRefusal {
    /// There is no such token, or its secret is another one.
    #[error("the token is not known")]
    UnknownToken,
    #[error("the token has expired")]
    Expired,
    /// All uses of the token are spent.
    #[error("the token is used up")]
    UsedUp,
    #[error("the token is for the role {}", .0.as_str())]
    WrongRole(Role),
    #[error("the token is for the node {0}")]
    WrongNode(NodeId),
    /// A node of this role and name has joined with another key.
    #[error("a node of this name has joined with another key; remove it first, or use a token for this name")]
    NameTaken,
    /// An operator has asked for approval, and another key waits under this name.
    #[error("another key waits for approval under this name")]
    AnotherWaits,
    #[error("{0}")]
    Invalid(String),
    /// The token of the service account is not accepted.
    #[error("service account: {0}")]
    ServiceAccount(String),
    /// The coordinators do not have the authority's key.
    #[error(
        "the coordinators have no authority: start one with --ca, or issue the certificate with `kvasir ca issue`"
    )]
    NoAuthority,
    #[error("no majority of the coordinators has agreed in time")]
    NoQuorum,
    #[error("the coordinator keeps no table: it has no data directory")]
    NoGroup,
    #[error("too many requests; ask again in {0} ms")]
    TooMany(u32),
    #[error("the cluster has its maximum of {0}")]
    Full(String),
    /// The connection has no certificate.
    #[error("a renewal needs the node's present certificate")]
    NoCertificate,
    #[error("an internal error; the coordinator's log has more")]
    Internal,
}

impl JoinRefusal {
    /// Whether the same request may succeed later. A group that was just founded has no authority for a second.
    pub fn retryable(&self) -> bool {
        matches!(self, Self::NoQuorum | Self::NoAuthority | Self::TooMany(_) | Self::Internal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_one_text() {
        let token = JoinToken { id: TokenId([1; 8]), secret: TokenSecret([2; 32]), root: [3; 32] };
        let text = token.to_text();
        assert_eq!(text.len(), TOKEN_PREFIX.len() + 96);
        assert_eq!(text.parse(), Ok(token.clone()));
        assert_eq!(format!(" {text}\n").parse(), Ok(token.clone()));
        let long = format!("{text}AAAA");
        for other in ["", TOKEN_PREFIX, &text[1..], &text[..text.len() - 4], &long] {
            assert_eq!(other.parse::<JoinToken>(), Err(InvalidToken), "{other}");
        }
        assert!(!format!("{token:?}").contains("2, 2"));
    }
}
