//! The window in which a load is measured: generators run freely and publish how many I/Os have ended. One
//! coordinator lets them warm up, reads counters and usage at both ends of the window, and stops them. Used
//! by `engine` and `nbd`.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::args::Plan;
use crate::usage::Usage;

/// The state that the generators of one load and their coordinator share.
pub(crate) struct Window {
    phase: AtomicU8,
    failed: AtomicBool,
    ended: Vec<Counter>,
}

/// The phase of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Run, do not record yet.
    WarmUp,
    /// Run and record.
    Measure,
    /// Wait for the I/Os in flight and return.
    Stop,
}

/// I/Os ended at one generator. It has two cache lines of its own, since the neighbouring line is
/// fetched along, so that publishing it is a plain store.
#[repr(align(128))]
#[derive(Default)]
struct Counter(AtomicU64);

/// The readings at both ends of the window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured {
    /// I/Os that ended in between.
    pub(crate) ios: u64,
    /// Time in between.
    pub(crate) elapsed: Duration,
    /// Usage in between.
    pub(crate) usage: Pair,
}

/// The usage of the measured side, and of the load generator if that is another process.
pub(crate) type Pair = [Usage; 2];

impl Window {
    /// Makes the window for `generators` generators.
    pub(crate) fn new(generators: usize) -> Self {
        Self {
            phase: AtomicU8::new(WARM_UP),
            failed: AtomicBool::new(false),
            ended: (0..generators).map(|_| Counter::default()).collect(),
        }
    }

    /// Returns what a generator must do now. Called once per batch.
    #[inline]
    pub(crate) fn phase(&self) -> Phase {
        // Relaxed: nothing is published with the phase.
        match self.phase.load(Ordering::Relaxed) {
            WARM_UP => Phase::WarmUp,
            MEASURE => Phase::Measure,
            _ => Phase::Stop,
        }
    }

    /// Publishes how many I/Os have ended at `generator` since its start.
    #[inline]
    pub(crate) fn publish(&self, generator: usize, ended: u64) {
        // Relaxed: nothing is published with a count.
        self.ended[generator].0.store(ended, Ordering::Relaxed);
    }

    /// Ends the window early: a generator failed and will return its error.
    pub(crate) fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
        self.phase.store(STOP, Ordering::Relaxed);
    }

    /// Runs the load through its phases. `usage` reads the usage so far.
    ///
    /// # Errors
    /// If a generator fails or the usage cannot be read; the generators are stopped in any case.
    pub(crate) fn measure(&self, plan: &Plan, usage: impl Fn() -> Result<Pair>) -> Result<Measured> {
        let measured = self.measure_phases(plan, usage);
        self.phase.store(STOP, Ordering::Relaxed);
        measured
    }

    fn measure_phases(&self, plan: &Plan, usage: impl Fn() -> Result<Pair>) -> Result<Measured> {
        self.pause(plan.warm_up)?;
        self.phase.store(MEASURE, Ordering::Relaxed);
        let before = usage()?;
        let (ios, start) = (self.total(), Instant::now());
        self.pause(plan.window)?;
        let (ios, elapsed) = (self.total() - ios, start.elapsed());
        let after = usage()?;
        Ok(Measured {
            ios,
            elapsed,
            usage: [after[0] - before[0], after[1] - before[1]],
        })
    }

    /// Sleeps, unless a generator fails meanwhile.
    fn pause(&self, duration: Duration) -> Result<()> {
        let end = Instant::now() + duration;
        loop {
            if self.failed.load(Ordering::Relaxed) {
                bail!("the load generator stopped early");
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(LOOK_EVERY));
        }
    }

    fn total(&self) -> u64 {
        let counts = self.ended.iter();
        counts.map(|counter| counter.0.load(Ordering::Relaxed)).sum()
    }
}

const WARM_UP: u8 = 0;
const MEASURE: u8 = 1;
const STOP: u8 = 2;
/// How long a failure may go unnoticed; each check disturbs the measured cores for a moment.
const LOOK_EVERY: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan {
            rounds: 1,
            window: Duration::from_millis(30),
            warm_up: Duration::from_millis(5),
        }
    }

    #[test]
    fn only_what_ends_within_the_window_is_counted() {
        let window = Window::new(2);
        window.publish(0, 1_000_000);
        std::thread::scope(|scope| {
            for generator in 0..2 {
                let window = &window;
                scope.spawn(move || {
                    let mut ended = 1_000_000;
                    while window.phase() != Phase::Stop {
                        ended += 1;
                        window.publish(generator, ended);
                        std::thread::sleep(Duration::from_millis(1));
                    }
                });
            }
            let measured = window.measure(&plan(), || Ok(Default::default())).unwrap();
            assert!((2..2_000).contains(&measured.ios), "{measured:?}");
            assert!(measured.elapsed >= plan().window);
        });
    }

    #[test]
    fn failed_generator_ends_the_window_and_stops_the_others() {
        let window = Window::new(1);
        window.fail();
        assert!(window.measure(&plan(), || Ok(Default::default())).is_err());
        assert_eq!(window.phase(), Phase::Stop);
    }
}
