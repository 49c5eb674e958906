//! Records that reach a TLS stream after its handshake, and records that it sends.
//!
//! The first two bytes choose the side of the stream, its cipher suite and the pieces in which
//! records reach it. The rest is what reaches it, or a sequence of operations: the peer seals data,
//! key updates, alerts and anything else by the right keys, somebody changes, cuts, swaps, repeats
//! and drops records, and the stream answers. Broken would be: data that was not sealed, or not in
//! order; data behind a record that has to be refused; another end, or another alert, than RFC 8446
//! asks for; a record of ours that the peer cannot open; or more records waiting to be sent than
//! the limit.

mod model;
mod peer;

use std::io::{self, IoSlice};

use blkmq_tls::{Opened, Stream};

use model::{
    ALERT, BAD_RECORD_MAC, CLOSE_NOTIFY, DATA, End, HANDSHAKE, KEY_UPDATE, Model, RECORD_OVERFLOW, Record,
    UNEXPECTED_MESSAGE,
};
use peer::{Direction, Ends, HEADER, TAG};

/// Runs one input.
///
/// # Panics
/// An invariant is broken.
pub fn run(data: &[u8]) {
    let Some((&[setting, piece], rest)) = data.split_first_chunk() else {
        return;
    };
    let mut bench = Bench::new(setting, piece);
    if setting & 8 != 0 {
        bench.inject(rest);
    } else {
        let mut bytes = Bytes(rest);
        while step(&mut bench, &mut bytes).is_some() {}
    }
    bench.finish();
}

/// Does the next operation; `None` at the end of the input.
fn step(bench: &mut Bench, bytes: &mut Bytes<'_>) -> Option<()> {
    match bytes.one()? & 15 {
        0 | 1 => {
            let count = u16::from_be_bytes(bytes.array()?);
            bench.seal_data(count.into(), 0);
        }
        2 => {
            let [count, padding] = bytes.array()?;
            bench.seal_data(count.into(), usize::from(padding) * 80);
        }
        3 => {
            let [kind, count] = bytes.array()?;
            let content = bytes.some(count.into());
            bench.seal(content, kind, 0);
        }
        4 => {
            let [how] = bytes.array()?;
            bench.update(how & 1, usize::from(how >> 1) % 5);
        }
        5 => {
            let alert: [u8; 2] = bytes.array()?;
            bench.seal(&alert, ALERT, 0);
        }
        6 => {
            let [which, high, low, bit] = bytes.array()?;
            if let Some(record) = bench.pending(which) {
                let at = usize::from(u16::from_be_bytes([high, low]));
                // The header, too, more often than by its share.
                let length = record.bytes.len();
                let at = at % if bit & 8 == 0 { length } else { HEADER.min(length) };
                record.bytes[at] ^= 1 << (bit & 7);
            }
        }
        7 => {
            let [one, other] = bytes.array::<2>()?.map(usize::from);
            let count = bench.pending.len().max(1);
            if one % count != other % count {
                bench.pending.swap(one % count, other % count);
            }
        }
        8 => {
            let which = bytes.one()?;
            let again = bench.pending(which).cloned();
            bench.pending.extend(again);
        }
        9 => {
            let which = usize::from(bytes.one()?);
            if !bench.pending.is_empty() {
                bench.pending.remove(which % bench.pending.len());
            }
        }
        10 => {
            let [which, high, low] = bytes.array()?;
            if let Some(record) = bench.pending(which) {
                let length = usize::from(u16::from_be_bytes([high, low])) % record.bytes.len();
                record.bytes.truncate(length);
            }
        }
        11 => {
            let [records, high, low] = bytes.array()?;
            bench.send(records.into());
            bench.open(u16::from_be_bytes([high, low]).into());
        }
        12 => {
            let count = u16::from_be_bytes(bytes.array()?);
            bench.answer(count.into());
        }
        13 => {
            let count = bytes.one()?;
            bench.take(usize::from(count) * 256);
        }
        14 => {
            let count = bytes.one()?;
            (0..count % 40).for_each(|_| bench.seal(&[], DATA, 0));
        }
        _ => match bytes.one()? {
            0 => bench.close(),
            1 => bench.ours.begin_turn(),
            count @ 2..40 => (0..count).for_each(|_| bench.update(1, 0)),
            count => {
                let noise = bytes.some(usize::from(count) - 40);
                bench.send(usize::MAX);
                bench.inject(noise);
            }
        },
    }
    Some(())
}

