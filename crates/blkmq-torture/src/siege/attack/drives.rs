//! Failing drives: no room, errors, requests that never complete, slowness, a truncated image. Their own
//! clients may get errors or what was written; other clients notice nothing.

use std::cell::Cell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::PoisonError;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::connection::{Connection, Ended};
use crate::mount::Faults;
use anyhow::{Context, Result, bail, ensure};
use blkmq_nbd::codec::CommandFlags;
use blkmq_nbd::codec::request::{Command as NbdCommand, RequestHeader};
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
                tally.done +=
                    u64::from(send(&mut connection, ALL, DISK_BYTES as u64, random).unwrap_or(false));
            }
            kept.push(connection);
        }
        sleep(Duration::from_millis(5));
    }
    // What still waits ends soon, since its results are not needed.
    mount.set_faults(Faults::default());
    tally
}

/// Truncates an image while it is used, and lets it grow again. Until it is opened again, reads return what its clients
/// wrote, or fail: what was cut off is never served as zeroes. Then the same with trims, after which zeroes are allowed.
pub(super) fn cut(site: &Site<'_>, random: &mut Random, end: Instant) -> Result<Tally> {
    let file = File::options()
        .write(true)
        .open(&site.cut)
        .context("the image to be cut off")?;
    let mut tally = Tally::default();
    while Instant::now() < end {
        // One at a time, since who mends the file hides from the other that it was cut off.
        let _cutting = site.cutting.lock().unwrap_or_else(PoisonError::into_inner);
        tally.add(&cut_full(site, &file, random)?);
        tally.add(&cut_with_holes(site, &file, random)?);
    }
    file.set_len(CUT_BYTES).context("mending an image")?;
    Ok(tally)
}

/// Cuts an image off in which there is no zero, between two requests. A write of the last block makes the file whole again in
/// one step, which nobody can notice: there are none.
fn cut_full(site: &Site<'_>, file: &File, random: &mut Random) -> Result<Tally> {
    file.set_len(CUT_BYTES).context("mending an image")?;
    file.write_all_at(&vec![MARK; CUT_BYTES as usize], 0)
        .context("filling an image")?;
    let reopened = Command::new(&site.program)
        .args(["ctl", "--socket", &format!("unix:{}", site.control.display())])
        .args(["reopen", CUT])
        .output()
        .context("ctl")?;
    ensure!(
        reopened.status.success(),
        "an image that was mended is not served again: {}",
        String::from_utf8_lossy(&reopened.stderr)
    );
    let (mut tally, mut connection) = (
        Tally::default(),
        Connection::open_within(&site.socket, CUT, SILENCE_MAX)?,
    );
    let (bytes, cut_after) = (
        random.one_of(&[0, 511, 4096, CUT_BYTES / 2, CUT_BYTES - 4096]),
        random.below(BURST),
    );
    let is_hidden = random.below(2) == 0;
    for number in 0..3 * BURST {
        if number == cut_after {
            // Else a read that is short shows it most often before a write hides it.
            while is_hidden && connection.depth() > 0 {
                take_marks(&mut connection, &mut tally)?;
            }
            file.set_len(bytes).context("cutting an image off")?;
            if is_hidden {
                let last = CUT_BYTES - CUT_TAIL - CUT_TAIL;
                send_at(&mut connection, NbdCommand::WRITE, last, CUT_TAIL, false)?;
            }
        }
        if number == 2 * BURST && tally.failed > 0 {
            // Somebody has noticed it.
            file.set_len(CUT_BYTES).context("mending an image")?;
        }
        send(&mut connection, FILLING, CUT_BYTES - CUT_TAIL, random)?;
        // Some are under way, and the cut is known before the file grows again.
        while connection.depth() > if number % BURST == BURST - 1 { 0 } else { DEPTH } {
            take_marks(&mut connection, &mut tally)?;
        }
    }
    Ok(tally)
}

/// Receives what has ended of an image that is full of marks.
fn take_marks(connection: &mut Connection<()>, tally: &mut Tally) -> Result<()> {
    let mut ended = Vec::new();
    ensure!(connection.receive(&mut ended)?, "the daemon has hung up");
    for ended in ended {
        tally.done += 1;
        tally.failed += u64::from(ended.error != 0);
        let wrong = ended.data.iter().find(|byte| **byte != MARK);
        if let Some(wrong) = wrong.filter(|_| ended.error == 0) {
            bail!("a read of an image that was cut off brought {wrong}, which nobody wrote there");
        }
    }
    Ok(())
}

/// Cuts off an image that may have holes: its reads return what its clients wrote, or zeroes, but never what the buffer held
/// before.
fn cut_with_holes(site: &Site<'_>, file: &File, random: &mut Random) -> Result<Tally> {
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
    if used.is_err() {
        // What was sent may be under way.
        sleep(SLOWNESS);
    }
    Ok(used.unwrap_or(Tally { done: 0, failed: 1 }))
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
        send(&mut connection, ALL, bytes, random)?;
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

/// Sends one of these commands to a random range before `bytes`.
fn send(
    connection: &mut Connection<()>,
    commands: &[NbdCommand],
    bytes: u64,
    random: &mut Random,
) -> Result<bool> {
    let length = 512 << random.below(7);
    let command = random.one_of(commands);
    let is_forced = !matches!(command, NbdCommand::FLUSH | NbdCommand::READ) && random.below(4) == 0;
    let offset = random.below((bytes - length) / 512) * 512;
    send_at(connection, command, offset, length, is_forced)
}

/// Sends a command to a range; a flush has none.
fn send_at(
    connection: &mut Connection<()>,
    command: NbdCommand,
    offset: u64,
    length: u64,
    is_forced: bool,
) -> Result<bool> {
    let is_flush = command == NbdCommand::FLUSH;
    let header = RequestHeader {
        cookie: 0,
        offset: if is_flush { 0 } else { offset },
        length: if is_flush { 0 } else { length },
        command,
        flags: CommandFlags::NONE.with_if(is_forced, CommandFlags::FUA),
    };
    let data = vec![
        MARK;
        if command == NbdCommand::WRITE {
            length as usize
        } else {
            0
        }
    ];
    let reads = if command == NbdCommand::READ {
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

const ALL: &[NbdCommand] = &[
    NbdCommand::READ,
    NbdCommand::READ,
    NbdCommand::WRITE,
    NbdCommand::WRITE,
    NbdCommand::WRITE_ZEROES,
    NbdCommand::TRIM,
    NbdCommand::FLUSH,
];
/// Those that leave no zeroes.
const FILLING: &[NbdCommand] = &[
    NbdCommand::READ,
    NbdCommand::READ,
    NbdCommand::READ,
    NbdCommand::WRITE,
    NbdCommand::FLUSH,
];
/// What is left alone at the end of the image that is cut off, in bytes.
const CUT_TAIL: u64 = 4096;
/// Requests that are under way meanwhile.
const DEPTH: usize = 8;
/// Requests of one use of a disk.
const BURST: u64 = 48;
const SLOWNESS: Duration = Duration::from_millis(20);
const SLOW_CONNECTIONS: usize = 4;
const SLOW_DEPTH: usize = 32;
/// Longer than the time limit of the broken disk's queue, 1 s, which ends requests that never end
/// by themselves.
const SILENCE_MAX: Duration = Duration::from_secs(5);
