//! Tests whether a mount ends in order: unmounted by any process, with users and without, after a kill, and
//! when the disk is removed.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::Signal;

use super::{STEP, Stage, aligned};
use crate::common::daemon::{program, serve_command, wait_within};
use crate::common::tools::{installed, run};

#[test]
fn new_daemon_mounts_over_what_a_killed_one_has_left() {
    let Some(mut stage) = Stage::new("") else { return };
    let image = stage.scratch.word("vm1.raw");
    let held = stage.open();
    held.write_all_at(&aligned(1).0, STEP).unwrap();
    held.sync_all().unwrap();
    // What the kernel remembers of the file must not pass for an answer.
    std::fs::metadata(stage.path()).unwrap();
    stage.daemon.take().expect("it serves").kill();
    let path = stage.word();
    let mut first = Started::at(&path);
    std::thread::sleep(Duration::from_secs(1));
    assert!(first.0.try_wait().expect("it is ours").is_none(), "it is refused");
    drop(first);
    let gone = Some(Errno::NOTCONN.raw_os_error());
    // The first request may be aborted while the kernel cleans up.
    let _ = std::fs::metadata(stage.path());
    let looked = std::fs::metadata(stage.path()).expect_err("nobody serves it");
    assert_eq!(looked.raw_os_error(), gone);
    let mut read = aligned(9);
    assert!(held.read_exact_at(&mut read.0, STEP).is_err());
    stage.serve(&format!("name=vm1,file={image}"));
    stage.open().read_exact_at(&mut read.0, STEP).unwrap();
    assert!(read.0 == aligned(1).0, "what was flushed is there");
    assert!(
        held.read_exact_at(&mut read.0, STEP).is_err(),
        "who had the old one has nothing"
    );
    stage.stop();
}

#[test]
fn of_daemons_that_start_at_the_same_moment_at_one_path_one_mounts_it() {
    for round in 0..6 {
        let scratch = crate::common::Scratch::new();
        let Some(mut stage) = Stage::on(scratch, "name=vm1,ram=16M") else {
            return;
        };
        let before = stage.daemon.take().expect("it serves");
        // Every other time over what a killed daemon has left.
        if round % 2 == 0 {
            before.stop();
        } else {
            before.kill();
        }
        let mut running: Vec<Started> = (0..3).map(|_| Started::at(&stage.word())).collect();
        let (begun, mut refused) = (Instant::now(), Vec::new());
        while running.len() > 1 {
            assert!(
                begun.elapsed() < Duration::from_secs(20),
                "round {round}: all stay"
            );
            let has_ended = |one: &mut Started| one.0.try_wait().expect("it is ours").is_some();
            refused.extend(running.extract_if(.., has_ended));
            std::thread::sleep(Duration::from_millis(5));
        }
        for mut one in refused {
            let mut said = String::new();
            let mut from = one.0.stderr.take().expect("a pipe");
            from.read_to_string(&mut said).expect("text");
            assert!(
                said.contains("another daemon serves there"),
                "round {round}: {said}"
            );
        }
        let mut last = running.pop().expect("one is left");
        let mut read = aligned(9);
        let mut served = || stage.path().exists() && stage.open().read_exact_at(&mut read.0, STEP).is_ok();
        while !served() {
            assert!(
                begun.elapsed() < Duration::from_secs(20),
                "round {round}: it serves nothing"
            );
        }
        rustix::process::kill_process(rustix::process::Pid::from_child(&last.0), Signal::TERM).unwrap();
        let status = wait_within(&mut last.0, Duration::from_secs(10)).expect("it ends");
        assert!(status.success(), "round {round}: {status}");
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(&stage.word()), "round {round}: {mounts}");
    }
}

/// A daemon that may have failed to start.
struct Started(Child);

