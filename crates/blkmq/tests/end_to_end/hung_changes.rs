//! A change that waits for a file whose filesystem does not answer holds up neither other changes
//! nor an upgrade nor the end of the daemon.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Stdio;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blkmq::control::client::Client as Control;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::common::daemon::{serve_command, wait_within};
use crate::common::nbd::{Client as Nbd, Command};
use crate::common::{Daemon, Scratch};
use crate::fuse;

/// A daemon to be changed, and a file whose filesystem does not answer.
pub(crate) struct Stage {
    pub(crate) scratch: Scratch,
    pub(crate) silent: fuse::Stage,
    pub(crate) words: Vec<String>,
}

impl Stage {
    /// Makes them; none, with a message, if nothing can be mounted. The file answers until
    /// [`Self::fall_silent`].
    pub(crate) fn new(disk: &str) -> Option<Self> {
        let silent = fuse::Stage::on(Scratch::new(), "name=vm1,ram=1M")?;
        let scratch = Scratch::new();
        let image = scratch.image("a.raw", 1 << 20);
        let disk = match disk {
            "" => format!("name=a,file={image}"),
            name => format!("name={name},file={}", silent.word()),
        };
        let at = |name: &str| format!("unix:{}", scratch.word(name));
        let words = [
            "--disk",
            &disk,
            "--disk",
            "name=r,ram=1M",
            "--nbd",
            &at("nbd.sock"),
            "--control",
            &at("control.sock"),
        ];
        let words = words.map(str::to_owned).into();
        Some(Self {
            scratch,
            silent,
            words,
        })
    }

    fn words(&self, last: &str) -> Vec<String> {
        let mut words = self.words.clone();
        words.extend([last.to_owned(), format!("unix:{}", self.scratch.word("up.sock"))]);
        words
    }

