//! Tests of a hardware context onto files, with real files, rings and memory.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use blkmq_core::bio::{Flags, Lent};
use blkmq_core::ids::DiskId;
use blkmq_host::device::{Allocation, Device};
use blkmq_host::ring::RingConfig;

use super::*;
use crate::chance::Chance;
use crate::file::{Direct, FileConfig, FileDevice, FileDisk};
use crate::mapping::Mapping;
use crate::testing::{Mounted, cookie, flagged, lend, request, request_with, scratch_file, scratch_file_in};

/// A hardware context with its ring, onto some files.
pub(super) struct Rig {
    pub(super) hctx: FileHctx,
    pub(super) device: FileDevice,
    pub(super) ring: RingHandle,
}

pub(super) fn rig_with(configs: &[FileConfig], files: u32) -> Rig {
    let ring = RingHandle::new(RingConfig {
        files,
        ..RingConfig::default()
    });
    let ring = ring.expect("io_uring is available");
    let disks = configs.iter().map(|config| FileDisk::open(config).unwrap());
    let device = FileDevice::new(disks.collect(), DEPTH).unwrap();
    let hctx = device.hctx(&ring).unwrap();
    Rig { hctx, device, ring }
}

pub(super) fn rig(path: &Path, direct: Direct) -> Rig {
    let config = FileConfig {
        path: path.to_owned(),
        direct,
        ..FileConfig::default()
    };
    rig_with(&[config], 8)
}

impl Rig {
    /// Carries out one request and returns how it ended.
    pub(super) fn run(&mut self, rq: &Request) -> Status {
        match self.hctx.issue(rq, cookie(0), true, Instant(0)) {
            Issued::Done(status) => status,
            Issued::Queued => self.wait(1)[0].status,
            other => panic!("{other:?}"),
        }
    }

    /// Waits for so many ends.
    pub(super) fn wait(&mut self, count: usize) -> Vec<Done> {
        let mut done = Vec::new();
        while done.len() < count {
            self.ring.wait(None);
            self.ring.reap();
            self.hctx.reap(Instant(0), &mut done);
        }
        done
    }

    pub(super) fn write(&mut self, flags: Flags, offset: u64, buffer: &mut [u8]) -> Status {
        self.run(&request_with(Op::Write, flags, 0, offset, &[lend(buffer)]))
    }

    pub(super) fn read(&mut self, offset: u64, buffer: &mut [u8]) -> Status {
        self.run(&request_with(Op::Read, Flags::NONE, 0, offset, &[lend(buffer)]))
    }
}

pub(super) fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i / 512) as u8 ^ (i as u8).wrapping_mul(31) ^ seed)
        .collect()
}

fn blocks(path: &Path) -> u64 {
    File::open(path).unwrap().metadata().unwrap().blocks()
}

/// Cuts memory into pieces at these lengths, the rest last.
pub(super) fn cut(mut memory: &mut [u8], lens: &[usize]) -> Vec<Lent> {
    let mut pieces = Vec::new();
    for len in lens {
        let (now, later) = memory.split_at_mut(*len);
        pieces.push(lend(now));
        memory = later;
    }
    pieces.push(lend(memory));
    pieces
}

#[test]
fn queue_that_begins_with_more_disks_than_may_join_keeps_them() {
    let path = scratch_file("many-disks", 4096);
    let rig = rig(&path, Direct::Auto);
    assert_eq!(
        (rig.device.disks_max(1), rig.device.disks_max(2000)),
        (1024, 2000)
    );
}

#[test]
fn flush_succeeds_again_once_the_disk_was_opened_again_after_one_that_failed() {
    let path = scratch_file("reopened", 8192);
    let mut rig = rig(&path, Direct::Auto);
    let disk = rig.device.disks().remove(0);
    disk.note_failed_flush();
    disk.note_failed_flush();
    let flush = request(Op::Flush, 0, 0);
    assert_eq!(rig.run(&flush), Status::Io);
    assert_eq!(rig.device.losses(DiskId(0)).count, 1);
    // Another file in its place is not the disk.
    let moved = path.with_extension("moved");
    std::fs::rename(&*path, &moved).unwrap();
    std::fs::write(&*path, [0; 8192]).unwrap();
    let error = rig.device.reopen(DiskId(0)).unwrap_err().to_string();
    assert!(error.contains("is not what was opened"), "{error}");
    assert_eq!(rig.run(&flush), Status::Io);
    std::fs::rename(&moved, &*path).unwrap();
    rig.device.reopen(DiskId(0)).unwrap();
    assert_eq!(rig.run(&flush), Status::Ok);
    assert_eq!(rig.device.losses(DiskId(0)).seen, 0);
}

