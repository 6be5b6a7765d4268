//! Who asks: API keys, the tenants behind them, and their salts.

use super::error::ApiError;
use axum::http::{HeaderMap, header};
use proto::block::{ClusterKey, TenantSalt};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::sync::Arc;
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

/// The tenant of everybody while no keys are configured.
pub const DEFAULT_TENANT: &str = "default";

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

/// Who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// Decides what is shared with whom.
    pub tenant: Arc<str>,
    /// Whether it may administer.
    pub admin: bool,
}

/// The keys that are accepted.
#[derive(Debug, Clone)]
pub struct Keys(Vec<([u8; 32], Caller)>);

impl Keys {
    /// Checks a configured table.
    pub fn new(entries: &[KeyEntry]) -> Result<Self, KeysError> {
        let key = |(at, entry): (usize, &KeyEntry)| {
            let digest = hex(&entry.sha256).ok_or(KeysError::BadDigest { at })?;
            let name = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_.".contains(&b);
            if entry.tenant.is_empty() || entry.tenant.len() > 63 || !entry.tenant.bytes().all(name) {
                return Err(KeysError::BadTenant { at });
            }
            Ok((digest, Caller { tenant: entry.tenant.as_str().into(), admin: entry.admin }))
        };
        entries.iter().enumerate().map(key).collect::<Result<_, _>>().map(Self)
    }

    /// Whether there are none, so that everybody who can reach us is [`DEFAULT_TENANT`].
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Who has the key in `Authorization: Bearer`. Takes the same time whichever key it is, if any.
    pub fn authenticate(&self, headers: &HeaderMap) -> Result<Caller, ApiError> {
        if self.0.is_empty() {
            return Ok(Caller { tenant: DEFAULT_TENANT.into(), admin: false });
        }
        let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let given = given.and_then(|value| value.split_once(' ')).filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        let (_, key) = given.ok_or(ApiError::InvalidApiKey)?;
        let digest: [u8; 32] = Sha256::digest(key.trim().as_bytes()).into();
        let (mut found, mut index) = (Choice::from(0), 0u64);
        for (at, (known, _)) in (0u64..).zip(&self.0) {
            let equal = known.ct_eq(&digest);
            index = u64::conditional_select(&index, &at, equal);
            found |= equal;
        }
        let caller = usize::try_from(index).ok().and_then(|index| self.0.get(index));
        caller.filter(|_| found.into()).map(|(_, caller)| caller.clone()).ok_or(ApiError::InvalidApiKey)
    }
}

/// A tenant's salt: secret, since it is keyed by the cluster's key, and the same at every coordinator.
pub fn salt(cluster: &ClusterKey, tenant: &str) -> TenantSalt {
    let mut hasher = blake3::Hasher::new_keyed(&cluster.0);
    for field in [b"kvasir/tenant/1".as_slice(), tenant.as_bytes()] {
        hasher.update(&(field.len() as u64).to_le_bytes());
        hasher.update(field);
    }
    TenantSalt(*hasher.finalize().as_bytes())
}

fn hex(text: &str) -> Option<[u8; 32]> {
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

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn entry(key: &str, tenant: &str, admin: bool) -> KeyEntry {
        let digest: [u8; 32] = Sha256::digest(key.as_bytes()).into();
        let sha256 = digest.iter().map(|b| format!("{b:02x}")).collect();
        KeyEntry { sha256, tenant: tenant.into(), admin }
    }

    fn with(authorization: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, authorization.parse().unwrap())])
    }

    #[test]
    fn a_key_tells_its_tenant_and_nothing_else_opens() {
        let keys = Keys::new(&[entry("k-one", "a", false), entry("k-two", "b", true)]).unwrap();
        let tenant = |text: &str| keys.authenticate(&with(text)).map(|c| (c.tenant.to_string(), c.admin));
        assert_eq!(tenant("Bearer k-one"), Ok(("a".into(), false)));
        assert_eq!(tenant("bearer  k-two"), Ok(("b".into(), true)));
        for wrong in ["Bearer k-three", "Bearer ", "k-one", "Basic k-one", "Bearer k-one k-one", ""] {
            assert_eq!(tenant(wrong), Err(ApiError::InvalidApiKey), "{wrong:?}");
        }
        assert_eq!(keys.authenticate(&HeaderMap::new()), Err(ApiError::InvalidApiKey));
    }

    #[test]
    fn without_keys_everybody_is_the_default_tenant() {
        let keys = Keys::new(&[]).unwrap();
        for headers in [HeaderMap::new(), with("Bearer whatever")] {
            assert_eq!(&*keys.authenticate(&headers).unwrap().tenant, DEFAULT_TENANT);
        }
    }

    #[test]
    fn what_is_wrong_in_the_table_is_pointed_at() {
        let good = entry("k", "t", false);
        for sha256 in ["", "00", &"g".repeat(64), &"0".repeat(63), &"0".repeat(66)] {
            let bad = KeyEntry { sha256: (*sha256).to_owned(), ..good.clone() };
            assert_eq!(Keys::new(&[good.clone(), bad]).unwrap_err(), KeysError::BadDigest { at: 1 });
        }
        for tenant in ["", "A", "a b", &"x".repeat(64)] {
            let bad = KeyEntry { tenant: (*tenant).to_owned(), ..good.clone() };
            assert_eq!(Keys::new(&[bad]).unwrap_err(), KeysError::BadTenant { at: 0 });
        }
    }

    #[test]
    fn salts_differ_by_tenant_and_by_cluster() {
        let (one, two) = (ClusterKey([1; 32]), ClusterKey([2; 32]));
        assert_eq!(salt(&one, "a"), salt(&one, "a"));
        assert_ne!(salt(&one, "a"), salt(&one, "b"));
        assert_ne!(salt(&one, "a"), salt(&two, "a"));
    }
}
