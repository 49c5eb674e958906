//! What is said of certificates that `openssl` makes in its usual ways and that cannot serve: common names alone, those
//! that sign themselves, those of version 1, keys of unusual sizes and curves. libnbd and our driver show them as clients,
//! and see them as those of servers.

use std::time::Duration;

use super::serves_near;
use crate::common::daemon::serve_command;
use crate::common::tools::{installed, output_within, run, try_run};
use crate::common::{Daemon, Scratch};

/// An authority of openssl's, and directories with certificates, each with the name that NBD clients expect.
struct Made {
    scratch: Scratch,
}

impl Made {
    fn new() -> Made {
        let made = Made {
            scratch: Scratch::new(),
        };
        made.openssl(&format!(
            "req -x509 -days 30 {EC} -subj /CN=authority -keyout ca.key -out ca.pem"
        ));
        std::fs::write(
            made.scratch.path("common-name.ext"),
            "basicConstraints=CA:FALSE\n",
        )
        .expect("a file");
        let all = "basicConstraints=CA:FALSE\nsubjectAltName=DNS:localhost\n";
        std::fs::write(made.scratch.path("all.ext"), all).expect("a file");
        made
    }

    /// A certificate that the authority in `issuer.pem` signs, in a directory of its own, whose clients trust `ca.pem`.
    fn issue(&self, name: &str, issuer: &str, key: &str, extensions: &str) {
        std::fs::create_dir(self.scratch.path(name)).expect("a directory");
        self.sign(&format!("{name}/client"), name, issuer, key, extensions);
        self.share(name);
    }

    fn sign(&self, file: &str, name: &str, issuer: &str, key: &str, extensions: &str) {
        let (private, request) = (format!("{file}-key.pem"), format!("{name}.csr"));
        self.openssl(&format!(
            "req {key} -subj /CN=localhost -keyout {private} -out {request}"
        ));
        let extensions = match extensions {
            // Without any, openssl 3.0 makes one of version 1.
            "" => String::new(),
            name => format!("-extfile {name}.ext"),
        };
        self.openssl(&format!(
            "x509 -req -in {request} -CA {issuer}.pem -CAkey {issuer}.key -CAcreateserial -days 30 {extensions} \
             -out {file}-cert.pem"
        ));
    }

    /// A certificate that signs itself.
    fn self_signed(&self, name: &str, more: &str) {
        std::fs::create_dir(self.scratch.path(name)).expect("a directory");
        self.openssl(&format!(
            "req -x509 -days 30 {EC} -subj /CN=localhost -addext subjectAltName=DNS:localhost {more} \
             -keyout {name}/client-key.pem -out {name}/client-cert.pem"
        ));
        self.share(name);
    }

    /// An authority of version 1, in `name.pem`, which `issuer` signs, or it itself.
    fn old_authority(&self, name: &str, issuer: Option<&str>) {
        self.openssl(&format!(
            "req {EC} -subj /CN={name} -keyout {name}.key -out {name}.csr"
        ));
        let signed = issuer.map_or_else(
            || format!("-signkey {name}.key"),
            |issuer| format!("-CA {issuer}.pem -CAkey {issuer}.key -CAcreateserial"),
        );
        self.openssl(&format!(
            "x509 -req -in {name}.csr {signed} -days 30 -out {name}.pem"
        ));
        let shown = run(
            "openssl",
            &[
                "x509",
                "-noout",
                "-text",
                "-in",
                &self.word(&format!("{name}.pem")),
            ],
        );
        assert!(shown.stdout.contains("Version: 1 "), "{}", shown.stdout);
    }

    /// Appends the certificate of its issuer to one.
    fn append(&self, name: &str, issuer: &str) {
        let (file, issuer) = (
            self.scratch.path(&format!("{name}/client-cert.pem")),
            self.scratch.path(&format!("{issuer}.pem")),
        );
        let chain = [file.clone(), issuer].map(|path| std::fs::read_to_string(path).expect("a file"));
        std::fs::write(file, chain.concat()).expect("a file");
    }

