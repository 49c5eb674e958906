//! At which addresses the daemon answers: TCP, sockets that systemd passes to it, names without paths, and
//! those of a configuration file.

use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::daemon::{program, serve_command};
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::{installed, run};
use crate::common::{Daemon, Scratch};

#[test]
fn socket_handed_over_by_systemd_is_served() {
    let scratch = Scratch::new();
    let socket = scratch.path("handed.sock");
    let listener = UnixListener::bind(&socket).expect("a socket can be bound");
    // Like systemd: the socket is descriptor 3, and the variables name the process that may take
    // it.
    let script = "exec 3<&0 </dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec \"$0\" serve --disk name=vm1,ram=1M --nbd systemd";
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg(script)
        .arg(program())
        .stdin(OwnedFd::from(listener));
    let daemon = Daemon::spawn(command);
    let mut client = Client::connect(&socket, "vm1").expect("the handed socket is served");
    client.write(0, &block(0, 1)).expect("a write");
    assert!(client.read(0, BLOCK).expect("a read") == block(0, 1));
    daemon.stop();
    assert!(socket.exists(), "the socket is systemd's: it must stay");
}

/// A daemon to which two sockets are handed over, as by systemd, with the names `one` and `other`.
fn spawn_handed(scratch: &Scratch, words: &str) -> Daemon {
    let listen = |name: &str| UnixListener::bind(scratch.path(name)).expect("a socket can be bound");
    let (one, other) = (listen("one.sock"), listen("other.sock"));
    // They come as input and errors, and what is logged goes to the output.
    let script = format!(
        "exec 3<&0 4<&2 </dev/null 2>&1; LISTEN_FDS=2 LISTEN_FDNAMES=one:other LISTEN_PID=$$ exec \"$0\" serve {words}"
    );
    let mut command = Command::new("sh");
    command.arg("-c").arg(script).arg(program());
    command.stdin(OwnedFd::from(one));
    Daemon::spawn_with_log(command, Stdio::from(OwnedFd::from(other)))
}

#[test]
fn systemd_sockets_are_told_apart_by_their_names_also_by_a_daemon_that_takes_over() {
    let scratch = Scratch::new();
    let up = format!("unix:{}", scratch.word("up.sock"));
    let config = format!(
        "[daemon]\nupgrade_socket = {up:?}\n[disk.vm1]\nram = \"1M\"\n[disk.vm2]\nram = \"2M\"\n\
         [[export]]\nnbd = \"systemd:other\"\ndisks = [\"vm2\"]\n[[export]]\nnbd = \"systemd:one\"\ndisks = [\"vm1\"]\n"
    );
    std::fs::write(scratch.path("blkmq.toml"), config).expect("a file");
    let mut daemon = spawn_handed(&scratch, &format!("-c {}", scratch.word("blkmq.toml")));
    let is_served = || {
        for (socket, disk, size) in [("one.sock", "vm1", 1 << 20), ("other.sock", "vm2", 2 << 20)] {
            let client = Client::connect(&scratch.path(socket), disk).expect("it is served there");
            assert_eq!(client.size(), size);
            let elsewhere = if disk == "vm1" { "vm2" } else { "vm1" };
            assert!(Client::connect(&scratch.path(socket), elsewhere).is_err());
        }
    };
    is_served();
    // Memory is not handed over, so both have disks of the same name alone.
    let next = Daemon::start(&["-c", &scratch.word("blkmq.toml"), "--take-over", &up]);
    assert!(daemon.ended_within(Duration::from_secs(10)).success());
    is_served();
    next.stop();
}

#[test]
fn systemd_socket_that_no_address_takes_is_named() {
    let scratch = Scratch::new();
    let words = "--disk name=vm1,ram=1M --nbd systemd:one";
    let log = scratch.path("log");
    let listen = |name: &str| UnixListener::bind(scratch.path(name)).expect("a socket can be bound");
    let (one, other) = (listen("one.sock"), listen("other.sock"));
    let script = format!(
        "exec 3<&0 4<&1 </dev/null >/dev/null; LISTEN_FDS=2 LISTEN_FDNAMES=one:other LISTEN_PID=$$ exec \"$0\" serve {words}"
    );
    let mut command = Command::new("sh");
    command.arg("-c").arg(script).arg(program());
    command.stdin(OwnedFd::from(one)).stdout(OwnedFd::from(other));
    command.stderr(std::fs::File::create(&log).expect("a log"));
    let mut daemon = command.spawn().expect("it runs");
    let said = || std::fs::read_to_string(&log).unwrap_or_default();
    let begun = Instant::now();
    while !said().contains("socket other of systemd") && begun.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(10));
    }
    daemon.kill().and_then(|()| daemon.wait()).expect("it ends");
    assert!(said().contains("socket other of systemd"), "{}", said());
    assert!(!said().contains("socket one of systemd"), "{}", said());
}

