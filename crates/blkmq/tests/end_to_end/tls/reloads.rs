//! Tests of certificates and keys that are read again while clients are connected.

use super::*;

#[test]
fn certificates_are_read_again_at_sighup() {
    if !installed(&["nbdinfo"]) {
        return;
    }
    let stage = Secured::new(&["name=a,ram=8M"]);
    let mut daemon = stage.start(&[]);
    run("nbdinfo", &[&stage.own_uri("a")]);
    let other = Authority::new(&stage.scratch, "other");
    other.server();
    other.client("host-a");
    for file in ["ca-cert.pem", "server-cert.pem", "server-key.pem"] {
        std::fs::copy(other.path(file), stage.authority.path(file)).expect("a file");
    }
    daemon.signal(Signal::HUP);
    let is_said = |line: &str| line.contains("SIGHUP: read the certificates of");
    assert!(
        daemon.wait_for(Duration::from_secs(5), is_said),
        "{}",
        daemon.said()
    );
    run("nbdinfo", &[&stage.uri("a", &stage.scratch.word("other"))]);
    assert!(
        !try_run("nbdinfo", &[stage.own_uri("a")]).success,
        "the former authority's client"
    );
    daemon.stop();
}

#[test]
fn certificates_are_read_again_by_a_call_of_their_own() {
    if !installed(&["nbdinfo"]) {
        return;
    }
    let stage = Secured::new(&["name=a,ram=8M"]);
    let control = format!("unix:{}", stage.scratch.word("control.sock"));
    let daemon = stage.start(&["--control", &control]);
    let reload = || {
        let mut command = Command::new(program());
        command.args(["ctl", "--socket", &control, "reload", "tls"]);
        let output = output_within(&mut command, Duration::from_secs(20));
        let said = [output.stdout, output.stderr].concat();
        (
            output.status.success(),
            String::from_utf8_lossy(&said).into_owned(),
        )
    };
    let other = Authority::new(&stage.scratch, "other");
    other.server();
    other.client("host-a");
    std::fs::write(stage.authority.path("server-cert.pem"), "no certificate").expect("a file");
    let (is_done, said) = reload();
    assert!(!is_done && said.contains("it keeps what it had"), "{said}");
    run("nbdinfo", &[&stage.own_uri("a")]);
    for file in ["ca-cert.pem", "server-cert.pem", "server-key.pem"] {
        std::fs::copy(other.path(file), stage.authority.path(file)).expect("a file");
    }
    let (is_done, said) = reload();
    assert!(is_done && said.contains("read the certificates of"), "{said}");
    run("nbdinfo", &[&stage.uri("a", &stage.scratch.word("other"))]);
    daemon.stop();
}

#[test]
fn hangup_moves_an_address_to_other_files_though_the_former_are_gone() {
    if !installed(&["nbdinfo"]) {
        return;
    }
    let scratch = Scratch::new();
    let authorities = ["old", "broken", "new"].map(|name| {
        let authority = Authority::new(&scratch, name);
        authority.server();
        authority.client("host-a");
        authority
    });
    let [old, broken, new] = &authorities;
    let write = |second: &Authority| {
        let export = |socket: &str, authority: &Authority| {
            let (socket, path) = (scratch.word(socket), |file| authority.path(file));
            let (certificate, key, ca) = (
                path("server-cert.pem"),
                path("server-key.pem"),
                path("ca-cert.pem"),
            );
            format!(
                "[[export]]\nnbd = \"unix:{socket}\"\ntls = \"require\"\ntls_certificate = {certificate:?}\n\
                 tls_key = {key:?}\ntls_ca = {ca:?}\n"
            )
        };
        let first = export("first.sock", broken);
        let text = format!("[disk.a]\nram = \"1M\"\n{first}{}", export("second.sock", second));
        std::fs::write(scratch.path("a.toml"), text).expect("the file can be written");
    };
    let client = |directory: &str| {
        let (socket, directory) = (scratch.word("second.sock"), scratch.word(directory));
        let uri =
            format!("nbds+unix:///a?socket={socket}&tls-certificates={directory}&tls-hostname=localhost");
        try_run("nbdinfo", &[uri]).success
    };
    write(old);
    let mut daemon = Daemon::start(&["-c", &scratch.word("a.toml")]);
    assert!(client("old") && !client("new"));
    for authority in [old, broken] {
        std::fs::remove_file(authority.path("server-cert.pem")).expect("a file");
    }
    write(new);
    daemon.signal(Signal::HUP);
    let is_read = |line: &str| line.contains("second.sock again") && line.contains("SIGHUP: ");
    assert!(
        daemon.wait_for(Duration::from_secs(20), is_read),
        "{}",
        daemon.said()
    );
    assert!(client("new") && !client("old"));
    // The message names the address whose file is missing.
    let is_named = |line: &str| line.contains("SIGHUP: export unix:") && line.contains("first.sock");
    assert!(
        daemon.wait_for(Duration::from_secs(20), is_named),
        "{}",
        daemon.said()
    );
    daemon.stop();
}

