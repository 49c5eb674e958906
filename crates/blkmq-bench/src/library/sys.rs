//! The calls through C: the functions of `blkmq.h`, found in the shared library beside this program.

use std::ffi::{CStr, c_char, c_void};
use std::path::PathBuf;
use std::ptr::{null, null_mut};

use anyhow::{Context, Result, ensure};
use libloading::Library;

/// `blkmq_io`.
#[repr(C)]
pub(super) struct Io {
    op: u32,
    flags: u32,
    offset: u64,
    len: u64,
    data: *mut c_void,
    user: usize,
}

/// `blkmq_completion`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Completion {
    pub(super) user: usize,
    pub(super) code: i32,
}

impl Io {
    /// A read to `data`, which has room for `len` bytes.
    pub(super) fn read(offset: u64, len: u64, data: *mut c_void, user: usize) -> Self {
        Self {
            op: 0,
            flags: 0,
            offset,
            len,
            data,
            user,
        }
    }
}

impl Io {
    /// Makes another read of the same length of it, in its place.
    #[inline]
    pub(super) fn read_again(&mut self, offset: u64, data: *mut c_void, user: usize) {
        (self.offset, self.data, self.user) = (offset, data, user);
    }
}

type Handle = *mut c_void;

/// The functions that the bench calls.
pub(super) struct Api {
    error: unsafe extern "C" fn() -> *const c_char,
    engine_open: unsafe extern "C" fn(*const c_char, u32, *mut Handle) -> i32,
    engine_close: unsafe extern "C" fn(Handle, u64) -> i32,
    disk_open: unsafe extern "C" fn(Handle, *const c_char, *const c_char, *mut Handle) -> i32,
    disk_size: unsafe extern "C" fn(Handle) -> u64,
    disk_close: unsafe extern "C" fn(Handle),
    queue_open: unsafe extern "C" fn(Handle, *mut Handle) -> i32,
    queue_submit: unsafe extern "C" fn(Handle, Handle, *const Io) -> i32,
    queue_submit_many: unsafe extern "C" fn(Handle, Handle, *const Io, u32) -> i32,
    queue_wait: unsafe extern "C" fn(Handle, *mut Completion, u32, i64) -> i32,
    queue_close: unsafe extern "C" fn(Handle) -> i32,
    /// Where the functions are. Never unloaded by others.
    _library: Library,
}

impl Api {
    /// # Errors
    /// The shared library is not beside this program.
    pub(super) fn load() -> Result<Self> {
        let path = path()?;
        // SAFETY: the library of this project; loading it runs nothing but Rust's own set-up.
        let library = unsafe { Library::new(&path) };
        let library = library.with_context(|| {
            format!(
                "{}: build it: cargo build --release -p blkmq-capi",
                path.display()
            )
        })?;
        Ok(Self {
            error: function(&library, c"blkmq_error")?,
            engine_open: function(&library, c"blkmq_engine_open")?,
            engine_close: function(&library, c"blkmq_engine_close")?,
            disk_open: function(&library, c"blkmq_disk_open")?,
            disk_size: function(&library, c"blkmq_disk_size")?,
            disk_close: function(&library, c"blkmq_disk_close")?,
            queue_open: function(&library, c"blkmq_queue_open")?,
            queue_submit: function(&library, c"blkmq_queue_submit")?,
            queue_submit_many: function(&library, c"blkmq_queue_submit_many")?,
            queue_wait: function(&library, c"blkmq_queue_wait")?,
            queue_close: function(&library, c"blkmq_queue_close")?,
            _library: library,
        })
    }

    fn check(&self, code: i32) -> Result<()> {
        // SAFETY: it may be called by any thread.
        let text = unsafe { (self.error)() };
        // SAFETY: the text ends with a zero and is valid until this thread's next failure.
        let text = unsafe { CStr::from_ptr(text) };
        ensure!(code == 0, "{}", text.to_string_lossy());
        Ok(())
    }
}

fn path() -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    Ok(own.with_file_name("libblkmq_capi.so"))
}

fn function<T: Copy>(library: &Library, name: &CStr) -> Result<T> {
    // SAFETY: `load` asks for the functions with their types in `blkmq.h`.
    let found = unsafe { library.get::<T>(name.to_bytes_with_nul()) };
    Ok(*found.with_context(|| format!("{name:?} is missing"))?)
}

/// An open engine with the disk `d`, and this thread's queue.
pub(super) struct Handles {
    api: Api,
    engine: Handle,
    disk: Handle,
    queue: Handle,
}

impl Handles {
    pub(super) fn open(api: Api, config: &CStr) -> Result<Self> {
        let mut new = Self {
            api,
            engine: null_mut(),
            disk: null_mut(),
            queue: null_mut(),
        };
        // SAFETY: a text, and a place for a handle.
        let code = unsafe { (new.api.engine_open)(config.as_ptr(), 1, &raw mut new.engine) };
        new.api.check(code)?;
        // SAFETY: an open engine, a text, no group, and a place for a handle.
        let code = unsafe { (new.api.disk_open)(new.engine, c"d".as_ptr(), null(), &raw mut new.disk) };
        new.api.check(code)?;
        // SAFETY: an open engine, and a place for a handle.
        let code = unsafe { (new.api.queue_open)(new.engine, &raw mut new.queue) };
        new.api.check(code)?;
        Ok(new)
    }

    pub(super) fn disk_size(&self) -> u64 {
        // SAFETY: an open disk.
        unsafe { (self.api.disk_size)(self.disk) }
    }

    /// Submits an I/O whose data the caller keeps until it has ended or this is dropped.
    #[inline]
    pub(super) fn submit(&mut self, io: &Io) -> i32 {
        // SAFETY: all are open, on this thread, since a pointer keeps this value there.
        unsafe { (self.api.queue_submit)(self.queue, self.disk, io) }
    }

    /// The same for several.
    #[inline]
    pub(super) fn submit_many(&mut self, ios: &[Io]) -> i32 {
        // SAFETY: as above.
        unsafe { (self.api.queue_submit_many)(self.queue, self.disk, ios.as_ptr(), ios.len() as u32) }
    }

    #[inline]
    pub(super) fn wait(&mut self, room: &mut [Completion]) -> i32 {
        // SAFETY: the queue is open, and the slice has room for as many.
        unsafe { (self.api.queue_wait)(self.queue, room.as_mut_ptr(), room.len() as u32, -1) }
    }
}

impl Drop for Handles {
    fn drop(&mut self) {
        // SAFETY: open or null, and not used later. It waits for what is under way.
        unsafe { (self.api.queue_close)(self.queue) };
        // SAFETY: as above.
        unsafe { (self.api.disk_close)(self.disk) };
        // SAFETY: as above.
        unsafe { (self.api.engine_close)(self.engine, 10_000) };
    }
}
