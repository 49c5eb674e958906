//! Recorded I/Os that are replayed in virtual time: on a modelled drive, with the real queue and scheduler
//! before it. A seed gives the same figures each time, on any machine.

use std::time::Duration;

use anyhow::{Context, Result};
use blkmq_core::bio::Bio;
use blkmq_core::sched::ElevatorType;
use blkmq_core::time::{Instant, Nanos};
use blkmq_sim::modelled_queue::ModelledQueue;

use super::device_model::DeviceModel;
use super::player::{Outcome, Speed};
use super::source::{Recorded, Recording};

/// Where a recording is replayed, and with which scheduler and seed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Simulation<'a> {
    pub(super) device: &'a DeviceModel,
    pub(super) sched: &'static ElevatorType,
    pub(super) seed: u64,
}

/// Replays a recording, with at most `depth` I/Os under way. Each of its devices is a disk on the
/// one drive, with its own group.
///
/// # Errors
/// If the recorded devices are too many or too large for one drive.
pub(super) fn play(
    recording: &Recording,
    speed: Speed,
    depth: u32,
    simulation: Simulation<'_>,
) -> Result<Outcome> {
    let sizes = sizes(recording);
    let queue = ModelledQueue::new(&simulation.device.0, simulation.sched, &sizes, simulation.seed);
    let mut player = Player {
        queue: queue.context("the recorded devices cannot be simulated on one drive")?,
        begun: vec![None; depth as usize],
        free: (0..depth).collect(),
        outcome: Outcome::default(),
    };
    let mut ended = Vec::with_capacity(depth as usize);
    for io in &recording.ios {
        let due = Instant(0) + speed.due(io.at);
        player.wait_until(due, &mut ended);
        player.submit(io, due, &mut ended);
    }
    while player.free.len() < depth as usize {
        player.wait(None, &mut ended);
    }
    player.outcome.elapsed = Duration::from_nanos(player.queue.now().0);
    Ok(player.outcome)
}

/// The smallest size of each recorded device that its I/Os fit in, in whole MiB.
fn sizes(recording: &Recording) -> Vec<u64> {
    let mut sizes = vec![MIB; recording.devices.len()];
    for io in &recording.ios {
        let size = &mut sizes[io.device as usize];
        let end = io.offset.saturating_add(io.len);
        *size = (*size).max(end.div_ceil(MIB).saturating_mul(MIB));
    }
    sizes
}

/// The I/Os under way, and the results of the others.
struct Player {
    queue: ModelledQueue,
    /// By the cookies of bios: the time of submission.
    begun: Vec<Option<Instant>>,
    /// Unused cookies.
    free: Vec<u32>,
    outcome: Outcome,
}

impl Player {
    /// Waits until an I/O is due and there is room for it.
    fn wait_until(&mut self, due: Instant, ended: &mut Vec<Bio>) {
        loop {
            let is_due = due <= self.queue.now();
            if is_due && !self.free.is_empty() {
                return;
            }
            self.wait((!is_due).then_some(due), ended);
        }
    }

    fn submit(&mut self, io: &Recorded, due: Instant, ended: &mut Vec<Bio>) {
        let now = self.queue.now();
        self.outcome.late.record(now.since(due).0);
        let cookie = self.free.pop().expect("waited for");
        self.begun[cookie as usize] = Some(now);
        let (disk, group) = ModelledQueue::place(io.device as usize);
        let mut bio = Bio {
            op: io.op,
            flags: io.flags,
            disk,
            group,
            client: io.device,
            offset: io.offset,
            len: io.len,
            cookie: cookie.into(),
            ..Bio::default()
        };
        while let Err(back) = self.queue.submit(bio) {
            bio = back;
            self.wait(None, ended);
        }
    }

    fn wait(&mut self, until: Option<Instant>, ended: &mut Vec<Bio>) {
        self.queue.wait(until, ended);
        let now = self.queue.now();
        for bio in ended.drain(..) {
            let begun = self.begun[bio.cookie as usize].take().expect("a bio ends once");
            self.free.push(bio.cookie as u32);
            let took: Nanos = now.since(begun);
            self.outcome.count(&bio, took);
        }
    }
}

