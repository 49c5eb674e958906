//! Tests which versions of TLS, which ciphers and which key exchange groups are accepted: openssl offers each
//! alone, through a forwarder that does NBD's negotiation before TLS. `--nocapture` prints the list.

use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::Secured;
use crate::common::nbd::{self, option};
use crate::common::tools::{installed, output_within, run};

#[test]
fn tls_1_3_is_spoken_with_its_usual_ciphers_and_nothing_older() {
    if !installed(&["openssl", "nbdinfo"]) {
        return;
    }
    let stage = Secured::new(&["name=a,ram=8M"]);
    let daemon = stage.start(&[]);
    offer_each(
        &stage,
        &[
            (&["-tls1", "-cipher", OLD][..], false),
            (&["-tls1_1", "-cipher", OLD], false),
            (&["-tls1_2", "-cipher", OLD], false),
            (&["-tls1_3"], true),
            (&["-tls1_3", "-ciphersuites", "TLS_AES_256_GCM_SHA384"], true),
            (&["-tls1_3", "-ciphersuites", "TLS_AES_128_GCM_SHA256"], true),
            (
                &["-tls1_3", "-ciphersuites", "TLS_CHACHA20_POLY1305_SHA256"],
                true,
            ),
            (&["-tls1_3", "-ciphersuites", "TLS_AES_128_CCM_SHA256"], false),
            (&["-tls1_3", "-ciphersuites", "TLS_AES_128_CCM_8_SHA256"], false),
            (&["-tls1_3", "-groups", "X25519"], true),
            (&["-tls1_3", "-groups", "P-256"], true),
            (&["-tls1_3", "-groups", "P-384"], true),
            (&["-tls1_3", "-groups", "P-521"], false),
            (&["-tls1_3", "-groups", "ffdhe2048"], false),
        ],
    );
    run("nbdinfo", &[&stage.own_uri("a")]);
    let said = daemon.said();
    assert!(
        said.contains("it offers TLS 1.2 at most, and TLS 1.3 is needed"),
        "{said}"
    );
    daemon.stop();
}

#[test]
fn tls_1_2_is_spoken_where_it_is_allowed_with_its_safe_ciphers() {
    if !installed(&["openssl", "nbdinfo"]) {
        return;
    }
    let stage = Secured::new(&["name=a,ram=8M"]);
    let daemon = stage.start(&["--allow-tls12"]);
    offer_each(
        &stage,
        &[
            (&["-tls1", "-cipher", OLD][..], false),
            (&["-tls1_1", "-cipher", OLD], false),
            (&["-tls1_2"], true),
            (&["-tls1_2", "-cipher", "ECDHE-ECDSA-CHACHA20-POLY1305"], true),
            (&["-tls1_2", "-cipher", "ECDHE-ECDSA-AES128-GCM-SHA256"], true),
            (&["-tls1_2", "-cipher", "ECDHE-ECDSA-AES256-GCM-SHA384"], true),
            (&["-tls1_2", "-cipher", "ECDHE-ECDSA-AES128-CCM"], false),
            (&["-tls1_2", "-cipher", "ECDHE-ECDSA-AES128-SHA256"], false),
            (&["-tls1_2", "-cipher", "ECDHE-ECDSA-AES128-SHA"], false),
            (&["-tls1_2", "-cipher", "DHE-RSA-AES128-GCM-SHA256"], false),
            (&["-tls1_2", "-cipher", "AES128-GCM-SHA256"], false),
            (&["-tls1_3"], true),
        ],
    );
    run("nbdinfo", &[&stage.own_uri("a")]);
    let said = daemon.said();
    for words in [
        "as clients of TLS 1.1",
        "it offers none of TLS_AES_128_GCM_SHA256",
    ] {
        assert!(said.contains(words), "{said}");
    }
    daemon.stop();
}

/// Has openssl offer each alone, and checks whether it is taken.
fn offer_each(stage: &Secured, offers: &[(&[&str], bool)]) {
    let address = forward(stage.scratch.path("nbd.sock"));
    for (offer, is_taken) in offers {
        let (taken, said) = offer_alone(&address, stage, offer);
        println!(
            "{:<52} {}",
            offer.join(" "),
            if taken { "spoken" } else { "refused" }
        );
        assert_eq!(taken, *is_taken, "{offer:?}:\n{said}");
        // The server must refuse, not openssl before it has sent anything.
        assert!(taken || said.contains("alert"), "{offer:?}:\n{said}");
    }
}

/// Runs openssl's client with these arguments. Returns whether the handshake succeeded, and its
/// output.
fn offer_alone(address: &str, stage: &Secured, words: &[&str]) -> (bool, String) {
    let path = |file: &str| stage.authority.path(file);
    let mut command = Command::new("openssl");
    command
        .args(["s_client", "-brief", "-connect", address, "-verify_return_error"])
        .args(["-CAfile", &path("ca-cert.pem"), "-verify_hostname", "localhost"])
        .args(["-cert", &path("client-cert.pem"), "-key", &path("client-key.pem")])
        .args(words);
    let output = output_within(&mut command, Duration::from_secs(20));
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    let version = match words[0] {
        "-tls1_3" => "Protocol version: TLSv1.3",
        _ => "Protocol version: TLSv1",
    };
    let is_taken = said.contains("CONNECTION ESTABLISHED") && said.contains(version);
    (is_taken, said)
}

/// Starts a forwarder to an NBD server, and returns its address: a client of it begins with TLS.
fn forward(server: PathBuf) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            pump(client, started(&server));
        }
    });
    address
}

/// A connection on which the server expects TLS next.
fn started(server: &Path) -> UnixStream {
    let mut stream = nbd::greeted(server).expect("a greeting");
    std::io::Write::write_all(&mut stream, &option(super::bytes::STARTTLS, &[])).expect("it listens");
    let (kind, _) = nbd::read_option_reply(&mut stream).expect("an answer");
    assert_eq!(kind, nbd::REP_ACK);
    stream
}

fn pump(client: TcpStream, server: UnixStream) {
    let mut from_client = client.try_clone().expect("a copy");
    let mut to_server = server.try_clone().expect("a copy");
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from_client, &mut to_server);
        let _ = to_server.shutdown(Shutdown::Write);
    });
    let (mut from_server, mut to_client) = (server, client);
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from_server, &mut to_client);
        let _ = to_client.shutdown(Shutdown::Both);
    });
}

/// At this level openssl also offers what it considers insecure.
const OLD: &str = "DEFAULT:@SECLEVEL=0";
