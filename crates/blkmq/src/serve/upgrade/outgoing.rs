//! The outgoing daemon, which hands over: it listens at its upgrade socket, sends an incoming daemon what a
//! start needs, compares disks, stops all members, hands over, and ends when the other daemon serves. If
//! anything fails before, it continues unchanged. All of this runs on a thread of its own;
//! `docs/design/0013-live-upgrade.md` has a drawing.

mod taken;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use blkmq_core::group::Debts;
use blkmq_export::common::{self, Common, Credentials, PathRights, Socket};
use blkmq_export::handover::channel::Channel;
use blkmq_export::handover::codec::{
    self, Message, Origin, VERSION, VERSION_MIN, VERSION_OF_KEYS, VERSION_OF_SOURCES,
};
use blkmq_host::control::{Control, Uncapped};
use blkmq_host::counted::counted;
use blkmq_host::device::FileId;
use blkmq_host::disk::{Disk, MAPPED};
use blkmq_host::engine::Engine;
use signal_hook::iterator::Handle;

use self::taken::wait_until_taken;
use super::flusher::Flusher;
use super::{ANSWER_MAX, DOOR, Earlier, START_MAX, sources};
use crate::serve::keys;
use crate::serve::running::{Held, Running};

/// The upgrade socket, and the thread that answers there.
pub(crate) struct Outgoing {
    socket: Socket,
    shared: Arc<Shared>,
}

/// The state that the daemon's main thread and the thread that hands over share.
struct Shared {
    /// Held from the stop of all members until they continue or are gone; and by a daemon that
    /// shuts down.
    is_busy: Mutex<()>,
    has_left: AtomicBool,
}

/// The state of the thread.
struct Conductor {
    common: Arc<Common>,
    control: Control,
    running: Arc<Running>,
    flusher: Flusher,
    shared: Arc<Shared>,
    earlier: Arc<Earlier>,
    /// Ends the main thread's wait for signals.
    main: Handle,
    socket: OwnedFd,
    address: String,
    /// The identity of the socket's path.
    file: Option<FileId>,
}

/// The disks of the incoming daemon.
#[derive(Default)]
struct Theirs {
    disks: BTreeMap<String, codec::Disk>,
    /// How the data of some differ from ours.
    differences: BTreeMap<String, String>,
}

impl Outgoing {
    /// Opens the upgrade socket, or takes that of the outgoing daemon. Nobody answers there yet.
    ///
    /// # Errors
    /// The address cannot be opened.
    pub(crate) fn open(address: &str, common: &Common) -> Result<Self> {
        let path = super::socket_path(address)?;
        let opened = common::open(&common::Address::Unix(path.clone()), &common.handover)?;
        let socket = opened.into_iter().next().context("a unix socket is one")?;
        PathRights::OWN
            .give(&path)
            .with_context(|| format!("upgrade socket {address}: its mode cannot be set"))?;
        let shared = Shared {
            is_busy: Mutex::default(),
            has_left: AtomicBool::new(false),
        };
        Ok(Self {
            socket,
            shared: Arc::new(shared),
        })
    }

    /// Answers connections from now on.
    ///
    /// # Errors
    /// There is no thread or descriptor left.
    pub(crate) fn start(
        &mut self,
        engine: &Engine,
        common: &Arc<Common>,
        running: &Arc<Running>,
        earlier: &Arc<Earlier>,
        main: Handle,
    ) -> Result<()> {
        if common.handover.is_inherited(&self.socket.address()) {
            let file = common.handover.file_of(&self.socket.address());
            self.socket.own(file);
        }
        let socket = self.socket.as_fd().try_clone_to_owned()?;
        let conductor = Conductor {
            common: Arc::clone(common),
            control: engine.control(),
            running: Arc::clone(running),
            flusher: Flusher::start(engine),
            shared: Arc::clone(&self.shared),
            earlier: Arc::clone(earlier),
            main,
            socket: socket.try_clone()?,
            address: self.socket.address(),
            file: self.socket.file(),
        };
        let thread = thread::Builder::new().name("upgrade".to_owned());
        let started = thread.spawn(move || conductor.run(&UnixListener::from(socket)));
        started.context("no thread for upgrades can be made")?;
        Ok(())
    }

