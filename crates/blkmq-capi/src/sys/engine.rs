//! Engines of C: opened from a configuration, closed, asked for statistics. `disk` and `queue` do I/O.

use std::ffi::c_char;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::code::Code;
use crate::failure::{Failure, guard};
use crate::json;
use crate::sys::{argument, disk, handle, put, text};

/// The queues and the threads of an engine. For any thread.
pub struct Engine {
    pub(crate) engine: blkmq_engine::Engine,
    /// Open `blkmq_queue`s. Says nothing of memory, so it is relaxed.
    pub(crate) queues: Arc<AtomicUsize>,
}

/// Opens disks and starts an engine. `config` is a configuration in TOML, as for `blkmq serve -c`: tables
/// `[disk.NAME]`, `[group."/PATH"]` and `[queue.NAME]`, and of `[daemon]` `sched`, `wait` and `reactors` (threads of the
/// engine's own, 1 by default). What else a daemon's file has is ignored, such as addresses. At most `queues_max` queues can
/// be open at a time; 0 means 8.
///
/// Any thread. Blocks for some milliseconds, and until the drives are open.
///
/// # Safety
/// `config` is null or a text; `engine` is null or a place for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkmq_engine_open(
    config: *const c_char,
    queues_max: u32,
    engine: *mut *mut Engine,
) -> i32 {
    guard(|| {
        let start = || {
            // SAFETY: by the caller's promise.
            let config = unsafe { text(config, "config") }?;
            let mut builder = blkmq_engine::Engine::builder().toml(config);
            if queues_max > 0 {
                builder = builder.attached_max(queues_max as usize);
            }
            Ok(Engine {
                engine: builder.start()?,
                queues: Arc::default(),
            })
        };
        // SAFETY: by the caller's promise.
        unsafe { put(engine, start) }
    })
}

/// Ends an engine and frees its handle: I/O under way is finished, for at most `limit_ms` milliseconds. Disks of it
/// can be closed later. Null is ignored.
///
/// `BLKMQ_ERR_BUSY` while a queue is open, and `BLKMQ_ERR_THREAD` in a callback: the engine goes on. With any other
/// error the handle is freed, but what was not finished in time may still use its data.
///
/// Any thread, while no other uses the handle. Blocks until I/O under way has ended.
///
/// # Safety
/// `engine` is null or an open engine, which nobody uses during or after the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkmq_engine_close(engine: *mut Engine, limit_ms: u64) -> i32 {
    guard(|| {
        // SAFETY: by the caller's promise.
        let Some(open) = (unsafe { engine.as_ref() }) else {
            return Ok(0);
        };
        disk::check_not_in_callback("blkmq_engine_close")?;
        let queues = open.queues.load(Ordering::Relaxed);
        if queues > 0 && open.engine.check_fork().is_ok() {
            let text = format!("the engine has {queues} open queues: close them first");
            return Err(Failure::new(Code::Busy, text));
        }
        // SAFETY: it was made by `blkmq_engine_open`, and by the caller's promise nobody uses it any more.
        let open = unsafe { Box::from_raw(engine) };
        open.engine.shutdown(Duration::from_millis(limit_ms))?;
        Ok(0)
    })
}

/// Adds disks and groups while others have I/O under way: the tables `[disk.NAME]` and `[group."/PATH"]` of `config`, all
/// of them or none. Returns how many disks there are, or a code. A group that there is stays as it is; settings of queues
/// are for `blkmq_engine_open` alone.
///
/// Any thread. Blocks until the drives are open.
///
/// # Safety
/// `engine` is null or an open engine; `config` is null or a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkmq_engine_add(engine: *const Engine, config: *const c_char) -> i32 {
    guard(|| {
        // SAFETY: by the caller's promise.
        let open = unsafe { handle(engine, "engine") }?;
        // SAFETY: by the caller's promise.
        let config = unsafe { text(config, "config") }?;
        let names = open.engine.add_toml(config)?;
        Ok(names.len() as i32)
    })
}

