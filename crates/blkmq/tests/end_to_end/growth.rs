//! Tests whether another daemon can take over a disk that has grown while clients were connected, which stay
//! connected.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blkmq::control::client::Client as Control;
use rustix::process::Signal;
use serde_json::json;

use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::{installed, run, try_run};
use crate::common::{Daemon, Scratch};
use blkmq_testkit::vhost_user::FrontEnd as Guest;

fn start(scratch: &Scratch, how: &str) -> Daemon {
    let disk = format!("name=vm,file={}", scratch.word("vm.raw"));
    let guests = format!("unix:{}", scratch.word("{disk}.sock"));
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let upgrade = format!("unix:{}", scratch.word("up.sock"));
    let words = ["--disk", &disk, "--vhost-user", &guests, "--nbd", &nbd];
    Daemon::start(&[&words, &[how, &upgrade][..]].concat())
}

/// Makes the image larger, and has the daemon check it.
fn grow(image: &Path, bytes: u64, daemon: &Daemon) {
    let file = std::fs::OpenOptions::new().write(true).open(image);
    file.expect("the image").set_len(bytes).expect("it grows");
    daemon.signal(Signal::HUP);
}

fn is_told(mut channel: &UnixStream) {
    let mut message = [0; 12];
    channel.read_exact(&mut message).expect("the guest is told");
    assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn clients_of_a_disk_that_has_grown_stay_connected_over_an_upgrade() {
    let scratch = Scratch::new();
    scratch.image("vm.raw", DISK_BYTES);
    let mut old = start(&scratch, "--upgrade-socket");
    let mut guest = Guest::connect(&scratch.path("vm.sock"));
    let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    ours.set_read_timeout(Some(LONG)).expect("a time limit");
    guest.send(SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
    guest.start();
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm").expect("it is served");
    client.write(0, &block(0, 1)).expect("a write");
    grow(&scratch.path("vm.raw"), 2 * DISK_BYTES, &old);
    is_told(&ours);

    let daemon = start(&scratch, "--take-over");
    assert!(old.ended_within(LONG).success(), "{}", old.said());
    // The client that was told of the growth can read at the new end; the other keeps its old end,
    // and gets no error before it.
    assert_eq!(guest.ask(GET_STATUS, &[]), 0);
    guest.request(0, 0, 2 * DISK_BYTES / 512 - 8);
    guest.offer(&[0]);
    assert_eq!((guest.used(1), guest.status(0)), (vec![0], 0));
    assert!(client.read(0, BLOCK).expect("a read") == block(0, 1));
    let last = DISK_BYTES - BLOCK as u64;
    assert!(client.read(last, BLOCK).is_ok() && client.read(DISK_BYTES, BLOCK).is_err());
    // The new daemon reports growth as well, but not growth that was reported before.
    ours.set_nonblocking(true).expect("a socket");
    assert!((&ours).read(&mut [0]).is_err(), "it is told once more");
    ours.set_nonblocking(false).expect("a socket");
    grow(&scratch.path("vm.raw"), 3 * DISK_BYTES, &daemon);
    is_told(&ours);
    daemon.stop();
}

#[test]
fn resize_says_which_clients_are_told_and_which_cannot_be() {
    let scratch = Scratch::new();
    let image = scratch.image("vm.raw", DISK_BYTES);
    let disk = format!("name=vm,file={image}");
    let guests = format!("unix:{}", scratch.word("{disk}.sock"));
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let control = format!("unix:{}", scratch.word("control.sock"));
    let words = ["--disk", &disk, "--vhost-user", &guests, "--nbd", &nbd];
    let mut daemon = Daemon::start(&[&words[..], &["--control", &control]].concat());
    let mut control = Control::connect(&scratch.path("control.sock")).expect("it is served");
    let mut resize = |bytes: u64| {
        let params = json!({"disk": "vm", "size": bytes});
        let answer = control.call("disk.resize", &params).expect("it grows");
        (answer["told"].to_string(), answer["not_told"].to_string())
    };
    let mut guest = Guest::connect(&scratch.path("vm.sock"));
    guest.start();
    let (told, not_told) = resize(2 * DISK_BYTES);
    assert_eq!(told, "[]");
    assert!(
        not_told.contains("front end process") && not_told.contains("PATCH /drives/ID"),
        "{not_told}"
    );
    let is_warned = |line: &str| line.contains("1 client is not told that it has grown");
    assert!(daemon.wait_for(LONG, is_warned), "{}", daemon.said());
    let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    ours.set_read_timeout(Some(LONG)).expect("a time limit");
    guest.send(SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
    assert_eq!(guest.ask(GET_STATUS, &[]), 0);
    let _client = Client::connect(&scratch.path("nbd.sock"), "vm").expect("it is served");
    let (told, not_told) = resize(3 * DISK_BYTES);
    is_told(&ours);
    assert!(told.contains("front end process"), "{told}");
    assert!(
        not_told.contains("NBD client") && !not_told.contains("front end"),
        "{not_told}"
    );
    daemon.stop();
}

#[test]
fn disk_that_is_opened_again_serves_what_was_lost_and_tells_each_client_once() {
    let scratch = Scratch::new();
    scratch.image("vm.raw", DISK_BYTES);
    let disk = format!("name=vm,file={}", scratch.word("vm.raw"));
    let socket = format!("unix:{}", scratch.word("control.sock"));
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let daemon = Daemon::start(&["--disk", &disk, "--nbd", &nbd, "--control", &socket]);
    let mut control = Control::connect(&scratch.path("control.sock")).expect("it is served");
    let [mut one, mut other] =
        [(), ()].map(|()| Client::connect(&scratch.path("nbd.sock"), "vm").expect("it is served"));
    let image = std::fs::OpenOptions::new()
        .write(true)
        .open(scratch.path("vm.raw"));
    let image = image.expect("the image");
    image.set_len(DISK_BYTES / 2).expect("it is cut off");
    let lost = DISK_BYTES - BLOCK as u64;
    assert!(one.read(lost, BLOCK).is_err());
    let params = json!({"disk": "vm"});
    let refused = control.call("disk.reopen", &params).expect_err("it is too short");
    assert!(
        refused.to_string().contains("restore the file first"),
        "{refused}"
    );
    image.set_len(DISK_BYTES).expect("it is restored");
    assert!(one.read(lost, BLOCK).is_err());
    control.call("disk.reopen", &params).expect("it is whole");
    let state = control.call("disk.list", &json!({})).expect("a list")[0]["state"].take();
    assert_eq!(state, "ok");
    for client in [&mut one, &mut other] {
        assert!(client.read(lost, BLOCK).is_ok());
        client.write(lost, &block(lost, 1)).expect("a write");
        assert!(client.flush().is_err(), "it is told once");
        client.flush().expect("and not again");
    }
    // A client that comes later has missed nothing.
    let mut late = Client::connect(&scratch.path("nbd.sock"), "vm").expect("it is served");
    late.flush().expect("nothing is lost since");
    daemon.stop();
}

#[test]
fn disk_whose_filesystem_was_mounted_again_goes_on_with_the_file_that_is_there() {
    if !installed(&["losetup", "mkfs.ext4", "mount", "umount", "cp"]) {
        return;
    }
    let scratch = Scratch::new();
    let (first, second) = (scratch.image("first", 64 << 20), scratch.word("second"));
    run("mkfs.ext4", &["-q", "-F", &first]);
    let at = scratch.word("mounted");
    std::fs::create_dir(&at).expect("a directory");
    let mut mounted = Mounted(at.clone(), 0);
    if !mounted.mount(&first) {
        return;
    }
    let image = scratch.path("mounted/vm.raw");
    std::fs::write(&image, vec![0; DISK_BYTES as usize]).expect("an image");
    let socket = format!("unix:{}", scratch.word("control.sock"));
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let disk = format!("name=vm,file={at}/vm.raw");
    let config = scratch.path("blkmq.toml");
    let above = format!("[daemon]\npaths = [{:?}]\n", scratch.path(""));
    std::fs::write(&config, above).expect("a configuration");
    let args = [
        "--config",
        config.to_str().expect("a name"),
        "--disk",
        &disk,
        "--nbd",
        &nbd,
        "--control",
        &socket,
    ];
    let daemon = Daemon::start(&args);
    let mut control = Control::connect(&scratch.path("control.sock")).expect("it is served");
    let connect = || Client::connect(&scratch.path("nbd.sock"), "vm").expect("it is served");
    let (mut client, mut reader) = (connect(), connect());
    client.write(0, &block(0, 1)).expect("a write");
    client.flush().expect("a flush");
    run("sync", &["-f", &at]);

    // The drive comes again under another number: the same filesystem, and for the kernel another one.
    run("cp", &[&first, &second]);
    run("umount", &["--lazy", &at]);
    mounted.1 -= 1;
    let params = json!({"disk": "vm"});
    let refused = control.call("disk.reopen", &params).expect_err("it is not there");
    assert!(
        refused.to_string().contains("is not what was opened"),
        "{refused}"
    );
    assert!(mounted.mount(&second));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                assert!(reader.read(0, BLOCK).expect("a read") == block(0, 1));
            }
        });
        let opened = control.call("disk.reopen", &params);
        is_over.store(true, Ordering::Relaxed);
        opened.expect("it is there");
    });
    client.write(BLOCK as u64, &block(1, 2)).expect("a write");
    assert!(client.flush().is_err(), "it is told once");
    client.flush().expect("and not again");
    assert!(client.read(0, BLOCK).expect("a read") == block(0, 1));
    let content = std::fs::read(&image).expect("the file that is there now");
    assert!(content[..BLOCK] == block(0, 1) && content[BLOCK..2 * BLOCK] == block(1, 2));

    // Another file is not the disk, whatever its size is.
    std::fs::rename(&image, scratch.path("mounted/moved")).expect("it is moved");
    std::fs::write(&image, &content).expect("another file");
    let refused = control.call("disk.reopen", &params).expect_err("another file");
    assert!(
        refused.to_string().contains("is not what was opened"),
        "{refused}"
    );
    client.flush().expect("it goes on with its own");
    drop((client, reader));
    daemon.stop();
}

