//! Decides at which addresses the daemon answers: TCP, a socket that systemd passes to it, and
//! those of a configuration file.

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::daemon::program;
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::{installed, run};
use crate::common::{Daemon, Scratch};

#[test]
fn a_socket_handed_over_by_systemd_is_served() {
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
fn a_configuration_file_serves_what_it_says_where_it_says() {
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
