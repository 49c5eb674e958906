//! Tests whether a front end can block a reactor with eventfds that are full, so that a write to them would
//! block.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{ioctl_fionbio, read, write};

use crate::common::{Daemon, Scratch};
use blkmq_testkit::vhost_user::{AVAIL, FrontEnd, words};

/// Gives the daemon an event with which to notify the front end.
fn set_event(client: &FrontEnd, message: u32, event: &OwnedFd) {
    client.send(message, &words(&[0]), &[event.as_fd()]);
}

fn new_event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an event")
}

/// Fills an event's counter, so that a write of 1 blocks.
fn fill(event: &OwnedFd) {
    let _ = read(event, &mut [0; 8]);
    write(event, &(u64::MAX - 1).to_ne_bytes()).expect("room");
    ioctl_fionbio(event, false).expect("a flag");
}

/// One read by a well-behaved front end, and its notification.
fn read_once(client: &FrontEnd, call: &OwnedFd, count: u16) {
    client.write(AVAIL + 2, &count.to_le_bytes());
    client.kick();
    client.used_up_to(count);
    // The chain is used before the notification.
    let mut told = [0; 8];
    while read(call, &mut told).is_err() {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(u64::from_ne_bytes(told), 1, "one notification of one batch");
}

#[test]
fn front_end_whose_events_are_full_holds_nobody_up() {
    let scratch = Scratch::new();
    let address = format!("unix:{}", scratch.word("{disk}.sock"));
    let disks = ["--disk", "name=a,ram=1M", "--disk", "name=b,ram=1M"];
    // One reactor for both.
    let more = ["--vhost-user", &address, "--reactors", "1"];
    let daemon = Daemon::start(&[&disks, &more[..]].concat());
    let (neighbour, call) = (FrontEnd::connect(&scratch.path("a.sock")), new_event());
    neighbour.start();
    set_event(&neighbour, CALL, &call);
    neighbour.request(0, 0, 0);
    read_once(&neighbour, &call, 1);

    let (hostile, full) = (FrontEnd::connect(&scratch.path("b.sock")), new_event());
    hostile.start();
    set_event(&hostile, CALL, &full);
    set_event(&hostile, ERR, &full);
    hostile.request(0, 0, 0);
    hostile.offer(&[0]);
    assert_eq!(
        hostile.used(1),
        [0],
        "the event was handed over, and the ring is served"
    );
    fill(&full);
    hostile.request(0, 0, 0);
    hostile.offer(&[0, 0]);
    assert_eq!(hostile.used(2), [0, 0]);
    read_once(&neighbour, &call, 2);
    // An invalid head breaks the device, which the other event reports.
    hostile.offer(&[0, 0, 99]);
    read_once(&neighbour, &call, 3);
    drop((hostile, neighbour));
    daemon.stop();
}

/// SET_VRING_CALL and SET_VRING_ERR.
const CALL: u32 = 13;
const ERR: u32 = 14;