/// A directory, and how often something is mounted there, until this is dropped.
struct Mounted(String, u32);

impl Mounted {
    /// Mounts the filesystem in a file; says so if that is not possible here.
    fn mount(&mut self, file: &str) -> bool {
        let said = try_run("mount", &["-o", "loop", file, &self.0]);
        if !said.success {
            blkmq_testkit::skip(&format!("no filesystem can be mounted: {}", said.stderr.trim()));
        }
        self.1 += u32::from(said.success);
        said.success
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        for _ in 0..self.1 {
            let _ = try_run("umount", &["--lazy", &self.0]);
        }
    }
}

#[test]
fn disks_without_a_size_of_their_own_are_no_error_whatever_their_name_is() {
    let scratch = Scratch::new();
    scratch.image("vm.raw", DISK_BYTES);
    let disk = format!("name=vm,file={}", scratch.word("vm.raw"));
    let mut daemon = Daemon::serve(&scratch, &[&disk, "name=shrunk,linear=vm"]);
    daemon.signal(Signal::HUP);
    assert!(daemon.wait_for(LONG, |line| line.contains("SIGHUP: nothing differs")));
    assert!(!daemon.said().contains("ERROR"), "{}", daemon.said());
    daemon.stop();
    // And one that has shrunk is one.
    let mut daemon = Daemon::serve(&scratch, &[&disk]);
    grow(&scratch.path("vm.raw"), DISK_BYTES / 2, &daemon);
    assert!(daemon.wait_for(LONG, |line| line.contains("ERROR disk vm: has shrunk")));
    daemon.stop();
}