#[test]
fn change_that_is_taken_back_needs_no_files_of_certificates_again() {
    if !installed(&["nbdinfo"]) {
        return;
    }
    let scratch = Scratch::new();
    let [old, new] = ["old", "new"].map(|name| {
        let authority = Authority::new(&scratch, name);
        authority.server();
        authority.client("host-a");
        authority
    });
    let write = |authority: &Authority, last: &str, disks: &str| {
        let socket = scratch.word("first.sock");
        let [certificate, key, ca] =
            ["server-cert.pem", "server-key.pem", "ca-cert.pem"].map(|file| authority.path(file));
        let other = scratch.word("{disk}.vsock");
        let text = format!(
            "[disk.a]\nram = \"1M\"\n[disk.{last}]\nram = \"1M\"\n[[export]]\nnbd = \"unix:{socket}\"\ntls = \"require\"\n\
             tls_certificate = {certificate:?}\ntls_key = {key:?}\ntls_ca = {ca:?}\n[[export]]\n\
             vhost-user = \"unix:{other}\"\ndisks = [{disks}]\n"
        );
        std::fs::write(scratch.path("a.toml"), text).expect("the file can be written");
    };
    let client = |directory: &str| {
        let (socket, directory) = (scratch.word("first.sock"), scratch.word(directory));
        let uri =
            format!("nbds+unix:///a?socket={socket}&tls-certificates={directory}&tls-hostname=localhost");
        try_run("nbdinfo", &[uri]).success
    };
    write(&old, "b", "\"a\"");
    let mut daemon = Daemon::start(&["-c", &scratch.word("a.toml")]);
    assert!(client("old") && !client("new"));
    // What was read is known after another change, too.
    write(&old, "c", "\"a\"");
    daemon.signal(Signal::HUP);
    let is_added = |line: &str| line.contains("add disk c") && line.contains("read the certificates of");
    assert!(
        daemon.wait_for(Duration::from_secs(20), is_added),
        "{}",
        daemon.said()
    );
    // A socket cannot be made where a directory is, which the second step finds out.
    std::fs::create_dir(scratch.path("c.vsock")).expect("a directory");
    std::fs::remove_file(old.path("server-cert.pem")).expect("a file");
    write(&new, "c", "\"a\", \"c\"");
    daemon.signal(Signal::HUP);
    let is_refused = |line: &str| line.contains("SIGHUP: the configuration is not changed");
    assert!(
        daemon.wait_for(Duration::from_secs(20), is_refused),
        "{}",
        daemon.said()
    );
    assert!(
        !daemon.said().contains("to take a change back"),
        "{}",
        daemon.said()
    );
    assert!(client("old") && !client("new"));
    daemon.stop();
}
