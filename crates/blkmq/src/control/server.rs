//! The server of the control socket, with limits for each client: a thread of its own, a line of at most 1
//! MiB, and some seconds to take its answers. Who is too slow is hung up on; whatever a client does, others
//! and the reactors do not notice.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::mem;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blkmq_export::common::{Credentials, OwnedPath, accounts};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg};
use rustix::process::{Signal, getpid, kill_process};
use serde_json::Value;
use zeroize::Zeroize;

use super::methods::{self, Access, Session};
use super::protocol::{self, Failure, NO_JSON, NO_METHOD};
use super::readings::Readings;
use crate::listen;
use crate::log::Log;
use crate::serve::running::Running;
use crate::serve::upgrade::Earlier;

/// A control socket that is served, until this is dropped.
pub(crate) struct Server {
    state: Arc<State>,
}

/// What a server and its thread share.
#[derive(Default)]
struct State {
    /// The socket's path, as soon as it is ours.
    path: Mutex<Option<OwnedPath>>,
    is_over: AtomicBool,
}

impl State {
    fn path(&self) -> MutexGuard<'_, Option<OwnedPath>> {
        self.path.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What clients ask about.
pub(crate) struct Daemon {
    pub(crate) running: Arc<Running>,
    /// What groups did before this daemon took over.
    pub(crate) earlier: Arc<Earlier>,
    pub(crate) readings: Readings,
    pub(crate) log: Log,
    pub(crate) started: Instant,
    /// A client has asked for its end.
    pub(crate) is_draining: AtomicBool,
}

impl Daemon {
    /// Has the daemon shut down as by SIGTERM. A second signal would end it at once, so there is one, whoever asks again.
    fn drain(&self) {
        // Relaxed: it says nothing of other memory.
        if self.is_draining.swap(true, Ordering::Relaxed) {
            return;
        }
        tracing::info!("control: asked to shut down");
        if let Err(error) = kill_process(getpid(), Signal::TERM) {
            tracing::error!("control: the daemon cannot be shut down: {error}");
        }
    }
}

impl Server {
    /// Listens at `path`, and serves whoever may connect. `readers` is a group of the system whose members may read.
    ///
    /// # Errors
    /// If there can be no such socket, or another daemon has it.
    pub(crate) fn start(path: &Path, readers: Option<&str>, daemon: Arc<Daemon>) -> Result<Self> {
        let (listener, owned) =
            listen_for(path, readers).with_context(|| format!("control socket {}", path.display()))?;
        Self::spawn(Some(owned), move |state| accept(&listener, &daemon, state))
    }

    /// The same, as soon as the daemon that is taken over has let go of the socket.
    ///
    /// # Errors
    /// If there can be no thread for it.
    pub(crate) fn start_later(path: &Path, readers: Option<String>, daemon: Arc<Daemon>) -> Result<Self> {
        let at = path.to_owned();
        Self::spawn(None, move |state| {
            let start = Instant::now();
            while !state.is_over.load(Ordering::Acquire) {
                match listen_for(&at, readers.as_deref()) {
                    Ok((listener, owned)) => {
                        *state.path() = Some(owned);
                        return accept(&listener, &daemon, state);
                    }
                    Err(error) if start.elapsed() > FREE_MAX => {
                        return tracing::warn!("control socket {}: {error:#}", at.display());
                    }
                    Err(_) => thread::sleep(TRY_AGAIN),
                }
            }
        })
    }

