//! What has changed of a disk since a moment, as clients for backups ask for it over NBD, and as QEMU finds it in the image
//! afterwards. A bitmap that may lack a change is never one that can be used.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use blkmq_torture::mount::{Cache, Faults, Mount};
use rustix::process::Signal;
use serde_json::Value;

use super::snapshots::ctl;
use crate::block_status::{asks_for, question};
use crate::common::daemon::program;
use crate::common::nbd::Client;
use crate::common::tools::{installed, output_within, run};
use crate::common::{Daemon, Scratch};
use crate::upgrade::Stage;

#[test]
fn bitmap_shows_clients_what_was_written_and_nothing_else() {
    if !installed(&["qemu-img", "qemu-io", "nbdinfo"]) {
        return;
    }
    let scratch = Scratch::new();
    image(&scratch);
    let daemon = serve(&scratch);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    client.write(0, &[1; 200 << 10]).expect("a write");
    assert_eq!(ctl(&scratch, &["bitmap", "add", "vm1", "monday"]), "");
    assert_eq!(
        ctl(&scratch, &["bitmap", "add", "vm1", "fine", "--granularity", "4K"]),
        ""
    );
    assert!(changed(&daemon, "monday").is_empty());
    client.write(64 << 10, &[2; 4096]).expect("a write in place");
    client
        .write(5 << 20, &[2; 512])
        .expect("a write of a new cluster");
    run(
        "qemu-io",
        &[
            "-f",
            "raw",
            "-c",
            "write -z 8M 100k",
            "-c",
            "discard 10M 64k",
            &daemon.uri("vm1"),
        ],
    );
    const K: u64 = 1024;
    let coarse = [
        (64 * K, 64 * K),
        (5 << 20, 64 * K),
        (8 << 20, 128 * K),
        (10 << 20, 64 * K),
    ];
    assert_eq!(changed(&daemon, "monday"), coarse);
    let fine = [
        (64 * K, 4 * K),
        (5 << 20, 4 * K),
        (8 << 20, 100 * K),
        (10 << 20, 64 * K),
    ];
    assert_eq!(changed(&daemon, "fine"), fine);
    // QEMU's client, which has another name for it: what has changed is "no data" there.
    let target = format!(
        "driver=nbd,server.type=unix,server.path={},export=vm1,x-dirty-bitmap=qemu:dirty-bitmap:monday",
        scratch.word("nbd.sock")
    );
    let map = run("qemu-img", &["map", "--output=json", "--image-opts", &target]).stdout;
    assert_eq!(runs(&map, "start", |run| run["data"] == false), coarse);
    let listed = run("nbdinfo", &["--list", &uri(&scratch, "")]).stdout;
    for context in [
        "base:allocation",
        "qemu:dirty-bitmap:monday",
        "qemu:dirty-bitmap:fine",
    ] {
        assert!(listed.contains(context), "{listed}");
    }
    let listed = ctl(&scratch, &["bitmap", "list", "vm1"]);
    assert!(listed.contains("monday") && listed.contains("320K"), "{listed}");
    drop(client);
    daemon.stop();
    // What QEMU finds in the image is the same.
    run("qemu-img", &["check", "-f", "qcow2", &scratch.word("vm1.qcow2")]);
    assert_eq!(flags(&scratch, "monday"), ["auto"]);
    assert_eq!(found_by_qemu(&scratch, "fine"), fine);
    // And the next daemon goes on where this one has ended.
    let daemon = serve(&scratch);
    assert_eq!(changed(&daemon, "monday"), coarse);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    client.write(0, &[3; 512]).expect("a write");
    assert_eq!(changed(&daemon, "monday")[0], (0, 128 * K));
    drop(client);
    daemon.stop();
}

