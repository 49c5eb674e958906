//! Hostile clients: they stop within a request, do not read, are too many, disconnect, and are stopped
//! and killed.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command as Process, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::connection::Connection;
use anyhow::{Context, Result};
use blkmq_nbd::codec::request::{Command, RequestHeader};
use blkmq_nbd::codec::{CommandFlags, HeaderStyle};
use blkmq_testkit::Random;
use rustix::process::{Pid, Signal, kill_process};

use super::{BIG, BIG_BYTES, LOADED_MAX, PREY, PREY_BYTES, Site, THREADS, Tally};
use crate::siege::wire::{MARK, Wire, negotiation, push_request};

/// Keeps connections on which part of a request has arrived: a part of its header or of its
/// payload.
pub(super) fn halves(site: &Site<'_>, random: &mut Random, end: Instant) -> Tally {
    let (mut tally, mut kept) = (Tally::default(), Vec::new());
    while Instant::now() < end {
        if kept.len() as u64 >= LOADED_MAX / THREADS {
            kept.swap_remove(random.below(kept.len() as u64) as usize);
        }
        let (Ok(mut wire), style) = (Wire::unix(&site.socket), HeaderStyle::Simple) else {
            tally.failed += 1;
            continue;
        };
        let (mut message, export) = (Vec::new(), random.one_of(&[PREY, BIG]));
        let length = 512 << random.below(15);
        let place = (0, length);
        push_request(
            style,
            (Command::WRITE, CommandFlags::NONE),
            1,
            place,
            &mut message,
        );
        let header = message.len();
        message.resize(header + length as usize, MARK);
        let cut = match random.below(2) {
            0 => random.below(header as u64),
            _ => header as u64 + random.below(length),
        };
        let mut all = negotiation(style, export);
        all.extend_from_slice(&message[..cut as usize]);
        tally.failed += u64::from(!wire.send(&all));
        tally.done += 1;
        kept.push(wire);
    }
    tally
}

/// Sends reads of more data than the daemon has memory for, and reads none of the replies.
pub(super) fn unread(site: &Site<'_>, random: &mut Random, end: Instant) -> Tally {
    let (mut tally, mut kept) = (Tally::default(), Vec::new());
    while Instant::now() < end {
        if kept.len() as u64 >= LOADED_MAX / THREADS {
            kept.swap_remove(random.below(kept.len() as u64) as usize);
        }
        let Ok(mut wire) = Wire::unix(&site.socket) else {
            tally.failed += 1;
            continue;
        };
        let style = random.one_of(&[HeaderStyle::Simple, HeaderStyle::Extended]);
        let mut requests = negotiation(style, BIG);
        for cookie in 0..UNREAD_AT_ONCE {
            let length = 4096 << random.below(14);
            let read = (Command::READ, CommandFlags::NONE);
            push_request(style, read, cookie, (0, length), &mut requests);
        }
        tally.failed += u64::from(!wire.send(&requests));
        tally.done += UNREAD_AT_ONCE;
        kept.push(wire);
        sleep(Duration::from_millis(1));
    }
    tally
}

/// Keeps as many connections as are accepted: some are silent, some are within the negotiation,
/// some have selected an export. Then closes some and connects again.
pub(super) fn crowd(site: &Site<'_>, random: &mut Random, end: Instant) -> Tally {
    let (mut tally, mut kept) = (Tally::default(), Vec::new());
    while Instant::now() < end {
        if kept.len() >= CROWD / THREADS as usize {
            for _ in 0..64 {
                kept.swap_remove(random.below(kept.len() as u64) as usize);
            }
        }
        let Ok(mut wire) = Wire::unix(&site.socket) else {
            tally.failed += 1;
            continue;
        };
        let message = match random.below(4) {
            0 => Vec::new(),
            1 => negotiation(HeaderStyle::Extended, BIG)[..40].to_vec(),
            _ => {
                let style = HeaderStyle::Simple;
                let mut all = negotiation(style, random.one_of(&[PREY, BIG]));
                push_request(style, (Command::READ, CommandFlags::NONE), 1, (0, 512), &mut all);
                all
            }
        };
        tally.failed += u64::from(!wire.send(&message));
        tally.done += 1;
        kept.push(wire);
    }
    tally
}

/// Sends requests, and disconnects at a random time afterwards.
pub(super) fn vanish(site: &Site<'_>, random: &mut Random, end: Instant) -> Tally {
    let mut tally = Tally::default();
    while Instant::now() < end {
        let is_tcp = random.below(2) == 0;
        let wire = match is_tcp {
            true => Wire::tcp(site.tcp),
            false => Wire::unix(&site.socket),
        };
        let Ok(mut wire) = wire else {
            tally.failed += 1;
            continue;
        };
        let style = random.one_of(&[HeaderStyle::Simple, HeaderStyle::Structured]);
        let mut all = negotiation(style, PREY);
        let count = 1 + random.below(64);
        for cookie in 0..count {
            push_random(style, cookie, random, &mut all);
        }
        wire.send(&all);
        if random.below(2) == 0 {
            sleep(Duration::from_micros(random.below(3000)));
        }
        tally.done += count;
        wire.reset();
    }
    tally
}

