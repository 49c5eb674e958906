//! Queues of C: a thread's own submissions and completions, without another thread. `disk` is the way for others.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use blkmq_engine::Attached;

use crate::code::Code;
use crate::failure::{Failure, guard};
use crate::sys::disk::{Disk, check_not_in_callback};
use crate::sys::engine::Engine;
use crate::sys::{Io, bio, handle, null, put};

/// A thread's own way to all disks of an engine: it submits, issues and reaps by itself. For the thread that opened
/// it; other threads get `BLKMQ_ERR_THREAD`.
pub struct Queue {
    attached: Attached,
    /// Its thread. Read by all, never changed.
    thread: libc::pthread_t,
    /// Its descriptor, once it was asked for.
    event: Option<OwnedFd>,
    /// Of the engine.
    queues: Arc<AtomicUsize>,
}

/// An I/O that has ended.
#[repr(C)]
#[derive(Debug)]
pub struct Completion {
    /// The `user` of the I/O.
    pub user: *mut c_void,
    /// 0 or a code.
    pub code: i32,
}

/// Opens a queue for the calling thread, which alone may use it.
///
/// Any thread, but no callback. Blocks for some milliseconds.
///
/// # Safety
/// `engine` is null or an open engine; `queue` is null or a place for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkmq_queue_open(engine: *const Engine, queue: *mut *mut Queue) -> i32 {
    guard(|| {
        let open = || {
            check_not_in_callback("blkmq_queue_open")?;
            // SAFETY: by the caller's promise.
            let open = unsafe { handle(engine, "engine") }?;
            let attached = open.engine.attach()?;
            open.queues.fetch_add(1, Ordering::Relaxed);
            Ok(Queue {
                attached,
                thread: this_thread(),
                event: None,
                queues: Arc::clone(&open.queues),
            })
        };
        // SAFETY: by the caller's promise.
        unsafe { put(queue, open) }
    })
}

/// Closes a queue, and its descriptor. Completions that were not collected are dropped. Null is ignored.
///
/// Its own thread. Blocks until its I/O has ended.
///
/// # Safety
/// `queue` is null or an open queue, which nobody uses during or after the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkmq_queue_close(queue: *mut Queue) -> i32 {
    guard(|| {
        if queue.is_null() {
            return Ok(0);
        }
        // SAFETY: by the caller's promise.
        let checked = unsafe { own(queue) }.map(|queue| queue.attached.engine().check_fork());
        // Another thread's queue stays open.
        let forked = checked?;
        // SAFETY: it was made by `blkmq_queue_open`, and by the caller's promise nobody uses it any more.
        let closed = unsafe { Box::from_raw(queue) };
        let queues = Arc::clone(&closed.queues);
        drop(closed);
        queues.fetch_sub(1, Ordering::Relaxed);
        forked?;
        Ok(0)
    })
}

/// Submits an I/O; its completion comes from a later poll or wait. It may be staged until then. `BLKMQ_ERR_AGAIN` if
/// there is no room: submit it again after a completion. With an error, no completion comes.
///
/// Its own thread. Never blocks.
///
/// # Safety
/// `queue` is null or an open queue; `disk` is null or an open disk of the same engine; `io` is null or an I/O as it is
/// declared.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkmq_queue_submit(queue: *mut Queue, disk: *const Disk, io: *const Io) -> i32 {
    guard(|| {
        // SAFETY: by the caller's promise.
        let queue = unsafe { usable(queue) }?;
        // SAFETY: by the caller's promise.
        let disk = unsafe { handle(disk, "disk") }?;
        // SAFETY: by the caller's promise.
        let bio = unsafe { bio(io) }?;
        // SAFETY: as above; `bio` has found that it is not null.
        let user = unsafe { (*io).user };
        match queue.attached.submit(&disk.disk, bio, user as u64) {
            Ok(()) => Ok(0),
            Err(_) => Err(Code::Again.into()),
        }
    })
}

/// Issues what is staged, stores at most `max` completions, and returns how many, or a code.
///
/// Its own thread. Never blocks.
///
/// # Safety
/// `queue` is null or an open queue; `completions` has room for `max`, or is null and `max` 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkmq_queue_poll(queue: *mut Queue, completions: *mut Completion, max: u32) -> i32 {
    guard(|| {
        // SAFETY: by the caller's promise.
        let queue = unsafe { usable(queue) }?;
        // SAFETY: by the caller's promise.
        let mut room = unsafe { Room::new(completions, max) }?;
        queue.attached.poll_each(room.max, |ended| room.put(&ended));
        Ok(room.count as i32)
    })
}

