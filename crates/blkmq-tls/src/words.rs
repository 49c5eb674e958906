//! Why a handshake failed, in words: who offers or has what, what is needed, and what to do. The library's own text has
//! its names of the fault alone. The NBD front door and the NBD driver write it to the log.

use rustls::{AlertDescription, CertificateError, Error, PeerIncompatible};

/// Why a handshake failed, for people.
pub fn explain(error: &Error) -> String {
    let advice = match error {
        Error::PeerIncompatible(what) => of_peer(what),
        Error::InvalidCertificate(what) => of_certificate(what),
        Error::AlertReceived(what) => of_alert(*what),
        Error::NoCertificatesPresented => Some(
            "clients need a certificate of an authority in tls_ca here, with a key of RSA, or on P-256 or P-384, or of Ed25519: \
             give the client one (libnbd: tls-certificates=DIRECTORY); one that has another may send none",
        ),
        Error::InvalidMessage(_) => Some("what it sends is no TLS, or damaged: is it meant to use TLS here?"),
        _ => None,
    };
    match advice {
        Some(advice) => format!("{error}: {advice}"),
        None => error.to_string(),
    }
}

fn of_peer(what: &PeerIncompatible) -> Option<&'static str> {
    Some(match what {
        PeerIncompatible::Tls12NotOffered => {
            "it offers TLS 1.1 at most, which is not safe: use a client that has TLS 1.3"
        }
        PeerIncompatible::SupportedVersionsExtensionRequired | PeerIncompatible::Tls12NotOfferedOrEnabled => {
            "it offers TLS 1.2 at most, and TLS 1.3 is needed: use a client that has it, as nbdfuse and qemu-nbd do, or set allow_tls12 \
             (--allow-tls12), as for Debian 12's nbd-client"
        }
        PeerIncompatible::ServerDoesNotSupportTls12Or13
        | PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig => {
            "the server has TLS 1.2 at most, and TLS 1.3 is needed: have it permit TLS 1.3"
        }
        PeerIncompatible::NoCipherSuitesInCommon => {
            "it offers none of TLS_AES_128_GCM_SHA256, TLS_AES_256_GCM_SHA384 and TLS_CHACHA20_POLY1305_SHA256, or with TLS 1.2 none \
             of these with ECDHE: permit one"
        }
        PeerIncompatible::ExtendedMasterSecretExtensionRequired => {
            "its TLS 1.2 has no extended master secret (RFC 7627): use a newer client"
        }
        PeerIncompatible::NoKxGroupsInCommon
        | PeerIncompatible::NamedGroupsExtensionRequired
        | PeerIncompatible::KeyShareExtensionRequired => {
            "it offers none of the groups X25519, P-256 and P-384: permit one"
        }
        PeerIncompatible::SignatureAlgorithmsExtensionRequired => {
            "it names no signatures that it accepts, as clients of TLS 1.1 and older do not: use one that has TLS 1.3"
        }
        PeerIncompatible::NoSignatureSchemesInCommon
        | PeerIncompatible::NoCertificateRequestSignatureSchemesInCommon => {
            "it accepts no signature that the certificate's key can make: use a key on P-256, or of RSA with 2048 bits or more"
        }
        _ => return None,
    })
}

fn of_certificate(what: &CertificateError) -> Option<&'static str> {
    Some(match what {
        CertificateError::UnknownIssuer => {
            "its certificate is of an authority that is not trusted here, or one between it and a trusted one was not sent: add \
             the authority to tls_ca, or the whole chain to its certificate; one that signs itself has to be in tls_ca itself"
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "its certificate, or one of the chain, has expired by this host's clock: renew it, or set the clock"
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "its certificate, or one of the chain, is not valid yet by this host's clock: set the clock"
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "the name has to be among the certificate's alternative names (subjectAltName), as the common name (CN) does not \
             count: issue another certificate, or set tls_hostname to a name that it has"
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "its certificate is for something else: it needs extendedKeyUsage clientAuth of a client, and serverAuth of a server"
        }
        CertificateError::UnsupportedSignatureAlgorithmContext { .. }
        | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => {
            "its certificate, or one of the chain, is signed in a way that is not accepted: usable are RSA of 2048 to 8192 bits with \
             SHA-256 or better, ECDSA on P-256 and P-384, and Ed25519"
        }
        CertificateError::Other(other) => of_other(&other.to_string())?,
        _ => return None,
    })
}