#[test]
fn writes_are_read_back_whatever_the_memory_looks_like() {
    for direct in [Direct::Auto, Direct::Off] {
        let path = scratch_file(&format!("patterns_{direct:?}"), 4 << 20);
        let mut rig = rig(&path, direct);
        let mut content = vec![0u8; 4 << 20];
        let mut chance = Chance::new(17, 0);
        for step in 0..200u64 {
            let len = [4096, 65536, 512 << 10, 1 << 20][step as usize % 4];
            let offset = chance.bits() % ((4 << 20) / 4096 - len / 4096 + 1) * 4096;
            let (start, len) = (offset as usize, len as usize);
            let mut aligned = Mapping::new(len + 8192).unwrap();
            let skip = [0, 4096, 1, 512][(step / 4) as usize % 4];
            let memory = &mut aligned.bytes_mut()[skip..skip + len];
            let cuts: &[usize] = [&[][..], &[1536], &[1024, 1024, 512], &[7, 100]][(step / 16) as usize % 4];
            if chance.bits() & 1 == 0 {
                memory.copy_from_slice(&pattern(step as u8, len));
                content[start..start + len].copy_from_slice(memory);
                let rq = request_with(Op::Write, Flags::NONE, 0, offset, &cut(memory, cuts));
                assert_eq!(rig.run(&rq), Status::Ok, "write, step {step}");
            } else {
                let rq = request_with(Op::Read, Flags::NONE, 0, offset, &cut(memory, cuts));
                assert_eq!(rig.run(&rq), Status::Ok, "read, step {step}");
                assert!(
                    memory == &content[start..start + len],
                    "read of {len} bytes at {offset}, step {step}"
                );
            }
        }
        assert_eq!(rig.run(&request(Op::Flush, 0, 0)), Status::Ok);
        assert!(std::fs::read(&*path).unwrap() == content);
    }
}

#[test]
fn many_requests_under_way_end_once_each_with_their_own_data() {
    let path = scratch_file("many", 1 << 20);
    std::fs::write(&*path, pattern(0, 1 << 20)).unwrap();
    // Without slots for registered files the ring uses descriptors.
    for files in [8, 0] {
        let config = FileConfig {
            path: path.to_path_buf(),
            ..FileConfig::default()
        };
        let mut rig = rig_with(&[config], files);
        let mut memory = Mapping::new(DEPTH as usize * 4096).unwrap();
        for (tag, buffer) in (0..DEPTH).zip(memory.bytes_mut().chunks_mut(4096)) {
            let rq = request_with(
                Op::Read,
                Flags::NONE,
                0,
                u64::from(tag * 7 % 256) * 4096,
                &[lend(buffer)],
            );
            assert_eq!(rig.hctx.issue(&rq, cookie(tag), true, Instant(0)), Issued::Queued);
        }
        let mut ended: Vec<u32> = rig
            .wait(DEPTH as usize)
            .iter()
            .map(|done| done.cookie.tag().0)
            .collect();
        ended.sort_unstable();
        assert_eq!(ended, (0..DEPTH).collect::<Vec<_>>());
        let content = pattern(0, 1 << 20);
        for (tag, buffer) in (0..DEPTH as usize).zip(memory.bytes_mut().chunks(4096)) {
            let start = tag * 7 % 256 * 4096;
            assert!(buffer == &content[start..start + 4096], "tag {tag}");
        }
    }
}

#[test]
fn each_disk_of_a_context_is_its_own_file() {
    let paths = ["first", "second"].map(|name| scratch_file(name, 8192));
    let configs = paths.each_ref().map(|path| FileConfig {
        path: path.to_path_buf(),
        ..FileConfig::default()
    });
    let mut rig = rig_with(&configs, 8);
    let mut data = pattern(9, 4096);
    let rq = request_with(Op::Write, Flags::FUA, 1, 4096, &[lend(&mut data)]);
    assert_eq!(rig.run(&rq), Status::Ok);
    assert!(std::fs::read(&*paths[0]).unwrap().iter().all(|byte| *byte == 0));
    assert!(std::fs::read(&*paths[1]).unwrap()[4096..] == data);
    assert_eq!(
        rig.run(&request_with(Op::Flush, Flags::NONE, 2, 0, &[])),
        Status::Invalid
    );
}

