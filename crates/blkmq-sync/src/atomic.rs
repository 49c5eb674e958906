//! Decides where atomics come from: the standard library, or loom while a model runs (`--cfg loom`).
//!
//! Every other module takes its atomics, cells, fences and `Arc` from here, so the code that is modelled is the code
//! that ships. The one exception is the shape of a full fence, see [`full_fence`] and [`fence_after_rmw`].

#[cfg(loom)]
pub(crate) use loom::{
    cell::UnsafeCell,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
    },
};
#[cfg(all(not(loom), not(all(not(miri), target_arch = "x86_64"))))]
use std::sync::atomic::fence;
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Arc,
    atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
};

/// A cell with loom's interface over the standard library's cell: access through closures, so that loom can watch it.
#[cfg(not(loom))]
#[derive(Debug)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    #[inline(always)]
    pub(crate) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    #[inline(always)]
    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

/// Orders every access before it against every access after it, stores against later loads included.
///
/// This is `fence(SeqCst)`. On x86-64 a locked read-modify-write of the stack does the same as `mfence` in less time,
/// because it need not wait for weakly ordered stores, which this engine does not use.
#[inline(always)]
pub(crate) fn full_fence() {
    #[cfg(all(not(loom), not(miri), target_arch = "x86_64"))]
    // SAFETY: the instruction rewrites four bytes below the stack pointer with their own value, in one locked step.
    // They lie in the red zone of the current thread's mapped stack, so they are readable and writable, and no other
    // thread refers to them. Without `nomem` the compiler moves no access across the block.
    unsafe {
        std::arch::asm!("lock or dword ptr [rsp - 8], 0", options(nostack));
    }
    #[cfg(all(not(loom), not(all(not(miri), target_arch = "x86_64"))))]
    fence(Ordering::SeqCst);
    #[cfg(loom)]
    faults::fence_unless(faults::Fault::NoFullFence);
}

/// A full fence for a thread whose access before it, that is to be ordered, was a read-modify-write.
///
/// On x86-64 that read-modify-write carried a `lock` prefix: later loads already wait for it, and only the compiler must
/// be held back. Elsewhere, and in the models, this is `fence(SeqCst)`.
#[inline(always)]
pub(crate) fn fence_after_rmw() {
    #[cfg(all(not(loom), not(miri), target_arch = "x86_64"))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(all(not(loom), not(all(not(miri), target_arch = "x86_64"))))]
    fence(Ordering::SeqCst);
    #[cfg(loom)]
    faults::fence_unless(faults::Fault::NoFenceAfterRmw);
}

/// Faults that a model can put into the code it checks, to show that it would find them.
#[cfg(loom)]
pub(crate) mod faults {
    use std::cell::Cell;

    use super::{Ordering, fence};

    /// What is left out.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[cfg_attr(not(test), allow(dead_code))] // Only models inject faults.
    pub(crate) enum Fault {
        None,
        NoFullFence,
        NoFenceAfterRmw,
    }

    std::thread_local! {
        /// All threads of a model run on the thread of its test, so this reaches them all and no other test.
        pub(crate) static INJECTED: Cell<Fault> = const { Cell::new(Fault::None) };
    }

    pub(super) fn fence_unless(fault: Fault) {
        if INJECTED.get() != fault {
            fence(Ordering::SeqCst);
        }
    }
}
