//! The cluster's own certificate authority (`kvasir ca init`, `issue`, `rotate`, `revoke`) and the files of
//! node identities.
//!
//! A CA directory holds `ca.crt` and `ca.key`. An identity directory holds `node.crt` (leaf first),
//! `node.key` and `ca.crt`. `ca.crt` holds one root, or two while a root is being replaced, the new one
//! first. Both kinds of directory may hold `ca.crl`, the certificate revocation list. A CA directory may
//! also hold `issued`, the record of issued certificates. Keys are readable by their owner only. Only an
//! explicit replacement overwrites a file, and every file appears complete or not at all.

mod join;
mod revoke;

use crate::error::{CertificateError, Error};
use crate::identity::{Identity, PeerIdentity};
pub use join::{
    CertificateRequest, Certified, MAX_REQUEST, NodeKey, ends_unix_s, is_writable, replace_certificate,
};
use proto::ids::{ClusterName, NodeId, Role};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SanType,
};
pub use revoke::Serial;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use x509_parser::prelude::{FromDer, X509Certificate};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const CA_LIFETIME: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);
/// Longest lifetime of a node certificate.
const NODE_LIFETIME: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// Maximum by which the lifetime of a node's certificate is shortened, so that certificates issued together
/// do not expire together.
const NODE_LIFETIME_SPREAD: Duration = Duration::from_secs(45 * 24 * 60 * 60);
/// Most that a node's clock may be behind the issuer's.
const CLOCK_SKEW: Duration = DAY;
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Last line of a PEM certificate.
const PEM_END: &str = "-----END CERTIFICATE-----";

const CA_CERTIFICATE: &str = "ca.crt";
const CA_KEY: &str = "ca.key";
const NODE_CERTIFICATE: &str = "node.crt";
const NODE_KEY: &str = "node.key";

/// A certificate authority of one cluster. Its holder can create any node identity.
pub struct Authority {
    cluster: ClusterName,
    /// The authority's certificate, followed by the one that it replaces, if any.
    certificate_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").field("cluster", &self.cluster).finish_non_exhaustive()
    }
}

/// Certificate and key of a node as PEM texts, as [`Authority::issue`] creates them.
pub struct IssuedNode {
    certificate_pem: String,
    key_pem: String,
    ca_pem: String,
}

impl std::fmt::Debug for IssuedNode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IssuedNode").field("certificate_pem", &self.certificate_pem).finish_non_exhaustive()
    }
}