/// Faults of certificates for which the library has no name of its own, by the words of its parser.
fn of_other(words: &str) -> Option<&'static str> {
    let known = [
        (
            "CaUsedAsEndEntity",
            "its certificate is an authority's (CA:TRUE), such as one that openssl req -x509 makes: issue it another one, \
             CA:FALSE, that the authority signs",
        ),
        (
            "EndEntityUsedAsCa",
            "its certificate is signed by one that is no authority's (CA:FALSE): have an authority sign it",
        ),
        (
            "UnsupportedCertVersion",
            "its certificate, or one of the chain, is of version 1: issue it again as version 3, with a subjectAltName",
        ),
    ];
    known
        .into_iter()
        .find(|(name, _)| words.contains(name))
        .map(|(_, advice)| advice)
}

fn of_alert(what: AlertDescription) -> Option<&'static str> {
    Some(match what {
        AlertDescription::ProtocolVersion => "the other side has no TLS 1.3, which is needed here",
        AlertDescription::HandshakeFailure | AlertDescription::InsufficientSecurity => {
            "the other side finds no version, cipher, group or signature that both accept"
        }
        AlertDescription::UnknownCA => {
            "the other side does not trust the authority of the certificate that it was shown: give it the authority (its CA file)"
        }
        AlertDescription::CertificateExpired => {
            "the certificate that the other side was shown has expired by its clock: renew it, or set its clock"
        }
        AlertDescription::CertificateRequired => "the other side demands a certificate, and was shown none",
        AlertDescription::BadCertificate
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::CertificateUnknown => {
            "the other side does not accept the certificate that it was shown: its log says why; often the name is not among the \
             alternative names, or the authority is another one"
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
    use rustls::RootCertStore;
    use rustls::client::WebPkiServerVerifier;
    use rustls::pki_types::{CertificateDer, ServerName, UnixTime};

    use super::*;

    fn params(name: &str, is_ca: bool) -> CertificateParams {
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        if is_ca {
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        }
        params
    }

    /// What the library says of a server with this chain of certificates, if `root` is trusted.
    fn said_of(chain: &[CertificateDer<'_>], root: CertificateDer<'_>) -> String {
        let mut roots = RootCertStore::empty();
        roots.add(root.into_owned()).unwrap();
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), crate::provider());
        let verifier: Arc<dyn rustls::client::danger::ServerCertVerifier> = verifier.build().unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        let verified = verifier.verify_server_cert(&chain[0], &chain[1..], &name, &[], UnixTime::now());
        explain(&verified.unwrap_err())
    }

    #[test]
    fn certificate_that_is_an_authority_s_or_is_signed_by_none_is_explained() {
        let [key, other] = [(); 2].map(|()| KeyPair::generate().unwrap());
        let authority = params("authority", true).self_signed(&key).unwrap();
        let said = said_of(&[authority.der().clone()], authority.der().clone());
        assert!(said.contains("is an authority's (CA:TRUE)"), "{said}");
        // One that is trusted has signed one that is no authority, which has signed the server's.
        let issuer = Issuer::new(params("authority", true), key);
        let middle = params("middle", false).signed_by(&other, &issuer).unwrap();
        let server = params("server", false).signed_by(
            &KeyPair::generate().unwrap(),
            &Issuer::new(params("middle", false), other),
        );
        let chain = [server.unwrap().der().clone(), middle.der().clone()];
        let said = said_of(&chain, authority.der().clone());
        assert!(
            said.contains("is signed by one that is no authority's (CA:FALSE)"),
            "{said}"
        );
    }

    #[test]
    fn faults_of_handshakes_are_explained_with_what_is_needed() {
        for (error, words) in [
            (
                Error::PeerIncompatible(PeerIncompatible::SupportedVersionsExtensionRequired),
                "offers TLS 1.2 at most, and TLS 1.3 is needed",
            ),
            (
                Error::InvalidCertificate(CertificateError::UnknownIssuer),
                "add the authority to tls_ca",
            ),
            (Error::NoCertificatesPresented, "give the client one"),
            (
                Error::AlertReceived(AlertDescription::UnknownCA),
                "does not trust the authority",
            ),
        ] {
            let said = explain(&error);
            assert!(
                said.starts_with(&error.to_string()) && said.contains(words),
                "{said}"
            );
        }
        let plain = Error::DecryptError;
        assert_eq!(explain(&plain), plain.to_string());
    }
}
