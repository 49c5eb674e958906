//! Tests what a client can do with a fence to its own lost sessions, and that it can do nothing to those of
//! others.

use std::io::Read;
use std::time::{Duration, Instant};

use crate::common::nbd::{Client, Command};
use crate::common::pattern::BLOCK;
use crate::common::{Daemon, Scratch};

#[test]
fn fence_is_answered_when_all_that_the_lost_session_began_has_ended() {
    let scratch = Scratch::new();
    let daemon = serve(&scratch);
    let socket = scratch.path("nbd.sock");
    let mut lost = Client::connect_as(&socket, "vm1", US, 1).expect("it is served");
    let mut other = Client::connect_as(&socket, "vm1", US, 2).expect("it is served");
    let mut next = Client::connect_as(&socket, "vm1", US, 3).expect("it is served");
    write_much(&mut lost);
    let start = Instant::now();
    next.fence(1).expect("the fence is answered");
    assert!(
        start.elapsed() > SOON,
        "answered after {:?}: nothing was under way",
        start.elapsed()
    );
    let mut look = || {
        (0..WRITES)
            .flat_map(|at| next.read(at * MIB, BLOCK).expect("a read"))
            .collect()
    };
    let first: Vec<u8> = look();
    std::thread::sleep(Duration::from_millis(1000 * MIB / CAP));
    assert!(first == look(), "a write has landed behind the fence");
    assert!(drain(&mut lost), "the lost session is not closed");
    other
        .read(0, BLOCK)
        .expect("another session of the client goes on");
    next.fence(1).expect("a session that is gone is fenced at once");
    daemon.stop();
}

#[test]
fn nobody_fences_a_session_of_another_client_or_disk() {
    let scratch = Scratch::new();
    let daemon = serve(&scratch);
    let socket = scratch.path("nbd.sock");
    let mut victim = Client::connect_as(&socket, "vm1", US, 1).expect("it is served");
    let mut stranger = Client::connect_as(&socket, "vm1", US ^ 1, 2).expect("it is served");
    let mut neighbour = Client::connect_as(&socket, "vm2", US, 3).expect("it is served");
    let mut nobody = Client::connect(&socket, "vm1").expect("it is served");
    stranger.fence(1).expect("there is no such session of it");
    neighbour.fence(1).expect("there is no such session at its disk");
    let refused = nobody.fence(1).expect_err("it has no name");
    assert_eq!(
        refused.raw_os_error(),
        Some(rustix::io::Errno::INVAL.raw_os_error())
    );
    // A name that is taken gives no access, either.
    let twice = Client::connect_as(&socket, "vm1", US, 1);
    assert!(twice.is_err(), "two sessions have one name");
    for client in [&mut victim, &mut stranger, &mut neighbour, &mut nobody] {
        client.read(0, BLOCK).expect("it goes on");
    }
    daemon.stop();
}

#[test]
fn thousands_of_names_and_fences_leave_nothing_behind() {
    let scratch = Scratch::new();
    let daemon = serve(&scratch);
    let socket = scratch.path("nbd.sock");
    let mut lost = Client::connect_as(&socket, "vm1", US, 1).expect("it is served");
    write_much(&mut lost);
    let mut neighbour = Client::connect(&socket, "vm2").expect("it is served");
    // The number of simultaneous connections depends on the machine, and so does the memory that
    // the allocator keeps for them. A leak for each connection would show after every flood.
    let mut memory = vec![daemon.memory_kib()];
    for _ in 0..6 {
        flood(&socket, 1000);
        memory.push(daemon.memory_kib());
    }
    let grown = memory
        .windows(2)
        .map(|pair| pair[1].saturating_sub(pair[0]))
        .min();
    assert!(
        grown < Some(64),
        "{memory:?} KiB after each thousand of clients that are gone"
    );
    let start = Instant::now();
    neighbour.read(0, BLOCK).expect("a read");
    assert!(
        start.elapsed() < SOON,
        "the neighbour's read took {:?}",
        start.elapsed()
    );
    drop(lost);
    daemon.stop();
}

/// This many clients connect, each with its own name, fence sessions that exist and that do not,
/// and disconnect without waiting.
fn flood(socket: &std::path::Path, clients: u64) {
    for number in 0..clients {
        let name = if number % 2 == 0 { US } else { number.into() };
        let mut client = Client::connect_as(socket, "vm2", name, 100 + number).expect("it is served");
        for session in 0..20 {
            let sent = client.send(Command::Fence, 0, session, 0, &[]);
            sent.expect("the fence is taken");
        }
    }
}

fn serve(scratch: &Scratch) -> Daemon {
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let cap = format!("/vm1,write_bps={CAP}");
    Daemon::start(&[
        "--disk",
        "name=vm1,ram=64M",
        "--disk",
        "name=vm2,ram=64M",
        "--group",
        &cap,
        "--nbd",
        &nbd,
    ])
}

/// Sends writes that take seconds under the cap, and stays connected.
fn write_much(client: &mut Client) {
    let data = vec![1; MIB as usize];
    for number in 0..WRITES {
        let sent = client.send(Command::Write, 0, number * MIB, MIB as u32, &data);
        sent.expect("the writes are taken");
    }
    std::thread::sleep(Duration::from_millis(100));
}

/// Reads until the connection closes; returns whether it does.
fn drain(client: &mut Client) -> bool {
    let mut bytes = [0; 4096];
    loop {
        match client.stream().read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

/// A client's part of the names of its sessions.
const US: u128 = 0x1122_3344_5566_7788_99aa_bbcc_ddee_ff00;
const MIB: u64 = 1 << 20;
/// Bytes per second that may be written.
const CAP: u64 = 4 << 20;
const WRITES: u64 = 12;
/// A small part of the time that the writes take.
const SOON: Duration = Duration::from_millis(700);
