//! The names of a peer by its certificate: the DNS names, addresses, mail addresses and URIs of its
//! subject alternative names, and the common name of its subject. The certificate has been verified
//! before.

use std::net::IpAddr;

use x509_parser::extensions::GeneralName;
use x509_parser::parse_x509_certificate;

/// The names in a certificate (DER), at most 64; none if the certificate cannot be parsed.
pub fn of(certificate: &[u8]) -> Vec<String> {
    let Ok((_, certificate)) = parse_x509_certificate(certificate) else {
        return Vec::new();
    };
    let mut names = Vec::new();
    if let Ok(Some(alternative)) = certificate.subject_alternative_name() {
        names.extend(
            alternative
                .value
                .general_names
                .iter()
                .filter_map(alternative_name),
        );
    }
    let common = certificate.subject().iter_common_name();
    for name in common.filter_map(|name| name.as_str().ok()) {
        if !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
    }
    names.truncate(NAMES_MAX);
    names
}

fn alternative_name(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) | GeneralName::RFC822Name(name) | GeneralName::URI(name) => {
            Some((*name).to_owned())
        }
        GeneralName::IPAddress(bytes) => address(bytes).map(|address| address.to_string()),
        _ => None,
    }
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
        _ => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
    }
}

const NAMES_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, DnType, KeyPair, SanType};

    #[test]
    fn alternative_names_and_the_common_name_are_found() {
        let names = vec!["vm.example".to_owned(), "10.1.2.3".to_owned()];
        let mut params = CertificateParams::new(names).unwrap();
        params.distinguished_name.push(DnType::CommonName, "host-a");
        let uri = "spiffe://x/y".try_into().unwrap();
        params.subject_alt_names.push(SanType::URI(uri));
        let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        assert_eq!(
            of(certificate.der()),
            ["vm.example", "10.1.2.3", "spiffe://x/y", "host-a"]
        );
        assert!(of(&certificate.der()[1..]).is_empty() && of(&[]).is_empty());
    }
}
