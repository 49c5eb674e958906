//! Queues of C: a thread's own submissions and completions, without another thread. `disk` is the way for others.

use std::ffi::{c_char, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use blkmq_engine::{Attached, Buffer, RawBio};

use crate::code::Code;
use crate::failure::{Failure, guard, guard_usual};
use crate::sys::disk::{Disk, check_not_in_callback};
use crate::sys::engine::Engine;
use crate::sys::{BACKGROUND, FUA, Io, Op, bio, handle, null, put, text};

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
    guard_usual(
        || {
            // SAFETY: by the caller's promise.
            let queue = unsafe { of_this_thread(queue) }?;
            // SAFETY: by the caller's promise.
            let disk = unsafe { disk.as_ref() }?;
            // SAFETY: by the caller's promise.
            unsafe { queue.submit_usual(disk, io) }.then_some(0)
        },
        || {
            // SAFETY: by the caller's promise.
            let queue = unsafe { usable(queue) }?;
            // SAFETY: by the caller's promise.
            let disk = unsafe { handle(disk, "disk") }?;
            // SAFETY: by the caller's promise.
            unsafe { queue.submit(disk, io) }
        },
    )
}

/// Submits `count` I/Os, which follow each other in memory, in their order: for many at a time this costs less than as
/// many calls. Returns how many were taken: fewer than `count` if there is no room for more, or the next one is wrong, as
/// submitting that one first tells. If the first one is not taken, returns its code.
///
/// Its own thread. Never blocks.
///
/// # Safety
/// `queue` is null or an open queue; `disk` is null or an open disk of the same engine; `ios` is `count` I/Os as they are
/// declared, or null and `count` 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkmq_queue_submit_many(
    queue: *mut Queue,
    disk: *const Disk,
    ios: *const Io,
    count: u32,
) -> i32 {
    guard(|| {
        // SAFETY: by the caller's promise.
        let queue = unsafe { usable(queue) }?;
        // SAFETY: by the caller's promise.
        let disk = unsafe { handle(disk, "disk") }?;
        if ios.is_null() && count > 0 {
            return Err(null("ios"));
        }
        let count = count.min(i32::MAX as u32);
        for at in 0..count {
            // SAFETY: less than `count`, so it is one of them.
            let io = unsafe { ios.add(at as usize) };
            // SAFETY: as above.
            if unsafe { queue.submit_usual(disk, io) } {
                continue;
            }
            // SAFETY: as above.
            match unsafe { queue.submit(disk, io) } {
                Ok(_) => {}
                Err(failure) if at == 0 => return Err(failure),
                Err(_) => return Ok(at as i32),
            }
        }
        Ok(count as i32)
    })
}

