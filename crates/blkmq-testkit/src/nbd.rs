//! The NBD client of the tests: a small blocking client that shares no code with the server.
//!
//! It knows only simple replies. Its parts are public, so that a test can also violate the
//! protocol.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// A connection in the transmission phase.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    size: u64,
    next_cookie: u64,
}

/// The commands of the transmission phase that the tests use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Command {
    /// `NBD_CMD_READ`
    Read = 0,
    /// `NBD_CMD_WRITE`
    Write = 1,
    /// `NBD_CMD_FLUSH`
    Flush = 3,
    /// `NBD_CMD_TRIM`
    Trim = 4,
    /// `NBD_CMD_WRITE_ZEROES`
    WriteZeroes = 6,
    /// Our own extension.
    Fence = 0x6266,
}

impl Drop for Client {
    /// Closing is not enough: the child of another test may have a copy of the socket until it executes its program, and
    /// the server sees a client that is there.
    fn drop(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl Client {
    /// Connects and selects the export.
    ///
    /// # Errors
    /// If the server cannot be reached or refuses the export.
    pub fn connect(socket: &Path, export: &str) -> Result<Client> {
        Client::select(greeted(socket)?, export)
    }

    /// Connects, and gives the session a name.
    ///
    /// # Errors
    /// If the server cannot be reached, or refuses the export or the name.
    pub fn connect_as(socket: &Path, export: &str, client: u128, number: u64) -> Result<Client> {
        let mut stream = greeted(socket)?;
        let name = [&client.to_be_bytes()[..], &number.to_be_bytes()].concat();
        stream.write_all(&option(OPT_SESSION, &name))?;
        let (kind, instance) = read_option_reply(&mut stream)?;
        let (last, _) = read_option_reply(&mut stream)?;
        if (kind, instance.len(), last) != (OPT_SESSION, 8, REP_ACK) {
            return Err(Error::other(format!("replies {kind:#x} and {last:#x} to a name")));
        }
        Client::select(stream, export)
    }

    /// Has another session of the same client fenced.
    ///
    /// # Errors
    /// The server's error, or that it disconnected.
    pub fn fence(&mut self, number: u64) -> Result<()> {
        let cookie = self.send(Command::Fence, 0, number, 0, &[])?;
        self.expect_reply(cookie)
    }

    fn select(mut stream: UnixStream, export: &str) -> Result<Client> {
        stream.write_all(&option(OPT_GO, &go_payload(export)))?;
        let mut size = None;
        loop {
            let (kind, payload) = read_option_reply(&mut stream)?;
            match kind {
                REP_ACK => break,
                REP_INFO if payload.starts_with(&[0, 0]) => size = Some(be64(&payload[2..])),
                REP_INFO => {}
                other => {
                    return Err(Error::other(format!(
                        "the server refused {export}: reply {other:#x}"
                    )));
                }
            }
        }
        let size = size.ok_or_else(|| Error::other("the server did not tell the size"))?;
        Ok(Client {
            stream,
            size,
            next_cookie: 1,
        })
    }

    /// Returns the size of the export in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Reads.
    ///
    /// # Errors
    /// The server's error, or that it disconnected.
    pub fn read(&mut self, offset: u64, bytes: usize) -> Result<Vec<u8>> {
        let cookie = self.send(Command::Read, 0, offset, bytes as u32, &[])?;
        self.expect_reply(cookie)?;
        let mut data = vec![0; bytes];
        self.stream.read_exact(&mut data)?;
        Ok(data)
    }

    /// Writes.
    ///
    /// # Errors
    /// The server's error, or that it disconnected.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        let cookie = self.send(Command::Write, 0, offset, data.len() as u32, data)?;
        self.expect_reply(cookie)
    }

    /// Writes, durably (FUA).
    ///
    /// # Errors
    /// The server's error, or that it disconnected.
    pub fn write_through(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        let cookie = self.send(Command::Write, FLAG_FUA, offset, data.len() as u32, data)?;
        self.expect_reply(cookie)
    }

    /// Flushes.
    ///
    /// # Errors
    /// The server's error, or that it disconnected.
    pub fn flush(&mut self) -> Result<()> {
        let cookie = self.send(Command::Flush, 0, 0, 0, &[])?;
        self.expect_reply(cookie)
    }

    /// Sends a request and does not wait for its reply.
    ///
    /// # Errors
    /// If the server disconnected.
    pub fn send(
        &mut self,
        command: Command,
        flags: u16,
        offset: u64,
        bytes: u32,
        data: &[u8],
    ) -> Result<u64> {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let mut message = request(command as u16, flags, cookie, offset, bytes);
        message.extend_from_slice(data);
        self.stream.write_all(&message)?;
        Ok(cookie)
    }

    /// Waits for the next reply, to any request, and returns its cookie.
    ///
    /// # Errors
    /// The server's error, or that it disconnected.
    pub fn reply(&mut self) -> Result<u64> {
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        if be32(&reply) != SIMPLE_REPLY_MAGIC {
            return Err(Error::new(
                ErrorKind::InvalidData,
                format!("a reply begins with {:#x}", be32(&reply)),
            ));
        }
        match be32(&reply[4..]) {
            0 => Ok(be64(&reply[8..])),
            // NBD's error numbers are those of Linux.
            number => Err(Error::from_raw_os_error(number as i32)),
        }
    }

    fn expect_reply(&mut self, cookie: u64) -> Result<()> {
        let answered = self.reply()?;
        if answered == cookie {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::InvalidData,
            format!("reply to {answered} where {cookie} was asked"),
        ))
    }

