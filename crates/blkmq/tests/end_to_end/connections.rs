//! Tests that clients which connect and do nothing keep nobody out: at another address, of another group, or
//! at their own.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use blkmq::control::client::Client as Control;
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use serde_json::json;

use crate::common::daemon::{program, serve_command};
use crate::common::nbd::{Client, OPT_GO, go_payload, greeted, option};
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::output_within;
use crate::common::{Daemon, Scratch};

#[test]
fn thousand_idle_clients_at_one_address_leave_room_at_another() {
    allow_many_files();
    for is_negotiating in [false, true] {
        let scratch = Scratch::new();
        let config = scratch.path("blkmq.toml");
        std::fs::write(&config, two_addresses(&scratch, "")).expect("a configuration can be written");
        let mut daemon = Daemon::spawn(limited(1024, 1024, &["-c", &scratch.word("blkmq.toml")]));
        let (crowded, other) = (scratch.path("one.sock"), scratch.path("two.sock"));
        let idle = crowd(&crowded, 1013, is_negotiating);
        serves(&other, "two");
        let refused = daemon.wait_for(ANSWER_MAX, |line| line.contains("connection refused: "));
        assert!(
            refused || is_negotiating,
            "nothing tells of the refusals:\n{}",
            daemon.said()
        );
        drop(idle);
        until(
            || Client::connect(&crowded, "one").is_ok(),
            "nobody gets in afterwards",
        );
        daemon.signal(Signal::USR1);
        let what = "one.sock: connections open ";
        assert!(
            daemon.wait_for(ANSWER_MAX, |line| line.contains(what)),
            "the report has no connections:\n{}",
            daemon.said()
        );
        daemon.stop();
    }
}

#[test]
fn group_that_takes_all_connections_leaves_room_for_another_at_the_same_address() {
    allow_many_files();
    let scratch = Scratch::new();
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let words = [
        "--disk",
        "name=one,ram=1M",
        "--disk",
        "name=two,ram=1M",
        "--nbd",
        &nbd,
    ];
    let daemon = Daemon::spawn(limited(1024, 1024, &words));
    let socket = scratch.path("nbd.sock");
    let mut open: Vec<Client> = (0..1013)
        .map_while(|_| Client::connect(&socket, "one").ok())
        .collect();
    assert!(
        (200..900).contains(&open.len()),
        "{} connections of one group",
        open.len()
    );
    serves(&socket, "two");
    open[0].read(0, BLOCK).expect("those that are in are served");
    daemon.stop();
}

#[test]
fn tenant_has_its_own_places_whichever_queue_its_disks_lie_on() {
    let scratch = Scratch::new();
    let (nbd, control) = (scratch.path("nbd.sock"), scratch.path("control.sock"));
    let text = format!(
        "[disk.first]\nram = \"1M\"\n[control]\nsocket = \"unix:{}\"\n\
         [[export]]\nnbd = \"unix:{}\"\ngroup_connections = 2\n",
        control.display(),
        nbd.display()
    );
    std::fs::write(scratch.path("blkmq.toml"), text).expect("a configuration can be written");
    let daemon = Daemon::start(&["-c", &scratch.word("blkmq.toml")]);
    let mut control = Control::connect(&control).expect("it is served");
    // Each on its own queue, and so in the first group of that queue.
    for (disk, group) in [("a", "/a"), ("b", "/b"), ("c", "/a")] {
        let keys = json!({"ram": "1M", "queue": disk, "group": group});
        let params = json!({"kind": "disk", "name": disk, "keys": keys});
        control.call("config.add", &params).expect("a disk");
    }
    let connect = |disk| Client::connect(&nbd, disk);
    let of_a = [connect("a"), connect("a")];
    assert!(of_a.iter().all(Result::is_ok), "as many as it may have");
    assert!(connect("a").is_err(), "and no more");
    assert!(connect("c").is_err(), "nor at another disk of that tenant");
    let of_b = [connect("b"), connect("b")];
    assert!(of_b.iter().all(Result::is_ok), "another tenant has its own");
    drop(of_a);
    until(|| connect("c").is_ok(), "nobody gets in afterwards");
    drop(of_b);
    daemon.stop();
}

#[test]
fn client_that_says_nothing_makes_room_for_one_that_does() {
    let scratch = Scratch::new();
    let text = two_addresses(&scratch, "connections = 8\ngroup_connections = 6\n");
    std::fs::write(scratch.path("blkmq.toml"), text).expect("a configuration can be written");
    let daemon = Daemon::start(&["-c", &scratch.word("blkmq.toml")]);
    let socket = scratch.path("one.sock");
    let silent = crowd(&socket, 8, true);
    let good: Vec<Client> = (0..6)
        .map(|_| Client::connect(&socket, "one").expect("room is made for it"))
        .collect();
    let refused = Client::connect(&socket, "one").err();
    assert!(refused.is_some(), "the group has more than it may");
    drop((silent, good));
    daemon.stop();
}