#[test]
fn discards_free_blocks_and_zeroing_keeps_them_if_asked_to() {
    let path = scratch_file("discard", 1 << 20);
    let mut rig = rig(&path, Direct::Auto);
    let mut data = pattern(1, 1 << 20);
    let mut fill = |rig: &mut Rig| {
        assert_eq!(rig.write(Flags::FUA, 0, &mut data), Status::Ok);
        blocks(&path)
    };
    let full = fill(&mut rig);
    assert!(full >= 2048, "{full} blocks of 512 bytes");
    assert_eq!(rig.run(&request(Op::Discard, 0, 512 << 10)), Status::Ok);
    assert!(blocks(&path) <= full - 1000, "{} of {full} blocks", blocks(&path));
    fill(&mut rig);
    for (flags, keeps) in [
        (Flags::NO_UNMAP, true),
        (Flags::NO_UNMAP.with(Flags::FAST_ONLY), true),
        (Flags::FUA, false),
    ] {
        let status = rig.run(&flagged(Op::WriteZeroes, flags, 4096, 1020 << 10));
        if status == Status::NotSupported {
            assert!(flags.has(Flags::FAST_ONLY));
            blkmq_testkit::skip(
                "fast zeroing, which the filesystem of the temporary directory does not have",
            );
            continue;
        }
        assert_eq!(status, Status::Ok);
        assert_eq!(blocks(&path) >= 2048, keeps, "{flags:?}");
        let mut seen = vec![1u8; 1 << 20];
        assert_eq!(rig.read(0, &mut seen), Status::Ok);
        assert!(
            seen[4096..].iter().all(|byte| *byte == 0) && seen[..4096] == pattern(1, 1 << 20)[..4096],
            "{flags:?}"
        );
        fill(&mut rig);
    }
}

#[test]
fn extents_are_the_holes_of_the_file() {
    let path = scratch_file("extents", 1 << 20);
    let mut rig = rig(&path, Direct::Auto);
    rig.write(Flags::FUA, 256 << 10, &mut pattern(1, 64 << 10));
    let mut out = Vec::new();
    rig.device.extents(DiskId(0), 0, u64::MAX, 9, &mut out).unwrap();
    let kinds: Vec<(u64, bool)> = out.iter().map(|extent| (extent.len >> 10, extent.hole)).collect();
    assert_eq!(kinds, [(256, true), (64, false), (704, true)]);
    out.clear();
    rig.device
        .extents(DiskId(0), (256 << 10) + 512, 1024, 9, &mut out)
        .unwrap();
    assert_eq!((out.len(), out[0].len, out[0].hole), (1, 1024, false));
}

/// It has no memory for what a read of the file would bring.
#[test]
fn work_on_an_image_is_refused_by_a_plain_file() {
    let path = scratch_file("task", 1 << 20);
    let mut rig = rig(&path, Direct::Auto);
    let rq = flagged(Op::Read, Flags::TASK, 4096, 8192);
    assert_eq!(rig.run(&rq), Status::Invalid);
}

#[test]
fn file_that_became_shorter_is_an_io_error_and_no_stale_data() {
    let path = scratch_file("shorter", 1 << 20);
    let mut rig = rig(&path, Direct::Auto);
    let file = File::options().write(true).open(&*path).unwrap();
    file.set_len((512 << 10) + 4096).unwrap();
    let mut memory = vec![0u8; 8192];
    assert_eq!(
        rig.read(512 << 10, &mut memory),
        Status::Io,
        "a read that is cut short"
    );
    assert_eq!(rig.read(768 << 10, &mut memory), Status::Io);
    assert_eq!(rig.device.disks()[0].errors(), 2);
    // What was lost is not there again: it would read as zeroes.
    file.set_len(1 << 20).unwrap();
    assert_eq!(rig.read(768 << 10, &mut memory), Status::Io);
    assert_eq!(rig.read(256 << 10, &mut memory), Status::Ok);
}

