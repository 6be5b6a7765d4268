//! Who asks: API keys, the tenants behind them, their salts and their limits.
//!
//! A request costs one SHA-256 and one look into a map: what a key opens is worked out when keys change, not when they are
//! shown.

mod ring;

use super::error::ApiError;
use crate::consensus::table::{Access, KeyScope};
use crate::quota::{MAX_TOLD, Meter, Permit, Spending, Usage};
use crate::random::random_u64;
use axum::http::{HeaderMap, HeaderName, header};
use parking_lot::RwLock;
use proto::block::{ClusterKey, TenantSalt};
use proto::ids::{ModelId, NodeId, TenantId};
use ring::{Ring, Secret};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

/// The tenant of everybody while no keys are configured.
pub const DEFAULT_TENANT: &str = "default";

/// Where Anthropic's clients show their key.
pub const KEY_HEADER: HeaderName = HeaderName::from_static("x-api-key");

/// Digits of a key's name.
const KEY_ID_DIGITS: usize = 16;

/// An API key, as configured: never the key itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyEntry {
    /// SHA-256 of the key, in hexadecimal.
    pub sha256: String,
    /// Who has it: 1 to 63 characters of `a-z`, `0-9`, `-`, `_` and `.`.
    pub tenant: String,
    /// Whether it opens `/admin/v1` on the ops port from elsewhere than this machine.
    #[serde(default)]
    pub admin: bool,
}

/// Why the configured keys cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeysError {
    /// Not 64 hexadecimal digits.
    #[error("key {at}: sha256 must be 64 hexadecimal digits")]
    BadDigest {
        /// Position in the table, from 0.
        at: usize,
    },
    /// Breaks the rule for names.
    #[error("key {at}: tenant must have 1 to 63 characters of a-z, 0-9, '-', '_' and '.'")]
    BadTenant {
        /// Position in the table, from 0.
        at: usize,
    },
}

/// What a key opens, and for whom.
#[derive(Debug)]
struct Grant {
    /// By which an operator names the key: the first digits of its SHA-256. Empty without a key.
    id: String,
    tenant: Arc<Tenant>,
    admin: bool,
    scope: KeyScope,
    until: Until,
    meter: Option<Arc<Meter>>,
    /// The same for all that is granted by the same key, one after the other.
    told: Arc<watch::Sender<Until>>,
}

/// Until when a key opens anything, in seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Until(u64);

impl Until {
    const EVER: Self = Self(u64::MAX);
    const REVOKED: Self = Self(0);
    /// The clock may be set while somebody waits.
    const LOOK_AGAIN: Duration = Duration::from_secs(2);

    /// Of a key that is kept with 0 where it never ends.
    fn expires(unix_s: u64) -> Self {
        if unix_s == 0 { Self::EVER } else { Self(unix_s) }
    }

    fn is_over(self) -> bool {
        self != Self::EVER && self.left().is_zero()
    }

    fn left(self) -> Duration {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Duration::from_secs(self.0).saturating_sub(now)
    }

    /// Waits until it may be over.
    async fn may_be_over(self) {
        match self {
            Self::EVER => std::future::pending().await,
            until => tokio::time::sleep(until.left().min(Self::LOOK_AGAIN)).await,
        }
    }
}

/// A tenant, as requests need it.
#[derive(Debug)]
struct Tenant {
    name: Arc<str>,
    salt: TenantSalt,
    meter: Option<Arc<Meter>>,
}

#[derive(Debug, Clone)]
pub struct Caller(Arc<Grant>);

impl Caller {
    /// Decides what is shared with whom.
    pub fn tenant(&self) -> &Arc<str> {
        &self.0.tenant.name
    }

    pub fn admin(&self) -> bool {
        self.0.admin
    }

    /// In the audit log: by which key.
    pub fn key_id(&self) -> Option<&str> {
        Some(self.0.id.as_str()).filter(|id| !id.is_empty())
    }

    /// The salt of what is cached for it; `narrowed` by what a request says, which shares less and never more.
    pub fn salt(&self, narrowed: Option<&str>) -> TenantSalt {
        let salt = &self.0.tenant.salt;
        narrowed.map_or_else(|| salt.clone(), |text| derived(&salt.0, b"kvasir/cache_salt/1", text))
    }

    /// Whether its key is for this model.
    pub fn may_use(&self, model: &ModelId) -> bool {
        self.0.scope.opens(model)
    }

    /// Lets one of its requests in, if its limits have room.
    pub fn enter(&self, now: Instant) -> Result<Permit, ApiError> {
        Ok(Permit::new([self.0.meter.as_ref(), self.0.tenant.meter.as_ref()], now)?)
    }

