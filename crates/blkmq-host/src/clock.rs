//! The engine's clock: nanoseconds since the process first read it. `reactor` and `attach` read the clock
//! once per batch and pass the value down; no code below them reads a clock.
//!
//! Where the processor's time-stamp counter is invariant and the kernel itself trusts it, a reading costs
//! about 10 ns: the counter, scaled by a factor that is measured once against CLOCK_MONOTONIC. Elsewhere it
//! is CLOCK_MONOTONIC. The factor is good to a few parts per million, and everything is measured with the
//! same one, so differences agree.

mod sys;

use std::sync::OnceLock;
use std::time::Duration;

use blkmq_core::time::Instant;

/// The engine's clock. All clocks of one process agree.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    source: Source,
    /// The source's reading at time zero: counter ticks or nanoseconds.
    origin: u64,
    /// Nanoseconds per tick, times 2^32.
    scale: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Counter,
    Monotonic,
}

impl Clock {
    /// Returns the process's clock. The first call may take 10 ms, for calibration.
    pub fn get() -> Self {
        static CLOCK: OnceLock<Clock> = OnceLock::new();
        *CLOCK.get_or_init(|| {
            if counter_is_trusted() {
                Self::calibrated()
            } else {
                Self::monotonic()
            }
        })
    }

    /// Reads the clock. Readings of one thread never go back; those of different threads agree to about 100
    /// ns.
    #[inline]
    pub fn now(&self) -> Instant {
        match self.source {
            Source::Counter => {
                let ticks = sys::counter().saturating_sub(self.origin);
                Instant(((u128::from(ticks) * u128::from(self.scale)) >> 32) as u64)
            }
            Source::Monotonic => Instant(monotonic_ns() - self.origin),
        }
    }

    /// Says whether readings come from the processor's counter.
    pub fn is_counter(&self) -> bool {
        self.source == Source::Counter
    }

    fn monotonic() -> Self {
        Self {
            source: Source::Monotonic,
            origin: monotonic_ns(),
            scale: 0,
        }
    }

    fn calibrated() -> Self {
        let (ticks_before, ns_before) = paired_reading();
        std::thread::sleep(CALIBRATION);
        let (ticks_after, ns_after) = paired_reading();
        let ticks = u128::from(ticks_after.saturating_sub(ticks_before));
        let elapsed_ns = u128::from(ns_after - ns_before);
        if ticks < elapsed_ns / 10 {
            // Slower than 100 MHz: whatever this counter is, it is not worth its imprecision.
            return Self::monotonic();
        }
        Self {
            source: Source::Counter,
            origin: ticks_before,
            scale: ((elapsed_ns << 32) / ticks) as u64,
        }
    }
}

/// Reads both clocks at as nearly the same moment as can be had: the tightest of several tries.
fn paired_reading() -> (u64, u64) {
    let tries = (0..16).map(|_| {
        let before = sys::counter();
        let ns = monotonic_ns();
        let after = sys::counter();
        (after.saturating_sub(before), (before + (after - before) / 2, ns))
    });
    tries
        .min_by_key(|(gap, _)| *gap)
        .map(|(_, pair)| pair)
        .expect("at least one try")
}

/// The processor promises a constant rate in all its states, and the kernel has found the counters of the
/// processors to agree (else it would have left that clock source).
fn counter_is_trusted() -> bool {
    let source = std::fs::read_to_string(CLOCK_SOURCE).unwrap_or_default();
    sys::counter_is_invariant()
        && matches!(source.trim(), "tsc" | "kvm-clock" | "hyperv_clocksource_tsc_page")
}

fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

const CALIBRATION: Duration = Duration::from_millis(10);
const CLOCK_SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_runs_as_fast_as_the_kernels() {
        for clock in [Clock::get(), Clock::monotonic()] {
            let (ours, theirs) = (clock.now(), monotonic_ns());
            std::thread::sleep(Duration::from_millis(100));
            let (ours, theirs) = (clock.now().since(ours).0, monotonic_ns() - theirs);
            assert!(
                ours.abs_diff(theirs) < theirs / 100,
                "{clock:?}: {ours} ns against {theirs} ns"
            );
        }
    }

    #[test]
    fn readings_never_go_back() {
        let clock = Clock::get();
        let mut last = clock.now();
        for _ in 0..100_000 {
            let now = clock.now();
            assert!(now >= last, "{now:?} after {last:?}");
            last = now;
        }
    }
}
