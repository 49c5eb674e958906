//! The log: its settings, its formats, and a daemon that serves though its log cannot be written, or is not read.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, PipeReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::linux::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use blkmq::control::client::Client as Control;
use rustix::pipe::fcntl_setpipe_size;
use rustix::process::Signal;
use serde_json::json;

use crate::common::daemon::serve_command;
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::output_within;
use crate::common::{Daemon, Scratch};

#[test]
fn log_in_json_has_an_object_in_each_line_and_says_what_its_filter_lets_through() {
    let scratch = Scratch::new();
    let control = format!("unix:{}", scratch.word("control.sock"));
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let mut command = serve_command(&["--disk", "name=vm1,ram=1M", "--nbd", &nbd, "--control", &control]);
    command.env("BLKMQ_LOG_FORMAT", "json");
    let mut daemon = Daemon::spawn(command);
    let mut client = Control::connect(&scratch.path("control.sock")).expect("it is served");
    for (filter, weight) in [("error", 3), ("info", 4)] {
        let filtered = client.call("log.set", &json!({"filter": filter}));
        filtered.expect("a filter");
        let keys = json!({"kind": "group", "name": "/vm1", "keys": {"weight": weight}});
        client
            .call("config.set", &keys)
            .expect("a change, which is logged");
    }
    let wait = Duration::from_secs(10);
    assert!(daemon.wait_for(wait, |line| line.contains("change: set group /vm1")));
    assert_eq!(daemon.said().matches("change: ").count(), 1, "{}", daemon.said());
    daemon.signal(Signal::USR1);
    assert!(daemon.wait_for(wait, |line| line.contains("events:")));
    let of_stdout = |line: &&str| *line == "ready" || line.starts_with("nbd");
    for line in daemon.said().lines().filter(|line| !of_stdout(line)) {
        let message: serde_json::Value = serde_json::from_str(line).expect("JSON");
        assert!(
            message["timestamp"].is_string() && message["message"].is_string(),
            "{line}"
        );
    }
    daemon.stop();
}

#[test]
fn log_settings_in_the_environment_that_are_wrong_are_refused_with_what_is_right() {
    let words = ["--disk", "name=vm1,ram=1M", "--nbd", "unix:/nonexistent/nbd.sock"];
    for (name, value, says) in [
        (
            "BLKMQ_LOG",
            "inof",
            "BLKMQ_LOG: filter \"inof\" rejected: \"inof\" is no level: off, error",
        ),
        (
            "BLKMQ_LOG",
            "blkmq_host=inof",
            "BLKMQ_LOG: filter \"blkmq_host=inof\" rejected",
        ),
        (
            "BLKMQ_LOG_FORMAT",
            "xml",
            "BLKMQ_LOG_FORMAT: \"xml\" rejected: must be text, json or journal",
        ),
    ] {
        let output = output_within(serve_command(&words).env(name, value), Duration::from_secs(10));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{name}={value}: {said}");
        assert!(said.contains(says), "{name}={value}: {said}");
    }
}