#[test]
fn systemd_sockets_that_are_missing_are_named_beside_those_that_are_there() {
    let scratch = Scratch::new();
    let listener = UnixListener::bind(scratch.path("handed.sock")).expect("a socket can be bound");
    let script = "exec 3<&0 </dev/null; LISTEN_FDS=1 LISTEN_FDNAMES=nbd.socket LISTEN_PID=$$ exec \"$0\" serve \
                  --disk name=vm1,ram=1M --nbd systemd:vm.socket";
    let mut command = Command::new("sh");
    command.arg("-c").arg(script).arg(program());
    command.stdin(OwnedFd::from(listener));
    let output = command.output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{said}");
    assert!(
        said.contains("systemd:vm.socket") && said.contains("there are nbd.socket"),
        "{said}"
    );
}

#[test]
fn wildcard_addresses_of_both_families_are_served_side_by_side() {
    let scratch = Scratch::new();
    let free = free_port();
    let (four, six) = (format!("tcp:0.0.0.0:{free}"), format!("tcp:[::]:{free}"));
    let words = [
        "--disk",
        "name=vm1,ram=1M",
        "--insecure",
        "--nbd",
        &four,
        "--nbd",
        &six,
    ];
    let metrics = format!("unix:{}", scratch.word("metrics.sock"));
    let daemon = Daemon::start(&[&words[..], &["--metrics", &metrics]].concat());
    TcpStream::connect(("127.0.0.1", free)).expect("IPv4 is served");
    TcpStream::connect(("::1", free)).expect("IPv6 is served");
    daemon.stop();
}

#[test]
fn localhost_is_served_at_both_loopbacks() {
    let free = free_port();
    let at = format!("tcp:localhost:{free}");
    let daemon = Daemon::start(&["--disk", "name=vm1,ram=1M", "--nbd", &at]);
    TcpStream::connect(("127.0.0.1", free)).expect("IPv4 is served");
    TcpStream::connect(("::1", free)).expect("IPv6 is served");
    daemon.stop();
    // The system chooses one port for both.
    let daemon = Daemon::start(&["--disk", "name=vm1,ram=1M", "--nbd", "tcp:localhost:0"]);
    let said = daemon.said();
    let port = |before: &str| {
        let found = said.lines().find_map(|line| line.strip_prefix(before));
        found
            .unwrap_or_else(|| panic!("no {before} in {said}"))
            .to_owned()
    };
    assert_eq!(port("nbd://127.0.0.1:"), port("nbd://[::1]:"));
    daemon.stop();
}

#[test]
fn abstract_socket_has_no_path_and_our_driver_finds_it() {
    let scratch = Scratch::new();
    let name = format!("blkmq test {}", std::process::id());
    let up = format!("unix:{}", scratch.word("up.sock"));
    let at = format!("unix:@{name}");
    let words = ["--disk", "name=vm1,ram=1M", "--nbd", &at];
    let daemon = Daemon::start(&[&words[..], &["--upgrade-socket", &up]].concat());
    let address = SocketAddr::from_abstract_name(&name).expect("a name");
    UnixStream::connect_addr(&address).expect("it is served");
    assert!(!std::path::Path::new(&format!("@{name}")).exists());
    let near = format!("name=near,nbd={}", daemon.uri("vm1"));
    let near = Daemon::serve(&scratch, &[&near]);
    let client = Client::connect(&scratch.path("nbd.sock"), "near").expect("it is served");
    assert_eq!(client.size(), 1 << 20);
    drop(client);
    near.stop();
    daemon.stop();
}

#[test]
fn export_names_are_others_than_the_names_of_disks() {
    let scratch = Scratch::new();
    let mut daemon = Daemon::serve(&scratch, &["name=vm1,ram=1M,export=iqn:a/b c", "name=vm2,ram=2M"]);
    let socket = scratch.path("nbd.sock");
    let client = Client::connect(&socket, "iqn:a/b c").expect("it is offered");
    assert_eq!(client.size(), 1 << 20);
    assert!(Client::connect(&socket, "vm1").is_err());
    drop(client);
    let said = daemon.said();
    assert!(said.contains("nbd+unix:///iqn%3Aa/b%20c?socket="), "{said}");
    if installed(&["nbdinfo"]) {
        let uri = said.lines().find(|line| line.contains("iqn")).expect("a line");
        assert_eq!(run("nbdinfo", &["--size", uri]).stdout.trim(), "1048576");
    }
    assert!(daemon.is_running());
    daemon.stop();
}

