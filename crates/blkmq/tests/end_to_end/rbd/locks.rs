//! Tests that an image never has two writers: while one daemon has its lock, another one is refused or waits,
//! and one whose lock was taken, because it seemed dead, writes nothing any more until it is told to open the image
//! again.

use std::time::Duration;

use blkmq::control::client::Client as Control;
use rustix::process::Signal;
use serde_json::json;

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

#[test]
fn images_of_a_barred_client_are_opened_again_one_after_the_other() {
    let Some(ceph) = Ceph::find() else { return };
    let scratch = Scratch::new();
    let images = [ceph.image("barred", "8M"), ceph.image("barred-too", "8M")];
    let (daemon, mut control) = serve(
        &scratch,
        &images
            .each_ref()
            .map(|image| ceph.disk(image.name, image.name, "")),
    );
    let connect = |disk| Client::connect(&scratch.path("nbd.sock"), disk).expect("it is served");
    let mut clients = images.each_ref().map(|image| connect(image.name));
    for client in &mut clients {
        client.write(0, &block(0, 1)).expect("a write");
    }
    ceph.bar_watchers_of(images[0].name);
    let barred = clients[0].write(0, &block(0, 2)).expect_err("it is barred");
    assert_eq!(barred.raw_os_error(), Some(108), "{barred}");
    let state =
        |control: &mut Control| control.call("disk.list", &json!({})).expect("an answer")[0]["state"].clone();
    assert_eq!(state(&mut control), "lock_lost");
    // The second one has not asked the cluster for anything since.
    for (image, client) in images.iter().zip(&mut clients) {
        let opened = control.call("disk.reopen", &json!({"disk": image.name}));
        opened.unwrap_or_else(|error| panic!("{error}; it said:\n{}", daemon.said()));
        assert!(client.read(0, BLOCK).expect("a read") == block(0, 1));
        client
            .write(0, &block(0, 3))
            .expect("a write, and of the same client");
    }
    assert_eq!(state(&mut control), "ok");
    assert_eq!(daemon.said().matches("connected to cluster").count(), 2);
    // What is as it was opened stays so.
    control
        .call("disk.reopen", &json!({"disk": images[0].name}))
        .expect("nothing to do");
    assert_eq!(daemon.said().matches("over a new connection").count(), 2);
    daemon.stop();
}

#[test]
fn barred_image_is_not_opened_again_while_another_client_has_its_lock() {
    let Some(ceph) = Ceph::find() else { return };
    let (scratch, other) = (Scratch::new(), Scratch::new());
    let image = ceph.image("barred-taken", "8M");
    let (daemon, mut control) = serve(&scratch, &[ceph.disk("x", image.name, ",lock_wait=1")]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "x").expect("it is served");
    client.write(0, &block(0, 1)).expect("a write");
    ceph.bar_watchers_of(image.name);
    let new = Daemon::serve(&other, &[&ceph.disk("x", image.name, "")]);
    let mut reopen = || control.call("disk.reopen", &json!({"disk": "x"}));
    let refused = reopen().expect_err("another one has it").to_string();
    assert!(refused.contains("in use by the client at 127.0.0.1"), "{refused}");
    assert!(client.write(0, &block(0, 2)).is_err(), "it is barred as before");
    let mut winner = Client::connect(&other.path("nbd.sock"), "x").expect("it is served");
    winner.write(0, &block(0, 3)).expect("a write of the new one");
    new.stop();
    reopen().expect("the lock is free");
    assert!(client.read(0, BLOCK).expect("a read") == block(0, 3));
    client.write(0, &block(0, 4)).expect("a write");
    daemon.stop();
}

#[test]
fn disk_that_is_added_while_the_connection_is_barred_gets_a_new_one() {
    let Some(ceph) = Ceph::find() else { return };
    let scratch = Scratch::new();
    let images = [ceph.image("barred-first", "8M"), ceph.image("barred-added", "8M")];
    let (daemon, mut control) = serve(&scratch, &[ceph.disk("x", images[0].name, "")]);
    ceph.bar_watchers_of(images[0].name);
    let rbd = format!("rbd/{}", images[1].name);
    let added =
        json!({"kind": "disk", "name": "y", "keys": {"rbd": rbd, "id": "blkmq", "conf": ceph.conf()}});
    control.call("config.add", &added).expect("it is added");
    let mut client = Client::connect(&scratch.path("nbd.sock"), "y").expect("it is served");
    client.write(0, &block(0, 1)).expect("a write");
    // Another image gets the name of the one that was served.
    ceph.rbd(&["rm", "--no-progress", images[0].name]);
    ceph.rbd(&["create", "--size", "8M", images[0].name]);
    let refused = control.call("disk.reopen", &json!({"disk": "x"}));
    let refused = refused.expect_err("it is another one").to_string();
    assert!(refused.contains("another image has the name"), "{refused}");
    daemon.stop();
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
