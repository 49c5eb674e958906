//! Discards and zeroing of files with many extents: what others get meanwhile. The clock is a real one here, since the size
//! of the pieces follows the time that the filesystem takes.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use std::time::Instant as Clock;

use blkmq_core::bio::Flags;
use blkmq_core::time::Nanos;
use blkmq_host::device::Device;

use super::tests::{Rig, rig};
use super::*;
use crate::file::part::Part;
use crate::file::{Direct, FileConfig, FileDevice, FileDisk};
use crate::mapping::Mapping;
use crate::testing::{Scratch, cookie, flagged, lend, request, request_with, scratch_file};

/// A file in which every second block of 4 KiB is an extent.
fn fragmented(name: &str, bytes: u64) -> Scratch {
    let path = scratch_file(name, bytes);
    let file = File::options().write(true).open(&*path).unwrap();
    for at in (0..bytes).step_by(8192) {
        file.write_all_at(&[1; 4096], at + 4096).unwrap();
    }
    file.sync_all().unwrap();
    path
}

/// What a reader with one read in flight got while another request was under way.
#[derive(Debug, Default)]
struct Reads {
    /// Those that ended when a part of the other request was done.
    between: u32,
    longest: Nanos,
}

/// Carries out a request, and reads the file's last block again and again until it has ended.
fn run_beside_reader(rig: &mut Rig, rq: &Request) -> (Status, Reads) {
    let (clock, mut reads) = (Clock::now(), Reads::default());
    let now = || Instant(1) + Nanos(clock.elapsed().as_nanos() as u64);
    let mut memory = Mapping::new(4096).unwrap();
    let last = rig.device.disks()[0].size() - 4096;
    let read = request_with(Op::Read, Flags::NONE, 0, last, &[lend(memory.bytes_mut())]);
    assert_eq!(rig.hctx.issue(rq, cookie(0), true, now()), Issued::Queued);
    let (mut status, mut sent, mut done) = (None, None, Vec::new());
    while status.is_none() || sent.is_some() {
        if sent.is_none() {
            sent = Some(now());
            assert_eq!(rig.hctx.issue(&read, cookie(1), true, now()), Issued::Queued);
        }
        rig.ring.wait(None);
        rig.ring.reap();
        rig.hctx.reap(now(), &mut done);
        let moved = rig.hctx.slots[0].moved;
        for done in done.drain(..) {
            if done.cookie == cookie(0) {
                status = Some(done.status);
                continue;
            }
            assert_eq!(done.status, Status::Ok);
            let since = sent.take().expect("one read is in flight");
            reads.longest = reads.longest.max(now().since(since));
            reads.between += u32::from(moved > 0);
        }
    }
    (status.unwrap(), reads)
}

/// A file as a loop device, until it is dropped.
struct Loop(String);

impl Loop {
    /// `None` without the permission or the tool, which is said.
    fn new(image: &Scratch) -> Option<Self> {
        let made = Command::new("losetup")
            .args(["--show", "-f"])
            .arg(&**image)
            .output();
        match made {
            Ok(output) if output.status.success() => {
                Some(Self(String::from_utf8(output.stdout).unwrap().trim().to_owned()))
            }
            _ => {
                blkmq_testkit::skip("no loop device can be made (it needs losetup, and root)");
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.0]).status();
    }
}

#[test]
fn trim_of_a_block_device_gives_back_what_no_zeroing_would() {
    let image = scratch_file("trimmed-loop", BYTES);
    std::fs::write(&*image, vec![7; BYTES as usize]).unwrap();
    let Some(device) = Loop::new(&image) else { return };
    let mut rig = rig(Path::new(&device.0), Direct::Auto);
    let limits = rig.device.limits();
    assert_eq!((limits.discard_max > 0, limits.discard_granularity), (true, 4096));
    // As of a thin volume or null_blk: it has discards, and no zeroing that frees.
    let disk = rig.device.disks().remove(0);
    disk.lacks.punching.store(true, Ordering::Relaxed);
    let blocks = || std::fs::metadata(&*image).unwrap().blocks();
    let before = blocks();
    disk.lacks.discarding.store(true, Ordering::Relaxed);
    assert_eq!(rig.run(&request(Op::Discard, 0, BYTES / 2)), Status::Ok);
    assert_eq!(blocks(), before, "without the command nothing is given back");
    disk.lacks.discarding.store(false, Ordering::Relaxed);
    assert_eq!(rig.run(&request(Op::Discard, 0, BYTES / 2)), Status::Ok);
    let after = blocks();
    assert!(after <= before / 2 + 64, "{before} blocks before, {after} after");
    assert!(disk.may_discard(), "the command is known");
    drop((rig, device));
    let content = std::fs::read(&*image).unwrap();
    assert!(content[BYTES as usize / 2..].iter().all(|byte| *byte == 7));
}

#[test]
fn trim_is_not_offered_where_it_gives_nothing_back() {
    let image = scratch_file("no-discard", BYTES);
    let offered = |path: &Path, change: &dyn Fn(&mut FileDisk)| {
        let config = FileConfig {
            path: path.to_owned(),
            ..FileConfig::default()
        };
        let mut disk = FileDisk::open(&config).unwrap();
        change(&mut disk);
        FileDevice::new(vec![disk], 8).unwrap().limits().discard_max > 0
    };
    assert!(offered(&image, &|_| {}));
    assert!(!offered(&image, &|disk| *disk.lacks.punching.get_mut() = true));
    let Some(device) = Loop::new(&image) else { return };
    let device = Path::new(&device.0);
    assert!(offered(device, &|_| {}));
    // It has zeroing that frees, and no discards.
    assert!(!offered(device, &|disk| disk.discards.max = 0));
}