#[test]
fn fatal_error_is_in_the_format_of_the_log_whatever_its_filter_lets_through() {
    let words = ["--disk", "name=vm1,ram=1M", "--nbd", "unix:/nonexistent/nbd.sock"];
    let said = |format: &str, filter: &str| {
        let mut command = serve_command(&words);
        command.env("BLKMQ_LOG_FORMAT", format).env("BLKMQ_LOG", filter);
        let output = output_within(&mut command, Duration::from_secs(10));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    for filter in ["off", "inof", "info"] {
        let said_json = said("json", filter);
        for line in said_json.lines() {
            let message: serde_json::Value = serde_json::from_str(line).expect("JSON");
            assert!(
                message["timestamp"].is_string() && message["level"].is_string(),
                "{line}"
            );
        }
        assert!(
            said_json.lines().any(|line| line.contains("ERROR")),
            "{said_json}"
        );
    }
    let said_journal = said("journal", "off");
    assert!(said_journal.starts_with("<3>blkmq: "), "{said_journal}");
}

#[test]
fn start_is_told_in_one_line_and_no_monitors_words_are_printed() {
    let scratch = Scratch::new();
    let dir = scratch.word("");
    let text = format!(
        "[daemon]\nreactors = 1\n[control]\nsocket = \"unix:{dir}control.sock\"\n[disk.vm1]\nram = \"1M\"\nsched = \"bfq\"\n\
         [disk.vm2]\nram = \"1M\"\n[disk.vm3]\nram = \"1M\"\n[[export]]\nvhost-user = \"unix:{dir}{{disk}}.sock\"\n"
    );
    std::fs::write(scratch.path("c.toml"), text).expect("it is written");
    let config = scratch.word("c.toml");
    let daemon = Daemon::start(&["-c", &config]);
    let version = env!("CARGO_PKG_VERSION");
    let told = format!("blkmq {version}: 3 disks on 3 queues (bfq, none), 1 thread, by {config}");
    assert!(daemon.says(&told), "{}", daemon.said());
    let said = daemon.said();
    let is_logged = |line: &&str| {
        [" INFO ", " WARN ", "ERROR "]
            .iter()
            .any(|level| line.contains(level))
    };
    let logged: Vec<&str> = said.lines().filter(is_logged).collect();
    assert_eq!(logged.len(), 2, "that of the sandbox, and this:\n{said}");
    // An address of each disk in a line, and the end.
    assert_eq!(said.lines().count(), 2 + 3 + 1, "{said}");
    for word in ["chardev", "reconnect", "<disk", "--disk"] {
        assert!(!said.contains(word), "{word}: {said}");
    }
    daemon.stop();
}

#[test]
fn journal_is_given_priorities_and_no_times() {
    let scratch = Scratch::new();
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let mut command = serve_command(&["--disk", "name=vm1,ram=1M", "--nbd", &nbd]);
    let (reader, writer) = std::io::pipe().expect("a pipe can be made");
    let of_pipe = std::fs::metadata(format!("/proc/self/fd/{}", writer.as_raw_fd())).expect("it is open");
    command.env(
        "JOURNAL_STREAM",
        format!("{}:{}", of_pipe.st_dev(), of_pipe.st_ino()),
    );
    // A journal that takes lines alone.
    command.env("BLKMQ_JOURNAL", scratch.word("nobody"));
    let daemon = Daemon::spawn_with_log(command, writer.into());
    make_it_talk(&daemon, &scratch.path("nbd.sock"));
    daemon.stop();
    let lines: Vec<String> = BufReader::new(reader)
        .lines()
        .collect::<Result<_, _>>()
        .expect("text");
    let rejected = |line: &&String| line.contains("rejected");
    assert!(lines.iter().any(|line| line.starts_with("<6>")), "{lines:?}");
    assert!(
        lines
            .iter()
            .filter(rejected)
            .all(|line| line.starts_with("<4> WARN ")),
        "{lines:?}"
    );
    assert!(lines.iter().any(|line| rejected(&line)), "{lines:?}");
}

#[test]
fn journal_is_given_the_disk_the_group_and_the_client_as_fields() {
    let scratch = Scratch::new();
    let journal = UnixDatagram::bind(scratch.path("journal")).expect("a socket can be bound");
    journal.set_read_timeout(Some(ANSWER_MAX)).expect("a time limit");
    let image = scratch.image("vm1.raw", 1 << 20);
    let disk = format!("name=vm1,file={image},group=/tenants/vm1");
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let mut command = serve_command(&["--reactors", "1", "--disk", &disk, "--nbd", &nbd]);
    let (mut reader, writer) = std::io::pipe().expect("a pipe can be made");
    let of_pipe = std::fs::metadata(format!("/proc/self/fd/{}", writer.as_raw_fd())).expect("it is open");
    command
        .env(
            "JOURNAL_STREAM",
            format!("{}:{}", of_pipe.st_dev(), of_pipe.st_ino()),
        )
        .env("BLKMQ_JOURNAL", scratch.word("journal"));
    let daemon = Daemon::spawn_with_log(command, writer.into());
    // A client that is refused, and a drive that fails.
    let mut hostile = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    hostile.stream().write_all(&[0xff; 64]).expect("garbage is sent");
    let refused = entry_with(&journal, "closed: ");
    assert_eq!(refused["PRIORITY"], "4", "{refused:?}");
    let own = format!("process {} of user ", std::process::id());
    assert!(refused["BLKMQ_CLIENT"].starts_with(&own), "{refused:?}");
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    let file = File::options().write(true).open(&image).expect("our own");
    file.set_len(0).expect("it is made shorter");
    client.read(0, BLOCK).expect_err("nothing is there");
    let failed = entry_with(&journal, "is truncated: ");
    assert_eq!((&*failed["PRIORITY"], &*failed["BLKMQ_SOURCE"]), ("3", &*image));
    for entry in [refused, failed] {
        let named = ["BLKMQ_DISK", "BLKMQ_GROUP", "SYSLOG_IDENTIFIER"].map(|name| &*entry[name]);
        assert_eq!(named, ["vm1", "/tenants/vm1", "blkmq"], "{entry:?}");
    }
    drop(daemon);
    let mut said = String::new();
    reader.read_to_string(&mut said).expect("text");
    assert_eq!(said, "", "it is said twice");
}

/// The next entry whose message has this part. None of them has a line break in a value.
fn entry_with(journal: &UnixDatagram, part: &str) -> HashMap<String, String> {
    loop {
        let mut entry = vec![0; 8192];
        let bytes = journal.recv(&mut entry).expect("an entry comes");
        let text = std::str::from_utf8(&entry[..bytes]).expect("text");
        let fields = text.lines().map(|line| line.split_once('=').expect("a field"));
        let fields: HashMap<_, _> = fields
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        if fields["MESSAGE"].contains(part) {
            return fields;
        }
    }
}

#[test]
fn log_on_a_full_disk_costs_nobody_a_connection() {
    let scratch = Scratch::new();
    let full = File::options().write(true).open("/dev/full");
    let mut daemon = serve(&scratch, full.expect("every Linux has it").into());
    make_it_talk(&daemon, &scratch.path("nbd.sock"));
    assert!(daemon.is_running(), "the daemon died of its log");
    daemon.stop();
}

#[test]
fn log_that_nobody_reads_holds_up_neither_clients_nor_the_end() {
    let scratch = Scratch::new();
    let (reader, writer) = full_pipe();
    let daemon = serve(&scratch, writer.into());
    make_it_talk(&daemon, &scratch.path("nbd.sock"));
    daemon.stop();
    drop(reader);
}

#[test]
fn log_that_is_read_late_has_everything_up_to_its_limit() {
    let scratch = Scratch::new();
    let (mut reader, writer) = full_pipe();
    let daemon = serve(&scratch, writer.into());
    make_it_talk(&daemon, &scratch.path("nbd.sock"));
    let mut log = String::new();
    let said = std::thread::spawn(move || reader.read_to_string(&mut log).map(|_| log));
    daemon.stop();
    let said = said.join().expect("the reader does not panic").expect("text");
    let closed = said.lines().filter(|line| line.contains("rejected")).count();
    assert_eq!(closed, TALKERS, "of each connection one line:\n{said}");
    assert!(
        said.contains("events:") && said.contains("shutting down"),
        "the statistics, or the end:\n{said}"
    );
}

fn serve(scratch: &Scratch, log: Stdio) -> Daemon {
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let words = ["--reactors", "1", "--disk", "name=vm1,ram=1M", "--nbd", &nbd];
    Daemon::spawn_with_log(serve_command(&words), log)
}

/// A pipe that is full.
fn full_pipe() -> (PipeReader, std::io::PipeWriter) {
    let (reader, mut writer) = std::io::pipe().expect("a pipe can be made");
    let size = fcntl_setpipe_size(&writer, 4096).expect("a small pipe is granted");
    writer
        .write_all(&vec![b'\n'; size])
        .expect("an empty pipe takes it");
    (reader, writer)
}

/// Gives the daemon reasons to log, and checks that a good client on the same thread gets its
/// answers soon.
fn make_it_talk(daemon: &Daemon, socket: &Path) {
    let mut good = Client::connect(socket, "vm1").expect("the daemon serves it");
    for round in 1..=TALKERS as u64 {
        let mut hostile = Client::connect(socket, "vm1").expect("the daemon still serves");
        hostile.stream().write_all(&[0xff; 64]).expect("garbage is sent");
        let mut rest = Vec::new();
        let _ = hostile.stream().read_to_end(&mut rest);
        daemon.signal(Signal::USR1);
        let start = Instant::now();
        good.write(0, &block(0, round)).expect("a write");
        assert!(good.read(0, BLOCK).expect("a read") == block(0, round));
        assert!(
            start.elapsed() < ANSWER_MAX,
            "a write and a read took {:?}",
            start.elapsed()
        );
    }
}

/// Clients that violate the protocol, one after the other: fewer than the limit of messages at a
/// time.
const TALKERS: usize = 5;
/// Far more than two requests take on a busy machine.
const ANSWER_MAX: Duration = Duration::from_secs(5);