    fn spawn(path: Option<OwnedPath>, serve: impl FnOnce(&State) + Send + 'static) -> Result<Self> {
        let state = Arc::<State>::default();
        *state.path() = path;
        let of_thread = Arc::clone(&state);
        let thread = thread::Builder::new().name("control".to_owned());
        thread
            .spawn(move || serve(&of_thread))
            .context("no thread for the control socket can be made")?;
        Ok(Self { state })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The path first: whoever comes next finds it free, and keeps it.
        *self.state.path() = None;
        self.state.is_over.store(true, Ordering::Release);
    }
}

fn listen_for(path: &Path, readers: Option<&str>) -> Result<(UnixListener, OwnedPath)> {
    // A path without a directory is in the one where the daemon was started.
    let is_missing = |dir: &&Path| !dir.as_os_str().is_empty() && !dir.exists();
    if let Some(dir) = path.parent().filter(is_missing) {
        std::fs::DirBuilder::new()
            .mode(0o755)
            .create(dir)
            .with_context(|| format!("its directory {} cannot be made", dir.display()))?;
    }
    listen::listen(path, |made| prepare(made, readers))
}

fn prepare(path: &Path, readers: Option<&str>) -> Result<()> {
    let mode = match readers {
        Some(name) => {
            let group = group_number(name)?;
            std::os::unix::fs::chown(path, None, Some(group))
                .with_context(|| format!("readers = {name:?}: the socket cannot be given to that group"))?;
            0o660
        }
        None => 0o600,
    };
    Ok(std::fs::set_permissions(path, PermissionsExt::from_mode(mode))?)
}

/// The number of a group of the system.
fn group_number(name: &str) -> Result<u32> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    accounts::group(name)
        .with_context(|| format!("readers = {name:?} rejected: the system has no such group"))
}

fn accept(listener: &UnixListener, daemon: &Arc<Daemon>, state: &State) {
    let clients = Arc::new(AtomicU32::new(0));
    if let Err(error) = listener.set_nonblocking(true) {
        return tracing::error!("control: nobody can be accepted: {error}");
    }
    let mut is_failing = false;
    while !state.is_over.load(Ordering::Acquire) {
        match listener.accept() {
            Ok((stream, _)) => {
                is_failing = false;
                serve(stream, daemon, &clients);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let mut fds = [PollFd::new(listener, PollFlags::IN)];
                let _ = poll(&mut fds, Some(&LOOK_AGAIN.try_into().expect("a second fits")));
            }
            Err(error) => {
                if !mem::replace(&mut is_failing, true) {
                    tracing::warn!("control: nobody can be accepted: {error}");
                }
                thread::sleep(LOOK_AGAIN);
            }
        }
    }
}

/// Gives a client a thread, if there are not too many.
fn serve(stream: UnixStream, daemon: &Arc<Daemon>, clients: &Arc<AtomicU32>) {
    let max = match access_of(&stream) {
        Ok(Access::All) => CLIENTS_MAX,
        // The others are left to the owner.
        _ => READERS_MAX,
    };
    // Relaxed: a count; only this thread adds.
    if clients.load(Ordering::Relaxed) >= max {
        let failure = Failure::new(protocol::REFUSED, format!("{max} clients are connected already"));
        let _ = stream.set_nonblocking(true);
        let _ = (&stream).write_all(protocol::answer(&Value::Null, Err(failure)).as_bytes());
        return;
    }
    clients.fetch_add(1, Ordering::Relaxed);
    let (daemon, counted) = (Arc::clone(daemon), Arc::clone(clients));
    let thread = thread::Builder::new()
        .name("control".to_owned())
        .stack_size(STACK_BYTES);
    let started = thread.spawn(move || {
        let ended = Client::new(stream).and_then(|client| client.run(&daemon));
        if let Err(error) = ended {
            tracing::debug!("control: a client is lost: {error}");
        }
        counted.fetch_sub(1, Ordering::Relaxed);
    });
    if let Err(error) = started {
        clients.fetch_sub(1, Ordering::Relaxed);
        tracing::warn!("control: no thread for a client: {error}");
    }
}

/// What a client may do: everything, if it is the daemon's user or root.
fn access_of(stream: &UnixStream) -> io::Result<Access> {
    let peer = Credentials::of_peer(stream)?;
    let is_owner = peer.user == ROOT || peer.user == rustix::process::geteuid().as_raw();
    Ok(if is_owner { Access::All } else { Access::Read })
}

/// One client.
struct Client {
    stream: UnixStream,
    access: Access,
    /// What came of a line that has not ended.
    input: Vec<u8>,
}

