//! A front end and its driver for the tests, which can violate the protocol: one ring of 16 descriptors in a
//! file of shared memory, which is read and written through the file.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::{pread, pwrite};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

pub(crate) struct Client {
    stream: UnixStream,
    features: u64,
    pub(crate) memory: OwnedFd,
    kick: OwnedFd,
}

impl Client {
    /// Connects and shares memory; no ring is set up yet.
    pub(crate) fn connect(path: &Path) -> Self {
        Self::connect_with(path, FEATURES)
    }

    /// The same with these features.
    pub(crate) fn connect_with(path: &Path, features: u64) -> Self {
        Self::of(UnixStream::connect(path).unwrap(), features)
    }

    /// The same over an existing connection.
    pub(crate) fn of(stream: UnixStream, features: u64) -> Self {
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
    #[allow(dead_code, reason = "for those who kill the server")]
    pub(crate) fn connect_again(&mut self, path: &Path) {
        self.stream = UnixStream::connect(path).unwrap();
        self.stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        self.set_up();
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
    pub(crate) fn share(&self, bytes: u64) {
        self.share_at(bytes, USER);
    }

    /// The same, at another address of the front end.
    pub(crate) fn share_at(&self, bytes: u64, user: u64) {
        let table = words(&[1, 0, bytes, user, 0]);
        self.send(5, &table, &[self.memory.as_fd()]);
    }

    /// Has the ring served.
    pub(crate) fn start(&self) {
        self.start_at(0);
    }

    /// Has the ring served from an index of the available ring on.
    pub(crate) fn start_at(&self, base: u64) {
        self.send(8, &words(&[16 << 32]), &[]);
        self.send(10, &words(&[base << 32]), &[]);
        let addresses = [0, USER, USER + USED, USER + AVAIL, 0];
        self.send(9, &words(&addresses), &[]);
        self.send(12, &words(&[0]), &[self.kick.as_fd()]);
        self.send(18, &words(&[1 << 32]), &[]);
    }

    pub(crate) fn send(&self, request: u32, body: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut message = Vec::new();
        for word in [request, 1, body.len() as u32] {
            message.extend(word.to_ne_bytes());
        }
        message.extend(body);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(fds));
        }
        let bytes = [IoSlice::new(&message)];
        let sent = sendmsg(&self.stream, &bytes, &mut ancillary, SendFlags::NOSIGNAL);
        assert_eq!(sent, Ok(message.len()));
    }

    /// Receives a reply and returns its body.
    pub(crate) fn reply(&mut self) -> Vec<u8> {
        let mut header = [0; 12];
        self.stream.read_exact(&mut header).expect("a reply");
        let bytes = u32::from_ne_bytes(header[8..].try_into().unwrap());
        let mut body = vec![0; bytes as usize];
        self.stream.read_exact(&mut body).unwrap();
        body
    }

    /// Sends a message whose reply is a number, and returns that number.
    pub(crate) fn ask(&mut self, request: u32, body: &[u8]) -> u64 {
        self.send(request, body, &[]);
        u64::from_ne_bytes(self.reply().try_into().expect("a number"))
    }

    /// Says whether the other side closes the connection.
    pub(crate) fn is_hung_up(&mut self) -> bool {
        matches!(self.stream.read(&mut [0]), Ok(0))
    }

    pub(crate) fn write(&self, at: u64, bytes: &[u8]) {
        assert_eq!(pwrite(&self.memory, bytes, at), Ok(bytes.len()));
    }

    pub(crate) fn read<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        assert_eq!(pread(&self.memory, &mut bytes, at), Ok(N));
        bytes
    }

    pub(crate) fn descriptor(&self, index: u64, at: u64, bytes: u32, flags: u16, next: u16) {
        let word = u64::from(bytes) | u64::from(flags) << 32 | u64::from(next) << 48;
        self.write(16 * index, &words(&[at, word]));
    }

    /// Writes a request of one block at `DATA + 4096 * head` into three descriptors from `head` on.
    pub(crate) fn request(&self, head: u16, kind: u32, sector: u64) {
        let base = self.fill(head, kind, sector);
        let flags = if kind == 0 { NEXT | WRITE } else { NEXT };
        self.descriptor(head.into(), base, 16, NEXT, head + 1);
        self.descriptor(u64::from(head) + 1, base + 512, 512, flags, head + 2);
        self.descriptor(u64::from(head) + 2, base + 1024, 1, WRITE, 0);
    }

    /// Writes the header of a request there, with an empty status. Returns its address.
    pub(crate) fn fill(&self, head: u16, kind: u32, sector: u64) -> u64 {
        let base = DATA + 4096 * u64::from(head);
        self.write(base, &words(&[u64::from(kind), sector]));
        self.write(base + 1024, &[0xff]);
        base
    }

    /// Makes heads available, from the first entry of the ring on.
    pub(crate) fn offer(&self, heads: &[u16]) {
        for (place, head) in (0..).zip(heads) {
            self.write(AVAIL + 4 + 2 * place, &head.to_le_bytes());
        }
        self.write(AVAIL + 2, &(heads.len() as u16).to_le_bytes());
        self.kick();
    }

    pub(crate) fn kick(&self) {
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
    }

    /// Has the server write to this eventfd when it has given chains back.
    #[allow(dead_code, reason = "others poll the ring")]
    pub(crate) fn call(&self, eventfd: BorrowedFd<'_>) {
        self.send(13, &words(&[0]), &[eventfd]);
    }

    /// Waits until this many chains have been used, however often the ring wrapped around.
    pub(crate) fn used_up_to(&self, count: u16) {
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
    pub(crate) fn used(&self, count: u16) -> Vec<u32> {
        self.used_up_to(count);
        let entry = |place| u32::from_le_bytes(self.read(USED + 4 + 8 * u64::from(place)));
        (0..count).map(entry).collect()
    }

    pub(crate) fn status(&self, head: u16) -> u8 {
        self.read::<1>(DATA + 4096 * u64::from(head) + 1024)[0]
    }
}

pub(crate) fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

pub(crate) const MEMORY_BYTES: u64 = 1 << 20;
const USER: u64 = 0x7000_0000_0000;
pub(crate) const AVAIL: u64 = 0x1000;
pub(crate) const USED: u64 = 0x2000;
pub(crate) const DATA: u64 = 0x1_0000;
/// VERSION_1, PROTOCOL_FEATURES, INDIRECT_DESC, FLUSH.
pub(crate) const FEATURES: u64 = 1 << 32 | 1 << 30 | 1 << 28 | 1 << 9;
/// REPLY_ACK, CONFIG, INFLIGHT_SHMFD, STATUS, RESET_DEVICE.
const PROTOCOL: u64 = 1 << 3 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 16;
pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
