//! Tests whether NBD with TLS keeps out clients without a valid certificate and serves the others correctly:
//! libnbd's tools, QEMU's, nbdkit and our own driver, on either side; and clients that violate the protocol.

mod bytes;
mod clients;
mod made_by_openssl;
mod reloads;
mod validity;
mod versions;

use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::common::daemon::{program, serve_command};
use crate::common::pki::{Authority, Validity};
use crate::common::tools::{installed, output_within, run, try_run};
use crate::common::{Daemon, Scratch};

/// A daemon that requires certificates, with the authority that issues them.
struct Secured {
    scratch: Scratch,
    authority: Authority,
    words: Vec<String>,
}

impl Secured {
    fn new(disks: &[&str]) -> Secured {
        let scratch = Scratch::new();
        let authority = Authority::new(&scratch, "pki");
        authority.server();
        authority.client("host-a");
        let mut words = authority.flags();
        words.extend(["--nbd".to_owned(), format!("unix:{}", scratch.word("nbd.sock"))]);
        for disk in disks {
            words.extend(["--disk".to_owned(), (*disk).to_owned()]);
        }
        Secured {
            scratch,
            authority,
            words,
        }
    }

    fn start(&self, more: &[&str]) -> Daemon {
        let words = self.words.iter().map(String::as_str);
        Daemon::start(&words.chain(more.iter().copied()).collect::<Vec<_>>())
    }

    /// The address of a disk for a client with the certificates of a directory.
    fn uri(&self, disk: &str, directory: &str) -> String {
        let socket = self.scratch.word("nbd.sock");
        format!("nbds+unix:///{disk}?socket={socket}&tls-certificates={directory}&tls-hostname=localhost")
    }

    fn own_uri(&self, disk: &str) -> String {
        self.uri(disk, &self.scratch.word("pki"))
    }
}

#[test]
fn client_without_a_valid_certificate_is_refused_and_the_log_says_why() {
    if !installed(&["nbdinfo"]) {
        return;
    }
    let stage = Secured::new(&["name=a,ram=8M"]);
    let mut daemon = stage.start(&[]);
    let other = Authority::new(&stage.scratch, "other");
    other.client("host-a");
    // A certificate of the other authority, in a directory that trusts ours, so that only the
    // server can refuse.
    let stranger = stage.authority.directory(&stage.scratch, "stranger");
    other.give(&stranger, "client", "host-a", Validity::Today);
    let late = stage.authority.directory(&stage.scratch, "late");
    stage.authority.give(&late, "client", "host-a", Validity::Past);
    let nobody = stage.authority.directory(&stage.scratch, "nobody");
    for (directory, why) in [
        (&nobody, "peer sent no certificates"),
        (&stranger, "UnknownIssuer"),
        (&late, "Expired"),
    ] {
        let uri = stage.uri("a", directory);
        // libnbd does not send a certificate of an authority that the server does not name; our
        // driver does.
        if *directory == stranger {
            assert!(!serves_near(&stage.scratch, &uri).0);
        } else {
            assert!(!try_run("nbdinfo", &[&uri]).success, "{directory}");
        }
        let is_said = |line: &str| {
            line.contains("TLS handshake failed") && line.to_lowercase().contains(&why.to_lowercase())
        };
        assert!(
            daemon.wait_for(Duration::from_secs(5), is_said),
            "{why}: {}",
            daemon.said()
        );
    }
    let plain = format!("nbd+unix:///a?socket={}", stage.scratch.word("nbd.sock"));
    let said = try_run("nbdinfo", &[&plain]);
    assert!(!said.success, "without TLS: {}", said.stdout);
    let is_told = |line: &str| line.contains("it needs TLS here, and did not start it");
    assert!(daemon.wait_for(Duration::from_secs(5), is_told));
    assert_eq!(daemon.said().lines().filter(|line| is_told(line)).count(), 1);
    // Here the client refuses a server of another authority.
    let said = try_run("nbdinfo", &[stage.uri("a", &stage.scratch.word("other"))]);
    assert!(!said.success, "a server of another authority: {}", said.stdout);
    run("nbdinfo", &[&stage.own_uri("a")]);
    daemon.stop();
}

