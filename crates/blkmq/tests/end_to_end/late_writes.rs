//! Tests that a write of a connection which was given up does not take effect after its repetition, or after
//! later writes to the same place: between two daemons there is a network that holds bytes back and delivers
//! them later.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::common::nbd::Client;
use crate::common::pattern::BLOCK;
use crate::common::{Daemon, Scratch};

/// The connection between a client and a server: it can hold back what the client sends, and
/// deliver it after the client has disconnected.
#[derive(Clone)]
struct Network(Arc<Link>);

#[derive(Default)]
struct Link {
    /// No bytes pass, on existing or new connections.
    is_cut: AtomicBool,
    /// The bytes in the network are held back until they are released; those of later connections
    /// pass.
    keeps: Mutex<bool>,
    released: Condvar,
    /// Connections whose bytes are held back.
    kept: AtomicU32,
    /// Those of them whose bytes have all been delivered, or refused.
    delivered: AtomicU32,
}

impl Network {
    /// Listens at `at`, for the server at `server`.
    fn new(at: PathBuf, server: PathBuf) -> Network {
        let listener = UnixListener::bind(at).expect("a socket to listen at");
        let network = Network(Arc::default());
        let link = Arc::clone(&network.0);
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if link.is_cut.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(server) = UnixStream::connect(&server) else {
                    continue;
                };
                connect(&link, client, server);
            }
        });
        network
    }

    /// From now on, bytes that clients send over the existing connections are held back.
    fn keep_back(&self) {
        *self.0.keeps.lock().unwrap() = true;
    }

    /// Refuses connections, or accepts them again.
    fn cut(&self, is_cut: bool) {
        self.0.is_cut.store(is_cut, Ordering::SeqCst);
    }

    /// Delivers the bytes that were held back.
    fn deliver(&self) {
        *self.0.keeps.lock().unwrap() = false;
        self.0.released.notify_all();
        let end = Instant::now() + PATIENCE;
        while self.0.delivered.load(Ordering::SeqCst) < self.0.kept.load(Ordering::SeqCst) {
            assert!(
                Instant::now() < end,
                "the server does not take what was kept back"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        // Time for the server to do what it has received.
        std::thread::sleep(Duration::from_millis(300));
    }
}

/// Carries bytes between the two, with a thread for each direction.
fn connect(link: &Arc<Link>, client: UnixStream, server: UnixStream) {
    let (back_from, back_to) = (server.try_clone().unwrap(), client.try_clone().unwrap());
    std::thread::spawn(move || carry(back_from, back_to));
    let link = Arc::clone(link);
    let is_old = !*link.keeps.lock().unwrap();
    std::thread::spawn(move || {
        if is_old {
            carry_or_keep(&link, client, server);
        } else {
            carry(client, server);
        }
    });
}

fn carry(mut from: UnixStream, mut to: UnixStream) {
    let _ = std::io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Both);
}

/// Carries what a client sends, unless it must be held back; then the end of the connection is held
/// back, too.
fn carry_or_keep(link: &Link, mut from: UnixStream, mut to: UnixStream) {
    let (mut kept, mut bytes) = (Vec::new(), [0; 1 << 16]);
    loop {
        let count = from.read(&mut bytes).unwrap_or(0);
        let keeps = *link.keeps.lock().unwrap();
        if count == 0 && kept.is_empty() {
            let _ = to.shutdown(Shutdown::Both);
            return;
        }
        if count == 0 {
            break;
        }
        if keeps {
            if kept.is_empty() {
                link.kept.fetch_add(1, Ordering::SeqCst);
            }
            kept.extend_from_slice(&bytes[..count]);
        } else if to.write_all(&bytes[..count]).is_err() {
            return;
        }
    }
    let keeps = link.keeps.lock().unwrap();
    drop(link.released.wait_while(keeps, |keeps| *keeps).unwrap());
    let _ = to.write_all(&kept);
    link.delivered.fetch_add(1, Ordering::SeqCst);
    // The network loses nothing, and never reports the end.
    std::thread::sleep(PATIENCE);
}

fn far(scratch: &Scratch) -> Daemon {
    let nbd = format!("unix:{}", scratch.word("far.sock"));
    Daemon::start(&["--disk", "name=a,ram=16M", "--nbd", &nbd])
}

/// Writes over the path that holds bytes back, overwrites that, and checks whether the first write
/// takes effect afterwards.
fn write_over_a_late_write(client: &mut Client, slow: &Network) {
    client.write(0, &[1; BLOCK]).expect("a write");
    slow.keep_back();
    client.write(0, &[2; BLOCK]).expect("a write that is repeated");
    client.write(0, &[3; BLOCK]).expect("a later one");
    slow.deliver();
    let found = client.read(0, BLOCK).expect("a read");
    assert!(
        slow.0.kept.load(Ordering::SeqCst) > 0,
        "nothing was kept back: the test tests nothing"
    );
    assert_eq!(
        found[0], 3,
        "the late write has come after what was written over it"
    );
}

#[test]
fn late_write_does_not_overtake_its_repetition_over_the_next_connection() {
    let scratch = Scratch::new();
    let far = far(&scratch);
    let slow = Network::new(scratch.path("slow.sock"), scratch.path("far.sock"));
    for connections in [1, 2] {
        let disk = format!(
            "name=x,nbd=nbd+unix:///a?socket={},connections={connections},reconnect=30,timeout=500ms",
            scratch.word("slow.sock")
        );
        let near = Daemon::serve(&scratch, &[&disk]);
        let mut client = Client::connect(&scratch.path("nbd.sock"), "x").expect("it is served");
        write_over_a_late_write(&mut client, &slow);
        drop(client);
        near.stop();
    }
    far.stop();
}

#[test]
fn late_write_does_not_overtake_its_repetition_over_another_path() {
    let scratch = Scratch::new();
    let far = far(&scratch);
    let slow = Network::new(scratch.path("slow.sock"), scratch.path("far.sock"));
    let fast = Network::new(scratch.path("fast.sock"), scratch.path("far.sock"));
    let path = |name: &str| {
        let socket = scratch.word(&format!("{name}.sock"));
        format!("name={name},nbd=nbd+unix:///a?socket={socket},timeout=500ms")
    };
    let vm = "name=vm,multipath=slow/fast,queue_if_no_path=on,check_interval=100ms";
    let near = Daemon::serve(&scratch, &[&path("slow"), &path("fast"), vm]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm").expect("it is served");
    // The path that was lost does not return meanwhile, so the other one must be used.
    slow.cut(true);
    write_over_a_late_write(&mut client, &slow);
    drop(client);
    near.stop();
    drop(fast);
    far.stop();
}

const PATIENCE: Duration = Duration::from_secs(20);
