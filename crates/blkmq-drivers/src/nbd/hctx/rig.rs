//! The set-up of this driver's tests: a server that the test itself plays, and the driver's context
//! beside it.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use blkmq_core::ids::HctxId;
use blkmq_host::device::Device;
use blkmq_host::ring::RingConfig;
use blkmq_nbd::codec::handshake::{OptionCode, write_greeting};
use blkmq_nbd::codec::option_reply::{Info, OptionReplies, ReplyKind};
use blkmq_nbd::codec::reply::{write_data_head, write_simple};
use blkmq_nbd::codec::request::{Command, RequestHeader};
use blkmq_nbd::codec::{HandshakeFlags, HeaderStyle};

use super::*;
use crate::nbd::{NbdConfig, NbdDevice, NbdDisk};
use crate::testing::{cookie, lend, request_with};

pub(super) const RICH: TransmissionFlags = TransmissionFlags::HAS_FLAGS
    .with(TransmissionFlags::SEND_FLUSH)
    .with(TransmissionFlags::SEND_FUA)
    .with(TransmissionFlags::SEND_TRIM)
    .with(TransmissionFlags::SEND_WRITE_ZEROES);
pub(super) const SHARED: TransmissionFlags = RICH.with(TransmissionFlags::CAN_MULTI_CONN);

/// A server that the test itself is, on a socket of its own.
pub(super) struct Server {
    pub(super) listener: UnixListener,
    pub(super) path: PathBuf,
    pub(super) style: HeaderStyle,
    pub(super) flags: TransmissionFlags,
    pub(super) size: u64,
    /// The instance that it reports; servers other than ours report none.
    pub(super) instance: Option<u64>,
}

/// A client of it.
pub(super) struct Client {
    pub(super) stream: UnixStream,
    pub(super) style: HeaderStyle,
}

