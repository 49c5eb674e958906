//! Tests of a hardware context on filesystems that run full: small ones of the tests' own, which need
//! root.

use std::fs::File;
use std::path::PathBuf;
use std::process::Command;

use blkmq_core::bio::Flags;

use super::tests::{Rig, pattern, rig};
use super::*;
use crate::file::Direct;
use crate::testing::{Mounted, Scratch, request, scratch_file, scratch_file_in};

/// An image of a small ext4, or none, aloud.
fn ext4_image(name: &str, bytes: u64) -> Option<Scratch> {
    let image = scratch_file(name, bytes);
    let made = Command::new("mkfs.ext4").arg("-q").arg(&*image).output();
    if made.is_ok_and(|output| output.status.success()) {
        return Some(image);
    }
    blkmq_testkit::skip("no ext4 can be made (it needs mkfs.ext4)");
    None
}

#[test]
fn full_filesystem_is_no_space_for_the_write_that_needs_it_and_for_no_other() {
    let Some(tmpfs) = Mounted::tmpfs("full", "256k") else {
        return;
    };
    let path = scratch_file_in(&tmpfs.0, "disk", 1 << 20);
    let mut rig = rig(&path, Direct::Auto);
    let mut data = pattern(2, 192 << 10);
    assert_eq!(rig.write(Flags::NONE, 0, &mut data), Status::Ok);
    assert_eq!(
        rig.write(Flags::NONE, 512 << 10, &mut data),
        Status::NoSpace,
        "cut short, then refused"
    );
    assert_eq!(rig.write(Flags::NONE, 0, &mut data), Status::Ok);
    assert_eq!(rig.run(&request(Op::Discard, 0, 1 << 20)), Status::Ok);
    assert_eq!(rig.write(Flags::NONE, 512 << 10, &mut data), Status::Ok);
}

/// Writes with FUA until there is no room. Returns how many pieces were written.
fn fill(rig: &mut Rig) -> u64 {
    let mut at = 0;
    loop {
        match rig.write(Flags::FUA, at * PIECE, &mut pattern(at as u8, PIECE as usize)) {
            Status::Ok => at += 1,
            Status::NoSpace => return at,
            other => panic!("piece {at}: {other:?}"),
        }
    }
}

#[test]
fn fua_writes_that_fill_a_filesystem_through_the_page_cache_are_there() {
    let Some(image) = ext4_image("ext4-image", 8 << 20) else {
        return;
    };
    let Some(mounted) = Mounted::loop_device("ext4-full", "ext4", &image) else {
        return;
    };
    let path = scratch_file_in(&mounted.0, "disk", 64 << 20);
    let mut rig = rig(&path, Direct::Off);
    let written = fill(&mut rig);
    assert!(written > 4, "{written} pieces");
    assert_eq!(
        rig.run(&request(Op::Flush, 0, 0)),
        Status::Ok,
        "the write that had no room has lost nothing of others"
    );
    for at in 0..written {
        let mut seen = vec![0; PIECE as usize];
        assert_eq!(rig.read(at * PIECE, &mut seen), Status::Ok);
        assert!(seen == pattern(at as u8, PIECE as usize), "piece {at}");
    }
    assert_eq!(rig.run(&request(Op::Discard, 0, PIECE)), Status::Ok);
    let mut data = pattern(77, 4096);
    assert_eq!(
        rig.write(Flags::FUA, 0, &mut data),
        Status::Ok,
        "there is room again"
    );
}

#[test]
fn after_writes_that_found_no_room_below_the_page_cache_no_flush_succeeds() {
    let Some(tmpfs) = Mounted::tmpfs("thin", "1m") else {
        return;
    };
    // A device that has promised more than there is: the page cache takes what cannot be written out.
    let backing = scratch_file_in(&tmpfs.0, "thin", 8 << 20);
    let attached = Command::new("losetup")
        .args(["--find", "--show"])
        .arg(&*backing)
        .output();
    let Some(output) = attached.ok().filter(|output| output.status.success()) else {
        blkmq_testkit::skip("no loop device can be attached (it needs root)");
        return;
    };
    let device = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
    let result = std::panic::catch_unwind(|| {
        let mut rig = rig(&device, Direct::Off);
        let mut data = pattern(5, 1 << 20);
        for at in 0..4 {
            assert_eq!(rig.write(Flags::NONE, at << 20, &mut data), Status::Ok);
        }
        // Somebody else has it written out, and the kernel drops what it cannot write.
        let other = File::options().write(true).open(&device).unwrap();
        other.sync_all().expect_err("there is no room for 4 MiB");
        let told = rig.write(Flags::FUA, 0, &mut data[..4096]);
        assert!(
            !told.is_ok(),
            "the kernel tells the next one who syncs, and no one else"
        );
        assert!(
            !rig.run(&request(Op::Flush, 0, 0)).is_ok(),
            "what was written before is gone"
        );
    });
    let detached = Command::new("losetup").arg("-d").arg(&device).status();
    assert!(detached.is_ok_and(|status| status.success()));
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

/// What the tests write at once.
const PIECE: u64 = 256 << 10;
