//! Encrypted disks in turns with the kernel's dm-crypt, as `cryptsetup open` sets it up. Most machines do not have
//! it: `cargo xtask guest dm-crypt` runs these tests in a guest that does.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::crypt::{Crypt, has_tools};
use super::{MIB, serve};
use crate::common::Scratch;
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::{run, try_run};

#[test]
fn luks1_is_read_and_written_in_turns_with_dm_crypt() {
    takes_turns("--type luks1", false);
    takes_turns("--type luks1 --key-size 256", false);
}

#[test]
fn luks2_with_sectors_of_512_is_read_and_written_in_turns_with_dm_crypt() {
    takes_turns("--type luks2 --pbkdf pbkdf2 --sector-size 512", false);
}

#[test]
fn luks2_with_sectors_of_4096_is_read_and_written_in_turns_with_dm_crypt() {
    takes_turns("--type luks2 --pbkdf argon2id --sector-size 4096", false);
}

#[test]
fn luks2_with_a_detached_header_is_read_and_written_in_turns_with_dm_crypt() {
    takes_turns("--type luks2 --pbkdf pbkdf2 --sector-size 4096", true);
}

#[test]
fn luks1_with_a_detached_header_is_read_and_written_in_turns_with_dm_crypt() {
    takes_turns("--type luks1", true);
    takes_turns("--type luks1 --key-size 256", true);
}

/// Has each read what the other has written, over all of the disk.
fn takes_turns(options: &str, is_detached: bool) {
    if !has_tools(&["cryptsetup"]) || !has_device_mapper() {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let (image, header) = match is_detached {
        true => (
            scratch.image("one", 8 * MIB),
            Some(crypt.detached_as("header", options)),
        ),
        false => (crypt.format("one", 24 * MIB, options), None),
    };
    let of_header = header.as_deref().unwrap_or(&image);
    let dump = || run("cryptsetup", &["luksDump", of_header]).stdout;
    let before = dump();
    let detached = header
        .iter()
        .map(|header| format!(",header={header}"))
        .collect::<String>();
    let disks = [
        format!("name=vm1,luks=vm1-raw,key={}{detached}", crypt.key_file()),
        format!("name=vm1-raw,file={image}"),
    ];
    let (socket, mut blocks) = (scratch.path("nbd.sock"), 0);
    for generation in 1..=3 {
        let daemon = serve(&scratch, &disks);
        let mut client = Client::connect(&socket, "vm1").expect("it is served");
        blocks = client.size() / BLOCK as u64;
        for number in 0..blocks {
            let at = number * BLOCK as u64;
            if generation > 1 {
                let found = client.read(at, BLOCK).expect("a read");
                assert!(
                    found == block(number, 2 * generation - 2),
                    "{options}: block {number} of dm-crypt's"
                );
            }
            let data = block(number, 2 * generation - 1);
            client.write(at, &data).expect("a write");
        }
        client.flush().expect("a flush");
        drop(client);
        daemon.stop();
        run(
            "cryptsetup",
            &[
                "open",
                "--test-passphrase",
                "--key-file",
                &crypt.key_file(),
                of_header,
            ],
        );
        let device = Opened::open(&scratch, &crypt, &image, header.as_deref());
        let file = File::options()
            .read(true)
            .write(true)
            .open(&device.path)
            .expect("the device");
        for number in 0..blocks {
            let (at, mut found) = (number * BLOCK as u64, vec![0; BLOCK]);
            file.read_exact_at(&mut found, at).expect("a read");
            assert!(
                found == block(number, 2 * generation - 1),
                "{options}: block {number} of blkmq's"
            );
            file.write_all_at(&block(number, 2 * generation), at)
                .expect("a write");
        }
        file.sync_all().expect("a flush");
    }
    assert!(blocks > 1024, "{blocks} blocks");
    assert_eq!(dump(), before, "{options}");
}

/// A device of dm-crypt's, until it is dropped.
struct Opened {
    name: String,
    path: PathBuf,
}

impl Opened {
    fn open(scratch: &Scratch, crypt: &Crypt<'_>, image: &str, header: Option<&str>) -> Self {
        let (name, key) = (scratch.name().to_owned(), crypt.key_file());
        let mut words = vec!["open", "--key-file", &key];
        header
            .iter()
            .for_each(|header| words.extend(["--header", header]));
        words.extend([image, &name]);
        run("cryptsetup", &words);
        let path = Path::new("/dev/mapper").join(&name);
        Self { name, path }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let said = try_run("cryptsetup", &["close", &self.name]);
        assert!(said.success || std::thread::panicking(), "{}", said.stderr);
    }
}

fn has_device_mapper() -> bool {
    // The file may be there without the driver.
    let is_there = File::open("/dev/mapper/control").is_ok();
    if !is_there {
        blkmq_testkit::skip("the kernel has no device mapper");
    }
    is_there
}
