//! Encrypted disks are what `cryptsetup` and QEMU say they are, and their keys stay where they belong.
//! Images are formatted by `cryptsetup`, which needs no root for files.

mod crypt;
mod device;
mod files;
mod guests;
pub(crate) mod keys;
mod live;
mod odd;
mod over_image;
mod qemu;
mod shares;
mod sources;
mod unlock;

use std::path::Path;

pub(crate) use self::crypt::refused;
use self::crypt::{Crypt, KEY, has_tools};
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::run;
use crate::common::{Daemon, Scratch};
use crate::qemu::qemu_io;

/// The string of an encrypted disk and of the one below.
fn disks(name: &str, image: &str, crypt: &Crypt<'_>) -> [String; 2] {
    [
        format!("name={name},luks={name}-raw,key={}", crypt.key_file()),
        format!("name={name}-raw,file={image}"),
    ]
}

fn serve(scratch: &Scratch, disks: &[String]) -> Daemon {
    Daemon::serve(scratch, &disks.iter().map(String::as_str).collect::<Vec<_>>())
}

#[test]
fn encrypted_disks_of_each_format_have_what_each_operation_left() {
    if !has_tools(&["cryptsetup", "qemu-io"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let formats = [
        ("one", "--type luks1"),
        ("short", "--type luks1 --key-size 256"),
        ("two", "--type luks2 --pbkdf pbkdf2 --sector-size 512"),
        ("large", "--type luks2 --pbkdf argon2id --sector-size 4096"),
    ];
    let mut all = Vec::new();
    for (name, options) in formats {
        let image = crypt.format(name, 48 * MIB, options);
        all.extend(disks(name, &image, &crypt));
    }
    all.push(format!(
        "name=whole,luks=stripe,header={},key={}",
        crypt.detached(),
        crypt.key_file()
    ));
    all.push("name=stripe,striped=a+b,chunk=16K".to_owned());
    all.extend(["name=a,ram=16M".to_owned(), "name=b,ram=16M".to_owned()]);
    let daemon = serve(&scratch, &all);
    for (name, _) in formats.into_iter().chain([("whole", "")]) {
        qemu_io(&daemon.uri(name), OPERATIONS);
    }
    daemon.stop();
}

#[test]
fn luks2_is_read_from_cryptsetup_and_written_for_it() {
    if !has_tools(&["cryptsetup", "qemu-io"]) {
        return;
    }
    for sector in ["512", "4096"] {
        let scratch = Scratch::new();
        let crypt = Crypt::new(&scratch);
        let plain: Vec<u8> = (0..16).flat_map(|number| block(number, 1)).collect();
        let image = crypt.encrypt("two", &plain, 8 * MIB, sector);
        let daemon = serve(&scratch, &disks("vm1", &image, &crypt));
        let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
        let found = client.read(0, plain.len()).expect("a read");
        assert!(found == plain, "sectors of {sector}");
        for number in 8..24 {
            client
                .write(number * BLOCK as u64, &block(number, 2))
                .expect("a write");
        }
        client.flush().expect("a flush");
        drop(client);
        daemon.stop();
        let decrypted = crypt.decrypt(&image);
        let found = std::fs::read(Path::new(&decrypted)).expect("it is a file");
        for number in 0..24 {
            let generation = if number < 8 { 1 } else { 2 };
            let at = number as usize * BLOCK;
            let is_there = found[at..at + BLOCK] == block(number, generation);
            assert!(is_there, "sectors of {sector}, block {number}");
        }
    }
}

#[test]
fn zeroing_is_written_discards_are_refused_and_block_status_says_data() {
    if !has_tools(&["cryptsetup", "qemu-io"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format("one", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    let daemon = serve(&scratch, &disks("vm1", &image, &crypt));
    let uri = daemon.uri("vm1");
    qemu_io(&uri, &["write -z -u 0 4M", "read -P 0 0 4M"]);
    let map = run("qemu-img", &["map", "--output=json", "-f", "raw", &uri]).stdout;
    assert!(
        map.contains("\"data\": true") && !map.contains("\"data\": false"),
        "{map}"
    );
    daemon.stop();
    let stored = std::fs::read(&image).expect("the image");
    let zeroes = stored[16 << 20..20 << 20]
        .chunks(512)
        .filter(|sector| sector.iter().all(|byte| *byte == 0));
    assert_eq!(zeroes.count(), 0, "zeroes are stored as they are");
}

#[test]
fn weights_and_state_of_an_encrypted_disk_are_those_of_the_queue_below() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format("one", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    let all = disks("vm1", &image, &crypt);
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let control = format!("unix:{}", scratch.word("control.sock"));
    let words = [
        "--nbd",
        &nbd,
        "--control",
        &control,
        "--disk",
        &all[0],
        "--disk",
        &all[1],
        "--group",
        "/vm1,weight=300",
    ];
    let daemon = Daemon::start(&words);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    client.write(0, &block(1, 1)).expect("a write");
    assert!(client.read(0, BLOCK).expect("a read") == block(1, 1));
    let said = keys::ctl(&scratch, &["list", "groups"]);
    assert!(
        said.stdout.contains("/vm1") && said.stdout.contains("300"),
        "{}",
        said.stdout
    );
    let said = keys::ctl(&scratch, &["stats", "--json"]);
    assert!(said.stdout.contains("/vm1"), "{}", said.stdout);
    daemon.stop();
}

#[test]
fn disk_that_cannot_be_opened_stays_locked_alone_and_says_why() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let cbc = crypt.format(
        "cbc",
        32 * MIB,
        "--type luks2 --pbkdf pbkdf2 --cipher aes-cbc-essiv:sha256",
    );
    let plain = scratch.image("plain", 32 * MIB);
    let broken = crypt.format("broken", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    crypt.break_header(&broken);
    let gone = scratch.word("gone");
    for (image, header, wanted) in [
        (
            &cbc,
            "",
            "its LUKS header asks for the cipher \"aes-cbc-essiv:sha256\", which is not supported",
        ),
        (
            &plain,
            "",
            "there is no LUKS header: format it by cryptsetup luksFormat",
        ),
        (&broken, "", "its LUKS header is damaged: both copies"),
        (&plain, &*format!(",header={gone}"), "No such file or directory"),
    ] {
        let mut all = disks("vm1", image, &crypt).to_vec();
        all[0] += header;
        all.push("name=other,ram=4M".to_owned());
        let daemon = keys::start(&scratch, &all, &[]);
        let is_said = daemon.says("disk vm1: stays locked while this daemon runs: ") && daemon.says(wanted);
        let said = daemon.said();
        assert!(is_said, "{wanted}\n{said}");
        assert_eq!(keys::state(&scratch, "vm1"), "locked");
        for disk in ["vm1", "vm1-raw"] {
            let client = Client::connect(&scratch.path("nbd.sock"), disk);
            assert!(client.is_err(), "{wanted}: {disk} has a client");
        }
        let mut other = Client::connect(&scratch.path("nbd.sock"), "other").expect("the others serve");
        other.write(0, &block(1, 1)).expect("a write");
        drop(other);
        let refused = keys::ctl(&scratch, &["unlock", "vm1", "--key-file", &crypt.key_file()]);
        assert!(
            !refused.success && refused.stderr.contains(wanted),
            "{}",
            refused.stderr
        );
        assert!(!daemon.said().contains(KEY.trim_end()), "{}", daemon.said());
        daemon.stop();
    }
}

#[test]
fn data_beyond_the_end_of_the_disk_below_leave_a_disk_locked() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format("one", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    let file = std::fs::File::options()
        .write(true)
        .open(&image)
        .expect("the image");
    file.set_len(16 * MIB).expect("it is cut off");
    let daemon = keys::start(&scratch, &disks("vm1", &image, &crypt), &[]);
    assert!(
        daemon.says("while this daemon runs: its data, 0 bytes from byte 16777216 on, must be whole blocks"),
        "{}",
        daemon.said()
    );
    let refused = keys::ctl(&scratch, &["unlock", "vm1", "--key-file", &crypt.key_file()]);
    assert!(
        refused
            .stderr
            .contains("its header could not be used when this daemon started"),
        "{}",
        refused.stderr
    );
    daemon.stop();
}

#[test]
fn configuration_of_encrypted_disks_that_cannot_be_is_refused_in_clear_words() {
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let over = |disk: &str| {
        let plain = scratch.image("plain", 32 * MIB);
        let mut disks = disks("vm1", &plain, &crypt).to_vec();
        disks.push(disk.to_owned());
        disks
    };
    for (disks, wanted) in [
        (
            over("name=all,linear=vm1"),
            "disk all: disk vm1 is encrypted, and cannot be below another",
        ),
        (over("name=vm2,luks=vm1-raw"), "another disk lies on vm1-raw, too"),
        (
            vec!["name=vm1,luks=gone".to_owned()],
            "disk vm1: there is no disk gone for it to lie on",
        ),
    ] {
        let said = refused(&scratch, &disks);
        assert!(said.contains(wanted), "{wanted}\n{said}");
    }
}

/// Writes of all sizes that overlap, zeroing and forced ones, and the end of the disk.
const OPERATIONS: &[&str] = &[
    "write -P 0x11 0 12M",
    "write -P 0x22 4k 132k",
    "read -P 0x11 0 4k",
    "read -P 0x22 4k 132k",
    "read -P 0x11 136k 1M",
    "write -f -P 0x44 7M 3M",
    "flush",
    "read -P 0x44 7M 3M",
    "write -z 1M 3M",
    "read -P 0 1M 3M",
    "write -z -u 7M 1M",
    "read -P 0 7M 1M",
    "read -P 0x44 8M 2M",
    "aio_write -P 0x66 8M 1M",
    "aio_write -P 0x77 9M 1M",
    "aio_write -z 10M 1M",
    "aio_write -P 0x78 11M 4k",
    "aio_flush",
    "read -P 0x66 8M 1M",
    "read -P 0x77 9M 1M",
    "read -P 0 10M 1M",
    "read -P 0x78 11M 4k",
    // Larger than what is encrypted at once.
    "write -P 0x79 3M 11M",
    "read -P 0x79 3M 11M",
];
const MIB: u64 = 1 << 20;
