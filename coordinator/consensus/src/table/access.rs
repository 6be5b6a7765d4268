//! Tenants and their keys, scopes, limits and cache groups.

use super::{
    CacheGroup, Change, KeyIssued, KeyRecord, KeyScope, Kind, MAX_KEY_MODELS, MAX_KEYS, MAX_TENANTS, Quota,
    Refusal, TenantRecord, TenantTuned, put,
};
use proto::block::TenantSalt;
use proto::ids::{ModelId, TenantId};
use std::collections::BTreeMap;

/// Maximum bytes of model names in all scopes, so that the table fits into a snapshot.
const MAX_SCOPE_BYTES: usize = 4 << 20;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Access {
    pub(super) tenants: BTreeMap<TenantId, TenantRecord>,
    /// Keys by their SHA-256.
    pub(super) keys: BTreeMap<[u8; 32], KeyRecord>,
    /// Scopes of the keys that have one.
    pub(super) scopes: BTreeMap<[u8; 32], KeyScope>,
    /// Cache group by tenant, for tenants that are in one.
    pub(super) sharing: BTreeMap<TenantId, TenantId>,
    /// Salts of cache groups. A group without tenants is kept, so that its cached prefixes stay usable.
    pub(super) groups: BTreeMap<TenantId, TenantSalt>,
}

impl Access {
    pub fn tenants(&self) -> &BTreeMap<TenantId, TenantRecord> {
        &self.tenants
    }

    /// The keys, by their SHA-256.
    pub fn keys(&self) -> &BTreeMap<[u8; 32], KeyRecord> {
        &self.keys
    }

    /// A key's scope; `None` if the key may use all that its tenant may.
    pub fn scope(&self, sha256: &[u8; 32]) -> Option<&KeyScope> {
        self.scopes.get(sha256)
    }

    /// The cache group of a tenant, if any.
    pub fn cache_group(&self, tenant: &TenantId) -> Option<&TenantId> {
        self.sharing.get(tenant)
    }

    /// The salt of a tenant's block ids: that of its cache group, or else its own.
    pub fn salt(&self, tenant: &TenantId) -> Option<&TenantSalt> {
        let group = self.sharing.get(tenant).and_then(|group| self.groups.get(group));
        group.or_else(|| self.tenants.get(tenant).map(|tenant| &tenant.salt))
    }

    /// The result of these changes on an empty `Access`.
    pub fn of(changes: impl IntoIterator<Item = Change>) -> Result<std::sync::Arc<Self>, Refusal> {
        let mut access = Self::default();
        changes.into_iter().try_for_each(|change| access.make(change))?;
        Ok(access.into())
    }

    /// Applies a change of tenants or keys; ignores any other.
    pub(super) fn make(&mut self, change: Change) -> Result<(), Refusal> {
        match change {
            Change::TenantSet(tenant) => {
                put(&mut self.tenants, tenant.tenant.clone(), tenant, MAX_TENANTS, Kind::Tenant)
            }
            Change::TenantDropped(tenant) => {
                self.tenants.remove(&tenant).ok_or(Refusal::Unknown(Kind::Tenant))?;
                self.sharing.remove(&tenant);
                self.keys.retain(|_, key| key.tenant != tenant);
                let keys = &self.keys;
                self.scopes.retain(|sha256, _| keys.contains_key(sha256));
                Ok(())
            }
            Change::TenantTuned(tuned) => self.tune(tuned),
            Change::KeySet(key) => {
                if !self.tenants.contains_key(&key.tenant) {
                    return Err(Refusal::Unknown(Kind::Tenant));
                }
                let sha256 = key.sha256;
                put(&mut self.keys, sha256, key, MAX_KEYS, Kind::Key)?;
                self.scopes.remove(&sha256);
                Ok(())
            }
            Change::KeyIssued(issued) => self.issue(issued),
            Change::KeyRevoked(sha256) => {
                self.scopes.remove(&sha256);
                self.keys.remove(&sha256).map(drop).ok_or(Refusal::Unknown(Kind::Key))
            }
            _ => Ok(()),
        }
    }

    fn issue(&mut self, issued: KeyIssued) -> Result<(), Refusal> {
        let KeyIssued { key, scope, salt } = issued;
        if scope.models.len() > MAX_KEY_MODELS {
            return Err(Refusal::TooLarge);
        }
        let named = |scope: &KeyScope| scope.models.iter().map(|model| model.as_str().len()).sum::<usize>();
        let others = self.scopes.iter().filter(|(sha256, _)| **sha256 != key.sha256);
        let room = others.map(|(_, scope)| named(scope)).sum::<usize>() + named(&scope) <= MAX_SCOPE_BYTES;
        if !room || self.keys.len() >= MAX_KEYS && !self.keys.contains_key(&key.sha256) {
            return Err(Refusal::Full(Kind::Key));
        }
        self.admit(&key.tenant, salt)?;
        self.scopes.insert(key.sha256, scope);
        self.keys.insert(key.sha256, key);
        Ok(())
    }

    fn tune(&mut self, tuned: TenantTuned) -> Result<(), Refusal> {
        let TenantTuned { tenant, salt, quota, cache_group } = tuned;
        let new = cache_group.as_ref().is_some_and(|group| !self.groups.contains_key(&group.name));
        if new && self.groups.len() >= MAX_TENANTS {
            return Err(Refusal::Full(Kind::Tenant));
        }
        self.admit(&tenant, salt)?.quota = quota;
        match cache_group {
            Some(CacheGroup { name, salt }) => {
                self.groups.entry(name.clone()).or_insert(salt);
                self.sharing.insert(tenant, name);
            }
            None => drop(self.sharing.remove(&tenant)),
        }
        Ok(())
    }

    /// Returns the tenant of this name. Creates it with `salt` if it is new.
    fn admit(&mut self, tenant: &TenantId, salt: TenantSalt) -> Result<&mut TenantRecord, Refusal> {
        if self.tenants.len() >= MAX_TENANTS && !self.tenants.contains_key(tenant) {
            return Err(Refusal::Full(Kind::Tenant));
        }
        let new = || TenantRecord { tenant: tenant.clone(), salt, quota: Quota::default() };
        Ok(self.tenants.entry(tenant.clone()).or_insert_with(new))
    }
}

impl KeyScope {
    /// Whether the key may use a model. A deployed model's name stands for all its versions.
    pub fn opens(&self, model: &ModelId) -> bool {
        let named = |scoped: &ModelId| scoped == model || scoped.as_str() == model.name();
        self.models.is_empty() || self.models.iter().any(named)
    }
}
