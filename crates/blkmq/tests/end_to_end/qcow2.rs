//! Disks in qcow2 images keep what they are given: what QEMU's tools say of the images after kills and
//! power cuts in the middle of allocations, and what clients of many clones of one base see.

mod bitmaps;
mod commit;
mod conversions;
mod flatten;
mod handover;
mod jobs;
mod snapshots;

use std::path::Path;
use std::time::{Duration, Instant};

use blkmq_torture::mount::{Cache, Mount};

use crate::common::daemon::{program, serve_command};
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::{installed, output_within, run, try_run};
use crate::common::{Daemon, Scratch};
use crate::crash::{DISK_BYTES, History, write_until_killed};

/// On a base, with small clusters: most writes allocate and copy, and tables are many.
#[test]
fn image_that_was_written_during_kill_9_has_what_was_flushed_and_no_corruption() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    scratch.image("base.raw", DISK_BYTES);
    let image = scratch.word("vm1.qcow2");
    let base = ["-b", "base.raw", "-F", "raw", "-o", "cluster_size=16384"];
    run(
        "qemu-img",
        &[&["create", "-q", "-f", "qcow2"], &base[..], &[&image]].concat(),
    );
    let disk = format!("name=vm1,qcow2={image}");
    let mut history = History::new();
    for round in 0..kills() {
        let daemon = Daemon::serve(&scratch, &[&disk]);
        let time = Duration::from_millis(100 + 61 * (round % 8));
        write_until_killed(&scratch.path("nbd.sock"), &mut history, daemon, time);
        is_not_corrupt(&image, round);
        let daemon = Daemon::serve(&scratch, &[&disk]);
        history.check(&scratch.path("nbd.sock"), round);
        daemon.stop();
        is_not_corrupt(&image, round);
    }
    history.was_a_test();
}

/// What was not made durable is forgotten, or not, as chance has it: also tables that point to what was forgotten.
#[test]
fn image_that_was_written_during_power_cuts_has_what_was_flushed_and_no_corruption() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let dir = scratch.path("mount");
    let mount = std::fs::create_dir(&dir).and_then(|()| Mount::new(&dir, FORGETFUL_BYTES, Cache::Back));
    let mount = match mount {
        Ok(mount) => mount,
        Err(error) => return blkmq_testkit::skip(&format!("no FUSE here: {error}")),
    };
    let made = scratch.word("made.qcow2");
    let size = DISK_BYTES.to_string();
    run(
        "qemu-img",
        &[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            "cluster_size=4096",
            &made,
            &size,
        ],
    );
    let image = mount.image();
    copy_into(Path::new(&made), &image);
    let word = image.to_str().expect("it is text").to_owned();
    let disk = format!("name=vm1,qcow2={word}");
    let mut history = History::new();
    for round in 0..kills() {
        let daemon = Daemon::serve(&scratch, &[&disk]);
        let time = Duration::from_millis(100 + 61 * (round % 8));
        write_until_killed(&scratch.path("nbd.sock"), &mut history, daemon, time);
        mount
            .wait_closed(Duration::from_secs(10))
            .expect("nobody has it open");
        mount.forget(round + 1);
        is_not_corrupt(&word, round);
        let daemon = Daemon::serve(&scratch, &[&disk]);
        history.check(&scratch.path("nbd.sock"), round);
        daemon.stop();
    }
    history.was_a_test();
}

#[test]
fn clones_of_one_base_open_it_once_and_share_a_queue_with_raw_files() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let base = scratch.noisy_image("base.raw", 3 << 20, 7);
    let mut disks = vec![format!("name=raw,file={}", scratch.image("other.raw", 1 << 20))];
    for number in 0..CLONES {
        let image = scratch.word(&format!("vm{number}.qcow2"));
        run(
            "qemu-img",
            &["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &image],
        );
        disks.push(format!("name=vm{number},qcow2={image}"));
    }
    let daemon = Daemon::serve(&scratch, &disks.iter().map(String::as_str).collect::<Vec<_>>());
    let content = std::fs::read(&base).expect("the base");
    for number in 0..CLONES {
        let mut client =
            Client::connect(&scratch.path("nbd.sock"), &format!("vm{number}")).expect("it is served");
        client
            .write(number * BLOCK as u64, &block(number, 1))
            .expect("a write");
        let found = client.read(0, content.len()).expect("a read");
        let at = number as usize * BLOCK;
        assert!(
            found[at..at + BLOCK] == block(number, 1),
            "clone {number} lost its write"
        );
        assert!(
            found[..at] == content[..at] && found[at + BLOCK..] == content[at + BLOCK..],
            "clone {number}"
        );
    }
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", daemon.id())).expect("its descriptors");
    let links = descriptors
        .flatten()
        .filter_map(|entry| std::fs::read_link(entry.path()).ok());
    assert_eq!(
        links.filter(|link| link == Path::new(&base)).count(),
        1,
        "opens of the base"
    );
    // The base has readers, and no writer may come.
    let writer = try_run("qemu-io", &["-f", "raw", "-c", "write 0 512", &base]);
    assert!(!writer.success, "{}", writer.stdout);
    daemon.stop();
    assert!(
        std::fs::read(&base).expect("the base") == content,
        "the base was changed"
    );
    for number in 0..CLONES {
        run(
            "qemu-img",
            &[
                "check",
                "-f",
                "qcow2",
                &scratch.word(&format!("vm{number}.qcow2")),
            ],
        );
    }
}