#[test]
fn short_read_of_a_file_in_memory_is_done_when_it_is_issued() {
    let path = scratch_file_in(Path::new("/dev/shm"), "at_once", 256 << 10);
    let mut rig = rig(&path, Direct::Off);
    if !rig.device.disks()[0].is_in_memory {
        return blkmq_testkit::skip("/dev/shm is no tmpfs, or this host has swap");
    }
    let mut data = pattern(3, 64 << 10);
    assert_eq!(rig.write(Flags::NONE, 8192, &mut data), Status::Ok);
    for (len, is_at_once) in [(512, true), (16 << 10, true), (32 << 10, false)] {
        let mut memory = vec![0u8; len];
        let rq = request_with(Op::Read, Flags::NONE, 0, 8192, &[lend(&mut memory)]);
        match rig.hctx.issue(&rq, cookie(0), true, Instant(0)) {
            Issued::Done(status) => assert_eq!((status, is_at_once), (Status::Ok, true), "{len}"),
            Issued::Queued => assert_eq!((rig.wait(1)[0].status, is_at_once), (Status::Ok, false), "{len}"),
            other => panic!("{other:?}"),
        }
        assert!(memory == data[..len], "{len}");
    }
    // A scheduler would have nothing to hold back.
    let mut memory = vec![0u8; 512];
    let rq = request_with(Op::Read, Flags::NONE, 0, 8192, &[lend(&mut memory)]);
    let rq = rq.ordered_for_test();
    assert_eq!(rig.hctx.issue(&rq, cookie(0), true, Instant(0)), Issued::Queued);
    assert_eq!(rig.wait(1)[0].status, Status::Ok);
    assert!(memory == data[..512]);
    // What is cut short fails as others do.
    File::options()
        .write(true)
        .open(&*path)
        .unwrap()
        .set_len(4096)
        .unwrap();
    let mut memory = vec![0u8; 8192];
    assert_eq!(rig.read(0, &mut memory), Status::Io);
    assert_eq!(rig.device.disks()[0].errors(), 1);
    // Nobody knows where: it was written a moment ago.
    assert_eq!(rig.read(0, &mut memory[..4096]), Status::Io);
}

#[test]
fn requests_whose_buffers_are_missing_or_too_short_are_invalid() {
    let path = scratch_file("no_buffers", 8192);
    let mut rig = rig(&path, Direct::Auto);
    assert_eq!(rig.run(&request(Op::Read, 0, 4096)), Status::Invalid);
    assert_eq!(rig.run(&request(Op::Write, 0, 4096)), Status::Invalid);
}

#[test]
fn bounces_that_run_out_are_waited_for() {
    let path = scratch_file("bounces", 1 << 20);
    let mut rig = rig(&path, Direct::Auto);
    if rig.device.disks()[0]
        .direct()
        .is_none_or(|needs| needs.memory == 1)
    {
        blkmq_testkit::skip("direct I/O takes any memory here, or there is none: nothing is bounced");
        return;
    }
    let mut memory = vec![0u8; (1 << 20) + 1];
    // The same memory for all: no request of this test is looked at.
    let odd = lend(&mut memory[1..]);
    let rq = request_with(Op::Read, Flags::NONE, 0, 0, &[odd]);
    let mut queued = 0;
    while rig.hctx.issue(&rq, cookie(queued), true, Instant(0)) == Issued::Queued {
        queued += 1;
    }
    assert!(
        (1..DEPTH).contains(&queued),
        "{queued} were taken before one was refused"
    );
    assert_eq!(
        rig.hctx.issue(&rq, cookie(queued), true, Instant(0)),
        Issued::DeviceResource
    );
    let ended = rig.wait(queued as usize);
    assert!(ended.iter().all(|done| done.status.is_ok()));
    assert_eq!(rig.hctx.issue(&rq, cookie(0), true, Instant(0)), Issued::Queued);
    rig.wait(1);
}

#[test]
fn timed_out_request_is_cancelled_and_ends_only_when_the_kernel_let_go() {
    let path = scratch_file("timed_out", 1 << 20);
    let mut rig = rig(&path, Direct::Auto);
    let mut memory = vec![0u8; 4096];
    let rq = request_with(Op::Read, Flags::NONE, 0, 0, &[lend(&mut memory)]);
    assert_eq!(rig.hctx.issue(&rq, cookie(3), true, Instant(0)), Issued::Queued);
    let alone = rig.hctx.ring_client.in_flight();
    assert_eq!(rig.hctx.timed_out(cookie(3)), TimedOut::Wait);
    assert_eq!(rig.hctx.timed_out(cookie(3)), TimedOut::Wait);
    let cancels = rig.hctx.ring_client.in_flight() - alone;
    assert_eq!(cancels, 1, "cancelled once");
    let end = rig.wait(1)[0];
    assert!(
        end.cookie == cookie(3) && matches!(end.status, Status::Ok | Status::Timeout),
        "{end:?}"
    );
    assert_eq!(rig.hctx.timed_out(cookie(3)), TimedOut::Ended);
    assert_eq!(rig.read(0, &mut memory), Status::Ok, "the tag is free again");
}

