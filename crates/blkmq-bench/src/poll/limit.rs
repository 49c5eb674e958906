//! The least CPU time with which a thread can wait for a device without added latency, on this host at this
//! time.
//!
//! A thread that sleeps must be awake when the earliest read may end, so it must ask to be woken
//! earlier, by the lateness of the latest wake-ups. It pays for one sleep, and polls during the
//! rest: the spread of its own lateness and that of the device.

use blkmq_host::sleep::Measured;
use blkmq_sim::rng::Rng;
use blkmq_sim::scenario::poll::{ModelledDevice, STEP_EVERY};

/// The distribution of a device's times.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    mean_ns: f64,
    /// Mean minus first percentile, among reads that a reader cannot tell apart.
    spread_ns: f64,
}

impl Times {
    /// Draws them.
    pub(super) fn of(device: ModelledDevice) -> Self {
        let mut rng = Rng::new(2, 0);
        // What a reader can tell apart: the size, and whether a step was a while ago.
        let mut kinds: [Vec<u64>; 4] = Default::default();
        for index in 0..DRAWS {
            let len = device.len(index);
            let kind = usize::from(len > 4096) + 2 * usize::from(index / STEP_EVERY % 2 == 1);
            kinds[kind].push(device.time(index, len, &mut rng).0);
        }
        let mut times = Self {
            mean_ns: 0.0,
            spread_ns: 0.0,
        };
        for kind in kinds.iter_mut().filter(|kind| !kind.is_empty()) {
            kind.sort_unstable();
            let weight = kind.len() as f64 / DRAWS as f64;
            let mean = kind.iter().sum::<u64>() as f64 / kind.len() as f64;
            times.mean_ns += weight * mean;
            times.spread_ns += weight * (mean - kind[kind.len() / 100] as f64);
        }
        times
    }

    /// The part of a core that cannot be saved with `depth` reads under way, each with its own
    /// sleep.
    pub(super) fn cpu_limit(&self, host: &Measured, depth: u32) -> f64 {
        let late = host.late_percent(99).0 - host.late_percent(50).0;
        let each = host.cost.0 as f64 + late as f64 + self.spread_ns;
        (each / self.mean_ns * f64::from(depth)).min(1.0)
    }
}

const DRAWS: u64 = 20_000;

#[cfg(test)]
mod tests {
    use blkmq_core::time::Nanos;
    use blkmq_sim::scenario::poll::Shape;

    use super::*;

    #[test]
    fn limit_is_a_sleep_and_the_spreads_by_the_devices_time_and_a_core_at_most() {
        let host = Measured {
            late: (0..100).map(|at| Nanos(14_000 + at * 100)).collect(),
            cost: Nanos(14_000),
        };
        let limit = |us, shape, depth| Times::of(ModelledDevice { us, shape }).cpu_limit(&host, depth);
        let fixed = limit(100, Shape::Fixed, 1);
        assert!((fixed - 0.19).abs() < 0.002, "{fixed}");
        assert!((limit(100, Shape::Step, 1) - 0.095).abs() < 0.002);
        assert!(limit(100, Shape::Spread, 1) > fixed + 0.05);
        assert_eq!(
            (limit(5, Shape::Fixed, 1), limit(100, Shape::Fixed, 32)),
            (1.0, 1.0)
        );
    }
}