struct Bench {
    ours: Stream,
    sealer: Direction,
    opener: Direction,
    /// Records that the peer has sealed and not sent.
    pending: Vec<Record>,
    /// Bytes that were sent and are not received.
    wire: Vec<u8>,
    /// Bytes that reach the stream at a time.
    piece: usize,
    /// What the stream has to make of what was sent.
    model: Model,
    /// Bytes of data that the peer has sealed.
    sealed: usize,
    /// Bytes of data that came out. Each was compared with the model's.
    opened: usize,
    end: Option<Result<(), rustls::Error>>,
    /// Records of the stream, from the first byte that the peer has not opened.
    taken: Vec<u8>,
    /// Bytes of data that the stream has sealed, and that the peer has opened.
    answered: (usize, usize),
    /// Key updates of the stream.
    updates: u64,
    /// Key updates that may have been asked for when the stream last sealed data.
    asked_before: u64,
    /// The stream was told to close.
    is_closed: bool,
    /// The stream was told to seal data after its end.
    is_misused: bool,
    /// The alert that the peer was sent.
    alert: Option<u8>,
}

impl Bench {
    fn new(setting: u8, piece: u8) -> Self {
        let is_client = setting & 4 != 0;
        let Ends { ours, sealer, opener } = peer::shake_hands(is_client, usize::from(setting & 3));
        Self {
            ours,
            sealer,
            opener,
            pending: Vec::new(),
            wire: Vec::new(),
            piece: match piece {
                0..128 => usize::from(piece) + 1,
                _ => usize::from(piece - 127) * 512,
            },
            model: Model::new(is_client),
            sealed: 0,
            opened: 0,
            end: None,
            taken: Vec::new(),
            answered: (0, 0),
            updates: 0,
            asked_before: 0,
            is_closed: false,
            is_misused: false,
            alert: None,
        }
    }

    fn pending(&mut self, which: u8) -> Option<&mut Record> {
        let count = self.pending.len().max(1);
        let record = self.pending.get_mut(usize::from(which) % count)?;
        (!record.bytes.is_empty()).then_some(record)
    }

    /// Has the peer seal data, less of it once an input has had its share.
    fn seal_data(&mut self, count: usize, padding: usize) {
        let count = match self.sealed < SEALED_BYTES {
            true => count,
            false => count % 64,
        };
        let data: Vec<u8> = (self.sealed..self.sealed + count).map(noise).collect();
        self.sealed += count;
        self.seal(&data, DATA, padding);
    }

    fn seal(&mut self, content: &[u8], kind: u8, padding: usize) {
        let mut inner = content.to_vec();
        inner.push(kind);
        inner.resize(inner.len() + padding, 0);
        inner.truncate(usize::from(u16::MAX) - TAG);
        let number = self.sealer.number;
        let sealed = self.sealer.seal(&inner);
        self.pending.push(Record {
            number,
            inner,
            bytes: sealed.clone(),
            sealed,
        });
    }

    /// Has the peer seal a key update, in two records if `split` is not 0.
    fn update(&mut self, asks: u8, split: usize) {
        let message = [KEY_UPDATE, 0, 0, 1, asks];
        let (first, second) = message.split_at(split);
        for part in [first, second] {
            if !part.is_empty() {
                self.seal(part, HANDSHAKE, 0);
            }
        }
        self.sealer.update();
    }

    /// Sends the first pending records.
    fn send(&mut self, count: usize) {
        for record in self.pending.drain(..count.min(self.pending.len())) {
            self.model.send(&record);
            self.wire.extend_from_slice(&record.bytes);
        }
    }