#[test]
fn bitmap_of_a_daemon_that_was_killed_is_in_use_and_no_client_finds_it() {
    if !installed(&["qemu-img", "nbdinfo"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = image(&scratch);
    run("qemu-img", &["bitmap", "--add", "-f", "qcow2", &image, "monday"]);
    let daemon = serve(&scratch);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    client.read(0, 4096).expect("a read");
    assert!(changed(&daemon, "monday").is_empty(), "it is QEMU's");
    client.write(0, &[1; 4096]).expect("a write");
    client.flush().expect("a flush");
    daemon.kill();
    drop(daemon);
    assert_eq!(flags(&scratch, "monday"), ["in-use", "auto"]);
    super::is_not_corrupt(&image, 0);
    let daemon = serve(&scratch);
    let contexts = run("nbdinfo", &["--json", &daemon.uri("vm1")]).stdout;
    assert!(!contexts.contains("monday"), "{contexts}");
    let listed = ctl(&scratch, &["bitmap", "list", "vm1"]);
    assert!(listed.contains("yes            -\n"), "{listed:?}");
    let listed = ctl(&scratch, &["--json", "bitmap", "list", "vm1"]);
    let listed: Value = serde_json::from_str(&listed).expect("it is JSON");
    assert_eq!(
        (&listed[0]["name"], &listed[0]["changed"]),
        (&Value::from("monday"), &Value::Null)
    );
    let refused = ctl(&scratch, &["bitmap", "add", "vm1", "monday"]);
    assert!(refused.contains("remove it first"), "{refused}");
    assert_eq!(ctl(&scratch, &["bitmap", "remove", "vm1", "monday"]), "");
    assert_eq!(ctl(&scratch, &["bitmap", "add", "vm1", "monday"]), "");
    assert!(changed(&daemon, "monday").is_empty());
    daemon.stop();
    assert_eq!(flags(&scratch, "monday"), ["auto"]);
    run("qemu-img", &["check", "-f", "qcow2", &image]);
}

/// Kills at moments of the end, when bitmaps are stored, and before: one that can be used afterwards has every change.
#[test]
fn bitmap_of_a_daemon_that_is_killed_while_it_ends_has_every_change_or_is_in_use() {
    if !installed(&["qemu-img", "nbdinfo"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = image(&scratch);
    kill_while_it_ends(&scratch, &image, |_| ());
}

/// What was not made durable is forgotten, or not, as chance has it: also bits that the header names.
#[test]
fn bitmap_that_is_stored_during_a_power_cut_has_every_change_or_is_in_use() {
    if !installed(&["qemu-img", "nbdinfo"]) {
        return;
    }
    let scratch = Scratch::new();
    let Some(mount) = forgetful(&scratch) else { return };
    let image = mount.image();
    kill_while_it_ends(&scratch, image.to_str().expect("it is text"), |round| {
        mount
            .wait_closed(Duration::from_secs(10))
            .expect("nobody has it open");
        mount.forget(round + 1);
    });
}

/// An image of 64 MiB on a filesystem that forgets; none, with a message, if nothing can be mounted.
fn forgetful(scratch: &Scratch) -> Option<Mount> {
    let dir = scratch.path("mount");
    let mount = std::fs::create_dir(&dir).and_then(|()| Mount::new(&dir, 32 << 20, Cache::Back));
    let mount = mount
        .inspect_err(|error| blkmq_testkit::skip(&format!("no FUSE here: {error}")))
        .ok()?;
    let made = scratch.word("made.qcow2");
    let words = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=4096"];
    run("qemu-img", &[&words[..], &[&made, "64M"]].concat());
    super::copy_into(Path::new(&made), &mount.image());
    Some(mount)
}

/// Writes in rounds and has the daemon end, and kills it meanwhile, but for every third round; `cut` does the rest.
fn kill_while_it_ends(scratch: &Scratch, image: &str, cut: impl Fn(u64)) {
    const ROUNDS: u64 = 18;
    let mut written = BTreeSet::new();
    let (mut outcomes, mut end_takes) = (BTreeMap::new(), Duration::ZERO);
    for round in 0..ROUNDS {
        let mut daemon = serve_image(scratch, image);
        let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
        let listed = ctl(scratch, &["--json", "bitmap", "list", "vm1"]);
        let listed: Value = serde_json::from_str(&listed).expect("it is JSON");
        if listed[0]["changed"].is_null() {
            ctl(scratch, &["bitmap", "remove", "vm1", "monday"]);
            let words = ["bitmap", "add", "vm1", "monday", "--granularity", "64K"];
            assert_eq!(ctl(scratch, &words), "");
            written.clear();
        }
        let found: BTreeSet<u64> = changed(&daemon, "monday")
            .into_iter()
            .flat_map(|(at, len)| at >> 16..(at + len) >> 16)
            .collect();
        assert_eq!(found, written, "round {round}");
        for step in 0..20 {
            let granule = (round * 20 + step) * 7919 % 1024;
            client.write(granule << 16, &[7; 4096]).expect("a write");
            written.insert(granule);
        }
        drop(client);
        let start = Instant::now();
        daemon.signal(Signal::TERM);
        match round % 3 {
            0 => {
                daemon.ended_within(Duration::from_secs(20));
                end_takes = start.elapsed();
            }
            _ => {
                std::thread::sleep(end_takes * round as u32 / ROUNDS as u32);
                daemon.kill();
            }
        }
        drop(daemon);
        cut(round);
        super::is_not_corrupt(image, round);
        *outcomes.entry(flags_in(image, "monday")).or_insert(0) += 1;
    }
    assert!(outcomes[&vec!["auto".to_owned()]] >= ROUNDS / 3, "{outcomes:?}");
    println!("flags after a kill, or the end in a third, of {end_takes:?}: {outcomes:?}");
}

/// On a drive whose syncs take long.
#[test]
fn bitmap_that_is_added_to_a_slow_image_holds_no_other_change_up() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let Some(mount) = forgetful(&scratch) else { return };
    let image = mount.image();
    let mut daemon = serve_image(&scratch, image.to_str().expect("it is text"));
    assert_eq!(ctl(&scratch, &["bitmap", "add", "vm1", "one"]), "");
    mount.set_faults(Faults {
        delay: Duration::from_millis(300),
        ..Faults::default()
    });
    let start = Instant::now();
    std::thread::scope(|scope| {
        let adding = scope.spawn(|| ctl(&scratch, &["bitmap", "add", "vm1", "two"]));
        std::thread::sleep(Duration::from_millis(300));
        let added = ctl(&scratch, &["add", "disk", "other", "null=1M"]);
        assert!(!adding.is_finished(), "it was not slow: no test");
        assert!(added.contains("other"), "{added}");
        // Its image stays meanwhile.
        let refused = ctl(&scratch, &["reset", "vm1"]);
        assert!(refused.contains("its bitmaps are being changed"), "{refused}");
        assert!(!adding.is_finished(), "{refused}");
        assert_eq!(adding.join().expect("it ends"), "");
    });
    println!("slow: {:?}", start.elapsed());
    // The end waits for one.
    std::thread::scope(|scope| {
        let removing = scope.spawn(|| ctl(&scratch, &["bitmap", "remove", "vm1", "one"]));
        std::thread::sleep(Duration::from_millis(300));
        assert!(!removing.is_finished(), "it was not slow: no test");
        daemon.signal(Signal::TERM);
        daemon.ended_within(Duration::from_secs(30));
    });
    assert_eq!(flags_in(&mount.image().to_string_lossy(), "two"), ["auto"]);
}

#[test]
fn bitmap_that_is_removed_while_a_client_has_it_costs_an_error_that_says_so() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    image(&scratch);
    let daemon = serve(&scratch);
    assert_eq!(ctl(&scratch, &["bitmap", "add", "vm1", "monday"]), "");
    let mut asking = asks_for(&scratch.path("nbd.sock"), "vm1", "qemu:dirty-bitmap:monday");
    assert_eq!(status(&mut asking, 1), Ok(vec![(1 << 20, 0)]));
    assert_eq!(ctl(&scratch, &["bitmap", "remove", "vm1", "monday"]), "");
    let error = status(&mut asking, 2).expect_err("it is gone");
    assert!(
        error.contains("bitmap monday: there is no bitmap of that name"),
        "{error}"
    );
    let refused = ctl(&scratch, &["bitmap", "remove", "vm1", "monday"]);
    assert!(refused.contains("no bitmap of that name"), "{refused}");
    let refused = ctl(&scratch, &["bitmap", "add", "vm1", "x", "--granularity", "100"]);
    assert!(refused.contains("power of two"), "{refused}");
    daemon.stop();
}

/// The commands of `docs/operate/images.md`.
#[test]
fn images_page_brings_a_backup_to_the_state_of_a_snapshot() {
    if !installed(&["qemu-img", "nbdinfo", "bash"]) {
        return;
    }
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operate/images.md");
    let page = std::fs::read_to_string(page).expect("the page is there");
    let (_, section) = page
        .split_once("## Incremental backups")
        .expect("it has the section");
    let (section, _) = section.split_once("\n## ").expect("another one follows");
    let blocks: Vec<&str> = section
        .split("```sh\n")
        .skip(1)
        .filter_map(|rest| rest.split("```").next())
        .collect();
    let [full, incremental] = blocks[..] else {
        panic!("{blocks:?}")
    };
    let scratch = Scratch::new();
    let image = image(&scratch);
    let daemon = serve(&scratch);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    for at in 0..8 {
        client
            .write(at << 20, &[at as u8 + 1; 300 << 10])
            .expect("a write");
    }
    commands(&scratch, full);
    client.write(3 << 20, &[99; 4096]).expect("a write");
    client
        .write(40 << 20, &[98; 200 << 10])
        .expect("a write of new clusters");
    // What is between is not copied: so it is seen that the rest is not, either.
    let backup = std::fs::OpenOptions::new()
        .write(true)
        .open(scratch.path("backup.raw"))
        .expect("there is a backup");
    backup.write_all_at(&[77; 4096], 6 << 20).expect("a mark");
    commands(&scratch, incremental);
    client.write(0, &[97; 4096]).expect("not in the backup");
    let tuesday = scratch.word("tuesday.raw");
    run(
        "qemu-img",
        &[
            "convert",
            "-U",
            "-f",
            "qcow2",
            &scratch.word("tuesday.qcow2"),
            &tuesday,
        ],
    );
    let mut wanted = std::fs::read(&tuesday).expect("a copy");
    assert_eq!((wanted[3 << 20], wanted[40 << 20], wanted[0]), (99, 98, 1));
    wanted[6 << 20..][..4096].fill(77);
    assert!(std::fs::read(scratch.path("backup.raw")).expect("the backup") == wanted);
    // A flat disk needs no snapshot, and what has changed of it stays what it was.
    assert_eq!(changed_as(&daemon, "vm1", "changes"), [(0, 64 << 10)]);
    let said = ctl(&scratch, &["flatten", "vm1"]);
    let info = run("qemu-img", &["info", "-U", "-f", "qcow2", &image]).stdout;
    assert!(!info.contains("backing file"), "{said}\n{info}");
    assert_eq!(changed_as(&daemon, "vm1", "changes"), [(0, 64 << 10)]);
    drop(client);
    daemon.stop();
    assert_eq!(flags(&scratch, "changes"), ["auto"]);
    run("qemu-img", &["check", "-f", "qcow2", &image]);
}

/// Runs commands beside the daemon.
fn commands(scratch: &Scratch, commands: &str) {
    let bin = scratch.path("bin");
    if !bin.exists() {
        std::fs::create_dir(&bin).expect("a directory can be made");
        std::os::unix::fs::symlink(program(), bin.join("blkmq")).expect("a link can be made");
        std::fs::create_dir(scratch.path("blkmq")).expect("a directory can be made");
        let control = scratch.path("control.sock");
        std::os::unix::fs::symlink(control, scratch.path("blkmq/control.sock")).expect("a link can be made");
    }
    let path = std::env::var("PATH").unwrap_or_default();
    let mut bash = std::process::Command::new("timeout");
    bash.args(["60", "bash", "-e", "-o", "pipefail", "-c", commands])
        .current_dir(scratch.path("."))
        .env("XDG_RUNTIME_DIR", scratch.path("."))
        .env("PATH", format!("{}:{path}", bin.display()));
    let output = output_within(&mut bash, Duration::from_secs(90));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{commands}\n{errors}");
}

#[test]
fn bitmap_goes_over_to_a_daemon_that_takes_over_with_its_clients() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = image(&scratch);
    run("qemu-img", &["bitmap", "--add", "-f", "qcow2", &image, "monday"]);
    let stage = Stage::of(scratch, &[&format!("name=vm1,qcow2={image}")]);
    let daemon = stage.start();
    let mut asking = asks_for(&stage.socket(), "vm1", "qemu:dirty-bitmap:monday");
    let mut client = Client::connect(&stage.socket(), "vm1").expect("it is served");
    client.write(128 << 10, &[1; 4096]).expect("a write");
    let before = vec![(128 << 10, 0), (64 << 10, 1), (832 << 10, 0)];
    assert_eq!(status(&mut asking, 1), Ok(before.clone()));
    // The other daemon uses the image at once, and finds it as it stays.
    let (is_over, start) = (AtomicBool::new(false), Instant::now());
    let daemon = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) && start.elapsed() < Duration::from_secs(20) {
                client
                    .write(128 << 10, &[2; 4096])
                    .expect("a write over the upgrade");
            }
        });
        let daemon = stage.upgrade(daemon);
        is_over.store(true, Ordering::Relaxed);
        daemon
    });
    assert_eq!(status(&mut asking, 2), Ok(before));
    client.write(0, &[1; 4096]).expect("a write");
    let after = vec![(64 << 10, 1), (64 << 10, 0), (64 << 10, 1), (832 << 10, 0)];
    assert_eq!(status(&mut asking, 3), Ok(after));
    drop((client, asking));
    daemon.stop();
    assert_eq!(flags(&stage.scratch, "monday"), ["auto"]);
    assert_eq!(
        found_by_qemu(&stage.scratch, "monday"),
        [(0, 64 << 10), (128 << 10, 64 << 10)]
    );
    run("qemu-img", &["check", "-f", "qcow2", &image]);
}

