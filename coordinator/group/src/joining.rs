//! Joining: decides requests of nodes for certificates, and keeps the authority and the revocation list.
//!
//! A node comes with a join token, with a token of its pod's service account, or with the certificate that it
//! renews. The group commits each admission, with the serial number, before a certificate is signed. So a token
//! has its uses once in the whole group, and every certificate can be revoked by the node's name. The
//! authority's key is in the table, sealed with the cluster key.
//!
//! Guarantees: a stranger's request costs no log entry. Every admission and every refusal is audited, repeated
//! refusals once a minute with their number. Must not contain: sockets, HTTP.

mod rates;

use crate::agreement::{Agreement, ChangeError};
use crate::audit::{Audit, Record};
use consensus::table::{
    AdmittedBy, AuthorityRecord, CertificateRecord, Change, NodeAdmitted, NodeState, Nodes, Refusal, Table,
};
use dispatch::metrics::Metrics;
use parking_lot::Mutex;
use pki::Identity;
use pki::ca::{Authority, CertificateRequest, Certified, Serial, ends_unix_s};
use pki::service_account::Policy;
use proto::block::ClusterKey;
use proto::ids::{NodeId, Role};
use proto::join::{
    JoinCredential, JoinRefusal, JoinReply, JoinRequest, Joined, MAX_LABEL, MAX_LABELS,
    MAX_SERVICE_ACCOUNT_TOKEN, NodeJoin, SharedKey,
};
use proto::log::Repeats;
use rates::JoinRates;
use sha2::{Digest, Sha256};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use subtle::ConstantTimeEq;
use transport::join::{JoinCall, Presented};

/// Interval at which the table is compared with the revocation list, and the authority with the table.
const KEEP_EVERY: Duration = Duration::from_secs(1);
/// A follower leaves the signing of a new revocation list to the leader for this long.
const LEADER_FIRST: u32 = 5;
/// Most requests that are decided at once.
const MAX_CALLS: usize = 64;
/// Largest file of the API server's keys, bytes.
const MAX_KEYS_FILE: u64 = 1 << 20;

/// The configured part.
#[derive(Debug, Default)]
pub struct JoinSettings {
    /// Lifetime of the certificates.
    pub lifetime: Duration,
    /// The authority of this coordinator's configuration, which the group takes over.
    pub authority: Option<Authority>,
    /// Accepted service accounts, and the file with the API server's keys.
    pub service_accounts: Option<(Policy, PathBuf)>,
}

/// Decides requests of nodes for certificates.
#[derive(Debug)]
pub struct Joining {
    agreement: Option<Arc<Agreement>>,
    identity: Identity,
    cluster_key: ClusterKey,
    audit: Arc<Audit>,
    metrics: Arc<Metrics>,
    settings: JoinSettings,
    rates: Mutex<JoinRates>,
    /// Limits the audit lines about refusals.
    refused: Repeats,
    calls: tokio::sync::Semaphore,
}

/// A request's author, kind and subject, for the audit log.
struct Asked {
    who: String,
    what: &'static str,
    on: String,
}

impl Joining {
    pub fn new(
        agreement: Option<Arc<Agreement>>,
        identity: Identity,
        cluster_key: ClusterKey,
        audit: Arc<Audit>,
        metrics: Arc<Metrics>,
        settings: JoinSettings,
    ) -> Arc<Self> {
        let rates = Mutex::new(JoinRates::new(Instant::now()));
        let (refused, calls) = (Repeats::new(), tokio::sync::Semaphore::new(MAX_CALLS));
        Arc::new(Self { agreement, identity, cluster_key, audit, metrics, settings, rates, refused, calls })
    }

    /// Decides a request and replies.
    pub async fn serve(self: Arc<Self>, call: JoinCall) {
        let reply = match self.calls.try_acquire() {
            Ok(_permit) => self.decide(call.from.ip(), call.presented.as_ref(), &call.request).await,
            Err(_) => JoinReply::Refused(JoinRefusal::TooMany(1000)),
        };
        let from = call.from;
        if let Err(error) = call.reply(&reply).await {
            tracing::info!(%from, %error, "a joining node has not read its reply; it asks again");
        }
    }

