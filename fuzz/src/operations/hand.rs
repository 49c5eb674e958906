//! A driver that the input answers: what is issued is listed, and ends when the input says so.

use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;

use blkmq_core::bio::{Flags, Op, Status};
use blkmq_core::driver::{Done, HctxDriver, Issued, TimedOut};
use blkmq_core::ids::Cookie;
use blkmq_core::limits::Limits;
use blkmq_core::request::Request;
use blkmq_core::time::Instant;

/// What the bench and one driver share.
#[derive(Debug, Default)]
pub(super) struct Hand {
    /// Issued and not ended, in order.
    pub(super) issued: Vec<Cookie>,
    /// Let go of after their time limit; a late end of them must do no harm.
    pub(super) stale: Vec<Cookie>,
    /// Answers to give instead of `Queued`, first to last.
    pub(super) answers: VecDeque<Issued>,
    /// To be reaped.
    pub(super) done: Vec<Done>,
}

/// What the bench and all drivers share.
#[derive(Debug, Default)]
pub(super) struct Drive {
    pub(super) limits: Limits,
    pub(super) is_quiesced: bool,
    /// Whether late requests are let go of.
    pub(super) lets_go: bool,
    /// The statuses that drivers gave, and those that follow from them.
    pub(super) given: BTreeSet<i32>,
    pub(super) disk_bytes: u64,
}

impl Drive {
    /// Notes a status that bios may end with from now on.
    pub(super) fn give(&mut self, status: Status) {
        // Wished for too often, a repetition becomes an I/O error.
        let status = if status == Status::Requeue {
            Status::Io
        } else {
            status
        };
        self.given.insert(status.errno());
    }
}

pub(super) struct HandDriver {
    pub(super) hand: Rc<RefCell<Hand>>,
    pub(super) drive: Rc<RefCell<Drive>>,
}

impl HandDriver {
    fn check(&self, rq: &Request) {
        let drive = self.drive.borrow();
        assert!(!drive.is_quiesced, "issued while quiesced: {rq:?}");
        if rq.op() == Op::Flush {
            return assert!(drive.limits.cache, "a flush for a drive without a cache");
        }
        let (offset, len) = (rq.offset(), rq.len());
        let end = offset.checked_add(len).expect("an end in range");
        assert!(len > 0 && end <= drive.disk_bytes, "{rq:?} lies beyond its disk");
        let max = drive.limits.length_max(rq.op(), offset);
        assert!(len <= max, "{rq:?} is longer than {max}");
        let has_fua = rq.flags().has(Flags::FUA);
        assert!(
            !has_fua || drive.limits.fua,
            "FUA for a drive that has none: {rq:?}"
        );
    }
}

impl HctxDriver for HandDriver {
    fn issue(&mut self, rq: &Request, cookie: Cookie, _last: bool, _now: Instant) -> Issued {
        self.check(rq);
        let mut hand = self.hand.borrow_mut();
        assert!(!hand.issued.contains(&cookie), "{cookie:?} is issued twice");
        let answer = match hand.answers.pop_front() {
            // Only what is in flight can free a resource of the device.
            Some(Issued::DeviceResource) if hand.issued.is_empty() => Issued::Queued,
            answer => answer.unwrap_or(Issued::Queued),
        };
        match answer {
            Issued::Queued => hand.issued.push(cookie),
            Issued::Done(status) => self.drive.borrow_mut().give(status),
            Issued::Resource | Issued::DeviceResource => {}
        }
        answer
    }

    fn reap(&mut self, _now: Instant, done: &mut Vec<Done>) {
        done.append(&mut self.hand.borrow_mut().done);
    }

    fn timed_out(&mut self, cookie: Cookie) -> TimedOut {
        let mut drive = self.drive.borrow_mut();
        let mut hand = self.hand.borrow_mut();
        let Some(at) = hand.issued.iter().position(|issued| *issued == cookie) else {
            // Its end waits to be reaped.
            return TimedOut::Wait;
        };
        if !drive.lets_go {
            return TimedOut::Wait;
        }
        drive.give(Status::Timeout);
        hand.issued.remove(at);
        hand.stale.push(cookie);
        TimedOut::Ended
    }
}
