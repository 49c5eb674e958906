//! Reads PEM files of certificates and keys, with an error for each content that is not allowed.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use rustls::RootCertStore;
use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::parse_x509_certificate;
use x509_parser::public_key::PublicKey;

/// The reason why a file of a certificate or a key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file cannot be read.
    #[error("{}: cannot be read: {cause}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        cause: std::io::Error,
    },
    /// The file does not hold what it must.
    #[error("{}: {problem}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The defect, and the content that is needed.
        problem: String,
    },
    /// The certificate and the key do not belong together.
    #[error("{} and {}: {problem}", certificate.display(), key.display())]
    Pair {
        /// The file of the certificate.
        certificate: PathBuf,
        /// The file of the key.
        key: PathBuf,
        /// The defect.
        problem: String,
    },
}

/// Reads the certificates of a file. There is at least one.
pub(crate) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, FileError> {
    let text = read(path)?;
    let found: Result<Vec<_>, PemError> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.map_err(|error| content(path, format!("no PEM: {error}")))?;
    if found.is_empty() {
        return Err(content(
            path,
            "holds no certificate: there should be a -----BEGIN CERTIFICATE-----",
        ));
    }
    Ok(found)
}

/// Reads certificates that are presented to the peer. The first one must be valid now.
pub(crate) fn own_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, FileError> {
    let found = certificates(path)?;
    let (_, first) = parse_x509_certificate(&found[0])
        .map_err(|error| content(path, format!("the certificate cannot be understood: {error}")))?;
    let validity = first.validity();
    if !validity.is_valid() {
        let (from, until) = (validity.not_before, validity.not_after);
        return Err(content(
            path,
            format!("the certificate is valid from {from} until {until}, and not now"),
        ));
    }
    Ok(found)
}

/// The kind of a certificate's key for people, with its size or curve.
pub(crate) fn kind_of_key(certificate: &CertificateDer<'_>) -> String {
    let Ok((_, parsed)) = parse_x509_certificate(certificate) else {
        return "a key that cannot be understood".to_owned();
    };
    let key = parsed.public_key();
    let parameters = key.algorithm.parameters.as_ref();
    let curve = parameters.and_then(|parameters| parameters.as_oid().ok());
    match (key.parsed(), curve) {
        (Ok(PublicKey::RSA(rsa)), _) => format!("RSA of {} bits", rsa.key_size()),
        (Ok(PublicKey::EC(_)), Some(curve)) => {
            let curve = curve.to_id_string();
            let known = CURVES.iter().find(|(number, _)| *number == curve);
            let curve = known.map_or(&*curve, |(_, name)| name);
            format!("ECDSA on {curve}")
        }
        _ => {
            let number = key.algorithm.algorithm.to_id_string();
            let known = ALGORITHMS.iter().find(|(other, _)| *other == number);
            known.map_or_else(
                || format!("a key of the algorithm {number}"),
                |(_, name)| (*name).to_owned(),
            )
        }
    }
}

/// Reads a key in the format PKCS#8, SEC1 or PKCS#1.
pub(crate) fn key(path: &Path) -> Result<PrivateKeyDer<'static>, FileError> {
    let text = read(path)?;
    PrivateKeyDer::from_pem_slice(&text).map_err(|error| match error {
        PemError::NoItemsFound => content(
            path,
            "holds no key that can be used: there should be a -----BEGIN PRIVATE KEY-----, not encrypted",
        ),
        error => content(path, format!("no PEM: {error}")),
    })
}

/// Reads the certificates of the authorities that are trusted. Each must be valid now and be an
/// authority's; a certificate that signs itself may also be trusted for itself alone.
pub(crate) fn authorities(path: &Path) -> Result<RootCertStore, FileError> {
    let mut store = RootCertStore::empty();
    for certificate in certificates(path)? {
        check_authority(&certificate).map_err(|problem| content(path, problem))?;
        let added = store.add(certificate);
        added.map_err(|error| content(path, format!("an authority cannot be understood: {error}")))?;
    }
    Ok(store)
}

/// The library trusts what it is told to trust: it checks neither.
fn check_authority(certificate: &CertificateDer<'_>) -> Result<(), String> {
    let (_, parsed) = parse_x509_certificate(certificate)
        .map_err(|error| format!("an authority cannot be understood: {error}"))?;
    let (subject, validity) = (parsed.subject(), parsed.validity());
    if !validity.is_valid() {
        let (from, until) = (validity.not_before, validity.not_after);
        return Err(format!(
            "the certificate of {subject} is valid from {from} until {until}, and not now: take it out"
        ));
    }
    if !parsed.is_ca() && subject != parsed.issuer() {
        return Err(format!(
            "the certificate of {subject} is no authority's (CA:FALSE): whoever has its key could make others; \
             name the authority that issued it"
        ));
    }
    Ok(())
}

/// The error for a certificate and a key that the library rejects. `kind` is that of the certificate's key.
pub(crate) fn pair(certificate: &Path, key: &Path, kind: &str, error: &rustls::Error) -> FileError {
    let problem = match error {
        rustls::Error::InconsistentKeys(_) => "the key is not the certificate's".to_owned(),
        // The library does not say which key it was given.
        rustls::Error::General(_) => format!(
            "the key cannot be used: the certificate has {kind}, and usable are RSA of 2048 to 4096 bits, ECDSA on P-256 and \
             P-384, and Ed25519"
        ),
        error => error.to_string(),
    };
    FileError::Pair {
        certificate: certificate.to_owned(),
        key: key.to_owned(),
        problem,
    }
}

pub(crate) fn content(path: &Path, problem: impl Into<String>) -> FileError {
    FileError::Content {
        path: path.to_owned(),
        problem: problem.into(),
    }
}

/// Reads a regular file of at most [`BYTES_MAX`]: others may have no end, or wait for a writer.
fn read(path: &Path) -> Result<Vec<u8>, FileError> {
    let unreadable = |cause| FileError::Unreadable {
        path: path.to_owned(),
        cause,
    };
    let is_regular = std::fs::metadata(path).map_err(unreadable)?.is_file();
    if !is_regular {
        return Err(content(path, "is no regular file"));
    }
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(unreadable)?;
    file.take(BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(unreadable)?;
    if bytes.len() as u64 > BYTES_MAX {
        return Err(content(path, "has more than 16 MiB"));
    }
    Ok(bytes)
}

/// Elliptic curves, by their numbers (RFC 5480, SEC 2, RFC 5639).
const CURVES: [(&str, &str); 7] = [
    ("1.2.840.10045.3.1.7", "P-256"),
    ("1.3.132.0.34", "P-384"),
    ("1.3.132.0.35", "P-521"),
    ("1.3.132.0.10", "secp256k1"),
    ("1.3.36.3.3.2.8.1.1.7", "brainpoolP256r1"),
    ("1.3.36.3.3.2.8.1.1.11", "brainpoolP384r1"),
    ("1.3.36.3.3.2.8.1.1.13", "brainpoolP512r1"),
];
/// Algorithms without sizes, by their numbers (RFC 8410).
const ALGORITHMS: [(&str, &str); 2] = [("1.3.101.112", "Ed25519"), ("1.3.101.113", "Ed448")];
/// More than all authorities that a system knows.
const BYTES_MAX: u64 = 16 << 20;
