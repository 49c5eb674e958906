//! The server of the control socket, with limits for each client: a thread of its own, a line of at most 1
//! MiB, and some seconds to take its answers. Who is too slow is hung up on; whatever a client does, others
//! and the reactors do not notice.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::mem;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blkmq_config::Control;
use blkmq_export::common::{OwnedPath, PathRights};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg};
use rustix::process::{Signal, getpid, kill_process};
use serde_json::Value;
use zeroize::{Zeroize, Zeroizing};

use super::methods::{self, Session};
use super::protocol::{self, Failure, NO_JSON, NO_METHOD};
use super::readings::Readings;
use super::roles::{Admitted, Roles};
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
    /// Listens at `path`, and serves those who have a role in the configuration.
    ///
    /// # Errors
    /// If there can be no such socket, or another daemon has it.
    pub(crate) fn start(path: &Path, config: &Control, daemon: Arc<Daemon>) -> Result<Self> {
        let roles = Arc::new(Roles::new(config));
        let (listener, owned) =
            listen_for(path, &roles).with_context(|| format!("control socket {}", path.display()))?;
        Self::spawn(Some(owned), move |state| {
            accept(&listener, &roles, &daemon, state)
        })
    }

    /// The same, as soon as the daemon that is taken over has let go of the socket.
    ///
    /// # Errors
    /// If there can be no thread for it.
    pub(crate) fn start_later(path: &Path, config: &Control, daemon: Arc<Daemon>) -> Result<Self> {
        let (at, roles) = (path.to_owned(), Arc::new(Roles::new(config)));
        Self::spawn(None, move |state| {
            let start = Instant::now();
            while !state.is_over.load(Ordering::Acquire) {
                match listen_for(&at, &roles) {
                    Ok((listener, owned)) => {
                        *state.path() = Some(owned);
                        return accept(&listener, &roles, &daemon, state);
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

fn listen_for(path: &Path, roles: &Roles) -> Result<(UnixListener, OwnedPath)> {
    // A path without a directory is in the one where the daemon was started.
    let is_missing = |dir: &&Path| !dir.as_os_str().is_empty() && !dir.exists();
    if let Some(dir) = path.parent().filter(is_missing) {
        std::fs::DirBuilder::new()
            .mode(0o755)
            .create(dir)
            .with_context(|| format!("its directory {} cannot be made", dir.display()))?;
    }
    let rights = PathRights {
        mode: roles.mode(),
        ..PathRights::OWN
    };
    listen::listen(path, |made| Ok(rights.give(made)?))
}

fn accept(listener: &UnixListener, roles: &Arc<Roles>, daemon: &Arc<Daemon>, state: &State) {
    if let Err(error) = listener.set_nonblocking(true) {
        return tracing::error!("control: nobody can be accepted: {error}");
    }
    let mut is_failing = false;
    while !state.is_over.load(Ordering::Acquire) {
        match listener.accept() {
            Ok((stream, _)) => {
                is_failing = false;
                serve(stream, roles, daemon);
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

/// Gives a client a thread, if it has a role and there is room.
fn serve(stream: UnixStream, roles: &Arc<Roles>, daemon: &Arc<Daemon>) {
    let admitted = match roles.admit(&stream) {
        Ok(admitted) => admitted,
        Err(failure) => {
            let _ = stream.set_nonblocking(true);
            let _ = (&stream).write_all(protocol::answer(&Value::Null, Err(failure)).as_bytes());
            return;
        }
    };
    let daemon = Arc::clone(daemon);
    let thread = thread::Builder::new()
        .name("control".to_owned())
        .stack_size(STACK_BYTES);
    let started = thread.spawn(move || {
        let ended = Client::new(stream).and_then(|client| client.run(admitted, &daemon));
        if let Err(error) = ended {
            tracing::debug!("control: a client is lost: {error}");
        }
    });
    if let Err(error) = started {
        tracing::warn!("control: no thread for a client: {error}");
    }
}

/// One client.
struct Client {
    stream: UnixStream,
    /// What came of a line that has not ended. It may have a passphrase, and is wiped.
    input: Zeroizing<Vec<u8>>,
}

impl Client {
    fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        Ok(Self {
            stream,
            input: Zeroizing::default(),
        })
    }

    fn run(mut self, admitted: Admitted, daemon: &Daemon) -> io::Result<()> {
        let mut session = Session::new(admitted);
        loop {
            if self.wait(session.next_tick())? {
                let mut piece = [0; 16 << 10];
                let len = self.stream.read(&mut piece)?;
                if len == 0 {
                    return Ok(());
                }
                self.keep(&piece[..len]);
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

    /// Adds bytes to the input. What it had elsewhere before is wiped.
    fn keep(&mut self, piece: &[u8]) {
        let len = self.input.len() + piece.len();
        if len > self.input.capacity() {
            let mut larger = Zeroizing::new(Vec::with_capacity(len.next_power_of_two()));
            larger.extend_from_slice(&self.input);
            self.input = larger;
        }
        self.input.extend_from_slice(piece);
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
        let mut rest = &mut input[..];
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let line;
            (line, rest) = rest.split_at_mut(end + 1);
            if !line.trim_ascii().is_empty()
                && let Some(answer) = answer(line, daemon, session)
            {
                self.send_with(answer.as_bytes(), session.take_descriptor())?;
            }
        }
        let left = rest.len();
        let taken = input.len() - left;
        input.copy_within(taken.., 0);
        input[left..].zeroize();
        input.truncate(left);
        if input.len() > LINE_MAX {
            let failure = Failure::new(NO_JSON, format!("a line has at most {LINE_MAX} bytes"));
            let _ = self.send(protocol::answer(&Value::Null, Err(failure)).as_bytes());
            return Err(io::Error::other("a line that is too long"));
        }
        self.input = input;
        Ok(())
    }
}

/// Does what a line asks for, and wipes it before that, since what it asks for may take long. Returns the answer,
/// if one is wanted.
fn answer(line: &mut [u8], daemon: &Daemon, session: &mut Session) -> Option<String> {
    let request = protocol::parse(line);
    line.zeroize();
    let request = match request {
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

/// How long a daemon that is taken over may keep its socket.
const FREE_MAX: Duration = Duration::from_secs(20);
const TRY_AGAIN: Duration = Duration::from_millis(20);
/// Bytes of a request.
pub(crate) const LINE_MAX: usize = 1 << 20;
/// How long a client may take to read what it has asked for.
const WRITE_MAX: Duration = Duration::from_secs(5);
/// How soon the end of the daemon is noticed.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// What the deepest request needs, several times over.
const STACK_BYTES: usize = 1 << 20;
