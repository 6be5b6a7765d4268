//! A node's identity: reading it, reloading its files when they change, and renewing its certificate at the
//! coordinators before it ends.

use crate::config::ConfigError;
use pki::ca::NodeKey;
use pki::{ExpiryWatch, Identity};
use proto::ids::{NodeId, Role};
use proto::join::{JoinReply, JoinRequest};
use proto::log::Repeats;
use std::path::Path;
use std::time::{Duration, SystemTime};
use transport::join::{JoinBy, ask};

/// Polling interval for changed identity files.
const RENEW_EVERY: Duration = Duration::from_secs(2);

/// Reloads the identity from `directory` whenever its files change, until the process ends. If the files are
/// inconsistent (invalid, or being replaced), the last valid identity stays in use. Must be called inside a
/// runtime.
pub(crate) fn keep_renewed(identity: &Identity, directory: &Path) {
    let (identity, directory) = (identity.clone(), directory.to_owned());
    tokio::spawn(async move {
        let mut failed = None;
        let mut expiry = ExpiryWatch::default();
        loop {
            expiry.look(&identity, SystemTime::now());
            tokio::time::sleep(RENEW_EVERY).await;
            let renewed = pki::ca::load_identity(&directory).and_then(|read| identity.renew(&read));
            match renewed {
                Ok(changed) => {
                    failed = None;
                    if changed {
                        tracing::info!(directory = %directory.display(), "certificates were reloaded");
                    }
                }
                Err(error) => {
                    let error = error.to_string();
                    if failed.as_ref() != Some(&error) {
                        tracing::warn!(directory = %directory.display(), error, "certificates cannot be reloaded; the previous ones stay in use");
                    }
                    failed = Some(error);
                }
            }
        }
    });
}

/// Shortest and longest interval at which a node looks whether its certificate must be renewed.
const RENEWAL_LOOK: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Share of a certificate's lifetime that is left when it is renewed.
const RENEWAL_SHARE: f64 = 1.0 / 3.0;

/// Renews the certificate in `directory` at one of the coordinators (`host:port`) when a third of its lifetime is
/// left, until the process ends. Certificates in a directory that this process cannot write are renewed by
/// whoever writes them. Must be called inside a runtime, beside [`keep_renewed`], which loads the new files.
pub(crate) fn renew_in_time(identity: &Identity, directory: &Path, coordinators: Vec<String>) {
    let (identity, directory) = (identity.clone(), directory.to_owned());
    tokio::spawn(async move {
        let failures = Repeats::new();
        loop {
            // Certificates were readable when they were loaded.
            let Ok(validity) = identity.validities().map(|both| both.node) else { return };
            let now = SystemTime::now();
            let left = u64::try_from(validity.seconds_left(now)).unwrap_or(0);
            tokio::time::sleep(Duration::from_secs(left / 20).clamp(RENEWAL_LOOK.0, RENEWAL_LOOK.1)).await;
            if validity.lifetime_left(now) > RENEWAL_SHARE || !pki::ca::is_writable(&directory) {
                continue;
            }
            match renew(&identity, &directory, &coordinators).await {
                Ok(()) => tracing::info!(directory = %directory.display(), "the certificate was renewed"),
                Err(error) => {
                    let error = format!("{error:#}");
                    if let Some(left_out) = failures.due(error.clone()) {
                        tracing::warn!(
                            error,
                            left_out,
                            "the certificate cannot be renewed at the coordinators"
                        );
                    }
                }
            }
        }
    });
}

async fn renew(identity: &Identity, directory: &Path, coordinators: &[String]) -> anyhow::Result<()> {
    let request = JoinRequest::Renew(NodeKey::load(directory)?.request()?);
    let mut failed = anyhow::anyhow!("no coordinator is configured");
    for coordinator in coordinators {
        match ask(coordinator, JoinBy::Identity(identity), &request).await {
            Ok(JoinReply::Joined(joined)) => {
                return Ok(pki::ca::replace_certificate(
                    directory,
                    &joined.certificate_pem,
                    &joined.roots_pem,
                )?);
            }
            Ok(JoinReply::Refused(refusal)) => failed = anyhow::anyhow!("{coordinator}: {refusal}"),
            Ok(JoinReply::Pending) => failed = anyhow::anyhow!("{coordinator}: waits for approval"),
            Err(error) => failed = anyhow::Error::from(error).context(coordinator.clone()),
        }
    }
    Err(failed)
}

/// Whether the directory has a certificate for this role and name that is valid now, with more than a third of
/// its lifetime left, and with its key.
pub(crate) fn is_usable(directory: &Path, role: Role, node: Option<&NodeId>) -> bool {
    let Ok(identity) = pki::ca::load_identity(directory) else { return false };
    let name = identity.name();
    let named = name.role == role && node.is_none_or(|node| name.node == *node);
    let now = SystemTime::now();
    let fresh = identity.validities().is_ok_and(|both| both.node.lifetime_left(now) > RENEWAL_SHARE);
    named && fresh && pki::tls::server(&identity, &[role], false).is_ok()
}

/// The identity in a node's certificate.
pub(crate) fn identity(directory: Option<&Path>) -> anyhow::Result<Identity> {
    let need =
        "a directory with node.crt, node.key and ca.crt; create one with `kvasir join` or `kvasir ca issue`";
    let directory = directory.ok_or_else(|| ConfigError::missing("identity", need))?;
    pki::ca::load_identity(directory)
        .map_err(|error| ConfigError::field("identity", directory.display(), error.to_string()).into())
}
