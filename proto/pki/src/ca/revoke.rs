//! Revocation: the record of certificates that an authority issued, and its certificate revocation list
//! (CRL).

use super::{Access, Authority, CA_LIFETIME, IssuedNode, file_error, read_text, since_epoch, write_over};
use crate::error::{CertificateError, Error};
use crate::revocation::MAX_REVOCATION_LIST;
use proto::ids::{NodeId, Role};
use rcgen::{
    CertificateRevocationListParams, KeyIdMethod, RevocationReason, RevokedCertParams, SerialNumber,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use std::collections::BTreeMap;
use std::fmt;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::str::FromStr;
use std::time::SystemTime;
use x509_parser::prelude::{CertificateRevocationList, FromDer, X509Certificate};

/// CRL file, in the directory of an authority and in identity directories.
pub(super) const REVOKED: &str = "ca.crl";
/// Record of issued certificates, one per line: serial number, role, node.
const ISSUED: &str = "issued";
/// Largest record that is read, bytes. Enough for some hundred thousand certificates.
const MAX_RECORD: u64 = 16 << 20;

/// Serial number of a certificate.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Serial(Vec<u8>);

impl Serial {
    /// Longest serial number (RFC 5280, section 4.1.2.2) and a sign byte.
    const MAX_BYTES: usize = 21;

    /// Reads the serial number of the first certificate of a PEM text.
    pub fn of_pem(certificate: &[u8]) -> Result<Self, CertificateError> {
        let der = CertificateDer::from_pem_slice(certificate).map_err(|_| CertificateError::Unreadable)?;
        let (_, parsed) = X509Certificate::from_der(&der).map_err(|_| CertificateError::Unreadable)?;
        Ok(Self(parsed.tbs_certificate.serial.to_bytes_be()))
    }

    /// Reads the serial number of a certificate in DER, and the Unix second at which the certificate ends.
    pub fn and_end_of(certificate: &CertificateDer<'_>) -> Result<(Self, u64), CertificateError> {
        let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_| CertificateError::Unreadable)?;
        let ends = parsed.validity().not_after.timestamp();
        Ok((Self(parsed.tbs_certificate.serial.to_bytes_be()), ends.try_into().unwrap_or(0)))
    }

    /// Draws a serial number of 16 random bytes.
    pub fn random() -> Result<Self, Error> {
        let mut bytes = [0; 16];
        crate::tls::fill_random(&mut bytes)?;
        // Positive, and without a leading zero byte.
        bytes[0] = bytes[0] & 0x7f | 0x40;
        Ok(Self(bytes.to_vec()))
    }

    /// From bytes of [`bytes`](Self::bytes).
    pub fn from_bytes(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// Big-endian, without leading zeros.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Serial {
    type Err = &'static str;

    /// Parses hexadecimal digits as `openssl x509 -serial` prints them, or with colons between the bytes.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits: Option<Vec<u8>> =
            text.chars().filter(|c| *c != ':').map(|c| Some(c.to_digit(16)? as u8)).collect();
        let digits = digits.ok_or("a serial number in hexadecimal digits")?;
        // Whole bytes, without leading zeros.
        let padded: Vec<u8> = std::iter::repeat_n(0, digits.len() % 2).chain(digits).collect();
        let bytes = padded.as_chunks::<2>().0.iter().map(|[high, low]| high << 4 | low);
        let bytes: Vec<u8> = bytes.skip_while(|byte| *byte == 0).collect();
        match bytes.len() {
            1..=Self::MAX_BYTES => Ok(Self(bytes)),
            _ => Err("a serial number of 1 to 21 bytes"),
        }
    }
}

impl Authority {
    /// Issues a certificate ([`Authority::issue`]) and records it in `directory`, the authority's, so that
    /// it can be revoked by the node's name.
    pub fn issue_recorded(
        &self,
        directory: &Path,
        role: Role,
        node: NodeId,
        now: SystemTime,
    ) -> Result<IssuedNode, Error> {
        let issued = self.issue(role, node.clone(), now)?;
        let line = format!("{} {} {node}\n", issued.serial()?, role.as_str());
        let path = directory.join(ISSUED);
        // Recorded before the caller gets the certificate. A single write, so that concurrent callers do
        // not mix their lines.
        let written = OpenOptions::new().append(true).create(true).mode(0o644).open(&path);
        let written = written.and_then(|mut file| {
            file.write_all(line.as_bytes())?;
            file.sync_all()
        });
        written.map_err(file_error(&path))?;
        Ok(issued)
    }

