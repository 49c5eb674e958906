//! How long a reactor may hold its processor while other threads wait for it. From 6.12 on, Linux first runs the thread
//! whose slice would end first: one with a short slice runs soon after it wakes, and gives the processor back soon.
//! A reactor has short turns and clients that wait, so this suits it; its share of the processor stays the same.
//! It needs no privilege.

use super::sys::{scheduling, set_scheduling};

/// Gives the calling thread a short slice, if its policy is the ordinary one. An older kernel ignores that, and where
/// it is forbidden, the slice stays as it is.
pub(crate) fn shorten() {
    if let Some(mut attr) = scheduling()
        && attr.sched_policy == libc::SCHED_OTHER as u32
    {
        attr.sched_runtime = SLICE_NS;
        set_scheduling(&attr);
    }
}

/// The shortest slice that the kernel knows.
const SLICE_NS: u64 = 100_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortened_slice_leaves_policy_and_nice_value() {
        std::thread::spawn(|| {
            let before = scheduling().unwrap();
            shorten();
            let after = scheduling().unwrap();
            assert_eq!(after.sched_nice, before.sched_nice);
            assert_eq!(after.sched_policy, before.sched_policy);
            // A kernel that knows no slices says 0.
            assert!(
                before.sched_runtime == 0 || after.sched_runtime == SLICE_NS,
                "{}",
                after.sched_runtime
            );
        })
        .join()
        .unwrap();
    }
}
