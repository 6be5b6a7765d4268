//! Expiry of certificates, and the rate-limited log lines about it.

use crate::error::CertificateError;
use crate::identity::{Identity, Material};
use rustls::pki_types::CertificateDer;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use x509_parser::prelude::{FromDer, X509Certificate};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const HOUR: Duration = Duration::from_secs(60 * 60);
/// Share of a certificate's lifetime below which it is due for renewal.
const RENEW_SHARE: f64 = 0.1;
/// Remaining time below which a certificate is due for renewal, however short its lifetime is.
const RENEW_LEFT: Duration = Duration::from_secs(10 * 60);

/// Validity period of a certificate, in seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    pub begins: i64,
    pub ends: i64,
}

impl Validity {
    /// Seconds until the end; negative after it.
    pub fn seconds_left(self, now: SystemTime) -> i64 {
        self.ends.saturating_sub(unix_seconds(now))
    }

    /// Days until the end; negative after it.
    pub fn days_left(self, now: SystemTime) -> f64 {
        self.seconds_left(now) as f64 / DAY.as_secs_f64()
    }

    /// Remaining share of the certificate's lifetime, 0 to 1.
    pub fn lifetime_left(self, now: SystemTime) -> f64 {
        let lifetime = self.ends.saturating_sub(self.begins).max(1) as f64;
        (self.seconds_left(now) as f64 / lifetime).clamp(0.0, 1.0)
    }

    fn is_due(self, now: SystemTime) -> bool {
        self.lifetime_left(now) < RENEW_SHARE || self.seconds_left(now) < RENEW_LEFT.as_secs().cast_signed()
    }

    fn of(certificate: &CertificateDer<'_>) -> Result<Self, CertificateError> {
        let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_| CertificateError::Unreadable)?;
        let validity = parsed.validity();
        Ok(Self { begins: validity.not_before.timestamp(), ends: validity.not_after.timestamp() })
    }
}

/// Validity of a node's certificate and of the authority that signed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validities {
    /// The certificate of the node's chain that ends first.
    pub node: Validity,
    /// The root that signed the chain.
    pub authority: Validity,
}

impl Validities {
    /// Returns both with their names in metrics and logs.
    pub fn named(self) -> [(&'static str, Validity); 2] {
        [("node", self.node), ("authority", self.authority)]
    }

    fn of(material: &Material) -> Result<Self, CertificateError> {
        let none = CertificateError::ChainLength { found: 0 };
        let chain = material.chain.iter().map(Validity::of).collect::<Result<Vec<_>, _>>()?;
        let node = chain.into_iter().min_by_key(|validity| validity.ends).ok_or(none.clone())?;
        let last = material.chain.last().ok_or(none.clone())?;
        let (_, last) = X509Certificate::from_der(last).map_err(|_| CertificateError::Unreadable)?;
        let signed = |root: &&CertificateDer<'_>| {
            let parsed = X509Certificate::from_der(root);
            parsed.is_ok_and(|(_, root)| last.verify_signature(Some(root.public_key())).is_ok())
        };
        // There are two roots while one replaces the other.
        let root = material.roots.iter().find(signed).or(material.roots.first()).ok_or(none)?;
        Ok(Self { node, authority: Validity::of(root)? })
    }
}

impl Identity {
    /// Returns the validities of the present certificates.
    pub fn validities(&self) -> Result<Validities, CertificateError> {
        Validities::of(&self.material())
    }
}

/// Logs certificates that are about to expire or have expired: at once, then repeatedly.
#[derive(Debug, Default)]
pub struct ExpiryWatch {
    /// Time and state of the last log line for each of [`Validities::named`].
    last_logged: [Option<(SystemTime, Stand)>; 2],
}

/// Remaining validity of a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stand {
    Due,
    LastDay,
    Over,
}

impl Stand {
    fn of(validity: Validity, now: SystemTime) -> Option<Self> {
        match validity.seconds_left(now) {
            left if left <= 0 => Some(Self::Over),
            _ if !validity.is_due(now) => None,
            left if left < DAY.as_secs().cast_signed() => Some(Self::LastDay),
            _ => Some(Self::Due),
        }
    }

    fn log_interval(self) -> Duration {
        match self {
            Self::Due => DAY,
            Self::LastDay | Self::Over => HOUR,
        }
    }
}

