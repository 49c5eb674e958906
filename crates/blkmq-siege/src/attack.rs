//! Decides what attackers do, one kind of attack at a time, with what chance has of it. Each ends by itself at its time, and counts what
//! it has done: an attack that did nothing proves nothing.
//!
//! What is wrong with messages is in `messages`, with clients in `clients`, with
//! descriptors in `descriptors`, with virtual machines in `guests`, with drives in `drives`.

mod clients;
mod descriptors;
mod drives;
mod guests;
mod messages;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use blkmq_forget::chance::Chance;
use blkmq_forget::mount::Mount;
use rustix::process::Pid;

pub use clients::client;

/// A kind of attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attack {
    /// A conversation that ends after every byte of it.
    Truncated,
    /// A conversation of which each byte, and some more, are wrong.
    Malformed,
    /// Options without end, and nobody who reads the answers.
    Options,
    /// Halves of requests, and then nothing.
    Halves,
    /// Replies that nobody reads, and more payload than there is memory.
    Unread,
    /// As many connections as there can be.
    Crowd,
    /// Clients that go in the middle of what they asked for.
    Vanish,
    /// What is allocated of a fragmented disk, asked by the hundred.
    Status,
    /// Virtual machines whose monitors and drivers keep to no rule.
    Guests,
    /// Descriptors that nobody has asked for, and whose close waits.
    Descriptors,
    /// Signals to the daemon, and clients that are stopped, continued and killed.
    Signals,
    /// A filesystem without room.
    Full,
    /// Medium errors, syncs that fail, requests that never end.
    Errors,
    /// A drive that takes its time.
    Slow,
    /// An image that is cut off and grows again.
    Cut,
    /// The daemon sleeps, as when its host does: all its times have come when it wakes.
    Pause,
}

/// Where an attack takes place.
#[derive(Debug)]
pub struct Site<'a> {
    /// Where all disks are served, the tenant's too.
    pub socket: PathBuf,
    /// Where the attacked ones are.
    pub tcp: SocketAddr,
    /// Where [`BIG`] is served to virtual machines.
    pub vhost_user: PathBuf,
    /// The daemon.
    pub pid: Pid,
    /// The image that is cut off.
    pub cut: PathBuf,
    /// Where there is FUSE: the filesystems below [`FULL`] and [`SLOW`].
    pub mounts: Option<&'a [Mount; 2]>,
    /// How much of a conversation was gone through.
    pub place: AtomicU64,
}

/// What came of an attack.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// How often it was done.
    pub done: u64,
    /// Answers that it forced: errors, refusals, ends of connections. Not counted by every kind.
    pub failed: u64,
}

impl Attack {
    /// All there are.
    pub const ALL: [Self; 16] = [
        Self::Truncated,
        Self::Malformed,
        Self::Options,
        Self::Halves,
        Self::Unread,
        Self::Crowd,
        Self::Vanish,
        Self::Status,
        Self::Guests,
        Self::Descriptors,
        Self::Signals,
        Self::Full,
        Self::Errors,
        Self::Slow,
        Self::Cut,
        Self::Pause,
    ];

    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Truncated => "truncated",
            Self::Malformed => "malformed",
            Self::Options => "options",
            Self::Halves => "halves",
            Self::Unread => "unread",
            Self::Crowd => "crowd",
            Self::Vanish => "vanish",
            Self::Status => "status",
            Self::Guests => "guests",
            Self::Descriptors => "descriptors",
            Self::Signals => "signals",
            Self::Full => "full",
            Self::Errors => "errors",
            Self::Slow => "slow",
            Self::Cut => "cut",
            Self::Pause => "pause",
        }
    }

    /// Says whether there is no such attack without a filesystem of our own.
    pub fn needs_mounts(self) -> bool {
        matches!(self, Self::Full | Self::Slow)
    }

    /// Says whether the tenant's times mean anything: not while its daemon sleeps.
    pub fn is_timed(self) -> bool {
        self != Self::Pause
    }

    /// Attacks from one thread, until `end`.
    ///
    /// # Errors
    /// What the tenant may not see, or the attack could not do.
    pub fn run(self, site: &Site<'_>, chance: &mut Chance, end: Instant) -> Result<Tally> {
        match self {
            Self::Truncated => Ok(messages::truncated(site, chance, end)),
            Self::Malformed => Ok(messages::malformed(site, chance, end)),
            Self::Options => Ok(messages::options(site, chance, end)),
            Self::Status => Ok(messages::status(site, chance, end)),
            Self::Halves => Ok(clients::halves(site, chance, end)),
            Self::Unread => Ok(clients::unread(site, chance, end)),
            Self::Crowd => Ok(clients::crowd(site, chance, end)),
            Self::Vanish => Ok(clients::vanish(site, chance, end)),
            Self::Guests => Ok(guests::guests(site, chance, end)),
            Self::Descriptors => Ok(descriptors::descriptors(site, chance, end)),
            Self::Signals => clients::signals(site, chance, end),
            Self::Pause => clients::pause(site, chance, end),
            Self::Full => Ok(drives::full(site, chance, end)),
            Self::Errors => Ok(drives::errors(site, chance, end)),
            Self::Slow => Ok(drives::slow(site, chance, end)),
            Self::Cut => drives::cut(site, chance, end),
        }
    }
}

impl Site<'_> {
    /// Has the daemon make what it makes once and keeps, and so is no leak: the threads that look block status up.
    pub fn warm_up(&self) {
        let end = Instant::now() + WARM_UP;
        std::thread::scope(|scope| {
            for seed in 0..THREADS {
                scope.spawn(move || messages::status(self, &mut Chance::new(seed), end));
            }
        });
    }

    /// Returns the next place of a conversation, so that all attackers together leave none out.
    fn next_place(&self, places: usize) -> usize {
        // Relaxed: only that each number comes once matters.
        (self.place.fetch_add(1, Ordering::Relaxed) % places as u64) as usize
    }
}

/// Draws one of several.
fn pick<T: Copy>(chance: &mut Chance, of: &[T]) -> T {
    of[chance.below(of.len() as u64) as usize]
}

const WARM_UP: Duration = Duration::from_millis(100);
/// Attackers at a time.
pub const THREADS: u64 = 2;
/// Connections that attackers, a crowd apart, keep at a time.
pub const LOADED_MAX: u64 = 256;
/// A disk in memory that attackers write to, and its size.
pub const PREY: &str = "prey";
/// See [`PREY`].
pub const PREY_BYTES: usize = 16 << 20;
/// A large disk that stores nothing, and its size.
pub const BIG: &str = "big";
/// See [`BIG`].
pub const BIG_BYTES: u64 = 1 << 30;
/// A disk whose first half is broken, and some of whose requests never end.
pub const BROKEN: &str = "broken";
/// An image on a filesystem that runs full, and whose syncs fail.
pub const FULL: &str = "full";
/// An image on a filesystem that is slow.
pub const SLOW: &str = "slow";
/// An image that is cut off while it is served, and its size.
pub const CUT: &str = "cut";
/// See [`CUT`].
pub const CUT_BYTES: u64 = 4 << 20;
/// An image of holes and data in turns.
pub const HOLES: &str = "holes";
/// See [`HOLES`].
pub const HOLES_BYTES: u64 = 16 << 20;
/// The size of the other disks.
pub const DISK_BYTES: usize = 4 << 20;
