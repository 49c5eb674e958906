//! Tests that an image never has two writers: while one daemon has its lock, another one is refused or waits,
//! and one whose lock was taken, because it seemed dead, writes nothing any more.

use std::time::Duration;

use blkmq::control::client::Client as Control;
use rustix::process::Signal;

use super::cluster::Ceph;
use super::failures::wait_for_no_watchers;
use super::refused_start;
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::{Daemon, Scratch};

#[test]
fn second_daemon_is_refused_and_a_reader_is_not() {
    let Some(ceph) = Ceph::find() else { return };
    let (scratch, other) = (Scratch::new(), Scratch::new());
    let image = ceph.image("shared", "8M");
    let (daemon, _control) = serve(&scratch, &[ceph.disk("x", image.name, "")]);
    let said = refused_start(&ceph.disk("x", image.name, ",lock_wait=1"));
    assert!(
        said.contains("rbd rbd/shared: in use by the client at 127.0.0.1"),
        "{said}"
    );
    let reader = Daemon::serve(&other, &[&ceph.disk("x", image.name, ",ro=on")]);
    let mut client = Client::connect(&other.path("nbd.sock"), "x").expect("it is served");
    assert!(client.write(0, &block(0, 1)).is_err());
    reader.stop();
    let mut client = Client::connect(&scratch.path("nbd.sock"), "x").expect("it is served");
    client
        .write(0, &block(0, 1))
        .expect("the first one has its lock as before");
    daemon.stop();
    // An orderly end releases the lock at once, although a client of the control socket is still there.
    Daemon::serve(&scratch, &[&ceph.disk("x", image.name, ",lock_wait=0")]).stop();
}

#[test]
fn successor_of_a_daemon_that_was_killed_waits_until_it_is_forgotten() {
    let Some(ceph) = Ceph::find() else { return };
    let scratch = Scratch::new();
    let image = ceph.image("killed-daemon", "8M");
    let disk = ceph.disk("x", image.name, "");
    let daemon = Daemon::serve(&scratch, &[&disk]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "x").expect("it is served");
    client.write(0, &block(0, 1)).expect("a write");
    daemon.kill();
    let daemon = Daemon::serve(&scratch, &[&disk]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "x").expect("it is served");
    let found = client.read(0, BLOCK).expect("a read");
    assert!(found == block(0, 1), "a write that was acknowledged is lost");
    client
        .write(0, &block(0, 2))
        .expect("the lock is the successor's");
    daemon.stop();
}

#[test]
fn daemon_that_seemed_dead_writes_nothing_after_its_lock_was_taken() {
    let Some(ceph) = Ceph::find() else { return };
    let (scratch, other) = (Scratch::new(), Scratch::new());
    let image = ceph.image("taken", "8M");
    let disk = ceph.disk("x", image.name, "");
    let mut old = Daemon::serve(&scratch, &[&disk]);
    let mut late = Client::connect(&scratch.path("nbd.sock"), "x").expect("it is served");
    late.write(0, &block(0, 1)).expect("a write");
    old.pause();
    let new = Daemon::serve(&other, &[&disk]);
    let mut client = Client::connect(&other.path("nbd.sock"), "x").expect("it is served");
    client.write(0, &block(0, 2)).expect("a write of the new one");
    old.signal(Signal::CONT);
    assert!(late.write(0, &block(0, 3)).is_err(), "it is barred");
    assert!(client.read(0, BLOCK).expect("a read") == block(0, 2));
    client.write(4096, &block(1, 2)).expect("the new one goes on");
    new.stop();
    old.signal(Signal::TERM);
    old.ended_within(Duration::from_secs(30));
    wait_for_no_watchers(&ceph, image.name);
}

/// A daemon with these disks, and a connection to its control socket.
fn serve(scratch: &Scratch, disks: &[String]) -> (Daemon, Control) {
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let control = format!("unix:{}", scratch.word("control.sock"));
    let mut words = vec!["--nbd", &nbd, "--control", &control];
    disks.iter().for_each(|disk| words.extend(["--disk", disk]));
    let daemon = Daemon::start(&words);
    let control = Control::connect(&scratch.path("control.sock")).expect("it is served");
    (daemon, control)
}