    fn start(&self, last: &str) -> Daemon {
        let words = self.words(last);
        Daemon::start(&words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    pub(crate) fn fall_silent(&self) {
        self.silent.pause();
    }

    pub(crate) fn control(&self) -> Control {
        Control::connect(&self.scratch.path("control.sock")).expect("it is served")
    }

    /// Begins a change that hangs.
    fn hang(&self, method: &'static str, params: Value) -> JoinHandle<()> {
        let mut control = self.control();
        let hung = std::thread::spawn(move || {
            let _ = control.call(method, &params);
        });
        std::thread::sleep(Duration::from_millis(300));
        assert!(!hung.is_finished(), "the change does not hang: no test");
        hung
    }

    fn hang_at_an_open(&self) -> JoinHandle<()> {
        let keys = json!({"file": self.silent.word()});
        self.hang(
            "config.add",
            json!({"kind": "disk", "name": "hung", "keys": keys}),
        )
    }
}

#[test]
fn change_that_hangs_at_an_open_holds_up_neither_others_nor_the_end() {
    let Some(stage) = Stage::new("") else { return };
    let mut daemon = stage.start("--upgrade-socket");
    stage.fall_silent();
    let _hung = stage.hang_at_an_open();
    let keys = json!({"ram": "1M"});
    let added = stage
        .control()
        .call("config.add", &json!({"kind": "disk", "name": "b", "keys": keys}));
    added.expect("another change is made meanwhile");
    daemon.signal(Signal::TERM);
    let status = daemon.ended_within(LIMIT);
    assert!(status.success(), "{status}: {}", daemon.said());
}

fn nbd(socket: &Path, disk: &str) -> Nbd {
    Nbd::connect(socket, disk).expect("the daemon serves it")
}

#[test]
fn change_of_scheduler_beside_a_read_that_hangs_holds_others_up_for_moments() {
    let Some(stage) = Stage::new("hung,queue=q") else {
        return;
    };
    let mut words = stage.words.clone();
    let other = format!("name=ok,file={},queue=q", stage.scratch.word("a.raw"));
    words.extend(["--disk".to_owned(), other]);
    let daemon = Daemon::start(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let socket = stage.scratch.path("nbd.sock");
    let (mut hung, mut ok) = (nbd(&socket, "hung"), nbd(&socket, "ok"));
    stage.fall_silent();
    hung.send(Command::Read, 0, 0, 4096, &[]).expect("it is taken");
    let mut control = stage.control();
    wait_until_in_flight(&mut control, "q");
    let keys = json!({"kind": "queue", "name": "q", "keys": {"sched": "kyber"}});
    let change = std::thread::spawn(move || control.call("config.set", &keys));
    let (begun, mut longest, mut reads) = (Instant::now(), Duration::ZERO, 0);
    while begun.elapsed() < Duration::from_secs(3) {
        let sent = Instant::now();
        ok.read(0, 4096).expect("nothing is wrong with it");
        (longest, reads) = (longest.max(sent.elapsed()), reads + 1);
    }
    assert!(!change.is_finished(), "nothing hung: no test");
    // Frozen for 50, 100, 200 and 400 ms meanwhile.
    assert!(longest < Duration::from_secs(2), "a read took {longest:?}");
    assert!(reads >= 50, "{reads} reads in 3 s");
    stage.silent.go_on();
    let changed = change.join().expect("no panic");
    changed.expect("the queue is changed when the read has ended");
    drop(hung);
    daemon.stop();
}

/// A daemon with a read that hangs on the queue `q`, below this scheduler.
fn beside_a_read_that_hangs(stage: &Stage, sched: &str) -> (Daemon, Nbd, Control) {
    let mut words = stage.words.clone();
    let other = format!(
        "name=ok,file={},queue=q,sched={sched}",
        stage.scratch.word("a.raw")
    );
    words.extend(["--disk".to_owned(), other]);
    let daemon = Daemon::start(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let mut hung = nbd(&stage.scratch.path("nbd.sock"), "hung");
    stage.fall_silent();
    hung.send(Command::Read, 0, 0, 4096, &[]).expect("it is taken");
    let mut control = stage.control();
    wait_until_in_flight(&mut control, "q");
    (daemon, hung, control)
}

#[test]
fn change_that_cannot_be_right_is_refused_before_a_queue_is_frozen() {
    let Some(stage) = Stage::new("hung,queue=q") else {
        return;
    };
    let (daemon, hung, mut control) = beside_a_read_that_hangs(&stage, "bfq");
    let before = control.call("queue.list", &json!({})).expect("a list");
    let kyber = json!({"sched": "kyber"});
    let both = |more: Value| {
        let mut keys = kyber.clone();
        let keys_of = keys.as_object_mut().expect("an object");
        keys_of.extend(more.as_object().expect("an object").clone());
        keys
    };
    for (kind, name, keys, reason) in [
        (
            "queue",
            "q",
            json!({"tunables": {"slice_idel": 0}}),
            "queue q: bfq has no tunable slice_idel",
        ),
        (
            "queue",
            "q",
            json!({"tunables": {"slice_idle": 0, "low_latency": 2}}),
            "queue q: low_latency 2 rejected: must be from 0 to 1",
        ),
        ("queue", "q", json!({"depth": 100_000}), "depth 100000 rejected"),
        ("disk", "ok", json!({"sched": "cfq"}), "must be one of none"),
        (
            "disk",
            "ok",
            json!({"sched": "kyber", "block_size": 4096}),
            "block_size",
        ),
        ("group", "/ok", json!({"weight": 0}), "weight=0 rejected"),
        ("group", "/ok", json!({"iops": 0}), "iops"),
    ] {
        let begun = Instant::now();
        let params = json!({"kind": kind, "name": name, "keys": keys});
        let said = control
            .call("config.set", &params)
            .expect_err("it cannot be right");
        let said = format!("{said:#}");
        assert!(said.contains(reason), "{params}: {said}");
        // A freeze takes 30 s beside what hangs.
        assert!(begun.elapsed() < SOON, "{params}: {:?}", begun.elapsed());
    }
    for keys in [
        both(json!({"tunables": {"read_lat_nsec": 1}})),
        both(json!({"tunables": {"slice_idle": 0}})),
        both(json!({"depth": 100_000})),
        both(json!({"io_poll_delay": -2})),
    ] {
        // Of its disk alone the scheduler is named.
        let toml = control.call("config.get", &json!({})).expect("the configuration");
        let toml = toml["toml"]
            .as_str()
            .expect("a text")
            .replace("sched = \"bfq\"\n", "");
        let table = |keys: &Value| {
            let lines = keys.as_object().expect("an object").iter().map(|(key, value)| {
                let value = value.to_string().replace("\":", "\" = ");
                format!("{key} = {value}\n")
            });
            format!("[queue.q]\n{}", lines.collect::<String>())
        };
        let begun = Instant::now();
        let applied = control.call("config.apply", &json!({"toml": toml + &table(&keys)}));
        let said = format!("{:#}", applied.expect_err("it cannot be right"));
        assert!(
            said.contains("rejected") || said.contains("no tunable"),
            "{keys}: {said}"
        );
        assert!(begun.elapsed() < SOON, "{keys}: {:?}: {said}", begun.elapsed());
    }
    let after = control.call("queue.list", &json!({})).expect("a list");
    assert_eq!(after, before, "nothing has changed");
    stage.silent.go_on();
    drop(hung);
    daemon.stop();
}

#[test]
fn tunable_goes_back_to_its_default_beside_a_read_that_hangs() {
    let Some(stage) = Stage::new("hung,queue=q") else {
        return;
    };
    let (daemon, hung, mut control) = beside_a_read_that_hangs(&stage, "bfq");
    let mut set = |tunables: Value, expected: u64| {
        let begun = Instant::now();
        let params = json!({"kind": "queue", "name": "q", "keys": {"tunables": tunables}});
        control.call("config.set", &params).expect("it can be set");
        assert!(begun.elapsed() < SOON, "{params}: {:?}", begun.elapsed());
        let queues = control.call("queue.list", &json!({})).expect("a list");
        let mut queues = queues.as_array().expect("of queues").iter();
        let queue = queues.find(|queue| queue["name"] == "q").expect("it is there");
        assert_eq!(queue["tunables"]["slice_idle"], expected, "{params}");
    };
    set(json!({"slice_idle": 3, "low_latency": 1}), 3);
    set(json!({"low_latency": 1}), 8);
    set(json!({"slice_idle_us": 2000}), 2);
    set(Value::Null, 8);
    stage.silent.go_on();
    drop(hung);
    daemon.stop();
}

/// Waits until a request of a queue is out. What a client has sent may still be in its socket.
fn wait_until_in_flight(control: &mut Control, queue: &str) {
    let end = Instant::now() + LIMIT;
    loop {
        let queues = control.call("queue.list", &json!({})).expect("a list");
        let queues = queues.as_array().expect("of queues");
        let queue = queues.iter().find(|one| one["name"] == queue).expect("it exists");
        if queue["in_flight"].as_u64() > Some(0) {
            return;
        }
        assert!(
            Instant::now() < end,
            "nothing is in flight after {LIMIT:?}: {queue}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn change_that_hangs_at_an_open_does_not_prevent_an_upgrade() {
    let Some(stage) = Stage::new("") else { return };
    let mut daemon = stage.start("--upgrade-socket");
    stage.fall_silent();
    let _hung = stage.hang_at_an_open();
    let new = stage.start("--take-over");
    let status = daemon.ended_within(LIMIT);
    assert!(status.success(), "{status}: {}", daemon.said());
    new.stop();
}

#[test]
fn change_that_hangs_at_a_close_leaves_the_end_to_a_second_signal() {
    let Some(stage) = Stage::new("hung") else { return };
    let mut daemon = stage.start("--upgrade-socket");
    stage.fall_silent();
    let _hung = stage.hang("config.remove", json!({"kind": "disk", "name": "hung"}));
    daemon.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(500));
    daemon.signal(Signal::TERM);
    let status = daemon.ended_within(LIMIT);
    assert_eq!(status.code(), Some(128 + 15), "{status}: {}", daemon.said());
}

#[test]
fn end_of_the_daemon_does_not_wait_for_a_last_sync_that_hangs() {
    let Some(stage) = Stage::new("hung") else { return };
    let mut daemon = stage.start("--upgrade-socket");
    stage.fall_silent();
    let start = Instant::now();
    daemon.signal(Signal::TERM);
    let status = daemon.ended_within(SYNC_LIMIT);
    assert_eq!(status.code(), Some(1), "{status}: {}", daemon.said());
    let (took, said) = (start.elapsed(), daemon.said());
    assert!(took > Duration::from_secs(25), "{took:?}");
    assert!(said.contains("disk hung: file"), "{said}");
    assert!(said.contains("its sync has not ended after 30s"), "{said}");
}

#[test]
fn start_that_hangs_at_an_open_is_ended_by_a_second_signal() {
    let Some(stage) = Stage::new("hung") else { return };
    stage.fall_silent();
    let words = stage.words("--upgrade-socket");
    let mut command = serve_command(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let started = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut child = started.expect("the command runs");
    let pid = Pid::from_raw(child.id() as i32).expect("a child has an id");
    // A first one that comes before signals are handled ends it, too; on a busy machine two can come as one.
    let end = Instant::now() + LIMIT;
    let ended = loop {
        if let Some(status) = wait_within(&mut child, Duration::from_millis(500)) {
            break Some(status);
        }
        if Instant::now() > end {
            break None;
        }
        kill_process(pid, Signal::TERM).expect("our own child");
    };
    let _ = child.kill();
    let ended = ended.expect("it ends");
    assert!(
        ended.code() == Some(128 + 15) || ended.signal() == Some(15),
        "{ended}"
    );
}

const LIMIT: Duration = Duration::from_secs(15);
/// Long before a freeze beside a request that hangs is given up.
const SOON: Duration = Duration::from_secs(5);
/// The last sync gets 30 s.
const SYNC_LIMIT: Duration = Duration::from_secs(45);
