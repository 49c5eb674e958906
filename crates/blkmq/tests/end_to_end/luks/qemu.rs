//! Images in QEMU's format `luks`, which is LUKS1: each reads what the other has written, on images that `qemu-img` or
//! `cryptsetup` has formatted, with the header on the disk or detached.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

use super::crypt::{Crypt, has_tools};
use super::{MIB, disks, serve};
use crate::common::Scratch;
use crate::common::tools::run;
use crate::qemu::qemu_io;

#[test]
fn image_that_qemu_has_formatted_is_read_from_it_and_written_for_it() {
    if !has_tools(&["qemu-img", "qemu-io", "cryptsetup"]) {
        return;
    }
    for options in ["", ",cipher-alg=aes-128,hash-alg=sha1", ",hash-alg=sha512"] {
        let scratch = Scratch::new();
        let crypt = Crypt::new(&scratch);
        let image = scratch.word("image");
        let options = format!("key-secret=key,iter-time=10{options}");
        let secret = secret(&crypt);
        let words = [
            "create", "-q", "-f", "luks", "--object", &secret, "-o", &options, &image, "16M",
        ];
        run("qemu-img", &words);
        let before = dump(&image);
        takes_turns(&crypt, &image, || {
            let daemon = serve(&scratch, &disks("vm1", &image, &crypt));
            (daemon.uri("vm1"), daemon)
        });
        assert_eq!(dump(&image), before, "{options}");
    }
}

#[test]
fn image_that_cryptsetup_has_formatted_is_read_from_qemu_and_written_for_it() {
    if !has_tools(&["cryptsetup", "qemu-io"]) {
        return;
    }
    for options in ["", " --key-size 256"] {
        let scratch = Scratch::new();
        let crypt = Crypt::new(&scratch);
        let image = crypt.format("one", 20 * MIB, &format!("--type luks1{options}"));
        takes_turns(&crypt, &image, || {
            let daemon = serve(&scratch, &disks("vm1", &image, &crypt));
            (daemon.uri("vm1"), daemon)
        });
    }
}

/// QEMU reads the header on the image, and the daemon one that is detached.
#[test]
fn data_of_a_detached_luks1_header_are_those_that_qemu_has_behind_it() {
    if !has_tools(&["cryptsetup", "qemu-io"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let header = crypt.detached_as("header", "--type luks1");
    let bytes = std::fs::read(&header).expect("the header");
    // The daemon is told of data that begin with the disk, as cryptsetup has written it.
    assert_eq!(bytes[PAYLOAD_OFFSET..PAYLOAD_OFFSET + 4], [0; 4]);
    let image = scratch.image("one", 20 * MIB);
    let start = bytes.len() as u64;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&image)
        .expect("the image");
    file.write_all_at(&bytes, 0).expect("a header");
    let sectors = u32::try_from(start / 512).expect("it is small").to_be_bytes();
    file.write_all_at(&sectors, PAYLOAD_OFFSET as u64)
        .expect("where its data begin");
    let key = crypt.key_file();
    let disks = [
        format!("name=vm1,luks=part,header={header},key={key}"),
        format!("name=part,linear=raw:{start}:16M"),
        format!("name=raw,file={image}"),
    ];
    takes_turns(&crypt, &image, || {
        let daemon = serve(&scratch, &disks);
        (daemon.uri("vm1"), daemon)
    });
    let words = [
        "open",
        "--test-passphrase",
        "--key-file",
        &key,
        "--header",
        &header,
        &image,
    ];
    run("cryptsetup", &words);
}

/// Has the daemon and QEMU write to an image in turns, and each read what the other has written.
fn takes_turns(crypt: &Crypt<'_>, image: &str, start: impl Fn() -> (String, crate::common::Daemon)) {
    let by_qemu = |commands: &[&str]| {
        let secret = secret(crypt);
        let options = format!("driver=luks,key-secret=key,file.filename={image}");
        let mut words = vec!["--object", &secret, "--image-opts", &options];
        commands.iter().for_each(|command| words.extend(["-c", *command]));
        let said = run("qemu-io", &words).stdout;
        assert!(!said.contains("failed") && !said.contains("error"), "{said}");
    };
    let by_daemon = |commands: &[&str]| {
        let (uri, daemon) = start();
        qemu_io(&uri, commands);
        daemon.stop();
    };
    by_qemu(&["write -P 0x11 0 16M", "write -P 0x22 1M 77k", "flush"]);
    by_daemon(&[
        "read -P 0x11 0 1M",
        "read -P 0x22 1M 77k",
        "read -P 0x11 1127424 15649792",
        "write -P 0x41 1M 3M",
        "write -z 2M 64k",
        // Not whole sectors of 4096 bytes.
        "write -P 0x42 10486272 1536",
        "flush",
    ]);
    by_qemu(&[
        "read -P 0x11 0 1M",
        "read -P 0x41 1M 1M",
        "read -P 0 2M 64k",
        "read -P 0x41 3M 1M",
        "read -P 0x11 10485760 512",
        "read -P 0x42 10486272 1536",
        "read -P 0x11 10487808 4M",
        "write -P 0x77 5M 1M",
        "write -z 16252928 512k",
    ]);
    by_daemon(&[
        "read -P 0x77 5M 1M",
        "read -P 0 16252928 512k",
        "read -P 0x41 3M 1M",
    ]);
}

fn secret(crypt: &Crypt<'_>) -> String {
    format!("secret,id=key,file={}", crypt.key_file())
}

fn dump(image: &str) -> String {
    run("cryptsetup", &["luksDump", image]).stdout
}

/// Where a header of LUKS1 says where its data begin, in sectors of 512 bytes, in the network's order.
const PAYLOAD_OFFSET: usize = 104;