#[test]
fn silent_clients_make_room_for_as_many_as_come_at_once_and_the_limit_holds() {
    allow_many_files();
    let scratch = Scratch::new();
    let text = two_addresses(&scratch, "connections = 64\n");
    std::fs::write(scratch.path("blkmq.toml"), text).expect("a configuration can be written");
    let daemon = Daemon::spawn(limited(256, 256, &["-c", &scratch.word("blkmq.toml")]));
    let socket = scratch.path("one.sock");
    let silent = crowd(&socket, 64, true);
    let (mut burst, _) = burst(&daemon, &socket);
    serves(&socket, "one");
    for (number, client) in burst.iter_mut().enumerate() {
        let mut greeting = [0; 18];
        let greeted = client.read_exact(&mut greeting);
        assert!(greeted.is_ok(), "client {number} of the burst: {greeted:?}");
    }
    let said = daemon.said();
    assert!(!said.contains("no connection can be accepted"), "{said}");
    assert!(!said.contains("connection refused"), "{said}");
    drop(silent);
    daemon.stop();
}

#[test]
fn address_accepts_two_thousand_clients_a_second_and_delays_no_other_address() {
    allow_many_files();
    let scratch = Scratch::new();
    std::fs::write(scratch.path("blkmq.toml"), two_addresses(&scratch, ""))
        .expect("a configuration can be written");
    let daemon = Daemon::start(&["-c", &scratch.word("blkmq.toml")]);
    let mut was_ahead = false;
    // The machine may pause this process for longer than a burst takes. One round without such a
    // pause suffices.
    for _ in 0..5 {
        let (mut burst, since) = burst(&daemon, &scratch.path("one.sock"));
        serves(&scratch.path("two.sock"), "two");
        let last = burst.last_mut().expect("a burst of some clients");
        last.set_nonblocking(true).expect("a socket need not wait");
        was_ahead |= last.read(&mut [0]).is_err();
        last.set_nonblocking(false).expect("a socket may wait");
        for client in &mut burst[..BURST - 1] {
            client.read_exact(&mut [0; 18]).expect("a greeting");
        }
        // 64 clients are let in at once.
        let (time, at_least) = (since.elapsed(), Duration::from_micros(500) * (BURST as u32 - 66));
        assert!(time >= at_least, "{BURST} clients were let in within {time:?}");
    }
    assert!(was_ahead, "a client waits for those who come to another address");
    daemon.stop();
}

#[test]
fn limit_of_descriptors_is_raised_as_far_as_is_allowed() {
    allow_many_files();
    let scratch = Scratch::new();
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let words = ["--disk", "name=vm1,ram=1M", "--nbd", &nbd];
    let daemon = Daemon::spawn(limited(64, 1000, &words));
    let clients: Vec<Client> = (0..200)
        .map(|_| Client::connect(&scratch.path("nbd.sock"), "vm1").expect("there are descriptors for it"))
        .collect();
    drop(clients);
    daemon.stop();
}

#[test]
fn no_thread_waits_for_the_table_of_descriptors_to_grow() {
    allow_many_files();
    let scratch = Scratch::new();
    let daemon = Daemon::serve(&scratch, &["name=vm1,ram=1M"]);
    let size = || {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", daemon.id())).expect("our own child's");
        let line = status.lines().find(|line| line.starts_with("FDSize:"));
        let size = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
        size.expect("the kernel tells the size of the table")
    };
    let before = size();
    let clients = crowd(&scratch.path("nbd.sock"), 1200, true);
    assert_eq!(size(), before, "with {} clients", clients.len());
    drop(clients);
    daemon.stop();
}

#[test]
fn check_says_if_there_are_too_few_descriptors_for_what_is_configured() {
    let scratch = Scratch::new();
    let text = two_addresses(&scratch, "connections = 500\n");
    std::fs::write(scratch.path("blkmq.toml"), text).expect("a configuration can be written");
    let config = scratch.word("blkmq.toml");
    for (limit, is_enough) in [(300, false), (1000, true)] {
        let mut command = limited(limit, limit, &["--check", "-c", &config]);
        let output = output_within(&mut command, Duration::from_secs(30));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), is_enough, "limit {limit}: {said}");
        let words = [
            "300 file descriptors are too few",
            "502 connections",
            "LimitNOFILE",
        ];
        assert!(
            is_enough || words.iter().all(|word| said.contains(word)),
            "{said}"
        );
    }
}

