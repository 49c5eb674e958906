//! Tests whether a file system that is written through one client is intact when another reads it back.

use std::path::Path;

use crate::common::tools::{installed, run, try_run};
use crate::common::{Daemon, Scratch};

#[test]
fn ext4_image_written_through_qemu_is_whole_when_nbdcopy_brings_it_back() {
    let scratch = Scratch::new();
    let image = scratch.image("vm1.raw", EXT4_BYTES);
    let daemon = Daemon::serve(&scratch, &[&format!("name=vm1,file={image}")]);
    write_ext4_with_qemu(&scratch, &daemon.uri("vm1"));
    daemon.stop();
}

/// Copies a file system of [`EXT4_BYTES`] to a disk with QEMU's tool and back with libnbd's, and
/// checks it.
pub(crate) fn write_ext4_with_qemu(scratch: &Scratch, uri: &str) {
    if !installed(&["mkfs.ext4", "e2fsck", "debugfs", "qemu-img", "nbdcopy"]) {
        return;
    }
    let tree = make_tree(scratch);
    let made = scratch.image("made.raw", EXT4_BYTES);
    run("mkfs.ext4", &["-q", "-F", "-d", &tree, &made]);
    run(
        "qemu-img",
        &["convert", "-n", "-f", "raw", "-O", "raw", &made, uri],
    );
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &made, uri]);
    let back = scratch.word("back.raw");
    run("nbdcopy", &["--connections=4", uri, &back]);

    run("e2fsck", &["-f", "-n", &back]);
    for number in 0..FILES {
        let taken = scratch.word("taken");
        run("debugfs", &["-R", &format!("dump /file{number} {taken}"), &back]);
        assert_eq!(
            std::fs::read(&taken).expect("debugfs wrote it"),
            contents(number),
            "file{number}"
        );
    }
    // Checks that the check detects damage.
    damage(Path::new(&back));
    assert!(
        !try_run("e2fsck", &["-f", "-n", &back]).success,
        "e2fsck passed a damaged image"
    );
}

#[test]
fn xfs_image_written_through_nbdcopy_is_whole_when_qemu_brings_it_back() {
    let scratch = Scratch::new();
    let image = scratch.image("vm1.raw", XFS_BYTES);
    let daemon = Daemon::serve(&scratch, &[&format!("name=vm1,file={image}")]);
    write_xfs_with_nbdcopy(&scratch, &daemon.uri("vm1"));
    daemon.stop();
}

/// Copies a file system of [`XFS_BYTES`] to a disk with libnbd's tool and back with QEMU's, and
/// checks it.
pub(crate) fn write_xfs_with_nbdcopy(scratch: &Scratch, uri: &str) {
    if !installed(&["mkfs.xfs", "xfs_repair", "qemu-img", "nbdcopy"]) {
        return;
    }
    let made = scratch.image("made.raw", XFS_BYTES);
    run("mkfs.xfs", &["-q", "-f", &made]);
    run("nbdcopy", &["--connections=4", "--flush", &made, uri]);
    let back = scratch.word("back.raw");
    run("qemu-img", &["convert", "-f", "raw", "-O", "raw", uri, &back]);
    run("xfs_repair", &["-n", "-f", &back]);
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &made, &back]);
}

/// A directory of small and large files, to be copied into an image.
fn make_tree(scratch: &Scratch) -> String {
    let tree = scratch.word("tree");
    std::fs::create_dir(&tree).expect("a directory can be made");
    for number in 0..FILES {
        std::fs::write(Path::new(&tree).join(format!("file{number}")), contents(number))
            .expect("a file can be made");
    }
    tree
}

fn contents(number: usize) -> Vec<u8> {
    (0..number * 150_001)
        .map(|index| (index * 31 + index / 509 + number) as u8)
        .collect()
}

/// Overwrites the group descriptors, which follow the superblock, so that the check must fail.
fn damage(image: &Path) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options()
        .write(true)
        .open(image)
        .expect("the copy opens");
    file.write_all_at(&[0xff; 8192], 4096)
        .expect("the copy can be damaged");
}

const FILES: usize = 12;
pub(crate) const EXT4_BYTES: u64 = 64 << 20;
/// The smallest file system that mkfs.xfs makes has 300 MiB.
pub(crate) const XFS_BYTES: u64 = 320 << 20;
