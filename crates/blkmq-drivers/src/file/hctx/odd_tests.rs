//! What a hardware context must do with requests that direct I/O cannot take: too short, or at an offset inside a block.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32};

use blkmq_core::bio::Flags;
use blkmq_host::ring::RingConfig;

use super::tests::{Rig, cut, pattern, rig, rig_with};
use super::*;
use crate::chance::Chance;
use crate::file::{Direct, FileConfig, FileDevice};
use crate::mapping::Mapping;
use crate::testing::{
    Mounted, Scratch, cookie, flagged, lend, request, request_with, scratch_file, scratch_file_in,
};

/// A file whose direct I/O needs 4096 bytes, and a hardware context onto it; none, aloud, without direct I/O.
fn coarse(name: &str, len: u64) -> Option<(Scratch, Rig)> {
    let path = scratch_file(name, len);
    let rig = rig(&path, Direct::Auto);
    let disk = &rig.device.disks()[0];
    if !disk.is_direct() {
        blkmq_testkit::skip("there is no direct I/O here");
        return None;
    }
    disk.set_range(4096);
    Some((path, rig))
}

/// A second hardware context onto the same disks, as of another reactor.
fn beside(device: &FileDevice) -> Rig {
    let ring = RingHandle::new(RingConfig::default()).unwrap();
    let device = device.clone();
    let hctx = device.hctx(&ring).unwrap();
    Rig { hctx, device, ring }
}

#[test]
fn requests_of_any_offset_and_length_leave_what_is_around_them() {
    const BYTES: u64 = 1 << 20;
    let Some((path, mut rig)) = coarse("odd", BYTES) else {
        return;
    };
    let mut content = pattern(3, BYTES as usize);
    std::fs::write(&*path, &content).unwrap();
    let mut chance = Chance::new(23, 0);
    for step in 0..400u64 {
        let unit = [512, 512, 1, 4096][step as usize % 4];
        let len = (chance.bits() % (70_000 / unit) + 1) * unit;
        let offset = chance.bits() % ((BYTES - len) / unit + 1) * unit;
        let own = offset as usize..(offset + len) as usize;
        let mut memory = Mapping::new(80_000).unwrap();
        let skip = [0, 512, 3][(step / 4) as usize % 3];
        let memory = &mut memory.bytes_mut()[skip..skip + len as usize];
        let cuts: &[usize] = if len > 512 { &[7, 100] } else { &[] };
        let what = format!("step {step}: {len} bytes at {offset}");
        if chance.bits() & 1 == 0 {
            let flags = [Flags::NONE, Flags::FUA][(step / 8) as usize % 2];
            memory.copy_from_slice(&pattern(step as u8, len as usize));
            content[own].copy_from_slice(memory);
            let rq = request_with(Op::Write, flags, 0, offset, &cut(memory, cuts));
            assert_eq!(rig.run(&rq), Status::Ok, "{what}");
        } else {
            let rq = request_with(Op::Read, Flags::NONE, 0, offset, &cut(memory, cuts));
            assert_eq!(rig.run(&rq), Status::Ok, "{what}");
            assert!(*memory == content[own], "{what}");
        }
    }
    assert!(std::fs::read(&*path).unwrap() == content);
    assert_eq!(rig.device.disks()[0].size(), BYTES);
}

