//! The requests of a job, a few at a time: a service of a reactor, which ends with the last of them.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;

use blkmq_core::bio::{Bio, Flags, Op, Status};
use blkmq_core::ids::GroupId;
use blkmq_host::disk::{Disk, Use};
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service};

use super::list::Job;

/// How the requests ended, and the place among the users of their disk.
pub(super) type End = (Status, Option<Use>);

/// The requests for some ranges of a disk. When no request is under way any more, however that came, it sends the end.
pub(super) struct Walk {
    disk: Disk,
    group: GroupId,
    job: Arc<Job>,
    /// What there is to do, from the one with the number `next` on.
    ranges: Vec<Range<u64>>,
    next: usize,
    place: Option<Use>,
    status: Status,
    /// It submits no more: a disk that was to be removed may be served on, but not for this.
    is_over: bool,
    end: SyncSender<End>,
}

impl Walk {
    pub(super) fn new(
        disk: Disk,
        group: GroupId,
        job: Arc<Job>,
        ranges: Vec<Range<u64>>,
        end: SyncSender<End>,
    ) -> Self {
        Self {
            disk,
            group,
            job,
            ranges,
            next: 0,
            place: None,
            status: Status::Ok,
            is_over: false,
            end,
        }
    }

    fn is_over(&mut self) -> bool {
        let is_to_end = self.place.as_ref().is_none_or(Use::is_to_end);
        let has_no_more = self.next == self.ranges.len();
        self.is_over |= has_no_more || is_to_end || !self.status.is_ok() || self.job.is_cancelled();
        self.is_over
    }

    fn submit(&mut self, cx: &mut Cx<'_>) {
        while !self.is_over() && cx.outstanding() < DEPTH {
            let range = &mut self.ranges[self.next];
            let len = PIECE.min(range.end - range.start);
            let bio = Bio {
                op: Op::Read,
                flags: Flags::TASK.with(Flags::NO_MERGE),
                disk: self.disk.id,
                group: self.group,
                offset: range.start,
                len,
                ..Bio::default()
            };
            if cx.submit(self.disk.queue, bio).is_err() {
                return;
            }
            range.start += len;
            self.next += usize::from(range.start == range.end);
        }
    }
}

impl Service for Walk {
    fn start(&mut self, cx: &mut Cx<'_>) {
        self.job.is_done_by(cx.waker());
        self.place = self.disk.users.enter_as_part(cx.waker());
        self.submit(cx);
    }

    fn on_ring(&mut self, _cx: &mut Cx<'_>, _completed: &[Completion]) {}

    fn on_end(&mut self, cx: &mut Cx<'_>, bio: Bio) {
        self.status = self.status.and(bio.status);
        self.job.done.fetch_add(bio.len, Ordering::Relaxed);
        self.submit(cx);
    }

    fn on_wake(&mut self, cx: &mut Cx<'_>) {
        self.submit(cx);
    }

    fn on_room(&mut self, cx: &mut Cx<'_>) {
        self.submit(cx);
    }

    fn drain(&mut self, _cx: &mut Cx<'_>) {
        self.is_over = true;
    }

    fn is_finished(&self) -> bool {
        self.is_over
    }
}

impl Drop for Walk {
    fn drop(&mut self) {
        let is_whole = self.next == self.ranges.len();
        let status = match self.status {
            Status::Ok if !is_whole => Status::Shutdown,
            status => status,
        };
        // Who does not wait any more has panicked.
        let _ = self.end.try_send((status, self.place.take()));
    }
}

/// Bytes of a request, and requests at a time.
const PIECE: u64 = 256 << 10;
const DEPTH: u32 = 2;
