//! The handler of SIGBUS: anonymous memory replaces what a front end has taken away. It is the only handler
//! of the process; other uses of the signal go to the former handler.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::ptr;
use std::sync::OnceLock;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

/// Installs the handler, once.
pub(super) fn install() {
    FORMER.get_or_init(|| {
        let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_bus_error;
        let (mut action, mut former) = (by_default(), by_default());
        action.sa_sigaction = handler as usize;
        // On the stack that the standard library keeps for signals, where a thread has one.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: both are valid actions, and the handler does nothing that a handler must not do: it reads atomics and calls the
        // kernel.
        let done = unsafe { libc::sigaction(libc::SIGBUS, &action, &mut former) };
        assert_eq!(done, 0, "SIGBUS can have a handler");
        former
    });
}

extern "C" fn on_bus_error(_signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: the kernel passes a valid description to a handler with SA_SIGINFO.
    let info = unsafe { &*info };
    // SAFETY: SIGBUS has an address, or there is another number in its place, which is looked at only if it is an address.
    let address = unsafe { info.si_addr() } as usize;
    let is_access = info.si_code == libc::BUS_ADRERR || info.si_code == libc::BUS_MCEERR_AR;
    let lost = is_access.then(|| super::lose(address)).flatten();
    match lost {
        // A page at a time, since others may write beside it. Too many such pages are too many
        // mappings.
        Some((page, all)) if replace(&page) || replace(&all) => {}
        _ => give_back(),
    }
}

/// Maps anonymous memory there, which reads as zeroes.
fn replace(addresses: &Range<usize>) -> bool {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
    let start = ptr::with_exposed_provenance_mut(addresses.start);
    // SAFETY: the addresses are those of a mapping that is registered, hence in use as plain shared memory, whose content nobody
    // relies on; it is unmapped by its owner as if nothing had happened.
    unsafe { mmap_anonymous(start, addresses.len(), access, flags) }.is_ok()
}

/// Restores the former handler, which is called when the access fails again.
fn give_back() {
    let former = FORMER.get().copied().unwrap_or_else(by_default);
    // SAFETY: it is the action that was there before, or the default one.
    unsafe { libc::sigaction(libc::SIGBUS, &former, ptr::null_mut()) };
}

fn by_default() -> libc::sigaction {
    // SAFETY: all zeroes is a valid action: the default one, with an empty mask.
    unsafe { std::mem::zeroed() }
}

static FORMER: OnceLock<libc::sigaction> = OnceLock::new();
