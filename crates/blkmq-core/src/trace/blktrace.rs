//! Trace records in a file, as the kernel's block layer writes them (`struct blk_io_trace` of
//! `linux/blktrace_api.h`, version 7, in the byte order of the machine), so that `blkparse` and `btt`
//! read it.

use super::{Event, Step};
use crate::bio::{Flags, Op};

/// One record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Which of its CPU's it is, from 1 on.
    pub sequence: u32,
    /// Nanoseconds.
    pub time: u64,
    /// Where, in units of 512 bytes.
    pub sector: u64,
    /// How many bytes.
    pub bytes: u32,
    /// What happened, and to what: [`QUEUE`] and the others in the lower half, categories in the upper one.
    pub action: u32,
    /// Who asked for it: here, a group.
    pub pid: u32,
    /// The disk.
    pub device: u32,
    /// Here, the reactor.
    pub cpu: u32,
    /// An errno.
    pub error: u16,
    /// Text, of a notice.
    pub text: Vec<u8>,
}

impl Record {
    /// Makes this the record of an event, without `sequence`, `pid`, `device` and `cpu`, which stay. Returns `false` for
    /// [`Step::Renumbered`], which has no record.
    #[inline]
    pub fn set(&mut self, event: &Event) -> bool {
        let Some(action) = action(event.step) else {
            return false;
        };
        self.time = event.at.0;
        self.sector = event.offset / SECTOR;
        // Discards can be longer than a record can say.
        self.bytes = event.len & !511;
        self.action = action | kind(event.op, event.flags) << CATEGORIES;
        self.error = event.status.errno() as u16;
        true
    }

    /// A notice: of a process's name, or of a message.
    pub fn notice(action: u32, time: u64, text: &str) -> Self {
        Self {
            time,
            action: action | NOTIFY << CATEGORIES,
            text: text.as_bytes().to_vec(),
            ..Self::default()
        }
    }

    /// The categories that it is in.
    pub fn categories(&self) -> u32 {
        self.action >> CATEGORIES
    }

    /// Says whether it is an event of this kind.
    pub fn is_event(&self, action: u32) -> bool {
        self.action & 0xff == action && self.categories() & NOTIFY == 0
    }

    /// Appends it to a file's bytes.
    #[inline]
    pub fn write(&self, out: &mut Vec<u8>) {
        let text = &self.text[..self.text.len().min(TEXT_MAX)];
        let mut head = [0; HEAD_BYTES];
        // Places are constants, so that this becomes a few stores.
        macro_rules! put {
            ($($at:literal: $value:expr;)*) => {
                $(*head[$at..].first_chunk_mut().expect("it has room") = $value.to_ne_bytes();)*
            };
        }
        put! {
            0: (MAGIC | VERSION);
            4: self.sequence;
            8: self.time;
            16: self.sector;
            24: self.bytes;
            28: self.action;
            32: self.pid;
            36: self.device;
            40: self.cpu;
            44: self.error;
            46: (text.len() as u16);
        }
        out.extend_from_slice(&head);
        if !text.is_empty() {
            out.extend_from_slice(text);
        }
    }

    /// Reads the first record of some bytes. Returns it and how many bytes it took; none if it is not all there.
    ///
    /// # Errors
    /// If this is no such record.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, BadRecord> {
        let Some(head) = bytes.first_chunk::<HEAD_BYTES>() else {
            return Ok(None);
        };
        let word = |at: usize| u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let half = |at: usize| u16::from_ne_bytes([head[at], head[at + 1]]);
        let long = |at: usize| u64::from_ne_bytes(std::array::from_fn(|byte| head[at + byte]));
        if word(0) & !0xff != MAGIC {
            return Err(BadRecord(word(0)));
        }
        let len = HEAD_BYTES + usize::from(half(46));
        let Some(text) = bytes.get(HEAD_BYTES..len) else {
            return Ok(None);
        };
        let record = Self {
            sequence: word(4),
            time: long(8),
            sector: long(16),
            bytes: word(24),
            action: word(28),
            pid: word(32),
            device: word(36),
            cpu: word(40),
            error: half(44),
            text: text.to_vec(),
        };
        Ok(Some((record, len)))
    }
}

/// What is no record: its first word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadRecord(u32);

impl std::fmt::Display for BadRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:#010x} where a record of blktrace should begin: another format, another byte order, or damaged",
            self.0
        )
    }
}

impl std::error::Error for BadRecord {}

/// The number of a device, as the kernel writes it.
pub fn device(minor: u32) -> u32 {
    MAJOR << MINOR_BITS | minor & ((1 << MINOR_BITS) - 1)
}

