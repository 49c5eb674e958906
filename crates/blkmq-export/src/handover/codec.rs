//! The protocol by which one daemon takes over from another: messages to bytes and back. `channel` carries
//! them, with the descriptors that belong to some; the front door of a session defines the session's body.
//!
//! ```text
//!  incoming: hello                     outgoing: welcome, sources, keys, locks, sockets, paths, end
//!  incoming: disks, differences, take               outgoing: sessions, statistics, end    (it serves nobody meanwhile)
//!  incoming: ready                     outgoing: go
//!  incoming: taken                     outgoing: ends
//! ```
//!
//! Either may send `refused` with a reason instead. Numbers are little-endian; a text or a list of
//! bytes has its length before it.
//!
//! An incoming daemon begins with the newest version that it has. One that is refused before the
//! welcome says hello again, on another connection, with the next older one.

mod body;

use std::fmt;

pub use blkmq_host::device::FileId;

use self::body::too_long;
pub use self::body::{Reader, Writer};

/// The newest version of the protocol.
pub const VERSION: u32 = 5;
/// The oldest one that can be spoken, too: it has neither sources, differences and paths nor keys.
pub const VERSION_MIN: u32 = 3;
/// The first one in which disks are compared by their sources, and paths of sockets by their files.
pub const VERSION_OF_SOURCES: u32 = 4;
/// The first one in which keys of encrypted disks are handed over.
pub const VERSION_OF_KEYS: u32 = 5;
/// Bytes before the body of each message: its length and its kind.
pub const HEADER_BYTES: usize = 6;
/// The longest body: a session with all data that its client may have under way, in either
/// direction.
pub const BODY_BYTES_MAX: usize = 256 << 20;
/// The longest body of a source.
pub const SOURCE_BYTES_MAX: usize = 1 << 20;
/// The longest body of any other message.
pub const SHORT_BODY_BYTES_MAX: usize = 64 << 10;
/// The longest text within a message.
pub const TEXT_BYTES_MAX: usize = 8 << 10;
/// Descriptors that one message may carry: more than a front end with all its regions and rings has.
pub const FDS_MAX: usize = 1024;

/// One message. Descriptors are sent beside it, where its doc names them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The incoming daemon's first message.
    Hello {
        /// Its version of the protocol.
        version: u32,
    },
    /// The outgoing daemon's answer.
    Welcome {
        /// Its version of the protocol.
        version: u32,
        /// The instance of the server that its clients know.
        instance: Option<u64>,
    },
    /// Where the data of one of the outgoing daemon's disks are.
    Source(Source),
    /// One descriptor: sealed memory with the volume key of an encrypted disk.
    Key {
        /// The disk's name.
        disk: String,
    },
    /// One descriptor: it holds the lock of a disk's file.
    Lock,
    /// One descriptor: a socket that listens, or that of a mount.
    Socket(Socket),
    /// The identity of a socket's path.
    Path {
        /// The socket's address.
        address: String,
        /// The socket's file.
        file: FileId,
    },
    /// A disk, as the incoming daemon has it.
    Disk(Disk),
    /// The incoming daemon has other data under a disk's name.
    Differs(Difference),
    /// The incoming daemon has sent everything: the outgoing one is to stop and to hand over.
    Take,
    /// One client, with its descriptors; the first one is its socket.
    Session(Session),
    /// What a group has done on a queue so far.
    Statistics(Statistics),
    /// All messages of a kind have been sent.
    End {
        /// The number of messages before.
        count: u32,
    },
    /// The incoming daemon has everything, and waits.
    Ready,
    /// From here on the outgoing daemon touches nothing.
    Go,
    /// The incoming daemon serves.
    Taken,
    /// The sender refuses to go on.
    Refused {
        /// The reason, for people.
        reason: String,
    },
}

/// Where a disk's data are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The disk's name.
    pub disk: String,
    /// Its keys in the configuration, as TOML.
    pub keys: String,
    /// Bytes, where they may have become more than the configuration has.
    pub size: Option<u64>,
    /// The open files that contain it.
    pub files: Vec<FileId>,
    /// Whether clients use it.
    pub has_clients: bool,
}

/// A disk that has other data in the incoming daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The disk's name.
    pub disk: String,
    /// In which way, for people.
    pub how: String,
}

/// A socket that listens, or a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Socket {
    /// The front door that serves there.
    pub door: String,
    /// Its own address, such as `unix:/run/blkmq/nbd.sock`, or `/run/blkmq/vm1` of a mount.
    pub address: String,
    /// Who made it.
    pub origin: Origin,
}

/// Who made a socket that listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A daemon: it removes the path at its end.
    Daemon,
    /// Systemd; with the name by which an address has it.
    Systemd(Option<String>),
}

