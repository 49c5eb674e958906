//! The service times of a modelled drive: flash with parallel units, a rotating disk with one arm, or
//! none at all. The drive calls it once per command, when a unit starts it.

use blkmq_core::bio::Op;
use blkmq_core::time::{Instant, Nanos};

use crate::rng::{Ppm, Rng};

/// What kind of drive it is, and how fast.
#[derive(Clone, Debug)]
pub enum Model {
    /// Ends every command at once; with probability `inline` within the call that issues it.
    Null {
        /// How often a command is done inside [`blkmq_core::driver::HctxDriver::issue`].
        inline: Ppm,
    },
    /// Flash: `units` commands are served at a time.
    Flash {
        /// How many commands are served at a time.
        units: u32,
        /// Time of a 4 KiB read.
        read: Nanos,
        /// Time of a 4 KiB write into the cache.
        write: Nanos,
        /// Up to this many percent are added.
        spread: u32,
    },
    /// One arm over rotating platters.
    Rotating {
        /// Rotations per minute.
        rpm: u32,
        /// Time to move the arm to the next track.
        seek_min: Nanos,
        /// Time to move it over all tracks.
        seek_max: Nanos,
        /// Bytes that pass the head in one rotation.
        track: u64,
    },
}

impl Model {
    /// Returns how many commands are served at a time.
    pub fn units(&self) -> u32 {
        match self {
            Self::Null { .. } => u32::MAX,
            Self::Flash { units, .. } => *units,
            Self::Rotating { .. } => 1,
        }
    }

    /// Returns how often a command is done inside the call that issues it.
    pub fn inline(&self) -> Ppm {
        match self {
            Self::Null { inline } => *inline,
            _ => Ppm::NEVER,
        }
    }

    /// Returns the time of a command at `position` on the drive that starts now, and moves `arm` there.
    ///
    /// `owed` is how many blocks a flush has to write.
    pub fn service(&self, work: &Work, now: Instant, arm: &mut Arm, rng: &mut Rng) -> Nanos {
        match self {
            Self::Null { .. } => Nanos(1),
            Self::Flash {
                read, write, spread, ..
            } => Nanos(rng.spread(flash(work, *read, *write).0, *spread)),
            Self::Rotating {
                rpm,
                seek_min,
                seek_max,
                track,
            } => {
                let turn = 60_000_000_000 / u64::from(*rpm);
                let seek = arm.seek(work, *seek_min, *seek_max);
                turning(work, now + seek, turn, *track, seek)
            }
        }
    }
}

/// The properties of a command that determine its time.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// The operation.
    pub op: Op,
    /// First byte on the drive.
    pub position: u64,
    /// Bytes.
    pub len: u64,
    /// Blocks that a flush writes.
    pub owed: u64,
}

/// Where the arm of a rotating drive is.
#[derive(Clone, Copy, Debug)]
pub struct Arm {
    position: u64,
    size: u64,
}

impl Arm {
    /// The arm at the start of a drive of `size` bytes.
    pub fn new(size: u64) -> Self {
        Self { position: 0, size }
    }

    /// Moves to a command's end; returns the time to its start, which grows with the square root of
    /// the distance, since arms accelerate.
    fn seek(&mut self, work: &Work, min: Nanos, max: Nanos) -> Nanos {
        if work.op == Op::Flush {
            return Nanos(max.0 / 2);
        }
        let distance = self.position.abs_diff(work.position);
        self.position = work.position + work.len;
        if distance == 0 {
            return Nanos::ZERO;
        }
        let share = u128::from(distance) * 1_000_000 / u128::from(self.size.max(1));
        Nanos(min.0 + (max.0 - min.0) * (share as u64).isqrt() / 1_000)
    }
}

fn flash(work: &Work, read: Nanos, write: Nanos) -> Nanos {
    let pages = work.len.div_ceil(4096).max(1);
    match work.op {
        // One page's time, and a quarter of it for each further page, since the channels work in
        // parallel.
        Op::Read => Nanos(read.0 * (3 + pages) / 4),
        Op::Write => Nanos(write.0 * (3 + pages) / 4),
        Op::Discard | Op::WriteZeroes => write,
        Op::Flush => Nanos(write.0 * (1 + work.owed)),
    }
}

fn turning(work: &Work, at_track: Instant, turn: u64, track: u64, seek: Nanos) -> Nanos {
    if work.op == Op::Flush {
        return seek + Nanos(work.owed * turn / 8);
    }
    let angle = work.position % track * turn / track;
    // Without a seek the next sector is under the head, so a sequential stream does not wait for a
    // rotation.
    let wait = match seek {
        Nanos::ZERO => 0,
        _ => (angle + turn - at_track.0 % turn) % turn,
    };
    seek + Nanos(wait + work.len * turn / track)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(position: u64) -> Work {
        Work {
            op: Op::Read,
            position,
            len: 4096,
            owed: 0,
        }
    }

    #[test]
    fn rotating_disk_is_far_faster_on_a_sequential_stream() {
        let model = Model::Rotating {
            rpm: 7200,
            seek_min: Nanos::from_micros(500),
            seek_max: Nanos::from_millis(15),
            track: 1 << 20,
        };
        let time = |positions: &mut dyn Iterator<Item = u64>| {
            let mut arm = Arm::new(1 << 30);
            let mut rng = Rng::new(0, 0);
            let mut now = Instant(0);
            for position in positions {
                now = now + model.service(&read(position), now, &mut arm, &mut rng);
            }
            now.0
        };
        let sequential = time(&mut (0..100).map(|n| n * 4096));
        let mut rng = Rng::new(1, 1);
        let random = time(&mut (0..100).map(|_| rng.below(1 << 18) * 4096));
        assert!(random > 50 * sequential, "{random} {sequential}");
    }

    #[test]
    fn flash_takes_longer_for_more_pages_but_less_than_in_proportion() {
        let model = Model::Flash {
            units: 4,
            read: Nanos(80_000),
            write: Nanos(20_000),
            spread: 0,
        };
        let time = |len| {
            let work = Work { len, ..read(0) };
            let mut rng = Rng::new(0, 0);
            model.service(&work, Instant(0), &mut Arm::new(1 << 20), &mut rng)
        };
        assert_eq!(time(4096), Nanos(80_000));
        assert_eq!(time(16384), Nanos(140_000));
    }
}
