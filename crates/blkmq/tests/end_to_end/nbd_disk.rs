//! Tests whether disks on real NBD servers support every operation, and survive a server's death: nbdkit,
//! QEMU's and our own as servers below, QEMU's and libnbd's tools and fio as clients above.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::daemon::program;
use crate::common::nbd::Client;
use crate::common::tools::{installed, output_within, run};
use crate::common::{Daemon, Scratch, pattern};

/// Listens at a path, and passes each connection on to another one after a while.
fn slow_way(at: &Path, to: &Path, pause: Duration) {
    let listener = UnixListener::bind(at).expect("a socket can be bound");
    let to = to.to_owned();
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let to = to.clone();
            std::thread::spawn(move || {
                std::thread::sleep(pause);
                let server = UnixStream::connect(to).expect("it is served");
                let (mut one, mut other) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || std::io::copy(&mut one, &mut other));
                let (mut server, mut client) = (server, client);
                let _ = std::io::copy(&mut server, &mut client);
            });
        }
    });
}

#[test]
fn disks_at_other_hosts_are_opened_side_by_side() {
    let (scratch, near) = (Scratch::new(), Scratch::new());
    let daemon = Daemon::serve(&scratch, &["name=vm1,ram=1M"]);
    let slow = scratch.path("slow.sock");
    let pause = Duration::from_millis(500);
    slow_way(&slow, &scratch.path("nbd.sock"), pause);
    let disk = |number: u32| {
        let slow = slow.display();
        format!("name=d{number},nbd=nbd+unix:///vm1?socket={slow},connections=1")
    };
    let disks: Vec<String> = (0..DISKS).map(disk).collect();
    let disks: Vec<&str> = disks.iter().map(String::as_str).collect();
    let start = Instant::now();
    let above = Daemon::serve(&near, &disks);
    let taken = start.elapsed();
    assert!(
        taken < pause * DISKS / 2,
        "{DISKS} disks were opened in {taken:?}"
    );
    let client = Client::connect(&near.path("nbd.sock"), "d7").expect("it is served");
    assert_eq!(client.size(), 1 << 20);
    drop(client);
    above.stop();
    daemon.stop();
}

#[test]
fn disks_at_other_hosts_are_added_side_by_side() {
    let (scratch, near) = (Scratch::new(), Scratch::new());
    let daemon = Daemon::serve(&scratch, &["name=vm1,ram=1M"]);
    let (slow, pause) = (scratch.path("slow.sock"), Duration::from_millis(500));
    slow_way(&slow, &scratch.path("nbd.sock"), pause);
    let [nbd, control] = ["nbd.sock", "control.sock"].map(|name| format!("unix:{}", near.word(name)));
    let words = ["--disk", "name=own,ram=1M", "--nbd", &nbd, "--control", &control];
    let above = Daemon::start(&words);
    let ctl = |words: &[&str]| {
        let mut command = Command::new(program());
        command.args(["ctl", "--socket", &control]).args(words);
        let output = command.output().expect("the command runs");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("it prints text")
    };
    let uri = format!("nbd+unix:///vm1?socket={}", slow.display());
    let disk = |number| format!("[disk.d{number}]\nnbd = \"{uri}\"\nconnections = 1\n");
    let more: String = (0..DISKS).map(disk).collect();
    let file = near.word("more.toml");
    std::fs::write(&file, format!("{}\n{more}", ctl(&["dump"]))).expect("it can be written");
    let start = Instant::now();
    let said = ctl(&["apply", &file]);
    let taken = start.elapsed();
    assert_eq!(said.lines().count(), DISKS as usize, "{said}");
    assert!(taken < pause * DISKS / 2, "{DISKS} disks were added in {taken:?}");
    above.stop();
    daemon.stop();
}

const DISKS: u32 = 8;

/// A server below; dropping it kills it.
pub(crate) struct Below(Child);

