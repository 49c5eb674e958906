//! The attacks: what attackers do, one kind of attack at a time, with details drawn from a seed. Each
//! attack ends by itself at its time and counts what it has done: an attack that did nothing proves
//! nothing.
//!
//! `messages` has attacks with wrong messages, `clients` with misbehaving clients, `descriptors`
//! with descriptors, `guests` with virtual machines, `drives` with failing drives, `neighbours` with
//! requests that keep the tenant's own queue busy, `servers` with NBD servers that break the protocol.

mod clients;
mod descriptors;
mod drives;
mod guests;
mod messages;
mod neighbours;
mod servers;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::mount::Mount;
use anyhow::Result;
use blkmq_testkit::Random;
use rustix::process::Pid;

pub use clients::client;
pub use servers::Servers;

/// A kind of attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attack {
    /// A conversation that is cut off after every byte of it.
    Truncated,
    /// A conversation in which each byte in turn, and some others, are wrong.
    Malformed,
    /// Options without end, whose answers are not read.
    Options,
    /// A part of a request, and then nothing.
    Halves,
    /// Reads whose replies are not read, of more payload than there is memory.
    Unread,
    /// More connections than are allowed.
    Crowd,
    /// Clients that disconnect while their requests are under way.
    Vanish,
    /// Hundreds of requests for the block status of a fragmented disk.
    Status,
    /// Virtual machines whose monitors and drivers violate the protocol.
    Guests,
    /// Descriptors that are not expected, and whose close blocks.
    Descriptors,
    /// Signals to the daemon, and clients that are stopped, continued and killed.
    Signals,
    /// A filesystem that runs full.
    Full,
    /// Medium errors, syncs that fail, requests that never end.
    Errors,
    /// A slow drive.
    Slow,
    /// Requests on the tenant's queue that take 10 ms to a second.
    Late,
    /// Trims of an image with very many extents, on the tenant's queue.
    Trims,
    /// An image that is truncated and grows again.
    Cut,
    /// NBD servers behind the daemon that answer early, twice, for others, never, by half, or with
    /// anything.
    Servers,
    /// The daemon is stopped for a while, as when its host sleeps: its deadlines have passed when
    /// it continues.
    Pause,
}

/// What an attack knows of the daemon and its drives.
#[derive(Debug)]
pub struct Site<'a> {
    /// The address at which all disks are served, the tenant's too.
    pub socket: PathBuf,
    /// The address at which only attacked disks are served.
    pub tcp: SocketAddr,
    /// The socket at which [`BIG`] is served to virtual machines.
    pub vhost_user: PathBuf,
    /// The daemon.
    pub pid: Pid,
    /// The daemon's program.
    pub program: PathBuf,
    /// Its control socket.
    pub control: PathBuf,
    /// The image that is truncated.
    pub cut: PathBuf,
    /// Held by the attacker that truncates it.
    pub cutting: Mutex<()>,
    /// The image that is trimmed.
    pub extents: PathBuf,
    /// The filesystems below [`FULL`], [`SLOW`] and [`LATE`], if there is FUSE.
    pub mounts: Option<&'a [Mount; 3]>,
    /// The NBD servers of [`REMOTES`].
    pub servers: &'a Servers,
    /// How many places of a conversation the attackers have used.
    pub place: AtomicU64,
}

/// The result of an attack.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// How many times the attack was carried out.
    pub done: u64,
    /// Errors, refusals and ends of connections that it caused. Not every attack counts them.
    pub failed: u64,
}