    async fn decide(&self, from: IpAddr, presented: Option<&Presented>, request: &JoinRequest) -> JoinReply {
        let from = from.to_canonical();
        if let Err(wait) = self.rates.lock().take(from, Instant::now()) {
            let wait = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX).max(1);
            return self.audited(from, &Asked::by_nobody(), Err(JoinRefusal::TooMany(wait)));
        }
        let asked = Asked::of(presented, request);
        let decided = match request {
            JoinRequest::Join(join) => self.join(join).await,
            JoinRequest::Renew(request) => self.renew(presented, request).await,
        };
        self.audited(from, &asked, decided)
    }

    fn audited(
        &self,
        from: IpAddr,
        asked: &Asked,
        decided: Result<Option<Joined>, JoinRefusal>,
    ) -> JoinReply {
        let (result, reply) = match decided {
            Ok(Some(joined)) => ("certified".to_owned(), JoinReply::Joined(Box::new(joined))),
            Ok(None) => ("waits for approval".to_owned(), JoinReply::Pending),
            Err(refusal) => (format!("refused: {refusal}"), JoinReply::Refused(refusal)),
        };
        self.metrics.join_requested(match &reply {
            JoinReply::Joined(_) => "certified",
            JoinReply::Pending => "pending",
            JoinReply::Refused(JoinRefusal::TooMany(_)) => "limited",
            JoinReply::Refused(_) => "refused",
        });
        let left_out = match reply {
            JoinReply::Joined(_) => Some(0),
            // A node that waits asks every few seconds, and a stranger as often as it may.
            _ => self.refused.due((from, result.clone())),
        };
        if let Some(left_out) = left_out {
            let more = if left_out > 0 { format!(", {left_out} times more") } else { String::new() };
            let Asked { who, what, on } = asked;
            let result = format!("{result}{more}");
            tracing::info!(who, %from, what, on, result, "a node asked for a certificate");
            self.audit.note(&Record { who, from: Some(from), what, on, result: &result });
        }
        reply
    }

    async fn join(&self, join: &NodeJoin) -> Result<Option<Joined>, JoinRefusal> {
        let request = request(&join.request)?;
        check_labels(&join.labels)?;
        let agreement = self.agreement.as_ref().ok_or(JoinRefusal::NoGroup)?;
        let key = request.fingerprint().0;
        let mut approval = false;
        let by = match &join.credential {
            JoinCredential::Token(id, secret) => {
                let sha256: [u8; 32] = Sha256::digest(secret.0).into();
                let known = |nodes: &Nodes| {
                    let token = nodes.tokens().get(id);
                    token.filter(|token| bool::from(token.sha256.ct_eq(&sha256))).cloned()
                };
                let mut token = known(self.nodes()?.as_ref());
                if token.is_none() {
                    // It may have been created a moment ago at another coordinator.
                    token = known(agreement.read_table().await.map_err(unagreed)?.nodes());
                }
                let token = token.ok_or(JoinRefusal::UnknownToken)?;
                let nodes = self.nodes()?;
                let record = nodes.nodes().get(&(join.role, join.node.clone()));
                let record = record.filter(|record| record.key == key);
                approval = token.approval && record.is_none_or(|record| record.state == NodeState::Waiting);
                if approval && record.is_some() {
                    return Ok(None);
                }
                AdmittedBy::Token(*id, sha256)
            }
            JoinCredential::ServiceAccount(token) => {
                AdmittedBy::ServiceAccount(self.service_account(token, join).await?)
            }
        };
        let admitted = NodeAdmitted {
            role: join.role,
            node: join.node.clone(),
            by,
            key,
            labels: join.labels.clone(),
            certificate: None,
            now_unix_s: unix_s(),
        };
        match approval {
            true => {
                agreement.change_table(Change::NodeAdmitted(Box::new(admitted))).await.map_err(unagreed)?;
                Ok(None)
            }
            false => self.certify(&request, admitted).await.map(Some),
        }
    }

    async fn renew(&self, presented: Option<&Presented>, der: &[u8]) -> Result<Option<Joined>, JoinRefusal> {
        let presented = presented.ok_or(JoinRefusal::NoCertificate)?;
        let request = request(der)?;
        if request.fingerprint() != presented.key {
            return Err(JoinRefusal::Invalid("the request is for another key than the certificate".into()));
        }
        let certificate = CertificateRecord {
            serial: presented.serial.bytes().to_vec(),
            ends_unix_s: presented.ends_unix_s,
        };
        let admitted = NodeAdmitted {
            role: presented.name.role,
            node: presented.name.node.clone(),
            by: AdmittedBy::Certificate(certificate),
            key: presented.key.0,
            labels: Vec::new(),
            certificate: None,
            now_unix_s: unix_s(),
        };
        self.certify(&request, admitted).await.map(Some)
    }

    /// Commits an admission and signs the certificate.
    async fn certify(
        &self,
        request: &CertificateRequest,
        mut admitted: NodeAdmitted,
    ) -> Result<Joined, JoinRefusal> {
        let agreement = self.agreement.as_ref().ok_or(JoinRefusal::NoGroup)?;
        let authority = self.authority(&*self.nodes()?)?;
        let (now, lifetime) = (SystemTime::now(), self.settings.lifetime);
        let serial = Serial::random().map_err(internal)?;
        let ends_unix_s = ends_unix_s(now, lifetime);
        admitted.certificate = Some(CertificateRecord { serial: serial.bytes().to_vec(), ends_unix_s });
        let (role, node) = (admitted.role, admitted.node.clone());
        agreement.change_table(Change::NodeAdmitted(Box::new(admitted))).await.map_err(unagreed)?;
        let certified =
            authority.certify(request, (role, &node), &serial, lifetime, now).map_err(internal)?;
        let Certified { certificate_pem, roots_pem } = certified;
        let table = agreement.table().ok_or(JoinRefusal::NoQuorum)?;
        let coordinators = table.seats().map(|seat| (seat.node.clone(), seat.quic.clone())).collect();
        let cluster_key = (role == Role::Coordinator).then_some(SharedKey(self.cluster_key.0));
        Ok(Joined { certificate_pem, roots_pem, cluster_key, coordinators })
    }

    fn table(&self) -> Result<Arc<Table>, JoinRefusal> {
        let agreement = self.agreement.as_ref().ok_or(JoinRefusal::NoGroup)?;
        agreement.table().ok_or(JoinRefusal::NoQuorum)
    }

    fn nodes(&self) -> Result<Arc<Nodes>, JoinRefusal> {
        Ok(Arc::clone(self.table()?.nodes()))
    }

    fn authority(&self, nodes: &Nodes) -> Result<Authority, JoinRefusal> {
        let AuthorityRecord { roots_pem, sealed_key } = nodes.authority().ok_or(JoinRefusal::NoAuthority)?;
        Authority::unseal(roots_pem, sealed_key, &self.cluster_key).map_err(internal)
    }

    /// Checks a service account's token. Returns the account.
    async fn service_account(&self, token: &str, join: &NodeJoin) -> Result<String, JoinRefusal> {
        let refused = |why: String| JoinRefusal::ServiceAccount(why);
        let Some((policy, file)) = &self.settings.service_accounts else {
            return Err(refused("service_account_keys is not set at this coordinator".into()));
        };
        if token.len() > MAX_SERVICE_ACCOUNT_TOKEN {
            return Err(refused(format!("longer than {MAX_SERVICE_ACCOUNT_TOKEN} bytes")));
        }
        // Read at each request: the API server replaces its keys now and then.
        let path = file.clone();
        let keys =
            tokio::task::spawn_blocking(move || read_keys(&path)).await.map_err(|_| JoinRefusal::Internal)?;
        let keys = keys.map_err(|error| {
            tracing::error!(file = %file.display(), %error, "the API server's keys cannot be read: no pod joins by its service account");
            JoinRefusal::Internal
        })?;
        let account = policy.check(token, &keys, SystemTime::now());
        let account = account.map_err(|error| refused(error.to_string()))?;
        if join.role != Role::Worker {
            return Err(JoinRefusal::WrongRole(Role::Worker));
        }
        if account.node != join.node.as_str() && account.pod != join.node.as_str() {
            let node = NodeId::new(account.node).map_err(|error| refused(error.to_string()))?;
            return Err(JoinRefusal::WrongNode(node));
        }
        Ok(account.subject)
    }

    /// Keeps the group's authority equal to the configured one, and this node's revocation list complete. Runs
    /// until it is aborted.
    pub async fn keep(self: Arc<Self>) {
        let Some(agreement) = self.agreement.clone() else { return };
        let mut uncovered = 0;
        let mut failed = Repeats::new();
        let mut ticks = tokio::time::interval(KEEP_EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let Some(table) = agreement.table() else { continue };
            let nodes = table.nodes();
            let offered = self.offer_authority(&agreement, nodes).await;
            let covered = self.identity.lists_revoked(nodes.revoked().keys().map(Vec::as_slice));
            uncovered = if covered { 0 } else { uncovered + 1 };
            let signed = match agreement.leads() || uncovered > LEADER_FIRST {
                true if !covered => self.sign_revocations(nodes),
                _ => Ok(()),
            };
            match offered.and(signed) {
                Ok(()) => failed = Repeats::new(),
                Err(why) => {
                    if let Some(left_out) = failed.due(why.clone()) {
                        tracing::warn!(
                            why,
                            left_out,
                            "the cluster's authority is not up to date; it is tried again"
                        );
                    }
                }
            }
        }
    }

    /// Hands the configured authority to the group if the group has other roots.
    async fn offer_authority(&self, agreement: &Agreement, nodes: &Nodes) -> Result<(), String> {
        let Some(own) = &self.settings.authority else { return Ok(()) };
        let roots_pem = own.certificate_pem();
        if nodes.authority().is_some_and(|known| known.roots_pem == roots_pem) {
            return Ok(());
        }
        let sealed_key = own.seal(&self.cluster_key).map_err(|error| error.to_string())?;
        let record = AuthorityRecord { roots_pem: roots_pem.to_owned(), sealed_key };
        let set = agreement.change_table(Change::AuthoritySet(record)).await;
        set.map_err(|error| error.to_string())?;
        let record = Record {
            who: "authority",
            from: None,
            what: "set_authority",
            on: own.cluster().as_str(),
            result: "taken",
        };
        self.audit.note(&record);
        Ok(())
    }

    /// Signs a list of all revoked certificates. Connections pass it on to all nodes.
    fn sign_revocations(&self, nodes: &Nodes) -> Result<(), String> {
        let authority = self.authority(nodes).map_err(|refusal| refusal.to_string())?;
        let revoked = nodes.revoked().iter().map(|(serial, revoked)| {
            (Serial::from_bytes(serial.clone()), revoked.revoked_unix_s.cast_signed())
        });
        let list = authority.sign_list(revoked, SystemTime::now()).map_err(|error| error.to_string())?;
        self.identity.learn_revoked(&list).map_err(|error| error.to_string())?;
        self.identity.log_revoked();
        Ok(())
    }
}