    /// Changes what any single wait for a reply may take.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set_answer_time(&self, limit: Duration) -> Result<()> {
        self.stream.set_read_timeout(Some(limit))
    }

    /// Returns the socket itself, for violations of the protocol.
    pub fn stream(&mut self) -> &mut UnixStream {
        &mut self.stream
    }
}

/// Connects and exchanges greetings; the option phase follows.
///
/// # Errors
/// If the server cannot be reached or its greeting is wrong.
pub fn greeted(socket: &Path) -> Result<UnixStream> {
    let mut stream = UnixStream::connect(socket)?;
    // A server that does not answer must fail the test instead of hanging it.
    stream.set_read_timeout(Some(ANSWER_TIME))?;
    stream.set_write_timeout(Some(ANSWER_TIME))?;
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    if be64(&greeting) != INIT_MAGIC || be64(&greeting[8..]) != OPTION_MAGIC {
        return Err(Error::new(ErrorKind::InvalidData, "not a newstyle NBD server"));
    }
    stream.write_all(&CLIENT_FLAGS.to_be_bytes())?;
    Ok(stream)
}

/// An option of the handshake, as bytes.
pub fn option(number: u32, payload: &[u8]) -> Vec<u8> {
    let mut message = OPTION_MAGIC.to_be_bytes().to_vec();
    message.extend(number.to_be_bytes());
    message.extend((payload.len() as u32).to_be_bytes());
    message.extend(payload);
    message
}

/// The payload of `NBD_OPT_GO` that requests nothing beyond the export's name.
pub fn go_payload(export: &str) -> Vec<u8> {
    let mut payload = (export.len() as u32).to_be_bytes().to_vec();
    payload.extend(export.as_bytes());
    payload.extend(0_u16.to_be_bytes());
    payload
}

/// Receives the next reply to an option: its type and its payload.
///
/// # Errors
/// If the server disconnected or its reply is malformed.
pub fn read_option_reply(stream: &mut UnixStream) -> Result<(u32, Vec<u8>)> {
    let mut header = [0; 20];
    stream.read_exact(&mut header)?;
    if be64(&header) != OPTION_REPLY_MAGIC {
        return Err(Error::new(ErrorKind::InvalidData, "not a reply to an option"));
    }
    let mut payload = vec![0; be32(&header[16..]) as usize];
    stream.read_exact(&mut payload)?;
    Ok((be32(&header[12..]), payload))
}

/// The 28 bytes of a request's header.
pub fn request(command: u16, flags: u16, cookie: u64, offset: u64, bytes: u32) -> Vec<u8> {
    let mut message = REQUEST_MAGIC.to_be_bytes().to_vec();
    message.extend(flags.to_be_bytes());
    message.extend(command.to_be_bytes());
    message.extend(cookie.to_be_bytes());
    message.extend(offset.to_be_bytes());
    message.extend(bytes.to_be_bytes());
    message
}

fn be32(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes[..4].try_into().expect("four bytes"))
}

fn be64(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(bytes[..8].try_into().expect("eight bytes"))
}

/// `NBD_OPT_GO`
pub const OPT_GO: u32 = 7;
/// Our own extension; its reply has the same number.
const OPT_SESSION: u32 = 0x626c_6b71;
/// `NBD_CMD_FLAG_FUA`
pub const FLAG_FUA: u16 = 1;
/// `NBD_REP_ACK`
pub const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Fixed newstyle, and no 124 zeroes after the export's size and flags.
const CLIENT_FLAGS: u32 = 3;
/// What any single wait for the server may take.
pub const ANSWER_TIME: Duration = Duration::from_secs(30);
