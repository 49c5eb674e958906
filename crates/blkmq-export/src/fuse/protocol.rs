//! The codec of the kernel's FUSE protocol (`linux/fuse.h`, version 7): requests become values, or an error
//! that names the fault; answers become bytes. `channel` reads requests and writes answers.
//!
//! Numbers are in the machine's byte order. A request is a header of 40 bytes and the fields of its
//! operation; a write's data follows after 80 bytes, which is why requests are received in two
//! pieces: the first [`FRONT_BYTES`] of them, and the rest.

use std::fmt;

/// Bytes of a request's header.
pub const HEADER_BYTES: usize = 40;
/// Bytes before a write's data.
pub const FRONT_BYTES: usize = 80;
/// Bytes before what follows a request's fixed part, for the longest request that is decoded here.
pub const FIXED_BYTES_MAX: usize = HEADER_BYTES + 88;
/// Bytes of an answer's header.
pub const ANSWER_BYTES: usize = 16;
/// Bytes of data of one read or write at most.
pub const DATA_BYTES_MAX: usize = 1 << 20;
/// The same for requests that come through rings: each entry has this much memory, whatever its
/// use.
pub const RING_DATA_BYTES_MAX: usize = 128 << 10;
/// Bytes of the area of a ring's entry that holds a request's header, and then an answer's.
pub const RING_HEADER_BYTES: usize = 288;
/// The number of the file that is the mount's root.
pub const ROOT: u64 = 1;

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its number, which the answer repeats.
    pub unique: u64,
    /// What is asked.
    pub call: Call,
}

/// What the kernel asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Negotiate the protocol.
    Init(Init),
    /// Return the file's attributes.
    GetAttr,
    /// Change attributes.
    SetAttr(SetAttr),
    /// Open the file with these flags of `open`.
    Open(u32),
    /// The last descriptor of an opening is closed.
    Release,
    /// Read.
    Read(Range),
    /// Write; its data follows.
    Write {
        /// Where.
        range: Range,
        /// The write is to be durable when it ends (`O_DSYNC`, `O_SYNC`).
        is_durable: bool,
    },
    /// Make completed writes durable.
    Fsync,
    /// Free a range, or fill it with zeroes.
    Fallocate {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// What to do, as for `fallocate`.
        mode: u32,
    },
    /// Find where data or a hole begins.
    Lseek {
        /// Where to look from.
        offset: u64,
        /// `SEEK_DATA` or `SEEK_HOLE`.
        whence: u32,
    },
    /// Report the size of the filesystem.
    StatFs,
    /// The kernel drops its reference: no answer is expected.
    Forget,
    /// A process that waits for another request has got a signal.
    Interrupt,
    /// The filesystem ends.
    Destroy,
    /// An operation that is not served here, by its number.
    Other(u32),
}

/// A range of bytes that is to be read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First byte.
    pub offset: u64,
    /// Bytes, at most [`DATA_BYTES_MAX`].
    pub len: u32,
}

/// What the kernel offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Init {
    /// The major version; 7 is served here.
    pub major: u32,
    /// Its minor version.
    pub minor: u32,
    /// Bytes that the kernel reads ahead.
    pub max_readahead: u32,
    /// The kernel's features, a bit each; newer kernels use the upper half too.
    pub flags: u64,
}

/// Which attributes are to change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetAttr {
    /// A bit for each, and one if an open file is given.
    pub valid: u32,
    /// The new size, if it is to change.
    pub size: u64,
}

/// Why bytes are no request: the connection is of no use any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed {
    what: &'static str,
    opcode: u32,
    bytes: usize,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, opcode, bytes } = self;
        write!(f, "a request of {bytes} bytes with number {opcode}: {what}")
    }
}

