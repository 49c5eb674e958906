//! Tests of a hardware context on a file that somebody truncates between its requests.

use std::fs::File;
use std::os::unix::fs::FileExt;

use blkmq_core::bio::Flags;
use blkmq_core::ids::DiskId;
use blkmq_host::device::{Allocation, Device};

use super::tests::{Rig, rig};
use super::*;
use crate::file::Direct;
use crate::testing::{Scratch, cookie, request, scratch_file};

/// A file full of data that a context has just written to.
struct Stage {
    _path: Scratch,
    file: File,
    rig: Rig,
}

impl Stage {
    fn new(name: &str, direct: Direct) -> Self {
        let path = scratch_file(name, BYTES);
        let file = File::options().write(true).open(&*path).unwrap();
        file.write_all_at(&[7; BYTES as usize], 0).unwrap();
        let mut rig = rig(&path, direct);
        assert_eq!(rig.write(Flags::NONE, 0, &mut [8; BLOCK]), Status::Ok);
        Self {
            _path: path,
            file,
            rig,
        }
    }

    /// Restores the file, and has it opened again.
    fn restore(&mut self) {
        self.file.write_all_at(&[7; BYTES as usize], 0).unwrap();
        assert!(self.rig.device.reopen(DiskId(0)).unwrap().is_none());
        let mut found = [0; BLOCK];
        assert_eq!((self.rig.read(HALF, &mut found), found), (Status::Ok, [7; BLOCK]));
    }

    fn read(&mut self, offset: u64) -> Status {
        self.rig.read(offset, &mut [0; BLOCK])
    }
}

#[test]
fn range_that_was_cut_off_is_not_read_as_zeroes_behind_a_write() {
    for direct in [Direct::Auto, Direct::Off] {
        let mut stage = Stage::new("cut", direct);
        // One that reaches the end of the disk, too.
        for end in [BYTES - 1, BYTES - 2, BYTES] {
            stage.file.set_len(HALF).unwrap();
            let offset = (end - 1) / BLOCK as u64 * BLOCK as u64;
            let wrote = stage.rig.write(Flags::NONE, offset, &mut [9; BLOCK]);
            assert_eq!((wrote, stage.read(HALF)), (Status::Io, Status::Io), "{end}");
            // Where it was cut off is known from now on, or all is taken for lost.
            stage.file.set_len(BYTES).unwrap();
            assert_eq!(stage.read(HALF), Status::Io);
            stage.restore();
        }
    }
}

#[test]
fn read_behind_the_write_of_another_context_finds_no_zeroes() {
    for direct in [Direct::Auto, Direct::Off] {
        let mut stage = Stage::new("cut-beside", direct);
        stage.file.set_len(HALF).unwrap();
        // As another reactor does that has not seen the end of its write yet.
        stage
            .file
            .write_all_at(&[9; BLOCK], BYTES - 4 * BLOCK as u64)
            .unwrap();
        assert_eq!(stage.read(HALF), Status::Io);
        // Nor does a request that is merged with it: nothing of it counts as done.
        assert_eq!(stage.rig.hctx.done_before(cookie(0)), 0);
        let zeroing = request(Op::WriteZeroes, HALF, BLOCK as u64);
        assert_eq!(stage.rig.run(&zeroing), Status::Io);
        stage.restore();
    }
}

#[test]
fn range_that_was_cut_off_is_no_hole() {
    let mut stage = Stage::new("cut-extents", Direct::Auto);
    stage.file.set_len(HALF).unwrap();
    for offset in [0, HALF] {
        let found = stage
            .rig
            .device
            .extents(DiskId(0), offset, BYTES - offset, 8, &mut Vec::new());
        assert!(found.is_err(), "{found:?}");
    }
    stage.restore();
    let mut extents = Vec::new();
    stage
        .rig
        .device
        .extents(DiskId(0), 0, BYTES, 8, &mut extents)
        .unwrap();
    assert!(extents.iter().all(|extent| !extent.zero), "{extents:?}");
}

const BYTES: u64 = 1 << 20;
const HALF: u64 = BYTES / 2;
const BLOCK: usize = 4096;
