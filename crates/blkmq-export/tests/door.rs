//! Tests the front door with clients that pipeline, are slow, disconnect or request too much: a
//! whole engine in this process, with limits short enough to wait for.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use blkmq_config::{Config, DiskSpec, plan};
use blkmq_core::time::Nanos;
use blkmq_export::common::{
    ALLOWANCE, AddressLimits, CONNECTIONS_MAX, Common, MemoryBudget, OwnedPath, Socket,
};
use blkmq_export::nbd::door::{self, Served};
use blkmq_export::nbd::limits::Limits;
use blkmq_host::engine::{Engine, EngineConfig};
use blkmq_nbd::client::{Wanted, negotiate};
use blkmq_nbd::codec::reply::ReplyHead;
use blkmq_nbd::codec::request::{Command, RequestHeader};
use blkmq_nbd::codec::{ChunkFlags, CommandFlags, HeaderStyle};

#[test]
fn pipelined_block_status_and_refused_requests_are_all_answered() {
    let server = Server::start(Limits::default(), 64 * MIB);
    let client = server.connect(HeaderStyle::Structured);
    let mut writer = client.stream.try_clone().unwrap();
    let sender = std::thread::spawn(move || {
        let mut requests = Vec::new();
        for cookie in 0..PIPELINED {
            let (command, offset) = match cookie % 3 {
                0 => (Command::BLOCK_STATUS, 0),
                1 => (Command::READ, DISK_BYTES),
                _ => (Command::BLOCK_STATUS, DISK_BYTES),
            };
            header(command, cookie, offset, 4096).write(HeaderStyle::Structured, &mut requests);
        }
        writer.write_all(&requests).expect("the server goes on reading");
    });
    // The client reads nothing at first, so that replies accumulate up to the limit of unsent
    // replies.
    std::thread::sleep(Duration::from_millis(300));
    let mut replies = Replies::new(client);
    // Block status has to be looked up, so its replies come later.
    let mut answered: Vec<(u64, bool)> = (0..PIPELINED).map(|_| replies.next()).collect();
    answered.sort_unstable();
    let expected = (0..PIPELINED).map(|cookie| (cookie, cookie % 3 != 0));
    assert!(
        answered.into_iter().eq(expected),
        "each once, and as it has to be"
    );
    sender.join().unwrap();
    server.end(replies.client);
}

#[test]
fn read_of_zeroes_brings_a_hole_and_a_read_of_anything_else_its_data() {
    let server = Server::start(Limits::default(), 64 * MIB);
    let mut writer = server.connect(HeaderStyle::Simple);
    // The last byte of the second block only; requests use the buffers of both blocks alternately.
    writer.write(4096 + 3584, &[&[0; 511][..], &[7]].concat());
    for style in [HeaderStyle::Structured, HeaderStyle::Extended] {
        let mut replies = Replies::new(server.connect(style));
        for (cookie, is_hole) in [(0, true), (1, false), (0, true), (1, false)] {
            let mut read = Vec::new();
            header(Command::READ, cookie, cookie * 4096, 4096).write(style, &mut read);
            replies.client.stream.write_all(&read).unwrap();
            assert_eq!(replies.next(), (cookie, false));
            let payload = if is_hole { 12 } else { 8 + 4096 };
            assert_eq!(replies.payload().len(), payload, "block {cookie}");
        }
        assert!(replies.payload().ends_with(&[0, 0, 7]));
    }
    assert!(
        writer.read(0, 4096).iter().all(|byte| *byte == 0),
        "simple replies bring data"
    );
    server.end(writer);
}

#[test]
fn half_a_request_and_then_nothing_is_cut_at_its_deadline() {
    let limits = Limits {
        half_request_deadline: SHORT,
        ..Limits::default()
    };
    let server = Server::start(limits, 64 * MIB);
    let whole = write_request(0, 0, &[7; 4096]);
    // In the middle of a header, right after it, and in the middle of the payload.
    for cut in [14, 28, 2000] {
        let mut client = server.connect(HeaderStyle::Simple);
        let start = Instant::now();
        client.stream.write_all(&whole[..cut]).unwrap();
        assert!(client.is_hung_up(), "cut at {cut}");
        assert!(
            start.elapsed() >= SHORT / 2,
            "cut at {cut} after {:?}",
            start.elapsed()
        );
    }
    let idle = server.connect(HeaderStyle::Simple);
    std::thread::sleep(2 * SHORT);
    server.end(idle);
}

