//! The C library's look-ups of accounts, which ask whatever the host is configured to ask.

use std::ffi::{CString, c_char};
use std::mem::MaybeUninit;
use std::ptr;

pub(super) fn user(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    let (mut found, mut result) = (MaybeUninit::<libc::passwd>::uninit(), ptr::null_mut());
    let mut text: Vec<c_char> = vec![0; TEXT_BYTES];
    // SAFETY: the name ends with a zero; the record, the text and the result live as long as the call, and the text has
    // as many bytes as it is told.
    let failed = unsafe {
        libc::getpwnam_r(
            name.as_ptr(),
            found.as_mut_ptr(),
            text.as_mut_ptr(),
            text.len(),
            &raw mut result,
        )
    };
    if failed != 0 || result.is_null() {
        return None;
    }
    // SAFETY: a result that is not null says that the record is filled in.
    Some(unsafe { found.assume_init() }.pw_uid)
}

pub(super) fn group(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    let (mut found, mut result) = (MaybeUninit::<libc::group>::uninit(), ptr::null_mut());
    let mut text: Vec<c_char> = vec![0; TEXT_BYTES];
    // SAFETY: as in `user`.
    let failed = unsafe {
        libc::getgrnam_r(
            name.as_ptr(),
            found.as_mut_ptr(),
            text.as_mut_ptr(),
            text.len(),
            &raw mut result,
        )
    };
    if failed != 0 || result.is_null() {
        return None;
    }
    // SAFETY: as in `user`.
    Some(unsafe { found.assume_init() }.gr_gid)
}

/// Accounts from their files, hosts from the file and DNS.
#[cfg(target_feature = "crt-static")]
pub(super) fn restrict_sources() {
    unsafe extern "C" {
        // In glibc's <nss.h>.
        fn __nss_configure_lookup(database: *const c_char, sources: *const c_char) -> libc::c_int;
    }
    for (database, sources) in [
        (c"passwd", c"files"),
        (c"group", c"files"),
        (c"hosts", c"files dns"),
    ] {
        // SAFETY: both end with a zero, and the library keeps neither; the caller has no other thread.
        let failed = unsafe { __nss_configure_lookup(database.as_ptr(), sources.as_ptr()) };
        assert_eq!(failed, 0, "the C library has a database {database:?}");
    }
}

/// Room for the names of a group's members: some thousands of them.
const TEXT_BYTES: usize = 1 << 18;
