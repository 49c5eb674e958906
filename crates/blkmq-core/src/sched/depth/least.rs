//! The least time that the drive takes for a request, by direction and size: what a request takes when it finds no
//! queue in the drive. `depth` compares it with the time that requests take now.

use crate::bio::Direction;
use crate::time::Nanos;

/// The least time of each kind of request; zero while unknown.
#[derive(Debug)]
pub(super) struct LeastTimes([u64; KINDS]);

/// The requests of one window, by kind: how many ended, and the sum of their times in the drive.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums([(u32, u64); KINDS]);

/// A direction and a size, as a place in the tables.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind(u8);

impl Kind {
    /// The kind of a request of `bytes`.
    #[inline]
    pub(super) fn of(direction: Direction, bytes: u64) -> Self {
        let size = (bytes.max(1).ilog2().max(SIZE_MIN) - SIZE_MIN).min(SIZES - 1);
        Self((direction as u32 * SIZES + size) as u8)
    }
}

impl LeastTimes {
    pub(super) fn unknown() -> Self {
        Self([0; KINDS])
    }

    /// The least time of a kind, if it is known.
    pub(super) fn of(&self, kind: Kind) -> Option<Nanos> {
        let least = self.0[usize::from(kind.0)];
        (least > 0).then_some(Nanos(least))
    }

    /// The time of a request that counts: one late request does not decide a window.
    #[inline]
    pub(super) fn counted(&self, kind: Kind, time: Nanos) -> u64 {
        match self.0[usize::from(kind.0)] {
            0 => time.0,
            least => time.0.min(least.saturating_mul(TIMES_MAX)),
        }
    }

    /// The sum of the least times of a window's requests. A kind that is not known counts with its times in the
    /// window.
    pub(super) fn sum(&self, sums: &Sums) -> u64 {
        let of_kind = |(least, (count, time)): (&u64, &(u32, u64))| match least {
            0 => *time,
            least => least * u64::from(*count),
        };
        self.0.iter().zip(&sums.0).map(of_kind).sum()
    }

    /// Says whether a quarter of the window's requests and more are of kinds that are not known.
    pub(super) fn lacks(&self, sums: &Sums) -> bool {
        let (mut all, mut unknown) = (0, 0);
        for (least, (count, _)) in self.0.iter().zip(&sums.0) {
            all += count;
            unknown += if *least == 0 { *count } else { 0 };
        }
        unknown * 4 >= all.max(1)
    }

    /// Takes the times of a window without a queue as the least ones.
    pub(super) fn set(&mut self, sums: &Sums) {
        self.update(sums, |least, mean, _| match least {
            0 => mean,
            least => (least + mean) / 2,
        });
    }

    /// Lowers the least times to those of a window that are lower. A few requests prove little, and a kind that is
    /// not known was seen beside a queue: [`LeastTimes::set`] is for that.
    pub(super) fn lower(&mut self, sums: &Sums) {
        self.update(sums, |least, mean, count| match least {
            least if least == 0 || mean >= least => least,
            least if count < COUNT_KNOWN => (least * 7 + mean) / 8,
            least => (least + mean) / 2,
        });
    }

    fn update(&mut self, sums: &Sums, new: impl Fn(u64, u64, u32) -> u64) {
        for (least, (count, time)) in self.0.iter_mut().zip(&sums.0) {
            if *count > 0 {
                *least = new(*least, (time / u64::from(*count)).max(1), *count);
            }
        }
    }
}

impl Sums {
    #[inline]
    pub(super) fn add(&mut self, kind: Kind, time: u64) {
        let (count, sum) = &mut self.0[usize::from(kind.0)];
        *count += 1;
        *sum += time;
    }

    /// The sum of all times.
    pub(super) fn time(&self) -> u64 {
        self.0.iter().map(|(_, time)| time).sum()
    }
}

/// Sizes are told apart by powers of two, from 4 KiB to 512 KiB and more.
const SIZE_MIN: u32 = 12;
const SIZES: u32 = 8;
const KINDS: usize = Direction::COUNT * SIZES as usize;
/// A request counts for at most this many times its least time.
const TIMES_MAX: u64 = 8;
/// This many requests of a kind have a mean that counts.
const COUNT_KNOWN: u32 = 4;