    /// Waits until no takeover is under way, and permits none. Returns whether another daemon has
    /// taken over.
    pub(crate) fn close(&mut self) -> bool {
        std::mem::forget(self.shared.lock());
        let has_left = self.shared.has_left();
        if has_left {
            self.socket.disown();
        }
        has_left
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, ()> {
        self.is_busy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_left(&self) -> bool {
        // Acquire: pairs with the Release where it has left.
        self.has_left.load(Ordering::Acquire)
    }
}

impl Conductor {
    fn run(self, listener: &UnixListener) {
        let mut is_failing = false;
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    is_failing = false;
                    self.answer(stream);
                }
                Err(error) => {
                    if !std::mem::replace(&mut is_failing, true) {
                        tracing::warn!("upgrade: nobody can be accepted: {error}");
                    }
                    thread::sleep(RETRY);
                }
            }
            if self.shared.has_left() {
                return;
            }
        }
    }

    fn answer(&self, stream: UnixStream) {
        let peer = Credentials::of_peer(&stream);
        let peer = peer.map_or_else(|_| "an unknown process".to_owned(), |peer| peer.to_string());
        let mut channel = match Channel::new(stream) {
            Ok(channel) => channel,
            Err(error) => return tracing::warn!("upgrade: refused: {error}"),
        };
        match self.hand_over(&mut channel, &peer) {
            Ok(held) => {
                // This daemon is not changed any more.
                std::mem::forget(held);
                self.main.close();
            }
            Err(error) => {
                tracing::warn!("upgrade: {peer} does not take over: {error:#}; this daemon goes on");
                let reason = format!("{error:#}");
                // It may be gone, or have sent a reason itself.
                let _ = channel.send(&Message::Refused { reason }, &[], ANSWER_MAX);
            }
        }
    }

    /// Hands over. Returns what keeps this daemon from being changed.
    fn hand_over(&self, channel: &mut Channel, peer: &str) -> Result<Held<'_>> {
        let version = match channel.receive(ANSWER_MAX)? {
            (Message::Hello { version }, _) if (VERSION_MIN..=VERSION).contains(&version) => version,
            (Message::Hello { version }, _) => {
                bail!(
                    "it speaks version {version} of the hand-over, this daemon {VERSION_MIN} to {VERSION}: stop this one, and \
                     start that"
                )
            }
            _ => bail!("it does not begin with a hello"),
        };
        self.running.end_commits()?;
        let changes = self.running.changes();
        channel.end_within(START_MAX);
        self.tell_what_a_start_needs(channel, version)?;
        let theirs = receive_disks(channel)?;
        // Not before: a peer that says nothing must not keep anybody from a change.
        let held = self.running.hold()?;
        if self.running.changes() != changes {
            bail!("this daemon was changed meanwhile, and the new one does not have that: try again");
        }
        let must_flush = self.check(&theirs)?;
        // While clients are served, so that little is left for later.
        self.flusher.flush(must_flush.clone(), FLUSH_MAX)?;
        let Ok(_busy) = self.shared.is_busy.try_lock() else {
            bail!("this daemon is shutting down");
        };
        let start = Instant::now();
        let taken_max = (version >= VERSION_OF_SOURCES).then_some(TAKEN_MAX);
        let handed = self.suspend_and_hand_over(channel, (&theirs, taken_max), must_flush);
        match handed {
            Ok(connections) => {
                let pause = start.elapsed();
                // Release: pairs with the Acquire in `has_left`.
                self.shared.has_left.store(true, Ordering::Release);
                tracing::info!(
                    "upgrade: {peer} has taken over {}, not served for {:.1} ms",
                    counted(connections, "connection", "connections"),
                    pause.as_secs_f64() * 1e3
                );
                Ok(held)
            }
            Err(error) => {
                self.common.handover.resume();
                Err(error.context(format!("clients were not served for {:?}", start.elapsed())))
            }
        }
    }

    /// Sends locks and sockets: without them another daemon could not open its disks and addresses.
    fn tell_what_a_start_needs(&self, channel: &mut Channel, version: u32) -> Result<()> {
        let handover = &self.common.handover;
        let welcome = Message::Welcome {
            version,
            instance: handover.instance(),
        };
        channel.send(&welcome, &[], ANSWER_MAX)?;
        let mut count = 0;
        if version >= VERSION_OF_SOURCES {
            let (document, config) = self.running.description();
            let described = (&document, &*config);
            let disks = (&self.control, self.running.keyring());
            for source in sources::of_running(described, disks, &handover.disks())? {
                channel.send(&Message::Source(source), &[], ANSWER_MAX)?;
                count += 1;
            }
        }
        if version >= VERSION_OF_KEYS {
            for (disk, key) in self.running.keyring().keys()? {
                let memory =
                    keys::sealed(&key).context("the key of an encrypted disk cannot be handed over")?;
                channel.send(&Message::Key { disk }, &[memory.as_fd()], ANSWER_MAX)?;
                count += 1;
            }
        }
        for disk in self.leaves() {
            let state = self.control.device(disk.queue)?.handover_state(disk.id)?;
            if let Some(obstacle) = state.obstacle.filter(|_| state.is_exclusive) {
                // Refused now, before the other daemon waits in vain.
                bail!(
                    "disk {}: {obstacle}; remove the disk, or restart the daemon",
                    disk.name
                );
            }
            for lock in state.locks {
                channel.send(&Message::Lock, &[lock.as_fd()], ANSWER_MAX)?;
                count += 1;
            }
        }
        let own = codec::Socket {
            door: DOOR.to_owned(),
            address: self.address.clone(),
            origin: Origin::Daemon,
        };
        let mut sockets = handover.sockets()?;
        sockets.push((own, self.socket.try_clone()?));
        for (named, socket) in sockets {
            channel.send(&Message::Socket(named), &[socket.as_fd()], ANSWER_MAX)?;
            count += 1;
        }
        if version >= VERSION_OF_SOURCES {
            let own = self.file.map(|file| (self.address.clone(), file));
            for (address, file) in handover.paths().into_iter().chain(own) {
                channel.send(&Message::Path { address, file }, &[], ANSWER_MAX)?;
                count += 1;
            }
        }
        channel.send(&Message::End { count }, &[], ANSWER_MAX)?;
        Ok(())
    }

    /// The disks that lie on drives.
    fn leaves(&self) -> Vec<Disk> {
        let disks = self.control.disks();
        disks
            .iter()
            .filter(|disk| disk.queue != MAPPED)
            .cloned()
            .collect()
    }

    /// Compares the disks that have clients. Returns those that have to be flushed for another
    /// daemon.
    fn check(&self, theirs: &Theirs) -> Result<Vec<Disk>> {
        let connected = self.common.handover.disks();
        let disks = self.control.disks();
        for disk in disks.iter().filter(|disk| connected.contains(&disk.name)) {
            compare(disk, theirs)?;
        }
        let mut must_flush = Vec::new();
        for disk in self.leaves() {
            let state = self.control.device(disk.queue)?.handover_state(disk.id)?;
            if let Some(obstacle) = state.obstacle {
                if connected.contains(&disk.name) || disk.used_by.is_some() {
                    bail!(
                        "disk {}: {obstacle}; disconnect its clients, or restart the daemon",
                        disk.name
                    );
                }
                tracing::warn!(
                    disk = disk.name,
                    "upgrade: disk {}: {obstacle}, and ends with it",
                    disk.name
                );
            }
            let losses = disk.losses();
            if losses.count != losses.seen {
                bail!(
                    "disk {}: writes may be lost, and no client has heard of it yet: wait for a flush of its client",
                    disk.name
                );
            }
            if state.must_flush && !disk.read_only {
                must_flush.push(disk.clone());
            }
        }
        Ok(must_flush)
    }

    /// Stops all members, and hands over. Returns the number of connections. On error nobody else
    /// serves them.
    fn suspend_and_hand_over(
        &self,
        channel: &mut Channel,
        (theirs, taken_max): (&Theirs, Option<Duration>),
        must_flush: Vec<Disk>,
    ) -> Result<usize> {
        let handover = &self.common.handover;
        channel.end_within(HAND_OVER_MAX);
        handover.suspend();
        // Requests that wait for a cap would delay the stop: they are dispatched at once, and the
        // group owes them to the other daemon's caps.
        let queues = self.control.queues().into_iter();
        let lifted = queues.map(|(queue, _)| self.control.lift_caps(queue));
        let _uncapped: Vec<Uncapped> = lifted.collect::<Result<_, _>>()?;
        handover.wait_until_settled(STOP_MAX)?;
        // Clients may have selected a disk since.
        self.check(theirs)?;
        self.flusher.flush(must_flush, STOP_MAX)?;
        self.prepare_drives()?;
        let saved = handover.take_saved();
        let count = saved.len();
        for one in saved {
            let session = codec::Session {
                door: one.door.to_owned(),
                address: one.address,
                body: one.body,
            };
            let fds: Vec<_> = one.fds.iter().map(|fd| fd.as_fd()).collect();
            channel.send(&Message::Session(session), &fds, ANSWER_MAX)?;
        }
        self.send_statistics(channel)?;
        let end = Message::End { count: count as u32 };
        channel.send(&end, &[], ANSWER_MAX)?;
        match channel.receive(ANSWER_MAX)? {
            (Message::Ready, _) => {}
            _ => bail!("it is not ready"),
        }
        channel.send(&Message::Go, &[], ANSWER_MAX)?;
        channel.end_within(None);
        wait_until_taken(channel, taken_max)?;
        Ok(count)
    }
}