    fn share(&self, name: &str) {
        let to = self.scratch.path(&format!("{name}/ca-cert.pem"));
        std::fs::copy(self.scratch.path("ca.pem"), to).expect("a file");
    }

    fn openssl(&self, words: &str) {
        let mut command = std::process::Command::new("openssl");
        let command = command
            .args(words.split_whitespace())
            .current_dir(self.scratch.path(""));
        let output = output_within(command, Duration::from_secs(20));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "openssl {words}: {said}");
    }

    fn word(&self, name: &str) -> String {
        self.scratch.word(name)
    }

    /// The words of a server with the certificate of a directory, for clients of the authority in `ca.pem`.
    fn flags(&self, name: &str, ca: &str) -> Vec<String> {
        let nbd = format!("unix:{}", self.word("nbd.sock"));
        let (certificate, key) = (
            format!("{name}/client-cert.pem"),
            format!("{name}/client-key.pem"),
        );
        let pairs = [
            ("--tls", "require".to_owned()),
            ("--tls-certificate", self.word(&certificate)),
            ("--tls-key", self.word(&key)),
            ("--tls-ca", self.word(ca)),
            ("--nbd", nbd),
            ("--disk", "name=a,ram=8M".to_owned()),
        ];
        let words = pairs
            .into_iter()
            .flat_map(|(flag, value)| [flag.to_owned(), value]);
        words.collect()
    }

    fn serve(&self, name: &str, ca: &str) -> Daemon {
        let flags = self.flags(name, ca);
        Daemon::start(&flags.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// The address of the disk for a client with the certificate of a directory.
    fn uri(&self, name: &str) -> String {
        let (socket, directory) = (self.word("nbd.sock"), self.word(name));
        format!("nbds+unix:///a?socket={socket}&tls-certificates={directory}&tls-hostname=localhost")
    }
}

#[test]
fn certificates_of_clients_that_cannot_serve_are_refused_with_what_is_needed() {
    if !installed(&["openssl", "nbdinfo"]) {
        return;
    }
    let made = Made::new();
    made.issue("good", "ca", EC, "all");
    made.issue("common-name", "ca", EC, "common-name");
    made.issue("rsa2432", "ca", "-noenc -newkey rsa:2432", "all");
    made.issue("version-1", "ca", EC, "");
    made.self_signed("authority", "");
    made.self_signed("self-signed", "-addext basicConstraints=critical,CA:FALSE");
    made.old_authority("old", Some("ca"));
    made.issue("by-old", "old", EC, "all");
    made.append("by-old", "old");
    made.issue("p521", "ca", P521, "all");
    let mut daemon = made.serve("good", "ca.pem");
    // A client needs no other name than the common one.
    for name in ["good", "common-name", "rsa2432"] {
        run("nbdinfo", &["--size", &made.uri(name)]);
    }
    for (name, is_libnbd, words) in [
        ("version-1", true, "is of version 1: issue it again as version 3"),
        ("by-old", true, "or one of the chain, is of version 1"),
        ("by-old", false, "or one of the chain, is of version 1"),
        ("authority", false, "is an authority's (CA:TRUE)"),
        (
            "self-signed",
            false,
            "one that signs itself has to be in tls_ca itself",
        ),
        // libnbd shows none that the server could not accept.
        ("self-signed", true, "one that has another may send none"),
        ("p521", true, "RSA, or on P-256 or P-384"),
    ] {
        let before = daemon.lines().len();
        let is_served = match is_libnbd {
            true => try_run("nbdinfo", &["--size", &made.uri(name)]).success,
            false => serves_near(&made.scratch, &made.uri(name)).0,
        };
        assert!(!is_served, "{name} is served");
        assert!(
            says_after(&mut daemon, before, words),
            "{name}: {words}: {}",
            daemon.said()
        );
    }
    run("nbdinfo", &["--size", &made.uri("good")]);
    daemon.stop();
}

#[test]
fn certificates_of_servers_that_cannot_serve_are_refused_by_our_driver() {
    if !installed(&["openssl"]) {
        return;
    }
    let made = Made::new();
    made.issue("good", "ca", EC, "all");
    made.issue("common-name", "ca", EC, "common-name");
    made.self_signed("authority", "");
    made.self_signed("self-signed", "-addext basicConstraints=critical,CA:FALSE");
    made.old_authority("old", Some("ca"));
    made.issue("by-old", "old", EC, "all");
    made.append("by-old", "old");
    for (name, words, told) in [
        (
            "common-name",
            "the common name (CN) does not count",
            "often the name is not among",
        ),
        ("authority", "is an authority's (CA:TRUE)", "its log says why"),
        (
            "self-signed",
            "one that signs itself has to be in tls_ca itself",
            "give it the authority",
        ),
        (
            "by-old",
            "or one of the chain, is of version 1",
            "its log says why",
        ),
    ] {
        let mut daemon = made.serve(name, "ca.pem");
        let (is_served, said) = serves_near(&made.scratch, &made.uri("good"));
        assert!(!is_served && said.contains(words), "{name}: {said}");
        assert!(says_after(&mut daemon, 0, told), "{name}: {}", daemon.said());
        daemon.stop();
    }
}

#[test]
fn own_certificates_that_cannot_serve_are_refused_at_the_start_of_server_and_client() {
    if !installed(&["openssl"]) {
        return;
    }
    let made = Made::new();
    made.issue("good", "ca", EC, "all");
    let daemon = made.serve("good", "ca.pem");
    for (name, key, extensions, words) in [
        ("version-1", EC, "", "is of version 1, and version 3 is needed"),
        (
            "rsa1024",
            "-noenc -newkey rsa:1024",
            "all",
            "has RSA of 1024 bits, and usable are",
        ),
        (
            "rsa2432",
            "-noenc -newkey rsa:2432",
            "all",
            "has RSA of 2432 bits, and usable are",
        ),
        ("p521", P521, "all", "has ECDSA on P-521, and usable are"),
    ] {
        made.issue(name, "ca", key, extensions);
        let mut flags = made.flags(name, "ca.pem");
        flags.push("--check".to_owned());
        let mut server = serve_command(&flags.iter().map(String::as_str).collect::<Vec<_>>());
        let output = output_within(&mut server, Duration::from_secs(20));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && said.contains(words),
            "server, {name}: {said}"
        );
        let (is_served, said) = serves_near(&made.scratch, &made.uri(name));
        assert!(!is_served && said.contains(words), "client, {name}: {said}");
    }
    daemon.stop();
}