    /// Sends what no key has sealed.
    fn inject(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.model.send_noise();
            self.wire.extend_from_slice(bytes);
        }
    }

    /// Has the stream open up to `limit` bytes of data, and receive for that what was sent.
    fn open(&mut self, limit: usize) {
        let until = self.opened.saturating_add(limit);
        let (mut into, mut received, mut is_new) = ([0; 3000], 0, false);
        while self.end.is_none() && self.opened < until {
            let room = into.len().min(until - self.opened);
            match self.ours.open(&mut into[..room]) {
                Ok(Opened::Bytes(count)) => {
                    assert!(count > 0, "data without any");
                    let expected = self.model.data.get(self.opened..self.opened + count);
                    assert_eq!(Some(&into[..count]), expected, "data that was not sealed");
                    self.opened += count;
                    is_new = false;
                }
                Ok(Opened::NeedMore) if received == self.wire.len() => break,
                Ok(Opened::NeedMore) => {
                    let room = self.ours.room();
                    let count = (self.wire.len() - received).min(self.piece).min(room.len());
                    assert!(count > 0, "a record that does not fit");
                    room[..count].copy_from_slice(&self.wire[received..received + count]);
                    self.ours.received(count);
                    received += count;
                    is_new = false;
                }
                Ok(Opened::Enough) => {
                    assert!(!is_new, "a turn that looks at nothing");
                    self.ours.begin_turn();
                    is_new = true;
                }
                Ok(Opened::End) => self.end = Some(Ok(())),
                Err(error) => self.end = Some(Err(error)),
            }
        }
        self.wire.drain(..received);
    }

    /// Has the stream seal data.
    fn answer(&mut self, count: usize) {
        let from = self.answered.0;
        let data: Vec<u8> = (from..from + count).map(noise).collect();
        let pieces: Vec<IoSlice<'_>> = data.chunks(7000).map(IoSlice::new).collect();
        let is_over = self.is_closed || matches!(self.end, Some(Err(_)));
        match self.ours.seal(&pieces) {
            Ok(taken) => {
                assert!(!is_over, "data after the end");
                self.answered.0 += taken;
                if taken > 0 {
                    self.asked_before = self.model.asked;
                }
            }
            Err(error) => {
                assert!(is_over, "{error}");
                // It fails for good, and opens nothing more.
                self.end.get_or_insert(Err(error));
                self.is_misused = true;
            }
        }
    }

    fn close(&mut self) {
        self.ours.close();
        self.is_closed = true;
    }

    /// Has the peer take up to `limit` bytes that the stream sends, and open the records in them.
    fn take(&mut self, mut limit: usize) {
        let taken = &mut self.taken;
        let sent = self.ours.send(|waiting| {
            assert!(waiting.len() <= UNSENT_MAX, "{} bytes wait", waiting.len());
            let count = waiting.len().min(limit);
            taken.extend_from_slice(&waiting[..count]);
            limit -= count;
            match count {
                0 => Err(io::ErrorKind::WouldBlock.into()),
                _ => Ok(count),
            }
        });
        assert!(sent.is_err() || !self.ours.has_unsent());
        let mut at = 0;
        while let Some(&[.., high, low]) = self.taken[at..].first_chunk::<HEADER>() {
            let end = at + HEADER + usize::from(u16::from_be_bytes([high, low]));
            let Some(record) = self.taken.get(at..end) else {
                break;
            };
            let (content, kind) = self.opener.open(record);
            at = end;
            assert_eq!(self.alert, None, "a record behind an alert");
            match (kind, &content[..]) {
                (DATA, data) => {
                    let from = self.answered.1;
                    self.answered.1 += data.len();
                    assert!(!data.is_empty() && self.answered.1 <= self.answered.0);
                    assert!(data.iter().copied().eq((from..self.answered.1).map(noise)));
                }
                (HANDSHAKE, [KEY_UPDATE, 0, 0, 1, 0]) => {
                    self.opener.update();
                    self.updates += 1;
                    assert!(
                        self.updates <= self.model.asked,
                        "an update that was not asked for"
                    );
                }
                (ALERT, &[_, alert]) => self.alert = Some(alert),
                other => panic!("the stream has sealed {other:?}"),
            }
        }
        self.taken.drain(..at);
    }

    /// Sends and opens all that is left, both ways, and compares the ends.
    fn finish(mut self) {
        self.send(usize::MAX);
        self.open(usize::MAX);
        self.take(usize::MAX);
        let (end, is_misused) = (self.end.clone(), self.is_misused);
        let (updates, is_asked) = (self.updates, self.model.asked > self.asked_before);
        self.answer(1);
        self.take(usize::MAX);
        assert!(self.taken.is_empty() && self.answered.0 == self.answered.1);
        let is_over = self.is_closed || matches!(self.end, Some(Err(_)));
        if is_asked && !is_over {
            assert_eq!(self.updates, updates + 1, "updates that were asked for");
        }
        if is_misused && self.is_closed {
            return;
        }
        assert_eq!(self.opened, self.model.data.len(), "data is missing");
        let told = self.alert.filter(|_| !self.is_closed);
        match (self.model.end, &end) {
            (None, None) | (Some(End::Closed), Some(Ok(()))) | (Some(End::Unknown), None) => {
                assert_eq!(told, None);
            }
            (Some(End::Told), Some(Err(rustls::Error::AlertReceived(_)))) => assert_eq!(told, None),
            (Some(End::Refused(alert)), Some(Err(_))) => {
                assert!(
                    self.is_closed || told == Some(alert),
                    "{told:?} instead of {alert}"
                );
            }
            (Some(End::Unknown), Some(Err(_))) => {
                let known = [BAD_RECORD_MAC, RECORD_OVERFLOW, UNEXPECTED_MESSAGE];
                assert!(self.is_closed || told.is_some_and(|alert| known.contains(&alert)));
            }
            (expected, end) => panic!("{end:?} instead of {expected:?}"),
        }
        // After an error there is no close.
        let is_told = self.alert.is_some() || matches!(end, Some(Err(_)));
        assert!(!self.is_closed || is_told, "a close that is not told");
        assert!(self.alert != Some(CLOSE_NOTIFY) || self.is_closed);
    }
}

/// The byte of the data at a place.
fn noise(at: usize) -> u8 {
    (at.wrapping_mul(0x9e37_79b9) >> 13) as u8
}

/// What is left of the input.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn one(&mut self) -> Option<u8> {
        self.array().map(|[byte]| byte)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    /// So many bytes, or as many as are left.
    fn some(&mut self, count: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        head
    }
}

/// Data of one input, about. More would make the fuzzer slow.
const SEALED_BYTES: usize = 256 << 10;
/// What may wait to be sent: the stream's limit of 160 KiB, and beyond that the headers and tags of
/// one call, a key update and an alert.
const UNSENT_MAX: usize = (160 << 10) + 512;
