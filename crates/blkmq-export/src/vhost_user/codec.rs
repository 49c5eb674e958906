//! The codec of vhost-user messages: bytes and a number of descriptors become a [`Message`] or an error.
//! `connection` receives the bytes, `device` executes them. The layouts are those of the vhost-user
//! specification, for a host of this byte order.

/// Bytes of a message before its body.
pub const HEADER_BYTES: usize = 12;
/// The longest body that is taken: a memory table of 8 regions and a configuration space of 256 bytes both fit.
pub const BODY_BYTES_MAX: usize = 512;
/// Descriptors that a message may carry.
pub const FDS_MAX: usize = 8;

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The number of the message.
    pub request: u32,
    /// The front end waits for an acknowledgement.
    pub needs_reply: bool,
    /// Bytes of the body.
    pub bytes: usize,
}

/// A range of guest memory, and its address in the front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSpec {
    /// Its first address in the guest.
    pub guest: u64,
    /// Bytes.
    pub bytes: u64,
    /// Its first address in the front end.
    pub user: u64,
    /// Where it begins in its file.
    pub offset: u64,
}

/// The parts of a ring: addresses in the front end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingAddresses {
    /// The descriptor table.
    pub desc: u64,
    /// The used ring.
    pub used: u64,
    /// The available ring.
    pub avail: u64,
}

/// The layout of a region for in-flight records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InflightSpec {
    /// Bytes of it.
    pub bytes: u64,
    /// Where it begins in its file.
    pub offset: u64,
    /// Rings that it has room for.
    pub queues: u16,
    /// Descriptors of each.
    pub queue_size: u16,
}

/// A message of the front end. Descriptors are sent beside it, as many as [`Message::fds`] says.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the protocol's")]
pub enum Message {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<RegionSpec>),
    AddMemRegion(RegionSpec),
    RemoveMemRegion(RegionSpec),
    GetMaxMemSlots,
    SetVringNum { index: u32, size: u32 },
    SetVringAddr { index: u32, addresses: RingAddresses },
    SetVringBase { index: u32, base: u32 },
    GetVringBase { index: u32 },
    SetVringKick { index: u32, has_fd: bool },
    SetVringCall { index: u32, has_fd: bool },
    SetVringErr { index: u32, has_fd: bool },
    SetBackendReqFd,
    SetVringEnable { index: u32, on: bool },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    GetConfig { offset: u32, bytes: u32 },
    SetConfig { offset: u32, value: Vec<u8> },
    GetInflightFd(InflightSpec),
    SetInflightFd(InflightSpec),
    ResetDevice,
    SetStatus(u64),
    GetStatus,
}

/// A message that cannot be decoded; the stream cannot be followed any further.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the texts say it")]
pub enum MessageError {
    #[error("message of version {0}: must be 1")]
    Version(u32),
    #[error("message {request} with a body of {bytes} bytes")]
    Length { request: u32, bytes: usize },
    #[error("memory table of {0} regions: there are up to 8, and more by ADD_MEM_REG")]
    Regions(u32),
    #[error("message {request} with {fds} descriptors instead of {expected}")]
    Descriptors {
        request: u32,
        fds: usize,
        expected: usize,
    },
    #[error("message {0} is not supported")]
    Unknown(u32),
    #[error("message {0} names no ring")]
    Ring(u32),
}

impl Header {
    /// Decodes it.
    ///
    /// # Errors
    /// It has another version, or is no message of a front end, or its body is too long.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, MessageError> {
        let mut fields = Fields(bytes);
        let (request, flags, length) = (fields.u32(), fields.u32(), fields.u32() as usize);
        if flags & (VERSION_MASK | REPLY) != VERSION {
            return Err(MessageError::Version(flags & (VERSION_MASK | REPLY)));
        }
        if length > BODY_BYTES_MAX {
            return Err(MessageError::Length {
                request,
                bytes: length,
            });
        }
        Ok(Self {
            request,
            needs_reply: flags & NEED_REPLY != 0,
            bytes: length,
        })
    }

    /// The message that tells a front end that the configuration space, or the status, has changed.
    pub fn config_change() -> [u8; HEADER_BYTES] {
        let mut message = [0; HEADER_BYTES];
        for (word, value) in message.chunks_exact_mut(4).zip([CONFIG_CHANGE, VERSION, 0]) {
            word.copy_from_slice(&value.to_ne_bytes());
        }
        message
    }

    /// Appends a reply to it.
    pub fn reply(&self, body: &[u8], out: &mut Vec<u8>) {
        out.extend(self.request.to_ne_bytes());
        out.extend((VERSION | REPLY).to_ne_bytes());
        out.extend((body.len() as u32).to_ne_bytes());
        out.extend(body);
    }
}