#[test]
fn client_sees_the_disks_that_its_name_may_see_and_no_others() {
    if !installed(&["nbdinfo"]) {
        return;
    }
    let stage = Secured::new(&["name=a,ram=8M", "name=b,ram=8M", "name=c,ram=8M"]);
    let mut daemon = stage.start(&["--tls-client", "host-a=a+c", "--tls-client", "host-b"]);
    let second = stage.authority.directory(&stage.scratch, "second");
    stage.authority.give(&second, "client", "host-b", Validity::Today);
    let third = stage.authority.directory(&stage.scratch, "third");
    stage.authority.give(&third, "client", "host-c", Validity::Today);
    let listed = |directory: &str| {
        let said = try_run("nbdinfo", &["--list", &stage.uri("", directory)]);
        let disks = ["a", "b", "c"].into_iter();
        disks
            .filter(|disk| said.stdout.contains(&format!("export=\"{disk}\"")))
            .collect::<String>()
    };
    let first = stage.scratch.word("pki");
    assert_eq!(
        (listed(&first), listed(&second), listed(&third)),
        ("ac".into(), "abc".into(), String::new())
    );
    let is_told = |line: &str| line.contains("sees no disk") && line.contains("[\"host-c\"]");
    assert!(
        daemon.wait_for(Duration::from_secs(5), is_told),
        "{}",
        daemon.said()
    );
    let opens = |disk: &str, directory: &str| try_run("nbdinfo", &["--size", &stage.uri(disk, directory)]);
    assert!(opens("a", &first).success && opens("b", &second).success);
    let (hidden, missing) = (opens("b", &first), opens("zz", &first));
    assert!(!hidden.success && !opens("a", &third).success);
    assert_eq!(hidden.stderr.replace("'b'", "'zz'"), missing.stderr);
    daemon.stop();
}

#[test]
fn our_driver_reads_back_what_it_wrote_by_tls_on_our_server_and_on_others() {
    if !installed(&["fio", "nbdkit", "qemu-nbd"]) {
        return;
    }
    let stage = Secured::new(&["name=a,ram=32M"]);
    let daemon = stage.start(&[]);
    verify_through(&stage, &stage.own_uri("a"));
    daemon.stop();
    let pki = stage.scratch.word("pki");
    let socket = stage.scratch.word("kit.sock");
    let kit = Below::start(
        Command::new("nbdkit")
            .args(["-f", "-U", &socket, "--tls=require", "--tls-verify-peer"])
            .args([&format!("--tls-certificates={pki}"), "memory", "32M"]),
        &socket,
    );
    verify_through(
        &stage,
        &format!("nbds+unix:///?socket={socket}&tls-certificates={pki}"),
    );
    drop(kit);
    let (image, socket) = (
        stage.scratch.image("qemu.raw", 32 << 20),
        stage.scratch.word("qemu.sock"),
    );
    let object = format!("tls-creds-x509,id=t,dir={pki},endpoint=server,verify-peer=on");
    let qemu = Below::start(
        Command::new("qemu-nbd").args([
            "--object",
            &object,
            "--tls-creds",
            "t",
            "-t",
            "-e",
            "8",
            "-f",
            "raw",
            "-k",
            &socket,
            &image,
        ]),
        &socket,
    );
    verify_through(
        &stage,
        &format!("nbds+unix:///?socket={socket}&tls-certificates={pki}"),
    );
    drop(qemu);
}

/// Writes and verifies through a daemon of ours whose disk is at the URI.
fn verify_through(stage: &Secured, uri: &str) {
    let nbd = format!("unix:{}", stage.scratch.word("near.sock"));
    let near = Daemon::start(&[
        "--disk",
        &format!("name=near,nbd={uri},connections=1"),
        "--nbd",
        &nbd,
    ]);
    let uri = near.uri("near");
    for (rw, bs, size) in [("randwrite", "4k-4k", "4m"), ("write", "256k-1m", "24m")] {
        let words = format!(
            "--name=v --ioengine=nbd --uri={uri} --iodepth=16 --bsrange={bs} --rw={rw} --size={size} --verify=crc32c \
             --verify_fatal=1 --verify_state_save=0"
        );
        run("fio", &words.split_whitespace().collect::<Vec<_>>());
    }
    near.stop();
}

#[test]
fn our_driver_believes_no_server_that_it_should_not() {
    let stage = Secured::new(&["name=a,ram=8M"]);
    let daemon = stage.start(&[]);
    let other = Authority::new(&stage.scratch, "other");
    other.client("host-a");
    let pki = stage.scratch.word("pki");
    let socket = stage.scratch.word("nbd.sock");
    let uri = |rest: &str| format!("nbds+unix:///a?socket={socket}{rest}");
    for (disk, why) in [
        (
            uri(&format!("&tls-certificates={}", stage.scratch.word("other"))),
            "UnknownIssuer",
        ),
        (
            uri(&format!("&tls-certificates={pki}&tls-hostname=elsewhere.example")),
            "certificate not valid for name",
        ),
        (uri(""), "set tls_ca"),
        (
            uri("&tls-certificates=/nowhere"),
            "/nowhere/ca-cert.pem: cannot be read",
        ),
        (format!("nbd+unix:///a?socket={socket}"), "wants TLS"),
    ] {
        let (success, said) = serves_near(&stage.scratch, &disk);
        assert!(
            !success && said.to_lowercase().contains(&why.to_lowercase()),
            "{why}: {said}"
        );
    }
    daemon.stop();
}

