//! Whether `--check` finds what a start would find, and nothing else: also beside a daemon that serves the same
//! configuration.

use std::process::{Command, Output};
use std::time::Duration;

use crate::common::daemon::serve_command;
use crate::common::tools::{installed, output_within};
use crate::common::{Daemon, Scratch};

#[test]
fn check_passes_beside_the_daemon_that_serves_the_configuration() {
    let scratch = Scratch::new();
    let image = format!("name=vm1,file={}", scratch.image("vm1.raw", 1 << 20));
    let (nbd, front_end) = (unix(&scratch, "nbd"), unix(&scratch, "{disk}"));
    let control = unix(&scratch, "control");
    let words = [
        "--disk",
        &image,
        "--nbd",
        &nbd,
        "--vhost-user",
        &front_end,
        "--control",
        &control,
    ];
    let daemon = Daemon::start(&words);
    let (code, said) = check(&words);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("all can be served"), "{said}");
    assert!(said.contains("vm1.raw") && said.contains("in use by"), "{said}");
    // Nobody sees that from the lock, which the daemon has.
    let twice = image.replace("name=vm1", "name=vm2");
    let (code, said) = check(&[&words[..], &["--disk", &twice]].concat());
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("disk vm2") && said.contains("disk vm1"), "{said}");
    daemon.stop();
}

#[test]
fn check_refuses_a_place_that_is_taken_twice() {
    let scratch = Scratch::new();
    let (nbd, odd) = (unix(&scratch, "x"), unix(&scratch, "./x"));
    let fuse = scratch.word("x.sock");
    for (taken, other) in [
        (["--nbd", &nbd], ["--nbd", &odd]),
        (["--nbd", &nbd], ["--vhost-user", &odd]),
        (["--nbd", &nbd], ["--control", &odd]),
        (["--metrics", &nbd], ["--control", &nbd]),
        (["--upgrade-socket", &nbd], ["--metrics", &nbd]),
        (["--nbd", "tcp:10809"], ["--nbd", "tcp:127.0.0.1:10809"]),
        (["--nbd", "tcp:10809"], ["--metrics", "tcp:10809"]),
        (["--nbd", &nbd], ["--fuse", &fuse]),
        (["--ublk", "7"], ["--ublk", "7"]),
    ] {
        let words = [&["--disk", "name=a,ram=1M"][..], &taken, &other].concat();
        let (code, said) = check(&words);
        assert!(
            code == Some(1) && said.contains("is taken twice"),
            "{taken:?} {other:?}: {said}"
        );
    }
    let words = [
        "--nbd",
        "tcp:10809",
        "--nbd",
        "tcp:127.0.0.2:10809",
        "--nbd",
        "tcp:0",
    ];
    let words = [&["--disk", "name=a,ram=1M", "--nbd", "tcp:0"][..], &words].concat();
    let (code, said) = check(&words);
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn check_refuses_places_that_cannot_be_had() {
    let scratch = Scratch::new();
    let file = scratch.image("file.sock", 512);
    let (missing, in_file) = (scratch.word("missing/x"), format!("{file}/x"));
    let long = format!("{}{{disk}}", scratch.word(&"x".repeat(90)));
    let of = |path: &str| format!("unix:{path}");
    for (flag, address, says) in [
        ("--nbd", of(&missing), "directory"),
        ("--nbd", of(&in_file), "directory"),
        ("--nbd", of(&file), "something else than a socket"),
        ("--vhost-user", of(&missing), "directory"),
        ("--vhost-user", of(&file), "something else than a socket"),
        ("--vhost-user", of(&long), "107"),
        ("--control", of(&missing), "directory"),
        ("--metrics", of(&file), "something else than a socket"),
        ("--upgrade-socket", of(&missing), "directory"),
        ("--fuse", missing.clone(), "directory"),
        ("--fuse", "/proc".to_owned(), "something else than a regular file"),
    ] {
        let disk = format!("name={},ram=1M", "d".repeat(60));
        let words = ["--disk", &disk, "--nbd", "tcp:0", flag, &address];
        let (code, said) = check(&words);
        assert!(code != Some(0) && said.contains(says), "{flag} {address}: {said}");
    }
}

#[test]
fn check_refuses_sockets_where_it_may_not_make_them() {
    if !installed(&["setpriv"]) {
        return;
    }
    let scratch = Scratch::new();
    let nbd = unix(&scratch, "x");
    let serve = serve_command(&["--check", "--disk", "name=a,ram=1M", "--nbd", &nbd]);
    let mut command = Command::new("setpriv");
    // Another user, or without privileges: neither may write there.
    command.args(["--bounding-set=-all", "--inh-caps=-all", "--reuid=65534", "--"]);
    command.arg(serve.get_program()).args(serve.get_args());
    let output = output_within(&mut command, LIMIT);
    let said = text_of(&output);
    if said.contains("setpriv:") {
        blkmq_testkit::skip("another user cannot be had");
        return;
    }
    assert!(
        !output.status.success() && said.contains("may not make files in its directory"),
        "{said}"
    );
}

#[test]
fn check_refuses_sizes_that_no_client_can_address() {
    for disks in [
        &["name=a,null=16000000T"][..],
        &["name=a,null=8388608T"],
        &["name=a,null=8388607T", "name=b,null=1T", "name=c,linear=a+b"],
    ] {
        let mut words: Vec<&str> = disks.iter().flat_map(|disk| ["--disk", disk]).collect();
        words.extend(["--nbd", "tcp:0"]);
        let (code, said) = check(&words);
        assert!(
            code == Some(1) && said.contains("less than 8388608T"),
            "{disks:?}: {said}"
        );
    }
    let (code, said) = check(&["--disk", "name=a,null=8388607T", "--nbd", "tcp:0"]);
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn check_refuses_too_few_file_descriptors() {
    for limit in [40, 200] {
        let words = ["--check", "--disk", "name=a,ram=1M", "--nbd", "tcp:0"];
        let serve = serve_command(&words);
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -n {limit}; exec \"$@\""), "sh"]);
        command.arg(serve.get_program()).args(serve.get_args());
        let said = text_of(&output_within(&mut command, LIMIT));
        assert!(
            said.contains("too few") && said.contains("256 at least"),
            "{limit}: {said}"
        );
    }
}