impl Request {
    /// Decodes a request of `bytes` bytes, of which `fixed` has the first: all, or [`FRONT_BYTES`]
    /// of a write, or [`FIXED_BYTES_MAX`].
    ///
    /// # Errors
    /// The request is shorter than its operation needs, or its lengths contradict each other.
    pub fn parse(fixed: &[u8], bytes: usize) -> Result<Self, Malformed> {
        let fields = Fields(fixed);
        let malformed = |what| Malformed {
            what,
            opcode: if fixed.len() >= 8 { fields.u32(4) } else { 0 },
            bytes,
        };
        if fixed.len() < HEADER_BYTES || fixed.len() > bytes {
            return Err(malformed("shorter than a header"));
        }
        if fields.u32(0) as usize != bytes {
            return Err(malformed("its length says otherwise"));
        }
        let (opcode, unique) = (fields.u32(4), fields.u64(8));
        if fixed.len() < HEADER_BYTES + body_bytes(opcode) {
            return Err(malformed("its fixed part is cut off"));
        }
        let call = fields.call(opcode);
        if let Call::Read(range) | Call::Write { range, .. } = call {
            if range.len as usize > DATA_BYTES_MAX {
                return Err(malformed("more data than was agreed on"));
            }
            if range.offset.checked_add(range.len.into()).is_none() {
                return Err(malformed("its range ends beyond all numbers"));
            }
            if matches!(call, Call::Write { .. }) && bytes != FRONT_BYTES + range.len as usize {
                return Err(malformed("its data has another length"));
            }
        }
        Ok(Self { unique, call })
    }

    /// Decodes a request as a ring has it: the header, the fields of its operation, and only the
    /// length of its data.
    ///
    /// # Errors
    /// As [`Request::parse`], or if there is more data than an entry has room for.
    pub fn parse_in_ring(area: &[u8; RING_HEADER_BYTES]) -> Result<Self, Malformed> {
        let fields = Fields(area);
        let bytes = fields.u32(0) as usize;
        let mut fixed = [0; FIXED_BYTES_MAX];
        fixed[..HEADER_BYTES].copy_from_slice(&area[..HEADER_BYTES]);
        fixed[HEADER_BYTES..].copy_from_slice(&area[RING_OPERATION..][..FIXED_BYTES_MAX - HEADER_BYTES]);
        let request = Self::parse(&fixed[..bytes.min(FIXED_BYTES_MAX)], bytes)?;
        let malformed = |what| Malformed {
            what,
            opcode: fields.u32(4),
            bytes,
        };
        if let Call::Read(range) | Call::Write { range, .. } = request.call {
            if range.len as usize > RING_DATA_BYTES_MAX {
                return Err(malformed("more data than an entry has room for"));
            }
            if matches!(request.call, Call::Write { .. }) && fields.u32(RING_DATA_BYTES) != range.len {
                return Err(malformed("its data has another length"));
            }
        }
        Ok(request)
    }
}

/// The number by which the kernel knows the request in a ring's entry when it is answered.
pub fn commit_id(area: &[u8; RING_HEADER_BYTES]) -> u64 {
    Fields(area).u64(RING_COMMIT_ID)
}

/// Writes an answer's header over a request's: with `data_bytes` bytes of data, or with an errno of
/// Linux.
pub fn put_ring_answer(area: &mut [u8; RING_HEADER_BYTES], unique: u64, errno: i32, data_bytes: usize) {
    area[..ANSWER_BYTES].copy_from_slice(&answer(unique, errno, data_bytes));
    area[RING_DATA_BYTES..][..4].copy_from_slice(&(data_bytes as u32).to_ne_bytes());
}

/// Bytes behind the header that are decoded here.
fn body_bytes(opcode: u32) -> usize {
    match opcode {
        INIT => 16,
        SETATTR => 88,
        OPEN => 8,
        READ | WRITE => 40,
        FALLOCATE => 32,
        LSEEK => 24,
        _ => 0,
    }
}

/// Numbers in a request, by offset.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn u32(&self, at: usize) -> u32 {
        u32::from_ne_bytes(self.0[at..at + 4].try_into().expect("4 bytes"))
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.0[at..at + 8].try_into().expect("8 bytes"))
    }

    fn range(&self) -> Range {
        Range {
            offset: self.u64(48),
            len: self.u32(56),
        }
    }

    fn call(&self, opcode: u32) -> Call {
        match opcode {
            INIT => Call::Init(self.init()),
            GETATTR => Call::GetAttr,
            SETATTR => Call::SetAttr(SetAttr {
                valid: self.u32(40),
                size: self.u64(56),
            }),
            OPEN => Call::Open(self.u32(40)),
            RELEASE => Call::Release,
            READ => Call::Read(self.range()),
            WRITE => Call::Write {
                range: self.range(),
                is_durable: self.u32(72) & (libc::O_DSYNC as u32) != 0,
            },
            FSYNC => Call::Fsync,
            FALLOCATE => Call::Fallocate {
                offset: self.u64(48),
                len: self.u64(56),
                mode: self.u32(64),
            },
            LSEEK => Call::Lseek {
                offset: self.u64(48),
                whence: self.u32(56),
            },
            STATFS => Call::StatFs,
            FORGET | BATCH_FORGET => Call::Forget,
            INTERRUPT => Call::Interrupt,
            DESTROY => Call::Destroy,
            other => Call::Other(other),
        }
    }

    fn init(&self) -> Init {
        let low = u64::from(self.u32(52));
        let has_high = low & INIT_EXT != 0 && self.0.len() >= 60;
        let high = if has_high { u64::from(self.u32(56)) } else { 0 };
        Init {
            major: self.u32(40),
            minor: self.u32(44),
            max_readahead: self.u32(48),
            flags: high << 32 | low,
        }
    }
}

