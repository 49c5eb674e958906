//! The certificates of a test: from an authority of its own, in directories with the file names that NBD
//! clients expect.

use std::fs;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};

use super::Scratch;

/// An authority, and a directory with certificates that it has issued.
pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    directory: String,
}

impl Authority {
    /// Makes an authority with a directory that has its `ca-cert.pem`.
    pub(crate) fn new(scratch: &Scratch, directory: &str) -> Authority {
        Authority::valid(scratch, directory, Validity::Today)
    }

    /// The same with an authority that is valid at some time.
    pub(crate) fn valid(scratch: &Scratch, directory: &str, validity: Validity) -> Authority {
        let mut params = CertificateParams::default();
        validity.set(&mut params);
        params
            .distinguished_name
            .push(DnType::CommonName, format!("the authority of {directory}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let issuer =
            CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("an authority");
        let directory = scratch.word(directory);
        fs::create_dir(&directory).expect("a directory");
        fs::write(format!("{directory}/ca-cert.pem"), issuer.pem()).expect("a file");
        Authority { issuer, directory }
    }

    /// The same authority with a directory of its own.
    pub(crate) fn directory(&self, scratch: &Scratch, directory: &str) -> String {
        let directory = scratch.word(directory);
        fs::create_dir(&directory).expect("a directory");
        fs::copy(self.path("ca-cert.pem"), format!("{directory}/ca-cert.pem")).expect("a file");
        directory
    }

    /// The path of a file in its directory.
    pub(crate) fn path(&self, file: &str) -> String {
        format!("{}/{file}", self.directory)
    }

    /// Issues a server certificate for this machine.
    pub(crate) fn server(&self) {
        self.give(&self.directory, "server", "localhost", Validity::Today);
    }

    /// Issues a client certificate.
    pub(crate) fn client(&self, name: &str) {
        self.give(&self.directory, "client", name, Validity::Today);
    }

    /// Issues `ROLE-cert.pem` and `ROLE-key.pem` in a directory.
    pub(crate) fn give(&self, directory: &str, role: &str, name: &str, validity: Validity) {
        let names = match name {
            "localhost" => vec!["localhost".to_owned(), "127.0.0.1".to_owned()],
            _ => vec![name.to_owned()],
        };
        let mut params = CertificateParams::new(names).expect("names");
        params.distinguished_name.push(DnType::CommonName, name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        validity.set(&mut params);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        fs::write(format!("{directory}/{role}-cert.pem"), certificate.pem()).expect("a file");
        fs::write(format!("{directory}/{role}-key.pem"), key.serialize_pem()).expect("a file");
    }

    /// The flags of a server that requires certificates.
    pub(crate) fn flags(&self) -> Vec<String> {
        let pairs = [
            ("--tls", "require".to_owned()),
            ("--tls-certificate", self.path("server-cert.pem")),
            ("--tls-key", self.path("server-key.pem")),
            ("--tls-ca", self.path("ca-cert.pem")),
        ];
        pairs
            .into_iter()
            .flat_map(|(flag, value)| [flag.to_owned(), value])
            .collect()
    }
}

/// When a certificate is valid.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Validity {
    Today,
    Past,
    Future,
}

impl Validity {
    fn set(self, params: &mut CertificateParams) {
        let years = match self {
            Self::Today => return,
            Self::Past => (2001, 2002),
            Self::Future => (2901, 2902),
        };
        params.not_before = date_time_ymd(years.0, 1, 1);
        params.not_after = date_time_ymd(years.1, 1, 1);
    }
}
