//! Tests of front doors of one's own over unix sockets, served as the daemon serves those of the registry. In this
//! protocol a request is `r`, `w`, `f` or `e`, a mark, a block number and a number of blocks, each one byte; a write's data
//! follows. The reply is the mark, `.` or `!`, and what a read has read.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use blkmq_config::{Config, DiskSpec, plan};
use blkmq_core::bio::{Op, Status};
use blkmq_core::ids::ReactorId;
use blkmq_core::time::Nanos;
use blkmq_export::common::{AddressLimits, Common};
use blkmq_export::front_door::{Address, FrontDoor, Given, Offer, Served};
use blkmq_export::handover::codec::Session;
use blkmq_export::handover::{Handover, Phase};
use blkmq_export::stream::{Decoded, LEN_MAX, Request, StreamDoor, StreamProtocol};
use blkmq_host::disk::Disk;
use blkmq_host::engine::{Engine, EngineConfig};
use blkmq_testkit::Scratch;

#[derive(Debug)]
struct Blocks;

impl StreamProtocol for Blocks {
    fn name(&self) -> &'static str {
        "blocks"
    }

    fn help(&self) -> &'static str {
        "Blocks of the first disk for clients of the unix socket ADDRESS"
    }

    fn decode(&self, disk: &Disk, received: &[u8]) -> Decoded {
        let block = u64::from(disk.block_size);
        let [kind, mark, at, count, ..] = *received else {
            return Decoded::Incomplete;
        };
        let (op, len) = match kind {
            b'r' => (Op::Read, u64::from(count) * block),
            b'w' => (Op::Write, u64::from(count) * block),
            b'f' => (Op::Flush, 0),
            b'e' => return Decoded::Reply(HEADER, vec![mark, b'=']),
            // Mistakes of a protocol's author.
            b'0' => return Decoded::Reply(0, Vec::new()),
            b'9' => return Decoded::Request(HEADER + 1, Request::default()),
            b'd' => {
                let (op, len) = (Op::Write, block);
                return Decoded::Request(
                    HEADER,
                    Request {
                        op,
                        len,
                        ..Request::default()
                    },
                );
            }
            _ => return Decoded::Malformed("no request begins so"),
        };
        let data = if op == Op::Write { len as usize } else { 0 };
        if received.len() < HEADER + data {
            return Decoded::Incomplete;
        }
        let request = Request {
            op,
            offset: if op == Op::Flush { 0 } else { u64::from(at) * block },
            len,
            data_at: HEADER,
            cookie: mark.into(),
            ..Request::default()
        };
        Decoded::Request(HEADER + data, request)
    }

    fn encode(&self, request: &Request, status: Status, data: &[&[u8]], replies: &mut Vec<u8>) {
        replies.extend([request.cookie as u8, if status.is_ok() { b'.' } else { b'!' }]);
        data.iter().for_each(|piece| replies.extend_from_slice(piece));
    }
}

struct Daemon {
    engine: Engine,
    common: Arc<Common>,
    served: Vec<Box<dyn Served>>,
}

impl Daemon {
    fn start(address: &dyn Address, handover: Handover) -> Self {
        let disks = vec![DiskSpec::parse(&format!("name=vm,ram=1M,block_size={BLOCK}")).unwrap()];
        let queues = plan(&Config {
            disks,
            ..Config::default()
        })
        .unwrap()
        .queues;
        let engine = Engine::start(EngineConfig {
            queues,
            ..EngineConfig::default()
        })
        .unwrap();
        let common = Arc::new(Common::taking_part(32 << 20, 4, &Arc::new(handover)));
        let opened = address.open(&[], &common.handover).unwrap();
        let serve = |opened: Box<dyn blkmq_export::front_door::Opened>| {
            let offer = Offer {
                disks: None,
                admitted: AddressLimits::default(),
                at: address,
            };
            opened.serve(&engine, offer, &common).unwrap()
        };
        let served = opened.into_iter().map(serve).collect();
        Self {
            engine,
            common,
            served,
        }
    }

    fn end(self) {
        self.served.iter().for_each(|served| served.close());
        self.engine.shutdown(TIME).unwrap();
    }
}

struct Client(UnixStream);