impl Asked {
    fn by_nobody() -> Self {
        Self { who: "nobody".into(), what: "join", on: String::new() }
    }

    fn of(presented: Option<&Presented>, request: &JoinRequest) -> Self {
        let key = |der: &[u8]| match CertificateRequest::from_der(der) {
            Ok(request) => format!("key {}", request.fingerprint()),
            Err(_) => "an invalid request".to_owned(),
        };
        match request {
            JoinRequest::Join(join) => {
                let who = match &join.credential {
                    JoinCredential::Token(id, _) => format!("token {id}"),
                    JoinCredential::ServiceAccount(_) => "service account".to_owned(),
                };
                let on = format!("{} {}, {}", join.role.as_str(), join.node, key(&join.request));
                Self { who, what: "join", on }
            }
            JoinRequest::Renew(request) => {
                let who = presented.map_or_else(
                    || "nobody".to_owned(),
                    |presented| format!("{} {}", presented.name.role.as_str(), presented.name.node),
                );
                Self { who, what: "renew", on: key(request) }
            }
        }
    }
}

fn request(der: &[u8]) -> Result<CertificateRequest, JoinRefusal> {
    CertificateRequest::from_der(der).map_err(|error| JoinRefusal::Invalid(error.to_string()))
}

fn check_labels(labels: &[(String, String)]) -> Result<(), JoinRefusal> {
    if labels.len() > MAX_LABELS {
        return Err(JoinRefusal::Invalid(format!("{} labels, at most {MAX_LABELS}", labels.len())));
    }
    let plain = |text: &str| text.len() <= MAX_LABEL && text.bytes().all(|byte| byte.is_ascii_graphic());
    match labels.iter().find(|(key, value)| key.is_empty() || !plain(key) || !plain(value)) {
        Some((key, _)) => {
            let key: String = key.chars().filter(|c| !c.is_control()).take(MAX_LABEL).collect();
            let rule = format!("key and value have at most {MAX_LABEL} printable ASCII characters");
            Err(JoinRefusal::Invalid(format!("label {key:?}: {rule}")))
        }
        None => Ok(()),
    }
}