#[test]
fn client_that_selects_nothing_in_time_is_cut_off() {
    let scratch = Scratch::new();
    let nbd = scratch.word("nbd.sock");
    let text = format!(
        "[nbd]\nhandshake_deadline = \"300ms\"\n[disk.vm1]\nram = \"1M\"\n[[export]]\nnbd = \"unix:{nbd}\"\n"
    );
    std::fs::write(scratch.path("blkmq.toml"), text).expect("a configuration can be written");
    let daemon = Daemon::start(&["-c", &scratch.word("blkmq.toml")]);
    let mut slow = greeted(&scratch.path("nbd.sock")).expect("anyone is greeted");
    let go = option(OPT_GO, &go_payload("vm1"));
    let start = Instant::now();
    // Sending a byte now and then does not help.
    for byte in &go[..go.len() - 1] {
        if slow.write_all(&[*byte]).is_err() {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let is_cut = !matches!(slow.read(&mut [0; 64]), Ok(1..));
    assert!(is_cut, "still served after {:?}", start.elapsed());
    daemon.stop();
}

#[test]
fn kernel_watches_over_tcp_clients_that_say_nothing() {
    let free = TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("a free port");
    let daemon = Daemon::start(&["--disk", "name=vm1,ram=1M", "--nbd", &format!("tcp:{free}")]);
    let mut client = TcpStream::connect(free).expect("the daemon listens");
    client.read_exact(&mut [0; 18]).expect("a greeting");
    let port = format!(":{:04X}", client.local_addr().expect("an address").port());
    // In the daemon's entry the remote port is the client's; 02 is the timer of keepalive, which
    // starts after the acknowledgement of the greeting.
    let is_watched = || {
        let table = std::fs::read_to_string("/proc/net/tcp").expect("the kernel's table of connections");
        table.lines().any(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words.get(2).is_some_and(|remote| remote.ends_with(&port)) && words[5].starts_with("02:")
        })
    };
    until(is_watched, "no keepalive timer runs");
    daemon.stop();
}

/// Two disks, each in a group and at an address of its own; `one.sock` has further keys.
fn two_addresses(scratch: &Scratch, keys_of_one: &str) -> String {
    format!(
        "[disk.one]\nram = \"1M\"\n[disk.two]\nram = \"1M\"\n\
         [[export]]\nnbd = \"unix:{}\"\ndisks = [\"one\"]\n{keys_of_one}\
         [[export]]\nnbd = \"unix:{}\"\ndisks = [\"two\"]\n",
        scratch.word("one.sock"),
        scratch.word("two.sock")
    )
}

/// The daemon with limits on descriptors.
fn limited(soft: u64, hard: u64, words: &[&str]) -> Command {
    let mut command = Command::new("sh");
    let script = format!("ulimit -Sn {soft} && ulimit -Hn {hard} && exec \"$0\" \"$@\"");
    command.arg("-c").arg(script).arg(program());
    command.args(serve_command(words).get_args());
    command
}

/// Clients that connect and perhaps select a disk, and stay; some may be refused.
fn crowd(socket: &Path, clients: usize, is_negotiating: bool) -> Vec<UnixStream> {
    let one = |_| {
        let mut stream = greeted(socket).ok()?;
        if !is_negotiating {
            stream.write_all(&option(OPT_GO, &go_payload("one"))).ok()?;
        }
        Some(stream)
    };
    (0..clients).filter_map(one).collect()
}

/// Clients that are all connected before the daemon continues, and when the first one connected:
/// the daemon may accept some before it is stopped.
fn burst(daemon: &Daemon, socket: &Path) -> (Vec<UnixStream>, Instant) {
    let since = Instant::now();
    daemon.pause();
    let connect = |_| {
        let client = UnixStream::connect(socket).expect("the kernel keeps those who come");
        client
            .set_read_timeout(Some(ANSWER_MAX))
            .expect("a timeout may be set");
        client
    };
    let clients = (0..BURST).map(connect).collect();
    daemon.signal(Signal::CONT);
    (clients, since)
}

/// Checks that a client is soon accepted and served.
fn serves(socket: &Path, disk: &str) {
    let start = Instant::now();
    let mut client = Client::connect(socket, disk).expect("there is room for it");
    client.write(0, &block(0, 1)).expect("a write");
    assert!(client.read(0, BLOCK).expect("a read") == block(0, 1));
    assert!(start.elapsed() < ANSWER_MAX, "it took {:?}", start.elapsed());
}

fn until(mut is_so: impl FnMut() -> bool, complaint: &str) {
    let end = Instant::now() + ANSWER_MAX;
    while !is_so() {
        assert!(Instant::now() < end, "{complaint}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Raises this process's own limit, since the tests hold both ends of each connection.
fn allow_many_files() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    setrlimit(Resource::Nofile, raised).expect("the soft limit may be raised to the hard one");
}

const ANSWER_MAX: Duration = Duration::from_secs(5);
/// Fewer than fit in the kernel's backlog.
const BURST: usize = 400;
