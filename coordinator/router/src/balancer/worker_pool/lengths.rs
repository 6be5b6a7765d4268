//! Expected answer lengths, learned by tenant, since a tenant's requests are mostly alike.

use crate::balancer::Output;
use std::collections::HashMap;
use std::sync::Arc;

/// Expected tokens of an answer while nothing is known.
const ASSUMED: f64 = 128.0;
/// Weight of the newest answer in the average.
const NEWEST: f64 = 1.0 / 16.0;
/// Maximum of tenants with an average, at about 64 bytes each. When it is exceeded, all averages are dropped.
const MAX_TENANTS: usize = 1 << 12;

#[derive(Debug, Default)]
pub(super) struct Lengths {
    tenants: HashMap<Arc<str>, f64>,
    all: Option<f64>,
}

impl Lengths {
    /// Expected tokens of a tenant's answer.
    pub(super) fn expected(&self, tenant: &str, output: Output) -> f64 {
        let max_tokens = f64::from(output.max_tokens);
        if output.fixed {
            return max_tokens;
        }
        let average = self.tenants.get(tenant).copied().or(self.all);
        average.unwrap_or(ASSUMED).min(max_tokens)
    }

    /// Records the length of a tenant's answer.
    pub(super) fn learn(&mut self, tenant: &Arc<str>, tokens: u32) {
        let tokens = f64::from(tokens);
        let blend = |old: f64| old + NEWEST * (tokens - old);
        self.all = Some(self.all.map_or(tokens, blend));
        if let Some(average) = self.tenants.get_mut(tenant) {
            *average = blend(*average);
            return;
        }
        if self.tenants.len() >= MAX_TENANTS {
            self.tenants.clear();
        }
        self.tenants.insert(Arc::clone(tenant), tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_learned_by_tenant_and_never_exceed_the_limit() {
        let mut lengths = Lengths::default();
        let up_to = |max_tokens| Output { max_tokens, fixed: false };
        assert_eq!(lengths.expected("a", up_to(1_000)), ASSUMED);
        for _ in 0..200 {
            lengths.learn(&"a".into(), 10);
            lengths.learn(&"b".into(), 400);
        }
        assert!((lengths.expected("a", up_to(1_000)) - 10.0).abs() < 1.0);
        assert!((lengths.expected("b", up_to(1_000)) - 400.0).abs() < 1.0);
        assert_eq!(lengths.expected("b", up_to(16)), 16.0);
        assert_eq!(lengths.expected("a", Output { max_tokens: 300, fixed: true }), 300.0);
        let other = lengths.expected("new", up_to(1_000));
        assert!((10.0..400.0).contains(&other), "{other}");
        for n in 0..2 * MAX_TENANTS {
            lengths.learn(&n.to_string().into(), 1);
        }
        assert!(lengths.tenants.len() <= MAX_TENANTS);
    }
}
