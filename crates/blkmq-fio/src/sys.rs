//! The trusted parts of fio's binary interface: the declarations here are those parts of fio 3.33's
//! structures that an engine needs, and nothing is read from a job before its layout is found to be as
//! declared. All `unsafe` of this crate is here.
//!
//! The front parts of `io_u` and `fio_file` are the same in every build. Of a job's own structure
//! only two fields are used, where fio keeps the engine that it called, which must be this one, and
//! the engine's options.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::{NonNull, null, null_mut};

use anyhow::{Result, bail};
use blkmq_core::bio::{Data, Lent, Op};
use blkmq_core::time::Nanos;

use crate::job::{Io, Job};
use crate::shared_engine::{JobOptions, SharedEngine};

/// The jobs of this process.
static HALL: SharedEngine = SharedEngine::new();

/// A job of fio. Only its address and the places of [`layout`] are known.
#[repr(C)]
struct ThreadData {
    _opaque: [u8; 0],
}

/// Offsets of what an engine needs of a job in fio 3.33, in bytes from its start, on 64-bit Linux.
mod layout {
    /// The engine's options.
    pub(super) const OPTIONS: usize = 0x1078;
    /// The engine that fio calls.
    pub(super) const ENGINE: usize = 0x2e600;
    /// The engine's own, behind a flag of four bytes.
    pub(super) const PRIVATE: usize = ENGINE + 16;
    /// The whole structure is longer than this.
    #[cfg(test)]
    pub(super) const LEN_MIN: usize = PRIVATE + 8;
}

/// The front of fio's I/O unit.
#[repr(C)]
struct IoU {
    times: [libc::timespec; 2],
    file: *mut FioFile,
    flags: c_uint,
    ddir: c_int,
    acct_ddir: c_int,
    numberio: u16,
    ioprio: u16,
    clat_prio_index: u16,
    buflen: u64,
    offset: u64,
    verify_offset: u64,
    buf: *mut c_void,
    rand_seed: u64,
    xfer_buf: *mut u8,
    xfer_buflen: u64,
    buf_filled_len: u64,
    ipo: *mut c_void,
    resid: u64,
    error: c_uint,
}

/// The front of fio's file.
#[repr(C)]
struct FioFile {
    hash_list: [*mut c_void; 2],
    filetype: c_int,
    fd: c_int,
    shadow_fd: c_int,
    major: c_uint,
    minor: c_uint,
    fileno: c_int,
    file_name: *mut c_char,
    real_file_size: u64,
}

/// The functions that fio calls.
#[repr(C)]
struct EngineOps {
    list: [*mut c_void; 2],
    name: *const c_char,
    version: c_int,
    flags: c_int,
    dlhandle: *mut c_void,
    setup: Option<extern "C" fn(*mut ThreadData) -> c_int>,
    init: Option<extern "C" fn(*mut ThreadData) -> c_int>,
    post_init: Unused,
    prep: Unused,
    queue: Option<extern "C" fn(*mut ThreadData, *mut IoU) -> c_int>,
    commit: Option<extern "C" fn(*mut ThreadData) -> c_int>,
    getevents: Option<extern "C" fn(*mut ThreadData, c_uint, c_uint, *const libc::timespec) -> c_int>,
    event: Option<extern "C" fn(*mut ThreadData, c_int) -> *mut IoU>,
    errdetails: Unused,
    cancel: Unused,
    cleanup: Option<extern "C" fn(*mut ThreadData)>,
    open_file: Option<extern "C" fn(*mut ThreadData, *mut FioFile) -> c_int>,
    close_file: Option<extern "C" fn(*mut ThreadData, *mut FioFile) -> c_int>,
    invalidate: Option<extern "C" fn(*mut ThreadData, *mut FioFile) -> c_int>,
    unlink_file: Unused,
    get_file_size: Option<extern "C" fn(*mut ThreadData, *mut FioFile) -> c_int>,
    prepopulate_file: Unused,
    terminate: Unused,
    iomem_alloc: Unused,
    iomem_free: Unused,
    io_u_init: Unused,
    io_u_free: Unused,
    zoned: [Unused; 4],
    option_struct_size: c_int,
    options: *const FioOption,
}

type Unused = Option<extern "C" fn()>;