impl Message {
    /// Decodes a body that came with `fds` descriptors.
    ///
    /// # Errors
    /// The body does not match the message, or there are too few or too many descriptors.
    pub fn parse(header: Header, body: &[u8], fds: usize) -> Result<Self, MessageError> {
        let request = header.request;
        let message = Self::read(request, body)?;
        let expected = message.fds();
        if fds == expected {
            return Ok(message);
        }
        Err(MessageError::Descriptors {
            request,
            fds,
            expected,
        })
    }

    /// The number of its descriptors.
    pub fn fds(&self) -> usize {
        match self {
            Self::SetMemTable(regions) => regions.len(),
            Self::AddMemRegion(_) | Self::SetInflightFd(_) | Self::SetBackendReqFd => 1,
            Self::SetVringKick { has_fd, .. }
            | Self::SetVringCall { has_fd, .. }
            | Self::SetVringErr { has_fd, .. } => usize::from(*has_fd),
            _ => 0,
        }
    }

    fn read(request: u32, body: &[u8]) -> Result<Self, MessageError> {
        let mut fields = Fields(body);
        let exact = |bytes: usize| match body.len() == bytes {
            true => Ok(()),
            false => Err(MessageError::Length {
                request,
                bytes: body.len(),
            }),
        };
        exact(match request {
            2 | 12 | 13 | 14 | 16 | 39 => 8,
            8 | 10 | 11 | 18 => 8,
            9 => 40,
            31 | 32 if body.len() == 24 => 24,
            31 | 32 => 20,
            37 | 38 => 40,
            5 => table_bytes(body)?,
            24 | 25 => config_bytes(body),
            1 | 3 | 4 | 15 | 17 | 21 | 34 | 36 | 40 => 0,
            other => return Err(MessageError::Unknown(other)),
        })?;
        Ok(match request {
            1 => Self::GetFeatures,
            2 => Self::SetFeatures(fields.u64()),
            3 => Self::SetOwner,
            4 => Self::ResetOwner,
            5 => {
                let regions = fields.u64() as u32;
                Self::SetMemTable((0..regions).map(|_| fields.region()).collect())
            }
            8..=11 | 18 => Self::read_ring(request, &mut fields),
            12..=14 => Self::read_event(request, fields.u64())?,
            15 => Self::GetProtocolFeatures,
            16 => Self::SetProtocolFeatures(fields.u64()),
            17 => Self::GetQueueNum,
            21 => Self::SetBackendReqFd,
            24 => {
                let (offset, bytes) = (fields.u32(), fields.u32());
                Self::GetConfig { offset, bytes }
            }
            25 => {
                let (offset, _, _) = (fields.u32(), fields.u32(), fields.u32());
                let value = fields.0.to_vec();
                Self::SetConfig { offset, value }
            }
            31 => Self::GetInflightFd(fields.inflight()),
            32 => Self::SetInflightFd(fields.inflight()),
            34 => Self::ResetDevice,
            36 => Self::GetMaxMemSlots,
            37 | 38 => {
                let _padding = fields.u64();
                let region = fields.region();
                match request {
                    37 => Self::AddMemRegion(region),
                    _ => Self::RemoveMemRegion(region),
                }
            }
            39 => Self::SetStatus(fields.u64()),
            _ => Self::GetStatus,
        })
    }

    fn read_ring(request: u32, fields: &mut Fields<'_>) -> Self {
        let (index, value) = (fields.u32(), fields.u32());
        match request {
            8 => Self::SetVringNum { index, size: value },
            9 => {
                let addresses = RingAddresses {
                    desc: fields.u64(),
                    used: fields.u64(),
                    avail: fields.u64(),
                };
                Self::SetVringAddr { index, addresses }
            }
            10 => Self::SetVringBase { index, base: value },
            11 => Self::GetVringBase { index },
            _ => Self::SetVringEnable {
                index,
                on: value != 0,
            },
        }
    }

    fn read_event(request: u32, value: u64) -> Result<Self, MessageError> {
        if value & !(EVENT_INDEX | EVENT_NO_FD) != 0 {
            return Err(MessageError::Ring(request));
        }
        let index = (value & EVENT_INDEX) as u32;
        let has_fd = value & EVENT_NO_FD == 0;
        Ok(match request {
            12 => Self::SetVringKick { index, has_fd },
            13 => Self::SetVringCall { index, has_fd },
            _ => Self::SetVringErr { index, has_fd },
        })
    }
}