impl Authority {
    /// Creates an authority for `cluster`, valid for ten years from `now`, with an ECDSA P-256 key.
    pub fn new(cluster: ClusterName, now: SystemTime) -> Result<Self, Error> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let mut params = params(now, CA_LIFETIME, cluster.as_str());
        // The authority signs nodes, never another authority.
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate_pem = params.self_signed(&key)?.pem();
        Ok(Self { cluster, certificate_pem, issuer: Issuer::new(params, key) })
    }

    /// Reads an authority from `directory`.
    pub fn load(directory: &Path) -> Result<Self, Error> {
        let certificate_pem = read_text(&directory.join(CA_CERTIFICATE))?;
        Self::from_pem(certificate_pem, &read_text(&directory.join(CA_KEY))?)
    }

    fn from_pem(certificate_pem: String, key_pem: &str) -> Result<Self, Error> {
        let key = KeyPair::from_pem(key_pem)?;
        let der = CertificateDer::from_pem_slice(certificate_pem.as_bytes())
            .map_err(|_| CertificateError::Unreadable)?;
        let cluster = ClusterName::new(cluster_of(&der, &key)?)?;
        Ok(Self { cluster, issuer: Issuer::from_ca_cert_der(&der, key)?, certificate_pem })
    }

    /// Writes the authority to `directory`, which is created if missing. Refuses to overwrite an authority.
    pub fn save(&self, directory: &Path) -> Result<(), Error> {
        write_all(
            directory,
            &[
                (CA_KEY, &self.issuer.key().serialize_pem(), Access::Owner),
                (CA_CERTIFICATE, &self.certificate_pem, Access::All),
            ],
        )
    }

    /// Creates the successor of this authority, with a new key. Its certificate file also holds this
    /// authority's certificate until [`Authority::alone`] removes it, so that certificates issued by this
    /// authority stay valid. Fails while this authority itself is replacing another.
    pub fn successor(&self, now: SystemTime) -> Result<Self, Error> {
        if self.roots()?.len() > 1 {
            return Err(CertificateError::Rotating.into());
        }
        let mut new = Self::new(self.cluster.clone(), now)?;
        new.certificate_pem.push_str(&self.certificate_pem);
        Ok(new)
    }

    /// Drops the certificate of the authority that this one has replaced. Nodes with the new roots no
    /// longer accept certificates of the old authority. Returns `None` if there is no old certificate.
    pub fn alone(self) -> Result<Option<Self>, Error> {
        if self.roots()?.len() < 2 {
            return Ok(None);
        }
        let own = self.certificate_pem.find(PEM_END).map(|at| at + PEM_END.len());
        let own = own.and_then(|end| self.certificate_pem.get(..end)).ok_or(CertificateError::Unreadable)?;
        Ok(Some(Self { certificate_pem: format!("{own}\n"), ..self }))
    }

    /// Replaces the authority in `directory` by this one.
    pub fn replace(&self, directory: &Path) -> Result<(), Error> {
        // The certificate is written last: until it exists, nodes have no new root to trust. After an
        // interruption, the directory holds a key that does not match the certificate, and the old key as
        // `ca.key.old`.
        let backup = directory.join(format!("{CA_KEY}.old"));
        let (path, key) = (directory.join(CA_KEY), self.issuer.key().serialize_pem());
        if read_text(&path)? != key {
            fs::copy(&path, &backup).map_err(file_error(&backup))?;
            write_over(directory, CA_KEY, &key, Access::Owner)?;
        }
        write_over(directory, CA_CERTIFICATE, &self.certificate_pem, Access::All)?;
        match fs::remove_file(&backup) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(file_error(&backup)(error)),
            _ => Ok(()),
        }
    }

    fn roots(&self) -> Result<Vec<CertificateDer<'static>>, CertificateError> {
        let all: Result<Vec<_>, _> =
            CertificateDer::pem_slice_iter(self.certificate_pem.as_bytes()).collect();
        all.map_err(|_| CertificateError::Unreadable)
    }

    pub fn cluster(&self) -> &ClusterName {
        &self.cluster
    }

    /// Root certificate as PEM text, followed by the one that it replaces, if any.
    pub fn certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    /// Creates a key and a certificate for a node, for dialing and listening. It is valid from `now` for
    /// 320 to 365 days, depending on the node's name.
    pub fn issue(&self, role: Role, node: NodeId, now: SystemTime) -> Result<IssuedNode, Error> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let params = node_params(&self.cluster, role, &node, None, now)?;
        Ok(IssuedNode {
            certificate_pem: params.signed_by(&key, &self.issuer)?.pem(),
            key_pem: key.serialize_pem(),
            ca_pem: self.certificate_pem.clone(),
        })
    }
}

impl IssuedNode {
    /// Returns the identity for use in this process.
    pub fn identity(&self) -> Result<Identity, Error> {
        let pems = [&self.certificate_pem, &self.key_pem, &self.ca_pem];
        let [chain, key, roots] = pems.map(|pem| pem.as_bytes());
        Ok(Identity::from_pem(chain, key, roots)?)
    }

    /// Returns the serial number by which the certificate can be revoked.
    pub fn serial(&self) -> Result<Serial, Error> {
        Ok(Serial::of_pem(self.certificate_pem.as_bytes())?)
    }

    /// Writes an identity directory, which is created if missing. Refuses to overwrite one.
    pub fn save(&self, directory: &Path) -> Result<(), Error> {
        write_all(directory, &self.files())
    }