#[test]
fn metrics_beyond_the_loopback_need_a_word() {
    let free = free_port();
    let at = format!("tcp:0.0.0.0:{free}");
    let words = [
        "--disk",
        "name=vm1,ram=1M",
        "--nbd",
        "tcp:localhost:0",
        "--metrics",
        &at,
    ];
    let output = serve_command(&words).output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && said.contains("--metrics-insecure"),
        "{said}"
    );
    let daemon = Daemon::start(&[&words[..], &["--metrics-insecure"]].concat());
    TcpStream::connect(("127.0.0.1", free)).expect("metrics are there");
    daemon.stop();
    // Both loopbacks need none.
    let at = format!("tcp:localhost:{free}");
    let daemon = Daemon::start(&[&words[..5], &[&at]].concat());
    TcpStream::connect(("::1", free)).expect("metrics are there");
    TcpStream::connect(("127.0.0.1", free)).expect("metrics are there");
    daemon.stop();
}

/// A port that is free now; another process is unlikely to take it in the next moment.
fn free_port() -> u16 {
    let found = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    found.expect("a free port").port()
}

#[test]
fn sockets_that_others_have_put_at_our_paths_stay_at_our_end() {
    for is_taken_over in [false, true] {
        let scratch = Scratch::new();
        let at = |name: &str| format!("unix:{}", scratch.word(name));
        let names = ["nbd.sock", "control.sock", "metrics.sock", "up.sock"];
        let [nbd, control, metrics, up] = names.map(at);
        let words = ["--disk", "name=vm1,ram=1M", "--nbd", &nbd, "--control", &control];
        let words = [&words[..], &["--metrics", &metrics]].concat();
        let mut daemon = Daemon::start(&[&words[..], &["--upgrade-socket", &up]].concat());
        if is_taken_over {
            let next = Daemon::start(&[&words[..], &["--take-over", &up]].concat());
            assert!(daemon.ended_within(Duration::from_secs(10)).success());
            daemon = next;
            let start = Instant::now();
            // These are opened when the first daemon has let go of them.
            while !["control.sock", "metrics.sock"]
                .iter()
                .all(|name| scratch.path(name).exists())
            {
                assert!(start.elapsed() < Duration::from_secs(10), "no control socket");
            }
        }
        let others = names.map(|name| {
            let made = scratch.path("made");
            let other = UnixListener::bind(&made).expect("a socket can be bound");
            std::fs::rename(&made, scratch.path(name)).expect("our own socket");
            other
        });
        daemon.stop();
        for name in names {
            let reached = UnixStream::connect(scratch.path(name));
            reached.unwrap_or_else(|error| panic!("{name}, taken over: {is_taken_over}: {error}"));
        }
        drop(others);
    }
}

#[test]
fn disks_are_served_over_tcp_on_the_loopback() {
    if !installed(&["nbdcopy"]) {
        return;
    }
    let scratch = Scratch::new();
    // A port that is free now; another process is unlikely to take it in the next moment.
    let free = TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("a free port");
    let original = scratch.noisy_image("original.raw", 6 << 20, 21);
    let (address, copy) = (format!("tcp:{free}"), scratch.word("copy.raw"));
    let daemon = Daemon::start(&["--disk", "name=vm1,ram=6M", "--nbd", &address]);
    let uri = daemon.uri("vm1");
    assert_eq!(uri, format!("nbd://{free}/vm1"));
    run("nbdcopy", &["--flush", &original, &uri]);
    run("nbdcopy", &[&uri, &copy]);
    let read = |name: &str| std::fs::read(name).expect("the file is there");
    assert!(read(&original) == read(&copy), "the copy differs");
    daemon.stop();
}

#[test]
fn configuration_file_serves_what_it_says_where_it_says() {
    let scratch = Scratch::new();
    let image = scratch.image("vm1.raw", 1 << 20);
    let (inner, outer) = (scratch.path("inner.sock"), scratch.path("outer.sock"));
    let text = format!(
        "[queue.fast]\nsched = \"mq-deadline\"\n\n[disk.vm1]\nfile = {image:?}\nqueue = \"fast\"\n\n\
         [disk.scratch]\nram = \"2M\"\n\n[[export]]\nnbd = \"unix:{}\"\n\n\
         [[export]]\nnbd = \"unix:{}\"\ndisks = [\"scratch\"]\n",
        inner.display(),
        outer.display()
    );
    std::fs::write(scratch.path("blkmq.toml"), text).expect("a configuration can be written");
    let daemon = Daemon::start(&["-c", &scratch.word("blkmq.toml")]);
    for (socket, disk, size) in [
        (&inner, "vm1", 1 << 20),
        (&inner, "scratch", 2 << 20),
        (&outer, "scratch", 2 << 20),
    ] {
        let mut client = Client::connect(socket, disk).expect("the disk is served there");
        assert_eq!(client.size(), size);
        client.write(0, &block(0, 1)).expect("a write");
        assert!(client.read(0, BLOCK).expect("a read") == block(0, 1));
    }
    assert!(
        Client::connect(&outer, "vm1").is_err(),
        "vm1 is served where it should not be"
    );
    daemon.stop();
}