/// One of the engine's options.
#[repr(C)]
struct FioOption {
    name: *const c_char,
    lname: *const c_char,
    alias: *const c_char,
    kind: c_int,
    offsets: [c_uint; 6],
    maxval: u64,
    minval: c_int,
    maxfp: f64,
    minfp: f64,
    interval: c_uint,
    maxlen: c_uint,
    neg: c_int,
    prio: c_int,
    cb: Unused,
    help: *const c_char,
    def: *const c_char,
    posval: [ValuePair; 32],
    parent: *const c_char,
    hide: c_int,
    hide_on_set: c_int,
    inverse: *const c_char,
    inv_opt: *mut c_void,
    verify: Unused,
    prof_name: *const c_char,
    prof_opts: *mut c_void,
    category: u64,
    group: u64,
    gui_data: *mut c_void,
    is_seconds: c_int,
    is_time: c_int,
    no_warn_def: c_int,
    pow2: c_int,
    no_free: c_int,
}

#[repr(C)]
struct ValuePair {
    ival: *const c_char,
    oval: u64,
    help: *const c_char,
    orval: c_int,
    cb: *mut c_void,
}

/// The options as fio stores them. The first field is fio's own.
#[repr(C)]
struct Options {
    fios: *mut c_void,
    disk: *mut c_char,
    config: *mut c_char,
    sched: *mut c_char,
    group: *mut c_char,
    depth: c_uint,
}

/// What fio changes in an engine's tables, from its main thread: the list into which it links
/// engines, the library's handle, derived values of options.
#[repr(transparent)]
struct FiosOwn<T>(T);

// SAFETY: fio alone writes to these tables, before it starts any job's thread; we only take their address.
unsafe impl<T> Sync for FiosOwn<T> {}

/// The engine, under the name that fio looks for.
#[unsafe(no_mangle)]
static mut ioengine: FiosOwn<EngineOps> = FiosOwn(EngineOps {
    list: [null_mut(); 2],
    name: c"blkmq".as_ptr(),
    version: INTERFACE_VERSION,
    flags: FLAG_RAW_IO | FLAG_NO_EXTEND | FLAG_NO_DISK_UTIL | FLAG_ALIGNED_MEMORY,
    dlhandle: null_mut(),
    setup: None,
    init: Some(init),
    post_init: None,
    prep: None,
    queue: Some(queue),
    commit: Some(commit),
    getevents: Some(getevents),
    event: Some(event),
    errdetails: None,
    cancel: None,
    cleanup: Some(cleanup),
    open_file: Some(nothing_to_do),
    close_file: Some(nothing_to_do),
    invalidate: Some(nothing_to_do),
    unlink_file: None,
    get_file_size: Some(get_file_size),
    prepopulate_file: None,
    terminate: None,
    iomem_alloc: None,
    iomem_free: None,
    io_u_init: None,
    io_u_free: None,
    zoned: [None; 4],
    option_struct_size: size_of::<Options>() as c_int,
    options: (&raw const OPTIONS).cast(),
});

static mut OPTIONS: FiosOwn<[FioOption; 6]> = FiosOwn([
    text(
        c"disk",
        c"the disk, as for blkmq serve --disk: null=1T | ram=64M | file=PATH, and its keys; or a [disk.NAME] of config",
        std::mem::offset_of!(Options, disk),
    ),
    text(
        c"config",
        c"a configuration file, as for blkmq serve -c; its exports are ignored",
        std::mem::offset_of!(Options, config),
    ),
    text(
        c"sched",
        c"the elevator of the disk's queue, as for blkmq serve --sched",
        std::mem::offset_of!(Options, sched),
    ),
    text(
        c"tenant",
        c"the group of this job's I/O, as for blkmq serve --group: /customers/a,weight=200",
        std::mem::offset_of!(Options, group),
    ),
    number(
        c"queue_depth",
        c"requests in flight at the drive; 0: the drive's default",
        std::mem::offset_of!(Options, depth),
    ),
    FioOption::NONE,
]);

const fn text(name: &'static CStr, help: &'static CStr, offset: usize) -> FioOption {
    FioOption {
        name: name.as_ptr(),
        lname: name.as_ptr(),
        help: help.as_ptr(),
        kind: OPTION_TEXT,
        offsets: [offset as c_uint, 0, 0, 0, 0, 0],
        ..FioOption::NONE
    }
}

const fn number(name: &'static CStr, help: &'static CStr, offset: usize) -> FioOption {
    FioOption {
        kind: OPTION_INT,
        maxval: 65536,
        def: c"0".as_ptr(),
        ..text(name, help, offset)
    }
}

impl FioOption {
    const NONE: Self = Self {
        name: null(),
        lname: null(),
        alias: null(),
        kind: 0,
        offsets: [0; 6],
        maxval: 0,
        minval: 0,
        maxfp: 0.0,
        minfp: 0.0,
        interval: 0,
        maxlen: 0,
        neg: 0,
        prio: 0,
        cb: None,
        help: null(),
        def: null(),
        posval: [const {
            ValuePair {
                ival: null(),
                oval: 0,
                help: null(),
                orval: 0,
                cb: null_mut(),
            }
        }; 32],
        parent: null(),
        hide: 0,
        hide_on_set: 0,
        inverse: null(),
        inv_opt: null_mut(),
        verify: None,
        prof_name: null(),
        prof_opts: null_mut(),
        category: CATEGORY_ENGINE,
        group: 0,
        gui_data: null_mut(),
        is_seconds: 0,
        is_time: 0,
        no_warn_def: 0,
        pow2: 0,
        no_free: 0,
    };
}