#[test]
fn truncated_image_never_reads_as_zeroes_whatever_is_written_behind_its_end() {
    let scratch = Scratch::new();
    scratch.image("vm.raw", DISK_BYTES);
    let disk = format!("name=vm,file={}", scratch.word("vm.raw"));
    for is_read_first in [true, false] {
        std::fs::write(scratch.path("vm.raw"), vec![7; DISK_BYTES as usize]).expect("an image");
        let socket = format!("unix:{}", scratch.word("control.sock"));
        let nbd = format!("unix:{}", scratch.word("nbd.sock"));
        let daemon = Daemon::start(&["--disk", &disk, "--nbd", &nbd, "--control", &socket]);
        let mut control = Control::connect(&scratch.path("control.sock")).expect("it is served");
        let mut state = || control.call("disk.list", &json!({})).expect("a list")[0]["state"].take();
        assert_eq!(state(), "ok");
        let mut client = Client::connect(&scratch.path("nbd.sock"), "vm").expect("it is served");
        let image = std::fs::OpenOptions::new()
            .write(true)
            .open(scratch.path("vm.raw"));
        let image = image.expect("the image");
        image.set_len(DISK_BYTES / 2).expect("it is cut off");
        let (lost, last) = (DISK_BYTES / 2, DISK_BYTES - BLOCK as u64);
        assert!(
            !is_read_first || client.read(lost, BLOCK).is_err(),
            "a read behind the end"
        );
        assert!(
            client.write(last, &block(last, 1)).is_err(),
            "a write behind the end"
        );
        // Somebody may make it longer, too.
        image.set_len(DISK_BYTES).expect("it is longer again");
        assert!(client.read(lost, BLOCK).is_err(), "what was lost");
        assert!(client.read(0, BLOCK).expect("what is left") == [7; BLOCK]);
        client
            .write(0, &block(0, 1))
            .expect("a write where nothing is lost");
        assert_eq!(state(), "truncated");
        let said = daemon.said();
        assert_eq!(
            said.matches("is truncated: it ends at 524288").count(),
            1,
            "{said}"
        );
        assert!(!said.contains("succeed again"), "{said}");
        daemon.stop();
    }
    let daemon = Daemon::serve(&scratch, &[&disk]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm").expect("it is served");
    assert!(client.read(DISK_BYTES / 2, BLOCK).is_ok(), "it is opened again");
    daemon.stop();
}

#[test]
fn image_that_is_cut_off_between_two_writes_never_reads_as_zeroes() {
    let scratch = Scratch::new();
    std::fs::write(scratch.path("vm.raw"), vec![7; DISK_BYTES as usize]).expect("an image");
    let disk = format!("name=vm,file={}", scratch.word("vm.raw"));
    let daemon = Daemon::serve(&scratch, &[&disk]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm").expect("it is served");
    let image = std::fs::OpenOptions::new()
        .write(true)
        .open(scratch.path("vm.raw"));
    let image = image.expect("the image");
    client.write(0, &block(0, 1)).expect("a write");
    // The next write comes before anybody looks.
    image.set_len(DISK_BYTES / 2).expect("it is cut off");
    let behind = DISK_BYTES / 2 + (64 << 10);
    let written = client.write(behind, &block(behind, 1));
    let read = client.read(DISK_BYTES / 2, BLOCK);
    assert!(written.is_err(), "a write behind the end");
    assert!(
        read.is_err(),
        "what was lost reads as {:?}",
        read.map(|data| data[0])
    );
    let said = daemon.said();
    assert_eq!(said.matches("nobody knows what is lost").count(), 1, "{said}");
    daemon.stop();
}

#[test]
fn image_that_is_missing_is_created_aloud() {
    let scratch = Scratch::new();
    let disk = format!("name=vm,file={},size=1M,create=on", scratch.word("vm.raw"));
    for is_new in [true, false] {
        let daemon = Daemon::serve(&scratch, &[&disk]);
        let said = daemon.said();
        assert_eq!(
            said.contains("WARN file") && said.contains("is created empty"),
            is_new,
            "{said}"
        );
        daemon.stop();
    }
}

const DISK_BYTES: u64 = 1 << 20;
const SET_BACKEND_REQ_FD: u32 = 21;
const GET_STATUS: u32 = 40;
const LONG: Duration = Duration::from_secs(20);
