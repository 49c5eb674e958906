//! Encrypted disks that a running daemon gets, as files of this host (FUSE).

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::mount::{UnmountFlags, unmount};

use super::MIB;
use super::crypt::{Crypt, has_tools};
use super::keys::state;
use super::live::{client, done};
use crate::common::pattern::{BLOCK, block};
use crate::common::{Daemon, Scratch};
use crate::fuse::may_mount;

#[test]
fn encrypted_disk_that_is_added_is_a_file_whose_content_cryptsetup_reads() {
    if !has_tools(&["cryptsetup"]) || !may_mount() {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format("one", 32 * MIB, "--type luks2 --pbkdf pbkdf2 --sector-size 4096");
    let stage = Stage::new(&scratch, &["name=other,ram=4M"]);
    // The export has all disks. The one below is none of them, since it comes in the same change.
    let more = format!(
        "[disk.vm1]\nluks = \"raw\"\nkey = {:?}\n[disk.raw]\nfile = {image:?}\n",
        crypt.key_file()
    );
    let config = scratch.word("new.toml");
    std::fs::write(&config, done(&scratch, &["dump"]) + &more).expect("a configuration");
    done(&scratch, &["apply", &config]);
    assert!(!is_mounted(&stage.file("raw")), "the disk below is a file");
    let (path, mut expected) = (stage.file("vm1"), vec![0; 2 << 20]);
    let file = open(&path);
    for number in 0..64 {
        file.write_all_at(&block(number, 1), number * BLOCK as u64)
            .expect("a write");
        expected[number as usize * BLOCK..][..BLOCK].copy_from_slice(&block(number, 1));
    }
    // Blocks between others, and over several pieces of encryption.
    for (at, bytes) in [(8192, 4096), (73 * BLOCK, 50 * BLOCK), (1 << 20, 1 << 19)] {
        file.write_all_at(&vec![(at >> 12) as u8 | 1; bytes], at as u64)
            .expect("a write");
        expected[at..at + bytes].fill((at >> 12) as u8 | 1);
    }
    file.sync_all().expect("a flush");
    let mut nbd = client(&scratch, "vm1");
    let written = [0..64 * BLOCK, 73 * BLOCK..123 * BLOCK, 1 << 20..3 << 19];
    for range in &written {
        let found = nbd.read(range.start as u64, range.len()).expect("a read");
        assert!(found == expected[range.clone()], "{range:?} by NBD");
    }
    // What another client writes is what a file that is opened later has.
    nbd.write(3 << 20, &block(9, 2)).expect("a write");
    drop((nbd, file));
    let (file, mut found) = (open(&path), vec![0; BLOCK]);
    file.read_exact_at(&mut found, 3 << 20).expect("a read");
    assert!(found == block(9, 2), "what an NBD client wrote");
    drop(file);
    done(&scratch, &["set", "export", &stage.all(), "disks=[\"other\"]"]);
    assert!(!is_mounted(&path), "it is no file any more");
    done(&scratch, &["remove", "disk", "vm1"]);
    done(&scratch, &["remove", "disk", "raw"]);
    let plain = std::fs::read(crypt.decrypt(&image)).expect("it is a file");
    for range in written {
        assert!(
            plain[range.clone()] == expected[range.clone()],
            "{range:?} by cryptsetup"
        );
    }
    stage.daemon.stop();
}

#[test]
fn locked_disk_that_is_added_is_no_file_until_it_is_exported_when_it_is_open() {
    if !has_tools(&["cryptsetup"]) || !may_mount() {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format("one", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    let stage = Stage::new(&scratch, &["name=other,ram=4M"]);
    done(&scratch, &["set", "export", &stage.all(), "disks=[\"other\"]"]);
    done(&scratch, &["add", "disk", "raw", &format!("file={image}")]);
    done(&scratch, &["add", "disk", "vm1", "luks=raw"]);
    assert_eq!(state(&scratch, "vm1"), "locked");
    let path = stage.file("vm1");
    let export = format!("fuse={}", path.display());
    let add = ["add", "export", &export, "disks=[\"vm1\"]"];
    // The export is there, and its file goes at once.
    done(&scratch, &add);
    let limit = Instant::now() + Duration::from_secs(10);
    while is_mounted(&path) {
        assert!(Instant::now() < limit, "a locked disk is a file");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(
        stage.daemon.says("the disk is locked: blkmq ctl unlock opens it"),
        "{}",
        stage.daemon.said()
    );
    done(&scratch, &["remove", "export", &path.to_string_lossy()]);
    done(&scratch, &["unlock", "vm1", "--key-file", &crypt.key_file()]);
    done(&scratch, &add);
    let (file, mut found) = (open(&path), vec![0; BLOCK]);
    file.write_all_at(&block(3, 1), 0).expect("a write");
    file.sync_all().expect("a flush");
    file.read_exact_at(&mut found, 0).expect("a read");
    assert!(found == block(3, 1));
    drop(file);
    stage.daemon.stop();
}

/// A daemon that serves all disks as files.
struct Stage {
    daemon: Daemon,
    files: Files,
}

/// The directory of the files. A test that has failed leaves them mounted, until this is dropped.
struct Files(PathBuf);

impl Stage {
    fn new(scratch: &Scratch, disks: &[&str]) -> Self {
        let directory = scratch.path("files");
        std::fs::create_dir(&directory).expect("a directory");
        let addresses = ["nbd.sock", "control.sock"].map(|name| format!("unix:{}", scratch.word(name)));
        let all = directory.join("{disk}").to_string_lossy().into_owned();
        let mut words = vec!["--nbd", &addresses[0], "--control", &addresses[1], "--fuse", &all];
        words.extend(["--sandbox", "off"]);
        disks.iter().for_each(|disk| words.extend(["--disk", disk]));
        Self {
            daemon: Daemon::start(&words),
            files: Files(directory),
        }
    }

    fn file(&self, disk: &str) -> PathBuf {
        self.files.0.join(disk)
    }

    /// The address of the export.
    fn all(&self) -> String {
        self.file("{disk}").to_string_lossy().into_owned()
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        for disk in ["vm1", "raw", "other"] {
            // Whose daemon has ended answers no question whether it is mounted.
            let _ = unmount(self.0.join(disk), UnmountFlags::DETACH);
        }
    }
}

fn open(path: &Path) -> File {
    File::options()
        .read(true)
        .write(true)
        .open(path)
        .expect("the disk opens")
}

/// Says whether something else than the directory's filesystem is there.
fn is_mounted(path: &Path) -> bool {
    let device = |path: &Path| std::fs::metadata(path).map(|data| data.dev()).ok();
    device(path).is_some_and(|of_file| path.parent().and_then(device) != Some(of_file))
}