#[test]
fn authority_of_version_1_is_trusted_where_it_is_named_itself() {
    if !installed(&["openssl", "nbdinfo"]) {
        return;
    }
    let made = Made::new();
    made.issue("good", "ca", EC, "all");
    made.old_authority("old", None);
    made.issue("by-old", "old", EC, "all");
    let daemon = made.serve("good", "old.pem");
    run("nbdinfo", &["--size", &made.uri("by-old")]);
    let disk = format!("name=near,nbd={},connections=1", made.uri("by-old"));
    Daemon::start(&[
        "--disk",
        &disk,
        "--nbd",
        &format!("unix:{}", made.word("near.sock")),
    ])
    .stop();
    assert!(!try_run("nbdinfo", &["--size", &made.uri("good")]).success);
    daemon.stop();
}

/// Whether the daemon says this behind so many lines, now or soon.
fn says_after(daemon: &mut Daemon, lines: usize, words: &str) -> bool {
    let end = std::time::Instant::now() + Duration::from_secs(10);
    while std::time::Instant::now() < end {
        if daemon.lines().iter().skip(lines).any(|line| line.contains(words)) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    false
}

const EC: &str = "-noenc -newkey ec -pkeyopt ec_paramgen_curve:P-256";
const P521: &str = "-noenc -newkey ec -pkeyopt ec_paramgen_curve:P-521";
