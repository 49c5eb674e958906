//! The server for readers of metrics, with limits for them: one thread for all of them, a slot each, a
//! request of at most 8 KiB, and some seconds. A client that is silent, or reads byte by byte, delays nobody.

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blkmq_config::Detail;
use blkmq_export::common::{OwnedPath, PathRights, listen_at_port};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::Place;
use super::collect;
use super::http::{self, Asked, Parsed};
use crate::control::Daemon;
use crate::listen;

/// An address where metrics are read, until this is dropped.
pub(crate) struct Server {
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// The socket's path, as soon as it is ours.
    path: Mutex<Option<OwnedPath>>,
    is_over: AtomicBool,
}

enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Server {
    /// Listens, and answers requests. With `later`, as soon as the outgoing daemon has released the
    /// address.
    ///
    /// # Errors
    /// It cannot listen there.
    pub(crate) fn start((place, detail): (Place, Detail), daemon: Arc<Daemon>, later: bool) -> Result<Self> {
        let state = Arc::<State>::default();
        let listeners = if later { None } else { Some(state.listen(&place)?) };
        let of_thread = Arc::clone(&state);
        let thread = thread::Builder::new().name("metrics".to_owned());
        let serve = move || {
            let start = Instant::now();
            let mut listeners = listeners;
            while listeners.is_none() && !of_thread.is_over() {
                match of_thread.listen(&place) {
                    Ok(opened) => listeners = Some(opened),
                    Err(error) if start.elapsed() > FREE_MAX => return tracing::warn!("metrics: {error:#}"),
                    Err(_) => thread::sleep(TRY_AGAIN),
                }
            }
            if let Some(listeners) = listeners {
                serve(&listeners, (&daemon, detail), &of_thread);
            }
        };
        thread.spawn(serve).context("no thread for metrics can be made")?;
        Ok(Self { state })
    }
}

impl State {
    fn path(&self) -> MutexGuard<'_, Option<OwnedPath>> {
        self.path.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listen(&self, place: &Place) -> Result<Vec<Listener>> {
        let (listeners, path) = listen_there(place)?;
        *self.path() = path;
        Ok(listeners)
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The path first: the next daemon finds it free, and keeps it.
        *self.state.path() = None;
        self.state.is_over.store(true, Ordering::Release);
    }
}

fn listen_there(place: &Place) -> Result<(Vec<Listener>, Option<OwnedPath>)> {
    match place {
        Place::Unix(path) => {
            let whose = |path: &std::path::Path| {
                let rights = PathRights {
                    mode: 0o660,
                    ..PathRights::OWN
                };
                Ok(rights.give(path)?)
            };
            let (listener, owned) = listen::listen(path, whose)
                .with_context(|| format!("metrics address unix:{}", path.display()))?;
            listener.set_nonblocking(true)?;
            Ok((vec![Listener::Unix(listener)], Some(owned)))
        }
        Place::Tcp(all) => {
            let mut opened = Vec::new();
            for at in all {
                match listen_at_port(*at) {
                    Ok(listener) => opened.push(listener),
                    // A host without IPv6 has one loopback.
                    Err(_) if !opened.is_empty() => {}
                    Err(error) => return Err(error).with_context(|| format!("metrics address tcp:{at}")),
                }
            }
            opened
                .iter()
                .try_for_each(|listener| listener.set_nonblocking(true))?;
            Ok((opened.into_iter().map(Listener::Tcp).collect(), None))
        }
    }
}

impl Listener {
    /// Accepts the next connection, if there is one.
    fn accept(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Unix(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true)?;
                Ok(stream.into())
            }
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true)?;
                Ok(stream.into())
            }
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

fn serve(listeners: &[Listener], what: (&Daemon, Detail), state: &State) {
    let mut clients: Vec<Client> = Vec::with_capacity(CLIENTS_MAX);
    while !state.is_over() {
        wait(listeners, &clients);
        clients.retain(|client| client.since.elapsed() < CLIENT_MAX);
        for listener in listeners {
            accept_all(listener, &mut clients);
        }
        clients.retain_mut(|client| match client.go_on(what) {
            Ok(is_there) => is_there,
            Err(error) => {
                tracing::debug!("metrics: a client is lost: {error}");
                false
            }
        });
    }
}

/// Waits until a client connects or can continue; with a limit, since a client's time may end, or
/// the daemon.
fn wait(listeners: &[Listener], clients: &[Client]) {
    let mut fds: Vec<PollFd<'_>> = clients.iter().map(Client::awaits).collect();
    if has_room(clients) {
        let listeners = listeners.iter();
        fds.extend(listeners.map(|listener| PollFd::from_borrowed_fd(listener.fd(), PollFlags::IN)));
    }
    let _ = poll(&mut fds, Some(&LOOK_AGAIN.try_into().expect("it fits")));
}

