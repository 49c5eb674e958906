//! Tests that every client is told, once, of writes that the server below may have lost: two
//! engines in this process, of which one has its disk on the other, and clients of the first.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blkmq_config::{Config, DiskSpec, plan};
use blkmq_core::time::Nanos;
use blkmq_export::common::{AddressLimits, CONNECTIONS_MAX, Common, OwnedPath, Socket};
use blkmq_export::nbd::door::{self, Served};
use blkmq_export::nbd::limits::Limits;
use blkmq_host::engine::{Engine, EngineConfig};
use blkmq_nbd::client::{Handshake, Progress, RECEIVE_BYTES_MIN, Wanted};
use blkmq_nbd::codec::reply::ReplyHead;
use blkmq_nbd::codec::request::{Command, RequestHeader};
use blkmq_nbd::codec::{CommandFlags, HeaderStyle};

#[test]
fn each_client_hears_once_of_writes_that_a_server_took_along() {
    let far = start("far", &format!("ram={DISK_BYTES}"));
    let uri = format!("nbd+unix:///vm?socket={}", path("far").display());
    let near = start("near", &format!("nbd={uri},reconnect=30"));
    let (mut writer, mut other) = (connect(&path("near")), connect(&path("near")));
    assert_eq!(writer.run(Command::WRITE, 4096), 0);
    assert_eq!(writer.run(Command::FLUSH, 0), 0);
    assert_eq!(writer.run(Command::WRITE, 4096), 0);
    far.shutdown(Nanos::from_secs(10)).unwrap();
    let far = start("far", &format!("ram={DISK_BYTES}"));
    for client in [&mut writer, &mut other] {
        assert_eq!(client.run(Command::FLUSH, 0), EIO);
        assert_eq!(client.run(Command::FLUSH, 0), 0, "told once");
    }
    let mut late = connect(&path("near"));
    assert_eq!(
        late.run(Command::FLUSH, 0),
        0,
        "it is no matter of a later client's"
    );
    drop((writer, other, late));
    near.shutdown(Nanos::from_secs(10)).unwrap();
    far.shutdown(Nanos::from_secs(10)).unwrap();
}

/// A client with simple replies.
struct Client(UnixStream);

impl Client {
    /// Does one request at the disk's beginning. Returns its error.
    fn run(&mut self, command: Command, length: u64) -> u32 {
        let header = RequestHeader {
            cookie: 7,
            offset: 0,
            length,
            command,
            flags: CommandFlags::NONE,
        };
        let mut out = Vec::new();
        header.write(HeaderStyle::Simple, &mut out);
        if command == Command::WRITE {
            out.resize(out.len() + length as usize, 9);
        }
        self.0.write_all(&out).unwrap();
        let mut head = [0; 16];
        self.0.read_exact(&mut head).expect("a reply");
        match ReplyHead::parse(HeaderStyle::Simple, &head).unwrap() {
            Some((ReplyHead::Simple { cookie: 7, error }, 16)) => error,
            other => panic!("{other:?}"),
        }
    }
}

fn connect(path: &Path) -> Client {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut handshake = Handshake::new(Wanted::plain("vm"));
    let (mut input, mut filled, mut out) = (vec![0; RECEIVE_BYTES_MIN], 0, Vec::new());
    loop {
        filled += stream.read(&mut input[filled..]).unwrap();
        let (taken, progress) = handshake.receive(&input[..filled], &mut out);
        input.copy_within(taken..filled, 0);
        filled -= taken;
        stream.write_all(&out).unwrap();
        out.clear();
        match progress {
            Progress::NeedMore => {}
            Progress::Failed(failure) => panic!("{failure}"),
            Progress::Agreed(_) => return Client(stream),
        }
    }
}

/// Starts an engine with one reactor, whose disk `vm`, with these keys, is served at the socket of
/// `name`.
fn start(name: &str, disk: &str) -> Engine {
    let plan = plan(&Config {
        disks: vec![DiskSpec::parse(&format!("name=vm,{disk},group=/")).unwrap()],
        ..Config::default()
    });
    let plan = plan.unwrap();
    let config = EngineConfig {
        reactors: 1,
        queues: plan.queues,
        ..EngineConfig::default()
    };
    let engine = Engine::start(config).expect("io_uring is available");
    let path = path(name);
    // An engine that has ended may have left its socket.
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    let address = Served {
        tls: &blkmq_tls::settings::OFF,
        socket: Socket::Unix(listener, OwnedPath::of(path).ok()),
        disks: None,
        limits: Limits::default(),
        admitted: AddressLimits::default(),
    };
    let common = Arc::new(Common::new(64 << 20, CONNECTIONS_MAX));
    door::serve(&engine, address, &common).unwrap();
    engine
}

fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("blkmq-lost-{}-{name}", std::process::id()))
}

const DISK_BYTES: u64 = 64 << 20;
const EIO: u32 = 5;
