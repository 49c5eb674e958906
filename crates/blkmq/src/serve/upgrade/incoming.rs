//! The incoming daemon, which takes over: it asks the running one for locks and sockets, starts with its own
//! configuration, takes the clients, and serves when it is told to. If anything fails before, it ends, and
//! leaves everything to the other one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use blkmq_config::luks::Keyring;
use blkmq_config::{Config, Document, plan};
use blkmq_core::group::Debts;
use blkmq_core::ids::ReactorId;
use blkmq_core::stat::GroupStats;
use blkmq_drivers::file;
use blkmq_export::handover::channel::{Channel, ChannelError};
use blkmq_export::handover::codec::{self, Message, VERSION, VERSION_MIN, VERSION_OF_SOURCES};
use blkmq_export::handover::{Handover, Phase};
use blkmq_host::control::Control;
use blkmq_host::counted::counted;

use super::sources::{Ours, Predecessor};
use super::{ANSWER_MAX, Earlier, START_MAX};
use crate::sandbox::Sandbox;
use crate::serve::{Daemon, keys};

/// Takes over from the daemon at this upgrade socket. Returns when its clients are served here.
///
/// # Errors
/// The reason why not. The other daemon continues then.
pub(crate) fn take_over(
    (document, config): (Document, Config),
    (sandbox, keyring): (Sandbox, Keyring),
    address: &str,
    same_data: &[String],
) -> Result<Daemon> {
    let handover = Arc::new(Handover::new(Phase::Suspended));
    file::begin_takeover();
    let mut channel = greet(address, &handover)?;
    let predecessor = take_what_a_start_needs(&mut channel, &handover, &keyring)?;
    let (our_document, our_config) = (document.clone(), config.clone());
    let ours = Ours {
        document: &our_document,
        config: &our_config,
        same: same_data,
    };
    let started = predecessor
        .check(&ours)
        .and_then(|()| plan(&config))
        .and_then(|plan| Daemon::start_with((document, config), plan, (sandbox, keyring), &handover));
    let mut daemon = match started {
        Ok(daemon) => daemon,
        Err(error) => {
            say_why(&mut channel, &error);
            return Err(error);
        }
    };
    let (control, keyring) = (daemon.engine().control(), daemon.running.keyring());
    let differences = predecessor.differences(&ours, &control, keyring);
    match take_clients(&mut channel, &daemon, &handover, differences) {
        Ok(earlier) => {
            daemon.earlier = Arc::new(earlier);
            Ok(daemon)
        }
        Err(error) => {
            say_why(&mut channel, &error);
            drop(channel);
            // What was taken belongs to the other daemon: it is released silently.
            handover.leave();
            let ended = daemon.end(LEAVE_MAX);
            ended.err().iter().for_each(|error| tracing::warn!("{error:#}"));
            Err(error)
        }
    }
}

/// Sends the reason to the other daemon, for its log.
fn say_why(channel: &mut Channel, error: &anyhow::Error) {
    let reason = format!("{error:#}");
    let _ = channel.send(&Message::Refused { reason }, &[], ANSWER_MAX);
}

/// Connects to the running daemon, in the newest version of the hand-over that it does not refuse.
fn greet(address: &str, handover: &Handover) -> Result<Channel> {
    let path = super::socket_path(address)?;
    let mut version = VERSION;
    loop {
        let mut channel = Channel::connect(&path, ANSWER_MAX)
            .with_context(|| format!("no daemon can be reached at {address}: start without --take-over"))?;
        channel.send(&Message::Hello { version }, &[], ANSWER_MAX)?;
        match channel.receive(TURN_MAX) {
            Ok((
                Message::Welcome {
                    version: theirs,
                    instance,
                },
                _,
            )) if theirs == version => {
                if version < VERSION_OF_SOURCES {
                    tracing::warn!("upgrade: the running daemon cannot tell where the data of its disks are");
                }
                handover.set_instance(instance);
                return Ok(channel);
            }
            // An older daemon refuses every version but its own.
            Err(ChannelError::Refused(_)) if version > VERSION_MIN => version -= 1,
            Ok(_) => bail!("the running daemon does not answer with a welcome"),
            Err(error) => return Err(error.into()),
        }
    }
}

fn take_what_a_start_needs(
    channel: &mut Channel,
    handover: &Handover,
    keyring: &Keyring,
) -> Result<Predecessor> {
    channel.end_within(START_MAX);
    let mut predecessor = Predecessor::default();
    let mut count = 0;
    loop {
        let (message, mut fds) = channel.receive(ANSWER_MAX)?;
        match (message, fds.pop()) {
            (Message::Source(source), None) => predecessor.add(source),
            (Message::Key { disk }, Some(memory)) => {
                // Before a key is in this process.
                keys::leave_no_core()?;
                let key = keys::unsealed(memory).with_context(|| format!("disk {disk}: its key"))?;
                keyring.insert(disk, key);
            }
            (Message::Lock, Some(lock)) => file::inherit_lock(lock),
            (Message::Socket(named), Some(socket)) => handover.inherit(named, socket),
            (Message::Path { address, file }, None) => handover.inherit_path(address, file),
            (Message::End { count: sent }, None) if sent == count => return Ok(predecessor),
            _ => bail!("the running daemon says something else than sources, keys, locks and sockets"),
        }
        count += 1;
    }
}

