//! What a stream has to make of the records that reach it, by RFC 8446: which data comes out, and
//! how it ends.

use super::peer::{HEADER, TAG};

/// A record as it was sealed, and as it is now.
#[derive(Clone)]
pub(super) struct Record {
    /// Which key has sealed it, and how many records before it.
    pub(super) number: (u64, u64),
    /// Content, type and padding.
    pub(super) inner: Vec<u8>,
    pub(super) sealed: Vec<u8>,
    /// What is sent: `sealed`, unless somebody has changed it.
    pub(super) bytes: Vec<u8>,
}

/// How the data ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The peer has closed the connection.
    Closed,
    /// The stream refuses a record, and tells why by this alert.
    Refused(u8),
    /// The peer's alert is an error. There is no answer.
    Told,
    /// A length is not what it was: the stream refuses something, or waits for more.
    Unknown,
}

/// What a stream has to make of the records that were sent so far.
#[derive(Default)]
pub(super) struct Model {
    /// The stream is the client's.
    is_client: bool,
    pub(super) data: Vec<u8>,
    pub(super) end: Option<End>,
    /// Key updates that ask for one of the other direction.
    pub(super) asked: u64,
    /// The number of the next record.
    next: (u64, u64),
    /// Messages of the handshake protocol that are not whole.
    message: Vec<u8>,
    /// Records without data since the last one with some.
    fruitless: u32,
}

impl Model {
    pub(super) fn new(is_client: bool) -> Self {
        Self {
            is_client,
            ..Self::default()
        }
    }

    /// Takes note of a record that is sent.
    pub(super) fn send(&mut self, record: &Record) {
        // A record of which nothing is left was dropped.
        if self.end.is_none() && !record.bytes.is_empty() {
            self.end = damage(record).or_else(|| self.receive(record));
        }
    }

    /// Takes note of bytes that are sent and are no record.
    pub(super) fn send_noise(&mut self) {
        self.end = self.end.or(Some(End::Unknown));
    }

    fn receive(&mut self, record: &Record) -> Option<End> {
        if record.inner.len() + TAG > SEALED_MAX {
            return Some(End::Refused(RECORD_OVERFLOW));
        }
        if record.number != self.next {
            return Some(End::Refused(BAD_RECORD_MAC));
        }
        self.next.1 += 1;
        if record.inner.len() > CONTENT_MAX + 1 {
            return Some(End::Refused(RECORD_OVERFLOW));
        }
        let Some(last) = record.inner.iter().rposition(|&byte| byte != 0) else {
            return Some(End::Refused(UNEXPECTED_MESSAGE));
        };
        let (content, kind) = (&record.inner[..last], record.inner[last]);
        if kind != HANDSHAKE && !self.message.is_empty() {
            return Some(End::Refused(UNEXPECTED_MESSAGE));
        }
        if kind == DATA && !content.is_empty() {
            self.fruitless = 0;
            self.data.extend_from_slice(content);
            return None;
        }
        self.fruitless += 1;
        if self.fruitless > FRUITLESS_MAX {
            return Some(End::Refused(UNEXPECTED_MESSAGE));
        }
        match (kind, content) {
            (DATA, _) | (ALERT, [_, USER_CANCELED]) => None,
            (ALERT, [_, CLOSE_NOTIFY]) => Some(End::Closed),
            (ALERT, [_, _]) => Some(End::Told),
            (ALERT, _) | (HANDSHAKE, []) => Some(End::Refused(DECODE_ERROR)),
            (HANDSHAKE, fragment) => self.receive_handshake(fragment),
            _ => Some(End::Refused(UNEXPECTED_MESSAGE)),
        }
    }

    fn receive_handshake(&mut self, fragment: &[u8]) -> Option<End> {
        if self.message.len() + fragment.len() > MESSAGES_MAX {
            return Some(End::Refused(DECODE_ERROR));
        }
        self.message.extend_from_slice(fragment);
        while let Some((&[kind, high, middle, low], rest)) = self.message.split_first_chunk() {
            let length = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
            if 4 + length > MESSAGES_MAX {
                return Some(End::Refused(DECODE_ERROR));
            }
            match kind {
                KEY_UPDATE if length != 1 => return Some(End::Refused(ILLEGAL_PARAMETER)),
                KEY_UPDATE => {}
                NEW_SESSION_TICKET if self.is_client => {}
                _ => return Some(End::Refused(UNEXPECTED_MESSAGE)),
            }
            let (body, rest) = rest.split_at_checked(length)?;
            match (kind, body) {
                (KEY_UPDATE, _) if !rest.is_empty() => return Some(End::Refused(UNEXPECTED_MESSAGE)),
                (KEY_UPDATE, [asks @ (0 | 1)]) => {
                    self.asked += u64::from(*asks);
                    self.next = (self.next.0 + 1, 0);
                }
                (KEY_UPDATE, _) => return Some(End::Refused(ILLEGAL_PARAMETER)),
                _ => {}
            }
            self.message = rest.to_vec();
        }
        None
    }
}

/// How the data ends at a record because somebody has changed it.
fn damage(record: &Record) -> Option<End> {
    let (sealed, bytes) = (&record.sealed, &record.bytes);
    if sealed == bytes {
        return None;
    }
    let is_moved = sealed.len() != bytes.len() || sealed[3..HEADER] != bytes[3..HEADER];
    Some(match is_moved {
        true => End::Unknown,
        false if bytes[0] != DATA => End::Refused(UNEXPECTED_MESSAGE),
        false if bytes[1..3] != sealed[1..3] => End::Refused(BAD_RECORD_MAC),
        false if bytes.len() - HEADER > SEALED_MAX => End::Refused(RECORD_OVERFLOW),
        false => End::Refused(BAD_RECORD_MAC),
    })
}

pub(super) const ALERT: u8 = 21;
pub(super) const HANDSHAKE: u8 = 22;
pub(super) const DATA: u8 = 23;
const NEW_SESSION_TICKET: u8 = 4;
pub(super) const KEY_UPDATE: u8 = 24;
pub(super) const CLOSE_NOTIFY: u8 = 0;
pub(super) const UNEXPECTED_MESSAGE: u8 = 10;
pub(super) const BAD_RECORD_MAC: u8 = 20;
pub(super) const RECORD_OVERFLOW: u8 = 22;
const ILLEGAL_PARAMETER: u8 = 47;
const DECODE_ERROR: u8 = 50;
const USER_CANCELED: u8 = 90;
const CONTENT_MAX: usize = 1 << 14;
const SEALED_MAX: usize = CONTENT_MAX + 256;
/// As many bytes of messages that are not whole, and as many records without data, as a stream
/// bears.
const MESSAGES_MAX: usize = 0xffff;
const FRUITLESS_MAX: u32 = 32;
