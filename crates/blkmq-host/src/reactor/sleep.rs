//! The first estimates of how late a sleeper wakes on this host, and of what a sleep costs. They are
//! measured once per process, by the first thread that opens its core. Each core then updates its own
//! copy.

use std::sync::OnceLock;

use blkmq_core::poll::WakeLatency;
use blkmq_core::time::Nanos;
use rustix::time::{ClockId, clock_gettime};

use crate::clock::Clock;
use crate::uring::ring::RingHandle;

/// The measurements.
#[derive(Clone, Debug)]
pub struct Measured {
    /// How late each sleeper woke, sorted.
    pub late: Vec<Nanos>,
    /// Processor time of one sleep, on average.
    pub cost: Nanos,
}

impl Measured {
    /// The lateness that `percent` of the sleeps did not exceed.
    pub fn late_percent(&self, percent: usize) -> Nanos {
        let last = self.late.len().saturating_sub(1);
        self.late.get(last * percent / 100).copied().unwrap_or_default()
    }
}

/// The initial estimates for the calling thread's reactor. The first call sleeps for about 8 ms in total.
pub(crate) fn known(ring: &RingHandle, clock: Clock) -> WakeLatency {
    static KNOWN: OnceLock<Measured> = OnceLock::new();
    let measured = KNOWN.get_or_init(|| measure(ring, clock, SLEEPS));
    WakeLatency::new(measured.cost, &measured.late)
}

/// Sleeps `sleeps` times in a ring of its own, as a reactor does, with precise timers.
///
/// # Errors
/// If no ring can be made.
pub fn measure_host(sleeps: u32) -> std::io::Result<Measured> {
    let ring = RingHandle::new(crate::uring::ring::RingConfig::default())?;
    precise_timers();
    Ok(measure(&ring, Clock::get(), sleeps))
}

fn measure(ring: &RingHandle, clock: Clock, sleeps: u32) -> Measured {
    let mut late = Vec::with_capacity(sleeps as usize);
    let before = thread_cpu_ns();
    for _ in 0..sleeps {
        let wake = clock.now() + SLEEP;
        ring.sleep(Some(SLEEP));
        let now = clock.now();
        // A completion in the ring ends a sleep early: that sleep does not count.
        if now >= wake {
            late.push(now.since(wake));
        }
    }
    let cost = (thread_cpu_ns() - before) / u64::from(sleeps.max(1));
    late.sort_unstable();
    Measured {
        late,
        cost: Nanos(cost),
    }
}

/// Sets this thread's timer slack to about 1 ns instead of 50 µs (wake-up latency comes on top).
pub(crate) fn precise_timers() {
    let slack = rustix::thread::set_current_timer_slack(Some(std::num::NonZeroU64::MIN));
    if let Err(error) = slack {
        tracing::warn!("timers will be up to 50 µs late: setting the timer slack failed: {error}");
    }
}

fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

const SLEEPS: u32 = 128;
/// As short as the sleeps that the estimates are for.
const SLEEP: Nanos = Nanos::from_micros(40);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleeper_is_late_by_something_and_a_sleep_costs_something() {
        let measured = measure_host(64).unwrap();
        assert!(measured.late.len() > 32, "{measured:?}");
        assert!(measured.late_percent(99) >= measured.late_percent(50));
        assert!(measured.late_percent(50) > Nanos::ZERO && measured.cost > Nanos::ZERO);
    }
}
