//! The sending side of a connection, with few system calls: heads of replies and buffers of reads are
//! gathered during a batch and sent with one call at its end. It also limits the bytes of one turn, since the
//! reactor's thread copies them. Used by `connection`.

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use rustix::io::Errno;

use super::slots::Slots;
use super::wire::{Out, Wire};

/// What waits to be sent.
#[derive(Debug)]
pub(super) struct Transmit {
    /// Heads; the session appends here, then [`Transmit::note_heads`] records them.
    pub(super) heads: Vec<u8>,
    /// Bytes of `heads` that were sent.
    heads_sent: usize,
    /// Bytes of `heads` that are in `pieces`.
    heads_noted: usize,
    pieces: VecDeque<Piece>,
    /// Bytes that another daemon has not sent.
    inherited: Vec<u8>,
    /// Bytes that this turn may still send.
    left: usize,
}

impl Default for Transmit {
    fn default() -> Self {
        Self {
            heads: Vec::new(),
            heads_sent: 0,
            heads_noted: 0,
            pieces: VecDeque::new(),
            inherited: Vec::new(),
            left: TURN_BYTES,
        }
    }
}

/// A run of bytes on its way out.
#[derive(Debug)]
enum Piece {
    /// This number of bytes of heads.
    Heads(usize),
    /// The rest of a slot's buffer: bytes already sent, bytes in all.
    Data { slot: u32, sent: usize, len: usize },
    /// The rest of the bytes that another daemon has not sent: bytes already sent.
    Inherited(usize),
}

/// How far a call of [`Transmit::send`] got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// Everything is sent.
    All,
    /// The socket takes no more now.
    Blocked,
    /// This turn has used its allowance; more bytes wait.
    Enough,
}

impl Transmit {
    /// Records heads that were appended.
    #[inline]
    pub(super) fn note_heads(&mut self) {
        let new = self.heads.len() - self.heads_noted;
        if new == 0 {
            return;
        }
        self.heads_noted = self.heads.len();
        match self.pieces.back_mut() {
            Some(Piece::Heads(bytes)) => *bytes += new,
            _ => self.pieces.push_back(Piece::Heads(new)),
        }
    }

    /// Records that the heads that were recorded last, and are not sent, were replaced by others.
    pub(super) fn note_replaced_heads(&mut self) {
        if let Some(Piece::Heads(bytes)) = self.pieces.back_mut() {
            *bytes = *bytes + self.heads.len() - self.heads_noted;
        }
        self.heads_noted = self.heads.len();
    }

    /// Appends the buffer of a slot whose read has ended, behind the head that was recorded last.
    #[inline]
    pub(super) fn push_data(&mut self, slot: u32, len: usize) {
        self.pieces.push_back(Piece::Data { slot, sent: 0, len });
    }

    /// Replaces what waits by these bytes.
    pub(super) fn restore(&mut self, unsent: Vec<u8>) {
        self.clear(|_| {});
        if !unsent.is_empty() {
            self.inherited = unsent;
            self.pieces.push_back(Piece::Inherited(0));
        }
    }

    /// All bytes that wait.
    pub(super) fn unsent(&self, slots: &Slots) -> Vec<u8> {
        let mut unsent = Vec::new();
        let mut heads_at = self.heads_sent;
        for piece in &self.pieces {
            match piece {
                Piece::Heads(len) => {
                    heads_at += len;
                    unsent.extend_from_slice(&self.heads[heads_at - len..heads_at]);
                }
                Piece::Data { slot, sent, len } => {
                    let data = slots.data(*slot, *sent..*len);
                    data.for_each(|run| unsent.extend_from_slice(run));
                }
                Piece::Inherited(sent) => unsent.extend_from_slice(&self.inherited[*sent..]),
            }
        }
        unsent
    }

    /// The number of buffers of reads that wait.
    pub(super) fn data_pieces(&self) -> usize {
        let is_data = |piece: &&Piece| matches!(piece, Piece::Data { .. });
        self.pieces.iter().filter(is_data).count()
    }

    /// Begins a turn.
    pub(super) fn begin_turn(&mut self) {
        self.left = TURN_BYTES;
    }

    /// Returns whether this turn sends no more.
    pub(super) fn has_sent_enough(&self) -> bool {
        self.left == 0
    }