impl Below {
    /// Starts a server that listens at `socket` and waits until it answers.
    fn start(command: &mut Command, socket: &Path) -> Below {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let below = Below(child.spawn().expect("it is installed"));
        let end = Instant::now() + Duration::from_secs(20);
        while std::os::unix::net::UnixStream::connect(socket).is_err() {
            assert!(Instant::now() < end, "{command:?} does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        below
    }

    /// nbdkit with these arguments.
    pub(crate) fn nbdkit(scratch: &Scratch, words: &[&str]) -> Below {
        let socket = scratch.path("below.sock");
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new("nbdkit");
        command
            .args(["--foreground", "--exit-with-parent", "-U"])
            .arg(&socket)
            .args(words);
        Below::start(&mut command, &socket)
    }

    /// qemu-nbd on an image, for several clients.
    fn qemu_nbd(scratch: &Scratch, image: &str, words: &[&str]) -> Below {
        let socket = scratch.path("below.sock");
        let mut command = Command::new("qemu-nbd");
        command
            .args(["-f", "raw", "--persistent", "-k"])
            .arg(&socket)
            .args(words)
            .arg(image);
        Below::start(&mut command, &socket)
    }

    fn qemu_storage_daemon(scratch: &Scratch, image: &str) -> Below {
        let socket = scratch.word("below.sock");
        let mut command = Command::new("qemu-storage-daemon");
        command
            .args([
                "--blockdev",
                &format!("driver=file,node-name=n,filename={image},discard=unmap"),
            ])
            .args(["--nbd-server", &format!("addr.type=unix,addr.path={socket}")])
            .args(["--export", "type=nbd,id=e,node-name=n,name=,writable=on"]);
        Below::start(&mut command, Path::new(&socket))
    }
}

impl Drop for Below {
    fn drop(&mut self) {
        // Both fail if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Serves a disk `x` on the server below, with these keys.
fn above(scratch: &Scratch, keys: &str) -> Daemon {
    let disk = format!(
        "name=x,nbd=nbd+unix:///?socket={}{keys}",
        scratch.word("below.sock")
    );
    Daemon::serve(scratch, &[&disk])
}

/// Every operation, checked by QEMU.
pub(crate) fn do_everything(uri: &str) {
    let commands = [
        "write -P 0x11 0 2M",
        "write -P 0x22 512 1536",
        "write -P 0x33 65024 70144",
        "read -P 0x22 512 1536",
        "read -P 0x11 2048 62976",
        "read -P 0x33 65024 70144",
        "write -f -P 0x44 2M 64k",
        "flush",
        "read -P 0x44 2M 64k",
        "write -z 256k 64k",
        "read -P 0 256k 64k",
        "write -z -u 2M 32k",
        "read -P 0 2M 32k",
        "discard 4M 4M",
        "write -P 0x55 5M 4k",
        "read -P 0x55 5M 4k",
        "aio_write -P 0x66 8M 1M",
        "aio_write -P 0x77 9M 1M",
        "aio_write -z 10M 1M",
        "aio_flush",
        "read -P 0x66 8M 1M",
        "read -P 0x77 9M 1M",
        "read -P 0 10M 1M",
        "write -P 0x88 16776704 512",
        "read -P 0x88 16776704 512",
    ];
    let mut words = vec!["-f", "raw"];
    commands.iter().for_each(|command| words.extend(["-c", command]));
    words.push(uri);
    let said = run("qemu-io", &words).stdout;
    for bad in ["failed", "error", "Input/output", "Invalid"] {
        assert!(!said.contains(bad), "qemu-io said:\n{said}");
    }
}

/// Copies an image there and back again.
pub(crate) fn copy_both_ways(scratch: &Scratch, uri: &str) {
    let original = scratch.noisy_image("original.raw", 16 << 20, 5);
    run("nbdcopy", &["--connections=4", &original, uri]);
    let back = scratch.word("back.raw");
    run("nbdcopy", &["--connections=4", uri, &back]);
    assert!(
        std::fs::read(&original).unwrap() == std::fs::read(&back).unwrap(),
        "the copy differs"
    );
}

fn check(scratch: &Scratch, daemon: Daemon) {
    let uri = daemon.uri("x");
    do_everything(&uri);
    copy_both_ways(scratch, &uri);
    daemon.stop();
}

#[test]
fn disk_on_nbdkit_does_everything() {
    if !installed(&["nbdkit", "qemu-io", "nbdcopy"]) {
        return;
    }
    for (words, keys) in [
        (&["memory", "16M"][..], ",connections=3"),
        (&["--no-sr", "memory", "16M"], ",connections=1"),
        (&["-t", "1", "--filter=nofilter", "memory", "16M"], ""),
        (
            &[
                "--filter=blocksize-policy",
                "memory",
                "16M",
                "blocksize-maximum=64K",
                "blocksize-error-policy=error",
            ],
            "",
        ),
        (
            &["--filter=delay", "memory", "16M", "rdelay=2ms", "wdelay=2ms"],
            ",reconnect=5,timeout=20",
        ),
        (&["--filter=nozero", "--no-sr", "memory", "16M"], ""),
    ] {
        let scratch = Scratch::new();
        let _below = Below::nbdkit(&scratch, words);
        check(&scratch, above(&scratch, keys));
    }
}

#[test]
fn disk_on_qemus_servers_does_everything() {
    if !installed(&["qemu-nbd", "qemu-storage-daemon", "qemu-io", "nbdcopy"]) {
        return;
    }
    for (words, keys) in [
        (&[][..], ",connections=2"),
        (&["--shared=8", "--discard=unmap"], ",connections=2"),
    ] {
        let scratch = Scratch::new();
        let image = scratch.image("below.raw", 16 << 20);
        let _below = Below::qemu_nbd(&scratch, &image, words);
        let daemon = above(&scratch, keys);
        let is_alone = daemon.said().contains("connections=2 is not possible");
        assert_eq!(is_alone, words.is_empty(), "{}", daemon.said());
        check(&scratch, daemon);
    }
    let scratch = Scratch::new();
    let image = scratch.image("below.raw", 16 << 20);
    let _below = Below::qemu_storage_daemon(&scratch, &image);
    check(&scratch, above(&scratch, ""));
}

#[test]
fn disk_on_our_own_server_does_everything() {
    if !installed(&["qemu-io", "nbdcopy"]) {
        return;
    }
    let scratch = Scratch::new();
    let address = format!("unix:{}", scratch.word("below.sock"));
    let below = Daemon::start(&["--disk", "name=a,ram=16M", "--nbd", &address]);
    let disk = format!(
        "name=x,nbd=nbd+unix:///a?socket={},connections=4",
        scratch.word("below.sock")
    );
    check(&scratch, Daemon::serve(&scratch, &[&disk]));
    below.stop();
}

#[test]
fn errors_below_are_errors_above_and_nothing_else_is() {
    if !installed(&["nbdkit"]) {
        return;
    }
    let scratch = Scratch::new();
    let trigger = scratch.word("fail");
    let file = format!("error-pread-file={trigger}");
    let _below = Below::nbdkit(
        &scratch,
        &[
            "--filter=error",
            "memory",
            "16M",
            "error-pread=EIO",
            "error-pread-rate=100%",
            &file,
        ],
    );
    let daemon = above(&scratch, ",reconnect=5");
    let mut client = Client::connect(&scratch.path("nbd.sock"), "x").unwrap();
    client.write(4096, &pattern::block(1, 1)).unwrap();
    std::fs::write(&trigger, "").unwrap();
    let error = client.read(4096, 4096).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5), "{error}");
    std::fs::remove_file(&trigger).unwrap();
    assert_eq!(client.read(4096, 4096).unwrap(), pattern::block(1, 1));
    assert!(!daemon.said().contains("connection lost"), "{}", daemon.said());
    daemon.stop();
}

#[test]
fn server_that_dies_under_load_is_waited_for_and_nothing_is_lost() {
    if !installed(&["nbdkit", "fio"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.image("below.raw", 64 << 20);
    let words = ["file", image.as_str()];
    let mut below = Below::nbdkit(&scratch, &words);
    let daemon = above(&scratch, ",connections=2,reconnect=30");
    let uri = daemon.uri("x");
    let fio = std::thread::spawn(move || {
        let mut command = Command::new("fio");
        command.args([
            "--name=x",
            "--ioengine=nbd",
            &format!("--uri={uri}"),
            "--rw=randwrite",
            "--bs=4k",
        ]);
        command.args([
            "--iodepth=32",
            "--size=64M",
            "--io_size=192M",
            "--verify=crc32c",
            "--fsync=64",
        ]);
        command.args([
            "--verify_fatal=1",
            "--verify_state_save=0",
            "--rate=48M",
            "--randseed=7",
        ]);
        output_within(&mut command, Duration::from_secs(90))
    });
    let mut kills = 0;
    while !fio.is_finished() {
        std::thread::sleep(Duration::from_millis(700));
        drop(below);
        kills += 1;
        std::thread::sleep(Duration::from_millis(50));
        below = Below::nbdkit(&scratch, &words);
    }
    let output = fio.join().unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && kills >= 3,
        "{kills} kills; fio said:\n{said}"
    );
    assert!(daemon.says("connected again"), "{}", daemon.said());
    daemon.stop();
}

#[test]
fn without_reconnect_a_dead_server_is_an_error_at_once_until_it_is_back() {
    if !installed(&["nbdkit"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.image("below.raw", 1 << 20);
    let words = ["file", image.as_str()];
    let below = Below::nbdkit(&scratch, &words);
    let daemon = above(&scratch, "");
    let mut client = Client::connect(&scratch.path("nbd.sock"), "x").unwrap();
    client.write(0, &pattern::block(0, 1)).unwrap();
    drop(below);
    for _ in 0..10 {
        let start = Instant::now();
        let error = client.read(0, 4096).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(5), "{error}");
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    }
    let _below = Below::nbdkit(&scratch, &words);
    let end = Instant::now() + Duration::from_secs(20);
    while client.read(0, 4096).is_err() {
        assert!(Instant::now() < end, "not connected again: {}", daemon.said());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(client.read(0, 4096).unwrap(), pattern::block(0, 1));
    daemon.stop();
}

#[test]
fn daemon_ends_promptly_while_it_tries_to_connect_again() {
    if !installed(&["nbdkit"]) {
        return;
    }
    let scratch = Scratch::new();
    let below = Below::nbdkit(&scratch, &["memory", "1M"]);
    let daemon = above(&scratch, "");
    drop(below);
    std::thread::sleep(Duration::from_millis(500));
    let start = Instant::now();
    daemon.stop();
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}
