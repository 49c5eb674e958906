//! Calls of librbd and librados: their functions, found when the first disk of a cluster is opened, and
//! the memory of this process that they may use, and until when.
//!
//! The memory of a request belongs to librbd from [`RawImage::start`] until the request's
//! completion is in the mailbox. It cannot be taken back before: librbd cannot cancel, so a late
//! request stays under way, and a hardware context that is dropped with requests under way leaks
//! its mailbox and its images.

mod encryption;
mod slot;

use std::borrow::Cow;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Arc, OnceLock};

use blkmq_core::bio::{Flags, Op};
use blkmq_core::request::Request;

use super::config::{ClusterConfig, ImageName};
use super::image::Changes;
use encryption::LoadEncryption;
use slot::{Memory, ended};
pub(super) use slot::{SEGMENTS_MAX, Slot};

/// Declares functions of the two libraries, and how they are looked up.
macro_rules! functions {
    ($($library:ident $name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of both libraries.
        pub(super) struct Library {
            $($name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// Since version 16.
            load_encryption: Option<LoadEncryption>,
        }

        impl Library {
            fn find(loaded: &Loaded) -> Result<Self, libloading::Error> {
                Ok(Self {
                    $($name: {
                        let name = concat!(stringify!($name), "\0").as_bytes();
                        // SAFETY: the type is that of the function in Ceph's headers since version 15; the library
                        // stays loaded for good, so the pointer stays valid.
                        *unsafe { loaded.$library.get(name) }?
                    },)*
                    // SAFETY: as above, in the headers since version 16.
                    load_encryption: unsafe { loaded.rbd.get(b"rbd_encryption_load\0") }.ok().map(|found| *found),
                })
            }
        }
    };
}

/// `rados_t`, `rados_ioctx_t`, `rbd_image_t`, `rbd_completion_t`.
type Handle = *mut c_void;
type Text = *const c_char;
type Ended = unsafe extern "C" fn(Handle, *mut c_void);
type Changed = unsafe extern "C" fn(*mut c_void);
type Visit = unsafe extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int;

functions! {
    rados rados_create2(*mut Handle, Text, Text, u64) -> c_int;
    rados rados_conf_read_file(Handle, Text) -> c_int;
    rados rados_conf_set(Handle, Text, Text) -> c_int;
    rados rados_connect(Handle) -> c_int;
    rados rados_shutdown(Handle);
    rados rados_cluster_fsid(Handle, *mut c_char, usize) -> c_int;
    rados rados_ioctx_create(Handle, Text, *mut Handle) -> c_int;
    rados rados_ioctx_set_namespace(Handle, Text);
    rados rados_ioctx_destroy(Handle);
    rbd rbd_open(Handle, Text, *mut Handle, Text) -> c_int;
    rbd rbd_open_read_only(Handle, Text, *mut Handle, Text) -> c_int;
    rbd rbd_close(Handle) -> c_int;
    rbd rbd_stat(Handle, *mut ImageInfo, usize) -> c_int;
    rbd rbd_get_size(Handle, *mut u64) -> c_int;
    rbd rbd_resize(Handle, u64) -> c_int;
    rbd rbd_get_features(Handle, *mut u64) -> c_int;
    rbd rbd_is_exclusive_lock_owner(Handle, *mut c_int) -> c_int;
    rbd rbd_lock_acquire(Handle, c_int) -> c_int;
    rbd rbd_lock_get_owners(Handle, *mut c_int, *mut *mut c_char, *mut usize) -> c_int;
    rbd rbd_lock_get_owners_cleanup(*mut *mut c_char, usize);
    rbd rbd_watchers_list(Handle, *mut Watcher, *mut usize) -> c_int;
    rbd rbd_watchers_list_cleanup(*mut Watcher, usize);
    rbd rbd_update_watch(Handle, *mut u64, Changed, *mut c_void) -> c_int;
    rbd rbd_update_unwatch(Handle, u64) -> c_int;
    rbd rbd_diff_iterate2(Handle, Text, u64, u64, u8, u8, Visit, *mut c_void) -> c_int;
    rbd rbd_aio_create_completion(*mut c_void, Ended, *mut Handle) -> c_int;
    rbd rbd_aio_get_return_value(Handle) -> isize;
    rbd rbd_aio_release(Handle);
    rbd rbd_aio_read(Handle, u64, usize, *mut c_char, Handle) -> c_int;
    rbd rbd_aio_readv(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
    rbd rbd_aio_write(Handle, u64, usize, *const c_char, Handle) -> c_int;
    rbd rbd_aio_writev(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
    rbd rbd_aio_flush(Handle, Handle) -> c_int;
    rbd rbd_aio_discard(Handle, u64, u64, Handle) -> c_int;
    rbd rbd_aio_write_zeroes(Handle, u64, usize, Handle, c_int, c_int) -> c_int;
}

/// The libraries themselves.
struct Loaded {
    rados: libloading::Library,
    rbd: libloading::Library,
}

/// `rbd_image_info_t`.
#[repr(C)]
pub(super) struct ImageInfo {
    pub(super) size: u64,
    pub(super) object_size: u64,
    objects: u64,
    order: c_int,
    block_name_prefix: [c_char; 24],
    parent_pool: i64,
    parent_name: [c_char; 96],
}

/// `rbd_image_watcher_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Watcher {
    address: *mut c_char,
    id: i64,
    cookie: u64,
}

impl ImageInfo {
    /// What the names of its objects begin with.
    pub(super) fn objects_prefix(&self) -> String {
        let bytes = self.block_name_prefix.map(|char| char as u8);
        let prefix = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(prefix).into_owned()
    }
}

impl Library {
    /// Returns the libraries, which are loaded at the first call.
    ///
    /// # Errors
    /// The loader's error. Once the libraries are installed, the next call finds them.
    pub(super) fn get() -> Result<&'static Self, String> {
        static LIBRARY: OnceLock<Library> = OnceLock::new();
        if let Some(library) = LIBRARY.get() {
            return Ok(library);
        }
        let loaded = Self::load().map_err(|error| error.to_string())?;
        Ok(LIBRARY.get_or_init(|| loaded))
    }

    fn load() -> Result<Self, libloading::Error> {
        // SAFETY: what runs when it is loaded is Ceph's own, as Debian and others build it: it makes static objects.
        let rados = unsafe { libloading::Library::new("librados.so.2") }?;
        // SAFETY: as above.
        let rbd = unsafe { libloading::Library::new("librbd.so.1") }?;
        // Leaked: their threads and static objects must not lose their code.
        let loaded: &'static Loaded = Box::leak(Box::new(Loaded { rados, rbd }));
        Self::find(loaded)
    }
}

/// Why there is no connection.
pub(super) struct ConnectError {
    /// The step that failed.
    pub(super) action: Cow<'static, str>,
    /// Ceph's error.
    pub(super) source: io::Error,
    /// It was an option, and not the cluster.
    pub(super) is_option: bool,
}

/// A connection to a cluster. Dropping it may block.
pub(super) struct Rados {
    library: &'static Library,
    handle: Handle,
    fsid: String,
}

// SAFETY: librados' handles may be used from any thread, as its documentation says.
unsafe impl Send for Rados {}
// SAFETY: as above, also from several at once.
unsafe impl Sync for Rados {}

impl Rados {
    /// Connects. May block for as long as the option `client_mount_timeout` says.
    ///
    /// # Errors
    /// The step that failed, and Ceph's error.
    pub(super) fn connect(
        library: &'static Library,
        config: &ClusterConfig,
        options: &[(String, String)],
    ) -> Result<Self, ConnectError> {
        let at = |action: &'static str| {
            move |source| ConnectError {
                action: action.into(),
                source,
                is_option: false,
            }
        };
        let user = text(&format!("client.{}", config.id.as_deref().unwrap_or("admin")));
        let cluster = text("ceph");
        let mut handle = ptr::null_mut();
        // SAFETY: two texts that end with a zero, and a place for the handle.
        let made = unsafe { (library.rados_create2)(&raw mut handle, cluster.as_ptr(), user.as_ptr(), 0) };
        check(made).map_err(at("make a client"))?;
        let mut rados = Self {
            library,
            handle,
            fsid: String::new(),
        };
        let conf = config.conf.as_deref().map(text);
        let path = conf.as_ref().map_or(ptr::null(), |conf| conf.as_ptr());
        // SAFETY: the handle was made above; the path is a text that ends with a zero, or none for the usual places.
        let read = unsafe { (library.rados_conf_read_file)(handle, path) };
        check(read).map_err(at("read the configuration (conf=)"))?;
        for (key, value) in options {
            let (name, set_to) = (text(key), text(value));
            // SAFETY: the handle is there, and both texts end with a zero.
            let set = unsafe { (library.rados_conf_set)(handle, name.as_ptr(), set_to.as_ptr()) };
            check(set).map_err(|source| ConnectError {
                action: format!("set Ceph's option {key} to {value}").into(),
                source,
                is_option: true,
            })?;
        }
        // SAFETY: the handle is there, and was not connected yet.
        let connected = unsafe { (library.rados_connect)(handle) };
        check(connected).map_err(at("connect to the cluster"))?;
        rados.fsid = rados.read_fsid().map_err(at("ask the cluster for its fsid"))?;
        Ok(rados)
    }

    /// The cluster's identity.
    pub(super) fn fsid(&self) -> &str {
        &self.fsid
    }

    fn read_fsid(&self) -> io::Result<String> {
        let mut fsid = [0u8; 64];
        // SAFETY: the handle is connected; so many bytes can be written there.
        let len =
            unsafe { (self.library.rados_cluster_fsid)(self.handle, fsid.as_mut_ptr().cast(), fsid.len()) };
        let len = check(len)?;
        Ok(String::from_utf8_lossy(&fsid[..len.min(fsid.len())]).into_owned())
    }

    /// Opens an image. May block for as long as the cluster does not answer.
    ///
    /// # Errors
    /// The step that failed, and Ceph's error.
    pub(super) fn open(
        self: &Arc<Self>,
        name: &ImageName,
        read_only: bool,
    ) -> Result<RawImage, (&'static str, io::Error)> {
        let (pool, namespace) = (text(&name.pool), text(&name.namespace));
        let mut image = RawImage {
            rados: Arc::clone(self),
            io: ptr::null_mut(),
            handle: ptr::null_mut(),
            watch: None,
        };
        let io = &raw mut image.io;
        // SAFETY: the cluster is connected, the text ends with a zero, and there is a place for the handle.
        let made = unsafe { (self.library.rados_ioctx_create)(self.handle, pool.as_ptr(), io) };
        check(made).map_err(|error| ("use the pool", error))?;
        // SAFETY: the handle was made above, and nobody else has it yet; the text ends with a zero.
        unsafe { (self.library.rados_ioctx_set_namespace)(image.io, namespace.as_ptr()) };
        let open = match read_only {
            true => self.library.rbd_open_read_only,
            false => self.library.rbd_open,
        };
        let snapshot = name.snapshot.as_deref().map(text);
        let snapshot = snapshot.as_ref().map_or(ptr::null(), |name| name.as_ptr());
        let (name, handle) = (text(&name.image), &raw mut image.handle);
        // SAFETY: the pool's handle is there, the texts end with a zero (no snapshot is null), and there is a place for
        // the image's handle.
        let opened = unsafe { open(image.io, name.as_ptr(), handle, snapshot) };
        check(opened).map_err(|error| ("open the image", error))?;
        Ok(image)
    }
}

impl Drop for Rados {
    fn drop(&mut self) {
        // SAFETY: made by `connect`; all images hold this value, so they are closed; nobody uses it afterwards.
        unsafe { (self.library.rados_shutdown)(self.handle) }
    }
}

/// An open image. Dropping it waits for requests under way, and may block.
pub(super) struct RawImage {
    rados: Arc<Rados>,
    /// The pool.
    io: Handle,
    handle: Handle,
    /// The receiver of change notifications, and the number of the watch.
    watch: Option<(u64, Arc<Changes>)>,
}

// SAFETY: librbd's image handles may be used from any thread; what must not happen together (closing and anything else) needs
// the value itself.
unsafe impl Send for RawImage {}
// SAFETY: as above: librbd locks inside, as QEMU's and tgt's use of it from several threads relies on.
unsafe impl Sync for RawImage {}

impl RawImage {
    /// Its sizes.
    pub(super) fn info(&self) -> io::Result<ImageInfo> {
        let mut info = MaybeUninit::<ImageInfo>::zeroed();
        // SAFETY: the image is open; so many bytes can be written there.
        let asked =
            unsafe { (self.library().rbd_stat)(self.handle, info.as_mut_ptr(), size_of::<ImageInfo>()) };
        check(asked)?;
        // SAFETY: numbers and arrays of them, for which zeroes, as well as what librbd wrote, are values.
        Ok(unsafe { info.assume_init() })
    }

    /// The present size in bytes. May block.
    pub(super) fn size(&self) -> io::Result<u64> {
        let mut size = 0;
        // SAFETY: the image is open, and there is a place for the number.
        check(unsafe { (self.library().rbd_get_size)(self.handle, &raw mut size) })?;
        Ok(size)
    }

    /// Sets the size in bytes. May block.
    pub(super) fn resize(&self, size: u64) -> io::Result<()> {
        // SAFETY: the image is open.
        check(unsafe { (self.library().rbd_resize)(self.handle, size) }).map(drop)
    }

    /// Takes the exclusive lock, which is not given to others who ask from then on. May block.
    pub(super) fn lock(&self) -> io::Result<()> {
        // SAFETY: the image is open.
        check(unsafe { (self.library().rbd_lock_acquire)(self.handle, LOCK_EXCLUSIVE) }).map(drop)
    }

    /// Whether it has the feature without which there is no exclusive lock. May block.
    pub(super) fn has_lock_feature(&self) -> io::Result<bool> {
        let mut features = 0;
        // SAFETY: the image is open, and there is a place for the number.
        check(unsafe { (self.library().rbd_get_features)(self.handle, &raw mut features) })?;
        Ok(features & FEATURE_EXCLUSIVE_LOCK != 0)
    }

    /// Asks the cluster whether the exclusive lock is still this client's. May block.
    pub(super) fn has_lock(&self) -> io::Result<bool> {
        let mut owns = 0;
        // SAFETY: the image is open, and there is a place for the answer.
        check(unsafe { (self.library().rbd_is_exclusive_lock_owner)(self.handle, &raw mut owns) })?;
        Ok(owns != 0)
    }

    /// The address of the client that has the lock, alive or not. May block.
    pub(super) fn lock_owner(&self) -> io::Result<Option<String>> {
        let (mut mode, mut owner, mut count) = (0, ptr::null_mut(), 1);
        // SAFETY: the image is open; there are places for the mode, one owner, and their number.
        let asked = unsafe {
            (self.library().rbd_lock_get_owners)(self.handle, &raw mut mode, &raw mut owner, &raw mut count)
        };
        match check(asked) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
            other => other?,
        };
        let found = (count > 0).then(|| string(owner));
        // SAFETY: the list of one and its length, as they were given.
        unsafe { (self.library().rbd_lock_get_owners_cleanup)(&raw mut owner, count) };
        Ok(found)
    }

    /// The addresses of clients that watch the image: all that have it open for writing, and were
    /// alive a while ago. May block.
    pub(super) fn watchers(&self) -> io::Result<Vec<String>> {
        let none = Watcher {
            address: ptr::null_mut(),
            id: 0,
            cookie: 0,
        };
        let mut list = vec![none; WATCHERS];
        loop {
            let mut count = list.len();
            // SAFETY: the image is open; so many watchers can be written there, and their number.
            let asked =
                unsafe { (self.library().rbd_watchers_list)(self.handle, list.as_mut_ptr(), &raw mut count) };
            match more_room(asked, list.len(), count) {
                Some(room) => list.resize(room, none),
                None => {
                    check(asked)?;
                    let found = list[..count].iter().map(|watcher| string(watcher.address));
                    let found = found.collect();
                    // SAFETY: the list and its length, as they were given.
                    unsafe { (self.library().rbd_watchers_list_cleanup)(list.as_mut_ptr(), count) };
                    return Ok(found);
                }
            }
        }
    }

    /// Registers `changes` for notifications when the image's size or snapshots have changed.
    pub(super) fn watch(&mut self, changes: Arc<Changes>) -> io::Result<()> {
        let (mut number, told) = (0, Arc::as_ptr(&changes));
        // SAFETY: the image is open; `told` is kept by this value until the watch has been taken back.
        let watched = unsafe {
            (self.library().rbd_update_watch)(self.handle, &raw mut number, changed, told.cast_mut().cast())
        };
        check(watched)?;
        self.watch = Some((number, changes));
        Ok(())
    }

    /// Visits the stored parts of a range, in order, with offset and length, until `visit` returns
    /// false. May block.
    pub(super) fn for_each_stored(
        &self,
        offset: u64,
        len: u64,
        mut visit: impl FnMut(u64, u64) -> bool,
    ) -> io::Result<()> {
        let mut visit: &mut dyn FnMut(u64, u64) -> bool = &mut visit;
        let visitor = (&raw mut visit).cast();
        let diff = self.library().rbd_diff_iterate2;
        // SAFETY: the image is open; from no snapshot on, with parents, by whole objects; the visitor is called with a pointer
        // to `visit` alone, before this returns.
        let asked = unsafe { diff(self.handle, ptr::null(), offset, len, 1, 1, visit_stored, visitor) };
        match check(asked) {
            Err(error) if error.raw_os_error() == Some(libc::ECANCELED) => Ok(()),
            other => other.map(drop),
        }
    }

    /// Passes a request to librbd; its completion comes into the slot's mailbox. Does not block.
    ///
    /// The slot must have no request under way.
    ///
    /// # Errors
    /// The request is not under way then: `EINVAL` if its memory is not as long as its range, or
    /// has too many pieces; or librbd's error.
    #[inline]
    pub(super) fn start(&self, slot: &Slot, rq: &Request) -> io::Result<()> {
        let library = self.library();
        let memory = slot.memory(rq)?;
        let completion = self.completion(slot)?;
        let (offset, len) = (rq.offset(), rq.len());
        let started = match (rq.op(), memory) {
            (Op::Read, Memory::Flat(piece)) => {
                let (start, len) = (piece.start().as_ptr().cast(), piece.len() as usize);
                // SAFETY: the image is open; the lender keeps the memory writable until its read has ended.
                unsafe { (library.rbd_aio_read)(self.handle, offset, len, start, completion) }
            }
            (Op::Write, Memory::Flat(piece)) => {
                let (start, len) = (piece.start().as_ptr().cast_const().cast(), piece.len() as usize);
                // SAFETY: the image is open; the lender keeps the memory readable until its write has ended.
                unsafe { (library.rbd_aio_write)(self.handle, offset, len, start, completion) }
            }
            (Op::Read, Memory::List(list, count)) => {
                // SAFETY: as for one piece; the list is the slot's, which is left alone until the request has ended.
                unsafe { (library.rbd_aio_readv)(self.handle, list, count, offset, completion) }
            }
            (Op::Write, Memory::List(list, count)) => {
                // SAFETY: as above.
                unsafe { (library.rbd_aio_writev)(self.handle, list, count, offset, completion) }
            }
            (Op::Discard, _) => {
                // SAFETY: the image is open.
                unsafe { (library.rbd_aio_discard)(self.handle, offset, len, completion) }
            }
            (Op::WriteZeroes, _) => {
                let flags = if rq.flags().has(Flags::NO_UNMAP) {
                    THICK_PROVISION
                } else {
                    0
                };
                // SAFETY: the image is open.
                unsafe {
                    (library.rbd_aio_write_zeroes)(self.handle, offset, len as usize, completion, flags, 0)
                }
            }
            (Op::Flush | Op::Read | Op::Write, _) => {
                // SAFETY: the image is open. (A read or write has memory: `Slot::memory`.)
                unsafe { (library.rbd_aio_flush)(self.handle, completion) }
            }
        };
        if started < 0 {
            // SAFETY: made above, and not under way.
            unsafe { (library.rbd_aio_release)(completion) };
        }
        check(started).map(drop)
    }

    #[inline]
    fn completion(&self, slot: &Slot) -> io::Result<Handle> {
        let mut completion = ptr::null_mut();
        let about = ptr::from_ref(slot).cast_mut().cast();
        // SAFETY: the slot is its mailbox's, which the hardware context keeps, and leaves for good if it ends with requests
        // under way; `ended` takes it for what it is.
        let made = unsafe { (self.library().rbd_aio_create_completion)(about, ended, &raw mut completion) };
        check(made)?;
        Ok(completion)
    }

    fn library(&self) -> &'static Library {
        self.rados.library
    }
}

