//! A prefetch for writing: a line in another core's cache is fetched while the thread still does earlier
//! work.
//!
//! If it were fetched for reading, the line would have to be requested a second time to be written.

/// Asks for the cache line that holds `at`, for writing. Neither waits nor changes anything.
#[inline(always)]
pub fn for_write<T>(at: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the instruction has no effect that a program could observe, whatever the address; processors
    // without it do nothing.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) std::ptr::from_ref(at), options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}