    /// Returns whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Discards everything when the peer is gone; calls `done` for each slot whose buffer is free.
    pub(super) fn clear(&mut self, mut done: impl FnMut(u32)) {
        for piece in self.pieces.drain(..) {
            if let Piece::Data { slot, .. } = piece {
                done(slot);
            }
        }
        self.inherited = Vec::new();
        self.forget_heads();
    }

    /// Sends as much as the socket takes and the turn allows; calls `done` for each slot whose
    /// buffer is sent. Also returns the number of bytes sent.
    ///
    /// # Errors
    /// The error of the socket: the peer is gone.
    pub(super) fn send(
        &mut self,
        wire: &mut Wire,
        slots: &mut Slots,
        mut done: impl FnMut(&mut Slots, u32),
    ) -> io::Result<(Sent, usize)> {
        let mut total = 0;
        while !self.pieces.is_empty() || wire.has_unsent() {
            if self.left == 0 {
                return Ok((Sent::Enough, total));
            }
            match self.send_once(wire, slots) {
                Ok(out) => {
                    total += out.sent;
                    self.left -= out.taken;
                    self.advance(out.taken, slots, &mut done);
                    if out.is_blocked {
                        return Ok((Sent::Blocked, total));
                    }
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        self.forget_heads();
        Ok((Sent::All, total))
    }

    fn send_once(&self, wire: &mut Wire, slots: &mut Slots) -> Result<Out, Errno> {
        let mut slices = [IoSlice::new(&[]); PIECES_AT_ONCE];
        let mut count = 0;
        let mut heads_at = self.heads_sent;
        let mut offered = 0;
        let slots: &Slots = slots;
        let mut add = |run| {
            let bytes = <[u8]>::len(run).min(self.left - offered);
            slices[count] = IoSlice::new(&run[..bytes]);
            offered += bytes;
            count += 1;
            count < PIECES_AT_ONCE && offered < self.left
        };
        let mut has_room = true;
        for piece in &self.pieces {
            has_room = has_room
                && match piece {
                    Piece::Heads(len) => {
                        heads_at += len;
                        add(&self.heads[heads_at - len..heads_at])
                    }
                    Piece::Data { slot, sent, len } => slots.data(*slot, *sent..*len).all(&mut add),
                    Piece::Inherited(sent) => add(&self.inherited[*sent..]),
                };
            if !has_room {
                break;
            }
        }
        wire.send(&slices[..count])
    }

    fn advance(&mut self, mut bytes: usize, slots: &mut Slots, done: &mut impl FnMut(&mut Slots, u32)) {
        while bytes > 0 {
            let piece = self
                .pieces
                .front_mut()
                .expect("more bytes sent than were waiting");
            let left = match piece {
                Piece::Heads(len) => *len,
                Piece::Data { sent, len, .. } => *len - *sent,
                Piece::Inherited(sent) => self.inherited.len() - *sent,
            };
            let now = bytes.min(left);
            bytes -= now;
            let is_through = now == left;
            match piece {
                Piece::Heads(len) => {
                    *len -= now;
                    self.heads_sent += now;
                }
                Piece::Data { sent, .. } | Piece::Inherited(sent) => *sent += now,
            }
            if is_through {
                match self.pieces.pop_front() {
                    Some(Piece::Data { slot, .. }) => done(slots, slot),
                    Some(Piece::Inherited(_)) => self.inherited = Vec::new(),
                    _ => {}
                }
            }
        }
    }

    fn forget_heads(&mut self) {
        self.heads.clear();
        if self.heads.capacity() > HEADS_KEPT {
            // The client did not read for a while: this memory is not counted for anybody, so it is
            // freed.
            self.heads = Vec::new();
        }
        self.heads_sent = 0;
        self.heads_noted = 0;
    }
}

/// Bytes of heads for which a connection keeps room: a batch of some hundred.
const HEADS_KEPT: usize = 16 << 10;
/// Pieces given to one system call.
const PIECES_AT_ONCE: usize = 128;
/// Bytes that one turn sends: 64 reads of 4 KiB with their heads. A tenth of a millisecond.
const TURN_BYTES: usize = 288 << 10;
