//! Decides what a driver is to the engine: one object per hardware context, used by the reactor that owns the context,
//! so that it needs no lock. `hw_ctx` calls it; null, ram, file, nbd and the simulator's drives implement it, and `mapper::multipath`, which is a driver over others.

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
    /// Not taken for want of a resource that nobody promises to announce: it is issued again after a completion of this
    /// hardware context or, if nothing is in flight there, about 3 ms later.
    Resource,
    /// Not taken for want of a resource that one of the requests in flight here will free.
    DeviceResource,
}

/// The end of one issued request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// As given to [`HctxDriver::issue`].
    pub cookie: Cookie,
    /// How it ended; [`Status::Requeue`] to have it issued once more.
    pub status: Status,
}

/// Why a driver cannot use a disk that was added to its drive.
pub type DisksError = Box<dyn std::error::Error + Send + Sync>;

/// What to do with a request that has passed the time limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimedOut {
    /// The driver has let go of the request and its buffers: end it with [`Status::Timeout`].
    Ended,
    /// The driver is still bound to it (its buffers may be written): wait one more limit. The driver should try to cancel it.
    Wait,
}

/// The driver's side of one hardware context. Made and used on the reactor that owns it.
pub trait HctxDriver {
    /// Starts one request. Its bios and buffers stay valid until it is done.
    ///
    /// `last` says that no further request follows at once; a driver that batches then tells the device. If the batch
    /// stops early, [`HctxDriver::commit`] is called instead.
    fn issue(&mut self, rq: &Request, cookie: Cookie, last: bool, now: Instant) -> Issued;

    /// Tells the device about requests issued with `last` false.
    fn commit(&mut self) {}

    /// Appends what has ended since the last call to `done`. Never blocks.
    fn reap(&mut self, now: Instant, done: &mut Vec<Done>);

    /// Says whether the driver has work of its own between requests: connections to mend, paths to check. It is asked once, at
    /// set-up; [`HctxDriver::reap`] of such a driver is called at every run of its reactor, also while nothing is in flight.
    fn needs_idle_poll(&self) -> bool {
        false
    }

    /// Says, after [`HctxDriver::reap`], whether requests that were pushed back are to be issued again now, because something other
    /// than an end of one has made room: a path that is back, say. Asked of restless drivers only.
    fn wants_rerun(&mut self) -> bool {
        false
    }

    /// Names, after [`HctxDriver::reap`], a request that the driver has taken and wants to be issued to it once more. Asked of restless
    /// drivers only, until there is none.
    fn next_reissue(&mut self) -> Option<Cookie> {
        None
    }

    /// Says how many bytes, from its beginning, of a request that was just reported with an error or to be issued again, are known
    /// to be done. Bios that lie within them end well; the rest has the error, or is what is issued again.
    fn done_before(&mut self, _cookie: Cookie) -> u64 {
        0
    }

    /// Says when [`HctxDriver::reap`] should be called next, if by time; a driver whose completions wake the reactor by
    /// themselves (a ring) says none.
    fn next_event(&self) -> Option<Instant> {
        None
    }

    /// Is told whether the ends of requests are to be found by looking (see [`crate::poll`]): at set-up, and when that is changed.
    /// Says whether they will be, by [`HctxDriver::reap`] alone: such a context need not wake the reactor, and its reactor does not
    /// wait to be woken. A driver that still has to be looked at after it was switched off (what is in flight cannot announce its
    /// end any more) says so, and is told again in each turn until it says no.
    fn set_polled(&mut self, _on: bool) -> bool {
        false
    }

    /// Is told that disks have been added to its drive, or that nobody uses some any more that are to be let go. Never blocks.
    ///
    /// # Errors
    /// What keeps it from using one that is new: it goes on with those that it had.
    fn refresh_disks(&mut self) -> Result<(), DisksError> {
        Ok(())
    }

    /// Is told that the request has been in flight for the queue's time limit.
    fn timed_out(&mut self, _cookie: Cookie) -> TimedOut {
        TimedOut::Wait
    }
}
