//! A hardware context of an rbd drive: a request is one asynchronous call of librbd, one of whose threads
//! puts the completion into the mailbox. One hardware context belongs to one reactor; `sys` makes the
//! calls.

use std::io;
use std::sync::Arc;

use blkmq_core::bio::{Flags, Op, Status};
use blkmq_core::driver::{DisksError, Done, HctxDriver, Issued, TimedOut};
use blkmq_core::ids::{Cookie, DiskId};
use blkmq_core::request::Request;
use blkmq_core::time::Instant;
use blkmq_host::ring::{Completion, RingClient, RingHandle};
use blkmq_sync::mpsc::Receiver;

use super::device::{Images, Shared};
use super::image::Image;
use super::mailbox::{End, Mailbox};

/// The driver's side of one hardware context.
pub(super) struct RbdHctx {
    ring_client: RingClient,
    shared: Arc<Shared>,
    /// The device's images, as this context knew them at the last change.
    images: Images,
    mailbox: Arc<Mailbox>,
    ends: Receiver<End>,
    /// Requests under way, by tag.
    under_way: Box<[Option<UnderWay>]>,
    in_flight: u32,
    completions: Vec<Completion>,
}

/// A request that librbd has.
#[derive(Clone, Copy, Debug)]
struct UnderWay {
    cookie: Cookie,
    op: Op,
    disk: DiskId,
    offset: u64,
    len: u64,
}

impl RbdHctx {
    /// Makes a context for tags below `depth` on the reactor of `ring`.
    pub(super) fn new(shared: Arc<Shared>, ring: &RingHandle, depth: u32) -> io::Result<Self> {
        let (mailbox, ends) = Mailbox::new(depth)?;
        let hctx = Self {
            ring_client: ring.open_client(),
            images: shared.images(),
            shared,
            mailbox,
            ends,
            under_way: vec![None; depth as usize].into(),
            in_flight: 0,
            completions: Vec::with_capacity(depth as usize),
        };
        hctx.watch_mailbox();
        Ok(hctx)
    }

    fn watch_mailbox(&self) {
        self.ring_client
            .push_poll(self.mailbox.fd(), libc::POLLIN, true, ENDS);
    }

    #[inline]
    fn start(&mut self, rq: &Request, cookie: Cookie) -> Result<(), Status> {
        let image = self.images.get(rq.disk()).ok_or(Status::Invalid)?;
        if rq.op() == Op::WriteZeroes && rq.flags().has(Flags::FAST_ONLY.with(Flags::NO_UNMAP)) {
            return Err(Status::NotSupported);
        }
        let number = cookie.tag().index();
        debug_assert!(self.under_way[number].is_none(), "tag {number} is issued twice");
        let started = image.raw().start(self.mailbox.slot(number), rq);
        started.map_err(|error| Status::from_errno(error.raw_os_error().unwrap_or(libc::EIO)))?;
        self.under_way[number] = Some(UnderWay {
            cookie,
            op: rq.op(),
            disk: rq.disk(),
            offset: rq.offset(),
            len: rq.len(),
        });
        self.in_flight += 1;
        Ok(())
    }

    /// Handles completions of the ring: the mailbox has entries.
    #[cold]
    fn take_news(&mut self) {
        let mut completions = std::mem::take(&mut self.completions);
        self.ring_client.take(&mut completions);
        for completion in completions.drain(..).filter(|completion| completion.user == ENDS) {
            self.mailbox.listen();
            if !completion.has_more() {
                self.watch_mailbox();
            }
        }
        self.completions = completions;
    }
}

/// The result of a request.
#[inline]
fn status(image: Option<&Arc<Image>>, of: &UnderWay, result: i64, now: Instant) -> Status {
    let is_short = of.op == Op::Read && result >= 0 && (result as u64) < of.len;
    if result >= 0 && !is_short {
        if let Some(image) = image {
            image.note_success(now);
        }
        return Status::Ok;
    }
    let errno = if is_short {
        0
    } else {
        i32::try_from(-result).unwrap_or(libc::EIO)
    };
    if let Some(image) = image {
        image.note_failure(now, doing(of.op), of.offset, of.len, errno);
    }
    if is_short {
        Status::Io
    } else {
        Status::from_errno(errno)
    }
}

fn doing(op: Op) -> &'static str {
    match op {
        Op::Read => "read",
        Op::Write => "write",
        Op::Flush => "flush",
        Op::Discard => "discard",
        Op::WriteZeroes => "zeroing",
    }
}

impl HctxDriver for RbdHctx {
    /// librbd takes one request at a time, and passes it to a thread of its own.
    fn issue(&mut self, rq: &Request, cookie: Cookie, _last: bool, _now: Instant) -> Issued {
        match self.start(rq, cookie) {
            Ok(()) => Issued::Queued,
            Err(status) => Issued::Done(status),
        }
    }

    fn reap(&mut self, now: Instant, done: &mut Vec<Done>) {
        if self.ring_client.has_completed() {
            self.take_news();
        }
        let Self {
            ends,
            under_way,
            images,
            in_flight,
            ..
        } = self;
        ends.drain(|end| {
            let Some(ended) = under_way[end.slot as usize].take() else {
                debug_assert!(false, "an end of nothing in slot {}", end.slot);
                return;
            };
            *in_flight -= 1;
            done.push(Done {
                cookie: ended.cookie,
                status: status(images.get(ended.disk), &ended, end.result, now),
            });
        });
    }

    fn set_polled(&mut self, on: bool) -> bool {
        self.mailbox.set_polled(on);
        if !on {
            // Completions just before this were not signalled: the ring makes the reactor check the
            // mailbox.
            self.ring_client.push_nop(LOOK);
        }
        on
    }

    fn refresh_disks(&mut self) -> Result<(), DisksError> {
        self.images = self.shared.images();
        Ok(())
    }

    /// librbd cannot cancel a request: until it ends, librbd has the buffers. Ceph's own limit
    /// (`timeout=`) ends a request.
    fn timed_out(&mut self, cookie: Cookie) -> TimedOut {
        match self.under_way[cookie.tag().index()] {
            Some(of) if of.cookie == cookie => TimedOut::Wait,
            _ => TimedOut::Ended,
        }
    }
}

impl Drop for RbdHctx {
    fn drop(&mut self) {
        self.ring_client.push_cancel(ENDS, LOOK);
        self.ring_client.ring().submit();
        if self.in_flight > 0 {
            tracing::error!(
                "rbd driver: a hardware context ends with {} requests under way; what they use is not freed",
                self.in_flight
            );
            std::mem::forget(Arc::clone(&self.mailbox));
            std::mem::forget(self.images.clone());
        }
    }
}

/// User data of entries of the ring: the mailbox has entries.
const ENDS: u64 = 0;
/// Only to have `reap` called.
const LOOK: u64 = 1;