fn push_random(style: HeaderStyle, cookie: u64, random: &mut Random, out: &mut Vec<u8>) {
    let length = 512 << random.below(9);
    let offset = random.below(PREY_BYTES as u64 - length) / 512 * 512;
    let command = random.one_of(&[
        Command::READ,
        Command::WRITE,
        Command::FLUSH,
        Command::WRITE_ZEROES,
        Command::TRIM,
    ]);
    let place = match command {
        Command::FLUSH => (0, 0),
        _ => (offset, length),
    };
    push_request(style, (command, CommandFlags::NONE), cookie, place, out);
    if command == Command::WRITE {
        out.extend(std::iter::repeat_n(MARK, length as usize));
    }
}

/// Sends the daemon every signal that it must survive, and stops and continues clients, or replaces
/// them.
pub(super) fn signals(site: &Site<'_>, random: &mut Random, end: Instant) -> Result<Tally> {
    let mut tally = Tally::default();
    let mut clients: Vec<Client> = (0..CLIENTS)
        .map(|_| Client::start(&site.socket))
        .collect::<Result<_>>()?;
    while Instant::now() < end {
        let index = random.below(clients.len() as u64) as usize;
        match random.below(8) {
            0 => clients[index] = Client::start(&site.socket)?,
            1 | 2 => clients[index].signal(Signal::STOP),
            3 | 4 => clients[index].signal(Signal::CONT),
            _ => kill_process(site.pid, random.one_of(&SURVIVED)).context("signalling the daemon")?,
        }
        tally.done += 1;
        sleep(Duration::from_micros(random.below(5000)));
    }
    Ok(tally)
}

/// Stops the daemon and continues it after a while, as a sleeping host does, or a hypervisor that
/// migrates it.
pub(super) fn pause(site: &Site<'_>, random: &mut Random, end: Instant) -> Result<Tally> {
    let mut tally = Tally::default();
    // It does not negotiate: the deadline of its handshake runs while the daemon is stopped.
    let waits = Wire::unix(&site.socket);
    let left = end.saturating_duration_since(Instant::now());
    kill_process(site.pid, Signal::STOP).context("stopping the daemon")?;
    sleep(left / 2 + Duration::from_millis(random.below(100)));
    kill_process(site.pid, Signal::CONT).context("continuing the daemon")?;
    tally.done += 1;
    sleep(end.saturating_duration_since(Instant::now()));
    tally.failed += u64::from(waits.is_err());
    Ok(tally)
}

/// A client in a process of its own.
struct Client(Child);

impl Client {
    fn start(socket: &Path) -> Result<Self> {
        let own = std::env::current_exe().context("finding this program")?;
        let child = Process::new(own)
            .arg("--client")
            .arg(socket)
            // The client exits when this pipe closes, which it does however this process ends.
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("starting a client")?;
        Ok(Self(child))
    }

    fn signal(&self, signal: Signal) {
        // Fails if the client has ended.
        let _ = kill_process(Pid::from_child(&self.0), signal);
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // Both fail if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Reads as fast as the server answers, with a short pause after each batch, until standard input
/// ends: what `--client` does.
///
/// # Errors
/// If the server refuses or disconnects.
pub fn client(socket: &Path) -> Result<()> {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0; 1]);
        std::process::exit(0);
    });
    let mut connection = Connection::open(socket, BIG)?;
    let (mut ended, mut random) = (Vec::new(), Random::new(u64::from(std::process::id())));
    loop {
        while connection.depth() < CLIENT_DEPTH {
            let header = RequestHeader {
                cookie: 0,
                offset: random.below(BIG_BYTES / CLIENT_READ) * CLIENT_READ,
                length: CLIENT_READ,
                command: Command::READ,
                flags: CommandFlags::NONE,
            };
            connection.send(header, &[], CLIENT_READ as usize, ())?;
        }
        if !connection.receive(&mut ended)? {
            return Ok(());
        }
        ended.clear();
        sleep(CLIENT_PAUSE);
    }
}

const UNREAD_AT_ONCE: u64 = 64;
/// Connections that the crowd attempts: more than the address allows.
const CROWD: usize = 3000;
const CLIENTS: usize = 3;
const CLIENT_DEPTH: usize = 32;
const CLIENT_READ: u64 = 64 << 10;
/// Without pauses a client would use a whole processor, and the daemon does not schedule
/// processors.
const CLIENT_PAUSE: Duration = Duration::from_millis(2);
/// SIGUSR1 makes the daemon print its statistics; the others must have no effect.
const SURVIVED: [Signal; 6] = [
    Signal::USR1,
    Signal::HUP,
    Signal::PIPE,
    Signal::CHILD,
    Signal::URG,
    Signal::WINCH,
];
