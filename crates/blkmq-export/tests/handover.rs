//! Tests the hand-over of NBD clients between two daemons: two engines in this process, of which
//! one saves its clients and the other one restores them.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use blkmq_config::{Config, DiskSpec, plan};
use blkmq_core::ids::ReactorId;
use blkmq_core::time::Nanos;
use blkmq_export::common::{AddressLimits, CONNECTIONS_MAX, Common, Socket};
use blkmq_export::handover::codec::Session;
use blkmq_export::handover::{Handover, Phase, Saved};
use blkmq_export::nbd::door::{self, Served};
use blkmq_export::nbd::limits::Limits;
use blkmq_export::nbd::saved::SavedConnection;
use blkmq_host::engine::{Engine, EngineConfig};
use blkmq_nbd::client::{Wanted, negotiate};
use blkmq_nbd::codec::handshake::SessionName;
use blkmq_nbd::codec::reply::ReplyHead;
use blkmq_nbd::codec::request::{Command, RequestHeader};
use blkmq_nbd::codec::{CommandFlags, HeaderStyle};

#[test]
fn restored_client_without_a_place_is_sent_nothing_and_stays_where_it_was() {
    let path = std::env::temp_dir().join(format!("blkmq-handover-{}", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    let shared = listener.try_clone().unwrap();
    let outgoing = Daemon::start(listener, Phase::Serving);
    let mut client = connect(&path);
    read(&mut client);

    outgoing.common.handover.suspend();
    outgoing.common.handover.wait_until_settled(PATIENCE).unwrap();
    let saved = outgoing.common.handover.take_saved();
    let [saved] = &saved[..] else { panic!("{saved:?}") };
    let mut unsent = SavedConnection::parse(&saved.body).unwrap();
    unsent.unsent = b"what the other daemon sends if this one fails".to_vec();

    let incoming = Daemon::start(shared, Phase::Suspended);
    // Two clients of one name: the second one gets no place.
    for _ in 0..2 {
        incoming.restore(saved, &unsent);
    }
    let failed = incoming.common.handover.wait_until_settled(PATIENCE);
    let error = failed.unwrap_err().to_string();
    assert!(error.contains("another session has its name"), "{error}");
    incoming.common.handover.leave();
    incoming.engine.shutdown(Nanos::from_secs(10)).unwrap();

    client.set_nonblocking(true).unwrap();
    let received = client.read(&mut [0; 64]).map_err(|error| error.kind());
    assert_eq!(received, Err(ErrorKind::WouldBlock));
    client.set_nonblocking(false).unwrap();
    outgoing.common.handover.resume();
    read(&mut client);
    drop(client);
    outgoing.engine.shutdown(Nanos::from_secs(10)).unwrap();
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn client_at_rest_beyond_its_deadline_costs_no_time_and_is_closed_when_it_goes_on() {
    let path = std::env::temp_dir().join(format!("blkmq-at-rest-{}", std::process::id()));
    let limits = Limits {
        handshake_deadline: Duration::from_millis(50),
        ..Limits::default()
    };
    let daemon = Daemon::start_with(UnixListener::bind(&path).unwrap(), Phase::Serving, limits);
    let mut client = UnixStream::connect(&path).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client.read_exact(&mut [0; 18]).expect("the server's greeting");
    daemon.common.handover.suspend();
    daemon.common.handover.wait_until_settled(PATIENCE).unwrap();
    std::thread::sleep(Duration::from_millis(100));

    // Another test of this process may run beside the first ones.
    let pauses = (0..5).map(|_| {
        let before = processor_time();
        std::thread::sleep(PAUSE);
        processor_time() - before
    });
    let least = pauses.min().expect("five pauses");
    assert!(least < PAUSE / 10, "{least:?} in a pause of {PAUSE:?}");

    daemon.common.handover.resume();
    assert_eq!(client.read(&mut [0; 1]).unwrap(), 0, "it is closed");
    daemon.engine.shutdown(Nanos::from_secs(10)).unwrap();
    std::fs::remove_file(&path).unwrap();
}

/// The time that this process has had on processors.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// A disk in memory behind a front door.
struct Daemon {
    engine: Engine,
    common: Arc<Common>,
}

impl Daemon {
    fn start(listener: UnixListener, phase: Phase) -> Self {
        Self::start_with(listener, phase, Limits::default())
    }

    fn start_with(listener: UnixListener, phase: Phase, limits: Limits) -> Self {
        let plan = plan(&Config {
            disks: vec![DiskSpec::parse("name=vm1,ram=1M,group=/").unwrap()],
            ..Config::default()
        });
        let config = EngineConfig {
            queues: plan.unwrap().queues,
            ..EngineConfig::default()
        };
        let engine = Engine::start(config).expect("io_uring is available");
        let handover = Arc::new(Handover::new(phase));
        let common = Arc::new(Common::taking_part(64 << 20, CONNECTIONS_MAX, &handover));
        let served = Served {
            tls: Arc::default(),
            socket: Socket::Unix(listener, None),
            disks: None,
            limits,
            admitted: AddressLimits::default(),
        };
        door::serve(&engine, served, &common).unwrap();
        Self { engine, common }
    }

    /// Restores a client, with a copy of its descriptors.
    fn restore(&self, saved: &Saved, connection: &SavedConnection) {
        let session = Session {
            door: saved.door.to_owned(),
            address: saved.address.clone(),
            body: connection.bytes(),
        };
        let fds = saved.fds.iter().map(|fd| fd.try_clone());
        let fds: Vec<OwnedFd> = fds.collect::<Result<_, _>>().unwrap();
        let handover = &self.common.handover;
        handover
            .restore(&self.engine, ReactorId(0), &session, fds)
            .unwrap();
    }
}

/// A client whose session has a name.
fn connect(path: &std::path::Path) -> UnixStream {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let wanted = Wanted {
        style: HeaderStyle::Simple,
        session: Some(SessionName { client: 7, number: 1 }),
        ..Wanted::plain("vm1")
    };
    negotiate(&mut stream, wanted).unwrap();
    stream
}

/// Reads a block, and checks the reply.
fn read(client: &mut UnixStream) {
    let request = RequestHeader {
        cookie: 5,
        offset: 0,
        length: 512,
        command: Command::READ,
        flags: CommandFlags::NONE,
    };
    let mut bytes = Vec::new();
    request.write(HeaderStyle::Simple, &mut bytes);
    client.write_all(&bytes).unwrap();
    let mut reply = [0; 16 + 512];
    client.read_exact(&mut reply).expect("a reply");
    let head = ReplyHead::parse(HeaderStyle::Simple, &reply[..16]).expect("a reply's magic number");
    assert!(
        matches!(head, Some((ReplyHead::Simple { cookie: 5, error: 0 }, 16))),
        "{head:?}"
    );
}

const PAUSE: Duration = Duration::from_millis(100);
const PATIENCE: Duration = Duration::from_secs(30);
