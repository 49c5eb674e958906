//! Another daemon takes over a disk with clients only with the same data: what its clients have
//! cached of one image must not be written into another one.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Stdio;
use std::time::Duration;

use blkmq_export::handover::channel::Channel;
use blkmq_export::handover::codec::{Message, Origin, Socket, VERSION, VERSION_MIN};

use super::{DISK_BYTES, END_TIME, Stage, read_back};
use crate::common::Scratch;
use crate::common::daemon::{serve_command, wait_within};
use crate::common::nbd::Client;
use crate::common::pattern::block;

#[test]
fn take_over_refuses_other_data_under_the_name_of_a_disk_with_clients() {
    let stage = stage_of_many();
    let daemon = stage.start();
    let mut clients: Vec<Client> = ["vm1", "line", "stripe"]
        .iter()
        .map(|name| Client::connect(&stage.socket(), name).expect("it is served"))
        .collect();
    let (vm1, a, b) = (
        stage.scratch.word("vm1.raw"),
        stage.scratch.word("a.raw"),
        stage.scratch.word("b.raw"),
    );
    let other = stage.scratch.image("other.raw", DISK_BYTES);
    let cases = [
        (1, format!("name=vm1,file={other}"), "disk vm1: "),
        (1, format!("name=vm1,file={vm1},lock=off"), "disk vm1: "),
        (3, format!("name=a,file={b}"), "disk a below it"),
        (7, "name=line,linear=b+a".to_owned(), "disk line: "),
        (
            9,
            "name=stripe,striped=c+d,chunk=128K".to_owned(),
            "disk stripe: ",
        ),
    ];
    for (index, disk, reason) in &cases {
        let mut words = stage.words("--take-over");
        words[*index].clone_from(disk);
        if *index == 3 {
            // The two have changed places.
            words[5] = format!("name=b,file={a}");
        }
        let said = stage.fail_to_upgrade(&words);
        assert!(
            said.contains(reason) && said.contains("--same-data"),
            "{disk}: {said}"
        );
    }
    // A restored copy at the same path.
    let mut client = clients.remove(0);
    client.write(0, &block(0, 1)).expect("the running daemon goes on");
    fs::rename(&vm1, stage.scratch.path("moved.raw")).expect("our own file");
    stage.scratch.image("vm1.raw", DISK_BYTES);
    let said = stage.fail_to_upgrade(&stage.words("--take-over"));
    assert!(said.contains("another file"), "{said}");
    // No file there, and a size with which one would be made.
    fs::remove_file(&vm1).expect("our own file");
    let mut words = stage.words("--take-over");
    words[1] = format!("name=vm1,file={vm1},size={DISK_BYTES},create=on");
    let said = stage.fail_to_upgrade(&words);
    assert!(said.contains("--same-data"), "{said}");
    assert!(!stage.scratch.path("vm1.raw").exists(), "an empty file is left");
    read_back(&stage.socket(), 0, 1);
    fs::rename(stage.scratch.path("moved.raw"), &vm1).expect("our own file");
    let daemon = stage.upgrade(daemon);
    read_back(&stage.socket(), 0, 1);
    daemon.stop();
}

