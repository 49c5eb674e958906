//! Tenants with a shell on the host, each as its own user with its own socket, beside a daemon that has a user of its
//! own too. What one of them can do to another, or to the daemon.

use std::fs::{self, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

use blkmq::control::client::Client as Control;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::common::daemon::{program, serve_command};
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::run;
use crate::common::user::{as_user, can_switch};
use crate::common::{Daemon, Scratch};

/// Two tenants, and a daemon that serves a disk to each.
struct Host {
    scratch: Scratch,
    daemon: Daemon,
}

impl Host {
    fn start() -> Option<Self> {
        if !can_switch() {
            return None;
        }
        let scratch = Scratch::new();
        fs::set_permissions(scratch.path(""), Permissions::from_mode(0o755)).expect("our own");
        chown(scratch.path(""), Some(DAEMON), Some(DAEMON)).expect("root may");
        // The directory of the build may be closed to others. Another process makes the copy: a file that this one has
        // open for writing could not be run while a child of another test has inherited it.
        run(
            "cp",
            &[&program().display().to_string(), &scratch.word("program")],
        );
        let dir = scratch.word("");
        let mut text = format!(
            "[daemon]\nreactors = 1\nupgrade_socket = \"unix:{dir}upgrade.sock\"\n[control]\nsocket = \"unix:{dir}control.sock\"\n\
             tenants = {{ \"/alice\" = \"{ALICE}\", \"/bob\" = \"{BOB}\" }}\n"
        );
        for (name, user) in [("alice", ALICE), ("bob", BOB)] {
            let image = scratch.image(&format!("{name}.raw"), 1 << 20);
            fs::set_permissions(&image, Permissions::from_mode(0o600)).expect("our own");
            chown(&image, Some(DAEMON), Some(DAEMON)).expect("root may");
            text += &format!(
                "[disk.{name}]\nfile = \"{image}\"\nsched = \"bfq\"\ngroup = \"/{name}/vm\"\n[[export]]\nnbd = \"unix:{dir}{name}.sock\"\n\
                 disks = [\"{name}\"]\nmode = \"0666\"\nallow_uid = [\"{user}\"]\nconnections = {CONNECTIONS}\n"
            );
        }
        fs::write(scratch.path("c.toml"), text).expect("it is written");
        let config = scratch.word("c.toml");
        let words = serve_command(&["-c", &config]);
        let mut command = std::process::Command::new(scratch.path("program"));
        command.args(words.get_args()).uid(DAEMON).gid(DAEMON);
        let daemon = Daemon::spawn(command);
        Some(Self { scratch, daemon })
    }

    fn connect(&self, disk: &str) -> std::io::Result<Client> {
        Client::connect(&self.scratch.path(&format!("{disk}.sock")), disk)
    }

    fn control(&self) -> anyhow::Result<Control> {
        Control::connect(&self.scratch.path("control.sock"))
    }

    /// Waits for a line of the daemon's log, which another thread writes.
    fn logged(&mut self, part: &str) {
        let is_there = self.daemon.wait_for(FLOOD_MAX, |line| line.contains(part));
        assert!(is_there, "{part}: {}", self.daemon.said());
    }

    /// What the daemon says to a call.
    fn call(&self, method: &str, params: &Value) -> Result<Value, String> {
        let called = self
            .control()
            .and_then(|mut control| control.call(method, params));
        called.map_err(|error| format!("{error:#}"))
    }
}

#[test]
fn tenant_with_a_shell_opens_its_own_disk_and_none_of_another() {
    let Some(mut host) = Host::start() else { return };
    as_user(BOB, || {
        let mut own = host.connect("bob").expect("its own socket");
        own.write(0, &block(0, 1)).expect("its own disk");
    });
    as_user(ALICE, || {
        assert!(host.connect("alice").is_ok());
        assert!(host.connect("bob").is_err(), "the daemon hangs up");
        let own = host.scratch.path("alice.sock");
        assert!(
            Client::connect(&own, "bob").is_err(),
            "not at its own socket either"
        );
        for file in ["bob.raw", "alice.raw"] {
            let read = fs::read(host.scratch.path(file)).expect_err("the daemon's alone");
            assert_eq!(read.kind(), ErrorKind::PermissionDenied, "{file}");
        }
        // A socket of its own in the place of another's would have that one's clients.
        let removed = fs::remove_file(host.scratch.path("bob.sock")).expect_err("the daemon's directory");
        assert_eq!(removed.kind(), ErrorKind::PermissionDenied);
    });
    host.logged(&format!("of user {ALICE} refused: neither in allow_uid"));
    as_user(BOB, || {
        let mut own = host.connect("bob").expect("its own socket");
        assert!(own.read(0, BLOCK).expect("its own disk") == block(0, 1));
    });
    host.daemon.stop();
}

#[test]
fn tenant_with_a_shell_controls_its_groups_and_not_the_daemon() {
    let Some(mut host) = Host::start() else { return };
    let set = |name: &str, keys: Value| json!({"kind": "group", "name": name, "keys": keys});
    as_user(ALICE, || {
        let groups = host.call("group.list", &json!({})).expect("it may ask");
        let groups = groups.as_array().expect("a list");
        let paths: Vec<&str> = groups.iter().filter_map(|row| row["path"].as_str()).collect();
        assert_eq!(paths, ["/alice", "/alice/vm"]);
        let disks = host.call("disk.list", &json!({})).expect("it may ask");
        assert_eq!(
            (disks.as_array().map(Vec::len), &disks[0]["name"]),
            (Some(1), &"alice".into())
        );
        host.call(
            "config.set",
            &set("/alice/vm", json!({"iops": 500, "weight": 50})),
        )
        .expect("it is below its own");
        for (method, params, part) in [
            (
                "config.set",
                set("/alice", json!({"weight": 1000})),
                "group /alice is not below /alice",
            ),
            (
                "config.set",
                set("/bob/vm", json!({"iops": 1})),
                "is not below /alice",
            ),
            (
                "config.set",
                set("/alice/vm", json!({"latency_target": "1us"})),
                "other tenants give way",
            ),
            (
                "config.set",
                json!({"kind": "daemon", "keys": {"shutdown_limit": "1s"}}),
                "daemon  is not below",
            ),
            (
                "config.set",
                json!({"kind": "disk", "name": "alice", "keys": {"sched": "none"}}),
                "disk alice is not below",
            ),
            (
                "config.remove",
                json!({"kind": "disk", "name": "bob"}),
                "is for the daemon's user",
            ),
            ("config.apply", json!({"toml": ""}), "is for the daemon's user"),
            ("config.get", json!({}), "is for readers"),
            ("export.list", json!({}), "is for readers"),
            (
                "disk.resize",
                json!({"disk": "alice"}),
                "is for the daemon's user",
            ),
            ("disk.clone", json!({}), "is for the daemon's user"),
            (
                "disk.unlock",
                json!({"disk": "alice"}),
                "is for the daemon's user",
            ),
            (
                "disk.flatten",
                json!({"disk": "alice"}),
                "is for the daemon's user",
            ),
            (
                "disk.commit",
                json!({"disk": "alice"}),
                "is for the daemon's user",
            ),
            ("trace.start", json!({}), "is for the daemon's user"),
            ("log.set", json!({"filter": "trace"}), "is for the daemon's user"),
            ("daemon.drain", json!({}), "is for the daemon's user"),
        ] {
            let said = host.call(method, &params).expect_err("it may not");
            assert!(
                said.contains(part) && said.contains(&ALICE.to_string()),
                "{method}: {said}"
            );
        }
        let statistics = host.call("statistics.get", &json!({})).expect("it may ask");
        assert!(!statistics.to_string().contains("bob"), "{statistics}");
        // Where another daemon takes over with all disks.
        let upgrade = UnixStream::connect(host.scratch.path("upgrade.sock")).expect_err("the daemon's");
        assert_eq!(upgrade.kind(), ErrorKind::PermissionDenied);
        let pid = Pid::from_raw(host.daemon.id().cast_signed()).expect("a child has an id");
        assert!(kill_process(pid, Signal::KILL).is_err());
    });
    let nobody = as_user(NOBODY, || {
        host.call("daemon.version", &json!({}))
            .expect_err("it has no role")
    });
    assert!(nobody.contains("neither in readers nor in tenants"), "{nobody}");
    for part in [
        format!("of user {ALICE} refused: group /bob/vm is not below /alice"),
        format!("of user {ALICE} refused: daemon.drain is for the daemon's user"),
        format!("of user {NOBODY} refused: neither in readers nor in tenants"),
    ] {
        host.logged(&part);
    }
    let dump = as_user(DAEMON, || host.call("config.get", &json!({})).expect("its own"));
    assert_eq!(
        dump.pointer("/tables/group/~1alice~1vm/weight"),
        Some(&50.into()),
        "{dump}"
    );
    host.daemon.stop();
}

#[test]
fn tenant_with_a_shell_reads_nothing_of_the_daemons_memory() {
    let Some(host) = Host::start() else { return };
    let of_daemon = |name: &str| format!("/proc/{}/{name}", host.daemon.id());
    // Not even the daemon's own user reads them, for keys may be in them.
    for user in [ALICE, DAEMON] {
        as_user(user, || {
            for name in ["mem", "environ", "maps", "auxv", "syscall", "fd/0"] {
                let opened = fs::File::open(of_daemon(name)).map(|mut file| file.read(&mut [0; 1]));
                let error = opened
                    .map_or_else(Some, |read| read.err())
                    .unwrap_or_else(|| panic!("{user} has read {name}"));
                let is_refused = matches!(error.kind(), ErrorKind::PermissionDenied);
                assert!(is_refused, "user {user}, {name}: {error}");
            }
        });
    }
    fs::File::open(of_daemon("maps")).expect("root may, so it is there");
    host.daemon.stop();
}

#[test]
fn tenant_with_a_shell_does_not_fill_the_daemons_log() {
    let Some(host) = Host::start() else { return };
    let before = host.daemon.said().len();
    let start = Instant::now();
    as_user(ALICE, || {
        for number in 0..1000 {
            // Another's disk, a call that it may not make, and nonsense.
            let _ = host.connect("bob");
            let _ = host.call("daemon.drain", &json!({}));
            if let Ok(mut stream) = UnixStream::connect(host.scratch.path("alice.sock")) {
                let _ = stream.write_all(b"GET / HTTP/1.1\r\n\r\n");
            }
            if start.elapsed() > FLOOD_MAX {
                assert!(number > 100, "{number} rounds are no flood");
                break;
            }
        }
        let set = |weight| json!({"kind": "group", "name": "/alice/vm", "keys": {"weight": weight}});
        for weight in 1..20 {
            host.call("config.set", &set(weight))
                .expect("it may, now and then");
        }
    });
    let (said, seconds) = (host.daemon.said(), start.elapsed().as_secs());
    let lines = said[before..].lines().count() as u64;
    // Three sources of lines: refused connections, refused calls, and its own address.
    assert!(lines <= 4 * (64 + seconds + 1), "{lines} lines in {seconds} s");
    assert!(said.contains("refused: daemon.drain"), "{said}");
    host.daemon.stop();
}

#[test]
fn tenant_with_a_shell_has_no_more_connections_than_its_own() {
    let Some(host) = Host::start() else { return };
    let kept = as_user(ALICE, || {
        let mut disks: Vec<Client> = Vec::new();
        let mut controls: Vec<Control> = Vec::new();
        for _ in 0..CONNECTIONS * 2 {
            disks.extend(host.connect("alice"));
            let control = host.control().and_then(|mut control| {
                control.call("daemon.version", &json!({}))?;
                Ok(control)
            });
            controls.extend(control);
        }
        (disks, controls)
    });
    assert_eq!((kept.0.len(), kept.1.len()), (CONNECTIONS, CONTROL_PER_USER));
    as_user(BOB, || {
        let mut own = host.connect("bob").expect("its own");
        own.read(0, BLOCK).expect("a read");
        host.call("group.list", &json!({})).expect("its own");
    });
    drop(kept);
    let start = Instant::now();
    while as_user(ALICE, || host.call("daemon.version", &json!({}))).is_err() {
        assert!(start.elapsed() < FLOOD_MAX, "its places come back");
    }
    host.daemon.stop();
}

/// Users without names.
const DAEMON: u32 = 65_100;
const ALICE: u32 = 65_101;
const BOB: u32 = 65_102;
const NOBODY: u32 = 65_103;
/// Connections of an address.
const CONNECTIONS: usize = 20;
/// What a user may have of the control socket.
const CONTROL_PER_USER: usize = 8;
const FLOOD_MAX: Duration = Duration::from_secs(10);