fn read_keys(path: &PathBuf) -> std::io::Result<String> {
    let bytes = std::fs::metadata(path)?.len();
    if bytes > MAX_KEYS_FILE {
        return Err(std::io::Error::other(format!("{bytes} bytes, at most {MAX_KEYS_FILE}")));
    }
    std::fs::read_to_string(path)
}

fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn internal(error: pki::Error) -> JoinRefusal {
    tracing::error!(%error, "a certificate cannot be issued");
    JoinRefusal::Internal
}

fn unagreed(error: ChangeError) -> JoinRefusal {
    match error {
        ChangeError::NoQuorum => JoinRefusal::NoQuorum,
        ChangeError::Explained(why) => JoinRefusal::Invalid(why),
        ChangeError::Refused(refusal) => match refusal {
            Refusal::UnknownToken => JoinRefusal::UnknownToken,
            Refusal::TokenExpired => JoinRefusal::Expired,
            Refusal::TokenUsedUp => JoinRefusal::UsedUp,
            Refusal::TokenRole(role) => JoinRefusal::WrongRole(role),
            Refusal::TokenNode(node) => JoinRefusal::WrongNode(node),
            Refusal::NameTaken => JoinRefusal::NameTaken,
            Refusal::AnotherKeyWaits => JoinRefusal::AnotherWaits,
            Refusal::Full(kind) => JoinRefusal::Full(format!("{kind}s")),
            other => JoinRefusal::Invalid(other.to_string()),
        },
    }
}
