//! Decides that the daemon takes its socket from systemd where one is handed to it.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::process::Command;

use crate::common::daemon::program;
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::{Daemon, Scratch};

#[test]
fn a_socket_handed_over_by_systemd_is_served() {
    let scratch = Scratch::new();
    let socket = scratch.path("handed.sock");
    let listener = UnixListener::bind(&socket).expect("a socket can be bound");
    // As systemd does it: the socket is descriptor 3, and the variables name the process that may take it.
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