/// Returns the size of the job's disk, and thereby registers the job: fio asks this of all jobs
/// before any of them starts.
extern "C" fn get_file_size(td: *mut ThreadData, file: *mut FioFile) -> c_int {
    guard(|| {
        let size = HALL.register(td as usize, job_options(td)?)?;
        // SAFETY: fio hands a file of the job, which nobody else uses meanwhile.
        let file = unsafe { &mut *file };
        file.real_file_size = size;
        // Otherwise fio would try to make a file of this size.
        file.filetype = FILE_IS_BLOCK_DEVICE;
        Ok(())
    })
}

/// Starts the job, on its thread.
extern "C" fn init(td: *mut ThreadData) -> c_int {
    guard(|| {
        check_layout(td)?;
        let job = Box::new(Job::new(HALL.enter(td as usize)?));
        // SAFETY: the layout is as declared: the place is the engine's own, for a pointer, and empty.
        unsafe { *place::<*mut Job>(td, layout::PRIVATE) = Box::into_raw(job) };
        Ok(())
    })
}

/// Ends the job. Also called without `init`.
extern "C" fn cleanup(td: *mut ThreadData) {
    guard(|| {
        check_layout(td)?;
        // SAFETY: the layout is as declared.
        let job = unsafe { place::<*mut Job>(td, layout::PRIVATE).replace(null_mut()) };
        if !job.is_null() {
            // SAFETY: what is there comes from `init`, and is taken out once.
            let job = unsafe { Box::from_raw(job) };
            HALL.leave(td as usize, job.into_ticket());
        }
        Ok(())
    });
}

#[inline]
extern "C" fn queue(td: *mut ThreadData, io_u: *mut IoU) -> c_int {
    // SAFETY: fio queues only between `init` and `cleanup`.
    let job = unsafe { job(td) };
    // SAFETY: fio hands an I/O unit, which is ours until it is given back.
    let unit = unsafe { &mut *io_u };
    let Some(op) = op(unit.ddir) else {
        unit.error = libc::EINVAL as c_uint;
        return COMPLETED;
    };
    let start = NonNull::new(unit.xfer_buf).filter(|_| op.has_data());
    let data = start.map_or(Data::None, |start| {
        // SAFETY: fio's buffer is as long as the transfer, and fio leaves it alone until the unit has been given back.
        Data::Flat(unsafe { Lent::new(start, unit.xfer_buflen as u32) })
    });
    let is_queued = job.queue(Io {
        op,
        offset: unit.offset,
        len: unit.xfer_buflen,
        data,
        ioprio: unit.ioprio,
        cookie: io_u as u64,
    });
    if is_queued { QUEUED } else { BUSY }
}

#[inline]
extern "C" fn commit(td: *mut ThreadData) -> c_int {
    // SAFETY: fio commits only between `init` and `cleanup`.
    unsafe { job(td) }.commit();
    0
}

#[inline]
extern "C" fn getevents(
    td: *mut ThreadData,
    min: c_uint,
    max: c_uint,
    timeout: *const libc::timespec,
) -> c_int {
    // SAFETY: fio asks for events only between `init` and `cleanup`.
    let job = unsafe { job(td) };
    // SAFETY: null, or a time of the caller's.
    let timeout = unsafe { timeout.as_ref() };
    let timeout = timeout.map(|time| Nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64));
    job.wait(min as usize, max as usize, timeout) as c_int
}

#[inline]
extern "C" fn event(td: *mut ThreadData, index: c_int) -> *mut IoU {
    // SAFETY: fio asks for events only between `init` and `cleanup`.
    let job = unsafe { job(td) };
    let Some((cookie, errno)) = job.event(index as usize) else {
        return null_mut();
    };
    let io_u = cookie as *mut IoU;
    // SAFETY: the cookie is the address of a unit that fio queued and that has not been given back.
    unsafe { (*io_u).error = errno as c_uint };
    io_u
}

extern "C" fn nothing_to_do(_td: *mut ThreadData, _file: *mut FioFile) -> c_int {
    0
}

