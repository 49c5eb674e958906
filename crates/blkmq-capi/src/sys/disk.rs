//! Disks of C, and I/O on them that a thread of the engine's does: with a callback, or waited for. `queue` is the
//! way without another thread.

use std::cell::Cell;
use std::ffi::{c_char, c_void};

use crate::code::Code;
use crate::failure::{Failure, guard};
use crate::sys::engine::Engine;
use crate::sys::{Io, bio, handle, null, put, text};

/// A disk whose I/O is accounted to a group. For any thread.
pub struct Disk {
    pub(crate) disk: blkmq_engine::Disk,
}

/// What is called when an I/O has ended: the `user` of the I/O, and 0 or a code. `blkmq_code_text` knows it.
///
/// It comes on a thread of the engine's, which does the I/O of others: it must not block. It may submit. A C++
/// exception that leaves it ends the process.
pub type End = Option<unsafe extern "C-unwind" fn(user: *mut c_void, code: i32)>;

/// Finds a disk by its name. Its I/O is accounted to its own group, or to `group` if that is not null.
///
/// Any thread. Never blocks.
///
/// # Safety
/// `engine` is null or an open engine; `name` and `group` are null or texts; `disk` is null or a place for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkmq_disk_open(
    engine: *const Engine,
    name: *const c_char,
    group: *const c_char,
    disk: *mut *mut Disk,
) -> i32 {
    guard(|| {
        let find = || {
            // SAFETY: by the caller's promise.
            let open = unsafe { handle(engine, "engine") }?;
            // SAFETY: by the caller's promise.
            let name = unsafe { text(name, "name") }?;
            let found = if group.is_null() {
                open.engine.disk(name)?
            } else {
                // SAFETY: by the caller's promise.
                let path = unsafe { text(group, "group") }?;
                open.engine.disk_in_group(name, path)?
            };
            Ok(Disk { disk: found })
        };
        // SAFETY: by the caller's promise.
        unsafe { put(disk, find) }
    })
}

/// Frees the handle of a disk. I/O that was submitted on it ends all the same. Null is ignored.
///
/// Any thread, while no other uses the handle. Never blocks.
///
/// # Safety
/// `disk` is null or an open disk, which nobody uses during or after the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkmq_disk_close(disk: *mut Disk) {
    guard(|| {
        if !disk.is_null() {
            // SAFETY: it was made by `blkmq_disk_open`, and by the caller's promise nobody uses it any more.
            drop(unsafe { Box::from_raw(disk) });
        }
        Ok(0)
    });
}

/// The present size in bytes; 0 for null. Any thread.
///
/// # Safety
/// `disk` is null or an open disk.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkmq_disk_size(disk: *const Disk) -> u64 {
    // SAFETY: by the caller's promise.
    unsafe { disk.as_ref() }.map_or(0, |disk| disk.disk.size())
}

/// The smallest unit of offsets and lengths in bytes, a power of two from 512 to 65536; 0 for null. Any thread.
///
/// # Safety
/// `disk` is null or an open disk.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkmq_disk_block_size(disk: *const Disk) -> u32 {
    // SAFETY: by the caller's promise.
    unsafe { disk.as_ref() }.map_or(0, |disk| disk.disk.block_size())
}

/// Does one I/O and returns its code when it has ended.
///
/// Any thread, but no callback (`BLKMQ_ERR_THREAD`). Blocks until the I/O has ended.
///
/// # Safety
/// `disk` is null or an open disk; `io` is null or an I/O as it is declared.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkmq_disk_run(disk: *const Disk, io: *const Io) -> i32 {
    guard(|| {
        check_not_in_callback("blkmq_disk_run")?;
        // SAFETY: by the caller's promise.
        let open = unsafe { handle(disk, "disk") }?;
        // SAFETY: by the caller's promise.
        let bio = unsafe { bio(io) }?;
        open.disk.submit(bio).wait()?;
        Ok(0)
    })
}

/// Has a thread of the engine's do one I/O, and calls `end` once when it has ended, unless this returns a code: then
/// `end` never comes. If the engine has ended, `end` comes at once, on this thread.
///
/// Any thread, also in a callback. Never blocks. The caller bounds how many are under way.
///
/// # Safety
/// `disk` is null or an open disk; `io` is null or an I/O as it is declared, whose `user` any thread may have; `end` is
/// null or such a function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkmq_disk_submit(disk: *const Disk, io: *const Io, end: End) -> i32 {
    guard(|| {
        // SAFETY: by the caller's promise.
        let open = unsafe { handle(disk, "disk") }?;
        let end = end.ok_or_else(|| null("end"))?;
        // SAFETY: by the caller's promise.
        let bio = unsafe { bio(io) }?;
        // SAFETY: as above; `bio` has found that it is not null.
        let user = User(unsafe { (*io).user });
        open.disk.submit_with(bio, move |result| {
            let code = result.map_or_else(|error| Code::from(error.status), |_| Code::Ok);
            let _mark = InCallback::new();
            user.complete(end, code);
        });
        Ok(0)
    })
}

/// The caller's own pointer, on its way to the callback.
struct User(*mut c_void);

// SAFETY: the caller has promised that any thread may have it; it is not used here.
unsafe impl Send for User {}

impl User {
    fn complete(self, end: unsafe extern "C-unwind" fn(*mut c_void, i32), code: Code) {
        // SAFETY: the function is as it is declared, and it gets what it was submitted with.
        unsafe { end(self.0, code as i32) };
    }
}

/// The thread is in a callback as long as this lives.
struct InCallback(bool);

impl InCallback {
    fn new() -> Self {
        Self(IN_CALLBACK.replace(true))
    }
}

impl Drop for InCallback {
    fn drop(&mut self) {
        IN_CALLBACK.set(self.0);
    }
}

thread_local! {
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// A call that blocks would wait for the thread that it is on.
pub(crate) fn check_not_in_callback(call: &str) -> Result<(), Failure> {
    if IN_CALLBACK.get() {
        let text = format!("{call} blocks: it cannot be called in a callback");
        return Err(Failure::new(Code::Thread, text));
    }
    Ok(())
}
