//! What a chain asks of the disk: a bio, or an answer at once (virtio 1.2, 5.2.6); and the status that the
//! driver gets.

use std::sync::Arc;

use blkmq_core::bio::{Bio, Data, Flags, Lent, Op, Status};
use blkmq_host::disk::{Disk, SERIAL_BYTES_MAX};

use super::chain::{Chain, length, take_front, take_last};
use super::ring::Broken;
use super::sys::{copy_to, nothing};

/// What becomes of a request.
#[derive(Debug)]
pub(super) enum Begun {
    /// A bio for the disk.
    Bio(Bio),
    /// It has ended: the status, and the bytes written before the status.
    Ended(u8, u32),
}

/// A request that was taken from the ring, by its head.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) is_taken: bool,
    /// Memory for the status.
    status: Lent,
    /// Bytes of data for the driver, if all goes well.
    written: u32,
    /// A list for the pieces of its data, of which the last ones may be empty; kept for reuse.
    list: Option<Arc<[Lent]>>,
}

impl Default for Slot {
    fn default() -> Self {
        Self {
            is_taken: false,
            status: nothing(),
            written: 0,
            list: None,
        }
    }
}

impl Slot {
    /// Begins what the chain asks for. Without a write cache (`is_through`) writes are to be
    /// durable at their end.
    ///
    /// # Errors
    /// The chain has no room for a header or a status.
    pub(super) fn begin(
        &mut self,
        chain: &mut Chain,
        disk: &Disk,
        is_through: bool,
    ) -> Result<Begun, Broken> {
        let mut header = [0; 16];
        if !take_front(&mut chain.readable, &mut header) {
            return Err(Broken("a request without a header"));
        }
        self.status = take_last(&mut chain.writable).ok_or(Broken("a request without a status"))?;
        self.written = 0;
        let kind = u32::from_le_bytes(header[..4].try_into().expect("4 of 16 bytes"));
        let sector = u64::from_le_bytes(header[8..].try_into().expect("8 of 16 bytes"));
        let (op, pieces) = match kind {
            IN => (Op::Read, &chain.writable),
            OUT => (Op::Write, &chain.readable),
            FLUSH => return Ok(Begun::Bio(bio(disk, Op::Flush, Flags::NONE, 0..0))),
            GET_ID => return Ok(get_id(&chain.writable, disk)),
            DISCARD | WRITE_ZEROES => return Ok(range(chain, kind, disk, is_through)),
            _ => return Ok(Begun::Ended(UNSUPPORTED, 0)),
        };
        let bytes = length(pieces);
        let Some(range) = checked(sector, bytes, disk, op) else {
            return Ok(Begun::Ended(IO_ERROR, 0));
        };
        if op == Op::Read {
            self.written = bytes as u32;
        }
        let mut bio = bio(disk, op, durable(op, is_through), range);
        bio.data = self.data(op, chain);
        Ok(Begun::Bio(bio))
    }

    fn data(&mut self, op: Op, chain: &Chain) -> Data {
        let pieces = match op {
            Op::Read => &chain.writable,
            _ => &chain.readable,
        };
        if let [piece] = pieces[..] {
            return Data::Flat(piece);
        }
        let has_room = |list: &mut Arc<[Lent]>| list.len() >= pieces.len() && Arc::get_mut(list).is_some();
        if !self.list.as_mut().is_some_and(has_room) {
            let room = pieces.len().next_power_of_two();
            self.list = Some(std::iter::repeat_n(nothing(), room).collect());
        }
        let list = self.list.as_mut().expect("made if it was not there");
        let places = Arc::get_mut(list).expect("nobody else has it");
        places[..pieces.len()].copy_from_slice(pieces);
        places[pieces.len()..].fill(nothing());
        Data::List(Arc::clone(list))
    }

    /// Ends it with a status. Returns the number of bytes written.
    pub(super) fn end(&mut self, status: u8, written: u32) -> u32 {
        copy_to(self.status, &[status]);
        self.is_taken = false;
        written + 1
    }

