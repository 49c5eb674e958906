//! Counts the allocations in the daemon's request path: two connections in groups of their own,
//! reads, writes, flushes and zeroing through the NBD front door and through FUSE, every elevator,
//! disks in memory, on a file, mapped and encrypted. It is a binary of its own, since the allocator counts for
//! the whole process; the clients here allocate nothing themselves.

#[path = "../../../blkmq-host/tests/no_allocation/sys.rs"]
mod sys;

#[cfg(feature = "fuse")]
mod fuse;

use std::cell::Cell;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blkmq_config::{Config, DiskSpec, GroupSpec, plan};
use blkmq_core::sched::{self, ElevatorType};
use blkmq_core::time::Nanos;
use blkmq_export::common::{AddressLimits, CONNECTIONS_MAX, Common, OwnedPath, Socket};
use blkmq_export::nbd::door::{self, Served};
use blkmq_export::nbd::limits::Limits;
use blkmq_host::encrypted::{EncryptedData, EncryptedSpec, SectorCipher};
use blkmq_host::engine::{Engine, EngineConfig};
use blkmq_nbd::client::{Wanted, negotiate};
use blkmq_nbd::codec::request::{Command, RequestHeader};
use blkmq_nbd::codec::{CommandFlags, HeaderStyle};

/// Bytes of each disk.
const DISK: u64 = 16 << 20;
const BLOCK: usize = 4096;
/// Requests that one connection has under way.
const DEPTH: usize = 16;
/// Rounds before counting, by which buffers and lists have grown to what they need.
const WARM_UP: usize = 300;
const ROUNDS: usize = 500;
const TRIES: usize = 10;

