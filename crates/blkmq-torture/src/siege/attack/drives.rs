//! Failing drives: no room, errors, requests that never complete, slowness, a truncated image. Their own
//! clients may get errors or what was written; other clients notice nothing.

use std::cell::Cell;
use std::fs::File;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::connection::{Connection, Ended};
use crate::mount::Faults;
use anyhow::{Context, Result, bail};
use blkmq_nbd::codec::CommandFlags;
use blkmq_nbd::codec::request::{Command, RequestHeader};
use blkmq_testkit::Random;

use super::{BROKEN, CUT, CUT_BYTES, DISK_BYTES, FULL, SLOW, Site, Tally};
use crate::siege::wire::MARK;

/// Writes to a filesystem that runs full repeatedly.
pub(super) fn full(site: &Site<'_>, random: &mut Random, end: Instant) -> Tally {
    let Some([mount, ..]) = site.mounts else {
        return Tally::default();
    };
    let mut tally = Tally::default();
    while Instant::now() < end {
        let room = random.below(64 << 10) as usize;
        mount.set_faults(Faults {
            room: Some(mount.allocated_bytes() + room),
            ..Faults::default()
        });
        tally.add(&use_disk(site, FULL, random, BURST, |_| Ok(())).unwrap_or_default());
        mount.set_faults(Faults::default());
    }
    tally
}

/// Uses a disk with bad blocks and requests that never end, and one whose syncs fail.
pub(super) fn errors(site: &Site<'_>, random: &mut Random, end: Instant) -> Tally {
    let mut tally = Tally::default();
    while Instant::now() < end {
        tally.add(&use_disk(site, BROKEN, random, BURST, |_| Ok(())).unwrap_or_default());
        let Some([mount, ..]) = site.mounts else {
            continue;
        };
        mount.set_faults(Faults {
            failing_sync: Some(1 + random.below(2)),
            ..Faults::default()
        });
        tally.add(&use_disk(site, FULL, random, BURST, |_| Ok(())).unwrap_or_default());
        mount.set_faults(Faults::default());
    }
    tally
}

/// Loads a slow drive with more than it can do.
pub(super) fn slow(site: &Site<'_>, random: &mut Random, end: Instant) -> Tally {
    let Some([_, mount, _]) = site.mounts else {
        return Tally::default();
    };
    mount.set_faults(Faults {
        delay: SLOWNESS,
        ..Faults::default()
    });
    let (mut tally, mut kept) = (Tally::default(), Vec::new());
    while Instant::now() < end {
        if kept.len() < SLOW_CONNECTIONS
            && let Ok(mut connection) = Connection::open_within(&site.socket, SLOW, SILENCE_MAX)
        {
            for _ in 0..SLOW_DEPTH {
                tally.done += u64::from(send(&mut connection, DISK_BYTES as u64, random).unwrap_or(false));
            }
            kept.push(connection);
        }
        sleep(Duration::from_millis(5));
    }
    // What still waits ends soon, since its results are not needed.
    mount.set_faults(Faults::default());
    tally
}

/// Truncates an image while it is used, and lets it grow again. Reads return what its clients
/// wrote, or zeroes, but never what the buffer held before.
pub(super) fn cut(site: &Site<'_>, random: &mut Random, end: Instant) -> Result<Tally> {
    let file = File::options()
        .write(true)
        .open(&site.cut)
        .context("the image to be cut off")?;
    let mut tally = Tally::default();
    while Instant::now() < end {
        let bytes = random.one_of(&[0, 511, 4096, CUT_BYTES / 2, CUT_BYTES - 1, CUT_BYTES]);
        file.set_len(bytes).context("cutting an image off")?;
        let foreign = Cell::new(None);
        let used = use_disk(site, CUT, random, BURST, |ended| {
            let found = ended.data.iter().find(|byte| !matches!(**byte, 0 | MARK));
            foreign.set(foreign.get().or(found.copied()));
            Ok(())
        });
        if let Some(foreign) = foreign.get() {
            bail!("a read of an image that was cut off brought {foreign}, which nobody wrote there");
        }
        match used {
            Ok(used) => tally.add(&used),
            Err(_) => tally.failed += 1,
        }
    }
    file.set_len(CUT_BYTES).context("mending an image")?;
    Ok(tally)
}

/// Sends `count` random requests on a connection of its own, and waits for them. Errors of requests
/// are counted.
pub(super) fn use_disk(
    site: &Site<'_>,
    export: &str,
    random: &mut Random,
    count: u64,
    check: impl Fn(&Ended<()>) -> Result<()>,
) -> Result<Tally> {
    let mut connection = Connection::open_within(&site.socket, export, SILENCE_MAX)?;
    let bytes = connection.agreed().size_bytes;
    let (mut tally, mut ended) = (Tally::default(), Vec::new());
    for _ in 0..count {
        send(&mut connection, bytes, random)?;
    }
    while connection.depth() > 0 && connection.receive(&mut ended)? {
        for ended in ended.drain(..) {
            check(&ended)?;
            tally.done += 1;
            tally.failed += u64::from(ended.error != 0);
        }
    }
    Ok(tally)
}

fn send(connection: &mut Connection<()>, bytes: u64, random: &mut Random) -> Result<bool> {
    let length = 512 << random.below(7);
    let commands = [
        Command::READ,
        Command::READ,
        Command::WRITE,
        Command::WRITE,
        Command::WRITE_ZEROES,
        Command::TRIM,
        Command::FLUSH,
    ];
    let command = random.one_of(&commands);
    let is_flush = command == Command::FLUSH;
    let is_forced = !is_flush && command != Command::READ && random.below(4) == 0;
    let header = RequestHeader {
        cookie: 0,
        offset: if is_flush {
            0
        } else {
            random.below((bytes - length) / 512) * 512
        },
        length: if is_flush { 0 } else { length },
        command,
        flags: CommandFlags::NONE.with_if(is_forced, CommandFlags::FUA),
    };
    let data = vec![
        MARK;
        if command == Command::WRITE {
            length as usize
        } else {
            0
        }
    ];
    let reads = if command == Command::READ {
        length as usize
    } else {
        0
    };
    connection.send(header, &data, reads, ())
}

impl Tally {
    /// Adds another tally.
    pub fn add(&mut self, other: &Self) {
        self.done += other.done;
        self.failed += other.failed;
    }
}

/// Requests of one use of a disk.
const BURST: u64 = 48;
const SLOWNESS: Duration = Duration::from_millis(20);
const SLOW_CONNECTIONS: usize = 4;
const SLOW_DEPTH: usize = 32;
/// Longer than the time limit of the broken disk's queue, 1 s, which ends requests that never end
/// by themselves.
const SILENCE_MAX: Duration = Duration::from_secs(5);
