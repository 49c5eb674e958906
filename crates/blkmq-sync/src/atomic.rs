//! The atomics of this crate: the standard library's, or loom's while a model runs (`--cfg loom`).
//!
//! Every other module takes its atomics, cells, fences and `Arc` from here, so the modelled code is the
//! shipped code. Two fences are cheaper than the models assume: [`fence_after_rmw`], and the fences of
//! [`crate::barrier`].

#[cfg(loom)]
pub(crate) use loom::{
    cell::UnsafeCell,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
    },
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Arc,
    atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
};

/// A cell with loom's interface over the standard library's cell: access through closures, so that loom can
/// observe it.
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
#[inline(always)]
pub(crate) fn full_fence() {
    #[cfg(not(loom))]
    fence(Ordering::SeqCst);
    #[cfg(loom)]
    faults::fence_unless(faults::Fault::NoFullFence);
}

/// A full fence: the frequent one of a pair, see [`crate::barrier`].
#[inline(always)]
pub(crate) fn light_fence() {
    #[cfg(not(loom))]
    fence(Ordering::SeqCst);
    #[cfg(loom)]
    faults::fence_unless(faults::Fault::NoLightFence);
}

/// A full fence: the rare one of a pair, see [`crate::barrier`].
pub(crate) fn heavy_fence() {
    #[cfg(not(loom))]
    fence(Ordering::SeqCst);
    #[cfg(loom)]
    faults::fence_unless(faults::Fault::NoHeavyFence);
}

/// A full fence for a thread whose preceding access, which must be ordered, was a read-modify-write.
///
/// On x86-64 that read-modify-write has a `lock` prefix: later loads already wait for it, and only the
/// compiler must be restrained. Elsewhere, and in the models, this is `fence(SeqCst)`.
#[inline(always)]
pub(crate) fn fence_after_rmw() {
    #[cfg(all(not(loom), target_arch = "x86_64", not(miri)))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(all(not(loom), not(all(target_arch = "x86_64", not(miri)))))]
    fence(Ordering::SeqCst);
    #[cfg(loom)]
    faults::fence_unless(faults::Fault::NoFenceAfterRmw);
}

/// Waits some nanoseconds in a loop that has run `spins` times, or lets another thread run.
pub(crate) fn wait_a_little(spins: u32) {
    #[cfg(loom)]
    let _ = spins;
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(not(loom))]
    if spins % SPINS_PER_YIELD == SPINS_PER_YIELD - 1 {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}

/// About 2 µs: longer than an elevator is held, unless its holder was preempted.
#[cfg(not(loom))]
const SPINS_PER_YIELD: u32 = 100;

/// Faults that a model can inject into the code it checks, to show that it would find them.
#[cfg(loom)]
pub(crate) mod faults {
    use std::cell::Cell;

    use super::{Ordering, fence};

    /// The fence that is left out.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[cfg_attr(not(test), allow(dead_code))] // Only models inject faults.
    pub(crate) enum Fault {
        None,
        NoFullFence,
        NoFenceAfterRmw,
        NoLightFence,
        NoHeavyFence,
    }

    std::thread_local! {
        /// All threads of a model run on the thread of its test, so this affects all of them and no other test.
        pub(crate) static INJECTED: Cell<Fault> = const { Cell::new(Fault::None) };
    }

    pub(super) fn fence_unless(fault: Fault) {
        if INJECTED.get() != fault {
            fence(Ordering::SeqCst);
        }
    }
}