#[test]
fn last_block_of_a_file_of_an_odd_size_is_padded_where_it_can_only_be_read() {
    for (bytes, direct, block_size) in [
        (1000, Direct::Auto, None),
        (70_001, Direct::Auto, None),
        (70_001, Direct::Off, None),
        (70_001, Direct::Auto, Some(4096)),
        (513, Direct::Off, Some(4096)),
    ] {
        let path = scratch_file("padded", 0);
        let mut content = pattern(5, bytes);
        std::fs::write(&*path, &content).unwrap();
        let config = FileConfig {
            path: path.to_path_buf(),
            read_only: true,
            direct,
            block_size,
            ..FileConfig::default()
        };
        let mut rig = rig_with(&[config], 8);
        let disk = rig.device.disks().remove(0);
        let size = (bytes as u64).next_multiple_of(block_size.unwrap_or(512).into());
        content.resize(size as usize, 0);
        assert_eq!(disk.size(), size);
        let what = format!("{bytes} bytes, {direct:?}, {block_size:?}");
        let last = size - 512;
        for (offset, len) in [
            (0, size),
            (last, 512),
            (last - 512, 1024),
            (0, 512),
            (size - 1, 1),
        ] {
            let (offset, len) = (offset as usize, len as usize);
            let mut memory = Mapping::new(80_000).unwrap();
            for skip in [0, 3] {
                let memory = &mut memory.bytes_mut()[skip..skip + len];
                memory.fill(9);
                assert_eq!(rig.read(offset as u64, memory), Status::Ok, "{what}");
                assert!(
                    *memory == content[offset..offset + len],
                    "{what}, {len} at {offset}"
                );
            }
        }
        // It is no truncated file; a file that was truncated is one.
        assert_eq!((disk.is_truncated(), disk.resize(None).unwrap()), (false, size));
        File::options()
            .write(true)
            .open(&*path)
            .unwrap()
            .set_len(bytes as u64 - 1)
            .unwrap();
        let (mut memory, cut_off) = (Mapping::new(512).unwrap(), (bytes as u64 - 1) / 512 * 512);
        assert_eq!(rig.read(cut_off, memory.bytes_mut()), Status::Io, "{what}");
        assert!(disk.is_truncated());
    }
}

/// Each of the threads writes its own sector of one block again and again, and reads what it wrote.
#[test]
fn writers_of_one_block_on_several_reactors_lose_nothing_of_each_other() {
    let Some((_path, first)) = coarse("sectors", 8192) else {
        return;
    };
    let device = &first.device.clone();
    std::thread::scope(|scope| {
        for sector in 0..3 {
            scope.spawn(move || {
                let mut rig = beside(device);
                let mut memory = Mapping::new(4096).unwrap();
                let memory = &mut memory.bytes_mut()[..512];
                for round in 0..ROUNDS {
                    memory.fill(round as u8);
                    assert_eq!(rig.write(Flags::NONE, sector * 512, memory), Status::Ok);
                    memory.fill(0xff);
                    assert_eq!(rig.read(sector * 512, memory), Status::Ok);
                    assert!(*memory == [round as u8; 512], "sector {sector}, round {round}");
                }
            });
        }
    });
}

/// One thread writes a block whole, another one its last sector only.
#[test]
fn write_of_a_whole_block_beside_a_change_of_it_is_not_lost() {
    let Some((_path, mut whole)) = coarse("whole", 8192) else {
        return;
    };
    let device = whole.device.clone();
    let is_over = AtomicBool::new(false);
    let changes = AtomicU32::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut small, mut memory) = (beside(&device), [7; 512]);
            while !is_over.load(Ordering::Relaxed) {
                assert_eq!(small.write(Flags::NONE, 3584, &mut memory), Status::Ok);
                changes.fetch_add(1, Ordering::Relaxed);
            }
        });
        let mut memory = Mapping::new(4096).unwrap();
        let memory = memory.bytes_mut();
        for round in 0..ROUNDS {
            memory.fill(round as u8);
            assert_eq!(whole.write(Flags::NONE, 0, memory), Status::Ok);
            memory.fill(0xff);
            assert_eq!(whole.read(0, memory), Status::Ok);
            if memory[..3584] != [round as u8; 3584] {
                is_over.store(true, Ordering::Relaxed);
                panic!("round {round}: what was written is lost");
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert!(changes.into_inner() > 0);
}

#[test]
fn zeroing_of_a_sector_beside_a_change_of_its_block_is_not_lost() {
    let Some((_path, mut zeroes)) = coarse("zeroed", 8192) else {
        return;
    };
    let device = zeroes.device.clone();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut small = beside(&device);
            for _ in 0..ROUNDS {
                assert_eq!(small.write(Flags::NONE, 3584, &mut [7; 512]), Status::Ok);
            }
        });
        for round in 0..ROUNDS {
            let mut memory = [9; 512];
            assert_eq!(zeroes.write(Flags::NONE, 512, &mut memory), Status::Ok);
            assert_eq!(zeroes.run(&request(Op::WriteZeroes, 512, 512)), Status::Ok);
            assert_eq!(zeroes.read(512, &mut memory), Status::Ok);
            assert!(memory == [0; 512], "round {round}");
        }
    });
}

