//! The interface between the engine and a driver: one object per hardware context, used only by the
//! reactor that owns the context, so that it needs no lock. `hw_ctx` calls it; null, ram, file, nbd, the
//! simulator's drives and `mapper::multipath`, a driver over other drivers, implement it.

use crate::bio::Status;
use crate::ids::Cookie;
use crate::request::Request;
use crate::time::Instant;

/// A driver's answer to one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Issued {
    /// Taken; [`HctxDriver::reap`] will report its end.
    Queued,
    /// Finished at once, with this status.
    Done(Status),
    /// Not taken for lack of a resource whose return is not announced: the request is issued again after a
    /// completion of this hardware context, and about 3 ms later.
    Resource,
    /// Not taken for lack of a resource that one of the requests in flight here will free.
    DeviceResource,
}

/// The end of one issued request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// As given to [`HctxDriver::issue`].
    pub cookie: Cookie,
    /// How it ended; [`Status::Requeue`] asks the engine to issue it again.
    pub status: Status,
}

/// Why a driver cannot use a disk that was added to its drive.
pub type DisksError = Box<dyn std::error::Error + Send + Sync>;

/// What to do with a request that has passed the time limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimedOut {
    /// The driver no longer uses the request and its buffers: end it with [`Status::Timeout`].
    Ended,
    /// The driver still uses it (its buffers may be written): wait one more limit. The driver should try to cancel it.
    Wait,
}

/// The driver's side of one hardware context. Made and used on the reactor that owns it.
pub trait HctxDriver {
    /// Starts one request. Its bios and buffers stay valid until it is done.
    ///
    /// `last` says that no further request follows at once; a driver that batches then notifies the device. If
    /// the batch stops early, [`HctxDriver::commit`] is called instead.
    fn issue(&mut self, rq: &Request, cookie: Cookie, last: bool, now: Instant) -> Issued;

    /// Notifies the device of requests issued with `last` false.
    fn commit(&mut self) {}

    /// Appends the completions since the last call to `done`. Never blocks.
    fn reap(&mut self, now: Instant, done: &mut Vec<Done>);

    /// The driver's other side, if it has work of its own between requests: connections to restore, paths to check.
    /// It always has one or never.
    fn idle_polled(&mut self) -> Option<&mut dyn IdlePolled> {
        None
    }

    /// How many bytes, from its beginning, of a request that was just reported with an error or for a requeue
    /// are known to be done. Bios within them end without error; the rest has the error, or is issued again.
    fn done_before(&mut self, _cookie: Cookie) -> u64 {
        0
    }

    /// The time at which [`HctxDriver::reap`] should be called next; none for a driver whose completions wake
    /// the reactor (a ring).
    fn next_event(&self) -> Option<Instant> {
        None
    }

    /// Switches polling for completions on or off (see [`crate::poll`]): at set-up, and when the setting changes.
    /// Returns whether completions are found by [`HctxDriver::reap`] alone: such a context need not wake the
    /// reactor, and its reactor does not wait to be woken. A driver that must still be polled after polling was
    /// switched off (requests in flight cannot announce their end any more) returns true, and is called again in
    /// each turn until it returns false.
    fn set_polled(&mut self, _on: bool) -> bool {
        false
    }

    /// Makes the driver read its drive's list of disks, after disks were added or disks without users are to be
    /// removed. Never blocks.
    ///
    /// # Errors
    /// If it cannot use a new disk, and why: it continues with the disks that it had.
    fn refresh_disks(&mut self) -> Result<(), DisksError> {
        Ok(())
    }

    /// Reports that the request has been in flight for the queue's time limit.
    fn timed_out(&mut self, _cookie: Cookie) -> TimedOut {
        TimedOut::Wait
    }
}

/// A driver with work of its own between requests: its [`HctxDriver::reap`] is called at every run of its reactor,
/// also while nothing is in flight.
pub trait IdlePolled {
    /// Says, after [`HctxDriver::reap`], what its work asks of the engine. Called until there is nothing.
    fn next_demand(&mut self) -> Option<Demand>;
}

/// What an [`IdlePolled`] driver asks of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Demand {
    /// To issue the requests that were pushed back: an event other than a completion has made room, such as a path
    /// that is back.
    Rerun,
    /// To issue this request again, which the driver has taken.
    Reissue(Cookie),
}
