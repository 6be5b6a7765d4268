//! Nodes that have joined or ask to, their certificates, join tokens, revoked certificates, and the authority's
//! sealed key. Times are those of the coordinator that proposes a change, so all members decide alike.

use super::{Change, Kind, Refusal, put};
use proto::ids::{NodeId, Role};
use proto::join::{MAX_LABEL, MAX_LABELS, TokenId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Maximum of join tokens.
pub const MAX_TOKENS: usize = 1024;
/// Maximum of nodes that have joined or wait for approval.
const MAX_NODES: usize = 4096;
/// Maximum of valid certificates of one node.
const MAX_CERTIFICATES: usize = 16;
/// Maximum of revoked certificates that have not ended; a list of them stays below 512 KiB.
pub const MAX_REVOKED: usize = 10_000;
/// Maximum bytes of the roots, and of the authority's sealed key.
const MAX_AUTHORITY: usize = 16 << 10;
/// Maximum bytes of a serial number (RFC 5280, section 4.1.2.2) and a sign byte.
const MAX_SERIAL: usize = 21;
const DAY_S: u64 = 24 * 60 * 60;
/// How long an expired token is kept, so that it is refused as expired.
const TOKEN_KEPT_S: u64 = DAY_S;
/// How long a node waits for approval.
const WAITING_S: u64 = 7 * DAY_S;
/// How long a revoked certificate is kept after its end, for clocks that are behind.
const REVOKED_KEPT_S: u64 = 2 * DAY_S;

/// A join token. Its secret is known to its holder only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenRecord {
    pub id: TokenId,
    /// SHA-256 of the secret.
    pub sha256: [u8; 32],
    pub role: Role,
    /// The only node that may use it, also to replace a node of this name.
    pub node: Option<NodeId>,
    /// Whether an operator approves each node.
    pub approval: bool,
    /// Remaining uses.
    pub uses: u32,
    pub created_unix_s: u64,
    pub expires_unix_s: u64,
}

/// A certificate of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertificateRecord {
    /// Serial number, big-endian.
    pub serial: Vec<u8>,
    pub ends_unix_s: u64,
}

/// Why a node may join.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum JoinedBy {
    Token(TokenId),
    /// A service account of Kubernetes, as `system:serviceaccount:NAMESPACE:NAME`.
    ServiceAccount(String),
    /// It had a certificate of the cluster that was issued without this table.
    Certificate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeState {
    /// Waits for an operator's approval.
    Waiting,
    /// Approved; it gets its certificate when it asks again.
    Approved,
    Joined,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    pub state: NodeState,
    pub by: JoinedBy,
    /// SHA-256 of its public key.
    pub key: [u8; 32],
    pub labels: Vec<(String, String)>,
    /// Certificates that have not ended, oldest first.
    pub certificates: Vec<CertificateRecord>,
    /// Time of the last change of [`state`](Self::state).
    pub since_unix_s: u64,
}

/// A revoked certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevokedRecord {
    pub revoked_unix_s: u64,
    pub ends_unix_s: u64,
}

/// The cluster's authority.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuthorityRecord {
    /// The roots, the one that signs first.
    pub roots_pem: String,
    /// The authority's key, encrypted with the cluster key.
    pub sealed_key: Vec<u8>,
}

impl std::fmt::Debug for AuthorityRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AuthorityRecord").field("roots_pem", &self.roots_pem).finish_non_exhaustive()
    }
}

/// A node asks for a certificate, or gets one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeAdmitted {
    pub role: Role,
    pub node: NodeId,
    pub by: AdmittedBy,
    pub key: [u8; 32],
    pub labels: Vec<(String, String)>,
    /// The certificate to be issued. `None`: an operator must approve the node first.
    pub certificate: Option<CertificateRecord>,
    pub now_unix_s: u64,
}