/// Returns the earlier statistics of groups.
fn take_clients(
    channel: &mut Channel,
    daemon: &Daemon,
    handover: &Handover,
    differences: Vec<codec::Difference>,
) -> Result<Earlier> {
    channel.end_within(CLIENTS_MAX);
    for disk in &*daemon.engine().disks() {
        let disk = codec::Disk {
            name: disk.name.clone(),
            size: disk.size,
            block_size: disk.block_size,
            read_only: disk.read_only,
        };
        channel.send(&Message::Disk(disk), &[], ANSWER_MAX)?;
    }
    for difference in differences {
        channel.send(&Message::Differs(difference), &[], ANSWER_MAX)?;
    }
    channel.send(&Message::Take, &[], ANSWER_MAX)?;
    let reactors = daemon.engine().reactors();
    let (mut count, mut earlier) = (0, Earlier::new());
    // The first message comes when requests in flight there have ended.
    let mut limit = TURN_MAX;
    let start = loop {
        let (message, fds) = channel.receive(limit)?;
        limit = ANSWER_MAX;
        match message {
            Message::Session(session) => {
                let reactor = ReactorId((count as usize % reactors) as u16);
                handover.restore(daemon.engine(), reactor, &session, fds)?;
                count += 1;
            }
            Message::Statistics(statistics) if earlier.len() < STATISTICS_MAX => {
                go_on(&daemon.engine().control(), &statistics)?;
                // Counts of another version are not continued.
                if let Some(stats) = GroupStats::from_counts(&statistics.counts) {
                    earlier.insert((statistics.queue, statistics.group), stats);
                }
            }
            Message::End { count: sent } if sent == count => break Instant::now(),
            _ => bail!("the running daemon says something else than its clients"),
        }
    };
    handover.wait_until_settled(SETTLE_MAX)?;
    channel.send(&Message::Ready, &[], ANSWER_MAX)?;
    match channel.receive(ANSWER_MAX)?.0 {
        Message::Go => {}
        _ => bail!("the running daemon does not let go"),
    }
    // Before anything is done.
    tell_taken(channel)?;
    match file::end_takeover() {
        0 => {}
        files => tracing::info!(
            "upgrade: {} not locked any more: no disk is there",
            counted(files, "file is", "files are")
        ),
    }
    handover.resume();
    for address in handover.drop_unused() {
        tracing::info!("upgrade: {address} is not served any more");
    }
    tracing::info!(
        "upgrade: took over {}, {:.1} ms after the last was handed over",
        counted(count as usize, "connection", "connections"),
        start.elapsed().as_secs_f64() * 1e3
    );
    // Clients do not wait for it: the other daemon's locks, which are shared, hold until then.
    file::retake_locks();
    Ok(earlier)
}

/// Reports that this daemon serves. From here on the other one touches nothing.
///
/// # Errors
/// It is too late: the other daemon goes on, and this one must serve nobody.
pub(super) fn tell_taken(channel: &mut Channel) -> Result<()> {
    let Err(untold) = channel.send(&Message::Taken, &[], ANSWER_MAX) else {
        return Ok(());
    };
    // It has let go, and has either ended since or refuses.
    match channel.receive(ANSWER_MAX) {
        Err(refused @ ChannelError::Refused(_)) => Err(refused.into()),
        _ => {
            tracing::warn!("upgrade: the other daemon was not told: {untold}");
            Ok(())
        }
    }
}

/// Transfers a group's debts to its caps, and what the scheduler has learnt of it, if there is such
/// a group here.
fn go_on(control: &Control, statistics: &codec::Statistics) -> Result<()> {
    let debts = Debts::try_from(&statistics.debts[..]);
    let (Ok(queue), Ok(debts)) = (control.queue(&statistics.queue), debts) else {
        return Ok(());
    };
    if control
        .groups(queue)
        .iter()
        .any(|(path, _)| *path == statistics.group)
    {
        control.add_group_debts(queue, &statistics.group, &debts)?;
        let learnt = (&*statistics.scheduler, &*statistics.learnt);
        control.take_group_learnt(queue, &statistics.group, learnt)?;
    }
    Ok(())
}

/// Time for the running daemon to flush disks, and to end requests in flight; and to wait while
/// another daemon tries to take over.
const TURN_MAX: Duration = Duration::from_secs(60);
/// Time for all clients to arrive: that of the first message, and for the rest.
const CLIENTS_MAX: Duration = Duration::from_secs(90);
/// Time for connections to be restored.
const SETTLE_MAX: Duration = Duration::from_secs(3);
/// Most groups of all queues.
const STATISTICS_MAX: usize = 1 << 20;
/// Time for the engine to end when it cannot take over.
const LEAVE_MAX: Duration = Duration::from_secs(5);