impl Client {
    fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        Ok(Self {
            access: access_of(&stream)?,
            stream,
            input: Vec::new(),
        })
    }

    fn run(mut self, daemon: &Daemon) -> io::Result<()> {
        let mut session = Session::new(self.access);
        loop {
            if self.wait(session.next_tick())? {
                let mut piece = [0; 16 << 10];
                let len = self.stream.read(&mut piece)?;
                if len == 0 {
                    return Ok(());
                }
                self.input.extend_from_slice(&piece[..len]);
                piece[..len].zeroize();
                let taken = self.take_lines(daemon, &mut session);
                // After the answer, and also if nobody takes it.
                if session.drains() {
                    daemon.drain();
                }
                taken?;
            }
            if let Some(told) = session.tick(daemon) {
                let line = protocol::notification("statistics", &told)?;
                self.send(line.as_bytes())?;
            }
        }
    }

    /// Sends all of it, within the time that a client has for that.
    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.send_with(bytes, None)
    }

    /// The same, with a descriptor.
    fn send_with(&self, mut bytes: &[u8], mut file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let end = Instant::now() + WRITE_MAX;
        while !bytes.is_empty() {
            match self.send_some(bytes, file) {
                Ok(len) => (bytes, file) = (&bytes[len..], None),
                Err(Errno::AGAIN) if Instant::now() < end => {
                    self.wait_for(PollFlags::OUT, Some(end))?;
                }
                Err(Errno::AGAIN) => return Err(ErrorKind::TimedOut.into()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn send_some(&self, bytes: &[u8], file: Option<BorrowedFd<'_>>) -> Result<usize, Errno> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let Some(file) = file else {
            return send(&self.stream, bytes, flags);
        };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files = [file];
        control.push(SendAncillaryMessage::ScmRights(&files));
        sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, flags)
    }

    /// Waits for bytes, or until `tick`. Says whether there are some.
    fn wait(&self, tick: Option<Instant>) -> io::Result<bool> {
        self.wait_for(PollFlags::IN, tick)
    }

    fn wait_for(&self, what: PollFlags, end: Option<Instant>) -> io::Result<bool> {
        let timeout = end.map(|at| at.saturating_duration_since(Instant::now()).try_into());
        let timeout = timeout.transpose().map_err(io::Error::other)?;
        let mut fds = [PollFd::from_borrowed_fd(self.stream.as_fd(), what)];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(ready) => Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    fn take_lines(&mut self, daemon: &Daemon, session: &mut Session) -> io::Result<()> {
        let mut input = std::mem::take(&mut self.input);
        let mut rest = &input[..];
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let line = rest[..end].trim_ascii();
            rest = &rest[end + 1..];
            if !line.is_empty()
                && let Some(answer) = answer(line, daemon, session)
            {
                self.send_with(answer.as_bytes(), session.take_descriptor())?;
            }
        }
        let taken = input.len() - rest.len();
        // A line may have had a passphrase.
        input[..taken].zeroize();
        input.drain(..taken);
        if input.len() > LINE_MAX {
            let failure = Failure::new(NO_JSON, format!("a line has at most {LINE_MAX} bytes"));
            let _ = self.send(protocol::answer(&Value::Null, Err(failure)).as_bytes());
            return Err(io::Error::other("a line that is too long"));
        }
        self.input = input;
        Ok(())
    }
}

/// Does what a line asks for. Returns the answer, if one is wanted.
fn answer(line: &[u8], daemon: &Daemon, session: &mut Session) -> Option<String> {
    let request = match protocol::parse(line) {
        Ok(request) => request,
        Err((failure, id)) => return Some(protocol::answer(&id, Err(failure))),
    };
    let done = match methods::find(&request.method) {
        Some(method) => session.call(method, request.params, daemon),
        None => {
            let what = format!(
                "there is no method {:?}; daemon.methods lists them",
                request.method
            );
            Err(Failure::new(NO_METHOD, what))
        }
    };
    request.id.map(|id| protocol::answer(&id, done))
}

const ROOT: u32 = 0;
/// How long a daemon that is taken over may keep its socket.
const FREE_MAX: Duration = Duration::from_secs(20);
const TRY_AGAIN: Duration = Duration::from_millis(20);
/// Clients at a time.
const CLIENTS_MAX: u32 = 128;
/// Of these, how many may be taken when one comes that may only read.
const READERS_MAX: u32 = 96;
/// Bytes of a request.
pub(crate) const LINE_MAX: usize = 1 << 20;
/// How long a client may take to read what it has asked for.
const WRITE_MAX: Duration = Duration::from_secs(5);
/// How soon the end of the daemon is noticed.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// What the deepest request needs, several times over.
const STACK_BYTES: usize = 1 << 20;