impl Drop for RawImage {
    fn drop(&mut self) {
        let library = self.library();
        if let Some((number, changes)) = self.watch.take() {
            // SAFETY: the image is open, and the watch was not taken back before. When this returns nobody is told any more.
            let ended = unsafe { (library.rbd_update_unwatch)(self.handle, number) };
            if ended < 0 {
                // librbd may still call it.
                std::mem::forget(changes);
            }
        }
        if !self.handle.is_null() {
            // SAFETY: the image is open, and whoever drops this is the last to have it.
            unsafe { (library.rbd_close)(self.handle) };
        }
        if !self.io.is_null() {
            // SAFETY: made by `open`; its one image is closed.
            unsafe { (library.rados_ioctx_destroy)(self.io) };
        }
    }
}

/// librbd's thread reports that an image has changed.
unsafe extern "C" fn changed(told: *mut c_void) {
    // SAFETY: as `watch` gave it; the image keeps it until the watch has been taken back.
    let changes: &Changes = unsafe { &*told.cast::<Changes>() };
    changes.tell();
}

/// librbd reports a stored range.
unsafe extern "C" fn visit_stored(offset: u64, len: usize, exists: c_int, visitor: *mut c_void) -> c_int {
    // SAFETY: as `for_each_stored` gave it, which waits meanwhile.
    let visit = unsafe { &mut *visitor.cast::<&mut dyn FnMut(u64, u64) -> bool>() };
    let goes_on = exists == 0 || visit(offset, len as u64);
    if goes_on { 0 } else { -libc::ECANCELED }
}