#[test]
fn check_says_that_io_uring_is_forbidden() {
    if !installed(&["python3"]) {
        return;
    }
    let serve = serve_command(&["--check", "--disk", "name=a,ram=1M", "--nbd", "tcp:0"]);
    let mut command = Command::new("python3");
    command.args(["-c", WITHOUT_IO_URING]);
    command.arg(serve.get_program()).args(serve.get_args());
    let output = output_within(&mut command, LIMIT);
    let said = text_of(&output);
    assert!(
        !output.status.success() && said.contains("no io_uring") && said.contains("io_uring_disabled"),
        "{said}"
    );
}

fn unix(scratch: &Scratch, name: &str) -> String {
    format!("unix:{}", scratch.word(&format!("{name}.sock")))
}

/// The exit code of a check, and what it said.
fn check(words: &[&str]) -> (Option<i32>, String) {
    let output = output_within(&mut serve_command(&[&["--check"], words].concat()), LIMIT);
    (output.status.code(), text_of(&output))
}

fn text_of(output: &Output) -> String {
    [&output.stdout[..], &output.stderr]
        .map(String::from_utf8_lossy)
        .concat()
}

/// Becomes a command for which a filter of system calls refuses `io_uring_setup` (number 425 everywhere): loads the
/// number, compares, refuses with EPERM or permits.
const WITHOUT_IO_URING: &str = r#"
import ctypes, os, struct, sys
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (6, 0, 0, 0x50001), (6, 0, 0, 0x7fff0000)]
steps = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = struct.pack("HxxxxxxP", 4, ctypes.addressof(steps))
prctl = ctypes.CDLL(None, use_errno=True).prctl
zero = ctypes.c_ulong(0)
assert prctl(38, ctypes.c_ulong(1), zero, zero, zero) == 0
assert prctl(22, ctypes.c_ulong(2), ctypes.c_char_p(program), zero, zero) == 0
os.execv(sys.argv[1], sys.argv[1:])
"#;
const LIMIT: Duration = Duration::from_secs(30);
