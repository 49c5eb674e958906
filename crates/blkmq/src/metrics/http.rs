//! Decides what one who reads metrics costs: a connection at a time, a request of at most 8 KiB, and some seconds for it.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blkmq_export::common::{listen_at, remove_stale};
use rustix::event::{PollFd, PollFlags, poll};

use super::Place;
use super::collect::{self, Form};
use crate::control::Daemon;

/// An address where metrics are read, until this is dropped.
pub(crate) struct Server {
    state: Arc<State>,
    path: Option<PathBuf>,
}

#[derive(Default)]
struct State {
    is_open: AtomicBool,
    is_over: AtomicBool,
}

enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Server {
    /// Listens, and answers whoever asks. With `later`, as soon as the daemon that is taken over has let go of the address.
    ///
    /// # Errors
    /// If nobody can listen there.
    pub(crate) fn start(place: Place, daemon: Arc<Daemon>, later: bool) -> Result<Self> {
        let state = Arc::<State>::default();
        let path = match &place {
            Place::Unix(path) => Some(path.clone()),
            Place::Tcp(_) => None,
        };
        let listener = if later { None } else { Some(listen(&place)?) };
        let of_thread = Arc::clone(&state);
        let thread = thread::Builder::new().name("metrics".to_owned());
        let serve = move || {
            let start = Instant::now();
            let mut listener = listener;
            while listener.is_none() && !of_thread.is_over() {
                match listen(&place) {
                    Ok(opened) => listener = Some(opened),
                    Err(error) if start.elapsed() > FREE_MAX => return tracing::warn!("metrics: {error:#}"),
                    Err(_) => thread::sleep(TRY_AGAIN),
                }
            }
            if let Some(listener) = listener {
                of_thread.is_open.store(true, Ordering::Release);
                serve(&listener, &daemon, &of_thread);
            }
        };
        thread.spawn(serve).context("no thread for metrics can be made")?;
        Ok(Self { state, path })
    }
}

impl State {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The path first: whoever comes next finds it free, and keeps it.
        if self.state.is_open.load(Ordering::Acquire)
            && let Some(path) = &self.path
        {
            let _ = std::fs::remove_file(path);
        }
        self.state.is_over.store(true, Ordering::Release);
    }
}

fn listen(place: &Place) -> Result<Listener> {
    match place {
        Place::Unix(path) => {
            let context = || format!("metrics address unix:{}", path.display());
            remove_stale(path).with_context(context)?;
            let listener = listen_at(path).with_context(context)?;
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o660)).with_context(context)?;
            listener.set_nonblocking(true)?;
            Ok(Listener::Unix(listener))
        }
        Place::Tcp(at) => {
            let listener = TcpListener::bind(at).with_context(|| format!("metrics address tcp:{at}"))?;
            listener.set_nonblocking(true)?;
            Ok(Listener::Tcp(listener))
        }
    }
}

fn serve(listener: &Listener, daemon: &Daemon, state: &State) {
    while !state.is_over() {
        let answered = match listener {
            Listener::Unix(listener) => listener.accept().and_then(|(stream, _)| of_unix(&stream, daemon)),
            Listener::Tcp(listener) => listener.accept().and_then(|(stream, _)| of_tcp(&stream, daemon)),
        };
        match answered {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let fd = match listener {
                    Listener::Unix(listener) => listener.as_fd(),
                    Listener::Tcp(listener) => listener.as_fd(),
                };
                let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
                let _ = poll(&mut fds, Some(&LOOK_AGAIN.try_into().expect("it fits")));
            }
            Err(error) => tracing::debug!("metrics: {error}"),
            Ok(()) => {}
        }
    }
}

fn of_unix(stream: &UnixStream, daemon: &Daemon) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(CLIENT_MAX))?;
    stream.set_write_timeout(Some(CLIENT_MAX))?;
    answer(stream, daemon).map_err(lost)
}