/// The job that `init` made.
///
/// # Safety
/// Called between `init` and `cleanup` of this job, on its thread, and not while another result is in use.
#[inline]
unsafe fn job<'a>(td: *mut ThreadData) -> &'a mut Job {
    // SAFETY: `init` has found the layout as declared and has filled the place.
    let job = unsafe { *place::<*mut Job>(td, layout::PRIVATE) };
    // SAFETY: made by `init`, freed by `cleanup`; fio uses a job from one thread.
    unsafe { &mut *job }
}

/// Reads the job's options.
fn job_options(td: *mut ThreadData) -> Result<JobOptions> {
    let options = check_layout(td)?;
    Ok(JobOptions {
        disk: string(options.disk),
        config: string(options.config),
        sched: string(options.sched),
        group: string(options.group),
        depth: options.depth,
    })
}

/// Checks that the job's layout is as declared: its engine must be this one.
fn check_layout<'a>(td: *mut ThreadData) -> Result<&'a Options> {
    // SAFETY: a job of any fio is longer than this by much; a wrong place holds something else, which is only compared.
    let engine = unsafe { place::<usize>(td, layout::ENGINE).read() };
    // SAFETY: as above.
    let options = unsafe { place::<usize>(td, layout::OPTIONS).read() };
    if engine == (&raw const ioengine) as usize && options != 0 && options % align_of::<Options>() == 0 {
        // SAFETY: the engine's place is right, and the options' lies before it among what is the same in every build; fio
        // has made them as long as we told it.
        return Ok(unsafe { &*(options as *const Options) });
    }
    bail!(
        "this fio ({}) keeps its jobs in another form than 3.33, which this engine is made for; use fio 3.33",
        version()
    )
}

/// The version that fio reports.
fn version() -> String {
    // SAFETY: the name ends with a zero; the result is null or the address of fio's text.
    let text = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"fio_version_string".as_ptr()) };
    string(text.cast())
}

/// An address in a job.
fn place<T>(td: *mut ThreadData, offset: usize) -> *mut T {
    td.cast::<u8>().wrapping_add(offset).cast()
}

/// Reads a text of fio; null is empty.
fn string(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: not null, so a text of fio's that ends with a zero.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Prints an error for the user and reports it to fio.
fn guard(work: impl FnOnce() -> Result<()>) -> c_int {
    match work() {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("blkmq: {error:#}");
            libc::EINVAL
        }
    }
}

/// The operation for fio's data direction.
#[inline]
fn op(ddir: c_int) -> Option<Op> {
    match ddir {
        0 => Some(Op::Read),
        1 => Some(Op::Write),
        2 => Some(Op::Discard),
        // fsync, fdatasync, sync_file_range: there is one kind of flush.
        3..=5 => Some(Op::Flush),
        _ => None,
    }
}

/// The version of the interface; another fio refuses the engine by itself.
const INTERFACE_VERSION: c_int = 31;
const FLAG_RAW_IO: c_int = 1 << 1;
const FLAG_NO_EXTEND: c_int = 1 << 3;
const FLAG_NO_DISK_UTIL: c_int = 1 << 4;
const FLAG_ALIGNED_MEMORY: c_int = 1 << 9;
const COMPLETED: c_int = 0;
const QUEUED: c_int = 1;
const BUSY: c_int = 2;
const FILE_IS_BLOCK_DEVICE: c_int = 2;
const OPTION_TEXT: c_int = 6;
const OPTION_INT: c_int = 8;
const CATEGORY_ENGINE: u64 = 1 << 6;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declarations_have_the_sizes_of_fio_3_33() {
        assert_eq!(size_of::<EngineOps>(), 0x108);
        assert_eq!(std::mem::offset_of!(EngineOps, options), 0x100);
        assert_eq!(std::mem::offset_of!(FioFile, real_file_size), 48);
        assert_eq!(std::mem::offset_of!(IoU, offset), 72);
    }

    #[test]
    fn job_of_another_form_is_refused_before_anything_is_believed() {
        let mut memory = vec![0_usize; layout::LEN_MIN.div_ceil(8)];
        let td: *mut ThreadData = memory.as_mut_ptr().cast();
        let options = Options {
            fios: null_mut(),
            disk: null_mut(),
            config: null_mut(),
            sched: null_mut(),
            group: null_mut(),
            depth: 3,
        };
        let is_refused = || check_layout(td).is_err();
        assert!(is_refused());
        memory[layout::OPTIONS / 8] = &raw const options as usize;
        assert!(is_refused());
        memory[layout::ENGINE / 8] = (&raw const ioengine) as usize;
        assert!(!is_refused());
        let options = job_options(td).expect("a job of the declared form");
        assert_eq!((options.depth, options.disk.as_str()), (3, ""));
        memory[layout::OPTIONS / 8] += 1;
        assert!(is_refused());
        memory[layout::OPTIONS / 8] = 0;
        assert!(is_refused());
    }
}