impl Conductor {
    /// Has drives write what another daemon has to find there. One that does not answer is not waited for: this daemon goes on.
    fn prepare_drives(&self) -> Result<()> {
        let mut drives = Vec::new();
        for disk in self.leaves() {
            drives.push((self.control.device(disk.queue)?, disk.id));
        }
        let (end, ended) = mpsc::sync_channel(1);
        let prepare = move || {
            drives
                .iter()
                .for_each(|(device, disk)| device.prepare_handover(*disk));
            // Nobody may wait any more.
            let _ = end.send(());
        };
        let thread = thread::Builder::new().name("handover".to_owned());
        thread
            .spawn(prepare)
            .context("no thread for drives can be made")?;
        let prepared = ended.recv_timeout(STOP_MAX);
        prepared.with_context(|| {
            format!("a drive has not written what only this process knows within {STOP_MAX:?}")
        })
    }

    /// Sends the statistics of each group, including those from before this daemon took over; its
    /// debts to its caps, and what the scheduler has learnt of it.
    fn send_statistics(&self, channel: &mut Channel) -> Result<()> {
        for (number, queue) in self.control.queues() {
            for (group, id) in self.control.groups(number) {
                let at = (queue.name().to_owned(), group.to_string());
                let mut stats = queue.group_stats(id);
                self.earlier
                    .get(&at)
                    .into_iter()
                    .for_each(|before| stats.add(before));
                let debts = self.control.group_debts(number, &at.1)?;
                let learnt = self.control.group_learnt(number, &at.1)?;
                if stats.total().ios == 0 && debts == Debts::default() && learnt.is_empty() {
                    continue;
                }
                let statistics = codec::Statistics {
                    queue: at.0,
                    group: at.1,
                    counts: stats.counts(),
                    debts: debts.to_vec(),
                    scheduler: queue.elevator().name.to_owned(),
                    learnt,
                };
                channel.send(&Message::Statistics(statistics), &[], ANSWER_MAX)?;
            }
        }
        Ok(())
    }
}