#[test]
fn writer_that_is_always_half_a_message_behind_is_not_cut() {
    let limits = Limits {
        half_request_deadline: SHORT,
        ..Limits::default()
    };
    let server = Server::start(limits, 64 * MIB);
    let mut client = server.connect(HeaderStyle::Simple);
    let writes = 4 * SHORT.as_millis() as u64 / 50;
    let stream: Vec<u8> = (0..writes)
        .flat_map(|number| write_request(number, number * 65536, &[number as u8; 65536]))
        .collect();
    let message = stream.len() / writes as usize;
    let mut sent = 0;
    for number in 1..=writes as usize {
        let until = (number * message + 1000).min(stream.len());
        client.stream.write_all(&stream[sent..until]).unwrap();
        sent = until;
        std::thread::sleep(Duration::from_millis(50));
    }
    for number in 0..writes {
        assert_eq!(client.reply(), (number, 0));
    }
    for number in 0..writes {
        let data = client.read(number * 65536, 65536);
        assert!(data.iter().all(|byte| *byte == number as u8));
    }
    server.end(client);
}

#[test]
fn client_that_sends_byte_by_byte_and_reads_byte_by_byte_is_served() {
    let server = Server::start(Limits::default(), 64 * MIB);
    let mut client = server.connect(HeaderStyle::Simple);
    let mut requests = write_request(1, 512, &[0x5a; 512]);
    header(Command::READ, 2, 512, 512).write(HeaderStyle::Simple, &mut requests);
    for byte in &requests {
        client.stream.write_all(&[*byte]).unwrap();
    }
    assert_eq!(client.reply(), (1, 0));
    assert_eq!(client.reply(), (2, 0));
    let mut one = [0];
    for _ in 0..512 {
        client.stream.read_exact(&mut one).unwrap();
        assert_eq!(one, [0x5a]);
    }
    server.end(client);
}

#[test]
fn clients_that_vanish_in_any_state_leave_nothing_behind() {
    let server = Server::start(Limits::default(), 64 * MIB);
    let mut requests = write_request(1, 0, &[1; 1024]);
    // Large enough to need shared memory, and to take several turns to send.
    header(Command::READ, 2, 0, MIB).write(HeaderStyle::Simple, &mut requests);
    requests.extend(write_request(3, 4096, &vec![2; 512 << 10]));
    header(Command::FLUSH, 4, 0, 0).write(HeaderStyle::Simple, &mut requests);
    for cut in (0..1200).step_by(7).chain([2000, 100_000, requests.len()]) {
        let mut client = server.connect(HeaderStyle::Simple);
        client.stream.set_nonblocking(true).unwrap();
        let sent = client.stream.write(&requests[..cut]).unwrap_or(0);
        assert!(sent > 0 || cut == 0);
        if cut % 2 == 0 {
            // Reads some replies, or a part of one.
            std::thread::sleep(Duration::from_micros(200));
            let _ = client.stream.read(&mut vec![0; 16 + cut * 100]);
        }
    }
    for cut in 0..40 {
        // In the middle of the negotiation.
        let mut stream = UnixStream::connect(&server.path).unwrap();
        stream.write_all(&[0; 40][..cut]).unwrap();
    }
    let mut good = server.connect(HeaderStyle::Simple);
    good.write(0, &[3; 4096]);
    assert_eq!(good.read(0, 4096), [3; 4096]);
    server.until_memory_is_free();
    server.end(good);
}

#[test]
fn all_connections_together_hold_no_more_payload_than_the_memory_and_all_are_served() {
    let server = Server::start(Limits::default(), 32 * MIB);
    let served: Vec<u32> = std::thread::scope(|scope| {
        let load = || {
            let mut client = server.connect(HeaderStyle::Simple);
            // 40 MiB at once from each client.
            let mut requests = Vec::new();
            for cookie in 0..40 {
                header(Command::READ, cookie, cookie * MIB, MIB).write(HeaderStyle::Simple, &mut requests);
            }
            client.stream.write_all(&requests).unwrap();
            let mut data = vec![0; MIB as usize];
            for _ in 0..40 {
                assert!(server.memory.used() <= server.memory.bytes_max());
                assert_eq!(client.reply().1, 0);
                client.stream.read_exact(&mut data).unwrap();
            }
            40
        };
        let loads: Vec<_> = (0..6).map(|_| scope.spawn(load)).collect();
        loads.into_iter().map(|load| load.join().unwrap()).collect()
    });
    assert_eq!(served, [40; 6]);
    server.until_memory_is_free();
    let client = server.connect(HeaderStyle::Simple);
    server.end(client);
}