#[test]
fn reads_of_a_file_with_many_extents_go_on_while_it_is_trimmed() {
    for flags in [None, Some(Flags::NONE), Some(Flags::NO_UNMAP)] {
        let path = fragmented("trimmed", BYTES);
        let mut rig = rig(&path, Direct::Auto);
        let rq = match flags {
            None => request(Op::Discard, 0, BYTES - 4096),
            Some(flags) => flagged(Op::WriteZeroes, flags, 0, BYTES - 4096),
        };
        let (status, reads) = run_beside_reader(&mut rig, &rq);
        assert_eq!(status, Status::Ok);
        assert!(reads.between > 0, "{flags:?}: {reads:?}");
        let seen = std::fs::read(&*path).unwrap();
        let (trimmed, last) = seen.split_at((BYTES - 4096) as usize);
        assert!(
            trimmed.iter().all(|byte| *byte == 0) && last == [1; 4096],
            "{flags:?}"
        );
    }
}

/// The slot of a request of 8 MiB whose first piece the kernel has, and what it is to do next after `result`, which comes
/// after `time`.
fn after_first_piece(rig: &Rig, rq: &Request, result: i32, time: Nanos) -> (Slot, Next) {
    let disk = &rig.device.disks()[0];
    let mut slot = Slot::new(&Part::whole(rq), cookie(0));
    assert_eq!(slot.start(disk), None);
    slot.pushed(disk, Instant(1));
    let next = slot.take_result(result, disk, Instant(1) + time);
    (slot, next)
}

#[test]
fn pieces_of_a_trim_follow_one_another_and_its_fua_is_one_sync_at_the_end() {
    let path = scratch_file("pieces", BYTES);
    let rig = rig(&path, Direct::Auto);
    let disk = &rig.device.disks()[0];
    let rq = flagged(Op::WriteZeroes, Flags::FUA, 0, BYTES);
    let (mut slot, mut next) = after_first_piece(&rig, &rq, 0, Nanos::ZERO);
    let mut moves = Vec::new();
    while let Next::Submit(moved) = next {
        moves.push(moved >> 20);
        slot.pushed(disk, Instant(1));
        next = slot.take_result(0, disk, Instant(1));
    }
    assert_eq!(moves, [1, 2, 4, 0], "the last 1 MiB ends with the sync");
    assert_eq!(next, Next::End(Status::Ok));
}

#[test]
fn piece_that_fails_ends_its_request() {
    let path = scratch_file("failing_piece", BYTES);
    let rig = rig(&path, Direct::Auto);
    let disk = &rig.device.disks()[0];
    let (mut slot, next) = after_first_piece(&rig, &request(Op::Discard, 0, BYTES), 0, Nanos::ZERO);
    assert_eq!(next, Next::Submit(1 << 20));
    slot.pushed(disk, Instant(1));
    let next = slot.take_result(-libc::ENOSPC, disk, Instant(1));
    assert_eq!((next, disk.errors()), (Next::End(Status::NoSpace), 1));
}

#[test]
fn pieces_go_on_after_the_time_limit_as_one_call_of_the_kernel_did() {
    let path = scratch_file("cancelled_piece", BYTES);
    let rig = rig(&path, Direct::Auto);
    let disk = &rig.device.disks()[0];
    let (mut slot, next) = after_first_piece(&rig, &request(Op::Discard, 0, BYTES), 0, Nanos::ZERO);
    assert_eq!(next, Next::Submit(1 << 20));
    slot.pushed(disk, Instant(1));
    slot.is_cancelled = true;
    assert!(matches!(slot.take_result(0, disk, Instant(1)), Next::Submit(_)));
    // The last piece has done all that was asked for.
    let small = request(Op::Discard, 0, 4096);
    let mut slot = Slot::new(&Part::whole(&small), cookie(0));
    assert_eq!(slot.start(disk), None);
    slot.pushed(disk, Instant(1));
    slot.is_cancelled = true;
    assert_eq!(slot.take_result(0, disk, Instant(1)), Next::End(Status::Ok));
}

#[test]
fn way_of_zeroing_that_is_refused_in_between_goes_on_with_the_next_from_there() {
    let path = scratch_file("way_of_pieces", BYTES);
    let rig = rig(&path, Direct::Auto);
    let disk = &rig.device.disks()[0];
    let rq = request(Op::WriteZeroes, 0, BYTES);
    let (mut slot, _) = after_first_piece(&rig, &rq, 0, Nanos::ZERO);
    slot.pushed(disk, Instant(1));
    let next = slot.take_result(-libc::EOPNOTSUPP, disk, Instant(1));
    assert_eq!(
        (slot.step, next, slot.offset, slot.len),
        (Step::ZeroRange, Next::Part, 1 << 20, BYTES - (1 << 20))
    );
}

/// Small: freeing an extent may take milliseconds where the filesystem discards what it frees (`-o discard`).
const BYTES: u64 = 8 << 20;