#[test]
fn changes_of_one_block_on_one_reactor_follow_each_other() {
    let Some((path, mut rig)) = coarse("follow", 8192) else {
        return;
    };
    let mut sectors: Vec<_> = (0..8).map(|sector| [sector + 1; 512]).collect();
    for (tag, sector) in (0..).zip(&mut sectors) {
        let rq = request_with(Op::Write, Flags::NONE, 0, u64::from(tag) * 512, &[lend(sector)]);
        assert_eq!(rig.hctx.issue(&rq, cookie(tag), true, Instant(0)), Issued::Queued);
    }
    assert!(rig.wait(8).iter().all(|done| done.status == Status::Ok));
    assert!(std::fs::read(&*path).unwrap()[..4096] == *sectors.concat());
}

#[test]
fn change_of_a_block_waits_for_the_writes_of_it_that_other_reactors_have_under_way() {
    let Some((_path, mut rig)) = coarse("announced", 8192) else {
        return;
    };
    let other = rig.hctx.device.writers.add(1);
    other.announce(0, 0, &(2048..8192));
    let mut memory = [1; 512];
    let rq = request_with(Op::Write, Flags::NONE, 0, 0, &[lend(&mut memory)]);
    assert_eq!(rig.hctx.issue(&rq, cookie(0), true, Instant(0)), Issued::Queued);
    let mut done = Vec::new();
    for _ in 0..3 {
        rig.ring.wait(None);
        rig.ring.reap();
        rig.hctx.reap(Instant(0), &mut done);
        assert!(done.is_empty(), "it has begun beside the write");
    }
    assert!(!rig.device.disks()[0].locks.are_free(&(0..4096)));
    other.withdraw(0);
    assert_eq!(rig.wait(1)[0].status, Status::Ok);
    assert!(rig.device.disks()[0].locks.are_free(&(0..4096)));
}

#[test]
fn request_that_waits_for_blocks_ends_when_its_time_is_over() {
    let Some((_path, mut rig)) = coarse("late", 8192) else {
        return;
    };
    let ticket = rig.device.disks()[0].locks.enter(0..4096);
    let mut memory = [1; 512];
    for (tag, op) in [(0, Op::Write), (1, Op::WriteZeroes)] {
        let rq = match op {
            Op::Write => request_with(op, Flags::NONE, 0, 0, &[lend(&mut memory)]),
            _ => request(op, 512, 512),
        };
        assert_eq!(rig.hctx.issue(&rq, cookie(tag), true, Instant(0)), Issued::Queued);
        assert_eq!(rig.hctx.timed_out(cookie(tag)), TimedOut::Wait);
    }
    assert!(rig.wait(2).iter().all(|done| done.status == Status::Timeout));
    rig.device.disks()[0].locks.leave(ticket);
    assert_eq!(rig.write(Flags::NONE, 0, &mut memory), Status::Ok);
}

/// Zeroes odd ranges, by all ways of zeroing that the disk has, and discards some; `content` is what the disk has.
fn zero_odd_ranges(rig: &mut Rig, content: &mut [u8], what: &str) {
    let bytes = content.len() as u64;
    let mut chance = Chance::new(29, 0);
    for step in 0..200u64 {
        let unit = [512, 512, 1, 4096][step as usize % 4];
        let len = (chance.bits() % (40_000 / unit) + 1) * unit;
        let offset = chance.bits() % ((bytes - len) / unit + 1) * unit;
        let own = offset as usize..(offset + len) as usize;
        let flags = [Flags::NONE, Flags::FUA, Flags::NO_UNMAP][step as usize % 3];
        let what = format!("{what}, step {step}: {len} bytes at {offset}, {flags:?}");
        let rq = flagged(Op::WriteZeroes, flags, offset, len);
        assert_eq!(rig.run(&rq), Status::Ok, "{what}");
        content[own.clone()].fill(0);
        let (start, end) = (
            own.start.saturating_sub(5000),
            (own.end + 5000).min(content.len()),
        );
        let mut memory = vec![9; end - start];
        assert_eq!(rig.read(start as u64, &mut memory), Status::Ok, "{what}");
        assert!(memory == content[start..end], "{what}");
        // For the next ones to have something to zero.
        memory = pattern(step as u8, own.len());
        assert_eq!(rig.write(Flags::NONE, offset, &mut memory), Status::Ok, "{what}");
        content[own].copy_from_slice(&memory);
    }
    assert_eq!(rig.device.disks()[0].errors(), 0, "{what}");
}