    /// Waits until its key opens nothing any more: it was revoked, or has expired.
    pub async fn revoked(&self) {
        self.revocation().revoked().await;
    }

    /// Tells when its key opens nothing any more.
    pub fn revocation(&self) -> Revocation {
        Revocation(self.0.told.subscribe())
    }
}

/// Whether a key opens nothing any more: it was revoked, or has expired.
#[derive(Debug)]
pub struct Revocation(watch::Receiver<Until>);

impl Revocation {
    /// Whether it is so by now.
    pub fn is_revoked(&self) -> bool {
        self.0.borrow().is_over()
    }

    pub async fn revoked(&mut self) {
        loop {
            let until = *self.0.borrow_and_update();
            if until.is_over() {
                return;
            }
            tokio::select! {
                () = until.may_be_over() => {}
                changed = self.0.changed() => if changed.is_err() {
                    // The sender is dropped: nothing can revoke the key any more.
                    until.may_be_over().await;
                }
            }
        }
    }
}

/// The keys that are accepted: those of the configuration, and those that the coordinators have agreed on.
#[derive(Debug)]
pub struct Keys {
    fixed: Vec<Fixed>,
    cluster: ClusterKey,
    /// Remembers over restarts that there are keys, which are known only once there is a majority.
    closed: Option<PathBuf>,
    /// Whether what is agreed on is known here.
    settled: AtomicBool,
    /// Of this start; what is told to others is counted from it.
    life: u64,
    /// Held only to take or put the pointer.
    ring: RwLock<Arc<Ring>>,
}

/// A key of the configuration.
#[derive(Debug)]
struct Fixed {
    sha256: [u8; 32],
    tenant: TenantId,
    admin: bool,
}

impl Keys {
    pub fn check(entries: &[KeyEntry]) -> Result<(), KeysError> {
        fixed(entries).map(drop)
    }

    /// These keys, and those agreed on as soon as they are told. `data_dir`: where it is remembered that there are such;
    /// none if nothing is agreed on.
    pub fn new(
        entries: &[KeyEntry],
        cluster: ClusterKey,
        data_dir: Option<&Path>,
    ) -> Result<Arc<Self>, KeysError> {
        let fixed = fixed(entries)?;
        let closed = data_dir.map(|directory| directory.join("keys-are-needed"));
        let mut ring = Ring::new(&fixed, &cluster, Arc::default(), None);
        ring.open &= !closed.as_ref().is_some_and(|path| path.exists());
        Ok(Arc::new(Self {
            ring: RwLock::new(Arc::new(ring)),
            fixed,
            cluster,
            settled: AtomicBool::new(closed.is_none()),
            closed,
            life: random_u64(),
        }))
    }

    fn ring(&self) -> Arc<Ring> {
        Arc::clone(&self.ring.read())
    }

    /// Whether there are none and never were, so that everybody on this machine is [`DEFAULT_TENANT`].
    pub fn is_open(&self) -> bool {
        self.ring().open
    }

    pub fn count(&self) -> usize {
        self.ring().grants.len()
    }

    /// What is agreed on is this from now on.
    pub fn agree(&self, access: &Arc<Access>) {
        let before = self.ring();
        if Arc::ptr_eq(&before.access, access) {
            return;
        }
        let ring = Ring::new(&self.fixed, &self.cluster, Arc::clone(access), Some(&before));
        if let (true, false, Some(path)) = (before.open, ring.open, &self.closed)
            && let Err(error) = std::fs::write(path, b"")
        {
            tracing::error!(path = %path.display(), %error, "after a restart without a majority no key would be asked for");
        }
        let changes = before.changes(&ring);
        *self.ring.write() = Arc::new(ring);
        // Only now: who is told must not find that it still opens.
        for (told, until) in changes {
            told.send_replace(until);
        }
    }

    /// What a majority has agreed on is known here.
    pub fn settle(&self) {
        self.settled.store(true, Ordering::Release);
    }