/// Makes an image of 64 MiB.
fn image(scratch: &Scratch) -> String {
    let image = scratch.word("vm1.qcow2");
    run("qemu-img", &["create", "-q", "-f", "qcow2", &image, "64M"]);
    image
}

fn serve(scratch: &Scratch) -> Daemon {
    serve_image(scratch, &scratch.word("vm1.qcow2"))
}

fn serve_image(scratch: &Scratch, image: &str) -> Daemon {
    let disk = format!("name=vm1,qcow2={image}");
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let control = format!("unix:{}", scratch.word("control.sock"));
    Daemon::start(&["--disk", &disk, "--nbd", &nbd, "--control", &control])
}

fn uri(scratch: &Scratch, disk: &str) -> String {
    format!("nbd+unix:///{disk}?socket={}", scratch.word("nbd.sock"))
}

/// What a client of libnbd finds changed: first byte and length of each run.
fn changed(daemon: &Daemon, bitmap: &str) -> Vec<(u64, u64)> {
    changed_as(daemon, "vm1", bitmap)
}

fn changed_as(daemon: &Daemon, disk: &str, bitmap: &str) -> Vec<(u64, u64)> {
    let map = format!("--map=qemu:dirty-bitmap:{bitmap}");
    let said = run("nbdinfo", &[&map, "--json", &daemon.uri(disk)]).stdout;
    runs(&said, "offset", |run| run["type"] == 1)
}