fn of_tcp(stream: &TcpStream, daemon: &Daemon) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(CLIENT_MAX))?;
    stream.set_write_timeout(Some(CLIENT_MAX))?;
    answer(stream, daemon).map_err(lost)
}

/// A client that is too slow, which is not the same as that there is none.
fn lost(error: io::Error) -> io::Error {
    io::Error::other(format!("a client is lost: {error}"))
}

/// Reads one request and answers it.
fn answer<S>(mut stream: S, daemon: &Daemon) -> io::Result<()>
where
    S: Read + Write,
{
    let start = Instant::now();
    let mut request = Vec::new();
    let asked = loop {
        let mut piece = [0; 1024];
        let len = stream.read(&mut piece)?;
        request.extend_from_slice(&piece[..len]);
        match parse(&request) {
            Parsed::Asked(asked) => break asked,
            Parsed::More if len > 0 && request.len() < REQUEST_MAX && start.elapsed() < CLIENT_MAX => {}
            Parsed::More | Parsed::Bad => {
                return respond(
                    &mut stream,
                    "400 Bad Request",
                    "text/plain",
                    "no request that is understood\n",
                );
            }
        }
    };
    match asked.path.as_str() {
        "/metrics" => match collect::text(daemon, asked.form) {
            Ok(text) => respond(&mut stream, "200 OK", content_type(asked.form), &text),
            Err(_) => respond(
                &mut stream,
                "500 Internal Server Error",
                "text/plain",
                "metrics cannot be written\n",
            ),
        },
        _ => respond(
            &mut stream,
            "404 Not Found",
            "text/plain",
            "metrics are at /metrics\n",
        ),
    }
}

/// What is asked for.
struct Asked {
    path: String,
    form: Form,
}

enum Parsed {
    Asked(Asked),
    /// Its end is missing.
    More,
    Bad,
}

fn parse(bytes: &[u8]) -> Parsed {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(httparse::Status::Complete(_)) if request.method == Some("GET") => {
            let path = request.path.unwrap_or_default();
            let mut accepts = request
                .headers
                .iter()
                .filter(|header| header.name.eq_ignore_ascii_case("accept"));
            Parsed::Asked(Asked {
                path: path.split('?').next().unwrap_or_default().to_owned(),
                form: match accepts.any(|header| header.value.windows(11).any(|word| word == b"openmetrics"))
                {
                    true => Form::OpenMetrics,
                    false => Form::Classic,
                },
            })
        }
        Ok(httparse::Status::Partial) => Parsed::More,
        _ => Parsed::Bad,
    }
}

fn content_type(form: Form) -> &'static str {
    match form {
        Form::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        Form::Classic => "text/plain; version=0.0.4; charset=utf-8",
    }
}

fn respond(stream: &mut impl Write, status: &str, kind: &str, body: &str) -> io::Result<()> {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())?;
    stream.flush()
}

/// Bytes of a request.
const REQUEST_MAX: usize = 8 << 10;
/// How long one client may take.
const CLIENT_MAX: Duration = Duration::from_secs(2);
/// How soon the end of the daemon is noticed.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// How long a daemon that is taken over may keep the address.
const FREE_MAX: Duration = Duration::from_secs(20);
const TRY_AGAIN: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_a_get_that_is_all_there() {
        let path = |text: &str| match parse(text.as_bytes()) {
            Parsed::Asked(asked) => format!("{} {:?}", asked.path, asked.form),
            Parsed::More => "more".to_owned(),
            Parsed::Bad => "bad".to_owned(),
        };
        assert_eq!(
            path("GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\n\r\n"),
            "/metrics Classic"
        );
        let open = "GET /metrics HTTP/1.1\r\naccept: application/openmetrics-text;version=1.0.0\r\n\r\n";
        assert_eq!(path(open), "/metrics OpenMetrics");
        assert_eq!(path("GET /metrics HTTP/1.1\r\nHo"), "more");
        assert_eq!(path("POST /metrics HTTP/1.1\r\n\r\n"), "bad");
        assert_eq!(path("\u{1}\u{2}\r\n\r\n"), "bad");
    }
}