/// See [`JoinedBy`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum AdmittedBy {
    /// A token with this SHA-256 of its secret.
    Token(TokenId, [u8; 32]),
    /// The account has proved that its pod runs on the node that it names, so it may replace the node.
    ServiceAccount(String),
    /// The node renews this certificate.
    Certificate(CertificateRecord),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeApproved {
    pub role: Role,
    pub node: NodeId,
    /// The key that the operator has seen.
    pub key: [u8; 32],
    pub now_unix_s: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRemoved {
    pub role: Role,
    pub node: NodeId,
    pub now_unix_s: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nodes {
    tokens: BTreeMap<TokenId, TokenRecord>,
    nodes: BTreeMap<(Role, NodeId), NodeRecord>,
    /// By serial number.
    revoked: BTreeMap<Vec<u8>, RevokedRecord>,
    authority: Option<AuthorityRecord>,
}

impl Nodes {
    pub fn tokens(&self) -> &BTreeMap<TokenId, TokenRecord> {
        &self.tokens
    }

    pub fn nodes(&self) -> &BTreeMap<(Role, NodeId), NodeRecord> {
        &self.nodes
    }

    /// Revoked certificates that have not ended, by serial number.
    pub fn revoked(&self) -> &BTreeMap<Vec<u8>, RevokedRecord> {
        &self.revoked
    }

    pub fn authority(&self) -> Option<&AuthorityRecord> {
        self.authority.as_ref()
    }

    /// Applies a change of nodes, tokens or the authority; ignores any other.
    pub(super) fn make(&mut self, change: Change) -> Result<(), Refusal> {
        match change {
            Change::JoinTokenIssued(token) => {
                self.prune(token.created_unix_s);
                put(&mut self.tokens, token.id, token, MAX_TOKENS, Kind::Token)
            }
            Change::JoinTokenRevoked(id) => {
                self.tokens.remove(&id).map(drop).ok_or(Refusal::Unknown(Kind::Token))
            }
            Change::NodeAdmitted(admitted) => self.admit(*admitted),
            Change::NodeApproved(NodeApproved { role, node, key, now_unix_s }) => {
                let record = self.nodes.get_mut(&(role, node));
                let waits = record.filter(|node| node.state == NodeState::Waiting && node.key == key);
                let record = waits.ok_or(Refusal::Unknown(Kind::WaitingNode))?;
                (record.state, record.since_unix_s) = (NodeState::Approved, now_unix_s);
                Ok(())
            }
            Change::NodeRemoved(NodeRemoved { role, node, now_unix_s }) => {
                self.prune(now_unix_s);
                let record = self.nodes.get(&(role, node.clone())).ok_or(Refusal::Unknown(Kind::Node))?;
                self.revoke(record.certificates.clone(), now_unix_s)?;
                self.nodes.remove(&(role, node));
                Ok(())
            }
            Change::AuthoritySet(authority) => {
                if authority.roots_pem.len() > MAX_AUTHORITY || authority.sealed_key.len() > MAX_AUTHORITY {
                    return Err(Refusal::TooLarge);
                }
                self.authority = Some(authority);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn admit(&mut self, admitted: NodeAdmitted) -> Result<(), Refusal> {
        let NodeAdmitted { role, node, by, key, labels, certificate, now_unix_s: now } = admitted;
        let long = |(key, value): &(String, String)| key.len().max(value.len()) > MAX_LABEL;
        let serial = certificate.as_ref().map_or(0, |certificate| certificate.serial.len());
        if labels.len() > MAX_LABELS || labels.iter().any(long) || serial > MAX_SERIAL {
            return Err(Refusal::TooLarge);
        }
        self.prune(now);
        let name = (role, node);
        let known = self.nodes.get(&name);
        if known.is_none() && self.nodes.len() >= MAX_NODES {
            return Err(Refusal::Full(Kind::Node));
        }
        // The same key again is the same node, whose last reply may have been lost.
        let same = known.filter(|known| known.key == key);
        let other_joined = known.is_some_and(|known| known.state == NodeState::Joined && known.key != key);
        let (by, mut certificates, replaces) = match by {
            AdmittedBy::Token(id, sha256) => {
                let token = self.tokens.get(&id).filter(|token| token.sha256 == sha256);
                let token = token.ok_or(Refusal::UnknownToken)?;
                let approved = same.is_some_and(|known| known.state != NodeState::Waiting);
                // An operator's approval counts for longer than the token.
                let decided = same.is_some_and(|known| known.state == NodeState::Approved);
                match token {
                    _ if token.expires_unix_s <= now && !decided => return Err(Refusal::TokenExpired),
                    _ if token.role != role => return Err(Refusal::TokenRole(token.role)),
                    TokenRecord { node: Some(only), .. } if *only != name.1 => {
                        return Err(Refusal::TokenNode(only.clone()));
                    }
                    TokenRecord { node: None, .. } if other_joined => return Err(Refusal::NameTaken),
                    _ if same.is_none() && known.is_some_and(|known| known.state != NodeState::Joined) => {
                        return Err(Refusal::AnotherKeyWaits);
                    }
                    _ if same.is_none() && token.uses == 0 => return Err(Refusal::TokenUsedUp),
                    _ if certificate.is_some() && token.approval && !approved => {
                        return Err(Refusal::NotApproved);
                    }
                    _ => {}
                }
                (JoinedBy::Token(id), Vec::new(), other_joined)
            }
            AdmittedBy::ServiceAccount(account) => {
                (JoinedBy::ServiceAccount(account), Vec::new(), other_joined)
            }
            AdmittedBy::Certificate(presented) => {
                if self.revoked.contains_key(&presented.serial) || presented.serial.len() > MAX_SERIAL {
                    return Err(Refusal::Revoked);
                }
                if other_joined {
                    return Err(Refusal::NameTaken);
                }
                (JoinedBy::Certificate, vec![presented], false)
            }
        };
        let (certificates, by, labels, spends) = match same {
            Some(known) => {
                let mut all = known.certificates.clone();
                certificates.retain(|certificate| !all.contains(certificate));
                all.append(&mut certificates);
                let labels = if labels.is_empty() { known.labels.clone() } else { labels };
                (all, known.by.clone(), labels, false)
            }
            None => (certificates, by, labels, true),
        };
        let mut record = NodeRecord {
            state: NodeState::Waiting,
            by,
            key,
            labels,
            certificates,
            since_unix_s: same.map_or(now, |known| known.since_unix_s),
        };
        match certificate {
            Some(certificate) => {
                if same.is_none_or(|known| known.state != NodeState::Joined) {
                    record.since_unix_s = now;
                }
                record.state = NodeState::Joined;
                if record.certificates.len() >= MAX_CERTIFICATES {
                    return Err(Refusal::Full(Kind::Certificate));
                }
                // A change may be made twice.
                if !record.certificates.contains(&certificate) {
                    record.certificates.push(certificate);
                }
            }
            None => record.state = same.map_or(NodeState::Waiting, |known| known.state),
        }
        if replaces && let Some(replaced) = self.nodes.get(&name) {
            self.revoke(replaced.certificates.clone(), now)?;
        }
        if let JoinedBy::Token(id) = record.by
            && spends
            && let Some(token) = self.tokens.get_mut(&id)
        {
            token.uses -= 1;
        }
        self.nodes.insert(name, record);
        Ok(())
    }

    fn revoke(&mut self, certificates: Vec<CertificateRecord>, now: u64) -> Result<(), Refusal> {
        if self.revoked.len() + certificates.len() > MAX_REVOKED {
            return Err(Refusal::Full(Kind::Certificate));
        }
        for CertificateRecord { serial, ends_unix_s } in certificates {
            self.revoked.insert(serial, RevokedRecord { revoked_unix_s: now, ends_unix_s });
        }
        Ok(())
    }

    /// Forgets what has ended: tokens, certificates, and nodes that were not approved.
    fn prune(&mut self, now: u64) {
        self.tokens.retain(|_, token| token.expires_unix_s.saturating_add(TOKEN_KEPT_S) > now);
        self.revoked.retain(|_, revoked| revoked.ends_unix_s.saturating_add(REVOKED_KEPT_S) > now);
        self.nodes.retain(|_, node| {
            node.certificates.retain(|certificate| certificate.ends_unix_s > now);
            node.state == NodeState::Joined || node.since_unix_s.saturating_add(WAITING_S) > now
        });
    }
}
