//! What a disk on the tenant's own queue does to it: requests that take long, and trims of very many
//! extents. The scheduler of that queue (`bfq`) must hold nobody for them.

use std::fs::File;
use std::thread;
use std::time::{Duration, Instant};

use crate::connection::Connection;
use crate::mount::Faults;
use anyhow::{Context, Result};
use blkmq_nbd::codec::CommandFlags;
use blkmq_nbd::codec::request::{Command, RequestHeader};
use blkmq_testkit::Random;
use rustix::fs::{FallocateFlags, fallocate};

use super::drives::use_disk;
use super::{EXTENTS, EXTENTS_BYTES, LATE, Site, Tally};

/// Has requests take 10 ms, a tenth of a second, or a second, one or several at a time.
pub(super) fn late(site: &Site<'_>, random: &mut Random, end: Instant) -> Tally {
    let Some([.., mount]) = site.mounts else {
        return Tally::default();
    };
    let mut tally = Tally::default();
    // The longest first: also a short window has it.
    let mut delay = DELAYS[0];
    thread::scope(|scope| {
        // What still waits at the end is served at once.
        scope.spawn(|| {
            thread::sleep(end.saturating_duration_since(Instant::now()));
            mount.set_faults(Faults::default());
        });
        while Instant::now() < end {
            mount.set_faults(Faults {
                delay,
                ..Faults::default()
            });
            let depth = random.one_of(&[1, 4, 16]);
            tally.add(&use_disk(site, LATE, random, depth, |_| Ok(())).unwrap_or_default());
            delay = random.one_of(&DELAYS);
        }
    });
    mount.set_faults(Faults::default());
    tally
}

/// Trims an image all of whose second blocks are allocated.
pub(super) fn trims(site: &Site<'_>, end: Instant) -> Result<Tally> {
    let file = File::options()
        .write(true)
        .open(&site.extents)
        .context("the image to be trimmed")?;
    let mut tally = Tally::default();
    while tally.done == 0 || Instant::now() < end {
        for offset in (0..EXTENTS_BYTES).step_by(2 * BLOCK as usize) {
            fallocate(&file, FallocateFlags::KEEP_SIZE, offset, BLOCK).context("making extents")?;
        }
        let mut connection = Connection::open_within(&site.socket, EXTENTS, SILENCE_MAX)?;
        let header = RequestHeader {
            cookie: 0,
            offset: 0,
            length: EXTENTS_BYTES,
            command: Command::TRIM,
            flags: CommandFlags::NONE,
        };
        connection.send(header, &[], 0, ())?;
        let mut ended = Vec::new();
        while connection.depth() > 0 && connection.receive(&mut ended)? {}
        tally.done += EXTENTS_BYTES / (2 * BLOCK);
        tally.failed += ended.iter().filter(|ended| ended.error != 0).count() as u64;
    }
    Ok(tally)
}

const DELAYS: [Duration; 3] = [
    Duration::from_secs(1),
    Duration::from_millis(100),
    Duration::from_millis(10),
];
const BLOCK: u64 = 4096;
/// Longer than a trim takes on a drive that discards, and than the requests of four waves.
const SILENCE_MAX: Duration = Duration::from_secs(60);