/// Removes a disk, as `blkmq_engine_remove_disk` does on other threads. I/O of this queue ends meanwhile, too; its
/// completions come from the next poll or wait.
///
/// Its own thread. Blocks for at most about `limit_ms` milliseconds.
///
/// # Safety
/// `queue` is null or an open queue; `name` is null or a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkmq_queue_remove_disk(
    queue: *mut Queue,
    name: *const c_char,
    limit_ms: u64,
) -> i32 {
    guard(|| {
        // SAFETY: by the caller's promise.
        let queue = unsafe { usable(queue) }?;
        // SAFETY: by the caller's promise.
        let name = unsafe { text(name, "name") }?;
        queue
            .attached
            .remove_disk(name, Duration::from_millis(limit_ms))?;
        Ok(0)
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
    guard_usual(
        || {
            // SAFETY: by the caller's promise.
            let queue = unsafe { of_this_thread(queue) }?;
            // SAFETY: by the caller's promise.
            let room = unsafe { Room::new(completions, max) }.ok()?;
            Some(queue.wait(room, timeout_ms))
        },
        || {
            // SAFETY: by the caller's promise.
            let queue = unsafe { usable(queue) }?;
            // SAFETY: by the caller's promise.
            let room = unsafe { Room::new(completions, max) }?;
            Ok(queue.wait(room, timeout_ms))
        },
    )
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

impl Queue {
    /// Submits a read or write without flags in which nothing is wrong, if there is room: with few steps. Says whether it
    /// did.
    ///
    /// # Safety
    /// `io` is null or an I/O as it is declared.
    #[inline(always)]
    unsafe fn submit_usual(&mut self, disk: &Disk, io: *const Io) -> bool {
        // SAFETY: by the caller's promise.
        let Some(io) = (unsafe { io.as_ref() }) else {
            return false;
        };
        let Some(data) = NonNull::new(io.data.cast()) else {
            return false;
        };
        let is_usual = io.op <= Op::Write as u32 && io.flags == 0;
        if !is_usual || io.len.wrapping_sub(1) >= Buffer::LEN_MAX as u64 {
            return false;
        }
        let bio = RawBio {
            op: if io.op == Op::Read as u32 { OPS[0] } else { OPS[1] },
            is_fua: false,
            is_in_background: false,
            offset: io.offset,
            len: io.len,
            data: Some(data),
        };
        // SAFETY: the I/O is as it is declared: the library has its data until the completion is stored.
        unsafe { self.attached.submit_raw(&disk.disk, &bio, io.user as u64) }
    }

    /// Waits, and returns how many completions are in the room.
    fn wait(&mut self, mut room: Room, timeout_ms: i64) -> i32 {
        let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        self.attached
            .wait_each(timeout, room.max, |ended| room.put(&ended));
        room.count as i32
    }

    /// Submits one I/O of any kind.
    ///
    /// # Safety
    /// `io` is null or an I/O as it is declared.
    #[inline(never)]
    unsafe fn submit(&mut self, disk: &Disk, io: *const Io) -> Result<i32, Failure> {
        // SAFETY: by the caller's promise.
        let Some((bio, user)) = (unsafe { raw(io) }) else {
            // SAFETY: by the caller's promise.
            return Err(unsafe { fault(io) });
        };
        // SAFETY: the I/O is as it is declared: the library has its data until the completion is stored.
        match unsafe { self.attached.submit_raw(&disk.disk, &bio, user as u64) } {
            true => Ok(0),
            false => Err(Code::Again.into()),
        }
    }
}

/// An I/O as the library has it, and its `user`; none if something is wrong with it, as [`bio`] tells.
///
/// # Safety
/// Null, or an I/O as it is declared.
#[inline]
unsafe fn raw(io: *const Io) -> Option<(RawBio, *mut c_void)> {
    // SAFETY: by the caller's promise.
    let io = unsafe { io.as_ref() }?;
    let op = *OPS.get(io.op as usize)?;
    let has_data = io.op <= Op::Write as u32;
    let data = NonNull::new(io.data.cast()).filter(|_| has_data);
    let is_sound = !has_data || io.len <= Buffer::LEN_MAX as u64 && (data.is_some() || io.len == 0);
    // A flush has no range.
    let is_flush = io.op == Op::Flush as u32;
    let range = if is_flush { (0, 0) } else { (io.offset, io.len) };
    let bio = RawBio {
        op,
        is_fua: io.flags & FUA != 0,
        is_in_background: io.flags & BACKGROUND != 0,
        offset: range.0,
        len: range.1,
        data,
    };
    (is_sound && io.flags <= FUA | BACKGROUND).then_some((bio, io.user))
}

/// What is wrong with an I/O.
///
/// # Safety
/// Null, or an I/O as it is declared.
#[cold]
unsafe fn fault(io: *const Io) -> Failure {
    // SAFETY: by the caller's promise.
    let checked = unsafe { bio(io) };
    checked.err().unwrap_or_else(|| Code::Argument.into())
}

/// The operations, by their numbers.
const OPS: [blkmq_engine::Op; 5] = [
    blkmq_engine::Op::Read,
    blkmq_engine::Op::Write,
    blkmq_engine::Op::Flush,
    blkmq_engine::Op::Discard,
    blkmq_engine::Op::WriteZeroes,
];

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
#[inline(always)]
unsafe fn of_this_thread<'a>(queue: *mut Queue) -> Option<&'a mut Queue> {
    if queue.is_null() {
        return None;
    }
    // SAFETY: not null, so by the caller's promise; nobody changes this field.
    let thread = unsafe { (*queue).thread };
    if thread != this_thread() {
        return None;
    }
    // SAFETY: as in `own`.
    let queue = unsafe { &mut *queue };
    (!queue.attached.is_forked()).then_some(queue)
}

/// The same, or why not.
///
/// # Safety
/// Null, or an open queue.
#[inline]
unsafe fn usable<'a>(queue: *mut Queue) -> Result<&'a mut Queue, Failure> {
    // SAFETY: by the caller's promise.
    let queue = unsafe { own(queue) }?;
    match queue.attached.is_forked() {
        false => Ok(queue),
        true => Err(forked(queue)),
    }
}

#[cold]
fn forked(queue: &Queue) -> Failure {
    let checked = queue.attached.engine().check_fork();
    checked.map_or_else(Failure::from, |()| Code::Forked.into())
}

#[cold]
fn other_thread() -> Failure {
    let text = "the queue belongs to the thread that opened it: open one for this thread";
    Failure::new(Code::Thread, text)
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
        return Err(other_thread());
    }
    // SAFETY: as above; only its own thread comes here, once at a time, since no call of the library calls back from it.
    Ok(unsafe { &mut *queue })
}

#[inline]
fn this_thread() -> libc::pthread_t {
    // SAFETY: it has no precondition.
    unsafe { libc::pthread_self() }
}
