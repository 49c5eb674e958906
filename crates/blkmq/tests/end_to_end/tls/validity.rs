//! Whether time alone keeps disks from anybody but the clients of the address whose certificate is
//! not valid now: certificates that have expired or are not valid yet, and authorities.

use std::fs;
use std::process::Command;
use std::time::Duration;

use crate::common::daemon::{program, serve_command};
use crate::common::pki::{Authority, Validity};
use crate::common::tools::{installed, output_within, run, try_run};
use crate::common::{Daemon, Scratch};

/// A daemon with a TLS address in a scratch directory and one without TLS, whose certificate is
/// valid at some time.
fn started(scratch: &Scratch, authority: &Authority, validity: Validity) -> Daemon {
    authority.give(&scratch.word("pki"), "server", "localhost", validity);
    authority.client("host-a");
    let tls = |key: &str, file: &str| format!("{key} = {:?}\n", authority.path(file));
    let config = format!(
        "[control]\nsocket = \"unix:{}\"\n[disk.a]\nram = \"8M\"\n[[export]]\nnbd = \"unix:{}\"\n\
         tls = \"require\"\n{}{}{}[[export]]\nnbd = \"unix:{}\"\n",
        scratch.word("control.sock"),
        scratch.word("tls.sock"),
        tls("tls_certificate", "server-cert.pem"),
        tls("tls_key", "server-key.pem"),
        tls("tls_ca", "ca-cert.pem"),
        scratch.word("plain.sock"),
    );
    fs::write(scratch.path("blkmq.toml"), config).expect("a file");
    Daemon::start(&["-c", &scratch.word("blkmq.toml")])
}

fn tls_uri(scratch: &Scratch) -> String {
    let (socket, pki) = (scratch.word("tls.sock"), scratch.word("pki"));
    format!("nbds+unix:///a?socket={socket}&tls-certificates={pki}&tls-hostname=localhost")
}

fn plain_uri(scratch: &Scratch) -> String {
    format!("nbd+unix:///a?socket={}", scratch.word("plain.sock"))
}

/// The exit code of `blkmq ctl`, and what it says.
fn ctl(scratch: &Scratch, words: &[&str]) -> (bool, String) {
    let mut command = Command::new(program());
    command.args([
        "ctl",
        "--socket",
        &format!("unix:{}", scratch.word("control.sock")),
    ]);
    let output = output_within(command.args(words), Duration::from_secs(20));
    let text = [output.stdout, output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8_lossy(&text).into_owned(),
    )
}

#[test]
fn certificate_that_is_not_valid_now_refuses_its_address_alone_until_it_is() {
    if !installed(&["nbdinfo"]) {
        return;
    }
    for (validity, why) in [
        (Validity::Past, "expired"),
        (Validity::Future, "is not valid yet"),
    ] {
        let scratch = Scratch::new();
        let authority = Authority::new(&scratch, "pki");
        let mut daemon = started(&scratch, &authority, validity);
        run("nbdinfo", &["--size", &plain_uri(&scratch)]);
        assert!(!try_run("nbdinfo", &["--size", &tls_uri(&scratch)]).success);
        let is_told = |line: &str| line.contains("tls.sock: refused for now") && line.contains(why);
        assert!(
            daemon.wait_for(Duration::from_secs(5), is_told),
            "{}",
            daemon.said()
        );
        let (_, listed) = ctl(&scratch, &["list", "exports"]);
        let is_refused = |line: &str| line.contains("tls.sock") && line.contains(why);
        assert!(listed.lines().any(is_refused), "{listed}");
        // Changes of disks are not in the way of the address, nor is it in theirs.
        let (success, said) = ctl(&scratch, &["add", "disk", "b", "null=8M"]);
        assert!(success, "{said}");
        authority.give(&scratch.word("pki"), "server", "localhost", Validity::Today);
        let is_served = |line: &str| line.contains("tls.sock: served");
        assert!(
            daemon.wait_for(Duration::from_secs(20), is_served),
            "{}",
            daemon.said()
        );
        run("nbdinfo", &["--size", &tls_uri(&scratch)]);
        let said = daemon.said();
        assert_eq!(said.lines().filter(|line| is_told(line)).count(), 1, "{said}");
        let (_, listed) = ctl(&scratch, &["list", "exports"]);
        assert!(!listed.contains(why), "{listed}");
        daemon.stop();
    }
}

#[test]
fn certificates_that_are_valid_by_now_are_served_at_once_by_a_reload() {
    if !installed(&["nbdinfo"]) {
        return;
    }
    let scratch = Scratch::new();
    let authority = Authority::new(&scratch, "pki");
    let daemon = started(&scratch, &authority, Validity::Past);
    let (success, said) = ctl(&scratch, &["reload", "tls"]);
    assert!(!success && said.contains("expired"), "{said}");
    authority.give(&scratch.word("pki"), "server", "localhost", Validity::Today);
    let (success, said) = ctl(&scratch, &["reload", "tls"]);
    assert!(success, "{said}");
    run("nbdinfo", &["--size", &tls_uri(&scratch)]);
    daemon.stop();
}

#[test]
fn authority_that_has_expired_is_left_out_with_a_warning() {
    if !installed(&["nbdinfo"]) {
        return;
    }
    let scratch = Scratch::new();
    let authority = Authority::new(&scratch, "pki");
    let old = Authority::valid(&scratch, "old", Validity::Past);
    let both = [old.path("ca-cert.pem"), authority.path("ca-cert.pem")];
    let both = both.map(|path| fs::read_to_string(path).expect("a file"));
    fs::write(authority.path("ca-cert.pem"), both.concat()).expect("a file");
    let mut daemon = started(&scratch, &authority, Validity::Today);
    let is_told = |line: &str| {
        line.contains("WARN") && line.contains("the authority of old") && line.contains("left out")
    };
    assert!(
        daemon.wait_for(Duration::from_secs(5), is_told),
        "{}",
        daemon.said()
    );
    run("nbdinfo", &["--size", &tls_uri(&scratch)]);
    daemon.stop();
    // The only one: nobody could connect.
    fs::copy(old.path("ca-cert.pem"), authority.path("ca-cert.pem")).expect("a file");
    let mut daemon = started(&scratch, &authority, Validity::Today);
    let is_told = |line: &str| line.contains("tls.sock: refused for now");
    assert!(
        daemon.wait_for(Duration::from_secs(5), is_told),
        "{}",
        daemon.said()
    );
    daemon.stop();
}

#[test]
fn configuration_with_an_expired_certificate_fails_its_check() {
    let scratch = Scratch::new();
    let authority = Authority::new(&scratch, "pki");
    started(&scratch, &authority, Validity::Past).stop();
    let mut command = serve_command(&["--check", "-c", &scratch.word("blkmq.toml")]);
    let checked = command.output().expect("it runs");
    let said = String::from_utf8_lossy(&checked.stderr).into_owned();
    assert!(!checked.status.success() && said.contains("expired"), "{said}");
}