    /// Ends it with the end of its bio.
    pub(super) fn end_with(&mut self, status: Status) -> u32 {
        let written = if status.is_ok() { self.written } else { 0 };
        let status = match status {
            Status::Ok => OK,
            Status::NotSupported => UNSUPPORTED,
            _ => IO_ERROR,
        };
        self.end(status, written)
    }
}

/// One segment of a discard or of zeroing.
fn range(chain: &mut Chain, kind: u32, disk: &Disk, is_through: bool) -> Begun {
    let mut segment = [0; 16];
    if length(&chain.readable) != 16 || !take_front(&mut chain.readable, &mut segment) {
        return Begun::Ended(IO_ERROR, 0);
    }
    let sector = u64::from_le_bytes(segment[..8].try_into().expect("8 of 16 bytes"));
    let sectors = u32::from_le_bytes(segment[8..12].try_into().expect("4 of 16 bytes"));
    let flags = u32::from_le_bytes(segment[12..].try_into().expect("4 of 16 bytes"));
    let (op, flags) = match (kind, flags) {
        (DISCARD, 0) => (Op::Discard, Flags::NONE),
        (WRITE_ZEROES, 0) => (Op::WriteZeroes, Flags::NO_UNMAP),
        (WRITE_ZEROES, UNMAP) => (Op::WriteZeroes, Flags::NONE),
        _ => return Begun::Ended(UNSUPPORTED, 0),
    };
    match checked(sector, u64::from(sectors) * SECTOR, disk, op) {
        Some(range) => Begun::Bio(bio(disk, op, flags.with(durable(op, is_through)), range)),
        None => Begun::Ended(IO_ERROR, 0),
    }
}

/// The range in bytes, if it lies in the disk and the disk allows the operation.
fn checked(sector: u64, bytes: u64, disk: &Disk, op: Op) -> Option<std::ops::Range<u64>> {
    let start = sector.checked_mul(SECTOR)?;
    let end = start
        .checked_add(bytes)
        .filter(|end| *end <= disk.current_size())?;
    let block = u64::from(disk.block_size);
    let is_whole = disk.limits.any_alignment || start.is_multiple_of(block) && bytes.is_multiple_of(block);
    let is_short = !op.has_data() || bytes <= DATA_BYTES_MAX;
    let is_allowed = !op.is_write() || !disk.read_only;
    (bytes > 0 && is_whole && is_short && is_allowed).then_some(start..end)
}

fn durable(op: Op, is_through: bool) -> Flags {
    match is_through && matches!(op, Op::Write | Op::WriteZeroes) {
        true => Flags::FUA,
        false => Flags::NONE,
    }
}

fn bio(disk: &Disk, op: Op, flags: Flags, range: std::ops::Range<u64>) -> Bio {
    Bio {
        op,
        flags,
        disk: disk.id,
        group: disk.group,
        offset: range.start,
        len: range.end - range.start,
        ..Bio::default()
    }
}

/// The disk's serial number, with zeroes behind it.
fn get_id(pieces: &[Lent], disk: &Disk) -> Begun {
    let mut id = [0; ID_BYTES];
    id[..disk.serial.len()].copy_from_slice(disk.serial.as_bytes());
    let mut written = 0;
    for piece in pieces {
        let left = &id[written..];
        copy_to(*piece, left);
        written += left.len().min(piece.len() as usize);
    }
    match written {
        ID_BYTES => Begun::Ended(OK, ID_BYTES as u32),
        _ => Begun::Ended(IO_ERROR, 0),
    }
}

/// Bytes of the unit of ranges, whatever the block size.
pub(super) const SECTOR: u64 = 512;
/// Most bytes of data of one request.
const DATA_BYTES_MAX: u64 = 64 << 20;
const ID_BYTES: usize = SERIAL_BYTES_MAX;
const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;
const UNMAP: u32 = 1;
const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;
