//! A client's disk over NBD: one connection, simple replies. It takes replies while its own requests wait for room
//! in the socket, so a flood of writes sees its ends when they arrive.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use blkmq_nbd::codec::HeaderStyle;
use blkmq_nbd::codec::flags::CommandFlags;
use blkmq_nbd::codec::request::{Command, RequestHeader};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use super::super::scene::Load;
use super::Disk;
use crate::nbd::{ReplyStream, connect_to};

/// A connection that reads, or one that writes.
pub(super) struct Connection {
    stream: UnixStream,
    size_bytes: u64,
    command: Command,
    block_bytes: u32,
    /// Headers that are not sent whole; the first of them may be in part.
    headers: VecDeque<Vec<u8>>,
    /// Bytes of the first request, header and payload, that are sent.
    sent: usize,
    /// What every write carries.
    payload: Vec<u8>,
    replies: ReplyStream,
}

impl Connection {
    /// Connects to the export `name` of the server at `socket`.
    ///
    /// # Errors
    /// If the server refuses.
    pub(super) fn open(socket: &Path, name: &str, load: &Load) -> Result<Self> {
        let (stream, agreed) = connect_to(socket, name, HeaderStyle::Simple)?;
        stream
            .set_nonblocking(true)
            .context("having the socket not block")?;
        let is_write = load.op.is_write();
        let (command, payload, reply_bytes) = match is_write {
            true => (Command::WRITE, vec![0x5a; load.block_bytes as usize], 0),
            false => (Command::READ, Vec::new(), load.block_bytes),
        };
        Ok(Self {
            stream,
            size_bytes: agreed.size_bytes,
            command,
            block_bytes: load.block_bytes,
            headers: VecDeque::new(),
            sent: 0,
            payload,
            replies: ReplyStream::new(HeaderStyle::Simple, reply_bytes),
        })
    }

    /// Sends what the socket has room for.
    fn send(&mut self) -> Result<()> {
        while let Some(header) = self.headers.front() {
            let of_payload = self.sent.saturating_sub(header.len());
            let rest = [
                IoSlice::new(&header[self.sent.min(header.len())..]),
                IoSlice::new(&self.payload[of_payload..]),
            ];
            match (&self.stream).write_vectored(&rest) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("sending a request"),
            }
            if self.sent == header.len() + self.payload.len() {
                self.headers.pop_front();
                self.sent = 0;
            }
        }
        Ok(())
    }

    /// Takes what has arrived; says whether there was anything.
    fn receive(&mut self, ended: &mut Vec<usize>) -> Result<bool> {
        match (&self.stream).read(self.replies.room()) {
            Ok(0) => bail!("the server has hung up"),
            Ok(count) => {
                self.replies.add(count, |cookie| ended.push(cookie as usize))?;
                Ok(true)
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(false),
            Err(error) => Err(error).context("receiving replies"),
        }
    }
}

impl Disk for Connection {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn begin(&mut self, number: usize, offset: u64) {
        let header = RequestHeader {
            cookie: number as u64,
            offset,
            length: self.block_bytes.into(),
            command: self.command,
            flags: CommandFlags::NONE,
        };
        let mut bytes = Vec::with_capacity(HeaderStyle::Simple.request_bytes());
        header.write(HeaderStyle::Simple, &mut bytes);
        self.headers.push_back(bytes);
    }

    fn wait(&mut self, until: Instant, ended: &mut Vec<usize>) -> Result<()> {
        self.send()?;
        if self.receive(ended)? {
            return Ok(());
        }
        let mut wanted = PollFlags::IN;
        wanted.set(PollFlags::OUT, !self.headers.is_empty());
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(&self.stream, wanted)], Some(&left)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("waiting for replies"),
        }
        self.send()?;
        self.receive(ended).map(|_| ())
    }
}