impl Client {
    fn connect(address: &dyn Address) -> Self {
        let path = address.to_string();
        let stream = UnixStream::connect(path.strip_prefix("unix:").unwrap()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        Self(stream)
    }

    fn send(&mut self, request: [u8; HEADER], data: &[u8]) {
        self.0.write_all(&request).unwrap();
        self.0.write_all(data).unwrap();
    }

    fn receive(&mut self, bytes: usize) -> Vec<u8> {
        let mut found = vec![0; bytes];
        self.0.read_exact(&mut found).unwrap();
        found
    }

    fn has_ended(&mut self) -> bool {
        match self.0.read(&mut [0]) {
            Ok(bytes) => bytes == 0,
            Err(error) => error.kind() == ErrorKind::ConnectionReset,
        }
    }
}

fn with_daemon(test: impl FnOnce(&dyn Address)) {
    let scratch = Scratch::new();
    let address = address(&scratch);
    let daemon = Daemon::start(&*address, Handover::new(Phase::Serving));
    test(&*address);
    daemon.end();
    assert!(!scratch.path("blocks.sock").exists());
}

fn address(scratch: &Scratch) -> Box<dyn Address> {
    let text = format!("unix:{}", scratch.path("blocks.sock").display());
    StreamDoor::new(Blocks).parse(&Given::new(&text)).unwrap()
}

fn blocks(count: usize) -> Vec<u8> {
    (0..count * BLOCK).map(|at| (at / 7 + at / BLOCK) as u8).collect()
}

#[test]
fn stream_door_carries_data_of_many_requests_at_once() {
    with_daemon(|address| {
        let mut client = Client::connect(address);
        let data = blocks(255);
        client.send([b'w', 1, 0, 255], &data);
        assert_eq!(client.receive(2), [1, b'.']);
        client.send([b'r', 2, 0, 255], &[]);
        assert_eq!(client.receive(2), [2, b'.']);
        assert!(client.receive(data.len()) == data, "what was written is read");
        let mut requests = Vec::new();
        (0..=255).for_each(|mark| requests.extend([b'r', mark, mark, 1]));
        (0..=255).for_each(|mark| requests.extend([b'f', mark, 0, 0]));
        client.0.write_all(&requests).unwrap();
        let mut ended = [0; 256];
        for _ in 0..2 * ended.len() {
            let reply = client.receive(2);
            assert_eq!(reply[1], b'.', "{reply:?}");
            let times: &mut usize = &mut ended[usize::from(reply[0])];
            *times += 1;
            // A memory disk ends each at once, so the replies of reads come first.
            if *times == 1 {
                client.receive(BLOCK);
            }
        }
        assert_eq!(ended, [2; 256]);
    });
}

#[test]
fn stream_door_answers_what_came_before_a_malformed_request() {
    with_daemon(|address| {
        let mut client = Client::connect(address);
        client
            .0
            .write_all(&[b'f', 9, 0, 0, b'?', b'?', b'?', b'?'])
            .unwrap();
        assert_eq!(client.receive(2), [9, b'.']);
        assert!(client.has_ended());
        assert_eq!(
            Client::connect(address).read_block(3),
            vec![0; BLOCK],
            "others are served"
        );
    });
}

#[test]
fn stream_door_answers_without_a_disk_and_survives_mistakes_of_its_protocol() {
    with_daemon(|address| {
        let mut client = Client::connect(address);
        client.0.write_all(&[b'e', 7, 0, 0, b'e', 8, 0, 0]).unwrap();
        assert_eq!(client.receive(4), [7, b'=', 8, b'=']);
        for mistake in [b'0', b'9', b'd'] {
            client.send([mistake, 0, 0, 0], &[]);
            assert!(client.has_ended(), "{}", char::from(mistake));
            client = Client::connect(address);
            assert_eq!(client.read_block(3), vec![0; BLOCK]);
        }
        client.send([b'r', 5, 255, 4], &[]);
        assert_eq!(client.receive(2), [5, b'!'], "a range beyond the end");
    });
}

#[test]
fn stream_door_holds_a_client_back_that_reads_no_replies() {
    with_daemon(|address| {
        let mut client = Client::connect(address);
        client.0.set_nonblocking(true).unwrap();
        let mut sent = 0;
        while sent < 4 * LEN_MAX as usize && client.0.write(&[b'r', 0, 0, 255]).is_ok() {
            sent += HEADER;
        }
        assert_eq!(
            Client::connect(address).read_block(3),
            vec![0; BLOCK],
            "others are served"
        );
        client.0.set_nonblocking(false).unwrap();
        for _ in 0..sent / HEADER {
            assert_eq!(client.receive(2), [0, b'.']);
            client.receive(255 * BLOCK);
        }
    });
}

#[test]
fn stream_door_hands_a_client_over_within_a_request() {
    let scratch = Scratch::new();
    let address = address(&scratch);
    let outgoing = Daemon::start(&*address, Handover::new(Phase::Serving));
    let mut client = Client::connect(&*address);
    let data = blocks(2);
    client.send([b'w', 1, 5, 2], &data[..BLOCK]);
    assert_eq!(Client::connect(&*address).read_block(3), vec![0; BLOCK]);

    let from = &outgoing.common.handover;
    from.suspend();
    from.wait_until_settled(Duration::from_secs(10)).unwrap();
    let to = Handover::new(Phase::Suspended);
    from.sockets()
        .unwrap()
        .into_iter()
        .for_each(|(name, socket)| to.inherit(name, socket));
    from.paths()
        .into_iter()
        .for_each(|(name, file)| to.inherit_path(name, file));
    let incoming = Daemon::start(&*address, to);
    let to = &incoming.common.handover;
    for saved in from.take_saved() {
        let fds = saved.fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
        let session = Session {
            door: saved.door.to_owned(),
            address: saved.address,
            body: saved.body,
        };
        let engine = &incoming.engine;
        for wrong in [&session.body[..session.body.len() - 1], &[9]] {
            let session = Session {
                body: wrong.to_vec(),
                ..session.clone()
            };
            let fds = saved.fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
            assert!(to.restore(engine, ReactorId(0), &session, fds).is_err());
        }
        to.restore(engine, ReactorId(0), &session, fds).unwrap();
    }
    to.wait_until_settled(Duration::from_secs(10)).unwrap();
    from.leave();
    to.resume();
    outgoing.engine.shutdown(TIME).unwrap();

    client.0.write_all(&data[BLOCK..]).unwrap();
    assert_eq!(client.receive(2), [1, b'.']);
    assert_eq!(client.read_block(6), data[BLOCK..]);
    incoming.end();
}

#[test]
fn stream_door_refuses_addresses_where_nobody_proves_who_he_is() {
    for text in ["tcp:127.0.0.1:1", "tcp:localhost:1"] {
        let error = StreamDoor::new(Blocks).parse(&Given::new(text)).unwrap_err();
        assert!(error.to_string().contains("must be a unix socket"), "{error}");
    }
}

impl Client {
    fn read_block(&mut self, at: u8) -> Vec<u8> {
        self.send([b'r', 77, at, 1], &[]);
        assert_eq!(self.receive(2), [77, b'.']);
        self.receive(BLOCK)
    }
}

const HEADER: usize = 4;
const BLOCK: usize = 4096;
const TIME: Nanos = Nanos::from_secs(10);