/// The header of an answer: with `data_bytes` bytes of data, or with an errno of Linux.
pub fn answer(unique: u64, errno: i32, data_bytes: usize) -> [u8; ANSWER_BYTES] {
    let mut header = [0; ANSWER_BYTES];
    let len = (ANSWER_BYTES + data_bytes) as u32;
    header[..4].copy_from_slice(&len.to_ne_bytes());
    header[4..8].copy_from_slice(&(-errno).to_ne_bytes());
    header[8..].copy_from_slice(&unique.to_ne_bytes());
    header
}

/// What was negotiated with the kernel once, for as long as the mount exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// The minor version in use.
    pub minor: u32,
    /// Bytes of data of one read or write at most.
    pub data_bytes_max: u32,
    /// Requests come through rings, once there is an entry for each processor.
    pub is_ring: bool,
}

impl Agreed {
    /// What is negotiated with a kernel that offers `init`, with or without rings. `None` if the
    /// protocol is another one.
    pub fn on(init: &Init, wants_ring: bool) -> Option<Self> {
        let is_spoken = init.major == MAJOR && init.minor >= MINOR_MIN;
        let is_ring = wants_ring && init.flags & OVER_IO_URING != 0;
        let data_bytes_max = if is_ring {
            RING_DATA_BYTES_MAX
        } else {
            DATA_BYTES_MAX
        };
        is_spoken.then(|| Self {
            minor: init.minor.min(MINOR_MAX),
            data_bytes_max: data_bytes_max as u32,
            is_ring,
        })
    }

    /// Returns whether the version that another daemon negotiated is served here.
    pub fn is_version_served(&self) -> bool {
        (MINOR_MIN..=MINOR_MAX).contains(&self.minor)
    }

    /// Returns whether the length that another daemon negotiated fits the buffers here.
    pub fn is_length_served(&self) -> bool {
        self.data_bytes_max as usize <= DATA_BYTES_MAX
    }
}

/// The answer to an offer: what was negotiated.
pub fn init_answer(init: &Init, agreed: &Agreed, in_flight_max: u16) -> [u8; 64] {
    let mut flags = init.flags & (ASYNC_READ | BIG_WRITES | ASYNC_DIO | MAX_PAGES);
    if agreed.is_ring {
        flags |= INIT_EXT | OVER_IO_URING;
    }
    let mut bytes = Bytes::<64>::default();
    bytes.u32(MAJOR).u32(agreed.minor);
    bytes.u32(init.max_readahead).u32(flags as u32);
    bytes.u16(in_flight_max).u16(in_flight_max);
    bytes.u32(agreed.data_bytes_max).u32(1);
    bytes.u16((agreed.data_bytes_max as usize / PAGE) as u16).u16(0);
    bytes.u32((flags >> 32) as u32);
    bytes.0
}

/// The attributes of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Bytes.
    pub size: u64,
    /// The type, a regular file, and the permissions.
    pub mode: u32,
    /// The user that owns it.
    pub uid: u32,
    /// The group that owns it.
    pub gid: u32,
    /// Preferred size of a read or write, in bytes.
    pub block_size: u32,
    /// When it was mounted, in seconds since 1970.
    pub since: u64,
}

impl Attributes {
    /// The answer, which the kernel may cache for a second.
    pub fn answer(&self) -> [u8; 104] {
        let mut bytes = Bytes::<104>::default();
        bytes.u64(ATTRIBUTES_VALID).u32(0).u32(0);
        bytes.u64(ROOT).u64(self.size).u64(self.size / 512);
        bytes.u64(self.since).u64(self.since).u64(self.since);
        bytes.u32(0).u32(0).u32(0);
        bytes.u32(self.mode).u32(1).u32(self.uid).u32(self.gid);
        bytes.u32(0).u32(self.block_size).u32(0);
        bytes.0
    }
}