impl Attack {
    /// All attacks.
    pub const ALL: [Self; 19] = [
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
        Self::Late,
        Self::Trims,
        Self::Cut,
        Self::Servers,
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
            Self::Late => "late",
            Self::Trims => "trims",
            Self::Cut => "cut",
            Self::Servers => "servers",
            Self::Pause => "pause",
        }
    }

    /// Says whether the attack needs a FUSE filesystem.
    pub fn needs_mounts(self) -> bool {
        matches!(self, Self::Full | Self::Slow | Self::Late)
    }

    /// Says whether the tenant's latencies are judged: they mean nothing while the daemon is
    /// stopped.
    pub fn is_timed(self) -> bool {
        self != Self::Pause
    }

    /// By how much the tenant's p99 may exceed twice its p99 alone. For each late request on its own
    /// queue it is held for some milliseconds.
    pub fn latency_allowance(self) -> Duration {
        match self {
            Self::Late | Self::Trims => Duration::from_millis(10),
            _ => Duration::from_millis(1),
        }
    }

    /// Attacks from one thread until `end`.
    ///
    /// # Errors
    /// If the attack found what no client may see, or could not be carried out.
    pub fn run(self, site: &Site<'_>, random: &mut Random, end: Instant) -> Result<Tally> {
        match self {
            Self::Truncated => Ok(messages::truncated(site, random, end)),
            Self::Malformed => Ok(messages::malformed(site, random, end)),
            Self::Options => Ok(messages::options(site, random, end)),
            Self::Status => Ok(messages::status(site, random, end)),
            Self::Halves => Ok(clients::halves(site, random, end)),
            Self::Unread => Ok(clients::unread(site, random, end)),
            Self::Crowd => Ok(clients::crowd(site, random, end)),
            Self::Vanish => Ok(clients::vanish(site, random, end)),
            Self::Guests => Ok(guests::guests(site, random, end)),
            Self::Descriptors => Ok(descriptors::descriptors(site, random, end)),
            Self::Signals => clients::signals(site, random, end),
            Self::Pause => clients::pause(site, random, end),
            Self::Full => Ok(drives::full(site, random, end)),
            Self::Errors => Ok(drives::errors(site, random, end)),
            Self::Slow => Ok(drives::slow(site, random, end)),
            Self::Late => Ok(neighbours::late(site, random, end)),
            Self::Trims => neighbours::trims(site, end),
            Self::Cut => drives::cut(site, random, end),
            Self::Servers => servers::servers(site, random, end),
        }
    }
}

impl Site<'_> {
    /// Makes the daemon start the threads that look up block status: it keeps them, so they are no
    /// leak.
    pub fn warm_up(&self) {
        let end = Instant::now() + WARM_UP;
        std::thread::scope(|scope| {
            for seed in 0..THREADS {
                scope.spawn(move || messages::status(self, &mut Random::new(seed), end));
            }
        });
    }

    /// Returns the next place of a conversation, so that the attackers together omit none.
    fn next_place(&self, places: usize) -> usize {
        // Relaxed: each number must be drawn once, and nothing is published with it.
        (self.place.fetch_add(1, Ordering::Relaxed) % places as u64) as usize
    }
}

const WARM_UP: Duration = Duration::from_millis(100);
/// Threads of each attack except `Pause`.
pub const THREADS: u64 = 2;
/// Connections that the attackers keep at most at a time, except in `Crowd`.
pub const LOADED_MAX: u64 = 256;
/// A disk in memory that attackers write to.
pub const PREY: &str = "prey";
/// Size of [`PREY`].
pub const PREY_BYTES: usize = 16 << 20;
/// A large disk that stores nothing.
pub const BIG: &str = "big";
/// Size of [`BIG`].
pub const BIG_BYTES: u64 = 1 << 30;
/// A disk whose first half is broken, and some of whose requests never end.
pub const BROKEN: &str = "broken";
/// An image on a filesystem that runs full, and whose syncs fail.
pub const FULL: &str = "full";
/// An image on a slow filesystem.
pub const SLOW: &str = "slow";
/// An image on a filesystem whose requests take long, on the tenant's queue.
pub const LATE: &str = "late";
/// An image with very many extents, on the tenant's queue.
pub const EXTENTS: &str = "extents";
/// Size of [`EXTENTS`].
pub const EXTENTS_BYTES: u64 = 32 << 20;
/// An image that is truncated while it is served.
pub const CUT: &str = "cut";
/// Size of [`CUT`].
pub const CUT_BYTES: u64 = 4 << 20;
/// An image in which holes and data alternate.
pub const HOLES: &str = "holes";
/// Size of [`HOLES`].
pub const HOLES_BYTES: u64 = 16 << 20;
/// Disks of NBD servers. Requests to the last two wait for a lost server.
pub const REMOTES: [&str; 4] = ["remote-1", "remote-2", "remote-3", "remote-4"];
/// Size of the other disks.
pub const DISK_BYTES: usize = 4 << 20;