/// What clients were told of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Its name.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// Smallest unit of its addresses and lengths, in bytes.
    pub block_size: u32,
    /// Whether changes are refused.
    pub read_only: bool,
}

/// One client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// The front door that serves it.
    pub door: String,
    /// The address of the socket at which the client connected.
    pub address: String,
    /// What its front door needs to know. Empty for a client with which nothing was exchanged yet.
    pub body: Vec<u8>,
}

/// What a group has done on a queue so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statistics {
    /// The queue.
    pub queue: String,
    /// The group's path.
    pub group: String,
    /// Its counts, in an order of their own.
    pub counts: Vec<u64>,
    /// What it owes its caps, in the order of their kinds.
    pub debts: Vec<u64>,
    /// The queue's scheduler.
    pub scheduler: String,
    /// What the scheduler has learnt of the group, in an encoding of its own.
    pub learnt: Vec<u64>,
}

/// Why bytes are no message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// A kind that does not exist.
    Kind(u16),
    /// A body, a text or a list is longer than it may be.
    TooLong {
        /// What is too long.
        what: &'static str,
        /// Its length.
        length: u64,
        /// Its limit.
        max: u64,
    },
    /// The bytes end before the message does.
    Truncated(&'static str),
    /// More bytes than the message has.
    Trailing(usize),
    /// A text that is no UTF-8.
    Text(&'static str),
    /// A value that does not exist.
    Value(&'static str, u64),
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kind(kind) => write!(f, "there is no message of kind {kind}"),
            Self::TooLong { what, length, max } => {
                write!(f, "{what} of {length} bytes: at most {max} are taken")
            }
            Self::Truncated(what) => write!(f, "a message ends within {what}"),
            Self::Trailing(bytes) => write!(f, "{bytes} bytes behind the end of a message"),
            Self::Text(what) => write!(f, "{what} is no UTF-8"),
            Self::Value(what, value) => write!(f, "{what} cannot be {value}"),
        }
    }
}

impl std::error::Error for DecodeError {}

impl Message {
    /// Returns how many descriptors come beside a message, at least and at most.
    pub fn fds(&self) -> (usize, usize) {
        match self {
            Self::Lock | Self::Socket(_) | Self::Key { .. } => (1, 1),
            Self::Session(_) => (1, FDS_MAX),
            _ => (0, 0),
        }
    }

    /// Decodes the header: the kind and the length of the body.
    ///
    /// # Errors
    /// The kind does not exist, or its body is too long.
    pub fn parse_header(bytes: [u8; HEADER_BYTES]) -> Result<(u16, usize), DecodeError> {
        let [a, b, c, d, e, f] = bytes;
        let (length, kind) = (u32::from_le_bytes([a, b, c, d]), u16::from_le_bytes([e, f]));
        let max = match kind {
            HELLO..=KEY => body_bytes_max(kind),
            _ => return Err(DecodeError::Kind(kind)),
        };
        let length = length as usize;
        if length > max {
            return Err(too_long("a message", length, max));
        }
        Ok((kind, length))
    }

    /// Decodes the body of a message of this kind.
    ///
    /// # Errors
    /// The fault in the body.
    pub fn parse(kind: u16, body: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        let message = match kind {
            HELLO => Self::Hello {
                version: reader.u32("the version")?,
            },
            WELCOME => Self::Welcome {
                version: reader.u32("the version")?,
                instance: reader.optional("the instance", |reader| reader.u64("the instance"))?,
            },
            SOURCE => Self::Source(Source {
                disk: reader.text("a disk's name")?,
                keys: reader.long_text("a disk's keys", SOURCE_BYTES_MAX)?,
                size: reader.optional("a disk's size", |reader| reader.u64("a disk's size"))?,
                files: reader.files()?,
                has_clients: reader.flag("a disk's mark of clients")?,
            }),
            KEY => Self::Key {
                disk: reader.text("a disk's name")?,
            },
            LOCK => Self::Lock,
            SOCKET => Self::Socket(Socket {
                door: reader.text("a front door")?,
                address: reader.text("an address")?,
                origin: match reader.u8("a socket's origin")? {
                    0 => Origin::Daemon,
                    1 => Origin::Systemd(None),
                    2 => Origin::Systemd(Some(reader.text("a socket's name")?)),
                    other => return Err(DecodeError::Value("a socket's origin", other.into())),
                },
            }),
            PATH => Self::Path {
                address: reader.text("an address")?,
                file: reader.file()?,
            },
            DISK => Self::Disk(Disk {
                name: reader.text("a disk's name")?,
                size: reader.u64("a disk's size")?,
                block_size: reader.u32("a disk's block size")?,
                read_only: reader.flag("a disk's read-only mark")?,
            }),
            DIFFERS => Self::Differs(Difference {
                disk: reader.text("a disk's name")?,
                how: reader.text("a difference")?,
            }),
            TAKE => Self::Take,
            SESSION => Self::Session(Session {
                door: reader.text("a front door")?,
                address: reader.text("an address")?,
                body: reader.bytes("a session", BODY_BYTES_MAX)?.to_vec(),
            }),
            STATISTICS => Self::Statistics(Statistics {
                queue: reader.text("a queue")?,
                group: reader.text("a group")?,
                counts: reader.counts()?,
                debts: reader.counts()?,
                scheduler: reader.text("a scheduler")?,
                learnt: reader.counts()?,
            }),
            END => Self::End {
                count: reader.u32("a count")?,
            },
            READY => Self::Ready,
            GO => Self::Go,
            TAKEN => Self::Taken,
            REFUSED => Self::Refused {
                reason: reader.text("a reason")?,
            },
            _ => return Err(DecodeError::Kind(kind)),
        };
        reader.end()?;
        Ok(message)
    }