impl ExpiryWatch {
    /// Logs the certificates that are due. Call it every few seconds.
    pub fn look(&mut self, identity: &Identity, now: SystemTime) {
        // Unreadable certificates were refused when they were loaded.
        let Ok(validities) = identity.validities() else { return };
        let node = identity.name();
        for (certificate, validity, stand) in self.due(validities, now) {
            let left = Duration::from_secs(validity.seconds_left(now).unsigned_abs());
            match stand {
                Stand::Over => tracing::error!(
                    %node,
                    certificate,
                    ended = ?left,
                    "a certificate has expired: open connections stay open, but no new connection is made until it is renewed"
                ),
                Stand::Due | Stand::LastDay => tracing::warn!(
                    %node,
                    certificate,
                    ?left,
                    "a certificate expires soon: renew it with `kvasir ca issue --replace`, or the authority's with `kvasir ca rotate`"
                ),
            }
        }
    }

    fn due(&mut self, validities: Validities, now: SystemTime) -> Vec<(&'static str, Validity, Stand)> {
        let mut due = Vec::new();
        for (last, (certificate, validity)) in self.last_logged.iter_mut().zip(validities.named()) {
            let stand = Stand::of(validity, now);
            let is_logged = last.is_some_and(|(at, before)| {
                // A clock that was set back does not suppress the log line.
                Some(before) == stand
                    && now.duration_since(at).is_ok_and(|since| since < before.log_interval())
            });
            match stand {
                None => *last = None,
                Some(stand) if !is_logged => {
                    *last = Some((now, stand));
                    due.push((certificate, validity, stand));
                }
                Some(_) => {}
            }
        }
        due
    }
}

fn unix_seconds(now: SystemTime) -> i64 {
    let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ca::Authority;
    use proto::ids::{ClusterName, NodeId, Role};

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn the_validities_of_an_identity_are_those_of_its_certificates() {
        let now = at(1_800_000_000);
        let old = Authority::new(ClusterName::new("c").unwrap(), now).unwrap();
        let new = old.successor(now + DAY * 100).unwrap();
        let issue = |authority: &Authority| {
            let node = NodeId::new("w0").unwrap();
            authority.issue(Role::Worker, node, now).unwrap().identity().unwrap().validities().unwrap()
        };
        let validities = issue(&old);
        assert!((300.0..366.0).contains(&validities.node.days_left(now)), "{validities:?}");
        assert_eq!(validities.authority.days_left(now), 3650.0);
        assert!(validities.node.lifetime_left(now) > 0.99);
        // With two roots, the one that signed counts.
        assert_eq!(issue(&new).authority.days_left(now), 3750.0);
    }

    #[test]
    fn expiry_is_logged_daily_then_hourly_and_after_the_end() {
        let validity = |ends: i64| Validity { begins: 0, ends };
        let lifetime = 100 * DAY.as_secs();
        let validities = Validities { node: validity(lifetime.cast_signed()), authority: validity(i64::MAX) };
        let mut watch = ExpiryWatch::default();
        let mut stands = Vec::new();
        for second in (0..lifetime + DAY.as_secs()).step_by(600) {
            stands.extend(watch.due(validities, at(second)).into_iter().map(|(name, _, stand)| {
                assert_eq!(name, "node");
                stand
            }));
        }
        let count = |expected: Stand| stands.iter().filter(|stand| **stand == expected).count();
        assert_eq!([Stand::Due, Stand::LastDay, Stand::Over].map(count), [9, 24, 24]);
        // After a renewal nothing is logged. The next certificate that expires is logged at once.
        let renewed = Validities { node: validity(i64::MAX), ..validities };
        let now = at(lifetime + DAY.as_secs());
        assert!(watch.due(renewed, now).is_empty());
        assert_eq!(watch.due(validities, now).len(), 1);
    }

    #[test]
    fn short_lived_certificates_are_logged_shortly_before_they_expire() {
        let hour = Validity { begins: 0, ends: 3600 };
        assert_eq!(Stand::of(hour, at(1800)), None);
        assert_eq!(Stand::of(hour, at(3100)), Some(Stand::LastDay));
        assert_eq!(Stand::of(hour, at(3600)), Some(Stand::Over));
        assert_eq!(hour.lifetime_left(at(5000)), 0.0);
        assert!(hour.days_left(at(5000)) < 0.0);
    }
}