#[test]
fn server_without_tls_is_not_talked_with_in_the_clear() {
    let scratch = Scratch::new();
    let authority = Authority::new(&scratch, "pki");
    authority.client("host-a");
    let daemon = Daemon::serve(&scratch, &["name=a,ram=8M"]);
    let uri = format!(
        "nbds+unix:///a?socket={}&tls-certificates={}",
        scratch.word("nbd.sock"),
        scratch.word("pki")
    );
    let (success, said) = serves_near(&scratch, &uri);
    assert!(!success && said.contains("refused STARTTLS"), "{said}");
    daemon.stop();
}

#[test]
fn tls_that_cannot_be_served_is_refused_at_the_start_with_what_to_do() {
    let stage = Secured::new(&[]);
    stage
        .authority
        .give(&stage.scratch.word("pki"), "late", "localhost", Validity::Past);
    stage
        .authority
        .give(&stage.scratch.word("pki"), "second", "localhost", Validity::Today);
    let path = |file: &str| match file.starts_with('/') {
        true => file.to_owned(),
        false => stage.authority.path(file),
    };
    let disk = ["--check", "--disk", "name=a,ram=1M"].map(str::to_owned);
    let here = ["--nbd".to_owned(), "tcp:127.0.0.1:0".to_owned()];
    let files = |certificate: &str, key: &str| {
        let words = [
            "--tls",
            "require",
            "--tls-certificate",
            &path(certificate),
            "--tls-key",
            &path(key),
        ];
        words.map(str::to_owned)
    };
    let all = ["--nbd", "tcp:0.0.0.0:0"].map(str::to_owned);
    for (words, why) in [
        (
            files("server-cert.pem", "second-key.pem").to_vec(),
            "the key is not the certificate's",
        ),
        (files("late-cert.pem", "late-key.pem").to_vec(), "valid from"),
        (
            files("nowhere.pem", "server-key.pem").to_vec(),
            "nowhere.pem: cannot be read",
        ),
        (
            files("server-key.pem", "server-key.pem").to_vec(),
            "holds no certificate",
        ),
        (
            files("server-cert.pem", "server-cert.pem").to_vec(),
            "holds no key",
        ),
        (
            [
                &files("server-cert.pem", "server-key.pem")[..],
                &["--tls-ca".into(), path("client-cert.pem")],
            ]
            .concat(),
            "CN=host-a is no authority's",
        ),
        (
            [
                &files("server-cert.pem", "server-key.pem")[..],
                &["--tls-ca".into(), path("late-cert.pem")],
            ]
            .concat(),
            "CN=localhost is no authority's",
        ),
        (
            files("server-cert.pem", "/dev/zero").to_vec(),
            "is no regular file",
        ),
        (
            vec!["--tls-ca".to_owned(), path("ca-cert.pem")],
            "add tls = \"require\"",
        ),
        (
            vec!["--tls".to_owned(), "require".to_owned()],
            "add tls_certificate and tls_key",
        ),
        (
            vec!["--tls".to_owned(), "maybe".to_owned()],
            "must be off, allow or require",
        ),
        (
            [
                &files("server-cert.pem", "server-key.pem")[..],
                &["--tls-client".into(), "x=zz".into()],
            ]
            .concat(),
            "tls_ca",
        ),
        (
            [
                &stage.authority.flags()[..],
                &["--tls-client".into(), "x=zz".into()],
            ]
            .concat(),
            "names disk zz",
        ),
        (all.to_vec(), "other hosts reach tcp:0.0.0.0:0"),
        (
            [
                &all[..],
                &["--tls".into(), "allow".into()],
                &files("server-cert.pem", "server-key.pem")[2..],
            ]
            .concat(),
            "other hosts reach",
        ),
    ] {
        let words: Vec<&str> = disk
            .iter()
            .chain(&here)
            .chain(&words)
            .map(String::as_str)
            .collect();
        let output = output_within(
            Command::new(program()).arg("serve").args(&words),
            Duration::from_secs(20),
        );
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && said.contains(why),
            "{words:?}: {why}: {said}"
        );
    }
    for words in [vec!["--insecure".to_owned()], stage.authority.flags()] {
        let words: Vec<&str> = disk
            .iter()
            .chain(&all)
            .chain(&words)
            .map(String::as_str)
            .collect();
        run_serve(&words);
    }
}

