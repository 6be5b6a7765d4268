//! The cluster's own certificate authority: `kvasir ca init`, `issue`, `rotate` and `revoke`, and where
//! nodes find their identity.
//!
//! A CA directory holds `ca.crt` and `ca.key`; an identity directory holds `node.crt` (leaf first),
//! `node.key` and `ca.crt`. Both `ca.crt` hold one root, or two while a root is being replaced, the new one
//! first. Either may hold `ca.crl`, the list of certificates that are revoked; the authority's also `issued`, what it has
//! issued. Keys are readable by their owner only. Nothing is overwritten unless that is what was asked for, and a
//! file appears complete or not at all.

mod revoke;

use crate::Error;
use crate::ids::{ClusterName, NodeId, Role};
use crate::transport::{CertificateError, Identity, PeerIdentity};
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
const CA_LIFE: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);
/// Of the nodes whose certificate lasts longest.
const NODE_LIFE: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// By so much less at most, so that the certificates of nodes that were issued together do not end together.
const NODE_LIFE_SPREAD: Duration = Duration::from_secs(45 * 24 * 60 * 60);
/// Clocks of nodes may be this much behind the issuer's.
const CLOCK_SKEW: Duration = DAY;
const MAX_FILE_BYTES: u64 = 1 << 20;

/// What a certificate ends with as text.
const PEM_END: &str = "-----END CERTIFICATE-----";

const CA_CERTIFICATE: &str = "ca.crt";
const CA_KEY: &str = "ca.key";
const NODE_CERTIFICATE: &str = "node.crt";
const NODE_KEY: &str = "node.key";

/// A certificate authority of one cluster. Whoever holds it can make any node.
pub struct Authority {
    cluster: ClusterName,
    /// Its own certificate, and behind it the one that it replaces.
    certificate_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").field("cluster", &self.cluster).finish_non_exhaustive()
    }
}

/// A node's certificate and key as PEM texts, as [`Authority::issue`] makes them.
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
    /// Makes a new authority for `cluster`, valid for ten years from `now`, with an ECDSA P-256 key.
    pub fn new(cluster: ClusterName, now: SystemTime) -> Result<Self, Error> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let mut params = params(now, CA_LIFE, cluster.as_str());
        // It signs nodes, never another authority.
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate_pem = params.self_signed(&key)?.pem();
        Ok(Self { cluster, certificate_pem, issuer: Issuer::new(params, key) })
    }

    /// Reads an authority from `directory`.
    pub fn load(directory: &Path) -> Result<Self, Error> {
        let certificate_pem = read_text(&directory.join(CA_CERTIFICATE))?;
        let key = KeyPair::from_pem(&read_text(&directory.join(CA_KEY))?)?;
        let der = CertificateDer::from_pem_slice(certificate_pem.as_bytes())
            .map_err(|_| CertificateError::Unreadable)?;
        let cluster = ClusterName::new(cluster_of(&der, &key)?)?;
        Ok(Self { cluster, issuer: Issuer::from_ca_cert_der(&der, key)?, certificate_pem })
    }

    /// Writes the authority to `directory`, which is made if need be; refuses to overwrite one.
    pub fn save(&self, directory: &Path) -> Result<(), Error> {
        write_all(
            directory,
            &[
                (CA_KEY, &self.issuer.key().serialize_pem(), Access::Owner),
                (CA_CERTIFICATE, &self.certificate_pem, Access::All),
            ],
        )
    }

    /// The authority that takes this one's place: with a key of its own, and with this one's certificate behind its
    /// own for as long as nodes have certificates of this one. Refused while this one is still taking another's.
    pub fn successor(&self, now: SystemTime) -> Result<Self, Error> {
        if self.roots()?.len() > 1 {
            return Err(CertificateError::Rotating.into());
        }
        let mut new = Self::new(self.cluster.clone(), now)?;
        new.certificate_pem.push_str(&self.certificate_pem);
        Ok(new)
    }

    /// The same authority without the one that it has replaced: certificates of that one are no longer accepted by
    /// whoever has its roots. `None` if there is none.
    pub fn alone(self) -> Result<Option<Self>, Error> {
        if self.roots()?.len() < 2 {
            return Ok(None);
        }
        let own = self.certificate_pem.find(PEM_END).map(|at| at + PEM_END.len());
        let own = own.and_then(|end| self.certificate_pem.get(..end)).ok_or(CertificateError::Unreadable)?;
        Ok(Some(Self { certificate_pem: format!("{own}\n"), ..self }))
    }

    /// Puts this authority in the place of the one in `directory`.
    pub fn replace(&self, directory: &Path) -> Result<(), Error> {
        // The certificate last: until it is there, nodes have nothing new to trust. Who is stopped in between
        // finds a key that is not the certificate's, and the old one as `ca.key.old`.
        let kept = directory.join(format!("{CA_KEY}.old"));
        let (path, key) = (directory.join(CA_KEY), self.issuer.key().serialize_pem());
        if read_text(&path)? != key {
            fs::copy(&path, &kept).map_err(file_error(&kept))?;
            write_over(directory, CA_KEY, &key, Access::Owner)?;
        }
        write_over(directory, CA_CERTIFICATE, &self.certificate_pem, Access::All)?;
        match fs::remove_file(&kept) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(file_error(&kept)(error)),
            _ => Ok(()),
        }
    }

    fn roots(&self) -> Result<Vec<CertificateDer<'static>>, CertificateError> {
        let all: Result<Vec<_>, _> =
            CertificateDer::pem_slice_iter(self.certificate_pem.as_bytes()).collect();
        all.map_err(|_| CertificateError::Unreadable)
    }

    /// The cluster that this authority speaks for.
    pub fn cluster(&self) -> &ClusterName {
        &self.cluster
    }

    /// The root certificate as PEM text; behind it the one that it replaces, if any.
    pub fn certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    /// Makes a key and a certificate for a node, for both dialing and listening, valid from `now` for 320 to 365 days,
    /// depending on its name.
    pub fn issue(&self, role: Role, node: NodeId, now: SystemTime) -> Result<IssuedNode, Error> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let name = PeerIdentity { cluster: self.cluster.clone(), role, node };
        let mut params = params(now, life_of(&name), name.node.as_str());
        params.subject_alt_names = vec![SanType::URI(name.to_string().try_into()?)];
        params.is_ca = IsCa::ExplicitNoCa;
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        Ok(IssuedNode {
            certificate_pem: params.signed_by(&key, &self.issuer)?.pem(),
            key_pem: key.serialize_pem(),
            ca_pem: self.certificate_pem.clone(),
        })
    }
}