/// Like `blkmq_queue_poll`, but blocks until an I/O has ended or `timeout_ms` milliseconds are over; a negative
/// number means no limit. With no I/O under way it returns 0 at once.
///
/// Its own thread.
///
/// # Safety
/// `queue` is null or an open queue; `completions` has room for `max`, or is null and `max` 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkmq_queue_wait(
    queue: *mut Queue,
    completions: *mut Completion,
    max: u32,
    timeout_ms: i64,
) -> i32 {
    guard(|| {
        // SAFETY: by the caller's promise.
        let queue = unsafe { usable(queue) }?;
        // SAFETY: by the caller's promise.
        let mut room = unsafe { Room::new(completions, max) }?;
        let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        queue
            .attached
            .wait_each(timeout, room.max, |ended| room.put(&ended));
        Ok(room.count as i32)
    })
}

/// A descriptor that becomes readable when `blkmq_queue_poll` has work, or a code: for poll, epoll and the like. The
/// queue owns it; never read or close it. Before each wait for it, call `blkmq_queue_prepare_to_wait`.
///
/// It may miss ends on disks in Ceph, and on NBD disks while they connect again: there, poll now and then.
///
/// Its own thread. Never blocks.
///
/// # Safety
/// `queue` is null or an open queue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkmq_queue_event(queue: *mut Queue) -> i32 {
    guard(|| {
        // SAFETY: by the caller's promise.
        let queue = unsafe { usable(queue) }?;
        if queue.event.is_none() {
            queue.event = Some(queue.attached.event()?);
        }
        Ok(queue.event.as_ref().map_or(0, AsRawFd::as_raw_fd))
    })
}

/// Issues what is staged, clears the descriptor, and returns for how many nanoseconds the thread may wait for it
/// before the next `blkmq_queue_poll`, or a code. 0: not at all; `INT64_MAX`: no limit.
///
/// Its own thread. Never blocks.
///
/// # Safety
/// `queue` is null or an open queue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkmq_queue_prepare_to_wait(queue: *mut Queue) -> i64 {
    guard(|| {
        // SAFETY: by the caller's promise.
        let queue = unsafe { usable(queue) }?;
        let at_most = queue.attached.prepare_to_wait();
        Ok(at_most.map_or(i64::MAX, |time| {
            i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
        }))
    })
}

/// The caller's place for completions.
struct Room {
    start: *mut Completion,
    max: usize,
    count: usize,
}

impl Room {
    /// # Safety
    /// `start` has room for `max`.
    unsafe fn new(start: *mut Completion, max: u32) -> Result<Self, Failure> {
        if start.is_null() && max > 0 {
            return Err(null("completions"));
        }
        Ok(Self {
            start,
            max: max.min(i32::MAX as u32) as usize,
            count: 0,
        })
    }

    #[inline]
    fn put(&mut self, ended: &blkmq_engine::Completion) {
        assert!(self.count < self.max, "more than {} completions", self.max);
        let completion = Completion {
            user: ended.cookie as *mut c_void,
            code: Code::from(ended.status) as i32,
        };
        // SAFETY: less than `max` were stored, for which there is room.
        let place = unsafe { self.start.add(self.count) };
        // SAFETY: as above.
        unsafe { place.write(completion) };
        self.count += 1;
    }
}

/// The queue, if this is its thread and its process.
///
/// # Safety
/// Null, or an open queue.
#[inline]
unsafe fn usable<'a>(queue: *mut Queue) -> Result<&'a mut Queue, Failure> {
    // SAFETY: by the caller's promise.
    let queue = unsafe { own(queue) }?;
    queue.attached.engine().check_fork()?;
    Ok(queue)
}

/// The queue, if this is its thread.
///
/// # Safety
/// Null, or an open queue.
#[inline]
unsafe fn own<'a>(queue: *mut Queue) -> Result<&'a mut Queue, Failure> {
    if queue.is_null() {
        return Err(null("queue"));
    }
    // SAFETY: not null, so by the caller's promise; nobody changes this field.
    let thread = unsafe { (*queue).thread };
    if thread != this_thread() {
        return Err(Failure::new(
            Code::Thread,
            "the queue belongs to the thread that opened it: open one for this thread",
        ));
    }
    // SAFETY: as above; only its own thread comes here, once at a time, since no call of the library calls back from it.
    Ok(unsafe { &mut *queue })
}

#[inline]
fn this_thread() -> libc::pthread_t {
    // SAFETY: it has no precondition.
    unsafe { libc::pthread_self() }
}