#[test]
fn zeroing_of_a_block_device_at_any_offset_leaves_what_is_around_it() {
    let Some(sectors) = Sectors::new("zeroed-device", 1 << 20) else {
        return;
    };
    for direct in [Direct::On, Direct::Off] {
        let mut rig = rig(Path::new(&sectors.device), direct);
        assert_eq!(rig.device.disks()[0].block_size(), 4096);
        let mut content = pattern(7, 1 << 20);
        assert_eq!(rig.write(Flags::NONE, 0, &mut content), Status::Ok);
        zero_odd_ranges(&mut rig, &mut content, &format!("{direct:?}"));
        // Whole blocks are given back, and nothing else is changed.
        for (offset, len) in [(512, 8192), (4096, 100), (1, 4095)] {
            assert_eq!(rig.run(&request(Op::Discard, offset, len)), Status::Ok);
        }
        content[4096..8192].fill(0);
        let mut memory = vec![9; 16384];
        assert_eq!(rig.read(0, &mut memory), Status::Ok);
        assert!(memory == content[..16384], "{direct:?}");
    }
}

#[test]
fn zeroes_that_have_to_be_written_leave_what_is_around_them() {
    let Some((path, mut rig)) = coarse("zeroes-written", 1 << 20) else {
        return;
    };
    let mut content = pattern(7, 1 << 20);
    std::fs::write(&*path, &content).unwrap();
    let disk = rig.device.disks().remove(0);
    disk.lacks.punching.store(true, Ordering::Relaxed);
    disk.lacks.zeroing.store(true, Ordering::Relaxed);
    zero_odd_ranges(&mut rig, &mut content, "written");
    assert!(std::fs::read(&*path).unwrap() == content);
}

/// A loop device with sectors of 4096 bytes.
struct Sectors {
    device: String,
    _image: Scratch,
}

impl Sectors {
    fn new(name: &str, bytes: u64) -> Option<Self> {
        let image = scratch_file(&format!("{name}-image"), bytes);
        let Some(device) = run("losetup", &["-b", "4096", "--show", "-f", image.to_str()?]) else {
            blkmq_testkit::skip("there is no loop device with sectors of 4096 bytes (it needs root)");
            return None;
        };
        Some(Self {
            device,
            _image: image,
        })
    }

    /// Makes an ext4 on it.
    fn ext4(&self, name: &str) -> Option<Mounted> {
        if run("mkfs.ext4", &["-q", "-b", "4096", &self.device]).is_none() {
            blkmq_testkit::skip("no ext4 can be made (it needs mkfs.ext4)");
            return None;
        }
        Mounted::device(name, &self.device)
    }
}

/// Runs a program. Returns what it prints, if it succeeds.
fn run(program: &str, words: &[&str]) -> Option<String> {
    let output = Command::new(program).args(words).output().ok()?;
    let printed = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    output.status.success().then_some(printed)
}

impl Drop for Sectors {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.device]).output();
    }
}

#[test]
fn requests_that_the_kernel_refuses_by_now_begin_again_with_whole_blocks() {
    let Some(sectors) = Sectors::new("grows", 64 << 20) else {
        return;
    };
    let Some(mounted) = sectors.ext4("grows") else {
        return;
    };
    let path = scratch_file_in(&mounted.0, "disk", 1 << 20);
    let mut content = pattern(5, 1 << 20);
    std::fs::write(&*path, &content).unwrap();
    let mut rig = rig(&path, Direct::On);
    let disk = std::sync::Arc::clone(&rig.device.disks()[0]);
    assert_eq!((disk.block_size(), disk.range()), (512, 4096));
    for (offset, len) in [(512, 512), (4096 * 3 + 512, 9000 / 512 * 512), (8192, 1536)] {
        let mut memory = vec![0; len];
        disk.set_range(512);
        assert_eq!(rig.read(offset as u64, &mut memory), Status::Ok);
        assert!(memory == content[offset..offset + len]);
        disk.set_range(512);
        memory = pattern(6, len);
        assert_eq!(rig.write(Flags::FUA, offset as u64, &mut memory), Status::Ok);
        content[offset..offset + len].copy_from_slice(&memory);
        assert_eq!(disk.range(), 4096, "it was asked for");
    }
    assert!(std::fs::read(&*path).unwrap() == content);
    assert_eq!(disk.errors(), 0);
}

const ROUNDS: u64 = 300;