/// What a guest writes into a raw disk is never taken for a format, and an image names no file elsewhere.
#[test]
fn images_that_name_files_elsewhere_are_refused_and_nothing_is_guessed() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("inside")).expect("a directory");
    scratch.image("secret.raw", 1 << 20);
    let image = scratch.word("inside/vm1.qcow2");
    let refused = |backing: &[&str], why: &str| {
        let words = [&["create", "-q", "-u", "-f", "qcow2"], backing, &[&image, "1M"]].concat();
        if !try_run("qemu-img", &words).success {
            // QEMU does not make such an image any more.
            return;
        }
        let disk = format!("name=vm1,qcow2={image}");
        let said = output_within(
            &mut serve_command(&["--check", "--disk", &disk]),
            Duration::from_secs(10),
        );
        let text = String::from_utf8_lossy(&said.stderr);
        assert!(
            !said.status.success() && text.contains(why),
            "{backing:?}: {text}"
        );
    };
    refused(&["-b", "../secret.raw", "-F", "raw"], "is not below");
    refused(&["-b", "nbd://127.0.0.1/x", "-F", "raw"], "it is an address");
    refused(
        &["-b", "json:{\"driver\":\"file\"}", "-F", "raw"],
        "it is an address",
    );
    refused(&["-b", "vm1.qcow2", "-F", "qcow2"], "in its own chain");
    // A header in a raw disk is data.
    let raw = scratch.word("guest.raw");
    std::fs::copy(scratch.path("inside/vm1.qcow2"), &raw).expect("a header");
    std::fs::OpenOptions::new()
        .write(true)
        .open(&raw)
        .and_then(|file| file.set_len(1 << 20))
        .expect("a size");
    let daemon = Daemon::serve(&scratch, &[&format!("name=vm1,file={raw}")]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    assert_eq!(
        (client.size(), &client.read(0, 512).expect("a read")[..4]),
        (1 << 20, &b"QFI\xfb"[..])
    );
    daemon.stop();
}

/// The commands of `docs/operate/images.md`, with fewer disks.
#[test]
fn images_page_leads_from_a_cloud_image_to_disks_on_it() {
    if !installed(&["qemu-img", "qemu-io", "bash"]) {
        return;
    }
    let scratch = Scratch::new();
    let raw = scratch.noisy_image("cloud.raw", 3 << 20, 5);
    let cloud = scratch.word("cloud.qcow2");
    run(
        "qemu-img",
        &["convert", "-c", "-f", "raw", "-O", "qcow2", &raw, &cloud],
    );
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operate/images.md");
    let page = std::fs::read_to_string(page).expect("the page is there");
    let (_, rest) = page.split_once("```sh\n").expect("it has commands");
    let (commands, _) = rest.split_once("```").expect("they end");
    assert!(
        commands.contains("seq 100"),
        "the page has no hundred disks any more"
    );
    let commands = format!(
        "trap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n{}",
        commands.replace("seq 100", "seq 5")
    );
    let bin = scratch.path("bin");
    std::fs::create_dir(&bin).expect("a directory can be made");
    std::os::unix::fs::symlink(program(), bin.join("blkmq")).expect("a link can be made");
    let mut bash = std::process::Command::new("timeout");
    bash.args(["60", "bash", "-e", "-c", &commands])
        .current_dir(scratch.path("."))
        .env(
            "PATH",
            format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default()),
        );
    let output = output_within(&mut bash, Duration::from_secs(90));
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{errors}");
    assert!(
        said.contains("wrote 1048576/1048576 bytes") && said.contains("on: cloud.qcow2 (qcow2)"),
        "{said}"
    );
    for number in 1..=5 {
        let image = scratch.word(&format!("vm{number}.qcow2"));
        let own = output_within(
            std::process::Command::new(program()).args(["image", "check", "--json", &image]),
            Duration::from_secs(10),
        );
        let found = String::from_utf8_lossy(&own.stdout);
        assert!(
            own.status.success() && found.contains("\"errors\":0,\"leaks\":0"),
            "{found}"
        );
        run("qemu-img", &["check", "-f", "qcow2", &image]);
    }
}

/// QEMU finds no error in an image, except lost clusters.
fn is_not_corrupt(image: &str, round: u64) {
    // The kernel may hold the lock of a daemon that was killed for a moment.
    let end = Instant::now() + Duration::from_secs(10);
    let said = loop {
        let said = try_run("qemu-img", &["check", "-f", "qcow2", image]);
        if !said.stderr.contains("Failed to lock") || Instant::now() > end {
            break said;
        }
    };
    let text = format!("{}{}", said.stdout, said.stderr);
    let is_leaking = text.contains("leaked clusters were found") && !text.contains("ERROR");
    assert!(said.success || is_leaking, "round {round}: {text}");
}

/// Copies a file into one that keeps its size, and makes that durable.
fn copy_into(from: &Path, to: &Path) {
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(to)
        .expect("the file is there");
    let bytes = std::fs::read(from).expect("it was made");
    std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0).expect("there is room");
    file.sync_all().expect("a sync");
}

/// `BLKMQ_KILLS=200 cargo test -p blkmq --release --test end_to_end qcow2::image_that` is the long form.
fn kills() -> u64 {
    std::env::var("BLKMQ_KILLS").map_or(4, |kills| kills.parse().expect("a number"))
}

const CLONES: u64 = 12;
const FORGETFUL_BYTES: usize = 16 << 20;
