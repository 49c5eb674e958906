//! One NBD connection of the load: several requests under way, replies as they come. Handshake and codec
//! are the project's own, because the proof is about what lies behind them.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use blkmq_nbd::client::{Agreed, Wanted, negotiate};
use blkmq_nbd::codec::HeaderStyle;
use blkmq_nbd::codec::reply::ReplyHead;
use blkmq_nbd::codec::request::RequestHeader;

/// A connection, and of each request under way what the caller wants to know when it ends.
#[derive(Debug)]
pub struct Connection<T> {
    stream: UnixStream,
    agreed: Agreed,
    under_way: HashMap<u64, (T, usize)>,
    received: Vec<u8>,
    next_cookie: u64,
}

/// How a request ended.
#[derive(Debug)]
pub struct Ended<T> {
    /// What came with the request.
    pub tag: T,
    /// The server's error number, which is Linux's; 0 for success.
    pub error: i32,
    /// What was read.
    pub data: Vec<u8>,
}

impl<T> Connection<T> {
    /// Connects to the export. A server that says nothing for half a minute has lost something.
    ///
    /// # Errors
    /// If the server cannot be reached, or refuses.
    pub fn open(socket: &Path, export: &str) -> Result<Self> {
        Self::open_within(socket, export, SILENCE_MAX)
    }

    /// The same with less patience, or more: what any single wait for the server may take, from now on.
    ///
    /// # Errors
    /// If the server cannot be reached, or refuses, or keeps silent for longer.
    pub fn open_within(socket: &Path, export: &str, silence_max: Duration) -> Result<Self> {
        let mut stream =
            UnixStream::connect(socket).with_context(|| format!("connecting to {}", socket.display()))?;
        stream.set_read_timeout(Some(silence_max))?;
        stream.set_write_timeout(Some(silence_max))?;
        let agreed = negotiate(&mut stream, Wanted::plain(export)).context("negotiating")?;
        Ok(Self {
            stream,
            agreed,
            under_way: HashMap::new(),
            received: Vec::new(),
            next_cookie: 1,
        })
    }

    /// Returns what was agreed.
    pub fn agreed(&self) -> &Agreed {
        &self.agreed
    }

    /// Returns how many requests are under way.
    pub fn depth(&self) -> usize {
        self.under_way.len()
    }

    /// Sends a request; a cookie is put into its header. Returns false if the server is gone.
    ///
    /// # Errors
    /// If the request cannot be sent for another reason.
    pub fn send(&mut self, mut header: RequestHeader, data: &[u8], reads: usize, tag: T) -> Result<bool> {
        header.cookie = self.next_cookie;
        self.next_cookie += 1;
        let mut message = Vec::with_capacity(64 + data.len());
        header.write(HeaderStyle::Simple, &mut message);
        message.extend_from_slice(data);
        self.under_way.insert(header.cookie, (tag, reads));
        match self.stream.write_all(&message) {
            Ok(()) => Ok(true),
            Err(error) if is_gone(error.kind()) => Ok(false),
            Err(error) => Err(error).context("sending a request"),
        }
    }

    /// Waits for more and appends what has ended. Returns false at the end of the stream.
    ///
    /// # Errors
    /// If nothing comes for a long time, or what comes is out of form.
    pub fn receive(&mut self, ended: &mut Vec<Ended<T>>) -> Result<bool> {
        let mut buffer = [0; 64 << 10];
        let count = match self.stream.read(&mut buffer) {
            Ok(count) => count,
            Err(error) if is_gone(error.kind()) => 0,
            Err(error) => return Err(error).context("waiting for a reply"),
        };
        self.received.extend_from_slice(&buffer[..count]);
        let mut taken = 0;
        while let Some(bytes) = self.take_reply(taken, ended)? {
            taken += bytes;
        }
        self.received.drain(..taken);
        Ok(count > 0)
    }

    /// Takes one whole reply from `at`, and returns its bytes.
    fn take_reply(&mut self, at: usize, ended: &mut Vec<Ended<T>>) -> Result<Option<usize>> {
        let input = &self.received[at..];
        let Some((head, bytes)) = ReplyHead::parse(HeaderStyle::Simple, input)? else {
            return Ok(None);
        };
        let ReplyHead::Simple { cookie, error } = head else {
            bail!("a chunk where simple replies were agreed");
        };
        let (_, reads) = self
            .under_way
            .get(&cookie)
            .context("a reply to nothing that was asked")?;
        let reads = if error == 0 { *reads } else { 0 };
        let Some(data) = input.get(bytes..bytes + reads) else {
            return Ok(None);
        };
        let data = data.to_vec();
        let (tag, _) = self.under_way.remove(&cookie).expect("looked at above");
        ended.push(Ended {
            tag,
            error: error as i32,
            data,
        });
        Ok(Some(bytes + reads))
    }
}

impl<T> AsFd for Connection<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn is_gone(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
}

/// A server that says nothing for so long has lost a request.
const SILENCE_MAX: Duration = Duration::from_secs(30);