fn main() {
    let dir = std::env::temp_dir().join(format!("blkmq-no-allocation-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    for elevator in sched::BUILT_IN {
        for source in ["ram", "file", "striped", "encrypted"] {
            let count = count(source, elevator, &dir);
            let requests = 2 * ROUNDS * DEPTH;
            println!("{source}, {elevator}: {count} allocations in {requests} requests over NBD");
            assert_eq!(count, 0, "{source} with {elevator}");
        }
    }
    #[cfg(feature = "fuse")]
    count_through_files(&dir);
    std::fs::remove_dir_all(&dir).unwrap();
    let before = sys::allocations();
    drop(std::hint::black_box(Box::new(7)));
    assert_eq!(sys::allocations() - before, 1, "the counter counts");
}

#[cfg(feature = "fuse")]
fn count_through_files(dir: &Path) {
    if !fuse::may_mount() {
        return blkmq_testkit::skip_of(
            "no_allocation::fuse",
            "only root mounts, and /dev/fuse has to be there",
        );
    }
    let before = fuse::switch_rings_on();
    if before.is_none() {
        blkmq_testkit::skip_of(
            "no_allocation::fuse over io_uring",
            "the kernel has none, or it cannot be switched on",
        );
    }
    let transports = [("/dev/fuse", false), ("io_uring", true)];
    for (transport, has_rings) in transports.into_iter().take(1 + usize::from(before.is_some())) {
        for elevator in sched::BUILT_IN {
            for source in ["ram", "file", "striped"] {
                let count = fuse::count(source, elevator, dir, has_rings);
                println!(
                    "{source}, {elevator}: {count} allocations in {} requests by {transport}",
                    fuse::REQUESTS
                );
                assert_eq!(count, 0, "{source} with {elevator} by {transport}");
            }
        }
    }
    before.inspect(|before| fuse::switch_rings(before));
}

/// Counts the allocations while two connections are served.
fn count(source: &str, elevator: &'static ElevatorType, dir: &Path) -> u64 {
    let engine = engine(source, elevator, dir);
    let path = dir.join("socket");
    let served = Served {
        tls: Arc::default(),
        socket: Socket::Unix(
            UnixListener::bind(&path).unwrap(),
            OwnedPath::of(path.clone()).ok(),
        ),
        disks: None,
        limits: Limits::default(),
        admitted: AddressLimits::default(),
    };
    let common = Arc::new(Common::new(64 << 20, CONNECTIONS_MAX));
    door::serve(&engine, served, &common).unwrap();
    let mut clients = ["a", "b"].map(|disk| Client::connect(&path, disk));
    let mut run = |rounds| {
        for _ in 0..rounds {
            clients.iter_mut().for_each(Client::send);
            clients.iter_mut().for_each(Client::receive);
        }
    };
    run(WARM_UP);
    // A list may still grow once, when it gets longer than ever before; an allocation for each
    // request would show every time.
    let mut count = 1;
    for _ in 0..TRIES {
        let before = sys::allocations();
        run(ROUNDS);
        count = sys::allocations() - before;
        if count == 0 {
            break;
        }
    }
    drop(clients);
    engine.shutdown(Nanos::from_secs(10)).unwrap();
    count
}

/// An engine with the disks `a` and `b`, each in a group of its own.
fn engine(source: &str, elevator: &'static ElevatorType, dir: &Path) -> Engine {
    let file = |name: &str| -> PathBuf {
        let path = dir.join(format!("{name}.raw"));
        std::fs::File::create(&path).unwrap().set_len(DISK).unwrap();
        path
    };
    let mut disks = Vec::new();
    for name in ["a", "b"] {
        let on_queue = format!("queue=q,sched={elevator}");
        match source {
            "ram" => disks.push(format!("name={name},ram={DISK},group=/{name},{on_queue}")),
            "encrypted" => disks.push(format!("name={name}0,ram={DISK},group=/{name},{on_queue}")),
            "file" => {
                let path = file(name).display().to_string();
                disks.push(format!("name={name},file={path},group=/{name},{on_queue}"));
            }
            _ => {
                for member in 0..2 {
                    disks.push(format!("name={name}{member},ram={DISK},{on_queue}"));
                }
                disks.push(format!("name={name},striped={name}0+{name}1,group=/{name}"));
            }
        }
    }
    let plan = plan(&Config {
        disks: disks.iter().map(|disk| DiskSpec::parse(disk).unwrap()).collect(),
        groups: ["/a", "/b"].map(|path| GroupSpec::new(path).unwrap()).into(),
        ..Config::default()
    });
    let plan = plan.unwrap();
    let config = EngineConfig {
        reactors: 2,
        queues: plan.queues,
        mapped: plan.mapped,
        ..EngineConfig::default()
    };
    let engine = Engine::start(config).expect("io_uring is available");
    if source == "encrypted" {
        ["a", "b"].into_iter().for_each(|name| encrypt(&engine, name));
    }
    engine
}

/// Adds an encrypted disk over another one.
fn encrypt(engine: &Engine, name: &str) {
    let below = engine.disk(&format!("{name}0")).expect("the disk below");
    let spec = EncryptedSpec {
        name: name.to_owned(),
        description: String::new(),
        serial: None,
        export: None,
        below: below.name,
        data: Some(EncryptedData {
            start: 0,
            size: None,
            sector: 512,
        }),
        read_only: false,
        block_size: None,
        discard: false,
        group: below.group,
        group_path: format!("/{name}"),
        cipher: Some(Arc::new(Inverse)),
    };
    engine.control().add_encrypted(spec).expect("it is added");
}

/// A cipher that takes no time.
struct Inverse;

impl SectorCipher for Inverse {
    fn encrypt(&self, _: u64, bytes: &mut [u8]) {
        bytes.iter_mut().for_each(|byte| *byte = !*byte);
    }

    fn decrypt(&self, offset: u64, bytes: &mut [u8]) {
        self.encrypt(offset, bytes);
    }

    fn encrypt_from(&self, _: u64, from: &[Cell<u8>], into: &mut [u8]) {
        into.iter_mut()
            .zip(from)
            .for_each(|(into, from)| *into = !from.get());
    }

    fn decrypt_shared(&self, _: u64, bytes: &[Cell<u8>]) {
        bytes.iter().for_each(|byte| byte.set(!byte.get()));
    }
}

/// One connection, whose messages are all made before the test.
struct Client {
    stream: UnixStream,
    requests: Vec<u8>,
    replies: Vec<u8>,
}

impl Client {
    fn connect(path: &Path, disk: &str) -> Self {
        let mut stream = UnixStream::connect(path).unwrap();
        negotiate(&mut stream, Wanted::plain(disk)).unwrap();
        Self::new(stream)
    }

    /// Writes, reads, a flush and zeroing over the whole disk, alternately of one block and more.
    fn new(stream: UnixStream) -> Self {
        let (mut requests, mut reply_bytes) = (Vec::new(), 0);
        for index in 0..DEPTH {
            let blocks = 1 + index % 3;
            let (command, length) = match index {
                0 => (Command::FLUSH, 0),
                1 => (Command::WRITE_ZEROES, BLOCK),
                _ if index % 2 == 0 => (Command::WRITE, blocks * BLOCK),
                _ => (Command::READ, blocks * BLOCK),
            };
            let head = RequestHeader {
                cookie: index as u64,
                offset: if length > 0 {
                    (index * 512 * 1024) as u64
                } else {
                    0
                },
                length: length as u64,
                command,
                flags: CommandFlags::NONE,
            };
            head.write(HeaderStyle::Simple, &mut requests);
            reply_bytes += REPLY;
            match command {
                Command::WRITE => requests.resize(requests.len() + length, index as u8),
                Command::READ => reply_bytes += length,
                _ => {}
            }
        }
        Self {
            stream,
            requests,
            replies: vec![0; reply_bytes],
        }
    }

    fn send(&mut self) {
        self.stream.write_all(&self.requests).unwrap();
    }

    /// Receives all replies, and checks that the first is a reply without an error.
    fn receive(&mut self) {
        self.stream.read_exact(&mut self.replies).unwrap();
        assert_eq!(self.replies[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
    }
}

/// Bytes of a simple reply's header.
const REPLY: usize = 16;
