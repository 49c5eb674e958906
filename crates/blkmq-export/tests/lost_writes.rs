//! Tests that every client is told, once, of writes that the server below may have lost: two
//! engines in this process, of which one has its disk on the other, and clients of the first.

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blkmq_config::{Config, DiskSpec, plan};
use blkmq_core::time::Nanos;
use blkmq_export::common::{AddressLimits, CONNECTIONS_MAX, Common, OwnedPath, Socket};
use blkmq_export::nbd::door::{self, Served};
use blkmq_export::nbd::limits::Limits;
use blkmq_host::engine::{Engine, EngineConfig};
use blkmq_testkit::nbd::Client;

#[test]
fn each_client_hears_once_of_writes_that_a_server_took_along() {
    let far = start("far", &format!("ram={DISK_BYTES}"));
    let uri = format!("nbd+unix:///vm?socket={}", path("far").display());
    let near = start("near", &format!("nbd={uri},reconnect=30"));
    let (mut writer, mut other) = (connect(&path("near")), connect(&path("near")));
    writer.write(0, &[9; 4096]).unwrap();
    writer.flush().unwrap();
    writer.write(0, &[9; 4096]).unwrap();
    far.shutdown(Nanos::from_secs(10)).unwrap();
    let far = start("far", &format!("ram={DISK_BYTES}"));
    for client in [&mut writer, &mut other] {
        let lost = client.flush().unwrap_err();
        assert_eq!(lost.raw_os_error(), Some(EIO));
        client.flush().expect("the loss is reported once");
    }
    let mut late = connect(&path("near"));
    late.flush().expect("a later client has lost nothing");
    drop((writer, other, late));
    near.shutdown(Nanos::from_secs(10)).unwrap();
    far.shutdown(Nanos::from_secs(10)).unwrap();
}

fn connect(path: &Path) -> Client {
    Client::connect(path, "vm").unwrap()
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
        tls: Arc::default(),
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
const EIO: i32 = 5;
