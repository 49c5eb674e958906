//! A client of the control socket: one request after the other, with a time limit.

use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix, SocketFlags,
    SocketType, recv, recvmsg, socket_with,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::statistics::{QueueStatistics, Statistics};

/// What a daemon says against a request.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refused(String);

/// A connection to a daemon.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<UnixStream>,
    next: u64,
    /// The queues of the last statistics that it was told.
    queues: Vec<Arc<QueueStatistics>>,
}

impl Client {
    /// Connects to a daemon's control socket.
    ///
    /// # Errors
    /// If nobody listens there, or whoever asks may not connect.
    pub fn connect(path: &Path) -> Result<Self> {
        Self::connect_within(path, ANSWER_MAX)
    }

    /// The same, with a limit of one's own for each answer.
    ///
    /// # Errors
    /// As for [`Client::connect`].
    pub fn connect_within(path: &Path, answer_max: Duration) -> Result<Self> {
        let stream = connected(path, answer_max).with_context(|| {
            format!("no daemon can be asked at {}: is one running, with this control socket (--control), and may you use it?", path.display())
        })?;
        stream.set_read_timeout(Some(answer_max))?;
        stream.set_write_timeout(Some(answer_max))?;
        Ok(Self {
            stream: BufReader::with_capacity(READ_BYTES, stream),
            next: 0,
            queues: Vec::new(),
        })
    }

    /// Calls a method. Returns its result.
    ///
    /// # Errors
    /// What the daemon says, or that it has gone.
    pub fn call(&mut self, method: &str, params: &Value) -> Result<Value> {
        let sent = self.send(method, params);
        loop {
            // Who is turned away is told why before it has said anything.
            let answer = match (&sent, self.next_line()) {
                (_, Ok(answer)) => answer,
                (Err(error), Err(_)) => {
                    bail!("the daemon has hung up, as it does when it has too many clients: {error}")
                }
                (Ok(()), Err(error)) => return Err(error),
            };
            if let Some(result) = self.result_of(answer)? {
                return Ok(result);
            }
        }
    }

    fn send(&mut self, method: &str, params: &Value) -> io::Result<()> {
        self.next += 1;
        let request = json!({"jsonrpc": "2.0", "id": self.next, "method": method, "params": params});
        self.stream.get_mut().write_all(format!("{request}\n").as_bytes())
    }

    /// The result, if this is the answer to the latest request, and not something that was subscribed to.
    fn result_of(&self, mut answer: Value) -> Result<Option<Value>> {
        let id = answer.get("id");
        let is_its = id == Some(&self.next.into());
        match answer.pointer("/error/message").and_then(Value::as_str) {
            Some(message) if is_its || id == Some(&Value::Null) => bail!(Refused(message.to_owned())),
            _ => Ok(is_its.then(|| answer["result"].take())),
        }
    }