    /// Returns all certificates that are recorded in `directory` for this node name and role.
    pub fn issued(directory: &Path, role: Role, node: &NodeId) -> Result<Vec<Serial>, Error> {
        let path = directory.join(ISSUED);
        let bytes = std::fs::metadata(&path).map_err(file_error(&path))?.len();
        if bytes > MAX_RECORD {
            let reason = format!("{bytes} bytes, at most {MAX_RECORD} are read");
            return Err(file_error(&path)(std::io::Error::other(reason)));
        }
        let text = std::fs::read_to_string(&path).map_err(file_error(&path))?;
        let serial = |line: &str| {
            let mut words = line.split(' ');
            let (serial, named, of) = (words.next()?, words.next()?, words.next()?);
            (named == role.as_str() && of == node.as_str()).then(|| serial.parse().ok()).flatten()
        };
        Ok(text.lines().filter_map(serial).collect())
    }

    /// Adds `serials` to the CRL in `directory`, the authority's, and signs it with the authority's present
    /// key. With no `serials` it only signs the list again. Returns the number of certificates on the list;
    /// writes no list and returns 0 if it would be empty.
    pub fn revoke(&self, directory: &Path, serials: &[Serial], now: SystemTime) -> Result<usize, Error> {
        let mut revoked = self.revoked(directory)?;
        let at = i64::try_from(since_epoch(now).as_secs()).unwrap_or(i64::MAX);
        for serial in serials {
            revoked.entry(serial.clone()).or_insert(at);
        }
        if revoked.is_empty() {
            return Ok(0);
        }
        let list = self.list(&revoked, now)?;
        write_over(directory, REVOKED, &list.pem()?, Access::All)?;
        Ok(revoked.len())
    }

    /// Signs a CRL of certificates with their revocation times in Unix seconds. Returns it in DER.
    pub fn sign_list(
        &self,
        revoked: impl IntoIterator<Item = (Serial, i64)>,
        now: SystemTime,
    ) -> Result<Vec<u8>, Error> {
        Ok(self.list(&revoked.into_iter().collect(), now)?.der().to_vec())
    }

    fn list(
        &self,
        revoked: &BTreeMap<Serial, i64>,
        now: SystemTime,
    ) -> Result<rcgen::CertificateRevocationList, Error> {
        let epoch = rcgen::date_time_ymd(1970, 1, 1);
        let this_update = epoch + since_epoch(now);
        let entry = |(serial, at): (&Serial, &i64)| RevokedCertParams {
            serial_number: SerialNumber::from(serial.0.clone()),
            revocation_time: epoch + std::time::Duration::from_secs((*at).try_into().unwrap_or(0)),
            reason_code: Some(RevocationReason::KeyCompromise),
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update,
            next_update: this_update + CA_LIFETIME,
            crl_number: SerialNumber::from(since_epoch(now).as_secs()),
            issuing_distribution_point: None,
            revoked_certs: revoked.iter().map(entry).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = list.signed_by(&self.issuer)?;
        if list.der().len() > MAX_REVOCATION_LIST {
            return Err(CertificateError::RevocationList { reason: "longer than 512 KiB" }.into());
        }
        Ok(list)
    }

    /// Reads the CRL in `directory`: each serial with its revocation time in seconds since 1970.
    fn revoked(&self, directory: &Path) -> Result<BTreeMap<Serial, i64>, Error> {
        let bad = |reason| CertificateError::RevocationList { reason };
        let Some(text) = revocations(directory)? else { return Ok(BTreeMap::new()) };
        let der = CertificateRevocationListDer::from_pem_slice(text.as_bytes());
        let der = der.map_err(|_| bad("not readable"))?;
        let (_, list) = CertificateRevocationList::from_der(&der).map_err(|_| bad("not an X.509 list"))?;
        let entries = list.iter_revoked_certificates();
        Ok(entries.map(|e| (Serial(e.serial().to_bytes_be()), e.revocation_date.timestamp())).collect())
    }
}

/// Reads the CRL text in `directory`. Returns `None` if there is no list.
pub(super) fn revocations(directory: &Path) -> Result<Option<String>, Error> {
    match read_text(&directory.join(REVOKED)) {
        Ok(text) => Ok(Some(text)),
        Err(Error::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serials_are_parsed_as_they_are_printed() {
        for (text, same) in [("0a1B", "0a1b"), ("00:0a:1b", "0a1b"), ("A1B", "0a1b"), ("7", "07")] {
            assert_eq!(text.parse::<Serial>().unwrap().to_string(), same);
        }
        for text in ["", "00", "0x1", "-1", &"11".repeat(22)] {
            text.parse::<Serial>().unwrap_err();
        }
    }
}