#[test]
fn memory_held_by_a_client_that_does_not_read_delays_no_small_requests_of_others() {
    let limits = Limits {
        unread_reply_deadline: LONGER,
        ..Limits::default()
    };
    let server = Server::start(limits, 32 * MIB);
    // A connection that is alone is not read from any more as soon as it does not take its replies.
    let mut greedy: Vec<Client> = (0..4).map(|_| server.connect(HeaderStyle::Simple)).collect();
    let start = Instant::now();
    for client in &mut greedy {
        let mut requests = Vec::new();
        for cookie in 0..40 {
            header(Command::READ, cookie, 0, MIB).write(HeaderStyle::Simple, &mut requests);
        }
        client.stream.write_all(&requests).unwrap();
    }
    // More than half of the memory is reserved for others.
    let filled = server.memory.bytes_max() / 2 - MIB;
    while server.memory.used() < filled {
        assert!(
            start.elapsed() < PATIENCE,
            "{} bytes are used",
            server.memory.used()
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut small = server.connect(HeaderStyle::Simple);
    for _ in 0..10 {
        small.read(0, ALLOWANCE as usize);
    }
    // Sampled several times: it is not full while a request's memory is passed to the next.
    let is_full = (0..200).any(|_| {
        std::thread::sleep(Duration::from_millis(1));
        server.memory.used() >= filled
    });
    // If the machine is so busy that the deadline is near, the result means nothing.
    assert!(
        is_full || start.elapsed() >= LONGER / 2,
        "small requests waited until the memory was free"
    );
    let mut large = server.connect(HeaderStyle::Simple);
    assert_eq!(large.read(0, 4 * MIB as usize).len(), 4 * MIB as usize);
    assert!(start.elapsed() >= LONGER / 2);
    server.until_memory_is_free();
    server.end(large);
}

#[test]
fn memory_that_cannot_hold_one_request_is_refused() {
    let engine = engine();
    let (socket, path) = socket();
    let common = Arc::new(Common::new(MIB, CONNECTIONS_MAX));
    let refused = door::serve(&engine, address(socket, Limits::default()), &common);
    let message = refused.unwrap_err().to_string();
    assert!(
        message.contains("1048576") && message.contains("33554432"),
        "{message}"
    );
    assert!(!path.exists());
    engine.shutdown(Nanos::from_secs(5)).unwrap();
}

fn address(socket: Socket, limits: Limits) -> Served<'static> {
    Served {
        tls: Arc::default(),
        socket,
        disks: None,
        limits,
        admitted: AddressLimits::default(),
    }
}

/// A disk in memory behind a front door in this process.
struct Server {
    engine: Engine,
    memory: Arc<MemoryBudget>,
    path: PathBuf,
}

/// One connection in the transmission phase.
struct Client {
    stream: UnixStream,
    style: HeaderStyle,
}

/// Structured replies, parsed in bulk.
struct Replies {
    client: Client,
    input: Vec<u8>,
    at: usize,
    /// Bytes before `at` that are the latest chunk's payload.
    payload_bytes: usize,
}

impl Server {
    fn start(limits: Limits, memory_bytes: u64) -> Self {
        let engine = engine();
        let (socket, path) = socket();
        let common = Arc::new(Common::new(memory_bytes, CONNECTIONS_MAX));
        door::serve(&engine, address(socket, limits), &common).unwrap();
        Self {
            engine,
            memory: Arc::clone(&common.memory),
            path,
        }
    }

    fn connect(&self, style: HeaderStyle) -> Client {
        let mut stream = UnixStream::connect(&self.path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        let wanted = Wanted {
            style,
            block_status: style != HeaderStyle::Simple,
            session: None,
            ..Wanted::plain("vm1")
        };
        let agreed = negotiate(&mut stream, wanted).unwrap();
        assert_eq!(agreed.style, style);
        Client { stream, style }
    }

    fn until_memory_is_free(&self) {
        let start = Instant::now();
        while self.memory.used() > 0 {
            assert!(
                start.elapsed() < PATIENCE,
                "{} bytes are still used",
                self.memory.used()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Checks that `client` is still served, and that the engine ends without any request left.
    fn end(self, mut client: Client) {
        if client.style == HeaderStyle::Simple {
            client.read(0, 512);
        }
        drop(client);
        self.engine.shutdown(Nanos::from_secs(10)).unwrap();
        assert_eq!(self.memory.used(), 0);
    }
}

impl Client {
    /// The next reply's cookie and error.
    fn reply(&mut self) -> (u64, u32) {
        let mut head = [0; 16];
        self.stream.read_exact(&mut head).expect("a reply");
        let parsed = ReplyHead::parse(HeaderStyle::Simple, &head).expect("a reply's magic number");
        match parsed {
            Some((ReplyHead::Simple { cookie, error }, 16)) => (cookie, error),
            other => panic!("{other:?}"),
        }
    }

    fn read(&mut self, offset: u64, bytes: usize) -> Vec<u8> {
        let mut request = Vec::new();
        header(Command::READ, 99, offset, bytes as u64).write(self.style, &mut request);
        self.stream.write_all(&request).unwrap();
        assert_eq!(self.reply(), (99, 0));
        let mut data = vec![0; bytes];
        self.stream.read_exact(&mut data).unwrap();
        data
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        self.stream.write_all(&write_request(98, offset, data)).unwrap();
        assert_eq!(self.reply(), (98, 0));
    }

    /// Waits until the server closes the connection.
    fn is_hung_up(&mut self) -> bool {
        match self.stream.read(&mut [0; 64]) {
            Ok(bytes) => bytes == 0,
            Err(error) => error.kind() == ErrorKind::ConnectionReset,
        }
    }
}

impl Replies {
    fn new(client: Client) -> Self {
        Self {
            client,
            input: Vec::new(),
            at: 0,
            payload_bytes: 0,
        }
    }

    /// The payload of the latest chunk.
    fn payload(&self) -> &[u8] {
        &self.input[self.at - self.payload_bytes..self.at]
    }

    /// The cookie of the next request that is answered completely, and whether the answer is an
    /// error.
    fn next(&mut self) -> (u64, bool) {
        loop {
            let head =
                ReplyHead::parse(self.client.style, &self.input[self.at..]).expect("a reply's magic number");
            let Some((ReplyHead::Chunk(chunk), bytes)) = head else {
                self.receive();
                continue;
            };
            self.at += bytes;
            while self.input.len() - self.at < chunk.payload_bytes as usize {
                self.receive();
            }
            self.payload_bytes = chunk.payload_bytes as usize;
            self.at += self.payload_bytes;
            if chunk.flags.contains(ChunkFlags::DONE) {
                return (chunk.cookie, chunk.kind.is_error());
            }
        }
    }

    fn receive(&mut self) {
        self.input.drain(..self.at);
        self.at = 0;
        let mut more = [0; 65536];
        let bytes = self.client.stream.read(&mut more).expect("a reply in time");
        assert!(bytes > 0, "the server has hung up");
        self.input.extend(&more[..bytes]);
    }
}

fn engine() -> Engine {
    let disk = format!("name=vm1,ram={DISK_BYTES},group=/");
    let plan = plan(&Config {
        disks: vec![DiskSpec::parse(&disk).unwrap()],
        ..Config::default()
    });
    let plan = plan.unwrap();
    let config = EngineConfig {
        reactors: 2,
        queues: plan.queues,
        ..EngineConfig::default()
    };
    Engine::start(config).expect("io_uring is available")
}

fn socket() -> (Socket, PathBuf) {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("blkmq-door-{}-{number}", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    (Socket::Unix(listener, OwnedPath::of(path.clone()).ok()), path)
}

fn header(command: Command, cookie: u64, offset: u64, length: u64) -> RequestHeader {
    RequestHeader {
        cookie,
        offset,
        length,
        command,
        flags: CommandFlags::NONE,
    }
}

fn write_request(cookie: u64, offset: u64, data: &[u8]) -> Vec<u8> {
    let mut request = Vec::new();
    header(Command::WRITE, cookie, offset, data.len() as u64).write(HeaderStyle::Simple, &mut request);
    request.extend(data);
    request
}

const MIB: u64 = 1 << 20;
const DISK_BYTES: u64 = 64 * MIB;
/// More than the sockets, the receive buffer and the limit of unsent headers together can hold.
const PIPELINED: u64 = 60_000;
/// A deadline that a test can wait for, and that is long compared with a pause of 50 ms on a busy
/// machine.
const SHORT: Duration = Duration::from_millis(600);
const LONGER: Duration = Duration::from_secs(4);
const PATIENCE: Duration = Duration::from_secs(30);
