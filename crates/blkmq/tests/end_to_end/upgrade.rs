//! Tests whether clients continue when another daemon takes over: under load that checks every byte, in the
//! middle of a negotiation, of a write, of a reply. Also that the running daemon continues if the other one
//! cannot take over, or ends at any step.
//!
//! `BLKMQ_UPGRADES=100 cargo test -p blkmq --release --test end_to_end upgrade::` is the long form.

mod both_doors;
mod caps;
mod clients;
mod forgets;
mod images;
pub(crate) mod load;
pub(crate) mod refusals;
mod sources;

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use self::load::Load;
use crate::common::daemon::{program, serve_command, wait_within};
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::{installed, try_run};
use crate::common::{Daemon, Scratch};

/// A daemon that can be upgraded, with one disk in a file, and the arguments of its successors.
pub(crate) struct Stage {
    pub(crate) scratch: Scratch,
    words: Vec<String>,
}

impl Stage {
    fn new() -> Stage {
        let scratch = Scratch::new();
        let image = scratch.image("vm1.raw", DISK_BYTES);
        let disk = format!("name=vm1,file={image}");
        Stage::of(scratch, &[&disk])
    }

    pub(crate) fn of(scratch: Scratch, disks: &[&str]) -> Stage {
        let mut words: Vec<String> = Vec::new();
        for disk in disks {
            words.extend(["--disk".to_owned(), (*disk).to_owned()]);
        }
        words.extend(["--nbd".to_owned(), format!("unix:{}", scratch.word("nbd.sock"))]);
        Stage { scratch, words }
    }

    pub(crate) fn socket(&self) -> std::path::PathBuf {
        self.scratch.path("nbd.sock")
    }

    fn upgrade_path(&self) -> std::path::PathBuf {
        self.scratch.path("up.sock")
    }

    fn words(&self, last: &str) -> Vec<String> {
        let address = format!("unix:{}", self.scratch.word("up.sock"));
        let mut words = self.words.clone();
        words.extend([last.to_owned(), address]);
        words
    }

