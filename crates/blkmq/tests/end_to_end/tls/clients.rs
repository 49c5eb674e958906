//! Tests whether clients of other projects copy, write and compare correctly with TLS: libnbd's, QEMU's,
//! nbdkit's.

use std::process::Command;
use std::time::Duration;

use super::{Below, Secured};
use crate::common::tools::{installed, output_within, run, try_run};

#[test]
fn libnbds_tools_copy_faithfully_by_tls() {
    if !installed(&["nbdinfo", "nbdcopy"]) {
        return;
    }
    let stage = Secured::new(&["name=a,ram=32M"]);
    let image = stage.scratch.noisy_image("there.raw", 32 << 20, 7);
    let daemon = stage.start(&[]);
    assert!(daemon.says("nbds+unix:///a?"), "{}", daemon.said());
    let uri = stage.own_uri("a");
    let info = run("nbdinfo", &[&uri]);
    assert!(info.stdout.contains("newstyle-fixed with TLS"), "{}", info.stdout);
    let back = stage.scratch.word("back.raw");
    run("nbdcopy", &[&image, &uri]);
    run("nbdcopy", &[&uri, &back]);
    let same = std::fs::read(&image).expect("an image") == std::fs::read(&back).expect("its copy");
    assert!(same, "the copy differs");
    daemon.stop();
}

#[test]
fn qemu_writes_and_verifies_by_tls_of_the_latest_version_alone() {
    qemu_is_served_by(&[], &["1.3"]);
}

#[test]
fn qemu_writes_and_verifies_by_tls_1_2_where_it_is_allowed() {
    qemu_is_served_by(&["--allow-tls12"], &["1.2", "1.3"]);
}

/// Starts a daemon with these flags, to which QEMU offers one version of TLS after the other.
fn qemu_is_served_by(flags: &[&str], versions: &[&str]) {
    if !installed(&["qemu-io", "qemu-img"]) {
        return;
    }
    let stage = Secured::new(&["name=a,ram=16M"]);
    let daemon = stage.start(flags);
    let pki = stage.scratch.word("pki");
    let socket = stage.scratch.word("nbd.sock");
    let image = format!(
        "driver=nbd,server.type=unix,server.path={socket},export=a,tls-creds=t,tls-hostname=localhost"
    );
    for version in ["1.0", "1.1", "1.2", "1.3"] {
        let priority = format!("priority=NORMAL:-VERS-ALL:+VERS-TLS{version}");
        let object = format!("tls-creds-x509,id=t,dir={pki},endpoint=client,{priority}");
        let commands = [
            "write -P 0x5a 1M 3M",
            "read -P 0x5a 1M 3M",
            "read -P 0 4M 1M",
            "flush",
        ];
        let mut words = vec!["--object", &object, "--image-opts", &image];
        words.extend(commands.iter().flat_map(|command| ["-c", command]));
        let said = try_run("qemu-io", &words);
        assert_eq!(
            said.success && !said.stdout.contains("verification failed"),
            versions.contains(&version),
            "TLS {version}: {} {}",
            said.stdout,
            said.stderr
        );
    }
    daemon.stop();
}

#[test]
fn qemu_img_converts_by_tls_both_ways_and_finds_images_equal_and_different() {
    if !installed(&["qemu-img", "qemu-io"]) {
        return;
    }
    let stage = Secured::new(&["name=a,ram=24M"]);
    let there = stage.scratch.noisy_image("there.raw", 24 << 20, 11);
    let back = stage.scratch.word("back.raw");
    let daemon = stage.start(&[]);
    let (pki, socket) = (stage.scratch.word("pki"), stage.scratch.word("nbd.sock"));
    let object = format!("tls-creds-x509,id=t,dir={pki},endpoint=client");
    let disk = format!(
        "driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={socket},file.export=a,file.tls-creds=t,\
         file.tls-hostname=localhost"
    );
    let file = |path: &str| format!("driver=raw,file.driver=file,file.filename={path}");
    let convert = ["convert", "--object", &object];
    let to = ["-n", "-f", "raw", "--target-image-opts", &there, &disk];
    run("qemu-img", &[&convert[..], &to].concat());
    let from = ["--image-opts", "-O", "raw", &disk, &back];
    run("qemu-img", &[&convert[..], &from].concat());
    let same = std::fs::read(&there).expect("an image") == std::fs::read(&back).expect("its copy");
    assert!(same, "the copy differs");
    let compare = |one: &str, other: &str| {
        let words = ["compare", "--object", &object, "--image-opts", one, other];
        try_run("qemu-img", &words).success
    };
    assert!(compare(&disk, &file(&there)) && compare(&file(&back), &disk));
    // Checks that the comparison detects a difference.
    run("qemu-io", &["-f", "raw", "-c", "write -P 1 5M 512", &back]);
    assert!(!compare(&file(&back), &disk) && !compare(&disk, &file(&back)));
    daemon.stop();
}

#[test]
fn nbdkit_as_a_client_serves_on_what_it_gets_by_tls() {
    if !installed(&["nbdkit", "nbdcopy", "nbdinfo"]) {
        return;
    }
    let stage = Secured::new(&["name=a,ram=16M"]);
    let image = stage.scratch.noisy_image("there.raw", 16 << 20, 13);
    let daemon = stage.start(&[]);
    let socket = stage.scratch.word("kit.sock");
    let words = |directory: &str| {
        let server = format!("socket={}", stage.scratch.word("nbd.sock"));
        let certificates = format!("tls-certificates={directory}");
        [
            "nbd".to_owned(),
            server,
            "export=a".to_owned(),
            "tls=require".to_owned(),
            certificates,
        ]
    };
    let mut kit = Command::new("nbdkit");
    kit.args(["-f", "-U", &socket])
        .args(words(&stage.scratch.word("pki")));
    let kit = Below::start(&mut kit, &socket);
    let plain = format!("nbd+unix:///?socket={socket}");
    let back = stage.scratch.word("back.raw");
    run("nbdcopy", &["--connections=4", "--flush", &image, &plain]);
    run("nbdcopy", &["--connections=4", &plain, &back]);
    let same = std::fs::read(&image).expect("an image") == std::fs::read(&back).expect("its copy");
    assert!(same, "the copy differs");
    drop(kit);
    // Without a certificate it is refused.
    let nobody = stage.authority.directory(&stage.scratch, "nobody");
    let mut kit = Command::new("nbdkit");
    kit.args(["-U", "-"])
        .args(words(&nobody))
        .args(["--run", "nbdinfo \"$uri\""]);
    assert!(!output_within(&mut kit, Duration::from_secs(20)).status.success());
    // The same with a certificate succeeds, so the refusal has no other reason.
    let mut kit = Command::new("nbdkit");
    kit.args(["-U", "-"])
        .args(words(&stage.scratch.word("pki")))
        .args(["--run", "nbdinfo \"$uri\""]);
    assert!(output_within(&mut kit, Duration::from_secs(20)).status.success());
    daemon.stop();
}
