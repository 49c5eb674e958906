//! Hostile descriptors: unexpected ones whose last close blocks. Each is a TCP socket that lingers, full
//! of bytes that nobody receives.

use std::collections::VecDeque;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Result;
use blkmq_testkit::Random;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg, sockopt};

use super::{Site, Tally};

/// Sends descriptors to the tenant's address and to the virtual machines', instead of an expected
/// message or after wrong ones, and disconnects.
pub(super) fn descriptors(site: &Site<'_>, random: &mut Random, end: Instant) -> Tally {
    // Before Linux 6.16 a unix socket cannot refuse descriptors.
    let may_refuse = is_since(6, 16);
    let (mut tally, mut peers) = (Tally::default(), VecDeque::new());
    while Instant::now() < end {
        if peers.len() == PEERS {
            peers.pop_front();
        }
        let is_nbd = may_refuse && random.below(2) == 0;
        let sent = match is_nbd {
            true => send(&site.socket, b"\0\0\0\x03", 0),
            false => send(&site.vhost_user, &message(1), 1 + random.below(4) as usize),
        };
        match sent {
            Ok(peer) => peers.push_back(peer),
            // The NBD server refuses descriptors, so that sending one fails.
            Err(_) => tally.failed += 1,
        }
        tally.done += 1;
        sleep(LINGER / PEERS as u32);
    }
    tally
}

/// Sends `bytes`, if `before` is not 0, then `before - 1` wrong messages, and then `bytes` with a
/// descriptor of which this side keeps no copy. Returns the peer of the descriptor's socket.
fn send(path: &Path, bytes: &[u8], before: usize) -> Result<TcpStream> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    // After NBD's greeting, or the answer to the first message, the other side has accepted this
    // client.
    if before > 0 {
        stream.write_all(bytes)?;
    }
    stream.read_exact(&mut [0; 18])?;
    (1..before).try_for_each(|_| stream.write_all(&message(99)))?;
    let (lingering, peer) = lingering()?;
    send_with(&stream, bytes, &[lingering.as_fd()])?;
    Ok(peer)
}

fn send_with(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(fds));
    sendmsg(
        stream,
        &[IoSlice::new(bytes)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

/// A socket whose close takes [`LINGER`], and its peer.
fn lingering() -> Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    // The accepted socket inherits the small buffer, so that few bytes fill it.
    sockopt::set_socket_recv_buffer_size(&listener, 4096)?;
    let mut stream = TcpStream::connect(listener.local_addr()?)?;
    let (peer, _) = listener.accept()?;
    stream.set_nonblocking(true)?;
    while stream.write(&[0; 64 << 10]).is_ok() {}
    stream.set_nonblocking(false)?;
    sockopt::set_socket_linger(&stream, Some(LINGER))?;
    Ok((stream, peer))
}

/// A vhost-user message without a body.
fn message(request: u32) -> Vec<u8> {
    [request, 1, 0]
        .iter()
        .flat_map(|word| word.to_ne_bytes())
        .collect()
}

/// Says whether the system is of this version or a later one.
fn is_since(major: u32, minor: u32) -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map_while(|number| number.parse().ok());
    (numbers.next(), numbers.next()) >= (Some(major), Some(minor))
}

/// How long the last close of a descriptor blocks: longer than a visitor may wait.
const LINGER: Duration = Duration::from_secs(2);
/// Peers that are kept open, each until the close of its socket has ended.
const PEERS: usize = 40;
const PATIENCE: Duration = Duration::from_secs(2);