/// The same for people.
pub fn device_text(device: u32) -> String {
    format!("{},{}", device >> MINOR_BITS, device & ((1 << MINOR_BITS) - 1))
}

fn action(step: Step) -> Option<u32> {
    let (action, category) = match step {
        Step::Queued => (QUEUE, 1 << 4),
        Step::Merged => (MERGE, 1 << 4),
        Step::Inserted => (INSERT, 1 << 4),
        Step::HeldBack => (SLEEP, 1 << 4),
        Step::Requeued => (REQUEUE, 1 << 5),
        Step::Issued => (ISSUE, 1 << 6),
        Step::Completed => (COMPLETE, 1 << 7),
        Step::Renumbered => return None,
    };
    Some(action | category << CATEGORIES)
}

fn kind(op: Op, flags: Flags) -> u32 {
    let op = match op {
        Op::Read => READ,
        Op::Write if flags.has(Flags::ASYNC) => WRITE,
        Op::Write => WRITE | SYNC,
        Op::WriteZeroes => WRITE | META,
        Op::Discard => WRITE | DISCARD,
        Op::Flush => FLUSH,
    };
    op | if flags.has(Flags::FUA) { FUA } else { 0 }
}

/// Events: a bio is in a request.
pub const QUEUE: u32 = 1;
/// It has joined another one.
pub const MERGE: u32 = 2;
/// A request waits: here, for a cap.
pub const SLEEP: u32 = 5;
/// It goes to the driver again.
pub const REQUEUE: u32 = 6;
/// The driver has it.
pub const ISSUE: u32 = 7;
/// It has ended.
pub const COMPLETE: u32 = 8;
/// It is in the elevator.
pub const INSERT: u32 = 12;
/// Notices: the name of a process.
pub const PROCESS: u32 = 0;
/// A message.
pub const MESSAGE: u32 = 2;

/// Categories.
pub const READ: u32 = 1;
/// A write, or a discard.
pub const WRITE: u32 = 1 << 1;
/// A flush.
pub const FLUSH: u32 = 1 << 2;
/// Somebody waits for it.
pub const SYNC: u32 = 1 << 3;
/// A notice.
pub const NOTIFY: u32 = 1 << 10;
/// Here, of a write: it has no data, and zeroes the range. The kernel, which knows zeroing as a write alone, has it for metadata.
pub const META: u32 = 1 << 12;
/// A discard.
pub const DISCARD: u32 = 1 << 13;
/// A write that is to be durable when it ends.
pub const FUA: u32 = 1 << 15;

/// The longest name of a process, with the 0 behind it.
pub const NAME_BYTES: usize = 16;
/// Bytes of a sector.
pub const SECTOR: u64 = 512;
const MAGIC: u32 = 0x6561_7400;
const VERSION: u32 = 7;
const CATEGORIES: u32 = 16;
const HEAD_BYTES: usize = 48;
const TEXT_MAX: usize = 4096;
/// Block devices of no driver's own.
const MAJOR: u32 = 259;
const MINOR_BITS: u32 = 20;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(text: Vec<u8>) -> Record {
        Record {
            sequence: 7,
            time: 1 << 40,
            sector: 8,
            bytes: 4096,
            action: action(Step::Issued).expect("an action") | READ << CATEGORIES,
            pid: 3,
            device: device(5),
            cpu: 1,
            error: 5,
            text,
        }
    }

    #[test]
    fn record_that_was_written_is_read_again_and_a_part_of_one_is_waited_for() {
        let mut bytes = Vec::new();
        record(b"vm1".to_vec()).write(&mut bytes);
        let len = bytes.len();
        assert_eq!(len, 51);
        assert_eq!(Record::parse(&bytes), Ok(Some((record(b"vm1".to_vec()), len))));
        for part in 0..len {
            assert_eq!(Record::parse(&bytes[..part]), Ok(None));
        }
        bytes[1] ^= 1;
        assert!(Record::parse(&bytes).is_err());
    }

    #[test]
    fn numbers_are_those_of_the_kernel() {
        // BLK_TA_ISSUE and BLK_TC_READ, as blktrace_api.h has them.
        assert_eq!(record(Vec::new()).action, 7 | (1 << 6) << 16 | 1 << 16);
        assert_eq!(device_text(device(5)), "259,5");
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_record_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(Some((record, len))) = Record::parse(&bytes) {
                prop_assert!(len <= bytes.len());
                prop_assert_eq!(record.text.len() + 48, len);
            }
        }
    }
}