    /// Starts the first daemon.
    pub(crate) fn start(&self) -> Daemon {
        let words = self.words("--upgrade-socket");
        Daemon::start(&words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Has another daemon take over; the previous one has ended with success when this returns.
    pub(crate) fn upgrade(&self, mut old: Daemon) -> Daemon {
        let words = self.words("--take-over");
        let new = Daemon::start(&words.iter().map(String::as_str).collect::<Vec<_>>());
        let status = old.ended_within(END_TIME);
        assert!(
            status.success(),
            "the one before ended with {status}:\n{}",
            old.said()
        );
        new
    }

    /// Runs a daemon that must fail to take over, and returns its output.
    fn fail_to_upgrade(&self, words: &[String]) -> String {
        let mut command = serve_command(&words.iter().map(String::as_str).collect::<Vec<_>>());
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the command runs");
        let Some(status) = wait_within(&mut child, END_TIME) else {
            let _ = child.kill();
            panic!("it took over");
        };
        assert!(!status.success(), "it took over");
        let mut said = String::new();
        let mut stderr = child.stderr.take().expect("it is piped");
        stderr.read_to_string(&mut said).expect("it has ended");
        said
    }
}

#[test]
fn clients_under_load_go_on_over_upgrades_without_an_error_or_a_reconnect() {
    let stage = Stage::new();
    let mut daemon = stage.start();
    let load = Load::start(&stage.socket(), "vm1", CLIENTS);
    std::thread::sleep(Duration::from_millis(200));
    let upgrades = upgrades();
    let mut pauses = Vec::new();
    for _ in 0..upgrades {
        load.forget_slowest();
        daemon = stage.upgrade(daemon);
        std::thread::sleep(Duration::from_millis(30));
        pauses.push(load.slowest());
    }
    let done = load.stop();
    pauses.sort_unstable();
    eprintln!(
        "{upgrades} upgrades beside {done} requests; the slowest request of each: median {:?}, worst {:?}",
        pauses[pauses.len() / 2],
        pauses[pauses.len() - 1]
    );
    daemon.stop();
    assert!(
        !stage.socket().exists() && !stage.upgrade_path().exists(),
        "sockets stay behind"
    );
}

#[test]
fn fio_verifies_over_upgrades() {
    if !installed(&["fio"]) {
        return;
    }
    let stage = Stage::new();
    let mut daemon = stage.start();
    let uri = daemon.uri("vm1");
    let words = [
        "--name=upgrade",
        "--ioengine=nbd",
        "--rw=randwrite",
        "--bsrange=4k-256k",
        "--iodepth=32",
        "--numjobs=2",
        "--size=16m",
        "--offset_increment=16m",
        "--fsync=32",
        "--verify=crc32c",
        "--verify_state_save=0",
        "--verify_fatal=1",
        "--loops=100",
        "--time_based",
        "--runtime=6",
    ];
    let mut words: Vec<String> = words.map(str::to_owned).into();
    words.push(format!("--uri={uri}"));
    let fio = std::thread::spawn(move || try_run("fio", &words));
    let start = Instant::now();
    let mut upgrades = 0;
    while start.elapsed() < Duration::from_secs(6) {
        std::thread::sleep(Duration::from_millis(300));
        daemon = stage.upgrade(daemon);
        upgrades += 1;
    }
    let said = fio.join().expect("fio runs");
    assert!(
        said.success,
        "fio failed after {upgrades} upgrades:\n{}\n{}",
        said.stdout, said.stderr
    );
    assert!(upgrades > 3, "only {upgrades} upgrades: no test");
    daemon.stop();
}

#[test]
fn daemon_that_was_taken_over_leaves_lock_sockets_and_statistics_to_the_other() {
    let stage = Stage::new();
    let daemon = stage.start();
    let mut client = Client::connect(&stage.socket(), "vm1").expect("it is served");
    client.write(0, &block(0, 1)).expect("a write");
    let daemon = stage.upgrade(daemon);
    assert!(client.read(0, BLOCK).expect("a read") == block(0, 1));
    let mut newcomer = Client::connect(&stage.socket(), "vm1").expect("new clients are served");
    assert!(newcomer.read(0, BLOCK).expect("a read") == block(0, 1));
    // A third daemon may not write the same file, although the lock's first owner has ended.
    let image = stage.scratch.word("vm1.raw");
    let disk = format!("name=vm1,file={image}");
    let elsewhere = format!("unix:{}", stage.scratch.word("other.sock"));
    let words = ["--disk", &disk, "--nbd", &elsewhere].map(str::to_owned);
    let start = Instant::now();
    let said = stage.fail_to_upgrade(&words);
    let holder = format!("in use by blkmq (process {})", daemon.id());
    assert!(said.contains(&holder), "{said}");
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    let daemon = stage.upgrade(stage.upgrade(daemon));
    daemon.signal(Signal::USR1);
    let mut daemon = daemon;
    let counted = daemon.wait_for(END_TIME, |line| {
        line.contains("/vm1 io_serviced: read 2, write 1,")
    });
    assert!(counted, "its groups begin anew:\n{}", daemon.said());
    client.write(0, &block(0, 2)).expect("a write");
    client.flush().expect("a flush");
    assert!(newcomer.read(0, BLOCK).expect("a read") == block(0, 2));
    daemon.stop();
}

#[test]
fn lock_of_a_disk_that_the_other_daemon_does_not_have_ends_with_the_upgrade() {
    let mut stage = Stage::new();
    let other = stage.scratch.image("vm2.raw", DISK_BYTES);
    let disk = ["--disk".to_owned(), format!("name=vm2,file={other}")];
    let kept = std::mem::take(&mut stage.words);
    stage.words = [&kept[..], &disk].concat();
    let daemon = stage.start();
    stage.words = kept;
    let daemon = stage.upgrade(daemon);
    let elsewhere = format!("unix:{}", stage.scratch.word("other.sock"));
    Daemon::start(&["--disk", &disk[1], "--nbd", &elsewhere]).stop();
    daemon.stop();
}

#[test]
fn sockets_of_systemd_are_handed_over_and_stay() {
    let stage = Stage::new();
    let socket = stage.scratch.path("handed.sock");
    let unix = UnixListener::bind(&socket).expect("a socket can be bound");
    let tcp = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let at = tcp.local_addr().expect("it is bound");
    let mut words = stage.words("--upgrade-socket");
    words[3] = "systemd".to_owned();
    // Like systemd: the sockets are descriptors 3 and 4, and the variables name the process that
    // may take them.
    let script = "exec 3<&0 4<&1 >&2 </dev/null; LISTEN_FDS=2 LISTEN_PID=$$ exec \"$0\" serve \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(program()).args(&words);
    command.stdin(OwnedFd::from(unix)).stdout(OwnedFd::from(tcp));
    let mut old = command.spawn().expect("the command runs");
    let start = Instant::now();
    let mut client = loop {
        match Client::connect(&socket, "vm1") {
            Ok(client) => break client,
            Err(error) => assert!(start.elapsed() < END_TIME, "{error}"),
        }
    };
    let mut next = words.clone();
    next[4] = "--take-over".to_owned();
    let next: Vec<&str> = next.iter().map(String::as_str).collect();
    let daemon = Daemon::start(&next);
    assert!(old.wait().expect("our own child").success());
    client.write(0, &block(0, 1)).expect("a write");
    TcpStream::connect(at).expect("the port is served, too");
    daemon.stop();
    assert!(socket.exists(), "the socket is systemd's: it must stay");
}

#[test]
fn daemon_that_is_told_to_end_while_another_one_prepares_ends() {
    let stage = Stage::new();
    let mut daemon = stage.start();
    let _channel = refusals::greeted(&stage.upgrade_path());
    daemon.signal(Signal::TERM);
    let status = daemon.ended_within(END_TIME);
    assert!(status.success(), "{status}");
    assert!(!stage.socket().exists());
}

#[test]
fn service_manager_knows_the_main_process_and_reload_ends_when_it_serves() {
    let stage = Stage::new();
    let mut daemon = stage.start();
    let mut client = Client::connect(&stage.socket(), "vm1").expect("it is served");
    let told = UnixDatagram::bind(stage.scratch.path("notify")).expect("a socket can be bound");
    told.set_read_timeout(Some(END_TIME)).expect("a time limit");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../contrib/blkmq-take-over");
    let reload = |words: &[String]| {
        let mut command = Command::new(script);
        command.arg(program()).arg("serve").args(words);
        command
            .env("NOTIFY_SOCKET", stage.scratch.path("notify"))
            .stdin(Stdio::null());
        command.stderr(Stdio::null()).output().expect("the script runs")
    };
    let mut wrong = stage.words("--take-over");
    wrong[1] = format!("name=vm2,file={}", stage.scratch.word("vm1.raw"));
    assert!(!reload(&wrong).status.success(), "it says that it has taken over");
    assert!(daemon.is_running());
    let reloaded = reload(&stage.words("--take-over"));
    assert!(reloaded.status.success(), "{reloaded:?}");
    assert!(daemon.ended_within(END_TIME).success());
    let mut message = [0; 64];
    let bytes = told.recv(&mut message).expect("it is told");
    let message = std::str::from_utf8(&message[..bytes]).expect("words");
    let main = message.strip_prefix("READY=1\nMAINPID=").expect("both words");
    let main: i32 = main.trim_end().parse().expect("a process");
    client.write(0, &block(0, 1)).expect("a write");
    let mut message = [0; 64];
    let bytes = told.recv(&mut message).expect("it is told");
    assert_eq!(&message[..bytes], b"WATCHDOG=1\n", "all reactors answer");
    // It is no child of this process, so its sockets show when it ends.
    let main = Pid::from_raw(main).expect("a process");
    kill_process(main, Signal::TERM).expect("it runs");
    let start = Instant::now();
    while stage.upgrade_path().exists() {
        assert!(start.elapsed() < END_TIME, "it does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// How many upgrades there are under load.
pub(crate) fn upgrades() -> usize {
    let wanted = std::env::var("BLKMQ_UPGRADES").ok();
    wanted.map_or(10, |count| count.parse().expect("BLKMQ_UPGRADES is a number"))
}

fn read_back(socket: &Path, number: u64, generation: u64) {
    let mut client = Client::connect(socket, "vm1").expect("the disk is served");
    let found = client.read(number * BLOCK as u64, BLOCK).expect("a read");
    assert!(
        found == block(number, generation),
        "block {number} is not what was written"
    );
}

const DISK_BYTES: u64 = 64 << 20;
const CLIENTS: u64 = 4;
const END_TIME: Duration = Duration::from_secs(20);
