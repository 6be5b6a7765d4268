//! Weights of tenants in the queue.

use proto::ids::TenantId;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The largest weight of a tenant.
const MAX_WEIGHT: u32 = 1_000;

/// An invalid entry of the setting.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("tenant_weights: {entry:?}: {rule}")]
pub struct BadWeight {
    pub entry: String,
    /// The rule that the entry breaks.
    pub rule: &'static str,
}

/// The weights of tenants. Of two tenants that always have requests waiting, one with weight 3 gets three
/// times as many tokens as one with weight 1, in the coordinators' queue and in the workers' steps. A tenant
/// that is not listed has weight 1.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TenantWeights(Arc<BTreeMap<String, u32>>);

impl TenantWeights {
    /// Parses entries such as `team-a=3`.
    ///
    /// # Errors
    /// The first entry that is malformed, out of range, or names a tenant a second time.
    pub fn new(entries: &[String]) -> Result<Self, BadWeight> {
        let mut weights = BTreeMap::new();
        for entry in entries {
            let wrong = |rule| BadWeight { entry: entry.clone(), rule };
            let (tenant, weight) = entry.split_once('=').ok_or_else(|| wrong("must be TENANT=WEIGHT"))?;
            TenantId::new(tenant).map_err(|_| wrong("the tenant's name is not valid"))?;
            let weight = weight.parse().ok().filter(|weight| (1..=MAX_WEIGHT).contains(weight));
            let weight = weight.ok_or_else(|| wrong("the weight must be a number from 1 to 1000"))?;
            if weights.insert(tenant.to_owned(), weight).is_some() {
                return Err(wrong("the tenant is listed twice"));
            }
        }
        Ok(Self(Arc::new(weights)))
    }

    /// The weight of a tenant, at least 1.
    pub fn of(&self, tenant: &str) -> u32 {
        self.0.get(tenant).copied().unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_checked() {
        let weights = |entries: &[&str]| {
            let entries: Vec<_> = entries.iter().map(|entry| (*entry).to_owned()).collect();
            TenantWeights::new(&entries)
        };
        let some = weights(&["a=3", "team-b=1000"]).unwrap();
        assert_eq!(["a", "team-b", "c"].map(|tenant| some.of(tenant)), [3, 1000, 1]);
        for entry in ["a", "a=", "a=0", "a=1001", "a=-1", "a=x", "=3", "A B=3"] {
            let refused = weights(&["b=2", entry]).unwrap_err();
            assert_eq!(refused.entry, entry);
        }
        assert_eq!(weights(&["a=1", "a=2"]).unwrap_err().rule, "the tenant is listed twice");
    }
}
