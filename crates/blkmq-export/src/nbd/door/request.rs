//! The bio that a client's request becomes, and the reply that the client gets at its end. Used by
//! `connection`.

use blkmq_core::bio::{Bio, Flags, Op as BioOp, Status};
use blkmq_host::disk::Disk;
use blkmq_nbd::codec::reply::Extent;
use blkmq_nbd::codec::{CommandFlags, ErrorCode, ExtentState};

use crate::nbd::session::{CHANGED, Op, Request};

/// Bytes of the buffer that a request needs. A request for block status reads a block.
pub(super) fn buffer_bytes(request: &Request, disk: &Disk) -> usize {
    match request.op {
        Op::BlockStatus => disk.block_size as usize,
        _ => request.payload_bytes() as usize,
    }
}

/// The bio for a request.
pub(super) fn bio(request: &Request, disk: &Disk, slot: u32) -> Bio {
    let (op, mut flags) = match request.op {
        Op::Read => (BioOp::Read, Flags::NONE),
        Op::Write => (BioOp::Write, Flags::NONE),
        Op::Trim => (BioOp::Discard, Flags::NONE),
        Op::WriteZeroes => (BioOp::WriteZeroes, zeroes_flags(request.flags)),
        Op::BlockStatus => (BioOp::Read, Flags::NO_MERGE),
        Op::Flush | Op::Cache | Op::Fence => (BioOp::Flush, Flags::NONE),
    };
    if op.is_write() && request.flags.contains(CommandFlags::FUA) {
        flags = flags.with(Flags::FUA);
    }
    let (offset, len) = match request.op {
        Op::BlockStatus => (
            request.offset - request.offset % u64::from(disk.block_size),
            disk.block_size.into(),
        ),
        _ if op == BioOp::Flush => (0, 0),
        _ => (request.offset, request.length),
    };
    Bio {
        op,
        flags,
        disk: disk.id,
        group: disk.group,
        offset,
        len,
        cookie: slot.into(),
        ..Bio::default()
    }
}

fn zeroes_flags(flags: CommandFlags) -> Flags {
    let mut found = Flags::NONE;
    if flags.contains(CommandFlags::NO_HOLE) {
        found = found.with(Flags::NO_UNMAP);
    }
    if flags.contains(CommandFlags::FAST_ZERO) {
        found = found.with(Flags::FAST_ONLY);
    }
    found
}

pub(super) fn extent(extent: &blkmq_host::device::Extent) -> Extent {
    let state = ExtentState::default()
        .with_if(extent.hole, ExtentState::HOLE)
        .with_if(extent.zero, ExtentState::ZERO);
    Extent {
        bytes: extent.len,
        state,
    }
}

/// What has changed, as clients of QEMU's bitmaps read it.
pub(super) fn changed_extent(run: &blkmq_host::device::Changed) -> Extent {
    Extent {
        bytes: run.len,
        state: if run.is_changed {
            CHANGED
        } else {
            ExtentState::NONE
        },
    }
}

/// The error code and message that report a failure to the client.
pub(super) fn error_of(status: Status, request: &Request) -> (ErrorCode, &'static str) {
    match status {
        Status::NoSpace => (ErrorCode::NoSpace, "no space left for it"),
        Status::ReadOnly => (ErrorCode::Perm, "the disk is read-only"),
        Status::Invalid => (ErrorCode::Invalid, "the disk cannot take this range"),
        Status::NoMemory => (ErrorCode::NoMemory, "the host is out of memory"),
        Status::Shutdown => (ErrorCode::Shutdown, "the server is shutting down"),
        Status::NotSupported if request.op == Op::WriteZeroes => {
            (ErrorCode::NotSupported, "the drive cannot zero fast")
        }
        Status::NotSupported => (ErrorCode::Invalid, "the drive cannot do this"),
        Status::Medium => (ErrorCode::Io, "the medium failed"),
        Status::Transport => (ErrorCode::Io, "the way to the drive failed"),
        Status::Timeout => (ErrorCode::Io, "the drive did not answer in time"),
        _ => (ErrorCode::Io, "the drive failed"),
    }
}