#[test]
fn read_only_disk_is_read_beside_other_readers() {
    let path = scratch_file("read_only", 8192);
    std::fs::write(&*path, pattern(4, 8192)).unwrap();
    let config = FileConfig {
        path: path.to_path_buf(),
        read_only: true,
        ..FileConfig::default()
    };
    let mut rigs = [rig_with(std::slice::from_ref(&config), 8), rig_with(&[config], 8)];
    for rig in &mut rigs {
        let mut seen = vec![0u8; 8192];
        assert_eq!(rig.read(0, &mut seen), Status::Ok);
        assert!(seen == pattern(4, 8192));
        assert_eq!(rig.run(&request(Op::Flush, 0, 0)), Status::Ok);
    }
}

#[test]
fn filesystem_that_cannot_zero_has_zeroes_written() {
    let Some(tmpfs) = Mounted::tmpfs("zeroes", "16m") else {
        return;
    };
    let path = scratch_file_in(&tmpfs.0, "disk", 8 << 20);
    let mut rig = rig(&path, Direct::Auto);
    let fast = Flags::NO_UNMAP.with(Flags::FAST_ONLY);
    let first = rig.run(&flagged(Op::WriteZeroes, fast, 0, 4 << 20));
    assert_eq!(first, Status::NotSupported, "tmpfs has no ZERO_RANGE");
    let file = File::options().write(true).open(&*path).unwrap();
    file.write_all_at(&pattern(1, 8 << 20), 0).unwrap();
    assert_eq!(
        rig.run(&flagged(
            Op::WriteZeroes,
            Flags::NO_UNMAP,
            1 << 20,
            (5 << 20) + 4096
        )),
        Status::Ok
    );
    let seen = std::fs::read(&*path).unwrap();
    let (start, end) = (1 << 20, (6 << 20) + 4096);
    assert!(seen[start..end].iter().all(|byte| *byte == 0));
    assert!(seen[..start] == pattern(1, 8 << 20)[..start] && seen[end..] == pattern(1, 8 << 20)[end..]);
    assert!(blocks(&path) >= (8 << 20) / 512, "it stayed allocated");
}

#[test]
fn block_device_is_served_like_a_file() {
    let backing = scratch_file("backing", 4 << 20);
    let attached = std::process::Command::new("losetup")
        .args(["--find", "--show"])
        .arg(&*backing)
        .output();
    let Some(output) = attached.ok().filter(|output| output.status.success()) else {
        blkmq_testkit::skip("no loop device can be attached (it needs root)");
        return;
    };
    let device = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
    let result = std::panic::catch_unwind(|| {
        let mut rig = rig(&device, Direct::Auto);
        assert_eq!(rig.device.disks()[0].size(), 4 << 20);
        let mut data = pattern(3, 64 << 10);
        assert_eq!(rig.write(Flags::FUA, 1 << 20, &mut data), Status::Ok);
        assert_eq!(rig.run(&request(Op::Flush, 0, 0)), Status::Ok);
        assert_eq!(rig.run(&request(Op::Discard, 1 << 20, 32 << 10)), Status::Ok);
        assert_eq!(rig.run(&request(Op::WriteZeroes, 1 << 20, 32 << 10)), Status::Ok);
        let mut seen = vec![9u8; 64 << 10];
        assert_eq!(rig.read(1 << 20, &mut seen), Status::Ok);
        assert!(seen[..32 << 10].iter().all(|byte| *byte == 0) && seen[32 << 10..] == data[32 << 10..]);
    });
    let detached = std::process::Command::new("losetup")
        .arg("-d")
        .arg(&device)
        .status();
    assert!(detached.is_ok_and(|status| status.success()));
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

const DEPTH: u32 = 64;

#[test]
fn write_that_the_system_has_no_resources_for_is_done_after_a_pause() {
    let path = scratch_file("paused", 1 << 20);
    let mut rig = rig(&path, Direct::Off);
    let mut buffer = pattern(3, 8192);
    let rq = request_with(Op::Write, Flags::NONE, 0, 4096, &[lend(&mut buffer)]);
    assert_eq!(rig.hctx.issue(&rq, cookie(0), true, Instant(0)), Issued::Queued);
    // The kernel's answer is replaced, and what it has done undone.
    let mut answers = Vec::new();
    while answers.is_empty() {
        rig.ring.wait(None);
        rig.ring.reap();
        rig.hctx.ring_client.take(&mut answers);
    }
    path_file(&path).write_all_at(&[0; 8192], 4096).unwrap();
    assert!(rig.hctx.take_result(0, -libc::EAGAIN, Instant(0)).is_none());
    assert!(rig.hctx.slots[0].is_paused);
    assert_eq!(rig.wait(1)[0].status, Status::Ok);
    let mut found = vec![0; 8192];
    path_file(&path).read_exact_at(&mut found, 4096).unwrap();
    assert!(found == buffer);
}

fn path_file(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}