/// The answer to an open: no page cache, concurrent writes, and no flush at `close`.
pub fn open_answer() -> [u8; 16] {
    let mut bytes = Bytes::<16>::default();
    bytes
        .u64(0)
        .u32(OPEN_DIRECT | OPEN_NO_FLUSH | OPEN_PARALLEL_WRITES);
    bytes.0
}

/// The answer to a write of `len` bytes.
pub fn write_answer(len: u32) -> [u8; 8] {
    let mut bytes = Bytes::<8>::default();
    bytes.u32(len);
    bytes.0
}

/// The answer for a filesystem that one file fills.
pub fn statfs_answer(size: u64, block_size: u32) -> [u8; 80] {
    let mut bytes = Bytes::<80>::default();
    bytes.u64(size.div_ceil(block_size.into())).u64(0).u64(0);
    bytes.u64(1).u64(0);
    bytes.u32(block_size).u32(255).u32(block_size);
    bytes.0
}

/// The answer to a search: data or the hole begins at `offset`.
pub fn lseek_answer(offset: u64) -> [u8; 8] {
    offset.to_ne_bytes()
}

/// A notification to the kernel that the file's attributes have changed.
pub fn attributes_changed() -> [u8; ANSWER_BYTES + 24] {
    let mut bytes = Bytes::<{ ANSWER_BYTES + 24 }>::default();
    bytes
        .u32((ANSWER_BYTES + 24) as u32)
        .u32(NOTIFY_INVAL_INODE)
        .u64(0);
    // A negative offset leaves the cached pages alone, of which there are none.
    bytes.u64(ROOT).u64(u64::MAX).u64(0);
    bytes.0
}

/// Numbers, one after the other; zeroes behind them.
struct Bytes<const N: usize>([u8; N], usize);

impl<const N: usize> Default for Bytes<N> {
    fn default() -> Self {
        Self([0; N], 0)
    }
}

impl<const N: usize> Bytes<N> {
    fn put(&mut self, bytes: &[u8]) -> &mut Self {
        self.0[self.1..self.1 + bytes.len()].copy_from_slice(bytes);
        self.1 += bytes.len();
        self
    }

    fn u16(&mut self, value: u16) -> &mut Self {
        self.put(&value.to_ne_bytes())
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.put(&value.to_ne_bytes())
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.put(&value.to_ne_bytes())
    }
}

/// Offsets in an entry's area: the fields of the operation, the request's number there, and the
/// length of its data.
const RING_OPERATION: usize = 128;
const RING_COMMIT_ID: usize = 256 + 8;
const RING_DATA_BYTES: usize = 256 + 16;
const PAGE: usize = 4096;
/// Seconds for which the kernel may use cached attributes.
const ATTRIBUTES_VALID: u64 = 1;
const MAJOR: u32 = 7;
/// The minor version of Linux 4.20, the first with reads and writes of more than 128 KiB.
const MINOR_MIN: u32 = 28;
/// The newest minor version whose answers are known here.
const MINOR_MAX: u32 = 38;

const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const SETATTR: u32 = 4;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const STATFS: u32 = 17;
const RELEASE: u32 = 18;
const FSYNC: u32 = 20;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const DESTROY: u32 = 38;
const BATCH_FORGET: u32 = 42;
const FALLOCATE: u32 = 43;
const LSEEK: u32 = 46;

const ASYNC_READ: u64 = 1 << 0;
const BIG_WRITES: u64 = 1 << 5;
const ASYNC_DIO: u64 = 1 << 15;
const MAX_PAGES: u64 = 1 << 22;
const INIT_EXT: u64 = 1 << 30;
const OVER_IO_URING: u64 = 1 << 41;

const OPEN_DIRECT: u32 = 1 << 0;
const OPEN_NO_FLUSH: u32 = 1 << 5;
const OPEN_PARALLEL_WRITES: u32 = 1 << 6;

/// The mode is to change.
pub const SET_MODE: u32 = 1 << 0;
/// The owner is to change.
pub const SET_UID: u32 = 1 << 1;
/// The group is to change.
pub const SET_GID: u32 = 1 << 2;
/// The size is to change.
pub const SET_SIZE: u32 = 1 << 3;
/// The change comes through a descriptor (`ftruncate`), not by a path or by `open` with `O_TRUNC`.
pub const SET_BY_HANDLE: u32 = 1 << 6;

const NOTIFY_INVAL_INODE: u32 = 2;

#[cfg(test)]
mod tests;