/// What QEMU's own server finds changed in the image, which nobody serves.
fn found_by_qemu(scratch: &Scratch, bitmap: &str) -> Vec<(u64, u64)> {
    let (image, socket) = (scratch.word("vm1.qcow2"), scratch.word("qemu.sock"));
    let bitmap_word = format!("--bitmap={bitmap}");
    let mut server = std::process::Command::new("qemu-nbd")
        .args([
            "-r",
            "-f",
            "qcow2",
            "-k",
            &socket,
            "-x",
            "vm1",
            &bitmap_word,
            &image,
        ])
        .spawn()
        .expect("it is installed with qemu-img");
    let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while !scratch.path("qemu.sock").exists() && std::time::Instant::now() < end {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    // Without --persistent it ends with its first client.
    let opts = format!(
        "driver=nbd,server.type=unix,server.path={socket},export=vm1,x-dirty-bitmap=qemu:dirty-bitmap:{bitmap}"
    );
    let map = run("qemu-img", &["map", "--output=json", "--image-opts", &opts]).stdout;
    let _ = server.wait();
    runs(&map, "start", |run| run["data"] == false)
}

/// The runs of a map that are wanted, neighbours as one.
fn runs(map: &str, start: &str, is_wanted: impl Fn(&Value) -> bool) -> Vec<(u64, u64)> {
    let map: Value = serde_json::from_str(map).expect("it is JSON");
    let mut found: Vec<(u64, u64)> = Vec::new();
    for run in map
        .as_array()
        .expect("a list")
        .iter()
        .filter(|run| is_wanted(run))
    {
        let (at, len) = (
            run[start].as_u64().expect("a number"),
            run["length"].as_u64().expect("a number"),
        );
        match found.last_mut() {
            Some(last) if last.0 + last.1 == at => last.1 += len,
            _ => found.push((at, len)),
        }
    }
    found
}

/// What QEMU finds of a bitmap in the image: its flags.
fn flags(scratch: &Scratch, bitmap: &str) -> Vec<String> {
    flags_in(&scratch.word("vm1.qcow2"), bitmap)
}

fn flags_in(image: &str, bitmap: &str) -> Vec<String> {
    let info = run("qemu-img", &["info", "-U", "--output=json", "-f", "qcow2", image]).stdout;
    let info: Value = serde_json::from_str(&info).expect("it is JSON");
    let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().cloned();
    let found = bitmaps
        .into_iter()
        .flatten()
        .find(|found| found["name"] == bitmap);
    let flags = found.map(|found| found["flags"].as_array().cloned().unwrap_or_default());
    let flags = flags.into_iter().flatten();
    flags
        .map(|flag| flag.as_str().expect("a text").to_owned())
        .collect()
}

/// Asks for the status of the first MiB: the length and the flags of each run, or the error's text.
fn status(stream: &mut UnixStream, cookie: u64) -> Result<Vec<(u32, u32)>, String> {
    stream.write_all(&question(cookie, 1 << 20)).expect("a question");
    let mut head = [0; 20];
    stream.read_exact(&mut head).expect("a reply");
    let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().expect("four bytes"));
    let mut payload = vec![0; number(&head[16..]) as usize];
    stream.read_exact(&mut payload).expect("its rest");
    assert_eq!(head[4..6], [0, 1], "one chunk");
    match head[6..8] {
        [0, 5] => Ok(payload[4..]
            .chunks_exact(8)
            .map(|run| (number(&run[..4]), number(&run[4..])))
            // What goes on behind the range may be told.
            .scan(1 << 20, |left: &mut u32, (len, flags)| {
                let now = len.min(*left);
                *left -= now;
                (now > 0).then_some((now, flags))
            })
            .collect()),
        _ => Err(String::from_utf8_lossy(&payload[6..]).into_owned()),
    }
}
