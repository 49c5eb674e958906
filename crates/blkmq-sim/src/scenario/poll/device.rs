//! The read times of a modelled device: a typical time, and how single reads deviate from it. `poll` runs
//! it in virtual time, `blkmq-lab bench poll` on a real reactor.

use std::fmt;

use blkmq_core::time::Nanos;

use crate::rng::{Ppm, Rng};

/// A device, by the time of its small reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelledDevice {
    /// In microseconds.
    pub us: u64,
    /// How the times of reads vary.
    pub shape: Shape,
}

/// How the times of a device's reads vary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Not at all.
    Fixed,
    /// Around the typical time, as with flash: a bell curve of ± 15 %, and one in 200 takes three
    /// times as long.
    Spread,
    /// Three in ten take twice as long.
    Bimodal,
    /// [`STEP_EVERY`] reads with the typical time, as many with three times that, and so on.
    Step,
    /// As `Spread`, and every other read is one of 64 KiB, which takes 30 µs longer.
    Mixed,
}

impl Shape {
    /// All shapes.
    pub const ALL: [Self; 5] = [Self::Fixed, Self::Spread, Self::Bimodal, Self::Step, Self::Mixed];

    /// Its name in the names of cases.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::Spread => "spread",
            Self::Bimodal => "bimodal",
            Self::Step => "step",
            Self::Mixed => "mixed",
        }
    }
}

impl fmt::Display for ModelledDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}us-{}", self.us, self.shape.name())
    }
}

impl ModelledDevice {
    /// The size of the `index`th read.
    pub fn len(&self, index: u64) -> u64 {
        match self.shape {
            Shape::Mixed if index % 2 == 1 => LARGE,
            Shape::Mixed => 512,
            _ => 4096,
        }
    }

    /// Draws the time of the `index`th read, of `len` bytes.
    pub fn time(&self, index: u64, len: u64, rng: &mut Rng) -> Nanos {
        let typical = self.us * 1_000;
        let time = match self.shape {
            Shape::Fixed => typical,
            Shape::Spread => spread(typical, rng),
            Shape::Bimodal if rng.chance(Ppm::percent(30)) => 2 * typical,
            Shape::Bimodal => typical,
            Shape::Step if (index / STEP_EVERY) % 2 == 1 => 3 * typical,
            Shape::Step => typical,
            Shape::Mixed => spread(typical + if len == LARGE { 30_000 } else { 0 }, rng),
        };
        Nanos(time)
    }
}

fn spread(typical: u64, rng: &mut Rng) -> u64 {
    if rng.chance(Ppm(5_000)) {
        return 3 * typical;
    }
    // The sum of three evenly distributed numbers is nearly a bell curve.
    let part = typical * 15 / 100;
    let sum: u64 = (0..3).map(|_| rng.from_to(0, 2 * part)).sum();
    typical - part + sum / 3
}

/// Reads between two steps.
pub const STEP_EVERY: u64 = 1_000;
const LARGE: u64 = 65_536;