#[test]
fn take_over_accepts_a_moved_disk_if_same_data_names_it() {
    let stage = Stage::new();
    let mut daemon = stage.start();
    let mut client = Client::connect(&stage.socket(), "vm1").expect("it is served");
    client.write(0, &block(0, 1)).expect("a write");
    let moved = stage.scratch.word("moved.raw");
    fs::rename(stage.scratch.path("vm1.raw"), &moved).expect("our own file");
    let mut words = stage.words("--take-over");
    words[1] = format!("name=vm1,file={moved}");
    words.extend(["--same-data".to_owned(), "vm2".to_owned()]);
    let said = stage.fail_to_upgrade(&words);
    assert!(said.contains("--same-data vm1"), "{said}");
    *words.last_mut().expect("there are some") = "vm1".to_owned();
    let new = crate::common::Daemon::start(&words.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(daemon.ended_within(END_TIME).success());
    client.write(0, &block(0, 2)).expect("it goes on");
    read_back(&stage.socket(), 0, 2);
    new.stop();
}

#[test]
fn take_over_lets_queue_and_group_of_a_disk_with_clients_change() {
    let stage = Stage::new();
    let mut daemon = stage.start();
    let mut client = Client::connect(&stage.socket(), "vm1").expect("it is served");
    let mut words = stage.words("--take-over");
    words[1] += ",queue=q,group=/x,description=other,sched=bfq";
    let new = crate::common::Daemon::start(&words.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(daemon.ended_within(END_TIME).success());
    client.write(0, &block(0, 1)).expect("it goes on");
    new.stop();
}

#[test]
fn take_over_from_a_daemon_of_an_older_version_is_tried_in_that_version() {
    let stage = Stage::new();
    let listener = UnixListener::bind(stage.upgrade_path()).expect("a socket can be bound");
    let words = stage.words("--take-over");
    let mut command = serve_command(&words.iter().map(String::as_str).collect::<Vec<_>>());
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut newcomer = command.spawn().expect("the command runs");
    let accept = || Channel::new(listener.accept().expect("it connects").0).expect("our own user");
    let mut channel = accept();
    // It tries the versions one after the other, newest first.
    for version in (VERSION_MIN + 1..=VERSION).rev() {
        let (hello, _) = channel.receive(LIMIT).expect("a hello");
        assert_eq!(hello, Message::Hello { version });
        let reason = format!("it speaks version {version} of the hand-over, this daemon {VERSION_MIN}");
        channel
            .send(&Message::Refused { reason }, &[], LIMIT)
            .expect("it reads");
        channel = accept();
    }
    let (hello, _) = channel.receive(LIMIT).expect("a hello");
    assert_eq!(hello, Message::Hello { version: VERSION_MIN });
    let welcome = Message::Welcome {
        version: VERSION_MIN,
        instance: None,
    };
    channel.send(&welcome, &[], LIMIT).expect("it reads");
    let own = Message::Socket(Socket {
        door: "upgrade".to_owned(),
        address: format!("unix:{}", stage.scratch.word("up.sock")),
        origin: Origin::Daemon,
    });
    channel.send(&own, &[listener.as_fd()], LIMIT).expect("it reads");
    channel
        .send(&Message::End { count: 1 }, &[], LIMIT)
        .expect("it reads");
    let (disk, _) = channel.receive(LIMIT).expect("a disk");
    assert!(matches!(disk, Message::Disk(_)), "{disk:?}");
    assert_eq!(
        channel.receive(LIMIT).expect("the end of the disks").0,
        Message::Take
    );
    channel
        .send(&Message::End { count: 0 }, &[], LIMIT)
        .expect("it reads");
    assert_eq!(channel.receive(LIMIT).expect("it is ready").0, Message::Ready);
    drop(channel);
    let status = wait_within(&mut newcomer, END_TIME).expect("it ends");
    assert!(!status.success());
}

#[test]
fn take_over_by_a_daemon_of_an_older_version_is_accepted() {
    let stage = Stage::new();
    let daemon = stage.start();
    let stream = UnixStream::connect(stage.upgrade_path()).expect("it listens");
    let mut channel = Channel::new(stream).expect("our own user");
    let hello = Message::Hello { version: VERSION_MIN };
    channel.send(&hello, &[], LIMIT).expect("it listens");
    let welcome = channel.receive(LIMIT).expect("a welcome").0;
    assert!(
        matches!(
            welcome,
            Message::Welcome {
                version: VERSION_MIN,
                ..
            }
        ),
        "{welcome:?}"
    );
    loop {
        match channel.receive(LIMIT).expect("locks and sockets").0 {
            Message::Lock | Message::Socket(_) => {}
            Message::End { .. } => break,
            other => panic!("an older daemon does not know {other:?}"),
        }
    }
    drop(channel);
    daemon.stop();
}

/// Disks on files, alone and below others.
fn stage_of_many() -> Stage {
    let scratch = Scratch::new();
    let file = |name: &str| {
        let path = scratch.image(&format!("{name}.raw"), DISK_BYTES);
        format!("name={name},file={path}")
    };
    let disks = [
        file("vm1"),
        file("a"),
        file("b"),
        "name=line,linear=a+b".to_owned(),
        "name=stripe,striped=c+d,chunk=64K".to_owned(),
        file("c"),
        file("d"),
    ];
    Stage::of(scratch, &disks.each_ref().map(|disk| &**disk))
}

const LIMIT: Duration = Duration::from_secs(10);