impl InflightSpec {
    /// Appends it in the form of a reply.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend(self.bytes.to_ne_bytes());
        out.extend(self.offset.to_ne_bytes());
        out.extend(self.queues.to_ne_bytes());
        out.extend(self.queue_size.to_ne_bytes());
    }
}

/// Bytes that a memory table must have, as its first word says.
fn table_bytes(body: &[u8]) -> Result<usize, MessageError> {
    match Fields(body).u32() {
        regions if regions as usize <= FDS_MAX => Ok(8 + 32 * regions as usize),
        regions => Err(MessageError::Regions(regions)),
    }
}

/// Bytes that a configuration message must have, as its second word says. A request for the content
/// may omit the content.
fn config_bytes(body: &[u8]) -> usize {
    let mut fields = Fields(body);
    let (_, bytes) = (fields.u32(), fields.u32() as usize);
    if bytes > CONFIG_BYTES_MAX {
        return usize::MAX;
    }
    12 + bytes
}

/// Fields in sequence. Missing ones read as 0; lengths are checked before or after.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        match self.0.split_first_chunk::<N>() {
            Some((first, rest)) => {
                self.0 = rest;
                *first
            }
            None => [0; N],
        }
    }

    fn u16(&mut self) -> u16 {
        u16::from_ne_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_ne_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_ne_bytes(self.take())
    }

    fn region(&mut self) -> RegionSpec {
        RegionSpec {
            guest: self.u64(),
            bytes: self.u64(),
            user: self.u64(),
            offset: self.u64(),
        }
    }

    fn inflight(&mut self) -> InflightSpec {
        InflightSpec {
            bytes: self.u64(),
            offset: self.u64(),
            queues: self.u16(),
            queue_size: self.u16(),
        }
    }
}

/// Bytes of the configuration space that can be asked for.
pub const CONFIG_BYTES_MAX: usize = 256;
const VERSION: u32 = 1;
/// A message of a back end to a front end over its own channel.
const CONFIG_CHANGE: u32 = 2;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 4;
const NEED_REPLY: u32 = 8;
const EVENT_INDEX: u64 = 0xff;
const EVENT_NO_FD: u64 = 0x100;

#[cfg(test)]
mod tests {
    use super::*;

    fn header(request: u32, bytes: u32) -> Result<Header, MessageError> {
        let mut all = [0; HEADER_BYTES];
        all[..4].copy_from_slice(&request.to_ne_bytes());
        all[4..8].copy_from_slice(&9_u32.to_ne_bytes());
        all[8..].copy_from_slice(&bytes.to_ne_bytes());
        Header::parse(&all)
    }

    fn parse(request: u32, body: &[u8], fds: usize) -> Result<Message, MessageError> {
        Message::parse(header(request, body.len() as u32)?, body, fds)
    }

    #[test]
    fn messages_are_read_as_the_specification_lays_them_out() {
        assert_eq!(parse(1, &[], 0), Ok(Message::GetFeatures));
        let kick = Message::SetVringKick {
            index: 3,
            has_fd: true,
        };
        assert_eq!(parse(12, &3_u64.to_ne_bytes(), 1), Ok(kick));
        let mut table = vec![1, 0, 0, 0, 0, 0, 0, 0];
        for word in [0x1000_u64, 0x2000, 0x7000_0000, 0x400] {
            table.extend(word.to_ne_bytes());
        }
        let region = RegionSpec {
            guest: 0x1000,
            bytes: 0x2000,
            user: 0x7000_0000,
            offset: 0x400,
        };
        assert_eq!(parse(5, &table, 1), Ok(Message::SetMemTable(vec![region])));
    }

    #[test]
    fn message_of_a_wrong_size_is_an_error() {
        assert!(matches!(header(1, 513), Err(MessageError::Length { .. })));
        assert!(matches!(parse(99, &[], 0), Err(MessageError::Unknown(99))));
        assert!(matches!(parse(2, &[0; 7], 0), Err(MessageError::Length { .. })));
        assert!(matches!(
            parse(12, &[0; 8], 0),
            Err(MessageError::Descriptors { .. })
        ));
        assert!(matches!(parse(12, &[0xff; 8], 1), Err(MessageError::Ring(12))));
        let mut table = vec![0xff; 264];
        assert!(parse(5, &table, 8).is_err(), "more regions than a message has");
        table[..4].copy_from_slice(&8_u32.to_ne_bytes());
        assert!(parse(5, &table, 8).is_ok());
        assert!(parse(5, &table, 7).is_err(), "a region without a file");
    }
}
