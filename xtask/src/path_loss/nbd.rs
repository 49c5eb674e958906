//! The NBD client of the load: a small blocking one on a unix socket that shares no code with the
//! project.

use std::io::{Error, Read, Result, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// A connection that is ready for requests, one at a time.
pub(crate) struct Client {
    stream: UnixStream,
    cookie: u64,
}

impl Client {
    /// # Errors
    /// If the server cannot be reached or does not have the export.
    pub(crate) fn connect(socket: &Path, export: &str) -> Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(ANSWER_TIME))?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        let mut message = CLIENT_FLAGS.to_be_bytes().to_vec();
        message.extend(OPTION_MAGIC.to_be_bytes());
        message.extend(OPT_EXPORT_NAME.to_be_bytes());
        message.extend((export.len() as u32).to_be_bytes());
        message.extend(export.as_bytes());
        stream.write_all(&message)?;
        // Size and flags; a server without the export disconnects instead.
        stream.read_exact(&mut [0; 10])?;
        Ok(Self { stream, cookie: 0 })
    }

    /// # Errors
    /// The server's error, or that it disconnected.
    pub(crate) fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<()> {
        self.ask(READ, offset, data.len(), &[])?;
        self.stream.read_exact(data)
    }

    /// # Errors
    /// The server's error, or that it disconnected.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        self.ask(WRITE, offset, data.len(), data)
    }

    /// # Errors
    /// The server's error, or that it disconnected.
    pub(crate) fn flush(&mut self) -> Result<()> {
        self.ask(FLUSH, 0, 0, &[])
    }

    fn ask(&mut self, command: u16, offset: u64, bytes: usize, data: &[u8]) -> Result<()> {
        self.cookie += 1;
        let mut message = REQUEST_MAGIC.to_be_bytes().to_vec();
        message.extend(0u16.to_be_bytes());
        message.extend(command.to_be_bytes());
        message.extend(self.cookie.to_be_bytes());
        message.extend(offset.to_be_bytes());
        message.extend((bytes as u32).to_be_bytes());
        message.extend(data);
        self.stream.write_all(&message)?;
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        let (head, cookie) = reply.split_at(8);
        if head[..4] != REPLY_MAGIC.to_be_bytes() || cookie != self.cookie.to_be_bytes() {
            return Err(Error::other("that is no reply to what was asked"));
        }
        match u32::from_be_bytes([head[4], head[5], head[6], head[7]]) {
            0 => Ok(()),
            // NBD's error numbers are those of Linux.
            number => Err(Error::from_raw_os_error(number as i32)),
        }
    }
}

const READ: u16 = 0;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;
const OPT_EXPORT_NAME: u32 = 1;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
/// Fixed newstyle, and no zeroes after the export's size and flags.
const CLIENT_FLAGS: u32 = 3;
/// Requests are held while there is no path; no test is without one for this long.
const ANSWER_TIME: Duration = Duration::from_secs(60);