impl Server {
    pub(super) fn new(style: HeaderStyle, flags: TransmissionFlags) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("blkmq-nbd-{}-{number}.sock", std::process::id());
        let path = std::env::temp_dir().join(name);
        Self {
            listener: UnixListener::bind(&path).unwrap(),
            path,
            style,
            flags,
            size: 4 << 20,
            instance: None,
        }
    }

    /// How to reach it.
    pub(super) fn config(&self, keys: &[(&str, &str)]) -> NbdConfig {
        let uri = format!("nbd+unix:///?socket={}", self.path.display());
        let mut config = NbdConfig::new(&uri).unwrap();
        keys.iter()
            .for_each(|(key, value)| config.set(key, value).unwrap());
        config
    }

    /// Takes one client through the handshake.
    pub(super) fn accept(&self) -> Client {
        let (mut stream, _) = self.listener.accept().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut out = Vec::new();
        let flags = HandshakeFlags::FIXED_NEWSTYLE.with(HandshakeFlags::NO_ZEROES);
        write_greeting(flags, &mut out);
        stream.write_all(&out).unwrap();
        stream.read_exact(&mut [0; 4]).unwrap();
        loop {
            let mut header = [0; 16];
            stream.read_exact(&mut header).unwrap();
            let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
            let option = OptionCode(word(8));
            stream.read_exact(&mut vec![0; word(12) as usize]).unwrap();
            out.clear();
            self.answer(option, &mut out);
            stream.write_all(&out).unwrap();
            if option == OptionCode::GO {
                let style = self.style;
                return Client { stream, style };
            }
        }
    }

    pub(super) fn answer(&self, option: OptionCode, out: &mut Vec<u8>) {
        let mut replies = OptionReplies::new(option, out);
        let is_granted = match option {
            OptionCode::EXTENDED_HEADERS => self.style == HeaderStyle::Extended,
            OptionCode::STRUCTURED_REPLY => self.style == HeaderStyle::Structured,
            OptionCode::SESSION => self.instance.is_some(),
            _ => option == OptionCode::GO,
        };
        if !is_granted {
            return replies.error(ReplyKind::ERR_UNSUP, "no");
        }
        if option == OptionCode::GO {
            replies.info(Info::Export {
                size_bytes: self.size,
                flags: self.flags,
            });
        }
        if let (OptionCode::SESSION, Some(instance)) = (option, self.instance) {
            replies.session(instance);
        }
        replies.ack();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Client {
    /// Receives the header of a request, and none of its data.
    pub(super) fn header(&mut self) -> RequestHeader {
        let mut bytes = vec![0; self.style.request_bytes()];
        self.stream.read_exact(&mut bytes).unwrap();
        RequestHeader::parse(self.style, &bytes).unwrap().unwrap()
    }

    /// Receives one request, and its data.
    pub(super) fn request(&mut self) -> (RequestHeader, Vec<u8>) {
        let header = self.header();
        let is_write = header.command == Command::WRITE;
        let mut data = vec![0; if is_write { header.length as usize } else { 0 }];
        self.stream.read_exact(&mut data).unwrap();
        (header, data)
    }

    pub(super) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// Answers a request that has no data, or with this data.
    pub(super) fn reply(&mut self, header: &RequestHeader, data: &[u8]) {
        let mut out = Vec::new();
        match self.style {
            HeaderStyle::Simple => write_simple(header.cookie, None, &mut out),
            style if data.is_empty() => {
                use blkmq_nbd::codec::reply::{ChunkHead, ChunkKind, write_chunk_head};
                let head = ChunkHead {
                    cookie: header.cookie,
                    offset: header.offset,
                    payload_bytes: 0,
                    kind: ChunkKind::NONE,
                    flags: blkmq_nbd::codec::ChunkFlags::DONE,
                };
                write_chunk_head(style, &head, &mut out);
            }
            style => write_data_head(
                style,
                header.cookie,
                header.offset,
                header.offset,
                data.len() as u64,
                &mut out,
            ),
        }
        out.extend_from_slice(data);
        self.send(&out);
    }
}

/// A hardware context with its ring.
pub(super) struct Rig {
    pub(super) hctx: NbdHctx,
    pub(super) ring: RingHandle,
    pub(super) now: Instant,
}

/// Connects to `server`; the first connection is accepted here.
pub(super) fn rig(server: &Server, keys: &[(&str, &str)]) -> (Rig, Client) {
    let config = server.config(&[&[("connections", "1")], keys].concat());
    let (device, client) = device(server, &config);
    device.hctxs(1, 1);
    (Rig::new(&device, 0), client)
}

/// Makes a drive; its first connection is accepted here.
pub(super) fn device(server: &Server, config: &NbdConfig) -> (NbdDevice, Client) {
    let (disk, client) = std::thread::scope(|scope| {
        let disk = scope.spawn(|| NbdDisk::open(config));
        let client = server.accept();
        (disk.join().unwrap().unwrap(), client)
    });
    (NbdDevice::new(disk, DEPTH), client)
}

impl Rig {
    /// Opens a hardware context of a drive.
    pub(super) fn new(device: &NbdDevice, hctx: u16) -> Self {
        let ring = RingHandle::new(RingConfig::default()).expect("io_uring is available");
        Self {
            hctx: device.hctx(&ring, HctxId(hctx)).unwrap(),
            ring,
            now: Instant(1),
        }
    }

    pub(super) fn issue(&mut self, tag: u32, rq: &Request) -> Issued {
        self.hctx.issue(rq, cookie(tag), true, self.now)
    }

    /// Lets what is to happen happen, for at most 20 ms.
    pub(super) fn turn(&mut self) -> Vec<Done> {
        let mut done = Vec::new();
        self.ring.wait(Some(Nanos::from_millis(20)));
        self.ring.reap();
        self.hctx.reap(self.now, &mut done);
        self.hctx.check();
        done
    }

    /// Waits for so many ends; their tags and statuses, by tag.
    pub(super) fn wait(&mut self, count: usize) -> Vec<(u32, Status)> {
        let mut done = Vec::new();
        for _ in 0..1000 {
            if done.len() >= count {
                break;
            }
            let ended = self.turn().into_iter();
            done.extend(ended.map(|done| (done.cookie.tag().0, done.status)));
        }
        assert_eq!(done.len(), count, "{done:?}");
        done.sort_by_key(|end| end.0);
        done
    }

    pub(super) fn timed_out(&mut self, tag: u32) -> TimedOut {
        self.hctx.timed_out(cookie(tag))
    }

    pub(super) fn connections(&self) -> usize {
        self.hctx.connections()
    }

    pub(super) fn wait_for_connections(&mut self, count: usize) {
        for _ in 0..1000 {
            if self.hctx.connections() == count {
                return;
            }
            assert!(self.turn().is_empty());
        }
        panic!("{} of {count} connections", self.hctx.connections());
    }
}

pub(super) fn read(offset: u64, memory: &mut [u8]) -> Box<Request> {
    request_with(Op::Read, Flags::NONE, 0, offset, &[lend(memory)])
}

pub(super) fn write(offset: u64, memory: &mut [u8]) -> Box<Request> {
    request_with(Op::Write, Flags::NONE, 0, offset, &[lend(memory)])
}

pub(super) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 7) as u8 ^ (at >> 9) as u8).collect()
}

pub(super) const DEPTH: u32 = 32;