fn run_serve(words: &[&str]) {
    let output = output_within(
        Command::new(program()).arg("serve").args(words),
        Duration::from_secs(20),
    );
    assert!(
        output.status.success(),
        "{words:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn keys_that_cannot_be_used_are_named_by_size_or_curve() {
    if !installed(&["openssl"]) {
        return;
    }
    let scratch = Scratch::new();
    let (certificate, key) = (scratch.word("cert.pem"), scratch.word("key.pem"));
    for (made, says) in [
        (&["rsa:1024"][..], "RSA of 1024 bits"),
        (&["rsa:2432"], "RSA of 2432 bits"),
        (&["ec", "-pkeyopt", "ec_paramgen_curve:P-521"], "ECDSA on P-521"),
        (
            &["ec", "-pkeyopt", "ec_paramgen_curve:secp256k1"],
            "ECDSA on secp256k1",
        ),
        (&["ed448"], "Ed448"),
    ] {
        let request = ["req", "-x509", "-nodes", "-subj", "/CN=localhost", "-newkey"];
        let files = ["-keyout", &key, "-out", &certificate];
        run("openssl", &[&request[..], made, &files].concat());
        let words = ["serve", "--check", "--disk", "name=a,ram=1M", "--nbd", "tcp:0"];
        let tls = [
            "--tls",
            "require",
            "--tls-certificate",
            &certificate,
            "--tls-key",
            &key,
        ];
        let output = output_within(
            Command::new(program()).args(words).args(tls),
            Duration::from_secs(20),
        );
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && said.contains(says) && said.contains("2048, 2560"),
            "{made:?}: {said}"
        );
    }
}

#[test]
fn tls_client_comes_again_over_a_take_over_and_is_never_served_in_the_clear() {
    if !installed(&["fio"]) {
        return;
    }
    let stage = Secured::new(&[]);
    let image = stage.scratch.image("vm.raw", 32 << 20);
    let up = format!("unix:{}", stage.scratch.word("up.sock"));
    let disk = format!("name=a,file={image}");
    let mut first = stage.start(&["--disk", &disk, "--upgrade-socket", &up]);
    let nbd = format!("unix:{}", stage.scratch.word("near.sock"));
    let far = format!("name=near,nbd={},reconnect=20s", stage.own_uri("a"));
    let near = Daemon::start(&["--disk", &far, "--nbd", &nbd]);
    let uri = near.uri("near");
    let load = Command::new("fio")
        .args([
            "--name=v",
            "--ioengine=nbd",
            &format!("--uri={uri}"),
            "--rw=randwrite",
            "--bs=4k",
            "--size=16m",
            "--loops=2",
        ])
        .args([
            "--iodepth=8",
            "--rate_iops=2000",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--verify_state_save=0",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("fio starts");
    std::thread::sleep(Duration::from_secs(1));
    let second = stage.start(&["--disk", &disk, "--take-over", &up]);
    let status = first.ended_within(Duration::from_secs(20));
    assert!(status.success(), "{status}: {}", first.said());
    let output = load.wait_with_output().expect("fio ends");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{said}\n{}\n{}",
        String::from_utf8_lossy(&output.stderr),
        near.said()
    );
    assert!(near.says("connection lost"), "{}", near.said());
    near.stop();
    second.stop();
}

/// Starts a daemon whose disk is at the URI, which should fail. Returns whether it started, and its
/// output.
fn serves_near(scratch: &Scratch, uri: &str) -> (bool, String) {
    let nbd = format!("unix:{}", scratch.word("near.sock"));
    let words = ["--disk", &format!("name=n,nbd={uri}"), "--nbd", &nbd];
    let output = output_within(&mut serve_command(&words), Duration::from_secs(20));
    (
        output.status.success(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

/// A server below; dropping it ends it.
struct Below(Child);

impl Below {
    fn start(command: &mut Command, socket: &str) -> Below {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .spawn();
        let below = Below(child.expect("it is installed"));
        let end = Instant::now() + Duration::from_secs(20);
        while UnixStream::connect(socket).is_err() {
            assert!(Instant::now() < end, "{command:?} does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        below
    }
}

impl Drop for Below {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