/// The result of a function of Ceph: a number, or an errno.
fn check(returned: c_int) -> io::Result<usize> {
    usize::try_from(returned).map_err(|_| io::Error::from_raw_os_error(-returned))
}

/// How many watchers to ask for next, if `asked` was the refusal to report `count` in the room of `room`.
fn more_room(asked: c_int, room: usize, count: usize) -> Option<usize> {
    // They double at least: some may come meanwhile.
    (asked == -libc::ERANGE && room < WATCHERS_MAX).then(|| count.max(2 * room).min(WATCHERS_MAX))
}

/// A text for Ceph. The parser refuses configurations with zero bytes.
fn text(text: &str) -> CString {
    CString::new(text).unwrap_or_default()
}

fn string(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: a text of librbd's, which ends with a zero, and is cleaned up later.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// `RBD_FEATURE_EXCLUSIVE_LOCK`.
const FEATURE_EXCLUSIVE_LOCK: u64 = 1 << 2;
/// `RBD_LOCK_MODE_EXCLUSIVE`.
const LOCK_EXCLUSIVE: c_int = 0;
/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`.
const THICK_PROVISION: c_int = 1;
/// Watchers for which there is room at first, and at most.
const WATCHERS: usize = 64;
const WATCHERS_MAX: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watchers_without_room_are_asked_for_again_with_room_for_all_up_to_a_limit() {
        let too_few = -libc::ERANGE;
        assert_eq!(more_room(too_few, 64, 65), Some(128));
        assert_eq!(more_room(too_few, 64, 1000), Some(1000));
        assert_eq!(more_room(too_few, 40_000, 40_001), Some(WATCHERS_MAX));
        assert_eq!(more_room(too_few, WATCHERS_MAX, 1 << 20), None);
        assert_eq!(more_room(0, 64, 3), None);
        assert_eq!(more_room(-libc::EIO, 64, 64), None);
    }
}