/// Removes a disk. At once nobody finds it, and I/O on its handles ends with `BLKMQ_ERR_SHUTDOWN`, also if a disk of its
/// name comes again; close them as ever. I/O under way ends first. Then its drive is closed, unless other disks use it.
///
/// The thread of each open queue must come back to its queue meanwhile. An error if one does not, or I/O does not end:
/// the disk stays then, but handles used with `blkmq_disk_run` and `blkmq_disk_submit` must be opened again. A thread
/// that has a queue itself is refused (`BLKMQ_ERR_ENGINE`): it calls `blkmq_queue_remove_disk`.
///
/// Any thread, but no callback. Blocks for at most about `limit_ms` milliseconds.
///
/// # Safety
/// `engine` is null or an open engine; `name` is null or a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkmq_engine_remove_disk(
    engine: *const Engine,
    name: *const c_char,
    limit_ms: u64,
) -> i32 {
    guard(|| {
        disk::check_not_in_callback("blkmq_engine_remove_disk")?;
        // SAFETY: by the caller's promise.
        let open = unsafe { handle(engine, "engine") }?;
        // SAFETY: by the caller's promise.
        let name = unsafe { text(name, "name") }?;
        open.engine.remove_disk(name, Duration::from_millis(limit_ms))?;
        Ok(0)
    })
}

/// Writes the statistics of all groups as JSON, at most `size` bytes with the zero at the end, and returns how many
/// there are without it, or a code. If that is `size` or more, the text is cut: call again with more room.
///
/// `{"groups": {"/a": {"read": {"ios": 1, "bytes": 4096, "errors": 0, "wait_ns": 0, "service_ns": 900},
/// "write": ..., "discard": ..., "flush": ...}}}`: numbers since the start, which only grow.
///
/// Any thread. Never blocks.
///
/// # Safety
/// `engine` is null or an open engine; `json` has room for `size` bytes, or both are 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkmq_engine_statistics(
    engine: *const Engine,
    json: *mut c_char,
    size: usize,
) -> i64 {
    guard(|| {
        // SAFETY: by the caller's promise.
        let open = unsafe { handle(engine, "engine") }?;
        open.engine.check_fork()?;
        let text = json::statistics(&open.engine)?;
        if size > 0 && json.is_null() {
            return Err(argument("json is null".to_owned()));
        }
        if let Some(room) = size.checked_sub(1) {
            let len = text.len().min(room);
            // SAFETY: `len + 1` is at most `size`, for which there is room; the text is the library's own.
            unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), json, len) };
            // SAFETY: as above.
            unsafe { json.wrapping_add(len).write(0) };
        }
        Ok(text.len() as i64)
    })
}

/// Changes a group's share against its siblings, 1 to 1000, while it is in use.
///
/// Any thread. May block for some milliseconds.
///
/// # Safety
/// `engine` is null or an open engine; `group` is null or a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkmq_engine_set_weight(
    engine: *const Engine,
    group: *const c_char,
    weight: u32,
) -> i32 {
    guard(|| {
        // SAFETY: by the caller's promise.
        let open = unsafe { handle(engine, "engine") }?;
        // SAFETY: by the caller's promise.
        let path = unsafe { text(group, "group") }?;
        // What is too much for the type is too much for the group, which says so.
        let weight = u16::try_from(weight).unwrap_or(u16::MAX);
        open.engine.set_weight(path, weight)?;
        Ok(0)
    })
}

/// Gives a group its weight, caps and latency target while it is in use: `/a,weight=300,read_bps=100M`, as for
/// `blkmq serve --group`. What the text leaves out has its default again; a missing group is made.
///
/// Any thread. May block for some milliseconds.
///
/// # Safety
/// `engine` is null or an open engine; `group` is null or a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkmq_engine_set_group(engine: *const Engine, group: *const c_char) -> i32 {
    guard(|| {
        // SAFETY: by the caller's promise.
        let open = unsafe { handle(engine, "engine") }?;
        // SAFETY: by the caller's promise.
        let group = unsafe { text(group, "group") }?;
        open.engine.set_group(group)?;
        Ok(0)
    })
}