    /// Replaces the identity in `directory`, which is created if missing, by this one. A node that reads it meanwhile finds a key that
    /// does not match the certificate. It keeps its present identity and reads again.
    pub fn replace(&self, directory: &Path) -> Result<(), Error> {
        proto::directory::make_private(directory).map_err(file_error(directory))?;
        self.files().iter().try_for_each(|(name, text, access)| write_over(directory, name, text, *access))
    }

    /// The trusted roots come first, so that the certificate and the key never exist without them.
    fn files(&self) -> [(&'static str, &str, Access); 3] {
        [
            (CA_CERTIFICATE, &self.ca_pem, Access::All),
            (NODE_KEY, &self.key_pem, Access::Owner),
            (NODE_CERTIFICATE, &self.certificate_pem, Access::All),
        ]
    }
}

/// Reads the identity that [`IssuedNode::save`], or a certificate manager with the same file names, wrote
/// to `directory`. Also reads the CRL if there is one.
pub fn load_identity(directory: &Path) -> Result<Identity, Error> {
    let identity = load_identity_files(
        &directory.join(NODE_CERTIFICATE),
        &directory.join(NODE_KEY),
        &directory.join(CA_CERTIFICATE),
    )?;
    if let Some(lists) = revoke::revocations(directory)? {
        identity.revoke(lists.as_bytes())?;
    }
    Ok(identity)
}

/// Reads an identity from three PEM files: certificate chain, key, roots.
pub fn load_identity_files(chain: &Path, key: &Path, roots: &Path) -> Result<Identity, Error> {
    let (chain, key, roots) = (read_text(chain)?, read_text(key)?, read_text(roots)?);
    Ok(Identity::from_pem(chain.as_bytes(), key.as_bytes(), roots.as_bytes())?)
}

/// Settings of a node's certificate. `lifetime`: `None` for 320 to 365 days, depending on the name.
fn node_params(
    cluster: &ClusterName,
    role: Role,
    node: &NodeId,
    lifetime: Option<Duration>,
    now: SystemTime,
) -> Result<CertificateParams, Error> {
    // A worker's certificate stands for all its instances; none has one of its own.
    let node = &NodeId::new(node.as_str())?;
    let name = PeerIdentity { cluster: cluster.clone(), role, node: node.clone() };
    let mut params = params(now, lifetime.unwrap_or_else(|| lifetime_of(&name)), node.as_str());
    params.subject_alt_names = vec![SanType::URI(name.to_string().try_into()?)];
    params.is_ca = IsCa::ExplicitNoCa;
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
    Ok(params)
}

fn params(now: SystemTime, lifetime: Duration, name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    // rcgen's epoch arithmetic, because SystemTime does not convert without another feature.
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    let since = since_epoch(now);
    // A short lifetime is not prolonged by much, so that its share that is left says something.
    params.not_before = epoch + since.saturating_sub(CLOCK_SKEW.min(lifetime));
    params.not_after = epoch + since + lifetime;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, "Kvasir");
    params.distinguished_name.push(DnType::CommonName, name);
    params
}

/// Lifetime of a node's certificate. It depends on the name alone.
fn lifetime_of(name: &PeerIdentity) -> Duration {
    let hash = blake3::hash(name.to_string().as_bytes());
    let number = hash.as_bytes().first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
    NODE_LIFETIME - NODE_LIFETIME_SPREAD.mul_f64(f64::from(number) / f64::from(u32::MAX))
}

