//! Daemons and disks at the edges of what hosts have: the largest limit of descriptors, a first process with a read-only
//! root, a disk of 20 TiB, a file of an odd size, a device that grows, hundreds of extents, names with quotes.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::daemon::serve_command;
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::{installed, run, try_run};
use crate::common::{Daemon, Scratch};
use crate::metrics;

#[test]
fn largest_limit_of_descriptors_costs_neither_time_nor_tables() {
    let most = std::fs::read_to_string("/proc/sys/fs/nr_open").expect("the kernel tells its limit");
    // Some containers may not raise the hard limit, which is large there already.
    let script = format!(
        "ulimit -Hn {} 2> /dev/null; ulimit -Sn $(ulimit -Hn) && exec \"$0\" \"$@\"",
        most.trim()
    );
    let scratch = Scratch::new();
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let served = serve_command(&["--disk", "name=vm1,ram=1M", "--nbd", &nbd]);
    let mut command = Command::new("sh");
    command.args(["-c", &script]).arg(served.get_program());
    command.args(served.get_args());
    let start = Instant::now();
    let daemon = Daemon::spawn(command);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.id())).expect("our own child's");
    let slots = status.lines().find_map(|line| line.strip_prefix("FDSize:"));
    let slots: u64 = slots
        .and_then(|number| number.trim().parse().ok())
        .expect("a number");
    assert!(slots < 20_000, "a table of {slots} descriptors");
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    client.write(0, &block(0, 1)).expect("a write");
    daemon.stop();
}

#[test]
fn first_process_of_a_namespace_serves_with_a_read_only_root_and_ends_when_told() {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root || !installed(&["unshare", "mount"]) {
        blkmq_testkit::skip("it needs root, to make namespaces");
        return;
    }
    let scratch = Scratch::new();
    let disk = format!("name=vm1,file={}", scratch.image("vm1.raw", 1 << 20));
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    // What lies in the directory stays writable, as a container's volume does.
    let script = format!(
        "mount --bind {0} {0} && mount -o remount,bind,ro / && ! touch /written && exec \"$0\" \"$@\"",
        scratch.word("")
    );
    let served = serve_command(&["--disk", &disk, "--nbd", &nbd, "--control", "none"]);
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--mount", "sh", "-c", &script]);
    command.arg(served.get_program()).args(served.get_args());
    let mut daemon = Daemon::spawn(command);
    let children = format!("/proc/{0}/task/{0}/children", daemon.id());
    let children = std::fs::read_to_string(children).expect("the kernel tells children");
    let own = children
        .trim()
        .parse()
        .ok()
        .and_then(Pid::from_raw)
        .expect("one child");
    let number =
        std::fs::read_to_string(format!("/proc/{}/status", own.as_raw_nonzero())).expect("its status");
    let number = number
        .lines()
        .find(|line| line.starts_with("NSpid:"))
        .expect("its numbers");
    assert!(number.ends_with("\t1"), "{number}");
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    client.write(0, &block(0, 1)).expect("a write");
    client.flush().expect("a flush");
    drop(client);
    kill_process(own, Signal::TERM).expect("our own grandchild");
    assert!(daemon.ended_within(LIMIT).success(), "{}", daemon.said());
    let content = std::fs::read(scratch.path("vm1.raw")).expect("the image");
    assert!(content[..BLOCK] == block(0, 1));
}

