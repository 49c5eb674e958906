//! A vhost-user front end and the driver of its guest, for tests, which can violate the protocol: one ring, of
//! 16 descriptors unless a test says otherwise, in a file of shared memory, which is read and written through the file.

use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::{pread, pwrite};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// A front end, connected, and the memory of its guest.
#[derive(Debug)]
pub struct FrontEnd {
    stream: UnixStream,
    features: u64,
    /// The guest's memory.
    pub memory: OwnedFd,
    kick: OwnedFd,
}

impl Drop for FrontEnd {
    fn drop(&mut self) {
        self.hang_up();
    }
}

impl FrontEnd {
    /// Connects and shares memory; no ring is set up yet.
    pub fn connect(path: &Path) -> Self {
        Self::connect_with(path, FEATURES)
    }

    /// The same with these features.
    pub fn connect_with(path: &Path, features: u64) -> Self {
        Self::of(UnixStream::connect(path).unwrap(), features)
    }

    /// The same over an existing connection.
    pub fn of(stream: UnixStream, features: u64) -> Self {
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let memory = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, MEMORY_BYTES).unwrap();
        let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let mut client = Self {
            stream,
            features,
            memory,
            kick,
        };
        client.set_up();
        client
    }

    /// Connects again, with the same memory.
    pub fn connect_again(&mut self, path: &Path) {
        self.hang_up();
        self.stream = UnixStream::connect(path).unwrap();
        self.stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        self.set_up();
    }

    /// Closing is not enough: the child of another test may have a copy of the socket until it executes its program, and
    /// the server sees a front end that is there.
    fn hang_up(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    fn set_up(&mut self) {
        self.send(3, &[], &[]);
        // The server accepts descriptors from then on.
        self.ask(1, &[]);
        self.send(2, &words(&[self.features]), &[]);
        self.send(16, &words(&[PROTOCOL]), &[]);
        self.share(MEMORY_BYTES);
    }

    /// Sends a table with one region of the memory.
    pub fn share(&self, bytes: u64) {
        self.share_at(bytes, USER);
    }

    /// The same, at another address of the front end.
    pub fn share_at(&self, bytes: u64, user: u64) {
        let table = words(&[1, 0, bytes, user, 0]);
        self.send(5, &table, &[self.memory.as_fd()]);
    }

    /// Has the ring served.
    pub fn start(&self) {
        self.start_at(0);
    }

    /// Has the ring served from an index of the available ring on.
    pub fn start_at(&self, base: u64) {
        self.start_with(16, base);
    }

    /// The same with another number of descriptors, up to 256.
    pub fn start_with(&self, size: u64, base: u64) {
        self.send(8, &words(&[size << 32]), &[]);
        self.send(10, &words(&[base << 32]), &[]);
        let addresses = [0, USER, USER + USED, USER + AVAIL, 0];
        self.send(9, &words(&addresses), &[]);
        self.send(12, &words(&[0]), &[self.kick.as_fd()]);
        self.send(18, &words(&[1 << 32]), &[]);
    }

    /// Sends a message, with descriptors beside it.
    pub fn send(&self, request: u32, body: &[u8], fds: &[BorrowedFd<'_>]) {
        send(&self.stream, request, body, fds).expect("the message is taken");
    }

    /// Receives a reply and returns its body.
    pub fn reply(&mut self) -> Vec<u8> {
        let mut header = [0; 12];
        self.stream.read_exact(&mut header).expect("a reply");
        let bytes = u32::from_ne_bytes(header[8..].try_into().unwrap());
        let mut body = vec![0; bytes as usize];
        self.stream.read_exact(&mut body).unwrap();
        body
    }

    /// Sends a message whose reply is a number, and returns that number.
    pub fn ask(&mut self, request: u32, body: &[u8]) -> u64 {
        self.send(request, body, &[]);
        u64::from_ne_bytes(self.reply().try_into().expect("a number"))
    }

    /// Most pieces of data in a request, as the configuration space has it.
    pub fn segments_max(&mut self) -> u32 {
        let mut range: Vec<u8> = words32(&[0, 60, 0]);
        range.extend([0; 60]);
        self.send(24, &range, &[]);
        let space = &self.reply()[12..];
        u32::from_le_bytes(space[12..16].try_into().expect("4 of 60 bytes"))
    }

    /// Says whether the other side closes the connection.
    pub fn is_hung_up(&mut self) -> bool {
        matches!(self.stream.read(&mut [0]), Ok(0))
    }

    /// Writes into the memory.
    pub fn write(&self, at: u64, bytes: &[u8]) {
        assert_eq!(pwrite(&self.memory, bytes, at), Ok(bytes.len()));
    }

    /// Reads from the memory.
    pub fn read<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        assert_eq!(pread(&self.memory, &mut bytes, at), Ok(N));
        bytes
    }

    /// Writes an entry of the table of descriptors.
    pub fn descriptor(&self, index: u64, at: u64, bytes: u32, flags: u16, next: u16) {
        let word = u64::from(bytes) | u64::from(flags) << 32 | u64::from(next) << 48;
        self.write(16 * index, &words(&[at, word]));
    }

    /// Writes a request of one block at `DATA + 4096 * head` into three descriptors from `head` on.
    pub fn request(&self, head: u16, kind: u32, sector: u64) {
        let base = self.fill(head, kind, sector);
        let flags = if kind == 0 { NEXT | WRITE } else { NEXT };
        self.descriptor(head.into(), base, 16, NEXT, head + 1);
        self.descriptor(u64::from(head) + 1, base + 512, 512, flags, head + 2);
        self.descriptor(u64::from(head) + 2, base + 1024, 1, WRITE, 0);
    }

    /// Writes the header of a request there, with an empty status. Returns its address.
    pub fn fill(&self, head: u16, kind: u32, sector: u64) -> u64 {
        let base = DATA + 4096 * u64::from(head);
        self.write(base, &words(&[u64::from(kind), sector]));
        self.write(base + 1024, &[0xff]);
        base
    }

    /// Writes these pages, each a piece of its own, from sector 0 on: as Linux does without indirect descriptors, in requests of
    /// at most `segments_max` pieces, each when the ring has room for it.
    ///
    /// # Errors
    /// How many descriptors a request needs that a ring of `size` never has room for: Linux waits for ever.
    pub fn write_pages(&self, pages: &[u64], segments_max: u32, size: u16) -> Result<(), usize> {
        let (mut heads, mut sector) = (Vec::new(), 0);
        for pieces in pages.chunks(segments_max as usize) {
            let needed = pieces.len() + 2;
            if needed > size.into() {
                return Err(needed);
            }
            let base = self.fill(0, 1, sector);
            self.descriptor(0, base, 16, NEXT, 1);
            for (index, page) in (1..).zip(pieces) {
                self.descriptor(index.into(), *page, 4096, NEXT, index + 1);
            }
            self.descriptor(needed as u64 - 1, base + 1024, 1, WRITE, 0);
            heads.push(0);
            self.offer(&heads);
            self.used_up_to(heads.len() as u16);
            assert_eq!(self.status(0), 0, "pieces {} from sector {sector}", pieces.len());
            sector += 8 * pieces.len() as u64;
        }
        Ok(())
    }

    /// Makes heads available, from the first entry of the ring on.
    pub fn offer(&self, heads: &[u16]) {
        for (place, head) in (0..).zip(heads) {
            self.write(AVAIL + 4 + 2 * place, &head.to_le_bytes());
        }
        self.write(AVAIL + 2, &(heads.len() as u16).to_le_bytes());
        self.kick();
    }

    /// Tells the server that heads are available.
    pub fn kick(&self) {
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
    }

    /// Has the server write to this eventfd when it has given chains back.
    pub fn call(&self, eventfd: BorrowedFd<'_>) {
        self.send(13, &words(&[0]), &[eventfd]);
    }

    /// Waits until this many chains have been used, however often the ring wrapped around.
    pub fn used_up_to(&self, count: u16) {
        let start = Instant::now();
        while u16::from_le_bytes(self.read(USED + 2)) != count {
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "{count} chains are not given back"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until this many chains have been used. Returns their heads.
    pub fn used(&self, count: u16) -> Vec<u32> {
        self.used_up_to(count);
        let entry = |place| u32::from_le_bytes(self.read(USED + 4 + 8 * u64::from(place)));
        (0..count).map(entry).collect()
    }

    /// Returns the status byte of the request with this head, as [`Self::fill`] places it.
    pub fn status(&self, head: u16) -> u8 {
        self.read::<1>(DATA + 4096 * u64::from(head) + 1024)[0]
    }
}

/// Sends a message on the front end's connection, with descriptors beside it.
///
/// # Errors
/// If the server is gone, or takes nothing.
pub fn send(stream: &UnixStream, request: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut message = words32(&[request, 1, body.len() as u32]);
    message.extend(body);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(fds));
    }
    let sent = sendmsg(
        stream,
        &[IoSlice::new(&message)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )?;
    assert_eq!(sent, message.len());
    Ok(())
}

/// The words as bytes, as messages and memory have them.
pub fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn words32(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Size of the guest's memory.
pub const MEMORY_BYTES: u64 = 1 << 20;
/// The address that the front end states for the memory.
pub const USER: u64 = 0x7000_0000_0000;
/// Where the available ring is in the memory.
pub const AVAIL: u64 = 0x1000;
/// Where the used ring is.
pub const USED: u64 = 0x2000;
/// Where the requests are.
pub const DATA: u64 = 0x1_0000;
/// VERSION_1, PROTOCOL_FEATURES, INDIRECT_DESC, FLUSH.
pub const FEATURES: u64 = 1 << 32 | 1 << 30 | 1 << 28 | 1 << 9;
/// REPLY_ACK, CONFIG, INFLIGHT_SHMFD, STATUS, RESET_DEVICE.
pub const PROTOCOL: u64 = 1 << 3 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 16;
/// `VIRTQ_DESC_F_NEXT`
pub const NEXT: u16 = 1;
/// `VIRTQ_DESC_F_WRITE`
pub const WRITE: u16 = 2;