    /// Calls a method whose answer comes with a descriptor, as the first call of a connection.
    ///
    /// # Errors
    /// What the daemon says, that it has gone, or that there is no descriptor.
    pub fn call_for_file(&mut self, method: &str, params: &Value) -> Result<(Value, File)> {
        // What is read otherwise has lost its descriptor.
        ensure!(self.stream.buffer().is_empty(), "an answer is still to be read");
        self.send(method, params)?;
        let (mut line, mut file) = (Vec::new(), None);
        while !line.ends_with(b"\n") {
            let mut piece = [0; 4096];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut into = [IoSliceMut::new(&mut piece)];
            let flags = RecvFlags::CMSG_CLOEXEC;
            let came = recvmsg(self.stream.get_ref(), &mut into, &mut control, flags);
            let came = came.map_err(|errno| self.explained(errno.into()))?;
            ensure!(came.bytes > 0, "the daemon has closed the connection");
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(mut files) = message {
                    file = file.or(files.next().map(File::from));
                }
            }
            line.extend_from_slice(&piece[..came.bytes]);
        }
        let answer = self.result_of(serde_json::from_slice(&line)?)?;
        let answer = answer.context("the daemon answers something else")?;
        Ok((
            answer,
            file.context("the daemon sends no descriptor; is it older than this program?")?,
        ))
    }

    /// Says whether the daemon has closed the connection. Does not wait.
    pub fn has_ended(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        matches!(
            recv(self.stream.get_ref(), &mut [0; 1][..], flags),
            Ok((_, 0)) | Err(Errno::CONNRESET)
        )
    }

    /// Has the daemon send its statistics at once and after each interval.
    ///
    /// # Errors
    /// If the interval is too short or too long for the daemon, or it has gone.
    pub fn subscribe(&mut self, interval: Duration) -> Result<()> {
        self.subscribe_with(&json!({"interval_ms": interval.as_millis() as u64}), interval)
    }

    /// The same, without queues that have not changed since the time before:
    /// [`Self::next_statistics`] adds them.
    ///
    /// # Errors
    /// As for [`Self::subscribe`].
    pub fn follow(&mut self, interval: Duration) -> Result<()> {
        let params = json!({"interval_ms": interval.as_millis() as u64, "changed": true});
        // An older daemon does not know this.
        match self.subscribe_with(&params, interval) {
            Err(error) if error.is::<Refused>() => self.subscribe(interval),
            done => done,
        }
    }

    fn subscribe_with(&mut self, params: &Value, interval: Duration) -> Result<()> {
        self.call("subscribe", params)?;
        let patience = Some(interval + QUERY_MAX);
        Ok(self.stream.get_ref().set_read_timeout(patience)?)
    }

    /// Waits for the next statistics of all queues, after [`Self::follow`] or [`Self::subscribe`].
    ///
    /// # Errors
    /// If the daemon has gone, or sends something else.
    pub fn next_statistics(&mut self) -> Result<Statistics> {
        #[derive(Deserialize)]
        struct Notification {
            params: Statistics,
        }
        let line = self.read_line()?;
        let read = serde_json::from_str::<Notification>(&line);
        let mut now = read
            .context("the daemon sends no statistics that are understood")?
            .params;
        if std::mem::take(&mut now.is_partial) {
            // In the order of all.
            let mut changed = now.queues.into_iter().peekable();
            for queue in &mut self.queues {
                if let Some(other) = changed.next_if(|other| other.name == queue.name) {
                    *queue = other;
                }
            }
            ensure!(
                changed.next().is_none(),
                "the daemon tells of a queue that it had not told of"
            );
            now.queues = self.queues.clone();
        } else {
            self.queues.clone_from(&now.queues);
        }
        Ok(now)
    }

    /// Waits for the next line that the daemon sends.
    ///
    /// # Errors
    /// If it has gone, or sends no JSON.
    pub fn next_line(&mut self) -> Result<Value> {
        Ok(serde_json::from_str(&self.read_line()?)?)
    }

    /// What it means that nothing can be read.
    fn explained(&self, error: io::Error) -> anyhow::Error {
        let limit = self.stream.get_ref().read_timeout().ok().flatten();
        match (error.kind(), limit) {
            (ErrorKind::WouldBlock | ErrorKind::TimedOut, Some(limit)) => {
                anyhow::anyhow!(
                    "the daemon has not answered for {} s: is it stopped?",
                    limit.as_secs()
                )
            }
            _ => anyhow::Error::new(error).context("the daemon does not answer"),
        }
    }

    fn read_line(&mut self) -> Result<String> {
        let mut line = String::new();
        let len = self
            .stream
            .read_line(&mut line)
            .map_err(|error| self.explained(error))?;
        if len == 0 {
            bail!("the daemon has closed the connection");
        }
        Ok(line)
    }
}

/// Connects to a socket. One whose daemon is stopped may have as many clients waiting as it can have, and one whose
/// daemon has just been taken over is missing for a moment.
fn connected(path: &Path, limit: Duration) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let (address, start) = (SocketAddrUnix::new(path)?, Instant::now());
    loop {
        match rustix::net::connect(&socket, &address) {
            Ok(()) => break,
            Err(Errno::AGAIN) if start.elapsed() < limit => thread::sleep(PAUSE),
            Err(Errno::AGAIN) => {
                let what = format!(
                    "too many wait there, and none was answered for {} s",
                    limit.as_secs()
                );
                return Err(io::Error::new(ErrorKind::TimedOut, what));
            }
            Err(Errno::NOENT | Errno::CONNREFUSED) if start.elapsed() < MISSING_MAX => thread::sleep(PAUSE),
            Err(errno) => return Err(errno.into()),
        }
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// A daemon that has taken over listens so soon after the end of the one before.
const MISSING_MAX: Duration = Duration::from_millis(250);
/// Between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(20);
/// Statistics of many groups are some hundreds of KiB.
const READ_BYTES: usize = 256 << 10;
/// Longer than an answer may take that changes nothing.
pub const QUERY_MAX: Duration = Duration::from_secs(10);
/// Longer than a change may take that waits for requests under way.
const ANSWER_MAX: Duration = Duration::from_secs(120);

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn socket_that_a_successor_is_about_to_open_is_waited_for() {
        let path = std::env::temp_dir().join(format!("blkmq-client-{}", std::process::id()));
        let of_successor = path.clone();
        let successor = thread::spawn(move || {
            thread::sleep(Duration::from_millis(60));
            UnixListener::bind(of_successor).unwrap()
        });
        connected(&path, Duration::from_secs(1)).unwrap();
        drop(successor.join().unwrap());
        // Nobody listens there any more.
        let start = Instant::now();
        let error = connected(&path, Duration::from_secs(1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        assert!(start.elapsed() >= MISSING_MAX);
        std::fs::remove_file(path).unwrap();
    }
}
