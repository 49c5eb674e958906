//! What becomes of a request: submit, look-up, wait, and at last the reply. `intake` passes requests
//! here.

use blkmq_core::bio::{Bio, Status};
use blkmq_host::service::Cx;
use blkmq_nbd::codec::ErrorCode;
use blkmq_nbd::codec::reply::Extent;

use super::super::request::{bio, buffer_bytes, changed_extent, error_of, extent};
use super::intake::{Intake, Needs};
use super::{Connection, NbdClient, SELECTED};
use crate::common::buffers::NoMemory;
use crate::common::life::{Event, Life};
use crate::common::lookup::{ExtentQuery, ExtentReply};
use crate::nbd::session::{Op, Request};

impl NbdClient {
    /// Begins a request. Returns what the next message needs.
    pub(super) fn begin(&mut self, cx: &mut Cx<'_>, request: Request) -> Needs {
        let connection = &mut self.protocol;
        if request.op == Op::Cache {
            connection
                .session
                .replies()
                .ok(&request, &mut connection.transmit.heads);
            connection.transmit.note_heads();
            return Needs::Nothing;
        }
        let disk = self.disk.as_ref().expect(SELECTED);
        let slot = match connection.slots.begin(request, buffer_bytes(&request, disk)) {
            Ok(slot) => slot,
            Err(lack) => {
                self.starve(cx, request, lack);
                return Needs::Room;
            }
        };
        match request.op {
            Op::Write => return self.take_payload(cx, slot),
            Op::Fence => self.fence(slot, request.offset),
            _ => self.submit_request(cx, slot),
        }
        Needs::Nothing
    }

    /// There is no memory for a request now: either others have it, and the request waits for its
    /// turn, or the system has none.
    #[cold]
    fn starve(&mut self, cx: &Cx<'_>, request: Request, lack: NoMemory) {
        match lack {
            NoMemory::Now => self.protocol.intake = Intake::Starved(request),
            NoMemory::OfTheSystem(error) => {
                self.warn(cx.now(), format_args!("closed: no memory for a request: {error}"));
                self.life.apply(Event::Lose);
            }
        }
    }

    /// A connection that may have been woken for memory and cannot take it now leaves its place in the line, since
    /// all others wait behind it. It joins the line again with its next try.
    pub(super) fn let_others_have_memory(&mut self) {
        if matches!(self.protocol.intake, Intake::Starved(_)) && !self.takes() {
            self.protocol.slots.give_up();
        }
    }

    pub(super) fn submit_request(&mut self, cx: &mut Cx<'_>, index: u32) {
        let disk = self.disk.as_ref().expect(SELECTED);
        let queue = disk.queue;
        let slot = self.protocol.slots.get(index);
        let mut bio = bio(&slot.request, disk, index);
        slot.lend_to(&mut bio);
        self.submit(cx, queue, bio);
    }

    /// The client has given up another session of its own: that session is ended, and its end is
    /// waited for.
    #[cold]
    fn fence(&mut self, slot: u32, number: u64) {
        let session = self.session.as_ref().expect(SELECTED);
        match session.fence(number) {
            Some(fenced) => self.protocol.fences.push((slot, fenced)),
            None => self.protocol.end_fence(slot),
        }
    }

    /// Asks for the block status. The request has paid before: its group has read a block, in its
    /// turn and within its caps.
    fn look_up(&mut self, slot: u32, request: &Request) {
        let disk = self.disk.as_ref().expect(SELECTED);
        let extent_replies = self.protocol.extent_replies.as_ref().expect(SELECTED);
        let max = self
            .protocol
            .session
            .replies()
            .extents_max(request)
            .min(EXTENTS_MAX);
        let range = (request.offset, request.length);
        let contexts = self.protocol.session.contexts().expect(SELECTED);
        let mut query = ExtentQuery::new(disk, slot, range, max, extent_replies);
        query.has_allocation = contexts.allocation;
        query.bitmaps.clone_from(&contexts.bitmaps);
        self.protocol.door.common.lookups.ask(query);
    }

    /// A bio has ended: replies to its request, unless more of it is to be read, written or looked
    /// up.
    pub(super) fn complete_bio(&mut self, cx: &mut Cx<'_>, mut bio: Bio) {
        let index = bio.cookie as u32;
        let Connection {
            slots,
            session,
            transmit,
            loss_cursor,
            ..
        } = &mut self.protocol;
        let slot = slots.get(index);
        slot.take_back(&bio);
        let request = slot.request;
        if bio.status.is_ok() && self.life != Life::Gone {
            if session.replies().has_holes() {
                slot.look_for_zeroes();
            }
            if slot.is_unfinished() {
                return self.submit_request(cx, index);
            }
        }
        let reads_as_zeroes = slot.is_zero;
        if let (Op::Flush, Some(disk), Some(loss_cursor)) = (request.op, &self.disk, loss_cursor) {
            bio.status = loss_cursor.check_and_advance(disk, bio.status);
        }
        if request.op == Op::BlockStatus && bio.status != Status::Shutdown {
            // Whether the block could be read has no bearing on what is allocated.
            return self.look_up(index, &request);
        }
        let (replies, heads) = (session.replies(), &mut transmit.heads);
        if !bio.status.is_ok() {
            slots.end(index);
            let (code, message) = error_of(bio.status, &request);
            replies.error(&request, code, message, heads);
            transmit.note_heads();
        } else if request.op == Op::Read && replies.has_holes() && reads_as_zeroes {
            slots.end(index);
            replies.hole(&request, heads);
            transmit.note_heads();
        } else if request.op == Op::Read {
            replies.read(&request, heads);
            transmit.note_heads();
            transmit.push_data(index, request.length as usize);
        } else {
            slots.end(index);
            replies.ok(&request, heads);
            transmit.note_heads();
        }
    }
}

impl Connection {
    fn end_fence(&mut self, slot: u32) {
        let request = self.slots.end(slot);
        self.session.replies().ok(&request, &mut self.transmit.heads);
        self.transmit.note_heads();
    }

    /// Replies to the fences whose sessions have ended.
    pub(super) fn end_fences(&mut self) {
        let ended: Vec<_> = self
            .fences
            .extract_if(.., |(_, fenced)| fenced.has_ended())
            .collect();
        for (slot, _) in ended {
            self.end_fence(slot);
        }
    }

    /// Replies with the answers that have arrived.
    pub(super) fn take_answers(&mut self) {
        let answers = self
            .extent_replies
            .as_ref()
            .map(|extent_replies| extent_replies.take())
            .unwrap_or_default();
        for ExtentReply {
            slot,
            extents,
            changed,
        } in answers
        {
            let request = self.slots.end(slot);
            let has_allocation = self.session.contexts().expect(SELECTED).allocation;
            let (replies, heads) = (self.session.replies(), &mut self.transmit.heads);
            match extents {
                Ok(extents) => {
                    let extents: Vec<Extent> = extents.iter().map(extent).collect();
                    let changed: Vec<Vec<Extent>> = changed
                        .iter()
                        .map(|runs| runs.iter().map(changed_extent).collect())
                        .collect();
                    let allocation = has_allocation.then_some(&extents[..]);
                    replies.block_status(&request, allocation, &changed, heads);
                }
                Err(error) => {
                    let message = format!("the disk cannot say what is there: {error}");
                    replies.error(&request, ErrorCode::Io, &message, heads);
                }
            }
            self.transmit.note_heads();
        }
    }
}

/// Extents looked up for one reply, with about two system calls each. Clients continue from where a
/// reply ended.
const EXTENTS_MAX: usize = 64;