    /// Appends the message, header and body.
    ///
    /// # Panics
    /// The message is longer than its limit.
    pub fn write(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend([0; HEADER_BYTES]);
        let mut writer = Writer(out);
        let kind = self.write_body(&mut writer);
        let length = out.len() - start - HEADER_BYTES;
        let max = body_bytes_max(kind);
        assert!(
            length <= max,
            "a message of {length} bytes: at most {max} are taken"
        );
        out[start..start + 4].copy_from_slice(&(length as u32).to_le_bytes());
        out[start + 4..start + 6].copy_from_slice(&kind.to_le_bytes());
    }

    fn write_body(&self, writer: &mut Writer<'_>) -> u16 {
        match self {
            Self::Hello { version } => {
                writer.u32(*version);
                HELLO
            }
            Self::Welcome { version, instance } => {
                writer.u32(*version);
                writer.optional(instance.as_ref(), |writer, instance| writer.u64(*instance));
                WELCOME
            }
            Self::Source(source) => {
                writer.text(&source.disk);
                writer.bytes(source.keys.as_bytes());
                writer.optional(source.size.as_ref(), |writer, size| writer.u64(*size));
                writer.files(&source.files);
                writer.u8(source.has_clients.into());
                SOURCE
            }
            Self::Key { disk } => {
                writer.text(disk);
                KEY
            }
            Self::Lock => LOCK,
            Self::Socket(socket) => {
                writer.text(&socket.door);
                writer.text(&socket.address);
                match &socket.origin {
                    Origin::Daemon => writer.u8(0),
                    Origin::Systemd(None) => writer.u8(1),
                    Origin::Systemd(Some(name)) => {
                        writer.u8(2);
                        writer.text(name);
                    }
                }
                SOCKET
            }
            Self::Path { address, file } => {
                writer.text(address);
                writer.file(*file);
                PATH
            }
            Self::Disk(disk) => {
                writer.text(&disk.name);
                writer.u64(disk.size);
                writer.u32(disk.block_size);
                writer.u8(disk.read_only.into());
                DISK
            }
            Self::Differs(difference) => {
                writer.text(&difference.disk);
                writer.text(&difference.how);
                DIFFERS
            }
            Self::Take => TAKE,
            Self::Session(session) => {
                writer.text(&session.door);
                writer.text(&session.address);
                writer.bytes(&session.body);
                SESSION
            }
            Self::Statistics(statistics) => {
                writer.text(&statistics.queue);
                writer.text(&statistics.group);
                writer.counts(&statistics.counts);
                writer.counts(&statistics.debts);
                writer.text(&statistics.scheduler);
                writer.counts(&statistics.learnt);
                STATISTICS
            }
            Self::End { count } => {
                writer.u32(*count);
                END
            }
            Self::Ready => READY,
            Self::Go => GO,
            Self::Taken => TAKEN,
            Self::Refused { reason } => {
                writer.text(reason);
                REFUSED
            }
        }
    }
}

/// The longest body of a message of this kind.
fn body_bytes_max(kind: u16) -> usize {
    match kind {
        SESSION => BODY_BYTES_MAX,
        SOURCE => SOURCE_BYTES_MAX,
        _ => SHORT_BODY_BYTES_MAX,
    }
}

const HELLO: u16 = 1;
const WELCOME: u16 = 2;
const LOCK: u16 = 3;
const SOCKET: u16 = 4;
const DISK: u16 = 5;
const TAKE: u16 = 6;
const SESSION: u16 = 7;
const STATISTICS: u16 = 8;
const END: u16 = 9;
const READY: u16 = 10;
const GO: u16 = 11;
const TAKEN: u16 = 12;
const REFUSED: u16 = 13;
const SOURCE: u16 = 14;
const DIFFERS: u16 = 15;
const PATH: u16 = 16;
const KEY: u16 = 17;

#[cfg(test)]
mod tests;
