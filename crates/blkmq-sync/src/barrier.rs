//! A full fence between two threads, a frequent and a rare one, for which the rare one pays alone.
//!
//! [`crate::epoch_count`] needs such a pair: a user of a queue enters millions of times a second, a freezer
//! runs when an operator changes something. A full fence on each side costs the user 7 to 10 ns each time.
//! Linux's `membarrier` lets the rare thread pay for both: between its call and its return, every running
//! thread of the process passes a full fence somewhere in its program, so the frequent thread only needs to
//! keep the compiler from moving its accesses.
//!
//! If a user stores and then loads, that fence is either before the store (then the load comes after the
//! heavy fence began, and sees what was stored before it), or after the store (then a load after the heavy
//! fence sees the store). A full fence on both sides guarantees the same, and the models check that.

use std::sync::atomic::compiler_fence;

use crate::atomic::{Ordering, heavy_fence, light_fence};

/// A pair of fences: of two threads, the one that passes its fence second sees the stores before the other's fence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Barrier {
    /// Whether the kernel fences the other threads for us. False also if it may not (some sandboxes).
    is_one_sided: bool,
}

impl Barrier {
    /// Asks the kernel for its support, once per process.
    pub(crate) fn new() -> Self {
        Self {
            is_one_sided: kernel::is_ready(),
        }
    }

    /// The fence of the frequent thread.
    #[inline(always)]
    pub(crate) fn light(self) {
        if self.is_one_sided {
            compiler_fence(Ordering::SeqCst);
        } else {
            light_fence();
        }
    }

    /// The fence of the rare thread: costs about a microsecond, and an interrupt to each processor that runs
    /// this process.
    pub(crate) fn heavy(self) {
        if self.is_one_sided {
            kernel::fence_everybody();
        } else {
            heavy_fence();
        }
    }
}

#[cfg(all(target_os = "linux", not(any(loom, miri))))]
mod kernel {
    use std::sync::OnceLock;

    use rustix::thread::{MembarrierCommand, membarrier};

    /// Registers the process for the call below, the first time. A child of `fork` inherits the registration.
    pub(super) fn is_ready() -> bool {
        static IS_READY: OnceLock<bool> = OnceLock::new();
        *IS_READY.get_or_init(|| membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok())
    }

    pub(super) fn fence_everybody() {
        let fenced = membarrier(MembarrierCommand::PrivateExpedited);
        assert_eq!(
            fenced,
            Ok(()),
            "membarrier by a process that has registered for it"
        );
    }
}

#[cfg(not(all(target_os = "linux", not(any(loom, miri)))))]
mod kernel {
    pub(super) fn is_ready() -> bool {
        false
    }

    pub(super) fn fence_everybody() {
        super::heavy_fence();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::AtomicU32;
    use std::thread;

    use super::*;

    /// Both store their own word and load the other's: one of them must see the other's store. The threads
    /// meet before each round, so that the two pairs overlap often.
    #[test]
    fn one_of_two_threads_sees_the_others_store_with_and_without_the_kernels_help() {
        const ROUNDS: u32 = 3_000;
        for barrier in [Barrier::new(), Barrier { is_one_sided: false }] {
            let words: [AtomicU32; 2] = Default::default();
            let seen: [AtomicU32; 2] = Default::default();
            let met = std::sync::Barrier::new(2);
            thread::scope(|scope| {
                for me in [0, 1] {
                    let (words, seen, met) = (&words, &seen, &met);
                    scope.spawn(move || {
                        for round in 1..=ROUNDS {
                            met.wait();
                            words[me].store(round, Ordering::Relaxed);
                            if me == 0 {
                                barrier.light()
                            } else {
                                barrier.heavy()
                            }
                            seen[me].store(words[1 - me].load(Ordering::Relaxed), Ordering::Relaxed);
                            met.wait();
                            let any = seen.iter().any(|seen| seen.load(Ordering::Relaxed) == round);
                            assert!(any, "neither saw the other in round {round}");
                        }
                    });
                }
            });
        }
    }
}