    /// Who has the key in `Authorization: Bearer`, or else in [`KEY_HEADER`]. How long it takes tells nothing about keys
    /// that are there.
    pub fn authenticate(&self, headers: &HeaderMap) -> Result<Caller, ApiError> {
        let ring = self.ring();
        if ring.open {
            return Ok(Caller(Arc::clone(&ring.local)));
        }
        let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
        let bearer = text(header::AUTHORIZATION)
            .and_then(|value| value.split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        let key = bearer.map(|(_, key)| key).or_else(|| text(KEY_HEADER));
        let key = key.ok_or(ApiError::InvalidApiKey)?;
        let sha256 = Sha256::digest(key.trim().as_bytes()).into();
        match ring.grants.get(&Secret(sha256)) {
            Some(grant) if !grant.until.is_over() => Ok(Caller(Arc::clone(grant))),
            Some(_) => Err(ApiError::InvalidApiKey),
            None if self.settled.load(Ordering::Acquire) => Err(ApiError::InvalidApiKey),
            None => Err(ApiError::KeysUnknown),
        }
    }

    /// Who is on this machine and has shown no key.
    pub fn local(&self) -> Caller {
        Caller(Arc::clone(&self.ring().local))
    }

    /// The salt of what a tenant has cached.
    pub fn salt(&self, tenant: &str) -> TenantSalt {
        let ring = self.ring();
        let known = TenantId::new(tenant).ok().and_then(|tenant| ring.access.salt(&tenant).cloned());
        known.unwrap_or_else(|| salt(&self.cluster, tenant))
    }

    /// The keys of the configuration: SHA-256, tenant, whether they administer.
    pub fn configured(&self) -> impl Iterator<Item = (&[u8; 32], &TenantId, bool)> {
        self.fixed.iter().map(|key| (&key.sha256, &key.tenant, key.admin))
    }

    /// How far each tenant that has limits uses them, by name.
    pub fn tenant_usage(&self) -> BTreeMap<TenantId, Usage> {
        let (ring, now) = (self.ring(), Instant::now());
        let of = |tenant: &TenantId| Some(ring.meters.get(&ring::subject_of(tenant.as_str()))?.usage(now));
        ring.access.tenants().keys().filter_map(|tenant| Some((tenant.clone(), of(tenant)?))).collect()
    }

    /// What was spent here of limits, for other coordinators.
    pub fn spending(&self) -> Option<Spending> {
        let (ring, now) = (self.ring(), Instant::now());
        let spent: Vec<_> = ring.meters.values().filter_map(|meter| meter.tell(now)).take(MAX_TOLD).collect();
        (!spent.is_empty()).then_some(Spending { life: self.life, spent })
    }

    /// What was spent at another coordinator.
    pub fn spent_elsewhere(&self, peer: &NodeId, spending: &Spending) {
        let (ring, now) = (self.ring(), Instant::now());
        for spent in spending.spent.iter().take(MAX_TOLD) {
            if let Some(meter) = ring.meters.get(&spent.subject) {
                meter.hear(peer, spending.life, spent, now);
            }
        }
    }
}

fn fixed(entries: &[KeyEntry]) -> Result<Vec<Fixed>, KeysError> {
    let key = |(at, entry): (usize, &KeyEntry)| {
        let sha256 = from_hex(&entry.sha256).ok_or(KeysError::BadDigest { at })?;
        let tenant = TenantId::new(entry.tenant.as_str()).map_err(|_| KeysError::BadTenant { at })?;
        Ok(Fixed { sha256, tenant, admin: entry.admin })
    };
    entries.iter().enumerate().map(key).collect()
}

/// The salt of a tenant that the coordinators have not agreed on: secret, since it is keyed by the cluster's key, and the
/// same at every coordinator.
pub fn salt(cluster: &ClusterKey, tenant: &str) -> TenantSalt {
    derived(&cluster.0, b"kvasir/tenant/1", tenant)
}

fn derived(key: &[u8; 32], tag: &[u8], text: &str) -> TenantSalt {
    let mut hasher = blake3::Hasher::new_keyed(key);
    for field in [tag, text.as_bytes()] {
        hasher.update(&(field.len() as u64).to_le_bytes());
        hasher.update(field);
    }
    TenantSalt(*hasher.finalize().as_bytes())
}

/// 32 bytes from 64 hexadecimal digits.
pub fn from_hex(text: &str) -> Option<[u8; 32]> {
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let bytes: Vec<u8> = pairs
        .iter()
        .map(|pair| {
            let digit = |b: u8| char::from(b).to_digit(16);
            u8::try_from(digit(pair[0])? * 16 + digit(pair[1])?).ok()
        })
        .collect::<Option<_>>()?;
    if rest.is_empty() { bytes.try_into().ok() } else { None }
}

/// By which operators name a key: it tells nothing of the key.
pub fn key_id(sha256: &[u8; 32]) -> String {
    hex(sha256).chars().take(KEY_ID_DIGITS).collect()
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
pub(crate) mod tests;
