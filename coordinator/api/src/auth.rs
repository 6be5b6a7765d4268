//! Authentication: API keys, their tenants, the tenants' salts and limits.
//!
//! A request costs one SHA-256 and one map lookup: grants are computed when keys change, not when a key is
//! presented.

mod ring;

use super::error::ApiError;
use axum::http::{HeaderMap, HeaderName, header};
use consensus::table::{Access, KeyScope};
use dispatch::quota::{MAX_REPORTED, Meter, Permit, Spending, Usage};
use dispatch::random::random_u64;
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

/// The tenant of all callers while no keys are configured.
pub const DEFAULT_TENANT: &str = "default";

/// The header in which Anthropic's clients send their key.
pub const KEY_HEADER: HeaderName = HeaderName::from_static("x-api-key");

/// Hexadecimal digits of a key id.
const KEY_ID_DIGITS: usize = 16;

/// A configured API key: only its hash, never the key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyEntry {
    /// SHA-256 of the key, in hexadecimal.
    pub sha256: String,
    /// The owner: 1 to 63 characters of `a-z`, `0-9`, `-`, `_` and `.`.
    pub tenant: String,
    /// Whether the key opens `/admin/v1` on the ops port from other machines.
    #[serde(default)]
    pub admin: bool,
}

/// Why the configured keys are refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeysError {
    /// Not 64 hexadecimal digits.
    #[error("key {at}: sha256 must be 64 hexadecimal digits")]
    BadDigest {
        /// Index in the table, from 0.
        at: usize,
    },
    /// Breaks the rule for tenant names.
    #[error("key {at}: tenant must have 1 to 63 characters of a-z, 0-9, '-', '_' and '.'")]
    BadTenant {
        /// Index in the table, from 0.
        at: usize,
    },
}

/// The permissions of a key, and its tenant.
#[derive(Debug)]
struct Grant {
    /// The key id: the first digits of the key's SHA-256. Empty for a caller without a key.
    id: String,
    tenant: Arc<Tenant>,
    admin: bool,
    scope: KeyScope,
    expiry: KeyExpiry,
    meter: Option<Arc<Meter>>,
    /// Publishes a changed expiry. Shared by all successive grants of the same key.
    expiry_tx: Arc<watch::Sender<KeyExpiry>>,
}

/// When a key expires, in seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct KeyExpiry(u64);

impl KeyExpiry {
    const NEVER: Self = Self(u64::MAX);
    const REVOKED: Self = Self(0);
    /// Interval at which the clock is read again, since it may be set during a wait.
    const RECHECK_INTERVAL: Duration = Duration::from_secs(2);

    /// From the stored form, in which 0 means that the key never expires.
    fn at_unix_s(unix_s: u64) -> Self {
        if unix_s == 0 { Self::NEVER } else { Self(unix_s) }
    }

    fn has_passed(self) -> bool {
        self != Self::NEVER && self.remaining().is_zero()
    }

    fn remaining(self) -> Duration {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Duration::from_secs(self.0).saturating_sub(now)
    }

    /// Sleeps until the expiry, at most [`Self::RECHECK_INTERVAL`]. The clock may have been set, so the
    /// caller checks again.
    async fn wait(self) {
        match self {
            Self::NEVER => std::future::pending().await,
            expiry => tokio::time::sleep(expiry.remaining().min(Self::RECHECK_INTERVAL)).await,
        }
    }
}

/// A tenant, as the request path needs it.
#[derive(Debug)]
struct Tenant {
    name: Arc<str>,
    salt: TenantSalt,
    meter: Option<Arc<Meter>>,
}

#[derive(Debug, Clone)]
pub struct Caller(Arc<Grant>);

impl Caller {
    /// The tenant decides what is shared between callers.
    pub fn tenant(&self) -> &Arc<str> {
        &self.0.tenant.name
    }

    pub fn admin(&self) -> bool {
        self.0.admin
    }

    /// The key id, for the audit log. `None` for a caller without a key.
    pub fn key_id(&self) -> Option<&str> {
        Some(self.0.id.as_str()).filter(|id| !id.is_empty())
    }