fn since_epoch(now: SystemTime) -> Duration {
    now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// Reads the cluster name of a root certificate. Fails if it is not a CA or `key` is not its key.
fn cluster_of(der: &CertificateDer<'_>, key: &KeyPair) -> Result<String, CertificateError> {
    let (_, root) = X509Certificate::from_der(der).map_err(|_| CertificateError::Unreadable)?;
    if !root.is_ca() {
        return Err(CertificateError::NotCa);
    }
    if root.public_key().raw != key.subject_public_key_info() {
        return Err(CertificateError::OtherKey);
    }
    let name = root.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
    name.map(str::to_owned).ok_or(CertificateError::Unreadable)
}

fn file_error(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { path, source }
}

fn read_text(path: &Path) -> Result<String, Error> {
    let mut text = String::new();
    let file = File::open(path).map_err(file_error(path))?;
    file.take(MAX_FILE_BYTES).read_to_string(&mut text).map_err(file_error(path))?;
    Ok(text)
}

#[derive(Clone, Copy)]
enum Access {
    Owner,
    All,
}

/// Writes all files or, when one of them exists, none.
fn write_all(directory: &Path, files: &[(&str, &str, Access)]) -> Result<(), Error> {
    proto::directory::make_private(directory).map_err(file_error(directory))?;
    for (name, ..) in files {
        let path = directory.join(name);
        if path.symlink_metadata().is_ok() {
            return Err(Error::WouldOverwrite { path });
        }
    }
    for (name, text, access) in files {
        write_new(directory, name, text, *access)?;
    }
    File::open(directory).and_then(|dir| dir.sync_all()).map_err(file_error(directory))
}

/// Atomically replaces the file of this name.
fn write_over(directory: &Path, name: &str, text: &str, access: Access) -> Result<(), Error> {
    let partial = write_partial(directory, name, text, access)?;
    fs::rename(&partial, directory.join(name)).map_err(file_error(&partial))?;
    File::open(directory).and_then(|dir| dir.sync_all()).map_err(file_error(directory))
}

/// The file appears under its name only when it is complete. `hard_link` refuses to replace a file that was
/// created in the meantime.
fn write_new(directory: &Path, name: &str, text: &str, access: Access) -> Result<(), Error> {
    let path = directory.join(name);
    let partial = write_partial(directory, name, text, access)?;
    let linked = fs::hard_link(&partial, &path);
    // A leftover is harmless, but no unknown file should hold a key.
    let removed = fs::remove_file(&partial);
    match linked {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            Err(Error::WouldOverwrite { path })
        }
        Err(source) => Err(Error::File { path, source }),
        Ok(()) => removed.map_err(file_error(&partial)),
    }
}

/// Writes the file under a name of this process and syncs it to the disk.
fn write_partial(directory: &Path, name: &str, text: &str, access: Access) -> Result<PathBuf, Error> {
    let partial = directory.join(format!(".{name}.{}", std::process::id()));
    let mode = match access {
        Access::Owner => 0o600,
        Access::All => 0o644,
    };
    // A leftover of an earlier process with the same id, as in a container, that stopped before the rename
    // or link.
    match fs::remove_file(&partial) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(file_error(&partial)(error));
        }
        _ => {}
    }
    let written =
        OpenOptions::new().write(true).create_new(true).mode(mode).open(&partial).and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.sync_all()
        });
    match written {
        Ok(()) => Ok(partial),
        Err(source) => {
            // An incomplete file is useless; a leftover is harmless.
            let _removed = fs::remove_file(&partial);
            Err(file_error(&partial)(source))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_issued_together_do_not_expire_together() {
        let (now, day) =
            (SystemTime::UNIX_EPOCH + DAY * 20_000, |ends: i64| ends / DAY.as_secs().cast_signed());
        let authority = Authority::new(ClusterName::new("c").unwrap(), now).unwrap();
        let ends = |name: &str| {
            let node = authority.issue(Role::Worker, NodeId::new(name).unwrap(), now).unwrap();
            node.identity().unwrap().validities().unwrap().node.ends
        };
        let days: Vec<i64> = (0..100).map(|n| day(ends(&format!("w{n}")))).collect();
        assert!(days.iter().all(|day| (20_320..=20_365).contains(day)), "{days:?}");
        let on = |day: i64| days.iter().filter(|other| **other == day).count();
        assert!((20_320..=20_365).map(on).max() < Some(12), "{days:?}");
        // A renewed certificate lasts equally long.
        assert_eq!(ends("w1"), ends("w1"));
    }
}