const MIB: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use blkmq_core::bio::{Direction, Flags, Op};
    use blkmq_core::sched;

    use super::*;

    /// Two devices: 300 small writes and 300 reads that arrive faster than the drive serves them,
    /// and flushes, discards and a FUA write.
    fn recording() -> Recording {
        let io = |at, device, op, offset, len| Recorded {
            at,
            device,
            op,
            flags: Flags::NONE,
            offset,
            len,
        };
        let mut ios = Vec::new();
        for number in 0..300_u64 {
            let at = number * 2_000;
            ios.push(io(at, 0, Op::Write, number * 4096, 4096));
            ios.push(io(at, 1, Op::Read, number * 7919 % 1000 * 512, 8192));
            if number % 100 == 50 {
                ios.push(io(at, 0, Op::Flush, 0, 0));
                ios.push(io(at, 1, Op::Discard, 1 << 30, 4 << 30));
                let through = io(at, 1, Op::Write, 1 << 20, 3 << 20);
                ios.push(Recorded {
                    flags: Flags::FUA,
                    ..through
                });
            }
        }
        Recording {
            devices: vec!["a".into(), "b".into()],
            ios,
        }
    }

    fn played(model: &str, sched: &'static ElevatorType, speed: Speed, seed: u64) -> Outcome {
        let device = &model.parse().expect("a model");
        let simulation = Simulation { device, sched, seed };
        play(&recording(), speed, 64, simulation).expect("it fits")
    }

    #[test]
    fn all_that_was_recorded_is_played_once_with_every_model_and_scheduler() {
        for model in ["flash", "flash,units=1,tags=1", "rotating", "rotating,tags=1"] {
            for sched in sched::BUILT_IN {
                for speed in [Speed::Times(1.0), Speed::Max] {
                    let outcome = played(model, sched, speed, 1);
                    let of = |direction| &outcome.played[direction as usize];
                    let counts = Direction::ALL.map(|direction| of(direction).count);
                    assert_eq!(counts.iter().sum::<u64>(), 609, "{model} {sched}");
                    assert_eq!(of(Direction::Read).count, 300, "{model} {sched}");
                    assert_eq!(of(Direction::Write).count, 303, "{model} {sched}");
                    assert_eq!(of(Direction::Write).bytes, (300 << 12) + (9 << 20));
                    assert!(
                        outcome.played.iter().all(|played| played.failed == 0),
                        "{model} {sched}"
                    );
                }
            }
        }
    }

    #[test]
    fn seed_gives_the_same_figures_and_another_one_others() {
        let figures = |seed| {
            let outcome = played("flash,units=2", sched::BFQ, Speed::Times(1.0), seed);
            let read = &outcome.played[Direction::Read as usize].latency;
            (
                outcome.elapsed,
                read.quantile(0.5),
                read.quantile(0.99),
                read.max(),
            )
        };
        assert_eq!(figures(7), figures(7));
        assert_ne!(figures(7), figures(8));
    }

    #[test]
    fn i_o_takes_the_time_of_the_model_and_pauses_are_kept_or_stretched() {
        let mut one = recording();
        one.ios.retain(|io| io.op == Op::Read);
        one.ios.truncate(2);
        one.ios[1].at = 1_000_000;
        let device = &"flash,read=40us,spread=0".parse().expect("a model");
        let simulation = Simulation {
            device,
            sched: sched::NONE,
            seed: 1,
        };
        for (speed, elapsed_us) in [
            (Speed::Times(1.0), 1050),
            (Speed::Times(0.5), 2050),
            (Speed::Max, 50),
        ] {
            let outcome = play(&one, speed, 8, simulation).expect("it fits");
            // 8 KiB take a quarter longer than 4 KiB.
            assert_eq!(outcome.elapsed, Duration::from_micros(elapsed_us), "{speed:?}");
        }
    }
}