/// Returns whether one more can be accepted: a slot is free, or a silent client has one.
fn has_room(clients: &[Client]) -> bool {
    clients.len() < CLIENTS_MAX || clients.iter().any(|client| !client.has_asked())
}

fn accept_all(listener: &Listener, clients: &mut Vec<Client>) {
    // Limited in number, so that present clients continue in between.
    for _ in 0..CLIENTS_MAX {
        if !has_room(clients) {
            return;
        }
        match listener.accept() {
            Ok(fd) => {
                if clients.len() == CLIENTS_MAX {
                    // In the order of arrival: the first of them has had the longest time to send a
                    // request.
                    let silent = clients.iter().position(|client| !client.has_asked());
                    silent.map(|index| clients.remove(index));
                }
                clients.push(Client::new(fd));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => {
                tracing::debug!("metrics: nobody can be accepted: {error}");
                // It would be logged again at once.
                return thread::sleep(TRY_AGAIN);
            }
        }
    }
}

/// A client, which reads metrics once.
struct Client {
    fd: OwnedFd,
    since: Instant,
    request: Vec<u8>,
    /// The rest of the response to be sent; empty until the whole request has arrived.
    answer: Vec<u8>,
    sent: usize,
}

impl Client {
    fn new(fd: OwnedFd) -> Self {
        Self {
            fd,
            since: Instant::now(),
            request: Vec::new(),
            answer: Vec::new(),
            sent: 0,
        }
    }

    fn awaits(&self) -> PollFd<'_> {
        let what = match self.has_asked() {
            true => PollFlags::OUT,
            false => PollFlags::IN,
        };
        PollFd::new(&self.fd, what)
    }

    fn has_asked(&self) -> bool {
        !self.answer.is_empty()
    }

    /// Does what can be done without blocking. Returns whether something is left.
    fn go_on(&mut self, what: (&Daemon, Detail)) -> io::Result<bool> {
        while !self.has_asked() {
            let mut piece = [0; 1024];
            let len = match recv(&self.fd, &mut piece, RecvFlags::empty()) {
                Ok((len, _)) => len,
                Err(Errno::AGAIN) => return Ok(true),
                Err(errno) => return Err(errno.into()),
            };
            self.request.extend_from_slice(&piece[..len]);
            match http::parse(&self.request) {
                Parsed::Asked(asked) => self.answer = answer(&asked, what),
                Parsed::More if len > 0 && self.request.len() < REQUEST_MAX => {}
                Parsed::More | Parsed::Bad => {
                    self.answer =
                        http::answer("400 Bad Request", http::PLAIN, "no request that is understood\n");
                }
            }
        }
        while self.sent < self.answer.len() {
            match send(&self.fd, &self.answer[self.sent..], SendFlags::NOSIGNAL) {
                Ok(len) => self.sent += len,
                Err(Errno::AGAIN) => return Ok(true),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(false)
    }
}

fn answer(asked: &Asked, (daemon, mut detail): (&Daemon, Detail)) -> Vec<u8> {
    if asked.path != "/metrics" {
        return http::answer("404 Not Found", http::PLAIN, "metrics are at /metrics\n");
    }
    if asked.method != http::METHOD {
        return http::not_allowed();
    }
    for (key, value) in &asked.query {
        if let Err(error) = detail.set(key, value) {
            return http::answer("400 Bad Request", http::PLAIN, format!("{error}\n"));
        }
    }
    // A fault in what is read ends this answer, and not the thread that serves all.
    let read = catch_unwind(AssertUnwindSafe(|| collect::text(daemon, asked.form, detail)));
    match read {
        Ok(Ok(text)) => http::answer("200 OK", http::content_type(asked.form), text),
        _ => http::answer(
            "500 Internal Server Error",
            http::PLAIN,
            "metrics cannot be written\n",
        ),
    }
}

/// Bytes of a request.
const REQUEST_MAX: usize = 8 << 10;
/// Time for one client.
const CLIENT_MAX: Duration = Duration::from_secs(5);
/// Most clients at a time.
const CLIENTS_MAX: usize = 16;
/// How soon the end of the daemon, or of a client's time, is noticed.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// How long an outgoing daemon may keep the address.
const FREE_MAX: Duration = Duration::from_secs(20);
const TRY_AGAIN: Duration = Duration::from_millis(20);