/// Receives the other daemon's disks; it opens them meanwhile, which may take long.
fn receive_disks(channel: &mut Channel) -> Result<Theirs> {
    channel.end_within(OPEN_MAX);
    let mut theirs = Theirs::default();
    loop {
        match channel.receive(OPEN_MAX)? {
            (Message::Disk(disk), _) if theirs.disks.len() < DISKS_MAX => {
                theirs.disks.insert(disk.name.clone(), disk);
            }
            (Message::Differs(other), _) if theirs.differences.len() < DISKS_MAX => {
                theirs.differences.insert(other.disk, other.how);
            }
            (Message::Take, _) => return Ok(theirs),
            _ => bail!("it says something else than its disks"),
        }
    }
}

/// Checks that a disk there matches what its clients were told.
fn compare(ours: &Disk, theirs: &Theirs) -> Result<()> {
    let name = &ours.name;
    let differs = |what: &str, ours: &dyn std::fmt::Display, theirs: &dyn std::fmt::Display| {
        anyhow!("disk {name}: it has clients, with {what} {ours}, and {theirs} in the new configuration")
    };
    if let Some(how) = theirs.differences.get(name) {
        return Err(sources::refusal(name, how));
    }
    let Some(theirs) = theirs.disks.get(name) else {
        bail!("disk {name}: it has clients, and is not in the new configuration");
    };
    if theirs.size != ours.size {
        return Err(differs("a size of", &ours.size, &theirs.size));
    }
    if theirs.block_size != ours.block_size {
        return Err(differs("blocks of", &ours.block_size, &theirs.block_size));
    }
    if theirs.read_only && !ours.read_only {
        bail!("disk {name}: it has clients that may write, and is read-only in the new configuration");
    }
    Ok(())
}

/// How long requests in flight may take to end.
const STOP_MAX: Duration = Duration::from_secs(2);
/// How long disks may take to be flushed while clients are served.
const FLUSH_MAX: Duration = Duration::from_secs(30);
/// How long all messages may take while no client is served, requests in flight and flushes included.
const HAND_OVER_MAX: Duration = Duration::from_secs(20);
/// How long the other daemon may take to open its disks.
const OPEN_MAX: Duration = Duration::from_secs(120);
/// How long the other daemon may take to report that it serves, when all is ready.
const TAKEN_MAX: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_millis(100);
const DISKS_MAX: usize = 1 << 16;