impl Started {
    fn at(path: &str) -> Self {
        let disk = ["--disk", "name=vm1,ram=16M", "--control", "none"];
        let mut command = serve_command(&[&disk[..], &["--fuse", path]].concat());
        Self(
            command
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .expect("it starts"),
        )
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn daemon_that_is_stopped_keeps_its_path_and_nobody_who_asks_for_it_hangs() {
    let Some(mut stage) = Stage::new("") else { return };
    stage.daemon().pause();
    let mut second = Started::at(&stage.word());
    let status = wait_within(&mut second.0, Duration::from_secs(30));
    let mut said = String::new();
    if status.is_some() {
        let mut from = second.0.stderr.take().expect("a pipe");
        from.read_to_string(&mut said).expect("text");
    }
    stage.daemon().signal(Signal::CONT);
    assert_eq!(status.expect("it ends").code(), Some(1), "{said}");
    assert!(said.contains("another daemon serves there"), "{said}");
    assert!(said.contains("it has not answered for"), "{said}");
    stage.open().write_all_at(&aligned(1).0, STEP).unwrap();
    stage.stop();
}

#[test]
fn sigterm_unmounts_though_the_disk_is_open_and_what_was_begun_is_finished() {
    let Some(mut stage) = Stage::new("") else { return };
    let file = stage.open();
    file.write_all_at(&aligned(1).0, STEP).unwrap();
    stage.daemon().signal(Signal::TERM);
    let status = stage.daemon().ended_within(Duration::from_secs(10));
    assert!(status.success(), "{status}");
    assert!(
        stage.daemon().says("unmounted while open"),
        "{}",
        stage.daemon().said()
    );
    assert!(
        !stage.path().exists(),
        "the file that was made for it is gone, too"
    );
    let mut read = aligned(9);
    let error = file
        .read_exact_at(&mut read.0, STEP)
        .expect_err("nobody serves it");
    assert_is_gone(&error);
}

#[test]
fn load_that_is_under_way_at_sigterm_ends_and_so_does_the_daemon() {
    let Some(mut stage) = Stage::new("") else { return };
    let threads: Vec<_> = (0..4)
        .map(|number| {
            let file = stage.open();
            std::thread::spawn(move || {
                let block = aligned(number);
                let until = Instant::now() + Duration::from_secs(20);
                while file.write_all_at(&block.0, number * STEP).is_ok() {
                    assert!(Instant::now() < until, "it is served for ever");
                }
            })
        })
        .collect();
    std::thread::sleep(Duration::from_millis(200));
    stage.daemon().signal(Signal::TERM);
    assert!(stage.daemon().ended_within(Duration::from_secs(10)).success());
    for thread in threads {
        thread.join().expect("its writes end");
    }
}

#[test]
fn unmount_by_hand_ends_that_mount_alone() {
    let Some(mut stage) = Stage::new("") else { return };
    let file = stage.open();
    assert_eq!(unmount(stage.path(), UnmountFlags::empty()), Err(Errno::BUSY));
    drop(file);
    unmount(stage.path(), UnmountFlags::empty()).unwrap();
    let is_said = |line: &str| line.contains("somebody has unmounted it, and it is not served any more");
    assert!(stage.daemon().wait_for(Duration::from_secs(5), is_said));
    assert!(stage.daemon().is_running());
    stage.stop();
}

#[test]
fn mount_that_is_taken_away_while_it_is_open_is_reported_once_and_listed_as_gone() {
    let Some(mut stage) = Stage::new("") else { return };
    let control = format!("unix:{}", stage.scratch.word("control.sock"));
    let ctl = |words: &[&str]| {
        let words = [&["ctl", "--socket", &control], words].concat();
        run(program().to_str().expect("text"), &words).stdout
    };
    assert!(ctl(&["show", "export", &stage.word()]).contains("served"));
    let file = stage.open();
    // The kernel aborts it, and then finds it busy, or unmounted by the daemon.
    let unmounted = unmount(stage.path(), UnmountFlags::FORCE);
    assert!(
        matches!(unmounted, Err(Errno::BUSY | Errno::INVAL)),
        "{unmounted:?}"
    );
    let is_said = |line: &str| line.contains("somebody has unmounted it, and it is not served any more");
    assert!(stage.daemon().wait_for(Duration::from_secs(5), is_said));
    let start = Instant::now();
    while !ctl(&["list", "exports"]).contains("gone") {
        assert!(start.elapsed() < Duration::from_secs(5), "it is listed as served");
    }
    let mut read = aligned(9);
    let error = file.read_exact_at(&mut read.0, STEP).expect_err("it is gone");
    assert_is_gone(&error);
    // As the message says.
    ctl(&["remove", "export", &stage.word()]);
    assert!(!ctl(&["list", "exports"]).contains("gone"));
    ctl(&["add", "export", &format!("fuse={}", stage.word())]);
    assert!(ctl(&["list", "exports"]).contains("served"));
    stage.open().read_exact_at(&mut read.0, STEP).unwrap();
    let said = stage.daemon().said();
    assert_eq!(said.lines().filter(|line| is_said(line)).count(), 1, "{said}");
    assert!(!said.contains("keeps the disk"), "{said}");
    drop(file);
    stage.stop();
}

#[test]
fn mount_that_is_detached_while_it_is_open_is_listed_as_gone() {
    let Some(stage) = Stage::new("") else { return };
    let control = format!("unix:{}", stage.scratch.word("control.sock"));
    let words = ["ctl", "--socket", &control, "list", "exports"];
    let list = || run(program().to_str().expect("text"), &words).stdout;
    let file = stage.open();
    assert!(list().contains("served"));
    unmount(stage.path(), UnmountFlags::DETACH).unwrap();
    assert!(list().contains("gone"), "{}", list());
    // Who has it open keeps it.
    let mut read = aligned(9);
    file.read_exact_at(&mut read.0, STEP).unwrap();
    drop(file);
    stage.stop();
}

#[test]
fn export_that_is_removed_stays_with_those_who_have_it_open() {
    let Some(stage) = Stage::new("") else { return };
    let file = stage.open();
    let control = format!("unix:{}", stage.scratch.word("control.sock"));
    let ctl = |words: &[&str]| {
        let mut command = Command::new(program());
        let output = command
            .args(["ctl", "--socket", &control])
            .args(words)
            .output()
            .expect("it starts");
        assert!(
            output.status.success(),
            "{words:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let shown = ctl(&["list", "exports"]);
    assert!(shown.contains(&stage.word()), "{shown}");
    ctl(&["remove", "export", &stage.word()]);
    assert!(
        std::fs::metadata(stage.path()).is_err(),
        "nobody finds it any more"
    );
    assert!(ctl(&["list", "exports"]).contains("closed"));
    // One client, however many threads serve it.
    let disks: serde_json::Value = serde_json::from_str(&ctl(&["list", "disks", "--json"])).expect("JSON");
    assert_eq!(disks[0]["clients"], 1, "{disks}");
    file.write_all_at(&aligned(1).0, STEP).unwrap();
    drop(file);
    ctl(&["add", "export", &stage.word(), &format!("fuse={}", stage.word())]);
    let mut read = aligned(9);
    stage.open().read_exact_at(&mut read.0, STEP).unwrap();
    assert!(read.0 == aligned(1).0);
    stage.stop();
}

#[test]
fn disk_that_is_removed_is_gone_for_those_who_have_it_open_and_others_stay() {
    if !super::may_mount() {
        return;
    }
    let mut stage = Stage {
        daemon: None,
        scratch: crate::common::Scratch::new(),
    };
    let control = format!("unix:{}", stage.scratch.word("control.sock"));
    let disks = ["--disk", "name=disk,ram=16M", "--disk", "name=vm2,ram=16M"];
    let places = ["--fuse", &stage.scratch.word("{disk}"), "--control", &control];
    let transport = ["--fuse-io-uring", super::rings::transport()];
    let words = [&disks[..], &places, &transport].concat();
    stage.daemon = Some(crate::common::Daemon::start(&words));
    let file = stage.open();
    let mut remove = Command::new(program());
    remove.args(["ctl", "--socket", &control, "remove", "disk", "disk"]);
    assert!(remove.status().expect("it starts").success());
    let mut read = aligned(9);
    assert!(file.read_exact_at(&mut read.0, STEP).is_err(), "its disk is gone");
    assert_eq!(
        std::fs::metadata(stage.scratch.path("vm2")).unwrap().len(),
        16 << 20
    );
    stage.stop();
}

#[test]
fn user_mounts_with_the_helper() {
    if !installed(&["fusermount3", "setpriv"]) || !super::may_mount() {
        return;
    }
    let device = std::fs::metadata("/dev/fuse").expect("it was opened").mode();
    if device & 0o6 != 0o6 {
        return blkmq_testkit::skip("/dev/fuse is for root alone");
    }
    let scratch = crate::common::Scratch::new();
    run("chown", &["65534:65534", &scratch.word("")]);
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(program());
    command.args([
        "serve",
        "--disk",
        "name=vm1,ram=16M",
        "--control",
        "none",
        "--fuse",
        &scratch.word("disk"),
    ]);
    let daemon = crate::common::Daemon::spawn(command);
    let words = [
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "cksum",
        &scratch.word("disk"),
    ];
    run("setpriv", &words);
    daemon.stop();
    assert!(File::open(scratch.path("disk")).is_err());
}

#[test]
fn mount_without_rights_is_refused_before_a_filter_of_system_calls_ends_the_daemon() {
    if !installed(&["setpriv", "strace"]) || !super::may_mount() {
        return;
    }
    let scratch = crate::common::Scratch::new();
    run("chown", &["65534:65534", &scratch.word("")]);
    let (nbd, control) = (scratch.word("nbd.sock"), scratch.word("control.sock"));
    let (nbd, control) = (format!("unix:{nbd}"), format!("unix:{control}"));
    let serve = |words: &[&str]| {
        // As under the filter of a unit, whose default is a signal.
        let mut command = Command::new("strace");
        command.args([
            "-D",
            "-f",
            "-qqq",
            "-e",
            "trace=mount,umount2",
            "-e",
            "signal=none",
        ]);
        command.args(["-e", "inject=mount,umount2:error=EPERM:signal=SIGSYS", "setpriv"]);
        command.args([
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "--no-new-privs",
        ]);
        command
            .arg(program())
            .args(["serve", "--disk", "name=vm1,ram=1M"]);
        command.args(["--control", &control]).args(words);
        command
    };
    let file = scratch.word("disk");
    for words in [&["--fuse", &file, "--check"][..], &["--fuse", &file]] {
        let output = serve(words).output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(
            said.contains("this process may not mount: it lacks CAP_SYS_ADMIN"),
            "{said}"
        );
    }
    let mut daemon = crate::common::Daemon::spawn(serve(&["--nbd", &nbd, "--sandbox", "off"]));
    let export = format!("fuse={file}");
    let mut ctl = Command::new(program());
    let output = ctl
        .args(["ctl", "--socket", &control, "add", "export", &export])
        .output();
    let output = output.expect("it starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("this process may not mount"), "{said}");
    assert!(daemon.is_running(), "{}", daemon.said());
    daemon.stop();
}

/// Asserts that nobody serves the mount: not connected, or aborted in the moment of the request.
fn assert_is_gone(error: &std::io::Error) {
    let gone = [Errno::NOTCONN, Errno::CONNABORTED].map(Errno::raw_os_error);
    assert!(
        error.raw_os_error().is_some_and(|errno| gone.contains(&errno)),
        "{error}"
    );
}
