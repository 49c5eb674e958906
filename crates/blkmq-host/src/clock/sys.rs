//! The processor's time-stamp counter: its value, and whether it has a constant rate. The parent module
//! decides whether to use it.

/// Reads the counter.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(super) fn counter() -> u64 {
    // SAFETY: every x86-64 processor has RDTSC; it reads a register and touches no memory.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// Says whether the counter has the same rate in all of the processor's states.
#[cfg(target_arch = "x86_64")]
pub(super) fn counter_is_invariant() -> bool {
    use std::arch::x86_64::__cpuid;
    let highest = __cpuid(0x8000_0000).eax;
    highest >= 0x8000_0007 && __cpuid(0x8000_0007).edx & (1 << 8) != 0
}

/// No counter is known to be good here: the parent module then uses the kernel's clock.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn counter() -> u64 {
    0
}

/// See [`counter`].
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn counter_is_invariant() -> bool {
    false
}
