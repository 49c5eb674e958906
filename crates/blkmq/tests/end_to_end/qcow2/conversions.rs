//! `blkmq image convert`: QEMU finds the same disk in the copy, holes stay holes, and nothing is left of a copy that was
//! given up or refused.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::common::daemon::{program, wait_within};
use crate::common::tools::{installed, output_within, run};
use crate::common::{Daemon, Scratch};

#[test]
fn converted_disks_are_the_same_and_chains_become_one_sparse_image() {
    if !installed(&["qemu-img", "qemu-io"]) {
        return;
    }
    let scratch = Scratch::new();
    let raw = scratch.noisy_image("base.raw", 3 << 20, 5);
    let (base, top) = (scratch.word("base.qcow2"), scratch.word("top.qcow2"));
    run(
        "qemu-img",
        &["convert", "-c", "-f", "raw", "-O", "qcow2", &raw, &base],
    );
    let words = [
        "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &base, &top, "1G",
    ];
    run("qemu-img", &words);
    // Among them zeroes over data, and data that no cluster has alone.
    for command in ["write -P 7 100k 200k", "write -z 1M 300k", "write -P 9 700M 512"] {
        run("qemu-io", &["-f", "qcow2", "-c", command, &top]);
    }
    for (from, to, how) in [
        (&top, "flat.qcow2", &[][..]),
        (&top, "small.qcow2", &["--cluster", "4K"]),
        (&top, "large.qcow2", &["--cluster", "2M"]),
        (&top, "flat.raw", &[]),
        (&raw, "other.qcow2", &["--from", "raw"]),
    ] {
        let to = scratch.word(to);
        let said = convert(&[&[from, to.as_str()], how].concat());
        assert!(said.contains("a disk of"), "{to}: {said}");
        let format = |path: &str| path.rsplit_once('.').expect("an end").1.to_owned();
        let (one, other) = (format(from), format(&to));
        run("qemu-img", &["compare", "-f", &one, "-F", &other, from, &to]);
        if other == "qcow2" {
            run("qemu-img", &["check", "-f", "qcow2", &to]);
        }
        // 3 MiB of data, in few clusters even if they are large, and tables: nothing for what was never written.
        let allocated = std::fs::metadata(&to).expect("the copy").blocks() * 512;
        assert!(
            allocated < 24 << 20,
            "{to}: {allocated} bytes of a disk with 3 MiB of data"
        );
    }
    // Back again, over a copy that nobody has.
    let said = convert(&[&scratch.word("small.qcow2"), &scratch.word("flat.raw")]);
    assert!(said.contains("--force"), "{said}");
    let said = convert(&["--force", &scratch.word("small.qcow2"), &scratch.word("flat.raw")]);
    assert!(said.contains("a disk of 1073741824 bytes"), "{said}");
    let flat = scratch.word("flat.raw");
    run("qemu-img", &["compare", "-f", "qcow2", "-F", "raw", &top, &flat]);
}

#[test]
fn conversions_that_are_refused_or_given_up_leave_nothing_and_change_nothing() {
    let scratch = Scratch::new();
    let raw = scratch.word("disk.raw");
    std::fs::write(&raw, vec![7; 256 << 20]).expect("there is room");
    let (image, other) = (scratch.word("disk.qcow2"), scratch.word("disk"));
    let said = convert(&[&raw, &other]);
    assert!(said.contains("give --to raw or --to qcow2"), "{said}");
    // At a signal.
    let mut command = Command::new(program());
    command.args(["image", "convert", "--progress", &raw, &image]);
    let mut child = command
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("it is there");
    let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
    let first = lines.next().expect("progress").expect("text");
    assert!(
        first.contains("% of 268435456 bytes") && !Path::new(&image).exists(),
        "{first}"
    );
    kill_process(Pid::from_child(&child), Signal::INT).expect("a signal");
    let rest: Vec<String> = lines.map_while(Result::ok).collect();
    let status = wait_within(&mut child, Duration::from_secs(20)).expect("it ends");
    assert!(
        !status.success() && rest.concat().contains("nothing was made"),
        "{rest:?}"
    );
    assert!(!Path::new(&image).exists() && !scratch.path("disk.qcow2.blkmq-new").exists());
    // What a killed one has left is not taken for another's.
    std::fs::write(scratch.path("disk.qcow2.blkmq-new"), b"half").expect("a file");
    let said = convert(&[&raw, &image]);
    assert!(said.contains("was killed; remove it"), "{said}");
    // Neither of nor over a disk that somebody writes.
    let served = scratch.image("served.raw", 1 << 20);
    let daemon = Daemon::serve(&scratch, &[&format!("name=vm1,file={served}")]);
    for words in [
        &[served.as_str(), &scratch.word("copy.qcow2")][..],
        &["--force", &raw, &served],
    ] {
        let said = convert(words);
        assert!(said.contains("in use by blkmq"), "{said}");
    }
    assert!(!scratch.path("copy.qcow2").exists());
    daemon.stop();
}

fn convert(words: &[&str]) -> String {
    let mut command = Command::new(program());
    let output = output_within(
        command.args(["image", "convert"]).args(words),
        Duration::from_secs(60),
    );
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}