    /// The salt of the caller's cached prefixes. `narrowed` is a text from the request; it narrows sharing
    /// and never widens it.
    pub fn salt(&self, narrowed: Option<&str>) -> TenantSalt {
        let salt = &self.0.tenant.salt;
        narrowed.map_or_else(|| salt.clone(), |text| derived(&salt.0, b"kvasir/cache_salt/1", text))
    }

    /// Whether the key's scope includes this model.
    pub fn may_use(&self, model: &ModelId) -> bool {
        self.0.scope.opens(model)
    }

    /// Admits a request if the limits of the key and of the tenant have room.
    pub fn enter(&self, now: Instant) -> Result<Permit, ApiError> {
        Ok(Permit::new([self.0.meter.as_ref(), self.0.tenant.meter.as_ref()], now)?)
    }

    /// Waits until the key is revoked or expires.
    pub async fn revoked(&self) {
        self.revocation().revoked().await;
    }

    /// A handle that resolves when the key is revoked or expires.
    pub fn revocation(&self) -> Revocation {
        Revocation(self.0.expiry_tx.subscribe())
    }
}

/// Whether a key was revoked or has expired.
#[derive(Debug)]
pub struct Revocation(watch::Receiver<KeyExpiry>);

impl Revocation {
    pub fn is_revoked(&self) -> bool {
        self.0.borrow().has_passed()
    }

    pub async fn revoked(&mut self) {
        loop {
            let expiry = *self.0.borrow_and_update();
            if expiry.has_passed() {
                return;
            }
            tokio::select! {
                () = expiry.wait() => {}
                changed = self.0.changed() => if changed.is_err() {
                    // The sender was dropped: only expiry can end the key now.
                    expiry.wait().await;
                }
            }
        }
    }
}

/// The accepted keys: the configured ones, and those that the coordinators agreed on.
#[derive(Debug)]
pub struct Keys {
    fixed: Vec<ConfiguredKey>,
    cluster: ClusterKey,
    /// Path of a marker file that says that keys exist. It keeps the API closed after a restart, until a
    /// majority provides the keys. `None` if this coordinator agrees on nothing.
    closed: Option<PathBuf>,
    /// Whether the agreed keys are known here.
    settled: AtomicBool,
    /// Random id of this run. Spending is reported as totals since its start.
    run_id: u64,
    /// Locked only to read or replace the pointer.
    ring: RwLock<Arc<Ring>>,
}

/// A key of the configuration.
#[derive(Debug)]
struct ConfiguredKey {
    sha256: [u8; 32],
    tenant: TenantId,
    admin: bool,
}

impl Keys {
    pub fn check(entries: &[KeyEntry]) -> Result<(), KeysError> {
        fixed(entries).map(drop)
    }

