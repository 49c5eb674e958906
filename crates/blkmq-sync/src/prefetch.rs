//! Decides how a thread says that it will soon write what another core has in its cache: the line is on its way while the
//! thread still works on what comes before it.
//!
//! Fetched for reading, a line that is then written would have to be asked for twice.

/// Asks for the cache line that holds `at`, for writing. Neither waits nor changes anything.
#[inline(always)]
pub fn for_write<T>(at: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the instruction has no effect that a program could see, whatever the address; processors without it do nothing.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) std::ptr::from_ref(at), options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}
