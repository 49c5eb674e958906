//! Decides whether a file system written through one client is whole when another brings it back.

use std::path::Path;

use crate::common::tools::{installed, run, try_run};
use crate::common::{Daemon, Scratch};

#[test]
fn an_ext4_image_written_through_qemu_is_whole_when_nbdcopy_brings_it_back() {
    if !installed(&["mkfs.ext4", "e2fsck", "debugfs", "qemu-img", "nbdcopy"]) {
        return;
    }
    let scratch = Scratch::new();
    let tree = make_tree(&scratch);
    let made = scratch.image("made.raw", 64 * MIB);
    run("mkfs.ext4", &["-q", "-F", "-d", &tree, &made]);
    let image = scratch.image("vm1.raw", 64 * MIB);
    let daemon = Daemon::serve(&scratch, &[&format!("name=vm1,file={image}")]);
    run(
        "qemu-img",
        &[
            "convert",
            "-n",
            "-f",
            "raw",
            "-O",
            "raw",
            &made,
            &daemon.uri("vm1"),
        ],
    );
    let back = scratch.word("back.raw");
    run("nbdcopy", &["--connections=4", &daemon.uri("vm1"), &back]);
    daemon.stop();

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
    // The check of the check.
    damage(Path::new(&back));
    assert!(
        !try_run("e2fsck", &["-f", "-n", &back]).success,
        "e2fsck passed a damaged image"
    );
}

#[test]
fn an_xfs_image_written_through_nbdcopy_is_whole_when_qemu_brings_it_back() {
    if !installed(&["mkfs.xfs", "xfs_repair", "qemu-img", "nbdcopy"]) {
        return;
    }
    let scratch = Scratch::new();
    let made = scratch.image("made.raw", 320 * MIB);
    run("mkfs.xfs", &["-q", "-f", &made]);
    let image = scratch.image("vm1.raw", 320 * MIB);
    let daemon = Daemon::serve(&scratch, &[&format!("name=vm1,file={image}")]);
    run(
        "nbdcopy",
        &["--connections=4", "--flush", &made, &daemon.uri("vm1")],
    );
    let back = scratch.word("back.raw");
    run(
        "qemu-img",
        &["convert", "-f", "raw", "-O", "raw", &daemon.uri("vm1"), &back],
    );
    daemon.stop();
    run("xfs_repair", &["-n", "-f", &back]);
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &made, &back]);
}

/// A directory of files small and large, to be copied into an image.
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

/// Overwrites what follows the superblock: the group descriptors, which the check must miss.
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
const MIB: u64 = 1 << 20;