    /// Starts with the configured keys; [`Self::agree`] adds the agreed ones. `data_dir` has the marker file
    /// that says that keys exist; `None` if this coordinator agrees on nothing.
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
            run_id: random_u64(),
        }))
    }

    fn ring(&self) -> Arc<Ring> {
        Arc::clone(&self.ring.read())
    }

    /// Whether there are no keys and never were. Then all callers on this machine are [`DEFAULT_TENANT`].
    pub fn is_open(&self) -> bool {
        self.ring().open
    }

    pub fn count(&self) -> usize {
        self.ring().grants.len()
    }

    /// Replaces the agreed keys, tenants and limits.
    pub fn agree(&self, access: &Arc<Access>) {
        let before = self.ring();
        if Arc::ptr_eq(&before.access, access) {
            return;
        }
        let ring = Ring::new(&self.fixed, &self.cluster, Arc::clone(access), Some(&before));
        if let (true, false, Some(path)) = (before.open, ring.open, &self.closed)
            && let Err(error) = std::fs::write(path, b"")
        {
            tracing::error!(path = %path.display(), %error, "cannot record that API keys are required: after a restart without a majority, requests without a key would be accepted");
        }
        let changes = before.changes(&ring);
        *self.ring.write() = Arc::new(ring);
        // Only now: a notified waiter must not find the old grant.
        for (expiry_tx, expiry) in changes {
            expiry_tx.send_replace(expiry);
        }
    }

    /// Marks the agreed keys as known: a majority confirmed them.
    pub fn settle(&self) {
        self.settled.store(true, Ordering::Release);
    }

    /// Authenticates by the key in `Authorization: Bearer`, or else in [`KEY_HEADER`]. The time taken reveals
    /// nothing about existing keys.
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
            Some(grant) if !grant.expiry.has_passed() => Ok(Caller(Arc::clone(grant))),
            Some(_) => Err(ApiError::InvalidApiKey),
            None if self.settled.load(Ordering::Acquire) => Err(ApiError::InvalidApiKey),
            None => Err(ApiError::KeysUnknown),
        }
    }

    /// A caller on this machine without a key.
    pub fn local(&self) -> Caller {
        Caller(Arc::clone(&self.ring().local))
    }

    /// The caller that had created something with the key of this id; `None` without a key.
    ///
    /// # Errors
    ///
    /// If the key is not known any more, or is another tenant's now.
    pub fn caller(&self, tenant: &str, key: Option<&str>) -> Result<Caller, ApiError> {
        let ring = self.ring();
        let grant = match key {
            None if ring.open => Some(&ring.local),
            None => None,
            Some(id) => ring.grants.values().find(|grant| grant.id == id),
        };
        match grant.filter(|grant| &*grant.tenant.name == tenant && !grant.expiry.has_passed()) {
            Some(grant) => Ok(Caller(Arc::clone(grant))),
            None if self.settled.load(Ordering::Acquire) => Err(ApiError::InvalidApiKey),
            None => Err(ApiError::KeysUnknown),
        }
    }

    /// The salt of a tenant's cached prefixes.
    pub fn salt(&self, tenant: &str) -> TenantSalt {
        let ring = self.ring();
        let agreed = TenantId::new(tenant).ok().and_then(|tenant| ring.access.salt(&tenant).cloned());
        agreed.unwrap_or_else(|| salt(&self.cluster, tenant))
    }

    /// The configured keys: SHA-256, tenant, whether it administers.
    pub fn configured(&self) -> impl Iterator<Item = (&[u8; 32], &TenantId, bool)> {
        self.fixed.iter().map(|key| (&key.sha256, &key.tenant, key.admin))
    }

    /// The usage of every tenant with limits, by name.
    pub fn tenant_usage(&self) -> BTreeMap<TenantId, Usage> {
        let (ring, now) = (self.ring(), Instant::now());
        let of = |tenant: &TenantId| Some(ring.meters.get(&ring::subject_of(tenant.as_str()))?.usage(now));
        ring.access.tenants().keys().filter_map(|tenant| Some((tenant.clone(), of(tenant)?))).collect()
    }

    /// Quota spent at this coordinator, as sent to the others. `None` if no quota was spent.
    pub fn spending(&self) -> Option<Spending> {
        let (ring, now) = (self.ring(), Instant::now());
        let spent: Vec<_> =
            ring.meters.values().filter_map(|meter| meter.report(now)).take(MAX_REPORTED).collect();
        (!spent.is_empty()).then_some(Spending { run_id: self.run_id, spent })
    }

    /// Counts what another coordinator spent.
    pub fn spent_elsewhere(&self, peer: &NodeId, spending: &Spending) {
        let (ring, now) = (self.ring(), Instant::now());
        for spent in spending.spent.iter().take(MAX_REPORTED) {
            if let Some(meter) = ring.meters.get(&spent.subject) {
                meter.add_report(peer, spending.run_id, spent, now);
            }
        }
    }
}

fn fixed(entries: &[KeyEntry]) -> Result<Vec<ConfiguredKey>, KeysError> {
    let key = |(at, entry): (usize, &KeyEntry)| {
        let sha256 = blake3::Hash::from_hex(&entry.sha256).map_err(|_| KeysError::BadDigest { at })?.into();
        let tenant = TenantId::new(entry.tenant.as_str()).map_err(|_| KeysError::BadTenant { at })?;
        Ok(ConfiguredKey { sha256, tenant, admin: entry.admin })
    };
    entries.iter().enumerate().map(key).collect()
}

/// The salt of a tenant that is not in the agreed table. It is secret, since it is keyed by the cluster key,
/// and the same at every coordinator.
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

/// The id by which operators name a key. It does not reveal the key.
pub fn key_id(sha256: &[u8; 32]) -> String {
    hex(sha256).chars().take(KEY_ID_DIGITS).collect()
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests;