#[test]
fn disk_of_20_tib_is_served_to_its_last_sector() {
    let scratch = Scratch::new();
    // Few filesystems have files as large: of two halves, most have.
    let half = BYTES_20_TIB / 2;
    for name in ["a.raw", "b.raw"] {
        let file = File::create(scratch.path(name)).expect("a file");
        if let Err(error) = file.set_len(half) {
            blkmq_testkit::skip(&format!("no file of 10 TiB can be made: {error}"));
            return;
        }
    }
    let [a, b] = ["a", "b"].map(|name| format!("name={name},file={}", scratch.word(&format!("{name}.raw"))));
    let daemon = Daemon::serve(&scratch, &[&a, &b, "name=vm1,linear=a+b"]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    assert_eq!(client.size(), BYTES_20_TIB);
    for at in [0, half - 512, half, BYTES_20_TIB - 512] {
        let data = vec![(at >> 9) as u8 | 1; 512];
        client.write(at, &data).expect("a write");
        assert!(client.read(at, 512).expect("a read") == data, "at {at}");
    }
    assert!(client.read(BYTES_20_TIB, 512).is_err());
    client.flush().expect("a flush");
    if installed(&["nbdinfo"]) {
        let said = run("nbdinfo", &["--size", &daemon.uri("vm1")]);
        assert_eq!(said.stdout.trim(), BYTES_20_TIB.to_string());
    }
    daemon.stop();
    let mut last = [0; 512];
    let file = File::open(scratch.path("b.raw")).expect("the file");
    file.read_exact_at(&mut last, half - 512).expect("its end");
    assert!(
        last.iter()
            .all(|byte| *byte == ((BYTES_20_TIB - 512) >> 9) as u8 | 1)
    );
}

#[test]
fn file_of_an_odd_size_is_served_read_only_with_zeroes_at_its_end() {
    let scratch = Scratch::new();
    let mut content: Vec<u8> = (0..70_001).map(|at| at as u8 | 1).collect();
    std::fs::write(scratch.path("vm1.raw"), &content).expect("an image");
    let disk = format!("name=vm1,file={},ro=on", scratch.word("vm1.raw"));
    let daemon = Daemon::serve(&scratch, &[&disk]);
    content.resize(content.len().next_multiple_of(512), 0);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    assert_eq!(client.size(), content.len() as u64);
    assert!(client.read(0, content.len()).expect("a read") == content);
    let last = content.len() - 512;
    assert!(client.read(last as u64, 512).expect("a read") == content[last..]);
    if installed(&["nbdcopy", "nbdinfo"]) {
        let copy = scratch.word("copy.raw");
        run("nbdcopy", &[&daemon.uri("vm1"), &copy]);
        assert!(std::fs::read(copy).expect("the copy") == content);
    }
    daemon.stop();
}

#[test]
fn block_device_that_has_grown_is_served_to_its_new_end() {
    if !installed(&["losetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.image("below.raw", 8 << 20);
    let said = try_run("losetup", &["--find", "--show", &image]);
    if !said.success {
        blkmq_testkit::skip(&format!("no loop device: {}", said.stderr));
        return;
    }
    let device = Loop(said.stdout.trim().to_owned());
    let daemon = Daemon::serve(&scratch, &[&format!("name=vm1,file={}", device.0)]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    assert_eq!(client.size(), 8 << 20);
    scratch.image("below.raw", 16 << 20);
    run("losetup", &["--set-capacity", &device.0]);
    daemon.signal(Signal::HUP);
    let begun = Instant::now();
    let mut later = loop {
        let later = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
        if later.size() == 16 << 20 {
            break later;
        }
        assert!(begun.elapsed() < LIMIT, "{}", daemon.said());
        std::thread::sleep(Duration::from_millis(20));
    };
    later
        .write((16 << 20) - BLOCK as u64, &block(1, 1))
        .expect("a write at the new end");
    client
        .write(0, &block(0, 1))
        .expect("the client of before goes on");
    daemon.stop();
}

#[test]
fn map_of_a_disk_with_hundreds_of_extents_is_that_of_its_file() {
    if !installed(&["nbdinfo"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.image("vm1.raw", EXTENTS * 2 * EXTENT);
    let file = File::options().write(true).open(&image).expect("the image");
    for number in 0..EXTENTS {
        let data = vec![1; EXTENT as usize];
        file.write_all_at(&data, (2 * number + 1) * EXTENT)
            .expect("it takes data");
    }
    file.sync_all().expect("it is written");
    let daemon = Daemon::serve(&scratch, &[&format!("name=vm1,file={image}")]);
    let said = run("nbdinfo", &["--map", "--json", &daemon.uri("vm1")]);
    let map: Value = serde_json::from_str(&said.stdout).expect("JSON");
    let found: Vec<_> = map.as_array().expect("a list").iter().map(extent).collect();
    let expected = (0..2 * EXTENTS).map(|number| (number * EXTENT, EXTENT, number % 2 == 1));
    assert_eq!(found, expected.collect::<Vec<_>>());
    daemon.stop();
}

/// Where an extent begins, how long it is, and whether it is data.
fn extent(extent: &Value) -> (u64, u64, bool) {
    let number = |key: &str| extent[key].as_u64().expect("a number");
    (number("offset"), number("length"), number("type") == 0)
}

#[test]
fn labels_of_metrics_escape_quotes_and_backslashes() {
    let scratch = Scratch::new();
    let nbd = format!("unix:{}", scratch.word("a\"b\\c.sock"));
    let at = format!("unix:{}", scratch.word("metrics.sock"));
    let words = ["--disk", "name=vm1,ram=1M", "--nbd", &nbd, "--metrics", &at];
    let daemon = Daemon::start(&words);
    let text = metrics::text(&scratch.path("metrics.sock"));
    let escaped = "a\\\"b\\\\c.sock\"}";
    let lines: Vec<_> = text.lines().filter(|line| line.contains("c.sock")).collect();
    assert!(
        !lines.is_empty() && lines.iter().all(|line| line.contains(escaped)),
        "{lines:?}"
    );
    daemon.stop();
}

/// A loop device, until it is dropped.
struct Loop(String);

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = try_run("losetup", &["--detach", &self.0]);
    }
}

const LIMIT: Duration = Duration::from_secs(20);
const BYTES_20_TIB: u64 = 20 << 40;
/// More than one answer has.
const EXTENTS: u64 = 300;
const EXTENT: u64 = 64 << 10;
