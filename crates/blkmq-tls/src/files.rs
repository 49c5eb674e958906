//! Reads PEM files of certificates and keys, with an error for each content that is not allowed.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustls::RootCertStore;
use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::certificate::X509Certificate;
use x509_parser::parse_x509_certificate;
use x509_parser::public_key::PublicKey;
use x509_parser::time::ASN1Time;
use x509_parser::x509::X509Version;

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
    /// A certificate is not valid at this time, by this host's clock; another time may do.
    #[error("{}: {problem}", path.display())]
    NotNow {
        /// The file.
        path: PathBuf,
        /// Which certificate, when it is valid, and what the clock says.
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

impl FileError {
    /// Returns whether nothing but the time is in the way.
    pub fn is_of_time(&self) -> bool {
        matches!(self, Self::NotNow { .. })
    }
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

/// Reads certificates that are presented to the peer. The first one must be of version 3, and valid now.
pub(crate) fn own_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, FileError> {
    let found = certificates(path)?;
    let (_, first) = parse_x509_certificate(&found[0])
        .map_err(|error| content(path, format!("the certificate cannot be understood: {error}")))?;
    if first.version() != X509Version::V3 {
        return Err(content(
            path,
            format!(
                "the certificate is of version {}, and version 3 is needed: issue it again with extensions \
                 (openssl x509 -req: -extfile), a subjectAltName among them",
                first.version().0 + 1
            ),
        ));
    }
    match out_of_time(&first) {
        Some(problem) => Err(not_now(path, format!("the certificate {problem}"))),
        None => Ok(found),
    }
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

/// The authorities that are trusted.
pub(crate) struct Authorities {
    pub(crate) store: RootCertStore,
    /// Those that are not valid at this time, and why.
    pub(crate) left_out: Vec<String>,
}

/// Reads the certificates of the authorities that are trusted. One at least must be valid now. Each must be an
/// authority's; a certificate that signs itself may also be trusted for itself alone.
pub(crate) fn authorities(path: &Path) -> Result<Authorities, FileError> {
    let (mut store, mut left_out) = (RootCertStore::empty(), Vec::new());
    for certificate in certificates(path)? {
        // The library trusts what it is told to trust: it checks neither.
        match check_authority(&certificate).map_err(|problem| content(path, problem))? {
            Some(problem) => left_out.push(problem),
            None => {
                let added = store.add(certificate);
                added
                    .map_err(|error| content(path, format!("an authority cannot be understood: {error}")))?;
            }
        }
    }
    if store.is_empty() {
        return Err(not_now(path, left_out.join("; ")));
    }
    let left_out = left_out.into_iter();
    let left_out = left_out.map(|problem| format!("{}: {problem}", path.display()));
    Ok(Authorities {
        store,
        left_out: left_out.collect(),
    })
}

/// Checks that a certificate is an authority's. Returns why it cannot be trusted at this time, if so.
fn check_authority(certificate: &CertificateDer<'_>) -> Result<Option<String>, String> {
    let (_, parsed) = parse_x509_certificate(certificate)
        .map_err(|error| format!("an authority cannot be understood: {error}"))?;
    let subject = parsed.subject();
    if !parsed.is_ca() && subject != parsed.issuer() {
        return Err(format!(
            "the certificate of {subject} is no authority's (CA:FALSE): whoever has its key could make others; \
             name the authority that issued it"
        ));
    }
    Ok(out_of_time(&parsed).map(|problem| format!("the certificate of {subject} {problem}")))
}

/// Why a certificate is not valid at this time, if it is not.
fn out_of_time(certificate: &X509Certificate<'_>) -> Option<String> {
    let (validity, now) = (certificate.validity(), ASN1Time::now());
    let (from, until) = (validity.not_before, validity.not_after);
    if now < from {
        Some(format!(
            "is not valid yet: it is valid from {from} until {until}, and this host's clock says {now}"
        ))
    } else if now > until {
        Some(format!(
            "has expired: it was valid from {from} until {until}, and this host's clock says {now}"
        ))
    } else {
        None
    }
}

fn not_now(path: &Path, problem: String) -> FileError {
    FileError::NotNow {
        path: path.to_owned(),
        problem,
    }
}

/// The error for a certificate and a key that the library rejects. `kind` is that of the certificate's key.
pub(crate) fn pair(certificate: &Path, key: &Path, kind: &str, error: &rustls::Error) -> FileError {
    let problem = match error {
        rustls::Error::InconsistentKeys(_) => "the key is not the certificate's".to_owned(),
        // The library does not say which key it was given.
        rustls::Error::General(_) => format!(
            "the key cannot be used: the certificate has {kind}, and usable are RSA of 2048, 2560, 3072, 3584 and 4096 bits, ECDSA on P-256 and \
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
    // The open of a pipe waits, and that of a device may do anything: what is opened is what was looked at.
    let held = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let held = File::from(held.map_err(|cause| unreadable(cause.into()))?);
    if !held.metadata().map_err(unreadable)?.is_file() {
        return Err(content(path, "is no regular file"));
    }
    let file = File::open(format!("/proc/self/fd/{}", held.as_raw_fd())).map_err(unreadable)?;
    let mut bytes = Vec::new();
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, mpsc};
    use std::thread;
    use std::time::{Duration, Instant};

    use rustix::fs::{CWD, Mode};

    use super::*;

    #[test]
    fn file_in_whose_place_a_pipe_is_put_is_read_or_refused_and_nobody_waits() {
        let directory = std::env::temp_dir().join(format!("blkmq-tls-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let [path, file, pipe, next] = ["path", "file", "pipe", "next"].map(|name| directory.join(name));
        fs::write(&file, "content").unwrap();
        fs::write(&path, "content").unwrap();
        rustix::fs::mkfifoat(CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
        let is_over = Arc::new(AtomicBool::new(false));
        let swaps = thread::spawn({
            let (is_over, path) = (Arc::clone(&is_over), path.clone());
            move || {
                while !is_over.load(Ordering::Relaxed) {
                    for one in [&pipe, &file] {
                        fs::hard_link(one, &next).unwrap();
                        fs::rename(&next, &path).unwrap();
                    }
                }
            }
        });
        let (done, counts) = mpsc::channel();
        thread::spawn(move || {
            let (start, mut counts) = (Instant::now(), [0, 0]);
            // Both of them are met, but for a machine that is too busy.
            while start.elapsed() < Duration::from_secs(1) || counts.contains(&0) {
                match read(&path) {
                    Ok(bytes) => {
                        assert_eq!(bytes, b"content");
                        counts[0] += 1;
                    }
                    Err(error) => {
                        assert!(error.to_string().ends_with("is no regular file"), "{error}");
                        counts[1] += 1;
                    }
                }
            }
            let _ = done.send(counts);
        });
        let counts = counts.recv_timeout(Duration::from_secs(30));
        is_over.store(true, Ordering::Relaxed);
        swaps.join().unwrap();
        counts.expect("no read waits for a writer");
        fs::remove_dir_all(directory).unwrap();
    }
}