impl IssuedNode {
    /// The identity, ready for use in this process.
    pub fn identity(&self) -> Result<Identity, Error> {
        let parts = [&self.certificate_pem, &self.key_pem, &self.ca_pem];
        let [chain, key, roots] = parts.map(|pem| pem.as_bytes());
        Ok(Identity::from_pem(chain, key, roots)?)
    }

    /// What its certificate can be revoked by.
    pub fn serial(&self) -> Result<Serial, Error> {
        Ok(Serial::of_pem(self.certificate_pem.as_bytes())?)
    }

    /// Writes an identity directory, which is made if need be; refuses to overwrite one.
    pub fn save(&self, directory: &Path) -> Result<(), Error> {
        write_all(directory, &self.files())
    }

    /// Puts this identity in the place of the one in `directory`. A node that reads it meanwhile finds a key that is not
    /// the certificate's, goes on with what it has, and reads again.
    pub fn replace(&self, directory: &Path) -> Result<(), Error> {
        self.files().iter().try_for_each(|(name, text, access)| write_over(directory, name, text, *access))
    }

    /// What it trusts first, so that the rest is never there without it.
    fn files(&self) -> [(&'static str, &str, Access); 3] {
        [
            (CA_CERTIFICATE, &self.ca_pem, Access::All),
            (NODE_KEY, &self.key_pem, Access::Owner),
            (NODE_CERTIFICATE, &self.certificate_pem, Access::All),
        ]
    }
}

/// Reads the identity that [`IssuedNode::save`] (or a certificate manager with the same file names) has
/// written to `directory`, and the list of revoked certificates if there is one.
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

fn params(now: SystemTime, life: Duration, name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    // rcgen's epoch arithmetic, because SystemTime does not convert without another feature.
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    let since = since_epoch(now);
    params.not_before = epoch + since.saturating_sub(CLOCK_SKEW);
    params.not_after = epoch + since + life;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, "Kvasir");
    params.distinguished_name.push(DnType::CommonName, name);
    params
}

/// How long a node's certificate lasts: the same each time, another for each name.
fn life_of(name: &PeerIdentity) -> Duration {
    let hash = blake3::hash(name.to_string().as_bytes());
    let number = hash.as_bytes().first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
    NODE_LIFE - NODE_LIFE_SPREAD.mul_f64(f64::from(number) / f64::from(u32::MAX))
}

fn since_epoch(now: SystemTime) -> Duration {
    now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// The cluster that a root certificate is named for, if it is one and the key is its own.
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
    crate::directory::make_private(directory).map_err(file_error(directory))?;
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

/// The file takes the place of the one of its name, whole.
fn write_over(directory: &Path, name: &str, text: &str, access: Access) -> Result<(), Error> {
    let partial = write_partial(directory, name, text, access)?;
    fs::rename(&partial, directory.join(name)).map_err(file_error(&partial))?;
    File::open(directory).and_then(|dir| dir.sync_all()).map_err(file_error(directory))
}

/// The file appears under its name only when complete, and `hard_link` refuses to replace another one that
/// was made in the meantime.
fn write_new(directory: &Path, name: &str, text: &str, access: Access) -> Result<(), Error> {
    let path = directory.join(name);
    let partial = write_partial(directory, name, text, access)?;
    let linked = fs::hard_link(&partial, &path);
    // A leftover is harmless, but nothing should hold a key that nobody knows of.
    let removed = fs::remove_file(&partial);
    match linked {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            Err(Error::WouldOverwrite { path })
        }
        Err(source) => Err(Error::File { path, source }),
        Ok(()) => removed.map_err(file_error(&partial)),
    }
}

/// The file under a name of this process, all of it on the disk.
fn write_partial(directory: &Path, name: &str, text: &str, access: Access) -> Result<PathBuf, Error> {
    let partial = directory.join(format!(".{name}.{}", std::process::id()));
    let mode = match access {
        Access::Owner => 0o600,
        Access::All => 0o644,
    };
    // Of an earlier process with our number, as in a container, that did not get as far.
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
            // What could not be written is of no use; a leftover is harmless.
            let _removed = fs::remove_file(&partial);
            Err(file_error(&partial)(source))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_that_are_issued_together_do_not_end_together() {
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
        // A renewed one lasts as long again.
        assert_eq!(ends("w1"), ends("w1"));
    }
}
