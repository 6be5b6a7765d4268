//! All accepted keys with their grants. A ring is immutable; a change of keys builds a new one.

use super::{ConfiguredKey, Grant, KeyExpiry, Tenant, salt};
use consensus::table::{Access, KeyScope, Quota};
use dispatch::quota::{Meter, Of, Subject};
use proto::block::ClusterKey;
use proto::ids::TenantId;
use std::collections::{HashMap, HashSet};
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Instant;
use subtle::ConstantTimeEq;
use tokio::sync::watch;

/// SHA-256 of a key. The map hashes it with a random key of this process, and equality is constant-time:
/// neither reveals how much of a draft token was right.
#[derive(Debug, Clone, Copy)]
pub(super) struct Secret(pub(super) [u8; 32]);

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for Secret {}

impl Hash for Secret {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

#[derive(Debug)]
pub(super) struct Ring {
    pub(super) access: Arc<Access>,
    pub(super) grants: HashMap<Secret, Arc<Grant>>,
    pub(super) meters: HashMap<Subject, Arc<Meter>>,
    /// The grant of a caller on this machine without a key.
    pub(super) local: Arc<Grant>,
    /// Whether callers on this machine need no key.
    pub(super) open: bool,
}

impl Ring {
    /// Builds the successor of `before`. Meters keep their counts.
    pub(super) fn new(
        fixed: &[ConfiguredKey],
        cluster: &ClusterKey,
        access: Arc<Access>,
        before: Option<&Self>,
    ) -> Self {
        let mut builder =
            RingBuilder { cluster, access: &access, before, meters: HashMap::new(), now: Instant::now() };
        let names = access.tenants().keys().chain(fixed.iter().map(|key| &key.tenant));
        let names: HashSet<&TenantId> = names.collect();
        let tenants: HashMap<&TenantId, Arc<Tenant>> =
            names.into_iter().map(|name| (name, builder.tenant(name.as_str(), Some(name)))).collect();
        let mut grants = HashMap::with_capacity(fixed.len() + access.keys().len());
        for key in access.keys().values() {
            let Some(tenant) = tenants.get(&key.tenant) else { continue };
            let scope = access.scope(&key.sha256).cloned().unwrap_or_default();
            let grant = builder.grant(key.sha256, tenant, key.admin, scope, key.expires_unix_s);
            grants.insert(Secret(key.sha256), grant);
        }
        // Configured keys override agreed ones: only the machine's owner can change the file.
        for key in fixed {
            let Some(tenant) = tenants.get(&key.tenant) else { continue };
            let grant = builder.grant(key.sha256, tenant, key.admin, KeyScope::default(), 0);
            grants.insert(Secret(key.sha256), grant);
        }
        let default = TenantId::new(super::DEFAULT_TENANT).ok();
        let local = Grant {
            id: String::new(),
            tenant: builder.tenant(super::DEFAULT_TENANT, default.as_ref()),
            admin: true,
            scope: KeyScope::default(),
            expiry: KeyExpiry::NEVER,
            meter: None,
            expiry_tx: Arc::new(watch::Sender::new(KeyExpiry::NEVER)),
        };
        let open = fixed.is_empty() && access.tenants().is_empty() && before.is_none_or(|before| before.open);
        let meters = builder.meters;
        Self { grants, meters, local: Arc::new(local), open, access }
    }

    /// The expiry senders of all keys whose expiry differs in `next`, with the new expiry
    /// ([`KeyExpiry::REVOKED`] for a removed key).
    pub(super) fn changes(&self, next: &Self) -> Vec<(Arc<watch::Sender<KeyExpiry>>, KeyExpiry)> {
        let changed = self.grants.iter().filter_map(|(secret, grant)| {
            let expiry = next.grants.get(secret).map_or(KeyExpiry::REVOKED, |grant| grant.expiry);
            (expiry != grant.expiry).then(|| (Arc::clone(&grant.expiry_tx), expiry))
        });
        changed.collect()
    }
}

/// The id under which a tenant's spending is counted at all coordinators.
pub(super) fn subject_of(tenant: &str) -> Subject {
    *blake3::hash(tenant.as_bytes()).as_bytes()
}

struct RingBuilder<'a> {
    cluster: &'a ClusterKey,
    access: &'a Access,
    before: Option<&'a Ring>,
    meters: HashMap<Subject, Arc<Meter>>,
    now: Instant,
}

impl RingBuilder<'_> {
    fn tenant(&mut self, name: &str, id: Option<&TenantId>) -> Arc<Tenant> {
        let agreed = id.and_then(|id| self.access.salt(id).cloned());
        let quota = id.and_then(|id| self.access.tenants().get(id)).map(|tenant| &tenant.quota);
        let meter = self.meter(subject_of(name), Of::Tenant, quota);
        let salt = agreed.unwrap_or_else(|| salt(self.cluster, name));
        Arc::new(Tenant { name: name.into(), salt, meter })
    }

    fn grant(
        &mut self,
        sha256: [u8; 32],
        tenant: &Arc<Tenant>,
        admin: bool,
        scope: KeyScope,
        expires_unix_s: u64,
    ) -> Arc<Grant> {
        let meter = self.meter(sha256, Of::Key, Some(&scope.quota));
        let before = self.before.and_then(|before| before.grants.get(&Secret(sha256)));
        let expiry = KeyExpiry::at_unix_s(expires_unix_s);
        let expiry_tx =
            before.map_or_else(|| Arc::new(watch::Sender::new(expiry)), |g| Arc::clone(&g.expiry_tx));
        let (id, tenant) = (super::key_id(&sha256), Arc::clone(tenant));
        Arc::new(Grant { id, tenant, admin, scope, expiry, meter, expiry_tx })
    }

    /// The meter of a subject with limits. `None` without limits.
    fn meter(&mut self, subject: Subject, of: Of, quota: Option<&Quota>) -> Option<Arc<Meter>> {
        let quota = quota.filter(|quota| **quota != Quota::default())?;
        if let Some(made) = self.meters.get(&subject) {
            return Some(Arc::clone(made));
        }
        let meter = match self.before.and_then(|before| before.meters.get(&subject)) {
            Some(existing) => {
                existing.limit(quota.clone(), self.now);
                Arc::clone(existing)
            }
            None => Arc::new(Meter::new(subject, of, quota.clone(), self.now)),
        };
        self.meters.insert(subject, Arc::clone(&meter));
        Some(meter)
    }
}
