//! Clients of sectors and of bytes on disks with blocks of 4096 that lie on other disks, as on files themselves.

use std::path::Path;

use blkmq_testkit::Random;

use crate::common::daemon::program;
use crate::common::nbd::{Client, Command, FLAG_FUA};
use crate::common::{Daemon, Scratch};

#[test]
fn requests_of_any_size_are_served_on_mapped_disks_images_and_memory() {
    let scratch = Scratch::new();
    let image = scratch.word("image.qcow2");
    let made = std::process::Command::new(program())
        .args(["image", "create", &image, &DISK_BYTES.to_string()])
        .status();
    assert!(made.is_ok_and(|status| status.success()), "an image");
    let file = |name: &str, bytes| {
        let image = scratch.image(&format!("{name}.raw"), bytes);
        format!("name={name},file={image},block_size=4096")
    };
    let half = DISK_BYTES as u64 / 2;
    let disks = [
        // Parts that are not in the order of their files.
        "name=linear,linear=a:128K+b+a:0:128K".to_owned(),
        file("a", half),
        file("b", half),
        "name=striped,striped=c+d,chunk=4K".to_owned(),
        file("c", half),
        file("d", half),
        "name=multipath,multipath=e".to_owned(),
        file("e", 2 * half),
        // Its members have sectors of 512 bytes, and only the disk above has large blocks.
        "name=above,striped=f+g,chunk=8K,block_size=4096".to_owned(),
        format!("name=f,file={}", scratch.image("f.raw", half)),
        format!("name=g,file={}", scratch.image("g.raw", half)),
        "name=deep,linear=inner".to_owned(),
        "name=inner,striped=h+i,chunk=16K".to_owned(),
        file("h", half),
        file("i", half),
        format!("name=image,qcow2={image},block_size=4096"),
        format!("name=ram,ram={DISK_BYTES},block_size=4096"),
    ];
    let disks: Vec<&str> = disks.iter().map(String::as_str).collect();
    let daemon = Daemon::serve(&scratch, &disks);
    for disk in ["linear", "striped", "multipath", "above", "deep", "image", "ram"] {
        serves_any_size(&scratch.path("nbd.sock"), disk);
    }
    daemon.stop();
}

/// Checks that a disk of [`DISK_BYTES`] zeroes with blocks of 4096 serves clients that know nothing of its blocks, one
/// after the other and side by side.
pub(crate) fn serves_any_size(socket: &Path, disk: &str) {
    let mut content = vec![0; DISK_BYTES];
    odd_requests_find_what_they_wrote(socket, disk, &mut content);
    neighbours_in_one_block_keep_what_each_wrote(socket, disk, &mut content);
    let mut client = Client::connect(socket, disk).expect("it is served");
    assert_eq!(client.size(), DISK_BYTES as u64, "{disk}");
    let found = client.read(0, DISK_BYTES).expect("a read");
    let differs = found.iter().zip(&content).position(|(a, b)| a != b);
    assert_eq!(differs, None, "{disk}: byte that differs");
}

/// One client with reads, writes and zeroes at any byte.
fn odd_requests_find_what_they_wrote(socket: &Path, disk: &str, content: &mut [u8]) {
    let mut client = Client::connect(socket, disk).expect("it is served");
    let mut random = Random::new(SEED);
    for number in 0..400 {
        let bytes = 1 + random.below(random_limit(number)) as usize;
        let at = random.index(content.len() - bytes + 1);
        // Half of them are of whole sectors.
        let (at, bytes) = match random.below(2) {
            0 => (at / 512 * 512, bytes.next_multiple_of(512)),
            _ => (at, bytes),
        };
        let own = at..content.len().min(at + bytes);
        let what = format!("{disk}, seed {SEED}, request {number}: {own:?}");
        match random.below(6) {
            0 => content[own.clone()].fill(0),
            _ => content[own.clone()].copy_from_slice(&random.bytes(own.len())),
        }
        let is_zero = content[own.clone()].iter().all(|byte| *byte == 0);
        let flags = [0, FLAG_FUA][random.index(2)];
        let (command, data) = match is_zero {
            true => (Command::WriteZeroes, &[][..]),
            false => (Command::Write, &content[own.clone()]),
        };
        let sent = client.send(command, flags, own.start as u64, own.len() as u32, data);
        sent.expect("it is taken");
        client
            .reply()
            .unwrap_or_else(|error| panic!("{what}: {command:?}: {error}"));
        // With its neighbours, of which it must have changed nothing.
        let around = own.start.saturating_sub(5000)..content.len().min(own.end + 5000);
        let found = client.read(around.start as u64, around.len()).expect("a read");
        assert!(found == content[around], "{what}");
    }
}

/// Requests of all sizes: mostly within a block or two, some over chunks and members.
fn random_limit(number: u64) -> u64 {
    [600, 5000, 5000, 40_000][number as usize % 4]
}

/// Two clients side by side, one with the even sectors of each block and one with the odd ones.
fn neighbours_in_one_block_keep_what_each_wrote(socket: &Path, disk: &str, content: &mut [u8]) {
    const SECTORS: usize = 256;
    std::thread::scope(|scope| {
        for own in [0, 1] {
            scope.spawn(move || {
                let mut client = Client::connect(socket, disk).expect("it is served");
                for round in 0..ROUNDS {
                    // Several under way, so that those of a block meet.
                    for sector in (own..SECTORS).step_by(2) {
                        let data = [value(sector, round); 512];
                        let sent = client.send(Command::Write, 0, sector as u64 * 512, 512, &data);
                        sent.expect("it is taken");
                    }
                    for _ in 0..SECTORS / 2 {
                        client.reply().expect("a write");
                    }
                }
            });
        }
    });
    for (sector, bytes) in content.chunks_mut(512).take(SECTORS).enumerate() {
        bytes.fill(value(sector, ROUNDS - 1));
    }
}

fn value(sector: usize, round: usize) -> u8 {
    (sector * 31 + round * 7 + 1) as u8
}

pub(crate) const DISK_BYTES: usize = 512 << 10;
const ROUNDS: usize = 10;
const SEED: u64 = 37;
